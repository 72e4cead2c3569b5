"""The stages of a loader and the lifetime of their threads."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

from ._measurement import Measurement
from ._meter import Meter
from ._record import Record
from ._sighting import Sighting
from ._signal import Signal
from ._window import FirstStage, LastStage, NotInTime, Window
from ._workers import THREAD_NAME

__all__ = ["Pipeline", "Stage"]

_GRACE_SECONDS: Final = 5.0
"""How long closing waits for workers that are inside the user's code."""
_GRACE_SECONDS_AT_EXIT: Final = 1.0
_GRACE_SECONDS_AFTER_INTERRUPT: Final = 0.25
"""Whoever presses Ctrl-C, or has waited in vain, will not wait for the same workers again."""

_live: weakref.WeakSet[Lifetime] = weakref.WeakSet()
"""Whose threads have been started, for the interpreter's exit."""


class WorkerGroup(Protocol):
    """Threads of a stage. It must not refer to the stage, nor to anything of the user's."""

    @property
    def threads(self) -> list[threading.Thread]: ...

    def start(self, seconds_apart: float) -> None:
        """Start the threads, so long apart unless a worker is set up sooner; 0: all at once."""

    def wait_until_set_up(self) -> None:
        """Wait until every worker is ready; raise what its set-up raised."""

    def abandon(self) -> None:
        """An epoch was broken off: forget what only waits."""

    def close(self) -> None:
        """Let the workers end. Never blocks; may be called from any thread, at any time."""


class Stage(Protocol):
    """A stage, as far as its lifetime goes."""

    @property
    def workers(self) -> Sequence[WorkerGroup]: ...

    def sightings(self) -> list[Sighting]:
        """What its workers are at."""

    @property
    def meter(self) -> Meter: ...


class Pipeline:
    """Stages, first to last, and the window of the epoch that runs through them."""

    def __init__(
        self,
        first_stage: FirstStage,
        stages: Sequence[Stage],
        *,
        last_stage: LastStage | None = None,
        capacity: int,
        in_order: bool,
        batched: bool,
    ) -> None:
        self._first_stage = first_stage
        self._last_stage = last_stage
        self._stages = stages
        self._capacity = capacity
        self._in_order = in_order
        self._batched = batched
        self._window: Window | None = None
        self._process_id = os.getpid()
        self.is_started = False
        self.lifetime = Lifetime([group for stage in stages for group in stage.workers])
        for before, stage in pairwise(stages):
            stage.meter.feed_from(before.meter)

    def begin(self, source: Iterator[Any]) -> None:
        """Begin an epoch over what the source draws; the epoch before it is broken off."""
        signal = Signal()
        self.lifetime.begin(signal)
        self.measurement = self._measurement(signal)
        self._window = Window(
            source,
            self._first_stage,
            signal,
            self.measurement.consumer,
            last_stage=self._last_stage,
            capacity=self._capacity,
            in_order=self._in_order,
            batched=self._batched,
        )

    def _measurement(self, signal: Signal) -> Measurement:
        """It outlives this pipeline, so it refers to the window weakly."""
        pipeline = weakref.ref(self)

        def num_ready() -> int:
            owner = pipeline()
            return 0 if owner is None or owner._window is None else owner._window.num_ready()

        return Measurement(
            "thread",
            [stage.meter for stage in self._stages],
            window=self._capacity,
            num_ready=num_ready,
            closed_at=lambda: signal.closed_at,
        )

    def start(self, seconds_apart: float = 0.0) -> None:
        """Start all threads and wait until they are set up."""
        self.is_started = True
        self.lifetime.start(seconds_apart)

    def next(self, timeout_seconds: float | None) -> Record | None:
        """The next batch's record, or None at the end of the epoch."""
        assert self._window is not None, "begin() comes first"
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "this iterator's worker threads belong to the process that made it, and a fork "
                "does not take threads along. Call iter(loader) in the child process."
            )
        try:
            record = self._window.next(timeout_seconds)
        except BaseException as error:
            self.measurement.consumer.get()  # Nothing; but it waits no longer.
            if isinstance(error, KeyboardInterrupt | NotInTime):
                self.lifetime.grace_seconds = _GRACE_SECONDS_AFTER_INTERRUPT
            raise
        self.lifetime.grace_seconds = _GRACE_SECONDS
        return record

    def sightings(self) -> list[Sighting]:
        """What the workers of all stages are at for this epoch, those first that take longest."""
        found = [sighting for stage in self._stages for sighting in stage.sightings()]
        found = [sighting for sighting in found if not sighting.record.is_abandoned]
        return sorted(found, key=lambda sighting: -sighting.seconds)

    @property
    def threads(self) -> list[threading.Thread]:
        return self.lifetime.threads

    @property
    def is_usable(self) -> bool:
        """Not closed, and in the process that has its threads."""
        return not self.lifetime.is_closed and os.getpid() == self._process_id

    def close(self) -> None:
        self.lifetime.close()


class Lifetime:
    """The threads of a pipeline, from `start` to `close`, without the pipeline.

    `close` is called by whoever comes first: the consumer at the end of its last epoch, the
    finaliser of whoever holds the pipeline, the exit of the interpreter. Calling it again does
    nothing. A finaliser keeps alive what it is going to call, so this must not refer to anything
    that may refer to the holder.
    """

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = groups
        self.signal: Signal | None = None
        """Of the epoch that runs now."""
        self.is_closed = False
        self._has_ended = False
        self.grace_seconds = _GRACE_SECONDS

    @property
    def threads(self) -> list[threading.Thread]:
        return [thread for group in self._groups for thread in group.threads]

    def begin(self, signal: Signal) -> None:
        if self.signal is not None:
            self.signal.close()
            for group in self._groups:
                group.abandon()
        self.signal = signal
        if self.is_closed:
            signal.close()

    def start(self, seconds_apart: float) -> None:
        try:
            _close_all_at_exit()
            _live.add(self)
            for group in self._groups:
                group.start(seconds_apart)
            for group in self._groups:
                group.wait_until_set_up()
        except BaseException:
            self.close()
            raise
        if self.is_closed:
            # Closed by another thread meanwhile; it could not join what had not been started.
            self._join(_GRACE_SECONDS)

    def close(self, grace_seconds: float | None = None) -> None:
        """End the threads and wait for them; no thread is left unless the user's code holds it.

        Close before join: a worker may be waiting for a task, and only closing wakes it.
        """
        if self._has_ended:
            return
        # Each step may be done twice: one that was interrupted in the middle is done again.
        self.is_closed = True
        if self.signal is not None:
            self.signal.close()
        for group in self._groups:
            group.close()
        if grace_seconds is None:
            grace_seconds = self.grace_seconds
        stuck = self._join(grace_seconds)
        self._has_ended = True
        if stuck:
            warnings.warn(
                f"{len(stuck)} worker thread(s) are still inside the dataset's code after "
                f"{grace_seconds:g} s ({', '.join(stuck[:4])}). Each ends when that code returns.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _join(self, grace_seconds: float) -> list[str]:
        """Wait for the threads; gives the names of those that did not end in time."""
        deadline = time.monotonic() + grace_seconds
        stuck: list[str] = []
        for thread in self.threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    stuck.append(thread.name)
        return stuck

    def close_by_finaliser(self) -> None:
        """Close, and wait for the threads unless this is a worker.

        Garbage is collected anywhere, so a worker that collects us may hold a lock that ours wait
        for. They end by themselves.
        """
        is_worker = threading.current_thread().name.startswith(THREAD_NAME)
        with warnings.catch_warnings() if is_worker else contextlib.nullcontext():
            if is_worker:
                warnings.simplefilter("ignore")
            self.close(0.0 if is_worker else None)

    def close_at_exit(self) -> None:
        """Close, and wait for the threads that are at work, however long it takes.

        A thread that comes back from torch's code into a dead interpreter aborts the process. One
        that only sleeps or waits does no harm, and may do so for ever.
        """
        self.close(_GRACE_SECONDS_AT_EXIT)
        at_work = {thread: -1.0 for thread in self.threads if thread.is_alive()}
        while at_work:
            seconds_used = {thread: _cpu_seconds(thread) for thread in at_work}
            at_work = {
                thread: seconds
                for thread, seconds in seconds_used.items()
                if thread.is_alive() and seconds > at_work[thread]
            }
            if at_work:
                next(iter(at_work)).join(0.25)


@functools.cache
def _close_all_at_exit() -> None:
    """Have all threads ended before the interpreter is taken apart under its threads.

    A thread that comes back from torch's code into a dead interpreter aborts the process. This is
    registered with the first start and not on import: the later, the earlier it runs.
    """
    atexit.register(_close_all)


def _close_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Whatever is still running, the process ends now.
        for lifetime in list(_live):
            lifetime.close_at_exit()


def _cpu_seconds(thread: threading.Thread) -> float:
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:
        return 0.0  # It has just ended.
