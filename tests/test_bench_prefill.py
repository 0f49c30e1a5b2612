"""A long prompt among running texts: counts by hand, the same text under every budget, what is refused and kept."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minillm.bench import prefill
from minillm.bench.prefill import AFTER, BEFORE, LONG_NEW, SHORT, Result, check, measure, n_output
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.model import Llama

TEXT = [2 + (i * i + 3 * i) % 60 for i in range(400)]


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def result(tiny: Llama) -> Result:
    return measure(tiny, "tiny", TEXT, silent(), prompt=50, running=3, budgets=(8, 16, 500), rounds=2)


# ---- counts


def test_counts_by_hand(result: Result):
    """50 tokens beside 3 running texts: 5 a step are 10 steps, 13 a step are 4, and 500 is as good as 53."""
    found = [(p.label, p.budget, p.chunk, p.steps, p.largest_step) for p in result.points]
    assert found == [("8", 8, 5, 10, 8), ("16", 16, 13, 4, 16), ("whole", 53, 50, 1, 53)]
    assert result.output == BEFORE + 10 + max(AFTER, LONG_NEW)


def test_every_budget_makes_the_same_text(result: Result):
    assert all(point.same_text and point.void is None for point in result.points)


@settings(max_examples=15)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 20))
def test_a_step_holds_the_budget_and_no_text_stands_still(tiny: Llama, prompt: int, running: int, chunk: int):
    budget = running + chunk
    kept = check(TINY, prompt, running, [budget], 1)
    output = n_output(prompt, running, kept)
    done = prefill.run_once(tiny, prefill.make_jobs(TEXT, prompt, running, output), budget)
    steps = done.counts.steps
    assert prefill.prompt_steps(done) == prefill.n_steps(prompt, running, budget) == -(-prompt // chunk)
    assert [step.tokens for step in steps[:BEFORE]] == [running * SHORT] + [running] * (BEFORE - 1)
    assert max(step.tokens for step in steps[BEFORE:]) <= budget
    assert all(step.new[i] == 1 for step in steps[1:output] for i in range(running))
    assert [len(one) for one in done.outputs] == [output] * running + [LONG_NEW]
    # they are still at it when the long prompt's text is out
    assert done.times[-1][-1] < min(times[-1] for times in done.times[:-1])


def test_times_by_hand(tiny: Llama):
    """The arrival is the end of step number BEFORE; two steps follow, of 4 and 5 s, in which the prompt is computed."""
    done = prefill.run_once(tiny, prefill.make_jobs(TEXT, 10, 2, 40), 7)
    ends = [float(i) for i in range(1, BEFORE + 1)]  # 1 s each
    ends += [ends[-1] + 4, ends[-1] + 9]
    ends += [ends[-1] + 100 * (i + 1) for i in range(40 - len(ends))]
    arrival = ends[BEFORE - 1]
    long = [ends[BEFORE + 1] + i for i in range(LONG_NEW)]
    hand = dataclasses.replace(done, times=[ends, ends, long], arrivals=[0.0, 0.0, arrival])
    found = prefill.timed(hand)
    assert (found.gap_before, found.gap_longest, found.ttft) == (1.0, 5.0, 9.0)
    assert found.gap_p95 == pytest.approx(5.0) and found.total == ends[-1]
    assert found.trace[BEFORE - 2 : BEFORE + 2] == [(0.0, 1.0), (4.0, 4.0), (9.0, 5.0), (109.0, 100.0)]


def test_the_arrival_is_the_end_of_a_step(tiny: Llama):
    done = prefill.run_once(tiny, prefill.make_jobs(TEXT, 10, 2, 40), 7)
    assert done.arrivals[-1] == done.counts.steps[BEFORE - 1].ended < done.counts.steps[BEFORE].ended
    assert prefill.timed(done).ttft > 0


def test_a_wrong_text_shows_no_time(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """An engine that loses the rest of a prompt when it has cut it."""
    right = Engine.step

    def wrong(self: Engine):
        if self.scheduler.budget == 8:
            for request in self.scheduler.running:
                if request.computed == 10 and request.pending > 1:
                    request.tokens[10:] = [7] * request.pending
        return right(self)

    monkeypatch.setattr(Engine, "step", wrong)
    found = measure(tiny, "tiny", TEXT, silent(), prompt=50, running=3, budgets=(8, 16), rounds=1)
    assert [point.void is None for point in found.points] == [False, True, True]
    assert found.points[0].ttft is None and found.points[0].trace is None
    console = silent()
    prefill.show(found, console)
    assert "8 is void" in " ".join(written(console).split())
    assert "budget: 8 void; 16: " in prefill.alt_text(found)
    prefill.plot(found)


# ---- what is refused


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"prompt": 0}, "prompt is 0; it must be at least 1"),
        ({"running": 0}, "running is 0; it must be at least 1"),
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"budgets": [16]}, "budget is 16; it must be at least 17"),
        ({"prompt": 249}, "long prompt is 249 tokens; the model's context is 256, so it may have 248"),
        ({"prompt": 240, "budgets": [17]}, "budget is 17; the running texts would grow to 288 tokens"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(asked: dict, why: str):
    with pytest.raises(InputError, match=why):
        check(TINY, **{"prompt": 100, "running": 16, "budgets": [32], "rounds": 1} | asked)


def test_a_prompt_longer_than_the_text_is_refused():
    with pytest.raises(InputError, match="prompt is 400 tokens; there are 400 in all, and 32 of them are taken"):
        prefill.make_jobs(TEXT, 400, 2, 40)


def test_budgets_come_in_order_and_whole_is_the_last():
    assert check(TINY, 100, 16, [64, 32, 64, 116, 4000], 1) == [32, 64, 116]
    assert check(TINY, 100, 16, [], 1) == [116]


# ---- for people, and for programs


def test_the_tables_fit_and_the_sentence_holds_the_numbers(result: Result):
    console = silent(width=80)
    prefill.show(result, console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert text.index("What the budget decides") < text.index("What it costs whom")
    whole, cut = result.points[-1], result.points[1]
    for part in (f"{whole.ttft.median:.2f} s", f"{cut.ttft.median:.2f} s", "budget of 16 tokens"):
        assert part in prefill.finding(result)
    assert f"whole: {whole.gap_longest.median * 1e3:,.0f} ms and {whole.ttft.median:.2f} s" in prefill.alt_text(result)


def test_only_one_budget_leaves_nothing_to_compare(tiny: Llama):
    found = measure(tiny, "tiny", TEXT, silent(), prompt=20, running=2, budgets=(), rounds=1)
    assert "nothing to compare" in prefill.finding(found)
    prefill.plot(found)


class Stop:
    """Raises KeyboardInterrupt at call number n."""

    def __init__(self, n: int):
        self.n, self.run_once = n, prefill.run_once

    def __call__(self, *args: object):
        self.n -= 1
        if self.n == 0:
            raise KeyboardInterrupt
        return self.run_once(*args)


def test_after_ctrl_c_what_was_measured_is_kept(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    sizes = {"prompt": 20, "running": 2, "budgets": (8, 12), "rounds": 3}
    monkeypatch.setattr(prefill, "run_once", Stop(3 + 2 + 1))  # in the first round, which begins with the second budget
    found = measure(tiny, "tiny", TEXT, silent(), **sizes)
    assert found.partial and found.rounds == 1
    assert [point.label for point in found.points] == ["12", "whole"]
    monkeypatch.setattr(prefill, "run_once", Stop(2))
    with pytest.raises(KeyboardInterrupt):
        measure(tiny, "tiny", TEXT, silent(), **sizes)


def test_the_command_writes_everything(
    real_weights: Path, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def measured(model: Llama, name: str, text: list[int], console: Console, *sizes: object) -> Result:
        asked.append((name, len(text) > 2000, sizes))
        return dataclasses.replace(result, partial=len(asked) == 2)

    monkeypatch.setattr(prefill, "measure", measured)
    monkeypatch.setattr(prefill.Llama, "from_pretrained", lambda *_, **__: Llama.random(TINY))
    out, picture, console = tmp_path / "out.json", tmp_path / "out.png", silent()
    arguments = str(real_weights), "cpu", "float32", out, picture, console, 50, 3, (8, 16), 2
    assert prefill.run_command(*arguments) == 0
    assert asked[0] == (real_weights.name, True, (50, 3, (8, 16), 2))
    found = json.loads(out.read_text("utf-8"))["sections"]["prefill"]
    assert found["partial"] is False and found["about"]["machine"]["cores"] and found["about"]["command"]
    assert found["alt_text"] == prefill.alt_text(result) and found["finding"] == prefill.finding(result)
    assert [point["steps"] for point in found["points"]] == [10, 4, 1]
    assert found["points"][0]["ttft"]["median"] == result.points[0].ttft.median
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyboardInterrupt):
        prefill.run_command(*arguments)
    assert json.loads(out.read_text("utf-8"))["sections"]["prefill"]["partial"] is True


def test_bad_input_is_refused_before_the_weights_are_loaded(
    real_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(prefill.Llama, "from_pretrained", loaded)
    for sizes, why in (
        ({"prompt": 8190}, "context is 8192"),
        ({"budgets": [16]}, "at least 17"),
        ({"json_path": tmp_path / "no" / "x.json"}, "there is no folder"),
        ({"plot_path": tmp_path / "x.gif"}, "must end in"),
    ):
        known = {"json_path": None, "plot_path": None} | sizes
        with pytest.raises(InputError, match=why):
            prefill.run_command(str(real_weights), "cpu", "auto", console=silent(), **known)
