"""Python without the GIL: nothing that is right may be so by its grace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import spdl_torch

ROOT = Path(spdl_torch.__file__).parents[1]

PROGRAM = """
import sys
from collections import deque

import torch

from spdl_torch import DataLoader, ReplaceBadSamples, RetryLoad, StagedDataset

assert not sys._is_gil_enabled()


class Numbers(StagedDataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples
        self.made = deque()
        self.failed = deque()

    def __len__(self):
        return self.num_samples

    def load(self, index):
        if index % 1000 == 0 and index not in self.failed:
            self.failed.append(index)
            raise OSError(index)
        return index

    def preprocess(self, raw):
        if raw == 7:
            raise ValueError(raw)
        self.made.append(raw)
        return raw


# So many samples to a batch, and so cheap, that all workers are at the same batch at the same time.
for _ in range(3):
    cheap = list(range(40_000))
    batches = list(DataLoader(cheap, batch_size=20_000, num_workers=8, timeout=60))
    assert torch.equal(torch.cat(batches), torch.arange(40_000))

numbers = Numbers(20_000)
loader = DataLoader(
    numbers,
    batch_size=4_000,
    num_workers=4,
    on_error=[ReplaceBadSamples(), RetryLoad(backoff=0.0)],
    timeout=60,
)
total = torch.cat(list(loader))
expected = torch.arange(20_000)
expected[7] = 8
assert torch.equal(total, expected)
assert len(numbers.made) == 20_000
assert loader.num_retries == 20
assert [bad.index for bad in loader.bad_samples] == [7]
assert not sys._is_gil_enabled()
"""


def interpreters():
    """Those without a GIL: the one that runs, and those on the path."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        yield sys.executable
    for name in ("python3.13t", "python3.14t", "python3.15t"):
        if (found := shutil.which(name)) is not None:
            yield found


def run(interpreter, program, timeout_seconds):
    return subprocess.run(
        [interpreter, "-X", "gil=0", "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


@pytest.fixture
def free_threaded():
    for interpreter in interpreters():
        if run(interpreter, "import torch", 60).returncode == 0:
            return interpreter
    pytest.skip("needs a free-threaded Python that has torch")


def test_every_sample_is_made_once_without_a_gil(free_threaded):
    ended = run(free_threaded, PROGRAM, 100)
    assert ended.returncode == 0, ended.stderr
