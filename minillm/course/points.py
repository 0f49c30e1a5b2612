"""Points of an assignment, always in quarters: 12 public, 5 on hidden inputs, 3 for what is written."""

from collections.abc import Mapping
from fractions import Fraction

PUBLIC, HIDDEN, WRITTEN = 12.0, 5.0, 3.0
MOST = PUBLIC + HIDDEN + WRITTEN
QUARTERS = 4  # in one point


def split(points: float, shares: Mapping[str, int]) -> dict[str, float]:
    """The points, divided as the shares are, in quarters that add up: by the method of the largest remainder."""
    quarters, total = int(points * QUARTERS), sum(shares.values())
    exact = {name: Fraction(quarters * share, total) for name, share in shares.items()}
    given = {name: int(part) for name, part in exact.items()}
    left = quarters - sum(given.values())
    for name in sorted(exact, key=lambda name: given[name] - exact[name])[:left]:  # stable: the first of equal ones
        given[name] += 1
    return {name: number / QUARTERS for name, number in given.items()}


def earned(points: float, held: int, of: int) -> float:
    """The part of the points for `held` of `of` properties, rounded down to a quarter."""
    return int(points * QUARTERS) * held // of / QUARTERS
