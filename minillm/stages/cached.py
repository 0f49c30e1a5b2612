"""Stage 1, cached: K and V are kept, so each token goes through the model once."""

from collections.abc import Iterable, Iterator

from minillm.batch import line
from minillm.cache import CachedAttend, KVCache
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.sampling import sample


def generate(model: Llama, requests: Iterable[Request]) -> Iterator[Event]:
    arrivals = Arrivals(requests)
    while taken := arrivals.take(1):
        yield from run(model, taken[0])


def run(model: Llama, request: Request) -> Iterator[Event]:
    cache = KVCache(model, request.most_slots)
    while request.finish_reason is None:
        new = request.tokens[request.computed :]
        tokens, positions = line(new, request.computed, model.device)  # [T]: the prompt, then one at a time
        hidden = model(tokens, positions, CachedAttend(cache, positions))  # [T, d]
        request.computed += len(new)
        [(token, logprobs)] = sample(model.logits(hidden[-1:]), [request])
        yield request.accept(token, logprobs)
