"""What was handed in, found by its marks, and what the lesson's release adds to it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from minillm.course.guard import used_of_project
from minillm.course.reading import read_cells
from minillm.errors import InputError
from minillm.lab.build import LESSONS, by_name, solved, sources

MOST_BYTES = 256 << 20  # of a file
REACHES = {"p1": "02", "p2": "05", "p3": "08", "p4": "10", "p5": "13"}  # the last lesson that a problem set builds on


class Refused(Exception):
    """A submission that cannot be graded, with the reason."""


def submitted(notebook: Path) -> list[dict[str, Any]]:
    try:
        if not notebook.is_file():
            raise Refused(f"{notebook.name} is not a file")
        if (size := notebook.stat().st_size) > MOST_BYTES:
            raise Refused(
                f"{notebook.name} has {size / 1e6:,.0f} MB, more than {MOST_BYTES / 1e6:,.0f}: clear its outputs"
            )
        return read_cells(notebook.read_bytes())
    except OSError as error:
        raise Refused(f"{notebook.name} cannot be read ({error.strerror})") from error
    except InputError as error:
        raise Refused(f"{notebook.name}: {error}") from error


def source_of(lesson: str) -> Path:
    found = by_name().get(lesson)
    if found is None:
        raise InputError(f"lesson {lesson} is not in {LESSONS}; grading needs a clone of the project")
    return found


@cache
def code_cells(source: Path) -> tuple[list[str], dict[str, str]]:
    """The setup cells of a lesson, and {task: its solution}."""
    setup, tasks = [], {}
    for cell in solved(source).cells:
        if cell.cell_type == "code" and "setup" in cell.metadata.get("tags", []):
            setup.append(cell.source)
        elif "task" in cell.metadata:
            tasks[cell.metadata["task"]] = cell.source
    return setup, tasks


def allowed(lesson: str) -> list[str]:
    """What of the project the solutions use, of this lesson and of those before it."""
    names: set[str] = set()
    for source in [*sources(), source_of(lesson)]:
        if source == source_of(lesson) or source.name[:2] <= REACHES.get(lesson, lesson):
            setup, tasks = code_cells(source)
            names |= used_of_project(setup, tasks.values())
    return sorted(names)


def task_of(cell: dict[str, Any], tasks: dict[str, str]) -> str | None:
    """By its mark, or by the ids that releases give it."""
    of_grader = cell["metadata"].get("nbgrader")
    marks = [
        cell["metadata"].get("task"),
        cell["id"],
        of_grader.get("grade_id") if isinstance(of_grader, dict) else None,
    ]
    return next((task for task in tasks for one in marks if one in (task, re.sub(r"[._]", "-", task))), None)


def made_in(code: str) -> list[str]:
    """Names that a cell makes at its left margin, also where it does not compile."""
    found = re.findall(r"^(?:async def|def|class) +(\w+)|^(\w+) *(?::[^=\n]+)?=[^=]", code, re.MULTILINE)
    found += [
        ("", name) for line in re.findall(r"^(?:from .+ )?import (.+)", code, re.M) for name in re.findall(r"\w+", line)
    ]
    return [one or other for one, other in found]
