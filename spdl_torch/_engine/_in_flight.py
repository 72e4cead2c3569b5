"""What each worker is doing, for the message of a timeout."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ._batch import PendingBatch

_OURS: Final = str(Path(__file__).parent)
_MAX_LINES: Final = 12


@dataclass(frozen=True)
class InFlight:
    """A sample, or a batch, that a worker is working on."""

    stage: str
    batch: PendingBatch
    slot: int | None
    """None: all samples of the batch together."""
    seconds: float
    """For how long."""
    lines: list[str]
    """Where in the user's code, innermost last; empty if that cannot be known from here."""

    @property
    def index(self) -> Any:
        return None if self.slot is None else self.batch.indices[self.slot]


def batch_in_flight(
    stage: str, current: tuple[PendingBatch, float] | None, thread: threading.Thread
) -> list[InFlight]:
    """Return the one batch that a thread is working on, and since when, if there is one."""
    if current is None:
        return []
    batch, since = current
    return [InFlight(stage, batch, None, time.monotonic() - since, stack_lines(thread))]


def stack_lines(thread: threading.Thread) -> list[str]:
    """Return where a thread is in the user's code."""
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    return [] if frame is None else _lines(list(traceback.walk_stack(frame))[::-1])


def awaited_lines(coroutine: Any) -> list[str]:
    """Return where a coroutine waits in the user's code."""
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return _lines(frames)


def _lines(frames: list[tuple[FrameType, int]]) -> list[str]:
    summary = traceback.StackSummary.extract(iter(frames))
    ours = [place for place, frame in enumerate(summary) if frame.filename.startswith(_OURS)]
    first = ours[-1] + 1 if ours else 0
    return traceback.StackSummary.from_list(summary[first:][-_MAX_LINES:]).format()
