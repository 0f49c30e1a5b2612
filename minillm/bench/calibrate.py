"""How long a step of the engine takes, by what is in it: steps of known content are timed, and a sum is fitted."""

import random
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median

import numpy as np

from minillm.bench.harness import now
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Request
from minillm.simulation.steps import StepTime

CONTEXTS = (16, 384, 128)  # tokens in each sequence that decodes; the extremes first, should time run out
NEWCOMERS = ((16,), (64,), (256,), (16, 16), (64, 64))  # prompts that join in one step
REPEATS = 3
ROOM = 192  # tokens that a sequence may grow by while it is measured
HELD_OUT = 3  # every third kind of step is not fitted
LEAST_KINDS = 8  # measured however long it takes
MOST_SLOTS = 64


@dataclass(frozen=True)
class Kind:
    """Steps of one content: how many were timed, what was in them (means), and their median time in seconds."""

    name: str
    steps: int
    tokens: float
    positions: float
    chunks: float
    seconds: float
    held_out: bool = False


@dataclass(frozen=True)
class Calibration:
    """A fitted step time. `error` is the median of |fitted / measured - 1| over kinds of steps that were not fitted."""

    step_time: StepTime
    error: float
    steps: int  # timed in all
    kinds: list[Kind]


@dataclass(frozen=True)
class _Timed:
    tokens: int
    positions: int
    chunks: int
    seconds: float


class _Meter:
    """An engine whose steps are timed. What a step held shows in its requests' counters, before and after."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.rows: list[Request] = []
        self.draw = random.Random(0)

    def add(self, length: int, max_tokens: int) -> Request:
        prompt = [self.draw.randrange(self.engine.model.config.vocab_size) for _ in range(length)]
        return self.engine.add(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    def fill(self, rows: int, context: int) -> None:
        """So many sequences of that many tokens, all of them ready to decode."""
        self.rows = [self.add(context, ROOM) for _ in range(rows)]
        while any(row.n_output == 0 for row in self.rows):
            self.engine.step()

    def shrink(self, rows: int) -> None:
        for row in self.rows[rows:]:
            self.engine.abort(row.id)
        self.rows = self.rows[:rows]

    def step(self, newcomers: tuple[int, ...] = ()) -> _Timed:
        """Every sequence makes a token, and the newcomers' whole prompts join; they end with the step."""
        requests = self.rows + [self.add(length, 1) for length in newcomers]
        before = [request.computed for request in requests]
        start = now(self.engine.model.device)
        self.engine.step()
        seconds = now(self.engine.model.device) - start
        new = [request.computed - earlier for request, earlier in zip(requests, before, strict=True)]
        assert all(new), "the step was planned to hold all of them"
        return _Timed(sum(new), sum(request.computed for request in requests), sum(n > 1 for n in new), seconds)

    def kind(self, context: int, newcomers: tuple[int, ...]) -> Kind:
        timed = [self.step(newcomers) for _ in range(REPEATS)]
        prompts = " and ".join(map(str, newcomers)) or "none"
        return Kind(
            f"{len(self.rows)} decoding at {context}, prompts joining: {prompts}",
            REPEATS,
            tokens=fmean(t.tokens for t in timed),
            positions=fmean(t.positions for t in timed),
            chunks=fmean(t.chunks for t in timed),
            seconds=median(t.seconds for t in timed),
        )


def measure(model: Llama, slots: int, budget: int = 512, seconds: float = 25.0) -> Calibration:
    """Times the engine with 0 to `slots` sequences decoding, alone and with prompts joining.

    After `seconds` no further kind of step is begun. Raises InputError if the model's context is too short, or for
    more slots than calibrating would end with.
    """
    contexts = [context for context in CONTEXTS if context + ROOM <= model.config.context]
    if not contexts:
        raise InputError(f"the model's context is {model.config.context}; calibrating needs {min(CONTEXTS) + ROOM}")
    if not 1 <= slots <= MOST_SLOTS:
        raise InputError(f"slots is {slots}; calibrating takes from 1 to {MOST_SLOTS}")
    budget = max(budget, slots)
    longest = max(contexts) + ROOM
    meter = _Meter(Engine(model, max_running=slots, budget=budget, max_len=longest))
    end = now(model.device) + seconds
    kinds: list[Kind] = []
    for context in contexts:
        meter.fill(slots, context)
        for rows in sorted({slots, slots - 1, slots // 2, 1, 0}, reverse=True):
            meter.shrink(rows)
            if rows == 0 and context != contexts[0]:
                break  # prompts alone: the same for every context
            for newcomers in ((), *NEWCOMERS):
                fits = max(newcomers, default=0) <= longest and rows + sum(newcomers) <= budget
                if not fits or not 1 <= rows + len(newcomers) <= slots:
                    continue
                if len(kinds) >= LEAST_KINDS and now(model.device) > end:
                    return calibrate(kinds)
                meter.step(newcomers)  # to warm up: a new shape's first step prepares its kernels
                kinds.append(meter.kind(context, newcomers))
    return calibrate(kinds)


def calibrate(kinds: list[Kind]) -> Calibration:
    """Fits all kinds but every third, and compares those with the fit."""
    marked = [replace(k, held_out=i % HELD_OUT == HELD_OUT - 1) for i, k in enumerate(kinds)]
    step_time = fit([kind for kind in marked if not kind.held_out])
    errors = [abs(step_time(k.tokens, k.positions, k.chunks) / k.seconds - 1) for k in marked if k.held_out]
    assert errors, "too few kinds of steps to hold any out"
    return Calibration(step_time, median(errors), sum(kind.steps for kind in kinds), marked)


def fit(kinds: list[Kind]) -> StepTime:
    """The step time with the least sum of squared relative errors whose parts are not negative.

    With four parts there are 15 choices of which are above zero: all are tried, the best one that fits counts.
    """
    seconds = np.array([kind.seconds for kind in kinds])  # [K]
    parts = np.array([(1.0, kind.tokens, kind.positions, kind.chunks) for kind in kinds])  # [K, 4]
    relative = parts / seconds[:, None]  # times the coefficients: fitted over measured, which should be 1
    best, least = np.zeros(4), np.inf
    for used in (list(c) for n in range(1, 5) for c in combinations(range(4), n)):
        found = np.zeros(4)
        found[used] = np.linalg.lstsq(relative[:, used], np.ones(len(kinds)), rcond=None)[0]
        error = float(((relative @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return StepTime(*(float(value) for value in best))
