"""`minillm bench serving`: a tiny model behind real sockets; only counts are looked at, never times.

CASES G3 (no prompt is known from before), G8 (what did not do the same work is void), F11 (what is refused is told).
"""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("uvicorn", reason="the server needs minillm[serve]")

import serving as scene  # noqa: E402
from serving import NAME, Served, eventually, make_engine, serve, tiny_model  # noqa: E402

from minillm.bench import readme, results, serving_processes, serving_report  # noqa: E402
from minillm.bench.load_prompts import Prompts  # noqa: E402
from minillm.bench.serving import (  # noqa: E402
    BLOCK,
    Found,
    Plan,
    Servers,
    Trial,
    measure,
    run_name,
    serve_offline,
    why_void,
)
from minillm.bench.serving_processes import Models, cpu_seconds, peer, peer_options, process, sigterm_unwinds  # noqa: E402
from minillm.bench.serving_report import Result, as_json, compact, run_command, show, verdicts  # noqa: E402
from minillm.errors import InputError  # noqa: E402
from minillm.server import run as run_module  # noqa: E402
from minillm.server.run import Options  # noqa: E402
from tests.test_cli import check_refused, run, save_tiny  # noqa: E402

SLEEPS = "import time; time.sleep(600)"
SIZES = {"requests": 9, "clients": 4, "max_tokens": 5, "rounds": 2, "streams": 30, "stream_prompt": 12, "budget": 64}
ABOUT: dict[str, Any] = {
    "machine": {"gpu": None, "cores": 2, "cpu": "a CPU"},
    "command": "minillm",
    "date": "2026-01-01",
}


class Short(Plan):
    """Prompts of a few letters: in the tests' models every byte is a token."""

    def prompts(self, plan: Any) -> Prompts:
        return Prompts(self.seed, plan.endpoint, plan.max_tokens, plan.ignore_eos, characters=20)


PLAN = Short(**SIZES, stream_tokens=3, shares=(0.5, 1.0), seconds=0.3, goodput={"ttft": 60.0})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=160)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(make_engine(tiny_model(), max_running=4)) as one:
        yield one


@pytest.fixture
def both(served: Served) -> Servers:
    return Servers(make_engine(tiny_model(), max_running=4), PLAN, {"server": served.url}, {"server": os.getpid()})


def asked(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts of all requests from now on."""
    found, submit = [], engine.submit

    def remembered(*requests: Any) -> None:
        found.extend(list(request.prompt) for request in requests)
        submit(*requests)

    monkeypatch.setattr(engine, "submit", remembered)
    return found


def trial(engine: str, round: int, speed: float, void: str | None = None) -> Trial:
    return Trial(engine, round, 9, 90, 45, 45 / speed, speed, speed / 5, void=void)


# ---- the same work


def test_the_engine_alone_and_the_server_are_asked_the_same(
    both: Servers, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, through = asked(both.engine, monkeypatch), asked(served.engine, monkeypatch)
    first, second = (both.trial(name, 1) for name in ("offline", "server"))
    assert sorted(alone) == sorted(through) and len(alone) == PLAN.requests
    for one in (first, second):
        assert one.void is None and one.requests == PLAN.requests
        assert one.prompt_tokens == sum(map(len, alone)) and one.output_tokens == PLAN.requests * PLAN.max_tokens
        assert one.steps and one.steps >= PLAN.max_tokens and one.step_seconds and one.step_seconds <= one.wall
        assert one.cpu.keys() == {"client", "server"}
    assert second.row and second.row.most_open == PLAN.clients


def test_g3_no_prompt_is_known_from_before(both: Servers, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the warm-up nor in another round."""
    both.plan = replace(PLAN, seed=1)
    through = asked(served.engine, monkeypatch)
    both.warm()
    rows = [both.trial("server", round).row for round in (0, 1)]
    prompts = [tuple(prompt) for prompt in through]
    assert len(set(prompts)) == len(prompts) == PLAN.clients + 2 * PLAN.requests
    assert all(row and row.hit_rate is not None and row.hit_rate < 0.4 for row in rows)  # the template's first tokens


def test_alone_the_engine_is_kept_as_full_as_by_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are always as many texts as clients, until no request is left."""
    engine, held, step = make_engine(tiny_model(), max_running=4), [], None
    step = engine.step

    def watched() -> Any:
        held.append(len(engine._requests))
        return step()

    monkeypatch.setattr(engine, "step", watched)
    found = serve_offline(engine, PLAN, run_name(None, 0), 9)
    full = [n for n in held if n == PLAN.clients]
    assert max(held) == PLAN.clients and held == sorted(held, reverse=True)
    assert len(full) * PLAN.clients >= (PLAN.requests - PLAN.clients) * PLAN.max_tokens
    assert found.steps == len(held) and not engine.busy


def test_a_round_of_fewer_requests_than_clients_is_whole() -> None:
    found = serve_offline(make_engine(tiny_model()), PLAN, "x", 2)
    assert (found.requests, found.output_tokens) == (2, 2 * PLAN.max_tokens)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"requests": 8}, "8 of 9 requests"), ({"output_tokens": 44}, "44 output tokens in place of 45"), ({}, None)],
)
def test_g8_less_work_is_void(changes: dict[str, int], words: str | None) -> None:
    void = why_void(replace(trial("offline", 0, 1.0), **changes), PLAN)
    assert void is None if words is None else words in str(void)


def test_ratios_are_of_the_same_round() -> None:
    """Half as fast in each round, while the machine itself became slower; a void round, and one alone, do not count."""
    pairs = [(50.0, 100.0), (25.0, 50.0), (5.0, 10.0)]
    found = Found([t for i, (a, b) in enumerate(pairs) for t in (trial("server", i, a), trial("offline", i, b))])
    found.trials += [trial("server", 3, 1.0, void="late"), trial("offline", 3, 1.0), trial("server", 4, 99.0)]
    assert found.ratio("server", "offline") == 0.5 and found.ratio("server", "peer") is None
    assert found.middle("offline", "output_throughput") == 30.0 and found.middle("server", "steps") is None


# ---- all of it


def everything(those: Servers, plan: Plan, peer: str | None = None) -> Result:
    found = Found()
    measure(those, plan, found, quiet())
    return Result(ABOUT, {"name": "tiny", "dtype": "float64", "device": "cpu"}, plan, found, peer, False)


def test_all_parts_become_tables_json_and_readme(both: Servers, served: Served) -> None:
    both.urls = {**both.urls, "peer": served.url}
    result = everything(both, PLAN, "other-server -np 4")
    order = [(one.round, one.engine) for one in result.found.trials]
    assert order == [(0, "offline"), (0, "server"), (0, "peer"), (1, "server"), (1, "peer"), (1, "offline")]
    assert not result.failed
    ratio, streams, lag, against = verdicts(result)
    assert streams.met and streams.value == PLAN.streams and "30 at once" in streams.detail
    assert lag.value is not None and lag.met == (lag.value < 0.1) and lag.measured.endswith(" ms")
    for one, target in ((ratio, 0.9), (against, 1.2)):
        assert one.value and one.met == (one.value >= target) and f"{target:g} x" in one.target
    assert [row.rate for row in result.found.sweep] == pytest.approx(
        [share * (result.found.middle("server", "request_throughput") or 0) for share in PLAN.shares]
    )
    show(result, console := quiet())
    assert "other-server" in said(console) and "void" not in said(console) and "PARTIAL" not in said(console)
    section = json.loads(json.dumps(as_json(result), allow_nan=False))
    assert len(section["trials"]) == 6 and section["streams"]["completed"] == 30 and section["plan"]["seed"] == 0
    assert served.url not in json.dumps(section)  # where it happened to be
    block = readme.serving("file", {"serving": section})
    assert block.count("\n| ") == 1 + 4 + 1 + 3 + 1 + 2 and "`other-server -np 4`" in block
    assert result.found.streams and compact(result.found.streams)


def test_a_results_file_from_before_has_no_such_block() -> None:
    assert readme.serving("file", {"ladder": {}}) == ""


def test_f11_streams_that_are_refused_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_model(), max_running=2)
    with serve(engine, most_waiting=0) as narrow:
        plan = replace(PLAN, clients=2, requests=4, rounds=1, shares=())
        found = Found()
        those = Servers(make_engine(tiny_model(), max_running=2), plan, {"server": narrow.url}, {})
        measure(those, plan, found, quiet())
    result = Result(ABOUT, {"name": "tiny", "dtype": "x", "device": "cpu"}, plan, found, None, False)
    assert result.failed
    streams = verdicts(result)[1]
    assert streams.met is False and "HTTP 429" in streams.detail
    show(result, console := quiet())
    assert "FAILED" in said(console)
    assert json.loads(json.dumps(as_json(result)))["streams"]["faults"]["HTTP 429"] > 0


def test_what_is_void_says_so_in_place_of_a_ratio() -> None:
    found = Found([trial("server", 0, 50.0, void="2 of 9 requests ended well"), trial("offline", 0, 10.0)])
    result = Result(ABOUT, {"name": "tiny", "dtype": "x", "device": "cpu"}, PLAN, found, None, False)
    [ratio] = verdicts(result)
    assert ratio.met is None and ratio.measured == "-" and "2 of 9" in ratio.detail and result.failed
    show(result, console := quiet())
    assert "void" in said(console)


# ---- processes


@pytest.mark.parametrize("how", [RuntimeError, KeyboardInterrupt, None])
def test_a_server_ends_with_the_block_however_that_ends(tmp_path: Path, how: type[BaseException] | None) -> None:
    server = None
    try:
        with process([sys.executable, "-c", SLEEPS], tmp_path / "log") as server:
            assert server.poll() is None
            if how:
                raise how
    except (RuntimeError, KeyboardInterrupt) as error:
        assert how and isinstance(error, how)
    assert server and server.poll() == -signal.SIGTERM


def test_a_server_that_does_not_obey_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_processes, "END_SECONDS", 0.2)
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEPS}"
    with process([sys.executable, "-c", code], tmp_path / "log") as server:
        eventually(lambda: "ready" in (tmp_path / "log").read_text())
    assert server.returncode == -signal.SIGKILL


def test_sigterm_ends_the_servers_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, sigterm_unwinds():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(scene.LIVENESS)
    assert ended.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before


def test_cpu_time_is_each_processes_own(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("no /proc here")
    code = "while True: pass"
    with (
        process([sys.executable, "-c", code], tmp_path / "busy") as busy,
        process([sys.executable, "-c", SLEEPS], tmp_path / "idle") as idle,
    ):
        pids = {"busy": busy.pid, "idle": idle.pid}
        eventually(lambda: cpu_seconds(pids)["busy"] > 0.5)
        assert cpu_seconds(pids)["idle"] < 0.5
    assert cpu_seconds({"gone": busy.pid}) == {}


FAKE_PEER = """#!{python}
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if self.path == "/health" and Handler.asked > 2 else 503)
        self.end_headers()
        self.wfile.write(" ".join(sys.argv).encode())
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_llama_server_is_waited_for_until_it_has_loaded(tmp_path: Path) -> None:
    gguf = tmp_path / "w.gguf"
    gguf.write_bytes(b"GGUF")
    models = Models("m", peer_server=program(tmp_path / "llama-server", FAKE_PEER), peer_gguf=gguf)
    models.check()
    with peer(models, 32, tmp_path) as (url, pid):
        with urllib.request.urlopen(f"{url}/health") as page:
            words = page.read().decode()
        assert url.startswith("http://127.0.0.1:") and f"-m {gguf}" in words
        assert " ".join(peer_options(32)) in words and "-np 32 -c 65536" in words
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_llama_server_may_lie_in_the_folder_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "llama-server", FAKE_PEER)
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    models = Models("m", peer_server=Path("llama-server"), peer_gguf=Path("w.gguf"))
    models.check()
    with peer(models, 1, tmp_path) as (url, _):
        assert url.startswith("http://127.0.0.1:")


def test_a_server_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    gguf = tmp_path / "w.gguf"
    gguf.write_bytes(b"GGUF")
    script = "#!{python}\nimport sys\nprint('loading')\nsys.exit('no tokenizer in it')\n"
    models = Models("m", peer_server=program(tmp_path / "llama-server", script), peer_gguf=gguf)
    with pytest.raises(InputError, match="llama-server ended before it served, with status 1: no tokenizer in it"):
        with peer(models, 4, tmp_path):
            pass


def test_a_server_that_never_serves_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_processes, "START_SECONDS", 0.3)
    gguf = tmp_path / "w.gguf"
    gguf.write_bytes(b"GGUF")
    models = Models("m", peer_server=program(tmp_path / "llama-server", "#!{python}\n" + SLEEPS), peer_gguf=gguf)
    with pytest.raises(InputError, match="not ready"), peer(models, 4, tmp_path):
        pass


# ---- the command


def test_the_command_measures_writes_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "prompts", Short.prompts)
    folder, path = save_tiny(tmp_path / "tiny", context=512), tmp_path / "results.json"
    started: list[int] = []
    popen = subprocess.Popen

    def remembered(*args: Any, **more: Any) -> Any:
        server = popen(*args, **more)
        started.extend([server.pid] if "serve" in args[0] else [])
        return server

    monkeypatch.setattr(serving_processes.subprocess, "Popen", remembered)
    plan = Plan(**SIZES, stream_tokens=3, shares=(1.0,), seconds=0.3)
    assert run_command(Models(str(folder), "cpu", "float32"), plan, path, quiet()) == 0
    section = results.load(path)["serving"]
    assert section["model"] == {"name": "tiny", "dtype": "float32", "device": "cpu"} and not section["partial"]
    assert [one["engine"] for one in section["engines"]] == ["offline", "server"]
    assert len(started) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    class Stopped:
        def __init__(self, *args: Any):
            self.engine = make_engine(tiny_model())

        def __enter__(self) -> "Stopped":
            return self

        def __exit__(self, *error: Any) -> None:
            ended.append(True)

    def stopped(those: Any, plan: Plan, found: Found, console: Console) -> None:
        found.trials.append(trial("offline", 0, 10.0))
        raise KeyboardInterrupt

    for name, stand_in in (("servers", Stopped), ("measure", stopped), ("find", str)):
        monkeypatch.setattr(serving_report, name, stand_in)
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        run_command(Models("m"), PLAN, path, console := quiet())
    section = results.load(path)["serving"]
    assert section["partial"] and len(section["trials"]) == 1 and "PARTIAL" in said(console) and ended


def test_no_folder_of_the_peer_is_kept(tmp_path: Path) -> None:
    models = Models("m", peer_server=tmp_path / "llama-server", peer_gguf=tmp_path / "w.gguf")
    command = serving_report.without_folders(f"minillm --peer-server {models.peer_server} x {models.peer_gguf}", models)
    assert command == "minillm --peer-server llama-server x w.gguf"
    assert str(tmp_path) not in str(serving_report.peer_words(models, PLAN))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--requests", "0"], "requests is 0"),
        (["--clients", "2000"], "clients is 2000"),
        (["--rounds", "-1"], "rounds is -1"),
        (["--streams", "0"], "streams is 0"),
        (["--shares", "0.5,much"], "--shares is '0.5,much'"),
        (["--shares", "nan"], "share is nan"),
        (["--seconds", "0"], "seconds is 0"),
        (["--goodput", "ttft"], "--goodput is 'ttft'"),
        (["--peer-gguf", "w.gguf"], "no --peer-server"),
        (["--peer-server", "nowhere"], "--peer-server needs --peer-gguf"),
        (["--peer-server", "nowhere", "--peer-gguf", "w.gguf"], "nowhere is no program"),
        (["--peer-server", sys.executable, "--peer-gguf", "nowhere.gguf"], "nowhere.gguf cannot be read"),
        (["--peer-server", sys.executable, "--peer-gguf", __file__], "is no GGUF file"),
        (["--peer-server", "a", "--peer-gguf", "b", "--peer-url", "http://x"], "exclude each other"),
        (["--peer-url", "localhost"], "the URL 'localhost'"),
        (["--json", "nowhere/x.json"], "there is no folder nowhere"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_started(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_report, "servers", None)
    check_refused(run("bench", "serving", *options), words)


def test_a_model_that_is_not_there_is_told_before_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_report, "servers", None)
    with pytest.raises(InputError, match="nowhere"):
        run_command(Models(str(tmp_path / "nowhere")), PLAN, None, quiet())


def test_the_engine_alone_has_the_servers_options() -> None:
    options, plan = Options(NAME), Plan()
    assert (BLOCK, plan.clients, plan.budget) == (options.block, options.max_running, options.budget)
    assert plan.closed.goodput == asdict(plan)["goodput"]


def test_the_servers_engine_is_made_in_a_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp counts the workers of every living thread that ever computed; the engine's own must be the only ones."""
    threads = []

    def made(options: Options) -> Any:
        threads.append(threading.current_thread())
        return make_engine(tiny_model())

    monkeypatch.setattr(run_module, "make_engine", made)
    loop, _ = run_module.make(Options(NAME))
    assert threads[0] is not threading.current_thread() and not threads[0].is_alive()
    assert loop.engine.tokenizer is not None
