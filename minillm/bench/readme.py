"""`make readme`: puts the stored results into README.md, between its markers.

The README holds no number that was typed by hand: a test compares its table with the results file.
"""

import json
from pathlib import Path
from typing import Any

from minillm.bench.tables import si, times

ROOT = Path(__file__).resolve().parents[2]
RESULTS, README = ROOT / "results" / "ladder-full.json", ROOT / "README.md"
BEGIN, END = "<!-- ladder:begin -->\n", "<!-- ladder:end -->\n"


def block(results: dict[str, Any]) -> str:
    """Plot, table, how they were measured, and the comparisons with a target, as Markdown."""
    about, model, preset, sets = (results[key] for key in ("about", "model", "preset", "sets"))
    main, small = sets["main"], sets["small"]
    table = [
        "| stage | output tokens/s | x before | x first | tokens pushed per needed one | attention scores | KV held "
        "| ttft s | tpot ms | of the ceiling |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
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
    excused = max(row["share_excused"] for row in results["rows"])
    lines = [
        f"![{results['alt_text']}](results/{RESULTS.stem}.png)",
        "",
        *table,
        "",
        f"{model['name']} in {model['dtype']} on {about['machine']['cores']} cores of {about['machine']['cpu']}, torch "
        f"{about['versions']['torch']}; `{about['command']}`, medians of {len(results['rows'][-1]['rounds'])} "
        f"interleaved rounds, {about['date'][:10]} ([results/{RESULTS.name}](results/{RESULTS.name})). "
        f"{main['requests']} prompts of {main['shortest_prompt']} to {main['longest_prompt']:,} tokens, all there at "
        f"the start, {main['output_tokens']:,} output tokens, at most {preset['max_running']} texts at once. "
        f"\\* naive on {small['requests']} short prompts, on which its ratio to cached is taken too. Every token was "
        f"checked against the naive model: at most {excused:.1%} were not its best one but as good within rounding. "
        "ttft: to the first token, waiting included; tpot: per further token. Ceiling: what this machine's measured "
        "bandwidth and arithmetic allow for the work that the stage does, waste included.",
    ]
    if results["claims"]:
        lines += ["", "| what it is said to buy | target | measured | |", "|---|--:|--:|---|"]
        for claim in results["claims"]:
            measured = "-" if claim["measured"] is None else f"{claim['measured']:.2f} x"
            met = {True: "met", False: "**missed**", None: "not measured"}[claim["met"]]
            lines.append(f"| {claim['claim']} | {claim['target']} | {measured} | {met}: {claim['detail']} |")
    return "\n".join(lines) + "\n"


def filled(readme: str, results: dict[str, Any]) -> str:
    """README's text with the block between the markers made anew."""
    head, _, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert end, f"README.md has no {BEGIN.strip()} and {END.strip()}"
    return head + BEGIN + block(results) + END + tail


if __name__ == "__main__":
    results = json.loads(RESULTS.read_text("utf-8"))
    README.write_text(filled(README.read_text("utf-8"), results), "utf-8")
