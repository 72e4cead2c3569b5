"""Bytes by key, in memory or in a directory, for all processes that share them.

A `Space` is a table and segments of data. The table is an open hash table in memory that all
processes map; a slot says where the bytes of a key are. Entries are added, never changed and never
removed. What makes this right, whichever process is killed at whichever moment:

- The state that changes is the end of the data, two counters, and the slots. It changes under the
  lock, which the kernel releases when its owner dies. User code never runs under the lock.
- A writer first moves the end of the data, so that no other writer has its bytes; then it writes
  them, without the lock; then it fills the slot. A writer that dies on the way leaves a gap in the
  data, or a slot whose checksum is wrong.
- A reader takes no lock. It believes a slot only if the slot's checksum is right, and in a
  directory the bytes only if their checksum is right too. All else is a miss. So a damaged or
  truncated file is one, and a reader that sees half a slot.
- Bytes that a slot points to are not written again, so views of them stay valid. Views are private
  mappings: who writes to them changes no entry.
- The lock is one of an open file, so a forked process, which would share it, opens the file again.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

KEY_BYTES: Final = 16
SEGMENT_BYTES: Final = 1 << 28
"""No entry is larger, and none lies in two segments. Each has a mapping, and in a directory a file.
"""
FORMAT: Final = 1
"""Part of the names of spaces: another version of this module does not find them."""

_MAGIC: Final = b"spdlcach"
_HEADER_BYTES: Final = 4096
_HEADER: Final = struct.Struct("<8sII")
"""Magic, number of slots, checksum of both."""
_END, _NOT_END, _NUM_ENTRIES, _IS_REFUSED, _CHOICE = range(2, 7)
"""The places of the counters in the header, in units of 8 bytes."""
_SLOT: Final = struct.Struct("<16sQIIII")
"""Key, offset, size, kind, checksum of the bytes, checksum of the slot."""
_MOST_PROBES: Final = 512
"""How many slots are looked at for a key. A table that is full of garbage must not take longer."""
_MOST_FULL: Final = 0.7
_ALIGNMENT: Final = 64
_ALL_BITS: Final = (1 << 64) - 1

TABLE: Final = "table"


class Entry(NamedTuple):
    kind: int
    memory: Bytes
    """A view of the cache. Writing to it changes no entry, but what this process reads of it."""


# -- where the bytes are --------------------------------------------------------------------------


class MemoryFiles:
    """Anonymous memory: one file for the table and one for all segments."""

    is_checked = False

    def __init__(self, table: int, data: int) -> None:
        self._table, self._data = table, data
        for descriptor in (table, data):
            weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def create(cls, num_slots: int, max_bytes: int) -> MemoryFiles:
        table = os.memfd_create("spdl_torch", os.MFD_CLOEXEC)
        os.truncate(table, table_bytes(num_slots))
        write_header(table, num_slots)
        data = os.memfd_create("spdl_torch", os.MFD_CLOEXEC)
        # No memory is used before it is written to.
        os.truncate(data, (max_bytes // SEGMENT_BYTES + 2) * SEGMENT_BYTES)
        return cls(table, data)

    def open_table(self) -> int:
        # Opened again, because a forked process must not share the lock.
        return os.open(f"/proc/self/fd/{self._table}", os.O_RDWR | os.O_CLOEXEC)

    def open_segment(self, number: int, *, creates: bool) -> tuple[int, int]:  # noqa: ARG002
        return os.dup(self._data), number * SEGMENT_BYTES

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            raise TypeError("a cache in memory can only be pickled for a child process")
        return _unpickled_files, (DupFd(self._table), DupFd(self._data))


def _unpickled_files(table: Any, data: Any) -> MemoryFiles:
    return MemoryFiles(table.detach(), data.detach())


class DirectoryFiles:
    """A folder with a file for the table and one for each segment."""

    is_checked = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open_table(self) -> int:
        return os.open(self.folder / TABLE, os.O_RDWR | os.O_CLOEXEC)

    def open_segment(self, number: int, *, creates: bool) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if creates else 0)
        descriptor = os.open(self.folder / f"data-{number:05}", flags, 0o666)
        if creates and os.fstat(descriptor).st_size < SEGMENT_BYTES:
            os.ftruncate(descriptor, SEGMENT_BYTES)  # Without blocks, until they are written to.
        return descriptor, 0


Files = MemoryFiles | DirectoryFiles


def table_bytes(num_slots: int) -> int:
    return _HEADER_BYTES + num_slots * _SLOT.size


def _checksum_of_header(num_slots: int) -> int:
    return zlib.crc32(_MAGIC + num_slots.to_bytes(4, "little"))


def write_header(descriptor: int, num_slots: int) -> None:
    head = _HEADER.pack(_MAGIC, num_slots, _checksum_of_header(num_slots))
    os.pwrite(descriptor, head + struct.pack("<QQ", 0, _ALL_BITS), 0)


# -- the budget -----------------------------------------------------------------------------------


class Usage:
    """How many bytes the spaces of a cache use together: a number in memory that is shared.

    It is changed under a lock of its own, which is taken inside that of a space.
    """

    def __init__(self, max_bytes: int, path: Path | None) -> None:
        self.max_bytes = max_bytes
        self._path = path
        self._memory: int | None = None
        if path is None:
            self._memory = os.memfd_create("spdl_torch", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._memory).atexit = False
        self.open()

    def open(self) -> None:
        path = self._path or f"/proc/self/fd/{self._memory}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._file).atexit = False
        os.posix_fallocate(self._file, 0, 8)
        self._thread_lock = threading.Lock()
        self._count = memoryview(mmap.mmap(self._file, 8)).cast("Q")

    def __getstate__(self) -> Any:
        memory = None if self._memory is None else DupFd(self._memory)
        return self.max_bytes, self._path, memory

    def __setstate__(self, state: Any) -> None:
        self.max_bytes, self._path, memory = state
        self._memory = None if memory is None else memory.detach()
        self.open()

    @property
    def num_bytes(self) -> int:
        return self._count[0]

    def take(self, num_bytes: int) -> bool:
        """Return whether there is room for so many bytes more, and use it."""
        with self._thread_lock, file_lock(self._file):
            has_room = self._count[0] + num_bytes <= self.max_bytes
            if has_room:
                self._count[0] += num_bytes
            return has_room

    def count(self, spaces: Iterable[Space]) -> None:
        """Count again what the spaces use."""
        with self._thread_lock, file_lock(self._file):
            self._count[0] = sum(space.end for space in spaces)


# -- a space --------------------------------------------------------------------------------------


class DamagedTable(Exception):  # noqa: N818 (the space is replaced)
    """The table of a space cannot be used."""


class _Table:
    """The slots and counters of a space, in memory that all processes map."""

    def __init__(self, descriptor: int) -> None:
        head = os.pread(descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
        magic, num_slots, checksum = _HEADER.unpack(head)
        is_valid = magic == _MAGIC and checksum == _checksum_of_header(num_slots)
        if not is_valid or os.fstat(descriptor).st_size < table_bytes(num_slots):
            raise DamagedTable
        self.num_slots: int = num_slots
        self._memory = mmap.mmap(descriptor, table_bytes(num_slots))
        self.counters = memoryview(self._memory)[:_HEADER_BYTES].cast("Q")

    def find(self, key: bytes) -> tuple[int | None, Any]:
        """Return where the slot of a key is, or could be, and what is in it if that is valid."""
        place = int.from_bytes(key[:8], "little") % self.num_slots
        for _ in range(min(_MOST_PROBES, self.num_slots)):
            at = _HEADER_BYTES + place * _SLOT.size
            found = self._memory[at : at + KEY_BYTES]
            if found == key:
                return at, self._slot_at(at)
            if found == bytes(KEY_BYTES):
                return at, None
            place = (place + 1) % self.num_slots
        return None, None

    def slots(self) -> Iterator[Any]:
        """Yield all slots that are in use; None for one that is damaged."""
        empty = bytes(_SLOT.size)
        for at in range(_HEADER_BYTES, table_bytes(self.num_slots), _SLOT.size):
            if self._memory[at : at + _SLOT.size] != empty:
                yield self._slot_at(at)

    def _slot_at(self, at: int) -> Any:
        data = self._memory[at : at + _SLOT.size]
        slot = _SLOT.unpack(data)
        return slot if slot[-1] == zlib.crc32(data[:-4]) and any(slot[0]) else None

    def write(self, at: int, *values: Any) -> None:
        packed = _SLOT.pack(*values, 0)[:-4]
        self._memory[at : at + _SLOT.size] = packed + zlib.crc32(packed).to_bytes(4, "little")

    def end(self) -> int | None:
        """Return the end of the data, or None if it is damaged. Call it under the lock."""
        end, meant = self.counters[_END], self.counters[_NOT_END] ^ _ALL_BITS
        if end == meant:
            return end
        # A process died between the two steps of `move_end`. If it is anything else, bytes of an
        # entry could be overwritten.
        if not end < meant <= end + 2 * SEGMENT_BYTES:
            return None
        self.counters[_END] = meant
        return meant

    def move_end(self, end: int) -> None:
        self.counters[_NOT_END] = end ^ _ALL_BITS
        self.counters[_END] = end


class Space:
    """Bytes by key. Threads may share it; a process that is forked opens its files again."""

    def __init__(self, name: str, files: Files) -> None:
        self.name = name
        self._files = files
        self.open()

    def open(self) -> None:
        """Open the files, once in each process."""
        self._process_id = os.getpid()
        self._thread_lock = threading.Lock()
        self._segments: dict[int, tuple[int, mmap.mmap]] = {}
        self._damaged: set[bytes] = set()
        """Keys whose bytes are damaged, and may be replaced."""
        self.error: OSError | None = None
        """Why nothing more can be written."""
        self._table_file = self._files.open_table()
        weakref.finalize(self, os.close, self._table_file).atexit = False
        self._table = _Table(self._table_file)
        self._counters = self._table.counters

    def __reduce__(self) -> Any:
        return Space, (self.name, self._files)

    @property
    def num_entries(self) -> int:
        return self._counters[_NUM_ENTRIES]

    @property
    def end(self) -> int:
        """How much memory, or room in the directory, it takes."""
        return self._counters[_END]

    @property
    def is_refused(self) -> bool:
        """Whether its entries must not be used: they turned out to be different each time."""
        return bool(self._counters[_IS_REFUSED])

    def refuse(self) -> None:
        self._counters[_IS_REFUSED] = 1

    @property
    def choice(self) -> int:
        """What the first process has chosen that was asked to; 0: nothing yet."""
        return self._counters[_CHOICE]

    def choose(self, choice: int) -> int:
        """Return what was chosen before, or let it be this."""
        with self._lock():
            if self._counters[_CHOICE] == 0:
                self._counters[_CHOICE] = choice
            return self._counters[_CHOICE]

    # -- reading --------------------------------------------------------------------------------

    def get(self, key: bytes) -> Entry | None:
        """Return the bytes of a key. None: there are none, or they are damaged."""
        _, slot = self._table.find(key)
        if slot is None or self.is_refused:
            return None
        _, offset, size, kind, checksum, _ = slot
        memory = self._view(offset, size)
        if memory is not None and (
            not self._files.is_checked or zlib.crc32(memory.data) == checksum
        ):
            return Entry(kind, memory)
        self._damaged.add(key)
        return None

    def keys(self) -> Iterator[bytes | None]:
        """Yield the keys of all entries; None where it is damaged."""
        return (None if slot is None else slot[0] for slot in self._table.slots())

    def _view(self, offset: int, size: int) -> Bytes | None:
        number, start = divmod(offset, SEGMENT_BYTES)
        try:
            if (segment := self._segments.get(number)) is None:
                segment = self._map(number)
            descriptor, memory = segment
            # Who reads behind the end of a file that was truncated is killed.
            if self._files.is_checked and os.fstat(descriptor).st_size < start + size:
                return None
        except (OSError, ValueError):
            return None
        if start + size > len(memory):
            return None
        return np.frombuffer(memory, np.uint8, size, start)

    def _map(self, number: int) -> tuple[int, mmap.mmap]:
        descriptor, base = self._files.open_segment(number, creates=False)
        try:
            size = min(SEGMENT_BYTES, os.fstat(descriptor).st_size - base)
            memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=base)
        except BaseException:
            os.close(descriptor)
            raise
        # Two threads may do this at the same time. Both mappings are valid.
        weakref.finalize(self, os.close, descriptor).atexit = False
        return self._segments.setdefault(number, (descriptor, memory))

    # -- writing --------------------------------------------------------------------------------

    def put(self, key: bytes, kind: int, parts: Sequence[Any], usage: Usage) -> None:
        """Add the bytes of some buffers, if they are not there yet and have room."""
        if os.getpid() != self._process_id:  # A forked process would share the lock.
            self.open()
        size = sum(memoryview(part).nbytes for part in parts)
        if self.error is not None or size > SEGMENT_BYTES:
            return
        offset = self._reserve(key, size, usage)
        if offset is None:
            return
        checksum = 0
        if self._files.is_checked:
            for part in parts:
                checksum = zlib.crc32(part, checksum)
        number, start = divmod(offset, SEGMENT_BYTES)
        try:
            descriptor, base = self._files.open_segment(number, creates=True)
            _write_all(descriptor, parts, base + start)
        except OSError as error:  # The disk is full, for example.
            self.error = error
            return
        with self._lock():
            at, slot = self._table.find(key)
            if at is not None and (slot is None or key in self._damaged):
                self._table.write(at, key, offset, size, kind, checksum)
                self._counters[_NUM_ENTRIES] += slot is None
        self._damaged.discard(key)

    def _reserve(self, key: bytes, size: int, usage: Usage) -> int | None:
        """Move the end of the data; return where the bytes go.

        None: another process was quicker, or there is no room.
        """
        with self._lock():
            at, slot = self._table.find(key)
            has_slot = at is not None and self.num_entries < _MOST_FULL * self._table.num_slots
            if not has_slot or (slot is not None and key not in self._damaged):
                return None
            end = self._table.end()
            if end is None:
                return None
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if start % SEGMENT_BYTES + size > SEGMENT_BYTES:
                start = -(-start // SEGMENT_BYTES) * SEGMENT_BYTES
            if not usage.take(start + size - end):
                return None
            self._table.move_end(start + size)
            return start

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with self._thread_lock, file_lock(self._table_file):
            yield


def is_removed(space: Space) -> bool:
    """Return whether the files of a space were removed, or replaced, since it was opened."""
    if isinstance(space._files, MemoryFiles):
        return False
    try:
        table = os.stat(space._files.folder / TABLE)  # noqa: PTH116 (beside fstat)
    except OSError:
        return True
    return not os.path.samestat(table, os.fstat(space._table_file))


def _write_all(descriptor: int, parts: Sequence[Any], at: int) -> None:
    """Write buffers one after the other, and close the file."""
    try:
        left = [memoryview(part).cast("B") for part in parts]
        while left:
            written = os.pwritev(descriptor, left[:64], at)
            at += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock(descriptor: int) -> Iterator[None]:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
