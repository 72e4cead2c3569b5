"""The iterator over the batches of an epoch, wherever they come from."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import warnings
import weakref
from collections import UserDict
from functools import partial
from typing import Any, Final, Self

from torch import Tensor
from torch.autograd.profiler import record_function

from ._epochs import Epochs
from ._resume import Progress
from ._settings import LoaderSettings
from ._sources import BatchSource, make_source, not_stop_iteration
from ._stats import StatsLog, stats_of
from ._worker import profiler_runs

_no_context = contextlib.nullcontext()

_PROFILE_NAME: Final = "enumerate(DataLoader)#EpochIterator.__next__"
"""The name that profilers look for."""

_MAX_OBJECTS: Final = 256
"""How many objects of a batch are looked at for their size."""


class EpochIterator:
    """One epoch of a loader; with persistent workers, one epoch after the other.

    The workers end when this object is garbage-collected. An exception that the user keeps refers
    to the frames that it passed through, so no frame that is entered to get a batch refers to this
    object: `_EpochLoop` has all that is needed.
    """

    def __init__(self, settings: LoaderSettings, epochs: Epochs) -> None:
        self._source = make_source(settings)
        self.begin(settings, epochs, workers_persist=False)
        self._source.close_with(self)

    def begin(self, settings: LoaderSettings, epochs: Epochs, *, workers_persist: bool) -> None:
        """Begin the first epoch, or a further one with the workers of the last."""
        progress = epochs.begin(settings, workers_persist=workers_persist)
        self._source.begin(settings, progress)
        epochs.clock = self._source.clock
        self._loop = _EpochLoop(settings, self._source, progress)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        loop = self._loop
        # In `next(iter(loader))` this frame has the only reference to the iterator.
        loop.iterator = self
        del self
        try:
            return loop.next_batch()
        finally:
            loop.iterator = None

    def __len__(self) -> int:
        return len(self._loop.settings.index_sampler)

    @property
    def is_usable(self) -> bool:
        """Whether another epoch can begin with the same workers."""
        return self._source.is_usable

    @property
    def _workers(self) -> list[threading.Thread]:
        return self._source.threads  # torch's name for its processes.

    def close(self) -> None:
        """End the workers. The next batch is a RuntimeError."""
        self._source.clock.end()
        self._source.close()

    _shutdown_workers = close  # torch's name, which frameworks call.

    def __getstate__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled")


class _EpochLoop:
    """One epoch as the training loop sees it: measured, delivered, counted."""

    def __init__(self, settings: LoaderSettings, source: BatchSource, progress: Progress) -> None:
        self.settings = settings
        self._source = source
        self._progress = progress
        self._receive = source.receive
        self._clock = source.clock
        self._stats_log: StatsLog | None = None
        if settings.stats_interval is not None:
            cache = settings.sample_cache
            stats = partial(stats_of, self._clock, settings.bad_sample_policy, cache)
            self._stats_log = StatsLog(settings.stats_interval, stats)
        self._num_delivered = 0
        self.iterator: EpochIterator | None = None
        """Kept alive while it is asked for a batch."""

    def next_batch(self) -> Any:
        if self._progress.is_over:
            raise StopIteration
        clock, num_bytes = self._clock, None
        if clock.consumer.started_at is None:
            clock.start()
        clock.consumer.ask()
        try:
            # torch enters a `record_function` for every batch, profiler or not, which takes as
            # long as everything else that this thread does for a batch.
            with record_function(_PROFILE_NAME) if profiler_runs() else _no_context:
                delivery = self._source.next()
            if self.settings.reported_length is not None:
                self._check_length()
            try:
                batch = delivery.result()
                if self._receive is not None:
                    batch = self._receive(batch)
            except BaseException as error:
                # An error is delivered too: the next call returns the batch after it.
                if not isinstance(error, KeyboardInterrupt):
                    self._progress.deliver(delivery.position)
                if isinstance(error, StopIteration):
                    raise not_stop_iteration(error) from error
                raise
            num_bytes = num_bytes_of(batch)
            # Last, so that a batch that Ctrl-C keeps from the loop is not counted.
            self._progress.deliver(delivery.position)
        except StopIteration:
            self._progress.is_over = True
            clock.end()
            if not self.settings.persistent_workers:
                self._source.close()
            raise
        except KeyboardInterrupt:
            # What the sampler and the workers were doing is unknown now.
            clock.end()
            self._source.close(quickly=True)
            raise
        finally:
            clock.consumer.get(num_bytes)
        if self._stats_log is not None:
            self._stats_log.at_batch()
        return batch

    def _check_length(self) -> None:
        """Warn about each batch beyond the reported length of an iterable dataset, as torch."""
        self._num_delivered += 1
        length = self.settings.reported_length
        if not self.settings.is_iterable or length is None or self._num_delivered <= length:
            return
        message = (
            f"Length of IterableDataset {self.settings.dataset} was reported to be {length} (when "
            f"accessing len(dataloader)), but {self._num_delivered} samples have been fetched. "
        )
        if self.settings.num_workers > 0:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly "
                "configuring the IterableDataset replica at each worker: each worker iterates over "
                "its own copy. Choose its part by get_worker_info()."
            )
        warnings.warn(message, stacklevel=4)


def num_bytes_of(batch: Any) -> int:
    """Return the size of all tensors and arrays in a batch."""
    num_bytes = 0
    to_see = [batch]
    for value in itertools.islice(to_see, _MAX_OBJECTS):
        kind = type(value)
        try:
            if kind is Tensor or hasattr(kind, "nbytes"):
                num_bytes += value.nbytes
            elif issubclass(kind, list | tuple):
                # A list of many numbers or words has no tensor among them.
                if value and not isinstance(value[0], str | bytes | int | float | None):
                    to_see += value[:_MAX_OBJECTS]
            elif issubclass(kind, dict | UserDict):
                to_see += list(value.values())
            elif dataclasses.is_dataclass(kind):
                to_see += [getattr(value, field.name) for field in dataclasses.fields(kind)]
        except Exception:  # A batch may be any object, and a figure is not worth an error.
            continue
    return num_bytes


class LiveIterators:
    """The iterators of a loader that are still in use, for `DataLoader.close`."""

    def __init__(self) -> None:
        self._iterators = weakref.WeakValueDictionary[int, EpochIterator]()
        self.is_closed = False

    def add(self, iterator: EpochIterator) -> None:
        self._iterators[id(iterator)] = iterator

    def close(self) -> None:
        """Close all iterators, and refuse new ones."""
        self.is_closed = True
        for ref in self._iterators.valuerefs():  # In one step: other threads may add some.
            if (iterator := ref()) is not None:
                iterator.close()

    def check_open(self) -> None:
        if self.is_closed:
            self.close()  # Another thread may have closed it while an iterator was being made.
            raise RuntimeError("this DataLoader is closed. Make a new one to iterate again.")

    def __reduce__(self) -> tuple[type[LiveIterators], tuple[()]]:
        return LiveIterators, ()  # Threads cannot be copied; a copied loader starts its own.
