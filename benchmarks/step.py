"""What a loader does to the training step beside it, in one command.

    python benchmarks/step.py [--data DIR] [--workers N ...] [--rounds N] [--steps N] [--json FILE]

The training step is bound by Python: 12,000 tiny operations of torch, as in small models, unfused
optimizers and reinforcement learning. It holds the GIL nearly all the time, so whatever
else runs in its process makes it slower. Beside it a loader works all the time: the usual recipe
(random crop, flip, float, normalise) with PIL, or `ImageLoader`.

In every round all contenders run one after the other. The first steps of each are the warm-up.
Reported are the median time of the step, and of the whole iteration with the waiting; ratios are
taken within a round, to the step alone and to torch's loader, and their median is reported.
`same batch` is the ceiling: a list with one batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loaders import make_images
from torch.utils.data import ConcatDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import spdl_torch

NUM_OPERATIONS = 12_000
BATCH_SIZE = 16
NUM_WARM_UP = 6
SIZE = 224

Open = Callable[[], Iterable[Any]]


def step(value: torch.Tensor) -> None:
    for _ in range(NUM_OPERATIONS):
        value = value + 1


def pil_folder(folder: Path) -> ImageFolder:
    chain = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    return ImageFolder(str(folder), chain)


def our_folder(folder: Path) -> ImageFolder:
    loader = spdl_torch.ImageLoader(size=SIZE, crop="random", horizontal_flip=0.5)
    return ImageFolder(str(folder), loader=loader)


def contenders(dataset: Any, num_workers: int) -> dict[str, Open]:
    """Return how to open the batches of each contender."""
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": num_workers}
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE)))
    found: dict[str, Open] = {
        "step alone": lambda: [batch] * 1_000_000,
        "same batch": lambda: iter([batch] * 1_000_000),
        "torch": lambda: torch.utils.data.DataLoader(dataset, **options),
    }
    for num_processes in range(min(2, num_workers) + 1):
        ours = partial(open_ours, dataset, options | {"num_processes": num_processes})
        found[f"ours, num_processes={num_processes}"] = ours
    return found


def open_ours(dataset: Any, options: dict[str, Any]) -> Iterable[Any]:
    return spdl_torch.DataLoader(dataset, **options)


def measure(open_batches: Open, num_steps: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and the mean of a whole iteration."""
    value = torch.zeros(())
    steps = []
    batches = iter(open_batches())
    for _ in range(NUM_WARM_UP):
        next(batches)
        step(value)
    begun = time.perf_counter()
    for _ in range(num_steps):
        next(batches)
        started = time.perf_counter()
        step(value)
        steps.append(time.perf_counter() - started)
    whole = (time.perf_counter() - begun) / num_steps
    if hasattr(batches, "close"):
        batches.close()
    return 1000 * statistics.median(steps), 1000 * whole


def compare(
    dataset: Any, num_workers: int, num_rounds: int, num_steps: int
) -> dict[str, dict[str, float]]:
    # Within one epoch, so that no figure includes the start of workers.
    num_needed = BATCH_SIZE * (NUM_WARM_UP + num_steps)
    dataset = ConcatDataset([dataset] * (num_needed // len(dataset) + 1))
    opened = contenders(dataset, num_workers)
    rounds = [
        {name: measure(open_batches, num_steps) for name, open_batches in opened.items()}
        for _ in range(num_rounds)
    ]
    found = {}
    for name in opened:
        median = statistics.median
        found[name] = {
            "step_ms": median(one[name][0] for one in rounds),
            "whole_ms": median(one[name][1] for one in rounds),
            "step_to_alone": median(one[name][0] / one["step alone"][0] for one in rounds),
            "torch_to_whole": median(one["torch"][1] / one[name][1] for one in rounds),
        }
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure the training step beside a loader.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder of folders of images")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data
        if folder is None:
            folder = Path(temporary)
            make_images(folder)
        for kind, make in (("PIL recipe", pil_folder), ("ImageLoader", our_folder)):
            for num_workers in options.workers:
                title = f"{kind}, {num_workers} worker{'s' * (num_workers > 1)}"
                found = compare(make(folder), num_workers, options.rounds, options.steps)
                results[title] = found
                print(
                    f"\n{title}\n{'':26}{'step':>9}{'whole':>10}{'step/alone':>12}{'torch/whole':>13}"
                )
                for name, figures in found.items():
                    print(
                        f"{name:26}{figures['step_ms']:6.1f} ms{figures['whole_ms']:7.1f} ms"
                        f"{figures['step_to_alone']:12.2f}{figures['torch_to_whole']:13.2f}"
                    )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
