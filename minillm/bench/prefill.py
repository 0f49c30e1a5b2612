"""A long prompt arrives while others decode: how long do they stand still, and how long does it wait?

In one step a long prompt makes everyone wait until all of it is computed. Cut into chunks it takes more steps, each of
them short. The token budget of a step decides: what the running texts leave of it is the chunk (Sarathi-Serve, Agrawal
et al. 2024).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import ladder, load_model, machine, results
from minillm.bench.harness import Job, Run, run
from minillm.bench.metrics import itl
from minillm.bench.tables import device_name, new_table, times
from minillm.bench.verify import Verifier, judge
from minillm.bench.workload import QUICK, real_workload
from minillm.config import Config
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.model import Llama
from minillm.request import Event, Request
from minillm.stages import Generate

SHORT = 16  # tokens in the prompt of each running text
BEFORE = 16  # tokens that each has made when the long prompt arrives
AFTER = 16  # further tokens of each, after the slowest budget has computed the prompt
LONG_NEW = 8  # tokens that follow the long prompt
BUDGETS = (32, 64, 128, 256, 512)
WIDTH = 70  # of a table with few columns, in characters: room for its caption


@dataclass(frozen=True)
class Spread:
    """Of the rounds, in seconds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Round:
    """One run. Gaps are those between two tokens of one running text. All in seconds."""

    gap_before: float  # median before the long prompt arrived
    gap_longest: float  # from its arrival to its first token: how long the others stood still
    gap_p95: float  # the same time
    ttft: float  # of the long prompt
    total: float  # until the last of the running texts ended
    trace: list[tuple[float, float]]  # (seconds after the arrival, gap): one for each step


@dataclass
class Point:
    """One token budget. `void` says why its times are not shown; the rest is then None, but for the counts."""

    budget: int  # most tokens in one step
    chunk: int  # most tokens of the long prompt in one step
    whole: bool  # all of it in one step
    steps: int  # from the arrival to the first token of the long prompt
    largest_step: int  # most tokens in one of them
    same_text: bool  # token for token that of the first budget
    void: str | None
    gap_before: Spread | None = None
    gap_longest: Spread | None = None
    gap_p95: Spread | None = None
    ttft: Spread | None = None
    total: Spread | None = None
    trace: list[tuple[float, float]] | None = None  # of the round with the median of `gap_longest`

    @property
    def label(self) -> str:
        return "whole" if self.whole else str(self.budget)


@dataclass
class Result:
    """All that was found, as it goes into the JSON file."""

    about: dict[str, Any]
    model: dict[str, Any]
    prompt: int  # tokens of the long prompt
    running: int  # texts that decode when it arrives
    output: int  # tokens that each of them makes
    rounds: int  # timed ones; fewer than asked for if stopped
    points: list[Point]
    partial: bool
    seconds: float


# ---- what is asked


def check(config: Config, prompt: int, running: int, budgets: Sequence[int], rounds: int) -> list[int]:
    """The budgets to measure: in order, each once, and last the one that takes the whole prompt at once.

    Raises InputError for sizes that make no sense or that the model's context does not admit.
    """
    for name, value in (("prompt", prompt), ("running", running), ("rounds", rounds)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    for budget in budgets:
        if budget <= running:
            raise InputError(
                f"the token budget is {budget}; it must be at least {running + 1}: one for each of the {running} "
                "running texts, and one for the prompt"
            )
    whole = prompt + running
    kept = [*sorted({budget for budget in budgets if budget < whole}), whole]
    if prompt + LONG_NEW > config.context:
        raise InputError(
            f"the long prompt is {prompt} tokens; the model's context is {config.context}, so it may have "
            f"{config.context - LONG_NEW}"
        )
    longest = SHORT + n_output(prompt, running, kept)
    if longest > config.context:
        raise InputError(
            f"the token budget is {kept[0]}; the running texts would grow to {longest} tokens while the prompt is "
            f"computed, and the model's context is {config.context}: take a larger budget"
        )
    return kept


def n_steps(prompt: int, running: int, budget: int) -> int:
    """Steps that the prompt takes beside so many running texts, of one token each."""
    return -(-prompt // (budget - running))


def n_output(prompt: int, running: int, budgets: Sequence[int]) -> int:
    """Tokens of each running text: the same under every budget, and enough to outlast the prompt under all."""
    return BEFORE + n_steps(prompt, running, min(budgets)) + max(AFTER, LONG_NEW)


def make_jobs(text: Sequence[int], prompt: int, running: int, output: int) -> list[Job]:
    """The running texts, and last the long prompt: cut one after the other out of the ids in `text`."""
    short = running * SHORT
    if len(text) < short + prompt:
        raise InputError(f"the prompt is {prompt} tokens; there are {len(text)} in all, and {short} of them are taken")
    jobs = [Job(tuple(text[i : i + SHORT]), output) for i in range(0, short, SHORT)]
    return [*jobs, Job(tuple(text[short : short + prompt]), LONG_NEW)]


# ---- one run


def late(budget: int) -> Generate:
    """A continuous engine in which the last request comes when each of the others has made `BEFORE` tokens.

    They all begin in the first step, and `budget` holds from the arrival on: it meets the same state, whatever it is.
    """

    def generate(model: Llama, requests: Sequence[Request]) -> Iterator[Event]:
        *short, long = requests
        begin = max(len(requests), sum(len(request.prompt) for request in short))
        most = max(request.most_slots for request in requests)
        engine = Engine(model, max_running=len(requests), budget=begin, max_len=most)
        for request in short:
            engine.submit(request)
        for _ in range(BEFORE):
            yield from engine.step()
        engine.scheduler.budget = budget
        engine.submit(long)
        while engine.busy:
            yield from engine.step()

    return generate


def run_once(model: Llama, jobs: Sequence[Job], budget: int) -> Run:
    """One run, with the time at which the long prompt arrived."""
    done = run(model, "continuous", jobs, generate=late(budget))
    return replace(done, arrivals=[*done.arrivals[:-1], done.counts.steps[BEFORE - 1].ended])


def prompt_steps(done: Run) -> int:
    """Steps from the arrival to the first token of the long prompt, counted."""
    long, left, n = len(done.jobs) - 1, len(done.jobs[-1].prompt), 0
    for step in done.counts.steps[BEFORE:]:
        left -= step.new[long]
        n += 1
        if left == 0:
            return n
    raise AssertionError("the long prompt was never computed")


def timed(done: Run) -> Round:
    """A running text makes one token in every step, so its gap number i ends in step i + 1."""
    *short, long = done.times
    arrival, last = done.arrivals[-1], BEFORE - 1 + prompt_steps(done)
    gaps = [itl(one) for one in short]
    before = [gap for one in gaps for gap in one[: BEFORE - 1]]
    during = [gap for one in gaps for gap in one[BEFORE - 1 : last]]
    return Round(
        gap_before=median(before),
        gap_longest=max(during),
        gap_p95=float(np.percentile(during, 95)),
        ttft=long[0] - arrival,
        total=max(one[-1] for one in short),
        trace=[(at - arrival, gap) for at, gap in zip(short[0][1:], gaps[0], strict=True)],
    )


# ---- all of them


def measure(
    model: Llama,
    name: str,
    text: Sequence[int],
    console: Console,
    prompt: int = 1024,
    running: int = 16,
    budgets: Sequence[int] = BUDGETS,
    rounds: int = 3,
) -> Result:
    """Every budget once to warm up, then in interleaved rounds. Prompts are cut out of the token ids in `text`.

    Ctrl-C: the budgets that were measured are kept and the result is partial; before the first, it is raised again.
    Raises InputError as `check`.
    """
    began = time.perf_counter()
    kept = check(model.config, prompt, running, budgets, rounds)
    output = n_output(prompt, running, kept)
    jobs = make_jobs(text, prompt, running, output)
    runs: dict[int, list[Run]] = {budget: [] for budget in kept}
    partial = False
    try:
        with ladder.progress(console) as bar:
            task = bar.add_task("", total=(1 + rounds) * len(kept))
            for i in range(1 + rounds):
                shift = i % len(kept)  # each round begins with another budget
                for budget in kept[shift:] + kept[:shift]:
                    what = f"Round {i} of {rounds}" if i else "Warming up"
                    bar.update(task, description=f"{what}: a budget of {budget} tokens")
                    done = run_once(model, jobs, budget)
                    if i:
                        runs[budget].append(done)
                    bar.advance(task)
    except KeyboardInterrupt:
        partial = True
        if not any(runs.values()):
            raise
    verifier = Verifier(model)
    with console.status("Checking every token against the naive model"):
        points = [make_point(budget, runs, verifier) for budget in kept if runs[budget]]
    return Result(
        about=machine.describe(model.device),
        model={"name": name, "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)},
        prompt=prompt,
        running=running,
        output=output,
        rounds=max(map(len, runs.values())),
        points=points,
        partial=partial,
        seconds=time.perf_counter() - began,
    )


def make_point(budget: int, runs: dict[int, list[Run]], verifier: Verifier) -> Point:
    """Counts are those of the first round: they are the same in every one."""
    mine = runs[budget]
    one, first = mine[0], next(iter(filter(None, runs.values())))[0]
    steps, long = prompt_steps(one), len(one.jobs) - 1
    during = one.counts.steps[BEFORE : BEFORE + steps]
    chunk = max(step.new[long] for step in during)
    point = Point(
        budget=budget,
        chunk=chunk,
        whole=chunk == len(one.jobs[-1].prompt),
        steps=steps,
        largest_step=max(step.tokens for step in during),
        same_text=one.outputs == first.outputs,
        void=judge(mine, verifier).void,
    )
    if point.void:
        return point
    rounds = [timed(done) for done in mine]
    middle = median_low(r.gap_longest for r in rounds)
    return replace(
        point,
        gap_before=Spread.of([r.gap_before for r in rounds]),
        gap_longest=Spread.of([r.gap_longest for r in rounds]),
        gap_p95=Spread.of([r.gap_p95 for r in rounds]),
        ttft=Spread.of([r.ttft for r in rounds]),
        total=Spread.of([r.total for r in rounds]),
        trace=next(r.trace for r in rounds if r.gap_longest == middle),
    )


# ---- for people


def chosen(result: Result) -> tuple[Point, Point] | None:
    """The two points to compare: the whole prompt at once, and the middle one of the budgets that cut it."""
    whole = [point for point in result.points if point.whole and not point.void]
    cut = [point for point in result.points if not point.whole and not point.void]
    return (whole[0], cut[len(cut) // 2]) if whole and cut else None


def finding(result: Result) -> str:
    """What the numbers show, in one sentence."""
    pair = chosen(result)
    if pair is None:
        return "There is nothing to compare: it takes the whole prompt in one step, and one budget that cuts it."
    whole, cut = pair
    assert whole.gap_longest and whole.gap_before and whole.ttft and cut.gap_longest and cut.gap_before and cut.ttft
    return (
        f"With the whole prompt in one step, the {result.running} running texts wait up to "
        f"{ms(whole.gap_longest.median)} ms for a token, {times(whole.gap_longest.median / whole.gap_before.median)} "
        f"their gap before; with a budget of {cut.budget} tokens it is {ms(cut.gap_longest.median)} ms, "
        f"{times(cut.gap_longest.median / cut.gap_before.median)}, and the long prompt has its first token after "
        f"{cut.ttft.median:.2f} s in place of {whole.ttft.median:.2f} s."
    )


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def heading(result: Result) -> str:
    """What was measured and on what, in one line."""
    m = result.model
    return f"{m['name']}, {m['dtype']}, {device_name(result.about)}"


def show(result: Result, console: Console) -> None:
    """The counts, then the times, then what they show."""
    console.print()
    console.print(Text(heading(result), style="bold"))
    console.print(
        Text(
            f"{result.running} texts decode; when each has made {BEFORE} tokens, a prompt of {result.prompt:,} tokens "
            "arrives."
        )
    )
    console.print(counts_table(result), times_table(result))
    console.print(Text(finding(result)))
    stopped = " Stopped half way: what was measured until then." if result.partial else ""
    console.print(Text(f"Timed rounds: {result.rounds}; {result.seconds:.0f} s in all.{stopped}", style="dim"))


def counts_table(result: Result) -> Table:
    table = new_table(
        "What the budget decides, on every machine",
        "budget: most tokens in a step. chunk: most tokens of the long prompt in it. steps: from its arrival to its "
        "first token. text: checked against the naive model.",
        ("budget", "tokens", "chunk", "steps", "largest step", "text"),
    )
    table.min_width = WIDTH
    for point in result.points:
        table.add_row(
            point.label,
            f"{point.budget:,}",
            f"{point.chunk:,}",
            f"{point.steps:,}",
            f"{point.largest_step:,}",
            Text("void", style="red") if point.void else Text("same" if point.same_text else "near-tie", "green"),
        )
    return table


def times_table(result: Result) -> Table:
    void = "".join(f" {point.label} is void: {point.void}." for point in result.points if point.void)
    table = new_table(
        "What it costs whom",
        "gap: between two tokens of a running text, before the long prompt arrived and until it had its first token. "
        "ttft: of the long prompt. total: until the last running text ended. Medians of the rounds, "
        f"and least to most.{void}",
        ("budget", "before ms", "longest ms", "rounds", "p95 ms", "ttft s", "rounds", "total s"),
    )
    for point in result.points:
        if not (point.gap_before and point.gap_longest and point.gap_p95 and point.ttft and point.total):
            table.add_row(point.label, Text("void", style="red"))
            continue
        table.add_row(
            point.label,
            ms(point.gap_before.median),
            Text(ms(point.gap_longest.median), style="bold"),
            f"{ms(point.gap_longest.least)}-{ms(point.gap_longest.most)}",
            ms(point.gap_p95.median),
            Text(f"{point.ttft.median:.2f}", style="bold"),
            f"{point.ttft.least:.2f}-{point.ttft.most:.2f}",
            f"{point.total.median:.2f}",
        )
    return table


def alt_text(result: Result) -> str:
    """The plot in words, for those who do not see it."""
    known = "; ".join(
        p.label
        + (f": {ms(p.gap_longest.median)} ms and {p.ttft.median:.2f} s" if p.gap_longest and p.ttft else " void")
        for p in result.points
    )
    return (
        f"Two charts of {heading(result)}: a prompt of {result.prompt:,} tokens arrives while {result.running} texts "
        "decode. Left, the longest gap between two tokens of the running texts against the time to the first token of "
        f"the long prompt, one point for each token budget: {known}. Right, the gap at every step over time, for the "
        f"whole prompt in one step and for one budget that cuts it. {finding(result)}"
    )


def plot(result: Result) -> Figure:
    """Left: what each budget trades. Right: the gaps as a running text sees them. Readable without colour."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"A prompt of {result.prompt:,} tokens arrives while {result.running} texts decode\n{heading(result)}",
        fontsize=11,
    )
    trade, course = figure.subplots(1, 2)
    draw_trade(trade, result)
    draw_course(course, result)
    course.set_ylim(0, 1.2 * course.get_ylim()[1])  # the legend above the lines
    for axes in (trade, course):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    return figure


def draw_trade(axes: Any, result: Result) -> None:
    known = [(p.label, p.ttft, p.gap_longest) for p in result.points if p.ttft and p.gap_longest]
    for label, ttft, gap in known:
        axes.annotate(label, (ttft.median, gap.median * 1e3), (7, 6), textcoords="offset points", fontsize=10)
    x, y = [ttft.median for _, ttft, _ in known], [gap.median * 1e3 for *_, gap in known]
    across = [[t.median - t.least for _, t, _ in known], [t.most - t.median for _, t, _ in known]]
    along = [[1e3 * (g.median - g.least) for *_, g in known], [1e3 * (g.most - g.median) for *_, g in known]]
    look = {"color": "black", "ecolor": "0.4", "marker": "o", "markersize": 4, "linewidth": 1, "capsize": 4}
    axes.errorbar(x, y, xerr=across, yerr=along, **look)
    # a round that the machine disturbed must not squeeze the medians together
    axes.set_xlim(0, 1.3 * max(x, default=1.0))
    axes.set_ylim(0, 1.2 * max(y, default=1.0))
    axes.set_xlabel("ttft of the long prompt, in s (median; bars: range, as far as it fits)")
    axes.set_ylabel("longest gap of the running texts, in ms")
    axes.set_title("The trade, by token budget", loc="left", fontsize=11)


def draw_course(axes: Any, result: Result) -> None:
    axes.set_title("The gaps of one running text", loc="left", fontsize=11)
    axes.set_xlabel("seconds after the long prompt arrived")
    axes.set_ylabel("time since the token before, in ms")
    pair = chosen(result)
    if pair is None:
        return
    end = 1.5 * max(point.ttft.median for point in pair if point.ttft)
    axes.axvline(0, color="0.5", linewidth=1, linestyle=":")
    for point, style in zip(pair, (("black", "o", "-"), ("0.45", "x", "--")), strict=True):
        assert point.trace is not None
        colour, marker, line = style
        at, gaps = zip(*[(t, g * 1e3) for t, g in point.trace if -0.3 * end <= t <= end], strict=True)
        label = "the whole prompt in one step" if point.whole else f"a budget of {point.budget} tokens"
        axes.plot(
            at, gaps, line, color=colour, marker=marker, markersize=4, linewidth=1, label=label, drawstyle="steps-pre"
        )
    axes.legend(frameon=False, loc="upper right")


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
    prompt: int = 1024,
    running: int = 16,
    budgets: Sequence[int] = BUDGETS,
    rounds: int = 3,
) -> int:
    """`minillm bench prefill`. Returns the exit status: 1 if a text is not the naive model's.

    Raises InputError as `check`, and for a file that cannot be written, before the weights are loaded.
    After Ctrl-C it shows and saves what was measured, and raises KeyboardInterrupt again.
    """
    from minillm.fetch import find
    from minillm.tokenizer import Tokenizer

    results.check_room(json_path)
    results.check_plot(plot_path)
    folder = find(model)
    config = Config.from_folder(folder)
    kept = check(config, prompt, running, budgets, rounds)
    text = real_workload(Tokenizer.from_pretrained(folder), QUICK, config).text
    make_jobs(text, prompt, running, n_output(prompt, running, kept))
    llama = load_model(folder, device, dtype, console)
    result = measure(llama, folder.name, text, console, prompt, running, budgets, rounds)
    show(result, console)
    results.save(console, json_path, "prefill", lambda: as_json(result), plot_path, lambda: plot(result))
    if result.partial:
        raise KeyboardInterrupt
    return 1 if any(point.void for point in result.points) else 0
