"""A training loop whose batches are copied to the GPU, or to the CPU without one."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from spdl_torch import DataLoader

accelerator = torch.accelerator.current_accelerator(check_available=True)
device = accelerator or torch.device("cpu")

torch.manual_seed(0)
features = torch.randn(2048, 16)
labels = (features.sum(dim=1) > 0).long()
dataset = TensorDataset(features, labels)

model = nn.Linear(16, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2, device=device)

for epoch in range(3):
    total = torch.zeros((), device=device)
    for batch, target in loader:  # Copied during the previous step.
        loss = nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(f"epoch {epoch}: loss {total.item() / len(loader):.1f}")
