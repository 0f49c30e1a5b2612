"""The process that a submission runs in: started with an environment of its own, listened to, ended."""

import itertools
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minillm.fetch import weights_dir
from minillm.lab.build import ROOT

BEGINS = 60.0  # seconds within which it must begin: it imports torch
GRACE = 5.0  # seconds over a property's own, to end by itself
LONGEST = 1 << 16  # bytes of a line; the grader's own are shorter
HIDDEN_FOLDERS = ("lessons", "tests", "build", "minillm/lab", "minillm/stages", "minillm/course")
SYSTEM = ("/sys/fs/cgroup", "/proc/meminfo")  # how much memory there is


def places() -> dict[str, list[str]]:
    """What may be read, and what of that may not."""
    readable = sys.prefix, sys.base_prefix, str(ROOT / "minillm"), str(weights_dir().resolve()), *SYSTEM
    return {"readable": list(readable), "hidden": [str(ROOT / name) for name in HIDDEN_FOLDERS]}


class Process:
    def __init__(self, job: dict[str, Any], folder: Path):
        self.nonce = secrets.token_hex(16)
        self.pipe, writing = os.pipe()
        # a file, not a pipe: a process that dies at once must not leave us writing
        with open(folder / "job", "w", encoding="utf-8") as file:
            json.dump(job | {"nonce": self.nonce}, file)
        with open(folder / "job", "rb") as stdin, open(folder / "stderr", "wb") as stderr:
            (folder / "job").unlink()
            self.child = subprocess.Popen(
                command(writing),
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd=folder,
                env=environment(folder),
                pass_fds=[writing],
                start_new_session=True,
            )
        os.close(writing)

    def messages(self, deadline: float, each: float) -> Iterator[dict[str, Any]]:
        """As they come; an empty one for a line that is not the grader's. Raises TimeoutError at the deadline, or if
        what was begun goes on for longer than `each`: whatever else it says meanwhile gives it no more time."""
        rest, until = b"", time.monotonic() + BEGINS
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while True:
                left = min(deadline, until) - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                if not (data := os.read(self.pipe, 65536)):
                    return
                *whole, rest = (rest + data).split(b"\n")
                if len(rest) > LONGEST:
                    whole, rest = [*whole, b""], b""
                for line in whole:
                    message = heard(line, self.nonce)
                    if "begin" in message or "found" in message:
                        until = time.monotonic() + each + GRACE
                    yield message

    def end(self) -> str:
        """Ends it if it has not, with what it started, and says how it ended."""
        os.close(self.pipe)
        try:
            return how(self.child.wait(0.5))
        except subprocess.TimeoutExpired:
            self.child.kill()
            return how(self.child.wait())
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, signal.SIGKILL)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is removed afterwards, whatever was put into it."""
    folder = tempfile.mkdtemp(prefix="minillm-")
    try:
        yield Path(folder)
    finally:
        with suppress(OSError):
            remove(folder)


def remove(folder: str) -> None:
    """As shutil.rmtree, which fails on a thousand folders in each other: here each is emptied into the outermost."""
    names = (os.path.join(folder, f"{secrets.token_hex(8)}-{n}") for n in itertools.count())
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # else it cannot be moved
                os.rename(inner.path, next(names))
            os.rmdir(entry.path)
    os.rmdir(folder)


def command(pipe: int) -> list[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from minillm.course.grader import main; main({pipe})"
    return [sys.executable, "-I", "-B", "-c", code]


def environment(folder: Path) -> dict[str, str]:
    kept = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}
    return kept | {
        "PATH": "",  # no compiler either: the project's own C code is not used
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MINILLM_WEIGHTS": str(weights_dir().resolve()),
        "MINILLM_NOTES": os.devnull,
        "MINILLM_SIZE": "ci",
    }


def heard(line: bytes, nonce: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) and message.pop("nonce", None) == nonce else {}


def how(code: int) -> str:
    if code >= 0:
        return f"the process ended (exit code {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"the process was ended by {name}"
