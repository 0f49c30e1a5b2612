"""The queue step by step: by hand, and against what the stages themselves push through a model."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from script import Script, follow

from minillm.cache import CachedAttend
from minillm.params import SamplingParams
from minillm.request import make_request
from minillm.simulation import steps
from minillm.simulation.steps import StepTime, capacity, simulate
from minillm.simulation.workload import Demand
from minillm.stages import STAGES

# each counts one part of the steps: the time at which something ends is what was counted until then
COUNTERS = {
    "steps": StepTime(1, 0, 0, 0),
    "tokens": StepTime(0, 1, 0, 0),
    "positions": StepTime(0, 0, 1, 0),
    "chunks": StepTime(0, 0, 0, 1),
}
A, B, C = Demand(0, 3, 2), Demand(0, 1, 4), Demand(0, 2, 1)


def test_a_step_is_the_sum_of_its_parts():
    assert StepTime(1000, 100, 10, 1)(2, 3, 4) == 1000 + 200 + 30 + 4


@pytest.mark.parametrize(
    "policy, ends",
    [
        # A and B in a rectangle 3 wide, then 1 wide until B ends; A goes on costing. C alone.
        ("static", {"steps": [2, 4, 5], "tokens": [8, 12, 14], "positions": [14, 34, 36], "chunks": [1, 1, 2]}),
        # C takes A's row after two steps, and makes B's row 2 wide
        ("dynamic", {"steps": [2, 4, 3], "tokens": [8, 14, 12], "positions": [14, 30, 22], "chunks": [1, 2, 2]}),
        # C joins after two steps, and costs its own two tokens
        ("continuous", {"steps": [2, 4, 3], "tokens": [6, 10, 9], "positions": [10, 19, 15], "chunks": [1, 2, 2]}),
    ],
)
def test_three_requests_on_two_slots_by_hand(policy: str, ends: dict[str, list[int]]):
    for part, step_time in COUNTERS.items():
        assert simulate(policy, [A, B, C], 2, step_time, budget=4).ends == ends[part], part


def test_a_static_row_is_freed_with_its_group_and_others_with_their_last_token():
    for policy in ("static", "dynamic", "continuous"):
        s = simulate(policy, [A, B, C], 2, COUNTERS["steps"], budget=4)
        assert s.freed == ([4, 4, 5] if policy == "static" else s.ends)


def test_a_long_prompt_is_cut_to_the_budget():
    """Two tokens a step: a prompt of 5 takes three steps, and the next request joins in the third."""
    s = simulate("continuous", [Demand(0, 5, 1), Demand(0, 1, 2)], 2, COUNTERS["steps"], budget=2)
    assert s.starts == [0, 2] and s.ends == [3, 4]


def test_single_tokens_go_before_a_prompt_half_computed():
    """The second request's prompt of 4 has one token a step beside the first one's: done after four steps."""
    demands = [Demand(0, 1, 6), Demand(0, 4, 1)]
    assert simulate("continuous", demands, 2, COUNTERS["steps"], budget=2).ends == [6, 4]


def test_who_comes_during_a_step_joins_the_next():
    demands = [Demand(0, 1, 3), Demand(0.5, 1, 1), Demand(9, 1, 1)]
    for policy, starts in (("static", [0, 3, 9]), ("dynamic", [0, 1, 9]), ("continuous", [0, 1, 9])):
        assert simulate(policy, demands, 2, COUNTERS["steps"], budget=2).starts == starts


def test_capacity_is_what_continuous_gets_through_when_all_are_there():
    demands = [Demand(100.0 * i, 1, 10) for i in range(8)]
    assert capacity(StepTime(0.5, 0, 0, 0), 4, demands, budget=4) == pytest.approx(8 / (0.5 * 20))


DEMANDS = st.lists(st.builds(Demand, st.just(0.0), st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=9)


@given(DEMANDS, st.integers(1, 4), st.integers(0, 5))
def test_continuous_computes_every_token_once(demands: list[Demand], slots: int, more: int):
    s = simulate("continuous", demands, slots, COUNTERS["tokens"], budget=slots + more)
    assert max(s.ends) == sum(d.prompt + d.output - 1 for d in demands)


@given(DEMANDS, st.integers(1, 4), st.sampled_from(["static", "dynamic", "continuous"]))
def test_no_slot_is_given_twice_and_the_order_is_kept(demands: list[Demand], slots: int, policy: str):
    timed = [replace(d, arrival=3.0 * i) for i, d in enumerate(demands)]
    s = simulate(policy, timed, slots, COUNTERS["steps"], budget=slots)
    assert s.starts == sorted(s.starts)
    times = zip(s.arrivals, s.starts, s.ends, s.freed, strict=True)
    assert all(arrival <= start < end <= freed for arrival, start, end, freed in times)
    for t in s.starts:
        assert sum(start <= t < freed for start, freed in zip(s.starts, s.freed, strict=True)) <= slots


class Counted(Script):
    """Notes the content of every step, as the stages hand it to the model."""

    def __init__(self, script: Script):
        super().__init__(script.table, script.config.eos, script.config.context)
        self.parts = {"steps": 0, "tokens": 0, "positions": 0, "chunks": 0}

    def __call__(self, tokens, positions, attend):
        if isinstance(attend, CachedAttend):  # a rectangle
            size, chunks = len(tokens) * attend.size, int(tokens.shape[1] > 1)
        else:
            size = sum(chunk.kv_len for chunk in attend.batch.chunks)
            chunks = sum(chunk.n > 1 for chunk in attend.batch.chunks)
        for name, count in zip(self.parts, (1, tokens.numel(), size, chunks), strict=True):
            self.parts[name] += count
        return super().__call__(tokens, positions, attend)


@pytest.mark.parametrize("policy, stage", [("static", "padded"), ("dynamic", "dynamic"), ("continuous", "continuous")])
@example(demands=[Demand(0.0, 3, 2)], slots=3, more=0)  # slots that nobody uses
@given(demands=DEMANDS, slots=st.integers(1, 4), more=st.integers(0, 5))
def test_the_simulated_steps_are_the_stages_steps(policy: str, stage: str, demands, slots: int, more: int):
    model = Counted(follow({}))
    requests = [
        make_request([5] * d.prompt, SamplingParams(max_tokens=d.output, ignore_eos=True), model.config, None, 256)
        for d in demands
    ]
    limits = {"max_running": slots, **({"budget": slots + more} if stage == "continuous" else {})}
    assert sum(event.token is not None for event in STAGES[stage](model, requests, **limits)) == sum(
        d.output for d in demands
    )
    simulated = {
        part: max(steps.simulate(policy, demands, slots, step_time, budget=slots + more).freed)
        for part, step_time in COUNTERS.items()
    }
    assert simulated == model.parts


def test_a_group_without_pads_frees_its_slots_together():
    """Three slots, two groups: the second enters when the longest of the first is out, and waits until it is full."""
    demands = [Demand(at, 1, n) for at, n in zip([0.0, 0.1, 0.2, 0.3, 9.0], [2, 1, 4, 1, 2], strict=True)]
    step = StepTime(base=1.0, per_token=0.0, per_position=0.0, per_chunk=0.0)
    made = steps.groups(demands, 3, step, budget=3)
    assert made.starts == pytest.approx([0.2, 0.2, 0.2, 9.0, 9.0])
    assert made.ends == pytest.approx([2.2, 1.2, 4.2, 10.0, 11.0])
    assert made.freed == pytest.approx([4.2, 4.2, 4.2, 11.0, 11.0])
