"""Attention: who may look at whom (`visible`), and the sum itself (`sdpa`). Every stage uses these two.

Shapes, here and everywhere:  T new tokens in this step · S context positions read · H / Hkv query / key-value
heads · D head dim. Leading dimensions `...` are none for one sequence, or [N] for N rows of a rectangle.
"""

from typing import Protocol

import torch
from torch import Tensor


class Attend(Protocol):
    """Attention as the model sees it: built once per step, called once per layer.

    An Attend answers three questions, and each stage of the ladder changes one answer: where the new K and V
    go (store), who may look at whom (visible), and how the sum is computed (kernel).
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [..., T, H, D], k and v [..., T, Hkv, D], already rotated  ->  [..., T, H, D]"""
        ...


def visible(q_pos: Tensor, k_pos: Tensor, q_seq: Tensor | None = None, k_seq: Tensor | None = None) -> Tensor:
    """The one rule: a token sees the tokens of its own sequence at its own position or before.

    q_pos [..., T] and k_pos [..., S] are positions in their own sequence; q_seq [T] and k_seq [S] say which
    sequence, where several lie side by side. Returns bool [..., T, S], true where query t may see key s.

    Causality with a cache, chunks, padding and ragged isolation all follow from positions. Chunk 2 of a prompt
    of 5 cut as 2 + 3, positions 2 3 4 against 0..4 (a square "causal" mask would get this wrong):

        1 1 1 0 0
        1 1 1 1 0
        1 1 1 1 1
    """
    mask = k_pos[..., None, :] <= q_pos[..., :, None]  # [..., T, S]
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[..., None, :] == q_seq[..., :, None])  # [..., T, S]
    return mask


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention with grouped queries, by hand: softmax(q k^T / sqrt(D)) v.

    q [..., T, H, D]; k, v [..., S, Hkv, D]; mask bool [..., T, S], true = visible  ->  [..., T, H, D].
    The softmax runs in float32 at least (float64 stays float64). A query that sees nothing answers 0.

    Source: Vaswani et al. 2017 (equation 1); grouped queries: Ainslie et al. 2023 (GQA).
    """
    *lead, T, H, D = q.shape
    S, Hkv = k.shape[-3:-1]
    # Query heads j*G .. j*G+G-1 share key-value head j. Folding those G heads into the rows makes one matmul per
    # key-value head and repeats no K or V. Heads lead, since that is how the caches lie in memory: no copies.
    q = q.unflatten(-2, (Hkv, H // Hkv)).movedim((-3, -2), (0, -3))  # [Hkv, ..., G, T, D]
    q = q.reshape(Hkv, *lead, -1, D) * D**-0.5  # [Hkv, ..., G*T, D]; before the product, which float16 may not hold
    k, v = k.movedim(-2, 0), v.movedim(-2, 0)  # [Hkv, ..., S, D]

    scores = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))  # [Hkv, ..., G*T, S]
    scores = scores.unflatten(-2, (H // Hkv, T))  # [Hkv, ..., G, T, S]
    scores.masked_fill_(~mask[..., None, :, :], float("-inf"))
    weights = scores.softmax(-1).to(v.dtype).flatten(-3, -2)  # [Hkv, ..., G*T, S]

    out = (weights @ v).unflatten(-2, (H // Hkv, T))  # [Hkv, ..., G, T, D]
    out = out.movedim((0, -3), (-3, -2)).reshape(*lead, T, H, D)
    # softmax over nothing is NaN; selected out (never multiplied by 0, since 0 x NaN is NaN)
    return out.masked_fill(~mask.any(-1)[..., None, None], 0.0)


class SelfAttend:
    """Attention over this step's own tokens alone: nothing is stored, every key is new (the naive stage)."""

    def __init__(self, positions: Tensor):
        self.mask = visible(positions, positions)  # [T, T]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, self.mask)
