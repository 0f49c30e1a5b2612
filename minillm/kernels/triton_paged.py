"""Attention straight from the slots: a Triton kernel that follows the slot table itself, so nothing is gathered first.

`table[row, position]` says where a key lies, one slot at a time: regions and blocks of any size look the same. What
changes from step to step (positions, seq, slots, the table) is read on the device, and the grid depends on nothing but
the number of tokens, so a step of single tokens can be recorded in a CUDA graph and replayed over other contents.

Roofline. A position read by one key-value head is 2 D numbers, and G query heads make 4 G D operations of them: with
numbers of 2 bytes that is G operations for each byte. An H200 makes some 790e12 / 4.3e12 = 180 operations in the time
that it reads a byte, so decode with G = 3 or 4 waits for memory, 50 times over. What follows from that:

    one program has all G heads    K and V are read once, and never expanded or copied.
    tl.dot, not sums of products   G of its 16 rows are used. The idle ones cost 16 operations a byte, and 180 are free;
                                   by hand, [G, keys, D] products would fill the registers of slower units.
    blocks of 32 KB of K and V     To read 4.3e12 bytes/s with a delay of some 0.6 us, 2.6 MB must be on their way, or
                                   20 KB for each of 132 processors. Each needs a program that reads for it, hence
    splits                         of long contexts where rows are few.
    tiles of 16 queries            of a prompt read each block once for all of them, and the next tile finds most of it
                                   in the L2 cache.
"""

import importlib.util
import math
import os
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from minillm.batch import Batch, Chunk
from minillm.cache import KVPool
from minillm.model import Llama

QUERIES = 16  # most tokens in a tile
BLOCK_BYTES = 16384  # of K in a block of keys, and as much of V
ROWS = 64  # most queries times heads in a program: with 128 keys, its scores fill 32 registers of 256 threads
SPLIT = 256  # fewest positions of a full row of the table that are worth a program of their own


class TritonPagedAttend:
    """Built over the tensors of `batch` and reads them at each call; of the chunks only their number and lengths count.

    The first call with new shapes compiles: it must have been made once before one is recorded in a CUDA graph.
    """

    fixed_shape = True

    def __init__(self, pool: KVPool, batch: Batch):
        from minillm.kernels import triton_kernel

        self.kernels, self.pool, self.batch = triton_kernel, pool, batch
        self.queries = min(QUERIES, max(chunk.n for chunk in batch.chunks))
        device = pool.table.device
        if self.queries == 1:  # every token is a tile
            self.bounds = torch.arange(len(batch.chunks) + 1, dtype=torch.int32, device=device)  # [tiles + 1]
        else:
            self.bounds = torch.tensor(tiles(batch.chunks, self.queries), dtype=torch.int32).to(device)  # [tiles + 1]
        self.tiles, self.Hkv = len(self.bounds) - 1, pool.k.shape[1]
        self.splits = split_count(self.tiles * self.Hkv, pool.table.shape[1], processors(device))

    @staticmethod
    def why_not(model: Llama) -> str | None:
        """It needs triton, and either a GPU or triton's interpreter: TRITON_INTERPRET=1 before the program starts."""
        if importlib.util.find_spec("triton") is None:
            return "it needs triton, which is not installed (pip install triton)"
        if model.device.type == "cuda":
            return None
        if os.environ.get("TRITON_INTERPRET") != "1":
            return f"it needs a CUDA GPU, and the model is on {model.device}"
        # triton 3.7's interpreter holds bfloat16 as bare bits, and its dot multiplies these as integers
        return "triton's interpreter cannot multiply bfloat16; use float32" if model.dtype == torch.bfloat16 else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool, batch = self.pool, self.batch
        pool.store(layer, batch.slots, k, v)
        T, H, D = q.shape
        G = H // self.Hkv
        D_PAD = power_of_two(max(16, D))  # tl.dot wants 16 of everything
        rows = min(ROWS, power_of_two(max(16, self.queries * G)))
        parts = -(-self.queries * G // rows)
        wide = torch.promote_types(q.dtype, torch.float32)
        q, out = q.contiguous(), q.new_empty(T, H, D)
        answers = out if self.splits == 1 else q.new_empty(T, H, self.splits, D, dtype=wide)
        logsum = q.new_empty(T, H, self.splits, dtype=wide)
        with torch.cuda.device_of(q):  # triton launches on the current GPU
            self.kernels.attend[self.tiles * parts, self.Hkv, self.splits](
                *(q, pool.k[layer], pool.v[layer], answers, logsum),
                *(self.bounds, batch.positions, batch.seq, pool.table, pool.table.stride(0), pool.k.stride(1)),
                SCALE=D**-0.5 * math.log2(math.e),
                G=G,
                D=D,
                D_PAD=D_PAD,
                ROWS=rows,
                PARTS=parts,
                BLOCK=block_size(D_PAD * q.itemsize),
                # fixed, by what the compiler reports: nothing spills from the registers in 16 bits. More threads for
                # more rows, and the next block is on its way while one is multiplied.
                num_warps=4 if rows == 16 else 8,
                num_stages=2,
            )
            if self.splits > 1:
                self.kernels.merge[(T * H,)](answers, logsum, out, D=D, D_PAD=D_PAD, SPLITS=self.splits)
        return out


def tiles(chunks: Sequence[Chunk], queries: int) -> list[int]:
    """Where each tile of at most so many tokens begins, and the end of the last; none reaches into another chunk.

    Chunks of 5 and 1 in tiles of 2:  0 2 4 5 6
    """
    return list(accumulate((tile.n for chunk in chunks for tile in chunk.cut(queries)), initial=0))


def split_count(programs: int, width: int, processors: int) -> int:
    """How many programs share the positions of one tile and head: a power of two, from shapes alone.

    Two programs for each processor are enough. `width`: the table's positions. (Dao et al. 2023, Flash-Decoding)
    """
    most = min(2 * processors // programs, width // SPLIT)
    return 1 << max(1, most).bit_length() - 1


def processors(device: torch.device) -> int:
    """Streaming multiprocessors. Under the interpreter programs run one after another: splitting is of no use."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def block_size(key_bytes: int) -> int:
    """Keys at a time, of a power of two bytes each: at least the 16 of tl.dot."""
    return max(16, min(128, BLOCK_BYTES // key_bytes))


def power_of_two(n: int) -> int:
    """The smallest that is n or more."""
    return 1 << (n - 1).bit_length()
