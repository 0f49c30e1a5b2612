"""Every planted wrong solution against the checks of its lesson or problem set: `make mutants` prints the table.

A check that lets wrong code pass is worse than none. So each lesson has wrong solutions of the kind that learners
write; each must be caught, by words that say what is wrong.
"""

import importlib
import io
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from wrong import Mutant  # noqa: E402

from minillm.lab.build import by_name  # noqa: E402
from minillm.lab.checking import PROBLEM_SETS, Report, run_checks  # noqa: E402
from minillm.lab.work import Work, cells_of, defined, from_cells  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    lesson: str
    mutant: Mutant
    caught_by: list[str]  # properties that do not hold, as "function: sentence"
    said: bool  # whether one of their messages has the intended words
    blamed: list[str]  # right functions that were called wrong for what it did
    report: str

    @property
    def survived(self) -> bool:
        return not self.caught_by or not self.said or bool(self.blamed)


def lessons() -> list[str]:
    return list(by_name())


@cache
def cells(lesson: str) -> tuple[Path, list[tuple[int, str]]]:
    path = by_name()[lesson]
    return path, cells_of(path)


def reference(lesson: str) -> Work:
    """The solutions, run anew."""
    return from_cells(*cells(lesson))


def planted(lesson: str) -> list[Mutant]:
    return list(importlib.import_module(f"wrong.{lesson if lesson in PROBLEM_SETS else 'c' + lesson}").WRONG)


def mutated(lesson: str, mutant: Mutant) -> Work:
    """The reference's functions, with the wrong ones in their place: also for those that call them."""
    work = reference(lesson)
    exec(compile(mutant.code, f"<{mutant.name}>", "exec"), work.names)
    return Work(mutant.name, work.names, mine=work.mine | {f"<{mutant.name}>"})


def outcome(lesson: str, mutant: Mutant) -> Outcome:
    report: Report = run_checks(lesson, mutated(lesson, mutant))
    wrong = [finding for finding in report.findings if finding.wrong is not None]
    own = defined(mutant.code)
    # a property that names the wrong function among those it uses must wait for it
    others = [finding.prop.function for finding in wrong if own & finding.prop.uses.keys() and not finding.waits]
    return Outcome(
        lesson,
        mutant,
        [f"{finding.prop.function}: {finding.prop.says}" for finding in wrong],
        any(mutant.words in (finding.wrong or "") for finding in wrong),
        [function for function in others if function not in own],
        report.text(),
    )


def main() -> int:
    from rich.console import Console

    from minillm.bench.tables import new_table

    table = new_table("Planted wrong solutions", "", ("lesson", "what is wrong", "caught by", "properties"))
    table.columns[1].justify = table.columns[2].justify = "left"
    table.columns[1].no_wrap = table.columns[2].no_wrap = False
    with redirect_stdout(io.StringIO()):  # some of them print where they should return
        outcomes = [outcome(lesson, mutant) for lesson in lessons() for mutant in planted(lesson)]
    for one in outcomes:
        caught = one.caught_by[0] if one.caught_by else "SURVIVED"
        if one.caught_by and not one.said:
            caught = f"SURVIVED: caught, but nothing says {one.mutant.words!r}"
        elif one.blamed:
            caught = f"SURVIVED: caught, but {', '.join(one.blamed)} blamed for it"
        table.add_row(one.lesson, one.mutant.name, caught, str(len(one.caught_by)))
    Console(width=150).print(table)
    survivors = sum(one.survived for one in outcomes)
    print(f"{len(outcomes)} wrong solutions, {survivors} survived.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
