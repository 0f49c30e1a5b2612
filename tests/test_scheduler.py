"""The scheduler and the slots, without a model: what every step must keep, under random additions and aborts, with
memory that remembers what was written into it."""

from collections.abc import Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from script import EOS, KINDS, Kind, check_invariants, living

from minillm import policies
from minillm.errors import InputError
from minillm.params import SamplingParams
from minillm.policies import PATIENCE, POLICIES, Policy, first_come, priority
from minillm.request import Event, Request, make_request
from minillm.scheduler import Plan, Scheduler
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots, RegionSlots

MAX_LEN = 24

for_all_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Memory:
    """What `pack` and the model do to KV memory: a slot holds the whole text up to the token whose K and V it has."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[int, ...]] = {}

    def step(self, plan: Plan) -> None:
        moves = [move for request, _ in plan for move in request.moves]
        assert len({to for _, to in moves}) == len(moves)
        self.written |= {to: self.written[at] for at, to in moves}  # all are read before the first is written
        new = {}
        for request, n in plan:
            request.moves = []
            text = tuple(request.tokens)
            for position in range(request.computed):
                assert self.written[request.slots[position]] == text[: position + 1], "another text's K and V"
            for position in range(request.computed, request.computed + n):
                assert request.slots[position] not in new, "two write into one slot"
                new[request.slots[position]] = text[: position + 1]
        self.written |= new

    def forget(self, keep: Sequence[int]) -> None:
        self.written = {slot: text for slot, text in self.written.items() if slot in set(keep)}


class Driver:
    """A scheduler that is asked for step after step; every invariant is checked at every step."""

    def __init__(
        self,
        max_running: int,
        budget: int,
        max_len: int = MAX_LEN,
        spare: int = 0,
        kind: Kind = RegionSlots,
        policy: Policy = first_come,
        patience: int = PATIENCE,
    ):
        self.max_running, self.budget, self.policy, self.patience = max_running, budget, policy, patience
        self.rows = max_running + spare
        self.slots = kind(self.rows, max_len)
        self.max_len = self.slots.capacity
        self.scheduler = Scheduler(self.slots, max_running, budget, policy)
        self.memory = Memory()
        self.added: list[Request] = []
        self.numbers: dict[Request, int] = {}  # as which they arrived; samples of one prompt as one
        self.events: list[Event] = []
        self.steps = 0

    def add(self, prompt: int | list[int], n: int = 1, urgency: int = 0, **params: Any) -> Request:
        """A prompt, or one of that many tokens that begins like no other; n samples of it where memory is shared."""
        if isinstance(prompt, int):
            prompt = [10 + len(self.added) % 50] * prompt
        wish = SamplingParams(**params)
        requests = [
            make_request(prompt, wish, TINY, None, self.max_len, sample_index=i, priority=urgency) for i in range(n)
        ]
        leader, *leader.samples = requests
        for other in leader.samples:
            other.leader = leader
        with patch.object(policies, "PATIENCE", self.patience):
            self.scheduler.waiting.add(leader)
        self.numbers |= dict.fromkeys(requests, len(set(self.numbers.values())))
        self.added += requests
        return leader

    def abort(self, request: Request) -> Event | None:
        was_over = request.finish_reason is not None
        event = self.scheduler.abort(request)
        assert (event is None) == was_over
        if event is not None:
            assert (event.token, event.finish_reason) == (None, "abort")
            self.events.append(event)
        self.check_rest()
        return event

    def step(self, token: int | None = None) -> Plan:
        """A step in which this token is sampled for everyone, or one that depends on the request alone."""
        scheduler = self.scheduler
        before = list(scheduler.running)
        decoding = [r for r in before if r.pending == 1]
        sent_away = {request: request.preemptions for request in self.added}
        short = self.blocks_short(before)
        queue = set(scheduler.waiting)
        self.memory.forget(living(scheduler))
        plan = scheduler.schedule()
        self.steps += 1
        gone = {request for request in self.added if request.preemptions > sent_away[request]}
        if len(decoding) == len(before) and not isinstance(self.slots, SharedSlots):
            assert bool(gone) == (short > 0), "sent away for nothing"
        self.check_plan(plan, before, decoding, gone, queue)
        self.memory.step(plan)
        # who gets a token: where a prompt is complete, its other samples too, as many as there is room for
        done = [one for request, n in plan if n == request.pending for one in (request, *request.samples)]
        assert len(scheduler.running) + sum(one.leader is not None for one in done) <= self.max_running
        sampled = {one: (4 + one.sample_index % 2 if token is None else token, None) for one in done}
        lengths = {request: len(request.tokens) for request in self.added}
        events = scheduler.update(plan, sampled)
        self.events += events
        assert [event.request for event in events] == done
        for request in self.added:  # nobody gains a token in a step that did not complete its tokens
            assert len(request.tokens) == lengths[request] + (request in done)
        self.check_rest()
        return plan

    def blocks_short(self, running: Sequence[Request]) -> int:
        """By how many blocks the next token of each who runs is more than there are."""
        if not isinstance(self.slots, BlockSlots):
            return 0
        size = self.slots.size
        return sum(-(-(r.computed + 1) // size) - len(r.blocks) for r in running) - len(self.slots.free)

    def check_plan(
        self, plan: Plan, before: list[Request], decoding: list[Request], gone: set[Request], queue: set[Request]
    ) -> None:
        counts = dict(plan)
        scheduler = self.scheduler
        check_invariants(scheduler, plan)
        assert plan or not scheduler.busy, "it hangs"
        stayed = [request for request in before if request not in gone]
        assert bool(stayed) == bool(before) or counts, "the oldest goes on"
        # every decode gets its token, and of the prompts half computed at least the first goes on
        assert all(counts.get(request) == 1 for request in decoding if request in stayed)
        prefilling = [request for request in stayed if request not in decoding]
        assert not prefilling or prefilling[0] in counts
        # whoever was running comes before newcomers, who are admitted in the order of their turn
        newcomers = scheduler.running[len(stayed) :]
        assert scheduler.running[: len(stayed)] == stayed
        assert [r for r, _ in plan][len(plan) - len(newcomers) :] == newcomers
        within = 1 if self.policy is first_come else self.patience
        for request in newcomers:
            passed = [one for one in scheduler.waiting if one in queue]  # not samples that found no row just now
            assert all(self.numbers[request] < self.numbers[one] + within for one in passed)
        # who is sent away is newer than all who stay
        age = self.numbers if self.policy is first_come else {request: request.turn for request in before}
        assert all(age[out] >= age[request] for out in gone for request in stayed)
        # nothing is left undone while there is budget
        if sum(counts.values()) < self.budget:
            assert all(counts.get(request) == request.pending for request in scheduler.running)
            if scheduler.waiting:
                begun = sum(len(request.samples) for request, n in plan if n == request.pending)
                full = len(scheduler.running) + begun == self.max_running
                assert full or not self.slots.can_reserve(scheduler.waiting.first(), 1)
        # each holds places for what it has and what it gets
        if isinstance(self.slots, RegionSlots):
            for request in scheduler.running:
                assert len(request.slots) == request.computed + counts.get(request, 0) <= request.most_slots

    def check_rest(self) -> None:
        """Between two steps."""
        scheduler = self.scheduler
        check_invariants(scheduler)
        for request in self.added:
            if request in scheduler.running:
                assert request.finish_reason is None
            else:
                assert request.row is None and list(request.slots) == []
                here = request in scheduler.waiting or (
                    request.leader is not None and request in request.leader.samples
                )
                assert here == (request.finish_reason is None)

    def run_out(self) -> None:
        """Until nothing is left: within as many steps as there are chunks if each step did only one."""
        most = self.steps + sum(-(-len(r.prompt) // self.budget) + r.limit for r in self.added)
        growth = sum(r.most_slots for r in self.added)  # who is sent away gives way to an older one's new block
        while self.scheduler.busy:
            self.step()
            again = sum(r.preemptions * (1 + -(-r.most_slots // self.budget)) for r in self.added)
            assert self.steps <= most + again and self.scheduler.preemptions <= growth, "it hangs"
        assert self.scheduler.schedule() == []
        assert sorted(self.slots.free_rows) == list(range(self.rows))
        for request in self.added:
            ends = [e.finish_reason for e in self.events if e.request is request and e.finish_reason]
            assert ends == [request.finish_reason] and ends[0] in ("length", "abort")
            assert request.finish_reason == "abort" or request.n_output == request.limit


PROMPT = st.one_of(st.integers(1, 3), st.integers(1, MAX_LEN))
BEGINNINGS = ([3] * MAX_LEN, [5, 6, 7] * 8, [5, 6, 7, 8] * 6)  # prompts that begin alike, for a while
NEW = st.tuples(st.integers(1, 12), st.integers(1, 4), st.sampled_from([0, 9, 4]))  # tokens, samples, urgency
ADD = st.tuples(st.just("add"), st.sampled_from(BEGINNINGS), PROMPT, NEW)
ABORT = st.tuples(st.just("abort"), st.integers(0, 30))
STEP = st.tuples(st.just("step"))


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    """Any kind of slots, with memory for half of the longest text, or for a few."""
    kind = draw(st.sampled_from([RegionSlots, BlockSlots, BlockSlots, SharedSlots, SharedSlots, SharedSlots]))
    if kind is RegionSlots:
        return RegionSlots
    size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    n_blocks = max(1, int(draw(st.sampled_from([0.5, 1.0, 1.0, 1.3, 1.7, 2.5])) * MAX_LEN / size))
    return lambda max_running, max_len: kind(max_running, max_len, n_blocks * size, size)


@settings(max_examples=300)
@given(
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(0, 2),
    kinds(),
    st.sampled_from([*POLICIES.values(), POLICIES["priority"]]),
    st.sampled_from([1, 3, PATIENCE]),
    st.lists(st.one_of(ADD, ABORT, STEP, STEP), max_size=40),
)
def test_what_every_step_keeps(
    max_running: int, more: int, spare: int, kind: Kind, policy: Policy, patience: int, actions: list[tuple[Any, ...]]
) -> None:
    """vllm#35541, NVIDIA/TensorRT-LLM#13318, xLLM-AI/xllm#828, nano#163, nano#207, vllm#7822, vllm#16832: overshoot,
    leaks and hangs under load, and blocks read that hold another text."""
    driver = Driver(max_running, max_running + more, spare=spare, kind=kind, policy=policy, patience=patience)
    for action in actions:
        match action:
            case ("add", beginning, length, (max_tokens, n, urgency)):
                n = n if driver.slots.shares else 1
                driver.add(beginning[: min(length, driver.max_len)], n, urgency, max_tokens=max_tokens)
            case ("abort", i) if driver.added:
                driver.abort(driver.added[i % len(driver.added)])
            case ("step",):
                driver.step()
    driver.run_out()


@settings(max_examples=60)
@given(
    st.integers(2, 6),
    st.integers(0, 9),
    kinds(),
    st.sampled_from([*POLICIES.values(), POLICIES["priority"]]),
    st.sampled_from([3, PATIENCE]),
    st.integers(0, 2**32),
)
def test_what_many_steps_keep(
    max_running: int, more: int, kind: Kind, policy: Policy, patience: int, seed: int
) -> None:
    """The same for longer, and under pressure: there is always someone waiting, and texts outgrow the memory."""
    chance = Random(seed)
    driver = Driver(max_running, max_running + more, kind=kind, policy=policy, patience=patience)
    samples = [1, 1, 2, max_running, max_running + 2] if driver.slots.shares else [1]
    while driver.steps < 100:
        if len(driver.scheduler.waiting) < 3 and chance.random() < 0.5:
            prompt = chance.choice(BEGINNINGS)[: chance.randint(1, min(MAX_LEN, driver.max_len))]
            new = chance.choice([1, 4, 24])
            driver.add(prompt, chance.choice(samples), chance.choice([0, 4, 9]), max_tokens=new)
        if driver.added and chance.random() < 0.05:
            driver.abort(chance.choice(driver.added[-9:]))
        driver.step()
    driver.run_out()


@settings(max_examples=100)
@given(
    st.integers(1, 5), st.integers(0, 12), st.lists(st.one_of(ADD, ABORT, STEP, STEP), max_size=40), st.integers(1, 5)
)
def test_with_room_for_all_the_kinds_of_slots_make_the_same_plans(
    max_running: int, more: int, actions: list[tuple[Any, ...]], size: int
) -> None:
    """Blocks change who has memory, and nothing else; sharing too, where no two prompts begin alike."""
    kinds = (RegionSlots, lambda n, m: BlockSlots(n, m, size=size), lambda n, m: SharedSlots(n, m, size=size))
    drivers = [Driver(max_running, max_running + more, kind=kind) for kind in kinds]
    for action in [*actions, *[("step",)] * 60]:
        plans = []
        for driver in drivers:
            match action:
                case ("add", _, length, (max_tokens, _, _)):
                    driver.add(length, max_tokens=max_tokens)
                case ("abort", i) if driver.added:
                    driver.abort(driver.added[i % len(driver.added)])
                case ("step",):
                    plans.append([(driver.added.index(request), n) for request, n in driver.step()])
        assert all(plan == plans[0] for plan in plans)
    assert not any(driver.scheduler.preemptions for driver in drivers)


@pytest.mark.parametrize("max_running, budget", [(0, 5), (-1, 5), (4, 3), (1, 0), (8, -1)])
def test_a_configuration_that_could_starve_someone_is_refused(max_running: int, budget: int) -> None:
    """sgl-project/sglang-jax#1551: an inconsistent configuration killed the scheduler at the first long prompt."""
    with pytest.raises(InputError, match=str(max_running if max_running < 1 else budget)):
        Scheduler(RegionSlots(max(max_running, 1), 8), max_running, budget)


@for_all_kinds
def test_no_more_run_than_were_asked_for(kind: Kind) -> None:
    """Though there are rows and budget for more."""
    driver = Driver(2, 8, spare=2, kind=kind)
    requests = [driver.add(1, max_tokens=2) for _ in range(4)]
    assert driver.step() == [(request, 1) for request in requests[:2]]
    driver.run_out()


@pytest.mark.parametrize("n, chunks", [(8, [8]), (9, [8, 1]), (16, [8, 8]), (17, [8, 8, 1])])
@for_all_kinds
def test_a_prompt_over_the_budget_is_cut_and_sampled_once(kind: Kind, n: int, chunks: list[int]) -> None:
    """vllm-metal#200, tenstorrent/vllm#448: such a prompt waited for ever; a last chunk of 1 was taken for a decode."""
    driver = Driver(1, 8, kind=kind)
    request = driver.add(n, max_tokens=1)
    assert [driver.step()[0][1] for _ in chunks] == chunks
    assert request.n_output == 1 and not driver.scheduler.busy and len(driver.events) == 1


@for_all_kinds
def test_a_partly_computed_prompt_gains_no_token(kind: Kind) -> None:
    """tenstorrent/tt-xla#5830, vllm#4139: a chunk in the middle was sampled, and "!!!!" inserted."""
    driver = Driver(2, 4, kind=kind)
    short, long = driver.add(2, max_tokens=3), driver.add(20, max_tokens=1)
    gained = []
    while long.finish_reason is None:
        before = long.n_output
        driver.step()
        gained.append(long.n_output - before)
    assert short.finish_reason == "length" and short.n_output == 3
    assert gained == [0] * (len(gained) - 1) + [1] and len(gained) == 6  # 2, then 3, 3, then 4, 4, 4


@for_all_kinds
def test_decodes_go_on_at_full_pace_while_a_long_prompt_is_computed(kind: Kind) -> None:
    """vllm#31731, vllm#10774. The policy here: first come, first served, and running requests first. So the wait of
    everyone is bounded: the long one gets what the decodes leave, and the last in line waits for a free row."""
    driver = Driver(4, 8, kind=kind)
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


@for_all_kinds
def test_a_budget_of_one_token_for_each_still_reaches_everyone(kind: Kind) -> None:
    driver = Driver(3, 3, kind=kind)
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
@for_all_kinds
def test_abort_in_any_state(kind: Kind, state: str) -> None:
    """vllm#18485, vllm#25067, vllm#26400, sgl#34112: a KeyError, a leak, or one token more after the abort."""
    driver = Driver(2, 4, kind=kind)
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


@for_all_kinds
def test_abort_while_the_step_is_running(kind: Kind) -> None:
    """vllm#26400: the request is in the plan, its token is on the way, and it must not come."""
    driver = Driver(3, 8, kind=kind)
    first, second, third = (driver.add(2, max_tokens=5) for _ in range(3))
    driver.step()
    plan = driver.scheduler.schedule()
    driver.memory.step(plan)
    aborted = driver.scheduler.abort(second)
    assert aborted is not None and aborted.finish_reason == "abort"
    events = driver.scheduler.update(plan, {request: (7, None) for request, _ in plan})
    assert [event.request for event in events] == [first, third]
    assert second.output == [4] and second.finish_reason == "abort" and second.row is None
    driver.check_rest()
    driver.events += [aborted, *events]
    driver.add(3, max_tokens=2)
    driver.run_out()


@for_all_kinds
def test_a_stop_token_frees_the_row_in_the_same_step(kind: Kind) -> None:
    """sgl#12151: EOS as the first token went unseen."""
    driver = Driver(1, 4, kind=kind)
    first, second = driver.add(2, max_tokens=9), driver.add(3, max_tokens=9)
    driver.step(token=EOS)
    assert first.finish_reason == "stop" and first.n_output == 1 and not driver.scheduler.running
    assert driver.step(token=EOS) == [(second, 3)]
    assert not driver.scheduler.busy and driver.slots.free_rows == [0]


# ---- too little memory


@pytest.mark.parametrize("kind", [BlockSlots, SharedSlots])
def test_who_is_sent_away_is_in_the_step_no_more(kind: Any) -> None:
    """vllm#16832, nano#207: the newest had its place in the step already, when an urgent one behind it found no block.
    What it was to have of the budget is there for others."""
    driver = Driver(2, 2, kind=lambda n, m: kind(n, m, 10, 2), policy=priority)
    patient = driver.add(1, max_tokens=9)
    driver.step()
    urgent = driver.add(1, urgency=9, max_tokens=9)
    while driver.slots.free:
        driver.step()
    third = driver.add(1, urgency=9, max_tokens=1)
    plan = driver.step()
    assert patient.preemptions == 1 and plan == [(urgent, 1), (third, 1)]
    driver.run_out()


def test_a_copy_that_was_planned_is_dropped_with_who_is_sent_away() -> None:
    """vllm#16832 and its kin. Two of three samples were given a copy of the prompt's last block, still to be made; the
    urgent prompt behind them needs two blocks, and the two newest samples give way. Were one of the copies made later,
    it would go into the urgent text's block. Seven blocks of 4."""
    driver = Driver(4, 9, kind=lambda n, m: SharedSlots(n, m, 28, 4), policy=priority)
    first = driver.add(10, n=3, max_tokens=3)
    second, third = first.samples
    driver.step()
    urgent = driver.add(16, urgency=9, max_tokens=8)
    assert driver.step() == [(first, 1), (urgent, 8)]
    assert driver.step() == [(first, 1), (urgent, 8)] and urgent.n_output == 1
    assert (first.preemptions, second.preemptions, third.preemptions) == (0, 1, 1)
    assert not second.moves and not third.moves
    driver.run_out()
