"""The servers that `minillm bench serving` measures: processes of their own, which never outlive it."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from minillm import doctor
from minillm.bench.load_http import Fault, Server, get
from minillm.errors import InputError

START_SECONDS = 180.0  # for a server to load its weights
END_SECONDS = 20.0  # for a server to end by itself
PEER_CONTEXT = 2048  # tokens in each slot of llama-server
MAKE_GGUF = "llama-quantize --allow-requantize SOURCE.gguf FILE.gguf BF16"


@dataclass(frozen=True)
class Models:
    """What is served, and by whom else."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    peer_server: Path | None = None  # llama-server
    peer_gguf: Path | None = None
    peer_url: str | None = None

    def check(self) -> None:
        """Raises InputError."""
        if self.peer_url is not None:
            Server.parse(self.peer_url)
        if self.peer_server is None:
            if self.peer_gguf is not None:
                raise InputError(f"--peer-gguf {self.peer_gguf} is given, but no --peer-server to load it")
            return
        if self.peer_url is not None:
            raise InputError("--peer-server and --peer-url exclude each other; give one of them")
        if self.peer_gguf is None:
            raise InputError(f"--peer-server needs --peer-gguf, a file with a tokenizer in it: {MAKE_GGUF}")
        if self.peer_server.is_dir() or not os.access(self.peer_server, os.X_OK):
            raise InputError(f"--peer-server {self.peer_server} is no program; give the path of llama-server")
        try:
            with self.peer_gguf.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise InputError(f"--peer-gguf {self.peer_gguf} cannot be read: {error.strerror}") from None
        if magic != b"GGUF":
            raise InputError(f"--peer-gguf {self.peer_gguf} is no GGUF file; make one: {MAKE_GGUF}")


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server, which ends with the block, however that ends. It is not in the terminal's group of processes, where it
    would get Ctrl-C itself and go before its client."""
    with log.open("wb") as file:
        try:
            server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise InputError(f"{command[0]} cannot be run: {error.strerror}") from None
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, with all that is to be done at the end of blocks."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for(name: str, server: subprocess.Popen[bytes], log: Path, ready: Callable[[], str | None]) -> str:
    """What `ready` says when it says something. Raises InputError if the server ends before, or takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if (found := ready()) is not None:
            return found
        if server.poll() is not None:
            last = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
            raise InputError(f"{name} ended before it served, with status {server.returncode}: {''.join(last)}")
        time.sleep(0.05)
    raise InputError(f"{name} was not ready after {START_SECONDS:g} s")


@contextmanager
def ours(models: Models, limits: Mapping[str, object], folder: Path) -> Iterator[tuple[str, int]]:
    """URL and process id of a `minillm serve` with these options."""
    log = folder / "minillm.log"
    options = {"port": 0, **limits, "model": models.model, "device": models.device, "dtype": models.dtype}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]

    def said() -> str | None:
        found = re.search(r" is served at (http://\S+)", log.read_text("utf-8", "replace"))
        return found and found[1]

    with process([sys.executable, "-m", "minillm", "serve", *words], log) as server:
        yield wait_for("minillm serve", server, log, said), server.pid


def peer_options(clients: int) -> list[str]:
    """A slot for each client, each with room for the longest text; prompts that never come again are not saved."""
    options = {"-t": doctor.usable_cores(), "-np": clients, "-c": clients * PEER_CONTEXT, "--cache-ram": 0}
    return [*(str(word) for pair in options.items() for word in pair), "--no-webui"]


@contextmanager
def peer(models: Models, clients: int, folder: Path) -> Iterator[tuple[str, int]]:
    """URL and process id of a llama-server."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "peer.log"
    where = ["-m", str(models.peer_gguf), "--host", "127.0.0.1", "--port", str(port)]

    def healthy() -> str | None:
        with suppress(Fault):
            asyncio.run(get(Server.parse(url), "/health"))
            return url
        return None

    assert models.peer_server is not None
    program = str(models.peer_server.absolute())  # a bare name is a file here, and Popen would look for it on the PATH
    with process([program, *where, *peer_options(clients)], log) as server:
        yield wait_for("llama-server", server, log, healthy), server.pid


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """User and system time of each until now; nothing where there is no /proc."""
    found = {}
    for name, pid in pids.items():
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found
