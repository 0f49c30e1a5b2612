"""The attention backends side by side: `minillm bench --backends`.

One layer's attention, without the rest of a model: texts that decode, over how many there are and how far each looks
back, and chunks of a prompt. Every answer is compared with the reference's before any time is shown. The floor is what
no backend can do without: reading the live K and V once, as fast as this machine reads or copies, or, where it takes
longer, the multiplications (the roofline model, Williams, Waterman & Patterson 2009).
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import ceiling, ladder, machine, results
from minillm.bench.ceiling import Ceilings
from minillm.bench.metrics import Stats
from minillm.bench.tables import device_name, new_table, times
from minillm.config import Config
from minillm.device import pick_device, pick_dtype
from minillm.errors import InputError, check_range, whole_number
from minillm.kernels import BACKENDS, why_not
from minillm.kernels.choose import REFERENCE, TOLERANCE, Chunks, Probe, answer, attention_only, judge, race
from minillm.model import Llama

NBYTES = 2**28  # of K and V in the layers that take turns: far more than a cache holds
MOST_SCORES = 2**21  # `dense` makes new tokens x all positions for each head: beyond this it is left out
WIDTH = 70  # of a table with few columns, in characters: room for its caption
CEILING_SECONDS = 0.3  # for each of three


@dataclass(frozen=True)
class Plan:
    """What is run. Raises InputError for sizes that make no sense."""

    batches: tuple[int, ...] = (1, 8, 32, 64)  # texts that decode at once
    contexts: tuple[int, ...] = (128, 512, 2048)  # positions that each of them looks at
    chunk: int = 256  # new tokens of a prompt
    starts: tuple[int, ...] = (0, 1024)  # tokens of it that were computed before
    rounds: int = 50  # at most, for each point
    seconds: float = 5.0  # for the rounds of a point; three are run in any case

    def __post_init__(self) -> None:
        if not self.batches or not self.contexts:
            raise InputError("there is nothing to measure; give at least one batch and one context")
        for name, least in (("batches", 1), ("contexts", 1), ("starts", 0)):
            for value in getattr(self, name):
                whole_number(name, value, least)
        whole_number("chunk", self.chunk, 2)
        whole_number("rounds", self.rounds, 1)
        check_range("seconds", self.seconds, 0, 3600)

    def points(self) -> list[Chunks]:
        """Single tokens, then chunks: (computed, new) of each text."""
        decode = [[(context - 1, 1)] * batch for batch in self.batches for context in self.contexts]
        return [*decode, *([(start, self.chunk)] for start in self.starts)]


@dataclass
class Entry:
    """One backend at one point. `void` says why its times are not shown; the rest is then None."""

    backend: str
    difference: float | None  # the largest from the reference; None: it gave no numbers
    void: str | None
    prepare: Stats | None = None  # seconds, once for all layers of a step
    layer: Stats | None = None  # seconds of one layer
    ratio: float | None = None  # how many times as fast as the reference in the same round, median


@dataclass
class Point:
    texts: int
    new: int  # tokens of each
    context: int  # positions that each looks at, the new ones included
    layers: int  # that took turns
    kv_bytes: int  # of one layer: the K and V that must be read
    flops: int  # of one layer: for the scores that are needed
    floor: float  # seconds of one layer
    rounds: int
    entries: list[Entry]

    @property
    def decodes(self) -> bool:
        return self.new == 1

    def entry(self, name: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.backend == name), None)

    def seconds(self, name: str) -> float | None:
        entry = self.entry(name)
        return entry.layer.median if entry and entry.layer else None

    @property
    def fastest(self) -> str | None:
        known = {entry.backend: entry.layer.median for entry in self.entries if entry.layer}
        return min(known, key=lambda name: known[name]) if known else None


@dataclass
class Result:
    """All that was found, as it goes into the JSON file."""

    about: dict[str, Any]
    model: dict[str, Any]
    plan: Plan
    tolerance: float  # see `choose.TOLERANCE`
    ceilings: Ceilings
    absent: dict[str, str]  # {backend: why it cannot run here}
    points: list[Point] = field(default_factory=list)
    partial: bool = False
    seconds: float = 0.0

    @property
    def names(self) -> list[str]:
        return [name for name in BACKENDS if name not in self.absent]

    @property
    def faults(self) -> list[tuple[Point, Entry]]:
        return [(point, entry) for point in self.points for entry in point.entries if entry.void]


# ---- measuring


def measure(
    config: Config, name: str, device: torch.device, dtype: torch.dtype, plan: Plan, console: Console
) -> Result:
    """Every point of the plan. After Ctrl-C: with what is whole; before the first point, it is raised again.

    No weights are needed: of the model only the shape counts.
    """
    began = time.perf_counter()
    model = attention_only(config, device, dtype)
    about = {
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
    }
    absent = {name: reason for name in BACKENDS if (reason := why_not(name, model)) is not None}
    with console.status("Measuring bandwidth and arithmetic"):
        ceilings = ceiling.measure(device, dtype, CEILING_SECONDS)
    result = Result(machine.describe(device), about, plan, TOLERANCE[dtype], ceilings, absent)
    try:
        with ladder.progress(console) as bar:
            task = bar.add_task("", total=len(plan.points()))
            for chunks in plan.points():
                start, new = chunks[0]
                bar.update(task, description=f"{len(chunks)} x {new} new tokens after {start:,}")
                result.points.append(measure_point(model, chunks, result.names, plan, ceilings))
                bar.advance(task)
    except KeyboardInterrupt:
        if not result.points:
            raise
        result.partial = True
    result.seconds = time.perf_counter() - began
    return result


def measure_point(model: Llama, chunks: Chunks, names: Sequence[str], plan: Plan, ceilings: Ceilings) -> Point:
    """Every backend's answer first, then rounds of those whose answer is right."""
    probe = Probe.of(model, chunks, NBYTES)
    expected = answer(REFERENCE, probe)  # [T, H, D]
    entries = []
    for name in names:
        if name != "dense" or dense_scores(chunks) <= MOST_SCORES:
            verdict = judge(name, probe, expected)
            entries.append(Entry(name, verdict.difference, verdict.fault))
    sound = [entry for entry in entries if not entry.void]
    raced = race([entry.backend for entry in sound], probe, plan.rounds, plan.seconds)
    reference = raced[REFERENCE]
    for entry in sound:
        mine = raced[entry.backend]
        entry.prepare = Stats.of([one.prepare for one in mine])
        entry.layer = Stats.of([one.layer for one in mine])
        entry.ratio = median(theirs.layer / ours.layer for theirs, ours in zip(reference, mine, strict=True))
    start, new = chunks[0]
    kv_bytes, flops = needed(model.config, model.dtype.itemsize, chunks)
    floor = max(kv_bytes / ceilings.bytes_per_s, flops / ceilings.flops_per_s)
    return Point(
        len(chunks), new, start + new, len(probe.pool.k), kv_bytes, flops, floor, rounds=len(reference), entries=entries
    )


def dense_scores(chunks: Chunks) -> int:
    """Of one head, if every new token is compared with every position of every text."""
    return sum(n for _, n in chunks) * sum(start + n for start, n in chunks)


def needed(config: Config, itemsize: int, chunks: Chunks) -> tuple[int, int]:
    """What one layer cannot do without: bytes of K and V to read, and floating point operations.

    Token i of a chunk sees start + i positions; a score costs D multiplications and D additions for q k^T, and as
    many for its share of the sum over v.
    """
    kv_bytes = sum(start + n for start, n in chunks) * config.kv_bytes_per_token(itemsize) // config.n_layers
    scores = config.n_heads * sum(n * start + n * (n + 1) // 2 for start, n in chunks)
    return kv_bytes, 4 * config.head_dim * scores


# ---- for people


def us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.0f}"


def wins(points: Sequence[Point]) -> str:
    """Which backends are the fastest, in how many of these points."""
    counted = Counter(point.fastest for point in points)
    return ", ".join(f"{name} ({n} of {len(points)})" for name, n in counted.most_common())


def finding(result: Result) -> str:
    """What the numbers show, in a few sentences."""
    decode, chunks = ([p for p in result.points if p.decodes == one] for one in (True, False))
    lines = [f"with one new token each: {wins(decode)}"] if decode else []
    lines += [f"with chunks of {result.plan.chunk}: {wins(chunks)}"] if chunks else []
    told = f"Fastest {'; '.join(lines)}."
    if decode:
        last = decode[-1]
        best = last.fastest
        taken, theirs = last.seconds(best) if best else None, last.seconds(REFERENCE)
        if best and taken and theirs:
            told += (
                f" {last.texts} texts that each look at {last.context:,} positions take {us(taken)} microseconds a "
                f"layer with {best}, {times(taken / last.floor)} the floor, and {us(theirs)} with {REFERENCE}."
            )
    return told


def heading(result: Result) -> str:
    m = result.model
    shape = f"{m['heads']}/{m['kv_heads']} heads of {m['head_dim']}"
    return f"{m['name']} ({shape}), {m['dtype']}, {device_name(result.about)}"


def show(result: Result, console: Console) -> None:
    console.print()
    console.print(Text(heading(result), style="bold"))
    console.print(names_table(result), times_table(result), ratios_table(result))
    for line in faults_in_words(result):
        console.print(Text(line, style="red"))
    console.print(Text(finding(result)))
    stopped = ["Stopped half way: what is whole until then."] if result.partial else []
    for note in [*stopped, f"{result.seconds:.0f} s in all."]:
        console.print(Text(note, style="dim"))


def faults_in_words(result: Result) -> list[str]:
    """A line for each backend with a fault: the first one, and how many there are."""
    lines = []
    for name in dict.fromkeys(entry.backend for _, entry in result.faults):
        mine = [(point, entry) for point, entry in result.faults if entry.backend == name]
        point, entry = mine[0]
        where = f"{point.texts} x {point.new} new tokens with {point.context:,} positions"
        lines.append(f"{name} is void at {len(mine)} of {len(result.points)} points; {where}: {entry.void}.")
    return lines


def names_table(result: Result) -> Table:
    table = new_table(
        "The backends here",
        f"difference: the largest from {REFERENCE}'s answer at any point, with K and V drawn from N(0, 1); a number x "
        f"may be off by {result.tolerance:g} (1 + |x|). prepare: microseconds of a step before its first layer, at the "
        "last point with one new token each.",
        ("backend", "difference", "prepare", "runs here"),
    )
    table.min_width = WIDTH
    table.columns[-1].justify = "left"
    table.columns[-1].no_wrap = False
    decode = [point for point in result.points if point.decodes]
    for name in BACKENDS:
        if name in result.absent:
            table.add_row(name, "", "", Text(f"no: {result.absent[name]}", style="dim"))
            continue
        entries = [entry for point in result.points if (entry := point.entry(name))]
        known = [entry.difference for entry in entries if entry.difference is not None]
        last = [entry.prepare.median for point in decode if (entry := point.entry(name)) and entry.prepare]
        void = any(entry.void for entry in entries)
        table.add_row(
            name,
            f"{max(known):.1e}" if known else "-",
            us(last[-1] if last else None),
            Text("void, see below", style="red") if void else "yes",
        )
    return table


def points_table(result: Result, title: str, caption: str, cell: Any, floor: bool) -> Table:
    """A row for each point, a column for each backend; the fastest one's cell is bold."""
    shown = ("texts", "new", "positions", *(["floor"] if floor else []), *result.names)
    table = new_table(title, caption, shown)
    table.min_width = WIDTH
    table.columns[0].justify = "right"
    for i, point in enumerate(result.points):
        cells: list[str | Text] = [f"{point.texts}", f"{point.new}", f"{point.context:,}"]
        cells += [us(point.floor)] if floor else []
        for name in result.names:
            entry = point.entry(name)
            text = "-" if entry is None else "void" if entry.void else cell(entry)
            cells.append(Text(text, style="bold" if name == point.fastest else ""))
        after = result.points[i + 1 :]
        table.add_row(*cells, end_section=bool(after) and (after[0].texts, after[0].new) != (point.texts, point.new))
    return table


def times_table(result: Result) -> Table:
    return points_table(
        result,
        "One layer of attention: microseconds",
        "texts: so many at once; new: tokens of each; positions: that each looks at. Medians of interleaved rounds, "
        "layer after layer. floor: live K and V at the speed of reading or of copying, whichever is higher, or the "
        "arithmetic if that takes longer. -: not run, too many scores.",
        lambda entry: us(entry.layer.median),
        floor=True,
    )


def ratios_table(result: Result) -> Table:
    return points_table(
        result,
        f"The same: how many times as fast as {REFERENCE}",
        "Medians of the ratios within each round.",
        lambda entry: times(entry.ratio),
        floor=False,
    )


def alt_text(result: Result) -> str:
    """The plot in words, for those who do not see it."""
    told = []
    for point in result.points:
        if point.decodes:
            known = ", ".join(f"{name} {us(s)}" for name in result.names if (s := point.seconds(name)) is not None)
            told.append(f"{point.texts} x {point.context:,}: {known}, floor {us(point.floor)}")
    return (
        f"Charts of {heading(result)}, one for each number of texts that decode at once: microseconds of one layer of "
        f"attention against the positions that each text looks at, a line for each backend, and the floor. "
        f"{'; '.join(told)}. {finding(result)}"
    )


def plot(result: Result) -> Figure:
    """A panel for each number of texts. Readable without colour: every backend has its own mark."""
    decode = [point for point in result.points if point.decodes]
    batches = list(dict.fromkeys(point.texts for point in decode))
    figure = Figure(figsize=(3.2 * max(2, len(batches)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"One layer of attention, one new token for each text\n{heading(result)}", fontsize=11)
    panels = figure.subplots(1, max(1, len(batches)), squeeze=False, sharey=True)[0]
    for axes, texts in zip(panels, batches, strict=False):
        points = [point for point in decode if point.texts == texts]
        draw(axes, points, result.names)
        axes.set_title(f"{texts} text{'s' if texts > 1 else ''}", loc="left", fontsize=11)
    panels[0].set_ylabel("microseconds")
    if batches:
        panels[0].legend(frameon=False, fontsize=9)
    return figure


def draw(axes: Any, points: Sequence[Point], names: Sequence[str]) -> None:
    contexts = [point.context for point in points]
    axes.plot(contexts, [point.floor * 1e6 for point in points], ":", color="black", label="floor")
    for i, name in enumerate(names):
        known = [(point.context, s * 1e6) for point in points if (s := point.seconds(name)) is not None]
        if known:
            x, y = zip(*known, strict=True)
            axes.plot(x, y, "-", marker="osD^vx+*"[i % 8], markersize=5, linewidth=1, color=f"C{i}", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.set_xlabel("positions")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


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
    plan: Plan | None = None,
) -> int:
    """`minillm bench --backends`. Returns the exit status: 1 if a backend's answer is not the reference's.

    Raises InputError for an unknown model, device or dtype and for a file that cannot be written, before anything is
    measured. After Ctrl-C it shows and saves what is whole, and raises KeyboardInterrupt again.
    """
    from minillm.fetch import find

    results.check_room(json_path)
    results.check_plot(plot_path)
    folder = find(model)
    config, there = Config.from_folder(folder), pick_device(device)
    result = measure(config, folder.name, there, pick_dtype(dtype, there), plan or Plan(), console)
    show(result, console)
    results.save(console, json_path, "backends", lambda: as_json(result), plot_path, lambda: plot(result))
    if result.partial:
        raise KeyboardInterrupt
    return 1 if result.faults else 0
