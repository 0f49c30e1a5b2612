"""The wait against how different the outputs' lengths are, at equal mean and load: where the gain vanishes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minillm.simulation.article import Setup
from minillm.simulation.policies import POLICIES, Band, Figures
from minillm.simulation.workload import ARTICLE_MIX

STRETCHES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)  # 1 is the article's mix; at 1.24 its shortest length would be 0
SEEDS = 60


@dataclass(frozen=True)
class Point:
    """`cv` is the standard deviation of the lengths over their mean; waits in seconds, {policy: its band}."""

    cv: float
    mean_wait: dict[str, Band]
    makespan: dict[str, Band]
    article: bool  # the article's own mix


def sweep(setup: Setup) -> list[Point]:
    """Draws the article's lengths, then moves each towards their mean, or away from it. Nothing is rounded."""
    assert setup.trace is None
    mean = setup.mix.mean
    setup = replace(setup, uniform=None)
    unit = [_unit(setup, seed) for seed in range(min(SEEDS, setup.seeds))]
    points = []
    for stretch in STRETCHES:
        figures: dict[str, list[Figures]] = {"static": [], "continuous": []}
        cvs = []
        for arrivals, lengths in unit:
            stretched = 1 + stretch * (lengths - 1)
            cvs.append(float(stretched.std() / stretched.mean()))
            durations = (stretched * mean * setup.time_per_token).tolist()
            for policy, found in figures.items():
                found.append(Figures.of(POLICIES[policy](arrivals, durations, setup.slots), setup.slots))
        waits, spans = (
            {policy: Band.of([getattr(run, name) for run in found]) for policy, found in figures.items()}
            for name in ("mean_wait", "makespan")
        )
        points.append(Point(float(np.median(cvs)), waits, spans, stretch == 1))
    return points


def _unit(setup: Setup, seed: int) -> tuple[Sequence[float], np.ndarray]:
    """Arrivals, and lengths in units of the mix's mean."""
    demands = setup.demands(seed)
    lengths = np.array([demand.output for demand in demands])
    return [demand.arrival for demand in demands], lengths / ARTICLE_MIX.mean
