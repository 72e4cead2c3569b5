"""Faults, and much of everything: what only shows after the thousandth time.

It wants a process to itself: memory that other tests have left free hides what it looks for. So it
runs only when it is asked to, at the size that is given, ten times as long with 10:

    SPDL_TORCH_SOAK=1 pytest -m soak

Random choices follow from the seed in a test's name, so a failure can be had again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import gc
import itertools
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from spdl_torch import DataLoader, ReplaceBadSamples, StagedDataset

from .conftest import own_thread_names
from .datasets import PATIENCE_SECONDS, Squares

SOAK = int(os.environ.get("SPDL_TORCH_SOAK", "0")) or 1
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(120 * SOAK),
    pytest.mark.skipif("SPDL_TORCH_SOAK" not in os.environ, reason="SPDL_TORCH_SOAK is not set"),
]

CHILDREN = {"child": 1, "iterable in children": 2}
"""How many child processes the workers of these kinds live in. Those of the others are threads."""
KINDS = ["threads", "staged", "async", "iterable", "executor", "meta", *CHILDREN]
NUM_WORKERS = 2
BATCH_SIZE = 4


def seeds(number):
    return pytest.mark.parametrize("seed", range(number * SOAK))


class Fault(Exception):  # noqa: N818 (it is what the tests make, not what they find)
    pass


# -- datasets of all kinds, whose batches say which samples they are made of -----------------------


class Parcel:
    """A batch that goes to a device, unless it is told to fail."""

    def __init__(self, indices, block=None, fault=None):
        self.indices, self.block, self.fault = indices, block, fault
        self.device = None

    def to(self, device, *_, **__):
        if self.fault is not None:
            raise Fault(self.fault)
        sent = Parcel(self.indices, None if self.block is None else self.block.to(device))
        sent.device = torch.device(device)
        return sent


def parcel(samples):
    return Parcel([int(sample[0]) for sample in samples], torch.stack(samples))


@dataclass
class Numbered(Dataset):
    size: int
    width: int = 1

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((self.width,), index, dtype=torch.float64)


class NumberedStaged(StagedDataset, Numbered):
    def load(self, index):
        return index

    def preprocess(self, raw):
        return Numbered.__getitem__(self, raw)


class NumberedAsync(NumberedStaged):
    async def load(self, index):
        await asyncio.sleep(0)
        return index


class NumberedIterable(IterableDataset, Numbered):
    def __iter__(self):
        info = get_worker_info()
        return (Numbered.__getitem__(self, i) for i in range(info.id, self.size, info.num_workers))


DATASETS = {
    "staged": NumberedStaged,
    "async": NumberedAsync,
    "iterable": NumberedIterable,
    "iterable in children": NumberedIterable,
}


def loader_of(kind, size=40, *, width=1, pool=None, **arguments):
    dataset = DATASETS.get(kind, Numbered)(size, width)
    arguments = {
        "batch_size": BATCH_SIZE,
        "num_workers": NUM_WORKERS,
        "num_io_workers": 3 if kind in ("staged", "async") else None,
        "collate_fn": parcel,
        "preprocess_executor": pool if kind == "executor" else None,
        "device": "meta" if kind == "meta" else None,
        "num_processes": CHILDREN.get(kind, 0),
    } | arguments
    return DataLoader(dataset, **arguments)


def indices_of(batches):
    return [batch.indices for batch in batches]


def expected_indices(kind, size=40):
    """What a loader of this kind gives, found without one."""
    if DATASETS.get(kind) is not NumberedIterable:
        return chunks(range(size))
    shares = [chunks(range(worker, size, NUM_WORKERS)) for worker in range(NUM_WORKERS)]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*shares))
    return [batch for batch in in_turn if batch is not None]


def chunks(indices):
    return [list(indices[n : n + BATCH_SIZE]) for n in range(0, len(indices), BATCH_SIZE)]


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as executor:
        # Its threads start now, not in the middle of a count.
        both_are_there = threading.Barrier(2)
        list(executor.map(lambda _: both_are_there.wait(PATIENCE_SECONDS), range(2)))
        yield executor


def own_threads():
    return [t for t in threading.enumerate() if t.name.startswith("spdl_torch")]


def await_end(threads):
    """Threads that nobody joins end by themselves, but not in an instant."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for thread in threads:
        while True:
            try:
                thread.join(PATIENCE_SECONDS)
                break
            except RuntimeError:  # Its start was interrupted, and it is still about to begin.
                assert time.monotonic() < deadline, f"{thread.name} has not begun"
                time.sleep(0.001)
    assert [thread.name for thread in threads if thread.is_alive()] == []


# -- what is used up -------------------------------------------------------------------------------


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (no need for paths)


def resident_bytes():
    # What is free but still ours would take up a leak without a trace.
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def collect(kind):
    """Collect garbage where it holds descriptors.

    It should not: test_async_loader_closes_descriptors.
    """
    if kind in ("async", "all"):
        gc.collect()


@dataclass
class Used:
    """What the process holds now."""

    num_bytes: int = field(default_factory=resident_bytes)
    num_blocks: int = field(default_factory=sys.getallocatedblocks)
    num_descriptors: int = field(default_factory=num_descriptors)
    threads: list[str] = field(
        default_factory=lambda: sorted(t.name for t in threading.enumerate())
    )


# -- faults ----------------------------------------------------------------------------------------


class Faulty(StagedDataset):
    """Some samples and some batches fail, each in one of the stages; some samples are slow."""

    def __init__(self, rng, size, batch_size):
        self.size, self.batch_size = size, batch_size
        self.sample_faults = {
            index: rng.choice(["load", "preprocess"])
            for index in rng.sample(range(size), rng.randrange(1, size // 4))
        }
        self.batch_faults = {
            number: rng.choice(["collate", "transfer"])
            for number in range(size)
            if rng.random() < 0.2
        }
        self.slow = set(rng.sample(range(size), 5))

    def __len__(self):
        return self.size

    def load(self, index):
        if index in self.slow:
            time.sleep(0.002)
        return self._checked("load", index)

    def preprocess(self, raw):
        return self._checked("preprocess", raw)

    def _checked(self, stage, index):
        if self.sample_faults.get(index) == stage:
            raise Fault(f"{stage} {index}")
        return index

    def collate(self, samples):
        number = samples[0] // self.batch_size
        stage = self.batch_faults.get(number)
        if stage == "collate":
            raise Fault(f"collate {number}")
        return Parcel(samples, fault=f"transfer {number}" if stage == "transfer" else None)

    def expected(self, *, is_sent):
        """What the loop is to get for each batch, in order."""
        found = []
        for first in range(0, self.size, self.batch_size):
            indices = list(range(first, min(first + self.batch_size, self.size)))
            number = first // self.batch_size
            bad = [index for index in indices if index in self.sample_faults]
            stage = self.batch_faults.get(number)
            if bad:
                found.append(f"{self.sample_faults[bad[0]]} {bad[0]}")
            elif stage == "collate" or (stage == "transfer" and is_sent):
                found.append(f"{stage} {number}")
            else:
                found.append(indices)
        return found


class FaultyAsync(Faulty):
    async def load(self, index):
        if index in self.slow:
            await asyncio.sleep(0.002)
        return self._checked("load", index)


class FaultyWhole(Dataset):
    """The same without stages."""

    def __init__(self, *arguments):
        self.staged = Faulty(*arguments)
        self.collate, self.expected = self.staged.collate, self.staged.expected

    def __len__(self):
        return len(self.staged)

    def __getitem__(self, index):
        return self.staged.preprocess(self.staged.load(index))


def outcomes(iterator):
    """Every batch and every fault that the loop gets."""
    found = []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return found
        except Fault as error:
            found.append(str(error))
        else:
            found.append(batch.indices)


@pytest.mark.parametrize("num_processes", [0, 1, 2])
@seeds(16)
def test_each_fault_at_its_batch(seed, num_processes, pool):
    """Each fault is raised at its batch, and all other batches are right."""
    rng = random.Random(seed)
    batch_size = rng.randrange(1, 7)
    cls = rng.choice([Faulty, FaultyAsync, FaultyWhole])
    dataset = cls(rng, rng.randrange(40, 120), batch_size)
    device = rng.choice([None, "meta"])
    num_workers = rng.randrange(9)
    arguments = {}
    if num_workers > 0:
        arguments["persistent_workers"] = rng.random() < 0.5
        arguments["in_order"] = rng.random() < 0.5
        arguments["num_processes"] = min(num_processes, num_workers)
        if cls is Faulty and rng.random() < 0.3 and num_processes == 0:
            arguments["preprocess_executor"] = pool
    expected = dataset.expected(is_sent=device is not None)
    with DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=dataset.collate,
        device=device,
        **arguments,
    ) as loader:
        for _ in range(2):
            found = outcomes(iter(loader))
            if not arguments.get("in_order", True):
                found, expected = sorted(found, key=str), sorted(expected, key=str)
            assert found == expected


# -- slow and huge samples -------------------------------------------------------------------------


class Census:
    """Counts the samples that are alive, and how many there ever were at a time."""

    def __init__(self):
        self._lock = threading.Lock()
        self.num_alive = self.most_alive = 0

    def is_born(self):
        with self._lock:
            self.num_alive += 1
            self.most_alive = max(self.most_alive, self.num_alive)

    def has_died(self):
        with self._lock:
            self.num_alive -= 1


class Huge:
    def __init__(self, index, census):
        self.values = torch.full((1 << 20,), index, dtype=torch.float32)  # 4 MB
        self.census = census
        census.is_born()

    def __del__(self):
        self.census.has_died()


class HugeAndSlow(StagedDataset):
    def __init__(self, size, slow, census):
        self.size, self.slow, self.census = size, slow, census

    def __len__(self):
        return self.size

    def load(self, index):
        if index in self.slow:
            time.sleep(0.01)
        return Huge(index, self.census)

    def preprocess(self, raw):
        return raw


class HugeAndSlowAsync(HugeAndSlow):
    async def load(self, index):
        if index in self.slow:
            await asyncio.sleep(0.01)
        return Huge(index, self.census)


@seeds(6)
def test_huge_samples_fit_the_window(seed):
    """No more huge samples are alive than the window holds."""
    rng = random.Random(seed)
    size, batch_size, window = 60, rng.randrange(1, 4), rng.randrange(1, 4)
    census = Census()
    cls = rng.choice([HugeAndSlow, HugeAndSlowAsync])
    loader = DataLoader(
        cls(size, set(rng.sample(range(size), 10)), census),
        batch_size=batch_size,
        num_workers=rng.randrange(1, 6),
        buffer_size=window,
        in_order=rng.random() < 0.5,
        collate_fn=list,
    )
    seen = []
    for batch in loader:
        seen += [int(sample.values[0]) for sample in batch]
        assert all(bool((sample.values == sample.values[0]).all()) for sample in batch)
    if loader.in_order:
        assert seen == list(range(size))
    assert sorted(seen) == list(range(size))
    # While the loop asks for a batch it still has the one before, and the window is filled up in
    # the moment in which the asked one leaves it.
    assert census.most_alive <= (window + 2) * batch_size
    del batch
    assert census.num_alive == 0


# -- broken off ------------------------------------------------------------------------------------

WIDTH = 8192
BATCH_BYTES = 8 * WIDTH * BATCH_SIZE
NUM_BROKEN_OFF = 200 * SOAK


class Kept:
    """A collate function that keeps the first batch of every loader, as a leak would."""

    def __init__(self):
        self.first_batches = []

    def collate(self):
        is_first = itertools.chain([True], itertools.repeat(False))

        def keep(samples):
            batch = parcel(samples)
            if next(is_first):
                self.first_batches.append(batch)
            return batch

        return keep


def break_off(loader, rng):
    """Leave the loop at a random batch, in one of the ways there are."""
    num_batches = rng.randrange(len(loader) + 2)
    way = rng.choice(["break", "raise", "drop", "close"])
    if way == "drop":
        iterator = iter(loader)
        for _ in zip(range(num_batches), iterator, strict=False):
            pass
        return
    with contextlib.suppress(Fault):
        for number, _ in enumerate(loader):
            if number >= num_batches:
                if way == "close":
                    loader.close()
                if way == "raise":
                    raise Fault
                break


def break_off_many(kind, number, rng, pool, kept=None):
    for _ in range(number):
        extra = {} if kept is None else {"collate_fn": kept.collate()}
        if rng.random() < 0.3:
            extra["persistent_workers"] = True
        break_off(loader_of(kind, 24, width=WIDTH, pool=pool, **extra), rng)


@pytest.mark.parametrize("kind", KINDS)
def test_abandoned_loaders_leave_nothing(kind, pool):
    """Loaders that are left in mid-epoch leave no thread, no descriptor and no memory."""
    rng = random.Random(0)
    break_off_many(kind, 30, rng, pool)  # What is made once is made now.
    collect(kind)
    before = Used()
    number = NUM_BROKEN_OFF // 5 if kind in CHILDREN else NUM_BROKEN_OFF
    break_off_many(kind, number, rng, pool)
    collect(kind)
    after = Used()
    print(kind, (after.num_bytes - before.num_bytes) / number, "bytes per loader")  # noqa: T201
    assert after.threads == before.threads
    assert after.num_descriptors == before.num_descriptors
    assert after.num_bytes - before.num_bytes < number * BATCH_BYTES / 4


@pytest.mark.parametrize("kind", ["threads", "meta"])
def test_leak_per_loader_is_seen(kind, pool):
    """The measurement sees a leak of one batch for each loader."""
    rng = random.Random(0)
    break_off_many(kind, 30, rng, pool)
    before, kept = Used(), Kept()
    break_off_many(kind, 200, rng, pool, kept)
    assert resident_bytes() - before.num_bytes > 200 * BATCH_BYTES / 4
    assert len(kept.first_batches) > 150


# -- by the thousand -------------------------------------------------------------------------------

NUM_DROPPED = 1000 * SOAK


def drop_many(number, use, pool):
    """Make loaders of all kinds with threads, use them, drop them; none may stay alive."""
    alive = weakref.WeakSet()
    kinds = [kind for kind in KINDS if kind not in CHILDREN]  # Processes take too long.
    for kind in itertools.islice(itertools.cycle(kinds), number):
        loader = loader_of(kind, 8, pool=pool)
        alive.add(loader)
        use(loader)
        del loader
    assert len(alive) == 0


@pytest.mark.parametrize("use", [lambda _: None, iter, list], ids=["never", "iter", "once"])
def test_dropped_loaders_leave_nothing(use, pool):
    """Thousands of loaders that are made and dropped leave nothing."""
    drop_many(60, use, pool)
    collect("all")
    before = Used()
    drop_many(NUM_DROPPED, use, pool)
    collect("all")
    after = Used()
    print((after.num_blocks - before.num_blocks) / NUM_DROPPED, "blocks per loader")  # noqa: T201
    assert after.threads == before.threads
    assert after.num_descriptors == before.num_descriptors
    assert after.num_blocks - before.num_blocks < NUM_DROPPED / 2


@pytest.mark.usefixtures("no_collector")
def test_async_loader_closes_descriptors():
    """A dropped loader of an async dataset closes its descriptors at once."""
    before = num_descriptors()
    assert indices_of(loader_of("async")) == expected_indices("async")
    assert num_descriptors() == before


@pytest.mark.usefixtures("no_collector")
def test_dataset_is_freed_with_loader():
    """A dataset is freed with its loader, without the garbage collector."""
    loader = loader_of("threads")
    dataset = weakref.ref(loader.dataset)
    assert indices_of(loader) == expected_indices("threads")
    del loader
    assert dataset() is None


@pytest.fixture
def no_collector():
    gc.collect()
    gc.freeze()  # What was there before is not looked at again, which takes long.
    gc.disable()
    yield
    gc.collect()
    gc.unfreeze()
    gc.enable()


# -- many batches ----------------------------------------------------------------------------------

NUM_BATCHES = 10_000 * SOAK
"""A hundred thousand with SPDL_TORCH_SOAK=10."""


class Cycling(Sampler):
    """Goes through the same few samples again and again, in one long epoch."""

    def __init__(self, size, number):
        self.size, self.number = size, number

    def __iter__(self):
        return (place % self.size for place in range(self.number))

    def __len__(self):
        return self.number


class Damaged(Squares):
    def __getitem__(self, index):
        if index % 10 == 3:
            raise ValueError(f"{index} is damaged")
        return index


LONG_RUNS = {
    "threads": (Squares(100), {}),
    "out of order": (Squares(100), {"in_order": False}),
    "bad samples": (Damaged(100), {"on_error": ReplaceBadSamples(max_fraction=None)}),
    "seed": (Squares(100), {"seed": 1}),
    "seed and bad samples": (
        Damaged(100),
        {"on_error": ReplaceBadSamples(max_fraction=None), "seed": 1},
    ),
    "meta": (Squares(100), {"device": "meta"}),
}
"""As one long epoch."""

EPOCHS = {
    "epochs": (Squares(1000), {"shuffle": True}),
    "epochs with a seed": (Squares(1000), {"shuffle": True, "seed": 1}),
    "epochs with bad samples": (
        Damaged(1000),
        {"shuffle": True, "on_error": ReplaceBadSamples(max_fraction=None)},
    ),
}
"""As many epochs of the same loader."""


def batches_of_a_long_run(name):
    arguments = {"batch_size": BATCH_SIZE, "num_workers": NUM_WORKERS}
    if name in LONG_RUNS:
        dataset, extra = LONG_RUNS[name]
        sampler = Cycling(len(dataset), NUM_BATCHES * BATCH_SIZE)
        yield from DataLoader(dataset, sampler=sampler, **arguments, **extra)
    else:
        dataset, extra = EPOCHS[name]
        with DataLoader(dataset, persistent_workers=True, **arguments, **extra) as loader:
            for _ in range(NUM_BATCHES // len(loader)):
                yield from loader


def growth_of_a_long_run(batches, kept=None):
    """What the last four fifths of the batches have added."""
    number = 0
    for number, batch in enumerate(batches, start=1):
        if kept is not None:
            kept.append(batch)
        if number == NUM_BATCHES // 5:
            early = Used()
    late = Used()
    assert number == NUM_BATCHES
    num_measured = NUM_BATCHES - NUM_BATCHES // 5
    return (
        (late.num_bytes - early.num_bytes) / num_measured,
        (late.num_blocks - early.num_blocks) / num_measured,
    )


MAX_BYTES_PER_BATCH = 100
MAX_BLOCKS_PER_BATCH = 0.05
"""A batch of four numbers is about 500 bytes in 3 blocks; the rest is room for noise."""


@pytest.mark.parametrize("name", [*LONG_RUNS, *EPOCHS])
def test_memory_is_flat(name):
    """Memory does not grow over many batches."""
    num_bytes, num_blocks = growth_of_a_long_run(batches_of_a_long_run(name))
    print(name, num_bytes, "bytes and", num_blocks, "blocks per batch")  # noqa: T201
    assert num_bytes < MAX_BYTES_PER_BATCH
    assert num_blocks < MAX_BLOCKS_PER_BATCH


def test_leak_per_batch_is_seen():
    """The measurement sees a leak of every batch."""
    # By the blocks: resident memory may hide a small one, in what earlier tests have left free.
    _, num_blocks = growth_of_a_long_run(batches_of_a_long_run("threads"), kept=[])
    assert num_blocks > MAX_BLOCKS_PER_BATCH


# -- several threads -------------------------------------------------------------------------------


def at_once(*functions):
    """Call each in a thread of its own, all at the same time."""
    barrier = threading.Barrier(len(functions))

    def call(function):
        barrier.wait(PATIENCE_SECONDS)
        return function()

    with ThreadPoolExecutor(len(functions)) as callers:
        futures = [callers.submit(call, function) for function in functions]
        return [future.result(PATIENCE_SECONDS) for future in futures]


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_two_loaders(kind, pool):
    """Two threads iterate two loaders at the same time."""

    def use():
        with loader_of(kind, 200, pool=pool) as loader:
            return [indices_of(loader) for _ in range(3)]

    for _ in range(3 * SOAK):
        assert at_once(use, use) == [[expected_indices(kind, 200)] * 3] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_with_one_loader(kind, pool):
    """Two threads have an iterator each of the same loader."""
    loader = loader_of(kind, 200, pool=pool)

    def use():
        return [indices_of(loader) for _ in range(3)]

    for _ in range(3 * SOAK):
        assert at_once(use, use) == [[expected_indices(kind, 200)] * 3] * 2


# -- fork ------------------------------------------------------------------------------------------

FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
"""Newer Pythons warn of every fork while there are threads. That it works is what we show."""


def exit_code_in_child(function):
    """Fork, and have the child call the function; 0 if it returns in time."""
    child = os.fork()
    if child == 0:  # pragma: no cover (in the child)
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_SECONDS)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@FORKS
@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "executor"])
def test_fork_in_mid_epoch(kind, persistent_workers):
    """A child forked in mid-epoch can iterate from the beginning, and the parent gets the rest."""
    # Not with an executor: a fork leaves its threads behind too, and they are not ours.
    expected = expected_indices(kind, 80)
    rng = random.Random(0)
    with loader_of(kind, 80, persistent_workers=persistent_workers) as loader:
        for _ in range(3 * SOAK):
            iterator = iter(loader)
            num_taken = rng.randrange(1, len(expected))
            seen = [next(iterator).indices for _ in range(num_taken)]

            def use_in_child():
                nonlocal iterator
                for _ in range(2):
                    assert indices_of(loader) == expected
                del iterator  # The parent's: its threads are not here to be joined.
                assert indices_of(loader) == expected

            assert exit_code_in_child(use_in_child) == 0
            assert seen + indices_of(iterator) == expected


class SumsInThreads(Squares):
    """Each sample is a sum over our loader, in whatever process it is made."""

    def __getitem__(self, index):
        return sum(int(batch) for batch in DataLoader(Squares(index), num_workers=2))


SUMS = [sum(i * i for i in range(n)) for n in range(6)]


@FORKS
def test_torch_workers_beside_our_threads():
    """torch's worker processes work beside our threads and inside our loop."""

    def theirs():
        return torch.utils.data.DataLoader(SumsInThreads(6), num_workers=2)

    loader = loader_of("threads", 24)
    seen = []
    for batch in loader:
        seen.append(batch.indices)
        if len(seen) % 3 == 1:
            assert [int(batch) for batch in theirs()] == SUMS
    assert seen == expected_indices("threads", 24)
    beside = list(zip(loader, theirs(), strict=True))
    assert indices_of(ours for ours, _ in beside) == expected_indices("threads", 24)
    assert [int(batch) for _, batch in beside] == SUMS


# -- the interpreter's exit ------------------------------------------------------------------------

EXIT_SERVER = """
import asyncio, atexit, functools, json, multiprocessing, os, signal, sys
import tempfile, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import torch
from torch.utils.data import IterableDataset
from spdl_torch import DataLoader, StagedDataset

class Signal:
    # Like an Event, but also from a forked child.
    def __init__(self): self.read_end, self.write_end = os.pipe()
    def set(self): os.write(self.write_end, b"1")
    def wait(self): os.read(self.read_end, 1)

class Data(StagedDataset):
    def __len__(self): return 1000
    def load(self, index): return index
    def preprocess(self, raw): return torch.full((10,), raw)

class Slow(Data):
    async def load(self, index):
        await asyncio.sleep(0.05)
        return index

class Busy(Data):
    def preprocess(self, raw): return (torch.rand(200, 200) @ torch.rand(200, 200)).sum()

is_computing = Signal()
class Long(Data):
    def preprocess(self, raw):
        if raw >= 4:
            is_computing.set()
            end = time.monotonic() + 1.5
            while time.monotonic() < end: torch.rand(1000, 1000) @ torch.rand(1000, 1000)
        return raw

async def leave_while_they_compute():
    for _ in DataLoader(Long(), batch_size=4, num_workers=2):
        is_computing.wait()
        break

class Nested(Data):
    def preprocess(self, raw): return len(list(DataLoader(Data(), batch_size=100, num_workers=2)))

class Endless(IterableDataset):
    def __iter__(self):
        while True: yield torch.zeros(3)

def get_stuck(*_, **__): threading.Event().wait()

class StuckParcel:
    to = get_stuck
    def __init__(self, samples): pass

class Deadlocked(Data):
    lock = threading.Lock()
    def load(self, index):
        self.lock.acquire()

def time_out(**arguments):
    iterator = iter(DataLoader(num_workers=2, timeout=0.1, **arguments))
    try: next(iterator)
    except RuntimeError as error: assert "timed out" in str(error)
    else: raise AssertionError
    return iterator

program = None
for line in sys.stdin:
    with tempfile.TemporaryFile() as stderr:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            os.dup2(stderr.fileno(), 2)
            signal.alarm(30)
            program = json.loads(line)
            break
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        seconds = time.monotonic() - started
        stderr.seek(0)
        print(json.dumps([code, seconds, stderr.read().decode()]), flush=True)
program_id = os.getpid()
# Outside of everything else, for the child is to end as any program does.
if program is not None:
    exec(program)
"""

EXITS = {
    "after break": "for _ in DataLoader(Data(), num_workers=2): break",
    "persistent, after break": """
        loader = DataLoader(Data(), num_workers=2, persistent_workers=True)
        for _ in loader: break
    """,
    "on a device, in mid-epoch": """
        iterator = iter(DataLoader(Data(), num_workers=2, device="meta")); next(iterator)
    """,
    "stuck on the way to a device": """
        iterator = time_out(dataset=Data(), device="meta", collate_fn=StuckParcel)
    """,
    "stuck in collate": """
        iterator = time_out(dataset=Data(), collate_fn=get_stuck)
    """,
    "with an executor of threads": """
        pool = ThreadPoolExecutor(2)
        iterator = iter(DataLoader(Data(), num_workers=2, preprocess_executor=pool))
        next(iterator)
    """,
    "with an executor of processes": """
        pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
        iterator = iter(DataLoader(Data(), num_workers=2, preprocess_executor=pool))
        next(iterator)
    """,
    "with async loads in flight": """
        iterator = iter(DataLoader(Slow(), num_workers=2, num_io_workers=50)); next(iterator)
    """,
    "async, persistent, after break": """
        loader = DataLoader(Slow(), num_workers=2, num_io_workers=50, persistent_workers=True)
        for _ in loader: break
    """,
    "iterable, in mid-epoch": """
        iterator = iter(DataLoader(Endless(), batch_size=8, num_workers=2)); next(iterator)
    """,
    "workers compute": """
        iterator = iter(DataLoader(Busy(), batch_size=8, num_workers=4)); next(iterator)
    """,
    "workers compute for a loop that was left beside an event loop": """
        thread = threading.Thread(target=asyncio.run, args=[leave_while_they_compute()])
        thread.start(); thread.join()
    """,
    "workers have loaders of their own": """
        iterator = iter(DataLoader(Nested(), num_workers=3)); next(iterator)
    """,
    "a thread iterates": """
        threading.Thread(target=list, args=[DataLoader(Data(), num_workers=2)]).start()
    """,
    "interrupted while workers are set up": """
        def interrupt(_):
            os.kill(program_id, signal.SIGINT)
            end = time.monotonic() + 0.4
            while time.monotonic() < end: torch.rand(300, 300) @ torch.rand(300, 300)
        try: next(iter(DataLoader(Data(), num_workers=16, worker_init_fn=interrupt)))
        except KeyboardInterrupt: pass
        else: raise AssertionError
    """,
    "a later exit handler forks": """
        def fork():
            if os.fork() == 0:
                thread = threading.Thread(target=list, args=[DataLoader(Data(), num_workers=2)])
                thread.start(); thread.join()
                os._exit(0)
            assert os.wait()[1] == 0
        if sys.version_info < (3, 12): atexit.register(fork)
        for _ in DataLoader(Data(), num_workers=2): break
    """,
    "deadlocked, after a timeout": """
        Deadlocked.lock.acquire()
        iterator = time_out(dataset=Deadlocked(), num_io_workers=2)
    """,
}


@pytest.fixture(scope="module")
def exit_of():
    """Runs a program to its end, in a fork of a process that has imported torch already."""
    with subprocess.Popen(
        [sys.executable, "-c", EXIT_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:

        def run(program):
            server.stdin.write(json.dumps(program) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield run
        server.stdin.close()
        server.wait(PATIENCE_SECONDS)


IN_THIS_PROCESS = "DataLoader = functools.partial(DataLoader, num_processes=0)\n"


@pytest.mark.parametrize("place", ["", IN_THIS_PROCESS], ids=["children", "threads"])
@pytest.mark.parametrize("name", EXITS)
def test_interpreter_exits_quietly(exit_of, name, place):
    """The interpreter exits soon and writes nothing to stderr, whatever the workers are doing."""
    lines = EXITS[name].strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    for _ in range(SOAK):
        code, seconds, stderr = exit_of(place + "\n".join(line[indent:] for line in lines))
        assert (code, stderr) == (0, "")
        assert seconds < 10


# -- deadlock --------------------------------------------------------------------------------------


class DeadlockedPairs(Squares):
    """The oldest deadlock there is: two samples take the same two locks the other way round."""

    def __init__(self):
        super().__init__(2)
        self.locks = [threading.Lock(), threading.Lock()]
        self.both_have_one = threading.Barrier(2)

    def __getitem__(self, index):
        with self.locks[index]:
            self.both_have_one.wait(PATIENCE_SECONDS)
            with self.locks[1 - index]:
                return index

    def resolve(self):
        # Taken away from the one that has it. When that one wants to release it, it is an error in
        # a worker of a closed loader, which concerns nobody.
        self.locks[0].release()


@pytest.mark.parametrize("device", [None, "meta"])
def test_deadlocked_workers_time_out(device):
    """Deadlocked workers are a timeout error that names their line, and close() warns of them."""
    dataset = DeadlockedPairs()
    loader = DataLoader(dataset, num_workers=2, timeout=0.2, device=device)
    iterator = iter(loader)
    with contextlib.ExitStack() as stack:
        stack.callback(dataset.resolve)
        for _ in range(2):  # The error can be repeated.
            with pytest.raises(RuntimeError, match=r"timed out(.|\n)*with self.locks\[1 - index\]"):
                next(iterator)
        started = time.monotonic()
        with pytest.warns(RuntimeWarning, match="2 worker thread.* still inside the dataset's"):
            loader.close()
        assert time.monotonic() - started < PATIENCE_SECONDS
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
    await_end(own_threads())


# -- recursion -------------------------------------------------------------------------------------


class Recursive(Squares):
    """Each sample is one more than the sum of all below it, for which it asks a loader."""

    def __getitem__(self, index):
        return 1 + sum(int(batch) for batch in DataLoader(Recursive(index), num_workers=2))


def test_dataset_nests_loaders():
    """A dataset may use loaders of itself, many levels deep."""
    assert [int(batch) for batch in DataLoader(Recursive(6), num_workers=2)] == [1, 2, 4, 8, 16, 32]


class OwnLoader(Squares):
    """All samples come from one loader that the dataset keeps, with its workers."""

    def __init__(self, size):
        super().__init__(size)
        self.loader = DataLoader(Squares(size), num_workers=2, persistent_workers=True)
        self.lock = threading.Lock()

    def __getitem__(self, index):
        with self.lock:
            return sum(int(batch) for batch in self.loader) + index


def test_dataset_keeps_a_loader():
    """A dataset may keep a loader with persistent workers."""
    total = sum(i * i for i in range(10))
    dataset = OwnLoader(10)
    for _ in range(3 * SOAK):
        assert [int(b) for b in DataLoader(dataset, num_workers=3)] == [
            total + i for i in range(10)
        ]
    dataset.loader.close()


@pytest.mark.parametrize("kind", KINDS)
def test_collate_iterates_another_loader(kind, pool):
    """A collate function may iterate another loader."""

    def collate(samples):
        # A child process may not have children.
        inner = loader_of(kind, 16, pool=inner_pool, num_processes=0)
        return Parcel([int(sample[0]) for sample in samples] + [len(indices_of(inner))])

    # An executor that waited for itself would wait for ever, whoever feeds it.
    with ThreadPoolExecutor(2) as inner_pool:
        for _ in range(2 * SOAK):
            found = indices_of(loader_of(kind, pool=pool, collate_fn=collate))
            assert found == [[*batch, 4] for batch in expected_indices(kind)]


class FailsInside(Squares):
    def __getitem__(self, index):
        if index == 0:
            raise Fault("at the bottom")
        return sum(int(batch) for batch in DataLoader(FailsInside(1), num_workers=2))


def test_fault_leaves_nested_loaders():
    """A fault in a loader inside a loader is raised by both."""
    with DataLoader(FailsInside(4), num_workers=2) as loader:
        iterator = iter(loader)
        for _ in range(4):
            with pytest.raises(Fault, match="at the bottom"):
                next(iterator)
        assert list(iterator) == []
    gc.collect()  # It should not need it: the next test.
    await_end(own_threads())


@pytest.mark.usefixtures("no_collector")
def test_caught_fault_leaves_no_thread():
    """A fault that was caught keeps no thread of a nested loader alive."""
    with DataLoader(FailsInside(2), num_workers=2) as loader:
        assert outcomes(iter(loader)) == ["at the bottom"] * 2
    assert own_thread_names() == []


# -- signals ---------------------------------------------------------------------------------------


class CtrlC:
    """Is pressed all the time, and heard at most once each time that somebody listens."""

    def __init__(self, seed, longest_seconds):
        self._rng = random.Random(seed)
        self._longest_seconds = longest_seconds
        self._ended = threading.Event()
        self._sender = threading.Thread(target=self._send)
        self.is_listening = False
        self.num_heard = 0

    def _send(self):
        while not self._ended.wait(self._rng.uniform(0.0001, self._longest_seconds)):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def _hear(self, *_):
        if self.is_listening:
            self.is_listening = False
            self.num_heard += 1
            raise KeyboardInterrupt

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._hear)
        self._sender.start()
        return self

    def __exit__(self, *_):
        self.is_listening = False
        self._ended.set()
        self._sender.join(PATIENCE_SECONDS)
        signal.signal(signal.SIGINT, self._before)


RESUMES = pytest.mark.filterwarnings("ignore:.*read again and thrown away:UserWarning")


def take(iterator, received):
    """Ask for one batch; true if there is none.

    In C: between the end of `next()` and an assignment Python itself would lose the batch.
    """
    num_received = len(received)
    received.extend(itertools.islice(iterator, 1))
    return len(received) == num_received


@RESUMES
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_random_moments(kind, in_order, pool, monkeypatch):
    """After each Ctrl-C an epoch is resumed: no batch is repeated, at most one is lost each time.

    A batch may be lost after next() has counted it as delivered and before the loop has it.
    """
    # Ctrl-C in the middle of a fork leaves sockets to the garbage collector, which reports them.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    expected = expected_indices(kind, 400)
    with (
        loader_of(
            kind,
            400,
            pool=pool,
            in_order=in_order,
            # The end of an epoch closes nothing: another test interrupts close().
            persistent_workers=True,
            timeout=PATIENCE_SECONDS,
        ) as loader,
        CtrlC(seed=0, longest_seconds=0.01) as ctrl_c,
    ):
        while ctrl_c.num_heard < 80 * SOAK:
            num_before = ctrl_c.num_heard
            places = [expected.index(batch) for batch in interrupted_epoch(loader, ctrl_c)]
            assert len(places) == len(set(places))
            assert len(places) >= len(expected) - (ctrl_c.num_heard - num_before)
            # Where one of an iterable dataset's workers had its turn, it may be another's.
            is_iterable = DATASETS.get(kind) is NumberedIterable
            assert places == sorted(places) or not in_order or is_iterable
    await_end(own_threads())


def interrupted_epoch(loader, ctrl_c):
    """Return what is received of an epoch that is resumed after each Ctrl-C."""
    iterator = iter(loader)
    received = []
    is_over = False
    while not is_over:
        try:
            ctrl_c.is_listening = True
            is_over = take(iterator, received)
            ctrl_c.is_listening = False
        except KeyboardInterrupt:
            iterator, is_over = resumed(loader, iterator, received)
    return indices_of(received)


def resumed(loader, iterator, received):
    """Return an iterator that resumes an epoch whose wait was interrupted, and whether it is over.

    It is the same one only if the interrupt came before next() had begun or after it had ended.
    """
    state = loader.state_dict()
    try:
        return iterator, take(iterator, received)
    except RuntimeError as error:
        if "iterator is closed" not in str(error):  # A timeout would be a hang.
            raise
    loader.load_state_dict(state)
    return iter(loader), False


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_leaves_no_thread(kind, pool, monkeypatch):
    """Ctrl-C at any moment before a loader closes leaves no thread."""
    # What is interrupted in a finaliser is not raised but reported.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with CtrlC(seed=0, longest_seconds=0.006) as ctrl_c:
        for _ in range(60 * SOAK):
            try:
                ctrl_c.is_listening = True
                for number, _ in enumerate(loader_of(kind, 16, pool=pool)):
                    if number == 2:
                        ctrl_c.is_listening = False
                        break
            except KeyboardInterrupt:
                pass
            await_end(own_threads())
    assert ctrl_c.num_heard > 10
    gc.collect()  # Half-made event loops of asyncio, while nobody minds.


def is_in_executor(frame):
    while frame is not None:
        if frame.f_globals["__name__"].startswith("concurrent.futures"):
            return True
        frame = frame.f_back
    return False


def interrupt_at(place, function, *arguments):
    """Call a function with a Ctrl-C at one of the places where Python hears it; false if none.

    Python hears a signal when a function begins and when one that is written in C has returned.
    Not inside an executor: CPython's own would keep its locks.
    """
    countdown = itertools.count(place, -1)

    def interrupt(frame, event, _):
        if event in ("call", "c_return") and not is_in_executor(frame) and next(countdown) == 0:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        function(*arguments)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@RESUMES
@pytest.mark.parametrize("kind", KINDS)
def test_interrupt_at_each_place(kind, pool, monkeypatch):
    """A wait that is interrupted at any place repeats no batch and loses at most one."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    expected = expected_indices(kind)
    for place in range(130):
        with loader_of(kind, pool=pool, timeout=PATIENCE_SECONDS) as loader:
            iterator = iter(loader)
            received = [next(iterator), next(iterator)]
            if interrupt_at(place, take, iterator, received):
                iterator, is_over = resumed(loader, iterator, received)
                assert not is_over
            found = indices_of([*received, *iterator])
        assert len(found) == len({tuple(batch) for batch in found}), place
        assert all(batch in expected for batch in found), place
        assert len(found) >= len(expected) - 1, place


@FORKS
def test_interrupted_close_can_be_repeated():
    """A second close() ends the threads that an interrupted one has left."""

    def close_twice():
        for place in range(100):
            loader = loader_of("threads")
            iterator = iter(loader)
            next(iterator)
            workers = own_threads()
            was_interrupted = interrupt_at(place, loader.close)
            loader.close()
            for worker in workers:
                worker.join(1)
            assert not any(worker.is_alive() for worker in workers), place
            if not was_interrupted:
                return

    # In a child, since the threads that are left cannot be ended.
    assert exit_code_in_child(close_twice) == 0


# -- garbage ---------------------------------------------------------------------------------------


class Node:
    """Part of a cycle."""


def drop_in_a_cycle(kind, num_batches, pool):
    """Leave a half-used iterator as cyclic garbage."""
    node = Node()

    def collate(samples):
        return parcel(samples) if node else None

    node.loader = loader_of(kind, pool=pool, collate_fn=collate)
    node.iterator = iter(node.loader)
    node.iterator.node = node
    for _ in range(num_batches):
        next(node.iterator)
    return weakref.ref(node)


def collect_until_dead(nodes):
    """A worker that is at work holds what it works for, until the window is full."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while [node() for node in nodes] != [None] * len(nodes):
        assert time.monotonic() < deadline, "some are never collected"
        gc.collect()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", KINDS)
def test_collected_iterators_end(kind, pool):
    """Half-used iterators in reference cycles end when they are collected."""
    rng = random.Random(0)
    num_before = num_descriptors()
    nodes = [drop_in_a_cycle(kind, rng.randrange(1, 10), pool) for _ in range(10 * SOAK)]
    assert len(own_thread_names()) >= (1 if kind in CHILDREN else 2) * len(nodes)
    assert None not in [node() for node in nodes]
    collect_until_dead(nodes)
    assert own_thread_names() == []
    collect(kind)
    assert num_descriptors() == num_before


class Collecting(Squares):
    """Collects garbage in its workers."""

    def __init__(self, nodes):
        super().__init__(2)
        self.nodes = nodes

    def __getitem__(self, index):
        collect_until_dead(self.nodes)
        return index


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", KINDS)
def test_worker_collects_other_iterators(kind, pool):
    """Half-used iterators end also if a worker of another loader collects them."""
    num_before = num_descriptors()
    nodes = [drop_in_a_cycle(kind, 2, pool) for _ in range(3 * SOAK)]
    threads = own_threads()
    assert [int(batch) for batch in DataLoader(Collecting(nodes), num_workers=2)] == [0, 1]
    await_end(threads)
    collect(kind)
    assert num_descriptors() == num_before


# -- copies ----------------------------------------------------------------------------------------


def pickled(loader):
    return pickle.loads(pickle.dumps(loader))


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", KINDS)
def test_copy_in_mid_epoch(kind, clone, persistent_workers, pool):
    """A copy made in mid-epoch begins with the first batch, and the original is not disturbed."""
    if kind == "executor" and clone is not copy.copy:
        pytest.skip("an executor of threads can be neither pickled nor copied")
    expected = expected_indices(kind)
    rng = random.Random(0)
    with loader_of(kind, pool=pool, persistent_workers=persistent_workers) as loader:
        for _ in range(2 * SOAK):
            iterator = iter(loader)
            seen = [next(iterator).indices for _ in range(rng.randrange(1, len(expected)))]
            with clone(loader) as copied:
                assert indices_of(copied) == expected
            assert seen + indices_of(iterator) == expected


def test_copy_resumes_too():
    """A copy of a loader that is to resume from a state resumes too."""
    with loader_of("threads", seed=3, shuffle=True) as loader:
        whole = indices_of(loader)
    with loader_of("threads", seed=3, shuffle=True) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        state = loader.state_dict()
    with loader_of("threads", seed=3, shuffle=True) as loader:
        loader.load_state_dict(state)
        for clone in (copy.copy, copy.deepcopy, pickled):
            with clone(loader) as copied:
                assert indices_of(copied) == whole[4:]
        assert indices_of(loader) == whole[4:]
