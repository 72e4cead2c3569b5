"""What each worker of a child process works on, in memory that its parent can read."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any, Final

from ._batch import PendingBatch
from ._stage import WorkerCursor

_IDLE: Final = -1
_BYTES: Final = 8


class Board:
    """A row for each worker: the number of its batch, and the slot.

    The parent makes it and reads it after the child has died, to tell which samples may have killed
    it. Each row has one writer.
    """

    def __init__(self, num_rows: int, descriptor: int | None = None) -> None:
        size = 2 * _BYTES * num_rows
        if descriptor is None:
            descriptor = os.memfd_create("spdl_torch")
            os.truncate(descriptor, size)
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._cells = memoryview(mmap.mmap(descriptor, size)).cast("q")
        self.num_rows = num_rows

    def clear(self) -> None:
        for row in range(self.num_rows):
            self._cells[2 * row] = _IDLE

    def cursor(self, row: int) -> WorkerCursor:
        """Return a cursor that shows on the board where its worker is."""
        return _CursorOnBoard(self._cells, 2 * row)

    def read(self) -> list[tuple[int, int]]:
        """Return the number of the batch and the slot of each worker that is not idle."""
        cells = self._cells.tolist()
        rows = [(cells[2 * row], cells[2 * row + 1]) for row in range(self.num_rows)]
        return [(number, slot) for number, slot in rows if number != _IDLE]


class _CursorOnBoard(WorkerCursor):
    __slots__ = ("_batch", "_cells", "_place", "_slot")

    def __init__(self, cells: Any, place: int) -> None:
        self._cells = cells
        self._place = place
        super().__init__()

    @property
    def batch(self) -> PendingBatch | None:
        return self._batch

    @batch.setter
    def batch(self, batch: PendingBatch | None) -> None:
        self._batch = batch
        self._cells[self._place] = _IDLE if batch is None else batch.number

    @property
    def slot(self) -> int:
        return self._slot

    @slot.setter
    def slot(self, slot: int) -> None:
        self._slot = slot
        self._cells[self._place + 1] = slot
