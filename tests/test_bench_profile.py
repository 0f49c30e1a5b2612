"""Where a step's time goes: whose a moment is, what is called how often, the floor by hand. No time is asserted."""

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from minillm.bench import ceiling
from minillm.bench import profile as profiling
from minillm.bench.ceiling import Ceilings
from minillm.bench.floor import Floor, linears
from minillm.bench.harness import Step
from minillm.bench.prefill import Spread
from minillm.bench.profile import FUNCTIONS, PARTS, TURNS, Marks, Plan, Result, in_parts, measure, watched
from minillm.bench.steady import Place, Steady
from minillm.errors import InputError
from minillm.fusing import FusedBlock, fuse
from minillm.model import Llama

CPU = torch.device("cpu")
SMALL = Plan(running=3, context=7, prompt=5, steps=5, backend="gather")


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module", autouse=True)
def known_machine():
    """Its bandwidth and arithmetic are measured elsewhere, and that takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling, "measure", lambda *_: Ceilings(2e9, 1e9, 1e10))
        yield


@pytest.fixture(scope="module")
def result(tiny: Llama) -> Result:
    return measure(tiny, "tiny", SMALL, silent())


@pytest.fixture
def steady(tiny: Llama) -> Steady:
    found = Steady(tiny, 3, 7, "gather")
    found.put(Place.decode(3, 7))
    found.fill()
    return found


# ---- whose a moment is


class Hand(Marks):
    """A clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.time = 0

    def stamp(self) -> int:
        return self.time

    def spend(self, seconds: int) -> None:
        self.time += seconds


def test_time_belongs_to_the_innermost_part():
    marks = Hand()
    inner = marks.wrap("inner", lambda: marks.spend(2))

    def outer() -> None:
        marks.spend(1)
        inner()
        marks.spend(10)
        inner()
        marks.spend(100)

    whole = marks.wrap("outer", outer)
    whole()
    marks.spend(1000)  # between two calls of the outermost: nobody's
    whole()
    assert marks.take() == {"outer": (222, 2), "inner": (8, 4)}
    whole()
    assert marks.take() == {"outer": (111, 1), "inner": (4, 2)}


Tree = st.recursive(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.just(())),
    lambda trees: st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.lists(trees, max_size=3)),
    max_leaves=8,
)


@given(Tree)
def test_the_parts_add_up_to_the_whole(tree: Any):
    """Calls within calls, of the same part or of others: each has the time it spends itself."""
    marks, own = Hand(), {}

    def call(node: Any) -> None:
        part, seconds, below = node
        spent, calls = own.get(part, (0, 0))
        own[part] = spent + seconds, calls + 1

        def body() -> None:
            marks.spend(seconds)
            for one in below:
                call(one)

        marks.wrap(part, body)()

    call(tree)
    found = marks.take()
    assert found == own and sum(seconds for seconds, _ in found.values()) == marks.time


def test_a_part_that_fails_ends_too():
    marks = Hand()

    def fails() -> None:
        marks.spend(3)
        raise ValueError

    def goes_on() -> None:
        with pytest.raises(ValueError):
            marks.wrap("fails", fails)()
        marks.spend(4)

    marks.wrap("outer", goes_on)()
    assert marks.open == [] and marks.take() == {"outer": (4, 1), "fails": (3, 1)}


def test_on_a_gpu_marks_are_events_that_are_read_at_the_end(monkeypatch: pytest.MonkeyPatch):
    """Nobody waits while the step runs: an event's time is known after the device was waited for."""
    clock, waited = [0], [False]

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, other: "Event") -> float:
            assert waited[0]
            return 1000.0 * (other.at - self.at)

    def passes(seconds: int) -> None:
        clock[0] += seconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(profiling, "now", lambda device: waited.__setitem__(0, True))
    marks = Marks(torch.device("cuda"))
    inner = marks.wrap("inner", lambda: passes(2))
    marks.wrap("outer", lambda: (passes(1), inner(), passes(4)))()
    assert not waited[0] and marks.take() == {"outer": (5.0, 1), "inner": (2.0, 1)}


# ---- watching a step


def state(steady: Steady) -> list[Any]:
    """What every owner of a watched function has, but for the two lists that each step makes anew."""
    engine = steady.engine
    owners = [engine, engine.scheduler, engine.pool, *engine.model.modules()]
    functions = [getattr(sys.modules[module], name, None) for module, name in FUNCTIONS]
    anew = ("_inbox", "running")
    return [{k: id(v) for k, v in vars(owner).items() if k not in anew} for owner in owners] + functions


def test_a_watched_step_is_the_same_step_and_leaves_no_trace(steady: Steady):
    before = state(steady)
    plain = [event.token for event in steady.turn()[1]]
    marks = Marks(CPU)
    with watched(steady.engine, marks):
        assert state(steady) != before
        assert [event.token for event in steady.turn()[1]] == plain
    assert marks.take() and state(steady) == before
    assert [event.token for event in steady.turn()[1]] == plain and marks.take() == {}


def test_what_fails_inside_leaves_no_trace_either(steady: Steady, monkeypatch: pytest.MonkeyPatch):
    before = state(steady)
    with pytest.raises(KeyboardInterrupt), watched(steady.engine, Marks(CPU)):
        raise KeyboardInterrupt
    assert state(steady) == before


def counted(steady: Steady) -> dict[str, int]:
    marks = Marks(CPU)
    with watched(steady.engine, marks):
        steady.turn()
    return {part: calls for part, (_, calls) in marks.take().items()}


def test_calls_by_hand(steady: Steady):
    """Two layers; three texts of one length are one rectangle."""
    found = counted(steady)
    once = ("schedule", "pack", "attention: prepare", "embed", "layers", "logits", "sampling", "update", "left over")
    assert {part: found.pop(part) for part in once} == dict.fromkeys(once, 1)
    assert found.pop("rotary") == 2 + 2 and found.pop("norms") == 2 * 2 + 1
    assert found.pop("residuals") == 2 * 2  # of a block and its MLP
    twice = ("qkv", "heads", "o", "gate_up", "silu * up", "down", "attention: store", "attention: gather")
    assert {part: found.pop(part) for part in twice} == dict.fromkeys(twice, 2)
    assert found.pop("attention: sums") == 2
    assert found == {}


def test_all_parts_are_named_in_the_order_of_a_step(result: Result):
    names = [part.name for part in result.profiles[0].parts]
    assert names == [name for name in PARTS if name in names]
    assert all(part.where == PARTS[part.name] for part in result.profiles[0].parts)
    assert sum(part.share for part in result.profiles[0].parts) == pytest.approx(1)


class Fused(nn.Module):
    """Something in place of a norm that no list knows of, under a name that none knows either."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.quick = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quick(x)


def test_a_module_put_in_place_of_another_is_seen(tiny: Llama):
    """By the attribute it stands in; and one with a new name is a part of that name, before what is left over."""
    model = Llama.random(TINY, seed=0, dtype=torch.float64)
    model.blocks[1].mlp_norm = Fused(model.blocks[1].mlp_norm)
    steady = Steady(model, 1, 4, "gather")
    steady.put(Place.decode(1, 4))
    steady.fill()
    found = counted(steady)
    assert found["norms"] == 5 and found["quick"] == 1
    assert profiling.in_order(list(found))[-2:] == ["quick", "left over"]


@pytest.mark.parametrize("bias", [False, True])
def test_the_halves_of_a_layer_are_parts_where_a_step_goes_through_them(bias: bool):
    config = dataclasses.replace(TINY, d_model=64, head_dim=64, d_ff=64, qkv_bias=bias)
    model = fuse(Llama.random(config, seed=0, dtype=torch.float64))
    if not isinstance(model.blocks[0], FusedBlock):
        pytest.skip("no C code here")
    steady = Steady(model, 5, 4, "gather")
    steady.put(Place.decode(5, 4))
    steady.fill()
    found = counted(steady)
    halves, whole = (found.get(name, 0) for name in ("before attention", "down"))
    assert (halves, whole) == ((0, config.n_layers) if bias else (config.n_layers, 0))
    assert found.get("after attention", 0) == halves


def test_a_function_that_is_gone_is_left_out(steady: Steady, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FUNCTIONS, ("minillm.model", "no_such_function"), "nothing")
    assert "nothing" not in counted(steady)


# ---- the floor


def test_the_linears_alone_are_all_of_them_in_order(tiny: Llama):
    seen: list[tuple[str, tuple[int, ...]]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.append((name, tuple(args[0].shape))))
        for name, module in tiny.named_modules()
        if not isinstance(module, nn.ModuleList)
    ]
    linears(tiny, 5, 3)()
    for hook in hooks:
        hook.remove()
    expected = []
    for i in range(2):
        expected += [(f"blocks.{i}.attn.qkv", (5, 32)), (f"blocks.{i}.attn.o", (5, 32))]
        expected += [(f"blocks.{i}.mlp.gate_up", (5, 32)), (f"blocks.{i}.mlp.down", (5, 48))]
    assert seen == [*expected, ("head", (3, 32))]


def test_the_floor_by_hand():
    """K and V at the speed of a copy, however fast reading is; or the scores' arithmetic, if that takes longer."""
    step = Step(tokens=4, rows=2, scores=30, kv_bytes=500)
    slow = Floor.of(7.0, step, TINY, 8, Ceilings(read_bytes_per_s=1e9, copy_bytes_per_s=100.0, flops_per_s=1e9))
    assert (slow.linears, slow.attention, slow.total) == (7.0, 5.0, 12.0)
    busy = Floor.of(7.0, step, TINY, 8, Ceilings(1e30, 1e30, flops_per_s=10.0))
    assert busy.attention == 4 * TINY.head_dim * 30 / 10.0
    assert busy.bytes_alone > busy.attention


def test_parts_are_medians_of_the_steps():
    steps = [{"qkv": (s, 2), "new": (1.0, 1), "left over": (3.0, 1)} for s in (1.0, 9.0, 4.0)]
    qkv, new, rest = in_parts(steps)
    assert (qkv.name, qkv.seconds, qkv.share, qkv.calls) == ("qkv", 4.0, 0.5, 2)
    assert (new.name, new.where, new.share) == ("new", "", 0.125) and rest.name == "left over"


# ---- all of it


def test_counts_of_both_steps_by_hand(result: Result):
    decode, prefill = result.profiles
    each = TINY.kv_bytes_per_token(8)
    assert (decode.kind, decode.tokens, decode.rows, decode.kv_bytes) == ("decode", 3, 3, 3 * 7 * each)
    assert (prefill.kind, prefill.tokens, prefill.rows, prefill.kv_bytes) == ("prefill", 5, 1, 5 * each)
    assert prefill.scores == 15 * TINY.n_layers * TINY.n_heads
    for one in result.profiles:
        assert one.share == pytest.approx(one.floor.total / one.step.median)
        assert one.replayed is None  # no CUDA graphs here


def test_without_a_prompt_there_is_one_profile(tiny: Llama):
    found = measure(tiny, "tiny", dataclasses.replace(SMALL, prompt=0), silent())
    assert [one.kind for one in found.profiles] == ["decode"]


def test_turns_are_interleaved_and_the_first_of_each_is_not_timed(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """Plain, watched, Linears alone, again and again. Here the first of each takes 100 s."""
    order: list[str] = []
    clock = [0.0]
    turn = Steady.turn

    def alone() -> None:
        order.append("linears")
        clock[0] += 100.0 if order.count("linears") == 1 else 3.0

    def noted(self: Steady) -> Any:
        kind = "watched" if "step" in vars(self.engine) else "plain"
        order.append(kind)
        return 100.0 if order.count(kind) == 1 else 2.0, turn(self)[1]

    monkeypatch.setattr(Steady, "turn", noted)
    monkeypatch.setattr(profiling, "linears", lambda *sizes: alone)
    monkeypatch.setattr(profiling, "now", lambda device: clock[0])
    place, ceilings = Place.decode(2, 4), Ceilings(1.0, 1.0, 1.0)
    found = profiling.profile(tiny, "decode", place, 2 * TURNS, "gather", ceilings)
    assert order == ["plain", "watched", "linears"] + TURNS * (2 * ["plain"] + 2 * ["watched"] + 2 * ["linears"])
    assert found.step == found.watched == Spread(2.0, 2.0, 2.0) and found.cost_of_watching == 0.0
    assert found.floor.linears == 3.0


def test_graphs_are_timed_beside_and_never_watched(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """A replayed step calls no function that could be watched."""
    seen: list[tuple[bool, bool]] = []
    make, turn = Steady.__init__, Steady.turn

    def with_graphs(self: Steady, *args: Any) -> None:
        make(self, *args)
        self.engine.graphs = lambda plan: self.engine._forward(plan)

    def noted(self: Steady) -> Any:
        seen.append((self.engine.graphs is not None, "step" in vars(self.engine)))
        return (1.0 if self.engine.graphs else 3.0), turn(self)[1]

    monkeypatch.setattr(Steady, "__init__", with_graphs)
    monkeypatch.setattr(Steady, "turn", noted)
    found = profiling.profile(tiny, "decode", Place.decode(2, 4), TURNS, "gather", Ceilings(1.0, 1.0, 1.0))
    assert found.replayed == Spread(1.0, 1.0, 1.0) and found.step.median == found.watched.median == 3.0
    assert seen == (1 + TURNS) * [(False, False), (True, False), (False, True)]


def test_the_table_fits_and_its_last_lines_are_step_and_floor(result: Result):
    console = silent(width=80)
    profiling.show(result, console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    lines = [line.split() for line in text.splitlines()]
    one = result.profiles[0]
    step = next(i for i, line in enumerate(lines) if line[:1] == ["step"])
    assert lines[step] == ["step", "watched", f"{one.watched.median * 1e3:,.2f}"]
    assert lines[step + 1] == ["step", "not", "watched", f"{one.step.median * 1e3:,.2f}"]
    assert lines[step + 2] == ["floor", f"{one.floor.total * 1e3:,.2f}", f"{one.share:.1%}"]
    for part in one.parts:
        assert f"{part.name} " in text and part.where in text
    told = " ".join(text.split())
    assert f"{one.share:.0%} of it" in told and "a step of 3 decoding at context 7" in told


def test_a_replayed_step_has_its_own_lines(result: Result):
    one = dataclasses.replace(result.profiles[0], replayed=Spread(0.5, 0.4, 0.6))
    console = silent(width=80)
    console.print(profiling.table(one))
    lines = [line.split() for line in written(console).splitlines()]
    assert ["step", "from", "CUDA", "graphs", "500.00"] in lines
    assert f"{one.floor.bytes_alone / 0.5:.1%}" in next(line for line in lines if line[:2] == ["bytes", "alone"])


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"running": 0}, "running is 0; it must be from 1"),
        ({"context": 0}, "context is 0"),
        ({"prompt": -1}, "prompt is -1"),
        ({"steps": TURNS - 1}, f"steps is {TURNS - 1}; it must be from {TURNS}"),
        ({"backend": "best"}, "backend 'best' is not known"),
    ],
)
def test_plans_that_make_no_sense_are_refused(asked: dict, why: str):
    with pytest.raises(InputError, match=why):
        Plan(**asked)


def test_more_than_the_context_is_refused():
    Plan(context=256, prompt=256).check(TINY)
    for asked in ({"context": 257}, {"prompt": 257}):
        with pytest.raises(InputError, match="is 257; the model's context is 256"):
            Plan(**({"context": 9, "prompt": 9} | asked)).check(TINY)


def test_after_ctrl_c_what_is_whole_is_kept(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    right, left = profiling.profile, [1]

    def stopped(*args: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return right(*args)

    monkeypatch.setattr(profiling, "profile", stopped)
    found = measure(tiny, "tiny", SMALL, silent())
    assert found.partial and [one.kind for one in found.profiles] == ["decode"]
    with pytest.raises(KeyboardInterrupt):
        measure(tiny, "tiny", SMALL, silent())


def test_the_command_writes_everything(
    real_weights: Path, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def measured(model: Llama, name: str, plan: Plan, console: Console) -> Result:
        asked.append((name, plan))
        return dataclasses.replace(result, partial=len(asked) == 2)

    monkeypatch.setattr(profiling, "measure", measured)
    monkeypatch.setattr(profiling, "load_model", lambda *_: None)
    arguments = SMALL, str(real_weights), "cpu", "float32", tmp_path / "out.json", silent()
    assert profiling.run_command(*arguments) == 0
    assert asked == [(real_weights.name, SMALL)]
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))["sections"]["profile"]
    assert found["partial"] is False and found["backend"] == "gather" and found["about"]["command"]
    assert found["finding"] == profiling.finding(result) and found["plan"]["running"] == 3
    assert [one["kind"] for one in found["profiles"]] == ["decode", "prefill"]
    assert found["profiles"][0]["parts"][0].keys() == {"name", "where", "seconds", "share", "calls"}
    assert found["profiles"][0]["floor"].keys() == {"linears", "attention", "bytes_alone"}
    with pytest.raises(KeyboardInterrupt):
        profiling.run_command(*arguments)
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["sections"]["profile"]["partial"] is True


def test_bad_input_is_refused_before_the_weights_are_loaded(
    real_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def loaded(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(profiling, "load_model", loaded)
    for plan, path, why in (
        (Plan(context=9000), None, "context is 9000; the model's context is 8192"),
        (SMALL, tmp_path / "no" / "x.json", "there is no folder"),
    ):
        with pytest.raises(InputError, match=why):
            profiling.run_command(plan, str(real_weights), "cpu", "auto", path, silent())
