"""`minillm load`: the figures by hand-made times, what is sent and when against a scripted server, and each way in
which a server can go wrong. No test here looks at a clock, but for delays that cannot be shorter than they are.
"""

import asyncio
import io
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_server import Script, Server

from minillm.bench import load_http, load_report
from minillm.bench.load import Health, Plan, Run, Target, allow_connections, parse_goodput
from minillm.bench.load_client import Answer
from minillm.bench.load_http import Fault
from minillm.bench.load_prompts import Prompts
from minillm.bench.load_rows import Row, compare, keeps, summarize
from minillm.bench.load_server import Metrics, ServerFacts, quantile
from minillm.bench.prompts import load as load_prompts
from minillm.cli_load import load
from minillm.errors import InputError

PLAN = Plan(clients=2, requests=6, max_tokens=3, warmup=1, timeout=20, seed=1)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def run(
    url: str, plan: Plan = PLAN, *, peer: str | None = None, key: str | None = None, **files: Path
) -> tuple[int, str]:
    """The exit code, and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    paths = files.get("json"), files.get("plot")
    code = load_report.run_command(url, peer, plan, None, key, *paths, console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def rows(url: str, tmp_path: Path, plan: Plan = PLAN, **more: Any) -> list[dict[str, Any]]:
    path = tmp_path / "results.json"
    run(url, plan, json=path, **more)
    [section] = json.loads(path.read_text())["sections"].values()
    return section["rows"]


# ---- the figures, by a clock made by hand


def answer(scheduled: float, sent: float, *times: float, n: int | None = None, **more: Any) -> Answer:
    """Its last text is its end. `n`: tokens by usage; None: as many as pieces."""
    usage = (10, len(times) if n is None else n)
    made = Answer(scheduled, sent, list(times), last=times[-1], usage=usage, ended=times[-1])
    return replace(made, **more)


def row_of(*answers: Answer, rate: float | None = 1.0, **plan: Any) -> Row:
    made = Run(Target(load_http.Server.parse("http://a"), "m", Prompts(0)), replace(PLAN, **plan), rate, 0)
    made.answers += answers
    made.health.began, made.health.seconds, made.health.cpu, made.health.lags = 100.0, 10.0, 2.0, [0.001] * 99 + [0.5]
    return summarize(made)


def test_figures_of_known_times_are_exact() -> None:
    row = row_of(
        answer(101.0, 101.0, 101.5, 101.6, 101.8),  # ttft 0.5, itl 0.1 0.2, tpot 0.15, e2el 0.8
        answer(102.0, 102.0, 102.1, 102.5, 102.9),  # ttft 0.1, itl 0.4 0.4, tpot 0.4, e2el 0.9
        answer(103.0, 103.0, 104.0),  # ttft 1, e2el 1; no tpot
        goodput={"ttft": 0.6, "tpot": 0.2},
    )
    assert row.ttft and row.tpot and row.itl and row.e2el
    assert (row.ttft.mean, row.ttft.median) == pytest.approx((1.6 / 3, 0.5))
    assert (row.ttft.p95, row.ttft.p99) == pytest.approx((0.95, 0.99))
    assert (row.tpot.mean, row.tpot.median) == pytest.approx((0.275, 0.275))
    assert (row.itl.mean, row.itl.median) == pytest.approx((0.275, 0.3))
    assert row.e2el.median == pytest.approx(0.9)
    assert row.wall == pytest.approx(4.0)
    assert (row.request_throughput, row.output_throughput) == pytest.approx((0.75, 7 / 4))
    assert row.total_token_throughput == pytest.approx(37 / 4)
    assert row.request_goodput == pytest.approx(0.25), "the second broke tpot's limit, the third ttft's"
    assert (row.completed, row.failed, row.unfinished, row.most_open) == (3, 0, 0, 1)
    assert len(row.ttft_percentiles) == 101 and row.ttft_percentiles[50] == pytest.approx(0.5)
    assert (row.client.cpu_share, row.client.lag_p50, row.client.lag_max) == pytest.approx((0.2, 0.001, 0.5))


def test_a_late_request_counts_from_its_time_not_from_its_sending() -> None:
    """Coordinated omission: the client sent it a second late, and that is part of what its user waited."""
    row = row_of(answer(101.0, 102.0, 102.5), answer(103.0, 103.009, 103.5))
    assert row.ttft and row.e2el
    assert row.ttft.mean == pytest.approx(1.0) and row.e2el.mean == pytest.approx(1.0)
    assert (row.late, row.most_late) == (1, pytest.approx(1.0))


def test_an_open_loop_keeps_the_time_that_was_drawn(server: Server) -> None:
    late = Run(Target(load_http.Server.parse(server.url), "m", Prompts(0)), PLAN, 1.0, 0)
    due = load_http.now() - 5.0

    async def work() -> Answer:
        try:
            return await late.ask(0, due)
        finally:
            late.target.server.close()

    answer = asyncio.run(work())
    assert answer.scheduled == due and answer.first - answer.scheduled > 5.0 and answer.sent - due >= 5.0


def test_tpot_is_by_tokens_where_a_piece_holds_several() -> None:
    row = row_of(answer(101.0, 101.0, 101.0, 101.3, 101.6, n=7))
    assert row.tpot and row.itl
    assert row.tpot.mean == pytest.approx(0.1) and row.itl.mean == pytest.approx(0.3)
    assert row.tokens_per_piece == pytest.approx(7 / 3) and row.output_tokens == 7


def test_a_row_with_failed_requests_is_json() -> None:
    row = row_of(answer(101.0, 101.0, 103.0, fault=Fault("HTTP 503", "answered 503")))
    assert json.loads(json.dumps(asdict(row)))["faults"] == {"HTTP 503": 1}


def test_failed_and_unfinished_requests_count_in_no_throughput() -> None:
    good = answer(101.0, 101.0, 101.5, 102.0)
    failed = answer(101.0, 101.0, 103.0, fault=Fault("HTTP 503", "answered 503"))
    row = row_of(good, failed, answer(101.0, 101.0, 104.0, ended=0.0))
    assert (row.sent, row.completed, row.failed, row.unfinished) == (3, 1, 1, 1)
    assert row.faults == {"HTTP 503": 1} and row.examples == {"HTTP 503": "answered 503"}
    assert row.wall == pytest.approx(2.0) and row.output_tokens == 2


def test_a_run_in_which_nothing_went_well_has_no_figures() -> None:
    row = row_of(answer(101.0, 101.0, 103.0, fault=Fault("timeout", "did not end")))
    assert row.ttft is None and row.wall == 0 and row.output_throughput == 0 and row.ttft_percentiles == []


def test_most_open_counts_an_end_before_a_beginning() -> None:
    assert row_of(answer(1, 1, 2), answer(2, 2, 3), answer(2.5, 2.5, 4), answer(2.6, 2.6, 2.7)).most_open == 3


def test_without_usage_pieces_are_counted_and_that_is_said() -> None:
    row = row_of(answer(101.0, 101.0, 101.5, 102.0, usage=None), answer(101.0, 101.0, 101.5))
    assert (row.uncounted, row.output_tokens, row.prompt_tokens, row.shortest_prompt) == (1, 3, 10, 10)
    assert any("1 answers came without usage" in line for line in load_report.complaints(PLAN, row))


def test_one_token_keeps_the_limit_of_tpot() -> None:
    assert keeps(answer(1, 1, 2), {"ttft": 1.0, "tpot": 0.001, "e2el": 1.0})
    assert not keeps(answer(1, 1, 2), {"e2el": 0.9})


def test_answers_shorter_than_asked_are_told_if_the_end_is_ignored() -> None:
    assert row_of(answer(1, 1, 2), answer(1, 1, 2, 3, 4), ignore_eos=True).short == 1
    assert row_of(answer(1, 1, 2)).short == 0


def test_a_busy_client_is_told() -> None:
    row = row_of(answer(101.0, 101.0, 101.5))
    busy = "The client was busy"
    assert not any(busy in line for line in load_report.complaints(PLAN, row))
    for client in (replace(row.client, cpu_share=0.9), replace(row.client, lag_p99=0.1)):
        assert any(busy in line for line in load_report.complaints(PLAN, replace(row, client=client)))


def test_a_blocked_event_loop_is_seen() -> None:
    async def work() -> Health:
        with Health() as health:
            await asyncio.sleep(0.05)
            time.sleep(0.2)
            await asyncio.sleep(0.05)
        return health

    health = asyncio.run(work())
    assert max(health.lags) > 0.1 and health.seconds >= 0.3


# ---- two servers


def test_two_servers_are_compared_by_the_medians_of_their_rounds() -> None:
    def row(wait: float, n: int = 4, **more: Any) -> Row:
        return row_of(answer(101.0, 101.0, 101.0 + wait, 103.0, n=n), **more)

    both = compare([row(0.1), row(0.3), row(0.2)], [row(0.4), row(0.8), row(0.1)])
    assert both.void is None
    assert both.figures["ttft median"] == pytest.approx((0.2, 0.4, 0.5))
    assert both.figures["output_throughput"] == pytest.approx((4 / 3, 4 / 3, 1.0))
    assert "same work" in (compare([row(0.1)], [row(0.1, n=5)]).void or "")
    failed = replace(row(0.1), failed=1)
    assert "did not end well" in (compare([failed], [row(0.1)]).void or "")
    assert "did not end well" in (compare([row(0.1)], [failed]).void or "")
    assert compare([row(0.1)], []).void and not compare([row(0.1)], []).figures


def test_a_peer_gets_the_same_requests_in_rounds_by_turns(tmp_path: Path) -> None:
    order: list[str] = []
    with Server() as one, Server(Script(tokens=3)) as other:
        for name, server in (("one", one), ("other", other)):
            answer_as_before = server.answer

            async def noted(*given: Any, name: str = name, answer: Any = answer_as_before) -> None:
                order.append(name)
                await answer(*given)

            server.answer = noted  # type: ignore[method-assign]
        code, words = run(one.url, replace(PLAN, rounds=2, ignore_eos=True, warmup=0), peer=other.url)
    assert code == 0 and "VOID" not in words and "ratio" in words
    key = "messages"
    asked, same = ([json.dumps(body[key]) for body in server.bodies] for server in (one, other))
    assert sorted(asked) == sorted(same) and len(set(asked)) == 12, "each round asks anew, both servers the same"
    assert order == ["one"] * 6 + ["other"] * 12 + ["one"] * 6


def test_servers_that_did_other_work_are_not_compared(server: Server) -> None:
    with Server(Script(tokens=2)) as other:
        code, words = run(server.url, peer=other.url)
    assert code == 1 and "VOID: 18 output tokens and 12 are not the same work" in words


# ---- what is sent


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_requests_are_what_openai_takes_and_each_is_sent_once(server: Server, tmp_path: Path, endpoint: str) -> None:
    plan = replace(PLAN, endpoint=endpoint, requests=80, warmup=2)
    [row] = rows(server.url, tmp_path, plan)
    assert (row["sent"], row["completed"], row["output_tokens"], len(server.bodies)) == (80, 80, 240, 82)
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[endpoint]
    assert all(head.startswith(f"POST {path} HTTP/1.1\r\n") for head in server.heads)
    body = server.bodies[-1]
    asked = {name: value for name, value in body.items() if name not in ("messages", "prompt")}
    assert asked == {
        "model": "scripted",
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def beginnings(bodies: list[dict[str, Any]]) -> list[str]:
    return [(body["messages"][0]["content"] if "messages" in body else body["prompt"])[:8] for body in bodies]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_prompts_differ_from_their_first_words_on(server: Server, endpoint: str) -> None:
    """G3: neither a cache nor the warm-up makes a run faster than it is; another seed asks anew."""
    plan = replace(PLAN, endpoint=endpoint, requests=100, warmup=5, rounds=2)
    run(server.url, plan)
    assert len(server.bodies) == 205 and len(set(beginnings(server.bodies))) == 205
    before = set(beginnings(server.bodies))
    run(server.url, replace(plan, seed=2))
    assert not before & set(beginnings(server.bodies[205:]))
    run(server.url, plan)
    assert set(beginnings(server.bodies[410:])) == before, "the same seed asks the same"


def test_prompts_are_the_packages_own() -> None:
    prompts = Prompts(seed=3)
    asked = [json.loads(prompts.body("m", "run", i))["messages"] for i in range(72)]
    contents = {messages[-1]["content"] for messages in asked}
    assert contents == {prompt.messages[-1]["content"] for prompt in load_prompts()}
    assert all(messages[0]["role"] == "system" and messages[1]["role"] == "user" for messages in asked)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_prompts_of_a_length_are_as_long_as_the_server_counts(server: Server, tmp_path: Path, endpoint: str) -> None:
    """Whatever its template adds, here 20 tokens; and again no prompt begins as another one."""
    server.script.prompt_tokens = None
    plan = replace(PLAN, prompt_tokens=80, warmup=2, ignore_eos=True, endpoint=endpoint)
    [row] = rows(server.url, tmp_path, plan)
    assert 79 <= row["shortest_prompt"] <= row["longest_prompt"] <= 81
    assert len(set(beginnings(server.bodies))) == 12
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for body in server.bodies[4:])


def test_a_length_that_the_server_does_not_count_is_guessed(server: Server) -> None:
    server.script.usage = False
    run(server.url, replace(PLAN, prompt_tokens=50, warmup=0))
    assert [sum(len(m["content"]) for m in body["messages"]) for body in server.bodies[4:]] == [200] * 6
    long = Prompts(0, "completions", characters=200_000).body("m", "run", 0)
    assert len(json.loads(long)["prompt"]) == 200_002


def test_the_key_is_sent_and_kept_out_of_the_file(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", ["minillm", "load", server.url, "--api-key", "sesame"])
    run(server.url, key="sesame", json=path)
    assert all("Authorization: Bearer sesame\r\n" in head for head in server.heads)
    assert "sesame" not in path.read_text() and "--api-key" in path.read_text()


# ---- when it is sent


def test_an_open_loop_does_not_wait_for_answers(server: Server) -> None:
    server.script.hold = 20
    code, words = run(server.url, replace(PLAN, rates=(1000.0,), requests=20, warmup=0))
    assert code == 0 and "20 of 20 requests completed" in words and "at most 20 at once" in words


def test_a_closed_loop_has_as_many_requests_as_clients(server: Server) -> None:
    server.script.hold = 4
    code, _ = run(server.url, replace(PLAN, clients=4, requests=24, warmup=0))
    assert code == 0 and server.most_open == 4 and len(server.bodies) == 24


def test_arrivals_are_poisson_and_follow_from_the_seed() -> None:
    plan = replace(PLAN, requests=4000)
    found = list(plan.arrivals(5.0, "run"))
    gaps = [b - a for a, b in zip([0.0, *found], found, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05) and variance**0.5 == pytest.approx(mean, rel=0.05)
    assert found == list(plan.arrivals(5.0, "run"))
    others = [plan.arrivals(5.0, "other"), replace(plan, seed=2).arrivals(5.0, "run")]
    assert all(next(other) != found[0] for other in others)


@pytest.mark.parametrize("rates", [(), (50.0,)])
def test_no_request_is_sent_after_the_seconds(server: Server, rates: tuple[float, ...]) -> None:
    server.script.ttft = 0.02
    code, words = run(server.url, replace(PLAN, rates=rates, requests=None, seconds=0.3, warmup=0))
    assert code == 0 and 1 <= len(server.bodies) < 200
    assert f"{len(server.bodies)} of {len(server.bodies)} requests completed" in words


def test_scripted_delays_are_found(server: Server, tmp_path: Path) -> None:
    """No delay can be shorter than it is; how near the medians come is for `load_against_peer.py`, by hand."""
    server.script = Script(ttft=0.05, itl=0.01)
    [row] = rows(server.url, tmp_path, replace(PLAN, max_tokens=11))
    assert 0.05 <= row["ttft"]["median"] < 2
    assert 0.15 <= row["e2el"]["median"] < 4
    assert 0.005 < row["tpot"]["median"] < 1
    truth = sorted(tpot for _, tpot in server.truth)
    assert row["tpot"]["median"] == pytest.approx(truth[len(truth) // 2], abs=0.5)


def test_a_thousand_connections(server: Server, tmp_path: Path) -> None:
    """As many as the client has, all at once, none lost; it raises its own limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2500:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        server.script.hold = 1000
        [row] = rows(server.url, tmp_path, replace(PLAN, clients=1000, requests=1500, warmup=0, timeout=60))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (row["completed"], row["failed"], row["most_open"], server.most_open) == (1500, 0, 1000, 1000)


# ---- connections


def test_a_name_is_looked_up_once(server: Server, monkeypatch: Any) -> None:
    asked: list[str] = []
    look_up = asyncio.BaseEventLoop.getaddrinfo

    async def noted(loop: Any, host: str, *given: Any, **more: Any) -> Any:
        asked.append(host)
        return await look_up(loop, host, *given, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", noted)
    code, _ = run(f"http://localhost:{server.port}", replace(PLAN, clients=4, requests=12))
    assert code == 0 and asked == ["localhost"]
    assert all(f"\r\nHost: localhost:{server.port}\r\n" in head for head in server.heads)


def test_connections_are_kept(server: Server) -> None:
    run(server.url, replace(PLAN, clients=3, requests=30, warmup=3))
    assert server.connections <= 4


@pytest.mark.parametrize(
    "script",
    [
        Script(framing="length"),
        Script(framing="close"),
        Script(framing="close", done=False),
        Script(hang_up=True),
        Script(per_piece=2),
        Script(metrics=False),
        Script(done=False),
    ],
    ids=repr,
)
def test_every_framing_gives_the_same_tokens(server: Server, tmp_path: Path, script: Script) -> None:
    server.script = script
    [row] = rows(server.url, tmp_path, replace(PLAN, requests=12))
    assert (row["completed"], row["output_tokens"], row["prompt_tokens"], row["uncounted"]) == (12, 36, 120, 0)


def test_an_answer_is_whole_when_its_last_event_has_come(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    """Though the server neither ends the body nor the connection."""
    monkeypatch.setattr(load_http, "AFTER_DONE_SECONDS", 0.02)
    server.script.linger = True
    [row] = rows(server.url, tmp_path)
    assert (row["completed"], row["failed"], row["output_tokens"]) == (6, 0, 18)


def test_a_connection_on_which_something_comes_unasked_is_given_up() -> None:
    class Transport(asyncio.Transport):
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    async def work() -> bool:
        wire, transport = load_http.Wire(), Transport()
        wire.connection_made(transport)
        wire.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        return transport.aborted

    assert asyncio.run(work())


def test_a_server_without_usage_is_counted_by_pieces(server: Server, tmp_path: Path) -> None:
    server.script.usage = False
    [row] = rows(server.url, tmp_path)
    assert (row["uncounted"], row["output_tokens"], row["prompt_tokens"]) == (6, 18, 0)


# ---- what goes wrong

FAULTS = {
    "html": "not events: the server sent '<html>",
    "json": 'not events: the server sent \'{"object"',
    "bad-json": "invalid JSON: the server sent",
    "half-line": "cut off: the server ended its answer within an event",
    "no-event": "not events: the server sent 'hello'",
    "no-end": "cut off: the server ended its answer after 1 pieces",
    "never": "timeout: the server did not end its answer within 0.3 s",
    "comments": "timeout: the server did not end its answer within 0.3 s",
    "error": 'error event: the server sent an error: {"message": "out of memory"',
    "not-http": "not HTTP: the server sent 'SSH",
    "drop": "cut off: the server closed the connection without an answer",
    404: 'HTTP 404: the server answered 404: {"error"',
    429: "HTTP 429: the server answered 429",
    503: "HTTP 503: the server answered 503",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_and_the_exit_code_is_1(server: Server, fault: str | int) -> None:
    server.script = Script(fault=fault, every=3)
    code, words = run(server.url, replace(PLAN, warmup=0, timeout=0.3 if "0.3 s" in FAULTS[fault] else 20))
    [line] = [line for line in words.splitlines() if "FAILED" in line]
    assert line.startswith(f"FAILED: 2 x {FAULTS[fault]}")
    assert code == 1 and "4 of 6 requests completed" in words


def test_a_server_on_which_everything_fails_has_no_table(server: Server, tmp_path: Path) -> None:
    server.script.fault = 503
    path = tmp_path / "results.json"
    code, words = run(server.url, replace(PLAN, warmup=0), json=path)
    assert code == 1 and "0 of 6 requests completed" in words and "Latency" not in words and not path.exists()


def test_a_server_that_refuses_is_not_flooded(server: Server) -> None:
    """Each client waits a tenth of a second after a failure."""
    server.script.fault = 429
    run(server.url, replace(PLAN, clients=1, requests=None, seconds=0.25, warmup=0))
    assert 1 <= len(server.bodies) <= 3


def test_a_server_that_goes_away_is_told() -> None:
    with Server() as server:
        url, address = server.url, ("127.0.0.1", server.port)
    target = Target(load_http.Server.parse(url), "m", Prompts(0))
    gone = Run(target, PLAN, None, 0)
    asyncio.run(gone.drive(lambda ended, sent: None))
    assert target.server.address == address
    assert {answer.fault.kind for answer in gone.answers if answer.fault} == {"no connection"}
    assert len(gone.answers) == 6


def refusal(work: Any, *given: Any, **more: Any) -> str:
    with pytest.raises(InputError) as error:
        work(*given, **more)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


def test_a_warm_up_that_fails_ends_it(server: Server) -> None:
    server.script.fault = 429
    assert "/v1/chat/completions: the server answered 429" in refusal(run, server.url)


@pytest.mark.parametrize("page", ["<html>", "[]", '{"data": []}', '{"data": 7}', "[" * 100_000, '{"data": [7]}'])
def test_what_is_no_list_of_models_is_told(server: Server, page: str) -> None:
    server.script.models = page
    assert "which is no list of models" in refusal(run, server.url)


def test_what_cannot_be_reached_is_told(server: Server) -> None:
    assert "is the server running there?" in refusal(run, "http://127.0.0.1:1")
    server.script.models = False
    assert "answered 404" in refusal(run, server.url) and not server.bodies
    console = Console(file=io.StringIO())
    assert load_report.run_command(server.url, None, PLAN, "other", None, None, None, console) == 0
    assert {body["model"] for body in server.bodies} == {"other"}


@pytest.mark.parametrize(
    "given, words",
    [
        ({"rates": (0.0,)}, "rate is 0.0"),
        ({"rates": (float("nan"),)}, "rate is nan"),
        ({"clients": 0}, "clients is 0"),
        ({"requests": 0}, "requests is 0"),
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"max_tokens": 0}, "max-tokens is 0"),
        ({"prompt_tokens": 0}, "prompt-tokens is 0"),
        ({"timeout": 0.0}, "timeout is 0.0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"endpoint": "tea"}, "endpoint is 'tea'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    assert words in refusal(Plan, **given)


@pytest.mark.parametrize(
    "words", ["ttft", "ttft:", "ttft:x", "itl:5", "ttft:0", "ttft:nan", "ttft:-1", "ttft:200;tpot:1"]
)
def test_a_limit_that_cannot_be_is_refused(words: str) -> None:
    assert "--goodput is" in refusal(parse_goodput, [words])


def test_limits_are_milliseconds() -> None:
    assert parse_goodput(["ttft:200 tpot:50", "e2el:1e3"]) == {"ttft": 0.2, "tpot": 0.05, "e2el": 1.0}


def test_options_that_exclude_each_other() -> None:
    assert "exclude each other" in refusal(load, "http://a", clients=2, rate=1.0)
    assert "exclude each other" in refusal(load, "http://a", sweep="1", rate=1.0)
    assert "--sweep is '1,x'" in refusal(load, "http://a", sweep="1,x")
    assert "--requests in place of --seconds" in refusal(load, "http://a", peer_url="http://b", seconds=1.0)
    assert "no folder" in refusal(load, "http://a", json_path=Path("nowhere/at/all.json"))
    assert "must end in" in refusal(load, "http://a", plot_path=Path("plot.txt"))


def test_a_seed_is_new_unless_given(server: Server) -> None:
    for seed in (None, None, 7, 7):
        assert load(server.url, requests=1, warmup=0, max_tokens=1, seed=seed) == 0
    first, second, third, fourth = beginnings(server.bodies)
    assert len({first, second, third}) == 3 and third == fourth


def test_too_many_clients_for_the_files_of_this_process(monkeypatch: Any) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert "300 clients need as many open files" in refusal(allow_connections, replace(PLAN, clients=300))
    allow_connections(replace(PLAN, clients=100))


def test_ctrl_c_reports_what_had_ended(server: Server, tmp_path: Path) -> None:
    server.script = Script(fault="never", every=20)  # 2 clients, so it stands still after 40 requests at the latest

    def interrupt() -> None:
        until = time.monotonic() + 20
        while len(server.bodies) < 40 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    path, console = tmp_path / "results.json", Console(file=io.StringIO(), width=200)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        load_report.run_command(
            server.url, None, replace(PLAN, requests=1000, warmup=0), None, None, path, None, console
        )
    assert isinstance(console.file, io.StringIO)
    words = console.file.getvalue()
    assert "38 of 40 requests completed" in words and "2 requests had not ended when Ctrl-C came" in words
    assert "PARTIAL" in words and "FAILED" not in words
    section = json.loads(path.read_text())["sections"]["load"]
    assert section["partial"] and section["rows"][0]["completed"] == 38


# ---- what the server tells about itself


def test_quantiles_are_those_of_prometheus() -> None:
    """As histogram_quantile: linear within a bucket."""
    buckets = {0.01: 50.0, 0.1: 100.0, float("inf"): 100.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.01)
    assert quantile(buckets, 0.25) == pytest.approx(0.005)
    assert quantile(buckets, 0.99) == pytest.approx(0.01 + 0.09 * 49 / 50)
    assert quantile({0.01: 50.0, float("inf"): 100.0}, 0.99) == pytest.approx(0.01), "it has no end"
    assert quantile({}, 0.5) is None and quantile({0.01: 0.0, float("inf"): 0.0}, 0.5) is None


def test_what_happened_is_the_difference_of_two_readings() -> None:
    before = Metrics({0.01: 100.0, 0.1: 100.0, float("inf"): 100.0}, 1000.0, 900.0)
    after = Metrics({0.01: 100.0, 0.1: 200.0, float("inf"): 200.0}, 1100.0, 905.0)
    facts = ServerFacts.between(before, after)
    assert facts.lag_p50 == pytest.approx(0.055) and facts.hit_rate == pytest.approx(0.05)
    assert ServerFacts.between(None, after) == ServerFacts() == ServerFacts.between(before, before)


def test_metrics_are_read_and_shown(server: Server, tmp_path: Path) -> None:
    [row] = rows(server.url, tmp_path)
    assert row["server"]["lag_p50"] == pytest.approx(0.01) and row["server"]["lag_p99"] == pytest.approx(0.0982)
    assert row["hit_rate"] == pytest.approx(0.01)
    _, words = run(server.url)
    assert "server: event-loop lag p50 10.0, p99 98.2 ms" in words and "prefix cache: 1.0 %" in words.replace("%", " %")


def test_a_server_that_tells_nothing_is_said_to(server: Server) -> None:
    server.script.metrics = False
    _, words = run(server.url)
    assert "prefix cache: the server does not tell" in words and "server: event-loop" not in words


def test_a_cache_that_flatters_is_told(server: Server) -> None:
    """G3: by the usage of each answer, which goes before /metrics."""
    server.script.cached = 9
    _, words = run(server.url)
    assert "prefix cache: 90.0%" in words and "The prefix cache flatters these figures" in words
    server.script.cached = 0
    _, words = run(server.url)
    assert "prefix cache: 0.0%" in words and "flatters" not in words


# ---- files


def test_a_sweep_has_a_row_for_each_rate_and_a_picture(server: Server, tmp_path: Path) -> None:
    path, plot = tmp_path / "results.json", tmp_path / "tail.svg"
    code, words = run(server.url, replace(PLAN, rates=(200.0, 400.0), goodput={"ttft": 9.0}), json=path, plot=plot)
    assert code == 0 and "The tail as load grows" in words and "100%" in words
    section = json.loads(path.read_text())["sections"]["load_sweep"]
    assert [row["rate"] for row in section["rows"]] == [200, 400]
    assert "200 offered" in section["alt_text"] and "ttft" in section["metrics"] and section["about"]["machine"]
    picture = plot.read_text()
    assert picture.startswith("<?xml") and len(picture) > 10_000


def test_one_run_has_a_picture_of_its_percentiles(server: Server, tmp_path: Path) -> None:
    path, plot = tmp_path / "results.json", tmp_path / "load.png"
    code, _ = run(server.url, replace(PLAN, goodput={"e2el": 9.0}), json=path, plot=plot)
    assert code == 0 and plot.stat().st_size > 5000
    section = json.loads(path.read_text())["sections"]["load"]
    assert (
        section["plan"]["seed"] == 1 and not section["partial"] and len(section["rows"][0]["ttft_percentiles"]) == 101
    )
    assert section["rows"][0]["request_goodput"] == pytest.approx(section["rows"][0]["request_throughput"])
