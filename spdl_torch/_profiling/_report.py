"""A profile as one page for any browser, without anything from the network."""

from __future__ import annotations

import html
import json
import math
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ._table import table
from ._trace import lanes

if TYPE_CHECKING:
    from .._stats import LoaderStats
    from ._profile import Profile, Span

__all__ = ["report"]

_BOXES = {"training-bound": "loop", "window-bound": "window", "unknown": None}
"""What a verdict is about, where it is not about a stage."""


def report(profile: Profile) -> str:
    """The text of the page."""
    parts = {
        "style": _read("report.css"),
        "data": _embedded(_data(profile)),
        "script": _read("report.js"),
        "table": html.escape(table(profile)),
    }
    # In one go: what is put in is not searched for places to put things in.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("report.html"))


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _data(profile: Profile) -> dict[str, Any]:
    return profile.as_dict() | {
        "bottleneck": _bottleneck(profile.stats),
        "lanes": [
            {"name": lane.name, "stage": lane.stage, "spans": [_row(span) for span in lane.spans]}
            for lane in lanes(profile.spans)
        ],
    }


def _row(span: Span) -> list[Any]:
    """Without names, and to a tenth of a microsecond: there may be very many."""
    started, lasted = round(1e6 * span.started_seconds, 1), round(1e6 * span.seconds, 1)
    return [span.stage, started, lasted, span.batch, span.num_samples, span.index]


def _bottleneck(stats: LoaderStats) -> str | None:
    """The box of the pipeline that is marked: a stage, `loop`, `window` or `workers`."""
    return stats.verdict.stage or _BOXES.get(stats.verdict.kind, "workers")


def _embedded(data: dict[str, Any]) -> str:
    """JSON that a script element can hold: no character in it can end the element."""
    text = json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _finite(value: Any) -> Any:
    """Null for what JSON has no number for: the last line of a histogram may be open."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
