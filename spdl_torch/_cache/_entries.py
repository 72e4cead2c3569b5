"""What is in the cache of one dataset: raw forms, values and errors, and which of them it keeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from ._codec import decoded, encoded, joined
from ._levels import BAD, RAW, VALUE, Levels, Measured
from ._parts import Parts
from ._space import Entry, Space
from ._store import Store

Packed: TypeAlias = Sequence[Any] | None
"""The buffers of a raw form."""

_MIN_ENTRIES: Final = 32
"""How many entries tell how large the others will be."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A sample that was found, on its way from load to preprocess."""

    index: Any
    kind: int
    value: Any


@dataclass(frozen=True, slots=True)
class Fresh:
    """A sample that was not found, on its way from load to preprocess."""

    index: Any
    key: bytes | None
    raw: Any
    seconds: float
    """How long it took to load."""
    has_drawn: bool


@dataclass(frozen=True, kw_only=True)
class EntryOptions:
    """What `Entries` is told of a loader."""

    is_shared: bool
    """The entries are in a directory."""
    may_view: bool
    """Batches are made by a function that copies its samples."""
    remembers_bad: bool


class HitCounter:
    """How often a sample was found, and how often not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = 0, 0

    def add(self, num_hits: int, num_misses: int) -> None:
        with self._lock:
            hits, misses = self._counts
            self._counts = hits + num_hits, misses + num_misses

    @property
    def counts(self) -> tuple[int, int]:
        return self._counts

    def take(self) -> tuple[int, int]:
        """Return the counts, and begin again: what a child counts is added by its parent."""
        with self._lock:
            counts, self._counts = self._counts, (0, 0)
        return counts

    def __reduce__(self) -> Any:
        return HitCounter, ()


class Entries:
    """The entries of one dataset, for all workers of a process."""

    def __init__(self, store: Store, levels: Levels, options: EntryOptions) -> None:
        self.levels = levels
        self._store = store
        self._options = options
        self._is_shared = options.is_shared
        self.begin()

    def begin(self) -> None:
        """Begin in a process, which may have this from its parent."""
        self.counter = HitCounter()
        self.levels.begin()

    def go_on_with(self, other: Entries) -> None:
        """Use the spaces of others, with the workers that use this object."""
        self.levels, self._store, self._options = other.levels, other._store, other._options
        self._is_shared = other._is_shared

    def find(self, index: Any, key: bytes | None, parts: Parts) -> Kept | None:
        """Return what was kept of a sample, and count it."""
        entry = self._entry(key)
        # Who wants an error itself gets it from the dataset, with its traceback.
        if entry is None or (entry.kind == BAD and not self._options.remembers_bad):
            return None
        # It may be a view, if all that is to be done with it is to read it. What was read from a
        # directory is a copy already.
        may_view = parts.only_reads and (self._options.may_view or not parts.hands_out)
        copies = not self._is_shared and (entry.kind != VALUE or not may_view)
        # Another version of a library may have written it, or anyone who can write there.
        with contextlib.suppress(Exception):
            value = decoded(entry.memory, is_shared=self._is_shared, copies=copies)
            if entry.kind != BAD:
                self.counter.add(1, 0)
            return Kept(index, entry.kind, value)
        return None

    def _entry(self, key: bytes | None) -> Entry | None:
        raw, value, level = self.levels.raw, self.levels.value, self.levels.level
        entry = None
        if key is not None:
            if value is not None and level != "raw":
                entry = value.get(key)
            if entry is None and raw is not None and level in ("raw", None):
                entry = raw.get(key)
        return entry

    def has_room_for_value(self, key: bytes | None) -> bool:
        value = self.levels.value
        return key is not None and value is not None and self._has_room(key, value)

    def packed(self, parts: Parts, raw: Any) -> Packed:
        """Return the raw form of a sample as it lies in the cache. None: it cannot be there.

        Take it before preprocessing, which may change the raw form in place.
        """
        form = parts.pack(raw)
        buffers = encoded(form, is_shared=self._is_shared)
        return buffers if buffers is None or type(form) is bytes else [joined(buffers)]

    def unpacked(self, parts: Parts, index: Any, packed: Sequence[Any]) -> Any:
        """Return a copy of a raw form."""
        memory = np.frombuffer(joined(packed), np.uint8)
        return parts.unpack(index, decoded(memory, is_shared=self._is_shared, copies=True))

    def keep_raw(self, key: bytes | None, packed: Packed) -> None:
        # Beside values, if this sample has none.
        raw, level = self.levels.raw, self.levels.level
        space = self.levels.value if raw is None or level not in ("raw", None) else raw
        if key is not None and space is not None and self._has_room(key, space):
            self._put(space, key, RAW, packed)

    def keep_value(self, fresh: Fresh, packed: Packed, value: Any, seconds: float) -> None:
        key = fresh.key
        if key is None or self.levels.value is None or not self.has_room_for_value(key):
            return
        buffers = encoded(value, is_shared=self._is_shared)
        if buffers is None:
            self.levels.prefer_raw()
            self.keep_raw(key, packed)
            return
        if not self.levels.is_decided:
            if packed is None:
                self.levels.choose_values()
            else:  # Keep both, until it is decided.
                if self.levels.raw is not None:
                    self._put(self.levels.raw, key, RAW, packed)
                measured = Measured(_size(packed), _size(buffers), fresh.seconds, seconds)
                self.levels.measure(measured)
        if self.levels.level == "raw":
            self.keep_raw(key, packed)
        else:
            self._put(self.levels.value, key, VALUE, buffers)

    def keep_error(self, key: bytes | None, error: Exception) -> None:
        """Remember that a sample is bad, if bad samples are replaced."""
        if not self._options.remembers_bad or key is None or self.levels.value is None:
            return
        with contextlib.suppress(Exception):  # Its class may take other arguments.
            plain = type(error)(*error.args)  # Without its traceback and notes.
            # What would not be reported the same is made again. So are errors of the system: a
            # file that is missing, or memory, may be there the next time.
            is_of_sample = (
                not isinstance(error, MemoryError) and getattr(error, "errno", None) is None
            )
            if is_of_sample and _said(plain) == _said(error):
                self._put(self.levels.value, key, BAD, encoded(plain, is_shared=self._is_shared))

    def _has_room(self, key: bytes, space: Space) -> bool:
        """Return whether a sample is one of those that are kept.

        Which ones is decided by their keys, so that hits are spread evenly over an epoch.
        """
        if space.error is not None or space.is_refused:
            return False
        num_samples, num_entries = self.levels.num_samples, space.num_entries
        if num_samples == 0 or num_entries < _MIN_ENTRIES:
            return True
        used, mean = self._store.usage.num_bytes, space.end / num_entries
        if used + mean > self._store.max_bytes:
            return False
        share = (self._store.max_bytes - used + space.end) / max(1.0, num_samples * mean)
        return int.from_bytes(key[8:], "little") < share * (1 << 64)

    def _put(self, space: Space, key: bytes, kind: int, buffers: Sequence[Any] | None) -> None:
        if buffers is not None:
            space.put(key, kind, buffers, self._store.usage)


def _size(buffers: Sequence[Any]) -> int:
    return sum(memoryview(part).nbytes for part in buffers)


def _said(error: Exception) -> Any:
    """Return what is reported of an error."""
    return str(error), {name: value for name, value in vars(error).items() if name != "__notes__"}
