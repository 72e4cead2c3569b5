"""Threads that serve one queue, from their start to their join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final

__all__ = ["SetUp", "Work", "Workers"]

Work = Callable[[Any], None]
"""Does one task. It reports every failure to the task's record and never raises."""

SetUp = Callable[[int], Work]
"""Runs first in each worker's thread, with the worker's id; gives what does the worker's tasks."""

_STOP: Final = object()


class Workers:
    """Threads that take tasks from one queue until it is closed.

    The queue is `SimpleQueue` because its `put` may be called from a finaliser that interrupts any
    other code, this queue's own `put` included. It is unbounded; the window bounds the work.
    """

    def __init__(self, name: str, ids: Sequence[int], set_up: SetUp) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._reports: SimpleQueue[BaseException | None] = SimpleQueue()
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
        """Wait for every worker's set-up; raise what the first failing one raised."""
        reports = [self._reports.get() for _ in self.threads]
        for error in reports:
            if error is not None:
                raise error

    def close(self) -> None:
        """Let every worker end after the task it is at. Never waits, may be called at any time.

        Waiting tasks are thrown away first, so that no worker starts another one. A task put
        after this lands behind the last stop and is never seen, which is right: a closed
        pipeline delivers nothing.
        """
        try:
            while True:
                self._tasks.get_nowait()
        except Empty:
            pass
        for _ in self.threads:
            self._tasks.put(_STOP)


def _serve(
    worker_id: int,
    set_up: SetUp,
    tasks: SimpleQueue[Any],
    reports: SimpleQueue[BaseException | None],
) -> None:
    try:
        work = set_up(worker_id)
    except BaseException as error:
        reports.put(error)
        return
    reports.put(None)
    while (task := tasks.get()) is not _STOP:
        work(task)
        # While this thread waits for the next task, the last one's samples must not stay alive.
        del task
