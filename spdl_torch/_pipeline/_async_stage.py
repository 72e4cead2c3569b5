"""The stage whose operation is `async def`: one thread, many samples waiting."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any

from .._event_loop import EventLoop
from ._record import Record
from ._signal import Signal
from ._stages import CollateStage, SampleStage, check_count, note_origin, without_our_frame
from ._workers import THREAD_NAME

__all__ = ["AsyncStage"]

AsyncOperation = Callable[[Any], Awaitable[Any]]


class AsyncStage:
    """A first stage that runs its operation on one event loop, `width` calls in flight."""

    def __init__(
        self,
        name: str,
        worker_id: int,
        width: int,
        set_up: Callable[[int], AsyncOperation],
        event_loop: EventLoop,
        *,
        takes_whole_batch: bool,
        next_stage: SampleStage | None,
        collate_stage: CollateStage,
    ) -> None:
        self._name = name
        self._set_up = set_up
        self._takes_whole_batch = takes_whole_batch
        self._next_stage = next_stage
        self._collate_stage = collate_stage
        self._operation: AsyncOperation | None = None
        self._thread = _LoopThread(name, worker_id, width, self, event_loop)
        self.workers = [self._thread]

    def open(self, records: list[Record]) -> int:
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

    def num_samples_per_task(self) -> int:
        return 1

    def set_up_worker(self, worker_id: int) -> None:
        self._operation = self._set_up(worker_id)

    async def fill(self, record: Record, slot: int) -> None:
        assert self._operation is not None
        last = len(record.indices) if self._takes_whole_batch else slot + 1
        try:
            if self._takes_whole_batch:
                record.slots = check_count(await self._operation(record.drawn), last)
            else:
                record.slots[slot] = await self._operation(record.indices[slot])
        except BaseException as error:
            if self._thread.is_closed:
                raise  # Our own cancelling. One that the user's code began is an error.
            note_origin(error, self._name, record, None if self._takes_whole_batch else slot)
            record.fail(slot, without_our_frame(error))
        else:
            if self._next_stage is not None:
                self._next_stage.put(record, range(slot, last))
                return
        if record.settle(last - slot):
            self._collate_stage.collate(record)


class _LoopThread:
    """The thread that runs the event loop; like `Workers`, it refers to its stage only weakly."""

    def __init__(
        self, name: str, worker_id: int, width: int, stage: AsyncStage, event_loop: EventLoop
    ) -> None:
        self._worker_id = worker_id
        self._width = width
        self._stage_ref = weakref.ref(stage)
        self._event_loop = event_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.Queue[tuple[Record, int]] = asyncio.Queue()
        self._main_task: asyncio.Task[None] | None = None
        self._reports: SimpleQueue[BaseException | None] = SimpleQueue()
        self._signal: Signal | None = None
        self.is_closed = False
        thread_name = f"{THREAD_NAME}{name}-{worker_id}"
        self.threads = [threading.Thread(target=self._run, name=thread_name, daemon=True)]

    def put(self, tasks: list[tuple[Record, int]]) -> None:
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
            if (stage := self._stage_ref()) is not None:
                stage.set_up_worker(self._worker_id)
            del stage
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
        async with asyncio.TaskGroup() as servers:
            for _ in range(self._width):
                servers.create_task(self._serve())

    def _accept(self, tasks: list[tuple[Record, int]]) -> None:
        for task in tasks:
            self._tasks.put_nowait(task)

    async def _serve(self) -> None:
        while not self.is_closed:
            record, slot = await self._tasks.get()
            stage = self._stage_ref()
            if stage is not None and not record.is_abandoned:
                await stage.fill(record, slot)
            del record, stage
