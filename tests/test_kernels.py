"""Backends over the pool against attention of each sequence alone, with every slot that they may not read spoilt."""

import inspect
import itertools
import random as rnd
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import random
from test_batch import Step, request, steps
from test_model import solo
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from minillm import attention, batch
from minillm.attention import Attend
from minillm.batch import Batch, pack
from minillm.cache import KVPool
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.kernels import BACKENDS, backend, flex, why_not
from minillm.kernels.flex import FlexAttend
from minillm.kernels.varlen import PAGE, VarlenAttend
from minillm.model import Llama
from minillm.request import Request, SamplingParams

NAN = float("nan")
EXACT = {"rtol": 0, "atol": 1e-11}


# ---- what stands in for code that cannot run here


def flash(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    cu_seq_q: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """What torch documents of varlen_attn, by hand: sequence i has queries cu_seq_q[i] .. cu_seq_q[i + 1] - 1 and the
    i-th keys and values [S, Hkv, D]. The last query stands at the last key; a query sees from `left` keys before to
    `right` after where it stands, all where that is -1. Only float16 and bfloat16 are taken on a GPU; here, all."""
    assert cu_seq_q.dtype == torch.int32 and type(max_q) is type(max_k) is int
    assert int(cu_seq_q[0]) == 0 and int(cu_seq_q[-1]) == len(q) and len(cu_seq_q) == len(keys) + 1
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max(lengths) and max_k == max(map(len, keys))
    left, right = window_size
    out = []
    for queries, k, v in zip(q.split(lengths), keys, values, strict=True):
        n, S, group = len(queries), len(k), q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [S, H, D]
        stands, key = torch.arange(S - n, S)[:, None], torch.arange(S)  # [n, 1], [S]
        hidden = torch.zeros(n, S, dtype=torch.bool)
        if left >= 0:
            hidden |= key < stands - left
        if right >= 0:
            hidden |= key > stands + right
        scores = torch.einsum("thd,shd->hts", queries, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        out.append(torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(out)


def ends(keys: Tensor, values: Tensor, cu_seq_k: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    assert cu_seq_k.dtype == torch.int32 and keys.shape == values.shape
    assert int(cu_seq_k[0]) == 0 and int(cu_seq_k[-1]) == len(keys)
    lengths = cu_seq_k.diff().tolist()
    return list(keys.split(lengths)), list(values.split(lengths))


def varlen_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert query.shape[1:] == key.shape[1:]
    keys, values = ends(key, value, cu_seq_k)
    return flash(query, keys, values, cu_seq_q, max_q, max_k, scale, window_size)


def varlen_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    H, Hkv = query.shape[1], key.shape[-2]
    assert H == Hkv or (enable_gqa and H % Hkv == 0)
    if block_table is None:
        assert cu_seq_k is not None
        keys, values = ends(key, value, cu_seq_k)
    else:
        assert seqused_k is not None and seqused_k.dtype == block_table.dtype == torch.int32
        assert key.dim() == 4 and key.shape[1] % 256 == 0 and key.stride(-1) == block_table.stride(-1) == 1
        assert int(block_table.min()) >= 0 and int(block_table.max()) < len(key)
        assert num_splits == 1  # with more, the rows of all sequences but the first are not written
        assert cu_seq_k is None or torch.equal(cu_seq_k.diff(), seqused_k)
        keys, values = (
            [memory[pages].flatten(0, 1)[:n] for pages, n in zip(block_table.int(), seqused_k, strict=True)]
            for memory in (key, value)
        )
    return flash(query, keys, values, cu_seq_q, max_q, max_k, scale, window_size)


# torch compiles FlexAttention for a CPU in lower precision alone; not compiled, the same function takes float64
NOT_COMPILED = partial(FlexAttend, compute=flex_attention)
VARLEN_2_11 = partial(VarlenAttend, compute=varlen_2_11)
VARLEN_2_13 = partial(VarlenAttend, compute=varlen_2_13)
STAND_INS = {
    "flex, not compiled": "test_kernels:NOT_COMPILED",
    "varlen of torch 2.11": "test_kernels:VARLEN_2_11",
    "varlen of torch 2.13": "test_kernels:VARLEN_2_13",
}
PLAIN = ["dense", "gather", "segments", "varlen of torch 2.11", "varlen of torch 2.13"]
every_backend = pytest.mark.parametrize("name", [*PLAIN, "flex, not compiled"])
every_backend_in_float32 = pytest.mark.parametrize("name", [*PLAIN, "flex"])
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, where in STAND_INS.items():
            patch.setitem(BACKENDS, name, where)
        yield


def skip_without_compiler(model: Llama) -> None:
    if reason := why_not("flex", model):
        pytest.skip(reason)


def test_backends_are_found_by_name() -> None:
    names = {"dense": "Dense", "gather": "Gather", "segments": "Segments", "flex": "Flex", "varlen": "Varlen"}
    assert {name: backend(name).__name__ for name in names} == {name: f"{n}Attend" for name, n in names.items()}
    with pytest.raises(InputError, match="backend 'abacus' is not known; use one of .*dense.*gather"):
        backend("abacus")


# ---- one step of attention


def one_step(step: Step, model: Llama, name: str, fill: float) -> tuple[Tensor, Tensor]:
    """Attention of one packed step in layer 1, and in float64 what each sequence gets alone: [T, H, D] twice."""
    H, Hkv, D = model.config.n_heads, model.config.n_kv_heads, model.config.head_dim
    device = model.device
    lengths = [r.computed + n for r, n in step.plan]
    starts = [r.computed for r, _ in step.plan]
    keys, values = (
        [random(s, Hkv, D, seed=seed + i, dtype=model.dtype).to(device) for i, s in enumerate(lengths)]
        for seed in (100, 200)
    )
    queries = [random(n, H, D, seed=300 + i, dtype=model.dtype).to(device) for i, (_, n) in enumerate(step.plan)]
    expected = [
        attention.sdpa(
            q.double(),
            k.double(),
            v.double(),
            attention.visible(torch.arange(start, stop), torch.arange(stop)).to(device),
        )
        for q, k, v, start, stop in zip(queries, keys, values, starts, lengths, strict=True)
    ]
    pool = step.pool(model, fill)
    for (r, _), k, v, start in zip(step.plan, keys, values, starts, strict=True):
        pool.store(1, torch.tensor(r.slots[:start], dtype=torch.int64, device=device), k[:start], v[:start])
    packed = pack(step.plan, pool)
    q, k, v = (
        torch.cat(queries),
        *(torch.cat([t[start:] for t, start in zip(ts, starts, strict=True)]) for ts in (keys, values)),
    )
    q, k, v = torch.cat((q, k, v), 1).split((H, Hkv, Hkv), 1)  # views of one tensor, as the model hands them over
    before = [t.clone() for t in (q, k, v, packed.positions, packed.slots, pool.table)]
    out = backend(name)(pool, packed)(1, q, k, v)
    # nothing that was handed in is changed, and nothing but the new slots was written
    after = (q, k, v, packed.positions, packed.slots, pool.table)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    mine = torch.tensor([slot for r, n in step.plan for slot in r.slots[: r.computed + n]])
    free = torch.ones(step.n_slots + 1).bool().index_fill(0, mine, False)
    for memory, whole in ((pool.k, keys), (pool.v, values)):
        assert torch.equal(memory[1][:, mine], torch.cat(whole).transpose(0, 1))
        untouched = torch.cat([memory[0].flatten(), memory[1][:, free].flatten()])
        assert (untouched.isnan() if fill != fill else untouched == torch.tensor(fill, dtype=model.dtype)).all()
    assert out.dtype == model.dtype
    return out, torch.cat(expected)


@every_backend
@given(step=steps(), fill=st.sampled_from([NAN, NAN, 1e4, float("inf")]))
def test_each_sequence_gets_what_it_gets_alone(tiny: Llama, name: str, step: Step, fill: float) -> None:
    """hf#46765, nod-ai/amd-shark-ai#665, waybarrios/vllm-mlx#380: random lengths, slots, rows and order, with NaN or
    garbage in every other slot."""
    out, expected = one_step(step, tiny, name, fill)
    torch.testing.assert_close(out, expected, **EXACT)


@given(step=steps(most=8), split=st.integers(0, 12), tile=st.integers(1, 13))
def test_gather_is_right_wherever_its_groups_split(tiny: Llama, step: Step, split: int, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SPLIT", split)
        patch.setattr(batch, "TILE", tile)
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


@given(data=st.data(), fill=st.sampled_from([NAN, 1e4]))
@settings(max_examples=8)
def test_logits_of_flex_do_not_depend_on_company_or_chunks(tiny: Llama, data: st.DataObject, fill: float) -> None:
    """As the next, with fewer examples: not compiled, it takes long."""
    check_company_and_chunks(tiny, "flex, not compiled", data, fill)


@pytest.mark.parametrize("name", PLAIN)
@given(data=st.data(), fill=st.sampled_from([NAN, 1e4]))
def test_logits_do_not_depend_on_company_or_chunks(tiny: Llama, name: str, data: st.DataObject, fill: float) -> None:
    """vllm#5898, tenstorrent/vllm#448, hf#46765: prompts in random chunks, in random company, in random slots."""
    check_company_and_chunks(tiny, name, data, fill)


def check_company_and_chunks(tiny: Llama, name: str, data: st.DataObject, fill: float) -> None:
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


@every_backend_in_float32
@pytest.mark.parametrize("max_running", [1, 2, 3, 8])
def test_tokens_in_float32_are_those_of_each_prompt_alone(name: str, max_running: int) -> None:
    """vllm#5898, vllm#7779, hf#29029: greedy tokens at batch 1, 2, 3 and 8."""
    model = Llama.random(TINY, dtype=torch.float32)
    if name == "flex":
        skip_without_compiler(model)
    prompts = [[(7 * i + j) % 64 for j in range(1 + 2 * i)] for i in range(8)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine = Engine(model, max_running=max_running, budget=max(8, max_running), max_len=64, backend=name)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        text = list(prompt)
        for _ in range(12):
            text.append(int(solo(model, text)[-1].argmax()))
        assert output.token_ids == text[len(prompt) :]


@pytest.mark.parametrize("name", PLAIN)
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


ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, ON_CUDA])])
@pytest.mark.parametrize("name", ["dense", "gather", "segments", "flex", "varlen"])
@pytest.mark.parametrize(
    "chunks",  # (computed, new)
    [
        [(0, 1)],
        [(n, 1) for n in (0, 1, 127, 128, 1000, 5, 64)],
        [(0, 513), (57, 200), (1023, 1), (300, 2), (0, 1)],
        [(0, 256), (0, 128)],
    ],
)
def test_bf16_is_near_the_sum_in_float64(device: str, name: str, chunks: list[tuple[int, int]]) -> None:
    """The heads of SmolLM2 (9 and 3, of 64), slots in disorder, NaN in all others."""
    config = replace(TINY, n_heads=9, n_kv_heads=3, head_dim=64)
    model = Llama.random(config, dtype=torch.bfloat16).to(device)
    if reason := why_not(name, model):
        pytest.skip(reason)
    total = sum(map(sum, chunks))
    slots = rnd.Random(0).sample(range(total + 100), total + 100)
    plan = [
        (request([0] * (s + n), s, row, [slots.pop() for _ in range(s + n)]), n) for row, (s, n) in enumerate(chunks)
    ]
    out, expected = one_step(Step(plan, total + 100, len(chunks), 1100), model, name, NAN)
    # scores of up to 4, rounded to 8 bits, move a weight by a hundredth
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.03)


# ---- flex


@given(step=steps(most=5))
def test_flex_reads_the_blocks_in_which_something_is_visible_and_no_others(tiny: Llama, step: Step) -> None:
    """What we work out from lengths is what torch finds by asking the rule about every query and key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "KEYS", 8)
        patch.setattr(flex, "LOOKUP", 1)
        mask = FlexAttend(step.pool(tiny), pack(step.plan, step.pool(tiny))).mask
    expected = create_block_mask(mask.mask_mod, 1, 1, *mask.seq_lengths, device="cpu", BLOCK_SIZE=(4, 8))
    assert torch.equal(mask.to_dense(), expected.to_dense())


def test_flex_is_compiled_a_few_times_whatever_the_lengths() -> None:
    """Prompts that come in by chunks, and grow token by token over blocks of keys: 40 lengths, few compilations."""
    model = Llama.random(TINY, dtype=torch.float32)
    skip_without_compiler(model)
    compilations = torch._dynamo.utils.counters["stats"]
    draw = rnd.Random(0)
    texts = [[draw.randrange(64) for _ in range(n)] for n in (230, 150, 120, 40, 3, 1)]
    slots = draw.sample(range(700), 700)
    pool = KVPool(model, 700, 6, 256)
    spoil(pool, NAN)
    requests = [request(text, 0, row, [slots.pop() for _ in text]) for row, text in enumerate(texts)]
    logits: dict[Request, list[Tensor]] = {r: [] for r in requests}
    before, count = compilations["unique_graphs"], 0
    while waiting := [r for r in requests if r.pending]:
        plan = [(r, min(r.pending, draw.choice([1, 1, 1, 2, 17, 60]))) for r in waiting]
        for r, part in run(model, backend("flex"), [plan], pool).items():
            logits[r].append(part)
        count += 1
    assert count >= 20 and compilations["unique_graphs"] - before <= 4
    for r in requests:
        torch.testing.assert_close(torch.cat(logits[r]), solo(model, r.tokens), rtol=0, atol=2e-5)


# ---- varlen


def paged_step() -> Step:
    """Texts of 300, 512 and 5 tokens in pages of 256 slots, in disorder."""
    pages = iter([3, 0, 4, 2, 6])
    plan = []
    for row, (kv_len, n) in enumerate([(300, 1), (512, 40), (5, 5)]):
        slots = [
            s for _ in range(0, kv_len, PAGE) for first in [next(pages) * PAGE] for s in range(first, first + PAGE)
        ]
        plan.append((request([0] * kv_len, kv_len - n, row, slots[:kv_len]), n))
    return Step(plan, 7 * PAGE, 3, 600)


def calls_of(step: Step, model: Llama) -> list[tuple[Any, ...]]:
    """The keys, and the names of the options, that varlen was called with."""
    calls = []

    def spy(*args: Any, **options: Any) -> Tensor:
        inspect.signature(torch_varlen.varlen_attn).bind(*args, **options)  # torch itself would take them
        calls.append((args[1], set(options)))
        return varlen_2_13(*args, **options)

    spy.__signature__ = inspect.signature(varlen_2_13)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "spy", "test_kernels:SPY")
        patch.setitem(globals(), "SPY", partial(VarlenAttend, compute=spy))
        out, expected = one_step(step, model, "spy", NAN)
    torch.testing.assert_close(out, expected, **EXACT)
    return calls


PAGED = {"block_table", "seqused_k", "num_splits"}


def test_varlen_reads_whole_pages_where_they_lie(tiny: Llama) -> None:
    [(keys, options)] = calls_of(paged_step(), tiny)
    assert options >= PAGED and keys.shape == (7, PAGE, 2, 8)
    assert keys.untyped_storage().nbytes() == 2 * 2 * (7 * PAGE + 1) * 8 * 8  # the pool's own memory: L, Hkv, slots, D


@pytest.mark.parametrize("swap", [(0, 1), (299, 298), (256, 5), (511, 0)])
def test_varlen_gathers_where_one_slot_is_not_in_its_page(tiny: Llama, swap: tuple[int, int]) -> None:
    step = paged_step()
    r = step.plan[swap[0] > 300][0]
    assert isinstance(r.slots, list)
    a, b = swap
    r.slots[a], r.slots[b] = r.slots[b], r.slots[a]
    [(keys, options)] = calls_of(step, tiny)
    assert not options & PAGED and keys.shape == (300 + 512 + 5, 2, 8)


def test_varlen_gathers_where_runs_of_slots_are_not_the_pools_pages(tiny: Llama) -> None:
    step = paged_step()
    for r, _ in step.plan:
        r.slots = [slot + 8 for slot in r.slots]
    [(_, options)] = calls_of(replace(step, n_slots=step.n_slots + 8), tiny)
    assert not options & PAGED


def test_the_release_installed_takes_what_a_stand_in_takes() -> None:
    installed = inspect.signature(torch_varlen.varlen_attn).parameters
    stand_ins = [inspect.signature(f).parameters for f in (varlen_2_11, varlen_2_13)]
    assert list(installed) in [list(parameters) for parameters in stand_ins]
    assert {name: p.kind for name, p in installed.items()} in [{n: p.kind for n, p in ps.items()} for ps in stand_ins]


# ---- why not


def stub(device: str, dtype: torch.dtype, head_dim: int = 64) -> Any:
    return SimpleNamespace(device=torch.device(device), dtype=dtype, config=replace(TINY, head_dim=head_dim))


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("varlen", stub("cpu", torch.bfloat16), "it needs a CUDA GPU, and the model is on cpu"),
        ("varlen", stub("cuda", torch.float32), "it computes in float16 and bfloat16, and the model is in float32"),
        (
            "varlen",
            stub("cuda", torch.float16, 12),
            "it needs a head dim that is a multiple of 8, at most 256, and the model's is 12",
        ),
        (
            "varlen",
            stub("cuda", torch.float16, 264),
            "it needs a head dim that is a multiple of 8, at most 256, and the model's is 264",
        ),
        ("varlen", stub("cuda", torch.bfloat16), "it needs compute capability 8.0, and this GPU has 7.5"),
        ("flex", stub("cuda", torch.bfloat16, 8), "it needs a head dim of 16 or more, and the model's is 8"),
        ("flex", stub("cuda", torch.bfloat16), None),
        (
            "flex",
            stub("cpu", torch.float64),
            "on a CPU it computes in float32, bfloat16 and float16, and the model is in float64",
        ),
        ("flex", stub("cpu", torch.float32), "it needs a C++ compiler, and no-such-compiler is not on the PATH"),
        ("segments", stub("cpu", torch.float64), None),
    ],
)
def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, name: str, model: Any, reason: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not(name, model) == reason


def test_newer_gpus_and_other_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert why_not("varlen", stub("cuda", torch.bfloat16)) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "AVX2" in str(why_not("flex", stub("cpu", torch.float32)))
