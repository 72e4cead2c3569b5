"""Side-by-side measurements of `cache=` and its peers, in one command.

    python benchmarks/cache.py [--data DIR] [--workers N] [--rounds N] [--only NAME ...]
                               [--json FILE] [--check]

Everybody turns a folder of images into batches of 64, each 224 by 224 pixels, with the same number
of workers. Rounds, ratios and peers are those of `images.py`, whose docstring says what is not the
same in FFCV.

Jobs
----
`crops` takes a random part of each image, resizes it and mirrors every other one, to uint8. `ours`
is `ImageLoader` there. `val` is the validation recipe, to float32: `Resize(256)`,
`CenterCrop(224)`, `ToTensor`, `Normalize`; `ours` is the dataset of `torch, PIL` with `fuse=True`.

Rows
----
`ours, no cache` is what our cached rows are without their `cache=`. `full size` keeps whole decoded
images, `side 256` reduces their shorter side before (`max_side=256`), `raw` keeps the bytes of the
files, and `sample` what is left if nothing is random. They are in memory; those with `disk` are in
a new folder in the directory for temporary files, and in the page cache too if there is memory.
`half` has room for half of the images: `max_bytes` is half of what some hundred images take,
extrapolated.

`FFCV, raw` and `FFCV, JPEG` have images whose longer side was reduced to 341 pixels, which is a
shorter side of 256 for a photo of 4:3. So they are the peers of `side 256`. They were written
before the measurement, as FFCV has no first epoch.

Epochs
------
An epoch goes through some thousand files, in another order each time. If the folder has fewer
files, each is used under several names, because a file that is known is not decoded again; all
contenders read these names, which are links. Who has no cache is measured in one epoch. Who has
one begins with an empty cache in each round. Its first epoch is a figure by itself; its figure in
the table is that of the next two epochs of the same loader, taken together. FFCV is measured in
two epochs too.

In each epoch the clock runs between two deliveries in the middle, as in `images.py`: eight batches
at the beginning and one for each worker at the end are left out. So the start of workers is left
out, and what it costs to fill the cache counts.

Same job?
---------
Whoever delivers other labels than those of the files, in their order, stops the benchmark. So does
a row of ours without `max_side` whose second epoch differs from that of `ours, no cache` in a
single bit, and a cache that did not keep what its row says. Differences to PIL are measured in
second epochs, with the random numbers of the same seed. Those of `side 256` are large, because
small parts of an image are magnified more. FFCV is not compared with PIL.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from images import (
    FFCV,
    MEAN,
    STD,
    TORCHCODEC,
    TORCHVISION_IO,
    Batch,
    Beton,
    Difference,
    ImageSection,
    Job,
    Peer,
    counted_seconds,
    decode_by_torchcodec,
    decode_by_torchvision,
    difference_of_loaders,
    folder_of_tensors,
    is_usable,
    open_ffcv_at,
    our_folder,
    parse_arguments,
    pil_folder,
    read_files,
    recipe_folder,
    recipe_folder_of_tensors,
    run_sections,
    write_beton,
)
from loaders import Contender, Ratio, fingerprints
from rich.console import Console
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Sampler
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

import spdl_torch

MAX_SIDE = 256
FFCV_MAX_RESOLUTION = 341
NUM_LATER_EPOCHS = 2

UNCACHED = "ours, no cache"
FULL_SIZE = "ours, full size"
SMALL = "ours, side 256"
RAW = "ours, raw"
SAMPLE = "ours, sample"
HALF_FULL_SIZE = f"{FULL_SIZE}, half"
HALF_SMALL = f"{SMALL}, half"

OpenEpochs = Callable[[int, int], Iterator[Iterable[Batch]]]
"""From numbers of batches and epochs to the epochs of one loader, to be taken one after the other.
"""


# ---------------------------------------------------------------------------------------------
# What is loaded, and how that is measured
# ---------------------------------------------------------------------------------------------


class EpochsJob(Job):
    """Which images are loaded: as many different files as there are in an epoch."""

    def __init__(self, source: Path, folder: Path, num_workers: int) -> None:
        super().__init__(source, num_workers, batch_size=64, num_counted=20)
        self.num_before = max(8, 2 * num_workers)
        make_links(self.samples, folder, self.num_batches * self.batch_size)
        self.folder = folder
        self.samples = ImageFolder(folder).samples
        self.chosen = list(range(len(self.samples)))

    def order(self, num_batches: int, epoch: int) -> list[int]:
        """The images of an epoch: always the same ones, in an order of its own."""
        num_images = num_batches * self.batch_size
        step = len(self.chosen) // num_images
        shuffled = torch.randperm(num_images, generator=torch.Generator().manual_seed(epoch))
        return [step * number for number in shuffled.tolist()]

    def indices(self, num_batches: int) -> list[int]:
        """The images of the second epoch, the first that is served by a cache."""
        return self.order(num_batches, 1)


def make_links(samples: Sequence[tuple[str, int]], folder: Path, num_links: int) -> None:
    """Fill a folder with links to images from all over another one."""
    num_files = min(len(samples), num_links)
    for number in range(num_links):
        path = Path(samples[number % num_files * len(samples) // num_files][0]).absolute()
        link = folder / path.parent.name / f"{number:05}-{path.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)


class EpochSampler(Sampler[int]):
    """The order of an epoch, whose number is set before."""

    def __init__(self, job: EpochsJob, num_batches: int) -> None:
        self.job = job
        self.num_batches = num_batches
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_batches * self.job.batch_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.job.order(self.num_batches, self.epoch))


def open_epochs_of(
    loader_class: Callable[..., Iterable[Batch]],
    dataset: Any,
    job: EpochsJob,
    num_batches: int,
    num_epochs: int,
) -> Iterator[Iterable[Batch]]:
    """Epochs of a loader without a cache."""
    sampler = EpochSampler(job, num_batches)
    loader = loader_class(
        dataset, batch_size=job.batch_size, sampler=sampler, num_workers=job.num_workers
    )
    for epoch in range(num_epochs):
        sampler.epoch = epoch
        yield loader


def open_epochs_of_ffcv(
    beton: Beton, job: EpochsJob, num_batches: int, num_epochs: int
) -> Iterator[Iterable[Batch]]:
    for epoch in range(num_epochs):
        # All images are in the file, in the order of their indices.
        yield open_ffcv_at(beton, job, job.order(num_batches, epoch))


def images_per_second(
    open_epochs: OpenEpochs, job: EpochsJob, num_epochs: int, first_figures: list[float] | None
) -> float:
    """Throughput in the middle of epochs. With `first_figures`, that of the first goes there."""
    epochs = open_epochs(job.num_batches, num_epochs)
    seconds = [counted_seconds(batches, job) for batches in epochs]
    num_images = job.num_counted * job.batch_size
    if first_figures is not None:
        first_figures.append(num_images / seconds.pop(0))
    return num_images * len(seconds) / sum(seconds)


def fingerprint(open_epochs: OpenEpochs, job: EpochsJob, *, with_images: bool) -> list[str]:
    """Check the labels of two epochs. With images, return digests of the second one."""
    digests = []
    for epoch, batches in enumerate(open_epochs(job.num_compared, 2)):
        indices = iter(job.order(job.num_compared, epoch))
        for images, labels in batches:
            found = labels.tolist()
            expected = [job.samples[index][1] for index in itertools.islice(indices, len(found))]
            if found != expected:
                raise RuntimeError(
                    f"expected the labels {expected}, got {found}. Nothing was measured."
                )
            if with_images and epoch == 1:
                digests += fingerprints([images])
        if next(indices, None) is not None:
            raise RuntimeError(f"batches are missing in epoch {epoch}. Nothing was measured.")
    return digests


def second_epoch(open_epochs: OpenEpochs, num_batches: int) -> Iterator[Batch]:
    for epoch, batches in enumerate(open_epochs(num_batches, 2)):
        for batch in batches:
            if epoch == 1:
                yield batch


# ---------------------------------------------------------------------------------------------
# Our cache
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedRow:
    """What a row of ours keeps."""

    name: str
    options: dict[str, Any]
    """For `Cache`."""
    in_directory: bool = False
    is_half: bool = False

    @property
    def is_exact(self) -> bool:
        return "max_side" not in self.options


@dataclass(frozen=True)
class CachedDataset:
    """A dataset that is loaded with a cache, and how."""

    dataset: Any
    job: EpochsJob
    options: dict[str, Any] = field(default_factory=dict)
    """For our `DataLoader`."""

    def open_epochs(
        self, row: CachedRow, seed: int | None, num_batches: int, num_epochs: int
    ) -> Iterator[Iterable[Batch]]:
        """Epochs of a loader whose cache is empty in the first one."""
        max_bytes = None
        if row.is_half:
            max_bytes = int(0.5 * self.bytes_per_image(row) * len(self.dataset))
        with tempfile.TemporaryDirectory(prefix="cache-benchmark-") as directory:
            cache = spdl_torch.Cache(
                max_bytes, directory=directory if row.in_directory else None, **row.options
            )
            epochs = self.epochs_with(cache, seed, num_batches, num_epochs)
            for epoch, loader in enumerate(epochs):
                yield loader
                check_cache(row, loader.stats().cache, is_first_epoch=epoch == 0)

    def epochs_with(
        self, cache: spdl_torch.Cache, seed: int | None, num_batches: int, num_epochs: int
    ) -> Iterator[spdl_torch.DataLoader[Any]]:
        make = partial(spdl_torch.DataLoader, cache=cache, seed=seed, **self.options)
        for loader in open_epochs_of(make, self.dataset, self.job, num_batches, num_epochs):
            assert isinstance(loader, spdl_torch.DataLoader)
            yield loader

    def bytes_per_image(self, row: CachedRow) -> float:
        """What an image takes, by those that are compared with PIL's."""
        cache = spdl_torch.Cache(**row.options)
        [loader] = self.epochs_with(cache, None, self.job.num_compared, 1)
        for _ in loader:
            pass
        stats = loader.stats().cache
        assert stats is not None
        return stats.num_bytes / stats.num_entries


def check_cache(
    row: CachedRow, stats: spdl_torch.CacheStats | None, *, is_first_epoch: bool
) -> None:
    """Raise unless an epoch left in the cache, or found there, what it should have."""
    assert stats is not None
    num_served = stats.num_entries if is_first_epoch else stats.num_hits
    num_samples = stats.num_hits + stats.num_misses
    share = num_served / num_samples
    expected = 0.5 if row.is_half else 1.0
    # Which images have room is decided by chance. The first ones have.
    tolerance = 0.05 + 2 / num_samples**0.5 if row.is_half else 0
    is_right = abs(share - expected) <= tolerance
    if is_first_epoch and stats.num_hits:
        is_right = False
    if not is_right or stats.level != row.options["level"]:
        raise RuntimeError(
            f"the cache of {row.name} was to serve {expected:.0%} of the images. It is not large "
            f"enough, or did something else: {stats}."
        )


# ---------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------


class Rows:
    """The contenders of a job, and how far their images are from PIL's."""

    def __init__(self, job: EpochsJob, reference: Any) -> None:
        self.job = job
        self.contenders: list[Contender] = []
        self.differences: dict[str, Callable[[], Difference]] = {}
        self.first_figures: dict[str, list[float]] = {}
        self._reference = partial(open_epochs_of, seeded_loader, reference, job)

    def add(
        self,
        name: str,
        open_epochs: OpenEpochs,
        *,
        num_epochs: int = 1,
        exact_as: str = "",
        has_first: bool = False,
        needs: str | None = None,
        seeded: OpenEpochs | None = None,
    ) -> None:
        """Add a contender. Those that are `exact_as` the same must deliver the same images.

        `seeded` opens epochs that draw the random numbers of the reference.
        """
        first_figures: list[float] | None = None
        if has_first:
            first_figures = self.first_figures[first_epoch_of(name)] = []
        self.contenders.append(
            Peer(
                name,
                exact_as or name,
                partial(images_per_second, open_epochs, self.job, num_epochs, first_figures),
                partial(
                    fingerprint,
                    seeded if exact_as and seeded else open_epochs,
                    self.job,
                    with_images=bool(exact_as),
                ),
                needs,
            )
        )
        if seeded is not None:
            self.differences[name] = partial(
                difference_of_loaders,
                partial(second_epoch, seeded),
                partial(second_epoch, self._reference),
                self.job,
            )

    def add_torch(self, datasets: dict[str, Any]) -> None:
        needs = {"torch, torchvision.io": TORCHVISION_IO, "torch, torchcodec": TORCHCODEC}
        for name, dataset in datasets.items():
            self.add(
                name,
                partial(open_epochs_of, TorchDataLoader, dataset, self.job),
                needs=needs.get(name),
                # Our loader gives each sample its random numbers.
                seeded=partial(open_epochs_of, seeded_loader, dataset, self.job),
            )

    def add_ours(self, cached: CachedDataset, rows: Sequence[CachedRow]) -> None:
        make = partial(spdl_torch.DataLoader, **cached.options)
        self.add(
            UNCACHED,
            partial(open_epochs_of, make, cached.dataset, self.job),
            exact_as=UNCACHED,
            seeded=partial(open_epochs_of, partial(make, seed=0), cached.dataset, self.job),
        )
        for row in rows:
            self.add(
                row.name,
                partial(cached.open_epochs, row, None),
                num_epochs=1 + NUM_LATER_EPOCHS,
                has_first=True,
                exact_as=UNCACHED if row.is_exact else "",
                seeded=partial(cached.open_epochs, row, 0),
            )

    def add_ffcv(self, temporary: Path, *, augmented: bool, is_recipe: bool) -> None:
        for name, write_mode in (("FFCV, raw", "raw"), ("FFCV, JPEG", "jpg")):
            beton = Beton(temporary / f"{is_recipe}-{write_mode}.beton", augmented, is_recipe)
            if is_usable(FFCV):
                write_beton(
                    self.job, beton.path, write_mode=write_mode, max_resolution=FFCV_MAX_RESOLUTION
                )
            self.add(
                name,
                partial(open_epochs_of_ffcv, beton, self.job),
                num_epochs=NUM_LATER_EPOCHS,
                needs=FFCV,
            )

    def first_epoch_ratios(self) -> list[Ratio]:
        return [Ratio(name, UNCACHED, at_least=0.95) for name in self.first_figures]


seeded_loader = partial(spdl_torch.DataLoader, seed=0)


def first_epoch_of(name: str) -> str:
    return f"{name}, first epoch"


def crops_section(source: Path, temporary: Path, num_workers: int) -> ImageSection:
    job = EpochsJob(source, temporary / "crops", num_workers)
    read_files(job)
    pil = pil_folder(job.folder, augmented=True)
    make_folder = partial(folder_of_tensors, job.folder, augmented=True)
    rows = Rows(job, pil)
    rows.add_torch(
        {
            "torch, PIL": pil,
            "torch, torchvision.io": make_folder(decode_by_torchvision),
            "torch, torchcodec": make_folder(decode_by_torchcodec),
        }
    )
    full_size: dict[str, Any] = {"level": "decoded"}
    small = full_size | {"max_side": MAX_SIDE}
    rows.add_ours(
        CachedDataset(our_folder(job.folder, augmented=True), job),
        [
            CachedRow(FULL_SIZE, full_size),
            CachedRow(SMALL, small),
            CachedRow(RAW, {"level": "raw"}),
            CachedRow(f"{FULL_SIZE}, disk", full_size, in_directory=True),
            CachedRow(f"{SMALL}, disk", small, in_directory=True),
            CachedRow(HALF_FULL_SIZE, full_size, is_half=True),
            CachedRow(HALF_SMALL, small, is_half=True),
        ],
    )
    rows.add_ffcv(temporary, augmented=True, is_recipe=False)
    return ImageSection(
        "crops",
        "img/s",
        rows.contenders,
        [
            Ratio(SMALL, "torch, PIL"),
            Ratio(SMALL, "torch, torchvision.io", at_least=4),
            Ratio(SMALL, "torch, torchcodec"),
            Ratio(SMALL, UNCACHED),
            Ratio(SMALL, FULL_SIZE),
            Ratio(SMALL, f"{SMALL}, disk"),
            Ratio(SMALL, "FFCV, raw", at_least=1),
            Ratio(SMALL, "FFCV, JPEG"),
            Ratio(FULL_SIZE, "torch, torchvision.io", at_least=2.5),
            Ratio(FULL_SIZE, UNCACHED),
            Ratio(f"{FULL_SIZE}, disk", FULL_SIZE),
            Ratio(RAW, UNCACHED),
            Ratio(HALF_SMALL, UNCACHED, at_least=1.5),
            Ratio(HALF_FULL_SIZE, UNCACHED),
            *rows.first_epoch_ratios(),
        ],
        differences=rows.differences,
        subject=SMALL,
        changed=(SMALL, f"{SMALL}, disk", HALF_SMALL),
        further_figures=rows.first_figures,
    )


def val_section(source: Path, temporary: Path, num_workers: int) -> ImageSection:
    job = EpochsJob(source, temporary / "val", num_workers)
    read_files(job)
    last = v1.ToTensor(), v1.Normalize(MEAN, STD)
    pil = recipe_folder(job.folder, *last, augmented=False)
    make_folder = partial(recipe_folder_of_tensors, job.folder, augmented=False)
    rows = Rows(job, pil)
    rows.add_torch(
        {
            "torch, PIL": pil,
            "torch, torchvision.io": make_folder(decode_by_torchvision),
            "torch, torchcodec": make_folder(decode_by_torchcodec),
        }
    )
    sample = {"level": "sample"}
    rows.add_ours(
        CachedDataset(pil, job, {"fuse": True}),
        [
            CachedRow(SAMPLE, sample),
            CachedRow(f"{SAMPLE}, disk", sample, in_directory=True),
        ],
    )
    rows.add_ffcv(temporary, augmented=False, is_recipe=True)
    return ImageSection(
        "val",
        "img/s",
        rows.contenders,
        [
            Ratio(SAMPLE, "torch, PIL", at_least=10),
            Ratio(SAMPLE, "torch, torchvision.io"),
            Ratio(SAMPLE, "torch, torchcodec"),
            Ratio(SAMPLE, UNCACHED),
            Ratio(SAMPLE, f"{SAMPLE}, disk"),
            Ratio(SAMPLE, "FFCV, raw"),
            Ratio(SAMPLE, "FFCV, JPEG"),
            *rows.first_epoch_ratios(),
        ],
        differences=rows.differences,
        subject=SAMPLE,
        further_figures=rows.first_figures,
    )


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------

SECTION_NAMES = ["crops", "val"]


def make_sections(
    names: Sequence[str], folder: Path, temporary: Path, num_workers: int, console: Console
) -> Iterator[ImageSection]:
    for name in names:
        with console.status(f"{name}: preparing"):
            make = crops_section if name == "crops" else val_section
            section = make(folder, temporary, num_workers)
        yield section


def main(arguments: Sequence[str]) -> int:
    description = "Measure loading with a cache, and its peers."
    options = parse_arguments(arguments, description, SECTION_NAMES)
    return run_sections(options, make_sections, with_targets=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
