"""The end of a loader: `close()`, `with`, and iterators that are asked again afterwards."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from spdl_torch import DataLoader

from .datasets import PATIENCE_SECONDS, Sharded, Squares

PROCESSES = {"num_workers": 2, "worker_method": "multiprocessing"}
ALL_WORKERS = pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        PROCESSES,
        PROCESSES | {"persistent_workers": True},
    ],
    ids=["caller", "threads", "persistent threads", "processes", "persistent processes"],
)


@pytest.mark.parametrize("dataset", [Squares(8), Sharded(8)], ids=["map", "iterable"])
@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("num_batches", [0, 3])
def test_close_ends_worker_processes(dataset, persistent_workers, num_batches):
    """No worker process is alive after `close()`, in the middle of an epoch."""
    loader = DataLoader(dataset, persistent_workers=persistent_workers, **PROCESSES)
    iterator = iter(loader)
    for _ in range(num_batches):
        next(iterator)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert multiprocessing.active_children() == []
    loader.close()


def test_leaving_with_ends_worker_processes():
    """Persistent worker processes end with the `with` block, also between two epochs."""
    with DataLoader(Squares(8), persistent_workers=True, **PROCESSES) as loader:
        list(loader)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []


def test_a_forked_child_leaves_worker_processes():
    """A child of a fork that closes its copy of the loader does not end the parent's workers."""
    loader = DataLoader(Squares(8), **PROCESSES)
    iterator = iter(loader)
    first = next(iterator)
    if (child := os.fork()) == 0:  # pragma: no cover (in the child)
        try:
            loader.close()
            del iterator
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [batch.item() for batch in (first, *iterator)] == [n * n for n in range(8)]
    loader.close()


@ALL_WORKERS
def test_a_closed_iterator_raises(workers):
    """After `close()` in the middle of an epoch, the iterator and the loader raise an error."""
    loader = DataLoader(Squares(8), **workers)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
    with pytest.raises(RuntimeError, match="closed"):
        iter(loader)


loop_waits = threading.Event()


class TellsOfArrival:
    def __setstate__(self, state):
        loop_waits.set()


class FirstIsStuck(Squares):
    """Never returns its first sample. The second arrives while the loop waits for it."""

    def __getitem__(self, index):
        if index == 0:
            threading.Event().wait(PATIENCE_SECONDS)
        arrival = TellsOfArrival()
        arrival.index = index
        return arrival


def test_close_ends_waiting_for_processes():
    """A loop that waits for a worker process gets an error if another thread closes the loader."""
    loop_waits.clear()
    loader = DataLoader(FirstIsStuck(2), batch_size=None, **PROCESSES)

    def close():
        assert loop_waits.wait(PATIENCE_SECONDS)
        loader.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(loader))
    closing.join()
    assert multiprocessing.active_children() == []


@ALL_WORKERS
def test_a_finished_iterator_stays_finished(workers):
    """An iterator at its end raises StopIteration as often as it is asked, as in torch."""
    with DataLoader(Squares(3), **workers) as loader:
        iterator = iter(loader)
        assert len(list(iterator)) == 3
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)
