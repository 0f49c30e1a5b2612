"""Which device and dtype to use, when the user says "auto" and when they say what this machine cannot do."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm import host
from minillm.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def pick_device(name: str | torch.device) -> torch.device:
    """The word "auto" is a CUDA GPU where one answers, else the CPU. Raises InputError for what this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r} was asked for, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA GPUs; "
            "use --device cpu, or install a CUDA build of torch (make run TORCH=cuda)"
        )
    return device


def pick_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The word "auto" is bfloat16 where the hardware multiplies it, else float32. Raises InputError for others."""
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if name == "auto":
        on_gpu = device.type == "cuda"
        has_bf16 = torch.cuda.get_device_capability(device)[0] >= 8 if on_gpu else cpu_has_bf16()
        return torch.bfloat16 if has_bf16 else torch.float32
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not known; use auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def cpu_has_bf16() -> bool:
    """AVX-512 BF16 or AMX: elsewhere bfloat16 is emulated, and slower than float32.

    The two probes are private names of torch.cpu, so a build without them counts as a CPU without.
    """
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def tune_memory() -> None:
    """Has glibc keep freed memory for the next tensor instead of handing it back to the system, and Linux hold tensors
    of 2 MB and more in large pages.

    Attention over a long prompt makes large tensors and drops them again in every layer. By default each of them
    is mapped afresh, and touching its pages for the first time can take longer than the arithmetic. The price: the
    process keeps the memory of its largest moment. See mallopt(3). Without glibc nothing changes.

    Weights and KV memory are read in every step, and with pages of 4 KB the CPU looks up many addresses. torch asks for
    large ones (madvise(2)) if this variable is set before its first large tensor.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        mallopt(M_MMAP_MAX, 0)  # take no block straight from the system
        mallopt(M_TRIM_THRESHOLD, -1)  # and never give any back


def memory_bytes(device: torch.device) -> int:
    """All of the device's memory that this process may use, taken or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return host.memory_bytes()


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list as a tensor on the device. A GPU fetches it by itself out of pinned memory; from any other memory, or with
    the list as an index, the host would have to wait until the GPU has done all that it was asked before."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what was asked of it; a clock read without this measures only the asking."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
