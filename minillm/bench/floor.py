"""The least that a step can take with this model's Linears: they alone, one after the other on that many tokens, and
the live K and V at the speed of a copy. Both are measured in the run that the floor is compared with.

The roofline in `ceiling` knows only bytes and operations; this floor knows how fast the Linears really are here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minillm.bench import ceiling
from minillm.bench.ceiling import Ceilings
from minillm.bench.harness import Step
from minillm.config import Config
from minillm.model import Llama


def linears(model: Llama, tokens: int, rows: int) -> Callable[[], None]:
    """All Linears of the model one after the other, on `tokens` tokens, the head on `rows` of them; nothing else."""
    c = model.config
    generator = torch.Generator().manual_seed(0)

    def noise(n: int, size: int) -> torch.Tensor:
        return torch.randn(n, size, generator=generator).to(model.device, model.dtype)  # [n, size]

    hidden = noise(tokens, c.d_model)
    inputs = {
        "qkv": hidden,
        "o": noise(tokens, c.n_heads * c.head_dim),
        "gate_up": hidden,
        "down": noise(tokens, c.d_ff),
        "head": noise(rows, c.d_model),
    }
    named = ((path.rpartition(".")[2], module) for path, module in model.named_modules())
    work = [(module, inputs[name]) for name, module in named if name in inputs]

    def call_all() -> None:
        for module, x in work:
            module(x)

    return call_all


@dataclass(frozen=True)
class Floor:
    """The least that a step can take with these Linears. In seconds."""

    linears: float  # measured: all of them alone
    attention: float  # the live K and V at the speed of a copy, or the scores' arithmetic, whichever is longer
    bytes_alone: float  # the roofline of the whole step: weights and K and V moved, or all its arithmetic

    @property
    def total(self) -> float:
        return self.linears + self.attention

    @classmethod
    def of(cls, linears: float, step: Step, config: Config, itemsize: int, ceilings: Ceilings) -> "Floor":
        moved = step.kv_bytes / ceilings.copy_bytes_per_s
        multiplied = 4 * config.head_dim * step.scores / ceilings.flops_per_s
        whole = ceiling.floor_seconds([step], config, itemsize, ceilings)
        return cls(linears, max(moved, multiplied), whole)
