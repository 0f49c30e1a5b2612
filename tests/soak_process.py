"""The soak's server: `minillm serve` in a process of its own, and what is seen of it from outside.

When this file is run, it is that process: the real command, but with less patience, and with a signal on which it
writes down what it holds.
"""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from soak_wire import Wire  # noqa: E402

NAME = "soaked"
PATIENCE, BODY_SECONDS = 4.0, 4.0  # in the place of the server's 60 and 30 s
LIMITS = {"max-running": 8, "max-waiting": 10, "kv-slots": 640, "max-len": 384, "budget": 96, "block": 16}
DRAIN = 60.0  # seconds
EVERY = 0.5  # seconds between two looks at the process
SIGNAL_SECONDS = 30.0  # in which it must answer a signal
ANSWER_SECONDS = 60.0  # and a request for /metrics


def serve() -> None:
    """The command itself, in a process of its own; SIGUSR1 has it write down what it holds."""
    from minillm import cli
    from minillm.server import app

    file = Path(sys.argv.pop(1))
    assert app.make_app.__kwdefaults__ is not None
    app.make_app.__kwdefaults__.update(patience=PATIENCE, body_seconds=BODY_SECONDS)
    signal.signal(signal.SIGUSR1, lambda *_: write_census(file))
    cli.main()


def write_census(file: Path) -> None:
    from minillm.server.loop import EngineLoop

    gc.collect()
    objects = gc.get_objects()
    counts = Counter(type(one).__name__ for one in objects)
    loop = next(one for one in objects if type(one) is EngineLoop)
    scheduler = loop.engine.scheduler
    kinds = ("Request", "Event", "Stream", "EventStream", "RequestResponseCycle", "Limited", "Task", "Choice")
    found = {
        "n_live": loop.n_live,
        "streams": len(loop._streams),
        "owners": len(loop._owners),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "blocks held": scheduler.slots.n_slots // LIMITS["block"] - len(scheduler.slots.free),  # type: ignore[attr-defined]
        "python blocks": sys.getallocatedblocks(),
        "objects": {kind: counts[kind] for kind in kinds},
    }
    del objects
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(file)


@dataclass
class Sample:
    seconds: float  # since the clients began
    memory: int  # bytes in RAM that are no file's
    files: int
    threads: int


class Process:
    """A `minillm serve` with the soak's limits, seen from outside."""

    def __init__(self, folder: Path, model: Sequence[str]):
        self.folder, self.log = folder, folder / "log"
        options = [part for name, value in LIMITS.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, __file__, str(folder / "census"), "serve", "--port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--name", NAME, "--dtype", "float32", "--device", "cpu", "--drain-seconds", str(DRAIN)]
                + [*options, *model],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.samples: list[Sample] = []
        self._over = threading.Event()

    def port(self) -> int:
        """When it is ready. Raises AssertionError with what it said instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert "is served at http" in line, f"the server said {line!r}; {self.log.read_text()}"
        return int(line.split("://")[1].split()[0].rpartition(":")[2])

    def sample(self, began: float) -> None:
        proc = Path(f"/proc/{self.process.pid}")
        while not self._over.wait(EVERY):
            try:
                _, resident, shared, *_ = (int(word) for word in (proc / "statm").read_text().split())
                numbers = len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))
            except OSError:  # it has died, which is noticed elsewhere, or this system tells nothing
                return
            memory = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
            self.samples.append(Sample(time.monotonic() - began, memory, *numbers))

    def census(self) -> dict[str, Any]:
        file = self.folder / "census"
        file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + SIGNAL_SECONDS
        while not file.exists():
            assert time.monotonic() < until and self.process.poll() is None, "the server takes no signals any more"
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def end(self) -> None:
        self._over.set()
        self.process.kill()
        self.process.wait()


async def get(port: int, path: str) -> tuple[int, str]:
    wire = await Wire(port).open()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await wire.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            wire.expect("GET")
            status = await wire.head()
            return status, b"".join([piece async for piece in wire.body()]).decode()
    finally:
        wire.leave(False)


async def metrics(port: int) -> dict[str, float]:
    """{name with its labels but the model's: value}."""
    status, text = await get(port, "/metrics")
    assert status == 200, f"/metrics answers {status}"
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    model = f'model_name="{NAME}"'
    return {
        name.replace(f",{model}", "").replace(f"{model},", "").replace(f"{{{model}}}", ""): float(value)
        for name, value in pairs
    }


def lag_quantile(before: dict[str, float], after: dict[str, float], q: float) -> float:
    """Seconds; the upper end of the bucket that holds it, inf beyond the last."""
    start = 'minillm:event_loop_lag_seconds_bucket{le="'
    rows = [(name[len(start) : -2], n - before.get(name, 0)) for name, n in after.items() if name.startswith(start)]
    return next(float(end) for end, n in rows if n >= q * rows[-1][1])


if __name__ == "__main__":
    serve()
