"""Gates that every problem set passes: form, points, rubric, right solutions on any inputs, cells that run."""

import re
from pathlib import Path

import pytest

from minillm.course.points import HIDDEN, MOST, PUBLIC, WRITTEN
from minillm.lab import seeds
from minillm.lab.build import LESSONS, name_of, problem_sets, solutions, solved, student
from minillm.lab.checking import PROBLEM_SETS, properties, run_checks
from minillm.lab.work import cells_of, from_cells

SOURCES = problem_sets()
RUBRICS = LESSONS / "instructor" / "rubrics"
each = pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])


def text_of(source: Path) -> str:
    return "\n\n".join(cell.source for cell in solved(source).cells if cell.cell_type == "markdown")


def code_of(source: Path) -> list[str]:
    return [cell.source for cell in solved(source).cells if cell.cell_type == "code"]


def tasks_of(source: Path) -> list[str]:
    return [cell.metadata["task"] for cell in solved(source).cells if "task" in cell.metadata]


def numbers(cell: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+(?:\.\d+)?", cell)]


def test_there_is_one_of_each():
    assert tuple(map(name_of, SOURCES)) == PROBLEM_SETS


@each
def test_two_problems_and_a_question_each_checked_or_asked(source: Path):
    lesson, code, text = name_of(source), "\n".join(code_of(source)), text_of(source)
    tasks = tasks_of(source)
    assert len(tasks) == 2
    for task in tasks:
        assert f'lab.check("{lesson}", "{task.split(".")[1]}")' in code
    assert f'lab.start("{lesson}")' in code and code.count(f'lab.answer("{lesson}.why"') == 1
    assert text.count("Hint 1") == text.count("Hint 2") == 2
    assert text.count("<details>") == text.count("</details>") and re.search("^## Explain$", text, re.MULTILINE)
    assert "from_pretrained" not in code, "a problem set needs no weights"


@each
def test_the_table_of_points_is_right(source: Path):
    lesson, held = name_of(source), {}
    for prop in properties(lesson):
        held[prop.function] = held.get(prop.function, 0) + 1
    rows = [line.split("|")[1:-1] for line in text_of(source).splitlines() if re.match(r"\| (\d\. |together)", line)]
    problems, [explain], [together] = rows[:2], rows[2:3], rows[3:4]
    for task, row in zip(tasks_of(source), problems, strict=True):
        function = task.split(".")[1]
        share = held[function] / sum(held.values())
        assert f"`{function}`" in row[0] and [numbers(cell) for cell in row[1:4]] == [
            [held[function]],
            [PUBLIC * share],
            [HIDDEN * share],
        ]
    assert numbers(explain[4]) == [WRITTEN]
    assert [numbers(cell)[0] for cell in together[1:5]] == [sum(held.values()), PUBLIC, HIDDEN, WRITTEN]
    assert numbers(together[5])[0] == sum(numbers(row[5])[0] for row in [*problems, explain])
    assert PUBLIC + HIDDEN + WRITTEN == MOST == 100 / len(PROBLEM_SETS)


@each
def test_the_rubric_gives_three_points_and_marks_three_answers(source: Path):
    text = (RUBRICS / f"{name_of(source)}.md").read_text("utf-8")
    criteria = [float(points) for points in re.findall(r"^\| (\d(?:\.5)?) \|", text, re.MULTILINE)]
    assert sum(criteria) == WRITTEN and set(criteria) <= {0.5, 1.0, 1.5}
    for words in ("excellent: ", "middling: ", "wrong: ", "misconceptions", "language model"):
        assert words in text.lower(), words


@each
def test_the_release_has_no_line_of_a_solution_and_differs_only_where_marked(source: Path):
    release = {cell["id"]: cell.source for cell in student(source).cells}
    lines = {line.strip() for text in release.values() for line in text.splitlines()}
    assert not [line for line in solutions(source) if line in lines]
    for cell in solved(source).cells:
        assert "BEGIN SOLUTION" in cell.source or release[cell["id"]] == cell.source


@each
@pytest.mark.parametrize("seed", [1, 2])
def test_the_solution_has_every_property_on_other_inputs_too(source: Path, seed: int):
    with seeds.variant(seed):
        report = run_checks(name_of(source), from_cells(source, cells_of(source)))
    assert report.passed, report.text()


@each
def test_every_cell_runs_and_every_check_holds(source: Path, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MINILLM_SIZE", "ci")
    monkeypatch.setenv("MINILLM_NOTES", str(tmp_path / "notes.json"))
    names = {"__name__": "__main__"}
    for i, code in enumerate(code_of(source)):
        exec(compile(code, f"<ipython, cell {i} of {source.name}>", "exec"), names)
    printed = capsys.readouterr().out
    found = re.findall(r"(\d+) of (\d+) properties hold", printed)
    assert len(found) == 2 and all(held == of for held, of in found), printed
