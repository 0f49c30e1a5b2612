"""Stage 6, continuous: who is in the batch changes every step, under a budget of tokens (see `engine`, `scheduler`)."""

from collections.abc import Iterable, Iterator

from minillm.engine import Engine
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request


def generate(model: Llama, requests: Iterable[Request], max_running: int = 8, budget: int = 256) -> Iterator[Event]:
    requests = list(requests)
    arrivals = Arrivals(requests)
    size = max((request.most_slots for request in requests), default=1)
    engine = Engine(model, max_running=max_running, budget=budget, max_len=size)
    while engine.busy or arrivals:
        for request in arrivals.take(len(requests), wait=not engine.busy):
            engine.submit(request)
        yield from engine.step()
