"""Comparisons with a target: what a step of the ladder is said to buy, measured on this machine."""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from minillm.bench import peers
from minillm.bench.harness import Job, Run, run
from minillm.bench.metrics import itl
from minillm.bench.rows import Row
from minillm.bench.verify import MOST_EXCUSED, Verifier, judge
from minillm.errors import InputError
from minillm.model import Llama
from minillm.weights import load_folder

REPEATS = 3


@dataclass
class Claim:
    """`measured` is None if it could not be measured, and `detail` then says why."""

    claim: str
    target: str
    measured: float | None
    met: bool | None
    detail: str
    values: dict[str, Any] = field(default_factory=dict)


def at_least(claim: str, target: float, measured: float, detail: str, **values: Any) -> Claim:
    return Claim(claim, f">= {target:g} x", measured, measured >= target, detail, values)


def at_most(claim: str, target: float, measured: float, detail: str, **values: Any) -> Claim:
    return Claim(claim, f"<= {target:g} x", measured, measured <= target, detail, values)


def not_measured(claim: str, target: str, reason: str) -> Claim:
    return Claim(claim, target, None, None, f"not measured: {reason}")


def measure(
    model: Llama,
    text: Sequence[int],
    rows: Sequence[Row],
    verifier: Verifier,
    chunk: int,
    weights: str,
    console: Console,
) -> list[Claim]:
    """The claims about stages that are among the rows. Prompts are cut out of the token ids in `text`."""
    stages = {row.stage for row in rows}
    todo: list[tuple[set[str], str, Callable[[], list[Claim]]]] = [
        ({"naive", "cached"}, "Claims: cost per token", lambda: caching(model, text)),
        (
            {"cached", "chunked"},
            "Claims: memory of a long prompt",
            lambda: [chunking(model, text, chunk, verifier)],
        ),
        ({"padded", "continuous"}, "Claims: continuous batching", lambda: [batching(rows)]),
        (
            {"continuous"},
            "Claims: transformers",
            lambda: [against_transformers(model, text, verifier, weights)],
        ),
    ]
    found: list[Claim] = []
    for needed, title, work in todo:
        if needed <= stages:
            with console.status(title):
                found += work()
    return found


def caching(model: Llama, text: Sequence[int], contexts: tuple[int, int, int] = (64, 512, 1024)) -> list[Claim]:
    """Seconds per token with a text of so many tokens behind it, with and without the cache."""
    short, middle, long = contexts
    gain = f"naive to cached at {middle} tokens of context, tokens/s"
    flat = f"cached: time per token at {long} over {short} tokens of context"
    if long + 25 > model.config.context:
        reason = f"the model's context is {model.config.context}"
        return [not_measured(gain, ">= 10 x", reason), not_measured(flat, "<= 1.5 x", reason)]
    points = [("naive", middle, 6), ("cached", middle, 25), ("cached", short, 25), ("cached", long, 25)]
    gaps: dict[tuple[str, int], list[float]] = {(stage, context): [] for stage, context, _ in points}
    for _ in range(REPEATS):
        for stage, context, n_new in points:
            done = run(model, stage, [Job(tuple(text[:context]), n_new)])
            gaps[stage, context] += itl(done.times[0])
    cost = {point: median(values) for point, values in gaps.items()}
    shown = {f"{stage}_{context}_seconds": value for (stage, context), value in cost.items()}
    naive, cached = cost["naive", middle], cost["cached", middle]
    low, high = cost["cached", short], cost["cached", long]
    return [
        at_least(gain, 10, naive / cached, f"{1 / naive:.2f} to {1 / cached:.1f} tokens/s", **shown),
        at_most(flat, 1.5, high / low, f"{low * 1e3:.1f} to {high * 1e3:.1f} ms", **shown),
    ]


def chunking(model: Llama, text: Sequence[int], chunk: int, verifier: Verifier, size: int = 4096) -> Claim:
    """Peak memory of one long prompt beyond the weights and the KV cache, whole and in chunks."""
    claim = f"whole to chunked ({chunk}), peak activations of a {size}-token prompt"
    n_new = 8
    if size + n_new > model.config.context:
        return not_measured(claim, ">= 4 x", f"the model's context is {model.config.context}")
    if len(text) < size:
        return not_measured(claim, ">= 4 x", f"the prompts have {len(text)} tokens in all")
    job = Job(tuple(text[:size]), n_new)
    peaks: dict[str, int] = {}
    runs: dict[str, Run] = {}
    for stage in ("chunked", "cached"):
        run(model, stage, [Job(job.prompt[:chunk], 2)], {"chunk": chunk})  # what is allocated once, is now
        try:
            memory = PeakMemory(model.device)
        except OSError as error:
            return not_measured(claim, ">= 4 x", f"this system does not tell a process's peak memory ({error})")
        runs[stage] = run(model, stage, [job], {"chunk": chunk})
        peaks[stage] = max(1, memory.grown() - runs[stage].counts.peak_reserved_bytes)
    same = runs["cached"].outputs == runs["chunked"].outputs
    verdict = judge(list(runs.values()), verifier, most_excused=1.0)  # too few tokens for a share
    done = at_least(
        claim,
        4,
        peaks["cached"] / peaks["chunked"],
        f"{peaks['cached'] / 1e6:,.0f} to {peaks['chunked'] / 1e6:,.0f} MB; "
        + ("same text" if same else verdict.void or "texts part at a near-tie, both are the naive model's"),
        whole_bytes=peaks["cached"],
        chunked_bytes=peaks["chunked"],
        same_tokens=same,
    )
    done.met = done.met and verdict.void is None
    return done


class PeakMemory:
    """How far memory rises above where it was when this was made: of the device, or (Linux) of this process.

    Raises OSError where the system does not tell.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
                trim(0)  # what is free goes back to the system, or it would not count when it is used again
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here; see proc(5)
            self.before = self._status("VmRSS")

    def grown(self) -> int:
        """In bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return self._status("VmHWM") - self.before

    @staticmethod
    def _status(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise OSError(f"/proc/self/status has no {name}")


def loading(folder: Path) -> Claim:
    """Seconds to load a model from the page cache, over those that reading and copying every tensor takes."""
    files = sorted(folder.glob("*.safetensors"))
    stored = next(iter(load_file(files[0]).values())).dtype
    ours, plain = [], []
    for _ in range(2 + REPEATS):
        start = time.perf_counter()
        copies = [tensor.clone() for file in files for tensor in load_file(file).values()]
        middle = time.perf_counter()
        load_folder(folder, torch.device("cpu"), stored)
        ours.append(time.perf_counter() - middle)
        plain.append(middle - start)
        del copies
    return at_most(
        "loading the model over load_file and a copy of every tensor, warm",
        2,
        median(ours) / median(plain),
        f"{median(plain) * 1e3:.0f} to {median(ours) * 1e3:.0f} ms",
        load_seconds=ours,
        load_file_and_clone_seconds=plain,
    )


def batching(rows: Sequence[Row]) -> Claim:
    """From the ladder's own rows: the same mixed requests, as many slots."""
    claim = "padded to continuous on mixed lengths, equal slots, output tokens/s"
    by_stage = {row.stage: row for row in rows}
    before, after = by_stage["padded"], by_stage["continuous"]
    if before.void or after.void:
        return not_measured(claim, ">= 2 x", "one of the two is void")
    slow, fast = before.output_throughput, after.output_throughput
    return at_least(claim, 2, fast / slow, f"{slow:.1f} to {fast:.1f} tokens/s")


def against_transformers(
    model: Llama,
    text: Sequence[int],
    verifier: Verifier,
    weights: str,
    N: int = 32,
    n_prompt: int = 128,
    n_new: int = 64,
) -> Claim:
    """Decoding alone: from the first token of all N to the last, where padding costs nothing."""
    dtype = str(model.dtype).removeprefix("torch.")
    claim = f"transformers' generate to continuous, {N} sequences in {dtype}, decode tokens/s"
    if len(text) < N * n_prompt:
        return not_measured(claim, ">= 2 x", f"the prompts have {len(text)} tokens in all")
    try:
        peer = peers.from_llama(model)
    except InputError as error:
        return not_measured(claim, ">= 2 x", str(error))
    jobs = [Job(tuple(text[i * n_prompt : (i + 1) * n_prompt]), n_new) for i in range(N)]
    prompts = [job.prompt for job in jobs]
    limits = {
        "max_running": N,
        "budget": N * n_prompt,
    }  # all prompts in the first step, as transformers does it
    ours, theirs = [], []
    for i in range(1 + REPEATS):  # the first to warm up
        done = run(model, "continuous", jobs, limits)
        outputs, stamps = peers.generate(peer, prompts, n_new)
        if i:
            first, last = max(t[0] for t in done.times), max(t[-1] for t in done.times)
            ours.append(N * (n_new - 1) / (last - first))
            theirs.append(N * (n_new - 1) / (stamps[-1] - stamps[0]))
    if any(len(output) != n_new for output in outputs) or len(stamps) != n_new:
        return not_measured(claim, ">= 2 x", "transformers did not emit as many tokens")
    verdict = judge([done], verifier, MOST_EXCUSED if weights == "real" else 1.0)
    if verdict.void:
        return not_measured(claim, ">= 2 x", f"continuous is void: {verdict.void}")
    equal = sum(
        mine == other for a, b in zip(done.outputs, outputs, strict=True) for mine, other in zip(a, b, strict=True)
    )
    slow, fast = median(theirs), median(ours)
    return at_least(
        claim,
        2,
        fast / slow,
        f"{slow:.0f} to {fast:.0f} tokens/s; {equal / (N * n_new):.0%} of the tokens equal",
        transformers_tokens_per_s=theirs,
        continuous_tokens_per_s=ours,
        tokens_equal=equal,
        tokens=N * n_new,
    )
