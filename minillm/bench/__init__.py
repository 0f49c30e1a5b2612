"""The benchmark: every stage of the ladder on the same prompts, each measured against the one before it.

workload  what is asked: presets, sets of requests    ladder   the course: warm-up, rounds, check, rows
harness   one run of one stage: stamps, counters      rows     runs to medians, ratios, ceilings
metrics   what time stamps mean                       verify   is it the naive model's text?
ceiling   what this machine could do                  claims   comparisons with a target
live      the text while it is made                   report   tables, plot
results   the JSON file, one section an experiment    tables   tables and numbers for people
peers     transformers, for comparison                machine  what it ran on
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from minillm.model import Llama
    from minillm.tokenizer import Tokenizer


def load(model: str, device: str, dtype: str, console: Console) -> tuple[Path, Llama, Tokenizer]:
    """The model's folder, the model with packed weights, its tokenizer. Raises InputError for a name, a device or a
    dtype that is not known."""
    from minillm.fetch import find
    from minillm.model import Llama
    from minillm.packing import pack_weights
    from minillm.tokenizer import Tokenizer

    folder = find(model)
    with console.status(f"Loading {folder.name}"):
        llama = pack_weights(Llama.from_pretrained(folder, device=device, dtype=dtype))
        return folder, llama, Tokenizer.from_pretrained(folder)


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
    # torch and matplotlib only when they are asked for
    from minillm.bench import claims, ladder, report, results, workload

    chosen = workload.pick_preset(preset)
    names = ladder.pick_stages(stages)
    results.check_room(json_path)
    results.check_plot(plot_path)
    folder, llama, tokenizer = load(model, device, dtype, console)
    work = workload.real_workload(tokenizer, chosen, llama.config)
    result = ladder.measure(llama, folder.name, work, chosen, names, console, stream)
    if chosen.claims and not result.partial:
        result.claims.append(claims.loading(folder))
    report.show(result, console)
    report.save(result, json_path, plot_path, console)
    if result.partial:
        raise KeyboardInterrupt
    return 1 if any(row.void for row in result.rows) else 0
