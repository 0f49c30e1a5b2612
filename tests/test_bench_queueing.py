"""The queue on the real engine, with a clock that stands still unless the model moves it."""

import io
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY
from rich.console import Console

from minillm.bench import queue_report, queueing, results
from minillm.bench.calibrate import Calibration
from minillm.bench.harness import Job, Run, run
from minillm.bench.queueing import POLICIES, Plan, Scenario, claims, figures_of, jobs_of, measure, prompt_share
from minillm.bench.verify import Verifier
from minillm.errors import InputError
from minillm.model import Llama
from minillm.simulation import steps
from minillm.simulation.policies import Figures
from minillm.simulation.steps import StepTime
from minillm.simulation.workload import Demand, Mix, poisson_demands, uniform

STEP = StepTime(base=0.010, per_token=0.001, per_position=0.0, per_chunk=0.0)
SHORT = Mix(((0.8, 1, 6), (0.2, 12, 24)))
SLOTS, BUDGET = 3, 8
LIMITS = {"max_running": SLOTS, "budget": BUDGET}
SIMULATED = {
    "static": lambda demands: steps.groups(demands, SLOTS, STEP, BUDGET),
    "padded": lambda demands: steps.static(demands, SLOTS, STEP),
    "dynamic": lambda demands: steps.dynamic(demands, SLOTS, STEP),
    "continuous": lambda demands: steps.continuous(demands, SLOTS, STEP, BUDGET),
}


class Clock:
    """Time passes when the model works, as much as STEP says, and when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, module: object, args: tuple, output: object) -> None:
        self.now += STEP(args[0].numel(), 0, 0)


@pytest.fixture
def clock(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, clock.read)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    hook = tiny.register_forward_hook(clock.work)
    yield clock
    hook.remove()


def serve(model: Llama, policy: str, demands: list[Demand], clients: int | None = None) -> Run:
    jobs = jobs_of(demands, range(2, 60))
    return run(model, policy, jobs, LIMITS, generate=POLICIES[policy], clients=clients)


# ---- the engine does what the simulation says


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_the_engine_keeps_the_simulated_times(tiny: Llama, clock: Clock, policy: str, seed: int):
    """Every request starts and ends exactly when the simulation of its policy says, step by step."""
    rate = (2.0, 20.0, 200.0)[seed % 3]  # from a queue that is mostly empty to one that is always full
    demands = poisson_demands(20, rate, SHORT, prompt=1 + 4 * (seed % 2), seed=seed)
    done = serve(tiny, policy, demands)
    expected = SIMULATED[policy](demands)
    assert done.starts == pytest.approx(expected.starts, abs=1e-9)
    assert [times[-1] for times in done.times] == pytest.approx(expected.ends, abs=1e-9)


def test_static_by_hand(tiny: Llama, clock: Clock):
    """Three slots. The group waits for its third, at 0.5 s; the last two enter when all of it has left."""
    outputs = [2, 1, 4, 1, 1]
    demands = [Demand(at, 1, n) for at, n in zip([0.0, 0.1, 0.5, 0.6, 0.7], outputs, strict=True)]
    done = serve(tiny, "static", demands)
    # steps of 3, 2, 1 and 1 tokens (the ended rows cost nothing): 13 + 12 + 11 + 11 ms
    left = 0.5 + 0.047
    assert done.starts == pytest.approx([0.5, 0.5, 0.5, 0.7, 0.7])
    assert [t[-1] for t in done.times] == pytest.approx([0.525, 0.513, left, 0.712, 0.712])
    early = [replace(demand, arrival=0.0) for demand in demands]
    assert serve(tiny, "static", early).starts == pytest.approx([0, 0, 0, 0.047, 0.047])


def test_with_equal_lengths_nothing_is_gained(tiny: Llama, clock: Clock):
    demands = [Demand(0.0, 2, 9)] * 12
    slow, fast = (figures_of(serve(tiny, policy, demands), SLOTS) for policy in ("static", "continuous"))
    assert slow.makespan == pytest.approx(fast.makespan) and slow.mean_wait == pytest.approx(fast.mean_wait)
    assert slow.idle_share == pytest.approx(0, abs=1e-9)


def test_mixed_lengths_gain(tiny: Llama, clock: Clock):
    demands = poisson_demands(60, 1000.0, SHORT, 1, seed=1)
    slow, fast = (figures_of(serve(tiny, policy, demands), SLOTS) for policy in ("static", "continuous"))
    assert slow.makespan > 1.3 * fast.makespan and slow.mean_wait > 1.3 * fast.mean_wait
    assert slow.idle_share > 0.3 > fast.idle_share


@pytest.mark.parametrize("policy", POLICIES)
def test_a_closed_loop_never_has_more_requests_out_than_clients(tiny: Llama, clock: Clock, policy: str):
    clients = 2 * SLOTS
    done = serve(tiny, policy, poisson_demands(30, 1.0, SHORT, 2, seed=3), clients)
    ends = [times[-1] for times in done.times]
    for arrival in done.arrivals:
        out = sum(a <= arrival < end for a, end in zip(done.arrivals, ends, strict=True))
        assert out <= clients
    assert all(math.isfinite(arrival) for arrival in done.arrivals)


def test_the_share_of_prompts_by_hand(tiny: Llama, clock: Clock):
    done = serve(tiny, "continuous", [Demand(0.0, 5, 3)])
    assert prompt_share(done) == pytest.approx(15 / (15 + 11 + 11))  # 5 tokens, then one and one


# ---- the whole experiment


SMALL = Plan(requests=10, slots=2, prompt=4, scale=0.02, rounds=2, seed=1)


class Letters:
    """Characters are tokens."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [2 + ord(c) % 60 for c in messages[-1]["content"]][:40]

    def decoder(self) -> "Letters":
        return self

    def push(self, token: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queueing, "LONG_PROMPT", 8)
    monkeypatch.setattr(queueing, "REAL_CAP", 5)
    monkeypatch.setattr(queueing.calibrate, "measure", lambda model, slots: Calibration(STEP, 0.0, 1, []))


def silent() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_everything_is_measured_shown_and_saved(tiny: Llama, clock: Clock, small: None, tmp_path: Path):
    result = measure(tiny, "tiny", Letters(), SMALL, silent())
    assert [scenario.name for scenario in result.scenarios] == list(queueing.SCENARIOS)
    for scenario in result.scenarios:
        assert {row.policy for row in scenario.rows} == (
            {"static", "continuous"} if scenario.name == "uniform" else set(POLICIES)
        )
        for row in scenario.rows:
            assert row.void is None and row.figures.busy <= SMALL.slots * row.figures.makespan + 1e-9
            again = scenario.name in ("article", "uniform") and row.policy in queueing.PAIR
            assert len(row.rounds) == (2 if again else 1)
            assert row.output_tokens == scenario.output_tokens
    article, control = result.scenarios[0], result.scenarios[1]
    assert article.rate == pytest.approx(SMALL.load * result.capacity)
    assert control.cv_output == 0 < article.cv_output
    # the clock is the simulation's own, so it predicts exactly
    assert article.makespan_ratio == pytest.approx(article.predicted_makespan_ratio)
    assert article.wait_ratio == pytest.approx(article.predicted_wait_ratio)
    console = silent()
    queue_report.show(result, console)
    text = console.file.getvalue()
    for scenario in result.scenarios:
        assert scenario.name in text and " ".join(scenario.why.split()[:5]) in " ".join(text.split())
    assert all(row.policy in queue_report.alt_text(result) for row in article.rows)
    queue_report.plot(result).savefig(tmp_path / "queue.png")
    json.dumps(queueing.asdict(result), allow_nan=False)


def test_a_wrong_token_makes_a_row_void(tiny: Llama, clock: Clock):
    demands = [Demand(0.0, 4, 3)] * 2
    case = queueing.Case("article", "", jobs_of(demands, range(2, 60)), ("static", "continuous"))
    runs = {policy: [serve(tiny, policy, demands)] for policy in case.policies}
    runs["static"][0].outputs[1][1] = 63
    calibration = Calibration(STEP, 0.0, 1, [])
    scenario = queueing.scenario_of(case, runs, SMALL, calibration, Verifier(tiny))
    assert [bool(row.void) for row in scenario.rows] == [True, False]
    assert scenario.makespan_ratio is None and claims([scenario]) == []


def test_ctrl_c_keeps_the_whole_scenarios(
    tiny: Llama, clock: Clock, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stopped(*args: object) -> None:
        if args[1].name == "uniform":
            raise KeyboardInterrupt
        return rounds(*args)

    rounds = queueing.timed_rounds
    monkeypatch.setattr(queueing, "timed_rounds", stopped)
    monkeypatch.setattr(queue_report, "load_checkpoint", lambda *args: (Path("tiny"), tiny, Letters()))
    path, console = tmp_path / "x.json", silent()
    with pytest.raises(KeyboardInterrupt):
        queue_report.run_command(SMALL, "tiny", "cpu", "auto", path, tmp_path / "x.png", console)
    found = results.load(path)["queue"]
    assert found["partial"] and [scenario["name"] for scenario in found["scenarios"]] == ["article"]
    assert "PARTIAL" in console.file.getvalue() and (tmp_path / "x.png").exists()


# ---- targets


def scenario(name: str, makespan: float | None, wait: float | None) -> Scenario:
    return Scenario(name, "", 1, 1, 1, 1.0, 0.0, 1.0, None, [], makespan, wait, 2.0, 3.0, "")


@pytest.mark.parametrize("makespan, wait, met", [(2.2, 3.2, [True, True]), (2.19, 3.3, [False, True])])
def test_targets_of_the_article(makespan: float, wait: float, met: list[bool]):
    assert [claim.met for claim in claims([scenario("article", makespan, wait)])] == met


@pytest.mark.parametrize("value, met", [(1.0, True), (1.049, True), (0.951, True), (1.06, False), (0.94, False)])
def test_the_control_must_be_one_within_noise(value: float, met: bool):
    assert [claim.met for claim in claims([scenario("uniform", value, value)])] == [met, met]


# ---- bad input


@pytest.mark.parametrize(
    "given, message",
    [
        ({"requests": 1}, "requests is 1; it must be from 2"),
        ({"slots": 0}, "slots is 0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"load": 0.0}, "load is 0.0"),
        ({"load": math.inf}, "load is inf"),
        ({"rounds": 0}, "rounds is 0"),
        ({"limit_tpot": -1.0}, "limit-tpot is -1.0"),
        ({"scenarios": ("article", "best")}, "scenario 'best' is not known; use some of article, uniform"),
        ({"scenarios": ()}, "no scenario is given"),
    ],
)
def test_plans_that_make_no_sense_are_refused(given: dict, message: str):
    with pytest.raises(InputError, match=message):
        Plan(**given)


def test_a_context_that_is_too_short_is_refused_before_anything_is_measured(tiny: Llama):
    with pytest.raises(InputError, match=f"may need .* tokens, but the model's context is {TINY.context}"):
        measure(tiny, "tiny", Letters(), Plan(), silent())


def test_prompts_are_cut_one_after_the_other_and_begin_again():
    jobs = jobs_of([Demand(0.0, 2, 1), Demand(0.5, 2, 3), Demand(1.0, 2, 1)], [5, 6, 7, 8, 9])
    assert jobs == [Job((5, 6), 1), Job((7, 8), 3, arrival=0.5), Job((5, 6), 1, arrival=1.0)]


def test_figures_of_a_run_by_hand():
    done = Run("x", [Job((1,), 1)] * 2, [0.0, 1.0], [[1], [2, 3]], [[2.0], [3.0, 5.0]], ["length"] * 2, None)
    steps_at = [type("S", (), {"began": 0.5, "new": {0: 1}}), type("S", (), {"began": 2.5, "new": {1: 1}})]
    done = replace(done, counts=type("C", (), {"steps": steps_at}))
    assert figures_of(done, 1) == Figures(1.0, pytest.approx(1.45), 1.5, 5.0, 0.4, 4.0, pytest.approx(0.2))


def test_uniform_mixes_have_the_mean_of_the_article():
    assert round(Plan().mix.mean) == round(uniform(round(Plan().mix.mean)).mean)
