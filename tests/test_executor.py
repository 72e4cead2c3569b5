"""The preprocess stage in somebody else's workers."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import (
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from concurrent.futures.process import BrokenProcessPool
from concurrent.futures.thread import BrokenThreadPool
from pathlib import Path

import pytest
import torch

from spdl_torch import DataLoader, StagedDataset

from .datasets import PATIENCE_SECONDS, InBulk, Squares, Staged, StagedAsync, StagedMany


@pytest.fixture
def no_logging():
    """concurrent.futures logs what it has been told to raise."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def test_preprocess_runs_in_pool(pool):
    """Samples are preprocessed in the pool's processes."""
    loader = DataLoader(ProcessIds(40), batch_size=4, num_workers=2, preprocess_executor=pool)
    process_ids = {int(i) for batch in loader for i in batch}
    assert os.getpid() not in process_ids
    assert 1 <= len(process_ids) <= 2


class ProcessIds(Squares):
    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.parametrize("dataset", [Staged(30), StagedAsync(30), StagedMany(30)])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_batches_equal_without_executor(pool, dataset, batch_size):
    """Batches are the same with and without an executor."""
    arguments = {"batch_size": batch_size, "num_workers": 2}
    expected = list(DataLoader(dataset, **arguments))
    assert list(DataLoader(dataset, preprocess_executor=pool, **arguments)) == expected


@pytest.mark.parametrize("dataset", [Squares(30), InBulk(30)])
def test_whole_dataset_runs_in_executor(pool, dataset):
    """A dataset without stages runs in the executor as a whole."""
    for arguments in ({"batch_size": 7}, {"batch_size": None}, {"batch_size": 7, "shuffle": True}):
        loader = DataLoader(dataset, num_workers=2, preprocess_executor=pool, **arguments)
        got = torch.cat([torch.as_tensor(batch).reshape(-1) for batch in loader])
        assert sorted(got.tolist()) == [i * i for i in range(30)]


class CountsCopies(StagedDataset):
    """Leaves a mark in a folder each time that it arrives in a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self):
        return 200

    def __setstate__(self, state):
        self.__dict__.update(state)
        (self.folder / f"{os.getpid()}-{len(list(self.folder.iterdir()))}").touch()

    def load(self, index):
        return index

    def preprocess(self, raw):
        return raw


def test_hook_is_unpickled_once(pool, tmp_path):
    """Each process of the pool unpickles the hook once."""
    dataset = CountsCopies(tmp_path)
    for _ in range(3):
        loader = DataLoader(dataset, batch_size=8, num_workers=2, preprocess_executor=pool)
        assert sum(len(batch) for batch in loader) == 200
    process_ids = [path.name.split("-")[0] for path in tmp_path.iterdir()]
    assert len(process_ids) == len(set(process_ids)) <= 2


class RaisesRemotely(Squares):
    def __getitem__(self, index):
        if index == 5:
            raise LookupError("over there")
        return index


def test_exception_returns_to_its_batch(pool):
    """An exception of the executor's worker is raised at its batch."""
    loader = DataLoader(RaisesRemotely(9), batch_size=3, num_workers=2, preprocess_executor=pool)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2]
    with pytest.raises(LookupError, match="over there") as caught:
        next(iterator)
    assert "sample index 5 (batch 1)" in caught.value.__notes__[0]
    assert "in __getitem__" in str(caught.value.__cause__)
    assert [batch.tolist() for batch in iterator] == [[6, 7, 8]]


class Dies(Squares):
    def __getitem__(self, index):
        if index == 5:
            os._exit(3)
        return index


def test_broken_pool_is_an_error():
    """A broken pool is an error at its batch and not a hang."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        loader = DataLoader(Dies(30), num_workers=2, preprocess_executor=executor)
        iterator = iter(loader)
        errors = 0
        for _ in range(30):
            try:
                next(iterator)
            except BrokenProcessPool:
                errors += 1
        assert errors >= 25
        assert list(iterator) == []


SCRIPT = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from spdl_torch import DataLoader

class Dataset(list):
    pass

{guard}
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            if {hides_class}:
                pool.submit(int).result()  # It has run the script.
                Dataset = Late = type("Late", (list,), {{}})
            list(DataLoader(Dataset([1, 2]), num_workers=1, preprocess_executor=pool))
    except Exception as error:
        if __name__ != "__main__": raise
        print(type(error).__name__, *error.__notes__, sep="\\n")
"""


@pytest.mark.parametrize(
    ("guard", "hides_class", "expected"),
    [
        ("if True:", False, ("BrokenProcessPool", "the script may lack `if __name__")),
        ('if __name__ == "__main__":', True, ("AttributeError", "Put it into a module of its own")),
    ],
)
def test_pool_cannot_import_dataset(tmp_path, guard, hides_class, expected):
    """A pool whose processes cannot run the dataset is an error that says what to do."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard, hides_class=hides_class))
    program = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )
    error, origin, advice = program.stdout.splitlines()[:3]
    assert error == expected[0]
    assert origin.startswith("spdl_torch: raised in the preprocess stage for batch 0")
    assert expected[1] in advice


def test_executor_was_shut_down():
    """An executor that was shut down is an error and not a hang."""
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    loader = DataLoader(Squares(4), num_workers=2, preprocess_executor=executor)
    with pytest.raises(RuntimeError, match="after shutdown"):
        next(iter(loader))


def fail():
    raise LookupError("no")


@pytest.mark.usefixtures("no_logging")
def test_executor_breaks_under_its_lock():
    """An executor that breaks while it holds its lock is an error and not a hang."""
    with ThreadPoolExecutor(1, initializer=fail) as executor:
        iterator = iter(
            DataLoader(
                Squares(4),
                num_workers=1,
                prefetch_factor=4,
                preprocess_executor=executor,
                timeout=PATIENCE_SECONDS,
            )
        )
        for _ in range(4):
            with pytest.raises(BrokenThreadPool):
                next(iterator)


@pytest.mark.usefixtures("no_logging")
def test_executor_breaks_without_threads(
    monkeypatch,
):
    """An executor that breaks where no thread can be started is an error and not a hang."""
    start = threading.Thread.start

    def start_no_more(thread):
        if "apart" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_no_more)
    with ThreadPoolExecutor(1, initializer=fail) as executor:
        arguments = {"num_workers": 1, "prefetch_factor": 4, "timeout": PATIENCE_SECONDS}
        iterator = iter(DataLoader(Squares(4), preprocess_executor=executor, **arguments))
        for _ in range(4):
            with pytest.raises(RuntimeError, match=r"initializer failed|can't start new thread"):
                next(iterator)


def test_shutdown_under_executor_lock():
    """An executor that is shut down while it holds its lock is an error and not a hang."""
    executor = ThreadPoolExecutor(1)
    may_end = threading.Event()
    executor.submit(may_end.wait)
    loader = DataLoader(
        Squares(4), num_workers=1, prefetch_factor=4, preprocess_executor=executor, timeout=0.2
    )
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    executor.shutdown(wait=False, cancel_futures=True)
    may_end.set()
    for _ in range(4):
        with pytest.raises(CancelledError) as caught:
            next(iterator)
        assert "the executor was shut down" in caught.value.__notes__[1]
    loader.close()  # The exceptions refer to this frame, and so to the iterator.


class Forgetful(Executor):
    """Cancels what it is given."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


def test_cancelled_task_is_an_error():
    """A cancelled task is an error at its batch."""
    from concurrent.futures import CancelledError  # noqa: PLC0415 (not asyncio's)

    loader = DataLoader(Squares(4), num_workers=2, preprocess_executor=Forgetful())
    iterator = iter(loader)
    for _ in range(4):
        with pytest.raises(CancelledError):
            next(iterator)
    assert list(iterator) == []


class Manual(Executor):
    """Runs a task when it is told to."""

    def __init__(self):
        self.tasks = []
        self.submitted = threading.Event()

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.tasks.append((future, fn, args))
        self.submitted.set()
        return future

    def run(self):
        future, fn, args = self.tasks.pop(0)
        if future.set_running_or_notify_cancel():
            future.set_result(fn(*args))


def test_break_cancels_waiting_tasks():
    """An abandoned epoch cancels the tasks that the executor has not begun."""
    executor = Manual()
    iterator = iter(DataLoader(Squares(40), num_workers=2, preprocess_executor=executor))
    consumer = threading.Thread(target=next, args=[iterator])
    consumer.start()
    assert executor.submitted.wait(PATIENCE_SECONDS)
    executor.run()  # It carries the hook; the others come after it.
    consumer.join(PATIENCE_SECONDS)
    waiting = [future for future, _, _ in executor.tasks]
    assert waiting
    del consumer, iterator
    assert all(future.cancelled() for future in waiting)


def test_new_epoch_is_not_cancelled():
    """Cancelling an abandoned epoch does not cancel tasks of the next one."""
    with ThreadPoolExecutor(2) as executor:
        loader = DataLoader(
            Staged(40), num_workers=2, persistent_workers=True, preprocess_executor=executor
        )
        for _ in range(30):
            for _ in loader:
                break
        assert len(list(loader)) == 40
        loader.close()


class Remote(Future):
    """Is cancelled by a message through a pipe, which a forked child has too."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def cancel(self):
        os.write(self.pipe, b"cancel")
        return super().cancel()


class RunsTheFirst(Executor):
    """Runs the first task at once, and no other."""

    def __init__(self, make_future):
        self.make_future = make_future
        self.futures = []
        self.is_at_second = threading.Event()
        self.may_go = threading.Event()

    def submit(self, fn, /, *args, **kwargs):
        future = self.make_future()
        if self.futures:
            self.is_at_second.set()
            assert self.may_go.wait(PATIENCE_SECONDS)
        else:
            future.set_result(fn(*args))
        self.futures.append(future)
        return future


class Filled(torch.utils.data.Dataset):
    """Its samples are large enough for several intra-op threads."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(200_000).fill_(index)


@pytest.mark.timeout(30)
def test_forked_pool_uses_one_intra_op_thread():
    """A process that was forked after torch had used threads does not wait for them."""
    torch.zeros(200_000).fill_(1)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        loader = DataLoader(Filled(), num_workers=1, preprocess_executor=pool)
        assert [batch[0, 0].item() for batch in loader] == [0, 1, 2, 3]


def test_fork_keeps_parents_tasks():
    """A forked child does not cancel its parent's tasks."""
    reader, writer = os.pipe()
    executor = RunsTheFirst(lambda: Remote(writer))
    executor.may_go.set()
    iterator = iter(DataLoader(Squares(8), num_workers=2, preprocess_executor=executor))
    next(iterator)
    child = os.fork()
    if child == 0:  # pragma: no cover (in the child)
        try:
            del iterator
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.write(writer, b"nothing came before")
    assert os.read(reader, 100) == b"nothing came before"
    del iterator
    assert os.read(reader, 100).startswith(b"cancel")
    os.close(reader)
    os.close(writer)


def test_late_task_is_cancelled():
    """A task that is submitted while the loop is left is cancelled."""
    executor = RunsTheFirst(Future)
    loader = DataLoader(Staged(40), num_workers=1, num_io_workers=1, preprocess_executor=executor)
    iterator = iter(loader)
    next(iterator)
    assert executor.is_at_second.wait(PATIENCE_SECONDS)
    threading.Timer(0.05, executor.may_go.set).start()  # While the finaliser waits for it.
    del iterator
    for thread in threading.enumerate():
        if thread.name.startswith("spdl_torch"):
            thread.join(PATIENCE_SECONDS)
    assert len(executor.futures) > 1
    assert all(future.cancelled() for future in executor.futures[1:])


class InterruptsOnce(ThreadPoolExecutor):
    was_interrupted = False

    def submit(self, fn, /, *args, **kwargs):
        if not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        return super().submit(fn, *args, **kwargs)


def test_ctrl_c_in_submit_closes():
    """A Ctrl-C while samples are submitted closes the iterator instead of hanging."""
    with InterruptsOnce(1) as executor:
        loader = DataLoader(
            Squares(6), num_workers=1, prefetch_factor=1, preprocess_executor=executor
        )
        iterator = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
        assert [batch.item() for batch in loader] == [i * i for i in range(6)]


def test_unpicklable_dataset_is_refused():
    """A dataset that cannot be pickled is refused, with advice."""

    class Local(Squares):
        pass

    with ThreadPoolExecutor(1) as executor:
        loader = DataLoader(Local(4), num_workers=2, preprocess_executor=executor)
        with pytest.raises(TypeError, match="top level of a module"):
            iter(loader)


class UnpicklableRaw(Staged):
    def load(self, index):
        return lambda: index  # An AttributeError, as for a class that cannot be imported.


class UnpicklableSample(Staged):
    def preprocess(self, raw):
        return threading.Lock()


@pytest.mark.parametrize("dataset", [UnpicklableRaw(), UnpicklableSample()])
def test_unpicklable_sample_is_explained(pool, dataset):
    """A sample that cannot be pickled is an error with a note that says so."""
    loader = DataLoader(dataset, num_workers=2, preprocess_executor=pool)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)) as caught:
        next(iter(loader))
    origin, advice = caught.value.__notes__
    assert origin.startswith("spdl_torch: raised in the preprocess stage for batch 0")
    assert "one of them cannot be. Let load and preprocess return" in advice


def test_executor_of_threads():
    """An executor of threads can preprocess samples too."""
    with ThreadPoolExecutor(2) as executor:
        loader = DataLoader(Squares(20), num_workers=1, preprocess_executor=executor)
        assert [batch.item() for batch in loader] == [i * i for i in range(20)]
