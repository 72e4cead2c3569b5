"""What the workers and the consumer do with their time.

Each meter is written by one thread alone, and nothing on the way of a sample is more than an
addition; whoever wants to know adds up what the meters say. What they count is never set back: an
epoch is the difference of two readings. They hold nothing of the user's, so they may outlive all
the rest.

A thread may be read in the middle of a step, with the time it has just spent counted twice or not
at all. So it counts its steps, before and after: an odd number is in the middle of one, and whoever
reads looks again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Any, Final, NamedTuple, Protocol

from ._threads import seconds_in_queue

__all__ = [
    "LAP_SECONDS",
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

    def copy(self) -> Tally:
        copied = Tally.__new__(Tally)
        copied.num_samples = self.num_samples
        copied.busy_seconds = self.busy_seconds
        copied.cpu_seconds = self.cpu_seconds
        copied.queued_seconds = self.queued_seconds
        copied.counts = self.counts.copy()
        return copied

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

    def readings(self, now: float) -> list[Reading]: ...

    def busy_since(self, now: float) -> float | None:
        """Since when anybody has been at work there, but for short gaps; None: nobody is."""

    def feed_from(self, feeder: Meter) -> None:
        """Have those without work look whether the stage before has some."""

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
_IDLE: Final = 1
_AT_SAMPLES: Final = 2
_AT_BATCH: Final = 3

_GAP_SECONDS: Final = 0.001
"""A worker without work for less has not been without."""

_MAX_LOOKS: Final = 1000
"""A thread that is stopped in the middle of a step may be so for long. Then it is a little off."""


class WorkerMeter:
    """One worker thread: at samples, at a batch, or without work.

    Without work it is *starved* while those who feed it are at work, and else *blocked*: there is
    nothing to be done, because enough batches are under way.
    """

    __slots__ = (
        "_at",
        "_blocked_seconds",
        "_busy_since",
        "_cpu_at",
        "_cpu_read",
        "_num_batches",
        "_num_steps",
        "_queued_at",
        "_queued_read",
        "_starved_seconds",
        "_state",
        "batches",
        "feeder",
        "recorder",
        "samples",
        "worker",
    )

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.samples = Tally()
        self.batches = Tally()
        """The batches that it has made of samples."""
        self.feeder: Meter | None = None
        """Of the stage before."""
        self.recorder: Recorder | None = None
        self._starved_seconds = 0.0
        self._blocked_seconds = 0.0
        self._cpu_at = self._cpu_read = 0.0
        self._queued_at = self._queued_read = 0.0
        """What the system had counted when it was last asked, and when that was."""
        self._state = _UNSTARTED
        self._at = 0.0
        """Since when it has been in this state, or at this sample."""
        self._busy_since = 0.0
        """When it last began to work after it had been without."""
        self._num_batches = 0
        self._num_steps = 0

    def start(self) -> None:
        """The thread is ready for work."""
        self._queued_at = seconds_in_queue()
        self._cpu_at = time.thread_time()
        self._at = time.monotonic()
        self._state = _IDLE

    def begin(self) -> float:
        """There is work; gives the time."""
        now = time.monotonic()
        idle_seconds = now - self._at
        starved_seconds = self._starved(now, idle_seconds)
        self._num_steps += 1
        if idle_seconds > _GAP_SECONDS or self._busy_since == 0.0:
            self._busy_since = now
        self._starved_seconds += starved_seconds
        self._blocked_seconds += idle_seconds - starved_seconds
        self._at = now
        self._state = _AT_SAMPLES
        self._num_steps += 1
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
        self._num_steps += 1
        seconds = now - self._at
        samples = self.samples
        samples.num_samples += num_samples
        samples.busy_seconds += seconds
        self._num_batches += 1
        if num_samples > 0 and not self._num_batches & _ALL_BUT_ONE:
            samples.count((_ALL_BUT_ONE + 1) * num_samples, seconds / num_samples)
        self._at = now
        self._state = _AT_BATCH
        self._num_steps += 1
        return now

    def end_batch(self, stage: str, batch: int) -> None:
        now = time.monotonic()
        seconds = now - self._at
        if seconds > LAP_SECONDS or self.recorder is not None:
            self._lap(self.batches, stage, batch, 1, None)
            return
        self._num_steps += 1
        batches = self.batches
        batches.num_samples += 1
        batches.busy_seconds += seconds
        if not self._num_batches & _ALL_BUT_ONE:
            batches.count(_ALL_BUT_ONE + 1, seconds)
        self._at = now
        self._state = _AT_SAMPLES
        self._num_steps += 1

    def _lap(self, tally: Tally, stage: str, batch: int, num_samples: int, index: Any) -> None:
        now = time.monotonic()
        started = self._at
        seconds = now - started
        # What shorter ones have used is counted here too: as little as they are worth.
        cpu, queued = self._used(now) if seconds > LAP_SECONDS else (0.0, 0.0)
        self._num_steps += 1
        tally.add(num_samples, seconds)
        tally.cpu_seconds += cpu
        tally.queued_seconds += queued
        self._at = now
        self._state = _AT_SAMPLES
        self._num_steps += 1
        if self.recorder is not None:
            text = _text_of(index)
            self.recorder(Lap(stage, self.worker, started, now, batch, num_samples, text))

    def end(self) -> float:
        """There is no more work for now; gives the time."""
        now = time.monotonic()
        is_due = now - self._cpu_read > _CPU_READ_SECONDS
        cpu, queued = self._used(now) if is_due else (0.0, 0.0)
        self._num_steps += 1
        samples = self.samples
        samples.busy_seconds += now - self._at
        samples.cpu_seconds += cpu
        samples.queued_seconds += queued
        self._at = now
        self._state = _IDLE
        self._num_steps += 1
        return now

    def _used(self, now: float) -> tuple[float, float]:
        """The seconds with a core, and waiting for one, since this was last asked."""
        self._cpu_read = now
        before, self._cpu_at = self._cpu_at, time.thread_time()
        cpu_seconds = self._cpu_at - before
        if now - self._queued_read < _QUEUE_READ_SECONDS:
            return cpu_seconds, 0.0
        self._queued_read = now
        before, self._queued_at = self._queued_at, seconds_in_queue()
        return cpu_seconds, self._queued_at - before

    def _starved(self, now: float, idle_seconds: float) -> float:
        """For how many of the last seconds, in which it had no work, its feeder had some."""
        if self.feeder is None:
            return 0.0
        since = self.feeder.busy_since(now)
        return 0.0 if since is None else min(idle_seconds, now - since)

    @property
    def at(self) -> float:
        return self._at

    # -- for whoever reads ------------------------------------------------------------------------

    def busy_since(self, now: float) -> float | None:
        """Since when it has been at work, but for short gaps; None if it is not."""
        if self._state == _UNSTARTED or self._busy_since == 0.0:
            return None
        is_without = self._state == _IDLE and now - self._at > _GAP_SECONDS
        return None if is_without else self._busy_since

    def add_to(self, reading: Reading, batches: Reading, now: float) -> None:
        for _ in range(_MAX_LOOKS):
            num_steps = self._num_steps
            seen = (
                self.samples.copy(),
                self.batches.copy(),
                self._starved_seconds,
                self._blocked_seconds,
                self._state,
                self._at,
            )
            if num_steps == self._num_steps and num_steps % 2 == 0:
                break
            time.sleep(0)  # It has to go on.
        samples, made, starved_seconds, blocked_seconds, state, at = seen
        reading.add(samples)
        batches.add(made)
        reading.starved_seconds += starved_seconds
        reading.blocked_seconds += blocked_seconds
        seconds = max(0.0, now - at)
        if state == _IDLE:
            starved_now = self._starved(now, seconds)
            reading.starved_seconds += starved_now
            reading.blocked_seconds += seconds - starved_now
        elif state != _UNSTARTED:
            at_it = reading if state == _AT_SAMPLES else batches
            at_it.busy_seconds += seconds
            at_it.num_in_flight += 1


@dataclass
class StageMeter:
    """A stage whose workers are threads: the samples, the batches they make of them, or both."""

    name: str
    workers: Sequence[WorkerMeter]
    has_samples: bool = True
    has_batches: bool = False

    def readings(self, now: float) -> list[Reading]:
        samples = Reading(self.name, len(self.workers))
        # Without work they are at neither, and it is counted with the samples.
        batches = Reading("collate", len(self.workers))
        for worker in self.workers:
            worker.add_to(samples, batches, now)
        if not self.has_samples:
            batches.starved_seconds = samples.starved_seconds
            batches.blocked_seconds = samples.blocked_seconds
        return [samples] * self.has_samples + [batches] * self.has_batches

    def busy_since(self, now: float) -> float | None:
        found = [since for w in self.workers if (since := w.busy_since(now)) is not None]
        return min(found, default=None)

    def feed_from(self, feeder: Meter) -> None:
        for worker in self.workers:
            worker.feeder = feeder

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
        self._at = self._cpu_at = self._cpu_read = 0.0
        self._busy_since = 0.0
        self._num_steps = 0
        self.recorder: Recorder | None = None

    def start(self) -> None:
        self._cpu_at = time.thread_time()
        self._at = time.monotonic()
        self._has_started = True

    def begin(self) -> float:
        """One more is in flight; gives the time."""
        now = time.monotonic()
        if self._num_in_flight == 0 and (now - self._at > _GAP_SECONDS or self._busy_since == 0.0):
            self._busy_since = now
        self._num_steps += 1
        self._move_to(now)
        self._num_in_flight += 1
        self._num_steps += 1
        return now

    def end(self, num_samples: int, since: float, batch: int, index: Any) -> None:
        """One that was begun has landed, and has brought so many samples."""
        now = time.monotonic()
        self._num_steps += 1
        tally = self._tally
        if now - self._cpu_read > _CPU_READ_SECONDS:
            self._cpu_read = now
            before, self._cpu_at = self._cpu_at, time.thread_time()
            tally.cpu_seconds += self._cpu_at - before
        self._move_to(now)
        self._num_in_flight -= 1
        if num_samples > 0:
            # What is in flight at a time is counted together, so this is no time of its own.
            tally.num_samples += num_samples
            tally.count(num_samples, (now - since) / num_samples)
        self._num_steps += 1
        if self.recorder is not None:
            text = _text_of(index)
            self.recorder(Lap(self._name, self._name, since, now, batch, num_samples, text))

    def _move_to(self, now: float) -> None:
        seconds = now - self._at
        self._tally.busy_seconds += self._num_in_flight * seconds
        self._idle_seconds += (self._width - self._num_in_flight) * seconds
        self._at = now

    # -- for whoever reads ------------------------------------------------------------------------

    def busy_since(self, now: float) -> float | None:
        is_without = self._num_in_flight == 0 and now - self._at > _GAP_SECONDS
        return None if is_without or self._busy_since == 0.0 else self._busy_since

    def readings(self, now: float) -> list[Reading]:
        for _ in range(_MAX_LOOKS):
            num_steps = self._num_steps
            seen = self._tally.copy(), self._idle_seconds, self._num_in_flight, self._at
            if num_steps == self._num_steps and num_steps % 2 == 0:
                break
            time.sleep(0)
        tally, idle_seconds, num_in_flight, at = seen
        reading = Reading(self._name, self._width, workers="async")
        reading.add(tally)
        seconds = max(0.0, now - at) if self._has_started else 0.0
        reading.busy_seconds += num_in_flight * seconds
        reading.blocked_seconds = idle_seconds + (self._width - num_in_flight) * seconds
        reading.num_in_flight = num_in_flight
        return [reading]

    def feed_from(self, feeder: Meter) -> None:
        """It is a first stage: nobody feeds it."""

    def record_with(self, recorder: Recorder | None) -> None:
        self.recorder = recorder


class FutureMeter:
    """Samples in somebody else's workers, who say how long they took. Any thread may write."""

    def __init__(self, name: str, width: int | None) -> None:
        self._name = name
        self._width = width
        self._tally = Tally()
        # Reentrant: garbage is collected anywhere, also in whoever holds this, and code that runs
        # then may bring a task to its end.
        self._lock = threading.RLock()
        self._num_in_flight = 0
        self._at = 0.0
        """When there was last nothing in flight, or something again."""
        self._busy_since = 0.0
        self.recorder: Recorder | None = None

    def begin(self, num_samples: int) -> None:
        now = time.monotonic()
        with self._lock:
            if self._num_in_flight == 0 and now - self._at > _GAP_SECONDS:
                self._busy_since = now
            self._num_in_flight += num_samples

    def end(self, num_samples: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._num_in_flight -= num_samples
            self._at = now

    def add(self, num_samples: int, seconds: float, cpu_seconds: float, batch: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._tally.add(num_samples, seconds)
            self._tally.cpu_seconds += cpu_seconds
        if self.recorder is not None:
            name = self._name
            self.recorder(Lap(name, name, now - seconds, now, batch, num_samples, None))

    # -- for whoever reads ------------------------------------------------------------------------

    def busy_since(self, now: float) -> float | None:
        is_without = self._num_in_flight == 0 and now - self._at > _GAP_SECONDS
        return None if is_without or self._busy_since == 0.0 else self._busy_since

    def readings(self, now: float) -> list[Reading]:  # noqa: ARG002 (what is under way is not known)
        reading = Reading(self._name, self._width, workers="executor")
        with self._lock:
            reading.add(self._tally)
            reading.num_in_flight = self._num_in_flight
        return [reading]

    def feed_from(self, feeder: Meter) -> None:
        """What its workers wait for is not known."""

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
        """The loop goes on, with a batch, an error or nothing; gives the time."""
        now = time.monotonic()
        self._is_waiting = False
        if self.recorder is not None:
            self.recorder(Lap("wait", "loop", self._at, now, self.num_batches, 0, None))
        if self.num_batches == 0:
            self.first_wait_seconds += now - self._at
        self.waited_seconds += now - self._at
        self._at = now
        return now

    def count(self, num_bytes: int) -> None:
        """What it went on with was a batch of so many bytes."""
        self.num_batches += 1
        self.num_bytes += num_bytes

    def left_at(self, now: float) -> float:
        """Now; or when the loop was last seen, if it has been away too long for a step."""
        if self._is_waiting or self.started is None:
            return now
        step_seconds = self.step_seconds / max(1, self.num_batches - 1)
        has_left = now - self._at > max(1.0, 10 * step_seconds)
        return self._at + step_seconds if has_left else now

    def reading(self, now: float) -> ConsumerReading:
        # A step counts when it is done: nobody knows whether the loop is at one, or has left.
        is_waiting = self.started is not None and self._is_waiting
        seconds = max(0.0, now - self._at) if is_waiting else 0.0
        return ConsumerReading(
            self.num_batches,
            self.num_bytes,
            self.waited_seconds + seconds,
            self.first_wait_seconds + (seconds if self.num_batches == 0 else 0.0),
            self.step_seconds,
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
