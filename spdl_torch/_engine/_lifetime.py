"""The threads of a pipeline, from their start to their end."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Final, Protocol

from ._exit import close_at_exit, sleep_through_exit
from ._signal import Signal
from ._threads import is_ours

__all__ = ["Lifetime", "WorkerGroup"]

_GRACE_SECONDS: Final = 5.0
"""How long closing waits for workers that are inside the user's code."""
_GRACE_SECONDS_AFTER_INTERRUPT: Final = 0.25
"""Whoever presses Ctrl-C, or has waited in vain, will not wait for the same workers again."""
_GRACE_SECONDS_WHERE_WE_ARE_AWAITED: Final = 0.25
"""In a thread that the workers may have to wait for, if it is not back in time."""


class WorkerGroup(Protocol):
    """Threads of a stage. It must not refer to the stage, nor to anything of the user's."""

    @property
    def threads(self) -> list[threading.Thread]: ...

    def start(self, seconds_apart: float) -> None:
        """Start the threads, so long apart unless a worker is set up sooner; 0: all at once."""

    def wait_until_set_up(self) -> None:
        """Wait until every worker is ready; raise what its set-up raised."""

    def abandon(self) -> None:
        """An epoch was broken off: forget what only waits. Waits for nobody."""

    def close(self) -> None:
        """Let the workers end. Waits for nobody; may be called from any thread, at any time.

        Called again it does no harm.
        """


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
        self.is_starting = threading.Lock()
        self._has_ended = False
        self._grace_seconds = _GRACE_SECONDS
        self._companion: weakref.ref[_Companion] | None = None

    @property
    def threads(self) -> list[threading.Thread]:
        return [thread for group in self._groups for thread in group.threads]

    def begin(self, signal: Signal) -> None:
        if self.signal is not None:
            self.signal.close()
            for group in self._groups:
                group.abandon()
        self.signal = signal
        if self.is_closed:  # By another thread, perhaps just now: its stops may be forgotten too.
            self.tell()

    def start(self, seconds_apart: float) -> None:
        try:
            close_at_exit(self)
            if sleep_through_exit():
                raise RuntimeError("no worker threads can be started: the interpreter exits.")
            with self.is_starting:
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

    def be_patient(self, is_patient: bool) -> None:
        """Whether whoever closes would wait for workers that take their time."""
        self._grace_seconds = _GRACE_SECONDS if is_patient else _GRACE_SECONDS_AFTER_INTERRUPT

    def close(self, grace_seconds: float | None = None, *, warns: bool = True) -> None:
        """End the threads and wait for them; no thread is left unless the user's code holds it.

        Close before join: a worker may be waiting for a task, and only closing wakes it.
        """
        if not self._has_ended:
            self.tell()
            self._end(self._grace_seconds if grace_seconds is None else grace_seconds, warns=warns)

    def close_with(self, holder: Any) -> Any:
        """Close when nobody refers to the holder any more.

        Gives a companion, which the holder has to keep, and nobody else.
        """
        companion = _Companion()
        # With a callback: from Python 3.15 on, those without are cleared later.
        self._companion = weakref.ref(companion, _do_nothing)
        # At the interpreter's exit it closes by itself.
        weakref.finalize(holder, self._close_by_finaliser).atexit = False
        return companion

    def _close_by_finaliser(self) -> None:
        """Close, and wait for the threads; for a moment only where they might wait for us.

        Then they end by themselves.
        """
        self.tell()  # First of all: nobody calls a finaliser again that a Ctrl-C has ended.
        if self._has_ended:
            return
        if not self._is_collected() and _may_wait():
            self._end(self._grace_seconds, warns=True)
        else:
            # Not `warnings.catch_warnings`: what it changes are the filters of all threads.
            self._end(_GRACE_SECONDS_WHERE_WE_ARE_AWAITED, warns=False)

    def tell(self) -> None:
        """Let the threads end, and start no more. Waits for nobody."""
        try:
            self._tell_all()
        except BaseException:  # Ctrl-C: whom it has kept from being told would sleep for ever.
            self._tell_all()
            raise

    def _tell_all(self) -> None:
        self.is_closed = True
        if self.signal is not None:
            self.signal.close()
        for group in self._groups:
            group.close()

    def _end(self, grace_seconds: float, *, warns: bool) -> None:
        stuck = self._join(grace_seconds)
        self._has_ended = True
        if stuck and warns:
            warnings.warn(
                f"{len(stuck)} worker thread(s) are still inside the dataset's code, or the "
                f"executor's, after {grace_seconds:g} s ({', '.join(stuck[:4])}). Each ends when "
                "that code returns.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _join(self, grace_seconds: float) -> list[str]:
        """Wait for the threads; gives the names of those that did not end in time."""
        deadline = time.monotonic() + grace_seconds
        stuck: list[str] = []
        for group in self._groups:  # One after the other: a worker may start a thread behind it.
            for thread in group.threads:
                if thread.is_alive() and thread is not threading.current_thread():
                    thread.join(max(0.0, deadline - time.monotonic()))
                    if thread.is_alive():
                        stuck.append(thread.name)
        return stuck

    def _is_collected(self) -> bool:
        """Whether a finaliser that runs now was called by the garbage collector.

        It runs anywhere, with any lock in its thread's hands. It clears the weak references to all
        that it has found before it calls anybody. A holder that goes with the last reference to it
        still has its companion then.
        """
        return self._companion is not None and self._companion() is None


class _Companion:
    """Comes and goes with the holder of a lifetime."""


def _do_nothing(_: Any) -> None:
    pass


def _may_wait() -> bool:
    """Whether a finaliser that runs in this thread may wait long for other threads.

    One of our threads may hold a lock that the others wait for. A thread that somebody runs an
    event loop in may be what they wait for: the client of a cluster has one. In the main thread it
    is the user's (a notebook has one), and whoever leaves a loop there finds the threads ended.
    And a thread that ends takes itself out of the table of all threads, which whoever is just
    looking at that table has locked; without a GIL, what other threads have dropped goes anywhere.
    """
    thread = threading.current_thread()
    if is_ours(thread) or _has_table_of_threads():
        return False
    # The running loop is known to the thread that runs it.
    return thread is threading.main_thread() or not _has_event_loop()


def _has_table_of_threads() -> bool:
    lock = getattr(threading, "_active_limbo_lock", None)
    is_owned = getattr(lock, "_is_owned", None)  # Of an RLock, as it is from Python 3.10 on.
    return is_owned is not None and is_owned()


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
