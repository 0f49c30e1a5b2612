"""The door: whatever students hand in comes through here, is found to be of an assignment, and is read or refused.

Files may be renamed, packed, broken, far too large, or no files at all. Each gets a reason where it cannot be used.
"""

import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jupytext
from nbgrader.utils import parse_utc

from minillm.course.assignment import Assignment
from minillm.course.reading import read_cells, whole
from minillm.course.repair import placed
from minillm.errors import InputError

MOST_BYTES = 256 << 20  # of one file, unpacked
MOST_FILES = 1000  # of one student
PYTHON_BYTES = 1 << 20
TIMESTAMP = "timestamp.txt"  # when it was handed in, as nbgrader and other collectors write it
SKIPPED = {"__MACOSX", "__pycache__"}
MOODLE = re.compile(r"(.+?)_(\d+)_assignsubmission")
START = re.compile(r"""lab\.(?:start|check)\(\s*["']((?:\d\d|p[1-9]))["']""")
MARK = re.compile(r"(\d\d|p[1-9])(?![0-9])")
NUMBER = re.compile(r"(?<![0-9A-Za-z])(?:ps?([1-9])|(\d\d))(?=[ _-][A-Za-z]|\.)", re.IGNORECASE)


@dataclass(frozen=True)
class File:
    """One file of a student's. `read` gives its bytes; `problem` says why it may not be read, alone or all of them."""

    name: str
    read: Callable[[], bytes] = bytes
    problem: str = ""
    all: bool = False


@dataclass
class Submission:
    """What a student handed in for an assignment. `refused`: why nothing of it can be graded."""

    assignment: Assignment
    file: str
    answers: dict[str, str] = field(default_factory=dict)  # {id of the release's cell: what stands in it}
    notes: list[str] = field(default_factory=list)
    refused: str = ""
    timestamp: str = ""


# ---- files


def students(folder: Path) -> dict[str, list[Path]]:
    """The folder or zip (or both) of each student. Raises InputError if there is none."""
    found: dict[str, list[Path]] = {}
    loose: list[str] = []
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; it must hold one folder or zip for each student")
    for path in sorted(folder.iterdir()):
        if path.name[0] not in "._" and (path.is_dir() or path.suffix.lower() == ".zip"):
            name = path.name if path.is_dir() else path.stem
            found.setdefault(re.sub(r"[^\w.@ -]", "_", name).strip(), []).append(path)
        elif path.name[0] not in "._" and ".ipynb" in path.name.lower():
            loose.append(path.name)
    if loose:
        raise InputError(
            f"{folder} has notebooks that lie in no student's folder ({loose[0]}; {len(loose)} in all); make one "
            "folder for each student, with the student's name, and put the files into it"
        )
    if not found:
        raise InputError(f"{folder} has no folder and no zip in it; it must hold one for each student")
    return by_student(found)


def by_student(found: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """Without what Moodle puts behind a name: "Ada Byron_123_assignsubmission_file_" is of "Ada Byron". Where two have
    one name, the number stays."""
    parts = {name: MOODLE.match(name) for name in found}
    numbers: dict[str, set[str]] = {}
    for name, part in parts.items():
        numbers.setdefault(part[1] if part else name, set()).add(part[2] if part else "")
    merged: dict[str, list[Path]] = {}
    for name, part in parts.items():
        student = name if part is None else part[1] if len(numbers[part[1]]) == 1 else f"{part[1]}_{part[2]}"
        merged.setdefault(student, []).extend(found[name])
    return merged


def files(path: Path) -> Iterator[File]:
    """All files of a student's folder or zip, links and archives within it too: these say that they are none."""
    if path.is_symlink():
        yield File(path.name, problem="it is a link", all=True)
    elif path.is_dir():
        seen = 0
        for where, folders, names in os.walk(path):
            folders[:] = sorted(each for each in folders if each[0] != "." and each not in SKIPPED)
            for name in sorted(names + [each for each in folders if looks_like_work(each)]):
                seen += 1
                if seen <= MOST_FILES and name[0] != ".":
                    yield from on_disk(Path(where, name), str(Path(where, name).relative_to(path)))
        if seen > MOST_FILES:
            yield File(path.name, problem=f"it holds more than {MOST_FILES:,} files; the rest was left out", all=True)
    else:
        yield from zipped(path)


def on_disk(path: Path, name: str) -> Iterator[File]:
    try:
        about = path.lstat()
    except OSError as error:
        yield File(name, problem=f"it cannot be read ({error.strerror})")
        return
    if not stat.S_ISREG(about.st_mode):
        kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}
        yield File(name, problem=f"it is {kinds.get(stat.S_IFMT(about.st_mode), 'no regular file')}")
    elif path.suffix.lower() == ".zip":
        yield from zipped(path)
    elif about.st_size > MOST_BYTES:
        yield File(name, problem=too_large(about.st_size))
    else:
        yield File(name, path.read_bytes)


def zipped(path: Path) -> Iterator[File]:
    """Nothing is unpacked to the disk, and nothing is read further than its limit, whatever the archive says."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    except Exception as error:
        yield File(path.name, problem=f"it is not a zip that can be opened ({error})", all=True)
        return
    for entry in entries[:MOST_FILES]:
        name = f"{path.name}/{entry.filename}"
        parts = Path(entry.filename.replace("\\", "/")).parts
        if any(part[0] == "." and part != ".." or part in SKIPPED for part in parts):
            continue
        if ".." in parts or re.match(r"[/\\]|[A-Za-z]:", entry.filename):
            yield File(name, problem="its path leads out of the folder")
        elif stat.S_ISLNK(entry.external_attr >> 16):
            yield File(name, problem="it is a link")
        elif entry.file_size > MOST_BYTES:
            yield File(name, problem=too_large(entry.file_size))
        else:
            yield File(name, lambda entry=entry: unzipped(path, entry))  # type: ignore[misc]
    if len(entries) > MOST_FILES:
        yield File(path.name, problem=f"it holds more than {MOST_FILES:,} files; the rest was left out", all=True)


def unzipped(path: Path, entry: zipfile.ZipInfo) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(entry) as file:
            data = file.read(MOST_BYTES + 1)
    except Exception as error:  # zipfile, zlib and lzma each have their own
        raise InputError(f"it cannot be unpacked ({error})") from error
    if len(data) > MOST_BYTES:
        raise InputError(too_large(len(data)))
    return data


def too_large(size: int, most: int = MOST_BYTES) -> str:
    return f"it has {size / 1e6:,.1f} MB; the limit is {most / 1e6:,.0f} MB"


def looks_like_work(name: str) -> bool:
    return ".ipynb" in name.lower() or name.lower().endswith(".py")


# ---- which assignment


def submissions(paths: Sequence[Path], releases: Mapping[Assignment, Any]) -> tuple[list[Submission], list[str]]:
    """What a student handed in, at most one for each assignment, and what could not be used of it, with reasons.

    `releases`: the notebooks of the assignments that are graded now.
    """
    found: dict[Assignment, list[Submission]] = {}
    unused: list[str] = []
    timestamp = ""
    for file in (replace(file, name=whole(file.name)) for path in paths for file in files(path)):
        if file.name == TIMESTAMP:  # not one in a zip or a folder, which a student can have put there
            timestamp = moment(file)
            if not timestamp:
                unused.append(f"{TIMESTAMP}: it does not begin with a time as 2027-01-31 23:59:00 UTC")
            continue
        made = submission(file, releases)
        if isinstance(made, Submission):
            found.setdefault(made.assignment, []).append(made)
        elif made:
            unused.append(f"{file.name}: {made}")
    best = []
    for several in found.values():
        # what can be read comes before what cannot, then the release's own name, then the last by name
        several.sort(key=lambda one: (not one.refused, Path(one.file).stem == one.assignment.name, one.file))
        best.append(several[-1])
        best[-1].timestamp = timestamp
        if len(several) > 1:
            best[-1].notes.append(f"not graded: {', '.join(one.file for one in several[:-1])}")
    return best, unused


def moment(file: File) -> str:
    try:
        text = file.read()[:100].decode("utf-8", "replace").strip()
        return str(parse_utc(text)) + " UTC"
    except (OSError, ValueError, OverflowError):
        return ""


def submission(file: File, releases: Mapping[Assignment, Any]) -> Submission | str:
    """A file as a submission, else why it is none ("": it is of something else)."""
    by_name, problem = named(file.name), file.problem
    cells: list[dict[str, Any]] = []
    if not looks_like_work(file.name) and not file.all:
        if by_name is None:
            return ""
        problem = problem or "it is neither a notebook (.ipynb) nor Python (.py)"
    if not problem:
        try:
            data = file.read()
            cells = read_cells(data) if ".ipynb" in file.name.lower() else python_cells(data)
        except (InputError, OSError) as error:
            problem = str(error)
    name = said(cells) or by_name
    of = [assignment for assignment in releases if assignment.id == name]
    if name is None and len(releases) == 1:  # then it can be of no other
        of = [assignment for assignment in releases if not cells or placed(releases[assignment], cells)[0]]
    if not of:
        return problem or ("" if name else "it does not say which assignment it is")
    made = Submission(of[0], file.name, refused=problem)
    if not problem:
        made.answers, made.notes = placed(releases[of[0]], cells)
    return made


def named(name: str) -> str | None:
    """The assignment that a file's name tells: "Copy of 04_kv_cache (1).ipynb" is of "04", "ps1_x.py" of "p1"."""
    found = NUMBER.search(Path(name).name)
    return None if found is None else f"p{found[1]}" if found[1] else found[2]


def said(cells: Sequence[Mapping[str, Any]]) -> str | None:
    """The assignment that most of the marked cells are of; without any, the one that is started."""
    marks = [str(cell["metadata"].get("task", "")) for cell in cells]
    for cell in cells:
        own = cell["metadata"].get("nbgrader")
        marks.append(str(own.get("grade_id", "")) if isinstance(own, dict) else "")
    if not any(marks):
        marks = [found[1] for cell in cells for found in START.finditer(cell["source"])]
    known = Counter(found[1] for found in map(MARK.match, marks) if found)
    return known.most_common(1)[0][0] if known else None


def python_cells(data: bytes) -> list[dict[str, Any]]:
    """Of a lesson's source, or of plain Python, which is one cell."""
    if len(data) > PYTHON_BYTES:
        raise InputError(too_large(len(data), PYTHON_BYTES))
    if not data.strip():
        raise InputError("the file is empty")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"it is not Python: byte {error.start} is not UTF-8") from error
    if "# %%" not in text:
        return [{"type": "code", "source": text, "metadata": {}, "id": ""}]
    notebook = jupytext.reads(text, fmt="py:percent")
    return [
        {"type": "code", "source": cell.source, "metadata": dict(cell.metadata), "id": ""}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
