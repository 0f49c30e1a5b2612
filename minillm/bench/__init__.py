"""Measuring: the ladder, every stage against the one before it; experiments on the queue, prefill and memory; and
one run step by step.

The ladder                                            Experiments
workload  what is asked: presets, sets of requests    queueing   requests that arrive while others run
ladder    the course: warm-up, rounds, check, rows    prefill    a long prompt arrives while others decode
rows      runs to medians, ratios, ceilings           memory     KV memory reserved and used; activations
report    tables, plot                                fragmentation  the same memory in blocks
claims    comparisons with a target                   sharing    blocks that several texts hold
live      the text while it is made                   scheduling what planning costs, and who waits
earlier   a new ladder beside the stored one          scaling    what a step costs as work grows
                                                      backends   the same attention, computed in other ways
                                                      decoding   a decode step on a GPU, every way
                                                      profile    where a step's time goes
                                                      calibrate  how long a step takes, by what is in it
                                                      timeline   who did what in each step
                                                      trace      the timeline as a picture and as a trace
                                                      load       what a server's users see (load_client, ..)
                                                      serving    what our server costs, and its tail

What they share
harness   one run of one stage: stamps, counters      results    the JSON file, one section an experiment
metrics   what time stamps mean                       tables     tables and numbers for people
verify    is it the naive model's text?               machine    what it ran on
ceiling   what this machine could do                  peers      other engines, for comparison
steady    one step, made directly                     floor      the Linears alone, K and V
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from minillm.model import Llama
    from minillm.tokenizer import Tokenizer


def load_checkpoint(model: str, device: str, dtype: str, console: Console) -> tuple[Path, Llama, Tokenizer]:
    """The model's folder, the model with packed weights, its tokenizer. Raises InputError for a name, a device or a
    dtype that is not known."""
    from minillm.fetch import find
    from minillm.tokenizer import Tokenizer

    folder = find(model)
    return folder, load_model(folder, device, dtype, console), Tokenizer.from_pretrained(folder)


def load_model(folder: Path, device: str, dtype: str, console: Console) -> Llama:
    """With packed weights, as the engine has it."""
    from minillm.fusing import make_fast
    from minillm.model import Llama

    with console.status(f"Loading {folder.name}"):
        return make_fast(Llama.from_pretrained(folder, device=device, dtype=dtype))


def run_command(
    stages: list[str] | None,
    preset: str,
    peers: Sequence[tuple[str, str | None]],
    model: str,
    device: str,
    dtype: str,
    json_path: Path | None,
    plot_path: Path | None,
    stream: bool,
    console: Console,
) -> int:
    """`minillm bench`, and `minillm ladder` with `stream`: measures the stages (None: all) and prints tables.

    `peers` are pairs of a kind and, where it needs one, a path or URL (see `peers.compare`). Raises InputError for
    an unknown stage, preset, peer, model, device or dtype and for a file that cannot be written, before anything is
    measured. Returns the exit status: 1 if a text is not the naive model's, or a peer's row is void.
    """
    # torch and matplotlib only when they are asked for
    from minillm.bench import claims, earlier, ladder, report, results, workload
    from minillm.bench.peers import compare

    chosen = workload.pick_preset(preset)
    names = ladder.pick_stages(stages)
    results.check_room(json_path)
    results.check_plot(plot_path)
    others = compare.parse(peers)
    folder, llama, tokenizer = load_checkpoint(model, device, dtype, console)
    work = workload.real_workload(tokenizer, chosen, llama.config)
    result = ladder.measure(llama, folder.name, work, chosen, names, console, stream, folder, others)
    if chosen.claims and not result.partial:
        result.claims.append(claims.loading(folder))
    report.show(result, console)
    if json_path is not None and not result.partial:
        earlier.show(earlier.compare(report.as_json(result), json_path), console)
    report.save(result, json_path, plot_path, console)
    if result.partial:
        raise KeyboardInterrupt
    void = [row.void for row in result.rows]
    if result.peers:
        void += [row.void for row in result.peers.set_rows] + [row.void for row in result.peers.grid_rows]
    return 1 if any(void) else 0
