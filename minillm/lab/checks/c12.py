"""Lesson 12, CUDA: the least time of a step, the queue of kernels, graphs that replay on a CPU as on a GPU, and the
host that works ahead. Every token of the graph loop is the naive stage's, with NaN in every slot nobody may read."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from minillm import attention
from minillm.batch import pack
from minillm.bench.ceiling import layer_weights
from minillm.cache import KVPool
from minillm.config import Config
from minillm.kernels.gather import GatherAttend
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.tiny import TINY
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Request, make_request
from minillm.sampling import sample
from minillm.scheduler import Scheduler
from minillm.slots import BlockSlots
from minillm.stages import naive

# ---- what the lesson hands out: operators, counted and recorded


@dataclass(frozen=True)
class Operator:
    """One call into torch's library, with the tensors that it got and made."""

    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        return str(self.call).removeprefix("aten.").split(".")[0]

    @property
    def writes(self) -> bool:
        """Whether it changes a tensor that was there before."""
        return bool(self.call._schema.is_mutable)

    @property
    def makes(self) -> list[Tensor]:
        """Results in memory of their own: a view's are in the memory of what it looks at."""
        theirs = {memory(tensor) for tensor in tensors((self.args, self.kwargs))}
        return [tensor for tensor in tensors(self.result) if memory(tensor) not in theirs]

    @property
    def launches(self) -> bool:
        """Whether a GPU would start a kernel for it. Not for a view, and not to take memory and leave it as it is."""
        return self.writes or (bool(self.makes) and not self.name.startswith("empty"))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    """A name of the memory that it lies in: its address would do, but for tensors that only have a shape."""
    return id(tensor) if tensor.is_mkldnn else int(tensor.untyped_storage()._cdata)


class Recorder(TorchDispatchMode):
    """Inside a `with` block: every operator is run, and written down."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call(*args, **(kwargs or {}))
        self.operators.append(Operator(call, args, kwargs or {}, result))
        return result


def operators(work: Callable[[], Any]) -> list[Operator]:
    """Every call into torch's library that `work` makes."""
    with Recorder() as recorder:
        work()
    return recorder.operators


def bytes_moved(op: Operator) -> int:
    """Read and written, once each; of a memory that is only looked up in, the rows that were looked up."""
    if op.name in ("embedding", "index_select", "index", "gather"):
        return 2 * sum(tensor.nbytes for tensor in tensors(op.result))
    if op.name in ("index_copy_", "index_put_", "copy_"):
        return 2 * max((tensor.nbytes for tensor in tensors((op.args[1:], op.kwargs))), default=0)
    return sum(tensor.nbytes for tensor in tensors((op.args, op.kwargs, op.result)))


def arithmetic(op: Operator) -> int:
    """Operations of a matrix product: two for each term of each sum. Of all else: too few to count."""
    if op.name not in ("mm", "bmm", "addmm", "linear"):
        return 0
    left = op.args[1 if op.name == "addmm" else 0]  # addmm(bias, left, right)
    return 2 * int(op.result.numel()) * int(left.shape[-1])


# ---- a graph, as on a GPU


class NoWaiting(TorchFunctionMode):
    """While a graph is captured, nothing has been computed, so no value can be asked for."""

    ASKS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(call, "__name__", "") in self.ASKS:
            raise RuntimeError(
                f"operation not permitted when stream is capturing: {call.__name__} asks for a value, and nothing is "
                "computed while a graph is captured"
            )
        return call(*args, **(kwargs or {}))


class FakeGraph(Recorder):
    """A CUDA graph on a CPU. `work(static)` runs once, and what it asks of the device is taken down, not done:
    which operators, and at which addresses. `replay` does just that, again and again. Python does not run again: a
    number that it had is frozen, and a tensor is its address, whatever name is bound to something else later."""

    def __init__(self, work: Callable[[Any], Tensor], static: Any):
        super().__init__()
        self.static, self.replays = static, 0
        with NoWaiting(), self:
            self.output = work(static)
        for op in self.operators:  # nothing has been computed yet, so nothing is there
            for tensor in op.makes:
                tensor.fill_(math.nan if tensor.is_floating_point() else 0)

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(call.tags):
            raise RuntimeError(f"operation not permitted when stream is capturing: {call} needs a value on the host")
        result = args[0] if call._schema.is_mutable else call(*args, **kwargs)  # what writes is left for the replay
        kept = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs, result))
        self.operators.append(Operator(call, *kept))
        return result

    def replay(self) -> None:
        self.replays += 1
        for op in self.operators:
            if op.launches:
                again = op.call(*op.args, **op.kwargs)
                if not op.writes:
                    for here, value in zip(tensors(op.result), tensors(again), strict=True):
                        here.copy_(value)  # at the same address as ever


def live_bytes(graph: FakeGraph) -> int:
    """The most that a graph's own tensors take at one time, if each gives its memory to later ones after its last use:
    what a capture takes from its pool, inputs and weights aside."""
    born: dict[int, int] = {}
    size: dict[int, int] = {}
    last = {memory(graph.output): len(graph.operators) - 1}
    for i, op in enumerate(graph.operators):
        for tensor in op.makes:
            born.setdefault(memory(tensor), i)
            size[memory(tensor)] = tensor.untyped_storage().nbytes()
        for tensor in tensors((op.args, op.kwargs, op.result)):
            last[memory(tensor)] = max(i, last.get(memory(tensor), 0))
    change = [0] * (len(graph.operators) + 1)
    for name, n in size.items():
        change[born[name]] += n
        change[last[name] + 1] -= n
    return max(accumulate(change), default=0)


@dataclass(frozen=True)
class Row:
    """One text in a decode step: the token that goes in, and the slots of positions 0, 1, .. of the text. The token's
    own position is the last of them."""

    token: int
    slots: list[int]


@dataclass
class Static:
    """The buffers of one graph, B rows of S positions. The graph knows where they lie, not what they are called."""

    tokens: Tensor  # [B] ids
    positions: Tensor  # [B] of these tokens, in their own texts
    slots: Tensor  # [B] where their K and V go
    table: Tensor  # [B, S] where the K and V of positions 0, 1, .. of their texts lie

    @classmethod
    def fresh(cls, B: int, S: int, scratch: int, device: Any = "cpu") -> "Static":
        """Every row is a dummy."""
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        return cls(zeros(B), zeros(B), zeros(B) + scratch, zeros(B, S) + scratch)


# ---- a device that works while the host does something else

LAST = -1  # in place of a token: "what you sampled for this text in the step before"


class Device:
    """Does steps one after the other, and knows what each has sampled. It knows the texts beforehand, so no model is
    needed: `texts` {name: its tokens, the first one given}. After the last of them come tokens that nobody wants."""

    def __init__(self, texts: Mapping[str, Sequence[int]], most_steps: int = 100_000):
        self.texts, self.most_steps = texts, most_steps
        self.made = dict.fromkeys(texts, 0)  # tokens sampled so far
        self.astray: set[str] = set()  # texts that got a wrong token
        self.running: deque[dict[str, int]] = deque()
        self.steps: list[list[str]] = []  # who was in each step
        self.idle = 0  # times that it was done and had nothing to do

    def start(self, rows: dict[str, int]) -> None:
        """Begins a step, {name: token, or LAST}, and returns at once. Two may be begun and not finished."""
        if not rows:
            raise ValueError("start: a step with nobody in it; begin one only if somebody is left")
        if len(self.steps) == self.most_steps:
            raise RuntimeError(f"start: step {self.most_steps}, and every text has ended long ago")
        if len(self.running) == 2:
            raise RuntimeError("start: two steps are begun and not finished, and there are buffers for two")
        self.idle += bool(self.steps) and not self.running
        sampled = {}
        for name, token in rows.items():
            at = self.made[name]
            if token == LAST and (not self.steps or name not in self.steps[-1]):
                raise ValueError(f"start: LAST for {name!r}, which was not in the step before")
            text = self.texts[name]
            right = text[at] if at < len(text) else 0
            if token not in (LAST, right) or name in self.astray:
                self.astray.add(name)
            self.made[name] = at + 1
            goes_on = text[at + 1] if at + 1 < len(text) else 0
            sampled[name] = -2 if name in self.astray else goes_on
        self.running.append(sampled)
        self.steps.append(list(rows))

    def finish(self) -> dict[str, int]:
        """Waits for the step that was begun first; returns {name: the token sampled}."""
        if not self.running:
            raise RuntimeError("finish: no step is begun, so this would wait for ever")
        return self.running.popleft()


def weights_read(config: Config) -> int:
    """Weights that every row of a step is multiplied with: of all layers, and of the head."""
    return layer_weights(config) + config.vocab_size * config.d_model


# ---- the graph loop


@contextmanager
def one_thread() -> Iterator[None]:
    """For tiny tensors: a second thread has nothing to do, and waiting for it can take far longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_step(attend_static: Callable[..., Tensor], model: Llama, pool: KVPool, static: Static) -> Tensor:
    """What is captured: a whole step, from ids [B] to the most likely next ids [B]."""
    hidden = model(static.tokens, static.positions, partial(attend_static, pool, static))  # [B, d]
    return model.logits(hidden).argmax(-1)  # [B]


@dataclass
class Served:
    """How a run went."""

    rows: list[int] = field(default_factory=list)  # of each step in which everybody decoded
    used: list[int] = field(default_factory=list)  # the size of the graph that was replayed in it; 0: none
    others: int = 0  # steps with a piece of a prompt, which no graph is for


@one_thread()
def serve(
    functions: Mapping[str, Callable[..., Any]],
    model: Llama,
    requests: Sequence[tuple[int, Request]],
    sizes: Sequence[int],
    *,
    max_running: int,
    max_len: int,
    n_blocks: int,
    block: int = 4,
    before: Callable[[KVPool, Sequence[Request]], None] = lambda pool, running: None,
) -> Served:
    """Continuous batching as in the engine, greedy; a step in which every text computes one token goes through the
    lesson's `decode`. `requests` are (step of arrival, request); `before` is called before each step."""
    slots = BlockSlots(max_running, max_len, n_blocks * block, block)
    scheduler = Scheduler(slots, max_running, max(16, max_running))
    pool = KVPool(model, slots.n_slots, max_running, slots.capacity)
    scratch = slots.n_slots  # the one slot that no text can get
    pool.k[:, :, scratch] = pool.v[:, :, scratch] = 0
    before(pool, [])
    work = partial(one_step, functions["attend_static"], model, pool)
    graphs = {B: FakeGraph(work, Static.fresh(B, slots.capacity, scratch)) for B in sorted(sizes, reverse=True)}
    served = Served()
    coming = deque(sorted(requests, key=lambda pair: pair[0]))
    step = 0
    while coming or scheduler.busy:
        while coming and coming[0][0] <= step:
            scheduler.waiting.add(coming.popleft()[1])
        step += 1
        plan = scheduler.schedule()
        if not plan:
            continue
        before(pool, scheduler.running)

        def eager(rows: Any = None, plan: Any = plan) -> list[int]:
            batch = pack(plan, pool)
            hidden = model(batch.tokens, batch.positions, GatherAttend(pool, batch))  # [T, d]
            return [token for token, _ in sample(model.logits(hidden[batch.last]), batch.samples)]

        if all(n == 1 == request.pending for request, n in plan):
            rows = [Row(request.tokens[-1], list(request.slots[: request.computed + 1])) for request, _ in plan]
            done = {B: graph.replays for B, graph in graphs.items()}
            ids = functions["decode"](graphs, rows, scratch, eager)
            if not isinstance(ids, list | tuple) or len(ids) != len(rows):
                raise Wrong(f"step {step}: decode must return a list of {len(rows)} ids; it returned {ids!r}")
            served.rows.append(len(rows))
            served.used.append(max((B for B, graph in graphs.items() if graph.replays > done[B]), default=0))
        else:
            ids = eager()
            served.others += 1
        whose = [request for request, n in plan if n == request.pending]
        scheduler.update(plan, {request: (int(token), None) for request, token in zip(whose, ids, strict=True)})
    return served


# ---- right ones, for when a function that another one calls is wrong


def right_bucket(n: int, sizes: Sequence[int]) -> int | None:
    return min((size for size in sizes if size >= n), default=None)


def right_attend_static(pool: KVPool, static: Static, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pool.store(layer, static.slots, k, v)
    k, v = pool.gather(layer, pool.index(static.table))  # [B, S, Hkv, D]
    places = torch.arange(static.table.shape[1], device=q.device)  # [S]
    mask = attention.visible(static.positions[:, None], places)  # [B, 1, S]
    return attention.sdpa(q[:, None], k, v, mask)[:, 0]  # [B, H, D]


def right_fill(static: Static, rows: Sequence[Row], scratch: int) -> None:
    B, S = static.table.shape
    every = [*rows, *[Row(0, [scratch])] * (B - len(rows))]
    static.tokens.copy_(torch.tensor([row.token for row in every]))
    static.positions.copy_(torch.tensor([len(row.slots) - 1 for row in every]))
    static.slots.copy_(torch.tensor([row.slots[-1] for row in every]))
    static.table.copy_(torch.tensor([row.slots + row.slots[:1] * (S - len(row.slots)) for row in every]))


def right_decode(graphs: Mapping[int, FakeGraph], rows: list[Row], scratch: int, eager: Any) -> list[int]:
    size = right_bucket(len(rows), list(graphs))
    if size is None:
        return list(eager(rows))
    right_fill(graphs[size].static, rows, scratch)
    graphs[size].replay()
    return [int(token) for token in graphs[size].output[: len(rows)]]


# ---- step_floor


def floors(
    config: Config, rows: int, contexts: Sequence[int], bytes_per_s: float, flops_per_s: float
) -> Iterator[tuple[str, float]]:
    """The right answer, then what people compute instead, with words for it."""
    c, S = config, sum(contexts)
    W, layers = weights_read(c), layer_weights(c)
    kv, scores = c.kv_bytes_per_token(2) * S, 4 * c.n_layers * c.n_heads * c.head_dim * S
    read, work = (2 * W + kv) / bytes_per_s, (2 * W * rows + scores) / flops_per_s

    def longer(moved: float, operations: float) -> float:
        return max(moved / bytes_per_s, operations / flops_per_s)

    yield "", max(read, work)
    yield "the time to read alone", read
    yield "the time of the arithmetic alone", work
    yield "the sum of both times: they overlap, so the longer one counts", read + work
    yield (
        "reading the weights once for each row: one read serves all rows",
        longer(2 * W * rows + kv, 2 * W * rows + scores),
    )
    yield "K and V of a single layer: each layer keeps its own", longer(2 * W + kv / c.n_layers, 2 * W * rows + scores)
    yield "K and V without the K, or without the V", longer(2 * W + kv / 2, 2 * W * rows + scores)
    yield (
        "the K and V of as many heads as there are queries: Hkv is smaller",
        longer(2 * W + kv * c.n_heads / c.n_kv_heads, 2 * W * rows + scores),
    )
    yield "reading without K and V", longer(2 * W, 2 * W * rows + scores)
    if contexts:
        longest = c.kv_bytes_per_token(2) * max(contexts) * rows
        yield (
            "K and V of the longest context for every row: count the positions that are there",
            longer(2 * W + longest, 2 * W * rows + scores),
        )
    yield "one byte a number: 16 bits are 2", longer(W + kv, 2 * W * rows + scores)
    yield "one byte a weight: 16 bits are 2", longer(W + kv, 2 * W * rows + scores)
    yield "numbers instead of bytes", longer(W + kv / 2, 2 * W * rows + scores)
    yield "four bytes a number: 16 bits are 2", longer(4 * W + 2 * kv, 2 * W * rows + scores)
    yield "no head: its weights are read and multiplied too", longer(2 * layers + kv, 2 * layers * rows + scores)
    yield (
        "one operation for each weight: a multiplication and an addition are two",
        longer(2 * W + kv, W * rows + scores),
    )
    yield "no arithmetic for attention", longer(2 * W + kv, 2 * W * rows)
    yield (
        "half of attention's arithmetic: q k and the sum over v are two products",
        longer(2 * W + kv, 2 * W * rows + scores / 2),
    )
    yield "attention's arithmetic for one layer", longer(2 * W + kv, 2 * W * rows + scores / c.n_layers)
    yield (
        "attention's arithmetic for the key heads: every query head computes its own scores",
        longer(2 * W + kv, 2 * W * rows + scores * c.n_kv_heads / c.n_heads),
    )
    yield "the arithmetic of one row", longer(2 * W + kv, 2 * W + scores)
    yield (
        "the arithmetic of the live rows only: dummy rows go through the Linears too",
        longer(2 * W + kv, 2 * W * len(contexts) + scores),
    )


def check_floor(work: Work, rows: int, contexts: list[int], bytes_per_s: float, flops_per_s: float) -> None:
    got = work.call("step_floor", ODD, rows, contexts, bytes_per_s, flops_per_s)
    (_, right), *others = floors(ODD, rows, contexts, bytes_per_s, flops_per_s)
    what = f"{rows} rows, contexts {contexts}, {bytes_per_s:g} bytes/s, {flops_per_s:g} operations/s: the floor"
    if not isinstance(got, int | float):
        same(got, float(right), what)
    if math.isclose(got, right, rel_tol=1e-9):
        return
    for words, value in others:
        if math.isclose(got, value, rel_tol=1e-9):
            raise Wrong(f"{what} is {right:g} s, and yours is {got:g} s, which is {words}")
    raise Wrong(f"{what} is {right:g} s, and yours is {got:g} s, {got / right:.4g} times as much")


FAST = 1e30
ODD = replace(TINY, d_model=48, n_layers=5, n_heads=6, vocab_size=300)  # no two of its numbers can be mixed up


@holds(
    "12",
    "step_floor",
    "where arithmetic costs nothing: the weights once, and the K and V of every position that is looked at",
    hint="2 * weights_read(config) bytes of weights, and config.kv_bytes_per_token(2) for each position looked at.",
)
def floor_reads(work: Work) -> None:
    for rows, contexts in ((1, [1]), (1, [100]), (2, [7, 300]), (8, [5] * 6), (64, [40] * 64)):
        check_floor(work, rows, contexts, 1e9, FAST)


@holds(
    "12",
    "step_floor",
    "where reading costs nothing: two operations for each weight and row, and attention's two products",
    hint="a row costs 2 operations for each weight; a position that is looked at costs 4 * head_dim for each query "
    "head of each layer.",
)
def floor_computes(work: Work) -> None:
    for rows, contexts in ((1, [1]), (1, [100]), (3, [7, 300, 9]), (8, [5] * 6), (64, [40] * 64)):
        check_floor(work, rows, contexts, FAST, 1e12)


@holds(
    "12",
    "step_floor",
    "the longer of the two times, whichever it is",
    hint="`max(bytes / bytes_per_s, operations / flops_per_s)`.",
)
def floor_is_the_longer(work: Work) -> None:
    draw = seeds.rng(1)
    for _ in range(60):
        contexts = [draw.randint(1, 400) for _ in range(draw.randint(1, 20))]
        rows = len(contexts) + draw.choice((0, 0, 3))
        check_floor(work, rows, contexts, 1e9, draw.choice((0.2, 0.9, 1.1, 4)) * 1e9 * rows)


# ---- run_queue


def queue(kernels: Sequence[float], launch: float) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = []
    free = 0.0
    for i, seconds in enumerate(kernels):
        begin = max((i + 1) * launch, free)
        free = begin + seconds
        times.append((begin, free))
    return times


def check_queue(work: Work, kernels: list[float], launch: float) -> None:
    got = work.call("run_queue", kernels, launch)
    what = f"run_queue({kernels}, {launch})"
    if got is None:
        raise Wrong(f"{what} is None: is a `return` missing?")
    if not isinstance(got, list | tuple) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in got):
        raise Wrong(f"{what} is {got!r}; it must be a list of (begin, end), one for each kernel")
    if len(got) != len(kernels):
        raise Wrong(f"{what} has {len(got)} entries; it must have {len(kernels)}, one for each kernel")
    for i, ((begin, end), (b, e)) in enumerate(zip(got, queue(kernels, launch), strict=True)):
        if math.isclose(begin, b, abs_tol=1e-9) and math.isclose(end, e, abs_tol=1e-9):
            continue
        where, free = f"{what}: kernel {i} begins at {begin:g}", got[i - 1][1] if i else 0.0
        if begin < (i + 1) * launch - 1e-9:
            raise Wrong(f"{where}, and the host has handed it over at {(i + 1) * launch:g}")
        if begin < free - 1e-9:
            raise Wrong(f"{where}, and kernel {i - 1} ends at {free:g}: the device runs one after the other")
        if begin > b + 1e-9:
            raise Wrong(f"{where}; it could at {b:g}, when it is handed over and the device is free")
        raise Wrong(f"{where}, takes {kernels[i]:g} and ends at {end:g}; it must end at {e:g}")


@holds(
    "12",
    "run_queue",
    "kernels that are shorter than a launch: each begins when it is handed over",
    hint="the host hands over kernel i at (i + 1) * launch, and never waits for the device.",
)
def queue_launch_bound(work: Work) -> None:
    check_queue(work, [], 5.0)
    for n in (1, 2, 5):
        check_queue(work, [1.0] * n, 5.0)
    check_queue(work, [1.0, 4.0, 0.0, 2.0], 5.0)


@holds(
    "12",
    "run_queue",
    "kernels that are longer than a launch: each begins when the one before has ended",
    hint="keep one number, when the device is free; a kernel begins at the later of that and its being handed over.",
)
def queue_device_bound(work: Work) -> None:
    for n in (1, 2, 5):
        check_queue(work, [7.0] * n, 2.0)
    check_queue(work, [9.0, 6.0, 7.0], 0.0)


@holds(
    "12",
    "run_queue",
    "short and long ones in any order: the later of the two moments, each time anew",
    hint="a long kernel lets the host get ahead, and short ones after it use that up: look at each one, not at sums.",
)
def queue_mixed(work: Work) -> None:
    check_queue(work, [1.0, 20.0, 1.0, 1.0, 1.0, 1.0, 1.0], 4.0)
    draw = seeds.rng(2)
    for _ in range(80):
        kernels = [float(draw.choice((1, 1, 2, 9, 30))) for _ in range(draw.randint(1, 12))]
        check_queue(work, kernels, float(draw.choice((0, 1, 3, 6))))


# ---- bucket


@holds(
    "12",
    "bucket",
    "the smallest size that holds all rows, in whatever order the sizes are",
    hint="of the sizes that are at least n, the smallest.",
)
def bucket_smallest(work: Work) -> None:
    for sizes in ([1, 2, 4, 8], [8, 4, 2, 1], [16, 8, 24], [3], [1, 2, 3, 64]):
        for n in range(1, max(sizes) + 1):
            got, expected = work.call("bucket", n, sizes), right_bucket(n, sizes)
            if got is None:
                raise Wrong(f"bucket({n}, {sizes}) is None, but {expected} holds {n} rows")
            if not isinstance(got, int):
                raise Wrong(f"bucket({n}, {sizes}) is {got!r}; it must be one of the sizes")
            if got not in sizes:
                raise Wrong(f"bucket({n}, {sizes}) is {got}, of which there is no graph")
            if got < n:
                raise Wrong(
                    f"bucket({n}, {sizes}) is {got}, which is too small: {n - got} of {n} texts would be left out"
                )
            if got != expected:
                raise Wrong(f"bucket({n}, {sizes}) is {got}, and {expected} is enough")


@holds(
    "12",
    "bucket",
    "None if no graph is large enough: that step runs without one",
    hint="`min(..., default=None)`, or a `return None` after the loop.",
)
def bucket_none(work: Work) -> None:
    for n, sizes in ((9, [1, 2, 4, 8]), (2, [1]), (1, []), (65, [64, 32])):
        got = work.call("bucket", n, sizes)
        if got is not None:
            raise Wrong(f"bucket({n}, {sizes}) is {got!r}; no size holds {n} rows, so it must be None")


# ---- attend_static


@cache
def model() -> Llama:
    return Llama.random(TINY, seed=5, dtype=torch.float64)


@dataclass
class Scene:
    """A pool with texts in it, and one step: B rows, of which the first ones are live."""

    pool: KVPool
    rows: list[Row]
    static: Static
    q: Tensor  # [B, H, D]
    k: Tensor  # [B, Hkv, D]
    v: Tensor  # [B, Hkv, D]


SLOTS, SCRATCH = 40, 40


def scene(seed: int, lengths: Sequence[int], B: int, S: int = 12) -> Scene:
    """Texts of these lengths, new tokens included; NaN in every slot that holds nothing yet."""
    draw = seeds.rng(seed)
    generator = seeds.generator(seed)
    pool = KVPool(model(), SLOTS, 8, S)
    pool.k.fill_(math.nan)
    pool.v.fill_(math.nan)
    spare = draw.sample(range(SLOTS), SLOTS)
    rows = [Row(draw.randrange(2, 64), [spare.pop() for _ in range(n)]) for n in lengths]
    there = [slot for row in rows for slot in row.slots[:-1]] + [SCRATCH]
    for memory_of in (pool.k, pool.v):
        c = TINY
        shape = (c.n_layers, c.n_kv_heads, len(there), c.head_dim)
        memory_of[:, :, there] = torch.randn(shape, generator=generator, dtype=torch.float64)
    static = Static.fresh(B, S, SCRATCH)
    right_fill(static, rows, SCRATCH)
    q, k, v = (
        torch.randn(B, heads, TINY.head_dim, generator=generator, dtype=torch.float64)
        for heads in (TINY.n_heads, TINY.n_kv_heads, TINY.n_kv_heads)
    )
    return Scene(pool, rows, static, q, k, v)


def one_by_one(s: Scene, layer: int) -> Tensor:
    """What the live rows must get: each text alone, its own slots in order. [n, H, D]"""
    out = []
    for b, row in enumerate(s.rows):
        k, v = (memory_of[layer][:, row.slots[:-1]].movedim(0, 1) for memory_of in (s.pool.k, s.pool.v))  # [s, Hkv, D]
        k, v = torch.cat((k, s.k[b : b + 1])), torch.cat((v, s.v[b : b + 1]))  # [S, Hkv, D]
        mask = torch.ones(1, len(row.slots), dtype=torch.bool)
        out.append(attention.sdpa(s.q[b : b + 1], k, v, mask))  # [1, H, D]
    return torch.cat(out)


def same_rows(got: Any, expected: Tensor, s: Scene, what: str) -> None:
    B, n = s.static.tokens.shape[0], len(s.rows)
    if not isinstance(got, Tensor) or got.shape != (B, TINY.n_heads, TINY.head_dim):
        same(got, torch.empty(B, TINY.n_heads, TINY.head_dim, dtype=torch.float64), what)
    for b in range(n):
        if got[b].isnan().any():
            raise Wrong(
                f"{what}: row {b} (a text of {len(s.rows[b].slots)} positions) has NaN: it looked at a slot of nobody, "
                "or at its own before its K and V were stored"
            )
    same(got[:n], expected, f"{what}, the {n} live rows")


SCENES = (((1, 4, 7), 4), ((12, 1), 2), ((3,), 1), ((2, 9, 5, 12, 1), 8))


@holds(
    "12",
    "attend_static",
    "every live row gets what its text alone would get; slots of nobody hold NaN",
    hint="store k and v at static.slots first; then gather what static.table says, [B, S], and mask it by position: "
    "place j of a row is position j of its text.",
)
def attend_each_row(work: Work) -> None:
    for seed, (lengths, B) in enumerate(SCENES):
        s = scene(seed, lengths, B)
        layer = seed % 2
        expected = one_by_one(s, layer)
        before = [t.clone() for t in (s.static.tokens, s.static.positions, s.static.slots, s.static.table)]
        got = work.call("attend_static", s.pool, s.static, layer, s.q, s.k, s.v, changes=(0, 1))
        same_rows(got, expected, s, f"texts of {list(lengths)} positions in {B} rows")
        now = (s.static.tokens, s.static.positions, s.static.slots, s.static.table)
        if not all(map(torch.equal, before, now)):
            raise Wrong("attend_static changed the static buffers; the next layer needs them as they were")
        for b, row in enumerate(s.rows):
            same(s.pool.k[layer][:, row.slots[-1]], s.k[b], f"K in the pool, of the new token of row {b}")
            same(s.pool.v[layer][:, row.slots[-1]], s.v[b], f"V in the pool, of the new token of row {b}")


@holds(
    "12",
    "attend_static",
    "captured once, it is right for every later step: no value is asked for, and no shape depends on one",
    hint="use every place of the table, S of them, whatever the texts' lengths; the mask does the rest.",
)
def attend_captured(work: Work) -> None:
    function = work.function("attend_static")
    first = scene(10, (1, 1, 1), 4)
    s = first

    def captured(static: Static) -> Tensor:
        out: Tensor = function(s.pool, static, 1, s.q, s.k, s.v)
        return out

    try:
        graph = FakeGraph(captured, s.static)
    except RuntimeError as error:
        if "not permitted" not in str(error):
            raise
        raise Wrong(f"it cannot be captured: {error}{work.line(error.__traceback__)}") from error
    for seed, lengths in enumerate(((1, 1, 1), (2, 6, 3), (12, 1), (5, 12, 4, 9)), 11):
        other = scene(seed, lengths, 4)
        for here, there in (
            (s.pool.k, other.pool.k),
            (s.pool.v, other.pool.v),
            (s.q, other.q),
            (s.k, other.k),
            (s.v, other.v),
        ):
            here.copy_(there)
        right_fill(s.static, other.rows, SCRATCH)
        s.rows = other.rows
        expected = one_by_one(s, 1)
        graph.replay()
        same_rows(graph.output, expected, s, f"captured for texts of one position, replayed for {list(lengths)}")


@holds(
    "12",
    "attend_static",
    "it makes its tensors where q is, on whatever device",
    hint="`torch.arange(S, device=q.device)`; without that it is made on the CPU.",
)
def attend_anywhere(work: Work) -> None:
    with torch.device("meta"):  # has shapes and no numbers, and like a GPU it does not mix with the CPU
        pool = KVPool(Llama(TINY), SLOTS, 8, 12)
        q, k = (torch.empty(4, heads, TINY.head_dim) for heads in (TINY.n_heads, TINY.n_kv_heads))
    try:
        got = work.function("attend_static")(pool, Static.fresh(4, 12, SCRATCH, "meta"), 1, q, k, k)
    except RuntimeError as error:
        if str(error).startswith("task "):  # it is still the stub
            raise
        raise Wrong(
            f"with all tensors on another device than the CPU: {error}{work.line(error.__traceback__)}"
        ) from error
    if not isinstance(got, Tensor) or got.device.type != "meta":
        raise Wrong("with all tensors on another device than the CPU, what comes back must be there too")


# ---- fill


def buffers(static: Static) -> dict[str, Tensor]:
    return {name: getattr(static, name) for name in ("tokens", "positions", "slots", "table")}


def filled(work: Work, static: Static, rows: list[Row]) -> None:
    """Calls it, and sees to it that the buffers are still those of the graph."""
    before = dict(buffers(static))
    where = {name: tensor.data_ptr() for name, tensor in before.items()}
    kept = [Row(row.token, list(row.slots)) for row in rows]
    work.call("fill", static, rows, SCRATCH, changes=(0, 1))
    if rows != kept:
        raise Wrong("fill changed the list of rows, or a row's slots; the loop still needs them: make a new list")
    for name, tensor in buffers(static).items():
        if tensor is not before[name] or tensor.data_ptr() != where[name]:
            raise Wrong(
                f"static.{name} is another tensor now. The graph reads the old one's address: bind nothing new, write "
                f"into it (static.{name}.copy_(...), or static.{name}[...] = ...)"
            )


def texts_of(seed: int, lengths: Sequence[int]) -> list[Row]:
    draw = seeds.rng(seed)
    spare = draw.sample(range(SLOTS), SLOTS)
    return [Row(draw.randrange(2, 64), [spare.pop() for _ in range(n)]) for n in lengths]


FILLS = (
    (4, (1, 5, 9, 12)),
    (4, (3, 2)),
    (4, (6, 1, 1)),
    (4, (2,)),
    (1, (7,)),
    (8, (4, 4, 4, 4, 4, 4, 4, 12)),
    (8, (1,)),
)


def refills(work: Work) -> Iterator[tuple[Static, list[Row], str]]:
    """The same buffers, filled again and again: each time with what the steps before have left in them."""
    every_size = {B: Static.fresh(B, 12, SCRATCH) for B in (1, 4, 8)}
    for seed, (B, lengths) in enumerate(FILLS):
        rows = texts_of(seed, lengths)
        filled(work, every_size[B], rows)
        yield every_size[B], rows, f"{len(rows)} rows in buffers for {B}"


@holds(
    "12",
    "fill",
    "the buffers stay where they are, and only what is in them changes",
    hint="`static.tokens.copy_(torch.tensor([...]))` writes in place; `static.tokens = ...` only moves the name.",
)
def fill_in_place(work: Work) -> None:
    for _ in refills(work):
        pass


@holds(
    "12",
    "fill",
    "a live row: its token, the position that is the last of its slots, that slot, and its slots in order",
    hint="a row with s slots has its token at position s - 1, which goes into slots[-1].",
)
def fill_live(work: Work) -> None:
    for static, rows, what in refills(work):
        for b, row in enumerate(rows):
            for name, value in (("tokens", row.token), ("positions", len(row.slots) - 1), ("slots", row.slots[-1])):
                got = int(buffers(static)[name][b])
                if got != value:
                    raise Wrong(f"{what}: static.{name}[{b}] must be {value} (the row is {row}), and is {got}")
            same(static.table[b, : len(row.slots)].tolist(), row.slots, f"{what}: static.table[{b}], positions 0 on")


@holds(
    "12",
    "fill",
    "beyond the end of a text the table names a slot of its own, or the scratch slot: never one of somebody else",
    hint="the places after a text are read too, and hidden by the mask. A mask hides every number but NaN, and a free "
    "slot may hold that. Repeat row.slots[0] up to S.",
)
def fill_beyond(work: Work) -> None:
    for static, rows, what in refills(work):
        for b, row in enumerate(rows):
            for j, slot in enumerate(static.table[b].tolist()):
                if slot not in row.slots and slot != SCRATCH:
                    why = "is it left from the step before?" if slot else "0 is a slot like any other"
                    raise Wrong(
                        f"{what}: static.table[{b}, {j}] is {slot}, which is not a slot of row {b}, a text of "
                        f"{len(row.slots)} positions; {why}"
                    )


@holds(
    "12",
    "fill",
    "dummy rows write to the scratch slot and look at nothing else, whatever a larger step has left there",
    hint="a dummy is a text of one position in the scratch slot: Row(0, [scratch]). Add as many as are missing.",
)
def fill_dummies(work: Work) -> None:
    for static, rows, what in refills(work):
        for b in range(len(rows), len(static.tokens)):
            slot = int(static.slots[b])
            if slot != SCRATCH:
                why = "is it left from a larger step?" if slot else "0 is a slot like any other"
                raise Wrong(
                    f"{what}: static.slots[{b}] is {slot}: dummy row {b} writes its K and V over somebody's; it must "
                    f"be the scratch slot, {SCRATCH} ({why})"
                )
            for j, slot in enumerate(static.table[b].tolist()):
                if slot != SCRATCH:
                    raise Wrong(
                        f"{what}: static.table[{b}, {j}] is {slot}: dummy row {b} looks at a slot of somebody else; "
                        f"all places of its table must be the scratch slot, {SCRATCH}"
                    )
            position = int(static.positions[b])
            if not 0 <= position < 12 or not 0 <= int(static.tokens[b]) < TINY.vocab_size:
                raise Wrong(f"{what}: dummy row {b} has token {int(static.tokens[b])} at position {position}")


# ---- decode

ATTEND = {"attend_static": right_attend_static}
PARTS = {"bucket": right_bucket, "fill": right_fill}


class Fleet:
    """Graphs over one pool, a step without one, and a count of who was asked."""

    def __init__(self, sizes: Sequence[int], seed: int):
        s = scene(seed, (1,), 1)
        self.pool = s.pool
        self.pool.k.normal_(generator=seeds.generator(seed))
        self.pool.v.normal_(generator=seeds.generator(seed + 1))
        work = partial(one_step, right_attend_static, model(), self.pool)
        self.graphs = {B: FakeGraph(work, Static.fresh(B, 12, SCRATCH)) for B in sorted(sizes, reverse=True)}
        self.eagerly = 0

    def right(self, rows: Sequence[Row]) -> list[int]:
        """Without a graph, and without a trace in the pool."""
        k, v = self.pool.k.clone(), self.pool.v.clone()
        static = Static.fresh(len(rows), 12, SCRATCH)
        right_fill(static, rows, SCRATCH)
        ids: list[int] = one_step(right_attend_static, model(), self.pool, static).tolist()
        self.pool.k.copy_(k)
        self.pool.v.copy_(v)
        return ids

    def eager(self, rows: Sequence[Row]) -> list[int]:
        self.eagerly += 1
        return self.right(rows)

    @property
    def replays(self) -> dict[int, int]:
        return {B: graph.replays for B, graph in self.graphs.items()}


STEPS = ((1,), (3, 5), (2, 2, 7), (4,), (6, 1, 2, 3, 5), (12, 3, 1, 4))


def decoded(work: Work, fleet: Fleet, rows: list[Row]) -> Any:
    try:
        return work.call("decode", fleet.graphs, rows, SCRATCH, fleet.eager, changes=(0, 1, 3))
    except Wrong as wrong:
        if right_bucket(len(rows), list(fleet.graphs)) is None and "KeyError: None" in str(wrong):
            raise Wrong(
                f"{wrong}\n  {len(rows)} rows, and the largest graph has {max(fleet.graphs)}: call eager"
            ) from wrong
        raise


@holds(
    "12",
    "decode",
    "one id for each live row, in order, and those of this step",
    hint="bucket, fill, replay, and then the first n entries of graph.output, as numbers: `.tolist()` copies them out.",
    uses=PARTS,
)
@one_thread()
def decode_ids(work: Work) -> None:
    fleet = Fleet((1, 2, 4, 8), 21)
    kept: list[tuple[Any, list[int], str]] = []
    for seed, lengths in enumerate(STEPS):
        rows = texts_of(40 + seed, lengths)
        expected = fleet.right(rows)
        got = decoded(work, fleet, rows)
        what = f"step {seed} of {len(STEPS)}, {len(rows)} rows"
        if got is None:
            raise Wrong(f"{what}: decode returned None: is a `return` missing?")
        if isinstance(got, Tensor):
            raise Wrong(
                f"{what}: decode returned a tensor. The next replay writes over what a graph has put out, so the "
                "numbers must be copied out of it: return a list of ints"
            )
        if not isinstance(got, list | tuple) or not all(type(token) is int for token in got):
            raise Wrong(f"{what}: decode returned {got!r}; it must be a list of ints")
        if len(got) != len(rows):
            raise Wrong(f"{what}: decode returned {len(got)} ids; {len(rows)} texts are live, the rest are dummies")
        for b, (mine, ours) in enumerate(zip(got, expected, strict=True)):
            if mine != ours:
                first_ones = " Was it filled before it was replayed, and replayed before it was read?"
                raise Wrong(f"{what}: id {b} must be {ours}, as without a graph, and is {mine}.{first_ones}")
        kept.append((got, expected, what))


@holds(
    "12",
    "decode",
    "the smallest graph that holds the rows is replayed, once; without one the step runs eagerly",
    hint="`bucket(len(rows), list(graphs))` gives the size, or None; then return eager(rows).",
    uses=PARTS,
)
@one_thread()
def decode_which(work: Work) -> None:
    for sizes in ((1, 2, 4), (4, 3), (2,)):
        fleet = Fleet(sizes, 22)
        for seed, lengths in enumerate(STEPS):
            rows = texts_of(60 + seed, lengths)
            before, eagerly = fleet.replays, fleet.eagerly
            decoded(work, fleet, rows)
            size = right_bucket(len(rows), sizes)
            did = {B: n - before[B] for B, n in fleet.replays.items() if n != before[B]}
            what = f"{len(rows)} rows, graphs for {sorted(sizes)}"
            if size is None and (did or fleet.eagerly != eagerly + 1):
                raise Wrong(f"{what}: none is large enough, so eager must be called once; replayed: {did or 'none'}")
            if size is not None and fleet.eagerly != eagerly:
                raise Wrong(f"{what}: the graph for {size} holds them, and the step ran eagerly")
            if size is not None and did != {size: 1}:
                raise Wrong(
                    f"{what}: the graph for {size} must be replayed once; replayed (size: times): {did or 'none'}"
                )


# ---- together


@cache
def alone(prompt: tuple[int, ...], most: int, ignore_eos: bool) -> tuple[list[int], str | None]:
    """The oracle: this text by itself, by the naive stage."""
    request = make_request(prompt, SamplingParams(most, seed=0, ignore_eos=ignore_eos), TINY, None, TINY.context)
    for _ in naive.generate(model(), [request]):
        pass
    return request.output, request.finish_reason


def spoil(pool: KVPool, running: Sequence[Request]) -> None:
    """NaN into every slot that holds nothing which somebody has computed. The scratch slot stays."""
    keep = [slot for request in running for slot in list(request.slots)[: request.computed]]
    free = torch.ones(pool.k.shape[2], dtype=torch.bool)
    free[torch.tensor([*keep, pool.k.shape[2] - 1])] = False
    pool.k[:, :, free] = pool.v[:, :, free] = math.nan


def check_serving(work: Work, functions: Mapping[str, Callable[..., Any]], seed: int) -> None:
    """Random requests, more than the largest graph holds, and so few blocks that texts are sent away."""
    draw = seeds.rng(seed)
    asked: list[tuple[int, tuple[int, ...], int, bool]] = []
    for _ in range(draw.randint(5, 9)):
        prompt = tuple(draw.randrange(2, 64) for _ in range(draw.randint(1, 10)))
        asked.append((draw.randint(0, 14), prompt, draw.randint(1, 12), draw.random() < 0.5))
    requests = [
        (step, make_request(p, SamplingParams(most, seed=0, ignore_eos=ignore), TINY, None, 24))
        for step, p, most, ignore in asked
    ]
    sizes = draw.choice(((1, 2, 4), (4,), (2, 3, 5), (8,)))
    what = f"random requests {seed}, graphs for {list(sizes)}"
    try:
        n_blocks = draw.choice((9, 14, 30))
        serve(functions, model(), requests, sizes, max_running=6, max_len=24, n_blocks=n_blocks, before=spoil)
    except RuntimeError as error:
        if "not permitted" in str(error):
            raise Wrong(f"{what}: the step cannot be captured: {error}{work.line(error.__traceback__)}") from error
        raise
    for i, ((step, prompt, most, ignore), (_, request)) in enumerate(zip(asked, requests, strict=True)):
        expected, reason = alone(prompt, most, ignore)
        who = f"{what}: request {i} ({len(prompt)} tokens from step {step} on)"
        if request.finish_reason == "error":
            raise Wrong(f"{who} got logits that are not numbers: a row looked at a slot that nobody has written")
        for j, (mine, ours) in enumerate(zip(request.output, expected, strict=False)):
            if mine != ours:
                raise Wrong(f"{who}: token {j} must be {ours}, as the naive stage has it, and is {mine}")
        if (request.output, request.finish_reason) != (expected, reason):
            raise Wrong(
                f"{who}: expected {expected} and then {reason!r}; got {request.output} and {request.finish_reason!r}"
            )


@holds(
    "12",
    "decode",
    "all together in the loop of the engine: every token is the naive stage's; free slots hold NaN",
    hint="look at what a step leaves behind for the next: in the buffers, in the output, and in the pool.",
    uses=ATTEND | PARTS,
)
@one_thread()
def decode_in_the_loop(work: Work) -> None:
    work.function("decode")
    functions = {"attend_static": work.function("attend_static"), "decode": work.function("decode")}
    for seed in range(70, 76):
        check_serving(work, functions, seed)


# ---- overlapped


def makespan(host: Sequence[float], device: Sequence[float], ahead: int) -> float:
    """Step k is planned when step k - ahead is done, and run when it is planned and the one before is done."""
    planned = 0.0
    done = [0.0] * ahead
    for plan, run in zip(host, device, strict=True):
        planned = max(planned, done[-ahead]) + plan
        done.append(max(planned, done[-1]) + run)
    return done[-1]


def check_overlap(work: Work, host: list[float], device: list[float]) -> None:
    got = work.call("overlapped", host, device)
    what = f"overlapped({host}, {device})"
    if got is None:
        raise Wrong(f"{what} is None: is a `return` missing?")
    if not isinstance(got, list | tuple) or len(got) != 2:
        raise Wrong(f"{what} is {got!r}; it must be two numbers: one after the other, and overlapped")
    serial, ours = sum(host) + sum(device), makespan(host, device, 2)
    if not math.isclose(got[0], serial, abs_tol=1e-9):
        raise Wrong(f"{what}: one after the other they take {serial:g}, and yours is {got[0]:g}")
    if math.isclose(got[1], ours, abs_tol=1e-9):
        return
    two = f"{what}: overlapped they take {ours:g}, and yours is {got[1]:g}"
    for words, value in (
        (
            "no plan for step k + 2 can be made before step k is done, since its tokens are not known",
            makespan(host, device, 99),
        ),
        (
            "nothing runs while the first step is planned, and nothing is planned while the last one runs",
            max(sum(host), sum(device)),
        ),
        ("nothing runs while the first step is planned", ours - (host[0] if host else 0)),
        ("step k runs while step k + 1 is planned, not while step k is", sum(map(max, host, device))),
        ("that is one after the other", serial),
    ):
        if math.isclose(got[1], value, abs_tol=1e-9):
            raise Wrong(f"{two}: {words}")
    raise Wrong(two)


@holds(
    "12",
    "overlapped",
    "one after the other: everything adds up",
    hint="the sum of both lists.",
)
def overlap_serial(work: Work) -> None:
    for host, device in (([2.0], [5.0]), ([2.0, 3.0], [5.0, 1.0]), ([1.0] * 4, [1.0] * 4)):
        got = work.call("overlapped", host, device)
        serial = got[0] if isinstance(got, list | tuple) and got else got
        same(serial, sum(host) + sum(device), f"overlapped({host}, {device}), the first number")


@holds(
    "12",
    "overlapped",
    "while step k runs, step k + 1 is planned, and no further one",
    hint="after the first plan, run k and plan k + 1 begin together, and both must end before the next two begin.",
)
def overlap_two(work: Work) -> None:
    for host, device in (
        ([3.0, 1.0, 7.0], [2.0, 8.0, 1.0]),
        ([1.0, 1.0, 1.0, 9.0], [9.0, 1.0, 1.0, 1.0]),
        ([2.0], [5.0]),
        ([2.0, 2.0, 2.0], [5.0, 5.0, 5.0]),
        ([5.0, 5.0, 5.0], [2.0, 2.0, 2.0]),
    ):
        check_overlap(work, host, device)
    draw = seeds.rng(3)
    for _ in range(80):
        n = draw.randint(1, 8)
        check_overlap(
            work, [float(draw.randint(1, 9)) for _ in range(n)], [float(draw.randint(1, 9)) for _ in range(n)]
        )


# ---- run_ahead

STOP = 2


def plain(text: Sequence[int], most: int) -> list[int]:
    """What one text becomes: up to its stop, or `most` tokens."""
    out: list[int] = []
    for token in [*text[1:], *[0] * most]:
        out.append(token)
        if token == STOP or len(out) == most:
            break
    return out


def ahead_cases() -> Iterator[tuple[dict[str, list[int]], int]]:
    yield {"a": [5, 6, 7, 8, 9]}, 3
    yield {"a": [5, 6, STOP, 8, 9]}, 4
    yield {"a": [5, STOP], "b": [5, 6, 7, 8]}, 4
    yield {"a": [5, 6, 7, STOP], "b": [5, 6, STOP], "c": [5, 6, 7, 8, 9]}, 3
    yield {"a": [5, STOP]}, 1
    draw = seeds.rng(4)
    for _ in range(60):
        texts = {}
        for name in "abcdefg"[: draw.randint(1, 7)]:
            text = [draw.randrange(3, 30) for _ in range(draw.randint(2, 14))]
            texts[name] = [*text, STOP] if draw.random() < 0.6 else text
        yield texts, draw.randint(1, 12)


def ran_ahead(work: Work, texts: dict[str, list[int]], most: int) -> tuple[Device, Any, Any, str]:
    device = Device(texts, most + 3)
    firsts = {name: text[0] for name, text in texts.items()}
    what = f"texts {texts}, stop {STOP}, max_tokens {most}"
    got = work.call("run_ahead", device, firsts, STOP, most, changes=(0,))
    if got is None:
        raise Wrong(f"{what}: run_ahead returned None: is a `return` missing?")
    if not isinstance(got, list | tuple) or len(got) != 2 or not isinstance(got[0], dict):
        raise Wrong(f"{what}: run_ahead returned {got!r}; it must be ({{name: tokens}}, how many were thrown away)")
    if device.running:
        raise Wrong(f"{what}: {len(device.running)} steps were begun and never finished")
    return device, got[0], got[1], what


@holds(
    "12",
    "run_ahead",
    "every text is the one that a plain loop makes, its stop included",
    hint="a token that arrives for a text that has ended already belongs to nobody: leave it out.",
)
def ahead_texts(work: Work) -> None:
    for texts, most in ahead_cases():
        _, outputs, _, what = ran_ahead(work, texts, most)
        for name, text in texts.items():
            expected, got = plain(text, most), outputs.get(name)
            if got is None:
                raise Wrong(f"{what}: there is no output for {name!r}")
            if list(got) == [*expected, *list(got)[len(expected) :]] and len(got) > len(expected):
                late = "the stop" if expected[-1] == STOP else f"{most} tokens"
                raise Wrong(f"{what}: {name!r} goes on after {late}: expected {expected}, got {list(got)}")
            if list(got)[: len(text)] == text[: len(got)] and got[:1] == text[:1] != expected[:1]:
                raise Wrong(f"{what}: {name!r} begins with {text[0]}, which was given, not sampled: leave it out")
            if -2 in got:
                raise Wrong(
                    f"{what}: {name!r} was given a token that is not its own; a wrong one came out: {list(got)}"
                )
            same(list(got), expected, f"{what}: the tokens of {name!r}")


@holds(
    "12",
    "run_ahead",
    "the device never waits: a step is begun before the one that runs is finished",
    hint="first start the next step with LAST for everybody in it, then finish the one before.",
)
def ahead_busy(work: Work) -> None:
    for texts, most in ahead_cases():
        device, _, _, what = ran_ahead(work, texts, most)
        if device.idle:
            raise Wrong(
                f"{what}: {device.idle} times the device was done and had nothing to do, of {len(device.steps)} steps: "
                "the next step was begun only when the one before was finished"
            )


@holds(
    "12",
    "run_ahead",
    "a stop is seen one step late and costs one token, which is counted; an end by max_tokens costs none",
    hint="before a step is finished you know how many tokens each of its texts will have, but not which.",
)
def ahead_counts(work: Work) -> None:
    for texts, most in ahead_cases():
        device, _, thrown, what = ran_ahead(work, texts, most)
        for name, text in texts.items():
            out = plain(text, most)
            steps = sum(name in step for step in device.steps)
            late = out[-1] == STOP and len(out) < most
            if steps != len(out) + late:
                why = (
                    "its stop is seen when the step after it has begun, and not later"
                    if late
                    else f"it ends by max_tokens, {most}, which can be foreseen"
                )
                raise Wrong(
                    f"{what}: {name!r} was in {steps} steps for its {len(out)} tokens, not in {len(out) + late}: {why}"
                )
        expected = sum(map(len, device.steps)) - sum(len(plain(text, most)) for text in texts.values())
        same(thrown, expected, f"{what}: tokens computed and thrown away")
