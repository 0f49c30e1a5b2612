"""What lesson 12 hands out keeps the rules of the real thing: the graph that replays on a CPU, the count of launches,
and the device that works while the host does something else."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache import KVPool
from minillm.lab.checks import c12
from minillm.lab.checks.c12 import LAST, Device, FakeGraph, Static, live_bytes, operators

# ---- the graph


def test_what_is_written_into_the_old_memory_is_seen_and_a_new_tensor_is_not():
    box = {"x": torch.tensor([1.0])}
    graph = FakeGraph(lambda _: box["x"] * 2, None)
    box["x"].copy_(torch.tensor([3.0]))
    graph.replay()
    assert graph.output.item() == 6
    box["x"] = torch.tensor([5.0])
    graph.replay()
    assert graph.output.item() == 6


def test_an_address_is_kept_even_if_the_tensor_gets_other_memory():
    x = torch.tensor([1.0])
    graph = FakeGraph(lambda x: x + 1, x)
    x.data = torch.tensor([9.0])
    graph.replay()
    assert graph.output.item() == 2


def test_a_number_of_python_is_frozen_and_python_does_not_run_again():
    calls = []
    scale = {"by": 2}

    def work(x):
        calls.append(1)
        return x * scale["by"]

    graph = FakeGraph(work, torch.tensor([1.0]))
    scale["by"] = 10
    graph.replay()
    graph.replay()
    assert graph.output.item() == 2 and len(calls) == 1 and graph.replays == 2


def test_the_output_is_written_over_by_the_next_replay():
    x = torch.tensor([1.0])
    graph = FakeGraph(lambda x: x + 1, x)
    graph.replay()
    first = graph.output
    x.fill_(7)
    graph.replay()
    assert first.item() == 8 and first.data_ptr() == graph.output.data_ptr()


def test_capturing_computes_nothing():
    x, memory = torch.tensor([1.0]), torch.zeros(3)

    def work(x):
        memory[1:2].copy_(x)
        return memory + 1

    graph = FakeGraph(work, x)
    assert memory.tolist() == [0, 0, 0] and graph.output.isnan().all()
    graph.replay()
    assert memory.tolist() == [0, 1, 0] and graph.output.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x * x[0].item(),
        lambda x: x[: int(x.max())],
        lambda x: x + 1 if x[0] > 0 else x,
        lambda x: torch.tensor(x.tolist()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: x.cpu() + 1,
    ],
    ids=["item", "int", "if", "tolist", "mask", "nonzero", "numpy", "cpu"],
)
def test_no_value_can_be_asked_for_while_it_is_captured(asks):
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        FakeGraph(asks, torch.tensor([1.0, 2.0]))


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_a_replayed_step_is_the_step(lengths: list[int], seed: int):
    """Ids, and all that it leaves in the pool: captured once with nothing in the buffers, then filled."""
    scene = c12.scene(seed, lengths, 6)
    pool = scene.pool
    pool.k.nan_to_num_(0.5)
    pool.v.nan_to_num_(0.5)
    before = pool.k.clone(), pool.v.clone()
    work = partial(c12.one_step, c12.right_attend_static, c12.model(), pool)
    static = Static.fresh(6, 12, c12.SCRATCH)
    graph = FakeGraph(work, static)
    assert torch.equal(pool.k, before[0]) and torch.equal(pool.v, before[1])
    c12.right_fill(static, scene.rows, c12.SCRATCH)
    graph.replay()
    replayed = pool.k.clone(), pool.v.clone()
    pool.k.copy_(before[0])
    pool.v.copy_(before[1])
    assert torch.equal(graph.output, work(static))
    assert torch.equal(pool.k, replayed[0]) and torch.equal(pool.v, replayed[1])


# ---- counts


def test_views_and_taking_memory_launch_nothing():
    x = torch.ones(4, 6)
    found = operators(lambda: x.t().view(6, 4)[None].expand(3, 6, 4).reshape(18, 4)[1:].split(2))
    assert [op.name for op in found if op.launches] == ["clone"]  # reshape must copy what is expanded
    found = operators(lambda: torch.empty(3).fill_(1).add_(2) * 3)
    assert [op.name for op in found if op.launches] == ["fill_", "add_", "mul"]


def test_launches_go_with_the_layers_alone():
    def count(rows: int, **changes: int) -> int:
        config = c12.replace(c12.TINY, **changes)
        with torch.device("meta"):
            model = c12.Llama(config)
        pool = KVPool(model, 8 * rows, rows, 8)
        step = partial(c12.one_step, c12.right_attend_static, model, pool, Static.fresh(rows, 8, 8 * rows, "meta"))
        return sum(op.launches for op in operators(step))

    assert count(2) == count(64) == count(2, d_ff=96, vocab_size=500)
    assert count(2, n_layers=5) - count(2, n_layers=4) == count(2, n_layers=2) - count(2, n_layers=1) > 10


def test_memory_is_counted_as_long_as_it_is_used():
    x = torch.ones(1000)  # 4,000 bytes
    chain = FakeGraph(lambda x: ((x + 1) * 2) - 3, x)
    assert live_bytes(chain) == 8000  # one that is read, one that is written
    kept = FakeGraph(lambda x: (x + 1) + ((x * 2) - 3), x)
    assert live_bytes(kept) == 12000
    assert live_bytes(FakeGraph(lambda x: x.view(10, 100).t(), x)) == 0


def test_arithmetic_and_bytes_of_a_product():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    [op] = [op for op in operators(lambda: a @ b) if op.launches]
    assert c12.arithmetic(op) == 2 * 3 * 5 * 7 and c12.bytes_moved(op) == 4 * (15 + 35 + 21)
    table = torch.ones(1000, 4)
    [op] = operators(lambda: torch.nn.functional.embedding(torch.tensor([1, 2]), table))[-1:]
    assert c12.bytes_moved(op) == 2 * 2 * 4 * 4  # the rows looked up, not the table


# ---- the device


def test_a_device_samples_each_text_and_knows_the_last_token():
    device = Device({"a": [5, 6, 7, 8]})
    device.start({"a": 5})
    device.start({"a": LAST})
    assert device.finish() == {"a": 6}
    device.start({"a": 7})  # the token itself is as good
    assert device.finish() == {"a": 7} and device.finish() == {"a": 8} and device.idle == 0


def test_a_wrong_token_leads_astray_for_good():
    device = Device({"a": [5, 6, 7, 8]})
    device.start({"a": 6})
    assert device.finish() == {"a": -2}
    device.start({"a": LAST})
    assert device.finish() == {"a": -2} and device.idle == 1


def test_a_device_refuses_what_cannot_be():
    device = Device({"a": [5, 6], "b": [5, 6]}, most_steps=3)
    with pytest.raises(RuntimeError, match="wait for ever"):
        device.finish()
    with pytest.raises(ValueError, match="nobody"):
        device.start({})
    device.start({"a": 5})
    with pytest.raises(ValueError, match="not in the step before"):
        device.start({"b": LAST})
    device.start({"a": LAST})
    with pytest.raises(RuntimeError, match="two steps"):
        device.start({"a": LAST})
    device.finish()
    device.start({"a": LAST})
    device.finish()
    with pytest.raises(RuntimeError, match="ended long ago"):
        device.start({"a": LAST})
