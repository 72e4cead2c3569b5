"""Batches from worker threads in this process."""

from __future__ import annotations

from .._random import preserve_global_rng
from .._resume import Progress
from .._settings import LoaderSettings
from .._unsafe_to_share import unsafe_to_share
from .._worker import WorkerSetup
from ._engine_source import EngineSource
from ._stages import make_pipeline, transfer_stage, worker_stages
from ._torch_workers import TorchEpoch


class ThreadSource(EngineSource):
    """Batches from stages whose workers are threads in this process."""

    def _set_up(self, settings: LoaderSettings, progress: Progress, epoch: TorchEpoch) -> None:
        self._worker_setup = WorkerSetup(
            settings,
            progress,
            self._transfer,
            dataset=epoch.dataset,
            shard=epoch.shard,
            pin_device=epoch.pin_device,
        )
        transfer = None
        if self._transfer is not None:
            transfer = transfer_stage(settings, self._worker_setup.transfer_worker)
        stages = worker_stages(settings, self._worker_setup, transfer)
        self._pipeline = make_pipeline(settings, stages, transfer)
        has_copies = settings.is_iterable or settings.is_datapipe or settings.copy_dataset
        self._shares_dataset = settings.num_workers > 1 and not has_copies

    def _look_again(self) -> None:
        self._shares_dataset = False
        self._warn_of(unsafe_to_share(self._worker_setup.dataset))

    def _start(self) -> None:
        if self._worker_setup.settings.worker_init_fn is None:
            super()._start()
        else:  # It may seed the generators of the training loop.
            with preserve_global_rng():
                super()._start()
