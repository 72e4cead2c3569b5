from __future__ import annotations

import gc
import multiprocessing
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator

import pytest

HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Without it, what a thread has made and another drops is freed when the first one runs again, or
by the garbage collector."""

# A shell has its background jobs ignore Ctrl-C, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def own_thread_names() -> list[str]:
    """Our worker threads that are alive now."""
    return [t.name for t in threading.enumerate() if t.name.startswith("spdl_torch")]


def own_worker_names() -> list[str]:
    """Our threads and child processes that are alive now."""
    children = [child.name for child in multiprocessing.active_children()]
    return own_thread_names() + [name for name in children if name.startswith("spdl_torch")]


def assert_says_nothing(program: str) -> None:
    """Run a program to its end, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--children",
        action="store_true",
        help="leave it to the loader where its workers live, in all tests",
    )


@pytest.fixture(autouse=True)
def workers_in_this_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let loaders that do not say num_processes have their worker threads in this process.

    Most tests look at what the workers do through objects that the test shares with them. A test
    with the mark `children` gets the default of users, as do all tests with ``--children``.
    """
    if request.node.get_closest_marker("children") or request.config.getoption("--children"):
        return
    monkeypatch.setattr("spdl_torch._plan._why_no_child", lambda settings: "a test looks at them")


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail any test that leaves a worker thread behind."""
    before = set(threading.enumerate())
    children_before = multiprocessing.active_children()
    yield
    if not HAS_GIL:
        gc.collect()  # An error that a worker has raised holds the frame that holds the iterator.
    left = [t.name for t in threading.enumerate() if t not in before]
    left += [p.name for p in multiprocessing.active_children() if p not in children_before]
    assert [name for name in left if name.startswith("spdl_torch")] == []


@pytest.fixture
def ctrl_c_interrupts_once() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)
