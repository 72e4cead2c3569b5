"""A digest of indices, which tells whether a sampler draws the same ones again."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any


def digest_of(indices: Sequence[Any], before: int = 0) -> int:
    """Return the digest of indices behind others that have the digest `before`.

    It does not depend on how the indices are divided into parts, because the batch size may differ
    when an epoch is resumed.
    """
    try:
        data = array("q", indices).tobytes()
    except (TypeError, OverflowError):
        data = b"".join(map(_bytes_of, indices))
    return zlib.crc32(data, before)


def _bytes_of(index: Any) -> bytes:
    """Return bytes that are the same in every process."""
    try:
        return array("q", [index]).tobytes()
    except (TypeError, OverflowError):
        pass
    if hasattr(index, "tolist"):  # Tensors and arrays.
        index = index.tolist()
    if isinstance(index, list | tuple):
        return b"[%b]" % b"".join(map(_bytes_of, index))
    if isinstance(index, str | bytes | int | float | None):
        return repr(index).encode()
    return type(index).__name__.encode()  # The text of other objects may have their address.
