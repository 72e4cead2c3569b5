"""get_worker_info() and worker_init_fn inside worker threads."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from spdl_torch import DataLoader

from .datasets import PATIENCE_SECONDS, Gated, Sharded, Squares


class Ids(Squares):
    """Every worker gives its id; none gives two before all have given one."""

    def __init__(self, num_workers):
        super().__init__(num_workers)
        self.barrier = threading.Barrier(num_workers)

    def __getitem__(self, index):
        self.barrier.wait(PATIENCE_SECONDS)
        info = get_worker_info()
        assert torch.utils.data.get_worker_info() is info
        assert info.num_workers == len(self)
        assert info.dataset is self
        return info.id


def test_each_worker_has_an_id():
    """The ids of the workers are 0 to num_workers - 1."""
    assert sorted(batch.item() for batch in DataLoader(Ids(5), num_workers=5)) == list(range(5))


def test_the_main_thread_has_no_info():
    """`get_worker_info()` is None in the main thread, also while workers run."""
    assert get_worker_info() is None
    dataset = Gated(4, gated_index=1)
    iterator = iter(DataLoader(dataset, num_workers=2))
    next(iterator)
    assert dataset.is_waiting.wait(PATIENCE_SECONDS)
    assert get_worker_info() is None
    dataset.may_go.set()
    list(iterator)
    assert get_worker_info() is None


class InfoOfNested(Squares):
    def __getitem__(self, index):
        outer = get_worker_info()
        (batch,) = DataLoader(Ids(1), num_workers=1)
        assert get_worker_info() is outer
        return batch.item(), next(iter(DataLoader(OuterId(1)))).item()


class OuterId(Squares):
    def __getitem__(self, index):
        return get_worker_info().num_workers


def test_nested_loaders_have_their_info():
    """Workers of a nested loader have their own info; without workers it is the outer one."""
    loader = DataLoader(InfoOfNested(6), num_workers=3, collate_fn=list)
    assert list(loader) == [[(0, 3)]] * 6


def test_torch_processes_keep_their_info():
    """Worker processes of torch's loader still find their own info."""
    list(DataLoader(Squares(4), num_workers=2))  # Our threads have been here before.
    loader = torch.utils.data.DataLoader(Sharded(8), num_workers=2)
    assert [batch.item() for batch in loader] == list(range(8))


class ForksInAWorker(Squares):
    def __getitem__(self, index):
        child = os.fork()
        if child == 0:  # pragma: no cover (in the child)
            os._exit(0 if get_worker_info() is None else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_no_worker():
    """`get_worker_info()` is None in a process that a worker thread forks."""
    assert [batch.item() for batch in DataLoader(ForksInAWorker(2), num_workers=1)] == [0, 0]


def collate_and_ask(samples):
    assert get_worker_info() is not None
    return default_collate(samples)


class Tensors(Squares):
    def __getitem__(self, index):
        return torch.ones(3)


@pytest.mark.parametrize("collate_fn", [None, collate_and_ask])
def test_batches_are_not_in_shared_memory(collate_fn):
    """Worker threads do not collate into shared memory."""
    for batch in DataLoader(Tensors(4), batch_size=2, num_workers=2, collate_fn=collate_fn):
        assert not batch.is_shared()


# -- worker_init_fn -------------------------------------------------------------------------------


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_worker_init_fn_runs_once_per_worker():
    """It runs in each worker before that makes a sample."""

    class Checks(Squares):
        def __getitem__(self, index):
            return threading.current_thread().name in ready

    def init(worker_id):
        assert get_worker_info().id == worker_id
        ready.append(threading.current_thread().name)

    ready = []
    assert all(DataLoader(Checks(20), num_workers=3, worker_init_fn=init))
    assert len(set(ready)) == len(ready) == 3


def test_worker_init_fn_may_seed_everything():
    """What it does to the global generators is undone."""

    def init(worker_id):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    iterator = iter(DataLoader(Squares(), num_workers=3, worker_init_fn=init))
    before = states()
    next(iterator)
    assert states() == before


def test_worker_init_fns_may_fork():
    """They may also wait for each other with datapipes: no lock is held while they run."""
    together = threading.Barrier(2)

    def fork():
        if (child := os.fork()) == 0:  # pragma: no cover (in the child)
            os._exit(0)
        return os.waitpid(child, 0)[1]

    def meet(worker_id):
        together.wait(PATIENCE_SECONDS)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(fork).result(PATIENCE_SECONDS) == 0

    pipe = IterableWrapper(range(8)).sharding_filter()
    loader = DataLoader(pipe, batch_size=2, num_workers=2, worker_init_fn=meet)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(8))


def test_worker_init_fns_may_wait():
    """They may wait for each other."""

    def init(worker_id):
        together.wait(PATIENCE_SECONDS)

    together = threading.Barrier(3)
    assert len(list(DataLoader(Squares(5), num_workers=3, worker_init_fn=init))) == 5


def test_worker_init_fn_may_use_a_loader():
    """A loader inside of it may have a `worker_init_fn` too."""

    def inner(worker_id):
        random.seed(worker_id)

    def outer(worker_id):
        list(DataLoader(Squares(5), num_workers=2, worker_init_fn=inner))

    before = states()[0]
    assert len(list(DataLoader(Squares(5), num_workers=2, worker_init_fn=outer))) == 5
    assert states()[0] == before


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item(), torch.initial_seed()


def test_worker_init_fn_finds_torchs_seeds():
    """It finds the global generators seeded as in torch's worker process."""

    def init(worker_id):
        drawn[worker_id] = list(draws())

    drawn: dict = {}
    torch.manual_seed(5)
    list(DataLoader(Squares(), num_workers=2, worker_init_fn=init))

    torch.manual_seed(5)
    loader = torch.utils.data.DataLoader(DrawsInWorker(2), num_workers=2, batch_size=None)
    assert [drawn[0], drawn[1]] == list(loader)


class DrawsInWorker(Squares):
    def __getitem__(self, index):
        return draws()


class WithBoundInit(Squares):
    worker_id = None

    def set_worker_id(self, worker_id):
        self.worker_id = worker_id

    def __getitem__(self, index):
        return self.worker_id == get_worker_info().id


def test_bound_worker_init_fn_uses_the_copy():
    """A method of the dataset as `worker_init_fn` acts on the worker's copy of the dataset."""
    dataset = WithBoundInit(20)
    loader = DataLoader(
        dataset, num_workers=3, worker_init_fn=dataset.set_worker_id, copy_dataset=True
    )
    assert all(loader)
    assert dataset.worker_id is None
