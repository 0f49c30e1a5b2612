"""The commands `minillm course make`, `grade` and `quiz`: their options alone; the work is in `course.circle` and
`course.questions`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from minillm.bench.tables import new_table
from minillm.errors import InputError
from minillm.terminal import one_line, out, remark

if TYPE_CHECKING:
    from minillm.course.gradebook import Row

WIDE = 130  # columns of a table that goes into a file

course = typer.Typer(
    help="Give the lessons as a course: assignments, grading, feedback, marks. Needs the extra `course`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Folder = Annotated[Path, typer.Argument(help="The course's folder, for teachers alone.", show_default=False)]
Only = Annotated[
    list[str] | None,
    typer.Option(help="An assignment: 00 to 13, or p1 to p5; may be given several times.  [dim]\\[default: all][/]"),
]


def add_to(app: typer.Typer) -> None:
    app.add_typer(course, name="course", rich_help_panel="Learn")


def need_nbgrader() -> None:
    if importlib.util.find_spec("nbgrader") is None:
        raise InputError("nbgrader is not installed, which a course needs; `pip install 'minillm[course]'`")


@course.command()
def make(
    folder: Folder,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the hidden inputs.  [dim]\\[default: the folder's, at first a new one][/]"),
    ] = None,
    only: Only = None,
) -> None:
    """Make the assignments: FOLDER/release is for students, the rest is not.

    Every lesson and every problem set becomes an nbgrader assignment of 20
    points. A release has no solution, no hidden test and no seed in it.

    [bold]Examples[/]
    $ minillm course make autumn
    $ minillm course make autumn --only 04 --only p2
    """
    need_nbgrader()
    from minillm.course import circle

    made = circle.make(folder, seed, only or (), remark)
    print(f"For students: {made.folder / 'release'}. The seed of the hidden inputs: {made.folder / circle.CONFIG}.")


@course.command()
def grade(
    folder: Folder,
    submissions: Annotated[
        Path | None,
        typer.Argument(help="What was handed in: one folder or zip for each student.", show_default=False),
    ] = None,
    only: Only = None,
    due: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Later is 0 points: 2027-01-31 23:59 (UTC), compared with each student's timestamp.txt.",
        ),
    ] = None,
    written: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Marks for what is written: written.csv, filled in.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions to run at once; each takes a core and 1 GB.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Grade also what was graded and has not changed.")] = False,
) -> int:
    """Grade what was handed in, write feedback, and export the marks.

    Every submission is graded or refused with a reason: in the table, in the
    student's feedback (FOLDER/feedback) and in FOLDER/grades.csv. Students'
    code runs in a process of its own, with limits. FOLDER/written.csv lists
    the answers that a person must mark: fill in points, give it as --written.

    The exit code is 1 if grading itself failed for one.

    [bold]Examples[/]
    $ minillm course grade autumn handed-in --only 04
    $ minillm course grade autumn --written autumn/written.csv
    """
    need_nbgrader()
    from minillm.course import circle

    if submissions is None and written is None:
        raise InputError("there is nothing to grade; give the folder of submissions, or --written")
    found = circle.grade(folder, submissions, only or (), due=due, written=written, again=again, jobs=jobs, tell=remark)
    show(found, folder)
    return 1 if any(row.status == "failed" for row in found) else 0


@course.command()
def quiz(
    lessons: Annotated[list[str], typer.Argument(help="Lessons: 00 to 13.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Whoever has the same seed has the same questions.")] = 0,
    n: Annotated[int | None, typer.Option("--n", help="So many short questions.  [dim]\\[default: all][/]")] = None,
    key: Annotated[bool, typer.Option("--key", help="With the answers, and why each is right or wrong.")] = False,
    essay: Annotated[bool, typer.Option("--essay", help="Each lesson's essay too.")] = False,
    moodle: Annotated[bool, typer.Option("--moodle", help="Moodle XML, to be imported, in place of Markdown.")] = False,
    variants: Annotated[int, typer.Option(help="Of each calculation, with --moodle.")] = 1,
) -> None:
    """Print a quiz from the question bank, its key, or a file for Moodle.

    [bold]Examples[/]
    $ minillm course quiz 04 05 --seed 7 --n 6
    $ minillm course quiz 04 05 --seed 7 --n 6 --key
    """
    from minillm.course import questions
    from minillm.course.moodle import moodle as as_xml

    if moodle:
        text = as_xml(lessons, seed, n, essay, variants)
    else:
        text = (questions.key if key else questions.quiz)(lessons, seed, n, essay)
    print(text, end="")


def show(found: "Sequence[Row]", folder: Path) -> None:
    most = ", ".join(sorted({f"{row.max_score:g}" for row in found})) or "no"
    where = f"In full: {folder / 'grades.csv'}; for students: {folder / 'feedback'}; to mark: {folder / 'written.csv'}"
    columns = ("student", "assignment", "public", "hidden", "written", "score", "why")
    table = new_table(f"Marks, of {most} points", where, columns)
    for i in (1, 6):
        table.columns[i].justify = "left"
    table.columns[6].no_wrap = False
    for row in found:
        written = "to mark" if row.pending else f"{row.written:.2f}"
        line = [row.student_id, row.assignment, f"{row.public:.2f}", f"{row.hidden:.2f}", written, f"{row.score:.2f}"]
        why = row.reason if row.status in ("graded", "late") else f"{row.status}: {row.reason}"
        table.add_row(*(Text(one_line(cell)) for cell in (*line, why)))
    (out if out.is_terminal else Console(width=WIDE, highlight=False)).print(table)
