"""Did anything get slower? A new ladder beside the stored one, stage by stage.

Tokens per second from two days differ because the machine does. So each stage is set in relation to transformers'
`generate`, which ran in the same rounds, then and now; only these relations are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import results
from minillm.bench.tables import new_table, times

MEASURE = "transformers generate"
SLOWER = 0.9  # a stage whose relation fell below this share of what it was is called slower


@dataclass(frozen=True)
class Change:
    stage: str
    before: float  # its output tokens/s over those of MEASURE, in the stored run
    now: float

    @property
    def factor(self) -> float:
        return self.now / self.before


@dataclass(frozen=True)
class Comparison:
    """`why_not` says why there is nothing to compare; else it is empty."""

    stored: str = ""  # date and commit of the stored run
    changes: list[Change] = field(default_factory=list)
    why_not: str = ""

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.factor < SLOWER]


def compare(new: Mapping[str, Any], path: Path) -> Comparison:
    """`new` is a ladder section as `report.as_json` makes it, `path` a results file that may hold another one."""
    stored = results.load(path).get("ladder") if path.exists() and path.stat().st_size else None
    if stored is None:
        return Comparison(why_not=f"{path} holds no ladder yet")
    for what, parts in (("model", None), ("preset", None), ("prompts", prompts)):
        before, now = (parts(section) if parts else section[what] for section in (stored, new))
        if before != now:
            return Comparison(why_not=f"other {what} than in the ladder stored in {path}")
    if stored["about"]["machine"] != new["about"]["machine"]:
        return Comparison(why_not=f"the ladder stored in {path} was measured on another machine")
    then, today = relations(stored), relations(new)
    if not then or not today:
        when = "stored run" if today else "new run"
        return Comparison(why_not=f"the {when} is without {MEASURE}; measure with --peer transformers")
    about = stored["about"]
    changes = [Change(stage, then[stage], today[stage]) for stage in today if stage in then]
    return Comparison(f"{about['date'][:10]}, commit {(about['commit'] or 'unknown')[:7]}", changes)


def prompts(section: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked, without how many tokens came out: where two are as good, a model's texts part by rounding."""
    return {name: {**one, "output_tokens": None} for name, one in section["sets"].items()}


def relations(section: Mapping[str, Any]) -> dict[str, float]:
    """{stage: its output tokens/s over those of MEASURE in the same run}; empty without MEASURE."""
    peers = section["peers"]["set_rows"] if section["peers"] else []
    speed = [row["output_throughput"]["median"] for row in peers if row["name"] == MEASURE and not row["void"]]
    if not speed:
        return {}
    return {row["stage"]: row["output_throughput"] / speed[0] for row in section["rows"] if not row["void"]}


def show(found: Comparison, console: Console) -> None:
    if found.why_not:
        console.print(Text(f"Not compared with an earlier run: {found.why_not}.", style="dim"))
        return
    console.print(table(found))
    slower = ", ".join(f"{change.stage} ({change.factor:.2f} of before)" for change in found.slower)
    console.print(Text(f"Slower than stored: {slower or 'no stage'}.", style="red" if slower else "dim"))


def table(found: Comparison) -> Table:
    made = new_table(
        f"Against the stored run ({found.stored})",
        f"Output tokens/s over those of {MEASURE} in the same run. Below {SLOWER:g} of before counts as slower.",
        ("stage", "stored", "now", "now / stored"),
    )
    for change in found.changes:
        made.add_row(change.stage, times(change.before), times(change.now), times(change.factor))
    return made
