"""transformers' own padded `generate` on the same weights, for comparison (the `dev` extra)."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from minillm.bench.harness import now
from minillm.errors import InputError
from minillm.model import Llama
from minillm.panels import in_rows
from minillm.weights import sources_of, split_shape


def from_llama(model: Llama) -> Any:
    """A transformers Llama with a copy of our weights, which never ends a text by itself.

    Raises InputError if transformers is not installed or the model is not a plain Llama.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise InputError(f"transformers is not installed; run `{sys.executable} -m pip install transformers`") from None
    c = model.config
    if c.qkv_bias or c.qk_norm or c.rope_scaling:
        raise InputError("the comparison is written for plain Llamas: no bias, no q/k norm, no RoPE scaling")
    settings: dict[str, Any] = dict(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        # an entry of its own before transformers 5, one of this dict since
        rope_theta=c.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        rows = [shape[0] for shape in split_shape(name, tuple(parameter.shape), c)]
        weights.update(zip(sources_of(name), in_rows(model, name).split(rows), strict=True))
    if c.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    peer: Any = LlamaForCausalLM(LlamaConfig(**settings))
    peer.load_state_dict(weights)
    return peer.to(device=model.device, dtype=model.dtype).eval()


def generate(peer: Any, prompts: Sequence[Sequence[int]], n_new: int) -> tuple[list[list[int]], list[float]]:
    """Greedy, `n_new` tokens for each of the prompts, shorter ones padded on the left: the outputs, and the time
    at which each step had its tokens, in seconds after the start.
    """
    stamps: list[float] = []

    def stamp(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        stamps.append(now(peer.device))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * n + list(p) for n, p in zip(pads, prompts, strict=True)], device=peer.device)
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads], device=peer.device)
    start = now(peer.device)
    with torch.inference_mode():
        out = peer.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=n_new,
            pad_token_id=0,  # read by nobody: no row ends early
            stopping_criteria=[stamp],
        )
    return out[:, longest:].tolist(), [t - start for t in stamps]
