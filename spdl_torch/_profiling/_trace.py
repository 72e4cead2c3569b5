"""The timeline as Chrome and Perfetto read it: the Trace Event Format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._profile import Profile, Span

__all__ = ["Lane", "lanes", "trace"]

_PROCESS = 1
_ORDER = ("step", "load", "iterate", "preprocess", "collate", "transfer")
"""The loop comes first: whether it waits is what the other lanes explain."""


@dataclass(frozen=True)
class Lane:
    """Spans that can be drawn on one line: one after the other, or one within another."""

    name: str
    stage: str
    """Whose worker it is; `step` for the training loop."""
    spans: tuple[Span, ...]
    """By time."""


def trace(profile: Profile) -> dict[str, Any]:
    """One event for each span, one thread for each lane."""
    events = [_metadata("process_name", 0, name="spdl_torch")]
    for thread, lane in enumerate(lanes(profile.spans), 1):
        events += [
            _metadata("thread_name", thread, name=lane.name),
            _metadata("thread_sort_index", thread, sort_index=thread),
            *(_event(span, thread) for span in lane.spans),
        ]
    events += _batches_ready(profile.spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"verdict": str(profile.stats.verdict)},
    }


def lanes(spans: tuple[Span, ...]) -> list[Lane]:
    """The spans of each worker; of one that does many things at a time, on several lanes.

    That is the event loop of an `async def load`, whose tasks overlap as they like.
    """
    of_worker: dict[str, list[Span]] = {}
    for span in spans:
        of_worker.setdefault(span.worker, []).append(span)
    found = [lane for worker, own in of_worker.items() for lane in _disentangled(worker, own)]
    return sorted(found, key=lambda lane: (_place(lane.stage), _natural(lane.name)))


@dataclass
class _OpenLane:
    spans: list[Span] = field(default_factory=list)
    under_way: list[Span] = field(default_factory=list)
    """Those that have not ended, each within the one before it."""

    def take(self, span: Span) -> bool:
        """Whether the span has its place here; they come by their start."""
        started, ended = _microseconds(span)
        while self.under_way and _microseconds(self.under_way[-1])[1] <= started:
            self.under_way.pop()
        if self.under_way:
            around = self.under_way[-1]
            # Collate may be a part of preprocess. A load within a load is another sample's.
            if around.stage == span.stage or _microseconds(around)[1] < ended:
                return False
        self.under_way.append(span)
        self.spans.append(span)
        return True


def _disentangled(worker: str, spans: list[Span]) -> Iterator[Lane]:
    open_lanes: list[_OpenLane] = []
    for span in sorted(spans, key=lambda span: (span.started_seconds, -span.seconds)):
        if not any(lane.take(span) for lane in open_lanes):
            open_lanes.append(_OpenLane([span], [span]))
    stage = min((_stage(span) for span in spans), key=_place)
    for number, lane in enumerate(open_lanes, 1):
        name = f"{worker} ({number})" if len(open_lanes) > 1 else worker
        yield Lane(name, stage, tuple(lane.spans))


def _stage(span: Span) -> str:
    return "step" if span.stage == "wait" else span.stage


def _place(stage: str) -> int:
    return _ORDER.index(stage) if stage in _ORDER else len(_ORDER)


def _natural(name: str) -> list[tuple[int, str]]:
    """To sort `load-2` before `load-10`."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _microseconds(span: Span) -> tuple[int, int]:
    """Start and end in the unit of the format.

    Whole ones: a viewer adds start and duration, and with fractions one span would end a bit after
    the start of the next, where they should touch.
    """
    ended_seconds = span.started_seconds + span.seconds
    return round(1e6 * span.started_seconds), round(1e6 * ended_seconds)


def _event(span: Span, thread: int) -> dict[str, Any]:
    started, ended = _microseconds(span)
    arguments: dict[str, Any] = {"batch": span.batch, "samples": span.num_samples}
    if span.index is not None:
        arguments["index"] = span.index
    return {
        "ph": "X",
        "name": span.stage,
        "cat": span.stage,
        "pid": _PROCESS,
        "tid": thread,
        "ts": started,
        "dur": ended - started,
        "args": arguments,
    }


def _metadata(event_name: str, thread: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": event_name, "pid": _PROCESS, "tid": thread, "args": arguments}


def _batches_ready(spans: tuple[Span, ...]) -> Iterator[dict[str, Any]]:
    """A counter: a batch is ready when no stage is at it any more, until the loop has it."""
    made: dict[int, int] = {}
    taken: dict[int, int] = {}
    for span in spans:
        _, ended = _microseconds(span)
        if span.stage == "wait":
            taken[span.batch] = ended
        elif span.stage != "step":
            made[span.batch] = max(ended, made.get(span.batch, 0))
    if not taken:
        return
    changes = [(ended, 1) for ended in made.values()]
    # A worker may note its end after it has woken the loop.
    changes += [(max(taken[batch], made[batch]), -1) for batch in taken.keys() & made.keys()]
    num_ready = 0
    # At the same time, up comes before down: the counter is never negative.
    for microseconds, change in sorted(changes, key=lambda change: (change[0], -change[1])):
        num_ready += change
        yield {
            "ph": "C",
            "name": "batches ready",
            "pid": _PROCESS,
            "tid": 0,
            "ts": microseconds,
            "args": {"batches": num_ready},
        }
