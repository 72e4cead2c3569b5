"""What the bytes of an image file say before they are decoded.

FFmpeg's decoders are strict or lenient as a whole: one that is told to stop at an error also stops
at a comment that it cannot read, and one that goes on gives half an image. So we ask for the strict
one, and take out of a file what does not matter to its pixels.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ._geometry import Size

__all__ = ["ImageError", "ImageFile", "parsed"]


class ImageError(ValueError):
    """A file that is no image, that is damaged, or that FFmpeg cannot decode."""


class ImageFile(NamedTuple):
    """The image in a file."""

    codec: str
    """The name of FFmpeg's decoder."""
    size: Size | None
    """(height, width) as the header claims; None if it does not say."""
    encoded: bytes
    """What FFmpeg should see: the first image alone, without what does not make pixels."""
    has_alpha: bool = True
    """False if the file has no alpha channel even if FFmpeg decodes one."""
    has_own_tables: bool = True
    """False for a JPEG that means to be decoded with the tables of another."""

    @property
    def name(self) -> str:
        """What people call the format."""
        return "JPEG" if self.codec == "mjpeg" else self.codec.upper()


def parsed(data: bytes) -> ImageFile:
    """The image in a file, recognised by its first bytes. Raises if the file ends too early."""
    for signature, parse in _PARSERS.items():
        if data.startswith(signature):
            try:
                return parse(data)
            except (struct.error, IndexError):
                raise _truncated(data) from None
    if not data:
        raise ImageError("it is empty")
    raise ImageError(
        f"it is no JPEG, PNG, WebP, GIF, BMP or TIFF image: it begins with {data[:12]!r}"
    )


def _truncated(data: bytes) -> ImageError:
    return ImageError(f"it is truncated: its {len(data):,} bytes end before the image does")


# -- JPEG ------------------------------------------------------------------------------------------

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""A marker, not a stuffed byte, a restart within the image, or a fill byte."""
_HUFFMAN_TABLES, _QUANTISATION_TABLES = 0xC4, 0xDB
_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITHOUT_LENGTH = {0x01, 0xD8, _END_OF_IMAGE}
_FRAME_HEADERS = set(range(0xC0, 0xD0)) - {_HUFFMAN_TABLES, 0xC8, 0xCC}
_APPLICATIONS_AND_COMMENT = {*range(0xE0, 0xF0), 0xFE}


def _parse_jpeg(data: bytes) -> ImageFile:
    # Nearly every file ends with the marker. Others have something behind it, such as a second
    # image or a film, and what is behind it may contain anything.
    if not data.endswith(b"\xff\xd9") and _END_OF_IMAGE not in dict(_jpeg_segments(data)):
        raise _truncated(data)
    size, tables, pieces, start = None, set(), [], 0
    for marker, position in _jpeg_segments(data):
        if marker == _SCAN:
            break
        if marker in _FRAME_HEADERS:
            precision, *size = struct.unpack_from(">BHH", data, position + 2)
            if precision != 8:
                raise ImageError(
                    f"it is a JPEG of {precision} bits, and FFmpeg decodes those of 8 bits alone"
                )
        elif marker in _APPLICATIONS_AND_COMMENT:
            # FFmpeg takes orders from some of them, to turn the image or its fields, and remembers
            # them for the next file. Only Adobe's says what the colours are.
            if data[position + 2 : position + 7] not in {b"JFIF\0", b"Adobe"}:
                pieces.append(data[start : position - 2])
                start = position + int.from_bytes(data[position : position + 2], "big")
        else:
            tables.add(marker)
    return ImageFile(
        "mjpeg",
        (size[0], size[1]) if size and all(size) else None,
        b"".join([*pieces, data[start:]]) if pieces else data,
        has_alpha=False,
        has_own_tables=tables >= {_HUFFMAN_TABLES, _QUANTISATION_TABLES},
    )


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """The markers and where their segments begin, up to the end of the image."""
    position = 2
    while (match := _MARKER.search(data, position)) is not None:
        position = match.end()
        marker = data[position - 1]
        yield marker, position
        if marker == _END_OF_IMAGE:
            return
        if marker not in _WITHOUT_LENGTH:
            position += int.from_bytes(data[position : position + 2], "big")


# -- PNG -------------------------------------------------------------------------------------------


def _parse_png(data: bytes) -> ImageFile:
    width, height = struct.unpack_from(">II", data, 16)
    chunks = [data[:8]]
    position = 8
    while True:
        length, name = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            raise _truncated(data)
        # Comments, profiles and further frames begin with a small letter. tRNS makes alpha.
        if name[:1].isupper() or name == b"tRNS":
            chunks.append(data[position:end])
        if name == b"IEND":
            return ImageFile("png", (height, width), b"".join(chunks))
        position = end


# -- GIF -------------------------------------------------------------------------------------------


def _parse_gif(data: bytes) -> ImageFile:
    """The first frame, with no colour transparent.

    Pixels of the transparent colour then have that colour, as PIL gives them, and those that are
    transparent nevertheless were not in the file.
    """
    gif = bytearray(data)
    width, height = struct.unpack_from("<HH", data, 6)
    position = 13 + _gif_palette_bytes(gif[10])
    while gif[position] == ord("!"):
        if gif[position + 1] == 0xF9:
            gif[position + 3] &= ~1
        position = _after_gif_blocks(gif, position + 2)
    if gif[position] != ord(","):
        raise ImageError("it is a GIF without an image")
    position += 10 + _gif_palette_bytes(gif[position + 9])
    end = _after_gif_blocks(gif, position + 1)
    if end > len(gif):
        raise _truncated(data)
    return ImageFile("gif", (height, width), bytes(gif[:end]) + b";", has_alpha=False)


def _gif_palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _after_gif_blocks(gif: bytearray, position: int) -> int:
    while gif[position]:
        position += gif[position] + 1
    return position + 1


# -- BMP -------------------------------------------------------------------------------------------


def _parse_bmp(data: bytes) -> ImageFile:
    pixels_at, header_bytes = struct.unpack_from("<II", data, 10)
    compression = 0
    if header_bytes == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    else:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
    height = abs(height)
    is_plain = compression in {0, 3, 6}
    if is_plain and pixels_at + (width * bits + 31) // 32 * 4 * height > len(data):
        # FFmpeg would believe that the rows are not padded.
        raise _truncated(data)
    return ImageFile("bmp", (height, width), data, has_alpha=False)


# -- WebP ------------------------------------------------------------------------------------------


def _parse_webp(data: bytes) -> ImageFile:
    kind = data[12:16]
    if data[8:12] != b"WEBP":
        raise ImageError("it is no image but another RIFF file")
    has_alpha = False
    if kind == b"VP8X":
        flags, width, height = data[20], _int24(data, 24) + 1, _int24(data, 27) + 1
        has_alpha = bool(flags & 0x10)
        if flags & 0x02:
            raise ImageError("it is an animated WebP, which FFmpeg cannot decode")
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        has_alpha = bool(bits >> 28 & 1)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    return ImageFile("webp", (height, width), data, has_alpha=has_alpha)


def _int24(data: bytes, position: int) -> int:
    low, high = struct.unpack_from("<HB", data, position)
    return int(low | high << 16)


# -- TIFF ------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _COMPRESSION = 256, 257, 259
_PIXEL_TAGS = {
    *(_WIDTH, _HEIGHT, _COMPRESSION, 258, 262, 266),  # bits, colours, order of bits
    *(273, 277, 278, 279, 284),  # strips, samples, planes
    *(292, 293, 317, 320),  # fax options, predictor, palette
    *(322, 323, 324, 325),  # tiles
    *(530, 532),  # chroma
}


def _parse_tiff(data: bytes) -> ImageFile:
    order = "<" if data.startswith(b"II") else ">"
    (directory,) = struct.unpack_from(order + "I", data, 4)
    (num_entries,) = struct.unpack_from(order + "H", data, directory)
    start = directory + 2
    end = start + 12 * num_entries
    if end > len(data):
        raise _truncated(data)
    values, kept = {}, []
    for position in range(start, end, 12):
        tag, kind = struct.unpack_from(order + "HH", data, position)
        (values[tag],) = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, position + 8)
        if tag in _PIXEL_TAGS:
            kept.append(data[position : position + 12])
    if values.get(_COMPRESSION) in {6, 7}:
        # FFmpeg would give a black image.
        raise ImageError("it is a TIFF with JPEG inside, which FFmpeg cannot decode")
    tiff = bytearray(data)
    struct.pack_into(order + "H", tiff, directory, len(kept))
    # Behind the entries stands where the next image is: nowhere.
    entries = b"".join([*kept, bytes(4)])
    tiff[start : start + len(entries)] = entries
    size = None
    if _HEIGHT in values and _WIDTH in values:
        size = values[_HEIGHT], values[_WIDTH]
    return ImageFile("tiff", size, bytes(tiff))


_PARSERS = {
    b"\xff\xd8\xff": _parse_jpeg,
    b"\x89PNG\r\n\x1a\n": _parse_png,
    b"RIFF": _parse_webp,
    b"GIF87a": _parse_gif,
    b"GIF89a": _parse_gif,
    b"BM": _parse_bmp,
    b"II*\0": _parse_tiff,
    b"MM\0*": _parse_tiff,
}
