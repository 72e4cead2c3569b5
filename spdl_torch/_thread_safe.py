"""Whether threads are known to be able to share a dataset.

What is not known is not assumed. The answer is found by looking: nothing of the user's is called,
and nothing is imported, because an object of a library that is not imported cannot exist.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Generic

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from . import _collate
from ._dataset import StagedDataset
from ._unsafe_to_share import attributes_of, declared, in_container, objects_in

Part = tuple[str, Any]
"""Where an object is, such as "dataset.transform", and the object."""

_SCALARS: Final = (
    *(type(None), int, float, complex, str, bytes, slice, range, Enum, PurePath, ModuleType),
    *(np.generic, np.dtype, torch.dtype, torch.device, torch.Size),
)
# Exact types: a subclass may read its items in its own way. A memory map is only read, and reading
# it moves no position.
_ARRAYS: Final = {np.ndarray, np.memmap, torch.Tensor, torch.nn.Parameter}
_CONTAINERS: Final = {list, tuple, dict, set, frozenset, OrderedDict, defaultdict}
_MAX_SAMPLED: Final = 8
"""How many items of a container are looked at for data. They are alike, and may be a million."""

_AS_THEIR_ATTRIBUTES: Final = {TensorDataset, torch.nn.Sequential, torch.nn.ModuleList}
_WRAPPERS: Final = {Subset, ConcatDataset, StackDataset}

_FUNCTIONS: Final = (
    *(default_collate, default_convert, _collate.default_collate),
    *(torch.tensor, torch.as_tensor, torch.from_numpy, np.array, np.asarray),
)
_MODULES_OF_FUNCTIONS: Final = (
    *("torchvision.transforms.", "torchvision.tv_tensors.", "torchvision.io.image", "torchcodec."),
)
_PACKAGES_OF_TYPES: Final = {"builtins", "numpy", "torch", "torchvision", "PIL"}
_LOADERS: Final = {"default_loader", "pil_loader"}
"""The loaders of torchvision.datasets.folder that use PIL."""

# No transform of torchvision assigns to itself when it is called: a test reads the source of the
# installed version. So an exact class is as thread-safe as its attributes, which may be a user's
# functions: those of Lambda and of SanitizeBoundingBoxes(labels_getter=...), or forward hooks.
_MODULES_OF_TRANSFORMS: Final = ("torchvision.transforms.", "torch.distributions.")
_CLASSES: Final = {
    ("torchvision.datasets.vision", "StandardTransform"),
    ("pycocotools.coco", "COCO"),  # Looks up annotations in dictionaries.
    (f"{__package__}._fuse._chain", "FusedTransform"),
}

# The datasets of torchvision index lists and arrays that __init__ made, open each image file in the
# call that reads it, and assign nothing to themselves in __getitem__ (a test reads the source).
# These are different:
_DATASETS_NOT_KNOWN: Final = {
    "FakeData",  # Seeds the RNG of the process in each call.
    *("HMDB51", "Kinetics", "UCF101"),  # Decode video and audio.
    *("LSUN", "LSUNClass"),  # Keep an LMDB environment open.
    "PCAM",  # Opens and closes the same HDF5 file in each call.
}
_LIBRARIES: Final = ("torch.", "torchvision.")
_MODULES_OF_DATASETS: Final = ("torchvision.datasets.", "torchvision.tv_tensors._dataset_wrapper")


def why_not_thread_safe(dataset: Any, collate_fn: Callable[[Any], Any] | None) -> str | None:
    """Return None if threads are known to be able to share the dataset; else what is not known.

    The answer is a phrase, such as "MyDataset is not known to be thread-safe". An attribute
    `thread_safe` of a dataset, transform or function decides for all that it holds: True, or not.
    """
    try:
        return _why_not_dataset(dataset, "dataset") or _why_not(collate_fn, "collate_fn")
    except Exception:  # What cannot be looked at, or holds itself, is not known.
        return f"{type(dataset).__name__} is not known to be thread-safe"


def _why_not_dataset(dataset: Any, place: str) -> str | None:
    if type(dataset) in _CONTAINERS:  # Its items are only looked up, whatever they are.
        return None
    if type(dataset) not in _WRAPPERS or declared(dataset) is not None:
        return _why_not(dataset, place)
    attributes = attributes_of(dataset)
    wrapped = [(f"{place}.dataset", attributes.get("dataset"))]  # Of a Subset.
    wrapped += _items(attributes.get("datasets", ()), f"{place}.datasets")
    return _first(_why_not_dataset(part, where) for where, part in wrapped) or _why_not(
        attributes.get("indices"), f"{place}.indices"
    )


def _why_not(value: Any, place: str) -> str | None:
    if _is_data(value):
        return None
    is_declared = declared(value)
    if is_declared is not None:
        return None if is_declared else f"{place} declares that it is not thread_safe"
    if issubclass(type(value), StagedDataset):
        return _why_not_staged(value, place)
    if _is_dataset_of_torchvision(type(value)):
        return _why_not_torchvision(value, place)
    parts = _parts(value, place)
    if parts is None:
        return _not_known(value, place)
    return _first(_why_not(part, where) for where, part in parts)


def _why_not_staged(dataset: StagedDataset[Any], place: str) -> str | None:
    """Return None for a StagedDataset whose hooks make its samples: they may run in any thread."""
    cls = type(dataset)
    for name in ("__getitem__", "__getitems__"):
        if getattr(cls, name) is not getattr(StagedDataset, name):
            return f"{cls.__name__} has its own {name}, which is not known to be thread-safe"
    return _first(
        f"{where} declares that it is not thread_safe"
        for where, part in objects_in(dataset, place)
        if declared(part) is False
    )


def _parts(value: Any, place: str) -> Iterable[Part] | None:
    """Return what decides whether a value is thread-safe; None if that is not known."""
    kind = type(value)
    parts: Iterable[Part] = ()
    is_known = True
    if kind in _CONTAINERS:
        parts = _items(value, place)
    elif kind is partial:
        keywords = _items(value.keywords, f"{place}.keywords")
        parts = [(f"{place}.func", value.func), *_items(value.args, f"{place}.args"), *keywords]
    elif kind is MethodType:
        # A hook of a StagedDataset, or a method of what declares itself thread-safe.
        owner = value.__self__
        parts = [(f"{place}.__self__", owner)]
        is_known = issubclass(type(owner), StagedDataset) or bool(declared(owner))
    elif kind is FunctionType or kind is BuiltinFunctionType:
        is_known = _is_known_function(value)
        if is_known:
            cells = getattr(value, "__closure__", None) or ()
            parts = ((f"a variable of {place}", cell.cell_contents) for cell in cells)
    elif issubclass(kind, type):
        is_known = value.__module__.partition(".")[0] in _PACKAGES_OF_TYPES
    else:
        is_known = _is_known_class(kind)
        parts = ((f"{place}.{name}", part) for name, part in attributes_of(value).items())
    return parts if is_known else None


def _items(container: Any, place: str) -> Iterator[Part]:
    pairs = container.items() if issubclass(type(container), dict) else enumerate(container)
    return ((in_container(place, key), item) for key, item in pairs)


def _is_data(value: Any, depth: int = 3) -> bool:
    """Return whether a value is plain data, judged by the first items of a container."""
    kind = type(value)
    if kind in _CONTAINERS and depth > 0:
        items = value.values() if issubclass(kind, dict) else value
        return all(_is_data(item, depth - 1) for item in islice(items, _MAX_SAMPLED))
    return kind in _ARRAYS or kind in _CONTAINERS or issubclass(kind, _SCALARS)


def _is_known_function(function: Any) -> bool:
    if any(function is known for known in _FUNCTIONS):
        return True
    module = function.__module__ or ""
    if module == "torchvision.datasets.folder":
        return function.__name__ in _LOADERS
    return module.startswith(_MODULES_OF_FUNCTIONS)


def _is_known_class(kind: type) -> bool:
    image = sys.modules.get(f"{__package__}._image")
    return (
        kind in _AS_THEIR_ATTRIBUTES
        or (image is not None and kind is image.ImageLoader)
        or kind.__module__.startswith(_MODULES_OF_TRANSFORMS)
        or (kind.__module__, kind.__name__) in _CLASSES
    )


# -- torchvision's datasets ------------------------------------------------------------------------


def _is_dataset_of_torchvision(cls: type) -> bool:
    """Return whether this is a known dataset of torchvision, or a subclass with its __getitem__."""
    owner = next((base for base in cls.__mro__ if "__getitem__" in vars(base)), object)
    return owner.__module__.startswith(_MODULES_OF_DATASETS) and not any(
        base.__name__ in _DATASETS_NOT_KNOWN and base.__module__.startswith(_MODULES_OF_DATASETS)
        for base in cls.__mro__
    )


def _why_not_torchvision(dataset: Any, place: str) -> str | None:
    """Return what a subclass or an instance has of its own and uses when it reads a sample."""
    cls = type(dataset)
    used = _names_used_by_reading(cls)
    for base in cls.__mro__:
        # By the class: one that is made with type() says that it is of the module of its metaclass.
        if base not in {object, ABC, Generic} and not base.__module__.startswith(_LIBRARIES):
            for name in sorted(used & vars(base).keys()):
                if not _is_data(vars(base)[name]):
                    return (
                        f"{cls.__name__} has its own {name}, which is not known to be thread-safe"
                    )
    attributes = attributes_of(dataset)
    return _first(
        _why_not(attributes[name], f"{place}.{name}") for name in sorted(used & attributes.keys())
    )


def _names_used_by_reading(cls: type) -> set[str]:
    """Return the names in torchvision's code that reads a sample: attributes, methods, globals."""
    used: set[str] = set()
    pending = ["__getitem__", "__getitems__", "__getattr__", "__getattribute__"]
    while pending:
        name = pending.pop()
        if name not in used:
            used.add(name)
            for base in cls.__mro__:
                if base.__module__.startswith("torchvision."):
                    pending += _names_in(vars(base).get(name))
    return used


def _names_in(function: Any) -> Iterator[str]:
    """Yield the names in the code of a function, static method, property or code object."""
    function = getattr(function, "fget", getattr(function, "__func__", function))
    code = getattr(function, "__code__", function)
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:  # Comprehensions and inner functions.
            yield from _names_in(constant)


# -- words -----------------------------------------------------------------------------------------


def _not_known(value: Any, place: str) -> str:
    kind = type(value)
    if place == "dataset":
        return f"{kind.__name__} is not known to be thread-safe"
    if kind is FunctionType or kind is BuiltinFunctionType:
        name = value.__name__
        what = "a lambda" if name == "<lambda>" else f"the function {name}"
    elif kind is MethodType:
        what = f"the method {value.__func__.__qualname__}"
    else:
        what = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
    return f"{place} is {what}, which is not known to be thread-safe"


def _first(phrases: Iterable[str | None]) -> str | None:
    return next((phrase for phrase in phrases if phrase is not None), None)
