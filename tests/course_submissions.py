"""Simulated submissions of lesson 00, and the marks that each deserves: ten of the usual kinds, then stranger ones.

Points of the lesson: floor_seconds 4 (of 4 properties), decode_ceiling 6 (of 6), balance_batch 2 (of 2); 5 on hidden
inputs, by the properties that hold (of 12), rounded down to a quarter; 3 for what is written, which a person marks.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants import planted, reference

from minillm.lab.build import LESSONS, solved, stubbed
from minillm.lab.checking import run_checks

NAME = "00_tour"
FUNCTIONS = ("floor_seconds", "decode_ceiling", "balance_batch")
WHY = 'lab.answer("00.why", "A step reads every weight once, however many texts it serves.")'
Build = Callable[[Path, Any], None]  # into a student's folder, from the release


@dataclass(frozen=True)
class Simulated:
    student: str
    what: str
    build: Build
    public: float
    hidden: float
    status: str = "graded"
    says: str = ""  # in its reason, in the table and the CSV
    to_mark: bool = False  # has a written answer


def solution(function: str) -> str:
    [cell] = [cell for cell in solved(LESSONS / f"{NAME}.py").cells if cell.metadata.get("task") == f"00.{function}"]
    return str(cell.source)


def mutant(name: str) -> str:
    [found] = [one for one in planted("00") if one.name == name]
    return found.code


def answered(release: Any, why: str | None = WHY, **code: str) -> Any:
    """The release with these functions written, others as released."""
    notebook = deepcopy(release)
    for cell in notebook.cells:
        function = cell.metadata.get("task", "").removeprefix("00.")
        if function in code:
            cell.source = code[function]
        elif "lab.answer(" in cell.source and cell.cell_type == "code" and why is not None:
            cell.source = why
    return notebook


def right(*functions: str) -> dict[str, str]:
    return {function: solution(function) for function in functions or FUNCTIONS}


def write(folder: Path, notebook: Any, name: str = f"{NAME}.ipynb") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(notebook), "utf-8")  # not nbformat's: what is wrong stays wrong


# ---- ten


def perfect(folder: Path, release: Any) -> None:
    write(folder, answered(release, **right()))


def empty(folder: Path, release: Any) -> None:
    """Renamed, in a folder of a zip."""
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"work/{NAME}-1.ipynb", json.dumps(release))


def half(folder: Path, release: Any) -> None:
    """As Python instead of a notebook: one file with two of the three functions."""
    folder.mkdir(parents=True)
    text = "\n\n".join(right("floor_seconds", "balance_batch").values())
    (folder / f"{NAME}.py").write_text(text, "utf-8")


def added_up(folder: Path, release: Any) -> None:
    write(
        folder, answered(release, **right() | {"floor_seconds": mutant("moving and multiplying one after the other")})
    )


def for_every_text(folder: Path, release: Any) -> None:
    write(folder, answered(release, **right() | {"decode_ceiling": mutant("weights read anew for every text")}))


def not_halved(folder: Path, release: Any) -> None:
    write(folder, answered(release, **right() | {"balance_batch": mutant("factor 2 forgotten")}))


def edits_the_tests(folder: Path, release: Any) -> None:
    """Graded cells that give themselves all points, a setup that bends the check, and outputs that boast."""
    notebook = answered(release, why=None)
    result = {"output_type": "execute_result", "data": {"text/plain": "20.0"}, "metadata": {}, "execution_count": 1}
    for cell in notebook.cells:
        own = cell.metadata.get("nbgrader", {})
        if own.get("grade") or own.get("locked"):
            cell.source += "\nimport minillm.lab.checking as c\nc.reason = lambda *a: None\n20.0"
            cell.outputs = [result]
            own |= {"points": 1000.0, "locked": False}
        elif "lab.check(" in cell.source:
            cell.source = "print('12 of 12 properties hold.')"
    write(folder, notebook)


def reads_the_reference(folder: Path, release: Any) -> None:
    borrowed = (
        "from minillm.lab.checks.c00 import right_floor\n\n\ndef floor_seconds(*args):\n    return right_floor(*args)"
    )
    write(folder, answered(release, floor_seconds=borrowed))


def hard_coded(folder: Path, release: Any) -> None:
    """Every question of the public check with its answer, written down."""
    with recorded() as (work, seen):
        run_checks("00", work)
    code = {}
    for function in FUNCTIONS:
        table = {repr(args): value for name, args, value in seen if name == function}
        code[function] = (
            f"TABLE_{function} = {table!r}\n\n\ndef {function}(*args):\n    return TABLE_{function}[repr(args)]"
        )
    write(folder, answered(release, **code))


@contextmanager
def recorded() -> Iterator[tuple[Any, list[tuple[str, tuple[Any, ...], Any]]]]:
    work, seen = reference("00"), []
    for name in FUNCTIONS:
        work.names[name] = recorder(name, work.names[name], seen)
    yield work, seen


def recorder(name: str, function: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        seen.append((name, args, value := function(*args)))
        return value

    return call


def damaged(folder: Path, release: Any) -> None:
    """Cells doubled and deleted, all ids the same, and a copy that is still the stub at the end."""
    notebook = answered(release, **right())
    by_task = {cell.metadata.get("task"): cell for cell in notebook.cells}
    stub = deepcopy(by_task["00.floor_seconds"])
    stub.source = stubbed(stub.source, "00.floor_seconds", NAME)
    notebook.cells = [
        cell
        for cell in notebook.cells
        if cell.metadata.get("task") != "00.balance_batch" and not cell.metadata.get("nbgrader", {}).get("locked")
    ]
    notebook.cells += [stub, deepcopy(by_task["00.decode_ceiling"])]
    for cell in notebook.cells:
        cell["id"] = "same"
    write(folder, notebook)


TEN = [
    Simulated("01-perfect", "all right", perfect, 12, 5, to_mark=True),
    Simulated("02-empty", "as released, in a zip", empty, 0, 0),
    Simulated("03-half", "two of three functions, as Python", half, 6, 2.5),
    Simulated("04-added-up", "wrong: moving and multiplying one after the other", added_up, 11, 4.5, to_mark=True),
    Simulated("05-every-text", "wrong: weights read anew for every text", for_every_text, 9, 3.75, to_mark=True),
    Simulated("06-not-halved", "wrong: factor 2 forgotten", not_halved, 11, 4.5, to_mark=True),
    Simulated("07-edits-tests", "edits the tests", edits_the_tests, 0, 0),
    Simulated("08-reads", "reads the reference", reads_the_reference, 0, 0, says="may not use it", to_mark=True),
    Simulated("09-hard-coded", "knows the public answers", hard_coded, 12, 0, says="and not on others", to_mark=True),
    Simulated(
        "10-damaged", "cells doubled and deleted", damaged, 10, 4, says="no cell for balance_batch", to_mark=True
    ),
]


# ---- stranger ones


def old_and_huge(folder: Path, release: Any) -> None:
    """Renamed, in the format of 2013, of another kernel, with 100 MB of outputs."""
    cells = []
    for cell in answered(release, **right()).cells:
        if cell.cell_type == "code":
            cells.append({"cell_type": "code", "input": cell.source.splitlines(keepends=True), "metadata": {}})
    cells[3]["outputs"] = [{"output_type": "stream", "stream": "stdout", "text": "x" * 100_000_000}]
    old = {"nbformat": 3, "nbformat_minor": 0, "metadata": {"name": "", "kernelspec": {"name": "ir", "language": "R"}}}
    write(folder, old | {"worksheets": [{"cells": cells}]}, "Copy of 00_tour (1).ipynb")


def broken_and_endless(folder: Path, release: Any) -> None:
    endless = "def balance_batch(itemsize, bytes_per_s, flops_per_s):\n    while True:\n        pass"
    code = {"floor_seconds": "def floor_seconds(weight_bytes\n    return 1", "balance_batch": endless}
    write(folder, answered(release, **right("decode_ceiling") | code))


def late(folder: Path, release: Any) -> None:
    perfect(folder, release)
    (folder / "timestamp.txt").write_text("2027-02-01 08:00:00 UTC\n")


def raw(data: bytes, name: str = f"{NAME}.ipynb") -> Build:
    def build(folder: Path, release: Any) -> None:
        folder.mkdir(parents=True)
        (folder / name).write_bytes(data)

    return build


def link(folder: Path, release: Any) -> None:
    perfect(folder.parent.parent / "elsewhere", release)
    folder.mkdir(parents=True)
    (folder / f"{NAME}.ipynb").symlink_to(folder.parent.parent / "elsewhere" / f"{NAME}.ipynb")


def bomb(folder: Path, release: Any) -> None:
    """300 MB that are 300 kB, and a path that leads out."""
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{NAME}.ipynb", b"[" * 300_000_000)
        archive.writestr(f"../{NAME}.ipynb", json.dumps(release))


STRANGE = [
    Simulated("20-old-and-huge", "renamed, old format, 100 MB of outputs", old_and_huge, 12, 5, to_mark=True),
    Simulated(
        *("21-broken", "a syntax error, an endless loop", broken_and_endless, 6, 2.5),
        *("graded", "floor_seconds 0 of 4 points, balance_batch 0 of 2 points"),
        to_mark=True,
    ),
    Simulated("22-late", "after the due time", late, 12, 5, "late", "1.0 hours late", to_mark=True),
    Simulated("23-pdf", "no notebook", raw(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3"), 0, 0, "refused", "not a notebook"),
    Simulated("24-nothing", "an empty file", raw(b""), 0, 0, "refused", "empty"),
    Simulated("25-deep", "nested without an end", raw(b"[" * 200_000), 0, 0, "refused", "nested too deeply"),
    Simulated("26-no-cells", "JSON, but no notebook", raw(b'{"cells": 7}'), 0, 0, "refused", "no cells"),
    Simulated("27-text", "another kind of file", raw(b"see my mail", f"{NAME}.docx"), 0, 0, "refused", "neither"),
    Simulated("28-link", "a link to somebody else's", link, 0, 0, "refused", "link"),
    Simulated("29-bomb", "a zip that unpacks to 300 MB", bomb, 0, 0, "refused", "the limit is"),
    Simulated("30-missing", "nothing of the lesson", raw(b"a picture", "cat.png"), 0, 0, "missing", "nothing"),
]
