"""Why continuous batching: the queue in front of a batch, simulated. No tensors here.

workload  what arrives when, and how long it is    article     the published experiment, seeds, bands, in or out
policies  who gets a slot when (fixed time)        calibrated  the queue by a measured time of a step
steps     the same, step by step                   spread      the gain against how different lengths are
                                                   report      tables, plot
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from minillm.bench.calibrate import Calibration
    from minillm.simulation.article import Setup
    from minillm.simulation.report import Result

MOST_RUNS = 3_000_000  # requests times seeds: about a minute
LONGER = 8  # with a measured step, prompts of this many times the length are simulated too


def run_command(
    requests: int,
    slots: int,
    time_per_token_ms: float,
    rate: float,
    arrivals: str,
    policies: list[str],
    uniform: int | None,
    prompt: int,
    seeds: int,
    calibrate: bool,
    model: str,
    device: str,
    dtype: str,
    json_path: Path | None,
    plot_path: Path | None,
    console: Console,
) -> int:
    """`minillm simulate`: the queue with a fixed time per token, and with `calibrate` by this engine's own steps.

    arrivals  poisson, at-once, or the path of a trace
    uniform   output tokens of every request, instead of the article's mix
    prompt    prompt tokens, which matter only with `calibrate`
    model, device, dtype  what is measured with `calibrate`

    Raises InputError for whatever makes no sense, before anything is simulated. Returns the exit status: 1 if the
    parameters are the documented ones and a figure of the article does not come out. Ctrl-C shows and keeps what
    was done, marked as partial, and is raised again.
    """
    from minillm.bench import results
    from minillm.simulation import article, calibrated, report, spread

    setup = check(requests, slots, time_per_token_ms, rate, arrivals, policies, uniform, prompt, seeds)
    if setup.trace is not None and plot_path is not None:
        raise InputError(f"the plot shows many mixes of lengths, and the trace {arrivals} has one; leave --plot out")
    results.check_room(json_path)
    results.check_plot(plot_path)
    measured = check_calibrate(setup, model, device, dtype) if calibrate else None

    result = report.Result(setup, list(dict.fromkeys(policies)), model=measured)
    try:
        with console.status("Simulating"):
            article.run_seeds(setup, result.policies, result.runs)
        report.show_fixed(result, console)
        if calibrate:
            with console.status(f"Timing steps of {model}: up to half a minute"):
                result.calibration = measure(model, device, dtype, slots)
            with console.status("Simulating step by step"):
                result.outcomes = calibrated.compare(result.calibration.step_time, setup, (prompt, LONGER * prompt))
            report.show_calibrated(result, console)
        if plot_path is not None:
            result.points = spread.sweep(setup)
    except KeyboardInterrupt:
        result.partial = True
        for figures in result.runs.values():
            del figures[result.seeds :]  # of a seed that was being added
        if 0 < result.seeds < setup.seeds:
            report.show_fixed(result, console)
        if result.seeds:
            save(result, json_path, None, device, console)
        raise
    save(result, json_path, plot_path, device, console)
    return 1 if article.failed(result.lines) else 0


def check(
    requests: int,
    slots: int,
    time_per_token_ms: float,
    rate: float,
    arrivals: str,
    policies: Sequence[str],
    uniform: int | None,
    prompt: int,
    seeds: int,
) -> Setup:
    """The door. Raises InputError."""
    from minillm.simulation.article import Setup
    from minillm.simulation.policies import POLICIES
    from minillm.simulation.workload import MOST_REQUESTS, read_trace

    for name, value, least, most in (
        ("requests", requests, 1, MOST_REQUESTS),
        ("slots", slots, 1, 1024),
        ("time per token in ms", time_per_token_ms, 1e-6, 60_000),
        ("rate", rate, 1e-6, 1e6),
        ("uniform", uniform, 1, 10_000),
        ("prompt", prompt, 1, 1024),
        ("seeds", seeds, 1, 10_000),
    ):
        if value is not None and not least <= value <= most:  # NaN is nowhere
            raise InputError(f"{name} is {value}; it must be from {least:g} to {most:,}")
    if requests * seeds > MOST_RUNS:
        raise InputError(
            f"{requests:,} requests with {seeds:,} seeds are {requests * seeds:,}; at most {MOST_RUNS:,} are simulated"
        )
    if not policies:
        raise InputError(f"no policy was given; use some of {', '.join(POLICIES)}")
    for policy in policies:
        if policy not in POLICIES:
            raise InputError(f"policy {policy!r} is not known; use some of {', '.join(POLICIES)}")
    time_per_token = time_per_token_ms / 1e3
    if arrivals in ("poisson", "at-once"):
        return Setup(requests, slots, time_per_token, rate, arrivals, uniform, seeds)
    if not os.path.exists(arrivals):  # unlike Path.exists, false as well for what can't be a path
        raise InputError(f"arrivals is {arrivals!r}; it must be poisson, at-once or the path of a trace (CSV)")
    if uniform is not None:
        raise InputError(
            f"uniform is {uniform}, but the trace {arrivals} has lengths of its own; give only one of them"
        )
    trace = tuple(read_trace(Path(arrivals)))
    return Setup(len(trace), slots, time_per_token, rate, Path(arrivals).name, None, seeds=1, trace=trace)


def check_calibrate(setup: Setup, model: str, device: str, dtype: str) -> str:
    """What would otherwise fail only after the first tables. Raises InputError; returns what will be measured."""
    from minillm.bench.calibrate import MOST_SLOTS
    from minillm.device import pick_device, pick_dtype
    from minillm.fetch import find
    from minillm.simulation.calibrated import MOST_TOKENS, output_tokens

    if setup.slots > MOST_SLOTS:
        raise InputError(f"slots is {setup.slots}; calibrating takes from 1 to {MOST_SLOTS}")
    if output_tokens(setup) > MOST_TOKENS:
        raise InputError(
            f"the requests make {output_tokens(setup):,} tokens; step by step at most {MOST_TOKENS:,} are simulated"
        )
    where = pick_device(device)
    return f"{find(model).name}, {str(pick_dtype(dtype, where)).removeprefix('torch.')} on {where}"


def measure(model: str, device: str, dtype: str, slots: int) -> Calibration:
    """Loads the model and times the engine's steps."""
    from minillm.bench import calibrate
    from minillm.fetch import find
    from minillm.fusing import make_fast
    from minillm.model import Llama

    return calibrate.measure(make_fast(Llama.from_pretrained(find(model), device=device, dtype=dtype)), slots)


def save(result: Result, json_path: Path | None, plot_path: Path | None, device: str, console: Console) -> None:
    """The section of the results file, and the plot. The device counts only if it was measured."""
    from rich.text import Text

    from minillm.simulation import report

    if json_path is not None:
        from minillm.bench import machine, results
        from minillm.device import pick_device

        about = machine.describe(pick_device(device if result.calibration else "cpu"))
        results.add(json_path, "simulation", report.as_json(result, about))
        console.print(Text(f"JSON: {json_path}"))
    if plot_path is not None:
        report.plot(result).savefig(plot_path, dpi=150)
        console.print(Text(f"Plot: {plot_path}"))
