"""Threads of ours, and how they are told from others."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["is_ours", "new_thread", "runnable_seconds", "seconds_in_queue"]

_NAME: Final = "spdl_torch-"
"""How the names of all our threads begin."""


def new_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """A thread that is still to be started.

    A daemon, because it may be stuck in the user's code for good and must not keep the interpreter
    from exiting. In every other case the pipeline joins it.
    """
    options: dict[str, Any] = {}
    if sys.version_info >= (3, 14):
        # A thread is never garbage, so what its context refers to is not either. It would have the
        # caller's by default where there is no GIL; a worker process has none.
        options["context"] = contextvars.Context()
    return threading.Thread(target=target, args=args, name=_NAME + name, daemon=True, **options)


def is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith(_NAME)


def runnable_seconds(thread: threading.Thread) -> float:
    """How long it has run in all its life, or could have run, had there been a core for it."""
    if thread.native_id is None or sys.platform != "linux":
        return 0.0
    try:
        # Its clock has the number that pthread_getcpuclockid gives. That looks into the memory of
        # the thread, which is gone when it has just ended.
        seconds = time.clock_gettime(~thread.native_id << 3 | 6)
    except OSError:
        return 0.0
    return seconds + seconds_in_queue(f"self/task/{thread.native_id}")


def seconds_in_queue(thread: str = "thread-self") -> float:
    """How long a thread, by default this one, could have run, had there been a core for it."""
    try:
        with Path(f"/proc/{thread}/schedstat").open("rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # Only Linux says so, and not every Linux.
        return 0.0
