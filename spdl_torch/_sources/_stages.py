"""From the settings of a loader to the stages of the engine."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from math import ceil
from typing import Any, Final

from .._bad_samples import path_of, substitutes
from .._dataset import Hooks, hooks_of
from .._engine import (
    AsyncStage,
    ExecutorStage,
    IterableStage,
    PendingBatch,
    Pipeline,
    Stage,
    ThreadStage,
    TransferStage,
    WorkerCursor,
)
from .._samples import call_with_key
from .._settings import LoaderSettings
from .._worker import WorkerSetup

_MIN_IO_WORKERS: Final = 8
"""The least number of I/O workers. They wait most of the time, so more are needed than cores."""

_NUM_AHEAD: Final = 2
"""The number of batches on the device that the loop has not asked for: one to compute with next,
and one that is being copied. More would only take memory from the model."""


MakeCursor = Callable[[int], WorkerCursor]


def make_pipeline(
    settings: LoaderSettings, stages: Sequence[Stage], transfer: TransferStage | None
) -> Pipeline:
    """Return the pipeline of these stages, with a window as wide as torch's or as they need it."""
    capacity = settings.buffer_size
    if capacity is None:
        assert settings.prefetch_factor is not None
        num_to_keep_busy = _num_batches_to_keep_busy(settings)
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


def transfer_stage(settings: LoaderSettings, set_up: Callable[[], Any]) -> TransferStage:
    return TransferStage("transfer", set_up, num_ahead=_NUM_AHEAD, in_order=settings.in_order)


def worker_ids(settings: LoaderSettings, hooks: Hooks | None) -> tuple[range, range]:
    """Return the numbers of the workers that preprocess, or iterate, and of those that load."""
    num_cpu_workers = settings.num_cpu_workers or settings.num_workers
    num_io_workers = 0
    if hooks is not None and hooks.load is not None:
        num_io_workers = 1 if hooks.load_is_async else _num_io_workers(settings)
    return range(num_cpu_workers), range(num_cpu_workers, num_cpu_workers + num_io_workers)


def worker_stages(
    settings: LoaderSettings,
    worker_setup: WorkerSetup,
    transfer: TransferStage | None = None,
    *,
    child: int = 0,
    num_children: int = 1,
    make_cursor: MakeCursor | None = None,
) -> list[Any]:
    """Return the stages that the dataset needs, first to last.

    With several children these are the stages of one of them: worker w lives in child w mod their
    number.
    """
    share = slice(child, None, num_children)
    if settings.is_iterable:
        set_up, first_worker = worker_setup.iterable_worker, worker_setup.first_worker
        ids = range(settings.num_workers)[share]
        return [IterableStage("iterate", ids, set_up, first_worker, transfer_stage=transfer)]
    hooks = hooks_of(worker_setup.dataset, batched=settings.uses_batch_hooks)
    replacement = _Replacement(worker_setup) if settings.bad_sample_policy.replaces else None
    cpu_workers, io_workers = worker_ids(settings, hooks)
    worker_setup.num_workers = io_workers.stop
    executor = None if hooks.preprocess is None else settings.preprocess_executor
    only_collates = executor is not None or hooks.preprocess is None
    options: dict[str, Any] = {
        "on_sample_error": replacement,
        "is_watched": settings.timeout > 0,
        "make_cursor": make_cursor,
    }
    last = ThreadStage(
        "collate" if only_collates else "preprocess",
        cpu_workers[share],
        worker_setup.preprocess_worker,
        is_first=hooks.load is None,
        only_collates=only_collates,
        takes_whole_batch=hooks.preprocess_takes_batch,
        transfer_stage=transfer,
        **options,
    )
    stages: list[Any] = [last]
    if executor is not None:
        args = {"label": worker_setup.label, "on_sample_error": replacement}
        stages.insert(0, _executor_stage(executor, hooks, collate_stage=last, **args))
    if hooks.load is not None:
        next_stage = None if hooks.preprocess is None else stages[0]
        places: dict[str, Any] = {"next_stage": next_stage, "collate_stage": last}
        if hooks.load_is_async:
            num_io_workers = len(range(_num_io_workers(settings))[share]) or 1
            load: Any = AsyncStage(
                "load",
                io_workers[0],
                num_io_workers,
                worker_setup.async_load_worker,
                settings.event_loop,
                takes_whole_batch=hooks.load_takes_batch,
                on_sample_error=replacement,
                **places,
            )
        else:
            load = ThreadStage(
                "load",
                io_workers[share] or io_workers[:1],
                worker_setup.load_worker,
                is_first=True,
                takes_whole_batch=hooks.load_takes_batch,
                **places,
                **options,
            )
        stages.insert(0, load)
    if replacement is not None:
        replacement.first_stage = weakref.ref(stages[0])
    return stages


def _num_io_workers(settings: LoaderSettings) -> int:
    return settings.num_io_workers or max(_MIN_IO_WORKERS, 2 * settings.num_workers)


def _num_batches_to_keep_busy(settings: LoaderSettings) -> int:
    """Return how many batches keep the load workers busy, if there are any."""
    if settings.is_iterable:
        return 0
    hooks = hooks_of(settings.dataset, batched=settings.uses_batch_hooks)
    if hooks.load is None:
        return 0
    # Two tasks for each worker, or one if a task is a whole batch.
    if hooks.load_takes_batch:
        return _num_io_workers(settings)
    sampler = settings.batch_sampler
    size: Any = 1 if sampler is None else getattr(sampler, "batch_size", None)
    return ceil(2 * _num_io_workers(settings) / size) if isinstance(size, int) else 0


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
