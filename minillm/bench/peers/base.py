"""What every peer offers: its rows of the two experiments, each a function that is timed once per round.

set   requests of many lengths, all there at time 0
grid  N equally long prompts at once, and as many new tokens for each: reading and writing apart
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from minillm.bench.harness import Job
from minillm.config import Config


@dataclass(frozen=True)
class Target:
    """What a peer is asked to run, and under which limits: ours."""

    folder: Path
    config: Config
    dtype: str  # torch's name
    device: str
    threads: int
    max_running: int
    budget: int  # new tokens in one step
    sample: tuple[int, ...]  # a prompt to try


@dataclass(frozen=True)
class PeerRun:
    """One run over a set. Lists are in the order of the jobs; times in seconds after the start."""

    n_tokens: list[int]  # emitted for each request, as the peer counts them
    n_prompt: list[int]  # read for each request, likewise
    first: list[float]  # when the first token was there
    last: list[float]
    outputs: list[list[int]] | None  # None: the peer tells text, not token ids
    wasted: int | None  # tokens computed for nothing: pads, and rows that had ended; None: it does not tell

    @property
    def wall(self) -> float:
        return max(self.last)


@dataclass(frozen=True)
class Grid:
    """The first N of the prompts for each N in `sizes`; all are equally long."""

    prompts: list[tuple[int, ...]]
    sizes: tuple[int, ...]
    n_new: int

    @property
    def n_prompt(self) -> int:
        return len(self.prompts[0])


@dataclass(frozen=True)
class Point:
    """One N of the grid; times in seconds. Where the prompt's pass makes the first token, decoding makes the rest."""

    N: int
    prompt_tokens: int
    new_tokens: int
    prefill: float
    decode: float
    decoded: int  # new tokens that `decode` counts

    @property
    def prefill_throughput(self) -> float:
        return self.prompt_tokens / self.prefill

    @property
    def decode_throughput(self) -> float:
        return self.decoded / self.decode


RunSet = Callable[[Sequence[Job]], PeerRun]
RunGrid = Callable[[Grid], list[Point]]


@dataclass(frozen=True)
class Rows:
    """What a peer can run, by the name of the row. Each raises InputError if the peer fails."""

    on_set: dict[str, RunSet]
    on_grid: dict[str, RunGrid]
    notes: dict[str, str]  # by row: how it was run


class Peer(Protocol):
    name: str

    def check(self) -> None:
        """Raises InputError, with what mends it, if the peer is not there. Takes seconds at most."""

    def start(self, target: Target) -> Rows:
        """Loads what takes long. Raises InputError if this peer cannot run this target."""

    def close(self) -> None:
        """Ends every process of the peer. May be called at any time, and twice."""


def point(N: int, run: PeerRun) -> Point:
    """A run over N equally long jobs as a point of the grid."""
    first, last, new = max(run.first), max(run.last), sum(run.n_tokens)
    return Point(N, sum(run.n_prompt), new, first, last - first, new - N)
