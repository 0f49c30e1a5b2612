"""The queue experiment for people: tables, a plot, and the plot in words; and the command itself."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import load_checkpoint, results
from minillm.bench.metrics import DEFINITIONS
from minillm.bench.queueing import Plan, Result, Row, Scenario, measure
from minillm.bench.report import claims_table
from minillm.bench.tables import new_table, times
from minillm.simulation.article import MIXED, PUBLISHED

LINES = {  # style and grey of each policy: told apart without colour
    "static": ("--", "0.0", 1.6),
    "padded": (":", "0.35", 1.8),
    "dynamic": ("-.", "0.55", 1.6),
    "continuous": ("-", "0.0", 2.4),
}


def as_json(result: Result) -> dict[str, Any]:
    return {"metrics": DEFINITIONS, "alt_text": alt_text(result), **asdict(result)}


def run_command(
    plan: Plan, model: str, device: str, dtype: str, json_path: Path | None, plot_path: Path | None, console: Console
) -> int:
    """`minillm bench queue`. Raises InputError before anything is measured; returns 1 if a text is not the naive
    model's."""
    results.check_room(json_path)
    results.check_plot(plot_path)
    folder, llama, tokenizer = load_checkpoint(model, device, dtype, console)
    result = measure(llama, folder.name, tokenizer, plan, console)
    show(result, console)
    if result.scenarios:
        results.save(console, json_path, "queue", lambda: as_json(result), plot_path, lambda: plot(result))
    if result.partial:
        raise KeyboardInterrupt
    return 1 if any(row.void for scenario in result.scenarios for row in scenario.rows) else 0


# ---- tables


def show(result: Result, console: Console) -> None:
    plan, step = result.plan, result.calibration.step_time
    console.print()
    console.print(Text(f"{result.model['name']} in {result.model['dtype']}, {plan.slots} slots", style="bold"))
    decode = step(plan.slots, plan.slots * (plan.prompt + plan.mix.mean / 2), 0)
    console.print(
        Text(
            f"A step of {plan.slots} decoding requests takes about {decode * 1e3:.1f} ms here, so continuous batching "
            f"serves {result.capacity:.2f} requests/s of the article's mix at scale {plan.scale:g} (calibrated)."
        )
    )
    for scenario in result.scenarios:
        for line in facts(scenario):
            console.print(Text(line))
        console.print(wait_table(scenario), latency_table(scenario, plan))
    if result.claims:
        console.print(claims_table(result.claims))
    console.print(Text(notes(plan), style="dim"))
    if result.partial:
        done = ", ".join(scenario.name for scenario in result.scenarios) or "none"
        console.print(Text(f"PARTIAL: stopped by Ctrl-C. Whole scenarios: {done}.", style="dim"))


def facts(scenario: Scenario) -> list[str]:
    arrivals = f"{scenario.rate:.2f} requests/s" if scenario.rate else f"{scenario.clients} clients"
    lines = [
        "",
        f"{scenario.name}: {scenario.about}",
        f"{scenario.requests} requests at {arrivals}; {scenario.prompt_tokens:,} prompt tokens; outputs of "
        f"{scenario.mean_output:.0f} tokens on average, coefficient of variation {scenario.cv_output:.2f}",
    ]
    if scenario.makespan_ratio is not None:
        guess = ""
        if scenario.predicted_makespan_ratio and scenario.predicted_wait_ratio:
            guess = (
                f" (predicted from the time of a step: {times(scenario.predicted_makespan_ratio)} and "
                f"{times(scenario.predicted_wait_ratio)})"
            )
        lines.append(
            f"static over continuous: makespan {times(scenario.makespan_ratio)}, mean wait "
            f"{times(scenario.wait_ratio)}{guess}"
        )
    return [*lines, scenario.why]


def wait_table(scenario: Scenario) -> Table:
    void = "".join(f" {row.policy} is void: {row.void}." for row in scenario.rows if row.void)
    table = new_table(
        "Waiting, and the slots",
        "wait: first step minus arrival. busy: time in which slots work for a request, all slots added up. idle: the "
        f"rest of their time until the makespan.{void}",
        ("policy", "mean wait s", "p95", "max", "makespan s", "requests/s", "busy s", "idle"),
    )
    for row in scenario.rows:
        f = row.figures
        if row.void:
            table.add_row(row.policy, Text("void", style="red"))
            continue
        table.add_row(
            row.policy,
            f"{f.mean_wait:.2f}",
            f"{f.p95_wait:.2f}",
            f"{f.max_wait:.2f}",
            f"{f.makespan:.1f}",
            f"{f.request_throughput:.2f}",
            f"{f.busy:.0f}",
            f"{f.idle_share:.0%}",
        )
    return table


def latency_table(scenario: Scenario, plan: Plan) -> Table:
    table = new_table(
        "Latency",
        f"goodput: requests/s with ttft within {plan.limit_ttft:g} s and tpot within {plan.limit_tpot * 1e3:g} ms, and "
        "their share.",
        ("policy", "ttft s", "p95", "tpot ms", "p95", "e2el s", "p95", "goodput", "kept"),
    )
    for row in scenario.rows:
        if row.void:
            table.add_row(row.policy, Text("void", style="red"))
            continue
        tpot = ("-", "-") if row.tpot is None else (f"{row.tpot.median * 1e3:.1f}", f"{row.tpot.p95 * 1e3:.1f}")
        table.add_row(
            row.policy,
            f"{row.ttft.median:.2f}",
            f"{row.ttft.p95:.2f}",
            *tpot,
            f"{row.e2el.median:.2f}",
            f"{row.e2el.p95:.2f}",
            f"{row.request_goodput:.2f}",
            f"{row.kept_limits:.0%}",
        )
    return table


def notes(plan: Plan) -> str:
    static, continuous = PUBLISHED[MIXED, "static"], PUBLISHED[MIXED, "continuous"]
    return (
        "The end of text is ignored, so that every policy makes the same number of tokens; in `real` the model ends "
        f"each text. static and continuous ran {plan.rounds} times in `article` and `uniform`, interleaved, and the "
        "medians are shown; all else ran once. "
        "static differs from continuous in one thing, who may enter, and its ended rows cost nothing; padded and "
        "dynamic are the stages of the ladder, whose pads and ended rows do. The article's own ratios, where a token "
        f"takes a fixed time: makespan {static['makespan'] / continuous['makespan']:.2f} x, mean wait "
        f"{static['mean_wait'] / continuous['mean_wait']:.2f} x."
    )


# ---- the plot


def drawn(result: Result) -> tuple[Scenario, list[Row]]:
    """The first scenario, and its rows that are not void."""
    scenario = result.scenarios[0]
    return scenario, [row for row in scenario.rows if not row.void]


def alt_text(result: Result) -> str:
    """The plot in words, for those who do not see it."""
    scenario, rows = drawn(result)
    waits = ", ".join(f"{row.policy} {row.figures.mean_wait:.1f} (at most {row.figures.max_wait:.1f})" for row in rows)
    spans = ", ".join(f"{row.policy} {row.figures.makespan:.1f}" for row in rows)
    return (
        f"Two line charts of {scenario.requests} requests on {result.plan.slots} slots of the real engine "
        f"({scenario.about}). Left, the wait of each request in order of arrival, which grows along the run; mean "
        f"seconds: {waits}. Right, how many have ended over time; the last one after seconds: {spans}."
    )


def plot(result: Result) -> Figure:
    """Left: how long each request waited. Right: how many have ended."""
    scenario, rows = drawn(result)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{scenario.requests} requests, {result.plan.slots} slots, {result.model['name']}", fontsize=12)
    left, right = figure.subplots(1, 2)
    for row in rows:
        style, grey, width = LINES[row.policy]
        look = {"linestyle": style, "color": grey, "linewidth": width}
        left.plot(range(1, len(row.waits) + 1), row.waits, label=row.policy, **look)
        left.annotate(
            row.policy, (len(row.waits), row.waits[-1]), xytext=(4, 0), textcoords="offset points", fontsize=9
        )
        ends = sorted(row.ends)
        right.plot([0, *ends], range(len(ends) + 1), label=row.policy, **look)
    left.set_xlabel("request, in order of arrival")
    left.set_ylabel("wait until its first step, seconds")
    left.set_title("How long each one waited", loc="left")
    left.set_xlim(0, 1.14 * scenario.requests)
    right.set_xlim(left=0)
    right.set_xlabel("seconds")
    right.set_ylabel("requests that have ended")
    right.set_title("How soon all are served", loc="left")
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
