"""Requests that are wrong, each with what the server may answer: one of some statuses, or to close the connection."""

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from soak_asks import CHAT, COMPLETIONS
from soak_wire import HOST, Wire, Wrong, head_of, post

CLOSED = 0  # in the place of a status
BODY_BYTES = 4 << 20  # the most that the server takes
BAD_HTTP = (400, CLOSED)


@dataclass(frozen=True)
class Malformed:
    name: str
    data: Callable[[str, random.Random], bytes]  # of the model's name
    statuses: tuple[int, ...]


def fields(statuses: int | tuple[int, ...], name: str, path: str = COMPLETIONS, **wrong: Any) -> Malformed:
    """A request that is right but for these fields."""

    def data(model: str, _: random.Random) -> bytes:
        right = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
        return post(path, {"model": model, "max_tokens": 2, **right, **wrong})

    asked = (statuses,) if isinstance(statuses, int) else statuses
    return Malformed(name, data, (*asked, 429))  # a text is tokenised, and looked at, when there is room for it


def body(name: str, data: bytes, *statuses: int, more: str = "") -> Malformed:
    return Malformed(name, lambda *_: head_of(COMPLETIONS, len(data), more=more) + data, statuses or (400,))


def raw(name: str, data: bytes, *statuses: int) -> Malformed:
    return Malformed(name, lambda *_: data, statuses or BAD_HTTP)


def get(name: str, more: str, *statuses: int, line: str = "GET /health HTTP/1.1") -> Malformed:
    return raw(name, f"{line}\r\nHost: {HOST}\r\n{more}\r\n".encode("latin-1"), *statuses)


def huge_in_chunks(*_: Any) -> bytes:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    return head.encode() + b"\r\n" + chunk * (BODY_BYTES // 0x10000 + 2) + b"0\r\n\r\n"


def garbage(_: str, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randint(1, 300)) + b"\r\n\r\n"


CASES = (
    # JSON
    body("half an object", b"{:"),
    body("no body", b""),
    body("a list", b"[]"),
    body("deep nesting", b"[" * 100_000),
    body("deep nesting in a field", b'{"model":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001),
    body("NaN", b'{"model": "m", "prompt": "a", "temperature": NaN}', 400),
    body("a number of 5,000 digits", b'{"model": "m", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
    body("half a character", b'{"model": "m", "prompt": "\xf0\x9f"}'),
    body("a lone surrogate", b'{"model": "m", "prompt": "\\ud83d"}', 400, 404),
    body("UTF-16", json.dumps({"model": "m", "prompt": "a"}).encode("utf-16")),
    body("many unknown fields", json.dumps({f"x{i}": i for i in range(5000)}).encode()),
    body("said to be gzip", b"{}", 415, more="Content-Encoding: gzip\r\n"),
    # fields
    fields(400, "a boolean as a string", stream="true"),
    fields(400, "an unknown field", prompts="a"),
    fields(400, "negative max_tokens", max_tokens=-1),
    fields(400, "huge max_tokens", max_tokens=10**9),
    fields(400, "huge n", n=10**6),
    fields(400, "n of 2^70", n=2**70),
    fields(400, "negative temperature", temperature=-0.1),
    fields(400, "token ids out of range", prompt=[1, 2, 10**7]),
    fields(400, "negative token ids", prompt=[-1]),
    fields(400, "an empty prompt", prompt=""),
    fields(400, "no ids", prompt=[]),
    fields(400, "null as a prompt", prompt=None),
    fields(400, "a text that is too long", prompt="a " * 5000),
    fields(400, "a text that is far too long", prompt="a" * 3_000_000),
    fields(400, "a word without an end", prompt="a" * 20_000),
    fields(400, "empty stop string", stop=""),
    fields(400, "too many stop strings", stop=["a"] * 1000),
    fields(400, "logit_bias of no token", logit_bias={"AI": -100}),
    fields(400, "too many log-probabilities", logprobs=1000),
    fields(400, "stream_options without stream", stream_options={"include_usage": True}),
    fields(400, "no messages", CHAT, messages=[]),
    fields(400, "an unknown role", CHAT, messages=[{"role": "<|im_start|>" * 20, "content": "a"}]),
    fields(400, "an image", CHAT, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
    fields(400, "tools", CHAT, tools=[{"type": "function"}]),
    fields(400, "2,000 messages", CHAT, messages=[{"role": "user", "content": "a"}] * 2000),
    fields(404, "another model", model="gpt-4"),
    # bodies and addresses
    raw("a body said to be large", head_of(CHAT, 10 << 20), 413),
    Malformed("a large body in chunks", huge_in_chunks, (413, CLOSED)),
    raw("a form", head_of(CHAT, 3).replace(b"application/json", b"application/x-www-form-urlencoded") + b"a=1", 415),
    get("no such address", "", 404, line="GET /v1/nothing HTTP/1.1"),
    get("a way out of the folder", "", 404, line="GET /../../etc/passwd HTTP/1.1"),
    get("a wrong method", "", 405, line=f"GET {CHAT} HTTP/1.1"),
    get("a method nobody knows", "", 405, *BAD_HTTP, line="BREW /health HTTP/1.1"),
    # headers; a large one that comes whole, in one read of the socket, may be taken
    get("a header of 100 kB", "X: " + "a" * 100_000 + "\r\n", 200, 431, *BAD_HTTP),
    get("20,000 headers", "A: b\r\n" * 20_000, 200, 431, *BAD_HTTP),
    get("an address of 100 kB", "", 431, *BAD_HTTP, line=f"GET /{'a' * 100_000} HTTP/1.1"),
    get("a header without a colon", "nothing\r\n", *BAD_HTTP),
    get("a header over two lines", "A: b\r\n c\r\n", 200, *BAD_HTTP),
    get("NUL in a header", "A: b\0c\r\n", *BAD_HTTP),
    get("a space before the colon", "Content-Length : 5\r\n", *BAD_HTTP),
    get("Latin-1 in a header", "A: \xe9\xff\r\n", 200, *BAD_HTTP),
    get("Latin-1 as a key", "Authorization: Bearer \xe9\xff\r\n", 200, *BAD_HTTP),
    get("two lengths", "Content-Length: 5\r\nContent-Length: 6\r\n", *BAD_HTTP),
    get("a negative length", "Content-Length: -1\r\n", *BAD_HTTP),
    get("a length of 30 digits", "Content-Length: " + "9" * 30 + "\r\n", *BAD_HTTP),
    get("a length and chunks", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", *BAD_HTTP),
    get("an unknown Transfer-Encoding", "Transfer-Encoding: cow\r\n", 200, 501, *BAD_HTTP),
    get("HTTP/9.9", "", *BAD_HTTP, line="GET /health HTTP/9.9"),
    get("HTTP/1.0", "", 200, line="GET /health HTTP/1.0"),
    get("a request for a websocket", "Connection: Upgrade\r\nUpgrade: websocket\r\n", 200, *BAD_HTTP),
    get("a request for HTTP/2", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n", 200, *BAD_HTTP),
    raw("the beginning of TLS", bytes.fromhex("16030100f8010000f40303") + bytes(200)),
    raw("only line ends", b"\r\n" * 50 + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 200, *BAD_HTTP),
    Malformed("random bytes", garbage, BAD_HTTP),
)


async def ask(case: Malformed, port: int, model: str, draw: random.Random) -> str:
    """What came of it. Raises Wrong."""
    wire = await Wire(port).open()
    try:
        wire.expect()
        try:
            await wire.send(case.data(model, draw))
        except ConnectionError:  # it was answered before all was sent
            pass
        try:
            status = await wire.head()
            error = await wire.json() if wire.headers.get("content-type") == "application/json" else None
        except ConnectionError:
            status, error = CLOSED, None
        if status not in case.statuses:
            raise Wrong(f"{case.name}: answered {status or 'by closing'}, not {case.statuses}: {error}")
        if status >= 400 and error is not None and not error["error"]["message"]:
            raise Wrong(f"{case.name}: status {status} without a message")
        return str(status or "closed")
    finally:
        wire.leave(False)


# ---- what takes several turns


async def pipelined(wire: Wire, model: str) -> None:
    """Several requests at once: their answers come in order."""
    get_health = f"GET /health HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    ask_one = post(COMPLETIONS, {"model": model, "prompt": "a", "max_tokens": 1})
    await wire.send(get_health + post(CHAT, {"model": model}) + ask_one + get_health)
    for statuses in ((200,), (400,), (200, 429), (200,)):
        wire.expect()
        if await wire.head() not in statuses:
            raise Wrong(f"status {wire.status} in a pipeline, not {statuses}")
        await wire.json()


async def with_100_continue(wire: Wire, model: str) -> None:
    data = post(COMPLETIONS, {"model": model, "prompt": "a", "max_tokens": 1})
    head, _, content = data.partition(b"\r\n\r\n")
    await wire.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
    wire.expect()
    if await wire.head() != 100:
        raise Wrong(f"status {wire.status} where the body was to be asked for")
    await wire.send(content)
    if await wire.head() not in (200, 429):
        raise Wrong(f"status {wire.status} after Expect: 100-continue")
    await wire.json()


async def cut_in_a_chunk(wire: Wire, model: str) -> None:
    """And the client stays: the body's time is up at some point."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    await wire.send(head.encode() + b'20\r\n{"model"')
    wire.expect()
    if await wire.head() != 408:
        raise Wrong(f"status {wire.status} for a chunk that never ended")


async def body_bit_by_bit(wire: Wire, model: str) -> None:
    """Slow, but in time."""
    data = post(COMPLETIONS, {"model": model, "prompt": "a", "max_tokens": 1})
    for i in range(0, len(data), 40):
        await wire.send(data[i : i + 40])
        await asyncio.sleep(0.05)
    wire.expect()
    if await wire.head() not in (200, 429):
        raise Wrong(f"status {wire.status} for a body in pieces")
    await wire.json()


async def half_closed(wire: Wire, model: str) -> None:
    """The client has said all, and only listens: it is answered, or counts as gone."""
    await wire.send(post(COMPLETIONS, {"model": model, "prompt": "a", "max_tokens": 4}))
    wire.sock.shutdown(socket.SHUT_WR)
    wire.expect()
    try:
        if await wire.head() not in (200, 429):
            raise Wrong(f"status {wire.status} to a client that has closed its half")
        await wire.json()
    except ConnectionError:
        pass


TURNS: dict[str, Callable[[Wire, str], Awaitable[None]]] = {
    "pipelining": pipelined,
    "Expect: 100-continue": with_100_continue,
    "a chunk that never ends": cut_in_a_chunk,
    "a body bit by bit": body_bit_by_bit,
    "a half-closed connection": half_closed,
}
