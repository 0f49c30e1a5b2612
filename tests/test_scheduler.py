"""The scheduler and the slots, without a model: what every step must keep, under random additions and aborts."""

from typing import Any

import pytest
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from script import EOS

from minillm.errors import InputError
from minillm.params import SamplingParams
from minillm.request import Event, Request, make_request
from minillm.scheduler import Plan, Scheduler
from minillm.slots import RegionSlots

MAX_LEN = 24


class Driver:
    """A scheduler that is asked for step after step; every invariant is checked at every step."""

    def __init__(self, max_running: int, budget: int, max_len: int = MAX_LEN, spare: int = 0):
        self.max_running, self.budget, self.max_len = max_running, budget, max_len
        self.rows = max_running + spare
        self.slots = RegionSlots(self.rows, max_len)
        self.scheduler = Scheduler(self.slots, max_running, budget)
        self.added: list[Request] = []
        self.admitted: list[Request] = []
        self.events: list[Event] = []
        self.steps = 0

    def add(self, prompt: int, **params: Any) -> Request:
        request = make_request([3] * prompt, SamplingParams(**params), TINY, None, self.max_len)
        self.scheduler.waiting.append(request)
        self.added.append(request)
        return request

    def abort(self, request: Request) -> Event | None:
        was_over = request.finish_reason is not None
        event = self.scheduler.abort(request)
        assert (event is None) == was_over
        if event is not None:
            assert (event.token, event.finish_reason) == (None, "abort")
            self.events.append(event)
        self.check_rest()
        return event

    def step(self, token: int = 4) -> Plan:
        scheduler = self.scheduler
        before = list(scheduler.running)
        decoding = [r for r in before if r.pending == 1]
        plan = scheduler.schedule()
        self.steps += 1
        self.check_plan(plan, before, decoding)
        sampled = {request: (token, None) for request, n in plan if n == request.pending}
        lengths = {request: len(request.tokens) for request in self.added}
        events = scheduler.update(plan, sampled)
        self.events += events
        assert [event.request for event in events] == list(sampled)
        for request in self.added:  # nobody gains a token in a step that did not complete its tokens
            assert len(request.tokens) == lengths[request] + (request in sampled)
        self.check_rest()
        return plan

    def check_plan(self, plan: Plan, before: list[Request], decoding: list[Request]) -> None:
        counts = dict(plan)
        scheduler = self.scheduler
        assert len(counts) == len(plan) <= self.max_running
        assert all(0 < n <= request.pending for request, n in plan)
        assert sum(counts.values()) <= self.budget
        assert len(scheduler.running) <= self.max_running
        assert all(0 <= r.computed < len(r.tokens) and r.finish_reason is None for r in scheduler.running)
        # every decode gets its token, and of the prompts half computed at least the first goes on
        assert all(counts.get(request) == 1 for request in decoding)
        prefilling = [request for request in before if request not in decoding]
        assert not prefilling or prefilling[0] in counts
        # whoever was running comes before newcomers, who are admitted in the order of their arrival
        newcomers = scheduler.running[len(before) :]
        assert (
            scheduler.running[: len(before)] == before
            and [r for r, _ in plan][len(plan) - len(newcomers) :] == newcomers
        )
        self.admitted += newcomers
        assert self.admitted == [request for request in self.added if request in self.admitted]
        # nothing is left undone while there is budget
        if sum(counts.values()) < self.budget:
            assert all(counts.get(request) == request.pending for request in scheduler.running)
            assert not scheduler.waiting or len(scheduler.running) == self.max_running
        # each holds places for what it has and what it gets, and nobody else's
        for request in scheduler.running:
            assert len(request.slots) == request.computed + counts.get(request, 0) <= request.most_slots
        held = [slot for request in scheduler.running for slot in request.slots]
        assert len(held) == len(set(held)) and all(0 <= slot < self.rows * self.max_len for slot in held)

    def check_rest(self) -> None:
        """Between two steps."""
        scheduler = self.scheduler
        rows = [request.row for request in scheduler.running]
        assert sorted([*self.slots.free_rows, *rows]) == list(range(self.rows))
        for request in self.added:
            if request in scheduler.running:
                assert request.finish_reason is None and request.computed == len(request.slots) < len(request.tokens)
            else:
                assert request.row is None and list(request.slots) == []
                assert (request in scheduler.waiting) == (request.finish_reason is None)

    def run_out(self) -> None:
        """Until nothing is left: within as many steps as there are chunks if each step did only one."""
        most = self.steps + sum(-(-len(r.prompt) // self.budget) + r.limit for r in self.added)
        while self.scheduler.busy:
            self.step()
            assert self.steps <= most, "it hangs"
        assert self.scheduler.schedule() == []
        assert sorted(self.slots.free_rows) == list(range(self.rows))
        for request in self.added:
            ends = [e.finish_reason for e in self.events if e.request is request and e.finish_reason]
            assert ends == [request.finish_reason] and ends[0] in ("length", "abort")
            assert request.finish_reason == "abort" or request.n_output == request.limit


PROMPT = st.one_of(st.integers(1, 3), st.integers(1, MAX_LEN))
ADD = st.tuples(st.just("add"), PROMPT, st.integers(1, 6))
ABORT = st.tuples(st.just("abort"), st.integers(0, 30))
STEP = st.tuples(st.just("step"))


@settings(max_examples=200)
@given(
    st.integers(1, 5), st.integers(0, 12), st.integers(0, 2), st.lists(st.one_of(ADD, ABORT, STEP, STEP), max_size=40)
)
def test_what_every_step_keeps(max_running: int, more: int, spare: int, actions: list[tuple[Any, ...]]) -> None:
    """vllm#35541, NVIDIA/TensorRT-LLM#13318, xLLM-AI/xllm#828: overshoot, leaks and hangs under load."""
    driver = Driver(max_running, max_running + more, spare=spare)
    for action in actions:
        match action:
            case ("add", prompt, max_tokens):
                driver.add(prompt, max_tokens=max_tokens)
            case ("abort", i) if driver.added:
                driver.abort(driver.added[i % len(driver.added)])
            case ("step",):
                driver.step()
    driver.run_out()


@pytest.mark.parametrize("max_running, budget", [(0, 5), (-1, 5), (4, 3), (1, 0), (8, -1)])
def test_a_configuration_that_could_starve_someone_is_refused(max_running: int, budget: int) -> None:
    """sgl-project/sglang-jax#1551: an inconsistent configuration killed the scheduler at the first long prompt."""
    with pytest.raises(InputError, match=str(max_running if max_running < 1 else budget)):
        Scheduler(RegionSlots(max(max_running, 1), 8), max_running, budget)


def test_no_more_run_than_were_asked_for() -> None:
    """Though there are rows and budget for more."""
    driver = Driver(2, 8, spare=2)
    requests = [driver.add(1, max_tokens=2) for _ in range(4)]
    assert driver.step() == [(request, 1) for request in requests[:2]]
    driver.run_out()


@pytest.mark.parametrize("n, chunks", [(8, [8]), (9, [8, 1]), (16, [8, 8]), (17, [8, 8, 1])])
def test_a_prompt_over_the_budget_is_cut_and_sampled_once(n: int, chunks: list[int]) -> None:
    """vllm-metal#200, tenstorrent/vllm#448: such a prompt waited for ever; a last chunk of 1 was taken for a decode."""
    driver = Driver(1, 8)
    request = driver.add(n, max_tokens=1)
    assert [driver.step()[0][1] for _ in chunks] == chunks
    assert request.n_output == 1 and not driver.scheduler.busy and len(driver.events) == 1


def test_a_partly_computed_prompt_gains_no_token() -> None:
    """tenstorrent/tt-xla#5830, vllm#4139: a chunk in the middle was sampled, and "!!!!" inserted."""
    driver = Driver(2, 4)
    short, long = driver.add(2, max_tokens=3), driver.add(20, max_tokens=1)
    gained = []
    while long.finish_reason is None:
        before = long.n_output
        driver.step()
        gained.append(long.n_output - before)
    assert short.finish_reason == "length" and short.n_output == 3
    assert gained == [0] * (len(gained) - 1) + [1] and len(gained) == 6  # 2, then 3, 3, then 4, 4, 4


def test_decodes_go_on_at_full_pace_while_a_long_prompt_is_computed() -> None:
    """vllm#31731, vllm#10774. The policy here: first come, first served, and running requests first. So the wait of
    everyone is bounded: the long one gets what the decodes leave, and the last in line waits for a free row."""
    driver = Driver(4, 8)
    decoding = [driver.add(1, max_tokens=20) for _ in range(3)]
    driver.step()
    long, last = driver.add(MAX_LEN, max_tokens=1), driver.add(1, max_tokens=1)
    steps = 0
    while long.finish_reason is None:
        made = [request.n_output for request in decoding]
        plan = driver.step()
        steps += 1
        assert [request.n_output for request in decoding] == [n + 1 for n in made]
        assert sum(n for _, n in plan) == 8 or long.finish_reason
    assert steps == -(-MAX_LEN // 5)
    assert last.n_output == 0 and last in driver.scheduler.waiting
    driver.step()  # the row that the long one gave up in its last step is taken in the next
    assert last.finish_reason == "length"
    driver.run_out()


def test_single_tokens_come_first_wherever_they_stand() -> None:
    """Also behind a longer chunk of an older request, as after its K and V were lost."""
    driver = Driver(2, 3)
    older, newer = (driver.add(1, max_tokens=9) for _ in range(2))
    for _ in range(4):
        driver.step()
    older.computed = 0
    assert driver.step() == [(newer, 1), (older, 2)]
    driver.run_out()


def test_a_budget_of_one_token_for_each_still_reaches_everyone() -> None:
    driver = Driver(3, 3)
    requests = [driver.add(n, max_tokens=3) for n in (7, 1, 5, 2, 9)]
    driver.run_out()
    assert [request.n_output for request in requests] == [3] * 5


def test_two_prompts_that_nearly_fill_the_memory_end_soon() -> None:
    """inference-sim/inference-sim#297, vllm#21793: an endless loop of taking each other's memory."""
    driver = Driver(2, 4, max_len=20)
    for _ in range(2):
        driver.add(20, max_tokens=8)
    driver.run_out()
    assert driver.steps <= 11  # 10 for 40 prompt tokens at 4 a step, and one for what a border leaves


@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "decoding", "finished", "twice", "unknown"])
def test_abort_in_any_state(state: str) -> None:
    """vllm#18485, vllm#25067, vllm#26400, sgl#34112: a KeyError, a leak, or one token more after the abort."""
    driver = Driver(2, 4)
    busy = driver.add(2, max_tokens=9)
    request = driver.add(9, max_tokens=2)
    if state == "waiting":
        behind = driver.add(1)
        assert driver.abort(behind) is not None and behind.n_output == 0
    if state in ("mid-prefill", "decoding", "finished", "twice"):
        driver.step()
        assert 0 < request.computed < 9
    if state == "decoding":
        while not request.n_output:
            driver.step()
    if state == "finished":
        while request.finish_reason is None:
            driver.step()
    if state == "unknown":
        stranger = make_request([3], SamplingParams(), TINY, None, MAX_LEN)
        assert driver.scheduler.abort(stranger) is None and stranger.finish_reason is None
    made = request.n_output
    event = driver.abort(request)
    assert (event is None) == (state == "finished")
    assert driver.abort(request) is None
    assert request.n_output == made
    driver.run_out()
    assert busy.n_output == 9 and request.n_output == made


def test_abort_while_the_step_is_running() -> None:
    """vllm#26400: the request is in the plan, its token is on the way, and it must not come."""
    driver = Driver(3, 8)
    first, second, third = (driver.add(2, max_tokens=5) for _ in range(3))
    driver.step()
    plan = driver.scheduler.schedule()
    aborted = driver.scheduler.abort(second)
    assert aborted is not None and aborted.finish_reason == "abort"
    events = driver.scheduler.update(plan, {request: (7, None) for request, _ in plan})
    assert [event.request for event in events] == [first, third]
    assert second.output == [4] and second.finish_reason == "abort" and second.row is None
    driver.check_rest()
    driver.events += [aborted, *events]
    driver.add(3, max_tokens=2)
    driver.run_out()


def test_a_stop_token_frees_the_row_in_the_same_step() -> None:
    """sgl#12151: EOS as the first token went unseen."""
    driver = Driver(1, 4)
    first, second = driver.add(2, max_tokens=9), driver.add(3, max_tokens=9)
    driver.step(token=EOS)
    assert first.finish_reason == "stop" and first.n_output == 1 and not driver.scheduler.running
    assert driver.step(token=EOS) == [(second, 3)]
    assert not driver.scheduler.busy and driver.slots.free_rows == [0]


# ---- slots


def test_releasing_twice_or_nothing_changes_nothing() -> None:
    """Wenyueh/MinivLLM#84: a count went below zero, and the place was never given again."""
    slots = RegionSlots(2, 4)
    request, other = (make_request([3] * 3, SamplingParams(), TINY, None, 4) for _ in range(2))
    slots.release(request)
    slots.reserve(request, 2)
    assert request.row == 0 and list(request.slots) == [0, 1]
    slots.reserve(other, 3)
    assert list(other.slots) == [4, 5, 6] and slots.free_rows == []
    stranger = make_request([3], SamplingParams(), TINY, None, 4)
    assert not slots.can_reserve(stranger, 1) and slots.can_reserve(other, 1)
    slots.release(request)
    slots.release(request)
    assert slots.free_rows == [0] and slots.can_reserve(stranger, 1)


def test_reserving_again_for_the_same_tokens_changes_nothing() -> None:
    """A step that failed is planned again."""
    slots = RegionSlots(1, 8)
    request = make_request([3] * 5, SamplingParams(), TINY, None, 8)
    slots.reserve(request, 3)
    slots.reserve(request, 3)
    assert list(request.slots) == [0, 1, 2] and request.row == 0
