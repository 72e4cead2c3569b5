"""What a worker is at, for who has waited for it in vain."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ._record import PendingBatch

__all__ = ["InFlight", "awaited_lines", "of_batch", "stack_lines"]

_OURS: Final = str(Path(__file__).parent)
_MAX_LINES: Final = 12


@dataclass(frozen=True)
class InFlight:
    """A sample, or a batch, that a worker is at."""

    stage: str
    record: PendingBatch
    slot: int | None
    """None: all samples of the batch together."""
    seconds: float
    """For how long."""
    lines: list[str]
    """Where in the user's code, innermost last; none if that cannot be known from here."""

    @property
    def index(self) -> Any:
        return None if self.slot is None else self.record.indices[self.slot]


def of_batch(
    stage: str, at: tuple[PendingBatch, float] | None, thread: threading.Thread
) -> list[InFlight]:
    """The one batch that a thread is at, and since when, if it is at one."""
    if at is None:
        return []
    record, since = at
    return [InFlight(stage, record, None, time.monotonic() - since, stack_lines(thread))]


def stack_lines(thread: threading.Thread) -> list[str]:
    """Where a thread is in the user's code."""
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    return [] if frame is None else _lines(list(traceback.walk_stack(frame))[::-1])


def awaited_lines(coroutine: Any) -> list[str]:
    """Where a coroutine waits in the user's code."""
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return _lines(frames)


def _lines(frames: list[tuple[FrameType, int]]) -> list[str]:
    summary = traceback.StackSummary.extract(iter(frames))
    ours = [position for position, frame in enumerate(summary) if frame.filename.startswith(_OURS)]
    first = ours[-1] + 1 if ours else 0
    return traceback.StackSummary.from_list(summary[first:][-_MAX_LINES:]).format()
