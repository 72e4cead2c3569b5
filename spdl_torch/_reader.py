"""Reading an iterable dataset, and knowing where one is in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from ._saved import Saved, is_stateful, state_of

__all__ = ["Reader", "SampleCount"]


class SampleCount:
    """How many samples a worker has been asked for, the one that is being made included."""

    epoch = 0
    number = 0


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
        is_over: bool = False,
    ) -> None:
        """Open the dataset.

        Args:
            dataset: an iterable dataset of the worker's own.
            batched: whether a batch or a single sample is drawn at a time.
            drop_last: whether a last batch that is not full is left out.
            count: kept up to date, for who wants to know where the reader is.
            saved: a bookmark to go on from.
            is_over: the bookmark is at the end of an epoch, and this is the one after it.

        """
        self._dataset = dataset
        self._batched = batched
        self._drop_last = drop_last
        self._count = count
        count.epoch += 1
        count.number = 0
        self._may_be_at_end = False
        if saved is not None and "dataset" in saved:
            dataset.load_state_dict(saved.anything("dataset"))
            self._may_be_at_end = is_over
        self._fetcher = self._open()
        if saved is not None and not is_over:
            self._go_to(saved)
        self.is_stateful = is_stateful(dataset) or is_stateful(self._iterator)

    def draw(self, drawn: Any) -> Any:
        """The samples of the next batch, or the next sample; raises StopIteration at the end."""
        try:
            samples = self._fetcher.fetch(drawn)
        except StopIteration:
            self._fetcher.ended = True
            if not self._may_be_at_end:
                raise
            # Its state was that of the end, and it did not go back to the beginning by itself.
            self._may_be_at_end = False
            self._fetcher = self._open()
            samples = self._fetcher.fetch(drawn)
        self._may_be_at_end = False
        return samples

    def bookmark(self) -> dict[str, Any]:
        """Where the reader is now, for another one to go on from."""
        bookmark = {"num_samples": self._count.number, "has_ended": self._fetcher.ended}
        if self._iterator is not self._dataset and is_stateful(self._dataset):
            bookmark["dataset"] = state_of(self._dataset)
        if is_stateful(self._iterator):
            bookmark["iterator"] = state_of(self._iterator)
        return bookmark

    def _open(self) -> Any:
        fetcher = _IterableDatasetFetcher(self._dataset, self._batched, _as_it_is, self._drop_last)
        self._iterator = fetcher.dataset_iter
        fetcher.dataset_iter = _counted(self._iterator, self._count)
        return fetcher

    def _go_to(self, saved: Saved) -> None:
        num_samples = saved.integer("num_samples")
        if saved.flag("has_ended"):
            self._fetcher.ended = True
        elif "iterator" in saved:
            self._iterator.load_state_dict(saved.anything("iterator"))
        elif "dataset" not in saved:
            for _ in islice(self._fetcher.dataset_iter, num_samples):
                pass
        self._count.number = num_samples


def _counted(iterator: Iterator[Any], count: SampleCount) -> Iterator[Any]:
    while True:
        count.number += 1
        try:
            sample = next(iterator)
        except StopIteration:
            count.number -= 1
            return
        yield sample


def _as_it_is(samples: Any) -> Any:
    return samples
