"""`loader.profile()` and `CachedLoader`."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from spdl_torch import (
    CachedLoader,
    DataLoader,
    DistributedRandomSampler,
    ReplaceBadSamples,
    RetryLoad,
    StagedDataset,
)

from .conftest import own_thread_names
from .datasets import Sharded, Squares, StagedMany

SIZE = 80
BATCH_SIZE = 4

with_sweep = pytest.mark.parametrize(
    "sweep", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
"""A sweep takes seconds: the default tier has it in one test."""


class Slow(StagedDataset):
    def __len__(self):
        return SIZE

    def load(self, index):
        time.sleep(0.004)
        return index

    def preprocess(self, raw):
        sum(number * number for number in range(20_000))  # Holds the interpreter's lock.
        return raw + torch.rand(())


class SlowAsync(Slow):
    async def load(self, index):
        import asyncio  # noqa: PLC0415

        await asyncio.sleep(0.004)
        return index


def loader_of(dataset=None, **arguments):
    arguments = {"batch_size": BATCH_SIZE, "num_workers": 2} | arguments
    return DataLoader(Slow() if dataset is None else dataset, **arguments)


# -- the timeline ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Slow, SlowAsync])
def test_timeline_has_every_sample(cls):
    """Every sample of the delivered batches is in the timeline."""
    profile = loader_of(cls()).profile(num_batches=10, sweep=False)
    assert profile.stats.loop.num_batches == 10
    for stage in ("load", "preprocess"):
        spans = [span for span in profile.spans if span.stage == stage]
        # More than were delivered: the workers are ahead of the loop.
        found = {span.index for span in spans}
        assert found >= {repr(index) for index in range(10 * BATCH_SIZE)}
        # What was in flight when it was over has brought nothing.
        assert all(span.num_samples in (0, 1) and span.seconds >= 0 for span in spans)
        assert all(span.batch == int(span.index) // BATCH_SIZE for span in spans)
    assert {span.stage for span in profile.spans} == {
        "load",
        "preprocess",
        "collate",
        "wait",
        "step",
    }
    assert sum(span.stage == "wait" for span in profile.spans) == 10
    assert min(span.started_seconds for span in profile.spans) == 0.0


def test_spans_of_worker_are_disjoint():
    """The spans of one worker thread do not overlap."""
    profile = loader_of().profile(num_batches=10, sweep=False)
    by_worker = {}
    for span in profile.spans:
        by_worker.setdefault(span.worker, []).append(span)
    assert {"preprocess-0", "preprocess-1", "loop"} <= set(by_worker)
    for spans in by_worker.values():
        for before, after in itertools.pairwise(spans):
            assert before.started_seconds + before.seconds <= after.started_seconds + 1e-9


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": Squares(SIZE), "num_workers": 0},
        {"dataset": Squares(SIZE)},
        {"dataset": Sharded(SIZE)},
        {"dataset": StagedMany(SIZE)},
        {"dataset": Squares(SIZE), "batch_size": None},
        {"dataset": Squares(SIZE), "worker_method": "multiprocessing"},
        {"dataset": Squares(SIZE), "device": "meta"},
        {"dataset": Squares(SIZE), "persistent_workers": True, "shuffle": True},
    ],
)
@with_sweep
def test_any_loader_can_be_profiled(arguments, sweep, tmp_path):
    """A profile can be made of every kind of loader, and leaves no thread."""
    loader = loader_of(**arguments)
    profile = loader.profile(num_batches=1000, sweep=sweep)  # More than there are.
    is_batched = arguments.get("batch_size", BATCH_SIZE) is not None
    assert profile.stats.loop.num_batches == (SIZE // BATCH_SIZE if is_batched else SIZE)
    assert profile.stats.verdict.kind in str(profile)
    for name in ("trace.json", "report.html"):
        profile.save(tmp_path / name)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert own_thread_names() == []
    loader.close()


@pytest.mark.children
@pytest.mark.parametrize("cls", [Slow, SlowAsync])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_timeline_has_all_children(cls, num_processes):
    """The timeline has the work of all children, by workers with distinct names."""
    profile = loader_of(cls(), num_processes=num_processes).profile(num_batches=10, sweep=False)
    for stage in ("load", "preprocess"):
        found = {span.index for span in profile.spans if span.stage == stage}
        assert found >= {repr(index) for index in range(10 * BATCH_SIZE)}
    by_child = {span.worker.partition(" in ")[2] for span in profile.spans} - {""}
    assert by_child == (set() if num_processes == 1 else {"child 0", "child 1"})
    threads = [span for span in profile.spans if span.stage == "preprocess"]
    for worker in {span.worker for span in threads}:
        own = [span for span in threads if span.worker == worker]
        for before, after in itertools.pairwise(own):
            assert before.started_seconds + before.seconds <= after.started_seconds + 1e-9


def test_executor_is_in_timeline():
    """The work of an executor is in the timeline."""
    with ThreadPoolExecutor(2) as pool:
        profile = loader_of(preprocess_executor=pool).profile(num_batches=5, sweep=False)
    assert "preprocess" in {span.stage for span in profile.spans}


def test_save_checks_suffix(tmp_path):
    """The suffix chooses the format; others are an error."""
    profile = loader_of(Squares(SIZE)).profile(num_batches=2, sweep=False)
    with pytest.raises(ValueError, match=r"saved as .json .* or .html .*, not report.pdf"):
        profile.save(tmp_path / "report.pdf")
    assert json.dumps(profile.as_dict())


# -- it leaves things as they are -----------------------------------------------------------------


GENERATOR = torch.Generator()

SAMPLERS = {
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {
        "sampler": RandomSampler(range(SIZE), generator=GENERATOR.manual_seed(3))
    },
    "ours": lambda: {"sampler": DistributedRandomSampler(SIZE, rank=0, world_size=1)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * SIZE, SIZE)},
    "seed": lambda: {"shuffle": True, "seed": 5},
}


@pytest.mark.parametrize("profiled", ["before", "in mid-epoch"])
@pytest.mark.parametrize("name", SAMPLERS)
@with_sweep
def test_profile_changes_no_order(name, profiled, sweep):
    """Profiling changes neither the order of the loader nor the global generators."""

    def batches(is_profiled):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        loader = loader_of(Squares(SIZE), **SAMPLERS[name]())
        if is_profiled and profiled == "before":
            loader.profile(num_batches=3, sweep=sweep)
        iterator = iter(loader)
        found = [next(iterator).tolist()]
        if is_profiled and profiled == "in mid-epoch":
            loader.profile(num_batches=3, sweep=sweep)
        found += [batch.tolist() for batch in iterator]
        found += [batch.tolist() for batch in loader]
        return found, float(torch.rand(())), float(np.random.rand()), random.random()

    assert batches(is_profiled=True) == batches(is_profiled=False)


@with_sweep
def test_profile_keeps_loader_state(sweep):
    """Profiling changes neither the statistics nor the state of the loader."""
    loader = loader_of(Squares(SIZE), seed=1, shuffle=True)
    list(loader)
    stats, state = loader.stats(), loader.state_dict()
    loader.profile(num_batches=3, sweep=sweep)
    assert loader.stats() == stats
    assert loader.state_dict() == state


class Shuffled(Sampler):
    """Has a generator of its own, by any name."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(SIZE).tolist())

    def __len__(self):
        return SIZE


class Wrapped(Shuffled):
    def __init__(self):
        self.inner = RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(1))

    def __iter__(self):
        return iter(self.inner)


@pytest.mark.parametrize("cls", [Shuffled, Wrapped])
def test_profile_keeps_sampler(cls):
    """Profiling does not advance a sampler with its own generator."""
    profiled, other = (loader_of(Squares(SIZE), sampler=cls()) for _ in range(2))
    profiled.profile(num_batches=3, sweep=False)
    assert [b.tolist() for b in profiled] == [b.tolist() for b in other]


@pytest.mark.parametrize("iterator", [map(list, [[0], [1]]), ([n] for n in range(2))])
def test_iterator_as_sampler_is_refused(iterator):
    """A sampler that cannot be copied is an error, and is not consumed."""
    loader = DataLoader(Squares(SIZE), batch_sampler=iterator, num_workers=2)
    with pytest.raises(TypeError, match=r"profile\(\) needs a sampler that it can copy"):
        loader.profile(num_batches=1)
    assert [batch.tolist() for batch in loader] == [[0], [1]]


class Counter(IterableDataset):
    """Has its place in the data in itself."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        while self.number < 12:
            self.number += 1
            yield self.number - 1


def test_profile_keeps_iterable_dataset():
    """Profiling does not advance an iterable dataset that stores its position."""
    loader = DataLoader(Counter(), batch_size=2)
    iterator = iter(loader)
    found = [next(iterator).tolist()]
    loader.profile(num_batches=2)
    found += [batch.tolist() for batch in iterator]
    assert found == [[n, n + 1] for n in range(0, 12, 2)]


def test_profile_records_no_bad_samples(tmp_path):
    """Bad samples of a profile are neither kept nor logged."""

    class Damaged(Slow):
        def load(self, index):
            if index == 3:
                raise OSError("broken")
            return index

    policies = [ReplaceBadSamples(None, max_count=1, log=tmp_path / "bad.jsonl"), RetryLoad(2, 0.0)]
    loader = loader_of(Damaged(), on_error=policies)
    profile = loader.profile(num_batches=3, sweep=False)
    assert (profile.stats.num_bad_samples, profile.stats.num_retries) == (1, 1)
    assert (loader.bad_samples, loader.num_retries) == ((), 0)
    assert not (tmp_path / "bad.jsonl").exists()


def fail(batch):
    raise ValueError("in the step")


@pytest.mark.parametrize("worker_method", ["thread", "multiprocessing"])
def test_failing_step_leaves_no_workers(worker_method):
    """An exception in the step ends all workers."""
    loader = loader_of(Squares(4000), worker_method=worker_method)
    with pytest.raises(ValueError, match="in the step") as caught:
        loader.profile(num_batches=3, step=fail)
    assert own_thread_names() == []
    assert multiprocessing.active_children() == []
    del caught


class InWhichThreads(Squares):
    def __init__(self, size):
        super().__init__(size)
        self.threads = set()

    def __getitem__(self, index):
        self.threads.add(threading.current_thread())
        return index


def test_no_sweep_without_threads():
    """A loader without worker threads is not measured with threads."""
    dataset = InWhichThreads(SIZE)
    assert DataLoader(dataset, batch_size=4).profile(num_batches=2).scalings == ()
    assert dataset.threads == {threading.current_thread()}


@pytest.mark.exhaustive
def test_slow_samples_limit_the_sweep():
    """The sweep stops early for slow samples."""

    class Heavy(Squares):
        def __getitem__(self, index):
            time.sleep(0.2)
            return index

    started = time.monotonic()
    DataLoader(Heavy(1000), batch_size=128, num_workers=64, prefetch_factor=1).profile(
        num_batches=1
    )
    assert time.monotonic() - started < 15  # One batch after the other would take 26.


def test_num_batches_is_checked():
    """num_batches must be at least 1."""
    with pytest.raises(ValueError, match="num_batches must be at least 1"):
        loader_of().profile(num_batches=0)


# -- each stage by itself -------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Slow, pytest.param(SlowAsync, marks=pytest.mark.exhaustive)])
def test_scaling_of_stages(cls):
    """Waiting scales with the number of workers, and holding the GIL does not."""
    profile = loader_of(cls()).profile(num_batches=2)
    load, preprocess, collate = profile.scalings
    assert [scaling.stage for scaling in profile.scalings] == ["load", "preprocess", "collate"]
    assert [width for width, _ in load.throughputs] == [1, 2, 4, 8, 16]
    assert load.shape == "rises"
    assert 0.5 * 250 < load.throughputs[0][1] <= 250
    assert load.throughputs[-1][1] > 6 * load.throughputs[0][1]
    # On a busy machine more threads get more of it, though they take turns.
    assert preprocess.throughputs[-1][1] < 3 * preprocess.throughputs[0][1]
    assert collate.throughputs[0][1] > 1000


class Tracking(Squares):
    """Writes down the process of each call, and opens a file at the first one."""

    file = None

    def __init__(self, folder):
        super().__init__(SIZE)
        self.folder = folder

    def __getitem__(self, index):
        if self.file is None:
            self.file = (self.folder / f"{os.getpid()}").open("a")
        threads = {thread.name for thread in threading.enumerate()}
        workers = {name for name in threads if name.startswith("spdl_torch-load-")}
        with (self.folder / f"{os.getpid()}-{len(workers)}").open("a"):
            return index


@pytest.mark.children
@pytest.mark.parametrize("num_processes", [1, 2])
def test_sweep_is_where_workers_live(num_processes, tmp_path):
    """A sweep calls the dataset in children only, in as many threads each as the loader has."""
    loader = loader_of(Tracking(tmp_path), num_processes=num_processes)
    profile = loader.profile(num_batches=2)
    assert [scaling.stage for scaling in profile.scalings] == ["preprocess", "collate"]
    widths = [width for width, _ in profile.scalings[0].throughputs]
    assert widths[:2] == [1, 2]
    called = [path.name.split("-") for path in tmp_path.iterdir() if "-" in path.name]
    assert {process for process, _ in called} & {str(os.getpid())} == set()
    assert loader.dataset.file is None
    most_threads = max(int(num_threads) for _, num_threads in called)
    assert most_threads == (widths[-1] if num_processes == 1 else 1)


@pytest.mark.children
def test_unsendable_samples_have_no_scaling():
    """A stage whose inputs cannot be sent between processes is left out of the sweep."""

    class Local(Slow):
        def load(self, index):
            return lambda: index

        def preprocess(self, raw):
            return raw()

    profile = loader_of(Local(), num_processes=1).profile(num_batches=2)
    assert [scaling.stage for scaling in profile.scalings] == ["load"]


@pytest.mark.children
def test_async_load_is_swept_in_child():
    """A client that is bound to the event loop of a child is used in that loop only."""
    import asyncio  # noqa: PLC0415

    class Client(SlowAsync):
        lock = None

        async def load(self, index):
            if self.lock is None:
                self.lock, self.loop = asyncio.Lock(), asyncio.get_running_loop()
            assert self.loop is asyncio.get_running_loop()
            async with self.lock:
                return index

    loader = loader_of(Client(), num_processes=1)
    assert [s.stage for s in loader.profile(2).scalings] == ["load", "preprocess", "collate"]
    assert loader.dataset.lock is None
    assert len(list(loader)) == SIZE // BATCH_SIZE


@pytest.mark.exhaustive
def test_unrepeatable_stage_has_no_scaling():
    """A stage that cannot be repeated is left out of the sweep."""

    class Once(Slow):
        def __init__(self):
            self.seen = set()

        def preprocess(self, raw):
            if raw in self.seen:
                raise RuntimeError("not again")
            self.seen.add(raw)
            return raw

    profile = loader_of(Once()).profile(num_batches=2)
    assert [scaling.stage for scaling in profile.scalings] == ["load", "collate"]


# -- how fast the loop could be -------------------------------------------------------------------


def test_headroom_is_speed_of_steps():
    """The headroom is the throughput of the steps alone."""
    steps = []

    def step(batch):
        steps.append(batch)
        time.sleep(0.002)

    loader = loader_of(num_io_workers=1)  # A batch takes at least 16 ms.
    profile = loader.profile(num_batches=10, step=step, sweep=False)
    assert len(steps) == 18  # Once more, but for the first and the last.
    assert profile.headroom.batches_per_second < 1 / 0.016
    assert 1 / 0.004 < profile.headroom.free_batches_per_second <= 1 / 0.002
    assert profile.headroom.speed_up > 3
    assert profile.stats.loop.step_seconds >= 0.002 * 9


def test_headroom_ignores_first_step():
    """A slow first step does not count as headroom."""
    steps = []

    def step(batch):
        time.sleep(0.3 if not steps else 0.01)  # It compiles something at first.
        steps.append(batch)

    profile = loader_of(Squares(SIZE)).profile(num_batches=12, step=step, sweep=False)
    assert 1.0 <= profile.headroom.speed_up < 1.5


def test_no_headroom_without_step():
    """Without a step there is no headroom."""
    assert loader_of().profile(num_batches=2, sweep=False).headroom is None


class Counting(Squares):
    num_loaded = 0

    def __getitem__(self, index):
        self.num_loaded += 1
        return index


def test_cached_loader_repeats_batches():
    """A cached loader loads the first batches once and repeats them."""
    dataset = Counting(40)
    loader = CachedLoader(torch.utils.data.DataLoader(dataset, batch_size=4), num_batches=3)
    assert len(loader) == 10
    for _ in range(2):
        found = [batch.tolist() for batch in loader]
        assert found == [list(range(4 * n, 4 * n + 4)) for n in [0, 1, 2] * 3 + [0]]
    assert dataset.num_loaded == 12


def test_cached_loader_left_early():
    """A cached loader that was left early starts again."""
    dataset = Counting(40)
    loader = CachedLoader(torch.utils.data.DataLoader(dataset, batch_size=4), num_batches=3)
    next(iter(loader))
    assert [int(batch[0]) for batch in loader] == [0, 4, 8, 0, 4, 8, 0, 4, 8, 0]


def test_cached_loader_of_few_batches():
    """A cached loader of few batches keeps all of them."""
    dataset = Counting(8)
    loader = CachedLoader(torch.utils.data.DataLoader(dataset, batch_size=4), num_batches=100)
    for _ in range(3):
        assert [int(batch[0]) for batch in loader] == [0, 4]
    assert dataset.num_loaded == 8


def test_two_loops_over_cached_loader():
    """Two loops over one cached loader are independent."""
    loader = CachedLoader(torch.utils.data.DataLoader(Counting(40), batch_size=4), num_batches=3)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 10
    assert [int(batch[0]) for batch in loader] == [0, 4, 8] * 3 + [0]


def test_length_of_cached_loader():
    """The length of a cached loader can be given."""
    loader = CachedLoader(DataLoader(Sharded(8), batch_size=4), 1, length=5)
    assert len(loader) == len(list(loader)) == 5
    assert len(list(CachedLoader(DataLoader(Squares(8), batch_size=4), 100))) == 2


def test_cached_loader_checks_arguments():
    """A cached loader needs a length and at least one batch."""
    with pytest.raises(TypeError, match="Pass one to CachedLoader, as in length=1000"):
        next(iter(CachedLoader((batch for batch in [1]), 1)))
    with pytest.raises(ValueError, match="num_batches must be at least 1, got 0"):
        CachedLoader([1], 0)


def test_cached_loader_has_loader_attributes():
    """A cached loader has the attributes of its loader."""
    loader = loader_of(Squares(8))
    cached = CachedLoader(loader, 1)
    assert cached.dataset is loader.dataset
    assert cached.batch_size == BATCH_SIZE
    with pytest.raises(AttributeError):
        _ = cached.nothing
