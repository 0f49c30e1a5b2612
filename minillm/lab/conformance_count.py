"""What an engine computes and what it keeps, seen from outside, whatever its code looks like."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.config import Config


class CountTokens(TorchDispatchMode):
    """Tokens pushed through the model: the rows of every product with a matrix as large as the MLP's second one, over
    that matrix's inner size. In each layer there is one such product for each token.

    It sees torch's own operators in the thread that it is entered in, and nothing in code that goes around them.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.rows = 0

    @property
    def tokens(self) -> float:
        return self.rows / self.config.n_layers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        if "mm" in name or "mv" in name or "linear" in name or "matmul" in name:
            inner, width = self.config.d_ff, self.config.d_model
            operands = [arg for arg in args if isinstance(arg, Tensor)][1 if name.startswith(("add", "badd")) else 0 :]
            if operands[0].shape[-1] == inner and any(one.numel() == inner * width for one in operands):
                self.rows += out.numel() // width
        return out


@contextmanager
def new_tensors() -> Iterator[None]:
    """Inside the block `kept_bytes` sees only what was made in it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def kept_bytes() -> int:
    """Bytes of all tensors that are alive, each piece of memory once."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def least_weights(config: Config, dtype: torch.dtype) -> int:
    """Bytes of the weights, each once."""
    c = config
    attention = c.d_model * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    layer = attention + 3 * c.d_model * c.d_ff + 2 * c.d_model
    top = c.d_model * c.vocab_size * (1 if c.tied else 2) + c.d_model
    return (c.n_layers * layer + top) * dtype.itemsize
