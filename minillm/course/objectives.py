"""Proof of learning: for each learning objective, what shows that it is met.

The objectives stand in the lessons' sources; number k of lesson NN is `NN.k`. `lessons/instructor/objectives.toml`
repeats each and names its evidence; questions name their objectives themselves. `python -m minillm.course.objectives`
writes the table, `objectives.md`, and says what does not fit together.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minillm.course.bank import Question, load
from minillm.errors import InputError
from minillm.lab.build import LESSONS, sources, title_of
from minillm.lab.checking import properties

FOLDER = LESSONS / "instructor"
TOML, TABLE = FOLDER / "objectives.toml", FOLDER / "objectives.md"
KINDS = ("checks", "questions", "problems", "written")
HEAD = """\
# What shows that an objective is met

Each learning objective of the lessons, and its evidence: the functions whose properties are checked, the questions of
the [bank](questions/) (an essay is marked with *), the problems of the sets, and the written answers, which are
marked by their [rubrics](rubrics/). A test keeps this table: no objective without evidence of two kinds, nothing that
is asked without an objective. It is made from [objectives.toml](objectives.toml) by
`python -m minillm.course.objectives`; do not edit it by hand.
"""


@dataclass(frozen=True)
class Objective:
    id: str
    text: str
    checks: tuple[str, ...] = ()  # functions, as in `04.store`
    problems: tuple[str, ...] = ()  # as in `p2.verify`
    written: tuple[str, ...] = ()  # as in `04.why`
    questions: tuple[str, ...] = ()
    one_kind: str = ""  # why evidence of one kind must do

    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self, kind)]


def told_by(source: Path) -> list[str]:
    """The objectives of a lesson's source, in order."""
    lines = [line.removeprefix("#").strip() for line in source.read_text("utf-8").splitlines()]
    start = next((i for i, line in enumerate(lines) if line.startswith("**Objectives.**")), None)
    if start is None:
        raise InputError(f"{source} has no line that begins with **Objectives.**; every lesson needs one")
    found: list[str] = []
    for line in lines[start + 1 :]:
        if line.startswith("- **"):  # prerequisites and the like, in the same form
            break
        if line.startswith("- "):
            found.append(line[2:])
        elif found and line:
            found[-1] += f" {line}"
        elif found:
            break
    return [text.rstrip(".;") for text in found]


def bank() -> list[Question]:
    return [question for source in sources() for question in load(source.stem[:2])]


def read(path: Path = TOML, questions: Iterable[Question] | None = None) -> list[Objective]:
    """The table's rows. Raises InputError for a file or an entry that cannot be read."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable as TOML: {error}") from error
    asked = list(bank() if questions is None else questions)
    known = {field.name for field in fields(Objective)} - {"id", "questions"}
    rows = []
    for name, entry in raw.items():
        if not isinstance(entry, dict) or "text" not in entry or set(entry) - known:
            raise InputError(f"{path}: {name} must be a table with text, and of {', '.join(sorted(known))} what it has")
        told: dict[str, Any] = {key: value if isinstance(value, str) else tuple(value) for key, value in entry.items()}
        rows.append(Objective(id=name, questions=tuple(q.id for q in asked if name in q.objectives), **told))
    return rows


def tasks(folder: Path, pattern: str) -> tuple[list[str], list[str]]:
    """(tasks, written questions) of the sources in a folder."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(folder.glob(pattern)))
    return re.findall(r'^# %% .*task="([\w.]+)"', text, re.M), re.findall(r'^lab\.answer\("([\w.]+)"', text, re.M)


def faults(rows: list[Objective], questions: list[Question]) -> list[str]:
    """What does not fit together: texts, names that do not exist, evidence that is missing, and what shows nothing."""
    texts = {f"{s.stem[:2]}.{k}": text for s in sources() for k, text in enumerate(told_by(s), 1)}
    checked = {f"{s.stem[:2]}.{prop.function}" for s in sources() for prop in properties(s.stem[:2])}
    problems, by_problems = tasks(LESSONS / "problems", "ps*.py")
    exist = {"checks": checked, "problems": set(problems), "written": {*tasks(LESSONS, "[0-9]*.py")[1], *by_problems}}
    ids = [row.id for row in rows]
    told = [f"{name}: no lesson has this objective" for name in ids if name not in texts]
    told += [f"{name} is not in the table" for name in texts if name not in ids]
    for row in rows:
        if row.id in texts and row.text != texts[row.id]:
            told.append(f"{row.id}: the lesson says {texts[row.id]!r}, the table {row.text!r}")
        if len(row.kinds()) < (1 if row.one_kind else 2):
            told.append(f"{row.id} has evidence of {row.kinds() or 'no kind'}; two kinds are needed, or one_kind = why")
        if row.one_kind and len(row.kinds()) > 1:
            told.append(f"{row.id} has evidence of {row.kinds()}, so one_kind is out of date")
    for kind, names in exist.items():
        named = [name for row in rows for name in getattr(row, kind)]
        told += [f"{name} ({kind}) does not exist" for name in dict.fromkeys(named) if name not in names]
        told += [f"{name} ({kind}) shows no objective" for name in sorted(names - set(named))]
    for question in questions:
        told += [f"{question.id}: there is no objective {name}" for name in question.objectives if name not in texts]
    return told


def markdown(rows: list[Objective], questions: list[Question]) -> str:
    essays = {question.id for question in questions if question.kind == "essay"}
    lines = [HEAD]
    for lesson, source in ((s.stem[:2], s) for s in sources()):
        lines += [f"## [{title_of(source)}](../{source.stem}.ipynb)", ""]
        lines += ["| | objective | checks | questions | problems | written |", "|---|---|---|---|---|---|"]
        for row in rows:
            if row.id.startswith(f"{lesson}."):
                asked = ", ".join(f"{name}{'*' * (name in essays)}" for name in row.questions)
                code = [
                    ", ".join(f"`{n.removeprefix(f'{lesson}.')}`" for n in names)
                    for names in (row.checks, row.problems)
                ]
                text = row.text + (f" (one kind of evidence: {row.one_kind})" if row.one_kind else "")
                cells = (row.id, text, code[0], asked, code[1], ", ".join(row.written))
                lines.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    questions = bank()
    rows = read(questions=questions)
    TABLE.write_text(markdown(rows, questions), "utf-8")
    told = faults(rows, questions)
    print("\n".join([*told, f"{TABLE.name}: {len(rows)} objectives, {len(questions)} questions, {len(told)} faults"]))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
