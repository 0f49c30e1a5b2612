"""The process that runs one submission, started anew by `grading`: cells, then the properties, once or twice.

It reads its job from standard input, and tells, line by line on a pipe, what it begins and what it finds. So whoever
starts it knows what was going on if it ends too early.
"""

import ast
import json
import linecache
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from inspect import unwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from minillm.course.walls import end_with_parent, limit_memory, only_files, without_network

MOST_FLAGS = 50
MOST_WORDS = 2000  # of one reason


def main(pipe: int) -> None:
    job = json.load(sys.stdin)
    sys.stdin.close()
    tell = speaker(pipe, job.pop("nonce"))
    without_network()
    end_with_parent()
    only_files(job["readable"], str(Path.cwd()))
    Grader(job, tell).run()
    os._exit(0)  # threads that a learner's code left running end with it


def speaker(pipe: int, nonce: str) -> Callable[..., None]:
    """Sends messages. What makes a message ours is known to this function alone: no object and no frame has it."""

    def tell(**message: Any) -> None:
        data = (json.dumps({"nonce": nonce, **message}) + "\n").encode()
        try:
            while data:
                data = data[os.write(pipe, data) :]
        except OSError:  # nobody listens any more
            os._exit(1)

    return tell


class Grader:
    def __init__(self, job: dict[str, Any], tell: Callable[..., None]):
        self.job, self.tell = job, tell
        self.drew: set[int] = set()  # properties that drew inputs
        self.flags: set[str] = set()

    def flag(self, why: str) -> None:
        if why not in self.flags and len(self.flags) < MOST_FLAGS:
            self.flags.add(why)
            self.tell(flag=why[:MOST_WORDS])

    def run(self) -> None:
        import torch

        from minillm.course import audit, guard
        from minillm.lab import checking, seeds

        torch.set_num_threads(1)
        lesson = self.job["lesson"]
        checking.SECONDS = self.job["each"]
        every = checking.properties(lesson)
        checking.PROPERTIES[:] = [replace(prop, run=self.watched(i, prop.run)) for i, prop in enumerate(every)]

        names: dict[str, Any] = {"__name__": "mine"}
        sys.modules["mine"] = ModuleType("mine")  # dataclasses look for it where annotations are text
        for code in self.job["setup"]:
            exec(compile(code, "<setup>", "exec"), names)
        allowed = self.job["of_project"]
        guard.close(names, self.job["setup"], allowed, self.flag)
        events = audit.Audit(self.job["readable"], self.job["hidden"], str(Path.cwd()), self.flag)
        limit_memory(self.job["memory"])
        audit.tame_functools()
        snapshot = audit.Snapshot()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # until here it told of mistakes of our own
        events.arm()

        work = self.work(names)
        self.run_cells(work, events.mine)
        self.look(snapshot.changed())
        for phase, seed in self.job["phases"]:
            only = self.job["only"][phase]
            if only:
                index = {(prop.function, prop.says): i for i, prop in enumerate(every)}
                self.drew = set()
                with seeds.variant(seed):
                    checking.run_checks(lesson, work, only, self.teller(phase, index))
                self.look(snapshot.changed())
        self.tell(end=True)

    def work(self, names: dict[str, Any]) -> Any:
        """The learner's functions; after each call of one, what compares is looked at: patches may undo themselves."""
        from minillm.course.audit import tools
        from minillm.lab.work import Work

        before = tools()

        class Looked(Work):
            def call(work, name: str, *args: Any, **kwargs: Any) -> Any:
                try:
                    return super().call(name, *args, **kwargs)
                finally:
                    if any(now is not then for now, then in zip(tools(), before, strict=True)):
                        self.tell(void=f"{name} changed what compares its results")

        return Looked(self.job["source"], names)

    def look(self, changed: list[str]) -> None:
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            self.tell(void=f"the code changed {', '.join(changed[:3])}{more}, which the checks stand on")

    def watched(self, i: int, run: Callable[[Any], None]) -> Callable[[Any], None]:
        """The same property, that tells when it begins; a learner's `exit()` is a wrong answer like any other."""
        from minillm.lab import seeds
        from minillm.lab.work import Wrong

        def begun(work: Any) -> None:
            self.tell(begin=["property", i])
            before = len(seeds.asked)
            try:
                run(work)
            except Exception:
                raise
            except BaseException as error:  # SystemExit, KeyboardInterrupt, GeneratorExit
                raise Wrong(f"the code raised {type(error).__name__}: a function must return") from error
            finally:
                if len(seeds.asked) > before:
                    self.drew.add(i)

        return begun

    def teller(self, phase: str, index: dict[tuple[str, str], int]) -> Callable[[Any], None]:
        def tell(finding: Any) -> None:
            wrong, i = finding.wrong, index[finding.prop.function, finding.prop.says]
            self.tell(
                found=[phase, i], wrong=wrong and wrong[:MOST_WORDS], carried=finding.carried, drew=i in self.drew
            )

        return tell

    # ---- cells

    def run_cells(self, work: Any, mine: set[str]) -> None:
        """As `work.from_cells` does, each looked at first."""
        for i, cell in enumerate(self.job["cells"]):
            filename = f"<{self.job['source']}, cell {cell['number']}>"
            mine.add(filename)
            work.mine = frozenset(mine)
            linecache.cache[filename] = (len(cell["code"]), None, cell["code"].splitlines(keepends=True), filename)
            self.tell(begin=["cell", i])
            why = cell["skip"] or self.cell(cell, filename, work)
            if why is not None:
                work.broken[cell["function"]] = why
        self.own_only(work, mine)

    def cell(self, cell: dict[str, Any], filename: str, work: Any) -> str | None:
        """Why it does not run; None if it did."""
        from minillm.course import guard
        from minillm.lab.work import Work, time_limit

        where = f"cell {cell['number']} of {self.job['source']}"
        try:
            tree = ast.parse(cell["code"], filename)
            if found := guard.unseemly(tree):
                why = f"{where} uses {', '.join(found)}, which leads out of the lesson: not allowed when it is graded"
                self.flag(why)
                return why
            with time_limit(self.job["each"], where):
                exec(compile(guard.watched().visit(tree), filename, "exec"), work.names)
        except SyntaxError as error:
            return f"{where} does not run: SyntaxError: {error.msg}, line {error.lineno}: {(error.text or '').strip()}"
        except BaseException as error:
            at = Work("", {}, mine=work.mine).line(error.__traceback__)
            return f"{where} does not run: {type(error).__name__}: {error}{at}"[:MOST_WORDS]
        return None

    def own_only(self, work: Any, mine: set[str]) -> None:
        """Each function must come from a cell of the submission, not from the project or from torch."""
        from minillm.course import guard

        for function in {cell["function"] for cell in self.job["cells"]}:
            found = work.names.get(function)
            if isinstance(found, guard.Absent):
                del work.names[function]
            elif found is not None and callable(found) and function not in work.broken and not own(found, mine):
                home = getattr(found, "__module__", None) or type(found).__module__
                work.broken[function] = f"{function} is not written in {self.job['source']}: it comes from {home}"
                self.flag(work.broken[function])


def own(found: Any, mine: set[str]) -> bool:
    if isinstance(found, type):
        return found.__module__ == "mine"
    code = getattr(unwrap(found), "__code__", None)
    return code is not None and code.co_filename in mine
