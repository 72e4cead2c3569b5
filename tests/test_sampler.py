"""Samplers for several ranks: one order for all of them, which needs no memory and no luck."""

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
from spdl_torch._ranges import Ranges

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
    """What each rank gets."""
    return [list(make(rank=rank, world_size=world_size, **arguments)) for rank in range(world_size)]


def dealt_back(shares):
    """The order that was dealt out: the first of each rank, then the second, and so on."""
    rows = zip_longest(*shares)
    return [index for row in rows for index in row if index is not None]


def order_of(make, epoch=0, **arguments):
    sampler = make(**ONE_RANK, tail="keep", **arguments)
    sampler.set_epoch(epoch)
    return list(sampler)


# -- what each rank gets --------------------------------------------------------------------------


@BOTH
def test_keep_gives_every_index_to_exactly_one_rank(cls):
    for world_size in (*WORLD_SIZES, SIZE + 1, 3 * SIZE):
        shares = shares_of(partial(cls, SIZE), world_size, tail="keep")
        assert sorted(chain(*shares)) == list(range(SIZE)), world_size
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 1, world_size


@BOTH
def test_drop_gives_equally_many_indices_to_all_ranks_and_none_twice(cls):
    for world_size in WORLD_SIZES:
        shares = shares_of(partial(cls, SIZE), world_size, tail="drop")
        assert {len(share) for share in shares} == {SIZE // world_size}
        indices = list(chain(*shares))
        assert len(set(indices)) == len(indices), world_size
        assert set(indices) <= set(range(SIZE)), world_size


@BOTH
def test_pad_gives_equally_many_indices_to_all_ranks_and_leaves_none_out(cls):
    for world_size in (*WORLD_SIZES, SIZE + 1, 3 * SIZE - 1, 3 * SIZE):
        shares = shares_of(partial(cls, SIZE), world_size, tail="pad")
        assert {len(share) for share in shares} == {-(-SIZE // world_size)}
        assert set(chain(*shares)) == set(range(SIZE)), world_size


@ANY_ORDER
@pytest.mark.parametrize("world_size", [2, 3, 8, 17])
def test_the_order_before_it_is_dealt_out_is_the_same_for_every_number_of_ranks(make, world_size):
    order = order_of(make)
    assert dealt_back(shares_of(make, world_size, tail="keep")) == order
    even = len(order) // world_size * world_size
    assert dealt_back(shares_of(make, world_size, tail="drop")) == order[:even]
    padding = -len(order) % world_size
    assert dealt_back(shares_of(make, world_size, tail="pad")) == order + order[:padding]


@BOTH
def test_pad_repeats_the_order_as_often_as_it_takes(cls):
    order = order_of(partial(cls, 3))
    assert dealt_back(shares_of(partial(cls, 3), 10, tail="pad")) == (order * 4)[:10]


@ANY_ORDER
@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
def test_length_is_the_number_of_indices(make, tail):
    for rank, world_size in ((0, 4), (1, 4), (3, 4), (0, 17), (16, 17)):
        sampler = make(rank=rank, world_size=world_size, tail=tail)
        assert len(sampler) == len(list(sampler))


@BOTH
@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
def test_length_is_the_number_of_indices_on_any_number_of_ranks(cls, tail):
    for world_size in WORLD_SIZES:
        for rank in range(world_size):
            sampler = cls(SIZE, rank=rank, world_size=world_size, tail=tail)
            assert len(sampler) == len(list(sampler))


@pytest.mark.parametrize(
    ("tail", "world_sizes"), [("drop", WORLD_SIZES), ("pad", [*WORLD_SIZES, 3 * SIZE])]
)
def test_ascending_order_is_dealt_out_as_torch_does_it(tail, world_sizes):
    for world_size in world_sizes:
        theirs = partial(DistributedSampler, Squares(SIZE), shuffle=False, drop_last=tail == "drop")
        ours = partial(DistributedDeterministicSampler, SIZE, tail=tail)
        for rank in range(world_size):
            expected = list(theirs(num_replicas=world_size, rank=rank))
            assert list(ours(rank=rank, world_size=world_size)) == expected


def test_drop_and_pad_are_the_defaults_of_training_and_evaluation():
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


def test_with_keep_the_total_size_counts_every_index_once():
    for rank, num_samples in enumerate([7, 7, 6, 6]):
        sampler = DistributedRandomSampler(SIZE, rank=rank, world_size=4, tail="keep")
        assert sampler.num_samples == len(sampler) == num_samples
        assert sampler.total_size == SIZE
        assert sampler.drop_last is False


def test_number_of_samples_follows_the_number_of_draws():
    sampler = DistributedRandomSampler(SIZE, rank=0, world_size=4, num_draws=103)
    assert (sampler.num_samples, sampler.total_size) == (25, 100)


@BOTH
def test_has_the_dataset_as_torchs_sampler_has_it(cls):
    dataset = Squares(SIZE)
    assert cls(dataset).dataset is dataset


@BOTH
def test_takes_a_dataset_or_its_size(cls):
    assert len(cls(Squares(SIZE)).dataset) == SIZE
    assert len(cls(SIZE).dataset) == SIZE
    assert list(cls(Squares(SIZE))) == list(cls(SIZE)) == list(cls(np.int64(SIZE)))


# -- random orders --------------------------------------------------------------------------------


def test_draws_come_as_often_as_their_weights_say():
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
def test_an_index_without_weight_is_never_drawn(weights):
    drawn = set(DistributedRandomSampler(len(weights), weights=weights, num_draws=20_000))
    assert drawn == {index for index, weight in enumerate(weights) if weight > 0}


def test_an_index_without_weight_is_never_drawn_beside_much_larger_ones():
    weights = [0, 1e-300, 0, 1e-12, 1, 0, 1e-300, 0]
    drawn = set(DistributedRandomSampler(8, weights=weights, num_draws=50_000))
    assert drawn == {4}


@pytest.mark.parametrize("convert", [tuple, np.array, np.float32, torch.tensor, torch.DoubleTensor])
def test_weights_may_be_any_sequence_of_numbers(convert):
    weights = [0.5, 0.25, 3, 0]
    draw = partial(DistributedRandomSampler, 4, num_draws=100)
    assert list(draw(weights=convert(weights))) == list(draw(weights=weights))


def test_weights_that_are_changed_afterwards_change_nothing():
    weights = np.array([1.0, 1.0, 0.0])
    sampler = DistributedRandomSampler(3, weights=weights, num_draws=1000)
    weights[:] = [0, 0, 1]
    assert set(sampler) == {0, 1}


def test_fewer_draws_than_samples_are_distinct_and_others_in_every_epoch():
    sampler = DistributedRandomSampler(SIZE, num_draws=5)
    epochs = [list(sampler) for _ in range(40)]
    assert all(len(indices) == len(set(indices)) == 5 for indices in epochs)
    assert set(chain(*epochs)) == set(range(SIZE))


@pytest.mark.parametrize("size", [1, 2, SIZE, 1000])
def test_more_draws_than_samples_go_through_all_of_them_in_rounds(size):
    indices = list(DistributedRandomSampler(size, num_draws=10 * size + size // 2))
    rounds = [indices[start : start + size] for start in range(0, len(indices), size)]
    assert all(sorted(each) == list(range(size)) for each in rounds[:10])
    assert len(set(indices[10 * size :])) == size // 2
    if size >= SIZE:
        assert len({tuple(each) for each in rounds}) == 11


@pytest.mark.parametrize("size", [SIZE, 70_001])
def test_every_index_comes_once_in_an_epoch(size):
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
def test_the_next_seed_is_not_the_next_epoch(make):
    assert order_of(make, seed=1, epoch=0) != order_of(make, seed=0, epoch=1)


def test_ascending_order_is_the_same_in_every_epoch():
    sampler = DistributedDeterministicSampler(SIZE)
    assert [list(sampler) for _ in range(3)] == [list(range(SIZE))] * 3


def states_of_global_generators():
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()


@ANY_ORDER
def test_global_generators_have_no_part_in_the_order(make):
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


def test_orders_stay_as_they_are():
    """A job that goes on from a saved state relies on it."""
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


def test_iterated_again_it_goes_on_with_the_next_epoch():
    sampler = RANDOM()
    assert sampler.epoch == 0
    for epoch, order in enumerate(epochs_of(RANDOM, 4)):
        assert list(sampler) == order
        assert sampler.epoch == epoch


def test_set_epoch_chooses_the_order_and_can_repeat_it():
    orders = epochs_of(RANDOM, 8)
    sampler = RANDOM()
    for epoch in (5, 5, 0, 7, 5):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        assert list(sampler) == orders[epoch]
    assert list(sampler) == orders[6]


def test_an_epoch_set_before_every_iteration_is_not_advanced_twice():
    orders = epochs_of(RANDOM, 4)
    sampler = RANDOM()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        assert list(sampler) == orders[epoch]


@pytest.mark.parametrize("num_taken", [1, SIZE - 1])
def test_an_epoch_that_is_broken_off_counts(num_taken):
    sampler = RANDOM()
    assert len(list(islice(sampler, num_taken))) == num_taken
    assert list(sampler) == order_of(RANDOM, epoch=1)


def test_an_iterator_that_is_never_asked_does_not_count():
    sampler = RANDOM()
    iter(sampler)
    assert list(sampler) == order_of(RANDOM, epoch=0)


def test_the_epoch_may_be_set_after_an_iterator_was_made():
    sampler = RANDOM()
    iterator = iter(sampler)
    sampler.set_epoch(6)
    assert list(iterator) == order_of(RANDOM, epoch=6)
    assert list(sampler) == order_of(RANDOM, epoch=7)


def test_the_epoch_set_in_the_middle_of_an_iteration_is_that_of_the_next():
    make = partial(DistributedRandomSampler, 1000)  # So many that they are not worked out at once.
    sampler = make()
    iterator = iter(sampler)
    first = next(iterator)
    sampler.set_epoch(6)
    assert [first, *iterator] == order_of(make, epoch=0)
    assert list(sampler) == order_of(make, epoch=6)


def test_two_iterators_at_a_time_are_two_epochs():
    make = partial(DistributedRandomSampler, 1000)
    sampler = make()
    pairs = list(zip(sampler, sampler, strict=True))
    assert [one for one, _ in pairs] == order_of(make, epoch=0)
    assert [other for _, other in pairs] == order_of(make, epoch=1)


@ANY_ORDER
@pytest.mark.parametrize(
    "duplicate", [lambda sampler: pickle.loads(pickle.dumps(sampler)), copy.deepcopy]
)
def test_a_copy_goes_on_with_the_same_epoch(make, duplicate):
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
    """Makes a process group of this process, whatever rank it says to be."""

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
def test_alone_it_is_rank_0_of_1(cls):
    assert ranks_of(cls(SIZE)) == (0, 1)


@BOTH
def test_ranks_are_found_in_the_environment(cls, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert ranks_of(cls(SIZE)) == (2, 5)


def test_a_missing_rank_in_the_environment_is_0(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert ranks_of(RANDOM()) == (0, 5)


@BOTH
@pytest.mark.parametrize("ranks", [(0, 1), (2, 4)])
def test_ranks_are_those_of_the_process_group_whatever_the_environment(
    cls, ranks, monkeypatch, process_group
):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "7")
    process_group(*ranks)
    assert ranks_of(cls(SIZE)) == ranks


def test_a_process_group_makes_a_nonsense_environment_harmless(monkeypatch, process_group):
    monkeypatch.setenv("RANK", "first")
    process_group(0, 1)
    assert ranks_of(RANDOM()) == (0, 1)


@BOTH
def test_explicit_ranks_win_over_the_environment(cls, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert ranks_of(cls(SIZE, rank=6, world_size=9)) == (6, 9)
    assert ranks_of(cls(SIZE, rank=0, world_size=1)) == (0, 1)
    assert ranks_of(cls(SIZE, rank=4)) == (4, 5)
    assert ranks_of(cls(SIZE, world_size=3)) == (2, 3)


def test_explicit_ranks_win_over_the_process_group(process_group):
    process_group(2, 4)
    assert ranks_of(RANDOM(rank=6, world_size=9)) == (6, 9)
    assert ranks_of(RANDOM(rank=0, world_size=1)) == (0, 1)


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["first", "", "-1", "1.5"])
def test_a_nonsense_environment_variable_is_named(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} is '{text}'.*pass rank and world_size"):
        RANDOM()


def test_a_world_size_of_0_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE is '0'"):
        RANDOM()


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_explicit_ranks_make_a_nonsense_environment_harmless(variable, monkeypatch):
    """As the error for it advises."""
    monkeypatch.setenv(variable, "first")
    assert ranks_of(RANDOM(rank=1, world_size=2)) == (1, 2)


def test_a_rank_outside_an_explicit_world_size_is_explained(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ValueError, match=r"world_size is 2, but this process has rank 3.*Pass rank"
    ):
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


# -- senseless arguments --------------------------------------------------------------------------


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
def test_a_senseless_size_is_refused(cls, size, error, words):
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
def test_a_senseless_argument_is_refused(cls, arguments, error, words):
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
def test_a_senseless_argument_of_a_random_order_is_refused(arguments, error, words):
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
def test_senseless_weights_are_refused(weights, error, words):
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
def test_a_senseless_epoch_is_refused_and_changes_nothing(cls, epoch, error, words):
    sampler = cls(SIZE)
    sampler.set_epoch(2)
    with pytest.raises(error, match=words):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 2


# -- a billion samples ----------------------------------------------------------------------------

BILLION = 10**9
HALF = BILLION // 2


@pytest.fixture
def next_to_nothing():
    """Fails a test that takes 5 MB of memory, or a second of computing."""
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
    """The index in the middle of the order: the second one of the first of so many ranks."""
    _, index = cls(BILLION, rank=0, world_size=HALF)
    return index


@BOTH
@pytest.mark.usefixtures("next_to_nothing")
def test_the_first_of_a_billion_indices_is_there_at_once(cls):
    sampler = cls(BILLION)
    assert len(sampler) == BILLION
    assert 0 <= next(iter(sampler)) < BILLION


@BOTH
@pytest.mark.usefixtures("next_to_nothing")
def test_an_order_of_a_billion_can_be_entered_in_the_middle(cls):
    left = cls(BILLION).indices(0, start=Ranges([(0, HALF)]))
    assert next(left) == middle_of(cls)


@BOTH
@pytest.mark.usefixtures("next_to_nothing")
def test_a_loader_goes_on_in_the_middle_of_a_billion(cls):
    loader = DataLoader(range(BILLION), batch_size=4, sampler=cls(BILLION))
    state = loader.state_dict()
    state["done"] = [[0, HALF]]
    loader.load_state_dict(state)
    assert next(iter(loader))[0] == middle_of(cls)


@pytest.mark.usefixtures("next_to_nothing")
def test_far_more_draws_than_samples_need_no_more_memory():
    assert 0 <= next(iter(DistributedRandomSampler(SIZE, num_draws=10**15))) < SIZE


def test_the_first_of_a_billion_indices_are_distinct_and_from_everywhere():
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
def test_every_iteration_over_a_loader_is_one_epoch(cls, loader_of, batch_size):
    make = partial(cls, SIZE, rank=1, world_size=2)
    sampler, alone = make(), make()
    loader = loader_of(range(SIZE), batch_size=batch_size, sampler=sampler)
    assert len(loader) == (13 if batch_size is None else 4)
    for epoch in range(3):
        assert indices_of(loader) == list(alone)
        assert sampler.epoch == epoch


@ANY_LOADER
@ANY_BATCH_SIZE
def test_a_loader_that_is_broken_off_has_had_its_epoch(loader_of, batch_size):
    sampler = RANDOM()
    loader = loader_of(range(SIZE), batch_size=batch_size, sampler=sampler)
    next(iter(loader))
    assert sampler.epoch == 0
    assert indices_of(loader) == order_of(RANDOM, epoch=1)


@ANY_LOADER
@ANY_BATCH_SIZE
def test_the_epoch_may_be_set_between_iterations_over_a_loader(loader_of, batch_size):
    sampler = RANDOM()
    loader = loader_of(range(SIZE), batch_size=batch_size, sampler=sampler)
    for epoch in (4, 4, 1):
        sampler.set_epoch(epoch)
        assert indices_of(loader) == order_of(RANDOM, epoch=epoch)
    assert indices_of(loader) == order_of(RANDOM, epoch=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_epoch_may_be_set_by_our_loader(num_workers):
    loader = DataLoader(range(SIZE), batch_size=4, sampler=RANDOM(), num_workers=num_workers)
    loader.set_epoch(9)
    assert indices_of(loader) == order_of(RANDOM, epoch=9)


@ANY_LOADER
def test_ranks_with_a_loader_each_see_every_sample_once_together(loader_of):
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
