"""Which pixels of a stored image become which pixels of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]

__all__ = ["Box", "Orientation", "Plan", "center_box", "resized"]

Size = tuple[int, int]
"""(height, width)"""


class Box(NamedTuple):
    """A part of an image."""

    top: int
    left: int
    height: int
    width: int

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
        height, width = self.seen_size if self.box is None else self.box[2:]
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
