"""One epoch as its workers see it: whether it is over, and how they wake the consumer."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

__all__ = ["Epoch"]

_ids = itertools.count()


class Epoch:
    """The state that one epoch's batches, workers and consumer share.

    It refers to nothing of the user's: a finaliser that closes the epoch keeps it alive.

    The wake-up is a lock used the other way round: held means that nothing has happened since the
    consumer last looked. Any thread may release it; only the consumer acquires it. Unlike `Event`
    or `Condition` it holds no lock while Python code runs, so a finaliser may wake the consumer in
    the middle of any other code. A wake-up is never lost: a worker marks its batch as finished
    before it releases the lock, and the consumer looks at the batches after it has acquired it.
    """

    def __init__(self) -> None:
        self.id = next(_ids)
        self.is_closed = False
        """The epoch is over or was abandoned: results of its workers are thrown away."""
        self.closed_at: float | None = None
        self.error: BaseException | None = None
        """What ended the epoch for all its batches, if anything did."""
        self.defers_wakeup = False
        """A worker with more cheap batches at hand need not wake the consumer after each."""
        self.woken_at = 0.0
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._ended = threading.Lock()
        """Held until the epoch is closed, for workers that pause."""
        self._ended.acquire()

    def wake_consumer(self) -> None:
        if not self._wakeup.locked():
            return  # Woken already, and still to look.
        self.woken_at = time.monotonic()
        try:  # noqa: SIM105 (contextlib.suppress takes ten times as long)
            self._wakeup.release()
        except RuntimeError:
            pass  # Another thread released it in this instant.

    def wait(self, seconds: float) -> bool:
        """Wait until the consumer is woken, for so many seconds; return whether it was."""
        return self._wakeup.acquire(timeout=seconds)

    def close(self, error: BaseException | None = None) -> None:
        """End the epoch. Takes no lock and waits for nothing; may be called again."""
        if self.closed_at is None:
            self.closed_at = time.monotonic()
            self.error = error
        self.is_closed = True
        self.wake_consumer()
        self._release_paused()

    def pause(self, seconds: float) -> bool:
        """Sleep in a worker; return True, and sooner, if the epoch is closed."""
        if not self._ended.acquire(timeout=seconds):
            return False
        self._release_paused()  # For the next worker that pauses.
        return True

    def _release_paused(self) -> None:
        with contextlib.suppress(RuntimeError):  # Released already.
            self._ended.release()
