"""The article's experiment: 600 requests on 8 slots at 8 ms per token, static against continuous.

It tells its lengths and its results, but neither when requests arrive nor how long those of its control are, which
are all equal. Both were INFERRED: at 11 requests per second (Poisson) and 150 tokens, each of its figures lies where
95 of 100 simulated runs lie. So was the rule that a static group waits until it is full: otherwise the first group
holds a single request, and 600 equal requests take 76 groups of 1.2 s, 91.2 s at least; the article has 91.0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from minillm.simulation.policies import POLICIES, Band, Figures, bands
from minillm.simulation.workload import ARTICLE_MIX, Demand, Mix, at_once, poisson_demands, uniform

RATE = 11.0  # inferred
EQUAL_LENGTH = 150  # inferred
SENSITIVITY = (9.0, 13.0)  # rates at which figures leave the band

MIXED, EQUAL = "mixed", "equal"  # the two cases: the article's lengths, and its control

# {(case, policy): {figure: value}}
PUBLISHED = {
    (MIXED, "static"): {
        "mean_wait": 151.36,
        "p95_wait": 260.13,
        "max_wait": 272.69,
        "makespan": 326.4,
        "request_throughput": 1.84,
        "busy": 941.1,
        "idle_share": 0.640,
    },
    (MIXED, "continuous"): {
        "mean_wait": 34.62,
        "p95_wait": 60.26,
        "max_wait": 66.79,
        "makespan": 120.3,
        "request_throughput": 4.99,
        "busy": 941.1,
        "idle_share": 0.022,
    },
    (EQUAL, "static"): {"mean_wait": 19.67, "makespan": 91.0},
    (EQUAL, "continuous"): {"mean_wait": 19.38, "makespan": 91.0},
}


@dataclass(frozen=True)
class Setup:
    """What is simulated; by default the article's experiment. `arrivals` is poisson, at-once or a trace's name."""

    requests: int = 600
    slots: int = 8
    time_per_token: float = 0.008  # seconds
    rate: float = RATE  # requests per second, if arrivals are poisson
    arrivals: str = "poisson"
    uniform: int | None = None  # output tokens of every request, instead of the article's mix
    seeds: int = 300
    trace: tuple[Demand, ...] | None = None

    @property
    def documented(self) -> bool:
        """Whether these are the parameters at which the article's figures must come out."""
        return self == Setup()

    @property
    def mix(self) -> Mix:
        return ARTICLE_MIX if self.uniform is None else uniform(self.uniform)

    def demands(self, seed: int, prompt: int = 1) -> list[Demand]:
        """The same for every policy. A prompt costs nothing here, so its length matters elsewhere only."""
        if self.trace is not None:
            return list(self.trace)
        if self.arrivals == "at-once":
            return at_once(self.requests, self.mix, prompt, seed)
        return poisson_demands(self.requests, self.rate, self.mix, prompt, seed)


Key = tuple[float, str, str]  # rate, case, policy
Runs = dict[Key, list[Figures]]  # one entry a seed


def cases(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """The case that is asked for, its control, and at the documented parameters both at other rates too."""
    rates = (setup.rate, *SENSITIVITY) if setup.documented else (setup.rate,)
    for rate in rates:
        yield MIXED, replace(setup, rate=rate)
        if setup.uniform is None and setup.trace is None:
            yield EQUAL, replace(setup, rate=rate, uniform=EQUAL_LENGTH)


def run_seeds(setup: Setup, policies: Sequence[str], runs: Runs) -> None:
    """Simulates all cases with seeds 0, 1, 2 ..., and adds a seed to `runs` when all of it is done."""
    for seed in range(setup.seeds):
        done = {}
        for case, each in cases(setup):
            demands = each.demands(seed)
            arrivals = [demand.arrival for demand in demands]
            durations = [demand.output * each.time_per_token for demand in demands]
            for policy in policies:
                schedule = POLICIES[policy](arrivals, durations, each.slots)
                done[each.rate, case, policy] = Figures.of(schedule, each.slots)
        for key, figures in done.items():
            runs.setdefault(key, []).append(figures)


@dataclass(frozen=True)
class Line:
    """One figure of one policy. `published` is the article's value, where it has one."""

    rate: float
    case: str
    policy: str
    figure: str
    band: Band
    published: float | None

    @property
    def inside(self) -> bool | None:
        return None if self.published is None else self.published in self.band


def compare(setup: Setup, runs: Runs, complete: bool) -> list[Line]:
    """Every figure with its band; beside it the article's, if all seeds of the documented parameters were run."""
    published = PUBLISHED if setup.documented and complete else {}
    return [
        Line(rate, case, policy, figure, band, published.get((case, policy), {}).get(figure))
        for (rate, case, policy), figures in runs.items()
        for figure, band in bands(figures).items()
    ]


def failed(lines: Sequence[Line]) -> list[Line]:
    """The article's figures that did not come out at the documented rate."""
    return [line for line in lines if line.rate == RATE and line.inside is False]
