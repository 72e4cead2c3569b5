from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest


def own_thread_names() -> list[str]:
    """Our worker threads that are alive now."""
    return [t.name for t in threading.enumerate() if t.name.startswith("spdl_torch")]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail any test that leaves a worker thread behind."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before]
    assert [name for name in left if name.startswith("spdl_torch")] == []


@pytest.fixture
def ctrl_c_interrupts_once() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)
