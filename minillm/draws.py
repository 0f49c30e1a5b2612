"""Randomness as a counter, not a state: the same (seed, sample, token) gives the same draw, whatever runs beside it."""

import secrets

MASK = 2**64 - 1


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014): a bijection of 64-bit integers that scatters bits."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def uniform(seed: int, sample_index: int, n_emitted: int) -> float:
    """A number in [0, 1) for the token after `n_emitted` emitted ones, with 24 random bits: exact in float32."""
    x = seed & MASK
    for counter in (sample_index, n_emitted):
        x = _mix((x + 0x9E3779B97F4A7C15 * (counter + 1)) & MASK)
    return (x >> 40) / 2**24


def fresh_seed() -> int:
    return secrets.randbits(64)
