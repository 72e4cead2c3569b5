"""Samplers of users on resume: replayed and compared, asked for a state, replaced, wrapped."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler
from torch.utils.data import WeightedRandomSampler as Weighted

from spdl_torch import DataLoader

from .datasets import PATIENCE_SECONDS, Indices
from .resuming import Remembers, RemembersInItsIterator, Torchdatas

SIZE = 40


class Shuffled(Sampler):
    """Shuffles all indices in its own way."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.order: list[int] | None = None
        self.position = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self):
        order = list(range(SIZE))
        if self.how == "random":
            random.shuffle(order)
        elif self.how == "numpy":
            np.random.shuffle(order)
        elif self.how == "torch":
            order = torch.randperm(SIZE).tolist()
        elif self.how == "seeded":
            random.Random(3).shuffle(order)
        return iter(order)


class ShuffledBatches(Shuffled):
    def __iter__(self):
        indices = super().__iter__()
        while batch := list(islice(indices, 4)):
            yield batch


class ShuffledWithState(Shuffled):
    """Keeps its order in its state."""

    def __iter__(self):
        if self.order is None:
            self.order, self.position = list(super().__iter__()), 0
        while self.position < SIZE:
            self.position += 1
            yield self.order[self.position - 1]
        self.order = None

    def state_dict(self):
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state):
        self.order, self.position = state["order"], state["position"]


def reseed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def values(batches):
    return [value for batch in batches for value in batch.tolist()]


@given(
    how=st.sampled_from(["random", "numpy", "torch", "seeded"]),
    cls=st.sampled_from([Shuffled, ShuffledBatches, ShuffledWithState]),
    workers=st.sampled_from([0, 1, 3]),
    in_order=st.booleans(),
    stops=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=4, max_size=4),
)
@example("torch", Shuffled, 0, False, [1, 3, 4], [1, 6, 7, 1])  # The third run ends the epoch.
@example("torch", Shuffled, 0, False, [1, 3, 3], [1, 6, 7, 1])  # The fourth run finds nothing left.
@settings(max_examples=60, deadline=None)
def test_no_silent_loss_or_repetition(how, cls, workers, in_order, stops, sizes):
    """A resumed epoch delivers each sample once, or the error says that it cannot."""
    delivered, state, refused = [], {}, ""
    for number, size in enumerate(sizes[: len(stops) + 1]):
        reseed(number)
        name = "batch_sampler" if cls is ShuffledBatches else "sampler"
        options = {name: cls(how)} | ({} if cls is ShuffledBatches else {"batch_size": size})
        loader = DataLoader(range(SIZE), num_workers=workers, in_order=in_order, **options)
        with loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            stop = stops[number] if number < len(stops) else SIZE + 1
            try:
                batches = list(islice(iterator, stop))
            except RuntimeError as error:
                refused = str(error)
                break
            delivered += values(batches)
            if len(batches) < stop:
                break  # The epoch has ended, so the state would be that of the next.
            state = loader.state_dict()
    may_be_refused = how in ("random", "numpy") and cls is not ShuffledWithState
    is_complete = sorted(delivered) == list(range(SIZE))
    assert is_complete or (may_be_refused and "does not draw the same indices" in refused)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_unrepeatable_sampler_is_refused(kind, workers):
    """A sampler that draws other indices on resume is an error that says what to do."""
    cls = Shuffled if kind == "sampler" else ShuffledBatches
    loaders = [
        DataLoader(range(SIZE), num_workers=workers, **{kind: cls("numpy")}) for _ in range(2)
    ]
    np.random.seed(0)
    next(islice(loaders[0], 5, None))
    loaders[1].load_state_dict(loaders[0].state_dict())
    with pytest.raises(RuntimeError, match=r"numpy.*set_epoch.*state_dict"):
        next(iter(loaders[1]))


@dataclass
class Key:
    number: int


class ShuffledKeys(Sampler):
    """Draws one object for every four numbers, in an order that differs unless there is a seed."""

    def __init__(self, make, seed=None) -> None:
        self.make = make
        self.seed = seed

    def __len__(self) -> int:
        return SIZE // 4

    def __iter__(self):
        order = np.random.default_rng(self.seed).permutation(SIZE).tolist()
        for first in range(0, SIZE, 4):
            yield self.make(order[first : first + 4])


class SameList(ShuffledKeys):
    """Draws a list that it changes for the next draw."""

    def __iter__(self):
        drawn = []
        for index in super().__iter__():
            drawn[:] = index
            yield drawn


KEYS = {
    "dataclass": lambda numbers: Key(numbers[0]),
    "dict": lambda numbers: {"number": numbers[0]},
    "path": lambda numbers: Path(f"{numbers[0]}.png"),
    "range": lambda numbers: range(numbers[0], numbers[0] + 1),
    "set": set,
    "slice": lambda numbers: slice(numbers[0], None),
    "iterator": iter,
    "list": list,
}


class Same(Dataset):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("cls", "kind"), [*((ShuffledKeys, kind) for kind in KEYS), (SameList, "list")]
)
@pytest.mark.parametrize("seed", [None, 3])
def test_indices_of_any_type_are_compared(cls, kind, seed):
    """Indices that are not numbers are compared on resume too, by their repr."""
    loaders = [DataLoader(Same(), sampler=cls(KEYS[kind], seed), batch_size=None) for _ in range(2)]
    iterator = iter(loaders[0])
    for _ in range(4):
        next(iterator)
    loaders[1].load_state_dict(loaders[0].state_dict())
    if seed is None:
        with pytest.raises(RuntimeError, match="does not draw the same indices"):
            next(iter(loaders[1]))
    else:
        assert list(loaders[1]) == list(iterator)


def test_changed_torch_weights_are_refused():
    """Weights of torch's sampler that have changed draw other indices."""
    loader, other = (
        DataLoader(range(SIZE), sampler=Weighted(weights, SIZE, replacement=False))
        for weights in (torch.arange(1.0, SIZE + 1), torch.arange(SIZE, 0.0, -1))
    )
    next(islice(loader, 5, None))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="weights"):
        next(iter(other))


class HeldEach(Indices):
    """Each index waits until it is let go."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.may_go = [threading.Event() for _ in range(size)]

    def __getitem__(self, index: int) -> int:
        assert self.may_go[index].wait(PATIENCE_SECONDS), "it was not let go"
        return super().__getitem__(index)


def test_batches_before_first_missing_are_dropped():
    """What a sampler drew ahead begins with the first missing place, also after overtaking."""
    dataset = HeldEach(SIZE)
    options = {"batch_size": None, "in_order": False, "num_workers": 3}
    with DataLoader(dataset, sampler=ShuffledWithState("in sequence"), **options) as loader:
        iterator = iter(loader)
        for index in (1, 0):
            dataset.may_go[index].set()
            assert next(iterator) == index
        state = loader.state_dict()
        for event in dataset.may_go:
            event.set()
    other = DataLoader(range(SIZE), sampler=ShuffledWithState("in sequence"), batch_size=None)
    other.load_state_dict(state)
    assert list(other) == list(range(2, SIZE))


@pytest.mark.parametrize("cls", [Remembers, RemembersInItsIterator, Torchdatas])
def test_sampler_that_has_not_drawn_keeps_state(cls):
    """A loader resumes again, though all its batches came from what was drawn ahead before."""
    make_sampler = partial(cls, 5) if cls is Remembers else cls
    expected = list(DataLoader(Indices(20), batch_size=None, sampler=make_sampler()))
    torch.manual_seed(0)
    delivered, state = [], {}
    for num_workers in (3, 0, 0):
        loader = DataLoader(
            Indices(20), batch_size=None, sampler=make_sampler(), num_workers=num_workers
        )
        with loader:
            loader.load_state_dict(state)
            delivered += islice(loader, 2 if num_workers or len(delivered) < 4 else None)
            state = loader.state_dict()
    if cls is RemembersInItsIterator:  # It draws its seed from torch's generator.
        delivered, expected = sorted(delivered), sorted(expected)
    assert delivered == expected


class Counted(ShuffledWithState):
    num_asked = 0

    def state_dict(self):
        self.num_asked += 1
        return super().state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_sampler_state_is_taken_when_asked(workers):
    """A sampler is asked for its state by state_dict() and not by each batch."""
    sampler = Counted("torch")
    loader = DataLoader(range(SIZE), batch_size=4, sampler=sampler, num_workers=workers)
    iterator = iter(loader)
    first = values(islice(iterator, 3))
    assert sampler.num_asked == 0
    state = loader.state_dict()
    assert sampler.num_asked == 1
    rest = values(iterator)
    again = DataLoader(range(SIZE), batch_size=7, sampler=Counted("torch"), num_workers=1)
    again.load_state_dict(state)
    assert values(again) == rest
    assert sorted(first + rest) == list(range(SIZE))


class CountedIterator:
    """Draws in sequence. Has a state, and counts how often it is asked for it."""

    num_asked: ClassVar[int] = 0

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == SIZE:
            raise StopIteration
        self.position += 1
        return self.position - 1

    def state_dict(self):
        type(self).num_asked += 1
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class InSequence(Shuffled):
    def __iter__(self):
        return CountedIterator()


class CountedDataset(Dataset):
    """Has a state, and counts how often it is asked for it."""

    num_asked = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index):
        return index

    def state_dict(self):
        self.num_asked += 1
        return {"version": self.num_asked}

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "multiprocessing"}],
    ids=["caller", "threads", "processes"],
)
def test_other_states_are_taken_when_asked(workers):
    """A sampler's iterator and a map-style dataset are asked for their states by state_dict()."""
    dataset, other = CountedDataset(), CountedDataset()
    CountedIterator.num_asked = 0
    loader = DataLoader(dataset, batch_size=4, sampler=InSequence(""), **workers)
    iterator = iter(loader)
    assert values(islice(iterator, 3)) == list(range(12))
    assert (CountedIterator.num_asked, dataset.num_asked) == (0, 0)
    state = loader.state_dict()
    assert (CountedIterator.num_asked, dataset.num_asked) == (1, 1)
    resumed = DataLoader(other, batch_size=4, sampler=InSequence(""), **workers)
    resumed.load_state_dict(state)
    assert values(resumed) == values(iterator) == list(range(12, SIZE))
    assert other.loaded == {"version": 1}


class Counting(IterableDataset):
    """Counts, and how often it was asked for its state."""

    asked: ClassVar[list[int]] = []
    """The numbers at which it was asked. Workers have copies of the dataset, but one class."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self):
        while self.number < 60:
            self.number += 1
            yield self.number, torch.rand(())

    def state_dict(self):
        self.asked.append(self.number)
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("num_batches", [1, 4, 5, 6, 11])
def test_steps_between_snapshots_are_replayed(num_batches):
    """The samples after the last snapshot are read again with the same random numbers."""
    loader, other = (
        DataLoader(Counting(), batch_size=3, num_workers=1, seed=4, snapshot_every_n_steps=5)
        for _ in range(2)
    )
    iterator = iter(loader)
    for _ in range(num_batches):
        next(iterator)
    state = loader.state_dict()
    (worker,) = state["workers"]
    assert worker["num_samples"] == 3 * num_batches
    assert worker["dataset"]["number"] < worker["num_samples"] or num_batches in (1, 5)
    other.load_state_dict(state)
    expected = [[part.tolist() for part in batch] for batch in iterator]
    assert [[part.tolist() for part in batch] for batch in other] == expected


def test_snapshots_are_as_rare_as_asked():
    """An iterable dataset is asked for its state after every n-th batch of a worker."""
    num_asked = []
    for every in (1, 10, 0, None):
        Counting.asked.clear()
        options = {"num_workers": 1, "snapshot_every_n_steps": every}
        assert len(list(DataLoader(Counting(), batch_size=2, **options))) == 30
        num_asked.append(len(Counting.asked))
    assert num_asked[0] >= 30
    assert num_asked[1] <= 6
    assert max(num_asked[2:]) <= 3


@pytest.mark.parametrize("num_batches", [4, 5, 7])
def test_resumed_state_is_that_of_one_run(num_batches):
    """A state does not tell whether the run was interrupted before: snapshots are due as before."""
    options = {"batch_size": 3, "num_workers": 1, "snapshot_every_n_steps": 5}
    loader, other = (DataLoader(Counting(), seed=4, **options) for _ in range(2))
    iterator = iter(loader)
    list(islice(iterator, num_batches))
    other.load_state_dict(loader.state_dict())
    resumed = iter(other)
    for _ in range(4):
        next(iterator), next(resumed)
        assert other.state_dict() == loader.state_dict()


class RestoresTorch(Counting):
    """Keeps the state of torch's RNG in its own."""

    def state_dict(self):
        return {"number": self.number, "rng": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.number = state["number"]
        torch.set_rng_state(state["rng"])


def test_dataset_may_restore_torchs_rng():
    """What load_state_dict of a dataset does to torch's RNG in the calling thread stays."""
    loader, other = (DataLoader(RestoresTorch(), batch_size=3) for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    expected = next(iterator)[1]
    other.load_state_dict(state)
    torch.manual_seed(123)
    assert torch.equal(next(iter(other))[1], expected)


class Backwards(Sampler):
    def __len__(self) -> int:
        return 8

    def __iter__(self):
        return iter(range(7, -1, -1))


@pytest.mark.parametrize("moment", ["saved", "loaded", "made"])
@pytest.mark.parametrize("workers", [0, 2])
def test_replaced_sampler_is_used(moment, workers):
    """A sampler that is set on the batch sampler before the first batch decides the order."""
    loader = DataLoader(range(8), batch_size=4, num_workers=workers)
    state = loader.state_dict()
    if moment == "loaded":
        loader.load_state_dict(state)
    iterator = iter(loader) if moment == "made" else None
    loader.batch_sampler.sampler = Backwards()
    assert values(iterator or loader) == list(range(7, -1, -1))
    assert values(loader) == list(range(7, -1, -1))


@pytest.mark.parametrize("workers", [0, 2])
def test_replaced_sampler_cannot_resume(workers):
    """A sampler that is set after the state of an epoch in progress was loaded is an error."""
    loader, other = (DataLoader(range(8), batch_size=4, num_workers=workers) for _ in range(2))
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    other.batch_sampler.sampler = Backwards()
    with pytest.raises(ValueError, match="saved with a sampler of the kind SequentialSampler"):
        list(other)


class Wrapper(Sampler):
    """Wraps a sampler under a name of its own."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self):
        return iter(self.inner)


def test_set_epoch_reaches_wrapped_sampler():
    """set_epoch() finds a sampler inside others, whatever they call it."""
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0)
    batches = BatchSampler(Wrapper(Wrapper(sampler)), 2, drop_last=False)
    loader = DataLoader(range(8), batch_sampler=Wrapper(batches))
    loader.set_epoch(5)
    assert sampler.epoch == 5
