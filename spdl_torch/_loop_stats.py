"""What is measured of the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from ._text import ratio

__all__ = ["LoopStats"]


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
