"""Clients that leave or stall, signals, dead engines, full queues, and `minillm serve` itself.

Rows of CASES: F2 (the client is gone), F3 (the client is slow), F4 (a connection that drops anywhere), F9 (health), F10
(the end), F11 (the queue is full).
"""

import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import ALPHABET, LIVENESS, NAME, Served, eventually, make_engine, serve, tiny_model, writes
from test_cli import check_refused, run, save_tiny, start
from test_server_api import chunks, offline, refused

from minillm.errors import InputError
from minillm.server import run as run_module
from minillm.server.run import is_loopback, listen, url_of


def slow(served: Served, seconds: float = 0.01) -> None:
    """Each step takes at least so long."""
    served.engine.model.before = lambda: time.sleep(seconds)


def closed_gate(served: Served) -> threading.Event:
    go = threading.Event()
    served.engine.model.before = lambda: go.wait(LIVENESS)
    return go


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


class Later:
    """A request whose answer is looked at later."""

    def __init__(self, served: Served, **fields: object):
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(served.complete(**fields)))
        self._thread.start()

    def answer(self) -> httpx.Response:
        self._thread.join(LIVENESS)
        return self._answers[0]


# ---- F2: the client is gone


@pytest.mark.parametrize("stream", [False, True])
def test_f2_a_client_that_leaves_takes_its_work_along(stream: bool) -> None:
    with serve(make_engine(writes(ALPHABET))) as served:
        slow(served)
        sock = served.post(prompt="a", max_tokens=250, ignore_eos=True, n=3, stream=stream)
        eventually(lambda: len(served.engine.model.steps) >= 3)
        sock.close()
        at = len(served.engine.model.steps)
        served.assert_drained()
        assert served.loop.n_aborted == 3 and len(served.engine.model.steps) < at + 100  # it would have been 250
        eventually(lambda: served.n_handlers == 0)
        served.assert_well()


def test_f2_a_client_that_leaves_while_it_waits() -> None:
    with serve(make_engine(writes(ALPHABET), max_running=1)) as served:
        go = closed_gate(served)
        first = Later(served, prompt="a", max_tokens=3, temperature=0)
        eventually(lambda: served.loop.n_live == 1)
        waiting = [served.post(prompt="a", max_tokens=9, stream=i % 2 == 0) for i in range(4)]
        eventually(lambda: served.loop.n_live == 5)
        for sock in waiting:
            sock.close()
        eventually(lambda: served.n_handlers == 1)
        go.set()
        assert first.answer().json()["choices"][0]["text"] == "bcd"
        served.assert_drained()
        assert served.loop.n_aborted == 4


def test_f2_a_client_that_leaves_while_its_prompt_is_tokenised() -> None:
    engine = make_engine(writes(ALPHABET))
    go, asked, plain = threading.Event(), threading.Event(), engine.tokenizer.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.tokenizer, "encode", lambda text: asked.set() or go.wait(LIVENESS) and plain(text))
        with serve(engine) as served:
            sock = served.post(prompt="a", max_tokens=250, stream=True)
            assert asked.wait(LIVENESS)
            sock.close()
            go.set()
            served.assert_drained()
            eventually(lambda: served.n_handlers == 0)


def test_f2_random_clients_that_leave_at_random_leave_nothing_behind() -> None:
    rng = random.Random(2)
    with serve(make_engine(tiny_model(), n_slots=200, max_running=4)) as served:
        socks: list[socket.socket] = []
        for _ in range(100):
            prompt = [3 + rng.randrange(3) for _ in range(rng.randint(1, 12))]
            fields = {"n": rng.randint(1, 3), "max_tokens": rng.randint(1, 80), "stream": rng.random() < 0.7}
            socks.append(served.post(prompt=prompt, ignore_eos=True, **fields))
            while socks and rng.random() < 0.5:
                sock = socks.pop(rng.randrange(len(socks)))
                if rng.random() < 0.3:
                    sock.recv(100)
                sock.close()
        for sock in socks:
            assert b"HTTP/1.1 200 OK" in read_all(sock)
            sock.close()
        eventually(lambda: served.n_handlers == 0)
        served.assert_drained()
        assert served.loop.n_aborted > 0
        served.assert_well()


# ---- F3: the client is slow


def test_f3_a_slow_reader_slows_nobody_and_gets_everything_in_order() -> None:
    with serve(make_engine(writes(ALPHABET)), send_buffer=4096) as served:
        fields = {"prompt": "abc", "max_tokens": 240, "temperature": 1, "seed": 1, "n": 4, "ignore_eos": True}
        sock = served.post(**fields, logprobs=5, stream=True)
        eventually(lambda: len(served.engine.model.steps) > 0)
        served.assert_drained()  # the engine has done with it, though nobody reads
        assert served.n_handlers == 1
        answer = served.complete("a", max_tokens=5, temperature=0)
        assert answer.json()["choices"][0]["text"] == "bcdef"
        data = read_all(sock).decode()
        assert data.rstrip().endswith("0") and "data: [DONE]" in data
        texts, n_chunks = dict.fromkeys(range(4), ""), 0
        for line in data.split("\n"):
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                texts[choice["index"]] += choice["text"]
                n_chunks += 1
        whole = served.complete(**fields).json()["choices"]
        assert list(texts.values()) == [choice["text"] for choice in whole]
        assert n_chunks < 4 * 240  # what several steps made went out together
        eventually(lambda: served.n_handlers == 0)


def test_f3_a_client_that_leaves_while_it_stalls() -> None:
    with serve(make_engine(writes(ALPHABET)), send_buffer=4096) as served:
        sock = served.post(prompt="abc", max_tokens=240, n=8, ignore_eos=True, logprobs=5, stream=True)
        eventually(lambda: len(served.engine.model.steps) > 0)
        served.assert_drained()
        assert served.n_handlers == 1
        sock.close()
        eventually(lambda: served.n_handlers == 0)
        served.assert_well()


def test_f3_a_client_that_takes_nothing_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    with serve(make_engine(writes(ALPHABET)), send_buffer=4096, patience=0.2) as served:
        slow(served, 0.02)
        sock = served.post(prompt="abc", max_tokens=240, n=8, ignore_eos=True, logprobs=20, stream=True)
        eventually(lambda: len(served.engine.model.steps) > 0)
        served.assert_drained()
        assert served.loop.n_aborted == 8
        eventually(lambda: served.n_handlers == 0 and not served.server.server_state.connections)
        assert "a client took nothing for 0.2 s" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in read_all(sock)
        served.engine.model.before = lambda: None
        served.assert_well()


def test_a_body_that_does_not_come_is_a_408() -> None:
    with serve(make_engine(writes(ALPHABET)), body_seconds=0.1) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=LIVENESS) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert read_all(sock).startswith(b"HTTP/1.1 408 ")
        served.assert_well()


def test_f4_a_connection_that_drops_at_every_byte_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 5, "stream": True}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    request = request % len(body) + body
    with serve(make_engine(writes(ALPHABET))) as served:
        for i in range(len(request) + 1):
            with socket.create_connection(("127.0.0.1", served.port)) as sock:
                sock.sendall(request[:i])
        eventually(lambda: served.n_handlers == 0)
        served.assert_well()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


HEADS = {
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "a huge length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "a large length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 999999999999999\r\n\r\n",
    "bad chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
    "another method": b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    "connect": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a split header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
    "no UTF-8 in the address": b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "an upgrade": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_odd_get_an_answer_and_never_a_5xx(
    shared: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=LIVENESS) as sock:
        sock.sendall(HEADS[name])
        answer = sock.recv(4096)
    assert answer.startswith(b"HTTP/1.1 ") and answer[9:10] in (b"2", b"4"), answer
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    shared.assert_well()


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serve(make_engine(writes(ALPHABET))) as served:
        yield served


# ---- F9: the engine is dead


def test_f9_a_dead_engine_is_told_to_everybody() -> None:
    with serve(make_engine(writes(ALPHABET))) as served, served.client() as client:
        go = closed_gate(served)
        waiting = [Later(served, prompt="a", max_tokens=9, stream=i % 2 == 0) for i in range(4)]
        eventually(lambda: served.loop.n_live == 4)
        assert client.get("/health").json() == {"status": "ok"}

        def broken(plan: object) -> None:
            raise RuntimeError("the GPU is gone")

        served.engine._forward = broken
        go.set()
        for one in waiting:
            answer = one.answer()
            if answer.status_code == 200:  # its first token was made before
                assert chunks(answer)[-1]["error"]["code"] == "engine_error"
            else:
                refused(answer, 500)
        eventually(lambda: not served.loop.alive)
        for answer in (client.get("/health"), served.complete("a"), served.chat("a")):
            refused(answer, 503, None, "the engine has stopped")
        assert client.get("/v1/models").status_code == client.get("/metrics").status_code == 200


# ---- F10: the end


def test_f10_running_streams_end_and_new_requests_are_told_to_come_later() -> None:
    with serve(make_engine(writes(ALPHABET))) as served, served.client() as client:
        go = closed_gate(served)
        running = [Later(served, prompt="a", max_tokens=9, temperature=0, stream=i % 2 == 0) for i in range(4)]
        eventually(lambda: served.loop.n_live == 4)
        served.server.handle_exit(signal.SIGTERM, None)
        assert served.loop.draining  # at once
        for answer in (client.get("/health"), served.complete("a"), served.chat("a", stream=True)):
            refused(answer, 503, None, "shutting down")
            assert answer.headers["retry-after"] == "1"
        go.set()
        streamed, whole = running[0].answer(), running[1].answer()
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks(streamed)) == "bcdefghij"
        assert whole.json()["choices"][0]["text"] == "bcdefghij"
        eventually(lambda: not served.server.started or not served.loop._thread.is_alive())


def test_f10_what_takes_longer_is_cut_off_with_an_error() -> None:
    with serve(make_engine(writes(ALPHABET)), drain_seconds=0.1) as served:
        slow(served, 0.05)
        streamed = Later(served, prompt="a", max_tokens=250, ignore_eos=True, stream=True)
        whole = Later(served, prompt="a", max_tokens=250, ignore_eos=True)
        eventually(lambda: len(served.engine.model.steps) > 2)
        served.server.handle_exit(signal.SIGTERM, None)
        assert chunks(streamed.answer())[-1]["error"]["code"] == "shutting_down"
        refused(whole.answer(), 503)


# ---- F11: the queue is full


def test_f11_beyond_the_limit_everybody_gets_an_answer_at_once() -> None:
    with serve(make_engine(writes(ALPHABET), max_running=1), most_waiting=1) as served:
        go = closed_gate(served)
        taken = Later(served, prompt="a", max_tokens=3, temperature=0, n=2)
        eventually(lambda: served.loop.n_live == 2)
        for _ in range(8):  # while nothing moves
            answer = served.complete("a", max_tokens=3, temperature=0)
            assert refused(answer, 429)["code"] == "rate_limit_exceeded"
            assert answer.headers["retry-after"] == "1"
        go.set()
        assert [choice["text"] for choice in taken.answer().json()["choices"]] == ["bcd", "bcd"]
        served.assert_well()


def test_f11_ten_at_once_and_a_limit_of_two() -> None:
    with serve(make_engine(writes(ALPHABET), max_running=1), most_waiting=1) as served:
        slow(served, 0.005)
        answers = [one.answer() for one in [Later(served, prompt="a", max_tokens=20) for _ in range(10)]]
        assert {answer.status_code for answer in answers} == {200, 429}
        served.assert_drained()


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("served") / "tiny", context=100_000)


def serve_command(folder: Path, *more: object) -> subprocess.Popen[bytes]:
    options = ("--model", folder, "--device", "cpu", "--dtype", "float32", "--backend", "gather", "--max-running", 4)
    return start("serve", *options, "--max-len", 100_000, "--kv-slots", 100_000, *more)


def url_from(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    assert line.startswith("tiny is served at http://127.0.0.1:"), (line, process.stderr)
    return line.split()[4]


def test_the_command_serves_and_obeys_signals(folder: Path) -> None:
    idle, busy = (serve_command(folder, "--port", 0, "--drain-seconds", 60) for _ in range(2))
    try:
        url = url_from(busy)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 90_000, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=LIVENESS) as client,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            busy.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert next(line for line in lines if line).startswith("data: {")  # it goes on
            busy.send_signal(signal.SIGTERM)
            assert busy.wait(LIVENESS) == 128 + signal.SIGTERM
        url = url_from(idle)
        assert httpx.get(f"{url}/health", headers={"Connection": "Upgrade", "Upgrade": "h2c"}).status_code == 200
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), LIVENESS) as sock:
            sock.sendall(b"no HTTP\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 400 ")
        idle.send_signal(signal.SIGINT)
        assert idle.wait(LIVENESS) == 0
        for process in (idle, busy):
            assert process.stderr is not None and process.stderr.read() == b""
    finally:
        for process in (idle, busy):
            process.kill()
            process.wait()


def test_a_busy_port_is_one_clear_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_refused(run("serve", "--model", folder, "--port", port), f"port {port} of 127.0.0.1 is in use", "--port")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--port", 65536), "--port"),
        (("--port", -1), "--port"),
        (("--host", "no such host"), "--host no such host"),
        (("--host", "8.8.8.8"), "cannot be listened at"),
        (("--max-waiting", -1), "--max-waiting"),
        (("--max-running", 0), "--max-running"),
        (("--drain-seconds", -1), "drain-seconds is -1"),
        (("--drain-seconds", "nan"), "drain-seconds is nan"),
        (("--policy", "random"), "policy 'random' is not known"),
        (("--backend", "fastest"), "fastest"),
        (("--block", 16, "--kv-slots", 17), "17 KV slots cannot be cut into blocks of 16"),
        (("--max-len", 100_001), "max_len is 100001"),
        (("--device", "tpu"), "device 'tpu'"),
        (("--model", "nothing"), "nothing"),
        (("--replicas", 0), "--replicas"),
        (("--ray-address", "auto"), "--replicas"),
    ],
)
def test_options_that_are_wrong_are_one_line(folder: Path, options: tuple[object, ...], words: str) -> None:
    defaults = ("--model", folder, "--port", 0, "--device", "cpu", "--dtype", "float32", "--backend", "gather")
    check_refused(run("serve", *defaults, *options), words)


def test_what_is_missing_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else plain(name))
    check_refused(run("serve"), "needs uvicorn", "pip install 'minillm[serve]'")


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("::1", None, False)]
)
def test_an_open_door_is_warned_of(monkeypatch: pytest.MonkeyPatch, host: str, key: str | None, warns: bool) -> None:
    def enough(options: run_module.Options) -> None:
        assert options.api_key == key
        raise InputError("enough")

    monkeypatch.setattr(run_module, "make", enough)
    result = run("serve", "--host", host, "--port", 0, env={"MINILLM_API_KEY": key} if key else None)
    assert ("no --api-key" in result.stderr) is warns, result.stderr
    assert "enough" in result.stderr or "cannot be listened at" in result.stderr  # not everywhere is there an IPv6


def test_addresses() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == [False] * 3
    with listen("localhost", 0) as sock:
        assert url_of(sock).startswith("http://")


def test_the_thousandth_stream_needs_more_files_than_usual() -> None:
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, 2000))\n"
        "from minillm.server.run import allow_many_files; allow_many_files()\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "2000", done.stderr


def test_what_is_served_is_what_the_engine_makes(shared: Served) -> None:
    expected = offline(shared, "abc", max_tokens=9)
    assert shared.complete("abc", max_tokens=9, temperature=0).json()["choices"][0]["text"] == expected.text
