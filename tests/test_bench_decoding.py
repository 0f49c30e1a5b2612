"""What check_gpu measures, on a CPU with a tiny model: the same functions, without a GPU's clocks and without CUDA."""

import heapq
import io
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from script import assert_drained
from test_graphs import BACKENDS_HERE, FakeRecorder

from minillm.bench import check_gpu, decoding
from minillm.bench.ceiling import Ceilings
from minillm.bench.decoding import Cell, Result, Served, floor_seconds, measure, run_all, serve
from minillm.engine import Engine
from minillm.graphs import Graphs
from minillm.kernels import BACKENDS
from minillm.kernels.gather import GatherAttend
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import make_request

CEILINGS = Ceilings(read_bytes_per_s=3e9, copy_bytes_per_s=1e9, flops_per_s=1e12)
CPU = torch.device("cpu")


class BrokenAttend(GatherAttend):
    """Fails at the first layer."""

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError("no kernel image\nand more")


class AbsentAttend(GatherAttend):
    @staticmethod
    def why_not(model: Llama) -> str:
        return "it needs a CUDA GPU, and the model is on cpu"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoding, "MOST_SECONDS", 0.0)
    more = {"broken": f"{__name__}:BrokenAttend", "absent": f"{__name__}:AbsentAttend"}
    with patch.dict(BACKENDS, BACKENDS_HERE | more):
        yield


def text_of(show: Any, *args: Any) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    show(*args, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- one cell


def test_what_a_cell_says() -> None:
    cell = Cell("x", 64, floor=0.002, seconds=0.008, turns=5, busy=0.002, replay=0.006)
    assert (cell.tokens_per_s, cell.of_floor, cell.launch_bound) == (8000, 0.25, 0.75)
    assert cell.gap == pytest.approx(0.002)
    assert replace(cell, busy=0.009).launch_bound == 0 == replace(cell, replay=0.009).gap
    empty = Cell("x", 64, floor=0.002, why_not="out of time")
    assert [empty.tokens_per_s, empty.of_floor, empty.launch_bound, empty.gap] == [None] * 4
    assert replace(cell, busy=None).launch_bound is None and replace(cell, replay=None).gap is None


def test_the_floor_moves_all_weights_and_the_live_kv(tiny: Llama) -> None:
    weights = sum(p.numel() for name, p in tiny.named_parameters() if p.dim() == 2)  # the head is the embedding
    kv = 2 * 2 * 2 * 8 * 8  # K and V, layers, heads, D, bytes
    assert floor_seconds(TINY, 8, 5, 7, CEILINGS) == pytest.approx((8 * weights + 5 * 7 * kv) / 1e9)


def test_the_shapes_have_the_sizes_of_their_names() -> None:
    """SmolLM2-135M has 134,515,008 parameters, Llama-3.2-1B 1,235,814,400."""
    for config, parameters in ((check_gpu.SMOLLM2_135M, 134_515_008), (check_gpu.LLAMA_1B, 1_235_814_400)):
        with torch.device("meta"):
            model = Llama(config)
        assert sum(p.numel() for p in model.parameters()) == parameters
    assert check_gpu.LLAMA_1B.kv_bytes_per_token(2) == 32_768


# ---- every way at every batch


def test_every_way_is_timed_at_every_batch(tiny: Llama) -> None:
    result = measure(tiny, "tiny", CEILINGS, ("gather", "fixed", "absent"), batches=(1, 3), context=8)
    assert [(c.way, c.batch) for c in result.cells] == [("gather", 1), ("fixed", 1), ("gather", 3), ("fixed", 3)]
    assert result.absent == {"absent": "it needs a CUDA GPU, and the model is on cpu"}
    for cell in result.cells:
        assert cell.seconds and cell.seconds > 0 and cell.turns >= decoding.FEWEST and cell.why_not is None
        assert cell.busy is None and cell.replay is None and cell.agrees == 1
        assert cell.floor == floor_seconds(TINY, 8, cell.batch, 8, CEILINGS)
    assert result.ratio("gather", "fixed", 3) == pytest.approx(1 / (result.ratio("fixed", "gather", 3) or 0))
    assert result.ratio("gather", "absent", 3) is None is result.ratio("gather", "fixed", 2)
    shown = text_of(decoding.show, result)
    assert "absent: it needs a CUDA GPU" in shown and shown.count("gather") == 2


def test_all_but_the_oracle_are_asked_and_the_slow_to_compile_last(tiny: Llama) -> None:
    asked: list[str] = []

    def no(name: str, model: Llama) -> str:
        asked.append(name)
        return "not today"

    with patch.object(decoding, "why_not", no):
        result = measure(tiny, "tiny", CEILINGS, batches=(1,), context=8)
    assert set(asked) == BACKENDS.keys() - {"dense"} and not result.cells
    assert "flex" not in BACKENDS or asked[-1] == "flex"


def test_graphs_are_a_way_of_their_own(tiny: Llama) -> None:
    fake = FakeRecorder()

    def record(model: Llama, pool: Any, backend: Any, most: int) -> Graphs | None:
        return Graphs(model, pool, backend, most, fake) if hasattr(backend, "fixed_shape") else None

    with patch.object(decoding, "record_graphs", record):
        result = measure(tiny, "tiny", CEILINGS, ("gather", "fixed"), batches=(3, 1), context=8)
    assert [c.way for c in result.cells] == ["gather", "fixed", "fixed graphs"] * 2
    assert list(result.recording) == ["fixed graphs"] and result.recording["fixed graphs"] > 0
    for cell in result.cells:
        assert cell.agrees == 1 and cell.seconds
        assert (cell.replay is not None) == (cell.gap is not None) == (cell.way == "fixed graphs")
    # turns, and replays of the graph that its batch has: no eager way goes through graphs, and these never eagerly
    turns = [2 + c.turns + decoding.REPLAYS + 1 for c in result.cells if c.way == "fixed graphs"]
    assert fake.replayed == [3] * turns[0] + [1] * turns[1]


def test_a_way_that_fails_says_why_and_stops_no_other(tiny: Llama) -> None:
    result = measure(tiny, "tiny", CEILINGS, ("broken", "gather"), batches=(1, 2), context=8)
    assert [(c.way, c.batch) for c in result.cells] == [("broken", 1), ("gather", 1), ("broken", 2), ("gather", 2)]
    assert [c.why_not for c in result.cells] == ["RuntimeError: no kernel image", None] * 2
    assert all(c.seconds is None for c in result.cells if c.way == "broken")
    assert "broken: RuntimeError: no kernel image" in text_of(decoding.show, result)


def test_a_recording_that_fails_says_why(tiny: Llama) -> None:
    def record(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with patch.object(decoding, "record_graphs", record):
        result = measure(tiny, "tiny", CEILINGS, ("gather",), batches=(1,), context=8)
    eager, graphs = result.cells
    assert eager.seconds and graphs.way == "gather graphs"
    assert graphs.why_not == "RuntimeError: operation not permitted when stream is capturing"


def test_what_is_too_slow_at_first_is_not_tried_again(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PATIENCE", 0.0)
    result = measure(tiny, "tiny", CEILINGS, ("gather",), batches=(1, 2), context=8)
    assert [c.why_not for c in result.cells] == ["its first step took more than 0 s"] * 2


def test_out_of_time(tiny: Llama) -> None:
    result = measure(tiny, "tiny", CEILINGS, ("gather", "fixed"), batches=(1, 2), context=8, seconds=-1)
    assert [c.why_not for c in result.cells] == ["out of time"] * 4


def test_tokens_that_differ_show(tiny: Llama) -> None:
    """The second way spoils every third row."""

    class Other(GatherAttend):
        def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = super().__call__(layer, q, k, v)
            out[::3] *= -9
            return out

    with patch.object(decoding, "backend", lambda name: Other if name == "fixed" else GatherAttend):
        cells = measure(tiny, "tiny", CEILINGS, ("gather", "fixed"), batches=(6,), context=8).cells
    assert cells[0].agrees == 1 and cells[1].agrees is not None and 4 / 6 <= cells[1].agrees < 1


# ---- continuous against static


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_steps_are_those_of_the_policy(tiny: Llama, lengths: list[int], slots: int) -> None:
    """A group takes as many steps as its longest; a queue, as many as slots need that each take the next at once."""
    engine = Engine(tiny, max_running=slots, budget=64, max_len=16)

    def group(part: list[int]) -> list[Any]:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in part]
        return [make_request([5, 6], p, TINY, None, 16) for p in params]

    def by_ticks(groups: list[Any]) -> Any:
        """With a clock that goes on by 1 at each look."""
        clock = itertools.count()
        ticking = SimpleNamespace(perf_counter=lambda: next(clock))
        with patch.multiple(decoding, now=lambda device: next(clock), time=ticking):
            return run_all(engine, groups)

    groups = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    steps = sum(map(max, groups))  # the prompts of a group are computed in its first step
    assert by_ticks([group(part) for part in groups]) == (steps + 1, steps, len(groups) / (steps + 1))
    assert_drained(engine)

    ends = [0] * slots
    starts = set()
    for n in lengths:
        starts.add(ends[0])
        heapq.heapreplace(ends, ends[0] + n)
    assert by_ticks([group(lengths)]) == (max(ends) + 1, max(ends), len(starts) / (max(ends) + 1))


def test_both_policies_serve_the_same_requests(tiny: Llama) -> None:
    with patch.object(decoding, "run_all", wraps=run_all) as ran:
        row = serve(tiny, "tiny", "gather", slots=3, requests=8, scale=0.05)
    _, static, continuous = ([list(g) for g in call.args[1]] for call in ran.call_args_list)
    assert [len(g) for g in static] == [3, 3, 2] and [len(g) for g in continuous] == [8]

    def what(groups: Any) -> Any:
        return [(r.prompt, r.limit) for r in itertools.chain(*groups)]

    assert what(static) == what(continuous)
    assert all(r.finish_reason == "length" for r in itertools.chain(*static, *continuous))
    assert row.static_steps == sum(max(r.limit for r in g) for g in static) >= row.continuous_steps
    assert not row.graphs and row.ratio == row.static / row.continuous
    assert "0.05 x" in text_of(decoding.show_served, [row])


# ---- check_gpu's part


def test_check_gpu_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with two tiny shapes: a section for each part, and targets that say why they could not be measured."""
    monkeypatch.setattr(check_gpu, "SERVED", {"SmolLM2-135M": ((2, 4),)})
    monkeypatch.setattr(check_gpu.ceiling, "measure", lambda *args: CEILINGS)
    path = tmp_path / "out.json"
    config = replace(TINY, context=4096)
    console = Console(file=io.StringIO(), width=160, highlight=False)
    shapes = {name: config for name in check_gpu.SHAPES}
    check_gpu.measure_decoding(CPU, path, console, shapes, names=("gather",), batches=(1,), context=8)
    sections = json.loads(path.read_text())["sections"]
    assert list(sections) == ["cuda_graphs", "continuous_static", "targets"]
    assert all(section["about"]["machine"]["gpu"] is None for section in sections.values())
    small, large = sections["cuda_graphs"]["results"]
    assert small["name"] == "SmolLM2-135M" and large["cells"][0]["seconds"] > 0 and large["context"] == 8
    assert large["config"]["d_model"] == 32 and large["ceilings"]["copy_bytes_per_s"] == 1e9
    short = sections["cuda_graphs"]["rows"][1]
    assert (short["model"], short["rows"], short["way"]) == ("Llama-3.2-1B", 1, "gather")
    assert short["ms"] == round(large["cells"][0]["seconds"] * 1e3, 3) and "launch_bound" not in short
    [row] = sections["continuous_static"]["rows"]
    assert row["ratio"] == row["static"] / row["continuous"] and row["slots"] == 2 and row["backend"] == "gather"
    claims = sections["targets"]["claims"]
    assert [claim["target"] for claim in claims] == [">= 5 x", "<= 2 x", ">= 3 x"]
    assert [claim["met"] for claim in claims[:2]] == [None, None] and claims[2]["measured"] == row["ratio"]
    assert "not measured: it did not run" in console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_in_short() -> None:
    good = Cell("x graphs", 64, floor=0.002, seconds=0.008, turns=5, busy=0.002, replay=0.006)
    bad = Cell("y", 8, floor=0.002, why_not="out of time")
    assert check_gpu.as_json([result_of("m", good, bad)])["rows"] == [
        {"model": "m", "rows": 64, "way": "x graphs", "ms": 8.0, "tokens/s": 8000.0, "of_floor": 0.25,
         "launch_bound": 0.75, "gap_ms": 2.0},
        {"model": "m", "rows": 8, "way": "y", "not measured": "out of time"},
    ]  # fmt: skip


def result_of(name: str, *cells: Cell, **more: Any) -> Result:
    return Result(name, "bfloat16", {}, 512, CEILINGS, more.get("absent", {}), cells=list(cells))


@pytest.mark.parametrize("good", [True, False])
def test_targets_are_compared_with_what_was_measured(good: bool) -> None:
    fast = 0.001 if good else 0.003
    small = result_of(
        "SmolLM2-135M",
        Cell("gather", 1, 1e-4, seconds=0.02),
        Cell("triton_paged", 1, 1e-4, seconds=0.01),
        Cell("triton_paged graphs", 1, 1e-4, seconds=fast, replay=fast / 2),
    )
    large = result_of("Llama-3.2-1B", Cell("triton_paged graphs", 64, 0.001, seconds=0.0015 if good else 0.0021))
    row = Served("SmolLM2-135M", "triton_paged", True, 8, 9, 1.0, 3.5 if good else 2.9, 1.0, 30, 10, 0.1, 0.2)
    claims = check_gpu.targets({"SmolLM2-135M": small, "Llama-3.2-1B": large}, [row])
    assert [claim.met for claim in claims] == [good] * 3
    measured = [10, 1.5, 3.5] if good else [10 / 3, 2.1, 2.9]
    assert [claim.measured for claim in claims] == pytest.approx(measured)
    assert claims[0].detail == ("over gather: 20.0 x" if good else "over gather: 6.67 x")
    assert claims[2].detail == "3.00 x by the number of steps"


def test_targets_that_could_not_be_measured_say_why() -> None:
    small = result_of("SmolLM2-135M", absent={"triton_paged": "it needs triton"})
    large = result_of("Llama-3.2-1B", Cell("triton_paged graphs", 64, 0.001, why_not="out of time"))
    claims = check_gpu.targets({"SmolLM2-135M": small, "Llama-3.2-1B": large}, [])
    assert [claim.detail for claim in claims] == ["not measured: it needs triton", "not measured: out of time"]


def test_a_device_that_is_not_there_has_no_busy_time() -> None:
    assert decoding.busy_seconds(lambda: None, CPU) is None
    calls: list[int] = []
    assert 0 < decoding.repeated(lambda: calls.append(1), CPU) < math.inf
    assert len(calls) == decoding.REPLAYS + 1
