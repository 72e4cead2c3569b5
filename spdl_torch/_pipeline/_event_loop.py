"""An event loop that outlives the threads it runs in."""

from __future__ import annotations

import asyncio
import select
import selectors
import sys
import weakref
from typing import Final

__all__ = ["EventLoop"]


class EventLoop:
    """Keeps one event loop from epoch to epoch, so that client sessions bound to it stay usable.

    The thread that runs the loop ends with its epoch; the loop itself rests here until the next.
    Two epochs at the same time get a loop each.
    """

    def __init__(self) -> None:
        self._resting: list[asyncio.AbstractEventLoop] = []
        weakref.finalize(self, _close_all, self._resting)

    def __reduce__(self) -> tuple[type[EventLoop], tuple[()]]:
        return EventLoop, ()

    def take(self) -> asyncio.AbstractEventLoop:
        try:
            return self._resting.pop()
        except IndexError:
            return _new_event_loop()

    def give_back(self, loop: asyncio.AbstractEventLoop) -> None:
        self._resting.append(loop)


def _close_all(loops: list[asyncio.AbstractEventLoop]) -> None:
    for loop in loops:
        loop.close()


if sys.platform == "linux":

    class _PreciseEpollSelector(selectors.EpollSelector):
        """An epoll that does not oversleep.

        epoll counts in milliseconds and the standard library rounds up, so a loop wakes up half a
        millisecond late on average: too late for many short waits at a time.
        """

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() < _MAX_SELECT_FD:
                # An epoll is a file that can be waited for like any other.
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    # Any other type is the user's own choice.
    if sys.platform == "linux" and type(loop) is asyncio.SelectorEventLoop:
        loop.close()
        loop = asyncio.SelectorEventLoop(_PreciseEpollSelector())
    return loop


_MAX_SELECT_FD: Final = 1024
"""select() cannot wait for a file descriptor of this number or higher."""
