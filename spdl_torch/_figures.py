"""What is measured of one stage, of the training loop and of one piece of work."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ._text import ratio

__all__ = ["LoopStats", "Span", "StageName", "StageStats", "WorkerKind"]

StageName: TypeAlias = Literal["load", "preprocess", "collate", "transfer", "iterate"]
WorkerKind: TypeAlias = Literal["thread", "async", "executor"]

_MIDDLE_OF_BUCKET = 2 ** (-1 / 16)
"""The geometric middle of a histogram bucket, relative to its upper end.

A bucket is an eighth of an octave wide.
"""


@dataclass(frozen=True)
class StageStats:
    """One stage during an epoch, with the figures of all its workers added up.

    Examples:
        >>> stage = StageStats("load", 4, 10.0, 500, 36.0, 1.0, 0.0, 4, ((0.1, 480), (0.4, 20)))
        >>> stage.samples_per_second, stage.utilisation
        (50.0, 0.9)
        >>> stage.p99_seconds / stage.p50_seconds > 2  # A few slow samples.
        True

    """

    __module__ = "spdl_torch"

    name: StageName
    """`load`, `preprocess`, `collate` or `transfer`; `iterate` for iterable datasets. A dataset
    that is not split into stages does all its work in `preprocess`."""
    width: int | None
    """How many samples the stage can process at a time; None if its executor does not say.
    `collate` runs in the workers of the stage before it."""
    elapsed_seconds: float
    """Duration of the epoch so far. All seconds below are sums over the workers, so they can be up
    to `width` times as many."""
    num_samples: int
    """Finished samples (batches, for `collate` and `transfer`)."""
    busy_seconds: float
    """Wall-clock time spent on samples. Near `width × elapsed_seconds`: this stage is what the
    others wait for."""
    cpu_seconds: float
    """The part of the busy time in which the stage used a core."""
    queued_seconds: float
    """The part of the busy time in which the stage was ready to run but all cores were taken: too
    many threads, or other programs. The rest of `busy_seconds` is waiting for I/O or for the GIL.
    (On Linux; elsewhere 0.)"""
    num_in_flight: int
    """Samples that are being processed now (batches, for `collate` and `transfer`)."""
    histogram: tuple[tuple[float, int], ...] = dataclasses.field(repr=False)
    """Upper ends of duration buckets in seconds, each with the number of samples in it."""
    workers: WorkerKind = "thread"
    """What the workers are: threads, `async` calls on an event loop, or an `executor`."""

    @property
    def samples_per_second(self) -> float:
        return ratio(self.num_samples, self.elapsed_seconds)

    @property
    def num_busy(self) -> float:
        """Number of busy workers, on average."""
        num_busy = ratio(self.busy_seconds, self.elapsed_seconds)
        # After an epoch that was left early, workers may have finished what they had begun.
        return num_busy if self.width is None else min(num_busy, float(self.width))

    @property
    def utilisation(self) -> float:
        """Share of the workers' time in which they were busy; 0 if `width` is not known."""
        return ratio(self.num_busy, self.width or 0)

    @property
    def mean_seconds(self) -> float:
        """Mean time per sample; per batch for `collate` and `transfer`."""
        return ratio(self.busy_seconds, self.num_samples)

    @property
    def p50_seconds(self) -> float:
        """Median time per sample; per batch for `collate` and `transfer`."""
        return self._quantile(0.5)

    @property
    def p99_seconds(self) -> float:
        """99th percentile of the time per sample; per batch for `collate` and `transfer`.

        Far more than `p50_seconds`: a few slow samples delay their batches. A larger `buffer_size`
        or `in_order=False` lets other batches overtake. (For samples of less than a fifth of a
        millisecond, only the mean of one batch in sixteen is measured.)
        """
        return self._quantile(0.99)

    def _quantile(self, share: float) -> float:
        remaining = share * sum(count for _, count in self.histogram)
        for upper_seconds, count in self.histogram:
            remaining -= count
            if remaining <= 0:
                return upper_seconds * _MIDDLE_OF_BUCKET
        return 0.0


@dataclass(frozen=True)
class LoopStats:
    """The training loop during an epoch.

    Examples:
        >>> loop = LoopStats(101, 12.0, first_wait_seconds=2.0, step_seconds=40.0, wake_seconds=0.0)
        >>> loop.waited_share, loop.batches_per_second
        (0.2, 2.0)

    """

    __module__ = "spdl_torch"

    num_batches: int
    """Batches that the loop has received."""
    waited_seconds: float
    """Time spent in `next()`: what the loader costs the loop."""
    first_wait_seconds: float
    """The part of `waited_seconds` before the first batch."""
    step_seconds: float
    """Time spent between two calls of `next()`. A step counts when it is done."""
    wake_seconds: float
    """Mean time from a batch being ready to the waiting loop continuing. Near five milliseconds
    (Python's switch interval) or more: other threads hold the GIL."""

    @property
    def waited_share(self) -> float:
        """Share of the epoch spent waiting, after the first batch."""
        waited = self.waited_seconds - self.first_wait_seconds
        return ratio(waited, waited + self.step_seconds)

    @property
    def batches_per_second(self) -> float:
        """Throughput after the first batch."""
        seconds = self.waited_seconds - self.first_wait_seconds + self.step_seconds
        return ratio(max(self.num_batches - 1, 0), seconds)


@dataclass(frozen=True)
class Span:
    """One piece of work of one worker, in the timeline of a `Profile`.

    Examples:
        >>> span = Span("load", "load-0", 0.5, 0.25, batch=3, num_samples=1, index="17")
        >>> ended_seconds = span.started_seconds + span.seconds
        >>> ended_seconds
        0.75

    """

    __module__ = "spdl_torch"

    stage: StageName | Literal["wait", "step"]
    """As in `StageStats.name`; `wait` and `step` for the training loop."""
    worker: str
    """`preprocess-0`, `load-3`, …; `loop` for the training loop."""
    started_seconds: float
    """Time since the profile began."""
    seconds: float
    batch: int
    """Number of the batch, from 0."""
    num_samples: int
    index: str | None
    """`repr` of the sample's index, if it was one sample."""
