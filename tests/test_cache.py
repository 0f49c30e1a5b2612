"""Where K and V lie: the rectangle, the pool of slots, and attention over what the rectangle holds."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from test_attention import random
from test_model import solo
from torch import Tensor

from minillm import attention
from minillm.batch import line, rectangle
from minillm.cache import CachedAttend, KVCache, KVPool
from minillm.model import Llama

EXACT = {"rtol": 0, "atol": 1e-11}
prompts = st.lists(st.integers(0, 63), min_size=1, max_size=16)


@st.composite
def cut_prompts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A prompt and where it is cut: 0, the cuts in order, its length."""
    prompt = draw(prompts)
    cuts = draw(st.sets(st.integers(0, len(prompt)))) | {0, len(prompt)}
    return prompt, sorted(cuts)


def run_chunks(model: Llama, cache: KVCache, prompt: list[int], cuts: list[int]) -> Tensor:
    logits = []
    for start, stop in itertools.pairwise(cuts):
        tokens, positions = line(prompt[start:stop], start, model.device)
        logits.append(model.logits(model(tokens, positions, CachedAttend(cache, positions))))
    return torch.cat(logits)


# ---- one sequence, in pieces


@given(cut_prompts())
def test_every_split_of_a_prompt_gives_the_same_logits(tiny: Llama, cut: tuple[list[int], list[int]]) -> None:
    """pytorch/pytorch#108108, #144858, pytorch/executorch#21749: a later chunk that ignored what was before it."""
    prompt, cuts = cut
    logits = run_chunks(tiny, KVCache(tiny, len(prompt)), prompt, cuts)
    torch.testing.assert_close(logits, solo(tiny, prompt), **EXACT)


@pytest.mark.parametrize("split", [1, 2, 3, 4])
@pytest.mark.parametrize("garbage", [1e4, -1e4])
def test_garbage_beyond_the_text_changes_nothing(tiny: Llama, split: int, garbage: float) -> None:
    """waybarrios/vllm-mlx#380: places that held another text, or none."""
    prompt = [7, 3, 60, 3, 12]
    cache = KVCache(tiny, 9)
    cache.k.fill_(garbage)
    cache.v.fill_(garbage)
    logits = run_chunks(tiny, cache, prompt, [0, split, 5])
    torch.testing.assert_close(logits, solo(tiny, prompt), **EXACT)
    assert (cache.k[..., 5:, :] == garbage).all() and (cache.v[..., 5:, :] == garbage).all()


def test_the_first_token_is_stored_too(tiny: Llama) -> None:
    """TrenTorch/TrenTorch#192: position 0 stayed zero, and the text was subtly worse."""
    cache = KVCache(tiny, 20)
    seen: list[tuple[Tensor, Tensor]] = []
    text = [9]
    while len(text) <= 20:
        tokens, positions = line(text[-1:], len(text) - 1, tiny.device)
        attend = CachedAttend(cache, positions)

        def spy(layer: int, q: Tensor, k: Tensor, v: Tensor, attend: CachedAttend = attend) -> Tensor:
            seen.append((k, v))
            return attend(layer, q, k, v)

        logits = tiny.logits(tiny(tokens, positions, spy))
        torch.testing.assert_close(logits, solo(tiny, text)[-1:], **EXACT)
        text.append(int(logits.argmax()))
    assert (cache.k.abs().amax((1, 3)) > 0).all() and (cache.v.abs().amax((1, 3)) > 0).all()
    for layer, (k, v) in enumerate(seen[: TINY.n_layers]):
        assert torch.equal(cache.k[layer, :, 0], k[0]) and torch.equal(cache.v[layer, :, 0], v[0])


def test_positions_and_inputs_are_left_alone(tiny: Llama) -> None:
    """ml-explore/mlx-lm#1699: storing moved the offset that the rotation of q still held."""
    cache = KVCache(tiny, 8)
    tokens, positions = line([4, 5, 6], 0, tiny.device)
    attend = CachedAttend(cache, positions)
    inputs = [random(3, heads, 8, seed=heads) for heads in (4, 2, 2)]
    before = [t.clone() for t in (tokens, positions, *inputs)]
    attend(0, *inputs)
    attend(1, *inputs)
    tiny(tokens, positions, attend)
    assert all(torch.equal(a, b) for a, b in zip((tokens, positions, *inputs), before, strict=True))
    assert cache.k.data_ptr() != inputs[1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_logits_in_working_dtypes(dtype: torch.dtype) -> None:
    """vllm#5898, hf#29029: another order of sums, so near in fp32, and in bf16 equal only where it is clear."""
    model = Llama.random(TINY, dtype=dtype)
    prompt = torch.randint(64, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = solo(model, prompt).float()
    logits = run_chunks(model, KVCache(model, 40), prompt, [0, 3, 4, 20, 39, 40]).float()
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert (logits - expected).abs().max() < tolerance
    top = expected.topk(2, -1).values
    clear = top[:, 0] - top[:, 1] > 2 * tolerance
    assert clear.sum() > 10
    assert torch.equal(logits.argmax(-1)[clear], expected.argmax(-1)[clear])


# ---- rows of a rectangle


@given(
    rows=st.lists(cut_prompts(), min_size=1, max_size=4),
    garbage=st.sampled_from([0.0, 1e4, -1e4]),
    data=st.data(),
)
def test_rows_of_unequal_length_are_each_their_own(
    tiny: Llama, rows: list[tuple[list[int], list[int]]], garbage: float, data: st.DataObject
) -> None:
    """hf#33095, hf#25284, hf#47651: rows of unequal length in one rectangle, each cut in its own places. A pad must
    not be seen, nor must what the places held before."""
    size = max(len(prompt) for prompt, _ in rows) + 1  # the last place takes pads alone
    cache = KVCache(tiny, len(rows), size)
    cache.k.fill_(garbage)
    cache.v.fill_(garbage)
    expected = [solo(tiny, prompt) for prompt, _ in rows]
    done = [0] * len(rows)
    while any(d < len(prompt) for d, (prompt, _) in zip(done, rows, strict=True)):
        stops = [min((c for c in cuts if c > d), default=d) for d, (_, cuts) in zip(done, rows, strict=True)]
        # a row with nothing left is fed its last token again, as the stages do
        starts = [d if d < stop else d - 1 for d, stop in zip(done, stops, strict=True)]
        new = [prompt[a:b] for a, b, (prompt, _) in zip(starts, stops, rows, strict=True)]
        tokens, positions, last = rectangle(new, starts, size, tiny.device)
        logits = tiny.logits(tiny(tokens, positions, CachedAttend(cache, positions)))
        assert logits.isfinite().all()
        for b, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            torch.testing.assert_close(logits[b, : stop - start], expected[b][start:stop], **EXACT)
            assert int(last[b]) == stop - start - 1
        done = stops


@pytest.mark.parametrize("longest", [31, 32, 33, 34])
def test_two_rows_at_lengths_around_32(tiny: Llama, longest: int) -> None:
    """hf#47678: it fired only where the padded length was one above a multiple of 32."""
    rows = [[1, 2, 3], [i % 64 for i in range(longest)]]
    size = longest + 1
    cache = KVCache(tiny, 2, size)
    tokens, positions, last = rectangle(rows, [0, 0], size, tiny.device)
    logits = tiny.logits(tiny(tokens, positions, CachedAttend(cache, positions)))
    assert logits.isfinite().all()
    for b, row in enumerate(rows):
        torch.testing.assert_close(logits[b, last[b]], solo(tiny, row)[-1], **EXACT)


# ---- the memory itself


@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_rectangle_stores_each_position_in_its_place(tiny: Llama, shape: tuple[int, ...]) -> None:
    cache = KVCache(tiny, *shape)
    lead = shape[:-1]
    positions = torch.tensor([3, 1]) if not lead else torch.tensor([[3, 1], [0, 2], [4, 3]])
    k, v = random(*lead, 2, 2, 8), random(*lead, 2, 2, 8, seed=1)
    cache.store(1, positions, k, v)
    for got, wrote in zip(cache.read(1, 5), (k, v), strict=True):
        expected = torch.zeros(*shape, 2, 8, dtype=torch.float64)
        for row in range(lead[0]) if lead else [...]:
            expected[row][positions[row]] = wrote[row]
        assert torch.equal(got, expected)
        assert torch.equal(cache.read(1, 2)[0], cache.read(1, 5)[0][..., :2, :, :])
    assert not cache.k[0].any() and not cache.v[0].any()
    assert cache.nbytes == TINY.kv_bytes_per_token(8) * 5 * (lead[0] if lead else 1)


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True), min_size=1, max_size=5))
def test_pool_is_a_map_from_slot_to_the_last_write(tiny: Llama, writes: list[list[int]]) -> None:
    """llmmanorg/llmman#118: a slot used again was added to, not overwritten."""
    pool = KVPool(tiny, n_slots=7, max_running=2, max_len=4)
    pool.k.zero_()
    pool.v.zero_()
    expected = {slot: torch.zeros(2, 2, 8, dtype=torch.float64) for slot in range(7)}  # k and v
    for seed, slots in enumerate(writes):
        k, v = random(len(slots), 2, 8, seed=seed), random(len(slots), 2, 8, seed=seed + 100)
        pool.store(1, torch.tensor(slots), k, v)
        expected |= {slot: torch.stack((k[i], v[i])) for i, slot in enumerate(slots)}
    for index in (torch.tensor([3, 0, 3]), torch.tensor([[1, 2], [6, 6], [0, 5]])):
        k, v = pool.gather(1, pool.index(index))
        assert k.shape == v.shape == (*index.shape, 2, 8)
        wanted = torch.stack([expected[int(slot)] for slot in index.flatten()]).unflatten(0, index.shape)
        assert torch.equal(torch.stack((k, v), dim=-3), wanted)
    assert not pool.k[0].any() and not pool.v[0].any()


def test_pool_has_one_scratch_slot_beyond_its_total(tiny: Llama) -> None:
    pool = KVPool(tiny, n_slots=7, max_running=2, max_len=4)
    one = random(1, 2, 8)
    pool.store(0, torch.tensor([7]), one, one)
    assert torch.equal(pool.gather(0, pool.index(torch.tensor([7])))[0], one)
    assert pool.nbytes == TINY.kv_bytes_per_token(8) * 8
    assert pool.table.shape == (2, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_has_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = Llama.random(replace(TINY, n_layers=1), dtype=dtype)
    for memory in (KVCache(model, 3), KVPool(model, 3, 1, 3)):
        assert memory.k.dtype == memory.v.dtype == dtype


def test_cached_attend_reads_no_further_than_it_must(tiny: Llama) -> None:
    """Places beyond the last position of the step are not read at all: NaN there does no harm."""
    cache = KVCache(tiny, 9)
    cache.k[..., 3:, :], cache.v[..., 3:, :] = torch.nan, torch.nan
    logits = run_chunks(tiny, cache, [1, 2, 3], [0, 3])
    torch.testing.assert_close(logits, solo(tiny, [1, 2, 3]), **EXACT)
    positions = torch.tensor([3])
    assert torch.equal(CachedAttend(cache, positions).mask, attention.visible(positions, torch.arange(4)))
