"""The stages of a loader, and the epoch that runs through them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from ._exit import note_consumer, sleep_through_exit
from ._in_flight import InFlight
from ._lifetime import Lifetime, WorkerGroup
from ._measurement import Measurement
from ._meter import Meter
from ._record import Locate, PendingBatch
from ._signal import Signal
from ._window import FirstStage, LastStage, NotInTime, Window

__all__ = ["Pipeline", "Stage"]


class Stage(Protocol):
    """A stage, as far as its lifetime goes."""

    @property
    def workers(self) -> Sequence[WorkerGroup]: ...

    def in_flight(self) -> list[InFlight]:
        """What its workers are at."""

    @property
    def meter(self) -> Meter: ...


class Pipeline:
    """Stages, first to last, and the window of the epoch that runs through them."""

    def __init__(
        self,
        first_stage: FirstStage,
        stages: Sequence[Stage],
        *,
        last_stage: LastStage | None = None,
        capacity: int,
        in_order: bool,
        batched: bool,
        locate: Locate | None = None,
    ) -> None:
        self._first_stage = first_stage
        self._last_stage = last_stage
        self._stages = stages
        self._capacity = capacity
        self._in_order = in_order
        self._batched = batched
        self._locate = locate
        self._window: Window | None = None
        self._process_id = os.getpid()
        self._consumer_id: int | None = None
        """The thread that asked for a batch last."""
        self.is_started = False
        self.lifetime = Lifetime([group for stage in stages for group in stage.workers])
        for before, stage in pairwise(stages):
            stage.meter.feed_from(before.meter)

    def begin(self, source: Iterator[Any]) -> None:
        """Begin an epoch over what the source draws; the epoch before it is broken off."""
        signal = Signal()
        self.lifetime.begin(signal)
        self.measurement = self._measurement(signal)
        self._window = Window(
            source,
            self._first_stage,
            signal,
            self.measurement.consumer,
            last_stage=self._last_stage,
            capacity=self._capacity,
            in_order=self._in_order,
            batched=self._batched,
            locate=self._locate,
        )

    def _measurement(self, signal: Signal) -> Measurement:
        """It outlives this pipeline, so it refers to the window weakly."""
        pipeline = weakref.ref(self)

        def num_ready() -> int:
            owner = pipeline()
            return 0 if owner is None or owner._window is None else owner._window.num_ready()

        return Measurement(
            "thread",
            [stage.meter for stage in self._stages],
            window=self._capacity,
            num_ready=num_ready,
            closed_at=lambda: signal.closed_at,
        )

    def start(self, seconds_apart: float = 0.0) -> None:
        """Start all threads and wait until they are set up."""
        self.is_started = True
        self._note_consumer()
        self.lifetime.start(seconds_apart)

    def next(self, timeout_seconds: float | None) -> PendingBatch | None:
        """The next batch's record, or None at the end of the epoch."""
        assert self._window is not None, "begin() comes first"
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "this iterator's worker threads belong to the process that made it, and a fork "
                "does not take threads along. Call iter(loader) in the child process."
            )
        self._note_consumer()
        try:
            record = self._window.next(timeout_seconds)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | NotInTime):
                self.lifetime.be_patient(False)
            if self.lifetime.is_closed:
                sleep_through_exit()
            raise
        self.lifetime.be_patient(True)
        return record

    def _note_consumer(self) -> None:
        thread_id = threading.get_ident()
        if self._consumer_id != thread_id:
            self._consumer_id = thread_id
            note_consumer()

    def in_flight(self) -> list[InFlight]:
        """What the workers of all stages are at for this epoch, those first that take longest."""
        found = [item for stage in self._stages for item in stage.in_flight()]
        found = [item for item in found if not item.record.is_abandoned]
        return sorted(found, key=lambda item: -item.seconds)

    @property
    def threads(self) -> list[threading.Thread]:
        return self.lifetime.threads

    @property
    def is_usable(self) -> bool:
        """Not closed, and in the process that has its threads."""
        return not self.lifetime.is_closed and os.getpid() == self._process_id

    def close(self) -> None:
        self.lifetime.close()
