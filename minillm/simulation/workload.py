"""What arrives when, and how long it is: random demands with a seed, or those of a trace file."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minillm.errors import InputError

MOST_REQUESTS = 100_000
MOST_TOKENS = 100_000  # of one prompt or one output
MOST_SECONDS = 1e9
HEADER = ["arrival", "prompt", "output"]


@dataclass(frozen=True)
class Demand:
    """What one request asks: when it arrives, in seconds after the start, and its tokens."""

    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Mix:
    """Output lengths in tokens: each part has a share of the requests, which are uniform from `low` to `high`."""

    parts: tuple[tuple[float, int, int], ...]  # (share, low, high), both ends in

    def __post_init__(self) -> None:
        assert all(share > 0 and 1 <= low <= high for share, low, high in self.parts)
        assert math.isclose(sum(share for share, _, _ in self.parts), 1)

    @property
    def mean(self) -> float:
        return sum(share * (low + high) / 2 for share, low, high in self.parts)

    def scaled(self, factor: float) -> "Mix":
        """The same shape, `factor` times as long; no length falls below one token."""
        return Mix(tuple((s, max(1, round(low * factor)), max(1, round(high * factor))) for s, low, high in self.parts))

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        shares, lows, highs = (np.array(column) for column in zip(*self.parts, strict=True))
        part = rng.choice(len(self.parts), size=n, p=shares)
        return [int(length) for length in rng.integers(lows[part], highs[part] + 1)]


ARTICLE_MIX = Mix(((0.85, 40, 200), (0.15, 400, 1000)))  # many short answers, a few long ones


def uniform(length: int) -> Mix:
    """Every output is of this length."""
    return Mix(((1.0, length, length),))


def poisson_demands(n: int, rate: float, mix: Mix, prompt: int, seed: int) -> list[Demand]:
    """`rate` requests a second on average, each independent of the others; all prompts of one length."""
    rng = np.random.default_rng(seed)
    outputs = mix.draw(n, rng)
    arrivals = np.cumsum(rng.exponential(1 / rate, n))
    return [Demand(float(t), prompt, output) for t, output in zip(arrivals, outputs, strict=True)]


def at_once(n: int, mix: Mix, prompt: int, seed: int) -> list[Demand]:
    """All there at time 0, with the lengths that `poisson_demands` has for this seed."""
    return [Demand(0.0, prompt, output) for output in mix.draw(n, np.random.default_rng(seed))]


def read_trace(path: Path) -> list[Demand]:
    """Demands from a CSV file with the header `arrival,prompt,output`, in order of arrival.

    Raises InputError for a file that cannot be read, and for a bad line, by number and value.
    """
    demands: list[Demand] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if header != HEADER:
                raise InputError(f"{path} line 1: the header is {','.join(header)!r}; it must be {','.join(HEADER)!r}")
            for cells in reader:
                if not cells:
                    continue  # an empty line
                if len(demands) == MOST_REQUESTS:
                    raise InputError(f"{path} line {reader.line_num}: only {MOST_REQUESTS:,} requests are taken")
                demands.append(_demand(cells, f"{path} line {reader.line_num}"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a CSV file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}); give a CSV file") from error
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: {error}; give a CSV file") from error
    if not demands:
        raise InputError(f"{path} holds no requests; give at least one line below the header")
    return sorted(demands, key=lambda demand: demand.arrival)


def _demand(cells: Sequence[str], where: str) -> Demand:
    if len(cells) != len(HEADER):
        raise InputError(f"{where}: {','.join(cells)!r} has {len(cells)} values; it must have {len(HEADER)}")
    try:
        arrival = float(cells[0])
    except ValueError:
        arrival = math.nan
    if not 0 <= arrival <= MOST_SECONDS:
        raise InputError(f"{where}: arrival is {cells[0]!r}; it must be seconds from 0 to {MOST_SECONDS:g}")
    tokens = []
    for name, cell in zip(HEADER[1:], cells[1:], strict=True):
        try:
            count = int(cell)
        except ValueError:
            count = 0
        if not 1 <= count <= MOST_TOKENS:
            raise InputError(f"{where}: {name} is {cell!r}; it must be a number of tokens from 1 to {MOST_TOKENS:,}")
        tokens.append(count)
    return Demand(arrival, *tokens)
