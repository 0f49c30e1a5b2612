"""Who joins next: the bound that holds whatever a policy likes, the queue under additions and removals, its cost."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st

from minillm import policies
from minillm.errors import InputError
from minillm.params import SamplingParams
from minillm.policies import PATIENCE, POLICIES, Queue, first_come, priority, shortest_prompt
from minillm.request import Request, make_request
from minillm.scheduler import Scheduler
from minillm.slots import RegionSlots


def request(n: int = 1, urgency: int = 0) -> Request:
    return make_request([3] * n, SamplingParams(max_tokens=1), TINY, None, 200, priority=urgency)


def likes(shares: Sequence[float]) -> Callable[[Request], float]:
    """A policy that answers with the next of these, whoever asks."""
    answers = iter(shares)
    return lambda _: next(answers)


def take(queue: Queue) -> Request:
    first = queue.first()
    queue.remove(first)
    return first


SHARES = st.one_of(
    st.floats(), st.floats(0, 1), st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf, -0.0, 1e308])
)


@given(st.lists(SHARES, min_size=1, max_size=60), st.integers(1, 6), st.data())
def test_nobody_is_passed_by_whom_patience_keeps_behind(
    shares: list[float], patience: int, data: st.DataObject
) -> None:
    """vllm#31731, vllm#35852: skipping the large starved them. Here whoever comes `patience` or more requests later
    stays behind, whatever the policy answers; so at most patience - 1 ever pass one."""
    with patch.object(policies, "PATIENCE", patience):
        queue = Queue(likes(shares))
        everyone = [request() for _ in shares]
        arrivals = data.draw(st.permutations(everyone))  # they may have been made in another order
        left: list[Request] = []
        for one in arrivals:
            queue.add(one)
            number = arrivals.index(one)
            assert number - patience <= one.turn[0] <= number
            for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 2]))):
                if queue:
                    left.append(take(queue))
        while queue:
            left.append(take(queue))
    assert sorted(one.id for one in left) == sorted(one.id for one in everyone)
    for at, one in enumerate(left):
        number = arrivals.index(one)
        passed_by = [arrivals.index(other) - number for other in left[:at] if arrivals.index(other) > number]
        assert all(later < patience for later in passed_by) and len(passed_by) < patience


def test_the_bound_is_reached_and_not_crossed() -> None:
    """The last who may pass does, the next does not; with the real PATIENCE."""
    for between, passes in ((PATIENCE - 1, True), (PATIENCE, False)):
        queue = Queue(lambda r: r.priority / 9)
        urgent = request(urgency=9)  # made first: of two equal turns it is the arrival that counts
        patient = request()
        queue.add(patient)
        for _ in range(between - 1):
            queue.add(request())
        queue.add(urgent)
        assert (queue.first() is urgent) == passes


def test_each_policy_by_hand() -> None:
    """The order that each was made for."""
    lengths = [100, 1, 10, 50]

    def order(policy: Callable[[Request], float], requests: Sequence[Request]) -> list[int]:
        queue = Queue(policy)
        for one in requests:
            queue.add(one)
        return [requests.index(take(queue)) for _ in requests]

    assert order(first_come, [request(n) for n in lengths]) == [0, 1, 2, 3]
    assert order(shortest_prompt, [request(n) for n in lengths]) == [1, 2, 3, 0]
    assert order(priority, [request(urgency=p) for p in (0, 9, 5, 9, 0)]) == [1, 3, 2, 0, 4]
    assert [priority(request(urgency=p)) for p in (0, 9)] == [0.0, 1.0]
    assert set(POLICIES) == {"first-come", "priority", "shortest-prompt"}


@given(st.integers(1, 200), st.integers(0, 9))
def test_the_policies_stay_in_their_range_and_leave_the_request_alone(n: int, urgency: int) -> None:
    one = request(n, urgency)
    before = dict(vars(one))
    assert all(0 <= policy(one) <= 1 for policy in POLICIES.values())
    assert vars(one) == before


def test_a_policy_that_nobody_knows_is_refused() -> None:
    with pytest.raises(
        InputError, match="policy 'fair' is not known; use one of first-come, priority, shortest-prompt"
    ):
        policies.policy("fair")


@pytest.mark.parametrize("urgency", [-1, 10, 2.0, True, "high", None])
def test_a_priority_out_of_range_is_refused(urgency: Any) -> None:
    with pytest.raises(InputError, match=r"priority is .*; it must be a whole number from 0 to 9"):
        request(urgency=urgency)


# ---- the queue


ACTIONS = st.lists(st.tuples(st.sampled_from(["add", "add", "take", "remove", "put back"]), st.integers(0, 99)))


@given(ACTIONS, st.integers(0, 2**32))
def test_a_queue_against_a_sorted_list(actions: list[tuple[str, int]], seed: int) -> None:
    """The same first, members and order as a list that is sorted anew each time; and what was removed does not
    pile up in the heap."""
    shares = [((seed >> i % 32) * 2654435761 % 97) / 96 for i in range(len(actions))]
    queue, right, gone = Queue(likes(shares)), list[Request](), list[Request]()
    for action, i in actions:
        if action == "add":
            right.append(request())
            queue.add(right[-1])
        elif action == "put back":
            if gone:
                right.append(gone.pop(i % len(gone)))
                queue.put_back(right[-1])
        elif right:
            one = take(queue) if action == "take" else right[i % len(right)]
            if action == "remove":
                queue.remove(one)
            else:
                assert one is right[0]
            right.remove(one)
            gone.append(one)
        right.sort(key=lambda r: (r.turn, r.id))
        assert list(queue) == right and len(queue) == len(right) and bool(queue) == bool(right)
        assert not right or queue.first() is right[0]
        assert all(one in queue for one in right) and not any(one in queue for one in gone)
        assert len(queue._heap) <= 2 * len(right)


def test_who_comes_back_again_and_again_leaves_no_litter() -> None:
    """A request that is preempted often is put back often."""
    queue = Queue()
    everyone = [request() for _ in range(20)]
    for one in everyone:
        queue.add(one)
    for i in range(2000):
        one = everyone[i % 7]
        queue.remove(one)
        queue.put_back(one)
        assert len(queue._heap) <= 2 * len(everyone)
    assert [take(queue) for _ in everyone] == everyone and not queue


class Counted(float):
    """A turn that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float.__lt__(self, other)

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float.__eq__(self, other)  # type: ignore[arg-type]


def test_the_cost_of_a_turn_grows_with_the_logarithm_of_the_queue_alone() -> None:
    """1,024 or 16,384 waiting: comparisons for each addition, look, removal and return, counted."""
    cost = {}
    for n in (1024, 16384):
        queue = Queue()
        everyone = [request() for _ in range(n)]
        for i, one in enumerate(everyone):
            one.turn = (Counted(i * 7919 % n), i)
            queue.put_back(one)
        Counted.comparisons = 0
        for i in range(256):  # as many leave by the front as from anywhere
            queue.put_back(take(queue)) if i % 2 else queue.remove(everyone[i * 31 % n])
        cost[n] = Counted.comparisons / 256
    print(cost)
    assert cost[16384] < 8 * math.log2(16384) and cost[16384] < 2 * cost[1024]


def test_a_step_looks_at_no_more_of_the_queue_than_it_takes() -> None:
    """With 10 or 5,000 waiting, the scheduler asks the queue for its first as often."""

    class Looked(Queue):
        looks = 0

        def first(self) -> Request:
            self.looks += 1
            return super().first()

        def __iter__(self) -> Any:
            raise AssertionError("a step went through the whole queue")

    for n in (10, 5000):
        scheduler = Scheduler(RegionSlots(4, 200), 4, 8)
        scheduler.waiting = Looked()
        for _ in range(n):
            scheduler.waiting.add(request(2))
        plan = scheduler.schedule()
        assert len(plan) == 4 and scheduler.waiting.looks <= 5
        scheduler.update(plan, {one: (4, None) for one, _ in plan})
        assert len(scheduler.waiting) == n - 4
