"""Where the workers of a loader live: in child processes, in this process, and why."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, cast

from ._settings import LoaderSettings
from ._thread_safe import why_not_thread_safe

if TYPE_CHECKING:
    from ._fuse import Fusion


@dataclass(frozen=True)
class Plan:
    """Where a loader does its work. `print(loader.plan)` says it in a sentence.

    Examples:
        >>> import torch, spdl_torch
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(10))
        >>> print(spdl_torch.DataLoader(dataset, num_workers=4).plan)
        4 worker threads in 1 child process, because they can share the dataset (TensorDataset).

    """

    __module__ = "spdl_torch"

    num_workers: int
    num_processes: int
    """In how many child processes the worker threads live; 0 for this process."""
    reason: str
    advice: str = ""
    """What may be better, if anything."""
    is_fallback: bool = False
    """The workers would live in child processes if the dataset could be pickled."""
    fusions: tuple[Fusion, ...] = ()
    """What `fuse` does with each dataset that the loader's dataset consists of."""
    cache: str = ""
    """What `cache` keeps, and where."""

    def pixel_difference(self, num_samples: int = 16) -> float:
        """Return by how much `fuse` changes the pixels: the mean difference, in levels of 255.

        Some images are decoded in both ways, with the same random numbers, and compared as they are
        before the other transforms. 0.0 if decoding is not fused.
        """
        return _mean([fusion.pixel_difference(num_samples) for fusion in self.fusions])

    def __str__(self) -> str:
        lines = [self._where(), *dict.fromkeys(map(str, self.fusions)), self.cache]
        return "\n".join(filter(None, lines))

    def _where(self) -> str:
        if self.num_workers == 0:
            return "Batches are made in the calling thread, because num_workers is 0."
        threads = _count(self.num_workers, "worker thread")
        if self.num_processes == 0:
            where = f"{threads} in this process"
        elif self.num_processes == self.num_workers > 1:
            where = f"{_count(self.num_processes, 'child process')} with one worker thread each"
        else:
            where = f"{threads} in {_count(self.num_processes, 'child process')}"
        return " ".join([f"{where}, because {self.reason}.", self.advice]).rstrip()


def _count(number: int, what: str) -> str:
    plural = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def plan_of(settings: LoaderSettings) -> Plan:
    """Return where the workers of these settings live."""
    num_workers = settings.num_workers
    if num_workers == 0 or settings.uses_processes:
        return Plan(num_workers, num_workers, 'worker_method is "multiprocessing": torch\'s own')
    if settings.num_processes is not None:
        return Plan(num_workers, settings.num_processes, "num_processes says so")
    if (reason := _why_no_child(settings)) is not None:
        return Plan(num_workers, 0, reason)
    if (error := _why_not_picklable(settings)) is not None:
        return Plan(
            num_workers,
            0,
            f"the dataset cannot be pickled for child processes that are not forked: {error}",
            "There they may slow the training loop. Define its class and functions at the top "
            "level of a module, and open handles when first used.",
            is_fallback=True,
        )
    unsafe = why_not_thread_safe(settings.dataset, settings.collate_fn)
    if unsafe is None:
        kind = type(settings.dataset).__name__
        return Plan(num_workers, 1, f"they can share the dataset ({kind})")
    num_processes = settings.num_cpu_workers or num_workers
    advice = ""
    may_be_safe = getattr(settings.dataset, "thread_safe", None) is not False
    if num_processes > 1 and may_be_safe and not settings.is_iterable:
        advice = (
            "If its code is thread-safe, num_processes=1 uses less memory: threads must be able to "
            "make samples at the same time without changing what the others see."
        )
    return Plan(num_workers, num_processes, unsafe, advice)


def _why_no_child(settings: LoaderSettings) -> str | None:
    """Return why the worker threads cannot or need not live in child processes, if so."""
    if not _has_what_children_need():
        return "child processes need Linux 5.3 or later, and a Python that was built for it"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python has no GIL, so they do not slow the training loop"
    if settings.preprocess_executor is not None and not settings.is_iterable:
        return "preprocess_executor belongs to this process"
    if multiprocessing.current_process().daemon:
        return "this is a daemonic process, which may not have children"
    return None


def _has_what_children_need() -> bool:
    # A Python that was built for an old Linux lacks some, and an old Linux, or a sandbox that
    # resembles one, refuses them.
    if not (hasattr(os, "memfd_create") and hasattr(os, "eventfd")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def _why_not_picklable(settings: LoaderSettings) -> str | None:
    context = settings.multiprocessing_context or multiprocessing.get_context()
    if context.get_start_method() == "fork":
        return None
    before, nothing = get_spawning_popen(), cast(Any, _NoProcess())
    set_spawning_popen(nothing)  # Locks and queues are only pickled for a process.
    try:
        what = (settings.dataset, settings.collate_fn, settings.worker_init_fn)
        ForkingPickler(_Nowhere(), 5).dump(what)
    except Exception as error:
        return str(error)
    finally:
        set_spawning_popen(before)
    return None


class _NoProcess:
    """Stands for a process that is being started."""

    DupFd = int
    duplicate_for_child = int
