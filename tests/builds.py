"""The C code as this CPU compiles it and, where that has AVX-512, as one without it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int64

import pytest
import torch

from minillm import native
from minillm.kernels import c_paged


def builds() -> list[str]:
    """What -march may be. Raises NotCompiled."""
    lanes = c_int64.in_dll(native.library("layer", torch.float32), "lanes").value
    return ["native", "x86-64-v3"] if lanes == 16 else ["native"]


@contextmanager
def compiled_for(build: str) -> Iterator[None]:
    """Inside the block all C is compiled with this -march."""
    caches = native.library, c_paged.compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", [flag.replace("=native", f"={build}") for flag in native.FLAGS])
        for cache in caches:
            cache.cache_clear()
        try:
            yield
        finally:
            for cache in caches:
                cache.cache_clear()
