"""A digest of indices, which tells whether a sampler draws the same ones again."""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
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
    """Return bytes that are the same in every process.

    Objects are told apart by their repr, without the addresses in it.
    """
    try:
        return array("q", [index]).tobytes()
    except (TypeError, OverflowError):
        pass
    if hasattr(index, "tolist"):  # Tensors and arrays.
        index = index.tolist()
    if isinstance(index, list | tuple):
        return b"[%b]" % b"".join(map(_bytes_of, index))
    if isinstance(index, set | frozenset):  # Strings have another order in each process.
        return b"{%b}" % b"".join(sorted(map(_bytes_of, index)))
    text = repr(index)
    if not isinstance(index, str | bytes):
        text = re.sub(" at 0x[0-9a-f]+", "", text)
    return text.encode()


def lasting(drawn: Any) -> Any:
    """Return what a sampler drew, so that it stays as it is.

    A sampler may change its list later, and an iterator is used up by the first who reads it.
    """
    return list(drawn) if isinstance(drawn, list | Iterator) else drawn
