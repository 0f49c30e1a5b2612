"""Checkpoint folders: every parameter filled exactly once from where the files say, or one error with the path."""

import json
import shutil
import struct
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from minillm.attention import SelfAttend
from minillm.bench.claims import loading
from minillm.config import Config
from minillm.errors import InputError, WeightsError
from minillm.model import Llama
from minillm.weights import load, load_folder, open_tensors

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",  # with a bias on q, k and v: the architecture with the most tensors
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def tensors(config: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors under Hugging Face's names, each different."""
    d, m, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (q, d),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (d, q),
            "mlp.gate_proj.weight": (m, d),
            "mlp.up_proj.weight": (m, d),
            "mlp.down_proj.weight": (d, m),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, stored: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """A model folder with one safetensors file; `changes` go into its config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors() if stored is None else stored, folder / "model.safetensors")
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: Path) -> str:
    """The one line that loading this folder answers."""
    with pytest.raises(WeightsError) as error:
        load_folder(folder, CPU, torch.float32)
    message = str(error.value)
    assert message.startswith(str(folder)) and "\n" not in message
    return message


@pytest.fixture
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if memory for a parameter is asked for: what is wrong must be seen before."""
    torch_empty = torch.empty
    with torch.device("meta"):
        torch.empty(1)  # torch remembers its constructors at the first use: let that be the true one

    def empty(*size: Any, **options: Any) -> Tensor:
        made = torch_empty(*size, **options)
        assert made.is_meta, "memory was asked for before the folder was checked"
        return made

    monkeypatch.setattr(torch, "empty", empty)


# ---- what is loaded


def test_every_parameter_comes_from_its_own_tensors(tmp_path: Path) -> None:
    stored = tensors()
    model = load_folder(write(tmp_path), CPU, torch.float64)
    for i, block in enumerate(model.blocks):
        mine = {n.removeprefix(f"model.layers.{i}."): t.double() for n, t in stored.items()}
        for kind in ("weight", "bias"):
            q, k, v = getattr(block.attn.qkv, kind).split([32, 16, 16])
            assert torch.equal(q, mine[f"self_attn.q_proj.{kind}"])
            assert torch.equal(k, mine[f"self_attn.k_proj.{kind}"])
            assert torch.equal(v, mine[f"self_attn.v_proj.{kind}"])
        gate, up = block.mlp.gate_up.weight.chunk(2)
        assert torch.equal(gate, mine["mlp.gate_proj.weight"])
        assert torch.equal(up, mine["mlp.up_proj.weight"])
        assert torch.equal(block.mlp.down.weight, mine["mlp.down_proj.weight"])
        assert torch.equal(block.attn.o.weight, mine["self_attn.o_proj.weight"])
        assert torch.equal(block.attn_norm.weight, mine["input_layernorm.weight"])
        assert torch.equal(block.mlp_norm.weight, mine["post_attention_layernorm.weight"])
    assert torch.equal(model.embed.weight, stored["model.embed_tokens.weight"].double())
    assert torch.equal(model.norm.weight, stored["model.norm.weight"].double())
    assert torch.equal(model.head.weight, stored["lm_head.weight"].double())
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_stored_and_wanted_dtype_are_independent(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    source = tensors(dtype=stored)
    model = load_folder(write(tmp_path, source), CPU, wanted)
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert torch.equal(model.head.weight, source["lm_head.weight"].to(wanted))


def test_rotary_frequencies_in_old_files_are_no_parameters(tmp_path: Path) -> None:
    inv_freq = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for i in range(2)}
    model = load_folder(write(tmp_path, tensors() | inv_freq), CPU, torch.float32)
    assert torch.equal(model.norm.weight, tensors()["model.norm.weight"])


def test_llama3_frequencies_hold_after_the_whole_load_path(tmp_path: Path) -> None:
    """unslothai/unsloth#6907: a repair after loading computed them again without the scaling.

    What the blocks are really given, after meta device, fill and casts, is compared with the formula's values.
    """
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    config = CONFIG | {"rope_theta": 5e5, "rope_scaling": scaling, "head_dim": 64}
    write(tmp_path, tensors(config), **config)
    model = load(tmp_path, device="cpu", dtype="bfloat16").to("cpu").to(torch.float32)
    seen: list[tuple[Tensor, Tensor]] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    positions = torch.arange(2)
    model(torch.tensor([1, 2]), positions, SelfAttend(positions))
    cos, sin = seen[0]
    angles = torch.atan2(sin, cos)[1, 0, 32:]  # position 1, second half (+sin): the frequencies themselves
    unscaled = 5e5 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    golden = torch.tensor([1.2905479e-3, 4.2955680e-4, 9.7082878e-5, 1.9461638e-5])
    torch.testing.assert_close(angles[15:19], golden, rtol=1e-6, atol=0)
    torch.testing.assert_close(angles[:15], unscaled[:15].float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(angles[18:], unscaled[18:].float() / 32, rtol=1e-6, atol=0)


# ---- missing, left over, misshapen


def test_each_missing_tensor_is_named(tmp_path: Path, nothing_is_allocated: None) -> None:
    """sgl#16235, vllm#10327: a parameter that no tensor fills must not keep what memory held."""
    for name in tensors():
        rest = {other: tensor for other, tensor in tensors().items() if other != name}
        message = refused(write(tmp_path, rest))
        assert message == f"{tmp_path}: 1 tensors are missing: {name}"


def test_one_layer_more_than_the_file_has(tmp_path: Path, nothing_is_allocated: None) -> None:
    """vllm#10327: every tensor of the layer that is not there is named."""
    message = refused(write(tmp_path, num_hidden_layers=3))
    for name in tensors():
        if name.startswith("model.layers.1."):
            assert name.replace("layers.1.", "layers.2.") in message


def test_layers_without_end_are_refused_before_they_are_built(tmp_path: Path, nothing_is_allocated: None) -> None:
    assert "asks for 1000000000 layers" in refused(write(tmp_path, num_hidden_layers=10**9))


def test_prefixed_names_are_all_missing(tmp_path: Path, nothing_is_allocated: None) -> None:
    """Blaizzy/mlx-audio#902: with strict=False such a file loads nothing and runs."""
    message = refused(write(tmp_path, {f"base_model.{n}": t for n, t in tensors().items()}))
    listed = message.partition("missing: ")[2].split(", ")
    assert listed == sorted(tensors())


def test_what_is_left_over_is_named(tmp_path: Path, nothing_is_allocated: None) -> None:
    message = refused(write(tmp_path, num_hidden_layers=1))
    for name in tensors():
        assert (name in message) == name.startswith("model.layers.1.")
    assert "model.extra" in refused(write(tmp_path, tensors() | {"model.extra": torch.zeros(2)}))


@given(data=st.data())
def test_a_wrong_shape_is_named_with_both_shapes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    stored = tensors()
    name = data.draw(st.sampled_from(sorted(stored)))
    right = list(stored[name].shape)
    wrong = data.draw(st.lists(st.integers(0, 40), max_size=3).filter(lambda shape: shape != right))
    folder = write(tmp_path_factory.mktemp("shape"), stored | {name: torch.zeros(wrong)})
    assert refused(folder) == f"{folder}: {name} has shape {wrong}; config.json asks for {right}"
    shutil.rmtree(folder)


def test_shapes_are_compared_before_memory_is_asked_for(tmp_path: Path, nothing_is_allocated: None) -> None:
    """A config that asks for 2 ** 40 words is refused, not allocated."""
    assert f"[{2**40}, 24]" in refused(write(tmp_path, vocab_size=2**40))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64]
)
def test_quantized_tensors_are_refused(tmp_path: Path, dtype: torch.dtype, nothing_is_allocated: None) -> None:
    """Integers and 8-bit floats mean nothing without their scales."""
    name = "model.layers.1.mlp.up_proj.weight"
    message = refused(write(tmp_path, tensors() | {name: tensors()[name].to(dtype)}))
    assert name in message and "not implemented" in message


# ---- the head, tied or not


def test_tied_and_absent_shares_storage(tmp_path: Path) -> None:
    """vllm#6758, ml-explore/mlx-lm#1298: many tied files hold no lm_head.weight."""
    rest = {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"}
    model = load_folder(write(tmp_path, rest, tie_word_embeddings=True), CPU, torch.float32)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert torch.equal(model.head.weight, rest["model.embed_tokens.weight"])


@pytest.mark.parametrize("equal", [True, False])
def test_tied_and_present_shares_storage(tmp_path: Path, equal: bool) -> None:
    """hf#43429: a head that differs from the embedding it is tied to is told, not silently dropped."""
    stored = tensors()
    if equal:
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    write(tmp_path, stored, tie_word_embeddings=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_folder(tmp_path, CPU, torch.float32)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert torch.equal(model.head.weight, stored["model.embed_tokens.weight"])
    assert [str(w.message).startswith(f"{tmp_path}: ") for w in caught] == ([] if equal else [True])


def test_untied_and_present_is_separate(tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM#3324: a head of its own must not be tied."""
    model = load_folder(write(tmp_path), CPU, torch.float32)
    assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()
    assert not torch.equal(model.head.weight, model.embed.weight)


def test_untied_and_absent_is_an_error(tmp_path: Path) -> None:
    """QwenLM/Qwen3-VL-Embedding#89: no head in the file, and none to tie to."""
    rest = {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"}
    assert refused(write(tmp_path, rest)).endswith("missing: lm_head.weight")


def test_tied_with_a_head_but_no_embedding(tmp_path: Path) -> None:
    """sgl#16235 in a tied file: the head in it must not hide that the embedding is missing."""
    rest = {name: tensor for name, tensor in tensors().items() if name != "model.embed_tokens.weight"}
    message = refused(write(tmp_path, rest, tie_word_embeddings=True))
    assert message.endswith("missing: model.embed_tokens.weight")


# ---- several files


def shard(folder: Path) -> dict[str, str]:
    """Two shards and their index, with a single file of other values beside them and copies not in the index."""
    stored = tensors()
    first = {name: tensor for name, tensor in stored.items() if "layers.0." in name or "embed" in name}
    second = {name: tensor for name, tensor in stored.items() if name not in first}
    stray = {"model.norm.weight": torch.full_like(stored["model.norm.weight"], 9.0)}
    write(folder, {name: torch.full_like(tensor, 7.0) for name, tensor in stored.items()})
    save_file(first | stray, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    save_file(stray, folder / "model-old.safetensors")
    files = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    files |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    write_index(folder, files)
    return files


def test_only_the_pairs_of_the_index_are_loaded(tmp_path: Path) -> None:
    """vllm#54230, Blaizzy/mlx-vlm#1329: stray files and copies outside the index held other values."""
    shard(tmp_path)
    model = load_folder(tmp_path, CPU, torch.float32)
    plain = load_folder(write(tmp_path / "plain"), CPU, torch.float32)
    for (name, got), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(got, expected), name


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert refused(tmp_path) == f"{tmp_path / 'model-00002-of-00002.safetensors'}: no such file"


def test_a_tensor_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    """vllm#40765: the index maps tensors to files; another file that holds the name does not count."""
    files = shard(tmp_path)
    write_index(tmp_path, files | {"lm_head.weight": "model-00001-of-00002.safetensors"})
    message = refused(tmp_path)
    assert "lm_head.weight is not in model-00001-of-00002.safetensors" in message


@pytest.mark.parametrize("file", ["../x.safetensors", "a/b.safetensors", "/etc/passwd", "..", ".", ""])
def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path, file: str) -> None:
    files = shard(tmp_path)
    write_index(tmp_path, files | {"lm_head.weight": file})
    assert f"names the file {file!r}" in refused(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {}}', "[" * 100_000],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    """A valid single file beside it does not make up for a broken index."""
    write(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    assert refused(tmp_path).startswith(f"{index}: ")


# ---- broken files


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_one_error_with_its_path(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """invoke-ai/InvokeAI#7009, lyogavin/airllm#137: half-downloaded files."""
    folder = write(tmp_path_factory.mktemp("cut"))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert refused(folder).startswith(f"{path}: truncated or corrupt")
    shutil.rmtree(folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_cut_at_its_seams(tmp_path: Path, sharded: bool, nothing_is_allocated: None) -> None:
    """PersuGPT/PersuGPT.github.io#2: in the length, the header, the data; one shard of two is enough."""
    if sharded:
        shard(tmp_path)
    else:
        write(tmp_path)
    path = tmp_path / ("model-00002-of-00002.safetensors" if sharded else "model.safetensors")
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for size in (0, 4, 8, 8 + header // 2, 8 + header, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refused(tmp_path).startswith(f"{path}: truncated or corrupt"), size


def tensor(dtype: str = "F32", shape: Any = (2,), begin: int = 0, end: int = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def crafted(header: Any, data: int = 8, length: int | None = None) -> bytes:
    """A safetensors file with that header, that many bytes of data, and a length that may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


# Sizes are stated that no machine could allocate: trying would end in another error than WeightsError.
BAD_FILES = {
    "empty": b"",
    "shorter than a length": b"\0" * 7,
    "length of zero": crafted(b""),
    "length beyond the file": crafted({"a": tensor()}, length=10_000),
    "length of 2^50": crafted({"a": tensor()}, length=2**50),
    "length of 2^63": crafted({"a": tensor()}, length=2**63),
    "length of 2^64 - 1": crafted({"a": tensor()}, length=2**64 - 1),
    "not an object": crafted(b"[1, 2]"),
    "a word": crafted(b'"a"'),
    "another format": b"PK\x03\x04" + bytes(60),
    "bad UTF-8": crafted(b'{"\xff": 1}'),
    "bad JSON": crafted(b'{"a": '),
    "deep JSON": crafted(b'{"a": ' + b"[" * 5000),
    "no offsets": crafted({"a": {"dtype": "F32", "shape": [2]}}),
    "metadata of numbers": crafted({"__metadata__": {"a": 1}}, data=0),
    "ends before it begins": crafted({"a": tensor(begin=8, end=0)}),
    "bytes differ from shape": crafted({"a": tensor(shape=[3])}),
    "bytes differ from dtype": crafted({"a": tensor("F64")}),
    "negative size": crafted({"a": tensor(shape=[-2])}),
    "broken size": crafted({"a": tensor(shape=[2.5])}),
    "huge tensor": crafted({"a": tensor(shape=[2**48], end=2**50)}),
    "product overflows": crafted({"a": tensor(shape=[2**40, 2**40])}),
    "product overflows to 0": crafted({"a": tensor(shape=[2**32, 2**32], end=0)}, data=0),
    "unknown dtype": crafted({"a": tensor("Q4_1")}),
    "overlap": crafted({"a": tensor(), "b": tensor(begin=4, end=12)}, data=12),
    "hole": crafted({"a": tensor(), "b": tensor(begin=12, end=20)}, data=20),
    "hole in front": crafted({"a": tensor(begin=8, end=16)}, data=16),
    "trailing bytes": crafted({"a": tensor()}, data=9),
    "one name twice": crafted(b'{"a": %b, "a": %b}' % (
        json.dumps(tensor()).encode(), json.dumps(tensor(begin=8, end=16)).encode()), data=16),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_crafted_header_is_refused_with_its_path(tmp_path: Path, name: str, nothing_is_allocated: None) -> None:
    """safetensors/safetensors#668, Comfy-Org/ComfyUI#15602: headers that lie."""
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD_FILES[name])
    assert refused(tmp_path).startswith(f"{path}: truncated or corrupt")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = write(tmp_path_factory.mktemp("bytes"))
    (folder / "model.safetensors").write_bytes(content)
    refused(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("header", [b'{"__metadata__": {"format": "pt"}}', b'{"__metadata__": {}}', b"{}"])
def test_a_file_of_metadata_alone_holds_no_tensors(tmp_path: Path, header: bytes) -> None:
    """safetensors/safetensors#466: no tensors is not an unreadable file."""
    (tmp_path / "model.safetensors").write_bytes(crafted(header, data=0))
    with ExitStack() as stack:
        assert open_tensors(tmp_path, stack) == {}


@pytest.mark.parametrize("spaces", range(8))
def test_tensors_may_lie_at_any_byte(tmp_path: Path, spaces: int) -> None:
    """Not every writer pads its header to 8 bytes."""
    path = write(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    n = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + n].rstrip() + b" " * spaces
    path.write_bytes(struct.pack("<Q", len(header)) + header + whole[8 + n :])
    model = load_folder(tmp_path, CPU, torch.float32)
    assert torch.equal(model.head.weight, tensors()["lm_head.weight"])


# ---- folders


def test_a_pickle_beside_safetensors_is_never_opened(tmp_path: Path) -> None:
    """om-ai-lab/OmTrackVLA#35: an old pytorch_model.bin beside the new weights was the one loaded."""
    write(tmp_path)
    torch.save({n: torch.zeros_like(t) for n, t in tensors().items()}, tmp_path / "pytorch_model.bin")
    model = load_folder(tmp_path, CPU, torch.float32)
    assert torch.equal(model.norm.weight, tensors()["model.norm.weight"])


def test_a_pickle_alone_is_refused(tmp_path: Path) -> None:
    """om-ai-lab/OmTrackVLA#35: and no model is built without weights."""
    (write(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)


def a_file(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(crafted({}, data=0))
    return path


@pytest.mark.parametrize("make", [lambda folder: folder, lambda folder: folder / "absent", a_file])
def test_what_is_no_model_folder(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """An empty folder, no folder, a file instead of one: named by the door and by the loader alike."""
    folder = make(tmp_path)
    with pytest.raises(WeightsError, match=folder.name):
        load(folder, device="cpu", dtype="float32")
    refused(folder)


@pytest.mark.parametrize(("device", "dtype"), [("mps", "auto"), ("cpu", "int8"), ("cuda:99", "auto"), ("", "auto")])
def test_a_device_or_dtype_that_is_not_there(tmp_path: Path, device: str, dtype: str) -> None:
    with pytest.raises(InputError, match=repr(dtype if device == "cpu" else device)):
        load(write(tmp_path), device, dtype)


def test_saved_and_loaded_is_the_same_model(tmp_path: Path, tiny: Llama) -> None:
    """A tied model from memory, through a folder with another config reader, back to the same logits."""
    c = tiny.config
    stored = {"model.embed_tokens.weight": tiny.embed.weight, "model.norm.weight": tiny.norm.weight}
    for i, block in enumerate(tiny.blocks):
        q, k, v = block.attn.qkv.weight.split([heads * c.head_dim for heads in block.attn.heads])
        gate, up = block.mlp.gate_up.weight.chunk(2)
        layer = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": block.attn.o.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": block.mlp.down.weight,
            "input_layernorm": block.attn_norm.weight,
            "post_attention_layernorm": block.mlp_norm.weight,
        }
        stored |= {f"model.layers.{i}.{name}.weight": t for name, t in layer.items()}
    raw = {
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": True,
        "eos_token_id": list(c.eos),
    }
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    again = load(folder, device="cpu", dtype="float64")
    assert again.config == replace(c) == Config.from_dict(raw)
    positions = torch.arange(9)
    for model in (tiny, again):
        assert model.device == CPU and model.dtype == torch.float64
    a, b = (m(positions, positions, SelfAttend(positions)) for m in (tiny, again))
    assert torch.equal(tiny.logits(a), again.logits(b))


def test_what_loading_costs_is_measured_on_the_folder_itself(tmp_path: Path) -> None:
    """The benchmark's comparison: as many times of ours as of load_file, and their medians' ratio."""
    claim = loading(write(tmp_path))
    ours, plain = (claim.values[key] for key in ("load_seconds", "load_file_and_clone_seconds"))
    assert len(ours) == len(plain) > 2 and min(ours + plain) > 0
    assert claim.measured == median(ours) / median(plain) and claim.met is (claim.measured <= 2)
