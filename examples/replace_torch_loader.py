"""A training loop in which only the import of DataLoader was changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

from spdl_torch import DataLoader  # was: from torch.utils.data import DataLoader


class Stripes(Dataset[tuple[torch.Tensor, int]]):
    """Noisy 16x16 pictures of stripes: label 0 for horizontal ones, 1 for vertical ones."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 2
        generator = torch.Generator().manual_seed(index)
        picture = torch.zeros(16, 16)
        picture[index % 4 :: 4] = 1
        if label == 1:
            picture = picture.T
        return (picture + 0.5 * torch.randn(16, 16, generator=generator))[None], label


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Stripes(2000), batch_size=50, shuffle=True, num_workers=2)

    for epoch in range(3):
        num_correct = 0
        for pictures, labels in loader:
            scores = model(pictures)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_correct += int((scores.argmax(1) == labels).sum())
        print(f"epoch {epoch}: {num_correct / 2000:.1%} correct")


if __name__ == "__main__":
    main()
