"""Samples in an HDF5 file and in a NumPy memory map.

    pip install h5py
    python examples/hdf5_and_memmap.py

All workers share a memory map. h5py runs one call of a process at a time, so threads only read
through it, and decompress outside of it.
"""

from __future__ import annotations

import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from spdl_torch import DataLoader, StagedDataset

NUM_SAMPLES = 2000
SHAPE = (96, 96)


class Mapped(Dataset[torch.Tensor]):
    """One map for all workers: pages are read on access, and each is in memory once.

    Threads can share it, so one process with all worker threads is enough.
    """

    thread_safe = True

    def __init__(self, path: Path) -> None:
        self.array = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> torch.Tensor:
        # A copy: the map is read-only, and a batch must not change with the file.
        return torch.from_numpy(self.array[index].copy())


class Hdf5(Dataset[torch.Tensor]):
    """One handle for each worker, opened when it is first used.

    Worker processes must not inherit a handle, and the threads of one process must not share one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.of_thread = threading.local()
        with h5py.File(path) as file:
            self.size = len(file["samples"])

    def __len__(self) -> int:
        return self.size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"of_thread": None}  # Handles are not copied.

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"of_thread": threading.local()})

    def samples(self) -> Any:
        if not hasattr(self.of_thread, "samples"):
            self.of_thread.samples = h5py.File(self.path)["samples"]
        return self.of_thread.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.samples()[index])


class Hdf5Chunks(Hdf5, StagedDataset[torch.Tensor]):
    """The same samples: compressed chunks are read one at a time, and decompressed in parallel."""

    __getitem__ = StagedDataset.__getitem__

    def load(self, index: int) -> bytes:
        # A chunk is one sample here, as it should be for random access.
        return bytes(self.samples().id.read_direct_chunk((index, 0, 0))[1])

    def preprocess(self, raw: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(zlib.decompress(raw)), dtype=torch.float32).view(SHAPE)


def write(folder: Path) -> None:
    # Few different values, so that there is something to compress.
    random = np.random.default_rng(0)
    samples = random.integers(0, 8, (NUM_SAMPLES, *SHAPE)).astype(np.float32)
    np.save(folder / "samples.npy", samples)
    with h5py.File(folder / "samples.h5", "w") as file:
        file.create_dataset("samples", data=samples, chunks=(1, *SHAPE), compression="gzip")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        for dataset in (
            Mapped(folder / "samples.npy"),
            Hdf5(folder / "samples.h5"),
            Hdf5Chunks(folder / "samples.h5"),
        ):
            loader = DataLoader(dataset, batch_size=50, shuffle=True, num_workers=2)
            started = time.perf_counter()
            total = sum(batch.sum().item() for batch in loader)
            speed = len(dataset) / (time.perf_counter() - started)
            print(f"{type(dataset).__name__}: sum {total:.0f}, {speed:.0f} samples/s")


if __name__ == "__main__":
    main()
