"""How far an epoch has come: what is the same for all datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ._order import Foresight

if TYPE_CHECKING:
    from .._dataloader import DataLoader

__all__ = ["FORMAT", "Progress"]

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
        """How many epochs there were before with the same seed, in workers that live on."""
        self._dataset_state = dataset_state
        self._had_begun = had_begun
        """An iterator had been made for it before it was saved."""
        self.has_begun = False
        self.is_over = False
        """The training loop has been told that the epoch has ended."""

    def __iter__(self) -> Iterator[Any]:
        """What is drawn for each batch."""
        raise NotImplementedError

    def deliver(self, number: int) -> None:
        """The batch of this draw, counted from 0, has been given to the training loop."""
        raise NotImplementedError

    def take_base_seed(self, drawn: int) -> int:
        """The seed of the epoch's workers: the one that was drawn, unless another was saved."""
        if self._base_seed is None:
            self._base_seed = drawn
        return self._base_seed

    def foresee(self, loader: DataLoader[Any]) -> None:
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

    def state_dict(self, loader: DataLoader[Any]) -> dict[str, Any]:
        raise NotImplementedError

    def following(self, loader: DataLoader[Any]) -> Progress:
        """The epoch after this one, in the same loader."""
        raise NotImplementedError

    def _seed_and_epoch(self, loader: DataLoader[Any]) -> dict[str, Any]:
        # Workers that live on keep their seed.
        if loader._iterator is None:
            return {}
        return {"base_seed": self._base_seed, "epoch": self._epoch + 1}
