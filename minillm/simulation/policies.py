"""Who gets a slot when. A queue in front of a batch of so many slots; each output token takes a fixed time.

In this model a prompt costs nothing, and neither does a pad. So `dynamic`, which pays for a refilled row with pads,
is the same as `continuous`: what tells them apart needs the time of a step, see `steps`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from heapq import heapreplace

import numpy as np


@dataclass(frozen=True)
class Schedule:
    """Times of each request, in seconds after the start, in order of arrival."""

    arrivals: Sequence[float]
    starts: Sequence[float]  # it gets a slot
    ends: Sequence[float]  # its last token is out
    freed: Sequence[float]  # its slot can be given to another


@dataclass(frozen=True)
class Figures:
    """What the article tells of a run. Times in seconds.

    A wait is start minus arrival. `busy` adds up the time in which slots work for a request; `idle_share` is the
    part of all slots' time until the makespan in which they do not.
    """

    mean_wait: float
    p95_wait: float  # linear interpolation, as numpy.percentile
    max_wait: float
    makespan: float  # the last token of all
    request_throughput: float  # requests per second of the makespan
    busy: float
    idle_share: float

    @classmethod
    def of(cls, schedule: Schedule, slots: int) -> "Figures":
        arrivals, starts, ends = (np.asarray(t) for t in (schedule.arrivals, schedule.starts, schedule.ends))
        waits = starts - arrivals
        makespan = float(ends.max())
        busy = float((ends - starts).sum())
        return cls(
            mean_wait=float(waits.mean()),
            p95_wait=float(np.percentile(waits, 95)),
            max_wait=float(waits.max()),
            makespan=makespan,
            request_throughput=len(arrivals) / makespan,
            busy=busy,
            idle_share=1 - busy / (slots * makespan),
        )


@dataclass(frozen=True)
class Band:
    """The median of several runs, and where 95 of 100 of them lie."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Band":
        return cls(*(float(q) for q in np.percentile(values, [2.5, 50, 97.5])))

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def bands(runs: Sequence[Figures]) -> dict[str, Band]:
    """{figure: its band over the runs}"""
    return {f.name: Band.of([getattr(run, f.name) for run in runs]) for f in fields(Figures)}


def ratio(over: Sequence[Figures], under: Sequence[Figures], figure: str) -> Band | None:
    """One policy's figure over another's, run by run on the same demands; None if a run has 0 below the line."""
    pairs = [(getattr(a, figure), getattr(b, figure)) for a, b in zip(over, under, strict=True)]
    if any(below <= 0 for _, below in pairs):
        return None
    return Band.of([above / below for above, below in pairs])


def static(arrivals: Sequence[float], durations: Sequence[float], slots: int) -> Schedule:
    """Groups of `slots` in order of arrival. A group waits until it is full and the last one has ended; its
    requests start together, and hold their slots until the longest has ended. The very last group may be smaller.
    """
    starts: list[float] = []
    freed: list[float] = []
    clock = 0.0
    for first in range(0, len(arrivals), slots):
        group = durations[first : first + slots]
        start = max(clock, arrivals[first + len(group) - 1])
        clock = start + max(group)
        starts += [start] * len(group)
        freed += [clock] * len(group)
    ends = [start + duration for start, duration in zip(starts, durations, strict=True)]
    return Schedule(arrivals, starts, ends, freed)


def continuous(arrivals: Sequence[float], durations: Sequence[float], slots: int) -> Schedule:
    """First come, first served, one by one: a freed slot is refilled at once."""
    free = [0.0] * slots  # a heap: when each slot is free
    starts, ends = [], []
    for arrival, duration in zip(arrivals, durations, strict=True):
        start = max(arrival, free[0])
        heapreplace(free, start + duration)
        starts.append(start)
        ends.append(start + duration)
    return Schedule(arrivals, starts, ends, ends)


POLICIES: dict[str, Callable[[Sequence[float], Sequence[float], int], Schedule]] = {
    "static": static,
    "dynamic": continuous,
    "continuous": continuous,
}
