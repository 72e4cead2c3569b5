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

_PATIENCE_SECONDS: Final = 0.002
"""How long the consumer lets one worker make several cheap batches before it calls the others."""


class NotInTime(Exception):  # noqa: N818 (not an error: the consumer may ask again)
    """The next batch was not finished within the time allowed. Nothing is lost: ask again."""


class FirstStage(Protocol):
    """Where batches enter the pipeline."""

    def open(self, records: list[Record]) -> int:
        """Start work on these batches; gives how many, fewer if nobody is left to make them."""

    def num_samples_per_task(self) -> int:
        """How many samples are worth handing over at once."""

    def has_shareable_work(self) -> bool:
        """Whether work that was handed to one worker could be done by several."""

    def share_work(self) -> None:
        """Call more workers to it."""


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
        is_quick = time.perf_counter() - self._returned < _QUICK_SECONDS
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._signal.is_closed or (position := self._find_finished()) is None:
            # Never wait with room in the window: a batch may need its successors to be at work.
            if self._fill():
                continue
            if self._source_has_ended and not self._pending:
                return None
            if self._signal.is_closed:
                raise RuntimeError(
                    "this iterator is closed and has no workers any more. "
                    "Call iter(loader) for a new one."
                )
            self._wait(deadline)
        # A place is as good as free: let the workers go on while the consumer computes. Unless it
        # is back before they are awake, and they would only fight for the GIL.
        num_together = min(self._num_batches_per_task(), self._capacity)
        if not (is_quick and num_together > 1):
            num_staying = len(self._pending) - 1
            # Batches so cheap that several make one task are opened together: to wake a worker for
            # each would cost more than to make it.
            if num_staying == 0 or self._capacity - num_staying >= num_together:
                self._fill(num_leaving=1)
        record = self._pending[position]
        del self._pending[position]
        self._returned = time.perf_counter()
        return record

    def _find_finished(self) -> int | None:
        """Where in the window the batch is that can be delivered now."""
        while self._pending and self._pending[0].is_finished and self._pending[0].is_exhausted:
            self._pending.popleft()
        for position, record in enumerate(self._pending):
            if record.is_finished and not record.is_exhausted:
                return position
            if self._in_order:
                break
        return None

    def _wait(self, deadline: float | None) -> None:
        """Wait until something may have changed."""
        if self._first_stage.has_shareable_work():
            self._signal.consumer_is_patient = True
            patience = time.monotonic() + _PATIENCE_SECONDS
            in_time = self._signal.wait(patience if deadline is None else min(patience, deadline))
            self._signal.consumer_is_patient = False
            if not in_time:
                # The work was not as cheap as it seemed, or it waits for work behind it.
                self._first_stage.share_work()
        elif not self._signal.wait(deadline):
            raise NotInTime

    def _fill(self, num_leaving: int = 0) -> bool:
        """Open batches until the window is full or the sampler has ended; true if any was."""
        num_free = self._capacity - len(self._pending) + num_leaving
        if self._source_has_ended or num_free <= 0 or self._signal.is_closed:
            return False
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
        return bool(records)

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
