"""From a loader's arguments to the stages that do its work, and what a worker is made of."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, TensorDataset
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.dataloader import (
    _DatasetKind,
    _sharding_worker_init_fn,
)
from torch.utils.data.graph_settings import apply_random_seed

from ._collate import default_collate
from ._dataset import Hooks, hooks_of
from ._dataset_copy import DatasetCopies, of_copy
from ._errors import Remedies, path_of, substitutes
from ._marks import Marked, MarkedPlace, marked, profiler_runs
from ._pipeline import (
    AsyncStage,
    ExecutorStage,
    IterableStage,
    Pipeline,
    Place,
    Record,
    Remedy,
    SampleStage,
    ThreadStage,
    TransferStage,
)
from ._progress import LOAD, PREPROCESS, IterableProgress, MapProgress, Progress, SampleCount
from ._randomness import (
    CurrentGenerators,
    CurrentlyOf,
    DrawsOfSamples,
    Keyed,
    KeyedHook,
    RandomnessOfSamples,
    SampleGenerators,
    restart_sample,
    seed_as_worker_process,
)
from ._transfer import Transfer
from ._worker_info import set_worker_info

if TYPE_CHECKING:
    from ._dataloader import DataLoader

__all__ = [
    "Workshop",
    "assemble",
    "collate_for",
    "one_walk_at_a_time",
]

_MIN_IO_WORKERS = 8
"""I/O workers wait most of the time, so it takes more of them than there are CPU workers."""

_NUM_AHEAD = 2
"""Batches on the device that the loop has not asked for: one to be computed with next, and one that
is copied meanwhile. More would only take the model's memory."""

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
class Workshop:
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
    pin_device: tuple[str | None, int] | None
    transfer: Transfer | None
    remedies: Remedies
    progress: Progress
    """Of the epoch that runs now."""
    num_workers: int = 0
    """Of all stages together."""

    @classmethod
    def of(cls, iterator: Any, loader: DataLoader[Any]) -> Workshop:
        dataset = iterator._dataset
        is_datapipe = isinstance(dataset, (IterDataPipe, MapDataPipe))
        shard = None
        if is_datapipe:
            shard = partial(_sharding_worker_init_fn, None, iterator._world_size, iterator._rank)
        # An iterator's state is in the dataset as often as not, and a datapipe's shard is: those
        # are copied for each worker, as they are for worker processes.
        needs_copies = iterator._dataset_kind == _DatasetKind.Iterable or is_datapipe
        copies = None
        if needs_copies or loader.copy_dataset:
            copies = DatasetCopies(dataset, or_shallow=not loader.copy_dataset)
        collate_fn = loader.collate_fn
        pin_device = None
        if iterator._pin_memory and iterator._transfer is None:
            pin_device = (iterator._pin_memory_device, torch.accelerator.current_device_index())
        if collate_fn is torch.utils.data.default_collate:
            collate_fn = default_collate if pin_device is None else _pinned_collate
        return cls(
            dataset=dataset,
            copies=copies,
            batched=iterator._auto_collation,
            drop_last=loader.drop_last,
            collate_fn=collate_fn,
            shard=shard,
            worker_init_fn=loader.worker_init_fn,
            base_seed=int(iterator._base_seed),
            shared_seed=iterator._shared_seed,
            pin_device=pin_device,
            transfer=iterator._transfer,
            remedies=loader._remedies,
            progress=iterator._progress,
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
            with one_walk_at_a_time(dataset):
                self.shard(worker_id)
        if self.worker_init_fn is not None:
            seed_as_worker_process(self.base_seed, worker_id)
            of_copy(self.worker_init_fn, self.dataset, dataset)(worker_id)
        return dataset

    def _enter_at(
        self, place: Place, stage: str, worker_id: int, generators: SampleGenerators
    ) -> Any:
        """Make the calling thread a worker of a stage, whose samples draw from these generators."""
        dataset = self.enter(worker_id, CurrentGenerators(generators))
        # Neither of those draws anything.
        if type(dataset) is not TensorDataset or self.collate_fn is not default_collate:
            place.surroundings = RandomnessOfSamples(generators)
        place.surroundings = MarkedPlace(stage, place)
        return dataset

    def _generators_at(self, place: Place, stage: int) -> SampleGenerators:
        """Generators for the sample that a worker of a stage is at.

        Its thread holds on to them, so they must not hold anything of the user's.
        """
        workshop = weakref.ref(self)

        def where() -> tuple[Any, ...]:
            record, slot = place.record, place.slot
            assert record is not None, "a worker draws between two batches"
            # The index too: another sample may have taken the place of one that failed.
            return record.signal, record.number, slot, record.indices[slot] if slot >= 0 else None

        def key() -> tuple[int, ...]:
            owner = workshop()
            assert owner is not None
            assert place.record is not None
            return owner._key(place.record, place.slot, stage)

        return SampleGenerators(where, key)

    def _generators_of_count(self, count: SampleCount, worker_id: int) -> SampleGenerators:
        """The same for a worker with a dataset of its own, which counts its samples."""
        workshop = weakref.ref(self)

        def key() -> tuple[int, ...]:
            owner = workshop()
            assert owner is not None
            return owner._iterable_progress.sample_key(worker_id, count.number)

        return SampleGenerators(lambda: (count.epoch, count.number), key)

    def load_worker(self, worker_id: int, place: Place) -> tuple[Callable[[Any], Any] | None, None]:
        generators = self._generators_at(place, LOAD)
        dataset = self._enter_at(place, "load", worker_id, generators)
        load = self.hooks_of(dataset).load
        assert load is not None

        def sleep(seconds: float) -> bool:
            assert place.record is not None
            return place.record.signal.pause(seconds)

        return self.remedies.retried(load, restart_sample, sleep), None

    def hooks_of(self, dataset: Any) -> Hooks:
        # Of a whole batch one would not know which sample has failed.
        return hooks_of(dataset, batched=self.batched and not self.remedies.replaces)

    def async_load_worker(self, worker_id: int) -> tuple[Callable[[Any], Any], Any, DrawsOfSamples]:
        # Its tasks take turns in one thread, so each has generators of its own.
        dataset = self.enter(worker_id, CurrentGenerators())
        load = self.hooks_of(dataset).load
        assert load is not None
        again = self.remedies.retried_async(load, restart_sample)
        return again, self._randomness_of_task, DrawsOfSamples()

    def _randomness_of_task(self, record: Record, slot: int) -> AbstractContextManager[Any]:
        key = partial(self._key, record, slot, LOAD)
        randomness = CurrentlyOf(SampleGenerators(lambda: True, key))
        return Marked("load", randomness) if profiler_runs() else randomness

    def label(self, record: Record, slot: int, value: Any) -> Keyed:
        """What an executor is given to preprocess."""
        return Keyed(value, self._key(record, slot, PREPROCESS))

    def _key(self, record: Record, slot: int, stage: int) -> tuple[int, ...]:
        assert isinstance(self.progress, MapProgress)
        return *self.progress.sample_key(record.number, record.indices, slot), stage

    def preprocess_worker(
        self, worker_id: int, place: Place
    ) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any]]:
        generators = self._generators_at(place, PREPROCESS)
        dataset = self._enter_at(place, "preprocess", worker_id, generators)
        collate = self._collate_of(dataset)
        if not self.batched:
            collate = partial(_of_only_sample, collate)
        return self.hooks_of(dataset).preprocess, collate

    def iterable_worker(
        self, worker_id: int, place: Place
    ) -> tuple[Callable[[], Callable[[Any], Any]], Callable[[Any], Any]]:
        count = SampleCount()
        generators = self._generators_of_count(count, worker_id)
        dataset = self._enter_at(place, "iterate", worker_id, generators)
        return partial(self._open_iterable, dataset, worker_id, count), self._collate_of(dataset)

    def _open_iterable(
        self, dataset: Any, worker_id: int, count: SampleCount
    ) -> Callable[[Record], Any]:
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

        def draw(record: Record) -> Any:
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
                    record.bookmark = worker_id, reader.bookmark()
                raise
            record.bookmark = worker_id, reader.bookmark()
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
        return collate if self.pin_device is None else partial(self._pinned, collate)

    def _pinned(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        assert self.pin_device is not None
        return pin_memory(collate(samples), self.pin_device[0])


def collate_for(transfer: Transfer, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A collate function that leaves its batches where they can be sent from."""
    if collate in (default_collate, torch.utils.data.default_collate):
        return lambda samples: transfer.pin(lambda empty: default_collate(samples, empty=empty))
    return lambda samples: transfer.pin(lambda _: collate(samples))


def _pinned_collate(samples: list[Any]) -> Any:
    return default_collate(samples, empty=_empty_pinned)


def _empty_pinned(shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _of_only_sample(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])


@contextlib.contextmanager
def one_walk_at_a_time(dataset: Any) -> Iterator[None]:
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        with _datapipe_graphs:
            yield
    else:
        yield


# -- which stages a loader has --------------------------------------------------------------------


def assemble(loader: DataLoader[Any], workshop: Workshop, dataset_kind: int) -> Pipeline:
    transfer = None
    if workshop.transfer is not None:
        transfer = TransferStage(
            "transfer", workshop.transfer_worker, num_ahead=_NUM_AHEAD, in_order=loader.in_order
        )
    if dataset_kind == _DatasetKind.Iterable:
        workshop.num_workers = loader.num_workers
        stage = IterableStage(
            "iterate",
            loader.num_workers,
            workshop.iterable_worker,
            workshop.first_worker,
            transfer_stage=transfer,
        )
        return _pipeline(loader, [stage], transfer, num_in_flight=0)

    hooks = workshop.hooks_of(workshop.dataset)
    remedy = _Replacement(workshop) if workshop.remedies.replaces else None
    num_cpu_workers = loader.num_cpu_workers or loader.num_workers
    cpu_ids = range(num_cpu_workers)
    takes_executor = loader.preprocess_executor is not None and hooks.preprocess is not None
    preprocess = ThreadStage(
        "collate" if takes_executor or hooks.preprocess is None else "preprocess",
        cpu_ids,
        workshop.preprocess_worker,
        is_first=hooks.load is None,
        takes_whole_batch=hooks.preprocess_takes_batch,
        transfer_stage=transfer,
        remedy=remedy,
        is_watched=loader.timeout > 0,
    )
    stages: list[Any] = [preprocess]
    workshop.num_workers = num_cpu_workers
    if takes_executor:
        stages.insert(0, _executor_stage(loader, workshop, hooks, preprocess, remedy))
    if hooks.load is None:
        if remedy is not None:
            remedy.set_first_stage(stages[0])
        return _pipeline(loader, stages, transfer, num_in_flight=0)

    num_io_workers = loader.num_io_workers or max(_MIN_IO_WORKERS, 2 * loader.num_workers)
    next_stage = None if hooks.preprocess is None else stages[0]
    load_args: dict[str, Any] = {
        "takes_whole_batch": hooks.load_takes_batch,
        "next_stage": next_stage,
        "collate_stage": preprocess,
        "remedy": remedy,
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
        load = ThreadStage(
            "load",
            io_ids,
            workshop.load_worker,
            is_first=True,
            is_watched=loader.timeout > 0,
            **load_args,
        )
        workshop.num_workers += num_io_workers
    if remedy is not None:
        remedy.set_first_stage(load)
    num_in_flight = _num_to_keep_busy(loader, hooks, num_io_workers)
    return _pipeline(loader, [load, *stages], transfer, num_in_flight)


class _Replacement:
    """Has another sample made in the place of one that failed."""

    def __init__(self, workshop: Workshop) -> None:
        self._remedies = workshop.remedies
        self._dataset = workshop.dataset
        self._first_stage: Callable[[], SampleStage | None] = lambda: None

    def set_first_stage(self, stage: SampleStage) -> None:
        # Weakly: the stage refers to this.
        self._first_stage = weakref.ref(stage)

    def __call__(
        self, record: Record, slot: int, stage: str, error: BaseException
    ) -> BaseException | None:
        failure = self._remedies.record(record.indices[slot], self._dataset, stage, error)
        if failure is not None:
            failure.__cause__ = error
            return failure
        if slot not in record.substitutes:
            record.substitutes[slot] = substitutes(record.originals, slot, record.before)
        first_stage = self._first_stage()
        if not record.substitutes[slot] or first_stage is None:
            return error
        record.indices[slot] = record.substitutes[slot].pop(0)
        first_stage.put(record, [slot])
        return None


def _num_to_keep_busy(loader: DataLoader[Any], hooks: Hooks, num_io_workers: int) -> int:
    """How many batches in flight keep the load stage's workers busy."""
    if hooks.load_takes_batch:
        return num_io_workers
    if loader.batch_sampler is None:
        return 2 * num_io_workers
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    return ceil(2 * num_io_workers / batch_size) if isinstance(batch_size, int) else 0


def _executor_stage(
    loader: DataLoader[Any],
    workshop: Workshop,
    hooks: Hooks,
    collate_stage: ThreadStage,
    remedy: Remedy | None,
) -> ExecutorStage:
    assert loader.preprocess_executor is not None
    assert hooks.preprocess is not None
    try:
        return ExecutorStage(
            "preprocess",
            loader.preprocess_executor,
            KeyedHook(hooks.preprocess),
            is_first=hooks.load is None,
            takes_whole_batch=hooks.preprocess_takes_batch,
            collate_stage=collate_stage,
            label=workshop.label,
            remedy=remedy,
        )
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"preprocess_executor needs a dataset that can be pickled: {error}. Define its class "
            "and functions at the top level of a module, and open handles when first used."
        ) from error


def _pipeline(
    loader: DataLoader[Any],
    stages: list[Any],
    transfer: TransferStage | None,
    num_in_flight: int,
) -> Pipeline:
    """A pipeline whose window is as wide as torch's, or as the load stage needs to keep busy."""
    capacity = loader.buffer_size
    if capacity is None:
        assert loader.prefetch_factor is not None
        capacity = max(loader.prefetch_factor * loader.num_workers, num_in_flight)
    return Pipeline(
        stages[0],
        stages if transfer is None else [*stages, transfer],
        last_stage=transfer,
        capacity=capacity,
        in_order=loader.in_order,
        batched=loader._auto_collation,
        locate=partial(path_of, loader.dataset),
    )
