"""Runs one stage over a list of jobs: stamps its events with the time, and counts its work from outside.

A stage holds no code for either. The counters are forward hooks and wrappers around `attention.sdpa` and
the two KV memories; they are there while a run lasts and gone afterwards, also when it fails. They read
shapes, never values: some 2 us a layer, the same for every stage.
"""

import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from minillm import attention
from minillm.bench.metrics import Summary, summarize
from minillm.cache import KVCache, KVPool
from minillm.device import synchronize
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, Request, TextCodec, make_request
from minillm.stages import STAGES


@dataclass(frozen=True)
class Job:
    """What a request is made from, anew for each run. `ignore_eos`: go on where the model would end."""

    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = True


@dataclass
class Step:
    """What one forward pass of the model had to do, pads included."""

    tokens: int  # rows pushed through the layers: T, or B * T of a rectangle
    rows: int = 0  # rows pushed through the head
    scores: int = 0  # attention scores, over all layers and heads
    kv_bytes: int = 0  # K and V that attention read, over all layers


@dataclass
class Counts:
    steps: list[Step] = field(default_factory=list)
    reserved_bytes: int = 0  # KV memory that is allocated at the moment
    peak_reserved_bytes: int = 0
    peak_stored_tokens: int = 0  # tokens whose K and V were needed at the end of a step, summed over requests


@contextmanager
def counting(model: Llama, requests: Sequence[Request]) -> Iterator[Counts]:
    """Counts what the model does inside the block. Everything is put back at its end, however it ends."""
    counts = Counts()
    live: list[Request] = []  # unfinished when the current step began

    def end_step() -> None:
        stored = sum(request.computed for request in live)
        counts.peak_stored_tokens = max(counts.peak_stored_tokens, stored)

    def begin_step(module: nn.Module, args: tuple[Any, ...]) -> None:
        end_step()
        live[:] = [request for request in requests if request.finish_reason is None]
        counts.steps.append(Step(tokens=args[0].numel()))

    def count_rows(module: nn.Module, args: tuple[Any, ...]) -> None:
        counts.steps[-1].rows += args[0].shape[0]

    sdpa = attention.sdpa

    def counted_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        *lead, T, H, _ = q.shape
        counts.steps[-1].scores += prod(lead) * T * H * k.shape[-3]
        counts.steps[-1].kv_bytes += (k.numel() + v.numel()) * k.element_size()
        return sdpa(q, k, v, mask)

    def release(nbytes: int) -> None:
        counts.reserved_bytes -= nbytes

    def counted_init(init: Callable[..., None]) -> Callable[..., None]:
        def __init__(memory: KVCache | KVPool, *args: Any, **kwargs: Any) -> None:
            init(memory, *args, **kwargs)
            counts.reserved_bytes += memory.nbytes
            counts.peak_reserved_bytes = max(counts.peak_reserved_bytes, counts.reserved_bytes)
            weakref.finalize(memory, release, memory.nbytes)

        return __init__

    with ExitStack() as undo:
        undo.callback(model.register_forward_pre_hook(begin_step).remove)
        undo.callback(model.head.register_forward_pre_hook(count_rows).remove)
        _replace(undo, attention, "sdpa", counted_sdpa)
        for memory in (KVCache, KVPool):
            _replace(undo, memory, "__init__", counted_init(memory.__init__))
        yield counts
        end_step()


def _replace(undo: ExitStack, owner: object, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@dataclass(frozen=True)
class Run:
    """One run of one stage: what came out, when, and what it took. Lists are in the order of the jobs."""

    stage: str
    jobs: list[Job]
    outputs: list[list[int]]
    times: list[list[float]]  # seconds after the start, one for each output token
    finish_reasons: list[str | None]
    counts: Counts

    @property
    def summary(self) -> Summary:
        return summarize([len(job.prompt) for job in self.jobs], [0.0] * len(self.jobs), self.times)

    @property
    def tokens_pushed(self) -> int:
        return sum(step.tokens for step in self.counts.steps)

    @property
    def tokens_useful(self) -> int:
        """Every token goes through the model once, except the last one, which nothing follows."""
        return sum(
            len(job.prompt) + len(output) - 1 for job, output in zip(self.jobs, self.outputs, strict=True) if output
        )

    @property
    def scores(self) -> int:
        return sum(step.scores for step in self.counts.steps)


def now(device: torch.device) -> float:
    """The time at which the device has done all that it was asked: a clock alone times the asking."""
    synchronize(device)
    return time.perf_counter()


def run(
    model: Llama,
    stage: str,
    jobs: Sequence[Job],
    limits: dict[str, int] | None = None,
    tokenizer: TextCodec | None = None,
    on_event: Callable[[int, Event], None] | None = None,
) -> Run:
    """All jobs arrive at time 0. `limits` may name what other stages know: each stage takes its own.

    `on_event` gets the number of the job and the event; what it does is timed too.
    """
    generate = STAGES[stage]
    known = inspect.signature(generate).parameters
    taken = {name: value for name, value in (limits or {}).items() if name in known}
    requests = [
        make_request(
            job.prompt,
            SamplingParams(max_tokens=job.max_tokens, ignore_eos=job.ignore_eos),
            model.config,
            tokenizer,
            model.config.context,
        )
        for job in jobs
    ]
    place = {request: i for i, request in enumerate(requests)}
    times: list[list[float]] = [[] for _ in jobs]
    with counting(model, requests) as counts:
        start = now(model.device)
        for event in generate(model, requests, **taken):
            if event.token is not None:
                times[place[event.request]].append(now(model.device) - start)
            if on_event:
                on_event(place[event.request], event)
    return Run(
        stage,
        list(jobs),
        [request.output for request in requests],
        times,
        [request.finish_reason for request in requests],
        counts,
    )
