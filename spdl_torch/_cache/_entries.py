"""What is in the cache of one dataset: raw forms, values and errors, and which of them it keeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from ._codec import decoded, encoded, joined
from ._parts import Parts
from ._space import Entry, Space
from ._store import Store

RAW, VALUE, BAD = 1, 2, 3
"""Kinds of entries: the raw form, what the first part of preprocessing returned, and its error."""

Packed: TypeAlias = Sequence[Any] | None
"""The buffers of a raw form."""

_NUM_MEASURED: Final = 4
"""How many samples are measured before the level is chosen."""
_MIN_ENTRIES: Final = 32
"""How many entries tell how large the others will be."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """A sample that was not found, on its way from load to preprocess."""

    index: Any
    key: bytes | None
    raw: Any
    seconds: float
    """How long it took to load."""
    has_drawn: bool


@dataclass(frozen=True, slots=True)
class _Measured:
    """A sample of which both forms were made, to see which one is worth its memory."""

    raw_bytes: int
    value_bytes: int
    load_seconds: float
    make_seconds: float


@dataclass(frozen=True, kw_only=True)
class EntryOptions:
    """What `Entries` is told of a loader."""

    value_level: str | None
    """What values are: "decoded" or "sample"; None: there are none."""
    num_samples: int
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
    """The entries of one dataset, for all workers of a process.

    With a space for raw forms and one for values, the first samples decide which one is used.
    """

    def __init__(
        self, store: Store, raw: Space | None, value: Space | None, options: EntryOptions
    ) -> None:
        self.raw = raw
        self.value = value
        self._store = store
        self._options = options
        self._is_shared = options.is_shared
        self._chosen: int | None = None if raw and value else VALUE if value else RAW
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self.counter = HitCounter()
        self._measured: list[_Measured] = []

    def go_on_with(self, other: Entries) -> None:
        """Use the spaces of others, with the workers that use this object."""
        self.raw, self.value = other.raw, other.value
        self._store, self._options = other._store, other._options
        self._is_shared, self._chosen = other._is_shared, other._chosen
        self._measured = []

    def in_child(self) -> None:
        """Begin in a child process, which has this from its parent."""
        self._begin()
        self._store.reopen_after_fork()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_lock": None}

    # -- which level is kept ----------------------------------------------------------------------

    @property
    def level(self) -> str | None:
        """What is kept. None: it is not decided yet, or nothing can be."""
        if self.value is not None and not self.keeps_values:
            return None if self.raw is None else "raw"
        if self._chosen is None and self.value is not None:
            self._chosen = self.value.choice or None
        if self._chosen == VALUE:
            return self._options.value_level
        return None if self._chosen is None else "raw"

    @property
    def keeps_values(self) -> bool:
        return self.value is not None and not self.value.is_refused

    def _measure(self, measured: _Measured) -> None:
        """Choose the level by the time that it saves, when enough samples were measured."""
        assert self.raw is not None
        assert self.value is not None
        with self._lock:
            self._measured.append(measured)
            all_measured = self._measured
            if len(all_measured) < min(_NUM_MEASURED, max(1, self._options.num_samples // 8)):
                return
            load_seconds = min(each.load_seconds for each in all_measured)
            make_seconds = min(each.make_seconds for each in all_measured)
            raw_share = self._share([each.raw_bytes for each in all_measured])
            value_share = self._share([each.value_bytes for each in all_measured])
            saves_more = (load_seconds + make_seconds) * value_share > load_seconds * raw_share
            self._choose(VALUE if saves_more else RAW)

    def _choose(self, kind: int) -> None:
        """Choose what is kept, unless another thread or process has."""
        assert self.value is not None
        if self._chosen is None:
            self._chosen = self.value.choose(kind)

    def _share(self, sizes: Sequence[int]) -> float:
        """Return which share of the samples has room, if they are as large as these."""
        expected = self._options.num_samples * sum(sizes) / len(sizes)
        return min(1.0, self._store.max_bytes / max(1.0, expected))

    # -- entries ----------------------------------------------------------------------------------

    def find(self, key: bytes | None) -> Entry | None:
        """Return an entry, and count it."""
        entry, level = None, self.level
        if key is not None:
            if self.value is not None and level != "raw":
                entry = self.value.get(key)
            if entry is None and self.raw is not None and level in ("raw", None):
                entry = self.raw.get(key)
        if entry is None:
            return None
        if entry.kind == BAD:
            # Who wants the error itself gets it from the dataset, with its traceback.
            return entry if self._options.remembers_bad else None
        self.counter.add(1, 0)
        return entry

    def value_of(self, entry: Entry, parts: Parts) -> Any:
        """Return what was kept. A view of it, if all that is to be done with it is to read it."""
        may_view = parts.only_reads and (self._options.may_view or not parts.hands_out)
        copies = entry.kind != VALUE or not may_view
        return decoded(entry.memory, is_shared=self._is_shared, copies=copies)

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
        space = self.value if self.raw is None or self.level not in ("raw", None) else self.raw
        if key is not None and space is not None and self._has_room(key, space):
            self._put(space, key, RAW, packed)

    def keep_value(self, fresh: Fresh, packed: Packed, value: Any, seconds: float) -> None:
        key = fresh.key
        if key is None or self.value is None or not self._has_room(key, self.value):
            return
        buffers = encoded(value, is_shared=self._is_shared)
        if buffers is None:
            self.prefer_raw()
            self.keep_raw(key, packed)
            return
        if self._chosen is None:
            if packed is None:
                with self._lock:
                    self._choose(VALUE)
            else:  # Keep both, until it is decided.
                if self.raw is not None:
                    self._put(self.raw, key, RAW, packed)
                measured = _Measured(_size(packed), _size(buffers), fresh.seconds, seconds)
                self._measure(measured)
        if self.level == "raw":
            self.keep_raw(key, packed)
        else:
            self._put(self.value, key, VALUE, buffers)

    def keep_error(self, key: bytes | None, error: Exception) -> None:
        """Remember that a sample is bad, if bad samples are replaced."""
        if not self._options.remembers_bad or key is None or self.value is None:
            return
        with contextlib.suppress(Exception):  # Its class may take other arguments.
            plain = type(error)(*error.args)  # Without its traceback and notes.
            # What would not be reported the same is made again. So are errors of the system: a
            # file that is missing, or memory, may be there the next time.
            is_of_sample = (
                not isinstance(error, MemoryError) and getattr(error, "errno", None) is None
            )
            if is_of_sample and _said(plain) == _said(error):
                self._put(self.value, key, BAD, encoded(plain, is_shared=self._is_shared))

    def refuse_values(self) -> None:
        """Keep no values any more, and forget all: they are different each time."""
        assert self.value is not None
        self.value.refuse()

    def prefer_raw(self) -> None:
        """Choose raw forms, if that is still to be decided: a value was drawn."""
        with self._lock:
            if self._chosen is None and self.raw is not None:
                self._choose(RAW)

    def _has_room(self, key: bytes, space: Space) -> bool:
        """Return whether a sample is one of those that are kept.

        Which ones is decided by their keys, so that hits are spread evenly over an epoch.
        """
        if space.error is not None or space.is_refused:
            return False
        num_samples, num_entries = self._options.num_samples, space.num_entries
        if num_samples == 0 or num_entries < _MIN_ENTRIES:
            return True
        others = self._store.usage.num_bytes - space.end
        expected = num_samples * space.end / num_entries
        share = (self._store.max_bytes - others) / expected
        return int.from_bytes(key[8:], "little") < share * (1 << 64)

    def _put(self, space: Space, key: bytes, kind: int, buffers: Sequence[Any] | None) -> None:
        if buffers is not None:
            space.put(key, kind, buffers, self._store.usage)


def _size(buffers: Sequence[Any]) -> int:
    return sum(memoryview(part).nbytes for part in buffers)


def _said(error: Exception) -> Any:
    """Return what is reported of an error."""
    return str(error), {name: value for name, value in vars(error).items() if name != "__notes__"}
