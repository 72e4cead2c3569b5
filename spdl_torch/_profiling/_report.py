"""A profile as one HTML page that loads nothing from the network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from .._engine import Span
from .._text import finite, home_of_workers
from ._trace import lanes

_BOXES = {
    "training-bound": "loop",
    "gil-bound": "loop",  # Worker threads slow its steps.
    "window-bound": "window",
    "unknown": None,
}
"""The box of the pipeline that a verdict is about, where it is not about a stage."""


def report(profile: dict[str, Any], spans: Sequence[Span], table: str) -> str:
    """Return the text of the page.

    Args:
        profile: what `Profile.as_dict` returns.
        spans: the timeline.
        table: the profile as text.

    """
    verdict = profile["stats"]["verdict"]
    stats = profile["stats"]
    data = profile | {
        "home": f" · {home_of_workers(stats['num_processes'])}"
        if stats["kind"] == "thread"
        else "",
        "bottleneck": verdict["stage"] or _BOXES.get(verdict["kind"], "workers"),
        "lanes": [
            {"name": lane.name, "stage": lane.stage, "spans": [_row(span) for span in lane.spans]}
            for lane in lanes(spans)
        ],
    }
    parts = {
        "style": _read("report.css"),
        "data": _embedded(data),
        "script": _read("report.js"),
        "table": html.escape(table),
    }
    # All at once, so that inserted text is not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("report.html"))


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _row(span: Span) -> list[Any]:
    """Return a span without names and to a tenth of a microsecond: there may be very many."""
    started, lasted = round(1e6 * span.started_seconds, 1), round(1e6 * span.seconds, 1)
    return [span.stage, started, lasted, span.batch, span.num_samples, span.index]


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON for a script element: no character in it can end the element."""
    text = json.dumps(finite(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
