"""The Triton kernel on a CPU, by triton's interpreter; test_triton_paged.py runs this file with TRITON_INTERPRET=1.

TRITON_INTERPRET=1 python -m pytest tests/triton_interpreter.py
"""

from dataclasses import replace

import numpy as np
import pytest
import test_kernels
import torch
from conftest import TINY
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_batch import Step, steps
from test_kernels import one_step
from test_triton_paged import CPU, LLAMA_1B, NAN, SMOLLM2, TOLERANCE, Heads, check, fill, shape, step_of
from triton.runtime import interpreter

from minillm.batch import Batch
from minillm.cache import KVPool
from minillm.engine import Engine
from minillm.kernels import BACKENDS, triton_paged
from minillm.kernels.triton_paged import TritonPagedAttend
from minillm.model import Llama
from minillm.request import SamplingParams
from minillm.slots import BlockSlots

NAME = "triton_paged"
EXACT = 1e-11
few = settings(max_examples=6)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 keys, tiles of 4 queries, programs of 16 rows: short texts, all that the interpreter can bear, then
    fill several of each."""
    monkeypatch.setitem(BACKENDS, NAME, "minillm.kernels.triton_paged:TritonPagedAttend")
    monkeypatch.setattr(triton_paged, "BLOCK_BYTES", 16)
    monkeypatch.setattr(triton_paged, "QUERIES", 4)
    monkeypatch.setattr(triton_paged, "ROWS", 16)


def split_attend(pool: KVPool, packed: Batch) -> TritonPagedAttend:
    """With as many splits as positions allow, one for each 4 of the table: short texts leave some without a key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_paged, "SPLIT", 4)
        patch.setattr(triton_paged, "processors", lambda device: 10_000)
        return TritonPagedAttend(pool, packed)


# ---- one step


@pytest.mark.parametrize("heads", [(2, 2, 8), (4, 2, 16), (9, 3, 24), (9, 1, 64), (3, 1, 34)], ids=str)
@settings(max_examples=3)
@given(step=steps(longest=30))
@example(step=step_of((17, 6), (0, 1), (20, 1)))
def test_each_sequence_gets_what_it_gets_alone(step: Step, heads: Heads) -> None:
    """G of 1, 2, 3 and 9 (which takes three programs for a tile), D of powers of two and not."""
    check(step, shape(heads, torch.float64, CPU), EXACT)


@few
@given(step=steps(longest=30), heads=st.sampled_from([(2, 2, 8), (3, 1, 24)]))
@example(step=step_of((20, 6), (0, 1), (30, 1), max_len=60), heads=(9, 1, 16))
def test_split_and_unsplit_agree(step: Step, heads: Heads) -> None:
    pool, packed, qkv, expected = fill(step, shape(heads, torch.float64, CPU))
    split, whole = split_attend(pool, packed), TritonPagedAttend(pool, packed)
    assert (split.splits, whole.splits) == (8, 1)
    torch.testing.assert_close(split(1, *qkv), expected, rtol=0, atol=EXACT)
    torch.testing.assert_close(whole(1, *qkv), expected, rtol=0, atol=EXACT)


@few
@given(step=steps(longest=20), fill=st.sampled_from([NAN, 1e4, float("inf")]))
def test_nothing_but_new_slots_is_written(tiny: Llama, step: Step, fill: float) -> None:
    out, expected = one_step(step, tiny, NAME, fill)
    torch.testing.assert_close(out, expected, rtol=0, atol=EXACT)


def test_blocks_of_the_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a GPU: 128 or 64 keys to a block, 16 queries to a tile, and the heads of real models."""
    monkeypatch.undo()
    for heads in (SMOLLM2, LLAMA_1B):
        check(step_of((150, 1), (0, 1), (120, 20)), shape(heads, torch.float32, CPU), 1e-5)


def test_queries_that_are_not_contiguous(tiny: Llama) -> None:
    pool, packed, (q, k, v), expected = fill(step_of((5, 3), (20, 1)), tiny)
    q = q.transpose(0, 1).contiguous().transpose(0, 1)  # [T, H, D], by heads in memory
    torch.testing.assert_close(TritonPagedAttend(pool, packed)(1, q, k, v), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "dtype, splits", [(torch.float32, 4), (torch.float16, 1), (torch.bfloat16, 1), (torch.bfloat16, 4)], ids=str
)
def test_lower_precision(dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies bfloat16 as the integers of its bits; here it gets the float32 of the same value."""

    def dot(a: interpreter.TensorHandle, b: interpreter.TensorHandle, *rest: object) -> interpreter.TensorHandle:
        return as_it_was(*(widen(t) if t.dtype.scalar.is_bf16() else t for t in (a, b)), *rest)

    def widen(t: interpreter.TensorHandle) -> interpreter.TensorHandle:
        bits = t.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    as_it_was = interpreter.interpreter_builder.create_dot
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", dot)
    monkeypatch.setattr(triton_paged, "split_count", lambda *_: splits)
    check(step_of((40, 1), (0, 1), (17, 9)), shape(SMOLLM2, dtype, CPU), TOLERANCE[dtype])


def test_it_reads_everything_at_the_call(tiny: Llama) -> None:
    """As a CUDA graph needs it: built at one step of three sequences, called at others, in other rows and slots."""
    pool, static, _, _ = fill(step_of(*[(0, 1)] * 3, max_len=32), tiny)
    attend = split_attend(pool, static)
    for computed in ([20, 3, 17], [0, 0, 30], [15, 16, 31]):
        later, packed, qkv, expected = fill(step_of(*((n, 1) for n in computed), max_len=32), tiny)
        pool.k, pool.v = later.k, later.v
        pool.table.copy_(later.table)
        for field in ("positions", "seq", "slots"):
            getattr(static, field).copy_(getattr(packed, field))
        torch.testing.assert_close(attend(1, *qkv), expected, rtol=0, atol=EXACT)


# ---- the whole model


@settings(max_examples=5)
@given(data=st.data())
def test_logits_do_not_depend_on_company_or_chunks(tiny: Llama, data: st.DataObject) -> None:
    test_kernels.check_company_and_chunks(tiny, NAME, data, NAN)


def test_slots_used_again_hold_nothing_of_before(tiny: Llama) -> None:
    test_kernels.test_slots_used_again_hold_nothing_of_before(tiny, NAME)


def test_the_engine_emits_the_same_tokens() -> None:
    """With chunked prompts, blocks anywhere, and preemption."""
    model = Llama.random(replace(TINY, n_heads=6, n_kv_heads=2), dtype=torch.float64)
    prompts = [[(7 * i + j) % 64 for j in range(1 + 4 * i)] for i in range(5)]
    params = [SamplingParams(max_tokens=3 + i, ignore_eos=True) for i in range(5)]

    def tokens(backend: str) -> list[list[int]]:
        def slots(max_running: int, max_len: int) -> BlockSlots:
            return BlockSlots(max_running, max_len, n_slots=40, size=4)

        engine = Engine(model, max_running=3, budget=8, max_len=32, backend=backend, slots=slots)
        return [output.token_ids for output in engine.generate(prompts, params)]

    assert tokens(NAME) == tokens("gather")
