"""`DataLoader`: torch's arguments and ours; every method delegates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler

from ._bad_samples import BadSample, BadSamplePolicy, ReplaceBadSamples, RetryLoad
from ._cache import Cache, SampleCache, with_cache
from ._dataset import collate_of
from ._device import device_of
from ._engine import warn_caller
from ._epochs import Epochs
from ._event_loops import EventLoop
from ._iterator import EpochIterator, LiveIterators
from ._machine import num_cores
from ._plan import Plan, plan_of
from ._profiling import Profile, make_profile
from ._resume import set_sampler_epoch
from ._settings import LoaderSettings, advice_on, check_arguments
from ._stats import LoaderStats, stats_of

if TYPE_CHECKING:
    from ._fuse import Fusion

Policy: TypeAlias = ReplaceBadSamples | RetryLoad
SampleT_co = TypeVar("SampleT_co", covariant=True)


class DataLoader(
    torch.utils.data.DataLoader[SampleT_co], AbstractContextManager["DataLoader[Any]"]
):
    """torch's `DataLoader` with its workers as staged threads in child processes.

    Takes every argument of `torch.utils.data.DataLoader`, with the same meaning and default. Some
    mean more for worker threads:

    - `num_workers`: how many threads preprocess and collate, in all processes together. Those that
      load come on top.
    - `worker_init_fn`: runs in each thread. It does not seed the samples, which have generators of
      their own. With `num_processes=0`, the generators of the process are restored.
    - `persistent_workers`: keeps the child processes, and their datasets, between epochs.
      Otherwise each epoch starts new ones, at its first batch, with the dataset as it is then.
    - `multiprocessing_context`: how child processes start. If they are not forked, the dataset,
      `collate_fn` and `worker_init_fn` are pickled.
    - `timeout`: the error names the samples in flight, and where in the dataset's code they are.

    Args beyond torch's, all by keyword:
        worker_method: ``"thread"``, or ``"multiprocessing"`` for torch's own worker processes.
        num_processes: in how many child processes the worker threads live; 0 for this process,
            where they slow a training step that runs Python. The threads of a process share its
            dataset. Default: one, if the dataset is known to be thread-safe, for example by its
            attribute ``thread_safe = True``; otherwise one for each worker, as in torch; 0 where
            child processes are of no use. `plan` says what was chosen, and why.
        num_io_workers: how many samples the load stage works on at a time, if the dataset has one
            (`StagedDataset`). Default: twice `num_workers`, at least 8.
        num_cpu_workers: how many threads preprocess and collate. Default: `num_workers`.
        buffer_size: how many batches may be in flight. Default: ``prefetch_factor * num_workers``
            as in torch, or more if the load stage needs it to keep its workers busy.
        preprocess_executor: a `concurrent.futures.Executor` that preprocesses the samples, for
            code that holds the GIL. It stays yours: the loader does not shut it down. The worker
            threads are then in this process.
        copy_dataset: where threads share a process, make a copy of a map-style dataset for each of
            them, by pickling. A worker that is alone in its process needs none. Iterable datasets
            are always copied.
        fuse: crop, resize and flip images of a torchvision dataset while they are decoded, convert
            and normalise them once per batch. Pixels differ by less than half a level on average.
            ``"exact"`` does only the latter, with the same bits. `plan` says what is fused.
        cache: a `Cache` for what is the same in every epoch, such as decoded images. Random
            transforms still run in each epoch. For map-style datasets.
        seed: fixes the order and what every sample draws through torch or `sample_rng`, whatever
            the number and kind of workers; in child processes, also what it draws from `random`
            and `numpy.random`. Each epoch draws other numbers; `set_epoch` chooses one.
            Default: torch's generator decides, as in torch.
        on_error: what to do about a sample that cannot be made: ``"raise"`` its exception, or
            `ReplaceBadSamples`, `RetryLoad`, or one of each in a list. For map-style datasets.
        device: batches arrive on this device, copied in the background; ``"cuda"`` is the current
            device of the thread that makes the loader. Nothing is copied for ``"cpu"``.
        snapshot_every_n_steps: after how many batches each worker takes the state of an iterable
            dataset that has one. `state_dict` is exact after every batch: samples after it are read
            again. Raise it if that state is large; 0 or None takes it once, at the first batch.
        stats_interval: log a line about the running epoch every so many seconds, to the logger
            ``"spdl_torch"`` at level INFO. Default: never.

    Examples:
        >>> import torch, spdl_torch
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(10))
        >>> loader = spdl_torch.DataLoader(dataset, batch_size=4, num_workers=2)
        >>> for (batch,) in loader:
        ...     print(batch.tolist())
        [0, 1, 2, 3]
        [4, 5, 6, 7]
        [8, 9]

    """

    __module__ = "spdl_torch"

    # A subclass that was written for torch's class may not call this __init__, as torchdata's
    # StatefulDataLoader does not. Then it has workers of its own or torch's.
    worker_method: Literal["thread", "multiprocessing"] = "multiprocessing"

    def __init__(
        self,
        dataset: Dataset[SampleT_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        worker_method: Literal["thread", "multiprocessing"] = "thread",
        num_processes: int | None = None,
        num_io_workers: int | None = None,
        num_cpu_workers: int | None = None,
        buffer_size: int | None = None,
        preprocess_executor: Executor | None = None,
        copy_dataset: bool = False,
        fuse: bool | Literal["exact"] = False,
        cache: Cache | None = None,
        seed: int | None = None,
        on_error: Literal["raise"] | Policy | Sequence[Policy] = "raise",
        device: torch.device | str | None = None,
        snapshot_every_n_steps: int | None = 1,
        stats_interval: float | None = None,
    ) -> None:
        self.worker_method = worker_method
        self.num_processes = num_processes
        self.num_io_workers = num_io_workers
        self.num_cpu_workers = num_cpu_workers
        self.buffer_size = buffer_size
        self.preprocess_executor = preprocess_executor
        self.copy_dataset = copy_dataset
        self.fuse = fuse
        self.cache = cache
        self.seed = seed
        self.on_error = on_error
        self.device = device
        meant = torch.device("cpu") if device is None else device_of(device)
        self._device = None if meant.type == "cpu" else meant
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.stats_interval = stats_interval
        self._event_loop = EventLoop()
        self._live = LiveIterators()
        self._epochs = Epochs(worker_method)
        self._reported_length: int | None = None
        self._sample_cache: SampleCache | None = None  # That of the last epoch.
        # The iterator with the persistent workers.
        self._iterator: EpochIterator | None = None  # type: ignore[assignment]
        check_arguments(self, dataset, num_workers, prefetch_factor, generator)
        self._bad_sample_policy = BadSamplePolicy(on_error, dataset)
        if collate_fn is None and (batch_size is not None or batch_sampler is not None):
            collate_fn = collate_of(dataset)
        try:
            super().__init__(
                dataset,
                batch_size=batch_size,
                shuffle=shuffle,
                sampler=sampler,
                batch_sampler=batch_sampler,
                num_workers=num_workers,
                collate_fn=collate_fn,
                pin_memory=pin_memory,
                drop_last=drop_last,
                timeout=timeout,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context,
                generator=generator,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
                in_order=in_order,
            )
        except ValueError as error:
            if type(error) is not ValueError or (advice := advice_on(str(error))) is None:
                raise
            raise ValueError(f"{str(error).rstrip('. ')}. {advice}") from None

    def __iter__(self) -> EpochIterator:  # type: ignore[override]
        self._live.check_open()
        iterator = self._iterator
        # A persistent one may be closed, or belong to the process that this one was forked from.
        if iterator is not None and iterator.is_usable:
            iterator.begin(_settings_again(self), self._epochs, workers_persist=True)
        else:
            settings = _settings_of(self)
            self._sample_cache = settings.sample_cache
            if settings.uses_processes:
                self.check_worker_number_rationality()
            iterator = EpochIterator(settings, self._epochs)
            self._live.add(iterator)
            keeps_workers = self.persistent_workers and self.num_workers > 0
            self._iterator = iterator if keeps_workers else None
        self._live.check_open()
        return iterator

    def __len__(self) -> int:
        if isinstance(self.dataset, IterableDataset):
            # As in torch: every batch beyond the dataset's own length is a warning.
            self._reported_length = len(self.dataset)  # type: ignore[arg-type]
        return super().__len__()

    def state_dict(self) -> dict[str, Any]:
        """Return how far the last iterator has come, to resume from a checkpoint.

        It is exact after every batch: what was prefetched does not count. At the end of an epoch,
        and before the first one, it is the state of the epoch to come.
        """
        if self.worker_method == "multiprocessing" and self.num_workers > 0 and not self.in_order:
            raise RuntimeError(
                "worker processes do not say which batch they deliver with in_order=False. "
                'Use worker_method="thread" or in_order=True to save the state.'
            )
        state = self._epochs.state_dict(
            partial(LoaderSettings.of, self), workers_persist=self._iterator is not None
        )
        if self._bad_sample_policy.replaces:
            state["bad_samples"] = self._bad_sample_policy.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iterator resume where the state was saved. An empty dict changes nothing.

        The number of workers and the batch size may differ from the saved ones; with
        `DistributedRandomSampler`, the number of ranks too.
        """
        if state_dict == {}:
            return
        self._epochs.load_state_dict(LoaderSettings.of(self), state_dict)
        self._bad_sample_policy.restore(state_dict.get("bad_samples", []))
        # Persistent workers have their datasets where the last epoch left them.
        self._iterator = None

    @property
    def plan(self) -> Plan:
        """Where the workers live and what is fused, and why. `print(loader.plan)` says it."""
        return _plan_of(self)

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples that `ReplaceBadSamples` has replaced, each once."""
        return self._bad_sample_policy.bad_samples

    @property
    def num_retries(self) -> int:
        """How many times `RetryLoad` has called `load` again."""
        return self._bad_sample_policy.num_retries

    def stats(self) -> LoaderStats:
        """Return what was measured in the running epoch, or in the last one. Thread-safe."""
        stats = stats_of(self._epochs.clock, self._bad_sample_policy, self._sample_cache)
        return _with_can_fuse(stats, LoaderSettings.of(self))

    def profile(
        self,
        num_batches: int = 50,
        *,
        step: Callable[[Any], Any] | None = None,
        sweep: bool = True,
    ) -> Profile:
        """Run some batches, and each stage by itself, and return where the time goes.

        A copy of this loader does it, so this one, its sampler and the process-wide generators do
        not change. (A `step` is really done, twice for each batch: a model is trained.) It takes a
        few seconds more than the batches.

        Args:
            num_batches: how many batches, at most an epoch's.
            step: what the training loop does with a batch. With it, the profile tells the
                bottleneck of the loop, and its speed if loading took no time.
            sweep: measure each stage by itself with 1, 2, 4, … workers, if they are threads.

        """
        return make_profile(self, DataLoader, num_batches, step, sweep=sweep)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the sampler, if it has epochs, and of what a `seed` determines."""
        if hasattr(self, "_epochs"):
            self._epochs.set_epoch(LoaderSettings.of(self), epoch)
        else:  # A subclass that has not called our __init__. Frameworks call what they find.
            set_sampler_epoch(self._index_sampler, epoch)

    def check_worker_number_rationality(self) -> None:
        """Warn about more workers than the cores can use."""
        if self.worker_method == "multiprocessing":
            super().check_worker_number_rationality()
            return
        # Threads that wait for I/O are cheap, so there may be far more of them than cores.
        cores = num_cores()
        most = max(64, 16 * cores)
        if self.num_workers > most:
            warn_caller(
                f"This DataLoader will create {self.num_workers} worker threads on {cores} "
                "cores. Please be aware that excessive worker creation might get DataLoader "
                "running slow or even freeze. Lower the worker number: "
                f"up to {most} are of use for samples that wait for I/O, one per core for others."
            )

    def close(self) -> None:
        """End all workers, threads or processes, for good. Iterating raises from now on."""
        self._live.close()
        self._iterator = None

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if not hasattr(self, "_epochs"):  # A subclass that has not called our __init__.
            return self.__dict__
        # Threads cannot be copied; the copy starts its own.
        epochs = self._epochs.copied(LoaderSettings.of(self))
        return self.__dict__ | {
            "_iterator": None,
            "_sample_cache": None,
            "_live": LiveIterators(),
            "_epochs": epochs,
        }


def _settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    """Return the settings of an epoch, with the dataset that it uses and its cache."""
    settings = LoaderSettings.of(loader)
    return with_cache(_fused(settings), settings.dataset)


def _settings_again(loader: DataLoader[Any]) -> LoaderSettings:
    """Return the settings of a further epoch with the same workers, which have their cache."""
    settings, used = _settings_of(loader), loader._sample_cache
    if used is not None and settings.sample_cache is not None:
        settings = replace(settings, sample_cache=used.go_on_with(settings.sample_cache))
    return settings


def _plan_of(loader: DataLoader[Any]) -> Plan:
    settings = _settings_of(loader)
    cache = str(settings.sample_cache or "")
    return replace(plan_of(settings), fusions=_fusions(LoaderSettings.of(loader)), cache=cache)


# -- fuse: imported when it is needed, because it imports FFmpeg and torchvision -------------------


def _fused(settings: LoaderSettings) -> LoaderSettings:
    if not settings.fuse:
        return settings
    from ._fuse import fused  # noqa: PLC0415

    return fused(settings)


def _fusions(settings: LoaderSettings) -> tuple[Fusion, ...]:
    if not settings.fuse:
        return ()
    from ._fuse import fusions_of  # noqa: PLC0415

    return fusions_of(settings)


def _with_can_fuse(stats: LoaderStats, settings: LoaderSettings) -> LoaderStats:
    """Note in the statistics of a CPU-bound loader whether `fuse=True` would do something."""
    # Without this module it is no dataset of torchvision.
    is_folder = "torchvision.datasets" in sys.modules and stats.verdict.kind == "cpu-bound"
    if settings.fuse or not is_folder:
        return stats
    fusions = _fusions(replace(settings, fuse=True))
    return replace(stats, can_fuse=any(each.head or each.tail for each in fusions))
