"""Copy batches on a side stream: the only module that uses streams and events."""

from __future__ import annotations

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

_side_streams: dict[tuple[Any, torch.device], Any] = {}


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

    def send(self, batch: Any) -> _Sent:
        """Start the copies of a batch to the device."""
        if self._module is None:
            copy = partial(_copy, device=self.device, non_blocking=False)
            return _Sent(replaced(batch, copy), [], None)
        # The training loop may run far ahead of the device. Copies must not: they need its memory.
        while len(self._steps_queued) > _MAX_STEPS_QUEUED:
            self._steps_queued.popleft().synchronize()
        stream = _side_stream(self._module, self.device)
        tensors: list[torch.Tensor] = []
        with self._module.stream(stream):
            batch = replaced(batch, partial(self._start_copy, tensors))
            copied = self._module.Event()
            copied.record(stream)
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
        return sent.batch

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


def _side_stream(module: Any, device: torch.device) -> Any:
    """Return the one stream for copies to a device, so that all loaders share its free memory."""
    key = module, device
    if key not in _side_streams:
        # If two threads make one, both use the first. (A lock could be held during a fork.)
        _side_streams.setdefault(key, module.Stream(device=device))
    return _side_streams[key]
