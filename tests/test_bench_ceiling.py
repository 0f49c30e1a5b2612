"""The floor of a step, by hand."""

import pytest
import torch
from conftest import TINY

from minillm import native
from minillm.bench import ceiling
from minillm.bench.ceiling import Ceilings, floor_seconds, layer_weights
from minillm.bench.harness import Job, Step, run
from minillm.model import Llama

LAYERS = 2 * (32 * 8 * (4 + 4) + 4 * 8 * 32 + 3 * 32 * 48)  # qkv, o, gate with up and down: twice
HEAD = 64 * 32


def test_layer_weights_are_the_models_matrices(tiny: Llama):
    matrices = sum(p.numel() for name, p in tiny.named_parameters() if p.dim() == 2 and "blocks" in name)
    assert layer_weights(TINY) == LAYERS == matrices


def test_a_step_that_waits_for_memory():
    ceilings = Ceilings(read_bytes_per_s=1000.0, copy_bytes_per_s=900.0, flops_per_s=1e30)
    step = Step(tokens=1, rows=1, scores=10, kv_bytes=500)
    assert floor_seconds([step], TINY, 2, ceilings) == (2 * (LAYERS + HEAD) + 500) / 1000
    # half a prompt: no token is sampled, so nobody reads the head
    assert floor_seconds([Step(1, 0, 10, 500)], TINY, 2, ceilings) == (2 * LAYERS + 500) / 1000


def test_a_step_that_waits_for_arithmetic():
    ceilings = Ceilings(1e30, 1e30, flops_per_s=1000.0)
    step = Step(tokens=7, rows=3, scores=11, kv_bytes=500)
    flops = 2 * LAYERS * 7 + 2 * HEAD * 3 + 2 * (2 * TINY.head_dim) * 11
    assert floor_seconds([step], TINY, 2, ceilings) == flops / 1000


def test_steps_add_up_each_with_its_own_limit():
    ceilings = Ceilings(1e6, 1e6, 1e6)
    small, large = Step(1, 1, 1, 100), Step(500, 500, 99, 100)
    one, other = (floor_seconds([step], TINY, 8, ceilings) for step in (small, large))
    assert one == pytest.approx((8 * (LAYERS + HEAD) + 100) / 1e6)  # moving 8 bytes against 2 operations
    assert other > one
    assert floor_seconds([small, large], TINY, 8, ceilings) == one + other


def test_nothing_runs_above_its_ceiling(tiny: Llama):
    """The tiny model fits into a cache, so its floor is that of arithmetic: far below what Python takes."""
    ceilings = ceiling.measure(tiny.device, torch.float64, seconds=0.01)
    assert min(ceilings.read_bytes_per_s, ceilings.copy_bytes_per_s, ceilings.flops_per_s) > 1e6
    done = run(tiny, "cached", [Job((3, 4, 5), 4)])
    assert 0 < floor_seconds(done.counts.steps, TINY, 8, ceilings) < done.summary.wall


def test_the_fastest_of_several_counts(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 3.0, 3.0, 4.0, 4.0, 9.0])  # start and stop of three calls: 3, 1 and 5 s
    calls: list[int] = []
    monkeypatch.setattr(ceiling, "now", lambda device: next(clock))
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    assert ceiling.fastest(lambda: calls.append(1), torch.device("cpu"), 9.0) == 1.0
    assert len(calls) == 4  # and one to warm up


@pytest.mark.parametrize("seconds", [(4.0, 2.0), (2.0, 4.0)])
def test_the_faster_of_two_products_counts(seconds: tuple[float, float], monkeypatch: pytest.MonkeyPatch):
    """torch's and, where it is compiled, our own: what can be beaten is no ceiling."""
    try:
        native.library("layer", torch.float32)
    except native.NotCompiled as error:
        pytest.skip(f"no C code here: {error}")
    times = iter((1.0, 1.0, *seconds))  # reading, copying and the two
    monkeypatch.setattr(ceiling, "fastest", lambda *_: next(times))
    assert ceiling.measure(torch.device("cpu"), torch.float32).flops_per_s == 2 * 2048**3 / 2.0


def test_the_better_of_two_measurements_counts():
    assert Ceilings(1.0, 5.0, 2.0).best(Ceilings(3.0, 4.0, 1.0)) == Ceilings(3.0, 5.0, 2.0)
