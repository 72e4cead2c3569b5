"""Reading an iterable dataset, and knowing where one is in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from ._saved import Saved, is_stateful, state_of

__all__ = ["Reader", "SampleCount"]


class SampleCount:
    """How far a worker is in its dataset, from one epoch to the next."""

    epoch = 0
    number = 0
    """How many samples it has been asked for, the one that is being made included."""
    may_be_at_end = False
    """The dataset was given a state of the end of an epoch, and has not been asked for anything
    since. It may have gone back to the beginning by itself, or do so when it is asked."""


class Reader:
    """One worker's way through its dataset in one epoch.

    A dataset, or its iterator, that has a state is asked for it and given it back; any other is
    read again from the beginning, and what had been delivered is thrown away.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batched: bool,
        drop_last: bool,
        count: SampleCount,
        saved: Saved | None = None,
    ) -> None:
        """Open the dataset.

        Args:
            dataset: an iterable dataset of the worker's own.
            batched: whether a batch or a single sample is drawn at a time.
            drop_last: whether a last batch that is not full is left out.
            count: kept up to date, for who wants to know where the reader is.
            saved: a bookmark to go on from; or to begin the next epoch from, if it says so.

        """
        self._dataset = dataset
        self._batched = batched
        self._drop_last = drop_last
        self._count = count
        count.epoch += 1
        count.number = 0
        is_over = saved is not None and saved.flag("is_over")
        if saved is not None and "dataset" in saved:
            dataset.load_state_dict(saved.anything("dataset"))
            count.may_be_at_end = is_over or saved.flag("has_ended")
        self._had_ended = False
        self._fetcher = self._open()
        if saved is not None and is_over:
            self._begin_after(saved)
        elif saved is not None:
            self._go_to(saved)
        self.is_stateful = is_stateful(dataset) or is_stateful(self._iterator)

    def draw(self, drawn: Any) -> Any:
        """The samples of the next batch, or the next sample; raises StopIteration at the end."""
        try:
            samples = self._fetcher.fetch(drawn)
        except StopIteration:
            self._fetcher.ended = True
            if self._had_ended or not self._count.may_be_at_end:
                raise
            self._count.may_be_at_end = False
            self._fetcher = self._open()
            samples = self._fetcher.fetch(drawn)
        self._count.may_be_at_end = False
        return samples

    def bookmark(self) -> dict[str, Any]:
        """Where the reader is now, for another one to go on from."""
        bookmark = _bookmark(self._count.number, has_ended=self._fetcher.ended)
        if self._iterator is not self._dataset and is_stateful(self._dataset):
            bookmark["dataset"] = state_of(self._dataset)
        if is_stateful(self._iterator):
            bookmark["iterator"] = state_of(self._iterator)
        return bookmark

    @staticmethod
    def bookmark_at_first(dataset: Any) -> dict[str, Any]:
        """The bookmark of a reader that has not been opened."""
        bookmark = _bookmark(0, has_ended=False)
        # It may have no state before it is iterated, and one that is its own iterator could not be
        # given it. Then it begins anew.
        if not hasattr(dataset, "__next__"):
            with contextlib.suppress(Exception):
                bookmark["dataset"] = state_of(dataset)
        return bookmark

    def _open(self) -> Any:
        fetcher = _IterableDatasetFetcher(self._dataset, self._batched, _as_it_is, self._drop_last)
        self._iterator = fetcher.dataset_iter
        fetcher.dataset_iter = _Counted(self._iterator, self._count)
        return fetcher

    @property
    def knows_place_at_first(self) -> bool:
        """Whether it says where it is before the first sample was drawn.

        A dataset whose `__iter__` is a generator still says then where it was before.
        """
        return self._iterator is self._dataset or not is_stateful(self._dataset)

    def _begin_after(self, saved: Saved) -> None:
        # A dataset that is its own iterator has no state before it is iterated.
        if self._iterator is self._dataset and "iterator" in saved:
            self._iterator.load_state_dict(saved.anything("iterator"))
            self._fetcher = self._open()

    def _go_to(self, saved: Saved) -> None:
        num_samples = saved.integer("num_samples")
        if saved.flag("has_ended"):
            self._fetcher.ended = self._had_ended = True
            if self._iterator is self._dataset and "iterator" in saved:
                self._iterator.load_state_dict(saved.anything("iterator"))
        elif "iterator" in saved:
            self._iterator.load_state_dict(saved.anything("iterator"))
        elif "dataset" not in saved:
            for _ in range(num_samples):
                # What could not be read has been reported, and will be at its end after that.
                with contextlib.suppress(Exception):
                    next(self._fetcher.dataset_iter)
        self._count.number = num_samples


def _bookmark(num_samples: int, *, has_ended: bool) -> dict[str, Any]:
    return {"num_samples": num_samples, "has_ended": has_ended, "is_over": False}


class _Counted:
    """An iterator that keeps count. No generator: that would not go on after an exception."""

    def __init__(self, iterator: Iterator[Any], count: SampleCount) -> None:
        self._iterator = iterator
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._count.number += 1
        try:
            return next(self._iterator)
        except StopIteration:
            self._count.number -= 1
            raise


def _as_it_is(samples: Any) -> Any:
    return samples
