"""Decode and resize with FFmpeg: bytes to frames, frames to pixels. Only this file imports av."""

from __future__ import annotations

import threading
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from av import CodecContext, FFmpegError, Packet, VideoCodecContext, VideoFrame
from av.video.plane import VideoPlane
from av.video.reformatter import Interpolation as Flags
from av.video.reformatter import VideoReformatter

from ._file import ImageError, ImageFile
from ._geometry import Box, Grid, Orientation, Pixels, Plan, Size, in_words, resized

Mode: TypeAlias = Literal["RGB", "L", "unchanged"]
Resampling: TypeAlias = Literal["bilinear", "bicubic"]
Frame: TypeAlias = VideoFrame


class ThreadTools(threading.local):
    """A thread's decoders and scalers, which are slow to create and not thread-safe."""

    def __init__(self) -> None:
        self._jpeg_decoders: dict[tuple[int, int | None], VideoCodecContext] = {}
        # Two, because a scaler is set up again whenever sizes or formats change. (More of them, for
        # the most frequent sizes of a folder, cost more than they save.)
        self._scaler = VideoReformatter()
        self._converter = VideoReformatter()

    def decode(
        self, file: ImageFile, reduction: int, num_rows: int | None, max_pixels: int | None
    ) -> VideoFrame:
        """Return the image in a file, each side halved `reduction` times.

        With `num_rows`, the rows after the first `num_rows` may be missing.
        """
        if len(file.encoded) > _MAX_BYTES:
            raise ImageError(f"it is larger than the {_MAX_BYTES:,} bytes that FFmpeg accepts")
        # A copy with padding, because decoders read a little past the end.
        packet = Packet(len(file.encoded))
        packet.update(file.encoded)
        if num_rows is not None and file.has_own_tables:
            # A decoder stops when it has all the rows of the header.
            memoryview(packet)[file.height_at : file.height_at + 2] = num_rows.to_bytes(2, "big")
        # Decoders keep state: the last image, its tables, that it was a negative. A JPEG decoder is
        # worth reusing, and that state does not affect a file with its own tables. It is removed
        # while in use, because a decoder is not reused after an error.
        key = reduction, max_pixels
        decoder = self._jpeg_decoders.pop(key, None) if file.has_own_tables else None
        decoder = decoder or _new_decoder(file.codec, reduction, max_pixels)
        try:
            frames = decoder.decode(packet)
        except FFmpegError as error:
            raise _damaged(file) from error
        if len(frames) != 1 or frames[0].is_corrupt:
            raise _damaged(file)
        if max_pixels is not None and frames[0].width * frames[0].height > max_pixels:
            raise ImageError(f"it has more than max_pixels={max_pixels:,}")
        if file.filled is not None:
            _fill_background(frames[0], file.filled, file)
        if file.has_own_tables:
            self._jpeg_decoders[key] = decoder
        return frames[0]

    def whole(
        self, frame: VideoFrame, output: Output, max_side: int | None, *, is_cropped: bool
    ) -> tuple[str, tuple[Pixels, ...]] | None:
        """Return the format of a frame and a copy of its planes, such as `resized` begins with.

        With `max_side`, the shorter side is resized to it if it is longer. None: an image that is
        not cropped before it is resized would be resized in a format without such planes.
        """
        name = frame.format.name
        if name in _BADLY_RESIZED:
            frame = self._converted(frame, _BADLY_RESIZED[name])
        is_planar = frame.format.name in _PLANAR
        # Planes alone do not say which range their colours have. Only of these it varies.
        is_alike = is_planar and not frame.format.name.startswith("yuva")
        if max_side is None and not is_cropped and not is_alike:
            return None
        if not is_planar:
            frame = self._converted(frame, output.format_name)
        height, width = frame.height, frame.width
        if max_side is not None and min(height, width) > max_side:
            height, width = resized((height, width), max_side)
            flags = Flags.BILINEAR | _ACCURATE
            frame = self._scaler.reformat(
                frame, width, height, frame.format.name, interpolation=flags, threads=1
            )
        return frame.format.name, tuple(_samples_of(plane).copy() for plane in frame.planes)

    def resized(
        self,
        frame: VideoFrame,
        box: Box | None,
        size: Size,
        output: Output,
        interpolation: Resampling,
    ) -> VideoFrame:
        """Return a part of a frame, resized, in the pixel format of the output."""
        flags = _FILTERS[interpolation] | _ACCURATE
        try:
            part = self._part(frame, box, size, output)
            return self._scaler.reformat(
                part, size[1], size[0], output.format_name, interpolation=flags, threads=1
            )
        except FFmpegError as error:
            stored = in_words((frame.height, frame.width))
            message = f"FFmpeg cannot resize its {stored} pixels to {in_words(size)}"
            raise ImageError(message) from error

    def _part(self, frame: VideoFrame, box: Box | None, size: Size, output: Output) -> VideoFrame:
        """Return a part of a frame in a pixel format that FFmpeg resizes correctly."""
        if frame.format.name in _BADLY_RESIZED:
            frame = self._converted(frame, _BADLY_RESIZED[frame.format.name])
        # FFmpeg would resize the two fields of an interlaced PNG separately. A view is not marked
        # as interlaced.
        needs_view = frame.interlaced_frame or box is not None
        if needs_view and frame.format.name not in _PLANAR:
            frame = self._converted(frame, output.format_name)
        grid = _PLANAR.get(frame.format.name)
        box = box or Box(0, 0, frame.height, frame.width)
        if grid is None:
            return frame
        if grid.fits(box):
            return _view(frame, box, grid) if needs_view else frame
        # The box ends within chroma samples. FFmpeg would stretch the chroma over the frame. That
        # is less than a pixel of a whole frame, and invisible where it shrinks. Otherwise each
        # pixel gets its own chroma before the frame is cut.
        if not needs_view and frame.height > 1.33 * size[0] and frame.width > 1.33 * size[1]:
            return frame
        outer = grid.around(box, (frame.height, frame.width))
        # The same format with chroma for every pixel.
        frame = self._converted(_copy(frame, outer, grid), frame.format.name[:-4] + "444p")
        return _view(frame, box.within(outer), Grid())

    def _converted(self, frame: VideoFrame, format_name: str) -> VideoFrame:
        return self._converter.reformat(
            frame, format=format_name, interpolation=Flags.BILINEAR, threads=1
        )


def frame_of(format_name: str, planes: tuple[Pixels, ...]) -> VideoFrame:
    """Return a frame of planes with a byte for each sample, in the same memory if possible."""
    height, width = planes[0].shape
    if _PLANAR[format_name].fits(Box(0, 0, height, width)):
        return VideoFrame.from_dlpack(planes, format=format_name)
    frame = VideoFrame(width, height, format_name)
    for source, destination in zip(planes, frame.planes, strict=True):
        _samples_of(destination)[:] = source
    return frame


_FILTERS = {"bilinear": Flags.BILINEAR, "bicubic": Flags.BICUBIC}
_ACCURATE = Flags.ACCURATE_RND | Flags.FULL_CHR_H_INT | Flags.FULL_CHR_H_INP
"""Without these, images with subsampled chroma may be off by several levels."""

_MAX_BYTES = 2**31 - 1024
"""FFmpeg counts the bytes of a packet in an int."""

_PLANAR = {
    **dict.fromkeys(["gray", "gbrp", "gbrap", "yuv444p", "yuva444p", "yuvj444p"], Grid()),
    **dict.fromkeys(["yuv420p", "yuva420p", "yuvj420p"], Grid(2, 2)),
    "yuvj440p": Grid(2, 1),
    "yuvj422p": Grid(1, 2),
    "yuvj411p": Grid(1, 4),
}
"""Formats with a plane for each component, a byte a sample, and where their chroma can be cut."""

_BADLY_RESIZED = {
    "monob": "gray",
    "monow": "gray",
    # Otherwise white would not be white.
    "rgb444le": "rgb24",
    "rgb555le": "rgb24",
    "rgb565le": "rgb24",
}
"""Formats that FFmpeg resizes with errors, and the formats to convert them to first."""


def _new_decoder(codec: str, reduction: int, max_pixels: int | None) -> VideoCodecContext:
    decoder = CodecContext.create(codec, "r")
    assert isinstance(decoder, VideoCodecContext)
    decoder.thread_count = 1
    decoder.options = {
        # Stop at the first error instead of concealing it.
        "err_detect": "crccheck+bitstream+buffer+explode",
        # Faster than FFmpeg's default, and nearer to libjpeg's pixels.
        "idct": "xvid",
        "lowres": str(reduction),
    }
    if max_pixels is not None:
        # In case the header was wrong. FFmpeg counts the padding of up to 65,535 rows too.
        decoder.options["max_pixels"] = str(max_pixels + 64 * 65535)
    return decoder


def _view(frame: VideoFrame, box: Box, grid: Grid) -> VideoFrame:
    """Return a part of a frame, in the same memory."""
    planes = tuple(
        grid.of_plane(box, number).of(_samples_of(plane))
        for number, plane in enumerate(frame.planes)
    )
    return frame_of(frame.format.name, planes)


def _copy(frame: VideoFrame, box: Box, grid: Grid) -> VideoFrame:
    """Return a copy of a part of a frame; beyond its edges the last samples are repeated."""
    copy = VideoFrame(box.width, box.height, frame.format.name)
    for number, (source, destination) in enumerate(zip(frame.planes, copy.planes, strict=True)):
        samples = grid.of_plane(box, number).of(_samples_of(source))
        height, width = samples.shape
        copied = _samples_of(destination)
        copied[:height, :width] = samples
        copied[:height, width:] = samples[:, -1:]
        copied[height:] = copied[height - 1]
    return copy


def _samples_of(plane: VideoPlane) -> Pixels:
    """Return the samples of a plane that has one byte for each."""
    return _rows_of(plane)[:, : plane.width]


def _rows_of(plane: VideoPlane) -> Pixels:
    rows = np.frombuffer(plane, np.uint8)  # type: ignore[call-overload]  # It is a buffer.
    return rows.reshape(plane.height, plane.line_size)  # type: ignore[no-any-return]


def _fill_background(frame: VideoFrame, filled: Box, file: ImageFile) -> None:
    """Fill a GIF beside its first frame. Raises ImageError if pixels of the frame are missing."""
    pixels = _rows_of(frame.planes[0])[:, : 4 * frame.width].reshape(frame.height, -1, 4)
    # The decoder leaves what is not in the file transparent.
    are_missing = pixels[:, :, 3] == 0
    if filled.of(are_missing).any():
        raise _damaged(file)
    pixels[are_missing] = [*reversed(file.background), 255]


def _damaged(file: ImageFile) -> ImageError:
    return ImageError(
        f"it is a {file.name} that is damaged, or of a kind that FFmpeg cannot decode"
    )


# -- channels --------------------------------------------------------------------------------------


class Output(NamedTuple):
    """The pixel format to request from FFmpeg, and which of its planes are the channels."""

    format_name: str
    planes: tuple[int, ...]


_GREY = Output("gray", (0,))
_GREY_AS_RGB = Output("gray", (0, 0, 0))
_GREY_ALPHA = Output("gbrap", (0, 3))
_RGB = Output("gbrp", (2, 0, 1))
_RGB_ALPHA = Output("gbrap", (2, 0, 1, 3))

_GREY_FORMATS = {"gray", "gray16be", "gray16le", "monob", "monow"}
_GREY_ALPHA_FORMATS = {"ya8", "ya16be", "ya16le"}


def output_of(frame: VideoFrame, mode: Mode, file: ImageFile) -> Output:
    """Return the output for a mode."""
    is_grey = frame.format.name in _GREY_FORMATS
    if mode == "RGB":
        return _GREY_AS_RGB if is_grey else _RGB
    if mode == "L" or is_grey:
        return _GREY
    if frame.format.name in _GREY_ALPHA_FORMATS:
        return _GREY_ALPHA
    return _RGB_ALPHA if file.has_alpha and _has_alpha(frame) else _RGB


def is_deep_grey(frame: VideoFrame) -> bool:
    """Return whether an image is grey, without alpha, and has 16 bits."""
    return frame.format.name in {"gray16be", "gray16le"}


def _has_alpha(frame: VideoFrame) -> bool:
    if frame.format.has_palette:
        palette = np.asarray(memoryview(frame.planes[1]))
        return bool((palette[3::4] != 255).any())
    return any(component.is_alpha for component in frame.format.components)


def pixels_of(
    frame: VideoFrame, output: Output, orientation: Orientation, plan: Plan
) -> torch.Tensor:
    """Return the channels of a resized frame as a tensor, C×H×W, upright, cropped and flipped."""
    planes = frame.planes
    is_dense = planes[0].line_size == planes[0].width
    if is_dense and plan.center is None and not any(orientation):
        # Three times as fast as the general way below.
        joined = bytearray().join([planes[number] for number in output.planes])
        pixels = torch.frombuffer(joined, dtype=torch.uint8).view(-1, frame.height, frame.width)
    else:
        channels = [orientation.seen(_samples_of(plane)) for plane in planes]
        if plan.center is not None:
            channels = [plan.center.of(channel) for channel in channels]
        pixels = torch.from_numpy(np.stack([channels[number] for number in output.planes]))
    return _mirrored(pixels) if plan.is_mirrored else pixels


def _mirrored(pixels: torch.Tensor) -> torch.Tensor:
    """Return pixels with their columns in reverse order."""
    if pixels.shape[-1] % 8 != 0 or not pixels.is_contiguous():
        return pixels.flip(-1)
    # Eight columns at a time, which takes a third of the time.
    eights = pixels.numpy().view(np.uint64)
    return torch.from_numpy(eights[..., ::-1].byteswap().view(np.uint8))
