"""How far an epoch of a map-style dataset has come: which indices were delivered."""

from __future__ import annotations

import copy
import operator
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, Final

from torch.utils.data import BatchSampler

from .._ranges import Ranges
from ._base import FORMAT, Progress, seed_and_epoch, seed_of_order, seed_of_workers
from ._order import Foresight, Order
from ._orders import order_of, restored_order
from ._saved import Saved, is_stateful, state_of

__all__ = ["LOAD", "PREPROCESS", "MapProgress", "key_for"]

LOAD: Final = 1
PREPROCESS: Final = 0
"""Comes last in a key: what a sample draws in one stage has nothing to do with the other."""


class _Draw:
    """How a loader draws its indices: from which sampler, and how many at a time."""

    def __init__(self, loader: Any) -> None:
        batch_sampler = loader.batch_sampler
        self.num_units = 1
        self.unit = "sample"
        self.sampler: Any = loader.sampler
        self._is_batched = type(batch_sampler) is BatchSampler
        if type(batch_sampler) is BatchSampler:
            self.num_units = batch_sampler.batch_size
            self.sampler = batch_sampler.sampler
            self._drop_last = batch_sampler.drop_last
        elif batch_sampler is not None:
            # Somebody's own: how it makes its batches is not known, so they are not taken apart.
            self.unit = "batch"
            self.sampler = batch_sampler

    def batches(self, indices: Iterator[Any]) -> Iterator[Any]:
        if not self._is_batched:
            return indices
        return iter(BatchSampler(indices, self.num_units, self._drop_last))


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
        is_seeded: bool = False,
    ) -> None:
        super().__init__(base_seed, dataset_state, epoch=epoch, had_begun=had_begun)
        self._is_seeded = is_seeded
        """The loader has a seed, from which all is drawn."""
        self._offset = offset
        """How many indices of the epoch came before those of the order, as a sampler that has a
        state gives it."""
        self._draw = draw
        self._order = order
        self._done = done or Ranges()
        """Which indices of the order had been delivered before this progress was restored."""
        self._delivered = Ranges()
        """The numbers of the draws that were delivered since."""

    @classmethod
    def of(cls, loader: Any) -> MapProgress:
        """The progress of an epoch that is to begin."""
        draw = _Draw(loader)
        progress = cls(
            draw,
            order_of(draw.sampler),
            is_seeded=loader.seed is not None,
            **seed_and_epoch(loader),
        )
        progress._fix_order()
        return progress

    @property
    def seed_of_workers(self) -> int:
        # With a seed the base is the same in every epoch, and what is drawn from it must not be.
        return seed_of_workers(self.base_seed, self._epoch) if self._is_seeded else self.base_seed

    def _fix_order(self) -> None:
        if self._is_seeded:
            assert self._base_seed is not None
            self._order.fix(seed_of_order(self._base_seed, self._epoch))

    def choose_epoch(self, epoch: int) -> None:
        if self.has_drawn or epoch == self._epoch:
            return
        self._epoch = epoch
        self._forget()

    def __iter__(self) -> Iterator[Any]:
        # All this happens with the first draw and not sooner: frameworks choose the epoch after
        # they have made the iterator.
        self.has_drawn = True
        if self._order.epoch_was_changed():
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
        self._fix_order()

    def deliver(self, number: int) -> None:
        self._delivered.add(number, number + 1)
        if self._order.has_marks:
            self._order.drop_marks_before(self._all_done().first_missing)

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

    def sample_key(self, number: int, indices: list[Any], slot: int) -> tuple[int, ...]:
        """What the random numbers of a sample depend on: all but who loads it, and with whom.

        The index alone will not do, for a sampler may draw it twice in an epoch.

        Args:
            number: of the draw.
            indices: what was drawn.
            slot: the place of the sample in it; below 0, something of all samples together.

        """
        # Of all samples together the first stands for the others; a draw may be empty.
        index = indices[max(slot, 0)] if indices else None
        number *= self._draw.num_units
        if self._draw.unit == "sample" and slot >= 0:
            number, slot = number + slot, 0
        place = self._order.global_place(self._done.missing_at(number)) + self._offset
        # The index too: several ranks may be at the same place, each of an order of its own.
        return self.base_seed, self._epoch, place, slot, number_of(index)

    @property
    def was_drawn(self) -> bool:
        return super().was_drawn and not self._order.epoch_was_changed()

    def _foresee(self, foresight: Foresight) -> None:
        self._order.foresee(foresight)

    def state_dict(self, loader: Any) -> dict[str, Any]:
        if self._order.epoch_was_changed():
            order = order_of(self._draw.sampler)
            return MapProgress(
                self._draw,
                order,
                base_seed=self._base_seed,
                epoch=self._epoch,
                had_begun=self.has_begun,
            ).state_dict(loader)
        first = self._order.first_place
        done = Ranges(
            (max(start - first, 0), stop - first)
            for start, stop in self._all_done()
            if stop > first
        )
        state = {
            "spdl_torch": FORMAT,
            "dataset": "map",
            "length": _length_of(loader.dataset),
            "has_begun": self._has_seeds(loader),
            "first_draw": loader._first_draw,
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

    def following(self, loader: Any) -> Progress:
        draw = _Draw(loader)
        progress = MapProgress(
            draw,
            self._order.following(),
            is_seeded=self._is_seeded,
            **self._seed_and_epoch(loader),
        )
        progress._fix_order()
        return progress

    @classmethod
    def restored(cls, loader: Any, saved: Saved) -> MapProgress:
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
            is_seeded=loader.seed is not None,
        )


def key_for(key: tuple[int, ...], index: Any) -> tuple[int, ...]:
    """The key of another sample in the place of the one whose key this is."""
    return *key[:-1], number_of(index)


def number_of(index: Any) -> int:
    """A number that tells an index from others."""
    try:
        return operator.index(index)
    except TypeError:
        return zlib.crc32(repr(index).encode())


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
