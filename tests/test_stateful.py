"""Random use of the engine, on a random model in float64: prompts that begin alike, several samples, chats that go on,
aborts, too little memory, any policy. After every step every invariant is checked, memory that nobody may read is
spoiled before it, and each finished text is compared with the one the naive stage makes alone.

`make stateful` lets each engine live for 2,000 steps and prints what happened.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import TINY
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from script import NAN, CheckedEngine, Codec, check_invariants, run_out
from test_engine import TINY_BACKENDS
from test_stages import params

from minillm.errors import InputError
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.policies import POLICIES
from minillm.request import Event, Request, make_request
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots, RegionSlots
from minillm.stages import naive

STEPS = int(os.environ.get("STATEFUL_STEPS", "0"))  # each engine lives for at least so many
MODEL = Llama.random(TINY, seed=0, dtype=torch.float64)
CODEC = Codec([b"a", b"b", b"ab", b"\xc3", b"\xa9", b"c", b" ", b"bc"] * 8)  # halves of a character among them
STOPS = ["bca", "ab ", "\u00e9", "cc", "abab", "\ufffd"]
BEGINNINGS = ([5] * 20, [5, 6] * 10, [5, 6, 7] * 7, [9, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50])


@dataclass(frozen=True)
class Limits:
    """Of one engine, and of the memory it has."""

    kind: type
    size: int
    room: float  # how many of the longest texts the memory holds
    max_len: int
    max_running: int
    more: int  # budget, above the least
    policy: str
    patience: int
    backend: str
    split: int
    poison: float

    def engine(self) -> CheckedEngine:
        slots: Any = self.kind
        if self.kind is not RegionSlots:
            n_slots = max(int(self.room * self.max_len / self.size), 1) * self.size
            slots = partial(self.kind, n_slots=n_slots, size=self.size)
        engine = CheckedEngine(
            MODEL,
            CODEC,
            max_running=self.max_running,
            budget=self.max_running + self.more,
            max_len=self.max_len,
            backend=self.backend,
            slots=slots,
            policy=self.policy,
        )
        engine.poison = self.poison
        return engine


CHOICES: dict[str, Sequence[Any]] = {
    "kind": [SharedSlots, SharedSlots, SharedSlots, BlockSlots, BlockSlots, RegionSlots],
    "size": [1, 2, 3, 4, 7, 16],
    "room": [0.5, 1.0, 1.3, 1.3, 1.7, 2.0, 2.5, 4.0],
    "max_len": range(6, 25),
    "max_running": [1, 2, 3, 4, 5, 6, 6],
    "more": range(13),
    "policy": list(POLICIES),
    "patience": [2, 5, 64],
    "backend": TINY_BACKENDS,
    "split": [0, 6, 3000],
    "poison": [NAN, NAN, 1e4],
}
LIMITS = st.builds(Limits, **{name: st.sampled_from(values) for name, values in CHOICES.items()})


@st.composite
def wishes(draw: st.DrawFn) -> SamplingParams:
    """As for the stages; sometimes with stop strings, or without a seed."""
    wish = draw(params())
    stop = draw(st.lists(st.sampled_from(STOPS), max_size=2))
    return replace(wish, stop=stop, seed=draw(st.sampled_from([wish.seed, wish.seed, None])))


class Use(RuleBasedStateMachine):
    """One engine, and what its users have seen of it so far."""

    lives = 0

    def __init__(self) -> None:
        super().__init__()
        self.undo = ExitStack()
        self.engine: CheckedEngine
        self.requests: list[Request] = []
        self.seen: dict[Request, list[Event]] = {}
        self.steps = self.compared = self.aborted = self.sent_away = 0

    @initialize(limits=LIMITS, usual=st.lists(wishes(), min_size=3, max_size=6), seed=st.integers(0, 2**32))
    def begin(self, limits: Limits, usual: list[SamplingParams], seed: int) -> None:
        self.limits, self.usual, self.chance = limits, usual, Random(seed)
        if STEPS:  # hypothesis would try much the same several times over, which few long lives are too dear for
            Use.lives += 1
            self.chance = Random(seed + Use.lives)
            self.limits = Limits(**{name: self.chance.choice(values) for name, values in CHOICES.items()})
        self.undo.enter_context(patch("minillm.batch.SPLIT", self.limits.split))
        self.undo.enter_context(patch("minillm.policies.PATIENCE", self.limits.patience))
        self.engine = self.limits.engine()

    # ---- what a user does

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        length=st.integers(0, 20),
        end=st.lists(st.integers(0, 63), max_size=6),
        wish=wishes(),
        n=st.sampled_from([1, 1, 2, 3, 5, 8]),
        urgency=st.integers(0, 9),
    )
    def add(
        self, beginning: list[int], length: int, end: list[int], wish: SamplingParams, n: int = 1, urgency: int = 0
    ) -> None:
        prompt = (beginning[:length] + end or [3])[: self.engine.max_len]
        added = self.engine.add_samples(prompt, wish, n, priority=urgency)
        assert [request.sample_index for request in added] == list(range(n))
        self.requests += added
        self.seen |= {request: [] for request in added}

    @precondition(lambda self: self.requests)
    @rule(i=st.integers(0, 99), wish=wishes(), n=st.integers(1, 3))
    def ask_again(self, i: int, wish: SamplingParams, n: int = 1) -> None:
        """The same prompt, with other parameters."""
        self.add([], 0, self.requests[-1 - i % len(self.requests)].prompt, wish, n)

    @precondition(lambda self: self.requests)
    @rule(i=st.integers(0, 99), end=st.lists(st.integers(0, 63), max_size=3), wish=wishes())
    def go_on(self, i: int, end: list[int], wish: SamplingParams) -> None:
        """What was said and answered so far, and something new."""
        self.add([], 0, self.requests[-1 - i % len(self.requests)].tokens + end, wish)

    @precondition(lambda self: self.requests)
    @rule(i=st.integers(0, 99))
    def abort(self, i: int) -> None:
        request = self.requests[-1 - i % len(self.requests)]
        over = request.finish_reason is not None
        event = self.engine.abort(request.id)
        assert (event is None) == over and self.engine.abort(request.id) is None
        if event is not None:
            assert (event.request, event.token, event.finish_reason) == (request, None, "abort")
            self.read([event])

    @rule(n=st.integers(1, 8))
    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.read(self.engine.step())
            self.steps += 1

    @rule(too_long=st.booleans(), id=st.integers(10**9, 10**9 + 99))
    def err(self, too_long: bool, id: int) -> None:
        """What is refused changes nothing."""
        waiting, running = list(self.engine.scheduler.waiting), list(self.engine.scheduler.running)
        with pytest.raises(InputError):
            self.engine.add_samples([3] * (self.engine.max_len + 1) if too_long else [5, 64], self.usual[0], 2)
        assert self.engine.abort(id) is None
        if self.requests:
            with pytest.raises(InputError):
                self.engine.submit(self.requests[id % len(self.requests)])
        assert (waiting, running) == (list(self.engine.scheduler.waiting), self.engine.scheduler.running)

    @rule(seed=st.integers(0, 2**32), n=st.integers(1, 40))
    def live(self, seed: int, n: int) -> None:
        """Many of these in a row."""
        chance = Random(seed)
        for _ in range(n):
            self.act(chance)

    def act(self, chance: Random) -> None:
        any_i, wish = chance.choice([chance.randrange(9), chance.randrange(99)]), chance.choice(self.usual)
        end = [chance.randrange(64) for _ in range(chance.randrange(5))]
        crowded = len(self.engine._requests) > 3 * self.limits.max_running
        what = chance.random()
        if what > 0.4 or crowded or not self.requests:
            self.step(chance.randrange(1, 4))
        if what < 0.08 and self.requests:
            self.abort(any_i)
        elif what < 0.22 and self.requests and not crowded:
            self.go_on(any_i, end, wish) if chance.random() < 0.5 else self.ask_again(any_i, wish)
        elif what < 0.4 and not crowded:
            beginning = chance.choice(BEGINNINGS)
            self.add(beginning, chance.randrange(21), end, wish, chance.choice([1, 1, 1, 2, 4]), chance.randrange(10))

    # ---- what must be true

    @invariant()
    def keeps(self) -> None:
        if hasattr(self, "engine"):
            check_invariants(self.engine.scheduler)

    def read(self, events: Sequence[Event]) -> None:
        for event in events:
            assert not self.seen[event.request] or self.seen[event.request][-1].finish_reason is None
            self.seen[event.request].append(event)
            if event.finish_reason is not None:
                self.compare(event.request)

    def compare(self, request: Request) -> None:
        """With the text it makes alone: tokens, text, log-probabilities, the reason it ended; once each."""
        wish = replace(request.params, seed=request.seed)
        fresh = make_request(request.prompt, wish, TINY, CODEC, self.engine.max_len, sample_index=request.sample_index)
        right, mine = list(naive.generate(MODEL, [fresh])), self.seen[request]
        aborted = request.finish_reason == "abort"
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [request.finish_reason]
        assert aborted or len(mine) == len(right)
        tokens = [event.token for event in mine if event.token is not None]
        assert tokens == request.output == [event.token for event in right][: len(tokens)]
        for event, other in zip(mine, right, strict=False):
            if event.token is None:
                continue
            assert (event.text, event.finish_reason) == (other.text, other.finish_reason)
            assert (event.logprobs is None) == (other.logprobs is None)
            if event.logprobs is not None:
                assert event.logprobs == pytest.approx(other.logprobs, abs=1e-10)
        self.aborted += aborted
        self.compared += 1
        self.sent_away = max(self.sent_away, request.preemptions)

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.end()
        finally:
            self.undo.close()

    def end(self) -> None:
        while self.steps < STEPS:
            self.act(self.chance)
            check_invariants(self.engine.scheduler)
        # nobody waits for ever: each step brings at least one token of someone further
        most = sum(r.most_slots + 1 for r in self.engine._requests.values())
        preemptions, before = self.engine.scheduler.preemptions, self.steps
        while self.engine.busy:
            self.step()
            again = (self.engine.scheduler.preemptions - preemptions) * self.engine.max_len
            assert self.steps - before <= most + again and again <= most * self.engine.max_len, "it hangs"
        self.read(run_out(self.engine))
        assert self.compared == len(self.requests)
        if STEPS:
            self.tell()

    def tell(self) -> None:
        slots = self.engine.scheduler.slots
        memory = f"{self.limits.kind.__name__} {slots.n_slots} slots"
        if isinstance(slots, BlockSlots):
            memory += f" in blocks of {slots.size}"
        hits = f", {slots.found} of {slots.asked} prompt tokens found" if isinstance(slots, SharedSlots) else ""
        print(
            f"{self.steps} steps, {self.compared} texts compared, {self.aborted} of them aborted, "
            f"{self.engine.scheduler.preemptions} preemptions, at most {self.sent_away} of one{hits}; {memory}, "
            f"max_len {self.engine.max_len}, max_running {self.limits.max_running}, "
            f"budget {self.engine.scheduler.budget}, {self.limits.policy}",
            flush=True,
        )


TestUse = Use.TestCase
TestUse.settings = (
    settings(max_examples=20, stateful_step_count=20, derandomize=False, phases=[Phase.generate], deadline=None)
    if STEPS
    else settings(max_examples=60, stateful_step_count=25)
)
