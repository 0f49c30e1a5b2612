"""Level 7: the ladder's requests on the real model, in the ladder's rounds, beside two of the ladder's stages.

Only ratios within one run count: what changes on the machine meanwhile hits all three engines.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from minillm.bench import harness, ladder, load_checkpoint
from minillm.bench.harness import Job, Run
from minillm.bench.peers.compare import Range
from minillm.bench.verify import MOST_EXCUSED, Verifier, judge
from minillm.bench.workload import QUICK, Preset, Workload, real_workload
from minillm.cli_options import DEFAULT_MODEL
from minillm.errors import InputError
from minillm.lab.conformance import LEAST_SPEED, Setup
from minillm.lab.conformance_levels import Found
from minillm.lab.conformance_source import Source
from minillm.lab.conformance_theirs import Theirs
from minillm.lab.work import Wrong
from minillm.model import Llama
from minillm.request import Event, Request

BESIDE = ("continuous", "kernels")


class Meter(nn.Module):
    """Stands in for the model where the harness counts steps: an engine of one's own has its own model."""

    def __init__(self, model: Llama):
        super().__init__()
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.head = nn.Identity()

    def forward(self, tokens: Tensor, positions: None, attend: None) -> None:
        pass


def generate_with(theirs: Theirs) -> Callable[[Any, Sequence[Request]], Iterator[Event]]:
    """Their engine as a stage of the ladder; all requests are there at the start."""

    def generate(meter: Any, requests: Sequence[Request]) -> Iterator[Event]:
        for key, request in enumerate(requests):
            theirs.add(key, request.prompt, request.params)
        while theirs.open:
            meter(torch.empty(1), None, None)  # a step begins
            for key, token, reason in theirs.step():
                event = requests[key].accept(token)
                if event.finish_reason != reason:
                    n, wanted = requests[key].n_output, requests[key].limit
                    raise Wrong(f"request {key} has {n} of {wanted} tokens, and the engine's reason is {reason!r}")
                yield event

    return generate


def measure(
    source: Source, folder: Path, model: Llama, workload: Workload, preset: Preset
) -> tuple[str, dict[str, Any]]:
    """Raises Wrong for texts that are not the naive model's, and for an engine that is too slow."""
    with ladder.progress(Console(quiet=True)) as bar:
        sets = {key: ladder.fix_lengths(model, key, jobs, workload, preset, bar) for key, jobs in workload.sets.items()}
    dtype = str(model.dtype).removeprefix("torch.")
    longest = max(len(job.prompt) + job.max_tokens for jobs in sets.values() for job in jobs)
    setup = Setup(folder, dtype, str(model.device), preset.max_running, preset.max_running * longest)
    theirs, meter = Theirs(source, setup, model.config.vocab_size), Meter(model)

    def run(name: str, jobs: list[Job]) -> Run:
        if name == "yours":
            return harness.run(meter, name, jobs, generate=generate_with(theirs))  # type: ignore[arg-type]
        return harness.run(model, name, jobs, preset.limits)

    names = ["yours", *BESIDE]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for name in names:
        run(name, sets["small"])  # what is done only once is done now
    for i in range(preset.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            runs[name].append(run(name, sets["main"]))
    verdict = judge(runs["yours"], Verifier(model), MOST_EXCUSED if workload.weights == "real" else 1.0)
    if verdict.void:
        raise Wrong(f"the texts are not the naive model's, so no time counts: {verdict.void}")
    return tell(runs, dtype, preset)


def tell(runs: dict[str, list[Run]], dtype: str, preset: Preset) -> Found:
    speed = {name: [one.summary.output_throughput for one in of] for name, of in runs.items()}
    ratios = {
        name: Range.of([mine / theirs for mine, theirs in zip(speed["yours"], speed[name], strict=True)])
        for name in BESIDE
    }
    parts = [f"{r.median:.2f} x {name} ({r.min:.2f} to {r.max:.2f})" for name, r in ratios.items() if r]
    words = f"{' and '.join(parts)} in {preset.rounds} rounds, {dtype}"
    continuous = ratios["continuous"]
    if continuous is None or continuous.median < LEAST_SPEED:
        raise Wrong(f"it makes {words}; level 7 needs {LEAST_SPEED} x continuous")
    data = {name: [r.min, r.median, r.max] for name, r in ratios.items() if r}
    return words, {"ratio_min_median_max": data, "dtype": dtype, "rounds": preset.rounds}


def speed(source: Source) -> Found:
    """On the model and the requests of `minillm bench`."""
    try:
        folder, model, tokenizer = load_checkpoint(DEFAULT_MODEL, "auto", "auto", Console(quiet=True))
    except InputError as error:
        raise Wrong(f"not tried: {error}") from error
    return measure(source, folder, model, real_workload(tokenizer, QUICK, model.config), QUICK)
