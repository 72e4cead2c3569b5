"""Whatever is done with a loader, in whatever order: what a simple model says.

hypothesis makes up programs: they make iterators, take batches, break off, go on with an older
iterator, choose epochs, save, restore, copy and close, with a dataset of which some samples are
damaged. After every step what came is compared with `Model`, which has no threads, no window and no
sampler: an epoch is a list of indices, and an iterator is a place in it.

The programs are the same in every run. ``SPDL_TORCH_SOAK=20`` makes twenty times as many, others in
every run, and shortens one that fails.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils.data import Dataset

import spdl_torch
from spdl_torch import DataLoader, DistributedRandomSampler, ReplaceBadSamples, StagedDataset

from .conftest import own_thread_names

SOAK = int(os.environ.get("SPDL_TORCH_SOAK", "1"))
SIZE = 11
SAMPLER_SEED = 5

# -- datasets: each stage draws, and each may fail ------------------------------------------------


class Damaged(Exception):  # noqa: N818 (says what is the matter)
    """Its arguments are a stage and an index."""


@dataclass
class Plain(Dataset):
    damage: dict[int, str] = field(default_factory=dict)
    """At which stage an index fails."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        if self.damage.get(index) in ("load", "preprocess"):
            raise Damaged(self.damage[index], index)
        return index, spdl_torch.sample_rng().random.random(), torch.rand(()).item()

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        for index, *_ in samples:
            if self.damage.get(index) == "collate":
                raise Damaged("collate", index)
        return {"samples": samples, "tensor": torch.tensor(samples, dtype=torch.float64)}


@dataclass
class Staged(StagedDataset[Any]):
    damage: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return SIZE

    def load(self, index: int) -> tuple[int, float]:
        if self.damage.get(index) == "load":
            raise Damaged("load", index)
        return index, spdl_torch.sample_rng().random.random()

    def preprocess(self, raw: tuple[int, float]) -> tuple[int, float, float]:
        if self.damage.get(raw[0]) == "preprocess":
            raise Damaged("preprocess", raw[0])
        return *raw, torch.rand(()).item()

    collate = Plain.collate


class StagedAsync(Staged):
    async def load(self, index: int) -> tuple[int, float]:
        return Staged.load(self, index)


# -- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What all loaders of one program have in common: where the samples come from."""

    kind: type[Plain] | type[Staged]
    order: str
    seed: int
    damage: tuple[tuple[int, str], ...]
    replaces: bool

    def loader(self, shape: Shape) -> DataLoader[Any]:
        dataset = self.kind(dict(self.damage))
        order: dict[str, Any] = {"shuffle": self.order == "shuffled"}
        if self.order == "distributed":
            order = {
                "sampler": DistributedRandomSampler(SIZE, rank=0, world_size=1, seed=SAMPLER_SEED)
            }
        return DataLoader(
            dataset,
            shape.batch_size,
            num_workers=shape.num_workers,
            collate_fn=dataset.collate,
            drop_last=shape.drop_last,
            persistent_workers=shape.is_persistent,
            device=shape.device,
            seed=self.seed,
            on_error=ReplaceBadSamples(max_fraction=None) if self.replaces else "raise",
            **order,
        )


@dataclass(frozen=True)
class Shape:
    """What may be another in each loader of a program."""

    num_workers: int
    batch_size: int
    drop_last: bool
    is_persistent: bool
    device: str | None


class _EpochByEpoch:
    """The epochs of a loader that goes through one after the other, as a user would."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._epochs: list[list[Any]] = []

    def __getitem__(self, epoch: int) -> list[Any]:
        while len(self._epochs) <= epoch:
            batches = list(self._loader)
            self._epochs.append([sample for batch in batches for sample in batch["samples"]])
        return self._epochs[epoch]


@cache
def _shuffled(seed: int) -> _EpochByEpoch:
    dataset = Plain()
    return _EpochByEpoch(DataLoader(dataset, shuffle=True, collate_fn=dataset.collate, seed=seed))


@cache
def _always(kind: type[Plain] | type[Staged], seed: int, index: int) -> _EpochByEpoch:
    dataset = kind()
    return _EpochByEpoch(
        DataLoader(dataset, sampler=[index] * SIZE, collate_fn=dataset.collate, seed=seed)
    )


def indices_of(source: Source, epoch: int) -> list[int]:
    if source.order == "in sequence":
        return list(range(SIZE))
    if source.order == "shuffled":
        return [index for index, *_ in _shuffled(source.seed)[epoch]]
    sampler = DistributedRandomSampler(SIZE, rank=0, world_size=1, seed=SAMPLER_SEED)
    sampler.set_epoch(epoch)
    return list(sampler)


def sample_at(source: Source, epoch: int, place: int, index: int) -> Any:
    """What becomes of an index at a place of an epoch: its random numbers depend on nothing else.

    Of a loader that draws this index at every place, in the calling thread.
    """
    return _always(source.kind, source.seed, index)[epoch][place]


@dataclass(eq=False)
class Walk:
    """An iterator: a place in an epoch."""

    epoch: int
    place: int
    shape: Shape
    first_place: int = 0
    iterator: Any = None
    has_begun: bool = False
    """It was asked for a batch."""
    is_over: bool = False
    """It has said that there is none left."""
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.first_place = self.place

    @property
    def places(self) -> range:
        """Of the next batch; empty at the end."""
        places = range(self.place, min(self.place + self.shape.batch_size, SIZE))
        is_dropped = self.shape.drop_last and len(places) < self.shape.batch_size
        return range(0) if is_dropped else places

    @property
    def may_have_threads(self) -> bool:
        if self.shape.num_workers == 0 or self.is_closed:
            return False
        return self.shape.is_persistent or (self.has_begun and not self.is_over)


END = "the end"
CLOSED = "closed"


class Model:
    """A loader, as its documentation has it."""

    def __init__(self, source: Source, shape: Shape) -> None:
        self.source = source
        self.shape = shape
        self.last: Walk | None = None
        self.loaded: tuple[int, int] | None = None
        """Epoch and place of the next iterator, if a state was loaded."""
        self.chosen: int | None = None
        """By `set_epoch`, for the next iterator."""
        self.known_bad: set[int] = set()
        """What has been replaced in a batch that was delivered. Others may be known already, of
        batches that are on their way."""

    @property
    def place_to_come(self) -> tuple[int, int]:
        """Where the next iterator begins."""
        if self.loaded is not None:
            return self.loaded
        if self.chosen is not None:
            return self.chosen, 0
        if self.last is None:
            return 0, 0
        # An epoch that was broken off counts, one that was never begun does not.
        return self.last.epoch + self.last.has_begun, 0

    @property
    def saved_place(self) -> tuple[int, int]:
        """What `state_dict` tells of: the last iterator, or the epoch to come."""
        if self.loaded is not None or self.last is None or self.last.is_over:
            return self.place_to_come
        return self.last.epoch, self.last.place

    def iterate(self) -> Walk:
        self.last = Walk(*self.place_to_come, self.shape)
        self.loaded = self.chosen = None
        return self.last

    def set_epoch(self, epoch: int) -> bool:
        """Choose an epoch; gives whether that leaves a place that had been restored."""
        if self.loaded is not None:
            loaded_epoch, place = self.loaded
            if loaded_epoch != epoch:
                self.loaded = epoch, 0
                return place > 0
        elif self.last is not None and not self.last.has_begun:
            # It is not too late yet.
            if self.last.epoch != epoch:
                place = self.last.place
                self.last.epoch, self.last.place, self.last.first_place = epoch, 0, 0
                return place > 0
        else:
            self.chosen = epoch
        return False

    def next(self, walk: Walk) -> Any:
        """The samples of the next batch, or what is raised."""
        if walk.is_closed and (walk.places or not walk.has_begun):
            return CLOSED
        walk.has_begun = True
        if not walk.places:
            walk.is_over = True
            return END
        batch = self._batch(walk)
        # A batch that could not be made will not come again.
        walk.place = walk.places.stop
        return batch

    def _batch(self, walk: Walk) -> Any:
        order = indices_of(self.source, walk.epoch)
        damage = dict(self.source.damage)
        indices = [order[place] for place in walk.places]
        # Left out: after a restart the batch before is not known, so that it cannot help out where
        # all samples of a batch are bad, as it would have done without the restart.
        size = walk.shape.batch_size
        starts = range(walk.place - size, walk.first_place - 1, -size)
        before = [index for start in starts for index in order[start : start + size]][:16]
        samples = []
        for slot, index in enumerate(indices):
            candidates = [index]
            if self.source.replaces:
                others = indices[slot + 1 :] + indices[:slot] + before
                candidates += [other for other in others if other != index]
            good = [one for one in candidates if damage.get(one) not in ("load", "preprocess")]
            if not good:
                return Damaged(damage[candidates[-1]], candidates[-1])
            samples.append(sample_at(self.source, walk.epoch, walk.places[slot], good[0]))
        if self.source.replaces:
            self.known_bad |= {i for i in indices if damage.get(i) in ("load", "preprocess")}
        for index, *_ in samples:
            if damage.get(index) == "collate":
                return Damaged("collate", index)
        return samples


# -- the machine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    text: str
    place: tuple[int, int]
    known_bad: frozenset[int]


SHAPES = st.builds(
    Shape,
    num_workers=st.integers(0, 3),
    batch_size=st.sampled_from([1, 2, 3, 4, SIZE + 1]),
    drop_last=st.booleans(),
    is_persistent=st.booleans(),
    device=st.sampled_from([None, None, "meta"]),
).map(
    # torch refuses workers that live on where there are none.
    lambda shape: replace(shape, is_persistent=shape.is_persistent and shape.num_workers > 0)
)
SOURCES = st.builds(
    Source,
    kind=st.sampled_from([Plain, Staged, StagedAsync]),
    order=st.sampled_from(["in sequence", "shuffled", "distributed"]),
    seed=st.sampled_from([0, 7]),
    damage=st.dictionaries(
        st.integers(0, SIZE - 1), st.sampled_from(["load", "preprocess", "collate"]), max_size=4
    ).map(lambda damage: tuple(damage.items())),
    replaces=st.booleans(),
)
WHICH = st.integers(0, 7)
"""Of the iterators that are alive; the last, if there are fewer."""
EPOCHS = st.integers(0, 3)
COPIED = {
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


class AnyProgram(RuleBasedStateMachine):
    states = Bundle("states")

    @initialize(source=SOURCES, shape=SHAPES)
    def begin(self, source: Source, shape: Shape) -> None:
        self.source = source
        self.walks: list[Walk] = []
        """All iterators that somebody refers to."""
        self._make_loader(shape)

    def _make_loader(self, shape: Shape) -> None:
        self.loader = self.source.loader(shape)
        self.model = Model(self.source, shape)
        self.living_iterator: Any = None
        """Whose workers live on: the next epoch is to be its own."""

    # -- iterators --------------------------------------------------------------------------------

    @precondition(lambda self: len(self.walks) < 4)
    @rule(late_epoch=st.none() | EPOCHS, num_batches=st.integers(0, 3))
    def iterate(self, late_epoch: int | None, num_batches: int) -> None:
        iterator = iter(self.loader)
        if self.living_iterator is not None:
            # What it was before is no more: it is one iterator, with one epoch after the other.
            assert iterator is self.living_iterator
            self.walks = [walk for walk in self.walks if walk.iterator is not iterator]
        walk = self.model.iterate()
        walk.iterator = iterator
        self.walks.append(walk)
        if self.model.shape.is_persistent:
            self.living_iterator = iterator
        if late_epoch is not None:
            # As frameworks do it.
            self.set_epoch(late_epoch)
        for _ in range(num_batches):
            self._compare_next(walk)

    @precondition(lambda self: self.walks)
    @rule(which=WHICH, num_batches=st.integers(1, 5))
    def take(self, which: int, num_batches: int) -> None:
        walk = self._walk(which)
        for _ in range(num_batches):
            self._compare_next(walk)

    @precondition(lambda self: self.walks)
    @rule(which=WHICH)
    def run_to_the_end(self, which: int) -> None:
        walk = self._walk(which)
        while self._compare_next(walk) not in (END, CLOSED):
            pass

    @precondition(lambda self: self.walks)
    @rule(which=WHICH)
    def break_off(self, which: int) -> None:
        walk = self._walk(which)
        self.walks.remove(walk)
        # The model may still have to know of the walk, but threads end with the last reference.
        walk.iterator = None

    def _walk(self, which: int) -> Walk:
        return self.walks[min(which, len(self.walks) - 1)]

    def _compare_next(self, walk: Walk) -> Any:
        if self._is_left_out(walk):
            return END  # As far as this program goes.
        expected = self.model.next(walk)
        found = what_comes(walk.iterator)
        if isinstance(expected, Damaged):
            assert isinstance(found, Damaged)
            assert found.args == expected.args
        elif isinstance(expected, str):
            assert found == expected
        else:
            assert isinstance(found, dict), found
            assert found["samples"] == expected
            tensor = torch.tensor(expected, dtype=torch.float64)
            assert found["tensor"].shape == tensor.shape
            assert found["tensor"].device.type == (walk.shape.device or "cpu")
            if walk.shape.device is None:
                assert torch.equal(found["tensor"], tensor)
        return expected

    def _is_left_out(self, walk: Walk) -> bool:
        # Left out: `DistributedRandomSampler` gives out its epochs in the order in which iterators
        # are first asked for a batch, and a loaded state changes the epoch of one that was made
        # before. Without the sampler, each has the epoch that it was made for.
        if self.source.order != "distributed" or walk.has_begun:
            return False
        return walk is not self.model.last or self.model.loaded is not None

    # -- epochs and states ------------------------------------------------------------------------

    @rule(epoch=EPOCHS)
    def set_epoch(self, epoch: int) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.loader.set_epoch(epoch)
        leaves_its_place = self.model.set_epoch(epoch)
        assert ["another epoch" in str(warning.message) for warning in caught] == (
            [True] if leaves_its_place else []
        )

    @rule(target=states)
    def save(self) -> Saved:
        state = self.loader.state_dict()
        assert ("bad_samples" in state) == self.source.replaces
        return Saved(json.dumps(state), self.model.saved_place, frozenset(self.model.known_bad))

    @rule(saved=states)
    def load(self, saved: Saved) -> None:
        self.loader.load_state_dict(json.loads(saved.text))
        self.model.loaded = saved.place
        self.model.known_bad |= saved.known_bad
        self.living_iterator = None

    @rule(saved=states, shape=SHAPES)
    def go_on_in_another_loader(self, saved: Saved, shape: Shape) -> None:
        self._close()
        self._make_loader(shape)
        self.load(saved)

    @rule(state=st.sampled_from([{}, {"weight": 1}, {"spdl_torch": 1, "dataset": "map"}]))
    def load_what_is_no_state(self, state: dict[str, Any]) -> None:
        if state == {}:
            self.loader.load_state_dict(state)
            return
        with pytest.raises(ValueError, match="state_dict"):
            self.loader.load_state_dict(state)

    # -- lifetime ---------------------------------------------------------------------------------

    @rule(shape=SHAPES, goes_on=st.booleans())
    def close(self, shape: Shape, goes_on: bool) -> None:
        self._close()
        with pytest.raises(RuntimeError, match="Make a new one"):
            iter(self.loader)
        saved = self.save()
        self._make_loader(shape)
        if goes_on:
            self.load(saved)

    @rule(how=st.sampled_from(sorted(COPIED)), epoch=EPOCHS)
    def go_on_with_a_copy(self, how: str, epoch: int) -> None:
        twin = COPIED[how](self.loader)
        before = self.model
        self._close()
        self.loader = twin
        self.model = Model(self.source, before.shape)
        self.model.loaded, self.model.known_bad = before.loaded, before.known_bad
        self.living_iterator = None
        if self.model.loaded is None:
            # With which epoch a copy begins is said nowhere.
            self.set_epoch(epoch)

    def _close(self) -> None:
        self.loader.close()
        self.loader.close()
        assert own_thread_names() == []
        for walk in self.walks:
            walk.is_closed = True
            # Left out: without workers an iterator goes on, though close() says that it raises.
            if walk.shape.num_workers > 0:
                self._compare_next(walk)
        self.walks = []
        self.living_iterator = None

    # -- what is always true ----------------------------------------------------------------------

    @invariant()
    def there_are_threads_only_where_they_may_be_of_use(self) -> None:
        if self.living_iterator is None and not any(walk.may_have_threads for walk in self.walks):
            assert own_thread_names() == []

    @invariant()
    def the_length_is_that_of_a_whole_epoch(self) -> None:
        batch_size = self.model.shape.batch_size
        padding = 0 if self.model.shape.drop_last else batch_size - 1
        assert len(self.loader) == (SIZE + padding) // batch_size

    @invariant()
    def bad_samples_are_those_that_were_replaced(self) -> None:
        known = [bad.index for bad in self.loader.bad_samples]
        assert len(set(known)) == len(known)
        assert self.model.known_bad <= set(known)
        damage = dict(self.source.damage)
        for bad in self.loader.bad_samples:
            assert bad.error == f"Damaged: ('{damage[bad.index]}', {bad.index})"

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            self.loader.close()
        assert own_thread_names() == []


def what_comes(iterator: Iterator[Any]) -> Any:
    """A batch, or what is raised instead."""
    try:
        return next(iterator)
    except StopIteration:
        return END
    except Damaged as error:
        # Without its traceback, which refers to the iterator: its threads live as long as it does.
        return error.with_traceback(None)
    except RuntimeError as error:
        if "closed" not in str(error):
            raise
        return CLOSED


@pytest.mark.timeout(120 if SOAK == 1 else 0)
@pytest.mark.parametrize(
    "num_programs", [60, pytest.param(450 * SOAK, marks=pytest.mark.exhaustive)]
)
def test_programs_match_the_model(num_programs):
    """Whatever a program does with a loader, what comes is what the model says."""
    run_state_machine_as_test(
        AnyProgram,
        settings=settings(
            max_examples=num_programs,
            stateful_step_count=40,
            deadline=None,
            derandomize=SOAK == 1,
            database=None,
            print_blob=True,
            # To make a failing program shorter takes longer than a test may.
            phases=[Phase.generate] if SOAK == 1 else [Phase.generate, Phase.shrink],
            # Threads are started and ended all the time.
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
