"""Quizzes out of the question bank: a sheet for students and its key, both in Markdown, by a seed.

quiz(["04"], 7)            the sheet      whoever has the same lessons, seed and n has the same questions
key(["04"], 7)             the same questions, with what is right, and why each answer is right or wrong
minillm.course.moodle      the same for a learning platform
"""

import random
from collections.abc import Sequence

from minillm.course.bank import Question, Variant, load, variant
from minillm.course.formulas import show
from minillm.errors import InputError, whole_number
from minillm.lab.build import name_of, sources, title_of

LETTERS = "ABCDEFGH"


def pick(lessons: Sequence[str], seed: int, n: int | None = None, essay: bool = False) -> list[Variant]:
    """n of the lessons' short questions (None: all), in the order of the bank, on as many objectives as can be; then,
    if asked for, each lesson's essay."""
    if not lessons:
        raise InputError("no lesson is given; name at least one, such as 04")
    questions = [question for lesson in dict.fromkeys(lessons) for question in load(lesson)]
    short = [question for question in questions if question.kind != "essay"]
    if n is not None:
        whole_number("n", n, 1, len(short))
        chosen = _spread(random.Random(f"{'+'.join(lessons)}/{seed}").sample(short, len(short)))[:n]
        short = [question for question in short if question in chosen]
    essays = [question for question in questions if question.kind == "essay"] if essay else []
    return [variant(question, seed) for question in [*short, *essays]]


def _spread(questions: list[Question]) -> list[Question]:
    """In rounds: each round begins with questions on objectives that the round has not had yet."""
    ordered: list[Question] = []
    while questions:
        seen: set[str] = set()
        later = []
        for question in questions:
            if seen & set(question.objectives):
                later.append(question)
            else:
                seen.update(question.objectives)
                ordered.append(question)
        questions = later
    return ordered


def quiz(lessons: Sequence[str], seed: int, n: int | None = None, essay: bool = False) -> str:
    """The students' sheet."""
    variants = pick(lessons, seed, n, essay)
    return "\n\n".join([_head("Quiz", lessons, seed, variants), "Name:", *map(_asked, _numbered(variants))]) + "\n"


def key(lessons: Sequence[str], seed: int, n: int | None = None, essay: bool = False) -> str:
    """The same questions with their answers, for teachers."""
    variants = pick(lessons, seed, n, essay)
    parts = [_head("Key", lessons, seed, variants)]
    for number, made in _numbered(variants):
        parts += [_asked((number, made)), _answered(made)]
    return "\n\n".join(parts) + "\n"


def _numbered(variants: Sequence[Variant]) -> list[tuple[int, Variant]]:
    return list(enumerate(variants, 1))


def _head(what: str, lessons: Sequence[str], seed: int, variants: Sequence[Variant]) -> str:
    titles = {name_of(source): title_of(source) for source in sources()}
    named = "; ".join(titles.get(lesson, lesson) for lesson in dict.fromkeys(lessons))
    minutes = sum(made.question.minutes for made in variants)
    points = sum(made.question.points for made in variants)
    return f"# {what}: {named}\n\nSeed {seed}. {len(variants)} questions, {points} points, about {minutes} minutes."


def _asked(numbered: tuple[int, Variant]) -> str:
    number, made = numbered
    asks = made.question
    points = f"{asks.points} point{'s' * (asks.points > 1)}"
    parts = [f"## {number}. ({asks.id}, {points}, {asks.minutes} min)", made.text]
    if made.choices:
        choices = zip(LETTERS, made.choices, strict=False)
        parts.append("\n".join(f"- **{letter}.** {choice.says}" for letter, choice in choices))
    elif asks.kind == "calculation":
        within = f", within {100 * asks.tolerance:g} %" if asks.tolerance else ", exactly"
        parts.append(f"Answer{f' in {asks.unit}' if asks.unit else ''}{within}: ________")
    return "\n\n".join(parts)


def _answered(made: Variant) -> str:
    asks = made.question
    about = f"*Objectives {', '.join(asks.objectives)}; difficulty {asks.difficulty} of 3.*"
    if made.choices:
        told = [
            f"- **{letter}** {'is right' if choice.right else 'is wrong'}. {choice.why}"
            for letter, choice in zip(LETTERS, made.choices, strict=False)
        ]
    elif made.answer is not None:
        told = [f"**{show(made.answer)}**{f' {asks.unit}' if asks.unit else ''}. {made.explanation}", ""]
        told += [f"- {show(value)}: {why}" for value, why in made.slips]
    else:
        told = [
            f"- {criterion.points} point{'s' * (criterion.points > 1)}: {criterion.says}" for criterion in asks.criteria
        ]
        told += ["", f"A good answer: {made.explanation}"]
    return f"{about}\n\n" + "\n".join(told).rstrip()
