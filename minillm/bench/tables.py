"""Tables and numbers for people. No torch here: the simulation uses them too."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


def new_table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def rate(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.1f} x"


def si(count: float) -> str:
    """Three digits and a letter: 1.23 G."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g} {letter}"
    return f"{count:g}"


def device_name(about: dict[str, Any]) -> str:
    """The GPU, or the CPU and its cores, of what `machine.describe` tells."""
    facts = about["machine"]
    return str(facts["gpu"] or f"{facts['cores']} cores of {facts['cpu']}")
