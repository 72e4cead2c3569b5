"""The iterators over a loader's batches: in the calling thread, worker threads or processes."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
)
from torch.utils.data.graph_settings import apply_sharding

from ._assembly import (
    Workshop,
    assemble,
    collate_for,
    one_walk_at_a_time,
)
from ._errors import path_of
from ._pipeline import Measurement, NotInTime, Pipeline, Sighting
from ._profiling import StatsLog
from ._progress import IterableProgress, MapProgress, Progress
from ._randomness import (
    KeyedIterable,
    RandomnessOfSamples,
    SampleGenerators,
    generators_kept,
    generators_left_as_they_were,
    show_dataset,
)
from ._samples import keyed_collate, keyed_dataset, keyed_draws
from ._stats import num_bytes_of, stats_of
from ._transfer import Transfer, transfer

if TYPE_CHECKING:
    from ._dataloader import DataLoader

__all__ = ["CallerIterator", "ProcessIterator", "ThreadIterator"]

_INIT_SECONDS: Final = 0.5
"""The workers run `worker_init_fn` one after the other, because the generators that it may seed are
the same for all; but one that takes longer, or waits for the others, does not hold them up."""

_NUM_SIGHTINGS: Final = 20
_NUM_STACKS: Final = 3
"""How much of what is in flight is listed, and how much with where it is in the code."""

_nothing = contextlib.nullcontext()


class _Iterator(_BaseDataLoaderIter):
    """An iterator of torch's that goes on from wherever a progress is.

    torch's constructors draw the seeds of an epoch and the indices of the first batches themselves,
    and hand some of them to worker processes before they return. So what they set is caught on its
    way into the attribute.
    """

    _progress: Progress
    """Set before torch's constructor is called."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._was_drawn = self._progress.was_drawn(loader)
        torchs: Any = _Undrawn(loader) if self._was_drawn else loader
        super().__init__(torchs)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        # What is restored has an iterator made for it, whose first reset this is.
        super()._reset(_Undrawn(loader) if first_iter and self._was_drawn else loader, first_iter)

    @property
    def _base_seed(self) -> int:
        return self._progress.seed_of_workers

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._progress.take_base_seed(int(drawn))

    @property
    def _shared_seed(self) -> int | None:
        return self._progress_shared_seed

    @_shared_seed.setter
    def _shared_seed(self, drawn: int | None) -> None:
        self._progress_shared_seed = drawn
        if isinstance(self._progress, IterableProgress):
            self._progress_shared_seed = self._progress.take_shared_seed(drawn)

    _is_seeded = False
    """Samples draw from generators of their own, also without worker threads."""
    _is_keyed = False
    """What is drawn is given to our own code, which makes the samples one after the other."""

    @property
    def _index_sampler(self) -> _IndexSampler:
        return _IndexSampler(
            self._loader_sampler,
            self._progress,
            is_keyed=self._is_keyed,
            is_seeded=self._is_seeded,
            batched=self._auto_collation,
        )

    @_index_sampler.setter
    def _index_sampler(self, sampler: Any) -> None:
        self._loader_sampler = sampler


class _Undrawn:
    """A loader whose generator is nobody else's, for torch's constructors to draw from."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@dataclass
class _IndexSampler:
    """What a loader has for its batch sampler, but drawn from a progress."""

    sampler: Any
    progress: Progress
    is_keyed: bool
    is_seeded: bool
    batched: bool

    def __iter__(self) -> Iterator[Any]:
        if self.is_keyed and isinstance(self.progress, MapProgress):
            return keyed_draws(self.progress, batched=self.batched, is_seeded=self.is_seeded)
        return iter(self.progress)

    def __len__(self) -> int:
        return len(self.sampler)


class CallerIterator(_Iterator):
    """One epoch loaded in the calling thread, as torch does it with `num_workers=0`."""

    def __init__(self, loader: DataLoader[Any], progress: Progress) -> None:
        self._progress = progress
        self._is_seeded = _is_seeded(loader)
        remedies = loader._remedies
        self._is_keyed = self._is_seeded or remedies.replaces or remedies.retries
        super().__init__(loader)
        self._transfer = _transfer_of(loader)
        if self._transfer is not None:
            self._collate_fn = collate_for(self._transfer, self._collate_fn)
            self._pin_memory = False
        if self._timeout != 0:
            raise AssertionError("num_workers=0 has no timeout: set it to 0, or num_workers to 1.")
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            apply_sharding(self._dataset, self._world_size, self._rank)
        self._num_drawn = 0
        self._is_closed = False
        self._measurement = loader._measurement = Measurement("caller")
        weakref.finalize(self, self._measurement.end).atexit = False
        self._stats_log = _stats_log(loader)
        self._randomness: Any = _nothing
        if isinstance(progress, IterableProgress):
            progress.warn_of_skipping()
            if self._is_seeded:
                self._randomness = _randomness_of_caller(progress)
            # What is read again draws again, and has done so before.
            kept = generators_kept() if self._was_drawn else _nothing
            with kept, self._randomness:
                self._reader = progress.open(
                    self._dataset,
                    0,
                    batched=self._auto_collation,
                    drop_last=self._drop_last,
                    count=progress.count,
                )
            progress.hold(self._reader)
        else:
            progress.restore_dataset(self._dataset, has_begun=True)
            dataset, collate_fn = self._dataset, self._collate_fn
            if self._is_keyed:
                dataset = keyed_dataset(
                    dataset, batched=self._auto_collation, remedies=loader._remedies
                )
                collate_fn = keyed_collate(collate_fn)
            self._fetcher = _DatasetKind.create_fetcher(
                self._dataset_kind, dataset, self._auto_collation, collate_fn, self._drop_last
            )

    def _shutdown_workers(self) -> None:
        # There are none, but frameworks and the loader say so when they are done with it.
        self._is_closed = True
        self._measurement.end()

    def _next_data(self) -> Any:
        if self._is_closed:
            raise RuntimeError("this iterator is closed. Call iter(loader) for a new one.")
        self._measurement.begin()
        self._measurement.consumer.ask()
        try:
            batch = self._make_batch_for_device()
        except StopIteration:
            self._measurement.consumer.get()
            self._measurement.end()
            raise
        except BaseException:
            self._measurement.consumer.get()
            raise
        self._measurement.consumer.get()
        self._measurement.consumer.count(num_bytes_of(batch))
        if self._stats_log is not None:
            self._stats_log.at_batch()
        return batch

    def _make_batch_for_device(self) -> Any:
        with generators_left_as_they_were(), self._randomness:
            batch = self._make_batch()
        if self._transfer is not None:
            with _NoStopIteration():
                return self._transfer.receive(self._transfer.send(batch))
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _make_batch(self) -> Any:
        try:
            drawn = next(self._sampler_iter)
            if self._dataset_kind == _DatasetKind.Iterable:
                samples = self._reader.draw(drawn)
        except StopIteration:
            self._progress.is_over = True
            raise
        except Exception:
            if self._dataset_kind == _DatasetKind.Iterable:
                self._deliver(self._num_drawn)
            raise
        number = self._num_drawn
        self._num_drawn += 1
        try:
            if self._dataset_kind == _DatasetKind.Iterable:
                batch = self._collate_fn(samples)
            else:
                batch = self._fetcher.fetch(drawn)
        except Exception:
            # This batch will not come again: whoever asks for the next gets the one after it.
            self._deliver(number)
            with _NoStopIteration():
                raise
        self._deliver(number)
        return batch

    def _deliver(self, number: int) -> None:
        if isinstance(self._progress, IterableProgress) and not self._reader.is_stateful:
            self._progress.deliver_from(0, self._reader.bookmark())
        else:
            self._progress.deliver(number)


class ProcessIterator(_MultiProcessingDataLoaderIter, _Iterator):
    """One epoch loaded by torch's worker processes; with persistent workers, one after another."""

    def __init__(self, loader: DataLoader[Any], progress: Progress) -> None:
        self._progress = progress
        self._device = loader._device
        self._is_keyed = self._is_seeded = _is_seeded(loader)
        self._measurement = loader._measurement = _measurement_of_processes(loader)
        self._stats_log = _stats_log(loader)
        progress.restore_dataset(loader.dataset, has_begun=True)
        super().__init__(loader)
        self._num_delivered = 0
        if isinstance(progress, IterableProgress):
            for _ in range(progress.num_to_read_again()):
                super().__next__()

    @property
    def _worker_init_fn(self) -> Any:
        return self._init_fn_of_workers

    @_worker_init_fn.setter
    def _worker_init_fn(self, worker_init_fn: Any) -> None:
        # torch sets it after all else that it hands to the worker processes, and just before it
        # does so.
        if self._is_keyed:
            worker_init_fn = partial(show_dataset, worker_init_fn)
            if isinstance(self._progress, IterableProgress):
                base_seed, epoch = self._progress.base_seed, self._progress.epoch
                self._dataset = KeyedIterable(self._dataset, base_seed, epoch)
            else:
                self._dataset = keyed_dataset(self._dataset, batched=self._auto_collation)
                self._collate_fn = keyed_collate(self._collate_fn)
        self._init_fn_of_workers = worker_init_fn

    def __next__(self) -> Any:
        num_received = self._rcvd_idx
        self._measurement.begin()
        self._measurement.consumer.ask()
        try:
            batch = super().__next__()
        except StopIteration:
            self._progress.is_over = True
            self._measurement.consumer.get()
            self._measurement.end()
            raise
        except Exception:
            self._measurement.consumer.get()
            if self._rcvd_idx > num_received:  # Or else it was waited for in vain.
                self._deliver()
            raise
        self._deliver()
        if self._device is not None:
            with _NoStopIteration():
                batch = transfer(batch, self._device)
        self._measurement.consumer.get()
        self._measurement.consumer.count(num_bytes_of(batch))
        if self._stats_log is not None:
            self._stats_log.at_batch()
        return batch

    def _deliver(self) -> None:
        self._progress.deliver(self._num_delivered)
        self._num_delivered += 1

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:
            self._progress = loader._begin_progress()
            self._num_delivered = 0
            self._measurement = loader._measurement = _measurement_of_processes(loader)
            self._stats_log = _stats_log(loader)
        super()._reset(loader, first_iter)
        self._progress.has_drawn = True  # The processes are at work already.


class ThreadIterator(_Iterator):
    """One epoch loaded by worker threads; with persistent workers, one epoch after the other.

    The threads end when nobody refers to this object any more. So neither they may refer to it nor
    any frame that is entered to get a batch: an exception holds the frames it went through and
    their callers, and lives on in the window, in a notebook, in a list of the user's.
    """

    def __init__(self, loader: DataLoader[Any], progress: Progress) -> None:
        self._progress = progress
        self._transfer = _transfer_of(loader)
        with one_walk_at_a_time(loader.dataset):
            super().__init__(loader)
            # Before it is copied for the workers.
            progress.restore_dataset(self._dataset, has_begun=True)
            self._workshop = Workshop.of(self, loader)
        if isinstance(progress, IterableProgress):
            progress.warn_of_skipping()
        self._pipeline = assemble(loader, self._workshop, self._dataset_kind)
        self._companion = self._pipeline.lifetime.close_with(self)
        if isinstance(self._dataset, IterDataPipe):
            # torch draws the datapipes' seed once more here; so do we, to stay in step with it.
            with one_walk_at_a_time(self._dataset):
                super()._reset(loader, first_iter=True)
        self._epoch = self._begin(loader)

    def __next__(self) -> Any:
        epoch = self._epoch
        # In `iter(loader).__next__()` this frame has the only reference.
        epoch.iterator = self
        del self
        try:
            return epoch.next_batch()
        finally:
            epoch.iterator = None

    @property
    def is_usable(self) -> bool:
        return self._pipeline.is_usable

    @property
    def _workers(self) -> list[threading.Thread]:
        # torch's name for its processes.
        return self._pipeline.threads

    def _shutdown_workers(self) -> None:
        # torch's name too: frameworks call it when they are done with a loader.
        self._pipeline.close()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self._progress = loader._begin_progress()
        with one_walk_at_a_time(self._dataset):
            super()._reset(loader, first_iter)
        self._workshop.shared_seed = self._shared_seed
        self._epoch = self._begin(loader)

    def _begin(self, loader: DataLoader[Any]) -> _Epoch:
        self._workshop.progress = self._progress
        self._pipeline.begin(self._sampler_iter)
        loader._measurement = self._pipeline.measurement
        is_iterable = self._dataset_kind == _DatasetKind.Iterable
        return _Epoch(
            self._pipeline,
            self._progress,
            self._transfer,
            self._profile_name,
            self._timeout,
            is_last=not self._persistent_workers,
            dataset=self._dataset,
            length=self._IterableDataset_len_called if is_iterable else None,
            has_init_fn=self._workshop.worker_init_fn is not None,
            stats_log=_stats_log(loader),
        )


@dataclass
class _Epoch:
    """What the training loop has of a pipeline during one epoch."""

    pipeline: Pipeline
    progress: Progress
    transfer: Transfer | None
    profile_name: str
    timeout_seconds: float
    is_last: bool
    """The workers end with it."""
    dataset: Any
    length: int | None
    """The length that an iterable dataset was said to have."""
    has_init_fn: bool
    stats_log: StatsLog | None
    num_yielded: int = 0
    iterator: ThreadIterator | None = None
    """Kept alive while it is asked for a batch."""

    def start(self) -> None:
        # A thread that needs its number of intra-op threads for the first time takes the one that
        # was last set anywhere. So this thread takes its own before the workers set theirs, and
        # sets it again afterwards, for the threads to come.
        num_threads = torch.get_num_threads()
        # In a forked child the first call that sets it makes torch's pool anew, and one that comes
        # meanwhile finds none and fails. Without a GIL the workers' would come all at once.
        torch.set_num_threads(num_threads)
        try:
            if self.has_init_fn:
                with generators_kept():
                    self.pipeline.start(_INIT_SECONDS)
            else:
                self.pipeline.start()
        finally:
            torch.set_num_threads(num_threads)

    def next_batch(self) -> Any:
        self.pipeline.measurement.begin()
        if not self.pipeline.is_started and self.pipeline.is_usable:
            self.start()
        # torch marks every batch for a profiler, running or not, which takes about as long as
        # everything else that is done for a batch in this thread.
        with record_function(self.profile_name) if _profiler_enabled() else _nothing:
            try:
                record = self.pipeline.next(self.timeout_seconds or None)
            except NotInTime:
                raise RuntimeError(
                    f"DataLoader timed out after {self.timeout_seconds} seconds: no worker "
                    "finished the next batch. Raise timeout, or look for what blocks in the "
                    f"dataset.{_in_flight(self.pipeline.sightings(), self.dataset)}"
                ) from None
        if record is None:
            self.progress.is_over = True
            self.pipeline.measurement.end()
            if self.is_last:
                self.pipeline.close()
            raise StopIteration
        # An error is delivered too: whoever asks for the next batch gets the one after it.
        if isinstance(self.progress, IterableProgress) and record.bookmark is not None:
            self.progress.deliver_from(*record.bookmark)
        else:
            self.progress.deliver(record.number)
        self.num_yielded += 1
        if self.length is not None and self.num_yielded > self.length:
            warnings.warn(
                f"Length of IterableDataset {self.dataset} was reported to be {self.length} (when "
                f"accessing len(dataloader)), but {self.num_yielded} samples have been fetched. "
                "For multiprocessing data-loading, this could be caused by not properly "
                "configuring the IterableDataset replica at each worker: each worker thread "
                "iterates over its own copy. Choose its part by get_worker_info().",
                stacklevel=3,
            )
        batch = record.take()
        if self.transfer is not None:
            batch = self.transfer.receive(batch)
        self.pipeline.measurement.consumer.count(num_bytes_of(batch))
        if self.stats_log is not None:
            self.stats_log.at_batch()
        return batch


def _in_flight(sightings: list[Sighting], dataset: Any) -> str:
    """What the workers are at, in words."""
    lines = []
    for number, sighting in enumerate(sightings[:_NUM_SIGHTINGS]):
        if sighting.slot is None:
            what = f"batch {sighting.record.number}"
        else:
            what = f"sample index {sighting.index!r} (batch {sighting.record.number})"
            if (path := path_of(dataset, sighting.index)) is not None:
                what = f"{what}, {path},"
        lines.append(f"  {what} in the {sighting.stage} stage for {sighting.seconds:.1f} s")
        if number < _NUM_STACKS:
            lines += [f"    {line}" for text in sighting.lines for line in text.splitlines()]
    if len(sightings) > _NUM_SIGHTINGS:
        lines.append(f"  … {len(sightings)} in all")
    return "\nIn flight, the oldest first:\n" + "\n".join(lines) if lines else ""


def _stats_log(loader: DataLoader[Any]) -> StatsLog | None:
    """For the epoch that begins. It must not refer to the loader, which may refer to it."""
    if loader.stats_interval is None:
        return None
    return StatsLog(loader.stats_interval, partial(stats_of, loader._measurement, loader._remedies))


def _measurement_of_processes(loader: DataLoader[Any]) -> Measurement:
    assert loader.prefetch_factor is not None
    return Measurement("multiprocessing", window=loader.prefetch_factor * loader.num_workers)


def _is_seeded(loader: DataLoader[Any]) -> bool:
    """Whether samples are to draw from generators of their own without worker threads."""
    # Datapipes are seeded, and taken apart, by torch.
    is_datapipe = isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
    return loader.seed is not None and not is_datapipe


def _randomness_of_caller(progress: IterableProgress) -> RandomnessOfSamples:
    count = progress.count
    return RandomnessOfSamples(
        SampleGenerators(
            lambda: (count.epoch, count.number), lambda: progress.sample_key(0, count.number)
        )
    )


class _NoStopIteration(contextlib.AbstractContextManager[None]):
    """Raised out of __next__ it would end the training loop as if the epoch were over."""

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(
                f"the dataset raised {error!r} where a sample was expected"
            ) from error


def _transfer_of(loader: DataLoader[Any]) -> Transfer | None:
    device = loader._device
    return None if device is None else Transfer(device)
