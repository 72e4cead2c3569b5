"""The preprocess stage on a Dask cluster."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch

from spdl_torch import DataLoader, StagedDataset
from tests.datasets import Circle
from tests.integrations import quick

distributed = pytest.importorskip("distributed")

TIMEOUT_SECONDS = 60


@pytest.fixture(scope="module")
def client():
    """Of a scheduler and two worker processes."""
    with (
        mock.patch.dict(os.environ),  # Dask leaves there what its workers are to have.
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


class Numbers(StagedDataset):
    """A sample is its index, the process that preprocessed it, and a random number."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def load(self, index):
        return index

    def preprocess(self, raw):
        # Some work, so that both workers get some.
        torch.rand(200, 200).matrix_power(10)
        return raw, os.getpid(), torch.rand(())


def loader_of(client, size=120, **arguments):
    return DataLoader(
        Numbers(size),
        batch_size=4,
        num_workers=2,
        preprocess_executor=client.get_executor(pure=False),
        timeout=TIMEOUT_SECONDS,
        **arguments,
    )


@quick
def test_executor_of_a_dask_client():
    """A cluster of threads, which starts quickly, preprocesses the samples in order."""
    arguments = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": ":0"}
    with distributed.Client(processes=False, **arguments) as client:
        batches = list(loader_of(client, 20))
    assert torch.cat([indices for indices, _, _ in batches]).tolist() == list(range(20))


def test_cluster_preprocesses_in_order(client):
    """Samples are preprocessed on the cluster and delivered in order."""
    batches = list(loader_of(client))
    assert torch.cat([indices for indices, _, _ in batches]).tolist() == list(range(120))
    process_ids = {int(i) for _, process_ids, _ in batches for i in process_ids}
    assert process_ids <= set(client.run(os.getpid).values())


def test_seed_draws_the_same_on_cluster(client):
    """With a seed, samples draw the same numbers on the cluster as here."""
    here = DataLoader(Numbers(40), batch_size=4, num_workers=2, seed=3)
    expected = torch.cat([drawn for _, _, drawn in here])
    got = torch.cat([drawn for _, _, drawn in loader_of(client, 40, seed=3)])
    assert torch.equal(got, expected)


def test_caching_executor_draws_each_time(client):
    """An executor that caches results draws new numbers for each sample."""
    # Without pure=False, Dask takes equal tasks for one.
    loader = DataLoader(
        Numbers(1),
        batch_size=4,
        sampler=[0] * 20,
        num_workers=2,
        preprocess_executor=client.get_executor(),
        timeout=TIMEOUT_SECONDS,
    )
    drawn = torch.cat([drawn for _ in range(2) for _, _, drawn in loader])
    assert len(drawn.unique()) == 40


def test_statistics_count_the_clusters_work(client):
    """The statistics count what the cluster has done."""
    loader = loader_of(client)
    list(loader)
    stats = loader.stats()
    preprocess = stats.stage("preprocess")
    assert (preprocess.workers, preprocess.width, preprocess.num_samples) == ("executor", None, 120)
    assert preprocess.num_in_flight == 0
    assert preprocess.busy_seconds > 0
    assert "None" not in str(stats.verdict)


# -- loops that are left --------------------------------------------------------------------------


class Slow(Numbers):
    """What is behind the first batch is loaded when it is let go, and takes the cluster seconds."""

    def __init__(self, size):
        super().__init__(size)
        self.may_go = threading.Event()

    def load(self, index):
        # Not sooner: tasks that come back for the dataset stand behind all others in the queue, and
        # if they are those of the first batch, nothing would be left when it has come.
        if index >= 4:
            assert self.may_go.wait(TIMEOUT_SECONDS)
        return index

    def preprocess(self, raw):
        if raw >= 4:
            time.sleep(0.5)
        return raw

    def __reduce__(self):
        return Slow, (self.size,)


def left_iterator(client, dataset=None):
    """Has given its first batch; tasks of the others are under way."""
    dataset = dataset or Slow(40)
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        preprocess_executor=client.get_executor(pure=False),
        timeout=TIMEOUT_SECONDS,
    )
    iterator = iter(loader)
    next(iterator)
    dataset.may_go.set()
    started = time.monotonic()
    while not client.run_on_scheduler(tasks_at):  # They are on their way.
        assert time.monotonic() - started < TIMEOUT_SECONDS
        time.sleep(0.01)
    return iterator


def tasks_at(dask_scheduler):
    return [task.state for task in dask_scheduler.tasks.values()]


def seconds_until_no_task_is_left(client):
    started = time.monotonic()
    while client.run_on_scheduler(tasks_at):
        assert time.monotonic() - started < TIMEOUT_SECONDS
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.fixture
def no_collection():
    """Garbage is collected where the test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def collect_in_the_thread_of(client):
    """The seconds that it takes."""
    seconds = []
    has_ended = threading.Event()

    def collect():
        started = time.monotonic()
        gc.collect()
        seconds.append(time.monotonic() - started)
        has_ended.set()

    client.loop.add_callback(collect)
    assert has_ended.wait(TIMEOUT_SECONDS)
    return seconds[0]


def own_threads():
    return [t for t in threading.enumerate() if t.name.startswith("spdl_torch")]


def test_early_break_leaves_cluster_usable(client):
    """A loop that is left early leaves the cluster usable."""
    loader = loader_of(client)
    for _ in loader:
        break
    assert sum(len(indices) for indices, _, _ in loader) == 120


def test_early_break_cancels_its_tasks(client):
    """A loop that is left early cancels its tasks."""
    iterator = left_iterator(client)
    started = time.monotonic()
    del iterator
    assert time.monotonic() - started < 2
    assert seconds_until_no_task_is_left(client) < 2


def test_collection_in_client_thread_cancels_tasks(client, no_collection, recwarn):
    """In that thread Dask's cancel() returns a coroutine instead of cancelling the task."""
    Circle(left_iterator(client))
    assert collect_in_the_thread_of(client) < 2
    assert seconds_until_no_task_is_left(client) < 2
    gc.collect()  # A coroutine warns when it goes.
    assert [str(warning.message) for warning in recwarn] == []
    for thread in own_threads():
        thread.join()


class Needs(Slow):
    """Its load waits for what the client's thread is going to do."""

    def __init__(self, size):
        super().__init__(size)
        self.is_waiting = threading.Event()
        self.event = threading.Event()

    def load(self, index):
        if index == 15:  # Of the last batch that is loaded ahead.
            self.is_waiting.set()
            assert self.event.wait(TIMEOUT_SECONDS)
        return super().load(index)


def test_collection_in_client_thread_never_waits(client, no_collection, recwarn):
    """They may wait for it: `submit` takes a lock that the client's thread takes too."""
    dataset = Needs(40)
    Circle(left_iterator(client, dataset))
    assert dataset.is_waiting.wait(TIMEOUT_SECONDS)
    seconds = collect_in_the_thread_of(client)
    dataset.event.set()
    assert seconds < 2
    for thread in own_threads():
        thread.join()
    assert [str(warning.message) for warning in recwarn] == []


class Collects:
    """The `submit` that sends it collects garbage, when the client's thread waits for its lock."""

    def __init__(self, client):
        self.client = client

    def __reduce__(self):
        # A result that is done with is dropped by the client's thread, under the lock that this
        # thread has. So what it is asked for after that has to wait.
        future = self.client.submit(int)
        del future
        gc.collect()
        return int, ()


class SendsOneThatCollects(Numbers):
    def __init__(self, size, client):
        super().__init__(size)
        self.client = client

    def load(self, index):
        # It is not loaded ahead of the first batch.
        return Collects(self.client) if index == 20 else index

    def preprocess(self, raw):
        return raw

    def __reduce__(self):
        return SendsOneThatCollects, (self.size, None)


def test_collection_during_a_submit(client, no_collection):
    """An iterator may be garbage-collected while another one submits."""
    loader = DataLoader(
        SendsOneThatCollects(40, client),
        batch_size=4,
        num_workers=2,
        preprocess_executor=client.get_executor(pure=False),
        timeout=20,
    )
    iterator = iter(loader)
    next(iterator)
    Circle(left_iterator(client))
    assert len(list(iterator)) == 9


class Fails(Numbers):
    def preprocess(self, raw):
        if raw == 5:
            raise LookupError("over there")
        return raw


def test_cluster_error_raises_at_its_batch(client):
    """An exception on the cluster is raised at its batch."""
    loader = DataLoader(
        Fails(12),
        batch_size=4,
        num_workers=2,
        preprocess_executor=client.get_executor(pure=False),
        timeout=TIMEOUT_SECONDS,
    )
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(LookupError, match="over there") as caught:
        next(iterator)
    assert "sample index 5 (batch 1)" in caught.value.__notes__[0]
    assert [batch.tolist() for batch in iterator] == [[8, 9, 10, 11]]


def test_death_of_a_cluster_worker(client):
    """The last test of the file: the worker that comes in its place takes a while to start."""
    got = []
    for number, (indices, process_ids, _) in enumerate(loader_of(client)):
        got += indices.tolist()
        if number == 5:
            killed = int(process_ids[-1])
            os.kill(killed, signal.SIGKILL)
    assert got == list(range(120))
    assert killed not in client.run(os.getpid).values()
