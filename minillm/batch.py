"""From lists of token ids to the tensors of one step. The only place that does index arithmetic.

T new tokens in this step · N sequences in the step · B rows of a rectangle · S context positions · M rows to sample
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm import attention
from minillm.cache import KVPool
from minillm.device import upload
from minillm.request import Request


def line(new: Sequence[int], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One sequence: its new tokens and their positions from `start` on, [T] each."""
    assert new, "a step needs at least one token"
    return torch.tensor(new, device=device), torch.arange(start, start + len(new), device=device)


def rectangle(
    new: Sequence[Sequence[int]], starts: Sequence[int], size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of unequal length, padded on the right: tokens and positions [B, T], and each row's last real index [B].

    A pad's position goes on counting, so its K and V land where no real token of its row can look before the real
    one overwrites them: no pad mask is needed. Past the end of the cache (`size` positions) pads share the last
    place, which no real token reaches.

        3 new tokens from 5, 1 from 9, size 12:   positions   5  6  7      tokens   a  b  c
                                                               9 10 11               d  .  .
    """
    T = max(len(row) for row in new)
    tokens = torch.tensor([[*row, *[0] * (T - len(row))] for row in new], device=device)  # [B, T]
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(T, device=device)  # [B, T]
    last = torch.tensor([len(row) - 1 for row in new], device=device)  # [B]
    return tokens, positions.clamp(max=size - 1), last


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one sequence in one step."""

    row: int  # of the slot table
    start: int  # position of its first new token
    n: int  # new tokens

    @property
    def kv_len(self) -> int:
        """Positions it reads: all that was computed, and its new tokens."""
        return self.start + self.n

    def cut(self, size: int) -> "list[Chunk]":
        """In pieces of at most `size` tokens: chunks themselves, each of which begins where the one before it ends."""
        return [Chunk(self.row, self.start + i, min(size, self.n - i)) for i in range(0, self.n, size)]


@dataclass(frozen=True)
class Batch:
    """One step over N sequences laid end to end, without pads."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T] in their own sequence
    seq: Tensor  # [T] row of the slot table
    slots: Tensor  # [T] where each token's K and V go
    last: Tensor  # [M] the tokens after which one is sampled
    samples: list[Request]  # the M requests these belong to
    chunks: list[Chunk]  # N, in order


def pack(plan: Sequence[tuple[Request, int]], pool: KVPool) -> Batch:
    """[(request, n new tokens)] to one step's tensors; enters the new slots in the pool's table.

    Where several samples begin with this prompt, the row of its last token is sampled once for each.
    """
    tokens: list[int] = []
    positions: list[int] = []
    seq: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    samples: list[Request] = []
    chunks: list[Chunk] = []
    pool.copy([move for request, _ in plan for move in request.moves])  # before anything of this step is written
    for request, n in plan:
        request.moves = []
        start, stop = request.computed, request.computed + n
        assert request.row is not None and 0 < n <= request.pending and len(request.slots) >= stop
        if request.entered < start:  # slots that it did not fill itself: found, or held since before a fork
            pool.enter(request.row, request.entered, request.slots[request.entered : start])
        request.entered = stop
        tokens += request.tokens[start:stop]
        positions += range(start, stop)
        seq += [request.row] * n
        slots += request.slots[start:stop]
        chunks.append(Chunk(request.row, start, n))
        if n == request.pending:
            together = [request, *request.samples]
            last += [len(tokens) - 1] * len(together)
            samples += together
    device = pool.table.device
    index = upload([tokens, positions, seq, slots], torch.int64, device)  # [4, T]: one copy over
    pool.table[index[2], index[1]] = index[3]
    ends = upload(last, torch.int64, device)  # [M]
    return Batch(index[0], index[1], index[2], index[3], ends, samples, chunks)


def context(batch: Batch, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every position that some token of the step may look at, sequences end to end: slots, positions, seq, [S] each."""
    device = table.device
    positions = torch.cat([torch.arange(chunk.kv_len, device=device) for chunk in batch.chunks])  # [S]
    rows = torch.tensor([chunk.row for chunk in batch.chunks], device=device)  # [N]
    lengths = torch.tensor([chunk.kv_len for chunk in batch.chunks], device=device)  # [N]
    seq = rows.repeat_interleave(lengths)  # [S]
    return table[seq, positions], positions, seq


# A slot read for nothing costs tens of nanoseconds a layer on a CPU, one more rectangle some 90 microseconds of small
# operations: a rectangle is split where it would read more than this many slots for nothing.
SPLIT = 3000

# One rectangle over a whole chunk of n queries computes some n * n / 2 scores of keys that come after their query. Cut
# into tiles of t queries, each over only the positions up to its last, the chunk wastes n * t / 2 of them, and pays for
# n / t rectangles. With the 90 microseconds of above and some 20 nanoseconds for a score of all heads (9 at 2 ns each)
# the sum is least at t = sqrt(2 * 90,000 / 20) = 95, and flat around it. The next power of two suits matmuls.
TILE = 128


@dataclass(frozen=True)
class Group:
    """Sequences with the same number of new tokens, as one rectangle: N rows of t queries and S context slots."""

    queries: Tensor  # [N, t] indices into the step's T tokens
    slots: Tensor  # [N, S]
    mask: Tensor  # bool [N, t, S]


def groups(batch: Batch, table: Tensor) -> list[Group]:
    """Splits a step into rectangles: single tokens by similar length of context, longer chunks one by one, in tiles.

    A row shorter than its rectangle repeats its own first slot: a free slot, which may hold anything, is never read.
    A tile reads no further than its own last token (x: a score computed and masked, a dot: not computed at all).

        TILE 2, 5 new tokens after 1:   1 1 x . . .
                                        1 1 1 . . .
                                        1 1 1 1 x .
                                        1 1 1 1 1 .
                                        1 1 1 1 1 1   a single token, which joins the others
    """
    tiles = [tile for chunk in batch.chunks for tile in chunk.cut(TILE)]
    first = [0]
    for chunk in tiles:
        first.append(first[-1] + chunk.n)
    singles = sorted((i for i, c in enumerate(tiles) if c.n == 1), key=lambda i: tiles[i].kv_len)
    members: list[list[int]] = [[i] for i, chunk in enumerate(tiles) if chunk.n > 1]
    open_group: list[int] = []
    filled = 0  # slots in use in the group that is being filled
    for i in singles:
        kv_len = tiles[i].kv_len
        if not open_group or len(open_group) * kv_len - filled > SPLIT:
            open_group, filled = [], 0
            members.append(open_group)
        open_group.append(i)
        filled += kv_len
    return [_group(batch, table, [tiles[i] for i in ids], [first[i] for i in ids]) for ids in members]


def _group(batch: Batch, table: Tensor, chunks: list[Chunk], first: list[int]) -> Group:
    rows, kv_len, begin = torch.tensor(
        [[c.row for c in chunks], [c.kv_len for c in chunks], first], device=table.device
    )  # [N] each
    S = max(chunk.kv_len for chunk in chunks)
    positions = torch.arange(S, device=table.device)  # [S]
    queries = begin[:, None] + torch.arange(chunks[0].n, device=table.device)  # [N, t]
    slots = table[rows, :S]  # [N, S]
    slots = torch.where(positions < kv_len[:, None], slots, slots[:, :1])
    q_pos = batch.positions[queries]  # [N, t]
    return Group(queries, slots, attention.visible(q_pos, positions))  # [N, t, S]
