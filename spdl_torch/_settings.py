"""What the rest of the package sees of a loader: its arguments, checked, with defaults resolved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from ._bad_samples import BadSamplePolicy
from ._event_loops import EventLoop

__all__ = ["LoaderSettings"]


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
    num_io_workers: int | None
    num_cpu_workers: int | None
    buffer_size: int | None
    preprocess_executor: Executor | None
    copy_dataset: bool
    seed: int | None
    stats_interval: float | None
    device: torch.device | None
    """The device that batches are copied to; None for the CPU."""
    bad_sample_policy: BadSamplePolicy
    event_loop: EventLoop
    reported_length: int | None
    """The length of an iterable dataset, if `len(loader)` has asked for it."""

    @classmethod
    def of(cls, loader: Any, **resolved: Any) -> LoaderSettings:
        """Return the settings of a loader as it is now.

        Args:
            loader: has the arguments as attributes.
            resolved: the fields that are not taken from the loader as they are.

        """
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
