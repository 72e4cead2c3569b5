"""Samples that come with their key, for who makes them without knowing which they are.

Worker processes, executors and the calling thread are given an index, or the raw form of a sample,
by code that is not ours. So the key travels with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ._generators import SampleGenerators
from ._mode import RandomnessOfSamples

__all__ = [
    "Keyed",
    "KeyedCollate",
    "KeyedDataset",
    "KeyedHook",
    "KeyedIterable",
    "randomness_of",
    "show_dataset",
]

Key = tuple[int, ...]


class Keyed(NamedTuple):
    """A value, and the key or keys of what is drawn while something is made of it."""

    value: Any
    keys: Any


class _Randomness:
    """The random numbers of a thread that is told the key of each sample."""

    def __init__(self) -> None:
        self.key: Key = ()
        self.number = 0
        generators = SampleGenerators(lambda: self.number, lambda: self.key)
        self.mode = RandomnessOfSamples(generators)


class _AtRest(threading.local):
    def __init__(self) -> None:
        self.randomness: list[_Randomness] = []
        """One, or more where a sample is made of other samples."""


_at_rest = _AtRest()


class randomness_of(contextlib.AbstractContextManager[None]):  # noqa: N801 (reads as a function)
    """Let what is drawn in the calling thread follow from this key, if there is one.

    Not made by `contextlib.contextmanager`, which sets tracebacks: an exception may refuse that.
    """

    def __init__(self, key: Key | None) -> None:
        self._key = key
        self._randomness: _Randomness | None = None

    def __enter__(self) -> None:
        if self._key is not None:
            self._randomness = _at_rest.randomness.pop() if _at_rest.randomness else _Randomness()
            self._randomness.key = self._key
            self._randomness.number += 1
            self._randomness.mode.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        if self._randomness is not None:
            self._randomness.mode.__exit__(*exc_info)
            _at_rest.randomness.append(self._randomness)


class KeyedHook:
    """A hook that is given `Keyed` inputs."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook

    def __call__(self, keyed: Keyed) -> Any:
        with randomness_of(keyed.keys):
            return self._hook(keyed.value)


class KeyedDataset(Dataset[Any]):
    """A dataset that is given `Keyed` draws, and gives `Keyed` samples for `KeyedCollate`.

    Args:
        dataset: what `get_worker_info()` is to show.
        make: from a draw to its samples.

    """

    def __init__(self, dataset: Any, make: Callable[[Keyed], Any]) -> None:
        self.dataset = dataset
        self._make = make

    def __getitem__(self, keyed: Keyed) -> Keyed:
        return Keyed(self._make(keyed), keyed.keys)

    def __getitems__(self, keyed: Keyed) -> Keyed:
        return self[keyed]


class KeyedCollate:
    """A collate function for the samples of a `KeyedDataset`.

    Args:
        collate: makes the batch.
        key: from the keys of a draw to that of its collation.

    """

    def __init__(self, collate: Callable[[Any], Any], key: Callable[[Any], Key | None]) -> None:
        self._collate = collate
        self._key = key

    def __call__(self, keyed: Keyed) -> Any:
        with randomness_of(self._key(keyed.keys)):
            return self._collate(keyed.value)


class KeyedIterable(IterableDataset[Any]):
    """An iterable dataset in a worker process; its samples are counted to tell their keys.

    Args:
        dataset: what `get_worker_info()` is to show.
        base_seed: the first number of every key.
        epoch: the second, in the first epoch.

    """

    def __init__(self, dataset: Any, base_seed: int, epoch: int) -> None:
        self.dataset = dataset
        self._base_seed = base_seed
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker_id = 0 if info is None else info.id
        epoch = self._epoch
        self._epoch += 1  # Workers that live on are asked again.
        with randomness_of((self._base_seed, epoch, worker_id, 0)):
            iterator = iter(self.dataset)
        for number in count(1):
            with randomness_of((self._base_seed, epoch, worker_id, number)):
                try:
                    sample = next(iterator)
                except StopIteration:
                    return
            yield sample


def show_dataset(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Runs first in a worker process: show the dataset itself to who asks for it."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, KeyedDataset | KeyedIterable):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # It is frozen.
    if worker_init_fn is not None:
        worker_init_fn(worker_id)
