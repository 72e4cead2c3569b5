"""`DataLoader` in the `Trainer` of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset

from .accelerate import put_beneath, skip_first_batches, suppress_worker_warning

__all__ = ["SpdlTrainerMixin"]


class SpdlTrainerMixin:
    """Makes a `Trainer` train, evaluate and predict with `spdl_torch.DataLoader`.

    Inherit from it before the trainer::

        class MyTrainer(SpdlTrainerMixin, Trainer):
            loader_arguments = {"num_io_workers": 32}

    `TrainingArguments` keep their meaning, such as ``dataloader_num_workers``.

    Args:
        args: positional arguments of the trainer.
        loader_arguments: further arguments of `DataLoader`. Default: those of the class.
        kwargs: keyword arguments of the trainer.
    """

    loader_arguments: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, *args: Any, loader_arguments: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if loader_arguments is not None:
            self.loader_arguments = loader_arguments
        super().__init__(*args, **kwargs)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Create a loader. The trainer creates all its loaders here."""
        with suppress_worker_warning():
            prepared = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        put_beneath(prepared, prepared.base_dataloader, **self.loader_arguments)
        return prepared

    def _run_epoch(self, **arguments: Any) -> Any:
        num_done = arguments["steps_trained_in_current_epoch"]
        resumes = (
            arguments["resume_from_checkpoint"] is not None
            and arguments["epoch"] == arguments["epochs_trained"]
        )
        if resumes and num_done > 0:  # It is 0 with args.ignore_data_skip.
            rest = skip_first_batches(arguments["train_dataloader"], num_done)
            rest.set_epoch(arguments["epoch"])
            arguments["train_dataloader"] = torch.utils.data.DataLoader(
                _Epoch(rest, num_done), batch_size=None, collate_fn=lambda batch: batch
            )
        return super()._run_epoch(**arguments)  # type: ignore[misc]


class _Epoch(IterableDataset[Any]):
    """The batches of an epoch, with None for those that were trained on before.

    To skip the first batches, the trainer lets accelerate turn any loader into one of torch's. So
    it gets a loader of torch's that yields the batches of ours.
    """

    def __init__(self, rest: Any, num_done: int) -> None:
        self._rest = rest
        self._num_done = num_done

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num_done):
            yield None
        yield from self._rest
