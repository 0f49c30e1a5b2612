"""Laws of cost: fitted to numbers that are known, counted by hand, told in words. No time is asserted."""

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from minillm.bench import ceiling, scaling
from minillm.bench import scaling_report as report
from minillm.bench.ceiling import Ceilings, floor_seconds, layer_weights
from minillm.bench.check_gpu import SMOLLM2_135M
from minillm.bench.scaling import LONGEST, Law, Plan, Result, arithmetic_counts_from, blocks, fit, measure
from minillm.bench.steady import Place, Steady, needed
from minillm.errors import InputError
from minillm.model import Llama

EACH = TINY.kv_bytes_per_token(8)
HEADS = TINY.n_layers * TINY.n_heads
SMALL = Plan(
    running=3,
    contexts=(4, 8, 16, 40),
    batches=(1, 2, 5),
    context=10,
    prompts=(3, 6, 12, 40),
    budget=8,
    rounds=2,
    backend="gather",
)
MACHINE = Ceilings(2e9, 1e9, 1e10)


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module", autouse=True)
def known_machine():
    """Its bandwidth and arithmetic are measured elsewhere, and that takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling, "measure", lambda *_: MACHINE)
        yield


@pytest.fixture(scope="module")
def result(tiny: Llama) -> Result:
    return measure(tiny, "tiny", SMALL, silent())


# ---- laws

POWERS = st.sampled_from([(0, 1), (0, 1, 2), (1, 2), (1,)])
SIZES = st.lists(st.integers(1, 5000), min_size=4, max_size=8, unique=True)


@given(POWERS, SIZES, st.lists(st.floats(0.01, 100), min_size=3, max_size=3))
def test_a_law_is_found_again(powers: tuple[int, ...], sizes: list[int], coefficients: list[float]):
    made = Law(powers, tuple(coefficients[: len(powers)]), 0.0)
    found = fit(powers, sizes, [made.at(n) for n in sizes])
    assert found.worst < 1e-6
    for n in sizes:
        assert found.at(n) == pytest.approx(made.at(n), rel=1e-6)
    # sizes side by side tell the powers apart only up to rounding
    assume(max(sizes) > 4 * min(sizes))
    largest = {p: max(c * n**p / made.at(n) for n in sizes) for p, c in zip(powers, made.coefficients, strict=True)}
    for p, c in zip(powers, made.coefficients, strict=True):
        if largest[p] > 0.01:  # else it is next to nothing everywhere
            assert found.of(p) == pytest.approx(c, rel=1e-3)


def test_the_distances_are_relative():
    """Of the constants c, the sum of (c / y - 1)^2 over y = 1 and 4 is least at (1 + 1/4) / (1 + 1/16)."""
    found = fit((0,), (1, 2), (1.0, 4.0))
    assert found.coefficients == pytest.approx((1.25 / 1.0625,))
    assert found.worst == pytest.approx(1 - 1.25 / 1.0625 / 4)


@given(st.floats(0.01, 100), st.floats(0.001, 10), st.sampled_from([(0, 1), (1, 2), (0, 2)]))
def test_two_terms_cross_where_they_are_equal(small: float, large: float, powers: tuple[int, int]):
    low, high = powers
    n = Law(powers, (small, large), 0.0).crossing(low, high)
    assert n is not None and small * n**low == pytest.approx(large * n**high)


def test_terms_that_do_not_grow_do_not_cross():
    assert Law((0, 1), (-1.0, 2.0), 0.0).crossing(0, 1) is None
    assert Law((0, 1), (1.0, 0.0), 0.0).crossing(0, 1) is None


# ---- what is predicted


def test_where_arithmetic_begins_to_count():
    """Just below that number of texts the roofline's floor is moving bytes, just above it multiplying."""
    fast = Ceilings(50e9, 46e9, 984e9)
    n = arithmetic_counts_from(SMOLLM2_135M, 2, 160, fast)
    assert n is not None and 10 < n < 100
    weights = layer_weights(SMOLLM2_135M) + SMOLLM2_135M.vocab_size * SMOLLM2_135M.d_model

    def both(texts: int) -> tuple[float, float, float]:
        (step,) = needed(Place.decode(texts, 160), texts, SMOLLM2_135M, 2)
        moved = (2 * weights + step.kv_bytes) / 50e9
        multiplied = (2 * weights * texts + 4 * 64 * step.scores) / 984e9
        return moved, multiplied, floor_seconds([step], SMOLLM2_135M, 2, fast)

    moved, multiplied, floor = both(int(n))
    assert floor == pytest.approx(moved) and moved >= multiplied
    moved, multiplied, floor = both(int(n) + 1)
    assert floor == pytest.approx(multiplied) and multiplied >= moved


def test_with_slow_memory_it_never_does():
    assert arithmetic_counts_from(SMOLLM2_135M, 2, 4096, Ceilings(1e9, 1e9, 1e15)) is None


def test_the_quadratic_term_of_the_counted_arithmetic(result: Result):
    """Of n tokens a query sees n (n + 1) / 2 scores a head: a n + b n^2 with the coefficients of the definition."""
    assert result.prompts is not None
    points = [dataclasses.replace(p, computed_scores=None) for p in result.prompts.points]
    law = scaling.predicted(dataclasses.replace(result.prompts, points=points), TINY)
    half = 4 * TINY.head_dim * HEADS / 2
    assert law.coefficients == pytest.approx((2 * layer_weights(TINY) + half, half))
    assert law.worst < 1e-9
    squares = [dataclasses.replace(p, computed_scores=HEADS * p.n**2) for p in points]
    whole = scaling.predicted(dataclasses.replace(result.prompts, points=squares), TINY)
    assert whole.coefficients == pytest.approx((2 * layer_weights(TINY), 2 * half))
    assert whole.crossing(1, 2) == pytest.approx(layer_weights(TINY) / half)


# ---- counts, the same on every machine


def test_decode_reads_in_proportion_to_the_context(result: Result):
    assert result.contexts is not None
    for p in result.contexts.points:
        assert (p.steps, p.tokens, p.kv_bytes, p.scores) == (1, 3, 3 * p.n * EACH, 3 * p.n * HEADS)
        assert p.computed_scores == p.scores  # texts of one length: a rectangle without a rest
    counts = fit((1,), [p.n for p in result.contexts.points], [p.kv_bytes for p in result.contexts.points])
    assert counts.worst < 1e-12 and counts.of(1) == pytest.approx(3 * EACH)


def test_a_batch_reads_its_texts_and_the_weights_once(result: Result):
    assert result.batches is not None
    assert [(p.n, p.tokens, p.kv_bytes) for p in result.batches.points] == [(n, n, n * 10 * EACH) for n in (1, 2, 5)]
    weights = layer_weights(TINY) + TINY.vocab_size * TINY.d_model
    for p in result.batches.points:
        moved = (8 * weights + p.kv_bytes) / MACHINE.bytes_per_s
        multiplied = (2 * weights * p.n + 4 * TINY.head_dim * p.scores) / MACHINE.flops_per_s
        assert p.floor == pytest.approx(max(moved, multiplied))


def test_chunks_make_more_steps_and_the_same_scores(result: Result):
    assert result.prompts is not None and result.chunked is not None
    for whole, cut in zip(result.prompts.points, result.chunked.points, strict=True):
        assert (whole.steps, cut.steps) == (1, -(-whole.n // 8))
        assert whole.tokens == cut.tokens == whole.n
        assert whole.scores == cut.scores == HEADS * whole.n * (whole.n + 1) // 2
        assert whole.computed_scores >= whole.scores and cut.computed_scores >= cut.scores
        # each chunk reads again what lies before it
        assert whole.kv_bytes == whole.n * EACH
        assert cut.kv_bytes == sum(min(8 * (i + 1), whole.n) for i in range(cut.steps)) * EACH


@given(st.integers(1, 30), st.integers(1, 300))
def test_blocks_are_full_but_for_the_last(running: int, context: int):
    assert blocks(running, context, 4 * context) == running * -(-context // 16)


def test_memory_by_hand(result: Result):
    assert [one.running for one in result.memory] == [1, 2, 5]
    for one in result.memory:
        assert (one.tokens, one.used) == (10 * one.running, 10 * one.running * EACH)
        assert (one.blocks, one.regions) == (16 * one.running * EACH, LONGEST * 10 * one.running * EACH)
        assert one.grown is None or one.grown >= 0
    assert result.kv_bytes_per_token == EACH


def test_memory_where_the_system_does_not_tell(tiny: Llama, monkeypatch: pytest.MonkeyPatch, result: Result):
    def unknown(device: torch.device) -> None:
        raise OSError

    monkeypatch.setattr(scaling, "PeakMemory", unknown)
    one = scaling.held(tiny, 2, SMALL, "gather")
    assert one == dataclasses.replace(result.memory[1], grown=None)
    silenced = dataclasses.replace(result, memory=[one])
    report.show(silenced, silent())
    report.plot(silenced)


# ---- times


def noting(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Steady], float]) -> list[int]:
    """Every turn takes what it is told to, but is made too; returns the lengths of the texts, in order."""
    order: list[int] = []
    turn = Steady.turn

    def noted(self: Steady) -> Any:
        order.append(self.place.length)
        return seconds(self), turn(self)[1]

    monkeypatch.setattr(Steady, "turn", noted)
    return order


def test_sizes_take_turns_and_the_first_turn_after_putting_is_not_timed(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    turns = {"n": 0}

    def seconds(steady: Steady) -> float:
        turns["n"] += 1
        return 0.001 * steady.place.length

    order = noting(monkeypatch, seconds)
    found = scaling.over_context(tiny, SMALL, "gather", MACHINE)
    one = 1 + scaling.REPEATS
    first = [4, 8, 16, 40]  # to warm up and to count
    assert order == first + [n for n in (8, 16, 40, 4) for _ in range(one)] + [
        n for n in (16, 40, 4, 8) for _ in range(one)
    ]
    assert [(p.n, p.seconds.median) for p in found.points] == [(n, pytest.approx(0.001 * n)) for n in first]
    assert found.law.coefficients == pytest.approx((0.0, 0.001), abs=1e-9)


def test_known_times_give_known_laws(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """A step that takes 2 ms, 1 us for each position and 3 ms for each text; a prompt 4 ms + 2 ms n + 0.5 ms n^2."""

    def seconds(steady: Steady) -> float:
        place = steady.place
        if place.computed == 0:
            return 4e-3 + 2e-3 * place.length + 0.5e-3 * place.length**2
        return 2e-3 + 1e-6 * place.length + 3e-3 * place.running

    noting(monkeypatch, seconds)
    found = measure(tiny, "tiny", SMALL, silent())
    assert found.contexts and found.batches and found.prompts
    assert found.contexts.law.coefficients == pytest.approx((2e-3 + 9e-3, 1e-6))
    assert found.bytes_per_s == pytest.approx(3 * EACH / 1e-6)
    assert found.batches.law.coefficients == pytest.approx((2e-3 + 10e-6, 3e-3))
    assert found.knee == pytest.approx((2e-3 + 10e-6) / 3e-3)
    assert found.prompts.law.coefficients == pytest.approx((4e-3, 2e-3, 0.5e-3))
    assert found.quadratic_from == pytest.approx(4.0)
    for curve in (found.contexts, found.batches, found.prompts):
        for p in curve.points:
            assert p.by_law == pytest.approx(p.seconds.median)
    told = report.finding(found)
    assert "11 ms + 1 us x position (within 0%)" in told and "2.01 ms + 3 ms x text" in told
    assert "4 ms + 2 ms x token + 500 us x token^2" in told and "as much as its linear one at 4 tokens" in told


def test_times_that_do_not_grow_are_told_so(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    noting(monkeypatch, lambda steady: 1 / (1 + steady.place.length * steady.place.running))
    found = measure(tiny, "tiny", SMALL, silent())
    assert found.bytes_per_s is None and found.knee is None and found.quadratic_from is None
    told = report.finding(found)
    assert "does not grow" in told and "no two such terms" in told and "no quadratic term" in told
    json.dumps(report.as_json(found), allow_nan=False)
    report.plot(found)


# ---- what is refused


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"running": 0}, "running is 0; it must be from 1"),
        ({"context": 0}, "context is 0"),
        ({"budget": 0}, "budget is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"contexts": (1, 2)}, "contexts are .*at least 3"),
        ({"batches": (1, 2, 2, 4)}, "batches are .*each once"),
        ({"prompts": (1, 2, 3)}, "prompts are .*at least 4"),
        ({"prompts": (0, 1, 2, 3)}, "prompts is 0; it must be from 1"),
        ({"backend": "best"}, "backend 'best' is not known"),
    ],
)
def test_plans_that_make_no_sense_are_refused(asked: dict, why: str):
    with pytest.raises(InputError, match=why):
        Plan(**asked)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"contexts": (1, 2, 257)}, "contexts.* 257; the model's context is 256"),
        ({"prompts": (1, 2, 3, 257)}, "prompts.* 257; the model's context is 256"),
        ({"context": 65}, "a text of 65 tokens may grow to 260; the model's context is 256"),
    ],
)
def test_more_than_the_context_is_refused(asked: dict, why: str):
    SMALL.check(TINY)
    with pytest.raises(InputError, match=why):
        dataclasses.replace(SMALL, **asked).check(TINY)


# ---- for people, and for programs


def test_the_tables_fit_and_hold_every_size(result: Result):
    console = silent(width=80)
    report.show(result, console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    rows = [line.split() for line in text.splitlines() if line.split()]
    assert result.contexts and result.batches and result.prompts
    for curve in (result.contexts, result.batches, result.prompts):
        for p in curve.points:
            assert any(row[:2] == [str(p.n), report.ms(p.seconds.median)] for row in rows)
    for one in result.memory:
        assert any(row[:3] == [str(one.running), str(one.tokens), f"{one.used / 1e6:,.1f}"] for row in rows)
    assert report.finding(result) in " ".join(text.split())


def test_the_words_say_what_the_picture_shows(result: Result):
    words = report.alt_text(result)
    assert result.contexts and result.batches
    for curve in (result.contexts, result.batches):
        assert f"{report.ms(curve.points[-1].seconds.median)} at {curve.points[-1].n} " in words
    assert words.endswith(report.finding(result)) and "Four charts" in words


def test_the_picture_has_four_panels_that_work_in_grey(result: Result):
    figure = report.plot(result)
    panels = figure.axes
    assert [len(axes.get_legend_handles_labels()[1]) >= 2 for axes in panels] == [True] * 4
    for axes in panels:
        named = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
        looks = [(line.get_marker(), line.get_linestyle()) for line in named]
        assert len(set(looks)) == len(looks)
        for line in axes.get_lines():
            colour = line.get_color()
            assert colour == "black" or 0 <= float(colour) <= 1  # grey
    assert result.memory[-1].used / 1e6 == pytest.approx(
        next(np.max(line.get_ydata()) for line in panels[3].get_lines() if line.get_label() == "used")
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.0, "12 s"), (0.5, "500 ms"), (9.99999e-4, "1 ms"), (-2.5e-6, "-2.5 us"), (1e-10, "0.1 ns"), (0.0, "0 ns")],
)
def test_a_time_in_the_unit_that_suits_it(seconds: float, text: str):
    assert report.short(seconds) == text


@settings(max_examples=10)
@given(st.floats(1e-6, 10), st.floats(-1, 1), st.floats(0, 1))
def test_a_law_in_words_has_one_sign_between_two_terms(a: float, b: float, c: float):
    text = report.written(Law((0, 1, 2), (a, b, c), 0.0), "token")
    assert "+ -" not in text and len(re.findall("-?[0-9.e+]+ (?:s|ms|us|ns)", text)) == 3 and text.endswith("x token^2")


def test_after_ctrl_c_what_is_whole_is_kept(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scaling, "over_prompt", stop)
    found = measure(tiny, "tiny", SMALL, silent())
    assert found.partial and found.contexts and found.batches and found.memory
    assert found.prompts is None and found.chunked is None
    console = silent()
    report.show(found, console)
    assert "Stopped half way" in written(console) and "not measured" in report.alt_text(found)
    report.plot(found)
    monkeypatch.setattr(scaling, "over_running", stop)
    with pytest.raises(KeyboardInterrupt):
        measure(tiny, "tiny", SMALL, silent())


def test_the_command_writes_everything(
    real_weights: Path, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def measured(model: Llama, name: str, plan: Plan, console: Console) -> Result:
        asked.append((name, plan))
        return dataclasses.replace(result, partial=len(asked) == 2)

    monkeypatch.setattr(report, "measure", measured)
    monkeypatch.setattr(report, "load_model", lambda *_: None)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = SMALL, str(real_weights), "cpu", "float32", out, picture, silent()
    assert report.run_command(*arguments) == 0
    assert asked == [(real_weights.name, SMALL)]
    found = json.loads(out.read_text("utf-8"))["sections"]["scaling"]
    assert found["partial"] is False and found["about"]["command"] and found["backend"] == "gather"
    assert found["finding"] == report.finding(result) and found["alt_text"] == report.alt_text(result)
    assert found["contexts"]["points"][0]["kv_bytes"] == 3 * 4 * EACH
    assert found["prompts"]["law"].keys() == {"powers", "coefficients", "worst"}
    assert found["memory"][0].keys() == {"running", "tokens", "used", "blocks", "regions", "grown"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyboardInterrupt):
        report.run_command(*arguments)
    assert json.loads(out.read_text("utf-8"))["sections"]["scaling"]["partial"] is True


def test_bad_input_is_refused_before_the_weights_are_loaded(
    real_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def loaded(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(report, "load_model", loaded)
    for plan, json_path, plot_path, why in (
        (dataclasses.replace(SMALL, contexts=(1, 2, 9000)), None, None, "9000; the model's context is 8192"),
        (SMALL, tmp_path / "no" / "x.json", None, "there is no folder"),
        (SMALL, None, tmp_path / "x.gif", "must end in"),
    ):
        with pytest.raises(InputError, match=why):
            report.run_command(plan, str(real_weights), "cpu", "auto", json_path, plot_path, silent())
