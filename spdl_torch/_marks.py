"""Marks in the traces of torch's profiler: whose work it is that a worker does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from ._engine import WorkerCursor

__all__ = ["Marked", "MarkedPlace", "marked", "profiler_runs"]


def profiler_runs() -> bool:
    """Whether a profiler runs in any thread."""
    return profiler._is_profiler_enabled


class Marked(AbstractContextManager[None]):
    """What a worker is in while it works, with a mark around it if a profiler runs.

    Not made with `contextlib.contextmanager`, which would change the user's exceptions. One worker
    has one of these and enters it again and again.
    """

    def __init__(self, stage: str, task_context: AbstractContextManager[Any] | None = None) -> None:
        self._name = f"spdl_torch.{stage}"
        self._task_context = task_context or nullcontext()
        self._mark: profiler.record_function | None = None

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled:
            self._mark = profiler.record_function(self._name)
            self._mark.__enter__()
        self._task_context.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._task_context.__exit__(*exc_info)
        if self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(*exc_info)


class MarkedPlace(Marked):
    """The same for a worker at a place, and around the batches that it makes.

    Whether a profiler runs is asked once for each task, which is often many batches.
    """

    def __init__(self, stage: str, place: WorkerCursor) -> None:
        super().__init__(stage, place.task_context)
        self._place = weakref.ref(place)  # Which refers to this.
        self._collate_context = Marked("collate")

    def __enter__(self) -> None:
        super().__enter__()
        if (place := self._place()) is not None:
            place.collate_context = None if self._mark is None else self._collate_context


def marked(stage: str, operation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An operation with a mark around it if a profiler runs."""
    mark = Marked(stage)

    def call(value: Any) -> Any:
        with mark:
            return operation(value)

    return call
