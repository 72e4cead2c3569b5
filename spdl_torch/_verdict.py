"""The verdict: which stage limits the throughput of a training loop, and what to change.

The functions at the end yield a verdict for each rule that applies, in the order in which the rules
are tried. The first one counts, so a rule may rely on all rules above it not to apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import Final, Literal, Protocol

from ._engine import LoopStats, StageStats
from ._text import percent

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
_LITTLE_SLOWER: Final = 0.05
"""Steps that lose no more than this share of their time to worker threads are not slowed."""
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
        >>> verdict.kind == "training-bound"  # Then the loop hardly waits for the loader.
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


class _Cache(Protocol):
    """The figures of `CacheStats` that the rules use."""

    @property
    def num_hits(self) -> int: ...
    @property
    def num_misses(self) -> int: ...
    @property
    def is_full(self) -> bool: ...


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
    @property
    def num_processes(self) -> int: ...
    @property
    def can_fuse(self) -> bool: ...
    @property
    def cache(self) -> _Cache | None: ...
    def stage(self, name: str, /) -> StageStats | None: ...


def verdict_on(stats: _Stats) -> Verdict:
    verdict = next(chain(_about_loop(stats), _about_loader(stats), _about_busiest_stage(stats)))
    if verdict.kind in _OF_MISSES and stats.cache is not None and stats.cache.num_misses > 0:
        return replace(verdict, advice=f"{_about_cache(stats.cache)} {verdict.advice}")
    return verdict


def _verdict(kind: VerdictKind, sentence: str, advice: str, stage: str | None = None) -> Verdict:
    return Verdict(kind, f"{kind}: {sentence}", advice, stage)


# -- the load on each group of workers ------------------------------------------------------------


class _Load:
    """The load on the workers of a stage, with the batches that they collate."""

    def __init__(self, stage: StageStats, collate: StageStats | None = None) -> None:
        self.collate = collate
        """The collate stage, if the workers of this stage run it."""
        if collate is not None:
            stage = replace(
                stage,
                busy_seconds=stage.busy_seconds + collate.busy_seconds,
                cpu_seconds=stage.cpu_seconds + collate.cpu_seconds,
                queued_seconds=stage.queued_seconds + collate.queued_seconds,
            )
        self.stage = stage
        self.name = stage.name
        # An executor of unknown width counts as busy if one of its workers is.
        self.utilisation = min(1.0, stage.num_busy / (stage.width or 1))
        needed_seconds = stage.cpu_seconds + stage.queued_seconds
        self.at_work_share = min(1.0, needed_seconds / (stage.busy_seconds or 1.0))
        """Share of the busy time on a core, or ready to run on one."""
        self.num_at_work = self.at_work_share * stage.num_busy
        """Number of workers, on average, that were on a core or ready to run on one."""
        self.num_cores_used = stage.cpu_seconds / stage.elapsed_seconds

    def __str__(self) -> str:
        width = "" if self.stage.width is None else f" of {self.stage.width}"
        return f"{self.stage.num_busy:.1f}{width} {self.name} workers busy"


def _loads(stats: _Stats) -> list[_Load]:
    collate = stats.stage("collate")
    threads = {stage.name for stage in stats.stages if stage.workers == "thread"}
    collators = threads & {"preprocess", "iterate"}
    return [
        _Load(stage, collate if stage.name in collators else None)
        for stage in stats.stages
        if stage is not collate or not collators
    ]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _waited(stats: _Stats) -> str:
    return f"the loop waited {percent(stats.loop.waited_share)} of its time"


def _argument(stats: _Stats, load: _Load) -> str:
    """Return what sets the number of these workers."""
    if load.stage.workers == "executor":
        return "the number of the executor's workers"
    if load.name == "load":
        return "num_io_workers"
    # Without a load stage there is only one kind of worker, which num_workers sets.
    return "num_workers" if stats.stage("load") is None else "num_cpu_workers"


def _is_in_one_piece(stats: _Stats) -> bool:
    """Return whether a map-style dataset is not split into load and preprocess."""
    return stats.stage("load") is None and stats.stage("iterate") is None


# -- the rules ------------------------------------------------------------------------------------


def _about_loop(stats: _Stats) -> Iterator[Verdict]:
    loop = stats.loop
    if loop.num_batches < 2 or stats.elapsed_seconds <= 0:
        yield _verdict(
            "unknown",
            f"too few batches to tell ({loop.num_batches}).",
            "Iterate over the loader for a while.",
        )
    # The batches loaded in parallel with the first one are ready soon after it.
    if loop.num_batches <= stats.window and loop.first_wait_seconds >= 0.5 * stats.elapsed_seconds:
        yield _verdict(
            "unknown",
            f"{percent(loop.first_wait_seconds / stats.elapsed_seconds)} of the time went into the "
            f"first of {loop.num_batches} batches, which are too few to tell.",
            f"Iterate over more batches than are prefetched ({stats.window}).",
        )
    yield from _slowed_steps(stats)
    if loop.waited_share < _LITTLE_WAITING:
        step = _duration(loop.step_seconds / loop.num_batches)
        yield _verdict(
            "training-bound",
            f"{_waited(stats)}, its steps took {step} each.",
            "The loader is not the bottleneck: tuning it will not help.",
        )


def _slowed_steps(stats: _Stats) -> Iterator[Verdict]:
    """Judge what worker threads in this process do to the steps of the training loop.

    Only what is measured counts: the time that the loop's thread was asleep, which is neither on a
    core nor queued for one. A device or I/O makes a step sleep too. The GIL can have done so for as
    long as the worker threads were on a core, and once for each time that the thread went to sleep,
    for about as long as the loop needs to continue when it is woken. If that explains less than
    half of the time asleep, the step waits for something else.
    """
    loop = stats.loop
    if stats.kind != "thread" or stats.num_processes > 0:
        return
    thread_seconds = _thread_seconds_in_this_process(stats)
    asleep_seconds = loop.step_asleep_seconds
    num_sleeps = loop.sleeps_per_step * loop.num_batches
    of_gil_seconds = min(thread_seconds, asleep_seconds, num_sleeps * loop.wake_seconds)
    if (
        loop.wake_seconds >= _SLOW_WAKE_SECONDS
        and of_gil_seconds >= 0.5 * asleep_seconds
        and of_gil_seconds > _LITTLE_SLOWER * loop.step_seconds
        and of_gil_seconds > loop.waited_seconds - loop.first_wait_seconds
    ):
        num_cores = thread_seconds / stats.elapsed_seconds
        each = 1 / loop.num_batches
        yield _verdict(
            "gil-bound",
            f"up to {_duration(of_gil_seconds * each)} of each step, which takes "
            f"{_duration(loop.step_seconds * each)}, the loop's thread waits for worker threads to "
            f"release the GIL: these use {num_cores:.1f} cores in its process.",
            f"{_away_from_loop(stats)} loader.profile(step=...) times the steps without workers: "
            "a step that does I/O sleeps too.",
        )
    queued_seconds = min(thread_seconds, loop.step_queued_seconds)
    if loop.waited_share < _LITTLE_WAITING and queued_seconds > _LITTLE_SLOWER * loop.step_seconds:
        num_cores = thread_seconds / stats.elapsed_seconds
        yield _verdict(
            "training-bound",
            f"{_waited(stats)}, its steps took {_duration(loop.step_seconds / loop.num_batches)} "
            f"each, up to {_duration(queued_seconds / loop.num_batches)} of that queued for a core "
            f"because worker threads used {num_cores:.1f} of {stats.num_cores}.",
            "Use fewer workers if the steps are faster without: loader.profile(step=...) times "
            "them so.",
        )


def _thread_seconds_in_this_process(stats: _Stats) -> float:
    """Return the CPU time of worker threads beside the training loop."""
    thread_seconds = _cpu_seconds_of_threads(stats)
    # An executor may have threads in this process, or processes.
    rest_seconds = max(0.0, stats.cpu_seconds - thread_seconds - stats.loop.step_cpu_seconds)
    executor_seconds = sum(s.cpu_seconds for s in stats.stages if s.workers == "executor")
    return thread_seconds + min(executor_seconds, rest_seconds)


def _cpu_seconds_of_threads(stats: _Stats) -> float:
    return sum(stage.cpu_seconds for stage in stats.stages if stage.workers != "executor")


def _about_loader(stats: _Stats) -> Iterator[Verdict]:
    if stats.kind == "caller":
        yield _verdict(
            "unthreaded",
            f"{_waited(stats)} for batches that it loads itself.",
            f"Set num_workers={stats.num_cores} to load batches in the background.",
        )
    if not stats.stages:
        yield _verdict(
            "process-bound",
            f"{_waited(stats)} for worker processes, which are not measured.",
            "Raise num_workers up to the number of cores. Without worker_method the workers live "
            "in child processes too, and their stages are measured.",
        )
    load = stats.stage("load")
    if load is not None and load.workers == "async":
        share = min(1.0, load.cpu_seconds / load.elapsed_seconds)
        if share >= 0.7:
            sentence = f"the thread of the event loop computes {percent(share)} of the time."
            yield _verdict("cpu-bound", sentence, _COMPUTE_LATER, "load")
    busy_seconds = sum(stage.busy_seconds for stage in stats.stages) / stats.loop.num_batches
    if busy_seconds < _CHEAP_SECONDS:
        yield _verdict(
            "overhead-bound",
            f"{_waited(stats)} for batches that take {_duration(busy_seconds)} to make, which is "
            "no more than handing them over takes.",
            "Make larger batches, or set num_workers=0.",
        )


def _about_busiest_stage(stats: _Stats) -> Iterator[Verdict]:
    loads = _loads(stats)
    busiest = max(loads, key=lambda load: load.utilisation)
    idle = "".join(
        f", {load.name} idle {percent(1 - load.utilisation)}"
        for load in loads
        if load is not busiest and load.stage.width is not None
    )
    if busiest.utilisation < (_ONE_IS_BUSY if busiest.stage.width is None else _BUSY):
        reason = "a slow sample delays the others"
        advice = "Raise prefetch_factor (or buffer_size), or set in_order=False."
        if busiest.stage.workers == "executor":
            reason = "sending samples to the executor takes longer than its work"
            advice = (
                "Raise buffer_size. If that does not help, preprocess in threads, without an "
                "executor."
            )
        in_flight = f"few batches may be in flight ({stats.window})"
        sentence = f"{_waited(stats)}, but only {busiest}: {in_flight}, or {reason}."
        yield _verdict("window-bound", sentence, advice)
    if busiest.name == "transfer":
        milliseconds = 1000 * busiest.stage.mean_seconds
        yield _verdict(
            "transfer-bound",
            f"copying a batch to the device takes {milliseconds:.1f} ms{idle}.",
            "Copy less: uint8 instead of float32, and normalise on the device.",
            "transfer",
        )
    waits_for_gil = _waits_for_gil(stats, busiest)
    collate = busiest.stage if busiest.name == "collate" else busiest.collate
    if collate is not None and collate.busy_seconds >= 0.5 * busiest.stage.busy_seconds:
        # Collating waits for the GIL too. Then the stage that uses the core is the one to blame.
        is_small = collate.cpu_seconds < 0.5 * busiest.stage.cpu_seconds
        if not (is_small and waits_for_gil):
            yield _verdict(
                "collate-bound",
                f"{collate.num_busy:.1f} of {collate.width} workers collate batches, "
                f"{1000 * collate.mean_seconds:.1f} ms each{idle}.",
                "Make all samples the same shape and use the default collate, or do less in "
                "collate_fn.",
                "collate",
            )
    yield from _oversubscribed(stats, busiest)
    if waits_for_gil:
        where = f" in {stats.num_processes} child processes" if stats.num_processes > 1 else ""
        yield _verdict(
            "gil-bound",
            f"{busiest}, but they use {busiest.num_cores_used:.1f} cores{where}: they wait for "
            "each other to release the GIL.",
            f"{_without_gil(stats)}; more threads will not help.",
            busiest.name,
        )
    if busiest.at_work_share < _AT_WORK:
        asleep = f"{busiest}, and they waited {percent(1 - busiest.at_work_share)} of that"
        yield _verdict("io-bound", f"{asleep}{idle}.", _wait_less(stats, busiest), busiest.name)
    using = f"{busiest}, using {busiest.num_cores_used:.1f} of {stats.num_cores} cores"
    yield _verdict("cpu-bound", f"{using}{idle}.", _compute_less(stats, busiest), busiest.name)


def _waits_for_gil(stats: _Stats, load: _Load) -> bool:
    num_gils = max(1, stats.num_processes)
    return (
        stats.num_cores > num_gils
        and load.stage.workers == "thread"
        and load.num_at_work >= _AT_WORK * num_gils
        and load.num_cores_used <= _ONE_CORE * num_gils
        and 1 - load.at_work_share >= _ASLEEP
        and _wake_seconds(stats, load) >= _SLOW_WAKE_SECONDS
    )


def _wake_seconds(stats: _Stats, load: _Load) -> float:
    """Return how long a woken thread needs to continue in the process of these workers."""
    return load.stage.wake_seconds if stats.num_processes > 0 else stats.loop.wake_seconds


def _oversubscribed(stats: _Stats, busiest: _Load) -> Iterator[Verdict]:
    # Where queued_seconds are not measured, busy threads on fully used cores count as queued.
    are_all_taken = busiest.num_cores_used > 0.8 * stats.num_cores
    is_unknown = busiest.stage.queued_seconds == 0.0
    num_at_work = busiest.stage.num_busy if are_all_taken and is_unknown else busiest.num_at_work
    if busiest.stage.workers != "thread" or num_at_work < _TOO_MANY * stats.num_cores:
        return
    # While some threads wait for I/O, the cores can run others.
    asleep_seconds = busiest.stage.busy_seconds * (1 - busiest.at_work_share)
    if is_unknown or _wake_seconds(stats, busiest) > _CROWDED_SECONDS:
        asleep_seconds = 0.0
    num_of_use = ceil(stats.num_cores * (1 + asleep_seconds / (busiest.stage.cpu_seconds or 1.0)))
    if busiest.stage.num_busy >= _TOO_MANY * num_of_use:
        yield _verdict(
            "oversubscribed",
            f"{busiest} on {stats.num_cores} cores, {num_at_work:.1f} of them with a core or "
            "waiting for one.",
            f"Set {_argument(stats, busiest)}={num_of_use}: more threads than the cores can run "
            "slow each other down.",
            busiest.name,
        )


_OF_MISSES: Final = ("io-bound", "cpu-bound", "gil-bound", "unthreaded")
"""The verdicts on work that the cache saves, for the samples that it has."""


def _about_cache(cache: _Cache) -> str:
    hits = percent(cache.num_hits / (cache.num_hits + cache.num_misses))
    if cache.is_full:
        return f"The cache is full and had {hits} of the samples: a larger max_bytes has more."
    return f"The cache had {hits} of the samples and has room: the next epoch finds more."


# -- advice ---------------------------------------------------------------------------------------

_COMPUTE_LATER: Final = "Move computation from load to preprocess; load is for waiting on I/O."


def _away_from_loop(stats: _Stats) -> str:
    """Return the advice for worker threads that slow the training loop."""
    has_executor = any(stage.workers == "executor" for stage in stats.stages)
    what = "Leave out preprocess_executor" if has_executor else "Set num_processes=1"
    return f"{what}: the workers in a child process have a GIL of their own."


def _without_gil(stats: _Stats) -> str:
    """Return the advice for worker threads that wait for the GIL."""
    if any(stage.workers == "executor" for stage in stats.stages):
        return "Leave the computation to the executor, which should have processes"
    collate = stats.stage("collate")
    most = None if collate is None else collate.width
    if stats.num_processes > 0:
        if most is None or most <= stats.num_processes:
            return "Move computation from load to preprocess"
        return f"Set num_processes={most}, so that each worker has a GIL of its own"
    return "Leave out num_processes" + (
        "" if most is None else f", or set it to num_workers ({most}) to have a GIL for each"
    )


def _wait_less(stats: _Stats, busiest: _Load) -> str:
    """Return the advice for workers that wait for I/O."""
    advice = f"Raise {_argument(stats, busiest)}"
    if busiest.stage.width is not None:
        advice += f" (now {busiest.stage.width})"
    if _is_in_one_piece(stats):
        advice += (
            ", or split the dataset into load and preprocess (StagedDataset), so that I/O has more "
            "workers than computation"
        )
    return f"{advice}."


def _compute_less(stats: _Stats, busiest: _Load) -> str:
    """Return the advice for workers that compute."""
    stage = busiest.stage
    are_taken = busiest.num_cores_used > 0.7 * stats.num_cores  # By these workers alone.
    if stage.queued_seconds > 0.5 * stage.cpu_seconds and not are_taken:
        share = percent(min(1.0, stage.queued_seconds / stage.busy_seconds))
        return f"They waited {share} of their time for a core: {_who_else(stats)}."
    if stage.width is None:
        return f"Raise {_argument(stats, busiest)}, up to the number of cores that it has."
    if stage.width < stats.num_cores:
        return f"Raise {_argument(stats, busiest)} to {stats.num_cores}, the number of cores."
    if busiest.name == "load":
        return _COMPUTE_LATER
    advice = "All cores are taken: do" if are_taken else "Do"
    advice += " less per sample, or do some of it on the device."
    if stats.can_fuse:
        return f"{advice} fuse=True does the transforms of this dataset in less time."
    if _is_in_one_piece(stats):
        # With a load stage the dataset may use ImageLoader already: folders of images do.
        advice += " If it decodes images, ImageLoader with its size= is faster."
    return advice


def _who_else(stats: _Stats) -> str:
    """Return what uses the cores that the workers wait for."""
    rest_seconds = stats.cpu_seconds
    if stats.num_processes == 0:
        rest_seconds -= _cpu_seconds_of_threads(stats)
    num_cores = rest_seconds / stats.elapsed_seconds
    if num_cores > 0.25 * stats.num_cores:
        return f"the rest of this process, with the training loop, uses {num_cores:.1f}"
    return "other programs use this machine"
