"""Replicas on Ray Serve: two of them on this machine serve a tiny model, and are killed, broken and replaced.

CASES F2 (a client that leaves), F9 (a dead engine), F10 (the end drains) with Ray's proxy in between.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="ray is not installed; it comes with minillm[cluster]")
httpx = pytest.importorskip("httpx")

from cluster_server import engine  # noqa: E402

from minillm.errors import InputError  # noqa: E402
from minillm.params import SamplingParams  # noqa: E402
from minillm.server import cluster  # noqa: E402
from minillm.server.run import Options  # noqa: E402

KEY = {"Authorization": "Bearer key"}
LONG = 80  # tokens, of a stream that something happens to
PATIENCE = 90.0  # seconds until a test says that something hangs


# ---- the server


class Server:
    """A process that holds two replicas, seen from outside."""

    def __init__(self, folder: Path):
        self.log = (folder / "log").open("w+")
        environment = {**os.environ, "RAY_TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
        command = [sys.executable, str(Path(__file__).with_name("cluster_server.py"))]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout
        hangs = threading.Timer(2 * PATIENCE, self.process.kill)
        hangs.start()
        self.url = self.process.stdout.readline().strip()
        hangs.cancel()
        assert self.url, self.said()
        self.http = httpx.Client(base_url=self.url, headers=KEY, timeout=PATIENCE)

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def family(self) -> list[int]:
        """The processes of this server, itself included; those that are ending not."""
        import psutil

        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [self.process.pid, *(p.pid for p in found)]

    def who(self) -> int:
        pid: int = self.http.get("/who").json()["pid"]
        return pid

    def replicas(self, but: set[int] = frozenset()) -> set[int]:  # type: ignore[assignment]
        """The two that answer, as soon as there are two, neither of them in `but`."""
        seen: set[int] = set()
        wait_for(lambda: len(seen.add(self.who()) or seen - but) == 2)  # type: ignore[func-returns-value]
        return seen - but

    def post(self, prompt: str, n: int, **headers: str) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": n, "temperature": 0}
        return self.http.post("/v1/completions", json=body, headers=headers)

    def stream(self, prompt: str, n: int, began: Callable[[int], object] = bool) -> SimpleNamespace:
        """The stream read to its end; `began` is told which replica it comes from, after the first token."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True}
        result = SimpleNamespace(text="", error=None, done=False, times=[], pid=0)
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            result.pid = int(response.headers["x-pid"])
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    result.done = True
                elif line.startswith("data: "):
                    data = json.loads(line[6:])
                    result.times.append(time.monotonic())
                    result.error = data.get("error")
                    if not result.error:
                        result.text += data["choices"][0]["text"]  # a letter is a token
                    if len(result.times) == 1:
                        began(result.pid)
        return result

    def metric(self, name: str) -> dict[str, float]:
        """By replica."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name + "{")]
        return {line.split('replica="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.http.close()
        self.log.close()


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="minillm"))  # Ray's sockets have long names already
    server = Server(folder)
    yield server
    server.end()
    shutil.rmtree(folder, ignore_errors=True)


def offline(prompts: list[str], n: int) -> list[str]:
    return [output.text for output in engine().generate(prompts, SamplingParams(max_tokens=n))]


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(job) for job in jobs]]


PROMPTS = [chr(ord("A") + i) * 3 + "BC" for i in range(12)]


# ---- as long as all is well


def test_both_replicas_work_and_the_texts_are_those_of_the_offline_engine(server: Server) -> None:
    answers = in_threads([lambda p=p: server.post(p, 12) for p in PROMPTS])
    assert [answer.json()["choices"][0]["text"] for answer in answers] == offline(PROMPTS, 12)
    assert {int(answer.headers["x-pid"]) for answer in answers} == server.replicas()


def test_what_begins_the_same_goes_to_the_same_replica(server: Server) -> None:
    homes = {prompt: {int(server.post(prompt, 1).headers["x-pid"]) for _ in range(4)} for prompt in PROMPTS}
    assert all(len(pids) == 1 for pids in homes.values()), homes


def test_errors_of_the_app_pass_the_proxy_as_they_are(server: Server) -> None:
    assert server.post("A", 0).status_code == 400 and "max_tokens" in server.post("A", 0).json()["error"]["message"]
    assert server.http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert server.http.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert server.http.post("/v1/completions", content=b"{" * 100_000).status_code in (400, 415)
    too_long = server.http.post("/v1/completions", json={"prompt": "A" * (5 << 20)})  # longer than the front looks
    assert too_long.status_code == 413


def test_tokens_flow_through_the_proxy_as_they_are_made(server: Server) -> None:
    result = server.stream("AB", 40)
    assert result.done and result.text == offline(["AB"], 40)[0]
    assert result.times[-1] - result.times[0] > 0.3  # 39 steps of at least 20 ms; at once if something held them back


def test_f2_a_client_that_leaves_ends_its_work(server: Server) -> None:
    before = sum(server.metric("minillm:requests_aborted_total").values())
    body = {"model": "tiny", "prompt": "AB", "max_tokens": 200, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_for(lambda: sum(server.metric("minillm:requests_aborted_total").values()) == before + 1)
    assert set(server.metric("vllm:num_requests_running").values()) == {0.0}
    with pytest.raises(httpx.ReadTimeout):  # the same without a stream
        server.http.post("/v1/completions", json={**body, "stream": False}, timeout=0.5)
    wait_for(lambda: sum(server.metric("minillm:requests_aborted_total").values()) == before + 2)


def test_the_metrics_are_those_of_both_replicas(server: Server) -> None:
    assert len(server.metric("vllm:generation_tokens_total")) == 2


def test_ray_listens_on_loopback_alone(server: Server) -> None:
    import psutil

    open_to_all = []
    for pid in server.family():
        process = psutil.Process(pid)
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.endswith("127.0.0.1"):
                open_to_all.append(process.cmdline()[0])
    # the one port that Ray lets nobody bind; it asks for the token
    assert all(name.startswith("ray::ServeReplica") for name in open_to_all) and len(open_to_all) <= 2, open_to_all


# ---- when something dies


def test_a_killed_replica_is_noticed_by_its_own_clients_alone(server: Server) -> None:
    """Streams of the dead replica end with an error; what it had not begun to answer is answered by the other; streams
    of the other are whole; and a new one comes up."""
    before = server.replicas()
    begun: list[int] = []
    streams = [lambda p=p: server.stream(p, LONG, begun.append) for p in PROMPTS[:8]]
    waiting = [lambda p=p: server.post(p, 5, **{"x-wait": "2"}) for p in PROMPTS]
    with ThreadPoolExecutor(40) as pool:
        running = [pool.submit(job) for job in streams]
        held = [pool.submit(job) for job in waiting]
        wait_for(lambda: len(begun) == 8)
        victim = max(before, key=begun.count)
        [other] = before - {victim}
        assert begun.count(other), "all streams are on one replica; choose other prompts"
        os.kill(victim, signal.SIGKILL)
        results = [future.result(PATIENCE) for future in running]
        answers = [future.result(PATIENCE) for future in held]
    for result, expected in zip(results, offline(PROMPTS[:8], LONG), strict=True):
        assert result.done
        if result.pid == other:
            assert result.error is None and result.text == expected
        else:
            assert len(result.text) < LONG and expected.startswith(result.text)
            assert "not complete" in result.error["message"]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert {int(answer.headers["x-pid"]) for answer in answers} == {other}
    assert [answer.json()["choices"][0]["text"] for answer in answers] == offline(PROMPTS, 5)
    after = server.replicas(but={victim})
    assert other in after and victim not in after


def test_f9_a_replica_whose_engine_dies_is_replaced(server: Server) -> None:
    import psutil

    before = server.replicas()
    broken = int(server.http.get("/break").headers["x-pid"])

    def refused() -> bool:  # a request makes it step, and die
        answers = [server.post(prompt, 1) for prompt in PROMPTS]
        return any(int(a.headers.get("x-pid", 0)) == broken and a.status_code >= 500 for a in answers)

    wait_for(refused)
    wait_for(lambda: not psutil.pid_exists(broken))
    assert {server.post(prompt, 1).status_code for prompt in PROMPTS} == {200}
    assert server.replicas(but={broken}) >= before - {broken}


def test_a_rolling_restart_loses_no_request(server: Server) -> None:
    before = server.replicas()
    stop = threading.Event()

    def keep_asking(prompt: str) -> list[str]:
        texts = []
        while not stop.is_set():
            result = server.stream(prompt, 10)
            assert result.done and not result.error
            texts.append(result.text)
        return texts

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, prompt) for prompt in PROMPTS[:4]]
        server.process.send_signal(signal.SIGHUP)
        try:
            server.replicas(but=before)
        finally:
            stop.set()
        for prompt, future in zip(PROMPTS[:4], asking, strict=True):
            texts = future.result(PATIENCE)
            assert set(texts) == set(offline([prompt], 10)) and len(texts) > 2


def test_f10_the_end_drains_and_leaves_nothing_behind(server: Server) -> None:
    """The last one with this server."""
    import psutil

    server.replicas()
    family, begun, refused = server.family(), threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.stream, "AB", LONG, lambda _: begun.set())
        assert begun.wait(PATIENCE)
        server.process.terminate()

        def look() -> bool:
            if not running.done():
                answer = server.post("C", 1)
                refused.append((answer.status_code, answer.headers.get("retry-after"), "error" in answer.json()))
            return running.done()

        wait_for(look)
        result = running.result()
    assert result.done and result.text == offline(["AB"], LONG)[0]
    assert (503, "1", True) in refused and {r[0] for r in refused} <= {200, 503}
    assert server.process.wait(PATIENCE) == 0, server.said()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in family if psutil.pid_exists(pid)], timeout=10)
    assert not alive


# ---- wrong input, each in one line


def never(*_: object) -> Any:
    raise AssertionError("nothing is made")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'minillm\[cluster\]'"):
        cluster.run(never, replicas=2, port=0)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:no", "127.0.0.1:99999", "nowhere.invalid:6379"])
def test_a_ray_that_is_not_there(address: str) -> None:
    with pytest.raises(InputError, match=f"Ray at {address} is out of reach"):
        cluster.run(never, replicas=1, port=0, address=address)


def test_wrong_numbers_and_a_port_that_is_taken() -> None:
    with pytest.raises(InputError, match="replicas is 0"):
        cluster.run(never, replicas=0)
    with pytest.raises(InputError, match="drain-seconds is -1"):
        cluster.run(never, replicas=1, drain_seconds=-1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is in use"):
            cluster.run(never, replicas=1, port=port)


@pytest.mark.parametrize(("replicas", "cores"), [(1, 3), (2, 1), (3, 1), (6, 0.5)])
def test_cores_are_divided_among_the_replicas(monkeypatch: pytest.MonkeyPatch, replicas: int, cores: float) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 3.0})
    assert cluster._share(replicas, "auto") == {"num_cpus": cores, "num_gpus": 0}


def test_each_replica_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 3.0, "GPU": 2.0})
    assert [cluster._share(2, device)["num_gpus"] for device in ("auto", "cuda", "cpu")] == [1, 1, 0]
    for device in ("auto", "cuda"):
        with pytest.raises(InputError, match="replicas is 3, but Ray has 2 GPUs"):
            cluster._share(3, device)
    assert cluster._share(3, "cpu")["num_gpus"] == 0


def test_the_command_says_what_is_wrong_before_ray_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "_ray", never)
    with pytest.raises(InputError, match="nowhere"):
        cluster.serve(Options(str(tmp_path / "nowhere")), "127.0.0.1", 0, 1.0, 2)
    monkeypatch.setattr(cluster, "find", lambda model: None)
    with pytest.raises(InputError, match="device is cuda:1"):
        cluster.serve(Options("some", device="cuda:1"), "127.0.0.1", 0, 1.0, 2)


def test_the_first_signal_ends_and_the_second_hurries() -> None:
    with cluster.Orders() as orders:
        with pytest.raises(KeyboardInterrupt):  # before anybody listens
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE)
        timer = threading.Timer(0.1, lambda: [os.kill(os.getpid(), s) for s in (signal.SIGHUP, signal.SIGTERM)])
        timer.start()
        assert len(list(orders)) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE)
