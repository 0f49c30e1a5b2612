"""`minillm bench scaling`: its tables, its picture and the command. What is measured, and how: see `scaling`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import load_model, results
from minillm.bench.scaling import BLOCK, LONGEST, Curve, Law, Plan, Point, Result, as_json, measure
from minillm.bench.tables import device_name, new_table, si
from minillm.config import Config

WIDTH = 70  # of a table with few columns, in characters: room for its caption


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def written(law: Law, per: str) -> str:
    """The law as a sum of times: 12.3 ms + 310 us x text."""
    names = {0: "", 1: f" x {per}", 2: f" x {per}^2"}
    terms = (short(c) + names[p] for c, p in zip(law.coefficients, law.powers, strict=True))
    return " + ".join(terms).replace("+ -", "- ")


def short(seconds: float) -> str:
    """Three digits and the unit that suits them."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    unit = next((name for name, size in units.items() if abs(seconds) >= 0.9995 * size), "ns")
    return f"{seconds / units[unit]:.3g} {unit}"


def heading(result: Result) -> str:
    m = result.model
    return f"{m['name']}, {m['dtype']}, {device_name(result.about)}, backend {result.backend}"


# ---- in words


def finding(result: Result) -> str:
    """What the numbers show, a sentence for each law."""
    told = (context_finding(result), batch_finding(result), prompt_finding(result), memory_finding(result))
    return " ".join(filter(None, told))


def context_finding(result: Result) -> str:
    if result.contexts is None:
        return ""
    law, plan = result.contexts.law, result.plan
    if result.bytes_per_s is None:
        return f"A decode step of {plan.running} does not grow with the context here: the times differ by more."
    return (
        f"A decode step of {plan.running} grows in a line with the context, {written(law, 'position')} (within "
        f"{law.worst:.0%}): live K and V at {result.bytes_per_s / 1e9:,.3g} GB/s, "
        f"{result.bytes_per_s / result.ceilings.copy_bytes_per_s:.0%} of a copy's "
        f"{result.ceilings.copy_bytes_per_s / 1e9:,.3g}."
    )


def batch_finding(result: Result) -> str:
    if result.batches is None:
        return ""
    law = result.batches.law
    line = f"At context {result.plan.context} a step takes {written(law, 'text')} (within {law.worst:.0%})"
    if result.knee is None:
        turn = "no two such terms were found here"
    else:
        turn = f"up to {result.knee:,.0f} texts what they share is the larger part"
    if result.knee_predicted is None:
        roofline = "moving bytes would take longer than multiplying at any number"
    else:
        roofline = f"multiplying would take longer than moving bytes from {result.knee_predicted:,.0f} on"
    return f"{line}: {turn}; by bandwidth and arithmetic alone, {roofline}."


def prompt_finding(result: Result) -> str:
    if result.prompts is None:
        return ""
    law = result.prompts.law
    line = f"A whole prompt takes {written(law, 'token')} (within {law.worst:.0%})"
    measured = (
        "no quadratic term was found"
        if result.quadratic_from is None
        else (f"its quadratic term is as much as its linear one at {result.quadratic_from:,.0f} tokens")
    )
    if result.quadratic_predicted is None:
        return f"{line}; {measured}."
    return f"{line}; {measured}, by counted arithmetic at {result.quadratic_predicted:,.0f}."


def memory_finding(result: Result) -> str:
    if not result.memory:
        return ""
    most = result.memory[-1]
    return (
        f"{most.tokens:,} running tokens use {most.used / 1e6:,.0f} MB of K and V, {result.kv_bytes_per_token:,} bytes "
        f"each; blocks hold {most.blocks / most.used:.2f} x of that, regions for texts {LONGEST} times as long "
        f"{most.regions / most.used:.2f} x."
    )


def alt_text(result: Result) -> str:
    """The plot in words, for those who do not see it."""

    def ends(found: Curve | None, size: str) -> str:
        if found is None:
            return "not measured"
        first, last = found.points[0], found.points[-1]
        return f"from {ms(first.seconds.median)} ms at {first.n:,} to {ms(last.seconds.median)} at {last.n:,} {size}"

    held = result.memory
    memory = f"{held[0].used / 1e6:,.1f} to {held[-1].used / 1e6:,.1f} MB used" if held else "not measured"
    return (
        f"Four charts of {heading(result)}: measured points, the law fitted to them as a line, and the least time on "
        f"this machine dashed. A decode step over the context, {ends(result.contexts, 'positions')}. A step over the "
        f"number of texts, {ends(result.batches, 'texts')}. Prefill over the prompt, whole, "
        f"{ends(result.prompts, 'tokens')}, and in chunks, {ends(result.chunked, 'tokens')}. KV memory over running "
        f"tokens, {memory}. {finding(result)}"
    )


# ---- tables


def show(result: Result, console: Console) -> None:
    console.print()
    console.print(Text(heading(result), style="bold"))
    for make in (context_table, batch_table, prompt_table, memory_table):
        if (table := make(result)) is not None:
            console.print(table)
    console.print(Text(finding(result)))
    stopped = ["Stopped half way: what is whole until then."] if result.partial else []
    for note in [*stopped, f"Timed rounds: {result.plan.rounds}; {result.seconds:.0f} s in all."]:
        console.print(Text(note, style="dim"))


LAW = "law: fitted to the medians. floor: the least for the needed work, by this machine's bandwidth and arithmetic."


def narrow(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = new_table(title, caption, columns)
    table.min_width = WIDTH
    return table


def context_table(result: Result) -> Table | None:
    if result.contexts is None:
        return None
    table = narrow(
        f"A decode step of {result.plan.running}, over the context",
        f"K and V: the live ones, which it must read. {LAW}",
        ("context", "ms", "rounds", "law", "floor", "K and V MB"),
    )
    for p in result.contexts.points:
        table.add_row(*timed(p), f"{p.kv_bytes / 1e6:,.0f}")
    return table


def batch_table(result: Result) -> Table | None:
    if result.batches is None:
        return None
    table = narrow(
        f"A decode step at context {result.plan.context}, over the number of texts",
        LAW,
        ("running", "ms", "rounds", "law", "floor", "tokens/s"),
    )
    for p in result.batches.points:
        table.add_row(*timed(p), f"{p.tokens / p.seconds.median:,.0f}")
    return table


def timed(p: Point) -> list[str | Text]:
    """Size, median, range of the rounds, law and floor: the cells that steps over contexts and batches share."""
    times = f"{ms(p.seconds.least)}-{ms(p.seconds.most)}"
    return [f"{p.n:,}", Text(ms(p.seconds.median), style="bold"), times, ms(p.by_law), ms(p.floor)]


def prompt_table(result: Result) -> Table | None:
    if result.prompts is None:
        return None
    table = narrow(
        f"A prompt, whole and in chunks of {result.plan.budget:,}",
        "scores: that a query may see; computed: those that were, where they are counted (whole, in chunks). "
        f"{LAW} Both of the whole prompt; all times in ms.",
        ("tokens", "whole", "law", "floor", "scores", "computed", "chunks", "ms", "computed"),
    )
    for i, p in enumerate(result.prompts.points):
        cells = [f"{p.n:,}", ms(p.seconds.median), ms(p.by_law), ms(p.floor), si(p.scores), known(p.computed_scores)]
        if result.chunked is not None:
            cut = result.chunked.points[i]
            cells += [f"{cut.steps}", ms(cut.seconds.median), known(cut.computed_scores)]
        table.add_row(*cells)
    return table


def known(count: int | None) -> str:
    return "-" if count is None else si(count)


def memory_table(result: Result) -> Table | None:
    if not result.memory:
        return None
    table = narrow(
        "KV memory, over running tokens, in MB",
        f"used: of stored tokens. blocks: held in blocks of {BLOCK} slots. regions: reserved for texts of up to "
        f"{LONGEST * result.plan.context:,} tokens. grown: by how much the process (or the GPU's memory) grew in one "
        "step, activations included.",
        ("running", "tokens", "used", "blocks", "regions", "grown"),
    )
    for one in result.memory:
        found = (one.used, one.blocks, one.regions, one.grown)
        sizes = ("-" if size is None else f"{size / 1e6:,.1f}" for size in found)
        table.add_row(f"{one.running:,}", f"{one.tokens:,}", *sizes)
    return table


# ---- the picture


def plot(result: Result) -> Figure:
    """Four laws. Readable without colour: markers and kinds of lines differ."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading(result), fontsize=11)
    draws: tuple[Callable[[Any, Result], None], ...] = (draw_contexts, draw_batches, draw_prompts, draw_memory)
    for axes, draw in zip(figure.subplots(2, 2).flatten(), draws, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        draw(axes, result)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="upper left", fontsize=9)
        else:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
    return figure


def draw_curve(axes: Any, found: Curve, label: str, marker: str, colour: str, line: str) -> None:
    """Points with the range of their rounds, and the law through them."""
    sizes, middle = [p.n for p in found.points], [p.seconds.median * 1e3 for p in found.points]
    spread = [
        [(p.seconds.median - p.seconds.least) * 1e3 for p in found.points],
        [(p.seconds.most - p.seconds.median) * 1e3 for p in found.points],
    ]
    look = {"color": colour, "ecolor": colour, "marker": marker, "markersize": 5, "linestyle": "none", "capsize": 3}
    axes.errorbar(sizes, middle, yerr=spread, label=label, **look)
    axes.plot(sizes, [p.by_law * 1e3 for p in found.points], line, color=colour, linewidth=1)


def draw_floor(axes: Any, found: Curve) -> None:
    sizes, floor = [p.n for p in found.points], [p.floor * 1e3 for p in found.points]
    axes.plot(sizes, floor, "--", color="0.5", linewidth=1.4, label="the least, by bandwidth and arithmetic")


def draw_contexts(axes: Any, result: Result) -> None:
    axes.set_title(f"Decode of {result.plan.running} over the context", loc="left", fontsize=11)
    axes.set_xlabel("positions that each text looks at")
    axes.set_ylabel("ms for a step")
    if result.contexts:
        draw_curve(axes, result.contexts, "measured, and its law", "o", "black", "-")
        draw_floor(axes, result.contexts)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)


def whole_numbers(axes: Any, ticks: Sequence[int]) -> None:
    """Both axes in powers, with the sizes themselves below."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_batches(axes: Any, result: Result) -> None:
    axes.set_title(f"Decode at context {result.plan.context} over the batch", loc="left", fontsize=11)
    axes.set_xlabel("texts in the step (both axes in powers)")
    axes.set_ylabel("ms for a step")
    if result.batches:
        draw_curve(axes, result.batches, "measured, and its law", "o", "black", "-")
        draw_floor(axes, result.batches)
        whole_numbers(axes, [p.n for p in result.batches.points])
        if result.knee:
            axes.axvline(result.knee, color="0.4", linewidth=1, linestyle=":", label="shared cost = cost of each")


def draw_prompts(axes: Any, result: Result) -> None:
    axes.set_title("Prefill over the prompt", loc="left", fontsize=11)
    axes.set_xlabel("tokens of the prompt (both axes in powers)")
    axes.set_ylabel("ms until its first token")
    if result.prompts:
        draw_curve(axes, result.prompts, "whole, and its law", "o", "black", "-")
        if result.chunked:
            draw_curve(axes, result.chunked, f"in chunks of {result.plan.budget:,}", "x", "0.4", ":")
        draw_floor(axes, result.prompts)
        whole_numbers(axes, [p.n for p in result.prompts.points])
        if result.quadratic_from and result.quadratic_from <= result.prompts.points[-1].n:
            axes.axvline(
                result.quadratic_from, color="0.4", linewidth=1, linestyle="-.", label="n^2 costs as much as n"
            )


def draw_memory(axes: Any, result: Result) -> None:
    axes.set_title("KV memory over running tokens", loc="left", fontsize=11)
    axes.set_xlabel("tokens whose K and V are stored")
    axes.set_ylabel("MB")
    tokens = [one.tokens for one in result.memory]
    for name, label, look in (
        ("regions", "reserved in regions", {"color": "0.4", "marker": "s", "linestyle": "-."}),
        ("grown", "the process grew by", {"color": "0.4", "marker": "x", "linestyle": ":"}),
        ("blocks", f"held in blocks of {BLOCK}", {"color": "black", "marker": "+", "linestyle": "--", "markersize": 9}),
        ("used", "used", {"color": "black", "marker": "o", "linestyle": "-"}),
    ):
        sizes = [getattr(one, name) for one in result.memory]
        if sizes and None not in sizes:
            axes.plot(tokens, [size / 1e6 for size in sizes], label=label, **({"markersize": 4, "linewidth": 1} | look))
    if result.memory:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)


# ---- the command


def run_command(
    plan: Plan, model: str, device: str, dtype: str, json_path: Path | None, plot_path: Path | None, console: Console
) -> int:
    """`minillm bench scaling`. Returns the exit status, 0.

    Raises InputError as `scaling.measure`, and for a file that cannot be written, before the weights are loaded. After
    Ctrl-C it shows and saves what is whole, and raises KeyboardInterrupt again.
    """
    from minillm.fetch import find

    results.check_room(json_path)
    results.check_plot(plot_path)
    folder = find(model)
    plan.check(Config.from_folder(folder))
    result = measure(load_model(folder, device, dtype, console), folder.name, plan, console)
    show(result, console)

    def content() -> dict[str, Any]:
        return as_json(result, alt_text=alt_text(result), finding=finding(result))

    results.save(console, json_path, "scaling", content, plot_path, lambda: plot(result))
    if result.partial:
        raise KeyboardInterrupt
    return 0
