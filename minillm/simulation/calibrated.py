"""The same queue with a step time that was measured: what remains of the gain when prompts and pads cost time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.simulation import steps
from minillm.simulation.article import Setup
from minillm.simulation.policies import Band, Figures, bands, ratio
from minillm.simulation.steps import StepTime
from minillm.simulation.workload import Demand, at_once, poisson_demands

SCALE = 0.25  # output lengths, as a part of those asked for: as `minillm bench queue`, to be compared with it
LOAD = 2.15  # arrivals over capacity, as in the article's own run: 11 x 941.1 s / 600 / 8 slots
BUDGET = 512  # tokens in one step of continuous batching
SEEDS = 10
MOST_TOKENS = 2_000_000  # output tokens of one run
MOST_SIMULATED = 5_000_000  # output tokens of one policy's runs: fewer seeds for longer runs
POLICIES = ("static", "dynamic", "continuous")


@dataclass(frozen=True)
class Outcome:
    """One length of prompts, all policies. Medians over the seeds, times in seconds."""

    prompt: int | None  # None: those of a trace
    capacity: float  # requests per second that continuous batching gets through
    rate: float | None  # requests per second that arrive; None if that is not a matter of chance
    figures: dict[str, Figures]  # {policy: medians}
    wait_ratio: dict[str, Band | None]  # static over the policy; None: nobody waited
    makespan_ratio: dict[str, Band | None]


def output_tokens(setup: Setup) -> int:
    """About how many one run makes."""
    if setup.trace is not None:
        return sum(demand.output for demand in setup.trace)
    return round(setup.requests * setup.mix.scaled(SCALE).mean)


def compare(step_time: StepTime, setup: Setup, prompts: Sequence[int]) -> list[Outcome]:
    """Every policy with each length of prompts, on the same demands. A trace has prompts and arrivals of its own."""
    n_seeds = max(1, min(SEEDS, setup.seeds, MOST_SIMULATED // max(1, output_tokens(setup))))
    if setup.trace is not None:
        return [_outcome(step_time, setup.slots, None, None, [list(setup.trace)])]
    mix, outcomes = setup.mix.scaled(SCALE), []
    for prompt in prompts:
        together = [at_once(setup.requests, mix, prompt, seed) for seed in range(n_seeds)]
        if setup.arrivals == "at-once":
            outcomes.append(_outcome(step_time, setup.slots, prompt, None, together))
            continue
        rate = LOAD * _capacity(step_time, setup.slots, together)
        runs = [poisson_demands(setup.requests, rate, mix, prompt, seed) for seed in range(n_seeds)]
        outcomes.append(_outcome(step_time, setup.slots, prompt, rate, runs))
    return outcomes


def _budget(slots: int) -> int:
    return max(BUDGET, slots)


def _capacity(step_time: StepTime, slots: int, runs: Sequence[list[Demand]]) -> float:
    return float(np.median([steps.capacity(step_time, slots, demands, _budget(slots)) for demands in runs]))


def _outcome(
    step_time: StepTime, slots: int, prompt: int | None, rate: float | None, runs: Sequence[list[Demand]]
) -> Outcome:
    found = {
        policy: [
            Figures.of(steps.simulate(policy, demands, slots, step_time, _budget(slots)), slots) for demands in runs
        ]
        for policy in POLICIES
    }
    medians = {
        policy: Figures(**{name: band.median for name, band in bands(figures).items()})
        for policy, figures in found.items()
    }
    waits = {policy: ratio(found["static"], figures, "mean_wait") for policy, figures in found.items()}
    spans = {policy: ratio(found["static"], figures, "makespan") for policy, figures in found.items()}
    return Outcome(prompt, _capacity(step_time, slots, runs), rate, medians, waits, spans)
