"""Marks into a notebook, in nbgrader's autograding: in the place of running the notebook.

Each locked graded cell gets an output, as if it had been run: what held and why not, then its points, which nbgrader
reads. A property that holds once right functions take the place of the student's other wrong ones counts as held:
one mistake costs points once. And a function that holds on the public inputs alone gets nothing for hidden ones.
"""

import html
import json
import textwrap
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade, is_solution
from traitlets import Float, Integer

from minillm.course.assignment import HIDDEN_ID, POINTS, Assignment, assignments, grade_id
from minillm.course.grading import Mark, Marks, grade
from minillm.course.points import earned

LONGEST = 2000  # characters of one reason
ABOUT = "minillm"  # our part of a notebook's metadata
FOR_TEACHER = "marks"  # the folder with what grading found, hidden reasons too


class GradeByProperties(NbGraderPreprocessor):
    """Fills the graded cells. The student's code runs in a process of `grading`, never in this one."""

    seed = Integer(0, help="Of the hidden inputs: for teachers alone.").tag(config=True)
    seconds = Float(600.0, help="Most for one notebook.").tag(config=True)
    each = Float(30.0, help="Most seconds for one property.").tag(config=True)
    memory_gib = Float(2.0, help="Most memory of a notebook, beside torch's own.").tag(config=True)

    def preprocess(self, notebook: Any, resources: Any) -> tuple[Any, Any]:
        name = resources["nbgrader"]["notebook"]
        [assignment] = [each for each in assignments() if each.name == name]
        about = notebook.metadata.setdefault(ABOUT, {})
        if not about.get("refused"):
            started = STARTED.get((resources["nbgrader"]["student"], name))
            path = Path(resources["metadata"]["path"], f"{name}.ipynb")
            marks = started.result() if started else self.marks(path, assignment)
            keep(marks, Path(FOR_TEACHER, resources["nbgrader"]["student"]), name)
            about |= {"refused": marks.refused, "flags": list(marks.flags)}
        for cell in notebook.cells:
            if is_grade(cell) and is_solution(cell):
                show(cell, f"{cell.metadata.nbgrader.points:g} points, given by a person.")
            elif is_grade(cell) and about["refused"]:
                show(cell, f"No points. {about['refused']}", 0.0)
            elif is_grade(cell):
                show(cell, *judged(marks, cell.metadata.nbgrader.grade_id, cell.metadata.nbgrader.points))
        words = [about["refused"], *about.get("notes", ())]
        if any(words):
            text = html.escape("\n".join(each for each in words if each))
            notebook.cells.insert(0, nbformat.v4.new_markdown_cell(f"**About this submission**\n<pre>{text}</pre>"))
        return notebook, resources

    def marks(self, path: Path, assignment: Assignment) -> Marks:
        limits = {"seconds": self.seconds, "each": self.each, "memory_gib": self.memory_gib}
        return grade(path, assignment.id, self.seed, **limits)


STARTED: dict[tuple[str, str], Future[Marks]] = {}  # marks on their way: {(student, name of the assignment): marks}


def keep(marks: Marks, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(asdict(marks), indent=1) + "\n", "utf-8")


def show(cell: Any, text: str, points: float | None = None) -> None:
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text + "\n")]
    if points is not None:  # a number as a result is what nbgrader takes for partial credit
        data = {"text/plain": f"{points:g}"}
        cell.outputs.append(nbformat.v4.new_output("execute_result", data=data, execution_count=None))


def judged(marks: Marks, name: str, points: float) -> tuple[str, float]:
    """What a graded cell says, and what it gives."""
    if name == marks.lesson + HIDDEN_ID:
        return hidden(marks, points)
    [own] = [marks.of(each) for each in marks.functions() if grade_id(f"{marks.lesson}.{each}") + POINTS == name]
    return public(own, points)


def held(mark: Mark) -> bool:
    return mark.public or mark.carried


def held_hidden(mark: Mark) -> bool:
    return bool(mark.hidden) or mark.hidden_carried


def public(marks: Sequence[Mark], points: float) -> tuple[str, float]:
    """Of one function: its properties, each with the reason why it does not hold."""
    number = sum(map(held, marks))
    lines = [f"{marks[0].function}: {number} of {len(marks)} properties hold."]
    told = set()
    for mark in marks:
        lines.append(f"  {'ok' if mark.public else 'wait' if mark.carried else 'WRONG':<5}  {mark.says}")
        if not mark.public and mark.reason not in told:
            told.add(mark.reason)
            lines.append(textwrap.indent(mark.reason[:LONGEST], " " * 9))
            if not mark.carried:
                lines.append(f"         hint: {mark.hint}")
    if any(mark.carried for mark in marks):
        lines.append("What waits for another function counts as if it held.")
    return "\n".join(lines), earned(points, number, len(marks))


def hidden(marks: Marks, points: float) -> tuple[str, float]:
    """Never an input and never a value: the properties' sentences alone."""
    only = [mark for mark in marks.marks if held(mark) and not held_hidden(mark)]
    caught = {mark.function for mark in only}
    number = sum(held_hidden(mark) and mark.function not in caught for mark in marks.marks)
    lines = [f"On other inputs: {number} of {len(marks.marks)} properties count."]
    lines += [f"  holds on the public inputs, not on others: {mark.function}: {mark.says}" for mark in only]
    if caught:
        lines.append(f"So nothing of {', '.join(sorted(caught))} counts here.")
    return "\n".join(lines), earned(points, number, len(marks.marks))
