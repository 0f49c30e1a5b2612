"""The benchmark: every stage of the ladder on the same prompts, each measured against the one before it.

workload  what is asked: presets, sets of requests    ladder   the course: warm-up, rounds, check, rows
harness   one run of one stage: stamps, counters      rows     runs to medians, ratios, ceilings
metrics   what time stamps mean                       verify   is it the naive model's text?
ceiling   what this machine could do                  claims   comparisons with a target
live      the text while it is made                   report   tables, JSON, plot
peers     transformers, for comparison                machine  what it ran on
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def run_command(
    stages: list[str] | None,
    preset: str,
    model: str,
    device: str,
    dtype: str,
    json_path: Path | None,
    plot_path: Path | None,
    stream: bool,
    console: Console,
) -> int:
    """`minillm bench`, and `minillm ladder` with `stream`: measures the stages (None: all) and prints tables.

    Raises InputError for an unknown stage, preset, model, device or dtype and for a file that cannot be
    written, before anything is measured. Returns the exit status: 1 if a text is not the naive model's.
    """
    from minillm.bench import claims, ladder, report, workload  # imports torch and matplotlib only when asked for
    from minillm.fetch import find
    from minillm.model import Llama
    from minillm.packing import pack_weights
    from minillm.tokenizer import Tokenizer

    chosen = workload.pick_preset(preset)
    names = ladder.pick_stages(stages)
    report.check_writable(json_path)
    report.check_writable(plot_path, report.PLOT_SUFFIXES)
    folder = find(model)
    with console.status(f"Loading {folder.name}"):
        llama = pack_weights(Llama.from_pretrained(folder, device=device, dtype=dtype))
        tokenizer = Tokenizer.from_pretrained(folder)
    work = workload.real_workload(tokenizer, chosen, llama.config)
    result = ladder.measure(llama, folder.name, work, chosen, names, console, stream)
    if chosen.claims:
        result.claims.append(claims.loading(folder))
    report.show(result, console)
    report.save(result, json_path, plot_path, console)
    return 1 if any(row.void for row in result.rows) else 0
