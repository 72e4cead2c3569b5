"""The interface between the iterator and the sources of batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from .._engine import EpochClock
from .._resume import Progress
from .._settings import LoaderSettings

CLOSED: Final = "this iterator is closed. Call iter(loader) for a new one."
"""The error of a source that is asked for a batch after it was closed."""


class Delivery(Protocol):
    """A batch, or the error that it ended in. Both count as delivered."""

    @property
    def position(self) -> Any:
        """The number of the draw, or a worker's number and its bookmark."""

    def result(self) -> Any:
        """Return the batch, or raise its error. Can be called once."""


class BatchSource:
    """Where batches come from. The iterator, not the source, saves states and counts batches."""

    clock: EpochClock
    """The clocks of the epoch that runs."""
    receive: Callable[[Any], Any] | None = None
    """What the consumer's thread does with each batch, if batches go to a device."""

    @property
    def threads(self) -> list[threading.Thread]:
        """The worker threads of this process."""
        return []

    @property
    def is_usable(self) -> bool:
        """Whether another epoch can begin: it is not closed, and not in a forked child."""
        return False

    def begin(self, settings: LoaderSettings, progress: Progress) -> None:
        """Begin an epoch. The epoch before it, if it is not over, is abandoned."""
        raise NotImplementedError

    def next(self) -> Delivery:
        """Return the next batch; raise StopIteration at the end of the epoch."""
        raise NotImplementedError

    def close(self, *, quickly: bool = False) -> None:
        """End the workers and wait for them, or only for a moment. Then `next` raises."""
        raise NotImplementedError

    def close_with(self, holder: Any) -> None:
        """Close when the holder is garbage-collected, unless the workers end by themselves."""


class Made:
    """A batch that has been made, or its error."""

    __slots__ = ("_batch", "_error", "position")

    def __init__(self, position: Any, batch: Any, error: BaseException | None = None) -> None:
        self.position = position
        self._batch = batch
        self._error = error

    def result(self) -> Any:
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # The traceback holds this frame.
        batch, self._batch = self._batch, None
        return batch


def not_stop_iteration(error: BaseException) -> BaseException:
    """Return the error; for a StopIteration, which would end the loop, a RuntimeError instead."""
    if not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"the dataset raised {error!r} where a sample was expected")
    failure.__cause__ = error
    return failure
