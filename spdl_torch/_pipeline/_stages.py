"""The stages that run in threads: what a worker does with a batch's slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ._record import Record
from ._workers import Work, Workers

__all__ = [
    "CollateStage",
    "GroupSize",
    "Operation",
    "SampleStage",
    "ThreadStage",
    "note_origin",
    "without_our_frame",
]

Operation = Callable[[Any], Any]

_Part = tuple[Record, int, int]
"""The slots of a record from the first to before the last; none of them: collate."""


class GroupSize:
    """How many samples to hand over at once: as many as take `seconds` or so.

    A hand-over must vanish beside the work it hands over, and a worker that got the slowest group
    of a batch should not keep the others waiting for long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seconds_per_sample: float | None = None

    def num_samples(self) -> int:
        if self._seconds_per_sample is None:
            return 1
        return int(self._seconds / max(self._seconds_per_sample, 1e-8)) or 1

    def observe(self, num_samples: int, seconds: float) -> None:
        # Workers may overwrite each other's estimate; losing one observation costs nothing.
        if num_samples == 0:
            return
        if self._seconds_per_sample is None:
            self._seconds_per_sample = seconds / num_samples
        else:
            weight = num_samples / (num_samples + 63)
            self._seconds_per_sample += weight * (seconds / num_samples - self._seconds_per_sample)


class SampleStage(Protocol):
    """A stage with work to do on single samples."""

    def put(self, record: Record, first: int, last: int) -> None:
        """Take over the slots from `first` to before `last`."""


class CollateStage(Protocol):
    """The stage that makes the batch."""

    def collate(self, record: Record) -> None:
        """Make the batch of a record whose slots are all settled."""


def note_origin(error: BaseException, stage: str, record: Record, slot: int | None) -> None:
    """Say in the user's own exception where in the pipeline it was raised."""
    if slot is None:
        where = f"batch {record.number} (sample indices {_shortened(record.indices)})"
    else:
        where = f"sample index {record.indices[slot]!r} (batch {record.number})"
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


class ThreadStage:
    """A stage whose workers are threads.

    `set_up` runs in each worker's thread and gives the worker its operation on a sample (None if
    samples only pass through) and, in the last stage, its collate function.
    """

    def __init__(
        self,
        name: str,
        worker_ids: Sequence[int],
        set_up: Callable[[int], tuple[Operation | None, Operation | None]],
        *,
        is_first: bool,
        takes_whole_batch: bool = False,
        next_stage: SampleStage | None = None,
        collate_stage: CollateStage | None = None,
    ) -> None:
        self._name = name
        self._set_up = set_up
        self._is_first = is_first
        self._takes_whole_batch = takes_whole_batch
        self._next_stage = next_stage
        self._collate_stage: CollateStage = collate_stage if collate_stage is not None else self
        # A hand-over between threads costs some ten microseconds where it wakes one up.
        self._group_size = GroupSize(seconds=0.0003)
        self._workers = Workers(name, worker_ids, self._set_up_worker)

    # -- lifetime ----------------------------------------------------------------------------

    @property
    def threads(self) -> list[threading.Thread]:
        return self._workers.threads

    def start(self) -> None:
        self._workers.start()

    def wait_until_set_up(self) -> None:
        self._workers.wait_until_set_up()

    def abandon(self) -> None:
        pass  # The workers pass over the tasks of an abandoned batch.

    def close(self) -> None:
        self._workers.close()

    # -- how work enters ---------------------------------------------------------------------

    def open(self, records: list[Record]) -> int:
        self._put([(record, 0, len(record.indices)) for record in records])
        return len(records)

    def put(self, record: Record, first: int, last: int) -> None:
        self._put([(record, first, last)])

    def collate(self, record: Record) -> None:
        self._workers.put([(record, 0, 0)])

    def num_samples_per_task(self) -> int:
        return self._group_size.num_samples()

    def _put(self, parts: list[_Part]) -> None:
        """Hand the parts over in tasks of about the same work, cut and joined as needed."""
        size = self._group_size.num_samples()
        task: list[_Part] = []
        room = size
        for record, first, last in parts:
            if first == last:
                # A sampler may draw an empty batch; what to make of it is for collate to say.
                self._collate_stage.collate(record)
            start = first
            while start < last:
                end = last if self._takes_whole_batch else min(start + room, last)
                task.append((record, start, end))
                room -= end - start
                start = end
                if room <= 0:
                    self._workers.put(task)
                    task, room = [], size
        if task:
            self._workers.put(task)

    # -- what a worker does ------------------------------------------------------------------

    def _set_up_worker(self, worker_id: int) -> Work:
        operation, collate = self._set_up(worker_id)

        def work(task: list[_Part]) -> None:
            started = time.perf_counter()
            num_samples = 0
            for record, first, last in task:
                if not record.is_abandoned:
                    num_samples += last - first
                    self._do(record, first, last, operation, collate)
            self._group_size.observe(num_samples, time.perf_counter() - started)
            # Once for the task: woken for its first batch, the consumer would fight for the GIL
            # with the worker that makes the next.
            task[-1][0].signal.set()

        return work

    def _do(
        self,
        record: Record,
        first: int,
        last: int,
        operation: Operation | None,
        collate: Operation | None,
    ) -> None:
        if first < last:
            assert operation is not None, "samples were handed to a stage that only collates"
            if not self._fill(record, first, last, operation):
                return
            if self._collate_stage is not self:
                self._collate_stage.collate(record)
                return
        assert collate is not None, "a batch was handed to a stage that does not collate"
        self._make_batch(record, collate)

    def _fill(self, record: Record, first: int, last: int, operation: Operation) -> bool:
        """Put each slot's sample through the operation; true if that settled the whole batch."""
        if self._takes_whole_batch:
            end = self._fill_whole(record, operation)
        else:
            end = self._fill_slots(record, first, last, operation)
        if self._next_stage is None:
            return record.settle(last - first)
        if first < end:
            self._next_stage.put(record, first, end)
        # What failed here goes no further.
        return end < last and record.settle(last - end)

    def _fill_slots(self, record: Record, first: int, last: int, operation: Operation) -> int:
        """Fill slots until one fails; gives the slot it stopped at."""
        inputs = record.indices if self._is_first else record.slots
        if last - first < len(inputs):
            inputs = inputs[first:last]
        signal = record.signal
        samples: list[Any] = []
        try:
            for sample in inputs:
                samples.append(operation(sample))
                if signal.is_closed:
                    break
        except BaseException as error:
            last = first + len(samples)
            note_origin(error, self._name, record, last)
            record.fail(last, without_our_frame(error))
        record.slots[first : first + len(samples)] = samples
        return last

    def _fill_whole(self, record: Record, operation: Operation) -> int:
        try:
            samples = operation(record.drawn)
            if self._next_stage is not None:
                samples = list(samples)
                if len(samples) != len(record.indices):
                    raise ValueError(
                        f"asked for {len(record.indices)} samples at once, got {len(samples)}. "
                        "Return one sample for each index, in the same order."
                    )
            record.slots = samples
        except BaseException as error:
            note_origin(error, self._name, record, None)
            record.fail(0, without_our_frame(error))
            return 0
        return len(record.indices)

    def _make_batch(self, record: Record, collate: Operation) -> None:
        batch = None
        if record.error is None:
            try:
                batch = collate(record.slots)
            except BaseException as error:
                note_origin(error, "collate", record, None)
                record.fail(0, without_our_frame(error))
        record.finish(batch)
