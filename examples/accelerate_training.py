"""Train with Accelerate: one call changes. Stops in mid-epoch and resumes from a checkpoint.

pip install accelerate
python examples/accelerate_training.py
torchrun --nproc-per-node=2 examples/accelerate_training.py
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import TensorDataset

from spdl_torch import DataLoader
from spdl_torch.integrations.accelerate import prepare


def main() -> None:
    set_seed(0)
    # Without cpu=True, each process without a GPU believes that it is the only one.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    points = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(torch.arange(2000), points, points.norm(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_size=50, shuffle=True, num_workers=2)
    # was: accelerator.prepare(model, optimizer, loader)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

    def train(max_batches: int | None = None) -> list[int]:
        trained = []
        for number, (indices, inputs, targets) in enumerate(loader, start=1):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            trained += accelerator.gather(indices).tolist()
            if number == max_batches:
                break
        accelerator.print(f"{len(trained)} samples, loss {loss.item():.3f}")
        return trained

    with tempfile.TemporaryDirectory() as name:
        [folder] = broadcast_object_list([name])  # The same in all processes.
        train()
        before = train(max_batches=8)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        # As in a new process.
        accelerator.load_state(folder)
        after = train()
        accelerator.wait_for_everyone()
    assert sorted(before + after) == list(range(2000))
    accelerator.print("trained on each sample of the second epoch once")
    accelerator.end_training()


if __name__ == "__main__":
    main()
