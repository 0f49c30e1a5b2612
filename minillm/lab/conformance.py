"""The final project: an engine of your own, checked level by level.

    minillm check --engine my_engine                    the class Engine in my_engine.py
    minillm check --engine my_engine:make --level 4     what `make` returns, and level 4 is claimed

Whatever is in it (your model code or ours, any cache, any batching), it is used through the five methods of `Engine`.
The properties are in `conformance_levels`, the speed is in `conformance_speed`, `conformance_theirs` calls the engine
with care, and `conformance_child` does all of it in a process of its own, which may crash or hang.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from minillm.errors import InputError, whole_number
from minillm.params import SamplingParams

SECONDS = 60.0  # for one property: far more than it takes
MOST_STOPPED = 2  # properties that end by the clock or a crash, until no further one is tried
LEAST_SPEED = 0.5  # of the output tokens per second of the ladder's continuous stage


# ---- what a student writes


@dataclass(frozen=True)
class Setup:
    """What an engine is made from."""

    folder: Path  # config.json and model.safetensors, with the names of the Hugging Face Hub
    dtype: str  # "float64" for the small random model of levels 1 to 6
    device: str
    max_running: int  # most texts that may run at once
    n_slots: int  # most positions whose K and V may be kept at once, all texts together; any one text fits


Event = tuple[int, int, str | None]  # key, token, and with the last token "stop" or "length"


class Engine(Protocol):
    """The adapter. Levels 1 to 3 need `generate` alone. Of the params these are used: max_tokens, temperature, top_k,
    top_p, seed, stop_token_ids, ignore_eos. The token that ends a text is part of it, as its last one."""

    def __init__(self, setup: Setup) -> None: ...

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        """The new tokens of each prompt, in the order of the prompts."""
        ...

    def add(self, key: int, prompt: list[int], params: SamplingParams) -> None:
        """Queues a request. It returns at once, also while others run."""
        ...

    def step(self) -> list[Event]:
        """Does some work, for example one forward pass, and returns the tokens made; none, where nothing is to do."""
        ...

    def abort(self, key: int) -> None:
        """The request ends now: no further token of it, and its place is free."""
        ...


SIGNATURES = {
    "Engine": "Engine(setup: Setup)",
    "generate": "generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]",
    "add": "add(self, key: int, prompt: list[int], params: SamplingParams) -> None",
    "step": 'step(self) -> list[tuple[int, int, str | None]]  # key, token, and None, "stop" or "length"',
    "abort": "abort(self, key: int) -> None",
}


# ---- what is checked


@dataclass(frozen=True)
class Level:
    number: int
    name: str
    points: int


LEVELS = (
    Level(1, "one text", 10),
    Level(2, "many texts of any lengths", 10),
    Level(3, "sampling", 10),
    Level(4, "requests that come, go and end", 10),
    Level(5, "bounded memory", 10),
    Level(6, "no wasted work", 10),
    Level(7, "speed, with real weights", 10),
)


@dataclass(frozen=True)
class Finding:
    """One property: `wrong` gives the reason, None if it holds. `note` is a measured figure, for people."""

    level: int
    says: str
    wrong: str | None
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    engine: str
    claimed: int
    seed: int | None
    findings: list[Finding]
    flags: list[str]  # what a teacher should look at: no proof of anything

    def holds(self, level: int) -> bool:
        found = [finding.wrong is None for finding in self.findings if finding.level == level]
        return bool(found) and all(found)

    @property
    def reached(self) -> int:
        """The highest level that is reached with all below it; 0: none."""
        return next((level.number - 1 for level in LEVELS if not self.holds(level.number)), len(LEVELS))

    @property
    def points(self) -> int:
        return sum(level.points for level in LEVELS if self.holds(level.number))

    def text(self) -> str:
        lines = [f"Engine {self.engine}"]
        for level in LEVELS[: self.claimed]:
            points = level.points if self.holds(level.number) else 0
            lines.append(f"level {level.number}: {level.name}, {points} of {level.points} points")
            for finding in self.findings:
                if finding.level == level.number:
                    note = f" ({finding.note})" if finding.note else ""
                    lines.append(f"  {'ok   ' if finding.wrong is None else 'WRONG'}  {finding.says}{note}")
                    lines += [f"         {line}" for line in (finding.wrong or "").splitlines()]
        lines += [f"to look at: {flag}" for flag in self.flags]
        reached = f"Reached: {'levels 1 to ' if self.reached > 1 else 'level '}{self.reached}" if self.reached else ""
        lines.append(f"{reached or 'No level is reached yet'}; {self.points} points of {self.most}.")
        if self.reached < self.claimed:
            lines.append(f"Level {self.reached + 1} is the next; level {self.claimed} was claimed.")
        return "\n".join(lines)

    @property
    def most(self) -> int:
        return sum(level.points for level in LEVELS)

    def as_json(self) -> dict[str, Any]:
        """For the teacher: one file for each engine."""
        levels = [asdict(level) | {"reached": self.holds(level.number)} for level in LEVELS[: self.claimed]]
        found = {"reached": self.reached, "points": self.points, "most_points": self.most}
        return {"schema": 1} | asdict(self) | found | {"levels": levels}


def check_engine(
    spec: str, claimed: int, seed: int | None, seconds: float, tell: Callable[[str], None] = lambda line: None
) -> Report:
    """Every property of levels 1 to `claimed`, in a child process that is begun anew when one kills or outlives it.
    Raises InputError for an engine that cannot be loaded. `tell` hears what is being tried."""
    from minillm.lab.conformance_child import STOPPED, Child, Loaded, names_of

    properties = names_of(claimed)
    report = Report(spec, claimed, seed, [], [])
    findings, loaded = report.findings, False

    def stopped() -> bool:
        return sum((finding.wrong or "").startswith(STOPPED) for finding in findings) >= MOST_STOPPED

    while len(findings) < len(properties) and not stopped():
        failed = sorted({finding.level for finding in findings if finding.wrong is not None})
        with Child(spec, seed, seconds, properties[len(findings) :], failed) as child:
            for message in child.messages():
                if isinstance(message, Loaded):
                    report.engine, report.flags, loaded = message.name, message.flags, True
                else:
                    findings.append(message)
                if stopped() or len(findings) == len(properties):
                    break
                tell("Level {}: {}".format(*properties[len(findings)]))
        if child.died and not loaded:
            raise InputError(f"{spec} cannot be loaded: {child.died}")
        if child.died:
            findings.append(Finding(*properties[len(findings)], child.died))
    for level, says in properties[len(findings) :]:
        findings.append(Finding(level, says, "not tried: the engine hung or died too often before"))
    return report


def engine_command(
    spec: str, claimed: int, seed: int | None, json_path: Path | None, write: Callable[[str], None]
) -> int:
    """`minillm check --engine`: 1 if a level that is claimed is not reached. Raises InputError."""
    from minillm.bench.results import check_writable
    from minillm.terminal import err

    whole_number("--level", claimed, 1, len(LEVELS))
    if seed is not None:
        whole_number("--seed", seed, 0)
    check_writable(json_path)
    with err.status("Loading the engine") as status:
        report = check_engine(spec, claimed, seed, SECONDS, status.update)
    write(report.text())
    if json_path is not None:
        json_path.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        write(f"JSON: {json_path}")
    return 0 if report.reached >= claimed else 1


def split_spec(spec: str) -> tuple[str, str]:
    """ "module[:name]" to both. Raises InputError."""
    module, _, name = spec.partition(":")
    name = name or "Engine"
    if not module or not name.isidentifier():
        raise InputError(f"engine {spec!r} must be MODULE or MODULE:NAME, for example my_engine or my_engine.py:make")
    return module, name
