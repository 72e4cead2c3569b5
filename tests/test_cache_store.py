"""The store of the cache: kills, races and damage are misses, never wrong bytes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import threading
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import ToImage

from spdl_torch import Cache, CacheDirectoryError, DataLoader, ImageLoader
from spdl_torch._cache import _space, _store
from spdl_torch._cache._codec import decoded, encoded, joined
from spdl_torch._cache._levels import VALUE
from spdl_torch._cache._space import DirectoryFiles, Space
from spdl_torch._cache._store import Store, clear, spaces_in

from .datasets import PATIENCE_SECONDS
from .tiers import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the cache needs Linux")

FORK = multiprocessing.get_context("fork")
SOAK = int(os.environ.get("SPDL_TORCH_SOAK", "0")) or 1
MEGABYTE = 1 << 20
METHODS = ["spawn", "fork", "forkserver"]
NUM = 60
"""How many entries most spaces here have."""


def key(number):
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def content(number):
    """Return the bytes of an entry: different ones of a different size for each."""
    source = random.Random(number)
    return source.randbytes(source.randrange(1, 3000))


def open_space(store, name="space"):
    return store.space(name, NUM, {"level": "raw"})


def fill(store, numbers=range(NUM), name="space"):
    space = open_space(store, name)
    for number in numbers:
        data = content(number)
        space.put(key(number), VALUE, [data[:7], data[7:]], store.usage)
    return space


def found(space, numbers=range(NUM)):
    """Return which entries are found, after a check that their bytes are right."""
    entries = {number: space.get(key(number)) for number in numbers}
    there = {number: entry for number, entry in entries.items() if entry is not None}
    for number, entry in there.items():
        assert entry.memory.tobytes() == content(number)
    return list(there)


def ends_of(directory):
    """Return how many bytes are reserved in a directory."""
    return sum(Space(f.name, DirectoryFiles(f)).end for f in spaces_in(directory))


def _run(function, arguments):
    torch.set_num_threads(1)  # Its other threads are not forked, and it would wait for them.
    function(*arguments)


def start(function, *arguments):
    process = FORK.Process(target=_run, args=(function, arguments))
    process.start()
    return process


def end_of(process):
    """Return the exit code of a process, which must not hang."""
    process.join(PATIENCE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail("the process hangs")
    return process.exitcode


def run(function, *arguments):
    """Run a function in a process of its own, which must not fail, hang or be killed."""
    assert end_of(start(function, *arguments)) == 0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(params=["memory", "directory"])
def directory(request, tmp_path):
    """A new directory for a cache, or None for one in memory."""
    return tmp_path / "cache" if request.param == "directory" else None


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


class Numbers(Dataset):
    """Its samples are tensors that tell their index; they are as different as their datasets."""

    def __init__(self, first=0, size=NUM, width=300):
        self.first, self.size, self.width = first, size, width

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((self.width,), self.first + index)


def assert_right(batches, dataset):
    rows = torch.cat([*batches])
    assert torch.equal(rows[:, 0], torch.arange(dataset.first, dataset.first + len(dataset)))
    assert torch.equal(rows, rows[:, :1].expand_as(rows))


def loader_of(cache, dataset=None, **options):
    return DataLoader(dataset or Numbers(), batch_size=4, cache=cache, **options)


# -- several processes at once --------------------------------------------------------------------


def test_two_processes_fill_together(directory):
    """Two processes that fill a space at once add each entry once, with the right bytes."""
    store = Store(MEGABYTE, directory)
    open_space(store)
    meet = FORK.Barrier(2)

    def fills(numbers):
        own = store if directory is None else Store(MEGABYTE, directory)
        meet.wait(PATIENCE_SECONDS)
        fill(own, numbers)

    processes = [start(fills, range(NUM)) for _ in range(2)]
    assert [end_of(process) for process in processes] == [0, 0]
    space = open_space(store)
    assert found(space) == list(range(NUM))
    assert sorted(space.keys()) == sorted(map(key, range(NUM)))
    assert space.num_entries == NUM
    assert store.usage.num_bytes == space.end <= MEGABYTE


def test_threads_fill_together(directory):
    """Threads that fill a space at once add each entry once, with the right bytes."""
    store = Store(MEGABYTE, directory)
    meet = threading.Barrier(4)

    def fills():
        meet.wait(PATIENCE_SECONDS)
        fill(store)

    threads = [threading.Thread(target=fills) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    space = open_space(store)
    assert found(space) == list(range(NUM))
    assert space.num_entries == len(list(space.keys())) == NUM
    assert store.usage.num_bytes == space.end


def test_threads_open_one_space(directory):
    """Threads that ask for a new space at once get one, and not a space each."""
    store = Store(MEGABYTE, directory)
    meet = threading.Barrier(4)

    def opens(number):
        meet.wait(PATIENCE_SECONDS)
        space = open_space(store)
        space.put(key(number), VALUE, [content(number)], store.usage)

    threads = [threading.Thread(target=opens, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found(open_space(store), range(4)) == [0, 1, 2, 3]


def test_processes_make_one_space(folder):
    """Processes that make the same space at once make one, and leave nothing else."""
    meet = FORK.Barrier(3)

    def makes(number):
        meet.wait(PATIENCE_SECONDS)
        fill(Store(MEGABYTE, folder), [number])

    processes = [start(makes, number) for number in range(3)]
    assert [end_of(process) for process in processes] == [0, 0, 0]
    assert found(open_space(Store(MEGABYTE, folder)), range(3)) == [0, 1, 2]
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1


def test_budget_holds_with_two_writers(directory):
    """Two processes that fill a cache that is too small stay below its size together."""
    max_bytes = 30_000
    store = Store(max_bytes, directory)
    spaces = [open_space(store, name) for name in "ab"]
    meet = FORK.Barrier(2)

    def fills(name):
        meet.wait(PATIENCE_SECONDS)
        fill(store, name=name)

    processes = [start(fills, name) for name in "ab"]
    assert [end_of(process) for process in processes] == [0, 0]
    reserved = sum(space.end for space in spaces)
    assert max_bytes - 3000 < reserved == store.usage.num_bytes <= max_bytes


def test_counting_misses_no_bytes(folder):
    """A process that counts what is used does not miss what others reserve meanwhile."""
    max_bytes = 200_000
    store = Store(max_bytes, folder)
    open_space(store)
    meet = FORK.Barrier(2)

    def counts():
        meet.wait(PATIENCE_SECONDS)
        for _ in range(100):  # A space that is opened is counted.
            open_space(Store(max_bytes, folder), "other")

    counter = start(counts)
    meet.wait(PATIENCE_SECONDS)
    fill(store, range(1000))
    assert end_of(counter) == 0
    assert store.usage.num_bytes == ends_of(folder) <= max_bytes


@pytest.mark.children
@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_share_one_budget(directory, persistent):
    """Loaders that share a cache stay below its size together, and deliver the right samples."""
    cache = Cache(60_000, directory=directory, token="1")
    options = {"num_workers": 2, "persistent_workers": persistent}
    datasets = [Numbers(), Numbers(1000, NUM + 1)]
    loaders = [loader_of(cache, dataset, **options) for dataset in datasets]
    for _ in range(3):
        pairs = list(itertools.zip_longest(*loaders))
        for dataset, batches in zip(datasets, zip(*pairs, strict=True), strict=True):
            assert_right([batch for batch in batches if batch is not None], dataset)
        assert 40_000 < loaders[0].stats().cache.num_bytes <= 60_000
    for loader in loaders:
        loader.close()


@pytest.mark.children
def test_persistent_workers_count_hits(directory):
    """The figures of each epoch are those of its own samples, with persistent workers too."""
    loader = loader_of(
        Cache("1MB", directory=directory, token="1"), num_workers=2, persistent_workers=True
    )
    counts = []
    for _ in range(3):
        assert_right(loader, loader.dataset)
        stats = loader.stats().cache
        counts.append((stats.num_hits, stats.num_misses))
    assert counts == [(0, NUM), (NUM, 0), (NUM, 0)]
    loader.close()


@pytest.mark.children
@pytest.mark.parametrize("case", sampled(itertools.product(METHODS, [False, True]), every=3))
def test_start_methods_share_entries(tmp_path, case):
    """What child processes keep, those of the next epoch find, however they are started."""
    method, in_directory = case
    directory = tmp_path / "cache" if in_directory else None
    cache = Cache("1MB", directory=directory, token="1")
    loader = loader_of(cache, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        assert_right(loader, loader.dataset)
    assert loader.stats().cache.num_misses == 0


# -- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["space", "usage"])
def test_fork_while_locked(directory, which):
    """A process that is forked while a thread has a lock can add entries when that is free."""
    store = Store(MEGABYTE, directory)
    open_space(store)
    is_locked, is_forked = threading.Event(), threading.Event()
    lock = store.usage.lock if which == "usage" else open_space(store)._files.table.lock

    def locks():
        with lock():
            is_locked.set()
            assert is_forked.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=locks)
    thread.start()
    assert is_locked.wait(PATIENCE_SECONDS)
    child = start(fill, store)
    is_forked.set()
    thread.join()
    fill(store)
    assert end_of(child) == 0
    space = open_space(store)
    assert found(space) == list(range(NUM))
    assert (space.num_entries, store.usage.num_bytes) == (NUM, space.end)


def test_forked_lock_is_not_shared(directory):
    """A lock that is held when a process is forked keeps that process out too."""
    store = Store(MEGABYTE, directory)
    receive, send = FORK.Pipe(duplex=False)

    def locks():
        with store.usage.lock():
            send.send("in the child")

    with store.usage.lock():
        child = start(locks)
        assert not receive.poll(0.1)
    assert receive.poll(PATIENCE_SECONDS)
    assert end_of(child) == 0


def test_forked_generations_share_entries(directory):
    """A forked process and a process that it forks add entries that all find."""
    store = Store(MEGABYTE, directory)
    fill(store, range(5))

    def grandchild():
        assert found(fill(store, range(10, 15)), range(15)) == list(range(15))

    def child():
        fill(store, range(5, 10))
        run(grandchild)

    run(child)
    assert found(open_space(store), range(15)) == list(range(15))


def test_loader_in_forked_process(directory):
    """A forked process uses a loader and its cache as its parent does."""
    loader = loader_of(Cache("1MB", directory=directory, token="1"))
    batches = iter(loader)
    next(batches)

    def child():
        assert_right(loader, loader.dataset)
        assert loader.stats().cache.num_hits >= 4

    run(child)
    assert_right(loader, loader.dataset)
    assert loader.stats().cache.num_misses == 0


def test_written_view_changes_no_entry(directory):
    """What a process writes to the memory of an entry, other processes do not read."""
    store = Store(MEGABYTE, directory)
    space = fill(store)
    for number in range(NUM):
        space.get(key(number)).memory[:] = 0
    run(found, space)
    if directory is not None:
        assert found(open_space(Store(MEGABYTE, directory))) == list(range(NUM))


@pytest.mark.parametrize("options", [{}, {"collate_fn": list}, {"batch_size": None}])
def test_written_batch_changes_no_entry(directory, options):
    """A training loop may write to its batches; the next epoch is as it was."""
    cache = Cache("1MB", directory=directory, token="1")
    loader = DataLoader(Numbers(), **{"batch_size": 4, "cache": cache} | options)
    for _ in range(3):
        rows = []
        for batch in loader:
            for sample in [batch] if "batch_size" in options else batch:
                rows.append(sample.clone())
                sample.zero_()
        assert_right([torch.stack(rows)], loader.dataset)
    assert loader.stats().cache.num_misses == 0


# -- processes that are killed --------------------------------------------------------------------


def dies_at_line(number, function):
    """Call a function, and die before the so manieth line of the store that it executes."""
    files = {_space.__file__, _store.__file__}
    left = itertools.count(number, -1)

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(left) == 0:
            die()
        return trace

    sys.settrace(trace)
    function()
    sys.settrace(None)


def kill_at_all_lines(function, check, step):
    """Run a function in processes that die at each of its lines, and check after each."""
    for number in itertools.count(0, step):
        code = end_of(start(dies_at_line, number, function))
        assert code in (0, -signal.SIGKILL)
        check()
        if code == 0:
            return number
    raise AssertionError


@pytest.mark.parametrize(
    "step", [pytest.param(7, id="some"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
def test_killed_at_any_line_of_put(directory, step):
    """A process that dies at any line of adding entries leaves right ones, and no lock."""
    store = Store(100 * MEGABYTE, directory)
    ends = itertools.count(3, 3)
    end = [next(ends)]

    def fills():
        fill(store, range(end[0] - 3, end[0]))

    def check():
        there = found(open_space(store), range(end[0]))
        assert there[: end[0] - 3] == list(range(end[0] - 3))
        space = fill(store, range(end[0]))
        assert found(space, range(end[0])) == list(range(end[0]))
        assert len(list(space.keys())) == end[0]
        assert space.end <= store.usage.num_bytes <= store.max_bytes
        end[0] = next(ends)

    assert kill_at_all_lines(fills, check, step) > 50


@pytest.mark.parametrize(
    "step", [pytest.param(7, id="some"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
def test_killed_at_any_line_of_opening(tmp_path, step):
    """A process that dies at any line of making a cache leaves one that can be used."""
    places = (tmp_path / str(number) for number in itertools.count())
    where = [next(places)]

    def makes():
        open_space(Store(MEGABYTE, where[0]))

    def check():
        store = Store(MEGABYTE, where[0])
        assert found(fill(store)) == list(range(NUM))
        names = {path.name for path in where[0].iterdir() if path.is_dir()}
        assert len(names) == 1
        where[0] = next(places)

    assert kill_at_all_lines(makes, check, step) > 30


def test_killed_writers_leave_right_usage(folder):
    """What a process has taken of the budget, and did not use, is free for the next run."""
    store = Store(MEGABYTE, folder)
    fill(store, range(3))
    with store.usage.lock():
        assert store.usage.take(1000)  # As a process that dies before it moves the end.
    store = Store(MEGABYTE, folder)
    end = open_space(store).end
    assert store.usage.num_bytes == end == ends_of(folder)


def kill_randomly(folder, num_kills, source):
    """Kill processes that run epochs of a loader with a cache, at random moments."""
    dataset = Numbers(size=400, width=500)

    def epochs(ready):
        loader = loader_of(Cache("4MB", directory=folder, token="1"), dataset, num_workers=2)
        ready.set()
        while True:
            assert_right(loader, dataset)

    for number in range(num_kills):
        ready = FORK.Event()
        process = start(epochs, ready)
        assert ready.wait(PATIENCE_SECONDS)
        # The moment is what is random here, so it is a time.
        assert wait([process.sentinel], source.uniform(0, 0.2)) == []
        process.kill()
        assert end_of(process) == -signal.SIGKILL
        if number % 5 == 4:
            shutil.rmtree(folder)
    loader = loader_of(Cache("4MB", directory=folder, token="1"), dataset)
    for _ in range(2):
        assert_right(loader, dataset)
    assert loader.stats().cache.num_misses == 0


def test_killed_loaders_leave_right_entries(folder):
    """After loaders were killed while they filled a cache, it has right samples and fills up."""
    kill_randomly(folder, 10, random.Random(0))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_killed_loaders(folder):
    """After hundreds of kills too, the cache has right samples and fills up."""
    kill_randomly(folder, 200 * SOAK, random.Random(1))


# -- damage ---------------------------------------------------------------------------------------


def flip(path, source):
    data = bytearray(path.read_bytes())
    for _ in range(source.choice([1, 1, 20])):
        if data:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    overwrite_in_place(path, bytes(data))


def overwrite_in_place(path, data):
    with path.open("r+b") as file:
        file.write(data)


def zero_page(path, source):
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(source.randrange(max(1, size // 4096)) * 4096)
        file.write(bytes(min(4096, size)))


def zero_all(path, source):
    overwrite_in_place(path, bytes(path.stat().st_size))


def truncate(path, source):
    os.truncate(path, source.choice([0, source.randrange(path.stat().st_size + 1)]))


def delete(path, source):
    path.unlink()


def become_directory(path, source):
    path.unlink()
    path.mkdir()


def swap(path, source):
    """Exchange a file with the one of the same name in the other space, or with another one."""
    others = [other for other in files_of(path.parent.parent) if other != path]
    others = [other for other in others if other.name == path.name] or others
    if others:
        other, aside = source.choice(others), path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


def copy_over(path, source):
    """Write another file's bytes into a file, after it was emptied."""
    others = [other for other in files_of(path.parent.parent) if other != path]
    path.write_bytes(source.choice(others or [path]).read_bytes())


DAMAGES = [flip, zero_page, truncate, delete, become_directory, swap, copy_over]
TARGETS = ["table", "data-00000", "about.json", "usage", "spdl_torch_cache.json"]


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def use_damaged(folder, damages):
    """Damage two spaces that are full and in use, then use them and open them again."""
    store = Store(100 * MEGABYTE, folder)
    spaces = [fill(store, range(first, NUM, 2), name) for first, name in enumerate("ab")]
    for space in spaces:
        found(space)
    for damage, target, source in damages:
        paths = [path for path in files_of(folder) if path.name == target or target is None]
        if paths:
            damage(source.choice(paths), source)
    for space in spaces:
        found(space)
        for number in range(NUM):
            space.put(key(number), VALUE, [content(number)], store.usage)
        found(space)
    has_marker = (folder / "spdl_torch_cache.json").exists()
    with contextlib.suppress(CacheDirectoryError):
        store = Store(100 * MEGABYTE, folder)
        for name in "ab":
            assert isinstance(found(open_space(store, name)), list)
            # Also behind a counter that is damaged nothing is wrong, but it may not fill up.
            found(fill(store, name=name))
        return
    can_be_opened = has_marker and (folder / "usage").is_file()
    assert not can_be_opened


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("target", TARGETS)
def test_damage_is_a_miss(folder, damage, target):
    """A damaged file never makes wrong bytes, kills a process or stops it, in use or not."""
    for seed in range(2):
        run(use_damaged, folder / str(seed), [(damage, target, random.Random(seed))])


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_damages_are_misses(folder):
    """Random damage of random files, several at once, never makes wrong bytes."""
    source = random.Random(0)
    for number in range(200 * SOAK):
        damages = [
            (source.choice(DAMAGES), source.choice([*TARGETS, None]), source)
            for _ in range(source.choice([1, 1, 2, 5]))
        ]
        run(use_damaged, folder / str(number), damages)


@pytest.mark.parametrize("target", ["data-00000", "table"])
@pytest.mark.parametrize("damage", [zero_all, truncate, delete])
def test_damaged_cache_fills_again(folder, damage, target):
    """After damage, the next runs find fewer samples, then all of them again."""
    dataset = Numbers()
    list(loader_of(Cache("1MB", directory=folder, token="1")))
    (path,) = (path for path in files_of(folder) if path.name == target)
    damage(path, random.Random(0))
    loader = loader_of(Cache("1MB", directory=folder, token="1"))
    num_misses = []
    for _ in range(2):
        assert_right(loader, dataset)
        num_misses.append(loader.stats().cache.num_misses)
    assert num_misses[0] > 0
    assert num_misses[1] == 0


@pytest.mark.parametrize("is_in_use", [False, True])
def test_damaged_end_fills_again(folder, is_in_use):
    """A space whose end of the data is damaged is made again, by the next run or the next epoch."""
    cache = Cache("1MB", directory=folder, token="1")
    loader = loader_of(cache)
    list(loader)
    (table,) = (path for path in files_of(folder) if path.name == "table")
    data = bytearray(table.read_bytes())
    data[17] ^= 1
    overwrite_in_place(table, bytes(data))
    if not is_in_use:
        loader = loader_of(Cache("1MB", directory=folder, token="1"))
    num_misses = []
    for _ in range(2):
        assert_right(loader, loader.dataset)
        num_misses.append(loader.stats().cache.num_misses)
    assert num_misses == [NUM, 0]


def test_replaced_data_is_not_replaced_again(folder):
    """What was added after a data file was deleted is found, also where the old one is open."""
    store = Store(MEGABYTE, folder)
    space = fill(store)
    found(space)
    (data,) = (path for path in files_of(folder) if path.name == "data-00000")
    data.write_bytes(b"")
    data.unlink()
    assert found(space) == []
    end = fill(store).end
    assert found(space) == list(range(NUM))
    fill(store)
    assert space.end == end


def test_moved_space_is_a_miss(folder):
    """The files of a space under the name of another one have none of its entries."""
    store = Store(MEGABYTE, folder)
    fill(store)
    open_space(store, "other")
    (moved,) = (path for path in spaces_in(folder) if path.name.startswith("space"))
    shutil.rmtree(folder / moved.name.replace("space", "other"))
    moved.rename(folder / moved.name.replace("space", "other"))
    assert found(open_space(Store(MEGABYTE, folder), "other")) == []


def test_other_format_is_a_miss(folder, monkeypatch):
    """Another version of the format finds nothing, and leaves what is there as it is."""
    fill(Store(MEGABYTE, folder))
    monkeypatch.setattr(_store, "FORMAT", 1000)
    store = Store(MEGABYTE, folder)
    assert found(open_space(store)) == []
    used = store.usage.num_bytes
    assert used > 0  # The bytes of the other version count.
    monkeypatch.undo()
    assert found(open_space(Store(MEGABYTE, folder))) == list(range(NUM))


# -- directories that are removed, full, or cannot be used ----------------------------------------


def test_clear_during_a_run(folder):
    """A cache that is cleared while a loader uses it does no harm to either."""
    cache = Cache("1MB", directory=folder, token="1")
    loader = loader_of(cache)
    batches = iter(loader)
    rows = [next(batches)]
    clear(folder)
    other = loader_of(Cache("1MB", directory=folder, token="1"))
    assert_right(other, other.dataset)
    assert_right([*rows, *batches], loader.dataset)
    assert_right(other, other.dataset)
    assert other.stats().cache.num_misses == 0
    assert_right(loader, loader.dataset)
    assert loader.stats().cache.num_misses == 0


@pytest.mark.children
@pytest.mark.parametrize(
    ("method", "persistent"),
    [
        ("fork", False),
        ("fork", True),
        ("spawn", True),
        pytest.param("spawn", False, marks=pytest.mark.exhaustive),
    ],
)
def test_directory_removed_during_run(folder, method, persistent):
    """A loader goes on when the directory of its cache is removed, and makes it again."""
    cache = Cache("1MB", directory=folder, token="1")
    loader = loader_of(
        cache, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
    )
    for _ in range(3):
        batches = iter(loader)
        rows = [next(batches)]
        shutil.rmtree(folder, ignore_errors=True)
        assert_right([*rows, *batches], loader.dataset)
    loader.close()


def test_rest_of_removed_directory_is_used(folder):
    """What a writer leaves in a directory while it is removed does not make it unusable."""
    cache = Cache("1MB", directory=folder, token="1")
    loader = loader_of(cache)
    assert_right(loader, loader.dataset)
    space = spaces_in(folder)[0]
    for path in [*folder.iterdir(), *space.iterdir()]:
        if path.is_file() and not path.name.startswith("data"):
            path.unlink()
    for _ in range(2):
        assert_right(loader, loader.dataset)
    assert loader.stats().cache.num_misses == 0


@pytest.mark.children
def test_child_restarted_after_clear(folder):
    """A child that takes the place of one that died starts although the cache was cleared."""
    loader = loader_of(Cache("1MB", directory=folder, token="1"), num_workers=2)
    batches = iter(loader)
    rows = [next(batches)]
    shutil.rmtree(folder, ignore_errors=True)  # The children may add files meanwhile.
    for process in multiprocessing.active_children():
        if process.name.startswith("spdl_torch"):
            process.kill()
    assert_right([*rows, *batches], loader.dataset)


def test_clear_forgets_entries(directory):
    """A cleared cache has no entries; loaders fill it again."""
    cache = Cache("1MB", directory=directory, token="1")
    loader = loader_of(cache)
    for _ in range(2):
        assert_right(loader, loader.dataset)
    cache.clear()
    num_misses = []
    for _ in range(2):
        assert_right(loader, loader.dataset)
        num_misses.append(loader.stats().cache.num_misses)
    assert num_misses == [NUM, 0]


def test_clear_removes_only_caches(tmp_path):
    """A directory that is no cache is not cleared."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "about.json").write_text("{}")
    with pytest.raises(CacheDirectoryError, match="no cache of spdl_torch, so nothing was removed"):
        Cache("1MB", directory=tmp_path).clear()
    assert (tmp_path / "project" / "about.json").exists()


def fill_with_limit(folder, num_bytes):
    """Use a loader where files can be no larger than so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    dataset = Numbers(size=300)
    loader = loader_of(Cache("10MB", directory=folder, token="1"), dataset)
    for _ in range(2):
        assert_right(loader, dataset)
    assert 0 < loader.stats().cache.num_hits < len(dataset)


def test_write_error_is_no_error(folder):
    """A loader goes on without an error when its cache can no longer write."""
    run(fill_with_limit, folder, 200_000)


@contextlib.contextmanager
def small_disk(path, num_bytes):
    """Mount a small disk, or skip the test if this is not allowed."""
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={num_bytes}".encode()
    if libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, options) != 0:
        pytest.skip("no disk can be mounted here")
    try:
        yield path
    finally:
        assert libc.umount2(bytes(path), 2) == 0


def fill_disk(folder):
    dataset = Numbers(size=600)
    loader = loader_of(Cache("10MB", directory=folder, token="1"), dataset, num_workers=2)
    for _ in range(2):
        assert_right(loader, dataset)
    assert 0 < loader.stats().cache.num_hits < len(dataset)


@pytest.mark.children
def test_full_disk_is_no_error(tmp_path):
    """A loader goes on without an error when the disk of its cache is full."""
    with small_disk(tmp_path / "disk", MEGABYTE) as disk:
        run(fill_disk, disk / "cache")


def test_full_disk_at_start(tmp_path):
    """A disk without room for a table is an error that says what to do, and leaves nothing."""
    with small_disk(tmp_path / "disk", 100_000) as disk:
        with pytest.raises(CacheDirectoryError, match="Use a directory on a local disk that has"):
            next(iter(loader_of(Cache("10MB", directory=disk / "cache", token="1"))))
        assert [path for path in (disk / "cache").iterdir() if path.is_dir()] == []


def test_file_is_no_directory(tmp_path):
    """A file in the place of the directory is an error that says what to do."""
    (tmp_path / "file").write_text("")
    cache = Cache("1MB", directory=tmp_path / "file", token="1")
    with pytest.raises(CacheDirectoryError, match="Use a directory on a local disk"):
        iter(loader_of(cache))


def test_foreign_directory_is_refused(tmp_path):
    """A directory with other files is an error that says what to do, and stays as it is."""
    (tmp_path / "thesis.txt").write_text("")
    cache = Cache("1MB", directory=tmp_path, token="1")
    with pytest.raises(CacheDirectoryError, match="Use an empty or new directory"):
        iter(loader_of(cache))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_unwritable_directory_is_refused(tmp_path):
    """A directory that is not writable is an error that says what to do."""
    place = tmp_path / "cache"
    place.mkdir(mode=0o555)

    def tries():
        if os.geteuid() == 0:  # Who may write everywhere. The rest of the path is open.
            os.chdir(place)
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(CacheDirectoryError, match="that you may write to"):
            Store(MEGABYTE, Path())

    run(tries)


def test_error_names_the_directory(tmp_path):
    """The error of a directory that cannot be used names it and the reason."""
    (tmp_path / "usage").mkdir()
    (tmp_path / "spdl_torch_cache.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(CacheDirectoryError, match=f"{tmp_path} .*Is a directory"):
        Store(MEGABYTE, tmp_path)


# -- what is read ---------------------------------------------------------------------------------


class Evil:
    """Its pickle runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_pickled_functions_are_not_called(tmp_path):
    """Entries that name functions are refused: they are misses, and the functions do not run."""
    made = tmp_path / "made"
    list(loader_of(Cache("1MB", directory=tmp_path / "good", token="1")))
    (good,) = spaces_in(tmp_path / "good")
    store = Store(MEGABYTE, tmp_path / "evil")
    space = store.space(good.name.rpartition("-")[0], NUM, {})
    evil = joined(encoded(Evil(made), is_shared=False))
    for each in Space(good.name, DirectoryFiles(good)).keys():  # noqa: SIM118
        space.put(each, VALUE, [evil], store.usage)
    assert space.num_entries == NUM
    loader = loader_of(Cache("1MB", directory=tmp_path / "evil", token="1"))
    assert_right(loader, loader.dataset)
    assert loader.stats().cache.num_misses == NUM
    assert not made.exists()


def test_functions_are_not_kept(folder, tmp_path):
    """A value whose pickle names a function is not kept in a directory."""
    assert encoded(Evil(tmp_path / "made"), is_shared=True) is None
    assert not (tmp_path / "made").exists()


def test_codec_returns_what_it_took():
    """Values come back equal, with views of the memory or with copies."""
    value = {"image": torch.arange(1000), "name": "a", "label": 3, "empty": torch.empty(0)}
    memory = _space.np.frombuffer(bytearray(joined(encoded(value, is_shared=True))), "uint8")
    for copies in (False, True):
        back = decoded(memory, is_shared=True, copies=copies)
        assert torch.equal(back.pop("image"), value["image"])
        assert back.pop("empty").shape == (0,)
        assert back == {"name": "a", "label": 3}


def test_directory_keeps_nothing_of_objects(tmp_path):
    """A directory has no entries that only an object of this run could tell from others."""
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "images" / "a" / f"{number}.png")
    load_image = ImageLoader(8)
    load_image.note = object()
    dataset = ImageFolder(tmp_path / "images", loader=load_image, transform=ToImage())
    cache = Cache("1MB", directory=tmp_path / "cache", token="1")
    for _ in range(2):
        images, _ = next(iter(DataLoader(dataset, batch_size=4, cache=cache, fuse=False)))
        assert images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    levels = [json.loads((f / "about.json").read_text()) for f in spaces_in(tmp_path / "cache")]
    assert [about.get("level") for about in levels] == ["raw"]


# -- memory is given back -------------------------------------------------------------------------


def held(text):
    """Return the descriptors and mappings of files with a text in their names."""
    paths = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The one that lists the directory.
            paths.append(str(path.readlink()))
    paths += Path("/proc/self/maps").read_text().splitlines()
    return [path for path in paths if text in path]


@pytest.mark.children
@pytest.mark.parametrize("num_workers", [0, 2])
def test_dropped_cache_holds_nothing(directory, num_workers):
    """When a cache and its loaders are dropped, no file and no memory of it stays open."""
    text = "memfd:spdl_torch" if directory is None else str(directory)
    gc.collect()  # Of the tests before.
    before = held(text)
    cache = Cache("1MB", directory=directory, token="1")
    loader = loader_of(cache, num_workers=num_workers)
    for _ in range(2):
        assert_right(loader, loader.dataset)
    assert len(held(text)) > len(before)
    loader.close()
    del cache, loader
    gc.collect()  # The loader is part of a cycle.
    assert held(text) == before


def test_reads_need_no_more_descriptors(folder):
    """Each segment is opened once for reading, however many entries are read."""
    space = fill(Store(MEGABYTE, folder))
    found(space)
    before = len(held(str(folder)))
    found(space)
    assert len(held(str(folder))) == before
