"""`ImageLoader`: checks its arguments, and plans what to do with each image."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from operator import gt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torchvision.tv_tensors import Image

from ._ffmpeg import (
    Frame,
    Mode,
    Output,
    Resampling,
    ThreadTools,
    frame_of,
    is_deep_grey,
    output_of,
    pixels_of,
)
from ._file import ImageError, ImageFile, parsed
from ._geometry import (
    Box,
    Orientation,
    Pixels,
    Plan,
    Size,
    center_box,
    in_words,
    random_box,
    resized,
)

if TYPE_CHECKING:
    Encoded = bytes | bytearray | memoryview | torch.Tensor
    Path = str | os.PathLike[str]

_MAX_PIXELS = 178_956_970
"""PIL's limit: 512 MB as RGB."""

_NO_MODE = torch.DisableTorchFunction
_nothing = contextlib.nullcontext()
_tools = ThreadTools()
_AS_STORED = Orientation()

_MARGIN_ROWS = 8
"""Rows decoded beyond the last one needed, which affect its colour if chroma is subsampled."""


class ImageLoader:
    """Reads and decodes an image file. Pass it to torchvision's datasets as their `loader`.

    It returns a `torchvision.tv_tensors.Image`, uint8, C×H×W. Threads may share it.

    >>> loader = ImageLoader(size=224, crop="random", horizontal_flip=0.5)
    >>> dataset = torchvision.datasets.ImageFolder("photos", loader=loader)
    >>> images, labels = next(iter(DataLoader(dataset, batch_size=4, num_workers=2)))
    >>> images.shape
    torch.Size([4, 3, 224, 224])

    Args:
        size: Resize, antialiased, to (height, width), or the shorter side to an int. None keeps the
            size.
        crop: `"random"` resizes a random part of the image, as `RandomResizedCrop(size)`.
            `"center"` keeps the middle square of an image resized to an int. An int or (height,
            width) keeps that much of the middle, as `Resize(size)` and `CenterCrop(crop)`.
        scale: For `crop="random"`: the smallest and the largest share of the image's area.
        ratio: For `crop="random"`: the smallest and the largest ratio of width to height.
        horizontal_flip: Probability of a horizontal flip.
        interpolation: How to resize: `"bilinear"` or `"bicubic"`, both antialiased.
        mode: `"RGB"` or `"L"` without alpha. `"unchanged"` returns one channel for grey images,
            three for colour, and one more for alpha.
        apply_exif_orientation: Turn the image as its EXIF entry says. A TIFF is always turned.
        reducing_gap: A JPEG is decoded at a quarter or an eighth of its size if that leaves
            `reducing_gap` times as much as `size` needs, and not below the random part that is
            kept. None always decodes all pixels.
        max_pixels: Larger images are an error, because a small file can claim gigabytes of memory.
            None sets no limit except FFmpeg's.
    """

    __module__ = "spdl_torch"

    def __init__(
        self,
        size: int | Sequence[int] | None = None,
        *,
        crop: Literal["center", "random"] | int | Sequence[int] | None = None,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        horizontal_flip: float = 0.0,
        interpolation: Resampling = "bilinear",
        mode: Mode = "RGB",
        apply_exif_orientation: bool = False,
        reducing_gap: float | None = 3.0,
        max_pixels: int | None = _MAX_PIXELS,
    ) -> None:
        self.size = _checked_size("size", size)
        self.crop = crop if isinstance(crop, str) else _checked_size("crop", crop)
        self.scale = _checked_range("scale", scale)
        self.ratio = _checked_range("ratio", ratio)
        self.horizontal_flip = horizontal_flip
        self.interpolation = interpolation
        self.mode = mode
        self.apply_exif_orientation = apply_exif_orientation
        self.reducing_gap = reducing_gap
        self.max_pixels = max_pixels
        self._check()

    def _check(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f'mode must be "RGB", "L" or "unchanged", got {self.mode!r}.')
        if self.interpolation not in get_args(Resampling):
            raise ValueError(
                f'interpolation must be "bilinear" or "bicubic", got {self.interpolation!r}.'
            )
        if not 0 <= self.horizontal_flip <= 1:
            raise ValueError(
                "horizontal_flip is a probability between 0 and 1, got "
                f"{self.horizontal_flip!r}. Use 0.5 to mirror every other image."
            )
        gap, max_pixels = self.reducing_gap, self.max_pixels
        if gap is not None and gap < 1:
            raise ValueError(
                f"reducing_gap must be at least 1, got {gap!r}. Use None to decode all pixels."
            )
        if max_pixels is not None and max_pixels < 1:
            raise ValueError(
                f"max_pixels must be at least 1, got {max_pixels!r}. Use None for no limit."
            )
        if self.crop is not None:
            self._check_crop(self.crop)

    def _check_crop(self, crop: str | int | tuple[int, int]) -> None:
        if self.size is None:
            raise ValueError("crop needs a size to resize to. Set size too.")
        if isinstance(crop, str) and crop not in {"center", "random"}:
            raise ValueError(
                f'crop must be "center", "random", an int or (height, width), got {crop!r}.'
            )
        if crop == "center" and not isinstance(self.size, int):
            raise ValueError(
                f'crop="center" keeps the middle square of an image whose shorter side is size, '
                f"but size={self.size} is both sides. Make size an int, or leave crop out."
            )
        if not isinstance(crop, str) and any(map(gt, _pair(crop), _pair(self.size))):
            raise ValueError(
                f"crop={crop} keeps more than size={self.size} leaves. Make size larger."
            )

    def __call__(self, path: Path) -> Image:
        """Read and decode the image at `path`."""
        return self.decode(self.read(path), path)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    def read(self, path: Path) -> bytes:
        """I/O: return the bytes of a file."""
        # Without a buffer, which would be one more copy.
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (takes a third of the time)
            return file.read()

    def decode(self, data: Encoded, path: Path | None = None) -> Image:
        """CPU: return the image in the bytes of a file. `path` is for the error message."""
        with _named(path):
            pixels = decoded(data, self.decoding, self._plan, draws=self.is_random)
        return pixels.as_subclass(Image)

    def decode_whole(
        self, data: Encoded, path: Path | None = None, *, max_side: int | None = None
    ) -> WholeImage | None:
        """CPU: return the image before anything random is done with it, for `render`.

        None: `decode` would decode a part of its pixels only.
        """
        with _named(path):
            is_cropped = self.crop == "random"
            return whole(
                data, self.decoding, self._resized_size, max_side=max_side, is_cropped=is_cropped
            )

    def render(self, image: WholeImage, path: Path | None = None) -> Image:
        """CPU: return what `decode` returns for the file of an image."""
        with _named(path):
            pixels = rendered(image, self.decoding, self._plan, draws=self.is_random)
        return pixels.as_subclass(Image)

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return self.crop == "random" or self.horizontal_flip > 0

    @property
    def resizing(self) -> Any:
        """What the size depends on that an image is resized to."""
        return self.size, self.crop == "random"

    def _resized_size(self, seen_size: Size) -> Size:
        """Return what an image is resized to, before it may be cropped once more."""
        if isinstance(self.size, int) and self.crop != "random":
            return resized(seen_size, self.size)
        return seen_size if self.size is None else _pair(self.size)

    @property
    def decoding(self) -> Decoding:
        """The arguments that are not geometry."""
        return Decoding(
            self.mode,
            self.interpolation,
            self.apply_exif_orientation,
            self.reducing_gap,
            self.max_pixels,
        )

    def _plan(self, seen_size: tuple[int, int], generator: torch.Generator | None) -> Plan:
        """Return the steps for an image of this size. Draws the random numbers."""
        box, center = None, None
        if self.crop == "random":
            box = random_box(seen_size, self.scale, self.ratio, generator)
        size = self._resized_size(seen_size)
        if self.max_pixels is not None and size[0] * size[1] > self.max_pixels:
            raise ImageError(
                f"its {in_words(seen_size)} pixels would become {in_words(size)}, more than "
                f"max_pixels={self.max_pixels:,}. Use a size of (height, width)"
            )
        if self.crop is not None and self.crop != "random":
            center = center_box(size, _pair(self.size if self.crop == "center" else self.crop))
        is_mirrored = (
            self.horizontal_flip > 0
            and torch.rand(1, generator=generator).item() < self.horizontal_flip
        )
        return Plan(seen_size, box, size, center, is_mirrored)


@contextlib.contextmanager
def _named(path: Path | None) -> Iterator[None]:
    """Let an ImageError say which file it is about."""
    try:
        yield
    except ImageError as error:
        name = "image" if path is None else os.fspath(path)
        raise ImageError(f"cannot decode {name}: {error}.") from error.__cause__


# -- decoding --------------------------------------------------------------------------------------


class Decoding(NamedTuple):
    """How to decode an image: the arguments of `ImageLoader` that are not geometry."""

    mode: Mode = "RGB"
    interpolation: Resampling = "bilinear"
    apply_exif_orientation: bool = False
    reducing_gap: float | None = 3.0
    max_pixels: int | None = _MAX_PIXELS
    takes_deep_grey: bool = True
    """Keep the high byte of grey images of 16 bits; otherwise they are an ImageError."""


MakePlan = Callable[[Size, torch.Generator | None], Plan]
"""Returns the plan for an image of a size. Draws the random numbers, from the generator if any."""


def decoded(data: Encoded, decoding: Decoding, make_plan: MakePlan, *, draws: bool) -> torch.Tensor:
    """Return the image in the bytes of a file, uint8, C×H×W. `draws`: the plan is random."""
    with _planner(make_plan, draws=draws) as plan_for:
        return _pixels(_as_bytes(data), decoding, plan_for)


@contextlib.contextmanager
def _planner(make_plan: MakePlan, *, draws: bool) -> Iterator[Callable[[Size], Plan]]:
    """Return a function that makes the plan for an image of a size."""
    # The torch function mode of a worker thread costs more than the draws themselves. With the
    # sample's generator at hand it is not needed.
    generator = torch.thread_safe_generator() if draws else None
    with _NO_MODE() if generator is not None else _nothing:
        yield lambda size: make_plan(size, generator)


def _pixels(data: bytes, decoding: Decoding, make_plan: Callable[[Size], Plan]) -> torch.Tensor:
    file = parsed(data, decoding.max_pixels)
    orientation = _orientation_of(file, decoding)
    plan, reduction, num_rows = None, 0, None
    if file.can_be_reduced and file.size is not None and decoding.reducing_gap is not None:
        # Only a plan made before decoding can leave out what is not needed.
        plan = make_plan(orientation.seen_size(file.size))
        reduction = plan.reduction(decoding.reducing_gap)
        if plan.box is not None:
            top, _, height, _ = orientation.stored_box(plan.box, plan.seen_size)
            num_rows = min(file.size[0], top + height + _MARGIN_ROWS)
    frame = _decoded_frame(file, decoding, reduction, num_rows)
    size = frame.height, frame.width
    plan = plan or make_plan(orientation.seen_size(size))
    output = output_of(frame, decoding.mode, file)
    box = plan.box
    if box is not None:
        box = orientation.stored_box(box, plan.seen_size).reduced(reduction, size)
    return _rendered(frame, box, output, orientation, plan, decoding)


def _orientation_of(file: ImageFile, decoding: Decoding) -> Orientation:
    if decoding.apply_exif_orientation or file.codec == "tiff":
        # PIL always turns a TIFF, whose orientation is a tag of the format and not of EXIF.
        return Orientation.of_exif(file.exif_orientation)
    return _AS_STORED


def _decoded_frame(
    file: ImageFile, decoding: Decoding, reduction: int, num_rows: int | None
) -> Frame:
    frame = _tools.decode(file, reduction, num_rows, decoding.max_pixels)
    if not decoding.takes_deep_grey and is_deep_grey(frame):
        raise ImageError("it is grey and has 16 bits")
    return frame


def _rendered(
    frame: Frame,
    box: Box | None,
    output: Output,
    orientation: Orientation,
    plan: Plan,
    decoding: Decoding,
) -> torch.Tensor:
    size = orientation.seen_size(plan.size)
    frame = _tools.resized(frame, box, size, output, decoding.interpolation)
    return pixels_of(frame, output, orientation, plan)


# -- decoded once, cropped again and again ---------------------------------------------------------


class WholeImage(NamedTuple):
    """A decoded image that is still to be cropped, resized and flipped."""

    format_name: str
    planes: tuple[Pixels, ...]
    """A byte for each sample."""
    seen_size: Size
    """The size of the image in its file, upright. Crops are drawn for it."""
    orientation: Orientation
    output: Output


def whole(
    data: Encoded,
    decoding: Decoding,
    resized_size: Callable[[Size], Size],
    *,
    max_side: int | None,
    is_cropped: bool,
) -> WholeImage | None:
    """Return an image as it is before any crop, or None if `decoded` does not begin with that.

    `resized_size` returns what an image of a size is to be resized to, and `is_cropped` says
    whether it is always cropped before. With `max_side`, the shorter side is resized to it, which
    changes the pixels.
    """
    file = parsed(_as_bytes(data), decoding.max_pixels)
    orientation = _orientation_of(file, decoding)
    reduction, gap = 0, decoding.reducing_gap
    if file.can_be_reduced and file.size is not None and gap is not None:
        seen = orientation.seen_size(file.size)
        if max_side is not None:
            reduction = Plan(seen, None, resized(seen, max_side), None, False).reduction(gap)
        elif Plan(seen, None, resized_size(seen), None, False).reduction(gap):
            return None
    frame = _decoded_frame(file, decoding, reduction, None)
    output = output_of(frame, decoding.mode, file)
    size = file.size if reduction and file.size else (frame.height, frame.width)
    planes = _tools.whole(frame, output, max_side, is_cropped=is_cropped)
    if planes is None:
        return None
    return WholeImage(*planes, orientation.seen_size(size), orientation, output)


def rendered(
    image: WholeImage, decoding: Decoding, make_plan: MakePlan, *, draws: bool
) -> torch.Tensor:
    """Return the pixels that `decoded` returns of the file of an image."""
    with _planner(make_plan, draws=draws) as plan_for:
        plan = plan_for(image.seen_size)
        frame = frame_of(image.format_name, image.planes)
        box, stored = plan.box, (frame.height, frame.width)
        if box is not None:
            box = image.orientation.stored_box(box, plan.seen_size)
            box = box.scaled(image.orientation.seen_size(image.seen_size), stored)
        return _rendered(frame, box, image.output, image.orientation, plan, decoding)


# -- arguments -------------------------------------------------------------------------------------


def _checked_size(name: str, size: int | Sequence[int] | None) -> int | tuple[int, int] | None:
    numbers = (size,) if isinstance(size, int) else size
    if numbers is None:
        return None
    if len(numbers) not in {1, 2} or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise ValueError(
            f"{name} must be an int or (height, width), each at least 1, got {size!r}."
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _checked_range(name: str, bounds: Sequence[float]) -> tuple[float, float]:
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
        raise ValueError(f"{name} must be (least, largest), both above 0, got {bounds!r}.")
    return bounds[0], bounds[1]


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _as_bytes(data: Encoded) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8:
            raise TypeError(f"an encoded image is a tensor of uint8, got one of {data.dtype}.")
        return data.numpy().tobytes()
    return bytes(memoryview(data))
