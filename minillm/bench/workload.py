"""What is asked of the stages: presets, and the two sets of requests.

The `main` set is the prompts as they come, of many lengths. The naive stage would need too long for it, so it
runs the `small` set of short ones.
"""

import random
from dataclasses import dataclass

from minillm.bench.harness import Job
from minillm.bench.prompts import Prompt, load
from minillm.config import Config
from minillm.errors import InputError
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preset:
    """How much is run. Lengths are in tokens, the chat template included."""

    name: str
    small: int  # prompts of at most `small_longest` tokens, in the order of the file
    small_longest: int
    small_cap: int  # most new tokens
    main: int  # prompts of at most `main_longest` tokens, in the order of the file
    main_longest: int
    main_cap: int
    max_running: int  # sequences in one step, the same for every stage that batches
    budget: int  # new tokens in one step (continuous)
    chunk: int  # new tokens in one step (chunked)
    rounds: int  # most timed runs of each stage
    seconds: float  # no further round is begun that would end later than this, counted from the first pass
    claims: bool  # also measure the comparisons in `claims`

    @property
    def limits(self) -> dict[str, int]:
        return {"max_running": self.max_running, "budget": self.budget, "chunk": self.chunk}


QUICK = Preset(
    name="quick",
    small=3,
    small_longest=64,
    small_cap=24,
    main=10,
    main_longest=400,
    main_cap=40,
    max_running=8,
    budget=512,
    chunk=256,
    rounds=3,
    seconds=95,
    claims=False,
)
FULL = Preset(
    name="full",
    small=4,
    small_longest=64,
    small_cap=64,
    main=24,
    main_longest=2048,
    main_cap=128,
    max_running=16,
    budget=512,
    chunk=256,
    rounds=3,
    seconds=720,
    claims=True,
)
PRESETS = {preset.name: preset for preset in (QUICK, FULL)}


def pick_preset(name: str) -> Preset:
    """Raises InputError for an unknown name."""
    if name not in PRESETS:
        raise InputError(f"preset {name!r} is not known; use one of {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass
class Workload:
    """The two sets, and where they come from. Prompts of `claims` are cut out of `text`."""

    sets: dict[str, list[Job]]
    questions: list[str]  # of the small set, for people to read
    text: list[int]  # many token ids in a row
    weights: str  # "real" or "random"
    tokenizer: Tokenizer | None
    lengths_known: bool  # the jobs already say how long the texts are


def real_workload(tokenizer: Tokenizer, preset: Preset, config: Config) -> Workload:
    """The package's own prompts, by the checkpoint's chat template, as long as the model's context admits."""
    prompts = [(p, tuple(tokenizer.encode_chat(list(p.messages)))) for p in load()]

    def pick(n: int, longest: int, cap: int) -> list[tuple[Prompt, tuple[int, ...]]]:
        fitting = [(p, ids) for p, ids in prompts if len(ids) <= min(longest, config.context - cap)][:n]
        if not fitting:
            raise InputError(f"the model's context is {config.context}; the prompts need at least {64 + cap}")
        return fitting

    small = pick(preset.small, preset.small_longest, preset.small_cap)
    main = pick(preset.main, preset.main_longest, preset.main_cap)
    return Workload(
        sets={
            "small": [Job(ids, preset.small_cap, ignore_eos=False) for _, ids in small],
            "main": [Job(ids, preset.main_cap, ignore_eos=False) for _, ids in main],
        },
        questions=[p.messages[-1]["content"] for p, _ in small],
        text=[token for _, ids in prompts for token in ids],
        weights="real",
        tokenizer=tokenizer,
        lengths_known=False,
    )


def random_workload(preset: Preset, config: Config, seed: int = 0) -> Workload:
    """Random ids, for a model with random weights, which never ends a text: prompts about as long as the
    package's (four characters a token, and 30 for the template), outputs from 8 tokens to the cap, short
    ones more often.
    """
    draw = random.Random(seed)
    sizes = [30 + sum(len(m["content"]) for m in p.messages) // 4 for p in load()]

    def jobs(n: int, longest: int, cap: int) -> list[Job]:
        fitting = [size for size in sizes if size <= min(longest, config.context - cap)][:n]
        least = min(8, cap)
        lengths = [round(least * (cap / least) ** draw.random()) for _ in fitting]
        return [
            Job(tuple(draw.randrange(config.vocab_size) for _ in range(size)), length)
            for size, length in zip(fitting, lengths, strict=True)
        ]

    return Workload(
        sets={
            "small": jobs(preset.small, preset.small_longest, preset.small_cap),
            "main": jobs(preset.main, preset.main_longest, preset.main_cap),
        },
        questions=[],
        text=[draw.randrange(config.vocab_size) for _ in range(16_000)],
        weights="random",
        tokenizer=None,
        lengths_known=True,
    )
