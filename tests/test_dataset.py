"""StagedDataset: its hooks in our loader and in torch's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import pickle
import threading

import pytest
import torch
import torch.utils.data
from torch.utils.data import Subset, get_worker_info

from spdl_torch import DataLoader, ReplaceBadSamples, StagedDataset

from .conftest import assert_says_nothing
from .datasets import Squares, Staged, StagedAsync, StagedMany, StagedManyAsync

STAGED = [Staged(10), StagedAsync(10), StagedMany(10), StagedManyAsync(10)]
EXPECTED = [("collated", [0, 10, 20, 30]), ("collated", [40, 50, 60, 70]), ("collated", [80, 90])]


@pytest.mark.parametrize("dataset", STAGED)
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_hooks_run_in_order(dataset, num_workers):
    """Load, preprocess and collate are applied in this order."""
    assert list(DataLoader(dataset, batch_size=4, num_workers=num_workers)) == EXPECTED


@pytest.mark.parametrize("dataset", STAGED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_size_none_yields_samples(dataset, num_workers):
    """With batch_size=None the loader yields samples."""
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    assert list(loader) == list(range(0, 100, 10))


@pytest.mark.parametrize("dataset", STAGED)
def test_it_works_under_torchs_own_loader(dataset):
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=dataset.collate)
    assert list(loader) == EXPECTED
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, collate_fn=dataset.collate, num_workers=2
    )
    assert list(loader) == EXPECTED


@pytest.mark.parametrize("dataset", STAGED)
def test_getitem_returns_a_sample(dataset):
    """dataset[i] runs load and preprocess."""
    assert dataset[3] == 30


def test_getitem_works_in_a_notebook():
    """dataset[i] works while the thread's event loop is running."""

    async def cell():
        # A notebook's cells run in an event loop that is busy with them.
        return StagedAsync(10)[3]

    assert asyncio.run(cell()) == 30


@pytest.mark.parametrize("dataset", STAGED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_subset_keeps_the_stages(dataset, num_workers):
    subset = Subset(Subset(dataset, [9, 1, 2, 3]), [0, 3])
    assert list(DataLoader(subset, batch_size=2, num_workers=num_workers)) == [
        ("collated", [90, 30])
    ]


class ThreadNames(StagedDataset):
    def __len__(self):
        return 6

    def load(self, index):
        return threading.current_thread().name

    def preprocess(self, raw):
        return raw, threading.current_thread().name

    def collate(self, samples):
        return [(*names, threading.current_thread().name) for names in samples]


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(6))])
def test_hooks_run_in_their_stage(wrap):
    """Each hook runs in the threads of its stage."""
    for batch in DataLoader(wrap(ThreadNames()), batch_size=2, num_workers=2):
        for load, preprocess, collate in batch:
            assert load.startswith("spdl_torch-load")
            assert preprocess.startswith("spdl_torch-preprocess")
            assert collate.startswith("spdl_torch-preprocess")


class NoPreprocess(StagedDataset):
    def __len__(self):
        return 6

    def load(self, index):
        return index


def test_load_alone_is_enough():
    loader = DataLoader(NoPreprocess(), batch_size=4, num_workers=2)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


def test_missing_hooks_are_named():
    """A dataset without load and load_many is an error that names both."""

    class Empty(StagedDataset):
        def __len__(self):
            return 1

    with pytest.raises(NotImplementedError, match=r"Empty needs a load\(index\) or a load_many"):
        list(DataLoader(Empty(), num_workers=1))


def test_an_async_preprocess_is_refused():
    class Mistaken(NoPreprocess):
        async def preprocess(self, raw):
            return raw

    with pytest.raises(TypeError, match="only load and load_many may be"):
        iter(DataLoader(Mistaken(), num_workers=1))


class UnrelatedLoad(Squares):
    def load(self, path):
        raise AssertionError("has nothing to do with stages")


def test_unrelated_load_is_not_called():
    """A method `load` of another class is not a hook."""
    loader = DataLoader(UnrelatedLoad(3), num_workers=2)
    assert [batch.item() for batch in loader] == [0, 1, 4]


class Recording(StagedMany):
    def __init__(self, size):
        super().__init__(size)
        self.requests = []

    def load_many(self, indices):
        self.requests.append(list(indices))
        return super().load_many(indices)


def test_load_many_runs_once_per_batch():
    """load_many gets all indices of a batch in one call."""
    dataset = Recording(10)
    list(DataLoader(dataset, batch_size=4, num_workers=2))
    assert sorted(dataset.requests) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_collate_fn_overrides_the_dataset():
    """The loader's collate_fn has priority over the dataset's collate."""
    assert list(DataLoader(Staged(2), batch_size=2, collate_fn=sum, num_workers=1)) == [10]


# -- an overridden __getitem__ ---------------------------------------------------------------------


class OwnGetitem(Staged):
    def __getitem__(self, index):
        return super().__getitem__(index) + 1


class OwnGetitemAsync(StagedAsync):
    def __getitem__(self, index):
        return super().__getitem__(index) + 1


class OwnGetitemOfMany(StagedMany):
    def __getitem__(self, index):
        return super().__getitem__(index) + 1


class OwnGetitems(Staged):
    def __getitems__(self, indices):
        return [self[index] + 1 for index in indices]


class OwnGetitemAndGetitems(OwnGetitems, OwnGetitem):
    """Adds one in each of them."""


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(10))])
@pytest.mark.parametrize(
    ("kind", "added", "added_one_by_one"),
    [
        (OwnGetitem, 1, 1),
        (OwnGetitemAsync, 1, 1),
        (OwnGetitemOfMany, 1, 1),
        (OwnGetitems, 1, 0),
        (OwnGetitemAndGetitems, 2, 1),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("arguments", "one_by_one"),
    [
        ({}, False),
        ({"seed": 1}, False),
        ({"on_error": ReplaceBadSamples()}, True),
        ({"on_error": ReplaceBadSamples(), "seed": 1}, True),
    ],
)
def test_own_getitem_makes_the_samples(
    wrap, kind, added, added_one_by_one, num_workers, arguments, one_by_one
):
    """A method that a class overrides makes its samples, with and without workers."""
    loader = DataLoader(wrap(kind(10)), batch_size=4, num_workers=num_workers, **arguments)
    plus = added_one_by_one if one_by_one else added
    assert list(loader) == [(word, [n + plus for n in numbers]) for word, numbers in EXPECTED]


@pytest.mark.parametrize("kind", [OwnGetitem, OwnGetitemOfMany, OwnGetitems])
def test_own_getitem_under_torchs_loader(kind):
    """torch's loader makes the same samples of a class that overrides a method."""
    dataset = kind(10)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=dataset.collate)
    assert list(loader) == list(DataLoader(dataset, batch_size=4, num_workers=2))


class OwnNoise(Staged):
    def preprocess(self, raw):
        return torch.rand(2)

    def __getitem__(self, index):
        return super().__getitem__(index) + torch.rand(2)

    def collate(self, samples):
        return torch.stack(samples).tolist()


def test_own_getitem_draws_the_same():
    """With a seed, an overridden __getitem__ draws the same with any number of workers."""
    batches = [
        list(DataLoader(OwnNoise(10), batch_size=4, num_workers=number, seed=1))
        for number in (0, 1, 3)
    ]
    assert batches[0] == batches[1] == batches[2]


class OwnThreadNames(ThreadNames):
    def __getitem__(self, index):
        return super().__getitem__(index)


def test_own_getitem_is_one_stage():
    """A class that overrides __getitem__ runs in the workers of one stage."""
    for batch in DataLoader(OwnThreadNames(), batch_size=2, num_workers=2):
        for load, preprocess, collate in batch:
            assert load == preprocess
            assert load.startswith("spdl_torch-preprocess")
            assert collate.startswith("spdl_torch-preprocess")


# -- an awaitable of a plain function --------------------------------------------------------------


def logged(function):
    """Decorate a function as many do, without `async def`."""

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class LoggedLoad(Staged):
    @logged
    async def load(self, index):
        return str(index)


class LoggedLoadMany(StagedMany):
    @logged
    async def load_many(self, indices):
        return [str(index) for index in indices]


def lambda_load():
    return StagedDataset.from_functions(["a", "b"], load=lambda path: read_async(path.strip()))


@pytest.mark.parametrize("make", [lambda_load, LoggedLoad, LoggedLoadMany])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("arguments", [{}, {"seed": 1}, {"batch_size": None}])
def test_awaitable_of_plain_load_is_refused(make, num_workers, arguments):
    """A plain load that returns an awaitable is an error that asks for `async def`."""
    with pytest.raises(TypeError, match=r"\(coroutine\), but it is not declared `async def`"):
        list(DataLoader(make(), num_workers=num_workers, **arguments))
    gc.collect()  # A coroutine that was never awaited would warn now.


class ReadAsync:
    async def __call__(self, folder, path):
        return folder + path.upper()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_partial_of_async_callable_is_async(num_workers):
    """A partial of an object whose __call__ is `async def` is an asynchronous load."""
    load = functools.partial(ReadAsync(), "/")
    dataset = StagedDataset.from_functions(["a", "b"], load=load, collate="".join)
    assert list(DataLoader(dataset, batch_size=2, num_workers=num_workers)) == ["/A/B"]


# -- from_functions -------------------------------------------------------------------------------


def read(path):
    return path.upper()


async def read_async(path):
    return path.upper()


def read_many(paths):
    return [path.upper() for path in paths]


async def read_many_async(paths):
    return [path.upper() for path in paths]


def decode(raw):
    return raw + "!"


@pytest.mark.parametrize(
    "functions",
    [
        {"load": read},
        {"load": read_async},
        {"load_many": read_many},
        {"load_many": read_many_async},
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_from_functions_makes_a_dataset(functions, num_workers):
    """Functions and a list make a dataset that can be pickled."""
    dataset = StagedDataset.from_functions(
        ["a", "b", "c"], preprocess=decode, collate="".join, **functions
    )
    assert len(dataset) == 3
    assert dataset[1] == "B!"
    assert list(DataLoader(dataset, batch_size=2, num_workers=num_workers)) == ["A!B!", "C!"]
    assert pickle.loads(pickle.dumps(dataset))[2] == "C!"


def test_from_functions_without_load():
    """Without load, the elements themselves are the raw forms."""
    dataset = StagedDataset.from_functions([1, 2, 3], preprocess=float)
    loader = DataLoader(dataset, batch_size=3, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[1.0, 2.0, 3.0]]


# -- one event loop -------------------------------------------------------------------------------


class BoundToItsLoop(StagedDataset):
    """Makes something that belongs to an event loop, as a client session does."""

    def __init__(self):
        self.loops = []

    def __len__(self):
        return 4

    async def load(self, index):
        if not self.loops:
            self.loops.append(asyncio.get_running_loop())
        assert asyncio.get_running_loop() is self.loops[0]
        return index


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_event_loop_survives_epochs(persistent_workers):
    """Async loads run in the same event loop in every epoch."""
    loader = DataLoader(BoundToItsLoop(), num_workers=2, persistent_workers=persistent_workers)
    for _ in range(3):
        assert [batch.item() for batch in loader] == [0, 1, 2, 3]
    loader.close()


def test_event_loop_without_workers():
    """Without workers, async loads of a thread share one event loop."""
    for _ in range(2):
        assert len(list(DataLoader(BoundToItsLoop()))) == 4


class ThroughAThread(StagedDataset):
    def __len__(self):
        return 12

    async def load(self, index):
        return await asyncio.to_thread(int, index)


def test_worker_processes_have_own_loops():
    """Forked worker processes do not use the parent's event loop."""
    dataset = ThroughAThread()
    assert dataset[0] == 0  # Now this thread has one, which the processes are forked with.
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=2)
    for _ in range(3):
        assert torch.cat(list(loader)).tolist() == list(range(12))
    assert dataset[1] == 1


def test_child_exit_spares_parent_loop():
    """A forked child that exits does not unregister what wakes its parent's event loop."""
    assert_says_nothing(
        "import asyncio, os\n"
        "from spdl_torch import DataLoader, StagedDataset\n"
        "class Photos(StagedDataset):\n"
        "    def __len__(self): return 4\n"
        "    async def load(self, index): return await asyncio.to_thread(abs, -index)\n"
        "loaders = [DataLoader(Photos(), num_workers=number) for number in (0, 1)]\n"
        "assert [len(list(loader)) for loader in loaders] == [4, 4]\n"
        "if os.fork() == 0:\n"
        "    assert [len(list(loader)) for loader in loaders] == [4, 4]\n"
        "    loaders.clear()\n"
        "    raise SystemExit\n"
        "assert os.wait()[1] == 0\n"
        "assert [len(list(loader)) for loader in loaders] == [4, 4]\n"
    )


class SwallowsCancelling(StagedDataset):
    def __init__(self):
        self.is_waiting = threading.Event()

    def __len__(self):
        return 100

    async def load(self, index):
        if index > 1:
            self.is_waiting.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return index


def test_close_ends_uncancellable_load():
    """close() ends a load that suppresses its cancellation."""
    dataset = SwallowsCancelling()
    loader = DataLoader(dataset, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    assert dataset.is_waiting.wait(30)
    loader.close()


# -- what a worker knows about itself -------------------------------------------------------------


class Info(StagedDataset):
    def __len__(self):
        return 40

    def load(self, index):
        return get_worker_info()

    def preprocess(self, raw):
        return raw, get_worker_info()

    def collate(self, samples):
        return samples


def test_workers_have_own_ids_and_seeds():
    """Workers of all stages have different ids and seeds."""
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Info(), num_workers=2, num_io_workers=5, batch_size=8, generator=generator)
    base_seed = torch.empty((), dtype=torch.int64).random_(
        generator=torch.Generator().manual_seed(3)
    )
    for batch in loader:
        for load, preprocess in batch:
            assert preprocess.id in range(2)
            assert load.id in range(2, 7)
            for info in (load, preprocess):
                assert info.num_workers == 7
                assert info.seed == base_seed.item() + info.id
                assert info.dataset is loader.dataset
                assert info.worker_method == "thread"


def test_async_load_exits_silently():
    """An event loop whose executor has threads is closed silently at exit."""
    assert_says_nothing(
        "import asyncio\n"
        "from spdl_torch import StagedDataset\n"
        "class Photos(StagedDataset):\n"
        "    def __len__(self): return 2\n"
        "    async def load(self, index): return await asyncio.to_thread(abs, -index)\n"
        "assert Photos()[1] == 1\n"
    )
