"""get_worker_info() and worker_init_fn inside worker threads."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from spdl_torch import DataLoader, StagedDataset

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


# -- what a worker has from the thread that starts it ---------------------------------------------

request_id = ContextVar("request_id", default="none")


def modes():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") and str(torch.get_autocast_dtype("cpu")),
        "numpy": np.geterr()["divide"],
        "context": request_id.get(),
    }


class Modes(Squares):
    def __getitem__(self, index):
        return modes()


class StagedModes(StagedDataset, Squares):
    def load(self, index):
        return modes()

    def preprocess(self, raw):
        assert raw == modes()
        return raw

    def __getitem__(self, index):
        return self.preprocess(self.load(index))


class AsyncModes(StagedDataset, Squares):
    async def load(self, index):
        return modes()


class ModesOfStream(IterableDataset):
    def __iter__(self):
        yield modes()


@contextlib.contextmanager
def request(name):
    token = request_id.set(name)
    yield
    request_id.reset(token)


@pytest.mark.parametrize("dataset", [Modes(1), StagedModes(1), ModesOfStream()])
@pytest.mark.parametrize(
    "mode",
    [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", dtype=torch.float16),
        partial(np.errstate, divide="raise"),
        partial(request, "request 5"),
    ],
    ids=["none", "no_grad", "inference", "autocast", "numpy", "context"],
)
def test_modes_as_in_forked_workers(dataset, mode):
    """Workers work in the modes of the loop that starts them, as worker processes do."""
    arguments = {"num_workers": 1, "batch_size": None, "worker_init_fn": note_modes}
    before = modes()
    noted.clear()
    with mode():
        inside = modes()
        forked = torch.utils.data.DataLoader(dataset, multiprocessing_context="fork", **arguments)
        assert list(DataLoader(dataset, **arguments)) == list(forked) == [inside]
    assert noted
    assert all(found == inside for found in noted)
    assert modes() == before


noted: list = []


def note_modes(worker_id):
    noted.append(modes())


def test_event_loop_has_modes():
    """An asynchronous load works in the loop's modes; context variables are its own."""
    with torch.inference_mode(), torch.autocast("cpu"), np.errstate(divide="raise"), request("5"):
        inside = modes()
        (found,) = DataLoader(AsyncModes(1), num_workers=1, batch_size=None)
    assert found == inside | {"context": "none"}


def test_persistent_workers_keep_modes():
    """Persistent workers stay in the modes that they started in."""
    with DataLoader(Modes(1), num_workers=1, batch_size=None, persistent_workers=True) as loader:
        with torch.no_grad():
            assert next(iter(loader))["grad"] is False
        assert next(iter(loader))["grad"] is False


def test_worker_init_fn_may_set_modes():
    """What it sets for its thread stays set, and the loop's own modes do not change."""

    def init(worker_id):
        torch.set_grad_enabled(False)
        np.seterr(divide="raise")
        request_id.set("of the worker")

    (found,) = DataLoader(Modes(1), num_workers=1, batch_size=None, worker_init_fn=init)
    expected = {"grad": False, "numpy": "raise", "context": "of the worker"}
    assert found == modes() | expected
    assert modes() != found


class Leaf(Squares):
    """Changes a parameter in place, which is an error while gradients are recorded."""

    def __init__(self):
        super().__init__(2)
        self.scale = torch.nn.Parameter(torch.ones(2))

    def __getitem__(self, index):
        return self.scale.mul_(2).numpy()


def test_dataset_needs_no_grad():
    """A dataset that only works without gradients works in a loop without gradients."""
    with torch.no_grad():
        assert len(list(DataLoader(Leaf(), num_workers=1))) == 2


class DrawsInNested(Squares):
    def __getitem__(self, index):
        list(DataLoader(Squares(1), num_workers=1, worker_init_fn=self.init))
        return index

    def init(self, worker_id):
        with pytest.raises(RuntimeError, match="while a sample is being made"):
            torch.utils.data.get_worker_info().rng.torch_generator.seed()


def test_nested_worker_has_no_outer_rng():
    """The RNG of a sample is not seen by workers that are started while the sample is made."""
    assert len(list(DataLoader(DrawsInNested(2), num_workers=1))) == 2


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
