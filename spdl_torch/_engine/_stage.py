"""The stage whose workers are threads: they pull slots from the oldest batch that has some left."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ._batch import Epoch, PendingBatch, check_count, note_origin, without_our_frame
from ._clock import SPAN_SECONDS, StageClock, ThreadStageClock, WorkerClock
from ._in_flight import InFlight, stack_lines
from ._threads import TaskQueue, WorkerGroup, Workers

Operation = Callable[[Any], Any]

_no_context = contextlib.nullcontext()

_COLLATE: Final = "collate"
"""The name of the work on a batch whose slots are all settled."""

_HAND_OVER_SECONDS: Final = 0.0003
"""Work that takes less is not worth waking another thread, which costs some ten microseconds."""

_SHARE_SECONDS: Final = 0.001
"""Samples that take longer each are worth as many workers as there are samples."""


class Stage:
    """One function and its workers. Stages override what applies to them."""

    groups: Sequence[WorkerGroup]
    clock: StageClock

    def open(self, batch: PendingBatch) -> bool:
        """Accept a new batch; return False if no worker has anything left to make it of."""
        raise NotImplementedError

    def put(self, batch: PendingBatch, slots: Sequence[int]) -> None:
        """Accept slots of a batch, in ascending order, from the stage before."""
        raise NotImplementedError

    def collate(self, batch: PendingBatch) -> None:
        """Make a batch whose slots are all settled."""
        raise NotImplementedError

    def wake(self, *, is_needed: bool, is_quick: bool) -> None:
        """Wake workers for opened batches, if accepting them has not done so.

        Args:
            is_needed: the consumer waits for them. Otherwise, only if they are worth a wake-up.
            is_quick: the consumer comes back at once, and would compete with workers for the GIL.

        """

    def wake_idle(self, *, only_if_starved: bool) -> None:
        """Wake all idle workers that have work.

        Args:
            only_if_starved: not those whose results the next stage is too busy to take.

        """

    def has_idle_worker(self) -> bool:
        return True

    def in_flight(self) -> list[InFlight]:
        """Return what the workers are doing."""
        raise NotImplementedError


OnSampleError = Callable[[PendingBatch, int, str, BaseException], BaseException | None]
"""Called with a batch, the slot of a failed sample, the stage and the error. Has another sample
made for the slot, or returns the error that the slot ends in."""


class WorkerCursor:
    """What a worker is working on, and the contexts in which it works."""

    __slots__ = ("__weakref__", "batch", "collate_context", "since", "slot", "task_context")

    WHOLE: Final = -1
    """Instead of a slot: all samples of a batch at once."""
    COLLATE: Final = -2
    """Instead of a slot: making the batch of its samples."""

    def __init__(self) -> None:
        self.batch: PendingBatch | None = None
        self.slot = 0
        self.since = 0.0
        """When it began with the sample, if samples are timed."""
        self.task_context: AbstractContextManager[Any] = contextlib.nullcontext()
        """Entered for each task and left before the thread waits."""
        self.collate_context: AbstractContextManager[Any] | None = None
        """Entered for each batch that is made of samples, if there is one."""


class Pace:
    """How long a sample takes, on average over the last ones."""

    def __init__(self) -> None:
        self.seconds_per_sample = math.inf

    def observe(self, num_samples: int, seconds: float) -> None:
        # Workers may overwrite each other's estimate: losing one observation does no harm.
        if num_samples == 0:
            return
        if self.seconds_per_sample == math.inf:
            self.seconds_per_sample = seconds / num_samples
        else:
            weight = num_samples / (num_samples + 63)
            self.seconds_per_sample += weight * (seconds / num_samples - self.seconds_per_sample)

    def num_samples_in(self, seconds: float) -> int:
        """Return how many samples take about so long; at least one."""
        return int(seconds / max(self.seconds_per_sample, 1e-8)) or 1


@dataclass(eq=False, slots=True)
class _Work:
    """Slots of one batch that wait for a stage.

    Any number of workers may work on it: each claims one slot at a time by popping it from the same
    list, so every slot is claimed once. A slow sample holds up only its own worker, and the result
    does not depend on the number of workers.
    """

    batch: PendingBatch
    unclaimed: list[int]
    """In descending order: `pop` takes the last."""
    is_settled: bool = False
    """All slots are settled, and the batch is to be collated; `unclaimed` has one entry for it."""

    @property
    def epoch(self) -> Epoch:
        return self.batch.epoch

    def claim_rest(self) -> int:
        """Claim all slots that are left; return how many."""
        num_slots = 0
        with contextlib.suppress(IndexError):
            while True:
                self.unclaimed.pop()
                num_slots += 1
        return num_slots


class _SlotQueue(TaskQueue):
    """Hands out the oldest work that has unclaimed slots, to any number of workers."""

    def add(self, work: _Work) -> None:
        """Add work behind that of older batches, without waking a worker.

        Threads of the stage before finish in any order. The consumer waits for the oldest batch, so
        a later one that arrives sooner must not go first. If another thread changes the queue
        meanwhile, the place may be off by a few, which only costs time.
        """
        place = len(self.tasks)
        with contextlib.suppress(IndexError):  # A worker has removed some.
            while place > 0 and self.tasks[place - 1].batch.number > work.batch.number:
                place -= 1
        self.tasks.insert(place, work)

    def has_older(self, batch: PendingBatch) -> bool:
        """Return whether work on an older batch waits, perhaps since a worker took this one."""
        try:
            first: _Work = self.tasks[0]
        except IndexError:
            return False
        return first.batch.number < batch.number and bool(first.unclaimed)

    def take(self) -> _Work | None:
        while self.tasks:
            try:
                work: _Work = self.tasks[0]
            except IndexError:
                break  # Another worker removed the last.
            if work.unclaimed:
                return work
            # Two workers may see this at the same time, so remove this work and not the first.
            with contextlib.suppress(ValueError, IndexError):
                self.tasks.remove(work)
        return None


class _Tools(NamedTuple):
    """What a worker works with."""

    operation: Operation | None
    """Makes a sample of an index, or of what the stage before made."""
    collate: Operation | None
    clock: WorkerClock
    cursor: WorkerCursor


SetUp = Callable[[int, WorkerCursor], tuple[Operation | None, Operation | None]]
"""Runs in a worker's thread; returns the worker's operation on a sample and its collate function.
The cursor always tells what the worker is working on."""


class ThreadStage(Stage):
    """A stage whose workers are threads.

    `set_up` returns a worker's operation on a sample (None with `only_collates`) and its collate
    function (None if there is another `collate_stage`). The operation takes indices in the first
    stage, and what is in the slots in a later one. Samples go to the `next_stage`, batches to the
    `transfer_stage`, if there is one. `on_sample_error` may replace a sample that failed. If
    `is_watched`, each sample is timed for the message of a timeout. `make_cursor` makes the cursor
    of a worker, if others are to see it.
    """

    def __init__(
        self,
        name: str,
        worker_ids: Sequence[int],
        set_up: SetUp,
        *,
        is_first: bool,
        only_collates: bool = False,
        takes_whole_batch: bool = False,
        next_stage: Stage | None = None,
        collate_stage: Stage | None = None,
        transfer_stage: Stage | None = None,
        on_sample_error: OnSampleError | None = None,
        is_watched: bool = False,
        make_cursor: Callable[[int], WorkerCursor] | None = None,
    ) -> None:
        self._make_cursor = make_cursor
        self._name = name
        self._worker_ids = worker_ids
        self._set_up = set_up
        self._is_first = is_first
        self._takes_whole_batch = takes_whole_batch
        self._next_stage = next_stage
        # None stands for this stage: a stage that refers to itself would outlive its iterator.
        self._collate_stage = collate_stage
        self._transfer_stage = transfer_stage
        self._on_sample_error = on_sample_error
        self._is_watched = is_watched
        self._pace = Pace()
        self._queue = _SlotQueue()
        self._workers = Workers(name, worker_ids, self, self._queue)
        self.groups = [self._workers]
        self.tools: dict[int, _Tools] = {}
        self.contexts: dict[int, Context] = {}
        self._clocks = {id_: WorkerClock(f"{name}-{id_}") for id_ in worker_ids}
        self.clock = ThreadStageClock(
            list(self._clocks.values()),
            None if only_collates else name,
            _COLLATE if collate_stage is None else None,
        )

    # -- how work enters --------------------------------------------------------------------------

    def open(self, batch: PendingBatch) -> bool:
        num_samples = len(batch.indices)
        if num_samples == 0:
            # A sampler may draw an empty batch; the collate function decides what to make of it.
            (self._collate_stage or self).collate(batch)
        else:
            num_slots = 1 if self._takes_whole_batch else num_samples
            self._queue.tasks.append(_Work(batch, list(range(num_slots - 1, -1, -1))))
        return True

    def put(self, batch: PendingBatch, slots: Sequence[int]) -> None:
        self._queue.add(_Work(batch, list(reversed(slots))))
        is_shared = self._pace.seconds_per_sample > _SHARE_SECONDS
        self._queue.wake(len(slots) if is_shared else 1)

    def collate(self, batch: PendingBatch) -> None:
        self._queue.add(_Work(batch, [0], is_settled=True))
        self._queue.wake(1)

    def wake(self, *, is_needed: bool, is_quick: bool) -> None:
        """Wake as many workers as the accepted batches are worth.

        Samples that take long get all workers. Several workers on cheap samples would compete for
        the GIL and do less in all, so then there is one for each batch, or for several batches if
        those are cheaper than a wake-up.
        """
        queue = self._queue
        if not queue.sleepers:
            return
        num_batches = num_samples = 0
        for work in queue.tasks.copy():
            num_samples += len(work.unclaimed)
            num_batches += bool(work.unclaimed)
        seconds = self._pace.seconds_per_sample
        if seconds > _SHARE_SECONDS:
            queue.wake(num_samples)
            return
        num_worth = int(seconds * num_samples / _HAND_OVER_SECONDS)
        if is_needed:
            queue.wake(min(max(num_worth, 1), num_batches))
        elif not is_quick or num_worth >= num_batches:
            queue.wake(min(num_worth, num_batches))

    def wake_idle(self, *, only_if_starved: bool) -> None:
        if self._next_stage is not None:
            self._next_stage.wake_idle(only_if_starved=only_if_starved)
            if only_if_starved and not self._next_stage.has_idle_worker():
                return
        self._queue.wake(len(self._queue.sleepers) if self._queue.take() is not None else 0)

    def has_idle_worker(self) -> bool:
        return bool(self._queue.sleepers)

    # -- what a worker does -----------------------------------------------------------------------

    def set_up_worker(self, worker_id: int) -> _Tools:
        cursor = WorkerCursor() if self._make_cursor is None else self._make_cursor(worker_id)
        operation, collate = self._set_up(worker_id, cursor)
        self._clocks[worker_id].start()
        return _Tools(operation, collate, self._clocks[worker_id], cursor)

    def dismiss_worker(self, worker_id: int) -> None:
        # The context of a worker may refer to its cursor, which would be a reference cycle.
        if (tools := self.tools.pop(worker_id, None)) is not None:
            tools.cursor.task_context = _no_context

    def in_flight(self) -> list[InFlight]:
        """Return what the workers are doing; approximately, since they do not stop for it."""
        now = time.monotonic()
        found = []
        for thread, worker_id in zip(self._workers.threads, self._worker_ids, strict=True):
            tools = self.tools.get(worker_id)  # Once: a worker that ends removes them.
            batch = None if tools is None else tools.cursor.batch
            if tools is not None and batch is not None:
                cursor = tools.cursor
                at, lines = cursor.slot, stack_lines(thread)
                stage = _COLLATE if at == WorkerCursor.COLLATE else self._name
                slot = at if 0 <= at < len(batch.indices) else None
                found.append(InFlight(stage, batch, slot, now - cursor.since, lines))
        return found

    def work(self, task: _Work, tools: _Tools) -> None:
        """Work on one batch, or on several that are cheap, and then wake the consumer."""
        clock, cursor = tools.clock, tools.cursor
        work: _Work | None = task
        epoch = task.batch.epoch
        # Not in the first batches: how long the next one takes is not known.
        is_cheap = self._pace.seconds_per_sample < _HAND_OVER_SECONDS
        num_samples = 0
        with cursor.task_context:
            cursor.since = started = clock.begin()
            while work is not None:
                batch = work.batch
                if batch.epoch.is_closed:
                    work.unclaimed.clear()
                else:
                    cursor.batch, epoch = batch, batch.epoch
                    try:
                        num_samples += self._do(work, tools)
                    except BaseException as error:
                        # Not the user's code but ours, or something that interrupts any code. The
                        # consumer must not wait for ever.
                        batch.fail(0, without_our_frame(error))
                        batch.finish()
                    if not (is_cheap and epoch.defers_wakeup):
                        epoch.wake_consumer()
                seconds = clock.at - started
                work = self._queue.take() if seconds < _HAND_OVER_SECONDS else None
            # An idle worker must not keep a batch in memory.
            cursor.batch = None
            clock.current = None
        self._pace.observe(num_samples, seconds)
        epoch.wake_consumer()

    def _do(self, work: _Work, tools: _Tools) -> int:
        """Fill slots, and make the batch if they were the last; return how many were filled."""
        batch, clock, cursor = work.batch, tools.clock, tools.cursor
        num_filled = num_settled = 0
        if not work.is_settled:
            fill = self._fill_whole if self._takes_whole_batch else self._fill
            num_filled, num_settled = fill(work, tools)
            if num_settled == 0 or not batch.settle(num_settled):
                return num_filled
            if self._collate_stage is not None:
                self._collate_stage.collate(batch)
                return num_filled
        elif not work.claim_rest():
            return 0  # Another worker was quicker.
        assert tools.collate is not None, "a batch was handed to a stage that does not collate"
        cursor.slot = WorkerCursor.COLLATE
        cursor.since = clock.at
        clock.current = clock.batches
        output = None
        if batch.error is None:
            try:
                with cursor.collate_context or _no_context:
                    output = tools.collate(batch.slots)
            except BaseException as error:
                note_origin(error, _COLLATE, batch, None)
                batch.fail(0, without_our_frame(error))
        clock.lap(_COLLATE, batch.number, 1)
        if self._transfer_stage is None:
            batch.finish(output)
        else:
            forward(batch, output, self._transfer_stage)
        return num_filled

    def _fill(self, work: _Work, tools: _Tools) -> tuple[int, int]:
        """Fill slots until none is left; return how many, and how many of them are settled."""
        batch = work.batch
        clock, cursor, operation = tools.clock, tools.cursor, tools.operation
        epoch, next_stage, slots = batch.epoch, self._next_stage, batch.slots
        assert operation is not None, "samples were handed to a stage that only collates"
        inputs = batch.indices if self._is_first else slots
        claim = work.unclaimed.pop
        # To read the clock for each cheap sample would take longer than some of them.
        is_slow = self._pace.seconds_per_sample > SPAN_SECONDS
        is_timed = self._is_watched or is_slow or clock.recorder is not None
        num_filled = num_failed = num_uncounted = 0
        done: list[int] = []
        handed_over_at = clock.at
        yields = is_slow and not self._is_first
        # An older batch that has arrived goes first: the slots of this one stay in the queue.
        while not (epoch.is_closed or (yields and num_filled and self._queue.has_older(batch))):
            try:
                slot = claim()
            except IndexError:
                break
            try:
                cursor.slot = slot
                slots[slot] = operation(inputs[slot])
                num_filled += 1
                if is_timed:
                    cursor.since = clock.lap(self._name, batch.number, 1, batch.indices[slot])
                else:
                    num_uncounted += 1
                if next_stage is not None:
                    done.append(slot)
                    now = time.monotonic()
                    if now - handed_over_at > _HAND_OVER_SECONDS:
                        next_stage.put(batch, done)
                        done, handed_over_at = [], now
            except BaseException as error:
                clock.lap(self._name, batch.number, num_uncounted, batch.indices[slot])
                num_uncounted = 0
                failure: BaseException | None = without_our_frame(error)
                if self._on_sample_error is not None and isinstance(error, Exception):
                    failure = self._on_sample_error(batch, slot, self._name, error)
                if failure is not None:
                    # Slots are claimed in order. Those before this one may still fail, with an
                    # error that goes before this one; those behind it are of no use any more.
                    note_origin(failure, self._name, batch, slot)
                    batch.fail(slot, failure)
                    num_failed = 1 + work.claim_rest()
                    # The user's frame refers to this one, as long as the error lives.
                    del slots, inputs, failure
                    break
        if num_uncounted > 0:
            clock.lap(self._name, batch.number, num_uncounted)
        if next_stage is None:
            return num_filled, num_filled + num_failed
        if done:
            next_stage.put(batch, done)
        return num_filled, num_failed

    def _fill_whole(self, work: _Work, tools: _Tools) -> tuple[int, int]:
        """Do the same with an operation that takes the whole batch."""
        batch, clock, num_samples = work.batch, tools.clock, len(work.batch.indices)
        if not work.claim_rest():
            return 0, 0
        assert tools.operation is not None
        tools.cursor.slot = WorkerCursor.WHOLE
        try:
            samples = tools.operation(batch.drawn)
            if self._collate_stage is not None:  # The samples are worked on one by one next.
                samples = check_count(samples, num_samples)
            batch.slots = samples
        except BaseException as error:
            note_origin(error, self._name, batch, None)
            batch.fail(0, without_our_frame(error))
            return num_samples, num_samples
        finally:
            clock.lap(self._name, batch.number, num_samples)
        if self._next_stage is not None:
            self._next_stage.put(batch, range(num_samples))
            return num_samples, 0
        return num_samples, num_samples


def forward(batch: PendingBatch, output: Any, transfer_stage: Stage | None) -> None:
    """Leave a collated batch, or its error, for the transfer stage or for the consumer."""
    # An error goes the same way: the batches of one worker must not overtake each other.
    if transfer_stage is None or batch.is_exhausted:
        batch.finish(output)
    else:
        batch.output, batch.slots = output, None
        transfer_stage.open(batch)
