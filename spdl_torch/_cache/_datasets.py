"""Which parts a dataset has."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset

from .._dataset import Hooks, hooks_of
from ._parts import Parts


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
        name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        length = len(dataset) if hasattr(dataset, "__len__") else None
        parts.raw_fingerprint = f"raw forms of {name}, length {length}, token {token!r}"
        parts.value_fingerprint = f"samples of {name}, length {length}, token {token!r}"
    return parts
