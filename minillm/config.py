"""What a Llama-family checkpoint says about itself: `config.json`, read once and checked at the door.

Sizes:  d_model  width of the residual stream      L = n_layers
        H = n_heads query heads, Hkv = n_kv_heads  D = head_dim      V = vocab_size
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.errors import WeightsError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies (`rope_type` "llama3"; see `model.rope_frequencies`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Config:
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    norm_eps: float
    rope_theta: float
    context: int  # most positions the model was trained for
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm on each head of q and k, before the rotation
    eos: tuple[int, ...] = ()  # any of these ends a text

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "context"):
            if getattr(self, name) < 1:
                raise WeightsError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise WeightsError(
                f"config.json: {self.n_heads} query heads cannot share {self.n_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise WeightsError(f"config.json: head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token keeps over all layers: 2 * L * Hkv * D * itemsize."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_folder(cls, folder: Path) -> "Config":
        """Reads `config.json` (and the eos ids of `generation_config.json`).

        Raises WeightsError naming the file and the entry for anything missing or not implemented.
        """
        path = folder / "config.json"
        raw = _read_json(path)
        generation = folder / "generation_config.json"
        extra = _read_json(generation) if generation.exists() else {}
        try:
            return cls.from_dict(raw, extra)
        except WeightsError as error:
            raise WeightsError(f"{path}: {str(error).removeprefix('config.json: ')}") from None

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> "Config":
        """Hugging Face's names to ours. A default never beats a value that the file gives."""
        kind = raw.get("model_type")
        if kind not in ARCHITECTURES:
            raise WeightsError(f"config.json: model_type {kind!r} is not implemented (known: {ARCHITECTURES})")

        def need(name: str) -> int:
            value = raw.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise WeightsError(f"config.json: {name} is {value!r}; it must be a whole number")
            return value

        n_heads, d_model = need("num_attention_heads"), need("hidden_size")
        context = need("max_position_embeddings")
        _refuse_what_is_not_implemented(raw, kind, context)
        if raw.get("head_dim") is None and (n_heads < 1 or d_model % n_heads):
            raise WeightsError(f"config.json: no head_dim, and {n_heads} heads do not divide hidden_size {d_model}")
        rope_theta, rope_scaling = _rope(raw)
        vocab_size = need("vocab_size")
        return cls(
            vocab_size=vocab_size,
            d_model=d_model,
            n_layers=need("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_heads if raw.get("num_key_value_heads") is None else need("num_key_value_heads"),
            head_dim=d_model // n_heads if raw.get("head_dim") is None else need("head_dim"),
            d_ff=need("intermediate_size"),
            norm_eps=_positive(raw, "rms_norm_eps"),
            rope_theta=rope_theta,
            context=context,
            rope_scaling=rope_scaling,
            tied=bool(_optional(raw, "tie_word_embeddings", bool)),
            # Qwen2 always has a bias on q, k and v, though its files do not say so
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            eos=_eos(raw, generation or {}, vocab_size),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file; a model folder holds config.json and *.safetensors") from None
    except (ValueError, OSError, RecursionError) as error:
        raise WeightsError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds a {type(value).__name__}; it must be a JSON object")
    return value


def _positive(raw: dict[str, Any], name: str) -> float:
    value = raw.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise WeightsError(f"config.json: {name} is {value!r}; it must be a finite number above 0")
    return float(value)


def _optional(raw: dict[str, Any], name: str, kind: type) -> Any:
    """The entry, or None where it is absent or null."""
    value = raw.get(name)
    if value is not None and type(value) is not kind:
        raise WeightsError(f"config.json: {name} is {value!r}; it must be of type {kind.__name__}, or null")
    return value


def _refuse_what_is_not_implemented(raw: dict[str, Any], kind: str, context: int) -> None:
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise WeightsError(f"config.json: hidden_act {act!r} is not implemented (only silu)")
    if raw.get("quantization_config"):
        raise WeightsError("config.json: quantization_config: quantized safetensors are not implemented")
    for name in ("attention_bias", "mlp_bias"):
        # Qwen2's own q, k, v bias is not announced by this flag; a bias on the output projection is
        if raw.get(name):
            raise WeightsError(f"config.json: {name} is true, which is not implemented")
    for source in (raw, _optional(raw, "rope_parameters", dict) or {}):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise WeightsError(
                f"config.json: partial_rotary_factor {source['partial_rotary_factor']!r} is not implemented"
            )
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise WeightsError(f"config.json: pretraining_tp {raw['pretraining_tp']} is not implemented (only 1)")
    window = _optional(raw, "sliding_window", int)
    if kind == "mistral" and "sliding_window" not in raw:
        window = 4096  # what the format means by leaving it out
    # Qwen writes a window into every file and switches it on elsewhere; Mistral v0.1's is simply on.
    switched_on = raw.get("use_sliding_window", False) if kind.startswith("qwen") else window is not None
    if switched_on and window is not None and window < context:
        raise WeightsError(f"config.json: sliding_window {window} is active, which is not implemented")
    for layer_type in _optional(raw, "layer_types", list) or []:
        if layer_type != "full_attention":
            raise WeightsError(f"config.json: layer_types holds {layer_type!r}, which is not implemented")


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Old files: `rope_theta` beside `rope_scaling`. Since transformers 5: one dict, `rope_parameters`, which wins."""
    sources = [_optional(raw, name, dict) or {} for name in ("rope_scaling", "rope_parameters")]
    parameters = sources[0] | sources[1]
    if nested := [name for name, value in parameters.items() if isinstance(value, dict)]:
        raise WeightsError(f"config.json: rope_parameters for {nested[0]!r} alone are not implemented")
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else _positive({"rope_theta": theta}, "rope_theta")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise WeightsError(f"config.json: rope_type {kind!r} is not implemented (known: default, llama3)")
    low, high = _positive(parameters, "low_freq_factor"), _positive(parameters, "high_freq_factor")
    if high <= low:
        raise WeightsError(f"config.json: high_freq_factor is {high}; it must be above low_freq_factor, {low}")
    return theta, RopeScaling(
        factor=_positive(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=int(_positive(parameters, "original_max_position_embeddings")),
    )


def _eos(raw: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """One id, a list or null, in either file: all of them count (Llama 3 ends a turn with another id than a text)."""
    ids: list[int] = []
    for source in (raw, generation):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise WeightsError(
                f"config.json: eos_token_id {token!r} (here or in generation_config.json) is outside the "
                f"vocabulary of {vocab_size}"
            )
    return tuple(dict.fromkeys(ids))
