"""The question bank: `lessons/instructor/questions/NN.toml`, read and checked, and a question's variants by seed.

[[question]]
id = "q04.1"                   kind = "choice", "calculation" or "essay"
objectives = ["04.2"]          minutes = 2, difficulty = 1 to 3, text in Markdown

choice         [[question.choice]]: says, why (it is right, or what leads there), right = true at one of them
calculation    [question.values]: name = [one, of, these] or {from, to, step}; formula, unit, tolerance (a share of
               the answer; 0: exact), explanation; [[question.slip]]: formula, why. In the text and in what
               explains, {formula} stands for its result.
essay          [[question.criterion]]: points, says; answer: what a good one says
"""

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.course.formulas import Value, evaluate, filled
from minillm.errors import InputError, whole_number
from minillm.lab.build import LESSONS

FOLDER = LESSONS / "instructor" / "questions"
COMMON = {"id", "kind", "objectives", "minutes", "difficulty", "text"}
KEYS = {
    "choice": COMMON | {"choice"},
    "calculation": COMMON | {"values", "formula", "unit", "tolerance", "explanation", "slip"},
    "essay": COMMON | {"criterion", "answer"},
}


@dataclass(frozen=True)
class Choice:
    says: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Slip:
    """A wrong result that people really get, and how."""

    formula: str
    why: str


@dataclass(frozen=True)
class Criterion:
    points: int
    says: str


@dataclass(frozen=True)
class Question:
    id: str
    kind: str
    objectives: tuple[str, ...]
    minutes: int
    difficulty: int
    text: str
    choices: tuple[Choice, ...] = ()
    values: Mapping[str, Sequence[Value]] | None = None
    formula: str = ""
    unit: str = ""
    tolerance: float = 0.0
    slips: tuple[Slip, ...] = ()
    explanation: str = ""  # of a calculation; of an essay, what a good answer says
    criteria: tuple[Criterion, ...] = ()

    @property
    def points(self) -> int:
        return sum(criterion.points for criterion in self.criteria) or 1


@dataclass(frozen=True)
class Variant:
    """A question as one group of students sees it."""

    question: Question
    text: str
    choices: tuple[Choice, ...] = ()
    answer: float | None = None
    slips: tuple[tuple[float, str], ...] = ()  # results and why, those alone that would count as wrong
    explanation: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return abs(self.answer or 0.0) * self.question.tolerance

    def accepts(self, number: float) -> bool:
        return self.answer is not None and abs(number - self.answer) <= self.tolerance


def variant(question: Question, seed: int) -> Variant:
    """The same for the same question and seed, whatever else is asked beside it."""
    draw = random.Random(f"{question.id}/{seed}")
    if question.kind == "choice":
        return Variant(question, question.text, tuple(draw.sample(question.choices, len(question.choices))))
    if question.values is None:
        return Variant(question, question.text, explanation=question.explanation)
    values = {name: draw.choice(of) for name, of in question.values.items()}
    made = Variant(question, filled(question.text, values), (), evaluate(question.formula, values))
    slips = [(evaluate(slip.formula, values), filled(slip.why, values)) for slip in question.slips]
    wrong = tuple(slip for slip in slips if not made.accepts(slip[0]))
    return Variant(question, made.text, (), made.answer, wrong, filled(question.explanation, values), values)


# ---- reading


def load(lesson: str, folder: Path = FOLDER) -> list[Question]:
    """The questions of one lesson. Raises InputError that names the file and the question for anything amiss."""
    path = folder / f"{lesson}.toml"
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in folder.glob("*.toml")))
        raise InputError(f"there are no questions on lesson {lesson!r}; there are some on {known or 'none'}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable as TOML: {error}") from error
    questions = []
    for i, entry in enumerate(raw.get("question", []), 1):
        try:
            questions.append(_question(lesson, entry))
        except (InputError, KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
            raise InputError(f"{path}: question {i} ({entry.get('id', 'without id')}): {what}") from error
    ids = [question.id for question in questions]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise InputError(f"{path}: {', '.join(sorted(twice))} is there twice; every question has an id of its own")
    return questions


def _question(lesson: str, entry: dict[str, Any]) -> Question:
    kind = entry["kind"]
    if kind not in KEYS:
        raise InputError(f"kind is {kind!r}; it must be one of {', '.join(KEYS)}")
    if unknown := set(entry) - KEYS[kind]:
        raise InputError(f"{', '.join(sorted(unknown))} is not known for kind {kind!r}")
    if not entry["id"].startswith(f"q{lesson}."):
        raise InputError(f"id is {entry['id']!r}; on lesson {lesson} it must begin with q{lesson}.")
    question = Question(
        entry["id"],
        kind,
        tuple(entry["objectives"]),
        whole_number("minutes", entry["minutes"], 1, 60),
        whole_number("difficulty", entry["difficulty"], 1, 3),
        entry["text"].strip(),
        choices=tuple(
            Choice(_line(one["says"]), _line(one["why"]), one.get("right", False)) for one in entry.get("choice", [])
        ),
        values={name: _range(name, of) for name, of in entry["values"].items()} if "values" in entry else None,
        formula=entry["formula"] if kind == "calculation" else "",
        unit=entry.get("unit", ""),
        tolerance=float(entry.get("tolerance", 0)),
        slips=tuple(Slip(one["formula"], _line(one["why"])) for one in entry.get("slip", [])),
        explanation=entry.get("explanation", entry.get("answer", "")).strip(),
        criteria=tuple(
            Criterion(whole_number("points", one["points"], 1, 10), _line(one["says"]))
            for one in entry.get("criterion", [])
        ),
    )
    _complete(question)
    return question


def _complete(question: Question) -> None:
    if not question.objectives:
        raise InputError("objectives is empty; it must name at least one")
    if question.kind == "choice":
        right = sum(choice.right for choice in question.choices)
        if right != 1 or len(question.choices) < 3:
            raise InputError(f"{right} of {len(question.choices)} choices are right; it must be one of at least three")
    elif not question.explanation:
        raise InputError("the explanation (of an essay: the answer) is empty")
    if question.kind == "calculation":
        variant(question, 0)  # its formulas have values
    if question.kind == "essay" and not question.criteria:
        raise InputError("an essay has at least one criterion, with points")


def _line(text: str) -> str:
    return " ".join(text.split())


def _range(name: str, of: Any) -> Sequence[Value]:
    if isinstance(of, dict):
        first, last, step = (whole_number(f"{name}.{key}", of[key], 0) for key in ("from", "to", "step"))
        of = range(first, last + 1, max(step, 1))
    if not of:
        raise InputError(f"values.{name} is empty; it must be a list, or {{from, to, step}}")
    return list(of)
