# mypy: allow-untyped-defs, allow-incomplete-defs
"""The two Triton kernels of `triton_paged`. Importing this file needs triton; nothing else does.

One program takes one tile (some consecutive new tokens of one sequence), one key-value head with all of its G query
heads, and one split of the positions that the tile may see. It walks over its keys in blocks and keeps, for each of its
rows, the largest score so far, the sum of the weights and the weighted sum of values; when a larger score turns up, the
last two are scaled down. So a row of scores is never whole, in memory or anywhere else.

    row of the tile   0   1   2   3   4   5  6..15        G = 3 query heads, 2 tokens: 6 of 16 rows are used
    token             t   t   t  t+1 t+1 t+1   -          (G need not be a power of two: the token is row // G)
    query head        a   b   c   a   b   c    -          all six multiply the same block of keys, loaded once

A tile with more than ROWS rows is left to PARTS programs.

Sources: Milakov & Gimelshein 2018 (online softmax, algorithm 3); Dao 2023 (FlashAttention-2, algorithm 1); Dao et al.
2023 (Flash-Decoding, the splits); Kwon et al. 2023 (PagedAttention, the table).
"""

import triton
import triton.language as tl


@triton.jit
def attend(
    q,  # [T, H, D]
    k,  # [Hkv, slots, D] one layer of the pool
    v,
    out,  # [T, H, splits, D]: what each split alone would answer
    logsum,  # [T, H, splits]: log2 of the sum of its weights
    bounds,  # [tiles + 1] tile i holds the tokens bounds[i] .. bounds[i+1]-1
    positions,  # [T]
    seq,  # [T] row of the table
    table,  # [rows, positions] -> slot
    table_stride,
    head_stride,
    SCALE: tl.constexpr,  # log2(e) / sqrt(D): the weights are powers of two, which the hardware has an instruction for
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,  # sizes of blocks are powers of two; tl.dot wants 16 at least
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,  # keys at a time
):
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    head, split = tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    WIDE: tl.constexpr = logsum.dtype.element_ty  # of scores and sums
    begin, stop = tl.load(bounds + tile), tl.load(bounds + tile + 1)
    sequence = tl.load(seq + begin)
    length = tl.load(positions + stop - 1).to(tl.int32) + 1  # what its last token may see: no key after it is touched

    row = part * ROWS + tl.arange(0, ROWS)  # [ROWS]
    d = tl.arange(0, D_PAD)
    token = begin + row // G  # [ROWS]
    used = token < stop
    position = tl.load(positions + token, mask=used, other=0)  # [ROWS]
    at = token.to(tl.int64) * (tl.num_programs(1) * G) + head * G + row % G  # [ROWS] in [T, H]
    query = tl.load(q + at[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)  # [ROWS, D_PAD]
    # int64: a head's memory may begin, and a slot lie, more than 2^31 numbers in
    k += head.to(tl.int64) * head_stride
    v += head.to(tl.int64) * head_stride

    most = tl.full([ROWS], float("-inf"), WIDE)  # the largest score so far
    total = tl.zeros([ROWS], WIDE)  # sum of weights
    acc = tl.zeros([ROWS, D_PAD], WIDE)  # sum of weights * values
    # the sequence's own length is shared out, in whole blocks: the last splits of a short one have nothing to do
    share = tl.cdiv(tl.cdiv(length, BLOCK), splits) * BLOCK
    for start in range(split * share, tl.minimum(length, split * share + share), BLOCK):
        s = start + tl.arange(0, BLOCK)  # [BLOCK] positions
        there = s < length
        slot = tl.load(table + sequence * table_stride + s, mask=there, other=0).to(tl.int64)  # [BLOCK]
        where = slot * D
        # masked: what lies in a slot that no row may see is never read, since 0 x NaN is NaN
        key = tl.load(k + where[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        value = tl.load(v + where[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)

        scores = tl.dot(query, key, input_precision="ieee") * SCALE  # [ROWS, BLOCK]
        scores = tl.where(s[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))  # [ROWS]
        # a row that has seen nothing yet keeps -inf, and -inf minus -inf would be NaN
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])  # [ROWS, BLOCK]
        fade = tl.exp2(most - shift)  # [ROWS]
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee", out_dtype=WIDE)
        most = higher

    total = tl.where(total == 0.0, 1.0, total)  # of a split without keys: it answers 0, with a weight of 2^-inf
    at = at * splits + split
    tl.store(out + at[:, None] * D + d[None, :], acc / total[:, None], mask=used[:, None] & (d < D)[None, :])
    tl.store(logsum + at, most + tl.log2(total), mask=used)


@triton.jit
def merge(parts, logsum, out, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """The splits' answers [T*H, splits, D], weighted by the sums of their weights -> [T*H, D]. SPLITS: a power of 2."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_PAD)
    at = row * SPLITS + tl.arange(0, SPLITS)  # [SPLITS]
    logs = tl.load(logsum + at)  # [SPLITS]; the first is finite, since every token sees position 0
    weights = tl.exp2(logs - tl.max(logs, 0))  # [SPLITS]
    part = tl.load(parts + at[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)  # [SPLITS, D_PAD]
    mixed = tl.sum(weights[:, None] * part, 0) / tl.sum(weights, 0)  # [D_PAD]
    tl.store(out + row * D + d, mixed, mask=d < D)
