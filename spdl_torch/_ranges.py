"""Sets of integers, stored as ranges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Ranges"]


class Ranges:
    """A set of integers from 0 up, stored as sorted pairs (start, stop) with gaps between them."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._pairs: list[tuple[int, int]] = []
        for start, stop in pairs:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        pairs = self._pairs
        if pairs and pairs[-1][1] == start:  # The most frequent case.
            pairs[-1] = (pairs[-1][0], stop)
            return
        first = bisect_left(pairs, start, key=_stop_of)
        last = first
        while last < len(pairs) and pairs[last][0] <= stop:
            start, stop = min(start, pairs[last][0]), max(stop, pairs[last][1])
            last += 1
        pairs[first:last] = [(start, stop)]

    def update(self, other: Ranges) -> None:
        for start, stop in other:
            self.add(start, stop)

    def copy(self) -> Ranges:
        return Ranges(self._pairs)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._pairs)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self._pairs == other._pairs

    __hash__ = None  # type: ignore[assignment]

    def count(self, below: int | None = None) -> int:
        """Return the size of the set, or how many of its numbers are below this one."""
        if below is None:
            return sum(stop - start for start, stop in self._pairs)
        return sum(min(stop, below) - start for start, stop in self._pairs if start < below)

    @property
    def first_missing(self) -> int:
        if self._pairs and self._pairs[0][0] == 0:
            return self._pairs[0][1]
        return 0

    @property
    def is_prefix(self) -> bool:
        """Whether no number of the set is above the first missing one."""
        return not self._pairs or (len(self._pairs) == 1 and self._pairs[0][0] == 0)

    def missing_at(self, places: Any) -> Any:
        """Return the number at a place, or at an array of places, among those not in the set."""
        for start, stop in self._pairs:
            places = places + (stop - start) * (places >= start)
        return places

    def missing_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges at the places from start to stop among the numbers not in the set."""
        if start >= stop:
            return
        first, last = self.missing_at(start), self.missing_at(stop - 1)
        for taken_start, taken_stop in self._pairs:
            if first < taken_start <= last:
                yield first, taken_start
                first = taken_stop
        yield first, last + 1

    def gaps(self, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges below stop that are not in the set."""
        missing_from = 0
        for taken_start, taken_stop in self._pairs:
            if taken_start >= stop:
                break
            if missing_from < taken_start:
                yield missing_from, taken_start
            missing_from = taken_stop
        if missing_from < stop:
            yield missing_from, stop

    def as_lists(self) -> list[list[int]]:
        return [[start, stop] for start, stop in self._pairs]


def _stop_of(pair: tuple[int, int]) -> int:
    return pair[1]
