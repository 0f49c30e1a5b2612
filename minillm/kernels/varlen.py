"""FlashAttention over sequences end to end: `varlen_attn`, which is told where each begins by cumulative lengths.

    3 new tokens after 4 computed, 1 after 2:   cu_seq_q  0  3  4      cu_seq_k  0  7  10

Source: FlashAttention-2 (Dao 2023). Its causal mask aligns the last query with the last key (bottom-right), so what was
computed before is seen: new tokens i of n see the first S - n + i + 1 of S keys, the rule `visible` by position.

What torch's function takes differs from release to release, so its signature is asked. Keys are gathered from the pool
as they lie end to end. Where it takes a block table, and every text of the step lies in whole pages, nothing is
gathered: it reads the pool itself.
"""

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from minillm.batch import Batch, context
from minillm.cache import KVPool
from minillm.model import Llama

PAGE = 256  # slots; FlashAttention-2 takes multiples of this, and refuses others


class VarlenAttend:
    """`compute` is torch's varlen_attn, as this release has it."""

    def __init__(self, pool: KVPool, batch: Batch, compute: Callable[..., Any] = varlen_attn):
        self.pool, self.batch, self.compute = pool, batch, compute
        queries, lengths = [chunk.n for chunk in batch.chunks], [chunk.kv_len for chunk in batch.chunks]
        ends = [[0, *accumulate(queries)], [0, *accumulate(lengths)]]
        self.cu_q, self.cu_k = torch.tensor(ends, dtype=torch.int32, device=pool.table.device)  # [N + 1] each
        self.max_q, self.max_k = max(queries), max(lengths)
        takes = inspect.signature(compute).parameters
        self.options: dict[str, Any] = {"window_size": (-1, 0)}  # as many before as there are, none after: causal
        self.grouped = "enable_gqa" in takes
        if self.grouped:
            self.options["enable_gqa"] = True
        slots, positions, seq = context(batch, pool.table)  # [S] each
        paged = {"block_table", "seqused_k", "num_splits"} <= takes.keys()
        self.pages = _pages(pool, batch, slots, positions, seq) if paged else None  # [N, P]
        if self.pages is None:
            self.index = pool.index(slots)  # [Hkv, S]
        else:
            # one split of the keys: with more, rows of the output are left unwritten (pytorch/pytorch#194167)
            self.options |= {"block_table": self.pages, "seqused_k": self.cu_k.diff(), "num_splits": 1}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, self.batch.slots, k, v)
        if self.pages is None:
            keys, values = self.pool.gather(layer, self.index)  # [S, Hkv, D]
        else:
            keys, values = (_in_pages(memory[layer]) for memory in (self.pool.k, self.pool.v))  # [pages, PAGE, Hkv, D]
        if not self.grouped:
            keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (keys, values))  # [S, H, D]
        out: Tensor = self.compute(q, keys, values, self.cu_q, self.cu_k, self.max_q, self.max_k, **self.options)
        return out  # [T, H, D]

    @staticmethod
    def why_not(model: Llama) -> str | None:
        device, dtype, D = model.device, model.dtype, model.config.head_dim
        if device.type != "cuda":
            return f"it needs a CUDA GPU, and the model is on {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in float16 and bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
        if D % 8 or D > 256:
            return f"it needs a head dim that is a multiple of 8, at most 256, and the model's is {D}"
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"it needs compute capability 8.0, and this GPU has {major}.{minor}"


def _pages(pool: KVPool, batch: Batch, slots: Tensor, positions: Tensor, seq: Tensor) -> Tensor | None:
    """The block table, int32 [N, P], if each text of this step lies in whole pages of the pool; else None.

    It does in regions or blocks of a multiple of PAGE slots. The slot table does not say so: it is looked at, and
    reading the answer makes the step wait once for the device.
    """
    heads = pool.table[seq, positions // PAGE * PAGE]  # [S]: the slot at which the page of each begins
    whole = (heads % PAGE == 0) & (heads + PAGE <= pool.k.shape[2])
    if not bool((whole & (slots == heads + positions % PAGE)).all()):
        return None
    lengths = [chunk.kv_len for chunk in batch.chunks]  # N
    rows, used = torch.tensor([[c.row for c in batch.chunks], lengths], device=slots.device)  # [N] each
    starts = torch.arange(0, max(lengths), PAGE, device=slots.device)  # [P]
    pages = (pool.table[rows[:, None], starts] // PAGE).to(torch.int32)  # [N, P]
    return torch.where(starts < used[:, None], pages, pages[:, :1])  # past its end a text's row may hold anything


def _in_pages(memory: Tensor) -> Tensor:
    """One layer's memory [Hkv, slots, D] as [pages, PAGE, Hkv, D], a view; the rest of the last page is left out."""
    whole = memory.shape[1] // PAGE * PAGE
    return memory[:, :whole].unflatten(1, (-1, PAGE)).movedim(0, -2)
