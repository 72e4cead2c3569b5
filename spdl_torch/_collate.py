"""Collate samples to a batch as torch does, straight into pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import (
    collate,
    collate_int_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)

from ._deferred import DeferredBatch, DeferredImage


def default_collate(samples: list[Any], *, empty: Callable[..., torch.Tensor] = torch.empty) -> Any:
    """Return the batch that torch's `default_collate` returns, faster for ints and pinned memory.

    Tensors are written directly into memory from `empty`, such as pinned memory.
    """
    # Looked up at each call, because users may add functions to torch's map.
    fn_map = dict(default_collate_fn_map)
    if fn_map.get(int) is collate_int_fn:
        fn_map[int] = _collate_ints
    if fn_map.get(torch.Tensor) is collate_tensor_fn:
        fn_map[torch.Tensor] = partial(_collate_tensors, empty=empty)
    fn_map.setdefault(DeferredImage, partial(_collate_images, empty=empty))
    return collate(samples, collate_fn_map=fn_map)


def collate_in(empty: Callable[..., torch.Tensor]) -> None:
    """Let torch's `default_collate`, and ours, write tensors into memory from `empty`.

    Only in a child process. torch's would put them into shared memory of their own in a worker.
    """
    if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
        default_collate_fn_map[torch.Tensor] = partial(_collate_tensors, empty=empty)
    default_collate_fn_map[DeferredImage] = partial(_collate_images, empty=empty)


def _collate_ints(samples: list[Any], **_: Any) -> torch.Tensor:
    # Most batches have labels, and torch.tensor takes four times as long as this.
    if set(map(type, samples)) == {int}:
        array = np.array(samples)
        if array.dtype == np.int64:
            return torch.from_numpy(array)
    return torch.tensor(samples)


def _collate_tensors(
    samples: list[torch.Tensor], *, empty: Callable[..., torch.Tensor], collate_fn_map: Any = None
) -> Any:
    first = samples[0]
    if first.layout is not torch.strided or first.is_nested:
        return collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
    fits_memory = (
        empty is not torch.empty
        and first.is_cpu
        and not first.is_quantized
        and not any(sample.is_nested or sample.requires_grad for sample in samples)
        and len({(sample.shape, sample.dtype) for sample in samples}) == 1
    )
    if fits_memory:
        return torch.stack(samples, out=empty((len(samples), *first.shape), dtype=first.dtype))
    # As torch's function does in the calling thread. In a worker it asks first which worker it is.
    return torch.stack(samples)


_KNOWN_COLLATES = (collate_tensor_fn, _collate_tensors)


def _collate_images(
    images: Sequence[DeferredImage],
    *,
    empty: Callable[..., torch.Tensor],
    collate_fn_map: Any = None,
) -> Any:
    """Collate images as torch's function collates tensors: `collate_fn_map` has that function."""
    with torch.DisableTorchFunction():
        tail, shapes = (
            images[0].tail,
            {None if image.pixels is None else image.pixels.shape for image in images},
        )
        (shape,) = shapes if len(shapes) == 1 else (None,)
        # Users may collate tensors with a function of their own.
        collate_tensors = (collate_fn_map or default_collate_fn_map).get(torch.Tensor)
        is_known = getattr(collate_tensors, "func", collate_tensors) in _KNOWN_COLLATES
        if not is_known or shape is None or any(image.tail != tail for image in images):
            return collate([image.result() for image in images], collate_fn_map=collate_fn_map)
        if tail.is_on_device:
            batch = empty((len(images), *shape), dtype=torch.uint8)
            torch.stack([image.pixels for image in images if image.pixels is not None], out=batch)
            return DeferredBatch(tail.arithmetic, batch)
        batch = empty((len(images), *shape), dtype=tail.arithmetic.dtype)
        for image, part in zip(images, batch, strict=True):
            assert image.pixels is not None
            tail.arithmetic.write(image.pixels, part)
        return batch
