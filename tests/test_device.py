"""Device and dtype: what "auto" means, what is refused, and torch's own objects in place of names."""

import pytest
import torch

from minillm import device
from minillm.device import DTYPES, keep_freed_memory, pick_device, pick_dtype
from minillm.errors import InputError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["gpu", "tpu", "cpu:x", "", "mps", "meta", "cuda:99"])
def test_a_device_that_is_not_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=repr(name)):
        pick_device(name)


@pytest.mark.parametrize("name", ["float", "fp32", "int8", "", "Float32", torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_implemented_is_refused_by_name(name: str | torch.dtype) -> None:
    with pytest.raises(InputError, match="is not known"):
        pick_dtype(name, CPU)


def test_names_and_torchs_own_objects_mean_the_same() -> None:
    assert pick_device("cpu") == pick_device(CPU) == CPU
    for name, dtype in DTYPES.items():
        assert pick_dtype(name, CPU) == pick_dtype(dtype, CPU) == dtype


def test_auto_takes_bfloat16_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(device, "cpu_has_bf16", lambda has=has: has)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=has: (8, 0) if has else (7, 5))
        assert pick_dtype("auto", CPU) == pick_dtype("auto", CUDA) == dtype


def test_a_torch_without_the_probes_counts_as_a_cpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.torch, "cpu", object())
    assert device.cpu_has_bf16() is False


def test_keeping_memory_needs_no_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_freed_memory()
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: object())
    keep_freed_memory()
