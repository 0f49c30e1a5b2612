"""Fused modules: the numbers of the ones that they replace, and nothing where they cannot be had."""

from ctypes import CDLL, c_int64
from dataclasses import replace

import pytest
import torch
from builds import builds, compiled_for
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from test_attention import random
from torch import nn

from minillm import native
from minillm.attention import SelfAttend
from minillm.config import Config
from minillm.errors import InputError
from minillm.fusing import FUSED, FusedBlock, FusedNorm, FusedRotary, FusedSiluTimes, HalfBlocks, fuse, make_fast
from minillm.model import Llama, RMSNorm, Rotary, SiluTimes, rope_frequencies, rope_table
from minillm.packing import PackedLinear, can_pack, pack_weights
from minillm.packing import replace as replace_modules
from minillm.panels import PanelLinear, from_panels, in_rows, to_panels

Build = tuple[torch.dtype, CDLL]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
try:
    BUILDS: list[Build] = []
    for build in builds():
        with compiled_for(build):
            BUILDS += [(dtype, native.library("layer", dtype)) for dtype in DTYPES]
except native.NotCompiled as error:
    pytest.skip(f"no C code here: {error}", allow_module_level=True)

WIDE = replace(TINY, d_model=96, head_dim=64, d_ff=160)
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 0.0}  # relative: in bf16 the very same numbers
any_build = st.sampled_from(BUILDS)
leads = st.sampled_from([(), (1,), (7,), (130,), (2, 3), (2, 1, 5)])


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=TOLERANCE[a.dtype], atol=TOLERANCE[a.dtype], equal_nan=True)


def modules(model: Llama, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.modules())


@given(
    build=any_build,
    lead=leads,
    d=st.sampled_from([32, 64, 576]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    strided=st.booleans(),
)
def test_norm(build: Build, lead: tuple[int, ...], d: int, scale: float, strided: bool) -> None:
    dtype, lib = build
    norm = RMSNorm(d, 1e-5).to(dtype)
    norm.weight = nn.Parameter(random(d, seed=1).to(dtype), requires_grad=False)
    x = (random(*lead, 2 * d) * scale).to(dtype)[..., d:] if strided else (random(*lead, d) * scale).to(dtype)
    kept = x.clone()
    near(FusedNorm(norm, lib)(x), norm(x))
    assert torch.equal(x, kept)


@given(build=any_build, lead=st.sampled_from([(1,), (7,), (65,), (2, 3)]), D=st.sampled_from([64, 128]))
def test_rotary_turns_its_part_of_qkv_and_no_more(build: Build, lead: tuple[int, ...], D: int) -> None:
    dtype, lib = build
    qkv = random(*lead, 7, D).to(dtype)
    positions = torch.arange(500, 500 + lead[-1]).expand(lead)
    rope = rope_table(positions, rope_frequencies(replace(WIDE, head_dim=D)), dtype)
    q, k, v = (part.clone() for part in qkv.split((4, 2, 1), -2))
    fused = FusedRotary(Rotary(), lib)
    for ours, theirs in zip(fused(qkv[..., :4, :], qkv[..., 4:6, :], rope), Rotary()(q, k, rope), strict=True):
        near(ours, theirs)
    assert torch.equal(qkv[..., 6:, :], v)
    near(fused(q, k, rope)[1], qkv[..., 4:6, :])  # and not in one tensor


@given(build=any_build, lead=leads, d=st.sampled_from([32, 160, 1536]), scale=st.sampled_from([0.1, 3.0, 200.0]))
def test_silu_times(build: Build, lead: tuple[int, ...], d: int, scale: float) -> None:
    dtype, lib = build
    gate_up = (random(*lead, 2 * d) * scale).to(dtype)
    fused, plain = FusedSiluTimes(SiluTimes(), lib)(gate_up), SiluTimes()(gate_up)
    if dtype == torch.bfloat16:  # where torch's e^x and ours round to either side of a tie
        assert ((fused != plain) & (plain.abs() > 1e-26)).float().mean() < 0.01  # e^-80 stands for all below
        torch.testing.assert_close(fused, plain, rtol=0.01, atol=1e-26)
    else:
        near(fused, plain)


@pytest.mark.skipif(len(BUILDS) == len(DTYPES), reason="this CPU has no AVX-512")
def test_a_vector_of_float32_fits_a_register() -> None:
    """Of 64 bytes with AVX-512, of 32 without: gcc keeps a longer one in memory, which is right but slow."""
    assert [c_int64.in_dll(lib, "lanes").value for _, lib in BUILDS] == [16] * len(DTYPES) + [8] * len(DTYPES)


ROWS = [*range(1, 14), 24, 25, 40]  # every number of rows in one pass, and of passes


@given(
    dtype=st.sampled_from(DTYPES),
    lanes=st.sampled_from([8, 16]),
    n=st.sampled_from([1, 31, 32, 33, 160]),
    d=st.sampled_from([2, 32, 96]),
)
def test_panels_hold_the_same_numbers(dtype: torch.dtype, lanes: int, n: int, d: int) -> None:
    rows = random(n, d).to(dtype)
    panels = to_panels(rows, lanes)
    assert torch.equal(from_panels(panels, lanes)[:n], rows) and not from_panels(panels, lanes)[n:].any()
    assert panels.is_contiguous() and len(panels) == -(-n // (2 * lanes)) * 2 * lanes


@given(
    build=any_build,
    M=st.sampled_from(ROWS),
    d=st.sampled_from([32, 96, 576]),
    n=st.sampled_from([1, 15, 16, 33, 160]),
    bias=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
def test_a_linear_in_panels(build: Build, M: int, d: int, n: int, bias: bool, threads: int) -> None:
    """Every shape of tile, and none writes beyond its numbers."""
    dtype, lib = build
    linear = nn.Linear(d, n, bias=bias).to(dtype).requires_grad_(False)
    ours = PanelLinear(linear, lib)
    assert torch.equal(ours.rows(), linear.weight)
    assert [name for name, _ in ours.named_parameters()] == ["weight", "bias"][: 1 + bias]
    x, out = random(M, d).to(dtype), torch.full((M * n + 64,), 7.0, dtype=dtype)
    kept = x.clone()
    ours.run(x.data_ptr(), ours.weight.data_ptr(), out.data_ptr(), M, n, d, threads)
    expected = x.double() @ linear.weight.double().T
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.01}[dtype]
    torch.testing.assert_close(out[: M * n].view(M, n).double(), expected, rtol=tolerance, atol=tolerance)
    assert (out[M * n :] == 7).all() and torch.equal(x, kept)
    for lead in ((M,), (1, M), (M, 1)):
        got = ours(x.view(*lead, d))
        assert torch.equal(got, (out[: M * n] + 0).view(*lead, n) + (linear.bias if bias else 0)) and got.dtype == dtype
    assert ours(x[0]).shape == (n,)
    assert torch.equal(ours(x.T.contiguous().T), ours(x))  # however x lies


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("M", ROWS)
def test_the_halves_of_a_layer_are_the_layer(
    build: Build, threads: int, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, lib = build
    model, fast = (Llama.random(WIDE, seed=3, dtype=dtype) for _ in range(2))
    replace_modules(fast, {nn.Linear: lambda linear: PanelLinear(linear, lib)})
    plain, halves = model.blocks[0], HalfBlocks(fast.blocks[0], lib)
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


@given(build=any_build, lead=leads, threads=st.sampled_from([1, 3]))
def test_a_fused_block_is_the_block(build: Build, lead: tuple[int, ...], threads: int) -> None:
    """The same sums and the same norms: all else in it is the plain layer's."""
    dtype, lib = build
    plain = Llama.random(WIDE, seed=3, dtype=dtype).blocks[0]
    plain.attn_norm, plain.mlp_norm = (FusedNorm(norm, lib) for norm in (plain.attn_norm, plain.mlp_norm))
    x = random(*lead, WIDE.d_model).to(dtype)
    rope = rope_table(torch.zeros(x.shape[:-1]), rope_frequencies(WIDE), dtype)
    kept = x.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        near(FusedBlock(plain, lib)(x, rope, lambda q, k, v: q * 2), plain(x, rope, lambda q, k, v: q * 2))
    assert torch.equal(x, kept)


def test_halves_are_made_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (fuse, make_fast, lambda model: fuse(pack_weights(model))):
        model = make(Llama.random(WIDE))
        assert modules(model, HalfBlocks) == WIDE.n_layers
        assert modules(model, PanelLinear) == modules(Llama.random(WIDE), nn.Linear)
    for other in ({"qkv_bias": True}, {"qk_norm": True}):
        model = make_fast(Llama.random(replace(WIDE, **other)))
        assert modules(model, FusedBlock) == WIDE.n_layers and modules(model, PanelLinear)
    monkeypatch.setattr("minillm.fusing.multiplies", lambda lib: False)  # a CPU on which oneDNN is better
    model = make_fast(Llama.random(WIDE))
    assert modules(model, FusedBlock) == WIDE.n_layers and not modules(model, PanelLinear)
    assert modules(model, PackedLinear) == (modules(Llama.random(WIDE), nn.Linear) if can_pack(torch.float32) else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoints_rows_can_be_had_back(dtype: torch.dtype, tied: bool) -> None:
    config = replace(WIDE, tied=tied, qkv_bias=True, vocab_size=WIDE.vocab_size + 1)
    plain, fast = (Llama.random(config, seed=3, dtype=dtype) for _ in range(2))
    make_fast(fast)
    assert [name for name, _ in plain.named_parameters(remove_duplicate=False)] == [
        n for n, _ in fast.named_parameters()
    ]
    for name, parameter in plain.named_parameters():
        assert torch.equal(in_rows(fast, name), parameter)
    with pytest.raises(InputError, match="saved"):
        fast.state_dict()
    with pytest.raises(InputError, match="moved or converted"):
        fast.to(torch.float16)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_stays_so(build: Build, bad: float) -> None:
    dtype, lib = build
    x = random(3, 64).to(dtype)
    x[1, 40] = bad
    norm = RMSNorm(64, 1e-5).to(dtype)
    norm.weight = nn.Parameter(torch.ones(64, dtype=dtype), requires_grad=False)
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
    assert [name for name, _ in fused.named_parameters()] == list(plain.state_dict())
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
