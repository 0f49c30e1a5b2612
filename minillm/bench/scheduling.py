"""What the scheduler costs, and what its policies do: `minillm bench scheduler`.

Its cost is time that the model waits. With many requests running and many more waiting, each part of a step is timed:
`schedule` and `pack` before the model, `update` after it. Once with tokens from nowhere, for queues of very different
lengths: the cost must not grow with them. Once with the model: what share of a real step is it?

What a policy does is counted in steps, with no model and no clock: the same numbers on every machine.
"""

import cProfile
import pstats
import random
import time
from bisect import bisect, insort
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.batch import Batch, pack
from minillm.bench import load_model, machine, results
from minillm.bench.harness import now
from minillm.bench.metrics import Stats
from minillm.bench.tables import device_name, new_table, times
from minillm.config import Config
from minillm.engine import Engine
from minillm.errors import InputError, check_range
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.policies import PATIENCE, POLICIES, policy
from minillm.request import Request, make_request
from minillm.sampling import Sampled, sample
from minillm.scheduler import Scheduler
from minillm.sharing import SharedSlots
from minillm.slots import RegionSlots, Slots

LENGTHS = (0, 100, 1_000, 10_000, 100_000)  # of the queue
KINDS: dict[str, Callable[[int, int], Slots]] = {"regions": RegionSlots, "shared": SharedSlots}
PARTS = ("schedule", "pack", "update")
TARGET = 0.05  # most of a real step that schedule and pack may take
BEGINNING, PROMPT = 32, 48  # tokens that all prompts begin with, and their length
OUTPUTS = (32, 96)  # shortest and longest
LONGEST = PROMPT + OUTPUTS[1] - 1  # slots of one request
TURNS = 5  # the queues of all lengths take turns, so that a disturbance meets all of them
WARM = 1  # steps of the model, before it is timed
SMALL = Config(  # in place of the model where tokens come from nowhere: its K and V take next to nothing
    vocab_size=64,
    d_model=8,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=8,
    d_ff=8,
    norm_eps=1e-5,
    rope_theta=1e4,
    context=LONGEST,
    tied=True,
)


@dataclass(frozen=True)
class Plan:
    """What is run. Raises InputError for sizes that make no sense."""

    running: int = 256
    waiting: int = 10_000  # while the model runs
    steps: int = 200  # timed without the model, for each length of queue
    real: int = 5  # timed with it; 0: none
    requests: int = 4_000  # that each policy serves
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("running", 1, 4096),
            ("waiting", 0, 1_000_000),
            ("steps", TURNS, 100_000),
            ("real", 0, 1000),
            ("requests", 1, 100_000),
            ("seed", 0, 2**32 - 1),
        ):
            check_range(name, getattr(self, name), least, most)

    @property
    def budget(self) -> int:
        return max(512, 2 * self.running)


# ---- what it costs


@dataclass(frozen=True)
class Step:
    """Seconds of each part of one step, and what was in it."""

    schedule: float
    pack: float
    model: float  # sampling included
    update: float
    running: int
    tokens: int


@dataclass
class Cost:
    """Steps with a queue of one length. Times in seconds; `total` is that of the three parts."""

    slots: str
    waiting: int
    running: float  # mean
    tokens: float  # in a step, mean
    schedule: Stats
    pack: Stats
    update: Stats
    total: Stats
    model: Stats | None = None  # None: its tokens came from nowhere
    share: float | None = None  # schedule and pack, of the whole step: the median of the steps
    share_all: float | None = None  # and update

    @classmethod
    def of(cls, slots: str, waiting: int, steps: Sequence[Step], real: bool = False) -> "Cost":
        def stats(part: Callable[[Step], float]) -> Stats:
            found = Stats.of([part(step) for step in steps])
            assert found is not None, "nothing was timed"
            return found

        def whole(step: Step) -> float:
            return step.schedule + step.pack + step.model + step.update

        return cls(
            slots,
            waiting,
            fmean(step.running for step in steps),
            fmean(step.tokens for step in steps),
            stats(lambda step: step.schedule),
            stats(lambda step: step.pack),
            stats(lambda step: step.update),
            stats(lambda step: step.schedule + step.pack + step.update),
            stats(lambda step: step.model) if real else None,
            stats(lambda step: (step.schedule + step.pack) / whole(step)).median if real else None,
            stats(lambda step: 1 - step.model / whole(step)).median if real else None,
        )


Forward = Callable[[Batch], list[Sampled]]


def from_nowhere(batch: Batch) -> list[Sampled]:
    """A token for each that waits for one, without a model."""
    return [(2 + len(request.tokens) % 8, None) for request in batch.samples]


class Traffic:
    """An engine that is never short of requests: as many wait, beyond those that can come in, as they are told to."""

    def __init__(self, model: Llama, slots: str, plan: Plan, waiting: int):
        self.engine = Engine(model, max_running=plan.running, budget=plan.budget, max_len=LONGEST, slots=KINDS[slots])
        self.scheduler, self.waiting = self.engine.scheduler, waiting
        self.draw = random.Random(plan.seed)
        self.beginning = self._ids(BEGINNING)
        while len(self.scheduler.running) < plan.running:
            self.step()
        for _ in range(OUTPUTS[1]):  # until some of them end in each step
            self.step()

    def _ids(self, n: int) -> list[int]:
        return [self.draw.randrange(2, 64) for _ in range(n)]

    def fill(self) -> None:
        """As many wait as should, and one more for each place that is free."""
        places = self.scheduler.max_running - len(self.scheduler.running)
        while len(self.scheduler.waiting) < self.waiting + places:
            params = SamplingParams(max_tokens=self.draw.randint(*OUTPUTS), ignore_eos=True, seed=0)
            self.engine.add(self.beginning + self._ids(PROMPT - BEGINNING), params)

    def step(self, forward: Forward = from_nowhere) -> Step:
        """The engine's step, part by part."""
        self.fill()
        scheduler, pool = self.scheduler, self.engine.pool
        begun = now(self.engine.model.device)
        plan = scheduler.schedule()
        planned = time.perf_counter()
        batch = pack(plan, pool)
        packed = now(self.engine.model.device)
        sampled = forward(batch)
        done = now(self.engine.model.device)
        running = len(scheduler.running)
        for event in scheduler.update(plan, dict(zip(batch.samples, sampled, strict=True))):
            if event.finish_reason is not None:
                del self.engine._requests[event.request.id]
        ended = time.perf_counter()
        return Step(planned - begun, packed - planned, done - packed, ended - done, running, sum(n for _, n in plan))

    def real(self, batch: Batch) -> list[Sampled]:
        """With the model."""
        model = self.engine.model
        hidden = model(batch.tokens, batch.positions, self.engine.attend(self.engine.pool, batch))  # [T, d]
        return sample(model.logits(hidden[batch.last]), batch.samples)


def by_length(device: torch.device, slots: str, plan: Plan) -> list[Cost]:
    """A queue of each length, in turns."""
    small = Llama.random(SMALL).to(device)
    traffic = {length: Traffic(small, slots, plan, length) for length in LENGTHS}
    steps: dict[int, list[Step]] = {length: [] for length in LENGTHS}
    for _ in range(TURNS):
        for length, one in traffic.items():
            steps[length] += [one.step() for _ in range(plan.steps // TURNS)]
    return [Cost.of(slots, length, timed) for length, timed in steps.items()]


def beside_the_model(model: Llama, slots: str, plan: Plan) -> tuple[Cost, list[str]]:
    """Real steps, and, if the target is missed, where the time goes. What K and V hold has no part in the time: those
    of the steps before, that had no model, are zeros."""
    traffic = Traffic(model, slots, plan, plan.waiting)
    traffic.engine.pool.k.zero_()
    traffic.engine.pool.v.zero_()
    steps = [traffic.step(traffic.real) for _ in range(WARM + plan.real)][WARM:]
    cost = Cost.of(slots, plan.waiting, steps, real=True)
    assert cost.share is not None
    return cost, hot_spots(traffic) if cost.share >= TARGET else []


def hot_spots(traffic: Traffic, most: int = 6) -> list[str]:
    """The functions in which the time between two passes of the model goes, by their share of it."""
    profile = cProfile.Profile()
    for _ in range(30):
        traffic.fill()
        profile.enable()
        traffic.step()
        profile.disable()
    found = pstats.Stats(profile)
    total = found.total_tt  # type: ignore[attr-defined]
    costly = sorted(found.stats.items(), key=lambda item: -item[1][2])[:most]  # type: ignore[attr-defined]
    return [f"{Path(file).name} {name}: {own / total:.0%}" for (file, _, name), (_, _, own, *_) in costly]


# ---- what the policies do

ROWS, CHUNK = 16, 128  # most that run at once, most tokens in a step
SHORT, LONG, LONG_SHARE = (16, 64), (256, 768), 0.2  # prompts
ANSWERS = (8, 64)
URGENT_SHARE = 0.2
RATE = 0.41  # of a request to arrive in a step: about as many as can be served


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    output: int
    priority: int


@dataclass
class Wait:
    """How long some of the requests waited under one policy: steps from their arrival to the first they are in."""

    policy: str
    who: str
    requests: int
    mean: float
    p95: float  # linear interpolation, as numpy.percentile
    most: int
    overtaken: int  # most requests that came later and were served before one of these


GROUPS: dict[str, Callable[[Arrival], bool]] = {
    "all": lambda a: True,
    "short": lambda a: a.prompt <= SHORT[1],
    "long": lambda a: a.prompt > SHORT[1],
    "urgent": lambda a: a.priority > 0,
    "ordinary": lambda a: a.priority == 0,
}


def arrivals(n: int, seed: int) -> list[Arrival]:
    """Short and long prompts, some urgent, at most one new in a step. Only `random`'s own floats: the same anywhere."""
    draw = random.Random(seed)

    def length(low: int, high: int) -> int:
        return low + int((high - low + 1) * draw.random())

    found: list[Arrival] = []
    step = 0
    while len(found) < n:
        if draw.random() < RATE:
            prompt = length(*LONG) if draw.random() < LONG_SHARE else length(*SHORT)
            found.append(Arrival(step, prompt, length(*ANSWERS), 9 if draw.random() < URGENT_SHARE else 0))
        step += 1
    return found


def serve(name: str, asked: Sequence[Arrival]) -> list[int]:
    """The step in which each request is served first."""
    longest = LONG[1] + ANSWERS[1]
    scheduler = Scheduler(RegionSlots(ROWS, longest), ROWS, CHUNK, policy(name))
    config = replace(SMALL, context=longest)
    number: dict[Request, int] = {}
    first: dict[int, int] = {}
    step = 0
    while len(first) < len(asked):
        while len(number) < len(asked) and asked[len(number)].step <= step:
            one = asked[len(number)]
            params = SamplingParams(max_tokens=one.output, ignore_eos=True, seed=0)
            request = make_request([2] * one.prompt, params, config, None, longest, priority=one.priority)
            number[request] = len(number)
            scheduler.waiting.add(request)
        plan = scheduler.schedule()
        for request, _ in plan:
            first.setdefault(number[request], step)
        scheduler.update(plan, {request: (2, None) for request, n in plan if n == request.pending})
        step += 1
    return [first[i] for i in range(len(asked))]


def overtaken(first: Sequence[int], order: Sequence[int]) -> list[int]:
    """For each request, in order of arrival: how many later ones were served in an earlier step. `order`: by step."""
    counts = [0] * len(first)
    served: list[int] = []  # numbers, sorted
    at = 0
    for i in order:
        while first[order[at]] < first[i]:
            insort(served, order[at])
            at += 1
        counts[i] = len(served) - bisect(served, i)
    return counts


def waits(name: str, asked: Sequence[Arrival]) -> list[Wait]:
    first = serve(name, asked)
    passed = overtaken(first, sorted(range(len(first)), key=lambda i: first[i]))
    rows = []
    for who, belongs in GROUPS.items():
        members = [i for i, one in enumerate(asked) if belongs(one)]
        if members:
            steps = [first[i] - asked[i].step for i in members]
            p95 = float(np.percentile(steps, 95))
            rows.append(Wait(name, who, len(members), fmean(steps), p95, max(steps), max(passed[i] for i in members)))
    return rows


# ---- both


@dataclass
class Result:
    """All that was found, as it goes into the JSON file."""

    about: dict[str, Any]
    model: dict[str, Any]
    plan: Plan
    waits: list[Wait] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)  # without the model
    real: list[Cost] = field(default_factory=list)
    hot: dict[str, list[str]] = field(default_factory=dict)  # where the target is missed: {slots: functions}
    patience: int = PATIENCE
    target: float = TARGET
    partial: bool = False
    seconds: float = 0.0

    @property
    def fair(self) -> bool:
        return all(wait.overtaken < self.patience for wait in self.waits)


def measure(model: Llama, name: str, plan: Plan, console: Console) -> Result:
    """The policies, then each kind of slots. After Ctrl-C: with what is whole; before that, it is raised again.

    Raises InputError if the model's context is too short for its steps.
    """
    if plan.real and model.config.context < LONGEST:
        raise InputError(f"the model's context is {model.config.context}; its steps need {LONGEST}")
    began = time.perf_counter()
    about = {"name": name, "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    result = Result(machine.describe(model.device), about, plan)
    try:
        asked = arrivals(plan.requests, plan.seed)
        for policy_name in POLICIES:
            with console.status(f"{len(asked):,} requests by {policy_name}"):
                result.waits += waits(policy_name, asked)
        for slots in KINDS:
            with console.status(f"{slots}: queues of up to {max(LENGTHS):,} requests"):
                result.costs += by_length(model.device, slots, plan)
            if plan.real:
                with console.status(f"{slots}: {plan.real} steps of {name} with {plan.running} requests running"):
                    cost, hot = beside_the_model(model, slots, plan)
                result.real.append(cost)
                result.hot |= {slots: hot} if hot else {}
    except KeyboardInterrupt:
        if not result.waits:
            raise
        result.partial = True
    result.seconds = time.perf_counter() - began
    return result


# ---- for people


def growth(costs: Sequence[Cost], slots: str) -> float | None:
    """The median cost of a step with the longest queue over that with none."""
    by_queue = {cost.waiting: cost.total.median for cost in costs if cost.slots == slots}
    return by_queue[max(LENGTHS)] / by_queue[0] if {0, max(LENGTHS)} <= by_queue.keys() else None


def finding(result: Result) -> str:
    """What the numbers show, in a few sentences."""
    lines = []
    if result.real:
        shares = " and ".join(f"{cost.share:.2%} ({cost.slots})" for cost in result.real)
        met = all(cost.share is not None and cost.share < result.target for cost in result.real)
        lines.append(
            f"With {result.plan.running} requests running and {result.plan.waiting:,} waiting, schedule and pack take "
            f"{shares} of a real step (target: under {result.target:.0%}; {'met' if met else 'missed'})."
        )
    grown = [f"{times(ratio)} ({slots})" for slots in KINDS if (ratio := growth(result.costs, slots)) is not None]
    if grown:
        lines.append(f"With {max(LENGTHS):,} waiting in place of none, planning a step costs {' and '.join(grown)}.")
    mean = {(wait.policy, wait.who): wait.mean for wait in result.waits}
    if mean and {("first-come", who) for who in GROUPS} <= mean.keys():
        lines.append(
            f"Shortest prompt first waits {mean['shortest-prompt', 'all']:.1f} steps on average where first come waits "
            f"{mean['first-come', 'all']:.1f} (long prompts {mean['shortest-prompt', 'long']:.1f} for "
            f"{mean['first-come', 'long']:.1f}); with priority the urgent wait {mean['priority', 'urgent']:.1f} for "
            f"{mean['first-come', 'urgent']:.1f}. Nobody was overtaken by more than "
            f"{max(wait.overtaken for wait in result.waits)}; the bound is {result.patience - 1}."
        )
    return " ".join(lines)


def heading(result: Result) -> str:
    m = result.model
    return f"{m['name']}, {m['dtype']}, {device_name(result.about)}"


def show(result: Result, console: Console) -> None:
    console.print()
    console.print(Text(heading(result), style="bold"))
    if result.waits:
        console.print(waits_table(result))
    if result.costs:
        console.print(costs_table(result))
    if result.real:
        console.print(real_table(result))
    for slots, functions in result.hot.items():
        console.print(Text(f"Where the time goes in {slots}, without the model: {', '.join(functions)}."))
    console.print(Text(finding(result)))
    stopped = ["Stopped half way: what is whole until then."] if result.partial else []
    for note in [*stopped, f"{result.seconds:.0f} s in all."]:
        console.print(Text(note, style="dim"))


def waits_table(result: Result) -> Table:
    table = new_table(
        f"Who waits: {result.plan.requests:,} requests, counted in steps without a model",
        f"About as many as {ROWS} places and {CHUNK} tokens a step can serve. Prompts of {SHORT[0]} to {SHORT[1]} "
        f"tokens, {LONG_SHARE:.0%} of {LONG[0]} to {LONG[1]}; {URGENT_SHARE:.0%} are urgent. wait: steps from the "
        "arrival to the first step it is in. overtaken: most that came later than one of these and began before it.",
        ("policy", "who", "requests", "mean wait", "p95", "max", "overtaken"),
    )
    table.columns[1].justify = "left"
    for wait in result.waits:
        first = wait.who == next(iter(GROUPS))
        table.add_row(
            wait.policy if first else "",
            wait.who,
            f"{wait.requests:,}",
            Text(f"{wait.mean:.1f}", style="bold"),
            f"{wait.p95:.0f}",
            f"{wait.most:,}",
            str(wait.overtaken),
            end_section=wait.who == list(GROUPS)[-1],
        )
    return table


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def costs_table(result: Result) -> Table:
    table = new_table(
        f"A step without the model, {result.plan.running} running: microseconds",
        f"Medians of {result.plan.steps} steps, in {TURNS} turns. total: of the three parts. Prompts of {PROMPT} "
        f"tokens, {BEGINNING} of them alike; outputs of {OUTPUTS[0]} to {OUTPUTS[1]}.",
        ("slots", "waiting", "tokens", *PARTS, "total", "p95"),
    )
    for cost in result.costs:
        parts = (us(getattr(cost, part).median) for part in PARTS)
        table.add_row(
            cost.slots if cost.waiting == LENGTHS[0] else "",
            f"{cost.waiting:,}",
            f"{cost.tokens:.0f}",
            *parts,
            Text(us(cost.total.median), style="bold"),
            us(cost.total.p95),
            end_section=cost.waiting == LENGTHS[-1],
        )
    return table


def real_table(result: Result) -> Table:
    table = new_table(
        f"A real step, {result.plan.running} running and {result.plan.waiting:,} waiting",
        f"Medians of {result.plan.real} steps. share: schedule and pack, of the whole step (target: under "
        f"{result.target:.0%}); with update: of all three.",
        ("slots", "tokens", "schedule us", "pack us", "update us", "model ms", "share", "with update"),
    )
    for cost in result.real:
        assert cost.model is not None and cost.share is not None
        table.add_row(
            cost.slots,
            f"{cost.tokens:.0f}",
            *(us(getattr(cost, part).median) for part in PARTS),
            f"{cost.model.median * 1e3:,.1f}",
            Text(f"{cost.share:.2%}", style="bold green" if cost.share < result.target else "bold red"),
            f"{cost.share_all:.2%}",
        )
    return table


# ---- the command


def as_json(result: Result) -> dict[str, Any]:
    return {"finding": finding(result), **asdict(result)}


def run_command(plan: Plan, model: str, device: str, dtype: str, json_path: Path | None, console: Console) -> int:
    """`minillm bench scheduler`. Returns the exit status: 1 if a request was overtaken by more than it may be.

    Raises InputError for a file that cannot be written, before the weights are loaded. After Ctrl-C it shows and
    saves what is whole, and raises KeyboardInterrupt again.
    """
    from minillm.fetch import find

    results.check_room(json_path)
    folder = find(model)
    result = measure(load_model(folder, device, dtype, console), folder.name, plan, console)
    show(result, console)
    results.save(console, json_path, "scheduler", lambda: as_json(result))
    if result.partial:
        raise KeyboardInterrupt
    return 0 if result.fair else 1
