"""How far an epoch of a map-style dataset has come: which indices were delivered."""

from __future__ import annotations

import operator
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from torch.utils.data import BatchSampler

from .._engine import warn_caller
from .._ranges import Ranges
from .._settings import LoaderSettings
from ._digest import digest_of, lasting
from ._orders import order_of, rank_of
from ._progress import EpochProgress
from ._state import MapState, is_stateful, state_of

LOAD: Final = 1
"""Ends the keys of the load stage."""
PREPROCESS: Final = 0
"""Ends the keys of the preprocess stage, so that it draws other numbers than the load stage."""


class MapProgress(EpochProgress):
    """The indices of an epoch, drawn one batch after the other, and which were delivered."""

    def __init__(self, settings: LoaderSettings, saved: MapState | None, **seeds: int) -> None:
        super().__init__(settings, saved, **seeds)
        batch_sampler = settings.batch_sampler
        self._batch_sampler: BatchSampler | None = None
        """torch's own. How a batch sampler of the user makes its batches is not known."""
        self._sampler = settings.index_sampler
        self._num_units = 1
        """How many places of the order one draw takes."""
        if type(batch_sampler) is BatchSampler:
            self._batch_sampler = batch_sampler
            self._sampler = batch_sampler.sampler
            self._num_units = batch_sampler.batch_size
        self._unit = "batch" if self._sampler is batch_sampler else "sample"
        """What has one place in the order."""
        self._order = order_of(self._sampler, self._order_seed)
        self._offset = 0
        """How many indices of the epoch came before those of the order."""
        self._num_in_turn = 0
        """How many draws were delivered in turn, since the epoch was resumed."""
        self._delivered = Ranges()
        """The numbers of the draws that were delivered out of turn, and after one that was."""
        self._in_flight: deque[tuple[int, Any]] = deque()
        """The number of each draw that was not delivered in turn, and what was drawn, if the
        sampler has a state."""
        self._digests: deque[tuple[int, int]] = deque()
        """The number of draws and the digest of their indices: up to the last that was delivered,
        and for all after it."""
        self._saved = saved
        if saved is not None:
            self._restore(settings.dataset, saved)

    def _restore(self, dataset: Any, saved: MapState) -> None:
        length = _length_of(dataset)
        if saved.length != length:
            raise ValueError(
                f"the state was saved with a dataset of {saved.length} samples, but this one has "
                f"{length}. Use the same dataset to resume from it, or start without the state."
            )
        if saved.unit != self._unit:
            raise ValueError(
                f"the state counts in units of a {saved.unit}, but this DataLoader draws a "
                f"{self._unit} at a time. Use the same kind of batch_sampler to resume from it."
            )
        if saved.dataset_state is not None and not is_stateful(dataset):
            raise ValueError(
                "the state has a state of the dataset, but this dataset has no load_state_dict."
            )
        self._dataset_state, self._offset = saved.dataset_state, saved.offset
        self._order.ahead = saved.ahead or []
        self._order.digest = saved.digest if saved.rank == rank_of(self._sampler) else None
        # Last, because it sets the sampler's epoch.
        self._order.load(saved.sampler, saved.done)

    def _use_current_sampler(self) -> None:
        """Use the sampler that the batch sampler has now, if the epoch has not drawn anything.

        Frameworks replace it after they have loaded a state, or made the iterator.
        """
        batches = self._batch_sampler
        if batches is None or batches.sampler is self._sampler:
            return
        self._sampler = batches.sampler
        self._order = order_of(self._sampler, self._order_seed)
        if self._saved is not None and (self._saved.done or self._saved.offset):
            self._restore(self._settings.dataset, self._saved)

    def follow(self, before: Any, *, workers_persist: bool) -> None:  # noqa: ARG002
        """Begin where the epoch before has ended."""
        self._order.follow(before._order)

    def begin(self, dataset: Any) -> None:
        if self._order.epoch_was_changed():
            self.was_drawn = False
        super().begin(dataset)

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices of each batch."""
        draws, order = self._open(), self._order
        if not order.is_replayed:
            yield from self._kept(draws) if order.is_stateful else draws
            return
        # Keep the digest after each draw until the draw is delivered. What was left out before the
        # last delivered place is in the digest already.
        digest, num_known = order.digest or 0, order.done.stop - order.done.count()
        self._digests.append((0, digest))
        for number, drawn in enumerate(draws, 1):
            indices = [drawn] if self._batch_sampler is None else drawn
            if num_known > 0:
                indices, num_known = indices[num_known:], num_known - len(indices)
            digest = digest_of(indices, digest)
            self._digests.append((number, digest))
            yield drawn

    def _open(self) -> Iterator[Any]:
        """Return the draws of the epoch, but for those that were delivered before."""
        # All this happens with the first draw and not sooner: frameworks choose the epoch after
        # they have made the iterator.
        self.has_drawn = True
        self._use_current_sampler()
        if self._order.epoch_was_changed():
            self._start_over()
        draws, batches = self._order.open(), self._batch_sampler
        if batches is None:
            return map(lasting, draws)
        return iter(BatchSampler(draws, self._num_units, batches.drop_last))

    def _kept(self, draws: Iterator[Any]) -> Iterator[Any]:
        """Yield the draws, and keep each until it is delivered."""
        for number, drawn in enumerate(draws):
            self._in_flight.append((number, lasting(drawn)))  # A dataset may change its list.
            yield drawn

    def _start_over(self) -> None:
        if self._offset or self._order.is_partial:
            warn_caller(
                "set_epoch() has chosen another epoch than that of the loaded state, so it begins "
                "at its first batch. Call set_epoch() with the epoch that was saved, or not at "
                "all, to resume where the state was saved."
            )
        self._order = order_of(self._sampler, self._order_seed)
        self._offset = 0

    def deliver(self, position: Any) -> None:
        """Count a batch as delivered to the training loop, or its error."""
        if position == self._num_in_turn:
            self._num_in_turn += 1
        else:
            self._delivered.add(position, position + 1)
        digests, in_flight = self._digests, self._in_flight
        while len(digests) > 1 and digests[1][0] <= position + 1:
            digests.popleft()
        while in_flight and in_flight[0][0] < self._num_in_turn:
            in_flight.popleft()

    def _all_done(self) -> Ranges:
        """Return the delivered places of the order, counting every draw as full.

        The last batch of an epoch may be smaller, and not on all ranks. Counted as full, it is the
        same number on all of them.
        """
        num_units = self._num_units
        draws = [(0, self._num_in_turn), *self._delivered]
        return self._order.done.filled(
            (start * num_units, stop * num_units) for start, stop in draws
        )

    def sample_key(self, number: int, indices: list[Any], slot: int) -> tuple[int, ...]:
        """Return the key of a sample's random numbers, the same for any workers and batch size.

        The index alone is not enough: a sampler may draw it twice in an epoch. `number` is that of
        the draw, and `slot` the place of the sample in it; below 0, for all samples together.
        """
        number *= self._num_units
        has_place = self._unit == "sample" and slot >= 0
        place = self._order.global_place(number + slot if has_place else number) + self._offset
        return sample_key(self.base_seed, self.epoch, place, indices, slot, has_place=has_place)

    def places(self, number: int, num_indices: int) -> Sequence[int]:
        """Return the places of a draw's samples in the order, or that of the draw if it has one."""
        first = number * self._num_units
        num_places = max(1, num_indices) if self._unit == "sample" else 1
        places = self._order.global_places(range(first, first + num_places))
        return [place + self._offset for place in places] if self._offset else places

    def for_child(self) -> tuple[int, int, bool]:
        """Return what a child process needs to know of the epoch; see `MapKeys`."""
        return self.base_seed, self.epoch, self._unit == "sample"

    def state_dict(self, *, workers_persist: bool) -> dict[str, Any]:
        """Return the state to save. `workers_persist`: workers of the last epoch are kept."""
        if not self.has_drawn:
            self._use_current_sampler()
        if self._order.epoch_was_changed():
            changed = MapProgress(self._settings, None, epoch=self.epoch)
            changed._base_seed, changed.has_begun = self._base_seed, self.has_begun
            return changed.state_dict(workers_persist=workers_persist)
        dataset, order, all_done = self._settings.dataset, self._order, self._all_done()
        dataset_state = self._dataset_state
        if dataset_state is None and is_stateful(dataset):
            dataset_state = state_of(dataset)
        first, ahead, digest = 0, order.ahead, order.digest
        if order.is_stateful:  # Its state describes the order from the first missing place on.
            first, ahead = all_done.first_missing, self._drawn_after(all_done.first_missing)
        elif self._digests and all_done:
            digest = self._digests[0][1]
        done = ((start - first, stop - first) for start, stop in all_done)
        state = MapState(
            length=_length_of(dataset),
            unit=self._unit,
            offset=self._offset + first,
            sampler=order.state().as_dict(),
            done=Ranges((max(start, 0), stop) for start, stop in done),
            digest=digest,
            rank=None if digest is None else rank_of(self._sampler),
            ahead=ahead or None,
            dataset_state=dataset_state,
            **self._seed_state(workers_persist=workers_persist),
        ).as_dict()
        if is_stateful(dataset):
            state.setdefault("dataset_state", None)
        return state

    def _drawn_after(self, first: int) -> list[Any]:
        """Return what was drawn for the places from this one on; None for places long done."""
        drawn: list[Any] = []
        for number, draw in self._in_flight:
            places = draw if self._batch_sampler is not None else [draw]
            for slot, index in enumerate(places):
                place = self._order.done.missing_at(number * self._num_units + slot)
                if place >= first:  # A draw stays in flight if one after it came before it.
                    drawn += [None] * (place - first - len(drawn))
                    drawn.append(index)
        return drawn + self._order.ahead[first + len(drawn) :]


class MapKeys(NamedTuple):
    """The keys of one draw in a child process, where it stands for the position in the progress.

    It belongs to the draw, because a worker may still be busy with one of an abandoned epoch, whose
    numbers are those of the next epoch too.
    """

    base_seed: int
    epoch: int
    has_places: bool
    """Whether each sample has a place of its own, and not the draw as a whole."""
    places: Sequence[int]

    def sample_key(self, indices: list[Any], slot: int) -> tuple[int, ...]:
        """Return the key of a sample's random numbers, that of `MapProgress`."""
        has_place = self.has_places and slot >= 0
        place = self.places[slot if has_place else 0]
        return sample_key(self.base_seed, self.epoch, place, indices, slot, has_place=has_place)


def sample_key(
    base_seed: int, epoch: int, place: int, indices: list[Any], slot: int, *, has_place: bool
) -> tuple[int, ...]:
    """Return a key; `has_place`: the place is that of the sample and not that of its batch."""
    # For all samples together the first stands for the others; a draw may be empty.
    index = indices[max(slot, 0)] if indices else None
    # The index too: several ranks may be at the same place, each of an order of its own.
    return base_seed, epoch, place, 0 if has_place else slot, _number_of(index)


def key_for(key: tuple[int, ...], index: Any) -> tuple[int, ...]:
    """Return the key of another sample in the place of the one whose key this is."""
    return *key[:-1], _number_of(index)


def _number_of(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        return zlib.crc32(repr(index).encode())


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
