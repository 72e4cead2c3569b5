"""Statistics of a loader: frozen snapshots, each figure with the conclusion to draw from it."""

from __future__ import annotations

import dataclasses
import logging
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ._bad_samples import BadSamplePolicy
from ._cache import CacheStats, SampleCache
from ._engine import EpochClock, LoopStats, StageStats
from ._machine import num_cores
from ._text import aligned, duration, home_of_workers, number, percent, ratio, size
from ._verdict import Verdict, verdict_on

COLUMNS = 100
"""Maximal width of a printed table."""

_HEADER = ["stage", "width", "unit", "per s", "busy", "cores", "mean", "p50", "p99"]
_BATCH_STAGES = ("collate", "transfer")
"""The stages that process whole batches."""

_logger = logging.getLogger("spdl_torch")


@dataclass(frozen=True)
class LoaderStats:
    """A loader during its last epoch, or during the one that runs now.

    `print(loader.stats())` prints the verdict and a table.

    Examples:
        >>> with DataLoader(range(100), batch_size=10, num_workers=2) as loader:
        ...     for batch in loader:
        ...         stats = loader.stats()
        >>> stats.loop.num_batches, stats.stage("preprocess").width
        (10, 2)

    """

    __module__ = "spdl_torch"

    kind: Literal["thread", "multiprocessing", "caller"]
    """Where samples are loaded: worker threads (here or in child processes), torch's worker
    processes, or the calling thread (`num_workers=0`). Only threads are measured stage by
    stage."""
    is_running: bool
    """The epoch is not over; a later snapshot will say more."""
    elapsed_seconds: float
    """Time from the first `next()` to the end of the epoch, or to now."""
    stages: tuple[StageStats, ...]
    """First to last."""
    loop: LoopStats
    window: int
    """How many batches may be in flight."""
    num_ready: int
    """Batches that are ready for the loop now. Near `window`: the loop is slower than the
    loader."""
    num_bytes: int
    """Size of the tensors and arrays in the batches that the loop has received."""
    num_bad_samples: int
    """Samples replaced, in the whole life of the loader."""
    num_retries: int
    num_cores: int
    """Cores that this process may use, and its children with it."""
    cpu_seconds: float = 0.0
    """CPU time of this process, the training loop included, without child processes."""
    num_processes: int = 0
    """In how many child processes the worker threads live; 0 for this process."""
    can_fuse: bool = False
    """Workers compute most of the time, and `fuse=True` would make some of that quicker."""
    cache: CacheStats | None = None
    """What the `cache` of the loader has done in this epoch, if it has one."""

    def __str__(self) -> str:
        verdict = self.verdict
        lines = textwrap.wrap(verdict.sentence, COLUMNS) + textwrap.wrap(verdict.advice, COLUMNS)
        if self.stages:
            lines += ["", *aligned([_HEADER, *map(_row, self.stages)])]
        return "\n".join([*lines, "", *_loop_lines(self)])

    @property
    def verdict(self) -> Verdict:
        """Which stage limits the throughput, and what to change."""
        return verdict_on(self)

    def stage(self, name: str) -> StageStats | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return dataclasses.asdict(self) | {
            "stages": [_with_properties(stage) for stage in self.stages],
            "loop": _with_properties(self.loop),
            "verdict": dataclasses.asdict(self.verdict),
        }


def _with_properties(figures: StageStats | LoopStats) -> dict[str, Any]:
    names = [name for name, value in vars(type(figures)).items() if isinstance(value, property)]
    return dataclasses.asdict(figures) | {name: getattr(figures, name) for name in names}


def stats_of(
    clock: EpochClock, bad_sample_policy: BadSamplePolicy, cache: SampleCache | None = None
) -> LoaderStats:
    read = clock.read()
    return LoaderStats(
        kind=clock.kind,
        is_running=clock.is_running,
        window=clock.window,
        num_ready=clock.num_ready,
        num_bad_samples=len(bad_sample_policy.bad_samples),
        num_retries=bad_sample_policy.num_retries,
        num_cores=num_cores(),
        num_processes=clock.num_processes,
        cache=None if cache is None else cache.stats(),
        **read._asdict(),
    )


# -- as text --------------------------------------------------------------------------------------


def _row(stage: StageStats) -> list[str]:
    times = (stage.mean_seconds, stage.p50_seconds, stage.p99_seconds)
    return [
        stage.name,
        "?" if stage.width is None else str(stage.width),
        "batch" if stage.name in _BATCH_STAGES else "sample",
        number(stage.samples_per_second),
        f"{stage.num_busy:.1f}",
        f"{ratio(stage.cpu_seconds, stage.elapsed_seconds):.1f}",
        *(duration(seconds) if stage.num_samples else "-" for seconds in times),
    ]


def _loop_lines(stats: LoaderStats) -> Iterator[str]:
    loop = stats.loop
    yield (
        f"loop: {loop.num_batches} batches, {number(loop.batches_per_second)} batches/s, "
        f"waited {percent(loop.waited_share)}, "
        f"step {duration(ratio(loop.step_seconds, loop.num_batches))}"
    )
    yield (
        f"      first batch after {duration(loop.first_wait_seconds)}, "
        f"woken in {duration(loop.wake_seconds)}, {size(stats.num_bytes)} of batches"
    )
    if stats.kind == "thread":
        yield f"      {home_of_workers(stats.num_processes)}"
    if stats.cache is not None:
        yield f"      {stats.cache}"
    if stats.num_bad_samples or stats.num_retries:
        yield f"      {stats.num_bad_samples} bad samples replaced, {stats.num_retries} retries"


def _log_line(stats: LoaderStats) -> str:
    busy = []
    for stage in stats.stages:
        # Collate runs in the workers of another stage, so it has no width of its own.
        has_width = stage.width is not None and stage.name != "collate"
        busy.append(f"{stage.name} {stage.num_busy:.1f}" + (f"/{stage.width}" if has_width else ""))
    if busy:
        busy[0] += " busy"
    parts = [
        f"batch {stats.loop.num_batches}",
        f"{number(stats.loop.batches_per_second)} batches/s",
        f"waited {percent(stats.loop.waited_share)}",
        *busy,
        f"{stats.num_ready}/{stats.window} ready",
    ]
    return " · ".join(parts)


class StatsLog:
    """Logs one line of statistics at a batch, if the interval has passed since the last line."""

    def __init__(self, interval_seconds: float, stats: Callable[[], LoaderStats]) -> None:
        self._interval_seconds = interval_seconds
        self._stats = stats
        self._logged_at = time.monotonic()

    def at_batch(self) -> None:
        now = time.monotonic()
        if now - self._logged_at >= self._interval_seconds:
            self._logged_at = now
            _logger.info("%s", _log_line(self._stats()))
