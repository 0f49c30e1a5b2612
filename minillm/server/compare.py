"""Static, dynamic and continuous batching on the same arrivals, for the page to play: times, slots, figures.

A step takes what `simulation.steps` says, with figures measured for the default model on two CPU cores.
"""

from dataclasses import asdict
from typing import Any

from minillm.errors import whole_number
from minillm.simulation.policies import Figures, Schedule
from minillm.simulation.steps import StepTime, capacity, simulate
from minillm.simulation.workload import ARTICLE_MIX, at_once, poisson_demands

POLICIES = ("static", "dynamic", "continuous")
STEP_TIME = StepTime(base=0.0186, per_token=0.00037, per_position=2.7e-6, per_chunk=0.0026)  # seconds, as calibrated
SCALE = 0.25  # of the article's output lengths: 10 to 50 tokens, and 100 to 250 for 15 in 100 requests
PROMPT = 64  # tokens of each
LOAD = 1.8  # arrivals over what continuous batching gets through, all at once: a queue forms, and policies differ in it
BUDGET = 512
MOST_SEED, MOST_SLOTS, MOST_REQUESTS = 2**32 - 1, 16, 64


def compare(seed: int, slots: int, requests: int) -> dict[str, Any]:
    """One run of each policy. Times in seconds, `slot` from 0. Raises InputError for what is out of range."""
    whole_number("seed", seed, 0, MOST_SEED)
    whole_number("slots", slots, 1, MOST_SLOTS)
    whole_number("requests", requests, 1, MOST_REQUESTS)
    mix = ARTICLE_MIX.scaled(SCALE)
    rate = LOAD * capacity(STEP_TIME, slots, at_once(requests, mix, PROMPT, seed), BUDGET)
    demands = poisson_demands(requests, rate, mix, PROMPT, seed)
    schedules = {policy: simulate(policy, demands, slots, STEP_TIME, BUDGET) for policy in POLICIES}
    return {
        "seed": seed,
        "slots": slots,
        "prompt": PROMPT,
        "rate": rate,
        "outputs": [demand.output for demand in demands],
        "policies": [
            {"name": name, "requests": _times(schedule, slots), "figures": asdict(Figures.of(schedule, slots))}
            for name, schedule in schedules.items()
        ],
    }


def _times(schedule: Schedule, slots: int) -> list[dict[str, float]]:
    return [
        {"arrival": arrival, "start": start, "end": end, "freed": freed, "slot": slot}
        for arrival, start, end, freed, slot in zip(
            schedule.arrivals, schedule.starts, schedule.ends, schedule.freed, places(schedule, slots), strict=True
        )
    ]


def places(schedule: Schedule, slots: int) -> list[int]:
    """The slot of each request: of those that are free when it starts, the first."""
    free_from, found = [0.0] * slots, []
    for start, freed in zip(schedule.starts, schedule.freed, strict=True):
        slot = next(i for i, time in enumerate(free_from) if time <= start)
        free_from[slot] = freed
        found.append(slot)
    return found
