"""One shared dataset, or a copy for each worker."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from spdl_torch import DataLoader, StagedDataset

from .datasets import PATIENCE_SECONDS, Squares


class Identities(Squares):
    def __init__(self, size):
        super().__init__(size)
        self.barrier = threading.Barrier(2)

    def __getitem__(self, index):
        self.barrier.wait(PATIENCE_SECONDS)
        assert get_worker_info().dataset is self
        return id(self)


def test_workers_share_the_dataset():
    """All workers use the same map-style dataset object."""
    dataset = Identities(2)
    assert {batch.item() for batch in DataLoader(dataset, num_workers=2)} == {id(dataset)}


def test_copy_dataset_copies_per_worker():
    """With copy_dataset=True every worker has its own copy."""
    dataset = Identities(2)
    loader = DataLoader(dataset, num_workers=2, copy_dataset=True)
    assert len({batch.item() for batch in loader} | {id(dataset)}) == 3


class Changing(Squares):
    offset = 0

    def __getitem__(self, index):
        return index + self.offset


def test_copies_are_made_at_start():
    """Copies have the state of the dataset when the workers started."""
    dataset = Changing(8)
    loader = DataLoader(
        dataset, num_workers=1, prefetch_factor=1, copy_dataset=True, persistent_workers=True
    )
    next(iter(loader))
    dataset.offset = 100
    assert [batch.item() for batch in loader] == list(range(8))
    loader.close()
    fresh = DataLoader(dataset, num_workers=1, copy_dataset=True)
    assert [batch.item() for batch in fresh] == list(range(100, 108))


class WithHooks(StagedDataset):
    def __init__(self):
        self.touched = False

    def __len__(self):
        return 2

    def load(self, index):
        return self

    def preprocess(self, raw):
        return raw, self

    def collate(self, samples):
        return [{*sample, self} for sample in samples]


def test_hooks_use_the_copy():
    """Every hook is a method of the worker's copy."""
    dataset = WithHooks()
    for batch in DataLoader(dataset, num_workers=1, num_io_workers=1, copy_dataset=True):
        for copies in batch:
            assert dataset not in copies
            assert len(copies) == 2  # The load worker's, and the preprocess worker's.


class WithPrimitives(Squares):
    """Holds what cannot be pickled outside of starting a process, and what has no name."""

    def __init__(self, size):
        super().__init__(size)
        self.count = multiprocessing.Value("i", 0)
        self.process_lock = multiprocessing.Lock()
        self.lock = threading.Lock()
        self.event = threading.Event()
        self.local = threading.local()
        self.transform = lambda sample: sample + 1

    def __getitem__(self, index):
        with self.process_lock, self.lock, self.count.get_lock():
            self.count.value += 1
        self.event.set()
        return self.transform(index)


def test_copies_share_locks_and_functions():
    dataset = WithPrimitives(8)
    loader = DataLoader(dataset, num_workers=2, copy_dataset=True)
    assert [batch.item() for batch in loader] == list(range(1, 9))
    assert dataset.count.value == 8
    assert dataset.event.is_set()


class HoldsGenerator(IterableDataset):
    def __init__(self):
        self.generator = (n for n in range(3))

    def __iter__(self):
        return self.generator


def test_unpicklable_iterable_is_copied_shallowly():
    """An iterable dataset that cannot be pickled warns and is copied one level deep."""
    with pytest.warns(UserWarning, match="HoldsGenerator cannot be copied for each worker"):
        loader = iter(DataLoader(HoldsGenerator(), num_workers=1))
    assert [batch.item() for batch in loader] == [0, 1, 2]


def test_unpicklable_dataset_is_an_error():
    """copy_dataset=True for a dataset that cannot be pickled is an error with advice."""
    dataset = Squares(3)
    dataset.generator = (n for n in range(3))
    with pytest.raises(TypeError, match=r"Squares cannot be copied for each worker.*first used"):
        iter(DataLoader(dataset, num_workers=1, copy_dataset=True))
