"""What sharing blocks buys, and what it costs: blocks that texts hold together, and tokens that nobody computes again.

samples    several samples of one prompt: its blocks are held once, until the texts differ
questions  a long system prompt before each of several questions: the first to ask computes it for all
chat       every turn is the whole conversation again, with the model's own answers in it
distinct   prompts that share nothing: what looking for blocks costs where there are none

Each part runs `SharedSlots` against `BlockSlots`, where nothing is shared, on the same requests in as much memory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from minillm.bench import ladder, machine
from minillm.bench.claims import Claim, at_least, at_most
from minillm.bench.harness import Counts, Job, Run, now, run
from minillm.bench.prefill import Spread
from minillm.bench.verify import MOST_EXCUSED, Verifier, judge
from minillm.bench.workload import Workload
from minillm.config import Config
from minillm.engine import Engine
from minillm.errors import InputError, check_range
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots

KINDS: dict[str, type[BlockSlots]] = {"paged": BlockSlots, "shared": SharedSlots}
BUDGET = 512  # most tokens in a step
RUNNING = 8  # most texts in a step of `distinct`
CHAT = 4096  # most tokens of the chat
QUESTIONS = (  # of the chat: each leans on the answer before
    "Tell me about the city of Lisbon in a few sentences.",
    "What is it best known for?",
    "When is a good time of the year to go there?",
    "Plan one day there for me.",
    "Now say all of that in one sentence.",
    "Which of these places would children like?",
    "What should I pack?",
    "Thank you. What did I forget to ask?",
)


@dataclass(frozen=True)
class Plan:
    """What is run; lengths in tokens. Raises InputError for sizes that make no sense."""

    samples: int = 8
    prompt: int = 512  # of the samples
    new: int = 64  # of each sample
    system: int = 1000
    questions: int = 6  # after the same system prompt
    question: int = 24
    short: int = 8  # new tokens after each question
    turns: int = 5
    answer: int = 64  # most new tokens of a turn
    distinct: int = 24  # prompts
    length: int = 192  # of each of them
    output: int = 32
    block: int = 16
    rounds: int = 3

    def __post_init__(self) -> None:
        for name, least, most in (
            ("samples", 2, 64),
            ("prompt", 1, 100_000),
            ("new", 1, 10_000),
            ("system", 1, 100_000),
            ("questions", 2, 100),
            ("turns", 2, len(QUESTIONS)),
            ("distinct", 1, 1000),
            ("block", 1, 1024),
            ("rounds", 1, 20),
        ):
            check_range(name, getattr(self, name), least, most)

    def check(self, config: Config, workload: Workload) -> None:
        """Raises InputError for what the context does not admit, and for what is too long to be cut from the text."""
        for name, extra in (("prompt", self.new), ("system", self.question + self.short)):
            if (value := getattr(self, name)) + extra > config.context:
                raise InputError(
                    f"{name} is {value} tokens; the model's context is {config.context}, so it may have "
                    f"{config.context - extra}"
                )

        longest = len(conversation(workload, self)([[]] * (self.turns - 1))) + 2 * self.turns * self.answer
        if longest > (most := min(config.context, CHAT)):  # answers may have more tokens when tokenized again
            raise InputError(f"turns is {self.turns}; the chat may need {longest} tokens, and has room for {most}")
        for name, size in (
            ("prompt", self.prompt),
            ("system", self.system + self.questions * self.question),
            ("distinct", self.distinct * self.length),
        ):
            if size > (n := len(workload.text)):
                raise InputError(
                    f"{name} is {getattr(self, name)}, which takes {size} tokens of text; there are {n} in all"
                )


# ---- what is found


@dataclass
class Found:
    """What was looked for and found, in one round."""

    asked: int  # tokens of prompts
    found: int  # of these, in memory already: their K and V were not computed again
    saved: int  # blocks that were neither computed nor stored again

    @property
    def rate(self) -> float:
        return self.found / self.asked


@dataclass
class Samples:
    held: dict[str, list[int]]  # {kind: blocks held in each step}
    share: float  # peak of shared over peak of paged
    seconds: dict[str, Spread]
    ratio: float  # paged over shared, seconds
    same_texts: int  # samples with the same tokens in both
    found: Found


@dataclass
class Questions:
    void: str | None
    first: dict[str, Spread]  # ttft of the first question, in seconds
    later: dict[str, Spread]  # of the others
    by_number: dict[str, list[float]]  # medians of the rounds
    ratio: float  # of the later ones, paged over shared
    found: Found


@dataclass
class Turn:
    prompt: int  # tokens, all of the conversation so far
    found: int
    new: int  # tokens of the answer
    ttft: dict[str, float]  # seconds, medians of the rounds


@dataclass
class Chat:
    void: str | None
    turns: list[Turn]
    ratio: float  # ttft of all turns but the first, paged over shared
    found: Found


@dataclass
class Distinct:
    void: str | None
    output_throughput: dict[str, Spread]  # tokens per second
    ratio: float  # shared over paged
    found: Found


@dataclass
class Result:
    """All that was found, as it goes into the JSON file. A part that was not whole at Ctrl-C is None."""

    about: dict[str, Any]
    model: dict[str, Any]
    plan: Plan
    samples: Samples | None = None
    questions: Questions | None = None
    chat: Chat | None = None
    distinct: Distinct | None = None
    claims: list[Claim] = field(default_factory=list)
    partial: bool = False
    seconds: float = 0.0

    @property
    def found(self) -> dict[str, Found]:
        parts = {name: getattr(self, name) for name in ("samples", "questions", "chat", "distinct")}
        return {name: part.found for name, part in parts.items() if part}

    @property
    def void(self) -> dict[str, str]:
        """{part: why its times do not count}"""
        parts = {name: getattr(self, name) for name in ("questions", "chat", "distinct")}
        return {name: part.void for name, part in parts.items() if part and part.void}


# ---- one request, one engine


def make_engine(model: Llama, kind: str, max_running: int, max_len: int, block: int, texts: int) -> Engine:
    """With memory for so many texts, so that what ended stays until it is asked for again."""
    n_slots = texts * -(-max_len // block) * block
    slots = partial(KINDS[kind], n_slots=n_slots, size=block)
    return Engine(model, max_running=max_running, budget=BUDGET, max_len=max_len, slots=slots)


def counts_of(engine: Engine) -> tuple[int, int]:
    """Tokens asked and found so far."""
    slots = engine.scheduler.slots
    return (slots.asked, slots.found) if isinstance(slots, SharedSlots) else (0, 0)


@dataclass(frozen=True)
class Answer:
    """One request that had the engine for itself."""

    job: Job
    output: list[int]
    reason: str
    ttft: float  # seconds
    found: int  # tokens of its prompt


def ask(engine: Engine, job: Job) -> Answer:
    device, (_, before) = engine.model.device, counts_of(engine)
    start = now(device)
    request = engine.add(job.prompt, SamplingParams(max_tokens=job.max_tokens, ignore_eos=job.ignore_eos))
    first = None
    while request.finish_reason is None:
        engine.step()
        if first is None and request.output:
            first = now(device)
    assert first is not None
    return Answer(job, request.output, request.finish_reason, first - start, counts_of(engine)[1] - before)


def check_answers(answers: Sequence[Answer], verifier: Verifier) -> str | None:
    """Why the times of these may not be shown: a token is not the naive model's. A few tokens have no share."""
    run = Run(
        "shared",
        [answer.job for answer in answers],
        [],
        [answer.output for answer in answers],
        [],
        [answer.reason for answer in answers],
        Counts(),
    )
    return judge([run], verifier, most_excused=1.0).void


def turns_about(rounds: int) -> list[tuple[int, str]]:
    """(round, kind): round 0 warms up; each begins with the other kind."""
    return [(i, kind) for i in range(1 + rounds) for kind in (KINDS if i % 2 else list(KINDS)[::-1])]


Advance = Callable[[str], None]


# ---- the parts


def measure_samples(model: Llama, text: Sequence[int], plan: Plan, advance: Advance) -> Samples:
    """All samples at once, drawn with temperature 1; the i-th draws the same numbers in both kinds."""
    params = SamplingParams(max_tokens=plan.new, temperature=1.0, seed=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    held: dict[str, list[int]] = {}
    outputs: dict[str, list[list[int]]] = {}
    asked = found = 0
    for i, kind in turns_about(plan.rounds):
        advance(f"{plan.samples} samples of one prompt, {kind}")
        engine = make_engine(model, kind, plan.samples, plan.prompt + plan.new - 1, plan.block, plan.samples)
        slots, steps = engine.scheduler.slots, list[int]()
        assert isinstance(slots, BlockSlots)

        def look(*_: object, slots: BlockSlots = slots, steps: list[int] = steps) -> None:
            steps.append(slots.n_slots // slots.size - len(slots.free))

        hook = model.register_forward_pre_hook(look)
        try:
            start = now(model.device)
            made = engine.generate([list(text[: plan.prompt])], params, plan.samples)
            if i:
                seconds[kind].append(now(model.device) - start)
        finally:
            hook.remove()
        held[kind], outputs[kind] = steps, [output.token_ids for output in made]
        if kind == "shared":
            asked, found = counts_of(engine)
    peaks = {kind: max(blocks) for kind, blocks in held.items()}
    return Samples(
        held=held,
        share=peaks["shared"] / peaks["paged"],
        seconds={kind: Spread.of(values) for kind, values in seconds.items()},
        ratio=median(a / b for a, b in zip(seconds["paged"], seconds["shared"], strict=True)),
        same_texts=sum(a == b for a, b in zip(outputs["paged"], outputs["shared"], strict=True)),
        found=Found(asked, found, peaks["paged"] - peaks["shared"]),
    )


def measure_questions(model: Llama, text: Sequence[int], plan: Plan, verifier: Verifier, advance: Advance) -> Questions:
    """One question after the other, each alone: its ttft is the time to compute its prompt."""
    system = tuple(text[: plan.system])
    starts = range(plan.system, plan.system + plan.questions * plan.question, plan.question)
    jobs = [Job(system + tuple(text[at : at + plan.question]), plan.short) for at in starts]
    ttft: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}  # of each round and question
    all_answers: list[Answer] = []
    for i, kind in turns_about(plan.rounds):
        advance(f"A system prompt of {plan.system:,} tokens, {kind}")
        engine = make_engine(model, kind, 1, len(jobs[0].prompt) + plan.short, plan.block, plan.questions)
        answers = [ask(engine, job) for job in (jobs if i else jobs[:2])]
        if i:
            ttft[kind].append([answer.ttft for answer in answers])
            all_answers += answers
        if kind == "shared":
            found = Found(*counts_of(engine), 0)
    found.saved = found.found // plan.block
    later = {kind: [t for one in rounds for t in one[1:]] for kind, rounds in ttft.items()}
    return Questions(
        void=check_answers(all_answers, verifier),
        first={kind: Spread.of([one[0] for one in rounds]) for kind, rounds in ttft.items()},
        later={kind: Spread.of(values) for kind, values in later.items()},
        by_number={kind: [median(column) for column in zip(*rounds, strict=True)] for kind, rounds in ttft.items()},
        ratio=median(later["paged"]) / median(later["shared"]),
        found=found,
    )


def conversation(workload: Workload, plan: Plan) -> Callable[[Sequence[Sequence[int]]], list[int]]:
    """From the answers so far to the ids of the next prompt.

    By the chat template, as a server would: answers become text and are tokenized again. Without a tokenizer, token
    ids one after the other.
    """
    tokenizer, text = workload.tokenizer, workload.text

    def by_template(answers: Sequence[Sequence[int]]) -> list[int]:
        assert tokenizer is not None
        messages = []
        for question, answer in zip(QUESTIONS, answers, strict=False):
            messages += [{"role": "user", "content": question}]
            messages += [{"role": "assistant", "content": tokenizer.decode(answer)}]
        return tokenizer.encode_chat([*messages, {"role": "user", "content": QUESTIONS[len(answers)]}])

    def by_ids(answers: Sequence[Sequence[int]]) -> list[int]:
        ids: list[int] = []
        for i, answer in enumerate([*answers, []]):
            ids += [*text[i * plan.question : (i + 1) * plan.question], *answer]
        return ids

    return by_template if tokenizer else by_ids


def measure_chat(model: Llama, workload: Workload, plan: Plan, verifier: Verifier, advance: Advance) -> Chat:
    """The same conversation in every round: what `paged` is asked was said with `shared`."""
    prompts = conversation(workload, plan)
    max_len = min(model.config.context, CHAT)
    ttft: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    all_answers: list[Answer] = []
    said: list[Answer] = []
    for i, kind in turns_about(plan.rounds):  # shared comes first: the others repeat what it said
        advance(f"A chat of {plan.turns} turns, {kind}")
        engine = make_engine(model, kind, 1, max_len, plan.block, 1)
        answers: list[Answer] = []
        for n in range(plan.turns):
            ids = said[n].job.prompt if said else prompts([answer.output for answer in answers])
            answers.append(ask(engine, Job(tuple(ids), plan.answer if kind == "shared" else 1, ignore_eos=False)))
        said = said or answers
        if i:
            ttft[kind].append([answer.ttft for answer in answers])
            all_answers += answers
        if kind == "shared":
            found = Found(*counts_of(engine), 0)
            turns = [Turn(len(a.job.prompt), a.found, len(a.output), {}) for a in answers]
    found.saved = found.found // plan.block
    for n, turn in enumerate(turns):
        turn.ttft = {kind: median(one[n] for one in rounds) for kind, rounds in ttft.items()}
    slow, fast = ([sum(one[1:]) for one in ttft[kind]] for kind in KINDS)
    return Chat(
        void=check_answers(all_answers, verifier),
        turns=turns,
        ratio=median(a / b for a, b in zip(slow, fast, strict=True)),
        found=found,
    )


def measure_distinct(
    model: Llama, text: Sequence[int], plan: Plan, verifier: Verifier, most_excused: float, advance: Advance
) -> Distinct:
    """The two stages of the ladder on prompts that are cut out of the text one after the other."""
    starts = range(0, plan.distinct * plan.length, plan.length)
    jobs = [Job(tuple(text[at : at + plan.length]), plan.output) for at in starts]
    limits = {"max_running": RUNNING, "budget": BUDGET, "block": plan.block}
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for i, kind in turns_about(plan.rounds):
        advance(f"{plan.distinct} prompts that share nothing, {kind}")
        done = run(model, kind, jobs if i else jobs[:RUNNING], limits)
        if i:
            runs[kind].append(done)
    speed = {kind: [one.summary.output_throughput for one in done] for kind, done in runs.items()}
    last = runs["shared"][-1]
    found = last.tokens_useful - last.tokens_pushed  # nobody was preempted: there is memory for all
    return Distinct(
        void=judge([one for done in runs.values() for one in done], verifier, most_excused).void,
        output_throughput={kind: Spread.of(values) for kind, values in speed.items()},
        ratio=median(b / a for a, b in zip(speed["paged"], speed["shared"], strict=True)),
        found=Found(last.summary.prompt_tokens, found, found // plan.block),
    )


def measure(model: Llama, name: str, workload: Workload, console: Console, plan: Plan = Plan()) -> Result:  # noqa: B008
    """All four, in interleaved rounds.

    Ctrl-C: the parts that were whole are kept and the result is partial; before the first, it is raised again.
    Raises InputError as `Plan.check`.
    """
    began = time.perf_counter()
    plan.check(model.config, workload)
    verifier = Verifier(model)
    most_excused = MOST_EXCUSED if workload.weights == "real" else 1.0  # random logits lie close together
    result = Result(
        about=machine.describe(model.device),
        model={"name": name, "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)},
        plan=plan,
    )
    try:
        with ladder.progress(console) as bar:
            advance = advancing(bar, 4 * len(turns_about(plan.rounds)))
            result.samples = measure_samples(model, workload.text, plan, advance)
            result.questions = measure_questions(model, workload.text, plan, verifier, advance)
            result.chat = measure_chat(model, workload, plan, verifier, advance)
            result.distinct = measure_distinct(model, workload.text, plan, verifier, most_excused, advance)
    except KeyboardInterrupt:
        if not result.found:
            raise
        result.partial = True
    result.claims = claims(result)
    result.seconds = time.perf_counter() - began
    return result


def advancing(bar: Progress, total: int) -> Advance:
    task = bar.add_task("", total=total, completed=-1)  # said at the beginning of each
    return lambda what: bar.update(task, advance=1, description=what)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def claims(result: Result) -> list[Claim]:
    """The targets, for the parts that are whole and right, and have the sizes that the targets speak of."""
    plan, usual, made = result.plan, Plan(), list[Claim]()
    sizes = plan.samples, plan.prompt, plan.new
    if (samples := result.samples) and sizes == (usual.samples, usual.prompt, usual.new):
        peaks = {kind: max(blocks) for kind, blocks in samples.held.items()}
        made.append(
            at_most(
                f"{plan.samples} samples of a {plan.prompt}-token prompt, blocks held, shared over not shared",
                0.25,
                samples.share,
                f"{peaks['paged']} to {peaks['shared']} blocks",
            )
        )
    if (questions := result.questions) and not questions.void and plan.system == usual.system:
        slow, fast = (questions.later[kind].median for kind in KINDS)
        made.append(
            at_least(
                f"a repeated {plan.system:,}-token system prompt, ttft, not shared over shared",
                5,
                questions.ratio,
                f"{ms(slow)} to {ms(fast)} ms",
            )
        )
    return made
