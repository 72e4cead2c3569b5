"""Image files to tensors, decoded and resized by FFmpeg."""

from ._file import ImageError
from ._geometry import Box, Plan, Size, center_box, random_box, resized
from ._loader import Decoding, ImageLoader, decoded

__all__ = [
    "Box",
    "Decoding",
    "ImageError",
    "ImageLoader",
    "Plan",
    "Size",
    "center_box",
    "decoded",
    "random_box",
    "resized",
]
