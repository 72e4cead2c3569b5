"""All spaces of a cache, which share its budget, and the directory that they may be in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterable
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


class CacheDirectoryError(OSError):
    """Raised for a directory that cannot be used as a cache."""

    __module__ = "spdl_torch"


class Store:
    """The spaces of a cache, which share its budget."""

    def __init__(self, max_bytes: int, directory: Path | None) -> None:
        self.max_bytes = max_bytes
        self.directory = directory
        self._spaces: dict[str, Space] = {}
        self._owners: dict[str, tuple[Any, dict[str, Any]]] = {}
        if directory is not None:
            _prepare(directory)
        self.usage = Usage(max_bytes, directory and directory / _USAGE)

    def space(self, name: str, num_samples: int, about: dict[str, Any]) -> Space:
        """Return the space of a name. Make it, for so many samples, if there is none."""
        space = self._spaces.get(name)
        if space is None:
            # Larger datasets may use it too, as far as there is room for their samples.
            num_slots = max(2 * num_samples, min(self.max_bytes >> 12, 1 << 20), 1 << 12)
            if self.directory is None:
                space = Space(name, MemoryFiles.create(num_slots, self.max_bytes))
            else:
                space = _space_in(self.directory, name, num_slots, about)
            self._spaces[name] = space
            self._count()
        return space

    def _count(self) -> None:
        """Count what is used: spaces may have been removed, or a process have died in between."""
        spaces = list(self._spaces.values())
        if self.directory is not None:
            for folder in spaces_in(self.directory):
                if folder.name not in self._spaces:
                    with contextlib.suppress(OSError, DamagedTable):
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
            self._spaces.pop(name, None)
            self._count()
            self._owners[name] = owner, attributes
        return self.space(name, num_samples, {})

    def reopen_after_fork(self) -> None:
        """Open all files again, in a child process."""
        self.usage.open()
        for space in self._spaces.values():
            space.open()

    def __getstate__(self) -> dict[str, Any]:
        # A child needs no more, and the owners may not be picklable.
        return vars(self) | {"_owners": {}}


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        value is other[name]
        or (type(value) in (bool, int, float, str, type(None)) and value == other[name])
        for name, value in one.items()
    )


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / _MARKER).exists():
            if (
                any(not path.name.startswith(_TEMPORARY) for path in directory.iterdir())
                and not (directory / _MARKER).exists()
            ):
                raise CacheDirectoryError(
                    f"{directory} is not empty and is no cache of spdl_torch. "
                    "Use an empty or new directory."
                )
            _write_json(directory / _MARKER, {"format": FORMAT})
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "it is not writable")
    except CacheDirectoryError:
        raise
    except OSError as error:
        raise CacheDirectoryError(
            f"{directory} cannot be used as a cache: {error}. "
            "Use a directory on a local disk that you may write to."
        ) from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file so that it is there as a whole, or not at all."""
    temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{path.name}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.rename(path)


def _space_in(directory: Path, name: str, num_slots: int, about: dict[str, Any]) -> Space:
    folder = directory / name
    for _ in range(2):
        try:
            if not folder.exists():
                _create(folder, num_slots, about)
            return Space(name, DirectoryFiles(folder))
        except DamagedTable:  # Nothing in it can be found. Views of it stay valid.
            shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise CacheDirectoryError(
                f"{directory} cannot be used as a cache: {error}. Free some room in it, or use "
                "another directory on a local disk."
            ) from error
    raise CacheDirectoryError(f"{folder} is damaged and cannot be replaced. Remove it.")


def _create(folder: Path, num_slots: int, about: dict[str, Any]) -> None:
    """Make an empty space in a directory, as a whole: another process may do the same now."""
    temporary = folder.with_name(f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{folder.name}")
    temporary.mkdir()
    try:
        (temporary / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        table = os.open(temporary / TABLE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # With blocks: a process that writes to a mapping on a full disk is killed.
            os.posix_fallocate(table, 0, table_bytes(num_slots))
            write_header(table, num_slots)
        finally:
            os.close(table)
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.exists():
            raise


def spaces_in(directory: Path) -> list[Path]:
    """Return the folders of the spaces in a directory, whatever their version."""
    return sorted(path.parent for path in directory.glob(f"*/{_ABOUT}") if _is_space(path.parent))


def _is_space(folder: Path) -> bool:
    return not folder.name.startswith(_TEMPORARY)


class SpaceReport(NamedTuple):
    """A space in a directory, as `spdl-torch cache` lists it."""

    folder: Path
    about: dict[str, Any]
    num_entries: int
    num_bytes: int
    num_damaged: int | None
    """None: the bytes were not read."""
    is_readable: bool


def reports(directory: Path, *, verifies: bool) -> Iterable[SpaceReport]:
    """Yield what is in each space of a directory."""
    for folder in spaces_in(directory):
        try:
            about = json.loads((folder / _ABOUT).read_text())
        except (OSError, ValueError):
            about = {}
        try:
            space = Space(folder.name, DirectoryFiles(folder))
        except (OSError, DamagedTable):
            yield SpaceReport(folder, about, 0, 0, None, is_readable=False)
            continue
        num_damaged = None
        if verifies:
            num_damaged = sum(space.get(key) is None for key in space.keys())  # noqa: SIM118
        yield SpaceReport(
            folder, about, space.num_entries, space.end, num_damaged, is_readable=True
        )


def is_cache(directory: Path) -> bool:
    return (directory / _MARKER).exists()


def clear(directory: Path) -> None:
    """Remove all entries. Loaders that use the cache keep what they have mapped."""
    for path in directory.iterdir():
        if path.is_dir() and ((path / _ABOUT).exists() or path.name.startswith(_TEMPORARY)):
            shutil.rmtree(path, ignore_errors=True)
