"""Worker threads: their queue, start, stop, join, and the exit of the interpreter.

Shutdown is always the same: first all threads are asked to stop, which takes no lock and waits for
nothing; then they are joined. It begins at the end of an epoch, unless workers persist, in
`close()`, in the finaliser of the iterator that holds the pipeline, or at the exit of the
interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import operator
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from ._batch import Epoch
from ._in_flight import stack_lines

_GRACE_SECONDS: Final = 5.0
"""How long closing waits for workers that are inside the user's code."""
_FINALISER_GRACE_SECONDS: Final = 0.25
"""The same in a finaliser, which may run in any thread with any lock held, and after Ctrl-C."""

WAIT_SECONDS: Final = 0.5
"""How long a thread sleeps at most where it may be interrupted. CPython misses a Ctrl-C that comes
in the instant before a thread goes to sleep, so it has to wake up now and then."""

_release = operator.methodcaller("release")


class NotSetUp(Exception):  # noqa: N818 (the source makes it the error of a timeout)
    """Some workers were not set up within the timeout."""

    def __init__(self, lines: dict[str, list[str]]) -> None:
        super().__init__(lines)
        self.lines = lines
        """Where each of them is in the user's code, by the name of its thread."""


def new_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Return a thread that is still to be started.

    It is a daemon, because it may be stuck in the user's code for good and must not keep the
    interpreter from exiting. In every other case `Lifetime` joins it.
    """
    options: dict[str, Any] = {}
    if sys.version_info >= (3, 14):
        # A free-threaded Python would copy the caller's context, whose values would then live as
        # long as the thread.
        options["context"] = contextvars.Context()
    name = f"spdl_torch-{name}"
    return threading.Thread(target=target, args=args, name=name, daemon=True, **options)


class TaskQueue:
    """Hands each task to one worker: one that is awake, or else the one that slept last.

    `queue.SimpleQueue` would do, but each `get` that returns wakes one more waiting thread for
    nothing, and it wakes the thread that slept longest, which is the slowest to wake.

    Every step is one atomic operation on a deque, a list or a lock, so this may be interrupted
    anywhere, also by a finaliser. No wake-up is lost: a task is put before a sleeper is looked for,
    and a worker that goes to sleep is listed as a sleeper before it looks for a task once more.
    """

    def __init__(self) -> None:
        self.tasks: deque[Any] = deque()
        self.sleepers: list[threading.Lock] = []
        """The locks of the workers that wait, released to wake them."""
        self.is_closed = False

    def put(self, task: Any) -> None:
        self.tasks.append(task)
        self.wake(1)

    def wake(self, num_workers: int) -> None:
        """Wake so many sleeping workers, or all there are."""
        # Take one lock and release it in one operation: an interrupt in between would leave a
        # worker asleep for ever. Each call has its own iterators, which threads do not share.
        wakes = map(_release, iter(self.sleepers.pop, None))
        with contextlib.suppress(IndexError):
            for _ in range(num_workers):
                next(wakes)

    def take(self) -> Any:
        """Return the next task, or None if there is none now."""
        try:
            return self.tasks.popleft()
        except IndexError:
            return None

    def get(self, wakeup: threading.Lock) -> Any:
        """Return the next task, or None once the queue is closed.

        Args:
            wakeup: the calling thread's own lock, which it has acquired.

        """
        while not self.is_closed:
            if (task := self.take()) is not None:
                return task
            self.sleepers.append(wakeup)
            task = self.take()
            if task is None and not self.is_closed:
                wakeup.acquire()
                continue
            try:
                self.sleepers.remove(wakeup)
            except ValueError:
                wakeup.acquire()  # Taken to be released, if only in a moment.
            if task is not None:
                return task
        return None

    def close(self) -> None:
        """Let every worker end after its current task. Waits for nothing."""
        # The flag first: a worker lists itself as a sleeper before it looks at the flag.
        self.is_closed = True
        self.tasks.clear()
        while self.sleepers:
            self.wake(1)


class WorkerStage(Protocol):
    """A stage with workers."""

    tools: dict[int, Any]
    """What each worker works with, by its id."""
    contexts: dict[int, contextvars.Context]
    """The context variables of each worker, by its id."""

    def set_up_worker(self, worker_id: int) -> Any:
        """Return the worker's tools. Runs first in each worker's thread."""

    def work(self, task: Any, tools: Any) -> None:
        """Do one task. Every failure is reported to the task's batch; nothing is raised."""

    def dismiss_worker(self, worker_id: int) -> None:
        """Release what belongs to the worker. Runs last in each worker's thread."""


class WorkerGroup:
    """Threads of a stage. It must not refer to the stage, nor to anything of the user's."""

    threads: list[threading.Thread]

    def start(self, seconds_apart: float, deadline: float) -> None:
        """Start the threads, so long apart unless a worker is set up sooner; 0: all at once.

        After the deadline, all that are left start at once.
        """

    def wait_until_set_up(self, deadline: float) -> list[threading.Thread]:  # noqa: ARG002
        """Wait until every worker is ready; raise what its set-up raised.

        Returns the workers that are not ready at the deadline.
        """
        return []

    def abandon(self) -> None:
        """Forget tasks that only wait: their epoch was abandoned. Waits for nothing."""

    def request_stop(self) -> None:
        """Let the workers end. Waits for nothing; may be called again, from any thread."""


class Workers(WorkerGroup):
    """Threads that take tasks from one queue until it is closed.

    Neither this object nor an idle thread refers to the stage: a running thread is never garbage,
    so its references would never be either, and a dataset or a collate function may well refer back
    to the iterator whose end is to end the threads.
    """

    def __init__(
        self, name: str, ids: Sequence[int], stage: WorkerStage, queue: TaskQueue | None = None
    ) -> None:
        self.queue = queue or TaskQueue()
        self._reports: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        """Each worker's id and what its set-up raised, if anything."""
        self._errors: dict[int, BaseException | None] = {}
        self._ids = ids
        self._stage_ref = weakref.ref(stage)
        self.threads = [
            new_thread(
                f"{name}-{worker_id}",
                _serve,
                worker_id,
                self._stage_ref,
                self.queue,
                self._reports,
            )
            for worker_id in ids
        ]

    def start(self, seconds_apart: float, deadline: float) -> None:
        stage = self._stage_ref()
        assert stage is not None
        for worker_id, thread in zip(self._ids, self.threads, strict=True):
            if self.queue.is_closed:  # By another thread.
                self._reports.put((worker_id, None))
                continue
            # The workers see the context variables of this thread, as worker processes would. The
            # stage has the context, not the thread: a value may refer to the iterator.
            stage.contexts[worker_id] = contextvars.copy_context()
            thread.start()
            until = min(time.monotonic() + seconds_apart, deadline)
            while worker_id not in self._errors and (left := until - time.monotonic()) > 0:
                with contextlib.suppress(Empty):
                    self._errors.update([self._reports.get(timeout=left)])

    def wait_until_set_up(self, deadline: float) -> list[threading.Thread]:
        """Wait for every worker's set-up; raise what the lowest-numbered failed worker raised."""
        while len(self._errors) < len(self.threads) and not self.queue.is_closed:
            left = max(0.0, deadline - time.monotonic())
            try:
                self._errors.update([self._reports.get(timeout=min(left, WAIT_SECONDS))])
            except Empty:
                if left == 0:
                    break
        # Not kept: an exception refers to the frames that it passes through.
        errors, self._errors = self._errors, {}
        for worker_id in sorted(errors):
            if (error := errors[worker_id]) is not None:
                try:
                    raise error
                finally:
                    del errors, error
        if self.queue.is_closed:
            return []
        workers = zip(self._ids, self.threads, strict=True)
        return [thread for worker_id, thread in workers if worker_id not in errors]

    def abandon(self) -> None:
        self.queue.tasks.clear()

    def request_stop(self) -> None:
        self.queue.close()


def _serve(
    worker_id: int,
    stage_ref: weakref.ref[WorkerStage],
    queue: TaskQueue,
    reports: SimpleQueue[tuple[int, BaseException | None]],
) -> None:
    """Run one worker thread. While it waits, it refers to its stage only weakly."""
    stage = stage_ref()
    try:
        if stage is not None:
            run = stage.contexts[worker_id].run
            stage.tools[worker_id] = run(stage.set_up_worker, worker_id)
            del run
    except BaseException as error:
        stage = None
        reports.put((worker_id, error))
        return
    stage = None
    reports.put((worker_id, None))
    wakeup = threading.Lock()
    wakeup.acquire()
    while (task := queue.get(wakeup)) is not None:
        stage = stage_ref()
        try:
            if stage is not None:
                stage.contexts[worker_id].run(stage.work, task, stage.tools[worker_id])
        except BaseException as error:  # Of our own code: the consumer must not wait for ever.
            task.epoch.close(error, "a worker thread failed outside the dataset's code.")
        # While this thread waits for the next task, nothing of the last one may stay alive.
        del task, stage
    if (stage := stage_ref()) is not None:
        stage.dismiss_worker(worker_id)
        del stage.contexts[worker_id]


class Lifetime:
    """All threads of a pipeline, from `start` to `close`.

    A finaliser keeps alive what it calls, so this refers to nothing that may refer to the holder of
    the pipeline: not to the stages, and not to the draws of an epoch.
    """

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = groups
        self._epoch: Epoch | None = None
        self._process_id = os.getpid()
        self.is_closed = False

    @property
    def threads(self) -> list[threading.Thread]:
        return [thread for group in self._groups for thread in group.threads]

    def begin(self, epoch: Epoch) -> None:
        """Let the workers serve this epoch; the one before it is abandoned."""
        if self._epoch is not None:
            self._epoch.close()
            for group in self._groups:
                group.abandon()
        self._epoch = epoch
        if self.is_closed:  # Perhaps just now, by another thread.
            self.request_stop()

    def start(self, seconds_apart: float, timeout_seconds: float) -> None:
        """Start all threads and wait until they are set up; raise NotSetUp after the timeout."""
        now = time.monotonic()
        try:
            _close_at_exit(self)
            for group in self._groups:
                # The last workers need time too, so they do not wait for the others for longer.
                group.start(seconds_apart, now + timeout_seconds / 2)
            late = []
            for group in self._groups:
                late += group.wait_until_set_up(now + timeout_seconds)
            if late:
                raise NotSetUp({thread.name: stack_lines(thread) for thread in late})
        except NotSetUp:
            self.close_quickly()  # What is late is stuck.
            raise
        except BaseException as error:
            (self.close if isinstance(error, Exception) else self.close_quickly)()
            raise
        if self.is_closed:
            # By another thread, which could not join what had not been started.
            self.join(_GRACE_SECONDS)

    def request_stop(self) -> None:
        """Let the threads end, and start no more. Waits for nothing."""
        self.is_closed = True
        if self._epoch is not None:
            self._epoch.close()
        for group in self._groups:
            group.request_stop()

    def close(self) -> None:
        """End the threads and wait for them; warn about those that are stuck in the user's code."""
        # Stop before join: a worker may wait for a task, and only the request wakes it.
        self.request_stop()
        if stuck := self.join(_GRACE_SECONDS):
            warn_caller(
                f"{len(stuck)} worker thread(s) are still inside the dataset's code, or the "
                f"executor's, after {_GRACE_SECONDS:g} s ({', '.join(stuck[:4])}). Each ends when "
                "that code returns.",
                RuntimeWarning,
            )

    def close_quickly(self) -> None:
        """End the threads, but wait only for a moment: they end when the user's code returns."""
        self.request_stop()
        self.join(_FINALISER_GRACE_SECONDS)

    def close_with(self, holder: Any) -> None:
        """Close when the holder is garbage-collected."""
        # At the exit of the interpreter `_close_all` does it.
        weakref.finalize(holder, self.close_quickly).atexit = False

    def join(self, grace_seconds: float) -> list[str]:
        """Wait for the threads; return the names of those that did not end in time."""
        if os.getpid() != self._process_id:
            return []  # A forked child has none of its parent's threads.
        deadline = time.monotonic() + grace_seconds
        stuck: list[str] = []
        for group in self._groups:  # One after the other: a worker may start a helper thread.
            for thread in group.threads:
                if thread.is_alive() and thread is not threading.current_thread():
                    thread.join(max(0.0, deadline - time.monotonic()))
                    if thread.is_alive():
                        stuck.append(thread.name)
        # Not while the calling thread is one of them: it may run a finaliser, and still has work.
        if self.is_closed and not any(thread.is_alive() for thread in self.threads):
            _started.discard(self)
        return stuck


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user that has called into this package, perhaps through torch."""
    ours = {__name__.partition(".")[0], "torch"}
    frame, level = sys._getframe(), 1
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


# -- the exit of the interpreter ------------------------------------------------------------------

# A daemon thread that runs torch code while the interpreter is taken apart aborts the process.

_started: set[Lifetime] = set()
"""Whose threads were started and may still run."""


def _close_at_exit(lifetime: Lifetime) -> None:
    _register_exit()
    forget_ended()
    _started.add(lifetime)


def forget_ended(ending: threading.Thread | None = None) -> None:
    """Forget lifetimes that have ended. A thread that calls this last is `ending`.

    A finaliser does not wait for threads that take long to end, so it may have left them here.
    """
    for lifetime in list(_started):
        others = (thread for thread in lifetime.threads if thread is not ending)
        if lifetime.is_closed and not any(thread.is_alive() for thread in others):
            _started.discard(lifetime)


@functools.cache
def _register_exit() -> None:
    """Register with the first start and not on import: handlers registered later run earlier."""
    atexit.register(_close_all)


def _close_all() -> None:
    lifetimes = list(_started)
    for lifetime in lifetimes:
        lifetime.request_stop()
    deadline = time.monotonic() + _GRACE_SECONDS
    for lifetime in lifetimes:
        lifetime.join(deadline - time.monotonic())


# A forked child has none of these threads.
os.register_at_fork(after_in_child=_started.clear)
