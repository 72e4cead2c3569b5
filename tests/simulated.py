"""A simulated device, with streams, events and memory that behave as those of CUDA.

It is as lazy as a device is allowed to be, and as quick: what is queued on its streams happens when
the `Schedule` says so, in an order that only waiting for events limits. A tensor that is read too
early, or memory that is used again too early, shows in the values.

What it models, because the loader relies on it:

* The current stream and the current device belong to the thread.
* A copy out of pinned memory reads the memory when its turn comes on the stream. One out of other
  memory has read it when the call returns. One that is not `non_blocking` makes the host wait.
* An event stands for what was on the stream when it was recorded. To wait for one that was never
  recorded is to wait for nothing, and asked, it says that it has completed.
* Device memory belongs to the stream on which it was allocated. Once Python has released a tensor,
  the next allocation on that stream has its memory, whatever other streams still have to do with
  it. Streams that `record_stream` named delay that until they have done what is queued on them.
* Pinned memory comes from a caching allocator, in powers of two. Each `non_blocking` copy records
  an event for its block; a copy does not keep the host's tensor alive. Once Python has released the
  tensors in a block, and all its events have completed, the next allocation of its size has it.
* Registered memory (`cudaHostRegister`) is pinned too, but no allocator looks after it. A copy
  reads it through its address when its turn comes: what has been written there since, or nothing of
  use if it is not registered any more. It has to be mapped until it is unregistered.
* A call of the runtime that fails is the last error of its thread. The next kernel that the thread
  launches raises it.
* The kernels of simple arithmetic are queued on the current stream too. They have the addresses of
  their tensors and do not keep them alive.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spdl_torch import _deferred
from spdl_torch._device import _copies

TYPE = "privateuseone"
POISON = 0xA5


class Stream:
    def __init__(self, device=None, *, simulator, name="side"):
        self.device = torch.device(device)
        self.name = name
        self._simulator = simulator
        self.queue: deque[Callable[[], None] | Point] = deque()
        self.num_queued = 0
        self.num_done = 0

    def wait_event(self, event):
        with self._simulator.call("wait", self, event):
            if event.point is not None:
                self.put(event.point)

    def query(self):
        return not self.queue

    def put(self, work):
        self.queue.append(work)
        self.num_queued += 1

    def point(self) -> Point:
        return Point(self, self.num_queued)

    def step(self) -> bool:
        """Do what is first on the stream; false if there is nothing, or it has to wait."""
        if not self.queue:
            return False
        work = self.queue[0]
        if isinstance(work, Point):
            if not work.is_reached():
                return False
        else:
            work()
        self.queue.popleft()
        self.num_done += 1
        return True


@dataclass(frozen=True)
class Point:
    """How far a stream has to come."""

    stream: Stream
    num_done: int

    def is_reached(self) -> bool:
        return self.stream.num_done >= self.num_done


class Event:
    def __init__(self, *, simulator, blocking=False):
        self._simulator = simulator
        self._blocking = blocking
        self.point: Point | None = None

    def record(self, stream=None):
        stream = stream or self._simulator.current_stream()
        with self._simulator.call("record", stream, self):
            self.point = stream.point()

    def wait(self, stream=None):
        (stream or self._simulator.current_stream()).wait_event(self)

    def query(self):
        with self._simulator.call("query", None, self):
            return self.point is None or self.point.is_reached()

    def synchronize(self):
        assert self._blocking, "this would keep a core busy"
        self._simulator.host_wait(self.point)


@dataclass(eq=False)
class Block:
    """Memory of the device."""

    memory: torch.Tensor
    stream: Stream
    used_on: set[Stream] = field(default_factory=set)


@dataclass(eq=False)
class PinnedBlock:
    """Pinned memory of the host."""

    memory: np.ndarray
    copies: list[Point] = field(default_factory=list)
    """The ends of the `non_blocking` copies out of it."""

    def lease(self, release: Callable[[PinnedBlock], None]) -> torch.Tensor:
        """Return a tensor of its bytes; `release` is called when the last view of it is gone."""
        array = self.memory.view(_Lease)
        weakref.finalize(array, release, self)
        return torch.from_numpy(array)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same bytes as one of its own, without keeping that alive."""
        elements = torch.from_numpy(self.memory).view(tensor.dtype)
        return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(eq=False)
class Registration:
    """Memory of the host that is registered, or was."""

    address: int
    num_bytes: int
    is_over: bool = False

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.address <= tensor.data_ptr() < self.address + self.num_bytes

    def alias(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that reads at the address of a tensor what is there at that time."""
        address, shape, stride = tensor.data_ptr(), tensor.shape, tensor.stride()
        dtype = tensor.dtype
        pairs = zip(shape, stride, strict=True)
        num_bytes = (1 + sum((n - 1) * step for n, step in pairs)) * dtype.itemsize

        def read() -> torch.Tensor:
            found = None if self.is_over else mapped_bytes(address, num_bytes)
            data = bytearray(found or [POISON] * num_bytes)
            return torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)

        return read


def mapped_bytes(address: int, num_bytes: int) -> bytes | None:
    """Return what is at an address; None if nothing is mapped there."""
    with Path("/proc/self/mem").open("rb", 0) as memory, contextlib.suppress(OSError):
        return os.pread(memory.fileno(), num_bytes, address)
    return None


class Runtime:
    """What `cudart()` returns."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        simulator = self._simulator
        with simulator.call("register", None, (address, num_bytes)):
            end = address + num_bytes
            overlaps = [
                other
                for other in simulator.registrations
                if other.address < end and address < other.address + other.num_bytes
            ]
            code = simulator.register_code or (712 if overlaps else 0)
            if code:
                simulator.fail(code)
            else:
                simulator.registrations.append(Registration(address, num_bytes))
                simulator.num_registered += 1
            return code

    def cudaHostUnregister(self, address):  # noqa: N802
        simulator = self._simulator
        with simulator.call("unregister", None, address):
            for registration in simulator.registrations:
                if registration.address == address and mapped_bytes(address, 1):
                    registration.is_over = True
                    simulator.registrations.remove(registration)
                    return 0
            simulator.fail(713)
            return 713


class _Lease(np.ndarray):
    """One use of a block: a storage keeps the array alive from which it was made."""


class SimulatedTensor(torch.Tensor):
    block: Block
    simulator: Simulator
    owner: SimulatedTensor | None
    """The tensor that this is a view of."""
    clone_made: torch.Tensor

    @staticmethod
    def __new__(cls, block, like, device, simulator, owner=None):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        tensor.block = block
        tensor.simulator = simulator
        tensor.owner = owner
        if owner is None:
            weakref.finalize(tensor, simulator.free, block)
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # Before torch dispatches: it would ask for a driver of the device.
        with torch._C.DisableTorchFunctionSubclass():
            name, (tensor, *others) = getattr(func, "__name__", ""), args
            simulator = getattr(tensor, "simulator", None)
            if simulator is None:
                return func(*args, **(kwargs or {}))
            if name in {"copy_", "div_", "mul_", "sub_"}:
                simulator.run(func, tensor, *others)
                return tensor
            if name == "view":
                like = torch.empty(tensor.shape, dtype=tensor.dtype).view(*others)
                return cls(tensor.block, like, tensor.device, simulator, owner=tensor)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            return args[0].clone_made
        raise NotImplementedError(f"the simulated device does not know {func}")

    def memory(self) -> Callable[[], torch.Tensor]:
        """Return a function that returns what is at the tensor's address at that time."""
        block, shape, dtype = self.block, self.shape, self.dtype
        num_bytes = self.numel() * dtype.itemsize
        return lambda: block.memory[:num_bytes].view(dtype).view(shape)

    def record_stream(self, stream):
        with self.simulator.call("record_stream", stream, self.block):
            if stream is not self.block.stream:
                self.block.used_on.add(stream)


def _given(value: Any) -> Any:
    return value


@dataclass
class Reading:
    """What a kernel of the training loop has read, once it has run."""

    value: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """A call of the device's interface, and the thread that made it."""

    what: str
    stream: Stream | None
    about: Any
    thread: str
    current_device: int


Schedule = Callable[["Simulator"], None]
"""Called whenever something was asked of the device, to let some of its work happen."""


def everything_last(_: Simulator) -> None:
    """Nothing happens before the host waits."""


def copies_last(simulator: Simulator) -> None:
    """The loop's streams are as quick as they can be; a copy happens when one must wait for it."""
    for stream in simulator.loop_streams():
        simulator.hurry(stream)


def copies_first(simulator: Simulator) -> None:
    """Copies happen at once; what the loop has queued does not, before the host waits."""
    for stream in simulator.streams:
        if stream not in simulator.loop_streams():
            while stream.step():
                pass


def at_random(seed: int) -> Schedule:
    draw = random.Random(seed)

    def schedule(simulator: Simulator) -> None:
        for _ in range(draw.randrange(4)):
            draw.choice(simulator.streams).step()

    schedule.__name__ = f"at_random_{seed}"
    return schedule


class Simulator:
    """What `torch.get_device_module` returns for the device."""

    def __init__(self, schedule: Schedule, num_devices: int = 1) -> None:
        self.schedule = schedule
        self._num_devices = num_devices
        self._lock = threading.RLock()
        self._of_thread = threading.local()
        self.streams: list[Stream] = []
        self._default_streams = [self._new_stream(i, "default") for i in range(num_devices)]
        self._free: defaultdict[tuple[Stream, int], list[Block]] = defaultdict(list)
        self._freed_in_use: list[tuple[list[Point], Block]] = []
        self.calls: list[Call] = []
        self.num_bytes_left = 1 << 40
        self._pinned_blocks: dict[int, PinnedBlock] = {}
        """All of them, by address."""
        self._free_pinned: list[PinnedBlock] = []
        """Released by Python; copies out of them may still be queued."""
        self.registrations: list[Registration] = []
        """The memory that is registered now."""
        self.num_registered = 0
        """How many times memory was registered."""
        self.register_code = 0
        """What `cudaHostRegister` returns, if not success."""

    # -- the interface of a device module --------------------------------------------------------

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def device_count(self):
        return self._num_devices

    def current_device(self):
        return getattr(self._of_thread, "device", 0)

    def set_device(self, device):
        self._of_thread.device = device if isinstance(device, int) else torch.device(device).index

    def Stream(self, device=None):  # noqa: N802 (a class, in a module)
        index = self.current_device() if device is None else torch.device(device).index
        return self._new_stream(index, "side")

    def Event(self, *, blocking=False):  # noqa: N802
        return Event(simulator=self, blocking=blocking)

    def current_stream(self, device=None):
        index = self.current_device() if device is None else torch.device(device).index
        return self._streams_of_thread().get(index, self._default_streams[index])

    @contextlib.contextmanager
    def stream(self, stream):
        current = self._streams_of_thread()
        before = current.get(stream.device.index)
        current[stream.device.index] = stream
        try:
            yield
        finally:
            current[stream.device.index] = before or self._default_streams[stream.device.index]

    @contextlib.contextmanager
    def device(self, device):
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def cudart(self):
        return Runtime(self)

    def manual_seed_all(self, seed):
        pass

    def _is_in_bad_fork(self):
        return False

    def _streams_of_thread(self) -> dict[int, Stream]:
        return self._of_thread.__dict__.setdefault("streams", {})

    def _new_stream(self, index, name) -> Stream:
        stream = Stream(torch.device(TYPE, index), simulator=self, name=name)
        self.streams.append(stream)
        return stream

    # -- what happens on it ----------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, what: str, stream: Stream | None, about: Any = None) -> Iterator[None]:
        with self._lock:
            name = threading.current_thread().name
            self.calls.append(Call(what, stream, about, name, self.current_device()))
            yield
            self.schedule(self)

    def loop_streams(self) -> list[Stream]:
        """Where the training loop computes: wherever kernels have been queued."""
        return [stream for stream in self.streams if stream.name != "side"]

    def loop_stream(self, index: int = 0) -> Stream:
        return self._new_stream(index, "loop")

    def hurry(self, stream: Stream) -> None:
        """Let a stream come to its end, and others only as far as it has to wait for them."""
        while stream.queue:
            self.advance(stream)

    def advance(self, stream: Stream) -> None:
        """Let a stream do one thing more, or what it waits for."""
        if not stream.step():
            point = stream.queue[0]
            assert isinstance(point, Point)
            self.advance(point.stream)

    def host_wait(self, point: Point | None = None) -> None:
        with self.call("host waits", None):
            while point is not None and not point.is_reached():
                self.advance(point.stream)

    def finish(self) -> None:
        """What the training loop does at its end: wait for everything."""
        with self._lock:
            for stream in self.streams:
                self.hurry(stream)

    def fail(self, code: int) -> None:
        """Make this the last error of the calling thread."""
        self._of_thread.error = code

    def launch(self) -> None:
        """Launch a kernel, which raises the last error of the calling thread and clears it."""
        error, self._of_thread.error = getattr(self._of_thread, "error", 0), 0
        if error:
            raise RuntimeError(f"error {error} of the simulated device")

    def read(self, tensor: torch.Tensor) -> Reading:
        """Queue a kernel that reads a tensor. It has its address and does not keep it alive."""
        assert isinstance(tensor, SimulatedTensor), f"{type(tensor)} is not on the device"
        reading = Reading()
        memory = tensor.memory()
        stream = self.current_stream(tensor.device)

        def kernel() -> None:
            reading.value = memory().clone()

        with self.call("kernel", stream, tensor.block):
            stream.put(kernel)
        return reading

    def run(self, func: Any, target: SimulatedTensor, *others: Any) -> None:
        """Queue a kernel that changes a tensor."""
        memories = [
            other.memory() if isinstance(other, SimulatedTensor) else partial(_given, other)
            for other in (target, *others)
        ]
        stream = self.current_stream(target.device)
        with self.call("kernel", stream, target.block):
            stream.put(lambda: func(*(memory() for memory in memories)))

    def empty(self, like: torch.Tensor, device: torch.device) -> SimulatedTensor:
        """Allocate a tensor on the current stream."""
        stream = self.current_stream(device)
        with self.call("allocate", stream):
            block = self._allocate(like.numel() * like.element_size(), stream)
        return SimulatedTensor(block, like, device, self)

    def converted(self, tensor: SimulatedTensor, dtype: torch.dtype) -> SimulatedTensor:
        """Return a copy of a tensor that has another type."""
        made = self._made(self.empty(torch.empty(tensor.shape, dtype=dtype), tensor.device))
        self.run(torch.Tensor.copy_, made, tensor)
        return made

    def _made(self, tensor: SimulatedTensor) -> SimulatedTensor:
        """Return a tensor that a function has made, so that a dispatch mode sees it."""
        seen = torch.Tensor._make_wrapper_subclass(
            SimulatedTensor, tensor.shape, device=tensor.device
        )
        seen.clone_made = tensor
        return torch.ops.aten.clone.default(seen)

    def copy(self, source: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        index = self.current_device() if device.index is None else device.index
        device = torch.device(TYPE, index)
        stream = self.current_stream(device)
        pinned = self._pinned_block(source)
        registration = self._registration(source)
        with self.call("copy", stream, pinned or registration):
            block = self._allocate(source.numel() * source.element_size(), stream)
            tensor = SimulatedTensor(block, source, device, self)
            if registration is not None:
                values = registration.alias(source)
            else:
                tensor_now = source.detach().clone() if pinned is None else pinned.alias(source)
                values = lambda: tensor_now  # noqa: E731

            def work() -> None:
                flat = values().contiguous().view(-1).view(torch.uint8)
                block.memory[: flat.numel()] = flat

            stream.put(work)
            done = stream.point()
            if pinned is not None and non_blocking:
                pinned.copies.append(done)
        if not non_blocking:
            self.host_wait(done)
        return self._made(tensor)

    def _allocate(self, num_bytes: int, stream: Stream) -> Block:
        for entry in list(self._freed_in_use):
            points, block = entry
            if all(point.is_reached() for point in points):
                self._freed_in_use.remove(entry)
                self._free[block.stream, block.memory.numel()].append(block)
        size = max(512, 1 << (max(num_bytes, 1) - 1).bit_length())
        if free := self._free[stream, size]:
            return free.pop()
        if size > self.num_bytes_left:
            raise torch.OutOfMemoryError(f"the simulated device has no {size} bytes left")
        self.num_bytes_left -= size
        return Block(torch.full((size,), POISON, dtype=torch.uint8), stream)

    def free(self, block: Block) -> None:
        with self._lock:
            if block.used_on:
                points = [stream.point() for stream in block.used_on]
                block.used_on = set()
                self._freed_in_use.append((points, block))
            else:
                self._free[block.stream, block.memory.numel()].append(block)

    @property
    def num_pinned(self) -> int:
        """How many times memory had to be pinned, as there was no block to reuse."""
        return len(self._pinned_blocks)

    def empty_pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = shape.numel() * dtype.itemsize
        size = max(512, 1 << (max(num_bytes, 1) - 1).bit_length())
        with self.call("pin", None):
            block = self._take_free_pinned(size)
            if block is None:
                block = PinnedBlock(np.empty(size, dtype=np.uint8))
                self._pinned_blocks[block.memory.ctypes.data] = block
            block.memory[:] = POISON
        # Atomic, as Python may release a tensor at any point.
        tensor = block.lease(self._free_pinned.append)
        return tensor[:num_bytes].view(dtype).view(shape)

    def _take_free_pinned(self, size: int) -> PinnedBlock | None:
        for block in list(self._free_pinned):
            if block.memory.size == size and all(point.is_reached() for point in block.copies):
                self._free_pinned.remove(block)
                block.copies.clear()
                return block
        return None

    def _pinned_block(self, tensor: torch.Tensor) -> PinnedBlock | None:
        return self._pinned_blocks.get(tensor.untyped_storage().data_ptr())

    def _registration(self, tensor: torch.Tensor) -> Registration | None:
        return next((found for found in self.registrations if found.holds(tensor)), None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.is_of_allocator(tensor) or self._registration(tensor) is not None

    def is_of_allocator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned memory of torch, which is not reused while it is copied."""
        return self._pinned_block(tensor) is not None

    # -- how torch comes to know it --------------------------------------------------------------

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        empty, ones, to, as_tensor = torch.empty, torch.ones, torch.Tensor.to, torch.as_tensor
        accelerator = torch.device(TYPE)

        def is_simulated(device: Any) -> bool:
            return device is not None and torch.device(device).type == TYPE

        def as_tensor_or_copy(data, dtype=None, device=None):
            if is_simulated(device):
                return self.copy(as_tensor(data, dtype=dtype), device, non_blocking=False)
            return as_tensor(data, dtype=dtype, device=device)

        def empty_or_pinned(*args, pin_memory=False, device=None, **kwargs):
            if is_simulated(device):
                return self._made(self.empty(empty(*args, **kwargs), torch.device(device)))
            tensor = empty(*args, device=device, **kwargs)
            return self.empty_pinned(tensor.shape, tensor.dtype) if pin_memory else tensor

        def ones_or_launch(*args, device=None, **kwargs):
            return self.launch() if is_simulated(device) else ones(*args, device=device, **kwargs)

        def pin_memory(tensor, *_):
            if self.is_pinned(tensor):
                return tensor
            return self.empty_pinned(tensor.shape, tensor.dtype).copy_(tensor)

        def to_or_copy(tensor, *args, **kwargs):
            device = kwargs.get("device", args[0] if args else None)
            device = torch.device(device) if isinstance(device, str) else device
            if isinstance(tensor, SimulatedTensor) and isinstance(device, torch.dtype):
                return self.converted(tensor, device)
            if not isinstance(device, torch.device) or device.type != TYPE:
                return to(tensor, *args, **kwargs)
            return self.copy(tensor, device, kwargs.get("non_blocking", False))

        # What the package keeps for a device would keep the memory of this one after the test.
        monkeypatch.setattr(_copies, "_side_streams", {})
        monkeypatch.setattr(_deferred, "_column", _deferred._column.__wrapped__)
        monkeypatch.setattr(torch, TYPE, self, raising=False)
        monkeypatch.setattr(torch, "empty", empty_or_pinned)
        monkeypatch.setattr(torch, "as_tensor", as_tensor_or_copy)
        monkeypatch.setattr(torch, "ones", ones_or_launch)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: self.is_pinned(tensor))
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.Tensor, "to", to_or_copy)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: accelerator)
        monkeypatch.setattr(torch.accelerator, "device_count", self.device_count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", self.current_device)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.set_device)
