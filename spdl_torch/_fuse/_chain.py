"""Which transforms of a chain are known exactly: its head, its tail, and what is between them.

A transform is known by its exact class and its parameters. A subclass, a forward hook, a method
that was replaced on the object, or a parameter that is not known: it is run as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, Literal, cast

import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.functional import to_pil_image
from torchvision.tv_tensors import Image

from .._deferred import Arithmetic, Cast, DeferredImage, Normalize, Operation, Scale, Tail
from .._image import Size
from ._head import (
    CenterCropStep,
    FlipStep,
    Head,
    HeadStep,
    RandomCropStep,
    RandomResizedCropStep,
    ResizeStep,
    Unfused,
)

Kind = Literal["pil", "image", "tensor"]
Transform = Callable[[Any], Any]

_FILTERS: Final = {
    **dict.fromkeys([InterpolationMode.BILINEAR, "bilinear", 2], "bilinear"),
    **dict.fromkeys([InterpolationMode.BICUBIC, "bicubic", 3], "bicubic"),
}
_TO_TENSOR: Final = (v1.ToTensor, v2.ToTensor)
_PIL_TO_TENSOR: Final = (v1.PILToTensor, v2.PILToTensor)
_ONLY_PIL: Final = (*_TO_TENSOR, v1.PILToTensor)
"""Those that do not return a tensor as it is."""
_PRESET: Final = ("torchvision.transforms._presets", "ImageClassification")
"""The class of the transforms that belong to the weights of a model."""
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# -- from a transform to a list of transforms ------------------------------------------------------


def flattened(transform: Any) -> list[Transform]:
    """Return the transforms of a chain, without what only holds others."""
    cls = type(transform)
    if transform is None or is_exactly(transform, v2.Identity):
        return []
    if is_exactly(transform, v1.Compose, v2.Compose):
        return [part for each in transform.transforms for part in flattened(each)]
    if is_exactly(transform, torch.nn.Sequential):
        return [part for each in transform for part in flattened(each)]
    if (cls.__module__, cls.__name__) == _PRESET and is_exactly(transform, cls):
        return flattened(_of_preset(transform))
    if (inner := _only_calls(transform)) is not None:
        return flattened(inner)
    return [transform]


def is_exactly(transform: Any, *classes: type) -> bool:
    """Return whether a transform is of exactly one of these classes, and nothing was added."""
    if type(transform) not in classes:
        return False
    own = vars(transform)
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    methods = ("forward", "__call__", "get_params", "make_params", "transform")
    return not any(own.get(name) for name in hooks) and not any(name in own for name in methods)


def _of_preset(preset: Any) -> v1.Compose:
    """Return the transforms that the preset of a model's weights calls."""
    return v1.Compose(
        [
            v1.Resize(preset.resize_size, preset.interpolation, antialias=preset.antialias),
            v1.CenterCrop(preset.crop_size),
            v2.PILToTensor(),  # Not that of v1: the preset also takes tensors.
            v1.ConvertImageDtype(torch.float),
            v1.Normalize(preset.mean, preset.std),
        ]
    )


class _Template:
    def __call__(self, img: Any) -> Any:
        return self.transforms(img)  # type: ignore[attr-defined]


def _only_calls(transform: Any) -> Any:
    """Return the one attribute that a plain class calls and does nothing else, if it is such.

    The presets of torchvision's reference scripts are.
    """
    cls = type(transform)
    call = vars(cls).get("__call__")
    if cls.__mro__[1:] != (object,) or not isinstance(call, FunctionType):
        return None
    code, template = call.__code__, _Template.__call__.__code__
    is_same = code.co_code == template.co_code and code.co_argcount == template.co_argcount
    if not is_same or len(code.co_names) != 1:
        return None
    # With __slots__ it has no dictionary, and is called as it is.
    return getattr(transform, "__dict__", {}).get(code.co_names[0])


# -- head ------------------------------------------------------------------------------------------


def head_of(chain: Sequence[Transform], kind: Kind) -> Head | None:
    """Return the head of a chain whose images are of a kind, or None if none of it is known."""
    steps: list[HeadStep] = []
    interpolation: str | None = None
    guaranteed: Size | None = None
    """The least size that any image has after the steps so far, once it is known."""
    is_resized, num_transforms, kind_after = False, 0, kind
    for number, transform in enumerate(chain, 1):
        if (converted := _kind_after(transform, kind)) is not None:
            kind = converted
            continue
        step, mode = _step_of(transform, kind)
        if step is None:
            break
        if isinstance(step, ResizeStep | RandomResizedCropStep):
            if is_resized or mode is None:
                break
            interpolation, is_resized = mode, True
        if isinstance(step, RandomResizedCropStep):
            guaranteed = step.size
        elif isinstance(step, ResizeStep):
            side = step.size
            if isinstance(side, tuple):
                guaranteed = side
            else:
                guaranteed = (side, side) if step.max_size is None else None
        elif isinstance(step, CenterCropStep | RandomCropStep):
            fits = guaranteed is not None and all(
                inner <= outer for inner, outer in zip(step.size, guaranteed, strict=True)
            )
            # An image that is too small is one for torchvision, before anything was drawn for it.
            if not fits and any(each.is_random for each in steps):
                break
            guaranteed = step.size
        steps.append(step)
        num_transforms, kind_after = number, kind
    if not steps:
        return None
    # What converts behind the last step is no part of it: it may begin the tail.
    return Head(tuple(steps), num_transforms, cast(Any, interpolation or "bilinear"), kind_after)


def _kind_after(transform: Any, kind: Kind) -> Kind | None:
    """Return what a transform converts uint8 images of a kind to, if it does only that."""
    if is_exactly(transform, v2.ToImage):
        return "image"
    if is_exactly(transform, *_PIL_TO_TENSOR) and (
        kind == "pil" or is_exactly(transform, v2.PILToTensor)
    ):
        return "tensor" if kind == "pil" else kind
    if is_exactly(transform, v2.RGB):  # All images have three channels already.
        return kind
    if is_exactly(transform, v2.ToPureTensor):
        return "tensor" if kind == "image" else kind
    return None


def _step_of(transform: Any, kind: Kind) -> tuple[HeadStep | None, str | None]:
    """Return the step for a transform, and how it resizes, if it does."""
    make_step = _STEPS.get(type(transform))
    if make_step is None or not is_exactly(transform, type(transform)):
        return None, None
    mode = _FILTERS.get(getattr(transform, "interpolation", None))
    # PIL always resizes antialiased.
    is_antialiased = kind == "pil" or getattr(transform, "antialias", True) is True
    return make_step(transform), mode if is_antialiased else None


def _flip_step(flip: Any) -> HeadStep:
    return FlipStep(flip.p)


def _center_crop_step(crop: Any) -> HeadStep | None:
    size = _size_of(crop.size)
    return CenterCropStep(size) if isinstance(size, tuple) else None


def _random_crop_step(crop: Any) -> HeadStep | None:
    size, pads = _size_of(crop.size), crop.padding is not None or crop.pad_if_needed
    draws: Literal["v1", "v2"] = "v1" if type(crop) is v1.RandomCrop else "v2"
    return RandomCropStep(size, draws) if isinstance(size, tuple) and not pads else None


def _random_resized_crop_step(crop: Any) -> HeadStep | None:
    size, scale, ratio = _size_of(crop.size), _range_of(crop.scale), _range_of(crop.ratio)
    if not isinstance(size, tuple) or scale is None or ratio is None:
        return None
    return RandomResizedCropStep(size, scale, ratio)


def _resize_step(resize: Any) -> HeadStep | None:
    size, max_size = _size_of(resize.size), resize.max_size
    if size is None or (max_size is not None and (isinstance(size, tuple) or max_size <= size)):
        return None
    return ResizeStep(size, max_size)


_STEPS: Final[dict[type, Callable[[Any], HeadStep | None]]] = {
    **dict.fromkeys([v1.RandomHorizontalFlip, v2.RandomHorizontalFlip], _flip_step),
    **dict.fromkeys([v1.CenterCrop, v2.CenterCrop], _center_crop_step),
    **dict.fromkeys([v1.RandomCrop, v2.RandomCrop], _random_crop_step),
    **dict.fromkeys([v1.RandomResizedCrop, v2.RandomResizedCrop], _random_resized_crop_step),
    **dict.fromkeys([v1.Resize, v2.Resize], _resize_step),
}


def _size_of(size: Any) -> int | Size | None:
    numbers = (size,) if isinstance(size, int) else size
    is_known = isinstance(numbers, list | tuple) and all(type(n) is int and n > 0 for n in numbers)
    if not is_known or len(numbers) not in {1, 2}:
        return None
    return numbers[0] if len(numbers) == 1 else cast(Size, tuple(numbers))


def _range_of(bounds: Any) -> tuple[float, float] | None:
    is_known = isinstance(bounds, list | tuple) and len(bounds) == 2 and _are_numbers(bounds)
    return (bounds[0], bounds[1]) if is_known and 0 < bounds[0] <= bounds[1] else None


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


# -- tail ------------------------------------------------------------------------------------------


def tail_of(chain: Sequence[Transform], *, is_on_device: bool) -> Tail | None:
    """Return the longest tail of a chain that is known, or None."""
    tails = (_tail(chain[start:], is_on_device=is_on_device) for start in range(len(chain)))
    return next((tail for tail in tails if tail is not None), None)


def _tail(transforms: Sequence[Transform], *, is_on_device: bool) -> Tail | None:
    """Return the tail that consists of these transforms, if all are known and it becomes float."""
    first_dtype: torch.dtype | None = None
    is_float = False
    operations: list[Operation] = []
    for number, transform in enumerate(transforms):
        if is_exactly(transform, v2.ToImage, v2.ToPureTensor):
            continue
        if is_exactly(transform, *_TO_TENSOR) and number == 0:
            is_float = True
            operations.append(Scale("divide"))
        elif is_exactly(transform, *_PIL_TO_TENSOR) and number == 0:
            continue
        elif (dtype := _dtype_of(transform)) is not None:
            if is_float:
                operations.append(Cast(dtype))
                continue
            is_float, first_dtype = True, dtype
            if not is_exactly(transform, v2.ToDtype):
                divides = is_exactly(transform, v1.ConvertImageDtype)
                operations.append(Scale("divide" if divides else "multiply"))
            elif cast(Any, transform).scale:
                operations.append(Scale("multiply"))
        elif is_float and (normalize := _normalize_of(transform)) is not None:
            operations.append(normalize)
        else:
            return None
    if not is_float:
        return None
    first: Any = transforms[0]
    return Tail(
        Arithmetic(first_dtype, tuple(operations)),
        is_on_device,
        tuple(transforms),
        takes_pil=is_exactly(first, *_TO_TENSOR, *_PIL_TO_TENSOR, v2.ToImage),
        takes_tensor=not is_exactly(first, *_ONLY_PIL),
    )


def is_of_tail(transform: Transform) -> bool:
    """Return whether a transform may be a part of a tail."""
    known = (*_TO_TENSOR, *_PIL_TO_TENSOR, v2.ToImage, v2.ToPureTensor)
    has_dtype = _dtype_of(transform) is not None
    return is_exactly(transform, *known) or has_dtype or _normalize_of(transform) is not None


def _dtype_of(transform: Any) -> torch.dtype | None:
    """Return what a transform converts tensors to, if it is a floating-point type."""
    if not is_exactly(transform, v1.ConvertImageDtype, v2.ConvertImageDtype, v2.ToDtype):
        return None
    dtype = transform.dtype
    return dtype if isinstance(dtype, torch.dtype) and dtype in _FLOATS else None


def _normalize_of(transform: Any) -> Normalize | None:
    if not is_exactly(transform, v1.Normalize, v2.Normalize):
        return None
    mean, std = transform.mean, transform.std
    if not all(isinstance(values, list | tuple) for values in (mean, std)):
        return None
    are_known = len(mean) in {1, 3} and len(std) in {1, 3} and _are_numbers([*mean, *std])
    # torchvision refuses one that is 0 as a number of the image's type, which may be half a float.
    if not are_known or not torch.tensor(std, dtype=torch.float16).all():
        return None
    return Normalize(tuple(mean), tuple(std))


# -- the chain in the place of a dataset's transform -----------------------------------------------


@dataclass(frozen=True)
class FusedTransform:
    """Does what is left of a chain, for images of `FusedLoader` or of the dataset's own loader."""

    transforms: tuple[Transform, ...]
    """All of the chain but its tail, if that is deferred."""
    head: Head | None
    tail: Tail | None
    """What is done once per batch."""

    def __call__(self, value: Any) -> Any:
        transforms, tail = self.transforms, self.tail
        if isinstance(value, Unfused):
            done = self.head.num_transforms if self.head and value.head_is_done else 0
            transforms, value = transforms[done:], value.image
        elif self.head is not None:
            transforms = transforms[self.head.num_transforms :]
            is_pil = self.head.kind == "pil"
            if not transforms and tail and (tail.takes_pil if is_pil else tail.takes_tensor):
                return DeferredImage(tail, value)
            value, transforms = _as_after_head(value, self.head.kind, transforms)
        for transform in transforms:
            value = transform(value)
        return value if tail is None else tail.defer(value)


def _as_after_head(
    pixels: torch.Tensor, kind: Kind, transforms: tuple[Transform, ...]
) -> tuple[Any, tuple[Transform, ...]]:
    """Return pixels as the head of a chain would return them, and the transforms to do then.

    A PIL image that would be made to be converted to a tensor is not made.
    """
    if kind != "pil":
        return pixels.as_subclass(Image) if kind == "image" else pixels, transforms
    first = transforms[0] if transforms else None
    if is_exactly(first, *_TO_TENSOR):
        return pixels.to(torch.get_default_dtype()).div(255), transforms[1:]
    if is_exactly(first, *_PIL_TO_TENSOR):
        return pixels, transforms[1:]
    if is_exactly(first, v2.ToImage):
        return pixels.as_subclass(Image), transforms[1:]
    return to_pil_image(pixels), transforms
