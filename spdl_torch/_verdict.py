"""The verdict: which stage limits the throughput of a training loop, and what to change.

`_RULES` are tried in order; the first one that applies makes the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal, Protocol

from ._engine import StageStats
from ._loop_stats import LoopStats
from ._text import percent

__all__ = ["Verdict", "VerdictKind", "verdict_on"]

VerdictKind = Literal[
    "training-bound",
    "io-bound",
    "cpu-bound",
    "gil-bound",
    "collate-bound",
    "transfer-bound",
    "oversubscribed",
    "window-bound",
    "overhead-bound",
    "process-bound",
    "unthreaded",
    "unknown",
]

_LITTLE_WAITING: Final = 0.05
"""A loop that waits for a smaller share of its time has little to gain from a faster loader."""
_BUSY: Final = 0.5
"""A stage whose workers are busy for a smaller share of their time is not the bottleneck."""
_ONE_IS_BUSY: Final = 0.8
"""The value of `_BUSY` for an executor of unknown width, which may have only one worker."""
_CHEAP_SECONDS: Final = 0.0005
"""Handing a batch to the loop costs about as much as making one in less time than this."""
_AT_WORK: Final = 0.5
"""Workers that use a core, or wait for one, for a larger share of their busy time do CPU work."""
_ASLEEP: Final = 0.33
"""Workers that wait for the GIL are neither on a core nor queued for one for this share or more."""
_ONE_CORE: Final = 1.25
"""Workers that wait for the GIL use hardly more than one core between them."""
_SLOW_WAKE_SECONDS: Final = 0.001
"""A woken thread takes this long or longer to continue if other threads hold the GIL."""
_CROWDED_SECONDS: Final = 0.005
"""A woken thread that takes longer than the switch interval shares the GIL with many others."""
_TOO_MANY: Final = 1.5
"""With this many times the threads that the cores can run, the threads slow each other down."""


@dataclass(frozen=True)
class Verdict:
    """The bottleneck of a training loop: one sentence with the figures, and one piece of advice.

    Examples:
        >>> verdict = Verdict("io-bound", "io-bound: 3.9 of 4 load workers busy.", "Raise it.")
        >>> print(verdict)
        io-bound: 3.9 of 4 load workers busy. Raise it.
        >>> verdict.kind == "training-bound"  # Then a faster loader would not help.
        False

    """

    __module__ = "spdl_torch"

    kind: VerdictKind
    sentence: str
    advice: str
    stage: str | None = None
    """The stage that limits the throughput, if one stage does."""

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}"


class _Stats(Protocol):
    """The figures of `LoaderStats` that the rules use."""

    @property
    def kind(self) -> str: ...
    @property
    def elapsed_seconds(self) -> float: ...
    @property
    def stages(self) -> Sequence[StageStats]: ...
    @property
    def loop(self) -> LoopStats: ...
    @property
    def window(self) -> int: ...
    @property
    def num_cores(self) -> int: ...
    @property
    def cpu_seconds(self) -> float: ...
    def stage(self, name: str, /) -> StageStats | None: ...


def verdict_on(stats: _Stats) -> Verdict:
    return next(verdict for rule in _RULES if (verdict := rule(stats)) is not None)


# -- which workers the others wait for ------------------------------------------------------------


@dataclass(frozen=True)
class StageLoad:
    """The load on the workers of a stage, which may collate batches too."""

    stage: StageStats
    """The stage, with the seconds that its workers spend in `collate` added."""
    collate: StageStats | None
    """The collate stage, if the workers of this stage run it."""

    @classmethod
    def all_of(cls, stats: _Stats) -> list[StageLoad]:
        collate = stats.stage("collate")
        loads = []
        for stage in stats.stages:
            collates = stage.name in ("preprocess", "iterate") and stage.workers == "thread"
            if collates and collate is not None:
                whole = replace(
                    stage,
                    busy_seconds=stage.busy_seconds + collate.busy_seconds,
                    cpu_seconds=stage.cpu_seconds + collate.cpu_seconds,
                    queued_seconds=stage.queued_seconds + collate.queued_seconds,
                )
                loads.append(cls(whole, collate))
            elif stage.name != "collate":
                loads.append(cls(stage, None))
        if collate is not None and not any(load.collate for load in loads):
            loads.append(cls(collate, None))
        return loads

    @property
    def utilisation(self) -> float:
        # An executor of unknown width counts as busy if one of its workers is.
        return min(1.0, self.stage.num_busy / (self.stage.width or 1))

    @property
    def at_work_share(self) -> float:
        """Share of the busy time on a core, or ready to run on one."""
        needed_seconds = self.stage.cpu_seconds + self.stage.queued_seconds
        return min(1.0, needed_seconds / self.stage.busy_seconds)

    @property
    def num_at_work(self) -> float:
        """Number of workers, on average, that were on a core or ready to run on one."""
        return self.at_work_share * self.stage.num_busy

    @property
    def num_cores_used(self) -> float:
        return self.stage.cpu_seconds / self.stage.elapsed_seconds

    def __str__(self) -> str:
        width = "" if self.stage.width is None else f" of {self.stage.width}"
        return f"{self.stage.num_busy:.1f}{width} {self.stage.name} workers busy"


def _busiest(stats: _Stats) -> StageLoad:
    return max(StageLoad.all_of(stats), key=lambda load: load.utilisation)


def _others(stats: _Stats, busiest: StageLoad) -> str:
    """Return how idle the other stages are, in words."""
    idle = [
        f", {load.stage.name} idle {percent(1 - load.utilisation)}"
        for load in StageLoad.all_of(stats)
        if load.stage.name != busiest.stage.name and load.stage.width is not None
    ]
    return "".join(idle)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _waited(stats: _Stats) -> str:
    return f"the loop waited {percent(stats.loop.waited_share)} of its time"


# -- the rules ------------------------------------------------------------------------------------


def _too_early(stats: _Stats) -> Verdict | None:
    if stats.loop.num_batches >= 2 and stats.elapsed_seconds > 0:
        return None
    return Verdict(
        "unknown",
        f"unknown: too few batches to tell ({stats.loop.num_batches}).",
        "Iterate over the loader for a while.",
    )


def _first_batch(stats: _Stats) -> Verdict | None:
    loop = stats.loop
    # The batches loaded in parallel with the first one are ready soon after it.
    if loop.num_batches > stats.window or loop.first_wait_seconds < 0.5 * stats.elapsed_seconds:
        return None
    return Verdict(
        "unknown",
        f"unknown: {percent(loop.first_wait_seconds / stats.elapsed_seconds)} of the time went "
        f"into the first of {loop.num_batches} batches, which are too few to tell.",
        f"Iterate over more batches than are prefetched ({stats.window}).",
    )


def _training(stats: _Stats) -> Verdict | None:
    if stats.loop.waited_share >= _LITTLE_WAITING:
        return None
    step = _duration(stats.loop.step_seconds / stats.loop.num_batches)
    return Verdict(
        "training-bound",
        f"training-bound: {_waited(stats)}, its steps took {step} each.",
        "The loader is not the bottleneck: tuning it will not help.",
    )


def _caller(stats: _Stats) -> Verdict | None:
    if stats.kind != "caller":
        return None
    return Verdict(
        "unthreaded",
        f"unthreaded: {_waited(stats)} for batches that it loads itself.",
        f"Set num_workers={stats.num_cores} to load batches in the background.",
    )


def _processes(stats: _Stats) -> Verdict | None:
    if stats.stages:
        return None
    return Verdict(
        "process-bound",
        f"process-bound: {_waited(stats)} for worker processes, which are not measured.",
        'Raise num_workers up to the number of cores, or use worker_method="thread" to see the '
        "stages.",
    )


def _event_loop(stats: _Stats) -> Verdict | None:
    load = stats.stage("load")
    if load is None or load.workers != "async" or load.cpu_seconds < 0.7 * load.elapsed_seconds:
        return None
    return Verdict(
        "cpu-bound",
        f"cpu-bound: the thread of the event loop computes "
        f"{percent(min(1.0, load.cpu_seconds / load.elapsed_seconds))} of the time.",
        "Move computation from load to preprocess; load is for waiting on I/O.",
        "load",
    )


def _overhead(stats: _Stats) -> Verdict | None:
    busy_seconds = sum(stage.busy_seconds for stage in stats.stages) / stats.loop.num_batches
    if busy_seconds >= _CHEAP_SECONDS:
        return None
    return Verdict(
        "overhead-bound",
        f"overhead-bound: {_waited(stats)} for batches that take {_duration(busy_seconds)} to "
        "make, which is no more than handing them over takes.",
        "Make larger batches, or set num_workers=0.",
    )


def _window(stats: _Stats) -> Verdict | None:
    busiest = _busiest(stats)
    if busiest.utilisation >= (_ONE_IS_BUSY if busiest.stage.width is None else _BUSY):
        return None
    if busiest.stage.workers == "executor":
        return Verdict(
            "window-bound",
            f"window-bound: {_waited(stats)}, but only {busiest}: few batches may be in flight "
            f"({stats.window}), or sending samples to the executor takes longer than its work.",
            "Raise buffer_size. If that does not help, preprocess in threads, without an executor.",
        )
    return Verdict(
        "window-bound",
        f"window-bound: {_waited(stats)}, but only {busiest}: few batches may be in flight "
        f"({stats.window}), or a slow sample delays the others.",
        "Raise prefetch_factor (or buffer_size), or set in_order=False.",
    )


def _waits_for_gil(stats: _Stats, load: StageLoad) -> bool:
    return (
        stats.num_cores >= 2
        and load.stage.workers == "thread"
        and load.num_at_work >= _AT_WORK
        and load.num_cores_used <= _ONE_CORE
        and 1 - load.at_work_share >= _ASLEEP
        and stats.loop.wake_seconds >= _SLOW_WAKE_SECONDS
    )


def _gil(stats: _Stats) -> Verdict | None:
    busiest = _busiest(stats)
    if not _waits_for_gil(stats, busiest):
        return None
    return Verdict(
        "gil-bound",
        f"gil-bound: {busiest}, but they use {busiest.num_cores_used:.1f} cores: they wait for "
        "each other to release the GIL.",
        _without_gil(busiest),
        stage=busiest.stage.name,
    )


def _without_gil(load: StageLoad) -> str:
    if load.stage.name == "preprocess":
        return (
            "Use preprocess_executor=ProcessPoolExecutor(...) or "
            'worker_method="multiprocessing"; more threads will not help.'
        )
    if load.stage.name == "load":
        return (
            "Move computation from load to preprocess, and use "
            "preprocess_executor=ProcessPoolExecutor(...); more threads will not help."
        )
    return 'Use worker_method="multiprocessing"; more threads will not help.'


def _oversubscribed(stats: _Stats) -> Verdict | None:
    busiest = _busiest(stats)
    # Where queued_seconds are not measured, busy threads on fully used cores count as queued.
    are_all_taken = busiest.num_cores_used > 0.8 * stats.num_cores
    is_unknown = busiest.stage.queued_seconds == 0.0
    num_at_work = busiest.stage.num_busy if are_all_taken and is_unknown else busiest.num_at_work
    if busiest.stage.workers != "thread" or num_at_work < _TOO_MANY * stats.num_cores:
        return None
    # While some threads wait for I/O, the cores can run others.
    asleep_seconds = busiest.stage.busy_seconds * (1 - busiest.at_work_share)
    if is_unknown or stats.loop.wake_seconds > _CROWDED_SECONDS:
        asleep_seconds = 0.0
    num_of_use = ceil(stats.num_cores * (1 + asleep_seconds / (busiest.stage.cpu_seconds or 1.0)))
    if busiest.stage.num_busy < _TOO_MANY * num_of_use:
        return None
    return Verdict(
        "oversubscribed",
        f"oversubscribed: {busiest} on {stats.num_cores} cores, {num_at_work:.1f} of them with a "
        "core or waiting for one.",
        f"Set {_argument(stats, busiest)}={num_of_use}: more threads than the cores can run slow "
        "each other down.",
        stage=busiest.stage.name,
    )


def _collate(stats: _Stats) -> Verdict | None:
    busiest = _busiest(stats)
    collate = busiest.stage if busiest.stage.name == "collate" else busiest.collate
    if collate is None or collate.busy_seconds < 0.5 * busiest.stage.busy_seconds:
        return None
    # Collating waits for the GIL too. Then the stage that uses the core is the one to blame.
    is_small = collate.cpu_seconds < 0.5 * busiest.stage.cpu_seconds
    if is_small and _waits_for_gil(stats, busiest):
        return None
    return Verdict(
        "collate-bound",
        f"collate-bound: {collate.num_busy:.1f} of {collate.width} workers collate batches, "
        f"{1000 * collate.mean_seconds:.1f} ms each{_others(stats, busiest)}.",
        "Make all samples the same shape and use the default collate, or do less in collate_fn.",
        stage="collate",
    )


def _transfer(stats: _Stats) -> Verdict | None:
    busiest = _busiest(stats)
    if busiest.stage.name != "transfer":
        return None
    return Verdict(
        "transfer-bound",
        "transfer-bound: copying a batch to the device takes "
        f"{1000 * busiest.stage.mean_seconds:.1f} ms{_others(stats, busiest)}.",
        "Copy less: uint8 instead of float32, and normalise on the device.",
        stage="transfer",
    )


def _input(stats: _Stats) -> Verdict | None:
    busiest = _busiest(stats)
    if busiest.at_work_share >= _AT_WORK:
        return None
    sentence = (
        f"io-bound: {busiest}, and they waited {percent(1 - busiest.at_work_share)} of that"
        f"{_others(stats, busiest)}."
    )
    advice = f"Raise {_argument(stats, busiest)}"
    if busiest.stage.width is not None:
        advice += f" (now {busiest.stage.width})"
    if stats.stage("load") is None and stats.stage("iterate") is None:
        advice += (
            ", or split the dataset into load and preprocess (StagedDataset), so that I/O has more "
            "workers than computation"
        )
    return Verdict("io-bound", sentence, f"{advice}.", busiest.stage.name)


def _computing(stats: _Stats) -> Verdict:
    busiest = _busiest(stats)
    width = busiest.stage.width
    sentence = (
        f"cpu-bound: {busiest}, using {busiest.num_cores_used:.1f} of {stats.num_cores} cores"
        f"{_others(stats, busiest)}."
    )
    are_taken = busiest.num_cores_used > 0.7 * stats.num_cores  # By these workers alone.
    if busiest.stage.queued_seconds > 0.5 * busiest.stage.cpu_seconds and not are_taken:
        share = percent(min(1.0, busiest.stage.queued_seconds / busiest.stage.busy_seconds))
        advice = f"They waited {share} of their time for a core: {_who_else(stats)}."
    elif width is None:
        advice = f"Raise {_argument(stats, busiest)}, up to the number of cores that it has."
    elif width < stats.num_cores:
        advice = f"Raise {_argument(stats, busiest)} to {stats.num_cores}, the number of cores."
    elif busiest.stage.name == "load":
        advice = "Move computation from load to preprocess; load is for waiting on I/O."
    else:
        advice = "All cores are taken: do" if are_taken else "Do"
        advice += " less per sample, or do some of it on the device."
        if stats.stage("load") is None and stats.stage("iterate") is None:
            # With a load stage the dataset may use ImageLoader already: folders of images do.
            advice += " If it decodes images, ImageLoader with its size= is faster."
    return Verdict("cpu-bound", sentence, advice, busiest.stage.name)


def _who_else(stats: _Stats) -> str:
    of_stages = sum(stage.cpu_seconds for stage in stats.stages if stage.workers != "executor")
    num_cores = (stats.cpu_seconds - of_stages) / stats.elapsed_seconds
    if num_cores > 0.25 * stats.num_cores:
        return f"the rest of this process, with the training loop, uses {num_cores:.1f}"
    return "other programs use this machine"


def _argument(stats: _Stats, load: StageLoad) -> str:
    if load.stage.workers == "executor":
        return "the number of the executor's workers"
    if load.stage.name == "load":
        return "num_io_workers"
    # Without a load stage there is only one kind of worker, which num_workers sets.
    return "num_workers" if stats.stage("load") is None else "num_cpu_workers"


_RULES: Final[Sequence[Callable[[_Stats], Verdict | None]]] = (
    _too_early,
    _first_batch,
    _training,
    _caller,
    _processes,
    _event_loop,
    _overhead,
    _window,
    _transfer,
    _collate,
    _oversubscribed,
    _gil,
    _input,
    _computing,
)
