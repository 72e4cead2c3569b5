"""torch's `get_worker_info()` inside a worker thread."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

if TYPE_CHECKING:
    from torch.utils.data._utils.worker import WorkerInfo

__all__ = ["set_worker_info"]


class _OfThread(threading.local):
    info: WorkerInfo | None = None


_of_thread = _OfThread()


def set_worker_info(info: WorkerInfo) -> None:
    """Let `torch.utils.data.get_worker_info()` answer with this in the calling thread."""
    _make_thread_aware()
    _of_thread.info = info


def _answer(of_process: WorkerInfo | None) -> WorkerInfo | None:
    info = _of_thread.info
    if info is None:
        return of_process
    # torch's collate asks only in order to make the batch in shared memory, for another process to
    # read. In a thread that would be a copy and a file descriptor for nothing.
    if sys._getframe(2).f_code is torch_collate.collate_tensor_fn.__code__:
        return of_process
    return info


def _make_thread_aware() -> None:
    """Teach torch's function to look at the calling thread first.

    torch keeps the answer in one variable for the process. The function's code is replaced, not
    the function: everyone who imported it by name has the same object. torch's own worker
    processes, and every thread that is not one of ours, get the answer they always got.
    """
    if get_worker_info.__code__ is _replacement.__code__:
        return
    # No lock, which a fork might find held. What is looked at above comes last: whoever finds it
    # begun and not done does the same again.
    torch_worker._spdl_torch_answer = _answer  # type: ignore[attr-defined]
    get_worker_info.__code__ = _replacement.__code__


def _replacement() -> WorkerInfo | None:
    # Names of torch's module, where this code is going to run.
    return _spdl_torch_answer(_worker_info)  # type: ignore[name-defined, no-any-return]  # noqa: F821


def _forget() -> None:
    _of_thread.info = None


# The child of a fork begins as a copy of the forking thread, but it is not our worker.
os.register_at_fork(after_in_child=_forget)
