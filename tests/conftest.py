from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


def own_thread_names() -> list[str]:
    """Our worker threads that are alive now."""
    return [t.name for t in threading.enumerate() if t.name.startswith("spdl_torch")]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail any test that leaves a worker thread behind."""
    yield
    assert own_thread_names() == []
