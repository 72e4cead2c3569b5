"""How far an epoch of an iterable dataset has come: where its workers are."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from ._base import FORMAT, Progress, seed_and_epoch, seed_of_workers
from ._order import Foresight
from ._reader import Reader, SampleCount
from ._saved import Saved, is_stateful

__all__ = ["IterableProgress"]


class IterableProgress(Progress):
    """Where each worker is in its dataset, as far as its batches have been delivered."""

    def __init__(
        self,
        loader: Any,
        bookmarks: dict[int, dict[str, Any]] | None = None,
        *,
        next_worker: int = 0,
        num_batches: int = 0,
        is_restored: bool = False,
        had_begun: bool = False,
        base_seed: int | None = None,
        epoch: int = 0,
        shared_seed: int | None = None,
        count: SampleCount | None = None,
        last_reader: Reader | None = None,
    ) -> None:
        super().__init__(base_seed, epoch=epoch, had_begun=had_begun)
        self._last_reader = last_reader
        """The calling thread's in the epoch before this one, until it is asked where it ended."""
        self.count = count or SampleCount()
        """Of the calling thread, if that reads the dataset."""
        self._is_restored = is_restored
        """The datasets are to be taken to the bookmarks; or else they are there already."""
        self._num_workers = loader.num_workers
        self._is_seeded = loader.seed is not None
        self._draws = loader._index_sampler
        self._bookmarks = bookmarks or {}
        self._final_bookmarks: dict[int, dict[str, Any]] = {}
        """Of the workers that have come to the end of their dataset, delivered or not."""
        self.next_worker = next_worker
        """Whose turn it is."""
        self._num_batches = num_batches
        self._shared_seed = shared_seed
        self._has_delivered = False
        self._reader: Reader | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._draws)

    def take_shared_seed(self, drawn: int | None) -> int | None:
        """The seed of the epoch's datapipes: the one that was drawn, unless another was saved."""
        if self._shared_seed is None:
            self._shared_seed = drawn
        return self._shared_seed

    def foresee(self, loader: Any) -> None:
        if self.has_begun or not isinstance(loader.dataset, IterDataPipe):
            super().foresee(loader)
        elif self._shared_seed is None:
            # As torch draws them, and in this order.
            foresight = Foresight()
            self._shared_seed = foresight.seed(loader.generator)
            if self._base_seed is None:
                self._base_seed = foresight.seed(loader.generator)

    @classmethod
    def of(cls, loader: Any) -> IterableProgress:
        """The progress of an epoch that is to begin."""
        return cls(loader, **seed_and_epoch(loader))

    def choose_epoch(self, epoch: int) -> None:
        if not self.has_drawn:
            self._epoch = epoch

    @property
    def seed_of_workers(self) -> int:
        return seed_of_workers(self.base_seed, self._epoch) if self._is_seeded else self.base_seed

    def sample_key(self, worker_id: int, number: int) -> tuple[int, ...]:
        """What the random numbers of a worker's sample depend on."""
        assert self._base_seed is not None
        return self._base_seed, self._epoch, worker_id, number

    def open(
        self,
        dataset: Any,
        worker_id: int,
        *,
        batched: bool,
        drop_last: bool,
        count: SampleCount,
    ) -> Reader:
        """A reader for one worker, which goes on where that worker was."""
        self.has_drawn = True
        bookmark = self._bookmarks.get(worker_id) if self._is_restored else None
        return Reader(
            dataset,
            batched=batched,
            drop_last=drop_last,
            count=count,
            saved=None if bookmark is None else Saved(bookmark, "the worker's state"),
        )

    def hold(self, reader: Reader) -> None:
        """Ask this reader for its bookmark when it is wanted: nothing is drawn ahead of it."""
        # Only if it has something to say: it keeps the dataset's iterator alive.
        self._reader = reader if reader.is_stateful else None

    def warn_of_skipping(self) -> None:
        """Say how many samples are going to be read in vain, if the datasets have no state."""
        if self._is_restored:
            _warn_of_skipping(
                sum(
                    bookmark["num_samples"]
                    for bookmark in self._bookmarks.values()
                    if not bookmark["has_ended"]
                    and not bookmark["is_over"]
                    and not {"dataset", "iterator"} & bookmark.keys()
                ),
                "samples",
            )

    def num_to_read_again(self) -> int:
        """How many batches worker processes, which do not say where they are, have to repeat."""
        if not self._is_restored:
            return 0
        _warn_of_skipping(self._num_batches, "batches")
        return self._num_batches

    def deliver(self, position: Any) -> None:
        """Count a batch as delivered: of any worker, or of one that says where it is after it."""
        self._num_batches += 1
        if not isinstance(position, tuple):
            self._has_delivered = True
            return
        worker_id, bookmark = position
        self._bookmarks[worker_id] = bookmark
        self.next_worker = (worker_id + 1) % max(1, self._num_workers)

    def come_to_end(self, worker_id: int, bookmark: dict[str, Any]) -> None:
        """A worker has nothing left. Called in its thread."""
        self._final_bookmarks[worker_id] = bookmark

    def begin(self, dataset: Any) -> None:
        super().begin(dataset)
        # Nobody has asked for it yet: what is wrong with it is said to who does.
        with contextlib.suppress(Exception):
            self._ask_last_reader()
        self._last_reader = None

    def _ask_last_reader(self) -> None:
        if self._last_reader is not None:
            self._bookmarks[0] = self._last_reader.bookmark() | {"is_over": True}
            self._last_reader = None

    def state_dict(self, loader: Any) -> dict[str, Any]:
        self._ask_last_reader()
        bookmarks = self._bookmarks
        reader = self._reader
        if reader is not None and (self._has_delivered or reader.knows_place_at_first):
            bookmarks = {0: reader.bookmark()}
        elif is_stateful(loader.dataset):
            # Where those are who have delivered nothing yet.
            at_first = Reader.bookmark_at_first(loader.dataset)
            bookmarks = dict.fromkeys(range(max(1, self._num_workers)), at_first)
            bookmarks |= self._bookmarks
        return {
            "spdl_torch": FORMAT,
            "dataset": "iterable",
            "worker_method": _worker_method(loader),
            "num_workers": self._num_workers,
            "has_begun": self._has_seeds(loader),
            "first_draw": loader._first_draw,
            "batch_size": loader.batch_size,
            "base_seed": self._base_seed,
            "epoch": self._epoch,
            "shared_seed": self._shared_seed,
            "num_batches": self._num_batches,
            "next_worker": self.next_worker,
            "workers": [
                {"worker": worker_id} | copy.deepcopy(bookmark)
                for worker_id, bookmark in sorted(bookmarks.items())
            ],
        }

    def following(self, loader: Any) -> Progress:
        bookmarks = {}
        if loader._iterator is not None:  # Workers that live on keep their datasets.
            # A copy: one that was left in mid-epoch may have workers that come to their end now.
            bookmarks = self._final_bookmarks.copy()
        return IterableProgress(
            loader,
            {worker: bookmark | {"is_over": True} for worker, bookmark in bookmarks.items()},
            count=self.count,
            last_reader=self._reader,
            **self._seed_and_epoch(loader),
        )

    @classmethod
    def restored(cls, loader: Any, saved: Saved) -> IterableProgress:
        num_workers, worker_method = saved.integer("num_workers"), saved.text("worker_method")
        # One worker reads what the calling thread would.
        has_same_number = max(num_workers, 1) == max(loader.num_workers, 1)
        if not has_same_number and (saved.integer("num_batches") or saved.parts("workers")):
            raise ValueError(
                f"the state was saved with num_workers={num_workers}, but this DataLoader has "
                f"{loader.num_workers}. Each worker goes its own way through an IterableDataset, "
                f"so there must be as many to go on. Set num_workers={num_workers}."
            )
        if worker_method != _worker_method(loader):
            raise ValueError(
                f'the state was saved with worker_method="{worker_method}", but this DataLoader '
                f'has "{_worker_method(loader)}".'
            )
        batch_size = saved.optional_integer("batch_size")
        if worker_method == "multiprocessing" and batch_size != loader.batch_size:
            raise ValueError(
                f"the state was saved with batch_size={batch_size}, but this DataLoader has "
                f"{loader.batch_size}. Worker processes only count their batches, so the size must "
                "be the same; worker threads can go on with another."
            )
        bookmarks = {}
        for part in saved.parts("workers"):
            part.integer("num_samples")
            part.flag("has_ended")
            part.flag("is_over")
            bookmarks[part.integer("worker")] = part.values
        is_datapipe = isinstance(loader.dataset, IterDataPipe)
        return cls(
            loader,
            bookmarks,
            next_worker=saved.integer("next_worker"),
            num_batches=saved.integer("num_batches"),
            is_restored=True,
            had_begun=saved.flag("has_begun"),
            base_seed=saved.integer("base_seed"),
            epoch=saved.integer("epoch"),
            shared_seed=saved.integer("shared_seed") if is_datapipe else None,
        )


def _worker_method(loader: Any) -> str:
    return loader.worker_method if loader.num_workers > 0 else "thread"


def _warn_of_skipping(number: int, things: str) -> None:
    if number:
        warnings.warn(
            f"{number} {things} of the IterableDataset are read again and thrown away to get to "
            "where the state was saved. With state_dict() and load_state_dict() on the dataset or "
            "its iterator, and worker threads, it would go there at once.",
            stacklevel=7,  # The line that calls iter().
        )
