"""Draws are a function of (seed, sample, token) alone, uniform, and the same for ever."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.draws import _mix, fresh_seed, uniform

SEEDS = st.integers(0, 2**64 - 1)
COUNTERS = st.integers(0, 2**20)


def test_the_mixer_is_splitmix64() -> None:
    """The first outputs of the generator for seed 1234567, as its public test vector gives them."""
    x, outputs = 1234567, []
    for _ in range(5):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(_mix(x))
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(
    "key, draw",
    [
        ((0, 0, 0), 10946269),
        ((0, 0, 1), 11764387),
        ((0, 1, 0), 4634430),
        ((42, 0, 0), 5759482),
        ((42, 0, 1), 16034769),
        ((42, 3, 7), 8171573),
        ((2**64 - 1, 0, 0), 6144522),
        ((2**64 - 1, 1, 1000), 7400070),
    ],
)
def test_draws_never_change(key: tuple[int, int, int], draw: int) -> None:
    """A text that a seed once made is made again by every later version."""
    assert uniform(*key) * 2**24 == draw


@given(SEEDS, COUNTERS, COUNTERS)
def test_a_draw_is_below_one_and_exact_in_float32(seed: int, sample: int, n: int) -> None:
    u = uniform(seed, sample, n)
    assert 0 <= u < 1
    assert u == uniform(seed, sample, n)
    assert float(torch.tensor(u, dtype=torch.float32)) == u
    assert float(torch.tensor(u, dtype=torch.float32)) < 1


@pytest.mark.parametrize("axis", ["seed", "sample", "token"])
def test_draws_are_uniform_along_each_key(axis: str) -> None:
    """64 bins, 64,000 draws: chi-square has mean 63 and deviation 11. Neighbouring draws are not alike either."""
    at = ["seed", "sample", "token"].index(axis)
    draws = [uniform(*(i if j == at else 7 for j in range(3))) for i in range(64_000)]
    counts = torch.bincount((torch.tensor(draws, dtype=torch.float64) * 64).long(), minlength=64)
    assert 20 < float(((counts - 1000.0) ** 2 / 1000).sum()) < 120
    pairs = torch.tensor([draws[:-1], draws[1:]], dtype=torch.float64)
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02


def test_no_two_keys_share_their_draws() -> None:
    """24 bits collide by chance, so a key is told by its first three draws."""
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1, *(random.Random(i).getrandbits(64) for i in range(100))]
    keys = list(itertools.product(seeds, range(8), (0, 1, 2, 50)))
    assert len({tuple(uniform(s, i, n + k) for k in range(3)) for s, i, n in keys}) == len(keys)
    assert len({tuple(uniform(s, i + k, n) for k in range(3)) for s, i, n in keys}) == len(keys)


def test_fresh_seeds_differ_and_fit() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100 and all(0 <= seed < 2**64 for seed in seeds)
