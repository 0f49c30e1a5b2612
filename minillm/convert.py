"""From one GGUF file to a folder in the Hugging Face layout, which minillm and transformers open alike.

GGUF (llama.cpp's format) keeps quantized tensors, their names, the architecture's numbers and the tokenizer
in one file. Here the tensors are dequantized, renamed and stored as bfloat16 safetensors, and the numbers
become config.json. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minillm.errors import WeightsError
from minillm.tokenizer_files import write_tokenizer_files


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `target` that becomes `target` only if the block ends without an error.

    A rename is atomic, so `target` is never seen half-written, whatever ends the process.
    """
    scratch = target.parent / f".tmp-{target.name}-{uuid.uuid4().hex[:8]}"
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in scratch.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # a full disk may be reported only here
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Undo the row order that GGUF gives the q and k projections of the llama architecture.

    llama.cpp rotates the pairs (2i, 2i+1) of a head, Hugging Face files the pairs (i, i + D/2), so
    llama.cpp's converter interleaves the two halves of each head; this puts them back one after the other.

    Args:
        rows: [heads * D, d_model], as stored in the GGUF file.
        heads: H for the q projection, Hkv (not H) for the k projection.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, D/2, 2, d_model]
    return pairs.transpose(1, 2).reshape(rows.shape)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """The metadata, as plain Python values by key, and the tensors, still quantized, by name.

    Raises WeightsError if the file is missing, damaged, or cut short.
    """
    if not path.is_file():
        raise WeightsError(f"{path}: there is no such file")
    try:
        reader = GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # the reader trusts the file: damage surfaces as whatever its bytes lead to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{path}: damaged or incomplete GGUF file ({reason})") from error
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def llama_config(path: Path, fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json's content from the metadata of a GGUF file whose architecture is llama.

    Raises WeightsError for another architecture, RoPE scaling (not implemented here), or a missing key.
    """
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise WeightsError(f"{path}: the GGUF architecture is {architecture!r}; only 'llama' can be converted")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        scaling = fields["llama.rope.scaling.type"]
        raise WeightsError(f"{path}: RoPE scaling {scaling!r} in a GGUF file is not implemented")
    try:
        d_model = fields["llama.embedding_length"]
        heads = fields["llama.attention.head_count"]
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": d_model,
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
            "head_dim": fields.get("llama.attention.key_length", d_model // heads),
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "max_position_embeddings": fields["llama.context_length"],
            "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": tied,
            "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
            "torch_dtype": "bfloat16",
        }
    except KeyError as error:
        raise WeightsError(f"{path}: the GGUF metadata lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(f"{path}: damaged GGUF metadata ({error})") from error
    if "tokenizer.ggml.padding_token_id" in fields:
        config["pad_token_id"] = fields["tokenizer.ggml.padding_token_id"]
    return config


def _shortest(value: float) -> float:
    """The shortest number that rounds to the same float32, as GGUF stores it: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def tensor_names(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{GGUF name: (Hugging Face name, shape)} of every tensor that the model has."""
    d_model, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, d_model)),
        "output_norm.weight": ("model.norm.weight", (d_model,)),
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", (vocab, d_model))
    block: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm": ("input_layernorm", (d_model,)),
        "attn_q": ("self_attn.q_proj", (q, d_model)),
        "attn_k": ("self_attn.k_proj", (kv, d_model)),
        "attn_v": ("self_attn.v_proj", (kv, d_model)),
        "attn_output": ("self_attn.o_proj", (d_model, q)),
        "ffn_norm": ("post_attention_layernorm", (d_model,)),
        "ffn_gate": ("mlp.gate_proj", (mlp, d_model)),
        "ffn_up": ("mlp.up_proj", (mlp, d_model)),
        "ffn_down": ("mlp.down_proj", (d_model, mlp)),
    }
    for layer in range(config["num_hidden_layers"]):
        for gguf_name, (name, shape) in block.items():
            names[f"blk.{layer}.{gguf_name}.weight"] = (f"model.layers.{layer}.{name}.weight", shape)
    return names


def convert_gguf(path: Path, folder: Path) -> None:
    """Write `folder` (which must not exist yet) in the Hugging Face layout from a GGUF file of a Llama.

    The folder holds model.safetensors (bfloat16), config.json, generation_config.json and the tokenizer's
    files; it appears complete or not at all.

    Raises WeightsError, with the file's path, for a damaged file, another architecture, or a tensor that is
    missing, unexpected or of the wrong shape; and with the folder's path if it cannot be written.
    """
    fields, stored = read_gguf(path)
    config = llama_config(path, fields, tied="output.weight" not in stored)
    layers = config["num_hidden_layers"]
    if not 0 < layers <= len(stored):
        raise WeightsError(f"{path}: block_count is {layers}, but the file holds {len(stored)} tensors")
    names = tensor_names(config)
    if missing := sorted(names.keys() - stored.keys()):
        raise WeightsError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    if unexpected := sorted(stored.keys() - names.keys()):
        raise WeightsError(f"{path}: {len(unexpected)} tensors are unexpected, the first is {unexpected[0]!r}")

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    steps = track(names.items(), "Converting", console=Console(stderr=True), transient=True)
    for gguf_name, (name, shape) in steps:
        tensor = stored[gguf_name]
        try:
            rows = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise WeightsError(f"{path}: tensor {gguf_name!r} is {kind}, which gguf cannot dequantize") from error
        if tuple(rows.shape) != shape:
            raise WeightsError(f"{path}: tensor {gguf_name!r} has shape {tuple(rows.shape)}, expected {shape}")
        role = gguf_name.split(".")[-2]
        tensors[name] = (unpermute(rows, heads[role]) if role in heads else rows).to(torch.bfloat16)

    token_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation: dict[str, Any] = {key: config[key] for key in token_ids if key in config}
    try:
        with new_folder(folder) as scratch:
            _write_json(scratch / "config.json", config)
            _write_json(scratch / "generation_config.json", generation)
            try:
                write_tokenizer_files(fields, scratch)
            except (WeightsError, IndexError) as error:
                raise WeightsError(f"{path}: the tokenizer cannot be converted ({error})") from error
            save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
            shutil.copymode(scratch / "config.json", scratch / "model.safetensors")  # save_file's is private
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder}: cannot be written ({error})") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
