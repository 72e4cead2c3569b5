"""The order of an epoch's indices, and how it is found again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from .._ranges import Ranges
from ._saved import Saved

__all__ = ["Foresight", "Order", "drawn_seed", "left_of"]


class Foresight:
    """What torch's generators are going to give, without drawing it from them."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Generator] = {}

    def seed(self, generator: torch.Generator | None) -> int:
        return drawn_seed(self._copy_of(generator))

    def state(self, generator: torch.Generator | None) -> torch.Tensor:
        return self._copy_of(generator).get_state()

    def _copy_of(self, generator: torch.Generator | None) -> torch.Generator:
        generator = generator or torch.default_generator
        if id(generator) not in self._copies:
            self._copies[id(generator)] = generator.clone_state()
        return self._copies[id(generator)]


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed, as torch draws its own."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class Order:
    """The indices of one epoch, as one sampler gives them."""

    kind: str
    """The sampler's name in a state."""

    def open(self, done: Ranges) -> Iterator[Any]:
        """The indices of the epoch but for those at the places that are done."""
        raise NotImplementedError

    def epoch_was_changed(self) -> bool:
        """Another epoch was chosen after this one had been restored."""
        return False

    def foresee(self, foresight: Foresight) -> None:
        """Decide what has not been decided yet, as it will be if nobody else draws meanwhile."""

    def fix(self, seed: int) -> None:
        """Draw the order from this seed, if it would be drawn from torch's generator."""

    has_marks = False
    """The sampler has a state, which is kept for every draw that may have to be gone back to."""

    def make_mark(self) -> None:
        """Ask the sampler, if it has a state, where it is now."""

    def drop_marks_before(self, place: int) -> None:
        """Nobody will have to go back to a place before this one."""

    @property
    def first_place(self) -> int:
        """The place from which the order is described, and all others are counted."""
        return 0

    def global_place(self, place: int) -> int:
        """The place in the order of all ranks together."""
        return place

    @property
    def is_partial(self) -> bool:
        """Something of the epoch is left out of the order, because it was done before."""
        return False

    def describe(self) -> dict[str, Any]:
        """What it takes to find the order again, from its first place on."""
        raise NotImplementedError

    def following(self) -> Order:
        """The order of the epoch after this one, which has come to its end."""
        raise NotImplementedError

    def restored(self, saved: Saved, done: Ranges) -> tuple[Order, Ranges]:
        """The order that was described so, and what of it is done."""
        raise NotImplementedError


def left_of(indices: Iterator[Any], done: Ranges) -> Iterator[Any]:
    """All but those at the places that are done."""
    place = 0
    for start, stop in done:
        yield from islice(indices, start - place)
        for _ in islice(indices, stop - start):
            pass
        place = stop
    yield from indices
