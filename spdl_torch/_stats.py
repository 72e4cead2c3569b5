"""What a loader has measured: frozen snapshots, each figure with what to conclude from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch._utils import cpu_count

from ._bad_samples import BadSamplePolicy
from ._engine import EpochClock, StageStats
from ._verdict import Verdict, verdict_on

__all__ = ["LoaderStats", "LoopStats", "StageStats", "stats_of"]


@dataclass(frozen=True)
class LoopStats:
    """The training loop during an epoch."""

    num_batches: int
    """That it has got."""
    waited_seconds: float
    """Spent in `next()`: what the loader costs the loop."""
    first_wait_seconds: float
    """Of those, the ones until the first batch came."""
    step_seconds: float
    """Spent with the batches, outside of `next()`. A step counts when it is done."""
    wake_seconds: float
    """Mean time from a batch being ready to the waiting loop going on. Near five milliseconds or
    more, Python's switch interval: other threads hold the interpreter's lock."""

    @property
    def waited_share(self) -> float:
        """The share of the epoch spent waiting, after the first batch."""
        waited = self.waited_seconds - self.first_wait_seconds
        return _ratio(waited, waited + self.step_seconds)

    @property
    def batches_per_second(self) -> float:
        """After the first batch."""
        seconds = self.waited_seconds - self.first_wait_seconds + self.step_seconds
        return _ratio(self.num_batches - 1, seconds)


@dataclass(frozen=True)
class LoaderStats:
    """A loader during its last epoch, or the one that runs now."""

    kind: str
    """Who works: `thread`, `multiprocessing`, or `caller` with `num_workers=0`. Only threads are
    measured stage by stage."""
    is_running: bool
    """The epoch is not over; a later snapshot will say more."""
    elapsed_seconds: float
    """From the first `next()` to the end of the epoch, or to now."""
    stages: tuple[StageStats, ...]
    """First to last."""
    loop: LoopStats
    window: int
    """How many batches may be in flight."""
    num_ready: int
    """Batches that wait for the loop now. Near `window`: the loop is slower than the loader."""
    num_bytes: int
    """Of the tensors and arrays in the batches that the loop has got."""
    num_bad_samples: int
    """Replaced, in the whole life of the loader."""
    num_retries: int
    num_cores: int
    """That this process may use."""
    cpu_seconds: float = 0.0
    """Of the whole process, the training loop included."""

    def __str__(self) -> str:
        from ._profiling._table import stats_table  # noqa: PLC0415 (which shows more than this)

        return stats_table(self)

    @property
    def verdict(self) -> Verdict:
        """Which stage bounds the loop, and what to change."""
        return verdict_on(self)

    def stage(self, name: str) -> StageStats | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        stages = [
            dataclasses.asdict(stage)
            | {
                "samples_per_second": stage.samples_per_second,
                "num_busy": stage.num_busy,
                "utilisation": stage.utilisation,
                "mean_seconds": stage.mean_seconds,
                "p50_seconds": stage.p50_seconds,
                "p99_seconds": stage.p99_seconds,
            }
            for stage in self.stages
        ]
        loop = dataclasses.asdict(self.loop) | {
            "waited_share": self.loop.waited_share,
            "batches_per_second": self.loop.batches_per_second,
        }
        return dataclasses.asdict(self) | {
            "stages": stages,
            "loop": loop,
            "verdict": dataclasses.asdict(self.verdict),
        }


def stats_of(measurement: EpochClock, bad_sample_policy: BadSamplePolicy) -> LoaderStats:
    elapsed_seconds, cpu_seconds, consumer, stages = measurement.read()
    return LoaderStats(
        kind=measurement.kind,
        is_running=measurement.is_running,
        elapsed_seconds=elapsed_seconds,
        stages=stages,
        loop=LoopStats(
            num_batches=consumer.num_batches,
            waited_seconds=consumer.waited_seconds,
            first_wait_seconds=consumer.first_wait_seconds,
            step_seconds=consumer.step_seconds,
            wake_seconds=consumer.wake_seconds,
        ),
        window=measurement.window,
        num_ready=measurement.num_ready,
        num_bytes=consumer.num_bytes,
        num_bad_samples=len(bad_sample_policy.bad_samples),
        num_retries=bad_sample_policy.num_retries,
        num_cores=cpu_count() or 1,
        cpu_seconds=cpu_seconds,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
