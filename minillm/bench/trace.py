"""`minillm trace`: one run of one stage, step by step, as a picture and for a trace viewer."""

import functools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.text import Text

from minillm.bench import load_model, results, workload
from minillm.bench.harness import Job, Run, run
from minillm.bench.ladder import pick_stages
from minillm.bench.timeline import (
    COMPUTED,
    Cell,
    Timeline,
    alt_text,
    heading,
    make_timeline,
    peak_reserved,
    share_of_pads,
    show_text,
    spans,
)
from minillm.config import Config
from minillm.errors import InputError
from minillm.fetch import find
from minillm.model import Llama
from minillm.request import Event, Request, TextCodec
from minillm.stages import STAGES
from minillm.tokenizer import Tokenizer

MAX_RUNNING, BUDGET = 4, 128  # unless told otherwise: small, so that a picture shows waiting and chunks
LONGEST = 400  # tokens of a prompt


def run_command(
    stage: str,
    model: str,
    device: str,
    dtype: str,
    requests: int,
    max_running: int | None,
    budget: int | None,
    max_tokens: int,
    arrivals_rate: float | None,
    out: Path | None,
    chrome: Path | None,
    text: bool,
    console: Console,
    by: str = "step",
) -> int:
    """`minillm trace`: runs the package's first prompts through a stage once, and shows what happened when.

    arrivals_rate  requests per second, at random (Poisson); None: all are there at the start
    out, chrome    a picture, and JSON for a trace viewer; with neither, the text is shown
    by             "step": the picture's columns are equally wide; "time": as wide as they took

    Raises InputError for anything that cannot work, before the weights are read. After Ctrl-C writes what was
    traced until then, marked partial, and raises KeyboardInterrupt again. Returns the exit status.
    """
    limits = pick_limits(stage, max_running, budget)
    for name, value in (("requests", requests), ("max_tokens", max_tokens)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if arrivals_rate is not None and not 0.001 <= arrivals_rate < math.inf:
        raise InputError(f"the arrival rate is {arrivals_rate:g}; it must be at least 0.001 requests per second")
    if by not in ("step", "time"):
        raise InputError(f"the picture by {by!r} is not known; use step or time")
    results.check_plot(out)
    results.check_writable(chrome, [".json"])

    folder = find(model)
    tokenizer = Tokenizer.from_pretrained(folder)
    jobs = make_jobs(tokenizer, Config.from_folder(folder), requests, max_tokens, arrivals_rate)
    llama = load_model(folder, device, dtype, console)
    with console.status(f"Running {stage}"):
        done, timeline = trace(llama, stage, jobs, limits, tokenizer)
    if not timeline.steps:
        raise KeyboardInterrupt  # stopped so early that there is nothing to show
    if text or not (out or chrome):
        show_text(timeline, console)
    name = f"{folder.name}, {str(llama.dtype).removeprefix('torch.')} on {llama.device}"
    show_summary(timeline, done, name, console)
    if out is not None:
        save_picture(timeline, by, name, out)
        console.print(Text(f"Picture: {out}"))
    if chrome is not None:
        chrome.write_text(json.dumps(chrome_trace(timeline, name), allow_nan=False), encoding="utf-8")
        console.print(Text(f"Trace: {chrome} (open it in https://ui.perfetto.dev)"))
    if timeline.partial:
        raise KeyboardInterrupt
    return 0


def pick_limits(stage: str, max_running: int | None, budget: int | None) -> dict[str, int]:
    """The limits that the stage knows. Raises InputError for others, and for sizes that cannot work."""
    pick_stages([stage])
    known = signature(STAGES[stage]).parameters
    for name, value in (("max_running", max_running), ("budget", budget)):
        if value is not None and name not in known:
            raise InputError(f"stage {stage!r} has no limit --{name.replace('_', '-')}; leave it out")
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    limits = {
        "max_running": MAX_RUNNING if max_running is None else max_running,
        "budget": BUDGET if budget is None else budget,
        "chunk": BUDGET,
    }
    if "budget" in known and limits["budget"] < limits["max_running"]:
        raise InputError(
            f"budget is {limits['budget']}; it must be at least the {limits['max_running']} requests that may run, "
            "a token for each"
        )
    return {name: value for name, value in limits.items() if name in known}


def make_jobs(tokenizer: Tokenizer, config: Config, requests: int, max_tokens: int, rate: float | None) -> list[Job]:
    """The package's prompts of at most LONGEST tokens, with the model's own ends; the first arrives at 0."""
    preset = replace(workload.QUICK, main=requests, main_longest=LONGEST, main_cap=max_tokens)
    jobs = workload.real_workload(tokenizer, preset, config).sets["main"]
    if len(jobs) < requests:
        raise InputError(f"requests is {requests}; there are {len(jobs)} prompts short enough for a picture")
    draw = random.Random(0)
    arrival = 0.0
    timed = []
    for job in jobs:
        timed.append(replace(job, arrival=arrival))
        arrival += draw.expovariate(rate) if rate else 0.0
    return timed


def trace(
    model: Llama, stage: str, jobs: Sequence[Job], limits: dict[str, int], tokenizer: TextCodec | None
) -> tuple[Run, Timeline]:
    """One run, after a tiny one to warm up. Ctrl-C ends it early; what was done until then comes back as partial."""
    run(model, stage, [Job(jobs[0].prompt[:8], 2)], limits)
    stopped: list[bool] = []

    @functools.wraps(STAGES[stage])  # the harness looks at the limits in its signature
    def stoppable(model: Llama, requests: Iterable[Request], **limits: int) -> Iterator[Event]:
        try:
            yield from STAGES[stage](model, requests, **limits)
        except KeyboardInterrupt:
            stopped.append(True)

    done = run(model, stage, jobs, limits, tokenizer, generate=stoppable)
    token_bytes = model.config.kv_bytes_per_token(model.dtype.itemsize)
    return done, make_timeline(done, limits, token_bytes, bool(stopped))


def show_summary(timeline: Timeline, done: Run, name: str, console: Console) -> None:
    t, summary = timeline, done.summary
    console.print(Text(heading(t), style="bold"))
    console.print(Text(name, style="dim"))
    kinds = [f"{kind} {sum(t.tokens(kind)):,}" for kind in COMPUTED if any(t.tokens(kind))]
    console.print(Text(f"tokens pushed: {', '.join(kinds)}, pads {sum(t.pads):,} ({share_of_pads(t):.0%})"))
    line = f"wait: {sum(t.waits) / len(t.waits):.2f} s on average, {max(t.waits):.2f} s at most"
    if summary.ttft is not None:
        line += f"; to the first token: {summary.ttft.mean:.2f} s on average (ttft)"
    console.print(Text(line))
    used = max(t.used_bytes) / 1e6
    console.print(Text(f"KV at its peak: {peak_reserved(t) / 1e6:,.1f} MB reserved, {used:,.1f} MB in use"))


# ---- the picture

# Colours that people with any kind of colour vision tell apart (Okabe & Ito 2008); in grey, hatches do.
LOOKS = {
    "prefill": ("#0072B2", "", "prefill: a piece of the prompt, and its tokens"),
    "decode": ("#F0E442", "//", "decode: one more token"),
    "again": ("#CC79A7", "\\\\\\\\", "the whole text computed again"),
    "waiting": ("#FFFFFF", "...", "waiting"),
    "idle": ("#56B4E9", "---", "idle: has a place, no token in this step"),
    "held": ("#D55E00", "xxxx", "pads: beside its tokens, or after its end"),
}
IN_USE = "#009E73"
WIDTH = 13.0  # inches


def draw(timeline: Timeline, by: str = "step", name: str = "") -> Figure:
    """Requests by steps; below, the tokens of each step against the most it may hold, and the KV memory.

    `by` is "step" (columns equally wide) or "time" (seconds); `name` says what it ran on.
    """
    t, n = timeline, len(timeline.cells)
    height = 0.32 if n <= 16 else 0.24 if n <= 28 else 0.19  # of a row, in inches
    figure = Figure(figsize=(WIDTH, 5.2 + height * max(n, 5)), layout="constrained")
    FigureCanvasAgg(figure)
    with rc_context({"hatch.linewidth": 0.5}):
        grid, tokens, memory = figure.subplots(3, 1, sharex=True, height_ratios=[height * max(n, 5) + 0.3, 1.5, 1.2])
        if by == "step":
            left, right = [k + 0.5 for k in range(len(t.steps))], [k + 1.5 for k in range(len(t.steps))]
            begin, label = 0.5, "step"
            memory.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        else:
            left, right = [step.began for step in t.steps], [step.ended for step in t.steps]
            begin, label = 0.0, "seconds since the start"
        grid.set_xlim(begin, right[-1])
        memory.set_xlabel(label)
        draw_requests(grid, t, by, left, right, 0.9 * WIDTH * 72 / (right[-1] - begin), 72 * height)
        draw_tokens(tokens, t, left, right)
        draw_memory(memory, t, [*left, right[-1]])
        told = {kind: words for kind, (_, _, words) in LOOKS.items()}
        if not grid.texts:  # no piece had room for its number
            told["prefill"] = told["prefill"].removesuffix(", and its tokens")
        seen = {cell.kind for cells in t.cells for cell in cells.values()} | ({"held"} if any(t.pads) else set())
        figure.legend(
            handles=[
                Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.5, label=told[kind])
                for kind, (colour, hatch, _) in LOOKS.items()
                if kind in seen
            ],
            loc="outside lower left",
            ncols=4,
            frameon=False,
            fontsize=9,
        )
    figure.suptitle(heading(t), x=0.01, ha="left", fontsize=13, weight="bold")
    wait = f"wait: {sum(t.waits) / n:.2f} s on average, {max(t.waits):.2f} s at most"
    grid.set_title(f"{name}   pads: {share_of_pads(t):.0%} of the tokens   {wait}".strip(), loc="left", fontsize=10)
    for axes in (grid, tokens, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_requests(
    axes: Axes, t: Timeline, by: str, left: Sequence[float], right: Sequence[float], unit: float, height: float
) -> None:
    """`unit` is the width of 1 on the x axis, `height` that of a row, both in points."""
    for i, cells in enumerate(t.cells):
        for span in spans(cells):
            x, end = left[span.first], right[span.last]
            if by == "time" and span.kind == "waiting":
                x, end = t.arrivals[i], t.arrivals[i] + t.waits[i]
            bar(axes, span.kind, x, end, i - 0.42, 0.84)
            if span.kind == "prefill":
                free = 0.56 if cells[span.first].pads else 0.84  # the pads' strip takes the rest
                number(axes, span.n, (x + end) / 2, i - 0.42 + free / 2, (end - x) * unit, free * height)
        for span in spans({k: Cell("held") for k, cell in cells.items() if cell.pads and cell.n}):
            bar(axes, "held", left[span.first], right[span.last], i + 0.14, 0.28)
    labels = [f"{i + 1}  ({t.prompts[i]} + {t.outputs[i]})" for i in range(len(t.cells))]
    axes.set_yticks(range(len(t.cells)), labels, fontsize=min(9, 0.5 * height))
    axes.set_ylim(len(t.cells) - 0.4, -0.6)
    axes.set_ylabel("request\n(prompt + new tokens)")


def bar(axes: Axes, kind: str, x: float, end: float, y: float, height: float) -> None:
    colour, hatch, _ = LOOKS[kind]
    axes.broken_barh([(x, end - x)], (y, height), facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.4)


def number(axes: Axes, n: int, x: float, y: float, width: float, height: float) -> None:
    """The tokens of a piece of a prompt, where there is room: across, else upright. Sizes are in points."""
    digit = 0.65  # its width, for a font of size 1
    across = min(8.0, 0.7 * height, width / (digit * len(str(n)) + 0.3))
    upright = min(8.0, 0.9 * width, height / (digit * len(str(n)) + 0.3))
    if max(across, upright) >= 6:
        turn = 90 if across < 6.5 and upright > across else 0
        size = upright if turn else across
        axes.text(x, y, str(n), ha="center", va="center", fontsize=size, color="white", rotation=turn)


def draw_tokens(axes: Axes, t: Timeline, left: Sequence[float], right: Sequence[float]) -> None:
    widths = [end - x for x, end in zip(left, right, strict=True)]
    bottom = [0] * len(t.steps)
    for kind in ("decode", "prefill", "again", "held"):
        values = t.pads if kind == "held" else t.tokens(kind)
        if any(values):
            colour, hatch, _ = LOOKS[kind]
            axes.bar(
                left, values, widths, bottom, align="edge", color=colour, hatch=hatch, edgecolor="black", linewidth=0.2
            )
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    if t.most_tokens is not None:
        axes.axhline(t.most_tokens, color="black", linestyle="--", linewidth=1)
        words = f"{'budget' if 'budget' in t.limits else 'chunk'}: {t.most_tokens} "
        axes.text(right[-1], t.most_tokens, words, ha="right", va="bottom", fontsize=9)
    axes.set_ylim(0, 1.25 * max(*bottom, t.most_tokens or 0))
    axes.set_ylabel("tokens\nin the step")


def draw_memory(axes: Axes, t: Timeline, edges: Sequence[float]) -> None:
    reserved, used = [step.reserved_bytes / 1e6 for step in t.steps], [nbytes / 1e6 for nbytes in t.used_bytes]
    axes.set_ylabel("KV memory\n(MB)")
    if not any(reserved):
        axes.text(0.5, 0.5, "this stage keeps no K and V", transform=axes.transAxes, ha="center", va="center")
        axes.set_yticks([0])
        return
    axes.stairs(reserved, edges, color="black", linewidth=1.2, baseline=None, label="reserved")
    axes.stairs(
        used, edges, fill=True, facecolor=IN_USE, hatch="////", edgecolor="black", linewidth=0.3, label="in use"
    )
    axes.set_ylim(0, 1.45 * max(reserved))
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=9)


def save_picture(timeline: Timeline, by: str, name: str, path: Path) -> None:
    """The alt text goes into the file too."""
    key = {".png": "Description", ".svg": "Description", ".pdf": "Subject"}[path.suffix]
    draw(timeline, by, name).savefig(path, dpi=150, metadata={key: alt_text(timeline)})


# ---- the trace viewer's file

ENGINE, REQUESTS = 1, 2  # "processes" of the viewer: headings for groups of lines


def chrome_trace(timeline: Timeline, name: str = "") -> dict[str, Any]:
    """The trace event format of Chrome, which Perfetto reads. Times are in whole microseconds: after rounding, what
    ends where another begins still does not overlap."""
    t = timeline
    events = [named(ENGINE, 0, "process_name", f"{t.stage} {name}".strip()), named(ENGINE, 0, "thread_name", "steps")]
    events.append(named(REQUESTS, 0, "process_name", "requests"))
    computed = {kind: t.tokens(kind) for kind in COMPUTED}
    for k, step in enumerate(t.steps):
        args = {"step": k + 1, "tokens": step.tokens, "requests": len(step.new), "pads": t.pads[k]}
        args |= {kind: values[k] for kind, values in computed.items() if any(values)}
        events.append(interval(ENGINE, 0, f"step {k + 1}", step.began, step.ended, args))
    for i, cells in enumerate(t.cells):
        events.append(
            named(REQUESTS, i + 1, "thread_name", f"request {i + 1} ({t.prompts[i]} + {t.outputs[i]} tokens)")
        )
        if t.waits[i] > 0:
            events.append(
                interval(REQUESTS, i + 1, "waiting", t.arrivals[i], t.arrivals[i] + t.waits[i], {"seconds": t.waits[i]})
            )
        pieces = [k for k, cell in cells.items() if cell.kind == "prefill"]
        for k, cell in cells.items():
            if cell.kind == "waiting":
                continue  # it is one interval, above
            words = f"prefill {pieces.index(k) + 1} of {len(pieces)}" if cell.kind == "prefill" else cell.kind
            args = {"step": k + 1, "n": cell.n, "start": cell.start, "pads": cell.pads}
            events.append(interval(REQUESTS, i + 1, words, t.steps[k].began, t.steps[k].ended, args))
    events += counters(t, computed)
    return {
        "traceEvents": sorted(events, key=lambda event: event["ts"]),
        "displayTimeUnit": "ms",
        "otherData": {"heading": heading(t), "about": name, "partial": t.partial, "alt_text": alt_text(t)},
    }


def counters(t: Timeline, computed: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Lines over time: each value holds from the beginning of its step; tokens and requests are 0 where nobody runs."""
    events = []
    running = [[k for k, cell in cells.items() if cell.kind in (*COMPUTED, "idle")] for cells in t.cells]
    for k, step in enumerate(t.steps):
        waiting = sum(k in cells and cells[k].kind == "waiting" for cells in t.cells)
        busy: dict[str, Mapping[str, float]] = {
            "tokens in the step": {kind: row[k] for kind, row in computed.items() if any(row)} | {"pads": t.pads[k]},
            "requests": {"running": sum(k in steps for steps in running), "waiting": waiting},
        }
        if t.most_tokens is not None:
            busy["share of the most tokens in %"] = {"used": round(100 * step.tokens / t.most_tokens)}
        memory = {"reserved": step.reserved_bytes / 1e6, "in use": t.used_bytes[k] / 1e6}
        events += [counter(name, step.began, values) for name, values in (*busy.items(), ("KV memory in MB", memory))]
        if not any(steps and steps[0] <= k < steps[-1] for steps in running):
            events += [counter(name, step.ended, dict.fromkeys(values, 0)) for name, values in busy.items()]
    return events


def named(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def interval(pid: int, tid: int, name: str, began: float, ended: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "ts": microseconds(began),
        "dur": microseconds(ended) - microseconds(began),
        "pid": pid,
        "tid": tid,
        "name": name,
        "args": args,
    }


def counter(name: str, at: float, values: Mapping[str, float]) -> dict[str, Any]:
    return {"ph": "C", "ts": microseconds(at), "pid": ENGINE, "tid": 0, "name": name, "args": values}


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
