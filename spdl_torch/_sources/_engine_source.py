"""What sources with an engine have in common: begin, wait for the next batch, close."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from math import inf
from typing import Any, Final

from .._bad_samples import path_of
from .._device import Transfer
from .._engine import InFlight, NotInTime, NotSetUp, Pipeline, warn_caller
from .._random import use_rng
from .._resume import IterableProgress, Progress
from .._settings import LoaderSettings
from .._unsafe_to_share import shared_threads_warning, unsafe_to_share
from .._worker import WorkerSetup, datapipe_graph_lock, inherit_modes
from ._source import BatchSource, Delivery
from ._torch_workers import TorchEpoch

_INIT_SECONDS: Final = 0.5
"""How long a worker's `worker_init_fn` keeps the next worker waiting. They run one after the other,
because the generators that they may seed are shared; but one may wait for the others."""

_MAX_LISTED: Final = 20
"""The number of samples in flight that a timeout error lists."""
_NUM_STACKS: Final = 3
"""The number of those that are listed with their stack."""


class EngineSource(BatchSource):
    """Batches from stages of the engine, whose workers end when the iterator is collected.

    So neither this object nor a frame that is entered to get a batch may refer to the iterator.
    """

    _pipeline: Pipeline
    _worker_setup: WorkerSetup
    _shares_dataset = False
    """Several threads have the same dataset, and nothing was found that they must not share."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._transfer = None if settings.device is None else Transfer(settings.device)
        if self._transfer is not None:
            self.receive = self._transfer.receive
        self._timeout_seconds = settings.timeout or None
        self._epoch: TorchEpoch | None = None

    def begin(self, settings: LoaderSettings, progress: Progress) -> None:
        with datapipe_graph_lock(settings):
            if self._epoch is None:
                self._epoch = TorchEpoch(settings, progress)
                # Before the dataset is copied for the workers.
                progress.restore_dataset(self._epoch.dataset)
                if isinstance(progress, IterableProgress):
                    progress.num_to_read_again()  # With a warning, if there are any.
                self._set_up(settings, progress, self._epoch)
                if self._shares_dataset:
                    self._warn_of(unsafe_to_share(self._epoch.dataset))
            # Also for new workers: torch draws the seed of datapipes again when it starts them.
            self._epoch.begin(settings, progress)
        self._worker_setup.progress = progress
        self._window = self._pipeline.begin(iter(progress))
        self.clock = self._pipeline.clock

    def _set_up(self, settings: LoaderSettings, progress: Progress, epoch: TorchEpoch) -> None:
        """Make the set-up of the workers and the pipeline."""
        raise NotImplementedError

    def _look_again(self) -> None:
        """Look at the dataset after a batch: handles are often opened by the first samples."""

    def _warn_of(self, findings: list[str]) -> None:
        """Warn once about what is in the dataset and is wrong if threads share it."""
        if findings:
            self._shares_dataset = False
            num_workers = self._worker_setup.settings.num_workers
            warn_caller(shared_threads_warning(findings, num_workers))

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
        if self._shares_dataset:
            self._look_again()
        return batch

    def _start(self) -> None:
        start_workers(self._worker_setup, self._pipeline.start)

    def close(self, *, quickly: bool = False) -> None:
        lifetime = self._pipeline.lifetime
        (lifetime.close_quickly if quickly else lifetime.close)()


def start_workers(worker_setup: WorkerSetup, start: Callable[[float, float], None]) -> None:
    """Start workers in the modes of the calling thread, one after the other if they may seed."""
    settings = worker_setup.settings
    # In a worker of another loader, the sample's RNG is not for the workers of this one.
    with inherit_modes() as worker_setup.modes, use_rng(None):
        seconds_apart = 0.0 if settings.worker_init_fn is None else _INIT_SECONDS
        start(seconds_apart, settings.timeout or inf)


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
