"""From a lesson's source to its notebooks: solved and executed, a book to read; and the student's, to work in.

The source is `lessons/NN_name.py` in jupytext's percent format. Marks in it:

    # %% tags=["setup"]             imports, run before every check
    # %% task="04.store"            a cell with a function to write, between ### BEGIN SOLUTION and ### END SOLUTION
    # %% [markdown]                 text; <!-- BEGIN SOLUTION --> ... <!-- END SOLUTION --> is left out for students

The two notebooks differ only inside these marks. A cell's id comes from its task or its place, so it is the same in
every build. One cell is added to each: it installs the package where there is none.
"""

import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from minillm import __version__
from minillm.errors import InputError
from minillm.lab.use import STUB

ROOT = Path(__file__).resolve().parents[2]
LESSONS = ROOT / "lessons"
STUDENT = ROOT / "build" / "student"
AGENTS = Path(__file__).with_name("AGENTS.md")  # for coding assistants in a learner's folder
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
BEGIN_TEXT, END_TEXT = "<!-- BEGIN SOLUTION -->", "<!-- END SOLUTION -->"
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


# In Colab only the notebook is there. A clone, so that weights' manifest and stored results come with the package.
INSTALL = """\
# Not installed here, as in Colab? Then the package and its weights come first: a few minutes.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("minillm") is None:
    clone = "minillm-{version}"
    for command in (
        f"git clone --quiet --depth 1 --branch v{version} https://github.com/minillm/minillm {{clone}}",
        f"{{sys.executable}} -m pip install --quiet --editable ./{{clone}}[lessons]",
        f"{{sys.executable}} -m minillm weights",
    ):
        subprocess.run(command.split(), check=True)
    sys.path.insert(0, clone)"""


def sources() -> list[Path]:
    """Of the lessons."""
    return sorted(LESSONS.glob("[0-9][0-9]_*.py"))


def problem_sets() -> list[Path]:
    return sorted(LESSONS.glob("problems/ps[0-9]_*.py"))


def by_name() -> dict[str, Path]:
    """Lessons and problem sets."""
    return {name_of(source): source for source in [*sources(), *problem_sets()]}


def title_of(source: Path) -> str:
    """Its first heading: 04 · The KV cache."""
    return source.read_text("utf-8").split("# # ", 1)[1].split("\n", 1)[0]


def name_of(source: Path) -> str:
    """The number of a lesson, 04, or p1 for a problem set: what its checks, tasks and cells are called by."""
    return f"p{source.name[2]}" if source.name.startswith("ps") else source.name[:2]


def solved(source: Path) -> Any:
    """The notebook of a source, not executed."""
    notebook = jupytext.reads(source.read_text("utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    number = name_of(source)
    ids: set[str] = set()
    for i, cell in enumerate(notebook.cells, 1):
        name = cell.metadata.get("task", f"{number}.{i:02}").replace(".", "-").replace("_", "-")
        cell["id"] = name
        assert name not in ids, f"{source.name} has two cells {name}"
        ids.add(name)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    install = nbformat.v4.new_code_cell(INSTALL.format(version=__version__), id=f"{number}-install")
    notebook.cells.insert(1, install)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def student(source: Path) -> Any:
    """The same without solutions: each is a stub that raises with the task's number."""
    notebook = solved(source)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = stubbed(cell.source, cell.metadata.get("task"), source.name)
        else:
            cell.source = without_text(cell.source, source.name)
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    return notebook


def stubbed(code: str, task: str | None, name: str) -> str:
    """Code with every solution replaced by one line that raises, as far in as the solution was."""
    if (BEGIN in code or END in code) and task is None:
        raise InputError(f"{name} has a solution in a cell without a task")
    if code.count(BEGIN) != code.count(END) or (task and BEGIN not in code):
        raise InputError(f"{name}, task {task}: {BEGIN} and {END} do not match")
    pattern = rf"^([ \t]*){BEGIN}\n.*?^[ \t]*{END}"
    return re.sub(pattern, rf'\1raise NotImplementedError("task {task}{STUB}")', code, flags=re.S | re.M)


def without_text(text: str, name: str) -> str:
    if text.count(BEGIN_TEXT) != text.count(END_TEXT):
        raise InputError(f"{name}: {BEGIN_TEXT} and {END_TEXT} do not match")
    return re.sub(rf"\n?{BEGIN_TEXT}.*?{END_TEXT}\n?", "\n", text, flags=re.S).strip("\n")


def execute(notebook: Any, folder: Path, seconds: int = 900) -> float:
    """Runs it from top to bottom in a kernel of its own; returns the seconds. A cell that raises ends it."""
    from nbclient import NotebookClient

    started = time.perf_counter()
    client = NotebookClient(
        notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # time stamps
    return time.perf_counter() - started


def agree(source: Path, notebook: Any) -> str | None:
    """Why a notebook is not that of a source, cell by cell (outputs aside); None if it is."""
    expected = solved(source).cells
    for mine, theirs in zip(expected, notebook.cells, strict=False):
        if (mine["id"], mine.cell_type, mine.source) != (theirs["id"], theirs.cell_type, theirs.source):
            return f"cell {mine['id']} differs"
    if len(expected) != len(notebook.cells):
        return f"{len(expected)} cells in the source, {len(notebook.cells)} in the notebook"
    return None


def solutions(source: Path) -> list[str]:
    """Every line of solution text that is long enough to be recognised."""
    found: list[str] = []
    for cell in solved(source).cells:
        pairs = ((BEGIN, END), (BEGIN_TEXT, END_TEXT))
        for begin, end in pairs:
            for part in re.findall(rf"{begin}\n(.*?){end}", cell.source, flags=re.S):
                found += [line.strip() for line in part.splitlines() if len(line.strip()) >= 20]
    return found


# ---- the index

INDEX = LESSONS / "README.md"
BEGIN_INDEX, END_INDEX = "<!-- lessons:begin -->\n", "<!-- lessons:end -->\n"


def index(text: str, taken: dict[str, Any]) -> str:
    """The text of lessons/README.md with its table made anew; `taken` is {lesson: its size and seconds}."""
    rows = ["| lesson | what it is about | you write | for you | for the machine |", "|---|---|---|--:|--:|"]
    for source in sources():
        words = "\n".join(cell.source for cell in solved(source).cells if cell.cell_type == "markdown")
        title, about = re.findall(r"^# (.+)\n+(.+(?:\n.+)*)", words)[0]
        tasks = [cell.metadata["task"].split(".")[1] for cell in solved(source).cells if "task" in cell.metadata]
        minutes = re.findall(r"minutes\W+(?:about )?(\d+)", words, flags=re.I)[0]
        run = taken.get(source.stem)
        machine = f"{run['seconds'] / 60:.1f} minutes" if run and run["size"] == "default" else "-"
        names = ", ".join(f"`{task}`" for task in tasks)
        link = f"[{title}]({source.stem}.ipynb)"
        rows.append(f"| {link} | {' '.join(about.split())} | {names} | {minutes} minutes | {machine} |")
    head, found, rest = text.partition(BEGIN_INDEX)
    _, closed, tail = rest.partition(END_INDEX)
    assert found and closed, f"{INDEX} has no {BEGIN_INDEX.strip()} and {END_INDEX.strip()}"
    return head + BEGIN_INDEX + "\n".join(rows) + "\n" + END_INDEX + tail


# ---- commands


def make_lessons(names: list[str]) -> int:
    """Executes what changed (or what is named) and writes the notebooks beside their sources; the seconds each took go
    into the machine's results file, with the size they were run at."""
    import torch

    from minillm import doctor
    from minillm.bench import machine, results
    from minillm.device import pick_dtype

    file = ROOT / "results" / f"{machine.slug()}.json"
    results.check_room(file)
    dial = os.environ.get("MINILLM_SIZE", "default")
    cpu = torch.device("cpu")
    speeds = doctor.measure(cpu)  # for estimates on other machines
    for source in chosen(names):
        path = source.with_suffix(".ipynb")
        old = nbformat.read(path, as_version=4) if path.exists() else None
        if old is not None and not names and agree(source, old) is None:
            print(f"{source.name}: unchanged")
            continue
        notebook = solved(source)
        os.environ["MINILLM_NOTES"] = os.devnull  # the book has no learner
        seconds = execute(notebook, LESSONS)
        nbformat.write(notebook, path)
        print(f"{source.stem}: {seconds:.0f} s", flush=True)
        found = results.load(file).get("lessons", {"seconds": {}}) if file.exists() else {"seconds": {}}
        taken = {**found["seconds"], source.stem: {"size": dial, "seconds": round(seconds, 1)}}
        section = {"about": machine.describe(cpu), "partial": False, "seconds": dict(sorted(taken.items()))}
        section |= {"speeds": speeds, "dtype": str(pick_dtype("auto", cpu)).removeprefix("torch.")}
        results.add(file, "lessons", section)
        INDEX.write_text(index(INDEX.read_text("utf-8"), taken), "utf-8")
    return 0


def make_student(folder: Path = STUDENT) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    made = by_name().values()
    for source in made:
        nbformat.write(student(source), folder / f"{source.stem}.ipynb")
    shutil.copy(AGENTS, folder)
    print(f"{len(made)} notebooks without solutions: {folder}")
    return 0


def make_lab(folder: Path) -> int:
    """The student's notebooks in a folder of the learner's own. What is there is never written over."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / AGENTS.name).exists():
        shutil.copy(AGENTS, folder)
    for source in by_name().values():
        path = folder / f"{source.stem}.ipynb"
        fresh = student(source)
        if not path.exists():
            nbformat.write(fresh, path)
            print(f"{path}: new")
            continue
        ids = [cell["id"] for cell in nbformat.read(path, as_version=4).cells]
        if any(cell["id"] not in ids for cell in fresh.cells):
            print(f"{path}: yours, kept; the lesson has changed since: rename it, and run this again for the new one")
    return 0


def chosen(names: list[str]) -> list[Path]:
    """Sources by number. Raises InputError for an unknown one."""
    known = {source.name[:2]: source for source in sources()}
    for name in names:
        if name not in known:
            raise InputError(f"lesson {name!r} is not known; use some of {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def main(arguments: list[str]) -> int:
    """`python -m minillm.lab.build lessons [NN ...] | student [FOLDER] | lab FOLDER`"""
    what, *rest = arguments or [""]
    try:
        if what == "lessons":
            return make_lessons(rest)
        if what == "student":
            return make_student(*map(Path, rest[:1]))
        if what == "lab" and rest:
            return make_lab(Path(rest[0]))
        raise InputError(f"{what!r} is not known; use lessons, student or lab FOLDER")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
