"""config.json at the door: what is read, which value wins, what is refused by name. No model and no weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.config import Config, RopeScaling
from minillm.errors import WeightsError
from minillm.model import Llama
from minillm.request import SamplingParams, make_request

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


# ---- names and sizes


def test_every_size_is_read() -> None:
    raw = LLAMA | {"head_dim": 10, "tie_word_embeddings": True, "eos_token_id": 3}
    assert Config.from_dict(raw) == Config(
        vocab_size=64,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=10,
        d_ff=48,
        norm_eps=1e-5,
        rope_theta=10000.0,
        context=256,
        tied=True,
        eos=(3,),
    )


@pytest.mark.parametrize(
    ("kind", "bias", "norm"),
    [("llama", False, False), ("mistral", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_what_each_architecture_adds(kind: str, bias: bool, norm: bool) -> None:
    config = Config.from_dict(LLAMA | {"model_type": kind})
    assert (config.qkv_bias, config.qk_norm) == (bias, norm)


def test_without_key_value_heads_every_head_has_its_own() -> None:
    raw = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert Config.from_dict(raw).n_kv_heads == 4
    assert Config.from_dict(raw | {"num_key_value_heads": None}).n_kv_heads == 4


def test_head_dim_is_derived_only_where_it_is_not_given() -> None:
    """hf#32857, pytorch/torchtitan#3570, paiml/entrenar#262: head_dim is not always hidden / heads."""
    assert Config.from_dict(LLAMA).head_dim == 8
    assert Config.from_dict(LLAMA | {"head_dim": None}).head_dim == 8
    given = Config.from_dict(LLAMA | {"hidden_size": 30, "head_dim": 8})
    with torch.device("meta"):
        attention = Llama(given).blocks[0].attn
    assert attention.qkv.weight.shape == ((4 + 2 + 2) * 8, 30)
    assert attention.o.weight.shape == (30, 4 * 8)


def test_head_dim_that_cannot_be_derived_is_refused() -> None:
    """hf#46211: hidden size 1792 with 24 heads."""
    with pytest.raises(WeightsError, match="24 heads do not divide hidden_size 1792"):
        Config.from_dict(LLAMA | {"hidden_size": 1792, "num_attention_heads": 24})


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "expected"),
    [
        (30, 3, 64, 23_040),  # SmolLM2-135M
        (22, 4, 64, 22_528),  # TinyLlama-1.1B
        (16, 8, 64, 32_768),  # Llama-3.2-1B
        (28, 8, 128, 114_688),  # Qwen3-0.6B
        (32, 8, 128, 131_072),  # Mistral-7B
        (32, 32, 128, 524_288),  # Llama-2-7B
    ],
)
def test_kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, expected: int) -> None:
    raw = LLAMA | {
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
    }
    assert Config.from_dict(raw | {"head_dim": head_dim}).kv_bytes_per_token(itemsize=2) == expected


# ---- rotary settings


@pytest.mark.parametrize(
    ("entries", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, 5e5),
        ({"rope_theta": 500000, "rope_parameters": None, "rope_scaling": None}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5),
        ({}, 10000.0),
    ],
)
def test_a_default_never_beats_the_rope_theta_of_the_file(entries: dict[str, Any], theta: float) -> None:
    """vllm#44158, vllm#28542, sgl#14745: transformers 5 moved rope_theta into rope_parameters."""
    config = Config.from_dict(LLAMA | entries)
    assert (config.rope_theta, config.rope_scaling) == (theta, None)


@pytest.mark.parametrize("kind", [{"type": "llama3"}, {"rope_type": "llama3"}])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_under_all_its_names(kind: dict[str, str], place: str) -> None:
    old = {"rope_theta": 5e5, place: LLAMA3 | kind}
    new = {place: LLAMA3 | kind | {"rope_theta": 5e5}}
    for entries in (old, new):
        config = Config.from_dict(LLAMA | entries)
        assert (config.rope_theta, config.rope_scaling) == (5e5, SCALED)


@pytest.mark.parametrize("entry", sorted(LLAMA3))
def test_llama3_scaling_has_no_defaults(entry: str) -> None:
    rest = {name: value for name, value in LLAMA3.items() if name != entry}
    with pytest.raises(WeightsError, match=entry):
        Config.from_dict(LLAMA | {"rope_scaling": rest | {"rope_type": "llama3"}})


# ---- where a text ends


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 7]}, None, (5, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({}, {"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": [7]}, {"eos_token_id": 5}, (7, 5)),
        ({"eos_token_id": 0}, {"eos_token_id": None}, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
        ({}, {}, ()),
        ({}, None, ()),
    ],
)
def test_every_eos_of_either_file_counts(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, eos: tuple[int, ...]
) -> None:
    """vllm#4180, turboderp-org/exllamav2#803: Llama 3 ends a turn with the second id, or the other file's."""
    read = Config.from_folder(write(tmp_path, LLAMA | config, generation))
    assert read.eos == eos
    for token in eos:
        request = make_request([1, 2], SamplingParams(max_tokens=9), read, tokenizer=None, max_len=64)
        assert request.accept(63).finish_reason is None
        assert request.accept(token).finish_reason == "stop"


@pytest.mark.parametrize("eos", [64, -1, [5, 64], "5", True, 5.0, [[5]], {"id": 5}])
@pytest.mark.parametrize("file", ["config", "generation"])
def test_an_eos_outside_the_vocabulary_is_refused(tmp_path: Path, eos: Any, file: str) -> None:
    entry = {"eos_token_id": eos}
    write(tmp_path, LLAMA | entry if file == "config" else LLAMA, entry if file == "generation" else None)
    with pytest.raises(WeightsError, match="eos_token_id.*vocabulary of 64"):
        Config.from_folder(tmp_path)


# ---- refused by name


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"model_type": "qwen2_moe"}, "qwen2_moe"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
            "full_attention",
        ),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window 128"),  # Mistral-7B-v0.1
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window 4096"),  # left out: 4096
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, "sliding_window 128"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(entries: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsError, match="not implemented") as error:
        Config.from_dict(LLAMA | entries)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": "mistral", "sliding_window": None},  # Mistral-7B-v0.2 and later
        {"model_type": "mistral", "sliding_window": 256},  # no text is longer than this window
        {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False, "max_window_layers": 1},
        {"model_type": "qwen3", "layer_types": ["full_attention", "full_attention"]},
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
        {"quantization_config": None, "partial_rotary_factor": 1.0},
    ],
)
def test_what_is_written_but_switched_off_is_no_obstacle(entries: dict[str, Any]) -> None:
    Config.from_dict(LLAMA | entries)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads.*3 key-value heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 0}, "n_layers is 0"),
        ({"vocab_size": "64"}, "vocab_size is '64'"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"intermediate_size": True}, "intermediate_size is True"),
        ({"num_attention_heads": 0}, "0 heads"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "factor": "32"}}, "factor is '32'"),
        ({"model_type": "mistral", "sliding_window": "4096"}, "sliding_window"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"layer_types": 2}, "layer_types is 2"),
    ],
)
def test_a_wrong_value_is_named(entries: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsError, match=named):
        Config.from_dict(LLAMA | entries)


@pytest.mark.parametrize("name", sorted(LLAMA.keys() - {"num_key_value_heads"}))
def test_a_missing_entry_is_named(name: str) -> None:
    """lcpp#2373: above all, the norm's epsilon has no default."""
    with pytest.raises(WeightsError, match=name):
        Config.from_dict({key: value for key, value in LLAMA.items() if key != name})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "llama3", "default", "silu"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "type", "rope_theta", "factor", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ENTRIES = [
    *LLAMA,
    *("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "eos_token_id"),
    *("hidden_act", "attention_bias", "mlp_bias", "quantization_config", "partial_rotary_factor"),
    *("pretraining_tp", "sliding_window", "use_sliding_window", "layer_types"),
]


@given(
    st.sampled_from(["llama", "mistral", "qwen3"]),
    st.dictionaries(st.sampled_from(ENTRIES), JSON, max_size=3),
)
def test_any_value_is_read_or_refused_in_one_line(kind: str, entries: dict[str, Any]) -> None:
    try:
        config = Config.from_dict(LLAMA | {"model_type": kind} | entries)
    except WeightsError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert config.head_dim % 2 == 0 and math.isfinite(config.rope_theta)


# ---- the file itself


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b'"llama"', b"null", b"\xff\xfe", b'\xef\xbb\xbf{"a": 1}', b"[" * 100_000],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes, name: str) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError) as error:
        Config.from_folder(tmp_path)
    assert str(error.value).startswith(str(tmp_path / name))


def test_errors_of_a_folder_start_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as error:
        Config.from_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: no such file")
    write(tmp_path, LLAMA | {"vocab_size": None})
    with pytest.raises(WeightsError) as error:
        Config.from_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: vocab_size is None")
