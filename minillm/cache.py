"""KV memory: a rectangle for the early stages (`KVCache`), flat slots behind a table for the later ones (`KVPool`).

Both keep the heads first, [L, Hkv, ..., D], because attention multiplies head by head: what it reads is then
contiguous. Nobody outside this file knows the layout; keys come back as [..., Hkv, D].
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm import attention
from minillm.device import memory_bytes, upload
from minillm.errors import InputError
from minillm.model import Llama


def check_room(model: Llama, positions: int) -> None:
    """Raises InputError if K and V of so many positions are more than the whole memory of the model's device."""
    wanted, there = positions * model.config.kv_bytes_per_token(model.dtype.itemsize), memory_bytes(model.device)
    if wanted > there:
        raise InputError(
            f"K and V of {positions} positions take {wanted / 1e9:.3g} GB, and {model.device} has "
            f"{there / 1e9:.3g} GB; run fewer texts at once, or shorter ones"
        )


class KVCache:
    """One rectangle: position p of a sequence (or of row b, if there are rows) has a fixed place.

    `shape` is [S] for one sequence or [B, S] for B rows. It starts as zeros: what is not written yet is masked,
    and a mask can hide any number but NaN.
    """

    def __init__(self, model: Llama, *shape: int):
        c = model.config
        size = (c.n_layers, c.n_kv_heads, *shape, c.head_dim)
        check_room(model, math.prod(shape))
        self.k = torch.zeros(size, dtype=model.dtype, device=model.device)  # [L, Hkv, ..., S, D]
        self.v = torch.zeros_like(self.k)
        self.rows = [torch.arange(n, device=model.device)[:, None] for n in shape[:-1]]  # [B, 1], or nothing

    def store(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k, v [..., T, Hkv, D] at positions [..., T]."""
        where: tuple[slice | Tensor, ...] = (slice(None), *self.rows, positions)
        self.k[layer][where] = k.movedim(-2, 0)  # [Hkv, ..., T, D]
        self.v[layer][where] = v.movedim(-2, 0)

    def read(self, layer: int, size: int) -> tuple[Tensor, Tensor]:
        """K and V of positions 0 .. size-1, [..., size, Hkv, D] each (views)."""
        k, v = self.k[layer][..., :size, :], self.v[layer][..., :size, :]  # [Hkv, ..., size, D]
        return k.movedim(0, -2), v.movedim(0, -2)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class CachedAttend:
    """Stores the new K and V at their positions, then looks at everything stored up to each query's own position."""

    def __init__(self, cache: KVCache, positions: Tensor):
        self.cache, self.positions = cache, positions  # [..., T]
        self.size = int(positions.max()) + 1  # S
        self.mask = attention.visible(positions, torch.arange(self.size, device=positions.device))  # [..., T, S]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.store(layer, self.positions, k, v)
        return attention.sdpa(q, *self.cache.read(layer, self.size), self.mask)


class KVPool:
    """Flat slots. Which slot holds position p of the sequence in row r, `table[r, p]` says, and nothing else does.

    The last slot is scratch, outside the total: rows that stand for nothing may write there.
    """

    def __init__(self, model: Llama, n_slots: int, max_running: int, max_len: int):
        c = model.config
        size = (c.n_layers, c.n_kv_heads, n_slots + 1, c.head_dim)
        check_room(model, n_slots)
        # not cleared: a free slot is never read, and memory that is never touched costs nothing on a CPU
        self.k = torch.empty(size, dtype=model.dtype, device=model.device)  # [L, Hkv, slots, D]
        self.v = torch.empty_like(self.k)
        self.table = torch.zeros(max_running, max_len, dtype=torch.int64, device=model.device)

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k, v [T, Hkv, D] into slots [T]."""
        self.k[layer].index_copy_(1, slots, k.transpose(0, 1))  # [Hkv, T, D]
        self.v[layer].index_copy_(1, slots, v.transpose(0, 1))

    def enter(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Writes down where positions start, start+1, .. of the sequence in this row lie."""
        self.table[row, start : start + len(slots)] = upload(slots, torch.int64, self.table.device)

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """K and V of all layers, from slot to slot: all are read before the first is written."""
        if not moves:
            return
        source, target = upload(moves, torch.int64, self.table.device).unbind(-1)  # [n] each
        for memory in (self.k, self.v):
            memory.index_copy_(2, target, memory.index_select(2, source))  # [L, Hkv, n, D]

    def index(self, slots: Tensor) -> Tensor:
        """Where the slots [..., S] lie in every head's memory, [Hkv, ..., S]: once per step, for `gather`."""
        Hkv, size = self.k.shape[1:3]
        return torch.arange(0, Hkv * size, size, device=slots.device).view(-1, *[1] * slots.dim()) + slots

    def gather(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at an index [Hkv, ..., S] made by `index`: [..., S, Hkv, D] each, contiguous head by head."""
        # as rows of one long matrix, which is faster than selecting within each head
        k, v = (memory[layer].flatten(0, 1).index_select(0, index.flatten()) for memory in (self.k, self.v))
        return k.unflatten(0, index.shape).movedim(0, -2), v.unflatten(0, index.shape).movedim(0, -2)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes
