"""How far an epoch of an iterable dataset has come: where its workers are."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterDataPipe

from .._engine import warn_caller
from .._settings import LoaderSettings
from ._progress import EpochProgress
from ._state import Bookmark, IterableState, Snapshot, is_stateful, state_of


@dataclass
class SampleCount:
    """How far a worker is in its dataset, from one epoch to the next."""

    epoch: int = 0
    number: int = 0
    """How many samples were asked for in this epoch, with the one that is being made."""
    may_be_at_end: bool = False
    """The dataset was given a state of the end of an epoch, and has not been asked for anything
    since. It may have gone back to the beginning by itself, or do so when it is asked."""


class IterableProgress(EpochProgress):
    """Where each worker is in its dataset, as far as its batches have been delivered."""

    def __init__(self, settings: LoaderSettings, saved: IterableState | None, **seeds: int) -> None:
        super().__init__(settings, saved, **seeds)
        self._is_restored = saved is not None
        """The datasets are to be taken to the bookmarks; if not, they are there already."""
        self._bookmarks: dict[int, Bookmark | Reader] = {}
        """A reader is that of the calling thread, which is asked for its bookmark only when that is
        saved: nothing is drawn ahead of it."""
        self.next_worker = 0
        """The worker whose turn it is."""
        self._num_batches = 0
        self._shared_seed: int | None = None
        if saved is not None:
            _check_workers(settings, saved)
            self._bookmarks = {bookmark.worker: bookmark for bookmark in saved.workers}
            self.next_worker = saved.next_worker
            self._num_batches = saved.num_batches
            self._shared_seed = saved.shared_seed
            if isinstance(settings.dataset, IterDataPipe) and saved.shared_seed is None:
                # Persistent workers keep their seeds, but datapipes draw in every epoch.
                self.was_drawn = False
        self._final_bookmarks: dict[int, Bookmark | Reader] = {}
        """Those of workers that have come to the end of their dataset, delivered or not."""
        self.count = SampleCount()
        """The count of the calling thread, if that reads the dataset."""

    def follow(self, before: Any, *, workers_persist: bool) -> None:
        """Begin where the epoch before has ended; `workers_persist`: with the same workers."""
        self.count = before.count
        if workers_persist or self._settings.num_workers == 0:  # They keep their datasets.
            # A copy: workers of an epoch that was broken off may come to their end now.
            self._bookmarks = before._final_bookmarks.copy()
            for bookmark in self._bookmarks.values():
                bookmark.is_over = True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._settings.index_sampler)

    def take_shared_seed(self, drawn: int | None) -> int | None:
        """Return the seed of datapipes: the one that torch has drawn, unless another is known."""
        if self._shared_seed is None:
            self._shared_seed = drawn
        return self._shared_seed

    def sample_key(self, worker_id: int, number: int) -> tuple[int, ...]:
        """Return the key of the random numbers of a worker's sample."""
        return self.base_seed, self.epoch, worker_id, number

    def open(
        self,
        dataset: Any,
        worker_id: int,
        count: SampleCount,
        replay_context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Reader:
        """Return a reader for one worker, which resumes where that worker was.

        `replay_context` is for what was done before the state was saved and is done again.
        """
        self.has_drawn = True
        bookmark = self._bookmarks.get(worker_id) if self._is_restored else None
        assert not isinstance(bookmark, Reader)
        reader = Reader(
            dataset, bookmark or Bookmark(worker_id), count, self._settings, replay_context
        )
        if self._settings.num_workers == 0 and reader.knows_place_at_first:
            self._bookmarks[0] = reader
        return reader

    def num_to_read_again(self) -> int:
        """Return how many samples without a state are read again and thrown away, with a warning.

        Worker processes have no bookmarks: for them it is the number of batches.
        """
        if not self._is_restored:
            return 0
        number, things = self._num_batches, "batches"
        if not self._settings.uses_processes:
            bookmarks = self._all_bookmarks().values()
            number, things = (
                sum(x.num_samples for x in bookmarks if x.must_be_read_again),
                "samples",
            )
        if number:
            warn_caller(
                f"{number} {things} of the IterableDataset are read again and thrown away to get "
                "to where the state was saved. With state_dict() and load_state_dict() on the "
                "dataset or its iterator, and worker threads, it would go there at once."
            )
        return number

    def deliver(self, position: Any) -> None:
        """Count a batch as delivered to the training loop, or its error."""
        self._num_batches += 1
        if isinstance(position, tuple):
            worker_id, bookmark = position
            self._bookmarks[worker_id] = bookmark
            self.next_worker = (worker_id + 1) % max(1, self._settings.num_workers)

    # -- child processes --------------------------------------------------------------------------

    def for_child(self, received: dict[int, Bookmark], *, is_restart: bool) -> tuple[Any, ...]:
        """Return what a child process needs to know of the epoch; see `begin_in_child`.

        A child that takes the place of another begins where the batches of that have arrived.
        """
        self.has_drawn = True
        is_restored = self._is_restored or is_restart
        bookmarks = {**self._bookmarks, **received} if is_restored else {}
        # The receiving thread has batches that are still to be delivered.
        return self.base_seed, self.epoch, self._shared_seed, is_restored, bookmarks

    @classmethod
    def in_child(cls, settings: LoaderSettings, ends: list[tuple[int, Any]]) -> IterableProgress:
        """Return the progress in a child process, which adds workers at their end to a list."""
        progress = cls(settings, None)
        progress._ends = ends
        return progress

    def begin_in_child(self, description: tuple[Any, ...]) -> None:
        self._base_seed, self.epoch, self._shared_seed, is_restored, bookmarks = description
        self._is_restored, self._bookmarks = is_restored, bookmarks

    _ends: list[tuple[int, Any]] | None = None

    def come_to_end(self, worker_id: int, bookmark: Bookmark | Reader) -> None:
        """Note that a worker has nothing left. Called in its thread."""
        self._final_bookmarks[worker_id] = bookmark
        if self._ends is not None:
            self._ends.append((worker_id, bookmark))

    def begin(self, dataset: Any) -> None:
        super().begin(dataset)
        try:
            self._bookmarks |= self._all_bookmarks()
        except Exception:  # Of the user's state_dict(). It is raised where a state is asked for.
            self._bookmarks.clear()

    def _all_bookmarks(self) -> dict[int, Bookmark]:
        return {
            worker: bookmark.bookmark() if isinstance(bookmark, Reader) else bookmark
            for worker, bookmark in self._bookmarks.items()
        }

    def state_dict(self, *, workers_persist: bool) -> dict[str, Any]:
        """Return the state to save. `workers_persist`: workers of the last epoch are kept."""
        settings = self._settings
        bookmarks = self._all_bookmarks()
        # Workers that have delivered nothing yet are where the dataset is.
        others = set(range(max(1, settings.num_workers))) - bookmarks.keys()
        if others and is_stateful(settings.dataset):
            state = _state_at_first(settings.dataset)
            bookmarks |= {worker: Bookmark(worker, dataset=state) for worker in others}
        return IterableState(
            worker_method=_worker_method(settings),
            num_workers=settings.num_workers,
            batch_size=settings.batch_size,
            shared_seed=self._shared_seed,
            num_batches=self._num_batches,
            next_worker=self.next_worker,
            workers=[bookmarks[worker] for worker in sorted(bookmarks)],
            **self._seed_state(workers_persist=workers_persist),
        ).as_dict()


class Reader:
    """One worker's way through its dataset in one epoch.

    A dataset, or its iterator, that has a state is asked for it and given it back. Any other is
    read again from the beginning, and what had been delivered is thrown away.
    """

    def __init__(
        self,
        dataset: Any,
        bookmark: Bookmark,
        count: SampleCount,
        settings: LoaderSettings,
        replay_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Open the dataset at the bookmark of a worker."""
        self.is_over = False
        """The epoch has ended, and the next one begins from here."""
        self._dataset = dataset
        self._worker_id = bookmark.worker
        self._batched = settings.batched
        self._drop_last = settings.drop_last
        self._count = count
        self._has_ended = False
        count.epoch += 1
        count.number = 0
        # The user's objects may change the states that they are given.
        saved = copy.deepcopy(bookmark)
        if saved.dataset is not None:
            dataset.load_state_dict(saved.dataset)
            count.may_be_at_end = saved.is_over or saved.has_ended
        # The dataset's own load_state_dict is outside: it may restore torch's RNG.
        with replay_context():
            self._iterator: Any = iter(dataset)
        is_own_iterator = self._iterator is dataset
        if saved.is_over:
            # A dataset that is its own iterator has no state before it is iterated.
            if is_own_iterator and saved.iterator is not None:
                dataset.load_state_dict(saved.iterator)
                self._iterator = iter(dataset)
            saved = Bookmark(saved.worker)
        elif saved.iterator is not None and (is_own_iterator or not saved.has_ended):
            self._iterator.load_state_dict(saved.iterator)
        num_since = saved.num_samples if saved.must_be_read_again else saved.num_since or 0
        count.number = saved.num_samples - num_since
        with replay_context():
            for _ in range(num_since):
                # What could not be read has been reported, and an ended dataset stays at its end.
                with contextlib.suppress(Exception):
                    self._next()
        count.number = saved.num_samples
        self._had_ended = self._has_ended = saved.has_ended
        self.is_stateful = is_stateful(dataset) or is_stateful(self._iterator)
        self._snapshot_every_n_steps = settings.snapshot_every_n_steps or math.inf
        self._last: Bookmark | None = None
        """The last bookmark with states."""
        # Snapshots are due after the same steps as in a run that was not interrupted.
        self._num_steps = math.ceil(saved.num_samples / (settings.batch_size or 1))
        if saved.num_samples and not saved.must_be_read_again:
            at_snapshot = saved.num_samples - num_since
            self._last = replace(bookmark, num_samples=at_snapshot, num_since=None)

    def draw(self, drawn: Any) -> Any:
        """Return the samples of the next batch, or the next sample; StopIteration at the end."""
        try:
            samples = self._fetch(drawn)
        except StopIteration:
            self._has_ended = True
            if self._had_ended or not self._count.may_be_at_end:
                raise
            self._count.may_be_at_end = self._has_ended = False
            self._iterator = iter(self._dataset)
            samples = self._fetch(drawn)
        self._count.may_be_at_end = False
        return samples

    def bookmark_after_step(self) -> Bookmark:
        """Return where the reader is now, by its last snapshot unless another one is due."""
        last, self._num_steps = self._last, self._num_steps + 1
        is_due = self._num_steps % self._snapshot_every_n_steps == 0
        if is_due or last is None or self._has_ended or not self.is_stateful:
            self._last = self.bookmark()
            return self._last
        number = self._count.number
        return replace(last, num_samples=number, num_since=number - last.num_samples)

    def bookmark(self) -> Bookmark:
        """Return where the reader is now, for another one to resume from."""
        bookmark = Bookmark(self._worker_id, self._count.number, self._has_ended, self.is_over)
        if self._iterator is not self._dataset and is_stateful(self._dataset):
            bookmark.dataset = Snapshot(self._dataset)
        if is_stateful(self._iterator):
            bookmark.iterator = Snapshot(self._iterator)
        return bookmark

    @property
    def knows_place_at_first(self) -> bool:
        """Whether it has a state that is right before the first sample was drawn.

        A dataset whose `__iter__` is a generator still says then where it was before.
        """
        return self.is_stateful and (
            self._iterator is self._dataset or not is_stateful(self._dataset)
        )

    def _fetch(self, drawn: Any) -> Any:
        if self._has_ended:
            raise StopIteration
        if not self._batched:
            return self._next()
        samples = []
        for _ in drawn:
            try:
                samples.append(self._next())
            except StopIteration:
                self._has_ended = True
                break
        if not samples or (self._drop_last and len(samples) < len(drawn)):
            raise StopIteration
        return samples

    def _next(self) -> Any:
        self._count.number += 1
        try:
            return next(self._iterator)
        except StopIteration:
            self._count.number -= 1
            raise


def _state_at_first(dataset: Any) -> Any:
    """Return the state of a dataset that no worker has opened, or None."""
    # A dataset may have no state before it is iterated, and one that is its own iterator could not
    # be given it. Then it begins at its beginning.
    if not hasattr(dataset, "__next__"):
        with contextlib.suppress(Exception):
            return state_of(dataset)
    return None


def _check_workers(settings: LoaderSettings, saved: IterableState) -> None:
    """Raise if the workers of a state cannot be resumed by the workers of this loader."""
    # One worker reads what the calling thread would.
    has_same_number = max(saved.num_workers, 1) == max(settings.num_workers, 1)
    if not has_same_number and (saved.num_batches or saved.workers):
        raise ValueError(
            f"the state was saved with num_workers={saved.num_workers}, but this DataLoader has "
            f"{settings.num_workers}. Each worker reads its part of an IterableDataset, so there "
            f"must be as many to resume. Set num_workers={saved.num_workers}."
        )
    worker_method = _worker_method(settings)
    if saved.worker_method != worker_method:
        raise ValueError(
            f'the state was saved with worker_method="{saved.worker_method}", but this DataLoader '
            f'has "{worker_method}".'
        )
    if worker_method == "multiprocessing" and saved.batch_size != settings.batch_size:
        raise ValueError(
            f"the state was saved with batch_size={saved.batch_size}, but this DataLoader has "
            f"{settings.batch_size}. Worker processes only count their batches, so the size must "
            "be the same; worker threads can resume with another."
        )


def _worker_method(settings: LoaderSettings) -> str:
    return "multiprocessing" if settings.uses_processes else "thread"
