"""Event loops that outlive the threads they run in."""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import sys
import weakref
from typing import Any, Final

__all__ = ["EventLoop", "new_event_loop"]


class EventLoop:
    """Keeps one event loop from epoch to epoch, so that client sessions bound to it stay usable.

    The thread that runs the loop ends with its epoch; the loop itself rests here until the next.
    Two epochs at the same time get a loop each.
    """

    def __init__(self) -> None:
        self._resting: list[asyncio.AbstractEventLoop] = []
        self._process_id = os.getpid()
        weakref.finalize(self, _close_all, self._resting, self._process_id)

    def __reduce__(self) -> tuple[type[EventLoop], tuple[()]]:
        return EventLoop, ()

    def take(self) -> asyncio.AbstractEventLoop:
        if self._process_id != os.getpid():
            # The loops belong to the process that this one was forked from.
            self._resting.clear()
            self._process_id = os.getpid()
        try:
            return self._resting.pop()
        except IndexError:
            return new_event_loop()

    def give_back(self, loop: asyncio.AbstractEventLoop) -> None:
        self._resting.append(loop)


def _close_all(loops: list[asyncio.AbstractEventLoop], process_id: int) -> None:
    if os.getpid() == process_id:
        for loop in loops:
            loop.close()


if sys.platform == "linux":

    class _PreciseEpollSelector(selectors.EpollSelector):
        """An epoll that does not oversleep.

        epoll counts in milliseconds and the standard library rounds up, so a loop wakes up half a
        millisecond late on average: too late for many short waits at a time.
        """

        def __init__(self) -> None:
            super().__init__()
            self._process_id = os.getpid()

        def unregister(self, fileobj: Any) -> selectors.SelectorKey:
            if self._process_id != os.getpid():
                # A forked process shares its parent's epoll. When it closes its copy of the loop,
                # or only forgets it, the parent's must not lose what it waits for.
                self._selector: Any = select.epoll()
                self._process_id = os.getpid()
            return super().unregister(fileobj)

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() < _MAX_SELECT_FD:
                # An epoll is a file that can be waited for like any other.
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop that is safe in a process that forks."""
    loop = asyncio.new_event_loop()
    # Any other type is the user's own choice.
    if sys.platform == "linux" and type(loop) is asyncio.SelectorEventLoop:
        loop.close()
        loop = asyncio.SelectorEventLoop(_PreciseEpollSelector())
    return loop


_MAX_SELECT_FD: Final = 1024
"""select() cannot wait for a file descriptor of this number or higher."""
