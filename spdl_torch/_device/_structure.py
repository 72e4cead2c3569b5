"""Replace the tensors in a batch of any structure."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Final

import torch

__all__ = ["replaced"]

_HOLDS_NOTHING: Final = {bool, bytes, complex, float, int, str, type(None)}
_NOT_A_SEQUENCE: Final = (str, bytes, bytearray, memoryview, collections.UserString)


def _is_leaf(value: Any) -> bool:
    """Return whether a value goes to a device as a whole: it is a tensor, or its class has `to()`.

    The object itself is not asked: a mapping whose keys are attributes may have a key "to".
    """
    return isinstance(value, torch.Tensor) or callable(getattr(type(value), "to", None))


def replaced(batch: Any, replace: Callable[[Any], Any]) -> Any:
    """Return the batch with `replace` called on each leaf; the same object if nothing changed.

    Goes into mappings, sequences, named tuples and dataclasses, and keeps their types. Values of
    other types stay as they are.
    """
    if _is_leaf(batch):
        return replace(batch)
    if type(batch) in _HOLDS_NOTHING or isinstance(batch, _NOT_A_SEQUENCE):
        return batch
    # Before mappings: the outputs of transformers' models are both, and take only attributes.
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [f.name for f in dataclasses.fields(batch) if hasattr(batch, f.name)]
        olds: list[Any] = [getattr(batch, name) for name in fields]
        news = _all_replaced(olds, replace)
        changed = [(f, n) for f, o, n in zip(fields, olds, news, strict=True) if o is not n]
        return _dataclass_like(batch, changed) if changed else batch
    if isinstance(batch, Mapping):
        olds = list(batch.values())
        news = _all_replaced(olds, replace)
        return batch if news is olds else _mapping_like(batch, zip(batch, news, strict=True))
    if isinstance(batch, Sequence):
        olds = list(batch)
        news = _all_replaced(olds, replace)
        return batch if news is olds else _sequence_like(batch, news)
    return batch


def _all_replaced(olds: list[Any], replace: Callable[[Any], Any]) -> list[Any]:
    if set(map(type, olds)) <= _HOLDS_NOTHING:  # Long lists of tokens and the like.
        return olds
    news = [replaced(old, replace) for old in olds]
    return olds if all(map(_is, olds, news)) else news


def _is(old: Any, new: Any) -> bool:
    return old is new


def _dataclass_like(batch: Any, fields: Iterable[tuple[str, Any]]) -> Any:
    clone = copy.copy(batch)
    is_frozen = type(batch).__dataclass_params__.frozen
    for name, value in fields:
        if is_frozen:
            object.__setattr__(clone, name, value)
        else:
            setattr(clone, name, value)
    return clone


def _mapping_like(batch: Mapping[Any, Any], items: Iterable[tuple[Any, Any]]) -> Any:
    new = dict(items)
    try:
        if not isinstance(batch, MutableMapping):
            return type(batch)(new)  # type: ignore[call-arg]
        clone = copy.copy(batch)
        if getattr(batch, "__dict__", None) is batch:  # Its attributes are its items.
            clone.__dict__ = clone  # type: ignore[assignment]
        for key, value in new.items():
            clone[key] = value
    except TypeError:
        return new
    return clone


def _sequence_like(batch: Sequence[Any], values: list[Any]) -> Any:
    if isinstance(batch, MutableSequence):
        clone = copy.copy(batch)
        for position, value in enumerate(values):
            clone[position] = value
        return clone
    try:
        return _tuple_like(batch, values) if isinstance(batch, tuple) else type(batch)(values)  # type: ignore[call-arg]
    except TypeError:
        return tuple(values)


def _tuple_like(batch: tuple[Any, ...], values: list[Any]) -> Any:
    try:
        # Not by its constructor, which may take other arguments.
        clone = tuple.__new__(type(batch), values)
    except TypeError:  # The results of torch.max() and the like.
        return type(batch)(values)
    if hasattr(batch, "__dict__"):
        clone.__dict__.update(batch.__dict__)
    return clone
