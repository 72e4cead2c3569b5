"""Same seed, same arguments: the batches are torch's."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from spdl_torch import DataLoader

from .datasets import InBulk, Named, OwnIterator, Pairs, Sharded, Squares, Uneven
from .tiers import pairwise

Point = namedtuple("Point", ["x", "y"])


class Points(Squares):
    def __getitem__(self, index):
        return Point(np.float32(int(index)), [torch.tensor(int(index)), "label"])


def epochs(cls, dataset, *, num_epochs=2, seed=7, **arguments):
    """All batches of some epochs, and the state that the global generator is left in."""
    torch.manual_seed(seed)
    loader = cls(dataset, **arguments)
    batches = [list(loader) for _ in range(num_epochs)]
    return batches, torch.get_rng_state()


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


class Odd:
    """A sampler of the user's own, of indices that are not plain ints."""

    def __iter__(self):
        return iter([np.int64(3), 1, np.int64(4), 1, 5, 9])

    def __len__(self):
        return 6


def odd_batches():
    return [[0, 1, 2], (3,), torch.tensor([4, 5]), range(6, 9)]


ARGUMENTS = {
    "one at a time": {},
    "batches": {"batch_size": 3},
    "drop_last": {"batch_size": 3, "drop_last": True},
    "shuffle": {"batch_size": 3, "shuffle": True},
    "shuffle, own generator": lambda: {
        "shuffle": True,
        "batch_size": 4,
        "generator": torch.Generator().manual_seed(3),
    },
    "no batching": {"batch_size": None},
    "no batching, shuffled": {"batch_size": None, "shuffle": True},
    "weighted": lambda: {"batch_size": 3, "sampler": WeightedRandomSampler([1, 2, 3, 0] * 5, 17)},
    "with replacement": lambda: {
        "batch_size": 3,
        "sampler": RandomSampler(Squares(20), replacement=True, num_samples=70),
    },
    "custom sampler": lambda: {"batch_size": 4, "sampler": Odd()},
    "sampler is a list": {"batch_size": 2, "sampler": [5, 4, 3, 2, 1]},
    "batch sampler": lambda: {
        "batch_sampler": BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)
    },
    "odd batch sampler": lambda: {"batch_sampler": odd_batches()},
    "custom collate": {"batch_size": 3, "collate_fn": list},
}


@pytest.mark.parametrize(
    ("dataset", "name", "num_workers"),
    pairwise(
        [Squares(20), Pairs(20), Named(20), Points(20), list(range(20))], ARGUMENTS, [0, 1, 2, 5]
    ),
)
def test_batches_and_random_state_equal_torchs(dataset, name, num_workers):
    def arguments():
        chosen = ARGUMENTS[name]
        return chosen() if callable(chosen) else chosen

    ours = epochs(DataLoader, dataset, num_workers=num_workers, **arguments())
    theirs = epochs(torch.utils.data.DataLoader, dataset, **arguments())
    assert_same(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    ("dataset", "arguments", "extra"),
    pairwise(
        [Sharded(20), Uneven([0, 4, 9]), Uneven([7, 1, 0]), OwnIterator(5)],
        [{}, {"batch_size": 3}, {"batch_size": None}],
        [{}, {"persistent_workers": True}, {"prefetch_factor": 1}],
    ),
)
def test_iterable_batches_equal_torchs(dataset, arguments, extra):
    """An iterable dataset has the batches of torch's worker processes."""
    arguments = {"num_workers": 3, **arguments, **extra}
    ours = epochs(DataLoader, dataset, **arguments)
    with pytest.warns(UserWarning, match="worker processes in total"):
        theirs = epochs(torch.utils.data.DataLoader, dataset, **arguments)
    assert_same(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_drop_last_applies_to_each_worker():
    """drop_last drops the incomplete batch of each worker."""
    loader = DataLoader(Uneven([4, 7]), batch_size=3, num_workers=2, drop_last=True)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [100, 101, 102], [103, 104, 105]]


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: torch.utils.data.Subset(d, range(1, 20))])
def test_whole_batches_go_through_getitems(wrap):
    dataset = InBulk(20)
    assert_same(
        list(DataLoader(wrap(dataset), batch_size=6, num_workers=2)),
        list(torch.utils.data.DataLoader(wrap(dataset), batch_size=6)),
    )
    half = len(dataset.calls) // 2
    assert sorted(dataset.calls[:half]) == dataset.calls[half:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_datapipes_equal_torchs(num_workers):
    """Datapipes are shuffled and sharded as in torch's worker processes."""
    from torch.utils.data.datapipes.iter import IterableWrapper  # noqa: PLC0415 (warns on import)

    def results(cls):
        pipe = IterableWrapper(range(30)).shuffle(buffer_size=7).sharding_filter()
        return epochs(cls, pipe, shuffle=True, batch_size=4, num_workers=num_workers)

    ours, theirs = results(DataLoader), results(torch.utils.data.DataLoader)
    assert_same(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_in_order_false_keeps_the_batches():
    """in_order=False returns the same batches in another order."""
    loader = DataLoader(Squares(50), batch_size=3, num_workers=4, in_order=False)
    expected = [batch.tolist() for batch in torch.utils.data.DataLoader(Squares(50), batch_size=3)]
    assert sorted(batch.tolist() for batch in loader) == expected


def test_worker_processes_equal_torchs():
    """worker_method="multiprocessing" returns the same batches."""
    loader = DataLoader(Pairs(20), batch_size=3, num_workers=2, worker_method="multiprocessing")
    assert_same(list(loader), list(torch.utils.data.DataLoader(Pairs(20), batch_size=3)))


def test_length_is_torchs():
    for arguments in ({}, {"batch_size": 3}, {"batch_size": 3, "drop_last": True}):
        for dataset in (Squares(20), Sharded(20)):
            ours = DataLoader(dataset, num_workers=2, **arguments)
            assert len(ours) == len(torch.utils.data.DataLoader(dataset, **arguments))
    with pytest.raises(TypeError):
        len(DataLoader(Uneven([1]), num_workers=2))


def test_too_long_iterable_warns_as_torchs():
    """An iterable dataset that is longer than its length warns as in torch."""
    loader = DataLoader(Sharded(6), num_workers=2)
    len(loader)
    list(loader)  # Exactly its length: no warning.
    unsharded = DataLoader(Uneven([6, 6]), num_workers=2)
    unsharded.dataset.__class__.__len__ = lambda self: 6
    try:
        len(unsharded)
        iterator = iter(unsharded)
        for _ in range(6):
            next(iterator)
        for _ in range(2):
            with pytest.warns(UserWarning, match="samples have been fetched"):
                next(iterator)
        iterator._shutdown_workers()
    finally:
        del unsharded.dataset.__class__.__len__


class DrawsAsItGoes:
    """Draws each index from the global generator when it is asked for it."""

    def __iter__(self):
        for _ in range(200):
            yield int(torch.randint(20, ()))

    def __len__(self):
        return 200


@pytest.mark.parametrize("batch_size", [1, 4])
def test_sampler_and_loop_share_a_generator(batch_size):
    """The sampler is advanced by one batch for each that is delivered, whatever workers do."""

    def train(cls):
        torch.manual_seed(3)
        loader = cls(Squares(20), sampler=DrawsAsItGoes(), batch_size=batch_size, num_workers=2)
        return [(batch.tolist(), torch.rand(()).item()) for batch in loader]

    assert train(DataLoader) == train(torch.utils.data.DataLoader)
