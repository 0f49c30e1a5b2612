"""The live view at `/`: a page that shows the running batch, and the stream of snapshots that feeds it.

Snapshots are made in the engine's thread, only while somebody watches, and at most 20 a second; where making one takes
long, so seldom that it takes a twentieth of the thread's time at most. They are kept in one short ring for all: who
reads slowly misses the oldest, and costs nobody anything.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.params import Depends
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from minillm.scheduler import Plan
from minillm.server import compare
from minillm.server.loop import EngineLoop, StepRecord
from minillm.server.snapshot import describe, endings, first_tokens, look, step_line

log = logging.getLogger(__name__)

INTERVAL = 1 / 20  # seconds between two snapshots, at least
SHARE = 20  # a snapshot that took t seconds is followed by none for SHARE * t
PACE = 1 / 25  # seconds between two messages to one watcher: a little less than INTERVAL, so that it catches up
KEPT = 32  # messages: how far a slow watcher may fall behind
MOST_LINES = 256  # steps told of in one message
MOST_WATCHERS = 16
POLL = 0.25  # seconds: how soon a watcher sees that the engine has ended, or that texts left without a step
HEARTBEAT = 5.0  # seconds without a message, after which a comment shows that the connection lives

PAGE = {
    "index.html": "text/html; charset=utf-8",
    "live.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "view.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "compare.js": "text/javascript; charset=utf-8",
    "sse.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    # nothing from another host, nothing inline, nothing that could be framed or sent elsewhere
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Hub:
    """Between the engine's thread, which makes snapshots, and those who watch.

    `on_step` and `on_quiet` run in the engine's thread, everything else in the asyncio loop of the watchers.
    """

    def __init__(self, loop: EngineLoop, model: str, interval: float = INTERVAL):
        self.loop, self.model, self.interval = loop, model, interval
        self.n_watching = 0
        self.n_made = 0  # snapshots, ever
        self.n_published = 0  # messages, ever; the last of them are in the ring
        self._ring: deque[bytes] = deque(maxlen=KEPT)
        self._news = asyncio.Event()  # set, and replaced, with each message
        self._asking = False  # whether the engine's thread was asked to look, and did not yet
        self._forget()

    def _forget(self) -> None:
        self._ring.clear()
        self._next = 0.0  # when a snapshot may be made again
        self._last: dict[str, Any] | None = None
        self._number, self._plan = 0, Plan()  # of the last step
        self._lines: deque[list[float]] = deque(maxlen=MOST_LINES)
        self._first: deque[float] = deque(maxlen=MOST_LINES)
        self._ended: deque[dict[str, Any]] = deque(maxlen=MOST_LINES)

    # ---- the engine's thread

    def on_step(self, record: StepRecord) -> None:
        """A watcher of the engine's steps (see `EngineLoop.watchers`)."""
        self._number, self._plan = record.number, record.plan
        self._lines.append(step_line(record))
        self._first += first_tokens(record)
        self._ended += endings(record)
        if time.monotonic() >= self._next:
            self._make()

    def on_quiet(self) -> None:
        """Between two steps: shows what no step has shown, such as who was aborted or the last step of a burst."""
        self._asking = False
        if self.n_watching and time.monotonic() >= self._next:
            self._make()

    def _make(self) -> None:
        began = time.monotonic()
        state = look(self.loop.engine, dict(self._plan))
        self.n_made += 1
        if self._lines or state != self._last:
            self._last = state
            told = {"lines": list(self._lines), "first": list(self._first), "ended": list(self._ended)}
            for one in (self._lines, self._first, self._ended):
                one.clear()
            self._send({"step": self._number, "time": round(began, 4), **told, **state})
        took = time.monotonic() - began
        self._next = began + max(self.interval, SHARE * took)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._asyncio_loop.call_soon_threadsafe(self._publish, message)
        except RuntimeError:  # that loop is closed: nobody watches any more
            pass

    # ---- the asyncio side

    def _publish(self, message: dict[str, Any]) -> None:
        self._ring.append(sse("step", message))  # encoded once for all
        self.n_published += 1
        self._news.set()
        self._news = asyncio.Event()

    def enter(self) -> None:
        """One watcher more; the first makes the engine's thread tell of its steps."""
        self._asyncio_loop = asyncio.get_running_loop()
        self.n_watching += 1
        if self.n_watching == 1:
            self._forget()
            self.loop.watchers.append(self.on_step)
            self._ask()

    def leave(self) -> None:
        self.n_watching -= 1
        if self.n_watching == 0 and self.on_step in self.loop.watchers:
            self.loop.watchers.remove(self.on_step)

    def _ask(self) -> None:
        """Lets the engine's thread look between two steps, for it may sleep."""
        if not self._asking and self.loop.alive:
            self._asking = True
            self.loop.ask(self._look)

    def _look(self) -> None:
        try:
            self.on_quiet()
        except Exception:  # a command that raises would end the engine
            log.exception("the live view could not look at the engine")

    async def messages(self) -> AsyncIterator[bytes]:
        """What one watcher is sent. It ends when the engine does, and when the server drains."""
        yield sse("engine", describe(self.loop.engine, self.model))
        seen = self.n_published - min(1, len(self._ring))  # a newcomer begins with the last
        due = quiet = 0.0
        while self.loop.alive and not self.loop.draining:
            if seen == self.n_published:
                try:
                    await asyncio.wait_for(self._news.wait(), POLL)
                except TimeoutError:
                    self._ask()
                    quiet += POLL
                    if quiet >= HEARTBEAT:
                        quiet = 0.0
                        yield b": still here\n\n"
                continue
            quiet = 0.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + PACE
            oldest = self.n_published - len(self._ring)
            seen = max(seen, oldest)
            message = self._ring[seen - oldest]
            seen += 1
            yield message
        yield sse("end", {"reason": "the server is shutting down" if self.loop.alive else "the engine has stopped"})


def sse(event: str, data: Any) -> bytes:
    return f"event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class LiveStream(StreamingResponse):
    """The stream of one watcher, who counts from the first byte to the last, however the connection ends."""

    def __init__(self, hub: Hub):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(hub.messages(), media_type="text/event-stream", headers=headers)
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._hub.enter()
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hub.leave()


def live_router(loop: EngineLoop, model: str, guards: Sequence[Depends] = ()) -> APIRouter:
    """The page at `/`, which anybody may load, and its data, for those whom the `guards` let pass."""
    hub = Hub(loop, model)
    router = APIRouter(include_in_schema=False)

    @router.get("/live/steps", dependencies=guards)
    async def steps() -> Response:
        if hub.n_watching >= MOST_WATCHERS:
            raise HTTPException(503, f"{MOST_WATCHERS} watch already, the most there can be", {"Retry-After": "10"})
        return LiveStream(hub)

    @router.get("/live/policies", dependencies=guards)
    async def policies(
        seed: Annotated[int, Query(ge=0, le=compare.MOST_SEED)] = 0,
        slots: Annotated[int, Query(ge=1, le=compare.MOST_SLOTS)] = 4,
        requests: Annotated[int, Query(ge=1, le=compare.MOST_REQUESTS)] = 24,
    ) -> dict[str, Any]:
        return await run_in_threadpool(compare.compare, seed, slots, requests)

    for name, media_type in PAGE.items():
        path = "/" if name == "index.html" else f"/live/{name}"
        content = files("minillm.server").joinpath("page", name).read_bytes()
        router.add_api_route(path, _page(content, media_type), methods=["GET", "HEAD"])
    return router


def _page(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def page() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return page
