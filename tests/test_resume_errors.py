"""A state that does not fit is refused, says why, and leaves the loader as it was."""

from __future__ import annotations

import base64
import copy
import zlib

import pytest
import torch
from torch.utils.data import RandomSampler

from spdl_torch import DataLoader, DistributedRandomSampler

from .datasets import Graded, Indices, Sharded
from .resuming import (
    SIZE,
    batches,
    generator,
    interrupted_run,
    loader_of,
    restored_batches,
    saved,
    take,
)


def assert_refused(make, state, error, words):
    """A loader refuses a state, and so does one that has another state already."""

    def fresh():
        torch.manual_seed(11)
        return make()

    whole_epoch = batches(fresh())
    loader = fresh()
    with pytest.raises(error, match=words):
        loader.load_state_dict(copy.deepcopy(state))
    assert batches(loader) == whole_epoch

    interrupted = make()
    iterator = iter(interrupted)
    take(iterator, 2)
    earlier, rest = saved(interrupted), batches(iterator)
    loader = fresh()
    loader.load_state_dict(earlier)
    with pytest.raises(error, match=words):
        loader.load_state_dict(copy.deepcopy(state))
    assert saved(loader) == earlier
    assert batches(loader) == rest


def state_of(name, **extra):
    return interrupted_run(name, 2, **extra)[0]


# -- something else than a state ------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, [], [1, 2], "state", 7, True], ids=repr)
def test_state_must_be_a_dict(state):
    """A state that is not a dict is refused."""
    assert_refused(lambda: loader_of("in sequence"), state, TypeError, "must be a dict")


@pytest.mark.parametrize(
    "state",
    [
        {"_snapshot": {"_snapshot_step": 3}, "_steps_since_snapshot": 0},
        {"weight": [1.0], "bias": [0.0]},
    ],
    ids=["torchdata's", "a model's"],
)
def test_foreign_state_is_refused(state):
    """The state of something else is refused."""
    words = rf"not made by spdl_torch.DataLoader.*{next(iter(state))}"
    assert_refused(lambda: loader_of("in sequence"), state, ValueError, words)


@pytest.mark.parametrize("number", [0, 2, 17])
def test_other_format_is_refused(number):
    """Another format is refused."""
    state = state_of("in sequence") | {"spdl_torch": number}
    words = rf"has the format {number}.*Load it with the version that saved it"
    assert_refused(lambda: loader_of("in sequence"), state, ValueError, words)


def test_iterable_state_is_refused():
    """The state of an iterable dataset is refused."""
    loader = DataLoader(Sharded())
    take(iter(loader), 2)
    words = "that of an IterableDataset, but this DataLoader has a map-style dataset"
    assert_refused(lambda: loader_of("in sequence"), saved(loader), ValueError, words)


# -- a state of another loader --------------------------------------------------------------------


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_other_dataset_length_is_refused(size):
    """A dataset of another length is refused."""
    words = f"a dataset of {SIZE} samples, but this one has {size}.*same dataset"
    assert_refused(lambda: DataLoader(Indices(size)), state_of("in sequence"), ValueError, words)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("in sequence", "shuffle", "SequentialSampler.*RandomSampler"),
        ("shuffle", "in sequence", "RandomSampler.*SequentialSampler"),
        ("shuffle", "weighted", "RandomSampler.*WeightedRandomSampler"),
        (
            "torch's DistributedSampler",
            "DistributedRandomSampler",
            "DistributedSampler.*DistributedRandomSampler",
        ),
        (
            "DistributedRandomSampler",
            "DistributedDeterministicSampler",
            "DistributedRandomSampler.*DistributedDeterministicSampler",
        ),
        ("stateful sampler", "custom sampler", "Remembers.*Descending"),
        ("custom sampler", "stateful sampler", "Descending.*Remembers"),
    ],
)
def test_other_sampler_kind_is_refused(before, after, words):
    """Another kind of sampler is refused."""
    assert_refused(
        lambda: loader_of(after, seed=4),
        state_of(before),
        ValueError,
        f"{words}.*same kind of sampler",
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [("shuffle", "shuffle, own generator"), ("shuffle, own generator", "shuffle")],
)
def test_other_generator_kind_is_refused(before, after):
    """A shuffle with another kind of generator is refused."""
    words = "generator|seed"
    assert_refused(lambda: loader_of(after, seed=4), state_of(before), ValueError, words)


def weighted(weights, num_draws=None):
    sampler = DistributedRandomSampler(
        SIZE, rank=0, world_size=1, weights=weights, num_draws=num_draws
    )
    return DataLoader(Indices(), sampler=sampler)


EQUAL, UNEQUAL = [1.0] * SIZE, [1.0] * (SIZE - 1) + [2.0]


@pytest.mark.parametrize(
    ("before", "after"),
    [(EQUAL, UNEQUAL), (EQUAL, None), (None, EQUAL)],
    ids=["other", "none", "new"],
)
def test_other_weights_are_refused(before, after):
    """Other weights are refused."""
    loader = weighted(before)
    take(iter(loader), 2)
    assert_refused(lambda: weighted(after), saved(loader), ValueError, "other weights")


def test_other_number_of_draws_is_refused():
    """Another number of draws is refused."""
    loader = weighted(None, num_draws=30)
    take(iter(loader), 2)
    words = "30 indices.*now draws 20"
    assert_refused(lambda: weighted(None), saved(loader), ValueError, words)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("in sequence", "custom batch sampler", "sample.*batch.*batch_sampler"),
        ("custom batch sampler", "in sequence", "batch.*sample.*batch_sampler"),
        ("stateful batch sampler", "stateful sampler", "batch.*sample.*batch_sampler"),
    ],
)
def test_other_unit_is_refused(before, after, words):
    """A batch sampler instead of a sampler is refused and the other way round."""
    assert_refused(lambda: loader_of(after), state_of(before), ValueError, words)


def test_dataset_state_needs_stateful_dataset():
    """A state of the dataset needs a dataset with a state."""
    state = state_of("in sequence", dataset=Graded())
    words = "state of the dataset.*no load_state_dict"
    assert_refused(lambda: loader_of("in sequence"), state, ValueError, words)


# -- damaged states -------------------------------------------------------------------------------

OF_THE_USER = ("dataset_state", "iterator")


def paths(state, prefix=()):
    """Where in a state there is something, but for what only the user's classes can judge."""
    for key, value in state.items():
        if value is None:  # As good as absent.
            continue
        yield (*prefix, key)
        if isinstance(value, dict) and key not in OF_THE_USER and "mark" not in prefix:
            yield from paths(value, (*prefix, key))


def part_of(state, path):
    for key in path:
        state = state[key]
    return state


DAMAGEABLE = (
    "in sequence",
    "shuffle",
    "shuffle, own generator",
    "weighted",
    "torch's DistributedSampler",
    "DistributedRandomSampler",
    "DistributedRandomSampler, weighted, on two ranks",
    "stateful sampler",
    "stateful iterator",
    "torchdata's sampler",
    "stateful dataset",
)


def damageable(name):
    """A state, and how to make a loader that it fits."""

    def make():
        if name == "stateful dataset":
            return loader_of("in sequence", dataset=Graded())
        return loader_of(name, seed=4)

    if name == "stateful dataset":
        return state_of("in sequence", dataset=Graded()), make
    return state_of(name), make


def refusal(loader, state):
    """What a loader has to say against a state."""
    try:
        loader.load_state_dict(state)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", DAMAGEABLE)
def test_error_names_the_missing_part(name):
    """An incomplete state is refused and what is missing is named."""
    state, make = damageable(name)
    unnoticed = []
    for path in paths(state):
        truncated = copy.deepcopy(state)
        del part_of(truncated, path[:-1])[path[-1]]
        if repr(path[-1]) not in refusal(make(), truncated):
            unnoticed.append(path)
    # Older states have no generator of the loader, no digest with its rank, nothing drawn ahead.
    assert {name for (name, *_) in unnoticed} <= {"generator", "digest", "rank", "ahead"}


@pytest.mark.parametrize("name", DAMAGEABLE)
def test_incomplete_state_changes_nothing(name):
    """An incomplete state leaves the loader as it was."""
    state, make = damageable(name)
    for path in (("base_seed",), ("sampler",), ("sampler", "kind"), ("done",)):
        truncated = copy.deepcopy(state)
        del part_of(truncated, path[:-1])[path[-1]]
        assert_refused(make, truncated, ValueError, path[-1])


@pytest.mark.parametrize("name", DAMAGEABLE)
def test_wrong_types_are_refused(name):
    """A state with something of another type is refused."""
    state, make = damageable(name)
    unnoticed = []
    for path in paths(state):
        if isinstance(part_of(state, path), bool) or path[-1] in OF_THE_USER or "mark" in path[:-1]:
            continue
        damaged = copy.deepcopy(state)
        part_of(damaged, path[:-1])[path[-1]] = [["nonsense", 1]]
        if path[-1] not in refusal(make(), damaged):
            unnoticed.append(path)
    assert unnoticed == []


def encoded(data):
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("name", ["shuffle, own generator", "weighted"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-40],
        lambda text: text[40:],
        lambda text: text[:100] + "AAAA" + text[104:],
        lambda text: "no generator",
        lambda text: encoded(b"too short"),
        lambda text: encoded(bytes(torch.get_rng_state().numel() + 8)),
    ],
    ids=["empty", "end cut off", "beginning cut off", "altered", "words", "short", "long"],
)
def test_damaged_generator_is_refused(name, damage):
    """A damaged generator is refused."""
    state = state_of(name)
    state["sampler"]["generator"] = damage(state["sampler"]["generator"])
    assert_refused(lambda: loader_of(name, seed=4), state, ValueError, "generator")


@pytest.mark.parametrize("name", ["DistributedRandomSampler", "DistributedDeterministicSampler"])
def test_damaged_epoch_is_refused(name):
    """A damaged epoch is refused."""
    state = state_of(name)
    state["sampler"]["epoch"] = -1
    assert_refused(lambda: loader_of(name, seed=4), state, ValueError, "epoch")


def test_sampler_state_needs_stateful_sampler():
    """A state of a sampler that has none now is refused."""

    class Remembers(RandomSampler):
        """Of the same name as the one that has a state."""

    state = state_of("stateful sampler")
    assert_refused(
        lambda: DataLoader(Indices(), sampler=Remembers(range(SIZE), generator=generator(2))),
        state,
        ValueError,
        "state of the sampler.*Remembers has no load_state_dict",
    )


def test_fitting_state_after_refused_one():
    """A refused state can be followed by one that fits."""
    state, rest = interrupted_run("shuffle", 2)
    loader = loader_of("shuffle")
    with pytest.raises(ValueError, match="not made by"):
        loader.load_state_dict({"_snapshot": {}})
    loader.load_state_dict(state)
    assert batches(loader) == rest == restored_batches("shuffle", state)
