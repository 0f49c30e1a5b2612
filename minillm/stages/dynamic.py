"""Stage 4, dynamic: a finished row is refilled at once. The newcomer's prompt of n tokens pads everyone else's
single token to n: (n - 1)(B - 1) pads."""

from collections.abc import Iterable, Iterator

import torch

from minillm.batch import rectangle
from minillm.cache import CachedAttend, KVCache
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.sampling import sample


def generate(model: Llama, requests: Iterable[Request], max_running: int = 8) -> Iterator[Event]:
    requests = list(requests)
    arrivals = Arrivals(requests)
    size = max((request.most_slots for request in requests), default=0) + 1  # the last place takes pads alone
    cache = KVCache(model, max_running, size)
    rows: list[Request | None] = [None] * max_running
    while True:
        free = [b for b, request in enumerate(rows) if request is None or request.finish_reason is not None]
        for b, newcomer in zip(free, arrivals.take(len(free), wait=len(free) == len(rows)), strict=False):
            rows[b] = newcomer
        live = {b: r for b, r in enumerate(rows) if r is not None and r.finish_reason is None}
        if not live:
            return
        # a row that is not live is fed a token whose result nobody reads
        new = [request.tokens[request.computed :] if request else [0] for request in rows]
        starts = [request.computed if request else 0 for request in rows]
        tokens, positions, last = rectangle(new, starts, size, model.device)  # [B, T], [B, T], [B]
        hidden = model(tokens, positions, CachedAttend(cache, positions))  # [B, T, d]
        hidden = hidden[torch.arange(len(rows), device=model.device), last][list(live)]  # [live, d]
        sampled = sample(model.logits(hidden), list(live.values()))
        for (b, request), (token, logprobs) in zip(live.items(), sampled, strict=True):
            request.computed += len(new[b])
            yield request.accept(token, logprobs)
