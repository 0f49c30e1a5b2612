"""One fused attention of torch's for each sequence, over its own slots: nothing is padded, only the future is masked.

The plainest fast path, on a CPU and on CUDA: `scaled_dot_product_attention` (SDPA) never writes the scores to memory
(FlashAttention, Dao et al. 2022). The price is a call for each sequence: much for many single tokens, little for a few
long chunks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minillm import attention
from minillm.batch import Batch, Chunk
from minillm.cache import KVPool


class SegmentsAttend:
    def __init__(self, pool: KVPool, batch: Batch):
        self.pool, self.batch = pool, batch
        self.lengths = [chunk.n for chunk in batch.chunks]  # N
        self.indices = [pool.index(pool.table[chunk.row, : chunk.kv_len]) for chunk in batch.chunks]  # [Hkv, S] each
        self.rules = [_rule(chunk, pool.table.device) for chunk in batch.chunks]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, self.batch.slots, k, v)
        out = []
        for part, index, rule in zip(q.split(self.lengths), self.indices, self.rules, strict=True):
            keys, values = self.pool.gather(layer, index)  # [S, Hkv, D]
            part, keys, values = (t.transpose(0, 1)[None] for t in (part, keys, values))  # [1, heads, n or S, D]
            seen = scaled_dot_product_attention(part, keys, values, enable_gqa=True, **rule)  # [1, H, n, D]
            out.append(seen[0].transpose(0, 1))  # [n, H, D]
        return torch.cat(out)  # [T, H, D]


def _rule(chunk: Chunk, device: torch.device) -> dict[str, Any]:
    """Who sees whom, in SDPA's arguments.

    Its `is_causal` aligns top-left, and is right only where nothing was computed before. A single token sees all there
    is. What is left is a chunk after others: a mask [n, S] by positions.
    """
    if chunk.start == 0:
        return {"is_causal": True}
    if chunk.n == 1:
        return {}
    positions = torch.arange(chunk.kv_len, device=device)  # [S]
    return {"attn_mask": attention.visible(positions[chunk.start :], positions)}  # bool [n, S]
