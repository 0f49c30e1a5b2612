"""C code compiled when it is needed: kept, made anew when something changes, and never a reason to fail."""

import ctypes
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import TINY

from minillm import native
from minillm.fusing import fuse
from minillm.kernels import why_not
from minillm.model import Llama, RMSNorm

try:
    native.library("layer", torch.float64)
except native.NotCompiled as error:
    pytest.skip(f"no C code here: {error}", allow_module_level=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and nothing remembered from before or for later."""

    def forget() -> None:
        native.library.cache_clear()
        native._folder.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "minillm"
    forget()


def test_it_is_compiled_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library("layer", torch.float32)
    [kept] = folder.iterdir()
    made = kept.stat().st_mtime_ns
    native.library.cache_clear()
    ran: list[list[str]] = []
    real = native._run
    monkeypatch.setattr(native, "_run", lambda command: ran.append(command) or real(command))
    native.library("layer", torch.float32)
    assert [command[1:] for command in ran] == [["-v"]] and kept.stat().st_mtime_ns == made
    native.library("layer", torch.float64)
    native.library("attention", torch.float32, D=32, G=1)
    native.library("attention", torch.float32, D=32, G=2)
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("what", ["_cpu", "_texts", "FLAGS"])
def test_it_is_made_anew_when_source_flags_or_cpu_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    native.library("layer", torch.float32)
    native.library.cache_clear()
    if what == "FLAGS":
        monkeypatch.setattr(native, what, [*native.FLAGS, "-DOTHER"])
    else:
        monkeypatch.setattr(native, what, lambda: "another" if what == "_cpu" else ["another"])
    native.library("layer", torch.float32)
    assert len(list(folder.iterdir())) == 2


def test_without_a_compiler_the_reason_is_given_and_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    model = Llama.random(TINY)
    with pytest.raises(native.NotCompiled, match="needs a C compiler, and neither gcc nor cc is on the PATH"):
        native.library("layer", torch.float32)
    assert type(fuse(model).norm) is RMSNorm


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("case $1 in -v) exit 0;; esac; echo 'no such flag' >&2; exit 1", "no such flag"),
        ("exit 3", "exit status 3"),
        ("exit 0", "did not compile"),  # says that all is well, and makes no file
        ('case $1 in -shared) echo text > "$4";; esac', "did not compile"),  # a file that is no library
    ],
)
def test_a_compiler_that_fails_is_quoted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text(f"#!/bin/sh\n{does}\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(native.NotCompiled, match=f"(?s)broken-cc did not compile layer.c .*{said}|{said}"):
        native.library("layer", torch.float32)
    if folder.exists():
        assert not [path for path in folder.iterdir() if path.is_dir()]  # no work folder is left


def test_a_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "slow-cc"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(native, "SECONDS", 0.2)
    with pytest.raises(native.NotCompiled, match="timed out"):
        native.library("layer", torch.float32)


def test_a_cache_folder_that_cannot_be_used_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(native.library("layer", torch.float32), ctypes.CDLL)
    native.library.cache_clear()
    native._folder.cache_clear()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert isinstance(native.library("layer", torch.float32), ctypes.CDLL)


def test_torchs_threads_are_used(folder: Path) -> None:
    """A second OpenMP beside torch's own would have threads of its own, which wait by spinning."""
    native.library("layer", torch.float32)
    maps = Path("/proc/self/maps")
    if maps.exists():
        runtimes = {os.path.realpath(line.split()[-1]) for line in maps.read_text().splitlines() if "omp" in line}
        assert len({path for path in runtimes if os.path.basename(path).startswith(("libgomp", "libomp"))}) == 1


def test_a_dtype_that_has_no_code_is_named() -> None:
    with pytest.raises(native.NotCompiled, match="there is no C code for float16"):
        native.library("layer", torch.float16)
    assert why_not("c_paged", Llama.random(TINY)) is not None
