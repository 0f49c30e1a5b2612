"""What a server tells about itself: its model, and in /metrics how late its event loop is and what its prefix cache
found."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from minillm.bench.load_http import Fault, Server, get, one_line
from minillm.errors import InputError

LAG = "minillm:event_loop_lag_seconds"
ASKED, FOUND = "prefix_cache_queries", "prefix_cache_hits"  # tokens; vLLM's names, with any prefix


async def find_model(server: Server, model: str | None) -> tuple[Server, str]:
    """The server with its address looked up, and the name of the model that it serves, or the one given.

    Raises InputError, in one line, for whatever is no OpenAI-compatible server.
    """
    try:
        server, page = await get(server, "/v1/models")
    except Fault as fault:
        if model is not None and fault.kind.startswith("HTTP 4"):
            return server, model
        there = fault.kind.startswith("HTTP 4")
        mend = "give --model if it lists none, --api-key if it wants one" if there else "is the server running there?"
        raise InputError(f"{server.url}/v1/models: the server {fault}; {mend}") from None
    try:
        served = one_line(str(json.loads(page)["data"][0]["id"]))
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        said = one_line(page)
        raise InputError(f"{server.url}/v1/models answered {said!r}, which is no list of models") from None
    return server, served if model is None else model


# ---- /metrics


@dataclass(frozen=True)
class Metrics:
    """Counters since the server's start: the difference of two is what happened between them."""

    lag_buckets: Mapping[float, float]  # upper bound in seconds: observations up to it
    asked: float | None = None
    found: float | None = None

    @classmethod
    def parse(cls, page: str) -> "Metrics":
        """Raises ValueError for what is not Prometheus' text format."""
        from prometheus_client.parser import text_string_to_metric_families

        buckets: dict[float, float] = {}
        counts: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if sample.name == f"{LAG}_bucket":
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
                for ending in (ASKED, FOUND):
                    if name.endswith(ending):
                        counts[ending] = counts.get(ending, 0.0) + sample.value
        return cls(buckets, counts.get(ASKED), counts.get(FOUND))


@dataclass(frozen=True)
class ServerFacts:
    """What happened on the server during a run; None is what it does not tell. Seconds."""

    lag_p50: float | None = None
    lag_p99: float | None = None
    hit_rate: float | None = None  # of prompt tokens, found in the prefix cache

    @classmethod
    def between(cls, before: Metrics | None, after: Metrics | None) -> "ServerFacts":
        if before is None or after is None:
            return cls()
        counts = {bound: n - before.lag_buckets.get(bound, 0.0) for bound, n in after.lag_buckets.items()}
        asked = (after.asked or 0.0) - (before.asked or 0.0)
        found = (after.found or 0.0) - (before.found or 0.0)
        return cls(quantile(counts, 0.5), quantile(counts, 0.99), found / asked if asked > 0 else None)


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket; in the last one, which has no end, its beginning."""
    bounds = [(0.0, 0.0), *sorted(buckets.items())]
    rank = q * bounds[-1][1]
    for (low, below), (high, upto) in pairwise(bounds):
        if upto >= rank and upto > below:
            return low if high == inf else low + (high - low) * (rank - below) / (upto - below)
    return None


async def read_metrics(server: Server) -> Metrics | None:
    """None for a server without such a page, or where prometheus_client is not installed."""
    try:
        return Metrics.parse((await get(server, "/metrics"))[1].decode("utf-8", "replace"))
    except (Fault, ImportError, ValueError, KeyError):
        return None
