"""`Cache`: what a user says about a cache, and the store behind it."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from .._machine import free_memory
from .._text import size as size_text
from ._store import Store, clear

Level: TypeAlias = Literal["raw", "decoded", "sample"]

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SHARE: Final = 0.5
"""How much of what is free is used if no size is given."""

_logger = logging.getLogger("spdl_torch")


class Cache:
    """Keeps what is expensive to make and the same in every epoch. Pass it to a `DataLoader`.

    Samples are kept from the first epoch on, until the cache is full; none is evicted. Random
    transforms still run in each epoch, so batches are the same as without a cache. One object may
    serve several loaders, which share its size.

    >>> cache = Cache("8GB")
    >>> dataset = torchvision.datasets.ImageFolder("photos", loader=ImageLoader(64, crop="random"))
    >>> loader = DataLoader(dataset, batch_size=4, num_workers=2, cache=cache)
    >>> for epoch in range(2): batches = list(loader)
    >>> loader.stats().cache.num_misses
    0

    Args:
        max_bytes: The size: a number of bytes, or a text such as "8GB". Default: half of what is
            free, of the memory that this process may use or of the disk.
        directory: Where to keep it on a local disk, for later runs and for all processes of this
            machine, such as the ranks of `torchrun`. Default: in memory, shared with the worker
            processes of the loader.
        level: What to keep: "raw", what `load` returned; "decoded", images before their first
            random transform; "sample", what `preprocess` returned. Default: what saves most time
            for its size, measured on the first samples.
        max_side: Keep decoded images with their shorter side reduced to this many pixels. It takes
            less memory and time, and changes pixels.
        token: A text for the version of what your own dataset returns. Without it, samples of a
            dataset whose code is not known are kept in memory only, also with a directory. Change
            it when you change the dataset.

    """

    __module__ = "spdl_torch"

    def __init__(
        self,
        max_bytes: int | str | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        level: Level | None = None,
        max_side: int | None = None,
        token: str | None = None,
    ) -> None:
        self.max_bytes = None if max_bytes is None else _num_bytes(max_bytes)
        self.directory = None if directory is None else Path(directory).absolute()
        if level not in (*get_args(Level), None):
            raise ValueError(
                f'level must be "raw", "decoded" or "sample", got {level!r}. Leave it out to let '
                "the first samples decide."
            )
        self.level = level
        if max_side is not None and (not isinstance(max_side, int) or max_side < 1):
            raise ValueError(
                f"max_side must be a number of pixels, got {max_side!r}. Leave it out to keep all."
            )
        self.max_side = max_side
        if not isinstance(token, str | None):
            raise TypeError(f"token must be a str, got {token!r}.")
        self.token = token
        self._stores: dict[bool, Store] = {}

    def __repr__(self) -> str:
        names = ("directory", "level", "max_side", "token")
        given = [f"{n}={v!r}" for n in names if (v := getattr(self, n)) is not None]
        if self.max_bytes is not None:
            given.insert(0, repr(self.max_bytes))
        return f"Cache({', '.join(given)})"

    def clear(self) -> None:
        """Forget all entries, in the directory too. Do it while no loader uses the cache."""
        self._stores.clear()
        if self.directory is not None and self.directory.exists():
            clear(self.directory)

    def store(self, *, in_directory: bool) -> Store:
        """Return the store in memory or in the directory, and choose its size if none was given."""
        found = self._stores.get(in_directory)
        if found is not None and found.is_there:
            return found
        directory = self.directory if in_directory else None
        made = Store(self._size(directory), directory)
        if found is None:  # Another thread may have made one at the same time.
            return self._stores.setdefault(in_directory, made)
        self._stores[in_directory] = made
        return made

    def _size(self, directory: Path | None) -> int:
        if self.max_bytes is not None and (directory or self.directory is None):
            return self.max_bytes
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            free, what = shutil.disk_usage(directory).free, f"the disk of {directory}"
        else:
            # Each rank of torchrun has a cache in memory of its own.
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            free, what = free_memory() // ranks, "memory"
        size = min(int(_SHARE * free), self.max_bytes or free)
        if directory is None and self.directory is not None:
            _logger.warning(
                "cache: up to %s in memory and not in %s, because nothing tells another run what "
                "the dataset returns. Pass a token to Cache, and change it with the dataset.",
                size_text(size),
                self.directory,
            )
        else:
            _logger.info(
                "cache: up to %s, half of what is free of %s. Set max_bytes to change it.",
                size_text(size),
                what,
            )
        return size

    # A loader may be copied, and its copy uses the same cache. In another process it is empty.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _stores={})


def _num_bytes(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match and (unit := _UNITS.get(match[2].lower())) and float(match[1]) > 0:
            return int(float(match[1]) * unit)
    raise ValueError(
        f'max_bytes must be a number of bytes or a text such as "8GB", got {size!r}. '
        "Leave it out for half of what is free."
    )
