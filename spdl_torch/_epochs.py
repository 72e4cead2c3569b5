"""Which epoch comes next, what it draws, and the saved state of a loader."""

from __future__ import annotations

from typing import Any, Literal

from ._engine import EpochClock
from ._resume import Progress, progress_of, restored_progress
from ._settings import LoaderSettings

__all__ = ["Epochs"]


class Epochs:
    """The epochs of one loader.

    The progress of the last epoch is shared with its iterator, which says what was delivered. It
    does not refer to the iterator, so that the iterator can be collected.
    """

    def __init__(self, kind: Literal["thread", "multiprocessing", "caller"]) -> None:
        self.clock = EpochClock(kind)
        """The clocks of the last epoch."""
        self.current: Progress | None = None
        """The progress of the last iterator that was made."""
        self._next: Progress | None = None
        """The progress of the next iterator, if it was loaded or has been saved already."""
        self._chosen: int | None = None
        """The epoch that `set_epoch` chose, until an iterator has taken it."""
        self.first_draw: int | None = None
        """What torch's generator was about to draw when the first iterator was made."""

    def begin(self, settings: LoaderSettings, *, workers_persist: bool) -> Progress:
        """Return the progress of an epoch whose iterator is being made."""
        view = _View(settings, self, workers_persist)
        progress, self._next = self._next, None
        before = self.current
        # Persistent workers, and a sampler with a state, are where the last epoch left them.
        if progress is None and before is not None and (before.is_over or workers_persist):
            progress = before.following(view)
        self.current = progress or progress_of(view)
        self._chosen = None
        self.current.begin(settings.dataset)
        return self.current

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch of a loader with a seed."""
        if self._chosen is not None:
            return self._chosen
        if self.current is None:
            return 0
        return self.current.epoch + self.current.has_drawn

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that a seed makes the order and the draws from."""
        if self._next is not None:
            self._next.choose_epoch(epoch)
        elif self.current is not None and not self.current.has_drawn:
            # Frameworks choose the epoch after they have made the iterator.
            self.current.choose_epoch(epoch)
        else:
            self._chosen = epoch

    def state_dict(self, settings: LoaderSettings, *, workers_persist: bool) -> dict[str, Any]:
        view = _View(settings, self, workers_persist)
        progress = self._next
        if progress is None:
            progress = self.current
            if progress is None:
                progress = self._next = progress_of(view)
            elif progress.is_over:
                progress = self._next = progress.following(view)
        progress.foresee(view)
        return progress.state_dict(view)

    def load_state_dict(self, settings: LoaderSettings, state: dict[str, Any]) -> None:
        """Let the next epoch resume from a state. If the state does not fit, nothing changes."""
        self._next = restored_progress(_View(settings, self, False), state)
        self.first_draw = self._next.first_draw

    def copied(self, settings: LoaderSettings) -> Epochs:
        """Return the epochs of a copy of the loader, which begins with the same epoch."""
        copied = Epochs(self.clock.kind)
        if self._next is not None:
            state = self.state_dict(settings, workers_persist=False)
            copied.load_state_dict(settings, state)
        elif settings.seed is not None:
            copied._chosen = self.next_epoch
        return copied


class _View:
    def __init__(self, settings: LoaderSettings, epochs: Epochs, workers_persist: bool) -> None:
        self._settings = settings
        self._epochs = epochs
        self._iterator = True if workers_persist else None
        self._next_epoch = epochs.next_epoch
        self._dataset_kind = int(settings.is_iterable)
        self._index_sampler = settings.index_sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)

    @property
    def _first_draw(self) -> int | None:
        return self._epochs.first_draw

    @_first_draw.setter
    def _first_draw(self, value: int | None) -> None:
        self._epochs.first_draw = value
