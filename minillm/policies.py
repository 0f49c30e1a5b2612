"""Who joins next when there is room, and who gives way when there is none: one function for each policy, and the bound
that makes every one of them fair.

A policy says how much of the head start a request gets, from 0 to 1. The turn of the k-th request to arrive is then
k minus that share of `PATIENCE`; the smallest turn is served first, and of the running the greatest gives way. Whoever
comes `PATIENCE` or more requests later can never pass, whatever the policy likes: nobody waits for ever. All samples
of one prompt have one turn.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from minillm.errors import InputError
from minillm.request import Request

PATIENCE = 64  # requests: a later one can pass only if fewer than this came between

Policy = Callable[[Request], float]


def first_come(request: Request) -> float:
    """First come, first served."""
    return 0.0


def priority(request: Request) -> float:
    """The more urgent first: 0 to 9, as the request says."""
    return request.priority / 9


def shortest_prompt(request: Request) -> float:
    """Short prompts pass long ones: the mean wait falls, and the long ones pay for it."""
    return 1 / (1 + len(request.prompt) / 64)  # 1/2 at 64 tokens, 1/17 at 1,024


POLICIES: dict[str, Policy] = {"first-come": first_come, "priority": priority, "shortest-prompt": shortest_prompt}


def policy(name: str) -> Policy:
    """The policy of that name. Raises InputError if there is none."""
    if name not in POLICIES:
        raise InputError(f"policy {name!r} is not known; use one of {', '.join(POLICIES)}")
    return POLICIES[name]


class Queue:
    """The waiting requests, by their turn. Adding, taking and removing cost the logarithm of its length at most."""

    def __init__(self, policy: Policy = first_come):
        self._policy = policy
        self._numbers = count()
        self._heap: list[tuple[tuple[float, int], int, Request]] = []  # turn, id
        self._live: dict[Request, None] = {}  # the heap also holds what was removed, until its turn comes

    def add(self, request: Request) -> None:
        number = next(self._numbers)
        share = min(max(0.0, self._policy(request)), 1.0)  # in this order, NaN is no head start
        for one in (request, *request.samples):  # all samples of one prompt have its turn
            one.turn = (number - PATIENCE * share, number)  # of equal turns the earlier comes first
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """With the turn it has: it was here before."""
        heappush(self._heap, (request.turn, request.id, request))
        self._live[request] = None

    def remove(self, request: Request) -> None:
        del self._live[request]
        if len(self._heap) > 2 * len(self._live):  # so an empty queue keeps nobody
            self._heap = [(one.turn, one.id, one) for one in self._live]  # each once, however often it was put back
            heapify(self._heap)

    def first(self) -> Request:
        """Whose turn it is; it stays in the queue."""
        while self._heap[0][2] not in self._live:
            heappop(self._heap)
        return self._heap[0][2]

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request in self._live

    def __iter__(self) -> Iterator[Request]:
        """By turn."""
        return iter(sorted(self._live, key=lambda request: (request.turn, request.id)))
