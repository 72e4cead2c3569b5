"""Random permutations that need no memory and can be evaluated at any position.

Everything here is a function of a key and a position, so the millionth index of an order costs as
much as the first. It uses plain integer arithmetic, because the streams of numpy's and torch's RNGs
may change between releases: a job that resumes after an upgrade would then get another order.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Positions: TypeAlias = NDArray[np.int64]

_SHUFFLED_SIZE: Final = 1 << 16
"""Up to this size an order is a shuffled table: 0.5 MB and a few milliseconds."""

_NUM_ROUNDS: Final = 8

_STEP: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK: Final = (1 << 64) - 1


def key_of(*parts: int) -> int:
    """Return a key of 64 bits that depends on all numbers and on their order."""
    key = 0
    for part in parts:
        key = _mix((key ^ (part & _MASK)) + _STEP & _MASK)
    return key


def permutation(size: int, key: int) -> Callable[[Positions], Positions]:
    """Return a function from positions below `size` to indices below `size`, one to one."""
    if size <= _SHUFFLED_SIZE:
        table = np.argsort(_hashes(np.arange(size), key), kind="stable")
        return table.__getitem__
    return _feistel(size, key)


def uniform(positions: Positions, key: int) -> NDArray[np.float64]:
    """Return a number of [0, 1) for each position."""
    return (_hashes(positions, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _feistel(size: int, key: int) -> Callable[[Positions], Positions]:
    """Return a permutation made of rounds, each invertible by subtracting what it added.

    A position is a pair (high, low) in a rectangle that is hardly larger than `size`. Each round
    shifts one half by a hash of the other. A result outside of `size` is permuted again until it is
    inside.
    """
    height = isqrt(size - 1) + 1
    width = -(-size // height)
    keys = [key_of(key, number) for number in range(_NUM_ROUNDS)]

    def permute(positions: Positions) -> Positions:
        high, low = np.divmod(positions.astype(np.uint64), np.uint64(width))
        for key_of_high, key_of_low in zip(keys[::2], keys[1::2], strict=True):
            high = _shift(high, low, height, key_of_high)
            low = _shift(low, high, width, key_of_low)
        return (high * np.uint64(width) + low).astype(np.int64)

    def index_at(positions: Positions) -> Positions:
        result = permute(positions)
        while len(outside := np.flatnonzero(result >= size)):
            result[outside] = permute(result[outside])
        return result

    return index_at


def _shift(half: Any, other_half: Any, modulus: int, key: int) -> Any:
    hashed = _mix(other_half ^ np.uint64(key)) >> np.uint64(32)
    half = half + (hashed * np.uint64(modulus) >> np.uint64(32))
    return np.where(half >= modulus, half - np.uint64(modulus), half)


def _hashes(positions: Positions, key: int) -> NDArray[np.uint64]:
    hashes: NDArray[np.uint64] = _mix(positions.astype(np.uint64) * _STEP + np.uint64(key))
    return hashes


def _mix(values: Any) -> Any:
    """Let every bit of an int, or of each element of an array, affect all 64 bits.

    This is the finalizer of SplitMix64.
    """
    values = (values ^ (values >> 30)) * _FACTORS[0] & _MASK
    values = (values ^ (values >> 27)) * _FACTORS[1] & _MASK
    return values ^ (values >> 31)
