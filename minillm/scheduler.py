"""Which requests compute how many tokens in the next step. Plain Python: no tensors, no clock."""

from collections.abc import Mapping

from minillm.errors import InputError
from minillm.policies import Policy, Queue, first_come
from minillm.request import Event, Request
from minillm.slots import SharedSlots, Slots

Plan = list[tuple[Request, int]]  # (request, new tokens)


class Scheduler:
    """Continuous batching with a token budget (Sarathi-Serve, Agrawal et al. 2024; iteration-level scheduling:
    Orca, Yu et al. 2022).

    Each step, every request that needs one token gets it; then prompts half computed go on; then waiting requests
    join in the order of the policy, while there are slots. The last one is cut to what is left of the budget. Since
    the budget covers one token for every running request, nobody starves.

    If a running request finds no slots, the newest running one gives up its memory and waits again, to be computed
    anew (recomputation: PagedAttention, Kwon et al. 2023). The oldest is never sent away, so there is always progress.
    """

    def __init__(self, slots: Slots, max_running: int, budget: int, policy: Policy = first_come):
        if max_running < 1:
            raise InputError(f"max_running is {max_running}; it must be at least 1")
        if budget < max_running:
            raise InputError(f"the token budget is {budget}; it must be at least max_running, {max_running}")
        self.slots, self.max_running, self.budget = slots, max_running, budget
        self.waiting = Queue(policy)
        self.running: list[Request] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan:
        """The next step: at most `budget` tokens in all, at least one for each request in it."""
        plan: dict[Request, int] = {}
        left = self.budget
        for request in sorted(self.running, key=lambda r: r.pending > 1):  # single tokens first, else in order
            while request.row is not None and (n := min(request.pending, left)):
                if self.slots.can_reserve(request, n):
                    self.slots.reserve(request, n)
                    plan[request] = n
                    left -= n
                    break
                left += plan.pop(self._preempt(), 0)  # it may stand in the plan already
        while self.waiting and left and self._fits(request := self.waiting.first()):
            request.computed = self.slots.find(request)
            n = min(request.pending, left)
            if not self.slots.can_reserve(request, n):
                request.computed = 0
                break
            self.slots.reserve(request, n)
            self.waiting.remove(request)
            self.running.append(request)
            plan[request] = n
            left -= n
        return list(plan.items())

    def update(self, plan: Plan, sampled: Mapping[Request, tuple[int, dict[int, float] | None]]) -> list[Event]:
        """After the step: what was planned is computed, sampled tokens are accepted, finished requests leave."""
        events = []
        for request, n in plan:
            if request.finish_reason is not None:  # aborted while the step ran
                continue
            request.computed += n
            self.slots.stored(request)
            if request in sampled:
                for one in [request, *self._begin_samples(request)]:
                    events.append(one.accept(*sampled[one]))
        self._drop_finished()
        return events

    def abort(self, request: Request) -> Event | None:
        """Ends a request in any state; None if it had ended before or was never here."""
        if request.finish_reason is not None:
            return None
        if request.leader is not None:
            request.leader.samples.remove(request)
        elif request.samples:
            self._hand_over(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request not in self.running:
            return None
        event = request.end("abort")
        self._drop_finished()
        return event

    def _fits(self, request: Request) -> bool:
        """Every sample of a prompt needs a row once the prompt is computed, so it counts from the beginning."""
        return sum(1 + len(r.samples) for r in (*self.running, request)) <= self.max_running

    def _preempt(self) -> Request:
        """The newest running request gives up its memory; its tokens stay, and are computed again."""
        request = max(self.running, key=lambda r: (r.turn, r.id))
        self.running.remove(request)
        self.slots.release(request)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.put_back(request)
        return request

    def _begin_samples(self, request: Request) -> list[Request]:
        """The prompt is computed: its other samples run from here on by themselves."""
        begun, request.samples = request.samples, []
        for one in begun:
            assert isinstance(self.slots, SharedSlots)
            self.slots.fork(request, one)
            one.leader, one.turn = None, request.turn
            self.running.append(one)
        return begun

    def _hand_over(self, request: Request) -> None:
        """Ends a prompt that other samples wait for: the first of them takes its place."""
        heir, *others = request.samples
        heir.leader, heir.samples, heir.turn = None, others, request.turn
        for other in others:
            other.leader = heir
        request.samples = []
        if request in self.waiting:
            self.waiting.remove(request)
            self.waiting.put_back(heir)
        else:
            assert isinstance(self.slots, SharedSlots)
            self.slots.fork(request, heir)
            self.running[self.running.index(request)] = heir
            self.slots.release(request)

    def _drop_finished(self) -> None:
        for request in self.running:
            if request.finish_reason is not None:
                self.slots.release(request)
        self.running = [request for request in self.running if request.finish_reason is None]
