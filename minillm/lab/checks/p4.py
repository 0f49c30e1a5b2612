"""Problem set 4, paged and shared memory: a text that comes back, as early as any plan allows; and a beam search whose
hypotheses share blocks, by its books, its copies, and every score that of a search that keeps nothing."""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minillm import attention
from minillm.lab.checking import holds
from minillm.lab.checks.c10 import Memory, right_give_back, right_hold, right_take
from minillm.lab.seeds import generator, rng
from minillm.lab.tiny import TINY
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama

# ---- come_back


class Step:
    """Seconds of a step with n tokens of one text, the last of its kv_len positions. Whole numbers, so that two plans
    are equally good or not. It remembers what it was asked. `uneven`: added if n is no multiple of `tile`, so that a
    step of more tokens may be the shorter one."""

    def __init__(self, base: int, per_token: int, per_block: int, size: int, uneven: int = 0, tile: int = 1):
        self.base, self.per_token, self.per_block, self.size = base, per_token, per_block, size
        self.uneven, self.tile = uneven, tile
        self.asked: list[tuple[int, int]] = []

    def __call__(self, n: int, kv_len: int) -> int:
        self.asked.append((n, kv_len))
        rest = self.uneven if n % self.tile else 0
        return self.base + self.per_token * n + self.per_block * -(-kv_len // self.size) + rest

    def __repr__(self) -> str:
        reads = f" + {self.per_block} * ceil(kv_len / {self.size})" if self.per_block else ""
        rest = f" + ({self.uneven} if n % {self.tile} else 0)" if self.uneven else ""
        return f"{self.base} + {self.per_token} * n{reads}{rest}"

    def __deepcopy__(self, memo: Any) -> "Step":
        return self  # to be asked is no change


Text = tuple[int, int, int, int, Step, int]  # stored, found, size, budget, step, copy
HAND: Text = (18, 1, 4, 6, Step(2, 1, 0, 4), 5)


def said(text: Text) -> str:
    stored, found, size, budget, step, copy = text
    return f"stored={stored}, found={found}, size={size}, budget={budget}, copy={copy}, a step of n tokens takes {step}"


def blocks_of(text: Text) -> int:
    return -(-text[0] // text[2])


def seconds_with(text: Text, computed: int) -> int:
    """When everything is there, if so many blocks behind the found ones are computed, in steps of `budget` tokens."""
    stored, found, size, budget, step, copy = text
    at, stop, took = found * size, min(stored, (found + computed) * size), 0
    while at < stop:
        n = min(budget, stop - at)
        at += n
        took += step(n, at)
    return max(took, copy * (blocks_of(text) - found - computed))


def best_of(text: Text) -> tuple[int, int]:
    every = [seconds_with(text, n) for n in range(blocks_of(text) - text[1] + 1)]
    return every.index(min(every)), min(every)


def some_texts(seed: int, n: int) -> Iterator[Text]:
    draw = rng(seed)
    for _ in range(n):
        size, blocks = draw.choice((1, 2, 3, 4, 8)), draw.randint(1, 12)
        stored = blocks * size - draw.randrange(size)
        found = draw.choice((0, 0, draw.randint(0, stored // size)))
        step = Step(draw.randint(0, 9), draw.randint(1, 4), draw.choice((0, 1, 3)), size)
        yield stored, found, size, draw.randint(1, 3 * size + 2), step, draw.randint(1, 6 * size)


def uneven_texts(seed: int, n: int) -> Iterator[Text]:
    """The best plan computes four blocks, a whole tile; one, two or three of them take longer than copying all."""
    draw = rng(seed)
    for _ in range(n):
        size, blocks, found = draw.choice((1, 2, 4)), draw.randint(5, 7), draw.randint(0, 2)
        copy = draw.randint(size + 1, 3 * size + 1)
        step = Step(0, 1, 0, size, copy * blocks + draw.randint(1, 9), 4 * size)
        yield (found + blocks) * size, found, size, 4 * size * draw.randint(1, 2), step, copy


def answer(work: Work, text: Text) -> tuple[int, float]:
    got = work.call("come_back", *text)
    if got is None and text[1] == blocks_of(text):
        raise Wrong("come_back returned None where all blocks are found: 0 are left to compute, and that is a plan too")
    if got is None:
        raise Wrong("come_back returned None: is a `return` missing, or was no plan tried?")
    if not isinstance(got, tuple | list) or len(got) != 2:  # the same words for all texts: then it is told once
        raise Wrong(f"come_back must return two numbers, (blocks, seconds); it returned {type(got).__name__}")
    blocks, seconds = got
    if not isinstance(blocks, int) or isinstance(blocks, bool) or not isinstance(seconds, int | float):
        kinds = f"{type(blocks).__name__} and {type(seconds).__name__}"
        raise Wrong(f"come_back must return whole blocks and seconds, numbers of Python; it returned {kinds}")
    if not 0 <= blocks <= blocks_of(text) - text[1]:
        raise Wrong(
            f"{said(text)}: {blocks} blocks are to be computed; {blocks_of(text)} hold the text, and {text[1]} of them "
            "are found"
        )
    return blocks, seconds


def must_be_best(work: Work, text: Text) -> None:
    blocks, seconds = answer(work, text)
    expected, least = best_of(text)
    true = seconds_with(text, blocks)
    if abs(seconds - true) > 1e-9:
        raise Wrong(
            f"{said(text)}: with {blocks} computed and the other {blocks_of(text) - text[1] - blocks} copied it is "
            f"back after {true} s, and come_back says {seconds:g}"
        )
    if true > least:
        raise Wrong(
            f"{said(text)}: with {blocks} computed it is back after {true} s; with {expected} it is after {least} s"
        )
    if blocks != expected:
        raise Wrong(
            f"{said(text)}: {blocks} and {expected} computed take {least} s both; the smaller number is asked: "
            "a later plan has to be better, not as good"
        )


@holds(
    "p4",
    "come_back",
    "by hand: of four blocks that are not found, two are computed while the other two are copied: 12 s",
    hint="try every number of computed blocks from 0 to all. Both works go on at once: it takes the longer of the two. "
    "Write down the row of the table that the message is about.",
)
def back_by_hand(work: Work) -> None:
    must_be_best(work, HAND)
    draw = rng(401)
    for _ in range(8):  # no part of a block, one token in a step's time
        blocks, found, size = draw.randint(2, 8), draw.randint(0, 2), draw.choice((2, 4))
        step = Step(draw.randint(0, 3), 1, 0, size)
        must_be_best(work, (blocks * size, found, size, size, step, draw.randint(1, 3 * size)))


@holds(
    "p4",
    "come_back",
    "never later than with any other number of blocks, for texts, blocks, budgets and machines of all kinds",
    hint="write down the table for the text that the message is about. Its steps have `budget` tokens each, and the "
    "last what is left. No row follows from another: `step` may be any function.",
)
def back_is_best(work: Work) -> None:
    for text in (*some_texts(402, 150), *uneven_texts(406, 20)):
        must_be_best(work, text)


@holds(
    "p4",
    "come_back",
    "what is asked of `step` can happen: behind the found blocks, at most `budget` tokens, all before them counted",
    hint="kv_len counts from the first position of the text: where the step ends. The first computed position is "
    "found * size.",
)
def back_steps(work: Work) -> None:
    for text in some_texts(403, 60):
        stored, found, size, budget, step, _ = text
        step.asked.clear()
        answer(work, text)
        asked = list(step.asked)
        if not asked and found < blocks_of(text):
            raise Wrong(f"{said(text)}: `step` was never asked, so it cannot be known what computing takes")
        for n, kv_len in asked:
            where = f"{said(text)}: step({n}, {kv_len}) was asked"
            if n < 1:
                raise Wrong(f"{where}; a step without tokens is not made")
            if n > budget:
                raise Wrong(f"{where}; more than {budget} tokens are not taken in one step")
            if kv_len > stored:
                raise Wrong(f"{where}; the text has {stored} stored positions")
            if kv_len - n < found * size:
                raise Wrong(f"{where}: it begins at position {kv_len - n}, and {found * size} are found already")
            if (kv_len - n - found * size) % budget:
                raise Wrong(
                    f"{where}: it begins at position {kv_len - n}; the steps before it have {budget} each, from "
                    f"position {found * size} on"
                )


@holds(
    "p4",
    "come_back",
    "a last block that is not full: it is copied as one block, and only its own positions are computed",
    hint="blocks: stored / size rounded up. Compute up to position (found + computed) * size, never past stored.",
)
def back_last_block(work: Work) -> None:
    draw = rng(404)
    for _ in range(40):
        size = draw.choice((3, 4, 8, 16))
        blocks = draw.randint(1, 5)
        stored = (blocks - 1) * size + draw.randint(1, size - 1)
        found = draw.randint(0, blocks - 1)
        step = Step(0, draw.randint(1, 3), 0, size)
        must_be_best(work, (stored, found, size, draw.choice((1, size, 64)), step, draw.randint(1, 3 * size)))


@holds(
    "p4",
    "come_back",
    "at the ends: all copied if computing is dear, all computed if the bus is slow, 0 s if all is found",
    hint="0 computed and all computed are plans like any other: range(n + 1) has both. With nothing computed there is "
    "no step, and none of its fixed cost.",
)
def back_ends(work: Work) -> None:
    draw = rng(405)
    for _ in range(20):
        size, blocks = draw.choice((1, 2, 4)), draw.randint(1, 7)
        stored = blocks * size
        found = draw.randint(0, blocks - 1)
        dear, cheap = Step(1000, 100, 0, size), Step(0, 1, 0, size)
        must_be_best(work, (stored, found, size, 2 * size, dear, draw.randint(1, 9)))
        must_be_best(work, (stored, found, size, 2 * size, cheap, 10_000))
        must_be_best(work, (stored, blocks, size, 2 * size, dear, draw.randint(1, 9)))


# ---- beam_step

Moves = list[tuple[int, int]]
BeamStep = Callable[
    [Memory, list[list[int]], Tensor, Tensor, int, int], tuple[list[list[int]], list[int], Tensor, Moves]
]


def right_beam_step(
    memory: Memory, tables: list[list[int]], scores: Tensor, logprobs: Tensor, position: int, n: int
) -> tuple[list[list[int]], list[int], Tensor, Moves]:
    best, at = (scores[:, None] + logprobs).flatten().topk(n)  # [n]
    parents, tokens = (at // logprobs.shape[1]).tolist(), (at % logprobs.shape[1]).tolist()
    new = [right_hold(memory, tables[b]) for b in parents]
    for table in tables:
        right_give_back(memory, table)
    moves: Moves = []
    size, i = memory.size, position // memory.size
    for table in new:
        if i == len(table):
            table.append(right_take(memory))
        elif memory.owners[table[i]] > 1:
            old, table[i] = table[i], right_take(memory)
            memory.owners[old] -= 1
            moves += [(old * size + j, table[i] * size + j) for j in range(position % size)]
    return new, tokens, best, moves


@dataclass
class Beams:
    """What a call is given, and what the rest of the world holds."""

    memory: Memory
    tables: list[list[int]]
    scores: Tensor  # [B]
    logprobs: Tensor  # [B, V]
    position: int
    n: int
    others: list[list[int]]  # tables of texts that have nothing to do with this search

    def __str__(self) -> str:
        size, free = self.memory.size, list(self.memory.free)
        return f"blocks of {size}, tables {self.tables}, free {free}, position {self.position}, n={self.n}"

    @property
    def best(self) -> tuple[list[int], list[int], Tensor]:
        """(parents, tokens, scores) of the n that are kept."""
        V = self.logprobs.shape[1]
        best, at = (self.scores[:, None] + self.logprobs).flatten().topk(self.n)
        return (at // V).tolist(), (at % V).tolist(), best

    @property
    def copies(self) -> int:
        """How many blocks must be copied: of all who go on from one half-full block, one keeps it."""
        if self.position % self.memory.size == 0:
            return 0
        i = self.position // self.memory.size
        return self.n - len({self.tables[b][i] for b in self.best[0]})


def by_hand() -> Beams:
    """Blocks of 2. The first hypothesis has two children, the second one, the third none."""
    memory = Memory.fresh(7, 2)
    tables = [right_hold(memory, blocks) for blocks in ([0, 1], [0, 2], [0, 3])]
    scores = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64)
    logprobs = torch.tensor([[-0.5, -1.25, -3.0], [-4.0, -0.75, -5.0], [-1.0, -2.0, -3.0]], dtype=torch.float64)
    return Beams(memory, tables, scores, logprobs, 3, 3, [])


def some_logprobs(seed: int, rows: int, V: int) -> Tensor:
    return torch.randn(rows, V, generator=generator(seed), dtype=torch.float64).mul(2).log_softmax(-1)


def some_beams(seed: int, tight: bool = False) -> Beams:
    """In the middle of a search: a prompt, some steps made by the right function, and then the step in question. If
    tight, there are just as many blocks as it needs."""
    draw = rng(seed)
    size, V = draw.choice((1, 2, 3, 4)), draw.randint(4, 9)
    width = draw.randint(2, 5)
    memory = Memory.fresh(60, size)
    blocks = draw.sample(range(60), 60)
    memory.free = type(memory.free).fromkeys(blocks)
    length = draw.randint(1, 9)
    tables = [[right_take(memory) for _ in range(-(-length // size))]]
    others = [right_hold(memory, tables[0][: length // size])] if draw.random() < 0.5 else []  # found its beginning
    others.append([right_take(memory)])
    scores = torch.zeros(1, dtype=torch.float64)
    for step in range(draw.randint(0, 5)):
        logprobs = some_logprobs(1000 * seed + step, len(tables), V)
        tables, _, scores, _ = right_beam_step(memory, tables, scores, logprobs, length, min(width, V * len(tables)))
        length += 1
    n = min(draw.randint(max(1, width - 1), width + 1), V * len(tables))
    beams = Beams(memory, tables, scores, some_logprobs(1000 * seed + 99, len(tables), V), length, n, others)
    for block in list(memory.free)[:3]:  # something rests there, and can be found
        memory.index["old", block] = block
        memory.key_of[block] = ("old", block)
    if tight:
        after = deepcopy(beams)
        right_beam_step(after.memory, after.tables, scores, beams.logprobs, length, n)
        needed = max(sum(count > 0 for count in m.owners) for m in (memory, after.memory))
        for block in list(memory.free)[needed - sum(count > 0 for count in memory.owners) :]:
            memory.owners[block] = 1  # somebody else's
            del memory.free[block]
            others.append([block])
    return beams


def many_beams(seed: int, n: int, tight: bool = False) -> Iterator[Beams]:
    for i in range(n):
        yield some_beams(100 * seed + i, tight)


Result = tuple[list[list[int]], list[int], Tensor, Moves]


def result_of(work: Work, beams: Beams) -> Result:
    """What the learner's function returns, once it has the right form. Changes the memory and the tables."""
    given = (beams.memory, beams.tables, beams.scores, beams.logprobs, beams.position, beams.n)
    words, free = str(beams), len(beams.memory.free)
    try:
        got = work.call("beam_step", *given, changes=(0, 1))
    except Wrong as wrong:
        if "dictionary is empty" in str(wrong):
            raise Wrong(
                f"{words}: a block was taken when none was free. {free} free and those of hypotheses that nobody "
                "continues are enough: give these back before you take"
            ) from wrong
        raise
    if got is None:
        raise Wrong("beam_step returned None: is a `return` missing?")
    if not isinstance(got, tuple | list) or len(got) != 4:
        raise Wrong("beam_step must return four things: tables, tokens, scores, moves")
    tables, tokens, scores, moves = got
    for name, found in (("tables", tables), ("tokens", tokens), ("moves", moves)):
        if not isinstance(found, list):
            raise Wrong(f"{name}, which beam_step returned, is {type(found).__name__}; it must be a list")
    if len(tables) != beams.n or not all(isinstance(table, list) for table in tables):
        raise Wrong(f"{words}: tables must be {beams.n} lists of blocks, and is {tables}")
    if not all(isinstance(token, int) for token in tokens):
        raise Wrong(f"tokens must be whole numbers of Python; use .tolist(); got {tokens}")
    if not isinstance(scores, Tensor):
        raise Wrong(f"scores is {type(scores).__name__}; it must be a tensor [n]")
    n_slots = len(beams.memory.owners) * beams.memory.size
    for move in moves:
        if not isinstance(move, tuple | list) or len(move) != 2 or not all(0 <= slot < n_slots for slot in move):
            raise Wrong(f"moves must be pairs of slots (from, to) below {n_slots}; one is {move!r}")
    blocks = len(beams.memory.owners)
    for table in tables:
        if not all(isinstance(block, int) and 0 <= block < blocks for block in table):
            raise Wrong(f"a table must be a list of block numbers below {blocks}; one is {table}")
    return tables, tokens, scores, moves


@holds(
    "p4",
    "beam_step",
    "the n best of all continuations, the best first: their tokens, their scores, and whose beginning they have",
    hint="scores[:, None] + logprobs is [B, V]; flatten it, topk(n); an index is parent * V + token. A score is "
    "that of the whole text, so add it up.",
)
def beams_best(work: Work) -> None:
    for beams in [by_hand(), *many_beams(41, 25)]:
        before, words = deepcopy(beams), str(beams)
        tables, tokens, scores, _ = result_of(work, beams)
        parents, expected, best = before.best
        same(scores, best, f"{words}: scores")
        if tokens != expected:
            raise Wrong(f"{words}: tokens must be {expected} (those of parents {parents}), and are {tokens}")
        whole = before.position // before.memory.size  # blocks that nobody writes any more
        for i, (table, parent) in enumerate(zip(tables, parents, strict=True)):
            if table[:whole] != before.tables[parent][:whole]:
                raise Wrong(
                    f"{words}: hypothesis {i} of the new ones continues {parent} of the old ones, so its table must "
                    f"begin with {before.tables[parent][:whole]}; it is {table}"
                )


def check_books(beams: Beams, tables: Sequence[list[int]], words: str) -> None:
    memory, i = beams.memory, beams.position // beams.memory.size
    for table in tables:
        if len(table) != i + 1:
            raise Wrong(
                f"{words}: position {beams.position} lies in block {i} of a text, so each table needs {i + 1} blocks; "
                f"one is {table}"
            )
    if len({id(table) for table in tables}) < len(tables):
        raise Wrong(f"{words}: two hypotheses have one and the same list as their table; what one adds, both have")
    for block, owners in enumerate(memory.owners):
        count = sum(table.count(block) for table in [*tables, *beams.others])
        if owners != count:
            raise Wrong(f"{words}: block {block} stands in {count} tables then, and its owners are {owners}")
        if count and block in memory.free:
            raise Wrong(f"{words}: block {block} is held and free at once; the next text would get it")
        if not count and block not in memory.free:
            raise Wrong(f"{words}: block {block} is held by nobody and not free; it is lost")
    for h, table in enumerate(tables):
        if memory.owners[table[i]] != 1:
            raise Wrong(
                f"{words}: hypothesis {h} writes position {beams.position} into block {table[i]}, which has "
                f"{memory.owners[table[i]]} owners; the others would read its K and V"
            )


@holds(
    "p4",
    "beam_step",
    "the books: owners are the tables that a block stands in, the rest is free, and each writes in a block of its own",
    hint="hold once for each child, give back once for each old table. Whoever takes a copy leaves the old block: one "
    "owner less.",
)
def beams_books(work: Work) -> None:
    for beams in [by_hand(), *many_beams(42, 40)]:
        words = str(beams)
        tables, *_ = result_of(work, beams)
        check_books(beams, tables, words)


@holds(
    "p4",
    "beam_step",
    "every child finds its parent's K and V where its table says, and no slot is copied without need",
    hint="of all the children of a half-full block the last one keeps it. Copy position % size slots, from the "
    "parent's block; at the beginning of a block there is nothing to copy.",
)
def beams_copies(work: Work) -> None:
    for beams in [by_hand(), *many_beams(43, 40)]:
        before, words, size = deepcopy(beams), str(beams), beams.memory.size
        tables, _, _, moves = result_of(work, beams)
        content = list(range(len(before.memory.owners) * size))  # of each slot: where it was
        for source, (_, to) in zip([content[source] for source, _ in moves], moves, strict=True):
            content[to] = source
        for i, (table, parent) in enumerate(zip(tables, before.best[0], strict=True)):
            for p in range(before.position):
                theirs = before.tables[parent][p // size] * size + p % size
                if p // size >= len(table):
                    raise Wrong(f"{words}: table {table} of hypothesis {i} ends before position {p}, which is stored")
                slot = table[p // size] * size + p % size
                if content[slot] != theirs:
                    raise Wrong(
                        f"{words}: position {p} of new hypothesis {i} is in slot {slot}, whose content is that of slot "
                        f"{content[slot]}; its parent, {parent}, has it in slot {theirs}. The moves are {moves}"
                    )
        need = before.copies * (before.position % size)
        if len(moves) > need:
            raise Wrong(f"{words}: {len(moves)} slots are copied, and {need} are enough; the moves are {moves}")


@holds(
    "p4",
    "beam_step",
    "in memory that is just large enough: what nobody continues is given back before anything is taken",
    hint="three passes: hold for all children, give back all old tables, and only then take. If children are served "
    "one by one, a block that a later child needs may be taken for an earlier one.",
)
def beams_tight(work: Work) -> None:
    for beams in many_beams(44, 40, tight=True):
        words = str(beams)
        tables, *_ = result_of(work, beams)
        check_books(beams, tables, words)


# ---- beam_step in a search with a model


@cache
def model() -> Llama:
    return Llama.random(TINY, seed=0, dtype=torch.float64)


def naive_search(prompt: Sequence[int], n: int, steps: int) -> tuple[list[list[int]], Tensor]:
    """Beam search that keeps nothing: every hypothesis is computed anew, whole, in every step."""
    texts, scores = [list(prompt)], torch.zeros(1, dtype=torch.float64)
    for _ in range(steps):
        rows = []
        for text in texts:
            hidden = model()(torch.tensor(text), torch.arange(len(text)), attention.SelfAttend(torch.arange(len(text))))
            rows.append(model().logits(hidden[-1]).log_softmax(-1))
        total = scores[:, None] + torch.stack(rows)  # [B, V]
        scores, at = total.flatten().topk(n)
        texts = [[*texts[i // total.shape[1]], i % total.shape[1]] for i in at.tolist()]
    return texts, scores


class Search:
    """Beam search on blocks: after each step every slot that no hypothesis has stored anything in is NaN."""

    def __init__(self, prompt: Sequence[int], n: int, size: int, n_blocks: int):
        self.memory = Memory.fresh(n_blocks, size)
        self.k, self.v = (
            torch.full((TINY.n_layers, n_blocks * size, TINY.n_kv_heads, TINY.head_dim), math.nan, dtype=torch.float64)
            for _ in range(2)
        )  # [layers, slots, Hkv, D]
        self.n, self.texts, self.copied, self.held = n, [list(prompt)], 0, []  # type: ignore[var-annotated]
        self.tables = [[right_take(self.memory) for _ in range(-(-len(prompt) // size))]]
        self.scores = torch.zeros(1, dtype=torch.float64)
        self.logprobs = self.forward([list(prompt)], 0)

    @property
    def beams(self) -> Beams:
        return Beams(self.memory, self.tables, self.scores, self.logprobs, len(self.texts[0]), self.n, [])

    def slots(self, table: Sequence[int], length: int) -> Tensor:
        size = self.memory.size
        return torch.tensor([table[p // size] * size + p % size for p in range(length)], dtype=torch.int64)

    def forward(self, new: Sequence[Sequence[int]], start: int) -> Tensor:
        """The new tokens of each hypothesis, equally many, from position `start` on; log-probabilities [B, V]."""
        rows = []
        for table, tokens in zip(self.tables, new, strict=True):
            positions, length = torch.arange(start, start + len(tokens)), start + len(tokens)
            held = self.slots(table, length)

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor = positions, held: Tensor = held) -> Any:
                self.k[layer, held[at]], self.v[layer, held[at]] = k, v
                mask = attention.visible(at, torch.arange(len(held)))
                return attention.sdpa(q, self.k[layer, held], self.v[layer, held], mask)

            hidden = model()(torch.tensor(list(tokens)), positions, attend)
            rows.append(model().logits(hidden[-1]).log_softmax(-1))
        return torch.stack(rows)

    def step(self, result: Result, parents: Sequence[int]) -> None:
        """Does what a beam step has decided, then computes the new tokens."""
        position = len(self.texts[0])
        self.tables, tokens, self.scores, moves = result
        if moves:
            source, to = torch.tensor(moves).T
            self.k[:, to], self.v[:, to] = self.k[:, source].clone(), self.v[:, source].clone()
            self.copied += len({slot // self.memory.size for slot in to.tolist()})
        free = torch.ones(self.k.shape[1], dtype=torch.bool)
        for table in self.tables:
            free[self.slots(table, position)] = False
        self.k[:, free] = self.v[:, free] = math.nan
        self.texts = [[*self.texts[b], token] for b, token in zip(parents, tokens, strict=True)]
        self.logprobs = self.forward([[token] for token in tokens], position)
        self.held.append(sum(count > 0 for count in self.memory.owners))


def search(step: BeamStep, prompt: Sequence[int], n: int, steps: int, size: int, n_blocks: int) -> Search:
    """A whole search with one's own beam_step: its texts, scores, blocks held after each step, blocks copied."""
    found = Search(prompt, n, size, n_blocks)
    for _ in range(steps):
        beams = found.beams
        parents = beams.best[0]
        result = step(beams.memory, beams.tables, beams.scores, beams.logprobs, beams.position, beams.n)
        found.step(result, parents)
    return found


@holds(
    "p4",
    "beam_step",
    "a whole search on blocks, with NaN in all free slots: texts and scores are those of a search that keeps nothing",
    hint="if the properties above hold, this holds: look at them first. Moves are done all at once, before the step.",
)
def beams_with_a_model(work: Work) -> None:
    draw = rng(45)
    for size in (1, 3, 4):
        prompt = [draw.randrange(2, TINY.vocab_size) for _ in range(draw.randint(2, 9))]
        n, steps = draw.randint(2, 4), draw.randint(5, 8)
        words = f"a prompt of {len(prompt)}, blocks of {size}, {n} hypotheses"
        found = Search(prompt, n, size, n * (-(-(len(prompt) + steps) // size) + 1))
        for step in range(steps):
            beams = found.beams
            parents = beams.best[0]
            result = result_of(work, beams)
            check_books(beams, result[0], words)
            found.step(result, parents)
            if found.logprobs.isnan().any():
                raise Wrong(
                    f"{words}, step {step}: a hypothesis read a slot in which nothing of its text is stored. Its table "
                    "leads to the wrong block, or a copy is missing"
                )
        texts, scores = naive_search(prompt, n, steps)
        for i, (mine, theirs) in enumerate(zip(found.texts, texts, strict=True)):
            if mine != theirs:
                raise Wrong(f"{words}: hypothesis {i} is {mine[len(prompt) :]}; it must be {theirs[len(prompt) :]}")
        same(found.scores, scores, f"{words}: scores")
