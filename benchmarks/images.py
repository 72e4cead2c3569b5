"""Side-by-side measurements of our image loading and its peers, in one command.

    python benchmarks/images.py [--data DIR] [--workers N] [--rounds N] [--only NAME ...]
                                [--json FILE] [--check]

Everybody turns a folder of images into batches of 224 by 224 pixels, with the same number of
workers. Rounds and ratios are those of `loaders.py`: in every round all contenders run one after
the other, each ratio is taken within one round, and the median over the rounds is reported.

Jobs
----
`resize` resizes whole images to uint8. `augment` takes a random part of each, resizes it and
mirrors every other one. Ours is `ImageLoader` there.

`train` and `val` are the transforms of training scripts, to float32: `RandomResizedCrop(224)`,
`RandomHorizontalFlip`, `ToTensor`, `Normalize`; and `Resize(256)`, `CenterCrop(224)`, `ToTensor`,
`Normalize`. `torch, PIL` and ours have the same dataset, an `ImageFolder` with this chain of v1:
`ours, unmodified` without `fuse`, `ours, fused` with `fuse=True`, `ours, exact` with
`fuse="exact"`. `ours, fused, uint8` has a chain that ends with `PILToTensor`: it is what is left
for the CPU if `device=` does `ToTensor` and `Normalize` on the device. `torch, torchvision.io` and
`torch, torchcodec` decode to tensors, and have the chain of v2 for them.

`large` resizes JPEGs of 12 megapixels, which are made on the spot in two ways:
`enlarged` is one picture, blown up, with as little detail as a soft photo has; `mosaic` is many
pictures side by side at their natural size, with as much detail as JPEGs ever have. Most photos
are between the two.

How throughput is counted
-------------------------
As in `loaders.py`, whose docstring has the reasons: the clock runs between two deliveries in the
middle of an epoch, with a margin at both ends. Here the first margin is the warm-up too: it is a
pass over the files, or eight batches if there are many. Everybody counts the same batches, and thus
the same images. All files were read before, so none comes from the disk.

Limits
------
What FFmpeg can do without a loader: the encoded images that the others count are in memory already,
threads take one after the other, and nobody keeps a result. `FFmpeg, its options` and `FFmpeg, our
options` decode, with the options that FFmpeg has if nothing is said and with those of our loader;
`FFmpeg, with scaling` also makes planes of 224 by 224 pixels. Files other than JPEGs are left out.

Same job?
---------
Decoders and resizers round in their own ways, so batches cannot be compared bit by bit. Labels are:
whoever delivers another order stops the benchmark. For pixels the mean absolute difference to PIL's
antialiased bilinear images is reported, in levels from 0 to 255, over some hundred images and for
the worst of them. A large one over all, as from resizing without antialiasing, stops the benchmark;
a single image of ours that is far off fails `--check`. For `augment` and `train` all who draw the
same random numbers are seeded alike, image by image, outside of the measurement. DALI has its own,
and its crop of `val` is up to a pixel beside that of the others: it is not compared there either.
FFCV is not compared for the same two reasons.
torchcodec turns images as EXIF says, which is why its worst image may be far off.
For `train` and `val` the normalisation is undone before; their reference is the dataset of
`torch, PIL`, and `ours, unmodified` and `ours, exact` must not differ from it in a single bit.

Peers
-----
`spdl`, `nvidia.dali`, `torchcodec` and `ffcv` take part if they can be used. SPDL loads a batch per
task, as its documentation does for images; its pipeline keeps the input order, as everybody's does.
SPDL, DALI and FFCV give images with the channels last, which is spared them here: their batches are
views in the layout of the others.

FFCV takes part in `train` and `val`. It reads a file of its own, which is written before the
measurement and is in the page cache. Its two rows decode images of the original size:
`FFCV, same files` has the very bytes of the JPEGs, which FFCV's writer cannot store by itself.
`FFCV, re-encoded` is what that writer makes with `write_mode="jpg"`: it decodes the files and
encodes JPEGs of quality 90 with subsampled chroma. They are cheaper to decode than better files.
What FFCV does is not quite the same work:

- It decodes with libjpeg-turbo's fast, less precise transform, and ignores errors.
- It resizes by area, not by antialiased bilinear interpolation.
- Its random crops are of the same distribution, but drawn by itself, from numba's generator.
- Its crop of `val` is the middle of the original image, resized once. The others resize the whole
  image and cut out its middle, which is more work.
- Its batches are five buffers that it uses again and again. The others' belong to the consumer.
- It is compiled when it is first used. That is left out, as all start-up is.

Once FFCV has run, numba's threads are in this process, and numba says "Unable to join threads" when
another loader forks its workers. They do not use numba.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from av import CodecContext, Packet, VideoCodecContext, VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from loaders import (
    Contender,
    Ratio,
    Section,
    argument_parser,
    checked,
    describe_machine,
    format_figure,
    make_images,
    measure_section,
    our_loader_of_threads,
    run_spdl,
    section_as_json,
)
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

import spdl_torch

SIZE = 224
SCALE = (0.08, 1.0)
ASPECT_RATIO = (3 / 4, 4 / 3)
RESIZED_SIZE = 256
"""The shorter side in `val`, before the center crop."""
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
LARGE_SIZE = (4000, 3000)
NUM_LARGE_IMAGES = 24
NUM_COMPARED_IMAGES = 320
MAX_DIFFERENCE = 5.0
"""Rounding stays below this even in the worst image; resizing without antialiasing does not."""

MAX_CHANGE = 15.0
"""Images that were reduced before they are cropped stay below this; other crops do not."""

OURS = "ours"
"""With its worker threads in a child process, which is the default for this dataset."""
OUR_THREADS = "ours, 0 processes"
"""With its worker threads in this process."""

OURS_UNMODIFIED = "ours, unmodified"
OURS_FUSED = "ours, fused"
OURS_FUSED_BYTES = "ours, fused, uint8"
OURS_EXACT = "ours, exact"

Batch = tuple[Tensor, Tensor]
"""Images, N×C×H×W, and labels."""

OpenBatches = Callable[[int], Iterable[Batch]]
"""From a number of batches to a loader that delivers as many."""


# ---------------------------------------------------------------------------------------------
# What is loaded, and how that is measured
# ---------------------------------------------------------------------------------------------


class Job:
    """Which images are loaded, in which batches, by how many workers.

    `num_counted` batches are under the clock, or a few more: every worker gets as many as the
    others.
    """

    def __init__(self, folder: Path, num_workers: int, batch_size: int, num_counted: int) -> None:
        self.folder = folder
        self.num_workers = num_workers
        self.batch_size = batch_size
        self.num_counted = num_counted + -num_counted % num_workers
        self.samples: list[tuple[str, int]] = ImageFolder(folder).samples
        # More files than are counted would only be read. A folder is sorted by class, so they are
        # taken from all over it.
        num_files = min(len(self.samples), self.num_counted * batch_size)
        step = len(self.samples) / num_files
        self.chosen = [int(number * step) for number in range(num_files)]
        num_in_pass = -(-num_files // batch_size)
        self.num_before = max(min(num_in_pass, 8), 2 * num_workers)
        self.num_after = num_workers
        self.num_compared = min(num_in_pass, NUM_COMPARED_IMAGES // batch_size)

    @property
    def num_batches(self) -> int:
        """In one measurement."""
        return self.num_before + self.num_counted + self.num_after

    def indices(self, num_batches: int) -> list[int]:
        """The chosen images, again and again."""
        return list(itertools.islice(itertools.cycle(self.chosen), num_batches * self.batch_size))

    def counted_paths(self) -> list[str]:
        """The files that are loaded while the clock runs."""
        first = self.num_before * self.batch_size
        indices = self.indices(self.num_before + self.num_counted)[first:]
        return [self.samples[index][0] for index in indices]


def images_per_second(open_batches: OpenBatches, job: Job) -> float:
    """Throughput in the middle of an epoch; the module's docstring says why there."""
    return job.num_counted * job.batch_size / counted_seconds(open_batches(job.num_batches), job)


def counted_seconds(batches: Iterable[Batch], job: Job) -> float:
    """How long the counted batches of an epoch take."""
    delivered_at_seconds = [time.perf_counter() for _ in batches]
    # SPDL drops a batch that fails and goes on; less work must not count as more speed.
    if len(delivered_at_seconds) != job.num_batches:
        raise RuntimeError(f"expected {job.num_batches} batches, got {len(delivered_at_seconds)}")
    start_seconds = delivered_at_seconds[job.num_before - 1]
    stop_seconds = delivered_at_seconds[job.num_before - 1 + job.num_counted]
    return stop_seconds - start_seconds


class Peer(Contender):
    """A contender that may be absent, or be there without the libraries it needs."""

    @property
    def installed(self) -> bool:
        return self.needs is None or is_usable(self.needs)


@cache
def is_usable(module_name: str) -> bool:
    try:
        if module_name == FFCV:
            with same_number_of_threads():
                importlib.import_module(module_name)
        importlib.import_module(module_name)
        if module_name == "spdl.io":
            # It comes without FFmpeg, and looks for one when it is first used.
            importlib.import_module("spdl.io.utils").get_ffmpeg_versions()
        elif module_name == TORCHCODEC:
            torchcodec_decoder()  # Older versions decode videos only.
        elif module_name == TORCHVISION_IO:
            torchvision_decoder()  # It is deprecated.
    except (AttributeError, ImportError, OSError, RuntimeError):
        return False
    return True


def loader(
    name: str, job: Job, open_batches: OpenBatches, *, needs: str | None = None
) -> Contender:
    """A contender that must deliver the labels of the others, in their order."""
    return Peer(
        name,
        str(job.folder),
        measure=partial(images_per_second, open_batches, job),
        fingerprint=lambda: [
            str(labels.flatten().tolist()) for _, labels in open_batches(job.num_compared)
        ],
        needs=needs,
    )


@dataclass(frozen=True)
class ImageSection(Section):
    """A job, who does it, what should come out, and how near to PIL's images it should be."""

    differences: dict[str, Callable[[], Difference]] = field(default_factory=dict)
    """From PIL's images, by contender."""
    note: str = ""
    """Printed below the table."""
    subject: str = OURS
    """Who the table compares with the others."""
    exact: tuple[str, ...] = ()
    """Whose images must be PIL's, bit by bit."""
    changed: tuple[str, ...] = ()
    """Whose images differ from PIL's by more than rounding, as their users have asked for it."""
    further_figures: dict[str, list[float]] = field(default_factory=dict)
    """What contenders measure beside their own figure, by name and one for each round."""


# ---------------------------------------------------------------------------------------------
# Differences to PIL
# ---------------------------------------------------------------------------------------------


def pil_image(path: str) -> Tensor:
    with Image.open(path) as image:
        resized = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    tensor: Tensor = pil_to_tensor(resized)
    return tensor


@dataclass(frozen=True)
class Difference:
    """How far images are from PIL's, by mean absolute difference in levels from 0 to 255."""

    mean: float
    worst: float
    worst_path: str

    @staticmethod
    def of(differences: list[tuple[float, str]]) -> Difference:
        mean = statistics.mean(difference for difference, _ in differences)
        return Difference(mean, *max(differences))


def difference_of_images(image: Tensor, reference: Tensor) -> float:
    if image.shape != reference.shape or image.dtype != reference.dtype:
        raise RuntimeError(
            f"expected {reference.dtype} of {tuple(reference.shape)}, got {image.dtype} of "
            f"{tuple(image.shape)}"
        )
    difference = (image.double() - reference.double()).abs()
    if image.is_floating_point():  # They are normalised.
        difference *= 255 * column(STD)
    return difference.mean().item()


def column(values: list[float]) -> Tensor:
    return torch.tensor(values).view(3, 1, 1)


def difference_of_batches(open_batches: OpenBatches, job: Job) -> Difference:
    """Compares what a loader delivers with what PIL makes of the same files."""
    images = (image for batch, _ in open_batches(job.num_compared) for image in batch)
    paths = [job.samples[index][0] for index in job.indices(job.num_compared)]
    return Difference.of(
        [
            (difference_of_images(image, pil_image(path)), path)
            for image, path in zip(images, paths, strict=True)
        ]
    )


def difference_of_loaders(
    open_batches: OpenBatches, open_reference: OpenBatches, job: Job
) -> Difference:
    """Compares two loaders that deliver the same images."""
    paths = (job.samples[index][0] for index in job.indices(job.num_compared))
    batches = zip(open_batches(job.num_compared), open_reference(job.num_compared), strict=True)
    pairs = (pair for (ours, _), (theirs, _) in batches for pair in zip(ours, theirs, strict=True))
    return Difference.of(
        [(difference_of_images(*pair), path) for pair, path in zip(pairs, paths, strict=True)]
    )


def difference_when_seeded(
    load: Callable[[int], Tensor], reference: Callable[[int], Tensor], job: Job
) -> Difference:
    """Compares two functions from an index to an image that draw the same numbers."""
    differences = []
    for index in job.chosen[:NUM_COMPARED_IMAGES]:
        torch.manual_seed(index)
        image = load(index)
        torch.manual_seed(index)
        difference = difference_of_images(image, reference(index))
        differences.append((difference, job.samples[index][0]))
    return Difference.of(differences)


def measure_differences(section: ImageSection, console: Console) -> dict[str, Difference]:
    """Differences by contender. Raises if one is no matter of rounding."""
    differences = {}
    installed = {contender.name for contender in section.contenders if contender.installed}
    with console.status(f"{section.name}: comparing images with PIL's") as status:
        for name, measure in section.differences.items():
            if name not in installed:
                continue
            status.update(f"{section.name}: comparing images with PIL's, {name}")
            difference = differences[name] = measure()
            limit = MAX_CHANGE if name in section.changed else MAX_DIFFERENCE
            if difference.mean > (0 if name in section.exact else limit):
                raise RuntimeError(
                    f"{name} does not do the same job as PIL: its images are off by "
                    f"{difference.mean:.2g} levels on average. Nothing was measured."
                )
    return differences


# ---------------------------------------------------------------------------------------------
# torch's loader and ours
# ---------------------------------------------------------------------------------------------


def our_folder(folder: Path, *, augmented: bool) -> Any:
    """Torchvision's dataset with our loader, which crops, resizes and mirrors by the way."""
    loader = (
        spdl_torch.ImageLoader(
            SIZE, crop="random", scale=SCALE, ratio=ASPECT_RATIO, horizontal_flip=0.5
        )
        if augmented
        else spdl_torch.ImageLoader((SIZE, SIZE))
    )
    return ImageFolder(folder, loader=loader)


def pil_folder(folder: Path, *, augmented: bool) -> Any:
    """Torchvision's dataset with its default loader, PIL."""
    transform = v2.Compose([*geometry(augmented=augmented), v2.PILToTensor()])
    return ImageFolder(folder, transform=transform)


def folder_of_tensors(folder: Path, load: Callable[[str], Tensor], *, augmented: bool) -> Any:
    """Torchvision's dataset with a decoder to tensors."""
    return ImageFolder(folder, transform=v2.Compose(geometry(augmented=augmented)), loader=load)


def geometry(*, augmented: bool) -> list[Any]:
    if augmented:
        crop = v2.RandomResizedCrop(SIZE, scale=SCALE, ratio=ASPECT_RATIO, antialias=True)
        return [crop, v2.RandomHorizontalFlip(0.5)]
    return [v2.Resize((SIZE, SIZE), antialias=True)]


def open_loader(
    loader_class: Callable[..., Iterable[Batch]], dataset: Any, job: Job, num_batches: int
) -> Iterable[Batch]:
    # The repetition is in the sampler, so that the dataset is the one users have.
    return loader_class(
        dataset,
        batch_size=job.batch_size,
        sampler=job.indices(num_batches),
        num_workers=job.num_workers,
    )


# ---------------------------------------------------------------------------------------------
# Recipes: the transforms of training scripts
# ---------------------------------------------------------------------------------------------


def recipe_geometry(transforms: Any, *, augmented: bool) -> list[Any]:
    """The first transforms, of v1 or v2."""
    if augmented:
        return [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    return [transforms.Resize(RESIZED_SIZE), transforms.CenterCrop(SIZE)]


def recipe_folder(folder: Path, *last: Any, augmented: bool) -> Any:
    """Torchvision's dataset with a chain of v1 for PIL images."""
    return ImageFolder(folder, v1.Compose([*recipe_geometry(v1, augmented=augmented), *last]))


def recipe_folder_of_tensors(
    folder: Path, load: Callable[[str], Tensor], *, augmented: bool
) -> Any:
    """Torchvision's dataset with another decoder and the chain of v2 for tensors."""
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    chain = v2.Compose([*recipe_geometry(v2, augmented=augmented), *last])
    return ImageFolder(folder, chain, loader=load)


# Peers are imported where they are used, as they may be absent.

TORCHVISION_IO = "torchvision.io"
TORCHCODEC = "torchcodec.decoders"


def decode_by_torchvision(path: str) -> Tensor:
    image: Tensor = torchvision_decoder()(path)
    return image


@cache
def torchvision_decoder() -> Callable[..., Any]:
    module = importlib.import_module(TORCHVISION_IO)
    return partial(module.decode_image, mode=module.ImageReadMode.RGB)


def decode_by_torchcodec(path: str) -> Tensor:
    image: Tensor = torchcodec_decoder()(path, mode="RGB")
    return image


@cache
def torchcodec_decoder() -> Callable[..., Any]:
    """Its decoder of images, or of JPEGs in versions that have no other."""
    decoders = importlib.import_module(TORCHCODEC)
    decoder: Callable[..., Any] = getattr(decoders, "decode_image", None) or decoders.decode_jpeg
    return decoder


# ---------------------------------------------------------------------------------------------
# SPDL
# ---------------------------------------------------------------------------------------------


def open_spdl(
    load_images: Callable[[list[str]], Tensor], job: Job, num_batches: int
) -> Iterable[Batch]:
    """SPDL's pipeline with one task per batch."""

    def load_batch(indices: list[int]) -> Batch:
        paths, labels = zip(*(job.samples[index] for index in indices), strict=True)
        return load_images(list(paths)), torch.tensor(labels)

    indices = job.indices(num_batches)
    builder = importlib.import_module("spdl.pipeline").PipelineBuilder()
    builder.add_source(
        indices[first : first + job.batch_size] for first in range(0, len(indices), job.batch_size)
    )
    builder.pipe(load_batch, concurrency=job.num_workers, output_order="input")
    return run_spdl(builder, job.num_workers)


def spdl_resized(paths: list[str]) -> Tensor:
    io = importlib.import_module("spdl.io")
    scale = io.get_video_filter_desc(
        scale_width=SIZE, scale_height=SIZE, scale_algo="bilinear", scale_mode=None
    )
    # Its own width and height would pad an image that is not square.
    buffer = io.load_image_batch(paths, width=None, height=None, filter_desc=scale)
    images: Tensor = io.to_torch(buffer)
    return images.permute(0, 3, 1, 2)


def spdl_augmented(paths: list[str]) -> Tensor:
    return spdl_filtered(paths, random_crop_filters)


def spdl_recipe(paths: list[str], *, augmented: bool) -> Tensor:
    make_filters = random_crop_filters if augmented else center_crop_filters
    images = spdl_filtered(paths, make_filters).to(torch.float32)
    return images.div_(255).sub_(column(MEAN)).div_(column(STD))


def spdl_recipe_image(path: str, *, augmented: bool) -> Tensor:
    return spdl_recipe([path], augmented=augmented)[0]


def spdl_filtered(paths: list[str], make_filters: Callable[[int, int], str]) -> Tensor:
    """Images to which FFmpeg's filters are applied, which depend on height and width."""
    io = importlib.import_module("spdl.io")
    frames = []
    for path in paths:
        packets = io.demux_image(path)
        filters = make_filters(packets.codec.height, packets.codec.width)
        frames.append(io.decode_packets(packets, filter_desc=f"{filters},format=pix_fmts=rgb24"))
    images: Tensor = io.to_torch(io.convert_frames(frames))
    return images.permute(0, 3, 1, 2)


def random_crop_filters(height: int, width: int) -> str:
    # The draws of torchvision, in its order. It looks at nothing but the size of its image.
    image = torch.empty((1, height, width), device="meta")
    top, left, height, width = v2.RandomResizedCrop.get_params(
        image, list(SCALE), list(ASPECT_RATIO)
    )
    mirror = ",hflip" if torch.rand(1) < 0.5 else ""
    # Not exact, it would crop where the subsampled chroma has a pixel.
    crop = f"crop={width}:{height}:{left}:{top}:exact=1"
    return f"{crop},scale={SIZE}:{SIZE}:flags=bilinear{mirror}"


def center_crop_filters(height: int, width: int) -> str:
    # The sizes and offsets of torchvision.
    shorter = min(height, width)
    height, width = (int(RESIZED_SIZE * side / shorter) for side in (height, width))
    top, left = (round((side - SIZE) / 2) for side in (height, width))
    # In RGB, or it would crop where the subsampled chroma has a pixel.
    scale = f"scale={width}:{height}:flags=bilinear,format=pix_fmts=rgb24"
    return f"{scale},crop={SIZE}:{SIZE}:{left}:{top}"


# ---------------------------------------------------------------------------------------------
# DALI
# ---------------------------------------------------------------------------------------------


def open_dali(
    job: Job, num_batches: int, *, augmented: bool, is_recipe: bool = False
) -> Iterator[Batch]:
    """DALI's CPU pipeline. It reads the files again and again by itself."""
    plugin = importlib.import_module("nvidia.dali.plugin.pytorch")
    pipeline = dali_pipeline(job, augmented=augmented, is_recipe=is_recipe)
    batches = plugin.DALIGenericIterator(pipeline, ["x", "y"])
    for [batch] in itertools.islice(batches, num_batches):
        yield batch["x"] if is_recipe else batch["x"].permute(0, 3, 1, 2), batch["y"]


def dali_pipeline(job: Job, *, augmented: bool, is_recipe: bool) -> Any:
    dali = importlib.import_module("nvidia.dali")
    fn = importlib.import_module("nvidia.dali.fn")
    types = importlib.import_module("nvidia.dali.types")
    paths, labels = zip(*(job.samples[index] for index in job.chosen), strict=True)
    pipeline = dali.Pipeline(
        batch_size=job.batch_size, num_threads=job.num_workers, device_id=None, seed=0
    )
    with pipeline:
        encoded, label = fn.readers.file(files=list(paths), labels=list(labels))
        # The others do not turn images as EXIF says.
        if augmented:
            image = fn.decoders.image_random_crop(
                encoded,
                device="cpu",
                adjust_orientation=False,
                random_area=list(SCALE),
                random_aspect_ratio=list(ASPECT_RATIO),
            )
        else:
            image = fn.decoders.image(encoded, device="cpu", adjust_orientation=False)
        size = {"resize_x": SIZE, "resize_y": SIZE}
        if is_recipe and not augmented:
            size = {"resize_shorter": RESIZED_SIZE}
        image = fn.resize(image, **size, interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.random.coin_flip(probability=0.5) if augmented else 0
        if is_recipe:
            image = fn.crop_mirror_normalize(
                image,
                crop=(SIZE, SIZE),
                mirror=mirror,
                mean=[255 * value for value in MEAN],
                std=[255 * value for value in STD],
            )
        elif augmented:
            image = fn.flip(image, horizontal=mirror)
        pipeline.set_outputs(image, label)
    return pipeline


# ---------------------------------------------------------------------------------------------
# FFCV
# ---------------------------------------------------------------------------------------------

FFCV = "ffcv.loader"


@dataclass(frozen=True)
class Beton:
    """A file of FFCV with the chosen images of a job, and what is to be made of them."""

    path: Path
    augmented: bool
    is_recipe: bool
    """Make float32 and normalise."""


@contextlib.contextmanager
def same_number_of_threads() -> Iterator[None]:
    """FFCV sets how many threads torch uses, even when it is imported."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@same_number_of_threads()
def write_beton(
    job: Job,
    path: Path,
    *,
    keeps_files: bool = False,
    write_mode: str = "jpg",
    max_resolution: int | None = None,
) -> None:
    """Write a file of FFCV. With `keeps_files`, it has the bytes of the JPEGs as they are."""
    fields = importlib.import_module("ffcv.fields")
    writer = importlib.import_module("ffcv.writer").DatasetWriter
    image_field = fields.RGBImageField(write_mode=write_mode, max_resolution=max_resolution)
    if keeps_files:
        image_field.encode = partial(encode_file, image_field.encode)
    samples = BetonSamples([job.samples[index] for index in job.chosen], reads=not keeps_files)
    # It shows its progress, which would disturb ours.
    with contextlib.redirect_stderr(io.StringIO()):
        writer(
            str(path),
            {"image": image_field, "label": fields.IntField()},
            num_workers=job.num_workers,
        ).from_indexed_dataset(samples)


class BetonSamples:
    """What FFCV's writer takes: images, or the paths of their files, and labels."""

    def __init__(self, samples: list[tuple[str, int]], *, reads: bool) -> None:
        self.samples = samples
        self.reads = reads

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return (pil_array(path) if self.reads else path), label


def pil_array(path: str) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def encode_file(
    encode: Callable[..., None], destination: Any, path: str, allocate: Callable[[int], Any]
) -> None:
    """Write the bytes of a JPEG in the place of what FFCV would encode."""
    with Image.open(path) as image:
        # FFCV decodes to RGB, and does not notice that libjpeg-turbo cannot do that with CMYK.
        is_kept = image.format == "JPEG" and image.mode in {"RGB", "L"}
        width, height = image.size
    if not is_kept:
        encode(destination, pil_array(path), allocate)
        return
    modes = importlib.import_module("ffcv.fields.rgb_image").IMAGE_MODES
    data = np.fromfile(path, np.uint8)
    destination["mode"], destination["height"], destination["width"] = modes["jpg"], height, width
    destination["data_ptr"], storage = allocate(data.nbytes)
    storage[:] = data


def open_ffcv(beton: Beton, job: Job, num_batches: int) -> Iterator[Batch]:
    """FFCV's loader, which goes through the file in the order of the job."""
    place_of = {index: place for place, index in enumerate(job.chosen)}
    places = [place_of[index] for index in job.indices(num_batches)]
    return open_ffcv_at(beton, job, places)


def open_ffcv_at(beton: Beton, job: Job, places: list[int]) -> Iterator[Batch]:
    with same_number_of_threads():
        loader = ffcv_loader(beton, job.batch_size, job.num_workers)
        # It takes an order when it is made, and would be compiled again for each.
        order = np.array(places, dtype="uint64")
        loader.traversal_order.indices = loader.first_traversal_order = order
        for images, labels in loader:
            yield images, labels.flatten()


@cache
def ffcv_loader(beton: Beton, batch_size: int, num_workers: int) -> Any:
    fields = importlib.import_module("ffcv.fields.decoders")
    transforms = importlib.import_module("ffcv.transforms")
    module = importlib.import_module(FFCV)
    if beton.augmented:
        image = [
            fields.RandomResizedCropRGBImageDecoder((SIZE, SIZE), SCALE, ASPECT_RATIO),
            transforms.RandomHorizontalFlip(0.5),
        ]
    else:
        ratio = SIZE / RESIZED_SIZE
        image = [fields.CenterCropRGBImageDecoder((SIZE, SIZE), ratio=ratio)]
    if beton.is_recipe:
        mean, std = (255 * np.array(values) for values in (MEAN, STD))
        image += [transforms.NormalizeImage(mean, std, np.float32)]
    image += [transforms.ToTensor(), transforms.ToTorchImage()]
    return module.Loader(
        str(beton.path),
        batch_size=batch_size,
        num_workers=num_workers,
        os_cache=True,
        order=module.OrderOption.SEQUENTIAL,
        drop_last=False,
        pipelines={"image": image, "label": [fields.IntDecoder(), transforms.ToTensor()]},
    )


# ---------------------------------------------------------------------------------------------
# Limits
# ---------------------------------------------------------------------------------------------

OUR_DECODER_OPTIONS = {"err_detect": "crccheck+bitstream+buffer+explode", "idct": "xvid"}
OUR_INTERPOLATION = (
    Interpolation.BILINEAR
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
)
"""Written out, not imported: what our loader asks of FFmpeg is to be measured against this."""

MakeFunction = Callable[[], Callable[[bytes], VideoFrame]]
"""Makes a thread's own function from an encoded image to a frame."""


def make_decode(options: dict[str, str]) -> Callable[[bytes], VideoFrame]:
    decoder = CodecContext.create("mjpeg", "r")
    assert isinstance(decoder, VideoCodecContext)
    decoder.thread_count = 1
    decoder.options = dict(options)

    def decode(encoded: bytes) -> VideoFrame:
        [frame] = decoder.decode(Packet(encoded))
        return frame

    return decode


def make_decode_and_scale(options: dict[str, str]) -> Callable[[bytes], VideoFrame]:
    decode = make_decode(options)
    scaler = VideoReformatter()

    def decode_and_scale(encoded: bytes) -> VideoFrame:
        return scaler.reformat(
            decode(encoded),
            width=SIZE,
            height=SIZE,
            format="gbrp",
            interpolation=OUR_INTERPOLATION,
            threads=1,
        )

    return decode_and_scale


def bare_images_per_second(
    make_function: MakeFunction, encoded: Sequence[bytes], num_threads: int
) -> float:
    numbers = itertools.count()

    def work() -> None:
        function = make_function()
        while (number := next(numbers)) < len(encoded):
            function(encoded[number])

    with ThreadPoolExecutor(num_threads) as threads:
        start_seconds = time.perf_counter()
        for finished in [threads.submit(work) for _ in range(num_threads)]:
            finished.result()
        return len(encoded) / (time.perf_counter() - start_seconds)


def limit(name: str, make_function: MakeFunction, encoded: Sequence[bytes], job: Job) -> Contender:
    return Contender(
        name,
        job=name,
        measure=partial(bare_images_per_second, make_function, encoded, job.num_workers),
        fingerprint=list,
    )


def read_files(job: Job) -> dict[str, bytes]:
    """The chosen files by path, which are in the page cache from then on."""
    paths = [job.samples[index][0] for index in job.chosen]
    return {path: Path(path).read_bytes() for path in paths}


def is_jpeg(data: bytes) -> bool:
    return data.startswith(b"\xff\xd8\xff")


# ---------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------


def resize_section(folder: Path, num_workers: int) -> ImageSection:
    job = Job(folder, num_workers, batch_size=64, num_counted=20)
    opened = open_torch_and_ours(job, augmented=False)
    files = read_files(job)
    jpegs = {path: data for path, data in files.items() if is_jpeg(data)}
    encoded = [jpegs[path] for path in job.counted_paths() if path in jpegs]
    contenders = loaders_of(opened, job)
    opened["spdl"] = partial(open_spdl, spdl_resized, job)
    opened["DALI"] = partial(open_dali, job, augmented=False)
    contenders += [
        loader("spdl", job, opened["spdl"], needs="spdl.io"),
        loader("DALI", job, opened["DALI"], needs="nvidia.dali.plugin.pytorch"),
    ]
    if encoded:
        ours = OUR_DECODER_OPTIONS
        contenders += [
            limit("FFmpeg, its options", partial(make_decode, {}), encoded, job),
            limit("FFmpeg, our options", partial(make_decode, ours), encoded, job),
            limit("FFmpeg, with scaling", partial(make_decode_and_scale, ours), encoded, job),
        ]
    return ImageSection(
        "resize",
        "img/s",
        contenders,
        [
            Ratio(OURS, OUR_THREADS, at_least=0.97),
            Ratio(OURS, "torch, PIL", at_least=2.2),
            Ratio(OURS, "torch, torchvision.io", at_least=1.2),
            Ratio(OURS, "spdl", at_least=3),
            Ratio(OURS, "DALI", at_least=2),
            Ratio(OURS, "FFmpeg, its options", at_least=0.75),
            Ratio(OURS, "FFmpeg, our options"),
            Ratio(OURS, "FFmpeg, with scaling", at_least=0.92),
        ],
        differences={
            name: partial(difference_of_batches, open_batches, job)
            for name, open_batches in opened.items()
        },
        note=describe_left_out(len(files) - len(jpegs), len(files)),
    )


def augment_section(folder: Path, num_workers: int) -> ImageSection:
    job = Job(folder, num_workers, batch_size=64, num_counted=20)
    read_files(job)
    opened = open_torch_and_ours(job, augmented=True)
    contenders = loaders_of(opened, job)
    contenders += [
        loader("spdl", job, partial(open_spdl, spdl_augmented, job), needs="spdl.io"),
        loader(
            "DALI",
            job,
            partial(open_dali, job, augmented=True),
            needs="nvidia.dali.plugin.pytorch",
        ),
    ]

    pil = pil_folder(folder, augmented=True)

    def difference(load: Callable[[int], Tensor]) -> Callable[[], Difference]:
        return partial(difference_when_seeded, load, lambda index: pil[index][0], job)

    ours = our_folder(folder, augmented=True)
    torchvision_io = folder_of_tensors(folder, decode_by_torchvision, augmented=True)
    return ImageSection(
        "augment",
        "img/s",
        contenders,
        [
            Ratio(OURS, "torch, PIL", at_least=2),
            Ratio(OURS, "torch, torchvision.io", at_least=1.2),
            Ratio(OURS, "spdl"),
            Ratio(OURS, "DALI"),
        ],
        differences={
            OURS: difference(lambda index: ours[index][0]),
            "torch, torchvision.io": difference(lambda index: torchvision_io[index][0]),
            "spdl": difference(lambda index: spdl_augmented([job.samples[index][0]])[0]),
        },
    )


def recipe_section(name: str, folder: Path, temporary: Path, num_workers: int) -> ImageSection:
    augmented = name == "train"
    job = Job(folder, num_workers, batch_size=64, num_counted=20)
    read_files(job)
    last = v1.ToTensor(), v1.Normalize(MEAN, STD)
    whole = recipe_folder(folder, *last, augmented=augmented)
    to_bytes = recipe_folder(folder, v1.PILToTensor(), augmented=augmented)
    make_folder = partial(recipe_folder_of_tensors, folder, augmented=augmented)
    torchs = {
        "torch, PIL": whole,
        "torch, torchvision.io": make_folder(decode_by_torchvision),
        "torch, torchcodec": make_folder(decode_by_torchcodec),
    }
    ours: dict[str, tuple[Any, Any]] = {
        OURS_FUSED: (whole, True),
        OURS_FUSED_BYTES: (to_bytes, True),
        OURS_EXACT: (whole, "exact"),
        OURS_UNMODIFIED: (whole, False),
    }
    needs = {
        "torch, torchvision.io": TORCHVISION_IO,
        "torch, torchcodec": TORCHCODEC,
        "spdl": "spdl.io",
        "DALI": "nvidia.dali.plugin.pytorch",
        "FFCV, same files": FFCV,
        "FFCV, re-encoded": FFCV,
    }
    opened: dict[str, OpenBatches] = {
        contender: partial(open_loader, partial(spdl_torch.DataLoader, fuse=fuse), dataset, job)
        for contender, (dataset, fuse) in ours.items()
    }
    for contender, dataset in torchs.items():
        opened[contender] = partial(open_loader, TorchDataLoader, dataset, job)
    load_by_spdl = partial(spdl_recipe, augmented=augmented)
    opened["spdl"] = partial(open_spdl, load_by_spdl, job)
    opened["DALI"] = partial(open_dali, job, augmented=augmented, is_recipe=True)
    for contender, keeps_files in {"FFCV, same files": True, "FFCV, re-encoded": False}.items():
        beton = Beton(temporary / f"{name}-{keeps_files}.beton", augmented, is_recipe=True)
        if is_usable(FFCV):
            write_beton(job, beton.path, keeps_files=keeps_files)
        opened[contender] = partial(open_ffcv, beton, job)

    def seeded(dataset: Any, fuse: Any) -> OpenBatches:
        return partial(open_loader, partial(spdl_torch.DataLoader, fuse=fuse, seed=0), dataset, job)

    def difference(open_batches: OpenBatches, reference: Any = whole) -> Callable[[], Difference]:
        return partial(difference_of_loaders, open_batches, seeded(reference, False), job)

    # The datasets of all are loaded by our loader, which gives each sample its random numbers.
    by_spdl = ImageFolder(folder, loader=partial(spdl_recipe_image, augmented=augmented))
    differences = {
        contender: difference(seeded(dataset, fuse), dataset)
        for contender, (dataset, fuse) in ours.items()
    }
    for contender, dataset in {**torchs, "spdl": by_spdl}.items():
        differences[contender] = difference(seeded(dataset, False))
    return ImageSection(
        name,
        "img/s",
        [
            loader(contender, job, open_batches, needs=needs.get(contender))
            for contender, open_batches in opened.items()
        ],
        [
            Ratio(OURS_FUSED, OURS_UNMODIFIED),
            Ratio(OURS_FUSED, "torch, PIL", at_least=1.8 if augmented else 1.7),
            Ratio(OURS_FUSED, "torch, torchvision.io"),
            Ratio(OURS_FUSED, "torch, torchcodec", at_least=1.3 if augmented else None),
            Ratio(OURS_FUSED, "spdl"),
            Ratio(OURS_FUSED, "DALI"),
            Ratio(OURS_FUSED, "FFCV, same files"),
            Ratio(OURS_FUSED, "FFCV, re-encoded"),
            Ratio(OURS_FUSED_BYTES, "torch, PIL"),
            Ratio(OURS_EXACT, "torch, PIL", at_least=1.1),
        ],
        differences=differences,
        note='Fused: fuse=True, exact: fuse="exact", both with the dataset of torch, PIL. '
        "“uint8” leaves out ToTensor and Normalize, which device= does on the device.",
        subject=OURS_FUSED,
        exact=(OURS_EXACT, OURS_UNMODIFIED),
    )


def large_section(kind: str, folder: Path, num_workers: int) -> ImageSection:
    job = Job(folder, num_workers, batch_size=8, num_counted=6)
    opened = open_torch_and_ours(job, augmented=False)
    return ImageSection(
        f"large, {kind}",
        "img/s",
        loaders_of(opened, job),
        [
            Ratio(OURS, "torch, PIL"),
            Ratio(OURS, "torch, torchvision.io", at_least=3 if kind == "enlarged" else None),
        ],
        differences={
            name: partial(difference_of_batches, open_batches, job)
            for name, open_batches in opened.items()
        },
    )


def loaders_of(opened: dict[str, OpenBatches], job: Job) -> list[Contender]:
    needs = {"torch, torchvision.io": TORCHVISION_IO}
    return [
        loader(name, job, open_batches, needs=needs.get(name))
        for name, open_batches in opened.items()
    ]


def open_torch_and_ours(job: Job, *, augmented: bool) -> dict[str, OpenBatches]:
    ours = our_folder(job.folder, augmented=augmented)
    pil = pil_folder(job.folder, augmented=augmented)
    torchvision_io = folder_of_tensors(job.folder, decode_by_torchvision, augmented=augmented)
    return {
        OURS: partial(open_loader, spdl_torch.DataLoader, ours, job),
        OUR_THREADS: partial(open_loader, our_loader_of_threads, ours, job),
        "torch, PIL": partial(open_loader, TorchDataLoader, pil, job),
        "torch, torchvision.io": partial(open_loader, TorchDataLoader, torchvision_io, job),
    }


# ---------------------------------------------------------------------------------------------
# Large images
# ---------------------------------------------------------------------------------------------


def make_large_images(kind: str, source: Path, folder: Path) -> None:
    """Fill a folder with JPEGs of 12 megapixels, made from the images of another."""
    class_folder = folder / "large"
    class_folder.mkdir(parents=True)
    paths = [path for path, _ in ImageFolder(source).samples]
    # Neighbours are of one class; their mosaic would be of one kind.
    step = max(1, len(paths) // NUM_LARGE_IMAGES)
    pictures = open_pictures(itertools.chain(*(paths[first::step] for first in range(step))))
    for number in range(NUM_LARGE_IMAGES):
        if kind == "enlarged":
            image = next(pictures).resize(LARGE_SIZE, Image.Resampling.LANCZOS)
        else:
            image = mosaic(pictures)
        image.save(class_folder / f"{number:04}.jpg", quality=90, subsampling="4:2:0")


def open_pictures(paths: Iterable[str]) -> Iterator[Image.Image]:
    for path in itertools.cycle(paths):
        with Image.open(path) as image:
            yield image.convert("RGB")


def mosaic(pictures: Iterator[Image.Image]) -> Image.Image:
    image = Image.new("RGB", LARGE_SIZE)
    top = 0
    while top < image.height:
        left = 0
        row_height = image.height
        while left < image.width:
            picture = next(pictures)
            image.paste(picture, (left, top))
            left += picture.width
            row_height = min(row_height, picture.height)
        # The next row covers what hangs over, so that nothing stays black.
        top += row_height
    return image


# ---------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------


def print_section(
    section: ImageSection,
    figures: dict[str, list[float]],
    differences: dict[str, Difference],
    console: Console,
    *,
    with_targets: bool,
) -> None:
    table = Table(title=section.name, title_justify="left", pad_edge=False)
    table.add_column("contender", no_wrap=True)
    # Narrow heads: all rows are to fit into 80 columns.
    heads = [
        f"{section.unit},\nmedian",
        "lowest\nto highest",
        f"{section.subject.split()[-1]}\n/ it",
    ]
    heads += ["off PIL by\nmean, worst"]
    heads += ["target"] if with_targets else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    ratios = {
        ratio.denominator: ratio for ratio in section.ratios if ratio.numerator == section.subject
    }
    for contender in section.contenders:
        values = figures.get(contender.name)
        if not values:
            table.add_row(contender.name, "absent")
            continue
        ratio = ratios.get(contender.name)
        difference = differences.get(contender.name)
        table.add_row(
            contender.name,
            format_figure(statistics.median(values)),
            f"{format_figure(min(values))}–{format_figure(max(values))}",
            f"{statistics.median(ratio.values(figures)):.3g}" if ratio else "",
            f"{difference.mean:.2f}, {difference.worst:.1f}" if difference else "",
            *([describe_target(ratio, figures)] if with_targets and ratio else []),
        )
    console.print(table)
    for ratio in section.ratios:
        if ratio.numerator != section.subject and (values := ratio.values(figures)):
            target = f", target {describe_target(ratio, figures)}" if ratio.target else ""
            shown = target if with_targets else ""
            console.print(f"{ratio.name}: {statistics.median(values):.3g}{shown}", highlight=False)
    if section.note:
        console.print(section.note, highlight=False)


def describe_target(ratio: Ratio, figures: dict[str, list[float]]) -> str:
    reached = ratio.reached(figures)
    if reached is None:
        return ratio.target
    return f"{ratio.target} " + ("[green]✓[/green]" if reached else "[red]✗[/red]")


def unmet_targets(
    section: ImageSection, figures: dict[str, list[float]], differences: dict[str, Difference]
) -> Iterator[tuple[str, bool]]:
    """What is to be said about targets, and whether they were missed or just not measured."""
    for ratio in section.ratios:
        if ratio.at_least is None or ratio.reached(figures):
            continue
        values = ratio.values(figures)
        if values:
            median = statistics.median(values)
            short_percent = (1 - median / ratio.at_least) * 100
            found = f"is {median:.3g}, {short_percent:.1f} % short of {ratio.at_least:.3g}"
        else:
            found = f"was not measured, and should be {ratio.target}"
        yield f"{section.name}: {ratio.name} {found}", bool(values)
    subject = section.subject
    ours = differences.get(subject)
    if ours is not None and ours.worst > MAX_DIFFERENCE and subject not in section.changed:
        yield f"{section.name}: {subject} is off PIL by {ours.worst:.1f} in {ours.worst_path}", True


def describe_left_out(num_left_out: int, num_files: int) -> str:
    if not num_left_out:
        return ""
    if num_left_out == num_files:
        return "No limits were measured: there is no JPEG."
    return f"FFmpeg's rows leave out {num_left_out:,} of {num_files:,} files, which are no JPEGs."


def describe_images(folder: Path, *, are_made: bool) -> str:
    num_images = len(ImageFolder(folder))
    if are_made:
        return (
            f"{num_images:,} images made for the purpose, as there is no --data. Photos cost more "
            "or less to decode: compare ratios with those of other made images only."
        )
    return f"{num_images:,} images in {folder}"


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------

SECTION_NAMES = ["resize", "augment", "train", "val", "large"]
LARGE_KINDS = ["enlarged", "mosaic"]


def parse_arguments(
    arguments: Sequence[str], description: str, section_names: Sequence[str]
) -> argparse.Namespace:
    parser = argument_parser(description, section_names)
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    options = checked(parser, arguments)
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    return options


def make_sections(
    names: Sequence[str], folder: Path, temporary: Path, num_workers: int, console: Console
) -> Iterator[ImageSection]:
    for name in names:
        if name == "resize":
            yield resize_section(folder, num_workers)
        elif name == "augment":
            yield augment_section(folder, num_workers)
        elif name in {"train", "val"}:
            yield recipe_section(name, folder, temporary, num_workers)
        else:
            for kind in LARGE_KINDS:
                with console.status(f"making large images, {kind}"):
                    make_large_images(kind, folder, temporary / kind)
                yield large_section(kind, temporary / kind, num_workers)


MakeSections = Callable[[Sequence[str], Path, Path, int, Console], Iterable[ImageSection]]
"""From names, the images, a temporary folder, the number of workers and a console to sections."""


def run_sections(
    options: argparse.Namespace, make_sections: MakeSections, *, with_targets: bool
) -> int:
    """Measure and report all sections; return the exit status."""
    # torch advises against more workers than cores; --workers has been chosen all the same.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    console = Console()
    results = []
    unmet: list[tuple[str, bool]] = []
    with tempfile.TemporaryDirectory(prefix="images-benchmark-") as temporary_name:
        temporary = Path(temporary_name)
        folder = options.data
        if folder is None:
            folder = temporary / "made"
            folder.mkdir()
            with console.status("making images"):
                make_images(folder)
        description = describe_images(folder, are_made=options.data is None)
        console.print(description, markup=False, highlight=False)
        for section in make_sections(options.only, folder, temporary, options.workers, console):
            differences = measure_differences(section, console)
            figures = measure_section(section, options.rounds, console) | section.further_figures
            print_section(section, figures, differences, console, with_targets=with_targets)
            as_json = {name: asdict(difference) for name, difference in differences.items()}
            results.append({**section_as_json(section, figures), "differences": as_json})
            unmet += unmet_targets(section, figures, differences)
    if options.json is not None:
        report = {
            "machine": describe_machine(),
            "images": description,
            "workers": options.workers,
            "rounds": options.rounds,
            "sections": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if not options.check:
        return 0
    for message, _ in unmet:
        console.print(message, markup=False, highlight=False)
    return 1 if any(is_missed for _, is_missed in unmet) else 0


def main(arguments: Sequence[str]) -> int:
    description = "Measure our image loading and its peers."
    options = parse_arguments(arguments, description, SECTION_NAMES)
    return run_sections(options, make_sections, with_targets=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
