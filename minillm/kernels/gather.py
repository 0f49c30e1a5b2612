"""Rectangles gathered from the pool: each group of similar sequences is one ordinary attention over its own slots.

No score is computed between two sequences, and padding is bounded by `batch.groups`.
"""

import torch
from torch import Tensor

from minillm import attention
from minillm.batch import Batch, groups
from minillm.cache import KVPool


class GatherAttend:
    def __init__(self, pool: KVPool, batch: Batch):
        self.pool, self.batch = pool, batch
        self.groups = [(group, pool.index(group.slots)) for group in groups(batch, pool.table)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, self.batch.slots, k, v)
        out = torch.empty_like(q)  # [T, H, D]
        for group, index in self.groups:
            keys, values = self.pool.gather(layer, index)  # [N, S, Hkv, D]
            out[group.queries] = attention.sdpa(q[group.queries], keys, values, group.mask)  # [N, t, H, D]
        return out
