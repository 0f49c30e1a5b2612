"""What nbgrader's gradebook holds, as rows: for a table, for a CSV, and for the marks that a person gives.

Every row has its reason: why nothing was graded, what was odd, and what is still to be marked by whom.
"""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.api import MissingEntry
from nbgrader.plugins import ExportPlugin

from minillm.course.assignment import HIDDEN_ID, POINTS, Assignment, assignments, function_points, grade_id
from minillm.course.marking import ABOUT
from minillm.course.repair import is_answer, written
from minillm.errors import InputError

UNUSED = "unused.txt"  # beside a student's submissions: files of no assignment, and why
WRITTEN_COLUMNS = ("assignment", "student_id", "points", "most", "comment", "rubric", "answer")


@dataclass
class Row:
    """The marks of one student for one assignment."""

    assignment: str
    student_id: str
    status: str = "missing"  # or graded, refused, late, failed
    public: float = 0.0
    hidden: float = 0.0
    written: float = 0.0
    late_penalty: float = 0.0
    score: float = 0.0
    max_score: float = 0.0
    pending: str = ""  # what a person must mark yet, and by which rubric
    timestamp: str = ""
    reason: str = ""


def rows(gradebook: Any, folder: Path, only: Sequence[str] = ()) -> list[Row]:
    """Of every student and every assignment that anybody has handed in (or of those named)."""
    found = []
    for assignment in assignments():
        try:
            known = gradebook.find_assignment(assignment.name)
        except MissingEntry:
            continue
        if assignment.name in only or (not only and known.submissions):
            found += [row(gradebook, folder, assignment, student.id) for student in gradebook.students]
    return found


def row(gradebook: Any, folder: Path, assignment: Assignment, student: str) -> Row:
    made = Row(assignment.name, student, max_score=gradebook.find_assignment(assignment.name).max_score)
    try:
        submission = gradebook.find_submission(assignment.name, student)
    except MissingEntry:
        unused = folder / "submitted" / student / UNUSED
        words = unused.read_text("utf-8") if unused.is_file() else ""
        made.reason = f"nothing that can be graded; {words}" if words else "nothing was handed in"
        return made
    try:
        about = dict(graded_notebook(folder, assignment, student).metadata.get(ABOUT, {}))
    except OSError:
        made.status, made.reason = "failed", "grading itself failed; see failures.log"
        return made
    made.status = "refused" if about.get("refused") else "graded"
    made.timestamp = str(submission.timestamp or "")
    for grade in submission.notebooks[0].grades:
        part = "public" if grade.name.endswith(POINTS) else "hidden" if grade.name.endswith(HIDDEN_ID) else "written"
        setattr(made, part, getattr(made, part) + grade.score)
        if part == "written" and grade.needs_manual_grade:
            made.pending = f"{grade.max_score:g} points for what is written, by {assignment.rubric}"
    made.late_penalty = submission.late_submission_penalty
    made.score = max(0.0, submission.score - made.late_penalty)
    reasons = [about.get("refused", ""), *about.get("notes", ()), *about.get("flags", ())]
    if not about.get("refused"):
        reasons.append(lost(assignment, submission.notebooks[0].grades))
    if submission.total_seconds_late > 0:
        made.status = "late" if made.status == "graded" else made.status
        reasons.insert(0, f"handed in {submission.total_seconds_late / 3600:.1f} hours late")
    made.reason = "; ".join(each for each in reasons if each)
    return made


def graded_notebook(folder: Path, assignment: Assignment, student: str) -> Any:
    return nbformat.read(folder / "autograded" / student / assignment.name / f"{assignment.name}.ipynb", as_version=4)


def lost(assignment: Assignment, grades: Sequence[Any]) -> str:
    """The functions with fewer points than they could have."""
    score = {grade.name: grade.score for grade in grades}
    parts = [
        f"{function} {score[name]:g} of {most:g} points"
        for function, most in function_points(assignment).items()
        if score[name := grade_id(f"{assignment.id}.{function}") + POINTS] < most
    ]
    return ", ".join(parts)


class GradesWithReasons(ExportPlugin):
    """`nbgrader export` with the parts of each mark and its reason."""

    def export(self, gradebook: Any) -> None:
        folder = Path(gradebook.engine.url.database).parent
        found = rows(gradebook, folder, self.assignment)
        chosen = [asdict(one) for one in found if not self.student or one.student_id in self.student]
        table(Path(self.to or "grades.csv"), [each.name for each in fields(Row)], chosen)


def table(path: Path, columns: Sequence[str], lines: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({name: harmless(value) for name, value in line.items()} for line in lines)


def harmless(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula, as a text."""
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in tuple("=+-@") else value


# ---- what a person marks


def export_written(gradebook: Any, folder: Path, path: Path, given: Sequence[tuple[str, str]] = ()) -> None:
    """A CSV with every written answer and a column for its marks. Marks that stand in the file already are kept, as a
    person may be typing them; those of `given` (assignment, student) were just taken over from somewhere."""
    typed = typed_marks(path)
    lines = []
    for one in rows(gradebook, folder):
        points, comment = person_marks(gradebook, one)
        if not one.pending and not points:
            continue
        key = one.assignment, one.student_id
        old = typed.pop(key, {})
        if key not in given:
            points, comment = old.get("points") or points, old.get("comment") or comment
        [assignment] = [each for each in assignments() if each.name == one.assignment]
        notebook = graded_notebook(folder, assignment, one.student_id)
        [cell] = [cell for cell in notebook.cells if is_answer(cell) and "task" not in cell.metadata]
        text = written(cell.source)
        line = (*key, points, cell.metadata.nbgrader.points, comment, assignment.rubric)
        lines.append(dict(zip(WRITTEN_COLUMNS, (*line, cell.source if text is None else text), strict=True)))
    table(path, WRITTEN_COLUMNS, [*lines, *typed.values()])


def person_marks(gradebook: Any, of: Row) -> tuple[str, str]:
    """The points and the comment that a person gave, or nothing."""
    if of.status in ("missing", "failed"):
        return "", ""
    grade, comment = by_person(gradebook.find_submission(of.assignment, of.student_id))
    return "" if grade.manual_score is None else f"{grade.manual_score:g}", comment.manual_comment or ""


def by_person(submission: Any) -> tuple[Any, Any]:
    """The grade that a person gives, and its comment, as nbgrader keeps them."""
    notebook = submission.notebooks[0]
    [grade] = [each for each in notebook.grades if not each.name.endswith((POINTS, HIDDEN_ID))]
    [comment] = [each for each in notebook.comments if each.name == grade.name]
    return grade, comment


def lines_of(path: Path) -> list[dict[str, Any]]:
    return list(csv.DictReader(path.read_text("utf-8-sig").splitlines(keepends=True)))


def typed_marks(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The lines of the file as it is that have points or a comment. One that cannot be read is put aside, not lost."""
    if not path.is_file():
        return {}
    try:
        lines = lines_of(path)
        filled = [line for line in lines if (line["points"] or "").strip() or (line["comment"] or "").strip()]
        return {
            (line["assignment"], line["student_id"]): {name: line.get(name) or "" for name in WRITTEN_COLUMNS}
            for line in filled
        }
    except (UnicodeDecodeError, csv.Error, KeyError):
        path.replace(path.with_name("written-unreadable.csv"))
        return {}


def import_written(gradebook: Any, path: Path) -> list[tuple[str, str]]:
    """Marks from such a CSV into the gradebook; lines without points are left out. Returns (assignment, student) of
    each. Raises InputError, and changes nothing, if a line is wrong."""
    try:
        lines = lines_of(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read ({error}); it must be a CSV like written.csv") from error
    given = []
    for number, line in enumerate(lines, 2):
        student = line.get("student_id")
        where = f"{path}, row {number - 1}" + (f" ({student})" if student else "")
        missing = [name for name in WRITTEN_COLUMNS[:3] if name not in line]
        if missing:
            raise InputError(f"{where} has no column {', '.join(missing)}; the columns are those of written.csv")
        if not (line["points"] or "").strip():
            continue
        try:
            submission = gradebook.find_submission(line["assignment"], line["student_id"])
        except MissingEntry as error:
            known = f"assignment {line['assignment']!r} of student {line['student_id']!r}"
            raise InputError(f"{where}: {known} was not graded; run grade first") from error
        grade, comment = by_person(submission)
        given.append((submission, grade, comment, points_of(line["points"], grade.max_score, where), line))
    for submission, grade, comment, points, line in given:
        grade.manual_score, grade.needs_manual_grade = points, False
        comment.manual_comment = (line.get("comment") or "").strip() or None
        gradebook.db.commit()
        if submission.total_seconds_late > 0:
            notebook = submission.notebooks[0]
            notebook.late_submission_penalty = notebook.score
            gradebook.db.commit()
    return [(line["assignment"], line["student_id"]) for *_, line in given]


def points_of(text: str, most: float, where: str) -> float:
    try:
        points = float(text.replace(",", "."))  # as spreadsheets of many countries write it
    except ValueError:
        points = -1.0
    if not 0 <= points <= most:
        raise InputError(f"{where}: the points are {text!r}; they must be a number from 0 to {most:g}")
    return points
