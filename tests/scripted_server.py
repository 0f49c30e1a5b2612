"""A server that answers as it is told, at times that are known: what a load generator says can be checked against it.

    python tests/scripted_server.py --ttft 50 --itl 10

It speaks enough of OpenAI's API to be loaded. Token k of an answer leaves at `arrival + ttft + k * itl`, by the clock
and not by sleeping k times, so nothing adds up. All delays are in seconds here, and in milliseconds on its command
line. Without any model: one core sends some ten thousand tokens per second.
"""

import argparse
import asyncio
import json
import random
import threading
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
METRICS = """# TYPE minillm:event_loop_lag_seconds histogram
minillm:event_loop_lag_seconds_bucket{{le="0.01"}} {n}.0
minillm:event_loop_lag_seconds_bucket{{le="0.1"}} {two_n}.0
minillm:event_loop_lag_seconds_bucket{{le="+Inf"}} {two_n}.0
minillm:event_loop_lag_seconds_count {two_n}.0
minillm:event_loop_lag_seconds_sum 1.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{model_name="scripted"}} {asked}.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{model_name="scripted"}} {found}.0
"""


@dataclass
class Script:
    """How it answers. `fault` is one of BODIES or of `go_wrong`, or a status to answer with."""

    ttft: float = 0.0
    itl: float = 0.0
    jitter: float = 0.0  # every delay is multiplied by a random number from 1 - jitter to 1 + jitter
    tokens: int = 1_000_000  # an answer has at most so many, or max_tokens
    per_piece: int = 1  # tokens in one event
    framing: str = "chunked"  # or length, or close
    usage: bool = True
    done: bool = True  # [DONE] at the end
    cached: int | None = None  # of each prompt
    prompt_tokens: int | None = 10  # by usage; None: 20 and a quarter of the prompt's characters
    fault: str | int | None = None
    every: int = 1  # the fault meets each so-manyth request
    hold: int = 0  # nobody is answered before so many have asked
    hang_up: bool = False  # each connection ends after an answer, without a word
    linger: bool = False  # the body does not end after its last event
    models: bool | str = True  # whether it lists them, or what it lists
    metrics: bool = True


FAULTS = (
    "html",
    "json",
    "bad-json",
    "half-line",
    "no-event",
    "no-end",
    "never",
    "comments",
    "error",
    "not-http",
    "drop",
)
BODIES = {
    "html": b"<html><body>It works!</body></html>",
    "json": b'{"object": "text_completion", "choices": []}',
    "bad-json": b'data: {"choices": [\n\n',
    "half-line": b'data: {"choices": [{"index": 0, "text"',
    "no-event": b"hello\n\n",
    "no-end": b'data: {"choices": [{"index": 0, "text": "x", "delta": {"content": "x"}}]}\n\n',
    "error": b'data: {"error": {"message": "out of memory", "code": 500}}\n\n',
}


@dataclass
class Server:
    """Use as `with Server(Script(...)) as server`, in a thread, or `await server.start()` in a loop of one's own."""

    script: Script = field(default_factory=Script)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of what was asked
    heads: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    gets: int = 0
    connections: int = 0
    truth: list[tuple[float, float]] = field(default_factory=list)  # ttft and tpot as it wrote them; GET /truth empties

    async def start(self, port: int = 0) -> "Server":
        self.server = await asyncio.start_server(self.connected, "127.0.0.1", port, backlog=4096)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    # ---- one connection, one request

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self.one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a client that goes away is part of the tests, and so is the end of the server
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True if another request may come over the same connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            return self.page(path, writer)
        self.heads.append(head)
        self.bodies.append(json.loads(content))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self.answer(path, self.bodies[-1], len(self.bodies), writer)
        finally:
            self.open -= 1
        if self.script.linger:
            await reader.read()
        return self.script.framing == "chunked" and self.script.fault is None and not self.script.hang_up

    def page(self, path: str, writer: asyncio.StreamWriter) -> bool:
        self.gets += 1
        status, text = 404, '{"error": {"message": "no such page"}}'
        if path.endswith("/v1/models") and self.script.models:
            status, text = 200, json.dumps({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
            text = self.script.models if isinstance(self.script.models, str) else text
        elif path.endswith("/health"):
            status, text = 200, "{}"
        elif path.endswith("/truth"):
            status, text = 200, json.dumps(self.truth)
            self.truth.clear()
        elif path.endswith("/metrics") and self.script.metrics:
            n = len(self.bodies)
            status, text = 200, METRICS.format(n=50 * n, two_n=100 * n, asked=100 * n, found=n)
        reply(writer, status, text.encode())
        return True

    async def answer(self, path: str, asked: dict[str, Any], number: int, writer: asyncio.StreamWriter) -> None:
        script, loop = self.script, asyncio.get_running_loop()
        arrival = loop.time()
        if script.fault is not None and number % script.every == 0:
            return await self.go_wrong(script.fault, writer)
        while len(self.bodies) < script.hold:
            await asyncio.sleep(0.005)
        draw = random.Random(number)
        n = min(script.tokens, asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        body = Body(writer, script.framing)
        if script.framing != "length":
            body.begin()
        due, first = arrival + script.ttft * (1 + script.jitter * draw.uniform(-1, 1)), 0.0
        for k in range(0, n, script.per_piece):
            await asyncio.sleep(max(0.0, due - loop.time()))
            body.send(event(path, " and" * min(script.per_piece, n - k)))
            first = first or loop.time()
            due += script.per_piece * script.itl * (1 + script.jitter * draw.uniform(-1, 1))
            if script.framing != "length":
                await writer.drain()
        self.truth.append((first - arrival, (loop.time() - first) / max(1, n - 1)))
        body.send(event(path, "", "length" if n < script.tokens else "stop"))
        if script.usage and (asked.get("stream_options") or {}).get("include_usage"):
            n_prompt = script.prompt_tokens or 20 + characters(asked) // 4
            counts: dict[str, Any] = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
            if script.cached is not None:
                counts["prompt_tokens_details"] = {"cached_tokens": script.cached}
            body.send(encode({"choices": [], "usage": counts}))
        if script.done:
            body.send(b"data: [DONE]\n\n")
        if not script.linger:
            body.end()
        await writer.drain()

    async def go_wrong(self, fault: str | int, writer: asyncio.StreamWriter) -> None:
        if isinstance(fault, int):
            reply(writer, fault, json.dumps({"error": {"message": f"scripted {fault}"}}).encode())
        elif fault == "drop":
            pass
        elif fault == "not-http":
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            await asyncio.sleep(5)
        elif fault in ("never", "comments"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for _ in range(3000):
                if fault == "comments":
                    writer.write(b": still here\n\n")
                await asyncio.sleep(0.01)
                await writer.drain()
                if writer.is_closing():
                    break
        else:
            kind = {"html": "text/html", "json": "application/json"}.get(fault, "text/event-stream")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode() + BODIES[fault])
        await writer.drain()
        writer.close()

    # ---- in a thread, for tests

    def __enter__(self) -> "Server":
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self.loop).result(10)
        return self

    def __exit__(self, *error: object) -> None:
        async def stop() -> None:
            self.server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


class Body:
    def __init__(self, writer: asyncio.StreamWriter, framing: str):
        self.writer, self.framing, self.kept = writer, framing, b""

    def begin(self) -> None:
        how = "Transfer-Encoding: chunked" if self.framing == "chunked" else "Connection: close"
        self.writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{how}\r\n\r\n".encode())

    def send(self, data: bytes) -> None:
        if self.framing == "length":
            self.kept += data
        elif self.framing == "chunked":
            self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self.writer.write(data)

    def end(self) -> None:
        if self.framing == "chunked":
            self.writer.write(b"0\r\n\r\n")
        elif self.framing == "length":
            reply(self.writer, 200, self.kept, "text/event-stream")


def reply(writer: asyncio.StreamWriter, status: int, content: bytes, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)


def encode(piece: dict[str, Any]) -> bytes:
    about = {"id": "cmpl-0123456789abcdef", "created": 1_750_000_000, "model": "scripted"}
    return b"data: " + json.dumps({**about, **piece}).encode() + b"\n\n"


def characters(asked: dict[str, Any]) -> int:
    return len(asked["prompt"]) if "prompt" in asked else sum(len(m["content"]) for m in asked["messages"])


def event(path: str, text: str, finish: str | None = None) -> bytes:
    chat = path.endswith(CHAT)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    choice |= {"delta": {"content": text} if text else {}} if chat else {"text": text}
    return encode({"object": "chat.completion.chunk" if chat else "text_completion", "choices": [choice]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=50, help="ms")
    parser.add_argument("--itl", type=float, default=10, help="ms")
    parser.add_argument("--jitter", type=float, default=0.0, help="share of each delay, 0 to 1")
    given = parser.parse_args()

    async def serve() -> None:
        server = await Server(Script(given.ttft / 1e3, given.itl / 1e3, given.jitter)).start(given.port)
        print(server.url, flush=True)
        await server.server.serve_forever()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
