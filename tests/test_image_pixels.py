"""The pixels are those that PIL and torchvision give."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
import torchvision.datasets.folder
import torchvision.io
from torchvision import tv_tensors
from torchvision.transforms import v2

from spdl_torch import ImageError, ImageLoader

from .images import FORMATS, encoded, gif, picture, png, save, seen_by_pil, tiered
from .tiers import pairwise, sampled

SMALLER = (224, 224)
LARGER = (350, 480)

EXACT = (0, 0.33, 0.33)
PALETTE = (0, 0.52, 0.52)
JPEG = (0.43, 1.1, 0.95)
SIXTEEN_BITS = (0.72, 0.8, 0.75)
TOLERANCES = {
    # Mean absolute difference to PIL: at full size, resized to SMALLER and to LARGER.
    "jpeg 4:4:4": (0.07, 0.45, 0.5),
    "jpeg 4:2:2": (0.37, 0.8, 0.7),
    "jpeg 4:4:0": (0.5, 0.7, 0.7),
    # Here libjpeg repeats colours, and we interpolate them.
    "jpeg 4:1:1": (5.8, 4.4, 4.4),
    "jpeg 4:1:0": (8.6, 6.8, 6.8),
    # And here it is the other way round.
    "jpeg ycck": (4.6, 4.5, 4.5),
    "jpeg rgb": (0.035, 0.33, 0.35),
    "jpeg grey": (0.035, 0.33, 0.33),
    "jpeg progressive grey": (0.035, 0.33, 0.33),
    "jpeg cmyk": (0.8, 0.85, 1.0),
    "jpeg progressive cmyk": (0.8, 0.85, 1.0),
    "jpeg lossless": (0, 0.33, 0.33),
    "webp lossy": (0.43, 1.0, 0.9),
    "webp lossy alpha": (0.43, 1.0, 0.9),
    # Rounded here, and cut off there.
    "png rgb 16": SIXTEEN_BITS,
    "png rgb 16 interlaced": SIXTEEN_BITS,
    "png rgba 16": SIXTEEN_BITS,
    "png grey 16": SIXTEEN_BITS,
    "png grey alpha 16": SIXTEEN_BITS,
    "tiff rgb 16": SIXTEEN_BITS,
    "tiff rgb 16 big-endian": SIXTEEN_BITS,
    "tiff grey 16": SIXTEEN_BITS,
    "tiff grey 16 big-endian": SIXTEEN_BITS,
    "png grey 1": (0, 0.33, 0.5),
    "tiff bilevel": (0, 0.33, 0.5),
    "tiff fax": (0, 0.33, 0.5),
    "bmp grey": (0, 0.33, 0.42),
    "tiff cmyk": (0.8, 0.85, 1.0),
    # Five bits make eight in more than one way.
    "bmp 16 555": (0.5, 0.55, 0.5),
    "bmp 16 565": (0.5, 0.55, 0.5),
}


def tolerance(name, column):
    if name in TOLERANCES:
        return TOLERANCES[name][column]
    if name.startswith("jpeg"):
        return JPEG[column]
    has_palette = "palette" in name or name in {"bmp 1", "bmp 4"} or name.startswith("bmp 8")
    return (PALETTE if has_palette else EXACT)[column]


def difference(image, expected):
    """Mean absolute difference between C×H×W and what has its channels last."""
    expected = np.asarray(expected)
    if expected.ndim == 2:
        expected = expected[:, :, None]
    assert tuple(image.shape) == (expected.shape[2], *expected.shape[:2])
    return np.abs(image.numpy().transpose(1, 2, 0).astype(int) - expected).mean()


def pil_image(data):
    return PIL.Image.fromarray(seen_by_pil(data))


# -- every format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jpeg 4:2:0", "png rgba 16", "gif 87a"])
@pytest.mark.parametrize("size", [None, 50])
def test_result_is_a_torchvision_image(name, size):
    """An image is torchvision's Image, contiguous and of bytes."""
    image = ImageLoader(size).decode(encoded(name))
    assert type(image) is tv_tensors.Image
    assert image.dtype == torch.uint8
    assert image.is_contiguous()


@pytest.mark.parametrize("name", tiered())
def test_whole_image_equals_pil(name):
    """An image at full size has the pixels that PIL decodes."""
    data = encoded(name)
    assert difference(ImageLoader().decode(data), seen_by_pil(data)) <= tolerance(name, 0)


@pytest.mark.parametrize(("column", "size"), [(1, SMALLER), (2, LARGER)])
@pytest.mark.parametrize("name", tiered())
def test_resized_image_equals_pil(name, column, size):
    """A resized image has the pixels that PIL resizes to."""
    data = encoded(name)
    expected = v2.Resize(size)(pil_image(data))
    assert difference(ImageLoader(size).decode(data), expected) <= tolerance(name, column)


@pytest.mark.parametrize("name", ["jpeg 4:1:1", "jpeg 4:1:0"])
def test_interpolated_chroma_is_closer_than_pil(name):
    """Interpolated colours are closer to the picture than those that PIL repeats."""
    data = encoded(name)
    original = picture(48, 64, seed=3, has_edges=False)
    ours = difference(ImageLoader().decode(data), original)
    assert ours < np.abs(seen_by_pil(data).astype(int) - original).mean()


@pytest.mark.parametrize(
    "name", ["jpeg 4:4:4", "jpeg 4:2:2", "jpeg 4:2:0", "webp lossy", "png rgb"]
)
@pytest.mark.parametrize("size", sampled([(241, 321), (239, 320), (240, 319)], 3))
def test_odd_sizes_equal_pil(name, size):
    """An odd number of rows or columns makes no difference."""
    data = encoded(name, *size)
    assert difference(ImageLoader().decode(data), seen_by_pil(data)) <= tolerance(name, 0)
    for column, resized in ((1, SMALLER), (2, LARGER)):
        expected = v2.Resize(resized)(pil_image(data))
        assert difference(ImageLoader(resized).decode(data), expected) <= tolerance(name, column)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("format_name", ["PNG", "TIFF", "BMP", "GIF", "JPEG", "WEBP"])
def test_black_and_white_are_exact(format_name, mode):
    """Black stays black and white stays white in every format and mode."""
    if format_name == "JPEG" and mode in {"P", "RGBA"}:
        mode = "RGB"
    options = {"lossless": True} if format_name == "WEBP" else {}
    for value in (0, 255):
        data = save(
            PIL.Image.new("RGB", (41, 37), (value,) * 3).convert(mode), format_name, **options
        )
        for size in (None, 20, 90):
            assert (ImageLoader(size).decode(data) == value).all(), (value, size)
            assert (ImageLoader(size, mode="L").decode(data) == value).all(), (value, size)


# -- modes -----------------------------------------------------------------------------------------

# torchvision wants its decoders to be replaced by torchcodec's.
knows_of_deprecation = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding capabilities:DeprecationWarning"
)

TORCHVISION_DECODES = [
    name
    for name in FORMATS
    if name.startswith(("jpeg", "png", "webp", "gif")) and name != "gif animated"
]
"""torchvision decodes all frames of an animation, so that is left out."""


def by_torchvision(data, mode):
    image = torchvision.io.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode)
    if image.dtype == torch.uint16:
        image = image.to(torch.int32) >> 8
    return image.permute(1, 2, 0).numpy()


@knows_of_deprecation
@pytest.mark.parametrize(
    # It leaves these in colour, or does not make them grey.
    "name",
    tiered(
        name
        for name in TORCHVISION_DECODES
        if not name.startswith(("webp", "gif", "jpeg lossless"))
    ),
)
def test_grey_is_as_torchvision_decodes_it(name):
    data = encoded(name)
    image = ImageLoader(mode="L").decode(data)
    assert image.shape[0] == 1
    expected = by_torchvision(data, torchvision.io.ImageReadMode.GRAY)
    allowed = 0.035 if name.startswith("jpeg") else 1.2
    if "cmyk" in name or "ycck" in name:
        allowed = 1.5
    if name.startswith("png grey"):
        allowed = tolerance(name, 0)
    assert difference(image, expected) <= allowed


@pytest.mark.parametrize("name", tiered())
def test_grey_equals_pil_at_any_size(name):
    """mode="L" has the pixels that PIL converts to, at any size."""
    data = encoded(name)
    for size in (None, (120, 160)):
        image = ImageLoader(size, mode="L").decode(data)
        assert image.shape[0] == 1
        expected = pil_image(data).convert("L")
        if size is not None:
            expected = v2.Resize(size)(expected)
        # PIL makes grey out of clipped colours, and of interpolated ones.
        allowed = 0.4 if name.startswith(("jpeg", "webp")) else 0.85
        assert difference(image, expected) <= max(allowed, tolerance(name, 0)), size


UNCHANGED_CHANNELS = {
    "png grey 8 key": 2,
    "png rgb key": 4,
    # torchvision returns the indices and the inks, which mean nothing to a network.
    **{name: 3 for name in FORMATS if "palette" in name},
    "png palette 4 alpha": 4,
    "png palette 8 alpha": 4,
    "jpeg cmyk": 3,
    "jpeg progressive cmyk": 3,
    "jpeg ycck": 3,
    # It fills the transparent colour with the background.
    "gif transparent": 3,
}
"""Where we differ from torchvision."""


@knows_of_deprecation
@pytest.mark.parametrize("name", tiered(TORCHVISION_DECODES))
def test_unchanged_has_torchvisions_channels(name):
    """mode="unchanged" has the channels that torchvision decodes."""
    data = encoded(name)
    image = ImageLoader(mode="unchanged").decode(data)
    assert image.dtype == torch.uint8
    if name in UNCHANGED_CHANNELS:
        assert image.shape[0] == UNCHANGED_CHANNELS[name]
        return
    expected = by_torchvision(data, torchvision.io.ImageReadMode.UNCHANGED)
    assert difference(image, expected) <= tolerance(name, 0)


@pytest.mark.parametrize(
    ("name", "num_channels"),
    [
        ("bmp 1", 3),
        ("bmp 24", 3),
        ("bmp 32", 3),
        ("gif grey", 3),
        ("tiff raw", 3),
        ("tiff rgba", 4),
        ("tiff grey", 1),
        ("tiff grey 16", 1),
        ("tiff bilevel", 1),
        ("tiff palette", 3),
        ("tiff cmyk", 3),
    ],
)
def test_unchanged_keeps_grey_and_alpha(name, num_channels):
    """mode="unchanged" has one channel for grey and one more for alpha."""
    image = ImageLoader(mode="unchanged").decode(encoded(name))
    assert image.shape[0] == num_channels


@pytest.mark.parametrize("name", ["png rgba", "png grey alpha", "webp lossless alpha", "tiff rgba"])
@pytest.mark.parametrize("size", [None, SMALLER, LARGER])
def test_alpha_is_resized_on_its_own(name, size):
    data = encoded(name)
    image = ImageLoader(size, mode="unchanged").decode(data)
    with PIL.Image.open(io.BytesIO(data)) as expected:
        alpha = expected.getchannel("A")
    if size is not None:
        alpha = v2.Resize(size)(alpha)
    assert difference(image[-1:], alpha) <= (0 if size is None else 0.57)
    colors = image[:-1].expand(3, -1, -1)
    assert (colors.int() - ImageLoader(size).decode(data).int()).abs().max() <= 1


# -- sizes and crops -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 16, 61, 224])
def test_int_size_is_the_shorter_side(size):
    """A size that is an int is the shorter side, as in torchvision's Resize."""
    loader = ImageLoader(size)
    resize = v2.Resize(size)
    for height in (1, 2, 3, 31, 64, 75, 113):
        for width in (1, 2, 3, 37, 64, 99, 128):
            data = png(np.zeros((height, width), np.uint8), 8, 0)
            expected = resize(PIL.Image.new("L", (width, height)))
            assert loader.decode(data).shape == (3, expected.height, expected.width)


@pytest.mark.parametrize("size", [20, 75, 120, 224, 333])
@pytest.mark.parametrize("name", ["jpeg 4:2:0", "png rgb", "webp lossy"])
def test_int_size_has_torchvisions_pixels(name, size):
    """A size that is an int has the pixels of torchvision's Resize."""
    data = encoded(name)
    expected = v2.Resize(size)(pil_image(data))
    allowed = tolerance(name, 1)
    if size == 120 and name != "png rgb":
        allowed = 2.5  # Chroma that has the right size already is not smoothed.
    assert difference(ImageLoader(size, reducing_gap=None).decode(data), expected) <= allowed


def test_sequence_of_one_is_int():
    """A size of one element means the same as an int."""
    data = encoded("png rgb")
    assert torch.equal(ImageLoader([50]).decode(data), ImageLoader(50).decode(data))


@pytest.mark.parametrize("name", ["jpeg 4:2:0", "jpeg 4:4:4", "png rgb", "gif 87a"])
@pytest.mark.parametrize(
    ("size", "crop"),
    [
        (256, 224),
        (256, (200, 180)),
        (100, "center"),
        (101, "center"),
        (101, 50),
        ((120, 200), 99),
        ((121, 201), (121, 1)),
    ],
)
def test_crop_equals_torchvisions_center_crop(name, size, crop):
    """A crop is the middle, as torchvision's CenterCrop takes it."""
    data = encoded(name)
    crop_size = size if crop == "center" else crop
    transform = v2.Compose([v2.Resize(size), v2.CenterCrop(crop_size)])
    image = ImageLoader(size, crop=crop).decode(data)
    allowed = tolerance(name, 1)
    if size == (120, 200) and name == "jpeg 4:2:0":
        allowed = 2  # Chroma that has the right height already is not smoothed.
    assert difference(image, transform(pil_image(data))) <= allowed


def test_center_is_rounded_as_in_torchvision():
    """The middle is rounded as torchvision rounds it."""
    for height in range(40, 60):
        data = encoded("png rgb", height, 71)
        transform = v2.Compose([v2.Resize(40), v2.CenterCrop((39, 37))])
        image = ImageLoader(40, crop=(39, 37)).decode(data)
        assert difference(image, transform(pil_image(data))) <= 0.4


RANDOM_CROP_TOLERANCES = {
    "jpeg 4:4:4": 0.5,
    "jpeg 4:2:2": 0.75,
    "jpeg 4:2:0": 0.6,
    "jpeg 4:4:0": 1.25,
    "jpeg 4:1:1": 5.3,
    "jpeg grey": 0.3,
    "jpeg cmyk": 0.9,
    "jpeg progressive": 0.6,
    "png rgb": 0.3,
    "png rgba": 0.3,
    "png rgb interlaced": 0.3,
    "png palette 8": 0.25,
    "webp lossy": 0.5,
    "webp lossless": 0.3,
    "webp lossless alpha": 0.3,
    "gif 87a": 0.25,
    "tiff raw": 0.3,
}


@pytest.mark.parametrize("name", tiered(RANDOM_CROP_TOLERANCES))
def test_random_crop_equals_torchvision(name):
    """A random crop is the one that torchvision takes with the same seed."""
    data = encoded(name)
    loader = ImageLoader(96, crop="random", horizontal_flip=0.5)
    transform = v2.Compose([v2.RandomResizedCrop(96), v2.RandomHorizontalFlip()])
    for seed in range(8):
        torch.manual_seed(seed)
        image = loader.decode(data)
        torch.manual_seed(seed)
        expected = transform(pil_image(data))
        assert difference(image, expected) <= RANDOM_CROP_TOLERANCES[name], seed


@pytest.mark.parametrize("name", ["jpeg 4:4:4", "png rgb"])
def test_scale_and_ratio_equal_torchvision(name):
    """scale and ratio mean what they mean for RandomResizedCrop."""
    data = encoded(name)
    options = {"scale": (0.2, 0.3), "ratio": (2.0, 3.0)}
    loader = ImageLoader((40, 100), crop="random", **options)
    transform = v2.RandomResizedCrop((40, 100), **options)
    for seed in range(8):
        torch.manual_seed(seed)
        image = loader.decode(data)
        torch.manual_seed(seed)
        assert difference(image, transform(pil_image(data))) <= 0.7, seed


def test_random_crop_draws_as_torchvision():
    """A random crop draws as many random numbers as torchvision's."""
    torch.manual_seed(3)
    loader = ImageLoader(30, crop="random", horizontal_flip=0.3)
    for _ in range(4):
        loader.decode(encoded("jpeg 4:2:0"))
    ours = torch.rand(1)
    torch.manual_seed(3)
    transform = v2.Compose([v2.RandomResizedCrop(30), v2.RandomHorizontalFlip(0.3)])
    for _ in range(4):
        transform(PIL.Image.fromarray(picture()))
    assert torch.equal(ours, torch.rand(1))


def test_center_crop_draws_nothing():
    """Without randomness no random number is drawn."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    ImageLoader(30, crop="center").decode(encoded("jpeg 4:2:0"))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("size", [None, 70, (51, 77)])
@pytest.mark.parametrize("name", ["jpeg 4:2:0", "png rgb", "webp lossless alpha", "gif 87a"])
def test_flipped_image_is_exact_mirror(name, size):
    """A flipped image is the exact mirror."""
    data = encoded(name)
    flipped = ImageLoader(size, horizontal_flip=1.0, mode="unchanged").decode(data)
    assert torch.equal(flipped.flip(2), ImageLoader(size, mode="unchanged").decode(data))


def test_flipped_crop_is_exact_mirror():
    """A flipped random crop is the exact mirror."""
    data = encoded("jpeg 4:2:0")
    torch.manual_seed(1)
    flipped = ImageLoader(60, crop="random", horizontal_flip=1.0).decode(data)
    torch.manual_seed(1)
    assert torch.equal(flipped.flip(2), ImageLoader(60, crop="random").decode(data))


# -- EXIF ------------------------------------------------------------------------------------------


def turned(format_name, orientation, size=(240, 320), **options):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    image = PIL.Image.fromarray(picture(*size))
    return save(image, format_name, exif=exif, **options)


def as_seen(data):
    with PIL.Image.open(io.BytesIO(data)) as image:
        return PIL.ImageOps.exif_transpose(image).convert("RGB")


ORIENTATIONS = sampled([6, 1, 3, 5, 2, 4, 7, 8], 4)
"""The default tier has one that turns the image and one that mirrors it too."""


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize(
    ("format_name", "allowed"), [("JPEG", 0.5), ("PNG", 0), ("WEBP", 0.5), ("TIFF", 0)]
)
def test_exif_orientation_is_applied(format_name, allowed, orientation):
    """An image is turned as its EXIF orientation says."""
    data = turned(format_name, orientation)
    image = ImageLoader(apply_exif_orientation=True).decode(data)
    assert difference(image, as_seen(data)) <= allowed


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("size", [90, (80, 130)])
def test_exif_is_applied_before_resizing(size, orientation):
    """A size applies to the image as it is seen."""
    data = turned("JPEG", orientation)
    image = ImageLoader(size, apply_exif_orientation=True).decode(data)
    assert difference(image, v2.Resize(size)(as_seen(data))) <= 1.2


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_exif_is_applied_before_cropping(orientation):
    """A crop applies to the image as it is seen."""
    data = turned("JPEG", orientation)
    loader = ImageLoader(101, crop=(60, 81), apply_exif_orientation=True)
    transform = v2.Compose([v2.Resize(101), v2.CenterCrop((60, 81))])
    assert difference(loader.decode(data), transform(as_seen(data))) <= 1.2


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("size", [(240, 320), (1200, 1600)])
def test_exif_is_applied_before_random_crop(orientation, size):
    """A random crop applies to the image as it is seen."""
    # The larger image is decoded at a fraction of its size.
    data = turned("JPEG", orientation, size, subsampling=0)
    loader = ImageLoader((24, 32), crop="random", horizontal_flip=0.5, apply_exif_orientation=True)
    transform = v2.Compose([v2.RandomResizedCrop((24, 32)), v2.RandomHorizontalFlip()])
    for seed in range(3):
        torch.manual_seed(seed)
        image = loader.decode(data)
        torch.manual_seed(seed)
        assert difference(image, transform(as_seen(data))) <= 2.8, seed


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_unknown_orientation_is_ignored(orientation):
    """An orientation that means nothing turns nothing."""
    data = turned("JPEG", orientation)
    image = ImageLoader(apply_exif_orientation=True).decode(data)
    assert torch.equal(image, ImageLoader().decode(data))


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP"])
def test_exif_is_ignored_by_default(format_name):
    """The EXIF orientation of a file that is no TIFF is ignored by default."""
    options = {"lossless": True} if format_name == "WEBP" else {}
    upright, on_its_side = (turned(format_name, number, **options) for number in (1, 6))
    assert torch.equal(ImageLoader().decode(on_its_side), ImageLoader().decode(upright))


def by_default_loader(data, tmp_path):
    """Return the image that torchvision's folders decode by default."""
    path = tmp_path / "image"
    path.write_bytes(data)
    return torchvision.datasets.folder.default_loader(path)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_tiff_is_turned_by_default(orientation, compression, tmp_path):
    """The orientation of a TIFF is applied by default, as PIL does."""
    data = turned("TIFF", orientation, compression=compression)
    expected = by_default_loader(data, tmp_path)
    assert difference(ImageLoader().decode(data), expected) == 0
    size_and_crop = v2.Compose([v2.Resize(101), v2.CenterCrop((60, 81))])
    image = ImageLoader(101, crop=(60, 81)).decode(data)
    assert difference(image, size_and_crop(expected)) <= 0.7


# -- the canvas of a GIF ---------------------------------------------------------------------------

COLORS = np.random.default_rng(0).integers(0, 256, (2, 256, 3), np.uint8)


@pytest.mark.parametrize(
    ("place", "palettes", "background", "transparent", "is_interlaced"),
    pairwise(
        # Within the canvas of 13×11, at its beginning, beyond it; and all of it.
        [(2, 3, 7, 5), (0, 0, 7, 5), (10, 8, 7, 5), (0, 0, 13, 11)],
        # Colours of the file's palette and of the frame's.
        [(16, 0), (16, 32), (32, 16), (0, 16), (256, 0), (0, 0)],
        [0, 5, 200],
        [None, 0, 3, 20, 200],
        [False, True],
    ),
)
def test_gif_canvas_equals_pil(place, palettes, background, transparent, is_interlaced, tmp_path):
    """A GIF whose first frame does not fill it has PIL's pixels beside the frame."""
    top, left, height, width = place
    tables = [COLORS[number, :n] if n else None for number, n in enumerate(palettes)]
    data = gif(
        # Some are in no palette of 16 colours.
        np.random.default_rng(1).integers(0, 32, (height, width)),
        (13, 11),
        (top, left),
        palette=tables[0],
        frame_palette=tables[1],
        background=background,
        transparent=transparent,
        is_interlaced=is_interlaced,
    )
    assert difference(ImageLoader().decode(data), by_default_loader(data, tmp_path)) == 0


def test_gif_canvas_is_limited():
    """A frame that enlarges the canvas beyond the limit is an error that names it."""
    data = gif(np.zeros((2, 2), np.uint8), (3, 3), (60_000, 60_000), palette=COLORS[0])
    with pytest.raises(ImageError, match="more than max_pixels"):
        ImageLoader().decode(data)
    data = gif(np.zeros((2, 2), np.uint8), (3, 3), (0xFFFF, 0), palette=COLORS[0])
    with pytest.raises(ImageError, match="outside of the largest possible image"):
        ImageLoader().decode(data)


# -- reduced decoding ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jpeg 4:2:0", "jpeg 4:4:4", "jpeg progressive", "jpeg grey"])
@pytest.mark.parametrize("size", sampled([64, 100, (40, 70)], 3))
def test_reduced_jpeg_looks_the_same(name, size):
    """A large JPEG that is decoded at a fraction of its size looks the same."""
    data = encoded(name, 2000, 2600)
    expected = v2.Resize(size)(pil_image(data))
    quick = difference(ImageLoader(size).decode(data), expected)
    exact = difference(ImageLoader(size, reducing_gap=None).decode(data), expected)
    assert exact <= 0.2
    assert exact <= quick <= 1.9


def test_lossless_jpeg_has_any_size():
    """A lossless JPEG is decoded to any size."""
    # FFmpeg cannot leave out any of its pixels.
    data = encoded("jpeg lossless")
    for size in (5, 12, 24):
        image = ImageLoader(size, reducing_gap=1.0).decode(data)
        assert difference(image, v2.Resize(size)(pil_image(data))) <= 3


@pytest.mark.parametrize("orientation", sampled([1, 3, 6], 3))
@pytest.mark.parametrize(
    "options",
    [{"subsampling": 0}, {"subsampling": 2}, {"progressive": True}, {"restart_marker_rows": 1}],
    ids=str,
)
def test_rows_below_a_crop_are_skipped(options, orientation):
    """Leaving out the rows below a random crop does not change it."""
    data = turned("JPEG", orientation, **options)
    for seed in range(20):
        images = []
        for reducing_gap in (3.0, None):
            torch.manual_seed(seed)
            loader = ImageLoader(
                96, crop="random", reducing_gap=reducing_gap, apply_exif_orientation=True
            )
            images.append(loader.decode(data))
        assert torch.equal(*images)


def test_reduced_random_crop_looks_the_same():
    """A random crop of a large JPEG that is decoded in part looks the same."""
    data = encoded("jpeg 4:4:4", 2000, 2600)
    transform = v2.RandomResizedCrop(32)
    seen = pil_image(data)
    for seed in range(8):
        torch.manual_seed(seed)
        image = ImageLoader(32, crop="random").decode(data)
        torch.manual_seed(seed)
        assert difference(image, transform(seen)) <= 2.5, seed


@pytest.mark.parametrize("size", [(2001, 2599), (1993, 2601), (2007, 2607)])
def test_reduced_odd_sizes_are_not_shifted(size):
    """Sides that are no multiple of eight are reduced without a shift."""
    # A black picture with a white frame: any shift would darken one of its sides.
    pixels = np.zeros(size, np.uint8)
    pixels[:80] = pixels[-80:] = pixels[:, :80] = pixels[:, -80:] = 255
    data = save(pixels, "JPEG", quality=95)
    image = ImageLoader((50, 65)).decode(data)
    assert difference(image[:1], v2.Resize((50, 65))(PIL.Image.fromarray(pixels))) <= 2.2
    assert (image[:, 0] > 250).all()
    assert (image[:, -1] > 250).all()
    assert (image[:, :, 0] > 250).all()
    assert (image[:, :, -1] > 250).all()


# -- extreme shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("jpeg 4:4:4", "jpeg 4:2:2", "jpeg 4:2:0", "jpeg grey", "jpeg cmyk", "jpeg progressive"),
        *("png rgb", "png grey 1", "png palette 4", "png rgba 16"),
        *("webp lossy", "webp lossy alpha", "webp lossless", "gif 87a", "gif interlaced"),
        *("bmp 1", "bmp 8", "bmp 24", "tiff raw", "tiff lzw", "tiff fax"),
    ],
)
def test_smallest_images_are_decoded(name):
    """The smallest and narrowest images are decoded, resized and cropped."""
    for shape in [(1, 1), (1, 500), (500, 1), (3, 2), (2, 3), (1, 2), (17, 1)]:
        data = encoded(name, *shape)
        whole = ImageLoader().decode(data)
        assert whole.shape == (3, *shape)
        if FORMATS[name].is_lossless and "16" not in name:
            assert difference(whole, seen_by_pil(data)) == 0
        assert ImageLoader((10, 20)).decode(data).shape == (3, 10, 20)
        resized = v2.Resize(3)(PIL.Image.new("L", shape[::-1]))
        assert ImageLoader(3).decode(data).shape == (3, resized.height, resized.width)
        assert ImageLoader(8, crop="center").decode(data).shape == (3, 8, 8)
        loader = ImageLoader((6, 7), crop="random", horizontal_flip=0.5)
        assert loader.decode(data).shape == (3, 6, 7)


@pytest.mark.parametrize("shape", [(8, 4000), (4000, 8), (1, 3000), (3000, 1)])
def test_a_narrow_jpeg_can_be_reduced(shape):
    data = encoded("jpeg 4:2:0", *shape)
    for reducing_gap in (None, 1.0):
        loader = ImageLoader((1, 1), reducing_gap=reducing_gap)
        assert loader.decode(data).shape == (3, 1, 1)
        loader = ImageLoader((2, 3), crop="random", reducing_gap=reducing_gap)
        assert loader.decode(data).shape == (3, 2, 3)
