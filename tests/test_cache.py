"""`cache`: batches are the same as without it, and what can be kept is not made again.

Datasets whose code is not known, with and without stages. `test_cache_images.py` has torchvision's.
"""

from __future__ import annotations

import copy
import http.server
import io
import os
import pickle
import random
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from spdl_torch import Cache, DataLoader, ReplaceBadSamples, RetryLoad, StagedDataset, sample_rng

from .datasets import Sharded
from .test_parity import assert_same
from .tiers import sampled_product

PLACES = {
    "caller": {"num_workers": 0},
    "thread": {"num_workers": 1, "num_processes": 0},
    "threads": {"num_workers": 4, "num_processes": 0},
    "child": {"num_workers": 4, "num_processes": 1},
    "children": {"num_workers": 4, "num_processes": 2},
}
SIZE = 24
EXHAUSTIVE = pytest.mark.exhaustive
SOME_PLACES = [
    "caller",
    pytest.param("thread", marks=EXHAUSTIVE),
    "threads",
    pytest.param("child", marks=EXHAUSTIVE),
    "children",
]
FEW_PLACES = ["caller", "threads", "children"]


class Log:
    """Lines of a file that all processes write to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, line: object) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines()
        self.path.unlink()
        return lines


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log")


class Sized(Dataset):
    thread_safe = True

    def __init__(self, log: Log | None = None, size: int = SIZE) -> None:
        self.log, self.size = log, size

    def __len__(self) -> int:
        return self.size

    def note(self, what: object) -> None:
        if self.log is not None:
            self.log.add(what)


class Plain(Sized):
    """A tensor, an array, a text and a number."""

    def __getitem__(self, index):
        self.note(f"make {index}")
        return (
            torch.full((40, 30), index, dtype=torch.float32),
            {"array": np.full(200, index), "name": f"sample {index}"},
            index,
        )


class InBulk(Plain):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Staged(Sized, StagedDataset):
    def load(self, index):
        self.note(f"load {index}")
        return bytes([index]) * 600

    def preprocess(self, raw):
        self.note(f"preprocess {raw[0]}")
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).float() / 3, raw[0]


class StagedAsync(Staged):
    async def load(self, index):
        return Staged.load(self, index)


class StagedMany(Staged):
    load = StagedDataset.load

    def load_many(self, indices):
        return [Staged.load(self, index) for index in indices]


class StagedManyAsync(StagedMany):
    async def load_many(self, indices):
        return [Staged.load(self, index) for index in indices]


DATASETS = {
    "plain": Plain,
    "in bulk": InBulk,
    "subset": lambda log=None: Subset(Plain(log), range(SIZE - 1, 3, -1)),
    "subset of staged": lambda log=None: Subset(Staged(log), range(SIZE - 1, 3, -1)),
    "subset of many": lambda log=None: Subset(StagedMany(log), range(SIZE - 1, 3, -1)),
    "subset of bulk": lambda log=None: Subset(InBulk(log), range(SIZE - 1, 3, -1)),
    "concatenated": lambda log=None: ConcatDataset([Plain(log), InBulk(log, 8)]),
    "staged": Staged,
    "staged async": StagedAsync,
    "staged many": StagedMany,
    "staged many async": StagedManyAsync,
}


def epochs_of(loader, num_epochs=3):
    with loader:
        return [list(loader) for _ in range(num_epochs)]


def read(dataset, cache=None, num_epochs=3, **arguments):
    arguments = {"batch_size": 5, "shuffle": True, "seed": 3} | arguments
    return epochs_of(DataLoader(dataset, cache=cache, **arguments), num_epochs)


def hits_of(loader):
    stats = loader.stats().cache
    return stats.num_hits, stats.num_misses


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "level", "kind"),
    sampled_product(FEW_PLACES, [None, "raw", "sample"], DATASETS, every=4),
)
def test_batches_have_same_bits(place, level, kind):
    """Batches of three epochs are the same with a cache, and the later ones come from it."""
    dataset = DATASETS[kind]()
    if level == "raw" and "staged" not in kind and "many" not in kind:
        level = "sample"
    place = PLACES[place]
    expected = read(dataset, **place)
    loader = DataLoader(
        dataset, batch_size=5, shuffle=True, seed=3, cache=Cache("1MB", level=level), **place
    )
    assert_same(epochs_of(loader), expected)
    assert hits_of(loader) == (len(dataset), 0)
    assert loader.stats().cache.level in ([level] if level else ["raw", "sample"])


@pytest.mark.parametrize("place", SOME_PLACES)
def test_samples_come_one_by_one(place):
    """Without batches, samples are the same too."""
    options = PLACES[place] | {"batch_size": None}
    assert_same(read(Plain(), Cache("1MB"), **options), read(Plain(), **options))


class DrawsLater(Plain):
    """Draws in half of its samples."""

    def __getitem__(self, index):
        tensor, *rest = super().__getitem__(index)
        return tensor + (torch.rand(1) if index % 2 else 0), *rest


@pytest.mark.parametrize(
    "dataset", [Plain(), DrawsLater(), Staged()], ids=lambda d: type(d).__name__
)
def test_calling_thread_draws_same(dataset):
    """Without a seed and workers, the samples and the loop draw the same from torch's generator."""
    found = []
    for cache in (None, Cache("1MB")):
        torch.manual_seed(8)
        loader = DataLoader(dataset, batch_size=5, shuffle=True, cache=cache)
        found.append([(list(loader), torch.rand(2)) for _ in range(3)])
    assert_same(found[1], found[0])


def spoil(samples):
    """Collate, after each sample was changed in place."""
    for tensor, inside, _ in samples:
        tensor.add_(1)
        inside["array"][:] += 1
        inside["name"] = inside["name"].upper()
    return default_collate(samples)


@pytest.mark.parametrize("place", SOME_PLACES)
@pytest.mark.parametrize("dataset", [Plain(), InBulk()], ids=["plain", "in bulk"])
def test_samples_may_be_changed(dataset, place):
    """A collate function that changes its samples in place changes no entry."""
    options = PLACES[place] | {"collate_fn": spoil}
    assert_same(read(dataset, Cache("1MB"), **options), read(dataset, **options))


def test_batches_may_be_changed():
    """A training step that changes a batch in place changes no entry."""
    loader = DataLoader(Plain(), batch_size=5, cache=Cache("1MB"))
    first = copy.deepcopy(list(loader))
    for batch in loader:
        batch[0].zero_()
        batch[1]["array"].zero_()
    assert_same(list(loader), first)
    assert hits_of(loader) == (SIZE, 0)


class SpoilsItsRaw(Staged):
    """Its raw forms are tensors, which preprocess changes in place."""

    def load(self, index):
        return torch.full((300,), float(index))

    def preprocess(self, raw):
        return raw.add_(1)


class SpoilsAndDraws(SpoilsItsRaw):
    def preprocess(self, raw):
        return raw.add_(torch.rand(()))


@pytest.mark.parametrize("level", ["raw", "sample", None])
@pytest.mark.parametrize("kind", [SpoilsItsRaw, SpoilsAndDraws])
def test_raw_forms_may_be_changed(kind, level):
    """A preprocess hook that changes its raw form in place changes no entry."""
    arguments = {"num_workers": 2}
    found = read(kind(), Cache("1MB", level=level), **arguments)
    assert_same(found, read(kind(), **arguments))


class Rows(Sized):
    """Samples are rows of one large tensor, and the beginning of memory that is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.arange(SIZE * 1000.0).view(SIZE, 1000)

    def __getitem__(self, index):
        return self.all[index], torch.empty(5000)[:9].fill_(index)


def test_entry_is_a_row():
    """Of a view of a large tensor, only the part that can be seen is kept."""
    loader = DataLoader(Rows(), batch_size=5, seed=3, shuffle=True, cache=Cache("1MB"))
    assert_same(epochs_of(loader), read(Rows()))
    assert hits_of(loader) == (SIZE, 0)
    assert loader.stats().cache.num_bytes < SIZE * 4600


class Locked(Staged):
    """Its raw forms cannot be kept, because they cannot be pickled."""

    def load(self, index):
        return threading.Lock(), super().load(index)

    def preprocess(self, raw):
        return super().preprocess(raw[1])


class Secret(Staged):
    """Its samples cannot be kept."""

    def preprocess(self, raw):
        return *super().preprocess(raw), threading.Lock()

    def collate(self, samples):
        return default_collate([sample[:2] for sample in samples])


@pytest.mark.parametrize("level", [None, "sample", "raw"])
def test_samples_that_cannot_be_pickled(level):
    """If samples cannot be pickled, raw forms are kept."""
    loader = DataLoader(
        Secret(), batch_size=5, seed=3, shuffle=True, cache=Cache("1MB", level=level)
    )
    assert_same(epochs_of(loader), read(Secret()))
    assert hits_of(loader) == (SIZE, 0)
    assert loader.stats().cache.level == (level or "raw")


class Opened(Staged):
    """Its raw forms are files, which preprocess reads to their ends."""

    def load(self, index):
        return io.BufferedReader(io.BytesIO(super().load(index)))

    def preprocess(self, raw):
        return super().preprocess(raw.read())


@pytest.mark.parametrize("level", [None, "sample", "raw"])
@pytest.mark.parametrize("kind", [Locked, Opened])
def test_raw_forms_that_cannot_be_copied(kind, level):
    """If raw forms cannot be copied, batches are the same, and nothing is kept."""
    loader = DataLoader(kind(), batch_size=5, seed=3, shuffle=True, cache=Cache("1MB", level=level))
    assert_same(epochs_of(loader), read(kind()))
    assert hits_of(loader) == (0, SIZE)


# -- which indices ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "indices",
    [
        np.arange(SIZE)[::-1],
        list(torch.arange(SIZE)),
        [*map(int, range(SIZE))],
    ],
    ids=["numpy", "torch", "int"],
)
def test_indices_of_numpy_and_torch(indices):
    """Samples are found by indices that NumPy or torch have made."""
    for dataset, arguments in [
        (Plain(), {"sampler": indices}),
        (Subset(Plain(), indices), {}),
        (Subset(Staged(), indices), {}),
    ]:
        loader = DataLoader(dataset, batch_size=5, cache=Cache("1MB"), **arguments)
        epochs_of(loader, 2)
        assert hits_of(loader) == (SIZE, 0)


class Keyed(Sized):
    def __getitem__(self, key):
        return f"{key!r}"


def test_keys_of_other_types_differ():
    """Indices that are equal and not the same are told apart."""
    keys = [1, 1.0, True, "1", b"1", (1, 2), ("1", 2), np.int64(1), [1]]
    loader = DataLoader(Keyed(), batch_size=None, sampler=keys, cache=Cache("1MB"))
    assert epochs_of(loader, 2)[1] == [f"{key!r}" for key in keys]
    assert hits_of(loader) == (len(keys) - 1, 1)  # All but the list, which may change.


# -- draws -----------------------------------------------------------------------------------------


def by_torch(_):
    return float(torch.rand(()))


def by_random(_):
    return random.random()


def by_numpy(_):
    return float(np.random.rand())


def by_sample_rng(_):
    return float(sample_rng().numpy.random())


DRAWS = {
    "torch": by_torch,
    "random": by_random,
    "numpy": by_numpy,
    "sample_rng": by_sample_rng,
    "own default_rng": lambda dataset: float(dataset.own_numpy.random()),
    "own Random": lambda dataset: dataset.own_random.random(),
    "own torch": lambda dataset: float(torch.rand((), generator=dataset.own_torch)),
}


class Draws(Sized):
    def __init__(self, draw: str, log: Log | None = None) -> None:
        super().__init__(log)
        self.draw = draw
        self.own_numpy = np.random.default_rng(0) if "default_rng" in draw else None
        self.own_random = random.Random(0) if "Random" in draw else None
        self.own_torch = torch.Generator() if draw == "own torch" else None

    def drawn(self):
        return DRAWS[self.draw](self)

    def __getitem__(self, index):
        return index, self.drawn()


class DrawsInBulk(Draws):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class DrawsStaged(Draws, StagedDataset):
    __getitem__ = StagedDataset.__getitem__

    def load(self, index):
        self.note(index)
        return bytes([index])

    def preprocess(self, raw):
        return raw[0], self.drawn()


class DrawsLoading(DrawsStaged):
    def load(self, index):
        return index, self.drawn()

    def preprocess(self, raw):
        return raw


@pytest.mark.parametrize(("draw", "place"), sampled_product(DRAWS, FEW_PLACES, every=2))
@pytest.mark.parametrize("kind", [Draws, DrawsInBulk])
def test_drawn_samples_are_made_again(kind, draw, place):
    """A sample that draws comes from the dataset in each epoch, wherever it draws from."""
    dataset = kind(draw)
    loader = DataLoader(dataset, batch_size=5, cache=Cache("1MB"), seed=3, **PLACES[place])
    epochs = epochs_of(loader)
    assert loader.stats().cache.num_hits == loader.stats().cache.num_entries == 0
    is_child_alike = (
        draw.startswith("own") and "child" in place
    )  # A child begins from the parent's.
    if not is_child_alike:
        assert len({float(x) for epoch in epochs for _, b in epoch for x in b}) == 3 * SIZE
    if not draw.startswith("own") and (draw not in {"random", "numpy"} or "child" in place):
        assert_same(epochs, epochs_of(DataLoader(dataset, batch_size=5, seed=3, **PLACES[place])))


@pytest.mark.parametrize(("draw", "place"), sampled_product(DRAWS, FEW_PLACES, every=2))
def test_raw_forms_of_drawn_samples(draw, place, log):
    """Of a sample whose preprocessing draws, the raw form is kept, and the plan says so."""
    dataset = DrawsStaged(draw, log)
    cache = Cache("1MB")
    loader = DataLoader(dataset, batch_size=5, cache=cache, seed=3, **PLACES[place])
    with loader:
        epochs = [list(loader)]
        log.take()
        epochs += [list(loader), list(loader)]
        # Another thread may draw from a generator of the process while this one loads.
        is_shared = draw.startswith("own") or (draw in {"random", "numpy"} and "thread" in place)
        if place == "caller" or not is_shared:
            assert log.take() == []
            assert hits_of(loader) == (SIZE, 0)
        assert loader.stats().cache.level == "raw"
        assert "what load returns, up to" in str(loader.plan)
    if not (draw.startswith("own") and "child" in place):
        assert len({float(x) for epoch in epochs for _, b in epoch for x in b}) == 3 * SIZE


@pytest.mark.parametrize(
    ("draw", "place"),
    sampled_product(["torch", "random", "numpy", "sample_rng"], PLACES, every=3),
)
def test_loads_that_draw(draw, place):
    """A sample whose loading draws is loaded again."""
    loader = DataLoader(
        DrawsLoading(draw), batch_size=5, cache=Cache("1MB"), seed=3, **PLACES[place]
    )
    epochs = epochs_of(loader)
    assert loader.stats().cache.num_hits == 0
    assert len({float(x) for epoch in epochs for _, b in epoch for x in b}) == 3 * SIZE


class DrawsRarely(Draws):
    """Draws from its own generator, and the first samples do not show it."""

    def __getitem__(self, index):
        return index, self.drawn() < 0.01


def test_own_generator_is_found():
    """Samples of a dataset with a generator of its own are not kept, however seldom it matters."""
    loader = DataLoader(DrawsRarely("own default_rng"), batch_size=5, cache=Cache("1MB"))
    epochs_of(loader, 2)
    assert loader.stats().cache.num_hits == loader.stats().cache.num_entries == 0
    assert "samples that draw nothing" in str(loader.plan)


class HiddenCounter(Sized):
    """Its samples are different each time, and nothing shows it."""

    calls = iter(range(1000))

    def __getitem__(self, index):
        return index, next(HiddenCounter.calls)


class HiddenCounterStaged(HiddenCounter, StagedDataset):
    __getitem__ = StagedDataset.__getitem__

    def load(self, index):
        return index

    def preprocess(self, raw):
        return raw, next(HiddenCounter.calls)


def test_changing_samples_are_noticed():
    """Samples that are different each time are noticed by making the first ones twice."""
    loader = DataLoader(HiddenCounter(), batch_size=5, cache=Cache("1MB"))
    epochs_of(loader, 2)
    assert loader.stats().cache.num_hits == 0
    assert loader.stats().cache.level is None
    assert "different each time" in str(loader.plan)


def test_changing_samples_keep_raw_forms():
    """If samples turn out to be different each time, raw forms are kept, in later epochs too."""
    for level in (None, "raw"):
        loader = DataLoader(HiddenCounterStaged(), batch_size=5, cache=Cache("1MB", level=level))
        epochs = epochs_of(loader)
        assert hits_of(loader) == (SIZE, 0)
        assert loader.stats().cache.level == "raw"
        assert len({int(x) for epoch in epochs for _, b in epoch for x in b}) == 3 * SIZE


class TurnsRandom(Staged):
    """Its samples are the same for a while, and then they are not."""

    calls = iter(range(1000))

    def preprocess(self, raw):
        count = next(TurnsRandom.calls)
        return raw[0], max(0, count - 30)


def test_late_refusal_keeps_raw_forms():
    """After samples were kept and then turned out to be different, raw forms are kept."""
    cache = Cache("1MB")
    dataset = TurnsRandom()
    loader = DataLoader(dataset, batch_size=5, cache=cache)
    for _ in range(2):
        list(loader)
    # Other loaders see the same entries, with other samples to make and to check.
    later = DataLoader(Subset(dataset, range(SIZE)), batch_size=5, cache=cache)
    first = list(later)
    assert_same([batch[0] for batch in first], [batch[0] for batch in list(later)])


# -- never stale -----------------------------------------------------------------------------------


class Factor(Plain):
    """Samples depend on attributes."""

    def __init__(self, factor=2, log=None):
        super().__init__(log)
        self.factor = factor

    def __getitem__(self, index):
        self.note(index)
        return index * self.factor


class Wrapper(Sized):
    def __init__(self, *datasets):
        super().__init__()
        self.datasets = datasets
        self.first = datasets[0]

    def __getitem__(self, index):
        return self.first[index] + 1


WRAPPERS = {
    "itself": lambda dataset: dataset,
    "Subset": lambda dataset: Subset(dataset, range(SIZE)),
    "ConcatDataset": lambda dataset: ConcatDataset([dataset, Factor(5)]),
    "own": Wrapper,
    "Subset of a ConcatDataset": lambda dataset: Subset(ConcatDataset([dataset]), range(SIZE)),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("place", ["caller", "child"])
def test_changed_attribute_is_seen(wrap, place):
    """An attribute that is assigned between epochs is seen, in a wrapped dataset too."""
    inner = Factor()
    dataset = WRAPPERS[wrap](inner)
    options = {"batch_size": 5, "seed": 1, **PLACES[place]}
    with DataLoader(dataset, cache=Cache("1MB"), **options) as loader:
        before = list(loader), list(loader)
        inner.factor = 7
        assert_same(list(loader), list(DataLoader(dataset, seed=1, batch_size=5)))
        assert loader.stats().cache.num_hits == 0
        list(loader)
        assert hits_of(loader) == (len(dataset), 0)
    assert_same(*before)


def test_changed_tensor_is_seen():
    """A tensor attribute that is changed in place is not ignored."""
    dataset = Rows()
    with DataLoader(dataset, batch_size=5, cache=Cache("1MB")) as loader:
        list(loader)
        dataset.all += 1
        assert_same(list(loader), list(DataLoader(dataset, batch_size=5)))


def test_other_dataset_with_same_cache():
    """Two datasets of a class have nothing in common in one cache."""
    cache = Cache("1MB")
    for factor in (2, 3, 4):
        dataset = Factor(factor)
        assert_same(read(dataset, cache, 2), read(dataset, num_epochs=2))


@pytest.mark.parametrize("token", [None, "1"])
def test_datasets_share_directory(tmp_path, token):
    """Two datasets of a class with other attributes have nothing in common in one directory."""
    for factor in (2, 3):
        cache = Cache("1MB", directory=tmp_path / "cache", token=token)
        assert_same(read(Factor(factor), cache, 2), read(Factor(factor), num_epochs=2))


class Listed(Sized):
    def __init__(self, items):
        super().__init__(size=len(items))
        self.items = items

    def __getitem__(self, index):
        return self.items[index]


def test_lists_tell_datasets_apart(tmp_path):
    """Two datasets with lists of the same length have nothing in common in one directory."""
    for items in (["a", "b", "c"], ["a", "c", "b"], [Path("a"), Path("b"), Path("c")]):
        cache = Cache("1MB", directory=tmp_path / "cache", token="1")
        for dataset in (Listed(items), Subset(Listed(items), range(3))):
            with DataLoader(dataset, batch_size=None, cache=cache) as loader:
                assert [list(loader), list(loader)] == [items, items]


class Versioned(Sized):
    version = 1

    def __getitem__(self, index):
        return index * Versioned.version


def test_token_says_the_version(tmp_path, monkeypatch):
    """With another token, nothing that was kept in the directory is used."""
    directory = tmp_path / "cache"

    def first(token):
        cache = Cache("1MB", directory=directory, token=token)
        with DataLoader(Versioned(), batch_size=SIZE, cache=cache) as loader:
            return next(iter(loader)).tolist()

    assert first("1") == list(range(SIZE))
    monkeypatch.setattr(Versioned, "version", 2)
    assert first("1") == list(range(SIZE))  # As the user has said.
    assert first("2") == list(range(0, 2 * SIZE, 2))


def test_directory_needs_a_token(tmp_path, log):
    """Without a token, samples of code that is not known are not kept in the directory."""
    for _ in range(2):
        loader = DataLoader(Plain(log), batch_size=5, cache=Cache("1MB", directory=tmp_path / "c"))
        list(loader)
        assert loader.stats().cache.num_hits == 0
        assert loader.stats().cache.directory is None
        assert "in memory" in str(loader.plan)


@pytest.mark.parametrize("kind", [Plain, Staged, StagedManyAsync, InBulk])
def test_second_run_makes_nothing(kind, tmp_path, log):
    """A second run with a directory and a token makes no sample, and no request."""
    expected = read(kind())
    for _ in range(2):
        cache = Cache("1MB", directory=tmp_path / "cache", token="1")
        assert_same(read(kind(log), cache, **PLACES["children"]), expected)
        made = log.take()
    assert made == []


def test_class_tells_datasets_apart(tmp_path):
    """Datasets of two classes with one token have nothing in common."""
    cache = Cache("1MB", directory=tmp_path / "cache", token="1")
    assert_same(read(Plain(), cache, 1), read(Plain(), num_epochs=1))
    assert_same(read(Staged(), cache, 1), read(Staged(), num_epochs=1))


# -- budget ----------------------------------------------------------------------------------------


class Large(Sized):
    """Samples of 4 kB."""

    def __init__(self, size=400, log=None):
        super().__init__(log, size)

    def __getitem__(self, index):
        self.note(index)
        return torch.full((1024,), float(index))


@pytest.mark.parametrize("place", ["threads", "children"])
def test_half_the_budget_half_the_hits(place, log):
    """With half the budget, about half the samples are found, spread evenly over an epoch."""
    budget = 400 * 4400 // 2
    with DataLoader(Large(log=log), batch_size=5, cache=Cache(budget), **PLACES[place]) as loader:
        list(loader)
        for _ in range(3):
            log.take()
            list(loader)
            stats = loader.stats().cache
            assert stats.num_hits + stats.num_misses == 400
            assert 140 <= stats.num_hits <= 230
            assert stats.num_bytes <= budget
            assert stats.num_entries == stats.num_hits
    made = {int(line) for line in log.take()}
    quarters = [sum(index // 100 == quarter for index in made) for quarter in range(4)]
    assert min(quarters[1:]) >= 30  # The first entries tell how large the others will be.
    assert max(quarters) <= 80


def test_budget_is_never_exceeded():
    """A dataset of twice the budget does not use more, whatever the order of its samples."""
    budget = 400 * 4096 // 2
    with DataLoader(
        Large(), batch_size=5, shuffle=True, cache=Cache(budget), **PLACES["child"]
    ) as loader:
        for _ in range(3):
            list(loader)
            assert budget / 2 < loader.stats().cache.num_bytes <= budget


def test_sample_larger_than_budget():
    """A sample that is larger than the cache is not kept."""
    loader = DataLoader(Large(8), batch_size=2, cache=Cache(2000))
    assert_same(epochs_of(loader, 2)[1], list(DataLoader(Large(8), batch_size=2)))
    assert hits_of(loader) == (0, 8)
    assert loader.stats().cache.num_bytes == 0


def test_two_loaders_share_a_budget():
    """Two loaders with one cache share its budget."""
    cache = Cache(200 * 4400)
    first, second = (DataLoader(Large(150), batch_size=5, cache=cache) for _ in range(2))
    for _ in range(2):
        list(first)
        list(second)
    assert hits_of(first) == (150, 0)
    assert second.stats().cache.num_misses > 80
    assert second.stats().cache.num_bytes == first.stats().cache.num_bytes <= 200 * 4400


def test_large_dataset_after_small_one(tmp_path):
    """A small dataset that has used the cache first leaves room for a large one."""
    cache = Cache("64MB", directory=tmp_path / "cache", token="1")
    source = Large(9000)
    for dataset in (Subset(source, range(10)), source):
        with DataLoader(dataset, batch_size=100, cache=cache) as loader:
            list(loader)
            list(loader)
        assert hits_of(loader) == (len(dataset), 0)


# -- resume, persistent workers --------------------------------------------------------------------


@pytest.mark.parametrize("place", SOME_PLACES)
def test_resumes_in_mid_epoch(place):
    """A loader with a cache resumes where the state was saved, with the same samples."""
    options = {"batch_size": 5, "shuffle": True, "seed": 3, **PLACES[place]}
    expected = read(Plain(), **PLACES[place])
    cache, dataset = Cache("1MB"), Plain()
    with DataLoader(dataset, cache=cache, **options) as loader:
        list(loader)
        iterator = iter(loader)
        second = [next(iterator), next(iterator)]
        state = loader.state_dict()
        del iterator
    with DataLoader(dataset, cache=cache, **options) as loader:
        loader.load_state_dict(state)
        second += list(loader)
        assert loader.stats().cache.num_misses == 0
        assert_same([second, list(loader)], expected[1:])


@pytest.mark.parametrize(
    ("kind", "place"),
    sampled_product([Plain, Staged, StagedAsync], [*PLACES][1:], every=3),
)
def test_persistent_workers_use_cache(kind, place, log):
    """Persistent workers find what they have kept, and the statistics of each epoch are its own."""
    options = {"batch_size": 5, "seed": 3, "shuffle": True, **PLACES[place]}
    expected = read(kind(), **PLACES[place])
    loader = DataLoader(kind(log), cache=Cache("1MB"), persistent_workers=True, **options)
    with loader:
        epochs, hits, made = [], [], []
        for _ in range(3):
            epochs.append(list(loader))
            hits.append(hits_of(loader))
            made.append(len(log.take()))
    assert_same(epochs, expected)
    assert hits == [(0, SIZE), (SIZE, 0), (SIZE, 0)]
    assert loader.stats().cache.level == "sample" or any(made[1:])


def test_break_keeps_what_was_made(log):
    """Samples of an epoch that was left early are kept."""
    with DataLoader(Plain(log), batch_size=5, cache=Cache("1MB"), **PLACES["child"]) as loader:
        for _ in loader:
            break
        made = set(log.take())
        list(loader)
        assert made.isdisjoint(log.take())


# -- bad samples -----------------------------------------------------------------------------------


class Damaged(Staged):
    """Two of its samples cannot be decoded."""

    def preprocess(self, raw):
        self.note(f"preprocess {raw[0]}")
        if raw[0] in (4, 17):
            raise ValueError(f"number {raw[0]} is damaged")
        return super().preprocess(raw)


@pytest.mark.parametrize(
    ("level", "place"), sampled_product([None, "sample", "raw"], PLACES, every=4)
)
def test_bad_samples_are_remembered(place, level, log):
    """A bad sample is replaced and reported as without a cache, and is not decoded again."""
    options = {"batch_size": 5, "shuffle": True, "seed": 3, **PLACES[place]}
    replace = ReplaceBadSamples(max_fraction=0.2)
    expected = DataLoader(Damaged(), on_error=replace, **options)
    loader = DataLoader(Damaged(log), on_error=replace, cache=Cache("1MB", level=level), **options)
    assert_same(epochs_of(loader), epochs_of(expected))
    assert sorted(loader.bad_samples, key=str) == sorted(expected.bad_samples, key=str)
    made = log.take()
    if level == "sample":
        assert made.count("preprocess 4") in (1, 2)  # Twice, if it had to replace another one.
        assert made.count("load 4") == made.count("preprocess 4")


def test_new_loader_reports_bad_samples(log):
    """A bad sample that another loader has found is reported with the same text."""
    cache, dataset = Cache("1MB", level="sample"), Damaged(log)
    reports = []
    for _ in range(2):
        with DataLoader(
            dataset, batch_size=5, cache=cache, on_error=ReplaceBadSamples(0.2)
        ) as loader:
            list(loader)
            reports.append(loader.bad_samples)
    assert reports[0] == reports[1]
    assert [bad.error for bad in reports[1]] == [
        "ValueError: number 4 is damaged",
        "ValueError: number 17 is damaged",
    ]
    assert log.take().count("preprocess 4") == 1


def test_error_keeps_its_traceback():
    """A loader that raises errors raises that of the dataset, with its traceback, in each epoch."""
    cache, dataset = Cache("1MB"), Damaged()
    list(DataLoader(dataset, batch_size=5, cache=cache, on_error=ReplaceBadSamples(0.2)))
    loader = DataLoader(dataset, batch_size=5, cache=cache)
    for _ in range(2):
        with pytest.raises(ValueError, match="number 4 is damaged") as caught:
            list(loader)
        assert caught.traceback[-1].name == "preprocess"
        assert caught.traceback[-1].path.name == "test_cache.py"


class Missing(Staged):
    """Opens a second file, which is not there at first."""

    def __init__(self, path, log=None):
        super().__init__(log)
        self.path = path

    def preprocess(self, raw):
        if raw[0] == 4:
            self.path.read_bytes()
        return raw[0]


def test_missing_file_is_tried_again(tmp_path):
    """A file that could not be opened is no property of the sample, and is tried again."""
    path = tmp_path / "mask"
    loader = DataLoader(
        Missing(path), batch_size=5, cache=Cache("1MB"), on_error=ReplaceBadSamples(0.2)
    )
    list(loader)
    assert [bad.path for bad in loader.bad_samples] == [str(path)]
    path.write_bytes(b"")
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(SIZE))


class Flaky(Staged):
    """Each sample is loaded at the second attempt."""

    def __init__(self, log):
        super().__init__(log)
        self.seen = set()

    def load(self, index):
        raw = super().load(index)
        if index not in self.seen:
            self.seen.add(index)
            raise ConnectionError(index)
        return raw


class FlakyAsync(Flaky):
    async def load(self, index):
        return Flaky.load(self, index)


@pytest.mark.parametrize("kind", [Flaky, FlakyAsync])
@pytest.mark.parametrize("place", ["caller", "threads"])
def test_loads_are_tried_again(kind, place, log):
    """What was loaded at the second attempt is kept, and counted once."""
    loader = DataLoader(
        kind(log),
        batch_size=5,
        cache=Cache("1MB", level="raw"),
        on_error=RetryLoad(2, backoff=0),
        **PLACES[place],
    )
    list(loader)
    assert loader.num_retries == SIZE
    assert hits_of(loader) == (0, SIZE)
    log.take()
    list(loader)
    assert hits_of(loader) == (SIZE, 0)
    assert not [line for line in log.take() if "load" in line]


class Deadly(Plain):
    """Kills its process at one sample, once."""

    def __init__(self, log, flag):
        super().__init__(log)
        self.flag = flag

    def __getitem__(self, index):
        if index == 13 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("place", ["child", "children"])
@pytest.mark.filterwarnings("ignore:.*was killed")
def test_killed_child_leaves_cache_usable(place, log, tmp_path):
    """After a child was killed, batches and hits are as they are without that."""
    loader = DataLoader(
        Deadly(log, tmp_path / "flag"), batch_size=5, cache=Cache("1MB"), **PLACES[place]
    )
    expected = list(DataLoader(Plain(), batch_size=5))
    assert_same(epochs_of(loader), [expected] * 3)
    assert hits_of(loader) == (SIZE, 0)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Sharded(), {}, "map-style.*Leave out cache"),
        (
            Plain(),
            {"worker_method": "multiprocessing", "num_workers": 1},
            "multiprocessing.*Leave out one",
        ),
        (
            Plain(),
            {"preprocess_executor": ThreadPoolExecutor(1), "num_workers": 1},
            "preprocess_executor.*Leave out one",
        ),
    ],
    ids=["iterable", "multiprocessing", "executor"],
)
def test_arguments_that_exclude_a_cache(dataset, arguments, message):
    """Where a cache cannot work, an error at once says what to leave out."""
    with pytest.raises(ValueError, match=message):
        DataLoader(dataset, cache=Cache("1MB"), **arguments)


@pytest.mark.parametrize("cache", ["8GB", 10**9, True, Cache])
def test_cache_must_be_a_cache(cache):
    """Anything but a `Cache` is an error that shows how to make one."""
    with pytest.raises(TypeError, match=r'such as Cache\("8GB"\)'):
        DataLoader(Plain(), cache=cache)


@pytest.mark.parametrize("dataset", [Plain(), Staged(), Subset(Plain(), [1, 2])])
def test_level_must_exist(dataset):
    """A level that the dataset does not have is an error at the first batch and in the plan."""
    level = "decoded" if isinstance(dataset, Staged) else "raw"
    loader = DataLoader(dataset, cache=Cache("1MB", level=level))
    if level == "decoded":  # It has no images, and its samples take their place.
        assert next(iter(loader)) is not None
        return
    for use in (iter, lambda loader: loader.plan):
        with pytest.raises(ValueError, match=r'it has no load stage\. Use level="sample"'):
            use(loader)


@pytest.mark.parametrize("size", [0, -1, "", "8 XB", "many", 1.5, True, "-3GB", "0GB"])
def test_size_must_be_bytes(size):
    """A size that is none is an error that shows how to write one."""
    with pytest.raises(ValueError, match='number of bytes or a text such as "8GB"'):
        Cache(size)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("8GB", 8 * 10**9), ("1.5 MiB", 3 << 19), ("10", 10), ("2 kb", 2000)]
)
def test_sizes_are_read(text, num_bytes):
    """A size may be a text with a unit."""
    assert Cache(text).max_bytes == num_bytes


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"level": "images"}, ValueError, '"raw", "decoded" or "sample".*Leave it out'),
        ({"max_side": 0}, ValueError, "number of pixels.*Leave it out"),
        ({"max_side": "256"}, ValueError, "number of pixels.*Leave it out"),
        ({"token": 3}, TypeError, "token must be a str"),
    ],
)
def test_other_arguments_are_checked(arguments, kind, message):
    """Other wrong arguments are errors that say what is right."""
    with pytest.raises(kind, match=message):
        Cache(**arguments)


# -- start methods, copies, statistics -------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "in_directory"),
    [
        ("spawn", False),
        pytest.param("spawn", True, marks=EXHAUSTIVE),
        pytest.param("forkserver", False, marks=EXHAUSTIVE),
        pytest.param("forkserver", True, marks=EXHAUSTIVE),
    ],
)
def test_children_that_are_not_forked(method, in_directory, tmp_path, log):
    """Children that are not forked share the cache, in memory and in a directory."""
    directory = tmp_path / "cache" if in_directory else None
    loader = DataLoader(
        Staged(log),
        batch_size=5,
        num_workers=2,
        num_processes=2,
        multiprocessing_context=method,
        cache=Cache("1MB", directory=directory, token="1", level="sample"),
    )
    expected = list(DataLoader(Staged(), batch_size=5))
    with loader:
        assert_same(list(loader), expected)
        log.take()
        assert_same(list(loader), expected)
    assert log.take() == []
    assert hits_of(loader) == (SIZE, 0)


def test_copies_share_the_cache():
    """A copy of a loader uses the same cache."""
    loader = DataLoader(Plain(), batch_size=5, cache=Cache("1MB"))
    list(loader)
    other = copy.copy(loader)
    assert_same(list(other), list(loader))
    assert hits_of(other) == (SIZE, 0)
    assert copy.deepcopy(loader).cache is loader.cache


def test_pickled_loader_has_empty_cache(tmp_path, log):
    """A loader that was pickled has the same cache, which is empty if it is in memory."""
    for directory, expected in ((None, (0, SIZE)), (tmp_path / "cache", (SIZE, 0))):
        cache = Cache("1MB", directory=directory, token=directory and "1")
        loader = DataLoader(Plain(), batch_size=5, cache=cache)
        list(loader)
        other = pickle.loads(pickle.dumps(loader))
        assert repr(other.cache) == repr(cache)
        list(other)
        assert hits_of(other) == expected


@pytest.mark.children
def test_profile_with_a_cache():
    """A loader with a cache can be profiled, and uses the cache afterwards."""
    loader = DataLoader(Staged(), batch_size=5, num_workers=2, cache=Cache("1MB"))
    with loader:
        expected = list(loader)
        assert "cache" in str(loader.profile(3, sweep=False).stats)
        assert_same(list(loader), expected)
        assert hits_of(loader) == (SIZE, 0)


@pytest.mark.parametrize("place", SOME_PLACES)
def test_statistics_count_each_epoch(place):
    """The statistics have the hits and misses of the epoch, the entries and the bytes."""
    loader = DataLoader(Plain(), batch_size=5, cache=Cache("1MB", level="sample"), **PLACES[place])
    assert loader.stats().cache is None
    with loader:
        for hits, misses in ((0, SIZE), (SIZE, 0)):
            list(loader)
            stats = loader.stats().cache
            assert (stats.num_hits, stats.num_misses) == (hits, misses)
            assert stats.num_entries == SIZE
            assert SIZE * 6400 < stats.num_bytes < SIZE * 7500
            assert (stats.max_bytes, stats.level, stats.directory) == (10**6, "sample", None)
            assert not stats.is_full
    assert f"cache: sample, {SIZE} hits, 0 misses, {SIZE} entries" in str(loader.stats())


def test_clear_forgets_all(log):
    """After `clear`, samples are made again, and kept again."""
    cache = Cache("1MB")
    loader = DataLoader(Plain(log), batch_size=5, cache=cache)
    list(loader)
    cache.clear()
    log.take()
    list(loader)
    assert {*log.take()} == {f"make {index}" for index in range(SIZE)}
    assert loader.stats().cache.num_entries == SIZE


# -- an object store -------------------------------------------------------------------------------


class Store(http.server.ThreadingHTTPServer):
    """An object store that keeps a list of the requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        body = self.path.encode() * 100
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def store():
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Objects(Sized, StagedDataset):
    __getitem__ = StagedDataset.__getitem__

    def __init__(self, port):
        super().__init__()
        self.port = port

    async def load(self, index):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{index:03}") as answer:
            return answer.read()

    def preprocess(self, raw):
        return int(raw[1:4])


@pytest.mark.parametrize(
    ("level", "place"), sampled_product(["raw", "sample", None], PLACES, every=4)
)
def test_objects_are_requested_once(store, place, level):
    """Each object is requested once, and later epochs make no request."""
    options = {"batch_size": 5, "shuffle": True, "seed": 3, **PLACES[place]}
    cache = Cache("1MB", level=level)
    with DataLoader(Objects(store.server_port), cache=cache, **options) as loader:
        for _ in range(3):
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(SIZE))
    assert sorted(store.requests) == [f"/{index:03}" for index in range(SIZE)]
