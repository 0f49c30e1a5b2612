"""One mask over everything: T new tokens against all S context positions of all sequences, block-diagonal.

The plainest way to attend over sequences laid end to end, and the oracle for the others. It computes T x sum(S)
scores, of which only the blocks on the diagonal are used:

    3 tokens of sequence a (1 computed before), 1 of b (2 before):

                 a a a a  b b b
            a    1 1 . .  . . .
            a    1 1 1 .  . . .
            a    1 1 1 1  . . .
            b    . . . .  1 1 1
"""

from torch import Tensor

from minillm import attention
from minillm.batch import Batch, context
from minillm.cache import KVPool


class DenseAttend:
    def __init__(self, pool: KVPool, batch: Batch):
        self.pool, self.batch = pool, batch
        slots, positions, seq = context(batch, pool.table)  # [S] each
        self.index = pool.index(slots)  # [Hkv, S]
        self.mask = attention.visible(batch.positions, positions, batch.seq, seq)  # [T, S]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, self.batch.slots, k, v)
        return attention.sdpa(q, *self.pool.gather(layer, self.index), self.mask)  # [T, H, D]
