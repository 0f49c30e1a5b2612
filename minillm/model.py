"""A Llama, by hand. Everything but attention is per token, so the model is written over leading dimensions and
cannot tell one flat run of tokens [T] from a rectangle [B, T]; attention comes in from outside as a function.

Shapes: T new tokens in this step · d d_model · H / Hkv query / key-value heads · D head dim · V vocabulary.
Sources: Touvron et al. 2023 (Llama); Hugging Face `modeling_llama.py` is the reference for order and casts.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from minillm.attention import Attend
from minillm.config import Config


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich 2019). Statistics in float32 at least; the product in x's own dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        # the order matters in bf16: back to x's dtype first, then the weight, as the checkpoints were trained
        return normed.to(x.dtype) * self.weight


def rope_frequencies(config: Config, device: torch.device | None = None) -> Tensor:
    """Radians per position for each of the D/2 pairs, float64 [D/2]: theta ** (-2i / D) (Su et al. 2021).

    With llama3 scaling, pairs that turn fewer than `low` times within the original context are slowed by
    `factor`, those that turn more than `high` times stay, and the ones between are blended.
    Source: Llama 3.1's reference, `apply_scaling`.
    """
    D = config.head_dim
    freq = config.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float64, device=device) / D)  # [D/2]
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_context * freq / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it was, 0: slowed
    return keep * freq + (1 - keep) * freq / scaling.factor


def rope_table(positions: Tensor, freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, laid out for `rotate`: [..., T, 1, D] each.

    Computed wide and rounded to `dtype` last: in bf16, positions 256 and 257 would be the same number.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions[..., None, None].to(wide) * freq.to(wide)  # [..., T, 1, D/2]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pair i of every head by its position's angle. x [..., T, heads, D] -> same.

    Hugging Face checkpoints pair dimension i with i + D/2 (not 2i with 2i + 1, as the paper writes it). For halves
    a and b of a head: (a cos - b sin, b cos + a sin), which is x cos + (b, a) (-sin, sin).
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Rotary(nn.Module):
    """`rotate` of q and k, as a module without parameters: what does the same faster can take its place (`fusing`)."""

    def forward(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return rotate(q, *rope), rotate(k, *rope)


class Attention(nn.Module):
    """Projections around attention. What attention looks at, this layer does not know: see `attention.Attend`."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        D = config.head_dim
        self.head_dim = D
        # q, k and v in one Linear: one read of x and one matmul instead of three small ones
        self.qkv = nn.Linear(config.d_model, sum(self.heads) * D, bias=config.qkv_bias)
        self.o = nn.Linear(config.n_heads * D, config.d_model, bias=False)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.rotary = Rotary()

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H + 2 Hkv, D]
        q, k, v = qkv.split_with_sizes(self.heads, dim=-2)  # [..., T, H or Hkv, D]
        q, k = self.rotary(self.q_norm(q), self.k_norm(k), rope)
        return self.o(attend(q, k, v).flatten(-2))  # [..., T, H*D] -> [..., T, d]


class SiluTimes(nn.Module):
    """silu(gate) * up, of the two halves of one tensor [..., 2 d_ff] -> [..., d_ff]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)  # [..., d_ff] each
        return nn.functional.silu(gate) * up


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), gate and up in one Linear."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.silu_times = SiluTimes()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.silu_times(self.gate_up(x)))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope, attend)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The whole model. Inference only: build it with `from_pretrained`, or `random` for tests."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens and positions, int64 [..., T]  ->  hidden states [..., T, d]"""
        x = self.embed(tokens)  # [..., T, d]
        freq = rope_frequencies(self.config, positions.device)
        rope = rope_table(positions, freq, x.dtype)  # computed, not stored: no table to outgrow
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, partial(attend, layer))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, V]. The caller picks the M rows worth a matmul over the whole vocabulary."""
        return self.head(hidden)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @classmethod
    def from_pretrained(
        cls, path_or_name: str | Path, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto"
    ) -> "Llama":
        """A model folder, or a name that `minillm weights` knows. Raises InputError, or WeightsError with the path."""
        from minillm.weights import load

        return load(path_or_name, device, dtype)

    @classmethod
    def random(cls, config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> "Llama":
        """Random weights of a size that keeps activations near 1: for tests, and benchmarks without a checkpoint."""
        model = cls(config).to(torch.float64)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                # vectors are norm weights (about 1) or biases; matrices keep the variance of their input
                scale = 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale + (1.0 if parameter.dim() == 1 else 0.0))
        return model.to(dtype).eval().requires_grad_(False)
