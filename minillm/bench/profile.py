"""Where does a step's time go? `minillm profile`.

The same step again and again (see `steady`), watched from outside: the functions and modules that a reader of the code
knows are wrapped, and each wrapper notes when its part begins and ends. Time belongs to the innermost part, so the
parts add up to the step. Watching costs time too, so the step is timed without it in turns with the watched one.

Beside it the floor: this model's own Linears called one after the other on that many tokens, nothing else, and the live
K and V at the speed of a copy, both measured in the same run. What share of a step is floor says how far it is from as
fast as it could be with these Linears.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from minillm.bench import ceiling, load_model, machine, results
from minillm.bench.ceiling import Ceilings
from minillm.bench.floor import Floor, linears
from minillm.bench.harness import now
from minillm.bench.prefill import Spread
from minillm.bench.steady import Place, Steady, needed
from minillm.bench.tables import device_name, new_table
from minillm.config import Config
from minillm.engine import Engine
from minillm.errors import InputError, check_range
from minillm.fusing import HalfBlocks
from minillm.kernels.choose import check_name, resolve
from minillm.model import Llama

TURNS = 5  # watched steps, unwatched ones and the Linears alone take turns, so that a disturbance meets all of them
SECONDS = 0.3  # for each of the machine's ceilings

# Part -> where its code is. In the order of a step.
PARTS = {
    "schedule": "Scheduler.schedule",
    "pack": "batch.pack",
    "attention: prepare": "the backend's __init__",
    "embed": "Llama.embed",
    "rotary": "rope_table, Attention.rotary",
    "before attention": "HalfBlocks.before: norm, qkv, rotary",
    "after attention": "HalfBlocks.after: o, norm, MLP, residuals",
    "norms": "Block.attn_norm, mlp_norm, ..",
    "qkv": "Attention.qkv",
    "heads": "Attention.forward, the rest",
    "attention: store": "KVPool.store",
    "attention: gather": "KVPool.gather",
    "attention: sums": "the backend, the rest",
    "o": "Attention.o",
    "gate_up": "MLP.gate_up",
    "silu * up": "MLP.silu_times",
    "down": "MLP.down",
    "residuals": "Block and MLP, the rest",
    "layers": "Llama.forward, the rest",
    "logits": "Llama.head",
    "sampling": "sampling.sample",
    "update": "Scheduler.update",
    "left over": "Engine.step, the rest",
}
REST = "left over"
HALVES = ("before attention", "after attention")  # of a layer: Linears and what is one call of C with them
LINEARS = (*HALVES, "qkv", "o", "gate_up", "down", "logits")
# A module's name in its parent -> its part. One with another name is a part of that name.
MODULES = {
    "": "layers",  # the model itself
    "attn_norm": "norms",
    "mlp_norm": "norms",
    "norm": "norms",
    "q_norm": "norms",
    "k_norm": "norms",
    "attn": "heads",
    "silu_times": "silu * up",
    "mlp": "residuals",
    "head": "logits",
}
# Functions that are looked up in a module when they are called: there they are replaced. One that is gone is left out.
FUNCTIONS = {
    ("minillm.engine", "pack"): "pack",
    ("minillm.engine", "sample"): "sampling",
    ("minillm.model", "rope_frequencies"): "rotary",
    ("minillm.model", "rope_table"): "rotary",
}


@dataclass(frozen=True)
class Plan:
    """What is run. Raises InputError for sizes that make no sense, and for an unknown backend."""

    running: int = 64
    context: int = 160  # positions that each of them looks at
    prompt: int = 512  # tokens of the prompt whose step is looked at too; 0: none
    steps: int = 20  # of each kind
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, least, most in (
            ("running", 1, 4096),
            ("context", 1, 1_000_000),
            ("prompt", 0, 1_000_000),
            ("steps", TURNS, 10_000),
        ):
            check_range(name, getattr(self, name), least, most)
        check_name(self.backend)

    def check(self, config: Config) -> None:
        """Raises InputError for more than the model's context."""
        for name in ("context", "prompt"):
            if getattr(self, name) > config.context:
                raise InputError(f"{name} is {getattr(self, name)}; the model's context is {config.context}")


# ---- watching

Call = TypeVar("Call", bound=Callable[..., Any])


class Marks:
    """When which part began, in the order in which it happened.

    On a CPU a mark is a time; on a GPU it is an event in the stream, so that nobody waits while it is watched: the time
    of a part is then that from one event to the next, in which the GPU computes or waits for the host.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.open: list[str] = []  # the parts that are running, the innermost last
        self.marks: list[tuple[Any, str, int]] = []  # (when, the part that runs from then on, 1 if it begins)

    def wrap(self, part: str, call: Call) -> Call:
        opened, marks, stamp = self.open, self.marks, self.stamp

        def marked(*args: Any, **kwargs: Any) -> Any:
            opened.append(part)
            marks.append((stamp(), part, 1))
            try:
                return call(*args, **kwargs)
            finally:
                opened.pop()
                marks.append((stamp(), opened[-1] if opened else "", 0))

        return marked  # type: ignore[return-value]

    def stamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return end - begin if self.device.type != "cuda" else begin.elapsed_time(end) / 1e3

    def take(self) -> dict[str, tuple[float, int]]:
        """{part: (seconds that are its own, how often it began)} since it was last asked."""
        now(self.device)
        found: dict[str, tuple[float, int]] = {}
        for (begin, part, began), (end, _, _) in pairwise(self.marks):
            if part:  # else between two calls of the outermost
                seconds, calls = found.get(part, (0.0, 0))
                found[part] = seconds + self.seconds(begin, end), calls + began
        self.marks.clear()
        return found


@contextmanager
def watched(engine: Engine, marks: Marks) -> Iterator[None]:
    """Every part of this engine's step is marked inside the block. All is put back at its end."""
    with ExitStack() as undo:

        def watch(owner: Any, name: str, part: str) -> None:
            put(undo, owner, name, marks.wrap(part, getattr(owner, name)))

        build = marks.wrap("attention: prepare", engine.attend)
        put(undo, engine, "attend", lambda pool, batch: marks.wrap("attention: sums", build(pool, batch)))
        watch(engine, "step", REST)
        watch(engine.scheduler, "schedule", "schedule")
        watch(engine.scheduler, "update", "update")
        watch(engine.pool, "store", "attention: store")
        watch(engine.pool, "gather", "attention: gather")
        for (module, name), part in FUNCTIONS.items():
            if hasattr(sys.modules[module], name):
                watch(sys.modules[module], name, part)
        for path, one in engine.model.named_modules():
            if not isinstance(one, nn.Identity | nn.ModuleList):
                name = path.rpartition(".")[2]
                watch(one, "forward", "residuals" if name.isdigit() else MODULES.get(name, name))
            if isinstance(one, HalfBlocks):
                watch(one, "before", HALVES[0])
                watch(one, "after", HALVES[1])
        yield


def put(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until `undo` closes; then it is what it was, or gone, if the owner itself had none."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


# ---- one profile


@dataclass(frozen=True)
class Part:
    name: str
    where: str  # its code; empty: a module that is not in `PARTS`
    seconds: float  # median of the watched steps
    share: float  # of the sum of all parts
    calls: int  # in one step


@dataclass(frozen=True)
class Profile:
    """One kind of step. Times in seconds."""

    kind: str  # decode, prefill
    running: int
    context: int  # positions that the last token of each looks at
    tokens: int  # pushed through the layers
    rows: int  # pushed through the head
    scores: int  # that a query may see
    kv_bytes: int  # of the live K and V
    parts: list[Part]
    step: Spread  # not watched
    watched: Spread
    replayed: Spread | None  # from CUDA graphs, where there are any; not watched
    floor: Floor
    share: float  # of the floor, in the step that is not watched

    @property
    def cost_of_watching(self) -> float:
        """In seconds. Below nothing: less than the steps differ."""
        return self.watched.median - self.step.median


def in_order(names: Sequence[str]) -> list[str]:
    """Parts as a step meets them; those that nobody knows before what is left over."""
    known = [name for name in PARTS if name in names]
    return known[:-1] + [name for name in names if name not in PARTS] + known[-1:]


def profile(model: Llama, kind: str, place: Place, steps: int, backend: str, ceilings: Ceilings) -> Profile:
    """Unwatched steps, watched steps and the Linears alone, in turns; each once before, to warm up."""
    steady = Steady(model, place.running, place.length, backend)
    steady.put(place)
    steady.fill()
    itemsize = model.dtype.itemsize
    (step,) = needed(place, steady.engine.scheduler.budget, model.config, itemsize)
    marks, alone = Marks(model.device), linears(model, step.tokens, step.rows)
    graphs, steady.engine.graphs = steady.engine.graphs, None  # a replayed step calls no function to watch
    plain: list[float] = []
    replayed: list[float] = []
    hooked: list[float] = []
    bare: list[float] = []
    parts: list[dict[str, tuple[float, int]]] = []
    for turn in range(1 + TURNS):
        times = range(steps // TURNS if turn else 1)
        plain += [steady.turn()[0] for _ in times]
        if graphs and kind == "decode":
            steady.engine.graphs = graphs
            replayed += [steady.turn()[0] for _ in times]
            steady.engine.graphs = None
        with watched(steady.engine, marks):
            for _ in times:
                hooked.append(steady.turn()[0])
                parts.append(marks.take())
        for _ in times:
            begun = now(model.device)
            alone()
            bare.append(now(model.device) - begun)
        if not turn:
            for warm in (plain, replayed, hooked, bare, parts):
                warm.clear()
    floor = Floor.of(median(bare), step, model.config, itemsize, ceilings)
    return Profile(
        kind,
        place.running,
        place.length,
        step.tokens,
        step.rows,
        step.scores,
        step.kv_bytes,
        in_parts(parts),
        Spread.of(plain),
        Spread.of(hooked),
        Spread.of(replayed) if replayed else None,
        floor,
        floor.total / median(plain),
    )


def in_parts(steps: Sequence[dict[str, tuple[float, int]]]) -> list[Part]:
    """Medians over the steps. A step calls what the one before called: the counts are those of the first."""
    middle = {name: median(step[name][0] for step in steps) for name in steps[0]}
    total = sum(middle.values())
    return [
        Part(name, PARTS.get(name, ""), middle[name], middle[name] / total, steps[0][name][1])
        for name in in_order(list(middle))
    ]


# ---- all of them


@dataclass
class Result:
    """All that was found, as it goes into the JSON file."""

    about: dict[str, Any]
    model: dict[str, Any]
    plan: Plan
    backend: str  # the one that was used
    ceilings: Ceilings
    profiles: list[Profile] = field(default_factory=list)
    partial: bool = False
    seconds: float = 0.0


def measure(model: Llama, name: str, plan: Plan, console: Console) -> Result:
    """After Ctrl-C: with what is whole; before that, it is raised again. Raises InputError as `Plan.check`, and for a
    backend that cannot run here."""
    plan.check(model.config)
    began = time.perf_counter()
    backend = resolve(plan.backend, model, plan.running)
    with console.status("Measuring the machine"):
        ceilings = ceiling.measure(model.device, model.dtype, SECONDS)
    about = {"name": name, "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    result = Result(machine.describe(model.device), about, plan, backend, ceilings)
    places = {"decode": Place.decode(plan.running, plan.context)}
    if plan.prompt:
        places["prefill"] = Place.prompt(plan.prompt)
    try:
        for kind, place in places.items():
            with console.status(f"{plan.steps} {kind} steps, watched and not"):
                result.profiles.append(profile(model, kind, place, plan.steps, backend, ceilings))
    except KeyboardInterrupt:
        if not result.profiles:
            raise
        result.partial = True
    result.seconds = time.perf_counter() - began
    return result


# ---- for people


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def named(one: Profile) -> str:
    if one.kind == "decode":
        return f"a step of {one.running} decoding at context {one.context:,}"
    return f"a step over a prompt of {one.tokens:,} tokens"


def finding(result: Result) -> str:
    """What the numbers show, a few sentences for each kind of step."""
    lines = []
    for one in result.profiles:
        others = sorted((part for part in one.parts if part.name not in LINEARS), key=lambda part: -part.share)
        inside = sum(part.share for part in one.parts if part.name in LINEARS)
        what = "Linears, and what is one call with them," if in_halves(one) else "Linears"
        costly = ", ".join(f"{part.name} {part.share:.0%}" for part in others[:3])
        lines.append(
            f"{named(one).capitalize()} takes {ms(one.step.median)} ms; its floor is {ms(one.floor.total)} ms, "
            f"{one.share:.0%} of it: {ms(one.floor.linears)} for the Linears alone and {ms(one.floor.attention)} for K "
            f"and V. In the step the {what} have {inside:.0%}; the most of the rest: {costly}."
        )
    return " ".join(lines)


def in_halves(one: Profile) -> bool:
    return any(part.name in HALVES for part in one.parts)


def heading(result: Result) -> str:
    m = result.model
    return f"{m['name']}, {m['dtype']}, {device_name(result.about)}, backend {result.backend}"


def show(result: Result, console: Console) -> None:
    console.print()
    console.print(Text(heading(result), style="bold"))
    for one in result.profiles:
        console.print(table(one))
    console.print(Text(finding(result)))
    stopped = ["Stopped half way: what is whole until then."] if result.partial else []
    for note in [*stopped, f"{result.seconds:.0f} s in all."]:
        console.print(Text(note, style="dim"))


def table(one: Profile) -> Table:
    cost = one.cost_of_watching
    watching = (
        f"Watching cost {ms(cost)} ms a step ({cost / one.step.median:.1%})."
        if cost > 0
        else "Watching cost less than the steps differ."
    )
    found = new_table(
        f"{one.kind}: {named(one)}",
        "Time belongs to the innermost part; medians of the watched steps, and their share of the sum. "
        f"{watching} floor: the model's Linears alone and the {one.kv_bytes / 1e6:,.1f} MB of live K and V at the "
        f"speed of a copy, or their arithmetic. By bytes and arithmetic alone: {ms(one.floor.bytes_alone)} ms.",
        ("part", "where", "calls", "ms", "share"),
    )
    found.columns[1].justify = "left"
    for part in one.parts:
        found.add_row(
            part.name,
            Text(part.where, style="dim"),
            f"{part.calls:,}",
            ms(part.seconds),
            Text(f"{part.share:.1%}", style="bold"),
            end_section=part is one.parts[-1],
        )
    ends = [
        ("step", "watched", one.watched.median, ""),
        ("step", "not watched", one.step.median, ""),
        ("floor", "", one.floor.total, f"{one.share:.1%}"),
        ("", "the Linears alone", one.floor.linears, ""),
        ("", "K and V", one.floor.attention, ""),
    ]
    if one.replayed:
        share = one.floor.bytes_alone / one.replayed.median
        ends += [
            ("step", "from CUDA graphs", one.replayed.median, ""),
            ("bytes alone", "", one.floor.bytes_alone, f"{share:.1%}"),
        ]
    for name, what, seconds, reached in ends:
        found.add_row(name, Text(what, style="dim"), "", ms(seconds), Text(reached, style="bold"))
    return found


# ---- the command


def as_json(result: Result) -> dict[str, Any]:
    return {"finding": finding(result), **asdict(result)}


def run_command(plan: Plan, model: str, device: str, dtype: str, json_path: Path | None, console: Console) -> int:
    """`minillm profile`. Returns the exit status, 0.

    Raises InputError as `measure`, and for a file that cannot be written, before the weights are loaded. After Ctrl-C
    it shows and saves what is whole, and raises KeyboardInterrupt again.
    """
    from minillm.fetch import find

    results.check_room(json_path)
    folder = find(model)
    plan.check(Config.from_folder(folder))
    result = measure(load_model(folder, device, dtype, console), folder.name, plan, console)
    show(result, console)
    results.save(console, json_path, "profile", lambda: as_json(result))
    if result.partial:
        raise KeyboardInterrupt
    return 0
