"""One shared dataset, or a copy for each worker."""

from __future__ import annotations

import multiprocessing
import random
import sys
import threading
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
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


# -- what is large --------------------------------------------------------------------------------

NUM_LONG = 20_000  # Items of a long container.
NUM_BYTES = 2**26  # Of a large array.


class Holder(IterableDataset):
    """Has any attributes, and one sample for each worker."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __iter__(self):
        yield get_worker_info().id


def copies_of(dataset, num_workers=2):
    """Return the workers' copies of a dataset."""
    copies = []

    def keep(_worker_id):
        copies.append(get_worker_info().dataset)

    list(DataLoader(dataset, num_workers=num_workers, worker_init_fn=keep))
    assert len({id(one) for one in [dataset, *copies]}) == num_workers + 1
    return copies


def memory_map(path, mode="r"):
    path.touch()
    with path.open("r+b") as file:
        file.truncate(NUM_BYTES)
    return np.memmap(path, dtype=np.uint16, mode=mode)


def test_copies_share_memory_maps(tmp_path):
    """A memory map, and an array that is a view of one, are shared by all copies."""
    tokens = memory_map(tmp_path / "tokens.bin")
    dataset = Holder(tokens=tokens, part=np.asarray(tokens)[5:])
    for one in copies_of(dataset):
        assert np.shares_memory(one.tokens, tokens)
        assert np.shares_memory(one.part, tokens)


def test_array_from_map_is_copied(tmp_path):
    """An array in memory that has the type of a memory map is not shared."""
    array = memory_map(tmp_path / "tokens.bin")[:10].copy()
    assert isinstance(array, np.memmap)
    for one in copies_of(Holder(array=array)):
        assert not np.shares_memory(one.array, array)


def test_copies_share_shared_memory():
    """Tensors and arrays in memory that processes share are shared by all copies."""
    tensor = torch.zeros(3).share_memory_()
    counts = np.frombuffer(multiprocessing.RawArray("i", 3), dtype="i")
    for one in copies_of(Holder(tensor=tensor, view=tensor.numpy(), counts=counts)):
        assert one.tensor.data_ptr() == tensor.data_ptr()
        assert np.shares_memory(one.view, tensor.numpy())
        assert np.shares_memory(one.counts, counts)


class WithSharedEpoch(IterableDataset):
    def __init__(self):
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        self.epoch[0] = epoch

    def __iter__(self):
        yield self.epoch.item()


def test_persistent_workers_hear_set_epoch():
    """An epoch in a tensor in shared memory reaches workers that are running."""
    dataset = WithSharedEpoch()
    epochs = []
    with DataLoader(dataset, num_workers=2, persistent_workers=True) as loader:
        for epoch in range(3):
            dataset.set_epoch(epoch)
            epochs += [batch.item() for batch in loader]
    assert epochs == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("num_bytes", [16, NUM_BYTES])
def test_written_memory_is_private(num_bytes):
    """What a copy writes to an array or tensor is in no other copy and not in the dataset."""
    dataset = Holder(array=np.zeros(num_bytes, np.uint8), tensor=torch.zeros(num_bytes // 4))
    first, second = copies_of(dataset)
    first.array[::2] = 1
    first.tensor[::2] = 1
    assert first.array.any()
    assert first.tensor.any()
    for other in (second, dataset):
        assert not other.array.any()
        assert not other.tensor.any()


def test_copies_of_copies_are_private():
    """What is written to a copy of a copy is not in that copy."""
    outer, _ = copies_of(Holder(array=np.zeros(NUM_BYTES, np.uint8)))
    inner, other = copies_of(outer)
    inner.array[:] = 1
    assert not outer.array.any()
    assert not other.array.any()


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="copy on write needs memfd_create")
def test_read_memory_is_not_copied():
    """Copies that read large arrays and tensors have no memory of their own."""
    dataset = Holder(array=np.ones(NUM_BYTES, np.uint8), tensor=torch.ones(NUM_BYTES // 4))
    before = anonymous_bytes()
    copies = copies_of(dataset, num_workers=4)
    assert all(one.array.min() == one.tensor.min() == 1 for one in copies)
    assert anonymous_bytes() - before < NUM_BYTES / 2


def test_dataset_changes_between_epochs():
    """The workers of the next epoch see what was written to a large array."""
    dataset = Holder(array=np.zeros(NUM_BYTES, np.uint8))
    assert not any(one.array.any() for one in copies_of(dataset))
    dataset.array[-1] = 1
    assert all(one.array[-1] == 1 for one in copies_of(dataset))


def test_copies_share_read_only_arrays():
    """An array that cannot be written to is shared, and cannot be written to in a copy."""
    array = np.zeros(NUM_BYTES, np.uint8)
    array.flags.writeable = False
    for one in copies_of(Holder(array=array)):
        assert np.shares_memory(one.array, array)
        assert not one.array.flags.writeable


def test_aliases_stay_aliases():
    """Two names of one array or list, and two views of one tensor, are so in the copy."""
    array, names, tensor = np.zeros(NUM_LONG), ["a"] * NUM_LONG, torch.zeros(NUM_LONG)
    dataset = Holder(array=array, names=names, rows=[tensor[:10], tensor[5:]])
    dataset.inner = Holder(array=array, names=names)
    for one in copies_of(dataset):
        assert one.inner.array is one.array
        assert one.inner.names is one.names
        one.rows[0][5] = 1
        assert one.rows[1][0] == 1
    assert not tensor.any()


Record = namedtuple("Record", "path label")


@pytest.mark.parametrize(
    "items",
    [
        [{"path": str(n), "label": n} for n in range(NUM_LONG)],
        [Record(str(n), [n]) for n in range(NUM_LONG)],
        {n: [n] for n in range(NUM_LONG)},
    ],
    ids=["dicts", "records", "dict"],
)
def test_copies_share_items(items):
    """A long container of plain data is copied, but its items are not."""
    for one in copies_of(Holder(items=items)):
        assert one.items is not items
        assert one.items == items
        assert one.items[NUM_LONG - 1] is items[NUM_LONG - 1]


class Shuffled(IterableDataset):
    """Shuffles its list in place, and iterates over it while the other worker does the same."""

    def __init__(self):
        self.indices = list(range(NUM_LONG))
        self.barrier = threading.Barrier(2)

    def __iter__(self):
        random.Random(get_worker_info().id).shuffle(self.indices)
        self.barrier.wait(PATIENCE_SECONDS)
        yield from self.indices


def test_long_lists_are_shuffled_apart():
    """A worker that shuffles a long list in place does not change that of another."""
    dataset = Shuffled()
    loader = DataLoader(dataset, batch_size=NUM_LONG, num_workers=2)
    for worker_id, batch in enumerate(loader):
        expected = list(range(NUM_LONG))
        random.Random(worker_id).shuffle(expected)
        assert batch.tolist() == expected
    assert dataset.indices == list(range(NUM_LONG))


def test_list_is_copied_at_iter():
    """A long list is copied as it is when the epoch begins."""
    dataset = Holder(indices=list(range(NUM_LONG)))
    copies = []
    loader = DataLoader(
        dataset,
        num_workers=2,
        worker_init_fn=lambda _: copies.append(get_worker_info().dataset.indices),
    )
    iterator = iter(loader)
    dataset.indices.clear()
    list(iterator)
    assert copies == [list(range(NUM_LONG))] * 2


class Reader:
    position = 0


@pytest.mark.parametrize("wrap", [lambda reader: reader, lambda reader: ("name", reader)])
def test_objects_in_long_lists_are_copied(wrap):
    """Objects that may have a position are copied, in a list of any length."""
    readers = [wrap(Reader()) for _ in range(NUM_LONG)]
    for one in copies_of(Holder(readers=readers)):
        assert one.readers[-1] is not readers[-1]
