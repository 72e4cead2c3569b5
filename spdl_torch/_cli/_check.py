"""`spdl-torch check`: find the images that cannot be decoded."""

from __future__ import annotations

import argparse
import re
import time
from contextlib import suppress
from operator import itemgetter

import torch

from .. import DataLoader, ImageError, ImageLoader, StagedDataset
from ._images import FoundFile, images_at
from ._parser import CommandError
from ._screen import Screen, printable

_BATCH_SIZE = 8
"""Small, because the bytes of all files of a batch are in memory."""


def run(options: argparse.Namespace) -> int:
    """List the damaged images; the exit code is 1 if there are any."""
    screen = Screen(as_json=options.json)
    started_seconds = time.perf_counter()
    with screen.bar("counting images"):
        num_images = sum(1 for _ in images_at(options.path))
    if num_images == 0:
        raise CommandError(f"there are no images in {options.path}")
    damaged = []
    loader = DataLoader(
        _Images(),
        batch_size=_BATCH_SIZE,
        sampler=images_at(options.path),
        num_workers=options.workers,
        buffer_size=2 * options.workers,
        collate_fn=list,
    )
    with loader, screen.bar("checking images", num_images) as advance:
        for batch in loader:
            advance(len(batch))
            for path, problem in batch:
                if problem is not None:
                    damaged.append({"path": path, "reason": problem})
                    screen.say(f"{printable(path)}: {printable(problem)}")
    seconds = time.perf_counter() - started_seconds
    screen.remark(
        f"{num_images:,} checked, {len(damaged):,} damaged ({seconds:.1f} s)",
        style="red" if damaged else "green",
    )
    screen.document(
        path=options.path,
        num_images=num_images,
        num_damaged=len(damaged),
        seconds=seconds,
        damaged=sorted(damaged, key=itemgetter("path")),
    )
    return 1 if damaged else 0


class _Images(StagedDataset[FoundFile]):
    """A dataset whose indices are the files themselves. A sample is a file with its problem.

    The sampler walks through the folder, so there is no list of all files.
    """

    def __init__(self) -> None:
        self._loader = ImageLoader()
        # Decodes all the data of a JPEG to few pixels, in less time.
        self._quick_loader = ImageLoader((8, 8), reducing_gap=1)

    def load(self, index: FoundFile) -> tuple[FoundFile, bytes]:
        if index.problem is not None:
            return index, b""
        try:
            return index, self._loader.read(index.path)
        except OSError as error:
            return FoundFile(index.path, f"it cannot be read: {error.strerror}"), b""

    def preprocess(self, raw: tuple[FoundFile, bytes]) -> FoundFile:
        file, data = raw
        if file.problem is not None:
            return file
        try:
            self._check(data, file.path)
        except Exception as error:  # One file must not end the check of a million.
            problem = str(error).removeprefix(f"cannot decode {file.path}: ").removesuffix(".")
            is_expected = isinstance(error, ValueError)
            return FoundFile(
                file.path, problem if is_expected else f"{type(error).__name__}: {problem}"
            )
        return file

    def _check(self, data: bytes, path: str) -> None:
        """Decode an image; raise if it is damaged.

        A decoder stops with the last pixel. If bytes before that are damaged, it usually needs a
        few bits more than there are, or leaves some, and FFmpeg reports neither. So a JPEG is
        decoded with an end that a decoder must not read, and then with one that it must.
        """
        scan = _only_scan(data)
        if scan is None:
            self._loader.decode(data, path)
            return
        start, end = scan
        pixels = self._loader.decode(data[:end] + _ONES + data[end:], path)
        cut = end - _NUM_CUT
        if data[cut - 1] == 0xFF:  # A stuffed byte or the other half of a marker follows.
            cut -= 1
        if cut <= start:  # There are too few data to tell.
            return
        shortened = data[:cut] + _ONES + data[end:]
        try:
            self._quick_loader.decode(shortened)  # Fails for nearly every good image.
            is_same = torch.equal(self._loader.decode(shortened), pixels)
        except ImageError:
            return
        if is_same:
            raise ImageError("it is a JPEG whose image data go on when the image is complete")


# -- the image data in a JPEG ----------------------------------------------------------------------

_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_SEQUENTIAL = {0xC0, 0xC1}
_OTHER_FRAMES = set(range(0xC2, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker that is neither a stuffed byte nor a restart."""
_ONES = b"\xff\0" * 64
"""Stuffed bytes of ones. No Huffman code has only ones, so a decoder that reads them fails."""
_NUM_CUT = 16
"""Number of bytes in which at least one code begins."""


def _only_scan(data: bytes) -> tuple[int, int] | None:
    """Return where the image data of a JPEG begin and end, if one scan has all its channels.

    None for other files, truncated ones, and several scans.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    position, num_channels = 2, 0
    with suppress(IndexError):  # A file may end in its header.
        while data[position] == 0xFF:
            marker = data[position + 1]
            if marker == 0xFF:  # There may be any number of these before a marker.
                position += 1
                continue
            segment = position + 4
            position += 2 + int.from_bytes(data[position + 2 : segment], "big")
            if marker in _OTHER_FRAMES:
                return None
            if marker in _SEQUENTIAL:
                num_channels = data[segment + 5]
            elif marker == _START_OF_SCAN:
                end = _END_OF_SCAN.search(data, position)
                if end is None or end[0][1] != _END_OF_IMAGE or data[segment] != num_channels:
                    return None
                return position, end.start()
    return None
