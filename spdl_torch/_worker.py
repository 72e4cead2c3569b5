"""What makes a thread a torch worker: worker info, seeds, dataset copy, device, profiler marks."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, TensorDataset
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.dataloader import (
    _sharding_worker_init_fn,
)
from torch.utils.data.graph_settings import apply_random_seed

from ._bad_samples import BadSamplePolicy
from ._collate import default_collate
from ._dataset import Hooks, hooks_of
from ._dataset_copy import DatasetCopies, of_copy
from ._device import Transfer
from ._engine import (
    PendingBatch,
    WorkerCursor,
)
from ._marks import Marked, MarkedPlace, marked, profiler_runs
from ._randomness import (
    CurrentGenerators,
    CurrentlyOf,
    DrawsOfSamples,
    Keyed,
    RandomnessOfSamples,
    SampleGenerators,
    restart_sample,
    seed_as_worker_process,
)
from ._resume import LOAD, PREPROCESS, IterableProgress, MapProgress, Progress, SampleCount
from ._settings import LoaderSettings
from ._worker_info import set_worker_info

if TYPE_CHECKING:
    from ._sources._torch_workers import TorchEpoch

__all__ = [
    "WorkerSetup",
    "collate_for",
    "collate_pinned",
    "datapipe_graph_lock",
]

_datapipe_graphs = threading.RLock()
"""torch walks a graph of datapipes with hooks that it sets on their class: one thread at a time. A
fork waits until they are taken off: the child would have them for ever."""
os.register_at_fork(
    before=_datapipe_graphs.acquire,
    after_in_parent=_datapipe_graphs.release,
    after_in_child=_datapipe_graphs.release,
)


# -- what a worker thread is made of --------------------------------------------------------------


@dataclass
class WorkerSetup:
    """All that a worker needs, and nothing that refers to the loader or its iterator."""

    dataset: Any
    copies: DatasetCopies | None
    """Each worker's own dataset comes from here; None: the one dataset is shared."""
    batched: bool
    drop_last: bool
    collate_fn: Callable[[Any], Any]
    shard: Callable[[int], None] | None
    """Gives a worker's datapipe its part of the samples."""
    worker_init_fn: Callable[[int], None] | None
    base_seed: int
    shared_seed: int | None
    """Seeds the datapipes of an epoch."""
    pin_device: tuple[str, int] | None
    transfer: Transfer | None
    bad_sample_policy: BadSamplePolicy
    progress: Progress
    """Of the epoch that runs now."""
    num_workers: int = 0
    """Of all stages together."""

    @classmethod
    def of(
        cls, settings: LoaderSettings, epoch: TorchEpoch, transfer: Transfer | None
    ) -> WorkerSetup:
        shard = None
        if settings.is_datapipe:
            shard = partial(_sharding_worker_init_fn, None, *epoch.shard)
        # An iterator's state is often in the dataset, and a datapipe's shard always is: those are
        # copied for each worker, as they are for worker processes.
        copies = None
        if settings.is_iterable or settings.is_datapipe or settings.copy_dataset:
            copies = DatasetCopies(epoch.dataset, or_shallow=not settings.copy_dataset)
        pin_device = None
        if epoch.pin_device is not None and transfer is None:
            pin_device = (epoch.pin_device, torch.accelerator.current_device_index())
        collate_fn = settings.collate_fn
        if collate_fn is torch.utils.data.default_collate:
            collate_fn = default_collate if pin_device is None else _pinned_collate
        return cls(
            dataset=epoch.dataset,
            copies=copies,
            batched=settings.batched,
            drop_last=settings.drop_last,
            collate_fn=collate_fn,
            shard=shard,
            worker_init_fn=settings.worker_init_fn,
            base_seed=epoch.base_seed,
            shared_seed=epoch.shared_seed,
            pin_device=pin_device,
            transfer=transfer,
            bad_sample_policy=settings.bad_sample_policy,
            progress=epoch.progress,
        )

    def enter(self, worker_id: int, generators: CurrentGenerators) -> Any:
        """Make the calling thread a worker; gives its dataset."""
        # For this thread only. Without it every worker's resize and stack would call in the
        # intra-op threads of all cores, and they would fight.
        torch.set_num_threads(1)
        torch.get_num_threads()
        if self.pin_device is not None:
            torch.accelerator.set_device_index(self.pin_device[1])
        if self.transfer is not None:
            self.transfer.enter()
        dataset = self.dataset if self.copies is None else self.copies.make()
        seed = self.base_seed + worker_id
        set_worker_info(
            WorkerInfo(
                id=worker_id,
                num_workers=self.num_workers,
                seed=seed,
                dataset=dataset,
                rng=generators,  # type: ignore[arg-type]
                worker_method="thread",
            )
        )
        if self.shard is not None:
            with datapipe_graph_lock(dataset):
                self.shard(worker_id)
        if self.worker_init_fn is not None:
            seed_as_worker_process(self.base_seed, worker_id)
            of_copy(self.worker_init_fn, self.dataset, dataset)(worker_id)
        return dataset

    def _enter_at(
        self, place: WorkerCursor, stage: str, worker_id: int, generators: SampleGenerators
    ) -> Any:
        """Make the calling thread a worker of a stage, whose samples draw from these generators."""
        dataset = self.enter(worker_id, CurrentGenerators(generators))
        # Neither of those draws anything.
        if type(dataset) is not TensorDataset or self.collate_fn is not default_collate:
            place.task_context = RandomnessOfSamples(generators)
        place.task_context = MarkedPlace(stage, place)
        return dataset

    def _generators_at(self, place: WorkerCursor, stage: int) -> SampleGenerators:
        """Generators for the sample that a worker of a stage is at.

        Its thread holds on to them, so they must not hold anything of the user's.
        """
        worker_setup = weakref.ref(self)

        def where() -> tuple[Any, ...]:
            record, slot = place.batch, place.slot
            assert record is not None, "a worker draws between two batches"
            # The index too: another sample may have taken the place of one that failed.
            return record.epoch_id, record.number, slot, record.indices[slot] if slot >= 0 else None

        def key() -> tuple[int, ...]:
            owner = worker_setup()
            assert owner is not None
            assert place.batch is not None
            return owner._key(place.batch, place.slot, stage)

        return SampleGenerators(where, key)

    def _generators_of_count(self, count: SampleCount, worker_id: int) -> SampleGenerators:
        """The same for a worker with a dataset of its own, which counts its samples."""
        worker_setup = weakref.ref(self)

        def key() -> tuple[int, ...]:
            owner = worker_setup()
            assert owner is not None
            return owner._iterable_progress.sample_key(worker_id, count.number)

        return SampleGenerators(lambda: (count.epoch, count.number), key)

    def load_worker(
        self, worker_id: int, place: WorkerCursor
    ) -> tuple[Callable[[Any], Any] | None, None]:
        generators = self._generators_at(place, LOAD)
        dataset = self._enter_at(place, "load", worker_id, generators)
        load = self.hooks_of(dataset).load
        assert load is not None

        def sleep(seconds: float) -> bool:
            assert place.batch is not None
            return place.batch.pause(seconds)

        return self.bad_sample_policy.retried(load, restart_sample, sleep), None

    def hooks_of(self, dataset: Any) -> Hooks:
        # Of a whole batch one would not know which sample has failed.
        return hooks_of(dataset, batched=self.batched and not self.bad_sample_policy.replaces)

    def async_load_worker(self, worker_id: int) -> tuple[Callable[[Any], Any], Any, DrawsOfSamples]:
        # Its tasks take turns in one thread, so each has generators of its own.
        dataset = self.enter(worker_id, CurrentGenerators())
        load = self.hooks_of(dataset).load
        assert load is not None
        again = self.bad_sample_policy.retried_async(load, restart_sample)
        return again, self._randomness_of_task, DrawsOfSamples()

    def _randomness_of_task(self, record: PendingBatch, slot: int) -> AbstractContextManager[Any]:
        key = partial(self._key, record, slot, LOAD)
        randomness = CurrentlyOf(SampleGenerators(lambda: True, key))
        return Marked("load", randomness) if profiler_runs() else randomness

    def label(self, record: PendingBatch, slot: int, value: Any) -> Keyed:
        """What an executor is given to preprocess."""
        return Keyed(value, self._key(record, slot, PREPROCESS))

    def _key(self, record: PendingBatch, slot: int, stage: int) -> tuple[int, ...]:
        assert isinstance(self.progress, MapProgress)
        return *self.progress.sample_key(record.number, record.indices, slot), stage

    def preprocess_worker(
        self, worker_id: int, place: WorkerCursor
    ) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any]]:
        generators = self._generators_at(place, PREPROCESS)
        dataset = self._enter_at(place, "preprocess", worker_id, generators)
        collate = self._collate_of(dataset)
        if not self.batched:
            collate = partial(_of_only_sample, collate)
        return self.hooks_of(dataset).preprocess, collate

    def iterable_worker(
        self, worker_id: int, place: WorkerCursor
    ) -> tuple[Callable[[], Callable[[Any], Any]], Callable[[Any], Any]]:
        count = SampleCount()
        generators = self._generators_of_count(count, worker_id)
        dataset = self._enter_at(place, "iterate", worker_id, generators)
        return partial(self._open_iterable, dataset, worker_id, count), self._collate_of(dataset)

    def _open_iterable(
        self, dataset: Any, worker_id: int, count: SampleCount
    ) -> Callable[[PendingBatch], Any]:
        if isinstance(dataset, IterDataPipe):
            assert self.shared_seed is not None
            with _datapipe_graphs:
                dataset = apply_random_seed(
                    dataset, torch.Generator().manual_seed(self.shared_seed)
                )
        progress = self._iterable_progress
        reader = progress.open(
            dataset, worker_id, batched=self.batched, drop_last=self.drop_last, count=count
        )

        def draw(record: PendingBatch) -> Any:
            try:
                samples = reader.draw(record.drawn)
            except StopIteration:
                # What is wrong with its state has been said at every batch.
                with contextlib.suppress(Exception):
                    progress.come_to_end(worker_id, reader.bookmark())
                raise
            except Exception:
                # Whoever asks for the next batch gets what comes after the error.
                with contextlib.suppress(Exception):
                    record.position = worker_id, reader.bookmark()
                raise
            record.position = worker_id, reader.bookmark()
            return samples

        return draw

    def transfer_worker(self) -> Callable[[Any], Any]:
        assert self.transfer is not None
        torch.set_num_threads(1)
        torch.get_num_threads()
        self.transfer.enter()
        return marked("transfer", self.transfer.send)

    def first_worker(self) -> int:
        return self._iterable_progress.next_worker

    @property
    def _iterable_progress(self) -> IterableProgress:
        assert isinstance(self.progress, IterableProgress)
        return self.progress

    def _collate_of(self, dataset: Any) -> Callable[[Any], Any]:
        collate = of_copy(self.collate_fn, self.dataset, dataset)
        if self.transfer is not None:
            return collate_for(self.transfer, collate)
        return collate if self.pin_device is None else collate_pinned(collate, self.pin_device[0])


def collate_for(transfer: Transfer, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A collate function that leaves its batches where they can be sent from."""
    if collate in (default_collate, torch.utils.data.default_collate):
        return lambda samples: transfer.pin(lambda empty: default_collate(samples, empty=empty))
    return lambda samples: transfer.pin(lambda _: collate(samples))


def collate_pinned(collate: Callable[[Any], Any], device: str) -> Callable[[Any], Any]:
    """Return a collate function that leaves its batches in pinned memory, as torch does it."""
    return lambda samples: pin_memory(collate(samples), device)


def _pinned_collate(samples: list[Any]) -> Any:
    return default_collate(samples, empty=_empty_pinned)


def _empty_pinned(shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _of_only_sample(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])


@contextlib.contextmanager
def datapipe_graph_lock(dataset: Any) -> Iterator[None]:
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        with _datapipe_graphs:
            yield
    else:
        yield
