"""Lesson 02: each part of a Llama against another implementation of it, and all of them together in the real model.

The expected values are computed here, by the plainest formulas and in float64, not by the engine: its functions may
be the learner's own at the moment (`lab.use`).
"""

from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.config import Config
from minillm.errors import InputError
from minillm.fetch import find
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.work import Work, Wrong, first, number, same
from minillm.model import Llama, rope_table
from minillm.weights import load

REAL = "smollm2-135m-instruct"
IDS = [1, 57, 744, 2090, 451, 348, 680]  # the running example: <bos> I am sure this pro ject

# 4 query heads of 6 make 24, not d_model: nothing may take one for the other
ODD = Config(
    vocab_size=50,
    d_model=20,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    d_ff=28,
    norm_eps=1e-3,
    rope_theta=100.0,
    context=64,
    tied=True,
)


def real_folder() -> Path | None:
    try:
        return find(REAL)
    except InputError:
        return None


MODEL = f"the real {REAL}" if real_folder() else "a tiny random model (the real weights are not here)"


# ---- what is expected, and numbers to try it on


def random(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    generator = seeds.generator(seed)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


def frequencies(D: int, theta: float) -> Tensor:
    return torch.tensor([theta ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)


def table(positions: Tensor, D: int, dtype: torch.dtype = torch.float64, theta: float = 100.0) -> tuple[Tensor, Tensor]:
    return rope_table(positions, frequencies(D, theta), dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[..., :half], sin[..., half:]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def seen(q_pos: Tensor, k_pos: Tensor) -> Tensor:
    return q_pos[..., :, None] >= k_pos[..., None, :]


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    group = q.shape[-2] // k.shape[-2]
    wide, k, v = q.double(), *(t.double().repeat_interleave(group, -2) for t in (k, v))
    scores = torch.einsum("...thd,...shd->...hts", wide, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("...hts,...shd->...thd", weights, v).to(q.dtype)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = F.linear(x, gate)
    return F.linear(g * g.sigmoid() * F.linear(x, up), down)


OURS = {"rms_norm": normed, "rotate": rotated, "sdpa": attended, "swiglu": gated}


def whole_block(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, layer: Any, parts: dict[str, Any] = OURS) -> Tensor:
    """A block put together from `parts`."""
    attn, mlp, norm, turn = layer.attn, layer.mlp, parts["rms_norm"], parts["rotate"]
    qkv = F.linear(norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    heads = parts["sdpa"](turn(q, cos, sin), turn(k, cos, sin), v, mask)
    x = x + F.linear(heads.flatten(-2), attn.o.weight)
    h = norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x + parts["swiglu"](h, *mlp.gate_up.weight.chunk(2), mlp.down.weight)


class Matrix(SimpleNamespace):
    """As much of an nn.Linear as a learner may use: its weight, or the call."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def weights_of(block: Any, silent: tuple[str, ...] = ()) -> Any:
    """A block's weights without its own forward functions, so that nobody can call these; `silent` matrices are 0."""

    def linear(name: str, module: Any) -> Matrix:
        weight = module.weight.detach()
        return Matrix(weight=torch.zeros_like(weight) if name in silent else weight)

    def norm(module: Any) -> Any:
        return SimpleNamespace(weight=module.weight.detach(), eps=module.eps)

    attn = SimpleNamespace(
        heads=block.attn.heads,
        head_dim=block.attn.head_dim,
        qkv=linear("qkv", block.attn.qkv),
        o=linear("o", block.attn.o),
    )
    mlp = SimpleNamespace(gate_up=linear("gate_up", block.mlp.gate_up), down=linear("down", block.mlp.down))
    return SimpleNamespace(attn_norm=norm(block.attn_norm), attn=attn, mlp_norm=norm(block.mlp_norm), mlp=mlp)


def same_form(got: Any, expected: Tensor, what: str) -> None:
    """Type, shape, dtype and device, whatever the values."""
    same(torch.zeros_like(got) if isinstance(got, Tensor) else got, torch.zeros_like(expected), what)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- rms_norm


@holds(
    "02",
    "rms_norm",
    "each row is divided by its root mean square, then multiplied by the weight",
    "x * w / sqrt(mean(x^2) + eps), the mean over the last dimension alone; no mean is subtracted (that is LayerNorm).",
)
def norm_formula(work: Work) -> None:
    weight = 1 + random(6, seed=1, dtype=torch.float32, scale=0.5)
    for size in ([6], [4, 6], [2, 3, 6]):
        x = random(*size, dtype=torch.float32, scale=2) + 1
        expected = normed(x, weight, 1e-5)
        same(work.call("rms_norm", x, weight, 1e-5), expected, f"rms_norm of x {list(x.shape)}", 1e-5)


@holds(
    "02",
    "rms_norm",
    "eps is added to the mean square, inside the root",
    "sqrt(mean + eps), not sqrt(mean) + eps. It matters where a row is small, and keeps a row of zeros from being NaN.",
)
def norm_eps(work: Work) -> None:
    weight = torch.ones(8, dtype=torch.float64)
    for scale in (1e-3, 1e-5, 0.0):
        x = random(3, 8, scale=scale)
        what = f"rms_norm of numbers near {scale:g} with eps 1e-05"
        same(work.call("rms_norm", x, weight, 1e-5), normed(x, weight, 1e-5), what, 1e-7)


@holds(
    "02",
    "rms_norm",
    "float64 stays float64, to the last digit",
    ".float() takes digits from a float64; torch.promote_types(x.dtype, torch.float32) is the wider of the two.",
)
def norm_float64(work: Work) -> None:
    x, weight = random(5, 32, scale=3), 1 + random(32, seed=1)
    same(work.call("rms_norm", x, weight, 1e-5), normed(x, weight, 1e-5), "rms_norm in float64", 1e-12)


@holds(
    "02",
    "rms_norm",
    "large numbers do not overflow: squares and their mean are taken in float32 at least",
    "the square of 500 is more than float16 can hold (65504); widen x before you square it.",
)
def norm_large(work: Work) -> None:
    x, weight = random(4, 64, dtype=torch.float16, scale=500), torch.ones(64, dtype=torch.float16)
    got = work.call("rms_norm", x, weight, 1e-5)
    same(got, normed(x, weight, 1e-5), "rms_norm of float16 numbers near 500", 4e-3)


@holds(
    "02",
    "rms_norm",
    "in bfloat16: widen, normalise, round back to bfloat16, and only then multiply by the weight",
    "the order of the roundings. Statistics in bfloat16 are off by up to 0.4 %; a weight multiplied before "
    "the rounding gives other last digits than the checkpoint was trained with.",
)
def norm_bfloat16(work: Work) -> None:
    x, weight = random(16, 256, dtype=torch.bfloat16, scale=3), (1 + random(256, seed=1, scale=0.4)).bfloat16()
    got, expected = work.call("rms_norm", x, weight, 1e-5), normed(x, weight, 1e-5)
    same(got, expected, "rms_norm in bfloat16", 0.1)
    wrong = got != expected
    if wrong.double().mean() > 0.01:  # a sum in another order may round one in a thousand otherwise
        at = first(wrong)
        raise Wrong(
            f"rms_norm in bfloat16: {wrong.double().mean():.0%} of the values are rounded otherwise; first at {at}: "
            f"expected {number(expected[tuple(at)])}, got {number(got[tuple(at)])}"
        )


# ---- frequencies


@holds(
    "02",
    "frequencies",
    "pair i turns by theta ** (-2 i / D) radians per position",
    "D/2 pairs, i = 0 .. D/2 - 1, and the exponent counts in twos: 0, 2, 4 ... over D. The first is always 1.",
)
def frequency_values(work: Work) -> None:
    for D, theta in ((8, 10000.0), (2, 500.0), (64, 100000.0)):
        expected = frequencies(D, theta)
        got = work.call("frequencies", D, theta)
        got = got.double() if isinstance(got, Tensor) else got  # its dtype is the next property
        same(got, expected, f"frequencies({D}, {theta:g})", 1e-6)


@holds(
    "02",
    "frequencies",
    "they are float64 all the way",
    "give torch.arange dtype=torch.float64; an angle is position times frequency, so errors grow with the text.",
)
def frequency_digits(work: Work) -> None:
    for D, theta in ((64, 100000.0), (128, 500000.0)):
        same(work.call("frequencies", D, theta), frequencies(D, theta), f"frequencies({D}, {theta:g})", 1e-14)


# ---- rotate


@holds(
    "02",
    "rotate",
    "at position 0 nothing turns",
    "cos is 1 and sin is 0 there: x * cos must be one of the two terms.",
)
def rotate_zero(work: Work) -> None:
    x = random(1, 3, 8)
    same(work.call("rotate", x, *table(torch.tensor([0]), 8)), x, "rotate at position 0", 1e-12)


@holds(
    "02",
    "rotate",
    "dimension i is paired with i + D/2 (half-split), not with its neighbour",
    "cut a head into its first and its second half; 0::2 and 1::2 are the paper's pairs, not the checkpoint's.",
)
def rotate_pairs(work: Work) -> None:
    D = 8
    cos, sin = table(torch.tensor([1]), D)
    for i in range(D):
        x = torch.zeros(1, 1, D, dtype=torch.float64)
        x[0, 0, i] = 1.0
        got = work.call("rotate", x, cos, sin)
        what = f"rotate of a head that is 1 in dimension {i} and 0 elsewhere, at position 1"
        same_form(got, x, what)
        partner = (i + D // 2) % D
        moved = (got - x).abs()[0, 0] > 1e-6
        strangers = [j for j in range(D) if moved[j] and j not in (i, partner)]
        if strangers:
            raise Wrong(f"{what}: dimension {strangers[0]} changed too; {i} is paired with {partner}")
        if not moved[partner]:
            raise Wrong(f"{what}: dimension {partner} did not change; {i} is paired with {partner}")


@holds(
    "02",
    "rotate",
    "halves (a, b) become (a cos - b sin, b cos + a sin)",
    "swap the halves (not neighbours), and negate nothing: the minus sign is in the table, `sin` holds (-sin, sin).",
)
def rotate_formula(work: Work) -> None:
    for lead, heads, D in (([], 3, 8), ([2], 2, 6), ([3, 2], 1, 4)):
        positions = torch.randint(0, 50, (*lead, 5), generator=seeds.generator(D))
        x, (cos, sin) = random(*lead, 5, heads, D), table(positions, D)
        same(work.call("rotate", x, cos, sin), rotated(x, cos, sin), f"rotate of x {list(x.shape)}", 1e-10)


@holds(
    "02",
    "rotate",
    "only the distance counts: moving a text by any number of positions changes no score",
    "every pair must really be turned, both its numbers by the same angle: then q . k depends on the difference alone.",
)
def rotate_relative(work: Work) -> None:
    q, k, positions = random(6, 2, 16), random(6, 2, 16, seed=1), torch.arange(6)

    def scores(shift: int) -> Tensor:
        turned = [work.call("rotate", x, *table(positions + shift, 16)) for x in (q, k)]
        for x in turned:
            same_form(x, q, "rotate")
        return torch.einsum("thd,shd->hts", *turned)

    plain = scores(0)
    for shift in (1, 7, 1000):
        same(scores(shift), plain, f"scores q . k after moving all positions by {shift}", 1e-9)


@holds(
    "02",
    "rotate",
    "the dtype stays what it was: float32, bfloat16 and float64",
    "cos and sin come in x's dtype, so no conversion is needed.",
)
def rotate_dtype(work: Work) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        x, (cos, sin) = random(5, 2, 8, dtype=dtype), table(torch.arange(300, 305), 8, dtype)
        wide = work.call("rotate", x.double(), cos.double(), sin.double())
        same_form(wide, x.double(), "rotate in float64")
        same(
            work.call("rotate", x, cos, sin), wide.to(dtype), f"rotate in {name_of(dtype)}, against float64", tolerance
        )


# ---- visible


def check_mask(work: Work, what: str, q_pos: Tensor, k_pos: Tensor, *seqs: Tensor) -> None:
    expected = seen(q_pos, k_pos)
    if seqs:
        expected = expected & (seqs[0][:, None] == seqs[1])
    got = work.call("visible", q_pos, k_pos, *seqs)
    same_form(got, expected, what)
    if (got != expected).any():
        *row, t, s = first(got != expected)
        q, k = q_pos[(*row, t)] if q_pos.dim() > 1 else q_pos[t], k_pos[s]
        where = f" of text {seqs[0][t]}" if seqs else ""
        whose = f" of text {seqs[1][s]}" if seqs else ""
        must = "must" if expected[(*row, t, s)] else "must not"
        raise Wrong(
            f"{what}: first at {[*row, t, s]}: the query at position {q}{where} {must} see the key at {k}{whose}"
        )


@holds(
    "02",
    "visible",
    "a token sees itself and all before it, none after it",
    "k_pos <= q_pos: with < a token does not see itself, with > the mask is upside down (true must mean visible).",
)
def mask_square(work: Work) -> None:
    for n in (1, 2, 7):
        check_mask(work, f"visible for positions 0 .. {n - 1}", torch.arange(n), torch.arange(n))


@holds(
    "02",
    "visible",
    "fewer queries than keys: the second chunk of a text sees the first",
    "compare positions, not row and column numbers: row 0 of this mask is not position 0.",
)
def mask_chunk(work: Work) -> None:
    for start, stop in ((4, 7), (2, 5), (6, 7)):
        what = f"visible for queries {start} .. {stop - 1}, keys 0 .. {stop - 1}"
        check_mask(work, what, torch.arange(start, stop), torch.arange(stop))


@holds(
    "02",
    "visible",
    "positions may come in any order, with gaps",
    "tril(diagonal = S - T) is right only while positions are counted without a gap; compare the positions themselves.",
)
def mask_order(work: Work) -> None:
    generator = seeds.generator(0)
    for _ in range(20):
        T, S = torch.randint(1, 6, (2,), generator=generator).tolist()
        q_pos, k_pos = (torch.randint(0, 9, (n,), generator=generator) for n in (T, S))
        check_mask(work, f"visible for queries {q_pos.tolist()}, keys {k_pos.tolist()}", q_pos, k_pos)


@holds(
    "02",
    "visible",
    "rows of a rectangle have positions of their own: q_pos [N, T] gives a mask [N, T, S]",
    "[:, None] adds the new dimension in the wrong place when there are two; q_pos[..., :, None] works for both.",
)
def mask_rectangle(work: Work) -> None:
    q_pos = torch.tensor([[5, 6, 7], [0, 1, 2], [9, 10, 11]])
    check_mask(work, "visible for three rows of three queries", q_pos, torch.arange(12))


@holds(
    "02",
    "visible",
    "where texts are given, a token sees those of its own alone",
    "the last lines of the cell do it, and were given: leave them as they are.",
)
def mask_sequences(work: Work) -> None:
    positions, seq = torch.tensor([0, 1, 2, 0, 1, 0]), torch.tensor([0, 0, 0, 1, 1, 2])
    what = "visible for texts of 3, 2 and 1 tokens end to end"
    check_mask(work, what, positions, positions, seq, seq)
    keep = torch.tensor([2, 4, 5])  # the last token of each
    check_mask(work, what + ", their last tokens asking", positions[keep], positions, seq[keep], seq)


# ---- sdpa


def full(T: int, S: int) -> Tensor:
    return torch.ones(T, S, dtype=torch.bool)


def in_rows(work: Work, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    """The learner's sdpa; torch's words for what does not fit are put in the lesson's."""
    try:
        return work.call("sdpa", q, k, v, mask)
    except Wrong as wrong:
        if q.dim() == 3 or "sdpa raised " not in str(wrong):
            raise
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, mask {list(mask.shape)}"
        raise Wrong(
            f"{wrong}\nfor several texts at once: {shapes}. Scores are [..., H, T, S], and the mask is [..., T, S]:\n"
            "give it a dimension for the heads, mask[..., None, :, :], and count dimensions from the end, as in "
            "transpose(-3, -2)"
        ) from wrong


@holds(
    "02",
    "sdpa",
    "scores are divided by sqrt(D)",
    "D is the head dimension, q.shape[-1]; divide by its root, once.",
)
def attention_scale(work: Work) -> None:
    for D in (4, 16, 64):
        q = torch.zeros(1, 1, D, dtype=torch.float64)
        q[0, 0, 0] = 3.0**0.5
        k = torch.zeros(2, 1, D, dtype=torch.float64)
        k[0, 0, 0] = D**0.5 / 3.0**0.5 * torch.tensor(3.0, dtype=torch.float64).log()  # q . k = sqrt(D) ln 3, and 0
        v = torch.zeros(2, 1, D, dtype=torch.float64)
        v[0] = 1.0
        got = work.call("sdpa", q, k, v, full(1, 2))
        same_form(got, q, f"sdpa with D = {D}")
        if not abs(got[0, 0, 0] - 0.75) <= 1e-5:  # NaN too
            raise Wrong(
                f"sdpa with D = {D}: two keys whose scores differ by ln 3 after scaling weigh 0.75 and 0.25; "
                f"the first weighs {number(got[0, 0, 0])}"
            )


@holds(
    "02",
    "sdpa",
    "hidden keys are taken out before the softmax: what is left weighs 1 in all",
    "fill hidden scores with -inf, then take the softmax over the keys. A mask put on afterwards leaves less than 1; "
    "0 instead of -inf still has weight, since exp(0) is 1.",
)
def attention_sum(work: Work) -> None:
    q, k, mask = random(5, 2, 8), random(5, 2, 8, seed=1), full(5, 5).tril()
    got = work.call("sdpa", q, k, torch.ones(5, 2, 8, dtype=torch.float64), mask)
    same_form(got, q, "sdpa")
    off = ~((got - 1).abs() <= 1e-5)  # NaN too
    if off.any():
        t, h, _ = at = first(off)
        raise Wrong(
            f"the weights that query {t} gives to its {t + 1} visible keys (head {h}) must sum to 1; "
            f"they sum to {number(got[tuple(at)])}"
        )


@holds(
    "02",
    "sdpa",
    "what is hidden has no influence, however large it is",
    "-inf for what is hidden, not a large negative number and not 0.",
)
def attention_hidden(work: Work) -> None:
    q, k, v = random(4, 4, 8), random(6, 2, 8, seed=1), random(6, 2, 8, seed=2)
    mask = seen(torch.arange(4), torch.arange(6))  # keys 4 and 5 are hidden from all
    expected = work.call("sdpa", q, k, v, mask)
    same_form(expected, q, "sdpa")
    for junk in (1e4, -1e4):
        k[4:], v[4:] = junk, junk
        what = f"sdpa with {junk:g} in keys and values that nobody may see, against the same without"
        same(work.call("sdpa", q, k, v, mask), expected, what, 1e-6)


@holds(
    "02",
    "sdpa",
    "grouped heads: query head h reads key-value head h // (H / Hkv)",
    "repeat_interleave gives 0 0 0 1 1 1 (right), repeat and tile give 0 1 0 1 0 1; expand a new dimension after Hkv.",
)
def attention_groups(work: Work) -> None:
    for H, Hkv in ((9, 3), (4, 2), (3, 3), (4, 1)):
        v = torch.arange(Hkv, dtype=torch.float64)[:, None].expand(5, Hkv, 4).clone()  # head j holds the number j
        got = work.call("sdpa", random(2, H, 4), random(5, Hkv, 4, seed=1), v, full(2, 5))
        what = f"sdpa with {H} query heads and {Hkv} key-value heads"
        form = torch.zeros(2, H, 4, dtype=torch.float64)
        same_form(got, form, what)
        for h in range(H):
            if not abs(got[0, h, 0] - h // (H // Hkv)) <= 1e-4:
                raise Wrong(
                    f"{what}: query head {h} must read key-value head {h // (H // Hkv)}; "
                    f"it reads {number(got[0, h, 0])}"
                )


@holds(
    "02",
    "sdpa",
    "a query that sees nothing answers 0, and disturbs nobody",
    "a softmax over nothing but -inf is NaN: afterwards masked_fill the rows where mask.any(-1) is false. Multiplying "
    "by 0 does not help (0 * NaN is NaN), and -1e9 for -inf would give the mean of what is hidden.",
)
def attention_nothing(work: Work) -> None:
    for size in ([], [5]):  # 5 is no other size here: nothing may take rows for heads
        q, k, v = (random(*size, n, 2, 4, seed=n) for n in (3, 4, 4))
        mask = full(3, 4).tril().expand(*size, 3, 4).clone()
        expected = in_rows(work, q, k, v, mask)
        same_form(expected, q, "sdpa")
        mask[..., 1, :] = False
        expected[..., 1, :, :] = 0.0
        what = f"sdpa of q {list(q.shape)} where query 1 sees nothing"
        same(work.call("sdpa", q, k, v, mask), expected, what, 1e-6)


@holds(
    "02",
    "sdpa",
    "equal to the formula for any number of queries, keys, heads and leading dimensions",
    "follow the shapes: heads before tokens for the products, [..., H, T, S]; the softmax over S; T before H again.",
)
def attention_formula(work: Work) -> None:
    generator = seeds.generator(1)
    for seed, lead in enumerate(([], [], [5], [2, 2], [])):
        T, S, Hkv, group = (int(n) for n in torch.randint(1, 5, (4,), generator=generator))
        q = random(*lead, T, Hkv * group, 6, seed=seed)
        k, v = random(*lead, S, Hkv, 6, seed=seed + 10), random(*lead, S, Hkv, 6, seed=seed + 20)
        mask = torch.rand(*lead, T, S, generator=generator) < 0.5
        mask[..., 0] = True
        what = f"sdpa of q {list(q.shape)}, k {list(k.shape)}"
        same(in_rows(work, q, k, v, mask), attended(q, k, v, mask), what, 1e-5)


@holds(
    "02",
    "sdpa",
    "float64, float32 and bfloat16: the result has q's dtype, and float64 loses nothing",
    "take the softmax in torch.promote_types(dtype, torch.float32), then go back to v's dtype for the sum.",
)
def attention_dtype(work: Work) -> None:
    q, k = (random(7, heads, 16, seed=heads) for heads in (6, 2))
    v, mask = random(7, 2, 16, seed=1), seen(torch.arange(7), torch.arange(7))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        narrow = [x.to(dtype) for x in (q, k, v)]
        wide = work.call("sdpa", *(x.double() for x in narrow), mask)
        same_form(wide, q, "sdpa in float64")
        same(work.call("sdpa", *narrow, mask), wide.to(dtype), f"sdpa in {name_of(dtype)}, against float64", tolerance)
    got = work.call("sdpa", q, k, torch.ones_like(v), full(7, 7))
    off = (got - 1).abs().max()
    if not off <= 1e-12:
        raise Wrong(
            f"sdpa in float64: the weights of 7 visible keys must sum to 1 to 12 digits; they are off by {off:.1g}"
        )


@holds(
    "02",
    "sdpa",
    "large scores do not overflow",
    "exp(100) is more than float32 can hold. Tensor.softmax takes the largest score away first; exp / sum does not.",
)
def attention_large(work: Work) -> None:
    q, k, v = random(4, 2, 16, dtype=torch.float32, scale=100), *(random(4, 2, 16, seed=s).float() for s in (1, 2))
    mask = seen(torch.arange(4), torch.arange(4))
    same(work.call("sdpa", q, k, v, mask), attended(q, k, v, mask), "sdpa with scores in the hundreds", 1e-2)


# ---- swiglu


@holds(
    "02",
    "swiglu",
    "down(silu(gate x) * up x), with silu(z) = z sigmoid(z)",
    "silu, not sigmoid and not gelu, and on the gate alone. Weights lie as [out, in]: x @ weight.T, or F.linear.",
)
def gated_formula(work: Work) -> None:
    for size in ([5], [4, 5], [2, 3, 5]):
        x, gate, up, down = random(*size, scale=2), random(7, 5, seed=1), random(7, 5, seed=2), random(5, 7, seed=3)
        expected = gated(x, gate, up, down)
        same(work.call("swiglu", x, gate, up, down), expected, f"swiglu of x {list(x.shape)}", 1e-9)


@holds(
    "02",
    "swiglu",
    "a strongly negative gate closes its channel, whatever up says",
    "silu belongs to the gate; `up` goes in as it is.",
)
def gated_closed(work: Work) -> None:
    x, down = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    gate, up = torch.tensor([[-40.0]]).double(), torch.tensor([[5.0]]).double()
    what = "swiglu with gate x = -40 and up x = 5"
    same(work.call("swiglu", x, gate, up, down), torch.zeros(1, 1, dtype=torch.float64), what, 1e-9)


@holds(
    "02",
    "swiglu",
    "float32, bfloat16 and float64 stay what they are",
    "no conversion is needed here: every product in x's own dtype.",
)
def gated_dtype(work: Work) -> None:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float64, 1e-12)):
        x, gate, up, down = (
            random(*size, seed=i, dtype=dtype) for i, size in enumerate(((3, 6), (8, 6), (8, 6), (6, 8)))
        )
        what = f"swiglu in {name_of(dtype)}"
        same(work.call("swiglu", x, gate, up, down), gated(x, gate, up, down), what, tolerance)


# ---- block


def try_block(work: Work, what: str, silent: tuple[str, ...], dtype: torch.dtype, tolerance: float) -> None:
    """Only the order of things: the parts are the learner's own, and have checks of their own."""
    model, mine = Llama.random(ODD, seed=1, dtype=dtype), {name: partial(work.call, name) for name in OURS}
    for lead in ([], [2]):
        x, positions = random(*lead, 7, ODD.d_model, dtype=dtype), torch.arange(3, 10)
        cos, sin = table(positions, ODD.head_dim, dtype, ODD.rope_theta)
        layer, mask = weights_of(model.blocks[0], silent), seen(positions, positions)
        expected = whole_block(x, cos, sin, mask, layer, mine)
        same(work.call("block", x, cos, sin, mask, layer), expected, f"{what}, x {list(x.shape)}", tolerance)


@holds(
    "02",
    "block",
    "x itself goes through: both halves only add to it",
    "x = x + attention(norm(x)), then x = x + mlp(norm(x)); what is added to is never normed.",
    uses=OURS,
)
def block_residual(work: Work) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        try_block(work, "block with o and down all 0, which must give x back", ("o", "down"), dtype, 1e-6)


@holds(
    "02",
    "block",
    "the attention half: norm, q k v, rotate q and k, attend, o",
    "attn_norm, not mlp_norm, with its own eps; q and k are rotated, v is not; split by attn.heads, since k and v "
    "have fewer heads.",
    uses=OURS,
)
def block_attention(work: Work) -> None:
    try_block(work, "block with down all 0, so only its attention half", ("down",), torch.float64, 1e-9)


@holds(
    "02",
    "block",
    "the MLP half: norm, gate and up, down",
    "mlp_norm of the x that attention has already added to; gate is the first d_ff rows of gate_up.",
    uses=OURS,
)
def block_mlp(work: Work) -> None:
    try_block(work, "block with o all 0, so only its MLP half", ("o",), torch.float64, 1e-9)
    try_block(work, "block with both halves", (), torch.float64, 1e-9)


@lru_cache(1)
def loaded(folder: Path) -> Llama:
    return load(folder, "cpu", "float32")


@holds(
    "02",
    "block",
    f"in {MODEL}, the output of every block is the reference's, and so are the logits",
    "if block 0 differs, look at your functions in the order of this lesson. A later first block means that something "
    "small is off (eps, a dtype, an angle) and grows.",
    uses=OURS,
)
def block_in_model(work: Work) -> None:
    folder = real_folder()
    model = loaded(folder) if folder else Llama.random(ODD, seed=2)
    config = model.config
    tokens, positions = torch.tensor(IDS) % config.vocab_size, torch.arange(len(IDS))
    cos, sin = table(positions, config.head_dim, torch.float32, config.rope_theta)
    mask = seen(positions, positions)
    expected = mine = model.embed(tokens)
    for i, module in enumerate(model.blocks):
        layer = weights_of(module)
        expected = whole_block(expected, cos, sin, mask, layer)
        mine = work.call("block", mine, cos, sin, mask, layer, changes=(4,))  # no copy of the weights
        what = f"block {i} of {MODEL}"
        same_form(mine, expected, what)
        off = (mine - expected).norm(dim=-1) / expected.norm(dim=-1)  # [T]
        if not off.max() < 1e-3:  # true for NaN too
            token = int(off.nan_to_num(float("inf")).argmax())
            before = f"the {i} before it agree" if i else "what goes into it, the embeddings, is right"
            raise Wrong(
                f"the first block that differs is {i} of 0 .. {config.n_layers - 1} in {MODEL}: "
                f"the row of token {token} is off by {off[token]:.2g} of its length; {before}"
            )
    last = [
        work.call("rms_norm", mine, model.norm.weight, model.norm.eps),
        normed(expected, model.norm.weight, model.norm.eps),
    ]
    mine, expected = (model.head(hidden[-1]) for hidden in last)
    same(mine, expected, f"all {config.n_layers} blocks agree in {MODEL}, but the logits", 2e-2)
