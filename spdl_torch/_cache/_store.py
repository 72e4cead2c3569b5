"""All spaces of a cache, which share its budget, and the directory that they may be in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ._space import (
    FORMAT,
    TABLE,
    DamagedTable,
    DirectoryFiles,
    MemoryFiles,
    Space,
    Usage,
    table_bytes,
    write_header,
)

_MARKER: Final = "spdl_torch_cache.json"
_ABOUT, _USAGE = "about.json", "usage"
_TEMPORARY: Final = ".new-"
_OURS: Final = re.compile(rf"{re.escape(_TEMPORARY)}.*|[0-9a-f]{{24}}-\d+")
"""The names of spaces."""


class CacheDirectoryError(OSError):
    """Raised for a directory that cannot be used as a cache.

    >>> cache = Cache("1GB", directory="photos", token="1")
    >>> try: iter(DataLoader(dataset, cache=cache))
    ... except CacheDirectoryError as error: print(error)
    /.../photos is not empty and is no cache of spdl_torch. Use an empty or new directory.
    """

    __module__ = "spdl_torch"


class Store:
    """The spaces of a cache, which share its budget."""

    def __init__(self, max_bytes: int, directory: Path | None) -> None:
        self.max_bytes = max_bytes
        self.directory = directory
        self._spaces: dict[str, Space] = {}
        self._owners: dict[str, tuple[Any, dict[str, Any]]] = {}
        if directory is None:
            self.usage = Usage(max_bytes, None)
        else:
            with _used_as_cache(directory):
                _prepare(directory)
                self.usage = Usage(max_bytes, directory / _USAGE)

    @property
    def is_there(self) -> bool:
        """Whether the directory is still the one that was opened."""
        return self.usage.is_at(self.directory and self.directory / _USAGE)

    # Threads may call these methods at the same time. There is no lock of threads, because a
    # process that is forked meanwhile would wait for it.

    def space(self, name: str, num_samples: int, about: dict[str, Any]) -> Space:
        """Return the space of a name. Make it, for so many samples, if there is none."""
        name = f"{name}-{FORMAT}"
        # Larger datasets may use it too, as far as there is room for their samples.
        num_slots = max(2 * num_samples, min(self.max_bytes >> 12, 1 << 20), 1 << 12)
        space = self._spaces.get(name)
        if self.directory is None:
            if space is None:
                space = Space(name, MemoryFiles(num_slots, self.max_bytes))
            return self._spaces.setdefault(name, space)
        with _used_as_cache(self.directory), self.usage.lock():
            if space is None or not space.is_usable_at(self.directory / name):
                space = _space_in(self.directory, name, num_slots, about)
                self._spaces[name] = space
                self._count()
        return space

    def _count(self) -> None:
        """Count what is used: spaces may have been removed, or a process have died in between.

        Call it with the lock of the usage, so that no space that is made meanwhile is missed.
        """
        spaces = list(self._spaces.values())
        if self.directory is not None:
            spaces = []
            for folder in spaces_in(self.directory):
                with contextlib.suppress(OSError):
                    spaces.append(Space(folder.name, DirectoryFiles(folder)))
        self.usage.count(spaces)

    def space_of_object(
        self, kind: str, owner: Any, attributes: dict[str, Any], num_samples: int
    ) -> Space:
        """Return the space of an object in memory, for values of which only that object is known.

        If other values have been assigned to its attributes, the old space is dropped.
        """
        name = f"{kind} of object {id(owner)}"
        found = self._owners.get(name)
        # The old owner was kept, so no other object has its id.
        if found is None or not _are_same(found[1], attributes):
            with self.usage.lock():
                self._spaces.pop(f"{name}-{FORMAT}", None)
                self._count()
            self._owners[name] = owner, attributes
        return self.space(name, num_samples, {})

    def __getstate__(self) -> dict[str, Any]:
        # A child has its spaces from elsewhere, and the owners may not be picklable.
        return vars(self) | {"_owners": {}, "_spaces": {}}


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        value is other[name]
        or (type(value) in (bool, int, float, str, type(None)) and value == other[name])
        for name, value in one.items()
    )


@contextlib.contextmanager
def _used_as_cache(directory: Path) -> Iterator[None]:
    """Say what to do if the directory cannot be used."""
    try:
        yield
    except CacheDirectoryError:
        raise
    except OSError as error:
        raise CacheDirectoryError(
            f"{directory} cannot be used as a cache: {error}. "
            "Use a directory on a local disk that has room and that you may write to."
        ) from error


def _prepare(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if not is_cache(directory):
        # Another process may do the same now. And if the directory is removed while a loader writes
        # to it, a space may be left.
        others = [path for path in directory.iterdir() if not _OURS.fullmatch(path.name)]
        if others and not is_cache(directory):
            raise CacheDirectoryError(
                f"{directory} is not empty and is no cache of spdl_torch. "
                "Use an empty or new directory."
            )
        marker = _temporary_in(directory)  # So that it is there as a whole, or not at all.
        marker.write_text(json.dumps({"format": FORMAT}) + "\n")
        marker.rename(directory / _MARKER)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(13, "it is not writable")


def _temporary_in(directory: Path) -> Path:
    return directory / f"{_TEMPORARY}{os.urandom(8).hex()}"


# Spaces are made and removed under the lock of the usage. Each appears as a whole, and disappears
# as a whole, by a rename: a process may be killed in between.


def _space_in(directory: Path, name: str, num_slots: int, about: dict[str, Any]) -> Space:
    folder = directory / name
    with contextlib.suppress(
        DamagedTable, FileNotFoundError, IsADirectoryError, NotADirectoryError
    ):
        space = Space(name, DirectoryFiles(folder))
        if space.is_usable_at(folder):
            return space
    if folder.exists():
        remove(folder)
    for left in directory.glob(f"{_TEMPORARY}*"):  # By a process that was killed.
        shutil.rmtree(left, ignore_errors=True)
    _create(folder, num_slots, about)
    return Space(name, DirectoryFiles(folder))


def _create(folder: Path, num_slots: int, about: dict[str, Any]) -> None:
    temporary = _temporary_in(folder.parent)
    temporary.mkdir()
    try:
        (temporary / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        table = os.open(temporary / TABLE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # With blocks: who reads a hole of a mapping on a full disk may be killed.
            os.posix_fallocate(table, 0, table_bytes(num_slots))
            write_header(table, num_slots)
        finally:
            os.close(table)
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    temporary = _temporary_in(folder.parent)
    folder.rename(temporary)
    if temporary.is_dir():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        temporary.unlink()


def spaces_in(directory: Path) -> list[Path]:
    """Return the folders of the spaces in a directory, whatever their version."""
    return sorted(path for path in directory.iterdir() if _is_space(path))


def _is_space(folder: Path) -> bool:
    if folder.name.startswith(_TEMPORARY):
        return False
    return any((folder / name).exists() for name in (_ABOUT, TABLE))


class SpaceReport(NamedTuple):
    """A space in a directory, as `spdl-torch cache` lists it."""

    folder: Path
    about: dict[str, Any]
    """Its level, what made it, the class of the dataset and its length."""
    num_entries: int
    num_bytes: int
    """How much of the budget it takes."""
    written_seconds: float
    """When an entry was last added, in seconds since 1970."""
    is_refused: bool
    """Its entries are not used: they turned out to be different each time."""
    problem: str | None
    """Why it cannot be read."""


def report(folder: Path) -> SpaceReport:
    """Return what is in a space of a directory, without reading its entries."""
    try:
        about = json.loads((folder / _ABOUT).read_text())
    except (OSError, ValueError):
        about = None
    about = about if isinstance(about, dict) else {}
    try:
        written = max(path.stat().st_mtime for path in folder.iterdir())
        space = Space(folder.name, DirectoryFiles(folder))
    except DamagedTable:
        return SpaceReport(folder, about, 0, 0, written, False, "its table is damaged")
    except (OSError, ValueError) as error:  # A folder that was removed meanwhile has no files.
        reason = getattr(error, "strerror", None) or "it has no files"
        return SpaceReport(folder, about, 0, 0, 0.0, False, reason)
    return SpaceReport(folder, about, space.num_entries, space.end, written, space.is_refused, None)


def num_damaged(folder: Path, advance: Callable[[int], None]) -> int:
    """Read all entries of a space; return how many differ from their checksums.

    `advance` is called for each with the number of its bytes. Entries that are not used are left
    out.
    """
    space = Space(folder.name, DirectoryFiles(folder))
    if space.is_refused:
        return 0
    number = 0
    for key in space.keys():  # noqa: SIM118 (a space is no dict)
        entry = None if key is None else space.get(key)
        number += entry is None
        advance(0 if entry is None else len(entry.memory))
    return number


def is_cache(directory: Path) -> bool:
    return (directory / _MARKER).exists()


def clear(directory: Path) -> None:
    """Remove all entries. Loaders that use the cache keep what they have opened."""
    if not is_cache(directory):
        raise CacheDirectoryError(
            f"{directory} is no cache of spdl_torch, so nothing was removed. "
            "Name the directory of a cache."
        )
    with _used_as_cache(directory), Usage(0, directory / _USAGE).lock():
        for folder in spaces_in(directory):
            remove(folder)
        for left in directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left, ignore_errors=True)
