"""Stage 9, kernels: the same steps and the same memory; attention by whichever backend is the fastest here."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby

from minillm.engine import Engine
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.sharing import SharedSlots


def generate(
    model: Llama,
    requests: Iterable[Request],
    max_running: int = 8,
    budget: int = 256,
    n_slots: int | None = None,  # None: as many as would do for all, were they of the longest request's length
    block: int = 16,
    backend: str = "auto",
) -> Iterator[Event]:
    requests = list(requests)
    arrivals = Arrivals(requests)
    size = max((request.most_slots for request in requests), default=1)
    slots = partial(SharedSlots, n_slots=n_slots, size=block)
    engine = Engine(model, max_running=max_running, budget=budget, max_len=size, slots=slots, backend=backend)
    while engine.busy or arrivals:
        taken = arrivals.take(len(requests), wait=not engine.busy)
        for _, samples in groupby(taken, key=lambda request: (request.prompt, request.seed)):
            engine.submit(*samples)
        yield from engine.step()
