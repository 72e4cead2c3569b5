"""One epoch as its consumer sees it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Protocol

from ._meter import ConsumerMeter
from ._record import Locate, PendingBatch
from ._signal import Signal

__all__ = ["NUM_BEFORE", "FirstStage", "NotInTime", "Window"]


_QUICK_SECONDS: Final = 0.0001
"""A consumer that is back sooner leaves no time for a worker to wake up and be of use."""

_PATIENCE_SECONDS: Final = 0.002
"""How long the consumer lets one worker make several cheap batches before it calls the others."""

_LONG_PATIENCE_SECONDS: Final = 1.0
"""How long it goes on so if all workers who could be waiting for that one are busy."""


NUM_BEFORE: Final = 16
"""How many indices of batches before a batch are remembered, for samples that cannot be made."""


class NotInTime(Exception):  # noqa: N818 (not an error: the consumer may ask again)
    """The next batch was not finished within the time allowed. Nothing is lost: ask again."""


class FirstStage(Protocol):
    """Where batches enter the pipeline."""

    def open(self, records: list[PendingBatch]) -> int:
        """Start work on these batches; gives how many, fewer if nobody is left to make them."""

    def num_samples_per_task(self) -> int:
        """How many samples are worth handing over at once."""


class LastStage(Protocol):
    """A stage that is told how far the consumer has come."""

    in_order: bool

    def advance(self, signal: Signal, num_taken: int) -> None:
        """So many turns were taken."""


class Window:
    """The batches of one epoch that may be in flight, at most `capacity` of them.

    Everything here runs in the consumer's thread. Indices are drawn here, a window full at the
    start and then one batch for each that is delivered, so that a sampler's random numbers
    are drawn where and when torch draws them, whatever the workers do meanwhile. Back-pressure is
    the absence of a new record.
    """

    def __init__(
        self,
        source: Iterator[Any],
        first_stage: FirstStage,
        signal: Signal,
        meter: ConsumerMeter,
        *,
        last_stage: LastStage | None = None,
        capacity: int,
        in_order: bool,
        batched: bool,
        locate: Locate | None = None,
    ) -> None:
        self._source = source
        self._first_stage = first_stage
        self._last_stage = last_stage
        self._capacity = capacity
        self._in_order = in_order
        self._batched = batched
        self._locate = locate
        self._pending: deque[PendingBatch] = deque()
        self._unopened: list[PendingBatch] = []
        """The last of the pending records, which no worker has been told of."""
        self._num_drawn = 0
        self._is_drawing = False
        """Still true at the next draw, if an interrupt came in the middle of the last."""
        self._last_indices: list[Any] = []
        self._num_turns_taken = 0
        self._num_turns_told = 0
        self._source_has_ended = False
        self._meter = meter
        self._returned = 0.0
        self._patience_seconds = _PATIENCE_SECONDS
        self._signal = signal

    def next(self, timeout_seconds: float | None) -> PendingBatch | None:
        """The next finished batch, or None at the end of the epoch.

        An interrupted or timed-out call loses nothing: a finished record stays where it is until
        the step in which it is returned. What an interrupt cannot leave whole, it leaves unusable.
        """
        now = time.monotonic()
        is_quick = now - self._returned < _QUICK_SECONDS
        self._patience_seconds = _PATIENCE_SECONDS
        deadline = None if timeout_seconds is None else now + timeout_seconds
        while True:
            if self._signal.error is not None:
                raise RuntimeError(
                    "the event loop that runs the dataset's load has ended. "
                    "Do not stop the loop or cancel its tasks in load."
                ) from self._signal.error
            if self._signal.is_closed and not (self._source_has_ended and not self._pending):
                raise RuntimeError(
                    "this iterator is closed and has no workers any more. "
                    "Call iter(loader) for a new one, if the loader is not closed too."
                )
            self._draw(self._capacity)
            if (position := self._find_finished()) is not None:
                break
            if not self._pending:
                if self._source_has_ended:
                    return None
                continue  # What was pending has turned out to be exhausted: draw again.
            # Never wait with a batch that no worker has been told of: another may depend on it.
            if not self._open():
                self._advance(self._pending[0].number)
                self._wait(deadline)
        self._draw(self._capacity + 1)
        # Let the workers go on while the consumer computes. Unless it is back before they are
        # awake, and they would only fight for the GIL; and batches so cheap that several make one
        # task are opened together: to wake a worker for each would cost more than to make it.
        num_together = self._num_batches_per_task()
        num_working = len(self._pending) - len(self._unopened) - 1
        if num_together <= 1 or (
            not is_quick and (num_working <= 0 or len(self._unopened) >= num_together)
        ):
            self._open()
        record = self._pending[position]
        # Before it is taken out: an interrupted call must not lose it. Then one batch too many may
        # be let on, but never one too few.
        self._num_turns_taken += record.turn is not None
        self._advance(record.number + 1)
        del self._pending[position]
        self._returned = time.monotonic()
        return record

    def num_ready(self) -> int:
        """How many batches are finished and wait for the consumer. Any thread may ask."""
        return sum(record.is_finished for record in self._pending.copy())

    def _draw(self, num_pending: int) -> None:
        """Draw batches until there are so many pending, or the sampler has ended."""
        if self._is_drawing:
            raise RuntimeError(
                "the loop was interrupted while the sampler was asked for a batch, and nobody "
                "knows whether it has gone on. Call iter(loader), or load a saved state."
            )
        self._is_drawing = True
        self._draw_some(num_pending)
        self._is_drawing = False

    def _draw_some(self, num_pending: int) -> None:
        while len(self._pending) < num_pending and not self._source_has_ended:
            try:
                drawn = next(self._source)
                indices = list(drawn) if self._batched else [drawn]
            except StopIteration:
                self._source_has_ended = True
                return
            except Exception as error:
                # The sampler failed at this batch, not at an earlier one that is still in flight.
                record = PendingBatch(self._num_drawn, None, [], self._signal)
                record.fail(0, error)
                record.finish()
            else:
                # A sampler may use its list again, and an iterator is used up.
                if isinstance(drawn, list | Iterator):
                    drawn = indices
                record = PendingBatch(self._num_drawn, drawn, indices, self._signal)
                record.locate = self._locate
                record.originals = indices[:]
                record.before = self._last_indices
                self._last_indices = [*indices, *record.before][:NUM_BEFORE]
                self._unopened.append(record)
            self._num_drawn += 1
            self._pending.append(record)

    def _open(self) -> bool:
        """Tell the workers of every batch that was drawn; false if they knew them all."""
        if not self._unopened:
            return False
        records, self._unopened = self._unopened, []
        try:
            num_opened = self._first_stage.open(records)
        except BaseException:
            # Ctrl-C in the middle: nobody knows which of them the workers know. They must not be
            # waited for by whoever goes on with the same iterator.
            for record in records:
                record.abandon(RuntimeError("the loop was interrupted while it began this batch"))
            raise
        if num_opened < len(records):
            self._source_has_ended = True
            for record in records[num_opened:]:
                self._pending.remove(record)
        return True

    def _find_finished(self) -> int | None:
        """Where in the window the batch is that can be delivered now."""
        while self._pending and self._pending[0].is_exhausted:
            self._pending.popleft()
        if self._in_order:
            return self._first_finished(1)
        position = self._first_finished(len(self._pending))
        # One worker's batches come in their order, if it has an iterator of its own. The one before
        # this may have been finished after it was looked at; but then it is finished now.
        while position is not None and position != (again := self._first_finished(position + 1)):
            position = again
        return position

    def _first_finished(self, num_records: int) -> int | None:
        for position, record in zip(range(num_records), self._pending, strict=False):
            if record.is_finished and not record.is_exhausted:
                return position
        return None

    def _advance(self, first_number: int) -> None:
        """Tell the last stage how many turns were taken, if it does not know.

        Args:
            first_number: of the first batch, in order, that has not been taken.

        """
        if self._last_stage is None:
            return
        # In order, those that were passed over or failed on the way had a turn too.
        num_taken = first_number if self._last_stage.in_order else self._num_turns_taken
        if num_taken != self._num_turns_told:
            self._last_stage.advance(self._signal, num_taken)
            self._num_turns_told = num_taken

    def _wait(self, deadline: float | None) -> None:
        """Wait until something may have changed."""
        if any(record.has_shareable_work() for record in self._pending):
            is_first_time = self._patience_seconds == _PATIENCE_SECONDS
            patience = time.monotonic() + self._patience_seconds
            if deadline is not None:
                patience = min(patience, deadline)
            self._signal.consumer_is_patient = is_first_time
            try:
                in_time = self._wait_for_signal(patience)
            finally:
                self._signal.consumer_is_patient = False
            if not in_time:
                # The work was not as cheap as it seemed, or it waits for work behind it.
                for record in self._pending:
                    record.share_work(if_awaited=is_first_time)
                self._patience_seconds = _LONG_PATIENCE_SECONDS
        elif not self._wait_for_signal(deadline):
            raise NotInTime

    def _wait_for_signal(self, deadline: float | None) -> bool:
        asleep_since = time.monotonic()
        in_time = self._signal.wait(deadline)
        set_at = self._signal.set_at
        if in_time and set_at > asleep_since:
            self._meter.wake_seconds += time.monotonic() - set_at
            self._meter.num_wakes += 1
        return in_time

    def _num_batches_per_task(self) -> int:
        num_samples = len(self._pending[0].indices) or 1
        return min(self._first_stage.num_samples_per_task() // num_samples, self._capacity)
