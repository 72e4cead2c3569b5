"""A StagedDataset: asynchronous requests, CPU work and collating have separate workers."""

from __future__ import annotations

import asyncio
import time
import zlib

import torch

from spdl_torch import DataLoader, StagedDataset


class Measurements(StagedDataset[torch.Tensor]):
    """Compressed records in a remote store, 20 ms away."""

    def __init__(self, size: int) -> None:
        records = [torch.full((64,), float(n)).numpy().tobytes() for n in range(size)]
        self.store = [zlib.compress(record) for record in records]

    def __len__(self) -> int:
        return len(self.store)

    async def load(self, index: int) -> bytes:
        await asyncio.sleep(0.02)  # A request would be awaited here.
        return self.store[index]

    def preprocess(self, raw: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(zlib.decompress(raw)), dtype=torch.float32)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)


def main() -> None:
    loader = DataLoader(Measurements(512), batch_size=32, num_workers=2, num_io_workers=64)
    started = time.perf_counter()
    total = sum(batch.sum().item() for batch in loader)
    seconds = time.perf_counter() - started
    print(f"{len(loader)} batches, sum {total:.0f}")
    print(f"{seconds:.2f} s; one request after the other would take {512 * 0.02:.2f} s")


if __name__ == "__main__":
    main()
