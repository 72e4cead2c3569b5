"""The stage whose operation is `async def`: one thread, many samples waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any

from ._event_loop import EventLoop
from ._record import Record
from ._stages import CollateStage, SampleStage, check_count, note_origin, without_our_frame

__all__ = ["AsyncStage"]

AsyncOperation = Callable[[Any], Awaitable[Any]]


class AsyncStage:
    """A first stage that runs its operation on one event loop, `width` calls in flight.

    It owns its thread in the same way as `Workers` does: start, close, join.
    """

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
        self._worker_id = worker_id
        self._width = width
        self._set_up = set_up
        self._event_loop = event_loop
        self._takes_whole_batch = takes_whole_batch
        self._next_stage = next_stage
        self._collate_stage = collate_stage
        self._tasks: asyncio.Queue[tuple[Record, int]] = asyncio.Queue()
        self._main_task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._reports: SimpleQueue[BaseException | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.threads = [
            threading.Thread(target=self._run, name=f"spdl_torch-{name}-{worker_id}", daemon=True)
        ]

    # -- lifetime ----------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = self._event_loop.take()
        self.threads[0].start()

    def wait_until_set_up(self) -> None:
        if (error := self._reports.get()) is not None:
            raise error

    def abandon(self) -> None:
        pass  # Samples in flight arrive and are thrown away; the waiting ones are passed over.

    def close(self) -> None:
        # Flag first, task second; _main goes the other way round, so one of the two sees the other.
        self._is_closed = True
        if self._main_task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._main_task.cancel)

    def _run(self) -> None:
        assert self._loop is not None
        try:
            operation = self._set_up(self._worker_id)
            self._loop.run_until_complete(self._main(operation))
        except asyncio.CancelledError:
            pass  # By close().
        except BaseException as error:
            self._reports.put(error)
        finally:
            self._event_loop.give_back(self._loop)

    async def _main(self, operation: AsyncOperation) -> None:
        self._main_task = asyncio.current_task()
        self._reports.put(None)
        if self._is_closed:
            return
        async with asyncio.TaskGroup() as servers:
            for _ in range(self._width):
                servers.create_task(self._serve(operation))

    # -- work --------------------------------------------------------------------------------

    def open(self, records: list[Record]) -> int:
        assert self._loop is not None, "a batch was opened before the stage was started"
        self._loop.call_soon_threadsafe(self._accept, records)
        return len(records)

    def num_samples_per_task(self) -> int:
        return 1

    def _accept(self, records: list[Record]) -> None:
        for record in records:
            num_samples = len(record.indices)
            if num_samples == 0:
                self._collate_stage.collate(record)
            for slot in range(min(num_samples, 1) if self._takes_whole_batch else num_samples):
                self._tasks.put_nowait((record, slot))

    async def _serve(self, operation: AsyncOperation) -> None:
        while not self._is_closed:
            record, slot = await self._tasks.get()
            if not record.is_abandoned:
                await self._fill(record, slot, operation)
            del record

    async def _fill(self, record: Record, slot: int, operation: AsyncOperation) -> None:
        last = len(record.indices) if self._takes_whole_batch else slot + 1
        try:
            if self._takes_whole_batch:
                record.slots = check_count(await operation(record.drawn), last)
            else:
                record.slots[slot] = await operation(record.indices[slot])
        except BaseException as error:
            if self._is_closed:
                raise  # Our own cancelling. One that the user's code began is an error.
            note_origin(error, self._name, record, None if self._takes_whole_batch else slot)
            record.fail(slot, without_our_frame(error))
        else:
            if self._next_stage is not None:
                self._next_stage.put(record, range(slot, last))
                return
        if record.settle(last - slot):
            self._collate_stage.collate(record)
