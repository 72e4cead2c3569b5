"""What this process may use of the machine: cores and memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory(root: Path = _ROOT) -> int:
    """Return how many bytes of memory are free for this process.

    That is what the machine has available, or less if a cgroup of the process, such as that of its
    container, has a limit. Memory of the page cache counts as free.
    """
    return max(0, min([_available(root), *_left_in_cgroups(root)]))


def _available(root: Path) -> int:
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return 1024 * int(value.split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _left_in_cgroups(root: Path) -> Iterator[int]:
    for folder, is_v2 in _memory_cgroups(root):
        limit, usage = (
            ("memory.max", "memory.current")
            if is_v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        with contextlib.suppress(OSError, ValueError):  # "max" is no number.
            free = int((folder / limit).read_text()) - int((folder / usage).read_text())
            yield free + _page_cache(folder)


def _page_cache(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # Those of v1 with "total_" include the groups below, as those of v2 do.
        return int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))
    return 0


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each memory cgroup of this process, up to the root, and if it is of v2.

    In a container the path of a group may be that of the host. Then only the root is there.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            is_v2 = number == "0" and not controllers
            if not is_v2 and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" if is_v2 else root / "sys/fs/cgroup/memory"
            folder = top / path.lstrip("/")
            while folder != top:
                yield folder, is_v2
                folder = folder.parent
            yield top, is_v2
