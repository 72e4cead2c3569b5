"""Files of all sorts: how they are found, what is wrong with them, and who may share a loader."""

from __future__ import annotations

import copy
import io
import pickle
import random
import re
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageCms
import PIL.PngImagePlugin
import pytest
import torch

from spdl_torch import DataLoader, ImageError, ImageLoader

from .datasets import PATIENCE_SECONDS
from .images import (
    FILES,
    FORMATS,
    bmp,
    encoded,
    picture,
    png,
    png_chunk,
    png_chunks,
    save,
    tiered,
    tiff,
)

SIZE = (40, 56)
ONE_OF_EACH = {
    "jpg": "jpeg 4:2:0",
    "png": "png rgb",
    "webp": "webp lossy",
    "gif": "gif 87a",
    "bmp": "bmp 24",
    "tiff": "tiff lzw",
}
"""A layout of every format, by the usual ending of its name."""


def small(name):
    return encoded(name, *SIZE)


def outcome(data, loader=None):
    """The pixels of a file, or that there are none."""
    try:
        return (loader or ImageLoader()).decode(data)
    except ImageError:
        return None


def same(first, second):
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def reason(data, **arguments):
    """Why a file cannot be decoded."""
    with pytest.raises(ImageError) as caught:
        ImageLoader(**arguments).decode(data, "folder/cat.jpg")
    start = "cannot decode folder/cat.jpg: "
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(".")
    return str(caught.value).removeprefix(start)


# -- paths and bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ONE_OF_EACH)
def test_content_decides_the_format(ending, tmp_path):
    """A format is recognised by its content, whatever the file's name."""
    data = small(ONE_OF_EACH[ending])
    expected = ImageLoader().decode(data)
    for name in [f"image.{other}" for other in ONE_OF_EACH] + ["image", "image.txt"]:
        (tmp_path / name).write_bytes(data)
        assert torch.equal(ImageLoader()(tmp_path / name), expected)


def test_path_is_str_or_path_like(tmp_path):
    """A path may be a str, bytes or path-like."""
    path = tmp_path / "ä image.png"
    path.write_bytes(small("png rgb"))
    assert torch.equal(ImageLoader()(str(path)), ImageLoader()(path))


def test_read_returns_what_decode_takes(tmp_path):
    """read() returns the bytes that decode() takes."""
    path = tmp_path / "image.png"
    path.write_bytes(small("png rgb"))
    loader = ImageLoader()
    assert loader.read(path) == small("png rgb")
    assert torch.equal(loader.decode(loader.read(path)), loader(path))


def test_missing_file_raises_file_not_found(tmp_path):
    """A missing file is Python's own error."""
    with pytest.raises(FileNotFoundError) as caught:
        ImageLoader()(tmp_path / "missing.jpg")
    assert caught.value.filename == str(tmp_path / "missing.jpg") or caught.value.filename == (
        tmp_path / "missing.jpg"
    )


def test_a_folder_is_pythons_own_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        ImageLoader()(tmp_path)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
@pytest.mark.parametrize(
    "wrap",
    [
        bytearray,
        memoryview,
        lambda data: memoryview(bytearray(data)),
        lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8),
        lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8).repeat_interleave(2)[::2],
        lambda data: np.frombuffer(data, np.uint8),
    ],
)
def test_any_buffer_of_bytes_is_decoded(name, wrap):
    """Encoded bytes may be in any kind of memory."""
    data = small(name)
    assert torch.equal(ImageLoader().decode(wrap(data)), ImageLoader().decode(data))


def test_decoding_does_not_change_input():
    """Decoding does not write to the encoded bytes."""
    for name in FORMATS:
        data = bytearray(small(name))
        ImageLoader(20).decode(data)
        assert bytes(data) == small(name)


def test_tensor_of_other_dtype_is_refused():
    """A tensor that is not of bytes is a TypeError."""
    with pytest.raises(TypeError, match=r"tensor of uint8, got one of torch\.int64"):
        ImageLoader().decode(torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("data", ["a str", 3, None])
def test_input_without_buffer_is_refused(data):
    """An object that is no buffer of bytes is a TypeError."""
    with pytest.raises(TypeError):
        ImageLoader().decode(data)


def test_result_outlives_its_input():
    """An image stays intact after its input and others are gone."""
    data = bytearray(small("bmp 24"))
    image = ImageLoader().decode(data)
    expected = image.clone()
    data[:] = bytes(len(data))
    for name in FORMATS:
        ImageLoader().decode(small(name))
    assert torch.equal(image, expected)


def test_the_result_can_be_written_to():
    for name in FORMATS:
        image = ImageLoader().decode(small(name))
        image += 1
        assert not torch.equal(image, ImageLoader().decode(small(name)))


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"size": 0}, "each at least 1, got 0"),
        ({"size": -3}, "each at least 1"),
        ({"size": (224, 0)}, "each at least 1"),
        ({"size": (1, 2, 3)}, "an int or (height, width)"),
        ({"size": ()}, "an int or (height, width)"),
        ({"size": (1.5, 2)}, "an int or (height, width)"),
        ({"size": 8, "crop": 0}, "crop must be an int or (height, width)"),
        ({"size": 8, "crop": (1, 2, 3)}, "crop must be an int or (height, width)"),
        ({"size": 8, "crop": "middle"}, '"center", "random", an int or (height, width)'),
        ({"crop": "random"}, "Set size too"),
        ({"crop": 5}, "Set size too"),
        ({"size": (8, 9), "crop": "center"}, "Make size an int, or leave crop out"),
        ({"size": 8, "crop": 9}, "Make size larger"),
        ({"size": (8, 9), "crop": (9, 8)}, "Make size larger"),
        ({"mode": "CMYK"}, '"RGB", "L" or "unchanged"'),
        ({"horizontal_flip": 1.5}, "Use 0.5 to mirror every other image"),
        ({"horizontal_flip": -0.1}, "between 0 and 1"),
        ({"reducing_gap": 0.5}, "Use None to decode all pixels"),
        ({"max_pixels": 0}, "Use None for no limit"),
        ({"scale": (0.5, 0.1)}, "(least, largest)"),
        ({"scale": (0, 1)}, "both above 0"),
        ({"ratio": (1,)}, "(least, largest)"),
        ({"ratio": (-1, 1)}, "both above 0"),
    ],
)
def test_bad_value_is_refused_with_advice(arguments, advice):
    """A bad argument is a ValueError that says what to do."""
    with pytest.raises(ValueError, match=re.escape(advice)) as caught:
        ImageLoader(**arguments)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": "224"},
        {"size": 224.0},
        {"size": 8, "crop": 4.0},
        {"horizontal_flip": "yes"},
        {"horizontal_flip": None},
        {"reducing_gap": "much"},
        {"max_pixels": "many"},
        {"scale": 0.5},
        {"ratio": None},
        {"mode": ["RGB"]},
    ],
)
def test_bad_type_is_refused_at_once(arguments):
    """An argument of another type is refused when the loader is made."""
    with pytest.raises((TypeError, ValueError)):
        ImageLoader(**arguments)


def test_all_but_size_are_keywords():
    with pytest.raises(TypeError):
        ImageLoader(8, "center")


def test_repr_makes_the_same_loader():
    """The repr of a loader makes the same loader."""
    loader = ImageLoader((8, 9), crop="random", scale=(0.5, 1), mode="L", max_pixels=None)
    again = eval(repr(loader), {"ImageLoader": ImageLoader})
    assert vars(again) == vars(loader)


# -- copies, processes and threads -----------------------------------------------------------------


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_copied_loader_decodes_the_same(clone):
    """A copied or pickled loader decodes the same pixels."""
    loader = ImageLoader(30, crop="center", mode="unchanged")
    loader.decode(small("png rgba"))
    copied = clone(loader)
    assert repr(copied) == repr(loader)
    assert torch.equal(copied.decode(small("png rgba")), loader.decode(small("png rgba")))


def digest(image):
    # Processes share tensors by open files, of which we want none here.
    return tuple(image.shape), zlib.crc32(image.numpy().tobytes())


def digest_of(loader, data):
    return digest(loader.decode(data))


@pytest.mark.exhaustive
def test_another_process_decodes_the_same():
    loader = ImageLoader(30)
    files = [small(name) for name in ONE_OF_EACH.values()]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        found = list(executor.map(digest_of, [loader] * len(files), files))
    assert found == [digest_of(loader, data) for data in files]


def test_threads_may_share_a_loader():
    """Threads that share a loader get the pixels that one thread gets."""
    loader = ImageLoader((33, 47), mode="unchanged")
    names = list(FORMATS)
    expected = {name: digest(loader.decode(small(name))) for name in names}
    num_threads = 8
    barrier = threading.Barrier(num_threads)

    def decode_all(seed):
        order = names * 3
        random.Random(seed).shuffle(order)
        barrier.wait(PATIENCE_SECONDS)
        return [name for name in order if digest(loader.decode(small(name))) != expected[name]]

    with ThreadPoolExecutor(num_threads) as executor:
        assert list(executor.map(decode_all, range(num_threads))) == [[]] * num_threads


@pytest.mark.parametrize("loader", [ImageLoader(mode="unchanged"), ImageLoader((33, 47))])
def test_order_does_not_change_pixels(loader):
    """The pixels of an image do not depend on those decoded before it."""
    # Decoders are used again: each file must find them as if they were new.
    files = {(name, size): encoded(name, *size) for name in FORMATS for size in (SIZE, (32, 48))}

    def on_a_new_thread(data):
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(digest_of, loader, data).result()

    expected = {key: on_a_new_thread(data) for key, data in files.items()}
    order = list(files) * 6
    random.Random(0).shuffle(order)
    previous = None
    for key in order:
        assert digest_of(loader, files[key]) == expected[key], f"{key} after {previous}"
        previous = key


@pytest.mark.parametrize("name", tiered())
def test_decoder_recovers_after_an_error(name):
    """After a damaged file the next image is decoded correctly."""
    data = small(name)
    expected = ImageLoader().decode(data)
    for bad in (data[: len(data) // 2], data[:40], data[:30] + bytes(len(data)), b"nothing"):
        outcome(bad)
        assert torch.equal(ImageLoader().decode(data), expected)


def test_dataset_loads_images_in_workers(tmp_path):
    """A dataset loads images in worker threads."""
    names = list(ONE_OF_EACH)
    for name in names:
        (tmp_path / name).write_bytes(small(ONE_OF_EACH[name]))

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return len(names)

        def __getitem__(self, index):
            return loader(tmp_path / names[index])

    loader = ImageLoader((20, 30))
    (batch,) = DataLoader(Images(), batch_size=len(names), num_workers=2)
    assert torch.equal(batch, torch.stack([loader(tmp_path / name) for name in names]))


# -- files that are no images ----------------------------------------------------------------------


def test_an_empty_file_says_so():
    assert reason(b"") == "it is empty."


@pytest.mark.parametrize(
    "data", [bytes(1), bytes(10_000), b"text, but named .jpg", b"\xff", b"BMX"]
)
def test_unknown_format_error_shows_first_bytes(data):
    """The error for an unknown format shows the first bytes."""
    assert "no JPEG, PNG, WebP, GIF, BMP or TIFF" in reason(data) or data.startswith(b"BM")
    assert outcome(data) is None


def test_error_without_path_names_image():
    """An error without a path says "the image"."""
    with pytest.raises(ImageError, match=r"^cannot decode image: it is empty\.$"):
        ImageLoader().decode(b"")


def test_error_names_the_path(tmp_path):
    """An error names the path of its file."""
    path = tmp_path / "cat.jpg"
    path.write_bytes(small("jpeg 4:2:0")[:500])
    with pytest.raises(ImageError) as caught:
        ImageLoader()(path)
    assert str(caught.value) == (
        f"cannot decode {path}: it is truncated: its 500 bytes end before the image does."
    )


def test_image_error_is_picklable_value_error():
    """An ImageError is a ValueError, and pickles."""
    with pytest.raises(ImageError) as caught:
        ImageLoader().decode(b"")
    assert isinstance(caught.value, ValueError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is ImageError
    assert str(again) == str(caught.value)


# -- truncated -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiered())
def test_truncated_file_is_never_half_decoded(name):
    """A truncated file is an error, or the whole image if only padding is missing."""
    data = small(name)
    expected = ImageLoader().decode(data)
    ends = {*range(min(len(data), 80)), *range(len(data) - 20, len(data))}
    ends |= set(range(80, len(data), 1 + len(data) // 60))
    for end in sorted(ends):
        found = outcome(data[:end])
        assert found is None or torch.equal(found, expected), end


@pytest.mark.parametrize(
    # A progressive one is a whole image after its first scan.
    "name",
    tiered(name for name in FORMATS if name.startswith("jpeg") and "progressive" not in name),
)
def test_jpeg_without_last_rows_is_refused(name):
    """A JPEG that lacks its last rows is an error even if it has an end marker."""
    data = small(name)
    for percent in (50, 65, 80):
        cut = data[: len(data) * percent // 100].rstrip(b"\xff") + b"\xff\xd9"
        assert outcome(cut) is None, percent


@pytest.mark.parametrize("name", tiered(name for name in FORMATS if name.startswith("jpeg")))
def test_jpeg_without_pixels_is_refused(name):
    """A JPEG that has a header and no pixels is an error."""
    data = small(name)
    start = data.index(b"\xff\xda")
    assert outcome(data[:start] + b"\xff\xd9") is None
    assert outcome(data[:start]) is None


def without_segments(jpeg, marker):
    while (start := jpeg.find(bytes([0xFF, marker]))) >= 0:
        jpeg = jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big") :]
    return jpeg


@pytest.mark.parametrize("name", ["jpeg 4:2:0", "jpeg grey", "jpeg cmyk", "jpeg progressive"])
def test_jpeg_tables_are_not_reused(name):
    """A JPEG without tables does not use those of the one before."""
    data = small(name)
    for marker in (0xDB, 0xC4):
        without = without_segments(data, marker)
        with ThreadPoolExecutor(1) as executor:  # A thread that has seen no other image.
            alone = executor.submit(outcome, without).result()
        ImageLoader().decode(data)
        assert same(outcome(without), alone)


@pytest.mark.parametrize("name", ["jpeg 4:2:0", "jpeg grey", "jpeg cmyk", "jpeg progressive"])
def test_jpeg_without_quantization_is_refused(name):
    """A JPEG without quantization tables is an error."""
    assert outcome(without_segments(small(name), 0xDB)) is None


@pytest.mark.parametrize("name", tiered(name for name in FORMATS if name.startswith("gif")))
def test_gif_without_last_rows_is_refused(name):
    """A GIF that lacks rows is an error even if it has an end."""
    # Its first block of pixels alone, and the end.
    data = small(name)
    position = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[position] == ord("!"):
        position += 2
        while data[position]:
            position += data[position] + 1
        position += 1
    flags = data[position + 9]
    start = position + 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    cut = data[: start + 1 + data[start]] + b"\0;"
    assert len(cut) < len(data)
    assert outcome(cut) is None


def test_png_without_pixels_is_refused():
    """A PNG that has a header and no pixels is an error."""
    for name in (name for name in FORMATS if name.startswith("png")):
        data = small(name)
        chunks = [data[start:end] for chunk, start, end in png_chunks(data) if chunk != b"IDAT"]
        assert outcome(data[:8] + b"".join(chunks)) is None, name


@pytest.mark.parametrize("name", ["webp lossless", "webp lossless alpha"])
def test_webp_without_pixels_is_refused(name):
    """A WebP that lacks pixels is an error even if its length is right."""
    # In a lossy one, FFmpeg's decoder does not notice.
    data = small(name)
    # The last chunk is that of the pixels.
    position, last = 12, 12
    while position < len(data):
        last = position
        (length,) = struct.unpack_from("<I", data, position + 4)
        position += 8 + length + length % 2
    kept = (len(data) - last - 8) // 2 // 2 * 2
    cut = bytearray(data[: last + 8 + kept])
    struct.pack_into("<I", cut, last + 4, kept)
    struct.pack_into("<I", cut, 4, len(cut) - 8)
    assert outcome(bytes(cut)) is None


# -- damaged ---------------------------------------------------------------------------------------


def test_png_with_wrong_checksum_is_refused():
    """A PNG with a wrong checksum is an error."""
    for name in (name for name in FORMATS if name.startswith("png")):
        data = small(name)
        for chunk, _, end in png_chunks(data):
            if chunk in {b"IHDR", b"PLTE", b"IDAT"}:
                damaged = bytearray(data)
                damaged[end - 1] ^= 1
                assert outcome(bytes(damaged)) is None, (name, chunk)


def test_png_with_damaged_pixels_is_refused():
    """A PNG whose compressed pixels are damaged is an error."""
    for name in (name for name in FORMATS if name.startswith("png")):
        data = bytearray(small(name))
        (start,) = [start for chunk, start, _ in png_chunks(bytes(data)) if chunk == b"IDAT"][:1]
        data[start + 12 : start + 20] = bytes(8)
        assert outcome(bytes(data)) is None, name


@pytest.mark.parametrize("name", ["tiff lzw", "tiff deflate"])
def test_tiff_with_damaged_pixels_is_refused(name):
    """A TIFF whose compressed pixels are damaged is an error."""
    data = bytearray(small(name))
    middle = len(data) // 2
    data[middle : middle + 200] = b"\xff" * 200
    assert outcome(bytes(data)) is None


# -- images that claim to be large -----------------------------------------------------------------


def patched(data, changes):
    file = bytearray(data)
    for position, layout, value in changes:
        struct.pack_into(layout, file, position, value)
    return bytes(file)


def claims():
    """Files of a few hundred bytes that say they are images of 60000×60000 pixels."""
    side = 60_000
    jpeg = small("jpeg 4:2:0")
    frame = jpeg.index(b"\xff\xc0")
    progressive = small("jpeg progressive")
    progressive_frame = progressive.index(b"\xff\xc2")
    gif = small("gif 87a")
    image = gif.index(b",\0\0\0\0")
    pixels = np.zeros((8, 8, 3), np.uint8)
    webp_side = 16_383
    sides = (webp_side - 1) | (webp_side - 1) << 14
    return {
        "jpeg": patched(jpeg, [(frame + 5, ">H", side), (frame + 7, ">H", side)]),
        "jpeg progressive": patched(
            progressive,
            [(progressive_frame + 5, ">H", side), (progressive_frame + 7, ">H", side)],
        ),
        "png": png(pixels, 8, 2, size=(side, side)),
        "png palette": png(pixels[:, :, 0], 1, 3, palette=pixels[0, :2], size=(side, side)),
        "gif": patched(
            gif,
            [(6, "<H", side), (8, "<H", side), (image + 5, "<H", side), (image + 7, "<H", side)],
        ),
        "bmp": bmp([b""], (side, side), 24),
        "bmp top-down": bmp([b""], (side, side), 24, is_top_down=True),
        "bmp run-length": patched(bmp([b"\0\1"], (side, side), 8), [(30, "<I", 1)]),
        "webp lossy": patched(small("webp lossy"), [(26, "<H", webp_side), (28, "<H", webp_side)]),
        "webp lossless": patched(small("webp lossless"), [(21, "<I", sides)]),
        "webp canvas": patched(
            small("webp lossy alpha"), [(24, "<I", 0xFFFFFF), (27, "<H", 0xFFFF)]
        ),
        "tiff": tiff([bytes(100)], (side, side), [8] * 3),
        "tiff 1 bit": tiff([bytes(100)], (side, side), [1], photometric=1),
    }


def attack_with_claims():
    """Run in its own process, to measure its memory."""
    import resource  # noqa: PLC0415
    import time  # noqa: PLC0415

    loaders = [ImageLoader(), ImageLoader(20), ImageLoader(20, apply_exif_orientation=True)]
    for name in FORMATS:
        for loader in loaders:
            loader.decode(small(name))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, data in claims().items():
        for loader in loaders:
            started = time.process_time()
            found = outcome(data, loader)
            seconds = time.process_time() - started
            assert found is None, name
            assert seconds < 1, (name, seconds)
            growth_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            assert growth_bytes < 60e6, (name, loader, growth_bytes)


def test_decompression_bombs_cost_nothing():
    """A few bytes that claim to be gigabytes cost neither time nor memory."""
    program = "from tests.test_image_files import attack_with_claims; attack_with_claims()"
    finished = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


@pytest.mark.parametrize("name", ["jpeg", "png", "gif", "bmp", "tiff"])
def test_too_large_error_names_the_limit(name):
    """The error for an image that is too large names its size and the limit."""
    text = reason(claims()[name])
    if name == "bmp":
        return  # That its bytes are missing is known before.
    assert "60,000×60,000 pixels, more than max_pixels=178,956,970. Set max_pixels" in text


@pytest.mark.parametrize("name", tiered())
def test_max_pixels_is_inclusive(name):
    """An image of max_pixels is decoded, and one of a pixel more is refused."""
    data = small(name)
    whole = ImageLoader().decode(data)
    num_pixels = whole.shape[1] * whole.shape[2]
    assert torch.equal(ImageLoader(max_pixels=num_pixels).decode(data), whole)
    text = reason(data, max_pixels=num_pixels - 1)
    assert f"{whole.shape[2]}×{whole.shape[1]} pixels" in text
    assert f"max_pixels={num_pixels - 1:,}" in text


@pytest.mark.parametrize("size", [5, (5, 5)])
def test_max_pixels_counts_the_whole_file(size):
    """max_pixels counts the pixels of the file, whatever its size is made."""
    assert "max_pixels=2,000" in reason(small("jpeg 4:2:0"), size=size, max_pixels=2000)


def test_max_pixels_counts_the_result_too():
    """max_pixels holds for a narrow image that is resized to a wide one."""
    data = encoded("png rgb", 1, 500)
    text = reason(data, size=50, max_pixels=1000)
    assert "500×1 pixels would become 25,000×50, more than max_pixels=1,000" in text
    assert "Use a size of (height, width)" in text


@pytest.mark.parametrize(
    ("shape", "size"),
    [((1, 500), 224), ((500, 1), 224), ((1, 3000), (4000, 1)), ((40, 56), (1, 70_000))],
)
def test_impossible_resize_is_an_image_error(shape, size):
    """A size that FFmpeg cannot resize to is an ImageError."""
    for name in ("png rgb", "jpeg 4:2:0"):
        image = outcome(encoded(name, *shape), ImageLoader(size))
        assert image is None or image.numel() > 0


def test_no_limit_is_no_limit():
    data = save(PIL.Image.new("1", (20_000, 10_000)), "PNG")
    with pytest.raises(ImageError, match="max_pixels"):
        ImageLoader(8, max_pixels=100_000_000).decode(data)
    image = ImageLoader((8, 8), max_pixels=None).decode(data)
    assert (image == 0).all()


# -- what FFmpeg does not decode -------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{}, {"size": 8}, {"reducing_gap": None, "size": 8}, {"mode": "L"}]
)
def test_twelve_bit_jpeg_is_named(arguments):
    """The error for a JPEG of 12 bits says what it is."""
    text = reason((FILES / "12_bits.jpg").read_bytes(), **arguments)
    assert text == "it is a JPEG of 12 bits, and FFmpeg decodes only those of 8 bits."


def test_arithmetic_jpeg_is_refused():
    """An arithmetic JPEG is of a kind that FFmpeg cannot decode."""
    text = reason((FILES / "arithmetic.jpg").read_bytes())
    assert text == "it is a JPEG that is damaged, or of a kind that FFmpeg cannot decode."


@pytest.mark.parametrize("arguments", [{}, {"size": 8}])
def test_jpeg_in_tiff_is_named(arguments):
    """The error for a TIFF with JPEG compression says what it is."""
    data = save(picture(*SIZE), "TIFF", compression="jpeg")
    assert reason(data, **arguments) == "it is a TIFF with JPEG inside, which FFmpeg cannot decode."


@pytest.mark.parametrize("options", [{}, {"lossless": True}])
def test_animated_webp_is_named(options):
    """The error for an animated WebP says what it is."""
    frames = [PIL.Image.fromarray(picture(*SIZE, seed=seed)) for seed in range(3)]
    data = save(frames[0], "WEBP", save_all=True, append_images=frames[1:], **options)
    text = reason(data)
    assert "animat" in text


# -- what does not matter to the pixels ------------------------------------------------------------


@pytest.mark.parametrize("name", tiered())
def test_bytes_after_the_end_are_ignored(name):
    """Bytes after the end of an image are ignored."""
    data = small(name)
    expected = ImageLoader().decode(data)
    for junk in [b"\0", b"\n", b"junk", bytes(1000), b"\xff\xd8\xff\xe0 and so on"]:
        assert torch.equal(ImageLoader().decode(data + junk), expected), junk


def test_second_image_in_file_is_ignored():
    """A second image after the first is ignored."""
    for name in ONE_OF_EACH.values():
        for other in ONE_OF_EACH.values():
            found = ImageLoader().decode(small(name) + small(other))
            assert torch.equal(found, ImageLoader().decode(small(name))), (name, other)


def jpeg_segment(marker, content):
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


GARBAGE = random.Random(0).randbytes(300)
EXIF = b"Exif\0\0"


GARBAGE_SEGMENTS = [
    jpeg_segment(0xE1, EXIF + GARBAGE),
    jpeg_segment(0xE1, EXIF),
    jpeg_segment(0xE1, EXIF + b"II*\0\xff\xff\xff\xff"),
    jpeg_segment(0xE1, EXIF + b"MM\0*\0\0\0\x08\xff\xff" + GARBAGE),
    jpeg_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + GARBAGE),
    jpeg_segment(0xE2, b"ICC_PROFILE\0\1\1" + GARBAGE),
    jpeg_segment(0xE2, b"ICC_PROFILE\0\xff\0" + GARBAGE),
    jpeg_segment(0xE2, b"MPF\0" + GARBAGE),
    jpeg_segment(0xE0, b"JFXX\0\x10" + GARBAGE),
    jpeg_segment(0xE0, b"AVI1" + GARBAGE),
    jpeg_segment(0xED, b"Photoshop 3.0\0" + GARBAGE),
    jpeg_segment(0xEC, b"Ducky" + GARBAGE),
    jpeg_segment(0xEF, GARBAGE),
    jpeg_segment(0xFE, b""),
    jpeg_segment(0xFE, GARBAGE),
    jpeg_segment(0xFE, b"AVID" + GARBAGE),
    jpeg_segment(0xFE, b"CS=ITU601"),
    jpeg_segment(0xFE, b"Intel(R) JPEG Library, version 1"),
    jpeg_segment(0xFE, b"Metasoft MJPEG Codec"),
    jpeg_segment(0xFE, b"a thumbnail: " + small("jpeg grey")),
    b"\xff" * 20,
]


@pytest.mark.parametrize("orientation", [False, True])
@pytest.mark.parametrize("name", ["jpeg 4:2:0", "jpeg 4:4:4", "jpeg progressive", "jpeg grey"])
def test_jpeg_with_bad_metadata_is_decoded(name, orientation):
    """Garbage in the metadata of a JPEG changes no pixel."""
    data = small(name)
    jfif_end = 4 + int.from_bytes(data[4:6], "big")
    for size in (None, 9):
        loader = ImageLoader(size, apply_exif_orientation=orientation)
        expected = loader.decode(data)
        for segment in GARBAGE_SEGMENTS:
            for position in (2, jfif_end):
                damaged = data[:position] + segment + data[position:]
                assert torch.equal(loader.decode(damaged), expected), (segment, position)


GARBAGE_CHUNKS = [
    png_chunk(b"eXIf", GARBAGE),
    png_chunk(b"eXIf", b""),
    png_chunk(b"iCCP", b"name\0\0" + GARBAGE),
    png_chunk(b"iCCP", GARBAGE),
    png_chunk(b"tEXt", GARBAGE),
    png_chunk(b"zTXt", b"key\0\0" + GARBAGE),
    png_chunk(b"iTXt", b"key\0\1\0\0\0" + GARBAGE),
    png_chunk(b"gAMA", b""),
    png_chunk(b"gAMA", bytes(4)),
    png_chunk(b"cHRM", GARBAGE[:7]),
    png_chunk(b"cHRM", bytes(32)),
    png_chunk(b"sRGB", b"\xff"),
    png_chunk(b"sBIT", b"\0\0\0"),
    png_chunk(b"bKGD", GARBAGE[:3]),
    png_chunk(b"pHYs", GARBAGE[:2]),
    png_chunk(b"tIME", bytes(7)),
    png_chunk(b"cICP", b"\xff\xff\xff\xff"),
    png_chunk(b"mDCV", GARBAGE),
    png_chunk(b"acTL", struct.pack(">II", 3, 0)),
    png_chunk(b"fcTL", GARBAGE[:26]),
    png_chunk(b"teST", GARBAGE),
    png_chunk(b"tEXt", b"wrong checksum")[:-1] + b"\0",
]


@pytest.mark.parametrize("orientation", [False, True])
@pytest.mark.parametrize("name", ["png rgb", "png rgba 16", "png palette 4 alpha", "png grey 1"])
def test_png_with_bad_metadata_is_decoded(name, orientation):
    """Garbage in the metadata of a PNG changes no pixel."""
    data = small(name)
    loader = ImageLoader(apply_exif_orientation=orientation)
    expected = loader.decode(data)
    start = next(start for chunk, start, _ in png_chunks(data) if chunk == b"IDAT")
    for chunk in GARBAGE_CHUNKS:
        for position in (33, start, len(data) - 12):
            damaged = data[:position] + chunk + data[position:]
            assert torch.equal(loader.decode(damaged), expected), (chunk, position)


def test_webp_with_bad_metadata_is_decoded():
    """Garbage in the metadata of a WebP changes no pixel."""
    pixels = PIL.Image.fromarray(picture(*SIZE))
    plain = save(pixels, "WEBP", lossless=True)
    damaged = save(pixels, "WEBP", lossless=True, exif=GARBAGE, icc_profile=GARBAGE, xmp=GARBAGE)
    for orientation in (False, True):
        loader = ImageLoader(apply_exif_orientation=orientation)
        assert torch.equal(loader.decode(damaged), loader.decode(plain))


def test_tiff_with_bad_metadata_is_decoded():
    """Garbage in the metadata of a TIFF changes no pixel."""
    pixels = picture(*SIZE)
    plain = tiff([pixels.tobytes()], SIZE, [8] * 3)
    more_tags = {
        270: ("I", [0xFFFFFFFF]),
        306: ("H", [7]),
        33432: ("I", [1, 2, 3]),
        34665: ("I", [0xFFFFFF]),
        34675: ("I", [9]),
        34735: ("H", [1, 1, 0, 900]),
    }
    damaged = tiff([pixels.tobytes()], SIZE, [8] * 3, more_tags=more_tags)
    for orientation in (False, True):
        loader = ImageLoader(apply_exif_orientation=orientation)
        assert torch.equal(loader.decode(damaged), loader.decode(plain))


def test_real_metadata_changes_no_pixel():
    """Valid metadata changes no pixel."""
    pixels = PIL.Image.fromarray(picture(*SIZE))
    exif = PIL.Image.Exif()
    exif[0x010E] = "a description"
    text = PIL.PngImagePlugin.PngInfo()
    text.add_text("key", "value", zip=True)
    text.add_itxt("key", "wert", "de", "schlüssel", zip=True)
    profile = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("sRGB")).tobytes()
    for format_name, options in [
        ("JPEG", {"comment": "hello"}),
        ("PNG", {"pnginfo": text}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
    ]:
        plain_options = {"lossless": True} if format_name == "WEBP" else {}
        plain = save(pixels, format_name, **plain_options)
        adorned = save(pixels, format_name, exif=exif, icc_profile=profile, dpi=(72, 72), **options)
        for orientation in (False, True):
            loader = ImageLoader(apply_exif_orientation=orientation)
            assert torch.equal(loader.decode(adorned), loader.decode(plain)), format_name


def test_warnings_of_pil_are_silenced():
    """A warning of PIL is not shown to the user."""
    # Its reader of EXIF warns of damaged entries, and of images above half its own limit.
    exif = EXIF + b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff\xff\x7f\xff\xff\xff\x7f\0\0\0\0"
    data = small("jpeg 4:2:0")
    damaged = data[:2] + jpeg_segment(0xE1, exif) + data[2:]
    loader = ImageLoader((8, 8), apply_exif_orientation=True)
    assert torch.equal(loader.decode(damaged), loader.decode(data))
    large = save(PIL.Image.new("1", (10_000, 10_000)), "PNG")
    assert loader.decode(large).shape == (3, 8, 8)


def test_decoding_is_deterministic():
    """The same file has the same pixels each time."""
    for name in FORMATS:
        data = small(name)
        first = ImageLoader((33, 29)).decode(data)
        assert torch.equal(ImageLoader((33, 29)).decode(io.BytesIO(data).getvalue()), first)
