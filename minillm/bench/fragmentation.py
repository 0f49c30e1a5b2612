"""What blocks save: KV memory given out against used, and how many requests run at once in the same memory.

First it is counted, by the real scheduler and the real slots without a model: tokens cost no time there, so the counts
are exact and the same on every machine. Then the model serves such requests, with regions and with blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import ladder
from minillm.bench.claims import Claim, at_least, at_most
from minillm.bench.harness import Job, Run, run
from minillm.bench.queueing import jobs_of
from minillm.bench.tables import new_table, rate, times
from minillm.bench.verify import Verifier, judge
from minillm.config import Config
from minillm.errors import InputError, check_range
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Request
from minillm.scheduler import Scheduler
from minillm.simulation.workload import ARTICLE_MIX, Demand, Mix
from minillm.slots import BlockSlots, RegionSlots, Slots

PROMPTS = Mix(((1.0, 16, 256),))  # the article names no prompts: any length from 16 to 256 tokens, all as likely
BUDGET = 256  # most tokens in a step
STAGES_SERVED = ("continuous", "paged")
WASTE = 0.04  # most that blocks of `Plan.block` may waste: what PagedAttention (Kwon et al. 2023) reports


@dataclass(frozen=True)
class Plan:
    """What is run. Raises InputError for sizes that make no sense."""

    regions: int = 8  # the memory: so many of them, each as long as the longest request
    sizes: tuple[int, ...] = (1, 4, 16, 64)  # of blocks, in slots
    requests: int = 600  # counted, with the lengths of the article
    served: int = 128  # by the model; 0: none
    scale: float = 0.25  # of the lengths of those
    block: int = 16  # size of the blocks that the model is served with
    max_running: int = 32  # most requests in blocks, if memory does not end it before
    rounds: int = 2  # of the model
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("regions", 1, 256),
            ("requests", 1, 100_000),
            ("served", 0, 10_000),
            ("scale", 0.02, 4.0),
            ("block", 1, 1024),
            ("max_running", 1, BUDGET),
            ("rounds", 1, 20),
            ("seed", 0, 2**32 - 1),
        ):
            check_range(name, getattr(self, name), least, most)
        for size in self.sizes:
            check_range("the block size", size, 1, 1024)

    def check(self, config: Config) -> None:
        """Raises InputError if the model's context does not admit what it is to serve."""
        if self.served and (longest := longest_of(self.demands(self.served, self.scale))) > config.context:
            raise InputError(
                f"scale is {self.scale:g}, so that a request may need {longest} positions; the model's context is "
                f"{config.context}: take a smaller scale"
            )

    def demands(self, n: int, scale: float = 1.0) -> list[Demand]:
        """All there at the start."""
        rng = np.random.default_rng(self.seed)
        outputs = ARTICLE_MIX.scaled(scale).draw(n, rng)
        prompts = PROMPTS.scaled(scale).draw(n, rng)
        return [Demand(0.0, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def longest_of(demands: Sequence[Demand]) -> int:
    """Slots of the longest request; its last token is never fed back."""
    return max(d.prompt + d.output - 1 for d in demands)


# ---- counted


@dataclass
class Counted:
    """One way to give out memory. Slots and shares are means over all steps."""

    memory: str
    size: int | None  # of a block; None: regions
    n_slots: int  # in all
    held: float  # slots that running requests hold
    used: float  # of these, slots whose K and V are computed
    waste: float  # share of `held` that is not used
    running: float  # requests that run, mean over the steps in which others wait
    most_running: int
    preemptions: int
    recomputed: int  # tokens
    steps: int


def count(demands: Sequence[Demand], slots: Slots, size: int | None) -> Counted:
    """Serves them all, step by step, with a model that takes no time and never ends a text before its length."""
    requests = [Request([0] * d.prompt, SamplingParams(max_tokens=d.output), 0, d.output) for d in demands]
    scheduler = Scheduler(slots, len(slots.free_rows), BUDGET)
    for request in requests:
        scheduler.waiting.add(request)
    held, used, planned = [], [], 0
    running, crowded = [], []
    while scheduler.busy:
        plan = scheduler.schedule()
        new = dict(plan)
        planned += sum(new.values())
        held.append(held_by(scheduler.running, slots))
        used.append(sum(request.computed + new.get(request, 0) for request in scheduler.running))
        running.append(len(scheduler.running))
        if scheduler.waiting:
            crowded.append(len(scheduler.running))
        scheduler.update(plan, {request: (0, None) for request, n in plan if n == request.pending})
    return Counted(
        memory="regions" if size is None else f"blocks of {size}",
        size=size,
        n_slots=slots.n_slots,
        held=float(np.mean(held)),
        used=float(np.mean(used)),
        waste=1 - sum(used) / sum(held),
        running=float(np.mean(crowded or running)),
        most_running=max(running),
        preemptions=scheduler.preemptions,
        recomputed=planned - sum(d.prompt + d.output - 1 for d in demands),
        steps=len(held),
    )


def held_by(running: Sequence[Request], slots: Slots) -> int:
    if isinstance(slots, BlockSlots):
        return slots.n_slots - len(slots.free) * slots.size
    return len(running) * slots.capacity


def count_all(plan: Plan) -> list[Counted]:
    """Regions, then each block size in as much memory, or the little less that it divides."""
    demands = plan.demands(plan.requests)
    longest = longest_of(demands)
    memory = plan.regions * longest
    found = [count(demands, RegionSlots(plan.regions, longest), None)]
    for size in plan.sizes:
        found.append(count(demands, BlockSlots(plan.max_running, longest, memory // size * size, size), size))
    return found


# ---- served


@dataclass
class Served:
    """One stage on the model: medians of the rounds, which are kept too."""

    stage: str
    void: str | None  # why its times do not count
    n_slots: int
    nbytes: int  # of K and V
    steps: int
    running: float  # requests in a step, mean
    most_running: int
    preemptions: int
    recomputed: int
    output_throughput: float  # tokens per second
    ttft: float  # seconds, median
    rounds: list[float]  # output tokens per second


@dataclass
class Result:
    plan: Plan
    counted: list[Counted]
    served: list[Served]
    output_tokens: int  # of the served requests
    ratio: float | None  # paged over continuous, output tokens per second: median of the rounds
    claims: list[Claim] = field(default_factory=list)


def limits_of(plan: Plan, stage: str, longest: int) -> dict[str, int]:
    if stage == "continuous":
        return {"max_running": plan.regions, "budget": BUDGET}
    memory = plan.regions * longest // plan.block * plan.block
    return {"max_running": plan.max_running, "budget": BUDGET, "n_slots": memory, "block": plan.block}


def serve(
    model: Llama, text: Sequence[int], plan: Plan, advance: Callable[[str], None], runs: dict[str, list[Run]]
) -> None:
    """Interleaved rounds of both stages into `runs`, after a short one to warm up."""
    jobs = jobs_of(plan.demands(plan.served, plan.scale), text)
    longest = max(len(job.prompt) + job.max_tokens - 1 for job in jobs)
    for i in range(1 + plan.rounds):
        for stage in STAGES_SERVED if i % 2 else STAGES_SERVED[::-1]:
            advance(f"{stage} in the same memory, " + (f"round {i} of {plan.rounds}" if i else "warming up"))
            limits = limits_of(plan, stage, longest)
            some = jobs if i else [Job(job.prompt, min(2, job.max_tokens)) for job in jobs[: plan.max_running]]
            done = run(model, stage, some, limits)
            if i:
                runs[stage].append(done)


def served_row(runs: Sequence[Run], plan: Plan, model: Llama, verifier: Verifier, most_excused: float) -> Served:
    one = runs[0]
    longest = max(len(job.prompt) + job.max_tokens - 1 for job in one.jobs)
    n_slots = limits_of(plan, one.stage, longest).get("n_slots", plan.regions * longest)
    per_step = [len(step.new) for step in one.counts.steps]
    ttft = [done.summary.ttft for done in runs]
    rounds = [done.summary.output_throughput for done in runs]
    return Served(
        stage=one.stage,
        void=judge(runs, verifier, most_excused).void,
        n_slots=n_slots,
        nbytes=n_slots * model.config.kv_bytes_per_token(model.dtype.itemsize),
        steps=len(per_step),
        running=float(np.mean(per_step)),
        most_running=max(per_step),
        preemptions=one.preemptions,
        recomputed=one.tokens_pushed - one.tokens_useful,
        output_throughput=median(rounds),
        ttft=median(stats.median for stats in ttft if stats),
        rounds=rounds,
    )


# ---- both


def measure(
    model: Llama, text: Sequence[int], plan: Plan, verifier: Verifier, most_excused: float, console: Console
) -> tuple[Result, bool]:
    """What was found, and whether Ctrl-C cut it short: then without the model's part, or with fewer rounds of it.

    Before the counts are whole, KeyboardInterrupt goes on.
    """
    with console.status("Counting blocks: no model, only the scheduler"):
        counted = count_all(plan)
    runs: dict[str, list[Run]] = {stage: [] for stage in STAGES_SERVED}
    partial = False
    if plan.served:
        try:
            with ladder.progress(console) as bar:
                task = bar.add_task("", total=(1 + plan.rounds) * len(STAGES_SERVED), completed=-1)
                serve(model, text, plan, lambda what: bar.update(task, advance=1, description=what), runs)
        except KeyboardInterrupt:
            partial = True
    whole = min(map(len, runs.values()))
    served: list[Served] = []
    if whole:
        with console.status("Checking every token against the naive model"):
            served = [served_row(runs[stage][:whole], plan, model, verifier, most_excused) for stage in STAGES_SERVED]
    result = Result(plan, counted, served, sum(len(o) for o in runs["paged"][0].outputs) if whole else 0, None)
    if whole and not any(row.void for row in served):
        result.ratio = median(b / a for a, b in zip(*(row.rounds for row in served), strict=True))
    result.claims = claims(result)
    return result, partial


def claims(result: Result) -> list[Claim]:
    """The targets, if blocks of the size that the model is served with were counted."""
    regions, block = result.counted[0], {c.size: c for c in result.counted}.get(result.plan.block)
    if block is None:
        return []
    gain, over = block.running / regions.running, block.held / block.used
    return [
        at_most(
            f"{block.memory}, KV memory held over used (waste under {WASTE:.0%})",
            round(1 / (1 - WASTE), 3),
            over,
            f"{block.waste:.1%} waste; regions {regions.waste:.0%}",
        ),
        at_least(
            f"regions to {block.memory}, requests that run at once in the same memory",
            2,
            gain,
            f"{regions.running:.1f} to {block.running:.1f}",
        ),
    ]


# ---- for people


def finding(result: Result) -> str:
    """What the numbers show, in a sentence or two."""
    regions, block = result.counted[0], {c.size: c for c in result.counted}.get(result.plan.block)
    lines = []
    if block:
        lines.append(
            f"In the memory of {result.plan.regions} regions, {block.memory} run {block.running:.1f} requests at once "
            f"and waste {block.waste:.1%} of what they hold; regions run {regions.running:.1f} and waste "
            f"{regions.waste:.0%} (article's mix, counted). The price: {block.preemptions:,} times a request had to "
            f"give way, and {block.recomputed:,} tokens were computed again."
        )
    if result.ratio is not None:
        lines.append(f"Served by the model, blocks make {times(result.ratio)} the output tokens/s of regions.")
    return " ".join(lines)


def counted_table(result: Result) -> Table:
    plan = result.plan
    table = new_table(
        f"The memory of {plan.regions} regions in blocks: {plan.requests:,} requests, counted without a model",
        f"The article's mix of outputs (85 % of 40 to 200 tokens, 15 % of 400 to 1,000), prompts of 16 to 256 tokens, "
        f"all there at the start, at most {plan.max_running} at once in blocks. {result.counted[0].n_slots:,} slots. "
        "held: by running requests. used: with K and V in them. wasted: of held. These are means over all steps. "
        "running: while others wait. again: tokens computed again after a preemption.",
        ("memory", "held", "used", "wasted", "running", "preempted", "again", "steps"),
    )
    for c in result.counted:
        table.add_row(
            c.memory,
            f"{c.held:,.0f}",
            f"{c.used:,.0f}",
            Text(f"{c.waste:.1%}", style="bold"),
            Text(f"{c.running:.1f}", style="bold"),
            f"{c.preemptions:,}",
            f"{c.recomputed:,}",
            f"{c.steps:,}",
        )
    return table


def served_table(result: Result) -> Table:
    plan, first = result.plan, result.served[0]
    void = "".join(f" {row.stage} is void: {row.void}." for row in result.served if row.void)
    timed = [row for row in result.served if not row.void]
    spread = ", ".join(f"{row.stage} {rate(min(row.rounds))}-{rate(max(row.rounds))}" for row in timed)
    table = new_table(
        f"The same on the model: {plan.served} such requests, lengths times {plan.scale:g}",
        f"{plan.regions} regions against blocks of {plan.block} in as much memory, {first.nbytes / 1e6:,.0f} MB; "
        f"{result.output_tokens:,} output tokens. output/s: median of {len(first.rounds)} rounds ({spread}). running: "
        f"mean over all steps.{void}",
        ("stage", "output/s", "x", "ttft s", "running", "preempted", "again", "steps"),
    )
    for row in result.served:
        if row.void:
            table.add_row(row.stage, Text("void", style="red"))
            continue
        table.add_row(
            row.stage,
            Text(rate(row.output_throughput), style="bold"),
            times(result.ratio) if row is not first else "-",
            f"{row.ttft:.1f}",
            f"{row.running:.1f}",
            f"{row.preemptions:,}",
            f"{row.recomputed:,}",
            f"{row.steps:,}",
        )
    return table
