"""Measure what it costs to have the batches on the device.

    python benchmarks/transfer.py [--device DEVICE] [--batch-size N] [--size N] [--workers N]
                                  [--steps N] [--rounds N]

On a device
-----------
The time of one step of a small training loop, which is fed in four ways:

* `cached`: one batch, which is on the device already: the lower bound;
* `ours`: `spdl_torch.DataLoader(..., device=...)`;
* `torch, pinned`: torch's loader with `pin_memory=True`, and `.to(device, non_blocking=True)`;
* `torch, synchronous`: torch's loader, and `.to(device)`.

The three loaders have the same images, which are in memory already, and the same number of workers;
their batches are compared before anything is measured. The clock runs in the middle of an epoch,
after a few steps that fill the loader and before it runs out, from one synchronisation with the
device to another. No step reads anything from the device, so the host may run ahead of it.

Without a device
----------------
What the host does for a batch, in one thread. `straight into the buffer` is our collate, which
writes the samples into pinned memory. `stack, then copy` is torch's: a worker stacks them in fresh
memory, and a thread copies that into pinned memory. Here the two come one after the other, so the
ratio is of the work that is done, not of the time until a batch is there. `stack alone` is the
first half of it. One buffer that is not pinned stands for pinned memory, which torch's allocator
reuses in both cases.

Rounds
------
In every round all ways come one after the other, in random order. The median over the rounds is
reported; each ratio is taken within one round.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import spdl_torch
from spdl_torch._collate import default_collate

NUM_CLASSES = 10
NUM_COMPARED_BATCHES = 4
NUM_BATCHES_ON_HOST = 20
"""Collated in one round; a batch alone takes about a millisecond."""

Batch = tuple[Tensor, Tensor]
"""Images, uint8 of N×3×H×W, and labels."""

Measure = Callable[[], float]
"""Runs once, and returns the milliseconds of each step or batch."""


def measure_rounds(ways: dict[str, Measure], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds by way, one for each round."""
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name in random.sample(list(ways), len(ways)):
            figures[name].append(ways[name]())
    return figures


def print_figures(
    title: str, figures: dict[str, list[float]], base: str, unit: str, console: Console
) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column(f"ms per {unit}", justify="right")
    table.add_column(f"/ {base}", justify="right")
    for name, milliseconds in figures.items():
        ratios = [own / other for own, other in zip(milliseconds, figures[base], strict=True)]
        table.add_row(
            name, f"{statistics.median(milliseconds):.3f}", f"{statistics.median(ratios):.2f}"
        )
    console.print(table)


# -- on a device -----------------------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, int]]):
    """Images that take no time to load: a few, again and again."""

    def __init__(self, size: int, num_images: int) -> None:
        self.images = torch.randint(0, 256, (256, 3, size, size), dtype=torch.uint8)
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index % len(self.images)], index % NUM_CLASSES


def make_step(device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """The step of a small model."""
    layers = [nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, NUM_CLASSES)]
    model = nn.Sequential(*layers, *head).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(images: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(model(images.float().div_(255)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def step_ms(
    open_batches: Callable[[], Iterable[Batch]],
    step: Callable[[Tensor, Tensor], None],
    num_before: int,
    num_steps: int,
    device: torch.device,
) -> float:
    """Milliseconds of a step; the first few do not count."""
    batches = iter(open_batches())
    for images, labels in itertools.islice(batches, num_before):
        step(images, labels)
    torch.accelerator.synchronize(device)
    start_seconds = time.perf_counter()
    for images, labels in itertools.islice(batches, num_steps):
        step(images, labels)
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - start_seconds) / num_steps * 1000


def copied(
    batches: Iterable[Batch], device: torch.device, *, non_blocking: bool
) -> Iterator[Batch]:
    for images, labels in batches:
        yield (
            images.to(device, non_blocking=non_blocking),
            labels.to(device, non_blocking=non_blocking),
        )


def compare(open_loaders: dict[str, Callable[[], Iterable[Batch]]]) -> None:
    """Raise if the loaders do not return the same batches."""
    names = list(open_loaders)
    opened = [open_batches() for open_batches in open_loaders.values()]
    for batches in itertools.islice(zip(*opened, strict=True), NUM_COMPARED_BATCHES):
        for name, batch in zip(names, batches, strict=True):
            if not all(map(torch.equal, batch, batches[0])):
                raise RuntimeError(f"{name} and {names[0]} return different batches")


def measure_on_device(options: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    # Twice what a loader may have ready; and as much again, so that it does not run out.
    num_margin = 4 * options.workers + 4
    num_batches = num_margin + options.steps + num_margin
    dataset = Images(options.size, num_batches * options.batch_size)
    arguments: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers}

    def ours() -> Iterable[Batch]:
        return spdl_torch.DataLoader(dataset, **arguments, device=device)

    def pinned() -> Iterable[Batch]:
        loader = TorchDataLoader(dataset, **arguments, pin_memory=True)
        return copied(loader, device, non_blocking=True)

    def synchronous() -> Iterable[Batch]:
        return copied(TorchDataLoader(dataset, **arguments), device, non_blocking=False)

    loaders = {"ours": ours, "torch, pinned": pinned, "torch, synchronous": synchronous}
    compare(loaders)
    batch: Batch = next(iter(synchronous()))
    step = make_step(device)
    ways: dict[str, Measure] = {
        name: partial(step_ms, open_batches, step, num_margin, options.steps, device)
        for name, open_batches in {"cached": lambda: itertools.repeat(batch), **loaders}.items()
    }
    return measure_rounds(ways, options.rounds)


# -- without a device ------------------------------------------------------------------------------


def batch_ms(collate: Callable[[], object]) -> float:
    start_seconds = time.perf_counter()
    for _ in range(NUM_BATCHES_ON_HOST):
        collate()
    return (time.perf_counter() - start_seconds) / NUM_BATCHES_ON_HOST * 1000


def measure_on_host(options: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(1)  # As in a worker.
    images = Images(options.size, options.batch_size)
    # Each in memory of its own, as from a decoder.
    samples = [images[index][0].clone() for index in range(len(images))]
    buffer = torch.zeros((len(samples), *samples[0].shape), dtype=torch.uint8)

    def straight() -> object:
        return default_collate(samples, empty=lambda _shape, *, dtype: buffer)  # noqa: ARG005

    def stack_then_copy() -> object:
        return buffer.copy_(torch.stack(samples))

    for collate in (straight, stack_then_copy):
        buffer.zero_()
        batch = collate()
        if batch is not buffer or not torch.equal(buffer, torch.stack(samples)):
            raise RuntimeError(f"{collate.__name__} does not leave the samples in the buffer")
    ways: dict[str, Measure] = {
        "straight into the buffer": partial(batch_ms, straight),
        "stack, then copy": partial(batch_ms, stack_then_copy),
        "stack alone": partial(batch_ms, partial(torch.stack, samples)),
    }
    measure_rounds(ways, 1)  # To warm up.
    return measure_rounds(ways, options.rounds)


# -- command line ----------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what batches on the device cost.")
    parser.add_argument("--device", type=torch.device, help="default: the current accelerator")
    number = partial(parser.add_argument, type=int, metavar="N")
    number("--batch-size", default=64, help="images in a batch; default: 64")
    number("--size", default=224, help="pixels on each side of an image; default: 224")
    number("--workers", default=4, help="of each loader; default: 4")
    number("--steps", default=100, help="under the clock in one round, on a device; default: 100")
    number("--rounds", default=15, help="of all ways; default: 15")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse_arguments(arguments)
    console = Console()
    shape = f"{options.batch_size}×3×{options.size}×{options.size} uint8"
    device = options.device or torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "cpu":
        console.print("There is no accelerator to copy to, so this is the host's part alone.")
        figures = measure_on_host(options)
        print_figures(shape, figures, "straight into the buffer", "batch", console)
        return
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    # torch's loader pins memory for the current device.
    torch.accelerator.set_device_index(device.index)
    figures = measure_on_device(options, device)
    print_figures(f"{shape} to {device}", figures, "cached", "step", console)


if __name__ == "__main__":
    main(sys.argv[1:])
