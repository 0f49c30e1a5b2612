"""A step made directly is the step that a real run would make: the same work, the same tokens, again and again."""

from functools import partial

import pytest
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.bench.harness import Step, counting
from minillm.bench.steady import Place, Steady, needed
from minillm.engine import Engine
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.slots import BlockSlots, RegionSlots

ITEMSIZE = 8  # of a number in float64


def work(steps: list[Step]) -> list[tuple[int, int, int, int]]:
    return [(step.tokens, step.rows, step.scores, step.kv_bytes) for step in steps]


def really(model: Llama, prompts: list[list[int]], backend: str) -> Engine:
    """An engine that has computed these prompts, and has one token to go for each. Slots nobody wrote hold NaN."""
    longest = len(prompts[0]) + 1
    engine = Engine(model, max_running=len(prompts), budget=len(prompts) * longest, max_len=longest, backend=backend)
    engine.pool.k.fill_(float("nan"))
    engine.pool.v.fill_(float("nan"))
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    return engine


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(2, 40), st.sampled_from(["gather", "dense"]), st.randoms())
def test_a_step_made_directly_is_the_one_after_a_real_prefill(tiny: Llama, running: int, context: int, backend, draw):
    prompts = [[draw.randrange(64) for _ in range(context - 1)] for _ in range(running)]
    engine = really(tiny, prompts, backend)
    steady = Steady(tiny, running, context, backend)
    steady.put(Place.decode(running, context))
    for real, made in zip(engine.scheduler.running, steady.requests, strict=True):
        assert (real.row, real.computed, real.pending) == (made.row, made.computed, made.pending)
        made.tokens[:] = real.tokens
    steady.engine.pool.k.copy_(engine.pool.k)
    steady.engine.pool.v.copy_(engine.pool.v)
    tokens = [[event.token for event in steady.turn()[1]] for _ in range(2)]
    with counting(tiny, []) as counts:
        expected = [event.token for event in engine.step()]
    assert tokens == [expected, expected]  # the second turn begins where the first did
    assert work(steady.count()) == work(counts.steps)


@given(st.integers(1, 3), st.integers(1, 30), st.data())
def test_the_needed_work_is_what_the_definition_says(running: int, length: int, data: st.DataObject):
    """Token by token: it looks at every position up to its own, in each layer and head."""
    computed = data.draw(st.integers(0, length - 1))
    budget = data.draw(st.integers(1, 40)) if running == 1 else running * length
    place = Place(running, length, computed)
    steps = needed(place, budget, TINY, ITEMSIZE)
    each = 2 * TINY.n_layers * TINY.n_kv_heads * TINY.head_dim * ITEMSIZE
    at, found = computed, []
    while at < length:
        n = min(budget, length - at) if running == 1 else length - at
        seen = sum(position + 1 for position in range(at, at + n))
        rows = running if at + n == length else 0
        found.append((running * n, rows, running * seen * TINY.n_layers * TINY.n_heads, running * (at + n) * each))
        at += n
    assert work(steps) == found


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 50))
def test_a_prompt_takes_the_steps_that_are_counted(tiny: Llama, length: int, budget: int):
    steady = Steady(tiny, 1, 40, "gather", budget)
    steady.put(Place.prompt(length))
    asked = needed(steady.place, budget, TINY, ITEMSIZE)
    done = steady.count()
    assert [(step.tokens, step.rows) for step in done] == [(step.tokens, step.rows) for step in asked]
    assert all(did.scores >= must.scores for did, must in zip(done, asked, strict=True))
    assert [request.computed for request in steady.requests] == [0]


@pytest.mark.parametrize("slots", [RegionSlots, partial(BlockSlots, size=4)])
def test_only_what_is_computed_is_filled(tiny: Llama, slots):
    """Everything else may hold anything: here NaN, that would be seen in the tokens."""
    steady = Steady(tiny, 3, 10, "gather", slots=slots)
    pool = steady.engine.pool
    pool.k.fill_(float("nan"))
    pool.v.fill_(float("nan"))
    steady.put(Place.decode(2, 7))
    steady.fill()
    filled = {slot for request in steady.requests for slot in request.slots[:6]}
    assert len(filled) == 12
    for memory in (pool.k, pool.v):
        known = ~memory.isnan().any(dim=-1).any(dim=0).any(dim=0)  # [slots]
        assert set(known.nonzero().flatten().tolist()) == filled
    assert all(event.token is not None and event.token >= 0 for event in steady.turn()[1])


def test_putting_again_loses_nothing(tiny: Llama):
    """Shorter, longer, fewer and more: rows and slots come back, and the table knows the new ones."""
    steady = Steady(tiny, 4, 20, "gather")
    steady.put(Place.decode(4, 20))
    steady.fill()
    alone = []
    for running, context in ((4, 20), (1, 3), (4, 11), (2, 20), (1, 3)):
        steady.put(Place.decode(running, context))
        assert sorted([r.row for r in steady.requests] + steady.engine.scheduler.slots.free_rows) == [0, 1, 2, 3]
        (step,) = steady.count()
        assert work([step]) == work(needed(steady.place, 20, TINY, ITEMSIZE))
        if running == 1:
            alone.append([event.token for event in steady.turn()[1]])
    assert alone[0] == alone[1]


@pytest.mark.parametrize("place", [Place.decode(3, 5), Place.prompt(7)], ids=["decode", "prompt"])
def test_a_backend_without_sdpa_is_counted_by_what_its_tokens_may_see(tiny: Llama, place: Place):
    """`segments` calls torch's own attention: nobody sees the scores that it computes."""
    steady = Steady(tiny, place.running, place.length, "segments")
    steady.put(place)
    steady.fill()
    expected = needed(place, steady.engine.scheduler.budget, tiny.config, tiny.dtype.itemsize)
    counted = steady.count()
    assert [(s.tokens, s.rows, s.scores, s.kv_bytes) for s in counted] == [
        (s.tokens, s.rows, s.scores, s.kv_bytes) for s in expected
    ]
    assert all(step.scores > 0 for step in counted)
