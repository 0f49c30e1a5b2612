"""The article's figures come out, a changed one is caught; the command, its door and its Ctrl-C."""

import ast
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minillm import simulation
from minillm.bench.calibrate import Calibration
from minillm.errors import InputError
from minillm.simulation import article, calibrated, policies, report, run_command, spread
from minillm.simulation.article import EQUAL, MIXED, PUBLISHED, Runs, Setup
from minillm.simulation.steps import StepTime

ALL = ["static", "dynamic", "continuous"]
STEP = StepTime(0.018, 0.0004, 3e-6, 0.004)
DEFAULTS: dict[str, Any] = dict(
    requests=600,
    slots=8,
    time_per_token_ms=8.0,
    rate=11.0,
    arrivals="poisson",
    policies=ALL,
    uniform=None,
    prompt=16,
    seeds=300,
    calibrate=False,
    model="no-such-model",
    device="cpu",
    dtype="auto",
    json_path=None,
    plot_path=None,
)


def one_line(console: Console) -> str:
    """What was printed, however it was wrapped."""
    return " ".join(console.file.getvalue().split())


def command(**changes: Any) -> tuple[int, str]:
    """Exit status and what was printed."""
    console = Console(file=io.StringIO(), width=160)
    status = run_command(**{**DEFAULTS, **changes}, console=console)
    return status, one_line(console)


@pytest.fixture(scope="module")
def runs() -> Runs:
    """All seeds of the documented parameters, run once."""
    done: Runs = {}
    article.run_seeds(Setup(), ["static", "continuous"], done)
    return done


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    """The command finds those runs done."""
    monkeypatch.setattr(article, "run_seeds", lambda setup, names, into: into.update(runs))


# ---- the article


def test_every_published_figure_comes_out(runs: Runs):
    lines = article.compare(Setup(), runs, complete=True)
    judged = [line for line in lines if line.rate == article.RATE and line.published is not None]
    assert len(judged) == sum(len(figures) for figures in PUBLISHED.values()) == 18
    assert article.failed(lines) == []


def test_the_published_figures_agree_with_each_other():
    """Requests, slots and the busy time give the throughput and the idle share."""
    for policy in ("static", "continuous"):
        p = PUBLISHED[MIXED, policy]
        assert 600 / p["makespan"] == pytest.approx(p["request_throughput"], abs=0.005)
        assert 1 - p["busy"] / (8 * p["makespan"]) == pytest.approx(p["idle_share"], abs=0.0005)


def test_other_rates_leave_the_band(runs: Runs):
    lines = article.compare(Setup(), runs, complete=True)
    for rate in article.SENSITIVITY:
        assert any(line.inside is False for line in lines if line.rate == rate)


@pytest.mark.parametrize(
    "case, policy, figure", [(key[0], key[1], name) for key, fs in PUBLISHED.items() for name in fs]
)
def test_a_changed_figure_is_caught(runs: Runs, monkeypatch: pytest.MonkeyPatch, case: str, policy: str, figure: str):
    for factor in (0.3, 3.0):
        changed = {**PUBLISHED[case, policy], figure: factor * PUBLISHED[case, policy][figure]}
        monkeypatch.setitem(article.PUBLISHED, (case, policy), changed)
        out = article.failed(article.compare(Setup(), runs, complete=True))
        monkeypatch.undo()
        assert [(line.case, line.policy, line.figure) for line in out] == [(case, policy, figure)]


def test_a_group_that_does_not_wait_cannot_make_the_articles_control():
    """Why the rule of full groups is inferred: the first group would be one request, and 76 groups take 91.2 s."""
    demands = Setup(uniform=article.EQUAL_LENGTH).demands(0)
    assert demands[7].arrival > demands[0].arrival + 0.01
    assert 76 * 150 * 0.008 > PUBLISHED[EQUAL, "static"]["makespan"] + 0.05


# ---- the command


def test_the_command_says_in_for_every_figure(again):
    status, text = command()
    assert status == 0
    assert "All 18 of the article's figures" in text and "INFERRED" in text and "OUT" not in text
    assert "9 3 of 18" in text and "11 0 of 18 none" in text and "13 5 of 18" in text


def test_the_command_fails_with_a_figure_that_is_out(again, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(article.PUBLISHED[MIXED, "static"], "makespan", 450.0)
    status, text = command()
    assert status == 1 and "1 of the article's 18 figures are OUT: static makespan (450.00;" in text


def test_other_parameters_have_no_verdict():
    status, text = command(requests=40, seeds=5, slots=3)
    assert status == 0 and "article's figures" not in text and "INFERRED" not in text and "OUT" not in text
    assert "Figures" in text and "Sensitivity" not in text


def test_equal_lengths_at_once_gain_nothing():
    _, text = command(requests=40, seeds=2, arrivals="at-once", uniform=100)
    assert "mean wait 1.00 x, makespan 1.00 x (medians)" in text and "Control" not in text


def test_one_policy_alone():
    _, text = command(requests=20, seeds=2, policies=["dynamic"])
    assert "mean wait, s dynamic" in text and "Static over continuous" not in text


def test_a_trace_is_run_once_with_its_own_arrivals(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n0,1,1000\n0,1,125\n0,1,125\n", encoding="utf-8")
    _, text = command(arrivals=str(path), slots=2, json_path=tmp_path / "out.json")
    assert "as in trace.csv" in text and "95 %" not in text
    section = json.loads((tmp_path / "out.json").read_text())["sections"]["simulation"]
    spans = {line["policy"]: line["band"]["median"] for line in section["figures"] if line["figure"] == "makespan"}
    assert spans == {"static": 9.0, "dynamic": 8.0, "continuous": 8.0}
    assert section["seeds_done"] == 1 and str(tmp_path) not in json.dumps(section["parameters"])


def test_the_file_and_the_plot(tmp_path: Path):
    status, text = command(requests=30, seeds=4, json_path=tmp_path / "a.json", plot_path=tmp_path / "a.svg")
    assert status == 0 and (tmp_path / "a.svg").stat().st_size > 1000
    section = json.loads((tmp_path / "a.json").read_text())["sections"]["simulation"]
    assert section["partial"] is False and section["seeds_done"] == 4 and section["about"]["date"]
    assert {(line["case"], line["policy"]) for line in section["figures"]} == {
        (c, p) for c in (MIXED, EQUAL) for p in ALL
    }
    assert len(section["spread"]) == len(spread.STRETCHES) and section["alt_text"].startswith("Two lines")


def test_the_step_time_changes_the_conclusion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(simulation, "check_calibrate", lambda *arguments: "tiny, float64 on cpu")
    monkeypatch.setattr(simulation, "measure", lambda *arguments: Calibration(STEP, 0.03, 168, []))
    status, text = command(requests=60, seeds=2, prompt=32, calibrate=True, json_path=tmp_path / "a.json")
    assert status == 0 and "fitted from 168 timed steps" in text and "not fitted: 3.0%" in text
    assert "tiny, float64 on cpu" in text
    rows = json.loads((tmp_path / "a.json").read_text())["sections"]["simulation"]["step_by_step"]
    assert [row["prompt"] for row in rows] == [32, 256]
    for row in rows:
        assert row["rate"] == pytest.approx(calibrated.LOAD * row["capacity"], rel=0.02)
        assert row["makespan_ratio"]["static"]["median"] == 1
        assert row["makespan_ratio"]["continuous"]["median"] > 1.2
    # a prompt in a rectangle costs every row: with prompts long enough, more than the idle slots that are filled
    assert rows[1]["makespan_ratio"]["dynamic"]["median"] < 1 < rows[0]["makespan_ratio"]["dynamic"]["median"]
    assert "there dynamic's pads cost more time" in text


def test_the_calibrated_queue_takes_a_trace_as_it_is(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n0,5,9\n1,9,5\n", encoding="utf-8")
    setup = simulation.check(1, 2, 8.0, 1.0, str(path), ALL, None, 1, 300)
    [outcome] = calibrated.compare(STEP, setup, (16, 128))
    assert outcome.prompt is None and outcome.rate is None
    assert outcome.figures["continuous"].makespan > 1
    assert calibrated.compare(STEP, replace(setup, trace=None, arrivals="at-once"), (16,))[0].rate is None


# ---- spread of lengths


def test_the_gain_vanishes_with_the_spread():
    points = spread.sweep(Setup(requests=200, seeds=8))
    assert points[0].cv == 0 and points[0].makespan["static"] == points[0].makespan["continuous"]
    static = [point.mean_wait["static"].median for point in points]
    assert static == sorted(static) and static[-1] > 3 * static[0]
    assert [point.article for point in points].count(True) == 1
    own = next(point for point in points if point.article)
    assert own.cv == pytest.approx(1.07, abs=0.08)


def test_the_alt_text_is_made_of_the_points():
    result = report.Result(Setup(requests=50, seeds=3), ALL)
    result.points = spread.sweep(result.setup)
    last = result.points[-1]
    assert f"({last.cv:.2f}): static {last.mean_wait['static'].median:.1f} s" in report.alt_text(result)
    figure = report.plot(result)
    words = [text.get_text() for text in figure.axes[0].texts]
    assert {"static", "continuous", report.gain(last)} <= set(words)


# ---- the door


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"requests": 0}, "requests is 0"),
        ({"requests": 10**9}, "requests is 1000000000"),
        ({"slots": 0}, "slots is 0"),
        ({"slots": -8}, "slots is -8"),
        ({"time_per_token_ms": 0.0}, "time per token in ms is 0.0"),
        ({"time_per_token_ms": float("nan")}, "time per token in ms is nan"),
        ({"time_per_token_ms": float("inf")}, "time per token in ms is inf"),
        ({"rate": -1.0}, "rate is -1.0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"uniform": 0}, "uniform is 0"),
        ({"prompt": 0}, "prompt is 0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"requests": 100_000, "seeds": 31}, "at most 3,000,000"),
        ({"policies": []}, "no policy was given"),
        ({"policies": ["static", "magic"]}, "policy 'magic' is not known; use some of static, dynamic, continuous"),
        ({"arrivals": "poison"}, "arrivals is 'poison'"),
        ({"arrivals": "x" * 5000}, "arrivals is 'xxx"),
        ({"json_path": Path("no-such-folder/a.json")}, "there is no folder"),
        ({"plot_path": Path("a.txt")}, "must end in one of"),
        ({"calibrate": True}, "no-such-model"),
        ({"calibrate": True, "slots": 65}, "slots is 65; calibrating takes from 1 to 64"),
        ({"calibrate": True, "requests": 100_000, "seeds": 1}, "step by step at most 2,000,000"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, changes, said: str):
    monkeypatch.setattr(article, "run_seeds", lambda *arguments: pytest.fail("simulated before it was checked"))
    with pytest.raises(InputError) as caught:
        command(**changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_trace_is_given_alone(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n0,1,1\n", encoding="utf-8")
    with pytest.raises(InputError, match="uniform is 5, but the trace"):
        command(arrivals=str(path), uniform=5)
    with pytest.raises(InputError, match="leave --plot out"):
        command(arrivals=str(path), plot_path=tmp_path / "a.png")


# ---- Ctrl-C


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the third seed: a seed with the control takes two calls of a policy."""
    calls: list[int] = []

    def static(*arguments: Any) -> policies.Schedule:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return policies.static(*arguments)

    monkeypatch.setitem(policies.POLICIES, "static", static)


def test_what_was_done_before_ctrl_c_is_shown_and_kept(interrupted, tmp_path: Path):
    console = Console(file=io.StringIO(), width=160)
    with pytest.raises(KeyboardInterrupt):
        run_command(**{**DEFAULTS, "requests": 20, "json_path": tmp_path / "a.json"}, console=console)
    assert "2 of 300, PARTIAL" in console.file.getvalue()
    section = json.loads((tmp_path / "a.json").read_text())["sections"]["simulation"]
    assert section["partial"] is True and section["seeds_done"] == 2


def test_a_part_of_the_documented_seeds_has_no_verdict(runs: Runs):
    few = {key: figures[:9] for key, figures in runs.items()}
    result = report.Result(Setup(), ["static", "continuous"], few, partial=True)
    assert result.seeds == 9 and all(line.inside is None for line in result.lines)
    assert report.verdict(result) == ""
    report.show_fixed(result, Console(file=io.StringIO(), width=160))


# ---- light


def test_simulating_needs_no_torch():
    code = "import minillm.simulation.report, sys; print([name for name in sys.modules if name == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []
