"""The hooks of a dataset, with the cache before them.

What a worker does with a sample that is not in the cache is what it does without one, and so is
what it draws. In addition it keeps the raw form that `load` returned, or what the first part of
preprocessing returned. Nothing is kept that was drawn: draws are watched, and code that is not
known makes some samples twice, to see that they are equal.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from .._dataset import Hooks, completed
from .._random import DrawWatch
from ._codec import are_equal
from ._entries import Entries, Fresh, Kept, Packed
from ._levels import BAD, VALUE
from ._parts import Parts

_NUM_CHECKED: Final = 8
"""How many samples of code that is not known each worker makes twice at first."""
_CHECKED_EACH: Final = 256
"""And then one of so many."""


def _has_drawn(watch: DrawWatch | None) -> bool:
    return watch is not None and watch.has_drawn()


class CachedPreprocess:
    """The function that takes the place of a dataset's preprocess hook."""

    def __init__(self, entries: Entries, parts: Parts, hooks: Hooks) -> None:
        self._entries = entries
        self._parts = parts
        self._hooks = hooks
        self._num_made = itertools.count()

    def __call__(self, sample: Kept | Fresh) -> Any:
        if isinstance(sample, Kept):
            return self.from_kept(sample)
        entries, parts = self._entries, self._parts
        if entries.levels.value is None or entries.levels.level == "raw":
            entries.keep_raw(sample.key, self._packed(sample))
            return parts.make(sample.index, sample.raw)
        # What is not to be kept is made as without a cache, which may take less time.
        if parts.is_known and not entries.has_room_for_value(sample.key):
            return parts.make(sample.index, sample.raw)
        return self._from_fresh(sample)

    def from_kept(self, sample: Kept) -> Any:
        if sample.kind == BAD:
            raise sample.value
        if sample.kind == VALUE:
            return self._parts.rest(sample.index, sample.value)
        return self._parts.make(sample.index, self._parts.unpack(sample.index, sample.value))

    def _from_fresh(self, sample: Fresh) -> Any:
        entries, parts = self._entries, self._parts
        packed = self._packed(sample)
        watch, started = self.watch(), time.perf_counter()
        try:
            value = parts.first(sample.index, sample.raw)
        except Exception as error:
            if self._hooks.load is not None and not (sample.has_drawn or _has_drawn(watch)):
                entries.keep_error(sample.key, error)
            raise
        seconds = time.perf_counter() - started
        if value is None and parts.is_known:
            entries.keep_raw(sample.key, packed)
            return parts.make(sample.index, sample.raw)
        if sample.has_drawn or _has_drawn(watch):
            entries.levels.prefer_raw()
            entries.keep_raw(sample.key, packed)
        elif parts.is_known or self._is_same(sample, packed, value):
            entries.keep_value(sample, packed, value, seconds)
        return parts.rest(sample.index, value)

    def watch(self) -> DrawWatch | None:
        return None if self._parts.is_known else DrawWatch(self._parts.generators)

    def _is_same(self, sample: Fresh, packed: Packed, value: Any) -> bool:
        """Make some samples twice: code that is not known may draw where no watch sees it."""
        if not self.must_check():
            return True
        entries, parts, raw = self._entries, self._parts, sample.raw
        if self._hooks.load is not None:
            raw = None if packed is None else entries.unpacked(parts, sample.index, packed)
        with contextlib.suppress(Exception):
            # A raw form that cannot be copied may have been used up.
            if raw is not None and are_equal(value, parts.first(sample.index, raw)):
                return True
        entries.levels.refuse_values()
        entries.keep_raw(sample.key, packed)
        return False

    def must_check(self) -> bool:
        """Return whether the next sample of code that is not known is to be made twice."""
        if not self._entries.levels.keeps_values:
            return False
        number = next(self._num_made)
        return number < _NUM_CHECKED or number % _CHECKED_EACH == 0

    def _packed(self, sample: Fresh) -> Packed:
        """Return the raw form of a sample as it is kept, or None if it cannot be."""
        if self._hooks.load is None or sample.has_drawn or sample.key is None:
            return None
        return self._entries.packed(self._parts, sample.raw)


class CachedLookup:
    """Finds samples in the cache. What it finds, or does not, goes to `CachedPreprocess`."""

    def __init__(self, entries: Entries, parts: Parts, hooks: Hooks) -> None:
        self._entries = entries
        self._parts = parts
        self._hooks = hooks
        self.preprocess = CachedPreprocess(entries, parts, hooks)

    def _look(self, index: Any) -> tuple[bytes | None, Kept | None]:
        key = self._parts.key(index)
        return key, self._entries.find(index, key, self._parts)

    def _look_many(self, indices: Any) -> tuple[list[Any], dict[int, tuple[Any, bytes | None]]]:
        found: list[Any] = []
        missing: dict[int, tuple[Any, bytes | None]] = {}
        for place, index in enumerate(indices):
            key, kept = self._look(index)
            found.append(kept)
            if kept is None:
                missing[place] = index, key
        return found, missing

    @staticmethod
    def _only(indices: Any, missing: dict[int, tuple[Any, bytes | None]]) -> Any:
        """Return the indices to load: what the sampler returned, if that is all of them."""
        is_all = len(missing) == len(indices)
        return indices if is_all else [index for index, _ in missing.values()]


class CachedLoad(CachedLookup):
    """The functions that take the place of a dataset's load hook."""

    def load(self, index: Any) -> Any:
        key, kept = self._look(index)
        sample: Kept | Fresh | None = kept
        if sample is None:
            assert self._hooks.load is not None
            watch, started = self.preprocess.watch(), time.perf_counter()
            raw = completed(self._hooks.load, index)
            sample = self._loaded(index, key, raw, time.perf_counter() - started, watch)
        return self._passed_on(sample)

    async def load_async(self, index: Any) -> Any:
        key, kept = self._look(index)
        sample: Kept | Fresh | None = kept
        if sample is None:
            load: Any = self._hooks.load
            watch, started = self.preprocess.watch(), time.perf_counter()
            raw = await load(index)
            sample = self._loaded(index, key, raw, time.perf_counter() - started, watch)
        return self._passed_on(sample)

    def load_many(self, indices: Any) -> Any:
        found, missing = self._look_many(indices)
        if missing:
            load: Any = self._hooks.load
            watch, started = self.preprocess.watch(), time.perf_counter()
            raws = completed(load, self._only(indices, missing))
            self._add(found, missing, raws, time.perf_counter() - started, watch)
        return list(map(self._passed_on, found))

    async def load_many_async(self, indices: Any) -> Any:
        found, missing = self._look_many(indices)
        if missing:
            load: Any = self._hooks.load
            watch, started = self.preprocess.watch(), time.perf_counter()
            raws = await load(self._only(indices, missing))
            self._add(found, missing, raws, time.perf_counter() - started, watch)
        return list(map(self._passed_on, found))

    def _loaded(
        self, index: Any, key: bytes | None, raw: Any, seconds: float, watch: DrawWatch | None
    ) -> Fresh:
        self._entries.counter.add(0, 1)
        return Fresh(index, key, raw, seconds, _has_drawn(watch))

    def _add(
        self,
        found: list[Any],
        missing: dict[int, tuple[Any, bytes | None]],
        raws: Any,
        seconds: float,
        watch: DrawWatch | None,
    ) -> None:
        has_drawn, raws = _has_drawn(watch), list(raws)
        if len(raws) != len(missing):
            raise ValueError(
                f"load_many returned {len(raws)} samples for {len(missing)} indices. "
                "Return one for each index."
            )
        self._entries.counter.add(0, len(missing))
        for (place, (index, key)), raw in zip(missing.items(), raws, strict=True):
            found[place] = Fresh(index, key, raw, seconds / len(raws), has_drawn)

    def _passed_on(self, sample: Kept | Fresh) -> Any:
        """Return what the next stage takes: without one, the sample."""
        return sample if self._hooks.preprocess is not None else self.preprocess(sample)


class CachedSamples(CachedLookup):
    """The functions that take the place of the preprocess hook of a dataset that does not load."""

    def from_index(self, index: Any) -> Any:
        """Make a sample of a dataset without a load stage."""
        key, kept = self._look(index)
        if kept is None:
            self._entries.counter.add(0, 1)
        return self.preprocess(kept or Fresh(index, key, index, 0.0, False))

    def preprocess_many(self, indices: Any) -> Any:
        """Make the samples of a batch, of a dataset that makes a whole batch at once."""
        found, missing = self._look_many(indices)
        if missing:
            self._entries.counter.add(0, len(missing))
            make: Any = self._hooks.preprocess
            wanted, watch = self._only(indices, missing), self.preprocess.watch()
            samples = make(wanted)
            if not isinstance(samples, Sequence) or len(samples) != len(missing):
                if len(missing) == len(found):
                    return samples  # In a form of its own, for a collate function of its own.
                raise ValueError(
                    f"__getitems__ returned {len(samples)} samples for {len(missing)} indices. "
                    "Return a list with one for each index, or use the dataset without a cache."
                )
            fresh = [Fresh(index, key, index, 0.0, False) for index, key in missing.values()]
            if not _has_drawn(watch) and self._are_same(make, wanted, samples):
                for each, value in zip(fresh, samples, strict=True):
                    self._entries.keep_value(each, None, value, 0.0)
            for place, value in zip(missing, samples, strict=True):
                found[place] = value
        return [
            self.preprocess.from_kept(each) if isinstance(each, Kept) else each for each in found
        ]

    def _are_same(self, make: Callable[[Any], Any], indices: Any, samples: Any) -> bool:
        if not self.preprocess.must_check():
            return True
        with contextlib.suppress(Exception):
            if are_equal(list(samples), list(make(indices))):
                return True
        self._entries.levels.refuse_values()
        return False
