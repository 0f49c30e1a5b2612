"""What /metrics tells, in Prometheus' text format. Names and buckets are vLLM's where they mean the same; those that
begin with `minillm:` are ours. Times are in seconds, and taken in the engine's thread.
"""

import asyncio
import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minillm.request import Request
from minillm.server.loop import EngineLoop, StepRecord
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots, Slots

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
STEP = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
LAG_EVERY = 0.05  # seconds between two looks at the asyncio loop's lag


class Metrics(Collector):
    """Counts as a watcher of the engine's steps; what it need not count, it asks the engine when somebody reads."""

    def __init__(self, loop: EngineLoop, model: str):
        self.loop, self.model = loop, model
        self.registry = CollectorRegistry()

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, ["model_name"], buckets=buckets, registry=self.registry).labels(model)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, ["model_name", *labels], registry=self.registry)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of texts that have begun.").labels(model)
        self.tokens = counter("vllm:generation_tokens", "Tokens generated.").labels(model)
        self.ended = counter("vllm:request_success", "Texts that have ended.", "finished_reason")
        self.refused = counter("minillm:requests_refused", "Requests answered with an error.", "status")
        self.first = histogram("vllm:time_to_first_token_seconds", "From request to first token.", FIRST_TOKEN)
        self.between = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a text.", BETWEEN)
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens of a text, by text.", BETWEEN
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From request to last token.", WHOLE)
        self.step = histogram("minillm:step_seconds", "One step of the engine.", STEP)
        self.step_tokens = histogram("minillm:step_tokens", "Tokens computed in one step.", TOKENS)
        self.lag = histogram("minillm:event_loop_lag_seconds", "How late the asyncio loop wakes.", LAG)
        self.registry.register(self)
        self._times: WeakKeyDictionary[Request, tuple[float, float]] = WeakKeyDictionary()  # first and last token

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def on_step(self, record: StepRecord) -> None:
        """A watcher (see `EngineLoop.watchers`)."""
        now = record.ended
        self.step.observe(now - record.began)
        self.step_tokens.observe(sum(n for _, n in record.plan))
        n_tokens = 0
        for event in record.events:
            request = event.request
            if event.token is not None:
                n_tokens += 1
                first, last = self._times.get(request, (now, None))
                self._times[request] = (first, now)
                if last is None:
                    self.first.observe(now - request.arrival)
                    self.prompt_tokens.inc(len(request.prompt))
                else:
                    self.between.observe(now - last)
            if event.finish_reason is not None:
                first, last = self._times.pop(request, (now, now))
                self.ended.labels(self.model, event.finish_reason).inc()
                self.whole.observe(now - request.arrival)
                if request.n_output > 1:
                    self.per_token.observe((last - first) / (request.n_output - 1))
        self.tokens.inc(n_tokens)

    async def watch_lag(self) -> None:
        """Never ends: run it as a task of the asyncio loop."""
        while True:
            due = time.monotonic() + LAG_EVERY
            await asyncio.sleep(LAG_EVERY)
            self.lag.observe(max(0.0, time.monotonic() - due))

    def collect(self) -> Iterable[Metric]:
        scheduler = self.loop.engine.scheduler
        slots, running = scheduler.slots, len(scheduler.running)
        gauges = {
            "vllm:num_requests_running": ("Texts in the batch.", running),
            "vllm:num_requests_waiting": ("Texts that wait.", max(0, self.loop.n_live - running)),
            "vllm:kv_cache_usage_perc": ("Share of KV memory that texts hold, 0 to 1.", kv_usage(slots)),
        }
        counters = {
            "vllm:num_preemptions": ("Texts that lost their memory and began again.", scheduler.preemptions),
            "minillm:requests_aborted": ("Texts whose clients left.", self.loop.n_aborted),
        }
        if isinstance(slots, SharedSlots):
            counters["vllm:prefix_cache_queries"] = ("Tokens looked up in the prefix cache.", slots.asked)
            counters["vllm:prefix_cache_hits"] = ("Tokens found there.", slots.found)
        for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (what, value) in metrics.items():
                family = kind(name, what, labels=["model_name"])
                family.add_metric([self.model], value)
                yield family


def kv_usage(slots: Slots) -> float:
    """The share of KV memory that running requests hold."""
    if isinstance(slots, BlockSlots):
        return 1 - len(slots.free) * slots.size / slots.n_slots
    return 1 - len(slots.free_rows) * slots.capacity / slots.n_slots
