"""Replace the tensors in a batch of any structure."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from operator import is_
from typing import Any, Final

import torch

_HOLDS_NOTHING: Final = {bool, bytes, complex, float, int, str, type(None)}
_NOT_A_SEQUENCE: Final = (str, bytes, bytearray, memoryview, collections.UserString)


def replaced(batch: Any, replace: Callable[[Any], Any]) -> Any:
    """Return the batch with `replace` called on each leaf; the same object if nothing changed.

    Leaves are tensors, and objects whose class has `to()`. Goes into mappings, sequences, named
    tuples and dataclasses, and keeps their types. Values of other types stay as they are.
    """
    # Looked up in the class: a mapping whose keys are attributes may have a key "to".
    if isinstance(batch, torch.Tensor) or callable(getattr(type(batch), "to", None)):
        return replace(batch)
    if type(batch) in _HOLDS_NOTHING or isinstance(batch, _NOT_A_SEQUENCE):
        return batch
    parts: dict[Any, Any]
    like: Callable[[Any, dict[Any, Any]], Any]
    # Before mappings: the outputs of transformers' models are both, and take only attributes.
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
        parts = {name: getattr(batch, name) for name in names}
        like = _dataclass_like
    elif isinstance(batch, Mapping):
        parts, like = dict(batch.items()), _mapping_like
    elif isinstance(batch, Sequence):
        parts, like = dict(enumerate(batch)), _sequence_like
    else:
        return batch
    olds = parts.values()
    if set(map(type, olds)) <= _HOLDS_NOTHING:  # Long lists of tokens and the like.
        return batch
    news = [replaced(old, replace) for old in olds]
    return batch if all(map(is_, olds, news)) else like(batch, dict(zip(parts, news, strict=True)))


def _dataclass_like(batch: Any, values: dict[str, Any]) -> Any:
    clone = copy.copy(batch)
    is_frozen = type(batch).__dataclass_params__.frozen
    for name, value in values.items():
        if value is getattr(batch, name):
            continue
        if is_frozen:
            object.__setattr__(clone, name, value)
        else:
            setattr(clone, name, value)
    return clone


def _mapping_like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    try:
        if not isinstance(batch, MutableMapping):
            return type(batch)(values)  # type: ignore[call-arg]
        clone = copy.copy(batch)
        if getattr(batch, "__dict__", None) is batch:  # Its attributes are its items.
            clone.__dict__ = clone  # type: ignore[assignment]
        for key, value in values.items():
            clone[key] = value
    except TypeError:
        return values
    return clone


def _sequence_like(batch: Sequence[Any], values: dict[int, Any]) -> Any:
    if isinstance(batch, MutableSequence):
        clone = copy.copy(batch)
        for position, value in values.items():
            clone[position] = value
        return clone
    kind: Any = type(batch)
    items = tuple(values.values())
    try:
        # A tuple is not made by its constructor, which may take other arguments.
        clone = tuple.__new__(kind, items)
    except TypeError:  # No tuple, or a result of torch.max() and the like.
        try:
            return kind(list(items))
        except TypeError:
            return items
    if hasattr(batch, "__dict__"):
        clone.__dict__.update(batch.__dict__)
    return clone
