"""A matmul of our own, and the layout of weights that it reads: panels, from the first byte to the last.

`native/layer.c` multiplies one panel of outputs by a few rows of x at a time. That it can be called from C is what
lets `fusing` make one call of half a layer, which oneDNN's (see `packing`) does not.
"""

from ctypes import CDLL, c_int64

import torch
from torch import Tensor, nn

from minillm.model import Llama
from minillm.native import function
from minillm.packing import PackedLinear


class PanelLinear(PackedLinear):
    """A Linear whose weight lies in panels of some outputs, each of which one pass of C multiplies by some rows of x.

    `weight` has the numbers of [out, in] in the order of the panels, and zeros for outputs that fill up the last one.
    """

    def __init__(self, linear: nn.Linear | PackedLinear, lib: CDLL):
        nn.Module.__init__(self)
        rows = plain(linear.weight.detach())  # [out, in]
        self.out_features, self.lanes = len(rows), c_int64.in_dll(lib, "lanes").value
        self.weight = nn.Parameter(to_panels(rows, self.lanes), requires_grad=False)
        self.bias = linear.bias
        self.run = function(lib, "linear", pointers=3, integers=3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        n, d = self.out_features, x.shape[-1]
        assert d == self.weight.shape[-1] and x.dtype == self.weight.dtype
        y = x.new_empty(*x.shape[:-1], n)  # [..., out]
        pointers = x.data_ptr(), self.weight.data_ptr(), y.data_ptr()
        self.run(*pointers, x.numel() // d, n, d, torch.get_num_threads())
        return y if self.bias is None else y + self.bias

    def rows(self) -> Tensor:
        """The weight [out, in] as a checkpoint has it."""
        return from_panels(self.weight.detach(), self.lanes)[: self.out_features]


def to_panels(rows: Tensor, lanes: int) -> Tensor:
    """[out, in] -> the same numbers in panels of 2 lanes outputs, and within them by inputs; as [out, in] again, with
    so many outputs that all panels are full. In bfloat16 the CPU multiplies pairs of inputs, which stay together, and C
    stores the even outputs of a panel before the odd ones."""
    n, d = rows.shape
    rows = nn.functional.pad(rows, (0, 0, 0, -n % (2 * lanes)))  # [n, d], n a multiple of 2 lanes now
    if rows.dtype == torch.bfloat16:
        pairs = rows.view(torch.int32).view(-1, lanes, 2, d // 2)  # [panel, lane, even or odd, pair]
        return pairs.permute(0, 3, 2, 1).contiguous().view(-1, d // 2).view(rows.dtype)  # [n, d]
    return rows.view(-1, 2 * lanes, d).transpose(1, 2).contiguous().view(-1, d)  # [n, d]


def from_panels(panels: Tensor, lanes: int) -> Tensor:
    """What `to_panels` was given, and the zeros that it added."""
    _, d = panels.shape
    if panels.dtype == torch.bfloat16:
        pairs = panels.view(torch.int32).view(-1, d // 2, 2, lanes)  # [panel, pair, even or odd, lane]
        return pairs.permute(0, 3, 2, 1).reshape(-1, d // 2).view(panels.dtype)  # [n, d]
    return panels.view(-1, d, 2 * lanes).transpose(1, 2).reshape(-1, d)  # [n, d]


def plain(weight: Tensor) -> Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


def in_rows(model: Llama, name: str) -> Tensor:
    """A parameter of the model as a checkpoint has it, however it lies in memory now."""
    owner, parameter = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    if isinstance(owner, PanelLinear) and parameter is owner.weight:
        return owner.rows()
    return plain(parameter)
