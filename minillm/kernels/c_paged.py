"""Attention in C over the slot table (native/attention.c): each K and V is read once, where it lies.

Nothing is gathered and nothing padded, so there is nothing to prepare: a token needs its row of the table and its
position. Single tokens and chunks are the same to it. The idea is PagedAttention's (Kwon et al. 2023), with the online
softmax of FlashAttention (Dao et al. 2022).
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (T, H, D), Hkv = q.shape, k.shape[1]
        pool, batch = self.pool, self.batch
        out = q.new_empty(q.shape)  # [T, H, D]
        keys, values = pool.k[layer], pool.v[layer]  # [Hkv, slots, D]
        assert all(x.stride(1) == D and x.stride(2) == 1 for x in (q, k, v))
        compiled(q.dtype, D, H // Hkv)(
            *(x.data_ptr() for x in (q, k, v, out, keys, values)),
            *(x.data_ptr() for x in (pool.table, batch.seq, batch.positions, batch.slots)),
            *(T, Hkv, q.stride(0), k.stride(0), v.stride(0), keys.stride(0), pool.table.stride(0)),
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
