"""One connection of the soak's clients, by hand: a socket that may leave or stop reading at any byte, and h11, which is
strict, to read what the server sends."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import h11

HOST = "127.0.0.1"
DATA, DONE = b"data: ", b"[DONE]"
SMALL_SEGMENT = 536  # bytes; the sender's buffer grows with it, and the usual one of loopback holds megabytes
SMALL_BUFFER = 4096


class Wrong(Exception):
    """The server did what it must not do."""


class Wire:
    """One connection for one request after the other. `small`: little fits between the server and this client."""

    def __init__(self, port: int, small: bool = False):
        self.port = port
        self.sock = socket.socket()
        self.sock.setblocking(False)
        if small:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            if hasattr(socket, "TCP_MAXSEG"):
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        self.most = 1 << 16  # bytes of one read
        self.pause = 0.0  # seconds before each read
        self.status = 0
        self.headers: dict[str, str] = {}
        self.reusable = True
        self.rest = b""  # what came after an answer
        self._closed = False  # by the server
        self._http = h11.Connection(h11.CLIENT)

    async def open(self) -> "Wire":
        await asyncio.get_running_loop().sock_connect(self.sock, (HOST, self.port))
        return self

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    def leave(self, rudely: bool) -> None:
        """Closes: with what was not read or sent thrown away (the server gets a reset), or as usual."""
        if rudely:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def expect(self, method: str = "POST") -> None:
        """A new request was, or will be, written by hand; h11 only reads the answer."""
        self._http = h11.Connection(h11.CLIENT)
        self._http.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        self._http.send(h11.EndOfMessage())
        if self.rest:
            self._http.receive_data(self.rest)

    async def head(self) -> int:
        """The status. Raises ConnectionError, Wrong for what is no HTTP."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {name.decode(): value.decode() for name, value in event.headers}
                return self.status
            if isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("closed without an answer")
            if isinstance(event, h11.InformationalResponse):
                self.status = event.status_code
                if event.status_code == 100:
                    return 100

    async def body(self) -> AsyncIterator[bytes]:
        """The pieces of the body, until its end."""
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            else:
                raise Wrong(f"in the middle of a body: {event!r}")
        self.rest = self._http.trailing_data[0]
        self.reusable = self.headers.get("connection", "").lower() != "close"

    async def json(self) -> Any:
        data = b"".join([piece async for piece in self.body()])
        try:
            return json.loads(data)
        except ValueError:
            raise Wrong(f"status {self.status} with what is no JSON: {data[:80]!r}") from None

    async def sse(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream. Raises Wrong if it does not end with [DONE]."""
        buffer, done = b"", False
        async for piece in self.body():
            buffer += piece
            while b"\n\n" in buffer:
                event, _, buffer = buffer.partition(b"\n\n")
                if done or not event.startswith(DATA):
                    raise Wrong(f"in a stream: {event[:80]!r}")
                if done := event[len(DATA) :] == DONE:
                    continue
                yield json.loads(event[len(DATA) :])
        if buffer or not done:
            raise Wrong(f"a stream ended without [DONE], its last bytes are {buffer[-80:]!r}")

    async def _next(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                if self._closed:
                    raise ConnectionResetError("closed in the middle of an answer") from None
                raise Wrong(f"no HTTP: {error}") from None
            if event is h11.PAUSED:
                raise Wrong("more than one answer to one request")
            if event is not h11.NEED_DATA:
                return event
            if self.pause:
                await asyncio.sleep(self.pause)
            data = await asyncio.get_running_loop().sock_recv(self.sock, self.most)
            self._closed = not data
            self._http.receive_data(data)


def head_of(path: str, length: int, method: str = "POST", more: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{more}\r\n"
    ).encode()


def post(path: str, fields: dict[str, Any]) -> bytes:
    """A whole request."""
    body = json.dumps(fields).encode()
    return head_of(path, len(body)) + body
