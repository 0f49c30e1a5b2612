"""Sharing for people: tables, a plot, and the plot in words; and the command itself."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import load_model, results
from minillm.bench.report import claims_table
from minillm.bench.sharing import KINDS, Chat, Plan, Questions, Result, Samples, measure, ms
from minillm.bench.tables import device_name, new_table, rate, times
from minillm.bench.workload import QUICK, real_workload
from minillm.config import Config
from minillm.fetch import find
from minillm.tokenizer import Tokenizer

# ---- tables


def finding(result: Result) -> str:
    """What the numbers show, a sentence for each part."""
    plan, lines = result.plan, []
    if samples := result.samples:
        peaks = {kind: max(blocks) for kind, blocks in samples.held.items()}
        lines.append(
            f"{plan.samples} samples of a {plan.prompt}-token prompt hold {peaks['shared']} blocks in place of "
            f"{peaks['paged']}, {samples.share:.0%}, and are there {times(samples.ratio)} as fast."
        )
    if (questions := result.questions) and not questions.void:
        lines.append(
            f"Behind a {plan.system:,}-token system prompt that was there before, a question has its first token "
            f"after {ms(questions.later['shared'].median)} ms in place of {ms(questions.later['paged'].median)}, "
            f"{times(questions.ratio)} as fast; the first one pays for it."
        )
    if (chat := result.chat) and not chat.void:
        lines.append(
            f"In a chat of {len(chat.turns)} turns {chat.found.rate:.0%} of all prompt tokens were there already, and "
            f"from the second turn on the first token comes {times(chat.ratio)} as fast."
        )
    if (distinct := result.distinct) and not distinct.void:
        lines.append(
            f"Where prompts share nothing the hit rate is {distinct.found.rate:.1%}, and the throughput "
            f"{times(distinct.ratio)} that without looking."
        )
    return " ".join(lines) or "Nothing was measured that could be compared."


def heading(result: Result) -> str:
    """What was measured and on what, in one line."""
    m = result.model
    return f"{m['name']}, {m['dtype']}, {device_name(result.about)}"


def show(result: Result, console: Console) -> None:
    """What was found, then what it bought."""
    console.print()
    console.print(Text(heading(result), style="bold"))
    console.print(found_table(result), gains_table(result))
    if result.chat:
        console.print(chat_table(result.chat))
    if result.claims:
        console.print(claims_table(result.claims))
    console.print(Text(finding(result)))
    for part, why in result.void.items():
        console.print(Text(f"{part} is void: {why}.", style="red"))
    stopped = " Stopped half way: the parts that were whole until then." if result.partial else ""
    console.print(Text(f"Rounds: {result.plan.rounds}; {result.seconds:.0f} s in all.{stopped}", style="dim"))


def found_table(result: Result) -> Table:
    plan = result.plan
    about = {
        "samples": f"{plan.samples} samples of one {plan.prompt}-token prompt",
        "questions": f"{plan.questions} questions, {plan.system:,}-token system prompt",
        "chat": f"{plan.turns} turns of one conversation",
        "distinct": f"{plan.distinct} prompts of {plan.length} tokens, all different",
    }
    table = new_table(
        f"What was found, in blocks of {plan.block}: the same on every machine, but for the chat",
        "asked: tokens of all prompts. found: of these, in memory already, so never computed again. blocks saved: held "
        "once in place of several times, or kept from before.",
        ("requests", "asked", "found", "hit rate", "blocks saved"),
    )
    for name, found in result.found.items():
        hit = Text(f"{found.rate:.1%}", style="bold")
        table.add_row(about[name], f"{found.asked:,}", f"{found.found:,}", hit, f"{found.saved:,}")
    return table


def gains_table(result: Result) -> Table:
    same = ""
    if result.samples:
        same = f"{result.samples.same_texts} of {result.plan.samples} samples have the same tokens in both: they draw "
        same += "the same numbers, and only rounding can part them. "
    table = new_table(
        "What it bought",
        "gain: how many times as fast, or as little, shared is. range: of shared, over the rounds; the rest are "
        f"medians. {same}Questions, chat and distinct are greedy, and every token was checked against the naive model.",
        ("what", "not shared", "shared", "range", "gain"),
    )

    def row(what: str, paged: str, shared: str, spread: str, gain: float) -> None:
        table.add_row(what, paged, Text(shared, style="bold"), spread, Text(times(gain), style="bold"))

    if samples := result.samples:
        slow, fast = (samples.seconds[kind] for kind in KINDS)
        peaks = [max(samples.held[kind]) for kind in KINDS]
        row("samples: peak blocks held", f"{peaks[0]:,}", f"{peaks[1]:,}", "-", 1 / samples.share)
        row(
            "samples: s until all are there",
            f"{slow.median:.2f}",
            f"{fast.median:.2f}",
            f"{fast.least:.2f}-{fast.most:.2f}",
            samples.ratio,
        )
    if questions := result.questions:
        for what, spreads in (("first question", questions.first), ("later questions", questions.later)):
            slow, fast = (spreads[kind] for kind in KINDS)
            if questions.void:
                table.add_row(f"{what}: ttft ms", Text("void", style="red"))
            else:
                spread = f"{ms(fast.least)}-{ms(fast.most)}"
                row(f"{what}: ttft ms", ms(slow.median), ms(fast.median), spread, slow.median / fast.median)
    if distinct := result.distinct:
        slow, fast = (distinct.output_throughput[kind] for kind in KINDS)
        if distinct.void:
            table.add_row("distinct: output tokens/s", Text("void", style="red"))
        else:
            spread = f"{rate(fast.least)}-{rate(fast.most)}"
            row("distinct: output tokens/s", rate(slow.median), rate(fast.median), spread, distinct.ratio)
    return table


def chat_table(chat: Chat) -> Table:
    table = new_table(
        "A chat, turn by turn",
        "prompt: tokens of the whole conversation so far. computed: those that were not found; the last answer is new "
        "text, and so is what the template puts around it. answer: tokens. ttft: medians of the rounds.",
        ("turn", "prompt", "found", "computed", "hit rate", "answer", "ttft ms", "not shared", "gain"),
    )
    for i, turn in enumerate(chat.turns, start=1):
        cells = [f"{turn.prompt:,}", f"{turn.found:,}", f"{turn.prompt - turn.found:,}"]
        cells += [f"{turn.found / turn.prompt:.0%}", f"{turn.new:,}"]
        slow, fast = (turn.ttft[kind] for kind in KINDS)
        seen = [Text("void", style="red")] if chat.void else [Text(ms(fast), "bold"), ms(slow), times(slow / fast)]
        table.add_row(str(i), *cells, *seen)
    return table


# ---- the plot


def alt_text(result: Result) -> str:
    """The plot in words, for those who do not see it."""
    parts = []
    if samples := result.samples:
        peaks = ", ".join(f"{kind}: {max(samples.held[kind])}" for kind in KINDS)
        parts.append(f"Blocks held by {result.plan.samples} samples over the steps, at most: {peaks}.")
    if questions := result.questions:
        by_kind = "; ".join(
            f"{kind}: {'void' if questions.void else ', '.join(map(ms, values))}"
            for kind, values in questions.by_number.items()
        )
        parts.append(f"Time to the first token of each question behind one system prompt, in ms: {by_kind}.")
    if chat := result.chat:
        turns = ", ".join(f"turn {i}: {t.found} of {t.prompt}" for i, t in enumerate(chat.turns, start=1))
        parts.append(f"Prompt tokens found in each turn of a chat: {turns}.")
    return f"Charts of {heading(result)}. {' '.join(parts)} {finding(result)}"


def plot(result: Result) -> Figure:
    """Blocks that samples hold; ttft behind a system prompt; a chat's prompts. Readable without colour."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading(result), fontsize=11)
    parts: list[tuple[Callable[[Any, Any], None], Any]] = [
        (draw_samples, result.samples),
        (draw_questions, result.questions),
        (draw_chat, result.chat),
    ]
    drawn = [(draw, part) for draw, part in parts if part]
    for axes, (draw, part) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        draw(axes, part)
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # the legend above
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="upper left")
    return figure


LOOKS = {"paged": ("0.45", "x", "--"), "shared": ("black", "o", "-")}


def draw_samples(axes: Any, samples: Samples) -> None:
    for kind, blocks in samples.held.items():
        colour, _, line = LOOKS[kind]
        axes.plot(range(1, len(blocks) + 1), blocks, line, color=colour, label=kind)
    axes.set_xlabel("step")
    axes.set_ylabel("blocks held")
    axes.set_title("Samples of one prompt", loc="left", fontsize=11)


def draw_questions(axes: Any, questions: Questions) -> None:
    axes.set_title("Questions behind one system prompt", loc="left", fontsize=11)
    if questions.void:
        axes.text(0.5, 0.5, "void", transform=axes.transAxes, ha="center")
        return
    for kind, values in questions.by_number.items():
        colour, marker, line = LOOKS[kind]
        axes.plot(range(1, len(values) + 1), [t * 1e3 for t in values], line, color=colour, marker=marker, label=kind)
    axes.set_xlabel("question")
    axes.set_xticks(range(1, len(values) + 1))
    axes.set_ylabel("time to the first token, in ms")


def draw_chat(axes: Any, chat: Chat) -> None:
    at = range(1, len(chat.turns) + 1)
    found = [turn.found for turn in chat.turns]
    computed = [turn.prompt - turn.found for turn in chat.turns]
    axes.bar(at, found, color="white", edgecolor="black", hatch="///", label="found")
    axes.bar(at, computed, bottom=found, color="0.45", edgecolor="black", label="computed")
    axes.set_xticks(at)
    axes.set_xlabel("turn")
    axes.set_ylabel("tokens of the prompt")
    axes.set_title("A chat, turn by turn", loc="left", fontsize=11)


# ---- the command


def as_json(result: Result) -> dict[str, Any]:
    rates = {name: found.rate for name, found in result.found.items()}
    return {"alt_text": alt_text(result), "finding": finding(result), "hit_rates": rates, **asdict(result)}


def run_command(
    plan: Plan, model: str, device: str, dtype: str, json_path: Path | None, plot_path: Path | None, console: Console
) -> int:
    """`minillm bench sharing`. Returns the exit status: 1 if a text is not the naive model's.

    Raises InputError as `Plan.check`, and for a file that cannot be written, before the weights are loaded.
    After Ctrl-C it shows and saves what was whole, and raises KeyboardInterrupt again.
    """
    results.check_room(json_path)
    results.check_plot(plot_path)
    folder = find(model)
    config = Config.from_folder(folder)
    workload = real_workload(Tokenizer.from_pretrained(folder), QUICK, config)
    plan.check(config, workload)
    llama = load_model(folder, device, dtype, console)
    result = measure(llama, folder.name, workload, console, plan)
    show(result, console)
    results.save(console, json_path, "sharing", lambda: as_json(result), plot_path, lambda: plot(result))
    if result.partial:
        raise KeyboardInterrupt
    return 1 if result.void else 0
