"""Lesson 06, padded batch: every row of the rectangle makes what it would make alone."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minillm.attention import SelfAttend
from minillm.batch import rectangle
from minillm.bench.harness import Job, run
from minillm.cache import CachedAttend, KVCache
from minillm.config import Config
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama

TINY = Config(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    context=256,
)
EXACT = 1e-9  # how far float64 may be off
POISON = 1e4  # in every place of the memory that is not written yet


@cache
def model() -> Llama:
    return Llama.random(TINY, seed=0, dtype=torch.float64)


@cache
def alone(prompt: tuple[int, ...], n: int) -> tuple[list[int], Tensor]:
    """What one text makes without company and without a memory: n tokens, and the hidden states [n, d] behind them."""
    tokens, rows = list(prompt), []
    for _ in range(n):
        positions = torch.arange(len(tokens))
        hidden = model()(torch.tensor(tokens), positions, SelfAttend(positions))[-1:]  # [1, d]
        rows.append(hidden)
        tokens.append(int(model().logits(hidden).argmax()))
    return tokens[len(prompt) :], torch.cat(rows)


def texts(draw: random.Random, B: int, longest: int = 10, most: int = 7) -> tuple[list[list[int]], list[int]]:
    """B prompts and how many tokens each is to get."""
    prompts = [[draw.randrange(2, 64) for _ in range(draw.randint(1, longest))] for _ in range(B)]
    return prompts, [draw.randint(1, most) for _ in range(B)]


# the lesson's three rows first, then some where the longest prompt gets the fewest tokens, or the most, or is alone
FIXED: list[tuple[list[list[int]], list[int]]] = [
    ([[9, 17, 5, 40, 33, 21, 8], [9, 30, 12], [9, 50, 51, 52, 53]], [2, 5, 3]),
    ([[7, 3, 60, 11], [25]], [5, 1]),
    ([[25], [7, 3, 60, 11, 19, 42]], [6, 1]),
    ([[44, 18, 6]], [4]),
]


def cases(seed: int, n: int) -> Iterator[tuple[list[list[int]], list[int]]]:
    draw = seeds.rng(seed)
    yield from FIXED
    for _ in range(n):
        yield texts(draw, draw.randint(2, 5))


# ---- rectangle


def parts(work: Work, new: Sequence[Sequence[int]], starts: Sequence[int], size: int) -> tuple[Any, Any, Any]:
    """The three tensors that the learner's function made."""
    got = work.call("rectangle", new, starts, size)
    if got is None:
        raise Wrong("rectangle returned None: is a `return` missing?")
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong(
            f"rectangle returned {type(got).__name__}; it must return three tensors: tokens [B, T], positions [B, T] "
            "and last [B]"
        )
    return got[0], got[1], got[2]


def asked(new: Sequence[Sequence[int]], starts: Sequence[int], size: int) -> str:
    return f"for new = {[list(row) for row in new]}, starts = {list(starts)}, size = {size}"


def rows_of(seed: int) -> Iterator[tuple[list[list[int]], list[int], int]]:
    """Rows at any point of their texts, with one place at least that no real token takes."""
    yield [[11, 12, 13], [14]], [5, 9], 12
    yield [[11, 12, 13, 15], [14]], [5, 9], 11  # the pads run past the end
    draw = seeds.rng(seed)
    for _ in range(20):
        new, _ = texts(draw, draw.randint(1, 5), 6)
        starts = [draw.randint(0, 9) for _ in new]
        yield new, starts, max(s + len(row) for s, row in zip(starts, new, strict=True)) + draw.randint(1, 4)


def expected_positions(new: Sequence[Sequence[int]], starts: Sequence[int], size: int) -> Tensor:
    T = max(len(row) for row in new)
    return torch.tensor([[min(start + t, size - 1) for t in range(T)] for start in starts])


@holds(
    "06",
    "rectangle",
    "tokens stand on the left, pads (0) on the right",
    hint="T is the length of the longest row. Fill each row up behind its last token: row + [0] * (T - len(row)).",
)
def tokens_left(work: Work) -> None:
    for new, starts, size in rows_of(1):
        tokens, _, _ = parts(work, new, starts, size)
        T = max(len(row) for row in new)
        expected = torch.tensor([[*row, *[0] * (T - len(row))] for row in new])
        same(tokens, expected, f"tokens {asked(new, starts, size)}")


@holds(
    "06",
    "rectangle",
    "real tokens count on from the start of their own row",
    hint="Each row has its own start: starts as a column [B, 1] plus 0 .. T-1 gives [B, T].",
)
def own_starts(work: Work) -> None:
    for new, starts, size in rows_of(2):
        tokens, positions, _ = parts(work, new, starts, size)
        like = expected_positions(new, starts, size)
        if not isinstance(positions, Tensor) or positions.shape != like.shape:
            same(positions, like, f"positions {asked(new, starts, size)}")  # says what is not right
        for b, (row, start) in enumerate(zip(new, starts, strict=True)):
            left = begins(tokens[b].tolist() if right_kind(tokens, tuple(like.shape)) else [], row)
            what = f"positions of the real tokens of row {b}, in columns {left} .. {left + len(row) - 1}, "
            expected = torch.arange(start, start + len(row))
            same(positions[b, left : left + len(row)], expected, what + asked(new, starts, size))


def begins(cells: list[int], row: Sequence[int]) -> int:
    """The column of a rectangle's row where its real tokens begin; 0 if they are nowhere (told by another property)."""
    return next((t for t in range(len(cells)) if cells[t : t + len(row)] == list(row)), 0)


@holds(
    "06",
    "rectangle",
    "pads count on too, and stop at the last place of the cache",
    hint="A pad takes the place after the token before it, never that of a real token. `size` places are numbered "
    "0 .. size-1; clamp there.",
)
def pads_count_on(work: Work) -> None:
    for new, starts, size in rows_of(3):
        tokens, positions, _ = parts(work, new, starts, size)
        expected = expected_positions(new, starts, size)
        if right_kind(tokens, tuple(expected.shape)):
            for b, row in enumerate(new):
                if left := begins(tokens[b].tolist(), row):
                    raise Wrong(f"row {b} has {left} pads on the left of its tokens {asked(new, starts, size)}")
        same(positions, expected, f"positions of the pads {asked(new, starts, size)}")


@holds(
    "06",
    "rectangle",
    "last is where each row's last real token stands",
    hint="Only the longest row ends at T-1. A row of n tokens ends at n-1, counted within the rectangle, not the text.",
)
def last_real(work: Work) -> None:
    for new, starts, size in rows_of(4):
        _, _, last = parts(work, new, starts, size)
        same(last, torch.tensor([len(row) - 1 for row in new]), f"last {asked(new, starts, size)}")


@dataclass
class Row:
    """A text at some point of its life, in a row of the rectangle."""

    prompt: list[int]
    n: int
    emitted: int = 0
    computed: int = 0
    new: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.new = list(self.prompt)


@holds(
    "06",
    "rectangle",
    "in a memory full of 1e4, texts that join and leave compute what they compute alone",
    hint="Draw the step in the message on paper: which place does each token and each pad take, and who looks at it "
    "in a later step?",
)
def newcomers(work: Work) -> None:
    """Rows are refilled when they end, so prompts and single tokens share a step and the pads reach far."""
    draw = seeds.rng(5)
    # first: the longest text stands on its last place when a newcomer's prompt pads its row
    groups = [
        (2, [[9, 17], [5], [30, 31, 32, 33]], [4, 3, 1]),
        *[(draw.randint(1, 4), *texts(draw, 7)) for _ in range(4)],
    ]
    for B, prompts, n_new in groups:
        size = max(len(prompt) + n for prompt, n in zip(prompts, n_new, strict=True))
        with poisoned(POISON):
            memory = KVCache(model(), B, size)
        waiting = [Row(prompt, n) for prompt, n in zip(prompts, n_new, strict=True)]
        rows, waiting = waiting[:B], waiting[B:]
        while True:
            for b, row in enumerate(rows):
                if row.emitted == row.n and waiting:
                    rows[b] = waiting.pop(0)
            if all(row.emitted == row.n for row in rows):
                break
            step(work, memory, rows, size)


def step(work: Work, memory: KVCache, rows: list[Row], size: int) -> None:
    """One pass of the rectangle that the learner's function made; raises Wrong if a row is not as if alone."""
    new, starts = [row.new for row in rows], [row.computed for row in rows]
    where = asked(new, starts, size)
    tokens, positions, last = parts(work, new, starts, size)
    B, T = len(rows), max(len(row) for row in new)
    for name, value, shape in (("tokens", tokens, (B, T)), ("positions", positions, (B, T)), ("last", last, (B,))):
        if not right_kind(value, shape):
            same(value, torch.zeros(shape, dtype=torch.int64), f"{name} {where}")  # says what is not right
        limit = {"tokens": 64, "positions": size, "last": T}[name]
        if int(value.min()) < 0 or int(value.max()) >= limit:
            raise Wrong(f"{name} {where}: from {int(value.min())} to {int(value.max())}, must be in 0 .. {limit - 1}")
    hidden = model()(tokens, positions, CachedAttend(memory, positions))  # [B, T, d]
    for b, row in enumerate(rows):
        if row.emitted == row.n:
            continue
        made, states = alone(tuple(row.prompt), row.n)
        off = float((hidden[b, last[b]] - states[row.emitted]).abs().max())
        if not off < EXACT:
            raise Wrong(
                f"row {b}, token {row.emitted} of its output: the hidden state is off by {off:.2g} from what the same "
                f"text computes alone,\nin the step {where}"
            )
        row.computed += len(row.new)
        row.new = [made[row.emitted]]
        row.emitted += 1


def right_kind(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dtype == torch.int64


# ---- generate


PARTS = {"rectangle": partial(rectangle, device=torch.device("cpu"))}


@contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Every KVCache made inside the block begins full of `value`."""
    init = KVCache.__init__

    def spoiled(self: KVCache, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.k.fill_(value)
        self.v.fill_(value)

    with patch.object(KVCache, "__init__", spoiled):
        yield


@dataclass
class Seen:
    """What went through the model: the shape of each pass, and the rows [*, d] that went through the head."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


@contextmanager
def watching() -> Iterator[Seen]:
    seen = Seen()

    def see_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.shapes.append(tuple((args[0] if args else kwargs["tokens"]).shape))

    def see_rows(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.rows.append(args[0].reshape(-1, TINY.d_model))

    hooks = [
        model().register_forward_pre_hook(see_pass, with_kwargs=True),
        model().head.register_forward_pre_hook(see_rows),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def generated(work: Work, prompts: list[list[int]], n_new: list[int]) -> tuple[list[list[int]], Seen]:
    """What the learner's function made, as lists of numbers, and what it did."""
    with watching() as seen:
        got = work.call("generate", model(), prompts, n_new, changes=(0,))
    if got is None:
        raise Wrong("generate returned None: is a `return` missing?")
    if not isinstance(got, list | tuple) or not all(isinstance(row, list | tuple) for row in got):
        raise Wrong("generate must return a list with one list of new token ids for each row")
    if len(got) != len(prompts):
        raise Wrong(f"generate returned {len(got)} rows for {len(prompts)} prompts")
    return [[int(token) for token in row] for row in got], seen


def batch(prompts: list[list[int]], n_new: list[int]) -> str:
    return f"(prompts of {[len(prompt) for prompt in prompts]} tokens, n_new = {n_new})"


def as_alone(got: list[list[int]], prompts: list[list[int]], n_new: list[int], seen: Seen) -> None:
    """Raises Wrong unless each row has the tokens that it makes alone, from the same hidden states."""
    states = torch.cat(seen.rows) if seen.rows else torch.empty(0, TINY.d_model)
    for b, (row, prompt, n) in enumerate(zip(got, prompts, n_new, strict=True)):
        made, _ = alone(tuple(prompt), n)
        if len(row) < n:
            raise Wrong(f"row {b} has {len(row)} new tokens, and must have {n} {batch(prompts, n_new)}")
        for i, (mine, ours) in enumerate(zip(row, made, strict=False)):
            if mine != ours:
                raise Wrong(f"row {b}: new token {i} is {mine}; alone the row makes {ours} {batch(prompts, n_new)}")
    for b, (prompt, n) in enumerate(zip(prompts, n_new, strict=True)):
        _, hidden = alone(tuple(prompt), n)
        for i, state in enumerate(hidden):
            off = float((states - state).abs().amax(-1).min()) if len(states) else float("inf")
            if not off < EXACT:
                raise Wrong(
                    f"row {b}: new token {i} is right by luck: no hidden state that went through the head is nearer "
                    f"than {off:.2g} to the one that the row has alone {batch(prompts, n_new)}"
                )


@holds(
    "06",
    "generate",
    "each row gets as many new tokens as it asked for, and none after",
    hint="Go on until the row with the most tokens to make is done. A row that has ended stays in the rectangle, but "
    "emits nothing more.",
    uses=PARTS,
)
def lengths(work: Work) -> None:
    for prompts, n_new in cases(6, 4):
        got, _ = generated(work, prompts, n_new)
        for b, (row, n) in enumerate(zip(got, n_new, strict=True)):
            if len(row) != n:
                raise Wrong(f"row {b} has {len(row)} new tokens, and asked for {n} {batch(prompts, n_new)}")


@holds(
    "06",
    "generate",
    "one pass for all prompts, then one pass of a single token a row for each further token",
    hint="Make one cache and one rectangle for all rows. In the first step a row's new tokens are its prompt, in every "
    "later one the token that it just emitted.",
    uses=PARTS,
)
def passes(work: Work) -> None:
    for prompts, n_new in cases(7, 3):
        _, seen = generated(work, prompts, n_new)
        B = len(prompts)
        expected = [(B, max(len(prompt) for prompt in prompts))] + [(B, 1)] * (max(n_new) - 1)
        if len(seen.shapes) != len(expected):
            raise Wrong(f"the model ran {len(seen.shapes)} times, and {len(expected)} do {batch(prompts, n_new)}")
        for i, (shape, right) in enumerate(zip(seen.shapes, expected, strict=True)):
            if shape != right:
                raise Wrong(f"pass {i} took tokens {list(shape)}; expected {list(right)} {batch(prompts, n_new)}")


@holds(
    "06",
    "generate",
    "every row equals its solo run at every step, for any lengths in any order",
    hint="Take each row's hidden state at its own last index, hand the token back to the row it came from, and let a "
    "row's start grow by its own new tokens, not by the width of the rectangle. The cache needs a place for every "
    "token.",
    uses=PARTS,
)
def solo(work: Work) -> None:
    for prompts, n_new in cases(8, 10):
        got, seen = generated(work, prompts, n_new)
        as_alone(got, prompts, n_new, seen)


@holds(
    "06",
    "generate",
    "what lies in the memory before it is written changes nothing",
    hint="A place that is not written yet must be hidden from every row: a query sees the positions of its own row, up "
    "to its own.",
    uses=PARTS,
)
def memory_of_1e4(work: Work) -> None:
    for prompts, n_new in cases(9, 4):
        before, clean = generated(work, prompts, n_new)
        with poisoned(POISON):
            got, seen = generated(work, prompts, n_new)
        for b, (mine, was) in enumerate(zip(got, before, strict=True)):
            if mine != was:
                raise Wrong(
                    f"row {b} makes {mine} with 1e4 in every place that is not written yet, and {was} with 0 there "
                    f"{batch(prompts, n_new)}"
                )
        try:
            as_alone(before, prompts, n_new, clean)
        except Wrong:  # not the memory's fault: the property before this one tells it
            continue
        as_alone(got, prompts, n_new, seen)


@holds(
    "06",
    "generate",
    "no row's result depends on the others, or on where in the batch it stands",
    hint="Change one prompt, and only its own row may change. Look for an index, a position or a length that is shared "
    "by all rows.",
    uses=PARTS,
)
def company(work: Work) -> None:
    draw = seeds.rng(10)
    for _ in range(5):
        [prompt], [n] = texts(draw, 1)
        [made], _ = generated(work, [prompt], [n])  # right or not: here only company counts
        for _ in range(2):
            others, more = texts(draw, draw.randint(1, 4))
            b = draw.randint(0, len(others))
            prompts, n_new = [*others[:b], prompt, *others[b:]], [*more[:b], n, *more[b:]]
            got, _ = generated(work, prompts, n_new)
            if got[b] != made:
                raise Wrong(
                    f"the prompt {prompt} makes {made} as the only row, and {got[b]} as row {b} "
                    f"{batch(prompts, n_new)}: its company got in"
                )


# ---- wasted


@cache
def padded_waste(lengths: tuple[int, ...], n_new: tuple[int, ...]) -> tuple[int, int]:
    """Tokens that the package's padded stage pushes for nothing, counted: in the first step, and in all later ones."""
    jobs = [Job((9,) * p, n) for p, n in zip(lengths, n_new, strict=True)]
    steps = run(model(), "padded", jobs, {"max_running": len(jobs)}).counts.steps
    waste = [one.tokens - sum(one.new.values()) for one in steps]
    return waste[0], sum(waste[1:])


def both(work: Work, prompts: list[list[int]], n_new: list[int]) -> tuple[Any, Any]:
    got = work.call("wasted", prompts, n_new)
    if got is None:
        raise Wrong("wasted returned None: is a `return` missing?")
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong(f"wasted returned {got!r}; it must return two numbers: pads, and tokens of rows that have ended")
    return got[0], got[1]


def waste_cases(seed: int) -> Iterator[tuple[list[list[int]], list[int]]]:
    yield from cases(seed, 6)
    yield [[5, 6, 7]] * 3, [4] * 3  # nothing to waste


@holds(
    "06",
    "wasted",
    "the pads are those that the padded stage pushes, counted",
    hint="The first rectangle has B rows of the longest prompt's length; what the prompts do not fill is pads.",
)
def pads(work: Work) -> None:
    for prompts, n_new in waste_cases(11):
        got, _ = both(work, prompts, n_new)
        expected, _ = padded_waste(tuple(map(len, prompts)), tuple(n_new))
        same(got, expected, f"pads {batch(prompts, n_new)}")


@holds(
    "06",
    "wasted",
    "the tokens of ended rows are those that the padded stage pushes, counted",
    hint="After the first pass every row is fed one token a pass until the row with the most new tokens is done. How "
    "many of these passes does a row with n new tokens need?",
)
def ended(work: Work) -> None:
    for prompts, n_new in waste_cases(12):
        _, got = both(work, prompts, n_new)
        _, expected = padded_waste(tuple(map(len, prompts)), tuple(n_new))
        same(got, expected, f"tokens of ended rows {batch(prompts, n_new)}")


# ---- refill_pads


@cache
def joining(n: int, B: int) -> int:
    """Pads of the step in which a prompt of n tokens joins B - 1 decoding rows, counted in the dynamic stage."""
    jobs = [Job((9,), 2), *[Job((9,), 6)] * (B - 1), Job((9,) * n, 1)]
    one = run(model(), "dynamic", jobs, {"max_running": B}).counts.steps[2]
    return one.tokens - sum(one.new.values())


@holds(
    "06",
    "refill_pads",
    "as many pads as the dynamic stage pushes when a prompt joins, counted",
    hint="Each of the B - 1 other rows has one real token, in a rectangle that is n wide.",
)
def refill(work: Work) -> None:
    for n, B in ((100, 8), (7, 3), (1, 8), (100, 1), (2, 2), (31, 5)):
        same(work.call("refill_pads", n, B), joining(n, B), f"refill_pads({n}, {B})")


@holds(
    "06",
    "refill_pads",
    "bilinear: in the longer prompt's tokens a straight line, in the rows another",
    hint="Twice as many rows, twice as many pads (nearly). Nothing in it is squared.",
)
def bilinear(work: Work) -> None:
    for n, B in ((5, 3), (40, 9), (200, 16)):
        once = joining(n, B)
        for more, rows, what in ((2 * n - 1, B, "n - 1"), (n, 2 * B - 1, "B - 1")):
            got = work.call("refill_pads", more, rows)
            same(got, 2 * once, f"refill_pads({more}, {rows}), twice the {once} of ({n}, {B}) since {what} is doubled")
