"""`spdl-torch bench`: our loader and torch's, on the user's images."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from .. import DataLoader
from ._job import ImageJob
from ._parser import CommandError
from ._screen import Bar, Screen, counted

__all__ = ["run"]

OURS, PIL, TORCHVISION_IO = "spdl_torch", "torch + PIL", "torch + torchvision.io"

_MAX_TRIED = 512
"""As many images, from all over the folder, are loaded again and again."""

_SECONDS = 3.0
"""How long the counted part of a measurement should take, about, and"""
_MAX_LAPS = 20
"""how many batches each worker makes for it at most. It makes one at least."""


def run(options: argparse.Namespace) -> int:
    """Measure, and show a table and the code of ours."""
    # torchvision's decoder is deprecated, PIL warns of odd files, and torch of many workers.
    warnings.simplefilter("ignore")
    screen = Screen(as_json=options.json)
    job = ImageJob(options.folder, options.size, is_augmented=options.augment)
    batch_size = _possible_batch_size(options, job)
    datasets = {PIL: job.by_pil(), TORCHVISION_IO: job.by_torchvision_io(), OURS: job.ours()}
    trial = _tried(job, datasets, options.workers, screen)
    plan = _Plan.of(batch_size, options.workers, trial)
    figures = _measured(datasets, plan, options.rounds, screen)
    results = [_Result.of(name, figures, trial) for name in datasets]
    code = job.code(batch_size, options.workers)
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
            "batch_size": batch_size,
            "workers": options.workers,
            "size": options.size,
            "augment": options.augment,
            "loaders": [vars(result) for result in results],
            "code": code,
        }
    )
    return 0


def _possible_batch_size(options: argparse.Namespace, job: ImageJob) -> int:
    """At the door: a batch of more images than there are would be of some again and again."""
    batch_size: int = options.batch_size
    if batch_size <= job.num_images:
        return batch_size
    if "--batch-size" not in options.given:
        return job.num_images
    raise CommandError(
        f"--batch-size {batch_size} is more than there are images in {job.folder}. Give "
        f"--batch-size {job.num_images} or less."
    )


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
    and their idle end are nobody's advantage. All goes by laps, in which each worker makes a
    batch: torch's come in bursts of so many, and part of a burst would tell nothing.
    """

    batch_size: int
    num_workers: int
    num_before: int
    num_counted: int
    indices: list[int]

    @staticmethod
    def of(batch_size: int, num_workers: int, trial: _Trial) -> _Plan:
        lap_seconds = trial.seconds * batch_size
        counted_laps = max(1, min(_MAX_LAPS, round(_SECONDS / lap_seconds)))
        # Both begin two batches for each worker at once (prefetch_factor), and ours come together:
        # counted among them, they would look several times as fast.
        num_before = 2 * num_workers
        num_counted = counted_laps * num_workers
        # Nobody is idle when the clock stops: another lap has begun. It is not waited for.
        num_batches = num_before + num_counted + num_workers
        repeated = itertools.islice(itertools.cycle(trial.indices), num_batches * batch_size)
        return _Plan(batch_size, num_workers, num_before, num_counted, list(repeated))

    @property
    def num_loaded(self) -> int:
        """Batches until the clock stops."""
        return self.num_before + self.num_counted


def _images_per_second(
    loader_class: Callable[..., Iterable[Any]], dataset: Dataset[Any], plan: _Plan, bar: Bar
) -> float:
    loader = loader_class(
        dataset, batch_size=plan.batch_size, sampler=plan.indices, num_workers=plan.num_workers
    )
    delivered_seconds = []
    # Torch's has no end but that of its iterator.
    with loader if isinstance(loader, DataLoader) else contextlib.nullcontext():
        for _ in itertools.islice(loader, plan.num_loaded):
            delivered_seconds.append(time.perf_counter())
            bar.advance(plan.batch_size)
    first = plan.num_before - 1
    seconds = delivered_seconds[first + plan.num_counted] - delivered_seconds[first]
    return plan.num_counted * plan.batch_size / seconds


def _measured(
    datasets: dict[str, Dataset[Any]], plan: _Plan, num_rounds: int, screen: Screen
) -> dict[str, list[float]]:
    """Images a second of everybody, one figure for each round."""
    figures: dict[str, list[float]] = {name: [] for name in datasets}
    num_images = num_rounds * len(datasets) * plan.num_loaded * plan.batch_size
    # Drawing takes a few milliseconds, of what is measured too.
    with screen.bar("measuring", num_images, "images", interval_seconds=0.5) as bar:
        for round_number in range(num_rounds):
            for name in _rotated(list(datasets), round_number):
                bar.describe(f"round {round_number + 1} of {num_rounds}, {name}")
                loader_class = DataLoader if name == OURS else TorchDataLoader
                figures[name].append(_images_per_second(loader_class, datasets[name], plan, bar))
    return figures


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
    """The median of the ratios, and not the ratio of the medians."""
    ratios: list[float]
    """Ours / it within each round, where both find the same machine."""
    is_clear: bool | None
    """Whether all rounds agree on who is faster; None for a single round, and for ours."""
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
            ratios,
            None if name == OURS or len(ratios) == 1 else not min(ratios) <= 1 <= max(ratios),
            trial.differences[name],
        )


def _table(results: Sequence[_Result]) -> Table:
    table = Table()
    table.add_column("loader")  # Of all columns, the one that may be broken into lines.
    heads = ("images/s", "spdl_torch is\n× as fast", "pixels differ\nfrom PIL's by")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for result in results:
        is_ours = result.name == OURS
        table.add_row(
            result.name,
            f"{result.images_per_second:,.0f}" + _range(result.rounds, ",.0f"),
            "" if is_ours else _ratio(result),
            f"{result.difference_from_pil:.2f}",
            style="bold" if is_ours else None,
        )
    return table


def _ratio(result: _Result) -> str:
    ratio = f"{result.ours_divided_by_it:.2f}" + _range(result.ratios, ".2f")
    return f"{ratio}\nno clear difference" if result.is_clear is False else ratio


def _range(values: list[float], form: str) -> str:
    return "" if len(values) == 1 else f" ({min(values):{form}}–{max(values):{form}})"


def _explain(job: ImageJob, plan: _Plan, trial: _Trial, num_rounds: int, screen: Screen) -> None:
    kind = "random parts, mirrored at random" if job.is_augmented else "the middle square"
    screen.say(
        f"{len(trial.indices):,} of {job.num_images:,} images, {kind}, {job.size}×{job.size} "
        f"pixels, batches of {plan.batch_size}, {counted(plan.num_workers, 'worker')} each. Files "
        "from the cache, start of workers not counted. Pixels: mean difference, from 0 to 255."
    )
    if num_rounds == 1:
        screen.say("One round, which may be chance; see whether others agree: --rounds 3.")
    else:
        screen.say(
            f"Medians of {num_rounds} interleaved rounds (lowest–highest). “× as fast” is taken "
            "within each round, so its median need not be the ratio of the medians."
        )
    if trial.num_left_out:
        screen.say(
            f"Left out, as not every loader can decode them: {trial.num_left_out:,}. See which "
            f"are damaged: spdl-torch check {job.folder}"
        )
