"""A restored loader gives the batches that the uninterrupted one would have given."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import threading
import time

import pytest
import torch
import torch.utils.data
from torch.utils.data import get_worker_info

from spdl_torch import DataLoader, DistributedDeterministicSampler, DistributedRandomSampler

from .datasets import PATIENCE_SECONDS, Graded, Indices
from .resuming import (
    ARGUMENTS,
    DRAW_FROM_THE_GLOBAL_GENERATOR,
    PROCESSES,
    SIZE,
    SOME,
    WORKERS,
    Noisy,
    all_orders,
    all_ways,
    batches,
    flat,
    generator,
    interrupted_run,
    loader_of,
    plain,
    restored,
    restored_batches,
    saved,
    take,
)

WITH_OWN_RANDOM_NUMBERS = sorted(ARGUMENTS.keys() - set(DRAW_FROM_THE_GLOBAL_GENERATOR))


# -- exactness ------------------------------------------------------------------------------------


@all_orders
def test_restored_loader_delivers_the_rest(name, num_workers):
    """A restored loader resumes with the batches that were left."""
    for num_batches in (1, 3):
        state, rest = interrupted_run(name, num_batches, num_workers=num_workers)
        assert restored_batches(name, state, num_workers=num_workers) == rest


@all_ways
def test_later_epoch_is_restored(name, workers):
    """A later epoch is restored too."""
    state, rest = interrupted_run(name, 2, num_epochs=2, **WORKERS[workers])
    assert restored_batches(name, state, **WORKERS[workers]) == rest


def run_and_save(loader, num_batches):
    """The state after so many batches of the second epoch, with torch's, and what comes then."""
    batches(loader)
    iterator = iter(loader)
    if num_batches is None:  # All, and it has been said that it was all.
        batches(iterator)
    else:
        take(iterator, num_batches)
    states = saved(loader), torch.get_rng_state()
    rest = batches(loader if num_batches is None else iterator)
    return states, [rest, torch.rand(2).tolist(), batches(loader), batches(loader)]


@pytest.mark.parametrize("num_batches", [0, 3, None])
@all_ways
def test_later_epochs_follow_restored_generator(name, workers, num_batches):
    """The epochs after it are the same too if torch's generator is restored."""
    torch.manual_seed(5)
    states, then = run_and_save(loader_of(name, **WORKERS[workers]), num_batches)
    torch.manual_seed(6)
    loader = loader_of(name, **WORKERS[workers])
    loader.load_state_dict(states[0])
    torch.set_rng_state(states[1])
    found = [batches(loader), torch.rand(2).tolist(), batches(loader), batches(loader)]
    assert found == then


def test_resuming_leaves_other_threads_draws():
    """Resuming does not touch what other threads draw from torch's generator."""
    loader = loader_of("shuffle", num_workers=2)
    take(iter(loader), 1)
    state = saved(loader)
    loader = loader_of("shuffle", num_workers=2)
    loader.load_state_dict(state)
    drawn = []

    before = torch.get_rng_state()

    def trace(frame, event, _):
        if frame.f_code is torch.utils.data.dataloader._BaseDataLoaderIter.__init__.__code__:

            def in_constructor(frame, event, _):
                if event == "return":
                    drawn.extend(torch.rand(4).tolist())
                return in_constructor

            return in_constructor
        return None

    threading_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        iter(loader)
    finally:
        sys.settrace(threading_trace)
    drawn += torch.rand(4).tolist()
    torch.set_rng_state(before)
    assert drawn == torch.rand(8).tolist()


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 5)])
def test_number_of_workers_may_change(before, after):
    """The number of workers may be different."""
    state, rest = interrupted_run("shuffle", 2, num_workers=before)
    assert restored_batches("shuffle", state, num_workers=after) == rest


@pytest.mark.parametrize("name", ["DistributedRandomSampler", "stateful sampler", "weighted"])
def test_worker_processes_are_restored(name):
    """Worker processes are restored too."""
    state, rest = interrupted_run(name, 2, **PROCESSES)
    assert restored_batches(name, state, **PROCESSES) == rest


def test_persistent_processes_resume_later_epoch():
    """Persistent worker processes are restored in a later epoch."""
    extra = PROCESSES | {"persistent_workers": True}
    state, rest = interrupted_run("shuffle", 2, num_epochs=1, **extra)
    assert restored_batches("shuffle", state, **extra) == rest


def test_threads_and_processes_exchange_states():
    """A state of worker threads is good for worker processes and back."""
    state, rest = interrupted_run("shuffle", 2, num_workers=2)
    assert restored_batches("shuffle", state, **PROCESSES) == rest
    state, rest = interrupted_run("shuffle", 2, **PROCESSES)
    assert restored_batches("shuffle", state, num_workers=2) == rest


@pytest.mark.parametrize("name", WITH_OWN_RANDOM_NUMBERS)
def test_later_epochs_match_uninterrupted_run(name):
    """The epochs after a restored one are those of the uninterrupted run."""
    torch.manual_seed(7)
    with loader_of(name, num_workers=2) as loader:
        iterator = iter(loader)
        take(iterator, 2)
        state = saved(loader)
        expected = [batches(iterator), batches(loader), batches(loader)]
    with restored(name, state, num_workers=2) as loader:
        assert [batches(loader) for _ in range(3)] == expected


class WaitsForTheFourth(Indices):
    """Gives the first sample when the fourth has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.fourth_was_read = threading.Event()

    def __getitem__(self, index):
        if index == 0:
            assert self.fourth_was_read.wait(PATIENCE_SECONDS)
        if index == 3:
            self.fourth_was_read.set()
        return super().__getitem__(index)


def test_prefetched_batches_do_not_count():
    """What was prefetched does not count."""
    dataset = WaitsForTheFourth()
    with DataLoader(dataset, num_workers=2, prefetch_factor=4) as loader:
        assert take(iter(loader), 1) == [[0]]
        assert 3 in dataset.reads
        state = saved(loader)
    with DataLoader(Indices(), num_workers=2) as loader:
        loader.load_state_dict(state)
        assert batches(loader) == [[index] for index in range(1, SIZE)]


class SplitsATensor:
    """A batch sampler that is not made of samplers, whatever its attribute is called."""

    def __init__(self):
        self.sampler = torch.arange(SIZE)

    def __iter__(self):
        return iter(self.sampler.split(3))


def test_batch_sampler_over_any_iterable():
    """A batch sampler may have anything for its sampler."""

    def loader():
        return DataLoader(Indices(), batch_sampler=SplitsATensor())

    iterator = iter(interrupted := loader())
    take(iterator, 2)
    resumed = loader()
    resumed.load_state_dict(saved(interrupted))
    assert batches(resumed) == batches(iterator) == [[6, 7, 8], *take(iter(loader()), 7)[3:]]


class SeededByWorker(Indices):
    """Derives its samples from the seed that all workers have in common, as torch advises."""

    def __getitem__(self, index):
        info = get_worker_info()
        return index, (info.seed - info.id) % 1000


@pytest.mark.parametrize("num_epochs", [0, 1])
@pytest.mark.parametrize("num_batches", [None, 0, 2], ids=["between epochs", "begun", "middle"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_own_generator_is_restored(num_epochs, num_batches, shuffle):
    """A state has the loader's own generator, so that the later epochs are the same too."""

    def loader(seed):
        return DataLoader(
            SeededByWorker(),
            shuffle=shuffle,
            num_workers=2,
            generator=generator(seed),
            collate_fn=list,
        )

    with loader(3) as uninterrupted:
        for _ in range(num_epochs):
            batches(uninterrupted)
        rest = uninterrupted
        if num_batches is not None:
            rest = iter(uninterrupted)
            take(rest, num_batches)
        state = saved(uninterrupted)
        expected = [batches(rest), batches(uninterrupted)]
    with loader(4) as resumed:
        resumed.load_state_dict(state)
        assert [batches(resumed), batches(resumed)] == expected


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("num_epochs", [0, 1])
@pytest.mark.parametrize("is_saved_between", [False, True])
def test_worker_seed_is_restored(persistent_workers, num_epochs, is_saved_between):
    """The seed of the workers is restored."""

    def loader():
        return DataLoader(
            SeededByWorker(),
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent_workers,
            collate_fn=list,
        )

    torch.manual_seed(7)
    with loader() as uninterrupted:
        for _ in range(num_epochs):
            batches(uninterrupted)
            if is_saved_between:
                uninterrupted.state_dict()
        iterator = iter(uninterrupted)
        take(iterator, 5)
        state = saved(uninterrupted)
        rest = batches(iterator)
    torch.manual_seed(999)
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert batches(resumed) == rest


def as_it_is(samples):
    return samples


@pytest.mark.parametrize("name", ARGUMENTS)
def test_random_numbers_match_uninterrupted_run(name):
    """The random numbers of the samples left are those of the uninterrupted run."""
    extra = {"dataset": Noisy(), "collate_fn": as_it_is, "persistent_workers": True}
    for num_epochs, num_batches in [(0, 2), (1, 1)]:
        state, rest = interrupted_run(
            name, num_batches, num_epochs=num_epochs, num_workers=2, **extra
        )
        assert restored_batches(name, state, num_workers=1, **extra) == rest


@pytest.mark.parametrize("name", ["shuffle", "weighted", "DistributedRandomSampler"])
def test_random_numbers_ignore_batch_size(name):
    """The random numbers of a sample do not depend on its batch."""

    def loader(batch_size):
        arguments = ARGUMENTS[name](3) | {"batch_size": batch_size, "collate_fn": list}
        return DataLoader(Noisy(), num_workers=2, **arguments)

    torch.manual_seed(7)
    with loader(3) as interrupted:
        iterator = iter(interrupted)
        take(iterator, 2)
        state = saved(interrupted)
        rest = flat(batches(iterator))
    torch.manual_seed(999)
    with loader(4) as resumed:
        resumed.load_state_dict(state)
        assert flat(batches(resumed)) == rest


# -- the training loop's random numbers -----------------------------------------------------------


@all_ways
def test_resuming_draws_no_extra_seeds(name, workers):
    """Resuming draws no more of the global generator than an ordinary epoch."""
    torch.manual_seed(999)
    possible = [torch.get_rng_state()]
    torch.empty((), dtype=torch.int64).random_()  # The seed of the workers.
    possible.append(torch.get_rng_state())
    torch.manual_seed(999)
    batches(loader_of(name))
    possible.append(torch.get_rng_state())
    torch.manual_seed(999)
    next(iter(loader_of(name).batch_sampler or [0]))  # The order alone.
    possible.append(torch.get_rng_state())

    for num_batches in (0, 2):
        state, _ = interrupted_run(name, num_batches, **WORKERS[workers])
        restored_batches(name, state, **WORKERS[workers])
        after = torch.get_rng_state()
        assert any(torch.equal(after, each) for each in possible)


MOMENTS = ("before", "begun", "in the middle", "at the end")


def epochs(cls, name, moments=(), **extra):
    """All batches of two epochs, saved at some moments, and what the generators are left in.

    The training loop draws too, as often as there are batches.
    """
    torch.manual_seed(7)
    arguments = ARGUMENTS[name](3)
    loader = cls(Indices(), **arguments, **extra)
    seen = []

    def come_to(moment):
        if moment in moments:
            loader.state_dict()

    come_to("before")
    for _ in range(2):
        iterator = iter(loader)
        come_to("begun")
        for batch in iterator:
            seen.append((plain(batch), torch.rand(()).item()))
            come_to("in the middle")
        come_to("at the end")
    own = arguments.get("generator")
    return seen, torch.get_rng_state().tolist(), own and own.get_state().tolist()


@all_orders
def test_saving_changes_no_generator(name, num_workers):
    """Saving changes neither the batches nor the generators of torch's loader."""
    expected = epochs(torch.utils.data.DataLoader, name)
    for moments in ((), *zip(MOMENTS, strict=True), MOMENTS):
        assert epochs(DataLoader, name, moments, num_workers=num_workers) == expected, moments


@pytest.mark.parametrize("name", ["shuffle", "shuffle, own generator", "weighted"])
def test_saving_keeps_persistent_workers(name):
    """They draw their seed once, and not once in an epoch."""
    extra = {"num_workers": 1, "persistent_workers": True}
    expected = epochs(torch.utils.data.DataLoader, name, **extra)
    for moments in ((), *zip(MOMENTS, strict=True), MOMENTS):
        assert epochs(DataLoader, name, moments, **extra) == expected, moments


def test_two_loaders_resume_separately():
    """Two loaders in turn are restored each to its own place."""

    def both():
        return DataLoader(Indices(), shuffle=True), loader_of("weighted", num_workers=2)

    torch.manual_seed(7)
    one, other = both()
    with other:
        pairs = zip(one, other, strict=False)
        for _ in range(2):
            next(pairs)
        states = saved(one), saved(other)
        rest = [(plain(left), plain(right)) for left, right in pairs]
    torch.manual_seed(999)
    one, other = both()
    with other:
        one.load_state_dict(states[0])
        other.load_state_dict(states[1])
        pairs = zip(one, other, strict=False)
        assert [(plain(left), plain(right)) for left, right in pairs] == rest


# -- datasets with a state ------------------------------------------------------------------------

DATASET_WORKERS = {
    **WORKERS,
    "copies": {"num_workers": 2, "copy_dataset": True},
    "processes": PROCESSES,
}


@pytest.mark.parametrize("num_batches", [0, 2, 7])
@pytest.mark.parametrize("workers", DATASET_WORKERS)
def test_dataset_state_is_restored(workers, num_batches):
    """The state of a dataset is saved and restored."""
    extra = DATASET_WORKERS[workers]
    with loader_of("in sequence", dataset=Graded(level=2), **extra) as loader:
        iterator = iter(loader)
        take(iterator, num_batches)
        state = saved(loader)
        rest = batches(iterator)
    dataset = Graded()
    with restored("in sequence", state, dataset=dataset, **extra) as loader:
        assert saved(loader) == state
        assert batches(loader) == rest
        assert dataset.level == 2


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("workers", ["threads", "copies", "processes"])
def test_running_workers_get_dataset_state(workers, persistent_workers):
    """Workers that have a dataset already are given its state too."""
    state, rest = interrupted_run("in sequence", 2, dataset=Graded(level=1))
    extra = DATASET_WORKERS[workers] | {"persistent_workers": persistent_workers}
    with loader_of("in sequence", dataset=Graded(level=3), **extra) as loader:
        batches(loader)
        loader.load_state_dict(state)
        assert batches(loader) == rest


def test_dataset_state_is_copied():
    """The state of a dataset is a copy."""
    dataset = Graded(level=1)
    loader = DataLoader(dataset)
    state = loader.state_dict()
    dataset.history.append("later")
    assert state["dataset_state"] == {"level": 1, "history": [1]}
    loader.load_state_dict(state)
    batches(loader)
    dataset.history.append("later still")
    assert state["dataset_state"] == {"level": 1, "history": [1]}


class KeepsTheGlobalGenerator(Indices):
    """Makes the training loop's random numbers a part of the state."""

    def state_dict(self):
        return {"generator": torch.get_rng_state().tolist()}

    def load_state_dict(self, state):
        torch.set_rng_state(torch.tensor(state["generator"], dtype=torch.uint8))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_batches", [None, 0, 2])
@pytest.mark.parametrize("name", ["shuffle", "weighted", "in sequence"])
def test_dataset_may_keep_global_generator(name, num_batches, num_workers):
    """A dataset that keeps the global generator makes the whole run exact."""

    def train(loader):
        return [(batch.tolist(), torch.rand(()).item()) for batch in loader]

    dataset = KeepsTheGlobalGenerator()
    torch.manual_seed(7)
    with loader_of(name, dataset=dataset, num_workers=num_workers) as loader:
        if num_batches is None:
            state = saved(loader)
            expected = train(loader) + train(loader)
        else:
            iterator = iter(loader)
            for _ in range(num_batches):
                next(iterator)
                torch.rand(())
            state = saved(loader)
            expected = train(iterator) + train(loader)
    with restored(name, state, dataset=dataset, num_workers=num_workers) as loader:
        assert train(loader) + train(loader) == expected


# -- copies of a loader ---------------------------------------------------------------------------

COPIED = {
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("how", COPIED)
@pytest.mark.parametrize("name", SOME)
def test_copied_loader_has_loaded_state(name, how):
    """A copy of a loader has the loaded state too."""
    state, rest = interrupted_run(name, 2)
    twin = COPIED[how](restored(name, state))
    assert saved(twin) == state
    assert batches(twin) == rest


@pytest.mark.parametrize("how", COPIED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_copied_loader_is_independent(how, num_workers):
    """A loader and its copy go their own ways."""
    state, rest = interrupted_run("shuffle", 2, num_workers=num_workers)
    original = restored("shuffle", state, num_workers=num_workers)
    with original, COPIED[how](original) as twin:
        iterator, twin_iterator = iter(original), iter(twin)
        assert take(iterator, 1) == rest[:1]
        assert take(twin_iterator, 3) == rest[:3]
        states = saved(original), saved(twin)
    assert restored_batches("shuffle", states[0]) == rest[1:]
    assert restored_batches("shuffle", states[1]) == rest[3:]


def test_pickled_loader_has_own_sampler():
    """A pickled loader has a sampler of its own."""
    state, rest = interrupted_run("DistributedRandomSampler", 2)
    loader = restored("DistributedRandomSampler", state)
    twin = pickle.loads(pickle.dumps(loader))
    loader.set_epoch(8)
    assert batches(twin) == rest


# -- cost -----------------------------------------------------------------------------------------

BILLION = 10**9

HUGE = {
    "SequentialSampler": dict,
    "DistributedDeterministicSampler": lambda: {
        "sampler": DistributedDeterministicSampler(BILLION, rank=0, world_size=1)
    },
    "DistributedRandomSampler": lambda: {
        "sampler": DistributedRandomSampler(BILLION, rank=0, world_size=1)
    },
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", HUGE)
def test_state_of_billion_samples_is_small(name, num_workers):
    """A state of a billion samples is small and made at once."""
    with DataLoader(
        Indices(BILLION), batch_size=64, num_workers=num_workers, **HUGE[name]()
    ) as loader:
        take(iter(loader), 5)
        seconds = []
        for _ in range(300):
            began = time.perf_counter()
            state = loader.state_dict()
            seconds.append(time.perf_counter() - began)
    assert min(seconds) < 50e-6
    assert len(json.dumps(state)) < 1000


def half_way(state):
    """As if half a billion samples had been delivered, which nobody wants to wait for."""
    assert state["done"] == [[0, 3]]
    return state | {"done": [[0, BILLION // 2]]}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", HUGE)
def test_billion_samples_resume_at_once(name, num_workers):
    """The middle of a billion samples is found at once."""

    def loader():
        return DataLoader(Indices(BILLION), num_workers=num_workers, **HUGE[name]())

    with loader() as interrupted:
        take(iter(interrupted), 3)
        state = half_way(saved(interrupted))
    with loader() as resumed:
        began = time.perf_counter()
        resumed.load_state_dict(state)
        first = take(iter(resumed), 1)
        seconds = time.perf_counter() - began
    assert seconds < 0.5
    if name != "DistributedRandomSampler":  # Nobody can tell which it is there.
        assert first == [[BILLION // 2]]


@pytest.mark.parametrize("cls", [DistributedRandomSampler, DistributedDeterministicSampler])
def test_billion_samples_reshard_at_once(cls):
    """A hundred million ranks are half-way through after five batches each."""
    num_ranks = BILLION // 10
    loader = DataLoader(Indices(BILLION), sampler=cls(BILLION, rank=7, world_size=num_ranks))
    iterator = iter(loader)
    delivered = take(iterator, 5)
    state = saved(loader)
    left = take(iterator, 1)
    resumed = DataLoader(Indices(BILLION), sampler=cls(BILLION, rank=7, world_size=num_ranks // 2))
    began = time.perf_counter()
    resumed.load_state_dict(state)
    rest = batches(resumed)
    assert time.perf_counter() - began < 0.5
    assert rest[0] == left[0]  # Both are the eighth of what is left.
    assert len(rest) == 10
    assert set(flat(rest)).isdisjoint(flat(delivered))


@all_orders
def test_delivered_samples_are_not_read(name, num_workers):
    """Resuming reads no sample that was delivered."""
    state, rest = interrupted_run(name, 3, num_workers=num_workers)
    dataset = Indices()
    assert restored_batches(name, state, dataset=dataset, num_workers=num_workers) == rest
    assert sorted(dataset.reads) == sorted(rest if name.startswith("no batching") else flat(rest))
