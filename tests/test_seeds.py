"""The hidden variants: the same properties on other inputs. Solutions hold on them, written-down answers do not."""

import random
import re
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import lessons, reference

from minillm.config import Config
from minillm.lab import checking, seeds
from minillm.lab.checking import Finding, run_checks
from minillm.lab.work import Work

CHECKS = sorted(Path(checking.__file__).parent.glob("checks/[cp][0-9]*.py"))


# ---- the draws


def test_without_a_variant_the_draws_are_pythons_and_torchs_own():
    assert seeds.rng(3).random() == random.Random(3).random()
    ours, theirs = seeds.generator(3), torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(5, generator=ours), torch.rand(5, generator=theirs))


def test_a_variant_draws_otherwise_and_the_same_each_time():
    def drawn(seed: int | None) -> tuple[float, float, float]:
        with seeds.variant(seed):
            return seeds.rng(3).random(), seeds.rng(4).random(), torch.rand(1, generator=seeds.generator(3)).item()

    numbers = [drawn(seed) for seed in (None, 0, 1, 2**70)]
    assert numbers == [drawn(seed) for seed in (None, 0, 1, 2**70)]
    assert len({number for three in numbers for number in three}) == 12


def test_a_variant_ends_with_its_block_also_when_something_is_raised():
    with pytest.raises(ValueError), seeds.variant(1):
        with seeds.variant(2):
            assert seeds.mixed(7) != 7
        with seeds.variant(None):
            assert seeds.mixed(7) == 7
        assert seeds.mixed(7) != 7
        raise ValueError
    assert seeds.mixed(7) == 7


def test_what_is_kept_is_kept_for_each_variant():
    made = []

    @seeds.cache
    def draw(n: int) -> float:
        made.append(n)
        return seeds.rng(n).random()

    assert draw(1) == draw(1) == random.Random(1).random()
    with seeds.variant(5):
        assert draw(1) == draw(1) != random.Random(1).random()
    assert draw(1) == random.Random(1).random() and made == [1, 1]


@pytest.mark.parametrize("path", CHECKS, ids=[path.stem for path in CHECKS])
def test_checks_draw_from_nowhere_else_and_keep_no_draw(path: Path):
    text = path.read_text("utf-8")
    assert not re.findall(r"random\.Random\([^)]|manual_seed\(|[^.]\brandom\.(?:random|randint|choice|shuffle)\(", text)
    assert not re.findall(r"^(?!def |    |@|from |import |#).*\b(?:rng|generator)\(", text, re.MULTILINE), (
        "once, at import"
    )
    for body in re.findall(r"^@(?:functools\.)?(?:lru_)?cache.*\ndef (?:.*\n)+?(?=\n\n|\Z)", text, re.MULTILINE):
        assert "rng(" not in body and "generator(" not in body, f"use seeds.cache:\n{body}"


# ---- the lessons

# functions whose inputs are examples by hand alone
BY_HAND = {
    "02 frequencies",
    "06 refill_pads",
    "09 blocks_needed",
    "09 may_enter",
    "11 intensity",
    "12 bucket",
    "13 goodput",
}
TABLED = ("00", "04", "07", "09")  # lessons with several functions of plain data, and quick checks


def in_a_variant(lesson: str, seed: int, work: Work, *only: str) -> tuple[list[Finding], list[Finding]]:
    """What is found of each property, and of those that draw."""
    every, drew, before = [], [], len(seeds.asked)

    def tell(finding: Finding) -> None:
        nonlocal before
        every.append(finding)
        if len(seeds.asked) > before:
            drew.append(finding)
        before = len(seeds.asked)

    with seeds.variant(seed):
        run_checks(lesson, work, only or None, tell)
    return every, drew


@pytest.mark.parametrize("lesson", lessons())
def test_the_solutions_hold_in_variants_and_every_function_meets_other_inputs(lesson: str):
    for seed in (11, 12):
        every, drew = in_a_variant(lesson, seed, reference(lesson))
        assert not [(one.prop.says, one.wrong) for one in every if one.wrong is not None]
    functions = {f"{lesson} {prop.function}" for prop in checking.properties(lesson)}
    assert {f"{lesson} {one.prop.function}" for one in drew} == functions - BY_HAND


class NotPlain(BaseException):  # no Exception: `Work.call` would explain it
    """An argument or a result that cannot be written down: a model, a memory, a request."""


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), repr(value.tolist())
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, *map(plain, value)
    if value is None or isinstance(value, int | float | str | bytes | range | torch.dtype | Config):
        return repr(value)
    raise NotPlain


def written_down(lesson: str, function: str) -> Callable[..., Any]:
    """The function as a table of what the public check asks, and of what the solution does and answers then."""
    work, table = reference(lesson), {}
    solution = work.names[function]

    def recorded(*args: Any) -> Any:
        key = plain(args)
        result = solution(*args)
        plain(result)
        table[key] = deepcopy((result, args))
        return result

    work.names[function] = recorded
    for prop in checking.properties(lesson):
        if prop.function == function:
            prop.run(work)

    def looked_up(*args: Any) -> Any:
        result, after = table.get(plain(args)) or next(iter(table.values()))
        for arg, now in zip(args, after, strict=True) if plain(args) in table else ():
            if isinstance(arg, torch.Tensor):
                arg.copy_(now)
            elif isinstance(arg, list):
                arg[:] = now
        return deepcopy(result)

    return looked_up


@pytest.mark.parametrize("lesson", TABLED)
def test_answers_that_were_written_down_hold_in_public_and_in_no_variant(lesson: str):
    tried = 0
    for function in dict.fromkeys(prop.function for prop in checking.properties(lesson)):
        try:
            work = reference(lesson)
            work.names[function] = written_down(lesson, function)
        except NotPlain:
            continue
        tried += 1
        assert run_checks(lesson, work, [function]).passed
        _, drew = in_a_variant(lesson, 21, work, function)
        assert not [one.prop.says for one in drew if one.wrong is None], function
    assert tried >= 2
