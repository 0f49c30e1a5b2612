"""The command `minillm load`: it only takes its options apart; what it does is in `bench.load`."""

from typing import Annotated, Literal

import typer

from minillm.cli_options import JsonPath, PlotPath
from minillm.errors import InputError
from minillm.terminal import out

PANEL = "Serve"
ASKED, ARRIVALS = "What is asked", "How it arrives"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(load)


def load(
    url: Annotated[str, typer.Argument(help="The server, as http://127.0.0.1:8000.", show_default=False)],
    clients: Annotated[
        int | None,
        typer.Option(
            help="Closed loop: so many, each sends when its last answer has ended.  [dim]\\[default: 8][/]",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop: requests per second (Poisson), however slow it is.", rich_help_panel=ARRIVALS),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Several rates, one after the other: 0.5,1,2,4.", rich_help_panel=ARRIVALS)
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of each run.  [dim]\\[default: 100, or as many as --seconds makes][/]",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Send no request after so long; those sent end.", rich_help_panel=ARRIVALS),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of prompts and arrivals. The same one asks the same, which caches may know.  "
            "[dim]\\[default: a new one][/]",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="Of OpenAI's API.", rich_help_panel=ASKED)
    ] = "chat",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each prompt, about.  [dim]\\[default: the package's prompts, 20 to 1,500][/]",
            rich_help_panel=ASKED,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens of each answer.", rich_help_panel=ASKED)] = 128,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on to --max-tokens; the server must know this field.", rich_help_panel=ASKED
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Its name.  [dim]\\[default: the first that the server lists][/]", rich_help_panel=ASKED),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MINILLM_API_KEY",
            show_envvar=True,
            help="Sent as a bearer token, to the peer too.",
            rich_help_panel=ASKED,
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMITS",
            help="Milliseconds that count as served well: 'ttft:200 tpot:50', or e2el. May be given several times.",
        ),
    ] = None,
    peer_url: Annotated[
        str | None, typer.Option(help="A second server: the same requests, in rounds by turns.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How often each run is made.  [dim]\\[default: 1; 3 with a peer][/]")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Requests before, which do not count.")] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 600.0,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> int:
    """What the users of an OpenAI-compatible server would see: latencies and throughput under load.

    Every prompt is different, so that a prefix cache does not flatter the
    server. If a request fails, it is told, and the exit code is 1.

    [bold]Examples[/]
    $ minillm load http://127.0.0.1:8000 --clients 32 --requests 200
    $ minillm load http://127.0.0.1:8000 --rate 2 --seconds 60 --goodput "ttft:500 tpot:50"
    $ minillm load http://127.0.0.1:8000 --sweep 0.5,1,2,4 --plot tail.png
    $ minillm load http://127.0.0.1:8000 --peer-url http://127.0.0.1:8080 --ignore-eos
    """
    from minillm.bench.load import Plan, parse_goodput
    from minillm.bench.load_report import run_command
    from minillm.draws import fresh_seed

    if (clients is not None) + (rate is not None) + (sweep is not None) > 1:
        raise InputError("--clients, --rate and --sweep exclude each other; give one of them")
    plan = Plan(
        rates=numbers(sweep) if sweep is not None else () if rate is None else (rate,),
        clients=8 if clients is None else clients,
        requests=100 if requests is None and seconds is None else requests,
        seconds=seconds,
        endpoint=endpoint,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        goodput=parse_goodput(goodput or ()),
        rounds=rounds if rounds is not None else 1 if peer_url is None else 3,
        warmup=warmup,
        timeout=timeout,
        seed=fresh_seed() if seed is None else seed,
    )
    return run_command(url, peer_url, plan, model, api_key, json_path, plot_path, out)


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"--sweep is {text!r}; it must be rates with commas between, as 0.5,1,2,4") from None
