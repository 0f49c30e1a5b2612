"""Packed weights: the same numbers in another order, and nothing where they cannot be had."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY
from torch import nn

from minillm import packing
from minillm.attention import SelfAttend
from minillm.errors import InputError
from minillm.model import Llama
from minillm.packing import PackedLinear, can_pack, pack_weights

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
needs_packing = pytest.mark.skipif(not DTYPES, reason="this torch or CPU has no packed Linear")


def linears(model: Llama) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=False, qkv_bias=True, qk_norm=True)])
def test_a_packed_model_says_the_same(dtype: torch.dtype, config: object) -> None:
    plain = Llama.random(config, seed=3, dtype=dtype)  # type: ignore[arg-type]
    packed = pack_weights(Llama.random(config, seed=3, dtype=dtype))  # type: ignore[arg-type]
    assert not linears(packed) and linears(plain)
    for T in (1, 7, 40):
        tokens, positions = torch.arange(T) % 64, torch.arange(T)
        expected = plain.logits(plain(tokens, positions, SelfAttend(positions))).float()
        got = packed.logits(packed(tokens, positions, SelfAttend(positions))).float()
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
        rectangle = packed(tokens.expand(3, T), positions.expand(3, T), SelfAttend(positions.expand(3, T)))
        assert rectangle.shape == (3, T, config.d_model)  # type: ignore[attr-defined]


@needs_packing
def test_the_plain_weights_can_be_had_back_and_are_not_kept() -> None:
    plain, packed = (Llama.random(TINY, dtype=DTYPES[0]) for _ in range(2))
    pack_weights(packed)
    for name, parameter in plain.named_parameters():
        other = packed.get_parameter(name)
        assert torch.equal(other.to_dense() if other.is_mkldnn else other, parameter)
    assert packed.head.weight.is_mkldnn and not packed.embed.weight.is_mkldnn  # a tied head: a copy of its own
    assert pack_weights(packed) is packed  # twice is once


@needs_packing
def test_a_packed_model_is_neither_moved_nor_saved() -> None:
    packed = pack_weights(Llama.random(TINY, dtype=DTYPES[0]))
    with pytest.raises(InputError, match="moved or converted"):
        packed.to(torch.float64)
    with pytest.raises(InputError, match="saved"):
        packed.state_dict()


def test_what_cannot_be_packed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Llama.random(TINY, dtype=torch.float64)
    assert linears(pack_weights(double))  # oneDNN has no float64
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not can_pack(torch.float32)
    single = Llama.random(TINY, dtype=torch.float32)
    before = linears(single)
    assert linears(packing.pack_weights(single)) == before


def test_a_packed_linear_is_asked_like_any_other() -> None:
    """Hooks count rows, and learners look at `.weight`."""
    if not DTYPES:
        pytest.skip("this torch or CPU has no packed Linear")
    seen: list[torch.Size] = []
    linear = PackedLinear(nn.Linear(16, 8, dtype=DTYPES[0]))
    linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    assert linear(torch.zeros(2, 3, 16, dtype=DTYPES[0])).shape == (2, 3, 8)
    assert seen == [(2, 3, 16)] and linear.weight.shape == (8, 16)
