"""The stages that run in threads: what a worker does with a batch's slots."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from ._in_flight import InFlight, stack_lines
from ._meter import LAP_SECONDS, Meter, StageMeter, WorkerMeter
from ._record import PendingBatch
from ._workers import Workers

__all__ = [
    "BatchStage",
    "CollateStage",
    "GroupSize",
    "Operation",
    "SampleStage",
    "ThreadStage",
    "WorkerCursor",
    "check_count",
    "forward",
    "note_origin",
    "without_our_frame",
]

Operation = Callable[[Any], Any]

_HAND_OVER_SECONDS: Final = 0.0003
"""Work that takes less is not worth waking a second thread, which costs some ten microseconds."""

_SHARE_SECONDS: Final = 0.001
"""A batch of samples that take less each is not worth several workers at a time."""


class SampleStage(Protocol):
    """A stage with work to do on single samples."""

    downstream: Workers | None
    """Who takes what is put here; None if we do not know them."""

    def put(self, record: PendingBatch, slots: Sequence[int]) -> None:
        """Take over these slots, which are in ascending order."""


class CollateStage(Protocol):
    """The stage that makes the batch."""

    def collate(self, record: PendingBatch) -> None:
        """Make the batch of a record whose slots are all settled."""


class OnSampleError(Protocol):
    """Knows what to do about samples that have failed."""

    def __call__(
        self, record: PendingBatch, slot: int, stage: str, error: BaseException
    ) -> BaseException | None:
        """Have another sample made for a slot; gives the error that it is to end in, if any."""


class BatchStage(Protocol):
    """A stage with work to do on whole batches."""

    def put(self, record: PendingBatch) -> None:
        """Take over a record whose batch is made."""


class WorkerCursor:
    """Where a worker is: at which slot of which record, and in what task_context."""

    __slots__ = ("__weakref__", "batch", "collate_context", "since", "slot", "task_context")

    WHOLE: Final = -1
    """Instead of a slot: at all samples of a batch at once."""
    COLLATE: Final = -2

    def __init__(self) -> None:
        self.batch: PendingBatch | None = None
        self.slot = 0
        self.since = 0.0
        """When it came to the sample, if anybody watches."""
        self.task_context: AbstractContextManager[Any] = contextlib.nullcontext()
        """Entered for each task, and left by a thread that waits: what a thread is still inside of
        when it ends may be taken down after the interpreter."""
        self.collate_context: AbstractContextManager[Any] | None = None
        """Entered for each batch that is made of samples, if there is anything."""

    def leave(self) -> None:
        """The worker has ended. What it was in may refer to this."""
        self.task_context = contextlib.nullcontext()


Tools = tuple[Operation | None, Operation | None, WorkerMeter, WorkerCursor]
"""What a worker has: its operation on a sample, its collate function, what measures it, and where
it is."""


class GroupSize:
    """How many samples make work of about so many seconds, from how long others took."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.seconds_per_sample = math.inf

    def num_samples(self) -> int:
        return int(self._seconds / max(self.seconds_per_sample, 1e-8)) or 1

    def observe(self, num_samples: int, seconds: float) -> None:
        # Workers may overwrite each other's estimate; losing one observation costs nothing.
        if num_samples == 0:
            return
        if self.seconds_per_sample == math.inf:
            self.seconds_per_sample = seconds / num_samples
        else:
            weight = num_samples / (num_samples + 63)
            self.seconds_per_sample += weight * (seconds / num_samples - self.seconds_per_sample)


class _Job:
    """Slots of one batch that wait for a stage.

    Any number of workers may be at the same job: each takes one slot at a time from the same list,
    which gives every slot once. (An iterator that threads share gives some twice where there is no
    GIL.) So a slow sample holds up nobody but its worker, and it makes no difference to the result
    how many workers were called.
    """

    __slots__ = ("__weakref__", "_downstream", "_workers", "num_samples", "record", "unclaimed")

    def __init__(
        self,
        workers: Workers,
        downstream: Workers | None,
        record: PendingBatch,
        slots: Sequence[int],
        num_samples: int,
    ) -> None:
        self._workers = workers
        self._downstream = downstream
        self.record = record
        self.unclaimed = list(reversed(slots))
        """The first is at the end, which `pop` takes it from."""
        self.num_samples = num_samples
        """How many samples to expect; none: all slots are settled, and the batch is to be made."""

    def claim_rest(self) -> int:
        """Claim what is left; gives how many slots that are."""
        num_slots = 0
        with contextlib.suppress(IndexError):
            while True:
                self.unclaimed.pop()
                num_slots += 1
        return num_slots

    def is_left(self) -> bool:
        return bool(self.unclaimed)

    def is_awaited(self) -> bool:
        return self._downstream is None or self._downstream.any_is_idle()

    def share(self) -> None:
        call = [self]
        for _ in range(min(len(self.unclaimed), len(self._workers.threads))):
            self._workers.put(call)


class ThreadStage:
    """A stage whose workers are threads.

    `set_up` runs in each worker's thread and gives the worker its operation on a sample (None if
    samples only pass through) and, in the last stage, its collate function. The place that it is
    given always tells which sample the worker is at.
    """

    def __init__(
        self,
        name: str,
        worker_ids: Sequence[int],
        set_up: Callable[[int, WorkerCursor], tuple[Operation | None, Operation | None]],
        *,
        is_first: bool,
        takes_whole_batch: bool = False,
        next_stage: SampleStage | None = None,
        collate_stage: CollateStage | None = None,
        transfer_stage: BatchStage | None = None,
        on_sample_error: OnSampleError | None = None,
        is_watched: bool = False,
    ) -> None:
        self._name = name
        self._on_sample_error = on_sample_error
        self._is_watched = is_watched
        self._set_up = set_up
        self._is_first = is_first
        self._takes_whole_batch = takes_whole_batch
        self._next_stage = next_stage
        self._collate_stage = collate_stage
        """None: this stage itself. (A stage that refers to itself would outlive its iterator.)"""
        self._transfer_stage = transfer_stage
        """Where batches go that are made here; None: to the consumer."""
        self._group_size = GroupSize(_HAND_OVER_SECONDS)
        self.tools: dict[int, Tools] = {}
        self._worker_ids = worker_ids
        self._workers = self.downstream = Workers(name, worker_ids, self)
        self.workers = [self._workers]
        self._meters = {id_: WorkerMeter(f"{name}-{id_}") for id_ in worker_ids}
        self.meter: Meter = StageMeter(
            name,
            list(self._meters.values()),
            has_samples=name != "collate",
            has_batches=collate_stage is None,
        )

    # -- how work enters ---------------------------------------------------------------------

    def open(self, records: list[PendingBatch]) -> int:
        jobs = []
        for record in records:
            num_samples = len(record.indices)
            if num_samples == 0:
                # A sampler may draw an empty batch; what to make of it is for collate to say.
                (self._collate_stage or self).collate(record)
            else:
                slots = range(1 if self._takes_whole_batch else num_samples)
                jobs.append(self._job(record, slots, num_samples))
        self._hand_out(jobs)
        return len(records)

    def put(self, record: PendingBatch, slots: Sequence[int]) -> None:
        self._hand_out([self._job(record, slots, len(slots))])

    def collate(self, record: PendingBatch) -> None:
        self._workers.put([self._job(record, (), 0)])

    def _job(self, record: PendingBatch, slots: Sequence[int], num_samples: int) -> _Job:
        downstream = None if self._next_stage is None else self._next_stage.downstream
        return _Job(self._workers, downstream, record, slots, num_samples)

    def num_samples_per_task(self) -> int:
        return self._group_size.num_samples()

    def _hand_out(self, jobs: list[_Job]) -> None:
        """Call all workers to a job whose samples take long; one to jobs whose samples do not.

        Several workers at a batch of cheap samples would be done sooner, and do less in all, for
        they fight for the GIL: while there are batches enough they have one each. A wrong guess is
        put right by the consumer, when it has waited for a moment.
        """
        is_worth_all = self._group_size.seconds_per_sample > _SHARE_SECONDS
        group: list[_Job] = []
        size = room = self._group_size.num_samples()
        for job in jobs:
            if job.num_samples > room:
                self._call_one_worker(group)
                group, room = [], size
            if is_worth_all or job.num_samples == 1:
                job.share()
            else:
                group.append(job)
                room -= job.num_samples
        self._call_one_worker(group)

    def _call_one_worker(self, group: list[_Job]) -> None:
        if group:
            for job in group:
                job.record.shareable.append(weakref.ref(job))
            self._workers.put(group)

    # -- what a worker does ------------------------------------------------------------------

    def set_up_worker(self, worker_id: int) -> Tools:
        place = WorkerCursor()
        operations = self._set_up(worker_id, place)
        self._meters[worker_id].start()
        return *operations, self._meters[worker_id], place

    def dismiss_worker(self, worker_id: int) -> None:
        tools = self.tools.pop(worker_id, None)
        if tools is not None:
            tools[-1].leave()

    def in_flight(self) -> list[InFlight]:
        """What the workers are at; approximately, since they do not stop for it."""
        now = time.monotonic()
        found = []
        for thread, worker_id in zip(self._workers.threads, self._worker_ids, strict=True):
            tools = self.tools.get(worker_id)  # One look: a worker that ends takes them away.
            place = None if tools is None else tools[-1]
            record = None if place is None else place.batch
            if place is not None and record is not None:
                at, lines = place.slot, stack_lines(thread)
                stage = "collate" if at == WorkerCursor.COLLATE else self._name
                slot = at if 0 <= at < len(record.indices) else None
                found.append(InFlight(stage, record, slot, now - place.since, lines))
        return found

    def work(self, task: list[_Job], tools: Tools) -> None:
        with tools[-1].task_context:
            self._work(task, tools)

    def _work(self, task: list[_Job], tools: Tools) -> None:
        meter, place = tools[2:]
        started = meter.begin()
        num_samples = 0
        for job in task:
            signal = job.record.signal
            if signal.is_closed:
                continue
            try:
                place.since = started
                place.batch = job.record
                num_samples += self._do(job, tools)
            except BaseException as error:
                # Not the user's code but ours, or something that interrupts any code. The consumer
                # must not wait for ever.
                job.record.fail(0, without_our_frame(error))
                job.record.finish()
            finally:
                place.batch = None  # A worker that waits must not keep a batch in memory.
            # Woken too early, the consumer would fight for the GIL with the worker that makes the
            # next batch.
            if not signal.consumer_is_patient:
                signal.set()
        self._group_size.observe(num_samples, meter.end() - started)
        task[-1].record.signal.set()

    def _do(self, job: _Job, tools: Tools) -> int:
        """Claim samples until there are none left; gives how many this worker got."""
        record = job.record
        operation, collate, meter, place = tools
        num_done = num_cheap = 0
        if job.num_samples > 0:
            assert operation is not None, "samples were handed to a stage that only collates"
            if self._takes_whole_batch:
                place.slot = WorkerCursor.WHOLE
                num_done, num_settled = self._fill_whole(job, operation, meter)
            else:
                # To look at the clock for each cheap sample would take longer than some of them.
                is_timed = meter.recorder is not None or (
                    self._is_watched or self._group_size.seconds_per_sample > LAP_SECONDS
                )
                num_done, num_settled = self._fill(job, operation, meter, place, is_timed=is_timed)
                num_cheap = 0 if is_timed else num_done
            is_last = num_settled > 0 and record.settle(num_settled)
            if not is_last or self._collate_stage is not None:
                if num_cheap > 0:
                    meter.lap(self._name, record.number, num_cheap)
                if is_last and self._collate_stage is not None:
                    self._collate_stage.collate(record)
                return num_done
        assert collate is not None, "a batch was handed to a stage that does not collate"
        place.slot = WorkerCursor.COLLATE
        place.since = meter.begin_batch(num_cheap)
        if place.collate_context is None:
            self._make_batch(record, collate)
        else:
            with place.collate_context:
                self._make_batch(record, collate)
        meter.end_batch("collate", record.number)
        return num_done

    def _fill(
        self,
        job: _Job,
        operation: Operation,
        meter: WorkerMeter,
        place: WorkerCursor,
        *,
        is_timed: bool,
    ) -> tuple[int, int]:
        """Fill slots until there are none left; gives how many, and how many are settled."""
        record = job.record
        signal, next_stage = record.signal, self._next_stage
        slots = record.slots
        inputs = record.indices if self._is_first else slots
        claim = job.unclaimed.pop
        num_done = num_failed = 0
        done: list[int] = []
        passed_on = time.monotonic()
        while True:
            try:
                slot = claim()
            except IndexError:
                break
            try:
                place.slot = slot
                slots[slot] = operation(inputs[slot])
                num_done += 1
                if signal.is_closed:
                    break
                if is_timed:
                    meter.lap(self._name, record.number, 1, record.indices[slot])
                    place.since = meter.at
                if next_stage is not None:
                    done.append(slot)
                    now = time.monotonic()
                    if now - passed_on > _HAND_OVER_SECONDS:
                        next_stage.put(record, done)
                        done, passed_on = [], now
            except BaseException as error:
                # It took its time, and no other sample's.
                meter.lap(self._name, record.number, 0, record.indices[slot])
                failure = self._handle_sample_error(record, slot, error)
                if failure is not None:
                    num_failed = self._fail(job, slot, failure)
                    # The user's frame refers to this one, as long as the error lives.
                    del slots, inputs, failure
                    break
        if next_stage is None:
            return num_done, num_done + num_failed
        if done:
            next_stage.put(record, done)
        return num_done, num_failed

    def _fill_whole(self, job: _Job, operation: Operation, meter: WorkerMeter) -> tuple[int, int]:
        record = job.record
        num_samples = len(record.indices)
        if job.claim_rest() == 0:
            return 0, 0
        try:
            samples = operation(record.drawn)
            if self._collate_stage is not None:  # It loads; what is loaded is counted.
                samples = check_count(samples, num_samples)
            record.slots = samples
        except BaseException as error:
            note_origin(error, self._name, record, None)
            record.fail(0, without_our_frame(error))
            return num_samples, num_samples
        finally:
            meter.lap(self._name, record.number, num_samples)
        if self._next_stage is not None:
            self._next_stage.put(record, range(num_samples))
            return num_samples, 0
        return num_samples, num_samples

    def _handle_sample_error(
        self, record: PendingBatch, slot: int, error: BaseException
    ) -> BaseException | None:
        """What a sample's slot is to end in; None if another sample is made for it."""
        error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        if self._on_sample_error is None or not isinstance(error, Exception):
            return error
        return self._on_sample_error(record, slot, self._name, error)

    def _fail(self, job: _Job, slot: int, error: BaseException) -> int:
        """Let the batch end in this error; gives how many slots that settles.

        Slots are claimed in order. The ones before this are done or at work and may fail in turn,
        with an error that goes before this one; the ones behind it are of no use any more.
        """
        note_origin(error, self._name, job.record, slot)
        job.record.fail(slot, error)
        return 1 + job.claim_rest()

    def _make_batch(self, record: PendingBatch, collate: Operation) -> None:
        batch = None
        if record.error is None:
            try:
                batch = collate(record.slots)
            except BaseException as error:
                note_origin(error, "collate", record, None)
                record.fail(0, without_our_frame(error))
        forward(record, batch, self._transfer_stage)


def forward(record: PendingBatch, batch: Any, transfer_stage: BatchStage | None) -> None:
    """Leave the batch for the stage behind collate, or what there is for the consumer.

    An error goes the way of the batches: one worker's must not overtake each other.
    """
    if record.is_finished:
        return  # The consumer was interrupted when it handed the batch out, and has given it up.
    if transfer_stage is None or record.is_exhausted:
        record.finish(batch)
    else:
        record.hold(batch)
        transfer_stage.put(record)


def check_count(samples: Any, num_samples: int) -> list[Any]:
    """What an operation on a whole batch gave, as a list, if there is one for each index."""
    counted = list(samples)
    if len(counted) != num_samples:
        raise ValueError(
            f"asked for {num_samples} samples at once, got {len(counted)}. "
            "Return one sample for each index, in the same order."
        )
    return counted


def note_origin(error: BaseException, stage: str, record: PendingBatch, slot: int | None) -> None:
    """Say in the user's own exception where in the pipeline it was raised."""
    # An exception may refuse notes, an index may have no repr: the note is not worth an error.
    with contextlib.suppress(Exception):
        if slot is None:
            where = f"batch {record.number}"
            if any(index is not None for index in record.indices):  # Or else it has no sampler.
                where = f"{where} (sample indices {_shortened(record.indices)})"
        else:
            index = record.indices[slot]
            where = f"sample index {index!r} (batch {record.number})"
            path = None if record.locate is None else record.locate(index, error)
            if path is not None:
                where = f"{where}, {path}"
        error.add_note(f"spdl_torch: raised in the {stage} stage for {where}")


def without_our_frame(error: BaseException) -> BaseException:
    """The error that the calling function has just caught, its traceback without that function.

    The frame says nothing to the user, and it holds the record, which is going to hold the error:
    a cycle that would keep a batch of samples in memory.
    """
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _shortened(indices: list[Any]) -> str:
    shown = ", ".join(repr(index) for index in indices[:8])
    return shown if len(indices) <= 8 else f"{shown}, … {len(indices)} in all"
