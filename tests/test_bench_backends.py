"""Backends side by side: what is counted, by hand and by the definition; what is void; the tables and the command. No
time is asserted."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from minillm.bench import backends
from minillm.bench.backends import Entry, Plan, Point, Result, dense_scores, measure, needed
from minillm.bench.ceiling import Ceilings
from minillm.errors import InputError
from minillm.kernels import BACKENDS
from minillm.kernels.choose import Probe, Time
from minillm.kernels.gather import GatherAttend
from minillm.model import Llama

CPU = torch.device("cpu")
SHORT = Plan(batches=(1, 3), contexts=(5, 40), chunk=6, starts=(0, 7), rounds=3, seconds=0)
CEILINGS = Ceilings(read_bytes_per_s=9e9, copy_bytes_per_s=1e9, flops_per_s=1e12)


class Right(GatherAttend):
    """Another name for the reference."""


class Wrong(GatherAttend):
    """With more than one text."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().__call__(layer, q, k, v) + (len(self.batch.chunks) > 1)


class Nowhere(GatherAttend):
    @staticmethod
    def why_not(model: Llama) -> str | None:
        return "it needs a machine that nobody has"


def silent(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense, gather and those above in place of the real backends; a machine whose speed is known."""
    known = {name: BACKENDS[name] for name in ("dense", "gather")}
    known |= {c.__name__.lower(): f"{__name__}:{c.__name__}" for c in (Right, Wrong, Nowhere)}
    for name in list(BACKENDS):
        monkeypatch.delitem(BACKENDS, name)
    for name, where in known.items():
        monkeypatch.setitem(BACKENDS, name, where)
    monkeypatch.setattr(backends.ceiling, "measure", lambda *_: CEILINGS)


@pytest.fixture
def result() -> Result:
    return measure(TINY, "tiny", CPU, torch.float64, SHORT, silent())


# ---- what is counted


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=4), st.sampled_from([2, 4, 8]))
def test_what_a_layer_needs_is_what_the_rule_lets_it_see(chunks: list[tuple[int, int]], itemsize: int) -> None:
    """Token t of a text sees the positions up to its own, for each of the H query heads; K and V are read once."""
    seen = [(p, text) for text, (start, n) in enumerate(chunks) for t in range(start, start + n) for p in range(t + 1)]
    kv_bytes, flops = needed(TINY, itemsize, chunks)
    assert flops == len(seen) * 4 * (2 * 8 + 2 * 8)  # heads; a multiplication and an addition, for q k^T and for v
    assert kv_bytes == len(set(seen)) * 2 * 2 * 8 * itemsize  # K and V, key-value heads, head dim
    tokens = sum(n for _, n in chunks)
    assert dense_scores(chunks) == tokens * len(set(seen))


def test_the_floor_is_the_longer_one_of_moving_and_multiplying(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny, dataclasses.replace(SHORT, rounds=1)
    step = [(9, 1)] * 2  # 20 positions of 2 * 2 * 8 numbers of 8 bytes; 20 scores for each of 4 heads of 8
    moved, multiplied = 20 * 32 * 8 / 1e9, 20 * 4 * 4 * 8 / 1e12
    for read, copied in ((1e9, 1e9), (1e9, 2e8), (2e8, 1e9)):  # the faster of the two counts
        ceilings = dataclasses.replace(CEILINGS, read_bytes_per_s=read, copy_bytes_per_s=copied)
        assert backends.measure_point(model, step, ["gather"], plan, ceilings).floor == pytest.approx(moved)
    slow = dataclasses.replace(CEILINGS, flops_per_s=1e3)
    floor = backends.measure_point(model, step, ["gather"], plan, slow).floor
    assert floor == pytest.approx(multiplied * 1e9) and floor > moved


def test_all_points_are_measured(result: Result) -> None:
    assert [(p.texts, p.new, p.context) for p in result.points] == [
        *((1, 1, 5), (1, 1, 40), (3, 1, 5), (3, 1, 40)),
        *((1, 6, 6), (1, 6, 13)),
    ]
    assert not result.partial and result.tolerance == 1e-10 and result.ceilings == CEILINGS
    assert result.absent == {"nowhere": "it needs a machine that nobody has"}
    assert result.names == ["dense", "gather", "right", "wrong"]
    for point in result.points:
        assert [entry.backend for entry in point.entries] == result.names
        assert point.rounds == 3 and point.layers == 2 and point.decodes == (point.new == 1)
        for entry in point.entries:
            assert entry.difference is not None and (entry.void is None) == (entry.difference < 1e-10)
            if not entry.void:
                assert entry.layer and entry.prepare and entry.layer.median > 0 and entry.prepare.median > 0
        reference = point.entry("gather")
        assert reference and reference.ratio == 1.0 and reference.difference == 0.0
        assert point.fastest in result.names and point.entry("abacus") is None and point.seconds("abacus") is None


def test_of_a_wrong_answer_no_time_is_taken(result: Result, monkeypatch: pytest.MonkeyPatch, tiny: Llama) -> None:
    assert [(point.texts, point.context, entry.backend) for point, entry in result.faults] == [
        (3, 5, "wrong"),
        (3, 40, "wrong"),
    ]
    for _, entry in result.faults:
        assert entry.difference == pytest.approx(1.0) and entry.void and "differs from gather's by 1" in entry.void
        assert entry.layer is entry.prepare is entry.ratio is None
    raced: list[list[str]] = []
    real = backends.race
    monkeypatch.setattr(backends, "race", lambda names, *more: raced.append(list(names)) or real(names, *more))
    backends.measure_point(tiny, [(3, 1)] * 2, ["gather", "wrong", "right"], SHORT, CEILINGS)
    assert raced == [["gather", "right"]]


def test_ratios_are_those_within_each_round(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that grows slower from round to round changes no ratio."""
    slower = (1.0, 10.0, 100.0, 1000.0)

    def race(names: list[str], probe: Probe, rounds: int, seconds: float) -> dict[str, list[Time]]:
        assert (rounds, seconds) == (SHORT.rounds, SHORT.seconds)
        took = {"gather": (3, 3, 3, 3), "right": (2, 1, 1, 9)}
        return {name: [Time(7 * s, took[name][i] * s) for i, s in enumerate(slower)] for name in names}

    monkeypatch.setattr(backends, "race", race)
    point = backends.measure_point(tiny, [(3, 1)], ["gather", "right"], SHORT, CEILINGS)
    gather, right = point.entries
    assert gather.ratio == 1.0 and right.ratio == pytest.approx((1.5 + 3) / 2)  # of 1.5, 3, 3, 0.33: the middle two
    assert right.prepare and right.prepare.median == 7 * 55 and right.layer and right.layer.median == 55.0


def test_the_dense_mask_is_left_out_where_it_is_too_large(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    step = [(9, 1)] * 2  # 2 new tokens x 20 positions
    for most, there in ((40, True), (39, False)):
        monkeypatch.setattr(backends, "MOST_SCORES", most)
        point = backends.measure_point(tiny, step, ["dense", "gather"], SHORT, CEILINGS)
        assert (point.entry("dense") is not None) == there and point.entry("gather")


# ---- what is refused, and what Ctrl-C leaves


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"batches": ()}, "nothing to measure; give at least one batch"),
        ({"contexts": ()}, "nothing to measure; give at least one batch"),
        ({"batches": (1, 0)}, "batches is 0; it must be a whole number of at least 1"),
        ({"contexts": (0,)}, "contexts is 0; it must be a whole number of at least 1"),
        ({"starts": (-1,)}, "starts is -1; it must be a whole number of at least 0"),
        ({"chunk": 1}, "chunk is 1; it must be a whole number of at least 2"),
        ({"rounds": 0}, "rounds is 0; it must be a whole number of at least 1"),
        ({"seconds": float("nan")}, "seconds is nan; it must be from 0 to 3600"),
    ],
)
def test_bad_input_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Plan(**wrong)


def test_more_than_the_memory_is_refused() -> None:
    huge = dataclasses.replace(SHORT, batches=(10_000,), contexts=(1_000_000,))
    with pytest.raises(InputError, match="K and V of 10000000000 positions take"):
        measure(TINY, "tiny", CPU, torch.float64, huge, silent())


def test_after_ctrl_c_what_is_whole_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real, after = backends.measure_point, [2]

    def stop(*given: Any) -> Point:
        if not after[0]:
            raise KeyboardInterrupt
        after[0] -= 1
        return real(*given)

    monkeypatch.setattr(backends, "measure_point", stop)
    found = measure(TINY, "tiny", CPU, torch.float64, SHORT, silent())
    assert found.partial and len(found.points) == 2
    console = silent()
    backends.show(found, console)
    assert "Stopped half way" in written(console)
    with pytest.raises(KeyboardInterrupt):
        measure(TINY, "tiny", CPU, torch.float64, SHORT, silent())


# ---- for people, and for programs


def entry(name: str, us: float | None, ratio: float = 1.0, void: str | None = None) -> Entry:
    if us is None:
        return Entry(name, None, void)
    stats = backends.Stats.of([us * 1e-6])
    return Entry(name, 0.0123, None, stats, stats, ratio)


def made(*points: Point) -> Result:
    facts = {"gpu": None, "cores": 2, "cpu": "abacus"}
    about = {"machine": facts, "command": "minillm bench --backends"}
    model = {"name": "tiny", "dtype": "bfloat16", "device": "cpu", "heads": 4, "kv_heads": 2, "head_dim": 8}
    absent = {"nowhere": "it needs a machine that nobody has"}
    return Result(about, model, SHORT, 0.02, CEILINGS, absent, list(points))


def point(texts: int, new: int, context: int, *entries: Entry) -> Point:
    return Point(texts, new, context, 2, 1000, 1000, 50e-6, 3, list(entries))


MADE = (
    point(1, 1, 512, entry("dense", 90, 2.0), entry("gather", 180), entry("right", 100, 1.8), entry("wrong", 95, 1.9)),
    point(8, 1, 512, entry("dense", 800, 0.5), entry("gather", 400), entry("right", 100, 4.0), entry("wrong", 300, 1)),
    point(8, 1, 2048, entry("gather", 1600), entry("right", 100, 16.0), entry("wrong", None, void="it fails")),
    point(1, 6, 6, entry("dense", 70, 1.0), entry("gather", 70), entry("right", 71, 0.99), entry("wrong", 71, 0.99)),
)


def test_the_tables_say_all_and_fit() -> None:
    result, console = made(*MADE), silent()
    backends.show(result, console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "8 1 2,048 50 - 1,600 100 void" in lines and "8 1 2,048 - 1.00 x 16.0 x void" in lines
    assert "1 1 512 50 90 180 100 95" in lines and "1 1 512 2.00 x 1.00 x 1.80 x 1.90 x" in lines
    assert "right 1.2e-02 100 yes" in lines and "dense 1.2e-02 800 yes" in lines
    assert "nowhere no: it needs a machine that nobody has" in lines
    assert "wrong 1.2e-02 300 void, see below" in lines
    told = " ".join(lines)
    assert "wrong is void at 1 of 4 points; 8 x 1 new tokens with 2,048 positions: it fails." in told
    assert backends.finding(result) in told and backends.heading(result) in told
    assert "tolerance" not in told and "may be off by 0.02 (1 + |x|)" in told


def test_what_is_measured_fits_too(result: Result) -> None:
    console = silent()
    backends.show(result, console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert text.count("void") == 2 + 2 + 1 + 1 and "tiny (4/2 heads of 8), float64" in text


def test_the_fastest_of_a_point_is_bold() -> None:
    table = backends.times_table(made(*MADE))
    for i, fastest in enumerate(("dense", "right", "right", "dense")):
        cells = {str(column.header): list(column.cells)[i] for column in table.columns}
        bold = [name for name in ("dense", "gather", "right", "wrong") if cells[name].style == "bold"]  # type: ignore
        assert bold == [fastest]


def test_the_finding_in_words() -> None:
    assert backends.finding(made(*MADE)) == (
        "Fastest with one new token each: right (2 of 3), dense (1 of 3); with chunks of 6: dense (1 of 1). 8 texts "
        "that each look at 2,048 positions take 100 microseconds a layer with right, 2.00 x the floor, and 1,600 with "
        "gather."
    )
    assert backends.finding(made(MADE[3])) == "Fastest with chunks of 6: dense (1 of 1)."
    words = backends.alt_text(made(*MADE))
    assert "8 x 2,048: gather 1,600, right 100, floor 50" in words and "6:" not in words.replace("of 6:", "")


def test_the_plot_has_a_panel_for_each_number_of_texts() -> None:
    figure = backends.plot(made(*MADE))
    one, eight = figure.axes
    assert [axes.get_title(loc="left") for axes in (one, eight)] == ["1 text", "8 texts"]
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in eight.get_lines()}
    assert lines["right"] == [(512, pytest.approx(100)), (2048, pytest.approx(100))]
    assert lines["dense"] == [(512, pytest.approx(800))] and [x for x, _ in lines["wrong"]] == [512]
    assert [y for _, y in lines["floor"]] == [pytest.approx(50)] * 2
    assert len({line.get_marker() for line in eight.get_lines()}) == 5
    assert [text.get_text() for text in one.get_legend().get_texts()] == ["floor", "dense", "gather", "right", "wrong"]
    backends.plot(made(MADE[3]))  # no panel to fill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of which only the shape is there."""
    (tmp_path / "shape").mkdir()
    raw = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    }
    (tmp_path / "shape" / "config.json").write_text(json.dumps(raw))
    return tmp_path / "shape"


def test_the_command_needs_no_weights_and_writes_everything(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, picture, console = tmp_path / "out.json", tmp_path / "out.png", silent()
    arguments = (str(folder), "cpu", "float32", out, picture, console, SHORT)
    assert backends.run_command(*arguments) == 1  # one is wrong
    found = json.loads(out.read_text("utf-8"))["sections"]["backends"]
    assert found["partial"] is False and found["about"]["command"] and len(found["points"]) == 6
    assert found["model"]["name"] == "shape" and found["model"]["dtype"] == "float32"
    assert found["plan"]["batches"] == [1, 3] and found["finding"] in " ".join(written(console).split())
    assert found["points"][0]["entries"][1]["layer"]["median"] > 0 and found["alt_text"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.delitem(BACKENDS, "wrong")
    assert backends.run_command(*arguments) == 0

    def stopped(*given: Any) -> Result:
        return dataclasses.replace(made(*MADE), partial=True)

    monkeypatch.setattr(backends, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        backends.run_command(*arguments)
    assert json.loads(out.read_text("utf-8"))["sections"]["backends"]["partial"] is True


def test_the_command_refuses_before_it_measures(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "measure", lambda *_: pytest.fail("it was measured"))
    for wrong, why in (
        ({"model": "nowhere"}, "nowhere"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"json_path": tmp_path / "no" / "x"}, "there is no folder"),
        ({"plot_path": tmp_path / "x.bmp"}, "must end in one of"),
    ):
        given = {"model": str(folder), "device": "cpu", "dtype": "auto", "json_path": None, "plot_path": None} | wrong
        with pytest.raises(InputError, match=why):
            backends.run_command(**given, console=silent())


def test_the_default_plan_is_what_was_asked_for() -> None:
    plan = Plan()
    decode = [(len(chunks), chunks[0]) for chunks in plan.points() if chunks[0][1] == 1]
    assert decode == [(batch, (context - 1, 1)) for batch in (1, 8, 32, 64) for context in (128, 512, 2048)]
    assert plan.points()[12:] == [[(0, 256)], [(1024, 256)]]
