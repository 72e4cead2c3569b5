"""The stage behind collate: one worker that takes finished batches on, a few ahead of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ._in_flight import InFlight, of_batch
from ._meter import Meter, StageMeter, WorkerMeter
from ._record import PendingBatch
from ._signal import Signal
from ._stages import Operation, note_origin, without_our_frame
from ._workers import Workers

__all__ = ["Taken", "TransferStage"]


class Taken(NamedTuple):
    """What the consumer tells the worker."""

    signal: Signal
    num_taken: int


class TransferStage:
    """A last stage that is never more than `num_ahead` batches ahead of the consumer.

    The window may hold many batches more, which wait here: where a batch goes to, room is scarce.

    Every batch has a *turn*, and goes on when fewer than `num_ahead` turns are before it that the
    consumer has not taken. With `in_order` the turns are the numbers of the batches. So the batch
    that the consumer waits for never finds the room taken by later ones: it would wait for ever.
    Otherwise a batch gets the next turn when it arrives.

    All state is the worker's own. Batches, and what the consumer has taken, come to it as tasks.
    """

    def __init__(
        self, name: str, set_up: Callable[[], Operation], *, num_ahead: int, in_order: bool
    ) -> None:
        self._name = name
        self._set_up = set_up
        self._num_ahead = num_ahead
        self.in_order = in_order
        self._signal: Signal | None = None
        self._num_arrived = 0
        self._num_taken = 0
        self._waiting: list[PendingBatch] = []
        self._at: tuple[PendingBatch, float] | None = None
        """The batch it takes on now, and since when."""
        self.tools: dict[int, Operation] = {}
        self._workers = Workers(name, [0], self)
        self.workers = [self._workers]
        self._meter = WorkerMeter(name)
        self.meter: Meter = StageMeter(name, [self._meter])

    # -- how work enters -------------------------------------------------------------------------

    def put(self, record: PendingBatch) -> None:
        """Take over a record whose batch is made."""
        self._workers.put(record)

    def advance(self, signal: Signal, num_taken: int) -> None:
        """Let the batches go on whose turn has come, now that so many turns were taken."""
        self._workers.put(Taken(signal, num_taken))

    # -- what the worker does --------------------------------------------------------------------

    def set_up_worker(self, worker_id: int) -> Operation:  # noqa: ARG002 (there is but one)
        operation = self._set_up()
        self._meter.start()
        return operation

    def dismiss_worker(self, worker_id: int) -> None:
        self._waiting.clear()
        self.tools.pop(worker_id, None)

    def work(self, task: PendingBatch | Taken, tools: Operation) -> None:
        if task.signal.is_closed:
            return
        if task.signal is not self._signal:  # A new epoch.
            self._signal = task.signal
            self._waiting.clear()
            self._num_arrived = self._num_taken = 0
        if isinstance(task, PendingBatch):
            task.turn = task.number if self.in_order else self._num_arrived
            self._num_arrived += 1
            self._waiting.append(task)
        else:
            self._num_taken = task.num_taken
        while (record := self._next_in_turn()) is not None:
            self._take_on(record, tools)

    def in_flight(self) -> list[InFlight]:
        return of_batch(self._name, self._at, self._workers.threads[0])

    def _next_in_turn(self) -> PendingBatch | None:
        record = min(self._waiting, key=_turn, default=None)
        if record is None or _turn(record) >= self._num_taken + self._num_ahead:
            return None
        self._waiting.remove(record)
        return record

    def _take_on(self, record: PendingBatch, operation: Operation) -> None:
        batch = None
        if not record.is_abandoned and record.error is None:
            self._at = record, self._meter.begin()
            try:
                batch = operation(record.batch)
            except BaseException as error:
                note_origin(error, self._name, record, None)
                record.fail(0, without_our_frame(error))
            self._meter.lap(self._name, record.number, 1)
            self._meter.end()
        self._at = None
        record.finish(batch)
        record.signal.set()


def _turn(record: PendingBatch) -> int:
    assert record.turn is not None
    return record.turn
