"""Find the bottleneck of a loader, change one argument, and measure again."""

from __future__ import annotations

import time

import torch

from spdl_torch import DataLoader, StagedDataset


class Remote(StagedDataset[torch.Tensor]):
    """Samples in a store that is 10 ms away."""

    def __len__(self) -> int:
        return 2000

    def load(self, index: int) -> int:
        time.sleep(0.01)  # A request would wait here.
        return index

    def preprocess(self, raw: int) -> torch.Tensor:
        return torch.full((100,), float(raw))


def train(loader: DataLoader[torch.Tensor]) -> None:
    for batch in loader:
        time.sleep(0.02)  # The model would compute here.
        batch.mean()


def main() -> None:
    for num_io_workers in (8, 64):
        loader = DataLoader(
            Remote(), batch_size=32, num_workers=2, num_io_workers=num_io_workers, shuffle=True
        )
        train(loader)
        stats = loader.stats()
        print(f"{stats.elapsed_seconds:.1f} s with num_io_workers={num_io_workers}")
        print(stats.verdict)


if __name__ == "__main__":
    main()
