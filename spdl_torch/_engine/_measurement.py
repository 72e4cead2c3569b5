"""One epoch of a pipeline, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._meter import ConsumerMeter, ConsumerReading, Meter, Reading, Recorder

__all__ = ["Measurement", "Snapshot"]


class Snapshot(NamedTuple):
    """An epoch until some moment."""

    seconds: float
    cpu_seconds: float
    """Of the whole process."""
    consumer: ConsumerReading
    stages: list[Reading]


class Measurement:
    """What the meters have come to since an epoch began, until it ended.

    Without meters it is the consumer's time alone: of workers that cannot be measured from here.
    """

    def __init__(
        self,
        kind: str,
        meters: Sequence[Meter] = (),
        *,
        window: int = 0,
        num_ready: Callable[[], int] = lambda: 0,
        closed_at: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.consumer = ConsumerMeter()
        self.kind = kind
        """Who works."""
        self.window = window
        """How many batches may be in flight."""
        self._meters = meters
        self._num_ready = num_ready
        self._closed_at = closed_at
        self._cpu_at = 0.0
        self._at_start: list[Reading] = []
        self._last: Snapshot | None = None
        """Of an epoch that is over."""

    def begin(self) -> None:
        """The consumer asks for the first batch."""
        if self.consumer.started is None:
            self._cpu_at = time.process_time()
            self._at_start = self._readings(self.consumer.ask())

    def end(self) -> None:
        """The epoch is over; its workers may go on with another."""
        if self._last is None:
            self._last = self._snapshot(time.monotonic(), is_over=True)

    @property
    def is_running(self) -> bool:
        return self._last is None and self._closed_at() is None

    @property
    def num_ready(self) -> int:
        return self._num_ready() if self.is_running else 0

    def record_with(self, recorder: Recorder) -> None:
        """Have every lap of every worker and of the consumer told to somebody."""
        self.consumer.recorder = recorder
        for meter in self._meters:
            meter.record_with(recorder)

    def read(self) -> Snapshot:
        if self._last is not None:
            return self._last
        now = self._closed_at() or time.monotonic()
        return self._snapshot(self.consumer.left_at(now), is_over=not self.is_running)

    def _snapshot(self, now: float, *, is_over: bool) -> Snapshot:
        if self.consumer.started is None:
            return Snapshot(0.0, 0.0, self.consumer.reading(now), [])
        seconds = max(0.0, now - self.consumer.started)
        stages = [
            reading.since(earlier)
            for reading, earlier in zip(self._readings(now), self._at_start, strict=True)
        ]
        if is_over:
            for stage in stages:
                stage.num_in_flight = 0  # Whoever is still at something is so for nobody.
        cpu_seconds = time.process_time() - self._cpu_at
        return Snapshot(seconds, cpu_seconds, self.consumer.reading(now), stages)

    def _readings(self, now: float) -> list[Reading]:
        return [reading for meter in self._meters for reading in meter.readings(now)]
