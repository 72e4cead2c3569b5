"""Crops, sizes and orientations: which stored pixels become which pixels of the result."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Size: TypeAlias = tuple[int, int]
"""(height, width)"""
Pixels: TypeAlias = npt.NDArray[np.uint8]


class Box(NamedTuple):
    """A rectangle of an image."""

    top: int
    left: int
    height: int
    width: int

    @property
    def size(self) -> Size:
        return self.height, self.width

    def within(self, outer: Box) -> Box:
        """Return this box relative to a box around it."""
        return self._replace(top=self.top - outer.top, left=self.left - outer.left)

    def of(self, pixels: Pixels) -> Pixels:
        """Return this part of a channel."""
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]

    def reduced(self, reduction: int, size: Size) -> Box:
        """Return the same part of an image whose sides were halved `reduction` times, to `size`."""
        half = (1 << reduction) // 2
        top = min(self.top + half >> reduction, size[0] - 1)
        left = min(self.left + half >> reduction, size[1] - 1)
        bottom = min(self.top + self.height + half >> reduction, size[0])
        right = min(self.left + self.width + half >> reduction, size[1])
        return Box(top, left, max(1, bottom - top), max(1, right - left))

    def scaled(self, size: Size, stored: Size) -> Box:
        """Return the same part of an image of a size that is stored in another size."""
        if size == stored:
            return self
        rows, columns = stored[0] / size[0], stored[1] / size[1]
        top = min(round(self.top * rows), stored[0] - 1)
        left = min(round(self.left * columns), stored[1] - 1)
        bottom = min(round((self.top + self.height) * rows), stored[0])
        right = min(round((self.left + self.width) * columns), stored[1])
        return Box(top, left, max(1, bottom - top), max(1, right - left))


class Grid(NamedTuple):
    """The positions at which an image with subsampled chroma can be cut."""

    rows: int = 1
    """How many rows of pixels share a row of chroma."""
    columns: int = 1

    def fits(self, box: Box) -> bool:
        top, left, height, width = box
        return (top | height) % self.rows == 0 and (left | width) % self.columns == 0

    def around(self, box: Box, size: Size) -> Box:
        """Return the box on the grid around a box, with one more chroma sample on each side.

        It may end less than a chroma sample beyond the edges of the image, whose size is `size`.
        """
        rows, columns = self
        top = max(0, box.top // rows - 1) * rows
        left = max(0, box.left // columns - 1) * columns
        # Rounded up.
        bottom = -(-min(box.top + box.height + rows, size[0]) // rows) * rows
        right = -(-min(box.left + box.width + columns, size[1]) // columns) * columns
        return Box(top, left, bottom - top, right - left)

    def of_plane(self, box: Box, plane: int) -> Box:
        """Return a box on the grid in the coordinates of a plane; planes 1 and 2 are chroma."""
        if plane not in {1, 2}:
            return box
        rows, columns = self
        return Box(box.top // rows, box.left // columns, box.height // rows, box.width // columns)


class Plan(NamedTuple):
    """The steps of one image in their order, in the coordinates that a viewer sees."""

    seen_size: Size
    box: Box | None
    """Crop to this part; None: keep all."""
    size: Size
    """Resize to this."""
    center: Box | None
    """Keep this part."""
    is_mirrored: bool

    def reduction(self, gap: float) -> int:
        """Return how often decoding may halve each side and still leave `gap` times the size."""
        height, width = self.seen_size if self.box is None else self.box.size
        reserve = min(height / self.size[0], width / self.size[1]) / gap
        # Decoding at half size takes FFmpeg longer than decoding at full size.
        return 3 if reserve >= 8 else 2 if reserve >= 4 else 0


class Orientation(NamedTuple):
    """How to turn a stored image upright: transpose it, then reverse rows and columns."""

    is_transposed: bool = False
    rows_are_reversed: bool = False
    columns_are_reversed: bool = False

    @classmethod
    def of_exif(cls, number: int) -> Orientation:
        """Return the orientation of an EXIF entry, 1 to 8; other numbers mean 1."""
        return cls(number in {5, 6, 7, 8}, number in {3, 4, 7, 8}, number in {2, 3, 6, 7})

    def seen_size(self, size: Size) -> Size:
        """Return the upright size for a stored size, or the stored size for an upright one."""
        return size[::-1] if self.is_transposed else size

    def stored_box(self, box: Box, seen: Size) -> Box:
        """Return the stored box for a box of the upright image of size `seen`."""
        top, left, height, width = box
        if self.rows_are_reversed:
            top = seen[0] - top - height
        if self.columns_are_reversed:
            left = seen[1] - left - width
        if self.is_transposed:
            return Box(left, top, width, height)
        return Box(top, left, height, width)

    def seen(self, pixels: Pixels) -> Pixels:
        """Return the stored pixels of a channel turned upright."""
        if self.is_transposed:
            pixels = pixels.T
        if self.rows_are_reversed:
            pixels = pixels[::-1]
        return pixels[:, ::-1] if self.columns_are_reversed else pixels


def resized(size: Size, shorter_side: int) -> Size:
    """Return the size of an image after torchvision's `Resize(shorter_side)`."""
    height, width = size
    if height <= width:
        return shorter_side, int(shorter_side * width / height)
    return int(shorter_side * height / width), shorter_side


def center_box(size: Size, kept: Size) -> Box:
    """Return the part that torchvision's `CenterCrop(kept)` keeps."""
    top = round((size[0] - kept[0]) / 2)
    left = round((size[1] - kept[1]) / 2)
    return Box(top, left, *kept)


def random_box(
    size: Size,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator | None = None,
) -> Box:
    """Return the part that torchvision's `RandomResizedCrop` takes, from the same random numbers.

    torchvision's own takes several times as long, which is noticeable beside decoding.
    """
    height, width = size
    least_log, largest_log = _log_ratio(ratio)
    number = torch.empty(1)
    for _ in range(10):
        # In float32, as torchvision: otherwise a box would now and then differ by a pixel.
        area = height * width * number.uniform_(*scale, generator=generator).item()
        aspect = number.uniform_(least_log, largest_log, generator=generator).exp_().item()
        box_width = round(math.sqrt(area * aspect))
        box_height = round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = torch.randint(0, height - box_height + 1, (1,), generator=generator).item()
            left = torch.randint(0, width - box_width + 1, (1,), generator=generator).item()
            return Box(int(top), int(left), box_height, box_width)
    # No draw fits: the largest part in the middle whose ratio is allowed.
    box_width = min(width, round(height * ratio[1]))
    box_height = min(height, round(width / ratio[0]))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


@lru_cache(maxsize=64)
def _log_ratio(ratio: tuple[float, float]) -> tuple[float, float]:
    least, largest = torch.log(torch.tensor(ratio)).tolist()
    return least, largest


def in_words(size: Size) -> str:
    """Return the size as text: width × height."""
    return f"{size[1]:,}×{size[0]:,}"
