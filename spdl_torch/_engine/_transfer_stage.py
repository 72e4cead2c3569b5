"""The stage behind collate: one worker that transfers finished batches, a few ahead of the loop."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import NamedTuple

from ._batch import Epoch, PendingBatch, note_origin, without_our_frame
from ._clock import ThreadStageClock, WorkerClock
from ._in_flight import InFlight, batch_in_flight
from ._stage import Operation, Stage
from ._threads import Workers


class Taken(NamedTuple):
    """A message from the consumer to the worker."""

    epoch: Epoch
    num_taken: int


class TransferStage(Stage):
    """A last stage that is never more than `num_ahead` batches ahead of the consumer.

    The window may hold many batches more, which wait here: memory on the device is scarce.

    Every batch has a *turn*, and is transferred when fewer than `num_ahead` turns are before it
    that the consumer has not taken. With `in_order` the turns are the numbers of the batches. So
    the batch that the consumer waits for never finds the room taken by later ones, which would be a
    deadlock. Otherwise a batch gets the next turn when it arrives.

    All state belongs to the worker. Batches, and how many the consumer has taken, reach it as
    tasks.
    """

    def __init__(
        self, name: str, set_up: Callable[[], Operation], *, num_ahead: int, in_order: bool
    ) -> None:
        self._name = name
        self._set_up = set_up
        self._num_ahead = num_ahead
        self.in_order = in_order
        self._epoch: Epoch | None = None
        self._num_arrived = 0
        self._num_taken = 0
        self._waiting: list[PendingBatch] = []
        self._current: tuple[PendingBatch, float] | None = None
        """The batch it is transferring, and since when."""
        self.tools: dict[int, Operation] = {}
        self.contexts: dict[int, Context] = {}
        self._workers = Workers(name, [0], self)
        self.groups = [self._workers]
        self._clock = WorkerClock(name)
        self.clock = ThreadStageClock([self._clock], name)

    def open(self, batch: PendingBatch) -> bool:
        """Accept a batch that is collated."""
        self._workers.queue.put(batch)
        return True

    def advance(self, epoch: Epoch, num_taken: int) -> None:
        """Transfer the batches whose turn has come, now that so many turns were taken."""
        self._workers.queue.put(Taken(epoch, num_taken))

    def set_up_worker(self, worker_id: int) -> Operation:  # noqa: ARG002 (there is only one)
        operation = self._set_up()
        self._clock.start()
        return operation

    def dismiss_worker(self, worker_id: int) -> None:
        self._waiting.clear()
        self.tools.pop(worker_id, None)

    def work(self, task: PendingBatch | Taken, tools: Operation) -> None:
        if task.epoch.is_closed:
            return
        if task.epoch is not self._epoch:
            self._epoch = task.epoch
            self._waiting.clear()
            self._num_arrived = self._num_taken = 0
        if isinstance(task, PendingBatch):
            task.turn = task.number if self.in_order else self._num_arrived
            self._num_arrived += 1
            self._waiting.append(task)
        else:
            self._num_taken = task.num_taken
        while (batch := self._next_in_turn()) is not None:
            self._transfer(batch, tools)

    def in_flight(self) -> list[InFlight]:
        return batch_in_flight(self._name, self._current, self._workers.threads[0])

    def _next_in_turn(self) -> PendingBatch | None:
        batch = min(self._waiting, key=_turn, default=None)
        if batch is None or _turn(batch) >= self._num_taken + self._num_ahead:
            return None
        self._waiting.remove(batch)
        return batch

    def _transfer(self, batch: PendingBatch, operation: Operation) -> None:
        output = None
        if not batch.epoch.is_closed and batch.error is None:
            self._current = batch, self._clock.begin()
            try:
                output = operation(batch.output)
            except BaseException as error:
                note_origin(error, self._name, batch, None)
                batch.fail(0, without_our_frame(error))
            self._clock.lap(self._name, batch.number, 1)
            self._clock.current = None
        self._current = None
        batch.finish(output)
        batch.epoch.wake_consumer()


def _turn(batch: PendingBatch) -> int:
    assert batch.turn is not None
    return batch.turn
