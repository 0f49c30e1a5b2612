"""Problem set 2, lessons 03 to 05: a KV cache that keeps a window in a ring, and drafts that are verified exactly."""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import attention
from minillm.lab.checking import holds
from minillm.lab.checks.c04 import fits, sdpa_in_words, span
from minillm.lab.seeds import generator, rng
from minillm.lab.tiny import TINY
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama

L, H, HKV, D = TINY.n_layers, TINY.n_heads, TINY.n_kv_heads, TINY.head_dim
EXACT = 1e-9

# ---- WindowAttend


@cache
def tiny() -> Llama:
    return Llama.random(TINY, seed=2, dtype=torch.float64)


def windowed(text: Sequence[int], window: int) -> Tensor:
    """Hidden states [n, d] of a whole text at once, each token seeing the last `window` positions: the truth."""
    p = torch.arange(len(text))
    mask = attention.visible(p, p) & (p > p[:, None] - window)
    return tiny()(torch.tensor(text), p, lambda layer, q, k, v: attention.sdpa(q, k, v, mask))


def ring(window: int, fill: float) -> tuple[Tensor, Tensor]:
    shape = (L, HKV, window, D)
    return torch.full(shape, fill, dtype=torch.float64), torch.full(shape, fill, dtype=torch.float64)


def random_text(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(TINY.vocab_size) for _ in range(n)]


def cut(draw: random.Random, n: int, most: int) -> list[int]:
    """n in pieces of 1 to `most`."""
    pieces: list[int] = []
    while sum(pieces) < n:
        pieces.append(min(draw.randint(1, most), n - sum(pieces)))
    return pieces


def said(pieces: Sequence[int]) -> str:
    if len(set(pieces)) == 1 and len(pieces) > 1:
        return f"{len(pieces)} pieces of {pieces[0]}"
    return f"pieces of {', '.join(map(str, pieces))}"


def run_pieces(
    work: Work, text: Sequence[int], pieces: Sequence[int], window: int, memory: tuple[Tensor, Tensor], what: str
) -> None:
    """The text through the tiny model with the learner's class, piece by piece; hidden states compared at each."""
    expected, start = windowed(text, window), 0
    for n in pieces:
        positions = torch.arange(start, start + n)
        attend = work.call("WindowAttend", *memory, positions, changes=(0, 1))
        with sdpa_in_words():
            try:
                hidden = tiny()(torch.tensor(text[start : start + n]), positions, attend)
            except Wrong:
                raise
            except Exception as error:
                told = work.explain("WindowAttend", error)
                raise Wrong(f"W = {window}, {what}, {span(start, start + n)}: {told}") from error
        words = f"W = {window}, {what}, {span(start, start + n)}: hidden states [T, d]"
        same(hidden, expected[start : start + n], words, EXACT)
        start += n


def looks_at(make: Callable[..., Any], start: int, T: int, window: int) -> Tensor:
    """Which positions each of T new tokens looks at, found by asking: [T, 1, start + T], not 0 where it does.

    All keys are alike, and the value of position p has a 1 in dimension p.
    """
    n = start + T
    marks = torch.eye(n, dtype=torch.float64)  # [n, D = n]
    k_memory, v_memory = (torch.zeros(1, 1, window, n, dtype=torch.float64) for _ in range(2))
    for p in range(start):
        v_memory[0, 0, p % window] = marks[p]
    zeros = torch.zeros(T, 1, n, dtype=torch.float64)
    attend = make(k_memory, v_memory, torch.arange(start, n))
    with sdpa_in_words():
        out = attend(0, zeros, zeros.clone(), marks[start:, None].clone())
    fits(out, zeros, f"W = {window}, new tokens at {span(start, n)}: the answer [T, H, D]")
    assert isinstance(out, Tensor)
    return out


@holds(
    "p2",
    "WindowAttend",
    "while the text is no longer than the window: as with the full cache of lesson 04",
    hint="before any place is used twice, place and position are the same number; and in this step's own tokens, each "
    "sees itself and those before it.",
)
def short_text(work: Work) -> None:
    draw = rng(1)
    for _ in range(5):
        n = draw.randint(2, 9)
        window = n + draw.randint(0, 4)
        run_pieces(work, random_text(draw, n), cut(draw, n, 4), window, ring(window, 0.0), f"a text of {n}")


def must_look(work: Work, start: int, T: int, window: int) -> None:
    make = partial(work.call, "WindowAttend", changes=(0, 1))
    for t, row in enumerate(looks_at(make, start, T, window)[:, 0]):
        p = start + t
        seen, expected = (row != 0).nonzero().flatten().tolist(), list(range(max(0, p - window + 1), p + 1))
        if seen != expected:
            raise Wrong(
                f"W = {window}, new tokens at {span(start, start + T)}: the one at position {p} looks at positions "
                f"{seen}; it must look at {expected}{which(seen, expected, p)}"
            )


def which(seen: Sequence[int], expected: Sequence[int], p: int) -> str:
    """What is too much and what is missing, in words."""
    told = {
        "too old: they must be hidden, since p > q_pos - W does not hold": [s for s in seen if s < min(expected)],
        "later than the token itself, so p <= q_pos does not hold": [s for s in seen if s > p],
        "missing, and it is the token's own": [s for s in expected if s not in seen and s == p],
        "missing": [s for s in expected if s not in seen and s != p],
    }
    return "".join(f"\n{', '.join(map(str, those))}: {words}" for words, those in told.items() if those)


@holds(
    "p2",
    "WindowAttend",
    "a single new token looks at the last W positions, its own among them, in whatever places they lie",
    hint="if one is too old or missing: which position lies in each place before the step? The largest p below the "
    "step's first position with p % W equal to the place. The step's own tokens are keys too.",
)
def single(work: Work) -> None:
    draw = rng(2)
    for window in (1, 2, *(draw.randint(3, 7) for _ in range(3))):
        for start in (0, window - 1, window, window + 1, draw.randint(2 * window, 5 * window)):
            must_look(work, start, 1, window)


@holds(
    "p2",
    "WindowAttend",
    "the first tokens of a chunk still look at positions whose places the chunk itself takes",
    hint="if some are missing: storing first loses them. Attend over what the memory held before this step and the new "
    "K and V, and store after that.",
)
def chunks(work: Work) -> None:
    draw = rng(3)
    for _ in range(12):
        window = draw.randint(2, 6)
        must_look(work, draw.randint(1, 4 * window), draw.randint(2, 2 * window + 1), window)


class NoPlaceTwice(TorchDispatchMode):
    """Inside the block, `memory[..., index] = new` with a place twice in the index is refused: PyTorch leaves open
    which value stays (see `Tensor.index_put_`)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_):
            for index in args[1]:
                if index is not None and index.dtype == torch.int64 and len(index.unique()) < index.numel():
                    raise Wrong(
                        "one assignment writes to some place of the memory twice, since positions that are W apart "
                        "have the same place. PyTorch leaves open which value stays: store the last W tokens alone"
                    )
        return func(*args, **(kwargs or {}))


@holds(
    "p2",
    "WindowAttend",
    "after the step, place p % W of the layer holds K and V of position p, for the last W positions; all else stays",
    hint="store the last W of the step's tokens at positions % W: if there are more than W, two of them have the same "
    "place, and the later one must stay. k comes rotated, and is kept as it came.",
)
def lands(work: Work) -> None:
    draw = rng(4)
    for i in range(10):
        window, start, layer = draw.randint(2, 5), draw.randint(0, 12), draw.randrange(L)
        T = draw.randint(1, 2 * window + 1)
        normal = partial(torch.randn, generator=generator(i), dtype=torch.float64)
        memories = [normal(L, HKV, window, D) for _ in range(2)]
        q, k, v = normal(T, H, D), normal(T, HKV, D), normal(T, HKV, D)
        expected = [memory.clone() for memory in memories]
        for t in range(T):
            for memory, new in zip(expected, (k, v), strict=True):
                memory[layer, :, (start + t) % window] = new[t]
        attend = work.call("WindowAttend", *memories, torch.arange(start, start + T), changes=(0, 1))
        with sdpa_in_words(), NoPlaceTwice():
            attend(layer, q, k, v)
        what = f"W = {window}, after layer {layer} of a step with {span(start, start + T)}"
        for name, memory, right in zip("kv", memories, expected, strict=True):
            for place in range(window):
                newest = max((p for p in range(start + T) if p % window == place), default=None)
                owner = (
                    "nothing was to be written" if newest is None or newest < start else f"position {newest} belongs"
                )
                words = f"{what}: in place {place} of the {name} memory {owner}; [Hkv, D]"
                same(memory[layer][:, place], right[layer][:, place], words, 0.0)
            same(memory, right, f"{what}: the {name} memory of all layers [L, Hkv, W, D]", 0.0)


@holds(
    "p2",
    "WindowAttend",
    "a long text in pieces of any size, also larger than the window: the hidden states of the whole text at once",
    hint="__call__ comes once for each layer, so what belongs to the step (places, positions, mask) is made in "
    "__init__, from positions alone, and nothing is counted up.",
)
def long_text(work: Work) -> None:
    draw = rng(5)
    for most in (1, 3, 5, 12):
        window, n = draw.randint(2, 6), draw.randint(20, 30)
        pieces = cut(draw, n, most)
        what = f"a text of {n} in {said(pieces)}"
        run_pieces(work, random_text(draw, n), pieces, window, ring(window, 0.0), what)


@holds(
    "p2",
    "WindowAttend",
    "a place that this text has not written yet is not read, whatever it holds (NaN here)",
    hint="if the hidden states have NaN: hiding is not enough, since a weight of 0 times NaN is NaN. Read only places "
    "that this text has written. If they have not: look at the properties above first.",
)
def never_read(work: Work) -> None:
    draw = rng(6)
    for _ in range(5):
        window, n = draw.randint(3, 8), draw.randint(3, 14)
        memory = ring(window, float("nan"))
        run_pieces(work, random_text(draw, n), cut(draw, n, 3), window, memory, f"NaN in the memory, a text of {n}")


# ---- verify


def shares(draw: random.Random, V: int, units: int) -> list[int]:
    """V whole numbers that sum to `units`, some of them perhaps 0."""
    cuts = sorted(draw.randint(0, units) for _ in range(V - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, units], strict=True)]


def rows(draw: random.Random, n: int, V: int) -> Tensor:
    """Probabilities [n, V], multiples of 1/64: sums and differences are exact."""
    return torch.tensor([shares(draw, V, 64) for _ in range(n)], dtype=torch.float64).reshape(n, V) / 64


def at(weights: Tensor, w: float) -> int:
    """In whose stretch of the running sum w lies (lesson 03)."""
    running = weights.cumsum(0)
    return int(torch.searchsorted(running, w * running[-1], right=True))


def kept_of(p: Tensor, q: Tensor, draft: list[int], u: list[float]) -> int:
    """How many tokens of the draft stay."""
    for i, x in enumerate(draft):
        if not u[i] * q[i, x] < p[i, x]:
            return i
    return len(draft)


def last_of(p: Tensor, q: Tensor, kept: int, w: float) -> int:
    return at(p[kept] if kept == len(q) else (p[kept] - q[kept]).clamp(min=0), w)


Draft = tuple[Tensor, Tensor, list[int], list[float], float]


def drafts(seed: int, count: int, n: int | None = None) -> list[Draft]:
    """Any drafts; u and w lie between the values where the answer changes."""
    draw, made = rng(seed), []
    for _ in range(count):
        size, V = draw.randint(1, 5) if n is None else n, draw.randint(3, 7)
        p, q = rows(draw, size + 1, V), rows(draw, size, V)
        draft = [draw.choices(range(V), row)[0] for row in q.tolist()]
        u, w = ([(2 * draw.randrange(1024) + 1) / 2048 for _ in range(k)] for k in (size, 1))
        made.append((p, q, draft, u, w[0]))
    return made


def verified(work: Work, given: Draft) -> list[int]:
    """What the learner's function returns, once it is a list of token ids."""
    got, n, V = work.call("verify", *given), len(given[2]), given[0].shape[1]
    if got is None:
        raise Wrong("verify returned None: is a `return` missing?")
    if not isinstance(got, list):  # the same words for all drafts: then it is told once
        raise Wrong(f"verify returned {type(got).__name__}; it must return a list of ints")
    if odd := [type(x).__name__ for x in got if type(x) is not int]:
        raise Wrong(f"verify returned a list with {odd[0]} in it; it must return a list of ints")
    if got and got[-1] == V and all(0 <= x < V for x in got[:-1]):
        raise Wrong(
            "verify returned an id that is V, the number of tokens: ids are 0 .. V - 1. "
            "Is w stretched over the sum of the weights?"
        )
    if not 1 <= len(got) <= n + 1 or any(not 0 <= x < V for x in got):
        raise Wrong(f"verify returned {got} for a draft of {n}: it must be 1 to {n + 1} token ids below {V}")
    return got


def line(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values.tolist()) + "]"


@holds(
    "p2",
    "verify",
    "a drafted token stays if u < p / q, and the first one that does not stay ends the draft",
    hint="go through the draft in order and compare u[i] * q[i, x] < p[i, x], where x = draft[i]; stop at the first "
    "that fails: all later tokens were drafted after a token that is not there.",
)
def keeps(work: Work) -> None:
    for given in drafts(11, 60):
        p, q, draft, u, _ = given
        got, kept = verified(work, given), kept_of(p, q, draft, u)
        told = [f"p = {p[i, x]:.4g}, q = {q[i, x]:.4g} and u = {u[i]!r}" for i, x in enumerate(draft)]
        for i in range(kept):
            if got[: i + 1] != draft[: i + 1] or len(got) == i + 1:
                raise Wrong(
                    f"draft {draft}: token {i} has {told[i]}, below p / q, and all before it stay: it stays too, and "
                    f"one more follows; got {got}"
                )
        if len(got) > kept + 1:
            raise Wrong(
                f"draft {draft}: token {kept} has {told[kept]}, not below p / q: it is replaced, and nothing follows; "
                f"got {got}"
            )


@holds(
    "p2",
    "verify",
    "if the whole draft stays, one more token comes, from the last row of p",
    hint="the pass over n drafted tokens gives n + 1 rows of p; row n is what the target says after the last of them. "
    "Draw from it with w, as `choose` of lesson 03 does.",
)
def one_more(work: Work) -> None:
    for p, q, draft, _, w in drafts(12, 60):
        for i, x in enumerate(draft):
            p[i] = q[i]  # the draft is as good as the target
            assert q[i, x] > 0
        u = [draft_u * 0.999 for draft_u in (0.0, 0.5, 1.0, 0.25, 0.75)][: len(draft)]
        got, expected = verified(work, (p, q, draft, u, w)), [*draft, last_of(p, q, len(draft), w)]
        what = f"draft {draft}, where p = q, and then p = {line(p[-1])} with w = {w!r}"
        same(got, expected, what)


@holds(
    "p2",
    "verify",
    "a token that does not stay is replaced from what is left of p where q is taken off",
    hint="weights max(p[i] - q[i], 0), whose sum is not 1: stretch w over their sum. What q offered too often must not "
    "come again here.",
)
def replaced(work: Work) -> None:
    tried = 0
    for p, q, draft, u, w in drafts(13, 200):
        worse = [i for i, x in enumerate(draft) if p[i, x] < q[i, x]]
        if not worse or tried == 60:
            continue
        first, tried = worse[0], tried + 1
        for i in range(first):
            p[i] = q[i]
        u = [0.999] * len(draft)
        x = draft[first]
        if not u[first] * q[first, x] >= p[first, x]:
            continue
        got, expected = verified(work, (p, q, draft, u, w)), last_of(p, q, first, w)
        if got[-1] != expected:
            left = (p[first] - q[first]).clamp(min=0)
            none = ", of which nothing is left" if left[got[-1]] == 0 else ""
            raise Wrong(
                f"p = {line(p[first])}, q = {line(q[first])}: the drafted token {x} does not stay. max(p - q, 0) = "
                f"{line(left)}, and w = {w!r} of its sum falls on token {expected}; got token {got[-1]}{none}"
            )


@holds(
    "p2",
    "verify",
    "what the target gives probability 0 never comes: at u = 0, at w = 0, with an empty draft",
    hint="`<` and not `<=`: at u = 0 a token with p = 0 must not stay. A stretch holds its left end and not its right "
    "one: searchsorted with right=True.",
)
def never_banned(work: Work) -> None:
    draw = rng(14)
    for given in (*drafts(15, 30, 0), *drafts(16, 60)):
        p, q, draft, u, _ = given
        banned = [draw.randrange(p.shape[1]) for _ in p]
        for i, x in enumerate(banned):
            p[i, (x + 1) % p.shape[1]] += p[i, x]
            p[i, x] = 0
        draft = [x if q[i, x] > 0 and draw.random() < 0.5 else draft[i] for i, x in enumerate(banned[: len(draft)])]
        u, w = [draw.choice((0.0, value)) for value in u], draw.choice((0.0, 0.0, 1 - 2.0**-30))
        got = verified(work, (p, q, draft, u, w))
        for i, token in enumerate(got):
            if p[i, token] == 0:
                raise Wrong(
                    f"p = {line(p[i])}, draft {draft}, u = {u}, w = {w!r}: token {i} of {got} is {token}, "
                    "which has p = 0"
                )


@holds(
    "p2",
    "verify",
    "a certain target (temperature 0): the draft stays as far as it agrees, then comes the target's own token",
    hint="with p = 1 for one token and 0 for all others, p / q is at least 1 or exactly 0, whatever q and u are; no "
    "special case is needed.",
)
def certain(work: Work) -> None:
    for given in drafts(17, 60):
        p, q, draft, u, w = given
        draw = rng(len(draft) + int(1000 * w))
        best = [x if draw.random() < 0.7 else draw.randrange(p.shape[1]) for x in [*draft, 0]]
        p = torch.nn.functional.one_hot(torch.tensor(best), p.shape[1]).double()
        agree = next((i for i, x in enumerate(draft) if x != best[i]), len(draft))
        got = verified(work, (p, q, draft, u, w))
        same(got, best[: agree + 1], f"the target is certain of {best}, the draft is {draft}")


@holds(
    "p2",
    "verify",
    "counted over all drafts, all u and all w: the first token comes exactly as often as the target alone would say it",
    hint="two ways lead to a token: it was drafted and stays, or another one was and it replaces that. Their sum is p "
    "only if both u < p / q and max(p - q, 0) are right.",
)
def as_the_target(work: Work) -> None:
    draw = rng(18)
    for _ in range(4):
        V = draw.randint(4, 6)
        offered = [8, 4, 2, 2] + [0] * (V - 4)
        draw.shuffle(offered)
        wanted = shares(draw, V, 16)
        p = torch.tensor([wanted, shares(draw, V, 16)], dtype=torch.float64) / 16
        q = torch.tensor([offered], dtype=torch.float64) / 16
        left = max(1, sum(max(a - b, 0) for a, b in zip(wanted, offered, strict=True)))
        found = [Fraction(0)] * V
        for x in range(V):
            for i in range(8 if offered[x] else 0):  # p / q is a multiple of 1/8
                for j in range(left):  # each of these stretches belongs to one token
                    token = verified(work, (p, q, [x], [(i + 0.5) / 8], (j + 0.5) / left))[0]
                    found[token] += Fraction(offered[x], 16 * 8 * left)
        for token, share in enumerate(found):
            if share != Fraction(wanted[token], 16):
                raise Wrong(
                    f"p = {line(p[0])}, q = {line(q[0])}: token {token} must come with probability {p[0, token]:.4g}, "
                    f"and comes with {float(share):.4g}"
                )
