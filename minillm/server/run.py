"""`minillm serve`: an engine from its options, a socket, signals, and an end that cuts nobody off."""

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from minillm.engine import Engine
from minillm.errors import InputError, check_range
from minillm.server.app import make_app
from minillm.server.loop import EngineLoop
from minillm.server.protect import protocol
from minillm.sharing import SharedSlots
from minillm.terminal import remark

MOST_DRAIN = 3600.0  # seconds
MOST_FILES = 1 << 16  # if the system names no most
KEEP_ALIVE = 30  # seconds that a connection may stay open for nothing
LAST_BYTES = 2.0  # seconds for clients to take what is left, when all texts have ended


@dataclass(frozen=True)
class Options:
    """What a server's engine and app are made of. None: the engine's default."""

    model: str
    name: str | None = None  # what clients call it
    device: str = "auto"
    dtype: str = "auto"
    max_running: int = 32
    budget: int = 512
    max_len: int | None = None
    kv_slots: int | None = None
    block: int = 16
    backend: str = "auto"
    policy: str = "first-come"
    max_waiting: int = 1024
    api_key: str | None = None

    @property
    def served_name(self) -> str:
        return self.name or Path(self.model).name


def make(options: Options) -> tuple[EngineLoop, FastAPI]:
    """The engine's loop, not started yet, and its app, which starts it.

    The engine is made in a thread that ends with it. OpenMP keeps workers for each thread that computes, and if all
    of them are more than the cores, libgomp has them sleep between two pieces of work: steps took 1.6 times as long.
    """
    with ThreadPoolExecutor(1) as thread:
        engine = thread.submit(make_engine, options).result()
    assert engine.tokenizer is not None
    loop = EngineLoop(engine, options.max_waiting)
    return loop, make_app(loop, options.served_name, engine.tokenizer, api_key=options.api_key)


def make_engine(options: Options) -> Engine:
    return Engine.from_pretrained(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_running=options.max_running,
        budget=options.budget,
        max_len=options.max_len,
        backend=options.backend,
        slots=partial(SharedSlots, n_slots=options.kv_slots, size=options.block),
        policy=options.policy,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to this address; port 0 is any free one. Raises InputError where it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is in use; give another --port, or 0 for any free one") from None
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--host {host} --port {port} cannot be listened at: {reason}") from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def warn_of_open_door(sock: socket.socket, options: Options) -> None:
    address = sock.getsockname()[0]
    if not is_loopback(address) and not options.api_key:
        remark(f"warning: other machines can reach {address}, and no --api-key keeps anybody out")


class Server(uvicorn.Server):
    """uvicorn, but with an end of our own. The first SIGTERM or SIGINT: new requests get 503, running texts have
    `drain_seconds` to end; then those that are left get an error. The second signal: out at once."""

    def __init__(self, app: FastAPI, loop: EngineLoop, drain_seconds: float, ready: Callable[[], None] = lambda: None):
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol(),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=LAST_BYTES,  # type: ignore[arg-type]  # a float is as good
            )
        )
        self.engine_loop, self.drain_seconds, self.ready = loop, drain_seconds, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # not sys.exit, which would wait for threads
        self.should_exit = True
        self.engine_loop.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not await self.engine_loop.drain(self.drain_seconds):
            logging.getLogger(__name__).warning("%d texts are cut off", self.engine_loop.n_live)
            await asyncio.to_thread(self.engine_loop.stop)  # their streams end with an error
        await super().shutdown(sockets)


def run(
    options: Options,
    host: str,
    port: int,
    drain_seconds: float,
    replicas: int | None = None,
    ray_address: str | None = None,
) -> int:
    """Serves until a signal: in this process, or with that many replicas in processes of their own. Returns the exit
    code, or ends with it: 1 if the engine died. Raises InputError."""
    check_range("drain_seconds", drain_seconds, 0, MOST_DRAIN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # no line for each client that speaks no HTTP
    if replicas is not None:
        from minillm.server import cluster

        return cluster.serve(options, host, port, drain_seconds, replicas, ray_address)
    sock = listen(host, port)  # before the weights are loaded, so that a busy port is told at once
    warn_of_open_door(sock, options)
    allow_many_files()

    def ready() -> None:
        print(f"{options.served_name} is served at {url_of(sock)}  (Ctrl-C ends)", flush=True)

    loop, app = make(options)
    Server(app, loop, drain_seconds, ready).run([sock])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if loop.died is None else 1)  # nothing is left to do, and with torch Python's own end takes seconds


def allow_many_files() -> None:
    """A stream is a file descriptor, and the usual limit of 1,024 would refuse the thousandth client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        most = max(soft, MOST_FILES) if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
