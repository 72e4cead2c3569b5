"""Event loops that stay the same from epoch to epoch and survive a fork."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import Any


class EventLoop:
    """Keeps one event loop from epoch to epoch, so that client sessions bound to it stay usable.

    The thread that runs the loop ends with its epoch. The loop is kept here until the next epoch.
    Two epochs at the same time use one loop each. `new` returns a loop, or a runner of one.
    """

    def __init__(self, new: Callable[[], Any] = asyncio.new_event_loop) -> None:
        self._new = new
        self._idle: list[tuple[Any, int]] = []
        weakref.finalize(self, _close_all, self._idle)

    def __reduce__(self) -> tuple[type[EventLoop], tuple[Any]]:
        return EventLoop, (self._new,)

    def take(self) -> Any:
        try:
            loop, process_id = self._idle.pop()
        except IndexError:
            # A loop keeps the context that it is made in, whose values may refer to the loader.
            return Context().run(self._new)
        if process_id == os.getpid():
            return loop
        _close_or_keep(loop, process_id)  # Inherited by a fork.
        return self.take()

    def give_back(self, loop: Any) -> None:
        self._idle.append((loop, os.getpid()))


def _close_all(idle: list[tuple[Any, int]]) -> None:
    while idle:
        _close_or_keep(*idle.pop())


def _close_or_keep(loop: Any, process_id: int) -> None:
    """Close an event loop, or the runner of one, in its own process; in a forked child, keep it.

    A child shares its parent's epoll instance. If the child closed its copy of a loop, or only
    released it, the loop would unregister the parent's self-pipe, and no thread could wake the
    parent's loop any more. So a child never releases its copy, not even at interpreter exit.
    """
    if os.getpid() != process_id:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop))
        return
    # A loop starts a thread to end those of its executor. From Python 3.12 on that raises at
    # interpreter exit, where they have ended already.
    with contextlib.suppress(RuntimeError):
        loop.close()
