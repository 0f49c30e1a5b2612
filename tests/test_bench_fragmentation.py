"""Memory in regions and in blocks: counts by hand, the same steps as with a model, targets, refusals, Ctrl-C."""

import dataclasses
import io
import re
from statistics import median

import pytest
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minillm import attention
from minillm.bench import fragmentation
from minillm.bench.fragmentation import BUDGET, Plan, Result, count, count_all, longest_of
from minillm.bench.harness import run
from minillm.bench.queueing import jobs_of
from minillm.bench.verify import Verifier
from minillm.errors import InputError
from minillm.model import Llama
from minillm.simulation.workload import Demand
from minillm.slots import BlockSlots, RegionSlots
from minillm.stages import STAGES

TEXT = [2 + (i * i + 3 * i) % 60 for i in range(400)]
PLAN = Plan(sizes=(1, 4), requests=20, served=8, scale=0.1, block=4, max_running=6, regions=2)


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def measure(model: Llama, plan: Plan = PLAN) -> tuple[Result, bool]:
    return fragmentation.measure(model, TEXT, plan, Verifier(model), 1.0, silent())


@pytest.fixture(scope="module")
def result(tiny: Llama) -> Result:
    return measure(tiny)[0]


# ---- counted


def test_one_request_by_hand():
    """5 tokens and 4 new ones: 5, 6, 7 and 8 are stored in four steps, in two blocks of 4, or a region of 9."""
    demand = [Demand(0.0, 5, 4)]
    blocks = count(demand, BlockSlots(1, 8, 16, 4), 4)
    assert (blocks.steps, blocks.held, blocks.used, blocks.waste) == (4, 8.0, 6.5, 1 - 26 / 32)
    assert (blocks.n_slots, blocks.running, blocks.most_running, blocks.memory) == (16, 1.0, 1, "blocks of 4")
    regions = count(demand, RegionSlots(2, 9), None)
    assert (regions.held, regions.used, regions.n_slots, regions.memory) == (9.0, 6.5, 18, "regions")


def test_a_preemption_by_hand():
    """Three blocks of 2. Both prompts of 2 come in; both grow, one block is left: the newer gives up its 2 tokens and
    has 3 to compute when the older one, of 5 in all, has ended."""
    found = count([Demand(0.0, 2, 3), Demand(0.0, 2, 3)], BlockSlots(2, 6, 6, 2), 2)
    assert (found.preemptions, found.recomputed, found.most_running) == (1, 2, 2)
    assert found.steps == 3 + 2  # the newer one: its 3 tokens, then one more


DEMANDS = st.lists(st.builds(Demand, st.just(0.0), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12)


@given(DEMANDS, st.integers(1, 5), st.integers(0, 10), st.integers(1, 5))
def test_no_more_is_wasted_than_the_last_block_of_each(demands: list[Demand], size: int, more: int, max_running: int):
    longest = longest_of(demands)
    n_slots = (-(-longest // size) + more) * size
    found = count(demands, BlockSlots(max_running, longest, n_slots, size), size)
    assert 0 < found.used <= found.held <= n_slots and found.most_running <= max_running
    assert found.waste == pytest.approx(1 - found.used / found.held)
    assert found.held - found.used <= found.most_running * (size - 1)
    assert (found.recomputed > 0) == (found.preemptions > 0)
    if size == 1:
        assert found.waste == 0


@settings(max_examples=30)
@given(DEMANDS, st.integers(1, 5), st.integers(0, 6), st.integers(1, 5))
def test_the_model_takes_the_steps_that_were_counted(
    tiny: Llama, demands: list[Demand], size: int, more: int, max_running: int
):
    longest = longest_of(demands)
    n_slots = (-(-longest // size) + more) * size
    found = count(demands, BlockSlots(max_running, longest, n_slots, size), size)
    limits = {"max_running": max_running, "budget": BUDGET, "n_slots": n_slots, "block": size}
    done = run(tiny, "paged", jobs_of(demands, TEXT), limits)
    steps = done.counts.steps
    assert (len(steps), done.preemptions) == (found.steps, found.preemptions)
    assert done.tokens_pushed - done.tokens_useful == found.recomputed
    assert max(len(step.new) for step in steps) <= found.most_running
    # the harness knows whose tokens each step computed, also of those that were sent away after it
    assert all(sum(step.new.values()) == step.tokens and min(step.new.values()) > 0 for step in steps)


def test_the_targets_hold_on_the_articles_mix():
    """These are counts: they do not depend on the machine."""
    regions, blocks = count_all(Plan(sizes=(16,), requests=200))
    assert blocks.n_slots <= regions.n_slots and regions.most_running == 8
    assert blocks.waste < 0.04 < 0.5 < regions.waste
    assert blocks.running >= 2 * regions.running and blocks.steps <= regions.steps / 2


def test_larger_blocks_waste_more():
    wasted = [c.waste for c in count_all(Plan(sizes=(1, 4, 16, 64), requests=100))[1:]]
    assert wasted == sorted(wasted) and wasted[0] == 0


def test_every_size_gets_no_more_than_the_regions_memory():
    for c in count_all(Plan(sizes=(7, 100), requests=30)):
        assert c.n_slots <= 8 * longest_of(Plan().demands(30)) < c.n_slots + (c.size or 1)


# ---- served


def test_both_stages_serve_the_same_in_the_same_memory(result: Result):
    slow, fast = result.served
    assert (slow.stage, fast.stage) == ("continuous", "paged") and slow.void is None is fast.void
    assert slow.n_slots - PLAN.block < fast.n_slots <= slow.n_slots
    assert fast.nbytes == fast.n_slots * TINY.kv_bytes_per_token(8)
    assert slow.most_running == PLAN.regions < fast.most_running and slow.recomputed == slow.preemptions == 0
    assert fast.steps < slow.steps and len(slow.rounds) == len(fast.rounds) == PLAN.rounds
    assert result.ratio == median(b / a for a, b in zip(slow.rounds, fast.rounds, strict=True))
    assert result.output_tokens == sum(d.output for d in PLAN.demands(PLAN.served, PLAN.scale))


def test_a_wrong_stage_shows_no_time(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """A stage that looks one position too far back."""
    right = STAGES["paged"]

    def wrong(model: Llama, requests: list, max_running: int, budget: int, n_slots: int, block: int):
        visible = attention.visible
        attention.visible = lambda q, k, *seq: visible(q, k + 1, *seq) | (k[..., None, :] == 0)
        try:
            yield from right(model, requests, max_running, budget, n_slots, block)
        finally:
            attention.visible = visible

    monkeypatch.setitem(STAGES, "paged", wrong)
    found, _ = measure(tiny)
    assert found.served[0].void is None and found.served[1].void and found.ratio is None
    console = silent()
    console.print(fragmentation.served_table(found))
    page = " ".join(written(console).split())
    assert "paged is void" in page and "continuous " in page and not re.search(r"paged [\d.]+-[\d.]+", page)
    assert "Served by" not in fragmentation.finding(found)


def test_after_ctrl_c_what_is_whole_is_kept(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    def stop_at(n: int):
        calls = iter(range(1, 100))

        def counted(*args: object, **more: object):
            if next(calls) == n:
                raise KeyboardInterrupt
            return run(*args, **more)

        monkeypatch.setattr(fragmentation, "run", counted)

    stop_at(2)  # warming up
    found, partial = measure(tiny)
    assert partial and len(found.counted) == 3 and not found.served and found.ratio is None
    stop_at(2 + 2 + 2)  # the second stage of the second round
    found, partial = measure(tiny)
    assert partial and [len(row.rounds) for row in found.served] == [1, 1] and found.ratio


# ---- what is refused, and for people


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"regions": 0}, "regions is 0; it must be from 1 to 256"),
        ({"requests": 0}, "requests is 0"),
        ({"served": -1}, "served is -1; it must be from 0"),
        ({"sizes": (16, 0)}, "block size is 0; it must be from 1"),
        ({"max_running": BUDGET + 1}, "max-running is 257"),
        ({"scale": float("nan")}, "scale is nan"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(asked: dict, why: str):
    with pytest.raises(InputError, match=why):
        Plan(**asked)


def test_more_than_the_context_admits_is_refused():
    with pytest.raises(InputError, match="scale is 1, so that a request may need .* context is 256: take a smaller"):
        Plan(scale=1).check(TINY)
    Plan(scale=1, served=0).check(TINY)
    PLAN.check(TINY)


def test_the_tables_fit_and_hold_the_numbers(result: Result):
    console = silent(width=100)
    wide = dataclasses.replace(result, counted=count_all(Plan(requests=60)))
    console.print(fragmentation.counted_table(wide), fragmentation.served_table(result))
    text = written(console)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    for row in (*wide.counted, *result.served):
        assert f"{row.steps:,}" in text
    other = dataclasses.replace(wide, plan=Plan(block=8))  # of which none were counted
    assert fragmentation.claims(other) == [] and "waste" not in fragmentation.finding(other)
    usual = dataclasses.replace(wide, plan=Plan(requests=60))
    assert [claim.met for claim in fragmentation.claims(usual)] == [True, True]
    assert f"{usual.counted[3].waste:.1%}" in fragmentation.finding(usual)
