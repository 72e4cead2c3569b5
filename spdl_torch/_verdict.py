"""Which stage bounds the loop, and what to change: the rules.

They are asked in the order in which they stand in `_RULES`; the first that has an answer gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ._stats import LoaderStats, StageStats

__all__ = ["Verdict", "verdict_on"]

_LITTLE_WAITING: Final = 0.05
"""A loop that waits for a smaller share of its time has little to gain."""
_BUSY: Final = 0.5
"""A stage whose workers are busy for a smaller share of their time is not what others wait for."""
_ONE_IS_BUSY: Final = 0.8
"""The same for an executor that does not say how many workers it has: it may have only one."""
_CHEAP_SECONDS: Final = 0.0005
"""To make a batch in less than this costs no more than to hand it over."""
_AT_WORK: Final = 0.5
"""Who uses a core, or waits for one, for a larger share of its busy time does CPU work."""
_ASLEEP: Final = 0.33
"""Who does neither for so large a share, while between them all"""
_ONE_CORE: Final = 1.25
"""hardly more than one core is at work, waits for the interpreter's lock,"""
_SLOW_WAKE_SECONDS: Final = 0.001
"""if a thread that is woken takes so long to go on."""
_CROWDED_SECONDS: Final = 0.005
"""If it takes longer than the interpreter's switch interval, those asleep wait for a turn, too."""
_TOO_MANY: Final = 1.5
"""So many times the workers that the cores have use for get in each other's way."""


@dataclass(frozen=True)
class Verdict:
    """One sentence with the figures, and one advice."""

    kind: str
    """`training-bound`, `io-bound`, `cpu-bound`, `gil-bound`, `collate-bound`, `transfer-bound`,
    `oversubscribed`, `window-bound`, `overhead-bound`, `process-bound`, `unthreaded` or
    `unknown`."""
    sentence: str
    advice: str
    stage: str | None = None
    """The stage that it is about, if it is about one."""

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}"


def verdict_on(stats: LoaderStats) -> Verdict:
    return next(verdict for rule in _RULES if (verdict := rule(stats)) is not None)


# -- which workers the others wait for ------------------------------------------------------------


@dataclass(frozen=True)
class _Crew:
    """The workers of a stage, who may do another's work too."""

    stage: StageStats
    collate: StageStats | None

    @classmethod
    def all_of(cls, stats: LoaderStats) -> list[_Crew]:
        stages = [stage for stage in stats.stages if stage.name != "collate"]
        collate = stats.stage("collate")
        crews = []
        for stage in stages:
            makes_batches = stage.name in ("preprocess", "iterate") and stage.workers == "thread"
            crews.append(cls(stage, collate if makes_batches else None))
        if collate is not None and not any(crew.collate for crew in crews):
            crews.append(cls(collate, None))
        return crews

    @property
    def busy_seconds(self) -> float:
        return self.stage.busy_seconds + (self.collate.busy_seconds if self.collate else 0.0)

    @property
    def cpu_seconds(self) -> float:
        return self.stage.cpu_seconds + (self.collate.cpu_seconds if self.collate else 0.0)

    @property
    def queued_seconds(self) -> float:
        return self.stage.queued_seconds + (self.collate.queued_seconds if self.collate else 0.0)

    @property
    def num_busy(self) -> float:
        num_busy = self.busy_seconds / self.stage.elapsed_seconds
        return num_busy if self.stage.width is None else min(num_busy, float(self.stage.width))

    @property
    def utilisation(self) -> float:
        # An executor that does not say how many workers it has is busy if one of them is.
        return min(1.0, self.num_busy / (self.stage.width or 1))

    @property
    def at_work_share(self) -> float:
        """Of its busy time: with a core, or ready for one."""
        return min(1.0, (self.cpu_seconds + self.queued_seconds) / self.busy_seconds)

    @property
    def num_at_work(self) -> float:
        """How many of its workers, on average, had a core or were ready for one."""
        return self.at_work_share * self.num_busy

    @property
    def num_cores_used(self) -> float:
        return self.cpu_seconds / self.stage.elapsed_seconds

    def __str__(self) -> str:
        width = self.stage.width
        of_all = f"{self.num_busy:.1f}" if width is None else f"{self.num_busy:.1f} of {width}"
        return f"{of_all} {self.stage.name} workers busy"


def _busiest(stats: LoaderStats) -> _Crew:
    return max(_Crew.all_of(stats), key=lambda crew: crew.utilisation)


def _others(stats: LoaderStats, busiest: _Crew) -> str:
    """How idle the others are, in words."""
    idle = [
        f", {crew.stage.name} idle {_percent(1 - min(1.0, crew.utilisation))}"
        for crew in _Crew.all_of(stats)
        if crew.stage is not busiest.stage and crew.stage.width is not None
    ]
    return "".join(idle)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _waited(stats: LoaderStats) -> str:
    return f"the loop waited {_percent(stats.loop.waited_share)} of its time"


# -- the rules ------------------------------------------------------------------------------------


def _too_early(stats: LoaderStats) -> Verdict | None:
    if stats.loop.num_batches >= 2 and stats.elapsed_seconds > 0:
        return None
    return Verdict(
        "unknown",
        f"unknown: {stats.loop.num_batches} batches are too few to tell.",
        "Iterate over the loader for a while.",
    )


def _first_batch(stats: LoaderStats) -> Verdict | None:
    loop = stats.loop
    # What was loaded beside the first batch is there when the loop has got that.
    if loop.num_batches > stats.window or loop.first_wait_seconds < 0.5 * stats.elapsed_seconds:
        return None
    return Verdict(
        "unknown",
        f"unknown: {_percent(loop.first_wait_seconds / stats.elapsed_seconds)} of the time went "
        f"into the first of {loop.num_batches} batches, which are too few to tell.",
        f"Iterate over more of them than are loaded ahead ({stats.window}).",
    )


def _training(stats: LoaderStats) -> Verdict | None:
    if stats.loop.waited_share >= _LITTLE_WAITING:
        return None
    step = _duration(stats.loop.step_seconds / stats.loop.num_batches)
    return Verdict(
        "training-bound",
        f"training-bound: {_waited(stats)}, its steps took {step} each.",
        "The loader is not your problem: stop tuning it.",
    )


def _caller(stats: LoaderStats) -> Verdict | None:
    if stats.kind != "caller":
        return None
    return Verdict(
        "unthreaded",
        f"unthreaded: {_waited(stats)} for batches that it makes itself.",
        f"Set num_workers={stats.num_cores}, to have them made meanwhile.",
    )


def _processes(stats: LoaderStats) -> Verdict | None:
    if stats.stages:
        return None
    return Verdict(
        "process-bound",
        f"process-bound: {_waited(stats)} for worker processes, which are not measured.",
        'Raise num_workers up to the number of cores, or use worker_method="thread" to see the '
        "stages.",
    )


def _event_loop(stats: LoaderStats) -> Verdict | None:
    load = stats.stage("load")
    if load is None or load.workers != "async" or load.cpu_seconds < 0.7 * load.elapsed_seconds:
        return None
    return Verdict(
        "cpu-bound",
        f"cpu-bound: the one thread of the event loop is at work "
        f"{_percent(min(1.0, load.cpu_seconds / load.elapsed_seconds))} of the time.",
        "Move what computes from load to preprocess; load is for what waits.",
        "load",
    )


def _overhead(stats: LoaderStats) -> Verdict | None:
    busy_seconds = sum(stage.busy_seconds for stage in stats.stages) / stats.loop.num_batches
    if busy_seconds >= _CHEAP_SECONDS:
        return None
    return Verdict(
        "overhead-bound",
        f"overhead-bound: {_waited(stats)} for batches that take {_duration(busy_seconds)} to "
        "make: to hand them over takes as long.",
        "Make larger batches, or set num_workers=0.",
    )


def _window(stats: LoaderStats) -> Verdict | None:
    busiest = _busiest(stats)
    if busiest.utilisation >= (_ONE_IS_BUSY if busiest.stage.width is None else _BUSY):
        return None
    if busiest.stage.workers == "executor":
        return Verdict(
            "window-bound",
            f"window-bound: {_waited(stats)}, but only {busiest}: few batches may be in flight "
            f"({stats.window}), or the samples take longer to the executor and back than there.",
            "Raise buffer_size. If that does not help, preprocess in threads, without an executor.",
        )
    return Verdict(
        "window-bound",
        f"window-bound: {_waited(stats)}, but only {busiest}: few batches may be in flight "
        f"({stats.window}), or a slow sample holds up the others.",
        "Raise prefetch_factor (or buffer_size), or set in_order=False.",
    )


def _wait_for_lock(stats: LoaderStats, crew: _Crew) -> bool:
    return (
        stats.num_cores >= 2
        and crew.stage.workers == "thread"
        and crew.num_at_work >= _AT_WORK
        and crew.num_cores_used <= _ONE_CORE
        and 1 - crew.at_work_share >= _ASLEEP
        and stats.loop.wake_seconds >= _SLOW_WAKE_SECONDS
    )


def _lock(stats: LoaderStats) -> Verdict | None:
    busiest = _busiest(stats)
    if not _wait_for_lock(stats, busiest):
        return None
    return Verdict(
        "gil-bound",
        f"gil-bound: {busiest}, but they use {busiest.num_cores_used:.1f} cores: they hold the "
        "interpreter's lock and wait for each other.",
        _without_lock(busiest),
        stage=busiest.stage.name,
    )


def _without_lock(crew: _Crew) -> str:
    if crew.stage.name == "preprocess":
        return (
            "Use preprocess_executor=ProcessPoolExecutor(...) or "
            'worker_method="multiprocessing"; more threads will not help.'
        )
    if crew.stage.name == "load":
        return (
            "Move what computes from load to preprocess, and give that a "
            "preprocess_executor=ProcessPoolExecutor(...); more threads will not help."
        )
    return 'Use worker_method="multiprocessing"; more threads will not help.'


def _oversubscribed(stats: LoaderStats) -> Verdict | None:
    busiest = _busiest(stats)
    # Where nobody says how long they waited for a core: all are taken, and they are many more.
    are_all_taken = busiest.num_cores_used > 0.8 * stats.num_cores
    is_unknown = busiest.queued_seconds == 0.0
    num_at_work = busiest.num_busy if are_all_taken and is_unknown else busiest.num_at_work
    if busiest.stage.workers != "thread" or num_at_work < _TOO_MANY * stats.num_cores:
        return None
    # While some wait for I/O the cores have use for others.
    asleep_seconds = busiest.busy_seconds * (1 - busiest.at_work_share)
    if is_unknown or stats.loop.wake_seconds > _CROWDED_SECONDS:
        asleep_seconds = 0.0
    num_of_use = ceil(stats.num_cores * (1 + asleep_seconds / (busiest.cpu_seconds or 1.0)))
    if busiest.num_busy < _TOO_MANY * num_of_use:
        return None
    return Verdict(
        "oversubscribed",
        f"oversubscribed: {busiest} on {stats.num_cores} cores, {num_at_work:.1f} of them with a "
        "core or waiting for one.",
        f"Set {_argument(stats, busiest)}={num_of_use}: more than the cores have use for only get "
        "in each other's way.",
        stage=busiest.stage.name,
    )


def _collate(stats: LoaderStats) -> Verdict | None:
    busiest = _busiest(stats)
    collate = busiest.stage if busiest.stage.name == "collate" else busiest.collate
    if collate is None or collate.busy_seconds < 0.5 * busiest.busy_seconds:
        return None
    # Whoever makes a batch waits for the lock too. What counts then is who has it.
    is_small = collate.cpu_seconds < 0.5 * busiest.cpu_seconds
    if is_small and _wait_for_lock(stats, busiest):
        return None
    return Verdict(
        "collate-bound",
        f"collate-bound: {collate.num_busy:.1f} of {collate.width} workers make batches, "
        f"{1000 * collate.mean_seconds:.1f} ms each{_others(stats, busiest)}.",
        "Give the samples one shape and leave them to the default collate, or do less in "
        "collate_fn.",
        stage="collate",
    )


def _transfer(stats: LoaderStats) -> Verdict | None:
    busiest = _busiest(stats)
    if busiest.stage.name != "transfer":
        return None
    return Verdict(
        "transfer-bound",
        f"transfer-bound: a batch takes {1000 * busiest.stage.mean_seconds:.1f} ms to the device"
        f"{_others(stats, busiest)}.",
        "Send less: uint8 instead of float32, and normalise on the device.",
        stage="transfer",
    )


def _input(stats: LoaderStats) -> Verdict | None:
    busiest = _busiest(stats)
    if busiest.at_work_share >= _AT_WORK:
        return None
    sentence = (
        f"io-bound: {busiest}, and they waited {_percent(1 - busiest.at_work_share)} of that"
        f"{_others(stats, busiest)}."
    )
    advice = f"Raise {_argument(stats, busiest)}"
    if busiest.stage.width is not None:
        advice += f" (now {busiest.stage.width})"
    if stats.stage("load") is None and stats.stage("iterate") is None:
        advice += (
            ", or split the dataset into load and preprocess (StagedDataset) to give what waits "
            "more workers than what computes"
        )
    return Verdict("io-bound", sentence, f"{advice}.", busiest.stage.name)


def _computing(stats: LoaderStats) -> Verdict:
    busiest = _busiest(stats)
    width = busiest.stage.width
    sentence = (
        f"cpu-bound: {busiest}, using {busiest.num_cores_used:.1f} of {stats.num_cores} cores"
        f"{_others(stats, busiest)}."
    )
    are_taken = busiest.num_cores_used > 0.7 * stats.num_cores  # By themselves.
    if busiest.queued_seconds > 0.5 * busiest.cpu_seconds and not are_taken:
        share = _percent(min(1.0, busiest.queued_seconds / busiest.busy_seconds))
        advice = f"They waited {share} of their time for a core: {_who_else(stats)}."
    elif width is None:
        advice = f"Raise {_argument(stats, busiest)}, up to the number of cores that it has."
    elif width < stats.num_cores:
        advice = f"Raise {_argument(stats, busiest)} to {stats.num_cores}, the number of cores."
    elif busiest.stage.name == "load":
        advice = "Move what computes from load to preprocess; load is for what waits."
    else:
        advice = "All cores are taken: do" if are_taken else "Do"
        advice += " less per sample, or do some of it on the device."
        if stats.stage("load") is None and stats.stage("iterate") is None:
            # Whoever has a load stage may have it already: folders of images are split for it.
            advice += " If it decodes images, ImageLoader with its size= is faster."
    return Verdict("cpu-bound", sentence, advice, busiest.stage.name)


def _who_else(stats: LoaderStats) -> str:
    of_stages = sum(stage.cpu_seconds for stage in stats.stages if stage.workers != "executor")
    num_cores = (stats.cpu_seconds - of_stages) / stats.elapsed_seconds
    if num_cores > 0.25 * stats.num_cores:
        return f"the rest of this process, with the training loop, uses {num_cores:.1f}"
    return "other programs use this machine"


def _argument(stats: LoaderStats, crew: _Crew) -> str:
    if crew.stage.workers == "executor":
        return "the number of the executor's workers"
    if crew.stage.name == "load":
        return "num_io_workers"
    # Where there are no others, few will have said so.
    return "num_workers" if stats.stage("load") is None else "num_cpu_workers"


_RULES: Final[Sequence[Callable[[LoaderStats], Verdict | None]]] = (
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
    _lock,
    _input,
    _computing,
)
