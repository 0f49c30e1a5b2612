"""Checks: properties that a learner's functions must have, run one by one, each with a reason when it does not hold.

    @holds("04", "store", "keys land at their own positions", hint="...")
    def keys_land(work: Work) -> None: ...

A property gets the learner's work and raises Wrong. It never falls back to our own code: what is not there is wrong.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minillm.errors import InputError
from minillm.lab.work import Work, Wrong, time_limit

SECONDS = 30.0  # for one property: far more than it takes
LESSONS = ("00", "01", "02", "03", "04", "05", "06", "07", "08")


@dataclass(frozen=True)
class Property:
    lesson: str
    function: str  # the learner's function that it is about
    says: str  # what must hold, as a sentence
    hint: str  # the usual cause when it does not
    run: Callable[[Work], None]


PROPERTIES: list[Property] = []


Run = Callable[[Work], None]


def holds(lesson: str, function: str, says: str, hint: str) -> Callable[[Run], Run]:
    """Registers a property of a lesson, in the order of the file."""

    def register(run: Run) -> Run:
        PROPERTIES.append(Property(lesson, function, says, hint, run))
        return run

    return register


def properties(lesson: str) -> list[Property]:
    """Of one lesson. Raises InputError for a number that is not known."""
    if lesson not in LESSONS:
        raise InputError(f"lesson {lesson!r} is not known; use one of {', '.join(LESSONS)}")
    importlib.import_module(f"minillm.lab.checks.c{lesson}")
    return [prop for prop in PROPERTIES if prop.lesson == lesson]


@dataclass(frozen=True)
class Finding:
    """`wrong` gives the reason; None if the property holds."""

    prop: Property
    wrong: str | None


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
                lines.append(f"  WRONG  {prop.function}: {prop.says}")
                if (prop.function, wrong) in told:
                    lines.append("         the same as above")
                else:
                    lines += [f"         {line}" for line in wrong.splitlines()]
                    if f"{prop.function} raised " not in wrong:  # a hint is about a result, and there is none
                        lines.append(f"         hint: {prop.hint}")
            told.add((prop.function, wrong or ""))
        right = sum(finding.wrong is None for finding in self.findings)
        lines.append(f"{right} of {len(self.findings)} properties hold.")
        return "\n".join(lines)


def run_checks(lesson: str, work: Work, only: Sequence[str] | None = None) -> Report:
    """Every property of the lesson (or of the functions in `only`), each under a time limit. A function that was too
    slow once is not tried again."""
    findings: list[Finding] = []
    slow: set[str] = set()
    for prop in properties(lesson):
        if only is None or prop.function in only:
            wrong = f"{prop.function} was too slow above; not tried" if prop.function in slow else reason(prop, work)
            if wrong is not None and "took longer than" in wrong:
                slow.add(prop.function)
            findings.append(Finding(prop, wrong))
    if not findings:
        known = ", ".join(dict.fromkeys(prop.function for prop in properties(lesson)))
        raise InputError(f"nothing to check for {', '.join(only or ())}; lesson {lesson} checks {known}")
    return Report(lesson, work.source, findings)


def reason(prop: Property, work: Work) -> str | None:
    try:
        with time_limit(SECONDS, prop.function):
            work.function(prop.function)
            prop.run(work)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:  # the learner's function, deep inside the engine
        return work.explain(prop.function, error)
    return None
