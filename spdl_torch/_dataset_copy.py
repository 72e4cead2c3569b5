"""Copies of a dataset, one for each worker."""

from __future__ import annotations

import copy
import ctypes
import io
import itertools
import mmap
import os
import pathlib
import pickle
import queue
import threading
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict
from multiprocessing import queues, synchronize
from multiprocessing.managers import BaseProxy
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, Final

import numpy as np
import torch
from torch.storage import TypedStorage

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

_MIN_LONG: Final = 10_000
"""The length from which a container of plain data is copied with its items shared."""
_LONG_TYPES: Final = {str, bytes, tuple, frozenset, list, set, dict, OrderedDict, defaultdict}
_PLAIN_TYPES: Final = (
    *(type(None), bool, int, float, complex, str, bytes, pathlib.PurePath),
    *(tuple, frozenset, list, set, dict),
    *(np.generic, np.ndarray, torch.Tensor),
)
"""The types of plain data. Other objects may have a position or an open file, which workers must
not share, so a container of them is pickled whatever its length."""

_MIN_LARGE: Final = 65_536
"""The number of bytes from which the memory of an array or tensor is not part of the pickle."""
_ALIGNMENT: Final = 64


class DatasetCopies:
    """Copies of a dataset as it is now, made by pickling as for worker processes.

    The dataset is pickled once, in the caller's thread; each worker unpickles its copy. A dataset
    that cannot be pickled is a TypeError or, with `or_shallow`, a warning and a shallow copy.

    What is large is not copied for each worker. The memory of large arrays and tensors is copied
    once, and then on write. Memory maps and shared memory are shared. A long container of plain
    data is copied one level deep: a worker may shuffle it, but its items are those of the dataset.
    """

    def __init__(self, dataset: Any, *, or_shallow: bool) -> None:
        self._dataset = dataset
        self._pickle: bytes | None = None
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(dataset)
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
            self._shared = _with_containers_copied(pickler.shared)
            self._memory = _CopyOnWrite(pickler.buffers)

    def make(self) -> Any:
        if self._pickle is None:
            return copy.copy(self._dataset)
        unpickler = pickle.Unpickler(io.BytesIO(self._pickle), buffers=self._memory.map())
        shared = _with_containers_copied(self._shared)
        unpickler.persistent_load = shared.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


class _Pickler(pickle.Pickler):
    """Pickles what each copy has for itself, and collects the rest."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=self._keep_in_pickle)
        self.shared: dict[int, Any] = {}
        """Objects that are not in the pickle, by their id."""
        self.buffers: list[memoryview] = []
        """The memory of arrays and tensors that is not in the pickle."""
        self._storages: dict[int, Any] = {}

    def _keep_in_pickle(self, buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        can_share = memory.readonly or hasattr(os, "memfd_create")
        if memory.nbytes < _MIN_LARGE or not can_share:
            return True
        self.buffers.append(memory)
        return False

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) in _LONG_TYPES:
            if len(obj) < _MIN_LONG or not _is_plain(obj):
                return None
        elif isinstance(obj, np.ndarray):
            if not _is_mapped(obj):
                return None
        elif isinstance(obj, TypedStorage):  # Of a tensor.
            if not obj._untyped_storage.is_shared():
                return None
        elif not isinstance(obj, _SHARED_TYPES):
            return None
        self.shared[id(obj)] = obj
        return id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TypedStorage):
            return NotImplemented
        storage = obj._untyped_storage
        if storage.device.type != "cpu" or storage.nbytes() < _MIN_LARGE:
            return NotImplemented
        # As an array, whose memory is not in the pickle. One for all tensors that are views of it.
        array = self._storages.setdefault(storage.data_ptr(), _bytes_of(storage))
        return _storage_of, (array, obj.dtype)


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    # Whatever the default device is.
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def _storage_of(array: Any, dtype: torch.dtype) -> TypedStorage:
    storage = torch.from_numpy(array).untyped_storage()
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _is_mapped(array: Any) -> bool:
    """Return whether the memory of an array is a memory map or shared between processes."""
    owner = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    if isinstance(owner, torch.Tensor):
        return bool(owner.is_shared())
    # Not a map of `_CopyOnWrite`, which belongs to one worker.
    return type(owner) is mmap.mmap or isinstance(owner, ctypes.Array)


def _is_plain(value: Any) -> bool:
    """Return whether a value is plain data, judged by all of its items and the first one's items.

    To look at the items of every item would take as long as to pickle them.
    """
    if isinstance(value, dict):
        items: list[Any] = [value.values(), value.keys()]
    elif isinstance(value, tuple | frozenset | list | set):
        items = [value]
    else:
        return isinstance(value, _PLAIN_TYPES)
    return all(
        all(issubclass(kind, _PLAIN_TYPES) for kind in set(map(type, some)))
        and all(map(_is_plain, itertools.islice(some, 1)))
        for some in items
    )


def _with_containers_copied(shared: dict[int, Any]) -> dict[int, Any]:
    return {
        key: copy.copy(value) if type(value) in _LONG_TYPES else value
        for key, value in shared.items()
    }


class _CopyOnWrite:
    """Memory that each worker maps for itself: a page is copied when the worker writes to it.

    So the workers read one copy of the memory, and what one of them writes no other sees, as with
    forked processes. Memory that is read-only needs no copy.
    """

    def __init__(self, buffers: list[memoryview]) -> None:
        self._places: list[memoryview | slice] = []
        self._size = 0
        for buffer in buffers:
            if buffer.readonly:
                self._places.append(buffer)
            else:
                self._places.append(slice(self._size, self._size + buffer.nbytes))
                self._size += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._size > 0:
            self._file = os.memfd_create("spdl_torch")
            weakref.finalize(self, os.close, self._file)
            os.truncate(self._file, self._size)
            with open(self._file, "wb", closefd=False) as file:
                for buffer, place in zip(buffers, self._places, strict=True):
                    if isinstance(place, slice):
                        file.seek(place.start)
                        file.write(buffer)

    def map(self) -> list[memoryview]:
        """Return the buffers, in memory of the caller."""
        memory = memoryview(b"")
        if self._size > 0:
            memory = memoryview(_PrivateMap(self._file, self._size, mmap.MAP_PRIVATE))
        return [memory[p] if isinstance(p, slice) else p for p in self._places]


class _PrivateMap(mmap.mmap):
    pass


def of_copy(function: Any, dataset: Any, dataset_copy: Any) -> Any:
    """Return the function or, if it is a method of the dataset, the method of its copy."""
    if getattr(function, "__self__", None) is dataset and dataset is not dataset_copy:
        return types.MethodType(function.__func__, dataset_copy)
    return function
