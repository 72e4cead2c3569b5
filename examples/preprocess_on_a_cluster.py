"""Preprocess on a Dask cluster, and kill one of its workers in the middle of the epoch.

    pip install distributed
    python examples/preprocess_on_a_cluster.py
    python examples/preprocess_on_a_cluster.py --scheduler tcp://HOST:8786

Without a scheduler, it starts a local cluster of two processes. That has no more cores than threads
would have, and each task costs some milliseconds, so threads would be faster here.

A cluster on other machines must be able to import the dataset's class: install its package there,
or send its file to the workers with `client.upload_file`. This program sends itself, and imports
the class from there.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from distributed import Client, LocalCluster

from spdl_torch import DataLoader, StagedDataset


class Spectra(StagedDataset[tuple[torch.Tensor, int, int]]):
    """Recordings that are slow to preprocess."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def load(self, index: int) -> tuple[int, np.ndarray]:
        # Runs on this machine. The result is sent to a worker, so keep it small.
        return index, np.random.default_rng(index).random(4096, np.float32)

    def preprocess(self, raw: tuple[int, np.ndarray]) -> tuple[torch.Tensor, int, int]:
        index, recording = raw
        for _ in range(20):
            spectrum = np.abs(np.fft.fft(recording))
            recording = np.convolve(spectrum / spectrum.max(), recording[:64], "same")
        return torch.from_numpy(spectrum[:256].astype(np.float32)), index, os.getpid()


def train(client: Client, *, kill_one: bool) -> None:
    # From a module that the workers can import, not from __main__.
    sys.path.insert(0, str(Path(__file__).parent))
    client.upload_file(__file__)
    dataset = importlib.import_module(Path(__file__).stem).Spectra(400)
    # Without pure=False, Dask hashes all bytes of a task to find equal ones.
    executor = client.get_executor(pure=False)
    loader = DataLoader(
        dataset, batch_size=10, shuffle=True, num_workers=2, preprocess_executor=executor
    )
    times_delivered: Counter[int] = Counter()
    process_ids: set[int] = set()
    started = time.perf_counter()
    for number, (_, indices, workers) in enumerate(loader, 1):
        times_delivered.update(indices.tolist())
        process_ids.update(workers.tolist())
        if number == 10 and kill_one:
            os.kill(int(workers[-1]), signal.SIGKILL)
            print("killed a worker")
    seconds = time.perf_counter() - started
    print(f"{len(times_delivered)} samples, each {max(times_delivered.values())} time")
    print(f"from {len(process_ids)} worker processes, {len(dataset) / seconds:.0f} samples/s")
    print(loader.stats().verdict)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scheduler", help="address; its workers are not killed")
    options = parser.parse_args()
    if options.scheduler is not None:
        with Client(options.scheduler) as client:
            train(client, kill_one=False)
        return
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,  # A killed worker is expected.
        ) as cluster,
        Client(cluster) as client,
    ):
        train(client, kill_one=True)


if __name__ == "__main__":
    main()
