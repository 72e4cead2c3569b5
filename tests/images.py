"""Pictures, and files that contain them: every format and layout that the tests know."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pytest

Pixels = np.ndarray

FILES = Path(__file__).parent / "image_files"
"""What neither PIL nor this module can write. See its README.md."""


class Format(NamedTuple):
    """A way to write a picture."""

    encode: Callable[[Pixels], bytes]
    is_lossless: bool
    """Whether two decoders must agree in every pixel."""


# -- pictures --------------------------------------------------------------------------------------


def _field(random: np.random.Generator, height: int, width: int, cells: int) -> Pixels:
    """Values around 0 that change smoothly, `cells` times from side to side."""
    coarse = random.normal(size=(cells + 2, cells + 2)).astype(np.float32)
    return np.asarray(
        PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.Resampling.BICUBIC)
    )


@cache
def picture(
    height: int = 240, width: int = 320, *, seed: int = 0, has_edges: bool = True
) -> Pixels:
    """Something like a photograph: shades, edges, saturated colours and noise; H×W×3."""
    random = np.random.default_rng(seed)
    channels = [
        128 + 45 * _field(random, height, width, 2) + 25 * _field(random, height, width, 7)
        for _ in range(3)
    ]
    pixels = np.stack(channels, axis=2)
    if has_edges:
        pixels += 8 * _field(random, height, width, 40)[:, :, None]
        # Things with sharp outlines, each of one colour.
        for color in [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (9, 9, 9), (250,) * 3]:
            pixels[_field(random, height, width, 4) > 1.3] = color
    pixels += random.normal(scale=4 if has_edges else 1, size=pixels.shape)
    pixels = pixels.clip(0, 255).astype(np.uint8)
    pixels.setflags(write=False)
    return pixels


def _alpha(pixels: Pixels) -> Pixels:
    """An alpha channel with smooth parts, and some that are opaque and transparent; H×W."""
    field = _field(np.random.default_rng(9), *pixels.shape[:2], 3)
    return (128 + 120 * field).clip(0, 255).astype(np.uint8)


def _grey(pixels: Pixels) -> Pixels:
    return np.asarray(PIL.Image.fromarray(pixels).convert("L"))


def _grey_with(bits: int) -> Callable[[Pixels], Pixels]:
    return lambda pixels: _grey(pixels) >> (8 - bits)


def _wide(pixels: Pixels) -> Pixels:
    """Sixteen bits, with something in the lower eight; above all, more than 255."""
    low = (pixels.astype(np.uint16) * 7 + 13) & 0xFF
    return pixels.astype(np.uint16) << 8 | low


def _with_alpha(pixels: Pixels) -> Pixels:
    return np.dstack([pixels, _alpha(pixels)])


def _with_palette(pixels: Pixels, num_colors: int = 256) -> PIL.Image.Image:
    method = PIL.Image.Quantize.FASTOCTREE
    return PIL.Image.fromarray(pixels).quantize(num_colors, method, dither=PIL.Image.Dither.NONE)


def _indexed(pixels: Pixels, num_colors: int) -> tuple[Pixels, Pixels]:
    """The index of each pixel in a palette, and the palette, colours×3."""
    image = _with_palette(pixels, num_colors)
    palette = np.zeros((num_colors, 3), np.uint8)
    found = np.array(image.getpalette()[: 3 * num_colors], np.uint8).reshape(-1, 3)
    palette[: len(found)] = found
    return np.asarray(image), palette


def _inks(pixels: Pixels) -> PIL.Image.Image:
    """In cyan, magenta and yellow, and black where there is something of all three."""
    inks = 255 - pixels
    black = inks.min(axis=2, keepdims=True) // 2
    return PIL.Image.frombytes(
        "CMYK", pixels.shape[1::-1], np.dstack([inks - black, black]).tobytes()
    )


def _packed(samples: Pixels, bits: int) -> list[bytes]:
    """The bytes of each row of H×W×channels samples, the first in the highest bits."""
    height = len(samples)
    if bits == 16:
        return [row.tobytes() for row in samples.astype(">u2")]
    if bits == 8:
        return [row.tobytes() for row in samples.astype(np.uint8)]
    values = samples.reshape(height, -1).astype(np.uint8)
    ones_and_zeros = np.unpackbits(values[:, :, None], axis=2)[:, :, 8 - bits :]
    return [row.tobytes() for row in np.packbits(ones_and_zeros.reshape(height, -1), axis=1)]


# -- PIL -------------------------------------------------------------------------------------------


def save(pixels: Pixels | PIL.Image.Image, format_name: str, **options: object) -> bytes:
    """A file as PIL writes it."""
    image = pixels if isinstance(pixels, PIL.Image.Image) else PIL.Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, format_name, **options)
    return file.getvalue()


def by_pil(format_name: str, mode: str = "RGB", **options: object) -> Callable[[Pixels], bytes]:
    """What writes a picture in one of PIL's modes."""

    def encode(pixels: Pixels) -> bytes:
        if mode in {"LA", "RGBA"}:
            image = PIL.Image.fromarray(_with_alpha(pixels)).convert(mode)
        elif mode == "P":
            image = _with_palette(pixels)
        elif mode == "CMYK":
            image = _inks(pixels)
        elif mode == "I;16":
            image = PIL.Image.fromarray(_wide(_grey(pixels)))
        else:
            image = PIL.Image.fromarray(pixels).convert(mode)
        return save(image, format_name, **options)

    return encode


def from_file(name: str) -> Callable[[Pixels], bytes]:
    """A file that is there, whatever the picture."""
    return lambda _: (FILES / name).read_bytes()


# -- PNG -------------------------------------------------------------------------------------------

_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_ADAM7 = [
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
]
"""Of each pass: first row, first column, and the steps to the next."""


def png_chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I4s", len(content), name)
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def png_chunks(png: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The name of each chunk, and where it begins and ends."""
    position = 8
    while position < len(png):
        length, name = struct.unpack_from(">I4s", png, position)
        yield name, position, position + 12 + length
        position += 12 + length


def _filtered(rows: list[bytes], pixel_bytes: int) -> bytes:
    """Rows with PNG's five filters in turn."""
    filtered = []
    above = np.zeros(len(rows[0]) + pixel_bytes, np.int16) if rows else None
    for number, row in enumerate(rows):
        here = np.zeros(len(row) + pixel_bytes, np.int16)
        here[pixel_bytes:] = np.frombuffer(row, np.uint8)
        left, up, up_left = here[:-pixel_bytes], above[pixel_bytes:], above[:-pixel_bytes]
        guess = left + up - up_left
        distances = np.abs(np.stack([guess - left, guess - up, guess - up_left]))
        paeth = np.choose(distances.argmin(axis=0), [left, up, up_left])
        guesses = [0 * up, left, up, (left + up) // 2, paeth]
        method = number % 5
        difference = (here[pixel_bytes:] - guesses[method]) & 0xFF
        filtered.append(bytes([method]) + difference.astype(np.uint8).tobytes())
        above = here
    return b"".join(filtered)


def png(
    samples: Pixels,
    bits: int,
    color_type: int,
    *,
    is_interlaced: bool = False,
    palette: Pixels | None = None,
    transparency: bytes | None = None,
    size: tuple[int, int] | None = None,
) -> bytes:
    """A PNG of samples as they are stored; `size` is what the header claims instead."""
    samples = samples.reshape(*samples.shape[:2], _PNG_CHANNELS[color_type])
    height, width = size or samples.shape[:2]
    passes = [samples]
    if is_interlaced:
        passes = [samples[top::down, left::right] for top, left, down, right in _ADAM7]
    pixel_bytes = max(1, bits * _PNG_CHANNELS[color_type] // 8)
    rows = b"".join(_filtered(_packed(part, bits), pixel_bytes) for part in passes if part.size)
    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, is_interlaced)
    chunks = [b"\x89PNG\r\n\x1a\n", png_chunk(b"IHDR", header)]
    if palette is not None:
        chunks.append(png_chunk(b"PLTE", palette.tobytes()))
    if transparency is not None:
        chunks.append(png_chunk(b"tRNS", transparency))
    pixels = zlib.compress(rows)
    half = len(pixels) // 2
    chunks += [png_chunk(b"IDAT", part) for part in (pixels[:half], pixels[half:])]
    return b"".join([*chunks, png_chunk(b"IEND", b"")])


def _png_of(
    samples_of: Callable[[Pixels], Pixels], bits: int, color_type: int, **options: object
) -> Callable[[Pixels], bytes]:
    return lambda pixels: png(samples_of(pixels), bits, color_type, **options)


def _palette_png(bits: int, *, has_alpha: bool = False, is_interlaced: bool = False):
    def encode(pixels: Pixels) -> bytes:
        indices, palette = _indexed(pixels, 1 << bits)
        transparency = bytes(range(0, 256, 256 >> bits)) if has_alpha else None
        return png(
            indices,
            bits,
            3,
            palette=palette,
            transparency=transparency,
            is_interlaced=is_interlaced,
        )

    return encode


# -- GIF -------------------------------------------------------------------------------------------


def _gif(*, is_interlaced: bool = False, **options: object) -> Callable[[Pixels], bytes]:
    def encode(pixels: Pixels) -> bytes:
        image = _with_palette(pixels)
        return save(image, "GIF", interlace=is_interlaced, **options)

    return encode


def _animated_gif(pixels: Pixels) -> bytes:
    frames = [_with_palette(turned, 64) for turned in (pixels, pixels[::-1], pixels[:, ::-1])]
    return save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)


def gif(
    indices: Pixels,
    canvas: tuple[int, int],
    offset: tuple[int, int] = (0, 0),
    *,
    palette: Pixels | None = None,
    frame_palette: Pixels | None = None,
    background: int = 0,
    transparent: int | None = None,
    is_interlaced: bool = False,
) -> bytes:
    """A GIF of a frame of palette indices, H×W, below 256. Sizes are (height, width).

    The palettes, colours×3, have a power of two of colours.
    """
    file = b"GIF89a" + struct.pack("<HH", *reversed(canvas))
    file += bytes([_gif_flags(palette), background, 0])
    file += b"" if palette is None else palette.tobytes()
    if transparent is not None:
        file += b"!\xf9\x04\x01\0\0" + bytes([transparent, 0])
    file += b"," + struct.pack("<HHHH", *reversed(offset), *reversed(indices.shape))
    file += bytes([_gif_flags(frame_palette) | 0x40 * is_interlaced])
    file += b"" if frame_palette is None else frame_palette.tobytes()
    # Codes of nine bits. The table is cleared before each, so that they never become longer.
    if is_interlaced:
        indices = np.concatenate([indices[0::8], indices[4::8], indices[2::4], indices[1::2]])
    codes = [code for index in indices.ravel() for code in (0x100, int(index))]
    bits = sum(code << 9 * place for place, code in enumerate([*codes, 0x101]))
    pixels = bits.to_bytes((9 * (len(codes) + 1) + 7) // 8, "little")
    blocks = [pixels[start : start + 255] for start in range(0, len(pixels), 255)]
    return file + b"\x08" + b"".join(bytes([len(b)]) + b for b in blocks) + b"\0;"


def _gif_flags(palette: Pixels | None) -> int:
    return 0 if palette is None else 0x80 | len(palette).bit_length() - 2


# -- BMP -------------------------------------------------------------------------------------------


def bmp(
    rows: list[bytes],
    size: tuple[int, int],
    bits: int,
    *,
    palette: Pixels | None = None,
    is_top_down: bool = False,
    masks: tuple[int, ...] = (),
    has_short_header: bool = False,
) -> bytes:
    """A BMP of rows as they are stored, the uppermost first."""
    height, width = size
    pixels = b"".join(
        row + bytes(-len(row) % 4) for row in (rows if is_top_down else reversed(rows))
    )
    if has_short_header:
        header = struct.pack("<IHHHH", 12, width, height, 1, bits)
        colors = b"" if palette is None else palette[:, ::-1].tobytes()
    else:
        signed_height = -height if is_top_down else height
        compression = 3 if masks else 0
        num_colors = 0 if palette is None else len(palette)
        header = struct.pack(
            "<IiiHHIIiiII",
            *(40, width, signed_height, 1, bits, compression, len(pixels), 2835, 2835),
            *(num_colors, 0),
        )
        header += struct.pack(f"<{len(masks)}I", *masks)
        colors = b""
        if palette is not None:
            colors = np.insert(palette[:, ::-1], 3, 0, axis=1).tobytes()
    start = 14 + len(header) + len(colors)
    file_header = b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start)
    return file_header + header + colors + pixels


def _true_color_bmp(bits: int, **options: object) -> Callable[[Pixels], bytes]:
    def encode(pixels: Pixels) -> bytes:
        stored = pixels[:, :, ::-1]
        if bits == 32:
            stored = np.insert(stored, 3, 0, axis=2)
        return bmp([row.tobytes() for row in stored], pixels.shape[:2], bits, **options)

    return encode


def _palette_bmp(bits: int, **options: object) -> Callable[[Pixels], bytes]:
    def encode(pixels: Pixels) -> bytes:
        indices, palette = _indexed(pixels, 1 << bits)
        rows = _packed(indices, bits)
        return bmp(rows, indices.shape, bits, palette=palette, **options)

    return encode


def _bmp_16(green_bits: int) -> Callable[[Pixels], bytes]:
    def encode(pixels: Pixels) -> bytes:
        red, green, blue = (pixels[:, :, channel].astype("<u2") for channel in range(3))
        stored = red >> 3 << (5 + green_bits) | green >> (8 - green_bits) << 5 | blue >> 3
        masks = (0xF800, 0x7E0, 0x1F) if green_bits == 6 else ()
        return bmp([row.tobytes() for row in stored], pixels.shape[:2], 16, masks=masks)

    return encode


def _run_length_bmp(pixels: Pixels) -> bytes:
    """RLE8, all in runs of one pixel and of two."""
    indices, palette = _indexed(pixels, 256)
    height, width = indices.shape
    encoded = bytearray()
    for row in indices[::-1]:
        for column in range(0, width - width % 2, 2):
            first, second = row[column : column + 2].tolist()
            encoded += bytes([2, first]) if first == second else bytes([1, first, 1, second])
        if width % 2:
            encoded += bytes([1, row[-1]])
        encoded += b"\0\0"
    encoded += b"\0\1"
    file = bytearray(bmp([bytes(encoded)], (height, width), 8, palette=palette))
    struct.pack_into("<I", file, 30, 1)
    return bytes(file)


# -- TIFF ------------------------------------------------------------------------------------------


def tiff(
    strips: list[bytes],
    size: tuple[int, int],
    bits: list[int],
    *,
    order: str = "<",
    photometric: int = 2,
    rows_per_strip: int | None = None,
    more_tags: dict[int, tuple[str, list[int]]] | None = None,
) -> bytes:
    """A TIFF of strips as they are stored. Tags are written as (struct's letter, values)."""
    height, width = size
    tags: dict[int, tuple[str, list[int]]] = {
        256: ("I", [width]),
        257: ("I", [height]),
        258: ("H", bits),
        259: ("H", [1]),
        262: ("H", [photometric]),
        273: ("I", []),
        277: ("H", [len(bits)]),
        278: ("I", [rows_per_strip or height]),
        279: ("I", [len(strip) for strip in strips]),
        **(more_tags or {}),
    }
    header = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    values_at = 8 + 2 + 12 * len(tags) + 4
    # The values come behind the directory, and the strips behind those.
    num_value_bytes = sum(
        struct.calcsize(order + letter * len(strips if tag == 273 else values))
        for tag, (letter, values) in tags.items()
    )
    position = values_at + num_value_bytes
    for strip in strips:
        tags[273][1].append(position)
        position += len(strip)
    directory, values_behind = b"", b""
    for tag, (letter, values) in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}{letter}", *values)
        entry = struct.pack(order + "HHI", tag, {"H": 3, "I": 4}[letter], len(values))
        if len(packed) <= 4:
            directory += entry + packed.ljust(4, b"\0")
            values_behind += bytes(len(packed))
        else:
            directory += entry + struct.pack(order + "I", values_at + len(values_behind))
            values_behind += packed
    head = header + struct.pack(order + "H", len(tags)) + directory + bytes(4) + values_behind
    return head + b"".join(strips)


def _strips(pixels: Pixels, rows_per_strip: int) -> list[bytes]:
    starts = range(0, len(pixels), rows_per_strip)
    return [pixels[start : start + rows_per_strip].tobytes() for start in starts]


def _tiff_rgb(order: str = "<", *, is_wide: bool = False) -> Callable[[Pixels], bytes]:
    def encode(pixels: Pixels) -> bytes:
        stored = _wide(pixels).astype(order + "u2") if is_wide else pixels
        return tiff(
            _strips(stored, 50),
            pixels.shape[:2],
            [16 if is_wide else 8] * 3,
            order=order,
            rows_per_strip=50,
        )

    return encode


def _tiff_planes(pixels: Pixels) -> bytes:
    planes = [pixels[:, :, channel].tobytes() for channel in range(3)]
    return tiff(planes, pixels.shape[:2], [8] * 3, more_tags={284: ("H", [2])})


def _tiff_grey(order: str = "<", *, is_wide: bool = False, is_inverted: bool = False):
    def encode(pixels: Pixels) -> bytes:
        grey = _grey(pixels)
        stored = _wide(grey).astype(order + "u2") if is_wide else grey
        return tiff(
            [stored.tobytes()],
            grey.shape,
            [16 if is_wide else 8],
            order=order,
            photometric=0 if is_inverted else 1,
        )

    return encode


# -- all of them -----------------------------------------------------------------------------------


def _lossy(encode: Callable[[Pixels], bytes]) -> Format:
    return Format(encode, is_lossless=False)


def _lossless(encode: Callable[[Pixels], bytes]) -> Format:
    return Format(encode, is_lossless=True)


def _jpeg(mode: str = "RGB", **options: object) -> Format:
    return _lossy(by_pil("JPEG", mode, **{"quality": 90, **options}))


FORMATS = {
    "jpeg 4:4:4": _jpeg(subsampling=0),
    "jpeg 4:2:2": _jpeg(subsampling=1),
    "jpeg 4:2:0": _jpeg(subsampling=2),
    "jpeg 4:4:0": _lossy(from_file("440.jpg")),
    "jpeg 4:1:1": _lossy(from_file("411.jpg")),
    "jpeg 4:1:0": _lossy(from_file("410.jpg")),
    "jpeg lossless": _lossless(from_file("lossless.jpg")),
    "jpeg rgb": _jpeg(keep_rgb=True),
    "jpeg grey": _jpeg("L"),
    "jpeg cmyk": _jpeg("CMYK"),
    "jpeg ycck": _lossy(from_file("ycck.jpg")),
    "jpeg progressive": _jpeg(progressive=True),
    "jpeg progressive grey": _jpeg("L", progressive=True),
    "jpeg progressive cmyk": _jpeg("CMYK", progressive=True),
    "jpeg restarts": _jpeg(restart_marker_blocks=7),
    "jpeg progressive restarts": _jpeg(progressive=True, restart_marker_rows=1),
    "jpeg optimized": _jpeg(optimize=True),
    "jpeg quality 30": _jpeg(quality=30),
    "jpeg quality 100": _jpeg(quality=100),
    "png rgb": _lossless(by_pil("PNG")),
    "png rgb filters": _lossless(_png_of(lambda pixels: pixels, 8, 2)),
    "png rgb interlaced": _lossless(_png_of(lambda pixels: pixels, 8, 2, is_interlaced=True)),
    "png rgb key": _lossless(
        _png_of(lambda pixels: pixels, 8, 2, transparency=struct.pack(">HHH", 255, 0, 0))
    ),
    "png rgba": _lossless(by_pil("PNG", "RGBA")),
    "png rgba interlaced": _lossless(_png_of(_with_alpha, 8, 6, is_interlaced=True)),
    "png rgb 16": _lossless(_png_of(_wide, 16, 2)),
    "png rgb 16 interlaced": _lossless(_png_of(_wide, 16, 2, is_interlaced=True)),
    "png rgba 16": _lossless(_png_of(lambda pixels: _wide(_with_alpha(pixels)), 16, 6)),
    "png grey 1": _lossless(by_pil("PNG", "1")),
    "png grey 1 interlaced": _lossless(_png_of(_grey_with(1), 1, 0, is_interlaced=True)),
    "png grey 2": _lossless(_png_of(_grey_with(2), 2, 0)),
    "png grey 4": _lossless(_png_of(_grey_with(4), 4, 0)),
    "png grey 8": _lossless(by_pil("PNG", "L")),
    "png grey 8 interlaced": _lossless(_png_of(_grey, 8, 0, is_interlaced=True)),
    "png grey 8 key": _lossless(_png_of(_grey, 8, 0, transparency=struct.pack(">H", 128))),
    "png grey 16": _lossless(by_pil("PNG", "I;16")),
    "png grey alpha": _lossless(by_pil("PNG", "LA")),
    "png grey alpha 16": _lossless(
        _png_of(lambda pixels: _wide(np.dstack([_grey(pixels), _alpha(pixels)])), 16, 4)
    ),
    "png palette 1": _lossless(_palette_png(1)),
    "png palette 2": _lossless(_palette_png(2)),
    "png palette 4": _lossless(_palette_png(4)),
    "png palette 8": _lossless(by_pil("PNG", "P")),
    "png palette 8 interlaced": _lossless(_palette_png(8, is_interlaced=True)),
    "png palette 4 alpha": _lossless(_palette_png(4, has_alpha=True)),
    "png palette 8 alpha": _lossless(_palette_png(8, has_alpha=True)),
    "webp lossy": _lossy(by_pil("WEBP", quality=90)),
    "webp lossy alpha": _lossy(by_pil("WEBP", "RGBA", quality=90)),
    "webp lossless": _lossless(by_pil("WEBP", lossless=True)),
    "webp lossless alpha": _lossless(by_pil("WEBP", "RGBA", lossless=True)),
    "gif 87a": _lossless(_gif()),
    "gif 89a": _lossless(_gif(comment=b"a comment")),
    "gif transparent": _lossless(_gif(transparency=5)),
    "gif interlaced": _lossless(_gif(is_interlaced=True)),
    "gif animated": _lossless(_animated_gif),
    "gif grey": _lossless(by_pil("GIF", "L")),
    "bmp 1": _lossless(_palette_bmp(1)),
    "bmp 4": _lossless(_palette_bmp(4)),
    "bmp 8": _lossless(by_pil("BMP", "P")),
    "bmp 8 run-length": _lossless(_run_length_bmp),
    "bmp 8 short header": _lossless(_palette_bmp(8, has_short_header=True)),
    "bmp grey": _lossless(by_pil("BMP", "L")),
    "bmp 16 555": _lossless(_bmp_16(5)),
    "bmp 16 565": _lossless(_bmp_16(6)),
    "bmp 24": _lossless(by_pil("BMP")),
    "bmp 24 top-down": _lossless(_true_color_bmp(24, is_top_down=True)),
    "bmp 24 short header": _lossless(_true_color_bmp(24, has_short_header=True)),
    "bmp 32": _lossless(_true_color_bmp(32)),
    "bmp 32 alpha": _lossless(by_pil("BMP", "RGBA")),
    "tiff raw": _lossless(by_pil("TIFF")),
    "tiff raw strips": _lossless(_tiff_rgb()),
    "tiff raw big-endian": _lossless(_tiff_rgb(">")),
    "tiff planes": _lossless(_tiff_planes),
    "tiff lzw": _lossless(by_pil("TIFF", compression="tiff_lzw")),
    "tiff lzw predictor": _lossless(by_pil("TIFF", compression="tiff_lzw", tiffinfo={317: 2})),
    "tiff deflate": _lossless(by_pil("TIFF", compression="tiff_adobe_deflate")),
    "tiff packbits": _lossless(by_pil("TIFF", compression="packbits")),
    "tiff rgba": _lossless(by_pil("TIFF", "RGBA")),
    "tiff rgb 16": _lossless(_tiff_rgb(is_wide=True)),
    "tiff rgb 16 big-endian": _lossless(_tiff_rgb(">", is_wide=True)),
    "tiff grey": _lossless(by_pil("TIFF", "L")),
    "tiff grey inverted": _lossless(_tiff_grey(is_inverted=True)),
    "tiff grey 16": _lossless(by_pil("TIFF", "I;16")),
    "tiff grey 16 big-endian": _lossless(_tiff_grey(">", is_wide=True)),
    "tiff palette": _lossless(by_pil("TIFF", "P")),
    "tiff bilevel": _lossless(by_pil("TIFF", "1")),
    "tiff fax": _lossless(by_pil("TIFF", "1", compression="group4")),
    "tiff cmyk": _lossless(by_pil("TIFF", "CMYK")),
}
"""Every layout by its name, which begins with the format's."""

_TYPICAL = {
    *("jpeg 4:4:4", "jpeg 4:2:2", "jpeg 4:2:0", "jpeg 4:4:0", "jpeg 4:1:1", "jpeg 4:1:0"),
    *("jpeg lossless", "jpeg rgb", "jpeg grey", "jpeg cmyk", "jpeg ycck", "jpeg progressive"),
    *("png rgb", "png rgba 16", "png grey 1", "png palette 8", "webp lossy", "webp lossless alpha"),
    *("gif 87a", "bmp 8", "bmp 24", "tiff raw", "tiff lzw", "tiff fax", "tiff cmyk"),
}


def tiered(names: Iterable[str] = FORMATS) -> list[Any]:
    """Return names of FORMATS as parameters for `pytest.mark.parametrize`.

    The default tier runs one of each codec and chroma layout, the others are marked `exhaustive`.
    """
    return [
        pytest.param(name, marks=[] if name in _TYPICAL else [pytest.mark.exhaustive])
        for name in names
    ]


@cache
def encoded(name: str, height: int = 240, width: int = 320) -> bytes:
    """The picture in one of FORMATS."""
    return FORMATS[name].encode(picture(height, width))


def seen_by_pil(data: bytes) -> Pixels:
    """H×W×3, as PIL decodes and converts it; the high byte of what has more than one."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        if image.mode.startswith("I"):
            grey = np.asarray(image).astype(np.uint16) >> 8
            return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
        # PIL warns if we ask it to leave out the alpha of a palette.
        seen = image.convert("RGBA") if image.mode == "P" else image
        return np.asarray(seen.convert("RGB"))
