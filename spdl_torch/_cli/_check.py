"""`spdl-torch check`: find the images that cannot be decoded."""

from __future__ import annotations

import argparse
import time
from operator import itemgetter
from typing import Any

import torch

from .. import DataLoader, ImageError, ImageLoader, StagedDataset
from ._images import Unreadable, images_at
from ._jpeg import only_scan
from ._parser import CommandError
from ._screen import Screen, printable

__all__ = ["run"]

_BATCH_SIZE = 8
"""Small, because the bytes of all files of a batch are in memory."""


def run(options: argparse.Namespace) -> int:
    """List the damaged images; the exit code is 1 if there are any."""
    screen = Screen(as_json=options.json)
    started_seconds = time.perf_counter()
    num_images = num_damaged = 0
    with screen.bar("counting", unit="images") as advance:
        for _ in images_at(options.path):
            num_images += 1
            advance()
    if num_images == 0:
        raise CommandError(f"there are no images in {options.path}")
    damaged = []
    loader = DataLoader(
        _Images(),
        batch_size=_BATCH_SIZE,
        sampler=images_at(options.path),
        num_workers=options.workers,
        buffer_size=2 * options.workers,
    )
    with loader, screen.bar("checking", num_images, "images") as advance:
        for batch in loader:
            advance(len(batch))
            for path, reason in filter(None, batch):
                num_damaged += 1
                if options.json:  # Otherwise it is printed now and need not be kept.
                    damaged.append({"path": path, "reason": reason})
                screen.say(f"{printable(path)}: {printable(reason)}")
    seconds = time.perf_counter() - started_seconds
    screen.remark(
        f"{num_images:,} checked, {num_damaged:,} damaged ({seconds:.1f} s)",
        style="red" if num_damaged else "green",
    )
    screen.document(
        {
            "path": options.path,
            "num_images": num_images,
            "num_damaged": num_damaged,
            "seconds": seconds,
            "damaged": sorted(damaged, key=itemgetter("path")),
        }
    )
    return 1 if num_damaged else 0


class _Images(StagedDataset[Unreadable | None]):
    """What is wrong with the image at a path, which is its index; None for a good image.

    The sampler walks through the folder, so there is no list of all files.
    """

    def __init__(self) -> None:
        self._loader = ImageLoader()
        # Decodes all the data of a JPEG to few pixels, in less time.
        self._quick_loader = ImageLoader((8, 8), reducing_gap=1)

    def load(self, index: str | Unreadable) -> tuple[str, bytes] | Unreadable:
        if isinstance(index, Unreadable):
            return index
        try:
            return index, self._loader.read(index)
        except OSError as error:
            return Unreadable(index, f"it cannot be read: {error.strerror}")

    def preprocess(self, raw: tuple[str, bytes] | Unreadable) -> Unreadable | None:
        if isinstance(raw, Unreadable):
            return raw
        path, data = raw
        try:
            self._check(data, path)
        except Exception as error:  # One file must not end the check of a million.
            reason = str(error).removeprefix(f"cannot decode {path}: ").removesuffix(".")
            is_expected = isinstance(error, ValueError)
            return Unreadable(path, reason if is_expected else f"{type(error).__name__}: {reason}")
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
        if shortened is None:
            return
        try:
            self._quick_loader.decode(shortened)  # Fails for nearly every good image.
            is_same = torch.equal(self._loader.decode(shortened), pixels)
        except ImageError:
            return
        if is_same:
            raise ImageError("it is a JPEG whose image data go on when the image is complete")
