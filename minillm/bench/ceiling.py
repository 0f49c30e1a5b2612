"""How fast could it be here? The machine's memory and arithmetic, measured in the same run, and the least
time that a stage's counted work takes on them.

A step must read the weights and the K and V that attention looks at, and must do the multiplications; if
the two overlap perfectly it takes the longer one (the roofline model, Williams, Waterman & Patterson 2009).
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import nn

from minillm.bench.harness import Step, now
from minillm.config import Config
from minillm.native import NotCompiled, library
from minillm.panels import PanelLinear


@dataclass(frozen=True)
class Ceilings:
    """The best of several measurements each: a ceiling is not an average."""

    read_bytes_per_s: float
    copy_bytes_per_s: float  # read and written, added up
    flops_per_s: float  # of a square matrix product in the run's dtype

    @property
    def bytes_per_s(self) -> float:
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def best(self, other: "Ceilings") -> "Ceilings":
        """Of two measurements, the better one of each."""
        return Ceilings(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def measure(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> Ceilings:
    """Spends three or four times `seconds`."""
    size = 2**30 if device.type == "cuda" else 2**28  # bytes: far more than any cache holds
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    side = 8192 if device.type == "cuda" else 2048
    linear = nn.Linear(side, side, bias=False, device=device, dtype=dtype).requires_grad_(False)
    x = torch.ones(side, side, device=device, dtype=dtype)
    products: list[nn.Module] = [linear]
    with suppress(NotCompiled):  # our own may be faster than torch's, and what can be beaten is no ceiling
        if device.type == "cpu":
            products.append(PanelLinear(linear, library("layer", dtype)))
    return Ceilings(
        read_bytes_per_s=size / fastest(source.sum, device, seconds),
        copy_bytes_per_s=2 * size / fastest(lambda: target.copy_(source), device, seconds),
        flops_per_s=2 * side**3 / min(fastest(partial(product, x), device, seconds) for product in products),
    )


def fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest time of one call, in seconds; called twice at least, the first time to warm up."""
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = now(device)
        work()
        stop = now(device)
        best = min(best, stop - start)
        if stop >= end:
            return best


def layer_weights(config: Config) -> int:
    """Weights that every token is multiplied with: qkv, o, gate, up and down of all layers."""
    heads = config.n_heads + 2 * config.n_kv_heads
    attention = config.d_model * config.head_dim * (heads + config.n_heads)
    return config.n_layers * (attention + 3 * config.d_model * config.d_ff)


def floor_seconds(steps: Iterable[Step], config: Config, itemsize: int, ceilings: Ceilings) -> float:
    """The least time these steps take, pads and all: for each the longer one of moving and multiplying.

    One multiplication and one addition are two operations; a score costs D of both for q k^T and D for its
    share of the sum over v.
    """
    layers, head = layer_weights(config), config.vocab_size * config.d_model
    total = 0.0
    for step in steps:
        moved = itemsize * (layers + (head if step.rows else 0)) + step.kv_bytes
        flops = 2 * layers * step.tokens + 2 * head * step.rows + 4 * config.head_dim * step.scores
        total += max(moved / ceilings.bytes_per_s, flops / ceilings.flops_per_s)
    return total
