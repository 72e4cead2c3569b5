"""The stage whose operation is `async def`: one thread, many samples waiting."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

from .._event_loops import EventLoop
from ._in_flight import InFlight, awaited_lines
from ._meter import FlightMeter, Meter
from ._record import PendingBatch
from ._signal import Signal
from ._stages import (
    CollateStage,
    OnSampleError,
    SampleStage,
    WorkerCursor,
    check_count,
    note_origin,
    without_our_frame,
)
from ._threads import new_thread

__all__ = ["AsyncStage"]

AsyncOperation = Callable[[Any], Awaitable[Any]]

Around = Callable[[PendingBatch, int], AbstractContextManager[Any]]
"""What a task is in while it is at a slot of a record."""

SetUpAsync = Callable[[int], tuple[AsyncOperation, Around, AbstractContextManager[Any]]]
"""Runs in the worker's thread; gives it its operation, and what all its tasks are in. That must not
refer to anything of the user's."""


class AsyncStage:
    """A first stage that runs its operation on one event loop, `width` calls in flight."""

    def __init__(
        self,
        name: str,
        worker_id: int,
        width: int,
        set_up: SetUpAsync,
        event_loop: EventLoop,
        *,
        takes_whole_batch: bool,
        next_stage: SampleStage | None,
        collate_stage: CollateStage,
        on_sample_error: OnSampleError | None = None,
    ) -> None:
        self._name = name
        self._on_sample_error = on_sample_error
        self._set_up = set_up
        self._takes_whole_batch = takes_whole_batch
        self._next_stage = next_stage
        self._collate_stage = collate_stage
        self._operation: AsyncOperation | None = None
        self._around: Around | None = None
        self._at: dict[asyncio.Task[Any], tuple[PendingBatch, int | None, float]] = {}
        """What each task is at, and since when."""
        self._meter = FlightMeter(name, width)
        self.meter: Meter = self._meter
        self._thread = _LoopThread(name, worker_id, width, self, event_loop)
        self.workers = [self._thread]

    def open(self, records: list[PendingBatch]) -> int:
        tasks = []
        for record in records:
            num_samples = len(record.indices)
            if num_samples == 0:
                self._collate_stage.collate(record)
            elif self._takes_whole_batch:
                tasks.append((record, 0))
            else:
                tasks += [(record, slot) for slot in range(num_samples)]
        self._thread.put(tasks)
        return len(records)

    def put(self, record: PendingBatch, slots: Sequence[int]) -> None:
        self._thread.put([(record, slot) for slot in slots])

    def num_samples_per_task(self) -> int:
        return 1

    def set_up_worker(self, worker_id: int) -> AbstractContextManager[Any]:
        self._operation, self._around, task_context = self._set_up(worker_id)
        self._meter.start()
        return task_context

    def in_flight(self) -> list[InFlight]:
        now = time.monotonic()
        return [
            InFlight(self._name, record, slot, now - since, awaited_lines(task.get_coro()))
            for task, (record, slot, since) in list(self._at.items())
        ]

    async def fill(self, record: PendingBatch, slot: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        since = self._meter.begin()
        whole = self._takes_whole_batch
        self._at[task] = record, None if whole else slot, since
        index = None if whole else record.indices[slot]  # Another may take its place.
        num_samples = 0
        try:
            num_samples = await self._fill(record, slot)
        finally:
            del self._at[task]
            self._meter.end(num_samples, since, record.number, index)

    async def _fill(self, record: PendingBatch, slot: int) -> int:
        """Make the sample, or all of the batch; gives how many were made."""
        assert self._operation is not None
        assert self._around is not None
        last = len(record.indices) if self._takes_whole_batch else slot + 1
        try:
            with self._around(record, WorkerCursor.WHOLE if self._takes_whole_batch else slot):
                if self._takes_whole_batch:
                    record.slots = check_count(await self._operation(record.drawn), last)
                else:
                    record.slots[slot] = await self._operation(record.indices[slot])
        except BaseException as error:
            if self._thread.is_closed:
                raise  # Our own cancelling. One that the user's code began is an error.
            if self._on_sample_error is not None and isinstance(error, Exception):
                failure = self._on_sample_error(record, slot, self._name, error)
                if failure is None:
                    return 0
                error = failure
            note_origin(error, self._name, record, None if self._takes_whole_batch else slot)
            record.fail(slot, without_our_frame(error))
            num_made = 0
        else:
            num_made = last - slot
            if self._next_stage is not None:
                self._next_stage.put(record, range(slot, last))
                return num_made
        if record.settle(last - slot):
            self._collate_stage.collate(record)
        return num_made


class _LoopThread:
    """The thread that runs the event loop; like `Workers`, it refers to its stage only weakly."""

    def __init__(
        self,
        name: str,
        worker_id: int,
        width: int,
        stage: AsyncStage,
        event_loop: EventLoop,
    ) -> None:
        self._worker_id = worker_id
        self._width = width
        self._stage_ref = weakref.ref(stage)
        self._event_loop = event_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.Queue[tuple[PendingBatch, int]] = asyncio.Queue()
        self._main_task: asyncio.Task[None] | None = None
        self._reports: SimpleQueue[BaseException | None] = SimpleQueue()
        self._signal: Signal | None = None
        self.is_closed = False
        self.threads = [new_thread(f"{name}-{worker_id}", self._run)]

    def put(self, tasks: list[tuple[PendingBatch, int]]) -> None:
        if tasks:
            self._signal = tasks[0][0].signal
        assert self._loop is not None, "a batch was opened before the stage was started"
        self._loop.call_soon_threadsafe(self._accept, tasks)

    def start(self, seconds_apart: float) -> None:  # noqa: ARG002 (it is only one thread)
        self._loop = self._event_loop.take()
        self.threads[0].start()

    def wait_until_set_up(self) -> None:
        if (error := self._reports.get()) is not None:
            raise error

    def abandon(self) -> None:
        pass  # Samples in flight arrive and are thrown away; the waiting ones are passed over.

    def close(self) -> None:
        # Flag first, task second; _main goes the other way round, so one of the two sees the other.
        self.is_closed = True
        main_task = self._main_task
        if main_task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(main_task.cancel)

    def _run(self) -> None:
        assert self._loop is not None
        try:
            task_context: AbstractContextManager[Any] = nullcontext()
            if (stage := self._stage_ref()) is not None:
                task_context = stage.set_up_worker(self._worker_id)
            del stage
            with task_context:
                self._loop.run_until_complete(self._main())
        except BaseException as error:
            if self._main_task is None:
                self._reports.put(error)
            elif not self.is_closed and self._signal is not None:
                # The user's code has stopped the loop, or cancelled what is not its own.
                self._signal.fail(error)
        finally:
            self._main_task = None
            if self.is_closed:
                self._event_loop.give_back(self._loop)
            else:
                self._loop.close()  # Nobody knows what is left in it.

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()
        self._reports.put(None)
        if self.is_closed:
            return
        # Not a TaskGroup: one that is cancelled keeps the exception that keeps it, and with both
        # what the tasks have had.
        servers = [asyncio.create_task(self._serve()) for _ in range(self._width)]
        try:
            ended, _ = await asyncio.wait(servers, return_when=asyncio.FIRST_COMPLETED)
            for server in ended:
                server.result()  # None ends by itself, unless it is closed.
        except GeneratorExit:
            raise  # The user's code has stopped the loop, and there is nothing to wait with.
        except BaseException:
            await _end(servers)
            raise
        await _end(servers)

    def _accept(self, tasks: list[tuple[PendingBatch, int]]) -> None:
        for task in tasks:
            self._tasks.put_nowait(task)

    async def _serve(self) -> None:
        while not self.is_closed:
            record, slot = await self._tasks.get()
            stage = self._stage_ref()
            if stage is not None and not record.is_abandoned:
                await stage.fill(record, slot)
            del record, stage


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
