"""Which backend is the fastest here? `--backend auto` asks the machine, and remembers the answer.

All backends compute the same numbers. Which one is the fastest depends on the processor, the shape of the model and
how many texts run, so each that can run here is timed on a few steps of attention, without the rest of the model. That
takes less than a second, once for each machine, model and dtype; `minillm bench --backends` does the same at length.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import minillm
from minillm.batch import Batch, pack
from minillm.cache import KVPool
from minillm.config import Config
from minillm.device import synchronize
from minillm.errors import InputError
from minillm.host import cache_folder
from minillm.kernels import BACKENDS, Backend, backend, why_not
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Request, make_request
from minillm.slots import RegionSlots

AUTO = "auto"
REFERENCE = "gather"  # runs everywhere, and says what is right
# Not even looked at on a CPU, where importing them takes a second or more: two are made for a GPU, and flex is compiled
# at its first step, which takes seconds; a text should begin at once.
NOT_ON_CPU = ("flex", "varlen", "triton_paged")
SIZES = (1, 8, 32)  # texts that decode at once, each measured
CONTEXT = 200  # positions that each of them looks at
CHUNK = 256  # tokens of a prompt in one step
ANSWER = 128  # tokens that follow such a prompt
NBYTES = 2**25  # of K and V that are read one after the other: more than the caches near a core keep
ROUNDS = 5
SECONDS = 0.5  # for the rounds of all steps together
LEAST_ROUNDS = 3
REGION = 16  # a text's region of slots is a multiple of this, for backends that read in blocks
# A number x may differ from the reference's by so much times 1 + |x|: near 0 where a text sees many positions, whose
# mean it is, and as large as K and V's own where it sees few.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}


# ---- one step of attention, without a model


Chunks = Sequence[tuple[int, int]]  # for each text: tokens that are computed already, and new ones


def attention_only(config: Config, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> Llama:
    """A model with the heads and layers of this one, and next to nothing else: enough to make a pool for."""
    small = replace(config, vocab_size=2, d_model=2, d_ff=2, n_layers=layers or config.n_layers)
    return Llama.random(small, dtype=dtype).to(device)


def enough_layers(config: Config, itemsize: int, chunks: Chunks, nbytes: int) -> int:
    """So many of the model's layers that their K and V are as many bytes: a single one's would stay in the cache.

    For chunks, whose time is arithmetic, two.
    """
    if any(n > 1 for _, n in chunks):
        return min(2, config.n_layers)
    layer = sum(start + n for start, n in chunks) * config.kv_bytes_per_token(itemsize) // config.n_layers
    return max(1, min(-(-nbytes // layer), config.n_layers))


@dataclass(frozen=True)
class Probe:
    """A pool that holds random K and V of N texts, one step over them, and q, k, v of its T new tokens."""

    pool: KVPool
    batch: Batch
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, Hkv, D]
    v: Tensor

    @classmethod
    def of(cls, model: Llama, chunks: Chunks, nbytes: int = 0, seed: int = 0) -> "Probe":
        """In so many layers that their K and V are `nbytes`. Of the model only shape, dtype and device matter.

        A slot that may not be read before it is written holds NaN. Raises InputError if the machine lacks the memory.
        """
        layers = enough_layers(model.config, model.dtype.itemsize, chunks, nbytes)
        model = attention_only(model.config, model.device, model.dtype, layers)
        c, longest = model.config, max(start + n for start, n in chunks)
        slots = RegionSlots(len(chunks), -(-longest // REGION) * REGION)
        pool = KVPool(model, slots.n_slots, len(chunks), slots.capacity)
        plan: list[tuple[Request, int]] = []
        computed: list[int] = []
        for start, n in chunks:
            request = make_request([0] * (start + n), SamplingParams(max_tokens=1, seed=0), c, None, slots.capacity)
            request.computed = start
            slots.reserve(request, n)
            computed += request.slots[:start]
            plan.append((request, n))
        generator = torch.Generator(model.device).manual_seed(seed)
        free = torch.ones(slots.n_slots + 1, dtype=torch.bool, device=model.device)
        free[computed] = False
        for memory in (pool.k, pool.v):
            memory[0].normal_(generator=generator)  # [Hkv, slots, D]
            memory[0][:, free] = float("nan")
            memory[1:] = memory[0]  # every layer the same: drawing takes longer than copying
        batch = pack(plan, pool)
        heads = (c.n_heads, c.n_kv_heads, c.n_kv_heads)
        qkv = pool.k.new_empty(len(batch.tokens), sum(heads), c.head_dim).normal_(generator=generator)
        q, k, v = qkv.split(heads, dim=1)  # [T, H or Hkv, D] each: views, as the model's own are
        return cls(pool, batch, q, k, v)


def answer(name: str, probe: Probe) -> Tensor:
    """What a backend makes of the step in the last layer, [T, H, D]: nothing of what another stored is left there."""
    layer, pool, new = len(probe.pool.k) - 1, probe.pool, probe.batch.slots
    nothing = torch.full_like(probe.k, float("nan"))
    pool.store(layer, new, nothing, nothing)
    return backend(name)(pool, probe.batch)(layer, probe.q, probe.k, probe.v)


@dataclass(frozen=True)
class Verdict:
    difference: float | None  # the largest from the reference; None: its answer is not numbers
    fault: str | None  # what is wrong with it, in words


def judge(name: str, probe: Probe, expected: Tensor) -> Verdict:
    """Compares a backend's answer with the reference's, [T, H, D]. One that fails is a fault too, whatever it raises:
    the others go on without it."""
    try:
        found = answer(name, probe)
    except Exception as error:
        return Verdict(None, ": ".join(filter(None, [f"it fails with {type(error).__name__}", str(error)])))
    if found.shape != expected.shape:
        return Verdict(None, f"its answer has the shape {list(found.shape)} in place of {list(expected.shape)}")
    expected, most = expected.double(), TOLERANCE[expected.dtype]
    off = (found.double() - expected).abs()  # [T, H, D]
    difference = float(off.max())
    if not math.isfinite(difference):
        return Verdict(None, "its answer is not numbers")
    if (off > most * (1 + expected.abs())).any():
        return Verdict(difference, f"its answer differs from {REFERENCE}'s by {difference:.2g} (tolerance {most:g})")
    return Verdict(difference, None)


# ---- the time it takes


@dataclass(frozen=True)
class Time:
    """Seconds of one step of attention."""

    prepare: float  # once for all layers
    layer: float  # the mean of the pool's layers, one after the other as a model reads them

    def step(self, layers: int) -> float:
        return self.prepare + layers * self.layer


def timed(make: Backend, probe: Probe) -> Time:
    layers = len(probe.pool.k)
    synchronize(probe.q.device)
    began = time.perf_counter()
    attend = make(probe.pool, probe.batch)
    synchronize(probe.q.device)
    prepared = time.perf_counter()
    for layer in range(layers):
        attend(layer, probe.q, probe.k, probe.v)
    synchronize(probe.q.device)
    return Time(prepared - began, (time.perf_counter() - prepared) / layers)


def race(names: Sequence[str], probe: Probe, rounds: int, seconds: float) -> dict[str, list[Time]]:
    """So many rounds, each beginning with another backend; fewer, but some, where the seconds are over before."""
    times: dict[str, list[Time]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    for i in range(rounds):
        if i >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        shift = i % len(names)
        for name in [*names[shift:], *names[:shift]]:
            times[name].append(timed(backend(name), probe))
    return times


# ---- the choice


def candidates(model: Llama) -> list[str]:
    """The backends to choose from: all that can run here but `dense`, which is there to be understood.

    On a CPU also without those in NOT_ON_CPU. Asked for by name, `flex` runs there too.
    """
    left_out = {"dense", *(NOT_ON_CPU if model.device.type == "cpu" else ())}
    return [name for name in BACKENDS if name not in left_out and why_not(name, model) is None]


def measure(model: Llama, names: Iterable[str]) -> dict[str, str]:
    """{texts that decode at once: the fastest of these backends}.

    The cost that counts is that of so many typical texts: a prompt of one chunk each, then their answers together.
    Warns of a backend whose answer is not the reference's, and leaves it out.
    """
    left = list(names)
    steps = {str(n): [(CONTEXT - 1, 1)] * n for n in SIZES} | {"chunk": [(0, CHUNK)]}
    cost: dict[str, dict[str, float]] = {}
    for step, chunks in steps.items():
        probe = Probe.of(model, chunks, NBYTES)
        expected = answer(REFERENCE, probe)
        for name in list(left):
            if name != REFERENCE and (fault := judge(name, probe, expected).fault):
                warnings.warn(f"backend {name!r} is left out: {fault}", RuntimeWarning, stacklevel=2)
                left.remove(name)
        times = race(left, probe, ROUNDS, SECONDS / len(steps))
        cost[step] = {name: median(t.step(model.config.n_layers) for t in found) for name, found in times.items()}

    if model.device.type == "cuda":  # what graphs save, for which shapes must be fixed, is more than attention takes
        left = [name for name in left if getattr(backend(name), "fixed_shape", False)] or left

    def total(name: str, n: int) -> float:
        return n * cost["chunk"][name] + ANSWER * cost[str(n)][name]

    return {str(n): min(left, key=lambda name: total(name, n)) for n in SIZES}


def choose(model: Llama, running: int = SIZES[-1], path: Path | None = None) -> str:
    """The fastest backend for this model on this machine, with so many texts running at once.

    The answer is kept in a file of the user's cache folder, or at `path`; a file that is broken or cannot be written
    only means that it is measured again.
    """
    names = candidates(model)
    if len(names) == 1:
        return names[0]
    path = cache_file() if path is None else path
    about, size = describe(model, names), str(next((n for n in SIZES if n >= running), SIZES[-1]))
    known = recall(path)
    found = known.get(about)
    if not isinstance(found, dict) or found.get(size) not in names:
        found = measure(model, names)
        remember(path, {**known, about: found})
    return str(found[size])


def check_name(name: str) -> None:
    """Raises InputError for a name that is neither "auto" nor a backend's: known before a model is loaded."""
    if name != AUTO and name not in BACKENDS:
        raise InputError(f"backend {name!r} is not known; use {AUTO} or one of {', '.join(BACKENDS)}")


def resolve(name: str, model: Llama, running: int = SIZES[-1]) -> str:
    """The name of a backend, where "auto" means the one that `choose` finds.

    Raises InputError for a name that is not known, and for a backend that cannot run this model here.
    """
    check_name(name)
    if name == AUTO:
        return choose(model, running)
    if reason := why_not(name, model):
        raise InputError(f"backend {name!r} cannot run this model here: {reason}")
    return name


# ---- the answer, kept


def describe(model: Llama, names: Sequence[str]) -> str:
    """All that the answer depends on, as one line."""
    from minillm.doctor import cpu_name, usable_cores

    c, device = model.config, model.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {usable_cores()} cores"
    shape = f"{c.n_layers} layers, {c.n_heads}/{c.n_kv_heads} heads of {c.head_dim}"
    versions = f"torch {torch.__version__}, {torch.get_num_threads()} threads, minillm {minillm.__version__}"
    return f"{shape}, {model.dtype}, {device.type}; {machine}; {versions}; of {', '.join(names)}"


def cache_file() -> Path | None:
    """In the user's cache folder; None where there is no such folder."""
    folder = cache_folder()
    return None if folder is None else folder / "backends.json"


def recall(path: Path | None) -> dict[str, object]:
    """{what it depends on: the answer}; empty where there is no file, or one that is not ours."""
    try:
        found = json.loads(path.read_text("utf-8")) if path is not None else None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(path: Path | None, known: Mapping[str, object]) -> None:
    """Writes the file whole or not at all: two programs may do so at the same time."""
    if path is None:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):  # then it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(known, indent=1), "utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
