"""What threads must not share, of what is found in a dataset.

The search only looks: it calls no method or property of the user's and imports nothing. It is
bounded, so a dataset of millions of objects takes no longer than one of hundreds.
"""

from __future__ import annotations

import io
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import islice
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType
from typing import Any, Final

import numpy as np
import torch

_MAX_OBJECTS: Final = 250
"""How many objects of a dataset are looked at, those nearest to it first."""
_MAX_ITEMS: Final = 16
"""How many items of a container are looked at."""
_MAX_ATTRIBUTES: Final = 100

_LEAVES: Final = {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice}

_DATA: Final = (type, Enum, torch.Tensor, np.ndarray, np.generic, set, frozenset)
_CONTAINERS: Final = {list, tuple, dict, OrderedDict}
_GENERATORS: Final = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    torch.Generator,
)

_SHARE_THEMSELVES: Final = {
    *("_thread", "asyncio", "concurrent", "logging", "multiprocessing", "threading", "weakref"),
    *("h5py", "numpy", "pandas", "pyarrow"),
    *("boto3", "botocore", "fsspec", "redis", "urllib3"),
    "zipfile",  # A ZipFile has a lock, and moves its file to the position that it needs.
}
"""Packages whose objects are not searched: they guard the files and connections that they hold."""

_POSITION: Final = "and threads move each other's position; open it in each call or thread"
_CURSOR: Final = "whose result one thread takes from another; use one for each thread"
_PARAMETERS: Final = "which keeps the random parameters of a call on itself"
_UNSAFE: Final[dict[tuple[str, str], str | None]] = {
    ("_io", "_IOBase"): f"an open file ({{}}), {_POSITION}",
    ("tarfile", "TarFile"): f"an open archive ({{}}), {_POSITION}",
    ("cv2", "VideoCapture"): f"an open video ({{}}), {_POSITION}",
    ("decord", "VideoReader"): f"an open video ({{}}), {_POSITION}",
    ("torchcodec", "VideoDecoder"): f"an open video ({{}}), {_POSITION}",
    ("torchcodec", "AudioDecoder"): f"an open recording ({{}}), {_POSITION}",
    ("av", "InputContainer"): f"an open video ({{}}), {_POSITION}",
    ("soundfile", "SoundFile"): f"an open recording ({{}}), {_POSITION}",
    ("sqlite3", "Connection"): "a database connection (sqlite3); use one for each thread",
    ("sqlite3", "Cursor"): f"a database cursor (sqlite3), {_CURSOR}",
    ("psycopg", "Cursor"): f"a database cursor (psycopg), {_CURSOR}",
    ("psycopg2", "cursor"): f"a database cursor (psycopg2), {_CURSOR}",
    ("pymysql", "Connection"): "a database connection (pymysql); use one for each thread",
    ("redis", "Pipeline"): "a redis pipeline, whose commands threads mix; make one in each call",
    ("redis", "PubSub"): "a redis connection (PubSub); use one for each thread",
    # py-lmdb's types do not say their module. Threads may share the environment.
    ("builtins", "Transaction"): "an LMDB transaction; begin one in each call",
    ("builtins", "Cursor"): f"an LMDB cursor, {_POSITION}",
    # All of MONAI's random transforms. Its Compose inherits from them to seed what it holds.
    ("monai", "Compose"): None,
    ("monai", "ThreadUnsafe"): f"MONAI's {{}}, {_PARAMETERS}",
    ("monai", "Randomizable"): f"MONAI's {{}}, {_PARAMETERS}",
    ("audiomentations", "BaseTransform"): f"audiomentations' {{}}, {_PARAMETERS}",
    ("audiomentations", "BaseWaveformTransform"): f"audiomentations' {{}}, {_PARAMETERS}",
    ("kornia", "AugmentationSequential"): f"kornia's {{}}, {_PARAMETERS}",
    ("transformers", "PreTrainedTokenizerFast"): "a fast tokenizer ({}), which keeps the truncation"
    " and padding of a call on itself",
    ("transformers", "TokenizersBackend"): "a fast tokenizer ({}), which keeps the truncation and"
    " padding of a call on itself",
    ("tokenizers", "Tokenizer"): "a tokenizer, which keeps its truncation and padding on itself",
}
"""What is known of a class and of those that inherit from it, by top-level package and name.

None for what only holds other objects. Not here, because threads may share them: `ZipFile`,
`h5py.File`, an LMDB environment, a redis client, a psycopg connection, NumPy's generators, the
transforms of albumentations and torchio.
"""


def unsafe_to_share(dataset: Any) -> list[str]:
    """Return what threads must not share, of what is found in a dataset: a phrase for each.

    Each phrase names the attribute, such as "dataset.file is an open file (BufferedReader), ...".
    What declares `thread_safe = True` is left out, with all that it holds. It never raises.
    """
    phrases = []
    for place, value in objects_in(dataset, "dataset"):
        if declared(value) is False:
            phrases.append(f"{place} declares that it is not thread_safe")
        elif (phrase := _known_of(type(value))) and not _is_harmless(value, place):
            phrases.append(f"{place} is {phrase.format(type(value).__name__)}")
    return phrases


def shared_threads_warning(findings: list[str], num_threads: int) -> str:
    """Return the warning for threads that share what `unsafe_to_share` has found."""
    listed = "".join(f"\n- {finding}" for finding in findings[:5])
    if len(findings) > 5:
        listed += f"\n- and {len(findings) - 5} more"
    return (
        f"{num_threads} threads share a dataset that is not thread-safe:{listed}\n"
        "This race can make wrong samples without an error. Set num_processes=num_workers, so that "
        "each thread has a process and a dataset of its own, or copy_dataset=True, or open files "
        "and connections in each call or thread. If it is safe, for example because of a lock, say "
        "so with an attribute: thread_safe = True on the dataset."
    )


def declared(value: Any) -> bool | None:
    """Return what an object declares with its attribute `thread_safe`; None if it has none.

    Only the value True declares it safe. A property would be the user's code, and is not called.
    """
    if type(value) in _CONTAINERS:
        return None
    function = value.__func__ if type(value) is MethodType else value
    for names in (attributes_of(function), *map(vars, type(function).__mro__)):
        if "thread_safe" in names:
            return names["thread_safe"] is True
    return None


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return an object's `__dict__`, without calling code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if isinstance(found, dict | MappingProxyType) else {}


def in_container(place: str, key: Any) -> str:
    """Return the place of an item. The key may be an object, whose repr is the user's code."""
    return f"{place}[{key!r}]" if type(key) in _LEAVES else f"{place}[...]"


def generators_in(dataset: Any) -> list[Any]:
    """Return the random number generators that are found in a dataset. It never raises."""
    found = objects_in(dataset, "dataset", skips_declared=False)
    return [value for _, value in found if isinstance(value, _GENERATORS)]


def objects_in(
    dataset: Any, place: str, *, skips_declared: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield what is found in a dataset and is not plain data, with its place; the nearest first.

    What declares `thread_safe = True` is not searched (`skips_declared`), and nor is what is known
    not to be.
    """
    pending = deque([(place, dataset)])
    seen: set[int] = set()
    while pending and len(seen) < _MAX_OBJECTS:
        place, value = pending.popleft()
        if id(value) in seen or (skips_declared and declared(value)):
            continue
        seen.add(id(value))
        yield place, value
        # A worker may change what is being looked at. The rest is still worth a look.
        with suppress(Exception):
            pending.extend(item for item in _held(value, place) if _is_worth_a_look(item[1]))


def _is_worth_a_look(value: Any) -> bool:
    kind = type(value)
    if kind in _CONTAINERS:  # Most hold plain data, such as numbers or paths and labels.
        items = list(islice(value.values() if issubclass(kind, dict) else value, _MAX_ITEMS))
        return not _LEAVES.issuperset(map(type, items))
    return kind not in _LEAVES and not issubclass(kind, _DATA)


def _held(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the first objects that a value holds, with their places."""
    kind = type(value)
    # Each list() is one step for other threads, which may change what it copies.
    if issubclass(kind, list | tuple | deque):
        base = next(base for base in (list, tuple, deque) if issubclass(kind, base))
        for index, item in enumerate(list(islice(base.__iter__(value), _MAX_ITEMS))):
            yield f"{place}[{index}]", item
    elif issubclass(kind, dict):
        for key, item in list(islice(dict.items(value), _MAX_ITEMS)):
            yield in_container(place, key), item
    elif kind is FunctionType:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # The cell is empty: the variable has no value yet.
                yield f"the variable {name} of {place}", cell.cell_contents
    elif kind is partial:
        yield f"{place}.func", value.func
        yield from _held(value.args, f"{place}.args")
        yield from _held(value.keywords, f"{place}.keywords")
    elif kind is MethodType:
        yield f"{place}.__self__", value.__self__
    if kind not in _CONTAINERS and _is_searched(kind):
        for name, item in list(islice(attributes_of(value).items(), _MAX_ATTRIBUTES)):
            yield f"{place}.{name}", item
        for name, slot in _slots_of(kind):
            with suppress(AttributeError):  # The slot is empty.
                yield f"{place}.{name}", slot.__get__(value)


def _is_searched(kind: type) -> bool:
    packages = (cls.__module__.partition(".")[0] for cls in kind.__mro__)
    return _known_of(kind) is None and not any(name in _SHARE_THEMSELVES for name in packages)


def _slots_of(kind: type) -> Iterator[tuple[str, Any]]:
    for cls in kind.__mro__:
        if "__slots__" in vars(cls):
            for name, slot in vars(cls).items():
                if isinstance(slot, MemberDescriptorType):
                    yield name, slot


def _known_of(kind: type) -> str | None:
    for cls in kind.__mro__:
        key = (cls.__module__.partition(".")[0], cls.__name__)
        if key in _UNSAFE:
            return _UNSAFE[key]
    return None


def _is_harmless(value: Any, place: str) -> bool:
    """Return whether this is a file that threads can share, or that only one of them uses."""
    kind = type(value)
    if kind in {io.BytesIO, io.StringIO}:
        return place.endswith("]")  # One of many: the bytes of one sample.
    if any(value is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return True
    if kind.__module__ != "_io":  # Its `closed` may be the user's code.
        return False
    with suppress(Exception):
        return value.closed or not value.readable()
    return True  # It has been detached, and cannot be read.
