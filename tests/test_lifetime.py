"""When threads start, and that none is left."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from spdl_torch import DataLoader, RetryLoad, StagedDataset

from .conftest import HAS_GIL, assert_says_nothing, own_thread_names
from .datasets import (
    PATIENCE_SECONDS,
    Circle,
    Gated,
    Raising,
    Sharded,
    Squares,
    Staged,
    StagedAsync,
)


def join_own_threads():
    """Wait for workers that were asked to stop and are still inside the dataset's code."""
    for thread in threading.enumerate():
        if thread.name.startswith("spdl_torch"):
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), thread.name


def test_workers_start_at_first_batch():
    """Workers start with the first batch and not before."""
    iterator = iter(DataLoader(Squares(), num_workers=3))
    assert own_thread_names() == []
    next(iterator)
    assert len(own_thread_names()) == 3


def test_end_of_epoch_ends_workers():
    """No thread is left after the last batch."""
    for _ in DataLoader(Squares(), num_workers=2):
        pass
    assert own_thread_names() == []


def test_exhausted_iterator_stays_exhausted():
    """An iterator that has ended raises StopIteration again."""
    iterator = iter(DataLoader(Squares(2), num_workers=2))
    assert len(list(iterator)) == 2
    assert list(iterator) == []


@pytest.mark.parametrize("dataset", [Squares(), Sharded(), Staged(), StagedAsync()])
def test_break_ends_workers(dataset):
    """No thread is left after a break."""
    for _ in DataLoader(dataset, num_workers=2):
        break
    assert own_thread_names() == []


def test_unused_iterator_leaves_no_thread():
    """An iterator that was never used leaves no thread."""
    iter(DataLoader(Squares(), num_workers=2))
    assert own_thread_names() == []


def test_dropped_iterator_frees_batches():
    """A dropped iterator frees its batches without the garbage collector."""

    class Batch:
        def __init__(self, samples):
            batches.add(self)
            made.release()

    batches = weakref.WeakSet()
    made = threading.Semaphore(0)
    iterator = iter(DataLoader(Squares(), num_workers=2, collate_fn=Batch))
    next(iterator)
    for _ in range(2):
        assert made.acquire(timeout=PATIENCE_SECONDS)
    del iterator
    assert len(batches) == 0


def test_idle_worker_keeps_no_batch():
    """A waiting worker keeps nothing of its last batch."""

    class Sample:
        pass

    class Samples(Squares):
        def __getitem__(self, index):
            sample = Sample()
            alive.add(sample)
            return sample

    alive = weakref.WeakSet()
    arguments = {"num_workers": 2, "persistent_workers": True, "collate_fn": len}
    with DataLoader(Samples(3), **arguments) as loader:
        assert list(loader) == [1, 1, 1]
        if not HAS_GIL:
            gc.collect()
        assert len(alive) == 0


def test_next_of_temporary_iterator():
    """An iterator without any other reference returns its batch and leaves no thread."""
    assert iter(DataLoader(Squares(), num_workers=2)).__next__().item() == 0
    assert own_thread_names() == []


class Trainer:
    """Holds the iterator, which needs the trainer: cyclic garbage when it is dropped."""

    def __init__(self):
        self.loader = DataLoader(
            Squares(), num_workers=2, persistent_workers=True, collate_fn=self.collate
        )

    def collate(self, samples):
        return samples


def collect(alive):
    """Collect garbage until this is gone: a worker may be about to let go of its last task."""
    started = time.monotonic()
    while alive() is not None:
        assert time.monotonic() - started < PATIENCE_SECONDS
        gc.collect()
    return time.monotonic() - started


def test_collected_cycle_ends_workers():
    """The workers of an iterator in a reference cycle end when it is collected."""
    trainer = Trainer()
    list(trainer.loader)
    alive = weakref.ref(trainer)
    del trainer
    assert len(own_thread_names()) == 2
    collect(alive)
    assert own_thread_names() == []


@pytest.mark.filterwarnings("error")
def test_collection_under_threading_lock():
    """A collection while the threads are counted waits only for a moment."""
    trainer = Trainer()
    list(trainer.loader)
    threads = trainer.loader._iterator._workers
    alive = weakref.ref(trainer)
    del trainer
    # As in the middle of `threading.enumerate()`. No worker can end before it is left.
    with threading._active_limbo_lock:
        seconds = collect(alive)
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert seconds < 4  # It would be five, and a warning that the dataset's code is stuck.


@pytest.mark.skipif(HAS_GIL, reason="what a thread drops goes in that thread")
@pytest.mark.filterwarnings("error")
def test_drop_under_threading_lock():
    """Dropping an iterator in another thread while threads are counted waits only for a moment."""
    iterators = [iter(DataLoader(Squares(), num_workers=2))]
    next(iterators[0])
    threads = iterators[0]._workers
    alive = weakref.ref(iterators[0])
    may_drop = threading.Event()

    def drop():
        assert may_drop.wait(PATIENCE_SECONDS)
        iterators.clear()

    dropper = threading.Thread(target=drop)
    dropper.start()
    with threading._active_limbo_lock:
        may_drop.set()
        started = time.monotonic()
        # Whoever has made an object lets it go, between any two steps.
        while alive() is not None and time.monotonic() - started < PATIENCE_SECONDS:
            pass
        seconds = time.monotonic() - started
    for thread in (dropper, *threads):
        thread.join(PATIENCE_SECONDS)
    assert seconds < 4


class Locking(Squares):
    """Needs a lock for all samples but the first."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.is_waiting = threading.Event()

    def __getitem__(self, index):
        if index > 0:
            self.is_waiting.set()
            with self.lock:
                pass
        return index


@pytest.mark.filterwarnings("error")
def test_collection_under_needed_lock():
    """A collection waits only for a moment for workers that need a lock of its thread."""
    dataset = Locking()
    with dataset.lock:
        iterator = iter(DataLoader(dataset, num_workers=2))
        next(iterator)
        assert dataset.is_waiting.wait(PATIENCE_SECONDS)
        threads = iterator._workers
        alive = weakref.ref(iterator)
        Circle(iterator)
        del iterator
        seconds = collect(alive)
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert seconds < 4  # It would be five, and a warning that the dataset's code is stuck.


@pytest.mark.parametrize("dataset", [Squares(), Sharded(), Staged(), StagedAsync()])
def test_workers_keep_no_context(dataset):
    """Idle workers do not keep the values of the context variables that they see."""
    current = contextvars.ContextVar("current")

    def train():
        iterator = iter(DataLoader(dataset, num_workers=2))
        current.set(iterator)
        next(iterator)
        return weakref.ref(iterator)

    collect(contextvars.copy_context().run(train))
    assert own_thread_names() == []


def test_ended_workers_keep_no_context():
    """An iterator at its end does not keep the values of context variables."""

    class Value:
        pass

    current = contextvars.ContextVar("current")

    def train():
        current.set(value := Value())
        iterator = iter(DataLoader(Squares(3), num_workers=2))
        assert len(list(iterator)) == 3
        return iterator, weakref.ref(value)

    iterator, value = contextvars.copy_context().run(train)
    gc.collect()
    assert value() is None
    assert list(iterator) == []


def test_break_in_a_coroutine():
    """A loop that is left in a coroutine of another thread leaves no worker."""
    dataset = Gated(20, gated_index=3)
    names = []

    async def leave():
        for _ in DataLoader(dataset, num_workers=2):
            assert dataset.is_waiting.wait(PATIENCE_SECONDS)
            threading.Timer(0.05, dataset.may_go.set).start()  # When the loop is being closed.
            break
        names.extend(own_thread_names())

    thread = threading.Thread(target=lambda: asyncio.run(leave()))
    thread.start()
    thread.join()
    assert names == []


class Failing(StagedDataset):
    def __init__(self, stage):
        self.stage = stage

    def __len__(self):
        return 8

    def load(self, index):
        if self.stage == "load" and index == 5:
            raise LookupError(self.stage)
        return index

    def preprocess(self, raw):
        if self.stage == "preprocess" and raw == 5:
            raise LookupError(self.stage)
        return raw

    def collate(self, samples):
        if self.stage == "collate" and 5 in samples:
            raise LookupError(self.stage)
        return samples


class FailingAsync(Failing):
    async def load(self, index):
        return super().load(index)


@pytest.mark.parametrize("cls", [Failing, FailingAsync])
@pytest.mark.parametrize("stage", ["load", "preprocess", "collate"])
def test_stage_error_leaves_no_thread(cls, stage):
    """No thread is left after an exception in a stage."""

    def train():
        for _ in DataLoader(cls(stage), batch_size=2, num_workers=2):
            pass

    with pytest.raises(LookupError, match=stage):
        train()
    assert own_thread_names() == []


def test_init_error_leaves_no_thread():
    """No thread is left after an exception in worker_init_fn."""

    def fail(worker_id):
        raise LookupError(f"worker {worker_id}")

    loader = DataLoader(Squares(), num_workers=2, worker_init_fn=fail)
    with pytest.raises(LookupError, match="worker 0"):
        next(iter(loader))
    assert own_thread_names() == []


def test_loop_error_leaves_no_thread():
    """No thread is left after an exception in the training loop."""

    def train():
        for _ in DataLoader(Squares(), num_workers=2):
            raise LookupError

    with pytest.raises(LookupError):
        train()
    assert own_thread_names() == []


def test_close_can_be_repeated():
    """close() ends all iterators and may be called again."""
    loader = DataLoader(Squares(), num_workers=2)
    iterators = [iter(loader), iter(loader)]
    for iterator in iterators:
        next(iterator)
    loader.close()
    loader.close()
    assert own_thread_names() == []
    for iterator in iterators:
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
    with pytest.raises(RuntimeError, match="Make a new one"):
        iter(loader)


def test_leaving_the_context_closes():
    """Leaving the context of a loader closes it."""
    with DataLoader(Squares(), num_workers=2) as loader:
        next(iter(loader))
    assert own_thread_names() == []


def test_close_wakes_waiting_consumer():
    """close() in another thread wakes a consumer that waits for a batch."""
    dataset = Gated(4, gated_index=0)
    loader = DataLoader(dataset, num_workers=2)
    outcome = []

    def consume():
        try:
            next(iter(loader))
        except RuntimeError as error:
            outcome.append(str(error))

    consumer = threading.Thread(target=consume)
    closer = threading.Thread(target=loader.close)
    consumer.start()
    assert dataset.is_waiting.wait(PATIENCE_SECONDS)
    closer.start()
    # The worker is still behind its gate: it is not what wakes the consumer.
    consumer.join(PATIENCE_SECONDS)
    assert not consumer.is_alive()
    assert "closed" in outcome[0]
    dataset.may_go.set()
    closer.join(PATIENCE_SECONDS)
    assert not closer.is_alive()


@pytest.mark.usefixtures("ctrl_c_interrupts_once")
def test_ctrl_c_closes_the_iterator():
    """After Ctrl-C in next() the iterator is closed, and the saved state is still exact."""

    class InterruptsTheConsumer(Gated):
        def __getitem__(self, index):
            if index == self.gated_index:
                assert asks_for_gated.wait(PATIENCE_SECONDS)
                # Pressed again until it is heard: Python does not hear a signal that arrives in
                # the moment before a thread begins to wait.
                for _ in range(100 * PATIENCE_SECONDS):
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    if self.may_go.wait(0.01):
                        break
            return super().__getitem__(index)

    asks_for_gated = threading.Event()
    dataset = InterruptsTheConsumer(6, gated_index=2)
    loader = DataLoader(dataset, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    seen = [next(iterator).item() for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the order is the point)
        asks_for_gated.set()
        next(iterator)
    dataset.may_go.set()
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)
    dataset.gated_index = -1
    loader.load_state_dict(loader.state_dict())
    seen += [batch.item() for batch in loader]
    assert seen == [index * index for index in range(6)]
    join_own_threads()


def test_break_then_second_epoch():
    """An epoch after a break starts with the first batch."""
    loader = DataLoader(Squares(9), batch_size=3, num_workers=2)
    for _ in loader:
        break
    assert [batch.tolist() for batch in loader] == [[0, 1, 4], [9, 16, 25], [36, 49, 64]]


def test_several_iterators_of_one_loader():
    """Several iterators of one loader are used side by side."""
    loader = DataLoader(Squares(6), batch_size=2, num_workers=2)
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
    assert pairs == [([0, 1], [0, 1]), ([4, 9], [4, 9]), ([16, 25], [16, 25])]


class Nested(Squares):
    """Each sample is a sum over a loader of its own, inside a worker."""

    def __getitem__(self, index):
        return sum(batch.sum().item() for batch in DataLoader(Squares(index), num_workers=2))


def test_loader_inside_a_worker():
    """A dataset may use a loader in its worker."""
    loader = DataLoader(Nested(8), num_workers=3)
    assert [b.item() for b in loader] == [sum(i * i for i in range(n)) for n in range(8)]


# -- persistent workers ----------------------------------------------------------------------------


def test_persistent_workers_stay():
    """Persistent workers stay from epoch to epoch."""

    class ThreadIds(Squares):
        def __getitem__(self, index):
            barrier.wait(PATIENCE_SECONDS)
            return threading.get_ident()

    barrier = threading.Barrier(2)
    loader = DataLoader(ThreadIds(2), num_workers=2, persistent_workers=True)
    first, second = ({batch.item() for batch in loader} for _ in range(2))
    assert first == second
    assert len(own_thread_names()) == 2
    loader._iterator = None  # What Lightning does when it is done with a loader.
    assert own_thread_names() == []


def test_persistent_workers_end_with_loader():
    """Persistent workers end when their loader is dropped."""
    loader = DataLoader(Squares(), num_workers=2, persistent_workers=True)
    next(iter(loader))
    assert len(own_thread_names()) == 2
    del loader
    assert own_thread_names() == []


def test_abandoned_epoch_leaves_nothing():
    """No batch of an abandoned epoch reaches the next one."""
    dataset = Gated(12, gated_index=2)
    loader = DataLoader(dataset, num_workers=2, persistent_workers=True, shuffle=False)
    for batch in loader:
        assert batch.item() == 0
        break
    assert dataset.is_waiting.wait(PATIENCE_SECONDS)
    iterator = iter(loader)  # The old epoch's sample 2 is still in a worker.
    dataset.may_go.set()
    assert [batch.item() for batch in iterator] == [index * index for index in range(12)]
    loader.close()


def test_persistent_iterable_workers_start_over():
    """Persistent workers start an iterable dataset from its beginning in each epoch."""
    loader = DataLoader(Sharded(7), num_workers=2, batch_size=2, persistent_workers=True)
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert epochs == [[[0, 2], [1, 3], [4, 6], [5]]] * 3
    loader.close()


def test_persistent_workers_keep_their_copy():
    """Persistent workers keep their copy of an iterable dataset."""
    loader = DataLoader(Counting(), num_workers=1, persistent_workers=True)
    assert [[batch.item() for batch in loader] for _ in range(3)] == [[1], [2], [3]]
    assert loader.dataset.num_epochs == 0
    loader.close()


class Counting(IterableDataset):
    num_epochs = 0

    def __iter__(self):
        self.num_epochs += 1
        yield self.num_epochs


def test_persistent_workers_recover():
    """Persistent workers recover from an exception in their set-up."""

    def fail_once(worker_id):
        if not failures:
            failures.append(worker_id)
            raise LookupError

    failures = []
    loader = DataLoader(
        Squares(4), num_workers=1, persistent_workers=True, worker_init_fn=fail_once
    )
    with pytest.raises(LookupError):
        next(iter(loader))
    assert len(list(loader)) == 4
    loader.close()


# -- the process -----------------------------------------------------------------------------------


def test_fork_needs_its_own_iterator():
    """A forked child is told to make its own iterator."""
    iterator = iter(DataLoader(Squares(), num_workers=2))
    next(iterator)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (in the child)
        try:
            next(iterator)
        except RuntimeError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    assert "Call iter(loader) in the child process" in message


def test_fork_keeps_parents_event_loop():
    """A forked child does not disturb the parent's event loop."""
    loader = DataLoader(StagedAsync(6), num_workers=1, batch_size=6)
    expected = list(loader)
    child = os.fork()
    if child == 0:  # pragma: no cover (in the child)
        is_right = False
        try:
            is_right = list(loader) == expected
            del loader  # Closes its copy of the loop.
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(loader) == expected


def test_fork_finds_no_held_lock():
    """No lock of ours can be held during a fork, since it would stay held in the child."""
    loader = DataLoader(Staged(), num_workers=2, on_error=RetryLoad())
    ours = [module for name, module in sys.modules.items() if name.startswith("spdl_torch.")]
    assert len(ours) > 40
    locks = [
        name
        for held in (loader, loader._bad_sample_policy, *ours)
        for name, value in vars(held).items()
        if isinstance(value, type(threading.Lock()) | type(threading.RLock()))
    ]
    assert locks == ["_datapipe_graphs"]  # A fork waits for it, as the next test shows.


class Seeded(IterDataPipe):
    """Waits to be let go when it is seeded, which is done with all datapipes locked."""

    is_waiting = threading.Event()
    may_go = threading.Event()

    def __iter__(self):
        return iter(range(4))

    def is_shardable(self):
        return False

    def set_seed(self, seed):
        if threading.current_thread() is not threading.main_thread():
            self.is_waiting.set()
            assert self.may_go.wait(PATIENCE_SECONDS)
        return self


def test_fork_while_seeding_datapipes():
    """A child forked while a worker seeds a datapipe can load from datapipes."""
    thread = threading.Thread(target=lambda: list(DataLoader(Seeded(), num_workers=1)))
    thread.start()
    assert Seeded.is_waiting.wait(PATIENCE_SECONDS)
    threading.Timer(0.05, Seeded.may_go.set).start()  # While the fork waits for it.
    child = os.fork()
    if child == 0:  # pragma: no cover (in the child)
        signal.alarm(PATIENCE_SECONDS)
        is_right = False
        try:
            is_right = len(list(DataLoader(Seeded(), num_workers=1))) == 4
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize("dataset", ["[1, 2, 3]", "Nested(3)", "Nested(0)"])
def test_intra_op_threads_elsewhere(dataset):
    """The number of intra-op threads of other threads does not change, also by nested loaders."""
    # In a new process: a thread decides on its number once, when it first needs one.
    program = (
        "import torch, threading\n"
        "from spdl_torch import DataLoader\n"
        "class Nested:\n"
        "    def __init__(self, depth): self.depth = depth\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, index):\n"
        "        inner = Nested(self.depth - 1) if self.depth > 0 else [1, 2]\n"
        "        list(DataLoader(inner, num_workers=2))\n"
        "        assert torch.get_num_threads() == 1\n"
        "        return index\n"
        f"list(DataLoader({dataset}, num_workers=1))\n"
        "numbers = [torch.get_num_threads()]\n"
        "other = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))\n"
        "other.start(); other.join()\n"
        "print(*numbers)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout == "2 2\n"


EXIT = """
import asyncio, functools, os, threading, time, torch
from spdl_torch import DataLoader, StagedDataset

class Signal:
    # Like an Event, but also from a forked child.
    def __init__(self):
        self.read_end, self.write_end = os.pipe()
    def set(self):
        os.write(self.write_end, b"1")
    def wait(self):
        os.read(self.read_end, 1)

class Data(StagedDataset):
    def __init__(self):
        self.is_waiting = Signal()
    def __len__(self):
        return 8
    def load(self, index):
        return index

class Stuck(Data):
    def load(self, index):
        self.is_waiting.set()
        threading.Event().wait()

class Busy(Data):
    def __len__(self):
        return 64
    def load(self, index):
        self.is_waiting.set()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            torch.ones(100).sum()

class Polls(Data):
    def load(self, index):
        self.is_waiting.set()
        while True:
            time.sleep(0.005)

class StuckAsync(Data):
    async def load(self, index):
        self.is_waiting.set()
        await asyncio.Event().wait()

def consume(iterator):
    try:
        next(iterator)
    except RuntimeError:
        pass

"""

IN_THIS_PROCESS = "DataLoader = functools.partial(DataLoader, num_processes=0)\n"


@pytest.mark.parametrize("place", ["", IN_THIS_PROCESS], ids=["child", "threads"])
@pytest.mark.parametrize(
    "state",
    [
        "it = iter(DataLoader(Data(), num_workers=2))",
        "it = iter(DataLoader(Data(), num_workers=2)); next(it)",
        "loader = DataLoader(Data(), num_workers=2, persistent_workers=True); list(loader)",
        # Every worker is inside the user's code, and is never going to come back.
        "data = Stuck(); it = iter(DataLoader(data, num_workers=2));"
        "threading.Thread(target=consume, args=[it], daemon=True).start(); data.is_waiting.wait()",
        # So many that each has but a small share of the interpreter's lock.
        "data = Busy(); it = iter(DataLoader(data, num_workers=2, num_io_workers=32));"
        "threading.Thread(target=consume, args=[it], daemon=True).start(); data.is_waiting.wait()",
        "data = Polls(); it = iter(DataLoader(data, num_workers=2));"
        "threading.Thread(target=consume, args=[it], daemon=True).start(); data.is_waiting.wait()",
        "data = StuckAsync(); it = iter(DataLoader(data, num_workers=2));"
        "threading.Thread(target=consume, args=[it], daemon=True).start(); data.is_waiting.wait()",
    ],
)
def test_exit_with_live_iterator(state, place):
    """The interpreter exits with a live iterator."""
    assert_says_nothing(EXIT + place + state)


@pytest.mark.parametrize("place", ["", IN_THIS_PROCESS], ids=["child", "threads"])
def test_uncaught_exception_ends_program(place):
    """An uncaught exception ends the program with its traceback."""
    program = subprocess.run(
        [sys.executable, "-c", EXIT + place + "for _ in DataLoader(Data(), num_workers=2): 1 / 0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert program.returncode == 1
    assert program.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


# -- concurrency -----------------------------------------------------------------------------------


class Meeting(Squares):
    """Every sample waits until as many are being loaded as there are workers."""

    def __init__(self, size, num_parties):
        super().__init__(size)
        self.barrier = threading.Barrier(num_parties)

    def __getitem__(self, index):
        self.barrier.wait(PATIENCE_SECONDS)
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [1, 2, 7])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_workers_run_in_parallel(num_workers, batch_size):
    """All workers work at the same time."""
    dataset = Meeting(3 * num_workers * batch_size, num_workers)
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=num_workers)
    assert len(list(loader)) == 3 * num_workers


class StagedMeeting(StagedDataset):
    def __init__(self, num_io, num_cpu):
        self.num_io = num_io
        self.io_barrier = threading.Barrier(num_io)
        self.cpu_barrier = threading.Barrier(num_cpu)

    def __len__(self):
        return 2 * self.num_io

    def load(self, index):
        self.io_barrier.wait(PATIENCE_SECONDS)
        return index

    def preprocess(self, raw):
        self.cpu_barrier.wait(PATIENCE_SECONDS)
        return raw


class AsyncMeeting(StagedMeeting):
    async def load(self, index):
        if not hasattr(self, "meeting"):
            self.meeting = asyncio.Barrier(self.num_io)
        await self.meeting.wait()
        return index


@pytest.mark.parametrize("cls", [StagedMeeting, AsyncMeeting])
@pytest.mark.parametrize("batch_size", [4, 12, None])
def test_each_stage_has_its_width(cls, batch_size):
    """Each stage has its own number of workers."""
    loader = DataLoader(
        cls(num_io=12, num_cpu=3),
        batch_size=batch_size,
        num_workers=2,
        num_io_workers=12,
        num_cpu_workers=3,
    )
    assert len(list(loader)) == 24 // (batch_size or 1)


class RecordingSampler:
    def __init__(self, size):
        self.size = size
        self.num_drawn = 0

    def __iter__(self):
        for index in range(self.size):
            self.num_drawn += 1
            yield index

    def __len__(self):
        return self.size


@pytest.mark.parametrize("arguments", [{}, {"buffer_size": 3}, {"prefetch_factor": 5}])
def test_window_bounds_batches_in_flight(arguments):
    """No more batches than the window holds are in flight."""
    sampler = RecordingSampler(400)
    loader = DataLoader(Squares(400), sampler=sampler, batch_size=2, num_workers=2, **arguments)
    window = arguments.get("buffer_size") or arguments.get("prefetch_factor", 2) * 2
    iterator = iter(loader)
    assert sampler.num_drawn == 0
    for num_delivered in range(1, 201):
        next(iterator)
        assert sampler.num_drawn <= 2 * (window + num_delivered)
    assert list(iterator) == []


def test_slow_sample_delays_its_batch():
    """A slow sample delays only its own batch."""
    dataset = Gated(8, gated_index=1)
    iterator = iter(DataLoader(dataset, num_workers=2, in_order=False))
    seen = [next(iterator).item() for _ in range(7)]
    assert 1 not in seen
    dataset.may_go.set()
    assert next(iterator).item() == 1
    assert sorted([*seen, 1]) == [index * index for index in range(8)]
    assert list(iterator) == []


def test_in_order_waits_for_slow_batch():
    """In order, the loop waits for the slow batch while the others are made."""

    class Released(Gated):
        def __getitem__(self, index):
            if index == 3:
                self.may_go.set()  # Only when sample 3 is being loaded may sample 0 finish.
            return super().__getitem__(index)

    loader = DataLoader(Released(8, gated_index=0), num_workers=2)
    assert [batch.item() for batch in loader] == [index * index for index in range(8)]


def test_one_intra_op_thread_per_worker():
    """Each worker runs torch with one intra-op thread."""

    class NumThreads(Squares):
        def __getitem__(self, index):
            assert get_worker_info() is not None
            return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert {batch.item() for batch in DataLoader(NumThreads(8), num_workers=2)} == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_error_does_not_end_worker():
    """A worker survives an exception of the dataset."""
    loader = DataLoader(Raising(40, 3, LookupError()), num_workers=1)
    iterator = iter(loader)
    seen = []
    for _ in range(40):
        try:
            seen.append(next(iterator).item())
        except LookupError:
            seen.append("raised")
    assert seen == [index * index if index != 3 else "raised" for index in range(40)]
    assert list(iterator) == []
