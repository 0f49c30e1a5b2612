"""`minillm load`: requests to an OpenAI-compatible server, and what its users would see.

Open loop: requests are sent at times drawn beforehand (Poisson), whether or not the server keeps up, and every latency
counts from the time that was drawn. If the client is late with a request, that is latency and no excuse: to leave it
out would drop the worst waits (coordinated omission, G. Tene). Closed loop: each of N clients sends its next request
when its last one has ended, so a slow server is asked less; latency counts from the sending.

Tokens are the server's own count (`usage`), because a piece of a stream may hold several: `tpot` is right however text
is cut into pieces, while `itl` is the gap between two pieces that hold text. Both are equal where a piece is a token;
`tokens_per_piece` tells. Failed requests count in no latency and no throughput, only in `faults`.
"""

import asyncio
import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile

from minillm.bench.load_client import Answer, send
from minillm.bench.load_http import Server, now
from minillm.bench.load_prompts import CHARACTERS_PER_TOKEN, PATHS, Prompts
from minillm.bench.load_server import ServerFacts, read_metrics
from minillm.errors import InputError, check_range, whole_number

TICK = 0.020  # seconds between two looks at the client's own event loop
PAUSE = 0.1  # seconds that a client waits after a failed request, so that a refusing server is not flooded
MOST_CLIENTS = 20_000
FILES_BESIDE = 64  # open files that are no connection
LIMITS = ("ttft", "tpot", "e2el")  # of goodput


@dataclass(frozen=True)
class Plan:
    """What is asked. Times in seconds. Raises InputError."""

    rates: tuple[float, ...] = ()  # requests per second, a run for each; none: a closed loop
    clients: int = 8
    requests: int | None = None  # of each run, as is the next; whichever comes first
    seconds: float | None = None
    endpoint: str = "chat"
    prompt_tokens: int | None = None
    max_tokens: int = 128
    ignore_eos: bool = False
    goodput: Mapping[str, float] = field(default_factory=dict)  # {metric: most}
    rounds: int = 1
    warmup: int = 4
    timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for rate in self.rates:
            check_range("rate", rate, 0.001, 100_000)
        whole_number("clients", self.clients, 1, MOST_CLIENTS)
        whole_number("max-tokens", self.max_tokens, 1, 1_000_000)
        whole_number("rounds", self.rounds, 1, 1000)
        whole_number("warmup", self.warmup, 0, MOST_CLIENTS)
        check_range("timeout", self.timeout, 0.01, 1e6)
        if self.requests is not None:
            whole_number("requests", self.requests, 1, 10_000_000)
        if self.seconds is not None:
            check_range("seconds", self.seconds, 0.01, 1e6)
        if self.prompt_tokens is not None:
            whole_number("prompt-tokens", self.prompt_tokens, 1, 1_000_000)
        if self.endpoint not in PATHS:
            raise InputError(f"endpoint is {self.endpoint!r}; it must be {' or '.join(PATHS)}")

    def indices(self) -> Iterator[int]:
        return iter(range(self.requests)) if self.requests is not None else count()

    def arrivals(self, rate: float, run: str) -> Iterator[float]:
        """Seconds after the run's start: Poisson, the same for the same seed and run."""
        draw = random.Random(f"{self.seed} {run} arrivals")
        at = 0.0
        for _ in self.indices():
            at += draw.expovariate(rate)
            yield at


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50`, in milliseconds, to seconds. Raises InputError."""
    limits = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, most = word.partition(":")
        try:
            limits[name] = float(most) / 1e3
        except ValueError:
            limits[name] = -1.0
        if name not in LIMITS or not 0 < limits[name] < 1e6:
            raise InputError(
                f"--goodput is {word!r}; it must be {', '.join(LIMITS)}, a colon and milliseconds: ttft:200"
            )
    return limits


def allow_connections(plan: Plan) -> None:
    """Raises the number of files that this process may open as far as it may. Raises InputError if it is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else hard
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if not plan.rates and plan.clients + FILES_BESIDE > max(soft, most):
        raise InputError(
            f"{plan.clients} clients need as many open files, and this process may have {most}; raise `ulimit -Hn`"
        )


@dataclass
class Target:
    server: Server
    model: str
    prompts: Prompts
    peer: bool = False  # the second of two servers


# ---- one run


class Health:
    """Is it the client that is slow? Its CPU seconds, and how late its event loop runs a timer."""

    def __init__(self) -> None:
        self.lags: list[float] = []

    def __enter__(self) -> "Health":
        self.loop = asyncio.get_running_loop()
        self.began, self.cpu = now(), time.process_time()
        self.tick()
        return self

    def tick(self, due: float | None = None) -> None:
        if due is not None:
            self.lags.append(self.loop.time() - due)
        due = self.loop.time() + TICK
        self.timer = self.loop.call_at(due, self.tick, due)

    def __exit__(self, *error: object) -> None:
        self.timer.cancel()
        self.seconds, self.cpu = now() - self.began, time.process_time() - self.cpu


class Run:
    """One load on one server. `answers` are of all requests sent until now."""

    def __init__(self, target: Target, plan: Plan, rate: float | None, round: int):
        self.target, self.plan, self.rate, self.round = target, plan, rate, round
        self.name = f"{rate} {round}"
        self.answers: list[Answer] = []
        self.health = Health()
        self.facts = ServerFacts()

    async def drive(self, told: Callable[[int, int], None]) -> None:
        """Returns when all have ended. `told` gets the numbers of requests ended and sent, about once a second."""
        before = await read_metrics(self.target.server)
        teller = asyncio.create_task(self.tell(told))
        try:
            with self.health:
                await (self.closed_loop() if self.rate is None else self.open_loop(self.rate))
        finally:
            teller.cancel()
        self.facts = ServerFacts.between(before, await read_metrics(self.target.server))

    async def tell(self, told: Callable[[int, int], None]) -> None:
        while True:
            told(sum(answer.ended > 0 for answer in self.answers), len(self.answers))
            await asyncio.sleep(1.0)

    async def open_loop(self, rate: float) -> None:
        most = math.inf if self.plan.seconds is None else self.plan.seconds
        arrivals = takewhile(lambda at: at <= most, self.plan.arrivals(rate, self.name))
        async with asyncio.TaskGroup() as tasks:
            for i, at in enumerate(arrivals):
                due = self.health.began + at
                await asyncio.sleep(max(0.0, due - now()))
                tasks.create_task(self.ask(i, due))

    async def closed_loop(self) -> None:
        indices = self.plan.indices()
        until = math.inf if self.plan.seconds is None else self.health.began + self.plan.seconds

        async def client() -> None:
            while now() < until and (i := next(indices, None)) is not None:
                if (await self.ask(i)).fault is not None:
                    await asyncio.sleep(PAUSE)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.plan.clients):
                tasks.create_task(client())

    async def ask(self, i: int, due: float | None = None) -> Answer:
        prompts = self.target.prompts
        content = prompts.body(self.target.model, self.name, i)
        answer = Answer(scheduled=now() if due is None else due)
        self.answers.append(answer)
        await send(self.target.server, prompts.path, content, answer, self.plan.timeout)
        return answer


async def warm_up(target: Target, plan: Plan) -> None:
    """Requests that do not count, as the others but for their prompts. Raises InputError if one of them fails."""
    answers = [Answer(scheduled=now()) for _ in range(plan.warmup)]
    prompts = target.prompts
    bodies = [prompts.body(target.model, "warm", i) for i in range(plan.warmup)]
    await asyncio.gather(
        *(
            send(target.server, prompts.path, body, answer, plan.timeout)
            for body, answer in zip(bodies, answers, strict=True)
        )
    )
    for answer in answers:
        if answer.fault is not None:
            raise InputError(f"{target.server.url}{prompts.path}: the server {answer.fault}")


async def fit_characters(target: Target, tokens: int, seconds: float) -> int:
    """How many characters make a prompt of about so many tokens, the chat template's own included: a line through
    what usage says of prompts of two lengths. Raises InputError."""
    guess = round(tokens * CHARACTERS_PER_TOKEN)
    sizes, counts = [], []
    for i, characters in enumerate(2 * (max(16, guess), max(16, guess // 2))):
        prompts = replace(target.prompts, max_tokens=1, characters=characters)
        answer = Answer(scheduled=now())
        await send(target.server, prompts.path, prompts.body(target.model, "fit", i), answer, seconds)
        if answer.fault is not None:
            raise InputError(f"{target.server.url}{prompts.path}: the server {answer.fault}")
        sizes.append(characters)
        counts.append(answer.n_prompt)
    per_character, template = statistics.linear_regression(sizes, counts) if len(set(sizes)) > 1 else (0.0, 0.0)
    return max(1, round((tokens - template) / per_character)) if per_character > 0 else guess


async def measure(
    targets: Sequence[Target], plan: Plan, runs: list[Run], told: Callable[[Run, int, int], None]
) -> None:
    """Each run is put into `runs` when it begins, so that what was measured is there even if Ctrl-C ends it. The order
    of the servers changes from round to round. Raises InputError if a server does not answer at all."""
    for target in targets:
        await warm_up(target, plan)
    for round in range(plan.rounds):
        for rate in plan.rates or (None,):
            for target in targets[:: -1 if round % 2 else 1]:
                run = Run(target, plan, rate, round)
                runs.append(run)
                await run.drive(partial(told, run))
