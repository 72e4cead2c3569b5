"""`spdl-torch demo`: train a small model with our loader and with torch's."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader

from .. import DataLoader
from .._machine import num_cores
from ._images import ImageJob
from ._screen import Screen, counted, table_of

_SIZE = 224
_BATCH_SIZE = 32
_NUM_EPOCHS = 2
_NUM_CLASSES = 8


def run(options: argparse.Namespace) -> int:
    """Make images, train with both loaders in turn, and show a table and the verdict on ours."""
    warnings.simplefilter("ignore")  # torch warns of many workers.
    screen = Screen(as_json=options.json)
    with tempfile.TemporaryDirectory(prefix="spdl-torch-demo-") as folder:
        num_bytes = _make_images(Path(folder), options.images, screen)
        screen.say(
            f"{options.images:,} images of {_NUM_CLASSES} classes, "
            f"{num_bytes / options.images / 1000:.0f} kB each; random crops, flipped at random, "
            f"{_SIZE}×{_SIZE} pixels, batches of {_BATCH_SIZE}, "
            f"{counted(options.workers, 'worker')}."
        )
        job = ImageJob(Path(folder), _SIZE, is_augmented=True)
        arguments = {"batch_size": _BATCH_SIZE, "shuffle": True, "num_workers": options.workers}
        torchs = _Training("torch + PIL", TorchDataLoader(job.by_pil(), **arguments))
        with DataLoader(job.ours(), **arguments) as loader:
            ours = _Training("spdl_torch", loader)
            _train_in_turn([torchs, ours], screen)
            stats = loader.stats()
    speed_up = torchs.seconds / ours.seconds
    table = table_of("loader", "epoch", "images/s", "seconds", "loss", "accuracy")
    for training in (torchs, ours):
        for number, epoch in enumerate(training.epochs, 1):
            table.add_row(
                training.name if number == 1 else "",
                str(number),
                f"{epoch['images_per_second']:,.0f}",
                f"{epoch['seconds']:.2f}",
                f"{epoch['loss']:.2f}",
                f"{epoch['accuracy']:.0%}",
                end_section=number == _NUM_EPOCHS,
            )
    screen.show(table)
    screen.say(
        "Loss and accuracy differ slightly, because another decoder and another resize round "
        "pixels differently. `spdl-torch bench DIR` compares with torchvision.io too."
    )
    screen.say(f"spdl_torch trains at {speed_up:.2f} times the speed of torch + PIL here.")
    screen.say(f"Verdict: {stats.verdict}")
    screen.document(
        num_images=options.images,
        num_bytes=num_bytes,
        workers=options.workers,
        batch_size=_BATCH_SIZE,
        loaders=[{"name": one.name, "epochs": one.epochs} for one in (torchs, ours)],
        speed_up=speed_up,
        stats=stats.as_dict(),
    )
    return 0


# -- training --------------------------------------------------------------------------------------


def _train_in_turn(trainings: list[_Training], screen: Screen) -> None:
    num_threads = torch.get_num_threads()
    # The cores are for the workers of the loaders. Threads of a small model would slow them down.
    torch.set_num_threads(1)
    try:
        # What torch does only once should not count for the first training.
        images = torch.zeros(_BATCH_SIZE, 3, _SIZE, _SIZE, dtype=torch.uint8)
        labels = torch.arange(_BATCH_SIZE) % _NUM_CLASSES
        _Training("warm-up", [(images, labels)] * 3).train()
        for number in range(1, _NUM_EPOCHS + 1):
            for training in trainings:
                screen.step(f"epoch {number}, {training.name}")
                training.train()
            trainings = trainings[::-1]  # The first may find the machine in another state.
    finally:
        torch.set_num_threads(num_threads)


class _Training:
    """A model and the loader that feeds it."""

    def __init__(self, name: str, loader: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.name = name
        self.epochs: list[dict[str, float]] = []
        self._loader = loader
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # Both models start with the same weights.
            # Small, so that loading takes most of the time, as with a fast GPU.
            self._model = nn.Sequential(
                nn.Conv2d(3, 16, 4, stride=2),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Linear(128, _NUM_CLASSES),
            )
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-2)

    def train(self) -> None:
        """Train for one epoch."""
        torch.manual_seed(len(self.epochs))  # Both loaders draw the same order.
        started_seconds = time.perf_counter()
        losses, num_right, num_images = [], 0, 0
        for images, labels in self._loader:
            # The model sees every fourth row and column.
            scores = self._model(images[:, :, ::4, ::4].float() / 127.5 - 1)
            loss = nn.functional.cross_entropy(scores, labels)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            losses.append(loss.item())
            num_right += int((scores.argmax(1) == labels).sum())
            num_images += len(labels)
        seconds = time.perf_counter() - started_seconds
        self.epochs.append(
            {
                "seconds": seconds,
                "images_per_second": num_images / seconds,
                "loss": statistics.mean(losses),
                "accuracy": num_right / num_images,
            }
        )

    @property
    def seconds(self) -> float:
        return sum(epoch["seconds"] for epoch in self.epochs)


# -- images that cost as much to decode as ImageNet's ----------------------------------------------


def _make_images(folder: Path, num_images: int, screen: Screen) -> int:
    """Write JPEG files, a subfolder for each class, and return their size in bytes."""
    for label in range(_NUM_CLASSES):
        (folder / f"class-{label}").mkdir()
    num_bytes = 0
    with (
        ThreadPoolExecutor(num_cores()) as threads,
        screen.bar("making images", num_images) as advance,
    ):
        for size in threads.map(partial(_save_image, folder), range(num_images)):
            num_bytes += size
            advance()
    return num_bytes


def _save_image(folder: Path, number: int) -> int:
    """Write clouds and grain in the colours of a class; return the size of the file in bytes."""
    label = number % _NUM_CLASSES
    random = np.random.default_rng(number)
    height, width = random.integers((340, 450), (420, 550))
    # Eight classes, eight corners of the colour cube.
    colour = np.array([170.0 if label >> channel & 1 else 80.0 for channel in range(3)], np.float32)
    pixels = 7 * random.standard_normal((height, width, 1), np.float32) + colour
    for num_cells, contrast in ((5, 20), (50, 20)):
        # Values that change smoothly, so many times from side to side.
        cells = random.normal(128, contrast, (num_cells, num_cells, 3)).clip(0, 255)
        clouds = PIL.Image.fromarray(cells.astype(np.uint8)).resize((width, height))
        pixels += np.asarray(clouds)
    pixels -= 2 * 128
    path = folder / f"class-{label}" / f"{number:05}.jpg"
    image = PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    image.save(path, quality=92, subsampling=0)
    return path.stat().st_size
