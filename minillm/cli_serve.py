"""`minillm serve`: the options of the server. What it does is in `server`, imported when it is asked for."""

import importlib.util
from typing import Annotated

import typer

from minillm.cli_options import DEFAULT_MODEL, RUNNING, Backend, Device, Dtype, Model
from minillm.errors import InputError

PANEL = "Serve"
LISTENING, LIMITS, CLUSTER = "Where to listen", "How much to take", "More than one engine"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(serve)


def serve(
    host: Annotated[
        str, typer.Option(help="The address; 0.0.0.0 lets other machines in.", rich_help_panel=LISTENING)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: any free one, which is printed.", rich_help_panel=LISTENING)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MINILLM_API_KEY", help="What clients must send as a bearer token.", rich_help_panel=LISTENING
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.  [dim]\\[default: its name][/]", rich_help_panel=LISTENING),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option(help="At the end, how long running texts may still take.", rich_help_panel=LISTENING),
    ] = 30.0,
    max_running: Annotated[int, typer.Option(min=1, help="Most texts in one step.", rich_help_panel=LIMITS)] = 32,
    max_waiting: Annotated[
        int,
        typer.Option(min=0, help="Most texts that wait; more are refused with 429.", rich_help_panel=LIMITS),
    ] = 1024,
    budget: Annotated[int, typer.Option(min=1, help="Most tokens in one step.", rich_help_panel=LIMITS)] = 512,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of one text, its prompt included.  [dim]\\[default: 2048, or the model's context][/]",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    kv_slots: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that KV memory holds.  [dim]\\[default: enough for all][/]", rich_help_panel=LIMITS
        ),
    ] = None,
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block of it.", rich_help_panel=LIMITS)] = 16,
    policy: Annotated[
        str,
        typer.Option(help="Who joins next: first-come, priority or shortest-prompt.", rich_help_panel=RUNNING),
    ] = "first-come",
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="So many engines behind one address, held up by Ray Serve.  [dim]\\[default: one, without Ray][/]",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster that runs already; auto: this machine's.", rich_help_panel=CLUSTER),
    ] = None,
    backend: Backend = "auto",
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Serve the model to any client of OpenAI's API, and show the running batch at its address.

    Routes: /v1/chat/completions, /v1/completions, /v1/models, /health and
    /metrics. SIGTERM or Ctrl-C lets running texts end and refuses new ones;
    a second one ends at once.

    [bold]Examples[/]
    $ minillm serve
    $ minillm serve --port 0 --max-running 64 --kv-slots 65536
    $ MINILLM_API_KEY=secret minillm serve --host 0.0.0.0
    $ minillm serve --replicas 2
    """
    if missing := [package for package in NEEDED if importlib.util.find_spec(package) is None]:
        raise InputError(f"the server needs {' and '.join(missing)}: pip install 'minillm[serve]'")
    if ray_address is not None and replicas is None:
        raise InputError(f"--ray-address {ray_address} is given, but no --replicas; say how many")
    from minillm.server.run import Options, run

    options = Options(
        model=model,
        name=name,
        device=device,
        dtype=dtype,
        max_running=max_running,
        budget=budget,
        max_len=max_len,
        kv_slots=kv_slots,
        block=block,
        backend=backend,
        policy=policy,
        max_waiting=max_waiting,
        api_key=api_key or None,
    )
    return run(options, host, port, drain_seconds, replicas, ray_address)
