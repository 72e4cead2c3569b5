"""`loader.stats()`: what was measured, while it runs and afterwards."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import os
import pickle
import signal
import threading
import time
import weakref
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from spdl_torch import DataLoader, ReplaceBadSamples, RetryLoad, StagedDataset, StageStats

from .datasets import PATIENCE_SECONDS, Sharded, Squares

SIZE = 40
BATCH_SIZE = 4
NUM_BATCHES = SIZE // BATCH_SIZE


class Timed(StagedDataset):
    """Sleeps in each stage for so many seconds."""

    def __init__(self, load=0.0, preprocess=0.0, collate=0.0, size=SIZE):
        self.seconds = load, preprocess, collate
        self.size = size

    def __len__(self):
        return self.size

    def load(self, index):
        time.sleep(self.seconds[0])
        return index

    def preprocess(self, raw):
        time.sleep(self.seconds[1])
        return raw

    def collate(self, samples):
        time.sleep(self.seconds[2])
        return torch.tensor(samples)


class TimedAsync(Timed):
    async def load(self, index):
        import asyncio  # noqa: PLC0415

        await asyncio.sleep(self.seconds[0])
        return index


class TimedMany(Timed):
    def load_many(self, indices):
        time.sleep(self.seconds[0])
        return indices


def run(dataset, num_workers=2, *, num_epochs=1, step_seconds=0.0, **arguments):
    """The statistics of the last of some epochs."""
    arguments = {"batch_size": BATCH_SIZE} | arguments
    with DataLoader(dataset, num_workers=num_workers, **arguments) as loader:
        for _ in range(num_epochs):
            for _ in loader:
                time.sleep(step_seconds)
        return loader.stats()


def names(stats):
    return [stage.name for stage in stats.stages]


# -- what is counted ------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Timed, TimedAsync, TimedMany])
@pytest.mark.parametrize("arguments", [{}, {"device": "meta"}, {"timeout": 30}])
def test_each_stage_counts_once(cls, arguments):
    """Every sample and every batch is counted once in every stage."""
    stats = run(cls(), num_epochs=2, persistent_workers=True, **arguments)
    counts = {stage.name: stage.num_samples for stage in stats.stages}
    expected = {"load": SIZE, "preprocess": SIZE, "collate": NUM_BATCHES}
    if "device" in arguments:
        expected["transfer"] = NUM_BATCHES
    assert counts == expected
    assert stats.loop.num_batches == NUM_BATCHES
    assert stats.num_bytes == 8 * SIZE
    assert not stats.is_running


@pytest.mark.children
@pytest.mark.parametrize("num_processes", [1, 2, None])
@pytest.mark.parametrize("dataset", [Timed(), TimedAsync(), TimedMany()])
def test_each_stage_counts_once_in_children(dataset, num_processes):
    """Every sample and every batch is counted once, in however many child processes."""
    stats = run(dataset, num_processes=num_processes, num_epochs=3, persistent_workers=True)
    counts = {stage.name: stage.num_samples for stage in stats.stages}
    assert counts == {"load": SIZE, "preprocess": SIZE, "collate": NUM_BATCHES}
    assert [sum(n for _, n in stage.histogram) for stage in stats.stages] == list(counts.values())
    assert {stage.num_in_flight for stage in stats.stages} == {0}
    assert stats.num_bytes == 8 * SIZE
    assert stats.num_processes == (num_processes or 1)


@pytest.mark.children
def test_abandoned_epoch_counts_alone():
    """What children still do for an epoch that was left is not counted in the next one."""
    arguments = {"batch_size": BATCH_SIZE, "num_workers": 2, "persistent_workers": True}
    with DataLoader(Timed(load=0.002), num_processes=2, buffer_size=8, **arguments) as loader:
        for _ in range(5):
            next(iter(loader))
        list(loader)
        (load, _, collate) = loader.stats().stages
    # A worker may be in the middle of a sample when the epoch is left.
    assert SIZE <= load.num_samples <= SIZE + load.width
    assert NUM_BATCHES <= collate.num_samples <= NUM_BATCHES + 2


class Killed(Timed):
    def __init__(self, killed):
        super().__init__(load=0.002)
        self.killed = killed

    def load(self, index):
        if index == 30 and not self.killed.exists():
            time.sleep(0.7)  # So that its figures have been sent.
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(index)


@pytest.mark.children
@pytest.mark.parametrize("num_processes", [1, 2])
def test_figures_of_dead_child_are_kept(num_processes, tmp_path):
    """A child that dies takes nothing with it that it had sent: no figure goes back."""
    seen = []
    with DataLoader(
        Killed(tmp_path / "killed"), batch_size=2, num_workers=2, num_processes=num_processes
    ) as loader:
        for _ in loader:
            stage = loader.stats().stage("collate")
            seen.append(0 if stage is None else stage.num_samples)
        load, _, collate = loader.stats().stages
    assert (tmp_path / "killed").exists()
    assert seen == sorted(seen)
    assert len(seen) == SIZE // 2
    # The last batches may have been made and not counted when it died.
    assert SIZE // 2 - 8 <= collate.num_samples <= SIZE // 2 + 8
    assert load.busy_seconds >= 0.002 * (SIZE - 16)


@pytest.mark.children
@pytest.mark.parametrize("num_processes", [0, 1, 2])
def test_figures_are_the_same_in_children(num_processes):
    """Width, busy time and quantiles of the workers do not depend on where they live."""
    stats = run(Timed(load=0.01, preprocess=0.004), num_processes=num_processes, num_io_workers=4)
    load, preprocess, collate = stats.stages
    assert (load.width, preprocess.width, collate.width) == (4, 2, 2)
    for stage, seconds in ((load, 0.01), (preprocess, 0.004)):
        assert seconds * SIZE <= stage.busy_seconds < 3 * seconds * SIZE + 0.1
        assert 0.9 * seconds <= stage.p50_seconds <= stage.p99_seconds
        assert stage.cpu_seconds < 0.5 * stage.busy_seconds
    assert f"worker threads in {('this', '1 child', '2 child')[num_processes]} process" in str(
        stats
    )


@pytest.mark.children
def test_long_samples_count_while_they_run():
    """Workers in child processes count as busy in the middle of long samples."""
    with DataLoader(
        Timed(preprocess=1.0, size=8), batch_size=2, num_workers=2, num_processes=1
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        time.sleep(0.8)  # In the middle of the next batch, and longer than children keep silent.
        stage = loader.stats().stage("preprocess")
        assert stage.num_in_flight == 2
        assert stage.num_busy == pytest.approx(2, rel=0.15)


def test_start_of_workers_is_not_theirs():
    """The time until the workers are ready is not part of the time of a stage."""
    stats = run(Timed(load=0.01), worker_init_fn=lambda _: time.sleep(0.1))
    assert stats.elapsed_seconds >= 0.2
    assert 0.01 * SIZE / 8 <= stats.stage("load").elapsed_seconds <= stats.elapsed_seconds - 0.2


def test_plain_dataset_is_preprocess():
    """A dataset that is not split does all its work in preprocess."""
    stats = run(Squares(SIZE))
    assert names(stats) == ["preprocess", "collate"]
    assert stats.stage("preprocess").num_samples == SIZE
    assert stats.stage("load") is None


def test_iterable_dataset_is_measured():
    """The workers of an iterable dataset are a stage of their own."""
    stats = run(Sharded(SIZE))
    assert names(stats) == ["iterate", "collate"]
    assert stats.stage("iterate").num_samples == SIZE
    assert stats.stage("collate").num_samples == stats.loop.num_batches == NUM_BATCHES


def test_executor_is_measured():
    """The time that samples take in an executor is measured."""
    with ThreadPoolExecutor(3) as pool:
        stats = run(Timed(preprocess=0.002), preprocess_executor=pool)
    assert names(stats) == ["load", "preprocess", "collate"]
    stage = stats.stage("preprocess")
    assert (stage.num_samples, stage.width, stage.num_in_flight) == (SIZE, 3, 0)
    assert stage.busy_seconds >= 0.002 * SIZE
    assert stage.cpu_seconds < stage.busy_seconds


@pytest.mark.parametrize(
    "arguments", [{"num_workers": 0}, {"num_workers": 2, "worker_method": "multiprocessing"}]
)
def test_loop_without_threads_is_measured(arguments):
    """Without worker threads only the training loop is measured."""
    stats = run(Timed(load=0.002), step_seconds=0.001, **arguments)
    assert stats.kind == ("caller" if arguments["num_workers"] == 0 else "multiprocessing")
    assert stats.stages == ()
    assert stats.loop.num_batches == NUM_BATCHES
    assert stats.num_bytes == 8 * SIZE
    assert stats.loop.step_seconds >= 0.001 * NUM_BATCHES
    assert stats.loop.waited_seconds >= 0.002 * BATCH_SIZE
    assert stats.elapsed_seconds == pytest.approx(
        stats.loop.waited_seconds + stats.loop.step_seconds, abs=0.01
    )


def test_bad_samples_are_counted():
    """Replaced samples and retries are counted."""

    class Flaky(Timed):
        def __init__(self):
            super().__init__()
            self.failed = set()

        def load(self, index):
            if index == 3 or (index == 5 and index not in self.failed):
                self.failed.add(index)
                raise OSError("broken")
            return index

    policies = [ReplaceBadSamples(max_fraction=None), RetryLoad(2, backoff=0.0)]
    stats = run(Flaky(), on_error=policies)
    assert (stats.num_bad_samples, stats.num_retries) == (1, 2)


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Touchy:
    @property
    def nbytes(self):
        raise RuntimeError("hands off")


@dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "num_bytes"),
    [
        (torch.zeros(3), 12),
        ([torch.zeros(3), torch.zeros(2, dtype=torch.uint8)], 14),
        ({"a": torch.zeros(3), "b": [np.zeros(2)], "c": "text"}, 28),
        (Point(torch.zeros(1), torch.zeros(1)), 8),
        ((torch.zeros(2, 3), 0), 24),
        (None, 0),
        ([0] * 1_000_000, 0),
        (Slotted(torch.zeros(1)), 4),
        (torch.zeros(3).to_sparse(), 0),
        ([torch.zeros(1), Touchy()], 4),
        ({"image": torch.zeros(1), "words": ["x"] * 2000}, 4),
        (UserDict(a=torch.zeros(1)), 4),
    ],
)
def test_size_of_tensors_and_arrays(batch, num_bytes):
    """The size of a batch is the size of the tensors and arrays in it."""
    stats = run([batch], num_workers=0, batch_size=None, collate_fn=lambda sample: sample)
    assert stats.num_bytes == num_bytes


# -- how long it took -----------------------------------------------------------------------------


def test_busy_time_of_stages():
    """The busy time of a stage is the time of its samples."""
    stats = run(Timed(load=0.01, preprocess=0.002, collate=0.004))
    load, preprocess, collate = stats.stages
    for stage, seconds in ((load, 0.01), (preprocess, 0.002), (collate, 0.004)):
        # They sleep: none can take less, and only a machine that is stuck would take twice as long.
        assert seconds <= stage.mean_seconds < 2 * seconds + 0.005
        assert 0.9 * seconds <= stage.p50_seconds <= stage.p99_seconds
        assert stage.busy_seconds == pytest.approx(stage.mean_seconds * stage.num_samples)
        assert stage.cpu_seconds < 0.5 * stage.busy_seconds
        assert 0 < stage.utilisation <= 1.01


def test_slow_sample_raises_p99():
    """One slow sample raises the 99th percentile and not the median."""

    class OneSlow(Squares):
        def __getitem__(self, index):
            time.sleep(0.2 if index == 7 else 0.001)
            return index

    stage = run(OneSlow(SIZE)).stage("preprocess")
    assert stage.p50_seconds < 0.05
    assert stage.p99_seconds > 0.15


def test_cpu_time_is_measured():
    """Computation counts as CPU time."""

    class Computing(Squares):
        def __getitem__(self, index):
            end = time.thread_time() + 0.003
            while time.thread_time() < end:
                pass
            return index

    stage = run(Computing(SIZE)).stage("preprocess")
    assert 0.003 * SIZE <= stage.cpu_seconds <= 1.3 * 0.003 * SIZE + 0.05


def test_loop_time_adds_up():
    """Waiting and steps together are the whole epoch."""
    stats = run(Timed(load=0.002), step_seconds=0.002, num_epochs=2, persistent_workers=True)
    assert stats.loop.waited_seconds + stats.loop.step_seconds == pytest.approx(
        stats.elapsed_seconds, rel=0.01
    )


def test_cpu_time_of_step_is_measured():
    """The computation of a step is told from its waiting."""
    dataset = Squares(40)
    with DataLoader(dataset, batch_size=4, num_workers=2) as loader:
        for _ in loader:
            end = time.thread_time() + 0.003
            while time.thread_time() < end:
                pass
            time.sleep(0.003)
        loop = loader.stats().loop
    assert 0.003 * loop.num_batches <= loop.step_cpu_seconds <= loop.step_seconds
    assert loop.step_seconds - loop.step_cpu_seconds >= 0.003 * loop.num_batches


def test_waited_share_of_loop():
    """The share of waiting tells a slow loop from a slow loader."""
    stats = run(Timed(), step_seconds=0.01)
    assert stats.loop.step_seconds >= 0.01 * NUM_BATCHES
    assert stats.loop.waited_share < 0.5
    stats = run(Timed(load=0.02), num_io_workers=1)
    assert stats.loop.waited_share > 0.9
    assert stats.loop.first_wait_seconds >= 0.02 * BATCH_SIZE


def test_histogram_has_fine_buckets():
    """Every sample is in a bucket that is an eighth of an octave wide."""
    stage = run(Timed(preprocess=0.001)).stage("preprocess")
    uppers, counts = zip(*stage.histogram, strict=True)
    assert sum(counts) == SIZE
    assert all(b / a == pytest.approx(2 ** (1 / 8)) for a, b in itertools.pairwise(uppers))
    assert uppers[0] > 0.001


def test_quantiles_come_from_the_histogram():
    """A quantile is the middle of the bucket that it falls into."""
    histogram = ((0.1, 97), (0.2, 2), (0.4, 1))
    stage = StageStats("load", 2, 10.0, 100, 12.0, 0.0, 0.0, 0, histogram)
    assert 0.09 < stage.p50_seconds < 0.1
    assert 0.18 < stage.p99_seconds < 0.2
    assert stage.mean_seconds == 0.12
    empty = StageStats("load", 2, 0.0, 0, 0.0, 0.0, 0.0, 0, ())
    assert (empty.p50_seconds, empty.mean_seconds, empty.utilisation) == (0.0, 0.0, 0.0)


# -- while it runs --------------------------------------------------------------------------------


class Stuck(Squares):
    """Samples from the fifth on wait to be let go."""

    def __init__(self, size):
        super().__init__(size)
        self.are_stuck = threading.Barrier(3)
        self.let_go = threading.Event()

    def __getitem__(self, index):
        if 4 <= index < 6:
            self.are_stuck.wait(PATIENCE_SECONDS)
            assert self.let_go.wait(PATIENCE_SECONDS)
        return index


def test_stats_from_another_thread():
    """Another thread sees the samples in flight and their growing busy time."""
    dataset = Stuck(SIZE)
    with DataLoader(dataset, batch_size=1, num_workers=2, prefetch_factor=5) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        dataset.are_stuck.wait(PATIENCE_SECONDS)
        with ThreadPoolExecutor(1) as other:
            first = other.submit(loader.stats).result()
            time.sleep(0.05)
            second = other.submit(loader.stats).result()
        dataset.let_go.set()
        list(iterator)
        third = loader.stats()
    assert first.is_running
    assert first.loop.num_batches == 4
    before, after = first.stage("preprocess"), second.stage("preprocess")
    assert (before.num_in_flight, after.num_in_flight) == (2, 2)
    assert before.num_samples == after.num_samples == 4
    # Both workers have been at their samples all the time.
    assert after.busy_seconds - before.busy_seconds == pytest.approx(
        2 * (second.elapsed_seconds - first.elapsed_seconds), rel=0.1
    )
    assert third.stage("preprocess").num_samples == SIZE
    assert (third.is_running, third.stage("preprocess").num_in_flight) == (False, 0)


def test_ready_batches_are_counted():
    """Batches that wait for the loop are counted, up to the window."""
    with DataLoader(Timed(load=0.002), num_workers=2, buffer_size=6) as loader:
        iterator = iter(loader)
        next(iterator)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while loader.stats().num_ready < 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert (loader.stats().num_ready, loader.stats().window) == (6, 6)


def test_stats_during_an_epoch():
    """Another thread may read the statistics at any time; the counters never go back."""
    dataset = Squares(200)
    is_over = threading.Event()

    def ask(loader):
        seen = [loader.stats()]
        while not is_over.wait(0.001):
            seen.append(loader.stats())
        return seen

    with (
        DataLoader(dataset, batch_size=2, num_workers=3) as loader,
        ThreadPoolExecutor(2) as others,
    ):
        iterator = iter(loader)
        asked = [others.submit(ask, loader) for _ in range(2)]
        assert sum(1 for _ in iterator) == 100
        is_over.set()
        for future in asked:
            counts = [stats.loop.num_batches for stats in future.result()]
            assert counts == sorted(counts)
            assert counts[-1] <= 100


# -- afterwards -----------------------------------------------------------------------------------


def test_stats_before_first_batch():
    """Before the first batch all figures are zero."""
    loader = DataLoader(Squares(SIZE), num_workers=2)
    for stats in (loader.stats(), pickle.loads(pickle.dumps(loader)).stats()):
        assert (stats.elapsed_seconds, stats.loop.num_batches, stats.stages) == (0.0, 0, ())
        assert stats.verdict.kind == "unknown"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_last_epoch_is_kept(num_workers):
    """The statistics of an epoch are kept until the next one begins."""
    with DataLoader(Squares(SIZE), batch_size=BATCH_SIZE, num_workers=num_workers) as loader:
        list(loader)
        whole = loader.stats()
        time.sleep(0.02)
        assert loader.stats() == whole
        for number, _ in enumerate(loader):
            if number == 2:
                break
        assert loader.stats().loop.num_batches == 3
    assert loader.stats().loop.num_batches == 3


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_abandoned_epoch_is_frozen(persistent_workers):
    """The figures of an epoch that was left early do not change any more."""
    loader = DataLoader(Timed(load=0.001), num_workers=2, persistent_workers=persistent_workers)
    with loader:
        iterator = iter(loader)
        next(iterator)
        del iterator
        if persistent_workers:
            loader.close()
        first = loader.stats()
        time.sleep(0.02)
        second = loader.stats()
        assert not first.is_running
        assert second.elapsed_seconds == first.elapsed_seconds
        assert second.loop == first.loop


def test_copy_starts_without_stats():
    """A copy of a loader has no statistics."""
    loader = DataLoader(Squares(SIZE), num_workers=2)
    list(loader)
    assert copy.copy(loader).stats().loop.num_batches == 0
    assert loader.stats().loop.num_batches == SIZE


def test_stats_keep_nothing_alive():
    """A snapshot keeps neither the dataset nor batches alive."""
    seen: weakref.WeakSet = weakref.WeakSet()

    class Sample:
        pass

    class Weak(Dataset):
        def __init__(self):
            self.seen = seen

        def __len__(self):
            return 8

        def __getitem__(self, index):
            sample = Sample()
            self.seen.add(sample)
            return sample

    dataset = Weak()
    loader = DataLoader(dataset, num_workers=2, collate_fn=list)
    iterator = iter(loader)
    next(iterator)
    ref, stats = weakref.ref(dataset), loader.stats()
    del iterator, loader, dataset
    gc.collect()
    assert ref() is None
    assert len(seen) == 0
    assert stats.loop.num_batches == 1


def test_snapshot_is_plain_data():
    """A snapshot can be pickled and turned into a dict."""
    stats = run(Timed())
    plain = stats.as_dict()
    assert plain["stages"][0]["name"] == "load"
    assert plain["stages"][0]["samples_per_second"] == stats.stages[0].samples_per_second
    assert plain["verdict"]["kind"] == stats.verdict.kind
    assert pickle.loads(pickle.dumps(stats)) == stats


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 2, "persistent_workers": True},
        pytest.param({"num_workers": 0}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"num_workers": 2, "worker_method": "multiprocessing"}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_paused_loop_is_not_counted(arguments):
    """The clock stops for a loop that does not ask for batches any more."""
    with DataLoader(Timed(preprocess=0.004), batch_size=1, **arguments) as loader:
        iterator = iter(loader)
        for _ in range(20):
            next(iterator)
        before = loader.stats()
        time.sleep(1.2)
        after = loader.stats()
        assert after.loop == before.loop
        assert after.verdict.kind == before.verdict.kind
        assert after.elapsed_seconds < before.elapsed_seconds + 0.2


def test_next_after_end_changes_nothing():
    """Calling next() after the end of an epoch changes no figure."""
    loader = DataLoader(Squares(SIZE), num_workers=2, persistent_workers=True)
    with loader:
        iterator = iter(loader)
        list(iterator)
        before = loader.stats()
        time.sleep(0.05)
        assert next(iterator, None) is None
        assert loader.stats() == before


def test_unused_iterator_takes_no_time():
    """An iterator that was closed before its first batch has taken no time."""
    loader = DataLoader(Squares(SIZE), num_workers=2)
    iterator = iter(loader)
    loader.close()
    time.sleep(0.02)
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)
    assert 0.0 <= loader.stats().elapsed_seconds < 0.01


def test_utilisation_is_at_most_one():
    """Work that ends after an epoch was left does not raise the utilisation above 1."""
    with DataLoader(
        Timed(preprocess=0.2), batch_size=1, num_workers=4, persistent_workers=True
    ) as loader:
        next(iter(loader))
    stage = loader.stats().stage("preprocess")
    assert 0 < stage.num_busy <= 4
    assert stage.utilisation <= 1


def test_worker_init_counts_as_waiting():
    """The time of worker_init_fn is part of the wait for the first batch."""
    with DataLoader(
        Squares(SIZE), num_workers=2, worker_init_fn=lambda _: time.sleep(0.05)
    ) as loader:
        list(loader)
        stats = loader.stats()
    assert stats.loop.first_wait_seconds >= 0.1
    for stage in stats.stages:
        assert stage.busy_seconds <= stage.width * stats.elapsed_seconds


@pytest.mark.parametrize("num_workers", [0, 2])
def test_failed_batch_is_not_counted(num_workers):
    """A batch that raised an error is not counted as received."""

    class Failing(Squares):
        def __getitem__(self, index):
            if index == 5:
                raise ValueError("bad")
            return index

    with DataLoader(Failing(SIZE), batch_size=BATCH_SIZE, num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="bad"):
            next(iterator)
        list(iterator)
        assert loader.stats().loop.num_batches == NUM_BATCHES - 1


class Failing(Timed):
    def load(self, index):
        if index == 5:
            time.sleep(0.2)
            raise OSError("bad")
        return index


class FailingAsync(Failing):
    async def load(self, index):
        return super().load(index)


@pytest.mark.parametrize("cls", [Failing, FailingAsync])
def test_failed_sample_counts_alone(cls):
    """The time of a failed sample is not spread over the others."""
    stage = run(cls(), on_error=ReplaceBadSamples(max_fraction=None)).stage("load")
    assert stage.num_samples == SIZE
    assert stage.busy_seconds >= 0.2
    assert stage.p99_seconds < 0.15


def test_list_is_one_sample():
    """A list from an iterable dataset counts as one sample."""

    class Lists(IterableDataset):
        def __iter__(self):
            return iter([[0] * 100] * 10)

    stats = run(Lists(), num_workers=1, batch_size=None)
    assert stats.stage("iterate").num_samples == 10


def test_timeout_counts_as_waiting():
    """The time before a timeout counts as waiting, and the time after it does not."""

    class Late(Squares):
        def __getitem__(self, index):
            time.sleep(0.5 if index == 0 else 0)
            return index

    with DataLoader(Late(4), num_workers=1, timeout=0.05) as loader:
        iterator = iter(loader)
        with pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
        time.sleep(0.3)
        waited_seconds = loader.stats().loop.waited_seconds
    assert 0.04 < waited_seconds < 0.2


# -- in the log -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{"num_workers": 0}, {}, {"worker_method": "multiprocessing"}, {"persistent_workers": True}],
)
def test_line_is_logged_per_interval(arguments, caplog):
    """One line is logged in each interval."""
    caplog.set_level(logging.INFO, logger="spdl_torch")
    started = time.monotonic()
    run(Timed(), step_seconds=0.02, stats_interval=0.05, num_epochs=2, **arguments)
    most = (time.monotonic() - started) / 0.05
    lines = [record.getMessage() for record in caplog.records if record.name == "spdl_torch"]
    assert 4 <= len(lines) <= most
    assert all("batches/s" in line and "\n" not in line for line in lines)


def test_nothing_is_logged_by_default(caplog):
    """Nothing is logged without stats_interval."""
    caplog.set_level(logging.DEBUG, logger="spdl_torch")
    run(Timed())
    assert caplog.records == []


@pytest.mark.parametrize("interval", [0, -1, "5"])
def test_stats_interval_is_checked(interval):
    """stats_interval must be a positive number."""
    with pytest.raises(ValueError, match="stats_interval must be a number of seconds"):
        DataLoader(Squares(4), stats_interval=interval)


# -- in torch's profiler --------------------------------------------------------------------------


def marks(dataset, **arguments):
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
        run(dataset, **arguments)
    return {event.name for event in profile.events() if event.name.startswith("spdl_torch.")}


@pytest.mark.parametrize("cls", [Timed, TimedAsync])
def test_torch_profiler_sees_stages(cls):
    """torch's profiler finds the work of every stage by its name."""
    expected = {f"spdl_torch.{stage}" for stage in ("load", "preprocess", "collate", "transfer")}
    assert marks(cls(), device="meta") == expected
    assert marks(cls(), device="meta", persistent_workers=True, num_epochs=2) == expected


def test_torch_profiler_sees_iterable_dataset():
    """torch's profiler finds the work of an iterable dataset."""
    assert marks(Sharded(SIZE)) == {"spdl_torch.iterate", "spdl_torch.collate"}
