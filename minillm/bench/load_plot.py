"""The plot of `minillm load`: the percentiles of one run, or the tail over a sweep of rates."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from minillm.bench.load_rows import Row
from minillm.bench.metrics import Stats

LINES = (("-", "0.0", 2.0), ("--", "0.5", 1.6))  # of the server and of its peer, told apart in grey
PARTS = {"median": ("-", "o"), "p95": ("--", "s"), "p99": (":", "^")}


def plot(rows: Sequence[Row]) -> Figure:
    done = [row for row in rows if row.completed]
    sweep = len({row.rate for row in done}) > 1
    figure = Figure(figsize=(13 if sweep else 10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(dict.fromkeys(f"{row.name} at {row.url}" for row in done)), fontsize=11)
    if sweep:
        draw_sweep(figure, done)
    else:
        draw_percentiles(figure, done)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_percentiles(figure: Figure, rows: Sequence[Row]) -> None:
    for axes, name in zip(figure.subplots(1, 2), ("ttft", "tpot"), strict=True):
        for row in rows:
            style, grey, width = LINES[row.peer]
            values = [value * 1e3 for value in getattr(row, f"{name}_percentiles")]
            label = None if row.round else row.url  # once for all rounds
            axes.plot(range(len(values)), values, linestyle=style, color=grey, linewidth=width, label=label)
        axes.set_title(f"{name} of the requests", loc="left")
        axes.set_xlabel("percentile")
        axes.set_ylabel("ms")
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        if len(rows) > 1:
            axes.legend(frameon=False, fontsize=8)


def draw_sweep(figure: Figure, rows: Sequence[Row]) -> None:
    ttft, tpot, served = figure.subplots(1, 3)
    peers = sorted({row.peer for row in rows})
    for peer in peers:
        grey = LINES[peer][1]
        of = sorted((row for row in rows if row.peer == peer), key=lambda row: row.rate or 0.0)
        rates = [row.rate or 0.0 for row in of]
        where = f" {of[0].url}" if len(peers) > 1 else ""
        for axes, name in ((ttft, "ttft"), (tpot, "tpot")):
            for part, (style, marker) in PARTS.items():
                values = [part_ms(getattr(row, name), part) for row in of]
                axes.plot(rates, values, linestyle=style, marker=marker, color=grey, label=f"{part}{where}")
        served.plot(rates, [row.request_throughput for row in of], marker="o", color=grey, label=f"served{where}")
    most = max(row.rate or 0.0 for row in rows)
    served.plot([0, most], [0, most], linestyle=":", color="0.5", label="all that is offered")
    name_axes(ttft, "ttft", "ms, logarithmic")
    name_axes(tpot, "tpot", "ms, logarithmic")
    name_axes(served, "Requests served", "requests/s")
    for axes in (ttft, tpot):
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(LogFormatter(minor_thresholds=(2, 0.5)))


def name_axes(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("requests/s offered")
    axes.set_ylabel(unit)
    axes.legend(frameon=False, fontsize=8)


def part_ms(stats: Stats | None, part: str) -> float:
    return float("nan") if stats is None else getattr(stats, part) * 1e3


def alt_text(rows: Sequence[Row]) -> str:
    """The plot in words, for those who do not see it."""
    if len({row.rate for row in rows}) > 1:
        points = "; ".join(
            f"{row.rate:g} offered, {row.request_throughput:.2f} served, ttft {words(row.ttft)}, tpot {words(row.tpot)}"
            for row in rows
        )
        return (
            f"Three line charts over the requests per second that are offered: ttft, tpot and those served. {points}."
        )
    points = "; ".join(f"{row.url}: ttft {words(row.ttft)}, tpot {words(row.tpot)}" for row in rows)
    return f"Two line charts of percentiles of ttft and tpot. {points}."


def words(stats: Stats | None) -> str:
    return "-" if stats is None else f"median {stats.median * 1e3:.0f} ms and p99 {stats.p99 * 1e3:.0f} ms"
