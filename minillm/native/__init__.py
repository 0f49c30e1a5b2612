"""The C files beside this one, compiled for this machine when they are first needed, and called through ctypes.

torch's operators each write their result to memory for the next one to read. In C, several become one pass. What is
compiled is kept in the user's cache folder, under a name that changes with the source, the compiler and the CPU; on a
machine without a compiler nothing changes but the speed.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from minillm.host import cache_folder

SOURCES = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi"]
DTYPES = {
    torch.bfloat16: ["-DBF16", "-DREAL=float", "-DINT=int32_t"],
    torch.float32: ["-DREAL=float", "-DINT=int32_t"],
    torch.float64: ["-DREAL=double", "-DINT=int64_t"],
}
STEP = 32  # numbers: what the C code reads and writes together, or twice that
SECONDS = 60  # a compiler that takes longer does not answer


class NotCompiled(Exception):
    """Says in words why there is no compiled code."""


@cache
def library(name: str, dtype: torch.dtype, **constants: int) -> ctypes.CDLL:
    """`name`.c for numbers of this dtype, with these constants. Raises NotCompiled."""
    if dtype not in DTYPES:
        raise NotCompiled(f"there is no C code for {str(dtype).removeprefix('torch.')}")
    compiler = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("cc")
    if compiler is None:
        raise NotCompiled("it needs a C compiler, and neither gcc nor cc is on the PATH")
    command = [compiler, *FLAGS, *DTYPES[dtype], *(f"-D{key}={value}" for key, value in constants.items())]
    # torch brings OpenMP along: where its symbols are there already, its threads are used and no second set is made
    link = [] if hasattr(ctypes.CDLL(None), "GOMP_parallel") else ["-fopenmp"]
    try:
        version = _run([compiler, "-v"])
        folder = _folder()
        key = hashlib.sha256("\n".join([*command, *link, version, _cpu(), *_texts()]).encode()).hexdigest()[:16]
        target = folder / f"{name}-{key}.so"
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                _run([*command, "-c", str(SOURCES / f"{name}.c"), "-o", f"{work}/{name}.o"])
                _run([compiler, "-shared", f"{work}/{name}.o", "-o", f"{work}/{name}.so", *link])
                os.replace(f"{work}/{name}.so", target)  # whole or not at all, should two do this at once
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(f"{compiler} did not compile {name}.c ({error})") from None


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"exit status {done.returncode}")
    return done.stderr


def _texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]"))]


def _cpu() -> str:
    """What -march=native looks at: a home folder may be shared by machines with different CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@cache
def _folder() -> Path:
    """The user's cache folder; where it cannot be written, one that lasts as long as this process."""
    if (folder := cache_folder()) is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return Path(_temporary().name)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="minillm-")  # removed at exit


def function(lib: ctypes.CDLL, name: str, pointers: int, integers: int, doubles: int = 0) -> Callable[..., None]:
    """A C function of so many pointers, then 64-bit integers, then doubles, and last an int, the threads to use."""
    found = lib[name]
    found.argtypes = [
        *[ctypes.c_void_p] * pointers,
        *[ctypes.c_int64] * integers,
        *[ctypes.c_double] * doubles,
        ctypes.c_int,
    ]
    found.restype = None
    return found
