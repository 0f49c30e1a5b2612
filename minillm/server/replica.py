"""One of several engines behind one address: an engine's loop and its app, in a process that Ray Serve watches."""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("ray.serve")

NAME, DEPLOYMENT = "minillm", "replica"  # what Ray calls the application, and the one deployment in it
METRICS = "/metrics"
PATIENCE = 5.0  # seconds that the other replicas may take to tell their metrics

Headers = list[tuple[bytes, bytes]]


class Living(Protocol):
    """What a replica needs of `loop.EngineLoop`."""

    @property
    def alive(self) -> bool: ...


Make = Callable[[], tuple[Living, ASGIApp]]  # an engine's loop, and the app that starts it


class Replica:
    """What Ray holds. It calls the methods by these names, and `metrics` is called by other replicas."""

    def __init__(self, make: Make):
        self.engine_loop, app = make()
        self.outer = Outer(app)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.outer

    def check_health(self) -> None:
        """Ray asks once a second. Whose engine is dead refuses everything at once, is the least loaded of all, and so
        gets all requests, until Ray believes it after three checks. So it ends itself: that Ray sees immediately."""
        if not self.engine_loop.alive:
            log.critical("the engine's thread is dead; this replica ends, and Ray starts another")
            os._exit(1)  # not sys.exit, which would only end this call

    async def metrics(self, headers: Headers) -> tuple[str, str]:
        """This replica's name, and what its own app says at /metrics."""
        from ray import serve

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": METRICS, "raw_path": METRICS.encode()}
        scope |= {"scheme": "http", "query_string": b"", "root_path": "", "headers": headers}
        _, body = await self.outer.own(scope, receive)
        return serve.get_replica_context().replica_id.unique_id, body.decode()


class Outer:
    """The app of a single server, except that /metrics tells of all replicas: whoever asks may reach any of them."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != METRICS or scope["method"] != "GET":
            return await self.app(scope, receive, send)
        start, body = await self.own(scope, receive)  # also asks for the key, where there is one
        if start["status"] == 200:
            body = merged(await _all_metrics(list(scope["headers"])))
            headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
            start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
        await send(start)
        await send({"type": "http.response.body", "body": body})

    async def own(self, scope: Scope, receive: Receive) -> tuple[Message, bytes]:
        """What the single server's app answers: the head, and the body."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, keep)
        return messages[0], b"".join(message.get("body", b"") for message in messages[1:])


async def _all_metrics(headers: Headers) -> list[tuple[str, str]]:
    from ray import serve

    asked = serve.get_deployment_handle(DEPLOYMENT, NAME).broadcast("metrics", headers)
    answers = await asked.results_async(timeout_s=PATIENCE, return_exceptions=True)
    return [answer for answer in answers if isinstance(answer, tuple)]  # one that dies meanwhile has nothing to say


def merged(texts: Iterable[tuple[str, str]]) -> bytes:
    """Metrics of several replicas as one text: each sample says whose it is in a label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))

    class All(Collector):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())
    return generate_latest(registry)
