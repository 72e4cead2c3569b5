"""`DataLoader` with Hugging Face Accelerate.

Accelerate turns any loader into a loader of torch's. `prepare` lets it do so, and then replaces the
loader inside by ours. Accelerate's shards, device placement and gradient state stay the same.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from itertools import compress
from typing import Any, Final

import accelerate.data_loader
from accelerate import Accelerator, PartialState
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
)
from torch.utils.data import IterableDataset

from .._dataloader import DataLoader
from .._resume import sampler_layers

__all__ = ["prepare", "put_beneath", "skip_first_batches"]

_SET_BY_ACCELERATE: Final = frozenset(
    {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
)
"""The arguments that determine the samples of a batch. Accelerate has changed them."""


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Do what ``accelerator.prepare(*objects)`` does, but keep `spdl_torch.DataLoader` objects.

    ``accelerator.save_state()`` saves the loaders' states, and ``accelerator.load_state()``
    restores them, exact to the batch.

    Example::

        accelerator = Accelerator()
        model, loader = prepare(accelerator, model, DataLoader(dataset, num_workers=8))

    Args:
        accelerator: the `accelerate.Accelerator`.
        objects: one or more loaders, and other objects that it can prepare.

    Returns:
        The prepared objects in the same order, or the object itself if there is only one.
    """
    # A loader that is prepared already reports our class as its own, too.
    is_ours = [isinstance(x, DataLoader) and not isinstance(x, DataLoaderAdapter) for x in objects]
    for loader in compress(objects, is_ours):
        _check(accelerator, loader)
    with suppress_worker_warning():
        results = accelerator.prepare(*objects)
    pairs = zip(objects, results if len(objects) > 1 else (results,), strict=True)
    for loader, prepared in compress(pairs, is_ours):
        put_beneath(prepared, loader)
        accelerator.register_for_checkpointing(prepared)
    return results


def put_beneath(prepared: Any, like: Any, **arguments: Any) -> None:
    """Replace the loader inside a prepared loader by a `spdl_torch.DataLoader`.

    `prepare` calls this. Call it directly if other code has prepared the loader.

    Args:
        prepared: a loader that Accelerate has prepared. It is changed in place.
        like: a loader, torch's or ours, from which the new one takes its arguments. The samples of
            each batch are those of `prepared`.
        arguments: arguments of `DataLoader` that override those of `like`.
    """
    if type(prepared) not in _PREPARED:
        raise ValueError(
            f"a {type(prepared).__name__} cannot have a spdl_torch.DataLoader inside. "
            "Prepare the loader with accelerator.prepare() to use torch's loader instead."
        )
    theirs = prepared.base_dataloader
    shard = theirs.batch_sampler
    if isinstance(shard, BatchSamplerShard) and shard.num_processes > 1:
        _check_not_distributed(shard.batch_sampler)
    arguments = _arguments_of(like) | _batching_of(theirs) | arguments
    _replace_base(prepared, DataLoader(theirs.dataset, **arguments))


def skip_first_batches(prepared: Any, num_batches: int = 0) -> Any:
    """Do what ``accelerator.skip_first_batches()`` does, but keep `spdl_torch.DataLoader` inside.

    Skipped samples are not read, unless the dataset is an `IterableDataset`. The result is for one
    epoch. Use `prepared` for the epochs after it.

    Args:
        prepared: a loader that `prepare` has returned.
        num_batches: number of batches to skip.
    """
    with suppress_worker_warning():
        rest = accelerate.data_loader.skip_first_batches(prepared, num_batches)
    if not isinstance(prepared, _Prepared):
        return rest
    ours = prepared.base_dataloader
    if _is_iterable(ours):  # It reads the first batches and drops them.
        put_beneath(rest, ours)
        return rest
    loader = _RestOfEpoch(ours.dataset, **_arguments_of(ours) | _batching_of(ours))
    loader.num_skipped = num_batches
    if isinstance(prepared, _Dispatcher) and not prepared.split_batches:
        loader.num_skipped *= PartialState().num_processes
    _replace_base(rest, loader)
    return rest


@contextlib.contextmanager
def suppress_worker_warning() -> Iterator[None]:
    """Suppress torch's warning about many workers for a loader that will not be used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def _arguments_of(loader: Any) -> dict[str, Any]:
    return {
        name: getattr(loader, name)
        for name in inspect.signature(DataLoader.__init__).parameters
        if name not in _SET_BY_ACCELERATE and hasattr(loader, name)
    }


def _batching_of(loader: Any) -> dict[str, Any]:
    if _is_iterable(loader):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return {"batch_sampler": loader.batch_sampler}


def _replace_base(prepared: Any, loader: DataLoader[Any]) -> None:
    prepared.base_dataloader = loader
    # All processes would write its state to the same file at the same time.
    prepared.use_stateful_dataloader = False
    # Accelerate's loaders report the class of the loader inside as their __class__, so a plain
    # assignment does not work.
    object.__dict__["__class__"].__set__(prepared, _PREPARED[type(prepared)])


class _RestOfEpoch(DataLoader[Any]):
    """Skips the first batches, as if it had been restored from a state."""

    num_skipped = 0

    def __iter__(self) -> Any:
        # Not earlier: accelerate sets the epoch, and synchronises the RNGs of all processes, just
        # before this.
        state = self.state_dict()
        batch_size = getattr(self.batch_sampler, "batch_size", 1)
        num_units = batch_size if state["unit"] == "sample" else 1
        state["done"] = [[0, self.num_skipped * num_units]]
        self.load_state_dict(state)
        return super().__iter__()

    def __len__(self) -> int:
        return max(0, super().__len__() - self.num_skipped)


class _Prepared(DataLoaderAdapter):  # type: ignore[misc]
    """Overrides for a loader of Accelerate's that has one of ours inside."""

    base_dataloader: DataLoader[Any]
    iteration: int
    end_of_dataloader: bool

    _state: dict[str, Any] | None = None
    """State of the loader inside after the batch that the training loop has received. Accelerate
    prefetches one batch more, to know which one is the last."""
    _iteration_of_state = 0
    _has_begun = False

    def _update_state_dict(self) -> None:
        self._has_begun = True
        self._iteration_of_state = self.iteration + self.end_of_dataloader
        # A state at the end of an epoch has the loader's own generator. So it is taken only when it
        # is saved: the user may seed the RNGs before the next epoch.
        self._state = None if self.end_of_dataloader else self.base_dataloader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        if state is None:
            # Before the first epoch the RNGs of the processes are not synchronised yet.
            state = self.base_dataloader.state_dict() if self._has_begun else {}
        elif self._num_processes > 1 and not self.base_dataloader.in_order:
            raise RuntimeError(
                "with in_order=False each process has received other batches early, and "
                "accelerate saves one state for all. Save at the end of an epoch, or use "
                "in_order=True."
            )
        return {
            "iteration": self._iteration_of_state,
            "num_processes": self._num_processes,
            "loader": state,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not {"iteration", "num_processes", "loader"} <= state_dict.keys():
            raise ValueError(
                "state_dict was not made by a loader of spdl_torch.integrations.accelerate. "
                "Prepare the loaders in the same order as when the state was saved."
            )
        if state_dict["num_processes"] != self._num_processes:
            raise ValueError(
                f"the state was saved by {state_dict['num_processes']} processes, but now there "
                f"are {self._num_processes}. Resume with the same number: accelerate distributes "
                "whole batches, and does not know which samples are left for another number."
            )
        self.set_epoch(state_dict["iteration"])
        self.base_dataloader.load_state_dict(state_dict["loader"])
        self._state = state_dict["loader"] or None

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        # What a loader with seed= draws depends on the epoch.
        self.base_dataloader.set_epoch(epoch)
        self._iteration_of_state = epoch

    @property
    def _num_processes(self) -> int:
        return int(PartialState().num_processes)


class _Shard(_Prepared, DataLoaderShard):  # type: ignore[misc]
    """Each process loads its own batches."""


class _Dispatcher(_Prepared, DataLoaderDispatcher):  # type: ignore[misc]
    """The first process loads all batches and sends the other processes their parts."""

    def _update_state_dict(self) -> None:
        # Called for each of the batches that are concatenated; _fetch_batches takes the state once.
        if self.end_of_dataloader:
            super()._update_state_dict()

    def _fetch_batches(self, iterator: Iterator[Any]) -> Any:
        state = None
        if self.state.process_index == 0:
            state = self.base_dataloader.state_dict()
        batches = super()._fetch_batches(iterator)
        self._has_begun, self._state, self._iteration_of_state = True, state, self.iteration
        return batches


_PREPARED: Final = {DataLoaderShard: _Shard, DataLoaderDispatcher: _Dispatcher}


# -- loaders that cannot be prepared --------------------------------------------------------------


def _check(accelerator: Accelerator, loader: DataLoader[Any]) -> None:
    if _is_iterable(loader):
        return
    if loader.batch_sampler is None:
        raise ValueError(
            "accelerate distributes batches, but this DataLoader has batch_size=None, and "
            "accelerate would ignore its sampler. Set batch_size, or pass a batch_sampler."
        )
    if accelerator.num_processes > 1:
        _check_not_distributed(loader.batch_sampler)


def _check_not_distributed(sampler: Any) -> None:
    for layer in sampler_layers(sampler):
        num_parts: int = getattr(layer, "num_replicas", getattr(layer, "num_processes", 1))
        if num_parts > 1:
            raise ValueError(
                f"the {type(layer).__name__} of this DataLoader gives each of {num_parts} "
                "processes its part of the samples, and accelerate would divide that part again: "
                "most samples would never be used. Use shuffle=True, or another sampler that "
                "yields all indices on all processes, and let accelerate divide them. Or do not "
                "prepare the loader, and pass device=accelerator.device to it."
            )


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)
