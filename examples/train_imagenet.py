"""Train a ResNet on ImageNet with any number of processes, and resume from a checkpoint.

    python examples/train_imagenet.py --data imagenet --epochs 90 --checkpoint last.pt
    torchrun --nproc-per-node=8 examples/train_imagenet.py --data imagenet --checkpoint last.pt
    python examples/train_imagenet.py --data imagenet --cache-directory /scratch/cache

The directory has train/ and val/, with a folder for each class. Without one, it creates a small set
of images and trains a small model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.distributed as dist
import torchvision
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import ImageFolder

from spdl_torch import (
    Cache,
    DataLoader,
    DistributedDeterministicSampler,
    DistributedRandomSampler,
    ImageLoader,
    ReplaceBadSamples,
)

# -- data -----------------------------------------------------------------------------------------


def make_images(root: Path, num_train: int = 240, num_val: int = 48) -> None:
    """Create images of stripes, rings and checks, about as large as those of ImageNet."""
    rng = np.random.default_rng(0)
    rows, columns = np.ogrid[0:375, 0:500]
    for part, number in (("train", num_train), ("val", num_val)):
        for index in range(number):
            frequency, (y, x) = rng.uniform(0.06, 0.15), rng.uniform(100, 300, 2)
            match channel := index % 3:
                case 0:
                    name, pattern = "stripes", np.sin(columns * frequency + y) + 0 * rows
                case 1:
                    name, pattern = "rings", np.sin(np.hypot(rows - y, columns - x) * frequency)
                case _:
                    name, pattern = "checks", np.sin(rows * frequency) * np.sin(columns * frequency)
            low, high = rng.integers(0, 160, (2, 3))
            high[channel] = 255
            pixels = low + (high - low) * (pattern[:, :, None] / 2 + 0.5)
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.jpg")


@dataclass
class Data:
    train: DataLoader[Any]
    val: DataLoader[Any]
    num_classes: int


def make_data(options: argparse.Namespace, root: Path, device: torch.device) -> Data:
    for part in ("train", "val"):
        if not (root / part).is_dir():
            sys.exit(
                f"{root} has no {part}/. It needs train/ and val/, with a folder for each class."
            )
    # Worker threads decode, crop and resize; the rest is done on the device.
    train = ImageFolder(
        str(root / "train"),
        loader=ImageLoader(size=options.size, crop="random", horizontal_flip=0.5),
    )
    val = ImageFolder(str(root / "val"), loader=ImageLoader(size=options.size, crop="center"))
    # Both loaders share its size. In a directory, all processes of a machine share the entries.
    cache = None
    if options.cache is not None or options.cache_directory is not None:
        cache = Cache(options.cache, directory=options.cache_directory)
    shared = {
        "batch_size": options.batch_size,
        "cache": cache,
        "num_workers": options.workers,
        "device": device,
        "persistent_workers": True,
    }
    data = Data(
        # All ranks need equally many batches. A damaged file is replaced and recorded.
        train=DataLoader(
            train,
            sampler=DistributedRandomSampler(train, tail="drop"),
            on_error=ReplaceBadSamples(max_fraction=0.001, log=options.bad_samples),
            drop_last=True,
            seed=options.seed,
            **shared,
        ),
        # Every image once, on one of the ranks: validation does not wait for other ranks.
        val=DataLoader(val, sampler=DistributedDeterministicSampler(val, tail="keep"), **shared),
        num_classes=len(train.classes),
    )
    if len(data.train) == 0:
        sys.exit(
            f"{len(train)} images make no batch of {options.batch_size} for each of "
            f"{dist.get_world_size()} processes. Pass a smaller --batch-size."
        )
    return data


def normalised(images: Tensor) -> Tensor:
    """Convert uint8, a quarter of the size to copy, to the normalised floats of the model."""
    mean = torch.tensor([0.485, 0.456, 0.406], device=images.device)
    std = torch.tensor([0.229, 0.224, 0.225], device=images.device)
    return (images / 255 - mean[:, None, None]) / std[:, None, None]


# -- training -------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, options: argparse.Namespace, data: Data, device: torch.device) -> None:
        self.options, self.data, self.device = options, data, device
        self.is_main = dist.get_rank() == 0
        torch.manual_seed(options.seed)
        model = torchvision.models.get_model(options.model, num_classes=data.num_classes)
        self.model = model.to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4
        )
        # By epochs: the number of steps changes with the number of processes.
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.epochs)
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.amp)
        self.epoch = 0
        if options.checkpoint is not None and options.checkpoint.exists():
            self.restore()
        # After the checkpoint is read: this waits for all ranks, so that no rank replaces the file
        # while another still reads it.
        self.parallel_model = DistributedDataParallel(self.model)

    def run(self) -> None:
        if self.epoch == self.options.epochs and self.is_main:
            print(f"all {self.epoch} epochs are done: {self.options.checkpoint}")
        while self.epoch < self.options.epochs:
            self.data.train.set_epoch(self.epoch)
            report = self.train_epoch()
            accuracy = self.validate()
            self.schedule.step()
            self.epoch += 1
            self.save()  # At the end of an epoch, the loader's state is that of the next one.
            if self.is_main:
                print(f"epoch {self.epoch}: {report}, {accuracy:.1%} correct")
        if self.is_main and self.data.train.stats().loop.num_batches > 0:
            print(self.data.train.stats().verdict)
            for bad in self.data.train.bad_samples:
                print(f"replaced: {bad}")

    def train_epoch(self) -> str:
        self.parallel_model.train()
        losses: list[Tensor] = []
        started = time.perf_counter()
        with self.progress(f"epoch {self.epoch + 1}", len(self.data.train)) as advance:
            for images, labels in self.data.train:  # Already on the device.
                losses.append(self.step(images, labels))
                advance()
                if len(losses) % self.options.steps_between_checkpoints == 0:
                    self.save()
        num_images = len(losses) * self.options.batch_size * dist.get_world_size()
        seconds = time.perf_counter() - started
        mean_loss = torch.stack(losses).mean().item() if losses else float("nan")
        return f"loss {mean_loss:.3f}, {num_images} images, {num_images / seconds:.0f} a second"

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=self.options.amp):
            scores = self.parallel_model(
                normalised(images).contiguous(memory_format=torch.channels_last)
            )
            loss = nn.functional.cross_entropy(scores, labels, label_smoothing=0.1)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @torch.inference_mode()
    def validate(self) -> float:
        self.model.eval()
        counts = torch.zeros(2, device=self.device)
        with self.progress("validation", len(self.data.val)) as advance:
            for images, labels in self.data.val:
                with torch.autocast(self.device.type, enabled=self.options.amp):
                    scores = self.model(normalised(images))
                counts[0] += (scores.argmax(1) == labels).sum()
                counts[1] += len(labels)
                advance()
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    # -- checkpoints ------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "loader": self.data.train,
        }

    def save(self) -> None:
        # The state of one rank's loader is enough: all ranks have done as many steps.
        path: Path | None = self.options.checkpoint
        if not self.is_main or path is None:
            return
        states = {name: part.state_dict() for name, part in self.parts().items()}
        unfinished = path.with_name(path.name + ".unfinished")
        torch.save(states | {"epoch": self.epoch}, unfinished)
        unfinished.replace(path)

    def restore(self) -> None:
        states = torch.load(self.options.checkpoint, map_location=self.device)
        for name, part in self.parts().items():
            part.load_state_dict(states[name])
        self.epoch = states["epoch"]
        if self.is_main:
            print(f"resuming from {self.options.checkpoint}")

    # -- progress ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def progress(self, description: str, total: int) -> Iterator[Any]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        is_shown = self.is_main and sys.stdout.isatty()
        with Progress(*columns, transient=True, disable=not is_shown) as bar:
            task = bar.add_task(description, total=total)
            yield lambda: bar.advance(task)


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="directory with train/ and val/")
    parser.add_argument("--model", default=None, help="of torchvision (default: resnet50)")
    parser.add_argument("--epochs", type=int, default=None, help="(default: 90)")
    parser.add_argument("--batch-size", type=int, default=None, help="of each process (256)")
    parser.add_argument("--size", type=int, default=None, help="pixels of each side (224)")
    parser.add_argument("--lr", type=float, default=None, help="(0.1)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--amp", action="store_true", help="compute in mixed precision")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="file to resume from and save to")
    parser.add_argument("--steps-between-checkpoints", type=int, default=500)
    words = "keep files or decoded images, up to a size such as 8GB of memory (of each process)"
    parser.add_argument("--cache", metavar="SIZE", help=words)
    words = "keep them on this local disk instead, for all processes and later runs"
    parser.add_argument("--cache-directory", metavar="DIR", type=Path, help=words)
    parser.add_argument("--bad-samples", type=Path, help="file to list damaged images in")
    options = parser.parse_args()
    is_small = options.data is None
    defaults = {
        "model": "resnet18" if is_small else "resnet50",
        "epochs": 2 if is_small else 90,
        "batch_size": 16 if is_small else 256,
        "size": 48 if is_small else 224,
        "lr": 0.005 if is_small else 0.1,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    options = parsed_options()
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:  # A single process, on any free port.
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)
    try:
        if options.data is not None:
            Trainer(options, make_data(options, options.data, device), device).run()
        else:
            with tempfile.TemporaryDirectory() as directory:
                make_images(Path(directory))  # The same images in each process.
                Trainer(options, make_data(options, Path(directory), device), device).run()
        dist.barrier()  # Rank 0 may still be saving: torchrun ends all ranks when one fails.
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
