"""The stage of iterable datasets: each worker makes whole batches of its own iterator."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from ._in_flight import InFlight, of_batch
from ._meter import Meter, StageMeter, WorkerMeter
from ._record import PendingBatch
from ._signal import Signal
from ._stages import BatchStage, Operation, WorkerCursor, forward, note_origin, without_our_frame
from ._workers import Workers

__all__ = ["IterableStage"]

Draw = Callable[[PendingBatch], Any]
"""Draws the samples of one batch from a worker's iterator, and may leave a bookmark in the record,
which says where the iterator is after them. Raises StopIteration when there are none left."""

OpenEpoch = Callable[[], Draw]
"""Starts a worker's iterator afresh."""

SetUpIterable = Callable[[int, WorkerCursor], tuple[OpenEpoch, Operation]]
"""Runs in the worker's thread; gives the worker its iterator and its collate function."""


_Tools = tuple[OpenEpoch, Operation, WorkerMeter, WorkerCursor]


class IterableStage:
    """A stage whose workers each have a queue and an iterator of their own.

    Batches are asked of the workers in turn, and a worker that has nothing left is passed over.
    When it is found out does not matter: what it is asked after its end comes back exhausted.
    """

    def __init__(
        self,
        name: str,
        width: int,
        set_up: SetUpIterable,
        first_worker: Callable[[], int],
        *,
        transfer_stage: BatchStage | None = None,
    ) -> None:
        self._first_worker = first_worker
        """Whose turn it is when an epoch begins."""
        self._iterables = [
            _IterableWorker(name, worker_id, set_up, transfer_stage) for worker_id in range(width)
        ]
        self.workers = [iterable.thread for iterable in self._iterables]
        meters = [iterable.meter for iterable in self._iterables]
        self.meter: Meter = StageMeter(name, meters, has_batches=True)
        self._signal: Signal | None = None
        self._rotation: deque[_IterableWorker] = deque()

    # -- how work enters; runs in the consumer's thread ------------------------------------------

    def open(self, records: list[PendingBatch]) -> int:
        for position, record in enumerate(records):
            if record.signal is not self._signal:  # A new epoch.
                self._signal = record.signal
                self._rotation = deque(self._iterables)
                self._rotation.rotate(-self._first_worker())
            while self._rotation and self._rotation[0].exhausted_in is record.signal:
                self._rotation.popleft()
            if not self._rotation:
                return position
            self._rotation[0].thread.put(record)
            self._rotation.rotate(-1)
        return len(records)

    def num_samples_per_task(self) -> int:
        return 1

    def in_flight(self) -> list[InFlight]:
        return [item for iterable in self._iterables for item in iterable.in_flight()]


class _IterableWorker:
    """One worker and where it is in its iterator."""

    def __init__(
        self,
        name: str,
        worker_id: int,
        set_up: SetUpIterable,
        transfer_stage: BatchStage | None,
    ) -> None:
        self._name = name
        self._set_up = set_up
        self._transfer_stage = transfer_stage
        self._signal: Signal | None = None
        self._draw: Draw | None = None
        self.exhausted_in: Signal | None = None
        """The epoch in which this worker has nothing left, known by its signal."""
        self._at: tuple[PendingBatch, float] | None = None
        """The batch it is at, and since when."""
        self.meter = WorkerMeter(f"{name}-{worker_id}")
        self.tools: dict[int, _Tools] = {}
        self.thread = Workers(name, [worker_id], self)

    def set_up_worker(self, worker_id: int) -> _Tools:
        place = WorkerCursor()
        operations = self._set_up(worker_id, place)
        self.meter.start()
        return *operations, self.meter, place

    def dismiss_worker(self, worker_id: int) -> None:
        self._draw = None
        tools = self.tools.pop(worker_id, None)
        if tools is not None:
            tools[-1].leave()

    def work(self, task: PendingBatch, tools: _Tools) -> None:
        if not task.is_abandoned:
            open_epoch, collate, meter, place = tools
            self._at = task, meter.begin()
            with place.task_context:
                batch = self._make_batch(task, open_epoch, collate, place)
            self._at = None
            meter.end()
            forward(task, batch, self._transfer_stage)
            task.signal.set()

    def in_flight(self) -> list[InFlight]:
        return of_batch(self._name, self._at, self.thread.threads[0])

    def _make_batch(
        self, record: PendingBatch, open_epoch: OpenEpoch, collate: Operation, place: WorkerCursor
    ) -> Any:
        stage = self._name
        try:
            if record.signal is not self._signal:
                self._signal, self._draw = record.signal, None
                self._draw = open_epoch()
            samples = self._draw_samples(record)
            if not record.is_exhausted:
                # What was asked for, or less at the end. Without batching a sample may be a list.
                num_drawn = len(samples) if isinstance(samples, list) else 1
                self.meter.lap(stage, record.number, min(num_drawn, len(record.indices)))
                stage = "collate"
                self.meter.begin_batch(0)
                try:
                    with place.collate_context or contextlib.nullcontext():
                        return collate(samples)
                finally:
                    self.meter.end_batch(stage, record.number)
        except BaseException as error:
            note_origin(error, stage, record, None)
            record.fail(0, without_our_frame(error))
        return None

    def _draw_samples(self, record: PendingBatch) -> Any:
        try:
            if self._draw is not None:  # None: it could not be opened, which has been reported.
                return self._draw(record)
        except StopIteration:
            self._draw = None
        self.exhausted_in = record.signal
        record.is_exhausted = True
        return None
