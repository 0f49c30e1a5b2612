"""What lies between the matmuls of a layer, fused: norms, rotation, silu(gate) * up and residuals in one pass of C
each; and all that a layer does before its attention, and all that it does after, in one call each, matmuls included.

torch runs RMSNorm as six operators, each of which reads and writes all numbers; at small batches what it costs to call
them is most of the time. As in `packing`, modules of a loaded model are replaced from outside, the same numbers come
out (they round where `model` rounds), and where there is no compiler nothing changes but the speed.
"""

import math
from collections.abc import Callable
from ctypes import CDLL, c_int64
from functools import partial

import torch
from torch import Tensor, nn

from minillm.model import Block, Llama, RMSNorm, Rotary, SiluTimes
from minillm.native import STEP, NotCompiled, function, library
from minillm.packing import PackedLinear, pack_weights, replace
from minillm.panels import PanelLinear


def multiplies(lib: CDLL) -> bool:
    """Whether its matmul is the best that this CPU can do."""
    return bool(c_int64.in_dll(lib, "multiplies").value)


class FusedNorm(nn.Module):
    def __init__(self, norm: RMSNorm, lib: CDLL):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.run = function(lib, "norm", pointers=3, integers=3, doubles=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out, d = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), self.weight.data_ptr(), out.data_ptr()
        self.run(*pointers, x.numel() // d, d, d, self.eps, torch.get_num_threads())
        return out


class FusedRotary(nn.Module):
    """Turns the heads in place, in the output of qkv: nobody needs them as they were."""

    def __init__(self, _: Rotary, lib: CDLL):
        super().__init__()
        self.run = function(lib, "rotate", pointers=4, integers=6)

    def forward(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = rope  # [..., T, 1, D] each
        (*lead, H, D), Hkv = q.shape, k.shape[-2]
        pointers = q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr()
        strides = token_stride(q), token_stride(k)
        self.run(*pointers, math.prod(lead), H, Hkv, D, *strides, torch.get_num_threads())
        return q, k


def token_stride(x: Tensor) -> int:
    """Numbers from one token to the next, of a tensor [..., T, heads, D] whose heads lie side by side."""
    *lead, stride, head, one = x.stride()
    assert head == x.shape[-1] and one == 1
    if lead:  # rows, one after the other, are one run of tokens
        x.view(-1, *x.shape[-2:])  # raises where they are not
    return stride


class FusedSiluTimes(nn.Module):
    def __init__(self, _: SiluTimes, lib: CDLL):
        super().__init__()
        self.run = function(lib, "silu_times", pointers=2, integers=2)

    def forward(self, gate_up: Tensor) -> Tensor:
        d = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], d)  # [..., d_ff]
        self.run(gate_up.data_ptr(), out.data_ptr(), out.numel() // d, d, torch.get_num_threads())
        return out


# what is replaced, and by what
FUSED: dict[type[nn.Module], Callable[..., nn.Module]] = {
    RMSNorm: FusedNorm,
    Rotary: FusedRotary,
    SiluTimes: FusedSiluTimes,
}


class FusedBlock(Block):
    """A Block whose first residual is one pass with the norm after it, and whose second is added in place."""

    def __init__(self, block: Block, lib: CDLL):
        nn.Module.__init__(self)
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = block.attn_norm, block.attn, block.mlp_norm, block.mlp
        self.run_add = function(lib, "add", pointers=2, integers=2)
        self.run_add_norm = function(lib, "add_norm", pointers=5, integers=2, doubles=1)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        x, normed = self.add_norm(x, self.attn(self.attn_norm(x), rope, attend))  # [..., T, d] each
        return self.add(x, self.mlp(normed))

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and the norm of it."""
        x, y, norm, d = x.contiguous(), y.contiguous(), self.mlp_norm, x.shape[-1]
        added, normed = torch.empty_like(x), torch.empty_like(x)
        pointers = x.data_ptr(), y.data_ptr(), norm.weight.data_ptr(), added.data_ptr(), normed.data_ptr()
        self.run_add_norm(*pointers, x.numel() // d, d, norm.eps, torch.get_num_threads())
        return added, normed

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y in the place of x."""
        y, d = y.contiguous(), x.shape[-1]
        self.run_add(x.data_ptr(), y.data_ptr(), x.numel() // d, d, torch.get_num_threads())
        return x


class HalfBlocks(FusedBlock):
    """A Block in two calls of C, before and after its attention, for weights in panels."""

    def __init__(self, block: Block, lib: CDLL):
        super().__init__(block, lib)
        attn, mlp = block.attn, block.mlp
        self.heads, self.head_dim, self.d_ff = attn.heads, attn.head_dim, mlp.gate_up.out_features // 2
        self.eps = block.attn_norm.eps, block.mlp_norm.eps
        self.weights = [linear.weight.data_ptr() for linear in (attn.qkv, attn.o, mlp.gate_up, mlp.down)]
        self.norms = block.attn_norm.weight.data_ptr(), block.mlp_norm.weight.data_ptr()
        self.run_before = function(lib, "before", pointers=7, integers=5, doubles=1)
        self.run_after = function(lib, "after", pointers=8, integers=4, doubles=1)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        x = x.contiguous()
        q, k, v = self.before(x, *rope).split_with_sizes(self.heads, dim=-2)  # [..., T, H or Hkv, D]
        return self.after(attend(q, k, v).contiguous(), x)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm, qkv, rotation. x [..., T, d] -> [..., T, H + 2 Hkv, D]"""
        d, heads, D = x.shape[-1], sum(self.heads), self.head_dim
        normed, out = torch.empty_like(x), x.new_empty(*x.shape[:-1], heads, D)  # [..., T, H + 2 Hkv, D]
        pointers = x.data_ptr(), self.norms[0], self.weights[0], cos.data_ptr(), sin.data_ptr()
        sizes = x.numel() // d, d, heads, heads - self.heads[-1], D
        self.run_before(*pointers, normed.data_ptr(), out.data_ptr(), *sizes, self.eps[0], torch.get_num_threads())
        return out

    def after(self, attended: Tensor, x: Tensor) -> Tensor:
        """o and the residual, norm, the MLP and the residual. attended [..., T, H, D], x [..., T, d] -> [..., T, d]"""
        d, f = x.shape[-1], self.d_ff
        M, (_, o, gate_up, down) = x.numel() // d, self.weights
        scratch, out = x.new_empty(M * (3 * f + d)), torch.empty_like(x)
        pointers = attended.data_ptr(), x.data_ptr(), o, self.norms[1], gate_up, down
        sizes = M, attended.numel() // M, d, f
        self.run_after(*pointers, scratch.data_ptr(), out.data_ptr(), *sizes, self.eps[1], torch.get_num_threads())
        return out


def fuse(model: Llama) -> Llama:
    """Replaces these modules in place where this machine can; returns the model."""
    c = model.config
    if model.device.type != "cpu" or c.d_model % STEP or c.d_ff % STEP or c.head_dim % (2 * STEP):
        return model
    try:
        lib = library("layer", model.dtype)
    except NotCompiled:
        return model
    replace(model, {plain: partial(fused, lib=lib) for plain, fused in FUSED.items()})
    if multiplies(lib):
        panels = partial(PanelLinear, lib=lib)
        replace(model, {nn.Linear: panels, PackedLinear: panels})
    halves = multiplies(lib) and not (c.qkv_bias or c.qk_norm)
    replace(model, {Block: partial(HalfBlocks if halves else FusedBlock, lib=lib)})
    return model


def make_fast(model: Llama) -> Llama:
    """All that makes a loaded model faster on this machine without changing what it computes, in place."""
    return pack_weights(fuse(model))
