"""The arguments of a loader: checked once, then frozen for the rest of the package."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from ._bad_samples import BadSamplePolicy, policies_of
from ._dataset import Hooks, hooks_of
from ._event_loops import EventLoop


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """The arguments of a loader when an epoch begins.

    A user may change attributes of a loader between epochs, so each epoch has settings of its own.
    """

    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: Callable[[Any], Any]
    pin_memory: bool
    pin_memory_device: str
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    worker_method: str
    num_processes: int | None
    num_io_workers: int | None
    num_cpu_workers: int | None
    buffer_size: int | None
    preprocess_executor: Executor | None
    copy_dataset: bool
    fuse: Any
    """False, True or "exact"."""
    cache: Any
    """The user's `Cache`, or None."""
    seed: int | None
    snapshot_every_n_steps: int | None
    stats_interval: float | None
    device: torch.device | None
    """The device that batches are copied to; None for the CPU."""
    bad_sample_policy: BadSamplePolicy
    event_loop: EventLoop
    reported_length: int | None
    """The length of an iterable dataset, if `len(loader)` has asked for it."""
    sample_cache: Any = None
    """The cache, opened for the dataset; None without one."""

    @classmethod
    def of(cls, loader: Any) -> LoaderSettings:
        """Return the settings of a loader as it is now. This is the one place that reads them."""
        resolved = {
            "device": loader._device,
            "bad_sample_policy": loader._bad_sample_policy,
            "event_loop": loader._event_loop,
            "reported_length": loader._reported_length,
            "sample_cache": None,
        }
        names = [field.name for field in dataclasses.fields(cls) if field.name not in resolved]
        return cls(**{name: getattr(loader, name) for name in names}, **resolved)

    @property
    def is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def is_datapipe(self) -> bool:
        return isinstance(self.dataset, IterDataPipe | MapDataPipe)

    @property
    def batched(self) -> bool:
        """Whether samples are collated into batches."""
        return self.batch_sampler is not None

    @property
    def uses_batch_hooks(self) -> bool:
        """Whether hooks may take a whole batch. If one fails, the bad sample is not known."""
        return self.batched and not self.bad_sample_policy.replaces

    def hooks_of(self, dataset: Any) -> Hooks:
        """Return the hooks of the dataset, or of a worker's copy of it."""
        hooks = hooks_of(dataset, batched=self.uses_batch_hooks)
        if self.sample_cache is not None:
            hooks = self.sample_cache.hooks(dataset, hooks)
        return hooks

    @property
    def index_sampler(self) -> Any:
        return self.batch_sampler if self.batched else self.sampler

    @property
    def uses_processes(self) -> bool:
        return self.worker_method == "multiprocessing" and self.num_workers > 0

    @property
    def is_seeded(self) -> bool:
        """Whether samples draw from their own generators also without worker threads.

        Datapipes are seeded and split by torch.
        """
        return self.seed is not None and not self.is_datapipe


# -- checks ----------------------------------------------------------------------------------------

_ADVICE = {
    "timeout option": "Leave it at 0 to wait for a batch without limit.",
    "prefetch_factor option should be": "Leave it out for the default of 2.",
    "exclusive with shuffle": "Leave out shuffle: the sampler decides the order.",
    "batch_sampler option is": "Leave those out: the batch sampler decides all of them.",
    "exclusive with drop_last": "Leave out drop_last: every sample comes by itself.",
    "expected unspecified shuffle": "Shuffle in the dataset's __iter__.",
    "expected unspecified sampler": "An iterable dataset decides its order in __iter__.",
    "expected unspecified batch_sampler": (
        "Pass batch_size, or batch in the dataset's __iter__ and pass batch_size=None."
    ),
}
"""What to do about the errors of torch that only say what is wrong, by some of their words."""

_OF_MAP_STYLE = ("num_io_workers", "num_cpu_workers", "preprocess_executor")
_OF_THREADS = (*_OF_MAP_STYLE, "buffer_size", "copy_dataset")


def check_arguments(
    loader: Any, dataset: Any, num_workers: Any, prefetch_factor: Any, generator: Any
) -> None:
    """Check what torch does not check, or only when it is too late."""
    if loader.worker_method not in ("thread", "multiprocessing"):
        raise ValueError(
            f'worker_method must be "thread" or "multiprocessing", got {loader.worker_method!r}.'
        )
    if not hasattr(num_workers, "__index__"):
        raise TypeError(
            f"num_workers must be an int, got {num_workers!r}. "
            "Use num_workers=0 to load in the calling thread."
        )
    if num_workers > 0 and prefetch_factor == 0:
        raise ValueError(
            "prefetch_factor must be at least 1, got 0. Leave it out for the default of 2, "
            "or set num_workers=0 to load in the calling thread."
        )
    _check_num_processes(loader, num_workers)
    for name in ("num_io_workers", "num_cpu_workers", "buffer_size", "snapshot_every_n_steps"):
        count = getattr(loader, name)
        if not isinstance(count, int | None):
            raise TypeError(f"{name} must be an int, got {count!r}. Leave it out for the default.")
        least = 0 if name == "snapshot_every_n_steps" else 1
        if count is not None and count < least:
            raise ValueError(
                f"{name} must be at least {least}, got {count}. Leave it out for the default."
            )
    if loader.fuse not in (False, True, "exact"):
        raise ValueError(
            f'fuse must be True, False or "exact", got {loader.fuse!r}. "exact" changes no pixel.'
        )
    interval = loader.stats_interval
    if interval is not None and not (isinstance(interval, int | float) and interval > 0):
        raise ValueError(
            f"stats_interval must be a number of seconds above 0, got {interval!r}. "
            "Leave it out for no reports."
        )
    if loader.seed is not None and not hasattr(loader.seed, "__index__"):
        raise TypeError(f"seed must be an int, got {loader.seed!r}. Leave it out for none.")
    if loader.seed is not None and generator is not None:
        raise ValueError(
            "seed and generator both decide what is drawn. Leave out one of them: a seed draws "
            "the same numbers every time, a generator goes on from where it is."
        )
    if loader.preprocess_executor is not None and not hasattr(loader.preprocess_executor, "submit"):
        raise TypeError(
            "preprocess_executor must be a concurrent.futures.Executor, such as "
            f"ProcessPoolExecutor(4), got {loader.preprocess_executor!r}."
        )
    _check_combination(loader, dataset, num_workers)


def _check_num_processes(loader: Any, num_workers: int) -> None:
    num_processes = loader.num_processes
    if num_processes is None:
        return
    if not isinstance(num_processes, int):
        raise TypeError(
            f"num_processes must be an int, got {num_processes!r}. Leave it out for the default."
        )
    most = loader.num_cpu_workers or num_workers
    if not 0 <= num_processes <= most:
        raise ValueError(
            f"num_processes must be from 0 to the number of worker threads ({most}), got "
            f"{num_processes}. 0 keeps the threads in this process, 1 puts them into one child."
        )
    if num_processes > 0 and loader.preprocess_executor is not None:
        raise ValueError(
            f"preprocess_executor belongs to this process, but num_processes={num_processes} puts "
            "the workers into child processes. Leave out one of them."
        )


def _check_combination(loader: Any, dataset: Any, num_workers: int) -> None:
    """Check that each argument has an effect for this dataset and these workers."""
    given = [name for name in _OF_THREADS if getattr(loader, name)]
    if loader.num_processes is not None and num_workers > 0:
        given.append("num_processes")
    if given and num_workers == 0:
        raise ValueError(
            f"{given[0]} is for worker threads, but num_workers=0 loads in the calling thread. "
            f"Set num_workers to 1 or more, or leave out {given[0]}."
        )
    if loader.cache is not None:
        _check_cache(loader, dataset, num_workers)
    replace, retry = policies_of(loader.on_error)
    if replace is not None or retry is not None:
        given.append("on_error")
    if given and loader.worker_method == "multiprocessing" and num_workers > 0:
        raise ValueError(
            f'{given[0]} is for worker threads, but worker_method is "multiprocessing". '
            "Leave out one of them."
        )
    is_iterable = isinstance(dataset, IterableDataset)
    if is_iterable and "on_error" in given:
        raise ValueError(
            "on_error is for map-style datasets: an iterator that has raised cannot be asked "
            "for the same sample again. Catch the exception in the dataset's __iter__."
        )
    if is_iterable and (of_map_style := [name for name in given if name in _OF_MAP_STYLE]):
        raise ValueError(
            f"{of_map_style[0]} is for map-style datasets; an IterableDataset is loaded by "
            f"num_workers threads, each with its own iterator. Leave out {of_map_style[0]}."
        )
    needs_load = retry is not None or loader.num_io_workers is not None
    if not needs_load or hooks_of(dataset, batched=False).load is not None:
        return
    if retry is not None:
        raise ValueError(
            f"RetryLoad calls a dataset's load again, but {type(dataset).__name__} has none. "
            "Make it a StagedDataset without a __getitem__ of its own, or try again in there."
        )
    warnings.warn(
        f"num_io_workers={loader.num_io_workers} changes nothing: {type(dataset).__name__} has no "
        "load stage. Make it a StagedDataset without a __getitem__ of its own, or raise "
        "num_workers.",
        stacklevel=4,
    )


def _check_cache(loader: Any, dataset: Any, num_workers: int) -> None:
    if not hasattr(loader.cache, "store") or isinstance(loader.cache, type):
        raise TypeError(f'cache must be a Cache, such as Cache("8GB"), got {loader.cache!r}.')
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "cache is for map-style datasets: samples of an IterableDataset have no index to be "
            "found by. Leave out cache."
        )
    if loader.preprocess_executor is not None:
        raise ValueError(
            "preprocess_executor has processes of its own, which do not share the cache. "
            "Leave out one of them."
        )
    if loader.worker_method == "multiprocessing" and num_workers > 0:
        raise ValueError(
            'cache is for worker threads, but worker_method is "multiprocessing". '
            "Leave out one of them."
        )


def advice_on(message: str) -> str | None:
    """What to do about an error of torch's, if it does not say so itself."""
    return next((advice for words, advice in _ADVICE.items() if words in message), None)
