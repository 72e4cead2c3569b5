"""How far an epoch has come: what is the same for all datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from .._permutation import key_of
from ._order import Foresight

__all__ = ["FORMAT", "Progress", "seed_and_epoch", "seed_of_order", "seed_of_workers"]

_WORKERS: Final = 1
_ORDER: Final = 2
"""What is drawn for one has nothing to do with what is drawn for the other."""

FORMAT: Final = 1
"""Of a state. Raise it when an older state could be misread."""


class Progress:
    """What was delivered of one epoch; or will be, before it has begun.

    It is shared by a loader, which saves it, and the iterator of the epoch. It must not refer to
    either: the iterator's threads end when nobody refers to the iterator any more, and what was
    delivered is still of interest then.
    """

    def __init__(
        self,
        base_seed: int | None = None,
        dataset_state: Any = None,
        *,
        epoch: int = 0,
        had_begun: bool = False,
    ) -> None:
        self._base_seed = base_seed
        self._epoch = epoch
        """How many epochs there were before with the same seed, or which one was chosen."""
        self._dataset_state = dataset_state
        self._had_begun = had_begun
        """An iterator had been made for it before it was saved."""
        self.first_draw: int | None = None
        """In a restored one: what torch drew first in the run that was saved."""
        self.has_begun = False
        self.has_drawn = False
        """Its first indices have been drawn."""
        self.is_over = False
        """The training loop has been told that the epoch has ended."""

    def __iter__(self) -> Iterator[Any]:
        """What is drawn for each batch."""
        raise NotImplementedError

    def deliver(self, number: int) -> None:
        """The batch of this draw, counted from 0, has been given to the training loop."""
        raise NotImplementedError

    @property
    def was_drawn(self) -> bool:
        """Whether the seeds of this epoch were drawn before it was saved."""
        return self._had_begun

    def take_base_seed(self, drawn: int) -> int:
        """The seed of the epoch's workers: the one that was drawn, unless another was saved."""
        if self._base_seed is None:
            self._base_seed = drawn
        return self._base_seed

    def foresee(self, loader: Any) -> None:
        """Decide what the epoch will draw, so that it can be saved before it is drawn."""
        foresight = Foresight()
        if self._base_seed is None:
            self._base_seed = foresight.seed(loader.generator)
        self._foresee(foresight)

    def begin(self, dataset: Any) -> None:
        """An iterator is going to be made for it."""
        self.restore_dataset(dataset, has_begun=False)
        self.has_begun = True

    def restore_dataset(self, dataset: Any, *, has_begun: bool) -> None:
        """Give a map-style dataset its state back, if that is what comes next.

        The state may be a generator's, of the very one from which the epoch's seeds are drawn. So
        it is given back before they are drawn if it was saved before they were drawn.
        """
        if self._dataset_state is not None and has_begun == self._had_begun:
            dataset.load_state_dict(self._dataset_state)
            self._dataset_state = None

    def _foresee(self, foresight: Foresight) -> None:
        pass

    def state_dict(self, loader: Any) -> dict[str, Any]:
        raise NotImplementedError

    def following(self, loader: Any) -> Progress:
        """The epoch after this one, in the same loader."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def base_seed(self) -> int:
        assert self._base_seed is not None
        return self._base_seed

    @property
    def seed_of_workers(self) -> int:
        """What torch calls the base seed: each worker's own is that and its number."""
        return self.base_seed

    def choose_epoch(self, epoch: int) -> None:
        """Be another epoch, if nothing has been drawn yet."""
        raise NotImplementedError

    def _has_seeds(self, loader: Any) -> bool:
        """Whether torch has drawn the seeds, for this epoch or for workers that live on."""
        return self._had_begun or self.has_begun or loader._iterator is not None

    def _seed_and_epoch(self, loader: Any) -> dict[str, Any]:
        if loader.seed is not None:
            return seed_and_epoch(loader)
        # Workers that live on keep their seed.
        if loader._iterator is None:
            return {}
        return {"base_seed": self._base_seed, "epoch": self._epoch + 1}


def seed_and_epoch(loader: Any) -> dict[str, Any]:
    """What is known of the next epoch of a loader before anything is drawn."""
    if loader.seed is None:
        return {}
    # As torch draws it: a positive number of 64 bits.
    return {"base_seed": key_of(int(loader.seed), _WORKERS) >> 1, "epoch": loader._next_epoch}


def seed_of_workers(base_seed: int, epoch: int) -> int:
    """The seed of the workers of an epoch, in a loader with a seed."""
    return key_of(base_seed, epoch, _WORKERS) >> 1


def seed_of_order(base_seed: int, epoch: int) -> int:
    """The seed of the order in which a loader with a seed goes through an epoch."""
    return key_of(base_seed, epoch, _ORDER) >> 1
