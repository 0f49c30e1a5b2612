"""The http peer against a small server that answers as it is told, and each way in which a server can go wrong."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

from minillm.bench.harness import Job
from minillm.bench.peers.base import Target
from minillm.bench.peers.compare import disagreement, parse
from minillm.bench.peers.http_peer import Http
from minillm.errors import InputError
from minillm.tokenizer import Tokenizer

pytest.importorskip("httpx")

JOBS = [Job((5, 6, 7), 4), Job((8, 9), 2), Job((10, 11, 12, 13), 1)]
GAP = 0.05  # seconds between two tokens
TARGET = Target(Path("nowhere"), TINY, "float32", "cpu", threads=1, max_running=2, budget=16, sample=(5, 6))


class Server(ThreadingHTTPServer):
    """Answers GET with `models` and POST with what `answer` makes of the request's body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.models: tuple[int, str] = (200, json.dumps({"data": [{"id": "tiny"}]}))
        self.answer: Callable[[Handler, dict[str, Any]], None] = stream

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(*self.server.models)

    def do_POST(self) -> None:
        assert self.path == "/v1/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
        self.server.answer(self, body)

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None: ...


def event(handler: Handler, data: object) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    handler.wfile.write(f"data: {text}\n\n".encode())
    handler.wfile.flush()


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text, "index": 0}]}


def stream(handler: Handler, body: dict[str, Any], more: int = 0, usage: dict[str, Any] | None = None) -> None:
    """One token every GAP seconds, as many as were asked for and `more`."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b": a comment\n\n")
    n = body["max_tokens"] + more
    for _ in range(n):
        time.sleep(GAP)
        event(handler, piece("x"))
    event(handler, piece(""))  # it carries the reason why the text ended
    n_prompt = len(body["prompt"])
    event(handler, {"choices": [], "usage": usage or {"prompt_tokens": n_prompt, "completion_tokens": n}})
    event(handler, "[DONE]")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def started(server: Server) -> Http:
    [peer] = parse([("http", server.url)])
    assert isinstance(peer, Http)
    peer.start(TARGET)
    server.bodies.clear()
    return peer


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        work()
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


# ---- what is sent and counted


def test_requests_are_sent_at_once_and_counted_by_usage(server: Server) -> None:
    peer = started(server)
    waiting = threading.Barrier(len(JOBS), timeout=20)  # nobody is answered before all have asked

    def together(handler: Handler, body: dict[str, Any]) -> None:
        waiting.wait()
        stream(handler, body)

    server.answer = together
    found = peer.run(JOBS)
    assert found.n_tokens == [4, 2, 1] and found.n_prompt == [3, 2, 4]
    assert disagreement(found, JOBS) is None and found.outputs is None
    for job, first, last in zip(JOBS, found.first, found.last, strict=True):
        assert first >= GAP and last - first >= 0.9 * GAP * (job.max_tokens - 1)
    assert found.last[2] == found.first[2]
    body = next(body for body in server.bodies if body["prompt"] == [5, 6, 7])
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 4, 0)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True and body["cache_prompt"] is False


def test_a_url_may_end_in_v1(server: Server) -> None:
    for ending in ("", "/", "/v1", "/v1/"):
        peer = Http(server.url + ending)
        peer.check()
        assert (peer.model, peer.url) == ("tiny", server.url)


def test_the_row_says_how_prompts_are_sent(server: Server) -> None:
    [peer] = parse([("http", server.url)])
    rows = peer.start(TARGET)
    assert list(rows.on_set) == ["http tiny"] and not rows.on_grid
    assert "token ids" in rows.notes["http tiny"] and "all at time 0" in rows.notes["http tiny"]


def test_a_server_that_takes_no_ids_gets_text(server: Server, real_weights: Path) -> None:
    def only_text(handler: Handler, body: dict[str, Any]) -> None:
        if not isinstance(body["prompt"], str):
            handler.reply(400, "prompt must be a string")
            return
        n = body["max_tokens"]
        n_prompt = len(Tokenizer.from_pretrained(real_weights).encode(body["prompt"]))
        stream(handler, body, usage={"prompt_tokens": n_prompt, "completion_tokens": n})

    server.answer = only_text
    ids = tuple(Tokenizer.from_pretrained(real_weights).encode("The capital of France is"))
    [peer] = parse([("http", server.url)])
    target = Target(real_weights, TINY, "float32", "cpu", threads=1, max_running=2, budget=16, sample=ids)
    [note] = peer.start(target).notes.values()
    assert "sent as text" in note
    job = Job(ids, 2)
    assert isinstance(peer, Http) and disagreement(peer.run([job]), [job]) is None
    assert server.bodies[-1]["prompt"] == "The capital of France is"


def test_other_counts_are_seen(server: Server) -> None:
    """A server that ends texts early, goes on too long, or reads another prompt."""
    peer = started(server)
    for more, n_prompt, reason in ((-1, 3, "4 tokens were asked for and 3 emitted"), (1, 3, "and 5"), (0, 4, "read 4")):
        usage = {"prompt_tokens": n_prompt, "completion_tokens": 4 + more}
        server.answer = lambda handler, body, more=more, usage=usage: stream(handler, body, more, usage)
        assert reason in str(disagreement(peer.run(JOBS[:1]), JOBS[:1]))


def test_pieces_without_text_are_no_tokens_that_arrived(server: Server) -> None:
    """A special token has no text: the time of the first text counts, and the end's if there is none at all."""
    peer = started(server)

    def empty(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(2):
            event(handler, piece(""))
        time.sleep(GAP)
        event(handler, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
        event(handler, "[DONE]")

    server.answer = empty
    found = peer.run(JOBS[:1])
    assert found.n_tokens == [4] and found.first == found.last and found.first[0] >= GAP


# ---- what goes wrong


def test_urls_that_are_none_are_refused() -> None:
    for url in ("localhost:8080", "ftp://x", ""):
        assert "must begin with http://" in refusal(lambda url=url: Http(url).check())
    assert "cannot be used" in refusal(lambda: Http("http://[").check())


def test_a_server_that_is_not_there_is_refused_before_anything_is_measured() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    message = refusal(lambda: parse([("http", url)]))
    assert url in message and "is the server running there" in message


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ((503, '{"error": {"message":\n "Loading model"}}'), "answered 503"),
        ((404, "not found"), "answered 404: not found"),
        ((200, "<html>" + "x" * 1000), "which is no list of models"),
        ((200, '{"data": []}'), "which is no list of models"),
        ((200, "[]"), "which is no list of models"),
    ],
)
def test_a_server_of_another_kind_is_refused(server: Server, models: tuple[int, str], reason: str) -> None:
    server.models = models
    message = refusal(lambda: parse([("http", server.url)]))
    assert reason in message and f"{server.url}/v1/models" in message


@pytest.mark.parametrize("status", [400, 401, 422, 500])
def test_an_error_status_is_told_with_its_body(server: Server, status: int) -> None:
    peer = started(server)
    server.answer = lambda handler, body: handler.reply(status, '{"message":\n "no such thing"}')
    message = refusal(lambda: peer.run(JOBS))
    assert f"{server.url}/v1/completions answered {status}" in message and "no such thing" in message


def lines(*texts: str) -> Callable[[Handler, dict[str, Any]], None]:
    return lambda handler, body: handler.reply(200, "".join(f"{text}\n\n" for text in texts))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lines("<html>hello</html>"), "no server-sent event"),
        (lines('{"choices": []}'), "no server-sent event"),
        (lines("data: {half"), "no piece of a completion"),
        (lines("data: [1]"), "no piece of a completion"),
        (lines("data: 7"), "no piece of a completion"),
        (lines('data: {"choices": [{"delta": 1}]}'), "no piece of a completion"),
        (lines('data: {"error": {"message": "out of memory"}}'), "answered with an error: .*out of memory"),
        (lines('data: {"choices": [{"text": "x"}]}', "data: [DONE]"), "sent no usage"),
        (lines('data: {"choices": [], "usage": {}}'), "no usage that counts"),
        (lines(), "sent no usage"),
    ],
)
def test_whatever_is_no_completion_is_named(
    server: Server, answer: Callable[[Handler, dict[str, Any]], None], reason: str
) -> None:
    peer = started(server)
    server.answer = answer
    with pytest.raises(InputError, match=f"{server.url}/v1/completions .*{reason}") as error:
        peer.run(JOBS)
    assert "\n" not in str(error.value)


def test_a_prefix_cache_is_found_out(server: Server) -> None:
    peer = started(server)
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    server.answer = lambda handler, body: stream(handler, body, 0, usage)
    assert "took 2 prompt tokens from an earlier request" in refusal(lambda: peer.run(JOBS[:1]))


def test_a_server_that_falls_silent_or_hangs_up_is_told(server: Server) -> None:
    peer = started(server)
    peer.silence = 0.2
    over = threading.Event()

    def silent(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        event(handler, piece("x"))
        over.wait(10)

    server.answer = silent
    message = refusal(lambda: peer.run(JOBS))
    over.set()
    assert server.url in message and "ReadTimeout" in message

    def hang_up(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        event(handler, piece("x"))
        handler.connection.shutdown(socket.SHUT_RDWR)

    server.answer = hang_up
    assert f"{server.url} cannot be used" in refusal(lambda: peer.run(JOBS))
