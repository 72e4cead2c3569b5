"""The stages of a loader, and the epoch that runs through them."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from ._batch import Epoch, Locate
from ._clock import EpochClock
from ._in_flight import InFlight
from ._stage import Stage
from ._threads import Lifetime
from ._transfer_stage import TransferStage
from ._window import Window


class Pipeline:
    """Stages, first to last, and the window of the epoch that runs through them."""

    def __init__(
        self,
        first_stage: Stage,
        stages: Sequence[Stage],
        *,
        last_stage: TransferStage | None = None,
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
        self._process_id = os.getpid()
        self.is_started = False
        self.lifetime = Lifetime([group for stage in stages for group in stage.groups])

    def begin(self, draws: Iterator[Any]) -> Window:
        """Begin an epoch over these draws and return its window; abandon the epoch before it."""
        epoch = Epoch()
        self.lifetime.begin(epoch)
        stages = [stage.clock for stage in self._stages]
        self.clock = EpochClock("thread", stages, window=self._capacity, epoch=epoch)
        window = Window(
            draws,
            self._first_stage,
            epoch,
            self.clock.consumer,
            last_stage=self._last_stage,
            capacity=self._capacity,
            in_order=self._in_order,
            batched=self._batched,
            locate=self._locate,
        )
        self.clock.count_ready = weakref.WeakMethod(window.num_ready)  # It outlives the window.
        return window

    def start(self, seconds_apart: float = 0.0, timeout_seconds: float = math.inf) -> None:
        """Start all threads and wait until they are set up; raise NotSetUp after the timeout."""
        self.is_started = True
        self.lifetime.start(seconds_apart, timeout_seconds)

    def in_flight(self) -> list[InFlight]:
        """Return what the workers of all stages are doing for this epoch, longest first."""
        found = [item for stage in self._stages for item in stage.in_flight()]
        found = [item for item in found if not item.batch.epoch.is_closed]
        return sorted(found, key=lambda item: -item.seconds)

    @property
    def threads(self) -> list[threading.Thread]:
        return self.lifetime.threads

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and in the process that has its threads."""
        return not self.lifetime.is_closed and os.getpid() == self._process_id
