"""Device and dtype: what "auto" means, what is refused, and torch's own objects in place of names."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minillm import device, host
from minillm.device import DTYPES, pick_device, pick_dtype, tune_memory
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


def test_freed_memory_is_kept_with_glibc_and_nothing_happens_without(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    glibc = SimpleNamespace(mallopt=lambda *setting: calls.append(setting))
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: glibc)
    tune_memory()
    assert calls == [(-4, 0), (-1, -1)]  # malloc.h: M_MMAP_MAX none, M_TRIM_THRESHOLD never
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: object())
    tune_memory()


def test_large_tensors_lie_in_large_pages_where_linux_gives_them_on_request() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text("utf-8"):
        pytest.skip("no large pages on request here")
    code = (
        "from minillm.device import tune_memory; import torch; tune_memory(); x = torch.ones(2**24)\n"
        "print([line.split()[1] for line in open('/proc/self/smaps_rollup') if 'AnonHuge' in line][0])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout) >= 32 * 1024  # kB, of 64 MB


def test_memory_is_the_containers_where_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    total = host.memory_bytes()
    for limit, expected in (("1000000\n", 1_000_000), ("max\n", None), (str(10**18), None)):
        monkeypatch.setattr(host.Path, "read_text", lambda self, encoding, limit=limit: limit)
        found = device.memory_bytes(CPU)
        assert found == host.memory_bytes() == expected if expected else found >= total
