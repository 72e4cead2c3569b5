"""Side-by-side measurements of `spdl_torch.DataLoader` and its peers, in one command.

    python benchmarks/loaders.py [--data DIR] [--rounds N] [--only NAME ...] [--json FILE] [--check]

Only ratios are worth quoting. Absolute figures swing with whatever else the machine does, so in
every round all contenders run one after the other (the order rotates from round to round), each
ratio is taken within one round, and the median over the rounds is reported. Before anything is
measured, the batches of all contenders that do one job are compared: whoever delivers other
batches, or another order, stops the benchmark.

How throughput is counted (`trivial`, `latency`, `images`; the same rule for all contenders)
---------------------------------------------------------------------------------------------
The clock runs between two deliveries in the middle of an epoch. Counting from the start would
measure how workers are started, which `first-batch` does. Counting from the first batch to the
last would be wrong at both ends: where every worker makes whole batches (torch), the first batch
arrives together with one from every other worker, work done before the clock started; and at the
end workers idle because nothing is left to hand out. So a margin is left at both ends: at the end
at least as many batches as the contender may finish at the same moment, at the start twice as many,
as the first of each worker is late. The number of counted batches is a multiple of that number.
Then the loader is equally full when the clock starts and when it stops: what was begun before and
is delivered within makes up for what is begun within and delivered after.
The number of counted batches differs between contenders, as slow ones would take minutes
otherwise; what is reported is per sample or per second.

The consumer does nothing but read the clock. What loader threads cost a busy training step is not
measured here, but by `step.py`.

Where our workers live
----------------------
`ours` alone is the default: the dataset of a section decides, as `print(loader.plan)` says. Rows
that name a number of processes set `num_processes`, and 0 is threads in this process.

How memory is counted (`memory`)
--------------------------------
What the whole job needs: the process and all its descendants, Python, torch and dataset included;
the row without workers shows how much that alone is. Memory that processes write is counted by PSS
(private pages once per process, shared pages once in sum). Pages of files, nearly all of them
torch's libraries, are counted once, as the largest process maps them. Their PSS would not do: it
depends on who else on the machine has torch loaded, this benchmark for one, and that favours a
single process over nine. Each contender runs in a fresh process that imports torch but not
torchvision. What a job imports beyond that is needed once by threads and processes alike and moves
the ratio towards 1; what its dataset holds beyond that moves it away. Memory is read in the middle
of a second shuffled epoch, with all workers alive, after the first one has touched every object
(touching counts a reference, which is a write: a worker process that touches an object copies its
page). Memory does not swing as times do: two rounds are enough.

Peers
-----
`spdl` and `torchdata` take part if they are installed. SPDL appears twice: a sample at a time, the
way its documentation builds a loading pipeline, and a batch at a time, which hides its cost per
item and gives up spreading one batch over threads. All its pipelines keep the input order, as
torch's and our loaders do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, default_collate

import spdl_torch

BATCH_SIZE = 64
LATENCY_SECONDS = 0.01
NUM_OBJECTS = 1_000_000

OpenBatches = Callable[[int], Iterable[Any]]
"""From a number of batches to a loader that delivers as many."""


# ---------------------------------------------------------------------------------------------
# Contenders, ratios, rounds
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """One way to do a job."""

    name: str
    job: str
    """Contenders with the same job must deliver the same batches."""
    measure: Callable[[], float]
    """Does the job once and returns the section's figure."""
    fingerprint: Callable[[], list[str]]
    """Does a short form of the job and returns one digest per batch."""
    needs: str | None = None
    """A package that may be absent."""

    @property
    def installed(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


@dataclass(frozen=True)
class Ratio:
    """One contender's figure over another's, or over a constant, and what it should be."""

    numerator: str
    denominator: str | float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def name(self) -> str:
        if isinstance(self.denominator, str):
            return f"{self.numerator} / {self.denominator}"
        return f"{self.numerator} / ideal {self.denominator:,.0f}"

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:.3g}"
        if self.at_most is not None:
            return f"≤ {self.at_most:.3g}"
        return ""

    def values(self, figures: dict[str, list[float]]) -> list[float]:
        """One ratio per round; empty where one of the two was not measured."""
        numerators = figures.get(self.numerator, [])
        if not isinstance(self.denominator, str):
            return [numerator / self.denominator for numerator in numerators]
        denominators = figures.get(self.denominator, [])
        return [a / b for a, b in zip(numerators, denominators, strict=False)]

    def reached(self, figures: dict[str, list[float]]) -> bool | None:
        """`None` where there is no target, or nothing was measured."""
        values = self.values(figures)
        if not values:
            return None
        if self.at_least is not None:
            return statistics.median(values) >= self.at_least
        if self.at_most is not None:
            return statistics.median(values) <= self.at_most
        return None


@dataclass(frozen=True)
class Section:
    """A job, who does it, and what should come out."""

    name: str
    unit: str
    contenders: list[Contender]
    ratios: list[Ratio]
    max_rounds: int | None = None


def compare_results(contenders: Sequence[Contender]) -> None:
    """Raise unless contenders with the same job deliver the same batches in the same order."""
    references: dict[str, tuple[Contender, list[str]]] = {}
    for contender in contenders:
        found = contender.fingerprint()
        reference, expected = references.setdefault(contender.job, (contender, found))
        if found != expected:
            raise RuntimeError(
                f"{contender.name} and {reference.name} do not do the same job: "
                f"{describe_difference(found, expected)}. Nothing was measured."
            )


def describe_difference(found: list[str], expected: list[str]) -> str:
    if len(found) != len(expected):
        return f"{len(found)} batches instead of {len(expected)}"
    differing = [number for number, digest in enumerate(found) if digest != expected[number]]
    return f"different content in batches {differing}"


def measure_section(section: Section, num_rounds: int, console: Console) -> dict[str, list[float]]:
    """Figures by contender, one for each round."""
    contenders = [contender for contender in section.contenders if contender.installed]
    num_rounds = min(num_rounds, section.max_rounds or num_rounds)
    with console.status(f"{section.name}: comparing results") as status:
        compare_results(contenders)
        figures: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for round_number in range(num_rounds):
            shift = round_number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                status.update(
                    f"{section.name}: round {round_number + 1} of {num_rounds}, {contender.name}"
                )
                # The garbage of one contender must not be collected on the time of the next.
                gc.collect()
                figures[contender.name].append(contender.measure())
    return figures


# ---------------------------------------------------------------------------------------------
# Two measures over batches
# ---------------------------------------------------------------------------------------------


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for part in batch:
            yield from tensors_in(part)


def fingerprints(batches: Iterable[Any]) -> list[str]:
    """One digest per batch, of type, shape and content of its tensors."""
    digests = []
    for batch in batches:
        digest = hashlib.sha256()
        for tensor in tensors_in(batch):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests


def steady_samples_per_second(
    open_batches: OpenBatches, num_counted: int, num_at_once: int
) -> float:
    """Throughput in the middle of an epoch; the module's docstring says why there.

    `num_at_once` is the number of batches that the contender may finish at the same moment.
    """
    num_counted += -num_counted % num_at_once
    num_before = max(4, 2 * num_at_once)
    num_after = max(4, num_at_once)
    num_batches = num_before + num_counted + num_after
    delivered_at_seconds = [time.perf_counter() for _ in open_batches(num_batches)]
    # SPDL drops a sample that fails and goes on; less work must not count as more speed.
    if len(delivered_at_seconds) != num_batches:
        raise RuntimeError(f"expected {num_batches} batches, got {len(delivered_at_seconds)}")
    start_seconds = delivered_at_seconds[num_before - 1]
    stop_seconds = delivered_at_seconds[num_before - 1 + num_counted]
    return num_counted * BATCH_SIZE / (stop_seconds - start_seconds)


def throughput_contender(
    name: str,
    open_batches: OpenBatches,
    *,
    job: str = "",
    num_counted: int,
    num_at_once: int = 1,
    num_compared: int = 8,
    needs: str | None = None,
) -> Contender:
    """A contender whose figure is samples per second."""
    return Contender(
        name,
        job,
        measure=partial(steady_samples_per_second, open_batches, num_counted, num_at_once),
        fingerprint=lambda: fingerprints(open_batches(num_compared)),
        needs=needs,
    )


def in_microseconds_per_sample(contender: Contender) -> Contender:
    """The same contender with the inverse figure."""
    return Contender(
        contender.name,
        contender.job,
        measure=lambda: 1e6 / contender.measure(),
        fingerprint=contender.fingerprint,
        needs=contender.needs,
    )


def first_batch_milliseconds(open_batches: OpenBatches, num_batches: int) -> float:
    """Time from `iter(loader)` to the first batch."""
    loader = open_batches(num_batches)
    start_seconds = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    elapsed_seconds = time.perf_counter() - start_seconds
    # Run to the end: workers still busy would slow the next contender.
    for _ in iterator:
        pass
    return elapsed_seconds * 1e3


# ---------------------------------------------------------------------------------------------
# Datasets
# ---------------------------------------------------------------------------------------------


class IndexDataset(Dataset[int]):
    """The cheapest sample there is: its index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class SlowDataset(IndexDataset):
    """A plain dataset with the latency of a remote store."""

    def __getitem__(self, index: int) -> int:
        time.sleep(LATENCY_SECONDS)
        return index


class SlowStagedDataset(spdl_torch.StagedDataset[int]):
    """The same latency in a load stage."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def load(self, index: int) -> Any:
        time.sleep(LATENCY_SECONDS)
        return index


class SlowAsyncDataset(SlowStagedDataset):
    """The same latency, awaited."""

    async def load(self, index: int) -> Any:
        await asyncio.sleep(LATENCY_SECONDS)
        return index


class PathsDataset(Dataset[int]):
    """A list of (path, label), as torchvision's folder datasets keep one."""

    def __init__(self, num_samples: int) -> None:
        self.samples = [
            (f"train/class-{label % 1000:03}/image-{label:08}.jpg", label)
            for label in range(num_samples)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        path, label = self.samples[index]
        return label if path else -1


# torchvision is imported where it is used: `memory` runs this file too, and torchvision takes
# nearly as much memory as that section's dataset.


def pil_folder(folder: Path) -> Dataset[Any]:
    """Torchvision's dataset with its default loader, PIL."""
    v2 = importlib.import_module("torchvision.transforms.v2")
    datasets = importlib.import_module("torchvision.datasets")
    transform = v2.Compose([v2.Resize((224, 224), antialias=True), v2.PILToTensor()])
    dataset: Dataset[Any] = datasets.ImageFolder(folder, transform=transform)
    return dataset


def torchvision_io_folder(folder: Path) -> Dataset[Any]:
    """Torchvision's dataset with torchvision's own decoder."""
    io = importlib.import_module("torchvision.io")
    v2 = importlib.import_module("torchvision.transforms.v2")
    datasets = importlib.import_module("torchvision.datasets")
    load = partial(io.decode_image, mode=io.ImageReadMode.RGB)
    transform = v2.Resize((224, 224), antialias=True)
    dataset: Dataset[Any] = datasets.ImageFolder(folder, transform=transform, loader=load)
    return dataset


# ---------------------------------------------------------------------------------------------
# Loaders
# ---------------------------------------------------------------------------------------------


def open_loader(
    loader_class: Callable[..., Iterable[Any]],
    dataset_class: Callable[[int], Dataset[Any]],
    num_batches: int,
    **options: Any,
) -> Iterable[Any]:
    """A loader over a dataset made to measure."""
    dataset = dataset_class(num_batches * BATCH_SIZE)
    return loader_class(dataset, batch_size=BATCH_SIZE, **options)


def open_repeating_loader(
    loader_class: Callable[..., Iterable[Any]], dataset: Any, num_batches: int
) -> Iterable[Any]:
    """A loader that goes through a given dataset as often as needed."""
    # The repetition is in the sampler, so that the dataset is the one users have.
    sampler = [number % len(dataset) for number in range(num_batches * BATCH_SIZE)]
    return loader_class(dataset, batch_size=BATCH_SIZE, sampler=sampler, num_workers=2)


our_loader_of_threads = partial(spdl_torch.DataLoader, num_processes=0)
"""Our loader with its worker threads in this process."""


def open_torchdata(num_batches: int) -> Iterable[Any]:
    stateful_dataloader = importlib.import_module("torchdata.stateful_dataloader")
    return open_loader(
        stateful_dataloader.StatefulDataLoader, IndexDataset, num_batches, num_workers=2
    )


def open_spdl_by_sample(
    load: Callable[[int], Any], num_concurrent: int, num_batches: int
) -> Iterable[Any]:
    """SPDL's pipeline with one task per sample; `load` may be `async def`."""
    builder = importlib.import_module("spdl.pipeline").PipelineBuilder()
    builder.add_source(range(num_batches * BATCH_SIZE))
    builder.pipe(load, concurrency=num_concurrent, output_order="input")
    builder.aggregate(BATCH_SIZE)
    builder.pipe(default_collate)
    return run_spdl(builder, num_concurrent)


def open_spdl_by_batch(
    load: Callable[[int], Any], num_concurrent: int, num_batches: int
) -> Iterable[Any]:
    """SPDL's pipeline with one task per batch, as torch's workers do it."""

    def load_batch(first_index: int) -> Any:
        indices = range(first_index, first_index + BATCH_SIZE)
        return default_collate([load(index) for index in indices])

    builder = importlib.import_module("spdl.pipeline").PipelineBuilder()
    builder.add_source(range(0, num_batches * BATCH_SIZE, BATCH_SIZE))
    builder.pipe(load_batch, concurrency=num_concurrent, output_order="input")
    return run_spdl(builder, num_concurrent)


def run_spdl(builder: Any, num_threads: int) -> Iterator[Any]:
    # A sink of four batches is what two workers of torch's loader may have waiting.
    pipeline = builder.add_sink(4).build(num_threads=num_threads)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def load_index(index: int) -> int:
    return index


def load_slowly(index: int) -> int:
    time.sleep(LATENCY_SECONDS)
    return index


async def load_slowly_async(index: int) -> int:
    await asyncio.sleep(LATENCY_SECONDS)
    return index


# ---------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------


def trivial_section() -> Section:
    ours = partial(open_loader, spdl_torch.DataLoader, IndexDataset, num_workers=2)
    our_threads = partial(ours, num_processes=0)
    torch_0 = partial(open_loader, TorchDataLoader, IndexDataset, num_workers=0)
    torch_2 = partial(open_loader, TorchDataLoader, IndexDataset, num_workers=2)
    spdl_by_sample = partial(open_spdl_by_sample, load_index, 2)
    spdl_by_batch = partial(open_spdl_by_batch, load_index, 2)
    # Counted batches are chosen so that everyone runs for a few tenths of a second.
    by_throughput = [
        throughput_contender("torch, 0 workers", torch_0, num_counted=1536),
        throughput_contender("ours, 2 threads", our_threads, num_counted=1536, num_at_once=2),
        throughput_contender("ours, 2 processes", ours, num_counted=256, num_at_once=2),
        throughput_contender("torch, 2 processes", torch_2, num_counted=256, num_at_once=2),
        throughput_contender(
            "torchdata, 2 processes",
            open_torchdata,
            num_counted=256,
            num_at_once=2,
            needs="torchdata",
        ),
        throughput_contender(
            "spdl, 2 threads, by sample", spdl_by_sample, num_counted=16, needs="spdl"
        ),
        throughput_contender(
            "spdl, 2 threads, by batch",
            spdl_by_batch,
            num_counted=512,
            num_at_once=2,
            needs="spdl",
        ),
    ]
    return Section(
        "trivial",
        "µs/sample",
        [in_microseconds_per_sample(contender) for contender in by_throughput],
        [
            Ratio("ours, 2 threads", "torch, 0 workers", at_most=1.5),
            Ratio("torch, 2 processes", "ours, 2 threads", at_least=5),
            Ratio("torch, 2 processes", "ours, 2 processes", at_least=0.95),
            Ratio("torchdata, 2 processes", "ours, 2 threads"),
            Ratio("spdl, 2 threads, by sample", "ours, 2 threads", at_least=50),
            Ratio("spdl, 2 threads, by batch", "ours, 2 threads"),
        ],
    )


def our_staged(dataset_class: Callable[[int], Dataset[Any]], num_io_workers: int) -> OpenBatches:
    return partial(
        open_loader,
        spdl_torch.DataLoader,
        dataset_class,
        num_workers=2,
        num_io_workers=num_io_workers,
    )


def latency_section() -> Section:
    # Not the default, which is 64 processes for a dataset that is not known to be thread-safe.
    ours_plain = partial(
        open_loader, spdl_torch.DataLoader, SlowDataset, num_workers=64, num_processes=1
    )
    torch_16 = partial(open_loader, TorchDataLoader, SlowDataset, num_workers=16)
    # One batch takes 10 ms for 64 workers at best and 40 ms for 16.
    contenders = [
        throughput_contender("torch, 16 processes", torch_16, num_counted=64, num_at_once=16),
        throughput_contender(
            "ours, 16 I/O threads", our_staged(SlowStagedDataset, 16), num_counted=32
        ),
        throughput_contender(
            "ours, 16 I/O tasks", our_staged(SlowAsyncDataset, 16), num_counted=32
        ),
        throughput_contender(
            "ours, 64 I/O threads", our_staged(SlowStagedDataset, 64), num_counted=128
        ),
        throughput_contender(
            "ours, 64 I/O tasks", our_staged(SlowAsyncDataset, 64), num_counted=128
        ),
        # An unmodified dataset may be handed out in whole batches, 64 at once.
        throughput_contender(
            "ours, plain, 64 threads", ours_plain, num_counted=128, num_at_once=64
        ),
        throughput_contender(
            "spdl, 16 threads, by sample",
            partial(open_spdl_by_sample, load_slowly, 16),
            num_counted=32,
            needs="spdl",
        ),
        throughput_contender(
            "spdl, 64 threads, by sample",
            partial(open_spdl_by_sample, load_slowly, 64),
            num_counted=32,
            needs="spdl",
        ),
        throughput_contender(
            "spdl, 64 tasks, by sample",
            partial(open_spdl_by_sample, load_slowly_async, 64),
            num_counted=32,
            needs="spdl",
        ),
        throughput_contender(
            "spdl, 64 threads, by batch",
            partial(open_spdl_by_batch, load_slowly, 64),
            num_counted=64,
            num_at_once=64,
            needs="spdl",
        ),
    ]
    ideal_16 = 16 / LATENCY_SECONDS
    ideal_64 = 64 / LATENCY_SECONDS
    return Section(
        "latency",
        "samples/s",
        contenders,
        [
            Ratio("torch, 16 processes", ideal_16),
            Ratio("ours, 16 I/O threads", ideal_16),
            Ratio("ours, 16 I/O tasks", ideal_16),
            Ratio("ours, 64 I/O threads", ideal_64, at_least=0.9),
            Ratio("ours, 64 I/O tasks", ideal_64, at_least=0.9),
            Ratio("ours, plain, 64 threads", ideal_64),
            Ratio("spdl, 16 threads, by sample", ideal_16),
            Ratio("spdl, 64 threads, by sample", ideal_64),
            Ratio("spdl, 64 tasks, by sample", ideal_64),
            Ratio("spdl, 64 threads, by batch", ideal_64),
        ],
    )


def images_section(folder: Path) -> Section:
    pil = pil_folder(folder)
    torchvision_io = torchvision_io_folder(folder)

    def contender(name: str, loader_class: Any, dataset: Dataset[Any], job: str) -> Contender:
        return throughput_contender(
            name,
            partial(open_repeating_loader, loader_class, dataset),
            job=job,
            num_counted=16,
            num_at_once=2,
            num_compared=6,
        )

    return Section(
        "images",
        "img/s",
        [
            contender("torch, PIL", TorchDataLoader, pil, "PIL"),
            contender("ours, PIL", spdl_torch.DataLoader, pil, "PIL"),
            contender("ours, PIL, 0 processes", our_loader_of_threads, pil, "PIL"),
            contender("torch, torchvision.io", TorchDataLoader, torchvision_io, "torchvision.io"),
            contender(
                "ours, torchvision.io", spdl_torch.DataLoader, torchvision_io, "torchvision.io"
            ),
        ],
        [
            Ratio("ours, PIL", "torch, PIL", at_least=1.0),
            Ratio("ours, PIL", "ours, PIL, 0 processes"),
            Ratio("ours, torchvision.io", "torch, torchvision.io", at_least=1.0),
        ],
    )


def first_batch_section(folder: Path) -> Section:
    pil = pil_folder(folder)

    def contender(name: str, open_batches: OpenBatches, job: str) -> Contender:
        # More batches than two workers have in flight: the first one competes with the others.
        return Contender(
            name,
            job,
            measure=partial(first_batch_milliseconds, open_batches, 6),
            fingerprint=lambda: fingerprints(open_batches(6)),
        )

    def trivial(loader_class: Callable[..., Iterable[Any]]) -> OpenBatches:
        return partial(open_loader, loader_class, IndexDataset, num_workers=2)

    def images(loader_class: Callable[..., Iterable[Any]]) -> OpenBatches:
        return partial(open_repeating_loader, loader_class, pil)

    return Section(
        "first-batch",
        "ms",
        [
            contender("torch, trivial", trivial(TorchDataLoader), "trivial"),
            contender("ours, trivial", trivial(spdl_torch.DataLoader), "trivial"),
            contender("ours, trivial, 0 processes", trivial(our_loader_of_threads), "trivial"),
            contender("torch, images", images(TorchDataLoader), "images"),
            contender("ours, images", images(spdl_torch.DataLoader), "images"),
            contender("ours, images, 0 processes", images(our_loader_of_threads), "images"),
        ],
        [
            Ratio("ours, trivial", "torch, trivial"),
            Ratio("ours, trivial, 0 processes", "torch, trivial", at_most=0.5),
            Ratio("ours, images", "torch, images"),
            Ratio("ours, images, 0 processes", "torch, images", at_most=0.5),
        ],
    )


def memory_section() -> Section:
    def contender(name: str, loader_name: str) -> Contender:
        return Contender(
            name,
            "memory",
            measure=lambda: run_memory_child(loader_name, NUM_OBJECTS)["memory_bytes"] / 1e6,
            fingerprint=lambda: run_memory_child(loader_name, 20_000)["fingerprints"],
        )

    return Section(
        "memory",
        "MB",
        [
            contender("torch, 0 workers", "none"),
            contender("torch, 8 processes", "torch"),
            contender("ours, 8 processes", "ours"),
            contender("ours, 1 process", "ours-1"),
            contender("ours, 0 processes", "ours-0"),
        ],
        [
            Ratio("ours, 8 processes", "torch, 8 processes", at_most=1),
            Ratio("ours, 1 process", "torch, 8 processes", at_most=0.5),
            Ratio("ours, 0 processes", "torch, 8 processes", at_most=1 / 3),
            Ratio("ours, 0 processes", "torch, 0 workers"),
            Ratio("torch, 8 processes", "torch, 0 workers"),
        ],
        max_rounds=2,
    )


# ---------------------------------------------------------------------------------------------
# Memory, measured in a process of its own
# ---------------------------------------------------------------------------------------------


def run_memory_child(loader_name: str, num_objects: int) -> dict[str, Any]:
    """What `report_memory` prints in a fresh process, without the pages of earlier sections."""
    command = [sys.executable, __file__, "--memory-child", loader_name, str(num_objects)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def report_memory(loader_name: str, num_objects: int) -> None:
    """Print memory and batch digests as JSON, after an epoch over `num_objects` objects."""
    loader_class: Callable[..., Iterable[Any]] = TorchDataLoader
    if loader_name.startswith("ours"):
        number = loader_name.removeprefix("ours").removeprefix("-")
        num_processes = int(number) if number else None
        loader_class = partial(spdl_torch.DataLoader, num_processes=num_processes)
    num_workers = 0 if loader_name == "none" else 8
    loader = loader_class(
        PathsDataset(num_objects),
        batch_size=500,
        # As in training. It also means that every worker touches nearly every page; in file
        # order a worker process would touch, and copy, an eighth of them.
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    digests = fingerprints(loader)
    second_epoch = iter(loader)
    for _ in range(10):
        next(second_epoch)
    memory_bytes = memory_bytes_of(process_and_descendants(os.getpid()))
    print(json.dumps({"memory_bytes": memory_bytes, "fingerprints": digests}))


def memory_bytes_of(pids: Sequence[int]) -> int:
    """Written pages by PSS, file pages once; the module's docstring says why."""
    written_bytes = 0
    file_bytes = 0
    for pid in pids:
        pss_bytes = read_sizes(Path(f"/proc/{pid}/smaps_rollup"))
        written_bytes += pss_bytes["Pss_Anon"] + pss_bytes["Pss_Shmem"]
        file_bytes = max(file_bytes, read_sizes(Path(f"/proc/{pid}/status"))["RssFile"])
    return written_bytes + file_bytes


def read_sizes(proc_file: Path) -> dict[str, int]:
    """The lines `name: number kB` of a file in /proc, in bytes."""
    sizes_bytes = {}
    for line in proc_file.read_text().splitlines():
        words = line.split()
        if words[-1:] == ["kB"]:
            sizes_bytes[words[0].rstrip(":")] = int(words[1]) * 1024
    return sizes_bytes


def process_and_descendants(pid: int) -> list[int]:
    children_of: dict[int, list[int]] = {}
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        # A process may end between the listing and the reading.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name in parentheses may contain spaces; state and parent follow it.
            parent_pid = int(stat_file.read_text().rpartition(")")[2].split()[1])
            children_of.setdefault(parent_pid, []).append(int(stat_file.parent.name))
    found = [pid]
    for process in found:
        found += children_of.get(process, [])
    return found


# ---------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------


def make_images(folder: Path, num_classes: int = 4, num_images_per_class: int = 64) -> None:
    """Fill a folder with JPEGs of about 450 by 450 pixels, one subfolder per class."""
    random = np.random.default_rng(0)
    for class_number in range(num_classes):
        class_folder = folder / f"class-{class_number}"
        class_folder.mkdir()
        for image_number in range(num_images_per_class):
            image = make_image(random)
            image.save(class_folder / f"{image_number:04}.jpg", quality=95, subsampling=0)


def make_image(random: np.random.Generator) -> Image.Image:
    """A photo's share of smooth areas, edges and noise, so that decoding costs what photos do."""
    width, height = random.integers(400, 501, size=2).tolist()
    across = np.linspace(0, 1, width)[None, :, None]
    down = np.linspace(0, 1, height)[:, None, None]
    left, right, bottom = random.uniform(0, 255, size=(3, 3))
    pixels = (left * (1 - across) + right * across) * (1 - down) + bottom * down
    pixels = pixels + random.normal(0, 10, size=pixels.shape)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(20):
        x, y, radius = random.integers([0, 0, 5], [400, 400, 60]).tolist()
        color = tuple(random.integers(0, 256, size=3).tolist())
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return image


# ---------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------


def print_section(
    section: Section,
    figures: dict[str, list[float]],
    console: Console,
    *,
    with_targets: bool,
) -> None:
    table = Table(title=section.name, title_justify="left")
    table.add_column("contender")
    table.add_column(f"median, {section.unit}", justify="right")
    table.add_column("lowest to highest", justify="right")
    for contender in section.contenders:
        values = figures.get(contender.name)
        if values:
            extent = f"{format_figure(min(values))} to {format_figure(max(values))}"
            table.add_row(contender.name, format_figure(statistics.median(values)), extent)
        else:
            table.add_row(contender.name, "not installed", "")
    console.print(table)

    ratios = Table()
    ratios.add_column("ratio")
    ratios.add_column("median", justify="right")
    if with_targets:
        ratios.add_column("target", justify="right")
        ratios.add_column("")
    for ratio in section.ratios:
        ratio_values = ratio.values(figures)
        median = f"{statistics.median(ratio_values):.3g}" if ratio_values else "not measured"
        reached = describe_reached(ratio.reached(figures))
        ratios.add_row(ratio.name, median, *([ratio.target, reached] if with_targets else []))
    console.print(ratios)


def format_figure(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def describe_reached(reached: bool | None) -> str:
    if reached is None:
        return ""
    return "[green]reached[/green]" if reached else "[red]not reached[/red]"


def section_as_json(section: Section, figures: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "name": section.name,
        "unit": section.unit,
        "figures": figures,
        "not_installed": [
            contender.name for contender in section.contenders if not contender.installed
        ],
        "ratios": [
            {
                "name": ratio.name,
                "values": ratio.values(figures),
                "at_least": ratio.at_least,
                "at_most": ratio.at_most,
                "reached": ratio.reached(figures),
            }
            for ratio in section.ratios
        ],
    }


def describe_machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------

SECTION_NAMES = ["trivial", "latency", "images", "first-batch", "memory"]
IMAGE_SECTION_NAMES = {"images", "first-batch"}


def argument_parser(description: str, section_names: Sequence[str]) -> argparse.ArgumentParser:
    """The arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of images, one subfolder per class; without it, images are made",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=section_names,
        default=section_names,
        metavar="NAME",
        help=f"sections to run, of: {', '.join(section_names)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a measured target is not reached"
    )
    return parser


def checked(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data must be a folder of images by class, and {options.data} is none")
    return options


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("Measure spdl_torch.DataLoader and its peers.", SECTION_NAMES)
    parser.add_argument("--memory-child", nargs=2, help=argparse.SUPPRESS)
    options = checked(parser, arguments)
    if "memory" in options.only and not Path("/proc/self/smaps_rollup").exists():
        others = " ".join(name for name in options.only if name != "memory")
        parser.error(f"memory is read from Linux' /proc, which is not there. Use --only {others}")
    return options


def make_section(name: str, folder: Path) -> Section:
    if name == "trivial":
        return trivial_section()
    if name == "latency":
        return latency_section()
    if name == "images":
        return images_section(folder)
    if name == "first-batch":
        return first_batch_section(folder)
    return memory_section()


def main(arguments: Sequence[str]) -> int:
    # torch advises against more workers than cores; the latency section wants them all the same.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # Said by torchdata about torch.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    options = parse_arguments(arguments)
    if options.memory_child:
        loader_name, num_objects = options.memory_child
        report_memory(loader_name, int(num_objects))
        return 0

    console = Console()
    results = []
    all_reached = True
    with tempfile.TemporaryDirectory(prefix="loaders-benchmark-") as temporary:
        folder = options.data or Path(temporary)
        if options.data is None and not IMAGE_SECTION_NAMES.isdisjoint(options.only):
            with console.status("making images"):
                make_images(folder)
        for name in options.only:
            section = make_section(name, folder)
            figures = measure_section(section, options.rounds, console)
            print_section(section, figures, console, with_targets=options.check)
            results.append(section_as_json(section, figures))
            all_reached &= all(ratio.reached(figures) is not False for ratio in section.ratios)
    if options.json is not None:
        report = {"machine": describe_machine(), "rounds": options.rounds, "sections": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all_reached or not options.check else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
