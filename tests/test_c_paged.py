"""Attention in C against attention of each sequence alone, with every slot that it may not read spoilt."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from builds import builds, compiled_for
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import random
from test_batch import Step, request, steps
from test_kernels import check_company_and_chunks, one_step
from test_model import solo

from minillm import attention, native
from minillm.batch import pack
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.kernels import why_not
from minillm.kernels.c_paged import CPagedAttend
from minillm.model import Llama
from minillm.params import SamplingParams

NAN = float("nan")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 0.02}
SHAPES = {(H, Hkv, D): replace(TINY, n_heads=H, n_kv_heads=Hkv, head_dim=D) for H, Hkv, D in
          ((2, 2, 32), (4, 2, 32), (9, 3, 64), (9, 1, 32), (2, 1, 128))}  # fmt: skip

try:
    native.library("attention", torch.float64, D=32, G=1)
except native.NotCompiled as error:
    pytest.skip(f"no C code here: {error}", allow_module_level=True)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25)
@given(
    step=st.one_of(steps(), steps(most=3, longest=140)),
    fill=st.sampled_from([NAN, 1e4, float("inf")]),
    dtype=st.sampled_from([*TOLERANCE]),
)
def test_each_sequence_gets_what_it_gets_alone(
    shape: tuple[int, int, int], step: Step, fill: float, dtype: torch.dtype
) -> None:
    """Contexts of one key and of more than a piece of 64, chunks and single tokens, in slots that lie anywhere."""
    out, expected = one_step(step, Llama.random(SHAPES[shape], dtype=dtype), "c_paged", fill)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("build", builds())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*TOLERANCE])
def test_blocks_of_queries(build: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Every kind of end of a block and of a piece, for two neighbours with a text that decodes between them."""
    model = Llama.random(SHAPES[shape], dtype=dtype)
    with compiled_for(build):
        for n, start in product((15, 16, 17, 31, 32, 33, 48, 80), (0, 1, 15, 31, 33, 96)):
            sizes = [(start, n), (40, 1), (97 - start, 96 - n)]  # computed, new
            plan, used = [], 0
            for row, (computed, new) in enumerate(sizes):
                plan.append((request([1] * (computed + new), computed, row, range(used, used + computed + new)), new))
                used += computed + new
            out, expected = one_step(Step(plan, used + 3, 3, 200), model, "c_paged", NAN)
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
def test_every_length_of_the_last_piece(length: int) -> None:
    model = Llama.random(SHAPES[4, 2, 32], dtype=torch.float64)
    plan = [(request([1] * length, length - 1, 0, range(length)), 1)]
    out, expected = one_step(Step(plan, length, 1, length), model, "c_paged", NAN)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [*TOLERANCE])
@pytest.mark.parametrize("scale", [1e-3, 30.0, 3000.0])
def test_scores_of_any_size(dtype: torch.dtype, scale: float) -> None:
    """The largest score may come first, last, or be so large that all others vanish."""
    model = Llama.random(SHAPES[4, 2, 32], dtype=dtype)
    for order in (torch.arange(200), torch.arange(199, -1, -1)):
        pool = Step([], 200, 1, 200).pool(model)
        k = (order[:, None, None] * scale / 200 * torch.ones(200, 2, 32)).to(dtype)
        v = random(200, 2, 32).to(dtype)
        q = torch.full((1, 4, 32), 0.1, dtype=dtype)
        pool.store(1, torch.arange(199), k[:-1], v[:-1])
        pool.table[0, :199] = torch.arange(199)
        packed = pack([(request([1] * 200, 199, 0, range(200)), 1)], pool)
        out = CPagedAttend(pool, packed)(1, q, k[-1:], v[-1:])
        expected = attention.sdpa(q.double(), k.double(), v.double(), torch.ones(1, 200).bool())
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_is_not_a_number_is_not_hidden(bad: float) -> None:
    """NaN and infinity in what a query may see come out as NaN, and only in that sequence."""
    model = Llama.random(SHAPES[4, 2, 32], dtype=torch.float32)
    plan = [(request([1] * 3, 0, 0, range(3)), 3), (request([1] * 2, 0, 1, range(3, 5)), 2)]
    pool = Step(plan, 5, 2, 5).pool(model)
    q, k, v = random(5, 4, 32).float(), random(5, 2, 32).float(), random(5, 2, 32).float()
    k[1] = bad
    out = CPagedAttend(pool, pack(plan, pool))(1, q, k, v)
    assert out[1:3].isnan().any(-1).all()
    assert out[[0, 3, 4]].isfinite().all()


def test_the_number_of_threads_changes_nothing() -> None:
    model = Llama.random(SHAPES[9, 3, 64], dtype=torch.bfloat16)
    plan = [(request([1] * n, n - 1, i, range(first, first + n)), 1)
            for i, (first, n) in enumerate(((0, 5), (5, 100), (105, 70)))]  # fmt: skip
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(one_step(Step(plan, 175, 3, 100), model, "c_paged", NAN)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@settings(max_examples=25)
@given(data=st.data(), fill=st.sampled_from([NAN, 1e4]))
def test_logits_do_not_depend_on_company_or_chunks(data: st.DataObject, fill: float) -> None:
    check_company_and_chunks(Llama.random(SHAPES[4, 2, 32], dtype=torch.float64), "c_paged", data, fill)


@pytest.mark.parametrize("config", [SHAPES[4, 2, 32], replace(SHAPES[2, 1, 128], qk_norm=True, qkv_bias=True)])
def test_the_engine_makes_the_naive_tokens(config: object) -> None:
    model = Llama.random(config, dtype=torch.float64)  # type: ignore[arg-type]
    prompts = [[(7 * i + j) % 64 for j in range(1 + 9 * i)] for i in range(8)]
    engine = Engine(model, max_running=3, budget=16, max_len=100, backend="c_paged")
    for prompt, output in zip(
        prompts, engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True)), strict=True
    ):
        text = list(prompt)
        for _ in range(6):
            text.append(int(solo(model, text)[-1].argmax()))
        assert output.token_ids == text[len(prompt) :]


def test_what_it_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Llama.random(TINY)
    assert why_not("c_paged", narrow) == "its head dim must be a multiple of 32, and it is 8"
    with pytest.raises(InputError, match="backend 'c_paged' cannot run this model here: its head dim"):
        Engine(narrow, backend="c_paged")
    half = Llama.random(SHAPES[2, 2, 32], dtype=torch.float16)
    assert why_not("c_paged", half) == "there is no C code for float16"
    assert why_not("c_paged", Llama.random(SHAPES[2, 2, 32]).to("meta")) == (
        "it runs on a CPU, and the model is on meta"
    )
