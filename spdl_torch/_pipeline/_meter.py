"""What the workers and the consumer do with their time.

Each meter is written by one thread alone, and nothing on the way of a sample is more than an
addition; whoever wants to know adds up what the meters say. What they count is never set back: an
epoch is the difference of two readings. They hold nothing of the user's, so they may outlive all
the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

__all__ = [
    "LAP_SECONDS",
    "CollateMeter",
    "ConsumerMeter",
    "ConsumerReading",
    "FlightMeter",
    "FutureMeter",
    "Lap",
    "Meter",
    "Reading",
    "Recorder",
    "StageMeter",
    "Tally",
    "WorkerMeter",
    "upper_seconds",
]

LAP_SECONDS: Final = 0.0002
"""Samples that take longer are timed one by one: to read both clocks takes a microsecond."""

_ALL_BUT_ONE: Final = 15
"""Of cheaper ones, and of batches that are made in less, one in sixteen stands for the others where
it is asked how long they take. How many there are, and how long all of them took, is exact."""

# -- how long samples take ------------------------------------------------------------------------

_NUM_PER_OCTAVE: Final = 8
_NUM_BELOW_A_SECOND: Final = 24 * _NUM_PER_OCTAVE
"""Buckets from 60 nanoseconds to some hours, each nine percent wider than the one before."""
_NUM_BUCKETS: Final = _NUM_BELOW_A_SECOND + 16 * _NUM_PER_OCTAVE


def _bucket_of(seconds: float) -> int:
    if seconds < 6e-8:
        return 0
    return min(ceil(log2(seconds) * _NUM_PER_OCTAVE) + _NUM_BELOW_A_SECOND, _NUM_BUCKETS - 1)


def upper_seconds(bucket: int) -> float:
    """The longest time that falls into a bucket."""
    return float(2.0 ** ((bucket - _NUM_BELOW_A_SECOND) / _NUM_PER_OCTAVE))


_CPU_READ_SECONDS: Final = 0.001
"""How often a thread that does short tasks looks up how long a core was at work for it,"""
_QUEUE_READ_SECONDS: Final = 0.05
"""and any thread how long it has waited for one, which takes some ten microseconds to find out."""


def _seconds_in_queue() -> float:
    """How long the calling thread could have run in all its life, had there been a core for it."""
    try:
        with Path("/proc/thread-self/schedstat").open("rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # Only Linux says so, and not every Linux.
        return 0.0


class Tally:
    """What one worker has done for one stage."""

    __slots__ = ("busy_seconds", "counts", "cpu_seconds", "num_samples", "queued_seconds")

    def __init__(self) -> None:
        self.num_samples = 0
        self.busy_seconds = 0.0
        self.cpu_seconds = 0.0
        self.queued_seconds = 0.0
        """Of the busy ones: ready to run, but all cores were taken."""
        self.counts = [0] * _NUM_BUCKETS

    def add(self, num_samples: int, seconds: float) -> None:
        self.busy_seconds += seconds
        if num_samples > 0:
            self.num_samples += num_samples
            self.counts[_bucket_of(seconds / num_samples)] += num_samples

    def count(self, num_samples: int, seconds: float) -> None:
        """So many took so long each, or may be taken to."""
        self.counts[_bucket_of(seconds)] += num_samples


# -- what is read off -----------------------------------------------------------------------------


@dataclass
class Reading:
    """A stage's meters added up, from when they were made until some moment."""

    name: str
    width: int | None
    num_samples: int = 0
    busy_seconds: float = 0.0
    cpu_seconds: float = 0.0
    queued_seconds: float = 0.0
    starved_seconds: float = 0.0
    blocked_seconds: float = 0.0
    num_in_flight: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * _NUM_BUCKETS)
    workers: str = "thread"

    def add(self, tally: Tally) -> None:
        self.num_samples += tally.num_samples
        self.busy_seconds += tally.busy_seconds
        self.cpu_seconds += tally.cpu_seconds
        self.queued_seconds += tally.queued_seconds
        self.counts = [a + b for a, b in zip(self.counts, tally.counts, strict=True)]

    def since(self, earlier: Reading) -> Reading:
        """What has come to it since another reading of the same meters."""
        return Reading(
            self.name,
            self.width,
            self.num_samples - earlier.num_samples,
            self.busy_seconds - earlier.busy_seconds,
            self.cpu_seconds - earlier.cpu_seconds,
            self.queued_seconds - earlier.queued_seconds,
            self.starved_seconds - earlier.starved_seconds,
            self.blocked_seconds - earlier.blocked_seconds,
            self.num_in_flight,
            [a - b for a, b in zip(self.counts, earlier.counts, strict=True)],
            self.workers,
        )


class Meter(Protocol):
    """Measures one stage."""

    def reading(self, now: float) -> Reading: ...

    def record_with(self, recorder: Recorder | None) -> None:
        """Have every lap told to somebody, for a timeline."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One stretch of work of one worker, for a timeline."""

    stage: str
    worker: str
    started: float
    ended: float
    batch: int
    num_samples: int
    index: str | None
    """Of the sample; None if it was not one sample."""


Recorder = Callable[[Lap], None]


def _text_of(index: Any) -> str | None:
    try:
        return None if index is None else repr(index)
    except Exception:  # Of the user's own making. A timeline is not worth an error.
        return f"<{type(index).__name__}>"


# -- threads --------------------------------------------------------------------------------------

_UNSTARTED: Final = 0
_STARVED: Final = 1
_BLOCKED: Final = 2
_AT_SAMPLES: Final = 3
_AT_BATCH: Final = 4


class WorkerMeter:
    """One worker thread: at samples, at a batch, or without work."""

    __slots__ = (
        "_at",
        "_cpu_at",
        "_cpu_read",
        "_num_batches",
        "_queued_at",
        "_queued_read",
        "_state",
        "batches",
        "blocked_seconds",
        "recorder",
        "samples",
        "starved_seconds",
        "worker",
    )

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.samples = Tally()
        self.batches = Tally()
        """The batches that it has made of samples."""
        self.starved_seconds = 0.0
        self.blocked_seconds = 0.0
        self.recorder: Recorder | None = None
        self._cpu_at = self._cpu_read = 0.0
        self._queued_at = self._queued_read = 0.0
        """What the system had counted when it was last asked, and when that was."""
        self._state = _UNSTARTED
        self._at = 0.0
        """Since when it has been in this state, or at this sample."""
        self._num_batches = 0

    def start(self) -> None:
        """The thread is ready for work."""
        self._queued_at = _seconds_in_queue()
        self._cpu_at = time.thread_time()
        self._at = time.monotonic()
        self._state = _BLOCKED

    def begin(self) -> float:
        """There is work; gives the time."""
        now = time.monotonic()
        if self._state == _STARVED:
            self.starved_seconds += now - self._at
        else:
            self.blocked_seconds += now - self._at
        self._at = now
        self._state = _AT_SAMPLES
        return now

    def lap(self, stage: str, batch: int, num_samples: int, index: Any = None) -> None:
        """So many samples of a batch are done since the last lap."""
        self._lap(self.samples, stage, batch, num_samples, index)

    def begin_batch(self, num_samples: int) -> float:
        """From now on the worker makes a batch; gives the time.

        Args:
            num_samples: how many samples are done since the last lap. They were cheap, or they
                would have had laps of their own.

        """
        now = time.monotonic()
        seconds = now - self._at
        samples = self.samples
        samples.num_samples += num_samples
        samples.busy_seconds += seconds
        self._num_batches += 1
        if num_samples > 0 and not self._num_batches & _ALL_BUT_ONE:
            samples.count((_ALL_BUT_ONE + 1) * num_samples, seconds / num_samples)
        self._at = now
        self._state = _AT_BATCH
        return now

    def end_batch(self, stage: str, batch: int) -> None:
        self._state = _AT_SAMPLES
        now = time.monotonic()
        seconds = now - self._at
        if seconds > LAP_SECONDS or self.recorder is not None:
            self._lap(self.batches, stage, batch, 1, None)
            return
        batches = self.batches
        batches.num_samples += 1
        batches.busy_seconds += seconds
        if not self._num_batches & _ALL_BUT_ONE:
            batches.count(_ALL_BUT_ONE + 1, seconds)
        self._at = now

    def _lap(self, tally: Tally, stage: str, batch: int, num_samples: int, index: Any) -> None:
        now = time.monotonic()
        started, self._at = self._at, now
        seconds = now - started
        tally.add(num_samples, seconds)
        if seconds > LAP_SECONDS:
            # What shorter ones have used is counted here too: as little as they are worth.
            self._read_cpu(tally, now)
        if self.recorder is not None:
            text = _text_of(index)
            self.recorder(Lap(stage, self.worker, started, now, batch, num_samples, text))

    def _read_cpu(self, tally: Tally, now: float) -> None:
        self._cpu_read = now
        cpu_seconds = time.thread_time()
        tally.cpu_seconds += cpu_seconds - self._cpu_at
        self._cpu_at = cpu_seconds
        if now - self._queued_read < _QUEUE_READ_SECONDS:
            return
        self._queued_read = now
        queued = _seconds_in_queue()
        tally.queued_seconds += queued - self._queued_at
        self._queued_at = queued

    @property
    def at(self) -> float:
        return self._at

    def end(self, *, is_starved: bool) -> float:
        """There is no more work for now; gives the time."""
        now = time.monotonic()
        self.samples.busy_seconds += now - self._at
        if now - self._cpu_read > _CPU_READ_SECONDS:
            self._read_cpu(self.samples, now)
        self._at = now
        self._state = _STARVED if is_starved else _BLOCKED
        return now

    def add_to(self, reading: Reading, now: float) -> None:
        reading.add(self.samples)
        reading.starved_seconds += self.starved_seconds
        reading.blocked_seconds += self.blocked_seconds
        # It goes on meanwhile, so the figures may be a sample apart.
        state, seconds = self._state, max(0.0, now - self._at)
        if state == _STARVED:
            reading.starved_seconds += seconds
        elif state == _BLOCKED:
            reading.blocked_seconds += seconds
        elif state == _AT_SAMPLES:
            reading.busy_seconds += seconds
            reading.num_in_flight += 1

    def add_batches_to(self, reading: Reading, now: float) -> None:
        reading.add(self.batches)
        if self._state == _AT_BATCH:
            reading.busy_seconds += max(0.0, now - self._at)
            reading.num_in_flight += 1


@dataclass
class StageMeter:
    """The samples of a stage whose workers are threads."""

    name: str
    workers: Sequence[WorkerMeter]

    def reading(self, now: float) -> Reading:
        reading = Reading(self.name, len(self.workers))
        for worker in self.workers:
            worker.add_to(reading, now)
        return reading

    def record_with(self, recorder: Recorder | None) -> None:
        for worker in self.workers:
            worker.recorder = recorder


@dataclass
class CollateMeter:
    """The batches that the workers of a stage make. Without work they are that stage's."""

    workers: Sequence[WorkerMeter]

    def reading(self, now: float) -> Reading:
        reading = Reading("collate", len(self.workers))
        for worker in self.workers:
            worker.add_batches_to(reading, now)
        return reading

    def record_with(self, recorder: Recorder | None) -> None:
        for worker in self.workers:
            worker.recorder = recorder


# -- others ---------------------------------------------------------------------------------------


class FlightMeter:
    """Many samples in flight in one thread."""

    def __init__(self, name: str, width: int) -> None:
        self._name = name
        self._width = width
        self._tally = Tally()
        self._idle_seconds = 0.0
        self._num_in_flight = 0
        self._has_started = False
        self._at = self._cpu_at = 0.0
        self.recorder: Recorder | None = None

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def start(self) -> None:
        self._cpu_at = time.thread_time()
        self._at = time.monotonic()
        self._has_started = True

    def begin(self) -> float:
        """One more is in flight; gives the time."""
        now = time.monotonic()
        self._move_to(now)
        self._num_in_flight += 1
        return now

    def end(self, num_samples: int, since: float, batch: int, index: Any) -> None:
        """One that was begun has landed, and has brought so many samples."""
        now = time.monotonic()
        if now - self._at > LAP_SECONDS:
            cpu_now = time.thread_time()
            self._tally.cpu_seconds += cpu_now - self._cpu_at
            self._cpu_at = cpu_now
        self._move_to(now)
        self._num_in_flight -= 1
        busy_seconds = self._tally.busy_seconds
        self._tally.add(num_samples, now - since)
        self._tally.busy_seconds = busy_seconds  # All that are in flight are counted together.
        if self.recorder is not None:
            text = _text_of(index)
            self.recorder(Lap(self._name, self._name, since, now, batch, num_samples, text))

    def _move_to(self, now: float) -> None:
        seconds = now - self._at
        self._tally.busy_seconds += self._num_in_flight * seconds
        self._idle_seconds += (self._width - self._num_in_flight) * seconds
        self._at = now

    def reading(self, now: float) -> Reading:
        reading = Reading(self._name, self._width, workers="async")
        reading.add(self._tally)
        reading.blocked_seconds = self._idle_seconds
        reading.num_in_flight = self._num_in_flight
        if self._has_started:
            seconds = max(0.0, now - self._at)
            reading.busy_seconds += self._num_in_flight * seconds
            reading.blocked_seconds += (self._width - self._num_in_flight) * seconds
        return reading

    def record_with(self, recorder: Recorder | None) -> None:
        self.recorder = recorder


class FutureMeter:
    """Samples in somebody else's workers, who say how long they took. Any thread may write."""

    def __init__(self, name: str, width: int | None) -> None:
        self._name = name
        self._width = width
        self._tally = Tally()
        self._lock = threading.Lock()
        self._num_in_flight = 0
        self.recorder: Recorder | None = None

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def begin(self, num_samples: int) -> None:
        with self._lock:
            self._num_in_flight += num_samples

    def end(self, num_samples: int) -> None:
        with self._lock:
            self._num_in_flight -= num_samples

    def add(self, num_samples: int, seconds: float, cpu_seconds: float, batch: int) -> None:
        with self._lock:
            self._tally.add(num_samples, seconds)
            self._tally.cpu_seconds += cpu_seconds
        if self.recorder is not None:
            now = time.monotonic()
            self.recorder(Lap(self._name, self._name, now - seconds, now, batch, num_samples, None))

    def reading(self, now: float) -> Reading:  # noqa: ARG002 (what is under way is not known)
        reading = Reading(self._name, self._width, workers="executor")
        with self._lock:
            reading.add(self._tally)
            reading.num_in_flight = self._num_in_flight
        return reading

    def record_with(self, recorder: Recorder | None) -> None:
        self.recorder = recorder


class ConsumerMeter:
    """The training loop: it waits for a batch, or does something with it."""

    __slots__ = (
        "_at",
        "_is_waiting",
        "first_wait_seconds",
        "num_batches",
        "num_bytes",
        "num_wakes",
        "recorder",
        "started",
        "step_seconds",
        "waited_seconds",
        "wake_seconds",
    )

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_bytes = 0
        self.waited_seconds = 0.0
        self.first_wait_seconds = 0.0
        self.step_seconds = 0.0
        self.num_wakes = 0
        self.wake_seconds = 0.0
        """From what it waited for to its going on, all wakes together."""
        self.recorder: Recorder | None = None
        self.started: float | None = None
        """When it first asked for a batch."""
        self._at = 0.0
        self._is_waiting = True

    def ask(self) -> float:
        """The loop asks for a batch; gives the time."""
        now = time.monotonic()
        if not self._is_waiting:  # Or else it was interrupted, and asks again.
            self._is_waiting = True
            if self.recorder is not None:
                self.recorder(Lap("step", "loop", self._at, now, self.num_batches - 1, 0, None))
            self.step_seconds += now - self._at
            self._at = now
        elif self.started is None:
            self.started = self._at = now
        return now

    def get(self) -> float:
        """The loop gets a batch, or is told that there is none; gives the time."""
        now = time.monotonic()
        self._is_waiting = False
        if self.recorder is not None:
            self.recorder(Lap("wait", "loop", self._at, now, self.num_batches, 0, None))
        if self.num_batches == 0:
            self.first_wait_seconds = now - self._at
        self.waited_seconds += now - self._at
        self._at = now
        return now

    def get_batch(self, num_bytes: int = 0) -> float:
        """The same for a batch, and its size if that is known already."""
        now = self.get()
        self.num_batches += 1
        self.num_bytes += num_bytes
        return now

    def reading(self, now: float) -> ConsumerReading:
        has_begun = self.started is not None
        is_waiting = has_begun and self._is_waiting
        seconds = max(0.0, now - self._at)
        return ConsumerReading(
            self.num_batches,
            self.num_bytes,
            self.waited_seconds + (seconds if is_waiting else 0.0),
            self.first_wait_seconds if self.num_batches else seconds if is_waiting else 0.0,
            self.step_seconds + (seconds if has_begun and not is_waiting else 0.0),
            self.wake_seconds / self.num_wakes if self.num_wakes else 0.0,
        )


class ConsumerReading(NamedTuple):
    """What a consumer has done until some moment."""

    num_batches: int
    num_bytes: int
    waited_seconds: float
    first_wait_seconds: float
    step_seconds: float
    wake_seconds: float
    """Per wake."""
