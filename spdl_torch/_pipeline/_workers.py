"""Threads that serve one queue, from their start to their join."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final

__all__ = ["SetUp", "Work", "Workers"]

Work = Callable[[Any], None]
"""Does one task. It reports every failure to the task's record and never raises."""

SetUp = Callable[[int], Work]
"""Runs first in each worker's thread, with the worker's id; gives what does the worker's tasks."""

_Report = tuple[int, BaseException | None]
"""A worker's id and what its set-up raised, if anything."""

_STOP: Final = object()


class _TaskQueue:
    """Hands each task to one worker: to one that is awake, or else to the one that slept last.

    `queue.SimpleQueue` would do, but each `get` that returns wakes one more waiting thread for
    nothing, and it wakes the thread that has slept longest, which is the slowest to wake.

    Every step is one atomic operation on a deque, a list or a lock, so this may be interrupted
    anywhere, also by a finaliser that calls `put`. No wake-up is lost: `put` leaves the task
    before it looks for a sleeper, `get` leaves its bell before it looks for a task.
    """

    def __init__(self) -> None:
        self._tasks: deque[Any] = deque()
        self._sleepers: list[threading.Lock] = []

    def put(self, task: Any) -> None:
        self._tasks.append(task)
        try:
            bell = self._sleepers.pop()
        except IndexError:
            return
        bell.release()

    def get(self, bell: threading.Lock) -> Any:
        """The next task. The bell is the calling thread's own lock, which it has acquired."""
        while True:
            try:
                return self._tasks.popleft()
            except IndexError:
                self._sleepers.append(bell)
            try:
                task = self._tasks.popleft()
            except IndexError:
                bell.acquire()
                continue
            try:
                self._sleepers.remove(bell)
            except ValueError:
                bell.acquire()  # It has been taken, so it is rung, if only in a moment.
            return task

    def clear(self) -> None:
        self._tasks.clear()


class Workers:
    """Threads that take tasks from one queue until it is closed.

    The queue is unbounded; what bounds the work is the window.
    """

    def __init__(self, name: str, ids: Sequence[int], set_up: SetUp) -> None:
        self._tasks = _TaskQueue()
        self._reports: SimpleQueue[_Report] = SimpleQueue()
        # Daemon threads, because a worker may be stuck in the user's code for good and must not
        # keep the interpreter from exiting. The pipeline joins them in every other case.
        self.threads = [
            threading.Thread(
                target=_serve,
                args=(worker_id, set_up, self._tasks, self._reports),
                name=f"spdl_torch-{name}-{worker_id}",
                daemon=True,
            )
            for worker_id in ids
        ]

    def put(self, task: Any) -> None:
        self._tasks.put(task)

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def wait_until_set_up(self) -> None:
        """Wait for every worker's set-up; raise what the first worker that failed has raised."""
        errors = dict(self._reports.get() for _ in self.threads)
        for worker_id in sorted(errors):
            if (error := errors[worker_id]) is not None:
                raise error

    def close(self) -> None:
        """Let every worker end after the task it is at. Never waits, may be called at any time.

        Waiting tasks are thrown away first, so that no worker starts another one. A task put
        after this lands behind the last stop and is never seen, which is right: a closed
        pipeline delivers nothing.
        """
        self._tasks.clear()
        for _ in self.threads:
            self._tasks.put(_STOP)


def _serve(worker_id: int, set_up: SetUp, tasks: _TaskQueue, reports: SimpleQueue[_Report]) -> None:
    try:
        work = set_up(worker_id)
    except BaseException as error:
        reports.put((worker_id, error))
        return
    reports.put((worker_id, None))
    bell = threading.Lock()
    bell.acquire()
    while (task := tasks.get(bell)) is not _STOP:
        work(task)
        # While this thread waits for the next task, the last one's samples must not stay alive.
        del task
