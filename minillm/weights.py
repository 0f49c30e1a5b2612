"""Loading a checkpoint folder (config.json and *.safetensors, as on the Hugging Face Hub) into our Llama.

The loop goes over the **model's** parameters, not over the file's tensors: each must be filled exactly once, and
what is missing or left over is named before a byte of data is read. The model is built on torch's meta device,
where parameters have shapes and no memory, so nothing uninitialised can pass for a weight.
"""

import json
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from minillm.config import Config
from minillm.device import pick_device, pick_dtype, tune_memory
from minillm.errors import WeightsError
from minillm.model import Llama

# our parameter -> the checkpoint's tensors, laid one below the other
LAYER = {
    "attn_norm.weight": ["input_layernorm.weight"],
    "attn.qkv.weight": [f"self_attn.{p}_proj.weight" for p in "qkv"],
    "attn.qkv.bias": [f"self_attn.{p}_proj.bias" for p in "qkv"],
    "attn.q_norm.weight": ["self_attn.q_norm.weight"],
    "attn.k_norm.weight": ["self_attn.k_norm.weight"],
    "attn.o.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.down.weight": ["mlp.down_proj.weight"],
}
DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names for numbers that need no scale beside them
TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}


def load(path_or_name: str | Path, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto") -> Llama:
    """A model folder, or the name of one that was fetched, to a Llama ready for inference.

    Raises InputError for an unknown name, device or dtype, and WeightsError, which starts with the path, for a
    folder that cannot be loaded whole.
    """
    from minillm.fetch import find

    folder = find(path_or_name)
    where = pick_device(device)
    return load_folder(folder, where, pick_dtype(dtype, where))


def load_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> Llama:
    if device.type == "cpu":
        tune_memory()
    config = Config.from_folder(folder)
    with ExitStack() as stack:
        tensors = open_tensors(folder, stack)
        if config.n_layers > len(tensors):  # before so many layers are built
            raise WeightsError(f"{folder}: config.json asks for {config.n_layers} layers of {len(tensors)} tensors")
        with torch.device("meta"):
            model = Llama(config)
        plan = match(folder, model, config, tensors)
        for name, sources in plan.items():
            parameter = model.get_parameter(name)
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            row = 0
            for source in sources:
                part = tensors[source].get_tensor(source)
                value[row : row + part.shape[0]].copy_(part)  # converts dtype and device on the way
                row += part.shape[0]
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
    if config.tied:
        model.head.weight = model.embed.weight
    assert not any(p.is_meta for p in model.parameters())
    return model.eval()


def sources_of(name: str) -> list[str]:
    """The checkpoint's names for one of our parameters: "blocks.3.attn.qkv.weight" -> three of them."""
    if name in TOP:
        return [TOP[name]]
    _, layer, rest = name.split(".", 2)
    return [f"model.layers.{layer}.{source}" for source in LAYER[rest]]


def match(folder: Path, model: Llama, config: Config, tensors: dict[str, Any]) -> dict[str, list[str]]:
    """{our parameter: its sources in the file}, after every name and shape has been compared."""
    plan = {name: sources_of(name) for name, _ in model.named_parameters()}  # a tied head is listed once, as embed
    wanted = {source for sources in plan.values() for source in sources}
    # old Llama files also store the rotary frequencies, which follow from the config
    found = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(wanted - found):
        raise WeightsError(f"{folder}: {len(missing)} tensors are missing: {', '.join(missing)}")
    for name in sorted(found):
        if (stored := tensors[name].get_slice(name).get_dtype()) not in DTYPES:
            raise WeightsError(f"{folder}: {name} is stored as {stored}; quantized tensors are not implemented")
    if config.tied and "lm_head.weight" in found:
        found.discard("lm_head.weight")
        twins = (tensors[name].get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
        if not torch.equal(*twins):
            warnings.warn(f"{folder}: the head is tied, so lm_head.weight, which differs, is not used", stacklevel=2)
    if unexpected := sorted(found - wanted):
        raise WeightsError(f"{folder}: {len(unexpected)} tensors are not part of this model: {', '.join(unexpected)}")
    for name, sources in plan.items():
        shape = model.get_parameter(name).shape
        parts = [tuple(tensors[source].get_slice(source).get_shape()) for source in sources]
        expected = split_shape(name, tuple(shape), config)
        for source, got, want in zip(sources, parts, expected, strict=True):
            if got != want:
                raise WeightsError(f"{folder}: {source} has shape {list(got)}; config.json asks for {list(want)}")
    return plan


def split_shape(name: str, shape: tuple[int, ...], config: Config) -> list[tuple[int, ...]]:
    """The shapes of a parameter's parts, for the two that hold several tensors."""
    if ".qkv." in name:
        rows = [heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    elif ".gate_up." in name:
        rows = [config.d_ff, config.d_ff]
    else:
        rows = [shape[0]]
    return [(n, *shape[1:]) for n in rows]


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """{tensor name: the open file that holds it}. With an index, only the pairs that it names count."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        try:
            where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: str(file) for name, file in where.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
            raise WeightsError(f"{index}: not an index of shards ({error!r}); it must hold a weight_map") from None
        if not files:
            raise WeightsError(f"{index}: its weight_map is empty; it must name the shard of every tensor")
        if strange := [f for f in files.values() if Path(f).name != f or not f.endswith(".safetensors")]:
            raise WeightsError(
                f"{index}: names the file {strange[0]!r}; shards are *.safetensors files in the same folder"
            )
    elif single.exists():
        files = {}
    else:
        raise WeightsError(f"{folder}: holds neither model.safetensors nor model.safetensors.index.json")
    handles = {file: open_one(folder / file, stack) for file in sorted(set(files.values()) or {single.name})}
    if not files:
        return dict.fromkeys(handles[single.name].keys(), handles[single.name])
    held = {file: set(handle.keys()) for file, handle in handles.items()}
    if absent := sorted(name for name, file in files.items() if name not in held[file]):
        raise WeightsError(f"{index}: {absent[0]} is not in {files[absent[0]]}, where the index says it is")
    return {name: handles[file] for name, file in files.items()}


def open_one(path: Path, stack: ExitStack) -> Any:
    """One safetensors file; its header is checked by the library before anything of the stated size is allocated."""
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path}: truncated or corrupt safetensors ({error}); fetch it again") from None
