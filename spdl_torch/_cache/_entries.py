"""What is in the cache of one dataset: raw forms, values and errors, and which of them it keeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._codec import decoded, encoded, joined
from ._parts import Parts
from ._space import Entry, Space
from ._store import Store

RAW, VALUE, BAD = 1, 2, 3
"""Kinds of entries: the raw form, what the first part of preprocessing returned, and its error."""

_NUM_MEASURED: Final = 4
"""How many samples are measured before the level is chosen."""
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


@dataclass(frozen=True, slots=True)
class _Measured:
    """A sample of which both forms were made, to see which one is worth its memory."""

    key: bytes
    raw: bytes
    value: bytes
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
        self.begin()

    def begin(self) -> None:
        """Begin in a process, which may have this from its parent."""
        self._lock = threading.Lock()
        self.counter = HitCounter()
        self._measured: list[_Measured] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_lock": None}

    # -- which level is kept ----------------------------------------------------------------------

    @property
    def level(self) -> str | None:
        """What is kept. None: it is not decided yet, or nothing can be."""
        if self._chosen is None and self.value is not None:
            self._chosen = self.value.choice or None
        if self._chosen == VALUE:
            return self._options.value_level if self.keeps_values else None
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
            if self._chosen is not None:  # Another thread was quicker.
                self._choose(self._chosen)
                return
            if len(all_measured) < min(_NUM_MEASURED, max(1, self._options.num_samples // 8)):
                return
            room = self._store.max_bytes / max(1, self._options.num_samples)
            load_seconds = min(each.load_seconds for each in all_measured)
            make_seconds = min(each.make_seconds for each in all_measured)
            raw_share = _share([len(each.raw) for each in all_measured], room)
            value_share = _share([len(each.value) for each in all_measured], room)
            saves_more = (load_seconds + make_seconds) * value_share > load_seconds * raw_share
            self._choose(VALUE if saves_more else RAW)

    def _choose(self, kind: int) -> None:
        """Choose what is kept, unless another process has, and keep what was measured."""
        assert self.raw is not None
        assert self.value is not None
        self._chosen = self.value.choose(kind)
        for each in self._measured:
            if self._chosen == RAW:
                self._put(self.raw, each.key, RAW, [each.raw])
            else:
                self._put(self.value, each.key, VALUE, [each.value])
        self._measured = []

    # -- entries ----------------------------------------------------------------------------------

    def find(self, index: Any, key: bytes | None, parts: Parts) -> Kept | None:
        """Return what was kept of a sample, and count a hit or a miss."""
        kept, entry = None, self._entry(key)
        if entry is not None:
            # It may be a view, if all that is to be done with it is to read it. What was read from
            # a directory is a copy already.
            may_view = parts.only_reads and (self._options.may_view or not parts.hands_out)
            copies = not self._is_shared and (entry.kind != VALUE or not may_view)
            # Another version of a library may have written it, or anyone who can write there.
            with contextlib.suppress(Exception):
                value = decoded(entry.memory, is_shared=self._is_shared, copies=copies)
                kept = Kept(index, entry.kind, value)
        self.counter.add(kept is not None, kept is None)
        return kept

    def _entry(self, key: bytes | None) -> Entry | None:
        entry, level = None, self.level
        if key is not None:
            if self.value is not None and level != "raw":
                entry = self.value.get(key)
            if entry is None and self.raw is not None and level in ("raw", None):
                entry = self.raw.get(key)
        return entry

    def keep_raw(self, key: bytes | None, parts: Parts, raw: Any) -> None:
        # Beside values, if this sample has none.
        space = self.value if self.raw is None or self.level not in ("raw", None) else self.raw
        if key is not None and space is not None and self._has_room(key, space):
            self._put(space, key, RAW, encoded(parts.pack(raw), is_shared=self._is_shared))

    def keep_value(self, fresh: Fresh, parts: Parts, value: Any, seconds: float) -> None:
        key = fresh.key
        if key is None or self.value is None or not self._has_room(key, self.value):
            return
        buffers = encoded(value, is_shared=self._is_shared)
        if self._chosen is not None:
            self._put(self.value, key, VALUE, buffers)
            return
        raw = encoded(parts.pack(fresh.raw), is_shared=self._is_shared)
        if raw is not None and buffers is not None:
            # Copies, because what is viewed may change: the sample is still to be finished.
            self._measure(_Measured(key, joined(raw), joined(buffers), fresh.seconds, seconds))

    def keep_error(self, key: bytes | None, error: Exception) -> None:
        """Remember that a sample is bad, if bad samples are replaced."""
        if self._options.remembers_bad and key is not None and self.value is not None:
            with contextlib.suppress(Exception):  # Its class may take other arguments.
                plain = type(error)(*error.args)  # Without its traceback and notes.
                self._put(self.value, key, BAD, encoded(plain, is_shared=self._is_shared))

    def refuse_values(self) -> None:
        """Keep no values any more, and forget all: they are different each time."""
        assert self.value is not None
        self.value.refuse()
        self.prefer_raw()
        if self.raw is not None:
            self._chosen = RAW

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
        expected = max(1.0, num_samples * space.end / num_entries)
        share = (self._store.max_bytes - others) / expected
        return int.from_bytes(key[8:], "little") < share * (1 << 64)

    def _put(self, space: Space, key: bytes, kind: int, buffers: Sequence[Any] | None) -> None:
        if buffers is not None:
            space.put(key, kind, buffers, self._store.usage)


def _share(sizes: Sequence[int], room: float) -> float:
    """Return which share of the samples has room, if they are so large."""
    return min(1.0, room * len(sizes) / sum(sizes))
