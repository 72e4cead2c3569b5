"""Parse the header of an image file, before FFmpeg decodes it.

FFmpeg's decoders are either strict or lenient: a strict one also fails at a comment that it cannot
read, and a lenient one returns half an image. So the decoder is strict, and everything that does
not affect the pixels is removed from the file first.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ._geometry import Box, Size, in_words


class ImageError(ValueError):
    """Raised for a file that is no image, that is damaged, or that FFmpeg cannot decode.

    >>> ImageLoader().decode(b"")
    Traceback (most recent call last):
    spdl_torch.ImageError: cannot decode image: it is empty.
    """

    __module__ = "spdl_torch"


class ImageFile(NamedTuple):
    """The image in a file."""

    codec: str
    """The name of FFmpeg's decoder."""
    size: Size | None
    """(height, width) according to the header; None if the header has no size."""
    encoded: bytes
    """The bytes for FFmpeg: the first image only, without what does not affect its pixels."""
    exif: bytes = b""
    can_be_reduced: bool = False
    """FFmpeg can decode it at a fraction of its size."""
    has_own_tables: bool = False
    """A JPEG in one scan, whose pixels do not depend on earlier files of the same decoder."""
    height_at: int = 0
    """Offset of the height in the bytes of a JPEG."""
    has_alpha: bool = False
    """According to the file; FFmpeg may decode an alpha channel in any case."""
    filled: Box | None = None
    """The part of a GIF that must be covered by pixels."""
    background: bytes = b""
    """The colour of the other pixels of a GIF: red, green, blue."""

    @property
    def name(self) -> str:
        """The common name of the format."""
        return "JPEG" if self.codec == "mjpeg" else self.codec.upper()

    @property
    def exif_orientation(self) -> int:
        """The EXIF orientation, 1 to 8; 1 if the file has none."""
        try:
            return {tag: value for tag, value, _ in _tiff_entries(self.exif)}.get(_ORIENTATION, 1)
        except (struct.error, IndexError):
            return 1


def parsed(data: bytes, max_pixels: int | None) -> ImageFile:
    """Return the image in a file, whose format is recognised by its first bytes.

    Raises ImageError if the file ends too early or its header has more than `max_pixels`.
    """
    if not data:
        raise ImageError("it is empty")
    parse = next((_PARSERS[start] for start in _PARSERS if data.startswith(start)), None)
    if parse is None:
        raise ImageError(
            f"it is no JPEG, PNG, WebP, GIF, BMP or TIFF image: it begins with {data[:12]!r}"
        )
    try:
        file = parse(data)
    except (struct.error, IndexError):
        raise _truncated(data) from None
    if max_pixels is not None and file.size and file.size[0] * file.size[1] > max_pixels:
        raise ImageError(
            f"it claims to be a {file.name} of {in_words(file.size)} pixels, more than "
            f"max_pixels={max_pixels:,}. Set max_pixels if you trust the file"
        )
    return file


def _truncated(data: bytes) -> ImageError:
    return ImageError(f"it is truncated: its {len(data):,} bytes end before the image does")


# -- JPEG ------------------------------------------------------------------------------------------

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""A marker: not a stuffed byte, not a restart within the image, not a fill byte."""
_HUFFMAN, _QUANTISATION, _SCAN, _END_OF_IMAGE = 0xC4, 0xDB, 0xDA, 0xD9
_WITHOUT_LENGTH = {0x01, 0xD8, _END_OF_IMAGE}
_FRAME_HEADERS = set(range(0xC0, 0xD0)) - {_HUFFMAN, 0xC8, 0xCC}
_WITH_DCT = {0xC0, 0xC1, 0xC2}
_APPLICATIONS_AND_COMMENT = {*range(0xE0, 0xF0), 0xFE}
_IN_HEADER = {_HUFFMAN, _QUANTISATION, _SCAN, *_FRAME_HEADERS, *_APPLICATIONS_AND_COMMENT}


def _parse_jpeg(data: bytes) -> ImageFile:
    # Nearly every file ends with the marker. Others have arbitrary data behind it, such as a second
    # image or a video.
    if not data.endswith(b"\xff\xd9") and _END_OF_IMAGE not in dict(_jpeg_segments(data)):
        raise _truncated(data)
    kind, frame_at, exif, pieces, start = 0, 0, b"", [], 0
    tables: dict[int, list[int]] = {_HUFFMAN: [], _QUANTISATION: []}
    for marker, position in _jpeg_segments(data):
        if marker in tables:
            tables[marker].append(position)
        elif marker in _FRAME_HEADERS:
            kind, frame_at = marker, position
        elif marker == _SCAN:
            break
        elif marker in _APPLICATIONS_AND_COMMENT and (
            data[position + 2 : position + 7] not in {b"JFIF\0", b"Adobe"}
        ):
            # Some of these make FFmpeg turn the image or its fields, for the next file too. Only
            # Adobe's affects the pixels.
            pieces.append(data[start : position - 2])
            start = position + int.from_bytes(data[position : position + 2], "big")
            if data[position + 2 : position + 8] == b"Exif\0\0":
                exif = data[position + 8 : start]
    else:
        raise ImageError("it is a JPEG without image data")
    precision, height, width, num_channels = struct.unpack_from(">BHHB", data, frame_at + 2)
    if kind == 0 or (kind in _WITH_DCT and not tables[_QUANTISATION]):
        # FFmpeg would return a flat colour.
        raise ImageError("it is a JPEG without the tables that are needed to decode it")
    if precision != 8:
        raise ImageError(
            f"it is a JPEG of {precision} bits, and FFmpeg decodes only those of 8 bits"
        )
    return ImageFile(
        "mjpeg",
        (height, width) if height and width else None,
        b"".join([*pieces, data[start:]]) if pieces else data,
        exif,
        can_be_reduced=kind in _WITH_DCT,
        # A scan of all channels can use four Huffman tables, or two for grey. Images in several
        # scans may have more of them later.
        height_at=frame_at + 3 - start + sum(map(len, pieces)),
        has_own_tables=kind == 0xC0
        and _num_huffman_tables(data, tables[_HUFFMAN]) >= (2 if num_channels == 1 else 4),
    )


def _num_huffman_tables(data: bytes, segments: list[int]) -> int:
    numbers = set()
    for segment in segments:
        end = segment + int.from_bytes(data[segment : segment + 2], "big")
        position = segment + 2
        while position < end:
            numbers.add(data[position])
            position += 17 + sum(data[position + 1 : position + 17])
    return len(numbers)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the markers and the offsets of their segments, up to the end of the image."""
    position = 2
    while True:
        # Usually the next segment begins where the last one ends. Otherwise search for it.
        if data[position] != 0xFF or data[position + 1] not in _IN_HEADER:
            match = _MARKER.search(data, position)
            if match is None:
                return
            position = match.start()
        marker = data[position + 1]
        position += 2
        yield marker, position
        if marker == _END_OF_IMAGE:
            return
        if marker not in _WITHOUT_LENGTH:
            position += data[position] << 8 | data[position + 1]


# -- PNG -------------------------------------------------------------------------------------------


def _parse_png(data: bytes) -> ImageFile:
    width, height = struct.unpack_from(">II", data, 16)
    chunks, exif = [data[:8]], b""
    position = 8
    while True:
        length, name = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            raise _truncated(data)
        # Comments, profiles and further frames begin with a small letter. tRNS makes alpha.
        if name[:1].isupper() or name == b"tRNS":
            chunks.append(data[position:end])
        if name == b"eXIf":
            exif = data[position + 8 : end - 4]
        if name == b"IEND":
            return ImageFile("png", (height, width), b"".join(chunks), exif, has_alpha=True)
        position = end


# -- GIF -------------------------------------------------------------------------------------------

_GRAPHIC_CONTROL = 0xF9
_GREY_PALETTE = bytes(grey for grey in range(256) for _ in "RGB")
"""The palette of a file that has none."""


def _parse_gif(data: bytes) -> ImageFile:
    """Return the first frame, as PIL sees it: its palette, and its canvas enlarged to hold it.

    It has no transparent colour: such pixels get that colour, as in PIL, and pixels that are still
    transparent are missing from the file or beside the frame.
    """
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _gif_palette_bytes(flags)
    palette, background = data[13:position], 0
    while data[position] == ord("!"):
        if data[position + 1] == _GRAPHIC_CONTROL and data[position + 3] & 1:
            background = data[position + 6]
        position = _after_gif_blocks(data, position + 2)
    if data[position] != ord(","):
        raise ImageError("it is a GIF without an image")
    left, top, frame_width, frame_height, frame_flags = struct.unpack_from(
        "<HHHHB", data, position + 1
    )
    pixels_at = position + 10 + _gif_palette_bytes(frame_flags)
    palette = data[position + 10 : pixels_at] or palette or _GREY_PALETTE
    palette = palette.ljust(len(_GREY_PALETTE), b"\0")
    end = _after_gif_blocks(data, pixels_at + 1)
    if end > len(data):
        raise _truncated(data)
    height, width = max(height, top + frame_height), max(width, left + frame_width)
    if max(height, width) > 0xFFFF:
        raise ImageError("it is a GIF whose first frame is outside of the largest possible image")
    # Only the frame gets a palette, because FFmpeg would fill the image with a colour of the
    # file's palette. Blocks between them, such as the transparent colour, are left out.
    header = data[:6] + struct.pack("<HHB", width, height, flags & 0x7F) + data[11:13]
    frame = data[position : position + 9] + bytes([frame_flags & 0x40 | 0x87])
    return ImageFile(
        "gif",
        (height, width),
        header + frame + palette + data[pixels_at:end] + b";",
        filled=Box(top, left, frame_height, frame_width),
        background=palette[3 * background : 3 * background + 3],
    )


def _gif_palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _after_gif_blocks(data: bytes, position: int) -> int:
    while data[position]:
        position += data[position] + 1
    return position + 1


# -- BMP -------------------------------------------------------------------------------------------


def _parse_bmp(data: bytes) -> ImageFile:
    pixels_at, header_bytes = struct.unpack_from("<II", data, 10)
    compression = num_bytes = 0
    if header_bytes == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    else:
        width, height, _, bits, compression, num_bytes = struct.unpack_from("<iiHHII", data, 18)
    height = abs(height)
    if compression in {0, 3, 6}:
        num_bytes = (width * bits + 31) // 32 * 4 * height
    if pixels_at + num_bytes > len(data):
        # FFmpeg would assume rows without padding, or leave some out.
        raise _truncated(data)
    return ImageFile("bmp", (height, width), data)


# -- WebP ------------------------------------------------------------------------------------------


def _parse_webp(data: bytes) -> ImageFile:
    kind = data[12:16]
    if data[8:12] != b"WEBP":
        raise ImageError("it is no image but another RIFF file")
    has_alpha, exif = False, b""
    if kind == b"VP8X":
        flags, width, wide, height, high = struct.unpack_from("<B3xHBHB", data, 20)
        width, height = 1 + (width | wide << 16), 1 + (height | high << 16)
        has_alpha = bool(flags & 0x10)
        if flags & 0x02:
            raise ImageError("it is an animated WebP, which FFmpeg cannot decode")
        if flags & 0x08:
            exif = _webp_exif(data)
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        has_alpha = bool(bits >> 28 & 1)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    return ImageFile("webp", (height, width), data, exif, has_alpha=has_alpha)


def _webp_exif(data: bytes) -> bytes:
    position = 12
    while position + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, position)
        if name == b"EXIF":
            return data[position + 8 : position + 8 + length].removeprefix(b"Exif\0\0")
        position += 8 + length + length % 2
    return b""


# -- TIFF ------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _COMPRESSION, _ORIENTATION = 256, 257, 259, 274
_PIXEL_TAGS = {
    *(_WIDTH, _HEIGHT, _COMPRESSION, 258, 262, 266),  # bits, colours, order of bits
    *(273, 277, 278, 279, 284),  # strips, samples, planes
    *(292, 293, 317, 320),  # fax options, predictor, palette
    *(322, 323, 324, 325),  # tiles
    *(530, 532),  # chroma
}


def _parse_tiff(data: bytes) -> ImageFile:
    values, kept = {}, []
    for tag, value, position in _tiff_entries(data):
        values[tag] = value
        if tag in _PIXEL_TAGS:
            kept.append(data[position : position + 12])
    if values.get(_COMPRESSION) in {6, 7}:
        # FFmpeg would return a black image.
        raise ImageError("it is a TIFF with JPEG inside, which FFmpeg cannot decode")
    order, directory, _ = _tiff_directory(data)
    tiff = bytearray(data)
    # The offset of the next image follows the entries: there is none.
    entries = b"".join([struct.pack(order + "H", len(kept)), *kept, bytes(4)])
    tiff[directory : directory + len(entries)] = entries
    has_size = _HEIGHT in values and _WIDTH in values
    size = (values[_HEIGHT], values[_WIDTH]) if has_size else None
    return ImageFile("tiff", size, bytes(tiff), data, has_alpha=True)


def _tiff_directory(data: bytes) -> tuple[str, int, int]:
    """Return the byte order, and the offset and number of the first image's entries."""
    order = "<" if data.startswith(b"II") else ">"
    (position,) = struct.unpack_from(order + "I", data, 4)
    return order, position, struct.unpack_from(order + "H", data, position)[0]


def _tiff_entries(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield tags, their values (if they are single numbers) and the entries' offsets."""
    order, directory, num_entries = _tiff_directory(data)
    for position in range(directory + 2, directory + 2 + 12 * num_entries, 12):
        tag, kind = struct.unpack_from(order + "HH", data, position)
        (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, position + 8)
        yield tag, value, position


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
