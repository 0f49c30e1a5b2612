"""Backends over the pool against attention of each sequence alone, with every slot that they may not read spoilt."""

import itertools
from collections.abc import Callable

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from test_attention import random
from test_batch import Step, request, steps
from test_model import solo
from torch import Tensor

from minillm import attention, batch
from minillm.attention import Attend
from minillm.batch import Batch, pack
from minillm.cache import KVPool
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.kernels import BACKENDS, backend
from minillm.model import Llama
from minillm.request import Request, SamplingParams

NAN = float("nan")
EXACT = {"rtol": 0, "atol": 1e-11}
every_backend = pytest.mark.parametrize("name", ["dense", "gather"])


def test_backends_are_found_by_name() -> None:
    assert {"dense", "gather"} <= BACKENDS.keys()
    assert [backend(name).__name__ for name in ("dense", "gather")] == ["DenseAttend", "GatherAttend"]
    with pytest.raises(InputError, match="backend 'abacus' is not known; use one of .*dense.*gather"):
        backend("abacus")


# ---- one step of attention


def one_step(step: Step, model: Llama, name: str, fill: float) -> tuple[Tensor, Tensor]:
    """Attention of one packed step in layer 1, and what each sequence gets alone: [T, H, D] twice."""
    lengths = [r.computed + n for r, n in step.plan]
    starts = [r.computed for r, _ in step.plan]
    keys, values = ([random(s, 2, 8, seed=seed + i) for i, s in enumerate(lengths)] for seed in (100, 200))
    queries = [random(n, 4, 8, seed=300 + i) for i, (_, n) in enumerate(step.plan)]
    expected = [
        attention.sdpa(q, k, v, attention.visible(torch.arange(start, stop), torch.arange(stop)))
        for q, k, v, start, stop in zip(queries, keys, values, starts, lengths, strict=True)
    ]
    pool = step.pool(model, fill)
    for (r, _), k, v, start in zip(step.plan, keys, values, starts, strict=True):
        pool.store(1, torch.tensor(r.slots[:start], dtype=torch.int64), k[:start], v[:start])
    packed = pack(step.plan, pool)
    q, k, v = (
        torch.cat(queries),
        *(torch.cat([t[start:] for t, start in zip(ts, starts, strict=True)]) for ts in (keys, values)),
    )
    before = [t.clone() for t in (q, k, v, packed.positions, packed.slots, pool.table)]
    out = backend(name)(pool, packed)(1, q, k, v)
    # nothing that was handed in is changed, and nothing but the new slots was written
    after = (q, k, v, packed.positions, packed.slots, pool.table)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    mine = torch.tensor([slot for r, n in step.plan for slot in r.slots[: r.computed + n]])
    free = torch.ones(step.n_slots + 1).bool().index_fill(0, mine, False)
    for memory in (pool.k, pool.v):
        untouched = torch.cat([memory[0].flatten(), memory[1][:, free].flatten()])
        assert (untouched.isnan() if fill != fill else untouched == fill).all()
    return out, torch.cat(expected)


@every_backend
@given(step=steps(), fill=st.sampled_from([NAN, NAN, 1e4, float("inf")]))
def test_each_sequence_gets_what_it_gets_alone(tiny: Llama, name: str, step: Step, fill: float) -> None:
    """hf#46765, nod-ai/amd-shark-ai#665, waybarrios/vllm-mlx#380: random lengths, slots, rows and order, with NaN or
    garbage in every other slot."""
    out, expected = one_step(step, tiny, name, fill)
    torch.testing.assert_close(out, expected, **EXACT)


@given(step=steps(most=8), split=st.integers(0, 12))
def test_gather_is_right_wherever_its_groups_split(tiny: Llama, step: Step, split: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SPLIT", split)
        out, expected = one_step(step, tiny, "gather", NAN)
    torch.testing.assert_close(out, expected, **EXACT)


@every_backend
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_single_tokens_alone(tiny: Llama, name: str, rows: int) -> None:
    """apple/axlearn#842: a step of one token each, with as many rows as heads among them."""
    plan, first = [], 0
    for row in range(rows):
        kv_len = 3 * row + 1
        plan.append((request([1] * kv_len, kv_len - 1, row, range(first, first + kv_len)), 1))
        first += kv_len
    out, expected = one_step(Step(plan, first + 1, rows, 40), tiny, name, NAN)
    torch.testing.assert_close(out, expected, **EXACT)


# ---- the whole model, step by step


def spoil(pool: KVPool, fill: float) -> None:
    pool.k.fill_(fill)
    pool.v.fill_(fill)
    pool.table.fill_(pool.k.shape[2] - 1)


def run(
    model: Llama,
    make: Callable[[KVPool, Batch], Attend],
    plans: list[list[tuple[Request, int]]],
    pool: KVPool,
) -> dict[Request, Tensor]:
    """Logits [T, V] of every token of every request, after all the steps."""
    logits: dict[Request, list[Tensor]] = {}
    for plan in plans:
        packed = pack(plan, pool)
        out = model.logits(model(packed.tokens, packed.positions, make(pool, packed)))
        for (r, n), part in zip(plan, out.split([n for _, n in plan]), strict=True):
            logits.setdefault(r, []).append(part)
            r.computed += n
    return {r: torch.cat(parts) for r, parts in logits.items()}


@every_backend
@given(data=st.data(), fill=st.sampled_from([NAN, 1e4]))
def test_logits_do_not_depend_on_company_or_chunks(tiny: Llama, name: str, data: st.DataObject, fill: float) -> None:
    """vllm#5898, tenstorrent/vllm#448, hf#46765: prompts in random chunks, in random company, in random slots."""
    texts = data.draw(st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=12), min_size=1, max_size=4))
    n_slots = sum(map(len, texts)) + 3
    slots = iter(data.draw(st.permutations(range(n_slots))))
    rows = data.draw(st.permutations(range(6)))
    requests = [
        request(text, 0, row, list(itertools.islice(slots, len(text)))) for text, row in zip(texts, rows, strict=False)
    ]
    pool = KVPool(tiny, n_slots, 6, 12)
    spoil(pool, fill)
    logits: dict[Request, Tensor] = {r: torch.empty(0, 64, dtype=torch.float64) for r in requests}
    while waiting := [r for r in requests if r.pending]:
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        plan = [(r, data.draw(st.integers(1, r.pending))) for r in chosen]
        for r, part in run(tiny, backend(name), [plan], pool).items():
            logits[r] = torch.cat((logits[r], part))
    for r in requests:
        torch.testing.assert_close(logits[r], solo(tiny, r.tokens), **EXACT)


@every_backend
def test_a_neighbours_tokens_change_nothing_at_all(tiny: Llama, name: str) -> None:
    """DeepOpt-com/WrinkleFree-Monorepo#53, huggingface/nanoVLM#204, hf#46634: bit for bit the same."""

    def logits(first: list[int]) -> list[Tensor]:
        texts, at, plan = [first, [7, 8], [9, 10, 11, 12]], 0, []
        for row, text in enumerate(texts):
            plan.append((request(text, 0, row, range(at, at + len(text))), len(text)))
            at += len(text)
        pool = KVPool(tiny, 10, 3, 4)
        spoil(pool, NAN)
        return list(run(tiny, backend(name), [plan], pool).values())

    a, b = logits([1, 2, 3, 4]), logits([60, 50, 40, 30])
    assert not torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
    assert all(t.isfinite().all() for t in (*a, *b))


@every_backend
def test_slots_used_again_hold_nothing_of_before(tiny: Llama, name: str) -> None:
    """llmmanorg/llmman#118: another text in the slots and the row of one that has gone."""
    pool = KVPool(tiny, 8, 1, 8)
    spoil(pool, NAN)
    for text in ([5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3], [40, 41, 42, 43, 44]):
        r = request(text, 0, 0, range(8))
        plans = [[(r, 2)], *([[(r, 1)]] * (len(text) - 2))]
        torch.testing.assert_close(run(tiny, backend(name), plans, pool)[r], solo(tiny, text), **EXACT)


# ---- lower precision


@every_backend
@pytest.mark.parametrize("max_running", [1, 2, 3, 8])
def test_tokens_in_float32_are_those_of_each_prompt_alone(name: str, max_running: int) -> None:
    """vllm#5898, vllm#7779, hf#29029: greedy tokens at batch 1, 2, 3 and 8."""
    model = Llama.random(TINY, dtype=torch.float32)
    prompts = [[(7 * i + j) % 64 for j in range(1 + 2 * i)] for i in range(8)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine = Engine(model, max_running=max_running, budget=max(8, max_running), max_len=64, backend=name)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        text = list(prompt)
        for _ in range(12):
            text.append(int(solo(model, text)[-1].argmax()))
        assert output.token_ids == text[len(prompt) :]


@every_backend
def test_bf16_agrees_where_the_choice_is_clear(name: str) -> None:
    """vllm#53257: in bf16 no bit is promised; logits are near, and equal argmax is asked where no tie is near."""
    model = Llama.random(TINY, dtype=torch.bfloat16)
    texts = [[(11 * i + 3 * j) % 64 for j in range(5 + 4 * i)] for i in range(8)]
    at, plan = 0, []
    for row, text in enumerate(texts):
        plan.append((request(text, 0, row, range(at, at + len(text))), len(text)))
        at += len(text)
    pool = KVPool(model, at, 8, 40)
    spoil(pool, NAN)
    tolerance, clear = 0.1, 0
    for r, logits in run(model, backend(name), [plan], pool).items():
        expected = solo(model, r.tokens).float()
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - expected).abs().max() < tolerance
        top = expected.topk(2, -1).values
        decided = top[:, 0] - top[:, 1] > 2 * tolerance
        assert torch.equal(logits.argmax(-1)[decided], expected.argmax(-1)[decided])
        clear += int(decided.sum())
    assert clear > 40
