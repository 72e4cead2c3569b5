"""Which epoch comes next, what it draws, and the saved state of a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ._engine import EpochClock
from ._resume import IterableProgress, MapProgress, Progress, read, set_sampler_epoch
from ._settings import LoaderSettings


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
        self._loaded: Progress | None = None
        """The progress of the next iterator, if a state was loaded."""
        self._chosen: int | None = None
        """The epoch that `set_epoch` chose, until an iterator has taken it."""

    def begin(self, settings: LoaderSettings, *, workers_persist: bool) -> Progress:
        """Return the progress of an epoch whose iterator is being made."""
        self.current = self._loaded or self._upcoming(settings, workers_persist)
        self._loaded = self._chosen = None
        self.current.begin(settings.dataset)
        return self.current

    def _upcoming(self, settings: LoaderSettings, workers_persist: bool) -> Progress:
        """Return the progress of an epoch for which no state was loaded."""
        before, seeds = self.current, {}
        if settings.seed is not None:
            seeds = {"epoch": self.next_epoch}
        elif workers_persist and before is not None:  # Such workers keep their seeds.
            seeds = {"epoch": before.epoch + 1, "base_seed": before.base_seed}
        progress = _progress_of(settings, None, **seeds)
        # Persistent workers, and a sampler with a state, are where the last epoch left them.
        if before is not None and (before.is_over or workers_persist):
            progress.follow(before, workers_persist=workers_persist)
        return progress

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch of a loader with a seed."""
        if self._chosen is not None:
            return self._chosen
        if self.current is None:
            return 0
        return self.current.epoch + self.current.has_drawn

    def set_epoch(self, settings: LoaderSettings, epoch: int) -> None:
        """Choose the epoch of the sampler, if it has epochs, and what a seed makes of it."""
        if settings.seed is None:
            pass
        elif self._loaded is not None:
            self._loaded.choose_epoch(epoch)
        elif self.current is not None and not self.current.has_drawn:
            # Frameworks choose the epoch after they have made the iterator.
            self.current.choose_epoch(epoch)
        else:
            self._chosen = epoch
        set_sampler_epoch(settings.index_sampler, epoch)

    def state_dict(
        self, settings: Callable[[], LoaderSettings], *, workers_persist: bool
    ) -> dict[str, Any]:
        """Return how far the last epoch has come; if it is over, the beginning of the next."""
        progress = self._loaded or self.current
        if progress is None or progress.is_over:
            progress = self._upcoming(settings(), workers_persist)
        return progress.state_dict(workers_persist=workers_persist)

    def load_state_dict(self, settings: LoaderSettings, state: dict[str, Any]) -> None:
        """Let the next epoch resume from a state. If the state does not fit, nothing changes."""
        saved = read(state, settings.dataset, is_iterable=settings.is_iterable)
        self._loaded = _progress_of(settings, saved)
        if saved.generator is not None and settings.generator is not None:
            settings.generator.set_state(saved.generator)

    def copied(self, settings: LoaderSettings) -> Epochs:
        """Return the epochs of a copy of the loader, which begins with the same epoch."""
        copied = Epochs(self.clock.kind)
        if self._loaded is not None:
            state = self._loaded.state_dict(workers_persist=False)
            copied.load_state_dict(settings, state)
        elif settings.seed is not None:
            copied._chosen = self.next_epoch
        return copied


def _progress_of(settings: LoaderSettings, saved: Any, **seeds: int) -> Progress:
    kind = IterableProgress if settings.is_iterable else MapProgress
    return kind(settings, saved, **seeds)
