"""A loader that repeats its first batches, to time a training script without loading."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["CachedLoader"]


class CachedLoader:
    """Yields the first batches of a loader, and then the same batches again and again.

    Put it around the loader of a training script: the speed-up that it brings is the most that a
    faster loader could bring. The batches are the same objects each time, so a loop that changes
    them in place finds them changed.

    Args:
        loader: any loader, also torch's own.
        num_batches: how many real batches to take.
        length: batches per epoch. Default: as many as the loader has. Needed for a loader without
            a length.

    Examples:
        >>> loader = CachedLoader(DataLoader(range(6), batch_size=2), num_batches=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [0, 1]]

    """

    __module__ = "spdl_torch"

    def __init__(self, loader: Iterable[Any], num_batches: int, length: int | None = None) -> None:
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, got {num_batches}.")
        self.loader = loader
        self.num_batches = num_batches
        self._length = length
        self._batches: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader) if self._length is None else self._length  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        try:
            length = len(self)
        except TypeError as error:
            raise TypeError(
                "the loader has no length. Pass one to CachedLoader, as in length=1000."
            ) from error
        batches = self._batches
        if batches is None:
            batches = []
            for batch in itertools.islice(self.loader, min(self.num_batches, length)):
                batches.append(batch)
                yield batch
            # Only a complete list is kept: a loop that left earlier starts again.
            self._batches = batches
            length -= len(batches)
        if batches:
            yield from itertools.islice(itertools.cycle(batches), length)

    def __repr__(self) -> str:
        return f"CachedLoader({self.loader!r}, num_batches={self.num_batches})"

    def __getattr__(self, name: str) -> Any:
        # Training scripts ask a loader for its dataset, its sampler, its batch size.
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)
