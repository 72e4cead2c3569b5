"""Batches made in the calling thread, as torch does with `num_workers=0`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.utils.data.graph_settings import apply_sharding

from .._device import Transfer
from .._engine import EpochClock
from .._random import SampleRngMode, preserve_global_rng, restore_current_rng
from .._resume import IterableProgress, MapProgress, Progress
from .._samples import CountCursor, SampleMaker, draws_of
from .._settings import LoaderSettings
from .._worker import collate_into
from ._source import CLOSED, BatchSource, Delivery, Made, not_stop_iteration
from ._torch_workers import TorchEpoch


class CallerSource(BatchSource):
    """Makes each batch when it is asked for. Each epoch has a new one."""

    def __init__(self, settings: LoaderSettings) -> None:
        if settings.timeout != 0:
            raise AssertionError("num_workers=0 has no timeout: set it to 0, or num_workers to 1.")
        self._transfer = None if settings.device is None else Transfer(settings.device)
        if (transfer := self._transfer) is not None:
            self.receive = lambda batch: transfer.receive(transfer.send(batch))
        self.clock = EpochClock("caller")
        self._is_closed = False

    def begin(self, settings: LoaderSettings, progress: Progress) -> None:
        epoch = TorchEpoch(settings, progress)
        if settings.is_datapipe:
            apply_sharding(epoch.dataset, *epoch.shard)
        collate = collate_into(settings.collate_fn, self._transfer, epoch.pin_device)
        self._draws = iter(progress)
        self._num_drawn = 0
        self._rng: AbstractContextManager[Any] = nullcontext()
        if isinstance(progress, IterableProgress):
            self._make = self._open_iterable(settings, progress, epoch.dataset, collate)
        else:
            assert isinstance(progress, MapProgress)
            progress.restore_dataset(epoch.dataset)
            self._make = self._open_map(settings, progress, epoch.dataset, collate)

    def _open_map(
        self, settings: LoaderSettings, progress: MapProgress, dataset: Any, collate: Any
    ) -> Callable[[Any], Delivery]:
        policy = settings.bad_sample_policy
        make_batch: Callable[[Any], Any] = partial(_make_batch, dataset, collate, settings.batched)
        has_cache = settings.sample_cache is not None
        if settings.is_seeded or policy.replaces or policy.retries or has_cache:
            self._draws = draws_of(settings, progress)
            make_batch = SampleMaker(settings, dataset, collate).__getitem__

        def make(drawn: Any) -> Delivery:
            number = self._num_drawn
            self._num_drawn += 1
            try:
                return Made(number, make_batch(drawn))
            except Exception as error:
                return Made(number, None, not_stop_iteration(error))

        return make

    def _open_iterable(
        self, settings: LoaderSettings, progress: IterableProgress, dataset: Any, collate: Any
    ) -> Callable[[Any], Delivery]:
        progress.num_to_read_again()  # With a warning, if there are any.
        count = progress.count
        if settings.is_seeded:
            key = partial(progress.sample_key, 0)
            self._rng = SampleRngMode(CountCursor(count, key))
        # To resume, samples may be read again. What they draw was drawn before the state was saved.
        replay_context = preserve_global_rng if progress.was_drawn else nullcontext
        with self._rng:
            reader = progress.open(dataset, 0, count, replay_context)

        def position() -> Any:
            # A reader with a state is asked for its bookmark when a state is saved. Any other is
            # not kept, because it keeps the dataset's iterator alive.
            return 0, reader if reader.is_stateful else reader.bookmark()

        def make(drawn: Any) -> Delivery:
            try:
                samples = reader.draw(drawn)
            except StopIteration:  # The end of the epoch.
                if reader.is_stateful:
                    progress.come_to_end(0, reader)
                raise
            except Exception as error:
                return Made(position(), None, error)
            try:
                return Made(position(), collate(samples))
            except Exception as error:
                return Made(position(), None, not_stop_iteration(error))

        return make

    def next(self) -> Delivery:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        with restore_current_rng(), self._rng:
            return self._make(next(self._draws))

    def close(self, *, quickly: bool = False) -> None:  # noqa: ARG002 (there are no workers)
        self._is_closed = True


def _make_batch(dataset: Any, collate: Callable[[Any], Any], batched: bool, drawn: Any) -> Any:
    """Make a batch as torch does, from its global RNG."""
    if not batched:
        return collate(dataset[drawn])
    if getattr(dataset, "__getitems__", None):
        return collate(dataset.__getitems__(drawn))
    return collate([dataset[index] for index in drawn])
