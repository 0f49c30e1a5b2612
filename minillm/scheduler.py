"""Which requests compute how many tokens in the next step. Plain Python: no tensors, no clock."""

from collections.abc import Mapping

from minillm.errors import InputError, whole_number
from minillm.policies import Policy, Queue, first_come
from minillm.request import Event, Request
from minillm.slots import Slots

Plan = list[tuple[Request, int]]  # (request, new tokens)


class Scheduler:
    """Continuous batching with a token budget (Sarathi-Serve, Agrawal et al. 2024; iteration-level scheduling:
    Orca, Yu et al. 2022).

    Each step, every request that needs one token gets it; then prompts half computed go on; then waiting requests
    join in the order of the policy, while there are slots. The last one is cut to what is left of the budget. Since
    the budget covers one token for every running request, no decode ever waits.

    If a running request finds no slots, the running one whose turn was last gives up its memory and waits again, to be
    computed anew (recomputation: PagedAttention, Kwon et al. 2023). Under first come, first served that is the newest.
    The one whose turn was first is never sent away, so there is always progress.
    """

    def __init__(self, slots: Slots, max_running: int, budget: int, policy: Policy = first_come):
        whole_number("max_running", max_running, 1)
        if whole_number("the token budget", budget, 1) < max_running:
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
        while self.waiting and left and len(self.running) < self.max_running:
            request = self.waiting.first()
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
        self._make_room_for_samples(plan)
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
                together = [request, *self._begin_samples(request)]
                events += [one.accept(*sampled[one]) for one in together]
        self._drop_finished()
        return events

    def abort(self, request: Request) -> Event | None:
        """Ends a request in any state; None if it had ended before or was never here."""
        if request.finish_reason is not None:
            return None
        if request.leader is not None:
            request.leader.samples.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request not in self.running:
            return None
        if request.samples:
            self._hand_over(request)
        event = request.end("abort")
        self._drop_finished()
        return event

    def _preempt(self) -> Request:
        """The running request whose turn was last gives up its memory; its tokens stay, and are computed again."""
        request = max(self.running, key=lambda r: (r.turn, r.id))
        self.running.remove(request)
        self.slots.release(request)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.put_back(request)
        return request

    def _make_room_for_samples(self, plan: Mapping[Request, int]) -> None:
        """Of prompts that this step completes, as many samples as there are rows will begin with it. The rest are next
        in the queue, and will find the prompt's full blocks there."""
        room = self.max_running - len(self.running)
        for request, n in plan.items():
            if n == request.pending:
                request.samples, rest = request.samples[:room], request.samples[room:]
                room -= len(request.samples)
                for one in rest:
                    one.leader = None
                    self.waiting.put_back(one)

    def _begin_samples(self, request: Request) -> list[Request]:
        """The prompt is computed: its other samples begin as forks of it, and go by themselves from here on."""
        begun, request.samples = request.samples, []
        for one in begun:
            self.slots.fork(request, one)
            one.leader = None
            self.running.append(one)
        return begun

    def _hand_over(self, request: Request) -> None:
        """Of a request that ends before its prompt is computed, while other samples wait for it: the first of them
        takes its turn."""
        heir, *others = request.samples
        heir.leader, heir.samples = None, others
        for other in others:
            other.leader = heir
        request.samples = []
        self.waiting.put_back(heir)

    def _drop_finished(self) -> None:
        for request in self.running:
            if request.finish_reason is not None:
                self.slots.release(request)
        self.running = [request for request in self.running if request.finish_reason is None]
