"""A step from the middle of a run, made directly and made again: what a step costs depends on how many texts it holds
and how long they are, not on what they say.

To time a step over 32 texts of 4,096 tokens nobody has to compute 131,072 tokens first. Requests are given tokens and
slots, `computed` says that their K and V are stored, and the slots are filled with random numbers. The step is the
engine's own. After it the requests are put back to where they were, so that the next one is the same again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minillm.batch import Chunk
from minillm.bench.harness import Step, counting, now, visible
from minillm.config import Config
from minillm.engine import Engine
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, Request
from minillm.slots import RegionSlots, Slots


@dataclass(frozen=True)
class Place:
    """Where the requests stand: all have `length` tokens, of which `computed` are stored already."""

    running: int
    length: int
    computed: int

    @classmethod
    def decode(cls, running: int, context: int) -> "Place":
        """Each has one token to go, which looks at `context` positions, its own among them."""
        return cls(running, context, context - 1)

    @classmethod
    def prompt(cls, length: int) -> "Place":
        return cls(1, length, 0)

    def chunks(self, budget: int) -> list[list[Chunk]]:
        """What each step computes until all have their next token. Several requests must fit into one step."""
        pending = self.length - self.computed
        assert self.running == 1 or self.running * pending <= budget, "several requests in several steps"
        if self.running > 1:
            return [[Chunk(row, self.computed, pending) for row in range(self.running)]]
        starts = range(self.computed, self.length, budget)
        return [[Chunk(0, start, min(budget, self.length - start))] for start in starts]


def needed(place: Place, budget: int, config: Config, itemsize: int) -> list[Step]:
    """What the steps of a place have to do at least, counted: the scores that a query may see, and each live K and V
    read once."""
    steps = place.chunks(budget)
    found = []
    for chunks in steps:
        rows = place.running if chunks is steps[-1] else 0
        found.append(Step(sum(chunk.n for chunk in chunks), rows, *visible(chunks, config, itemsize)))
    return found


class Steady:
    """An engine whose requests stand where they are put, turn after turn.

    A turn is one step; for a prompt longer than the budget it is as many as the prompt takes. Raises InputError as
    `Engine` does.
    """

    def __init__(
        self,
        model: Llama,
        running: int,
        longest: int,
        backend: str,
        budget: int | None = None,
        slots: Callable[[int, int], Slots] = RegionSlots,
    ):
        budget = max(running, longest) if budget is None else budget
        self.engine = Engine(model, max_running=running, budget=budget, max_len=longest, backend=backend, slots=slots)
        self.place, self.steps = Place(0, 0, 0), 0
        # one row of noise for each position: heads and layers may share it, since each has memory of its own
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(longest, model.config.head_dim, generator=generator)
        self.noise = noise.to(model.device, model.dtype)  # [longest, D]

    @property
    def requests(self) -> Sequence[Request]:
        return self.engine.scheduler.running

    def put(self, place: Place) -> None:
        """New requests in place of the old ones. Their K and V are whatever is in memory: see `fill`."""
        scheduler, config = self.engine.scheduler, self.engine.model.config
        for request in reversed(scheduler.running):
            scheduler.slots.release(request)
        draw = random.Random(0)
        scheduler.running = []
        for _ in range(place.running):
            ids = [draw.randrange(config.vocab_size) for _ in range(place.length)]
            # two tokens may follow and one does: it never ends
            request = Request(ids, SamplingParams(temperature=0), seed=0, limit=2)
            scheduler.slots.reserve(request, place.length)
            request.computed = place.computed
            scheduler.running.append(request)
        self.place, self.steps = place, len(place.chunks(scheduler.budget))

    def fill(self) -> None:
        """Random numbers into the K and V that the requests say they have computed."""
        pool, n = self.engine.pool, self.place.computed
        noise = self.noise[:n].expand(*pool.k.shape[:2], -1, -1)  # [L, Hkv, n, D]
        for request in self.requests:
            slots = torch.tensor(request.slots[:n], dtype=torch.int64, device=pool.k.device)  # [n]
            pool.k.index_copy_(2, slots, noise)
            pool.v.index_copy_(2, slots, noise)

    def turn(self) -> tuple[float, list[Event]]:
        """Its seconds, and a token for each request; they are taken back before the next turn."""
        events: list[Event] = []
        begun = now(self.engine.model.device)
        for _ in range(self.steps):
            events += self.engine.step()
        seconds = now(self.engine.model.device) - begun
        assert len(events) == len(self.requests), "a turn gives each request one token"
        for request in self.requests:
            del request.tokens[self.place.length :]
            request.computed = self.place.computed
        return seconds, events

    def count(self) -> list[Step]:
        """One turn, counted: what its steps did in `attention.sdpa`, or what a backend without it cannot do without."""
        with counting(self.engine.model, []) as counts:
            self.turn()
        return counts.steps
