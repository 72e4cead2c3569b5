"""Copies of a dataset, one for each worker."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import queue
import threading
import types
import warnings
from multiprocessing import queues, synchronize
from multiprocessing.managers import BaseProxy
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

_SHARED_TYPES = (
    # Objects that do not change need no copy, and pickle would look up their names.
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    # Objects that are made for sharing are shared, as between worker processes.
    synchronize.SemLock,
    synchronize.Condition,
    synchronize.Event,
    synchronize.Barrier,
    SynchronizedBase,
    ctypes._SimpleCData,
    ctypes.Array,
    queues.Queue,
    queues.SimpleQueue,
    BaseProxy,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
    queue.Queue,
    queue.SimpleQueue,
    # Already different in each thread.
    threading.local,
)


class DatasetCopies:
    """Copies of a dataset as it is now, made by pickling as for worker processes.

    The dataset is pickled once, in the caller's thread; each worker unpickles its copy. A dataset
    that cannot be pickled is a TypeError or, with `or_shallow`, a warning and a shallow copy.
    """

    def __init__(self, dataset: Any, *, or_shallow: bool) -> None:
        self._dataset = dataset
        self._shared: dict[int, Any] = {}
        self._pickle: bytes | None = None
        file = io.BytesIO()
        try:
            _Pickler(file, self._shared).dump(dataset)
        except Exception as error:
            message = (
                f"{type(dataset).__name__} cannot be copied for each worker: {error}. Open "
                "each file or connection when it is first used, or leave it out in __getstate__."
            )
            if not or_shallow:
                raise TypeError(message) from error
            warnings.warn(
                f"{message} The workers' shallow copies share all attributes.", stacklevel=2
            )
        else:
            self._pickle = file.getvalue()

    def make(self) -> Any:
        if self._pickle is None:
            return copy.copy(self._dataset)
        unpickler = pickle.Unpickler(io.BytesIO(self._pickle))
        unpickler.persistent_load = self._shared.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, _SHARED_TYPES):
            return None
        self._shared[id(obj)] = obj
        return id(obj)


def of_copy(function: Any, dataset: Any, dataset_copy: Any) -> Any:
    """Return the function or, if it is a method of the dataset, the method of its copy."""
    if getattr(function, "__self__", None) is dataset and dataset is not dataset_copy:
        return types.MethodType(function.__func__, dataset_copy)
    return function
