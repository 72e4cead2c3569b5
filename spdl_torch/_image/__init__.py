"""Image files to tensors, decoded and resized by FFmpeg."""

from ._file import ImageError
from ._loader import ImageLoader

__all__ = ["ImageError", "ImageLoader"]
