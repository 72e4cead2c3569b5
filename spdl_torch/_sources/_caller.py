"""Batches made in the calling thread, as torch does with `num_workers=0`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data.graph_settings import apply_sharding

from .._device import Transfer
from .._engine import EpochClock
from .._randomness import (
    RandomnessOfSamples,
    SampleGenerators,
    preserve_global_rng,
    restore_current_rng,
)
from .._resume import IterableProgress, MapProgress, Progress
from .._samples import keyed_collate, keyed_dataset, keyed_draws
from .._settings import LoaderSettings
from .._worker import collate_for, collate_pinned
from ._source import Delivery, Made, not_stop_iteration
from ._torch_workers import TorchEpoch

__all__ = ["CallerSource"]

_nothing = contextlib.nullcontext()


class CallerSource:
    """Makes each batch when it is asked for."""

    def __init__(self, settings: LoaderSettings) -> None:
        if settings.timeout != 0:
            raise AssertionError("num_workers=0 has no timeout: set it to 0, or num_workers to 1.")
        self._transfer = None if settings.device is None else Transfer(settings.device)
        self.receive: Callable[[Any], Any] | None = None
        if self._transfer is not None:
            way = self._transfer
            self.receive = lambda batch: way.receive(way.send(batch))
        self._is_closed = False
        self._rng: Any = _nothing
        self.clock = EpochClock("caller")

    @property
    def threads(self) -> list[threading.Thread]:
        return []

    @property
    def is_usable(self) -> bool:
        return False  # A new epoch has a new source.

    def begin(self, settings: LoaderSettings, progress: Progress) -> None:
        epoch = TorchEpoch(settings, progress)
        if settings.is_datapipe:
            apply_sharding(epoch.dataset, *epoch.shard)
        collate = settings.collate_fn
        if self._transfer is not None:
            collate = collate_for(self._transfer, collate)
        elif epoch.pin_device is not None:
            collate = collate_pinned(collate, epoch.pin_device)
        self._num_drawn = 0
        self._draws = epoch.draws
        if isinstance(progress, IterableProgress):
            self._make = self._open_iterable(settings, progress, epoch.dataset, collate)
        else:
            assert isinstance(progress, MapProgress)
            progress.restore_dataset(epoch.dataset, has_begun=True)
            self._make = self._open_map(settings, progress, epoch.dataset, collate)

    def _open_map(
        self, settings: LoaderSettings, progress: MapProgress, dataset: Any, collate: Any
    ) -> Callable[[Any], Delivery]:
        policy = settings.bad_sample_policy
        batched = settings.batched
        if settings.is_seeded or policy.replaces or policy.retries:
            is_seeded = settings.is_seeded
            self._draws = keyed_draws(progress, batched=batched, is_seeded=is_seeded)
            dataset = keyed_dataset(dataset, batched=batched, bad_sample_policy=policy)
            collate = keyed_collate(collate)

        def make(drawn: Any) -> Delivery:
            number = self._num_drawn
            self._num_drawn += 1
            try:
                return Made(number, collate(_samples(dataset, drawn, batched)))
            except Exception as error:
                return Made(number, None, not_stop_iteration(error))

        return make

    def _open_iterable(
        self, settings: LoaderSettings, progress: IterableProgress, dataset: Any, collate: Any
    ) -> Callable[[Any], Delivery]:
        progress.warn_of_skipping()
        count = progress.count
        if settings.is_seeded:
            self._rng = RandomnessOfSamples(
                SampleGenerators(
                    lambda: (count.epoch, count.number),
                    lambda: progress.sample_key(0, count.number),
                )
            )
        # What is read again draws again, and has done so before.
        kept = preserve_global_rng() if progress.was_drawn else _nothing
        with kept, self._rng:
            reader = progress.open(
                dataset,
                0,
                batched=settings.batched,
                drop_last=settings.drop_last,
                count=count,
            )
        progress.hold(reader)

        def position() -> Any:
            if reader.is_stateful:
                return self._num_drawn  # The progress asks the reader when it is saved.
            return 0, reader.bookmark()

        def make(drawn: Any) -> Delivery:
            try:
                samples = reader.draw(drawn)  # StopIteration ends the epoch.
            except Exception as error:
                if isinstance(error, StopIteration):
                    raise
                return Made(position(), None, error)
            try:
                return Made(position(), collate(samples))
            except Exception as error:
                return Made(position(), None, not_stop_iteration(error))

        return make

    def next(self) -> Delivery:
        if self._is_closed:
            raise RuntimeError("this iterator is closed. Call iter(loader) for a new one.")
        with restore_current_rng(), self._rng:
            return self._make(next(self._draws))

    def close(self, *, quickly: bool = False) -> None:  # noqa: ARG002 (there are no workers)
        self._is_closed = True

    def close_with(self, holder: Any) -> None:
        pass


def _samples(dataset: Any, drawn: Any, batched: bool) -> Any:
    if not batched:
        return dataset[drawn]
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(drawn)
    return [dataset[index] for index in drawn]
