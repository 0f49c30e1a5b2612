"""Stage 5, ragged: no batch axis. All sequences lie end to end, and a block-diagonal mask keeps them apart."""

from collections.abc import Iterable, Iterator

from minillm.batch import pack
from minillm.cache import KVPool
from minillm.kernels.dense import DenseAttend
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.sampling import sample
from minillm.slots import RegionSlots


def generate(model: Llama, requests: Iterable[Request], max_running: int = 8) -> Iterator[Event]:
    requests = list(requests)
    arrivals = Arrivals(requests)
    size = max((request.most_slots for request in requests), default=1)
    slots, pool = RegionSlots(max_running, size), KVPool(model, max_running * size, max_running, size)
    running: list[Request] = []
    while running or arrivals:
        running += arrivals.take(max_running - len(running), wait=not running)
        plan = [(request, request.pending) for request in running]
        for request, n in plan:
            slots.reserve(request, n)
        batch = pack(plan, pool)  # T = the sum of all n
        hidden = model(batch.tokens, batch.positions, DenseAttend(pool, batch))  # [T, d]
        sampled = sample(model.logits(hidden[batch.last]), batch.samples)
        for request, (token, logprobs) in zip(batch.samples, sampled, strict=True):
            request.computed = len(request.tokens)
            yield request.accept(token, logprobs)
            if request.finish_reason is not None:
                slots.release(request)
        running = [request for request in running if request.finish_reason is None]
