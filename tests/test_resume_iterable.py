"""Saving and restoring the state of loaders over iterable datasets."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import queue
from itertools import islice

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from spdl_torch import DataLoader

from .conftest import own_thread_names
from .datasets import PATIENCE_SECONDS, Squares
from .resuming import (
    Cursor,
    Nested,
    OfBoth,
    OfDataset,
    OfDatasetAtEnd,
    OfIterator,
    OwnIterator,
    Shards,
    Stateless,
)
from .tiers import pairwise

STATEFUL = [OfDataset, OfDatasetAtEnd, OfIterator, OfBoth, OwnIterator, Nested]
COUNTING = [OfDataset, OfDatasetAtEnd, OfBoth, OwnIterator]
"""Whose samples tell how many epochs have come before."""


# -- helpers --------------------------------------------------------------------------------------


def as_list(samples):
    return samples if isinstance(samples, list) else [samples]


def loader_of(dataset, **arguments):
    return DataLoader(dataset, **({"batch_size": 4, "collate_fn": as_list} | arguments))


def epoch_of(loader):
    """The batches of an epoch; the state before each of them and, before StopIteration, behind."""
    iterator = iter(loader)
    batches, states = [], [loader.state_dict()]
    for batch in iterator:
        batches.append(batch)
        states.append(loader.state_dict())
    return batches, states


def state_after(num_batches, loader):
    """The state after so many batches; the loader is closed."""
    with loader:
        iterator = iter(loader)
        for _ in range(num_batches):
            next(iterator)
        return loader.state_dict()


def rest_of(state, loader):
    """What is left of the epoch; the loader is closed."""
    with loader:
        # As in another process.
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        return list(loader)


def reading_again(number, things="samples"):
    """Expect the warning that so many are read again, or none."""
    if number == 0:
        return contextlib.nullcontext()
    message = rf"^{number} {things} of the IterableDataset are read again and thrown away"
    return pytest.warns(UserWarning, match=message)


def samples_of(batches):
    return [sample for batch in batches for sample in batch]


def num_read_again(batches):
    """How many samples without a state are read again: all but of workers known to have ended."""
    num_samples, has_ended = {}, set()
    for batch in batches:
        worker_id = batch[0] % 1000 // 100
        num_samples[worker_id] = num_samples.get(worker_id, 0) + len(batch)
        if 1 < len(batch) < 4:
            has_ended.add(worker_id)
    return sum(number for worker_id, number in num_samples.items() if worker_id not in has_ended)


def settings(*wanted):
    return [{"num_workers": n, "persistent_workers": p} for n, p in wanted]


SETTINGS = settings((0, False), (1, False), (1, True), (3, False), (3, True))
ONE_PROCESS = {"num_workers": 1, "worker_method": "multiprocessing"}
BATCHINGS = [{"batch_size": None}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}]


# -- the rest of the run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "setting", "batching"), pairwise([*STATEFUL, Stateless], SETTINGS, BATCHINGS)
)
def test_restored_batches_are_the_rest(make, setting, batching):
    loader = loader_of(make(), **setting, **batching)
    batches, states = epoch_of(loader)
    loader.close()
    assert len(batches) >= 2
    for place, state in enumerate(states):
        number = num_read_again(batches[:place]) if make is Stateless else 0
        with reading_again(number):
            rest = rest_of(state, loader_of(make(), **setting, **batching))
        assert rest == batches[place:]


@pytest.mark.parametrize(
    ("make", "setting", "batching"),
    pairwise([*STATEFUL, Stateless], settings((1, False), (3, False), (3, True)), BATCHINGS),
)
def test_unordered_rest_comes_once(make, setting, batching):
    """Without order every batch of the rest comes once and in the order of its worker."""
    loader = loader_of(make(), in_order=False, **setting, **batching)
    batches, states = epoch_of(loader)
    loader.close()
    for place, state in enumerate(states):
        number = num_read_again(batches[:place]) if make is Stateless else 0
        with reading_again(number):
            rest = rest_of(state, loader_of(make(), in_order=False, **setting, **batching))
        assert sorted(rest) == sorted(batches[place:])
        for worker_id in range(3):
            of_worker = [batch for batch in rest if batch[0] % 1000 // 100 == worker_id]
            assert of_worker == sorted(of_worker)


def shuffled_pipe():
    return IterableWrapper(range(12)).shuffle().sharding_filter()


@pytest.mark.parametrize(
    ("setting", "batch_size", "in_order"), pairwise(SETTINGS, [None, 2], [True, False])
)
def test_datapipe_shuffle_is_restored(setting, batch_size, in_order):
    """A datapipe is shuffled as it was."""
    arguments = {**setting, "batch_size": batch_size, "in_order": in_order}
    loader = loader_of(shuffled_pipe(), **arguments)
    batches, states = epoch_of(loader)
    loader.close()
    assert sorted(samples_of(batches)) == list(range(12))
    order = list if in_order else sorted
    for place, state in enumerate(states):
        # All batches are full, so that no worker is known to have ended.
        with reading_again(len(samples_of(batches[:place]))):
            rest = rest_of(state, loader_of(shuffled_pipe(), **arguments))
        assert order(rest) == order(batches[place:])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("num_epochs", [0, 1])
def test_undrawn_datapipe_shuffle_follows_generator(num_epochs, setting):
    """A datapipe is shuffled as it will be if the state is of an epoch to come."""
    loader = loader_of(shuffled_pipe(), **setting)
    with loader:
        for _ in range(num_epochs):
            list(loader)
        state, rng_state = loader.state_dict(), torch.get_rng_state()
        batches = list(loader)
    torch.set_rng_state(rng_state)
    assert rest_of(state, loader_of(shuffled_pipe(), **setting)) == batches


class ShuffledBySeed(IterableDataset):
    """Without a state, but in the order of its worker's seed."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(get_worker_info().seed)
        return iter(torch.randperm(20, generator=generator).tolist())


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("before", ["nothing", "an epoch", "a part of an epoch"])
def test_workers_keep_their_seeds(before, persistent_workers):
    """Workers have the seeds that they had."""
    arguments = {"num_workers": 2, "persistent_workers": persistent_workers}
    with loader_of(ShuffledBySeed(), **arguments) as loader:
        if before != "nothing":
            for _ in islice(loader, None if before == "an epoch" else 1):
                pass
        batches, states = epoch_of(loader)
    with reading_again(12):
        assert rest_of(states[3], loader_of(ShuffledBySeed(), **arguments)) == batches[3:]


class Drawing(OfIterator):
    """Every sample is drawn, by torch's default generator."""

    def read(self, position):
        return torch.randint(10**9, ()).item()


@pytest.mark.parametrize("setting", settings((1, False), (1, True), (3, False), (3, True)))
@pytest.mark.parametrize("num_epochs", [0, 1])
def test_workers_draw_the_same_numbers(num_epochs, setting):
    """Workers draw the random numbers that they would have drawn."""
    with loader_of(Drawing(), **setting) as loader:
        for _ in range(num_epochs):
            list(loader)
        batches, states = epoch_of(loader)
    for place, state in enumerate(states):
        assert rest_of(state, loader_of(Drawing(), **setting)) == batches[place:]


class ShuffleBuffer(IterableDataset):
    """Without a state; what is in the buffer depends on all that was drawn before."""

    def __iter__(self):
        samples = list(range(5))
        for sample in range(5, 20):
            place = torch.randint(len(samples), ()).item()
            yield samples[place]
            samples[place] = sample
        yield from samples


@pytest.mark.parametrize(
    ("make", "setting", "num_batches"),
    pairwise([OfIterator, shuffled_pipe, ShuffleBuffer], [*SETTINGS, ONE_PROCESS], [0, 2]),
)
@pytest.mark.filterwarnings("ignore:.* read again")
def test_resuming_draws_nothing_again(make, setting, num_batches):
    """Resuming draws nothing from torch's generator that had been drawn."""
    with loader_of(make(), **setting) as loader:
        list(loader)
        iterator = iter(loader)
        for _ in range(num_batches):
            next(iterator)
        state, generator_state = loader.state_dict(), torch.get_rng_state()
        list(iterator)
        drawn = torch.rand(2)
    torch.set_rng_state(generator_state)
    rest_of(state, loader_of(make(), **setting))
    assert torch.equal(torch.rand(2), drawn)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_samples_read_again_draw_the_same(num_workers):
    """What is read again draws the random numbers that it drew."""
    batches, states = epoch_of(loader_of(ShuffleBuffer(), num_workers=num_workers))
    assert batches[0] != [0, 1, 2, 3]
    place = 2 * num_workers
    with reading_again(8 * num_workers):
        rest = rest_of(states[place], loader_of(ShuffleBuffer(), num_workers=num_workers))
    assert rest == batches[place:]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_broken_off_loop_resumes(num_workers):
    """A loop that was left can be resumed."""
    loader = loader_of(OfDataset(), num_workers=num_workers)
    for batch in loader:
        if batch[-1] == 7:
            break
    assert own_thread_names() == []
    rest = rest_of(loader.state_dict(), loader_of(OfDataset(), num_workers=num_workers))
    assert rest == [[8, 9]]


# -- what is read, and by whom --------------------------------------------------------------------


def values_in(reads):
    return sorted(reads.get_nowait() for _ in range(reads.qsize()))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [OfDataset, OfDatasetAtEnd, OfIterator, OfBoth, OwnIterator])
def test_stateful_dataset_reads_the_rest(make, setting):
    """What has a state reads only what is left."""
    batches, states = epoch_of(loader := loader_of(make(), **setting))
    loader.close()
    for place, state in enumerate(states):
        reads = queue.SimpleQueue()
        rest_of(state, loader_of(make(reads=reads), **setting))
        assert values_in(reads) == sorted(samples_of(batches[place:]))


def test_stateless_dataset_is_read_again():
    """What has no state is read from the start."""
    state = state_after(3, loader_of(Stateless((8, 8, 8)), num_workers=3))
    reads = queue.SimpleQueue()
    with reading_again(12):
        rest_of(state, loader_of(Stateless((8, 8, 8), reads), num_workers=3))
    assert values_in(reads) == [100 * worker_id + n for worker_id in range(3) for n in range(8)]


def test_warning_has_advice():
    """The warning says how to avoid reading again."""
    loader = loader_of(Stateless())
    loader.load_state_dict(state_after(1, loader_of(Stateless())))
    with pytest.warns(UserWarning, match=r"^4 samples .*state_dict\(\) and load_state_dict\(\)"):
        iter(loader)


def test_warning_points_at_user_line():
    """The warning points at the line that iterates."""
    for num_workers in (0, 1):
        loader = loader_of(Stateless(), num_workers=num_workers)
        loader.load_state_dict(state_after(1, loader_of(Stateless(), num_workers=num_workers)))
        with reading_again(4) as warned:
            iter(loader)
        assert warned[0].filename == __file__


def test_workers_resume_in_turn():
    """Every worker resumes where it was itself and they take turns as before."""
    sizes = (6, 8, 4)
    loader = loader_of(OfDataset(sizes), num_workers=3, batch_size=2)
    state = state_after(5, loader)  # Two of worker 0, two of worker 1, one of worker 2.
    rest = rest_of(state, loader_of(OfDataset(sizes), num_workers=3, batch_size=2))
    assert rest == [[202, 203], [4, 5], [104, 105], [106, 107]]


@pytest.mark.parametrize("first_size", [2, 4])
def test_ended_worker_stays_ended(first_size):
    """Whether its end was found out with its last batch or would have been with the next."""
    sizes = (first_size, 12)
    state = state_after(3, loader_of(OfDataset(sizes), num_workers=2))
    reads = queue.SimpleQueue()
    rest = rest_of(state, loader_of(OfDataset(sizes, reads), num_workers=2))
    assert rest == [[108, 109, 110, 111]]
    assert values_in(reads) == [108, 109, 110, 111]


@pytest.mark.parametrize("make", [OfDataset, OfIterator, OwnIterator, Stateless])
def test_prefetched_samples_do_not_count(make):
    """What workers have prefetched is not counted."""
    reads = queue.SimpleQueue()
    sizes = (20, 20)
    loader = loader_of(make(sizes, reads), num_workers=2, batch_size=2, prefetch_factor=4)
    iterator = iter(loader)
    assert next(iterator) == [0, 1]
    # Both workers make four batches ahead, without being asked.
    for _ in range(2 * 4 * 2):
        reads.get(timeout=PATIENCE_SECONDS)
    state = loader.state_dict()
    rest = list(iterator)
    assert rest[0] == [100, 101]
    with reading_again(2 if make is Stateless else 0):
        assert rest_of(state, loader_of(make(sizes), num_workers=2, batch_size=2)) == rest


@pytest.mark.parametrize("make", [OfDataset, OfIterator, OwnIterator, Nested])
@pytest.mark.parametrize("num_more", [0, 1, 2, 3])
def test_state_before_all_workers_delivered(make, num_more):
    """A state asked for before every worker has delivered after a resume."""
    arguments = {"num_workers": 3, "batch_size": 2}
    sizes = (6, 6, 6)
    batches, states = epoch_of(loader_of(make(sizes), **arguments))
    for place in range(len(batches) - num_more):
        resumed = loader_of(make(sizes), **arguments)
        resumed.load_state_dict(states[place])
        state = state_after(num_more, resumed)
        rest = rest_of(state, loader_of(make(sizes), **arguments))
        assert rest == batches[place + num_more :]


# -- states are values ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_state_is_fixed_while_loading(num_workers):
    """A state does not change while the loader continues."""
    loader = loader_of(Nested(), num_workers=num_workers, batch_size=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    pickled = pickle.dumps(state)
    assert len(list(iterator)) > 3
    assert pickle.dumps(state) == pickled


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_state_is_fixed_after_loading_it(num_workers):
    """A state does not change while another loader resumes from it."""
    state = state_after(2, loader_of(Nested(), num_workers=num_workers, batch_size=1))
    pickled = pickle.dumps(state)
    rests = []
    for _ in range(2):
        loader = loader_of(Nested(), num_workers=num_workers, batch_size=1)
        loader.load_state_dict(state)
        rests.append(list(loader))
    assert pickle.dumps(state) == pickled
    assert rests[0] == rests[1]


def spoil(state):
    for worker in state["workers"]:
        worker["dataset"]["position"] = 1
        worker["num_samples"] = 1
    state["workers"].pop()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_changed_state_leaves_its_loader(num_workers):
    """Changing a state does not change the loader that returned it."""
    loader = loader_of(OfDataset(), num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    spoil(state)
    assert loader.state_dict() == kept
    del iterator


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_changed_state_leaves_loading_loader(num_workers):
    """Changing a state does not change the loader that has loaded it."""
    batches, states = epoch_of(loader_of(OfDataset(), num_workers=num_workers))
    loader = loader_of(OfDataset(), num_workers=num_workers)
    loader.load_state_dict(states[1])
    spoil(states[1])
    assert list(loader) == batches[1:]


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("make", [OfDataset, OfBoth, Stateless])
def test_state_goes_through_json(make, num_workers):
    """A state goes through JSON."""
    batches, states = epoch_of(loader_of(make(), num_workers=num_workers))
    state = json.loads(json.dumps(states[1]))
    assert state == states[1]
    with reading_again(4 if make is Stateless else 0):
        assert rest_of(state, loader_of(make(), num_workers=num_workers)) == batches[1:]


def test_pickled_loader_has_loaded_state():
    """A pickled loader resumes from the state it has loaded."""
    loader = loader_of(OfDataset(), num_workers=3)
    loader.load_state_dict(state_after(2, loader_of(OfDataset(), num_workers=3)))
    assert list(pickle.loads(pickle.dumps(loader))) == [[4, 5, 6, 7], [8, 9]]


# -- the end of an epoch, and the next one --------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [*STATEFUL, Stateless])
def test_next_epoch_follows_ended_one(make, setting):
    """After the end of an epoch comes the next in full."""
    loader = loader_of(make(), **setting)
    with loader:
        list(loader)
        state = loader.state_dict()
        later = [list(loader) for _ in range(2)]
    assert all(later)
    resumed = loader_of(make(), **setting)
    resumed.load_state_dict(state)
    with resumed:
        assert [list(resumed) for _ in range(2)] == later


@pytest.mark.parametrize("setting", settings((0, False), (1, True), (3, True)))
@pytest.mark.parametrize("make", COUNTING)
def test_living_dataset_counts_epochs(make, setting):
    """The tests beside this one compare two runs, which could be wrong in the same way."""
    state = {}
    for num_epochs in range(3):
        loader = loader_of(make(), **setting)
        with loader:
            loader.load_state_dict(state)
            assert {batch[0] // 1000 for batch in loader} == {num_epochs}
            state = loader.state_dict()


@pytest.mark.parametrize(
    ("make", "setting", "num_epochs"), pairwise([*STATEFUL, Stateless], SETTINGS, [0, 1])
)
def test_whole_epoch_follows_resumed_one(make, setting, num_epochs):
    """An epoch that was resumed is followed by a whole one."""
    with loader_of(make(), **setting) as loader:
        for _ in range(num_epochs):
            list(loader)
        batches, states = epoch_of(loader)
        following = list(loader)
    assert following
    # From the last states, where workers have ended, there is most to be forgotten.
    for place in (1, len(batches) - 1, len(batches)):
        number = num_read_again(batches[:place]) if make is Stateless else 0
        with loader_of(make(), **setting) as resumed, reading_again(number):
            resumed.load_state_dict(states[place])
            assert list(resumed) == batches[place:]
            assert list(resumed) == following


@pytest.mark.parametrize(
    ("make", "setting", "is_asked_between"),
    pairwise([*STATEFUL, Stateless], SETTINGS, [False, True]),
)
def test_second_epoch_resumes(make, setting, is_asked_between):
    """The second epoch can be resumed too."""
    loader = loader_of(make(), **setting)
    with loader:
        list(loader)
        if is_asked_between:
            loader.state_dict()
        batches, states = epoch_of(loader)
    for place, state in enumerate(states):
        number = num_read_again(batches[:place]) if make is Stateless else 0
        with reading_again(number):
            assert rest_of(state, loader_of(make(), **setting)) == batches[place:]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_epoch_after_restored_end_resumes(num_workers):
    """An epoch begun from the end of another can be resumed."""
    setting = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = loader_of(OfIterator(), **setting)
    list(loader)
    end = loader.state_dict()
    loader.close()
    second = loader_of(OfIterator(), **setting)
    second.load_state_dict(end)
    batches, states = epoch_of(second)
    second.close()
    for place, state in enumerate(states):
        assert rest_of(state, loader_of(OfIterator(), **setting)) == batches[place:]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_end_state_is_repeatable(num_workers):
    """The state of the end is the same when asked for twice."""
    loader = loader_of(OfDataset(), num_workers=num_workers)
    list(loader)
    assert loader.state_dict() == loader.state_dict()


@pytest.mark.parametrize("is_asked_between", [False, True])
def test_changes_between_epochs_are_kept(is_asked_between):
    """What is done to the dataset between two epochs is not undone."""
    loader = loader_of(OfDataset())
    list(loader)
    if is_asked_between:
        loader.state_dict()
    loader.dataset.epoch = 7
    assert list(loader) == [[7000, 7001, 7002, 7003], [7004, 7005, 7006, 7007], [7008, 7009]]


def test_empty_dataset_stays_empty():
    """An empty dataset stays empty when its end is restored."""
    loader = loader_of(OfDatasetAtEnd((0,)))
    assert list(loader) == []
    assert rest_of(loader.state_dict(), loader_of(OfDatasetAtEnd((0,)))) == []


# -- before the first batch -----------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [*STATEFUL, Stateless])
def test_state_before_iteration_is_whole_epoch(make, setting):
    """A state from before any iteration is a whole epoch."""
    loader = loader_of(make(), **setting)
    state = loader.state_dict()
    with loader:
        batches = list(loader)
    assert rest_of(state, loader_of(make(), **setting)) == batches


def test_saving_starts_no_worker():
    """Asking for a state starts no worker."""
    loader = loader_of(OfDataset(), num_workers=3)
    loader.state_dict()
    iterator = iter(loader)
    loader.state_dict()
    assert own_thread_names() == []
    del iterator


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("num_batches", [None, 0, 1])
def test_first_position_is_saved(num_batches, num_workers):
    """Where the dataset stood at first is part of the state."""
    dataset = OfDataset((8, 8, 8))
    dataset.load_state_dict({"position": 5, "epoch": 7})
    loader = loader_of(dataset, num_workers=num_workers, batch_size=1)
    with loader:
        iterator = None if num_batches is None else iter(loader)
        for _ in range(num_batches or 0):
            next(iterator)
        state = loader.state_dict()
        rest = list(loader if iterator is None else iterator)
    fresh = OfDataset((8, 8, 8))
    assert rest_of(state, loader_of(fresh, num_workers=num_workers, batch_size=1)) == rest


class OnlyWhileIterated(Shards):
    """Has no state before `__iter__` has made one."""

    start = 0

    def __iter__(self):
        self.positions = iter(range(self.start, self.size))
        self.start = 0
        return (self.read(position) for position in self.positions)

    def state_dict(self):
        return {"num_left": self.positions.__length_hint__()}

    def load_state_dict(self, state):
        self.start = self.size - state["num_left"]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_state_only_while_iterated(num_workers):
    """A dataset may have a state only while it is iterated."""
    batches, states = epoch_of(loader_of(OnlyWhileIterated(), num_workers=num_workers))
    for place, state in enumerate(states):
        rest = rest_of(state, loader_of(OnlyWhileIterated(), num_workers=num_workers))
        assert rest == batches[place:]
    state = loader_of(OnlyWhileIterated(), num_workers=num_workers).state_dict()
    assert rest_of(state, loader_of(OnlyWhileIterated(), num_workers=num_workers)) == batches


@pytest.mark.parametrize("num_workers", [0, 3])
def test_empty_dict_changes_nothing(num_workers):
    """An empty dict changes nothing."""
    batches, states = epoch_of(loader_of(OfDataset(), num_workers=num_workers))
    loader = loader_of(OfDataset(), num_workers=num_workers)
    loader.load_state_dict({})
    assert list(loader) == batches
    loader = loader_of(OfDataset(), num_workers=num_workers)
    loader.load_state_dict(states[1])
    loader.load_state_dict({})
    assert list(loader) == batches[1:]


def test_empty_dict_keeps_persistent_workers():
    """An empty dict leaves persistent workers alone."""
    loader = loader_of(OfDataset(), num_workers=2, persistent_workers=True)
    with loader:
        list(loader)
        loader.load_state_dict({})
        assert len(own_thread_names()) == 2
        assert next(iter(loader)) == [1000, 1001, 1002, 1003]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [OfDataset, OfDatasetAtEnd, OfIterator, OfBoth, OwnIterator])
def test_loaded_state_is_returned_unchanged(make, setting):
    """A loaded state is returned until a batch is delivered."""
    loader = loader_of(make(), **setting)
    with loader:
        _, states = epoch_of(loader)
        states.append(loader.state_dict())
    for state in states:
        resumed = loader_of(make(), **setting)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
    resumed = loader_of(make(), **setting)
    resumed.load_state_dict(states[1])
    iterator = iter(resumed)
    assert resumed.state_dict() == states[1]
    del iterator
    resumed.close()


@pytest.mark.parametrize("make", [*STATEFUL, Stateless])
@pytest.mark.parametrize("num_more", [0, 2, None])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_running_workers_go_back(make, num_workers, num_more):
    """Running workers go back to a loaded state."""
    loader = loader_of(make(), num_workers=num_workers, persistent_workers=True, batch_size=2)
    with loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        for _ in islice(iterator, num_more):
            pass
        loader.load_state_dict(state)
        whole = list(loader_of(make(), num_workers=num_workers, batch_size=2))
        with reading_again(2 if make is Stateless else 0):
            assert list(loader) == whole[1:]
        del iterator
        assert len(own_thread_names()) == num_workers


@pytest.mark.parametrize("make", [OfDataset, OfDatasetAtEnd, OfIterator, OfBoth, OwnIterator])
def test_caller_dataset_goes_back(make):
    """The dataset of the calling thread goes back to a loaded state."""
    loader = loader_of(make())
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    loader.load_state_dict(state)
    assert list(loader) == rest


# -- other arguments than those of the run that was saved -----------------------------------------


@pytest.mark.parametrize("make", [OfDataset, OfIterator, OwnIterator, Stateless])
def test_batch_size_may_change(make):
    """The rest can be read in batches of another size."""
    state = state_after(1, loader_of(make()))
    with reading_again(4 if make is Stateless else 0):
        rest = rest_of(state, loader_of(make(), batch_size=5))
    assert rest == [[4, 5, 6, 7, 8], [9]]

    sizes = (9, 6, 4)
    state = state_after(2, loader_of(make(sizes), num_workers=3))
    with reading_again(8 if make is Stateless else 0):
        rest = rest_of(state, loader_of(make(sizes), num_workers=3, batch_size=3))
    assert rest == [[200, 201, 202], [4, 5, 6], [104, 105], [203], [7, 8]]
    with reading_again(8 if make is Stateless else 0):
        rest = rest_of(state, loader_of(make(sizes), num_workers=3, batch_size=None))
    assert rest[:6] == [[200], [4], [104], [201], [5], [105]]


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("make", [*STATEFUL, Stateless])
def test_caller_and_one_worker_exchange_states(make, before, after):
    """One worker resumes for the calling thread and the other way round."""
    batches, states = epoch_of(loader_of(make(), num_workers=before))
    for place, state in enumerate(states):
        number = num_read_again(batches[:place]) if make is Stateless else 0
        with reading_again(number):
            assert rest_of(state, loader_of(make(), num_workers=after)) == batches[place:]


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (1, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("make", [OfDataset, Stateless])
def test_other_number_of_workers_is_refused(make, before, after):
    """Another number of workers is refused and the loader stays usable."""
    state = state_after(1, loader_of(make(), num_workers=before))
    loader = loader_of(make(), num_workers=after)
    message = rf"num_workers={before}, but this DataLoader has {after}\b.* Set num_workers={before}"
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(state)
    assert list(loader) == list(loader_of(make(), num_workers=after))


def test_undelivered_epoch_fits_any_workers():
    """Any number of workers can begin an epoch of which nothing was delivered."""
    loader = loader_of(OfIterator(), num_workers=3)
    assert rest_of(loader.state_dict(), loader_of(OfIterator(), num_workers=1)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_refused_state_changes_nothing(persistent_workers):
    """A state that does not fit leaves the loader as it was."""
    loader = loader_of(OfDataset(), num_workers=3, persistent_workers=persistent_workers)
    batches, states = epoch_of(loader_of(OfDataset(), num_workers=3))
    unfit = state_after(1, loader_of(OfDataset(), num_workers=1))
    with loader:
        loader.load_state_dict(states[1])
        with pytest.raises(ValueError, match="num_workers=1"):
            loader.load_state_dict(unfit)
        iterator = iter(loader)
        assert next(iterator) == batches[1]
        with pytest.raises(ValueError, match="num_workers=1"):
            loader.load_state_dict(unfit)
        assert loader.state_dict() == states[2]
        assert list(iterator) == batches[2:]


@pytest.mark.parametrize(
    ("before", "after"), [("thread", "multiprocessing"), ("multiprocessing", "thread")]
)
def test_other_worker_method_is_refused(before, after):
    """A state of another kind of workers is refused."""
    state = loader_of(OfDataset(), num_workers=1, worker_method=before).state_dict()
    loader = loader_of(OfDataset(), num_workers=1, worker_method=after)
    with pytest.raises(ValueError, match=f'worker_method="{before}", but .* has "{after}"'):
        loader.load_state_dict(state)


def test_other_dataset_kind_is_refused():
    """A state of a map-style dataset is refused and the other way round."""
    iterable, mapped = loader_of(OfDataset()), loader_of(Squares())
    with pytest.raises(ValueError, match=r"of a map-style dataset, but .* has an IterableDataset"):
        iterable.load_state_dict(mapped.state_dict())
    with pytest.raises(ValueError, match=r"of an IterableDataset, but .* has a map-style dataset"):
        mapped.load_state_dict(iterable.state_dict())
    assert len(list(iterable)) == 3


def test_incomplete_state_is_refused():
    """A state without one of its parts is refused."""
    state = state_after(2, loader_of(OfDataset(), num_workers=3))
    loader = loader_of(OfDataset(), num_workers=3)
    # What is None is not used: only a datapipe has a seed for shuffling.
    keys = [key for key, value in state.items() if value is not None]
    assert {"dataset", "num_workers", "base_seed", "workers"} <= set(keys)
    for key in keys:
        part = {other: value for other, value in state.items() if other != key}
        with pytest.raises(ValueError, match=f"has no '{key}'"):
            loader.load_state_dict(part)
    assert len(list(loader)) == 4


def test_incomplete_bookmark_is_refused():
    """A state without a part of one worker is refused."""
    state = state_after(2, loader_of(OfDataset(), num_workers=3))
    loader = loader_of(OfDataset(), num_workers=3)
    # Without the dataset's state, it is the state of a dataset that has none.
    keys = set(state["workers"][1]) - {"dataset"}
    assert {"worker", "num_samples", "has_ended"} <= keys
    for key in keys:
        part = copy.deepcopy(state)
        del part["workers"][1][key]
        with pytest.raises(ValueError, match=rf"\['workers'\]\[1\] has no '{key}'"):
            loader.load_state_dict(part)
    assert len(list(loader)) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_datapipe_state_needs_its_seed(num_workers):
    """A state of a datapipe without its seed is refused."""
    state = state_after(1, loader_of(shuffled_pipe(), num_workers=num_workers))
    del state["shared_seed"]
    with pytest.raises(ValueError, match="has no 'shared_seed'"):
        loader_of(shuffled_pipe(), num_workers=num_workers).load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (None, TypeError, "must be a dict"),
        ([], TypeError, "must be a dict"),
        ({"model": 1}, ValueError, "not made by spdl_torch.*'model'"),
    ],
)
def test_no_state_is_refused(state, error, message):
    """A value that is not a state is refused."""
    with pytest.raises(error, match=message):
        loader_of(OfDataset()).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lost_dataset_state_is_refused(num_workers):
    """A state of a dataset that has none any more is refused."""
    state = state_after(2, loader_of(OfDataset(), num_workers=num_workers))
    loader = loader_of(Stateless(), num_workers=num_workers)
    with pytest.raises((AttributeError, ValueError), match="load_state_dict"):
        rest_of(state, loader)


# -- worker processes -----------------------------------------------------------------------------


def processes_of(dataset, **arguments):
    return loader_of(dataset, **({"num_workers": 2} | arguments), worker_method="multiprocessing")


PAIR = (10, 4)


@pytest.mark.parametrize(("make", "num_batches"), [(OfDataset, 1), (Stateless, 4)])
def test_processes_read_again(make, num_batches):
    """Worker processes read again what they had delivered."""
    whole = list(loader_of(make(PAIR), num_workers=2))
    state = state_after_in_processes(num_batches, processes_of(make(PAIR)))
    loader = processes_of(make(PAIR))
    loader.load_state_dict(state)
    with reading_again(num_batches, "batches"):
        assert list(loader) == whole[num_batches:]


def state_after_in_processes(num_batches, loader):
    # Without close: whoever drops the iterator ends torch's processes.
    iterator = iter(loader)
    for _ in range(num_batches):
        next(iterator)
    return loader.state_dict()


def test_persistent_processes_go_back():
    """Persistent worker processes go back to a loaded state."""
    loader = processes_of(Stateless(PAIR), persistent_workers=True)
    state = state_after_in_processes(1, loader)
    loader.load_state_dict(state)
    with reading_again(1, "batches"):
        rest = list(loader)
    whole = list(loader)
    assert (len(rest), rest) == (3, whole[1:])


def test_processes_begin_next_epoch():
    """After the end of an epoch worker processes begin the next in full."""
    loader = processes_of(Stateless(PAIR))
    batches = list(loader)
    resumed = processes_of(Stateless(PAIR))
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == batches


def test_processes_resume_second_epoch():
    """The second epoch of worker processes can be resumed."""
    loader = processes_of(Stateless(PAIR))
    list(loader)
    loader.state_dict()
    state = state_after_in_processes(1, loader)
    resumed = processes_of(Stateless(PAIR))
    resumed.load_state_dict(state)
    with reading_again(1, "batches"):
        rest = list(resumed)
    assert rest == [[100, 101, 102, 103], [4, 5, 6, 7], [8, 9]]


def test_other_number_of_processes_is_refused():
    """Another number of worker processes is refused."""
    state = state_after_in_processes(1, processes_of(Stateless(PAIR)))
    for num_workers in (1, 0):
        loader = processes_of(Stateless(PAIR), num_workers=num_workers)
        with pytest.raises(ValueError, match=rf"num_workers=2, but .* has {num_workers}\b"):
            loader.load_state_dict(state)


def test_caller_and_processes_refuse_states():
    """The calling thread and worker processes refuse each other's states."""
    state = state_after(1, loader_of(Stateless()))
    with pytest.raises(ValueError, match=r'worker_method="thread", but .* has "multiprocessing"'):
        processes_of(Stateless(), num_workers=1).load_state_dict(state)
    state = state_after_in_processes(1, processes_of(Stateless(), num_workers=1))
    with pytest.raises(ValueError, match=r'worker_method="multiprocessing", but .* has "thread"'):
        processes_of(Stateless(), num_workers=0).load_state_dict(state)


def test_processes_refuse_other_batch_size():
    """Worker processes refuse another batch size because they count batches."""
    state = state_after_in_processes(1, processes_of(Stateless(PAIR)))
    with pytest.raises(ValueError, match="batch_size=4, but this DataLoader has 2"):
        processes_of(Stateless(PAIR), batch_size=2).load_state_dict(state)


def test_processes_restore_datapipe_shuffle():
    """Worker processes shuffle a datapipe as they did."""
    loader = processes_of(shuffled_pipe(), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    loader.load_state_dict(state)
    with reading_again(1, "batches"):
        assert list(loader) == rest


def test_unordered_processes_have_no_state():
    """Worker processes without order cannot say how far they are."""
    loader = processes_of(Stateless(PAIR), in_order=False)
    with pytest.raises(RuntimeError, match='worker_method="thread" or in_order=True'):
        loader.state_dict()


# -- errors ---------------------------------------------------------------------------------------


class FailsToSave(OfIterator):
    """Raises in `state_dict`, once or after every read from some place on."""

    def __init__(self, sizes, bad_position, error, is_lasting=False):
        super().__init__(sizes)
        self.bad_position = bad_position
        self.error = error
        self.is_lasting = is_lasting

    def __iter__(self):
        return FailingCursor(self)


class FailingCursor(Cursor):
    def state_dict(self):
        bad_position = self.dataset.bad_position
        if self.position == bad_position or (
            self.dataset.is_lasting and self.position > bad_position
        ):
            raise self.dataset.error
        return super().state_dict()


def outcomes_of(iterator, most=30):
    """The batches of an iterator, with the types of the errors in their places."""
    outcomes = []
    for _ in range(most):
        try:
            outcomes.append(next(iterator))
        except StopIteration:
            return outcomes
        except Exception as error:
            outcomes.append(type(error))
    raise AssertionError(f"the epoch does not end: {outcomes[-3:]}")


@pytest.mark.parametrize("error", [LookupError("bad"), StopIteration("bad")])
def test_state_dict_error_reaches_the_loop(error):
    """An error in state_dict reaches the loop at its batch."""
    loader = loader_of(FailsToSave((12, 12), 8, error), num_workers=2)
    expected = RuntimeError if isinstance(error, StopIteration) else LookupError
    assert outcomes_of(iter(loader)) == [
        [0, 1, 2, 3],
        [100, 101, 102, 103],
        expected,
        expected,
        [8, 9, 10, 11],
        [108, 109, 110, 111],
    ]


def test_epoch_ends_despite_state_dict_errors():
    """An epoch ends even if every state_dict raises."""
    dataset = FailsToSave((8, 8), 0, LookupError(), is_lasting=True)
    loader = loader_of(dataset, num_workers=2)
    with loader:
        outcomes = outcomes_of(iter(loader))
    assert set(outcomes) == {LookupError}


def test_state_dict_error_reaches_the_caller():
    """An error in state_dict of the calling thread reaches the code that asks for the state."""
    loader = loader_of(FailsToSave((12,), 4, LookupError("bad")))
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(LookupError, match="bad"):
        loader.state_dict()
    assert next(iterator) == [4, 5, 6, 7]
    rest = rest_of(loader.state_dict(), loader_of(OfIterator((12,))))
    assert rest == [[8, 9, 10, 11]]


def test_caller_asks_for_states_lazily():
    """The calling thread asks for no state that is not saved."""
    loader = loader_of(FailsToSave((8,), 0, LookupError(), is_lasting=True))
    for _ in range(2):
        assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


class FailsToLoad(OfDataset):
    """Worker 1, or the calling thread, cannot be given its state back."""

    def load_state_dict(self, state):
        if self.worker_id == 1 or get_worker_info() is None:
            raise LookupError("bad")
        super().load_state_dict(state)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_loading_error_reaches_the_loop(persistent_workers):
    """An error in load_state_dict reaches the loop at its worker's batch."""
    sizes = (8, 8, 8)
    state = state_after(3, loader_of(OfDataset(sizes), num_workers=3))
    loader = loader_of(FailsToLoad(sizes), num_workers=3, persistent_workers=persistent_workers)
    with loader:
        loader.load_state_dict(state)
        assert outcomes_of(iter(loader)) == [[4, 5, 6, 7], LookupError, [204, 205, 206, 207]]
        # Without the state, the workers' datasets are where the epoch has left them.
        again = list(loader)
        assert [batch[0] % 1000 for batch in again] == [0, 100, 200, 4, 104, 204]


def test_loading_error_reaches_the_caller():
    """An error in load_state_dict of the calling thread reaches the code that iterates."""
    loader = loader_of(FailsToLoad())
    loader.load_state_dict(state_after(1, loader_of(OfDataset())))
    with pytest.raises(LookupError, match="bad"):
        iter(loader)
    assert len(list(loader)) == 3


class FailsToRead(OfIterator):
    """Cannot read one sample of worker 1 or, alone, of its own; goes on behind it."""

    def read(self, position):
        if position == 1 and self.worker_id == (1 if self.sizes[1:] else 0):
            raise LookupError
        return super().read(position)


class FailsToReadStateless(FailsToRead):
    def __iter__(self):
        # A generator would not go on.
        return map(self.read, range(self.size))


@pytest.mark.parametrize("make", [FailsToRead, FailsToReadStateless])
@pytest.mark.parametrize(
    ("num_workers", "outcomes"),
    [
        (0, [[0], LookupError, [2], [3]]),
        (1, [[0], LookupError, [2], [3]]),
        (3, [[0], [100], [200], [1], LookupError, [201], [2], [102], [202], [3], [103], [203]]),
    ],
)
def test_failed_sample_is_not_repeated(make, num_workers, outcomes):
    """A sample that could not be read is not delivered again after its error."""

    def loader_to_fail():
        dataset = make((4,) * max(1, num_workers))
        return loader_of(dataset, batch_size=1, num_workers=num_workers)

    for place in range(len(outcomes) + 1):
        with loader_to_fail() as loader, loader_to_fail() as resumed:
            iterator = iter(loader)
            for _ in range(place):
                with contextlib.suppress(LookupError):
                    next(iterator)
            resumed.load_state_dict(loader.state_dict())
            with reading_again(place if make is FailsToReadStateless else 0):
                assert outcomes_of(iter(resumed)) == outcomes[place:]


class FailsToCollate(OfIterator):
    def collate(self, samples):
        if 2 in samples:
            raise LookupError
        return samples


class FailsToCollateStateless(Stateless):
    collate = FailsToCollate.collate


@pytest.mark.parametrize("make", [FailsToCollate, FailsToCollateStateless])
@pytest.mark.parametrize(
    ("num_workers", "outcomes"),
    [
        (0, [[0, 1], LookupError, [4, 5], [6, 7]]),
        (1, [[0, 1], LookupError, [4, 5], [6, 7]]),
        (2, [[0, 1], [100, 101], LookupError, [102, 103], [4, 5], [104, 105], [6, 7], [106, 107]]),
    ],
)
def test_failed_collate_is_not_repeated(make, num_workers, outcomes):
    """A batch that could not be collated is not delivered again after its error."""

    def loader_to_fail():
        dataset = make((8, 8))
        return loader_of(dataset, num_workers=num_workers, batch_size=2, collate_fn=dataset.collate)

    for place in range(len(outcomes) + 1):
        with loader_to_fail() as loader, loader_to_fail() as resumed:
            iterator = iter(loader)
            for _ in range(place):
                with contextlib.suppress(LookupError):
                    next(iterator)
            resumed.load_state_dict(loader.state_dict())
            with reading_again(2 * place if make is FailsToCollateStateless else 0):
                assert outcomes_of(iter(resumed)) == outcomes[place:]
