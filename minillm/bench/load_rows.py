"""What the runs of `load` were, in figures: pure functions of the answers and their times."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

import numpy as np

from minillm.bench.load import Health, Run
from minillm.bench.load_client import Answer
from minillm.bench.load_server import ServerFacts
from minillm.bench.metrics import Stats, itl

LATE = 0.010  # seconds after its time, from which a request was sent late

DEFINITIONS = {
    "ttft": "first piece with text minus the scheduled time (open loop) or the sending (closed loop), in seconds; "
    "connecting and queueing included",
    "itl": "gaps between pieces with text of one request, all requests together, in seconds",
    "tpot": "(e2el - ttft) / (n_out - 1) of each request with at least two tokens, n_out by usage, in seconds",
    "e2el": "last piece minus the same beginning as ttft, in seconds",
    "wall": "last piece of the run minus its start, in seconds: the time base of every throughput",
    "request_throughput": "completed requests / wall",
    "output_throughput": "their output tokens / wall",
    "total_token_throughput": "their (prompt + output tokens) / wall",
    "request_goodput": "completed requests that keep the stated limits / wall",
    "late": "requests sent more than 10 ms after their time",
    "client.cpu_share": "CPU seconds of the client's process / seconds of the run",
    "client.lag": "how late the client's event loop ran a timer, in seconds; about 0.001 is the clock's own",
}


@dataclass(frozen=True)
class Client:
    """Times in seconds."""

    cpu_seconds: float
    cpu_share: float  # of one core
    lag_p50: float
    lag_p99: float
    lag_max: float

    @classmethod
    def of(cls, health: Health) -> "Client":
        lags = sorted(health.lags) or [0.0]
        p50, p99 = (lags[ceil(q * len(lags)) - 1] for q in (0.5, 0.99))
        return cls(health.cpu, health.cpu / health.seconds, p50, p99, lags[-1])


@dataclass(frozen=True)
class Row:
    """One run. Times in seconds, throughputs per second; None where nothing could be measured."""

    url: str
    model: str
    peer: bool  # the second of two servers
    rate: float | None  # None: a closed loop
    clients: int | None  # None: an open loop
    round: int
    sent: int
    completed: int
    failed: int
    unfinished: int  # when Ctrl-C came
    faults: Mapping[str, int]
    examples: Mapping[str, str]  # the first message of each kind of fault
    most_open: int  # requests at once
    prompt_tokens: int
    shortest_prompt: int
    longest_prompt: int
    output_tokens: int
    uncounted: int  # answers without usage: their pieces stand for tokens, and their prompt for none
    tokens_per_piece: float | None
    short: int  # answers of fewer tokens than asked for, if ends of text are ignored
    hit_rate: float | None  # prompt tokens that the server had already, by its usage or its /metrics
    late: int
    most_late: float
    wall: float
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    ttft: Stats | None
    tpot: Stats | None
    itl: Stats | None
    e2el: Stats | None
    ttft_percentiles: Sequence[float]  # 0 to 100
    tpot_percentiles: Sequence[float]
    client: Client
    server: ServerFacts

    @property
    def name(self) -> str:
        """Of the model; some servers give a path."""
        return self.model.rstrip("/").rpartition("/")[2]


def summarize(run: Run) -> Row:
    plan, answers = run.plan, run.answers
    good = [answer for answer in answers if answer.whole]
    faults = [answer.fault for answer in answers if answer.fault is not None]
    times = {
        "ttft": [a.first - a.scheduled for a in good],
        "e2el": [a.last - a.scheduled for a in good],
        "tpot": [(a.last - a.first) / (a.n_output - 1) for a in good if a.n_output > 1],
        "itl": [gap for a in good for gap in itl(a.times)],
    }
    wall = max((a.last for a in good), default=run.health.began) - run.health.began
    counted = [a for a in good if a.usage is not None]
    prompts = [a.n_prompt for a in counted]
    n_output, n_prompt = sum(a.n_output for a in good), sum(prompts)
    pieces = sum(len(a.times) for a in counted)
    late = [a.sent - a.scheduled for a in answers if a.sent > 0]

    def per_second(n: int) -> float:
        return n / wall if wall > 0 else 0.0

    return Row(
        url=run.target.server.url,
        model=run.target.model,
        peer=run.target.peer,
        rate=run.rate,
        clients=plan.clients if run.rate is None else None,
        round=run.round,
        sent=len(answers),
        completed=len(good),
        failed=len(faults),
        unfinished=len(answers) - len(good) - len(faults),
        faults=dict(Counter(fault.kind for fault in faults)),
        examples={fault.kind: str(fault) for fault in reversed(faults)},
        most_open=most_at_once(answers),
        prompt_tokens=n_prompt,
        shortest_prompt=min(prompts, default=0),
        longest_prompt=max(prompts, default=0),
        output_tokens=n_output,
        uncounted=len(good) - len(counted),
        tokens_per_piece=sum(a.n_output for a in counted) / pieces if pieces else None,
        short=sum(plan.ignore_eos and a.n_output < plan.max_tokens for a in counted),
        hit_rate=hit_rate(good, run.facts),
        late=sum(seconds > LATE for seconds in late),
        most_late=max(late, default=0.0),
        wall=wall,
        request_throughput=per_second(len(good)),
        output_throughput=per_second(n_output),
        total_token_throughput=per_second(n_prompt + n_output),
        request_goodput=per_second(sum(keeps(a, plan.goodput) for a in good)) if plan.goodput else None,
        **{name: Stats.of(values) for name, values in times.items()},
        ttft_percentiles=percentiles(times["ttft"]),
        tpot_percentiles=percentiles(times["tpot"]),
        client=Client.of(run.health),
        server=run.facts,
    )


def keeps(answer: Answer, limits: Mapping[str, float]) -> bool:
    """A request of a single token has no tpot, and keeps its limit."""
    tpot = (answer.last - answer.first) / max(1, answer.n_output - 1)
    took = {"ttft": answer.first - answer.scheduled, "e2el": answer.last - answer.scheduled, "tpot": tpot}
    return all(took[name] <= most for name, most in limits.items())


def hit_rate(answers: Sequence[Answer], facts: ServerFacts) -> float | None:
    told = [answer for answer in answers if answer.cached is not None and answer.n_prompt]
    if told:
        return sum(answer.cached or 0 for answer in told) / sum(answer.n_prompt for answer in told)
    return facts.hit_rate


def most_at_once(answers: Sequence[Answer]) -> int:
    """Requests sent and not ended; at the same time an end comes before a sending."""
    changes = sorted([(a.sent, 1) for a in answers if a.sent] + [(a.ended, -1) for a in answers if a.ended])
    open_now = most = 0
    for _, change in changes:
        open_now += change
        most = max(most, open_now)
    return most


def percentiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.percentile(values, range(101))] if values else []


# ---- two servers


FIGURES = (
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "request_goodput",
    "ttft median",
    "ttft p99",
    "tpot median",
    "tpot p99",
    "itl p99",
    "e2el median",
)


def figure(row: Row, name: str) -> float | None:
    metric, _, part = name.partition(" ")
    value = getattr(row, metric)
    return getattr(value, part) if part and value is not None else value


@dataclass(frozen=True)
class Against:
    """The first server against the peer, at one rate: medians over the rounds."""

    rate: float | None
    figures: Mapping[str, tuple[float, float, float | None]]  # first, peer, first over peer
    void: str | None  # why the ratios say nothing


def compare(ours: Sequence[Row], peers: Sequence[Row]) -> Against:
    """Rows of one rate, in the order of their rounds."""
    pairs = list(zip(ours, peers, strict=False))  # Ctrl-C may have left one alone
    figures = {}
    for name in FIGURES:
        values = [(figure(one, name), figure(other, name)) for one, other in pairs]
        known = [(one, other) for one, other in values if one is not None and other is not None]
        if known:
            first, peer = (median(column) for column in zip(*known, strict=True))
            figures[name] = (first, peer, first / peer if peer else None)
    return Against(ours[0].rate if ours else None, figures, why_void(pairs))


def why_void(pairs: Sequence[tuple[Row, Row]]) -> str | None:
    if not pairs:
        return "no round was whole"
    for one, other in pairs:
        for row in (one, other):
            if row.failed or row.unfinished:
                return f"{row.failed + row.unfinished} requests to {row.url} did not end well"
        if one.uncounted or other.uncounted:
            return "a server does not count its tokens"
        if one.output_tokens != other.output_tokens:
            return f"{one.output_tokens:,} output tokens and {other.output_tokens:,} are not the same work"
    return None
