"""`spdl-torch check`: find the images that cannot be decoded."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import DataLoader, ImageError, ImageLoader, StagedDataset
from ._folder import Unreadable, images_at
from ._jpeg import only_scan
from ._parser import CommandError
from ._screen import Bar, Screen, printable

__all__ = ["run"]

_BATCH_SIZE = 8
"""Files that were read wait for their batch, so a few large ones are all that may be in memory."""


@dataclass(frozen=True)
class Finding:
    """A file that is no good image."""

    path: str
    reason: str


class _Images(StagedDataset[Finding | None]):
    """What is wrong with the image at a path, which is its index; None if nothing is.

    The sampler walks through the folder, so there is no list of all files.
    """

    def __init__(self) -> None:
        self._loader = ImageLoader()
        # Reads all the data of a JPEG and makes little of them, in less time.
        self._quick_loader = ImageLoader((8, 8), reducing_gap=1)

    def load(self, index: str | Unreadable) -> tuple[str, bytes] | Finding:
        if isinstance(index, Unreadable):
            return Finding(index.path, index.reason)
        try:
            return index, self._loader.read(index)
        except OSError as error:
            return Finding(index, f"it cannot be read: {error.strerror}")

    def preprocess(self, raw: tuple[str, bytes] | Finding) -> Finding | None:
        if isinstance(raw, Finding):
            return raw
        path, data = raw
        try:
            self._check(data, path)
        except Exception as error:  # One file must not end the check of a million.
            return Finding(path, _reason(error, path))
        return None

    def collate(self, samples: list[Any]) -> list[Any]:
        return samples

    def _check(self, data: bytes, path: str) -> None:
        scan = only_scan(data)
        if scan is None:
            self._loader.decode(data, path)
            return
        pixels = self._loader.decode(scan.with_tripwire(data), path)
        shortened = scan.shortened(data)
        if shortened is not None and self._gives(pixels, shortened):
            raise ImageError("it is a JPEG whose image data go on when the image is complete")

    def _gives(self, pixels: Tensor, data: bytes) -> bool:
        try:
            # By far most end here.
            self._quick_loader.decode(data)
            return torch.equal(self._loader.decode(data), pixels)
        except ImageError:
            return False


def _reason(error: Exception, path: str) -> str:
    said = str(error).removeprefix(f"cannot decode {path}: ").removesuffix(".")
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"


def run(options: argparse.Namespace) -> int:
    """List the damaged images; the exit code is 1 if there are any."""
    screen = Screen(as_json=options.json)
    path: Path = options.path
    started_seconds = time.perf_counter()
    with screen.bar("counting", unit="images") as bar:
        num_images = _count(images_at(path), bar)
    if num_images == 0:
        raise CommandError(f"there are no images in {path}")
    damaged = []
    num_damaged = 0
    with screen.bar("checking", num_images, "images") as bar:
        for finding in _findings(images_at(path), options.workers, bar):
            num_damaged += 1
            if options.json:  # Else it is said at once, and need not be remembered.
                damaged.append(asdict(finding))
            screen.say(f"{printable(finding.path)}: {printable(finding.reason)}")
    seconds = time.perf_counter() - started_seconds
    screen.remark(
        f"{num_images:,} checked, {num_damaged:,} damaged ({seconds:.1f} s)",
        style="red" if num_damaged else "green",
    )
    screen.document(
        {
            "path": path,
            "num_images": num_images,
            "num_damaged": num_damaged,
            "seconds": seconds,
            "damaged": sorted(damaged, key=itemgetter("path")),
        }
    )
    return 1 if num_damaged else 0


def _count(images: Iterable[str | Unreadable], bar: Bar) -> int:
    num_images = 0
    for _ in images:
        num_images += 1
        bar.advance()
    return num_images


def _findings(images: Iterable[str | Unreadable], num_workers: int, bar: Bar) -> Iterator[Finding]:
    loader = DataLoader(
        _Images(),
        batch_size=_BATCH_SIZE,
        sampler=images,
        num_workers=num_workers,
        buffer_size=2 * num_workers,
    )
    with loader:
        for findings in loader:
            bar.advance(len(findings))
            yield from filter(None, findings)
