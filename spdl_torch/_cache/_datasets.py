"""Which parts a dataset has."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any, Final

import torch
from torch.utils.data import Dataset, Subset

from .._dataset import Hooks, hooks_of
from ._parts import Parts

_NUM_ITEMS: Final = 1000
"""How many items of a list or dict are looked at, to tell it from others."""


class _SubsetParts(Parts):
    """The parts of a dataset for a Subset of it: all but the hooks take the index of the whole."""

    def __init__(self, subset: Subset[Any], hooks: Hooks, inner: Parts) -> None:
        super().__init__(subset, hooks)
        self._indices: Sequence[int] = subset.indices
        self._inner = inner
        self.value_level = inner.value_level
        self.is_known, self.only_reads = inner.is_known, inner.only_reads
        self.hands_out = inner.hands_out
        self.raw_fingerprint = inner.raw_fingerprint
        self.value_fingerprint = inner.value_fingerprint
        self.pack = inner.pack  # type: ignore[method-assign]

    def identity(self, index: Any) -> Any:
        return self._inner.identity(self._indices[index])

    def unpack(self, index: Any, packed: Any) -> Any:
        return self._inner.unpack(self._indices[index], packed)

    def make(self, index: Any, raw: Any) -> Any:
        if self._hooks.load is None:  # Then `raw` is the index.
            return super().make(index, raw)
        return self._inner.make(self._indices[index], raw)

    def first(self, index: Any, raw: Any) -> Any:
        whole = self._indices[index]
        return self._inner.first(whole, whole if self._hooks.load is None else raw)

    def rest(self, index: Any, value: Any) -> Any:
        return self._inner.rest(self._indices[index], value)


def parts_of(
    dataset: Any, hooks: Hooks, *, batched: bool, max_side: int | None, token: str | None
) -> Parts:
    """Return how a dataset makes its samples."""
    if type(dataset) is Subset:
        inner_hooks = hooks_of(dataset.dataset, batched=batched)
        inner = parts_of(
            dataset.dataset, inner_hooks, batched=batched, max_side=max_side, token=token
        )
        return _SubsetParts(dataset, hooks, inner)
    if "torchvision.datasets" in sys.modules:  # Otherwise it is none of torchvision.
        from ._vision import vision_parts_of  # noqa: PLC0415

        parts = vision_parts_of(dataset, hooks, max_side)
        if parts is not None:
            return parts
    parts = Parts(dataset, hooks)
    if token is not None:
        length = len(dataset) if hasattr(dataset, "__len__") else None
        digest = hashlib.blake2b(repr(_described(dataset)).encode(), digest_size=12).hexdigest()
        name = f"{_name(dataset)} {digest}, length {length}, token {token!r}"
        parts.raw_fingerprint = f"raw forms of {name}"
        parts.value_fingerprint = f"samples of {name}"
    return parts


# -- attributes ------------------------------------------------------------------------------------


def attributes_of(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a dataset and of those that it wraps, by their places."""
    found: dict[str, Any] = {}
    pending = [("dataset", dataset)]
    seen: set[int] = set()
    while pending:
        place, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for name, item in getattr(value, "__dict__", {}).items():
            at = f"{place}.{name}"
            found[at] = item
            if isinstance(item, torch.Tensor) and not item.is_inference():
                found[f"{at}, version"] = item._version  # Changes in place are counted.
            pending += [(f"{at}[{n}]", inner) for n, inner in enumerate(_datasets_in(item))]
    return found


def _datasets_in(value: Any) -> list[Any]:
    """Return the datasets among the items of an attribute, or the one that it is."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Dataset):
        return [item for item in value if isinstance(item, Dataset)]
    return [value] if isinstance(value, Dataset) else []


def _described(dataset: Any) -> Any:
    """Return what tells a dataset from others of its class, and is the same in another run."""
    described: list[Any] = [_name(dataset)]
    for place, value in attributes_of(dataset).items():
        if "version" not in place and (plain := _plain(value)) is not None:
            described.append((place, plain))
    return described


def _plain(value: Any) -> Any:
    """Return what a value of plain types contains; of a long list some of the items."""
    if isinstance(value, str | bytes | int | float | PurePath):
        return repr(value)
    if isinstance(value, list | tuple):
        some = value[:: max(1, len(value) // _NUM_ITEMS)]
        return len(value), [_plain(item) for item in some]
    if isinstance(value, dict):
        return len(value), [(_plain(k), _plain(v)) for k, v in islice(value.items(), _NUM_ITEMS)]
    return None


def _name(dataset: Any) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"
