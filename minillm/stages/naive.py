"""Stage 0, naive: for each new token, the whole text so far goes through the model again."""

from collections.abc import Iterable, Iterator

from minillm.attention import SelfAttend
from minillm.batch import line
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.sampling import sample


def generate(model: Llama, requests: Iterable[Request]) -> Iterator[Event]:
    arrivals = Arrivals(requests)
    while taken := arrivals.take(1):
        yield from run(model, taken[0])


def run(model: Llama, request: Request) -> Iterator[Event]:
    while request.finish_reason is None:
        tokens, positions = line(request.tokens, 0, model.device)  # [T]
        hidden = model(tokens, positions, SelfAttend(positions))  # [T, d]
        [(token, logprobs)] = sample(model.logits(hidden[-1:]), [request])
        yield request.accept(token, logprobs)
