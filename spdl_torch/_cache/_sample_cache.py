"""The cache as one loader uses it: its level, its hooks, its figures."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset
from torch.utils.data import default_collate as torch_default_collate

from .._collate import default_collate
from .._dataset import Hooks, hooks_of
from .._settings import LoaderSettings
from .._text import size as size_text
from ._cache import Cache
from ._datasets import attributes_of, parts_of
from ._entries import Entries, EntryOptions, HitCounter
from ._hooks import CachedLoad, CachedSamples
from ._levels import Levels
from ._space import Space
from ._store import Store


@dataclass(frozen=True)
class CacheStats:
    """A cache in the running epoch of a loader, or in its last one.

    >>> stats = CacheStats("sample", 90, 10, 100, 52_000_000, 60_000_000, None)
    >>> print(stats)
    cache: sample, 90 hits, 10 misses, 100 entries, 52.0 MB of 60.0 MB
    """

    __module__ = "spdl_torch"

    level: str | None
    """What is kept: "raw", "decoded" or "sample". None: that is not decided yet."""
    num_hits: int
    """Samples of the epoch that were found."""
    num_misses: int
    """Those that were not. From the second epoch on: the cache is too small, or they draw."""
    num_entries: int
    """Samples that are there."""
    num_bytes: int
    """How much room they take, with those of other loaders."""
    max_bytes: int
    directory: str | None
    """None: it is in memory."""

    @property
    def is_full(self) -> bool:
        """Whether there is hardly room for more. A larger `max_bytes` has more hits."""
        return self.num_bytes > 0.95 * self.max_bytes

    def __str__(self) -> str:
        return (
            f"cache: {self.level or 'nothing yet'}, {self.num_hits:,} hits, "
            f"{self.num_misses:,} misses, {self.num_entries:,} entries, "
            f"{size_text(self.num_bytes)} of {size_text(self.max_bytes)}"
        )


class SampleCache:
    """A cache for the samples of one dataset, with one loader's options.

    The parent makes it when an epoch begins, or persistent workers start. Its children have copies,
    which map the same memory or files, and count by themselves.
    """

    def __init__(self, cache: Cache, settings: LoaderSettings, owner: Any) -> None:
        dataset = settings.dataset
        hooks = hooks_of(dataset, batched=settings.uses_batch_hooks)
        self._options: dict[str, Any] = {
            "batched": settings.uses_batch_hooks,
            "max_side": cache.max_side,
            "token": cache.token,
        }
        parts = parts_of(dataset, hooks, **self._options)
        value_level = None if hooks.preprocess is None else parts.value_level
        has_load = hooks.load is not None
        wanted = _checked(cache.level, value_level, type(dataset).__name__, has_load=has_load)
        self._fingerprint = parts.value_fingerprint
        fingerprint = parts.value_fingerprint or parts.raw_fingerprint
        is_shared = cache.directory is not None and fingerprint is not None
        self._directory = str(cache.directory) if is_shared else None
        self._lacks_token = cache.directory is not None and not is_shared
        self._is_known = parts.is_known
        self._store = store = cache.store(in_directory=is_shared)
        raw = value = None
        if has_load and wanted in (None, "raw"):
            raw = _space(store, "raw", parts.raw_fingerprint, settings, owner)
        if value_level is not None and wanted != "raw":
            value = _space(store, value_level, parts.value_fingerprint, settings, owner)
        self._value_level = value_level
        copies = settings.collate_fn in (torch_default_collate, default_collate)
        levels = Levels(
            raw,
            value,
            value_level=value_level,
            num_samples=_length(dataset),
            max_bytes=store.max_bytes,
        )
        options = EntryOptions(
            is_shared=is_shared,
            may_view=settings.batched and copies,
            remembers_bad=settings.bad_sample_policy.replaces,
        )
        self._entries = Entries(store, levels, options)

    @property
    def counter(self) -> HitCounter:
        return self._entries.counter

    def go_on_with(self, opened: SampleCache) -> SampleCache:
        """Begin a further epoch of persistent workers, which use this object; return it."""
        self.counter.take()
        # What is known of a dataset was found when the workers started. Of others, the attributes
        # may have changed, which threads of this process see.
        if not self._is_known:
            self._entries.go_on_with(opened._entries)
            self._store, self._directory = opened._store, opened._directory
        return self

    def in_child(self) -> None:
        """Begin in a child process, which has this from its parent."""
        self._entries.begin()

    def hooks(self, dataset: Any, hooks: Hooks) -> Hooks:
        """Return the hooks of a dataset, or of a worker's copy of it, that use the cache."""
        parts = parts_of(dataset, hooks, **self._options)
        if parts.is_known and parts.value_fingerprint != self._fingerprint:
            return hooks  # A `worker_init_fn` has changed the dataset.
        if hooks.load is None:
            samples = CachedSamples(self._entries, parts, hooks)
            method: Any = samples.from_index
            if hooks.preprocess_takes_batch:
                method = samples.preprocess_many
            return dataclasses.replace(hooks, preprocess=method)
        cached = CachedLoad(self._entries, parts, hooks)
        if hooks.load_takes_batch:
            load: Any = cached.load_many_async if hooks.load_is_async else cached.load_many
        else:
            load = cached.load_async if hooks.load_is_async else cached.load
        preprocess = None if hooks.preprocess is None else cached.preprocess
        return dataclasses.replace(hooks, load=load, preprocess=preprocess)

    def stats(self) -> CacheStats:
        entries = self._entries
        num_hits, num_misses = entries.counter.counts
        levels, level = entries.levels, entries.levels.level
        space = levels.raw if level == "raw" or levels.value is None else levels.value
        return CacheStats(
            level,
            num_hits,
            num_misses,
            0 if space is None or space.is_refused else space.num_entries,
            self._store.usage.num_bytes,
            self._store.max_bytes,
            self._directory,
        )

    def __str__(self) -> str:
        level = self._entries.levels.level
        images = "images before their first random transform"
        values = {"decoded": images, "sample": "samples"}.get(self._value_level or "", "samples")
        if level is None:
            what = f"what load returns or {values}, whichever saves more time"
            if self._entries.levels.raw is None:
                what = "nothing, because samples are different each time"
        else:
            what = "what load returns" if level == "raw" else values
        if level == "sample" and not self._is_known:
            what += " that draw nothing"
        where = f"in {self._directory}" if self._directory else "in memory"
        if self._lacks_token:
            where += ", because a directory needs a token for this dataset"
        return f"Cache: {what}, up to {size_text(self._store.max_bytes)} {where}."


def _checked(
    level: str | None, value_level: str | None, name: str, *, has_load: bool
) -> str | None:
    """Return the level that the user wants, if the dataset has it."""
    possible = [*(["raw"] if has_load else []), *([value_level] if value_level else [])]
    if level is None or level in possible:
        return level
    if level == "decoded" and value_level is not None:
        return value_level  # No transform is random, so it is the sample.
    can = " or ".join(f'"{each}"' for each in possible)
    why = {
        "raw": "it has no load stage",
        "decoded": "no image before random transforms is known in it",
        "sample": "it has random transforms",
    }[level]
    advice = f"Use level={can}."
    if level == "raw":
        advice += " fuse=True or an ImageLoader gives a folder of images a load stage."
    raise ValueError(f'cache level "{level}" is not possible for {name}: {why}. {advice}')


def _space(
    store: Store,
    level: str,
    fingerprint: str | None,
    settings: LoaderSettings,
    owner: Any,
) -> Space | None:
    """Return the space for what a fingerprint says, or for the samples of the owner alone.

    None: a directory outlives the owner.
    """
    dataset = settings.dataset
    if fingerprint is None and store.directory is not None:
        return None
    if fingerprint is None:
        while type(owner) is Subset:
            owner = owner.dataset
        kind = f"{level}, fuse={settings.fuse}"
        return store.space_of_object(kind, owner, attributes_of(owner), _length(owner))
    text = f"{level}: {fingerprint}"
    about = {
        "level": level,
        "made_by": fingerprint,
        "dataset": type(dataset).__qualname__,
        "num_samples": _length(dataset),
    }
    name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return store.space(name, _length(dataset), about)


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(dataset, "__len__") else 0


def with_cache(settings: LoaderSettings, owner: Any) -> LoaderSettings:
    """Return the settings with their cache opened for their dataset.

    `owner` is the dataset as the user has it: the one in the settings may be a copy.
    """
    if settings.cache is None:
        return settings
    return dataclasses.replace(settings, sample_cache=SampleCache(settings.cache, settings, owner))
