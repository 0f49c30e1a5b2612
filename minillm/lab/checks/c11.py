"""Lesson 11, kernels: one predicate, as a mask_mod, as cumulative lengths, as an online softmax and inside a kernel.

The oracle of every mask is the rule, cell by cell; that of every sum is a plain softmax over all keys at once, in
float64. Memory counts who reads what, and what may not be read is NaN.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.batch import Batch
from minillm.cache import KVPool
from minillm.config import Config
from minillm.engine import Engine
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, make_request
from minillm.slots import BlockSlots
from minillm.stages import naive

TINY = Config(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    context=256,
    tied=True,
    eos=(1,),
)
NAN, INF = float("nan"), float("inf")
CLOSE = 1e-9  # float64: equal but for the order of sums

Chunks = list[tuple[int, int]]  # of each text: positions computed before this step, new tokens
State = tuple[Tensor, Tensor, Tensor]  # m [T, 1], s [T, 1], o [T, D]

# ---- what the lesson hands out


class Counted:
    """A tensor in slow memory. It is read row by row with `load`, and every row that is read is counted."""

    def __init__(self, data: Tensor, axes: int):
        self.data = data
        self.reads = torch.zeros(data.shape[:axes], dtype=torch.int64)  # how often each row was read
        self.most = 0  # rows read by one load, at most

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def load(self, *index: int | Tensor, live: Tensor | None = None) -> Tensor:
        """The rows data[index], [n, ...], numbers as float32 at least, whole numbers as they are. Where `live` [n] is
        False nothing is read, and zeros come back."""
        at = torch.broadcast_tensors(*(torch.as_tensor(i) for i in index))  # [n] each
        live = torch.ones_like(at[0], dtype=torch.bool) if live is None else live
        where = tuple(i[live] for i in at)
        for i, size in zip(where, self.reads.shape, strict=True):
            if len(bad := i[(i < 0) | (i >= size)]):
                raise IndexError(f"load was given {int(bad[0])}, and there are {size} rows: should `live` forbid it?")
        self.reads.index_put_(where, torch.ones_like(where[0]), accumulate=True)
        self.most = max(self.most, len(where[0]))
        rows = self.data.new_zeros(*live.shape, *self.shape[len(index) :])
        rows[live] = self.data[where]
        return rows.to(at_least_float32(rows.dtype))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made: kernels read bfloat16 and add in float32."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


class Largest(TorchDispatchMode):
    """Inside `with Largest() as seen:` every tensor of numbers or truth values that an operation makes is seen;
    `seen.size` is the size of the largest one. Indices do not count. What a compiled kernel keeps to itself is not
    seen."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        counts = isinstance(made, Tensor) and (made.is_floating_point() or made.dtype == torch.bool)
        if counts and not func.is_view:
            self.size = max(self.size, made.numel())
        return made


Program = Callable[[int, int, Tensor, Counted, Counted, Counted, int, int], Tensor]


def launch(
    program: Program, q: Tensor, k: Counted, v: Counted, table: Counted, kv_len: Sequence[int], size: int
) -> Tensor:
    """The grid: one program for each (sequence, key-value head), in any order. q [N, H, D] -> [N, H, D]."""
    out, G = torch.empty_like(q), q.shape[1] // k.shape[0]
    q = q.to(at_least_float32(q.dtype))
    for n in range(q.shape[0]):
        for head in range(k.shape[0]):
            out[n, head * G : (head + 1) * G] = program(n, head, q, k, v, table, kv_len[n], size)  # [G, D]
    return out


class ProgramAttend:
    """A backend made of the program: each new token is a sequence of its own, which sees its own position and those
    before it. So a chunk of a prompt needs no other code. To be used as partial(ProgramAttend, paged_decode, size)."""

    def __init__(self, program: Program, size: int, pool: KVPool, batch: Batch):
        self.program, self.size, self.pool, self.batch = program, size, pool, batch
        self.table = Counted(pool.table[batch.seq], 2)  # [T, max_len]: a row for each token
        self.kv_len = [position + 1 for position in batch.positions.tolist()]  # T

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, self.batch.slots, k, v)
        keys, values = Counted(self.pool.k[layer], 2), Counted(self.pool.v[layer], 2)  # [Hkv, slots, D]
        return launch(self.program, q, keys, values, self.table, self.kv_len, self.size)


# ---- right ones, for when a function that another one calls is wrong


def right_part(scores: Tensor, values: Tensor) -> State:
    m = scores.amax(-1, keepdim=True)  # [T, 1]
    p = (scores - m).exp().masked_fill(scores == -INF, 0.0)  # [T, n]
    return m, p.sum(-1, keepdim=True), p @ values


def right_merge(m1: Tensor, s1: Tensor, o1: Tensor, m2: Tensor, s2: Tensor, o2: Tensor) -> State:
    m = torch.maximum(m1, m2)
    a1, a2 = ((x - m).exp().masked_fill(x == -INF, 0.0) for x in (m1, m2))
    return m, s1 * a1 + s2 * a2, o1 * a1 + o2 * a2


def right_attend_in_blocks(q: Tensor, q_pos: Tensor, k: Counted, v: Counted, size: int) -> Tensor:
    (T, D), n = q.shape, int(q_pos.max()) + 1
    state = (q.new_full((T, 1), -INF), q.new_zeros(T, 1), q.new_zeros(T, D))
    for start in range(0, n, size):
        rows = torch.arange(start, min(start + size, n))
        scores = (q * D**-0.5 @ k.load(rows).T).masked_fill(rows > q_pos[:, None], -INF)  # [T, size]
        state = right_merge(*state, *right_part(scores, v.load(rows)))
    return state[2] / state[1]


def right_paged_decode(
    n: int, head: int, q: Tensor, k: Counted, v: Counted, table: Counted, kv_len: int, size: int
) -> Tensor:
    D, G = q.shape[-1], q.shape[1] // k.shape[0]
    mine = q[n, head * G : (head + 1) * G] * D**-0.5  # [G, D]
    state = (q.new_full((G, 1), -INF), q.new_zeros(G, 1), q.new_zeros(G, D))
    for start in range(0, kv_len, size):
        positions = start + torch.arange(size)
        live = positions < kv_len
        slots = table.load(n, positions, live=live)
        scores = (mine @ k.load(head, slots, live=live).T).masked_fill(~live, -INF)  # [G, size]
        state = right_merge(*state, *right_part(scores, v.load(head, slots, live=live)))
    return state[2] / state[1]


PARTS: dict[str, Any] = {"part": right_part, "merge": right_merge}


# ---- small things of all checks


def some_chunks(draw: random.Random) -> Chunks:
    return [(draw.choice([0, 0, 3, 7, 12]), draw.choice([1, 1, 2, 5])) for _ in range(draw.randint(1, 4))]


def said(chunks: Chunks) -> str:
    return ", ".join(f"{n} new after {start}" for start, n in chunks)


def laid_out(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions and text numbers of the queries [T] and of the keys [S], text after text."""
    q = [(i, p) for i, (start, n) in enumerate(chunks) for p in range(start, start + n)]
    k = [(i, p) for i, (start, n) in enumerate(chunks) for p in range(start + n)]
    (q_seq, q_pos), (k_seq, k_pos) = torch.tensor(q).T, torch.tensor(k).T
    return q_pos, k_pos, q_seq, k_seq


def rule(q_pos: Tensor, k_pos: Tensor, q_seq: Tensor, k_seq: Tensor) -> Tensor:
    """The predicate cell by cell, [T, S]: slow and plain."""
    queries = list(zip(q_seq.tolist(), q_pos.tolist(), strict=True))
    keys = list(zip(k_seq.tolist(), k_pos.tolist(), strict=True))
    return torch.tensor([[text == own and at <= p for text, at in keys] for own, p in queries])


def tensors(work: Work, name: str, names: Sequence[str], *args: Any) -> list[Tensor]:
    """What a function returns that has to return several tensors."""
    got = work.call(name, *args)
    if got is None:
        raise Wrong(f"{name} returned None: is a `return` missing?")
    if not isinstance(got, tuple | list) or len(got) != len(names):
        what = f"{len(got)} things" if isinstance(got, tuple | list) else f"one {type(got).__name__}"
        raise Wrong(f"{name} must return {len(names)} tensors, {', '.join(names)}; it returned {what}")
    for one, what in zip(got, names, strict=True):
        if not isinstance(one, Tensor):
            raise Wrong(f"{what}, which {name} returned, is {type(one).__name__}; it must be a tensor")
    return list(got)


def softmax_over(scores: Tensor, values: Tensor) -> Tensor:
    """All keys at once: softmax(scores [T, n]) times values [n, D]; a row of nothing but -inf gives 0."""
    return scores.softmax(-1).nan_to_num(0.0) @ values


# ---- mask_mod


def mod_of(work: Work, *args: Tensor) -> Callable[..., Any]:
    mod = work.call("mask_mod", *args)
    if mod is None:
        raise Wrong("mask_mod returned None: is a `return` missing? It must return the function it defines")
    if not callable(mod):
        raise Wrong(f"mask_mod returned {type(mod).__name__}; it must return a function of (b, h, q, k), not a mask")
    return mod


def mod_cases() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    yield laid_out([(0, 4), (0, 2), (0, 1)])
    yield laid_out([(5, 1), (0, 3)])
    draw = seeds.rng(1)
    for _ in range(15):
        yield laid_out(some_chunks(draw))
        sizes = draw.randint(1, 9), draw.randint(1, 9)  # in any order: an index says nothing about a position
        (q_pos, k_pos), (q_seq, k_seq) = (
            [torch.tensor([draw.randrange(most) for _ in range(n)]) for n in sizes] for most in (6, 3)
        )
        yield q_pos, k_pos, q_seq, k_seq


def told_of(q_pos: Tensor, k_pos: Tensor, q_seq: Tensor, k_seq: Tensor) -> str:
    return (
        f"queries at positions {q_pos.tolist()} of texts {q_seq.tolist()}, keys at {k_pos.tolist()} of {k_seq.tolist()}"
    )


@holds(
    "11",
    "mask_mod",
    "the same answer as the rule in every cell: same text, and not later",
    hint="q and k are indices: look positions and text numbers up with them, q_pos[q], k_seq[k]; then two comparisons.",
)
def mod_is_the_rule(work: Work) -> None:
    for case in mod_cases():
        mod, expected = mod_of(work, *case), rule(*case)
        T, S = expected.shape
        got = mod(0, 0, torch.arange(T)[:, None], torch.arange(S))
        words = f"mod(0, 0, q, k) for {told_of(*case)}"
        if isinstance(got, Tensor) and (got.shape, got.dtype) == (expected.shape, expected.dtype):
            q_pos, k_pos, q_seq, k_seq = (x.tolist() for x in case)
            for q, k in (got != expected).nonzero().tolist():
                tells = "must" if expected[q, k] else "must not"
                raise Wrong(
                    f"{words}:\nquery {q} (text {q_seq[q]}, position {q_pos[q]}) {tells} see key {k} (text {k_seq[k]}, "
                    f"position {k_pos[k]})"
                )
        same(got, expected, words)


@holds(
    "11",
    "mask_mod",
    "FlexAttention can ask it: q and k are tensors without axes, one cell at a time, and nothing is decided in Python",
    hint="what mod returns is made of q_pos[q], k_pos[k], q_seq[q] and k_seq[k], and of nothing else.",
)
def mod_can_be_traced(work: Work) -> None:
    for case in [laid_out([(0, 4), (0, 2), (0, 1)]), laid_out([(9, 2), (4, 1)])]:
        mod, (T, S) = mod_of(work, *case), (len(case[0]), len(case[1]))
        cell = mod(torch.tensor(0), torch.tensor(0), torch.tensor(T - 1), torch.tensor(0))
        if not isinstance(cell, Tensor) or cell.dtype != torch.bool or cell.dim():
            what = f"{cell.dtype} {list(cell.shape)}" if isinstance(cell, Tensor) else type(cell).__name__
            raise Wrong(f"mod(0, 0, {T - 1}, 0), all of them tensors without axes, gave {what}; it must be a bool "
                        "tensor without axes")  # fmt: skip
        try:
            got = create_mask(mod, 1, 1, T, S, device="cpu")[0, 0]
        except Exception as error:
            said_by = str(error).strip().splitlines()[0]
            raise Wrong(
                f"torch's create_mask cannot trace what mask_mod returned: {type(error).__name__}: {said_by}"
                f"{work.line(error.__traceback__)}\n`and`, `if`, `bool` and `.item()` need a value now; a traced "
                "function has none yet. Join comparisons with &"
            ) from error
        # whether it is the rule is another property's
        own = mod(0, 0, torch.arange(T)[:, None], torch.arange(S))
        if isinstance(own, Tensor) and own.shape == got.shape:
            same(got, own, f"torch's create_mask of it, beside mod(0, 0, q, k) itself, for {told_of(*case)}")


# ---- block_mask


def kinds(mask: Tensor, size: int) -> Tensor:
    """0 where a block of a mask [T, S] has no visible cell, 2 where it is whole and has no hidden one, else 1."""
    T, S = mask.shape
    rows = []
    for top in range(0, T, size):
        row = []
        for left in range(0, S, size):
            cells = mask[top : top + size, left : left + size]
            row.append(0 if not cells.any() else 2 if cells.numel() == size * size and cells.all() else 1)
        rows.append(row)
    return torch.tensor(rows)


def table_mod(mask: Tensor) -> Callable[..., Tensor]:
    """A mask_mod that looks a mask up, and tells when it is asked past its edge."""

    def mod(b: Any, h: Any, q: Any, k: Any) -> Tensor:
        try:
            most = [int(torch.as_tensor(index).max()) for index in (q, k)]
        except RuntimeError:  # traced: no index has a value
            return mask[q, k]
        for i, size, what in zip(most, mask.shape, ("queries", "keys"), strict=True):
            if i >= size:
                raise Wrong(
                    f"mod was asked about index {i}, and there are {size} {what}: ask only for cells that exist; those "
                    "past the edge count as hidden"
                )
        return mask[q, k]

    return mod


def some_mask(draw: random.Random, T: int, S: int) -> Tensor:
    """Of one of several kinds: staircases, walls, all, nothing, and single cells."""
    rows, columns = torch.arange(T)[:, None], torch.arange(S)
    kind = draw.randrange(5)
    if kind == 0:
        return columns <= rows + S - T
    if kind == 1:
        return (columns // draw.randint(2, 6)) == (rows // draw.randint(2, 6))
    if kind == 2:
        return (columns >= draw.randrange(S)).expand(T, S).clone()
    mask = torch.full((T, S), kind == 3)
    for _ in range(3):
        mask[draw.randrange(T), draw.randrange(S)] ^= True
    return mask


def check_kinds(work: Work, mask: Tensor, size: int, edge: bool = False) -> None:
    """`edge`: looks only at blocks that are cut off and have no hidden cell."""
    T, S = mask.shape
    expected = kinds(mask, size)
    got = work.call("block_mask", table_mod(mask), T, S, size)
    words = f"{T} queries by {S} keys in blocks of {size}"
    if got is None:
        raise Wrong(f"{words}: block_mask returned None: is a `return` missing?")
    if not isinstance(got, Tensor) or got.is_floating_point():
        what = str(got.dtype) if isinstance(got, Tensor) else type(got).__name__
        raise Wrong(f"{words}: block_mask returned {what}; it must be a tensor of whole numbers 0, 1 and 2")
    if got.shape != expected.shape:
        raise Wrong(
            f"{words}: the shape must be {list(expected.shape)}, a row for each block of queries and a column for each "
            f"block of keys, the last ones cut off by the edge if need be; it is {list(got.shape)}"
        )
    for i, j in (got.long() != expected).nonzero().tolist():
        cells = mask[i * size : (i + 1) * size, j * size : (j + 1) * size]
        if edge and (cells.numel() == size * size or not cells.all()):
            continue
        cut = "" if cells.numel() == size * size else f", and {size * size - cells.numel()} past the edge"
        names = ("0 (empty)", "1 (partial)", "2 (full)")
        raise Wrong(
            f"{words}: block ({i}, {j}) has {int(cells.sum())} visible cells, {int((~cells).sum())} hidden ones{cut}: "
            f"it must be {names[int(expected[i, j])]}, and is {got[i, j].item()}"
        )


@holds(
    "11",
    "block_mask",
    "0 for a block with no visible cell, 2 for one with no hidden cell, 1 for all others",
    hint="of each block's cells ask `any` and `all`: none is 0, all is 2. An index of a block says nothing by itself: "
    "texts lie side by side.",
)
def blocks_by_their_cells(work: Work) -> None:
    draw = seeds.rng(2)
    q_pos, k_pos, q_seq, k_seq = laid_out([(0, 8), (0, 4), (0, 4)])
    check_kinds(work, rule(q_pos, k_pos, q_seq, k_seq), 4)
    for _ in range(40):
        size = draw.choice((1, 2, 4))
        T, S = size * draw.randint(1, 4), size * draw.randint(1, 5)
        check_kinds(work, some_mask(draw, T, S), size)


@holds(
    "11",
    "block_mask",
    "what lies past the edge counts as hidden: a block that is cut off is partial at best",
    hint="pad the mask with False up to whole blocks, after asking `mod`; then every block is whole.",
)
def blocks_at_the_edge(work: Work) -> None:
    draw = seeds.rng(3)
    check_kinds(work, torch.ones(5, 7, dtype=torch.bool), 4, edge=True)
    for _ in range(40):
        T, S = draw.randint(1, 11), draw.randint(1, 13)
        check_kinds(work, some_mask(draw, T, S), draw.choice((2, 3, 4)), edge=True)


# ---- cu_seqlens


@holds(
    "11",
    "cu_seqlens",
    "for N texts N + 1 entries that begin with 0: text i has the queries cu_q[i] to cu_q[i + 1] - 1",
    hint="running sums of the numbers of new tokens, with a 0 in front: [0, n0, n0 + n1, ...]; int32 tensors, both.",
)
def cu_of_queries(work: Work) -> None:
    check_cu(work, "cu_q", 0)


@holds(
    "11",
    "cu_seqlens",
    "the keys of a text are all its positions: those computed before and the new ones",
    hint="a text reads start + n positions: running sums of these, with a 0 in front; int32.",
)
def cu_of_keys(work: Work) -> None:
    check_cu(work, "cu_k", 1)


def cu_of(chunks: Chunks) -> list[Tensor]:
    lengths = [n for _, n in chunks], [start + n for start, n in chunks]
    return [torch.tensor([0, *sizes]).cumsum(0).int() for sizes in lengths]


def check_cu(work: Work, name: str, which: int) -> None:
    draw = seeds.rng(4)
    for chunks in [[(4, 2), (0, 3), (9, 1)], [(0, 5)], [(7, 1)] * 3, *(some_chunks(draw) for _ in range(20))]:
        got = tensors(work, "cu_seqlens", ("cu_q", "cu_k"), list(chunks))[which]
        expected = cu_of(chunks)[which]
        words = f"{name} of the chunks ({said(chunks)})"
        if got.shape == expected.shape and torch.equal(got, expected) and got.dtype != torch.int32:
            raise Wrong(f"{words}: its dtype must be torch.int32, which the kernel takes, and is {got.dtype}")
        if got.dtype == torch.int32 and got.tolist() == expected.tolist():
            continue
        raise Wrong(f"{words}: expected {expected.tolist()}, got {got.tolist()}")


# ---- varlen_mask


def check_varlen(work: Work, chunks: Chunks) -> None:
    expected = rule(*laid_out(chunks))
    cu_q, cu_k = cu_of(chunks)
    got = work.call("varlen_mask", cu_q, cu_k)
    words = f"the mask of cu_q {cu_q.tolist()}, cu_k {cu_k.tolist()} ({said(chunks)})"
    if isinstance(got, Tensor) and got.shape == expected.shape and got.dtype == torch.bool:
        for t, s in (got != expected).nonzero().tolist():
            tells = "must see" if expected[t, s] else "must not see"
            raise Wrong(
                f"{words}: query {t} {tells} key {s}. Row {t} must be {row_of(expected[t])} and is {row_of(got[t])}"
            )
    same(got, expected, words)


def row_of(cells: Tensor) -> str:
    return "".join("#" if cell else "." for cell in cells.tolist())


@holds(
    "11",
    "varlen_mask",
    "of one text with nothing before it: the square staircase",
    hint="query i sees keys 0 to i: its own among them.",
)
def varlen_square(work: Work) -> None:
    for n in (1, 2, 5):
        check_varlen(work, [(0, n)])


@holds(
    "11",
    "varlen_mask",
    "of fewer queries than keys the last query sees the last key: aligned at the bottom right",
    hint="query i of a text with t queries and s keys stands at position s - t + i, and sees keys up to there.",
)
def varlen_bottom_right(work: Work) -> None:
    for start, n in ((4, 2), (9, 1), (1, 5), (3, 3)):
        check_varlen(work, [(start, n)])


@holds(
    "11",
    "varlen_mask",
    "of several texts each sees its own keys only, and in company the same ones as alone",
    hint="go from text to text: rows cu_q[i] to cu_q[i + 1] and columns cu_k[i] to cu_k[i + 1] are its own block; all "
    "else is hidden. How far its queries see depends on its own t and s.",
)
def varlen_walls(work: Work) -> None:
    draw = seeds.rng(5)
    for chunks in [[(0, 4), (0, 2), (0, 1)], [(4, 2), (0, 3), (9, 1)], *(some_chunks(draw) for _ in range(30))]:
        cu_q, cu_k = cu_of(chunks)
        got = work.call("varlen_mask", cu_q, cu_k)
        words = f"the mask of cu_q {cu_q.tolist()}, cu_k {cu_k.tolist()} ({said(chunks)})"
        if not isinstance(got, Tensor) or list(got.shape) != [int(cu_q[-1]), int(cu_k[-1])]:
            same(got, rule(*laid_out(chunks)), words)
        for i, chunk in enumerate(chunks):
            rows, columns = (slice(int(cu[i]), int(cu[i + 1])) for cu in (cu_q, cu_k))
            own = torch.zeros_like(got[rows])
            own[:, columns] = work.call("varlen_mask", *cu_of([chunk]))
            for t, s in (got[rows] != own).nonzero().tolist():
                whose = f"text {i}" if columns.start <= s < columns.stop else "another text"
                seen = ["not seen", "seen"]
                raise Wrong(
                    f"{words}: row {rows.start + t} is of text {i}, whose keys are {columns.start} to "
                    f"{columns.stop - 1}. Key {s}, of {whose}, is {seen[int(got[rows][t, s])]}; with text {i} alone it "
                    f"is {seen[int(own[t, s])]}. The row is {row_of(got[rows][t])}"
                )


# ---- part and merge


NAMES = ("m", "s", "o")


def check_state(got: Sequence[Tensor], expected: Sequence[Tensor], words: str) -> None:
    for name, mine, ours in zip(NAMES, got, expected, strict=True):
        same(mine, ours, f"{name} of {words}", CLOSE)


def some_scores(seed: int, T: int, n: int, D: int = 4) -> tuple[Tensor, Tensor]:
    """Scores [T, n] of which some are -inf, so that some rows see nothing; and values [n, D]."""
    generator = seeds.generator(seed)
    scores = torch.randn(T, n, generator=generator, dtype=torch.float64) * 3
    hidden = torch.rand(T, n, generator=generator) < 0.3
    return scores.masked_fill(hidden, -INF), torch.randn(n, D, generator=generator, dtype=torch.float64)


@holds(
    "11",
    "part",
    "m is each row's largest score, s its sum of exp(score - m), o the values summed with the same weights",
    hint="amax, exp, sum and @, with keepdim=True, so that m and s are [T, 1]. Nothing is divided yet.",
)
def part_of_a_block(work: Work) -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 5.0]], dtype=torch.float64)
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    check_state(tensors(work, "part", NAMES, scores, values), right_part(scores, values), f"scores {scores.tolist()}")
    for seed in range(10):
        scores, values = some_scores(seed, 1 + seed % 4, 1 + seed % 5)
        scores = scores.masked_fill(scores == -INF, 1.5)
        words = f"random scores {list(scores.shape)}"
        check_state(tensors(work, "part", NAMES, scores, values), right_part(scores, values), words)


@holds(
    "11",
    "part",
    "a hidden key (-inf) has no weight, and a row that sees nothing gives m = -inf, s = 0, o = 0",
    hint="-inf minus -inf is NaN: put 0 in place of the weight where the score is -inf, after the exp.",
)
def part_of_nothing(work: Work) -> None:
    values = torch.ones(2, 3, dtype=torch.float64)
    for scores in ([[-INF, -INF]], [[0.0, -INF], [-INF, -INF]]):
        given = torch.tensor(scores, dtype=torch.float64)
        got = tensors(work, "part", NAMES, given, values)
        check_state(got, right_part(given, values), f"scores {scores}")
    for seed in range(20, 35):  # what is seen has the score 0: other properties ask for other scores
        given, values = some_scores(seed, 3, 1 + seed % 4)
        given = given.masked_fill(given != -INF, 0.0)
        check_state(tensors(work, "part", NAMES, given, values), right_part(given, values), f"scores {given.tolist()}")


@holds(
    "11",
    "part",
    "scores of any size: neither overflow nor underflow",
    hint="subtract each row's own largest score before the exp, not after it, and not that of the whole block.",
)
def part_of_large_scores(work: Work) -> None:
    values = torch.eye(3, dtype=torch.float64)
    for scores in (
        [[1000.0, 999.0, 0.0]],
        [[-1000.0, -1001.0, -1002.0]],
        [[800.0, 1.0, 2.0], [-800.0, -801.0, -802.0]],
    ):
        got = tensors(work, "part", NAMES, torch.tensor(scores, dtype=torch.float64), values)
        check_finite(got, f"scores {scores}")


def check_finite(got: Sequence[Tensor], words: str) -> None:
    """Whether they are the right numbers is asked elsewhere."""
    for name, one in zip(NAMES, got, strict=True):
        for value in one.flatten().tolist():
            if not math.isfinite(value):
                raise Wrong(f"{name} of {words} has {value}")
            if name == "s" and value == 0:
                raise Wrong(f"s of {words} has 0, but keys are seen: their weights have vanished")


def merged(work: Work, one: State, other: State) -> State:
    m, s, o = tensors(work, "merge", NAMES, *one, *other)
    return m, s, o


EMPTY = (torch.full((2, 1), -INF).double(), torch.zeros(2, 1).double(), torch.zeros(2, 4).double())


@holds(
    "11",
    "merge",
    "the state of two blocks is that of all their keys together, whichever has the larger score",
    hint="m is the larger one of the two. Each side's s and o were made with its own m: multiply both by "
    "exp(own m - m).",
)
def merge_two(work: Work) -> None:
    for seed in range(20):
        scores, values = some_scores(seed, 2, 6)
        scores = scores.masked_fill(scores == -INF, -1.0)
        one, other = right_part(scores[:, :2], values[:2]), right_part(scores[:, 2:], values[2:])
        larger = "the first" if bool((one[0] > other[0]).all()) else "the second or now one, now the other"
        words = f"two blocks of keys, the larger m in {larger}"
        check_state(merged(work, one, other), right_part(scores, values), words)


@holds(
    "11",
    "merge",
    "who has seen nothing changes nothing: an empty state on either side, or on both",
    hint="the factor of an empty side is 0, and where both are empty, -inf minus -inf is NaN: put 0 there too.",
)
def merge_with_nothing(work: Work) -> None:
    scores, values = some_scores(3, 2, 4)
    full = right_part(scores.masked_fill(scores == -INF, 0.5), values)
    check_state(merged(work, EMPTY, full), full, "an empty state merged with one that has seen keys")
    check_state(merged(work, full, EMPTY), full, "a state that has seen keys, merged with an empty one")
    check_state(merged(work, EMPTY, EMPTY), EMPTY, "two empty states")
    for i in (0, 1):
        one, other = row_empty(full, i), row_empty(full, 1 - i)
        expected = right_merge(*one, *other)
        check_state(merged(work, one, other), expected, f"a state whose row {i} is empty, and one whose row {1 - i} is")


def row_empty(state: State, row: int) -> State:
    """The same, but one of the two rows has seen nothing."""
    m, s, o = (torch.where(torch.arange(2)[:, None] == row, none, x) for none, x in zip(EMPTY, state, strict=True))
    return m, s, o


@holds(
    "11",
    "merge",
    "scores of any size: neither overflow nor underflow",
    hint="exp(own m - m) is at most 1; exp(m) alone, or exp(m - own m), overflows.",
)
def merge_far_apart(work: Work) -> None:
    values = torch.eye(2, dtype=torch.float64)
    for high, low in ((1000.0, 990.0), (900.0, -900.0), (-900.0, -905.0)):
        for scores in ([[high, low]], [[low, high]]):
            given = torch.tensor(scores, dtype=torch.float64)
            one, other = right_part(given[:, :1], values[:1]), right_part(given[:, 1:], values[1:])
            check_finite(merged(work, one, other), f"two blocks of one key, scores {scores}")


@holds(
    "11",
    "merge",
    "blocks may be merged in any order and any grouping: the parts of a long text can be computed side by side",
    hint="neither side is 'the old one': both must be multiplied by their own factor.",
)
def merge_in_any_order(work: Work) -> None:
    draw = seeds.rng(6)
    for seed in range(50, 58):
        scores, values = some_scores(seed, 2, 7)
        scores = scores.masked_fill(scores == -INF, -2.0)
        cuts = [slice(a, b) for a, b in ((0, 2), (2, 3), (3, 6), (6, 7))]
        states = [right_part(scores[:, cut], values[cut]) for cut in cuts]
        while len(states) > 1:
            one, other = (states.pop(draw.randrange(len(states))) for _ in range(2))
            states.append(merged(work, one, other))
        check_state(states[0], right_part(scores, values), "four blocks merged in a random order")


# ---- attend_in_blocks


def some_memory(seed: int, T: int, S: int, spare: int, D: int = 4) -> tuple[Tensor, Tensor, Counted, Counted]:
    """Queries [T, D] at positions up to S - 1, one of them there; K and V [S + spare, D], whose spare rows are NaN."""
    draw = seeds.rng(seed)
    generator = seeds.generator(seed)
    q, k, v = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (T, S + spare, S + spare))
    k[S:] = v[S:] = NAN
    q_pos = torch.tensor(draw.sample([S - 1, *(draw.randrange(S) for _ in range(T - 1))], T))
    return q, q_pos, Counted(k, 1), Counted(v, 1)


def by_rule(q: Tensor, q_pos: Tensor, k: Counted, v: Counted) -> Tensor:
    n = int(q_pos.max()) + 1
    scores = q @ k.data[:n].T / q.shape[-1] ** 0.5
    return softmax_over(scores.masked_fill(torch.arange(n) > q_pos[:, None], -INF), v.data[:n])


BLOCK_CASES = [(1, 1, 4), (1, 7, 4), (3, 8, 4), (4, 9, 2), (2, 5, 1), (5, 11, 3), (3, 4, 16)]  # T, S, size


def with_cause(got: Any, expected: Tensor, words: str, known: dict[str, Tensor]) -> None:
    """As `same`; if the wrong result is a well known one, the message says which."""
    try:
        same(got, expected, words, CLOSE)
    except Wrong as wrong:
        for says, other in known.items():
            if isinstance(got, Tensor) and got.shape == other.shape and torch.allclose(got.double(), other):
                raise Wrong(f"{wrong}\n{says}") from None
        raise


def in_blocks(work: Work, seed: int, T: int, S: int, size: int, spare: int) -> tuple[Any, list[Any], str]:
    given = some_memory(seed, T, S, spare)
    words = f"queries at {given[1].tolist()}, {S + spare} rows of K and V, blocks of {size}"
    got = work.call("attend_in_blocks", *given, size, changes=(2, 3))
    if got is None:
        raise Wrong("attend_in_blocks returned None: is a `return` missing?")
    return got, list(given), words


@holds(
    "11",
    "attend_in_blocks",
    "equal to a softmax over all visible keys at once, for any size of block",
    hint="scale by D ** -0.5; the keys of a block that begins at `start` stand at start + 0, 1, ...; hide them with "
    "-inf before `part`; divide o by s once, at the very end.",
    uses=PARTS,
)
def blocks_equal_softmax(work: Work) -> None:
    for seed, (T, S, size) in enumerate(BLOCK_CASES * 2):
        got, given, words = in_blocks(work, seed, T, S, size, spare=0)
        q, q_pos, k, v = given
        with_cause(
            got,
            by_rule(*given),
            f"the result for {words}",
            {
                "the scores are not scaled by D ** -0.5": by_rule(q * q.shape[-1] ** 0.5, q_pos, k, v),
                "every key is seen, as if none were hidden": by_rule(q, torch.full_like(q_pos, S - 1), k, v),
            },
        )


@holds(
    "11",
    "attend_in_blocks",
    "nothing past the last visible position is read: those rows are NaN",
    hint="only positions 0 to q_pos.max() are worth a load; cut the last block off there. To hide NaN is not enough: "
    "0 x NaN is NaN.",
    uses=PARTS,
)
def blocks_read_no_more(work: Work) -> None:
    for seed, (T, S, size) in enumerate(BLOCK_CASES):
        _, given, words = in_blocks(work, 40 + seed, T, S, size, spare=5)
        for name, memory in (("K", given[2]), ("V", given[3])):
            if len(beyond := memory.reads[S:].nonzero()):
                raise Wrong(
                    f"{words}: the last visible position is {S - 1}, and row {S + int(beyond[0])} of {name} was read"
                )


@holds(
    "11",
    "attend_in_blocks",
    "each row of K and of V is read exactly once, by loads of at most `size` rows",
    hint="one loop over blocks of keys, all queries at once. No second pass: `merge` mends what an earlier maximum has "
    "done.",
    uses=PARTS,
)
def blocks_read_once(work: Work) -> None:
    for seed, (T, S, size) in enumerate(BLOCK_CASES):
        _, given, words = in_blocks(work, 60 + seed, T, S, size, spare=0)
        for name, memory in (("K", given[2]), ("V", given[3])):
            check_once(memory.reads, f"{words}: row {{}} of {name}")
            if memory.most > size:
                raise Wrong(f"{words}: one load read {memory.most} rows of {name}; it may read {size}")


def check_once(reads: Tensor, words: str) -> None:
    for at in (reads != 1).nonzero().tolist():
        times = int(reads[tuple(at)])
        where = words.format(at[0] if len(at) == 1 else tuple(at))
        raise Wrong(f"{where} was {'not read' if not times else f'read {times} times'}; each must be read once")


@holds(
    "11",
    "attend_in_blocks",
    "no tensor grows with the number of keys: the whole score matrix is never there",
    hint="keep the state (m, s, o) of what was seen, and nothing else: no list of scores, no cat, no stack.",
    uses=PARTS,
)
def blocks_need_no_matrix(work: Work) -> None:
    T, S, D, size = 6, 240, 8, 4
    q, q_pos, k, v = some_memory(80, T, S, 0, D)
    with Largest() as seen:
        work.call("attend_in_blocks", q, q_pos, k, v, size, changes=(2, 3))
    if seen.size >= T * S:
        raise Wrong(
            f"{T} queries, {S} keys, blocks of {size}: a tensor of {seen.size:,} numbers was made; the whole score "
            f"matrix has {T * S:,}, a block of it {T * size}"
        )


# ---- paged_decode


def some_pages(
    seed: int, lengths: Sequence[int], H: int, Hkv: int, D: int = 4
) -> tuple[Tensor, Counted, Counted, Counted]:
    """q [N, H, D]; K and V [Hkv, slots, D], NaN in free slots; a table [N, width], garbage past each length."""
    draw = seeds.rng(seed)
    generator = seeds.generator(seed)
    slots = sum(lengths) + 6
    free = draw.sample(range(1, slots), slots - 1)  # slot 0, where a load of a slot that is none ends, holds nothing
    table = torch.full((len(lengths), max(lengths) + 3), 10**6)
    k, v = (torch.full((Hkv, slots, D), NAN, dtype=torch.float64) for _ in range(2))
    for n, length in enumerate(lengths):
        held = torch.tensor([free.pop() for _ in range(length)])
        table[n, :length] = held
        for memory in (k, v):
            memory[:, held] = torch.randn(Hkv, length, D, generator=generator, dtype=torch.float64)
    q = torch.randn(len(lengths), H, D, generator=generator, dtype=torch.float64)
    return q, Counted(k, 2), Counted(v, 2), Counted(table, 2)


def by_softmax(q: Tensor, k: Counted, v: Counted, table: Counted, n: int, length: int) -> Tensor:
    """One sequence, all its heads, [H, D]."""
    G = q.shape[1] // k.shape[0]
    held = table.data[n, :length]
    keys, values = (memory.data[:, held].repeat_interleave(G, 0) for memory in (k, v))  # [H, length, D]
    scores = torch.einsum("hd,hsd->hs", q[n], keys) / q.shape[-1] ** 0.5
    return torch.einsum("hs,hsd->hd", scores.softmax(-1), values)


def run_programs(
    work: Work, seed: int, lengths: Sequence[int], H: int, Hkv: int, size: int, check: bool = True
) -> tuple[tuple[Tensor, Counted, Counted, Counted], str]:
    """Every program of the grid once; if `check`, its result must be the softmax's."""
    pages = q, k, v, table = some_pages(seed, lengths, H, Hkv)
    words = f"sequences of {list(lengths)} positions, {H} query heads, {Hkv} key-value heads, blocks of {size}"
    G = H // Hkv
    for n, length in enumerate(lengths):
        expected = by_softmax(q, k, v, table, n, length)
        for head in range(Hkv):
            got = work.call("paged_decode", n, head, q, k, v, table, length, size, changes=(3, 4, 5))
            what = f"{words}: the result of program (sequence {n}, key-value head {head})"
            if check:
                known = well_known(q, k, v, table, n, head, length, size)
                with_cause(got, expected[head * G : (head + 1) * G], what, known)
    return pages, words


def well_known(
    q: Tensor, k: Counted, v: Counted, table: Counted, n: int, head: int, length: int, size: int
) -> dict[str, Tensor]:
    """What programs with the usual mistakes return."""
    Hkv, G, scale = k.shape[0], q.shape[1] // k.shape[0], q.shape[-1] ** -0.5
    keys, values = (memory.data[head, table.data[n, :length]] for memory in (k, v))
    group, every = q[n, head * G : (head + 1) * G], q[n, head::Hkv]
    dead = torch.zeros(-length % size, q.shape[-1], dtype=q.dtype)
    return {
        f"these are query heads {head}, {head + Hkv}, ...; key-value head {head} belongs to {head * G} to "
        f"{head * G + G - 1}": softmax_over(every @ keys.T * scale, values),
        "the scores are not scaled by D ** -0.5": softmax_over(group @ keys.T, values),
        "keys past the end have the score 0 and so a weight; it must be -inf": softmax_over(
            group @ torch.cat([keys, dead]).T * scale, torch.cat([values, dead])
        ),
    }


@holds(
    "11",
    "paged_decode",
    "each program gives the G query heads of its key-value head, [G, D]; slots come from the table, in blocks",
    hint="query heads head * G to head * G + G - 1, all at once; the slot of position p is table[n, p]; blocks begin "
    "at 0, size, 2 * size, ...; o / s at the very end.",
    uses=PARTS,
)
def programs_equal_softmax(work: Work) -> None:
    for seed, (lengths, H, Hkv, size) in enumerate(
        (
            ([4], 1, 1, 4),
            ([8, 4], 2, 2, 4),
            ([8, 4, 12], 6, 2, 4),
            ([5, 1, 9], 2, 1, 4),
            ([3, 17, 2], 9, 3, 8),
            ([7, 6], 6, 2, 1),
        )
    ):
        run_programs(work, seed, lengths, H, Hkv, size)


@holds(
    "11",
    "paged_decode",
    "every live row of K and V is read exactly once for all G query heads, by loads of at most `size` rows, and no "
    "free slot is read",
    hint="load a block of K once, and multiply all G queries with it. Give every load `live`, the table's too: what "
    "lies past kv_len in the table is no slot.",
    uses=PARTS,
)
def programs_read_once(work: Work) -> None:
    for seed, (lengths, H, Hkv, size) in enumerate((([8, 4], 4, 2, 4), ([5, 1, 9], 9, 3, 4), ([3, 17, 2], 6, 2, 8))):
        (_, k, v, table), words = run_programs(work, 20 + seed, lengths, H, Hkv, size, check=False)
        held = torch.cat([table.data[n, :length] for n, length in enumerate(lengths)])
        for name, memory in (("K", k), ("V", v)):
            if memory.most > size:
                raise Wrong(f"{words}: one load read {memory.most} rows of {name}; it may read {size}")
            reads = memory.reads.clone()
            for head, slot in (reads[:, held] != 1).nonzero().tolist():
                times = int(reads[head, held[slot]])
                tells = "not read" if not times else f"read {times} times"
                raise Wrong(
                    f"{words}: row ({head}, {int(held[slot])}) of {name}, which is key-value head and slot, was "
                    f"{tells}; each must be read once"
                )
            reads[:, held] = 0
            if reads.any():
                head, slot = reads.nonzero()[0].tolist()
                raise Wrong(f"{words}: free slot {slot} of {name} was read, for key-value head {head}")


@cache
def model() -> Llama:
    return Llama.random(TINY, seed=0, dtype=torch.float64)


@cache
def alone(prompt: tuple[int, ...], n: int) -> list[int]:
    """The oracle: this text by itself, by the naive stage."""
    request = make_request(prompt, SamplingParams(n, ignore_eos=True), TINY, None, TINY.context)
    for _ in naive.generate(model(), [request]):
        pass
    return request.output


class Spoiled(Engine):
    """Before each step, every slot that holds nothing of a running text is NaN."""

    def step(self) -> list[Event]:
        keep = [slot for r in self.scheduler.running for slot in list(r.slots)[: r.computed]]
        free = torch.ones(self.pool.k.shape[2], dtype=torch.bool)
        free[torch.tensor(keep, dtype=torch.int64)] = False
        self.pool.k[:, :, free] = self.pool.v[:, :, free] = NAN
        return super().step()


@holds(
    "11",
    "paged_decode",
    "in the engine, every token is the naive stage's; free slots hold NaN",
    hint="each new token is a sequence of its own here, with the length that it sees; table[n] and kv_len say all.",
    uses=PARTS,
)
def programs_in_the_engine(work: Work) -> None:
    D, G = TINY.head_dim, TINY.n_heads // TINY.n_kv_heads
    given = work.function("paged_decode")

    def program(*args: Any) -> Tensor:
        got = given(*args)
        if not isinstance(got, Tensor) or list(got.shape) != [G, D]:
            what = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise Wrong(f"paged_decode must return [G, D], here {[G, D]}; it returned {what}")
        return got

    draw = seeds.rng(7)
    prompts = [tuple(draw.randrange(2, 64) for _ in range(n)) for n in (1, 9, 4, 6)]
    engine = Spoiled(model(), max_running=3, budget=5, max_len=24, slots=partial(BlockSlots, n_slots=24, size=2))
    engine.attend = partial(ProgramAttend, program, 4)
    requests = [engine.add(prompt, SamplingParams(4, ignore_eos=True)) for prompt in prompts]
    while engine.busy:
        engine.step()
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        expected = alone(prompt, 4)
        words = f"four texts in the engine, blocks of 2 slots, program blocks of 4: text {i} ({len(prompt)} tokens)"
        if request.finish_reason == "error":
            raise Wrong(
                f"{words} got logits that are not numbers: either a slot was read that holds nothing of it, or "
                "all its keys were hidden"
            )
        if request.output != expected:
            raise Wrong(f"{words} must go on {expected}, and went on {request.output}")


# ---- intensity


def flops_per_byte(n: int, kv_len: int, H: int, Hkv: int, D: int, itemsize: int) -> float:
    scores = n * (kv_len - n) + n * (n + 1) // 2
    return 4 * D * H * scores / (itemsize * D * (2 * Hkv * kv_len + 2 * H * n))


SHAPES = ((9, 3, 64, 2), (9, 3, 64, 4), (32, 8, 128, 2), (4, 4, 16, 8), (8, 1, 32, 2))  # H, Hkv, D, itemsize


def check_intensity(work: Work, n: int, kv_len: int, shape: tuple[int, int, int, int]) -> None:
    H, Hkv, D, itemsize = shape
    got = work.call("intensity", n, kv_len, H, Hkv, D, itemsize)
    expected = flops_per_byte(n, kv_len, H, Hkv, D, itemsize)
    words = f"intensity(n={n}, kv_len={kv_len}, H={H}, Hkv={Hkv}, D={D}, itemsize={itemsize})"
    if got is None:
        raise Wrong(f"{words} is None: is a `return` missing?")
    if not isinstance(got, int | float):
        raise Wrong(f"{words} is {type(got).__name__}; it must be a number")
    if abs(got - expected) > 1e-9 * expected:
        raise Wrong(f"{words}: expected {expected:.6g}, got {got:.6g}, {got / expected:.4g} times as much")


@holds(
    "11",
    "intensity",
    "of one new token: 4 D operations a score and query head; K and V of every key-value head once, q and out of every "
    "query head once",
    hint="operations: 2 D for q k, 2 D for weight times v, for each of H heads and kv_len scores. Numbers moved: "
    "2 * Hkv * kv_len * D for K and V, 2 * H * D for q and out; each has itemsize bytes.",
)
def intensity_of_decode(work: Work) -> None:
    for kv_len in (1, 16, 1024):
        for shape in SHAPES:
            check_intensity(work, 1, kv_len, shape)


@holds(
    "11",
    "intensity",
    "of a chunk: visible scores only, and q and out of each of its tokens",
    hint="token i of the chunk sees kv_len - n + i + 1 positions; the sum over the chunk is "
    "n * (kv_len - n) + n * (n + 1) / 2.",
)
def intensity_of_chunks(work: Work) -> None:
    for n, kv_len in ((2, 2), (5, 20), (128, 128), (1024, 1024), (64, 2000)):
        for shape in SHAPES:
            check_intensity(work, n, kv_len, shape)
