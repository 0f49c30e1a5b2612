"""The course of a benchmark: which stage runs which requests, how often, and in which order.

The naive stage runs the small set, and so does the stage after it. Neighbours are always compared on a set
that both ran, and the ratio to the first stage is the product of these ratios.

A text ends where the model ends it, or at the cap. Where that is, the first pass finds out (continuous, the
last stage, once over both sets); afterwards every stage is asked for exactly these lengths. Rounding makes
texts part now and then, and then they would also end in different places: this way every stage does the
same work.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
from minillm.bench.peers import compare
from minillm.bench.peers.base import Peer
from minillm.bench.peers.compare import PeersResult
from minillm.bench.rows import Row, about_stage, make_rows
from minillm.bench.verify import MOST_EXCUSED, Verdict, Verifier, judge
from minillm.bench.workload import Preset, Workload
from minillm.errors import InputError
from minillm.model import Llama
from minillm.stages import STAGES

MOST_PEER_ROUNDS = 2


def pick_stages(names: Sequence[str] | None) -> list[str]:
    """In the order of the ladder, each once; None is all of them. Raises InputError for an unknown name."""
    for name in names or ():
        if name not in STAGES:
            raise InputError(f"stage {name!r} is not known; use one of {', '.join(STAGES)}")
    return [name for name in STAGES if not names or name in names]


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
    partial: bool = False  # stopped by Ctrl-C: what was measured until then
    peers: PeersResult | None = None


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
    folder: Path | None = None,
    peers: Sequence[Peer] = (),
) -> Result:
    """Runs everything and judges it; prints only progress and, with `stream`, the texts of the small set.

    Peers load the same weights, from the `folder`, and run the main set too.
    """
    began = time.perf_counter()
    with progress(console) as bar:
        task = bar.add_task("Measuring this machine's ceilings", total=1)
        ceilings = ceiling.measure(model.device, model.dtype)
        bar.advance(task)
        sets = {key: fix_lengths(model, key, jobs, workload, preset, bar) for key, jobs in workload.sets.items()}
    plan = sets_of(stages)
    warm_up(model, stages, sets["small"], workload, preset, console, stream)
    runs, partial = timed_rounds(model, plan, sets, workload, preset, began, console)
    stages = [stage for stage in stages if all(runs[stage, key] for key in plan[stage])]
    ceilings = ceilings.best(ceiling.measure(model.device, model.dtype))  # the machine may have been busy
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
    if preset.claims and not partial:
        found = claims.measure(model, workload.text, rows, verifier, preset.chunk, workload.weights, console)
    others = None
    if peers and folder and not partial:
        arguments = folder, sets["main"], workload.text, preset.limits, peers, min(preset.rounds, MOST_PEER_ROUNDS)
        others = compare.measure(model, *arguments, console)
        partial = others.partial
    tokens = {key: [len(job.prompt) for job in jobs] for key, jobs in sets.items()}
    return Result(
        about=machine.describe(model.device),
        model={
            "name": name,
            "weights": workload.weights,
            # a tied head is the embedding, whether it has a packed copy or not
            "parameters": sum(
                p.numel() for n, p in model.named_parameters() if not (model.config.tied and n == "head.weight")
            ),
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
        partial=partial,
        peers=others,
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
) -> tuple[dict[tuple[str, str], list[Run]], bool]:
    """{(stage, set): one run per round}, and whether Ctrl-C cut them short. Rounds are interleaved, and each begins
    with another stage, so that what changes on the machine meanwhile hits all of them.

    After Ctrl-C the whole runs are kept, if any stage has its sets complete; else KeyboardInterrupt goes on.
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
                try:
                    runs[stage, key].append(run(model, stage, sets[key], preset.limits, workload.tokenizer))
                except KeyboardInterrupt:
                    if not any(all(runs[s, key] for key in keys) for s, keys in plan.items()):
                        raise
                    console.print("Stopped. Checking what was measured; Ctrl-C again drops it.")
                    return runs, True
                bar.advance(task)
            bar.remove_task(task)
            end = time.perf_counter()
            if end + (end - start) - began > preset.seconds:
                break
    return runs, False


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
    lines.append(
        "All prompts differ, and no stage keeps anything from an earlier run; shared and kernels compute a common "
        "beginning of prompts (the chat template's) once, so they may push fewer tokens than are needed."
    )
    return lines
