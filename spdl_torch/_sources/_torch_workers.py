"""What is torch's own: the draws that begin an epoch, and worker processes.

This is the only module that knows torch's private iterators.
"""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
)

from .._device import transfer
from .._engine import EpochClock
from .._resume import IterableProgress, MapProgress, Progress
from .._samples import SampleMaker, SeededIterable, draws_of, init_process
from .._settings import LoaderSettings
from ._source import CLOSED, BatchSource, Delivery, Made


def _loader_view(settings: LoaderSettings, progress: Progress) -> Any:
    """Return the settings under the names that torch's iterators look for in a loader."""
    names: dict[str, Any] = {
        "_dataset_kind": _DatasetKind.Iterable if settings.is_iterable else _DatasetKind.Map,
        "_IterableDataset_len_called": settings.reported_length,
        "_auto_collation": settings.batched,
        "_index_sampler": progress,
    }
    if progress.was_drawn:
        # The epoch is resumed: its seeds are known, and the generator must not be advanced.
        names["generator"] = torch.Generator()
    return SimpleNamespace(**vars(settings) | names)


class _SeedsOfProgress(_BaseDataLoaderIter):
    """Takes the seeds that torch draws for an epoch, unless the progress has restored them.

    torch's constructors hand the seeds to worker processes before they return. So they are
    replaced on the way into the attribute.
    """

    progress: Progress
    """Set before torch's constructor is called."""

    @property
    def _base_seed(self) -> int:
        return self.progress.seed_of_workers

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self.progress.take_base_seed(int(drawn))

    @property
    def _shared_seed(self) -> int | None:
        return self._drawn_shared_seed

    @_shared_seed.setter
    def _shared_seed(self, drawn: int | None) -> None:
        self._drawn_shared_seed = drawn
        if isinstance(self.progress, IterableProgress):
            self._drawn_shared_seed = self.progress.take_shared_seed(drawn)

    def begin(self, settings: LoaderSettings, progress: Progress) -> None:
        """Draw what the next epoch of the same workers needs."""
        self.progress = self._index_sampler = progress
        self._reset(_loader_view(settings, progress))


class TorchEpoch(_SeedsOfProgress):
    """What torch draws and decides when it makes an iterator: seeds, pinned memory, sharding."""

    def __init__(self, settings: LoaderSettings, progress: Progress) -> None:
        self.progress = progress
        super().__init__(_loader_view(settings, progress))
        self.dataset: Any = self._dataset
        self.pin_device = self._pin_memory_device if self._pin_memory else None
        """The kind of device that batches are pinned for; None if they are not pinned."""
        self.shard = self._world_size, self._rank
        """The number of ranks and the number of this one."""


class _Workers(_MultiProcessingDataLoaderIter, _SeedsOfProgress):
    """torch's iterator over worker processes."""

    def __init__(self, settings: LoaderSettings, progress: Progress) -> None:
        self.progress = progress
        self._settings = settings
        self._process_id = os.getpid()
        super().__init__(_loader_view(settings, progress))

    @property
    def _index_sampler(self) -> Any:
        if self._settings.is_seeded and isinstance(self.progress, MapProgress):
            return draws_of(self._settings, self.progress)
        return self.progress

    @_index_sampler.setter
    def _index_sampler(self, sampler: Any) -> None:
        pass  # It follows from the progress of the epoch.

    @property
    def _worker_init_fn(self) -> Any:
        return self._init_fn_of_workers

    @_worker_init_fn.setter
    def _worker_init_fn(self, worker_init_fn: Any) -> None:
        # torch sets this last of all that it hands to the worker processes.
        if self._settings.is_seeded:
            worker_init_fn = partial(init_process, worker_init_fn)
            if isinstance(self.progress, IterableProgress):
                base_seed, epoch = self.progress.base_seed, self.progress.epoch
                self._dataset = SeededIterable(self._dataset, base_seed, epoch)
            else:
                self._dataset = SampleMaker(self._settings, self._dataset, self._collate_fn)
                self._collate_fn = _unchanged
        self._init_fn_of_workers = worker_init_fn

    def _try_get_data(self, *args: Any, **kwargs: Any) -> Any:
        # torch calls this every few seconds until there is a batch. Another thread may have closed
        # the loader since, and then there will be none.
        try:
            return super()._try_get_data(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            if self._shutdown:
                raise RuntimeError(CLOSED)

    @property
    def is_in_parent(self) -> bool:
        return os.getpid() == self._process_id

    def _shutdown_workers(self) -> None:
        # Also called by torch's finaliser. A forked child has a copy of this object, and must not
        # end the workers of its parent.
        if self.is_in_parent:
            super()._shutdown_workers()


def _unchanged(batch: Any) -> Any:
    return batch  # The dataset of the worker process has made the batch.


class TorchWorkersSource(BatchSource):
    """Batches from torch's worker processes, which torch ends when its iterator is collected."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._workers: _Workers | None = None
        self._is_closed = False
        if settings.device is not None:
            self.receive = partial(transfer, device=settings.device)
        assert settings.prefetch_factor is not None
        self._window = settings.prefetch_factor * settings.num_workers

    @property
    def is_usable(self) -> bool:
        return not self._is_closed and (self._workers is None or self._workers.is_in_parent)

    def begin(self, settings: LoaderSettings, progress: Progress) -> None:
        self._num_delivered = 0
        self.clock = EpochClock("multiprocessing", window=self._window)
        progress.restore_dataset(settings.dataset)
        if self._workers is None:
            self._workers = _Workers(settings, progress)
        else:
            self._workers.begin(settings, progress)
        progress.has_drawn = True  # The processes are at work already.
        if isinstance(progress, IterableProgress):
            for _ in range(progress.num_to_read_again()):
                self._workers._next_data()  # type: ignore[no-untyped-call]

    def next(self) -> Delivery:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        assert self._workers is not None
        num_received = self._workers._rcvd_idx
        batch, failure = None, None
        try:
            batch = self._workers._next_data()  # type: ignore[no-untyped-call]
        except StopIteration:
            raise
        except Exception as error:
            if self._workers._rcvd_idx == num_received:
                raise  # A timeout: the batch may still come.
            failure = error
        self._num_delivered += 1
        return Made(self._num_delivered - 1, batch, failure)

    def close(self, *, quickly: bool = False) -> None:  # noqa: ARG002 (torch decides)
        self._is_closed = True
        if self._workers is not None:
            self._workers._shutdown_workers()
