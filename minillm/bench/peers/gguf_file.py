"""From a model folder to one GGUF file without a tokenizer, for llama.cpp's benchmark: see `minillm.convert` for
the way back.
"""

import hashlib
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from torch import Tensor

from minillm.config import Config
from minillm.convert import tensor_names
from minillm.errors import InputError
from minillm.weights import open_tensors

# torch's dtype: GGUF's names for such numbers and for a file of them
TYPES = {
    torch.bfloat16: (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    torch.float16: (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    torch.float32: (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
}


def cached_gguf(folder: Path, config: Config, dtype: torch.dtype, cache: Path) -> Path:
    """The folder's weights as `cache`/NAME-DTYPE-HASH.gguf, written unless it is there.

    Raises InputError if GGUF has no such dtype, the model is not a plain Llama or the file cannot be written.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in TYPES:
        raise InputError(f"dtype {name} has no GGUF counterpart; use bfloat16, float16 or float32")
    if config.qkv_bias or config.qk_norm or config.rope_scaling:
        raise InputError(f"{folder}: only a plain Llama becomes GGUF here: no bias, no q/k norm, no RoPE scaling")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    target = cache / f"{folder.resolve().name}-{name}-{digest.hexdigest()[:16]}.gguf"
    if not target.exists():
        scratch = target.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            write_gguf(folder, config, dtype, scratch)
            scratch.rename(target)  # complete or not there at all
        except OSError as error:
            raise InputError(f"{target} cannot be written ({error}); free some space or mend the rights") from None
        finally:
            with suppress(OSError):
                scratch.unlink()  # it is there only if something went wrong
    return target


def write_gguf(folder: Path, config: Config, dtype: torch.dtype, path: Path) -> None:
    """Matrices in `dtype`, norms in float32 as llama.cpp wants them; the vocabulary is a number only."""
    kind, file_type = TYPES[dtype]
    c = config
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    sizes = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "tie_word_embeddings": c.tied,
    }
    heads = {"attn_q": c.n_heads, "attn_k": c.n_kv_heads}
    with ExitStack() as stack:
        tensors = open_tensors(folder, stack)
        for gguf_name, (name, shape) in tensor_names(sizes).items():
            rows = tensors[name].get_tensor(name)
            assert tuple(rows.shape) == shape, name  # the same folder was loaded before
            role = gguf_name.split(".")[-2]
            if role in heads:
                rows = permute(rows, heads[role])
            if rows.dim() == 1:
                writer.add_tensor(gguf_name, rows.float().numpy())
            else:  # as bytes, with the type beside them: numpy has no bfloat16
                writer.add_tensor(gguf_name, rows.to(dtype).view(torch.uint8).numpy(), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def permute(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `convert.unpermute`: the halves of each head, [heads * D, d_model], row by row in turn."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])  # [heads, 2, D/2, d_model]
    return halves.transpose(1, 2).reshape(rows.shape)
