"""The timeline in the Trace Event Format, which Chrome and Perfetto read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._engine import Span

_ORDER = ("step", "load", "iterate", "preprocess", "collate", "transfer")
"""The loop comes first: the other lanes explain why it waits."""


class Lane(NamedTuple):
    """Spans that can be drawn on one line, one after the other."""

    name: str
    stage: str
    """The stage of the worker; `step` for the training loop."""
    spans: list[Span]


def lanes(spans: Sequence[Span]) -> list[Lane]:
    """Return the spans of each worker, on several lanes where they overlap.

    The calls of an `async def load` overlap: they all belong to one worker, the event loop.
    """
    by_worker: dict[str, list[list[Span]]] = {}
    for span in sorted(spans, key=lambda span: span.started_seconds):
        rows = by_worker.setdefault(span.worker, [])
        started, _ = _microseconds(span)
        row = next((row for row in rows if _microseconds(row[-1])[1] <= started), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    found = []
    for worker, rows in by_worker.items():
        stages = {span.stage for row in rows for span in row}
        stage = "step" if "wait" in stages else min(stages, key=_place)
        for number, row in enumerate(rows, 1):
            found.append(Lane(f"{worker} ({number})" if len(rows) > 1 else worker, stage, row))
    return sorted(found, key=lambda lane: (_place(lane.stage), _natural(lane.name)))


def _place(stage: str) -> int:
    return _ORDER.index(stage) if stage in _ORDER else len(_ORDER)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts `load-2` before `load-10`."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _microseconds(span: Span) -> tuple[int, int]:
    """Return start and end in the unit of the format.

    Whole numbers: a viewer adds start and duration, and with fractions one span could end after
    the start of the next one, where they should touch.
    """
    ended_seconds = span.started_seconds + span.seconds
    return round(1e6 * span.started_seconds), round(1e6 * ended_seconds)


def trace(spans: Sequence[Span], verdict: str) -> dict[str, Any]:
    """Return one event for each span, and one thread for each lane."""
    events = [_event("M", "process_name", 0, {"name": "spdl_torch"})]
    for thread, lane in enumerate(lanes(spans), 1):
        events.append(_event("M", "thread_name", thread, {"name": lane.name}))
        events.append(_event("M", "thread_sort_index", thread, {"sort_index": thread}))
        events += [_span_event(span, thread) for span in lane.spans]
    events += _batches_ready(spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"verdict": verdict},
    }


def _event(
    phase: str, name: str, thread: int, arguments: dict[str, Any], **more: Any
) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": 1, "tid": thread, "args": arguments, **more}


def _span_event(span: Span, thread: int) -> dict[str, Any]:
    started, ended = _microseconds(span)
    arguments: dict[str, Any] = {"batch": span.batch, "samples": span.num_samples}
    if span.index is not None:
        arguments["index"] = span.index
    more = {"cat": span.stage, "ts": started, "dur": ended - started}
    return _event("X", span.stage, thread, arguments, **more)


def _batches_ready(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Return a counter of batches that all stages have finished and the loop has not taken."""
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
    # A worker may record the end of a batch after it has woken the loop.
    changes += [(max(taken[batch], made[batch]), -1) for batch in taken.keys() & made.keys()]
    num_ready = 0
    # At the same time, up comes before down: the counter is never negative.
    for microseconds, change in sorted(changes, key=lambda change: (change[0], -change[1])):
        num_ready += change
        yield _event("C", "batches ready", 0, {"batches": num_ready}, ts=microseconds)
