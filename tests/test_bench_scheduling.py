"""What a step's planning costs, and who waits: what is counted, by hand and by the definition; and the command. No time
is asserted."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from minillm.bench import readme, scheduling
from minillm.bench.scheduling import (
    BEGINNING,
    GROUPS,
    KINDS,
    LONGEST,
    PROMPT,
    Arrival,
    Plan,
    Result,
    Traffic,
    arrivals,
    measure,
    overtaken,
    serve,
    waits,
)
from minillm.errors import InputError
from minillm.model import Llama
from minillm.policies import PATIENCE, POLICIES

SHORT = Plan(running=4, waiting=6, steps=5, real=2, requests=40)


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def result(tiny: Llama) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "LENGTHS", (0, 10, 40))
        return measure(tiny, "tiny", SHORT, silent())


# ---- the policies


def asked(*requests: tuple[int, int, int, int]) -> list[Arrival]:
    """(arrival, prompt, output, priority)"""
    return [Arrival(*one) for one in requests]


def test_waits_by_hand(monkeypatch: pytest.MonkeyPatch):
    """One place. The first holds it in steps 0 to 3; who comes next, and when?"""
    monkeypatch.setattr(scheduling, "ROWS", 1)
    four = asked((0, 20, 4, 0), (1, 500, 3, 0), (2, 20, 2, 0), (3, 300, 1, 9))
    # 500 tokens are four steps of at most 128, the last of which makes a token, and two more
    assert serve("first-come", four) == [0, 4, 10, 12]
    assert serve("priority", four) == [0, 7, 13, 4]  # 300 tokens are three steps
    assert serve("shortest-prompt", four) == [0, 9, 4, 6]
    rows = {row.who: row for row in waits("shortest-prompt", four)}
    assert (rows["all"].mean, rows["all"].most) == ((0 + 8 + 2 + 3) / 4, 8)
    assert (rows["short"].requests, rows["short"].mean) == (2, 1.0)
    assert (rows["long"].mean, rows["long"].overtaken) == (5.5, 2)
    assert (rows["urgent"].most, rows["ordinary"].most) == (3, 8)


@given(st.lists(st.integers(0, 8), max_size=20))
def test_overtaken_is_what_its_definition_says(first: list[int]):
    order = sorted(range(len(first)), key=lambda i: first[i])
    assert overtaken(first, order) == [
        sum(first[j] < first[i] for j in range(i + 1, len(first))) for i in range(len(first))
    ]


def test_arrivals_are_the_same_everywhere():
    found = arrivals(400, 0)
    assert found[:3] == arrivals(3, 0) and found != arrivals(400, 1)
    assert [one.step for one in found] == sorted({one.step for one in found})
    for belongs in GROUPS.values():
        assert any(map(belongs, found))
    assert found[0] == Arrival(step=3, prompt=35, output=52, priority=0)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_everyone_and_nobody_is_overtaken_too_often(name: str):
    rows = {row.who: row for row in waits(name, arrivals(600, 3))}
    assert rows["all"].requests == 600 == rows["short"].requests + rows["long"].requests
    assert rows["all"].overtaken == max(row.overtaken for row in rows.values()) < PATIENCE
    assert (rows["all"].overtaken == 0) == (name == "first-come")


def test_a_policy_without_a_bound_is_told(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minillm.policies.PATIENCE", 10**6)
    monkeypatch.setattr(scheduling, "RATE", 0.6)
    found = Result({}, {}, SHORT, waits("shortest-prompt", arrivals(400, 0)))
    assert not found.fair and found.waits[0].overtaken >= PATIENCE


# ---- what a step costs


@pytest.mark.parametrize("slots", KINDS)
@pytest.mark.parametrize("waiting", [0, 7])
def test_the_queue_keeps_its_length_and_all_places_are_taken(tiny: Llama, slots: str, waiting: int):
    traffic = Traffic(tiny, slots, SHORT, waiting)
    for _ in range(3 * LONGEST):
        step = traffic.step()
        running = traffic.scheduler.running
        assert step.running == 4 and 4 <= step.tokens <= 4 * PROMPT
        assert len(traffic.scheduler.waiting) == waiting
        known = {*traffic.scheduler.waiting, *running}
        assert set(traffic.engine._requests.values()) == known
    shared = getattr(traffic.scheduler.slots, "found", 0)
    assert (shared > 0) == (slots == "shared") and shared % BEGINNING == 0


def test_with_the_model_it_is_the_engines_own_step(tiny: Llama):
    """The same events, tokens and counters as `Engine.step` brings."""
    ours, engines = (Traffic(tiny, "shared", SHORT, 3) for _ in range(2))
    for pool in (ours.engine.pool, engines.engine.pool):  # the steps so far had no model, and stored nothing
        pool.k.zero_()
        pool.v.zero_()
    for _ in range(40):
        engines.fill()
        ours.step(ours.real)
        engines.engine.step()
        a, b = ours.scheduler, engines.scheduler
        assert [(r.tokens, r.computed) for r in a.running] == [(r.tokens, r.computed) for r in b.running]
    assert len(ours.engine._requests) == len(engines.engine._requests)


def test_a_cost_by_hand():
    steps = [scheduling.Step(1.0, 2.0, 6.0, 1.0, running=3, tokens=5)] * 3
    cost = scheduling.Cost.of("regions", 9, steps, real=True)
    assert cost.total.median == 4.0 and cost.share == pytest.approx(0.3) and cost.share_all == pytest.approx(0.4)
    assert (cost.running, cost.tokens) == (3, 5) and cost.model is not None and cost.model.median == 6.0
    assert scheduling.Cost.of("regions", 9, steps).model is None


def test_if_the_target_is_missed_it_says_where_the_time_goes(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduling, "TARGET", 0.0)
    cost, hot = scheduling.beside_the_model(tiny, "shared", SHORT)
    assert cost.model is not None and len(hot) == 6 and all(part.endswith("%") for part in hot)


def test_all_is_measured(result: Result):
    assert not result.partial and result.fair
    assert [wait.policy for wait in result.waits] == [name for name in POLICIES for _ in GROUPS]
    assert [(cost.slots, cost.waiting) for cost in result.costs] == [(s, n) for s in KINDS for n in (0, 10, 40)]
    assert [(cost.slots, cost.waiting) for cost in result.real] == [(s, 6) for s in KINDS]
    assert all(cost.model is None for cost in result.costs) and all(cost.model for cost in result.real)
    assert all(cost.share is not None and 0 < cost.share < 1 for cost in result.real)


# ---- what is refused, and what Ctrl-C leaves


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"running": 0}, "running is 0; it must be from 1 to 4096"),
        ({"waiting": -1}, "waiting is -1; it must be from 0 to 1000000"),
        ({"steps": 4}, "steps is 4; it must be from 5 to 100000"),
        ({"real": 1001}, "real is 1001; it must be from 0 to 1000"),
        ({"requests": 0}, "requests is 0; it must be from 1 to 100000"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 4294967295"),
    ],
)
def test_bad_input_is_refused(wrong: dict[str, int], why: str):
    with pytest.raises(InputError, match=why):
        Plan(**wrong)


def test_a_context_too_short_is_refused():
    small = Llama.random(dataclasses.replace(TINY, context=LONGEST - 1))
    with pytest.raises(InputError, match=f"context is {LONGEST - 1}; its steps need {LONGEST}"):
        measure(small, "small", SHORT, silent())


def test_after_ctrl_c_what_is_whole_is_kept(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduling, "LENGTHS", (0, 10))

    def stop(*_: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduling, "beside_the_model", stop)
        found = measure(tiny, "tiny", SHORT, silent())
    assert found.partial and len(found.waits) == 15 and len(found.costs) == 2 and not found.real
    console = silent()
    scheduling.show(found, console)
    assert "Stopped half way" in written(console)
    monkeypatch.setattr(scheduling, "waits", stop)
    with pytest.raises(KeyboardInterrupt):
        measure(tiny, "tiny", SHORT, silent())


# ---- for people, and for programs


def test_the_tables_fit_and_the_finding_says_it(result: Result, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduling, "LENGTHS", (0, 10, 40))
    console = silent(width=80)
    scheduling.show(result, console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    finding = scheduling.finding(result)
    for words in ("of a real step (target: under 5%", "With 40 waiting in place of none", "the bound is 63"):
        assert words in finding


def test_the_readmes_block(result: Result):
    lines = readme.scheduler(json.loads(json.dumps(scheduling.as_json(result))))
    assert sum(line.startswith("| shortest-prompt |") for line in lines) == len(GROUPS)
    assert "| microseconds a step, 4 running | 0 wait | 10 wait | 40 wait |" in lines
    assert len({line.count("|") for line in lines[:17]}) == 1


def test_the_command_writes_everything(
    real_weights: Path, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[Plan] = []

    def measured(model: Llama, name: str, plan: Plan, console: Console) -> Result:
        calls.append(plan)
        return dataclasses.replace(result, partial=len(calls) == 2, patience=1 if len(calls) == 3 else PATIENCE)

    monkeypatch.setattr(scheduling, "measure", measured)
    monkeypatch.setattr(scheduling, "load_model", lambda *_: Llama.random(TINY))
    out = tmp_path / "out.json"
    arguments = SHORT, str(real_weights), "cpu", "auto", out, silent()
    assert scheduling.run_command(*arguments) == 0 and calls == [SHORT]
    found = json.loads(out.read_text("utf-8"))["sections"]["scheduler"]
    assert found["partial"] is False and found["about"]["command"] and len(found["waits"]) == 15
    assert found["finding"] == scheduling.finding(result) and found["plan"]["running"] == 4
    with pytest.raises(KeyboardInterrupt):
        scheduling.run_command(*arguments)
    assert json.loads(out.read_text("utf-8"))["sections"]["scheduler"]["partial"] is True
    assert scheduling.run_command(*arguments) == 1  # somebody was overtaken too often
    with pytest.raises(InputError, match="there is no folder"):
        scheduling.run_command(SHORT, "no such model", "cpu", "auto", tmp_path / "no" / "x.json", silent())
