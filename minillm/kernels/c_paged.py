"""Attention in C over the slot table (native/attention.c): each K and V is read once, where it lies.

Nothing is gathered and nothing padded, so there is nothing to prepare: a token needs its row of the table and its
position. A chunk goes in blocks of neighbouring queries, which read K and V together. The idea is PagedAttention's
(Kwon et al. 2023), with the online softmax of FlashAttention (Dao et al. 2022).
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache import KVPool
from minillm.model import Llama
from minillm.native import STEP, NotCompiled, function, library


class CPagedAttend:
    def __init__(self, pool: KVPool, batch: Batch):
        self.pool, self.batch = pool, batch
        _, self.Hkv, _, self.D = pool.k.shape  # [L, Hkv, slots, D]
        self.per_layer = pool.k.stride(0) * pool.k.itemsize  # bytes
        self.memory = pool.k.data_ptr(), pool.v.data_ptr()
        self.step = tuple(x.data_ptr() for x in (pool.table, batch.seq, batch.positions, batch.slots))
        self.strides = pool.k.stride(1), pool.table.stride(0)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T, H, D = q.shape
        assert all(x.stride()[1:] == (D, 1) for x in (q, k, v)) and q.dtype == self.pool.k.dtype
        out = q.new_empty(T, H, D)
        compiled(q.dtype, D, H // self.Hkv)(
            *(x.data_ptr() for x in (q, k, v, out)),
            *(memory + layer * self.per_layer for memory in self.memory),
            *self.step,
            *(T, self.Hkv, q.stride(0), k.stride(0), v.stride(0), *self.strides),
            torch.get_num_threads(),
        )
        return out

    @staticmethod
    def why_not(model: Llama) -> str | None:
        D, G = model.config.head_dim, model.config.n_heads // model.config.n_kv_heads
        if model.device.type != "cpu":
            return f"it runs on a CPU, and the model is on {model.device}"
        if D % STEP:
            return f"its head dim must be a multiple of {STEP}, and it is {D}"
        try:
            compiled(model.dtype, D, G)
        except NotCompiled as error:
            return str(error)
        return None


@cache
def compiled(dtype: torch.dtype, D: int, G: int) -> Callable[..., None]:
    return function(library("attention", dtype, D=D, G=G), "attend", pointers=10, integers=7)
