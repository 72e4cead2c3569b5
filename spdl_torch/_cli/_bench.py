"""`spdl-torch bench`: our loader and torch's, on the user's images."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from .. import DataLoader
from ._job import ImageJob
from ._parser import CommandError
from ._screen import Bar, Screen

__all__ = ["run"]

OURS, PIL, TORCHVISION_IO = "spdl_torch", "torch + PIL", "torch + torchvision.io"

_MAX_TRIED = 512
"""As many images, from all over the folder, are loaded again and again."""

_SECONDS = 3.0
"""How long a measurement should take, about."""


def run(options: argparse.Namespace) -> int:
    """Measure, and show a table and the code of ours."""
    # torchvision's decoder is deprecated, PIL warns of odd files, and torch of many workers.
    warnings.simplefilter("ignore")
    screen = Screen(as_json=options.json)
    job = ImageJob(options.folder, options.size, is_augmented=options.augment)
    datasets = {PIL: job.by_pil(), TORCHVISION_IO: job.by_torchvision_io(), OURS: job.ours()}
    trial = _tried(job, datasets, options.workers, screen)
    plan = _Plan.of(options.batch_size, options.workers, trial)
    figures = _measured(datasets, plan, options.rounds, screen)
    results = [_Result.of(name, figures, trial) for name in datasets]
    code = job.code(options.batch_size, options.workers)
    screen.show(_table(results))
    _explain(job, plan, trial, options.rounds, screen)
    screen.say("\nThe last row, to paste:\n")
    screen.say(code, style="cyan")
    screen.document(
        {
            "folder": job.folder,
            "num_images": job.num_images,
            "num_used": len(trial.indices),
            "num_left_out": trial.num_left_out,
            "batch_size": options.batch_size,
            "workers": options.workers,
            "size": options.size,
            "augment": options.augment,
            "loaders": [vars(result) for result in results],
            "code": code,
        }
    )
    return 0


# -- the same job? ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """What came of loading images once, by everybody."""

    indices: list[int]
    """Of the images that everybody can load."""
    num_left_out: int
    differences: dict[str, float]
    """From PIL's pixels, on average, in levels from 0 to 255."""
    seconds: float
    """That PIL takes for an image."""


class _Trials(Dataset[Any]):
    """An image loaded by everybody, with the same random numbers: differences and PIL's seconds."""

    def __init__(self, datasets: dict[str, Dataset[Any]]) -> None:
        self._datasets = datasets

    def __getitem__(self, index: int) -> tuple[int, dict[str, float], float] | None:
        try:
            started_seconds = time.perf_counter()
            reference = self._pixels(PIL, index)
            seconds = time.perf_counter() - started_seconds
            differences = {
                name: _difference(self._pixels(name, index), reference) for name in self._datasets
            }
        except Exception:  # Everybody has their own; `check` tells what is wrong with a file.
            return None
        return index, differences, seconds

    def _pixels(self, name: str, index: int) -> torch.Tensor:
        torch.manual_seed(index)  # In a worker thread it seeds the sample's own generator.
        sample = self._datasets[name][index]
        pixels: torch.Tensor = sample[0] if isinstance(sample, tuple) else sample
        return pixels


def _difference(pixels: torch.Tensor, reference: torch.Tensor) -> float:
    if pixels.shape != reference.shape or pixels.dtype != reference.dtype:
        raise ValueError(f"{pixels.shape} {pixels.dtype}, {reference.shape} {reference.dtype}")
    return (pixels.int() - reference.int()).abs().double().mean().item()


def _tried(
    job: ImageJob, datasets: dict[str, Dataset[Any]], num_workers: int, screen: Screen
) -> _Trial:
    """Load some images by everybody; then they are in the file cache, too."""
    num_tried = min(job.num_images, _MAX_TRIED)
    # A folder is sorted by class, so they are taken from all over it.
    chosen = [number * job.num_images // num_tried for number in range(num_tried)]
    loaded = []
    loader: DataLoader[Any] = DataLoader(
        _Trials(datasets), sampler=chosen, batch_size=None, num_workers=num_workers
    )
    with loader, screen.bar("comparing pixels", num_tried, "images") as bar:
        for outcome in loader:
            bar.advance()
            if outcome is not None:
                loaded.append(outcome)
    if not loaded:
        raise CommandError(
            f"none of {num_tried:,} images in {job.folder} could be loaded by all loaders. See "
            f"what is wrong with them: spdl-torch check {job.folder}",
            exit_code=1,
        )
    return _Trial(
        indices=[index for index, _, _ in loaded],
        num_left_out=num_tried - len(loaded),
        differences={
            name: statistics.mean(differences[name] for _, differences, _ in loaded)
            for name in datasets
        },
        seconds=statistics.median(seconds for _, _, seconds in loaded),
    )


# -- how fast? -------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Which batches are loaded, and which of them count.

    The clock runs between two deliveries in the middle of an epoch, so that the start of workers
    and their idle end are nobody's advantage. Each worker makes as many of the counted batches.
    """

    batch_size: int
    num_workers: int
    num_before: int
    num_counted: int
    indices: list[int]

    @staticmethod
    def of(batch_size: int, num_workers: int, trial: _Trial) -> _Plan:
        wanted = _SECONDS / trial.seconds / batch_size  # Per worker.
        num_counted = num_workers * max(2, min(20, round(wanted)))
        num_batches = 2 * num_workers + num_counted + num_workers
        repeated = itertools.islice(itertools.cycle(trial.indices), num_batches * batch_size)
        return _Plan(batch_size, num_workers, 2 * num_workers, num_counted, list(repeated))


def _images_per_second(
    loader_class: Callable[..., Iterable[Any]], dataset: Dataset[Any], plan: _Plan
) -> float:
    loader = loader_class(
        dataset, batch_size=plan.batch_size, sampler=plan.indices, num_workers=plan.num_workers
    )
    delivered_seconds = [time.perf_counter() for _ in loader]
    first = plan.num_before - 1
    seconds = delivered_seconds[first + plan.num_counted] - delivered_seconds[first]
    return plan.num_counted * plan.batch_size / seconds


def _measured(
    datasets: dict[str, Dataset[Any]], plan: _Plan, num_rounds: int, screen: Screen
) -> dict[str, list[float]]:
    """Images a second of everybody, one figure for each round."""
    figures: dict[str, list[float]] = {name: [] for name in datasets}
    measures = {
        name: partial(
            _images_per_second, DataLoader if name == OURS else TorchDataLoader, dataset, plan
        )
        for name, dataset in datasets.items()
    }
    with screen.bar("measuring", num_rounds * len(datasets), "runs") as bar:
        for round_number in range(num_rounds):
            for name in _rotated(list(datasets), round_number):
                _measure(name, measures[name], figures, bar)
    return figures


def _measure(
    name: str, measure: Callable[[], float], figures: dict[str, list[float]], bar: Bar
) -> None:
    bar.describe(f"measuring {name}")
    figures[name].append(measure())
    bar.advance()


def _rotated(names: list[str], shift: int) -> list[str]:
    # Who comes first finds another machine than who comes last.
    shift %= len(names)
    return names[shift:] + names[:shift]


# -- report ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    name: str
    images_per_second: float
    rounds: list[float]
    ours_divided_by_it: float
    difference_from_pil: float

    @staticmethod
    def of(name: str, figures: dict[str, list[float]], trial: _Trial) -> _Result:
        rounds = figures[name]
        ratios = [ours / its for ours, its in zip(figures[OURS], rounds, strict=True)]
        return _Result(
            name,
            statistics.median(rounds),
            rounds,
            statistics.median(ratios),
            trial.differences[name],
        )


def _table(results: Sequence[_Result]) -> Table:
    table = Table()
    table.add_column("loader", no_wrap=True)
    for head in ("images/s", "lowest–highest", "ours / it", "off PIL by"):
        table.add_column(head, justify="right", no_wrap=True)
    for result in results:
        is_ours = result.name == OURS
        table.add_row(
            result.name,
            f"{result.images_per_second:,.0f}",
            f"{min(result.rounds):,.0f}–{max(result.rounds):,.0f}",
            "" if is_ours else f"{result.ours_divided_by_it:.2f}",
            f"{result.difference_from_pil:.2f}",
            style="bold" if is_ours else None,
        )
    return table


def _explain(job: ImageJob, plan: _Plan, trial: _Trial, num_rounds: int, screen: Screen) -> None:
    kind = "random parts, mirrored at random" if job.is_augmented else "the middle square"
    screen.say(
        f"{len(trial.indices):,} of {job.num_images:,} images, {kind}, {job.size}×{job.size} "
        f"pixels, batches of {plan.batch_size}, {plan.num_workers} workers each. Medians of "
        f"{num_rounds} interleaved rounds; files from the cache, start of workers not counted. "
        "“off PIL by”: mean difference of pixels, from 0 to 255."
    )
    if trial.num_left_out:
        screen.say(
            f"Left out, as not every loader can decode them: {trial.num_left_out:,}. See which "
            f"are damaged: spdl-torch check {job.folder}"
        )
