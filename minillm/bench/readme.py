"""`make readme`: puts the stored results into README.md, between its markers.

The README holds no measured number that was typed by hand: a test compares its tables with the results file, which is
the one that the README links to.
"""

import re
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from PIL import Image

from minillm.bench import results
from minillm.bench.tables import device_name, si, times

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def ladder(file: str, sections: dict[str, Any]) -> str:
    """Plot, table, how they were measured, and the comparisons with a target, as Markdown."""
    found = sections["ladder"]
    about, model, preset, sets = (found[key] for key in ("about", "model", "preset", "sets"))
    main, small = sets["main"], sets["small"]
    table = [
        "| stage | output tokens/s | x before | x first | tokens pushed per needed one | attention scores | KV held "
        "| ttft s | tpot ms | of the ceiling |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        star = " *" if row["request_set"] == "small" else ""
        cells = [
            row["stage"] + star,
            f"{row['output_throughput']:.1f}",
            times(row["ratio_before"]),
            times(row["ratio_first"]),
            f"{row['tokens_pushed'] / row['tokens_useful']:.2f}",
            si(row["attention_scores"]),
            f"{row['peak_kv_reserved_bytes'] / 1e6:.0f} MB",
            f"{row['ttft_median']:.2f}",
            f"{row['tpot_median'] * 1e3:.1f}",
            f"{row['ceiling_share']:.0%}",
        ]
        table.append(f"| {' | '.join(cells)} |")
    excused = max(row["share_excused"] for row in found["rows"])
    lines = [
        f"![{found['alt_text']}](results/{file}-ladder.png)",
        "",
        *table,
        "",
        f"{model['name']} in {model['dtype']} on {device_name(about)}, torch "
        f"{about['versions']['torch']}; `{about['command']}`, medians of {len(found['rows'][-1]['rounds'])} "
        f"interleaved rounds, {about['date'][:10]} ([results/{file}.json](results/{file}.json)). "
        f"{main['requests']} prompts of {main['shortest_prompt']} to {main['longest_prompt']:,} tokens, all there at "
        f"the start, {main['output_tokens']:,} output tokens, at most {preset['max_running']} texts at once. "
        f"\\* naive on {small['requests']} short prompts, on which its ratio to cached is taken too. Every token was "
        f"checked against the naive model: at most {excused:.1%} were not its best one but as good within rounding. "
        "ttft: to the first token, waiting included; tpot: per further token. Ceiling: what this machine's measured "
        "bandwidth and arithmetic allow for the work that the stage does, waste included.",
    ]
    return "\n".join([*lines, *claims(found["claims"]), *peers(found.get("peers"))]) + "\n"


def claims(found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    lines = ["", "| what it is said to buy | target | measured | |", "|---|--:|--:|---|"]
    for claim in found:
        measured = "-" if claim["measured"] is None else f"{claim['measured']:.2f} x"
        met = {True: "met", False: "**missed**", None: "not measured"}[claim["met"]]
        lines.append(f"| {claim['claim']} | {claim['target']} | {measured} | {met}: {claim['detail']} |")
    return lines


def queue(file: str, sections: dict[str, Any]) -> str:
    """What each policy made of the same arrivals on the real engine."""
    found = sections["queue"]
    plan, article = found["plan"], found["scenarios"][0]
    lines = [
        f"![{found['alt_text']}](results/{file}-queue.png)",
        "",
        "| requests | policy | mean wait s | p95 | max | makespan s | requests/s | slots idle | median ttft s "
        "| tpot ms |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for scenario in found["scenarios"]:
        for row in scenario["rows"]:
            f = row["figures"]
            cells = [
                scenario["name"],
                row["policy"],
                f"{f['mean_wait']:.2f}",
                f"{f['p95_wait']:.2f}",
                f"{f['max_wait']:.2f}",
                f"{f['makespan']:.1f}",
                f"{f['request_throughput']:.2f}",
                f"{f['idle_share']:.0%}",
                f"{row['ttft']['median']:.2f}",
                "-" if row["tpot"] is None else f"{row['tpot']['median'] * 1e3:.1f}",
            ]
            if row["void"]:
                cells[2:] = ["void"] + [""] * 7
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- **{scenario['name']}**: {told(scenario)}" for scenario in found["scenarios"]), ""]
    lines.append(
        f"{found['model']['name']} in {found['model']['dtype']} on {device_name(found['about'])}; "
        f"`{found['about']['command']}`, {found['about']['date'][:10]}. {plan['slots']} slots; "
        f"requests arrive {plan['load']:g} times as fast as continuous batching can serve them here "
        f"({article['rate']:.1f} a second in `article`), as in the published simulation. wait: first step minus "
        "arrival; makespan: until the last token. static groups start and end together on the "
        "continuous engine, so that only who may enter differs; padded and dynamic are the ladder's "
        "stages."
    )
    return "\n".join([*lines, *claims(found["claims"])]) + "\n"


def told(scenario: dict[str, Any]) -> str:
    """One scenario in words: what it is, what came out, why."""
    text = f"{scenario['about']}; {scenario['requests']} requests."
    if scenario["makespan_ratio"] and scenario["wait_ratio"]:
        ratios = f"makespan {times(scenario['makespan_ratio'])}, mean wait {times(scenario['wait_ratio'])}"
        text += f" static over continuous: {ratios}."
    return f"{text} {scenario['why']}"


def experiments(file: str, sections: dict[str, Any]) -> str:
    """The other experiments: a picture, what it shows, and the command."""
    titles = {
        "simulation": "The queue, simulated",
        "prefill": "A long prompt arrives while others decode",
        "memory": "KV memory, reserved and used",
        "sharing": "Blocks that are shared",
        "scheduler": "Who is next, and what it costs to decide",
        "profile": "Where a step's time goes",
        "backends": "The same attention, computed in other ways",
        "scaling": "Cost as work grows",
    }
    tables = {"memory": blocks, "sharing": sharing, "scheduler": scheduler, "profile": profile, "scaling": scaling}
    lines = []
    for name, title in titles.items():
        if name not in sections:
            continue  # a results file from before this experiment
        found = sections[name]
        lines += [f"**{title}** (`{found['about']['command']}`). {found['finding']}", ""]
        if "alt_text" in found:
            lines += [f"![{found['alt_text']}](results/{file}-{name}.png)", ""]
        if name in tables:
            lines += tables[name](found)
    words = Image.open(ROOT / "results" / f"{file}-trace.png").info["Description"]
    lines += ["**What happened in each step** (`minillm trace`).", "", f"![{words}](results/{file}-trace.png)"]
    return "\n".join(lines) + "\n"


def blocks(found: dict[str, Any]) -> list[str]:
    """The same memory in regions and in blocks; nothing if it was not measured."""
    if found.get("blocks") is None:
        return []
    found = found["blocks"]
    plan = found["plan"]
    lines = [
        "In the picture paged and shared were given as much memory as continuous, and leave as much empty; what blocks "
        f"change is how many texts it can hold. The memory of {plan['regions']} regions, each as long as the longest "
        f"of {plan['requests']} requests of the article's mix, with at most {plan['max_running']} at once in blocks; "
        "counted by the real scheduler without a model, so the same on every machine:",
        "",
        "| memory | wasted of what is held | requests at once | most | preempted | tokens computed again | steps |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for c in found["counted"]:
        lines.append(
            f"| {c['memory']} | {c['waste']:.1%} | {c['running']:.1f} | {c['most_running']} | {c['preemptions']:,} "
            f"| {c['recomputed']:,} | {c['steps']:,} |"
        )
    if found["served"]:
        slow, fast = found["served"]
        void = "".join(f" {row['stage']} is void: {row['void']}." for row in (slow, fast) if row["void"])
        gain = void or (
            f" {slow['output_throughput']:.0f} to {fast['output_throughput']:.0f} output tokens/s, "
            f"{times(found['ratio'])}."
        )
        lines += [
            "",
            f"{plan['served']} such requests with lengths times {plan['scale']:g} on the model, from {plan['regions']} "
            f"regions to blocks of {plan['block']} in the same {slow['nbytes'] / 1e6:.0f} MB: "
            f"{slow['running']:.1f} to {fast['running']:.1f} at once, {fast['preemptions']:,} preempted, "
            f"{fast['recomputed']:,} tokens computed again,{gain}",
        ]
    return [*lines, *claims(found["claims"]), ""]


def sharing(found: dict[str, Any]) -> list[str]:
    """How much of what was asked was there already."""
    plan = found["plan"]
    about = {
        "samples": f"{plan['samples']} samples of one {plan['prompt']}-token prompt",
        "questions": f"{plan['questions']} questions behind one {plan['system']:,}-token system prompt",
        "chat": f"{plan['turns']} turns of a chat, the model's own answers in it",
        "distinct": f"{plan['distinct']} prompts of {plan['length']} tokens, all different",
    }
    lines = ["| requests | prompt tokens | found, not computed | hit rate | blocks saved |", "|---|--:|--:|--:|--:|"]
    for name, words in about.items():
        if (part := found[name]) is not None:
            f = part["found"]
            lines.append(
                f"| {words} | {f['asked']:,} | {f['found']:,} | {f['found'] / f['asked']:.1%} | {f['saved']:,} |"
            )
    return [*lines, *claims(found["claims"]), ""]


def scheduler(found: dict[str, Any]) -> list[str]:
    """Who waits under each policy, and what a step costs beside the model."""
    lines = [
        "| policy | who | requests | mean wait, steps | p95 | max | overtaken by |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for wait in found["waits"]:
        lines.append(
            f"| {wait['policy']} | {wait['who']} | {wait['requests']:,} | {wait['mean']:.1f} | {wait['p95']:.0f} "
            f"| {wait['most']:,} | {wait['overtaken']} |"
        )
    queues = sorted({cost["waiting"] for cost in found["costs"]})
    lines += [
        "",
        f"| microseconds a step, {found['plan']['running']} running | {' | '.join(f'{n:,} wait' for n in queues)} |",
    ]
    lines.append("|---|" + "--:|" * len(queues))
    for slots in dict.fromkeys(cost["slots"] for cost in found["costs"]):
        cells = [f"{c['total']['median'] * 1e6:,.0f}" for c in found["costs"] if c["slots"] == slots]
        lines.append(f"| {slots}: schedule, pack, update | {' | '.join(cells)} |")
    return [*lines, ""]


def scaling(found: dict[str, Any]) -> list[str]:
    """The four laws side by side: sizes, times, what the law says; and memory."""
    plan, curves = found["plan"], [found[name] for name in ("contexts", "batches", "prompts")]
    assert all(curves) and found["chunked"], "`minillm bench scaling` was stopped before it measured all"
    heads = [
        f"{plan['running']} at context",
        f"running, context {plan['context']}",
        "prompt",
        f"in chunks of {plan['budget']}",
        "running tokens",
    ]
    one, two, three, four, five = heads
    lines = [
        f"| {one} | ms | law | {two} | ms | law | {three} | ms | law | {four} | {five} | used MB | regions MB |",
        "|" + "--:|" * 13,
    ]

    def cells(p: dict[str, Any] | None) -> list[str]:
        return ["", "", ""] if p is None else [f"{p['n']:,}", ms(p["seconds"]["median"]), ms(p["by_law"])]

    def held(one: dict[str, Any] | None) -> list[str]:
        sizes = [] if one is None else [f"{one[name] / 1e6:,.0f}" for name in ("used", "regions")]
        return ["", "", ""] if one is None else [f"{one['tokens']:,}", *sizes]

    columns = [curve["points"] for curve in curves] + [found["chunked"]["points"], found["memory"]]
    for a, b, c, cut, memory in zip_longest(*columns):
        chunks = "" if cut is None else ms(cut["seconds"]["median"])
        lines.append(f"| {' | '.join([*cells(a), *cells(b), *cells(c), chunks, *held(memory)])} |")
    return [*lines, ""]


def profile(found: dict[str, Any]) -> list[str]:
    """Each part's share of a step, for every kind of step; then the step and its floor."""
    steps = {one["kind"]: one for one in found["profiles"]}
    names = list(dict.fromkeys(part["name"] for one in steps.values() for part in one["parts"]))
    lines = [f"| part | {' | '.join(f'{kind} ms | share' for kind in steps)} |", "|---|" + "--:|" * 2 * len(steps)]
    for name in names:
        cells = []
        for one in steps.values():
            part = next((part for part in one["parts"] if part["name"] == name), None)
            cells += ["", ""] if part is None else [ms(part["seconds"]), f"{part['share']:.1%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    whole = [cell for one in steps.values() for cell in (ms(one["step"]["median"]), "")]
    floors = [one["floor"]["linears"] + one["floor"]["attention"] for one in steps.values()]
    floor = [cell for low, one in zip(floors, steps.values(), strict=True) for cell in (ms(low), f"{one['share']:.0%}")]
    lines += [f"| **the step, not watched** | {' | '.join(whole)} |", f"| **its floor** | {' | '.join(floor)} |"]
    return [*lines, ""]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def peers(found: dict[str, Any] | None) -> list[str]:
    """Other engines in the same run; nothing if none was measured."""
    if found is None:
        return []
    lines = [
        "",
        "| other engines, the same run | what | tokens/s | minillm is so many times as fast |",
        "|---|---|--:|--:|",
    ]

    def cells(row: dict[str, Any], what: str, speed: str, ratio: str) -> str:
        if row["void"]:
            return f"| {row['name']} | {what} | void | {row['void']} |"
        gain = "" if row[ratio] is None else times(row[ratio]["median"])
        return f"| {row['name']} | {what} | {row[speed]['median']:.0f} | {gain} |"

    lines += [cells(row, "the requests above, output", "output_throughput", "ratio") for row in found["set_rows"]]
    shape = f"{found['n_prompt']} + {found['n_new']} tokens, decode"
    lines += [cells(row, f"{row['N']} x {shape}", "decode_throughput", "decode_ratio") for row in found["grid_rows"]]
    return lines


def serving(file: str, sections: dict[str, Any]) -> str:
    """The server over the engine, many streams, the tail as load grows; nothing in a results file from before."""
    if "serving" not in sections:
        return ""
    found = sections["serving"]
    plan, model = found["plan"], found["model"]
    lines = [
        f"{found['finding']} {model['name']} in {model['dtype']} on {device_name(found['about'])}; "
        f"`{found['about']['command']}`, {found['about']['date'][:10]} ([results/{file}.json](results/{file}.json)).",
        "",
        "| target | | measured | |",
        "|---|--:|--:|---|",
    ]
    for one in found["verdicts"]:
        met = {True: "met", False: "**missed**", None: "not measured"}[one["met"]]
        lines.append(f"| {one['what']} | {one['target']} | {one['measured']} | {met}: {one['detail']} |")
    lines += ["", *markdown(found["engines"]), ""]
    peer = f" The other server is `{found['peer']}`, on the same weights." if found["peer"] else ""
    lines.append(
        f"{plan['requests']} of the package's prompts from {plan['clients']} clients in a closed loop, "
        f"{plan['max_tokens']} tokens each; medians of {plan['rounds']} rounds by turns. offline is the engine alone, "
        f"given a new prompt as soon as a text ends; CPU seconds are of a round, all cores together.{peer}"
    )
    if found["sweep"]:
        lines += ["", *markdown(found["load"]), ""]
        lines.append(
            f"An open loop: requests come at random times (Poisson) for {plan['seconds']:g} s, whether or not the "
            "server keeps up. Capacity is the requests/s of the closed loop; ttft and tpot in ms, ttft from the "
            f"scheduled time on; good: share of requests within {found['limits']}."
        )
    return "\n".join(lines) + "\n"


def markdown(rows: list[dict[str, str]]) -> list[str]:
    """A table of cells that are text, under their names; the first column is a name, the others are numbers."""
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    return [*lines, *(f"| {' | '.join(row.values())} |" for row in rows)]


BLOCKS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "ladder": ladder,
    "queue": queue,
    "experiments": experiments,
    "serving": serving,
}


def results_file(readme: str) -> Path:
    """The results file that the README links to."""
    found = re.search(r"\(results/([\w.-]+\.json)\)", readme)
    assert found, "README.md links to no results file"
    return ROOT / "results" / found[1]


def filled(readme: str, path: Path) -> str:
    """README's text with the blocks between its markers made anew from a results file."""
    sections = results.load(path)
    missing = {"ladder", "queue", "simulation", "prefill", "memory"} - sections.keys()
    assert not missing, f"{path.name} has no {', '.join(sorted(missing))}; `make bench` measures all"
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"
        head, found, rest = readme.partition(begin)
        _, closed, tail = rest.partition(end)
        assert found and closed, f"README.md has no {begin.strip()} and {end.strip()}"
        readme = head + begin + block(path.stem, sections) + end + tail
    return readme


if __name__ == "__main__":
    text = README.read_text("utf-8")
    README.write_text(filled(text, Path(sys.argv[1]) if len(sys.argv) > 1 else results_file(text)), "utf-8")
