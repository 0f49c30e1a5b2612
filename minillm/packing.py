"""Weights laid out for oneDNN's matmul once, at the start, instead of row by row at every call.

A CPU's matrix unit wants small blocks of a weight side by side. `nn.Linear` keeps rows, so each call either gathers
the blocks anew or reads memory in an order it does not like; at small batches, where reading the weights is all the
work, that can double the time. The same numbers come out. oneDNN's packing is behind private names of torch: they are
looked for, and without them (or on a GPU, or in a dtype that this CPU does not multiply) nothing changes but the speed.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from minillm.errors import InputError
from minillm.model import Llama


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight [out, in] lies in oneDNN's own order (`weight.to_dense()` has it in rows)."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.run: Callable[..., Any] = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(x, self.weight, self.bias, "none", [], "")  # [..., out]
        return y

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise InputError("a packed model cannot be moved or converted; load it again with that device and dtype")

    def _save_to_state_dict(self, *args: Any) -> NoReturn:
        raise InputError("a packed model cannot be saved; load it again with Llama.from_pretrained and save that")


def pack_weights(model: Llama) -> Llama:
    """Replaces every Linear of the model in place, and lets go of the plain weights; returns the model.

    A tied head gets a packed copy of its own, since the embedding is read by rows.
    """
    if model.device.type != "cpu" or not can_pack(model.dtype):
        return model
    replace(model, {nn.Linear: PackedLinear})
    return model


def replace(model: Llama, makers: Mapping[type[nn.Module], Callable[[Any], nn.Module]]) -> None:
    """Puts in place of every module of exactly these types what its maker makes of it."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) in makers:
                setattr(parent, name, makers[type(child)](child))


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has the two operators and this CPU the arithmetic: found by doing it once."""
    try:
        PackedLinear(nn.Linear(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True
