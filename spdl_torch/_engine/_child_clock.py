"""What the workers in a child process do with their time, as far as the parent has heard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ._clock import Counter, Reading

_MAX_AGE_SECONDS: Final = 1.0
"""Workers that were busy when the child last said so count as busy for so long, if the parent waits
for a batch of this child. A child at work sends its figures every half second or more often."""


class Figures(NamedTuple):
    """The clocks of a child since it began an epoch."""

    epoch_id: int
    read_at: float
    """`time.monotonic()`, which is the same in all processes."""
    readings: list[Reading]


class _Heard(NamedTuple):
    """All that the parent knows of the clocks in one child. It is replaced, never changed."""

    epoch_id: int
    kept: Sequence[Reading]
    """Of earlier epochs, and of child processes that have died."""
    figures: Figures | None
    """Of the epoch and the process that run now."""


class ChildClock:
    """The clocks of one child process and of those that had its place before.

    Clocks of a new process begin at zero, and the last figures of an epoch may be sent before the
    child has stopped to work on it. So a child sends what it has done since the epoch began, and
    the parent adds that up: what is read here never decreases by more than the estimate for work in
    progress. One thread at a time writes this; any thread may read it.
    """

    def __init__(self) -> None:
        self._heard = _Heard(-1, (), None)
        self.is_abandoned = False
        """The epoch that the figures are about is over."""

    def begin(self, epoch_id: int) -> None:
        """An epoch begins, or goes on in a new process."""
        kept = [reading._replace(num_in_flight=0) for reading in _readings(self._heard)]
        self._heard = _Heard(epoch_id, kept, None)
        self.is_abandoned = False

    def receive(self, figures: Figures) -> None:
        """Accept what the child has sent. Two of its threads may send in the wrong order."""
        last = self._heard.figures
        is_newer = last is None or last.read_at < figures.read_at
        if figures.epoch_id == self._heard.epoch_id and is_newer:
            self._heard = self._heard._replace(figures=figures)

    def read(self, now: float, *, has_work: bool) -> list[Reading]:
        """Return what the workers have done until now, if the child has work to do."""
        heard = self._heard
        readings = _readings(heard)
        if heard.figures is None or not has_work or self.is_abandoned:
            return [reading._replace(num_in_flight=0) for reading in readings]
        seconds = min(max(0.0, now - heard.figures.read_at), _MAX_AGE_SECONDS)
        for reading in readings:
            reading.counter.busy_seconds += reading.num_in_flight * seconds
        return readings


def _readings(heard: _Heard) -> list[Reading]:
    current = [] if heard.figures is None else heard.figures.readings
    return added_up([heard.kept, current], adds_width=False)


def added_up(groups: Iterable[Sequence[Reading]], *, adds_width: bool = True) -> list[Reading]:
    """Return the sum of the readings of each stage."""
    found: dict[str, Reading] = {}
    for one in (reading for group in groups for reading in group):
        counter, width, num_in_flight = Counter(), one.width, one.num_in_flight
        if (before := found.get(one.name)) is not None:
            counter.combine(before.counter)
            num_in_flight += before.num_in_flight
            if adds_width and width is not None:
                width += before.width or 0
        counter.combine(one.counter)
        found[one.name] = one._replace(counter=counter, width=width, num_in_flight=num_in_flight)
    return list(found.values())
