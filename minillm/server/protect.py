"""What uvicorn leaves open: headers that never end, and heads that never come."""

import asyncio
import importlib.util
from typing import Any

HEAD_BYTES = 64 << 10  # the most of a request's line and headers
HEAD_SECONDS = 30.0  # the most time until they are there

TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


def protocol() -> Any:
    """The HTTP protocol for `uvicorn.Config`: over httptools if it is there, else over h11, which is slower."""
    if importlib.util.find_spec("httptools") is None:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return limited(H11Protocol)
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    return limited(HttpToolsProtocol)


def limited(kind: type[Any]) -> type[Any]:
    """A protocol that closes a connection whose next request head is too large, or too long in coming."""

    class Limited(kind):
        head_bytes = 0  # since the last request began
        n_cycles: Any = None
        head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._no_head)

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_there()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:  # between two requests: this is a head
                self.head_bytes += len(data)
                if self.head_timer is None:
                    self.head_timer = self.loop.call_later(HEAD_SECONDS, self._no_head)
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self.head_bytes = 0
                self._head_is_there()
            elif self.head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(TOO_LARGE)
                self.transport.close()

        def _head_is_there(self) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def _no_head(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

    return Limited
