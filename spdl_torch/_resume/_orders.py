"""Which order a sampler has, and the orders that follow from a few numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from .._ranges import Ranges
from .._sampler import GlobalSampler
from ._order import Foresight, Order, drawn_seed, left_of
from ._replayed_order import ReplayedOrder
from ._saved import Saved

__all__ = ["order_of", "restored_order"]


def order_of(sampler: Any) -> Order:
    """The order in which a sampler is going to give its indices."""
    # By exact type, or method: a subclass may do anything.
    if isinstance(sampler, GlobalSampler) and type(sampler).__iter__ is GlobalSampler.__iter__:
        return _GlobalOrder(sampler)
    if type(sampler) is SequentialSampler:
        return _Ascending(sampler)
    if type(sampler) is RandomSampler and sampler.generator is None:
        return _Seeded(sampler)
    return ReplayedOrder(sampler)


def restored_order(sampler: Any, saved: Saved, done: Ranges) -> tuple[Order, Ranges]:
    """The order of a saved state, and what of it is done."""
    order = order_of(sampler)
    kind = saved.text("kind")
    if kind != order.kind:
        raise ValueError(
            f"the state was saved with a sampler of the kind {kind}, but this DataLoader has a "
            f"{order.kind}. Use the same kind of sampler to go on from it."
        )
    return order.restored(saved, done)


class _GlobalOrder(Order):
    """An order of ours: its seed and epoch are all there is to know."""

    def __init__(
        self, sampler: GlobalSampler, start: Ranges | None = None, epoch: int | None = None
    ) -> None:
        self.kind = type(sampler).__name__
        self._sampler = sampler
        self._start = start or Ranges()
        """The positions that had been delivered, by all ranks, before they were dealt out anew."""
        self._saved_epoch = epoch
        self._epoch: int | None = None

    def open(self, done: Ranges) -> Iterator[Any]:
        self._epoch = self._sampler.begin_epoch()
        return self._sampler.indices(self._epoch, self._start, done)

    @property
    def is_partial(self) -> bool:
        return bool(self._start)

    def global_place(self, place: int) -> int:
        return int(self._sampler.position_of(place, self._start))

    def epoch_was_changed(self) -> bool:
        is_open = self._epoch is not None
        return not is_open and self._saved_epoch not in (None, self._sampler.next_epoch)

    def describe(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            "kind": self.kind,
            "seed": sampler.seed,
            "epoch": sampler.next_epoch if self._epoch is None else self._epoch,
            "num_draws": sampler.num_draws,
            "weights": sampler.weights_checksum,
            "rank": sampler.rank,
            "world_size": sampler.num_replicas,
            "start": self._start.as_lists(),
        }

    def following(self) -> Order:
        return _GlobalOrder(self._sampler)

    def restored(self, saved: Saved, done: Ranges) -> tuple[Order, Ranges]:
        sampler = self._sampler
        seed, epoch, start = saved.integer("seed"), saved.integer("epoch"), saved.ranges("start")
        rank, world_size = saved.integer("rank"), saved.integer("world_size")
        if saved.integer("num_draws") != sampler.num_draws:
            raise ValueError(
                f"the state was saved with an epoch of {saved.integer('num_draws')} indices, but "
                f"the sampler now draws {sampler.num_draws}."
            )
        if saved.optional_integer("weights") != sampler.weights_checksum:
            raise ValueError("the state was saved with other weights than the sampler has now.")
        if sampler.num_replicas != world_size or (sampler.rank != rank and not done.is_prefix):
            start, done = _reshard(start, done, world_size, sampler.num_draws), Ranges()
        sampler.set_epoch(epoch)
        sampler.seed = seed
        return _GlobalOrder(sampler, start, epoch), done


def _reshard(start: Ranges, done: Ranges, world_size: int, num_draws: int) -> Ranges:
    """The positions that all ranks have gone through, one of which has done this."""
    if world_size > 1 and not done.is_prefix:
        raise ValueError(
            f"the state was saved by one of {world_size} ranks with in_order=False, and does not "
            "know which batches the other ranks had got out of turn. Give each rank back its own "
            "state, or save with in_order=True to go on with another number of ranks."
        )
    num_positions = num_draws - start.count()
    everything = start.copy()
    for first, last in done:
        for positions in start.missing_ranges(
            first * world_size, min(last * world_size, num_positions)
        ):
            everything.add(*positions)
    return everything


class _Ascending(Order):
    """All indices from 0 up."""

    kind = "SequentialSampler"

    def __init__(self, sampler: SequentialSampler) -> None:
        self._sampler = sampler

    def open(self, done: Ranges) -> Iterator[Any]:
        size = len(self._sampler.data_source)
        return chain.from_iterable(range(start, stop) for start, stop in done.gaps(size))

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def following(self) -> Order:
        return _Ascending(self._sampler)

    def restored(
        self,
        saved: Saved,  # noqa: ARG002 (there is nothing to know)
        done: Ranges,
    ) -> tuple[Order, Ranges]:
        return self, done


class _Seeded(Order):
    """torch's random order of `shuffle=True`: it draws one seed, and the rest follows from that."""

    kind = "RandomSampler"

    def __init__(
        self, sampler: RandomSampler, seed: int | None = None, *, is_drawn: bool = False
    ) -> None:
        self._sampler = sampler
        self._seed = seed
        self._is_drawn = is_drawn
        """The seed has left its generator; or else it was only foreseen."""

    def open(self, done: Ranges) -> Iterator[Any]:
        if not self._is_drawn:
            # Drawn even if it was foreseen, so that what is drawn after it stays the same.
            drawn = drawn_seed()
            self._seed = drawn if self._seed is None else self._seed
            self._is_drawn = True
        assert self._seed is not None
        seeded = copy.copy(self._sampler)
        seeded.generator = torch.Generator().manual_seed(self._seed)
        return left_of(iter(seeded), done)

    def fix(self, seed: int) -> None:
        self._seed, self._is_drawn = seed, True

    def foresee(self, foresight: Foresight) -> None:
        if self._seed is None:
            self._seed = foresight.seed(None)

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "seed": self._seed, "is_drawn": self._is_drawn}

    def following(self) -> Order:
        return _Seeded(self._sampler)

    def restored(self, saved: Saved, done: Ranges) -> tuple[Order, Ranges]:
        seed, is_drawn = saved.integer("seed"), saved.flag("is_drawn")
        return _Seeded(self._sampler, seed, is_drawn=is_drawn), done
