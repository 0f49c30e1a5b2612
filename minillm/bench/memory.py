"""Where the memory goes: K and V that each stage reserves and needs, and activations against the size of a chunk.

A stage reserves room for K and V before it knows how long a text will be. What it holds and what it needs are counted
in every step; the difference is waste. `fragmentation` cuts the same memory into blocks. Activations are the other part
that grows: attention scores of a long prompt.
"""

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import fragmentation, ladder, load_model, machine, results
from minillm.bench.claims import PeakMemory
from minillm.bench.harness import Job, Run, run
from minillm.bench.report import claims_table
from minillm.bench.tables import device_name, new_table
from minillm.bench.verify import MOST_EXCUSED, Verifier, judge
from minillm.bench.workload import QUICK, Preset, Workload, real_workload
from minillm.config import Config
from minillm.errors import InputError
from minillm.model import Llama
from minillm.stages import STAGES

BLOCKS = ("paged", "shared", "kernels")  # the memory they reserve is not cut into regions
KEEPING = tuple(stage for stage in STAGES if stage != "naive")  # naive keeps neither K nor V
CHUNKS = (64, 128, 256, 512, 1024)
NEW = 4  # tokens that follow the long prompt
POINTS = 200  # of each curve
WIDTH = 70  # of a table with few columns, in characters: room for its caption


@dataclass
class StageMemory:
    """K and V of one stage, in bytes. `reserved` and `live` are at `POINTS` equal parts of the run's time."""

    stage: str
    void: str | None  # why its numbers do not count
    steps: int
    peak_reserved: int
    peak_live: int
    share_used: float | None  # live over reserved, both summed over the time of the run; None: it reserved nothing
    reserved: list[int]
    live: list[int]


@dataclass
class Activation:
    """One long prompt in chunks of this size."""

    chunk: int
    whole: bool  # all of it in one step
    peak: int  # bytes that the process grew by, less those of K and V
    scores: int  # bytes of attention scores at the end of the prompt, predicted
    void: str | None

    @property
    def label(self) -> str:
        return "whole" if self.whole else f"{self.chunk:,}"


@dataclass
class Result:
    """All that was found, as it goes into the JSON file."""

    about: dict[str, Any]
    model: dict[str, Any]
    limits: dict[str, int]
    requests: int
    prompt: int  # tokens of the long prompt
    stages: list[StageMemory]
    activations: list[Activation]
    partial: bool
    seconds: float
    notes: list[str] = field(default_factory=list)
    blocks: fragmentation.Result | None = None


def check(config: Config, stages: Sequence[str] | None, prompt: int, chunks: Sequence[int]) -> None:
    """Raises InputError for an unknown stage, and for sizes that the model's context does not admit."""
    ladder.pick_stages(stages)
    if prompt < 1:
        raise InputError(f"prompt is {prompt}; it must be at least 1")
    if prompt + NEW > config.context:
        raise InputError(
            f"the prompt is {prompt} tokens; the model's context is {config.context}, so it may have "
            f"{config.context - NEW}"
        )
    for chunk in chunks:
        if chunk < 1:
            raise InputError(f"the chunk is {chunk}; it must be at least 1")


def check_text(text: Sequence[int], prompt: int) -> None:
    """Raises InputError if no prompt of that size can be cut out of the ids."""
    if len(text) < prompt:
        raise InputError(f"the prompt is {prompt} tokens; there are {len(text)} to cut it from")


# ---- K and V


def of_stage(done: Run, kv_bytes: int, void: str | None) -> StageMemory:
    """From the steps of one run; `kv_bytes` are those of one token."""
    steps = done.counts.steps
    spans = [step.ended - step.began for step in steps]
    held = sum(span * step.reserved_bytes for span, step in zip(spans, steps, strict=True))
    used = sum(span * step.stored_tokens * kv_bytes for span, step in zip(spans, steps, strict=True))
    begins, end = [step.began for step in steps], steps[-1].ended
    sampled = [steps[max(0, bisect_right(begins, end * (i + 0.5) / POINTS) - 1)] for i in range(POINTS)]
    return StageMemory(
        stage=done.stage,
        void=void,
        steps=len(steps),
        peak_reserved=done.counts.peak_reserved_bytes,
        peak_live=done.counts.peak_stored_tokens * kv_bytes,
        share_used=used / held if held else None,
        reserved=[step.reserved_bytes for step in sampled],
        live=[step.stored_tokens * kv_bytes for step in sampled],
    )


# ---- activations


def scores_bytes(config: Config, dtype: torch.dtype, chunk: int, prompt: int) -> int:
    """What `attention.sdpa` holds at once for the last chunk of a prompt: the scores and their softmax, both in
    float32 at least, and where the model is narrower a third copy in its own dtype."""
    wide = max(4, dtype.itemsize)
    each = 2 * wide + (dtype.itemsize if dtype.itemsize < wide else 0)
    return config.n_heads * chunk * prompt * each


def long_prompt(model: Llama, job: Job, chunk: int) -> tuple[Run, int]:
    """The run, and the bytes by which the process (or the GPU's memory) grew at most, less those of K and V.

    Each size runs twice and the second is measured: the first compiles kernels for every new shape, and those stay.
    All sizes run in one process, from small to large. Freed memory is given back to the system in between (see
    `PeakMemory`), but the gaps it leaves differ: what is left of a larger run would count for a smaller one.
    Raises OSError where the system does not tell.
    """
    stage = "cached" if chunk == len(job.prompt) else "chunked"
    run(model, stage, [job], {"chunk": chunk})
    memory = PeakMemory(model.device)
    done = run(model, stage, [job], {"chunk": chunk})
    return done, max(0, memory.grown() - done.counts.peak_reserved_bytes)


# ---- both


def measure(
    model: Llama,
    name: str,
    workload: Workload,
    console: Console,
    preset: Preset = QUICK,
    stages: Sequence[str] | None = None,
    prompt: int = 2048,
    chunks: Sequence[int] = CHUNKS,
    plan: fragmentation.Plan | None = None,
) -> Result:
    """The long prompt in every chunk size, then the main set once through each stage (None: all that keep K and V),
    then the memory in blocks (None: not).

    Ctrl-C: what was measured is kept and the result is partial; before the first number it is raised again.
    Raises InputError as `check` and `check_text`.
    """
    began = time.perf_counter()
    check(model.config, stages, prompt, chunks)
    check_text(workload.text, prompt)
    names = [stage for stage in ladder.pick_stages(stages) if stages is not None or stage in KEEPING]
    sizes = [*sorted({chunk for chunk in chunks if chunk < prompt}), prompt]
    job = Job(tuple(workload.text[:prompt]), NEW)
    long: list[tuple[int, Run, int]] = []
    runs: list[Run] = []
    notes: list[str] = []
    partial = False
    try:
        with ladder.progress(console) as bar:
            task = bar.add_task("", total=len(sizes) + len(names))
            try:
                for chunk in sizes:
                    bar.update(task, description=f"A prompt of {prompt:,} tokens in chunks of {chunk}")
                    long.append((chunk, *long_prompt(model, job, chunk)))
                    bar.advance(task)
            except OSError as error:
                notes.append(f"Activations were not measured: this system does not tell a process's peak ({error}).")
                bar.advance(task, len(sizes))
            jobs = ladder.fix_lengths(model, "main", workload.sets["main"], workload, preset, bar)
            for stage in names:
                bar.update(task, description=f"K and V of {stage}")
                runs.append(run(model, stage, jobs, preset.limits))
                bar.advance(task)
    except KeyboardInterrupt:
        partial = True
        if not long and not runs:
            raise
    verifier = Verifier(model)
    most_excused = MOST_EXCUSED if workload.weights == "real" else 1.0  # random logits lie close together
    kv_bytes = model.config.kv_bytes_per_token(model.dtype.itemsize)
    with console.status("Checking every token against the naive model"):
        found = [of_stage(done, kv_bytes, judge([done], verifier, most_excused).void) for done in runs]
        activations = [
            Activation(
                chunk=chunk,
                whole=chunk == prompt,
                peak=peak,
                scores=scores_bytes(model.config, model.dtype, chunk, prompt),
                void=judge([done], verifier, most_excused=1.0).void,  # too few tokens for a share
            )
            for chunk, done, peak in long
        ]
    blocks = None
    if plan and not partial:
        try:
            blocks, partial = fragmentation.measure(model, workload.text, plan, verifier, most_excused, console)
        except KeyboardInterrupt:
            partial = True
    return Result(
        about=machine.describe(model.device),
        model={"name": name, "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)},
        limits=preset.limits,
        requests=len(workload.sets["main"]),
        prompt=prompt,
        stages=found,
        activations=activations,
        partial=partial,
        seconds=time.perf_counter() - began,
        notes=notes,
        blocks=blocks,
    )


# ---- for people


def finding(result: Result) -> str:
    """What the numbers show, a sentence or two for each part."""
    return " ".join([pictured(result), *([fragmentation.finding(result.blocks)] if result.blocks else [])])


def pictured(result: Result) -> str:
    """The same, of what the plot shows."""
    lines = []
    shown = [s for s in result.stages if s.share_used is not None and not s.void and s.stage not in BLOCKS]
    if shown:
        last = shown[-1]
        assert last.share_used is not None
        lines.append(
            f"Of the K and V memory that {last.stage} holds, {1 - last.share_used:.0%} is waste over the run: every "
            "region is sized for the longest text, and shorter texts, young ones and free places leave it empty."
        )
    right = [a for a in result.activations if not a.void]
    if right and right[-1].whole and len(right) > 1:
        lines.append(
            f"A prompt of {result.prompt:,} tokens needs {right[-1].peak / 1e6:,.0f} MB beyond weights, K and V in "
            f"one step, and {right[0].peak / 1e6:,.0f} MB in chunks of {right[0].label}."
        )
    return " ".join(lines) or "Nothing was measured that could be compared."


def heading(result: Result) -> str:
    """What was measured and on what, in one line."""
    m = result.model
    return f"{m['name']}, {m['dtype']}, {device_name(result.about)}"


def show(result: Result, console: Console) -> None:
    console.print()
    console.print(Text(heading(result), style="bold"))
    if result.stages:
        console.print(stages_table(result))
    if result.activations:
        console.print(activations_table(result))
    if blocks := result.blocks:
        console.print(fragmentation.counted_table(blocks))
        if blocks.served:
            console.print(fragmentation.served_table(blocks))
        if blocks.claims:
            console.print(claims_table(blocks.claims))
    console.print(Text(finding(result)))
    stopped = ["Stopped half way: what was measured until then."] if result.partial else []
    for note in [*result.notes, *stopped, f"{result.seconds:.0f} s in all."]:
        console.print(Text(note, style="dim"))


def stages_table(result: Result) -> Table:
    void = "".join(f" {s.stage} is void: {s.void}." for s in result.stages if s.void)
    table = new_table(
        f"K and V of {result.requests} real prompts, at most {result.limits['max_running']} texts at once",
        "reserved: bytes allocated. live: bytes of tokens that a running text needs. used: live over reserved, both "
        "summed over the time of the run; the rest is waste. paged and shared give theirs out in blocks, but here they "
        f"have as much as regions would take: see below what blocks save.{void}",
        ("stage", "steps", "peak reserved", "peak live", "used", "waste"),
    )
    table.min_width = WIDTH
    for s in result.stages:
        if s.void:
            table.add_row(s.stage, Text("void", style="red"))
            continue
        table.add_row(
            s.stage,
            f"{s.steps:,}",
            f"{s.peak_reserved / 1e6:,.1f} MB",
            f"{s.peak_live / 1e6:,.1f} MB",
            "-" if s.share_used is None else f"{s.share_used:.0%}",
            "-" if s.share_used is None else Text(f"{1 - s.share_used:.0%}", style="bold"),
        )
    return table


def activations_table(result: Result) -> Table:
    void = "".join(f" {a.label} is void: {a.void}." for a in result.activations if a.void)
    table = new_table(
        f"Activations of one prompt of {result.prompt:,} tokens",
        "peak: most memory above weights, K and V, measured from outside; gaps between tensors count. scores: "
        "predicted, heads x chunk x prompt x the bytes of the copies of a score that attention holds at once; the "
        f"layers' other tensors and the gaps come on top.{void}",
        ("chunk", "peak", "scores"),
    )
    table.min_width = WIDTH
    for a in result.activations:
        peak = Text("void", style="red") if a.void else Text(f"{a.peak / 1e6:,.0f} MB", style="bold")
        table.add_row(a.label, peak, f"{a.scores / 1e6:,.0f} MB")
    return table


def alt_text(result: Result) -> str:
    """The plot in words, for those who do not see it."""
    kept = "; ".join(
        f"{s.stage} void"
        if s.void
        else f"{s.stage} {s.peak_reserved / 1e6:,.1f} and {s.peak_live / 1e6:,.1f} MB"
        + ("" if s.share_used is None else f", {1 - s.share_used:.0%} waste")
        for s in result.stages
    )
    peaks = ", ".join(f"{a.label}: {'void' if a.void else f'{a.peak / 1e6:,.0f} MB'}" for a in result.activations)
    return (
        f"Charts of {heading(result)}. One panel for each stage, K and V memory over the run, reserved as a line and "
        f"live as an area; peaks: {kept or 'not measured'}. Last, peak activations of a prompt of {result.prompt:,} "
        f"tokens by size of chunk: {peaks or 'not measured'}. {pictured(result)}"
    )


def plot(result: Result) -> Figure:
    """Left: what each stage holds and needs. Right: what a long prompt needs. Readable without colour."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading(result), fontsize=11)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(2.1, 1))[0]
    draw_stages(left, result)
    draw_activations(right.subplots(), result)
    return figure


def draw_stages(figure: Any, result: Result) -> None:
    columns = max(1, -(-len(result.stages) // 2))
    rows = 2 if len(result.stages) > 1 else 1
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    share = [100 * (i + 0.5) / POINTS for i in range(POINTS)]
    for axes, s in zip(grid, result.stages, strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(s.stage, loc="left", fontsize=11)
        if s.void:
            axes.text(0.5, 0.5, "void", transform=axes.transAxes, ha="center")
            continue
        reserved, live = ([n / 1e6 for n in values] for values in (s.reserved, s.live))
        axes.fill_between(share, live, step="mid", color="0.7", label="live: tokens that are needed")
        axes.step(share, reserved, where="mid", color="black", linewidth=1.4, label="reserved")
        waste = "nothing reserved" if s.share_used is None else f"{1 - s.share_used:.0%} waste"
        axes.set_title(waste, loc="right", fontsize=10)
    for axes in grid[len(result.stages) :]:
        axes.set_axis_off()
    grid[0].set_ylim(bottom=0)
    grid[0].set_xlim(0, 100)
    grid[0].set_xticks((0, 50, 100))
    drawn = [axes for axes in grid if axes.get_legend_handles_labels()[0]]
    if drawn:
        figure.legend(*drawn[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False)
    figure.supxlabel("share of the run's time, in %", fontsize=10)
    figure.supylabel("K and V, in MB", fontsize=10)


def draw_activations(axes: Any, result: Result) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Activations, prompt of {result.prompt:,} tokens", loc="left", fontsize=11)
    shown = [a for a in result.activations if not a.void]
    if not shown:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
        return
    at = range(len(shown))
    axes.plot(at, [a.peak / 1e6 for a in shown], color="black", marker="o", label="peak, measured")
    axes.plot(
        at, [a.scores / 1e6 for a in shown], color="0.4", marker="x", linestyle="--", label="scores alone, predicted"
    )
    for i, a in enumerate(shown):
        falls = i > 0 and shown[i - 1].peak > a.peak  # the line comes from above
        where, side = ((0, -14), "center") if falls else ((-6, 5), "right")
        axes.annotate(f"{a.peak / 1e6:,.0f}", (i, a.peak / 1e6), where, textcoords="offset points", ha=side)
    axes.set_xticks(at, [a.label for a in shown])
    axes.set_xlabel("chunk, in tokens")
    axes.set_ylabel("MB above weights, K and V")
    axes.margins(x=0.15, y=0.12)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


# ---- the command


def as_json(result: Result) -> dict[str, Any]:
    return {"alt_text": alt_text(result), "finding": finding(result), **asdict(result)}


def run_command(
    model: str,
    device: str,
    dtype: str,
    json_path: Path | None,
    plot_path: Path | None,
    console: Console,
    stages: Sequence[str] | None = None,
    prompt: int = 2048,
    chunks: Sequence[int] = CHUNKS,
    plan: fragmentation.Plan | None = None,
) -> int:
    """`minillm bench memory`. Returns the exit status: 1 if a text is not the naive model's.

    Raises InputError as `check`, and for a file that cannot be written, before the weights are loaded.
    After Ctrl-C it shows and saves what was measured, and raises KeyboardInterrupt again.
    """
    from minillm.fetch import find
    from minillm.tokenizer import Tokenizer

    results.check_room(json_path)
    results.check_plot(plot_path)
    folder = find(model)
    config = Config.from_folder(folder)
    check(config, stages, prompt, chunks)
    if plan:
        plan.check(config)
    workload = real_workload(Tokenizer.from_pretrained(folder), QUICK, config)
    check_text(workload.text, prompt)
    llama = load_model(folder, device, dtype, console)
    result = measure(llama, folder.name, workload, console, QUICK, stages, prompt, chunks, plan)
    show(result, console)
    results.save(console, json_path, "memory", lambda: as_json(result), plot_path, lambda: plot(result))
    if result.partial:
        raise KeyboardInterrupt
    void = [s.void for s in result.stages] + [a.void for a in result.activations]
    void += [row.void for row in result.blocks.served] if result.blocks else []
    return 1 if any(void) else 0
