"""`spdl-torch cache`: what is in the directory of a cache."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import time
from pathlib import Path
from typing import Any, Final

from .._cache._store import SpaceReport, clear, is_cache, num_damaged, remove, report, spaces_in
from .._text import size as size_text
from ._parser import CommandError
from ._screen import Screen, counted, printable

_NOUNS: Final = {"raw": "raw forms", "decoded": "decoded images", "sample": "samples"}
_UNITS: Final = [(86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")]


def run(options: argparse.Namespace) -> int:
    """List, verify or clear a cache; the exit code is 1 if an entry is damaged."""
    screen = Screen(as_json=options.json)
    directory = _checked(options.directory)
    spaces = [report(folder) for folder in spaces_in(directory)]
    if options.clear is not None:
        return _clear(screen, directory, spaces, options.clear)
    damaged = _verified(screen, spaces) if options.verify else {}
    for space in spaces:
        _say(screen, space, damaged.get(space.folder))
    num_bytes = sum(space.num_bytes for space in spaces)
    num_entries = sum(space.num_entries for space in spaces)
    total = f"{counted(len(spaces), 'space')}, {_entries(num_entries)}, {size_text(num_bytes)}"
    is_damaged = any(damaged.values())
    if options.verify:
        number = sum(damaged.values())
        total += f", {number:,} damaged"
        if is_damaged:
            total += ". The loader makes damaged entries again; --clear removes them."
    screen.remark(total, style="red" if is_damaged else "green" if options.verify else None)
    screen.document(
        directory=directory,
        num_entries=num_entries,
        num_bytes=num_bytes,
        num_damaged=sum(damaged.values()) if options.verify else None,
        spaces=[_as_json(space, damaged.get(space.folder)) for space in spaces],
    )
    return 1 if is_damaged else 0


def _checked(directory: Path) -> Path:
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise CommandError(
            f"{directory}: {error.strerror}. Give the directory of a Cache(directory=...)."
        ) from None
    if not is_cache(directory):
        what = "it has other files" if names else "it is empty"
        raise CommandError(
            f"{directory} is no cache: {what}. Give the directory of a Cache(directory=...)."
        )
    return directory


# -- list and verify -------------------------------------------------------------------------------


def _verified(screen: Screen, spaces: list[SpaceReport]) -> dict[Path, int]:
    """Return the number of damaged entries of each space; a table that is damaged counts as one."""
    damaged = {}
    with screen.bar("verifying", sum(space.num_bytes for space in spaces)) as advance:
        for space in spaces:
            damaged[space.folder] = int(space.problem is not None)
            if space.problem is None:
                with contextlib.suppress(FileNotFoundError):  # It was removed meanwhile.
                    damaged[space.folder] = num_damaged(space.folder, advance)
    return damaged


def _say(screen: Screen, space: SpaceReport, number: int | None) -> None:
    about = space.about
    words = [f"{_NOUNS.get(str(about.get('level')), 'entries')} of {about.get('dataset', '?')}"]
    if space.problem is not None:
        words.append(f"cannot be read: {space.problem}")
    else:
        words += [_entries(space.num_entries), size_text(space.num_bytes)]
        words.append(f"written {_age(time.time() - space.written_seconds)} ago")
    if space.is_refused:
        words.append("not used, because samples were different each time")
    if number and space.problem is None:
        words.append(f"{number:,} damaged")
    style = "red" if number or space.problem is not None else None
    screen.say(printable(f"{space.folder.name}: {', '.join(words)}"), style)
    screen.say(printable(f"    {about.get('made_by', 'made by an unknown version')}"))


def _entries(number: int) -> str:
    return f"{number:,} entry" if number == 1 else f"{number:,} entries"


def _age(seconds: float) -> str:
    """Return an age in the largest unit of which there are two."""
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return counted(int(seconds // length), unit)
    return "a second"


def _as_json(space: SpaceReport, number: int | None) -> dict[str, Any]:
    written = dt.datetime.fromtimestamp(space.written_seconds, dt.UTC)
    return {
        "name": space.folder.name,
        **{name: space.about.get(name) for name in ("level", "dataset", "num_samples", "made_by")},
        "num_entries": space.num_entries,
        "num_bytes": space.num_bytes,
        "num_damaged": number,
        "written": written.isoformat(timespec="seconds"),
        "is_used": not space.is_refused and space.problem is None,
        "problem": space.problem,
    }


# -- clear -----------------------------------------------------------------------------------------


def _clear(screen: Screen, directory: Path, spaces: list[SpaceReport], name: str) -> int:
    """Remove all spaces, or the one whose name begins so."""
    chosen = [space for space in spaces if space.folder.name.startswith(name)]
    if name and len(chosen) != 1:
        names = ", ".join(space.folder.name for space in chosen or spaces) or "none"
        found = f"{len(chosen)} spaces" if chosen else "no space"
        raise CommandError(
            f"{found} in {directory} with a name that begins with {name}. Give one of: {names}."
        )
    try:
        if name:
            remove(chosen[0].folder)
        else:
            clear(directory)
    except OSError as error:
        raise CommandError(f"cannot clear {directory}: {error}", exit_code=1) from None
    num_entries = sum(space.num_entries for space in chosen)
    num_bytes = sum(space.num_bytes for space in chosen)
    screen.remark(
        f"removed {counted(len(chosen), 'space')}, {_entries(num_entries)}, {size_text(num_bytes)}"
    )
    screen.document(
        directory=directory,
        num_entries=num_entries,
        num_bytes=num_bytes,
        removed=[space.folder.name for space in chosen],
    )
    return 0
