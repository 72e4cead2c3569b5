"""Copies on a stream of their own: the only place with streams and events."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ._device import device_of
from ._pinned import Loan, PinnedRing, is_plain
from ._structure import replaced

__all__ = ["Transfer", "transfer"]

_INTERFACE: Final = ("Stream", "Event", "stream", "current_stream", "set_device")
"""What a device's module must have for copies in the background."""

_MAX_STEPS_QUEUED: Final = 2
"""How many steps of the loop may be queued on the device, besides the one the loop is at, when the
next batch is sent. Two keep the device busy; more would only take its memory."""

_side_streams: dict[tuple[Any, torch.device], Any] = {}


@dataclass(frozen=True, slots=True)
class _Pinned:
    """A batch in the host's memory."""

    batch: Any
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    """What it has from the ring, by address."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch whose copies to the device have been started."""

    batch: Any
    tensors: list[torch.Tensor]
    """Those that were made on the side stream."""
    copied: Any
    """The event behind the copies; None if the host has waited for them."""


class Transfer:
    """The way of batches to one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module = getattr(torch, device.type, None)
        has_streams = device.type != "cpu" and all(hasattr(module, name) for name in _INTERFACE)
        self._module: Any = module if has_streams else None
        accelerator = torch.accelerator.current_accelerator()
        can_pin = has_streams and accelerator is not None and accelerator.type == device.type
        self._wake = PinnedRing() if can_pin else None
        self._has_received = False
        self._steps_queued: deque[Any] = deque()
        """An event behind each step of the loop that the device has yet to do, oldest first."""

    def enter(self) -> None:
        """Make the device the calling thread's own: what it pins and copies is for no other."""
        if self._module is not None:
            self._module.set_device(self.device)

    def pin(self, make: Callable[[Callable[..., torch.Tensor]], Any]) -> _Pinned:
        """Make a batch in pinned memory; `make` is given a function like `torch.empty` for it."""
        if self._wake is None:
            return _Pinned(make(torch.empty))
        loan = Loan(self._wake)
        batch = replaced(make(loan.empty), loan.pin)
        return _Pinned(batch, loan.buffers)

    def send(self, pinned: _Pinned) -> _Sent:
        """Start the copies of a batch to the device."""
        if self._module is None:
            return _Sent(replaced(pinned.batch, self._move), [], None)
        # The loop may be far ahead of the device. The copies must not be, nor their memory.
        while len(self._steps_queued) > _MAX_STEPS_QUEUED:
            self._steps_queued.popleft().synchronize()
        stream = _side_stream(self._module, self.device)
        copying = _Copying(self.device, pinned.buffers)
        with self._module.stream(stream):
            # After an error in here the buffers are torch's again, which knows of every copy out of
            # pinned memory that has been started.
            batch = replaced(pinned.batch, copying.start)
            copied = self._module.Event()
            copied.record(stream)
        if self._wake is not None:
            self._wake.give_back(copying.buffers.values(), copied)
        return _Sent(batch, copying.tensors, copied)

    def receive(self, sent: _Sent) -> Any:
        """Give the batch to the calling thread, to be used on its current stream."""
        if sent.copied is not None:
            stream = self._module.current_stream(self.device)
            if self._has_received:
                self._steps_queued.append(self._event_behind_step(stream))
            self._has_received = True
            stream.wait_event(sent.copied)
            for tensor in sent.tensors:
                tensor.record_stream(stream)
        return sent.batch

    def _event_behind_step(self, stream: Any) -> Any:
        try:
            event = self._module.Event(blocking=True)
        except TypeError:  # Not every device has a choice. CUDA's would keep a core busy.
            event = self._module.Event()
        event.record(stream)
        return event

    def _move(self, leaf: Any) -> Any:
        """Copy a leaf and wait for it, on a device without streams."""
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == self.device else leaf.to(self.device)
        return _object_moved(leaf, self.device, in_background=False)


def transfer(batch: Any, device: torch.device | str) -> Any:
    """Copy a batch to a device, for use on the calling thread's current stream.

    Goes into mappings, sequences, named tuples and dataclasses, calls `to()` of what has it, and
    leaves alone what is there already and what is no tensor. The copies run on a stream of their
    own, beside the kernels that are queued already, and the current stream waits for them; the host
    does not, if the tensors are in pinned memory. Do not write to pinned tensors before that.

    Args:
        batch: tensors in any structure.
        device: where to; without an index, the calling thread's current device.

    """
    way = Transfer(device_of(device))
    return way.receive(way.send(_Pinned(batch)))


class _Copying:
    """The copies of one batch, while they are started."""

    def __init__(self, device: torch.device, buffers: dict[int, torch.Tensor]) -> None:
        self._device = device
        self._lent = buffers
        self.buffers: dict[int, torch.Tensor] = {}
        """Those that were copied from here, and have no other reader."""
        self.tensors: list[torch.Tensor] = []
        """What was made on the device."""

    def start(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            with _Made(self._device) as made:
                moved = _object_moved(leaf, self._device, in_background=True)
            self.tensors += made.tensors
            return moved
        if leaf.device == self._device:
            return leaf
        if self._lent and is_plain(leaf):
            address = leaf.untyped_storage().data_ptr()
            if address in self._lent:
                self.buffers[address] = self._lent[address]
        moved = leaf.to(self._device, non_blocking=True)
        self.tensors += _parts(moved)
        return moved


class _Made(TorchDispatchMode):
    """Catches every tensor that is made on a device: an object need not show what it holds."""

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


def _object_moved(value: Any, device: torch.device, *, in_background: bool) -> Any:
    if in_background and _takes_non_blocking(type(value)):
        moved = value.to(device, non_blocking=True)
    else:
        moved = value.to(device)
    # One that moves itself may give nothing back.
    return value if moved is None else moved


def _takes_non_blocking(kind: type) -> bool:
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return "non_blocking" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have a tensor's memory."""
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
    """The one stream for copies to a device: memory that one loader lets go another can use."""
    key = module, device
    if key not in _side_streams:
        # Of two threads that make one, the first counts. (A lock might be held in a fork.)
        _side_streams.setdefault(key, module.Stream(device=device))
    return _side_streams[key]
