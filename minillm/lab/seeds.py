"""Where the checks' random inputs come from. Inside `with variant(seed):` every draw is another one.

The public check always draws the same inputs, so that a report can be talked about. A teacher's hidden variant is the
same properties on other inputs: answers that were written down from the public ones do not pass it.
"""

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")

_now: int | None = None  # the variant's seed; of the whole process, since some properties start threads
asked: list[int] = []  # grows with every draw: whether a property draws at all can be seen by it


@contextmanager
def variant(seed: int | None) -> Iterator[None]:
    """Inside the block all draws depend on this seed too. None: the public inputs."""
    global _now
    before, _now = _now, seed
    try:
        yield
    finally:
        _now = before


def mixed(n: int) -> int:
    """n itself, or in a variant a number that n and the variant's seed decide together."""
    asked.append(n)
    if _now is None:
        return n
    digest = hashlib.sha256(f"{_now} {n}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def rng(n: int) -> random.Random:
    """random.Random(n), or the variant's own."""
    return random.Random(mixed(n))


def generator(n: int) -> torch.Generator:
    """torch.Generator().manual_seed(n), or the variant's own."""
    return torch.Generator().manual_seed(mixed(n))


def cache(function: Callable[P, T]) -> Callable[P, T]:
    """functools.cache, anew in each variant: for functions that draw."""
    kept: dict[int | None, Callable[P, T]] = {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        asked.append(0)
        if _now not in kept:
            kept[_now] = cast(Callable[P, T], functools.cache(function))
        return kept[_now](*args, **kwargs)

    return call
