"""The live view: snapshots are the engine's true state, made only for those who watch, and nobody is slowed by them."""

import asyncio
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from script import KINDS, CheckedEngine, chain, follow

pytest.importorskip("fastapi", reason="the server needs `pip install 'minillm[serve]'`")
import httpx
import uvicorn
from fastapi import Depends, FastAPI, HTTPException

from minillm.engine import Engine
from minillm.errors import InputError
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Request
from minillm.server import compare, live, snapshot
from minillm.server.live import PAGE, Hub, live_router, sse
from minillm.server.loop import EngineLoop, StepRecord
from minillm.sharing import SharedSlots
from minillm.simulation.policies import Schedule
from minillm.slots import BlockSlots

LIVENESS = 20.0  # seconds after which something hangs
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def small_engine(model: Any, n_blocks: int = 12, **limits: Any) -> CheckedEngine:
    slots = partial(SharedSlots, n_slots=4 * n_blocks, size=4)
    return CheckedEngine(model, slots=slots, **{"max_running": 4, "budget": 8, "max_len": 40, **limits})


def add_some(engine: Engine) -> list[Request]:
    """Alike and different, one with samples, more than there is memory and room for."""
    begin = [7, 8, 9, 10, 11, 12, 13, 14]
    requests = [engine.add([*begin, 20 + i], PARAMS) for i in range(4)]
    requests += engine.add_samples([*begin, 30, 31], SamplingParams(max_tokens=9, ignore_eos=True, seed=3), 3)
    return [*requests, engine.add([40], PARAMS), engine.add([5] * 21, PARAMS)]


def records(engine: CheckedEngine) -> Iterator[StepRecord]:
    """Step by step, until nothing is left."""
    number = 0
    while engine.busy:
        number += 1
        began = time.monotonic()
        engine.plans.clear()
        events = engine.step()
        yield StepRecord(number, began, time.monotonic(), engine.plans[-1], events)


# ---- a snapshot is the truth


@pytest.mark.parametrize("kind", ["regions", "blocks", "shared"])
def test_a_snapshot_is_the_engines_state_at_every_step(tiny: Llama, kind: str) -> None:
    """Counts, owners of every block and the budget, with sharing, samples and preemptions."""
    kinds = {"blocks": BlockSlots, "shared": SharedSlots}
    slots: Any = partial(kinds[kind], n_slots=48, size=4) if kind in kinds else KINDS[kind]
    engine = CheckedEngine(tiny, slots=slots, max_running=4, budget=8, max_len=40)
    add_some(engine)
    seen: Counter[str] = Counter()
    told = snapshot.describe(engine, "tiny")
    for record in records(engine):
        state = snapshot.look(engine, dict(record.plan))
        scheduler = engine.scheduler
        assert [one["id"] for one in state["running"]] == [request.id for request in scheduler.running]
        for one, request in zip(state["running"], scheduler.running, strict=True):
            right = (request.row, len(request.prompt), request.n_output, request.computed, request.preemptions)
            assert (one["row"], one["prompt"], one["output"], one["computed"], one["again"]) == right
            assert one["step"] == sum(n for planned, n in record.plan if planned is request)
        unfinished = [request for request in engine._requests.values() if request not in scheduler.running]
        assert state["n_waiting"] == len(unfinished)
        assert [one["id"] for one in state["waiting"]] == [request.id for request in scheduler.waiting]
        assert sum(one["samples"] for one in state["running"] + state["waiting"]) == sum(
            request.leader is not None for request in unfinished
        )
        if kind == "regions":
            assert state["blocks"] is None and told["n_blocks"] == 0
        else:
            seen.update(check_blocks(engine, state, told["n_blocks"]))
        seen["preempted"] += any(one["again"] for one in state["waiting"])
        seen["samples"] += any(one["samples"] for one in state["waiting"])
        line = snapshot.step_line(record)
        assert line[0] == record.number and line[3] + line[4] == sum(n for _, n in record.plan) <= told["budget"]
        assert line[5] == len(record.events)
    assert kind == "regions" or seen["preempted"], "the run shows no preemption"
    assert kind != "shared" or all(seen[what] for what in ("shared", "cached", "samples")), (
        f"too little was seen: {seen}"
    )


def check_blocks(engine: Engine, state: dict[str, Any], n_blocks: int) -> list[str]:
    """Against the slots' own books. Returns the kinds of blocks that were there."""
    slots = engine.scheduler.slots
    assert isinstance(slots, BlockSlots)
    held = Counter(block for one in state["running"] for first, n in one["blocks"] for block in range(first, first + n))
    kept = [block for first, n in state["blocks"]["kept"] for block in range(first, first + n)]
    counts = state["blocks"]
    assert set(range(n_blocks)) - set(held) == set(slots.free) >= set(kept)
    if isinstance(slots, SharedSlots):
        assert [held[block] for block in range(n_blocks)] == slots.owners
        assert set(kept) == set(slots.free) & set(slots.entry_of)
        assert (counts["asked"], counts["found"]) == (slots.asked, slots.found)
    for request, one in zip(engine.scheduler.running, state["running"], strict=True):
        assert [block for first, n in one["blocks"] for block in range(first, first + n)] == request.blocks
    assert counts["held"] == len(held) and counts["cached"] == len(kept)
    assert counts["shared"] == sum(n > 1 for n in held.values())
    assert counts["held"] + counts["cached"] + counts["free"] == n_blocks
    return [name for name in ("shared", "cached") if counts[name]]


def test_decode_and_prompt_are_told_apart_as_they_were_planned(tiny: Llama) -> None:
    """Decode: one token of a text that had output and lacked nothing else."""
    engine = small_engine(tiny)
    add_some(engine)
    decoding: list[int] = []
    schedule = engine.scheduler.schedule

    def noted() -> Any:
        plan = schedule()
        decoding.append(sum(n for request, n in plan if request.pending == 1 and request.n_output))
        return plan

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    lines = [snapshot.step_line(record) for record in records(engine)]
    assert [line[3] for line in lines] == decoding
    assert any(line[3] for line in lines) and any(line[4] for line in lines)


def test_first_tokens_and_endings_are_told_once_for_each_request(tiny: Llama) -> None:
    engine = small_engine(tiny)
    requests = add_some(engine)
    begin = time.monotonic()
    for request in requests:
        request.arrival = begin
    first: list[float] = []
    ended: list[dict[str, Any]] = []
    for record in records(engine):
        waits = snapshot.first_tokens(record)
        assert all(0 <= wait == pytest.approx(record.ended - begin, abs=1e-3) for wait in waits)
        first += waits
        ended += snapshot.endings(record)
    assert len(first) == len(requests)
    assert {one["id"]: (one["output"], one["reason"]) for one in ended} == {
        request.id: (request.n_output, "length") for request in requests
    }


def test_runs_are_the_blocks_in_their_order() -> None:
    assert snapshot.runs([3, 4, 5, 9, 2, 3]) == [[3, 3], [9, 1], [2, 2]] and snapshot.runs([]) == []


def test_a_thousand_waiting_are_counted_and_a_few_listed(tiny: Llama) -> None:
    engine = small_engine(tiny)
    for i in range(1000):
        engine.add([5, i % 60], PARAMS)
    state = snapshot.look(engine, {})
    assert state["n_waiting"] == 1000 and len(state["waiting"]) == snapshot.MOST_WAITING
    assert len(json.dumps(state)) < 4096


def test_blocks_too_many_to_draw_are_counted(tiny: Llama) -> None:
    engine = Engine(tiny, slots=partial(SharedSlots, n_slots=4 * 5000, size=4), max_running=2, budget=8, max_len=40)
    engine.generate([[5] * 20], SamplingParams(max_tokens=2))
    state = snapshot.look(engine, {})
    assert not snapshot.describe(engine, "tiny")["drawn"]
    assert state["blocks"]["cached"] == 5 and state["blocks"]["kept"] == []


# ---- the hub: only for those who watch


class Hubbed:
    """A hub whose engine steps in this thread, as the engine's thread would."""

    def __init__(self, model: Any, interval: float = 0.0):
        self.engine = small_engine(model, 20)
        self.commands: list[Callable[[], None]] = []
        self.loop: Any = SimpleNamespace(
            engine=self.engine,
            watchers=[],
            alive=True,
            draining=False,
            ask=self.commands.append,
        )
        self.hub = Hub(self.loop, "tiny", interval)

    def obey(self) -> None:
        while self.commands:
            self.commands.pop(0)()

    def run(self) -> int:
        """Until nothing is left. Returns the number of steps."""
        n = 0
        for n, record in enumerate(records(self.engine), 1):  # noqa: B007
            for watcher in list(self.loop.watchers):
                watcher(record)
        return n


async def messages(hub: Hub) -> list[tuple[str, dict[str, Any]]]:
    """All that this watcher is sent, until the end."""
    return [parsed(data) async for data in hub.messages() if not data.startswith(b":")]


def parsed(data: bytes) -> tuple[str, dict[str, Any]]:
    found = re.fullmatch(rb"event: (\w+)\ndata: (.*)\n\n", data)
    assert found, data
    return found[1].decode(), json.loads(found[2])


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PACE", 0.0)
    monkeypatch.setattr(live, "SHARE", 0.0)
    monkeypatch.setattr(live, "POLL", 0.01)


def test_nothing_is_made_while_nobody_watches(tiny: Llama, fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Mock(side_effect=snapshot.look)
    monkeypatch.setattr(live, "look", looked)

    async def watch_and_leave() -> None:
        it = Hubbed(tiny)
        add_some(it.engine)
        it.run()
        assert not it.loop.watchers and not looked.called
        it.hub.enter()
        it.hub.enter()
        it.hub.leave()
        add_some(it.engine)
        n = it.run()
        assert looked.call_count == it.hub.n_made == n
        it.hub.leave()
        add_some(it.engine)
        it.run()
        it.obey()  # a look that was asked for before they left
        assert not it.loop.watchers and looked.call_count == n

    asyncio.run(watch_and_leave())


def test_a_watcher_is_told_of_every_step_once(tiny: Llama, fast: None) -> None:
    async def watch() -> None:
        it = Hubbed(tiny)
        it.hub.enter()
        watching = asyncio.create_task(messages(it.hub))
        add_some(it.engine)
        n = 0
        for n, record in enumerate(records(it.engine), 1):  # noqa: B007
            it.hub.on_step(record)
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)
        it.loop.draining = True
        (kind, told), *steps, (end, why) = await asyncio.wait_for(watching, LIVENESS)
        assert (kind, told["budget"], told["max_running"], told["block_size"], told["n_blocks"]) == (
            "engine",
            8,
            4,
            4,
            20,
        )
        assert (end, why["reason"]) == ("end", "the server is shutting down")
        assert [step["step"] for _, step in steps] == list(range(1, n + 1))
        assert [line[0] for _, step in steps for line in step["lines"]] == list(range(1, n + 1))
        assert sum(len(step["first"]) for _, step in steps) == sum(len(step["ended"]) for _, step in steps) == 9
        it.hub.leave()

    asyncio.run(watch())


def test_a_slow_watcher_loses_the_oldest_and_harms_nobody(tiny: Llama, fast: None) -> None:
    """F3: memory must not grow with a reader that stalls; who reads on time misses nothing."""

    async def watch() -> None:
        it = Hubbed(tiny)
        it.hub.enter()
        it.hub.enter()
        slow = it.hub.messages()
        assert parsed(await anext(slow))[0] == "engine"
        it.hub._publish({"step": 0})
        assert parsed(await anext(slow))[1] == {"step": 0}  # and from here on it reads no more
        quick = asyncio.create_task(messages(it.hub))
        await asyncio.sleep(0.01)
        for number in range(1, 201):
            it.hub._publish({"step": number})
            await asyncio.sleep(0.001)
        assert len(it.hub._ring) == live.KEPT
        late = [parsed(await asyncio.wait_for(anext(slow), LIVENESS))[1]["step"] for _ in range(live.KEPT)]
        assert late == list(range(201 - live.KEPT, 201))
        it.loop.draining = True
        got = [message["step"] for kind, message in await asyncio.wait_for(quick, LIVENESS) if kind == "step"]
        assert got == list(range(0, 201))

    asyncio.run(watch())


def test_a_newcomer_is_told_the_latest_state_at_once(tiny: Llama, fast: None) -> None:
    async def watch() -> None:
        it = Hubbed(tiny)
        it.hub.enter()
        it.obey()  # idle: the engine's thread looks when it is asked
        await asyncio.sleep(0)
        first = it.hub.messages()
        assert [parsed(await anext(first))[0] for _ in range(2)] == ["engine", "step"]
        it.hub._publish({"step": 7})
        it.hub.enter()
        second = it.hub.messages()
        await anext(second)
        assert parsed(await asyncio.wait_for(anext(second), LIVENESS))[1] == {"step": 7}

    asyncio.run(watch())


def test_snapshots_are_seldom_enough(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one in `INTERVAL`; and where one takes long, a twentieth of the time. No line of a step is lost."""
    clock = SimpleNamespace(now=0.0, cost=0.0)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def look(engine: Engine, counts: Any) -> dict[str, Any]:
        clock.now += clock.cost
        return snapshot.look(engine, counts)

    monkeypatch.setattr(live, "look", look)
    for clock.cost, gap in ((0.0, live.INTERVAL), (0.01, live.SHARE * 0.01)):
        it = Hubbed(tiny, live.INTERVAL)
        sent: list[tuple[float, list[Any]]] = []
        it.hub._send = lambda message, sent=sent: sent.append((clock.now, message["lines"]))  # type: ignore[method-assign]
        asyncio.run(_enter(it.hub))
        add_some(it.engine)
        n = 0
        for n, record in enumerate(records(it.engine), 1):  # noqa: B007
            it.hub.on_step(record)
            clock.now += 0.02
        clock.now += 10
        it.hub.on_quiet()  # the last steps are told of although none follows
        times = [at for at, _ in sent]
        assert all(b - a >= gap - 1e-9 for a, b in zip(times, times[1:], strict=False)) and 2 < len(times) < n
        assert [line[0] for _, lines in sent for line in lines] == list(range(1, n + 1))
        made = it.hub.n_made
        clock.now += 10
        it.hub.on_quiet()  # nothing has changed
        assert it.hub.n_made == made + 1 and len(sent) == len(times)


async def _enter(hub: Hub) -> None:
    hub.enter()


def test_a_look_that_raises_does_not_end_the_engine(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch() -> None:
        it = Hubbed(tiny)
        monkeypatch.setattr(live, "look", Mock(side_effect=ZeroDivisionError))
        it.hub.enter()
        assert len(it.commands) == 1
        it.obey()

    asyncio.run(watch())


# ---- over HTTP


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Yields the base URL of the app, on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(LIVENESS)
        listener.close()


@contextmanager
def a_server(engine: Engine, guards: Any = ()) -> Iterator[tuple[str, EngineLoop]]:
    loop = EngineLoop(engine)
    app = FastAPI()
    app.include_router(live_router(loop, "tiny", guards))

    @app.get("/submit")
    async def submit(n: int = 1, max_tokens: int = 4) -> int:
        stream = loop.submit([3, 4, 5], SamplingParams(max_tokens=max_tokens, ignore_eos=True), n)
        try:
            return sum([event.token is not None async for event in stream])
        finally:
            stream.close()

    loop.start()
    try:
        with serving(app) as url:
            yield url, loop
    finally:
        loop.stop()


def steps_of(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """What one watcher is told. Fails if it takes too long, for heartbeats keep the connection alive for ever."""
    kind, end = "", time.monotonic() + LIVENESS
    for line in response.iter_lines():
        assert time.monotonic() < end, "what is waited for never comes"
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIVENESS
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.005)


def test_the_stream_over_http(tiny: Llama) -> None:
    with a_server(small_engine(tiny)) as (url, loop), httpx.Client(base_url=url, timeout=LIVENESS) as client:
        assert not loop.watchers
        with client.stream("GET", "/live/steps") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            steps = steps_of(response)
            assert next(steps)[0] == "engine"
            assert next(steps)[1]["running"] == []  # an idle engine is looked at as well
            assert httpx.get(f"{url}/submit?n=3", timeout=LIVENESS).json() == 12
            ended: list[Any] = []
            while len(ended) < 3:
                _, step = next(steps)
                ended += step["ended"]
            assert [one["output"] for one in ended] == [4, 4, 4] and step["running"] == []
        until(lambda: not loop.watchers)


def test_texts_that_leave_without_a_step_leave_the_page(tiny: Llama) -> None:
    """A client that goes away: its request is aborted between two steps, and no step follows in an idle engine."""
    engine = small_engine(follow(chain(5, 5)), 60, max_len=200)
    with a_server(engine) as (url, loop), httpx.stream("GET", f"{url}/live/steps", timeout=LIVENESS) as response:
        steps = steps_of(response)
        assert next(steps)[0] == "engine"
        engine.model.before = lambda: time.sleep(0.02)
        seen = threading.Event()
        other = asyncio.new_event_loop()

        async def come_and_go() -> None:
            stream = loop.submit([3], SamplingParams(max_tokens=190, ignore_eos=True))
            while not seen.is_set():
                await asyncio.sleep(0.005)
            stream.close()

        threading.Thread(target=other.run_until_complete, args=(come_and_go(),), daemon=True).start()
        while not next(steps)[1].get("running"):
            pass
        seen.set()
        while next(steps)[1]["running"]:
            pass
        assert len(engine.model.steps) < 150  # it was aborted, and did not end by itself


def test_the_seventeenth_watcher_is_refused_and_a_place_becomes_free(tiny: Llama) -> None:
    with a_server(small_engine(tiny)) as (url, loop), httpx.Client(base_url=url, timeout=LIVENESS) as client:
        watching = [client.stream("GET", "/live/steps") for _ in range(live.MOST_WATCHERS)]
        told = [steps_of(one.__enter__()) for one in watching]
        assert [next(steps)[0] for steps in told] == ["engine"] * live.MOST_WATCHERS
        with client.stream("GET", "/live/steps") as refused:
            assert refused.status_code == 503 and refused.headers["retry-after"]
        assert len(loop.watchers) == 1  # one for all of them
        watching[0].__exit__(None, None, None)

        def is_free() -> bool:
            with client.stream("GET", "/live/steps") as again:
                return again.status_code == 200

        until(is_free)
        for one in watching[1:]:
            one.__exit__(None, None, None)
        until(lambda: not loop.watchers)


def test_a_watcher_that_never_reads_stops_nobody(tiny: Llama) -> None:
    """F3 over a socket: the others' texts and the other watcher go on."""
    with a_server(small_engine(tiny)) as (url, loop):
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        with socket.create_connection(address) as mute:
            mute.sendall(b"GET /live/steps HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda: bool(loop.watchers))
            for _ in range(5):
                assert httpx.get(f"{url}/submit?n=4&max_tokens=8", timeout=LIVENESS).json() == 32
        until(lambda: not loop.watchers)


def test_the_stream_ends_when_the_server_drains_and_when_the_engine_has_died(tiny: Llama) -> None:
    """F9, F10: an open page must not hold the server up, nor show an engine that is dead as alive."""
    for end in ("drain", "death"):
        with a_server(small_engine(tiny)) as (url, loop):
            with httpx.stream("GET", f"{url}/live/steps", timeout=LIVENESS) as response:
                steps = steps_of(response)
                next(steps)
                if end == "drain":
                    loop.draining = True
                else:
                    loop.stop()
                assert list(steps)[-1][0] == "end"


def test_the_key_guards_the_data_and_not_the_page(tiny: Llama) -> None:
    def deny() -> None:
        raise HTTPException(401, "no key")

    with a_server(small_engine(tiny), [Depends(deny)]) as (url, loop), httpx.Client(base_url=url) as client:
        assert client.get("/live/steps").status_code == client.get("/live/policies").status_code == 401
        assert client.get("/").status_code == 200 and not loop.watchers


def test_no_text_leaves_the_engine(tiny: Llama) -> None:
    """Whoever watches learns numbers: the only strings are names of fields, and why a text ended."""
    engine = small_engine(tiny)
    add_some(engine)

    def words(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for inner in value.values():
                yield from words(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from words(inner)

    for record in records(engine):
        told = [snapshot.look(engine, dict(record.plan)), snapshot.endings(record), snapshot.step_line(record)]
        assert set(words(told)) <= {"length", "stop", "abort", "error"}


# ---- the page


def test_the_page_is_whole_and_asks_no_other_host(tiny: Llama) -> None:
    with a_server(small_engine(tiny)) as (url, _), httpx.Client(base_url=url) as client:
        for name, kind in PAGE.items():
            response = client.get("/" if name == "index.html" else f"/live/{name}")
            assert response.status_code == 200 and response.headers["content-type"] == kind
            policy = response.headers["content-security-policy"]
            assert (
                "default-src 'none'" in policy
                and "http" not in policy
                and "unsafe" not in policy
                and "data:" not in policy
            )
            named = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"']*", response.text))
            assert named <= {"http://www.w3.org/2000/svg"}, "the page names another host"
            assert "innerHTML" not in response.text and "insertAdjacentHTML" not in response.text
            for inline in ("<style", " style=", " onclick", " onload", "<script>"):
                assert inline not in response.text
        html = client.get("/").text
        for path in re.findall(r'(?:src|href)="(live/[^"]+)"', html):
            assert client.get(f"/{path}").status_code == 200
        assert client.head("/").status_code == 200


def test_sse_holds_one_line_of_data() -> None:
    assert sse("step", {"a": "x\n\ny"}) == b'event: step\ndata: {"a":"x\\n\\ny"}\n\n'


# ---- three policies


@pytest.mark.parametrize("seed, slots, requests", [(0, 1, 1), (1, 4, 24), (2, 16, 64), (2**32 - 1, 3, 7)])
def test_the_policies_serve_the_same_arrivals_on_so_many_slots(seed: int, slots: int, requests: int) -> None:
    run = compare.compare(seed, slots, requests)
    assert [policy["name"] for policy in run["policies"]] == ["static", "dynamic", "continuous"]
    arrivals = [[one["arrival"] for one in policy["requests"]] for policy in run["policies"]]
    assert arrivals[0] == arrivals[1] == arrivals[2] and len(arrivals[0]) == len(run["outputs"]) == requests
    for policy in run["policies"]:
        lanes: dict[int, float] = {}
        for one in policy["requests"]:
            assert one["arrival"] <= one["start"] < one["end"] <= one["freed"] and 0 <= one["slot"] < slots
            assert lanes.get(one["slot"], 0.0) <= one["start"], "two requests in one slot"
            lanes[one["slot"]] = one["freed"]
        assert policy["figures"]["makespan"] == max(one["end"] for one in policy["requests"])
    assert run == compare.compare(seed, slots, requests)


def test_a_slot_is_the_first_that_is_free() -> None:
    schedule = Schedule([0, 0, 1, 5], [0, 0, 4, 5], [3, 4, 9, 6], [3, 4, 9, 6])
    assert compare.places(schedule, 2) == [0, 1, 0, 1]


def test_static_holds_slots_that_continuous_gives_away() -> None:
    run = {policy["name"]: policy for policy in compare.compare(1, 4, 24)["policies"]}
    assert any(one["freed"] > one["end"] for one in run["static"]["requests"])
    assert all(one["freed"] == one["end"] for one in run["continuous"]["requests"])
    assert run["static"]["figures"]["mean_wait"] > run["continuous"]["figures"]["mean_wait"]


def test_policies_over_http_are_capped(tiny: Llama) -> None:
    """F13: no number that a client sends may grow without bound."""
    with a_server(small_engine(tiny)) as (url, _), httpx.Client(base_url=url) as client:
        assert client.get("/live/policies?seed=3&slots=2&requests=5").json() == compare.compare(3, 2, 5)
        for wrong in ("seed=-1", "seed=4294967296", "slots=0", "slots=17", "requests=0", "requests=65", "slots=x",
                      "requests=1e9", "seed=" + "9" * 5000, "slots=NaN", "slots="):  # fmt: skip
            assert client.get(f"/live/policies?{wrong}").status_code in (400, 422), wrong
    for wrong_args in ((-1, 1, 1), (0, 17, 1), (0, 1, 65)):
        with pytest.raises(InputError, match="must be a whole number"):
            compare.compare(*wrong_args)
