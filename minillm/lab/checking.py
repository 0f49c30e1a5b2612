"""Checks: properties that a learner's functions must have, run one by one, each with a reason when it does not hold.

    @holds("04", "store", "keys land at their own positions", hint="...")
    def keys_land(work: Work) -> None: ...

A property gets the learner's work and raises Wrong. It never falls back to our own code: what is not there is wrong.
But a function that calls others of the learner's is not to be blamed for theirs. `uses` names these, with right ones:
where one of them is wrong too, the property is tried again with the right one in its place, to find whose fault it is.
"""

import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.errors import InputError
from minillm.lab.work import Work, Wrong, time_limit

SECONDS = 30.0  # for one property: far more than it takes
LESSONS = tuple(f"{number:02}" for number in range(14))
PROBLEM_SETS = tuple(f"p{number}" for number in range(1, 6))


@dataclass(frozen=True)
class Property:
    lesson: str
    function: str  # the learner's function that it is about
    says: str  # what must hold, as a sentence
    hint: str  # the usual cause when it does not
    run: Callable[[Work], None]
    uses: Mapping[str, Any] = field(default_factory=dict)  # the learner's functions that this one calls: right ones


PROPERTIES: list[Property] = []


Run = Callable[[Work], None]


def holds(
    lesson: str, function: str, says: str, hint: str, uses: Mapping[str, Any] | None = None
) -> Callable[[Run], Run]:
    """Registers a property of a lesson, in the order of the file."""

    def register(run: Run) -> Run:
        PROPERTIES.append(Property(lesson, function, says, hint, run, uses or {}))
        return run

    return register


def properties(lesson: str) -> list[Property]:
    """Of one lesson or problem set. Raises InputError for a name that is not known."""
    if lesson not in LESSONS + PROBLEM_SETS:
        raise InputError(f"lesson {lesson!r} is not known; use one of {', '.join(LESSONS + PROBLEM_SETS)}")
    importlib.import_module(f"minillm.lab.checks.{lesson if lesson in PROBLEM_SETS else 'c' + lesson}")
    return [prop for prop in PROPERTIES if prop.lesson == lesson]


@dataclass(frozen=True)
class Finding:
    """`wrong` gives the reason; None if the property holds."""

    prop: Property
    wrong: str | None
    waits: bool = False  # the fault is not the function's own, but of others that it uses
    carried: bool = False  # waits, and was seen to hold with right ones in the place of these others


@dataclass(frozen=True)
class Report:
    lesson: str
    source: str
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return all(finding.wrong is None for finding in self.findings)

    def text(self) -> str:
        """For people, whatever shows it: no colours needed."""
        lines = [f"Lesson {self.lesson}, checked: {self.source}"]
        told: set[tuple[str, str]] = set()  # one cause often breaks several properties: it is told once
        for finding in self.findings:
            prop, wrong = finding.prop, finding.wrong
            if wrong is None:
                lines.append(f"  ok     {prop.function}: {prop.says}")
            elif wrong.startswith(f"{prop.function} is not written yet"):
                if (prop.function, wrong) not in told:
                    lines.append(f"  to do  {wrong}")
            else:
                lines.append(f"  {'wait ' if finding.waits else 'WRONG'}  {prop.function}: {prop.says}")
                if (prop.function, wrong) in told:
                    lines.append("         the same as above")
                else:
                    lines += [f"         {line}" for line in wrong.splitlines()]
                    # a hint is about a result of this very function, and there is none
                    none = (f"{prop.function} raised ", "took longer than", "was too slow above", FAILED)
                    if not finding.waits and not any(words in wrong for words in none):
                        lines.append(f"         hint: {prop.hint}")
            told.add((prop.function, wrong or ""))
        right = sum(finding.wrong is None for finding in self.findings)
        lines.append(f"{right} of {len(self.findings)} properties hold.")
        return "\n".join(lines)


def run_checks(
    lesson: str, work: Work, only: Sequence[str] | None = None, tell: Callable[[Finding], None] | None = None
) -> Report:
    """Every property of the lesson (or of the functions in `only`), each under a time limit. A function that was too
    slow once is not tried again. `tell` gets each finding as soon as it is there."""
    every = properties(lesson)
    known: dict[tuple[str, str], Finding] = {}
    slow: dict[str, Finding] = {}

    def find(prop: Property) -> Finding:
        key = (prop.function, prop.says)
        if key not in known:
            known[key] = judged(prop)
        return known[key]

    def judged(prop: Property) -> Finding:
        if prop.function in slow:
            waits = slow[prop.function].waits  # a part of it may have been the slow one
            return Finding(prop, f"{prop.function} was too slow above; not tried", waits)
        wrong = reason(prop, work)
        if wrong is None or "not written yet" in wrong:
            own = wrong is None or wrong.startswith(f"{prop.function} is not written yet")
            return Finding(prop, wrong, waits=not own)
        of = {name: [find(other) for other in every if other.function == name] for name in prop.uses}
        faulty = [name for name in of if any(found.wrong is not None and not found.waits for found in of[name])]
        found = whose(prop, work, faulty) if faulty else Finding(prop, wrong)
        if "took longer than" in wrong:
            slow[prop.function] = found
        return found

    findings = []
    for prop in every:
        if only is None or prop.function in only:
            findings.append(find(prop))
            if tell is not None:
                tell(findings[-1])
    if not findings:
        names = ", ".join(dict.fromkeys(prop.function for prop in every))
        raise InputError(f"nothing to check for {', '.join(only or ())}; lesson {lesson} checks {names}")
    return Report(lesson, work.source, findings)


def whose(prop: Property, work: Work, faulty: Sequence[str]) -> Finding:
    """Of a property that does not hold, where functions that are used are wrong too: whose fault is it?"""
    names, one = " and ".join(faulty), len(faulty) == 1
    with work.replaced({name: prop.uses[name] for name in faulty}):
        own = reason(prop, work)
    if own is not None and own.startswith(f"{prop.function} is not written yet"):
        return Finding(prop, own)
    if own is None:
        right = "a right one" if one else "right ones"
        return Finding(prop, f"mend {names} first: with {right} in the place of yours, this holds", True, True)
    return Finding(prop, f"{own}\n(this stays so with {'a ' if one else ''}right {names} in the place of yours)")


FAILED = "the check itself failed"


def reason(prop: Property, work: Work) -> str | None:
    try:
        with time_limit(SECONDS, prop.function):
            work.function(prop.function)
            prop.run(work)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        if work.took_part(prop.function, error.__traceback__):  # the learner's function, deep inside the engine
            return work.explain(prop.function, error)
        at = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{FAILED}, which says nothing about your {prop.function}: {type(error).__name__}: {error}\n"
            f"  at line {at.lineno} of {Path(at.filename).name}: {at.line}\nPlease report this, with these lines."
        )
    return None
