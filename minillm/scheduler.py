"""Which requests compute how many tokens in the next step. Plain Python: no tensors, no clock."""

from collections import deque
from collections.abc import Mapping

from minillm.errors import InputError
from minillm.request import Event, Request
from minillm.slots import RegionSlots

Plan = list[tuple[Request, int]]  # (request, new tokens)


class Scheduler:
    """First come, first served, with a token budget (Sarathi-Serve, Agrawal et al. 2024; iteration-level
    scheduling: Orca, Yu et al. 2022).

    Each step, every request that needs one token gets it; then prompts half computed go on; then waiting requests
    join, while there are slots. The last one is cut to what is left of the budget. Since the budget covers one
    token for every running request, nobody starves.
    """

    def __init__(self, slots: RegionSlots, max_running: int, budget: int):
        if max_running < 1:
            raise InputError(f"max_running is {max_running}; it must be at least 1")
        if budget < max_running:
            raise InputError(f"the token budget is {budget}; it must be at least max_running, {max_running}")
        self.slots, self.max_running, self.budget = slots, max_running, budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan:
        """The next step: at most `budget` tokens in all, at least one for each request in it."""
        plan: Plan = []
        left = self.budget
        for request in sorted(self.running, key=lambda r: r.pending > 1):  # single tokens first, else in order
            n = min(request.pending, left)
            if n:
                self.slots.reserve(request, n)
                plan.append((request, n))
                left -= n
        while self.waiting and left and len(self.running) < self.max_running:
            request = self.waiting[0]
            n = min(request.pending, left)
            if not self.slots.can_reserve(request, n):
                break
            self.waiting.popleft()
            self.running.append(request)
            self.slots.reserve(request, n)
            plan.append((request, n))
            left -= n
        return plan

    def update(self, plan: Plan, sampled: Mapping[Request, tuple[int, dict[int, float] | None]]) -> list[Event]:
        """After the step: what was planned is computed, sampled tokens are accepted, finished requests leave."""
        events = []
        for request, n in plan:
            if request.finish_reason is not None:  # aborted while the step ran
                continue
            request.computed += n
            if request in sampled:
                events.append(request.accept(*sampled[request]))
        self._drop_finished()
        return events

    def abort(self, request: Request) -> Event | None:
        """Ends a request in any state; None if it had ended before or was never here."""
        if request.finish_reason is not None or not (request in self.waiting or request in self.running):
            return None
        event = request.end("abort")
        self._drop_finished()
        return event

    def _drop_finished(self) -> None:
        for request in self.running:
            if request.finish_reason is not None:
                self.slots.release(request)
        self.running = [request for request in self.running if request.finish_reason is None]
        self.waiting = deque(request for request in self.waiting if request.finish_reason is None)
