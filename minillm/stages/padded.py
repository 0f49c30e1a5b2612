"""Stage 3, padded: several texts in one rectangle. They start together and end together; the pads are waste."""

from collections.abc import Iterable, Iterator

import torch

from minillm.batch import rectangle
from minillm.cache import CachedAttend, KVCache
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.sampling import sample


def generate(model: Llama, requests: Iterable[Request], max_running: int = 8) -> Iterator[Event]:
    arrivals = Arrivals(requests)
    while taken := arrivals.take(max_running):
        yield from run(model, taken)


def run(model: Llama, rows: list[Request]) -> Iterator[Event]:
    size = max(request.most_slots for request in rows) + 1  # the last place takes pads alone
    cache = KVCache(model, len(rows), size)
    while live := {b: r for b, r in enumerate(rows) if r.finish_reason is None}:
        # a row that is not live keeps its place, and is fed its last token again and again
        new = [request.tokens[request.computed :] for request in rows]
        starts = [request.computed for request in rows]
        tokens, positions, last = rectangle(new, starts, size, model.device)  # [B, T], [B, T], [B]
        hidden = model(tokens, positions, CachedAttend(cache, positions))  # [B, T, d]
        hidden = hidden[torch.arange(len(rows), device=model.device), last][list(live)]  # [live, d]
        sampled = sample(model.logits(hidden), list(live.values()))
        for (b, request), (token, logprobs) in zip(live.items(), sampled, strict=True):
            request.computed += len(new[b])
            yield request.accept(token, logprobs)
