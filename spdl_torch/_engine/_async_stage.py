"""The stage whose operation is `async def`: one thread, many calls in flight."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from ._batch import Epoch, PendingBatch, check_count, note_origin, without_our_frame
from ._clock import TaskClock
from ._in_flight import InFlight, awaited_lines
from ._stage import OnSampleError, Stage, WorkerCursor
from ._threads import WAIT_SECONDS, WorkerGroup, new_thread

AsyncOperation = Callable[[Any], Awaitable[Any]]

TaskContext = Callable[[PendingBatch, int], AbstractContextManager[Any]]
"""Returns the context in which a task works on a slot of a batch."""

SetUpAsync = Callable[[int], tuple[AsyncOperation, TaskContext, AbstractContextManager[Any]]]
"""Runs in the worker's thread; returns its operation, the context of each task, and the context of
the thread. The last must not refer to anything of the user's."""

_LOOP_HAS_ENDED: Final = (
    "the event loop that runs the dataset's load has ended. "
    "Do not stop the loop or cancel its tasks in load."
)


class EventLoops(Protocol):
    """Keeps event loops from epoch to epoch."""

    def take(self) -> asyncio.AbstractEventLoop: ...

    def give_back(self, loop: asyncio.AbstractEventLoop) -> None: ...


class AsyncStage(Stage):
    """A first stage that runs its operation on one event loop, `width` calls in flight."""

    def __init__(
        self,
        name: str,
        worker_id: int,
        width: int,
        set_up: SetUpAsync,
        event_loops: EventLoops,
        *,
        takes_whole_batch: bool,
        next_stage: Stage | None,
        collate_stage: Stage,
        on_sample_error: OnSampleError | None = None,
    ) -> None:
        self._name = name
        self._on_sample_error = on_sample_error
        self._set_up = set_up
        self._takes_whole_batch = takes_whole_batch
        self._next_stage = next_stage
        self._collate_stage = collate_stage
        self._operation: AsyncOperation | None = None
        self._task_context: TaskContext | None = None
        self._current: dict[asyncio.Task[Any], tuple[PendingBatch, int | None, float]] = {}
        """What each task is working on, and since when."""
        self.clock = self._clock = TaskClock(name, width)
        self._thread = _LoopThread(name, worker_id, width, self, event_loops)
        self.groups = [self._thread]

    def open(self, batch: PendingBatch) -> bool:
        num_samples = len(batch.indices)
        if num_samples == 0:
            self._collate_stage.collate(batch)
        else:
            self.put(batch, range(1 if self._takes_whole_batch else num_samples))
        return True

    def put(self, batch: PendingBatch, slots: Sequence[int]) -> None:
        self._thread.put(batch, slots)

    def wake_idle(self, *, only_if_starved: bool) -> None:
        if self._next_stage is not None:
            self._next_stage.wake_idle(only_if_starved=only_if_starved)

    def set_up_worker(self, worker_id: int) -> AbstractContextManager[Any]:
        self._operation, self._task_context, thread_context = self._set_up(worker_id)
        self._clock.start()
        return thread_context

    def in_flight(self) -> list[InFlight]:
        now = time.monotonic()
        return [
            InFlight(self._name, batch, slot, now - since, awaited_lines(task.get_coro()))
            for task, (batch, slot, since) in list(self._current.items())
        ]

    async def fill(self, batch: PendingBatch, slot: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        since = self._clock.begin()
        whole = self._takes_whole_batch
        self._current[task] = batch, None if whole else slot, since
        index = None if whole else batch.indices[slot]  # Another may take its place.
        num_samples = 0
        try:
            num_samples = await self._fill(batch, slot)
        finally:
            del self._current[task]
            self._clock.end(num_samples, since, batch.number, index)

    async def _fill(self, batch: PendingBatch, slot: int) -> int:
        """Make the sample, or all of the batch; return how many were made."""
        assert self._operation is not None
        assert self._task_context is not None
        last = len(batch.indices) if self._takes_whole_batch else slot + 1
        try:
            where = WorkerCursor.WHOLE if self._takes_whole_batch else slot
            with self._task_context(batch, where):
                if self._takes_whole_batch:
                    batch.slots = check_count(await self._operation(batch.drawn), last)
                else:
                    batch.slots[slot] = await self._operation(batch.indices[slot])
        except BaseException as error:
            if self._thread.is_closed:
                raise  # We cancelled it. A cancellation by the user's code is an error.
            if self._on_sample_error is not None and isinstance(error, Exception):
                failure = self._on_sample_error(batch, slot, self._name, error)
                if failure is None:
                    return 0
                error = failure
            note_origin(error, self._name, batch, None if self._takes_whole_batch else slot)
            batch.fail(slot, without_our_frame(error))
            num_made = 0
        else:
            num_made = last - slot
            if self._next_stage is not None:
                self._next_stage.put(batch, range(slot, last))
                return num_made
        if batch.settle(last - slot):
            self._collate_stage.collate(batch)
        return num_made


class _LoopThread(WorkerGroup):
    """The thread that runs the event loop; like `Workers`, it refers to its stage only weakly."""

    def __init__(
        self, name: str, worker_id: int, width: int, stage: AsyncStage, event_loops: EventLoops
    ) -> None:
        self._worker_id = worker_id
        self._width = width
        self._stage_ref = weakref.ref(stage)
        self._event_loops = event_loops
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.Queue[tuple[PendingBatch, int]] = asyncio.Queue()
        self._main_task: asyncio.Task[None] | None = None
        self._reports: SimpleQueue[BaseException | None] = SimpleQueue()
        self._epoch: Epoch | None = None
        self.is_closed = False
        self.threads = [new_thread(f"{name}-{worker_id}", self._run)]

    def put(self, batch: PendingBatch, slots: Sequence[int]) -> None:
        self._epoch = batch.epoch
        assert self._loop is not None, "a batch was opened before the stage was started"
        try:
            self._loop.call_soon_threadsafe(self._accept, batch, slots)
        except RuntimeError as error:
            if not self._loop.is_closed():
                raise
            batch.epoch.close(error, _LOOP_HAS_ENDED)  # If its thread has not said so before.

    def start(self, seconds_apart: float, deadline: float) -> None:  # noqa: ARG002 (one thread)
        self._loop = self._event_loops.take()
        self.threads[0].start()

    def wait_until_set_up(self, deadline: float) -> list[threading.Thread]:
        while not self.is_closed:
            left = max(0.0, deadline - time.monotonic())
            with suppress(Empty):
                if (error := self._reports.get(timeout=min(left, WAIT_SECONDS))) is not None:
                    raise error
                break
            if left == 0:
                return self.threads
        return []

    def request_stop(self) -> None:
        # Flag first, task second; _main does it the other way round, so one of them sees the other.
        self.is_closed = True
        main_task = self._main_task
        if main_task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(main_task.cancel)

    def _run(self) -> None:
        assert self._loop is not None
        try:
            thread_context: AbstractContextManager[Any] = nullcontext()
            if (stage := self._stage_ref()) is not None:
                thread_context = stage.set_up_worker(self._worker_id)
            del stage
            with thread_context:
                self._loop.run_until_complete(self._main())
        except BaseException as error:
            if self._main_task is None:
                self._reports.put(error)
            elif not self.is_closed and self._epoch is not None:
                # The user's code stopped the loop, or cancelled a task that is not its own.
                self._epoch.close(error, _LOOP_HAS_ENDED)
        finally:
            self._main_task = None
            if self.is_closed:
                self._event_loops.give_back(self._loop)
            else:
                self._loop.close()  # Its state is unknown.

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()
        self._reports.put(None)
        if self.is_closed:
            return
        # Not a TaskGroup: a cancelled one keeps the exception that keeps it, and with both the
        # samples of its tasks.
        servers = [asyncio.create_task(self._serve()) for _ in range(self._width)]
        try:
            ended, _ = await asyncio.wait(servers, return_when=asyncio.FIRST_COMPLETED)
            for server in ended:
                server.result()  # None ends by itself, unless it is closed.
        except GeneratorExit:
            raise  # The user's code stopped the loop: nothing can be awaited any more.
        except BaseException:
            await _cancel(servers)
            raise
        await _cancel(servers)

    def _accept(self, batch: PendingBatch, slots: Sequence[int]) -> None:
        for slot in slots:
            self._tasks.put_nowait((batch, slot))

    async def _serve(self) -> None:
        while not self.is_closed:
            batch, slot = await self._tasks.get()
            stage = self._stage_ref()
            if stage is not None and not batch.epoch.is_closed:
                await stage.fill(batch, slot)
            del batch, stage


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
