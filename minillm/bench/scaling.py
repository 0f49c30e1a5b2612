"""What a step costs as the work grows: `minillm bench scaling`.

    decode over the context     a line: each step reads all live K and V. Its slope is a speed in bytes per second
    decode over the batch       the weights are read once for all, so texts are nearly free until arithmetic counts
    prefill over the prompt     a n + b n^2: the Linears, and every token looking at every one before it
    memory over running tokens  a line for what is used; what is reserved depends on how memory is given out

Each law is fitted to the measured times, and stands beside what the machine's own bandwidth and arithmetic, measured in
the same run, predict for the counted work. How steps are made without computing everything before them: see `steady`.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from minillm.bench import ceiling, machine
from minillm.bench.ceiling import Ceilings
from minillm.bench.claims import PeakMemory
from minillm.bench.harness import Step
from minillm.bench.prefill import Spread
from minillm.bench.steady import Place, Steady, needed
from minillm.config import Config
from minillm.errors import InputError, check_range
from minillm.kernels.choose import check_name, resolve
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Request
from minillm.slots import BlockSlots

SECONDS = 0.5  # for each of the machine's ceilings
REPEATS = 3  # steps of decode that are timed in each round
BLOCK = 16  # slots
LONGEST = 4  # a text may grow to so many times the context: what a region must hold


@dataclass(frozen=True)
class Plan:
    """What is run. Raises InputError for sizes that make no sense, and for an unknown backend."""

    running: int = 32  # at each of the contexts
    contexts: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    context: int = 160  # of each text of a batch
    prompts: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    budget: int = 512  # most tokens in one step, where a prompt is computed in chunks
    rounds: int = 3
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, most in (("running", 4096), ("context", 1_000_000), ("budget", 1_000_000), ("rounds", 1000)):
            check_range(name, getattr(self, name), 1, most)
        # one size more than the law has coefficients, or it would fit anything
        for name, least in (("contexts", 3), ("batches", 3), ("prompts", 4)):
            sizes = getattr(self, name)
            if len(set(sizes)) < max(least, len(sizes)):
                raise InputError(f"{name} are {sizes}; there must be at least {least}, each once, to fit a law to")
            for size in sizes:
                check_range(name, size, 1, 1_000_000)
        check_name(self.backend)

    def check(self, config: Config) -> None:
        """Raises InputError for more than the model's context."""
        longest = {"contexts": max(self.contexts), "context": LONGEST * self.context, "prompts": max(self.prompts)}
        for name, size in longest.items():
            if size > config.context:
                told = f"a text of {self.context} tokens may grow to {size}" if name == "context" else f"go to {size}"
                raise InputError(f"{name}: {told}; the model's context is {config.context}")


# ---- laws


@dataclass(frozen=True)
class Law:
    """A sum of coefficient x n ** power."""

    powers: tuple[int, ...]
    coefficients: tuple[float, ...]
    worst: float  # the largest distance of a measured value from the law, as a share of it

    def at(self, n: float) -> float:
        return sum(c * n**p for c, p in zip(self.coefficients, self.powers, strict=True))

    def of(self, power: int) -> float:
        """The coefficient of that power."""
        return self.coefficients[self.powers.index(power)]

    def crossing(self, low: int, high: int) -> float | None:
        """The n at which these two terms are equal; None if one of them does not grow."""
        small, large = self.of(low), self.of(high)
        return (small / large) ** (1 / (high - low)) if small > 0 and large > 0 else None


def fit(powers: Sequence[int], sizes: Sequence[float], values: Sequence[float]) -> Law:
    """The law with the least squares of relative distances: a small size counts as much as a large one."""
    n, y = np.asarray(sizes, float), np.asarray(values, float)
    columns = np.stack([n**p / y for p in powers], axis=1)  # [sizes, powers]: each row should add up to 1
    scale = np.abs(columns).max(axis=0)  # or the powers would differ by many orders of magnitude
    found, *_ = np.linalg.lstsq(columns / scale, np.ones(len(n)), rcond=None)
    worst = np.abs(columns / scale @ found - 1).max()
    return Law(tuple(powers), tuple(float(c) for c in found / scale), float(worst))


# ---- times


@dataclass(frozen=True)
class Point:
    """One size: what it takes, and what was counted. Times in seconds."""

    n: int
    seconds: Spread
    by_law: float
    floor: float  # the least on this machine for the needed work
    steps: int
    tokens: int
    kv_bytes: int  # of live K and V that the steps must read
    scores: int  # that a query may see
    computed_scores: int | None  # as `harness.counting` has it; None: not counted

    @property
    def counted_scores(self) -> int:
        return self.scores if self.computed_scores is None else self.computed_scores


@dataclass(frozen=True)
class Curve:
    points: list[Point]
    law: Law


def curve(steady: Steady, places: dict[int, Place], powers: Sequence[int], rounds: int, ceilings: Ceilings) -> Curve:
    """Every size once to warm up and to count, then in rounds, each of which begins with another size.

    The first turn after the requests were put down is not timed: it enters all their slots into the pool's table.
    """
    sizes = list(places)
    times: dict[int, list[float]] = {n: [] for n in sizes}
    counted: dict[int, list[Step]] = {}
    for i in range(1 + rounds):
        shift = i % len(sizes)
        for n in sizes[shift:] + sizes[:shift]:
            place = places[n]
            steady.put(place)
            if not i:
                counted[n] = steady.count()
                continue
            decodes = place.computed > 0
            for _ in range(decodes):
                steady.turn()
            times[n] += [steady.turn()[0] for _ in range(REPEATS if decodes else 1)]
    spreads = {n: Spread.of(times[n]) for n in sizes}
    law = fit(powers, sizes, [spreads[n].median for n in sizes])
    model, budget = steady.engine.model, steady.engine.scheduler.budget
    points = []
    for n, place in places.items():
        steps = needed(place, budget, model.config, model.dtype.itemsize)
        points.append(
            Point(
                n,
                spreads[n],
                law.at(n),
                ceiling.floor_seconds(steps, model.config, model.dtype.itemsize, ceilings),
                len(steps),
                sum(step.tokens for step in steps),
                sum(step.kv_bytes for step in steps),
                sum(step.scores for step in steps),
                sum(step.scores for step in counted[n]) or None,
            )
        )
    return Curve(points, law)


def over_context(model: Llama, plan: Plan, backend: str, ceilings: Ceilings) -> Curve:
    """A step of so many texts, at each of the contexts."""
    steady = Steady(model, plan.running, max(plan.contexts), backend)
    steady.put(Place.decode(plan.running, max(plan.contexts)))
    steady.fill()  # shorter ones lie in the same slots
    places = {n: Place.decode(plan.running, n) for n in plan.contexts}
    return curve(steady, places, (0, 1), plan.rounds, ceilings)


def over_batch(model: Llama, plan: Plan, backend: str, ceilings: Ceilings) -> Curve:
    """A step of each number of texts, at one context."""
    steady = Steady(model, max(plan.batches), plan.context, backend)
    steady.put(Place.decode(max(plan.batches), plan.context))
    steady.fill()
    places = {n: Place.decode(n, plan.context) for n in plan.batches}
    return curve(steady, places, (0, 1), plan.rounds, ceilings)


def over_prompt(model: Llama, plan: Plan, backend: str, ceilings: Ceilings, budget: int | None) -> Curve:
    """A prompt of each length; None: all of it in one step."""
    steady = Steady(model, 1, max(plan.prompts), backend, budget)
    places = {n: Place.prompt(n) for n in plan.prompts}
    return curve(steady, places, (0, 1, 2), plan.rounds, ceilings)


# ---- what is predicted


def arithmetic_counts_from(config: Config, itemsize: int, context: int, ceilings: Ceilings) -> float | None:
    """The number of texts from which a step takes longer to multiply than to move bytes, if both overlap perfectly;
    None: K and V take so long to read that it never does."""
    weights = ceiling.layer_weights(config) + config.vocab_size * config.d_model
    (one,) = needed(Place.decode(1, context), 1, config, itemsize)
    multiply = (2 * weights + 4 * config.head_dim * one.scores) / ceilings.flops_per_s
    move = one.kv_bytes / ceilings.bytes_per_s
    return itemsize * weights / ceilings.bytes_per_s / (multiply - move) if multiply > move else None


def predicted(found: Curve, config: Config) -> Law:
    """Operations of the prompts, counted: those of the Linears and, of the scores, those that were computed."""
    weights = ceiling.layer_weights(config)
    counts = [2 * weights * p.tokens + 4 * config.head_dim * p.counted_scores for p in found.points]
    return fit((1, 2), [p.n for p in found.points], counts)


# ---- memory


@dataclass(frozen=True)
class Held:
    """KV memory with so many texts running, in bytes."""

    running: int
    tokens: int  # whose K and V are stored
    used: int
    blocks: int  # held in blocks of `BLOCK` slots
    regions: int  # reserved in regions that hold the longest text
    grown: int | None  # what the process (or the GPU's memory) grew by in one step; None: the system does not tell


def over_running(model: Llama, plan: Plan, backend: str) -> list[Held]:
    """From few to many: what a large step leaves in the process must not count for a small one."""
    return [held(model, n, plan, backend) for n in sorted(plan.batches)]


def held(model: Llama, running: int, plan: Plan, backend: str) -> Held:
    """Counted, and one step to see how far memory grows. It runs twice: the first compiles kernels for its shapes."""
    each, longest = model.config.kv_bytes_per_token(model.dtype.itemsize), LONGEST * plan.context
    grown = None
    for _ in range(2):
        try:
            memory = PeakMemory(model.device)
        except OSError:
            memory = None
        steady = Steady(model, running, longest, backend)
        steady.put(Place.decode(running, plan.context))
        steady.fill()
        steady.turn()
        grown = memory.grown() if memory else None
        regions = steady.engine.scheduler.slots.n_slots * each
        del steady
    tokens = running * plan.context
    return Held(running, tokens, tokens * each, blocks(running, plan.context, longest) * BLOCK * each, regions, grown)


def blocks(running: int, context: int, longest: int) -> int:
    """How many are held, counted by reserving them."""
    slots = BlockSlots(running, longest, size=BLOCK)
    requests = [Request([0] * context, SamplingParams(), seed=0, limit=1) for _ in range(running)]
    for request in requests:
        slots.reserve(request, context)
    return sum(len(request.blocks) for request in requests)


# ---- all of them


@dataclass
class Result:
    """All that was found, as it goes into the JSON file. What was not measured is None, or empty."""

    about: dict[str, Any]
    model: dict[str, Any]
    plan: Plan
    backend: str  # the one that was used
    ceilings: Ceilings
    kv_bytes_per_token: int
    contexts: Curve | None = None
    bytes_per_s: float | None = None  # of live K and V, by the slope of `contexts`
    batches: Curve | None = None
    knee: float | None = None  # texts at which what grows with them is as much as what does not
    knee_predicted: float | None = None  # texts at which multiplying takes as long as moving
    prompts: Curve | None = None  # whole
    chunked: Curve | None = None
    quadratic_from: float | None = None  # tokens at which n^2 costs as much as n, in `prompts`
    quadratic_predicted: float | None = None  # the same of the counted arithmetic
    memory: list[Held] = field(default_factory=list)
    partial: bool = False
    seconds: float = 0.0


def measure(model: Llama, name: str, plan: Plan, console: Console) -> Result:
    """Memory first, then the three times. After Ctrl-C: with what is whole; before that, it is raised again.

    Raises InputError as `Plan.check`, and for a backend that cannot run here.
    """
    plan.check(model.config)
    began = time.perf_counter()
    config, itemsize = model.config, model.dtype.itemsize
    backend = resolve(plan.backend, model, plan.running)
    with console.status("Measuring the machine"):
        ceilings = ceiling.measure(model.device, model.dtype, SECONDS)
    about = {"name": name, "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    each = config.kv_bytes_per_token(itemsize)
    result = Result(machine.describe(model.device), about, plan, backend, ceilings, each)
    try:
        with console.status(f"Memory of up to {max(plan.batches)} texts"):
            result.memory = over_running(model, plan, backend)
        with console.status(f"Steps of up to {max(plan.batches)} texts"):
            result.batches = over_batch(model, plan, backend, ceilings)
        result.knee = result.batches.law.crossing(0, 1)
        result.knee_predicted = arithmetic_counts_from(config, itemsize, plan.context, ceilings)
        with console.status(f"Steps at contexts of up to {max(plan.contexts):,}"):
            result.contexts = over_context(model, plan, backend, ceilings)
        slope = result.contexts.law.of(1)
        result.bytes_per_s = plan.running * each / slope if slope > 0 else None
        with console.status(f"Prompts of up to {max(plan.prompts):,} tokens"):
            result.prompts = over_prompt(model, plan, backend, ceilings, None)
            result.quadratic_from = result.prompts.law.crossing(1, 2)
            result.quadratic_predicted = predicted(result.prompts, config).crossing(1, 2)
            result.chunked = over_prompt(model, plan, backend, ceilings, plan.budget)
    except KeyboardInterrupt:
        if not result.memory:
            raise
        result.partial = True
    result.seconds = time.perf_counter() - began
    return result


def as_json(result: Result, **told: str) -> dict[str, Any]:
    return {**told, **asdict(result)}
