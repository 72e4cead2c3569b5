"""How far an epoch has come: what map-style and iterable datasets have in common."""

from __future__ import annotations

from typing import Any, Final

from .._permutation import key_of
from .._settings import LoaderSettings
from ._state import EpochState

_WORKERS: Final = 1  # Keeps the seeds of workers apart from those of orders.
_ORDER: Final = 2


class EpochProgress:
    """What was delivered of one epoch.

    It is shared by a loader, which saves it, and the iterator of the epoch. It must not refer to
    either: the workers end when the iterator is collected, and what was delivered can be saved
    after that.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        saved: EpochState | None,
        *,
        base_seed: int | None = None,
        epoch: int = 0,
    ) -> None:
        """Begin an epoch, or resume one from a state; if that does not fit, nothing has changed.

        `base_seed` is the one that torch would draw, if it is known before. `epoch` counts the
        epochs with this base seed, or was chosen by the user.
        """
        self._settings = settings
        self._base_seed = base_seed if saved is None else saved.base_seed
        if self._base_seed is None and settings.seed is not None:
            self._base_seed = _derived_seed(int(settings.seed), _WORKERS)
        self.epoch = epoch if saved is None else saved.epoch
        self.was_drawn = saved is not None and saved.has_begun
        """The epoch was resumed, and its seeds had been drawn when it was saved."""
        self._dataset_state: Any = None
        """The state of a map-style dataset, until it is restored."""
        self.has_begun = False
        """An iterator was made for the epoch."""
        self.has_drawn = False
        """The first indices of the epoch have been drawn."""
        self.is_over = False
        """The iterator has raised StopIteration."""

    def choose_epoch(self, epoch: int) -> None:
        """Become another epoch of a loader with `seed=`, if nothing has been drawn yet."""
        if not self.has_drawn and epoch != self.epoch:
            self.epoch = epoch
            self._start_over()

    def _start_over(self) -> None:
        """Forget what was resumed."""

    def begin(self, dataset: Any) -> None:
        """Note that an iterator is about to be made for the epoch."""
        # The dataset may keep the generator from which the epoch's seeds are drawn. So a state that
        # was saved before they were drawn is restored before they are drawn.
        if not self.was_drawn:
            self.restore_dataset(dataset)
        self.has_begun = True

    def restore_dataset(self, dataset: Any) -> None:
        """Restore the state of a map-style dataset, if that is still to be done."""
        if self._dataset_state is not None:
            dataset.load_state_dict(self._dataset_state)
            self._dataset_state = None

    def take_base_seed(self, drawn: int) -> None:
        """Use the base seed that torch has drawn, unless another is known."""
        if self._base_seed is None:
            self._base_seed = drawn

    @property
    def base_seed(self) -> int:
        assert self._base_seed is not None
        return self._base_seed

    @property
    def seed_of_workers(self) -> int:
        """What torch calls the base seed: a worker's own seed is that plus its number."""
        if self._settings.seed is None:
            return self.base_seed
        # With `seed=` the base seed is the same in every epoch, but the draws must not be.
        return _derived_seed(self.base_seed, self.epoch, _WORKERS)

    @property
    def _order_seed(self) -> int | None:
        """The seed of the order in a loader with `seed=`."""
        is_seeded = self._settings.seed is not None
        return _derived_seed(self.base_seed, self.epoch, _ORDER) if is_seeded else None

    def _seed_state(self, *, workers_persist: bool) -> dict[str, Any]:
        """Return the fields of a state that say what was drawn."""
        # Persistent workers keep the seeds that were drawn for them.
        has_begun = self.was_drawn or self.has_begun or workers_persist
        generator = self._settings.generator
        return {
            "has_begun": has_begun,
            "base_seed": self._base_seed,
            "epoch": self.epoch,
            "generator": None if generator is None else generator.get_state(),
        }


def _derived_seed(*parts: int) -> int:
    # As torch draws them: a positive number of 64 bits.
    return key_of(*parts) >> 1
