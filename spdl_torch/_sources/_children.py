"""Batches from worker threads in child processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch.multiprocessing  # noqa: F401 (so that a dataset's tensors can be pickled)

from .._bad_samples import substitutes
from .._device import Transfer
from .._engine import ChildStage, PendingBatch
from .._resume import IterableProgress, MapProgress, Progress
from .._segments import Held, Parcel, Register, SegmentLimit, SegmentReader
from .._settings import LoaderSettings
from .._worker import WorkerSetup
from ._child_program import Answer, ChildProgram, MapDescription, progress_for_child
from ._engine_source import EngineSource
from ._stages import make_pipeline, transfer_stage
from ._torch_workers import TorchEpoch

_MAX_KEPT_SEGMENTS: Final = 256
"""How many delivered batches may stay in the memory that they were made in. Each has a file
descriptor, of which a process often may have no more than 1,024."""


def _max_kept_bytes() -> int:
    """Return how large those batches may be together."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


class ChildrenSource(EngineSource):
    """Batches from the same stages in child processes, through memory that both sides share.

    The parent draws the indices, counts what was delivered, and transfers batches to the device.
    """

    def __init__(self, settings: LoaderSettings, num_children: int) -> None:
        super().__init__(settings)
        self._num_children = num_children

    def _set_up(self, settings: LoaderSettings, progress: Progress, epoch: TorchEpoch) -> None:
        self._worker_setup = WorkerSetup(
            settings,
            progress,
            self._transfer,
            dataset=epoch.dataset,
            shard=epoch.shard,
            pin_device=epoch.pin_device,
            is_alone=True,
        )
        transfer = None
        if self._transfer is not None:
            set_up: Any = partial(_Sender, self._worker_setup, self._transfer)
            transfer = transfer_stage(settings, set_up)
        elif epoch.pin_device is not None:
            # The loop's own copies read the memory at a time that only torch's allocator knows. So
            # it must be torch's.
            transfer = transfer_stage(settings, partial(_pinning_worker, self._worker_setup))
        else:
            self.receive = _unpacked
        host = _Host(settings, self._worker_setup, self._num_children)
        program = ChildProgram(
            settings,
            epoch.dataset,
            epoch.shard,
            progress.seed_of_workers,
            self._num_children,
        )
        is_iterable = settings.is_iterable
        self._stage = ChildStage(
            self._num_children,
            settings.multiprocessing_context or multiprocessing.get_context(),
            program,
            host,
            num_workers=settings.num_workers,
            # A dataset that is not known to be thread-safe may have a state, such as an RNG of its
            # own. Then it matters which worker makes which batch.
            by_turn=self._num_children == (settings.num_cpu_workers or settings.num_workers),
            in_order=settings.in_order,
            first_worker=host.first_worker if is_iterable else None,
            transfer_stage=transfer,
            on_death=host.replace if settings.bad_sample_policy.replaces else None,
        )
        self._pipeline = make_pipeline(settings, [self._stage], transfer)
        has_copies = is_iterable or settings.is_datapipe or settings.copy_dataset
        has_several = self._num_children < (settings.num_cpu_workers or settings.num_workers)
        self._shares_dataset = has_several and not has_copies
        self._host = host

    def _look_again(self) -> None:
        self._warn_of(self._host.findings)

    def begin(self, settings: LoaderSettings, progress: Progress) -> None:
        super().begin(settings, progress)
        self.clock.num_processes = self._num_children

    def close(self, *, quickly: bool = False) -> None:
        super().close(quickly=quickly)
        if self._transfer is not None:
            self._transfer.release_copied()

    def _start(self) -> None:
        try:
            super()._start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if self._stage.context.get_start_method() != "fork":
                error.add_note(
                    "spdl_torch: child processes that are not forked get the dataset, collate_fn "
                    "and worker_init_fn pickled. Define their classes and functions at the top "
                    "level of a module, or set num_processes=0."
                )
            raise

    @property
    def threads(self) -> list[Any]:
        return self._stage.group.processes


class _Sender:
    """Sends batches to the device from the segments that they were collated in.

    Made in the transfer thread, which calls it.
    """

    def __init__(self, worker_setup: WorkerSetup, transfer: Transfer) -> None:
        self._send = worker_setup.transfer_worker()
        self._register: Register | None = transfer.register

    def __call__(self, arrived: _Arrived) -> Any:
        held = arrived.hold(self._register)
        sent = self._send(held.unpack(), held)
        if held.is_registered and held.is_viewed():
            # A part of the batch stays on the CPU, as NumPy arrays do. The loop may copy it with
            # `non_blocking=True`, drop it, and so free the segment while the copy still reads it.
            # Of memory that is not pinned, such a copy has read all when it returns.
            self._register = None
            sent = self._send(held.copy(), held)
        return sent


def _pinning_worker(worker_setup: WorkerSetup) -> Callable[[Any], Any]:
    pin = worker_setup.transfer_worker()
    return lambda arrived: pin(_unpacked(arrived))


def _unpacked(arrived: _Arrived) -> Any:
    return arrived.hold().unpack()


class _Arrived:
    """A batch in a segment. If it is not delivered, the segment is free again."""

    __slots__ = ("__weakref__", "_finalizer", "_parcel", "_reader")

    def __init__(self, reader: SegmentReader, parcel: Parcel) -> None:
        self._reader = reader
        self._parcel = parcel
        self._finalizer = weakref.finalize(self, reader.discard, parcel)
        self._finalizer.atexit = False

    def hold(self, register: Register | None = None) -> Held:
        self._finalizer.detach()
        return self._reader.hold(self._parcel, register)


class _Host:
    """The parent's half of what children do, in terms of the dataset and the progress."""

    def __init__(
        self, settings: LoaderSettings, worker_setup: WorkerSetup, num_children: int
    ) -> None:
        self._settings = settings
        self._setup = worker_setup
        self._limit = SegmentLimit(_max_kept_bytes(), _MAX_KEPT_SEGMENTS)
        self._readers = [SegmentReader(self._limit) for _ in range(num_children)]
        self._received: dict[int, Any] = {}
        """Where the workers of an iterable dataset are, as far as their batches have arrived."""
        self.findings: list[str] = []
        """What was found in a child's dataset after its first batch, and threads must not share."""

    @property
    def _progress(self) -> Progress:
        assert self._setup.progress is not None
        return self._setup.progress

    def first_worker(self) -> int:
        assert isinstance(self._progress, IterableProgress)
        return self._progress.next_worker

    def describe_epoch(self, *, is_restart: bool) -> Any:
        if not is_restart:
            self._received.clear()
        return progress_for_child(self._progress, self._received, is_restart=is_restart)

    def describe(self, batch: PendingBatch, worker: int | None) -> Any:
        if worker is not None:
            return worker, batch.drawn
        assert isinstance(self._progress, MapProgress)
        is_replaced = batch.indices != batch.original_indices
        earlier = batch.earlier_indices if self._settings.bad_sample_policy.replaces else []
        places = self._progress.places(batch.number, len(batch.indices))
        return MapDescription(batch.drawn, batch.indices if is_replaced else None, earlier, places)

    def accept(
        self, child: int, batch: PendingBatch | None, answer: Answer | None, descriptors: list[int]
    ) -> Any:
        if answer is None:
            return None
        reader, parcel = self._readers[child], answer.parcel
        if parcel is not None and descriptors:
            assert parcel.segment is not None
            reader.map(parcel.segment, parcel.capacity, descriptors[0])
        if batch is None:
            if parcel is not None:
                reader.discard(parcel)
            return None
        self.findings += answer.findings
        arrived = None if parcel is None else _Arrived(reader, parcel)
        for worker, bookmark in answer.ends:
            assert isinstance(self._progress, IterableProgress)
            self._progress.come_to_end(worker, bookmark)
        if answer.bookmark is not None:
            batch.position = answer.bookmark
            worker, bookmark = answer.bookmark
            self._received[worker] = bookmark
        if self._settings.sample_cache is not None:
            self._settings.sample_cache.counter.add(*answer.cache_counts)
        policy = self._settings.bad_sample_policy
        failure = policy.add_from_child(answer.bad_samples, answer.num_retries)
        if failure is not None:
            raise failure
        return arrived

    def take_freed(self, child: int) -> list[int]:
        return self._readers[child].take_freed()

    def forget(self, child: int) -> None:
        self._readers[child] = SegmentReader(self._limit)

    def replace(self, batch: PendingBatch, slot: int, error: Exception) -> BaseException | None:
        """Put another index in the place of one whose sample has killed a child twice."""
        policy, dataset = self._settings.bad_sample_policy, self._setup.dataset
        failure = policy.record(batch.indices[slot], dataset, "preprocess", error)
        if failure is not None:
            failure.__cause__ = error
            return failure
        if slot not in batch.substitutes:
            others = substitutes(batch.original_indices, slot, batch.earlier_indices)
            batch.substitutes[slot] = others
        if not batch.substitutes[slot]:
            return error
        batch.indices[slot] = batch.substitutes[slot].pop(0)
        return None
