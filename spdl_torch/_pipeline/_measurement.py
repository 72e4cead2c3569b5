"""One epoch of a pipeline, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ._meter import ConsumerMeter, ConsumerReading, Meter, Reading, Recorder

__all__ = ["Measurement"]


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
        self._ended_at: float | None = None
        now = time.monotonic()
        self._at_start = [meter.reading(now) for meter in meters]
        self._at_end: list[Reading] | None = None

    def end(self) -> None:
        """The epoch is over; its workers may go on with another."""
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self._at_end = self._read(self._ended_at)

    def record_with(self, recorder: Recorder) -> None:
        """Have every lap of every worker and of the consumer told to somebody."""
        self.consumer.recorder = recorder
        for meter in self._meters:
            meter.record_with(recorder)

    @property
    def is_running(self) -> bool:
        return self._ended_at is None and self._closed_at() is None

    @property
    def num_ready(self) -> int:
        return self._num_ready() if self.is_running else 0

    def read(self) -> tuple[float, ConsumerReading, list[Reading]]:
        """How long it has lasted, what the consumer did and what the stages did."""
        now = self._ended_at or self._closed_at() or time.monotonic()
        stages = self._read(now) if self._at_end is None else self._at_end
        started = self.consumer.started
        return 0.0 if started is None else now - started, self.consumer.reading(now), stages

    def _read(self, now: float) -> list[Reading]:
        readings = [meter.reading(now) for meter in self._meters]
        if not self.is_running:
            for reading in readings:
                reading.num_in_flight = 0  # Whoever is still at something is so for nobody.
        return [
            reading.since(earlier)
            for reading, earlier in zip(readings, self._at_start, strict=True)
        ]
