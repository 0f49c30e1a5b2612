"""How long a decode step takes, for each way of running it that this device has; and what is gained by never waiting.

All ways take the same step over the same requests, by the same engine: a backend's Attend, step by step ("eager"), or,
where a backend can be recorded, its CUDA graph. Compared with

    floor         what must be moved: all weights once, and the K and V of all texts, at this device's copy bandwidth
    busy          the time in which the device worked; in the rest of the step it waited for the host to ask ("launch
                  bound"), or the host waited for the last token and planned the next step ("gap")
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minillm.bench.ceiling import Ceilings, layer_weights
from minillm.bench.harness import now
from minillm.bench.steady import Place, Steady
from minillm.bench.tables import new_table, rate, times
from minillm.config import Config
from minillm.engine import Engine
from minillm.graphs import Graphs, record_graphs
from minillm.kernels import BACKENDS, Backend, backend, why_not
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Request, make_request
from minillm.simulation.workload import ARTICLE_MIX

BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXT = 512  # positions that each text looks at
GRAPHS = " graphs"  # behind a backend's name: the way by its graphs
FEWEST, MOST_SECONDS = 5, 0.4  # timed turns of a cell; no further one is begun after so many seconds
PROFILED = 3  # turns
REPLAYS = 20
PATIENCE = 30.0  # seconds: a way that took longer for its first turn is not tried at another batch
PROMPT = 16  # tokens, where continuous batching meets static


@dataclass
class Cell:
    """One way at one batch. `why_not`: why there are no numbers; all else is then None."""

    way: str
    batch: int
    floor: float  # seconds
    why_not: str | None = None
    seconds: float | None = None  # of a step, median
    turns: int = 0
    busy: float | None = None  # seconds of a step; None: the profiler sees no device
    replay: float | None = None  # seconds of the graph alone, launched again and again
    agrees: float | None = None  # share of the tokens that are those of the first way

    @property
    def tokens_per_s(self) -> float | None:
        return self.batch / self.seconds if self.seconds else None

    @property
    def of_floor(self) -> float | None:
        """How much of the step's time the floor is."""
        return self.floor / self.seconds if self.seconds else None

    @property
    def launch_bound(self) -> float | None:
        """Share of the step in which the device did nothing."""
        return max(0.0, 1 - self.busy / self.seconds) if self.seconds and self.busy is not None else None

    @property
    def gap(self) -> float | None:
        """Seconds from the end of one replay to the launch of the next."""
        return max(0.0, self.seconds - self.replay) if self.seconds and self.replay is not None else None


@dataclass
class Result:
    name: str
    dtype: str
    config: dict[str, Any]
    context: int
    ceilings: Ceilings
    absent: dict[str, str]  # {backend: why it cannot run here}
    recording: dict[str, float] = field(default_factory=dict)  # {way: seconds that all its graphs took}
    cells: list[Cell] = field(default_factory=list)

    def cell(self, way: str, batch: int) -> Cell | None:
        return next((cell for cell in self.cells if (cell.way, cell.batch) == (way, batch)), None)

    def ratio(self, way: str, other: str, batch: int) -> float | None:
        """How many times as fast one way is as the other."""
        fast, slow = self.cell(way, batch), self.cell(other, batch)
        return slow.seconds / fast.seconds if fast and slow and fast.seconds and slow.seconds else None


def floor_seconds(config: Config, itemsize: int, batch: int, context: int, ceilings: Ceilings) -> float:
    weights = layer_weights(config) + config.vocab_size * config.d_model
    moved = itemsize * weights + batch * context * config.kv_bytes_per_token(itemsize)
    return moved / ceilings.copy_bytes_per_s


class Ways:
    """What can be run here: each backend eagerly, and by its graphs if it has any. `failed` says why one can't."""

    def __init__(self, engine: Engine, names: Sequence[str]):
        self.engine = engine
        self.failed: dict[str, str] = {}
        self.backends: dict[str, Backend] = {}
        self.graphs: dict[str, Graphs] = {}
        self.recording: dict[str, float] = {}  # seconds
        for name in names:
            self.backends[name] = backend(name)
            begun = now(engine.model.device)
            try:
                if graphs := record_graphs(engine.model, engine.pool, backend(name), engine.scheduler.max_running):
                    self.backends[name + GRAPHS], self.graphs[name + GRAPHS] = backend(name), graphs
                    self.recording[name + GRAPHS] = now(engine.model.device) - begun
            except Exception as error:  # whatever a recording stumbles over: the others are still to be measured
                self.failed[name + GRAPHS] = in_words(error)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.backends, *self.failed)))

    def take(self, name: str) -> None:
        self.engine.attend = self.backends[name]
        self.engine.graphs = self.graphs.get(name)


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def measure(
    model: Llama,
    name: str,
    ceilings: Ceilings,
    names: Sequence[str] | None = None,
    batches: Sequence[int] = BATCHES,
    context: int = CONTEXT,
    seconds: float = math.inf,
) -> Result:
    """Every backend of these names that runs here (None: all but the oracle), and its graphs where it has any.

    After `seconds` nothing more is begun, and what is left says so. What fails says why.
    """
    end = time.perf_counter() + seconds
    if names is None:  # what is compiled for long comes last
        names = sorted((name for name in BACKENDS if name != "dense"), key=lambda name: name == "flex")
    absent = {name: reason for name in names if (reason := why_not(name, model)) is not None}
    result = Result(name, str(model.dtype).removeprefix("torch."), asdict(model.config), context, ceilings, absent)
    steady = Steady(model, max(batches), 2 * context, "gather")
    ways = Ways(steady.engine, [name for name in names if name not in absent])
    result.recording = ways.recording
    for batch in batches:
        steady.put(Place.decode(batch, context))
        steady.fill()
        floor = floor_seconds(model.config, model.dtype.itemsize, batch, context, ceilings)
        first: list[int] = []
        for way in ways.names:
            cell = Cell(way, batch, floor)
            result.cells.append(cell)
            if way in ways.failed or time.perf_counter() > end:
                cell.why_not = ways.failed.get(way, "out of time")
                continue
            try:
                ways.take(way)
                tokens = fill_in(cell, steady)
            except Exception as error:  # as above
                cell.why_not = ways.failed[way] = in_words(error)
                continue
            first = first or tokens
            cell.agrees = sum(a == b for a, b in zip(tokens, first, strict=True)) / batch
            if cell.turns == 0:
                ways.failed[way] = f"its first step took more than {PATIENCE:g} s"
                cell.why_not = ways.failed[way]
    return result


def fill_in(cell: Cell, steady: Steady) -> list[int]:
    """Times the way that the engine has taken. The first turn compiles; the tokens are the last one's."""
    device = steady.engine.model.device
    seconds, events = steady.turn()
    if seconds <= PATIENCE:
        steady.turn()
        timed: list[float] = []
        while len(timed) < FEWEST or sum(timed) < MOST_SECONDS:
            seconds, events = steady.turn()
            timed.append(seconds)
        cell.seconds, cell.turns = median(timed), len(timed)
        cell.busy = busy_seconds(steady.turn, device)
        if graphs := steady.engine.graphs:
            cell.replay = repeated(graphs.replays[graphs.size_for(cell.batch)], device)
    return [event.token if event.token is not None else -1 for event in events]


def busy_seconds(work: Callable[[], object], device: torch.device) -> float | None:
    """The time that the device works for one call; None without one, or where its kernels cannot be seen."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:  # without the right to look, it sees no kernels
        for _ in range(PROFILED):
            work()
        torch.cuda.synchronize(device)
    kernels = [event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    return sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1e6 / PROFILED if kernels else None


def repeated(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call among many, for which the host does not wait in between."""
    work()
    begun = now(device)
    for _ in range(REPLAYS):
        work()
    return (now(device) - begun) / REPLAYS


# ---- continuous against static


@dataclass
class Served:
    """The same requests by both policies, all of them there at the start."""

    model: str
    backend: str
    graphs: bool
    slots: int
    requests: int
    scale: float  # of the article's output lengths
    static: float  # seconds until the last token
    continuous: float
    static_steps: int
    continuous_steps: int
    static_prompts: float  # share of the time, in steps with prompts in them
    continuous_prompts: float

    @property
    def ratio(self) -> float:
        return self.static / self.continuous

    @property
    def step_ratio(self) -> float:
        """What the ratio would be if every step took the same time."""
        return self.static_steps / self.continuous_steps


def serve(model: Llama, name: str, backend: str, slots: int, requests: int, scale: float = 1.0) -> Served:
    """Output lengths as in the article, or `scale` times as long; prompts of random tokens."""
    draw = np.random.default_rng(0)
    lengths = ARTICLE_MIX.scaled(scale).draw(requests, draw)
    prompts = draw.integers(model.config.vocab_size, size=(requests, PROMPT)).tolist()
    engine = Engine(model, max_running=slots, budget=max(256, slots), max_len=PROMPT + max(lengths), backend=backend)

    def group(part: slice) -> list[Request]:
        return [
            make_request(prompt, SamplingParams(max_tokens=length, ignore_eos=True), model.config, None, engine.max_len)
            for prompt, length in zip(prompts[part], lengths[part], strict=True)
        ]

    run_all(engine, [group(slice(0, slots))])  # to warm up
    groups = [group(slice(i, i + slots)) for i in range(0, requests, slots)]
    static, static_steps, static_prompts = run_all(engine, groups)
    continuous, steps, prompts_share = run_all(engine, [group(slice(0, requests))])
    return Served(
        model=name,
        backend=backend,
        graphs=engine.graphs is not None,
        slots=slots,
        requests=requests,
        scale=scale,
        static=static,
        continuous=continuous,
        static_steps=static_steps,
        continuous_steps=steps,
        static_prompts=static_prompts,
        continuous_prompts=prompts_share,
    )


def run_all(engine: Engine, groups: Sequence[Sequence[Request]]) -> tuple[float, int, float]:
    """Nobody of a group enters before everybody of the one before has left. Seconds, steps, and the share of the
    seconds that went into steps in which some request got its first token."""
    steps, with_prompts = 0, 0.0
    begun = last = now(engine.model.device)
    for group in groups:
        for request in group:
            engine.submit(request)
        while engine.busy:
            events = engine.step()
            stamp, last = last, time.perf_counter()
            steps += 1
            with_prompts += (last - stamp) * any(event.request.n_output == 1 for event in events)
    seconds = now(engine.model.device) - begun
    return seconds, steps, with_prompts / seconds


# ---- for people


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def show(result: Result, console: Console) -> None:
    table = new_table(
        f"A decode step of {result.name}, {result.dtype}, {result.context} positions each",
        "of floor: weights and live K and V at copy bandwidth, over the step's time. launch-bound: share of the step "
        "in which the device did nothing. replay: the graph alone; gap: from its end to the next launch. same: share "
        "of the tokens that the first way makes too.",
        ("batch", "way", "step ms", "tokens/s", "of floor", "launch-bound", "replay ms", "gap ms", "same"),
    )
    table.min_width = 90
    table.columns[1].justify = "left"
    for cell in result.cells:
        if cell.why_not is not None:
            table.add_row(str(cell.batch), cell.way, "-")
            continue
        table.add_row(
            str(cell.batch),
            cell.way,
            ms(cell.seconds),
            rate(cell.tokens_per_s or 0.0),
            share(cell.of_floor),
            share(cell.launch_bound),
            ms(cell.replay),
            ms(cell.gap),
            share(cell.agrees),
        )
    console.print(table)
    failed = {cell.way: cell.why_not for cell in reversed(result.cells) if cell.why_not}
    for way, seconds in result.recording.items():
        console.print(Text(f"{way}: recorded in {seconds:.1f} s, when the engine starts", style="dim"))
    for way, reason in (result.absent | failed).items():
        console.print(Text(f"{way}: {reason}", style="dim"))


def show_served(rows: Sequence[Served], console: Console) -> None:
    table = new_table(
        "Continuous against static batching, the article's mix of output lengths, all requests there at the start",
        f"Prompts of {PROMPT} tokens. lengths: of the article's. by steps: what the ratio would be if every step took "
        "the same time. prompts: share of the time that steps with prompts in them take; these run eagerly.",
        ("model", "slots", "requests", "lengths", "static s", "continuous s", "ratio", "by steps", "prompts"),
    )
    table.min_width = 90
    for row in rows:
        table.add_row(
            row.model,
            str(row.slots),
            str(row.requests),
            f"{row.scale:g} x",
            f"{row.static:.2f}",
            f"{row.continuous:.2f}",
            times(row.ratio),
            times(row.step_ratio),
            f"{row.static_prompts:.0%} / {row.continuous_prompts:.0%}",
        )
    console.print(table)
