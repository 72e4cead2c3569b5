"""What a faster loader could bring: `Profile` measures it, `CachedLoader` lets scripts do it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .._engine import Span
from .._stats import COLUMNS, LoaderStats
from .._text import number
from ._report import report
from ._trace import trace


@dataclass(frozen=True)
class Scaling:
    """Throughput of one stage by itself, for several numbers of workers.

    Examples:
        >>> scaling = Scaling("load", ((1, 60.0), (2, 118.0), (4, 233.0)))
        >>> scaling.shape
        'rises'

    """

    __module__ = "spdl_torch"

    stage: str
    throughputs: tuple[tuple[int, float], ...]
    """Pairs of a number of workers and its samples per second."""

    @property
    def shape(self) -> Literal["rises", "flat", "falls"]:
        """How the throughput changes from one worker to the most that were tried."""
        first, last = self.throughputs[0][1], self.throughputs[-1][1]
        if last > 1.25 * first:
            return "rises"
        return "falls" if last < 0.8 * first else "flat"


@dataclass(frozen=True)
class Headroom:
    """How fast the training loop would be if loading took no time.

    Examples:
        >>> headroom = Headroom(batches_per_second=16.0, free_batches_per_second=40.0)
        >>> headroom.speed_up
        2.5

    """

    __module__ = "spdl_torch"

    batches_per_second: float
    """Throughput of the loop as it is."""
    free_batches_per_second: float
    """Throughput of the loop with batches that are already in memory."""

    @property
    def speed_up(self) -> float:
        slow = self.batches_per_second
        return self.free_batches_per_second / slow if slow > 0 else 1.0


@dataclass(frozen=True, repr=False)
class Profile:
    """Statistics of some batches, with the timeline of every worker and how each stage scales.

    `print(profile)` prints a table. `profile.save("trace.json")` is for Perfetto or Chrome's
    tracing page, `profile.save("report.html")` for any browser.

    Examples:
        >>> loader = DataLoader(range(100), batch_size=10, num_workers=2)
        >>> profile = loader.profile(num_batches=5, sweep=False)
        >>> profile.stats.loop.num_batches
        5
        >>> "collate" in {span.stage for span in profile.spans}
        True

    """

    __module__ = "spdl_torch"

    stats: LoaderStats
    spans: tuple[Span, ...]
    scalings: tuple[Scaling, ...]
    headroom: Headroom | None
    """None if there was no step to measure."""

    def __str__(self) -> str:
        lines = [str(self.stats)]
        if self.headroom:
            now, free = self.headroom.batches_per_second, self.headroom.free_batches_per_second
            lines.append(
                f"headroom: {number(now)} batches/s would be {number(free)} "
                f"({self.headroom.speed_up:.2f} times) if loading took no time"
            )
        if self.scalings:
            lines += ["", "workers: samples/s of the stage by itself", *_scalings(self.scalings)]
        return "\n".join(lines)

    __repr__ = __str__
    """For notebooks: the timeline has thousands of spans."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON; without the timeline."""
        return {
            "stats": self.stats.as_dict(),
            "scalings": [dataclasses.asdict(s) | {"shape": s.shape} for s in self.scalings],
            "headroom": self.headroom and dataclasses.asdict(self.headroom),
        }

    def save(self, path: str | Path) -> None:
        """Write a trace (`.json`) or a report (`.html`).

        Args:
            path: the file; its suffix chooses the format.

        """
        path = Path(path)
        if path.suffix == ".json":
            text = json.dumps(trace(self.spans, str(self.stats.verdict)))
        elif path.suffix == ".html":
            text = report(self.as_dict(), self.spans, str(self))
        else:
            raise ValueError(
                f"a profile is saved as .json (a trace) or .html (a report), not {path.name}."
            )
        path.write_text(text, encoding="utf-8")


def _scalings(scalings: tuple[Scaling, ...]) -> Iterator[str]:
    name_width = max(len(scaling.stage) for scaling in scalings)
    for scaling in scalings:
        # No-break spaces, so that lines are only broken between two measurements.
        points = [f"{n}:\N{NO-BREAK SPACE}{number(rate)}/s" for n, rate in scaling.throughputs]
        wrapped = textwrap.fill(
            "  ".join([*points, scaling.shape]),
            COLUMNS,
            initial_indent=f"  {scaling.stage:{name_width}}  ",
            subsequent_indent=" " * (name_width + 4),
        )
        yield wrapped.replace("\N{NO-BREAK SPACE}", " ")


class CachedLoader:
    """Yields the first batches of a loader, and then the same batches again and again.

    Put it around the loader of a training script: the speed-up that it brings is the most that a
    faster loader could bring. The batches are the same objects each time, so a loop that changes
    them in place finds them changed.

    Args:
        loader: any loader, also torch's own.
        num_batches: how many real batches to take.
        length: batches per epoch. Default: as many as the loader has. Needed for a loader without
            a length.

    Examples:
        >>> loader = CachedLoader(DataLoader(range(6), batch_size=2), num_batches=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [0, 1]]

    """

    __module__ = "spdl_torch"

    def __init__(self, loader: Iterable[Any], num_batches: int, length: int | None = None) -> None:
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, got {num_batches}.")
        self.loader = loader
        self.num_batches = num_batches
        self._length = length
        self._batches: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader) if self._length is None else self._length  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        try:
            length = len(self)
        except TypeError as error:
            raise TypeError(
                "the loader has no length. Pass one to CachedLoader, as in length=1000."
            ) from error
        batches = self._batches
        if batches is None:
            batches = []
            for batch in itertools.islice(self.loader, min(self.num_batches, length)):
                batches.append(batch)
                yield batch
            # Only a complete list is kept: a loop that left earlier starts again.
            self._batches = batches
            length -= len(batches)
        if batches:
            yield from itertools.islice(itertools.cycle(batches), length)

    def __repr__(self) -> str:
        return f"CachedLoader({self.loader!r}, num_batches={self.num_batches})"

    def __getattr__(self, name: str) -> Any:
        # Training scripts ask a loader for its dataset, its sampler, its batch size.
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)
