"""CUDA graphs: the operations of a decode step recorded once, and launched from then on by a single call.

An eager step asks the GPU for hundreds of small operations, one after the other, and each costs the host some
microseconds. Where the GPU is done with an operation sooner than that, it waits for the host, and the step takes as
long as the asking. A graph needs no asking, but it repeats blindly: the same operations, with the same shapes, on the
same addresses. So only those steps are recorded that look alike, with one token of each sequence, and

    shapes      there is a graph for some numbers of rows, and a step is filled up to the next one with dummy rows
    addresses   the step's four lists go into buffers that never move; K and V, the weights and the slot table do not
    the host    nothing waits for it inside: not even for the new entries of the slot table, which the graph makes

All other steps, with chunks of prompts in them, run eagerly.

    5 rows in the graph for 8         tokens      a  b  c  d  e  0  0  0
                                      positions   9  3 70  4 12  0  0  0
                                      seq         2  0  1  4  3  R  R  R     R: a row of the table that is all scratch
                                      slots       .  .  .  .  .  S  S  S     S: the scratch slot

Source: PyTorch's notes on CUDA semantics, "CUDA Graphs"; padding to recorded sizes and recording the largest first, so
that the smaller ones fit into its memory, as vLLM does.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.batch import Batch, Chunk, pack
from minillm.cache import KVPool
from minillm.kernels import Backend
from minillm.model import Llama
from minillm.request import Request
from minillm.sampling import Sampled, greedy, sample
from minillm.scheduler import Plan

Outputs = tuple[Tensor, Tensor]  # logits [B, V], greedy tokens [B]: in the same memory at every call
Step = Callable[[], Outputs]
Record = Callable[[Step], Step]  # from operations to the same ones, recorded


def buckets(most: int) -> list[int]:
    """The numbers of rows B that get a graph, in order: powers of two, from 32 on every 32, and `most` itself.

    A step reads all weights once, for however many rows, and another row is next to free until the arithmetic takes as
    long as the reading (in bfloat16 on an H200, at 790 TFLOP/s and 4.3 TB/s, at 184 rows). A dummy row attends to one
    slot. So large steps need no close fit; the smallest have matrix products of kinds of their own. And each graph
    costs time at the start, and memory for its logits.
    """
    sizes = [1, 2, 4, 8, 16, *range(32, most, 32)]
    return [size for size in sizes if size < most] + [most]


def decodes(plan: Plan) -> bool:
    """Whether each sequence of the step gets one token, after which just one is sampled for it."""
    return all(n == request.pending == 1 and not request.samples for request, n in plan)


class Graphs:
    """The decode steps of one engine. Recorded when the engine starts: then the largest can be first, no text waits for
    a recording later, and what does not fit into memory shows at once.

    The backend's Attends are built once for each number of rows, over a batch that stands for all later ones: they may
    take the shapes from it, but must read `batch` and `pool.table` whenever they are called. A backend says that its
    do so by `fixed_shape = True`.
    """

    def __init__(self, model: Llama, pool: KVPool, backend: Backend, most: int, record: Record):
        self.model, self.pool, self.backend = model, pool, backend
        scratch, self.row = pool.k.shape[2] - 1, most
        if len(pool.table) == most:  # one row more, which the dummies share
            pool.table = torch.cat((pool.table, torch.full_like(pool.table[:1], scratch)))  # [most + 1, max_len]
        self.dummy = torch.tensor([[0], [0], [self.row], [scratch]])  # [4, 1] token, position, seq, slot
        self.here = HostTable(pool)
        self.inputs = torch.empty(4 * most, dtype=torch.int64, device=model.device)  # the first 4 B: rows of [4, B]
        self.staged = torch.empty(4 * most, dtype=torch.int64, pin_memory=model.device.type == "cuda")
        self.replays: dict[int, Step] = {}
        for size in reversed(buckets(most)):
            self._fill(self.dummy[:, :0], size)
            self.replays[size] = record(self._step(size))

    def __call__(self, plan: Plan) -> dict[Request, Sampled]:
        """A plan that `decodes`, run: what is sampled for each request."""
        batch, n = pack(plan, self.here), len(plan)
        size = self.size_for(n)
        self._fill(torch.stack((batch.tokens, batch.positions, batch.seq, batch.slots)), size)
        logits, best = self.replays[size]()
        return dict(zip(batch.samples, sample(logits[:n], batch.samples, best[:n]), strict=True))

    def size_for(self, n: int) -> int:
        """The rows of the graph that n rows fit into."""
        return min(size for size in self.replays if size >= n)

    def _step(self, size: int) -> Step:
        """What is recorded for so many rows B."""
        tokens, positions, seq, slots = self.inputs[: 4 * size].view(4, size)  # [B] each
        last = torch.arange(size, device=self.inputs.device)  # [B]
        batch = Batch(tokens, positions, seq, slots, last, [], [Chunk(self.row, 0, 1)] * size)
        attend = self.backend(self.pool, batch)

        def step() -> Outputs:
            self.pool.table[seq, positions] = slots
            logits = self.model.logits(self.model(tokens, positions, attend))  # [B, V]
            return logits, greedy(logits)

        return step

    def _fill(self, rows: Tensor, size: int) -> None:
        """Rows [4, n] and dummies behind them, into the buffers that the graph of this size reads: one copy over.

        It goes on while the host does. It has ended long before the next one is staged, since every step fetches what
        it sampled.
        """
        n = rows.shape[1]
        staged = self.staged[: 4 * size].view(4, size)  # [4, B]
        staged[:, :n], staged[:, n:] = rows, self.dummy
        self.inputs[: 4 * size].copy_(self.staged[: 4 * size], non_blocking=True)


class HostTable(KVPool):
    """The pool as `pack` shall see it: what it packs stays on the host, and so do the new entries of the slot table,
    which the graph makes in the real one. What is seldom is passed on: blocks that were found or forked."""

    def __init__(self, pool: KVPool):
        self.pool = pool
        self.table = torch.empty_like(pool.table, device="cpu")  # written, and never read

    def enter(self, row: int, start: int, slots: Sequence[int]) -> None:
        self.pool.enter(row, start, slots)

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        self.pool.copy(moves)


class Recorder:
    """Records on a GPU. All its graphs share one memory, so what one has put out may be gone when another has run."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                step()  # once for real: kernels are compiled and chosen, which cannot be recorded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.memory, stream=self.stream):
                outputs = step()  # nothing runs: the operations are only written down

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


def record_graphs(model: Llama, pool: KVPool, backend: Backend, most: int) -> Graphs | None:
    """Graphs for up to `most` rows; None where none can be: without a GPU, with a backend whose shapes vary, or while
    someone counts the calls of the model (`bench.harness`), since a replay makes none."""
    if model.device.type != "cuda" or not getattr(backend, "fixed_shape", False) or model._forward_pre_hooks:
        return None
    return Graphs(model, pool, backend, most, Recorder(model.device))
