"""Image files to tensors, decoded and resized by FFmpeg."""

from ._file import ImageError
from ._geometry import Box, Plan, Size, center_box, random_box, resized
from ._loader import Decoding, ImageLoader, WholeImage, decoded, rendered, whole

__all__ = [
    "Box",
    "Decoding",
    "ImageError",
    "ImageLoader",
    "Plan",
    "Size",
    "WholeImage",
    "center_box",
    "decoded",
    "random_box",
    "rendered",
    "resized",
    "whole",
]
