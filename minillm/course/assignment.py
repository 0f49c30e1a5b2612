"""From the source of a lesson or a problem set to an assignment of nbgrader: the same cells, and graded ones.

Every cell with a task is an answer that is graded by itself; a locked cell behind it holds the points of its function.
The written answer is graded by a person; the locked cell behind that one holds the points on hidden inputs. Whoever
has the release has nothing else: no solution, no test and no seed.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.preprocessors import NbGraderPreprocessor

from minillm.course.points import HIDDEN, MOST, PUBLIC, WRITTEN, split
from minillm.errors import InputError
from minillm.lab.build import by_name, solved, stubbed, without_text
from minillm.lab.checking import properties

POINTS, HIDDEN_ID = "-points", "-hidden"  # how the ids of graded cells end
ANSWER = re.compile(r"""lab\.answer\(\s*["']([\w.]+)["']""")


@dataclass(frozen=True)
class Assignment:
    id: str  # "04", or "p1" for a problem set
    source: Path

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def rubric(self) -> str:
        """Where it stands how to mark the written answer."""
        return f"lessons/instructor/rubrics/{self.id}.md"


def assignments(only: Sequence[str] = ()) -> list[Assignment]:
    """All of them, or those named by their numbers. Raises InputError for an unknown one."""
    known = {name: Assignment(name, source) for name, source in by_name().items()}
    meant = {
        re.sub(r"^ps(?=\d$)", "p", name.zfill(2) if name.isdigit() else name): name for name in only
    }  # "ps1" and "4" as "p1" and "04"
    for key, name in meant.items():
        if key not in known:
            raise InputError(f"assignment {name!r} is not known; use some of {', '.join(known)}")
    return [each for each in known.values() if not only or each.id in meant]


def grade_id(name: str) -> str:
    """nbgrader's id of a cell: "04.kv_bytes_per_token" as the id that a notebook allows."""
    return name.replace(".", "-").replace("_", "-")


def function_points(assignment: Assignment) -> dict[str, float]:
    """The public points of each function: as large a share as it has of the properties."""
    return split(PUBLIC, Counter(prop.function for prop in properties(assignment.id)))


def master(assignment: Assignment) -> Any:
    """The teacher's notebook, with solutions."""
    notebook = solved(assignment.source)
    points = function_points(assignment)
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        task, answer = cell.metadata.get("task"), ANSWER.search(cell.source)
        if task is not None:
            function = task.split(".", 1)[1]
            mark(cell, grade_id(task), solution=True)
            words = f"{function}, {points[function]:g} of {MOST:g} points, in part for each property that holds"
            cells.append(graded(grade_id(task) + POINTS, points.pop(function), words))
        elif answer is not None and cell.cell_type == "code":
            mark(cell, grade_id(answer[1]), grade=True, solution=True, points=WRITTEN)
            words = f"{HIDDEN:g} of {MOST:g} points for the same properties, on inputs that are not shown"
            cells.append(graded(assignment.id + HIDDEN_ID, HIDDEN, words))
        elif "setup" in cell.metadata.get("tags", []):
            mark(cell, cell["id"], locked=True)
    if points:
        raise InputError(f"{assignment.source.name} has no task for {', '.join(points)}, which its checks ask for")
    notebook.cells = cells
    return notebook


def graded(name: str, points: float, words: str) -> Any:
    """A locked cell that holds points. It runs nothing: the properties are graded outside of the notebook."""
    cell = nbformat.v4.new_code_cell(f"# Graded: {words}. Nothing to write here.", id=name)
    mark(cell, name, grade=True, locked=True, points=points)
    return cell


def mark(cell: Any, name: str, **kind: Any) -> None:
    """Says to nbgrader what a cell is: its metadata, version 3."""
    what = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3} | kind
    cell.metadata["nbgrader"] = {"grade_id": name, **what}


class Stubs(NbGraderPreprocessor):
    """Takes the solutions out, by the rules of `make student`; nbgrader's own would leave no task's number."""

    def preprocess(self, notebook: Any, resources: Any) -> tuple[Any, Any]:
        name = resources["nbgrader"]["notebook"]
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.source = stubbed(cell.source, cell.metadata.get("task"), name)
            else:
                cell.source = without_text(cell.source, name)
        notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
        return notebook, resources
