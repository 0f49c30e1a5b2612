"""`minillm bench serving`: what the server costs on top of the engine, and what its users see, in one run.

throughput  the same prompts and lengths on the engine in this process ("offline"), through `minillm serve`, and through
            another server if one is given: by turns, and each from a fixed number of clients in a closed loop, so that
            all have as many texts at once. Offline, too, a new request enters when another ends.
streams     many clients at once, one short request each: is every one accepted, and does each get all its tokens?
sweep       an open loop at shares of the throughput that was found: how the tail grows near capacity

`minillm serve` is a process of its own, with the engine's usual options; so is llama-server, if its program is given:
`llama-server -m FILE -t CORES -np CLIENTS -c CLIENTS*2048 --cache-ram 0 --no-webui`, as many slots as there are clients
and no saving of prompts that never come again. Client and servers share the cores, as they do on one machine; the CPU
seconds of each process in each run tell how much of them the client took, and whether whoever was idle was really so.
"""

import asyncio
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

from rich.console import Console

from minillm.bench.load import MOST_CLIENTS, Run, Target, fit_characters, warm_up
from minillm.bench.load import Plan as LoadPlan
from minillm.bench.load_http import Fault, Server, get
from minillm.bench.load_prompts import Prompts
from minillm.bench.load_rows import Row, summarize
from minillm.bench.load_server import find_model
from minillm.bench.serving_processes import Models, cpu_seconds, ours, peer, sigterm_unwinds
from minillm.engine import Engine
from minillm.errors import InputError, check_range, whole_number
from minillm.params import SamplingParams
from minillm.sharing import SharedSlots

BLOCK = 16  # tokens, as in `minillm serve`
DRAIN_SECONDS = 5  # at the end, for texts that run
Steps = tuple[int, float]  # how many, and in how many seconds
STEPS = re.compile(rb"^minillm:step_seconds_(count|sum)\{[^}]*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Plan:
    """What is asked. Times in seconds. Raises InputError."""

    requests: int = 96  # of each round
    clients: int = 32  # and most texts in a step
    max_tokens: int = 64
    rounds: int = 3
    budget: int = 512
    streams: int = 1000
    stream_prompt: int = 32  # tokens, about
    stream_tokens: int = 16
    shares: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9, 1.1)  # of the requests per second that were served; none: no sweep
    seconds: float = 15.0  # in which requests arrive, at each share
    goodput: Mapping[str, float] = field(default_factory=lambda: {"ttft": 1.0, "tpot": 0.1})  # {metric: most}
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (
            ("requests", 1_000_000),
            ("clients", 1024),
            ("max_tokens", 2048),
            ("rounds", 100),
            ("budget", 1_000_000),
            ("streams", MOST_CLIENTS),
            ("stream_prompt", 1024),
            ("stream_tokens", 1024),
        ):
            whole_number(name.replace("_", "-"), getattr(self, name), 1, most)
        for share in self.shares:
            check_range("share", share, 0.01, 10)
        check_range("seconds", self.seconds, 0.1, 3600)
        whole_number("seed", self.seed, 0, 2**32 - 1)
        if self.budget < self.clients:
            raise InputError(f"budget is {self.budget}; it must be at least the {self.clients} clients")

    @property
    def closed(self) -> LoadPlan:
        return LoadPlan(
            clients=self.clients,
            requests=self.requests,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            goodput=self.goodput,
            seed=self.seed,
        )

    @property
    def at_once(self) -> LoadPlan:
        return LoadPlan(
            clients=self.streams,
            requests=self.streams,
            endpoint="completions",
            prompt_tokens=self.stream_prompt,
            max_tokens=self.stream_tokens,
            ignore_eos=True,
            seed=self.seed,
        )

    def prompts(self, plan: LoadPlan) -> Prompts:
        return Prompts(self.seed, plan.endpoint, plan.max_tokens, plan.ignore_eos)


@dataclass
class Trial:
    """One round on one engine. Seconds; what nobody tells is None."""

    engine: str  # offline, server or peer
    round: int
    requests: int  # that ended with all their tokens
    prompt_tokens: int
    output_tokens: int
    wall: float
    output_throughput: float
    request_throughput: float
    steps: int | None = None  # of the engine
    step_seconds: float | None = None  # all together
    cpu: dict[str, float] = field(default_factory=dict)  # of each process, whether it worked or not
    row: Row | None = None  # what `minillm load` says of it
    void: str | None = None

    @classmethod
    def of_server(cls, engine: str, row: Row, steps: Steps | None) -> "Trial":
        n_steps, step_seconds = steps or (None, None)
        return cls(
            engine,
            row.round,
            row.completed - row.short,
            row.prompt_tokens,
            row.output_tokens,
            row.wall,
            row.output_throughput,
            row.request_throughput,
            n_steps,
            step_seconds,
            row=row,
        )


# ---- runs


class Servers:
    """Who can be measured: the engine in this process, and servers by name."""

    def __init__(self, engine: Engine, plan: Plan, urls: dict[str, str], pids: dict[str, int]):
        self.engine, self.plan, self.urls = engine, plan, urls
        self.pids = {"client": os.getpid(), **pids}

    @property
    def names(self) -> list[str]:
        return ["offline", *self.urls]

    def warm(self) -> None:
        """As many requests as run at once. Raises InputError for what is no server."""
        n = min(self.plan.requests, self.plan.clients)
        serve_offline(self.engine, self.plan, "warm", n)
        for name in self.urls:
            asyncio.run(self._warm(name, replace(self.plan.closed, warmup=n)))

    def trial(self, name: str, round: int) -> Trial:
        before = cpu_seconds(self.pids)
        if name == "offline":
            trial = serve_offline(self.engine, self.plan, run_name(None, round), self.plan.requests)
        else:
            row, steps = asyncio.run(self._drive(name, self.plan.closed, None, round))
            trial = Trial.of_server(name, row, steps)
        trial.round = round
        trial.cpu = {pid: seconds - before[pid] for pid, seconds in cpu_seconds(self.pids).items() if pid in before}
        trial.void = why_void(trial, self.plan)
        return trial

    def load(self, plan: LoadPlan, rate: float | None = None) -> Row:
        """One run of `minillm load` on our server."""
        return asyncio.run(self._drive("server", plan, rate, 0))[0]

    @asynccontextmanager
    async def _target(self, name: str, plan: LoadPlan) -> AsyncIterator[Target]:
        server = Server.parse(self.urls[name])
        try:
            target = Target(*await find_model(server, None), self.plan.prompts(plan), peer=name == "peer")
            if plan.prompt_tokens is not None:
                characters = await fit_characters(target, plan.prompt_tokens, plan.timeout)
                target = replace(target, prompts=replace(target.prompts, characters=characters))
            yield target
        finally:
            server.close()

    async def _warm(self, name: str, plan: LoadPlan) -> None:
        async with self._target(name, plan) as target:
            await warm_up(target, plan)

    async def _drive(self, name: str, plan: LoadPlan, rate: float | None, round: int) -> tuple[Row, Steps | None]:
        async with self._target(name, plan) as target:
            run = Run(target, plan, rate, round)
            before = await read_steps(target.server)
            await run.drive(lambda ended, sent: None)
            after = await read_steps(target.server)
        steps = (after[0] - before[0], after[1] - before[1]) if before and after else None
        return summarize(run), steps


def run_name(rate: float | None, round: int) -> str:
    """As `load.Run` calls it: prompts of the same name are the same."""
    return f"{rate} {round}"


async def read_steps(server: Server) -> Steps | None:
    """How many steps our server has made, and in how many seconds."""
    try:
        _, page = await get(server, "/metrics")
    except Fault:
        return None
    found = {name: float(value) for name, value in STEPS.findall(page)}
    return (int(found[b"count"]), found[b"sum"]) if len(found) == 2 else None


def serve_offline(engine: Engine, plan: Plan, name: str, requests: int) -> Trial:
    """The closed loop without a server: `plan.clients` texts at once, and the next enters when one ends."""
    tokenizer, prompts = engine.tokenizer, plan.prompts(plan.closed)
    assert tokenizer is not None
    ids = [tokenizer.encode_chat(prompts.messages(name, i)) for i in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=plan.max_tokens, ignore_eos=True)
    waiting = iter(ids)
    n_tokens = n_whole = steps = 0
    step_seconds = 0.0
    began = time.perf_counter()
    for prompt in islice(waiting, plan.clients):
        engine.add(prompt, params)
    while engine.busy:
        step_began = time.perf_counter()
        events = engine.step()
        step_seconds += time.perf_counter() - step_began
        steps += 1
        for event in events:
            n_tokens += event.token is not None
            if event.finish_reason is not None:
                n_whole += event.request.n_output == plan.max_tokens
                for prompt in islice(waiting, 1):
                    engine.add(prompt, params)
    wall = time.perf_counter() - began
    n_prompt = sum(map(len, ids))
    return Trial("offline", 0, n_whole, n_prompt, n_tokens, wall, n_tokens / wall, n_whole / wall, steps, step_seconds)


def why_void(trial: Trial, plan: Plan) -> str | None:
    """Nothing may be compared unless all has been done."""
    if trial.requests != plan.requests:
        faults = dict(trial.row.examples) if trial.row else {}
        return f"{trial.requests} of {plan.requests} requests ended well {faults or ''}".strip()
    if trial.row and trial.row.uncounted:
        return "the server does not count its tokens"
    if trial.output_tokens != plan.requests * plan.max_tokens:
        return f"{trial.output_tokens:,} output tokens in place of {plan.requests * plan.max_tokens:,}"
    return None


# ---- all


@dataclass
class Found:
    """What was measured until now."""

    trials: list[Trial] = field(default_factory=list)
    streams: Row | None = None
    sweep: list[Row] = field(default_factory=list)

    def of(self, engine: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.engine == engine and trial.void is None]

    def middle(self, engine: str, figure: str) -> float | None:
        values = [value for trial in self.of(engine) if (value := getattr(trial, figure)) is not None]
        return median(values) if values else None

    def ratio(self, engine: str, other: str) -> float | None:
        """Of output tokens per second: the median of the rounds that both ended well."""
        ours, theirs = ({t.round: t.output_throughput for t in self.of(name)} for name in (engine, other))
        both = [ours[i] / theirs[i] for i in ours.keys() & theirs.keys()]
        return median(both) if both else None


@contextmanager
def servers(models: Models, plan: Plan, console: Console) -> Iterator[Servers]:
    """Ours and the peer, until the end of the block. Raises InputError."""
    limits = {"max-running": plan.clients, "budget": plan.budget, "block": BLOCK}
    with ExitStack() as stack:
        stack.enter_context(sigterm_unwinds())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minillm-")))
        urls, pids = {}, {}
        with console.status("Starting minillm serve"):
            more = {"max-waiting": max(plan.streams, 1024), "drain-seconds": DRAIN_SECONDS}
            urls["server"], pids["server"] = stack.enter_context(ours(models, {**limits, **more}, folder))
        if models.peer_server is not None:
            with console.status("Starting llama-server"):
                urls["peer"], pids["peer"] = stack.enter_context(peer(models, plan.clients, folder))
        elif models.peer_url is not None:
            urls["peer"] = models.peer_url
        with console.status("Loading the model"):
            engine = Engine.from_pretrained(
                models.model,
                device=models.device,
                dtype=models.dtype,
                max_running=plan.clients,
                budget=plan.budget,
                slots=partial(SharedSlots, n_slots=None, size=BLOCK),
            )
        yield Servers(engine, plan, urls, pids)


def measure(those: Servers, plan: Plan, found: Found, console: Console) -> None:
    """Fills `found` as it goes, so that what was measured is there even if Ctrl-C ends it. Raises InputError."""
    with console.status("Warming up"):
        those.warm()
    for round in range(plan.rounds):
        at = round % len(those.names)
        for name in those.names[at:] + those.names[:at]:
            with console.status(f"Round {round + 1} of {plan.rounds}: {name}"):
                found.trials.append(those.trial(name, round))
    with console.status(f"{plan.streams:,} streams at once"):
        found.streams = those.load(plan.at_once)
    capacity = found.middle("server", "request_throughput") or 0.0
    for rate, share in ((capacity * share, share) for share in plan.shares if capacity):
        with console.status(f"{rate:.2f} requests/s, {share:.0%} of what was served"):
            found.sweep.append(
                those.load(replace(plan.closed, rates=(rate,), requests=None, seconds=plan.seconds), rate)
            )
