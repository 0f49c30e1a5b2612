"""Lesson 07, ragged: visible, pack, context, step, generate, scores_dense, scores_needed.

The oracle runs each text alone, through torch's own attention: neither our `sdpa` nor a learner's takes part in it.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minillm import attention
from minillm.bench.harness import counting
from minillm.cache import KVPool
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.tiny import TINY as CONFIG
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama

NAN = float("nan")
CLOSE = 1e-9  # float64: equal but for the order of sums

Row = tuple[int, int, list[int]]  # number of the text, position of its first new token, its new tokens


@cache
def tiny() -> Llama:
    return Llama.random(CONFIG, seed=7, dtype=torch.float64)


def alone(tokens: Sequence[int]) -> Tensor:
    """The logits after each token of one text by itself, [n, V]."""
    model = tiny()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = CONFIG.n_heads // CONFIG.n_kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)  # [n, H, D]
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]  # [1, H, n, D] each
        return scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)[0].transpose(0, 1)

    hidden = model(torch.tensor(list(tokens)), torch.arange(len(tokens)), attend)
    return model.logits(hidden)


def greedy(prompt: Sequence[int], n: int) -> tuple[list[int], Tensor]:
    """What the model writes after a prompt, alone: n tokens, and the logits behind each, [n, V]."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(alone(tokens)[-1].argmax()))
    return tokens[len(prompt) :], alone(tokens[:-1])[len(prompt) - 1 :]


def some_tokens(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(2, CONFIG.vocab_size) for _ in range(n)]


def some_rows(draw: random.Random) -> list[Row]:
    """1 to 5 texts with any numbers, at any point, each with 1 to 6 new tokens."""
    numbers = draw.sample(range(50), draw.randint(1, 5))
    return [(number, draw.choice([0, 0, 3, 7]), some_tokens(draw, draw.randint(1, 6))) for number in numbers]


def said(rows: Sequence[Row]) -> str:
    return "; ".join(f"text {seq}: {len(new)} new from position {start}" for seq, start, new in rows)


def parts(work: Work, name: str, names: Sequence[str], *args: Any) -> list[Any]:
    """What a function returns that has to return several tensors."""
    got = work.call(name, *args)
    if got is None:
        raise Wrong(f"{name} returned None: is a `return` missing?")
    if not isinstance(got, tuple | list) or len(got) != len(names):
        what = f"{len(got)} things" if isinstance(got, tuple | list) else f"one {type(got).__name__}"
        raise Wrong(f"{name} must return {len(names)} tensors, {', '.join(names)}; it returned {what}")
    return list(got)


# ---- visible


def mask_of(q_pos: Tensor, k_pos: Tensor, q_seq: Tensor, k_seq: Tensor) -> Tensor:
    """The rule cell by cell, for flat positions: slow and plain."""
    queries = list(zip(q_pos.tolist(), q_seq.tolist(), strict=True))
    keys = list(zip(k_pos.tolist(), k_seq.tolist(), strict=True))
    return torch.tensor([[text == own and at <= p for at, text in keys] for p, own in queries])


@holds(
    "07",
    "visible",
    "in one text, a token sees its own position and those before it",
    hint="compare positions, k_pos with q_pos, never indices: after the cache, query 0 may stand at position 5. "
    "And a token sees itself: <=, not <.",
)
def visible_one_text(work: Work) -> None:
    for q, k in (([0, 1, 2, 3], [0, 1, 2, 3]), ([5], range(6)), ([2, 3, 4], range(5)), ([7, 2], [2, 7, 0])):
        q_pos, k_pos = torch.tensor(q), torch.tensor(list(k))
        expected = mask_of(q_pos, k_pos, torch.zeros_like(q_pos), torch.zeros_like(k_pos))
        what = f"the mask of queries at positions {list(q)} and keys at {list(k)}"
        same(work.call("visible", q_pos, k_pos), expected, what)


@holds(
    "07",
    "visible",
    "of several texts side by side, a token sees its own only, up to its own position",
    hint="both must hold: k_seq equals q_seq, and k_pos <= q_pos. Only the first: a token sees its future. Only the "
    "second: it reads other people's texts.",
)
def visible_several_texts(work: Work) -> None:
    cases = [([0, 1, 2, 3, 0, 1, 0], [0, 0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 0, 1, 0], [0, 0, 0, 0, 1, 1, 2])]
    cases += [([4, 2], [8, 3], [0, 1, 2, 3, 4, 0, 1, 2], [8] * 5 + [3] * 3)]  # one new token each
    draw = seeds.rng(0)
    for _ in range(12):  # in any order: a mask knows no neighbourhood
        sizes = [draw.randint(1, 12), draw.randint(1, 12)]
        at = [[draw.randrange(6) for _ in range(n)] for n in sizes]
        text = [[draw.randrange(3) for _ in range(n)] for n in sizes]
        cases.append((at[0], text[0], at[1], text[1]))
    for q, qs, k, ks in cases:
        q_pos, q_seq, k_pos, k_seq = map(torch.tensor, (q, qs, k, ks))
        what = f"the mask of queries at positions {q} of texts {qs}, and keys at {k} of texts {ks}"
        same(work.call("visible", q_pos, k_pos, q_seq, k_seq), mask_of(q_pos, k_pos, q_seq, k_seq), what)


@holds(
    "07",
    "visible",
    "the rows of a rectangle keep their axis: [B, T] and [S] give [B, T, S]",
    hint="put the new axes at the end, k_pos[..., None, :] and q_pos[..., :, None]: with [None, :] and [:, None] "
    "the mask fits one text only, and the earlier stages use it too.",
)
def visible_rectangle(work: Work) -> None:
    q_pos, k_pos = torch.tensor([[0, 1, 2], [4, 5, 6]]), torch.arange(8)
    expected = k_pos <= q_pos[:, :, None]  # [B, T, S]
    try:
        got = work.call("visible", q_pos, k_pos)
    except Wrong as wrong:
        if not isinstance(wrong.__cause__, RuntimeError | IndexError) or "not written yet" in str(wrong):
            raise
        told = "q_pos is [B, T] here, and k_pos [S]: with [None, :] and [:, None] the mask fits one text only. Put the "
        raise Wrong(f"{wrong}\n{told}new axes at the end, behind whatever is in front (...)") from wrong.__cause__
    same(got, expected, f"the mask of rows at {q_pos.tolist()} and keys at 0 to 7")


# ---- pack


def packed(rows: Sequence[Row]) -> dict[str, Tensor]:
    ends = torch.tensor([len(new) for _, _, new in rows]).cumsum(0)
    return {
        "tokens": torch.tensor([token for _, _, new in rows for token in new]),
        "positions": torch.tensor([start + i for _, start, new in rows for i in range(len(new))]),
        "seq": torch.tensor([seq for seq, _, new in rows for _ in new]),
        "last": ends - 1,
    }


def check_pack(work: Work, *which: str) -> None:
    draw = seeds.rng(1)
    example: list[Row] = [(0, 0, [11, 12, 13, 14]), (1, 0, [15, 16]), (2, 0, [17])]
    for rows in [example, *(some_rows(draw) for _ in range(20))]:
        expected = packed(rows)
        got = dict(zip(expected, parts(work, "pack", list(expected), rows), strict=True))
        for name in which:
            same(got[name], expected[name], f"{name} of the rows ({said(rows)})")


@holds(
    "07",
    "pack",
    "the new tokens lie end to end, row by row, each beside its text's number",
    hint="one list that grows: all new tokens of the first row, then all of the second; its number as often as it has "
    "new tokens. No pads, no turns.",
)
def pack_tokens(work: Work) -> None:
    check_pack(work, "tokens", "seq")


@holds(
    "07",
    "pack",
    "each text counts its positions from its own start",
    hint="range(start, start + len(new)) for each row. Counting on through the batch, or from 0 in every step, gives "
    "a token the wrong rotation and the wrong mask.",
)
def pack_positions(work: Work) -> None:
    check_pack(work, "positions")


@holds(
    "07",
    "pack",
    "`last` points at each row's last new token, in the flat batch",
    hint="after a row's tokens are in, it is the length of the list so far, minus 1. One index for each row.",
)
def pack_last(work: Work) -> None:
    check_pack(work, "last")


# ---- context


def check_context(work: Work, spare: int) -> None:
    draw = seeds.rng(2)
    for _ in range(20):
        rows = some_rows(draw)
        free = draw.sample(range(200), 200)
        slot_of = {seq: [free.pop() for _ in range(start + len(new) + spare)] for seq, start, new in rows}
        for number in range(60, 63):  # texts that are not in this step
            slot_of[number] = [free.pop() for _ in range(4)]
        slot_of = {number: slot_of[number] for number in draw.sample(sorted(slot_of), len(slot_of))}
        names = ("slots", "positions", "seq")
        got = parts(work, "context", names, rows, slot_of)
        right = [(slot_of[seq][p], p, seq) for seq, start, new in rows for p in range(start + len(new))]
        for name, part in zip(names, got, strict=True):
            if not isinstance(part, Tensor) or part.dim() != 1 or (len(part) and part.dtype != torch.int64):
                raise Wrong(f"{name} must be an int64 tensor [S], and is {kind(part)}")
            if len(part) != len(right):
                raise Wrong(
                    f"{name} of the rows ({said(rows)}): S must be {len(right)}, all that was computed and the new "
                    f"tokens themselves; it is {len(part)}"
                )
        made = sorted(zip(*(part.tolist() for part in got), strict=True))
        for mine, ours in zip(made, sorted(right), strict=True):  # their order is free, as long as the three agree
            if mine != ours:
                slot, position, seq = mine
                raise Wrong(
                    f"rows ({said(rows)}): you read slot {slot} as position {position} of text {seq}; that is none of "
                    f"those to be read, such as slot {ours[0]} for position {ours[1]} of text {ours[2]}"
                )


def kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


@holds(
    "07",
    "context",
    "for each row: all positions computed before, and the new ones, in that text's own slots",
    hint="each row asks slot_of for its own number, and takes positions 0 to start + len(new) - 1: a new token sees "
    "itself, so the new ones belong to it.",
)
def context_reads_all(work: Work) -> None:
    check_context(work, 0)


@holds(
    "07",
    "context",
    "no slot beyond that: reserved ones that hold nothing yet are not read",
    hint="cut the text's slots at start + len(new). To read more and mask it is not enough: the weight is 0, the slot "
    "may hold NaN, and 0 x NaN is NaN.",
)
def context_reads_no_more(work: Work) -> None:
    check_context(work, 3)


# ---- step


def spoiled_pool(n_slots: int) -> KVPool:
    pool = KVPool(tiny(), n_slots, 1, 1)
    pool.k.fill_(NAN)
    pool.v.fill_(NAN)
    gather = pool.gather

    def checked(layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(index, Tensor) or index.dim() != 2:
            what = f"an index with {index.dim()} axes" if isinstance(index, Tensor) else type(index).__name__
            raise Wrong(
                f"pool.gather was given {what}; it wants what pool.index(slots) makes, not the slots themselves"
            )
        return gather(layer, index)

    pool.gather = checked  # type: ignore[method-assign]
    return pool


def right_pack(rows: list[Row]) -> tuple[Tensor, ...]:
    return tuple(packed(rows).values())


def right_context(rows: list[Row], slot_of: dict[int, list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    read = [(slot_of[seq][p], p, seq) for seq, start, new in rows for p in range(start + len(new))]
    slots, positions, seq = torch.tensor(read).T
    return slots, positions, seq


def right_step(model: Llama, pool: KVPool, rows: list[Row], slot_of: dict[int, list[int]]) -> Tensor:
    tokens, positions, seq, last = right_pack(rows)
    slots, k_pos, k_seq = right_context(rows, slot_of)
    mask, index = attention.visible(positions, k_pos, seq, k_seq), pool.index(slots)
    new_slots = torch.tensor([slot for i, start, new in rows for slot in slot_of[i][start : start + len(new)]])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool.store(layer, new_slots, k, v)
        return attention.sdpa(q, *pool.gather(layer, index), mask)

    return model.logits(model(tokens, positions, attend)[last])


PARTS: dict[str, Any] = {"visible": attention.visible, "pack": right_pack, "context": right_context}


@holds(
    "07",
    "step",
    "the example of 4, 2 and 1 tokens gives a row of logits for each text; NaN in free slots",
    hint="only the rows in `last` go through the head. NaN: store, then gather; and read no slots but those that "
    "`context` gives",
    uses=PARTS,
)
def step_example(work: Work) -> None:
    pool, draw = spoiled_pool(16), seeds.rng(10)
    rows = [(i, 0, some_tokens(draw, n)) for i, n in enumerate((4, 2, 1))]
    free = draw.sample(range(16), 16)
    slot_of = {i: [free.pop() for _ in new] for i, _, new in rows}
    got, what = (
        work.call("step", tiny(), pool, rows, slot_of, changes=(0, 1)),
        "the logits of texts of 4, 2 and 1 tokens",
    )
    if got is None:
        raise Wrong("step returned None: is a `return` missing?")
    if isinstance(got, Tensor) and got.shape == (7, CONFIG.vocab_size):
        raise Wrong(
            f"{what}: the shape must be [3, {CONFIG.vocab_size}], and is {list(got.shape)}, a row for each token: only "
            "those in `last` are worth the head"
        )
    if not isinstance(got, Tensor) or got.shape != (3, CONFIG.vocab_size):
        raise Wrong(f"{what} must be [3, {CONFIG.vocab_size}], a row for each text; got {kind(got)}")
    if got.isnan().any():
        raise Wrong(f"{what} have NaN: a slot is read before it is written, or one that holds nothing")


def same_logits(work: Work, got: Any, right: Tensor, rows: Sequence[Row], what: str) -> None:
    if not isinstance(got, Tensor) or got.shape != right.shape or got.dtype != right.dtype:
        step_example(work)  # tells it by the simplest example
        return same(got, right, f"{what}: logits")
    if got.isnan().any():
        step_example(work)
    for i, (seq, start, new) in enumerate(rows):
        where = f"row {i}, positions {start} to {start + len(new) - 1} of text {seq}"
        same(got[i], right[i], f"{what}, {where}: logits", CLOSE)


@holds(
    "07",
    "step",
    "equals the model on each text alone, at every step: random lengths, chunks, arrivals, orders; NaN in free slots",
    hint="NaN: a slot is read that this step's texts do not hold, or read before it was written (store, then gather). "
    "Other numbers: is the mask given both text numbers? Do the new K and V go to the slots of their own positions?",
    uses=PARTS,
)
def step_equals_alone(work: Work) -> None:
    for seed in range(8):
        draw = seeds.rng(seed)
        texts = {number: some_tokens(draw, draw.randint(1, 14)) for number in draw.sample(range(100), 5)}
        right = {number: alone(tokens) for number, tokens in texts.items()}
        n_slots = 60
        pool, free = spoiled_pool(n_slots), draw.sample(range(n_slots), n_slots)
        waiting, computed = list(texts), dict[int, int]()
        slot_of: dict[int, list[int]] = {}
        number_of_step = 0
        while waiting or computed:
            number_of_step += 1
            while waiting and (not computed or draw.random() < 0.5) and len(free) >= 20:
                computed[waiting[0]] = 0
                slot_of[waiting[0]] = [free.pop() for _ in range(len(texts[waiting[0]]) + draw.randrange(3))]
                waiting.pop(0)
            rows: list[Row] = []
            for seq in draw.sample(sorted(computed), draw.randint(1, len(computed))):
                start = computed[seq]
                stop = draw.randint(start + 1, min(start + 5, len(texts[seq])))
                rows.append((seq, start, texts[seq][start:stop]))
            got = work.call("step", tiny(), pool, rows, slot_of, changes=(0, 1))
            expected = torch.stack([right[seq][start + len(new) - 1] for seq, start, new in rows])
            same_logits(work, got, expected, rows, f"run {seed}, step {number_of_step} ({said(rows)})")
            for seq, start, new in rows:
                computed[seq] = start + len(new)
                if computed[seq] == len(texts[seq]):  # it leaves: its slots hold nothing any more
                    slots = slot_of.pop(seq)
                    pool.k[:, :, slots], pool.v[:, :, slots] = NAN, NAN
                    free += slots
                    del computed[seq]


def two_steps(work: Work, texts: Sequence[list[int]], order: Sequence[int]) -> list[Tensor]:
    """The texts' prompts in one step, then their last tokens in another; rows in that order, logits in the texts'."""
    pool, slot_of, first = spoiled_pool(40), dict[int, list[int]](), 0
    for seq, text in enumerate(texts):
        slot_of[seq] = list(range(first, first + len(text)))[::-1]  # a slot is no position
        first += len(text)
    found: list[Tensor] = []
    for last in (False, True):
        rows = [(i, len(texts[i]) - 1, texts[i][-1:]) if last else (i, 0, texts[i][:-1]) for i in order]
        got = work.call("step", tiny(), pool, rows, slot_of, changes=(0, 1))
        if not isinstance(got, Tensor) or got.shape != (len(texts), CONFIG.vocab_size) or got.isnan().any():
            step_example(work)
        if not isinstance(got, Tensor) or got.shape != (len(texts), CONFIG.vocab_size):
            raise Wrong(f"the logits must be [{len(texts)}, {CONFIG.vocab_size}], a row for each text; got {kind(got)}")
        if got.isnan().any():
            raise Wrong(f"the logits of step {len(found) + 1} have NaN: a slot is read that holds nothing yet")
        found.append(got[[list(order).index(i) for i in range(len(texts))]])
    return found


@holds(
    "07",
    "step",
    "nothing leaks: with other words in one text, the others' numbers stay the same to the bit",
    hint="somebody looks at keys of another text: does `visible` get q_seq and k_seq, the text numbers of queries and "
    "of keys?",
    # not `visible`: the lesson breaks it on purpose, and the leak is to be seen here
    uses={name: PARTS[name] for name in ("pack", "context")},
)
def step_leaks_nothing(work: Work) -> None:
    draw = seeds.rng(3)
    texts = [some_tokens(draw, n) for n in (5, 3, 8, 2)]
    before = two_steps(work, texts, range(4))
    for changed in range(4):
        other = [token % 60 + 3 for token in texts[changed]]  # all of them others, as many
        after = two_steps(work, [other if i == changed else text for i, text in enumerate(texts)], range(4))
        for number_of_step, (was, now) in enumerate(zip(before, after, strict=True), 1):
            for i in range(4):
                if i != changed and not torch.equal(was[i], now[i]):
                    gap = (was[i] - now[i]).abs().max().item()
                    raise Wrong(
                        f"step {number_of_step}: text {changed} was changed, and text {i}'s logits moved by up to "
                        f"{gap:.3g}; they must not move at all"
                    )
                if i == changed and torch.equal(was[i], now[i]):
                    raise Wrong(f"text {i} was changed, and its own logits stayed the same: are its tokens read?")


@holds(
    "07",
    "step",
    "the order of the rows does not matter",
    hint="something is found by its place in the batch: use the row's own number and its own `last`, as `pack` gave "
    "them.",
    uses=PARTS,
)
def step_any_order(work: Work) -> None:
    draw = seeds.rng(4)
    texts = [some_tokens(draw, n) for n in (2, 6, 4)]
    expected = two_steps(work, texts, (0, 1, 2))
    for order in ((2, 1, 0), (1, 2, 0), (0, 2, 1)):
        for number_of_step, (ours, got) in enumerate(zip(expected, two_steps(work, texts, order), strict=True), 1):
            for i in range(3):
                same(got[i], ours[i], f"step {number_of_step}, rows in order {order}: logits of text {i}", CLOSE)


@holds(
    "07",
    "step",
    "K and V are written to the new tokens' own slots, and nowhere else",
    hint="the slot of position p of text i is slot_of[i][p]; a step writes positions start to start + len(new) - 1 of "
    "each row.",
    uses=PARTS,
)
def step_writes_its_own(work: Work) -> None:
    draw = seeds.rng(5)
    pool, free = spoiled_pool(40), draw.sample(range(40), 40)
    lengths = {4: 5, 9: 3, 2: 7}
    slot_of = {number: [free.pop() for _ in range(n)] for number, n in lengths.items()}
    written: set[int] = set()
    for starts, stops in (((0, 0, 0), (3, 2, 5)), ((3, 2, 5), (5, 3, 6))):
        rows = [(seq, a, some_tokens(draw, b - a)) for seq, a, b in zip(lengths, starts, stops, strict=True)]
        work.call("step", tiny(), pool, rows, slot_of, changes=(0, 1))
        written |= {slot for seq, a, new in rows for slot in slot_of[seq][a : a + len(new)]}
        for name, memory in (("K", pool.k), ("V", pool.v)):
            there = {slot for slot in range(40) if not memory[:, :, slot].isnan().any()}
            if there != written:
                raise Wrong(
                    f"rows ({said(rows)}): {name} should now lie in slots {sorted(written)}; not written: "
                    f"{sorted(written - there)}, written for nobody: {sorted(there - written)}"
                )


@holds(
    "07",
    "step",
    "every new token goes through the layers once, and one row for each text through the head",
    hint="one call of the model with tokens [T]; then model.logits of the rows in `last` only: the head multiplies by "
    "the whole vocabulary.",
    uses=PARTS,
)
def step_counts(work: Work) -> None:
    draw = seeds.rng(6)
    texts = [some_tokens(draw, n) for n in (6, 3, 2, 9)]
    with counting(tiny(), []) as counts:
        two_steps(work, texts, range(4))
    same([step.tokens for step in counts.steps], [16, 4], "tokens pushed through the layers in each step")
    same([step.rows for step in counts.steps], [4, 4], "rows pushed through the head in each step")


# ---- generate


@contextmanager
def spoiled_pools() -> Iterator[None]:
    """Every pool that is made inside holds NaN."""
    init = KVPool.__init__

    def spoiled(pool: KVPool, *args: Any, **kwargs: Any) -> None:
        init(pool, *args, **kwargs)
        pool.k.fill_(NAN)
        pool.v.fill_(NAN)

    KVPool.__init__ = spoiled  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        KVPool.__init__ = init  # type: ignore[method-assign]


@contextmanager
def sound_rows(work: Work) -> Iterator[None]:
    """Inside the block the learner's step refuses rows that cannot be right, in words."""
    own = work.names.get("step")
    if not callable(own):
        yield
        return

    def step(*args: Any, **kwargs: Any) -> Any:
        rows = kwargs.get("rows", args[2] if len(args) > 2 else None)
        if isinstance(rows, list) and all(isinstance(row, tuple | list) and len(row) == 3 for row in rows):
            numbers = [seq for seq, _, _ in rows]
            for seq, _, new in rows:
                if numbers.count(seq) > 1:
                    raise Wrong("a text is twice in one step: is it taken out of `waiting` when it comes in?")
                if isinstance(new, list) and not new:
                    raise Wrong(
                        "step is asked for a text with no new token: it did not get the one of the step before. "
                        "Did you change the list of running texts while going over it?"
                    )
        return own(*args, **kwargs)

    with work.replaced({"step": step}):
        yield


def outputs(work: Work, prompts: list[list[int]], n_new: list[int], most: int) -> list[Any]:
    with spoiled_pools(), sound_rows(work):
        try:
            got = work.call("generate", tiny(), prompts, n_new, most, changes=(0,))
        except Wrong as wrong:
            if not isinstance(wrong.__cause__, IndexError) or "pop from empty list" not in str(wrong.__cause__):
                raise
            raise Wrong(
                f"{wrong}\nif that is `free`: does a text that has ended give its slots back, in time? Are slots taken "
                "for new tokens only, are there never more than max_running texts, and does each leave `waiting`?"
            ) from wrong.__cause__
    if not isinstance(got, list) or len(got) != len(prompts) or not all(isinstance(text, list) for text in got):
        raise Wrong(
            f"generate must return a list of {len(prompts)} lists, the new tokens of each prompt in order; it "
            f"returned {type(got).__name__}"
        )
    return got


def some_work(draw: random.Random) -> tuple[list[list[int]], list[int], int]:
    n = draw.randint(1, 6)
    prompts = [some_tokens(draw, draw.randint(1, 9)) for _ in range(n)]
    return prompts, [draw.choice([1, 2, 3, 7]) for _ in range(n)], draw.randint(1, 4)


def said_work(prompts: list[list[int]], n_new: list[int], most: int) -> str:
    return f"prompts of {[len(prompt) for prompt in prompts]} tokens, n_new {n_new}, max_running {most}"


def schedule(prompts: list[list[int]], n_new: list[int], most: int) -> list[list[tuple[int, int]]]:
    """(new tokens, positions read) of each text in each step: a free place is filled at once, in order."""
    waiting, running, steps = list(range(len(prompts))), dict[int, int](), []
    while waiting or running:
        while waiting and len(running) < most:
            running[waiting.pop(0)] = 0
        steps.append([(1 if made else len(prompts[i]), len(prompts[i]) + made) for i, made in running.items()])
        running = {i: made + 1 for i, made in running.items() if made + 1 < n_new[i]}
    return steps


@holds(
    "07",
    "generate",
    "each text comes out as if it were alone, from equal logits at every step",
    hint="the first wrong token tells much. At once: is the prompt fed from position 0? Later: does another text write "
    "into its slots, or does it go on after its last token? And if `free` runs empty: does a text that has ended leave "
    "in time and give its slots back, and are there never more than max_running?",
    uses=PARTS | {"step": right_step},
)
def generate_equals_alone(work: Work) -> None:
    example = [some_tokens(seeds.rng(7), n) for n in (6, 2, 3, 1, 4)], [5, 1, 2, 3, 1], 2
    for prompts, n_new, most in [example, *(some_work(seeds.rng(seed)) for seed in range(10))]:
        what = said_work(prompts, n_new, most)
        seen: list[Tensor] = []
        hook = tiny().head.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        try:
            got = outputs(work, prompts, n_new, most)
        finally:
            hook.remove()
        for i, (prompt, n) in enumerate(zip(prompts, n_new, strict=True)):
            tokens, right = greedy(prompt, n)
            same([*map(int, got[i])], tokens, f"{what}: new tokens of text {i}")
            for j in range(n):
                gap = min((rows - right[j]).abs().amax(-1).min().item() for rows in seen)
                if not gap <= CLOSE:
                    raise Wrong(f"{what}: the logits behind token {j} of text {i} are off by {gap:.3g}, or more")


@holds(
    "07",
    "generate",
    "a step holds the whole prompt of a newcomer and one token of everyone else; a free place is filled at once",
    hint="start is how many tokens of a text are computed: everything from there on is new, so one token once the "
    "prompt is in. Whoever has all its tokens leaves before the next step, and who waits comes in.",
    uses=PARTS | {"step": right_step},
)
def generate_steps(work: Work) -> None:
    draw = seeds.rng(7)
    cases = [([some_tokens(draw, n) for n in (6, 2, 3, 1, 4)], [5, 1, 2, 3, 1], 2)]
    for prompts, n_new, most in [*cases, *(some_work(draw) for _ in range(6))]:
        with counting(tiny(), []) as counts:
            outputs(work, prompts, n_new, most)
        expected = [sum(new for new, _ in step) for step in schedule(prompts, n_new, most)]
        made = [step.tokens for step in counts.steps]
        same(made, expected, f"{said_work(prompts, n_new, most)}: tokens in each step")


@holds(
    "07",
    "generate",
    "attention reads no slot but those of the texts in the step",
    hint="S is the sum of the lengths of the running texts. Drop a text's slots from slot_of when it ends, and give "
    "`step` the running ones only.",
    uses=PARTS | {"step": right_step},
)
def generate_reads(work: Work) -> None:
    heads = CONFIG.n_layers * CONFIG.n_heads
    for seed in range(30, 34):
        prompts, n_new, most = some_work(seeds.rng(seed))
        with counting(tiny(), []) as counts:
            outputs(work, prompts, n_new, most)
        for number, (step, texts) in enumerate(zip(counts.steps, schedule(prompts, n_new, most), strict=False), 1):
            T, S = sum(new for new, _ in texts), sum(size for _, size in texts)
            if step.tokens != T:
                raise Wrong(f"{said_work(prompts, n_new, most)}: step {number} has {step.tokens} tokens, and not {T}")
            if not 0 < step.scores <= heads * T * S:
                raise Wrong(
                    f"{said_work(prompts, n_new, most)}: step {number} may compute T x S = {T} x {S} scores for each "
                    f"layer and head; attention.sdpa was asked for {step.scores / heads:g}"
                )


@holds(
    "07",
    "generate",
    "memory is for max_running texts, however many there are: freed slots are used again",
    hint="the pool needs max_running times the longest text's positions; a text that ends gives its slots back to "
    "`free`.",
    uses=PARTS | {"step": right_step},
)
def generate_memory(work: Work) -> None:
    draw = seeds.rng(8)
    prompts, n_new, most = [some_tokens(draw, 5) for _ in range(7)], [3] * 7, 2
    with counting(tiny(), []) as counts:
        got = outputs(work, prompts, n_new, most)
    for i, prompt in enumerate(prompts):
        same([*map(int, got[i])], greedy(prompt, 3)[0], f"new tokens of text {i}")
    per_slot = CONFIG.kv_bytes_per_token(8)
    slots = counts.peak_reserved_bytes // per_slot - 1  # one more is the pool's scratch
    if slots > most * 8:
        raise Wrong(f"7 texts of at most 8 tokens, 2 at once: {most * 8} slots are enough, and the pool has {slots}")


# ---- scores


def check_scores(work: Work, function: str) -> None:
    dense = function == "scores_dense"
    draw = seeds.rng(9)
    cases = [([4, 2, 1], [4, 2, 1]), ([1] * 8, [100] * 8), ([100] + [1] * 7, [100] * 8), ([5], [5]), ([1], [40])]
    for _ in range(20):
        news = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))]
        cases.append((news, [new + draw.randint(0, 30) for new in news]))
    for news, lengths in cases:
        q_pos = torch.cat([torch.arange(size - new, size) for new, size in zip(news, lengths, strict=True)])
        k_pos = torch.cat([torch.arange(size) for size in lengths])
        if dense:
            expected = len(q_pos) * len(k_pos)
        else:
            expected = sum(p + 1 for new, size in zip(news, lengths, strict=True) for p in range(size)[-new:])
        got = work.call(function, news, lengths)
        got = int(got) if isinstance(got, float) and got.is_integer() else got
        same(got, expected, f"{function}({news}, {lengths})")


@holds(
    "07",
    "scores_dense",
    "as many scores as the mask has cells",
    hint="the mask has a row for every new token of anybody, T = sum(news), and a column for every position of "
    "anybody, S = sum(lengths).",
)
def scores_dense_cells(work: Work) -> None:
    check_scores(work, "scores_dense")


@holds(
    "07",
    "scores_needed",
    "as many scores as the mask has visible cells",
    hint="of a text with t new tokens and s positions, the last new token sees s, the one before it s - 1, and so on "
    "down to s - t + 1. Count them on the grid of 4, 2 and 1: 10 + 3 + 1.",
)
def scores_needed_cells(work: Work) -> None:
    check_scores(work, "scores_needed")
