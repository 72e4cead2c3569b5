"""How the workers of an epoch wake its one consumer."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Final

__all__ = ["Signal"]

_NAP_SECONDS: Final = 0.5
_epoch_ids = itertools.count()


class Signal:
    """A flag that any thread may set and one thread waits for; setting it twice is setting it once.

    It is a lock used the other way round: held = nothing happened since the last look. Unlike
    `Event` or `Condition` it holds nothing while Python code runs, so a finaliser that interrupts
    any other code may set it, and an interrupted wait leaves nothing behind.
    """

    def __init__(self) -> None:
        self.epoch_id = next(_epoch_ids)
        self._nothing_happened = threading.Lock()
        self._nothing_happened.acquire()
        self._is_open = threading.Lock()
        """Held until the epoch is over. Like the other, it is never held while code runs."""
        self._is_open.acquire()
        self.error: BaseException | None = None
        self.is_closed = False
        """The epoch is over: what its workers still do is for nobody."""
        self.closed_at: float | None = None
        self.set_at = 0.0
        """When what the consumer waits for has happened."""
        self.consumer_is_patient = False
        """Whoever has more to do may do it first: the consumer is going to look by itself soon."""

    def fail(self, error: BaseException) -> None:
        """End the epoch with this error: what makes its batches is gone."""
        self.error = error
        self.close()

    def set(self) -> None:
        if not self._nothing_happened.locked():
            return  # Already set, and the consumer is still to look.
        self.set_at = time.monotonic()
        try:  # noqa: SIM105 (contextlib.suppress takes ten times as long)
            self._nothing_happened.release()
        except RuntimeError:
            pass  # Set by another in this instant.

    def close(self) -> None:
        if self.closed_at is None:
            self.closed_at = time.monotonic()
        self.is_closed = True
        self.set()
        self._end_pauses()

    def pause(self, seconds: float) -> bool:
        """Let a worker sleep; true, and sooner, if the epoch is over."""
        if not self._is_open.acquire(timeout=seconds):
            return False
        self._end_pauses()  # The next one's too.
        return True

    def _end_pauses(self) -> None:
        with contextlib.suppress(RuntimeError):  # Ended already.
            self._is_open.release()

    def wait(self, deadline: float | None) -> bool:
        """Wait until the flag is set, and clear it; false if the deadline passed first."""
        while True:
            # CPython does not hear a Ctrl-C that comes in the instant before it goes to sleep, and
            # would sleep on. So it has to wake up now and then.
            seconds = _NAP_SECONDS
            if deadline is not None:
                seconds = min(seconds, max(0.0, deadline - time.monotonic()))
            if self._nothing_happened.acquire(timeout=seconds):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
