"""What a loop is told that waits in vain."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from spdl_torch import DataLoader, StagedDataset

from .datasets import PATIENCE_SECONDS, Squares, StagedAsync

TIMEOUT_SECONDS = 0.5


class Stuck(Dataset):
    """Is stuck at one sample until it is let go."""

    def __init__(self):
        self.go_on = threading.Event()
        self.paths = [f"/data/{index}.jpg" for index in range(12)]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        if index == 5:
            self.go_on.wait(PATIENCE_SECONDS)  # stuck here
        return index


class StuckStaged(StagedDataset, Stuck):
    def load(self, index):
        return Stuck.__getitem__(self, index)


class StuckInPreprocess(StagedDataset, Stuck):
    def load(self, index):
        return index

    def preprocess(self, raw):
        return Stuck.__getitem__(self, raw)


class StuckAsync(StagedDataset, Stuck):
    async def load(self, index):
        if index == 5:
            await self.wait()
        return index

    async def wait(self):
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)  # stuck here


class StuckAtOnce(Stuck):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class StuckStream(IterableDataset, Stuck):
    def __iter__(self):
        return (Stuck.__getitem__(self, index) for index in range(12))


class StuckToMove:
    def __init__(self, samples):
        self.samples = samples

    def to(self, device):
        return device if self.samples != [5] else stuck.wait(PATIENCE_SECONDS)  # stuck here


stuck = threading.Event()


def line_of(function):
    """The number of the line where a function is stuck."""
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if line.endswith("# stuck here\n"))


def text_of_timeout(dataset, go_on=None, **arguments):
    """What the loop is told, which is then let go."""
    arguments = {"num_workers": 2, "timeout": TIMEOUT_SECONDS} | arguments
    with DataLoader(dataset, **arguments) as loader:
        iterator = iter(loader)
        started = time.monotonic()
        try:
            for _ in iterator:
                pass
        except RuntimeError as error:
            assert time.monotonic() - started < TIMEOUT_SECONDS + 1
            return str(error)
        finally:
            (go_on or dataset.go_on).set()
    raise AssertionError("there was no timeout")


@pytest.mark.parametrize(
    ("kind", "stage", "function"),
    [
        (Stuck, "preprocess", Stuck.__getitem__),
        (StuckStaged, "load", Stuck.__getitem__),
        (StuckInPreprocess, "preprocess", Stuck.__getitem__),
        (StuckAsync, "load", StuckAsync.wait),
    ],
)
def test_error_names_sample_and_line(kind, stage, function):
    """The timeout error names the sample, its file and the line of the dataset's code."""
    text = text_of_timeout(kind(), batch_size=2)
    assert text.startswith(f"DataLoader timed out after {TIMEOUT_SECONDS} seconds")
    (seconds,) = re.findall(
        rf"sample index 5 \(batch 2\), /data/5\.jpg, in the {stage} stage for (\d\.\d) s", text
    )
    assert float(seconds) >= TIMEOUT_SECONDS - 0.2
    assert f'File "{__file__}", line {line_of(function)}, in {function.__name__}' in text
    assert "_engine" not in text


def test_error_names_whole_batch():
    """For an operation on a whole batch the timeout error names the batch and the line."""
    text = text_of_timeout(StuckAtOnce(), batch_size=3)
    assert "batch 1 in the preprocess stage for" in text
    assert f'File "{__file__}", line {line_of(Stuck.__getitem__)}, in __getitem__' in text


def test_error_names_iterable_batch():
    """For an iterable dataset the timeout error names the batch and the line."""
    text = text_of_timeout(StuckStream(), batch_size=3, num_workers=1)
    assert "batch 1 in the iterate stage for" in text
    assert f'File "{__file__}", line {line_of(Stuck.__getitem__)}, in __getitem__' in text


def test_error_names_executor_sample():
    """For an executor the timeout error names the sample."""
    dataset = StuckStaged()
    dataset.go_on = stuck
    stuck.clear()
    with ThreadPoolExecutor(2) as pool:
        text = text_of_timeout(PlainStuck(), stuck, preprocess_executor=pool)
    assert re.search(r"sample index 5 \(batch 5\) in the preprocess stage for \d\.\d s", text)


class PlainStuck(Dataset):
    """The same, but it can be pickled."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5:
            stuck.wait(PATIENCE_SECONDS)
        return index


def test_error_names_collate():
    """The timeout error says that a collate function is stuck."""
    go_on = threading.Event()

    def collate(samples):
        if samples == [5]:
            go_on.wait(PATIENCE_SECONDS)
        return samples

    text = text_of_timeout(list(range(12)), go_on, collate_fn=collate)
    assert "batch 5 in the collate stage for" in text


def test_error_names_transfer():
    """The timeout error says that a transfer is stuck."""
    stuck.clear()
    text = text_of_timeout(list(range(12)), stuck, collate_fn=StuckToMove, device="meta")
    assert "batch 5 in the transfer stage for" in text
    assert f"line {line_of(StuckToMove.to)}, in to" in text


def test_asking_again_loses_nothing():
    """After a timeout error next() waits again, and no batch is lost."""
    dataset = Stuck()
    with DataLoader(dataset, num_workers=2, timeout=TIMEOUT_SECONDS) as loader:
        iterator = iter(loader)
        batches = [next(iterator).item() for _ in range(5)]
        with pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
        dataset.go_on.set()
        assert batches + [batch.item() for batch in iterator] == list(range(12))


class StuckCopy(Squares):
    def __setstate__(self, state):
        stuck.wait(PATIENCE_SECONDS)  # stuck here


class StuckStreamCopy(StuckCopy, IterableDataset):
    def __iter__(self):
        return iter(range(4))


def stuck_init(worker_id):
    if worker_id == 1:
        stuck.wait(PATIENCE_SECONDS)  # stuck here


def all_stuck_init(worker_id):
    stuck.wait(PATIENCE_SECONDS)  # stuck here


@pytest.mark.parametrize(
    ("dataset", "arguments", "names", "function"),
    [
        (Squares(), {"worker_init_fn": stuck_init}, {"preprocess-1"}, stuck_init),
        (
            Squares(),
            {"num_workers": 4, "worker_init_fn": all_stuck_init},
            {f"preprocess-{n}" for n in range(4)},
            all_stuck_init,
        ),
        (
            StuckCopy(),
            {"copy_dataset": True},
            {"preprocess-0", "preprocess-1"},
            StuckCopy.__setstate__,
        ),
        (StuckStreamCopy(), {}, {"iterate-0", "iterate-1"}, StuckCopy.__setstate__),
        (StagedAsync(), {"num_workers": 1, "worker_init_fn": stuck_init}, {"load-1"}, stuck_init),
    ],
    ids=["worker_init_fn", "all", "copy", "iterable", "async"],
)
def test_error_names_set_up(dataset, arguments, names, function):
    """A worker that is not set up in time is an error with its line, and closes the iterator."""
    stuck.clear()
    loader = DataLoader(dataset, timeout=TIMEOUT_SECONDS, **{"num_workers": 2} | arguments)
    iterator = iter(loader)
    threads = iterator._workers
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert time.monotonic() - started < TIMEOUT_SECONDS + 1
    text = str(caught.value)
    assert text.startswith(f"DataLoader timed out after {TIMEOUT_SECONDS} seconds: the set-up of")
    assert set(re.findall(r"^  spdl_torch-(\S+)$", text, re.MULTILINE)) == names
    assert f'File "{__file__}", line {line_of(function)}, in {function.__name__}' in text
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
    for thread in threads:
        if thread.name.removeprefix("spdl_torch-") not in names:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
    stuck.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)


def test_timeout_shortens_staggered_start():
    """Workers wait for each other's `worker_init_fn` for at most half of the timeout."""
    together = threading.Barrier(8)

    def init(worker_id):
        together.wait(PATIENCE_SECONDS)

    # Eight times half a second is longer than the timeout.
    loader = DataLoader(Squares(3), num_workers=8, timeout=3, worker_init_fn=init)
    assert [batch.item() for batch in loader] == [0, 1, 4]


@pytest.mark.parametrize("num_processes", [0, None])
def test_ctrl_c_within_a_second(num_processes):
    """Also in the instant before the loop begins to wait, when CPython does not hear it."""
    program = textwrap.dedent(
        f"""
        import multiprocessing, threading, time
        import spdl_torch

        class Stuck(list):
            def __getitem__(self, index):
                ready.set()
                time.sleep(60)  # The loop must not wait for it, neither here nor when it closes.

        ready = multiprocessing.Event()
        threading.Thread(target=lambda: (ready.wait(), print("ready", flush=True))).start()
        arguments = {{"num_workers": 1, "num_processes": {num_processes}}}
        try:
            next(iter(spdl_torch.DataLoader(Stuck([1, 2]), **arguments)))
        except KeyboardInterrupt:
            print("heard", flush=True)
        import os
        os._exit(0)
        """
    )
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "ready\n"
            sent = time.monotonic()
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "heard\n"
            assert time.monotonic() - sent < 1
            process.wait(10)


def test_signal_before_the_wait(ctrl_c_interrupts_once):
    """A signal that arrives in the instant before the wait still ends it."""
    go_on = threading.Event()

    def collate(samples):
        # To the process, but not to the thread that waits: that one's sleep is not interrupted.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        go_on.wait(PATIENCE_SECONDS)
        return torch.tensor(samples)

    with DataLoader([1, 2, 3], num_workers=1, collate_fn=collate) as loader:
        iterator = iter(loader)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert time.monotonic() - started < 2
        go_on.set()
