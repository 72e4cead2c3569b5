"""Values to bytes and back: what `load` or `preprocess` returned, as it lies in the cache.

A value is `bytes`, which lie there as they are, or a pickle and the memory of its large arrays and
tensors. What is read from a directory may have been written by anyone who can write there, so its
pickles may only name what is listed here: data, and no functions that do anything else.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import torch

from .._batch_pickle import pickle_batch
from ._space import Bytes

_MIN_LARGE: Final = 512
"""The number of bytes from which the memory of an array or tensor is beside the pickle."""
_ALIGNMENT: Final = 64
_COUNTS: Final = struct.Struct("<II")

_DATA: Final = {
    "PIL.Image": {"Image"},
    "builtins": {
        *("bytearray", "bytes", "complex", "frozenset", "list", "dict", "set", "tuple", "object"),
        *("range", "slice", "ValueError", "OSError", "TypeError", "RuntimeError", "SyntaxError"),
    },
    "PIL": {"UnidentifiedImageError"},
    "collections": {"OrderedDict"},
    "datetime": {"date", "datetime", "timedelta"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "pathlib": {"Path", "PosixPath"},
    "spdl_torch": {"ImageError"},
    "spdl_torch._batch_pickle": {"_set_state", "tensor_of"},
    "spdl_torch._cache._codec": {"_picture"},
    "spdl_torch._image._ffmpeg": {"Output"},
    "spdl_torch._image._geometry": {"Orientation"},
    "spdl_torch._image._loader": {"WholeImage"},
    "torch": {
        "Size",
        "Tensor",
        *(str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)),
    },
    "torchvision.tv_tensors._bounding_boxes": {"BoundingBoxFormat", "BoundingBoxes"},
    "torchvision.tv_tensors._image": {"Image"},
    "torchvision.tv_tensors._mask": {"Mask"},
    "torchvision.tv_tensors._video": {"Video"},
}
"""What a pickle in a directory may name, by its module."""


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _DATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a cache in a directory keeps no {module}.{name}")


def encoded(value: Any, *, is_shared: bool) -> list[Any] | None:
    """Return the buffers that a value consists of in the cache; None: it cannot be there.

    A value for a directory (`is_shared`) is read again, to see that it can be.
    """
    if type(value) is bytes:
        return [_COUNTS.pack(0, 0), value]
    try:
        pickled, large = pickle_batch(_reduced(value), min_large=_MIN_LARGE)
        if is_shared:
            _SafeUnpickler(io.BytesIO(pickled), buffers=large).load()
    except Exception:  # Of the user's code too.
        return None
    sizes = struct.pack(f"<{len(large)}Q", *(memory.size for memory in large))
    head = [_COUNTS.pack(1 + len(large), len(pickled)), sizes, pickled]
    parts: list[Any] = [b"".join(head)]
    at = len(parts[0])
    for memory in large:
        gap = -at % _ALIGNMENT
        parts += [bytes(gap), memory]
        at += gap + memory.size
    return [part for part in parts if len(part)]


def joined(buffers: Sequence[Any]) -> bytes:
    return b"".join(buffers)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values consist of the same bytes, or cannot be in the cache."""
    if (first := encoded(one, is_shared=False)) is None:
        return True
    second = encoded(other, is_shared=False)
    return second is not None and joined(first) == joined(second)


def decoded(memory: Bytes, *, is_shared: bool, copies: bool) -> Any:
    """Return the value that lies in some memory. Without `copies` it may be a view of it."""
    num_parts, pickle_bytes = _COUNTS.unpack_from(memory.data)
    at = _COUNTS.size
    if num_parts == 0:
        return memory[at:].tobytes()
    sizes: Sequence[int] = struct.unpack_from(f"<{num_parts - 1}Q", memory.data, at)
    at += 8 * len(sizes)
    pickled = io.BytesIO(memory.data[at : at + pickle_bytes])
    at += pickle_bytes
    buffers = []
    for size in sizes:
        at += -at % _ALIGNMENT
        part = memory[at : at + size]
        buffers.append(part.copy() if copies else part)
        at += size
    unpickler = _SafeUnpickler if is_shared else pickle.Unpickler
    return unpickler(pickled, buffers=buffers).load()


def _reduced(value: Any) -> Any:
    """Replace PIL images, whose pickles have their pixels in the pickle itself."""
    kind = type(value)
    if kind.__module__ == "PIL.Image" and kind.__name__ == "Image" and value.mode in {"L", "RGB"}:
        return _Picture(value)
    if kind is tuple:
        return tuple(map(_reduced, value))
    return value


class _Picture:
    """A PIL image on its way into a pickle."""

    def __init__(self, image: Any) -> None:
        self._image = image

    def __reduce__(self) -> Any:
        image = self._image
        pixels = np.frombuffer(image.tobytes(), np.uint8)
        return _picture, (image.mode, image.size, pixels, _plain_items(image.info))


def _picture(mode: str, size: tuple[int, int], pixels: Any, info: dict[str, Any]) -> Any:
    from PIL import Image  # noqa: PLC0415 (not all datasets have images)

    image = Image.frombytes(mode, size, pixels)
    image.info = cast(Any, info)
    return image


def _plain_items(info: dict[Any, Any]) -> dict[str, Any]:
    """Return the notes of an image file that are of plain types."""
    return {
        name: value
        for name, value in info.items()
        if isinstance(name, str) and type(value) in (bool, int, float, str, bytes)
    }
