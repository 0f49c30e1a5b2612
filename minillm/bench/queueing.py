"""`minillm bench queue`: the experiment of `minillm simulate` on the real engine, with a real clock.

Requests arrive while others run, and wait for one of a few slots. Four policies serve the same ones:

static      groups start together and end together, on the continuous engine: only who may enter differs
padded      the ladder's stage: the same groups in a rectangle, where pads and ended rows go on costing
dynamic     the ladder's stage: an ended row is refilled at once, and its prompt pads everyone's row
continuous  the ladder's stage: an ended request's slot is refilled in the next step

static against continuous shows what the policy alone buys; padded and dynamic show it as it is usually built.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from minillm.bench import calibrate, machine
from minillm.bench.calibrate import Calibration
from minillm.bench.claims import Claim, at_least
from minillm.bench.harness import Job, Run, run
from minillm.bench.ladder import progress
from minillm.bench.metrics import Stats, request_goodput
from minillm.bench.prompts import load
from minillm.bench.verify import MOST_EXCUSED, Verifier, judge
from minillm.engine import Engine
from minillm.errors import InputError, check_range
from minillm.model import Llama
from minillm.request import Arrivals, Event, Request
from minillm.simulation import steps
from minillm.simulation.policies import Figures, Schedule
from minillm.simulation.workload import ARTICLE_MIX, Demand, Mix, poisson_demands, uniform
from minillm.stages import STAGES, Generate
from minillm.tokenizer import Tokenizer

SCENARIOS = ("article", "uniform", "long", "closed", "real")
LONG_PROMPT = 128  # tokens, where `article` has Plan.prompt
REAL_CAP = 160  # most new tokens of a real answer
PAIR = ("static", "continuous")  # what the ratios are taken of
CONTROL = 0.05  # how far from 1 the ratios of the control may lie


def static(model: Llama, requests: Iterable[Request], max_running: int = 8, budget: int = 256) -> Iterator[Event]:
    """As `stages.continuous`, but nobody enters before everybody has left, and a group waits until it is full."""
    requests = list(requests)
    arrivals = Arrivals(requests)
    size = max((request.most_slots for request in requests), default=1)
    engine = Engine(model, max_running=max_running, budget=budget, max_len=size)
    while arrivals:
        group: list[Request] = []
        while len(group) < max_running and (more := arrivals.take(max_running - len(group))):
            group += more
        for request in group:
            engine.submit(request)
        while engine.busy:
            yield from engine.step()


POLICIES: dict[str, Generate] = {
    "static": static,
    **{name: STAGES[name] for name in ("padded", "dynamic", "continuous")},
}


@dataclass(frozen=True)
class Plan:
    """What is run. Raises InputError for sizes that make no sense."""

    requests: int = 200
    slots: int = 8
    prompt: int = 16  # tokens
    scale: float = 0.25  # of the article's output lengths
    load: float = 2.15  # arrivals per second, over what continuous batching can serve
    rounds: int = 2  # of static and continuous in `article` and its control; all else runs once
    limit_ttft: float = 5.0  # seconds: what a user would call served well, for goodput
    limit_tpot: float = 0.1
    seed: int = 0
    scenarios: tuple[str, ...] = SCENARIOS

    def __post_init__(self) -> None:
        for name, least, most in (
            ("requests", 2, 10_000),
            ("slots", 2, 256),
            ("prompt", 1, 4096),
            ("scale", 0.02, 4.0),
            ("load", 0.05, 20.0),
            ("rounds", 1, 20),
            ("limit_ttft", 0.001, 3600.0),
            ("limit_tpot", 0.001, 3600.0),
            ("seed", 0, 2**32 - 1),
        ):
            check_range(name, getattr(self, name), least, most)
        for name in self.scenarios:
            if name not in SCENARIOS:
                raise InputError(f"scenario {name!r} is not known; use some of {', '.join(SCENARIOS)}")
        if not self.scenarios:
            raise InputError(f"no scenario is given; use some of {', '.join(SCENARIOS)}")

    @property
    def mix(self) -> Mix:
        return ARTICLE_MIX.scaled(self.scale)

    @property
    def budget(self) -> int:
        return max(256, self.slots)

    @property
    def limits(self) -> dict[str, int]:
        return {"max_running": self.slots, "budget": self.budget}


@dataclass(frozen=True)
class Case:
    """One scenario, ready to run."""

    name: str
    about: str
    jobs: list[Job]
    policies: tuple[str, ...] = tuple(POLICIES)
    rounds: int = 1  # of PAIR; the others run once
    rate: float | None = None  # requests per second; None in a closed loop
    clients: int | None = None


@dataclass
class Row:
    """One policy, measured: medians over the rounds, which are kept too. Times in seconds."""

    policy: str
    void: str | None
    figures: Figures
    output_tokens: int
    output_throughput: float
    request_goodput: float  # requests per second that kept both limits
    kept_limits: float  # share of requests
    prompt_share: float  # of the time of all steps: those with more than one new token of a request
    ttft: Stats
    tpot: Stats | None
    e2el: Stats
    rounds: list[Figures]
    waits: list[float]  # of each request, in the first round
    ends: list[float]


@dataclass
class Scenario:
    name: str
    about: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    mean_output: float
    cv_output: float  # standard deviation of the lengths over their mean
    rate: float | None
    clients: int | None
    rows: list[Row]
    makespan_ratio: float | None  # static over continuous, median of the rounds
    wait_ratio: float | None
    predicted_makespan_ratio: float | None  # by the simulation with the calibrated time of a step
    predicted_wait_ratio: float | None
    why: str


@dataclass
class Result:
    about: dict[str, Any]
    model: dict[str, Any]
    plan: Plan
    calibration: Calibration
    capacity: float  # requests per second of the `article` scenario
    scenarios: list[Scenario]
    claims: list[Claim] = field(default_factory=list)
    partial: bool = False


def jobs_of(demands: Sequence[Demand], text: Sequence[int]) -> list[Job]:
    """Prompts cut out of the token ids one after the other, from the beginning again at the end."""
    jobs, at = [], 0
    for demand in demands:
        if at + demand.prompt > len(text):
            at = 0
        jobs.append(Job(tuple(text[at : at + demand.prompt]), demand.output, arrival=demand.arrival))
        at += demand.prompt
    return jobs


def measure(model: Llama, folder_name: str, tokenizer: Tokenizer, plan: Plan, console: Console) -> Result:
    """Calibrates, runs every scenario, checks the texts. After Ctrl-C: with the scenarios that are whole."""
    text = [token for prompt in load() for token in tokenizer.encode_chat(list(prompt.messages))]
    longest = max(plan.prompt, LONG_PROMPT) + max(high for _, _, high in plan.mix.parts)
    if longest > model.config.context:
        raise InputError(f"a request may need {longest} tokens, but the model's context is {model.config.context}")
    with console.status("Calibrating: how long does a step take?"):
        calibration = calibrate.measure(model, plan.slots)
        reference = poisson_demands(plan.requests, 1.0, plan.mix, plan.prompt, plan.seed)
        capacity = steps.capacity(calibration.step_time, plan.slots, reference, plan.budget)
    result = Result(
        machine.describe(model.device),
        {"name": folder_name, "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)},
        plan,
        calibration,
        capacity,
        [],
    )
    verifier = Verifier(model)
    try:
        for name in plan.scenarios:
            with console.status(f"Preparing {name}"):
                case = prepare(name, model, tokenizer, text, plan, calibration, capacity)
            runs = timed_rounds(model, case, plan, tokenizer, console)
            with console.status(f"Checking every token of {name} against the naive model"):
                result.scenarios.append(scenario_of(case, runs, plan, calibration, verifier))
    except KeyboardInterrupt:
        result.partial = True
    result.claims = claims(result.scenarios)
    return result


def prepare(
    name: str,
    model: Llama,
    tokenizer: Tokenizer,
    text: Sequence[int],
    plan: Plan,
    calibration: Calibration,
    capacity: float,
) -> Case:
    rate = plan.load * capacity

    def open_loop(n: int, rate: float, mix: Mix, prompt: int) -> list[Job]:
        return jobs_of(poisson_demands(n, rate, mix, prompt, plan.seed), text)

    if name == "article":
        about = f"the article's mix of lengths, {plan.prompt}-token prompts, Poisson arrivals"
        return Case(name, about, open_loop(plan.requests, rate, plan.mix, plan.prompt), rounds=plan.rounds, rate=rate)
    if name == "uniform":
        length = uniform(round(plan.mix.mean))
        demands = poisson_demands(plan.requests, 1.0, length, plan.prompt, plan.seed)
        rate = plan.load * steps.capacity(calibration.step_time, plan.slots, demands, plan.budget)
        about = f"the control: every output has {length.mean:.0f} tokens, all else as in article"
        return Case(name, about, open_loop(plan.requests, rate, length, plan.prompt), PAIR, plan.rounds, rate)
    few = max(2, plan.requests // 3)
    if name == "long":
        demands = poisson_demands(few, 1.0, plan.mix, LONG_PROMPT, plan.seed)
        rate = plan.load * steps.capacity(calibration.step_time, plan.slots, demands, plan.budget)
        about = f"as article, with {LONG_PROMPT}-token prompts"
        return Case(name, about, open_loop(few, rate, plan.mix, LONG_PROMPT), rate=rate)
    if name == "closed":
        clients = 2 * plan.slots
        about = f"closed loop: {clients} clients, each sends its next request when it has an answer; lengths as article"
        return Case(name, about, open_loop(few, rate, plan.mix, plan.prompt), clients=clients)
    assert name == "real"
    ids = [tuple(tokenizer.encode_chat(list(prompt.messages))) for prompt in load()]
    room = model.config.context - REAL_CAP
    prompts = [prompt for prompt in ids if len(prompt) <= min(512, room)][: plan.requests]
    if not prompts:
        raise InputError(f"the model's context is {model.config.context}; the real prompts need at least 200")
    jobs = [Job(prompt, REAL_CAP, ignore_eos=False) for prompt in prompts]
    found = run(model, "continuous", jobs, plan.limits, tokenizer)
    rate = plan.load * len(jobs) / found.summary.wall
    arrivals = poisson_demands(len(jobs), rate, plan.mix, plan.prompt, plan.seed)
    about = f"real prompts by the chat template; the model ends each text, at most {REAL_CAP} tokens; Poisson arrivals"
    jobs = [replace(job, arrival=demand.arrival) for job, demand in zip(jobs, arrivals, strict=True)]
    return Case(name, about, jobs, rate=rate)


def counted(bar: Progress, task: TaskID) -> Callable[[int, Event], None]:
    return lambda _, event: bar.advance(task, event.finish_reason is not None)


def timed_rounds(model: Llama, case: Case, plan: Plan, tokenizer: Tokenizer, console: Console) -> dict[str, list[Run]]:
    """{policy: its runs}. Rounds are interleaved, and each begins with another policy."""
    runs: dict[str, list[Run]] = {policy: [] for policy in case.policies}
    warm = [replace(job, max_tokens=min(2, job.max_tokens), arrival=0.0) for job in case.jobs[: plan.slots + 1]]
    with progress(console) as bar:
        for i in range(case.rounds):
            names = [policy for policy in case.policies if i == 0 or policy in PAIR]
            for policy in names[i % len(names) :] + names[: i % len(names)]:
                task = bar.add_task(f"{case.name}, {policy}, round {i + 1} of {case.rounds}", total=len(case.jobs))
                arguments = plan.limits, tokenizer
                if i == 0:
                    run(model, policy, warm, *arguments, generate=POLICIES[policy])
                runs[policy].append(
                    run(model, policy, case.jobs, *arguments, counted(bar, task), POLICIES[policy], case.clients)
                )
                bar.remove_task(task)
    return runs


# ---- from runs to rows


def figures_of(run: Run, slots: int) -> Figures:
    ends = [times[-1] for times in run.times]
    return Figures.of(Schedule(run.arrivals, run.starts, ends, ends), slots)


def row_of(policy: str, runs: Sequence[Run], plan: Plan, void: str | None) -> Row:
    rounds = [figures_of(run, plan.slots) for run in runs]
    middle = Figures(**{name: median(asdict(one)[name] for one in rounds) for name in asdict(rounds[0])})

    def over_rounds(stats: Callable[[Run], Stats | None]) -> Stats | None:
        found = [one for run in runs if (one := stats(run)) is not None]
        return (
            Stats(*(median(getattr(one, part) for one in found) for part in Stats.__annotations__)) if found else None
        )

    goodput = [request_goodput(run.arrivals, run.times, plan.limit_ttft, plan.limit_tpot) for run in runs]
    ttft, e2el = over_rounds(lambda run: run.summary.ttft), over_rounds(lambda run: run.summary.e2el)
    assert ttft is not None and e2el is not None
    return Row(
        policy=policy,
        void=void,
        figures=middle,
        output_tokens=runs[0].summary.output_tokens,
        output_throughput=median(run.summary.output_throughput for run in runs),
        request_goodput=median(goodput),
        kept_limits=median(g * run.summary.wall for g, run in zip(goodput, runs, strict=True)) / len(runs[0].jobs),
        prompt_share=median(prompt_share(run) for run in runs),
        ttft=ttft,
        tpot=over_rounds(lambda run: run.summary.tpot),
        e2el=e2el,
        rounds=rounds,
        waits=[start - arrival for start, arrival in zip(runs[0].starts, runs[0].arrivals, strict=True)],
        ends=[times[-1] for times in runs[0].times],
    )


def prompt_share(run: Run) -> float:
    """Of the time of all steps: those in which some request has more than one new token."""
    seconds = [step.ended - step.began for step in run.counts.steps]
    with_prompts = [s for s, step in zip(seconds, run.counts.steps, strict=True) if max(step.new.values()) > 1]
    return sum(with_prompts) / sum(seconds)


def ratio(rows: Sequence[Row], figure: str) -> float | None:
    """static over continuous, round by round; None if one of them is void or did not run, or nobody waited."""
    by_policy = {row.policy: row for row in rows if not row.void}
    if not set(PAIR) <= by_policy.keys():
        return None
    pairs = zip(*(by_policy[policy].rounds for policy in PAIR), strict=True)
    values = [(getattr(one, figure), getattr(other, figure)) for one, other in pairs]
    return median(a / b for a, b in values) if all(b > 0 for _, b in values) else None


def predicted(case: Case, plan: Plan, calibration: Calibration) -> tuple[float, float] | None:
    """Both ratios by the simulation: the same demands, the same groups, a step as long as the calibration says.

    None where the lengths are not known beforehand, or arrivals depend on the answers.
    """
    if case.clients is not None or not all(job.ignore_eos for job in case.jobs):
        return None
    demands = [Demand(job.arrival, len(job.prompt), job.max_tokens) for job in case.jobs]
    slow, fast = (
        Figures.of(policy(demands, plan.slots, calibration.step_time, plan.budget), plan.slots)
        for policy in (steps.groups, steps.continuous)
    )
    return slow.makespan / fast.makespan, slow.mean_wait / fast.mean_wait if fast.mean_wait else math.inf


def scenario_of(
    case: Case, runs: dict[str, list[Run]], plan: Plan, calibration: Calibration, verifier: Verifier
) -> Scenario:
    rows = [row_of(name, runs[name], plan, judge(runs[name], verifier, MOST_EXCUSED).void) for name in case.policies]
    lengths = [len(output) for output in runs["continuous"][0].outputs]
    mean = sum(lengths) / len(lengths)
    guess = predicted(case, plan, calibration)
    return Scenario(
        name=case.name,
        about=case.about,
        requests=len(case.jobs),
        prompt_tokens=sum(len(job.prompt) for job in case.jobs),
        output_tokens=sum(lengths),
        mean_output=mean,
        cv_output=math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths)) / mean,
        rate=case.rate,
        clients=case.clients,
        rows=rows,
        makespan_ratio=ratio(rows, "makespan"),
        wait_ratio=ratio(rows, "mean_wait"),
        predicted_makespan_ratio=guess[0] if guess else None,
        predicted_wait_ratio=guess[1] if guess else None,
        why=why(case, rows),
    )


def why(case: Case, rows: Sequence[Row]) -> str:
    """What the numbers come from, in a sentence."""
    by_policy = {row.policy: row for row in rows}
    idle = {name: f"{row.figures.idle_share:.0%}" for name, row in by_policy.items()}
    prompts = {name: f"{row.prompt_share:.0%}" for name, row in by_policy.items()}
    if case.name == "uniform":
        return (
            f"Texts of one length end in the same step, so no slot waits for a longer neighbour: {idle['static']} of "
            f"the slots' time is idle under static, {idle['continuous']} under continuous. There is nothing to gain."
        )
    if case.name == "long":
        return (
            f"A prompt costs the same under both policies, and steps with prompts in them take {prompts['continuous']} "
            f"of continuous's time here: refilling saves nothing of that. Under static they take {prompts['static']}."
        )
    return (
        f"Under static, slots idle for {idle['static']} of their time, waiting for the longest text of their group; "
        f"under continuous for {idle['continuous']}."
    )


def claims(scenarios: Sequence[Scenario]) -> list[Claim]:
    """The targets, for the scenarios that ran."""
    found = []
    by_name = {scenario.name: scenario for scenario in scenarios}
    if (article := by_name.get("article")) and article.makespan_ratio and article.wait_ratio:
        for what, target, measured, guess in (
            ("makespan", 2.2, article.makespan_ratio, article.predicted_makespan_ratio),
            ("mean wait", 3.2, article.wait_ratio, article.predicted_wait_ratio),
        ):
            detail = f"predicted from the time of a step: {guess:.2f} x"
            found.append(at_least(f"static to continuous, {what}, lengths of the article", target, measured, detail))
    if control := by_name.get("uniform"):
        for what, value in (("makespan", control.makespan_ratio), ("mean wait", control.wait_ratio)):
            if value is not None:
                met = abs(value - 1) <= CONTROL
                text = f"static to continuous, {what}, all lengths equal"
                found.append(Claim(text, f"1 x within {CONTROL:.0%}", value, met, "the control", {}))
    return found
