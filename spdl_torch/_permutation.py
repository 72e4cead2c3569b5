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

__all__ = ["Positions", "key_of", "permutation", "uniform"]

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
        key = _mix_int((key ^ (part & _MASK)) + _STEP)
    return key


def permutation(size: int, key: int) -> Callable[[Positions], Positions]:
    """Return a function from positions below `size` to indices below `size`, one to one."""
    if size <= _SHUFFLED_SIZE:
        table = np.argsort(_hashes(np.arange(size), key), kind="stable")
        return table.__getitem__
    return _Feistel(size, key)


def uniform(positions: Positions, key: int) -> NDArray[np.float64]:
    """Return a number of [0, 1) for each position."""
    return (_hashes(positions, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class _Feistel:
    """A permutation made of rounds, each of which is invertible by subtracting what it added.

    A position is a pair (high, low) in a rectangle that is hardly larger than `size`. Each round
    shifts one half by a hash of the other. A result outside of `size` is permuted again until it is
    inside.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._height = isqrt(size - 1) + 1
        self._width = -(-size // self._height)
        self._keys = [key_of(key, number) for number in range(_NUM_ROUNDS)]

    def __call__(self, positions: Positions) -> Positions:
        result = self._permute(positions)
        outside = np.flatnonzero(result >= self._size)
        while len(outside):
            result[outside] = self._permute(result[outside])
            outside = outside[result[outside] >= self._size]
        return result

    def _permute(self, positions: Positions) -> Positions:
        high, low = np.divmod(positions.astype(np.uint64), np.uint64(self._width))
        for number in range(0, _NUM_ROUNDS, 2):
            high = _shift(high, low, self._height, self._keys[number])
            low = _shift(low, high, self._width, self._keys[number + 1])
        return (high * np.uint64(self._width) + low).astype(np.int64)


def _shift(half: Any, other_half: Any, modulus: int, key: int) -> Any:
    hashed = _mix(other_half ^ np.uint64(key)) >> np.uint64(32)
    half = half + (hashed * np.uint64(modulus) >> np.uint64(32))
    return np.where(half >= modulus, half - np.uint64(modulus), half)


def _hashes(positions: Positions, key: int) -> NDArray[np.uint64]:
    return _mix(positions.astype(np.uint64) * np.uint64(_STEP) + np.uint64(key))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Let every bit affect all bits (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FACTORS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * _FACTORS[0] & _MASK
    value = (value ^ (value >> 27)) * _FACTORS[1] & _MASK
    return value ^ (value >> 31)
