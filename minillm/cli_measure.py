"""The commands that measure: `minillm ladder`, `bench` and its experiments, `simulate`, `trace`, `profile`.

They only take their options apart; what they do is in `bench` and `simulation`, imported when they are asked for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from minillm.cli_options import DEFAULT_MODEL, RUNNING, Backend, Device, Dtype, JsonPath, Model, PlotPath, Stage, Stages
from minillm.errors import InputError
from minillm.terminal import out

PANEL = "Measure"
WITH_VALUE = ("llama-bench", "http")  # kinds of peers that need to be told where


class Bench(TyperGroup):
    """`--peer llama-bench PATH` is one option of two words, `--peer transformers` of one: the first is joined here."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        joined: list[str] = []
        for arg in args:
            if len(joined) > 1 and joined[-2] == "--peer" and joined[-1] in WITH_VALUE and not arg.startswith("--"):
                joined[-1] += f"={arg}"
            else:
                joined.append(arg)
        return super().parse_args(ctx, joined)


bench_app = typer.Typer(cls=Bench, rich_markup_mode="rich")


def add_to(app: typer.Typer) -> None:
    for command in (ladder, simulate, trace, profile):
        app.command(rich_help_panel=PANEL)(command)
    app.add_typer(bench_app, name="bench", rich_help_panel=PANEL)


# ---- the ladder


def ladder(
    stages: Stages = None,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Watch every stage generate the same texts, then compare the stages: about two minutes on two cores.

    [bold]Examples[/]
    $ minillm ladder
    $ minillm ladder --stages cached,padded,continuous
    """
    return measure(stages, "quick", [], json_path, plot_path, model, device, dtype, stream=True)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    stages: Stages = None,
    preset: Annotated[
        Literal["quick", "full"],
        typer.Option(help="quick: about two minutes; full: more prompts and repeats."),
    ] = "quick",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND [WHERE]",
            help="Measure another engine in the same run: `transformers`, `llama-bench PATH` (llama.cpp's "
            "llama-batched-bench) or `http URL` (any OpenAI-compatible server). May be given several times.",
        ),
    ] = None,
    backends: Annotated[
        bool,
        typer.Option(
            "--backends", help="In place of the stages, the attention backends side by side, over batch and context."
        ),
    ] = False,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int | None:
    """Measure every stage against the one before it; correctness is checked before any time is printed.

    With the name of an experiment, measure that instead; its options follow its name.

    [bold]Examples[/]
    $ minillm bench --preset full --json ladder.json --plot ladder.png
    $ minillm bench --stages padded,dynamic,continuous --dtype float32
    $ minillm bench --stages continuous --peer transformers
    $ minillm bench --backends --plot backends.png
    $ minillm bench queue
    """
    given = [
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if context.invoked_subcommand is not None:
        if backends:
            raise InputError(f"--backends is an experiment of its own; leave it or {context.invoked_subcommand!r} out")
        if given:
            option = given[0].removesuffix("_path").replace("_", "-")
            raise InputError(f"--{option} stands before {context.invoked_subcommand!r}; put it after the name")
        return None
    if backends:
        if alone := [name for name in given if name in ("stages", "preset", "peer")]:
            raise InputError(f"--{alone[0]} is about the stages, and --backends measures none; leave one of them out")
        from minillm.bench.backends import run_command

        return run_command(model, device, dtype, json_path, plot_path, out)
    peers = [(kind, where if equals else None) for kind, equals, where in (p.partition("=") for p in peer or ())]
    return measure(stages, preset, peers, json_path, plot_path, model, device, dtype, stream=False)


def measure(
    stages: str | None,
    preset: str,
    peers: Sequence[tuple[str, str | None]],
    json_path: Path | None,
    plot_path: Path | None,
    model: str,
    device: str,
    dtype: str,
    stream: bool,
) -> int:
    from minillm.bench import run_command

    return run_command(
        stages=split(stages),
        preset=preset,
        peers=peers,
        model=model,
        device=device,
        dtype=dtype,
        json_path=json_path,
        plot_path=plot_path,
        stream=stream,
        console=out,
    )


def split(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]


# ---- experiments


@bench_app.command()
def queue(
    scenarios: Annotated[
        str | None,
        typer.Option(help="Some of article,uniform,long,closed,real.  [dim]\\[default: all][/]"),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests of `article` and `uniform`; a third of them elsewhere.")
    ] = 200,
    slots: Annotated[int, typer.Option(help="Most requests that run at once.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 16,
    scale: Annotated[float, typer.Option(help="Of the article's output lengths, 40 to 1,000 tokens.")] = 0.25,
    load: Annotated[
        float, typer.Option(help="Requests that arrive, over those that continuous batching can serve.")
    ] = 2.15,
    rounds: Annotated[int, typer.Option(help="Rounds of static and continuous in `article` and `uniform`.")] = 2,
    limit_ttft: Annotated[float, typer.Option(help="Seconds to the first token that count as served well.")] = 5.0,
    limit_tpot: Annotated[float, typer.Option(help="Seconds per further token that count as served well.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Requests that arrive while others run: static, padded, dynamic and continuous on the same ones.

    The experiment of `minillm simulate` on the real engine. It calibrates
    first (how long does a step take?), so that requests arrive faster than
    they can be served by the same factor on every machine.

    [bold]Examples[/]
    $ minillm bench queue --json results.json --plot queue.png
    $ minillm bench queue --scenarios article --requests 40 --rounds 1
    """
    from minillm.bench.queue_report import run_command
    from minillm.bench.queueing import SCENARIOS, Plan

    names = split(scenarios)
    plan = Plan(
        requests=requests,
        slots=slots,
        prompt=prompt,
        scale=scale,
        load=load,
        rounds=rounds,
        limit_ttft=limit_ttft,
        limit_tpot=limit_tpot,
        seed=seed,
        scenarios=SCENARIOS if names is None else tuple(names),
    )
    return run_command(plan, model, device, dtype, json_path, plot_path, out)


@bench_app.command()
def prefill(
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 1024,
    running: Annotated[int, typer.Option(help="Texts that decode when it arrives.")] = 16,
    budgets: Annotated[
        str, typer.Option(help="Most tokens in one step, each measured; the whole prompt at once always is.")
    ] = "32,64,128,256,512",
    rounds: Annotated[int, typer.Option(help="How often each budget runs.")] = 3,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """A long prompt arrives while others decode: how long do they stand still, and how long does it wait?

    [bold]Examples[/]
    $ minillm bench prefill --plot prefill.png
    $ minillm bench prefill --prompt 2048 --budgets 64,512
    """
    from minillm.bench.prefill import run_command

    return run_command(
        model, device, dtype, json_path, plot_path, out, prompt, running, integers("--budgets", budgets), rounds
    )


@bench_app.command()
def memory(
    stages: Stages = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt whose activations are measured.")] = 2048,
    chunks: Annotated[
        str, typer.Option(help="Most tokens at a time, each measured; the whole prompt at once always is.")
    ] = "64,128,256,512,1024",
    blocks: Annotated[
        str, typer.Option(help="Sizes of blocks, in tokens, each counted against regions.")
    ] = "1,4,16,64",
    requests: Annotated[int, typer.Option(help="Requests that blocks and regions are counted on.")] = 600,
    served: Annotated[
        int, typer.Option(help="Requests that the model serves in regions and in blocks of 16; 0: none.")
    ] = 128,
    rounds: Annotated[int, typer.Option(help="How often it serves them.")] = 2,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """KV memory over time, reserved and used, for every stage; activations against the size of a chunk.

    Then the same memory in regions and in blocks: what is wasted, and how many
    requests run at once. First counted without a model, then served by it.

    [bold]Examples[/]
    $ minillm bench memory --plot memory.png
    $ minillm bench memory --stages padded,continuous --chunks 128,512
    $ minillm bench memory --blocks 8,16,32 --served 0
    """
    from minillm.bench.fragmentation import Plan
    from minillm.bench.memory import run_command

    plan = Plan(sizes=tuple(integers("--blocks", blocks)), requests=requests, served=served, rounds=rounds)
    return run_command(
        model, device, dtype, json_path, plot_path, out, split(stages), prompt, integers("--chunks", chunks), plan
    )


@bench_app.command()
def sharing(
    samples: Annotated[int, typer.Option(help="Samples of one prompt.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of that prompt.")] = 512,
    system: Annotated[int, typer.Option(help="Tokens of the system prompt before each question.")] = 1000,
    questions: Annotated[int, typer.Option(help="Questions that follow it, one after the other.")] = 6,
    turns: Annotated[int, typer.Option(help="Turns of the chat, at most 8.")] = 5,
    distinct: Annotated[int, typer.Option(help="Prompts that share nothing.")] = 24,
    block: Annotated[int, typer.Option(help="Size of a block, in tokens.")] = 16,
    rounds: Annotated[int, typer.Option(help="How often each is run, shared and not shared.")] = 3,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Blocks found by what is in them: memory held together, and prompt tokens that nobody computes again.

    Several samples of one prompt, a system prompt before many questions, a chat,
    and prompts that share nothing, each with and without sharing.

    [bold]Examples[/]
    $ minillm bench sharing --plot sharing.png
    $ minillm bench sharing --samples 4 --system 2000 --rounds 1
    """
    from minillm.bench.sharing import Plan
    from minillm.bench.sharing_report import run_command

    plan = Plan(
        samples=samples,
        prompt=prompt,
        system=system,
        questions=questions,
        turns=turns,
        distinct=distinct,
        block=block,
        rounds=rounds,
    )
    return run_command(plan, model, device, dtype, json_path, plot_path, out)


@bench_app.command()
def scheduler(
    running: Annotated[int, typer.Option(help="Requests that run at once.")] = 256,
    waiting: Annotated[int, typer.Option(help="Requests that wait while the model runs.")] = 10_000,
    steps: Annotated[int, typer.Option(help="Steps timed without the model, for each length of queue.")] = 200,
    real: Annotated[int, typer.Option(help="Steps timed with it; 0: none.")] = 5,
    requests: Annotated[int, typer.Option(help="Requests that each policy serves.")] = 4_000,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    json_path: JsonPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """What planning a step costs, with queues of up to 100,000 requests; and who waits how long under each policy.

    The policies are counted in steps, without a model: the same on every machine.

    [bold]Examples[/]
    $ minillm bench scheduler
    $ minillm bench scheduler --running 32 --real 20
    """
    from minillm.bench.scheduling import Plan, run_command

    plan = Plan(running=running, waiting=waiting, steps=steps, real=real, requests=requests, seed=seed)
    return run_command(plan, model, device, dtype, json_path, out)


@bench_app.command()
def scaling(
    running: Annotated[int, typer.Option(help="Texts in a decode step at each of the contexts.")] = 32,
    contexts: Annotated[
        str, typer.Option(help="Positions that each of them looks at.")
    ] = "64,128,256,512,1024,2048,4096",
    batches: Annotated[
        str, typer.Option(help="Numbers of texts in a step, for its time and for memory.")
    ] = "1,2,4,8,16,32,64,128,256",
    context: Annotated[int, typer.Option(help="Positions that each text of a batch looks at.")] = 160,
    prompts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "64,128,256,512,1024,2048,4096",
    budget: Annotated[int, typer.Option(help="Most tokens in a step, where prompts are cut.")] = 512,
    rounds: Annotated[int, typer.Option(help="How often each size is timed.")] = 3,
    backend: Backend = "auto",
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """What a step costs as context, batch and prompt grow, each with its law: about a minute on two cores.

    The laws are fitted, and stand beside what this machine's bandwidth and
    arithmetic predict for the counted work. Nothing is computed first: K and V
    hold random numbers.

    [bold]Examples[/]
    $ minillm bench scaling --json results.json --plot scaling.png
    $ minillm bench scaling --contexts 128,512,2048 --prompts 64,256,512,1024 --rounds 1
    """
    from minillm.bench.scaling import Plan
    from minillm.bench.scaling_report import run_command

    plan = Plan(
        running=running,
        contexts=tuple(integers("--contexts", contexts)),
        batches=tuple(integers("--batches", batches)),
        context=context,
        prompts=tuple(integers("--prompts", prompts)),
        budget=budget,
        rounds=rounds,
        backend=backend,
    )
    return run_command(plan, model, device, dtype, json_path, plot_path, out)


@bench_app.command()
def serving(
    requests: Annotated[int, typer.Option(help="Requests of each round.")] = 96,
    clients: Annotated[int, typer.Option(help="So many at once, and most texts in a step.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of all engines by turns.")] = 3,
    streams: Annotated[int, typer.Option(help="Short requests sent all at once.")] = 1000,
    shares: Annotated[
        str, typer.Option(help="Rates of the open loop, in shares of what was served; '' for none.")
    ] = "0.3,0.5,0.7,0.9,1.1",
    seconds: Annotated[float, typer.Option(help="In which requests arrive, at each rate.")] = 15.0,
    goodput: Annotated[str, typer.Option(help="Milliseconds that count as served well.")] = "ttft:1000 tpot:100",
    peer_server: Annotated[
        Path | None, typer.Option(help="The program llama-server: measured by turns with ours.")
    ] = None,
    peer_gguf: Annotated[Path | None, typer.Option(help="What it loads: the same weights, with a tokenizer.")] = None,
    peer_url: Annotated[str | None, typer.Option(help="In its place: any such server that runs already.")] = None,
    json_path: JsonPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """What the server costs on top of the engine, 1,000 streams at once, the tail near capacity: about five minutes.

    `minillm serve` is started for it, and stopped at its end.

    [bold]Examples[/]
    $ minillm bench serving --json results.json
    $ minillm bench serving --peer-server build/bin/llama-server --peer-gguf smollm2-bf16.gguf
    $ minillm bench serving --rounds 1 --requests 32 --streams 100 --shares 0.5,1 --seconds 5
    """
    from minillm.bench.load import parse_goodput
    from minillm.bench.serving import Plan
    from minillm.bench.serving_processes import Models
    from minillm.bench.serving_report import run_command

    plan = Plan(
        requests=requests,
        clients=clients,
        max_tokens=max_tokens,
        rounds=rounds,
        budget=max(512, clients),
        streams=streams,
        shares=numbers("--shares", shares) if shares else (),
        seconds=seconds,
        goodput=parse_goodput([goodput]),
    )
    models = Models(model, device, dtype, peer_server, peer_gguf, peer_url)
    return run_command(models, plan, json_path, out)


def numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{option} is {text!r}; it must be numbers with commas between, as 0.5,0.9") from None


def integers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"{option} is {text!r}; it must be whole numbers with commas between, as 64,128") from None


# ---- one step


def profile(
    running: Annotated[int, typer.Option(help="Texts in the decode step.")] = 64,
    context: Annotated[int, typer.Option(help="Positions that each of them looks at.")] = 160,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt whose step is looked at too; 0: none.")] = 512,
    steps: Annotated[int, typer.Option(help="Steps of each kind.")] = 20,
    backend: Backend = "auto",
    json_path: JsonPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Where does a step's time go? Each part of the code, what it takes, and how far the step is from its floor.

    The floor: the model's Linears alone, and the live K and V at the speed of
    a copy, both measured in the same run.

    [bold]Examples[/]
    $ minillm profile
    $ minillm profile --running 1 --prompt 0 --steps 100
    """
    from minillm.bench.profile import Plan, run_command

    plan = Plan(running=running, context=context, prompt=prompt, steps=steps, backend=backend)
    return run_command(plan, model, device, dtype, json_path, out)


# ---- the simulation


def simulate(
    requests: Annotated[int, typer.Option(help="How many arrive.")] = 600,
    slots: Annotated[int, typer.Option(help="How many can run at once.")] = 8,
    time_per_token: Annotated[float, typer.Option(help="Milliseconds, for every token of every slot.")] = 8.0,
    rate: Annotated[float, typer.Option(help="Requests per second on average (Poisson).")] = 11.0,
    arrivals: Annotated[
        str, typer.Option(help="poisson, at-once, or the path of a trace: CSV with arrival,prompt,output.")
    ] = "poisson",
    policies: Annotated[str, typer.Option(help="Some of static,dynamic,continuous.")] = "static,dynamic,continuous",
    uniform: Annotated[
        int | None,
        typer.Option(help="Every output has so many tokens.  [dim]\\[default: the article's mix][/]"),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt (with --calibrate).")] = 16,
    seeds: Annotated[int, typer.Option(help="How often, each time with other random numbers.")] = 300,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Also by the time that this machine's steps take.")
    ] = False,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Why continuous batching: the queue in front of the engine, simulated.

    With no options: a published experiment, whose every figure must lie where
    95 of 100 simulated runs lie; if one does not, the exit code is 1. With
    other parameters the same tables, without a verdict.

    [bold]Examples[/]
    $ minillm simulate
    $ minillm simulate --calibrate --plot waits.png
    $ minillm simulate --uniform 150
    $ minillm simulate --arrivals trace.csv --slots 4
    """
    from minillm.simulation import run_command

    return run_command(
        requests=requests,
        slots=slots,
        time_per_token_ms=time_per_token,
        rate=rate,
        arrivals=arrivals,
        policies=split(policies) or [],
        uniform=uniform,
        prompt=prompt,
        seeds=seeds,
        calibrate=calibrate,
        model=model,
        device=device,
        dtype=dtype,
        json_path=json_path,
        plot_path=plot_path,
        console=out,
    )


# ---- the timeline


def trace(
    stage: Stage = "continuous",
    requests: Annotated[int, typer.Option(help="How many of the package's prompts.")] = 12,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens for each text.")] = 48,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second (Poisson).  [dim]\\[default: all there at the start][/]"),
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Most texts in one step.  [dim]\\[default: 4][/]", rich_help_panel=RUNNING)
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            help="Most tokens in one step (continuous and later).  [dim]\\[default: 128][/]", rich_help_panel=RUNNING
        ),
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw requests by steps into this file (.png, .svg, .pdf).")
    ] = None,
    by: Annotated[
        Literal["step", "time"], typer.Option(help="Columns of the picture: equally wide, or as long as they took.")
    ] = "step",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write Chrome's trace format, for https://ui.perfetto.dev.")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Show it in characters; so it is with neither --plot nor --json.")
    ] = False,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Run one stage and show, step by step, who waited, who computed what, and what was wasted.

    [bold]Examples[/]
    $ minillm trace
    $ minillm trace --stage padded --plot padded.png
    $ minillm trace --budget 64 --rate 4 --json trace.json
    """
    from minillm.bench.trace import run_command

    return run_command(
        stage=stage,
        model=model,
        device=device,
        dtype=dtype,
        requests=requests,
        max_running=max_running,
        budget=budget,
        max_tokens=max_tokens,
        arrivals_rate=rate,
        out=plot_path,
        chrome=json_path,
        text=text,
        console=out,
        by=by,
    )
