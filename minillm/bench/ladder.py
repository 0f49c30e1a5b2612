"""The course of a benchmark: what is asked, how often each stage is run, and what is compared with what.

Two sets of requests. The `main` set is the prompts as they come, of many lengths; the naive stage would
need hours for it, so it runs the `small` set of short ones, and so does the stage after it. Neighbours are
always compared on a set that both ran, and the ratio to the first stage is the product of these ratios.

A text ends where the model ends it, or at the cap. Where that is, the first pass finds out (continuous, the
last stage, once over both sets); afterwards every stage is asked for exactly these lengths. Rounding makes
texts part now and then, and then they would also end in different places: this way every stage does the
same work.
"""

import inspect
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.text import Text

from minillm.bench import ceiling, claims, machine
from minillm.bench.ceiling import Ceilings
from minillm.bench.claims import Claim
from minillm.bench.harness import Job, Run, run
from minillm.bench.live import watch
from minillm.bench.metrics import Summary
from minillm.bench.prompts import load
from minillm.bench.verify import MOST_EXCUSED, Verdict, Verifier, judge
from minillm.config import Config
from minillm.errors import InputError
from minillm.model import Llama
from minillm.stages import STAGES
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preset:
    """How much is run. Lengths are in tokens, the chat template included."""

    name: str
    small: int  # prompts of at most `small_longest` tokens, in the order of the file
    small_longest: int
    small_cap: int  # most new tokens
    main: int  # prompts of at most `main_longest` tokens, in the order of the file
    main_longest: int
    main_cap: int
    max_running: int  # sequences in one step, the same for every stage that batches
    budget: int  # new tokens in one step (continuous)
    chunk: int  # new tokens in one step (chunked)
    rounds: int  # most timed runs of each stage
    seconds: float  # no further round is begun that would end later than this, counted from the first pass
    claims: bool  # also measure the comparisons in `claims`

    @property
    def limits(self) -> dict[str, int]:
        return {"max_running": self.max_running, "budget": self.budget, "chunk": self.chunk}


PRESETS = {
    "quick": Preset("quick", 3, 64, 40, 16, 400, 64, 8, 512, 256, 3, 75, False),
    "full": Preset("full", 4, 64, 96, 32, 2048, 128, 16, 512, 256, 3, 660, True),
}


def pick_preset(name: str) -> Preset:
    """Raises InputError for an unknown name."""
    if name not in PRESETS:
        raise InputError(f"preset {name!r} is not known; use one of {', '.join(PRESETS)}")
    return PRESETS[name]


def pick_stages(names: Sequence[str] | None) -> list[str]:
    """In the order of the ladder, each once; None is all of them. Raises InputError for an unknown name."""
    for name in names or ():
        if name not in STAGES:
            raise InputError(f"stage {name!r} is not known; use one of {', '.join(STAGES)}")
    return [name for name in STAGES if not names or name in names]


@dataclass
class Workload:
    """The two sets, and where they come from. Prompts of `claims` are cut out of `text`."""

    sets: dict[str, list[Job]]
    questions: list[str]  # of the small set, for people to read
    text: list[int]  # many token ids in a row
    weights: str  # "real" or "random"
    tokenizer: Tokenizer | None
    lengths_known: bool  # the jobs already say how long the texts are


def real_workload(tokenizer: Tokenizer, preset: Preset, config: Config) -> Workload:
    """The package's own prompts, by the checkpoint's chat template, as long as the model's context admits."""
    prompts = [(p, tuple(tokenizer.encode_chat(list(p.messages)))) for p in load()]

    def pick(n: int, longest: int, cap: int) -> list[tuple[Any, tuple[int, ...]]]:
        fitting = [(p, ids) for p, ids in prompts if len(ids) <= min(longest, config.context - cap)][:n]
        if not fitting:
            raise InputError(f"the model's context is {config.context}; the prompts need at least {64 + cap}")
        return fitting

    small = pick(preset.small, preset.small_longest, preset.small_cap)
    main = pick(preset.main, preset.main_longest, preset.main_cap)
    return Workload(
        sets={
            "small": [Job(ids, preset.small_cap, ignore_eos=False) for _, ids in small],
            "main": [Job(ids, preset.main_cap, ignore_eos=False) for _, ids in main],
        },
        questions=[p.messages[-1]["content"] for p, _ in small],
        text=[token for _, ids in prompts for token in ids],
        weights="real",
        tokenizer=tokenizer,
        lengths_known=False,
    )


def random_workload(preset: Preset, config: Config, seed: int = 0) -> Workload:
    """Random ids, for a model with random weights, which never ends a text: prompts about as long as the
    package's (four characters a token, and 30 for the template), outputs from 8 tokens to the cap, short
    ones more often.
    """
    draw = random.Random(seed)
    sizes = [30 + sum(len(m["content"]) for m in p.messages) // 4 for p in load()]

    def jobs(n: int, longest: int, cap: int) -> list[Job]:
        fitting = [size for size in sizes if size <= min(longest, config.context - cap)][:n]
        least = min(8, cap)
        lengths = [round(least * (cap / least) ** draw.random()) for _ in fitting]
        return [
            Job(tuple(draw.randrange(config.vocab_size) for _ in range(size)), length)
            for size, length in zip(fitting, lengths, strict=True)
        ]

    return Workload(
        sets={
            "small": jobs(preset.small, preset.small_longest, preset.small_cap),
            "main": jobs(preset.main, preset.main_longest, preset.main_cap),
        },
        questions=[],
        text=[draw.randrange(config.vocab_size) for _ in range(16_000)],
        weights="random",
        tokenizer=None,
        lengths_known=True,
    )


@dataclass
class Row:
    """One stage, measured. Times and throughputs are medians over the `rounds`, which are kept too."""

    stage: str
    about: str
    request_set: str
    positions_checked: int
    share_excused: float
    largest_gap: float
    void: str | None
    steps: int
    tokens_pushed: int
    tokens_useful: int
    attention_scores: int
    peak_kv_reserved_bytes: int
    peak_kv_stored_bytes: int
    wall: float
    prompt_throughput: float
    output_throughput: float
    output_throughput_min: float
    output_throughput_max: float
    total_token_throughput: float
    request_throughput: float
    ttft_median: float
    tpot_median: float
    tpot_p95: float
    itl_median: float
    itl_p95: float
    e2el_median: float
    floor_seconds: float
    ceiling_throughput: float  # output tokens per second if every step took its floor
    ceiling_share: float
    ratio_before: float | None
    ratio_before_set: str | None
    ratio_first: float | None
    flags: list[str]
    rounds: list[Summary]

    @property
    def tokens_wasted(self) -> int:
        """Pads, rows that had ended, and tokens computed again."""
        return self.tokens_pushed - self.tokens_useful


@dataclass
class Result:
    """All that a benchmark found, as it goes into the JSON file."""

    about: dict[str, Any]  # machine, versions, command, commit, date
    model: dict[str, Any]
    preset: Preset
    sets: dict[str, dict[str, int]]
    ceilings: Ceilings
    rows: list[Row]
    claims: list[Claim]
    notes: list[str]
    seconds: float


def about_stage(stage: str) -> str:
    """What the stage changes, in its module's own words: the first paragraph of the docstring."""
    paragraph = (inspect.getdoc(inspect.getmodule(STAGES[stage])) or "").split("\n\n")[0]
    words = " ".join(paragraph.split()).partition(": ")[2]
    return words[:1].upper() + words[1:]


def sets_of(stages: Sequence[str]) -> dict[str, list[str]]:
    """{stage: the sets it runs}: naive the small one, the stage after it both, all others the main one."""
    sets = {stage: ["main"] for stage in stages}
    if stages[0] == "naive":
        sets["naive"] = ["small"]
        for stage in stages[1:2]:
            sets[stage] = ["main", "small"]
    return sets


def measure(
    model: Llama,
    name: str,
    workload: Workload,
    preset: Preset,
    stages: Sequence[str],
    console: Console,
    stream: bool = False,
) -> Result:
    """Runs everything and judges it; prints only progress and, with `stream`, the texts of the small set."""
    began = time.perf_counter()
    with progress(console) as bar:
        task = bar.add_task("Measuring this machine's ceilings", total=1)
        ceilings = ceiling.measure(model.device, model.dtype)
        bar.advance(task)
        sets = {key: fix_lengths(model, key, jobs, workload, preset, bar) for key, jobs in workload.sets.items()}
    plan = sets_of(stages)
    warm_up(model, stages, sets["small"], workload, preset, console, stream)
    runs = timed_rounds(model, plan, sets, workload, preset, began, console)
    verifier = Verifier(model)
    most_excused = MOST_EXCUSED if workload.weights == "real" else 1.0  # random logits lie close together
    verdicts: dict[str, Verdict] = {}
    with progress(console) as bar:
        task = bar.add_task("Checking every token against the naive model", total=len(stages))
        for stage in stages:
            all_runs = [one for key in plan[stage] for one in runs[stage, key]]
            verdicts[stage] = judge(all_runs, verifier, most_excused)
            bar.advance(task)
    rows = make_rows(stages, plan, runs, verdicts, model, ceilings)
    found: list[Claim] = []
    if preset.claims:
        found = claims.measure(model, workload.text, rows, verifier, preset.chunk, workload.weights, console)
    tokens = {key: [len(job.prompt) for job in jobs] for key, jobs in sets.items()}
    return Result(
        about=machine.describe(model.device),
        model={
            "name": name,
            "weights": workload.weights,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        },
        preset=preset,
        sets={
            key: {
                "requests": len(jobs),
                "prompt_tokens": sum(tokens[key]),
                "shortest_prompt": min(tokens[key]),
                "longest_prompt": max(tokens[key]),
                "output_tokens": sum(job.max_tokens for job in jobs),
            }
            for key, jobs in sets.items()
        },
        ceilings=ceilings,
        rows=rows,
        claims=found,
        notes=notes(stages, plan, workload),
        seconds=time.perf_counter() - began,
    )


def progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
    )
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def fix_lengths(
    model: Llama, key: str, jobs: list[Job], workload: Workload, preset: Preset, bar: Progress
) -> list[Job]:
    """The same jobs, with the length at which the model ended each text."""
    if workload.lengths_known:
        return jobs
    task = bar.add_task(f"Finding where the texts of the {key} set end", total=len(jobs))
    found = run(
        model,
        "continuous",
        jobs,
        preset.limits,
        workload.tokenizer,
        lambda _, event: bar.advance(task, 0 if event.finish_reason is None else 1),
    )
    return [Job(job.prompt, max(1, len(output))) for job, output in zip(jobs, found.outputs, strict=True)]


def warm_up(
    model: Llama,
    stages: Sequence[str],
    jobs: list[Job],
    workload: Workload,
    preset: Preset,
    console: Console,
    stream: bool,
) -> None:
    """The small set, whole, through every stage: what is done only once is done now. Nothing is timed."""
    if not stream or workload.tokenizer is None:
        with progress(console) as bar:
            task = bar.add_task("Warming up", total=len(stages))
            for stage in stages:
                run(model, stage, jobs, preset.limits, workload.tokenizer)
                bar.advance(task)
        return
    first: Run | None = None
    for stage in stages:
        console.print(Rule(Text(stage, style="bold"), align="left"))
        console.print(Text(about_stage(stage), style="italic"))
        arguments = jobs, workload.questions, preset.limits, workload.tokenizer, console
        done = watch(model, stage, *arguments, first)
        first = first or done


def timed_rounds(
    model: Llama,
    plan: dict[str, list[str]],
    sets: dict[str, list[Job]],
    workload: Workload,
    preset: Preset,
    began: float,
    console: Console,
) -> dict[tuple[str, str], list[Run]]:
    """{(stage, set): one run per round}. Rounds are interleaved, and each begins with another stage, so
    that what changes on the machine meanwhile hits all of them.
    """
    runs: dict[tuple[str, str], list[Run]] = {(s, key): [] for s, keys in plan.items() for key in keys}
    todo = list(runs)
    with progress(console) as bar:
        for i in range(preset.rounds):
            start = time.perf_counter()
            task = bar.add_task("", total=len(todo))
            shift = i * len(todo) // preset.rounds
            for stage, key in todo[shift:] + todo[:shift]:
                bar.update(task, description=f"Round {i + 1} of at most {preset.rounds}: {stage}, {key} set")
                runs[stage, key].append(run(model, stage, sets[key], preset.limits, workload.tokenizer))
                bar.advance(task)
            bar.remove_task(task)
            end = time.perf_counter()
            if end + (end - start) - began > preset.seconds:
                break
    return runs


def make_rows(
    stages: Sequence[str],
    plan: dict[str, list[str]],
    runs: dict[tuple[str, str], list[Run]],
    verdicts: dict[str, Verdict],
    model: Llama,
    ceilings: Ceilings,
) -> list[Row]:
    """One row per stage, from the first of its sets. A void stage has no ratios, and none is taken to it."""
    rows: list[Row] = []
    ratio_first: float | None = 1.0
    for i, stage in enumerate(stages):
        key, void = plan[stage][0], verdicts[stage].void
        before = stages[i - 1] if i else None
        ratio, common = None, None
        if before is not None:
            common = next(k for k in plan[stage] if k in plan[before])
            if not void and not verdicts[before].void:
                ratio = throughput(runs[stage, common]) / throughput(runs[before, common])
            ratio_first = ratio_first * ratio if ratio_first is not None and ratio is not None else None
        rows.append(make_row(stage, key, runs[stage, key], verdicts[stage], model, ceilings))
        rows[-1].ratio_before, rows[-1].ratio_before_set = ratio, common
        rows[-1].ratio_first = None if void else ratio_first
    return rows


def throughput(runs: Sequence[Run]) -> float:
    return median(one.summary.output_throughput for one in runs)


def make_row(stage: str, key: str, runs: Sequence[Run], verdict: Verdict, model: Llama, ceilings: Ceilings) -> Row:
    """Counts are those of the first round: they are the same in every one."""
    one, rounds = runs[0], [r.summary for r in runs]
    speeds = [s.output_throughput for s in rounds]
    floor = ceiling.floor_seconds(one.counts.steps, model.config, model.dtype.itemsize, ceilings)
    wall = median(s.wall for s in rounds)

    def over_rounds(metric: str, part: str) -> float:
        values = [getattr(stats, part) for s in rounds if (stats := getattr(s, metric)) is not None]
        return median(values) if values else 0.0

    flags = []
    if rounds[0].wall > 2 * wall:
        flags.append(f"the first round took {rounds[0].wall:.1f} s, the median {wall:.1f} s: not warm")
    return Row(
        stage=stage,
        about=about_stage(stage),
        request_set=key,
        positions_checked=verdict.check.positions,
        share_excused=verdict.check.share_excused,
        largest_gap=verdict.check.gap,
        void=verdict.void,
        steps=len(one.counts.steps),
        tokens_pushed=one.tokens_pushed,
        tokens_useful=one.tokens_useful,
        attention_scores=one.scores,
        peak_kv_reserved_bytes=one.counts.peak_reserved_bytes,
        peak_kv_stored_bytes=one.counts.peak_stored_tokens * model.config.kv_bytes_per_token(model.dtype.itemsize),
        wall=wall,
        prompt_throughput=median(s.prompt_throughput for s in rounds),
        output_throughput=median(speeds),
        output_throughput_min=min(speeds),
        output_throughput_max=max(speeds),
        total_token_throughput=median(s.total_token_throughput for s in rounds),
        request_throughput=median(s.request_throughput for s in rounds),
        ttft_median=over_rounds("ttft", "median"),
        tpot_median=over_rounds("tpot", "median"),
        tpot_p95=over_rounds("tpot", "p95"),
        itl_median=over_rounds("itl", "median"),
        itl_p95=over_rounds("itl", "p95"),
        e2el_median=over_rounds("e2el", "median"),
        floor_seconds=floor,
        ceiling_throughput=rounds[0].output_tokens / floor,
        ceiling_share=floor / wall if wall else 0.0,
        ratio_before=None,
        ratio_before_set=None,
        ratio_first=None,
        flags=flags,
        rounds=rounds,
    )


def notes(stages: Sequence[str], plan: dict[str, list[str]], workload: Workload) -> list[str]:
    """What a reader must know to read the numbers."""
    lines = ["Greedy; all requests arrive at time 0, so waiting in the queue is part of ttft and e2el."]
    if workload.lengths_known:
        lines.append("Random weights and random prompts of about the package's lengths; output lengths are drawn.")
    else:
        lines.append(
            "A text ends where the model ends it, or at the cap: one pass of continuous found the lengths, "
            "and every stage emits exactly as many tokens."
        )
    if "naive" in plan:
        lines.append(
            "naive runs the small set alone: it needs time that grows with the square of the length"
            + (f"; {stages[1]} runs both sets and links them." if len(stages) > 1 else ".")
        )
    lines.append("x before: on a set that both ran. x first: the product of these.")
    lines.append("No stage has a prefix cache, and all prompts differ: nothing is read from an earlier run.")
    return lines
