"""Which images are in a folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ._parser import CommandError

__all__ = ["Unreadable", "existing_folder", "image_paths", "images_at", "images_beside_folders"]

_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Of the formats that `ImageLoader` knows, in small letters."""

_NOT_REGULAR = "it is no regular file"


class Unreadable(NamedTuple):
    """What stands where images may be, and cannot be read."""

    path: str
    reason: str


def existing_folder(folder: Path) -> str:
    """The path of a folder that can be listed."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise CommandError(f"{folder}: {error.strerror}. Give a folder of images.") from None
    return str(folder)


def images_at(path: Path) -> Iterator[str | Unreadable]:
    """The images in a folder and in those below it; or a file, whatever its name."""
    if path.is_dir():
        return image_paths(existing_folder(path))
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise CommandError(
            f"{path}: {error.strerror}. Give an image or a folder of images."
        ) from None
    return iter([str(path) if is_file else Unreadable(str(path), _NOT_REGULAR)])


def images_beside_folders(folder: str) -> list[Path]:
    """The images in a folder itself, in the order of their names."""
    with os.scandir(folder) as entries:
        return sorted(
            Path(entry.path) for entry in entries if _has_image_name(entry) and entry.is_file()
        )


def image_paths(folder: str, above: tuple[tuple[int, int], ...] = ()) -> Iterator[str | Unreadable]:
    """The images in a folder and in those below it, links included, one after the other.

    Nothing is sorted or collected but the names of subfolders, so there may be millions.

    Args:
        folder: where to look.
        above: the folders it is in, to know a link that leads back.

    """
    subfolders = []
    try:
        found = os.stat(folder)  # noqa: PTH116 (strings all the way)
        identity = found.st_dev, found.st_ino
        if identity in above:
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    subfolders.append(entry.path)
                elif _has_image_name(entry):
                    yield _checked(entry)
    except OSError as error:
        yield Unreadable(folder, f"the folder cannot be read: {error.strerror}")
        return
    for subfolder in sorted(subfolders):
        yield from image_paths(subfolder, (*above, identity))


def _has_image_name(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(_SUFFIXES)


def _checked(entry: os.DirEntry[str]) -> str | Unreadable:
    # Opening a named pipe would wait for its other end. A broken link is an error when opened.
    if entry.is_file() or not os.path.exists(entry.path):  # noqa: PTH110 (millions of times)
        return entry.path
    return Unreadable(entry.path, _NOT_REGULAR)
