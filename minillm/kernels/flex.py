"""FlexAttention: the rule `visible` itself, compiled into one fused kernel over sequences end to end (CPU and CUDA).

torch traces the rule as a `mask_mod`, a function of one query's index and one key's, and puts it into its kernel. A
`BlockMask` says which blocks of keys a block of queries needs at all; the others are never read. Dong et al. 2024,
"Flex Attention: A Programming Model for Generating Optimized Attention Kernels".

    queries of a (5, positions 2 to 6) and b (1, position 3), in blocks of 4:   a a a a   a . . .   b . . .
    keys end to end, in blocks of 4:                                            a a a a   a a a b   b b b .
    the blocks of keys for each block of queries:                               0 and 1   0 and 1   1 and 2

Compiling takes seconds and must not happen at every new length: the lengths of the kernel's inputs are dynamic.
"""

import os
import shutil
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minillm import attention
from minillm.batch import Batch, context
from minillm.cache import KVPool
from minillm.model import Llama

KEYS = 128  # in a block: what FlexAttention takes itself

# Queries in a block, all of one sequence, so that a single token fills a block too. A GPU's kernel computes tiles of
# that height anyway. A CPU computes row by row: a higher block means more pads where tokens are single, and fewer
# passes over the keys where chunks are long.
QUERIES = {"cpu": 4, "cuda": 128}

LOOKUP = 1 << 14  # least length of what the rule looks positions up in

compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)


class FlexAttend:
    """`compute` is torch's flex_attention, compiled. Not compiled it is the same function, slowly, in any dtype."""

    def __init__(self, pool: KVPool, batch: Batch, compute: Callable[..., Tensor] = compiled):
        self.pool, self.batch, self.compute = pool, batch, compute
        device = pool.table.device
        size = QUERIES[device.type]
        tiles = [tile for chunk in batch.chunks for tile in chunk.cut(size)]  # each fills a block, or begins one
        place = [b * size + i for b, tile in enumerate(tiles) for i in range(tile.n)]
        self.place = torch.tensor(place, device=device)  # [T]: where in its block each query lies
        slots, positions, seq = context(batch, pool.table)  # [S] each
        # at least two blocks of each: a dimension of 1 would be compiled apart
        n_queries, n_keys = max(2, len(tiles)), max(2, -(-len(slots) // KEYS))  # blocks
        self.padded = n_queries * size
        pads = slots[:1].expand(n_keys * KEYS - len(slots))  # a live slot: no query sees it, but it may not be NaN
        self.index = pool.index(torch.cat([slots, pads]))  # [Hkv, n_keys * KEYS]

        q_info = _lookup(self.padded, self.place, batch.positions, batch.seq, nobody=-1)
        k_info = _lookup(n_keys * KEYS, torch.arange(len(slots), device=device), positions, seq, nobody=-2)

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            q_pos, q_seq, k_pos, k_seq = q_info[0, i], q_info[1, i], k_info[0, j], k_info[1, j]
            return attention.visible(q_pos[None], k_pos[None], q_seq[None], k_seq[None])[0, 0]  # [1, 1] -> one

        ends = accumulate(chunk.kv_len for chunk in batch.chunks)
        begin = {chunk.row: end - chunk.kv_len for chunk, end in zip(batch.chunks, ends, strict=True)}
        spans = [(begin[tile.row] // KEYS, (begin[tile.row] + tile.kv_len - 1) // KEYS) for tile in tiles]
        spans += [(0, -1)] * (n_queries - len(tiles))  # nothing
        first, last = torch.tensor(spans, dtype=torch.int32, device=device).unbind(-1)  # [n_queries] each
        blocks = first[:, None] + torch.arange(n_keys, dtype=torch.int32, device=device)  # [n_queries, n_keys]
        self.mask = BlockMask.from_kv_blocks(
            (last - first + 1)[None, None],  # [1, 1, n_queries]: so many blocks of keys are read
            blocks.clamp(max=n_keys - 1)[None, None],  # [1, 1, n_queries, n_keys]: which; the rest of a row is unused
            BLOCK_SIZE=(size, KEYS),
            mask_mod=mask_mod,
            seq_lengths=(self.padded, n_keys * KEYS),
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, self.batch.slots, k, v)
        keys, values = self.pool.gather(layer, self.index)  # [n_keys * KEYS, Hkv, D]
        queries = q.new_zeros(self.padded, *q.shape[1:]).index_copy_(0, self.place, q)  # [n_queries * size, H, D]
        heads_first = (t.transpose(0, 1)[None] for t in (queries, keys, values))  # [1, H or Hkv, tokens, D]
        out = self.compute(*heads_first, block_mask=self.mask, enable_gqa=True)  # [1, H, n_queries * size, D]
        return out[0].transpose(0, 1)[self.place]  # [T, H, D]

    @staticmethod
    def why_not(model: Llama) -> str | None:
        """What the compiled kernel cannot do."""
        if model.device.type == "cuda":
            narrow = model.config.head_dim < 16  # the least that Triton's matmul takes
            return f"it needs a head dim of 16 or more, and the model's is {model.config.head_dim}" if narrow else None
        if model.dtype == torch.float64:
            return "on a CPU it computes in float32, bfloat16 and float16, and the model is in float64"
        if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            return "torch compiles it for CPUs with AVX2 or AVX-512, and this one has neither"
        compiler = os.environ.get("CXX", "g++")  # torch's own choice
        return None if shutil.which(compiler) else f"it needs a C++ compiler, and {compiler} is not on the PATH"


def _lookup(size: int, place: Tensor, positions: Tensor, seq: Tensor, nobody: int) -> Tensor:
    """Position and sequence of the token at each place, [2, size or more]; what has no token is of sequence `nobody`.

    How long it is gets compiled in, so it is a large power of two, to stay the same for long. Its length could be
    dynamic like the others, but torch's C++ kernel for CPUs can then mix up the names of two lengths (torch 2.13).
    """
    size = max(LOOKUP, 1 << (size - 1).bit_length())
    info = positions.new_full((2, size), nobody)  # [2, size]
    info[:, place] = torch.stack([positions, seq])
    torch._dynamo.mark_static(info)
    return info
