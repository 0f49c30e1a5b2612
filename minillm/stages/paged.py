"""Stage 7, paged: KV memory in blocks, taken as a text grows; who finds none gives way and is computed anew."""

from collections.abc import Iterable, Iterator
from functools import partial

from minillm.engine import Engine
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.slots import BlockSlots


def generate(
    model: Llama,
    requests: Iterable[Request],
    max_running: int = 8,
    budget: int = 256,
    n_slots: int | None = None,  # None: as many as would do for all, were they of the longest request's length
    block: int = 16,
) -> Iterator[Event]:
    requests = list(requests)
    arrivals = Arrivals(requests)
    size = max((request.most_slots for request in requests), default=1)
    slots = partial(BlockSlots, n_slots=n_slots, size=block)
    engine = Engine(model, max_running=max_running, budget=budget, max_len=size, slots=slots)
    while engine.busy or arrivals:
        for request in arrivals.take(len(requests), wait=not engine.busy):
            engine.submit(request)
        yield from engine.step()
