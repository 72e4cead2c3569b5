"""The head of a chain: crop, resize and flip an image while it is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torchvision.transforms.functional as F  # noqa: N812 (torchvision's own name for it)
from torchvision.transforms import InterpolationMode
from torchvision.tv_tensors import Image

from .._image import (
    Box,
    Decoding,
    ImageError,
    Plan,
    Size,
    WholeImage,
    center_box,
    decoded,
    random_box,
    rendered,
    resized,
    whole,
)


class TooSmall(Exception):  # noqa: N818 (not an error: torchvision pads such an image)
    """A crop is larger than the image."""


class Geometry:
    """What becomes of an image, step by step."""

    def __init__(self, size: Size) -> None:
        self._seen_size = size
        self._box: Box | None = None
        self._resized: Size | None = None
        self._kept: Box | None = None
        self._is_mirrored = False

    @property
    def size(self) -> Size:
        """The size of the image after the steps so far."""
        if self._kept is not None:
            return self._kept.size
        return self._resized or (self._box.size if self._box else self._seen_size)

    def crop(self, box: Box) -> None:
        if self._is_mirrored:
            box = box._replace(left=self.size[1] - box.left - box.width)
        outer = self._box if self._resized is None else self._kept
        if outer is None:
            outer = Box(0, 0, *self.size)
        box = box._replace(top=outer.top + box.top, left=outer.left + box.left)
        if self._resized is None:
            self._box = box
        else:
            self._kept = box

    def resize(self, size: Size) -> None:
        """Resize the image. A chain does so once, before it crops what it has resized."""
        self._resized = size

    def flip(self) -> None:
        self._is_mirrored = not self._is_mirrored

    def plan(self) -> Plan:
        size = self._resized or (self._box.size if self._box else self._seen_size)
        return Plan(self._seen_size, self._box, size, self._kept, self._is_mirrored)


class HeadStep(Protocol):
    """A transform, as a change of the geometry. Draws what torchvision's transform draws."""

    is_random: bool

    def __call__(self, geometry: Geometry, generator: torch.Generator | None) -> None: ...


@dataclass(frozen=True)
class ResizeStep:
    size: int | Size
    max_size: int | None
    is_random = False

    def __call__(self, geometry: Geometry, generator: torch.Generator | None) -> None:  # noqa: ARG002
        geometry.resize(self.size_of(geometry.size))

    def size_of(self, size: Size) -> Size:
        if isinstance(self.size, tuple):
            return self.size
        height, width = resized(size, self.size)
        if self.max_size is None or max(height, width) <= self.max_size:
            return height, width
        shorter = int(self.max_size * self.size / max(height, width))
        return (shorter, self.max_size) if height <= width else (self.max_size, shorter)


@dataclass(frozen=True)
class CenterCropStep:
    size: Size
    is_random = False

    def __call__(self, geometry: Geometry, generator: torch.Generator | None) -> None:  # noqa: ARG002
        _check_fits(self.size, geometry.size)
        geometry.crop(center_box(geometry.size, self.size))


@dataclass(frozen=True)
class RandomCropStep:
    size: Size
    draws: Literal["v1", "v2"]
    """v1 draws both offsets unless the image has just the size, v2 draws those that it needs."""
    is_random = True

    def __call__(self, geometry: Geometry, generator: torch.Generator | None) -> None:
        _check_fits(self.size, geometry.size)
        spare = [inner - outer for inner, outer in zip(geometry.size, self.size, strict=True)]
        if any(spare):
            draws = [self.draws == "v1" or count > 0 for count in spare]
            top, left = (
                int(torch.randint(0, count + 1, (1,), generator=generator)) if is_drawn else 0
                for count, is_drawn in zip(spare, draws, strict=True)
            )
            geometry.crop(Box(top, left, *self.size))


@dataclass(frozen=True)
class RandomResizedCropStep:
    size: Size
    scale: tuple[float, float]
    ratio: tuple[float, float]
    is_random = True

    def __call__(self, geometry: Geometry, generator: torch.Generator | None) -> None:
        geometry.crop(random_box(geometry.size, self.scale, self.ratio, generator))
        geometry.resize(self.size)


@dataclass(frozen=True)
class FlipStep:
    probability: float
    is_random = True

    def __call__(self, geometry: Geometry, generator: torch.Generator | None) -> None:
        if torch.rand(1, generator=generator) < self.probability:
            geometry.flip()


def _check_fits(inner: Size, outer: Size) -> None:
    if inner[0] > outer[0] or inner[1] > outer[1]:
        raise TooSmall


@dataclass(frozen=True)
class Head:
    """The first transforms of a chain."""

    steps: tuple[HeadStep, ...]
    num_transforms: int
    """How many transforms of the chain it replaces."""
    interpolation: Literal["bilinear", "bicubic"]
    kind: Literal["pil", "image", "tensor"]
    """What they return: a PIL image, a `tv_tensors.Image` or a tensor."""
    thread_safe = True

    @property
    def is_random(self) -> bool:
        return any(step.is_random for step in self.steps)

    @property
    def begins_with_crop(self) -> bool:
        """Whether each image is cropped before it is resized."""
        first = next((step for step in self.steps if not isinstance(step, FlipStep)), None)
        return isinstance(first, RandomResizedCropStep | CenterCropStep)

    @property
    def resizing(self) -> Any:
        """What `resized_size` depends on."""
        return [
            (type(step), getattr(step, "size", None), getattr(step, "max_size", None))
            for step in self.steps
        ]

    def resized_size(self, size: Size) -> Size:
        """Return what an image of a size is resized to, before it may be cropped once more."""
        for step in self.steps:
            if isinstance(step, ResizeStep):
                return step.size_of(size)
            if isinstance(step, RandomResizedCropStep | CenterCropStep | RandomCropStep):
                size = step.size
                if isinstance(step, RandomResizedCropStep):
                    return size
        return size

    def plan(self, size: Size, generator: torch.Generator | None) -> Plan:
        geometry = Geometry(size)
        for step in self.steps:
            step(geometry, generator)
        return geometry.plan()


@dataclass(frozen=True, slots=True)
class Unfused:
    """An image that the dataset's own loader has opened, because ours cannot."""

    image: Any
    head_is_done: bool


class FusedLoader:
    """Takes the place of a dataset's loader: does what the head of the chain does while decoding.

    Where FFmpeg cannot decode a file, or an image must be padded, it returns the image of the
    dataset's own loader as `Unfused`. So a damaged file raises what it raises without `fuse`.
    """

    thread_safe = True

    def __init__(self, head: Head, original: Callable[[Any], Any], decoding: Decoding) -> None:
        self.head = head
        self.original = original
        self.decoding = decoding._replace(interpolation=head.interpolation)

    def __call__(self, path: Any) -> Any:
        return self.decode(self.read(path), path)

    def read(self, path: Any) -> bytes:
        """I/O: return the bytes of a file."""
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (takes a third of the time)
            return file.read()

    def decode(self, data: bytes, path: Any) -> torch.Tensor | Unfused:
        """CPU: return the pixels after the head, or the image before it, as `Unfused`."""
        return self._finish(path, partial(decoded, data, self.decoding))

    def decode_whole(
        self, data: bytes, path: Any, *, max_side: int | None = None
    ) -> WholeImage | None:
        """CPU: return the image before the head, for `render`.

        None: `decode` would decode a part of its pixels only, or the dataset's own loader opens it.
        """
        try:
            head = self.head
            return whole(
                data,
                self.decoding,
                head.resized_size,
                max_side=max_side,
                is_cropped=head.begins_with_crop,
            )
        except ImageError:
            self.original(path)  # Raises what it raises without a cache, if the file is damaged.
            return None

    def render(self, image: WholeImage, path: Any) -> torch.Tensor | Unfused:
        """CPU: return what `decode` returns for the file of an image."""
        return self._finish(path, partial(rendered, image, self.decoding))

    @property
    def is_random(self) -> bool:
        return self.head.is_random

    @property
    def resizing(self) -> Any:
        """What the size depends on that an image is resized to."""
        return self.head.resizing

    def _finish(self, path: Any, make: Callable[..., torch.Tensor]) -> torch.Tensor | Unfused:
        plan: Plan | None = None

        def make_plan(size: Size, generator: torch.Generator | None) -> Plan:
            nonlocal plan
            plan = self.head.plan(size, generator)
            return plan

        try:
            return make(make_plan, draws=self.head.is_random)
        except (ImageError, TooSmall):
            image = self.original(path)
            if plan is None:  # Nothing was drawn.
                return Unfused(image, head_is_done=False)
            image = _as_planned(image, plan, self.head.interpolation)
            if self.head.kind != "pil":
                image = F.pil_to_tensor(image)
                image = Image(image) if self.head.kind == "image" else image
            return Unfused(image, head_is_done=True)


def _as_planned(image: Any, plan: Plan, interpolation: str) -> Any:
    """Do with a PIL image what was drawn for it."""
    if plan.box is not None:
        image = F.crop(image, *plan.box)
    image = F.resize(image, list(plan.size), InterpolationMode(interpolation))
    if plan.center is not None:
        image = F.crop(image, *plan.center)
    return F.hflip(image) if plan.is_mirrored else image
