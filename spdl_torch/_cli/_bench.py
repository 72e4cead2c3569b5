"""`spdl-torch bench`: compare our loader with torch's on the images of the user."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from .. import DataLoader, StagedDataset
from .._deferred import DeferredImage
from ._images import ImageJob, RecipeJob
from ._parser import CommandError
from ._screen import Screen, counted, table_of

OURS, PIL, TORCHVISION_IO = "spdl_torch", "torch + PIL", "torch + torchvision.io"
FUSED = "spdl_torch, fuse=True"

_MAX_TRIED = 512  # Images, from all over the folder, that are loaded again and again.
_SECONDS = 3.0  # Approximate duration of the counted part of a measurement.
_MAX_LAPS = 20  # Batches that each worker makes for a measurement, at most. It makes at least one.


def run(options: argparse.Namespace) -> int:
    """Measure, and show a table and the code of our loader."""
    # torchvision's decoder is deprecated, PIL warns of odd files, and torch of many workers.
    warnings.simplefilter("ignore")
    screen = Screen(as_json=options.json)
    make_job = RecipeJob if options.recipe else ImageJob
    job = make_job(options.folder, options.size, is_augmented=options.augment)
    batch_size = _possible_batch_size(options, job)
    pil = job.by_pil()
    datasets = {PIL: pil, TORCHVISION_IO: job.by_torchvision_io()}
    loaders: dict[str, Callable[..., Iterable[Any]]] = {
        name: partial(TorchDataLoader, dataset) for name, dataset in datasets.items()
    }
    if options.recipe:
        datasets |= {OURS: pil, FUSED: job.ours()}
        loaders |= {OURS: partial(DataLoader, pil), FUSED: partial(DataLoader, pil, fuse=True)}
    else:
        datasets[OURS] = job.ours()
        loaders[OURS] = partial(DataLoader, datasets[OURS])
    indices, differences, pil_seconds = _compare_pixels(job, datasets, options.workers, screen)
    num_left_out = min(job.num_images, _MAX_TRIED) - len(indices)
    num_laps = max(1, min(_MAX_LAPS, round(_SECONDS / (pil_seconds * batch_size))))
    measure = partial(_images_per_second, indices, batch_size, options.workers, num_laps)
    names = list(loaders)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            screen.step(f"round {number + 1} of {options.rounds}, {name}")
            figures[name].append(measure(loaders[name]))
        names = names[1:] + names[:1]  # The first loader may find the machine in another state.
    ours = list(loaders)[-1]
    results = [_result(name, figures, ours, differences[name]) for name in loaders]
    code = job.code(batch_size, options.workers)
    screen.show(_table(results, ours))
    _explain(options, job, len(indices), batch_size, screen)
    if num_left_out:
        screen.say(
            f"Left out, as not every loader can decode them: {num_left_out:,}. See which are "
            f"damaged: spdl-torch check {job.folder}"
        )
    screen.say("\nThe code of the last row:\n")
    screen.say(code, style="cyan")
    screen.document(
        folder=job.folder,
        num_images=job.num_images,
        num_used=len(indices),
        num_left_out=num_left_out,
        batch_size=batch_size,
        workers=options.workers,
        size=options.size,
        augment=options.augment,
        recipe=options.recipe,
        loaders=results,
        code=code,
    )
    return 0


def _possible_batch_size(options: argparse.Namespace, job: ImageJob) -> int:
    """Return the batch size. A batch of more images than there are would repeat some."""
    batch_size: int = options.batch_size
    if batch_size > job.num_images and "--batch-size" in options.given:
        raise CommandError(
            f"--batch-size {batch_size} is more than there are images in {job.folder}. Give "
            f"--batch-size {job.num_images} or less."
        )
    return min(batch_size, job.num_images)


# -- the same work? --------------------------------------------------------------------------------


def _compared(
    datasets: dict[str, Dataset[Any]], levels: Callable[[Tensor], Tensor], index: int
) -> tuple[int, dict[str, float], float] | None:
    """Load an image with all datasets and the same random numbers.

    Return the index, the differences and PIL's seconds; None if a decoder fails.
    """
    try:
        started_seconds = time.perf_counter()
        reference = levels(_pixels(datasets[PIL], index))
        seconds = time.perf_counter() - started_seconds
        differences = {
            name: (levels(_pixels(dataset, index)) - reference).abs().mean().item()
            for name, dataset in datasets.items()
        }
    except Exception:  # Decoders raise various types; `check` says what is wrong with a file.
        return None
    return index, differences, seconds


def _pixels(dataset: Dataset[Any], index: int) -> Tensor:
    torch.manual_seed(index)  # In a worker thread it seeds the sample's own generator.
    sample = dataset[index]
    image = sample[0] if isinstance(sample, tuple) else sample
    pixels: Tensor = image.result() if isinstance(image, DeferredImage) else image
    return pixels


def _compare_pixels(
    job: ImageJob, datasets: dict[str, Dataset[Any]], num_workers: int, screen: Screen
) -> tuple[list[int], dict[str, float], float]:
    """Load some images with all datasets, which also puts the files into the cache.

    Return the images that all of them can decode, the mean difference of each from PIL's pixels in
    levels from 0 to 255, and the seconds that PIL takes for an image.
    """
    num_tried = min(job.num_images, _MAX_TRIED)
    # A folder is sorted by class, so the images are taken from all over it.
    chosen = [number * job.num_images // num_tried for number in range(num_tried)]
    trials = StagedDataset.from_functions(
        chosen, preprocess=partial(_compared, datasets, job.levels)
    )
    loaded = []
    with (
        DataLoader(trials, batch_size=None, num_workers=num_workers) as loader,
        screen.bar("comparing pixels of images", num_tried) as advance,
    ):
        for outcome in loader:
            advance()
            if outcome is not None:
                loaded.append(outcome)
    if not loaded:
        raise CommandError(
            f"none of {num_tried:,} images in {job.folder} could be loaded by all loaders. See "
            f"what is wrong with them: spdl-torch check {job.folder}",
            exit_code=1,
        )
    indices, differences, seconds = zip(*loaded, strict=True)
    means = {name: statistics.mean(each[name] for each in differences) for name in datasets}
    return list(indices), means, statistics.median(seconds)


# -- how fast? -------------------------------------------------------------------------------------


def _images_per_second(
    indices: list[int],
    batch_size: int,
    num_workers: int,
    num_laps: int,
    make_loader: Callable[..., Iterable[Any]],
) -> float:
    """Return the throughput between two deliveries in the middle of an epoch.

    So neither the start of workers nor their idle end counts. All numbers of batches are multiples
    of the number of workers, because torch delivers batches in bursts of one per worker.
    """
    num_counted = num_laps * num_workers
    # Both loaders begin two batches for each worker at once (prefetch_factor), and ours finish
    # together: counted, they would look several times as fast.
    num_before = 2 * num_workers
    num_loaded = num_before + num_counted
    # Another batch for each worker, so that none is idle when the clock stops.
    num_indices = (num_loaded + num_workers) * batch_size
    sampler = list(itertools.islice(itertools.cycle(indices), num_indices))
    loader = make_loader(batch_size=batch_size, sampler=sampler, num_workers=num_workers)
    # torch's loader ends with its iterator.
    with loader if isinstance(loader, DataLoader) else contextlib.nullcontext():
        delivered_seconds = [time.perf_counter() for _ in itertools.islice(loader, num_loaded)]
    seconds = delivered_seconds[-1] - delivered_seconds[num_before - 1]
    return num_counted * batch_size / seconds


# -- report ----------------------------------------------------------------------------------------


def _result(
    name: str, figures: dict[str, list[float]], ours: str, difference: float
) -> dict[str, Any]:
    rounds = figures[name]
    # Within each round, where both loaders find the same machine.
    ratios = [one / its for one, its in zip(figures[ours], rounds, strict=True)]
    is_compared = name != ours and len(ratios) > 1
    return {
        "name": name,
        "images_per_second": statistics.median(rounds),
        "rounds": rounds,
        "ours_divided_by_it": statistics.median(ratios),
        "ratios": ratios,
        # Whether all rounds agree on the faster loader.
        "is_clear": not min(ratios) <= 1 <= max(ratios) if is_compared else None,
        "difference_from_pil": difference,
    }


def _table(results: list[dict[str, Any]], ours: str) -> Table:
    head = f"{ours.removeprefix(f'{OURS}, ')} is\n× as fast"
    table = table_of("loader", "images/s", head, "pixels differ\nfrom PIL's by")
    for result in results:
        is_ours = result["name"] == ours
        ratio = f"{result['ours_divided_by_it']:.2f}{_range(result['ratios'], '.2f')}"
        if result["is_clear"] is False:
            ratio += "\nno clear difference"
        table.add_row(
            result["name"],
            f"{result['images_per_second']:,.0f}{_range(result['rounds'], ',.0f')}",
            "" if is_ours else ratio,
            f"{result['difference_from_pil']:.2f}",
            style="bold" if is_ours else None,
        )
    return table


def _range(values: list[float], form: str) -> str:
    return "" if len(values) == 1 else f" ({min(values):{form}}–{max(values):{form}})"


def _explain(
    options: argparse.Namespace, job: ImageJob, num_used: int, batch_size: int, screen: Screen
) -> None:
    kind = "random crops, flipped at random" if job.is_augmented else "the center crop"
    kind += ", normalised" if options.recipe else ""
    screen.say(
        f"{num_used:,} of {job.num_images:,} images, {kind}, {job.size}×{job.size} "
        f"pixels, batches of {batch_size}, {counted(options.workers, 'worker')} each. Files "
        "from the cache, start of workers not counted. Pixels: mean difference, from 0 to 255."
    )
    if options.rounds == 1:
        screen.say("One round may be chance; see whether others agree: --rounds 3.")
    else:
        screen.say(
            f"Medians of {options.rounds} interleaved rounds (lowest–highest). “× as fast” is "
            "taken within each round, so its median need not be the ratio of the medians."
        )
