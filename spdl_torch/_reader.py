"""Reading an iterable dataset, and knowing where one is in it."""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from ._saved import Saved, is_stateful, state_of

__all__ = ["Reader"]


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
        saved: Saved | None = None,
        is_over: bool = False,
    ) -> None:
        """Open the dataset.

        Args:
            dataset: an iterable dataset of the worker's own.
            batched: whether a batch or a single sample is drawn at a time.
            drop_last: whether a last batch that is not full is left out.
            saved: a bookmark to go on from.
            is_over: the bookmark is at the end of an epoch, and this is the one after it.

        """
        self._dataset = dataset
        self._batched = batched
        self._drop_last = drop_last
        self._num_samples = 0
        self._may_be_at_end = False
        if saved is not None and "dataset" in saved:
            dataset.load_state_dict(saved.anything("dataset"))
            self._may_be_at_end = is_over
        self._fetcher = self._open()
        if saved is not None and not is_over:
            self._go_to(saved)
        self.is_stateful = is_stateful(dataset) or is_stateful(self._fetcher.dataset_iter)

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
        self._num_samples += len(samples) if self._batched else 1
        return samples

    def bookmark(self) -> dict[str, Any]:
        """Where the reader is now, for another one to go on from."""
        bookmark = {"num_samples": self._num_samples, "has_ended": self._fetcher.ended}
        iterator = self._fetcher.dataset_iter
        if iterator is not self._dataset and is_stateful(self._dataset):
            bookmark["dataset"] = state_of(self._dataset)
        if is_stateful(iterator):
            bookmark["iterator"] = state_of(iterator)
        return bookmark

    def _open(self) -> Any:
        return _IterableDatasetFetcher(self._dataset, self._batched, _as_it_is, self._drop_last)

    def _go_to(self, saved: Saved) -> None:
        self._num_samples = saved.integer("num_samples")
        if saved.flag("has_ended"):
            self._fetcher.ended = True
        elif "iterator" in saved:
            self._fetcher.dataset_iter.load_state_dict(saved.anything("iterator"))
        elif "dataset" not in saved:
            for _ in range(self._num_samples):
                if next(self._fetcher.dataset_iter, self) is self:
                    break


def _as_it_is(samples: Any) -> Any:
    return samples
