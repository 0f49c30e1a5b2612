"""Runs one stage over a list of jobs: stamps its events with the time, and counts its work from outside.

A stage holds no code for either. The counters are forward hooks and wrappers around `attention.sdpa` and
the two KV memories; they are there while a run lasts and gone afterwards, also when it fails. They read
shapes, never values: some 2 us a layer, the same for every stage.
"""

import inspect
import math
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
from minillm.batch import Chunk
from minillm.bench.metrics import Summary, summarize
from minillm.cache import KVCache, KVPool
from minillm.config import Config
from minillm.device import synchronize
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, Request, TextCodec, make_request
from minillm.scheduler import Plan, Scheduler
from minillm.stages import STAGES, Generate


@dataclass(frozen=True)
class Job:
    """What a request is made from, anew for each run. `ignore_eos`: go on where the model would end."""

    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = True
    arrival: float = 0.0  # seconds after the start


@dataclass
class Step:
    """What one forward pass of the model had to do, pads included."""

    tokens: int  # rows pushed through the layers: T, or B * T of a rectangle
    rows: int = 0  # rows pushed through the head
    scores: int = 0  # attention scores, over all layers and heads
    kv_bytes: int = 0  # K and V that attention read, over all layers
    began: float = field(default=0.0, compare=False)  # seconds after the start
    ended: float = field(default=0.0, compare=False)  # its last token was out; without one, the next step began
    new: dict[int, int] = field(default_factory=dict)  # {number of the request: its tokens in this step}
    reserved_bytes: int = 0  # KV memory that was allocated
    stored_tokens: int = 0  # tokens whose K and V were needed at its end, summed over the requests it began with


@dataclass
class Counts:
    steps: list[Step] = field(default_factory=list)
    reserved_bytes: int = 0  # KV memory that is allocated at the moment
    peak_reserved_bytes: int = 0
    start: float = field(default_factory=time.perf_counter)

    @property
    def peak_stored_tokens(self) -> int:
        return max((step.stored_tokens for step in self.steps), default=0)


def visible(chunks: Sequence[Chunk], config: Config, itemsize: int) -> tuple[int, int]:
    """The scores that the tokens of a step may see, and the bytes of K and V, each read once: over all layers."""
    scores = sum(chunk.n * chunk.start + chunk.n * (chunk.n + 1) // 2 for chunk in chunks)
    kv_bytes = config.kv_bytes_per_token(itemsize) * sum(chunk.kv_len for chunk in chunks)
    return config.n_layers * config.n_heads * scores, kv_bytes


@contextmanager
def counting(model: Llama, requests: Sequence[Request]) -> Iterator[Counts]:
    """Counts what the model does inside the block. Everything is put back at its end, however it ends."""
    counts = Counts()
    chunks: list[Chunk] = []  # of the current step, where its Attend has a batch
    before: dict[int, tuple[int, int]] = {}  # unfinished when the current step began: computed, len(tokens)

    def take_down() -> None:
        """What the last step computed, once."""
        for i, (computed, size) in before.items():
            # the naive stage stores nothing: whoever got a token had all its tokens in the step
            again = size if len(requests[i].tokens) > size else 0
            if n := requests[i].computed - computed or again:
                counts.steps[-1].new[i] = n
            counts.steps[-1].stored_tokens += requests[i].computed
        before.clear()

    def end_step(at: float) -> None:
        if counts.steps:
            step = counts.steps[-1]
            step.ended = step.ended or at
            if not step.scores:  # a backend that does without `sdpa`: what it cannot do without
                step.scores, step.kv_bytes = visible(chunks, model.config, model.dtype.itemsize)
            take_down()

    schedule = Scheduler.schedule

    def counted_schedule(scheduler: Scheduler) -> Plan:
        take_down()  # planning the next step takes from whom it preempts, and gives to whom finds its tokens
        return schedule(scheduler)

    def begin_step(module: nn.Module, args: tuple[Any, ...]) -> None:
        at = time.perf_counter() - counts.start
        end_step(at)
        batch = getattr(args[2], "batch", None)
        chunks[:] = [] if batch is None else batch.chunks
        before.update((i, (r.computed, len(r.tokens))) for i, r in enumerate(requests) if r.finish_reason is None)
        counts.steps.append(Step(tokens=args[0].numel(), began=at, reserved_bytes=counts.reserved_bytes))

    def count_rows(module: nn.Module, args: tuple[Any, ...]) -> None:
        counts.steps[-1].rows += args[0].shape[0]

    sdpa = attention.sdpa

    def counted_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if counts.steps:  # before the first step a backend may be chosen, by trying some
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
        _replace(undo, Scheduler, "schedule", counted_schedule)
        for memory in (KVCache, KVPool):
            _replace(undo, memory, "__init__", counted_init(memory.__init__))
        yield counts
        end_step(time.perf_counter() - counts.start)


def _replace(undo: ExitStack, owner: object, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@dataclass(frozen=True)
class Run:
    """One run of one stage: what came out, when, and what it took. Lists are in the order of the jobs."""

    stage: str
    jobs: list[Job]
    arrivals: list[float]  # seconds after the start
    outputs: list[list[int]]
    times: list[list[float]]  # seconds after the start, one for each output token
    finish_reasons: list[str | None]
    counts: Counts
    preemptions: int = 0  # times that a request lost its memory and began again

    @property
    def summary(self) -> Summary:
        return summarize([len(job.prompt) for job in self.jobs], self.arrivals, self.times)

    @property
    def starts(self) -> list[float]:
        """When the first step that each request took part in began."""
        first: dict[int, float] = {}
        for step in self.counts.steps:
            for i in step.new:
                first.setdefault(i, step.began)
        return [first[i] for i in range(len(self.jobs))]

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
    generate: Generate | None = None,
    clients: int | None = None,
) -> Run:
    """Jobs arrive when they say ("open loop"). `limits` may name what other stages know: each stage takes its own.

    on_event  gets the number of the job and the event; what it does is timed too
    generate  runs them instead of the ladder's stage; `stage` is then its name
    clients   "closed loop": the first so many jobs arrive at 0, each further one when another has ended
    """
    generate = generate or STAGES[stage]
    known = inspect.signature(generate).parameters
    taken = {name: value for name, value in (limits or {}).items() if name in known}
    requests = [
        make_request(
            job.prompt,
            SamplingParams(max_tokens=job.max_tokens, ignore_eos=job.ignore_eos),
            model.config,
            tokenizer,
            model.config.context,
            math.inf if clients is not None and i >= clients else job.arrival,
        )
        for i, job in enumerate(jobs)
    ]
    later = (request for request in requests if request.arrival == math.inf)
    place = {request: i for i, request in enumerate(requests)}
    times: list[list[float]] = [[] for _ in jobs]
    with counting(model, requests) as counts:
        counts.start = now(model.device)
        for event in generate(model, requests, **taken):
            counts.steps[-1].ended = now(model.device) - counts.start
            if event.token is not None:
                times[place[event.request]].append(counts.steps[-1].ended)
            if event.finish_reason is not None and (released := next(later, None)):
                released.arrival = counts.steps[-1].ended
            if on_event:
                on_event(place[event.request], event)
    return Run(
        stage,
        list(jobs),
        [request.arrival for request in requests],
        [request.output for request in requests],
        times,
        [request.finish_reason for request in requests],
        counts,
        sum(request.preemptions for request in requests),
    )
