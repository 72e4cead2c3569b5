"""Bytes by key, in memory or in a directory, for all processes that share them.

A `Space` is a table and segments of data. The table is an open hash table; a slot says where the
bytes of a key are. Entries are added, never changed and never removed. What makes this right,
whichever process is killed at whichever moment:

- The state that changes is the end of the data, some counters, and the slots. It changes under the
  lock of the table, which the kernel releases when its owner dies. User code never runs under it.
- A writer first moves the end of the data, so that its bytes belong to no other writer; then it
  writes them, without the lock; then it fills the slot. A writer that dies on the way leaves a gap
  in the data, or a slot whose checksum is wrong.
- A reader takes no lock. It believes a slot only if the slot's checksum is right, and in a
  directory the bytes only if their checksum is right too. All else is a miss. So a damaged or
  truncated file is one, and a reader that sees half a slot.
- What is read from a directory is a copy: what was checked is what is used, whatever happens to the
  file. In memory it is a view of bytes that are not written again. Views are private mappings: who
  writes to them changes no entry.
- The files of a directory are opened in the folder that was opened first, not by its name. Where a
  folder is removed, and made again, who has the old one can neither read nor write the new one.
- Only the table is mapped, and only for reading: to write to a mapping on a full disk would kill
  the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
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
"""No entry is larger, and none lies in two segments. In a directory each is a file."""
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
    """In memory a view of the cache: writing to it changes what this process reads of it."""


# -- files and their locks ------------------------------------------------------------------------


class OpenFile:
    """A descriptor, which is closed with the last reference to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def in_memory(cls, num_bytes: int) -> OpenFile:
        file = cls(os.memfd_create("spdl_torch", os.MFD_CLOEXEC))
        os.truncate(file.descriptor, num_bytes)  # None is used before it is written to.
        return file

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def is_at(self, path: Path) -> bool:
        """Return whether the file of a path is this one."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self.descriptor))
        except OSError:
            return False

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other threads and processes from locking the file.

        A lock belongs to an open file, which a forked process shares. So the file is opened for
        each lock: a process that is forked meanwhile neither has the lock nor waits for it.
        """
        descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # To close it is not enough: a process that was forked meanwhile has it open too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            raise TypeError("the files of a cache can only be pickled for a child process")
        return _unpickled_file, (DupFd(self.descriptor),)


def _unpickled_file(file: Any) -> OpenFile:
    return OpenFile(file.detach())


# -- where the bytes are --------------------------------------------------------------------------


class MemoryFiles:
    """Anonymous memory: one file for the table and one for all segments."""

    is_checked = False

    def __init__(self, num_slots: int, max_bytes: int) -> None:
        self.table = OpenFile.in_memory(table_bytes(num_slots))
        write_header(self.table.descriptor, num_slots)
        self._data = OpenFile.in_memory((max_bytes // SEGMENT_BYTES + 2) * SEGMENT_BYTES)
        self._segments: dict[tuple[int, int], mmap.mmap] = {}
        """By process: what was written to a view, a process that is forked would read."""

    def read(self, offset: int, size: int) -> Bytes:
        number, start = divmod(offset, SEGMENT_BYTES)
        place = os.getpid(), number
        segment = self._segments.get(place)
        if segment is None:
            descriptor, base = self._data.descriptor, number * SEGMENT_BYTES
            segment = mmap.mmap(descriptor, SEGMENT_BYTES, access=mmap.ACCESS_COPY, offset=base)
            # Two threads may do this at the same time. Both mappings are valid.
            segment = self._segments.setdefault(place, segment)
        return np.frombuffer(segment, np.uint8, size, start)

    def write(self, offset: int, parts: Sequence[Any]) -> None:
        _write_all(self._data.descriptor, parts, offset)

    def forget(self, offset: int) -> None:
        """Do nothing: memory is not damaged."""

    def is_at(self, folder: Path) -> bool:  # noqa: ARG002
        return False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_segments": {}}


class DirectoryFiles:
    """A folder with a file for the table and one for each segment."""

    is_checked = True

    def __init__(self, folder: Path) -> None:
        self._folder = OpenFile(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self.table = OpenFile(self._open(TABLE, os.O_RDWR))
        self._segments: dict[int, OpenFile] = {}

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC, 0o666, dir_fd=self._folder.descriptor)

    def read(self, offset: int, size: int) -> Bytes:
        number, start = divmod(offset, SEGMENT_BYTES)
        memory = np.empty(size, np.uint8)
        file = self._segments.get(number)
        if file is None:
            try:
                file = OpenFile(self._open(_name_of_segment(number), os.O_RDONLY))
            except FileNotFoundError:
                return memory[:0]
            file = self._segments.setdefault(number, file)
        return memory[: os.preadv(file.descriptor, [memory.data], start)]

    def write(self, offset: int, parts: Sequence[Any]) -> None:
        number, start = divmod(offset, SEGMENT_BYTES)
        file = OpenFile(self._open(_name_of_segment(number), os.O_RDWR | os.O_CREAT))
        _write_all(file.descriptor, parts, start)

    def forget(self, offset: int) -> None:
        """Open the file again before it is read: it may have been replaced by another one."""
        self._segments.pop(offset // SEGMENT_BYTES, None)

    def is_at(self, folder: Path) -> bool:
        """Return whether these are the files that are in a folder now."""
        return self.table.is_at(folder / TABLE)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_segments": {}}


Files = MemoryFiles | DirectoryFiles


def _name_of_segment(number: int) -> str:
    return f"data-{number:05}"


def _write_all(descriptor: int, parts: Sequence[Any], at: int) -> None:
    """Write buffers one after the other."""
    left = [memoryview(part).cast("B") for part in parts]
    while left:
        written = os.pwritev(descriptor, left[:64], at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def table_bytes(num_slots: int) -> int:
    return _HEADER_BYTES + num_slots * _SLOT.size


def _checksum_of_header(num_slots: int) -> int:
    return zlib.crc32(_MAGIC + num_slots.to_bytes(4, "little"))


def write_header(descriptor: int, num_slots: int) -> None:
    head = _HEADER.pack(_MAGIC, num_slots, _checksum_of_header(num_slots))
    os.pwrite(descriptor, head + struct.pack("<QQ", 0, _ALL_BITS), 0)


# -- the budget -----------------------------------------------------------------------------------


class Usage:
    """How many bytes the spaces of a cache use together: a number in a file that is shared.

    It changes, and so do the ends of the spaces, under its lock. Who also needs the lock of a space
    takes that first.
    """

    def __init__(self, max_bytes: int, path: Path | None) -> None:
        self.max_bytes = max_bytes
        if path is None:
            self._file = OpenFile.in_memory(8)
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = OpenFile(os.open(path, flags, 0o666))

    def lock(self) -> contextlib.AbstractContextManager[None]:
        return self._file.lock()

    def is_at(self, path: Path | None) -> bool:
        return path is None or self._file.is_at(path)

    @property
    def num_bytes(self) -> int:
        return int.from_bytes(os.pread(self._file.descriptor, 8, 0), "little")

    def _set(self, num_bytes: int) -> None:
        os.pwrite(self._file.descriptor, num_bytes.to_bytes(8, "little"), 0)

    def take(self, num_bytes: int) -> bool:
        """Return whether there is room for so many bytes more, and use it. Call it locked."""
        taken = self.num_bytes + num_bytes
        if taken > self.max_bytes:
            return False
        self._set(taken)
        return True

    def count(self, spaces: Iterable[Space]) -> None:
        """Count what all spaces use. Call it locked."""
        self._set(min(sum(space.end for space in spaces), _ALL_BITS))


# -- a space --------------------------------------------------------------------------------------


class DamagedTable(OSError):  # noqa: N818 (the space is replaced)
    """The table of a space cannot be used."""


class _Table:
    """The slots and counters of a space, in a file that all processes map."""

    def __init__(self, file: OpenFile, *, may_shrink: bool) -> None:
        self._file = file
        self._may_shrink = may_shrink
        head = os.pread(file.descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
        magic, num_slots, checksum = _HEADER.unpack(head)
        self.num_slots: int = num_slots
        self._num_bytes = table_bytes(num_slots)
        is_valid = magic == _MAGIC and checksum == _checksum_of_header(num_slots)
        if not is_valid or file.num_bytes < self._num_bytes:
            raise DamagedTable("its table is damaged")
        self._memory = mmap.mmap(file.descriptor, self._num_bytes, access=mmap.ACCESS_READ)
        self._counters = memoryview(self._memory)[:_HEADER_BYTES].cast("Q")

    def is_whole(self) -> bool:
        """Return whether the mapping may be read: behind the end of a file that kills a process."""
        return not self._may_shrink or self._file.num_bytes >= self._num_bytes

    def counter(self, place: int) -> int:
        return self._counters[place] if self.is_whole() else 0

    def set_counters(self, place: int, *values: int) -> None:
        os.pwrite(self._file.descriptor, struct.pack(f"<{len(values)}Q", *values), 8 * place)

    def find(self, key: bytes) -> tuple[int | None, Any]:
        """Return where the slot of a key is, or could be, and what is in it if that is valid."""
        if not self.is_whole():
            return None, None
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
        end = table_bytes(self.num_slots) if self.is_whole() else 0
        for at in range(_HEADER_BYTES, end, _SLOT.size):
            if self._memory[at : at + _SLOT.size] != empty:
                yield self._slot_at(at)

    def _slot_at(self, at: int) -> Any:
        data = self._memory[at : at + _SLOT.size]
        slot = _SLOT.unpack(data)
        return slot if slot[-1] == zlib.crc32(data[:-4]) and any(slot[0]) else None

    def write(self, at: int, *values: Any) -> None:
        packed = _SLOT.pack(*values, 0)[:-4]
        os.pwrite(self._file.descriptor, packed + zlib.crc32(packed).to_bytes(4, "little"), at)

    def end(self) -> int | None:
        """Return the end of the data, or None if it is damaged. Call it under a lock.

        With another end, bytes of an entry could be overwritten.
        """
        end, opposite = self.counter(_END), self.counter(_NOT_END)
        return end if end == opposite ^ _ALL_BITS else None

    def move_end(self, end: int) -> None:
        self.set_counters(_END, end, end ^ _ALL_BITS)


class Space:
    """Bytes by key. Threads and forked processes may share it."""

    def __init__(self, name: str, files: Files) -> None:
        self.name = name
        self._files = files
        self._damaged: set[bytes] = set()
        """Keys whose bytes are damaged, and may be replaced."""
        self.error: OSError | None = None
        """Why nothing more can be written."""
        self._table = _Table(files.table, may_shrink=files.is_checked)

    def __reduce__(self) -> Any:
        return Space, (self.name, self._files)

    def is_usable_at(self, folder: Path) -> bool:
        """Return whether these are the files in a folder now, and entries can be added.

        Call it with the lock of the usage, under which the end moves.
        """
        return self._files.is_at(folder) and self._table.end() is not None

    @property
    def num_entries(self) -> int:
        return self._table.counter(_NUM_ENTRIES)

    @property
    def end(self) -> int:
        """How much memory, or room in the directory, it takes."""
        return self._table.counter(_END)

    @property
    def is_refused(self) -> bool:
        """Whether its entries must not be used: they turned out to be different each time."""
        return bool(self._table.counter(_IS_REFUSED))

    def refuse(self) -> None:
        self._table.set_counters(_IS_REFUSED, 1)

    @property
    def choice(self) -> int:
        """What the first process has chosen that was asked to; 0: nothing yet."""
        return self._table.counter(_CHOICE)

    def choose(self, choice: int) -> int:
        """Return what was chosen before, or let it be this."""
        with contextlib.suppress(OSError), self._files.table.lock():
            if self.choice == 0:
                self._table.set_counters(_CHOICE, choice)
        return self.choice or choice

    # -- reading --------------------------------------------------------------------------------

    def get(self, key: bytes) -> Entry | None:
        """Return the bytes of a key. None: there are none, or they are damaged."""
        _, slot = self._table.find(key)
        if slot is None or self.is_refused:
            return None
        _, offset, size, kind, checksum, _ = slot
        try:
            memory = self._files.read(offset, size)
        except OSError:  # There are too many open files, for example.
            return None
        if not self._files.is_checked or (
            len(memory) == size and self._checksum(key, [memory.data]) == checksum
        ):
            return Entry(kind, memory)
        self._damaged.add(key)
        self._files.forget(offset)
        return None

    def keys(self) -> Iterator[bytes | None]:
        """Yield the keys of all entries; None where it is damaged."""
        return (None if slot is None else slot[0] for slot in self._table.slots())

    def _checksum(self, key: bytes, parts: Sequence[Any]) -> int:
        """Return the checksum of some bytes in a directory, which are of this key and space."""
        checksum = 0
        for part in (self.name.encode(), key, *parts):
            checksum = zlib.crc32(part, checksum)
        return checksum

    # -- writing --------------------------------------------------------------------------------

    def put(self, key: bytes, kind: int, parts: Sequence[Any], usage: Usage) -> None:
        """Add the bytes of some buffers, if they are not there yet and have room."""
        size = sum(memoryview(part).nbytes for part in parts)
        if self.error is not None or size > SEGMENT_BYTES:
            return
        try:
            offset = self._reserve(key, size, usage)
            if offset is None:
                return
            checksum = self._checksum(key, parts) if self._files.is_checked else 0
            self._files.write(offset, parts)
            with self._files.table.lock():
                at, slot = self._table.find(key)
                if at is not None and (slot is None or key in self._damaged):
                    self._table.write(at, key, offset, size, kind, checksum)
                    if slot is None:
                        self._table.set_counters(_NUM_ENTRIES, self.num_entries + 1)
        except OSError as error:  # The disk is full, for example, or the folder was removed.
            self.error = error
        self._damaged.discard(key)

    def _reserve(self, key: bytes, size: int, usage: Usage) -> int | None:
        """Move the end of the data; return where the bytes go.

        None: another process was quicker, or there is no room.
        """
        with self._files.table.lock():
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
            with usage.lock():  # If it counted in between, it would miss these bytes.
                if not usage.take(start + size - end):
                    return None
                self._table.move_end(start + size)
            return start
