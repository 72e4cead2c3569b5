"""Encoded images to tensors, by FFmpeg."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import PIL.Image
import torch
from av import CodecContext, FFmpegError, Packet, VideoCodecContext, VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from torchvision.transforms import RandomResizedCrop
from torchvision.tv_tensors import Image

from ._image_file import ImageError, codec_of, prepared, size_of, webp_has_alpha
from ._image_geometry import Box, Orientation, Plan, center_box, resized

if TYPE_CHECKING:
    import numpy.typing as npt
    from av.video.plane import VideoPlane

    Encoded = bytes | bytearray | memoryview | torch.Tensor
    Path = str | os.PathLike[str]
    Pixels = npt.NDArray[np.uint8]

__all__ = ["ImageError", "ImageLoader"]

_MAX_PIXELS = 178_956_970
"""Where PIL refuses an image: 512 MB as RGB."""


class ImageLoader:
    """Reads and decodes an image file; what torchvision's datasets take as their `loader`.

    It gives a `torchvision.tv_tensors.Image`, uint8 C×H×W. Resizing, cropping and mirroring are
    done by the way, on no more pixels than needed. Threads may share it.

    Args:
        size: Resizes, antialiased, to (height, width), or the shorter side to an int. None leaves
            the size as it is.
        crop: `"random"` resizes a random part of the image, as `RandomResizedCrop(size)`.
            `"center"` keeps the middle square of an image resized to an int; an int or (height,
            width) keeps that much of its middle, as `Resize(size)` and `CenterCrop(crop)`.
        scale: For `crop="random"`: the least and the largest share of the image's area.
        ratio: For `crop="random"`: the least and the largest ratio of width to height.
        horizontal_flip: Probability of mirroring the image.
        mode: `"RGB"` or `"L"`; `"unchanged"` gives one channel for grey images, and one more for
            alpha. The others leave alpha out.
        apply_exif_orientation: Turn the image as its EXIF entry says.
        reducing_gap: A JPEG is decoded at a quarter or an eighth of its size if that leaves
            `reducing_gap` times as much as `size` needs. None always decodes all pixels.
        max_pixels: Larger images are an error, because a few bytes can claim to be gigabytes. None
            sets no limit but FFmpeg's.
    """

    def __init__(
        self,
        size: int | Sequence[int] | None = None,
        *,
        crop: Literal["center", "random"] | int | Sequence[int] | None = None,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        horizontal_flip: float = 0.0,
        mode: Literal["RGB", "L", "unchanged"] = "RGB",
        apply_exif_orientation: bool = False,
        reducing_gap: float | None = 3.0,
        max_pixels: int | None = _MAX_PIXELS,
    ) -> None:
        self.size = _checked_size("size", size)
        self.crop = crop if isinstance(crop, str) else _checked_size("crop", crop)
        self.scale = _checked_range("scale", scale)
        self.ratio = _checked_range("ratio", ratio)
        self.horizontal_flip = horizontal_flip
        self.mode = mode
        self.apply_exif_orientation = apply_exif_orientation
        self.reducing_gap = reducing_gap
        self.max_pixels = max_pixels
        self._check()

    def _check(self) -> None:
        if self.mode not in {"RGB", "L", "unchanged"}:
            raise ValueError(f'mode must be "RGB", "L" or "unchanged", got {self.mode!r}.')
        if not 0 <= self.horizontal_flip <= 1:
            raise ValueError(
                "horizontal_flip is a probability between 0 and 1, got "
                f"{self.horizontal_flip!r}. Use 0.5 to mirror every other image."
            )
        if self.reducing_gap is not None and self.reducing_gap < 1:
            raise ValueError(
                f"reducing_gap must be at least 1, got {self.reducing_gap!r}. Use None to decode "
                "all pixels."
            )
        if self.max_pixels is not None and self.max_pixels < 1:
            raise ValueError(
                f"max_pixels must be at least 1, got {self.max_pixels!r}. Use None for no limit."
            )
        self._check_crop()

    def _check_crop(self) -> None:
        if self.crop is None:
            return
        if self.size is None:
            raise ValueError("crop needs a size to resize to. Set size too.")
        if isinstance(self.crop, str) and self.crop not in {"center", "random"}:
            raise ValueError(
                f'crop must be "center", "random", an int or (height, width), got {self.crop!r}.'
            )
        if self.crop == "center" and not isinstance(self.size, int):
            raise ValueError(
                f'crop="center" keeps the middle square of an image whose shorter side is size, '
                f"but size={self.size} is both sides. Make size an int, or leave crop out."
            )
        if not isinstance(self.crop, str):
            left, kept = _pair(self.size), _pair(self.crop)
            if kept[0] > left[0] or kept[1] > left[1]:
                raise ValueError(
                    f"crop={self.crop} keeps more than size={self.size} leaves. Make size larger."
                )

    def __call__(self, path: Path) -> Image:
        """Read and decode the image at `path`."""
        return self.decode(self.read(path), path)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    def read(self, path: Path) -> bytes:
        """I/O: the bytes of a file."""
        # Read in one piece: a buffer would be one copy more.
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (takes a third of the time)
            return file.read()

    def decode(self, data: Encoded, path: Path | None = None) -> Image:
        """CPU: the image in the bytes of a file. `path` is for the error if there is one."""
        try:
            pixels = self._pixels(_as_bytes(data))
        except ImageError as error:
            name = "image" if path is None else os.fspath(path)
            raise ImageError(f"cannot decode {name}: {error}.") from error.__cause__
        return Image(torch.from_numpy(pixels))

    def _pixels(self, data: bytes) -> Pixels:
        codec = codec_of(data)
        orientation = _orientation_of(data) if self.apply_exif_orientation else Orientation()
        tools = _thread.tools
        plan, reduction = None, 0
        if codec == "mjpeg" and self.size is not None and self.reducing_gap is not None:
            # What is not needed can be left out only if it is known before decoding.
            stored = size_of(data, codec)
            if stored is not None and all(stored):
                plan = self._plan(orientation.seen_size(stored))
                reduction = plan.reduction(self.reducing_gap)
        frame = tools.decode(data, codec, reduction, self.max_pixels)
        stored = frame.height, frame.width
        plan = plan or self._plan(orientation.seen_size(stored))
        output = _output_of(frame, self.mode, codec, data)
        if plan.box is not None:
            box = orientation.stored_box(plan.box, plan.seen_size).reduced(reduction, stored)
            frame = tools.cut(frame, box, output.format)
        frame = tools.scaled(
            frame, orientation.seen_size(plan.size), output.format, is_whole=plan.box is None
        )
        return _assembled(frame, output.planes, orientation, plan)

    def _plan(self, seen_size: tuple[int, int]) -> Plan:
        """What is to be done to an image of this size. Draws the random numbers."""
        box, center = None, None
        if self.crop == "random":
            box = _random_box(seen_size, self.scale, self.ratio)
            size = _pair(self.size)
        elif isinstance(self.size, int):
            size = resized(seen_size, self.size)
        else:
            size = self.size or seen_size
        if self.max_pixels is not None and size[0] * size[1] > self.max_pixels:
            raise ImageError(
                f"its {_times(seen_size)} pixels would become {_times(size)}, more than "
                f"max_pixels={self.max_pixels:,}. Use a size of (height, width)"
            )
        if self.crop is not None and box is None:
            center = center_box(size, _pair(self.size if self.crop == "center" else self.crop))
        is_mirrored = self.horizontal_flip > 0 and bool(torch.rand(1) < self.horizontal_flip)
        return Plan(seen_size, box, size, center, is_mirrored)


# -- arguments -------------------------------------------------------------------------------------


def _checked_size(name: str, size: int | Sequence[int] | None) -> int | tuple[int, int] | None:
    numbers = (size,) if isinstance(size, int) else size
    if numbers is None:
        return None
    if len(numbers) > 2 or not all(isinstance(n, int) and n > 0 for n in numbers):
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


def _times(size: tuple[int, int]) -> str:
    return f"{size[1]:,}×{size[0]:,}"


def _random_box(
    size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    # It looks at nothing but the size of its image.
    image = torch.empty((1, *size), device="meta")
    return Box(*RandomResizedCrop.get_params(image, list(scale), list(ratio)))


def _as_bytes(data: Encoded) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8:
            raise TypeError(f"an encoded image is a tensor of uint8, got {data.dtype}.")
        return data.numpy().tobytes()
    return bytes(data)


def _orientation_of(data: bytes) -> Orientation:
    exif_orientation = 0x0112
    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            return Orientation.of_exif(image.getexif().get(exif_orientation, 1))
    except (OSError, ValueError, SyntaxError):
        return Orientation()  # If the file is damaged, FFmpeg says so.


# -- channels --------------------------------------------------------------------------------------


class _Output(NamedTuple):
    """The pixel format to ask FFmpeg for, and which of its planes are the channels."""

    format: str
    planes: tuple[int, ...]


_GREY = _Output("gray", (0,))
_GREY_AS_RGB = _Output("gray", (0, 0, 0))
_GREY_ALPHA = _Output("gbrap", (0, 3))
_RGB = _Output("gbrp", (2, 0, 1))
_RGB_ALPHA = _Output("gbrap", (2, 0, 1, 3))

_GREY_FORMATS = {"gray", "gray16be", "gray16le", "monob", "monow"}
_GREY_ALPHA_FORMATS = {"ya8", "ya16be", "ya16le"}


def _output_of(frame: VideoFrame, mode: str, codec: str, data: bytes) -> _Output:
    format_name = frame.format.name
    is_grey = format_name in _GREY_FORMATS
    if mode == "L":
        return _GREY
    if mode == "RGB":
        return _GREY_AS_RGB if is_grey else _RGB
    if is_grey:
        return _GREY
    if format_name in _GREY_ALPHA_FORMATS:
        return _GREY_ALPHA
    return _RGB_ALPHA if _has_alpha(frame, codec, data) else _RGB


def _has_alpha(frame: VideoFrame, codec: str, data: bytes) -> bool:
    # The decoders of other formats give an alpha channel where the file has none.
    if codec == "webp":
        return webp_has_alpha(data)
    if codec not in {"png", "tiff"}:
        return False
    if frame.format.has_palette:
        return bool((np.asarray(memoryview(frame.planes[1]))[3::4] != 255).any())
    return any(component.is_alpha for component in frame.format.components)


def _assembled(
    frame: VideoFrame, planes: tuple[int, ...], orientation: Orientation, plan: Plan
) -> Pixels:
    """The channels of a frame in their order, side by side."""
    channels = [orientation.seen(_pixels_of(plane)) for plane in frame.planes]
    if plan.center is not None:
        channels = [plan.center.of(channel) for channel in channels]
    if plan.is_mirrored:
        channels = [channel[:, ::-1] for channel in channels]
    pixels = np.empty((len(planes), *channels[0].shape), np.uint8)
    for channel, plane in enumerate(planes):
        pixels[channel] = channels[plane]
    return pixels


def _rows_of(plane: VideoPlane) -> Pixels:
    return np.asarray(memoryview(plane)).reshape(plane.height, plane.line_size)


def _pixels_of(plane: VideoPlane) -> Pixels:
    """The pixels of a plane with one byte for each."""
    return _rows_of(plane)[:, : plane.width]


# -- FFmpeg ----------------------------------------------------------------------------------------

_CUTTABLE_FORMATS = {"gray", "gbrp", "gbrap", "yuvj444p", "yuv444p", "yuva444p"}
"""Every pixel has its own byte in each plane."""

_WITH_WHOLE_CHROMA = {
    "yuvj420p": "yuvj444p",
    "yuvj422p": "yuvj444p",
    "yuvj440p": "yuvj444p",
    "yuvj411p": "yuvj444p",
    "yuv420p": "yuv444p",
    "yuva420p": "yuva444p",
}
"""Subsampled chroma cannot be cut between any two pixels: these formats can."""

_MAX_BYTES = 2**31 - 1024
"""FFmpeg counts the bytes of a packet in an int."""


_INTERPOLATION = (
    Interpolation.BILINEAR
    # Without these, images with subsampled chroma may be off by several levels.
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
)


class _Tools:
    """A thread's decoders and scalers: slow to make, and not for two threads at a time."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[str, int, int | None], VideoCodecContext] = {}
        # A scaler is set up anew for another size, which takes a quarter of its time. Most images
        # of a folder have one of a few sizes.
        self._scaler = lru_cache(maxsize=8)(lambda *_: VideoReformatter())

    def decode(self, data: bytes, codec: str, reduction: int, max_pixels: int | None) -> VideoFrame:
        """The image in a file, each side halved `reduction` times."""
        encoded = prepared(data, codec)
        if len(encoded) > _MAX_BYTES:
            raise ImageError(f"it has {len(data):,} bytes, and FFmpeg takes {_MAX_BYTES:,}")
        # A copy, because decoders read a little past the end, and a packet has room for that.
        packet = Packet(len(encoded))
        packet.update(encoded)
        key = codec, reduction, max_pixels
        # Taken out while in use: one that met an error is not used again.
        decoder = self._decoders.pop(key, None) or self._new_decoder(*key)
        try:
            frames = decoder.decode(packet)
        except FFmpegError as error:
            raise ImageError(_reason(data, codec, max_pixels)) from error
        if len(frames) != 1 or frames[0].is_corrupt or _has_holes(frames[0], codec):
            raise ImageError(_reason(data, codec, max_pixels))
        self._decoders[key] = decoder
        return frames[0]

    def _new_decoder(self, codec: str, reduction: int, max_pixels: int | None) -> VideoCodecContext:
        decoder = CodecContext.create(codec, "r")
        assert isinstance(decoder, VideoCodecContext)
        decoder.thread_count = 1
        decoder.options = {
            # Stop at the first error instead of painting over it.
            "err_detect": "crccheck+bitstream+buffer+explode",
            # Faster than FFmpeg's own choice, and nearer to the pixels of libjpeg.
            "idct": "xvid",
            "lowres": str(reduction),
        }
        if max_pixels is not None:
            decoder.options["max_pixels"] = str(max_pixels)
        return decoder

    def cut(self, frame: VideoFrame, box: Box, output_format: str) -> VideoFrame:
        """A part of a frame, in the same memory."""
        if box == (0, 0, frame.height, frame.width):
            return frame
        if frame.format.name not in _CUTTABLE_FORMATS:
            cuttable = _WITH_WHOLE_CHROMA.get(frame.format.name, output_format)
            frame = self.scaled(frame, (frame.height, frame.width), cuttable, is_whole=True)
        planes = tuple(box.of(_pixels_of(plane)) for plane in frame.planes)
        return VideoFrame.from_dlpack(planes, format=frame.format.name)

    def scaled(
        self, frame: VideoFrame, size: tuple[int, int], format_name: str, *, is_whole: bool
    ) -> VideoFrame:
        """A frame in another size and pixel format; a whole one may be of the size of others."""
        key = (frame.format.name, frame.height, frame.width, *size, format_name)
        scaler = self._scaler(*key) if is_whole else self._scaler()
        return scaler.reformat(
            frame,
            width=size[1],
            height=size[0],
            format=format_name,
            interpolation=_INTERPOLATION,
            threads=1,
        )


class _Thread(threading.local):
    def __init__(self) -> None:
        self.tools = _Tools()


_thread = _Thread()


def _has_holes(frame: VideoFrame, codec: str) -> bool:
    """Whether pixels are missing; the GIF decoder leaves them transparent, without an error."""
    if codec != "gif":
        return False
    alpha = _rows_of(frame.planes[0])[:, 3 : 4 * frame.width : 4]
    return not alpha.all()


def _reason(data: bytes, codec: str, max_pixels: int | None) -> str:
    name = "JPEG" if codec == "mjpeg" else codec.upper()
    size = size_of(data, codec)
    if size is not None and max_pixels is not None and size[0] * size[1] > max_pixels:
        return (
            f"it claims to be a {name} of {_times(size)} pixels, more than max_pixels="
            f"{max_pixels:,}. Set max_pixels if you trust the file"
        )
    return f"it is a {name} that is damaged, or of a kind that FFmpeg does not know"
