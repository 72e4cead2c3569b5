"""Copy batches on a side stream: the only module that uses streams and events."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ._device import device_of
from ._structure import replaced

_INTERFACE: Final = ("Stream", "Event", "stream", "current_stream", "set_device")
"""The functions that a device's module needs for copies in the background."""

_MAX_STEPS_QUEUED: Final = 2
"""How many steps of the training loop may be queued on the device, besides the current one, when
the next batch is sent. Two keep the device busy; more would only take its memory."""

_DEFAULT_FLAGS: Final = 0
"""Registered memory is pinned for all devices of the process, as all their addresses differ."""


class _SideStream:
    """The stream of the copies to a device, and the memory that they have still to read.

    Events on one stream complete in the order they were recorded in, so only the oldest has to be
    asked for.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._holds: deque[tuple[Any, Any]] = deque()
        """An event after the copies of a batch, and what keeps the memory that they read."""
        self._process_id = os.getpid()

    def keep(self, hold: Any, copied: Any) -> None:
        """Keep an object until an event is completed, and something looks."""
        self._holds.append((copied, hold))

    def release(self) -> None:
        """Release what has been copied, without waiting. Any thread may do so at any time."""
        if os.getpid() != self._process_id:
            return  # A forked process cannot use the device.
        # IndexError: there is nothing left. ValueError: another thread has released the same.
        # RuntimeError: the device has failed, which is for a call of the loop to raise.
        with contextlib.suppress(IndexError, ValueError, RuntimeError):
            while (oldest := self._holds[0])[0].query():
                self._holds.remove(oldest)


_side_streams: dict[tuple[Any, torch.device], _SideStream] = {}


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch whose copies to the device have been started."""

    batch: Any
    tensors: list[torch.Tensor]
    """The tensors whose memory was allocated on the side stream."""
    copied: Any
    """The event after the copies; None if the host has waited for them."""


class Transfer:
    """Pins, sends and receives the batches of one loader for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module = getattr(torch, device.type, None)
        has_streams = device.type != "cpu" and all(hasattr(module, name) for name in _INTERFACE)
        self._module: Any = module if has_streams else None
        accelerator = torch.accelerator.current_accelerator()
        # torch pins memory for the current accelerator only.
        self._can_pin = has_streams and accelerator is not None and accelerator.type == device.type
        self._can_register = self._can_pin and hasattr(module, "cudart")
        self._has_received = False
        self._steps_queued: deque[Any] = deque()
        """An event after each step of the loop that the device has yet to run, oldest first."""

    def enter(self) -> None:
        """Make the device current in the calling thread, so that it pins and copies for it."""
        if self._module is not None:
            self._module.set_device(self.device)

    def pin(self, make: Callable[[Callable[..., torch.Tensor]], Any]) -> Any:
        """Return the batch that `make` returns, in pinned memory.

        `make` gets a function like `torch.empty`, to write tensors straight into pinned memory.
        """
        if not self._can_pin:
            return make(torch.empty)
        return replaced(make(_empty_pinned), _pinned)

    def register(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Pin memory that torch has not allocated, and return a function that ends this.

        The function must be called before the memory is unmapped. Return None if the device cannot
        pin such memory.
        """
        if not self._can_register:
            return None
        code = self._module.cudart().cudaHostRegister(address, num_bytes, _DEFAULT_FLAGS)
        if int(code) == 0:
            return partial(_unregister, self._module, self.device, address, os.getpid())
        self._can_register = False
        _clear_error(self.device)
        warnings.warn(
            "The memory that worker processes collate batches in could not be registered with "
            f"{self.device} as pinned memory: cudaHostRegister returned {code}. Each batch is "
            "copied to other pinned memory first, in the background.",
            stacklevel=2,
        )
        return None

    def send(self, batch: Any, hold: Any = None) -> _Sent:
        """Start the copies of a batch to the device.

        `hold` keeps memory of the batch that torch has not allocated, and that may be written to
        when `hold` is gone: it is kept until the copies have read the memory. What is not pinned of
        such a batch is copied to pinned memory first.
        """
        if self._module is None:
            copy = partial(_copy, device=self.device, non_blocking=False)
            return _Sent(replaced(batch, copy), [], None)
        # The training loop may run far ahead of the device. Copies must not: they need its memory.
        while len(self._steps_queued) > _MAX_STEPS_QUEUED:
            self._steps_queued.popleft().synchronize()
        side = _side_stream(self._module, self.device)
        side.release()
        if hold is not None:
            batch = self.pin(partial(_given, batch))
        tensors: list[torch.Tensor] = []
        with self._module.stream(side.stream):
            copied = self._module.Event()
            try:
                batch = replaced(batch, partial(self._start_copy, tensors))
            finally:  # Copies that were started before an error read the memory too.
                copied.record(side.stream)
                if hold is not None:
                    side.keep(hold, copied)
        return _Sent(batch, tensors, copied)

    def receive(self, sent: _Sent) -> Any:
        """Return the batch, for use on the calling thread's current stream."""
        if sent.copied is not None:
            stream = self._module.current_stream(self.device)
            if self._has_received:
                self._steps_queued.append(self._event_after_step(stream))
            self._has_received = True
            stream.wait_event(sent.copied)
            for tensor in sent.tensors:
                tensor.record_stream(stream)
            self.release_copied()
        return sent.batch

    def release_copied(self) -> None:
        """Release the memory of batches that have been copied to the device, without waiting."""
        if (side := _side_streams.get((self._module, self.device))) is not None:
            side.release()

    def _event_after_step(self, stream: Any) -> Any:
        try:
            # With CUDA's default, a thread that waits for the event keeps a core busy.
            event = self._module.Event(blocking=True)
        except TypeError:  # Other devices have no such argument.
            event = self._module.Event()
        event.record(stream)
        return event

    def _start_copy(self, tensors: list[torch.Tensor], leaf: Any) -> Any:
        """Return the copy of a leaf; add the device tensors that were made for it to `tensors`."""
        if isinstance(leaf, torch.Tensor):
            moved = _copy(leaf, self.device, non_blocking=True)
            tensors += _parts(moved) if moved is not leaf else ()
            return moved
        with _Made(self.device) as made:
            moved = _copy(leaf, self.device, non_blocking=True)
        tensors += made.tensors
        return moved


def transfer(batch: Any, device: torch.device | str) -> Any:
    """Copy a batch to a device, for use on the calling thread's current stream.

    Goes into mappings, sequences, named tuples and dataclasses, calls `to()` of objects that have
    it, and leaves everything else as it is, also tensors that are on the device already. The copies
    run on a side stream, beside the kernels that are queued already, and the current stream waits
    for them. The host does not wait if the tensors are in pinned memory: then do not write to them
    before the copies are done.

    >>> batch = {"image": torch.zeros(2, 3), "name": ["cat", "dog"]}
    >>> moved = transfer(batch, "meta")  # For a GPU: "cuda".
    >>> moved["image"].device, moved["name"]
    (device(type='meta'), ['cat', 'dog'])

    Args:
        batch: tensors in any structure.
        device: where to; without an index, the calling thread's current device.
    """
    to_device = Transfer(device_of(device))
    return to_device.receive(to_device.send(batch))


transfer.__module__ = "spdl_torch"


def _empty_pinned(shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    # The calling thread may have another default device.
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _pinned(leaf: Any) -> Any:
    """Return a tensor, or an object that has `pin_memory()`, in pinned memory."""
    if isinstance(leaf, torch.Tensor):
        return leaf.pin_memory() if leaf.device.type == "cpu" else leaf
    return leaf.pin_memory() if callable(getattr(type(leaf), "pin_memory", None)) else leaf


class _Made(TorchDispatchMode):
    """Collects every tensor that is made on a device, as an object may hide what it holds."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device == self._device:
                self.tensors += _parts(leaf)
        return result


def _copy(leaf: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Return the copy of a leaf on a device."""
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
    try:
        moved = leaf.to(device, non_blocking=non_blocking)
    except TypeError:  # Its method may take only the device.
        moved = leaf.to(device)
    # An object that moves itself may return nothing.
    return leaf if moved is None else moved


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that own the memory of a tensor."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name))
    elif tensor.is_nested:
        yield tensor.values()
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def _side_stream(module: Any, device: torch.device) -> _SideStream:
    """Return the one stream for copies to a device, so that all loaders share its free memory."""
    key = module, device
    if key not in _side_streams:
        # If two threads make one, both use the first. (A lock could be held during a fork.)
        _side_streams.setdefault(key, _SideStream(module.Stream(device=device)))
    return _side_streams[key]


def _unregister(module: Any, device: torch.device, address: int, process_id: int) -> None:
    if os.getpid() != process_id:
        return  # A forked process has a copy of the mapping, and cannot use the device.
    # Any thread may have the last reference. In one whose current device is another, the call would
    # take memory there.
    with module.device(device):
        code = module.cudart().cudaHostUnregister(address)
    if int(code) != 0:
        _clear_error(device)
        warnings.warn(
            f"Memory that is registered with {device} could not be unregistered: "
            f"cudaHostUnregister returned {code}. It stays pinned.",
            stacklevel=2,
        )


def _clear_error(device: torch.device) -> None:
    """Clear the last error of the calling thread.

    torch raises it at the next kernel that the thread launches, whatever call it came from. So
    launch one here.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def _given(batch: Any, _: Any) -> Any:
    return batch
