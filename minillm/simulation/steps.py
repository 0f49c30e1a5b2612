"""The queue step by step: a step takes the longer, the more is in it, so that prompts and pads cost what they cost.

The policies do what the stages of the same kind do (`stages.padded`, `stages.dynamic`, `stages.continuous`). A
prompt's first output token comes out of the step that computes its last token: m output tokens take m - 1 further
steps. Unlike `policies.static`, the padded stage doesn't wait for a full group: it takes those who are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.simulation.policies import Schedule
from minillm.simulation.workload import Demand


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: a part that is always there (reading the weights), and parts that grow with its content."""

    base: float
    per_token: float  # T: new tokens, pads among them
    per_position: float  # S: context positions that attention reads
    per_chunk: float  # chunks of more than one token, each of which is an attention of its own

    def __call__(self, tokens: float, positions: float, chunks: float) -> float:
        return self.base + self.per_token * tokens + self.per_position * positions + self.per_chunk * chunks


@dataclass
class Row:
    """A request in the making: as `request.Request`, two counters."""

    number: int  # of the demand
    demand: Demand
    computed: int = 0  # tokens whose K and V are stored
    made: int = 0  # output tokens

    @property
    def pending(self) -> int:
        """Tokens not computed yet. When it has ended: 1, the last token, which padded stages feed again and again."""
        return self.demand.prompt + self.made - self.computed

    @property
    def ended(self) -> bool:
        return self.made == self.demand.output

    def advance(self, n: int) -> None:
        self.computed += n
        if self.pending == 0:
            self.made += 1


class _Log:
    """Collects the times of a schedule."""

    def __init__(self, demands: Sequence[Demand]):
        self.arrivals = [demand.arrival for demand in demands]
        assert demands and self.arrivals == sorted(self.arrivals), "demands are served in order of arrival"
        self.starts, self.ends, self.freed = ([0.0] * len(demands) for _ in range(3))

    def schedule(self) -> Schedule:
        return Schedule(self.arrivals, self.starts, self.ends, self.freed)


def static(demands: Sequence[Demand], slots: int, step_time: StepTime) -> Schedule:
    """A rectangle of those who are there, as wide as the longest run of new tokens; ended rows go on costing."""
    log = _Log(demands)
    clock, first = 0.0, 0
    while first < len(demands):
        clock = max(clock, demands[first].arrival)
        rows = [
            Row(i, demands[i])
            for i in range(first, min(first + slots, len(demands)))
            if demands[i].arrival <= clock
        ]  # fmt: skip
        for row in rows:
            log.starts[row.number] = clock
        live = rows
        while live:
            width = max(row.pending for row in rows)
            size = max(row.computed for row in rows) + width
            clock += step_time(len(rows) * width, len(rows) * size, width > 1)
            for row in live:
                row.advance(row.pending)
                if row.ended:
                    log.ends[row.number] = clock
            live = [row for row in live if not row.ended]
        for row in rows:
            log.freed[row.number] = clock
        first += len(rows)
    return log.schedule()


def dynamic(demands: Sequence[Demand], slots: int, step_time: StepTime) -> Schedule:
    """A rectangle of all slots, used or not. An ended row is refilled at once, and its prompt makes all rows wide."""
    log = _Log(demands)
    rows: list[Row | None] = [None] * slots
    longest = max(demand.prompt + demand.output for demand in demands)  # the rectangle's K and V hold no more
    clock, first, left = 0.0, 0, len(demands)
    while left:
        free = [b for b, row in enumerate(rows) if row is None or row.ended]
        if len(free) == slots:
            clock = max(clock, demands[first].arrival)
        for b in free:
            if first < len(demands) and demands[first].arrival <= clock:
                rows[b] = Row(first, demands[first])
                log.starts[first] = clock
                first += 1
        filled = [row for row in rows if row]
        width = max(row.pending for row in filled)
        size = min(max(row.computed for row in filled) + width, longest)
        clock += step_time(slots * width, slots * size, width > 1)
        for row in filled:
            if not row.ended:
                row.advance(row.pending)
                if row.ended:
                    log.ends[row.number] = log.freed[row.number] = clock
                    left -= 1
    return log.schedule()


def continuous(demands: Sequence[Demand], slots: int, step_time: StepTime, budget: int) -> Schedule:
    """No rectangle: each step holds the tokens that `scheduler.Scheduler` would choose under its budget."""
    assert budget >= slots
    log = _Log(demands)
    running: list[Row] = []
    clock, first = 0.0, 0
    while running or first < len(demands):
        if not running:
            clock = max(clock, demands[first].arrival)
        plan: list[tuple[Row, int]] = []
        left = budget
        for row in sorted(running, key=lambda row: row.pending > 1):  # single tokens first
            if n := min(row.pending, left):
                plan.append((row, n))
                left -= n
        while left and len(running) < slots and first < len(demands) and demands[first].arrival <= clock:
            row = Row(first, demands[first])
            log.starts[first] = clock
            first += 1
            running.append(row)
            n = min(row.pending, left)
            plan.append((row, n))
            left -= n
        clock += step_time(budget - left, sum(row.computed + n for row, n in plan), sum(n > 1 for _, n in plan))
        for row, n in plan:
            row.advance(n)
            if row.ended:
                log.ends[row.number] = log.freed[row.number] = clock
        running = [row for row in running if not row.ended]
    return log.schedule()


def groups(demands: Sequence[Demand], slots: int, step_time: StepTime, budget: int) -> Schedule:
    """Static without pads: as `continuous`, but a group waits until it is full and everybody before it has left."""
    arrivals = [demand.arrival for demand in demands]
    starts: list[float] = []
    ends: list[float] = []
    freed: list[float] = []
    clock = 0.0
    for first in range(0, len(demands), slots):
        group = demands[first : first + slots]
        clock = max(clock, group[-1].arrival)
        there = [Demand(clock, demand.prompt, demand.output) for demand in group]
        served = continuous(there, slots, step_time, budget)
        clock = max(served.ends)
        starts += served.starts
        ends += served.ends
        freed += [clock] * len(group)
    return Schedule(arrivals, starts, ends, freed)


def simulate(policy: str, demands: Sequence[Demand], slots: int, step_time: StepTime, budget: int) -> Schedule:
    """By the name of the policy; the budget is for `continuous`, the others know none."""
    if policy == "continuous":
        return continuous(demands, slots, step_time, budget)
    return {"static": static, "dynamic": dynamic}[policy](demands, slots, step_time)


def capacity(step_time: StepTime, slots: int, demands: Sequence[Demand], budget: int) -> float:
    """Requests per second that continuous batching gets through, if all of them are there at once."""
    there = [Demand(0.0, demand.prompt, demand.output) for demand in demands]
    return len(there) / max(continuous(there, slots, step_time, budget).ends)
