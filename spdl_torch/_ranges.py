"""Sets of integers, stored as ranges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any


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
        first = bisect_left(pairs, start, key=_stop_of)
        last = first
        while last < len(pairs) and pairs[last][0] <= stop:
            start, stop = min(start, pairs[last][0]), max(stop, pairs[last][1])
            last += 1
        pairs[first:last] = [(start, stop)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._pairs)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def count(self, below: int | None = None) -> int:
        """Return the size of the set, or how many of its numbers are below this one."""
        if below is None:
            return sum(stop - start for start, stop in self._pairs)
        return sum(min(stop, below) - start for start, stop in self._pairs if start < below)

    @property
    def first_missing(self) -> int:
        return self._pairs[0][1] if self._pairs and self._pairs[0][0] == 0 else 0

    @property
    def stop(self) -> int:
        """The number after the last one of the set."""
        return self._pairs[-1][1] if self._pairs else 0

    @property
    def is_prefix(self) -> bool:
        """Whether no number of the set is above the first missing one."""
        return self.first_missing == self.count()

    def missing_at(self, places: Any) -> Any:
        """Return the number at a place, or at an array of places, among those not in the set."""
        for start, stop in self._pairs:
            places = places + (stop - start) * (places >= start)
        return places

    def filled(self, places: Iterable[tuple[int, int]]) -> Ranges:
        """Return the set with more numbers: those at these places among the ones not in it."""
        result = Ranges(self._pairs)
        for start, stop in places:
            if start < stop:  # What lies between the two numbers and is not added is in the set.
                result.add(self.missing_at(start), self.missing_at(stop - 1) + 1)
        return result

    def gaps(self, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges below stop that are not in the set."""
        gap_start = 0
        for taken_start, taken_stop in [*self._pairs, (stop, stop)]:
            if gap_start < min(taken_start, stop):
                yield gap_start, min(taken_start, stop)
            gap_start = taken_stop

    def as_lists(self) -> list[list[int]]:
        return [[start, stop] for start, stop in self._pairs]


def _stop_of(pair: tuple[int, int]) -> int:
    return pair[1]
