"""Which pixels of a stored image become which pixels of the result."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]

__all__ = [
    "Box",
    "Grid",
    "Orientation",
    "Plan",
    "Size",
    "center_box",
    "in_words",
    "random_box",
    "resized",
]

Size = tuple[int, int]
"""(height, width)"""


class Box(NamedTuple):
    """A part of an image."""

    top: int
    left: int
    height: int
    width: int

    @property
    def size(self) -> Size:
        return self.height, self.width

    def within(self, outer: Box) -> Box:
        """The same part as seen from a box around it."""
        return self._replace(top=self.top - outer.top, left=self.left - outer.left)

    def of(self, pixels: Pixels) -> Pixels:
        """The part of a channel."""
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]

    def reduced(self, reduction: int, size: Size) -> Box:
        """The same part of an image of which each side was halved `reduction` times, to `size`."""
        half = (1 << reduction) // 2
        top = min(self.top + half >> reduction, size[0] - 1)
        left = min(self.left + half >> reduction, size[1] - 1)
        bottom = min(self.top + self.height + half >> reduction, size[0])
        right = min(self.left + self.width + half >> reduction, size[1])
        return Box(top, left, max(1, bottom - top), max(1, right - left))


class Grid(NamedTuple):
    """Where an image can be cut whose chroma has one sample for several pixels."""

    row_shift: int = 0
    """So often is the number of rows halved."""
    column_shift: int = 0

    def fits(self, box: Box) -> bool:
        rows, columns = self._steps()
        top, left, height, width = box
        return (top | height) % rows == 0 and (left | width) % columns == 0

    def around(self, box: Box, within: Box) -> Box:
        """The box on the grid around a box, and a chroma sample more on each side if possible."""
        rows, columns = self._steps()
        return self._from_lines(
            max(0, (box.top >> self.row_shift) - 1),
            max(0, (box.left >> self.column_shift) - 1),
            min(box.top + box.height + rows, within.height) + rows - 1 >> self.row_shift,
            min(box.left + box.width + columns, within.width) + columns - 1 >> self.column_shift,
        )

    def of_plane(self, box: Box, plane: int) -> Box:
        """Where a box on the grid is in a plane; the second and third have chroma."""
        if plane not in {1, 2}:
            return box
        return Box(
            box.top >> self.row_shift,
            box.left >> self.column_shift,
            box.height >> self.row_shift,
            box.width >> self.column_shift,
        )

    def _steps(self) -> tuple[int, int]:
        return 1 << self.row_shift, 1 << self.column_shift

    def _from_lines(self, top: int, left: int, bottom: int, right: int) -> Box:
        return Box(
            top << self.row_shift,
            left << self.column_shift,
            bottom - top << self.row_shift,
            right - left << self.column_shift,
        )


class Plan(NamedTuple):
    """What is to be done to an image, in this order, and meant as a viewer sees the image."""

    seen_size: Size
    box: Box | None
    """Cut out this part; None: all of it."""
    size: Size
    """Resize it to this."""
    center: Box | None
    """Keep this part."""
    is_mirrored: bool

    def reduction(self, gap: float) -> int:
        """How often each side may be halved in decoding, so that `gap` times the size is left."""
        height, width = self.seen_size if self.box is None else self.box.size
        reserve = min(height / self.size[0], width / self.size[1]) / gap
        # FFmpeg takes longer to decode at a half than to decode everything.
        return 3 if reserve >= 8 else 2 if reserve >= 4 else 0


class Orientation(NamedTuple):
    """How a stored image must be turned to be seen as it was taken: transposed, then reversed."""

    is_transposed: bool = False
    rows_are_reversed: bool = False
    columns_are_reversed: bool = False

    @classmethod
    def of_exif(cls, number: int) -> Orientation:
        """From the EXIF entry, 1 to 8; others mean nothing."""
        if not 1 <= number <= 8:
            number = 1
        return cls(number in {5, 6, 7, 8}, number in {3, 4, 7, 8}, number in {2, 3, 6, 7})

    @property
    def is_as_stored(self) -> bool:
        return not any(self)

    def seen_size(self, size: Size) -> Size:
        """The size as seen of a stored image, and the other way round."""
        return size[::-1] if self.is_transposed else size

    def stored_box(self, box: Box, seen: Size) -> Box:
        """Where a part of an image that is seen in size `seen` is stored."""
        top, left, height, width = box
        if self.rows_are_reversed:
            top = seen[0] - top - height
        if self.columns_are_reversed:
            left = seen[1] - left - width
        return (
            Box(left, top, width, height) if self.is_transposed else Box(top, left, height, width)
        )

    def seen(self, pixels: Pixels) -> Pixels:
        """The stored pixels of a channel as they are seen."""
        if self.is_transposed:
            pixels = pixels.T
        if self.rows_are_reversed:
            pixels = pixels[::-1]
        return pixels[:, ::-1] if self.columns_are_reversed else pixels


def resized(size: Size, shorter_side: int) -> Size:
    """The size of an image after torchvision's `Resize(shorter_side)`."""
    height, width = size
    if height <= width:
        return shorter_side, int(shorter_side * width / height)
    return int(shorter_side * height / width), shorter_side


def center_box(size: Size, kept: Size) -> Box:
    """The part that torchvision's `CenterCrop(kept)` takes."""
    top = round((size[0] - kept[0]) / 2)
    left = round((size[1] - kept[1]) / 2)
    return Box(top, left, *kept)


def random_box(
    size: Size,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator | None = None,
) -> Box:
    """The part that torchvision's `RandomResizedCrop` takes, by the same random numbers.

    Written anew because torchvision's takes several times as long, which shows beside decoding.
    """
    height, width = size
    log_ratio = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        share, position = torch.rand(2, generator=generator).tolist()
        area = height * width * (scale[0] + share * (scale[1] - scale[0]))
        aspect = math.exp(log_ratio[0] + position * (log_ratio[1] - log_ratio[0]))
        box_width = round(math.sqrt(area * aspect))
        box_height = round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = torch.randint(0, height - box_height + 1, (1,), generator=generator).item()
            left = torch.randint(0, width - box_width + 1, (1,), generator=generator).item()
            return Box(int(top), int(left), box_height, box_width)
    # No luck: the largest part in the middle whose ratio is allowed.
    box_width = min(width, round(height * ratio[1]))
    box_height = min(height, round(width / ratio[0]))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def in_words(size: Size) -> str:
    """As people write it: width × height."""
    return f"{size[1]:,}×{size[0]:,}"
