"""Problem set 5, kernels and serving: attention of a decoding step that reads a shared block once, against a softmax
over each text alone; and the choice of whom to refuse, against every other choice there is."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from minillm.lab.checking import holds
from minillm.lab.checks.c11 import Counted, Largest
from minillm.lab.seeds import generator, rng
from minillm.lab.work import Work, Wrong, same, time_limit

INF = float("inf")
CLOSE = 1e-9  # float64: equal but for the order of sums

# ---- decode_shared


@dataclass
class Shared:
    """A decoding step. K and V [slots, Hkv, D] are NaN in every slot in which nobody has anything stored."""

    q: Tensor  # [N, H, D]
    k: Counted
    v: Counted
    tables: list[list[int]]
    kv_lens: list[int]
    size: int

    @property
    def given(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.tables, self.kv_lens, self.size

    def __str__(self) -> str:
        heads = f"{self.q.shape[1]} query heads, {self.k.shape[1]} key-value heads"
        return f"blocks of {self.size}, {heads}, tables {self.tables}, kv_lens {self.kv_lens}"

    def slots(self, n: int) -> Tensor:
        """Of the stored positions of text n."""
        table, size = self.tables[n], self.size
        return torch.tensor([table[p // size] * size + p % size for p in range(self.kv_lens[n])])

    def expected(self) -> Tensor:
        """Each text by itself, all its keys at once."""
        rows = []
        G = self.q.shape[1] // self.k.shape[1]
        for n, q in enumerate(self.q):
            keys, values = (memory.data[self.slots(n)].repeat_interleave(G, 1) for memory in (self.k, self.v))
            weights = (torch.einsum("hd,shd->hs", q, keys) / q.shape[-1] ** 0.5).softmax(-1)
            rows.append(torch.einsum("hs,shd->hd", weights, values))
        return torch.stack(rows)


def empty(slots: int, Hkv: int, D: int) -> Counted:
    return Counted(torch.full((slots, Hkv, D), math.nan, dtype=torch.float64), 1)


def some_tables(draw: random.Random, size: int, texts: int, longest: int) -> tuple[list[list[int]], list[int], int]:
    """Texts that begin afresh, with the full blocks of an earlier one, or with all of its blocks. (tables, stored
    positions, blocks of the memory)"""
    blocks = iter(draw.sample(range(4, 4 + 2 * texts * longest), texts * (longest + 1)))
    tables: list[list[int]] = []
    lengths: list[int] = []
    for _ in range(texts):
        earlier = draw.randrange(len(tables)) if tables and draw.random() < 0.8 else None
        table: list[int] = []
        if earlier is not None:
            length = lengths[earlier]
            if draw.random() < 0.2:  # a fork: also the block that is not full
                tables.append(tables[earlier][: -(-length // size)])
                lengths.append(length)
                continue
            table = tables[earlier][: draw.randint(0, length // size)]
        length = len(table) * size + draw.randint(1, size * max(1, longest - len(table)))
        table += [next(blocks) for _ in range(-(-length // size) - len(table))]
        tables.append(table)
        lengths.append(length)
    for table in tables:
        if draw.random() < 0.3:
            table.append(next(blocks, 0))  # reserved, and nothing in it yet
    return tables, lengths, 4 + 2 * texts * longest


def some_step(seed: int, scale: float = 1.0, texts: int = 0, longest: int = 5) -> Shared:
    draw, noise = rng(seed), generator(seed)
    size, Hkv, G, D = (
        draw.choice((1, 2, 3, 4, 8)),
        draw.choice((1, 2, 3)),
        draw.choice((1, 2, 3, 4)),
        draw.choice((4, 8)),
    )
    tables, lengths, blocks = some_tables(draw, size, texts or draw.randint(1, 6), longest)
    q = torch.randn(len(tables), Hkv * G, D, generator=noise, dtype=torch.float64) * scale
    step = Shared(q, empty(blocks * size, Hkv, D), empty(blocks * size, Hkv, D), tables, lengths, size)
    for n in range(len(tables)):
        slots = step.slots(n)
        for memory in (step.k, step.v):
            fresh = memory.data[slots].isnan()
            values = torch.randn(memory.data[slots].shape, generator=noise, dtype=torch.float64)
            memory.data[slots] = torch.where(fresh, values, memory.data[slots])
    return step


def by_hand() -> Shared:
    """Three texts: two have the first two blocks in common, all have the first; the last block of each is its own."""
    noise, size = generator(50), 2
    tables, lengths = [[3, 0, 5], [3, 0, 1], [3, 6]], [6, 5, 3]
    q = torch.randn(3, 2, 4, generator=noise, dtype=torch.float64)
    step = Shared(q, empty(16, 1, 4), empty(16, 1, 4), tables, lengths, size)
    live = torch.cat([step.slots(n) for n in range(3)]).unique()
    for each in (step.k, step.v):
        each.data[live] = torch.randn(len(live), 1, 4, generator=noise, dtype=torch.float64)
    return step


def some_steps(seed: int, n: int, scale: float = 1.0) -> Iterator[Shared]:
    yield by_hand()
    for i in range(n):
        yield some_step(100 * seed + i, scale)


def decoded(work: Work, step: Shared) -> Any:
    got = work.call("decode_shared", *step.given, changes=(1, 2))
    if got is None:
        raise Wrong("decode_shared returned None: is a `return` missing?")
    return got


@holds(
    "p5",
    "decode_shared",
    "for every text it is what a softmax over that text alone gives: shared beginnings, forks, any size of block",
    hint="scale by D ** -0.5; query heads head * G .. head * G + G - 1 belong to key-value head `head`; merge each "
    "part into the state of the texts that hold the block, and divide once, at the end.",
)
def shared_is_right(work: Work) -> None:
    for step in some_steps(51, 40):
        same(decoded(work, step), step.expected(), f"the result for {step}", CLOSE)


@holds(
    "p5",
    "decode_shared",
    "every stored slot is read once, however many texts hold its block, by loads of at most one block",
    hint="collect first who holds which block: a dictionary from block to texts. Then go through the blocks, not "
    "through the texts.",
)
def shared_reads_once(work: Work) -> None:
    for step in some_steps(52, 25):
        decoded(work, step)
        stored = torch.cat([step.slots(n) for n in range(len(step.tables))]).unique()
        for name, memory in (("K", step.k), ("V", step.v)):
            for slot in stored.tolist():
                if (times := int(memory.reads[slot])) != 1:
                    block = slot // step.size
                    holders = [n for n, table in enumerate(step.tables) if block in table]
                    raise Wrong(
                        f"{step}: slot {slot} of {name}, in block {block} of the texts {holders}, was "
                        f"{f'read {times} times' if times else 'not read'}; each stored slot must be read once"
                    )
            if memory.most > step.size:
                raise Wrong(f"{step}: one load read {memory.most} rows of {name}; a load may read one block")


@holds(
    "p5",
    "decode_shared",
    "nothing else is read: not the rest of a block that is not full, not a block that is only reserved",
    hint="a text of kv_len positions uses the first ceil(kv_len / size) blocks of its table, and of block i only "
    "min(size, kv_len - i * size) slots.",
)
def shared_reads_no_more(work: Work) -> None:
    for step in some_steps(53, 25):
        decoded(work, step)
        for name, memory in (("K", step.k), ("V", step.v)):
            for slot in memory.reads.nonzero().flatten().tolist():
                if memory.data[slot].isnan().any():
                    raise Wrong(
                        f"{step}: slot {slot} of {name} was read, place {slot % step.size} of block {slot // step.size}"
                        "; nobody has stored anything there"
                    )


@holds(
    "p5",
    "decode_shared",
    "scores of any size, whichever block comes first: no overflow, and no text loses its weights to another's maximum",
    hint="each row has an m of its own: `part` makes it, `merge` keeps it. An m of all texts together, or none, is too "
    "large or too small for some.",
)
def shared_stays_finite(work: Work) -> None:
    for scale in (40.0, 3000.0):
        for step in some_steps(54, 12, scale):
            step.q[::2] *= 1e-3  # next to texts of small scores
            got = decoded(work, step)
            if isinstance(got, Tensor) and not got.isfinite().all():
                raise Wrong(f"queries about {scale:g} in size, {step}: the result is not finite; an exp was too large")
            same(got, step.expected(), f"queries about {scale:g} in size: the result for {step}", 1e-7)


@holds(
    "p5",
    "decode_shared",
    "no tensor grows with the length of the texts: what is kept is the state of each row and one block",
    hint="no cat and no stack of keys or scores: merge each block into the state as soon as it is loaded.",
)
def shared_needs_no_matrix(work: Work) -> None:
    for seed in (55, 56):
        step = some_step(seed, texts=3, longest=2)
        size, (N, H, D) = step.size, step.q.shape
        common = list(range(4, 4 + 128))  # the texts have a long beginning in common
        step.tables, step.kv_lens = [[*common, 140 + n] for n in range(N)], [128 * size + 1] * N
        for memory in (step.k, step.v):
            shape = (150 * size, *memory.shape[1:])
            memory.data = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
            memory.reads = torch.zeros(shape[0], dtype=torch.int64)
        with Largest() as seen:
            decoded(work, step)
        most = 8 * max(N * H * D, N * H * size, step.k.shape[1] * size * D)
        if seen.size > most:
            raise Wrong(
                f"{N} texts of {step.kv_lens[0]} positions in blocks of {size}, {H} query heads of {D}: a tensor of "
                f"{seen.size:,} numbers was made; {most:,} are more than enough for the states and a block"
            )


# ---- keep

Burst = tuple[list[int], list[int], int]  # seconds, deadlines, now: whole numbers, so that nothing hangs on rounding
HAND: Burst = ([5, 2, 2, 3, 1], [6, 4, 5, 11, 7], 0)


def some_bursts(seed: int, n: int, most: int = 8) -> Iterator[Burst]:
    draw = rng(seed)
    for _ in range(n):
        size, now, span = draw.randint(1, most), draw.choice((0, 0, draw.randint(1, 50))), draw.randint(6, 30)
        seconds = [draw.randint(1, 9) for _ in range(size)]
        yield seconds, [now + draw.randint(1, span) for _ in range(size)], now


def burst_words(burst: Burst) -> str:
    return "seconds={}, deadlines={}, now={}".format(*burst)


def late_in(burst: Burst, order: Sequence[int]) -> tuple[int, int] | None:
    """The first request of this order that misses its deadline, and when it would be done; None if all keep theirs."""
    seconds, deadlines, at = burst
    for i in order:
        at += seconds[i]
        if at > deadlines[i]:
            return i, at
    return None


def best_choice(burst: Burst) -> list[int]:
    """Of all choices that keep their deadlines one of the largest, and of these one with the least work: by trying all,
    each in the order of deadlines (if any order is good, this one is)."""
    seconds, deadlines, _ = burst
    by_deadline = sorted(range(len(seconds)), key=deadlines.__getitem__)
    for n in range(len(seconds), 0, -1):
        if good := [choice for choice in combinations(by_deadline, n) if late_in(burst, choice) is None]:
            return list(min(good, key=lambda choice: sum(seconds[i] for i in choice)))
    return []


def kept(work: Work, burst: Burst) -> list[int]:
    got, words = work.call("keep", *burst), burst_words(burst)
    if got is None:
        raise Wrong("keep returned None: is a `return` missing?")
    if not isinstance(got, list | tuple):  # the same words for all bursts: then it is told once
        raise Wrong(f"keep must return a list of request numbers; it returned {type(got).__name__}")
    if odd := [type(i).__name__ for i in got if not isinstance(i, int)]:
        raise Wrong(f"keep must return a list of request numbers; it returned one with {odd[0]} in it")
    if bad := [i for i in got if not 0 <= i < len(burst[0])]:
        raise Wrong(f"{words}: there is no request {bad[0]}; keep returned {got}")
    if len(set(got)) < len(got):
        raise Wrong(f"{words}: a request is kept twice: {got}")
    return list(got)


def must_keep_deadlines(burst: Burst, order: Sequence[int]) -> None:
    if late := late_in(burst, order):
        i, at = late
        raise Wrong(
            f"{burst_words(burst)}: computed in the order {list(order)}, request {i} has its first token at {at}, and "
            f"its deadline is {burst[1][i]}; it is kept and not good"
        )


def must_be_most(burst: Burst, order: Sequence[int]) -> None:
    best = best_choice(burst)
    if len(order) < len(best):
        raise Wrong(f"{burst_words(burst)}: {list(order)} are kept, which are {len(order)}; {best} are {len(best)}")


def must_be_cheapest(burst: Burst, order: Sequence[int]) -> None:
    best, seconds = best_choice(burst), burst[0]
    mine, least = sum(seconds[i] for i in order), sum(seconds[i] for i in best)
    if len(order) == len(best) and mine > least:
        raise Wrong(f"{burst_words(burst)}: {list(order)} take {mine} s; {best} are as many and take {least} s")


@holds(
    "p5",
    "keep",
    "by hand: of five requests four keep their deadlines, if the one that takes longest is refused",
    hint="whom to refuse when it gets too late is a free choice: not only the request that would be late can go.",
)
def keep_by_hand(work: Work) -> None:
    for burst in [HAND, *some_bursts(61, 6, most=5)]:
        order = kept(work, burst)
        must_keep_deadlines(burst, order)
        must_be_most(burst, order)


@holds(
    "p5",
    "keep",
    "whoever is kept is good: in the order that is returned, each has its first token by its deadline",
    hint="begin at `now`, not at 0; at the very deadline is in time. The result is ordered: by deadline is always good "
    "if anything is.",
)
def keep_all_good(work: Work) -> None:
    if got := kept(work, ([], [], 3)):
        raise Wrong(f"nobody waits, and keep returned {got}; expected []")
    for burst in some_bursts(62, 120, most=12):
        order, (seconds, deadlines, now) = kept(work, burst), burst
        must_keep_deadlines(burst, order)
        alone = [i for i in range(len(seconds)) if now + seconds[i] <= deadlines[i]]
        if alone and not order:
            raise Wrong(f"{burst_words(burst)}: nobody is kept, and {alone[0]} alone would be good")


@holds(
    "p5",
    "keep",
    "no choice of requests that keep their deadlines is larger",
    hint="go through the requests by deadline. As soon as the newest would be late, take out the one that takes "
    "longest of all so far, which may be the newest itself.",
)
def keep_most(work: Work) -> None:
    for burst in some_bursts(63, 150):
        must_be_most(burst, kept(work, burst))


@holds(
    "p5",
    "keep",
    "of equally many, the least work: the replica is free again as soon as possible",
    hint="a request that is taken out must be the longest of all that were kept so far, whether or not a shorter one "
    "would be enough for this deadline.",
)
def keep_least_work(work: Work) -> None:
    for burst in some_bursts(64, 150):
        order = kept(work, burst)
        must_be_most(burst, order)
        must_be_cheapest(burst, order)


@holds(
    "p5",
    "keep",
    "a burst of a thousand is decided in a moment, and hopeless requests cost nobody a place",
    hint="to try all choices takes for ever: a decision for each request, and a heap that knows the longest.",
)
def keep_many(work: Work) -> None:
    draw = rng(65)
    for n in (30, 1200):
        now = draw.randint(1, 1000)
        seconds = [draw.randint(1, 40) for _ in range(n)]
        deadlines = [now + draw.randint(1, 12 * n) for _ in range(n)]
        for i in range(0, n, 7):  # these need more than there is
            deadlines[i] = now + seconds[i] - 1
        burst: Burst = (seconds, deadlines, now)
        with time_limit(5.0, "keep"):
            order = kept(work, burst)
        if late := late_in(burst, order):
            raise Wrong(f"of {n} requests, {len(order)} are kept, and request {late[0]} among them is late")
        expected = most_good(burst)
        if len(order) != expected:
            raise Wrong(f"of {n} requests {expected} can keep their deadlines; {len(order)} are kept")


def most_good(burst: Burst) -> int:
    """How many can keep their deadlines, by counting: least[m] is the least work of m good ones so far."""
    seconds, deadlines, now = burst
    least = [0.0]
    for i in sorted(range(len(seconds)), key=deadlines.__getitem__):
        grown = [work + seconds[i] if now + work + seconds[i] <= deadlines[i] else INF for work in least]
        least = [min(a, b) for a, b in zip([*least, INF], [0.0, *grown], strict=True)]
        if least[-1] == INF:
            least.pop()
    return len(least) - 1
