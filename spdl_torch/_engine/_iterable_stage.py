"""The stage of iterable datasets: each worker makes whole batches from its own iterator."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

from ._batch import Epoch, PendingBatch, note_origin, without_our_frame
from ._clock import ThreadStageClock, WorkerClock
from ._in_flight import InFlight, batch_in_flight
from ._stage import Operation, Stage, WorkerCursor, forward
from ._threads import Workers

Draw = Callable[[PendingBatch], Any]
"""Draws the samples of one batch from a worker's iterator and may leave a bookmark in the batch's
`position`, which says where the iterator is after them. Raises StopIteration at the end."""

OpenEpoch = Callable[[], Draw]
"""Starts a worker's iterator afresh."""

SetUpIterable = Callable[[int, WorkerCursor], tuple[OpenEpoch, Operation]]
"""Runs in the worker's thread; returns the worker's iterator and its collate function."""

_Tools = tuple[OpenEpoch, Operation, WorkerCursor]


class IterableStage(Stage):
    """A stage whose workers each have a queue and an iterator of their own.

    Batches are asked of the workers in turn, and a worker that has nothing left is skipped. It does
    not matter when the end is noticed: a batch asked of it after its end comes back exhausted.
    """

    def __init__(
        self,
        name: str,
        worker_ids: Sequence[int],
        set_up: SetUpIterable,
        first_worker: Callable[[], int],
        *,
        transfer_stage: Stage | None = None,
    ) -> None:
        self._first_worker = first_worker
        """Returns the worker whose turn it is when an epoch begins."""
        self._worker_ids = worker_ids
        self._iterables = [
            _IterableWorker(name, worker_id, set_up, transfer_stage) for worker_id in worker_ids
        ]
        self.groups = [iterable.workers for iterable in self._iterables]
        clocks = [iterable.clock for iterable in self._iterables]
        self.clock = ThreadStageClock(clocks, name, "collate")
        self._epoch: Epoch | None = None
        self._rotation: deque[_IterableWorker] = deque()

    def open(self, batch: PendingBatch) -> bool:
        if batch.epoch is not self._epoch:
            self._epoch = batch.epoch
            self._rotation = deque(self._iterables)
            self._rotation.rotate(-self._first_worker())
        while self._rotation and self._rotation[0].exhausted_in is batch.epoch:
            self._rotation.popleft()
        if not self._rotation:
            return False
        self._rotation[0].workers.queue.put(batch)
        self._rotation.rotate(-1)
        return True

    def ask(self, worker_id: int, batch: PendingBatch) -> None:
        """Have one worker make a batch, if its turn is decided elsewhere."""
        self._iterables[self._worker_ids.index(worker_id)].workers.queue.put(batch)

    def in_flight(self) -> list[InFlight]:
        return [item for iterable in self._iterables for item in iterable.in_flight()]


class _IterableWorker:
    """One worker and its place in its iterator."""

    def __init__(
        self, name: str, worker_id: int, set_up: SetUpIterable, transfer_stage: Stage | None
    ) -> None:
        self._name = name
        self._set_up = set_up
        self._transfer_stage = transfer_stage
        self._epoch: Epoch | None = None
        self._draw: Draw | None = None
        self.exhausted_in: Epoch | None = None
        """The epoch in which this worker has nothing left."""
        self._current: tuple[PendingBatch, float] | None = None
        """The batch it is working on, and since when."""
        self.clock = WorkerClock(f"{name}-{worker_id}")
        self.tools: dict[int, _Tools] = {}
        self.contexts: dict[int, Context] = {}
        self.workers = Workers(name, [worker_id], self)

    def set_up_worker(self, worker_id: int) -> _Tools:
        cursor = WorkerCursor()
        open_epoch, collate = self._set_up(worker_id, cursor)
        self.clock.start()
        return open_epoch, collate, cursor

    def dismiss_worker(self, worker_id: int) -> None:
        self._draw = None
        if (tools := self.tools.pop(worker_id, None)) is not None:
            tools[-1].task_context = contextlib.nullcontext()  # It may refer to its cursor.

    def work(self, task: PendingBatch, tools: _Tools) -> None:
        if task.epoch.is_closed:
            return
        open_epoch, collate, cursor = tools
        with cursor.task_context:
            self._current = task, self.clock.begin()
            output = self._make_batch(task, open_epoch, collate, cursor)
            self._current = None
            self.clock.current = None
        forward(task, output, self._transfer_stage)
        task.epoch.wake_consumer()

    def in_flight(self) -> list[InFlight]:
        return batch_in_flight(self._name, self._current, self.workers.threads[0])

    def _make_batch(
        self, batch: PendingBatch, open_epoch: OpenEpoch, collate: Operation, cursor: WorkerCursor
    ) -> Any:
        clock, stage = self.clock, self._name
        try:
            if batch.epoch is not self._epoch:
                self._epoch, self._draw = batch.epoch, None
                self._draw = open_epoch()
            samples = self._draw_samples(batch)
            if batch.is_exhausted:
                return None
            # As many as were asked for, or fewer at the end. Without batching a sample may be a
            # list.
            num_drawn = len(samples) if isinstance(samples, list) else 1
            clock.lap(stage, batch.number, min(num_drawn, len(batch.indices)))
            stage = "collate"
            clock.current = clock.batches
            try:
                with cursor.collate_context or contextlib.nullcontext():
                    return collate(samples)
            finally:
                clock.lap(stage, batch.number, 1)
        except BaseException as error:
            note_origin(error, stage, batch, None)
            batch.fail(0, without_our_frame(error))
        return None

    def _draw_samples(self, batch: PendingBatch) -> Any:
        try:
            if self._draw is not None:  # None: it could not be opened, which was reported.
                return self._draw(batch)
        except StopIteration:
            self._draw = None
        self.exhausted_in = batch.epoch
        batch.is_exhausted = True
        return None
