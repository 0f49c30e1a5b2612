"""A submission's answers, put into a fresh copy of the release: what was graded is always the release's notebook.

Nothing of a submission is kept but the text of its code cells, each found by nbgrader's id, by our task, by the cell's
id, or by the function that it defines. So a cell that was deleted, doubled, or stripped of its metadata does no harm,
and a change in a locked one has no effect.
"""

import ast
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from nbformat.v4 import new_code_cell

from minillm.course.assignment import ANSWER
from minillm.lab.use import STUB
from minillm.lab.work import defined

OWN = "own-"
Cell = Mapping[str, Any]  # of a submission, as `reading` gives it


def placed(release: Any, cells: Sequence[Cell]) -> tuple[dict[str, str], list[str]]:
    """{id of the release's cell: what the student wrote there}, and what was found to be odd. Code of the student's
    that has no place in the release has an id of its own, OWN and a number: it is shown, and not graded."""
    answers: dict[str, str] = {}
    notes: list[str] = []
    used: dict[int, str] = {}
    for mine in release.cells:
        if not is_answer(mine):
            continue
        name, wanted = mine["id"], wanted_of(mine)
        found = [cell for cell in cells if claims(cell, mine)] or [cell for cell in cells if writes(cell, wanted)]
        if not found:
            notes.append(f"no cell for {wanted}")
            continue
        if len(found) > 1:
            notes.append(f"{len(found)} cells for {wanted}: the last one that is written counts")
        best = max(enumerate(found), key=lambda at: (writes(at[1], wanted), STUB not in at[1]["source"], at[0]))[1]
        if id(best) in used:  # several functions in one cell: it is run once
            answers[name] = f"# {wanted}: in the cell of {used[id(best)]}"
        else:
            answers[name] = best["source"]
        used.setdefault(id(best), wanted)
    if not used:
        return {}, notes
    ours = {cell["id"] for cell in release.cells if cell.cell_type == "code" and "nbgrader" not in cell.metadata}
    known = {cell.source.strip() for cell in release.cells} | {""}
    for number, cell in enumerate(cells, 1):
        if cell["type"] == "code" and id(cell) not in used:
            if cell["id"] in ours:
                answers[cell["id"]] = cell["source"]
            elif cell["source"].strip() not in known and not any(claims(cell, mine) for mine in release.cells):
                answers[f"{OWN}{number}"] = cell["source"]
    return answers, notes


def is_answer(cell: Any) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))


def wanted_of(cell: Any) -> str:
    """What an answer must have: its function, or the name of a written answer."""
    task = cell.metadata.get("task")
    if task is not None:
        return str(task).split(".", 1)[1]
    found = ANSWER.search(cell.source)
    assert found is not None
    return found[1]


def claims(cell: Cell, mine: Any) -> bool:
    """Whether a submitted cell says that it is this one of the release."""
    about, own = cell["metadata"], mine.metadata
    theirs = about.get("nbgrader")
    name = theirs.get("grade_id") if isinstance(theirs, dict) else None
    return (
        (name is not None and name == own.get("nbgrader", {}).get("grade_id"))
        or (about.get("task") is not None and about.get("task") == own.get("task"))
        or cell["id"] == mine["id"]
    )


def writes(cell: Cell, wanted: str) -> bool:
    """Whether a cell defines the function, or gives the written answer."""
    if "." in wanted:
        return any(found[1] == wanted for found in ANSWER.finditer(cell["source"]))
    return wanted in defined(cell["source"])


def filled(release: Any, answers: Mapping[str, str]) -> Any:
    """A copy of the release with the answers in it. A written answer of blanks stays the release's."""
    notebook = deepcopy(release)
    for cell in notebook.cells:
        text = answers.get(cell["id"])
        if "task" in cell.metadata and text is None:
            text = f"# {wanted_of(cell)} was not in what was handed in"
        if text is not None and not (ANSWER.search(cell.source) and written(text) == ""):
            cell.source = text
    for name, text in answers.items():
        if name.startswith(OWN):
            notebook.cells.append(new_code_cell(text, id=name))
    return notebook


def written(source: str) -> str | None:
    """The text in `lab.answer("04.why", "...")`; None where it cannot be told."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "answer":
            values = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
            if len(values) == 2 and isinstance(values[1], str):
                return values[1].strip()
    return None
