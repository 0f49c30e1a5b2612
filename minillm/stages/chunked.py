"""Stage 2, chunked: at most `chunk` tokens at a time, so memory no longer grows with the square of the prompt."""

from collections.abc import Iterable, Iterator

from minillm.batch import line
from minillm.cache import CachedAttend, KVCache
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.sampling import sample


def generate(model: Llama, requests: Iterable[Request], chunk: int = 256) -> Iterator[Event]:
    arrivals = Arrivals(requests)
    while taken := arrivals.take(1):
        yield from run(model, taken[0], chunk)


def run(model: Llama, request: Request, chunk: int) -> Iterator[Event]:
    cache = KVCache(model, request.most_slots)
    while request.finish_reason is None:
        new = request.tokens[request.computed :][:chunk]
        tokens, positions = line(new, request.computed, model.device)  # [T]: a piece of the prompt, or one token
        hidden = model(tokens, positions, CachedAttend(cache, positions))  # [T, d]
        request.computed += len(new)
        if request.computed == len(request.tokens):
            [(token, logprobs)] = sample(model.logits(hidden[-1:]), [request])
            yield request.accept(token, logprobs)
