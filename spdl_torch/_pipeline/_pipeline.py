"""The stages of a loader and the lifetime of their threads."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from ._record import Record
from ._window import FirstStage, Window

__all__ = ["Pipeline", "Stage"]

_GRACE_SECONDS: Final = 5.0
"""How long closing waits for workers that are inside the user's code."""
_GRACE_SECONDS_AT_EXIT: Final = 1.0

_live: weakref.WeakSet[Pipeline] = weakref.WeakSet()
"""The pipelines whose threads have been started, for the interpreter's exit."""


class Stage(Protocol):
    """The lifetime of a stage's threads, which the pipeline owns."""

    @property
    def threads(self) -> list[threading.Thread]: ...

    def start(self) -> None: ...

    def wait_until_set_up(self) -> None:
        """Wait until every worker is ready; raise what its set-up raised."""

    def abandon(self) -> None:
        """An epoch was broken off: forget what only waits."""

    def close(self) -> None:
        """Let the workers end. Never blocks; may be called from any thread, at any time."""


class Pipeline:
    """Stages, first to last, and the window of the epoch that runs through them.

    The threads start with the first batch and end with `close`, which is called by exactly one of:
    the consumer at the end of its last epoch, the finaliser of whoever holds the pipeline, the
    exit of the interpreter. Calling it again does nothing.
    """

    def __init__(
        self,
        first_stage: FirstStage,
        stages: Sequence[Stage],
        *,
        capacity: int,
        in_order: bool,
        batched: bool,
    ) -> None:
        self._first_stage = first_stage
        self._stages = stages
        self._capacity = capacity
        self._in_order = in_order
        self._batched = batched
        self._window: Window | None = None
        self._is_started = False
        self._is_closed = False
        self._process_id = os.getpid()

    def begin(self, source: Iterator[Any]) -> None:
        """Begin an epoch over what the source draws; the epoch before it is broken off."""
        if self._window is not None:
            self._window.close()
            for stage in self._stages:
                stage.abandon()
        self._window = Window(
            source,
            self._first_stage,
            capacity=self._capacity,
            in_order=self._in_order,
            batched=self._batched,
        )

    def next(self, timeout_seconds: float | None) -> Record | None:
        """The next batch's record, or None at the end of the epoch."""
        assert self._window is not None, "begin() comes first"
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "this iterator's worker threads belong to the process that made it, and a fork "
                "does not take threads along. Call iter(loader) in the child process."
            )
        if not self._is_started:
            self._start()
        return self._window.next(timeout_seconds)

    @property
    def threads(self) -> list[threading.Thread]:
        return [thread for stage in self._stages for thread in stage.threads]

    @property
    def is_usable(self) -> bool:
        """Not closed, and in the process that has its threads."""
        return not self._is_closed and os.getpid() == self._process_id

    def close(self, grace_seconds: float = _GRACE_SECONDS) -> None:
        """End the threads and wait for them; no thread is left unless the user's code holds it.

        Close before join: a worker may be waiting for a task, and only closing wakes it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._window is not None:
            self._window.close()
        for stage in self._stages:
            stage.close()
        stuck = self._join(grace_seconds)
        if stuck:
            warnings.warn(
                f"{len(stuck)} worker thread(s) are still inside the dataset's code after "
                f"{grace_seconds:g} s ({', '.join(stuck[:4])}). Each ends when that code returns.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _start(self) -> None:
        _close_all_at_exit()
        _live.add(self)
        self._is_started = True
        try:
            for stage in self._stages:
                stage.start()
            for stage in self._stages:
                stage.wait_until_set_up()
        except BaseException:
            self.close()
            raise
        if self._is_closed:
            # Closed by another thread meanwhile; it could not join what had not been started.
            self._join(_GRACE_SECONDS)

    def _join(self, grace_seconds: float) -> list[str]:
        """Wait for the threads; gives the names of those that did not end in time."""
        deadline = time.monotonic() + grace_seconds
        stuck = []
        for thread in self.threads:
            # Not started yet, or the worker whose garbage collection closes us.
            if thread.ident is None or thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                stuck.append(thread.name)
        return stuck


@functools.cache
def _close_all_at_exit() -> None:
    """Have every pipeline closed before the interpreter is taken apart under its threads.

    A thread that comes back from torch's code into a dead interpreter aborts the process. This is
    registered with the first start and not on import: the later, the earlier it runs.
    """
    atexit.register(_close_all)


def _close_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Whatever is still running, the process ends now.
        for pipeline in list(_live):
            pipeline.close(_GRACE_SECONDS_AT_EXIT)
