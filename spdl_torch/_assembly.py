"""From a loader's arguments to the stages that do its work, and the iterator over their batches."""

from __future__ import annotations

import contextlib
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils.fetch import _IterableDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _sharding_worker_init_fn,
    _SingleProcessDataLoaderIter,
)
from torch.utils.data.graph_settings import apply_random_seed

from ._collate import default_collate
from ._dataset import Hooks, hooks_of
from ._dataset_copy import DatasetCopies, of_copy
from ._pipeline import (
    AsyncStage,
    ExecutorStage,
    IterableStage,
    NotInTime,
    Pipeline,
    ThreadStage,
)
from ._randomness import generators_kept, seed_as_worker_process
from ._worker_info import set_worker_info

if TYPE_CHECKING:
    from ._dataloader import DataLoader

__all__ = ["CallerIterator", "ThreadIterator"]

_MIN_IO_WORKERS = 8
"""I/O workers wait most of the time, so it takes more of them than there are CPU workers."""

_INIT_SECONDS = 0.5
"""The workers run `worker_init_fn` one after the other, because the generators that it may seed are
the same for all; but one that takes longer, or waits for the others, does not hold them up."""

_nothing = contextlib.nullcontext()

_datapipe_graphs = threading.Lock()
"""torch walks a graph of datapipes with hooks that it sets on their class: one thread at a time."""


class CallerIterator(_SingleProcessDataLoaderIter):
    """One epoch loaded in the calling thread, as torch does it with `num_workers=0`."""

    def _next_data(self) -> Any:
        drawn = next(self._sampler_iter)
        try:
            batch = self._dataset_fetcher.fetch(drawn)
        except StopIteration as end:
            if self._dataset_kind == _DatasetKind.Iterable:
                raise
            # Raised out of __next__ it would end the training loop as if the epoch were over.
            raise RuntimeError(f"the dataset raised {end!r} where a sample was expected") from end
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch


class ThreadIterator(_BaseDataLoaderIter):
    """One epoch loaded by worker threads; with persistent workers, one epoch after the other.

    The threads end when nobody refers to this object any more. So neither they may refer to it nor
    any frame that is entered to get a batch: an exception holds the frames it went through and
    their callers, and lives on in the window, in a notebook, in a list of the user's.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        with _one_walk_at_a_time(loader.dataset):
            super().__init__(loader)
            self._workshop = _Workshop.of(self, loader)
        self._pipeline = _assemble(loader, self._workshop, self._dataset_kind)
        # At the interpreter's exit the pipeline closes by itself.
        weakref.finalize(self, self._pipeline.lifetime.close_by_finaliser).atexit = False
        if isinstance(self._dataset, IterDataPipe):
            # torch draws the datapipes' seed once more here; so do we, to stay in step with it.
            with _datapipe_graphs:
                super()._reset(loader, first_iter=True)
        self._epoch = self._begin()

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
        with _one_walk_at_a_time(self._dataset):
            super()._reset(loader, first_iter)
        self._workshop.shared_seed = self._shared_seed
        self._epoch = self._begin()

    def _begin(self) -> _Epoch:
        self._pipeline.begin(self._sampler_iter)
        is_iterable = self._dataset_kind == _DatasetKind.Iterable
        return _Epoch(
            self._pipeline,
            self._profile_name,
            self._timeout,
            is_last=not self._persistent_workers,
            dataset=self._dataset,
            length=self._IterableDataset_len_called if is_iterable else None,
            has_init_fn=self._workshop.worker_init_fn is not None,
        )


@dataclass
class _Epoch:
    """What the training loop has of a pipeline during one epoch."""

    pipeline: Pipeline
    profile_name: str
    timeout_seconds: float
    is_last: bool
    """The workers end with it."""
    dataset: Any
    length: int | None
    """The length that an iterable dataset was said to have."""
    has_init_fn: bool
    num_yielded: int = 0
    iterator: ThreadIterator | None = None
    """Kept alive while it is asked for a batch."""

    def start(self) -> None:
        # A thread that needs its number of intra-op threads for the first time takes the one that
        # was last set anywhere. So this thread takes its own before the workers set theirs, and
        # sets it again afterwards, for the threads to come.
        num_threads = torch.get_num_threads()
        try:
            if self.has_init_fn:
                with generators_kept():
                    self.pipeline.start(_INIT_SECONDS)
            else:
                self.pipeline.start()
        finally:
            torch.set_num_threads(num_threads)

    def next_batch(self) -> Any:
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
                    "dataset."
                ) from None
        if record is None:
            if self.is_last:
                self.pipeline.close()
            raise StopIteration
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
        return record.take()


# -- what a worker thread is made of --------------------------------------------------------------


@dataclass
class _Workshop:
    """All that a worker needs, and nothing that refers to the loader or its iterator."""

    dataset: Any
    copies: DatasetCopies | None
    """Each worker's own dataset comes from here; None: the one dataset is shared."""
    batched: bool
    drop_last: bool
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    base_seed: int
    shared_seed: int | None
    """Seeds the datapipes of an epoch."""
    pin_device: tuple[str | None, int] | None
    num_workers: int = 0
    """Of all stages together."""

    @classmethod
    def of(cls, iterator: ThreadIterator, loader: DataLoader[Any]) -> _Workshop:
        dataset = iterator._dataset
        worker_init_fn = loader.worker_init_fn
        is_datapipe = isinstance(dataset, (IterDataPipe, MapDataPipe))
        if is_datapipe:
            worker_init_fn = partial(
                _sharding_worker_init_fn, worker_init_fn, iterator._world_size, iterator._rank
            )
        # An iterator's state is in the dataset as often as not, and a datapipe's shard is: those
        # are copied for each worker, as they are for worker processes.
        needs_copies = iterator._dataset_kind == _DatasetKind.Iterable or is_datapipe
        copies = None
        if needs_copies or loader.copy_dataset:
            copies = DatasetCopies(dataset, or_shallow=not loader.copy_dataset)
        collate_fn = loader.collate_fn
        pin_device = None
        if iterator._pin_memory:
            pin_device = (iterator._pin_memory_device, torch.accelerator.current_device_index())
        if collate_fn is torch.utils.data.default_collate:
            collate_fn = default_collate if pin_device is None else _pinned_collate
        return cls(
            dataset=dataset,
            copies=copies,
            batched=iterator._auto_collation,
            drop_last=loader.drop_last,
            collate_fn=collate_fn,
            worker_init_fn=worker_init_fn,
            base_seed=int(iterator._base_seed),
            shared_seed=iterator._shared_seed,
            pin_device=pin_device,
        )

    def enter(self, worker_id: int) -> Any:
        """Make the calling thread a worker; gives its dataset."""
        # For this thread only. Without it every worker's resize and stack would call in the
        # intra-op threads of all cores, and they would fight.
        torch.set_num_threads(1)
        torch.get_num_threads()
        if self.pin_device is not None:
            torch.accelerator.set_device_index(self.pin_device[1])
        dataset = self.dataset if self.copies is None else self.copies.make()
        seed = self.base_seed + worker_id
        set_worker_info(
            WorkerInfo(
                id=worker_id,
                num_workers=self.num_workers,
                seed=seed,
                dataset=dataset,
                worker_method="thread",
            )
        )
        if self.worker_init_fn is not None:
            seed_as_worker_process(self.base_seed, worker_id)
            with _one_walk_at_a_time(dataset):
                of_copy(self.worker_init_fn, self.dataset, dataset)(worker_id)
        return dataset

    def load_worker(self, worker_id: int) -> tuple[Callable[[Any], Any] | None, None]:
        return hooks_of(self.enter(worker_id), batched=self.batched).load, None

    def async_load_worker(self, worker_id: int) -> Callable[[Any], Any]:
        load = hooks_of(self.enter(worker_id), batched=self.batched).load
        assert load is not None
        return load

    def preprocess_worker(
        self, worker_id: int
    ) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any]]:
        dataset = self.enter(worker_id)
        collate = self._collate_of(dataset)
        if not self.batched:
            collate = partial(_of_only_sample, collate)
        return hooks_of(dataset, batched=self.batched).preprocess, collate

    def iterable_worker(
        self, worker_id: int
    ) -> tuple[Callable[[], Callable[[Any], Any]], Callable[[Any], Any]]:
        dataset = self.enter(worker_id)
        return partial(self._open_iterable, dataset), self._collate_of(dataset)

    def _open_iterable(self, dataset: Any) -> Callable[[Any], Any]:
        if isinstance(dataset, IterDataPipe):
            assert self.shared_seed is not None
            with _datapipe_graphs:
                dataset = apply_random_seed(
                    dataset, torch.Generator().manual_seed(self.shared_seed)
                )
        fetcher = _IterableDatasetFetcher(dataset, self.batched, _as_it_is, self.drop_last)
        return fetcher.fetch

    def _collate_of(self, dataset: Any) -> Callable[[Any], Any]:
        collate = of_copy(self.collate_fn, self.dataset, dataset)
        return collate if self.pin_device is None else partial(self._pinned, collate)

    def _pinned(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        assert self.pin_device is not None
        return pin_memory(collate(samples), self.pin_device[0])


def _pinned_collate(samples: list[Any]) -> Any:
    return default_collate(samples, empty=_empty_pinned)


def _empty_pinned(shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _as_it_is(samples: Any) -> Any:
    return samples


def _of_only_sample(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])


@contextlib.contextmanager
def _one_walk_at_a_time(dataset: Any) -> Iterator[None]:
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        with _datapipe_graphs:
            yield
    else:
        yield


# -- which stages a loader has --------------------------------------------------------------------


def _assemble(loader: DataLoader[Any], workshop: _Workshop, dataset_kind: int) -> Pipeline:
    if dataset_kind == _DatasetKind.Iterable:
        workshop.num_workers = loader.num_workers
        stage = IterableStage("iterate", loader.num_workers, workshop.iterable_worker)
        return _pipeline(loader, [stage], num_in_flight=0)

    hooks = hooks_of(workshop.dataset, batched=workshop.batched)
    num_cpu_workers = loader.num_cpu_workers or loader.num_workers
    cpu_ids = range(num_cpu_workers)
    preprocess = ThreadStage(
        "preprocess",
        cpu_ids,
        workshop.preprocess_worker,
        is_first=hooks.load is None,
        takes_whole_batch=hooks.preprocess_takes_batch,
    )
    stages: list[Any] = [preprocess]
    workshop.num_workers = num_cpu_workers
    if loader.preprocess_executor is not None and hooks.preprocess is not None:
        stages.insert(0, _executor_stage(loader, hooks, collate_stage=preprocess))
    if hooks.load is None:
        return _pipeline(loader, stages, num_in_flight=0)

    num_io_workers = loader.num_io_workers or max(_MIN_IO_WORKERS, 2 * loader.num_workers)
    next_stage = None if hooks.preprocess is None else stages[0]
    load_args: dict[str, Any] = {
        "takes_whole_batch": hooks.load_takes_batch,
        "next_stage": next_stage,
        "collate_stage": preprocess,
    }
    if hooks.load_is_async:
        load: Any = AsyncStage(
            "load",
            num_cpu_workers,
            num_io_workers,
            workshop.async_load_worker,
            loader._event_loop,
            **load_args,
        )
        workshop.num_workers += 1
    else:
        io_ids = range(num_cpu_workers, num_cpu_workers + num_io_workers)
        load = ThreadStage("load", io_ids, workshop.load_worker, is_first=True, **load_args)
        workshop.num_workers += num_io_workers
    return _pipeline(loader, [load, *stages], _num_to_keep_busy(loader, hooks, num_io_workers))


def _num_to_keep_busy(loader: DataLoader[Any], hooks: Hooks, num_io_workers: int) -> int:
    """How many batches in flight keep the load stage's workers busy."""
    if hooks.load_takes_batch:
        return num_io_workers
    if loader.batch_sampler is None:
        return 2 * num_io_workers
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    return ceil(2 * num_io_workers / batch_size) if isinstance(batch_size, int) else 0


def _executor_stage(
    loader: DataLoader[Any], hooks: Hooks, collate_stage: ThreadStage
) -> ExecutorStage:
    assert loader.preprocess_executor is not None
    assert hooks.preprocess is not None
    try:
        return ExecutorStage(
            "preprocess",
            loader.preprocess_executor,
            hooks.preprocess,
            is_first=hooks.load is None,
            takes_whole_batch=hooks.preprocess_takes_batch,
            collate_stage=collate_stage,
        )
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"preprocess_executor needs a dataset that can be pickled: {error}. Define its class "
            "and functions at the top level of a module, and open handles when first used."
        ) from error


def _pipeline(loader: DataLoader[Any], stages: list[Any], num_in_flight: int) -> Pipeline:
    """A pipeline whose window is as wide as torch's, or as the load stage needs to keep busy."""
    capacity = loader.buffer_size
    if capacity is None:
        assert loader.prefetch_factor is not None
        capacity = max(loader.prefetch_factor * loader.num_workers, num_in_flight)
    return Pipeline(
        stages[0],
        stages,
        capacity=capacity,
        in_order=loader.in_order,
        batched=loader._auto_collation,
    )
