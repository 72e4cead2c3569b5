"""What `DataLoader.profile` has found out."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._engine import Span
from .._stats import LoaderStats
from ._report import report
from ._table import table
from ._trace import trace

__all__ = ["Headroom", "Profile", "Scaling", "Span"]


@dataclass(frozen=True)
class Scaling:
    """What more workers do for one stage, by itself."""

    stage: str
    throughputs: tuple[tuple[int, float], ...]
    """Number of workers, and samples per second with so many."""

    @property
    def shape(self) -> str:
        """`rises`, `flat` or `falls` from one worker to the most that were tried."""
        first, last = self.throughputs[0][1], self.throughputs[-1][1]
        if last > 1.25 * first:
            return "rises"
        return "falls" if last < 0.8 * first else "flat"


@dataclass(frozen=True)
class Headroom:
    """How fast the loop would be if loading took no time."""

    batches_per_second: float
    """As it is."""
    free_batches_per_second: float
    """With batches that are already there."""

    @property
    def speed_up(self) -> float:
        slow = self.batches_per_second
        return self.free_batches_per_second / slow if slow > 0 else 1.0


@dataclass(frozen=True, repr=False)
class Profile:
    """The statistics of some batches, with every worker's timeline and how each stage scales.

    `print(profile)` is a table. `profile.save("trace.json")` is for Perfetto or Chrome's tracing
    page, `profile.save("report.html")` for any browser.
    """

    stats: LoaderStats
    spans: tuple[Span, ...]
    scalings: tuple[Scaling, ...]
    headroom: Headroom | None
    """None if there was no step to measure."""

    def __str__(self) -> str:
        return table(self)

    __repr__ = __str__
    """For notebooks: the timeline has thousands of spans."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON; without the timeline."""
        return {
            "stats": self.stats.as_dict(),
            "scalings": [dataclasses.asdict(s) | {"shape": s.shape} for s in self.scalings],
            "headroom": self.headroom and dataclasses.asdict(self.headroom),
        }

    def save(self, path: str | Path) -> None:
        """Write a trace (`.json`) or a report (`.html`).

        Args:
            path: where to; its suffix chooses the format.

        """
        path = Path(path)
        if path.suffix not in (".json", ".html"):
            raise ValueError(
                f"a profile is saved as .json (a trace) or .html (a report), not {path.name}."
            )
        is_trace = path.suffix == ".json"
        path.write_text(json.dumps(trace(self)) if is_trace else report(self), encoding="utf-8")
