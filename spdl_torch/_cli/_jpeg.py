"""Damage that a JPEG decoder does not notice: image data that end too early, or too late.

A decoder stops with the last pixel. If bytes before that are damaged, it usually needs a few bits
more than there are, or leaves some, and FFmpeg reports neither. So `check` decodes the file with an
end that a decoder must not read, and then with one that it must.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Scan", "only_scan"]

_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_SEQUENTIAL = {0xC0, 0xC1}
_OTHER_FRAMES = set(range(0xC2, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker that is neither a stuffed byte nor a restart."""
_ONES = b"\xff\0" * 64
"""Stuffed bytes of ones. No Huffman code has only ones, so a decoder that reads them fails."""
_NUM_CUT = 16
"""Number of bytes in which at least one code begins."""


class Scan(NamedTuple):
    """The position of the image data in a JPEG that has one scan for all its channels."""

    start: int
    end: int

    def with_tripwire(self, data: bytes) -> bytes:
        """Return a file of the same pixels, unless a decoder needs more data than there are."""
        return data[: self.end] + _ONES + data[self.end :]

    def shortened(self, data: bytes) -> bytes | None:
        """Return a file of other pixels or none, unless there are more data than a decoder needs.

        None if there are too few to tell.
        """
        cut = self.end - _NUM_CUT
        if data[cut - 1] == 0xFF:  # A stuffed byte or the other half of a marker follows.
            cut -= 1
        return data[:cut] + _ONES + data[self.end :] if cut > self.start else None


def only_scan(data: bytes) -> Scan | None:
    """Return the scan of a JPEG; None for other files, truncated ones, and several scans."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        return _only_scan(data)
    except IndexError:  # It ends in its header.
        return None


def _only_scan(data: bytes) -> Scan | None:
    position, num_channels = 2, 0
    while data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # There may be any number of these before a marker.
            position += 1
            continue
        segment = position + 4
        position += 2 + int.from_bytes(data[position + 2 : segment], "big")
        if marker in _OTHER_FRAMES:
            return None
        if marker in _SEQUENTIAL:
            num_channels = data[segment + 5]
        elif marker == _START_OF_SCAN:
            end = _END_OF_SCAN.search(data, position)
            if end is None or end[0][1] != _END_OF_IMAGE or data[segment] != num_channels:
                return None
            return Scan(position, end.start())
    return None
