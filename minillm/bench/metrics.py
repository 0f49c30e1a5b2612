"""What a run's time stamps mean. Pure functions, with the definitions of vLLM's serving benchmark.

ttft  time to first token: first token minus arrival, waiting in the queue included
itl   inter-token latencies: the gaps between one request's tokens, as a list
tpot  time per output token: (e2el - ttft) / (n_out - 1); a request of one token has none
e2el  end-to-end latency: last token minus arrival

Other tools use the same names for other things. All times are in seconds. Tokens are counted as the ids
that the engine emitted, never by tokenizing the text again: a hundred blanks are a hundred tokens, not
seven.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DEFINITIONS = {
    "ttft": "first token minus arrival, in seconds, waiting in the queue included",
    "itl": "gaps between the tokens of one request, all requests together, in seconds",
    "tpot": "(e2el - ttft) / (n_out - 1) of each request with at least two tokens, in seconds",
    "e2el": "last token minus arrival, in seconds",
    "wall": "last token of the run minus its start, in seconds: the time base of every throughput",
    "prompt_throughput": "prompt tokens / wall",
    "output_throughput": "output tokens / wall",
    "total_token_throughput": "(prompt + output tokens) / wall",
    "request_throughput": "requests / wall",
    "request_goodput": "requests whose ttft and tpot keep the stated limits / wall",
}


def ttft(arrival: float, times: Sequence[float]) -> float:
    return times[0] - arrival


def itl(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def e2el(arrival: float, times: Sequence[float]) -> float:
    return times[-1] - arrival


def tpot(arrival: float, times: Sequence[float]) -> float | None:
    """None for a request of one token, as in vLLM."""
    if len(times) < 2:
        return None
    return (e2el(arrival, times) - ttft(arrival, times)) / (len(times) - 1)


@dataclass(frozen=True)
class Stats:
    """mean, median, p95 and p99 of some values (linear interpolation, as numpy.percentile)."""

    mean: float
    median: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Stats | None":
        """None if there are no values."""
        if not values:
            return None
        return cls(float(np.mean(values)), *(float(np.percentile(values, q)) for q in (50, 95, 99)))


@dataclass(frozen=True)
class Summary:
    """The metrics of one run. Prompt and output tokens are never added up, except in `total`."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    wall: float
    prompt_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_throughput: float
    ttft: Stats | None
    tpot: Stats | None
    itl: Stats | None
    e2el: Stats | None


def summarize(prompt_lengths: Sequence[int], arrivals: Sequence[float], times: Sequence[Sequence[float]]) -> Summary:
    """One entry per request; `times` are those of its output tokens, in seconds after the start."""
    answered = [(arrival, t) for arrival, t in zip(arrivals, times, strict=True) if t]
    wall = max((t[-1] for _, t in answered), default=0.0)
    prompt_tokens, output_tokens = sum(prompt_lengths), sum(len(t) for t in times)

    def per_second(count: int) -> float:
        return count / wall if wall > 0 else 0.0

    return Summary(
        requests=len(times),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        wall=wall,
        prompt_throughput=per_second(prompt_tokens),
        output_throughput=per_second(output_tokens),
        total_token_throughput=per_second(prompt_tokens + output_tokens),
        request_throughput=per_second(len(times)),
        ttft=Stats.of([ttft(arrival, t) for arrival, t in answered]),
        tpot=Stats.of([value for arrival, t in answered if (value := tpot(arrival, t)) is not None]),
        itl=Stats.of([gap for _, t in answered for gap in itl(t)]),
        e2el=Stats.of([e2el(arrival, t) for arrival, t in answered]),
    )


def request_goodput(
    arrivals: Sequence[float], times: Sequence[Sequence[float]], limit_ttft: float, limit_tpot: float
) -> float:
    """Requests per second of the run that kept both limits, in seconds each (goodput: DistServe, Zhong et al. 2024).

    A request without a token did not; one of a single token has only the first limit.
    """
    kept = sum(
        bool(t) and ttft(arrival, t) <= limit_ttft and (tpot(arrival, t) or 0.0) <= limit_tpot
        for arrival, t in zip(arrivals, times, strict=True)
    )
    wall = max((t[-1] for t in times if t), default=0.0)
    return kept / wall if wall > 0 else 0.0
