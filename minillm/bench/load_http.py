"""HTTP/1.1 by hand, for a load generator that must cost little: over an asyncio protocol the bytes of a token cost one
callback, and no task wakes up until the answer is whole. Connections are kept for later requests.

`HttpReader` takes bytes and gives the body, and knows of no sockets; `Wire` has the socket.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import quote, urlsplit

from minillm.errors import InputError
from minillm.terminal import printable

CONNECT_SECONDS = 10.0
AFTER_DONE_SECONDS = 1.0  # for the end of the body, when all that is needed has come
MOST_HEAD = 65_536  # bytes, as are the next two
MOST_WORDS = 4_096  # of the body of an answer that is an error
MOST_PAGE = 8_000_000

now = time.perf_counter
# gets a part of the body of a good answer with the time when it came, and says whether it has all that it needs
Take = Callable[[bytes, float], bool]


class Fault(Exception):
    """Why an answer is none: `kind` is what faults are counted by, the message says what came, in one line."""

    def __init__(self, kind: str, words: str):
        super().__init__(words)
        self.kind = kind


def one_line(words: str | bytes, most: int = 160) -> str:
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else words
    return printable(" ".join(text.split())[:most], keep="")


# ---- where


@dataclass(frozen=True)
class Server:
    """`address` is where connections go: the name is looked up once, not for each request."""

    url: str
    host: str
    path: str  # before /v1
    address: tuple[str, int]
    tls: ssl.SSLContext | None
    api_key: str | None = None
    idle: "list[Wire]" = field(default_factory=list, compare=False, repr=False)  # connections that wait for a request

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> "Server":
        """With or without /v1 at its end. Raises InputError."""
        wrong = f"the URL {url!r} cannot be used; it must be as http://127.0.0.1:8000 or https://example.org/v1"
        try:
            parts = urlsplit(url)
            port = parts.port
            host = (parts.hostname or "").encode("idna").decode()
        except ValueError as error:
            raise InputError(f"{wrong} ({error})") from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise InputError(wrong)
        if parts.username is not None:
            raise InputError(f"{wrong}, without a user's name; a key is given by --api-key")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InputError("the API key has characters that no header may hold; use printable ASCII")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%")
        return cls(url, host, path, (host, port or (443 if tls else 80)), tls, api_key)

    def head(self, method: str, path: str, length: int) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {host}:{self.address[1]}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\nAccept-Encoding: identity\r\n"
            "User-Agent: minillm-load\r\n\r\n"
        ).encode("ascii")

    def close(self) -> None:
        while self.idle:
            self.idle.pop().transport.abort()


# ---- bytes to a body


class HttpReader:
    """One response: status, headers, and the body in whichever of the three ways it is framed."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended = False  # the whole body has come
        self.rest = b""
        self.chunked = self.trailers = False
        self.left: int | None = None  # bytes to come, of the chunk or of the body; None: until the connection ends

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body. Raises Fault."""
        self.rest += data
        while not self.status:
            if not self.read_head():
                return b""
        if self.chunked:
            return self.read_chunks()
        body, self.rest = self.rest[: self.left], b""
        if self.left is not None:
            self.left -= len(body)
            self.ended = self.left == 0
        return body

    def read_head(self) -> bool:
        """False if it is not all there. The heads of interim answers (100 Continue) are dropped."""
        head, end, rest = self.rest.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1."[: len(head)]) or len(head) > MOST_HEAD:
            raise Fault("not HTTP", f"sent {one_line(self.rest)!r}, which is not HTTP/1.1")
        if not end:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        code = first.partition(" ")[2][:3]
        if not (code.isascii() and code.isdigit() and len(code) == 3):
            raise Fault("not HTTP", f"sent {one_line(first)!r}, which is not HTTP/1.1")
        self.rest = rest
        if code.startswith("1"):
            return True
        self.status = int(code)
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self.chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if self.chunked:
            self.left = 0
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise Fault("not HTTP", f"sent the length {one_line(length)!r}, which is not HTTP/1.1")
            self.left = int(length[:18])
            self.ended = self.left == 0
        return True

    def read_chunks(self) -> bytes:
        body = []
        while self.rest and not self.ended:
            if self.left:
                body.append(self.rest[: self.left])
                self.left -= len(body[-1])
                self.rest = self.rest[len(body[-1]) :]
                continue
            line, end, rest = self.rest.partition(b"\r\n")
            if not end and len(line) <= MOST_HEAD:
                break
            self.rest = rest
            if self.trailers:
                self.ended = not line
            elif line:  # a blank one ends the chunk before
                try:
                    self.left = int(line.partition(b";")[0], 16)
                except ValueError:
                    self.left = -1
                if self.left < 0:
                    raise Fault("not HTTP", f"sent {one_line(line)!r} in place of a chunk's size")
                self.trailers = self.left == 0
        return b"".join(body)

    @property
    def kept_open(self) -> bool:
        """The body has ended before the connection, which the server leaves open."""
        kept = self.headers.get("connection", "").lower() != "close"
        return kept and self.ended and self.left is not None and not self.rest

    def close(self) -> None:
        """The connection has ended: so has a body without a length."""
        self.ended = self.ended or (self.status > 0 and self.left is None)


# ---- the connection


class Wire(asyncio.Protocol):
    """A connection, for one request after the other. The answer of one is ended by a Fault or by None."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Fault | None] = self.loop.create_future()
        self.done.set_result(None)
        self.grace: asyncio.TimerHandle | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes, take: Take) -> asyncio.Future[Fault | None]:
        self.http, self.words, self.take = HttpReader(), b"", take
        self.done = self.loop.create_future()
        if self.lost:
            self.connection_lost(None)
        else:
            self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        at = now()
        if self.done.done():  # nobody asked for this
            self.transport.abort()
            return
        try:
            body = self.http.feed(data)
            if body and self.http.status == 200:
                if self.take(body, at) and self.grace is None:
                    self.grace = self.loop.call_later(AFTER_DONE_SECONDS, self.end)
            elif body:
                self.words += body[: MOST_WORDS - len(self.words)]
            if self.http.ended or len(self.words) == MOST_WORDS:
                self.end()
        except Fault as fault:
            self.end(fault)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self.done.done():
            return
        self.http.close()
        if self.http.status in (0, 200) and not self.http.ended and self.grace is None:
            came = "after a part of its answer" if self.http.status else "without an answer"
            self.end(Fault("cut off", f"closed the connection {came}"))
        else:
            self.end()

    def end(self, fault: Fault | None = None) -> None:
        if self.grace:
            self.grace.cancel()
            self.grace = None
        if self.done.done():
            return
        if fault is None and self.http.status != 200:
            words = one_line(self.words) or "nothing"
            fault = Fault(f"HTTP {self.http.status}", f"answered {self.http.status}: {words}")
        self.done.set_result(fault)

    @property
    def silent(self) -> bool:
        """The connection ended before a byte of the answer came."""
        return self.lost and not self.http.status and not self.http.rest

    @property
    def fit(self) -> bool:
        """Another request may follow."""
        return self.done.done() and self.http.kept_open and not self.lost


async def connect(server: Server, seconds: float) -> Wire:
    """Raises Fault."""
    loop, name = asyncio.get_running_loop(), server.host if server.tls else None
    try:
        async with asyncio.timeout(seconds):
            _, wire = await loop.create_connection(Wire, *server.address, ssl=server.tls, server_hostname=name)
    except TimeoutError:
        raise Fault("no connection", f"took no connection within {seconds:g} s") from None
    except (OSError, UnicodeError) as error:
        raise Fault("no connection", f"took no connection: {one_line(str(error))}") from None
    return wire


async def exchange(server: Server, method: str, path: str, content: bytes, seconds: float, take: Take) -> Wire:
    """One request and its answer, over a connection of an earlier one if there is one. Raises Fault."""
    request = server.head(method, path, len(content)) + content
    kept = wire = server.idle.pop() if server.idle else None
    fault = None
    try:
        async with asyncio.timeout(seconds):
            if kept:
                fault = await kept.ask(request, take)
            if kept is None or kept.silent:  # the server closed it just now, and has not read the request
                wire = await connect(server, min(CONNECT_SECONDS, seconds))
                fault = await wire.ask(request, take)
    except TimeoutError:
        raise Fault("timeout", f"did not end its answer within {seconds:g} s") from None
    finally:
        if wire and wire.fit and fault is None:
            server.idle.append(wire)
        elif wire:
            wire.transport.abort()
    assert wire is not None
    if fault is not None:
        raise fault
    return wire


async def get(server: Server, path: str, seconds: float = CONNECT_SECONDS) -> tuple[Server, bytes]:
    """The body of a small page, and the server with its address looked up. Raises Fault."""
    body = bytearray()

    def take(piece: bytes, at: float) -> bool:
        body.extend(piece)
        if len(body) > MOST_PAGE:
            raise Fault("too long", f"sent more than {MOST_PAGE:,} bytes")
        return False

    wire = await exchange(server, "GET", path, b"", seconds, take)
    address = wire.transport.get_extra_info("peername") or server.address
    return replace(server, address=address[:2]), bytes(body)
