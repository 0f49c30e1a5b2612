"""The layers against worked values, and the whole model against Hugging Face's on every kind of checkpoint."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm.attention import SelfAttend
from minillm.config import RopeScaling
from minillm.model import Llama, RMSNorm, rope_frequencies, rope_table, rotate
from minillm.request import SamplingParams, make_request
from minillm.stages import STAGES
from minillm.weights import load_folder

LLAMA_3 = replace(
    TINY,
    head_dim=64,
    rope_theta=5e5,
    rope_scaling=RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192),
)


def solo(model: Llama, tokens: list[int] | Tensor) -> Tensor:
    """Logits [T, V] of one sequence by the naive stage: the oracle for everything else."""
    tokens = torch.as_tensor(tokens)
    positions = torch.arange(len(tokens))
    return model.logits(model(tokens, positions, SelfAttend(positions)))


def rotated(q: list[float], position: int) -> Tensor:
    freq = rope_frequencies(replace(TINY, head_dim=len(q)))
    x = torch.tensor(q, dtype=torch.float64)[None, None]  # [1, 1, D]
    return rotate(x, *rope_table(torch.tensor([position]), freq, torch.float64))[0, 0]


# ---- rotary positions


def test_llama3_frequencies() -> None:
    """hf#32330, jmaczan/tiny-vllm#1: the scaled frequencies were computed, and the plain ones used."""
    freq = rope_frequencies(LLAMA_3)
    plain = rope_frequencies(replace(LLAMA_3, rope_scaling=None))
    golden = torch.tensor([1.2905479e-3, 4.2955680e-4, 9.7082878e-5, 1.9461638e-5], dtype=torch.float64)
    torch.testing.assert_close(freq[15:19], golden, rtol=1e-7, atol=0)
    assert torch.equal(freq[:15], plain[:15])
    assert ((freq < plain) & (freq > plain / 32))[15:18].all()
    torch.testing.assert_close(freq[18:], plain[18:] / 32, rtol=1e-15, atol=0)


def test_llama3_frequencies_of_the_8b() -> None:
    """hf#32330 at head dim 128 and factor 8: 29 pairs kept, 6 blended, 29 divided."""
    assert LLAMA_3.rope_scaling is not None
    scaled = replace(LLAMA_3, head_dim=128, rope_scaling=replace(LLAMA_3.rope_scaling, factor=8.0))
    freq, plain = rope_frequencies(scaled), rope_frequencies(replace(scaled, rope_scaling=None))
    ratio = plain / freq
    assert [(ratio == 1).sum(), (ratio > 8 - 1e-9).sum()] == [29, 29]
    assert ((ratio > 1) & (ratio < 8)).sum() == 6


def test_dimension_i_turns_with_i_plus_half() -> None:
    """NeuraLegion/shainet#111, jmaczan/tiny-vllm#4: neighbours turned together. Position 0 cannot tell."""
    out = rotated([1, 0, 0, 0, 0, 0, 0, 0], position=1)
    expected = [math.cos(1), 0, 0, 0, math.sin(1), 0, 0, 0]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))
    angle = 3 * 10000 ** (-2 * 2 / 8)  # pair 2 at position 3
    expected = [0, 0, -math.sin(angle), 0, 0, 0, math.cos(angle), 0]
    out = rotated([0, 0, 0, 0, 0, 0, 1, 0], position=3)
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 100))
def test_scores_depend_on_the_distance_alone(a: int, b: int, shift: int) -> None:
    """Su et al. 2021: what makes a rotation a relative position; it also keeps lengths."""
    q, k = [1.0, -2, 3, 0.5, 1, 1, -1, 2], [0.5, 1, -1, 2, 3, -1, 0.25, 1]
    score = rotated(q, a) @ rotated(k, b)
    torch.testing.assert_close(rotated(q, a + shift) @ rotated(k, b + shift), score, rtol=0, atol=1e-9)
    torch.testing.assert_close(rotated(q, a).norm(), torch.tensor(q, dtype=torch.float64).norm())


def test_bf16_angles_are_rounded_last() -> None:
    """hf#29285, vllm#863, sgl-project/sglang-jax#1472: in bf16, positions 256 and 257 are one number."""
    freq = rope_frequencies(LLAMA_3)
    positions = torch.arange(4096)
    for narrow, wide in zip(
        rope_table(positions, freq, torch.bfloat16), rope_table(positions, freq, torch.float32), strict=True
    ):
        assert narrow.dtype == torch.bfloat16 and wide.dtype == torch.float32
        assert not torch.equal(narrow[256], narrow[257])
        assert torch.equal(narrow[4095], wide[4095].bfloat16())
        assert torch.equal(narrow, wide.bfloat16())
    exact = rope_table(positions, freq, torch.float64)[0]
    torch.testing.assert_close(wide := rope_table(positions, freq, torch.float32)[0], exact.float(), rtol=0, atol=3e-4)
    assert wide.shape == (4096, 1, 64)


@pytest.mark.parametrize("stage", ["naive", "cached", "chunked", "padded", "dynamic", "ragged", "continuous"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_text_may_grow_to_the_context(stage: str, scaled: bool) -> None:
    """karpathy/nanochat#514, gty111/gLLM#269: a table of angles was shorter than prompt + output."""
    scaling = RopeScaling(factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8)
    config = replace(TINY, context=16, rope_scaling=scaling if scaled else None, eos=())
    model = Llama.random(config, dtype=torch.float64)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    request = make_request(prompt, SamplingParams(max_tokens=99), config, None, max_len=config.context)
    events = list(STAGES[stage](model, [request]))
    assert events[-1].finish_reason == "length"
    assert len(request.output) == 7  # the last one's position, 16, need not be stored
    for i, token in enumerate(request.output):
        assert token == solo(model, [*prompt, *request.output[:i]])[-1].argmax()


# ---- the norm


@pytest.mark.parametrize(("eps", "value"), [(1e-5, 0.301511), (1e-6, 0.707107)])
def test_epsilon_comes_from_the_config(eps: float, value: float) -> None:
    """lcpp#2373, meta-llama/llama#771: 1e-6 on a model trained with 1e-5."""
    model = Llama.random(replace(TINY, norm_eps=eps, qk_norm=True), dtype=torch.float64)
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    assert len(norms) == 4 * TINY.n_layers + 1
    for norm in norms:
        size = norm.weight.numel()
        norm.weight.fill_(1.0)
        out = norm(torch.full((size,), 1e-3, dtype=torch.float64))
        torch.testing.assert_close(out, torch.full_like(out, value), rtol=0, atol=1e-6)


def test_norm_casts_before_it_multiplies() -> None:
    """hf#30236, hf#25421, NVIDIA/TransformerEngine#1132: two orders, both called RMSNorm. Ours is Hugging Face's."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(256, generator=generator).bfloat16() for _ in range(2))
    norm = RMSNorm(256, 1e-5).bfloat16()
    norm.weight.data = weight
    wide = x.float() * torch.rsqrt(x.float().square().mean() + 1e-5)
    ours, other = wide.bfloat16() * weight, (wide * weight.float()).bfloat16()
    assert not torch.equal(ours, other)  # or the next line would prove nothing
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ours)


def test_norm_statistics_are_wide() -> None:
    """meta-llama/llama#1048: in fp16, 300 squared is infinite."""
    norm = RMSNorm(8, 1e-5).half()
    norm.weight.data.fill_(1.0)
    assert torch.equal(norm(torch.full((8,), 300.0).half()), torch.ones(8).half())
    double = RMSNorm(8, 1e-300).double()
    double.weight.data.fill_(1.0)
    assert double(torch.full((8,), 1e-30, dtype=torch.float64)).isfinite().all()


# ---- the whole model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_hidden_states_and_logits_keep_the_dtype(dtype: torch.dtype) -> None:
    model = Llama.random(replace(TINY, qkv_bias=True, qk_norm=True), dtype=dtype)
    logits = solo(model, [1, 2, 3])
    assert logits.dtype == model.dtype == dtype
    assert logits.shape == (3, 64) and logits.isfinite().all()


def test_a_rectangle_is_rows_of_lines(tiny: Llama) -> None:
    """hf#33095: each row of a rectangle has its own positions, and its logits are those of the row alone."""
    rows = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6], [5, 5, 5, 5]])
    positions = torch.arange(4).expand(3, 4)
    logits = tiny.logits(tiny(rows, positions, SelfAttend(positions)))
    for row, expected in zip(logits, rows, strict=True):
        torch.testing.assert_close(row, solo(tiny, expected), rtol=0, atol=1e-11)


@given(st.lists(st.integers(0, 63), min_size=2, max_size=12), st.data())
def test_later_tokens_change_nothing_before_them(tiny: Llama, tokens: list[int], data: st.DataObject) -> None:
    """mlx-node/mlx-node#24: seeing the future. Earlier tokens do count."""
    at = data.draw(st.integers(1, len(tokens) - 1))
    other = [*tokens[:at], (tokens[at] + 1) % 64, *tokens[at + 1 :]]
    a, b = solo(tiny, tokens), solo(tiny, other)
    torch.testing.assert_close(a[:at], b[:at], rtol=0, atol=1e-11)
    assert ((a[at:] - b[at:]).abs().amax(-1) > 1e-6).all()


def test_random_is_the_same_for_a_seed() -> None:
    """One draw in float64, rounded last: every dtype holds the same model."""
    a, b, c = (Llama.random(TINY, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, c.embed.weight)
    assert a.head.weight.data_ptr() == a.embed.weight.data_ptr()
    wide = Llama.random(TINY, seed=3, dtype=torch.float64)
    assert torch.equal(wide.embed.weight.float(), a.embed.weight)


# ---- parity with Hugging Face, in float64 (its norms, angles and softmax stay in float32)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
# name -> (config class, its arguments, what to change in the config.json that it saves; None removes an entry)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama 2": ("LlamaConfig", {"num_key_value_heads": 4}, {}),
    "llama 2, without num_key_value_heads": (
        "LlamaConfig",
        {"num_key_value_heads": 4},
        {"num_key_value_heads": None, "rope_parameters": None, "rope_theta": 10000.0},
    ),
    "llama 3": ("LlamaConfig", {"rope_parameters": SCALED | {"rope_theta": 5e5}, "eos_token_id": [2, 7]}, {}),
    "llama 3, old names": (
        "LlamaConfig",
        {"rope_parameters": SCALED | {"rope_theta": 5e5}},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": SCALED},
    ),
    "llama 3, older names": (
        "LlamaConfig",
        {"rope_parameters": SCALED | {"rope_theta": 5e5}},
        {
            "rope_parameters": None,
            "rope_theta": 5e5,
            "rope_scaling": {**SCALED, "rope_type": None, "type": "llama3"},
        },
    ),
    "theta in both places": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 10000.0},
    ),
    "tinyllama": ("LlamaConfig", {}, {"head_dim": None, "rope_parameters": None, "rope_theta": 10000.0}),
    "smollm2, tied, one key-value head": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
        },
        {},
    ),
    "llama, head_dim not d/H": ("LlamaConfig", {"head_dim": 6}, {}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}, {}),
    "mistral, head_dim absent": ("MistralConfig", {"sliding_window": None}, {"head_dim": None}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}, {}),
    "qwen3, d no multiple of H": ("Qwen3Config", {"hidden_size": 30, "head_dim": 8}, {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, {}),
    "qwen3, tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}, {}),
}


def hf_model(name: str) -> Any:
    """A random model of theirs in float64. Larger weights than they start from, so that attention is not flat."""
    import transformers

    kind, arguments, _ = VARIANTS[name]
    config = getattr(transformers, kind)(**SIZES | arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(2 * noise * parameter.shape[1] ** -0.5)
    return model


def save(model: Any, name: str, folder: Path, **options: Any) -> None:
    model.save_pretrained(folder, **options)
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | VARIANTS[name][2]
    raw = {entry: value for entry, value in raw.items() if value is not None or entry not in VARIANTS[name][2]}
    if isinstance(raw.get("rope_scaling"), dict):
        raw["rope_scaling"] = {k: v for k, v in raw["rope_scaling"].items() if v is not None}
    path.write_text(json.dumps(raw))


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """No progress bars of theirs in our output."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("shard_size", ["10GB", "8KB"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, shard_size: str) -> None:
    """hf#32330, hf#32857, vllm#44158 and their kin, for every kind of checkpoint, in one file or several."""
    theirs = hf_model(name)
    save(theirs, name, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "8KB")
    ours = load_folder(tmp_path, torch.device("cpu"), torch.float64)
    tokens = torch.randint(64, (200,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    assert relative(solo(ours, tokens), expected) < 1e-5


@pytest.mark.parametrize("name", ["llama 3", "qwen2", "qwen3, tied"])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = hf_model(name)
    save(theirs, name, tmp_path)
    ours = load_folder(tmp_path, torch.device("cpu"), torch.float64)
    prompt = [5, 4, 3, 2, 1]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    request = make_request(prompt, params, ours.config, None, max_len=256)
    for _ in STAGES["cached"](ours, [request]):
        pass
    for _ in range(20):
        with torch.no_grad():
            token = theirs(torch.tensor([prompt])).logits[0, -1].argmax()
        prompt.append(int(token))
    assert request.tokens == prompt
