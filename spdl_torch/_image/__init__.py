"""Image files to tensors: the bytes of a file, what is wanted of it, and FFmpeg."""

from ._file import ImageError
from ._loader import ImageLoader

__all__ = ["ImageError", "ImageLoader"]

# Where users find them, and what a traceback should say.
ImageError.__module__ = ImageLoader.__module__ = "spdl_torch"
