"""When a state is saved and loaded, and what it means then."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.data

from spdl_torch import DataLoader

from .datasets import Indices
from .resuming import (
    ARGUMENTS,
    DRAW_FROM_THE_GLOBAL_GENERATOR,
    PROCESSES,
    SOME,
    WORKERS,
    Torchdatas,
    all_ways,
    batches,
    interrupted_run,
    loader_of,
    restored,
    restored_batches,
    saved,
    take,
)

STATEFUL = ("stateful sampler", "stateful iterator", "torchdata's sampler")


# -- before, in and after an epoch ----------------------------------------------------------------


@pytest.mark.parametrize("has_begun", [False, True])
@all_ways
def test_state_before_first_batch(name, workers, has_begun):
    """A state before the first batch is the whole epoch."""
    torch.manual_seed(7)
    with loader_of(name, **WORKERS[workers]) as loader:
        iterator = iter(loader) if has_begun else None
        state, rng_state = saved(loader), torch.get_rng_state()
        expected = batches(loader if iterator is None else iterator)
    assert restored_batches(name, state, rng_state=rng_state, **WORKERS[workers]) == expected


@pytest.mark.parametrize("num_epochs", [0, 1])
@pytest.mark.parametrize("name", DRAW_FROM_THE_GLOBAL_GENERATOR)
def test_undrawn_epoch_follows_torchs_generator(name, num_epochs):
    """A state saved before an epoch has drawn leaves its order to torch's generator."""
    torch.manual_seed(7)
    loader = loader_of(name)
    for _ in range(num_epochs):
        batches(loader)
    state = saved(loader)
    torch.manual_seed(5)
    expected = batches(loader_of(name))
    rng_state = torch.Generator().manual_seed(5).get_state()
    assert restored_batches(name, state, rng_state=rng_state) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SOME)
def test_state_after_every_batch(name, num_workers):
    """There is a state after every batch."""
    torch.manual_seed(7)
    with loader_of(name, num_workers=num_workers) as loader:
        expected = batches(loader)
    torch.manual_seed(7)
    with loader_of(name, num_workers=num_workers) as loader:
        states = [saved(loader) for _ in loader]
    assert len(states) == len(expected)
    for number, state in enumerate(states, 1):
        assert restored_batches(name, state, num_workers=num_workers) == expected[number:]


@all_ways
def test_state_after_last_batch(name, workers):
    """A state of the last batch has nothing left but the epochs to come."""
    torch.manual_seed(7)
    with loader_of(name, **WORKERS[workers]) as loader:
        num_batches = len(batches(loader))
        iterator = iter(loader)
        take(iterator, num_batches)
        state = saved(loader)
        assert batches(iterator) == []
        expected = batches(loader)
    with restored(name, state, **WORKERS[workers]) as loader:
        assert batches(loader) == []
        following = batches(loader)
        assert len(following) == num_batches
        if name not in DRAW_FROM_THE_GLOBAL_GENERATOR:
            assert following == expected


@all_ways
def test_state_of_ended_epoch(name, workers):
    """A state of an ended epoch is the next epoch."""
    torch.manual_seed(7)
    with loader_of(name, **WORKERS[workers]) as loader:
        batches(loader)
        state, rng_state = saved(loader), torch.get_rng_state()
        expected = batches(loader)
    assert restored_batches(name, state, rng_state=rng_state, **WORKERS[workers]) == expected


@pytest.mark.parametrize("name", ["shuffle", "stateful sampler"])
def test_state_of_ended_processes_epoch(name):
    """An ended epoch of worker processes is followed by the next."""
    torch.manual_seed(7)
    loader = loader_of(name, persistent_workers=True, **PROCESSES)
    batches(loader)
    state, rng_state = saved(loader), torch.get_rng_state()
    expected = batches(loader)
    assert restored_batches(name, state, rng_state=rng_state, **PROCESSES) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SOME)
def test_state_outlives_its_iterator(name, num_workers):
    """A state outlives its iterator."""
    torch.manual_seed(7)
    expected = batches(loader_of(name))[2:]
    torch.manual_seed(7)
    loader = loader_of(name, num_workers=num_workers)
    for number, _ in enumerate(loader, 1):
        if number == 2:
            break
    assert restored_batches(name, saved(loader)) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_whole_epoch_follows_broken_off_one(num_workers):
    """A broken off epoch is followed by a whole one."""
    with loader_of("DistributedRandomSampler", num_workers=num_workers) as loader:
        take(iter(loader), 2)
        loader.state_dict()
        assert len(batches(loader)) == len(loader)


# -- what loading does ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["caller", "persistent threads"])
@pytest.mark.parametrize("name", SOME)
def test_loaded_state_serves_one_iterator(name, workers):
    """A loaded state is for the next iterator alone."""
    with loader_of(name, **WORKERS[workers]) as loader:
        whole_length = len(batches(loader))
        iterator = iter(loader)
        take(iterator, 2)
        state = saved(loader)
        loader.load_state_dict(state)
        if name not in STATEFUL:  # They have one position for all their iterators.
            assert len(batches(iterator)) == whole_length - 2  # Goes on as if nothing had happened.
        assert len(batches(loader)) == whole_length - 2
        assert len(batches(loader)) == whole_length


@pytest.mark.parametrize("workers", ["caller", "persistent threads"])
@pytest.mark.parametrize("name", SOME)
def test_loader_goes_back(name, workers):
    """A loader can be taken back."""
    with loader_of(name, **WORKERS[workers]) as loader:
        iterator = iter(loader)
        take(iterator, 2)
        state = saved(loader)
        rest = batches(iterator)
        for _ in range(2):
            loader.load_state_dict(state)
            assert batches(loader) == rest


def test_empty_state_changes_nothing():
    """An empty state changes nothing."""
    loader = loader_of("in sequence")
    loader.load_state_dict({})
    assert len(batches(loader)) == len(loader)
    take(iter(loader), 2)
    state = saved(loader)
    loader.load_state_dict(state)
    loader.load_state_dict({})
    assert len(batches(loader)) == len(loader) - 2


@pytest.mark.parametrize("num_batches", [0, 2])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_loaded_state_is_saved_unchanged(name, num_batches):
    """A loaded state can be saved again as it was."""
    state, _ = interrupted_run(name, num_batches)
    assert saved(restored(name, state)) == state


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SOME)
def test_unbegun_restored_epoch_is_saved(name, num_workers):
    """A restored epoch that has not begun can be saved again."""
    state, rest = interrupted_run(name, 2, num_workers=num_workers)
    with restored(name, state, num_workers=num_workers) as loader:
        iterator = iter(loader)
        again = saved(loader)
        assert batches(iterator) == rest
    assert restored_batches(name, again, num_workers=num_workers) == rest


def test_snapshot_interval_has_no_effect():
    """Snapshots need no steps of their own."""
    state, rest = interrupted_run("in sequence", 2, snapshot_every_n_steps=1000)
    assert restored_batches("in sequence", state) == rest


# -- what a state is ------------------------------------------------------------------------------


def assert_plain(value):
    assert type(value) in (dict, list, str, int, float, bool, type(None)), value
    for part in value.values() if isinstance(value, dict) else value if type(value) is list else ():
        assert_plain(part)


def damage(value):
    """Take everything out of a state, from the inside."""
    for part in list(value.values()) if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            damage(part)
    value.clear()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_state_has_plain_types(name):
    """A state is made of plain types."""
    loader = loader_of(name)
    assert_plain(loader.state_dict())
    iterator = iter(loader)
    assert_plain(loader.state_dict())
    for _ in iterator:
        assert_plain(loader.state_dict())
    assert_plain(loader.state_dict())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_state_and_loader_share_nothing(name):
    """A state does not change with the loader nor the loader with it."""
    loader = loader_of(name)
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    damage(loader.state_dict())
    assert loader.state_dict() == kept
    rest = batches(iterator)
    assert state == kept
    assert restored_batches(name, state) == rest


@pytest.mark.parametrize("name", ARGUMENTS)
def test_loaded_state_may_be_changed(name):
    """A loaded state may be changed afterwards."""
    state, rest = interrupted_run(name, 2)
    loader = restored(name, state)
    damage(state)
    assert batches(loader) == rest


# -- epochs of samplers ---------------------------------------------------------------------------

WITH_EPOCHS = ("DistributedRandomSampler", "torch's DistributedSampler", "torchdata's sampler")


def epoch_of(name, epoch):
    loader = loader_of(name)
    loader.set_epoch(epoch)
    return batches(loader)


@pytest.mark.parametrize("name", WITH_EPOCHS)
def test_sampler_epoch_is_restored(name):
    """The epoch of the sampler is restored."""
    state, _ = interrupted_run(name, 2)
    assert restored(name, state).sampler.epoch == 3


def test_sampler_seed_is_restored():
    """The seed of the sampler is restored."""
    state, _ = interrupted_run("DistributedRandomSampler", 2)
    assert restored("DistributedRandomSampler", state).sampler.seed == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("name", WITH_EPOCHS)
def test_saved_epoch_keeps_the_place(name, has_begun, num_workers):
    """Some frameworks choose it after they have made the iterator."""
    state, rest = interrupted_run(name, 2)
    with restored(name, state, num_workers=num_workers) as loader:
        iterator = iter(loader) if has_begun else None
        loader.set_epoch(3)
        assert batches(loader if iterator is None else iterator) == rest
        loader.set_epoch(4)
        assert batches(loader) == epoch_of(name, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("name", WITH_EPOCHS)
def test_other_epoch_begins_with_warning(name, has_begun, num_workers):
    """Choosing another epoch begins that one with a warning."""
    state, _ = interrupted_run(name, 2)
    with restored(name, state, num_workers=num_workers) as loader:
        iterator = iter(loader) if has_begun else None
        loader.set_epoch(5)
        with pytest.warns(UserWarning, match="set_epoch.. has chosen another epoch"):
            seen = batches(loader if iterator is None else iterator)
    assert seen == epoch_of(name, 5)


@pytest.mark.parametrize("name", WITH_EPOCHS)
def test_chosen_epoch_is_saved(name):
    """After another epoch was chosen its state is saved."""
    state, _ = interrupted_run(name, 2)
    loader = restored(name, state)
    loader.set_epoch(5)
    again = saved(loader)
    assert restored_batches(name, again) == epoch_of(name, 5)


@pytest.mark.parametrize("name", WITH_EPOCHS)
def test_next_epoch_needs_no_warning(name):
    """Choosing the epoch after an ended one needs no warning."""
    loader = loader_of(name)
    loader.set_epoch(3)
    batches(loader)
    state = saved(loader)
    loader = restored(name, state)
    loader.set_epoch(4)
    assert batches(loader) == epoch_of(name, 4)


@pytest.mark.parametrize("name", WITH_EPOCHS)
def test_early_set_epoch_keeps_state(name):
    """Choosing the next epoch early does not change the state of this one."""
    loader = loader_of(name)
    loader.set_epoch(3)
    iterator = iter(loader)
    take(iterator, 2)
    loader.set_epoch(4)
    state = saved(loader)
    assert restored_batches(name, state) == batches(iterator)


def test_sampler_advances_after_restored_epoch():
    """A sampler without set_epoch is iterated in the epochs after the restored one."""
    state, _ = interrupted_run("DistributedRandomSampler", 2)
    loader = restored("DistributedRandomSampler", state)
    batches(loader)
    assert batches(loader) == epoch_of("DistributedRandomSampler", 4)


def test_set_epoch_finds_wrapped_sampler():
    """The loader chooses the epoch of the sampler that has epochs."""

    class Batches:
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            return iter([[0]])

    for arguments in (
        {"sampler": Torchdatas()},
        {"batch_sampler": torch.utils.data.BatchSampler(Torchdatas(), 2, drop_last=False)},
        {"batch_sampler": Batches(Torchdatas())},
    ):
        loader = DataLoader(Indices(), **arguments)
        loader.set_epoch(6)
        (sampler,) = arguments.values()
        assert getattr(sampler, "sampler", sampler).epoch == 6
    loader_of("shuffle").set_epoch(6)  # Has none.
