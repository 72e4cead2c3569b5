"""Pinned memory that is used again."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from math import prod
from typing import Any, Protocol

import torch

__all__ = ["Loan", "PinnedRing", "is_plain"]


class Event(Protocol):
    """An event of a device's stream."""

    def query(self) -> bool: ...


class PinnedRing:
    """Buffers of pinned memory that go round between whoever collates and the copies to a device.

    To pin memory takes longer than to copy into it, so a buffer is used again, as soon as the event
    behind the copy out of it has completed. Nobody waits for that: if there is no buffer to be had,
    there will be one more. Sizes are powers of two, as torch rounds pinned memory up in any case,
    and so batches of different shapes share buffers. There are about as many of each size as were
    in use at the same time.

    Any thread may call any method. Each step is one atomic operation on a dict or a deque.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[torch.Tensor]] = {}
        self._being_copied: deque[tuple[Event, list[torch.Tensor]]] = deque()
        self._num_fresh: defaultdict[int, int] = defaultdict(int)
        self._num_reused: defaultdict[int, int] = defaultdict(int)
        """By thread: adding is not atomic."""

    @property
    def num_fresh(self) -> int:
        """How many times memory had to be pinned. Rises all the time if shapes vary widely."""
        return sum(list(self._num_fresh.values()))

    @property
    def num_reused(self) -> int:
        """How many times there was a buffer to be had."""
        return sum(list(self._num_reused.values()))

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of at least so many bytes. What is in it is nobody's."""
        self._collect()
        size = 1 << (num_bytes - 1).bit_length()
        thread = threading.get_ident()
        try:
            buffer = self._free_of(size).pop()
        except IndexError:
            self._num_fresh[thread] += 1
            # It outlives the mode in which the calling thread may be now.
            with torch.inference_mode(False):
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._num_reused[thread] += 1
        return buffer

    def give_back(self, buffers: Iterable[torch.Tensor], copied: Event) -> None:
        """Have these buffers again when the event has completed."""
        self._being_copied.append((copied, list(buffers)))

    def _free_of(self, size: int) -> deque[torch.Tensor]:
        # Not a defaultdict's: of two threads that miss it, one would be left with its own.
        return self._free.setdefault(size, deque())

    def _collect(self) -> None:
        """Free the buffers that have been copied by now."""
        while True:
            try:
                copied, buffers = self._being_copied.popleft()
            except IndexError:
                return
            if not copied.query():
                # Those behind it are on the same stream, and no further.
                self._being_copied.appendleft((copied, buffers))
                return
            for buffer in buffers:
                self._free_of(buffer.numel()).append(buffer)


class Loan:
    """The buffers that one batch has from a ring, by their addresses."""

    def __init__(self, ring: PinnedRing) -> None:
        self._wake = ring
        self.buffers: dict[int, torch.Tensor] = {}

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in one of the buffers."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        buffer = self._wake.take(num_bytes)
        self.buffers[buffer.data_ptr()] = buffer
        return buffer[:num_bytes].view(dtype).view(shape)

    def pin(self, value: Any) -> Any:
        """A tensor, or anything else with `pin_memory()`, in pinned memory.

        Only plain tensors go into a buffer. Any other knows better how to copy itself.
        """
        if not isinstance(value, torch.Tensor):
            return (
                value.pin_memory() if callable(getattr(type(value), "pin_memory", None)) else value
            )
        if value.device.type != "cpu":
            return value
        if not is_plain(value):
            return value.pin_memory()
        if value.is_pinned():
            return value
        return self.empty(tuple(value.shape), dtype=value.dtype).copy_(value)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its values, one after the other."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_quantized
        and tensor.is_contiguous()
    )
