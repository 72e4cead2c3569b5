"""What the workers and the consumer do with their time.

Each thread has one clock, and is the only one that writes it; work on a sample costs it no more
than a few additions. Readers add up the clocks of a stage. Counters are never set back: an epoch is
the difference of two readings. A reader may see a clock in the middle of a step, and is then off by
that step. Clocks refer to nothing of the user's, so they may outlive everything else.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

from ._batch import Epoch

try:
    import resource
except ImportError:  # Windows has none.
    resource = None  # type: ignore[assignment]

SPAN_SECONDS: Final = 0.0002
"""Samples that take longer are timed one by one. Cheaper ones are timed together, batch by batch:
reading the clocks takes a microsecond."""

_CPU_READ_SECONDS: Final = 0.001
"""How often a thread with short tasks reads its CPU time."""

_QUEUE_READ_SECONDS: Final = 0.05
"""How often a thread reads how long it waited for a core, which takes some ten microseconds."""

_NUM_PER_OCTAVE: Final = 8
"""How many buckets of a histogram there are up to twice the time: each is nine percent wider than
the one before."""

_MIDDLE_OF_BUCKET: Final = 2 ** (-0.5 / _NUM_PER_OCTAVE)


# -- what is read -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StageStats:
    """One stage during an epoch, its workers added up.

    Examples:
        >>> import torch, spdl_torch
        >>> loader = spdl_torch.DataLoader(torch.arange(100.0), batch_size=10, num_workers=2)
        >>> batches = list(loader)
        >>> loader.stats().stage("preprocess").num_samples
        100

    """

    __module__ = "spdl_torch"

    name: Literal["load", "preprocess", "iterate", "collate", "transfer"]
    """`iterate` is for iterable datasets. A dataset that is not split into stages does all its work
    in `preprocess`."""
    width: int | None
    """How many samples it can work on at a time; None if its executor does not say. `collate` is
    done by the workers of the stage before it."""
    elapsed_seconds: float
    """Of the epoch so far, since the workers were ready. All seconds below are summed over the
    workers, up to `width` times as many."""
    num_samples: int
    """Finished samples (batches, for `collate` and `transfer`)."""
    busy_seconds: float
    """Spent on samples, in wall-clock time. Near `width × elapsed_seconds`: this stage is the
    bottleneck."""
    cpu_seconds: float
    """Of the busy seconds, those on a core."""
    queued_seconds: float
    """Of the busy seconds, those spent ready to run while all cores were taken: too many threads,
    or other programs. The rest of `busy_seconds` is waiting for I/O or for the GIL. (On Linux;
    elsewhere 0.)"""
    num_in_flight: int
    """Samples in work now (batches, for `collate` and `transfer`)."""
    histogram: tuple[tuple[float, int], ...] = field(repr=False)
    """How many samples took at most so many seconds and more than the line before."""
    workers: Literal["thread", "async", "executor"] = "thread"
    """What the workers are; `async` stands for calls on an event loop."""
    wake_seconds: float = 0.0
    """Mean time from a batch being sent to a child process to its being read there; 0 for workers
    in this process. Near five milliseconds or more: the threads of the child hold its GIL."""

    @property
    def samples_per_second(self) -> float:
        return _ratio(self.num_samples, self.elapsed_seconds)

    @property
    def num_busy(self) -> float:
        """How many workers were busy, on average."""
        num_busy = _ratio(self.busy_seconds, self.elapsed_seconds)
        # Workers may go on with what they did when the epoch was abandoned.
        return num_busy if self.width is None else min(num_busy, float(self.width))

    @property
    def utilisation(self) -> float:
        """The share of the workers' time in which they were busy; 0 if the width is unknown."""
        return _ratio(self.num_busy, self.width or 0)

    @property
    def mean_seconds(self) -> float:
        """Per sample; per batch for `collate` and `transfer`."""
        return _ratio(self.busy_seconds, self.num_samples)

    @property
    def p50_seconds(self) -> float:
        return self._quantile(0.5)

    @property
    def p99_seconds(self) -> float:
        """Far above `p50_seconds`: a few slow samples hold up their batches.

        A larger `buffer_size` or `in_order=False` helps. (Of samples below a fifth of a
        millisecond only the mean of each batch is measured.)
        """
        return self._quantile(0.99)

    def _quantile(self, share: float) -> float:
        remaining = share * sum(count for _, count in self.histogram)
        for seconds, count in self.histogram:
            remaining -= count
            if remaining <= 0:
                return seconds * _MIDDLE_OF_BUCKET
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
    step_cpu_seconds: float = 0.0
    """Of the step seconds, those of the loop's thread on a core."""
    step_queued_seconds: float = 0.0
    """Of the step seconds, those of the loop's thread ready to run while all cores were taken,
    estimated from some of the steps. (On Linux; elsewhere 0.)"""
    sleeps_per_step: float = 0.0
    """How often the loop's thread goes to sleep in a step, to wait for a device, for I/O, for
    another thread or for the GIL. (On Linux; elsewhere 0.)"""

    @property
    def step_asleep_seconds(self) -> float:
        """The step seconds in which the loop's thread was neither on a core nor queued for one.

        It waited for a device, for I/O, for another thread or for the GIL.
        """
        return max(0.0, self.step_seconds - self.step_cpu_seconds - self.step_queued_seconds)

    @property
    def waited_share(self) -> float:
        """Share of the epoch spent waiting, after the first batch."""
        waited = self.waited_seconds - self.first_wait_seconds
        return _ratio(waited, waited + self.step_seconds)

    @property
    def batches_per_second(self) -> float:
        """Throughput after the first batch."""
        seconds = self.waited_seconds - self.first_wait_seconds + self.step_seconds
        return _ratio(max(self.num_batches - 1, 0), seconds)


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work of one worker, in the timeline of a `Profile`.

    Examples:
        >>> import torch, spdl_torch
        >>> loader = spdl_torch.DataLoader(torch.arange(100.0), batch_size=10, num_workers=1)
        >>> spans = loader.profile(4, sweep=False).spans
        >>> sorted({span.stage for span in spans if span.worker != "loop"})
        ['collate', 'preprocess']

    """

    __module__ = "spdl_torch"

    stage: str
    worker: str
    started_seconds: float
    """Since the first span of the profile."""
    seconds: float
    batch: int
    num_samples: int
    index: str | None
    """Of the sample, as text; None if it was not one sample."""


Recorder = Callable[[Span], None]
"""Receives every span, with `started_seconds` as `time.monotonic` counts them."""


class Counter:
    """What one worker did for one stage. The sum of several workers is one, too."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.busy_seconds = 0.0
        self.cpu_seconds = 0.0
        self.queued_seconds = 0.0
        self.num_wakeups = 0
        self.wake_seconds = 0.0
        self.buckets: dict[int, int] = {}

    def add(self, num_samples: int, seconds: float) -> None:
        """Count samples that took so long together."""
        self.busy_seconds += seconds
        if num_samples > 0:
            self.num_samples += num_samples
            bucket = math.ceil(math.log2(max(seconds / num_samples, 6e-8)) * _NUM_PER_OCTAVE)
            self.buckets[bucket] = self.buckets.get(bucket, 0) + num_samples

    def combine(self, other: Counter, sign: int = 1) -> None:
        """Add another counter to this one, or subtract it."""
        self.num_samples += sign * other.num_samples
        self.busy_seconds += sign * other.busy_seconds
        self.cpu_seconds += sign * other.cpu_seconds
        self.queued_seconds += sign * other.queued_seconds
        self.num_wakeups += sign * other.num_wakeups
        self.wake_seconds += sign * other.wake_seconds
        for bucket, count in other.buckets.copy().items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + sign * count

    def histogram(self) -> tuple[tuple[float, int], ...]:
        filled = sorted(bucket for bucket, count in self.buckets.items() if count > 0)
        buckets = range(filled[0], filled[-1] + 1) if filled else range(0)
        return tuple(
            (float(2.0 ** (bucket / _NUM_PER_OCTAVE)), self.buckets.get(bucket, 0))
            for bucket in buckets
        )


_NOTHING: Final = Counter()


class Reading(NamedTuple):
    """One stage from when its clocks were made until now."""

    name: str
    width: int | None
    counter: Counter
    num_in_flight: int
    workers: Literal["thread", "async", "executor"]


class StageClock(Protocol):
    """Reads all clocks of a stage."""

    def read(self, now: float) -> list[Reading]: ...

    def record_spans(self, recorder: Recorder) -> None:
        """Have every span of work passed to a function, for a timeline."""


# -- worker threads -------------------------------------------------------------------------------


class WorkerClock:
    """One worker thread: working on samples, on a batch, or idle."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.samples = Counter()
        self.batches = Counter()
        """The batches that it collated."""
        self.current: Counter | None = None
        """What it works on now; None while it is idle."""
        self.at = 0.0
        """Since when."""
        self.recorder: Recorder | None = None
        self._cpu_at = self._cpu_read = 0.0
        self._queued_at = self._queued_read = 0.0

    def start(self) -> None:
        """Begin to measure the calling thread."""
        self._queued_at = _seconds_in_queue()
        self._cpu_at = time.thread_time()
        self.at = time.monotonic()

    def begin(self) -> float:
        """Begin to work on samples; return the time."""
        self.at = now = time.monotonic()
        self.current = self.samples
        return now

    def lap(self, stage: str, batch: int, num_samples: int, index: Any = None) -> float:
        """Count what was done since the last call, and begin to work on samples; return the time.

        `num_samples` were finished since then, or batches if `current` is `batches`; `index` is
        that of the sample, if it was one.
        """
        now = time.monotonic()
        counter = self.current
        assert counter is not None, "a worker counts work that it has not begun"
        seconds = now - self.at
        if now - self._cpu_read > _CPU_READ_SECONDS:
            self._read_cpu(counter, now)
        counter.add(num_samples, seconds)
        if self.recorder is not None:
            text = _text_of(index)
            self.recorder(Span(stage, self.worker, self.at, seconds, batch, num_samples, text))
        self.at = now
        self.current = self.samples
        return now

    def _read_cpu(self, counter: Counter, now: float) -> None:
        """Count CPU time, and time spent waiting for a core, since this was last called."""
        self._cpu_read = now
        before, self._cpu_at = self._cpu_at, time.thread_time()
        counter.cpu_seconds += self._cpu_at - before
        if now - self._queued_read > _QUEUE_READ_SECONDS:
            self._queued_read = now
            before, self._queued_at = self._queued_at, _seconds_in_queue()
            counter.queued_seconds += self._queued_at - before


@dataclass
class ThreadStageClock:
    """A stage whose workers are threads."""

    clocks: Sequence[WorkerClock]
    samples: str | None
    """The name of the stage that works on samples, if there is one."""
    batches: str | None = None
    """The name of the stage that makes batches of them, if there is one."""

    def read(self, now: float) -> list[Reading]:
        width = len(self.clocks)
        readings = []
        for name, kind in ((self.samples, "samples"), (self.batches, "batches")):
            if name is None:
                continue
            total, num_in_flight = Counter(), 0
            for clock in self.clocks:
                counter: Counter = getattr(clock, kind)
                at, is_current = clock.at, clock.current is counter
                total.combine(counter)
                if is_current:
                    total.busy_seconds += max(0.0, now - at)
                    num_in_flight += 1
            readings.append(Reading(name, width, total, num_in_flight, "thread"))
        return readings

    def record_spans(self, recorder: Recorder) -> None:
        for clock in self.clocks:
            clock.recorder = recorder


# -- other workers --------------------------------------------------------------------------------


class _SharedClock:
    """A stage whose workers have no threads of ours, with one counter for all of them."""

    def __init__(self, name: str, width: int | None, workers: Literal["async", "executor"]) -> None:
        self._name = name
        self._width = width
        self._workers: Literal["async", "executor"] = workers
        self._counter = Counter()
        self._num_in_flight = 0
        self._recorder: Recorder | None = None

    def read(self, now: float) -> list[Reading]:
        total = Counter()
        total.combine(self._counter)
        total.busy_seconds += self._uncounted_seconds(now)
        return [Reading(self._name, self._width, total, self._num_in_flight, self._workers)]

    def record_spans(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def _uncounted_seconds(self, now: float) -> float:  # noqa: ARG002 (for those that know it)
        return 0.0

    def _record(
        self, since: float, seconds: float, batch: int, num_samples: int, index: Any = None
    ) -> None:
        if self._recorder is not None:
            name, text = self._name, _text_of(index)
            self._recorder(Span(name, name, since, seconds, batch, num_samples, text))


class TaskClock(_SharedClock):
    """Many calls in flight on the event loop of one thread, which alone writes this."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(name, width, "async")
        self._at = self._cpu_at = self._cpu_read = 0.0

    def start(self) -> None:
        self._cpu_at = time.thread_time()
        self._at = time.monotonic()

    def begin(self) -> float:
        """Count one more call in flight; return the time."""
        now = time.monotonic()
        self._advance(now)
        self._num_in_flight += 1
        return now

    def end(self, num_samples: int, since: float, batch: int, index: Any) -> None:
        """Count the end of a call that began then and made so many samples."""
        now = time.monotonic()
        counter = self._counter
        if now - self._cpu_read > _CPU_READ_SECONDS:
            self._cpu_read = now
            before, self._cpu_at = self._cpu_at, time.thread_time()
            counter.cpu_seconds += self._cpu_at - before
        self._advance(now)
        self._num_in_flight -= 1
        busy_seconds = counter.busy_seconds
        counter.add(num_samples, now - since)
        counter.busy_seconds = busy_seconds  # The time of all calls in flight is counted together.
        self._record(since, now - since, batch, num_samples, index)

    def _advance(self, now: float) -> None:
        self._counter.busy_seconds += self._uncounted_seconds(now)
        self._at = now

    def _uncounted_seconds(self, now: float) -> float:
        return self._num_in_flight * max(0.0, now - self._at)


class FutureClock(_SharedClock):
    """Samples in an executor's workers, which say how long they took. Any thread may write."""

    def __init__(self, name: str, width: int | None) -> None:
        super().__init__(name, width, "executor")
        # Reentrant: a garbage collection may run a task's callback in the thread that holds it.
        self._lock = threading.RLock()

    def count_in_flight(self, num_samples: int) -> None:
        """Count samples as in flight, or with a negative number as back."""
        with self._lock:
            self._num_in_flight += num_samples

    def add(self, num_samples: int, seconds: float, cpu_seconds: float, batch: int) -> None:
        with self._lock:
            self._counter.add(num_samples, seconds)
            self._counter.cpu_seconds += cpu_seconds
        self._record(time.monotonic() - seconds, seconds, batch, num_samples)


# -- the consumer ---------------------------------------------------------------------------------


class ConsumerClock:
    """The training loop: it waits for a batch, or works with it."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_bytes = 0
        self.waited_seconds = 0.0
        self.first_wait_seconds = 0.0
        self.step_seconds = 0.0
        self.step_cpu_seconds = 0.0
        self.recorder: Recorder | None = None
        self.started_at: float | None = None
        """When the first batch was asked for."""
        self.ready_at: float | None = None
        """When the workers were ready to make it."""
        self.num_wakeups = 0
        self.wake_seconds = 0.0
        """How long the consumer took to go on after workers had woken it."""
        self._at = self._cpu_at = 0.0
        self._is_waiting = True
        self._looks = _StepLooks()

    def ask(self) -> None:
        """The loop asks for a batch."""
        now = time.monotonic()
        if self.started_at is None:
            self.started_at = self._at = now
        elif not self._is_waiting:  # Else the last call was interrupted.
            self._is_waiting = True
            if self.recorder is not None:
                self._record("step", now, self.num_batches - 1)
            seconds = now - self._at
            self.step_seconds += seconds
            # Clamped, because the next batch may be asked for in another thread.
            cpu_seconds = time.thread_time() - self._cpu_at
            self.step_cpu_seconds += min(max(0.0, cpu_seconds), seconds)
            if self._looks.thread is not None:
                self._looks.end(seconds)
            self._at = now

    def get(self, num_bytes: int | None) -> None:
        """The loop goes on: with a batch of so many bytes, or without one."""
        now = time.monotonic()
        self._is_waiting = False
        if self.recorder is not None:
            self._record("wait", now, self.num_batches)
        seconds = now - self._at
        self.waited_seconds += seconds
        if self.num_batches == 0:
            self.first_wait_seconds += seconds
        if num_bytes is not None:
            self.num_batches += 1
            self.num_bytes += num_bytes
        if now - self._looks.looked_at > _QUEUE_READ_SECONDS:
            self._looks.begin(now)
        self._cpu_at = time.thread_time()
        self._at = now

    def last_seen(self, now: float) -> float:
        """Return now, or when the loop was last seen if it was away too long for a step."""
        if self._is_waiting or self.started_at is None:
            return now
        step_seconds = self.step_seconds / max(1, self.num_batches - 1)
        has_left = now - self._at > max(1.0, 10 * step_seconds)
        return self._at + step_seconds if has_left else now

    def read(self, now: float) -> LoopStats:
        # A step counts when it is done: the loop may be in one, or may have been left.
        is_waiting = self.started_at is not None and self._is_waiting
        seconds = max(0.0, now - self._at) if is_waiting else 0.0
        return LoopStats(
            self.num_batches,
            self.waited_seconds + seconds,
            self.first_wait_seconds + (seconds if self.num_batches == 0 else 0.0),
            self.step_seconds,
            _ratio(self.wake_seconds, self.num_wakeups),
            self.step_cpu_seconds,
            self._looks.queued_share * self.step_seconds,
            self._looks.num_sleeps,
        )

    def _record(self, what: str, now: float, batch: int) -> None:
        assert self.recorder is not None
        self.recorder(Span(what, "loop", self._at, now - self._at, batch, 0, None))


class _StepLooks:
    """What the loop's thread waits for in its steps, from a look at one step now and then."""

    def __init__(self) -> None:
        self.looked_at = -math.inf
        self.thread: int | None = None
        """The thread that is in a step that is looked at."""
        self._queued_at = 0.0
        self._num_sleeps_at = 0
        self._num_steps = self._num_sleeps = 0
        self._seconds = self._queued_seconds = 0.0

    def begin(self, now: float) -> None:
        self.looked_at = now
        self.thread = threading.get_ident()
        self._queued_at, self._num_sleeps_at = _seconds_in_queue(), _num_sleeps()

    def end(self, seconds: float) -> None:
        # The next batch may be asked for in another thread, whose counters are others.
        if self.thread == threading.get_ident():
            self._num_steps += 1
            self._seconds += seconds
            self._num_sleeps += _num_sleeps() - self._num_sleeps_at
            self._queued_seconds += min(_seconds_in_queue() - self._queued_at, seconds)
        self.thread = None

    @property
    def queued_share(self) -> float:
        return _ratio(self._queued_seconds, self._seconds)

    @property
    def num_sleeps(self) -> float:
        """How often the thread went to sleep in a step, on average."""
        return _ratio(self._num_sleeps, self._num_steps)


# -- an epoch -------------------------------------------------------------------------------------


class EpochReading(NamedTuple):
    """An epoch until some moment."""

    elapsed_seconds: float
    cpu_seconds: float
    """Of the whole process."""
    num_bytes: int
    """Of the batches that the loop has received."""
    loop: LoopStats
    stages: tuple[StageStats, ...]


class EpochClock:
    """All clocks of one epoch, from its first batch to its end.

    Without stages it is the consumer's time alone: for workers that cannot be measured from here.
    """

    def __init__(
        self,
        kind: Literal["thread", "multiprocessing", "caller"],
        stages: Sequence[StageClock] = (),
        *,
        window: int = 0,
        epoch: Epoch | None = None,
    ) -> None:
        self.consumer = ConsumerClock()
        self.kind = kind
        self.window = window
        """How many batches may be in flight."""
        self.num_processes = 0
        """In how many child processes the stages work."""
        self._stages = stages
        self._epoch = epoch
        self.count_ready: Callable[[], Callable[[], int] | None] = _no_window
        """A weak reference to a function that returns how many batches wait for the consumer."""
        self._cpu_at = 0.0
        self._at_start: list[Reading] = []
        self._last: EpochReading | None = None
        """Of an epoch that is over."""

    def start(self) -> None:
        """Begin to measure: the consumer is going to ask for the first batch."""
        self._cpu_at = time.process_time()
        self._at_start = self._read_stages(time.monotonic())

    def end(self) -> None:
        """The epoch is over; its workers may go on with another."""
        if self._last is None:
            self._last = self._read(time.monotonic(), is_over=True)

    @property
    def is_running(self) -> bool:
        return self._last is None and (self._epoch is None or not self._epoch.is_closed)

    @property
    def num_ready(self) -> int:
        count_ready = self.count_ready()
        return count_ready() if count_ready is not None and self.is_running else 0

    def record_spans(self, recorder: Recorder) -> None:
        self.consumer.recorder = recorder
        for stage in self._stages:
            stage.record_spans(recorder)

    def read(self) -> EpochReading:
        if self._last is not None:
            return self._last
        closed_at = None if self._epoch is None else self._epoch.closed_at
        now = time.monotonic() if closed_at is None else closed_at
        return self._read(self.consumer.last_seen(now), is_over=not self.is_running)

    def _read(self, now: float, *, is_over: bool) -> EpochReading:
        num_bytes, loop = self.consumer.num_bytes, self.consumer.read(now)
        if self.consumer.started_at is None:
            return EpochReading(0.0, 0.0, num_bytes, loop, ())
        elapsed_seconds = max(0.0, now - self.consumer.started_at)
        ready_at = self.consumer.ready_at or self.consumer.started_at
        worked_seconds = max(0.0, now - ready_at)
        stages = []
        # Child processes say what stages they have when they have started.
        at_start = {reading.name: reading.counter for reading in self._at_start}
        for reading in self._read_stages(now):
            counter = reading.counter
            counter.combine(at_start.get(reading.name, _NOTHING), -1)
            stages.append(
                StageStats(
                    cast(Any, reading.name),  # The engine itself takes any name.
                    reading.width,
                    worked_seconds,
                    counter.num_samples,
                    counter.busy_seconds,
                    counter.cpu_seconds,
                    counter.queued_seconds,
                    0 if is_over else reading.num_in_flight,
                    counter.histogram(),
                    reading.workers,
                    _ratio(counter.wake_seconds, counter.num_wakeups),
                )
            )
        cpu_seconds = time.process_time() - self._cpu_at
        return EpochReading(elapsed_seconds, cpu_seconds, num_bytes, loop, tuple(stages))

    def _read_stages(self, now: float) -> list[Reading]:
        return [reading for stage in self._stages for reading in stage.read(now)]


def _no_window() -> None:
    """Stand for the weak reference to a window that there is not."""


def _seconds_in_queue() -> float:
    """Return how long the calling thread was ready to run while all cores were taken."""
    try:
        # Not by a file object, which takes several times as long.
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        try:
            return int(os.read(file, 128).split()[1]) / 1e9
        finally:
            os.close(file)
    except (OSError, IndexError, ValueError):  # Only Linux says so, and not every Linux.
        return 0.0


def _num_sleeps() -> int:
    """Return how often the calling thread has gone to sleep."""
    of_thread = getattr(resource, "RUSAGE_THREAD", None)  # Only Linux counts for each thread.
    return 0 if of_thread is None else resource.getrusage(of_thread).ru_nvcsw


def _text_of(index: Any) -> str | None:
    try:
        return None if index is None else repr(index)
    except Exception:  # The repr is the user's code, and a timeline is not worth an error.
        return f"<{type(index).__name__}>"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
