"""The circle of a course, on nbgrader: make, collect, autograde, feedback, export. All in one folder and one process.

    FOLDER/nbgrader_config.py   the seed of the hidden inputs, and nbgrader's settings: for teachers alone
    FOLDER/source/              with solutions           FOLDER/release/      what students get
    FOLDER/submitted/           what came in, repaired   FOLDER/autograded/   the same with its marks
    FOLDER/feedback/            HTML for each student    FOLDER/gradebook.db  nbgrader's
    FOLDER/grades.csv           every mark and reason    FOLDER/written.csv   what a person marks
    FOLDER/marks/               what grading found, with the hidden reasons: for teachers alone

nbgrader's own commands and its formgrader work in the folder too.
"""

import logging
import os
import secrets
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbgrader import preprocessors
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde, GenerateAssignment, GenerateFeedback
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import capture_log, parse_utc
from sqlalchemy.exc import SAWarning
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from minillm.course.assignment import Assignment, Stubs, assignments, master
from minillm.course.door import TIMESTAMP, Submission, students, submissions
from minillm.course.gradebook import UNUSED, GradesWithReasons, Row, export_written, import_written, rows
from minillm.course.marking import ABOUT, STARTED, GradeByProperties
from minillm.course.repair import filled
from minillm.errors import InputError, whole_number
from minillm.lab.build import AGENTS, LESSONS

CONFIG = "nbgrader_config.py"
SETTINGS = '''\
"""Made by `minillm course make`. Keep it from students: the seed decides the hidden inputs."""

from minillm.course.circle import configure

c = get_config()  # noqa: F821
configure(c, seed={seed})
'''
Tell = Callable[[str], None]


def configure(config: Any, seed: int) -> None:
    """nbgrader's settings of a course, for its own commands as for ours."""
    p = preprocessors
    config.CourseDirectory.course_id = "minillm"
    config.GenerateAssignment.preprocessors = [
        *(p.LockCells, Stubs, p.ClearOutput, p.CheckCellMetadata, p.ComputeChecksums, p.SaveCells, p.CheckCellMetadata)
    ]
    config.Autograde.autograde_preprocessors = [
        *(GradeByProperties, p.SaveAutoGrades, p.AssignLatePenalties, p.CheckCellMetadata)
    ]
    config.GradeByProperties.seed = seed
    config.LateSubmissionPlugin.penalty_method = "zero"
    config.ExportApp.plugin_class = GradesWithReasons


class Course:
    """A course's folder. Raises InputError if it is none."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        if not (self.folder / CONFIG).is_file():
            raise InputError(f"{folder} is not a course: it has no {CONFIG}; run `minillm course make {folder}` first")
        try:
            self.config = Config(PyFileConfigLoader(CONFIG, str(self.folder)).load_config())
        except Exception as error:  # it is Python, and a teacher's to edit
            raise InputError(f"{folder / CONFIG} does not run ({type(error).__name__}: {error})") from error
        self.seed = int(self.config.GradeByProperties.seed)
        self.directory = CourseDirectory(config=self.config, root=str(self.folder))

    @contextmanager
    def gradebook(self) -> Iterator[Any]:
        with surroundings(), Gradebook(self.directory.db_url, self.directory.course_id) as gradebook:
            yield gradebook

    def run(self, converter: Any, assignment: Assignment, student: str = "*") -> str:
        """One of nbgrader's converters; returns its log if it failed, else ""."""
        self.directory.assignment_id, self.directory.student_id = assignment.name, student
        app = converter(coursedir=self.directory, config=self.config)
        app.force, app.log.propagate = True, False
        app.log.setLevel(logging.WARNING)
        with surroundings():
            done = capture_log(app)
        if not done["success"] and done["error"].rstrip().endswith("KeyboardInterrupt"):
            raise KeyboardInterrupt
        return "" if done["success"] else str(done.get("log", "")) + str(done["error"])

    def notebook(self, step: str, student: str, name: str) -> Path:
        return self.folder / step / student / name / f"{name}.ipynb"

    def release(self, assignment: Assignment) -> Any:
        path = self.notebook("release", ".", assignment.name)
        if not path.is_file():
            raise InputError(f"{path} is missing; run `minillm course make {self.folder} --only {assignment.id}`")
        return nbformat.read(path, as_version=4)


@contextmanager
def surroundings() -> Iterator[None]:
    """nbgrader calls alembic by name: it stands beside this Python, which need not be on the path. And it lets
    SQLAlchemy warn about the order in which it makes its own objects."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), before))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SAWarning)
            yield
    finally:
        os.environ["PATH"] = before


# ---- make


def make(folder: Path, seed: int | None, only: Sequence[str], tell: Tell = print) -> Course:
    """Makes the course's folder, or some of its assignments anew. The seed stays what it was unless one is given."""
    chosen = assignments(only)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir()) and not (folder / CONFIG).is_file()):
        raise InputError(f"{folder} is there, and is no course; give a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", "utf-8")  # seeds and marks belong in no repository
    if seed is not None or not (folder / CONFIG).exists():
        number = secrets.randbelow(2**31) if seed is None else whole_number("seed", seed, 0)
        (folder / CONFIG).write_text(SETTINGS.format(seed=number), "utf-8")
    course = Course(folder)
    for assignment in chosen:
        source = course.folder / "source" / assignment.name
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        nbformat.write(master(assignment), source / f"{assignment.name}.ipynb")
        if failed := course.run(GenerateAssignment, assignment):
            if "there are submissions associated with it" in failed:
                raise InputError(f"{assignment.name} has submissions, and its cells have changed: use a new folder")
            raise RuntimeError(f"nbgrader could not make {assignment.name}:\n{failed}")
        tell(f"{assignment.name}: {course.folder / 'release' / assignment.name}")
    shutil.copy(AGENTS, course.folder / "release")
    return course


# ---- grade


def grade(
    folder: Path,
    handed_in: Path | None,
    only: Sequence[str] = (),
    *,
    due: str | None = None,
    written: Path | None = None,
    again: bool = False,
    jobs: int = 1,
    tell: Tell = print,
) -> list[Row]:
    """Collects everything, grades one submission after the other, whatever is in them, gives feedback, and exports.

    What was graded before and has not changed is not graded again, unless `again`. `jobs`: so many run at once.
    """
    if handed_in is not None:
        apart(folder, handed_in)
    course = Course(folder)
    chosen = [each for each in assignments(only) if only or (course.folder / "release" / each.name).is_dir()]
    releases = {assignment: course.release(assignment) for assignment in chosen}
    if due is not None:
        set_due(course, chosen, due)
    if handed_in is not None:
        queue = []
        for student, paths in students(handed_in).items():
            queue += collect(course, student, paths, releases, again or due is not None, tell)
        if due is not None:
            tell_untimed(course, chosen, tell)
        with ThreadPoolExecutor(whole_number("jobs", jobs, 1)) as pool:
            try:
                for student, assignment in queue:
                    start_marking(pool, course, student, assignment)
                for number, (student, assignment) in enumerate(queue, 1):
                    tell(f"{number} of {len(queue)}: {student}, {assignment.name}")
                    autograde(course, student, assignment)
            finally:
                pool.shutdown(cancel_futures=True)
                STARTED.clear()
    with course.gradebook() as gradebook:
        given = import_written(gradebook, written) if written is not None else []
        for name, student in given:
            [assignment] = [each for each in assignments() if each.name == name]
            course.run(GenerateFeedback, assignment, student)
        names = [assignment.name for assignment in chosen] if only else []
        found = rows(gradebook, course.folder, names)
        GradesWithReasons(to=str(course.folder / "grades.csv"), config=course.config).export(gradebook)
        export_written(gradebook, course.folder, course.folder / "written.csv", given)
    return found


def apart(folder: Path, handed_in: Path) -> None:
    """Raises InputError where subfolders of something else would be taken for students."""
    if (handed_in / CONFIG).is_file() and not (folder / CONFIG).is_file():
        raise InputError(f"{folder} is not a course, and {handed_in} is one: are the two folders swapped?")
    if not (folder / CONFIG).is_file():
        return  # Course says so
    here = handed_in.resolve()
    for other, what in ((folder.resolve(), "the course's folder"), (LESSONS.resolve(), "the project's lessons")):
        if here == other or here in other.parents or other in here.parents:
            raise InputError(
                f"{handed_in} is, holds or lies in {what} ({other}); give a folder of its own for what was handed in"
            )


def tell_untimed(course: Course, chosen: Sequence[Assignment], tell: Tell) -> None:
    notebooks = [path for each in chosen for path in course.folder.glob(f"submitted/*/{each.name}/{each.name}.ipynb")]
    if untimed := sum(not path.with_name(TIMESTAMP).is_file() for path in notebooks):
        tell(f"{untimed} submissions have no time: they count as in time (it stands in {TIMESTAMP}, as UTC)")


def set_due(course: Course, chosen: Sequence[Assignment], due: str) -> None:
    try:
        when = parse_utc(due)
    except (ValueError, OverflowError) as error:
        raise InputError(f"--due is {due!r}; it must be a time as 2027-01-31 23:59 (UTC), or with its zone") from error
    with course.gradebook() as gradebook:
        for assignment in chosen:
            gradebook.update_or_create_assignment(assignment.name, duedate=when)


def collect(
    course: Course, student: str, paths: Sequence[Path], releases: Mapping[Assignment, Any], again: bool, tell: Tell
) -> list[tuple[str, Assignment]]:
    """Puts what a student handed in where nbgrader looks for it. Returns what must be graded: what has changed."""
    with course.gradebook() as gradebook:
        gradebook.update_or_create_student(student)
    try:
        found, unused = submissions(paths, releases)
        changed = [put(course, student, one, releases[one.assignment]) for one in found]
    except Exception:  # whatever it is, the next student's turn comes
        failure(course, student, traceback.format_exc())
        found, unused, changed = [], ["collecting itself failed; see failures.log"], []
    for words in unused:
        tell(f"{student}: not used: {words}")
    left = course.folder / "submitted" / student / UNUSED
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("; ".join(unused), "utf-8")
    return [(student, one.assignment) for one, new in zip(found, changed, strict=True) if new or again]


def put(course: Course, student: str, submission: Submission, release: Any) -> bool:
    """Returns whether it is another one than before."""
    name = submission.assignment.name
    notebook = filled(release, submission.answers)
    about = {"file": submission.file, "refused": submission.refused, "notes": submission.notes}
    notebook.metadata[ABOUT] = about
    text = nbformat.writes(notebook)
    path = course.notebook("submitted", student, name)
    stamp, time = path.with_name(TIMESTAMP), submission.timestamp
    before = (path.read_text("utf-8") if path.is_file() else "", stamp.read_text("utf-8") if stamp.is_file() else "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    if time:
        stamp.write_text(time + "\n", "utf-8")
    else:
        stamp.unlink(missing_ok=True)
    graded = course.notebook("autograded", student, name).is_file()
    return not graded or before != (text, time + "\n" if time else "")


def start_marking(pool: ThreadPoolExecutor, course: Course, student: str, assignment: Assignment) -> None:
    """Begins what takes long, ahead of nbgrader, which asks for it later."""
    preprocessor = GradeByProperties(config=course.config)
    path = course.notebook("submitted", student, assignment.name)
    if not nbformat.read(path, as_version=4).metadata[ABOUT]["refused"]:
        STARTED[student, assignment.name] = pool.submit(preprocessor.marks, path, assignment)


def autograde(course: Course, student: str, assignment: Assignment) -> None:
    failed = course.run(Autograde, assignment, student) or course.run(GenerateFeedback, assignment, student)
    STARTED.pop((student, assignment.name), None)
    if failed:
        failure(course, f"{student}, {assignment.name}", failed)


def failure(course: Course, of: str, text: str) -> None:
    with (course.folder / "failures.log").open("a", encoding="utf-8") as log:
        log.write(f"{of}\n{text}\n")
