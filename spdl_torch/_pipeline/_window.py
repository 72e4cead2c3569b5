"""One epoch as its consumer sees it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Protocol

from ._record import Record
from ._signal import Signal

__all__ = ["FirstStage", "NotInTime", "Window"]


_QUICK_SECONDS: Final = 0.0001
"""A consumer that is back sooner leaves no time for a worker to wake up and be of use."""


class NotInTime(Exception):  # noqa: N818 (not an error: the consumer may ask again)
    """The next batch was not finished within the time allowed. Nothing is lost: ask again."""


class FirstStage(Protocol):
    """Where batches enter the pipeline."""

    def open(self, records: list[Record]) -> int:
        """Start work on these batches; gives how many, fewer if nobody is left to make them."""

    def num_samples_per_task(self) -> int:
        """How many samples are worth handing over at once."""


class Window:
    """The batches of one epoch that may be in flight, at most `capacity` of them.

    Everything but `close` runs in the consumer's thread. Indices are drawn here, so that a
    sampler's random numbers are drawn where and when torch draws them. Back-pressure is the
    absence of a new record.
    """

    def __init__(
        self,
        source: Iterator[Any],
        first_stage: FirstStage,
        *,
        capacity: int,
        in_order: bool,
        batched: bool,
    ) -> None:
        self._source = source
        self._first_stage = first_stage
        self._capacity = capacity
        self._in_order = in_order
        self._batched = batched
        self._pending: deque[Record] = deque()
        self._num_drawn = 0
        self._num_samples_per_batch = 0
        self._returned = 0.0
        self._source_has_ended = False
        self._signal = Signal()

    def close(self) -> None:
        """Abandon what is in flight and wake the consumer. May be called from any thread."""
        self._signal.close()

    def next(self, timeout_seconds: float | None) -> Record | None:
        """The next finished batch, or None at the end of the epoch.

        An interrupted or timed-out call loses nothing: a finished record stays where it is until
        the step in which it is returned.
        """
        called = time.perf_counter()
        consumer_is_quick = called - self._returned < _QUICK_SECONDS
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            if self._source_has_ended and not self._pending:
                return None
            if self._signal.is_closed:
                raise RuntimeError(
                    "this iterator is closed and has no workers any more. "
                    "Call iter(loader) for a new one."
                )
            self._fill()
            if not self._pending:
                return None
            position = self._find_finished()
            if position is None:
                if not self._signal.wait(deadline):
                    raise NotInTime
                continue
            record = self._pending[position]
            if record.is_exhausted:
                del self._pending[position]
                continue
            # Its place is as good as free: let the workers go on while the consumer computes.
            # Unless it is back before they are awake and they would only fight for the GIL.
            if not (consumer_is_quick and self._num_batches_per_task() > 1):
                self._fill(num_leaving=1)
            del self._pending[position]
            self._returned = time.perf_counter()
            return record

    def _fill(self, num_leaving: int = 0) -> None:
        """Open batches until the window is full or the sampler has ended.

        Batches so cheap that several of them make one task are opened together, once there is
        room for as many: waking a worker for each would cost more than making it.
        """
        num_staying = len(self._pending) - num_leaving
        num_free = self._capacity - num_staying
        if self._source_has_ended or num_free <= 0:
            return
        if num_staying > 0 and num_free < min(self._num_batches_per_task(), self._capacity):
            return
        records: list[Record] = []
        while len(records) < num_free and (record := self._draw()) is not None:
            records.append(record)
        self._source_has_ended = len(records) < num_free
        to_open = [record for record in records if not record.is_finished]
        num_opened = self._first_stage.open(to_open)
        if num_opened < len(to_open):
            self._source_has_ended = True
            records = to_open[:num_opened]
        self._pending.extend(records)

    def _num_batches_per_task(self) -> int:
        return self._first_stage.num_samples_per_task() // max(self._num_samples_per_batch, 1)

    def _draw(self) -> Record | None:
        try:
            drawn = next(self._source)
            indices = list(drawn) if self._batched else [drawn]
        except StopIteration:
            return None
        except Exception as error:
            # The sampler failed at this batch, and not at an earlier one that is still in flight.
            record = Record(self._num_drawn, None, [], self._signal)
            record.fail(0, error)
            record.finish()
        else:
            record = Record(self._num_drawn, drawn, indices, self._signal)
            self._num_samples_per_batch = len(indices)
        self._num_drawn += 1
        return record

    def _find_finished(self) -> int | None:
        if self._in_order:
            return 0 if self._pending[0].is_finished else None
        for position, record in enumerate(self._pending):
            if record.is_finished:
                return position
        return None
