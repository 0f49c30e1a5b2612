"""The simulation for people (tables, a plot) and for programs (a section of the results file)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench.tables import new_table, times
from minillm.simulation import article, calibrated
from minillm.simulation.article import EQUAL, MIXED, Line, Runs, Setup
from minillm.simulation.calibrated import Outcome
from minillm.simulation.policies import Band, ratio
from minillm.simulation.spread import Point

if TYPE_CHECKING:
    from minillm.bench.calibrate import Calibration

FIGURES = {
    "mean_wait": "mean wait, s",
    "p95_wait": "p95 wait, s",
    "max_wait": "longest wait, s",
    "makespan": "makespan, s",
    "request_throughput": "requests/s",
    "busy": "slots busy, s",
    "idle_share": "slots idle",
}
SAME = "dynamic: in this model neither prompts nor pads cost time, so refilling a row with pads is continuous."


@dataclass
class Result:
    """All that was simulated. `partial`: it was stopped, and holds what was done until then."""

    setup: Setup
    policies: list[str]
    runs: Runs = field(default_factory=dict)
    partial: bool = False
    model: str | None = None
    calibration: "Calibration | None" = None
    outcomes: list[Outcome] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    @property
    def seeds(self) -> int:
        """How many are done."""
        return min((len(figures) for figures in self.runs.values()), default=0)

    @property
    def lines(self) -> list[Line]:
        return article.compare(self.setup, self.runs, self.seeds == self.setup.seeds)

    def gain(self, case: str, figure: str) -> Band | None:
        """Static over continuous at the rate that was asked for; None if one of them was not simulated."""
        static, continuous = (self.runs.get((self.setup.rate, case, policy)) for policy in ("static", "continuous"))
        return ratio(static, continuous, figure) if static and continuous else None


# ---- tables


def show_fixed(result: Result, console: Console) -> None:
    """The queue with a fixed time per token."""
    console.print(parameters_table(result), figures_table(result, MIXED))
    if any(line.case == EQUAL for line in result.lines):
        console.print(figures_table(result, EQUAL))
    if result.setup.documented:
        console.print(sensitivity_table(result.lines))
    for note in filter(None, (fixed_conclusion(result), verdict(result))):
        console.print(Text(note))


def show_calibrated(result: Result, console: Console) -> None:
    """The same queue by the measured time of a step."""
    console.print(step_table(result), outcome_table(result))
    console.print(Text(calibrated_conclusion(result)))


def parameters_table(result: Result) -> Table:
    setup = result.setup
    table = new_table("Simulated queue, a fixed time per token", "", ("parameter", "value", "from"))
    table.columns[1].justify = table.columns[2].justify = "left"
    table.columns[1].no_wrap = False
    told, inferred = ("the article", "INFERRED by fitting") if setup.documented else ("", "")
    table.add_row("requests", f"{setup.requests:,}", told)
    table.add_row("slots", f"{setup.slots:,}", told)
    table.add_row("time per token", f"{setup.time_per_token * 1e3:g} ms", told)
    lengths = "as in the trace"
    if setup.trace is None:
        lengths = " and ".join(f"{share:.0%} of {low} to {high}" for share, low, high in setup.mix.parts)
        lengths = lengths if setup.uniform is None else f"all of {setup.uniform}"
    table.add_row("output tokens", lengths, told)
    arrives = {"poisson": f"Poisson, {setup.rate:g} requests/s", "at-once": "all at once"}
    table.add_row("arrivals", Text(arrives.get(setup.arrivals, f"as in {setup.arrivals}")), inferred)
    if any(case == EQUAL for _, case, _ in result.runs):
        table.add_row("equal length of the control", f"{article.EQUAL_LENGTH} tokens", inferred)
    table.add_row("a static group", "waits until it is full", inferred)
    if setup.trace is None:
        done = f"{result.seeds} of {setup.seeds}, PARTIAL: stopped" if result.seeds < setup.seeds else f"{setup.seeds}"
        table.add_row("seeds", done, "")
    return table


def figures_table(result: Result, case: str) -> Table:
    lines = [line for line in result.lines if line.case == case and line.rate == result.setup.rate]
    policies = list(dict.fromkeys(line.policy for line in lines))
    both = "dynamic" in policies and "continuous" in policies
    judged = any(line.published is not None for line in lines)
    titles = {MIXED: "The article's figures" if judged else "Figures", EQUAL: "Control: every output of equal length"}
    columns = ["figure", "policy", *(["article"] if judged else []), "median"]
    columns += ["95 % of the runs"] if result.seeds > 1 else []
    caption = "wait: start minus arrival. idle: part of all slots' time until the makespan."
    table = new_table(
        titles[case],
        " ".join([caption, SAME] if case == MIXED and "dynamic" in policies else [caption]),
        [*columns, *(["in or out"] if judged else [])],
    )
    table.columns[1].justify = "left"
    for figure in FIGURES if case == MIXED else ("mean_wait", "makespan"):
        for i, policy in enumerate(policy for policy in policies if not (both and policy == "dynamic")):
            line = next(line for line in lines if line.policy == policy and line.figure == figure)
            cells: list[str | Text] = [FIGURES[figure] if i == 0 else ""]
            cells.append(policy)
            if judged:
                cells.append("-" if line.published is None else number(figure, line.published))
            cells.append(number(figure, line.band.median))
            if result.seeds > 1:
                cells.append(f"{number(figure, line.band.low)} to {number(figure, line.band.high)}")
            if judged:
                cells.append(inside(line))
            table.add_row(*cells)
    return table


def number(figure: str, value: float) -> str:
    return f"{value:.1%}" if figure == "idle_share" else f"{value:,.2f}"


def inside(line: Line) -> Text:
    if line.inside is None:
        return Text("-")
    return Text("in", style="green") if line.inside else Text("OUT", style="red")


def sensitivity_table(lines: Sequence[Line]) -> Table:
    table = new_table(
        "Sensitivity: which of the article's figures are out at other rates",
        "",
        ("requests/s", "out", "which (article's value; 95 % of the runs)"),
    )
    table.columns[2].no_wrap, table.columns[2].justify, table.columns[2].ratio = False, "left", 1
    for rate in sorted({line.rate for line in lines}):
        judged = [line for line in lines if line.rate == rate and line.inside is not None]
        out = [line for line in judged if not line.inside]
        table.add_row(f"{rate:g}", f"{len(out)} of {len(judged)}", "; ".join(map(described, out)) or "none")
    return table


def described(line: Line) -> str:
    assert line.published is not None
    value, low, high = (number(line.figure, v) for v in (line.published, line.band.low, line.band.high))
    where = "" if line.case == MIXED else "equal lengths, "
    return f"{where}{line.policy} {FIGURES[line.figure].removesuffix(', s')} ({value}; {low} to {high})"


def verdict(result: Result) -> str:
    """Whether the article's figures came out; nothing if nothing was judged."""
    judged = [line for line in result.lines if line.rate == article.RATE and line.inside is not None]
    if not judged:
        return ""
    out = [line for line in judged if not line.inside]
    if out:
        return f"{len(out)} of the article's {len(judged)} figures are OUT: {'; '.join(map(described, out))}."
    return f"All {len(judged)} of the article's figures lie where 95 % of the runs lie."


def fixed_conclusion(result: Result) -> str:
    """What continuous batching gains by this model; nothing if it was not compared."""
    wait, span = (result.gain(MIXED, figure) for figure in ("mean_wait", "makespan"))
    if span is None:
        return ""
    text = f"Static over continuous: mean wait {ratio_of(wait)}, makespan {ratio_of(span)}"
    wait, span = (result.gain(EQUAL, figure) for figure in ("mean_wait", "makespan"))
    if span is not None:
        text += f"; with equal lengths {ratio_of(wait)} and {ratio_of(span)}"
    return f"{text} (medians)."


def ratio_of(band: Band | None) -> str:
    return times(None if band is None else band.median)


def step_table(result: Result) -> Table:
    assert result.calibration is not None
    fitted, calibration = result.calibration.step_time, result.calibration
    table = new_table(
        f"Time of a step, fitted from {calibration.steps} timed steps",
        f"{result.model}; median error on kinds of steps that were not fitted: {calibration.error:.1%}.",
        ("part", "time"),
    )
    table.add_row("every step", f"{fitted.base * 1e3:.2f} ms")
    table.add_row("+ each new token (pads too)", f"{fitted.per_token * 1e6:,.0f} us")
    table.add_row("+ each 1,000 context positions read", f"{fitted.per_position * 1e9:,.0f} us")
    table.add_row("+ each chunk of several tokens", f"{fitted.per_chunk * 1e3:.2f} ms")
    return table


def outcome_table(result: Result) -> Table:
    setup = result.setup
    scaled = "" if setup.trace is not None else f", output lengths x {calibrated.SCALE:g}"
    rates = [f"{o.rate:.2f}" for o in result.outcomes if o.rate is not None]
    arriving = (
        f" {' and '.join(rates)} requests/s arrive, {calibrated.LOAD:g} x what continuous batching gets through."
        if rates
        else ""
    )
    table = new_table(
        f"The same queue step by step{scaled}",
        f"Ratios: static over the policy. Here a static group takes whoever is there, as the padded stage.{arriving}",
        ("prompt tokens", "policy", "mean wait, s", "ratio", "makespan, s", "ratio", "slots idle"),
    )
    table.columns[1].justify = "left"
    for outcome in result.outcomes:
        for i, (policy, figures) in enumerate(outcome.figures.items()):
            prompt = "as in the trace" if outcome.prompt is None else f"{outcome.prompt}"
            table.add_row(
                prompt if i == 0 else "",
                policy,
                f"{figures.mean_wait:,.2f}",
                ratio_of(outcome.wait_ratio[policy]),
                f"{figures.makespan:,.2f}",
                ratio_of(outcome.makespan_ratio[policy]),
                f"{figures.idle_share:.1%}",
            )
    return table


def calibrated_conclusion(result: Result) -> str:
    """How the measured step changes what the fixed time says, in one sentence."""
    fixed = result.gain(MIXED, "makespan")
    before = "With a fixed time per token dynamic and continuous are the same"
    before += f", {ratio_of(fixed)} as fast as static" if fixed is not None else ""
    parts = []
    for outcome in result.outcomes:
        prompts = "the trace's prompts" if outcome.prompt is None else f"prompts of {outcome.prompt} tokens"
        gains = [ratio_of(outcome.makespan_ratio[policy]) for policy in ("continuous", "dynamic")]
        parts.append(f"{gains[0]} and dynamic {gains[1]} with {prompts}")
    last = result.outcomes[-1].makespan_ratio["dynamic"]
    pads = "more" if last is not None and last.median < 1 else "less"
    return (
        f"{before}; by the measured step continuous is {', '.join(parts)}: "
        f"there dynamic's pads cost {pads} time than the idle slots that they fill."
    )


# ---- file and plot


def as_json(result: Result, about: dict[str, Any]) -> dict[str, Any]:
    setup = {name: value for name, value in vars(result.setup).items() if name != "trace"}
    found = [fixed_conclusion(result), verdict(result)]
    if result.outcomes:
        found.append(calibrated_conclusion(result))
    return {
        "about": about,
        "finding": " ".join(filter(None, found)),
        "partial": result.partial,
        "parameters": setup,
        "documented": result.setup.documented,
        "seeds_done": result.seeds,
        "policies": result.policies,
        "figures": [{**asdict(line), "inside": line.inside} for line in result.lines],
        "static_over_continuous": {
            case: {name: asdict(band) for name in ("mean_wait", "makespan") if (band := result.gain(case, name))}
            for case in (MIXED, EQUAL)
        },
        "model": result.model,
        "calibration": asdict(result.calibration) if result.calibration else None,
        "step_by_step": [asdict(outcome) for outcome in result.outcomes],
        "spread": [asdict(point) for point in result.points],
        "alt_text": alt_text(result) if result.points else None,
    }


def alt_text(result: Result) -> str:
    """The plot in words, for those who do not see it."""
    first, last = result.points[0], result.points[-1]
    own = next(point for point in result.points if point.article)

    def waits(point: Point) -> str:
        static, continuous = (point.mean_wait[policy].median for policy in ("static", "continuous"))
        return f"static {static:.1f} s, continuous {continuous:.1f} s ({gain(point)})"

    return (
        f"Two lines: mean wait against the coefficient of variation of output lengths, at equal mean and load. "
        f"All lengths equal ({first.cv:.2f}): {waits(first)}. The article's lengths ({own.cv:.2f}): {waits(own)}. "
        f"Most unequal ({last.cv:.2f}): {waits(last)}."
    )


def gain(point: Point) -> str:
    static, continuous = (point.mean_wait[policy].median for policy in ("static", "continuous"))
    return times(static / continuous if continuous > 0 else None)


def plot(result: Result) -> Figure:
    """Mean wait against the spread of lengths. Readable without colour: markers, dashes, hatches, direct labels."""
    setup, points = result.setup, result.points
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    cvs = [point.cv for point in points]
    styles = (("static", "o", "-", "0.85", "////"), ("continuous", "s", "--", "0.7", ""))
    for policy, marker, dash, shade, hatch in styles:
        waits = [point.mean_wait[policy] for point in points]
        low, high = [band.low for band in waits], [band.high for band in waits]
        axes.fill_between(cvs, low, high, facecolor=shade, edgecolor="0.55", hatch=hatch, linewidth=0, alpha=0.6)
        axes.plot(cvs, [band.median for band in waits], color="black", marker=marker, linestyle=dash)
        axes.text(cvs[-1] + 0.03, waits[-1].median, policy, va="center")
    for point in points:
        ratio_at = (point.cv, point.mean_wait["static"].median)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(gain(point), ratio_at, (-4, 9), textcoords="offset points", ha="right", fontsize=9, bbox=box)
        if point.article:
            axes.axvline(point.cv, color="0.4", linestyle=":", zorder=0)
            axes.text(point.cv + 0.01, 0.42, "the article's mix", transform=axes.get_xaxis_transform(), fontsize=9)
    axes.set_xlim(-0.12, cvs[-1] + 0.28)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("coefficient of variation of output lengths (0: all equal)")
    axes.set_ylabel("mean wait in seconds: median and 95 % of the runs")
    axes.set_title("No spread, no gain: static over continuous", loc="left")
    arrives = "all at once" if setup.arrivals == "at-once" else f"{setup.rate:g} requests/s"
    figure.supxlabel(
        f"{setup.requests:,} requests, {setup.slots} slots, {setup.time_per_token * 1e3:g} ms per token, {arrives}, "
        f"{setup.mix.mean:.0f} tokens on average",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
