"""Batches in memory that a child process and its parent share.

A *segment* is anonymous shared memory (`memfd_create`, so Linux only) for one batch. A worker
thread of the child collates a batch into a segment, the parent receives a small `Parcel`, and the
tensors that the parent unpacks are views of the segment: the batch is not copied. What makes this
right:

- A segment has one owner at a time. In the child it is *free*, or the *current* segment of one
  thread from `begin` or `pack` until the end of `pack`. From then on it is *lent*: it belongs to
  the parcel and then to the batch that is unpacked from the parcel.
- In the parent, every array and tensor of a batch holds the batch's `_Lease`, through the `base`
  of its memory. When the last one is gone, in whichever thread, the lease is gone, and its
  finaliser gives the segment's number back. No view of the segment outlives its lease.
- The child writes to a segment only after `free` was called with its number, and so never while the
  parent can see the memory. The child's tensors hold a lease too: a segment that the child itself
  still sees, because a dataset has kept what it collated, is not taken again.
- Only the child makes and drops segments. It never uses a number twice, so a late message about a
  dropped segment cannot mean another one. Parcels say which segments were dropped. Then the parent
  forgets its mapping, which is unmapped when nothing views it any more.
- Finalisers run at any moment, even while their own thread holds a lock. So they take none: they
  append to a deque, which is one atomic step.
- Memory that a device reads in the background is `Held` until it is read. Its views may be gone.
- Memory that is registered with a device is unregistered when nothing views it and nothing holds
  it, before it is unmapped: the finaliser of the array over the whole mapping runs before the array
  releases the mapping.
- A forked process that inherits a reader or a batch has its own copy of the deque, of the mappings
  and of the descriptors. Whatever is collected there changes nothing here. It may view the batch
  for as long as it likes, which cannot be known here. So a segment that was lent during a
  fork is given back as its negative number, and is dropped instead of used again.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ._batch_pickle import Bytes, pickle_batch, tensor_of
from ._engine import warn_caller
from ._text import size as size_text

_MIN_LARGE: Final = 16 * 1024
"""The number of bytes from which the memory of an array or tensor is in the segment, not in the
pickle. Less is cheap to copy, and labels that are kept must not keep their images' segment."""
_ALIGNMENT: Final = 64
_HEADROOM: Final = 1.12
"""How much larger a segment is than the batch it is made for: batches differ a little in size."""
_TAKES_BEFORE_TRIM: Final = 64
"""After so many batches, segments that were free all the time are dropped."""


class Parcel(NamedTuple):
    """A batch on its way to the parent: small, and can be pickled."""

    segment: int | None
    """The number of the segment in its child; None if the whole batch is in `pickled`."""
    capacity: int
    """Size of the segment in bytes."""
    pickled: bytes | tuple[int, int]
    """The batch without its large memory or, if that is large itself, its (offset, size)."""
    places: tuple[tuple[int, int], ...]
    """The (offset, size) in the segment of each large array or tensor, as the pickle has them."""
    dropped: tuple[int, ...]
    """The segments that the child has dropped since the last parcel."""


class _Lease(np.ndarray[Any, Any]):
    """The memory of a segment while a batch is in it. It lives as long as any view of the batch."""


class _Segment:
    """Shared memory of the child, mapped."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.views: Callable[[], _Lease | None] = lambda: None
        """Returns the lease while this process has a view of the segment's batch."""
        self.descriptor: int | None = os.memfd_create("spdl_torch", os.MFD_CLOEXEC)
        """None when the parent has mapped the segment. The mapping has a duplicate of its own."""
        self._close = weakref.finalize(self, os.close, self.descriptor)
        os.truncate(self.descriptor, capacity)
        self.memory = mmap.mmap(self.descriptor, capacity)

    def close_descriptor(self) -> None:
        self._close()
        self.descriptor = None


class _Filling:
    """A segment that one thread fills with a batch."""

    def __init__(self, segment: _Segment) -> None:
        self.segment = segment
        self.used = 0
        self._lease = _Lease(segment.capacity, np.uint8, segment.memory)
        self._address = _address_of(self._lease)
        segment.views = weakref.ref(self._lease)

    def take(self, num_bytes: int) -> Bytes | None:
        """Return memory of the segment, or None if it has no room."""
        start = self.used
        if start + num_bytes > self.segment.capacity:
            return None
        self.used = start + _aligned(num_bytes)
        return np.ndarray(num_bytes, np.uint8, self._lease, start)

    def offset_of(self, memory: Bytes) -> int | None:
        """Return where memory lies in the segment, or None if it does not."""
        offset = _address_of(memory) - self._address
        return offset if 0 <= offset < self.segment.capacity else None

    def place(self, memory: Bytes) -> tuple[int, int]:
        """Return where memory lies in the segment. It is copied there if it lies elsewhere."""
        offset = self.offset_of(memory)
        if offset is None:
            offset = self.used
            room = self.take(memory.size)
            assert room is not None  # The segment was chosen for its size.
            room[:] = memory  # Without the interpreter lock, unlike a copy of a memoryview.
        return offset, memory.size


class SegmentWriter:
    """The segments of a child process, filled by its worker threads.

    Each thread calls `begin`, collates with `empty`, then calls `pack`, or `discard` if collate has
    failed. The lock protects the lists of segments and is held for a few steps. What is in a
    thread's current segment is that thread's alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._capacity = 0
        """The size of the largest segment so far. Smaller ones are dropped when they are freed."""
        self._num_made = 0
        self._free: list[_Segment] = []
        """The last one was freed last: its memory may still be in the processor's cache."""
        self._lent: dict[int, _Segment] = {}
        self._dropped: list[int] = []
        """The segments that the parent must still be told to forget."""
        self._num_takes = 0
        self._fewest_free = 0
        """The least number of free segments since segments were last trimmed."""

    def begin(self) -> None:
        """Take a segment for the batch that the calling thread is about to collate.

        The first batch has none, because its size is not known yet.
        """
        self._local.filling = _Filling(self._take(0)) if self._capacity else None

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in the thread's segment or, without room, elsewhere."""
        filling: _Filling | None = getattr(self._local, "filling", None)
        num_bytes = math.prod(shape) * dtype.itemsize
        if filling is not None and num_bytes >= _MIN_LARGE:
            memory = filling.take(num_bytes)
            if memory is not None:
                return tensor_of(memory, dtype, tuple(shape))
        return torch.empty(shape, dtype=dtype, device="cpu")

    def pack(self, batch: Any) -> tuple[Parcel, int | None]:
        """Return a parcel to send and, if the parent has not got its segment yet, a descriptor.

        The descriptor stays the writer's. It is open until the parent frees the segment. A parcel
        that cannot be sent must be given to `discard`.
        """
        try:
            pickled, large = pickle_batch(batch, min_large=_MIN_LARGE, empty=self.empty)
            place_pickle = len(pickled) >= _MIN_LARGE
            if place_pickle:
                large.append(np.frombuffer(pickled, np.uint8))
            filling = self._filling_for(large) if large else None
            places = [filling.place(memory) for memory in large] if filling else []
            with self._lock:
                dropped, self._dropped = tuple(self._dropped), []
                if filling is None:
                    return Parcel(None, 0, pickled, (), dropped), None
                segment = filling.segment
                self._lent[segment.number] = segment
                self._local.filling = None  # The segment belongs to the parcel from now on.
            rest = places.pop() if place_pickle else pickled
            parcel = Parcel(segment.number, segment.capacity, rest, tuple(places), dropped)
            return parcel, segment.descriptor
        finally:
            self.discard()

    def discard(self, parcel: Parcel | None = None) -> None:
        """Free the calling thread's segment, or the segment of a parcel that was not sent."""
        if parcel is not None:
            with self._lock:
                self._dropped += parcel.dropped
                if parcel.segment is not None:
                    self._put_back(self._lent.pop(parcel.segment))
            return
        filling: _Filling | None = getattr(self._local, "filling", None)
        self._local.filling = None
        if filling is not None:
            with self._lock:
                self._put_back(filling.segment)

    def free(self, numbers: Iterable[int]) -> None:
        """Free segments that the parent does not use any more; drop those of negative number."""
        with self._lock:
            for number in numbers:
                segment = self._lent.pop(abs(number))
                segment.close_descriptor()  # The parent has mapped the segment.
                if number > 0:
                    self._put_back(segment)
                else:
                    self._dropped.append(segment.number)

    def _filling_for(self, large: list[Bytes]) -> _Filling:
        """Return the thread's segment or, if it is too small for the batch, a larger one."""
        filling: _Filling | None = getattr(self._local, "filling", None)
        if filling is None:
            outside, num_bytes = large, 0
        else:
            outside = [memory for memory in large if filling.offset_of(memory) is None]
            # Including what `empty` has returned and is not in the batch: next time it fits.
            num_bytes = filling.used
        num_bytes += sum(_aligned(memory.size) for memory in outside)
        if filling is None or num_bytes > filling.segment.capacity:
            larger = _Filling(self._take(num_bytes))
            self.discard()  # No thread fills it before the batch is copied: `large` views it.
            self._local.filling = filling = larger
        return filling

    def _take(self, num_bytes: int) -> _Segment:
        with self._lock:
            if num_bytes > self._capacity:
                pages = math.ceil(num_bytes * _HEADROOM / mmap.PAGESIZE)
                self._capacity = pages * mmap.PAGESIZE
                too_small, self._free = self._free, []
                self._dropped += [segment.number for segment in too_small]
            segment = next(
                (segment for segment in reversed(self._free) if segment.views() is None), None
            )
            if segment is not None:
                self._free.remove(segment)
            self._trim()
            if segment is not None:
                return segment
            self._num_made += 1
            number, capacity = self._num_made, self._capacity
        return _Segment(number, capacity)

    def _trim(self) -> None:
        # So the memory of a loop that keeps many batches for a while is given back afterwards.
        self._num_takes += 1
        self._fewest_free = min(self._fewest_free, len(self._free))
        if self._num_takes % _TAKES_BEFORE_TRIM == 0:
            self._dropped += [segment.number for segment in self._free[: self._fewest_free]]
            del self._free[: self._fewest_free]
            self._fewest_free = len(self._free)

    def _put_back(self, segment: _Segment) -> None:
        if segment.capacity < self._capacity:
            self._dropped.append(segment.number)
        else:
            self._free.append(segment)


class SegmentLimit:
    """How much memory of segments the batches of one loader may keep, whichever child it is of.

    `lend` is called by one thread at a time. `returned` is filled by finalisers in any thread.
    """

    def __init__(self, max_bytes: int, max_segments: int) -> None:
        self.returned: deque[int] = deque()
        """The capacities of segments that were lent and are free again."""
        self._max_bytes = max_bytes
        self._max_segments = max_segments
        self._num_bytes = 0
        self._num_segments = 0
        self._has_warned = False

    def lend(self, capacity: int) -> bool:
        """Return whether one more batch may keep its segment."""
        while self.returned:
            self._num_bytes -= self.returned.popleft()
            self._num_segments -= 1
        fits_bytes = self._num_bytes + capacity <= self._max_bytes
        if not fits_bytes or self._num_segments >= self._max_segments:
            return False
        self._num_bytes += capacity
        self._num_segments += 1
        return True

    def warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"The training loop keeps {self._num_segments} batches of this DataLoader in "
                f"{size_text(self._num_bytes)} of memory shared with its worker processes. At most "
                f"{self._max_segments} batches in {size_text(self._max_bytes)} are allowed, so "
                "each further batch is copied, which takes time. Keep a copy of the parts that you "
                "need, for example batch['label'].clone(), and let go of the batch.",
            )


Register = Callable[[int, int], Callable[[], None] | None]
"""Registers memory, given by address and size, with a device. Returns a function that ends this, or
None if the memory could not be registered."""


class _Mapped(np.ndarray[Any, Any]):
    """The whole memory of a mapped segment, which is unmapped after this is gone.

    Of another type than the arrays that have it as their base, which NumPy would otherwise give to
    their own views.
    """


class _Mapping:
    """A segment as the parent has mapped it."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.memory = _Mapped(capacity, np.uint8, mmap.mmap(fd, capacity))
        self._unregister: weakref.finalize[..., Any] | None = None

    @property
    def is_registered(self) -> bool:
        return self._unregister is not None

    def register(self, register: Register | None) -> None:
        """Register the memory, unless it is; with None, end this."""
        if register is None:
            if self._unregister is not None:
                self._unregister()
                self._unregister = None
        elif self._unregister is None:
            unregister = register(_address_of(self.memory), self.memory.size)
            if unregister is not None:
                self._unregister = weakref.finalize(self.memory, unregister)
                self._unregister.atexit = False  # Copies may still read the memory then.


class Held:
    """A batch in a segment that is not freed before this is gone, whatever views the batch."""

    is_registered = False
    """Whether the segment is registered with a device."""

    def __init__(self, parcel: Parcel, lease: _Lease | None, *, is_copied: bool = False) -> None:
        self._parcel = parcel
        self._lease = lease
        self._is_copied = is_copied
        self._view: Callable[[], Any] = lambda: None

    def unpack(self) -> Any:
        """Return the batch. Its large parts view the segment, unless that must be free.

        Can be called once.
        """
        if self._lease is None or self._is_copied:
            return self.copy()
        # The base of all arrays of the batch, so that it tells whether there are any.
        view = np.ndarray(self._lease.size, np.uint8, self._lease)
        self._view = weakref.ref(view)
        return _unpack(self._parcel, view, is_copied=False)

    def copy(self) -> Any:
        """Return the batch in memory of its own."""
        if self._lease is None:
            return pickle.loads(self._parcel.pickled)  # type: ignore[arg-type]
        return _unpack(self._parcel, self._lease, is_copied=True)

    def is_viewed(self) -> bool:
        """Return whether anything views the segment that `unpack` has returned."""
        return self._view() is not None


class SegmentReader:
    """The segments of one child process, as its parent sees them.

    `map` is called by one thread at a time, and so is `hold` or `unpack`. `discard` may be called
    by any thread. Tensors of a batch may be used and deleted in any thread, also after the child
    has ended and the reader is gone.
    """

    def __init__(self, limit: SegmentLimit) -> None:
        self._limit = limit
        self._maps: dict[int, _Mapping] = {}
        self._freed: deque[int] = deque()

    def map(self, number: int, capacity: int, fd: int) -> None:
        """Map a segment, and close the descriptor that came with its first parcel.

        Every descriptor must be mapped, even if its parcel is then discarded: the child does not
        send another one.
        """
        try:
            self._maps[number] = _Mapping(fd, capacity)
        finally:
            os.close(fd)

    def unpack(self, parcel: Parcel) -> Any:
        """Return the batch, whose large arrays and tensors are views of the segment."""
        return self.hold(parcel).unpack()

    def hold(self, parcel: Parcel, register: Register | None = None) -> Held:
        """Return the batch to unpack, and keep its segment meanwhile.

        The segment is registered with a device by `register`, once, and is not any more if that is
        None.
        """
        self._forget(parcel.dropped)
        if parcel.segment is None:
            return Held(parcel, None)
        mapping = self._maps[parcel.segment]
        lease = _Lease(parcel.capacity, np.uint8, mapping.memory)
        if not self._limit.lend(parcel.capacity):
            weakref.finalize(lease, self._freed.append, parcel.segment).atexit = False
            self._limit.warn_once()
            return Held(parcel, lease, is_copied=True)
        returned = self._limit.returned
        end = weakref.finalize(
            lease, _end_lease, self._freed, parcel.segment, returned, parcel.capacity, _Forks.number
        )
        end.atexit = False
        # No copy reads the segment now: what was in it before is not held any more.
        mapping.register(register)
        held = Held(parcel, lease)
        held.is_registered = mapping.is_registered
        return held

    def discard(self, parcel: Parcel) -> None:
        """Free the segment of a parcel that is not unpacked."""
        self._forget(parcel.dropped)
        if parcel.segment is not None:
            self._freed.append(parcel.segment)

    def take_freed(self) -> list[int]:
        """Return the numbers of segments freed since the last call, for `SegmentWriter.free`.

        They are negative if a forked process may still view the segment.
        """
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
        return freed

    def _forget(self, dropped: tuple[int, ...]) -> None:
        for number in dropped:
            self._maps.pop(number, None)  # The parent may never have got it.


class _Forks:
    """Counts the forks of this process: a lease that sees another number at its end was there."""

    number = 0

    @classmethod
    def count(cls) -> None:
        cls.number += 1


# Before and after: a lease may begin or end in another thread while this one forks.
os.register_at_fork(before=_Forks.count, after_in_parent=_Forks.count)


def _end_lease(
    freed: deque[int], number: int, returned: deque[int], capacity: int, num_forks: int
) -> None:
    returned.append(capacity)
    freed.append(number if num_forks == _Forks.number else -number)


def _unpack(parcel: Parcel, owner: Bytes, *, is_copied: bool) -> Any:
    # An array made of a buffer has the buffer's owner as its base. A slice of the lease would be a
    # lease too, and NumPy gives views of an array of the same type the base of that array.
    buffers = [np.ndarray(size, np.uint8, owner, offset) for offset, size in parcel.places]
    if is_copied:
        buffers = [memory.copy() for memory in buffers]
    pickled: Any = parcel.pickled
    if isinstance(pickled, tuple):
        offset, size = pickled
        pickled = np.ndarray(size, np.uint8, owner, offset)
    return pickle.loads(pickled, buffers=buffers)


def _address_of(memory: npt.NDArray[Any]) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
