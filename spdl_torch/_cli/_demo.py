"""`spdl-torch demo`: a small model trained with our loader and with torch's."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader

from .. import DataLoader
from ._job import ImageJob
from ._photos import NUM_CLASSES, make_photos
from ._screen import Screen, counted

__all__ = ["run"]

_SIZE = 224
_BATCH_SIZE = 32
_NUM_EPOCHS = 2


def run(options: argparse.Namespace) -> int:
    """Make images, train with both loaders in turn, and show a table and the verdict on ours."""
    warnings.simplefilter("ignore")  # torch on many workers; nothing that is of interest here.
    screen = Screen(as_json=options.json)
    with tempfile.TemporaryDirectory(prefix="spdl-torch-demo-") as folder:
        with screen.bar("making images", options.images, "images") as bar:
            num_bytes = make_photos(Path(folder), options.images, bar.advance)
        screen.say(
            f"{options.images:,} images of {NUM_CLASSES} classes, "
            f"{num_bytes / options.images / 1000:.0f} kB each; random parts of them, mirrored at "
            f"random, {_SIZE}×{_SIZE} pixels, batches of {_BATCH_SIZE}, "
            f"{counted(options.workers, 'worker')}."
        )
        job = ImageJob(Path(folder), _SIZE, is_augmented=True)
        torchs = _Run("torch + PIL", _torch_loader(job, options.workers))
        with _our_loader(job, options.workers) as loader:
            ours = _Run("spdl_torch", loader)
            _train_in_turn([torchs, ours], options.images, screen)
            stats = loader.stats()
    ratio = torchs.seconds / ours.seconds
    screen.show(_table([torchs, ours]))
    screen.say(
        "Loss and accuracy differ slightly, for another decoder and another resize round pixels "
        "differently. `spdl-torch bench DIR` compares with torchvision.io too."
    )
    screen.say(f"spdl_torch trains at {ratio:.2f} times the speed of torch + PIL here.")
    screen.say(f"Verdict: {stats.verdict}")
    screen.document(
        {
            "num_images": options.images,
            "num_bytes": num_bytes,
            "workers": options.workers,
            "batch_size": _BATCH_SIZE,
            "loaders": [torchs.as_dict(), ours.as_dict()],
            "speed_up": ratio,
            "stats": stats.as_dict(),
        }
    )
    return 0


# -- loaders ---------------------------------------------------------------------------------------


def _torch_loader(job: ImageJob, num_workers: int) -> TorchDataLoader[Any]:
    return TorchDataLoader(
        job.by_pil(), batch_size=_BATCH_SIZE, shuffle=True, num_workers=num_workers
    )


def _our_loader(job: ImageJob, num_workers: int) -> DataLoader[Any]:
    return DataLoader(job.ours(), batch_size=_BATCH_SIZE, shuffle=True, num_workers=num_workers)


# -- training --------------------------------------------------------------------------------------


def _train_in_turn(runs: list[_Run], num_images: int, screen: Screen) -> None:
    num_threads = torch.get_num_threads()
    # The cores are for the workers, of both loaders. Threads of a small model would only be in
    # their way.
    torch.set_num_threads(1)
    try:
        _warm_up()
        for number in range(1, _NUM_EPOCHS + 1):
            for run_ in runs:
                with screen.bar(f"epoch {number}, {run_.name}", num_images, "images") as bar:
                    run_.train(bar.advance)
            runs = runs[::-1]  # Who comes first finds another machine than who comes last.
    finally:
        torch.set_num_threads(num_threads)


def _warm_up() -> None:
    """Do what torch does once only, which the first to train would have to wait for."""
    batch = torch.zeros(_BATCH_SIZE, 3, _SIZE, _SIZE, dtype=torch.uint8), torch.arange(_BATCH_SIZE)
    run_ = _Run("warm-up", [(batch[0], batch[1] % NUM_CLASSES)] * 3)
    run_.train(lambda _: None)


@dataclass(frozen=True)
class _Epoch:
    seconds: float
    images_per_second: float
    loss: float
    accuracy: float


@dataclass
class _Run:
    """A model, and the loader that feeds it."""

    name: str
    loader: Iterable[tuple[Tensor, Tensor]]
    epochs: list[_Epoch] = field(default_factory=list)

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # Both begin with the same weights.
            self._model = _Model()
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-2)

    def train(self, on_images: Callable[[int], object]) -> None:
        """One epoch; `on_images` is told of every batch how many images there were."""
        torch.manual_seed(len(self.epochs))  # Both draw the same order.
        started_seconds = time.perf_counter()
        losses, num_right, num_images = [], 0, 0
        for images, labels in self.loader:
            scores = self._model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            losses.append(loss.item())
            num_right += int((scores.argmax(1) == labels).sum())
            num_images += len(labels)
            on_images(len(labels))
        seconds = time.perf_counter() - started_seconds
        self.epochs.append(
            _Epoch(
                seconds,
                num_images / seconds,
                statistics.mean(losses),
                num_right / num_images,
            )
        )

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds for epoch in self.epochs)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "epochs": [asdict(epoch) for epoch in self.epochs]}


class _Model(nn.Module):
    """Small, so that loading is what one waits for, as with a fast GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._layers = nn.Sequential(
            nn.Conv2d(3, 16, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores of images in uint8, of which every fourth row and column is looked at."""
        scores: Tensor = self._layers(images[:, :, ::4, ::4].float() / 127.5 - 1)
        return scores


# -- report ----------------------------------------------------------------------------------------


def _table(runs: list[_Run]) -> Table:
    table = Table()
    table.add_column("loader", no_wrap=True)
    for head in ("epoch", "images/s", "seconds", "loss", "accuracy"):
        table.add_column(head, justify="right", no_wrap=True)
    for run_ in runs:
        for number, epoch in enumerate(run_.epochs, 1):
            table.add_row(
                run_.name if number == 1 else "",
                str(number),
                f"{epoch.images_per_second:,.0f}",
                f"{epoch.seconds:.2f}",
                f"{epoch.loss:.2f}",
                f"{epoch.accuracy:.0%}",
                end_section=number == len(run_.epochs),
            )
    return table
