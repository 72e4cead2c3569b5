"""How a dataset makes a sample: what is the same in every epoch, and what is done again."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from .._dataset import Hooks
from .._unsafe_to_share import generators_in
from ._space import KEY_BYTES

ValueLevel: TypeAlias = Literal["decoded", "sample"]


class Parts:
    """A dataset whose `first` part of preprocessing can be kept, if it draws nothing.

    This is what is known of any dataset: the first part is all of it.
    """

    value_level: ValueLevel = "sample"
    """What `first` returns: an image before its random transforms, or the sample."""
    is_known = False
    """Whether `first` is known to return the same in every epoch."""
    only_reads = True
    """Whether `rest` leaves the value that it is given as it is."""
    hands_out = True
    """Whether `rest` returns that value as the sample."""
    raw_fingerprint: str | None = None
    """What the raw form of a sample depends on, beside its identity. None: that is not known."""
    value_fingerprint: str | None = None
    """The same for what `first` returns."""

    def __init__(self, dataset: Any, hooks: Hooks) -> None:
        self._dataset = dataset
        self._hooks = hooks
        self.generators = generators_in(dataset)
        """The generators that the dataset holds, which its code may draw from."""

    def key(self, index: Any) -> bytes | None:
        """Return the key of a sample, or None if it must not be kept."""
        identity = self.identity(index)
        if identity is None:
            return None
        return hashlib.blake2b(repr(identity).encode(), digest_size=KEY_BYTES).digest()

    def identity(self, index: Any) -> Any:
        """Return what tells the sample from others and from its earlier versions, in plain types.

        None: it must not be kept.
        """
        return ("index", index) if _is_plain(index) else None

    def pack(self, raw: Any) -> Any:
        """Return what to keep of the raw form of a sample."""
        return raw

    def unpack(self, index: Any, packed: Any) -> Any:  # noqa: ARG002
        """Return the raw form of a sample, of which that was kept."""
        return packed

    def make(self, index: Any, raw: Any) -> Any:  # noqa: ARG002
        """Preprocess: return the sample for its raw form, or for its index if there is none."""
        return raw if self._hooks.preprocess is None else self._hooks.preprocess(raw)

    def first(self, index: Any, raw: Any) -> Any:
        """Return what is kept instead of the raw form. None: nothing can be."""
        return self.make(index, raw)

    def rest(self, index: Any, value: Any) -> Any:  # noqa: ARG002
        """Return the sample, of what `first` has returned."""
        return value


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    if type(value) is torch.Tensor:  # A sampler may be a tensor of indices.
        return value.ndim == 0 and not value.is_floating_point()
    return type(value) in (int, str, bytes, float, bool) or isinstance(value, np.integer)
