"""How fast a training script would be if loading took no time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["CachedLoader"]


class CachedLoader:
    """Gives the first batches of a loader, and then those same batches again and again.

    Put it around the loader of a training script: what the script gains is what a faster loader
    could gain. The batches are the same objects each time, so a loop that changes them in place
    finds them changed.

    Args:
        loader: any loader, also torch's own.
        num_batches: how many real batches to take.
        length: batches in an epoch; as many as the loader has, unless given. Needed for a loader
            without a length.

    """

    def __init__(self, loader: Iterable[Any], num_batches: int, length: int | None = None) -> None:
        if num_batches < 1:
            raise ValueError(f"num_batches is {num_batches}: at least one is needed to repeat.")
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
                "the loader has no length. Give CachedLoader one: length=1000."
            ) from error
        batches = self._batches
        if batches is None:
            batches = []
            for batch in itertools.islice(self.loader, min(self.num_batches, length)):
                batches.append(batch)
                yield batch
            # Complete; a loop that has left earlier begins anew.
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
