"""The events of one client's requests, on their way from the engine's thread to the asyncio loop that reads them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from minillm.request import Event, Request

if TYPE_CHECKING:
    from minillm.server.loop import EngineLoop


class Stream:
    """The events of some requests, in the order they were made. Made by `EngineLoop.open` or `submit`, and used in
    the asyncio loop that called it.

    A reader that is slow slows nobody: its events wait here, never more than its requests may emit. `close` it as soon
    as nobody reads it any more: it aborts what is unfinished.
    """

    def __init__(self, engine_loop: "EngineLoop", seats: int):
        self.requests: list[Request] = []
        self.seats = seats  # requests that it may send
        self.opened = time.monotonic()
        self.asyncio_loop = asyncio.get_running_loop()
        self.closed = False
        self._engine_loop = engine_loop
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._unread = 0  # requests whose end was not read yet
        # the engine's thread alone touches these, once the requests are sent
        self.pending: set[Request] = set()  # whose end was not delivered yet
        self.n_made = 0  # tokens delivered

    def send(self, *groups: list[Request]) -> None:
        """Queues requests made by `EngineLoop.make`; those of one group are samples of one prompt. Once for a stream.
        A stream closed before sends nothing. Raises Unavailable if the engine has died meanwhile."""
        if self.closed:
            return
        self.requests = [request for group in groups for request in group]
        assert len(self.requests) == self.seats, "a stream sends as many requests as it took seats for"
        for request in self.requests:
            request.arrival = self.opened
        self._unread = self.seats
        self.pending = set(self.requests)
        self._engine_loop._begin(self, groups)

    async def batch(self) -> list[Event]:
        """All events that are there, at least one, waiting for it; none: all were read, or the stream is closed."""
        while not self._events and self._unread and not self.closed:
            self._arrived.clear()
            await self._arrived.wait()
        events = list(self._events)
        self._events.clear()
        self._unread -= sum(event.finish_reason is not None for event in events)
        return events

    async def __aiter__(self) -> AsyncIterator[Event]:
        while events := await self.batch():
            for event in events:
                yield event

    def close(self) -> None:
        """Ends what is unfinished, within one step, and forgets what was not read. Closing twice changes nothing."""
        if not self.closed:
            self.closed = True
            self._events.clear()
            self._arrived.set()
            self._engine_loop._abandon(self)

    def deliver(self, event: Event) -> None:
        if not self.closed:
            self._events.append(event)
            self._arrived.set()


def hand_over(pairs: Iterable[tuple[Stream, Event]]) -> None:
    """What one step made, in the asyncio loop."""
    for stream, event in pairs:
        stream.deliver(event)
