"""The two functions under every stage: who sees whom (`visible`), and the weighted sum (`sdpa`)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from minillm.attention import SelfAttend, sdpa, visible


def random(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Another implementation: key-value heads repeated, torch's own attention; the same shapes as `sdpa`."""
    groups = q.shape[-2] // k.shape[-2]
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))  # [..., heads, tokens, D]
    k, v = k.repeat_interleave(groups, dim=-3), v.repeat_interleave(groups, dim=-3)
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[..., None, :, :])
    return out.transpose(-3, -2)


# ---- visible


@pytest.mark.parametrize(
    ("start", "stop", "rows"),
    [
        (0, 2, ["10", "11"]),
        (2, 5, ["11100", "11110", "11111"]),
        (0, 5, ["10000", "11000", "11100", "11110", "11111"]),
        (4, 5, ["11111"]),
        (19, 20, ["1" * 20]),
    ],
)
def test_the_mask_of_a_chunk(start: int, stop: int, rows: list[str]) -> None:
    """pytorch/pytorch#108108: "causal" is top-left aligned, but a chunk after others needs bottom-right;
    mlx-node/mlx-node#24: with no mask instead, it sees the future."""
    mask = visible(torch.arange(start, stop), torch.arange(stop))
    assert ["".join(str(int(seen)) for seen in row) for row in mask] == rows


def test_a_token_at_position_p_sees_p_plus_1() -> None:
    """meta-pytorch/gpt-fast#233: a mask counted from the first query instead of its position."""
    for p in range(21):
        assert visible(torch.tensor([p]), torch.arange(21)).sum() == p + 1


def test_sequences_end_to_end_do_not_see_each_other() -> None:
    """DeepOpt-com/WrinkleFree-Monorepo#53, huggingface/nanoVLM#204: positions that restart are not enough."""
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2, 3])
    seq = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
    blocks = torch.block_diag(*(torch.ones(n, n).tril() for n in (4, 2, 4))).bool()
    assert torch.equal(visible(positions, positions, seq, seq), blocks)


small = st.integers(0, 6)


@given(st.lists(st.tuples(small, small), min_size=1), st.lists(st.tuples(small, small), min_size=1))
def test_visible_is_one_rule(queries: list[tuple[int, int]], keys: list[tuple[int, int]]) -> None:
    """In any order, with gaps and repeats: same sequence, and not later."""
    (q_pos, q_seq), (k_pos, k_seq) = (torch.tensor(side).T for side in (queries, keys))
    expected = [[ks == qs and kp <= qp for kp, ks in keys] for qp, qs in queries]
    assert visible(q_pos, k_pos, q_seq, k_seq).tolist() == expected
    assert visible(q_pos, k_pos).tolist() == [[kp <= qp for kp, _ in keys] for qp, _ in queries]


def test_rows_of_a_rectangle_have_their_own_positions() -> None:
    """hf#33095, hf#22382: one row of positions shared by all rows is right for the longest alone."""
    positions = torch.tensor([[5, 6, 7], [0, 1, 2], [9, 10, 11]])
    mask = visible(positions, torch.arange(12))
    assert mask.shape == (3, 3, 12)
    for row in range(3):
        assert torch.equal(mask[row], visible(positions[row], torch.arange(12)))


# ---- sdpa


@given(
    lead=st.sampled_from([(), (1,), (3,)]),
    size=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
    seed=st.integers(0, 1000),
)
def test_sdpa_is_the_textbook_formula(lead: tuple[int, ...], size: tuple[int, int, int, int, int], seed: int) -> None:
    """Any shape and any mask, queries that see nothing included (they answer 0)."""
    T, S, Hkv, G, D = size
    q, k, v = random(*lead, T, Hkv * G, D), random(*lead, S, Hkv, D, seed=1), random(*lead, S, Hkv, D, seed=2)
    mask = random(*lead, T, S, seed=seed) > 0
    before = [t.clone() for t in (q, k, v, mask)]
    out = sdpa(q, k, v, mask)
    some = mask.any(-1)
    torch.testing.assert_close(out[some], reference(q, k, v, mask)[some], rtol=1e-11, atol=1e-12)
    assert (out[~some] == 0).all()
    assert all(torch.equal(now, then) for now, then in zip((q, k, v, mask), before, strict=True))


def test_scale_is_one_over_the_root_of_the_head_dim() -> None:
    """hf#32857: of the head dim, not of the width over the heads. Two keys, scores 0 and 8 / sqrt(8)."""
    q = torch.ones(1, 1, 8, dtype=torch.float64)
    k = torch.stack([torch.zeros(1, 8), torch.ones(1, 8)]).double()
    v = torch.stack([torch.zeros(1, 8), torch.ones(1, 8)]).double()
    weight = torch.sigmoid(torch.tensor(8**0.5, dtype=torch.float64))
    torch.testing.assert_close(sdpa(q, k, v, torch.ones(1, 2).bool()), weight.expand(1, 1, 8))


@pytest.mark.parametrize("lead", [(), (2,), (4,)])
def test_query_heads_share_key_value_heads_in_runs(lead: tuple[int, ...]) -> None:
    """onnx/onnx#7274, apple/axlearn#842, ekzhang/jax-js#180: heads 0 0 1 1, not 0 1 0 1; also with as many rows
    as heads, where repeating along the wrong axis keeps every shape."""
    q, k = random(*lead, 3, 4, 8), random(*lead, 5, 2, 8, seed=1)
    v = torch.arange(2.0, dtype=torch.float64)[:, None].expand(*lead, 5, 2, 8)
    out = sdpa(q, k, v, torch.ones(*lead, 3, 5).bool())
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)[:, None].expand(*lead, 3, 4, 8)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", range(21))
def test_a_step_at_position_p_has_p_plus_1_weights(p: int) -> None:
    """meta-pytorch/gpt-fast#233: with one-hot values the output is the weights themselves."""
    S = 24
    v = torch.eye(S, dtype=torch.float64)[:, None]  # [S, 1, D = S]
    mask = visible(torch.tensor([p]), torch.arange(S))
    weights = sdpa(random(1, 1, S), random(S, 1, S, seed=1), v, mask)[0, 0]
    assert (weights[: p + 1] > 0).all() and (weights[p + 1 :] == 0).all()
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("length", [31, 32, 33, 34])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_that_sees_nothing_answers_zero(length: int, dtype: torch.dtype) -> None:
    """hf#25284, hf#47651: softmax over nothing is NaN, which the next layers would spread."""
    q, k, v = (random(2, length, 4, 8, seed=i, dtype=dtype) for i in range(3))
    positions = torch.arange(length).expand(2, -1).clone()
    positions[0, :5] = -1  # five tokens that may look at nothing
    mask = visible(positions, torch.arange(length))
    out = sdpa(q, k, v, mask)
    assert out.isfinite().all() and out.dtype == dtype
    assert (out[0, :5] == 0).all()
    whole = sdpa(q, k, v, visible(torch.arange(length).expand(2, -1), torch.arange(length)))
    assert torch.equal(out[0, 5:], whole[0, 5:]) and torch.equal(out[1], whole[1])


def test_hidden_numbers_of_any_size_do_not_matter() -> None:
    """waybarrios/vllm-mlx#380: finite garbage in places that are masked."""
    q, k, v = random(3, 4, 8), random(9, 2, 8, seed=1), random(9, 2, 8, seed=2)
    mask = visible(torch.arange(3, 6), torch.arange(9))
    expected = sdpa(q, k[:6], v[:6], mask[:, :6])
    for garbage in (1e4, -1e4, 1e300):
        k[6:], v[6:] = garbage, garbage
        torch.testing.assert_close(sdpa(q, k, v, mask), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24)])
def test_narrow_dtypes_are_off_by_their_rounding_alone(dtype: torch.dtype, unit: float) -> None:
    """Against float64 on the same rounded inputs; 500 weights summed in bf16 would be off by far more."""
    q, k, v = (
        random(4, 4, 16, dtype=dtype),
        random(500, 2, 16, seed=1, dtype=dtype),
        random(500, 2, 16, dtype=dtype),
    )
    mask = visible(torch.arange(496, 500), torch.arange(500))
    out = sdpa(q, k, v + 1, mask)
    assert out.dtype == dtype
    expected = reference(q.double(), k.double(), (v + 1).double(), mask)
    assert (out.double() - expected).abs().max() < 8 * unit


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_large_scores_stay_finite(scale: float) -> None:
    q, k, v = random(4, 4, 8) * scale, random(4, 2, 8, seed=1) * scale, random(4, 2, 8, seed=2)
    out = sdpa(q.float(), k.float(), v.float(), visible(torch.arange(4), torch.arange(4)))
    assert out.isfinite().all()


def test_self_attend_is_causal_over_its_own_tokens() -> None:
    q, k, v = random(6, 4, 8), random(6, 2, 8, seed=1), random(6, 2, 8, seed=2)
    out = SelfAttend(torch.arange(6))(0, q, k, v)
    mask = torch.ones(6, 6).tril().bool()
    torch.testing.assert_close(out, reference(q, k, v, mask), rtol=1e-11, atol=1e-12)
