"""Batches from worker threads in this process: from the settings to the stages of the engine."""

from __future__ import annotations

import pickle
import textwrap
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext
from functools import partial
from math import ceil, inf
from typing import Any, Final

from .._bad_samples import path_of, substitutes
from .._dataset import Hooks, hooks_of
from .._device import Transfer
from .._engine import (
    AsyncStage,
    ExecutorStage,
    InFlight,
    IterableStage,
    NotInTime,
    NotSetUp,
    PendingBatch,
    Pipeline,
    Stage,
    ThreadStage,
    TransferStage,
)
from .._random import preserve_global_rng, use_rng
from .._resume import IterableProgress, Progress
from .._samples import call_with_key
from .._settings import LoaderSettings
from .._worker import WorkerSetup, datapipe_graph_lock, inherit_modes
from ._source import BatchSource, Delivery
from ._torch_workers import TorchEpoch

_MIN_IO_WORKERS: Final = 8
"""The least number of I/O workers. They wait most of the time, so more are needed than cores."""

_NUM_AHEAD: Final = 2
"""The number of batches on the device that the loop has not asked for: one to compute with next,
and one that is being copied. More would only take memory from the model."""

_INIT_SECONDS: Final = 0.5
"""How long a worker's `worker_init_fn` keeps the next worker waiting. They run one after the other,
because the generators that they may seed are shared; but one may wait for the others."""

_MAX_LISTED: Final = 20
"""The number of samples in flight that a timeout error lists."""
_NUM_STACKS: Final = 3
"""The number of those that are listed with their stack."""


class ThreadSource(BatchSource):
    """Batches from the engine's stages, with worker threads in this process.

    The threads end when the iterator is collected. So neither this object nor a frame that is
    entered to get a batch may refer to the iterator.
    """

    def __init__(self, settings: LoaderSettings) -> None:
        self._transfer = None if settings.device is None else Transfer(settings.device)
        if self._transfer is not None:
            self.receive = self._transfer.receive
        self._epoch: TorchEpoch | None = None

    def begin(self, settings: LoaderSettings, progress: Progress) -> None:
        with datapipe_graph_lock(settings):
            if self._epoch is None:
                self._epoch = self._set_up(settings, progress)
            # Also for new workers: torch draws the seed of datapipes again when it starts them.
            self._epoch.begin(settings, progress)
        self._worker_setup.progress = progress
        self._window = self._pipeline.begin(iter(progress))
        self.clock = self._pipeline.clock

    def _set_up(self, settings: LoaderSettings, progress: Progress) -> TorchEpoch:
        epoch = TorchEpoch(settings, progress)
        self._timeout_seconds = settings.timeout or None
        # Before the dataset is copied for the workers.
        progress.restore_dataset(epoch.dataset)
        self._worker_setup = WorkerSetup(
            settings,
            progress,
            self._transfer,
            dataset=epoch.dataset,
            shard=epoch.shard,
            pin_device=epoch.pin_device,
        )
        if isinstance(progress, IterableProgress):
            progress.num_to_read_again()  # With a warning, if there are any.
        self._pipeline = _make_pipeline(settings, self._worker_setup)
        return epoch

    def close_with(self, holder: Any) -> None:
        self._pipeline.lifetime.close_with(holder)

    @property
    def threads(self) -> list[threading.Thread]:
        return self._pipeline.threads

    @property
    def is_usable(self) -> bool:
        return self._pipeline.is_usable

    def next(self) -> Delivery:
        pipeline = self._pipeline
        if not pipeline.is_started and pipeline.is_usable:
            try:
                self._start()
            except NotSetUp as late:
                raise RuntimeError(
                    f"DataLoader timed out after {self._timeout_seconds} seconds: the set-up of "
                    f"{len(late.lines)} worker(s) has not ended, and the iterator is closed. Raise "
                    "timeout, or look for what blocks in worker_init_fn or while the dataset is "
                    f"unpickled.{_describe_late(late.lines)}"
                ) from None
        try:
            batch = self._window.next(self._timeout_seconds)
        except NotInTime:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout_seconds} seconds: no worker finished "
                "the next batch. Raise timeout, or look for what blocks in the "
                f"dataset.{_describe(pipeline.in_flight(), self._worker_setup.dataset)}"
            ) from None
        if batch is None:
            raise StopIteration
        return batch

    def _start(self) -> None:
        has_init = self._worker_setup.settings.worker_init_fn is not None
        rng = preserve_global_rng() if has_init else nullcontext()
        # In a worker of another loader, the sample's RNG is not for the workers of this one.
        with inherit_modes() as self._worker_setup.modes, use_rng(None), rng:
            seconds_apart = _INIT_SECONDS if has_init else 0.0
            self._pipeline.start(seconds_apart, self._timeout_seconds or inf)

    def close(self, *, quickly: bool = False) -> None:
        lifetime = self._pipeline.lifetime
        (lifetime.close_quickly if quickly else lifetime.close)()


def _describe(in_flight: list[InFlight], dataset: Any) -> str:
    """Return what the workers are doing, in words."""
    lines = []
    for number, item in enumerate(in_flight[:_MAX_LISTED]):
        if item.slot is None:
            what = f"batch {item.batch.number}"
        else:
            what = f"sample index {item.index!r} (batch {item.batch.number})"
            if (path := path_of(dataset, item.index)) is not None:
                what = f"{what}, {path},"
        lines.append(f"  {what} in the {item.stage} stage for {item.seconds:.1f} s")
        if number < _NUM_STACKS:
            lines += [f"    {line}" for text in item.lines for line in text.splitlines()]
    if len(in_flight) > _MAX_LISTED:
        lines.append(f"  … {len(in_flight)} in all")
    return "\nIn flight, the oldest first:\n" + "\n".join(lines) if lines else ""


def _describe_late(lines_of: dict[str, list[str]]) -> str:
    """Return where the workers are that are not set up, in words."""
    text = "\nNot set up:\n"
    for number, (name, lines) in enumerate(list(lines_of.items())[:_MAX_LISTED]):
        text += f"  {name}\n"
        if number < _NUM_STACKS:
            text += textwrap.indent("".join(lines), "    ")
    return text.rstrip()


# -- which stages a loader has --------------------------------------------------------------------


def _make_pipeline(settings: LoaderSettings, worker_setup: WorkerSetup) -> Pipeline:
    """Return the stages, and a window as wide as torch's or as the load stage needs it."""
    transfer = None
    if worker_setup.transfer is not None:
        transfer = TransferStage(
            "transfer",
            worker_setup.transfer_worker,
            num_ahead=_NUM_AHEAD,
            in_order=settings.in_order,
        )
    num_to_keep_busy = 0
    stages: list[Any]
    if settings.is_iterable:
        set_up, first_worker = worker_setup.iterable_worker, worker_setup.first_worker
        stages = [
            IterableStage(
                "iterate", settings.num_workers, set_up, first_worker, transfer_stage=transfer
            )
        ]
    else:
        stages, num_to_keep_busy = _map_stages(settings, worker_setup, transfer)
    capacity = settings.buffer_size
    if capacity is None:
        assert settings.prefetch_factor is not None
        capacity = max(settings.prefetch_factor * settings.num_workers, num_to_keep_busy)
    return Pipeline(
        stages[0],
        stages if transfer is None else [*stages, transfer],
        last_stage=transfer,
        capacity=capacity,
        in_order=settings.in_order,
        batched=settings.batched,
        locate=partial(path_of, settings.dataset),
    )


def _map_stages(
    settings: LoaderSettings, worker_setup: WorkerSetup, transfer: TransferStage | None
) -> tuple[list[Any], int]:
    """Return the stages that a dataset has hooks for, and how many batches keep them busy."""
    hooks = hooks_of(worker_setup.dataset, batched=settings.uses_batch_hooks)
    replacement = _Replacement(worker_setup) if settings.bad_sample_policy.replaces else None
    num_cpu_workers = worker_setup.num_workers = settings.num_cpu_workers or settings.num_workers
    executor = None if hooks.preprocess is None else settings.preprocess_executor
    only_collates = executor is not None or hooks.preprocess is None
    last = ThreadStage(
        "collate" if only_collates else "preprocess",
        range(num_cpu_workers),
        worker_setup.preprocess_worker,
        is_first=hooks.load is None,
        only_collates=only_collates,
        takes_whole_batch=hooks.preprocess_takes_batch,
        transfer_stage=transfer,
        on_sample_error=replacement,
        is_watched=settings.timeout > 0,
    )
    stages: list[Any] = [last]
    if executor is not None:
        args = {"label": worker_setup.label, "on_sample_error": replacement}
        stages.insert(0, _executor_stage(executor, hooks, collate_stage=last, **args))
    num_to_keep_busy = 0
    if hooks.load is not None:
        num_io_workers = settings.num_io_workers or max(_MIN_IO_WORKERS, 2 * settings.num_workers)
        load_args: dict[str, Any] = {
            "takes_whole_batch": hooks.load_takes_batch,
            "next_stage": None if hooks.preprocess is None else stages[0],
            "collate_stage": last,
            "on_sample_error": replacement,
        }
        if hooks.load_is_async:
            load: Any = AsyncStage(
                "load",
                num_cpu_workers,
                num_io_workers,
                worker_setup.async_load_worker,
                settings.event_loop,
                **load_args,
            )
        else:
            load = ThreadStage(
                "load",
                range(num_cpu_workers, num_cpu_workers + num_io_workers),
                worker_setup.load_worker,
                is_first=True,
                is_watched=settings.timeout > 0,
                **load_args,
            )
        worker_setup.num_workers += 1 if hooks.load_is_async else num_io_workers
        stages.insert(0, load)
        # Two tasks for each worker, or one if a task is a whole batch.
        num_to_keep_busy = num_io_workers
        if not hooks.load_takes_batch:
            sampler = settings.batch_sampler
            size: Any = 1 if sampler is None else getattr(sampler, "batch_size", None)
            num_to_keep_busy = ceil(2 * num_io_workers / size) if isinstance(size, int) else 0
    if replacement is not None:
        replacement.first_stage = weakref.ref(stages[0])
    return stages, num_to_keep_busy


class _Replacement:
    """Has another sample made in the place of one that failed."""

    first_stage: Callable[[], Stage | None]
    """A weak reference, because the stage refers to this."""

    def __init__(self, worker_setup: WorkerSetup) -> None:
        self._bad_sample_policy = worker_setup.settings.bad_sample_policy
        self._dataset = worker_setup.dataset

    def __call__(
        self, batch: PendingBatch, slot: int, stage: str, error: BaseException
    ) -> BaseException | None:
        failure = self._bad_sample_policy.record(batch.indices[slot], self._dataset, stage, error)
        if failure is not None:
            failure.__cause__ = error
            return failure
        if slot not in batch.substitutes:
            batch.substitutes[slot] = substitutes(
                batch.original_indices, slot, batch.earlier_indices
            )
        first_stage = self.first_stage()
        if not batch.substitutes[slot] or first_stage is None:
            return error
        batch.indices[slot] = batch.substitutes[slot].pop(0)
        first_stage.put(batch, [slot])
        return None


def _executor_stage(executor: Executor, hooks: Hooks, **stage_args: Any) -> ExecutorStage:
    assert hooks.preprocess is not None
    try:
        return ExecutorStage(
            "preprocess",
            executor,
            partial(call_with_key, hooks.preprocess),
            is_first=hooks.load is None,
            takes_whole_batch=hooks.preprocess_takes_batch,
            **stage_args,
        )
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"preprocess_executor needs a dataset that can be pickled: {error}. Define its class "
            "and functions at the top level of a module, and open handles when first used."
        ) from error
