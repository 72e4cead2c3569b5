"""Resume a training from a checkpoint, with any other number of processes.

    python examples/resume_training.py
    torchrun --nproc-per-node=2 examples/resume_training.py --checkpoint FILE

Started again with the same file, it resumes from the last checkpoint: it trains once on each sample
that is left of the epoch, with the number of processes and the batch size that it has now.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from spdl_torch import DataLoader, DistributedRandomSampler


def make_dataset(size: int = 8001) -> TensorDataset:
    """Points and their distances from the origin, each with its index for the log."""
    points = torch.rand(size, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.arange(size), points, points.norm(dim=1, keepdim=True))


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dataset = make_dataset()
    # backward() waits for all ranks, so all need equally many batches: "drop" leaves out the few
    # samples that cannot be divided evenly, different ones in every epoch. "keep" would need
    # DistributedDataParallel.join(), but a rank without a batch misses a step of the optimizer, and
    # its momentum differs from then on.
    sampler = DistributedRandomSampler(dataset, tail="drop")
    loader = DataLoader(dataset, options.batch_size, sampler=sampler, num_workers=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first_epoch, step = 0, 0

    if options.checkpoint is not None and options.checkpoint.exists():
        checkpoint = torch.load(options.checkpoint, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        first_epoch, step = checkpoint["epoch"], checkpoint["step"]
        if rank == 0:
            print(f"resuming after step {step}")
    # After the checkpoint is read: this waits for all ranks, so that no rank replaces the file
    # while another still reads it.
    parallel_model = DistributedDataParallel(model)

    def save(epoch: int) -> None:
        # The state of one rank's loader is enough, because all ranks have done as many steps.
        if rank != 0 or options.checkpoint is None:
            return
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
            "epoch": epoch,
            "step": step,
        }
        # If the process is killed here, the previous checkpoint still exists.
        unfinished = options.checkpoint.with_name(options.checkpoint.name + ".unfinished")
        torch.save(checkpoint, unfinished)
        unfinished.replace(options.checkpoint)

    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        for indices, points, distances in loader:
            loss = nn.functional.mse_loss(parallel_model(points.to(device)), distances.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if options.index_log is not None:
                line = {"epoch": epoch, "step": step, "world_size": num_ranks, "loss": loss.item()}
                with (options.index_log / f"rank-{rank}.jsonl").open("a") as log:
                    log.write(json.dumps(line | {"indices": indices.tolist()}) + "\n")
            if step % options.steps_between_checkpoints == 0:
                save(epoch)
        save(epoch + 1)  # At the end of an epoch, the loader's state is that of the next one.
        if rank == 0:
            print(f"epoch {epoch} ended after step {step}, world size {num_ranks}")

    parameters = nn.utils.parameters_to_vector(model.parameters()).detach().cpu().numpy()
    print(f"rank {rank} ended with parameters of checksum {crc32(parameters.tobytes()):08x}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="file to resume from and save to")
    parser.add_argument("--steps-between-checkpoints", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="of each process")
    # Not --log: torchrun would take that for its own option.
    parser.add_argument("--index-log", type=Path, help="directory to log the trained indices in")
    options = parser.parse_args()
    if options.index_log is not None:
        options.index_log.mkdir(parents=True, exist_ok=True)

    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:  # A single process, on any free port.
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)
    try:
        train(options, device)
        dist.barrier()  # Rank 0 may still be saving: torchrun ends all ranks when one fails.
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
