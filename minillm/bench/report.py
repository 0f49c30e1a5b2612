"""A benchmark's result for people (tables, a plot) and for programs (JSON)."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import results
from minillm.bench.claims import Claim
from minillm.bench.ladder import Result
from minillm.bench.metrics import DEFINITIONS
from minillm.bench.peers import compare
from minillm.bench.rows import Row
from minillm.bench.tables import device_name, new_table, rate, si, times

# ---- tables


def show(result: Result, console: Console) -> None:
    """Whether the texts are right, then what they took, then the times."""
    m, c = result.model, result.ceilings
    console.print()
    title = f"{m['name']} ({m['weights']} weights), {m['dtype']} on {device_name(result.about)}"
    console.print(Text(title, style="bold"))
    for key, s in result.sets.items():
        lengths = f"{s['shortest_prompt']} to {s['longest_prompt']} tokens ({s['prompt_tokens']:,} in all)"
        console.print(Text(f"{key} set: {s['requests']} prompts of {lengths}, {s['output_tokens']:,} output tokens"))
    console.print(work_table(result.rows), speed_table(result.rows), latency_table(result.rows))
    if result.claims:
        console.print(claims_table(result.claims))
    if result.peers:
        console.print(*compare.tables(result.peers))
    rounds = max(len(row.rounds) for row in result.rows)
    for note in [
        "Ceiling: each step takes the longer of reading its weights, K and V "
        f"at {c.bytes_per_s / 1e9:,.0f} GB/s and multiplying at {c.flops_per_s / 1e9:,.0f} GFLOP/s, "
        "both measured in this run.",
        *result.notes,
        *(result.peers.notes if result.peers else []),
        *(f"{row.stage}: {flag}" for row in result.rows for flag in row.flags),
        f"Timed rounds: {rounds}; {result.seconds:.0f} s in all.",
        *(["PARTIAL: stopped by Ctrl-C; stages that had not run once are missing."] if result.partial else []),
    ]:
        console.print(Text(note, style="dim"))


def label(row: Row) -> str:
    """A star for those not measured on the main set."""
    return row.stage if row.request_set == "main" else f"{row.stage} *"


def work_table(rows: Sequence[Row]) -> Table:
    table = new_table(
        "Is it the naive model's text, and what did it take?",
        "excused: not the naive model's best token, but as good within rounding. wasted: pads, rows that "
        "had ended, tokens computed again. KV: most bytes held, and most that were needed.",
        ("stage", "checked", "excused", "text", "pushed", "wasted", "scores", "KV held", "needed"),
    )
    for row in rows:
        table.add_row(
            label(row),
            f"{row.positions_checked:,}",
            f"{row.share_excused:.1%}",
            Text("void", style="red") if row.void else Text("ok", style="green"),
            f"{row.tokens_pushed:,}",
            f"{row.tokens_wasted / row.tokens_pushed:.0%}",
            si(row.attention_scores),
            f"{row.peak_kv_reserved_bytes / 1e6:,.1f} MB",
            f"{row.peak_kv_stored_bytes / 1e6:,.1f} MB",
        )
    return table


def speed_table(rows: Sequence[Row]) -> Table:
    void = "".join(f" {row.stage} is void: {row.void}." for row in rows if row.void)
    table = new_table(
        "Tokens per second of the whole run",
        "output: median, slowest and fastest round. ceiling: what this machine could do at most for the work "
        "of the stage, pads and all, and the share reached. * on the small set; its ratio to the next stage "
        f"is taken there.{void}",
        ("stage", "output", "rounds", "x before", "x first", "ceiling", "reached"),
    )
    for row in rows:
        if row.void:
            table.add_row(label(row), Text("void", style="red"))
            continue
        table.add_row(
            label(row),
            Text(rate(row.output_throughput), style="bold"),
            f"{rate(row.output_throughput_min)}-{rate(row.output_throughput_max)}",
            times(row.ratio_before),
            times(row.ratio_first),
            f"{row.ceiling_throughput:,.0f}",
            f"{row.ceiling_share:.0%}",
        )
    return table


def latency_table(rows: Sequence[Row]) -> Table:
    table = new_table(
        "By kind of token, and latency (all requests at time 0)",
        "/s: tokens per second. ttft: to the first token, queueing included. tpot: a request's mean time per "
        "further token. itl: gaps between tokens. e2el: to the last token. Medians, and p95.",
        ("stage", "prompt/s", "total/s", "ttft s", "p95", "tpot ms", "p95", "itl ms", "e2el s"),
    )
    for row in rows:
        if row.void:
            table.add_row(label(row), Text("void", style="red"))
            continue
        table.add_row(
            label(row),
            f"{row.prompt_throughput:,.0f}",
            f"{row.total_token_throughput:,.0f}",
            f"{row.ttft_median:.2f}",
            f"{row.ttft_p95:.2f}",
            f"{row.tpot_median * 1e3:.1f}",
            f"{row.tpot_p95 * 1e3:.1f}",
            f"{row.itl_median * 1e3:.1f}",
            f"{row.e2el_median:.2f}",
        )
    return table


def claims_table(claims: Sequence[Claim]) -> Table:
    table = new_table("Claims", "", ("claim", "target", "measured", "met", "detail"))
    for i in (0, 4):
        table.columns[i].no_wrap, table.columns[i].justify, table.columns[i].ratio = False, "left", 1
    verdicts = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text("-")}
    for claim in claims:
        table.add_row(claim.claim, claim.target, times(claim.measured), verdicts[claim.met], claim.detail)
    return table


# ---- files


def as_json(result: Result) -> dict[str, Any]:
    """Everything, with the definitions of the metrics beside them."""
    return {"metrics": DEFINITIONS, "alt_text": alt_text(result), **asdict(result)}


def save(result: Result, json_path: Path | None, plot_path: Path | None, console: Console) -> None:
    results.save(console, json_path, "ladder", lambda: as_json(result), plot_path, lambda: plot(result))


def alt_text(result: Result) -> str:
    """The plot in words, for those who do not see it."""
    rows = result.rows
    speeds = ", ".join(f"{r.stage} {'void' if r.void else f'{r.output_throughput:.1f}'}" for r in rows)
    work = ", ".join(f"{r.stage} {r.tokens_pushed / r.tokens_useful:.2f}" for r in rows)
    return (
        f"Two bar charts of {result.model['name']} in {result.model['dtype']} on {device_name(result.about)}. "
        f"Left, output tokens per second: {speeds}. "
        f"Right, tokens pushed through the model for each one needed: {work}."
    )


def plot(result: Result) -> Figure:
    """Left: how fast each stage is. Right: what it pushed through the model for each token that was needed.

    Readable without colour: greys and hatches, and a number at every bar.
    """
    rows = result.rows
    figure = Figure(figsize=(11, 1.8 + 0.48 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{result.model['name']}, {result.model['dtype']}, {device_name(result.about)}", fontsize=12)
    speed, work = figure.subplots(1, 2)
    at = range(len(rows))

    speeds = [0.0 if row.void else row.output_throughput for row in rows]
    below = [0.0 if row.void else row.output_throughput - row.output_throughput_min for row in rows]
    above = [0.0 if row.void else row.output_throughput_max - row.output_throughput for row in rows]
    speed.barh(at, speeds, xerr=(below, above), color="0.6", edgecolor="black", error_kw={"capsize": 3})
    for i, row in enumerate(rows):
        ratio = "" if row.ratio_before is None else f"  ({times(row.ratio_before)} the one before)"
        words = "void" if row.void else f"{row.output_throughput:.1f}{ratio}"
        speed.text(speeds[i] + above[i], i, f"  {words}", va="center", fontsize=9)
    speed.set_xlim(0, 2.0 * max(*speeds, 1e-9))
    speed.set_xlabel("output tokens per second: median and range of the rounds")
    speed.set_title("How fast", loc="left")

    pushed = [row.tokens_pushed / row.tokens_useful for row in rows]
    extra = [p - 1 for p in pushed]
    work.barh(at, [1] * len(rows), color="0.75", edgecolor="black", label="needed")
    work.barh(at, extra, left=1, color="white", edgecolor="black", hatch="////", label="pads and computed again")
    for i, value in enumerate(pushed):
        work.text(value, i, f"  {value:.2f}", va="center", fontsize=9)
    work.set_xlim(0, 1.2 * max(pushed))
    work.set_xlabel("tokens pushed through the model for each one needed")
    work.set_title("How much work", loc="left")
    work.legend(loc="lower right", frameon=False)

    for axes in (speed, work):
        axes.set_yticks(at, [label(row) for row in rows])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    if any(row.request_set == "small" for row in rows):
        figure.supxlabel("* on the small set of requests; its ratio to the next stage is taken there", fontsize=9)
    return figure
