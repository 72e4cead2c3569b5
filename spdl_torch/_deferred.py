"""Images whose last transforms, the *tail* of the chain, are applied when they are collated.

The tail converts and normalises. Applied to the batch, it reads the bytes of each image once and
writes straight into the memory of the batch; on a device, a quarter of the bytes are copied to it.
`_fuse` finds the tail of a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch


class Operation(Protocol):
    """One step of the arithmetic of a tail."""

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Change a floating-point tensor in place, or return another one."""


@dataclass(frozen=True)
class Scale:
    """What follows the conversion of uint8: from 0 to 255 to 0 to 1.

    torchvision's functions divide or multiply, and the bits differ.
    """

    how: Literal["divide", "multiply"]

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value.div_(255) if self.how == "divide" else value.mul_(1.0 / 255)


@dataclass(frozen=True)
class Normalize:
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        mean = _column(self.mean, value.dtype, value.device)
        std = _column(self.std, value.dtype, value.device)
        return value.sub_(mean).div_(std)


@dataclass(frozen=True)
class Cast:
    dtype: torch.dtype

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype)


@lru_cache(maxsize=64)
def _column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one value for each channel, as torchvision makes them."""
    return torch.as_tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


@dataclass(frozen=True)
class Arithmetic:
    """From pixels of uint8 to what the transforms of a tail return, with the same bits."""

    first_dtype: torch.dtype | None
    """What uint8 is converted to; None: torch's default dtype."""
    operations: tuple[Operation, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        casts = [step.dtype for step in self.operations if isinstance(step, Cast)]
        return casts[-1] if casts else self.first_dtype or torch.get_default_dtype()

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        result = torch.empty(pixels.shape, dtype=self.dtype, device=pixels.device)
        self.write(pixels, result)
        return result

    def write(self, pixels: torch.Tensor, result: torch.Tensor) -> None:
        """Write the result for some pixels, ... × 3 × H × W."""
        value = result
        if any(isinstance(step, Cast) for step in self.operations):
            dtype = self.first_dtype or torch.get_default_dtype()
            value = torch.empty(pixels.shape, dtype=dtype, device=pixels.device)
        value.copy_(pixels)
        for operation in self.operations:
            value = operation(value)
        if value is not result:
            result.copy_(value)


@dataclass(frozen=True)
class Tail:
    """The last transforms of a chain."""

    arithmetic: Arithmetic
    is_on_device: bool
    """Batches are copied to a device first: a quarter of the bytes."""
    transforms: tuple[Callable[[Any], Any], ...] = field(compare=False)
    takes_pil: bool = field(compare=False)
    """The transforms convert PIL images."""
    takes_tensor: bool = field(compare=False)
    thread_safe = True

    def defer(self, value: Any) -> DeferredImage:
        """Return the image that the transforms are to be called with, to be collated.

        If their result is not that of the arithmetic, because it is not an image of three channels
        and bytes, they are called now.
        """
        if isinstance(value, torch.Tensor):
            pixels = value if self.takes_tensor and _is_image(value) else None
        elif self.takes_pil and getattr(value, "mode", None) == "RGB":
            pixels = torch.from_numpy(np.array(value)).permute(2, 0, 1).contiguous()
        else:
            pixels = None
        if pixels is not None:
            return DeferredImage(self, pixels)
        for transform in self.transforms:
            value = transform(value)
        return DeferredImage(self, None, value)


def _is_image(value: torch.Tensor) -> bool:
    is_image = value.dtype == torch.uint8 and value.ndim == 3 and value.shape[0] == 3
    return is_image and value.is_cpu


@dataclass(frozen=True, slots=True)
class DeferredImage:
    """An image on its way to collate, where the tail of its chain is applied."""

    tail: Tail
    pixels: torch.Tensor | None
    """What the tail is applied to; None: it was."""
    finished: Any = None

    def result(self) -> Any:
        """Return what the whole chain returns."""
        return self.finished if self.pixels is None else self.tail.arithmetic(self.pixels)


@dataclass(frozen=True, slots=True)
class DeferredBatch:
    """A batch on its way to a device, where the tail of the chain is applied."""

    arithmetic: Arithmetic
    pixels: torch.Tensor

    def to(self, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        return self.arithmetic(self.pixels.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> DeferredBatch:
        return DeferredBatch(self.arithmetic, self.pixels.pin_memory())
