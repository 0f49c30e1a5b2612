"""What the server's tests share: a tokenizer of bytes, and a server on a free port of this machine."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import torch
from conftest import TINY
from script import Script, assert_drained

from minillm.engine import Engine
from minillm.model import Llama
from minillm.server.app import make_app
from minillm.server.loop import EngineLoop
from minillm.server.run import Server
from minillm.sharing import SharedSlots
from minillm.tokenizer import BYTE_OF, Tokenizer

NAME = "tiny/bytes"  # a slash, as names on the Hub have
SPECIALS = ("<|begin|>", "<|end|>", "<|turn|>")
EOS = 1
FIRST = len(SPECIALS)  # the id of byte 0
TEMPLATE = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
CONFIG = replace(TINY, vocab_size=FIRST + 256, eos=(EOS,), context=512)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LIVENESS = 20.0  # seconds after which a test that waits has failed


def byte_tokenizer(template: str | None = TEMPLATE, bos: bool = False) -> Tokenizer:
    """Every byte is a token, so every text can be written, and most bytes alone are no character."""
    char_of = {byte: char for char, byte in BYTE_OF.items()}
    vocab = {name: i for i, name in enumerate(SPECIALS)} | {char_of[byte]: FIRST + byte for byte in range(256)}
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": SPECIALS[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {SPECIALS[0]: {"ids": [0]}},
    }
    data = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "post_processor": processor if bos else None,
        "added_tokens": [{"content": name, "id": i, "special": True} for i, name in enumerate(SPECIALS)],
    }
    return Tokenizer(data, {"chat_template": template, "bos_token": SPECIALS[0]})


TOKENIZER = byte_tokenizer()


def ids(text: str | bytes) -> list[int]:
    return [FIRST + byte for byte in (text.encode() if isinstance(text, str) else text)]


def tiny_model() -> Llama:
    return Llama.random(CONFIG, seed=0, dtype=torch.float64)


def writes(*texts: str | bytes, then: int = EOS, context: int = 512) -> Script:
    """A model that goes on after the last byte of a prompt: whatever byte a text begins with is followed by the rest
    of it, and the last by `then`. No byte may occur twice."""
    table = torch.zeros(CONFIG.vocab_size, CONFIG.vocab_size, dtype=torch.float64)
    table[:, then] = 5.0
    for text in texts:
        for token, next_token in zip(ids(text), [*ids(text)[1:], then], strict=True):
            table[token, next_token] = 10.0
    return Script(table, (EOS,), context)


def make_engine(model: object, tokenizer: Tokenizer = TOKENIZER, **limits: Any) -> Engine:
    slots = partial(SharedSlots, n_slots=limits.pop("n_slots", None), size=4)
    defaults = {"max_running": 8, "budget": 64, "max_len": 256}
    return Engine(model, tokenizer, slots=slots, **(defaults | limits))


class Served:
    """A running server, seen from a test in another thread."""

    def __init__(self, engine: Engine, loop: EngineLoop, server: Server, port: int):
        self.engine, self.loop, self.server, self.port = engine, loop, server, port
        self.url = f"http://127.0.0.1:{port}"
        self.asyncio_loop: asyncio.AbstractEventLoop | None = None

    def client(self, **extra: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LIVENESS, **extra)

    def complete(self, prompt: Any = "a", **fields: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/completions", json={"model": NAME, "prompt": prompt, **fields})

    def chat(self, content: Any = "a", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        with self.client() as client:
            return client.post("/v1/chat/completions", json={"model": NAME, "messages": messages, **fields})

    def assert_drained(self) -> None:
        """Soon nothing runs, waits or holds memory."""
        eventually(lambda: self.loop.n_live == 0 and not self.engine.busy)
        eventually(lambda: not self.loop._streams and not self.loop._owners)
        assert_drained(self.engine)

    def post(self, **fields: Any) -> socket.socket:
        """A request for a completion, by hand: the answer is left in the socket."""
        body = json.dumps({"model": NAME, **fields}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(LIVENESS)
        sock.connect(("127.0.0.1", self.port))
        sock.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
        return sock

    @property
    def n_handlers(self) -> int:
        """Requests in the hands of the HTTP side."""
        return len(self.server.server_state.tasks)

    def assert_well(self) -> None:
        """The next request is served as if nothing had been."""
        answer = self.complete("a", max_tokens=2, temperature=0)
        assert answer.status_code == 200, answer.text
        self.assert_drained()


def eventually(holds: Callable[[], bool], seconds: float = LIVENESS) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it never came to hold"
        time.sleep(0.005)


@contextmanager
def serve(
    engine: Engine, *, most_waiting: int = 1024, drain_seconds: float = 5.0, send_buffer: int = 0, **options: Any
) -> Iterator[Served]:
    """The engine behind a real uvicorn, in a thread of its own. `send_buffer`: bytes that a client may leave unread
    before the server notices; 0 is the system's own choice."""
    loop = EngineLoop(engine, most_waiting)
    assert engine.tokenizer is not None
    app = make_app(loop, NAME, engine.tokenizer, **{"live": False, **options})
    sock = socket.create_server(("127.0.0.1", 0))
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    started = threading.Event()
    server = Server(app, loop, drain_seconds, started.set)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    assert started.wait(LIVENESS)
    try:
        yield Served(engine, loop, server, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(LIVENESS)
        assert not thread.is_alive(), "the server did not end"
