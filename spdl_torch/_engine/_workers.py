"""Threads that serve one queue, from their start to their join."""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from ._threads import new_thread

__all__ = ["WorkerStage", "Workers"]


class WorkerStage(Protocol):
    """A stage with workers."""

    tools: dict[int, Any]
    """What each worker has been given to work with, by its id."""

    def set_up_worker(self, worker_id: int) -> Any:
        """Runs first in each worker's thread; gives the worker its tools."""

    def work(self, task: Any, tools: Any) -> None:
        """Do one task. Every failure is reported to the task's record; nothing is raised."""

    def dismiss_worker(self, worker_id: int) -> None:
        """Runs last in each worker's thread: what is its own ends where it was used."""


_Report = tuple[int, BaseException | None]
"""A worker's id and what its set-up raised, if anything."""

_STOP: Final = object()

_wake = operator.methodcaller("release")


class _TaskQueue:
    """Hands each task to one worker: to one that is awake, or else to the one that slept last.

    `queue.SimpleQueue` would do, but each `get` that returns wakes one more waiting thread for
    nothing, and it wakes the thread that has slept longest, which is the slowest to wake.

    Every step is one atomic operation on a deque, a list or a lock, so this may be interrupted
    anywhere, also by a finaliser that calls `put`. No wake-up is lost: `put` leaves the task
    before it looks for a sleeper, `get` leaves its wakeup before it looks for a task.
    """

    def __init__(self) -> None:
        self._tasks: deque[Any] = deque()
        self._sleepers: list[threading.Lock] = []

    def put(self, task: Any) -> None:
        self._tasks.append(task)
        # Take one lock and release it: one operation, because an interrupt in between would leave
        # a worker asleep for ever. Each call has its own iterators, which threads do not share.
        rings = map(_wake, iter(self._sleepers.pop, None))
        with contextlib.suppress(IndexError):
            next(rings)

    def get(self, wakeup: threading.Lock) -> Any:
        """The next task. The wakeup is the calling thread's own lock, which it has acquired."""
        while True:
            try:
                return self._tasks.popleft()
            except IndexError:
                self._sleepers.append(wakeup)
            try:
                task = self._tasks.popleft()
            except IndexError:
                wakeup.acquire()
                continue
            try:
                self._sleepers.remove(wakeup)
            except ValueError:
                wakeup.acquire()  # It has been taken, so it is rung, if only in a moment.
            return task

    def has_sleeper(self) -> bool:
        return bool(self._sleepers)

    def clear(self) -> None:
        self._tasks.clear()


class Workers:
    """Threads that take tasks from one queue until it is closed.

    The queue is unbounded; what bounds the work is the window. Neither this object nor an idle
    thread of it refers to the stage or to anything of the user's: a running thread is never
    garbage, so what it refers to would never be either, and a dataset or a collate function may
    well refer back to the iterator whose end is to end the threads.
    """

    def __init__(self, name: str, ids: Sequence[int], stage: WorkerStage) -> None:
        self._tasks = _TaskQueue()
        self._reports: SimpleQueue[_Report] = SimpleQueue()
        self._errors: dict[int, BaseException | None] = {}
        self._ids = ids
        self._is_closed = False
        self.threads = [
            new_thread(
                f"{name}-{worker_id}",
                _serve,
                worker_id,
                weakref.ref(stage),
                self._tasks,
                self._reports,
            )
            for worker_id in ids
        ]

    def put(self, task: Any) -> None:
        self._tasks.put(task)

    def start(self, seconds_apart: float) -> None:
        """Start the threads, each when the one before it is set up or has had so many seconds."""
        for worker_id, thread in zip(self._ids, self.threads, strict=True):
            if self._is_closed:  # By another thread: it would only set itself up, and end.
                self._reports.put((worker_id, None))
                continue
            thread.start()
            if seconds_apart > 0:
                with contextlib.suppress(Empty):
                    self._errors.update([self._reports.get(timeout=seconds_apart)])

    def wait_until_set_up(self) -> None:
        """Wait for every worker's set-up; raise what the first worker that failed has raised."""
        while len(self._errors) < len(self.threads):
            self._errors.update([self._reports.get()])
        # Not kept: an exception refers to the frames of whoever is going to catch it.
        errors, self._errors = self._errors, {}
        for worker_id in sorted(errors):
            if (error := errors[worker_id]) is not None:
                try:
                    raise error
                finally:
                    del errors, error

    def any_is_idle(self) -> bool:
        return self._tasks.has_sleeper()

    def abandon(self) -> None:
        self._tasks.clear()

    def close(self) -> None:
        """Let every worker end after the task it is at. Never waits, may be called at any time.

        Waiting tasks are thrown away first, so that no worker starts another one. A task put
        after this lands behind the last stop and is never seen, which is right: a closed
        pipeline delivers nothing.
        """
        self._is_closed = True
        self._tasks.clear()
        for _ in self.threads:
            self._tasks.put(_STOP)


def _serve(
    worker_id: int,
    stage_ref: weakref.ref[WorkerStage],
    tasks: _TaskQueue,
    reports: SimpleQueue[_Report],
) -> None:
    stage = stage_ref()
    try:
        if stage is not None:
            stage.tools[worker_id] = stage.set_up_worker(worker_id)
    except BaseException as error:
        stage = None
        reports.put((worker_id, error))
        return
    stage = None
    reports.put((worker_id, None))
    wakeup = threading.Lock()
    wakeup.acquire()
    while (task := tasks.get(wakeup)) is not _STOP:
        stage = stage_ref()
        if stage is not None:
            stage.work(task, stage.tools[worker_id])
        # While this thread waits for the next task, nothing of the last one may stay alive.
        del task, stage
    if (stage := stage_ref()) is not None:
        stage.dismiss_worker(worker_id)
