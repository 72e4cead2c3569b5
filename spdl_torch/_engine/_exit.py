"""The exit of the interpreter: no thread may be in the middle of torch's code when it is gone.

One that comes back from there into a dead interpreter aborts the process. So our own threads are
ended, and those of the user's that iterate are left asleep.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from typing import Final, Protocol

from ._threads import is_ours, runnable_seconds

__all__ = ["close_at_exit", "note_consumer", "sleep_through_exit"]

_GRACE_SECONDS: Final = 1.0
"""How long the exit waits for workers that sleep."""
_CONSUMER_SECONDS: Final = 2.0
"""How long for a consumer that computes: it may have a step to finish, or a whole training."""
_SLEEP_SECONDS: Final = 4.0
"""After how long a consumer is told that its loader is closed."""

_INTERVAL_SECONDS: Final = 0.25
_RUNNABLE_SECONDS: Final = 0.025
"""Of each interval, for a thread to count as one that computes. One that sleeps and looks, and
sleeps again, takes less."""
_SHARED_SECONDS: Final = 0.125
"""Of each interval, for all together: many that share the interpreter's lock take little each."""
_PATIENCE_SECONDS: Final = 30.0
"""How long that counts: many that sleep and look may take as much, and do so for ever."""


class Closable(Protocol):
    """Threads that somebody has started, or is just starting."""

    is_starting: threading.Lock
    """Held meanwhile."""

    def tell(self) -> None:
        """Let them end, and start no more. Waits for nobody."""

    def close(self, grace_seconds: float, *, warns: bool) -> None:
        """The same, and wait for them."""


class _Exit:
    """Has begun or not."""

    sleep_until: float | None = None
    """None: it has not. Written by the thread that exits, in one step."""


_exit = _Exit()
_live: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()
"""Whose threads have been started."""
_consumers: weakref.WeakValueDictionary[int, threading.Thread] = weakref.WeakValueDictionary()
"""The threads that iterate, by their ids."""


def close_at_exit(closable: Closable) -> None:
    """Have its threads ended before the interpreter is taken apart.

    Then ask `sleep_through_exit`. The exit goes the other way round, so one sees the other.
    """
    _register()
    _live[id(closable)] = closable


def note_consumer() -> None:
    """The calling thread iterates."""
    thread = threading.current_thread()
    _consumers[id(thread)] = thread


def sleep_through_exit() -> bool:
    """Keep a daemon thread that iterates from going on while the interpreter goes.

    Told that its iterator is closed, it would let go of batches, or do worse, and be in torch's
    code at the wrong moment. Asleep it does no harm. Not for ever: there may be somebody who joins
    it at the exit. And not a worker of ours, whom we join.

    Gives whether the calling thread must not start any threads.
    """
    thread = threading.current_thread()
    if _exit.sleep_until is None or thread is threading.main_thread():
        return False
    if not is_ours(thread):
        time.sleep(max(0.0, _exit.sleep_until - time.monotonic()))
    return True


@functools.cache
def _register() -> None:
    """Called with the first start and not on import: the later, the earlier it runs."""
    atexit.register(_close_all)


def _close_all() -> None:
    _exit.sleep_until = time.monotonic() + _SLEEP_SECONDS
    closables = [closable for ref in _live.valuerefs() if (closable := ref()) is not None]
    for closable in closables:
        closable.tell()
    deadline = time.monotonic() + _GRACE_SECONDS
    for closable in closables:
        # What it has begun to start is waited for; it starts no more.
        if closable.is_starting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            closable.is_starting.release()
        closable.close(max(0.0, deadline - time.monotonic()), warns=False)
    _wait_for_computing()


def _wait_for_computing() -> None:
    """Wait for the threads that compute; for ours, however long it takes.

    One that only sleeps or waits does no harm, and may do so for ever. Nobody is warned of it.
    """
    asleep = {threading.current_thread()}
    consumers_until = time.monotonic() + _CONSUMER_SECONDS
    shared_until = time.monotonic() + _PATIENCE_SECONDS
    while computing := [t for t in _threads_left(consumers_until) if t not in asleep]:
        before = {thread: runnable_seconds(thread) for thread in computing}
        # All have the same time to show it in: that one has ended says nothing of the others.
        until = time.monotonic() + _INTERVAL_SECONDS
        for thread in computing:
            try:
                thread.join(max(0.0, until - time.monotonic()))
            except (AssertionError, RuntimeError):
                # It is just being started, or is not Python's to join: some library's own.
                time.sleep(max(0.0, until - time.monotonic()))
        seconds = {t: runnable_seconds(t) - before[t] for t in computing if t.is_alive()}
        is_shared = sum(seconds.values()) > _SHARED_SECONDS and time.monotonic() < shared_until
        least = 0.0 if is_shared else _RUNNABLE_SECONDS
        asleep.update(thread for thread in seconds if seconds[thread] <= least)


def _threads_left(consumers_until: float) -> list[threading.Thread]:
    """Those that may be at work.

    Ours by their name: what a finaliser has closed and not waited for, or not long enough, may
    still be so, and its lifetime is gone.
    """
    consumers: list[threading.Thread | None] = []
    if time.monotonic() < consumers_until:
        consumers = [ref() for ref in _consumers.valuerefs()]
    return [t for t in threading.enumerate() if is_ours(t) or t in consumers]


def _forget() -> None:
    """The child of a fork has none of these threads, and an exit of its own."""
    _exit.sleep_until = None
    _live.clear()
    _consumers.clear()


os.register_at_fork(after_in_child=_forget)
