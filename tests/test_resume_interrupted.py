"""What was interrupted, was late or has failed, and what of it counts as delivered."""

from __future__ import annotations

import multiprocessing
import signal
import threading

import pytest
import torch

from spdl_torch import DataLoader

from .conftest import own_thread_names
from .datasets import PATIENCE_SECONDS, Held, Indices, Raising
from .resuming import (
    PROCESSES,
    SIZE,
    SOME,
    batches,
    interrupted_run,
    loader_of,
    restored,
    restored_batches,
    saved,
    take,
)


@pytest.mark.parametrize("extra", [{}, {"num_workers": 2}, PROCESSES], ids=str)
def test_failed_batch_counts_as_delivered(extra):
    """A batch whose dataset raised an error counts as delivered."""
    dataset = Raising(6, bad_index=2, error=ValueError("bad sample"))
    with DataLoader(dataset, **extra) as loader:
        iterator = iter(loader)
        take(iterator, 2)
        with pytest.raises(ValueError, match="bad sample"):
            next(iterator)
        state = saved(loader)
        rest = batches(iterator)
    assert rest == [[9], [16], [25]]
    with DataLoader(dataset, **extra) as loader:
        loader.load_state_dict(state)
        assert batches(loader) == rest


def patiently(iterator):
    """All that is left, however late it is on a busy machine."""
    left = []
    while True:
        try:
            left += take(iterator, 1)
        except StopIteration:
            return left
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise


def times_out(loader, dataset):
    """An iterator that has been asked in vain, and the state then."""
    iterator = iter(loader)
    try:
        with pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
        return iterator, saved(loader)
    finally:
        dataset.may_go.set()


@pytest.mark.parametrize("name", SOME)
def test_timeout_in_restored_epoch(name):
    """A wait that timed out in a restored epoch has delivered nothing."""
    state, rest = interrupted_run(name, 2)
    dataset = Held(SIZE, rest[0])
    with restored(name, state, dataset=dataset, num_workers=1, timeout=0.05) as loader:
        iterator, again = times_out(loader, dataset)
        assert patiently(iterator) == rest
    assert restored_batches(name, again) == rest


@pytest.mark.parametrize("name", SOME)
def test_timeout_in_later_epoch(name):
    """A wait that timed out in a later epoch has delivered nothing."""
    _, second_epoch = interrupted_run(name, 0, num_epochs=1)
    torch.manual_seed(7)
    dataset = Held(SIZE, second_epoch[0])
    with loader_of(name, dataset=dataset, num_workers=1, timeout=0.05) as loader:
        loader.set_epoch(3)
        dataset.may_go.set()
        patiently(iter(loader))
        dataset.may_go.clear()
        iterator, state = times_out(loader, dataset)
        assert patiently(iterator) == second_epoch
    assert restored_batches(name, state) == second_epoch


@pytest.mark.parametrize("name", sorted(set(SOME) - {"weighted"}))  # That may draw it twice.
def test_overtaken_batch_is_not_lost(name):
    """A batch that was overtaken in a restored epoch is not forgotten."""
    state, rest = interrupted_run(name, 2)
    dataset = Held(SIZE, rest[0][:1])
    extra = {"dataset": dataset, "num_workers": 2, "in_order": False}
    with restored(name, state, **extra) as loader:
        iterator = iter(loader)
        try:
            came = take(iterator, 2)
            again = saved(loader)
        finally:
            dataset.may_go.set()
    assert restored_batches(name, again) == [batch for batch in rest if batch not in came]


class HeldInProcess(Indices):
    def __init__(self) -> None:
        super().__init__(4)
        self.may_go = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index):
        if index == 0:
            assert self.may_go.wait(PATIENCE_SECONDS)
        return super().__getitem__(index)


def test_timeout_of_worker_process():
    """A wait for a worker process that timed out has delivered nothing."""
    dataset = HeldInProcess()
    loader = DataLoader(dataset, timeout=0.05, multiprocessing_context="fork", **PROCESSES)
    iterator, state = times_out(loader, dataset)
    assert patiently(iterator) == [[0], [1], [2], [3]]
    loader.load_state_dict(state)
    assert patiently(iter(loader)) == [[0], [1], [2], [3]]


class InterruptsOnce(Indices):
    """Ctrl-C while it loads a sample in the calling thread."""

    is_over = False

    def __getitem__(self, index):
        if index == 2 and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_interrupted_sample_is_not_delivered():
    """A sample interrupted in the calling thread was not delivered."""
    loader = DataLoader(InterruptsOnce(6))
    iterator = iter(loader)
    take(iterator, 2)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = saved(loader)
    loader.load_state_dict(state)
    assert batches(loader) == [[2], [3], [4], [5]]


@pytest.mark.filterwarnings("ignore:1 worker thread:RuntimeWarning")
@pytest.mark.usefixtures("ctrl_c_interrupts_once")
def test_interrupted_wait_delivers_nothing():
    """Ctrl-C inside `next()` closes the iterator, and the state is still exact."""

    class InterruptsTheConsumer(Held):
        def __getitem__(self, index):
            if index in self.held:
                assert asks_for_held.wait(PATIENCE_SECONDS)
                # Until it is heard: Python does not hear a signal that arrives in the moment
                # before a thread begins to wait.
                for _ in range(100 * PATIENCE_SECONDS):
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    if self.may_go.wait(0.01):
                        break
            return super().__getitem__(index)

    asks_for_held = threading.Event()
    dataset = InterruptsTheConsumer(6, held=[2])
    with DataLoader(dataset, num_workers=1, prefetch_factor=1) as loader:
        iterator = iter(loader)
        take(iterator, 2)
        try:
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the order is the point)
                asks_for_held.set()
                next(iterator)
        finally:
            dataset.may_go.set()
        for thread in threading.enumerate():
            if thread.name in own_thread_names():
                thread.join(PATIENCE_SECONDS)
        state = saved(loader)
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
    loader = DataLoader(Indices(6))
    loader.load_state_dict(state)
    assert batches(loader) == [[2], [3], [4], [5]]


def test_unordered_processes_refuse_to_save():
    """Worker processes out of order raise an error that says why their state cannot be saved."""
    loader = DataLoader(Indices(6), in_order=False, **PROCESSES)
    with pytest.raises(RuntimeError, match=r'in_order=False.*worker_method="thread"'):
        loader.state_dict()
