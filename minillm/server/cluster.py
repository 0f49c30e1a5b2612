"""`minillm serve --replicas N`: several engines behind one address, held up by Ray Serve.

Ray starts the replicas, asks after their health, replaces those that die, and carries requests to them; `routing` says
to which one. Each replica is a process with an engine of its own and the app of a single server, so the API is the same
by construction. Replicas share nothing: no weights, no blocks, no queue.
"""

import logging
import os
import queue
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from minillm.errors import InputError, check_range, whole_number
from minillm.fetch import find
from minillm.server.replica import DEPLOYMENT, NAME, Make, Replica
from minillm.server.run import MOST_DRAIN, Options, listen, make, url_of, warn_of_open_door

OBJECT_STORE = 80 << 20  # bytes, the least that Ray takes: what flows here is small
MOST_REPLICAS = 1000
REACH = 5.0  # seconds until a Ray that does not answer counts as absent
MOST_WAITING = 1000  # requests that a proxy keeps while no replica is there
MOST_AT_ONCE = 100_000  # of a replica: its own app refuses what is too much, with a better message than Ray's
QUIET = {"log_level": "WARNING", "enable_access_log": False}
# Ray's own ports run whatever code they are sent: they take a token of this run, and are on loopback, which Ray wants
# only where it knows no clusters. (Each replica has one more port, on all interfaces; it takes the token as well.)
ALONE = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
HOOK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "minillm.server.routing.middlewares"}


def serve(
    options: Options, host: str, port: int, drain_seconds: float, replicas: int, address: str | None = None
) -> int:
    """As `run.run`, with several engines. Returns the exit code. Raises InputError."""
    find(options.model)  # what the replicas would say too, but later
    if options.device.startswith("cuda:"):
        raise InputError(f"device is {options.device}; with replicas give cuda, and each gets a GPU of its own")
    with listen(host, port) as sock:
        warn_of_open_door(sock, options)

    def ready(url: str) -> None:
        print(f"{options.served_name} is served by {replicas} replicas at {url}  (Ctrl-C ends)", flush=True)

    run(
        partial(make, options),
        replicas=replicas,
        host=host,
        port=port,
        drain_seconds=drain_seconds,
        device=options.device,
        address=address,
        ready=ready,
    )
    return 0


def run(
    build: Make,
    *,
    replicas: int,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_seconds: float = 30.0,
    device: str = "cpu",
    address: str | None = None,
    ready: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests end. SIGHUP replaces the replicas one by one.

    build          makes a replica's engine loop, not started yet, and its app; it is pickled for the replicas
    drain_seconds  that running requests get to end, at the end and when a replica is replaced
    device         cuda: each replica gets a GPU of its own; auto: if Ray has any
    address        of a Ray cluster that runs already ("auto": this machine's); None: one for this command alone
    ready          is told the URL when the replicas answer

    A second signal ends everything at once. Raises InputError where Ray is missing or out of reach, the port is taken,
    or the cluster is too small.
    """
    whole_number("replicas", replicas, 1, MOST_REPLICAS)
    check_range("drain_seconds", drain_seconds, 0, MOST_DRAIN)
    with listen(host, port) as sock:  # Ray opens it itself, and says less clearly that it is taken
        (host, port), url = sock.getsockname()[:2], url_of(sock)
    with _ray(address), Orders() as orders:
        from ray import serve

        app = application(build, replicas, _share(replicas, device), drain_seconds)
        _check_vacant()
        serve.start(
            http_options={"host": host, "port": port},
            proxy_location="EveryNode",
            logging_config=QUIET,
            controller_options={"runtime_env": {"env_vars": HOOK}},
        )
        try:
            _deploy(app)
            ready(url)
            for _ in orders:
                _deploy(app, wait=False)
            _drain()
        finally:
            if address is not None:  # of our own Ray nothing is left anyway
                serve.shutdown()


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """Ray, connected; one that was started for this command ends with it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address is None:
        os.environ.update(ALONE, RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:  # only now, since Ray reads its environment as it is imported
        import ray
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise InputError(f"replicas need Ray Serve ({error}); `pip install 'minillm[cluster]'` brings it") from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        if address and ":" in address:  # Ray itself would try for a minute
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()
        if address is None:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _node_ip_address="127.0.0.1",
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"Ray at {address or 'this machine'} is out of reach: {why}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_vacant() -> None:
    """A Serve that runs already keeps its own port and hooks, whatever `serve.start` asks for."""
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return
    raise InputError("this Ray cluster runs a Ray Serve already; end it with `serve shutdown`, or use another cluster")


def _share(replicas: int, device: str) -> dict[str, float]:
    """What Ray is to reserve for each replica. Ray sets OMP_NUM_THREADS to the whole cores, at least one."""
    import ray

    there = ray.cluster_resources()
    cores, gpus = there.get("CPU", 0) / replicas, there.get("GPU", 0)
    needs_gpu = device == "cuda" or (device == "auto" and gpus > 0)
    if needs_gpu and gpus < replicas:
        raise InputError(f"replicas is {replicas}, but Ray has {gpus:g} GPUs; each replica needs one of its own")
    return {"num_cpus": int(cores) if cores >= 1 else cores, "num_gpus": int(needs_gpu)}


def application(build: Make, replicas: int, share: dict[str, float], drain_seconds: float) -> Any:
    """What Ray Serve runs; also for those who give it to `serve run` or KubeRay themselves, with HOOK in the
    environment of the proxies."""
    from ray import serve

    described = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=replicas,
        ray_actor_options=share,
        max_ongoing_requests=MOST_AT_ONCE,
        max_queued_requests=MOST_WAITING,
        request_router_config={"request_router_class": "minillm.server.routing.PrefixRouter"},
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_seconds,
        max_constructor_retry_count=3,
    )
    return described(serve.ingress()(Replica)).bind(build)


def _deploy(app: Any, *, wait: bool = True) -> None:
    """Replicas that run already are replaced, a fifth of them (at least one) at a time: each takes no new requests,
    ends those it has, and makes room for the next."""
    from ray import serve

    target = serve.RunTarget(target=app, name=NAME, route_prefix="/", logging_config=QUIET)
    try:
        serve.run_many([target], wait_for_applications_running=wait)
    except RuntimeError as error:
        app_status = serve.status().applications.get(NAME)
        found = app_status and app_status.deployments.get(DEPLOYMENT)
        last = found.message.strip().splitlines()[-1] if found and found.message else error  # the replica's own words
        raise InputError(f"the replicas did not start: {last}") from None


def _drain() -> None:
    """No new requests; returns when the running ones have ended, or Ray has ended them."""
    from ray import serve

    while NAME in serve.status().applications:
        with suppress(TimeoutError):  # Ray waits a minute
            serve.delete(NAME)


class Orders:
    """Signals, as an iterator: each SIGHUP is an item, and the first SIGTERM or SIGINT the end; the next one raises
    KeyboardInterrupt, and so does one before anybody listens."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listening = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Orders":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGHUP and not self._listening:
            raise KeyboardInterrupt
        self._waiting.put(number)
        self._listening = self._listening and number == signal.SIGHUP

    def __iter__(self) -> Iterator[int]:
        self._listening = True
        while True:
            try:
                number = self._waiting.get(timeout=0.2)  # seconds; a signal that another thread gets wakes nobody
            except queue.Empty:
                continue
            if number != signal.SIGHUP:
                return
            yield number
