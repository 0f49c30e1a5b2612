"""A course in a box: assignments made from the lessons, strange submissions, marks, feedback, CSV."""

import csv
import json
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat
import pytest
from typer.testing import CliRunner

pytest.importorskip("nbgrader", reason="the extra `course` is not installed")

from course_submissions import NAME, STRANGE, TEN, Simulated, answered, right, write  # noqa: E402

from minillm.cli_course import course as commands  # noqa: E402
from minillm.course import circle, marking  # noqa: E402
from minillm.course.assignment import HIDDEN_ID, POINTS, Stubs, assignments, function_points, master  # noqa: E402
from minillm.course.door import named, python_cells, students, submissions  # noqa: E402
from minillm.course.gradebook import Row, harmless, points_of  # noqa: E402
from minillm.course.grading import Mark, Marks  # noqa: E402
from minillm.course.points import earned, split  # noqa: E402
from minillm.course.repair import filled, placed, written  # noqa: E402
from minillm.errors import InputError  # noqa: E402
from minillm.lab.build import LESSONS, solutions, student  # noqa: E402
from minillm.lab.checking import properties  # noqa: E402

SEED = 20270131
ALL = assignments()
each = pytest.mark.parametrize("assignment", ALL, ids=[one.id for one in ALL])


def quiet(text: str) -> None:
    pass


# ---- the whole circle, once


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course nobody has handed in to; tests work on copies."""
    folder = tmp_path_factory.mktemp("course") / "autumn"
    circle.make(folder, SEED, ["00"], quiet)
    return folder


@pytest.fixture(scope="module")
def made(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> circle.Course:
    folder = shutil.copytree(pristine, tmp_path_factory.mktemp("copy") / "autumn")
    with (folder / circle.CONFIG).open("a") as config:
        config.write("c.GradeByProperties.each = 2.0\n")  # seconds: an endless loop need not take long here
    return circle.Course(folder)


@pytest.fixture(scope="module")
def release(made: circle.Course) -> Any:
    return made.release(ALL[0])


@pytest.fixture(scope="module")
def graded(made: circle.Course, release: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    handed_in = tmp_path_factory.mktemp("submissions") / "all"
    handed_in.mkdir()
    for one in TEN + STRANGE:
        one.build(handed_in / one.student, release)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = circle.grade(made.folder, handed_in, due="2027-02-01 07:00", jobs=2, tell=quiet)
    return {row.student_id: row for row in found}


@pytest.mark.parametrize("one", TEN + STRANGE, ids=[one.student for one in TEN + STRANGE])
def test_every_submission_gets_the_mark_that_it_deserves(one: Simulated, graded: dict[str, Row]):
    row = graded[one.student]
    assert (row.public, row.hidden, row.written) == (one.public, one.hidden, 0)
    assert row.status == one.status and one.says in row.reason, row
    assert row.score == (0 if one.status == "late" else one.public + one.hidden) and row.max_score == 20
    assert bool(row.pending) == one.to_mark


def feedback_of(made: circle.Course, student_id: str) -> str:
    import html

    text = (made.folder / "feedback" / student_id / NAME / f"{NAME}.html").read_text("utf-8")
    return html.unescape(re.sub(r"<[^>]+>", "", text))


@pytest.mark.parametrize("one", TEN + STRANGE, ids=[one.student for one in TEN + STRANGE])
def test_every_student_gets_feedback_with_the_reason(one: Simulated, made: circle.Course, graded: dict[str, Row]):
    if one.status == "missing":
        assert not (made.folder / "feedback" / one.student).exists()
        return
    text = feedback_of(made, one.student)
    assert f"(Score: {graded[one.student].score:g}" in text.replace(".0 /", " /")
    if one.status == "refused":
        assert one.says in text and "No points." in text


def test_feedback_says_why_and_never_shows_hidden_inputs(made: circle.Course, graded: dict[str, Row]):
    wrong = feedback_of(made, "04-added-up")
    assert "seconds where moving takes 8 s and multiplying 2 s: expected 8, got 10" in wrong
    assert "hint: a floor is the least time" in wrong
    known = feedback_of(made, "09-hard-coded")
    assert "holds on the public inputs, not on others: floor_seconds: moving and multiplying overlap" in known
    kept = json.loads((made.folder / "marks" / "09-hard-coded" / f"{NAME}.json").read_text())
    hidden = [mark["hidden_reason"] for mark in kept["marks"] if not mark["hidden"]]
    assert len(hidden) == 3 and all("raised KeyError: '(" in reason for reason in hidden)  # the teacher sees inputs
    assert "raised KeyError" not in known and not any(reason in known for reason in hidden)
    assert str(SEED) not in known


def test_the_csv_has_every_row_with_its_parts_and_reason(made: circle.Course, graded: dict[str, Row]):
    with (made.folder / "grades.csv").open(encoding="utf-8", newline="") as file:
        lines = {line["student_id"]: line for line in csv.DictReader(file)}
    assert lines.keys() == graded.keys()
    for one in TEN + STRANGE:
        line = lines[one.student]
        assert (float(line["public"]), float(line["hidden"])) == (one.public, one.hidden)
        assert one.says in line["reason"] and line["status"] == one.status
    assert lines["01-perfect"]["pending"].endswith("by lessons/instructor/rubrics/00.md")


def test_marks_for_what_is_written_complete_the_circle(made: circle.Course, graded: dict[str, Row], tmp_path: Path):
    with (made.folder / "written.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["student_id"] for line in lines} == {row.student_id for row in graded.values() if row.pending}
    assert all(line["answer"].startswith("A step reads every weight once") for line in lines)
    points = {"01-perfect": "3", "04-added-up": "1.5", "22-late": "3"}
    filled_in = tmp_path / "marks.csv"
    with filled_in.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        for line in lines:
            writer.writerow(line | {"points": points.get(line["student_id"], ""), "comment": "Good & short."})
    found = {row.student_id: row for row in circle.grade(made.folder, None, written=filled_in, tell=quiet)}
    assert [found[name].score for name in points] == [20, 17, 0]
    assert not found["01-perfect"].pending and found["05-every-text"].pending
    assert "Good & short." in feedback_of(made, "01-perfect")
    assert "0 until then" not in feedback_of(made, "01-perfect")


@pytest.mark.parametrize(
    "text, says",
    [
        ("assignment,student_id\n00_tour,01-perfect\n", "no column points"),
        ("assignment,student_id,points\n00_tour,nobody,3\n", "'nobody' was not graded"),
        (
            "assignment,student_id,points\n00_tour,01-perfect,4\n",
            "row 1 (01-perfect): the points are '4'; they must be a number from 0 to 3",
        ),
        ("assignment,student_id,points\n00_tour,02-empty,1\n00_tour,01-perfect,nan\n", "must be a number from 0 to 3"),
    ],
)
def test_wrong_marks_are_told_and_change_nothing(text: str, says: str, made: circle.Course, graded, tmp_path: Path):
    path = tmp_path / "marks.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(says)):
        circle.grade(made.folder, None, written=path, tell=quiet)
    assert all(row.written == 0 for row in circle.grade(made.folder, None, tell=quiet) if row.student_id == "02-empty")


# ---- a circle whose grader is quick


@pytest.fixture
def course(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> circle.Course:
    def grade(path: Path, lesson: str, seed: int, **limits: float) -> Marks:
        calls.append(path)
        text = path.read_text("utf-8")
        if "fails" in path.parts[-3]:
            raise RuntimeError("the grader itself")
        right = {prop.function: f'"task 00.{prop.function}: yours' not in text for prop in properties(lesson)}
        marks = [
            Mark(p.function, p.says, p.hint, right[p.function], right[p.function], "", "") for p in properties(lesson)
        ]
        return Marks(lesson, path.name, seed, marks)

    calls: list[Path] = []
    monkeypatch.setattr(marking, "grade", grade)
    found = circle.Course(shutil.copytree(pristine, tmp_path / "course"))
    found.calls = calls  # type: ignore[attr-defined]
    return found


def test_what_did_not_change_is_not_graded_again(course: Any, tmp_path: Path):
    release, handed_in = course.release(ALL[0]), tmp_path / "in"
    write(handed_in / "ada", answered(release, **right()))
    write(handed_in / "bob", release)
    [ada, bob] = circle.grade(course.folder, handed_in, tell=quiet)
    assert (ada.score, bob.score, len(course.calls)) == (17, 0, 2)
    write(handed_in / "bob", answered(release, **right("balance_batch")))
    [ada, bob] = circle.grade(course.folder, handed_in, tell=quiet)
    assert (ada.score, bob.score, len(course.calls)) == (17, 2.75, 3)
    circle.grade(course.folder, handed_in, again=True, tell=quiet)
    assert len(course.calls) == 5


def test_marks_that_stand_in_the_file_survive(course: Any, tmp_path: Path):
    def typed(**points: str) -> None:
        lines = marks()
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, next(iter(lines.values())))
            writer.writeheader()
            for student_id, line in lines.items():
                writer.writerow(line | ({"points": points[student_id]} if student_id in points else {}))

    def marks() -> dict[str, dict[str, str]]:
        with path.open(encoding="utf-8", newline="") as file:
            return {line["student_id"]: line for line in csv.DictReader(file)}

    path, handed_in = course.folder / "written.csv", tmp_path / "in"
    for name in ("ada", "bob"):
        write(handed_in / name, answered(course.release(ALL[0]), **right()))
    circle.grade(course.folder, handed_in, tell=quiet)
    typed(ada="2.5")
    circle.grade(course.folder, handed_in, tell=quiet)
    assert {name: line["points"] for name, line in marks().items()} == {"ada": "2.5", "bob": ""}
    [ada, bob] = circle.grade(course.folder, None, written=path, tell=quiet)
    assert (ada.score, bob.pending != "") == (19.5, True)
    assert {name: line["points"] for name, line in marks().items()} == {"ada": "2.5", "bob": ""}
    other = shutil.copy(path, tmp_path / "other.csv")
    other.write_text(other.read_text("utf-8").replace("ada,2.5", "ada,1"), "utf-8")
    circle.grade(course.folder, None, written=other, tell=quiet)
    assert marks()["ada"]["points"] == "1"  # corrected, by another file
    path.write_bytes(b"\xff\xfe")
    circle.grade(course.folder, None, tell=quiet)
    assert (course.folder / "written-unreadable.csv").read_bytes() == b"\xff\xfe" and marks()["ada"]["points"] == "1"


def test_a_time_that_comes_later_is_read_and_none_is_told(course: Any, tmp_path: Path):
    told: list[str] = []
    write(tmp_path / "in" / "ada", answered(course.release(ALL[0]), **right()))
    [ada] = circle.grade(course.folder, tmp_path / "in", due="2027-01-01", tell=told.append)
    assert ada.status == "graded" and any("1 submissions have no time: they count as in time" in each for each in told)
    (tmp_path / "in" / "ada" / "timestamp.txt").write_text("2027-01-02 10:00 UTC")
    [ada] = circle.grade(course.folder, tmp_path / "in", tell=quiet)
    assert (ada.status, ada.score, len(course.calls)) == ("late", 0, 2)
    circle.grade(course.folder, tmp_path / "in", tell=quiet)
    assert len(course.calls) == 2


def test_a_failure_of_the_grader_is_told_and_the_run_goes_on(course: Any, tmp_path: Path):
    release, handed_in = course.release(ALL[0]), tmp_path / "in"
    for name in ("ada", "fails", "zoe"):
        write(handed_in / name, answered(release, **right()))
    rows = {row.student_id: row for row in circle.grade(course.folder, handed_in, tell=quiet)}
    assert [rows[name].status for name in ("ada", "fails", "zoe")] == ["graded", "failed", "graded"]
    assert "the grader itself" in (course.folder / "failures.log").read_text()


def test_a_student_who_cannot_be_collected_does_not_stop_the_others(course: Any, tmp_path: Path, monkeypatch):
    for name in ("ada", "bob"):
        write(tmp_path / "in" / name, answered(course.release(ALL[0]), **right()))

    def collect(paths: Any, releases: Any) -> Any:
        if paths[0].name == "ada":
            raise RecursionError("the door itself")
        return submissions(paths, releases)

    monkeypatch.setattr(circle, "submissions", collect)
    rows = {row.student_id: row for row in circle.grade(course.folder, tmp_path / "in", tell=quiet)}
    assert (rows["ada"].status, rows["bob"].score) == ("missing", 17)
    assert rows["ada"].reason == "nothing that can be graded; collecting itself failed; see failures.log"
    assert "the door itself" in (course.folder / "failures.log").read_text()


def test_what_cannot_be_used_is_told_in_the_reason(course: Any, tmp_path: Path):
    write(tmp_path / "in" / "ada", answered(course.release(ALL[0]), **right()))
    (tmp_path / "in" / "ada" / "timestamp.txt").write_text("yesterday evening, I think")
    (tmp_path / "in" / "bob").mkdir()
    (tmp_path / "in" / "bob" / "timestamp.txt").write_text("soon")
    [ada, bob] = circle.grade(course.folder, tmp_path / "in", due="2027-01-01", tell=quiet)
    assert (ada.status, ada.score, ada.timestamp) == ("graded", 17, "")
    assert "nothing that can be graded; timestamp.txt: it does not begin with a time" in bob.reason


def test_a_folder_with_submissions_keeps_its_seed_and_its_cells(course: Any, tmp_path: Path, monkeypatch):
    write(tmp_path / "in" / "ada", course.release(ALL[0]))
    circle.grade(course.folder, tmp_path / "in", tell=quiet)
    assert circle.make(course.folder, None, ["00"], quiet).seed == SEED
    assert circle.make(course.folder, 2, ["00"], quiet).seed == 2
    monkeypatch.setattr(circle, "master", without_balance_batch)
    with pytest.raises(InputError, match="has submissions, and its cells have changed"):
        circle.make(course.folder, None, ["00"], quiet)


def without_balance_batch(assignment: Any) -> Any:
    notebook = master(assignment)
    notebook.cells = [cell for cell in notebook.cells if not cell["id"].startswith("00-balance-batch")]
    return notebook


# ---- releases


@each
def test_a_release_is_the_students_notebook_with_graded_cells_besides(assignment: Any):
    notebook, _ = Stubs().preprocess(master(assignment), {"nbgrader": {"notebook": assignment.name}})
    graded = [cell for cell in notebook.cells if cell["id"].endswith((POINTS, HIDDEN_ID))]
    rest = [(cell["id"], cell.source) for cell in notebook.cells if cell not in graded]
    assert rest == [(cell["id"], cell.source) for cell in student(assignment.source).cells]
    assert len(graded) == len({prop.function for prop in properties(assignment.id)}) + 1
    assert all(cell.source.startswith("# Graded: ") and cell.source.count("\n") == 0 for cell in graded)


@each
def test_a_release_holds_no_solution_and_no_hidden_test(assignment: Any):
    notebook, _ = Stubs().preprocess(master(assignment), {"nbgrader": {"notebook": assignment.name}})
    text = nbformat.writes(notebook)
    given = {line.strip() for cell in notebook.cells for line in cell.source.splitlines()}
    assert not given & set(solutions(assignment.source))
    assert not re.search(r"(BEGIN|END) SOLUTION|HIDDEN TESTS|variant\(", text)


@each
def test_the_points_are_twenty_and_every_answer_can_be_graded(assignment: Any):
    cells = [cell.metadata.nbgrader for cell in master(assignment).cells if "nbgrader" in cell.metadata]
    assert sum(cell.get("points", 0) for cell in cells) == 20
    assert len({cell.grade_id for cell in cells}) == len(cells)
    assert Counter((cell.grade, cell.solution) for cell in cells)[True, True] == 1  # what is written
    assert all(points >= 0.25 for points in function_points(assignment).values())


def test_nbgraders_release_is_the_same_and_the_seed_is_not_in_it(made: circle.Course, release: Any):
    notebook, _ = Stubs().preprocess(master(ALL[0]), {"nbgrader": {"notebook": NAME}})
    assert [(c["id"], c.source) for c in release.cells] == [(c["id"], c.source) for c in notebook.cells]
    assert str(SEED) in (made.folder / circle.CONFIG).read_text()
    assert (made.folder / ".gitignore").read_text() == "*\n"
    assert (made.folder / "release" / "AGENTS.md").is_file()  # as `make student` has it
    for path in (made.folder / "release").rglob("*"):
        assert path.is_dir() or str(SEED) not in path.read_text("utf-8")


# ---- points


def test_points_are_split_in_quarters_by_the_largest_remainder():
    assert split(12, {"a": 2, "b": 3, "c": 6, "d": 5}) == {"a": 1.5, "b": 2.25, "c": 4.5, "d": 3.75}
    assert split(1, {"a": 1, "b": 1, "c": 1}) == {"a": 0.5, "b": 0.25, "c": 0.25}
    assert split(5, {"only": 7}) == {"only": 5}


def test_partial_credit_is_rounded_down_and_whole_only_for_all():
    assert [earned(4.5, held, 6) for held in range(7)] == [0, 0.75, 1.5, 2.25, 3, 3.75, 4.5]
    assert [earned(5, held, 12) for held in (0, 6, 10, 11, 12)] == [0, 2.5, 4, 4.5, 5]


def test_what_waits_for_another_function_counts():
    marks = [Mark("f", "one", "h", False, False, "mend g first", "", carried=True, hidden_carried=True)]
    assert marking.public(marks, 2.0)[1] == 2.0
    assert marking.hidden(Marks("00", "x", 1, marks), 5.0)[1] == 5.0


# ---- the door


@pytest.mark.parametrize(
    "name, assignment",
    [
        ("04_kv_cache.ipynb", "04"),
        ("04_kv_cache-1.ipynb", "04"),
        ("Copy of 04_kv_cache (1).ipynb", "04"),
        ("ps2_chunks.ipynb", "p2"),
        ("work/p3-final.py", "p3"),
        ("2027_notes.ipynb", None),
        ("Untitled.ipynb", None),
    ],
)
def test_an_assignment_is_known_by_the_files_name(name: str, assignment: str | None):
    assert named(name) == assignment


def test_the_content_counts_more_than_the_name(release: Any, tmp_path: Path):
    write(tmp_path / "ada", answered(release, **right()), "04_kv_cache.ipynb")
    [one], unused = submissions([tmp_path / "ada"], {ALL[0]: release})
    assert one.assignment.id == "00" and not unused and not one.refused


def test_of_several_files_the_one_that_can_be_read_counts(release: Any, tmp_path: Path):
    write(tmp_path / "ada", answered(release, **right()), "00_tour-1.ipynb")
    (tmp_path / "ada" / f"{NAME}.ipynb").write_text("<html>")
    [one], _ = submissions([tmp_path / "ada"], {ALL[0]: release})
    assert one.file == "00_tour-1.ipynb" and not one.refused and one.notes == [f"not graded: {NAME}.ipynb"]


def test_a_file_that_names_no_assignment_is_told(release: Any, tmp_path: Path):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "work.ipynb").write_text("<html>")
    found, unused = submissions([tmp_path / "ada"], {ALL[0]: release, ALL[1]: release})
    assert not found and len(unused) == 1 and "work.ipynb: it is not a notebook" in unused[0]
    [one], _ = submissions([tmp_path / "ada"], {ALL[0]: release})  # where it can be of one assignment only
    assert "not a notebook" in one.refused


def test_code_that_has_no_place_is_kept_and_marked_as_not_graded(release: Any):
    own = {"type": "code", "source": "def helper(): ...", "metadata": {}, "id": "x"}
    cells = [{"type": "code", "source": right()["balance_batch"], "metadata": {"task": "00.balance_batch"}, "id": ""}]
    notebook = filled(release, placed(release, [*cells, own])[0])
    assert notebook.cells[-1].source == own["source"] and "task" not in notebook.cells[-1].metadata


def test_a_lessons_source_is_taken_apart_into_its_cells():
    cells = python_cells(ALL[0].source.read_bytes())
    assert {"00.floor_seconds", "00.balance_batch"} <= {cell["metadata"].get("task") for cell in cells}


@pytest.mark.parametrize(
    "source, text",
    [
        ('lab.answer("00.why", """ """)', ""),
        ('lab.answer("00.why", "a" "b")', "ab"),
        ("because it is so", None),
        ("lab.answer(", None),
    ],
)
def test_what_is_written_is_read_without_running_it(source: str, text: str | None):
    assert written(source) == text


def test_no_folder_of_students_is_told(tmp_path: Path):
    with pytest.raises(InputError, match="one folder or zip for each student"):
        students(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="has no folder and no zip"):
        students(tmp_path)


def test_names_of_moodle_are_cut_and_two_of_one_name_stay_two(tmp_path: Path):
    tail = "assignsubmission_file_"
    for name in (
        f"Ada Byron_12_{tail}",
        "Ada Byron_12_assignsubmission_onlinetext_",
        f"Bo_3_{tail}",
        f"Bo_4_{tail}",
        "cy",
    ):
        (tmp_path / name).mkdir()
    assert {name: len(paths) for name, paths in students(tmp_path).items()} == {
        "Ada Byron": 2,
        "Bo_3": 1,
        "Bo_4": 1,
        "cy": 1,
    }


def test_notebooks_in_no_students_folder_are_told(tmp_path: Path):
    (tmp_path / "ada").mkdir()
    (tmp_path / "bob_00_tour.ipynb").touch()
    with pytest.raises(InputError, match="make one folder for each student"):
        students(tmp_path)


def test_assignments_are_known_by_their_short_names():
    assert [one.id for one in assignments(["ps1", "4", "p2", "13"])] == ["04", "13", "p1", "p2"]


def test_points_may_have_a_comma():
    assert points_of("2,5", 3, "row 1") == 2.5


def test_no_text_of_a_student_is_a_formula():
    assert harmless("=HYPERLINK()") == "'=HYPERLINK()" and harmless(" @x") == "' @x" and harmless("a = b") == "a = b"


# ---- the command line


def run(*arguments: Any) -> str:
    with pytest.raises(InputError) as told:
        CliRunner().invoke(commands, list(map(str, arguments)), catch_exceptions=False)
    return str(told.value)


def test_the_command_says_what_is_wrong(tmp_path: Path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    assert "is no course; give a new or an empty folder" in run("make", tmp_path / "photos")
    assert "run `minillm course make" in run("grade", tmp_path / "photos", tmp_path)
    assert "there is nothing to grade" in run("grade", tmp_path / "photos")
    assert "assignment '99' is not known" in run("make", tmp_path / "new", "--only", "99")
    assert "--due is 'tomorrow'" in run("grade", made_config(tmp_path / "c"), tmp_path / "in", "--due", "tomorrow")


def test_a_folder_that_cannot_be_of_students_is_refused(course: Any, tmp_path: Path):
    for wrong in (course.folder, course.folder / "release", course.folder.parent, LESSONS, LESSONS / "instructor"):
        assert "is, holds or lies in" in run("grade", course.folder, wrong), wrong
    assert "are the two folders swapped?" in run("grade", tmp_path / "in", course.folder)
    with course.gradebook() as gradebook:
        assert not gradebook.students


def made_config(folder: Path) -> Path:
    folder.mkdir()
    (folder / circle.CONFIG).write_text(circle.SETTINGS.format(seed=1))
    return folder


def test_the_command_prints_the_table(course: Any, tmp_path: Path):
    write(tmp_path / "in" / "ada", answered(course.release(ALL[0]), **right()))
    result = CliRunner().invoke(commands, ["grade", str(course.folder), str(tmp_path / "in")], catch_exceptions=False)
    assert result.exit_code == 0
    assert re.search(r"ada +00_tour +12\.00 +5\.00 +to mark +17\.00", result.output), result.output
