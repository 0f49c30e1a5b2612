"""The fit finds a step time that is known; the engine's steps hold what their kind says."""

import random

import pytest
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st

from minillm.bench import calibrate
from minillm.bench.calibrate import Kind, fit, measure
from minillm.errors import InputError
from minillm.model import Llama
from minillm.simulation.steps import StepTime

TRUE = StepTime(0.012, 0.0004, 3e-6, 0.002)


def kinds(step_time: StepTime, noise: float = 0.0, seed: int = 0) -> list[Kind]:
    """Steps as the engine has them: 0 to 8 rows at three lengths of context, and prompts."""
    draw = random.Random(seed)
    made = []
    for context in (16, 128, 384):
        for rows in range(9):
            for prompts in ((), (16,), (64,), (256,), (64, 64)):
                tokens, positions = rows + sum(prompts), rows * context + sum(prompts)
                if tokens:
                    seconds = step_time(tokens, positions, len(prompts)) * draw.uniform(1 - noise, 1 + noise)
                    made.append(Kind("", 3, tokens, positions, len(prompts), seconds))
    return made


def parts(step_time: StepTime) -> list[float]:
    return [step_time.base, step_time.per_token, step_time.per_position, step_time.per_chunk]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=4, max_size=4).filter(any))
def test_a_known_step_time_is_found(factors: list[float]):
    """Parts that are zero too."""
    known = StepTime(*(factor * part for factor, part in zip(factors, parts(TRUE), strict=True)))
    some = [kind for kind in kinds(known) if kind.seconds > 0]
    assert parts(fit(some)) == pytest.approx(parts(known), rel=1e-6, abs=1e-12)


@given(st.integers(0, 99))
def test_noise_moves_it_little(seed: int):
    noisy = kinds(TRUE, noise=0.1, seed=seed)
    found = fit(noisy)
    for kind in kinds(TRUE):
        assert found(kind.tokens, kind.positions, kind.chunks) == pytest.approx(kind.seconds, rel=0.06)
    done = calibrate.calibrate(noisy)
    assert 0 < done.error < 0.1 and done.steps == 3 * len(noisy)
    assert sum(kind.held_out for kind in done.kinds) == len(noisy) // calibrate.HELD_OUT


def test_no_part_is_negative():
    """Steps that get shorter with every chunk: the best that a sum of times can do is none."""
    assert fit(kinds(StepTime(0.012, 0.0004, 3e-6, -0.002))).per_chunk == 0.0


def test_what_is_held_out_is_not_fitted():
    odd = [
        Kind(
            k.name,
            k.steps,
            k.tokens,
            k.positions,
            k.chunks,
            k.seconds * (2 if i % calibrate.HELD_OUT == calibrate.HELD_OUT - 1 else 1),
        )
        for i, k in enumerate(kinds(TRUE))
    ]
    done = calibrate.calibrate(odd)
    assert parts(done.step_time) == pytest.approx(parts(TRUE), rel=1e-6)
    assert done.error == pytest.approx(0.5)


def test_the_engines_steps_are_what_their_kind_says(tiny: Llama):
    done = measure(tiny, slots=4)
    named = {kind.name: kind for kind in done.kinds}
    assert len(named) == len(done.kinds) >= calibrate.LEAST_KINDS
    decode = named["4 decoding at 16, prompts joining: none"]
    assert (decode.tokens, decode.chunks) == (4, 0) and decode.positions > 4 * 16
    joined = named["3 decoding at 16, prompts joining: 64"]
    assert (joined.tokens, joined.chunks) == (67, 1) and joined.positions > 3 * 16 + 64
    alone = named["0 decoding at 16, prompts joining: 16 and 16"]
    assert (alone.tokens, alone.positions, alone.chunks) == (32, 32, 2)
    assert done.steps == calibrate.REPEATS * len(done.kinds)
    assert min(parts(done.step_time)) >= 0 and done.step_time(4, 64, 0) > 0


def test_one_slot_is_enough_and_time_that_runs_out_ends_it(tiny: Llama):
    assert measure(tiny, slots=1).kinds
    assert len(measure(tiny, slots=4, seconds=0.0).kinds) == calibrate.LEAST_KINDS


def test_what_cannot_be_measured_is_refused(tiny: Llama):
    with pytest.raises(InputError, match="slots is 65; calibrating takes from 1 to 64"):
        measure(tiny, slots=65)
    short = Llama.random(TINY.__class__(**{**vars(TINY), "context": 32}))
    with pytest.raises(InputError, match="the model's context is 32"):
        measure(short, slots=2)
