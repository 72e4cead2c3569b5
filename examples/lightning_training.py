"""Train with Lightning: only the import changes. Stops in mid-epoch and resumes from a checkpoint.

pip install lightning
python examples/lightning_training.py
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

from spdl_torch import DataLoader


class Distance(lightning.LightningModule):  # type: ignore[misc]
    """Learns how far points are from the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
        self.trained: list[int] = []
        self.loss = torch.tensor(0.0)

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], _: int
    ) -> torch.Tensor:
        indices, points, distances = batch
        self.trained += indices.tolist()
        self.loss = nn.functional.mse_loss(self.layers(points), distances)
        return self.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    points = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(torch.arange(2000), points, points.norm(dim=1, keepdim=True))
    # On several devices Lightning replaces shuffle=True by its own sampler. It does not replace a
    # DistributedRandomSampler.
    return DataLoader(dataset, batch_size=50, shuffle=True, num_workers=2)


def make_trainer(folder: Path, num_steps: int) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=num_steps,
        callbacks=[ModelCheckpoint(folder, filename="last", every_n_train_steps=num_steps)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    # Lightning prints much about the machine.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = Distance()
        make_trainer(folder, num_steps=25).fit(first, make_loader())
        print(f"stopped after {len(first.trained)} samples")

        second = Distance()
        # An epoch has 40 steps: the remaining 15 of the first, and 40 more.
        trainer = make_trainer(folder, num_steps=80)
        trainer.fit(second, make_loader(), ckpt_path=folder / "last.ckpt")
        print(f"resumed with {len(second.trained)} samples, loss {second.loss:.3f}")
        assert sorted(first.trained + second.trained[:750]) == list(range(2000))
        print("trained on each sample of the first epoch once")


if __name__ == "__main__":
    main()
