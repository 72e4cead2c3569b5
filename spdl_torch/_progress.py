"""How far an epoch has come, as it is saved and restored."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import BatchSampler, IterDataPipe
from torch.utils.data.dataloader import _DatasetKind

from ._order import Foresight, Order, order_of, restored_order
from ._ranges import Ranges
from ._reader import Reader, SampleCount
from ._saved import Saved, is_stateful, state_of

if TYPE_CHECKING:
    from ._dataloader import DataLoader
    from ._pipeline import Record

__all__ = ["IterableProgress", "MapProgress", "Progress", "progress_of", "restored_progress"]

_FORMAT: Final = 1
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


def progress_of(loader: DataLoader[Any]) -> Progress:
    """The progress of an epoch that is to begin."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return IterableProgress(loader)
    draw = _Draw(loader)
    return MapProgress(draw, order_of(draw.sampler))


def restored_progress(loader: DataLoader[Any], state: Any) -> Progress:
    """The progress that a state tells of. Nothing has changed if the state does not fit."""
    saved = Saved(copy.deepcopy(state), "state_dict")
    if "spdl_torch" not in saved:
        raise ValueError(
            "state_dict was not made by spdl_torch.DataLoader: it has no 'spdl_torch', "
            f"but {', '.join(repr(key) for key in list(state)[:5])}."
        )
    if saved.integer("spdl_torch") != _FORMAT:
        raise ValueError(
            f"state_dict has the format {saved.integer('spdl_torch')}, but this version of "
            f"spdl_torch reads {_FORMAT}. Load it with the version that saved it."
        )
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    kind = saved.text("dataset")
    if kind != ("iterable" if is_iterable else "map"):
        raise ValueError(
            f"state_dict is that of {_NAMES.get(kind, kind)}, but this DataLoader has "
            f"{_NAMES['iterable' if is_iterable else 'map']}."
        )
    if is_iterable:
        return IterableProgress.restored(loader, saved)
    return MapProgress.restored(loader, saved)


_NAMES: Final = {"iterable": "an IterableDataset", "map": "a map-style dataset"}


# -- map-style datasets: indices ------------------------------------------------------------------


class _Draw:
    """How a loader draws its indices: from which sampler, and how many at a time."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        batch_sampler = loader.batch_sampler
        self.num_units = 1
        self.unit = "sample"
        self.sampler: Any = loader.sampler
        self.batches: Callable[[Iterator[Any]], Iterator[Any]] = iter
        if type(batch_sampler) is BatchSampler:
            self.num_units = batch_sampler.batch_size
            self.sampler = batch_sampler.sampler
            self._batch_size, self._drop_last = batch_sampler.batch_size, batch_sampler.drop_last
            self.batches = self._in_batches
        elif batch_sampler is not None:
            # Somebody's own: how it makes its batches is not known, so they are not taken apart.
            self.unit = "batch"
            self.sampler = batch_sampler

    def _in_batches(self, indices: Iterator[Any]) -> Iterator[Any]:
        return iter(BatchSampler(indices, self._batch_size, self._drop_last))


class MapProgress(Progress):
    """The indices of an epoch, drawn one batch after the other, and which were delivered."""

    def __init__(
        self,
        draw: _Draw,
        order: Order,
        done: Ranges | None = None,
        *,
        offset: int = 0,
        base_seed: int | None = None,
        epoch: int = 0,
        dataset_state: Any = None,
        had_begun: bool = False,
    ) -> None:
        super().__init__(base_seed, dataset_state, epoch=epoch, had_begun=had_begun)
        self._offset = offset
        """How many indices of the epoch came before those of the order, as a sampler that has a
        state gives it."""
        self._draw = draw
        self._order = order
        self._done = done or Ranges()
        """Which indices of the order had been delivered before this progress was restored."""
        self._delivered = Ranges()
        """The numbers of the draws that were delivered since."""

    def __iter__(self) -> Iterator[Any]:
        # All this happens with the first draw and not sooner: frameworks choose the epoch after
        # they have made the iterator.
        if self._order.was_overruled():
            self._forget()
        draws = self._draw.batches(self._order.open(self._done))
        for drawn in draws:
            self._order.make_mark()
            yield drawn
        self._order.make_mark()

    def _forget(self) -> None:
        if self._done or self._offset or self._order.is_partial:
            warnings.warn(
                "set_epoch() has chosen another epoch than that of the loaded state, so it begins "
                "at its first batch. Call set_epoch() with the epoch that was saved, or not at "
                "all, to go on where the state was saved.",
                stacklevel=5,
            )
        self._order, self._done, self._offset = order_of(self._draw.sampler), Ranges(), 0

    def deliver(self, number: int) -> None:
        self._delivered.add(number, number + 1)
        if self._order.has_marks:
            self._order.go_past(self._all_done().first_missing)

    def _all_done(self) -> Ranges:
        """Which indices of the order have been delivered, counting every draw as full.

        The last batch of an epoch may be smaller, and not on all ranks. Counted as full, it is the
        same number on all of them.
        """
        done = self._done.copy()
        num_units = self._draw.num_units
        for first, last in self._delivered:
            for places in self._done.missing_ranges(first * num_units, last * num_units):
                done.add(*places)
        return done

    def sample_key(self, record: Record, slot: int, stage: int) -> tuple[int, ...]:
        """What the random numbers of a sample depend on: all but who loads it, and with whom.

        The index alone will not do, for a sampler may draw it twice in an epoch.
        """
        if self._draw.unit == "sample" and slot >= 0:
            number, slot = record.number * self._draw.num_units + slot, 0
            index = record.indices[number % self._draw.num_units]
        else:
            number = record.number * self._draw.num_units
            index = record.indices[slot] if slot >= 0 else None
        place = self._order.global_place(self._done.missing_at(number)) + self._offset
        if not isinstance(index, int):
            index = -1
        assert self._base_seed is not None
        return self._base_seed, self._epoch, place, slot, index, stage

    def _foresee(self, foresight: Foresight) -> None:
        self._order.foresee(foresight)

    def state_dict(self, loader: DataLoader[Any]) -> dict[str, Any]:
        if self._order.was_overruled():
            order = order_of(self._draw.sampler)
            return MapProgress(self._draw, order, base_seed=self._base_seed).state_dict(loader)
        first = self._order.first_place
        done = Ranges(
            (max(start - first, 0), stop - first)
            for start, stop in self._all_done()
            if stop > first
        )
        state = {
            "spdl_torch": _FORMAT,
            "dataset": "map",
            "length": _length_of(loader.dataset),
            "has_begun": self._had_begun or self.has_begun,
            "base_seed": self._base_seed,
            "epoch": self._epoch,
            "unit": self._draw.unit,
            "offset": self._offset + first,
            "sampler": self._order.describe(),
            "done": done.as_lists(),
        }
        if self._dataset_state is not None:
            state["dataset_state"] = copy.deepcopy(self._dataset_state)
        elif is_stateful(loader.dataset):
            state["dataset_state"] = state_of(loader.dataset)
        return state

    def following(self, loader: DataLoader[Any]) -> Progress:
        draw = _Draw(loader)
        return MapProgress(
            draw,
            self._order.following(),
            **self._seed_and_epoch(loader),
        )

    @classmethod
    def restored(cls, loader: DataLoader[Any], saved: Saved) -> MapProgress:
        length, length_now = saved.optional_integer("length"), _length_of(loader.dataset)
        if length != length_now:
            raise ValueError(
                f"the state was saved with a dataset of {length} samples, but this one has "
                f"{length_now}. Use the same dataset to go on from it, or start anew."
            )
        draw = _Draw(loader)
        if (unit := saved.text("unit")) != draw.unit:
            raise ValueError(
                f"the state counts in units of a {unit}, but this DataLoader draws a {draw.unit} "
                "at a time. Use the same kind of batch_sampler to go on from it."
            )
        dataset_state = None
        if "dataset_state" in saved or is_stateful(loader.dataset):
            if not is_stateful(loader.dataset):
                raise ValueError(
                    "the state has a state of the dataset, but this dataset has no load_state_dict."
                )
            dataset_state = saved.anything("dataset_state")
        base_seed, has_begun = saved.integer("base_seed"), saved.flag("has_begun")
        epoch, offset = saved.integer("epoch"), saved.integer("offset")
        # Last, because it sets the sampler's epoch.
        order, done = restored_order(draw.sampler, saved.part("sampler"), saved.ranges("done"))
        return cls(
            draw,
            order,
            done,
            offset=offset,
            base_seed=base_seed,
            epoch=epoch,
            dataset_state=dataset_state,
            had_begun=has_begun,
        )


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


# -- iterable datasets: bookmarks -----------------------------------------------------------------


class IterableProgress(Progress):
    """Where each worker is in its dataset, as far as its batches have been delivered."""

    def __init__(
        self,
        loader: DataLoader[Any],
        bookmarks: dict[int, dict[str, Any]] | None = None,
        *,
        next_worker: int = 0,
        num_batches: int = 0,
        is_restored: bool = False,
        base_seed: int | None = None,
        epoch: int = 0,
        shared_seed: int | None = None,
        count: SampleCount | None = None,
    ) -> None:
        super().__init__(base_seed, epoch=epoch)
        self.count = count or SampleCount()
        """Of the calling thread, if that reads the dataset."""
        self._is_restored = is_restored
        """The datasets are to be taken to the bookmarks; or else they are there already."""
        self._num_workers = loader.num_workers
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

    def foresee(self, loader: DataLoader[Any]) -> None:
        if self.has_begun or not isinstance(loader.dataset, IterDataPipe):
            super().foresee(loader)
        elif self._shared_seed is None:
            # As torch draws them, and in this order.
            foresight = Foresight()
            self._shared_seed = foresight.seed(loader.generator)
            if self._base_seed is None:
                self._base_seed = foresight.seed(loader.generator)

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

    def deliver(self, number: int) -> None:  # noqa: ARG002 (every draw is the same)
        self._num_batches += 1
        self._has_delivered = True

    def deliver_from(self, worker_id: int, bookmark: dict[str, Any]) -> None:
        """A batch of this worker's, after which it is there, was given to the training loop."""
        self._num_batches += 1
        self._bookmarks[worker_id] = bookmark
        self.next_worker = (worker_id + 1) % max(1, self._num_workers)

    def come_to_end(self, worker_id: int, bookmark: dict[str, Any]) -> None:
        """A worker has nothing left. Called in its thread."""
        self._final_bookmarks[worker_id] = bookmark

    def state_dict(self, loader: DataLoader[Any]) -> dict[str, Any]:
        bookmarks = self._bookmarks
        reader = self._reader
        if reader is not None and (self._has_delivered or reader.knows_place_at_first):
            bookmarks = {0: reader.bookmark()}
        elif is_stateful(loader.dataset) and not hasattr(loader.dataset, "__next__"):
            # Where those are who have delivered nothing yet. (A dataset that is its own iterator
            # may have no state before it is iterated, and begins anew.)
            at_first = Reader.bookmark_at_first(loader.dataset)
            bookmarks = dict.fromkeys(range(max(1, self._num_workers)), at_first)
            bookmarks |= self._bookmarks
        return {
            "spdl_torch": _FORMAT,
            "dataset": "iterable",
            "worker_method": _worker_method(loader),
            "num_workers": self._num_workers,
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

    def following(self, loader: DataLoader[Any]) -> Progress:
        bookmarks = {}
        if self._reader is not None:
            bookmarks = {0: self._reader.bookmark()}
        elif loader._iterator is not None:  # Workers that live on keep their datasets.
            bookmarks = self._final_bookmarks
        return IterableProgress(
            loader,
            {worker: bookmark | {"is_over": True} for worker, bookmark in bookmarks.items()},
            count=self.count,
            **self._seed_and_epoch(loader),
        )

    @classmethod
    def restored(cls, loader: DataLoader[Any], saved: Saved) -> IterableProgress:
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
            base_seed=saved.integer("base_seed"),
            epoch=saved.integer("epoch"),
            shared_seed=saved.integer("shared_seed") if is_datapipe else None,
        )


def _worker_method(loader: DataLoader[Any]) -> str:
    return loader.worker_method if loader.num_workers > 0 else "thread"


def _warn_of_skipping(number: int, things: str) -> None:
    if number:
        warnings.warn(
            f"{number} {things} of the IterableDataset are read again and thrown away to get to "
            "where the state was saved. With state_dict() and load_state_dict() on the dataset or "
            "its iterator, and worker threads, it would go there at once.",
            stacklevel=7,  # The line that calls iter().
        )
