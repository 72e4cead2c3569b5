"""A batch in flight, and the epoch that it belongs to."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

Locate = Callable[[Any, BaseException], str | None]
"""Returns the file of a sample that failed, if it is known, from its index and the error."""


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
        self.wakeup = threading.Lock()
        """The consumer acquires it to wait."""
        self.wakeup.acquire()
        self._ended = threading.Lock()
        """Held until the epoch is closed, for workers that pause."""
        self._ended.acquire()

    def wake_consumer(self) -> None:
        if not self.wakeup.locked():
            return  # Woken already, and still to look.
        self.woken_at = time.monotonic()
        try:  # noqa: SIM105 (contextlib.suppress takes ten times as long)
            self.wakeup.release()
        except RuntimeError:
            pass  # Another thread released it in this instant.

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


class PendingBatch:
    """A batch in flight: one slot for each sample, in the order of the batch.

    Workers fill the slots in any order; the order belongs to the slots, so nothing is ever sorted.
    A slot is *settled* when nothing more will happen to it: it holds its finished sample, or its
    sample failed. `settle` returns True to exactly one caller, which has the batch collated. So a
    batch is finished exactly once.
    """

    def __init__(self, epoch: Epoch, number: int, drawn: Any, indices: list[Any]) -> None:
        self.epoch = epoch
        self.number = number
        self.position: Any = number
        """What is saved once the batch is delivered. Iterable datasets leave a bookmark here."""
        self.drawn = drawn
        """What the sampler drew, unchanged: a whole-batch operation receives this object."""
        self.indices = indices
        """One index for each slot."""
        self.original_indices = indices
        """What `indices` were before bad samples were replaced by others."""
        self.earlier_indices: list[Any] = []
        """Some indices that were drawn before this batch, latest batch first."""
        self.substitutes: dict[int, list[Any]] = {}
        """For the slot of a bad sample: the indices that may still be tried instead."""
        self.locate: Locate | None = None
        self.slots: Any = [None] * len(indices)
        self.output: Any = None
        """The batch, once it is collated."""
        self.error: BaseException | None = None
        self.is_finished = False
        self.is_exhausted = False
        """The worker's iterator had nothing left for this batch (iterable datasets)."""
        self.turn: int | None = None
        """Its place in the order of the transfer stage, once it has arrived there."""
        self._num_unsettled = len(indices)
        self._failed_slot = len(indices)
        self._lock = threading.Lock()

    def settle(self, num_slots: int) -> bool:
        """Settle some slots; return True to the one caller that settles the last."""
        with self._lock:
            self._num_unsettled -= num_slots
            return self._num_unsettled == 0

    def fail(self, slot: int, error: BaseException) -> None:
        """Let the batch end in this error, unless a lower slot failed too.

        The lowest slot wins, so the error does not depend on which worker was quicker.
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

    def finish(self, output: Any = None) -> None:
        """Leave the batch, or its error, for the consumer, who is still to be woken."""
        self.output = output
        self.slots = None
        # Last: a consumer that sees the flag must see everything above.
        self.is_finished = True

    def result(self) -> Any:
        """Return the batch, or raise the error it ended in. Neither is kept here."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                # The traceback holds this frame; without this the frame would hold the error.
                del error
        output, self.output = self.output, None
        return output


def check_count(samples: Any, num_samples: int) -> list[Any]:
    """Return what a whole-batch operation returned as a list with one sample for each index."""
    counted = list(samples)
    if len(counted) != num_samples:
        raise ValueError(
            f"asked for {num_samples} samples at once, got {len(counted)}. "
            "Return one sample for each index, in the same order."
        )
    return counted


def note_origin(error: BaseException, stage: str, batch: PendingBatch, slot: int | None) -> None:
    """Add a note to the user's exception that says where in the pipeline it was raised."""
    # An exception may refuse notes, an index may have no repr: the note is not worth an error.
    with contextlib.suppress(Exception):
        if slot is None:
            where = f"batch {batch.number}"
            if any(index is not None for index in batch.indices):  # Else there is no sampler.
                where = f"{where} (sample indices {_shortened(batch.indices)})"
        else:
            index = batch.indices[slot]
            where = f"sample index {index!r} (batch {batch.number})"
            path = None if batch.locate is None else batch.locate(index, error)
            if path is not None:
                where = f"{where}, {path}"
        error.add_note(f"spdl_torch: raised in the {stage} stage for {where}")


def without_our_frame(error: BaseException) -> BaseException:
    """Return the error that the calling function just caught, without that function's frame.

    The frame tells the user nothing, and it refers to the batch, which is going to refer to the
    error: a reference cycle that would keep a batch of samples in memory.
    """
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _shortened(indices: list[Any]) -> str:
    shown = ", ".join(repr(index) for index in indices[:8])
    return shown if len(indices) <= 8 else f"{shown}, … {len(indices)} in all"
