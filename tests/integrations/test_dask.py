"""The preprocess stage on a Dask cluster."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch

from spdl_torch import DataLoader, StagedDataset

distributed = pytest.importorskip("distributed")

TIMEOUT_SECONDS = 60


@pytest.fixture(scope="module")
def client():
    """Of a scheduler and two worker processes."""
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


class Numbers(StagedDataset):
    """Gives the index, the process in which it was preprocessed, and a random number."""

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


def test_samples_are_preprocessed_on_the_cluster_and_come_in_order(client):
    batches = list(loader_of(client))
    assert torch.cat([indices for indices, _, _ in batches]).tolist() == list(range(120))
    process_ids = {int(i) for _, process_ids, _ in batches for i in process_ids}
    assert process_ids <= set(client.run(os.getpid).values())


def test_a_seed_gives_the_same_random_numbers_as_here(client):
    here = DataLoader(Numbers(40), batch_size=4, num_workers=2, seed=3)
    expected = torch.cat([drawn for _, _, drawn in here])
    got = torch.cat([drawn for _, _, drawn in loader_of(client, 40, seed=3)])
    assert torch.equal(got, expected)


def test_an_executor_that_remembers_results_draws_anew_for_each_sample(client):
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


def test_the_statistics_count_what_the_cluster_has_done(client):
    loader = loader_of(client)
    list(loader)
    stats = loader.stats()
    preprocess = stats.stage("preprocess")
    assert (preprocess.workers, preprocess.width, preprocess.num_samples) == ("executor", None, 120)
    assert preprocess.num_in_flight == 0
    assert preprocess.busy_seconds > 0


def test_a_loop_that_is_left_leaves_the_cluster_usable(client):
    loader = loader_of(client)
    for _ in loader:
        break
    assert sum(len(indices) for indices, _, _ in loader) == 120


class Fails(Numbers):
    def preprocess(self, raw):
        if raw == 5:
            raise LookupError("over there")
        return raw


def test_an_exception_comes_back_to_its_batch(client):
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


def test_the_death_of_a_worker_loses_nothing_and_repeats_nothing(client):
    """The last test of the file: the worker that comes in its place takes a while to start."""
    got = []
    for number, (indices, process_ids, _) in enumerate(loader_of(client)):
        got += indices.tolist()
        if number == 5:
            killed = int(process_ids[-1])
            os.kill(killed, signal.SIGKILL)
    assert got == list(range(120))
    assert killed not in client.run(os.getpid).values()
