"""Whatever the batch size, the workers and the ranks before and after: every sample once."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from spdl_torch import DataLoader, DistributedDeterministicSampler, DistributedRandomSampler

from .datasets import Held, Indices
from .resuming import (
    Descending,
    DrawsOnceSampler,
    Remembers,
    RemembersInItsIterator,
    Torchdatas,
    batches,
    flat,
    generator,
    saved,
    take,
)

SIZES = st.integers(1, 40)
BATCH_SIZES = st.integers(1, 9)
NUM_WORKERS = st.sampled_from([0, 1, 2, 5])
SEEDS = st.integers(0, 2**32)
STOPS = st.integers(0, 12)
"""After how many batches, if there are so many."""

modest = settings(
    deadline=None,
    max_examples=60,
    database=None,
    # The examples are small as they are. To make them smaller takes longer than a test may.
    phases=[Phase.explicit, Phase.generate],
)


def ceil(number, divisor):
    return max(0, -(-number // divisor))


# -- one rank, in order ---------------------------------------------------------------------------

SAMPLERS = {
    "in sequence": lambda size: {},
    "shuffle": lambda size: {"shuffle": True},
    "shuffle, own generator": lambda size: {"shuffle": True, "generator": generator(5)},
    "with replacement": lambda size: {"sampler": RandomSampler(range(size), True, size + 10)},
    "weighted": lambda size: {"sampler": WeightedRandomSampler([1.0] * size, size)},
    "subset": lambda size: {"sampler": SubsetRandomSampler(range(size))},
    "deterministic": lambda size: {"sampler": DistributedDeterministicSampler(size)},
    "distributed": lambda size: {"sampler": DistributedRandomSampler(size, num_draws=size + 3)},
    "custom": lambda size: {"sampler": Descending(size)},
    "custom that draws": lambda size: {"sampler": DrawsOnceSampler(size)},
    "stateful sampler": lambda size: {"sampler": Remembers(5, size)},
    "stateful iterator": lambda size: {"sampler": RemembersInItsIterator(size)},
    "torchdata's": lambda size: {"sampler": Torchdatas(size)},
}


@modest
@given(
    name=st.sampled_from(sorted(SAMPLERS)),
    size=SIZES,
    shapes=st.lists(st.tuples(BATCH_SIZES, NUM_WORKERS, STOPS), min_size=2, max_size=3),
    seed=SEEDS,
)
def test_ordered_samples_match_uninterrupted_run(name, size, shapes, seed):
    """In order the samples are those of the uninterrupted run."""
    torch.manual_seed(seed)
    expected = flat(batches(DataLoader(Indices(size), **SAMPLERS[name](size))))
    delivered = []
    state = {}
    for number, (batch_size, num_workers, stop) in enumerate(shapes, 1):
        torch.manual_seed(seed if state == {} else number)
        with DataLoader(
            Indices(size), batch_size, num_workers=num_workers, **SAMPLERS[name](size)
        ) as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            if number < len(shapes):
                stop = min(stop, ceil(len(expected) - len(delivered), batch_size))  # noqa: PLW2901
                delivered += flat(take(iterator, stop))
                # Before the first batch the order is not drawn, and follows from the seed again.
                state = saved(loader) if delivered else {}
            else:
                delivered += flat(batches(iterator))
    assert delivered == expected


# -- one rank, out of order -----------------------------------------------------------------------

WITHOUT_REPLACEMENT = sorted(SAMPLERS.keys() - {"with replacement", "weighted", "distributed"})


@st.composite
def shapes_with_slow_places(draw):
    """A shape, and the places whose samples do not come before the loader is stopped.

    They are some of the next, so that others overtake them. One worker at least is free for those.
    """
    num_workers = draw(NUM_WORKERS)
    held = draw(st.sets(st.integers(0, 5), max_size=max(0, num_workers - 1)))
    return draw(BATCH_SIZES), num_workers, draw(STOPS), held


three_shapes = st.tuples(*[shapes_with_slow_places()] * 3)
"""Drawn before anything is delivered: which batches come early differs from run to run."""


@modest
@given(shapes=three_shapes, name=st.sampled_from(WITHOUT_REPLACEMENT), size=SIZES, seed=SEEDS)
@example(  # The sampler has ended when the state is saved, and the state is that of its iterator.
    shapes=((6, 2, 6, {3}), (6, 5, 3, set()), (3, 0, 0, set())),
    name="stateful iterator",
    size=8,
    seed=6,
)
def test_unordered_samples_come_once(shapes, name, size, seed):
    """Out of order every sample comes once."""
    torch.manual_seed(seed)
    left = flat(batches(DataLoader(Indices(size), **SAMPLERS[name](size))))
    assert sorted(left) == list(range(size))
    state = {}
    for number, (batch_size, num_workers, stop, slow_places) in enumerate(shapes):
        held = {left[place] for place in slow_places if place < len(left)}
        torch.manual_seed(number if state else seed)
        dataset = Held(size, held)
        in_batches = [left[first : first + batch_size] for first in range(0, len(left), batch_size)]
        may_come = [batch for batch in in_batches if held.isdisjoint(batch)]
        with DataLoader(
            dataset, batch_size, num_workers=num_workers, in_order=False, **SAMPLERS[name](size)
        ) as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            try:
                if number < 2:
                    came = take(iterator, min(stop, len(may_come)))
                    state = saved(loader) if came or state else {}
            finally:
                dataset.may_go.set()
            if number == 2:
                came = batches(iterator)
                may_come = in_batches
        assert all(batch in may_come for batch in came)
        left = [index for index in left if index not in flat(came)]
    assert left == []


# -- several ranks --------------------------------------------------------------------------------


@st.composite
def worlds(draw):
    """How many ranks with which batch size and workers, and whose state is kept."""
    world_size = draw(st.integers(1, 4))
    return world_size, draw(BATCH_SIZES), draw(NUM_WORKERS), draw(st.integers(0, world_size - 1))


def run(world, num_batches, state, *, size, sampler_of):
    """What all ranks get, each restored from the same state, and the state of one of them."""
    world_size, batch_size, num_workers, kept_rank = world
    delivered = []
    with ExitStack() as stack:
        for rank in range(world_size):
            sampler = sampler_of(rank, world_size)
            loader = DataLoader(Indices(size), batch_size, sampler=sampler, num_workers=num_workers)
            stack.enter_context(loader)
            loader.load_state_dict(state)
            iterator = iter(loader)
            if num_batches is None:
                delivered += flat(batches(iterator))
            else:
                delivered += flat(take(iterator, num_batches))
            if rank == kept_rank:
                kept_state = saved(loader)
    return delivered, kept_state


@st.composite
def random_samplers(draw, size, tail):
    """From rank and world size to a sampler of the first run, and one of the runs after it."""
    seed, epoch = draw(SEEDS), draw(st.integers(0, 3))
    num_draws = draw(st.none() | st.integers(4, 60))

    def first(rank, world_size):
        sampler = DistributedRandomSampler(
            size, rank=rank, world_size=world_size, num_draws=num_draws, seed=seed, tail=tail
        )
        sampler.set_epoch(epoch)
        return sampler

    def later(rank, world_size):
        return DistributedRandomSampler(
            size, rank=rank, world_size=world_size, num_draws=num_draws, tail=tail
        )

    return first, later


def deterministic_samplers(size, tail):
    def either(rank, world_size):
        return DistributedDeterministicSampler(size, rank=rank, world_size=world_size, tail=tail)

    return st.just((either, either))


@modest
@given(
    data=st.data(),
    size=st.integers(4, 40),
    kind=st.sampled_from([random_samplers, deterministic_samplers]),
    stages=st.lists(st.tuples(worlds(), STOPS), min_size=1, max_size=2),
    last_world=worlds(),
)
def test_any_rank_restores_any_ranks(data, size, kind, stages, last_world):
    """The state of any rank restores any number of ranks."""
    first, later = data.draw(kind(size, "keep"))
    (whole_epoch, _) = run((1, 1, 0, 0), None, {}, size=size, sampler_of=first)
    num_left = len(whole_epoch)
    delivered = []
    state = {}
    sampler_of = first
    for world, stop in stages:
        world_size, batch_size, _, _ = world
        # The last ranks may have a sample less. None is asked for a batch that it does not have.
        shortest = ceil(num_left - (world_size - 1), world_size)
        num_batches = min(stop, ceil(shortest, batch_size))
        here, state = run(world, num_batches, state, size=size, sampler_of=sampler_of)
        delivered += here
        num_left -= len(here)
        sampler_of = later
    delivered += run(last_world, None, state, size=size, sampler_of=later)[0]
    assert Counter(delivered) == Counter(whole_epoch)


@modest
@given(
    data=st.data(),
    size=st.integers(4, 40),
    kind=st.sampled_from([random_samplers, deterministic_samplers]),
    tail=st.sampled_from(["drop", "pad"]),
    world=worlds(),
    stop=STOPS,
    last_world=worlds(),
)
def test_only_the_tail_differs(data, size, kind, tail, world, stop, last_world):
    """No more than a tail is lost or repeated."""
    first, later = data.draw(kind(size, tail))
    (whole_epoch, _) = run((1, 1, 0, 0), None, {}, size=size, sampler_of=first)
    world_size, batch_size, _, _ = world
    share = len(whole_epoch) // world_size
    if tail == "pad":
        share = ceil(len(whole_epoch), world_size)
    num_batches = min(stop, ceil(share, batch_size))
    before, state = run(world, num_batches, {}, size=size, sampler_of=first)
    after, _ = run(last_world, None, state, size=size, sampler_of=later)
    delivered, expected = Counter(before + after), Counter(whole_epoch)
    at_most = max(world_size, last_world[0]) - 1
    assert (expected - delivered).total() <= (at_most if tail == "drop" else 0)
    assert (delivered - expected).total() <= (at_most if tail == "pad" else 0)


def dealt_out(rank, world_size, size=24):
    return DistributedDeterministicSampler(size, rank=rank, world_size=world_size, tail="keep")


def out_of_turn(rank, world_size, *, size=24, num_batches=1):
    """The state of a rank whose first batch was overtaken by others, and what is left then."""
    sampler = dealt_out(rank, world_size, size)
    dataset = Held(size, held=[rank])
    with DataLoader(dataset, 2, sampler=sampler, num_workers=2, in_order=False) as loader:
        iterator = iter(loader)
        try:
            came = take(iterator, num_batches)
            state = saved(loader)
        finally:
            dataset.may_go.set()
        assert rank not in flat(came)
        return state, batches(iterator)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 3), (2, 3), (1, 2)])
def test_unordered_state_refuses_other_ranks(rank, world_size):
    """An out of order state of one of several ranks is refused by others."""
    state, _ = out_of_turn(0, 2)
    sampler = dealt_out(rank, world_size)
    loader = DataLoader(Indices(24), 2, sampler=sampler)
    with pytest.raises(ValueError, match=r"one of 2 ranks with in_order=False.*its own state"):
        loader.load_state_dict(state)
    assert len(flat(batches(loader))) == len(sampler)


@pytest.mark.parametrize("rank", [0, 1])
def test_unordered_state_fits_its_rank(rank):
    """An out of order state is good for the rank that saved it."""
    state, rest = out_of_turn(rank, 2)
    loader = DataLoader(Indices(24), 2, sampler=dealt_out(rank, 2))
    loader.load_state_dict(state)
    assert sorted(batches(loader)) == sorted(rest)


@pytest.mark.parametrize(("size", "num_batches"), [(24, 1), (24, 11), (5, 2)])
def test_unordered_single_rank_state_reshards(size, num_batches):
    """Also if the last batch, which may be smaller, was among the first."""
    state, rest = out_of_turn(0, 1, size=size, num_batches=num_batches)
    delivered, _ = run(
        (3, 2, 0, 0), None, state, size=size, sampler_of=partial(dealt_out, size=size)
    )
    assert sorted(delivered) == sorted(flat(rest))


def test_ordered_delivery_reshards_anyway():
    """Batches that came in order can be divided among ranks even if they need not have."""
    loader = DataLoader(Indices(24), 2, sampler=dealt_out(1, 2), in_order=False)  # In this thread.
    take(iter(loader), 2)
    state = saved(loader)
    loader = DataLoader(Indices(24), 24, sampler=dealt_out(0, 1))
    loader.load_state_dict(state)
    assert batches(loader) == [list(range(8, 24))]
