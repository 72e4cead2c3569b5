"""The iterator over the batches of an epoch, wherever they come from."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from functools import partial
from typing import Any, Self

from torch.autograd.profiler import record_function

from ._epochs import Epochs
from ._profiling import StatsLog
from ._resume import Progress
from ._settings import LoaderSettings
from ._sources import BatchSource, make_source, not_stop_iteration
from ._stats import num_bytes_of, stats_of
from ._worker import profiler_runs

__all__ = ["EpochIterator"]

_nothing = contextlib.nullcontext()

_PROFILE_NAME = "enumerate(DataLoader)#EpochIterator.__next__"
"""What profilers look for."""


class EpochIterator:
    """One epoch of a loader; with persistent workers, one epoch after the other.

    The workers end when this object is collected. An exception that the user keeps holds the frames
    it went through, so no frame that is entered to get a batch refers to this object: `_Epoch` has
    all that is needed.
    """

    def __init__(self, settings: LoaderSettings, epochs: Epochs) -> None:
        self._source = make_source(settings)
        self._epoch = self._begin(settings, epochs, workers_persist=False)
        close_with = getattr(self._source, "close_with", None)
        if close_with is not None:
            self._companion = close_with(self)
        else:
            weakref.finalize(self, self._source.close).atexit = False

    def restart(self, settings: LoaderSettings, epochs: Epochs) -> None:
        """Begin the next epoch with the workers of the last one."""
        self._epoch = self._begin(settings, epochs, workers_persist=True)

    def _begin(self, settings: LoaderSettings, epochs: Epochs, *, workers_persist: bool) -> _Epoch:
        progress = epochs.begin(settings, workers_persist=workers_persist)
        self._source.begin(settings, progress)
        epochs.measurement = self._source.measurement
        return _Epoch(settings, self._source, progress)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        epoch = self._epoch
        # In `iter(loader).__next__()` this frame has the only reference.
        epoch.iterator = self
        del self
        try:
            return epoch.next_batch()
        finally:
            epoch.iterator = None

    def __len__(self) -> int:
        return len(self._epoch.settings.index_sampler)

    @property
    def is_usable(self) -> bool:
        """Whether another epoch can begin with the same workers."""
        return self._source.is_usable

    @property
    def _workers(self) -> list[threading.Thread]:
        # torch's name for its processes.
        return self._source.threads

    def _shutdown_workers(self) -> None:
        # torch's name too: frameworks call it when they are done with a loader.
        self.close()

    def close(self) -> None:
        """End the workers. The next batch is a RuntimeError."""
        self._source.measurement.end()
        self._source.close()

    def __getstate__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled")


class _Epoch:
    """What the training loop has of a source during one epoch."""

    def __init__(self, settings: LoaderSettings, source: BatchSource, progress: Progress) -> None:
        self.settings = settings
        self._source = source
        self._progress = progress
        self._receive = source.receive
        self._measurement = source.measurement
        self._stats_log: StatsLog | None = None
        if settings.stats_interval is not None:
            stats = partial(stats_of, self._measurement, settings.bad_sample_policy)
            self._stats_log = StatsLog(settings.stats_interval, stats)
        self._num_yielded = 0
        self.iterator: EpochIterator | None = None
        """Kept alive while it is asked for a batch."""

    def next_batch(self) -> Any:
        measurement = self._measurement
        measurement.begin()
        measurement.consumer.ask()
        try:
            # torch enters a `record_function` for every batch, profiler or not, which takes as
            # long as everything else that is done for a batch in this thread.
            with record_function(_PROFILE_NAME) if profiler_runs() else _nothing:
                delivery = self._source.next()
            # An error is delivered too: the next call returns the batch after it.
            self._progress.deliver(delivery.position)
            self._num_yielded += 1
            if self.settings.reported_length is not None:
                self._check_length()
            batch = self._received(delivery.result())
        except StopIteration:
            measurement.consumer.get()
            self._end()
            raise
        except KeyboardInterrupt:
            # What the workers and the sampler were doing is unknown now.
            self._source.close()
            raise
        except BaseException:
            measurement.consumer.get()
            raise
        measurement.consumer.get()
        measurement.consumer.count(num_bytes_of(batch))
        if self._stats_log is not None:
            self._stats_log.at_batch()
        return batch

    def _received(self, batch: Any) -> Any:
        if self._receive is None:
            return batch
        try:
            return self._receive(batch)
        except StopIteration as error:
            raise not_stop_iteration(error) from error

    def _end(self) -> None:
        self._progress.is_over = True
        self._measurement.end()
        if not self.settings.persistent_workers:
            self._source.close()

    def _check_length(self) -> None:
        length = self.settings.reported_length
        if not self.settings.is_iterable or length is None or self._num_yielded <= length:
            return
        message = (
            f"Length of IterableDataset {self.settings.dataset} was reported to be {length} (when "
            f"accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
        )
        if self.settings.num_workers > 0:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly "
                "configuring the IterableDataset replica at each worker: each worker iterates over "
                "its own copy. Choose its part by get_worker_info()."
            )
        warnings.warn(message, stacklevel=4)
