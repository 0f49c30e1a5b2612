"""Grades one submitted notebook: the properties of its lesson, once in public and once on a teacher's own inputs.

    marks = grade(Path("04_kv_cache.ipynb"), "04", seed=2027)
    for mark in marks.of("store"): mark.public, mark.hidden, mark.reason

As `minillm check` does, it runs the setup and the task cells alone: the setup as we released it, the tasks as they were
handed in. They run in a new process (`grader`), with limits of time and memory, one thread, no network, and a folder of
its own (`guard`). If the process dies or hangs, the function that was being checked is to blame, and another process
goes on with the rest. Linux has all limits; macOS has none of memory. Windows is not supported.

`grade` raises InputError for the caller's mistakes alone (an unknown lesson, no release of it). Whatever is wrong with
the submission is in the Marks: a reason for each property, and `refused` where nothing counts.

The result comes on a pipe, and every line of it has a number that the submission is not told. So prints cannot fake
it. But the learner's code shares a process with the checks, and a determined author of hostile code can reach what is
in it: a mark is evidence, never proof. What a teacher does about it: give a seed that nobody knows, read the cells that
`flags` tell of, ask for one function to be explained in person, and run submissions in a container without rights.
"""

import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minillm.course.handed_in import Refused, allowed, code_cells, made_in, source_of, submitted, task_of
from minillm.course.process import Process, places, scratch
from minillm.errors import InputError
from minillm.lab.checking import SECONDS, properties

OTHERS = "something that is not the grader wrote to the grader's pipe"
MOST_FLAGS = 50


@dataclass(frozen=True)
class Mark:
    """One property. `reason` and `hidden_reason` are "" where it holds."""

    function: str
    says: str  # the property, as a sentence
    hint: str  # the usual cause when it does not hold
    public: bool  # holds on the public inputs
    hidden: bool | None  # holds on the variant's inputs; None where grade got no seed
    reason: str  # why not in public: a learner may read it
    hidden_reason: str  # why not in the variant: shows hidden inputs, so it is for the teacher alone
    # does not hold, but does with right functions in the place of others of the learner's that are wrong: a course may
    # count these as held, so that one mistake costs points once
    carried: bool = False
    hidden_carried: bool = False
    # False: its inputs are fixed by nature (an example by hand), so the variant asked what the public check asks. A
    # course may leave those that hold out of the hidden part: else a table of the public answers is worth points there
    varies: bool = True

    @property
    def feedback(self) -> str:
        """What a learner may read about it: the reason in public, and of the variant only that it does not hold."""
        if self.reason or self.hidden in (True, None):
            return self.reason
        return "this holds on the public inputs, and not on others: does the code know the values of the check?"


@dataclass(frozen=True)
class Marks:
    lesson: str
    source: str  # file name of the submission
    seed: int | None
    marks: list[Mark]  # every property of the lesson, in its order, also where nothing was graded
    refused: str = ""  # why nothing was graded, or why all that was graded counts nothing; "" if it counts
    flags: list[str] = field(default_factory=list)  # what the teacher should look at, in words

    def functions(self) -> list[str]:
        """In the order of the lesson."""
        return list(dict.fromkeys(mark.function for mark in self.marks))

    def of(self, function: str) -> list[Mark]:
        return [mark for mark in self.marks if mark.function == function]


def grade(
    notebook: Path,
    lesson: str,
    seed: int | None = None,
    *,
    seconds: float = 600.0,
    each: float = SECONDS,
    memory_gib: float = 2.0,
) -> Marks:
    """The marks of a notebook. `seconds` are for all of it, `each` for one property; memory comes on top of torch's."""
    if min(seconds, each, memory_gib) <= 0:
        raise InputError(f"seconds {seconds:g}, each {each:g}, memory {memory_gib:g} GiB: all must be above 0")
    run = Run(notebook.name, lesson, seed)
    try:
        cells = submitted(notebook)
        job = run.job(cells)
    except Refused as why:
        return run.marks(str(why))
    job |= {"each": each, "memory": int(memory_gib * 2**30)}
    run.until_done(job, time.monotonic() + seconds, seconds)
    return run.marks(run.void)


# ---- one submission, in one process after another


class Run:
    """What is known about a submission so far."""

    def __init__(self, source: str, lesson: str, seed: int | None):
        self.source, self.lesson, self.seed = source, lesson, seed
        self.properties = properties(lesson)
        self.setup, self.tasks = code_cells(source_of(lesson))
        self.phases: list[tuple[str, int | None]] = [("public", None)] + (
            [("hidden", seed)] if seed is not None else []
        )
        self.found: dict[tuple[str, int], tuple[str | None, bool]] = {}  # (phase, property): (wrong, carried)
        self.fixed: set[int] = set()  # properties that held in the variant and drew nothing
        self.blamed: dict[str, str] = {}  # functions that ended the process, and how
        self.elsewhere: dict[str, int] = {}  # names that cells make which are not run
        self.flags: list[str] = []
        self.void = ""
        self.left = "not tried"

    def job(self, cells: list[dict[str, Any]]) -> dict[str, Any]:
        mine = []
        for number, cell in enumerate(cells, 1):
            task = task_of(cell, self.tasks) if cell["type"] == "code" else None
            if task is not None:
                mine.append({"number": number, "code": cell["source"], "function": task.split(".", 1)[1], "skip": None})
            elif cell["type"] == "code":
                self.elsewhere.update({name: number for name in made_in(cell["source"])})
        if not mine:
            raise Refused(
                f"{self.source} has no cell of lesson {self.lesson}: each is marked with its task, as {min(self.tasks)}"
            )
        return {
            "lesson": self.lesson,
            "source": self.source,
            "setup": self.setup,
            "cells": mine,
            "of_project": allowed(self.lesson),
            "phases": self.phases,
            **places(),
        }

    def until_done(self, job: dict[str, Any], deadline: float, seconds: float) -> None:
        """Another process for as long as each blames one more function, and time is left."""
        while not self.void:
            job["only"] = {phase: self.missing(phase) for phase, _ in self.phases}
            if not any(job["only"].values()):
                return
            for cell in job["cells"]:
                cell["skip"] = self.blamed.get(cell["function"])
            before = len(self.blamed)
            with scratch() as folder:
                ended = self.one_process(job, folder, deadline)
            if time.monotonic() >= deadline:
                self.left = f"not tried: the limit of {seconds:g} s for the whole notebook was over"
                return
            if len(self.blamed) == before and not ended:
                self.void = self.void or "the process ended, and it cannot be told by which function"
            if ended:
                return

    def missing(self, phase: str) -> list[str]:
        functions = [prop.function for i, prop in enumerate(self.properties) if (phase, i) not in self.found]
        return [name for name in dict.fromkeys(functions) if name not in self.blamed]

    def one_process(self, job: dict[str, Any], folder: Path, deadline: float) -> bool:
        """True if it came to its end; else the function that was tried last is blamed."""
        process, why = Process(job, folder), ""
        last: dict[str, Any] = {}
        try:
            for message in process.messages(deadline, job["each"]):
                if "end" in message:
                    return True
                last = message if "begin" in message else last
                self.hear(message)
        except TimeoutError:
            over = time.monotonic() >= deadline
            why = "the time for the whole notebook was over" if over else f"it did not end within {job['each']:g} s"
        finally:
            how = process.end()
        if last or time.monotonic() < deadline:  # else it was too late to begin
            self.blame(job, last, why or how, folder)
        return False

    def hear(self, message: dict[str, Any]) -> None:
        flag = message.get("flag") if message else OTHERS
        if flag is not None and flag not in self.flags and len(self.flags) < MOST_FLAGS:
            self.flags.append(flag)
        if "void" in message:
            self.void = message["void"]
        if "found" in message:
            phase, i = message["found"]
            self.found[phase, i] = (message["wrong"], message["carried"])
            if phase == "hidden" and message["wrong"] is None and not message["drew"]:
                self.fixed.add(i)

    def blame(self, job: dict[str, Any], last: dict[str, Any], why: str, folder: Path) -> None:
        if not last:
            words = (folder / "stderr").read_text("utf-8", "replace").strip().splitlines()[-1:]
            self.void = f"grading itself failed, before any cell was run: {'; '.join([why, *words])}"
            return
        kind, i = last["begin"]
        if kind == "cell":
            cell = job["cells"][i]
            self.blamed[cell["function"]] = f"cell {cell['number']} of {self.source} was run, and {why}"
        else:
            prop = self.properties[i]
            self.blamed[prop.function] = f"{prop.function} was checked ({prop.says}), and {why}"

    # ---- marks

    def marks(self, refused: str) -> Marks:
        made = [self.mark(i, refused) for i in range(len(self.properties))]
        flags = [f"it counts nothing: {refused}"] * bool(self.void) + self.flags
        for name in dict.fromkeys(mark.function for mark in made):
            only = [mark.says for mark in made if mark.function == name and mark.public and mark.hidden is False]
            if only:
                flags.append(f"{name}: holds on the public inputs and not on others: {'; '.join(only)}")
        return Marks(self.lesson, self.source, self.seed, made, refused, flags)

    def mark(self, i: int, refused: str) -> Mark:
        prop = self.properties[i]
        public, carried, reason = self.outcome("public", i, refused)
        hidden, hidden_carried, hidden_reason = (
            self.outcome("hidden", i, refused) if self.seed is not None else (None, False, "")
        )
        known = prop.function, prop.says, prop.hint, public, hidden, reason, hidden_reason, carried, hidden_carried
        return Mark(*known, varies=i not in self.fixed)

    def outcome(self, phase: str, i: int, refused: str) -> tuple[bool, bool, str]:
        function = self.properties[i].function
        if refused:
            return False, False, refused
        if (phase, i) not in self.found:
            return False, False, self.blamed.get(function, self.left)
        wrong, carried = self.found[phase, i]
        return wrong is None, carried, self.told(wrong or "")

    def told(self, wrong: str) -> str:
        """A reason as people can read it; a name that is not defined, but in another cell, is told to stand there."""
        plain = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in wrong)
        missing = re.search(r"NameError: name '(\w+)' is not defined", plain)
        if missing and missing[1] in self.elsewhere:
            where = self.elsewhere[missing[1]]
            plain += f"\n{missing[1]} is made in cell {where}, which is not run: only the setup and the task cells are"
        return plain


def main(notebook: Path, lesson: str, seed: int | None = None, seconds: float = 600.0, memory_gib: float = 2.0) -> None:
    """The marks of a notebook, as JSON."""
    try:
        print(json.dumps(asdict(grade(notebook, lesson, seed, seconds=seconds, memory_gib=memory_gib)), indent=1))
    except InputError as error:
        sys.exit(f"minillm: {error}")


if __name__ == "__main__":
    import typer

    typer.run(main)
