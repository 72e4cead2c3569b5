"""What the bytes of an image file say before they are decoded.

FFmpeg's decoders are strict or lenient as a whole: one that is told to stop at an error also stops
at a comment that it cannot read, and one that goes on gives half an image. So we ask for the strict
one, and take out of a file what does not matter to its pixels.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

__all__ = ["ImageError", "codec_of", "prepared", "size_of", "webp_has_alpha"]


class ImageError(ValueError):
    """A file that is no image, that is damaged, or that FFmpeg cannot decode."""


_SIGNATURES = {
    b"\xff\xd8\xff": "mjpeg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}


def codec_of(data: bytes) -> str:
    """The name of FFmpeg's decoder for a file, by its first bytes."""
    for signature, codec in _SIGNATURES.items():
        if data.startswith(signature):
            return codec
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    if not data:
        raise ImageError("it is empty")
    raise ImageError(
        f"it is no JPEG, PNG, WebP, GIF, BMP or TIFF image: it begins with {data[:12]!r}"
    )


def size_of(data: bytes, codec: str) -> tuple[int, int] | None:
    """(height, width) as the header claims; None if it does not say."""
    try:
        match codec:
            case "mjpeg":
                return _jpeg_size(data)
            case "png":
                width, height = struct.unpack_from(">II", data, 16)
            case "gif":
                width, height = struct.unpack_from("<HH", data, 6)
            case "bmp":
                width, height, _ = _bmp_layout(data)
            case "webp":
                width, height = _webp_size(data)
            case _:
                tags = dict(_tiff_tags(data))
                width, height = tags[_TIFF_WIDTH], tags[_TIFF_HEIGHT]
    except (struct.error, IndexError, KeyError):
        return None
    return height, width


def prepared(data: bytes, codec: str) -> bytes:
    """The file as FFmpeg should see it. Raises if the file ends before the image does."""
    try:
        match codec:
            case "mjpeg":
                _check_jpeg_end(data)
            case "png":
                return _pixel_chunks_of_png(data)
            case "gif":
                return _opaque_gif(data)
            case "bmp":
                _check_bmp_end(data)
            case "tiff":
                return _pixel_tags_of_tiff(data)
    except (struct.error, IndexError):
        raise _truncated(data) from None
    return data


def _truncated(data: bytes) -> ImageError:
    return ImageError(f"it is truncated: its {len(data):,} bytes end before the image does")


# -- JPEG ------------------------------------------------------------------------------------------

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""A marker, not a stuffed byte, a restart within the image, or a fill byte."""
_END_OF_IMAGE = 0xD9
_WITHOUT_LENGTH = {0x01, 0xD8, _END_OF_IMAGE}
_FRAME_HEADERS = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def _jpeg_markers(data: bytes) -> Iterator[tuple[int, int]]:
    """Every marker and where its segment begins, up to the end of the image."""
    position = 2
    while (match := _MARKER.search(data, position)) is not None:
        marker, position = data[match.end() - 1], match.end()
        yield marker, position
        if marker == _END_OF_IMAGE:
            return
        if marker not in _WITHOUT_LENGTH:
            position += int.from_bytes(data[position : position + 2], "big")


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    for marker, position in _jpeg_markers(data):
        if marker in _FRAME_HEADERS:
            precision, height, width = struct.unpack_from(">BHH", data, position + 2)
            if precision != 8:
                raise ImageError(
                    f"it is a JPEG of {precision} bits, and FFmpeg decodes those of 8 bits alone"
                )
            return height, width
    return None


def _check_jpeg_end(data: bytes) -> None:
    # Nearly every file ends with the marker. Others have something behind it, such as a second
    # image or a film, and what is behind it may contain anything.
    if data.endswith(b"\xff\xd9"):
        return
    if not any(marker == _END_OF_IMAGE for marker, _ in _jpeg_markers(data)):
        raise _truncated(data)


# -- PNG -------------------------------------------------------------------------------------------


def _pixel_chunks_of_png(data: bytes) -> bytes:
    """The chunks that make the pixels, without comments, profiles and further frames."""
    chunks = [data[:8]]
    position = 8
    while True:
        length, name = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            raise _truncated(data)
        if name[:1].isupper() or name == b"tRNS":
            chunks.append(data[position:end])
        if name == b"IEND":
            return b"".join(chunks)
        position = end


# -- GIF -------------------------------------------------------------------------------------------


def _opaque_gif(data: bytes) -> bytes:
    """The first frame, with no colour transparent.

    Pixels of the transparent colour then have that colour, as PIL gives them, and those that are
    transparent nevertheless were not in the file.
    """
    gif = bytearray(data)
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
    return bytes(gif[:end]) + b";"


def _gif_palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _after_gif_blocks(gif: bytearray, position: int) -> int:
    while gif[position]:
        position += gif[position] + 1
    return position + 1


# -- BMP -------------------------------------------------------------------------------------------


def _bmp_layout(data: bytes) -> tuple[int, int, int]:
    """Width, height, and the bytes that the file must have; 0 if that depends on the pixels."""
    pixels_at, header_bytes = struct.unpack_from("<II", data, 10)
    if header_bytes == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    else:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
    height = abs(height)
    is_plain = compression in {0, 3, 6}
    return width, height, pixels_at + (width * bits + 31) // 32 * 4 * height if is_plain else 0


def _check_bmp_end(data: bytes) -> None:
    if _bmp_layout(data)[2] > len(data):
        raise _truncated(data)


# -- WebP ------------------------------------------------------------------------------------------


def webp_has_alpha(data: bytes) -> bool:
    """Whether the file has an alpha channel; FFmpeg may decode one that it has not."""
    kind = data[12:16]
    flags = data[20] if kind == b"VP8X" else data[24] if kind == b"VP8L" else 0
    return bool(flags & 0x10)


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return (
            1 + int.from_bytes(data[24:27], "little"),
            1 + int.from_bytes(data[27:30], "little"),
        )
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


# -- TIFF ------------------------------------------------------------------------------------------

_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_COMPRESSION = 256, 257, 259
_TIFF_PIXEL_TAGS = {
    *(_TIFF_WIDTH, _TIFF_HEIGHT, 258, 262, 266),  # size, bits, colours, bit order
    _TIFF_COMPRESSION,
    *(273, 277, 278, 279, 284),  # strips, samples, planes
    *(292, 293, 317, 320),  # fax options, predictor, palette
    *(322, 323, 324, 325),  # tiles
    *(530, 532),  # chroma
}


def _tiff_directory(data: bytes) -> tuple[str, int, int]:
    """Byte order, and where the entries of the first image begin and end."""
    order = "<" if data.startswith(b"II") else ">"
    (position,) = struct.unpack_from(order + "I", data, 4)
    (num_entries,) = struct.unpack_from(order + "H", data, position)
    end = position + 2 + 12 * num_entries
    if end > len(data):
        raise _truncated(data)
    return order, position + 2, end


def _tiff_tags(data: bytes) -> Iterator[tuple[int, int]]:
    """Tags and their values, as far as these are single numbers."""
    order, start, end = _tiff_directory(data)
    for position in range(start, end, 12):
        tag, kind = struct.unpack_from(order + "HH", data, position)
        yield tag, struct.unpack_from(order + ("H" if kind == 3 else "I"), data, position + 8)[0]


def _pixel_tags_of_tiff(data: bytes) -> bytes:
    """The first image, without the tags that do not make pixels."""
    if dict(_tiff_tags(data)).get(_TIFF_COMPRESSION) in {6, 7}:
        # FFmpeg gives a black image.
        raise ImageError("it is a TIFF with JPEG inside, which FFmpeg cannot decode")
    order, start, end = _tiff_directory(data)
    entries = [data[position : position + 12] for position in range(start, end, 12)]
    kept = [
        entry for entry in entries if struct.unpack_from(order + "H", entry)[0] in _TIFF_PIXEL_TAGS
    ]
    tiff = bytearray(data)
    struct.pack_into(order + "H", tiff, start - 2, len(kept))
    # Behind the entries stands where the next image is: nowhere.
    directory = b"".join(kept) + bytes(4)
    tiff[start : start + len(directory)] = directory
    return bytes(tiff)
