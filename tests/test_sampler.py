"""Samplers for several ranks: one order for all ranks, without memory and global RNGs."""

from __future__ import annotations

import copy
import pickle
import random
import time
import tracemalloc
from functools import partial
from itertools import chain, islice, zip_longest

import numpy as np
import pytest
import torch
import torch.distributed
import torch.utils.data
from torch.utils.data import DistributedSampler

from spdl_torch import DataLoader, DistributedDeterministicSampler, DistributedRandomSampler

from .datasets import Squares

SIZE = 26
WORLD_SIZES = range(1, SIZE + 1)

BOTH = pytest.mark.parametrize("cls", [DistributedRandomSampler, DistributedDeterministicSampler])
ONE_RANK = {"rank": 0, "world_size": 1}

RANDOM_ORDERS = {
    "a table": partial(DistributedRandomSampler, SIZE),
    "computed": partial(DistributedRandomSampler, 70_001),
    "some": partial(DistributedRandomSampler, SIZE, num_draws=17),
    "several rounds": partial(DistributedRandomSampler, SIZE, num_draws=20 * SIZE + 5),
    "weighted": partial(DistributedRandomSampler, SIZE, weights=range(SIZE), num_draws=1000),
}
ORDERS = {"ascending": partial(DistributedDeterministicSampler, SIZE), **RANDOM_ORDERS}
ANY_ORDER = pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS.keys())
ANY_RANDOM_ORDER = pytest.mark.parametrize("make", RANDOM_ORDERS.values(), ids=RANDOM_ORDERS.keys())


@pytest.fixture(autouse=True)
def no_ranks_in_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def shares_of(make, world_size, **arguments):
    """Return the indices of each rank."""
    return [list(make(rank=rank, world_size=world_size, **arguments)) for rank in range(world_size)]


def interleaved(shares):
    """Return the order of all ranks: the first of each rank, then the second, and so on."""
    rows = zip_longest(*shares)
    return [index for row in rows for index in row if index is not None]


def order_of(make, epoch=0, **arguments):
    sampler = make(**ONE_RANK, tail="keep", **arguments)
    sampler.set_epoch(epoch)
    return list(sampler)


# -- what each rank gets --------------------------------------------------------------------------


@BOTH
def test_keep_uses_every_index_once(cls):
    """With tail="keep" every index is on one rank, and the shares differ by at most one index."""
    for world_size in (*WORLD_SIZES, SIZE + 1, 3 * SIZE):
        shares = shares_of(partial(cls, SIZE), world_size, tail="keep")
        assert sorted(chain(*shares)) == list(range(SIZE)), world_size
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 1, world_size


@BOTH
def test_drop_makes_equal_shares(cls):
    """With tail="drop" all ranks have equally many indices, and none comes twice."""
    for world_size in WORLD_SIZES:
        shares = shares_of(partial(cls, SIZE), world_size, tail="drop")
        assert {len(share) for share in shares} == {SIZE // world_size}
        indices = list(chain(*shares))
        assert len(set(indices)) == len(indices), world_size
        assert set(indices) <= set(range(SIZE)), world_size


@BOTH
def test_pad_makes_equal_shares(cls):
    """With tail="pad" all ranks have equally many indices, and none is left out."""
    for world_size in (*WORLD_SIZES, SIZE + 1, 3 * SIZE - 1, 3 * SIZE):
        shares = shares_of(partial(cls, SIZE), world_size, tail="pad")
        assert {len(share) for share in shares} == {-(-SIZE // world_size)}
        assert set(chain(*shares)) == set(range(SIZE)), world_size


@ANY_ORDER
@pytest.mark.parametrize("world_size", [2, 3, 8, 17])
def test_order_is_independent_of_ranks(make, world_size):
    """The shares of any number of ranks, interleaved, are the order of one rank."""
    order = order_of(make)
    assert interleaved(shares_of(make, world_size, tail="keep")) == order
    even = len(order) // world_size * world_size
    assert interleaved(shares_of(make, world_size, tail="drop")) == order[:even]
    padding = -len(order) % world_size
    assert interleaved(shares_of(make, world_size, tail="pad")) == order + order[:padding]


@BOTH
def test_pad_repeats_a_short_order(cls):
    """With more ranks than indices, tail="pad" repeats the order as often as needed."""
    order = order_of(partial(cls, 3))
    assert interleaved(shares_of(partial(cls, 3), 10, tail="pad")) == (order * 4)[:10]


@ANY_ORDER
@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
def test_length_is_the_index_count(make, tail):
    """len() is the number of indices for every kind of order and tail."""
    for rank, world_size in ((0, 4), (1, 4), (3, 4), (0, 17), (16, 17)):
        sampler = make(rank=rank, world_size=world_size, tail=tail)
        assert len(sampler) == len(list(sampler))


@BOTH
@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
def test_length_on_any_rank(cls, tail):
    """len() is the number of indices on every rank of any number of ranks."""
    for world_size in WORLD_SIZES:
        for rank in range(world_size):
            sampler = cls(SIZE, rank=rank, world_size=world_size, tail=tail)
            assert len(sampler) == len(list(sampler))


@pytest.mark.parametrize(
    ("tail", "world_sizes"), [("drop", WORLD_SIZES), ("pad", [*WORLD_SIZES, 3 * SIZE])]
)
def test_ascending_shares_equal_torchs(tail, world_sizes):
    """DistributedDeterministicSampler has the indices of torch's sampler without shuffling."""
    for world_size in world_sizes:
        theirs = partial(DistributedSampler, Squares(SIZE), shuffle=False, drop_last=tail == "drop")
        ours = partial(DistributedDeterministicSampler, SIZE, tail=tail)
        for rank in range(world_size):
            expected = list(theirs(num_replicas=world_size, rank=rank))
            assert list(ours(rank=rank, world_size=world_size)) == expected


def test_default_tails():
    """Training drops the tail by default, and evaluation pads it."""
    assert DistributedRandomSampler(SIZE).tail == "drop"
    assert DistributedDeterministicSampler(SIZE).tail == "pad"


@ANY_ORDER
def test_indices_are_python_ints(make):
    assert {type(index) for index in make()} == {int}


# -- torch's attributes ---------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize(
    ("make", "shuffle", "seed"),
    [
        (partial(DistributedRandomSampler, SIZE, seed=7), True, 7),
        (partial(DistributedDeterministicSampler, SIZE), False, 0),
    ],
)
def test_attributes_are_those_of_torchs_sampler(make, shuffle, seed, tail):
    names = ["num_replicas", "rank", "epoch", "seed", "shuffle", "drop_last"]
    names += ["num_samples", "total_size"]
    for rank, world_size in ((rank, size) for size in WORLD_SIZES for rank in range(size)):
        ours = make(rank=rank, world_size=world_size, tail=tail)
        theirs = DistributedSampler(
            Squares(SIZE), world_size, rank, shuffle, seed, drop_last=tail == "drop"
        )
        assert isinstance(ours, DistributedSampler)
        for _ in range(2):
            for name in names:
                assert getattr(ours, name) == getattr(theirs, name), name
                assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
            assert len(ours) == len(theirs)
            ours.set_epoch(3)
            theirs.set_epoch(3)


def test_total_size_with_keep():
    """With tail="keep", total_size counts every index once."""
    for rank, num_samples in enumerate([7, 7, 6, 6]):
        sampler = DistributedRandomSampler(SIZE, rank=rank, world_size=4, tail="keep")
        assert sampler.num_samples == len(sampler) == num_samples
        assert sampler.total_size == SIZE
        assert sampler.drop_last is False


def test_num_draws_sets_the_sizes():
    """num_samples and total_size follow from num_draws."""
    sampler = DistributedRandomSampler(SIZE, rank=0, world_size=4, num_draws=103)
    assert (sampler.num_samples, sampler.total_size) == (25, 100)


@BOTH
def test_dataset_attribute_is_kept(cls):
    """The attribute `dataset` is the dataset, as in torch's sampler."""
    dataset = Squares(SIZE)
    assert cls(dataset).dataset is dataset


@BOTH
def test_takes_a_dataset_or_its_size(cls):
    assert len(cls(Squares(SIZE)).dataset) == SIZE
    assert len(cls(SIZE).dataset) == SIZE
    assert list(cls(Squares(SIZE))) == list(cls(SIZE)) == list(cls(np.int64(SIZE)))


# -- random orders --------------------------------------------------------------------------------


def test_draws_follow_the_weights():
    """Indices are drawn in proportion to their weights."""
    weights = np.array([5, 1, 0, 2, 0.5, 3, 1.25, 0, 4, 0.01])
    sampler = DistributedRandomSampler(len(weights), weights=weights, num_draws=1_000_000)
    for _ in range(2):
        counts = np.bincount(list(sampler), minlength=len(weights))
        assert np.abs(counts / 1_000_000 - weights / weights.sum()).max() < 1e-3


@pytest.mark.parametrize(
    "weights",
    [
        [0, 1, 1],
        [1, 0, 1],
        [1, 1, 0],
        [0, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
        [0, 1e-300, 0, 1e-300, 0],
        [0, 5e-324, 0],
        [5e-324, 0, 5e-324, 0],
        [0, 1e307, 0, 1e307, 0],
        [0, 1 / 3, 0, 1 / 7, 0, 1 / 11, 0],
    ],
)
def test_weight_zero_is_never_drawn(weights):
    """An index of weight 0 is never drawn, and every other index is."""
    drawn = set(DistributedRandomSampler(len(weights), weights=weights, num_draws=20_000))
    assert drawn == {index for index, weight in enumerate(weights) if weight > 0}


def test_tiny_weights_beside_large_ones():
    """Weights that vanish beside larger ones do not cause wrong draws."""
    weights = [0, 1e-300, 0, 1e-12, 1, 0, 1e-300, 0]
    drawn = set(DistributedRandomSampler(8, weights=weights, num_draws=50_000))
    assert drawn == {4}


@pytest.mark.parametrize("convert", [tuple, np.array, np.float32, torch.tensor, torch.DoubleTensor])
def test_weights_of_any_type(convert):
    """Weights may be a tuple, an array or a tensor."""
    weights = [0.5, 0.25, 3, 0]
    draw = partial(DistributedRandomSampler, 4, num_draws=100)
    assert list(draw(weights=convert(weights))) == list(draw(weights=weights))


def test_weights_are_copied():
    """Changing the array of weights afterwards has no effect."""
    weights = np.array([1.0, 1.0, 0.0])
    sampler = DistributedRandomSampler(3, weights=weights, num_draws=1000)
    weights[:] = [0, 0, 1]
    assert set(sampler) == {0, 1}


def test_fewer_draws_than_samples():
    """Fewer draws than samples are distinct, and different in every epoch."""
    sampler = DistributedRandomSampler(SIZE, num_draws=5)
    epochs = [list(sampler) for _ in range(40)]
    assert all(len(indices) == len(set(indices)) == 5 for indices in epochs)
    assert set(chain(*epochs)) == set(range(SIZE))


@pytest.mark.parametrize("size", [1, 2, SIZE, 1000])
def test_more_draws_than_samples(size):
    """More draws than samples repeat the dataset in rounds of different orders."""
    indices = list(DistributedRandomSampler(size, num_draws=10 * size + size // 2))
    rounds = [indices[start : start + size] for start in range(0, len(indices), size)]
    assert all(sorted(each) == list(range(size)) for each in rounds[:10])
    assert len(set(indices[10 * size :])) == size // 2
    if size >= SIZE:
        assert len({tuple(each) for each in rounds}) == 11


@pytest.mark.parametrize("size", [SIZE, 70_001])
def test_epoch_has_every_index_once(size):
    """An epoch has every index exactly once."""
    assert sorted(DistributedRandomSampler(size)) == list(range(size))


@ANY_RANDOM_ORDER
def test_every_epoch_has_another_order(make):
    sampler = make()
    orders = {tuple(islice(sampler, 17)) for _ in range(20)}
    assert len(orders) == 20


@ANY_RANDOM_ORDER
def test_every_seed_has_another_order(make):
    seeds = [0, 1, 2, 2**31, 2**32, 2**63, 2**64 - 1]
    assert len({tuple(islice(make(seed=seed), 17)) for seed in seeds}) == len(seeds)


@ANY_RANDOM_ORDER
def test_next_seed_differs_from_next_epoch(make):
    """Seed 1 of epoch 0 and seed 0 of epoch 1 are different orders."""
    assert order_of(make, seed=1, epoch=0) != order_of(make, seed=0, epoch=1)


def test_ascending_order_ignores_the_epoch():
    """The ascending order is the same in every epoch."""
    sampler = DistributedDeterministicSampler(SIZE)
    assert [list(sampler) for _ in range(3)] == [list(range(SIZE))] * 3


def states_of_global_generators():
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()


@ANY_ORDER
def test_global_rngs_are_not_used(make):
    """Orders do not depend on the global RNGs, and do not change them."""
    orders = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = states_of_global_generators()
        sampler = make()
        orders.append([list(sampler), list(sampler)])
        assert states_of_global_generators() == before
        random.random()
        np.random.random()
        torch.rand(1)
        sampler.set_epoch(0)
        orders.append([list(sampler), list(sampler)])
    assert orders == orders[:1] * 4


def test_orders_never_change():
    """A job that resumes from a saved state relies on these orders."""
    sampler = DistributedRandomSampler(10)
    assert list(sampler) == [1, 8, 9, 3, 6, 5, 0, 7, 4, 2]
    assert list(sampler) == [1, 0, 7, 8, 5, 4, 3, 2, 9, 6]
    assert list(DistributedRandomSampler(10, seed=1)) == [9, 8, 5, 3, 0, 1, 4, 7, 6, 2]
    assert list(DistributedRandomSampler(4, num_draws=12)) == [2, 1, 0, 3, 2, 3, 0, 1, 3, 0, 2, 1]
    weighted = DistributedRandomSampler(4, num_draws=12, weights=[1, 2, 3, 4])
    assert list(weighted) == [3, 1, 3, 1, 3, 3, 2, 3, 1, 1, 3, 3]
    assert list(islice(DistributedRandomSampler(10**9), 3)) == [81910592, 377880935, 255534846]


# -- epochs ---------------------------------------------------------------------------------------


def epochs_of(make, num_epochs):
    return [order_of(make, epoch) for epoch in range(num_epochs)]


RANDOM = partial(DistributedRandomSampler, SIZE)


def test_iteration_advances_the_epoch():
    """Every iteration takes the epoch after the last one."""
    sampler = RANDOM()
    assert sampler.epoch == 0
    for epoch, order in enumerate(epochs_of(RANDOM, 4)):
        assert list(sampler) == order
        assert sampler.epoch == epoch


def test_set_epoch_chooses_the_order():
    """set_epoch() chooses any epoch, and the same one again."""
    orders = epochs_of(RANDOM, 8)
    sampler = RANDOM()
    for epoch in (5, 5, 0, 7, 5):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        assert list(sampler) == orders[epoch]
    assert list(sampler) == orders[6]


def test_set_epoch_before_each_iteration():
    """An epoch that is set before every iteration is not advanced twice."""
    orders = epochs_of(RANDOM, 4)
    sampler = RANDOM()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        assert list(sampler) == orders[epoch]


@pytest.mark.parametrize("num_taken", [1, SIZE - 1])
def test_broken_off_epoch_counts(num_taken):
    """An epoch that is broken off has been used."""
    sampler = RANDOM()
    assert len(list(islice(sampler, num_taken))) == num_taken
    assert list(sampler) == order_of(RANDOM, epoch=1)


def test_unused_iterator_does_not_count():
    """An iterator without a next() does not advance the epoch."""
    sampler = RANDOM()
    iter(sampler)
    assert list(sampler) == order_of(RANDOM, epoch=0)


def test_set_epoch_after_iter():
    """set_epoch() between iter() and the first next() takes effect."""
    sampler = RANDOM()
    iterator = iter(sampler)
    sampler.set_epoch(6)
    assert list(iterator) == order_of(RANDOM, epoch=6)
    assert list(sampler) == order_of(RANDOM, epoch=7)


def test_set_epoch_during_an_iteration():
    """set_epoch() during an iteration applies to the next one."""
    make = partial(DistributedRandomSampler, 1000)  # So many that they are not worked out at once.
    sampler = make()
    iterator = iter(sampler)
    first = next(iterator)
    sampler.set_epoch(6)
    assert [first, *iterator] == order_of(make, epoch=0)
    assert list(sampler) == order_of(make, epoch=6)


def test_two_iterators_are_two_epochs():
    """Two iterators at the same time have two epochs."""
    make = partial(DistributedRandomSampler, 1000)
    sampler = make()
    pairs = list(zip(sampler, sampler, strict=True))
    assert [one for one, _ in pairs] == order_of(make, epoch=0)
    assert [other for _, other in pairs] == order_of(make, epoch=1)


@ANY_ORDER
@pytest.mark.parametrize(
    "duplicate", [lambda sampler: pickle.loads(pickle.dumps(sampler)), copy.deepcopy]
)
def test_copies_keep_the_epoch(make, duplicate):
    """A pickled or deep copy continues with the same epoch."""
    sampler = make(rank=1, world_size=3)
    assert ranks_of(duplicate(sampler)) == (1, 3)
    sampler.set_epoch(3)
    chosen = duplicate(sampler)
    assert (chosen.epoch, list(chosen)) == (3, list(sampler))
    next(iter(sampler))
    begun = duplicate(sampler)
    assert begun.epoch == 4
    assert list(begun) == list(sampler)
    assert begun.epoch == sampler.epoch == 5


# -- which rank -----------------------------------------------------------------------------------


def ranks_of(sampler):
    return sampler.rank, sampler.num_replicas


@pytest.fixture
def process_group():
    """Return a function that makes this process a member of a process group."""

    def make(rank, world_size):
        if world_size == 1:
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=rank, world_size=world_size
            )
            return
        # torch's own stand-in for a group whose other members are not there.
        fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
        torch.distributed.init_process_group(
            "fake", store=fake.FakeStore(), rank=rank, world_size=world_size
        )

    yield make
    torch.distributed.destroy_process_group()


@BOTH
def test_single_process_is_rank_0(cls):
    """Without ranks anywhere, this is rank 0 of 1."""
    assert ranks_of(cls(SIZE)) == (0, 1)


@BOTH
def test_ranks_are_found_in_the_environment(cls, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert ranks_of(cls(SIZE)) == (2, 5)


def test_missing_rank_is_0(monkeypatch):
    """WORLD_SIZE without RANK means rank 0."""
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert ranks_of(RANDOM()) == (0, 5)


@BOTH
@pytest.mark.parametrize("ranks", [(0, 1), (2, 4)])
def test_process_group_overrides_environment(cls, ranks, monkeypatch, process_group):
    """The ranks of the process group have priority over the environment."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "7")
    process_group(*ranks)
    assert ranks_of(cls(SIZE)) == ranks


def test_process_group_ignores_bad_environment(monkeypatch, process_group):
    """With a process group, invalid environment variables are not read."""
    monkeypatch.setenv("RANK", "first")
    process_group(0, 1)
    assert ranks_of(RANDOM()) == (0, 1)


@BOTH
def test_explicit_ranks_override_environment(cls, monkeypatch):
    """Arguments have priority over the environment."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert ranks_of(cls(SIZE, rank=6, world_size=9)) == (6, 9)
    assert ranks_of(cls(SIZE, rank=0, world_size=1)) == (0, 1)
    assert ranks_of(cls(SIZE, rank=4)) == (4, 5)
    assert ranks_of(cls(SIZE, world_size=3)) == (2, 3)


def test_explicit_ranks_override_process_group(process_group):
    """Arguments have priority over the process group."""
    process_group(2, 4)
    assert ranks_of(RANDOM(rank=6, world_size=9)) == (6, 9)
    assert ranks_of(RANDOM(rank=0, world_size=1)) == (0, 1)


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["first", "", "-1", "1.5"])
def test_bad_environment_variable_is_named(variable, text, monkeypatch):
    """The error names the environment variable and its value."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} is '{text}'.*pass rank and world_size"):
        RANDOM()


def test_world_size_0_is_named(monkeypatch):
    """WORLD_SIZE=0 is an error that names the variable."""
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE is '0'"):
        RANDOM()


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_explicit_ranks_ignore_bad_environment(variable, monkeypatch):
    """The advice of the error for a bad environment works."""
    monkeypatch.setenv(variable, "first")
    assert ranks_of(RANDOM(rank=1, world_size=2)) == (1, 2)


def test_rank_outside_world_size(monkeypatch):
    """A world size that is too small for this process's rank is an error with advice."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"got rank 3 of 2. This process has that rank: pass rank"):
        RANDOM(world_size=2)


# -- torch's names --------------------------------------------------------------------------------


@BOTH
def test_num_replicas_is_the_world_size(cls):
    """A script that passes torch's arguments needs no change."""
    assert ranks_of(cls(SIZE, num_replicas=3, rank=2)) == (2, 3)
    assert ranks_of(cls(SIZE, num_replicas=3, world_size=3, rank=2)) == (2, 3)


@BOTH
@pytest.mark.parametrize(("drop_last", "tail"), [(True, "drop"), (False, "pad")])
def test_drop_last_sets_the_tail(cls, drop_last, tail):
    """The two values of torch's argument are two of the three tails."""
    ranks = {"rank": 1, "world_size": 4}
    sampler = cls(SIZE, **ranks, drop_last=drop_last)
    assert (sampler.tail, sampler.drop_last) == (tail, drop_last)
    assert list(sampler) == list(cls(SIZE, **ranks, tail=tail))
    assert cls(SIZE, drop_last=drop_last, tail=tail).tail == tail


@BOTH
def test_keep_is_not_drop_last(cls):
    """With tail="keep" nothing is dropped."""
    assert cls(SIZE, tail="keep", drop_last=False).tail == "keep"


@BOTH
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_replicas": 3, "world_size": 2}, "world_size=2 and num_replicas=3 .* Pass one of"),
        ({"drop_last": True, "tail": "pad"}, "tail='pad' and drop_last=True .* Pass one of them"),
        ({"drop_last": True, "tail": "keep"}, "tail='keep' and drop_last=True .* Pass one of"),
        ({"drop_last": False, "tail": "drop"}, "tail='drop' and drop_last=False .* Pass one of"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0. Leave it out"),
    ],
)
def test_contradicting_names_are_refused(cls, arguments, words):
    """The error names both arguments and says to pass one of them."""
    with pytest.raises(ValueError, match=words):
        cls(SIZE, **arguments)


# -- invalid arguments ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (0, ValueError, "size must be at least 1.*nothing to draw"),
        ([], ValueError, "size must be at least 1.*nothing to draw"),
        (-1, ValueError, "size must be at least 1, got -1.*Pass a number, or the dataset"),
        (26.0, TypeError, "size must be an int, got 26.0.*Pass a number, or the dataset"),
        ("26", TypeError, "size must be an int, got '26'.*Pass a number, or the dataset"),
        (None, TypeError, "size must be an int, got None.*Pass a number, or the dataset"),
        (True, TypeError, "size must be an int, got True.*Pass a number, or the dataset"),
    ],
)
def test_bad_size_is_refused(cls, size, error, words):
    """An invalid size is an error that says what to pass."""
    with pytest.raises(error, match=words):
        cls(size)


@BOTH
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"rank": 4, "world_size": 4}, ValueError, "got rank 4 of 4. Ranks count from 0"),
        ({"rank": 5, "world_size": 4}, ValueError, "rank must be below world_size, got rank 5"),
        ({"rank": 1}, ValueError, "rank must be below world_size, got rank 1 of 1"),
        ({"rank": -1, "world_size": 4}, ValueError, "rank must be at least 0, got -1"),
        ({"rank": 0.0, "world_size": 4}, TypeError, "rank must be an int, got 0.0"),
        ({"rank": "0", "world_size": 4}, TypeError, "rank must be an int, got '0'"),
        ({"rank": 0, "world_size": 0}, ValueError, "world_size must be at least 1, got 0.*Leave"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0.*Leave it out"),
        ({"world_size": -2}, ValueError, "world_size must be at least 1, got -2.*Leave it out"),
        ({"world_size": 2.0}, TypeError, "world_size must be an int, got 2.0.*Leave it out"),
        ({"world_size": "2"}, TypeError, "world_size must be an int, got '2'.*Leave it out"),
        ({"tail": "cut"}, ValueError, """tail must be "drop", "pad" or "keep", got 'cut'"""),
        ({"tail": True}, ValueError, 'tail must be "drop", "pad" or "keep", got True'),
        (
            {"rank": 0, "world_size": SIZE + 1, "tail": "drop"},
            ValueError,
            'leaves nothing of 26 indices on 27 ranks.*tail="pad".*tail="keep"',
        ),
    ],
)
def test_bad_argument_is_refused(cls, arguments, error, words):
    """Invalid arguments are errors with advice."""
    with pytest.raises(error, match=words):
        cls(SIZE, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_draws": 0}, ValueError, "num_draws must be at least 1, got 0. Leave it out"),
        ({"num_draws": -5}, ValueError, "num_draws must be at least 1, got -5. Leave it out"),
        ({"num_draws": 5.0}, TypeError, "num_draws must be an int, got 5.0. Leave it out"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 1.0}, TypeError, "seed must be an int, got 1.0"),
        ({"seed": None}, TypeError, "seed must be an int, got None"),
        ({"seed": 2**64}, ValueError, r"seed must be below 2\*\*64, got 18446744073709551616"),
        (
            {"num_draws": 3, "rank": 0, "world_size": 4},
            ValueError,
            "leaves nothing of 3 indices on 4 ranks",
        ),
    ],
)
def test_bad_random_argument_is_refused(arguments, error, words):
    """Invalid arguments of a random order are errors with advice."""
    with pytest.raises(error, match=words):
        DistributedRandomSampler(SIZE, **arguments)


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        ([1, 1], ValueError, r"for each of the 3 samples, got an array of shape \(2,\)"),
        ([1, 1, 1, 1], ValueError, r"for each of the 3 samples, got an array of shape \(4,\)"),
        ([[1, 1, 1]], ValueError, r"for each of the 3 samples, got an array of shape \(1, 3\)"),
        (1.0, ValueError, r"for each of the 3 samples, got an array of shape \(\)"),
        ([], ValueError, r"for each of the 3 samples, got an array of shape \(0,\)"),
        ([1, 1, -2], ValueError, "not negative, but that of sample 2 is -2.0. Use 0 for a sample"),
        ([1, float("nan"), 1], ValueError, "finite.*that of sample 1 is nan. Use 0 for a sample"),
        ([float("inf"), 1, 1], ValueError, "finite.*that of sample 0 is inf. Use 0 for a sample"),
        ([0, 0, 0], ValueError, "weights must have a.*sum above 0, got 0.0"),
        ([1e308, 1e308, 1e308], ValueError, "weights must have a.*sum.*, got inf"),
        (["a", "b", "c"], TypeError, "weights must be numbers, one for each sample, got .'a', 'b'"),
        (["1", "2", "3"], TypeError, "weights must be numbers, one for each sample, got .'1', '2'"),
        ("abc", TypeError, "weights must be numbers, one for each sample, got 'abc'"),
        ([[1], [1, 2], [1]], TypeError, "weights must be numbers, one for each sample"),
    ],
)
def test_bad_weights_are_refused(weights, error, words):
    """Invalid weights are errors that say which and why."""
    with pytest.raises(error, match=words):
        DistributedRandomSampler(3, weights=weights)


@BOTH
@pytest.mark.parametrize(
    ("epoch", "error", "words"),
    [
        (-1, ValueError, "epoch must be at least 0, got -1"),
        ("x", TypeError, "epoch must be an int, got 'x'"),
        (1.0, TypeError, "epoch must be an int, got 1.0"),
        (None, TypeError, "epoch must be an int, got None"),
    ],
)
def test_bad_epoch_changes_nothing(cls, epoch, error, words):
    """An invalid epoch is an error, and the epoch stays as it was."""
    sampler = cls(SIZE)
    sampler.set_epoch(2)
    with pytest.raises(error, match=words):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 2


# -- a billion samples ----------------------------------------------------------------------------

BILLION = 10**9
HALF = BILLION // 2


@pytest.fixture
def time_and_memory_limit():
    """Fail a test that takes 5 MB of memory, or a second of computing."""
    tracemalloc.start()
    started = time.thread_time()
    try:
        yield
        seconds = time.thread_time() - started
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000
    assert seconds < 1


def middle_of(cls):
    """Return the index in the middle of the order: the second of the first of HALF ranks."""
    _, index = cls(BILLION, rank=0, world_size=HALF)
    return index


@BOTH
@pytest.mark.usefixtures("time_and_memory_limit")
def test_first_of_a_billion(cls):
    """The first index of a billion takes no time and no memory."""
    sampler = cls(BILLION)
    assert len(sampler) == BILLION
    assert 0 <= next(iter(sampler)) < BILLION


@BOTH
@pytest.mark.usefixtures("time_and_memory_limit")
def test_loader_resumes_in_a_billion(cls):
    """A loader resumes in the middle of a billion samples without delay."""
    loader = DataLoader(range(BILLION), batch_size=4, sampler=cls(BILLION))
    state = loader.state_dict()
    state["done"] = [[0, HALF]]
    loader.load_state_dict(state)
    assert next(iter(loader))[0] == middle_of(cls)


@pytest.mark.usefixtures("time_and_memory_limit")
def test_many_rounds_need_no_memory():
    """Far more draws than samples need no more memory."""
    assert 0 <= next(iter(DistributedRandomSampler(SIZE, num_draws=10**15))) < SIZE


def test_a_billion_is_spread_evenly():
    """The first indices of a billion are distinct and evenly distributed."""
    indices = list(islice(DistributedRandomSampler(BILLION), 100_000))
    assert len(set(indices)) == 100_000
    counts = np.bincount(np.array(indices) // (BILLION // 10), minlength=10)
    assert abs(counts - 10_000).max() < 500


# -- under a DataLoader ---------------------------------------------------------------------------

LOADERS = {
    "torch": torch.utils.data.DataLoader,
    "calling thread": DataLoader,
    "worker threads": partial(DataLoader, num_workers=2),
    "persistent": partial(DataLoader, num_workers=2, persistent_workers=True),
}
ANY_LOADER = pytest.mark.parametrize("loader_of", LOADERS.values(), ids=LOADERS.keys())
ANY_BATCH_SIZE = pytest.mark.parametrize("batch_size", [4, None])


def indices_of(batches):
    return np.array([index for batch in batches for index in np.atleast_1d(batch)]).tolist()


@BOTH
@ANY_LOADER
@ANY_BATCH_SIZE
def test_loader_iteration_is_one_epoch(cls, loader_of, batch_size):
    """Every iteration over a loader is one epoch of its sampler."""
    make = partial(cls, SIZE, rank=1, world_size=2)
    sampler, alone = make(), make()
    loader = loader_of(range(SIZE), batch_size=batch_size, sampler=sampler)
    assert len(loader) == (13 if batch_size is None else 4)
    for epoch in range(3):
        assert indices_of(loader) == list(alone)
        assert sampler.epoch == epoch


@ANY_LOADER
@ANY_BATCH_SIZE
def test_broken_off_loader_used_its_epoch(loader_of, batch_size):
    """A loop that is broken off has used its epoch."""
    sampler = RANDOM()
    loader = loader_of(range(SIZE), batch_size=batch_size, sampler=sampler)
    next(iter(loader))
    assert sampler.epoch == 0
    assert indices_of(loader) == order_of(RANDOM, epoch=1)


@ANY_LOADER
@ANY_BATCH_SIZE
def test_set_epoch_between_loader_iterations(loader_of, batch_size):
    """set_epoch() of the sampler applies to the next loop over the loader."""
    sampler = RANDOM()
    loader = loader_of(range(SIZE), batch_size=batch_size, sampler=sampler)
    for epoch in (4, 4, 1):
        sampler.set_epoch(epoch)
        assert indices_of(loader) == order_of(RANDOM, epoch=epoch)
    assert indices_of(loader) == order_of(RANDOM, epoch=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_sets_the_epoch(num_workers):
    """DataLoader.set_epoch() sets the epoch of the sampler."""
    loader = DataLoader(range(SIZE), batch_size=4, sampler=RANDOM(), num_workers=num_workers)
    loader.set_epoch(9)
    assert indices_of(loader) == order_of(RANDOM, epoch=9)


@ANY_LOADER
def test_ranks_cover_the_dataset_once(loader_of):
    """The loaders of all ranks together deliver every sample once."""
    loaders = [
        loader_of(
            range(SIZE),
            batch_size=4,
            sampler=DistributedRandomSampler(SIZE, rank=rank, world_size=3, tail="keep"),
        )
        for rank in range(3)
    ]
    for _ in range(2):
        assert sorted(chain(*map(indices_of, loaders))) == list(range(SIZE))
