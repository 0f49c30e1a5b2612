"""Fused modules: the numbers of the ones that they replace, and nothing where they cannot be had."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from test_attention import random
from torch import nn

from minillm import native
from minillm.attention import SelfAttend
from minillm.config import Config
from minillm.fusing import (
    FUSED,
    FusedBlock,
    FusedNorm,
    FusedRotary,
    FusedSiluTimes,
    HalfBlocks,
    RowLinear,
    few,
    fuse,
    make_fast,
)
from minillm.model import Llama, RMSNorm, Rotary, SiluTimes, rope_frequencies, rope_table
from minillm.packing import PackedLinear, can_pack

try:
    LIBRARIES = {dtype: native.library("layer", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)}
except native.NotCompiled as error:
    pytest.skip(f"no C code here: {error}", allow_module_level=True)

WIDE = replace(TINY, d_model=96, head_dim=64, d_ff=160)
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 0.0}  # relative: in bf16 the very same numbers
dtypes = st.sampled_from([*TOLERANCE])
leads = st.sampled_from([(), (1,), (7,), (130,), (2, 3), (2, 1, 5)])


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=TOLERANCE[a.dtype], atol=TOLERANCE[a.dtype], equal_nan=True)


def modules(model: Llama, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.modules())


@given(
    dtype=dtypes,
    lead=leads,
    d=st.sampled_from([32, 64, 576]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    strided=st.booleans(),
)
def test_norm(dtype: torch.dtype, lead: tuple[int, ...], d: int, scale: float, strided: bool) -> None:
    norm = RMSNorm(d, 1e-5).to(dtype)
    norm.weight = nn.Parameter(random(d, seed=1).to(dtype), requires_grad=False)
    x = (random(*lead, 2 * d) * scale).to(dtype)[..., d:] if strided else (random(*lead, d) * scale).to(dtype)
    kept = x.clone()
    near(FusedNorm(norm, LIBRARIES[dtype])(x), norm(x))
    assert torch.equal(x, kept)


@given(dtype=dtypes, lead=st.sampled_from([(1,), (7,), (65,), (2, 3)]), D=st.sampled_from([64, 128]))
def test_rotary_turns_its_part_of_qkv_and_no_more(dtype: torch.dtype, lead: tuple[int, ...], D: int) -> None:
    qkv = random(*lead, 7, D).to(dtype)
    positions = torch.arange(500, 500 + lead[-1]).expand(lead)
    rope = rope_table(positions, rope_frequencies(replace(WIDE, head_dim=D)), dtype)
    q, k, v = (part.clone() for part in qkv.split((4, 2, 1), -2))
    fused = FusedRotary(Rotary(), LIBRARIES[dtype])
    for ours, theirs in zip(fused(qkv[..., :4, :], qkv[..., 4:6, :], rope), Rotary()(q, k, rope), strict=True):
        near(ours, theirs)
    assert torch.equal(qkv[..., 6:, :], v)
    near(fused(q, k, rope)[1], qkv[..., 4:6, :])  # and not in one tensor


@given(dtype=dtypes, lead=leads, d=st.sampled_from([32, 160, 1536]), scale=st.sampled_from([0.1, 3.0, 200.0]))
def test_silu_times(dtype: torch.dtype, lead: tuple[int, ...], d: int, scale: float) -> None:
    gate_up = (random(*lead, 2 * d) * scale).to(dtype)
    fused, plain = FusedSiluTimes(SiluTimes(), LIBRARIES[dtype])(gate_up), SiluTimes()(gate_up)
    if dtype == torch.bfloat16:  # where torch's e^x and ours round to either side of a tie
        assert ((fused != plain) & (plain.abs() > 1e-26)).float().mean() < 0.01  # e^-80 stands for all below
        torch.testing.assert_close(fused, plain, rtol=0.01, atol=1e-26)
    else:
        near(fused, plain)


ROWS = [1, 2, 3, 4, 5, 8, 9, 16, 19]


def c_function(name: str, dtype: torch.dtype, **kinds: int):
    return native.function(LIBRARIES[dtype], name, **kinds)


@given(dtype=dtypes, M=st.sampled_from(ROWS), d=st.sampled_from([32, 96, 576]), n=st.sampled_from([1, 15, 16, 33, 160]))
def test_rows_in_c(dtype: torch.dtype, M: int, d: int, n: int) -> None:
    """Every shape of tile, and none writes beyond its numbers."""
    x, weight = random(M, d).to(dtype), random(n, d, seed=1).to(dtype)
    out = torch.full((M * n + 64,), 7.0, dtype=dtype)
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    c_function("rows", dtype, pointers=3, integers=3)(*pointers, M, n, d, 3)
    expected = x.double() @ weight.double().T
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.01}[dtype]
    torch.testing.assert_close(out[: M * n].view(M, n).double(), expected, rtol=tolerance, atol=tolerance * d**0.5)
    assert (out[M * n :] == 7).all()


@pytest.mark.parametrize("dtype", [*TOLERANCE])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("M", ROWS)
def test_the_halves_of_a_layer_are_the_layer(
    dtype: torch.dtype, threads: int, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as many tokens as there are, also where a layer would take its other way."""
    plain = Llama.random(WIDE, seed=3, dtype=dtype).blocks[0]
    halves = HalfBlocks(plain, LIBRARIES[dtype])
    monkeypatch.setattr(halves, "few", M)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, rope = random(M, WIDE.d_model).to(dtype), rope_table(torch.arange(M), rope_frequencies(WIDE), dtype)
    seen: list[list[torch.Tensor]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append([part.clone() for part in (q, k, v)])
        return (q * 2).transpose(0, 1).contiguous().transpose(0, 1)  # what a backend gives may lie in any order

    expected, got = plain(x, rope, attend), halves(x, rope, attend)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for theirs, ours in zip([expected, *seen[0]], [got, *seen[1]], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@given(dtype=dtypes, lead=leads, threads=st.sampled_from([1, 3]))
def test_a_fused_block_is_the_block(dtype: torch.dtype, lead: tuple[int, ...], threads: int) -> None:
    """The same sums and the same norms: all else in it is the plain layer's."""
    plain = Llama.random(WIDE, seed=3, dtype=dtype).blocks[0]
    plain.attn_norm, plain.mlp_norm = (FusedNorm(norm, LIBRARIES[dtype]) for norm in (plain.attn_norm, plain.mlp_norm))
    x = random(*lead, WIDE.d_model).to(dtype)
    rope = rope_table(torch.zeros(x.shape[:-1]), rope_frequencies(WIDE), dtype)
    kept = x.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        near(FusedBlock(plain, LIBRARIES[dtype])(x, rope, lambda q, k, v: q * 2), plain(x, rope, lambda q, k, v: q * 2))
    assert torch.equal(x, kept)


def test_halves_are_made_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert modules(fuse(Llama.random(WIDE)), HalfBlocks) == WIDE.n_layers
    for other in ({"qkv_bias": True}, {"qk_norm": True}):
        assert modules(fuse(Llama.random(replace(WIDE, **other))), FusedBlock) == WIDE.n_layers
    if PACKED:
        assert modules(make_fast(Llama.random(WIDE, dtype=PACKED[0])), HalfBlocks) == WIDE.n_layers
        monkeypatch.setattr("minillm.host.memory_bytes", lambda: 1000)
        assert not modules(make_fast(Llama.random(WIDE, dtype=PACKED[0])), HalfBlocks)  # no room for rows


PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
needs_packing = pytest.mark.skipif(not PACKED, reason="this torch or CPU has no packed Linear")


@needs_packing
@given(
    dtype=st.sampled_from(PACKED),
    sizes=st.sampled_from([(32, 1), (64, 33), (576, 960), (1536, 576)]),
    lead=st.sampled_from([(), (1,), (1, 1), *((n,) for n in range(2, 18)), (3, 5), (3, 6)]),
    bias=st.booleans(),
)
def test_row_linear(dtype: torch.dtype, sizes: tuple[int, int], lead: tuple[int, ...], bias: bool) -> None:
    d, n = sizes
    linear = nn.Linear(d, n, bias=bias).to(dtype).requires_grad_(False)
    x = random(*lead, d).to(dtype)
    packed = PackedLinear(linear)
    ours = RowLinear(packed, linear.weight, LIBRARIES[dtype])
    assert [name for name, _ in ours.named_parameters()] == ["weight", "bias"][: 1 + bias]
    if x.numel() > few(LIBRARIES[dtype]) * d:
        assert torch.equal(ours(x), packed(x))
    else:
        expected = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(ours(x).double(), expected, rtol=tolerance, atol=tolerance)
        assert ours(x).dtype == dtype and ours(x).shape == (*lead, n)


@needs_packing
@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_kept_once_and_only_where_there_is_room(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(WIDE, tied=tied, qkv_bias=True)
    plain, fast = (Llama.random(config, seed=3, dtype=PACKED[0]) for _ in range(2))
    make_fast(fast)
    assert modules(fast, RowLinear) == modules(plain, nn.Linear) and not modules(fast, PackedLinear)
    assert (fast.head.rows.data_ptr() == fast.embed.weight.data_ptr()) == tied
    for T in (1, 2):
        x = (torch.arange(T), torch.arange(T), SelfAttend(torch.arange(T)))
        expected, got = plain.logits(plain(*x)).float(), fast.logits(fast(*x)).float()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 if PACKED[0] == torch.float32 else 0.1)
    monkeypatch.setattr("minillm.host.memory_bytes", lambda: 1000)
    assert not modules(make_fast(Llama.random(config, dtype=PACKED[0])), RowLinear)


@pytest.mark.parametrize("dtype", [*TOLERANCE])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_stays_so(dtype: torch.dtype, bad: float) -> None:
    x = random(3, 64).to(dtype)
    x[1, 40] = bad
    norm = RMSNorm(64, 1e-5).to(dtype)
    norm.weight = nn.Parameter(torch.ones(64, dtype=dtype), requires_grad=False)
    lib = LIBRARIES[dtype]
    for fused, plain in ((FusedNorm(norm, lib), norm), (FusedSiluTimes(SiluTimes(), lib), SiluTimes())):
        ours, theirs = fused(x), plain(x)
        assert torch.equal(ours.isnan(), theirs.isnan())
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", [*TOLERANCE])
@pytest.mark.parametrize("config", [WIDE, replace(WIDE, tied=False, qkv_bias=True, qk_norm=True)])
def test_a_fused_model_says_the_same(dtype: torch.dtype, config: Config) -> None:
    plain, fused = Llama.random(config, seed=3, dtype=dtype), fuse(Llama.random(config, seed=3, dtype=dtype))
    for ours, theirs in FUSED.items():
        assert modules(plain, ours) == modules(fused, theirs) > 0 == modules(fused, ours) == modules(plain, theirs)
    assert list(fused.state_dict()) == list(plain.state_dict())
    for T in (1, 7, 40):
        tokens, positions = torch.arange(T) % 64, torch.arange(T)
        for lead in ((T,), (3, T)):
            x = (tokens.expand(lead), positions.expand(lead), SelfAttend(positions.expand(lead)))
            expected, got = plain.logits(plain(*x)), fused.logits(fused(*x))
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    assert fuse(fused) is fused  # twice is once


@pytest.mark.parametrize("sizes", [{"d_model": 48}, {"d_ff": 50}, {"head_dim": 32}])
def test_sizes_that_it_cannot_take_stay_as_they_are(sizes: dict[str, int]) -> None:
    model = fuse(Llama.random(replace(WIDE, **sizes)))
    assert not any(modules(model, fused) for fused in FUSED.values())


def test_both_kinds_of_speed_go_together() -> None:
    model = make_fast(Llama.random(WIDE, seed=3))
    assert modules(model, FusedNorm) and not modules(model, RMSNorm)
    tokens = torch.arange(9)
    plain = Llama.random(WIDE, seed=3)
    torch.testing.assert_close(
        model(tokens, tokens, SelfAttend(tokens)), plain(tokens, tokens, SelfAttend(tokens)), rtol=0, atol=1e-4
    )
