"""The batches in flight of one epoch: drawn, kept in order and taken by the consumer."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from ._batch import Epoch, Locate, PendingBatch
from ._clock import ConsumerClock
from ._stage import Stage
from ._threads import WAIT_SECONDS
from ._transfer_stage import TransferStage

_QUICK_SECONDS: Final = 0.0001
"""A consumer that asks again sooner leaves a worker no time to wake up and be of use."""

_FIRST_WAIT_SECONDS: Final = 0.002
"""How long the consumer lets few workers make cheap batches before it wakes the idle ones too."""

NUM_EARLIER: Final = 16
"""How many indices of earlier batches a batch remembers, as substitutes for bad samples."""


class NotInTime(Exception):  # noqa: N818 (not an error: the consumer may ask again)
    """The next batch was not finished within the timeout. Nothing is lost: ask again."""


class Window:
    """At most `capacity` batches of one epoch that are drawn and not yet delivered.

    Everything here runs in the consumer's thread. Indices are drawn here, a window full at first
    and then one batch for each that is delivered, so that a sampler draws its random numbers where
    and when it does in torch, whatever the workers do. Back-pressure is the absence of a batch.
    """

    def __init__(
        self,
        draws: Iterator[Any],
        first_stage: Stage,
        epoch: Epoch,
        clock: ConsumerClock,
        *,
        last_stage: TransferStage | None,
        capacity: int,
        in_order: bool,
        batched: bool,
        locate: Locate | None,
    ) -> None:
        self._draws = draws
        self._first_stage = first_stage
        self._epoch = epoch
        self._clock = clock
        self._last_stage = last_stage
        self._capacity = capacity
        self._in_order = in_order
        self._batched = batched
        self._locate = locate
        self._pending: deque[PendingBatch] = deque()
        self._has_ended = False
        """Nothing more can be drawn."""
        self._num_drawn = 0
        self._last_indices: list[Any] = []
        self._num_turns_taken = 0
        self._num_turns_told = 0
        self._returned_at = 0.0
        self._process_id = os.getpid()

    def next(self, timeout_seconds: float | None) -> PendingBatch | None:
        """Return the next finished batch, or None at the end of the epoch."""
        now = time.monotonic()
        if self._clock.ready_at is None:
            self._clock.ready_at = now  # Workers are started before.
        is_quick = now - self._returned_at < _QUICK_SECONDS
        deadline = None if timeout_seconds is None else now + timeout_seconds
        num_timeouts = 0
        while True:
            if self._epoch.is_closed or os.getpid() != self._process_id:
                self._check_open()
            self._draw()
            if (batch := self._take_finished()) is not None:
                break
            if self._pending:
                # Never wait with a batch that no worker was woken for.
                self._first_stage.wake(is_needed=True, is_quick=False)
                if self._last_stage is not None:
                    self._tell_turns(self._pending[0].number)
                num_timeouts += not self._wait(num_timeouts, deadline)
            elif self._has_ended:
                return None
            # Else the pending batches turned out to be exhausted: draw again.
        self._draw()
        # Let workers go on while the consumer computes.
        is_needed = not is_quick and bool(self._pending) and not self._pending[0].is_finished
        self._first_stage.wake(is_needed=is_needed, is_quick=is_quick)
        if self._last_stage is not None:
            self._num_turns_taken += batch.turn is not None
            self._tell_turns(batch.number + 1)
        self._returned_at = time.monotonic()
        return batch

    def num_ready(self) -> int:
        """Return how many finished batches wait for the consumer. Any thread may ask."""
        return sum(batch.is_finished for batch in self._pending.copy())

    def _check_open(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "this iterator's worker threads belong to the process that made it, and a fork "
                "does not copy threads. Call iter(loader) in the child process."
            )
        epoch = self._epoch
        if epoch.failure is not None:
            raise RuntimeError(epoch.failure) from epoch.error
        if self._pending or not self._has_ended:
            raise RuntimeError(
                "this iterator is closed and has no workers any more. "
                "Call iter(loader) for a new one, if the loader is not closed too."
            )

    def _draw(self) -> None:
        """Draw batches until the window is full or the sampler has ended."""
        while len(self._pending) < self._capacity and not self._has_ended:
            try:
                drawn = next(self._draws)
                indices = list(drawn) if self._batched else [drawn]
            except StopIteration:
                self._has_ended = True
                return
            except Exception as error:
                # The sampler failed at this batch, not at an earlier one that is in flight.
                batch = PendingBatch(self._epoch, self._num_drawn, None, [])
                batch.fail(0, error)
                batch.finish()
            else:
                # A sampler may change its list later, and an iterator is used up.
                if self._batched and isinstance(drawn, list | Iterator):
                    drawn = indices[:]
                batch = PendingBatch(self._epoch, self._num_drawn, drawn, indices)
                batch.original_indices = indices[:]
                batch.locate = self._locate
                batch.earlier_indices = self._last_indices
                self._last_indices = [*indices, *self._last_indices][:NUM_EARLIER]
                if not self._first_stage.open(batch):
                    self._has_ended = True
                    return
            self._num_drawn += 1
            self._pending.append(batch)

    def _take_finished(self) -> PendingBatch | None:
        """Take the batch that can be delivered now out of the window."""
        pending = self._pending
        # A worker sets `is_exhausted` before `is_finished`, so look at them the other way round.
        while pending and pending[0].is_finished and pending[0].is_exhausted:
            pending.popleft()
        if self._in_order:
            is_ready = pending and pending[0].is_finished and not pending[0].is_exhausted
            return pending.popleft() if is_ready else None
        place = self._first_finished(len(pending))
        # Batches of one worker with its own iterator come in their order: one that was unfinished
        # when it was passed over may have finished since, before the one that was found.
        while place is not None and place != (again := self._first_finished(place + 1)):
            place = again
        if place is None:
            return None
        batch = pending[place]
        del pending[place]
        return batch

    def _first_finished(self, num_batches: int) -> int | None:
        for place, batch in zip(range(num_batches), self._pending, strict=False):
            if batch.is_finished and not batch.is_exhausted:
                return place
        return None

    def _tell_turns(self, first_number: int) -> None:
        """Tell the last stage how many turns were taken, if that has changed.

        Args:
            first_number: of the first batch, in order, that was not taken.

        """
        assert self._last_stage is not None
        # In order, batches that were exhausted or failed on the way had a turn too.
        num_taken = first_number if self._last_stage.in_order else self._num_turns_taken
        if num_taken != self._num_turns_told:
            self._last_stage.advance(self._epoch, num_taken)
            self._num_turns_told = num_taken

    def _wait(self, num_timeouts: int, deadline: float | None) -> bool:
        """Wait until a batch may be finished; return whether a worker said so.

        At first for a moment only, in which the workers need not wake the consumer after each cheap
        batch. Then idle workers are woken too: the work was not as cheap as it seemed, or samples
        wait for one another.
        """
        epoch = self._epoch
        asleep_since = time.monotonic()
        seconds = _FIRST_WAIT_SECONDS if num_timeouts == 0 else WAIT_SECONDS
        if deadline is not None:
            seconds = min(seconds, max(0.0, deadline - asleep_since))
        epoch.defers_wakeup = num_timeouts == 0
        try:
            is_woken = epoch.wakeup.acquire(timeout=seconds)
        finally:
            epoch.defers_wakeup = False
        now = time.monotonic()
        if is_woken:
            if epoch.woken_at > asleep_since:
                self._clock.num_wakeups += 1
                self._clock.wake_seconds += now - epoch.woken_at
        elif deadline is not None and now >= deadline:
            raise NotInTime
        else:
            self._first_stage.wake_idle(only_if_starved=num_timeouts == 0)
        return is_woken
