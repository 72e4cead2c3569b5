"""One batch in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from ._signal import Signal

__all__ = ["Locate", "PendingBatch", "Shareable"]

Locate = Callable[[Any, BaseException], str | None]
"""Gives the file of a sample that has failed, if it is known: of its index and the error."""


class Shareable(Protocol):
    """Work that any number of workers may do together."""

    def is_left(self) -> bool: ...

    def is_awaited(self) -> bool:
        """Whether somebody has nothing else to do than to wait for it."""

    def share(self) -> None:
        """Call as many workers to it as it has use for."""


class PendingBatch:
    """One batch in flight: a slot for each of its samples, in the order they have in the batch.

    Workers fill the slots in any order; order belongs to the slots, so nothing is ever sorted.
    A slot is *settled* when nothing more will happen to it: it holds its finished sample, or its
    sample has failed. Whoever settles the last slot sees to it that the batch is made.
    """

    __slots__ = (
        "_failed_slot",
        "_lock",
        "_num_unsettled",
        "batch",
        "before",
        "bookmark",
        "drawn",
        "error",
        "indices",
        "is_exhausted",
        "is_finished",
        "locate",
        "number",
        "originals",
        "shareable",
        "signal",
        "slots",
        "substitutes",
        "turn",
    )

    def __init__(self, number: int, drawn: Any, indices: list[Any], signal: Signal) -> None:
        self.number = number
        self.drawn = drawn
        """What the sampler drew, unchanged: a whole-batch operation gets this object."""
        self.indices = indices
        """One index for each slot."""
        self.slots: Any = [None] * len(indices)
        self.batch: Any = None
        self.bookmark: Any = None
        """What the stage says about where it is after this batch (iterable datasets)."""
        self.originals = indices
        """What `indices` were before samples that failed were replaced by others."""
        self.before: list[Any] = []
        """Some indices that were drawn before, those of the latest batch first."""
        self.substitutes: dict[int, list[Any]] = {}
        """For a slot whose sample has failed: the indices that may still be tried instead."""
        self.locate: Locate | None = None
        self.error: BaseException | None = None
        self.is_finished = False
        self.is_exhausted = False
        """There was nothing left to make this batch of (iterable datasets)."""
        self.shareable: list[Callable[[], Shareable | None]] = []
        """Work on this batch that one worker was called to, as weak references: if it is gone, it
        has been done."""
        self.turn: int | None = None
        """Which one it is for the transfer stage; None if it has not come there."""
        self._num_unsettled = len(indices)
        self._failed_slot = len(indices)
        self.signal = signal
        self._lock = threading.Lock()

    @property
    def epoch_id(self) -> int:
        """A number that tells its epoch from every other."""
        return self.signal.epoch_id

    @property
    def is_abandoned(self) -> bool:
        """Nobody waits for this batch any more."""
        return self.signal.is_closed

    def pause(self, seconds: float) -> bool:
        """Let a worker sleep; return true, and sooner, if the epoch is over."""
        return self.signal.pause(seconds)

    def has_shareable_work(self) -> bool:
        return any((work := ref()) is not None and work.is_left() for ref in self.shareable)

    def share_work(self, *, if_awaited: bool) -> None:
        """Call more workers to what one worker was called to."""
        kept = []
        while self.shareable:
            ref = self.shareable.pop()
            if (work := ref()) is None:
                continue
            if if_awaited and not work.is_awaited():
                kept.append(ref)
            else:
                work.share()
        self.shareable.extend(kept)

    def settle(self, num_slots: int) -> bool:
        """Settle some slots; true for the one caller that settles the last."""
        with self._lock:
            self._num_unsettled -= num_slots
            return self._num_unsettled == 0

    def fail(self, slot: int, error: BaseException) -> None:
        """Let the batch end in this error, unless a sample before this one has failed too.

        The batch is not cut short: with the sample of the lowest slot reporting, the error does
        not depend on which worker was quicker.
        """
        if isinstance(error, StopIteration):
            # Raised out of __next__ it would end the training loop as if the epoch were over.
            cause = error
            error = RuntimeError(f"the dataset raised {cause!r} where a sample was expected")
            error.__cause__ = cause
            error.__notes__ = getattr(cause, "__notes__", [])
        with self._lock:
            if self.error is None or slot < self._failed_slot:
                self.error = error
                self._failed_slot = slot

    def hold(self, batch: Any) -> None:
        """Have the batch instead of its samples."""
        self.batch = batch
        self.slots = None

    def finish(self, batch: Any = None) -> None:
        """Leave the batch, or its error, for the consumer. The `signal` is still to be set."""
        self.hold(batch)
        # Last: whoever sees the flag must see everything above.
        self.is_finished = True

    def abandon(self, error: BaseException) -> None:
        """Leave this error for the consumer, and the slots to the workers that may be at them."""
        self.fail(0, error)
        self.is_finished = True

    @property
    def position(self) -> Any:
        """What to save once this batch is delivered: its bookmark, or its number."""
        return self.number if self.bookmark is None else self.bookmark

    def result(self) -> Any:
        """Give the batch away, or raise the error it ended in; the record keeps neither."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                # The traceback holds this frame; without this the frame would hold the error.
                del error
        batch, self.batch = self.batch, None
        return batch
