"""The order of an epoch's indices, and how it is found again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, starmap
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from .._ranges import Ranges
from .._sampler import GlobalSampler
from ._digest import digest_of, lasting
from ._state import State, is_stateful, state_of


@dataclass
class SamplerState(State):
    """What it takes to find an order again. `SequentialSampler` needs no more than this."""

    kind: str


_CHUNK: Final = 4096
"""How many indices are replayed at a time."""


class Order:
    """The indices of one epoch, as one sampler returns them. This one: all of them, from 0 up."""

    State: ClassVar[type[SamplerState]] = SamplerState
    is_replayed = False
    """To resume, the sampler draws the delivered indices again. A digest tells if they differ."""
    is_stateful = False
    """The sampler has a state, which is saved together with what was drawn but not delivered."""
    is_partial = False
    """Some of the epoch was delivered before it was resumed."""

    def __init__(self, sampler: Any, seed: int | None) -> None:
        self._sampler = sampler
        self._seed = seed
        self.kind = type(sampler).__name__
        """The name of the sampler in a state."""
        self.done = Ranges()
        """The places that had been delivered before the epoch was resumed."""
        self.digest: int | None = None
        """The digest of the indices up to the last of those places, if it is known."""
        self.ahead: list[Any] = []
        """The first indices of the order, which a sampler with a state had drawn already."""

    def load(self, values: dict[str, Any], done: Ranges) -> None:
        """Become the order of a saved state, of which these places are done."""
        name = "state_dict['sampler']"
        kind = SamplerState.from_dict(values, name).kind
        if kind != self.kind:
            raise ValueError(
                f"the state was saved with a sampler of the kind {kind}, but this DataLoader has a "
                f"{self.kind}. Use the same kind of sampler to resume from it."
            )
        self.done = done
        self._restore(self.State.from_dict(values, name))
        self.is_partial = self.is_partial or bool(done)

    def _restore(self, saved: Any) -> None:
        """Restore what is special about this kind of order."""

    def follow(self, before: Order) -> None:
        """Begin where the order of the epoch before has ended."""

    def open(self) -> Iterator[Any]:
        """Return the indices of the epoch but for those at the places that are done."""
        return chain.from_iterable(starmap(range, self.done.gaps(len(self._sampler.data_source))))

    def epoch_was_changed(self) -> bool:
        """Return whether the user chose another epoch after this one had been restored."""
        return False

    def global_place(self, number: int) -> int:
        """Return the place in the order of all ranks of the index that is opened as number so."""
        return int(self.done.missing_at(number))

    def global_places(self, numbers: range) -> Sequence[int]:
        """Return the same for several indices."""
        if not self.done:
            return numbers
        places: list[int] = self.done.missing_at(np.arange(numbers.start, numbers.stop)).tolist()
        return places

    def state(self) -> SamplerState:
        return SamplerState(self.kind)


def order_of(sampler: Any, seed: int | None = None) -> Order:
    """Return the order of the next epoch of any sampler, or batch sampler.

    With a seed the order is drawn from that, where it would be drawn from torch's generator.
    """
    # By exact type, or method: a subclass may do anything.
    if isinstance(sampler, GlobalSampler) and type(sampler).__iter__ is GlobalSampler.__iter__:
        return _GlobalOrder(sampler, seed)
    if type(sampler) is SequentialSampler:
        return Order(sampler, seed)
    if type(sampler) is RandomSampler and sampler.generator is None:
        return _RandomOrder(sampler, seed)
    return _ReplayedOrder(sampler, seed)


# -- our own samplers -----------------------------------------------------------------------------


@dataclass
class _GlobalState(SamplerState):
    seed: int
    epoch: int
    num_draws: int
    weights: int | None
    """A checksum of the weights."""
    rank: int
    world_size: int
    start: Ranges
    """The positions that all ranks had delivered before the rest was divided among the ranks."""


class _GlobalOrder(Order):
    """The order of a sampler of ours: it follows from seed and epoch, for any number of ranks."""

    State = _GlobalState
    _start = Ranges()
    _saved_epoch: int | None = None
    _epoch: int | None = None
    """The epoch that was opened."""

    def open(self) -> Iterator[Any]:
        self._epoch = self._sampler.begin_epoch()
        indices: Iterator[Any] = self._sampler.indices(self._epoch, self._start, self.done)
        return indices

    def epoch_was_changed(self) -> bool:
        is_open = self._epoch is not None
        return not is_open and self._saved_epoch not in (None, self._sampler.next_epoch)

    def global_place(self, number: int) -> int:
        return int(self._sampler.position_of(self.done.missing_at(number), self._start))

    def global_places(self, numbers: range) -> Sequence[int]:
        places = self.done.missing_at(np.arange(numbers.start, numbers.stop))
        positions: list[int] = self._sampler.position_of(places, self._start).tolist()
        return positions

    def state(self) -> SamplerState:
        sampler = self._sampler
        return _GlobalState(
            kind=self.kind,
            seed=sampler.seed,
            epoch=sampler.next_epoch if self._epoch is None else self._epoch,
            num_draws=sampler.num_draws,
            weights=sampler.weights_checksum,
            rank=sampler.rank,
            world_size=sampler.num_replicas,
            start=self._start,
        )

    def _restore(self, saved: _GlobalState) -> None:
        sampler = self._sampler
        if saved.num_draws != sampler.num_draws:
            raise ValueError(
                f"the state was saved with an epoch of {saved.num_draws} indices, but the sampler "
                f"now draws {sampler.num_draws}."
            )
        if saved.weights != sampler.weights_checksum:
            raise ValueError("the state was saved with other weights than the sampler has now.")
        self._start, self._saved_epoch = saved.start, saved.epoch
        is_same_rank = sampler.rank == saved.rank or self.done.is_prefix
        if sampler.num_replicas != saved.world_size or not is_same_rank:
            self._start, self.done = _reshard(saved, self.done), Ranges()
        self.is_partial = bool(self._start)
        sampler.set_epoch(saved.epoch)
        sampler.seed = saved.seed


def _reshard(saved: _GlobalState, done: Ranges) -> Ranges:
    """Return the positions that all ranks have delivered, if one of them has delivered `done`."""
    world_size = saved.world_size
    if world_size > 1 and not done.is_prefix:
        raise ValueError(
            f"the state was saved by one of {world_size} ranks with in_order=False, and does not "
            "know which batches the other ranks had got out of turn. Give each rank back its own "
            "state, or save with in_order=True to resume with another number of ranks."
        )
    num_positions = saved.num_draws - saved.start.count()
    return saved.start.filled(
        (first * world_size, min(last * world_size, num_positions)) for first, last in done
    )


# -- `shuffle=True` -------------------------------------------------------------------------------


@dataclass
class _RandomState(SamplerState):
    seed: int | None
    """None if it has not been drawn."""


class _RandomOrder(Order):
    """The order of `shuffle=True`: torch draws one seed, from which the rest follows."""

    State = _RandomState
    is_replayed = True

    def open(self) -> Iterator[Any]:
        if self._seed is None:
            self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        seeded = copy.copy(self._sampler)
        seeded.generator = torch.Generator().manual_seed(self._seed)
        return replay(iter(seeded), self)

    def state(self) -> SamplerState:
        return _RandomState(self.kind, self._seed)

    def _restore(self, saved: _RandomState) -> None:
        self._seed = saved.seed


# -- all other samplers ---------------------------------------------------------------------------


@dataclass
class _Mark(State):
    """Where a sampler with a state says it is."""

    has_ended: bool
    sampler: Any
    iterator: Any


@dataclass
class _ReplayedState(SamplerState):
    epoch: int | None
    generator: torch.Tensor | None
    """The state of the sampler's generator before it drew for the epoch."""
    mark: _Mark | None
    is_over: bool
    """The mark is that of an epoch's end, and stands for the beginning of the next epoch."""
    next_generator: torch.Tensor | None = None
    """The state of a generator of the sampler's own, if it has not drawn for the epoch yet."""


class _ReplayedOrder(Order):
    """The order of any other sampler.

    If the sampler or its iterator has a state, that is asked for when a checkpoint is saved. It is
    ahead of the training loop then, so the indices that are still in flight are saved with it. If
    not, the order is replayed from its beginning, with its generator as it was then.
    """

    State = _ReplayedState

    def __init__(self, sampler: Any, seed: int | None) -> None:
        super().__init__(sampler, seed)
        if type(sampler) is RandomSampler:
            self.kind += " with a generator of its own"
        self._saved: _ReplayedState | None = None
        """What it was restored from, until it is opened."""
        self._epoch: int | None = None
        self._generator_before: torch.Tensor | None = None
        """The state of its generator before the first index, if it draws from it."""
        has_order = any(
            isinstance(x, DistributedSampler | Sequence) for x in sampler_layers(sampler)
        )
        may_draw_from_torch = not has_order and _generator_of(sampler) is torch.default_generator
        if seed is not None and may_draw_from_torch:
            self._generator_before = torch.Generator().manual_seed(seed).get_state()
        self._is_after_end = False
        """The sampler is where the epoch before has left it."""
        self._is_open = False
        self._iterator: Any = None
        """The iterator of a sampler with a state."""
        self._loaded_mark: _Mark | None = None
        """Where the sampler was restored to, until it draws: some tell only then where they are."""
        self._has_ended = False

    def _restore(self, saved: _ReplayedState) -> None:
        mark = saved.mark
        if mark is not None and mark.sampler is not None and not is_stateful(self._sampler):
            raise ValueError(
                f"the state has a state of the sampler, but a {self.kind} has no load_state_dict."
            )
        self._saved = saved
        self._generator_before = saved.generator
        if saved.next_generator is not None:
            _generator_of(self._sampler).set_state(saved.next_generator)
        if saved.epoch is not None:
            set_sampler_epoch(self._sampler, saved.epoch)

    def follow(self, before: Order) -> None:
        if before._sampler is self._sampler and isinstance(before, _ReplayedOrder):
            self._is_after_end = before._is_open and is_stateful(self._sampler)

    def open(self) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._is_open, self._is_after_end = True, False
        self._epoch = _epoch_of(self._sampler)
        generator = _generator_of(self._sampler)
        with _generator_at(generator, self._generator_before):
            before = generator.get_state()
            if saved is not None and saved.mark is not None:
                iterator = self._at_mark(saved.mark, is_over=saved.is_over)
                self._loaded_mark = None if saved.is_over else saved.mark
            else:
                iterator = iter(self._sampler)
            is_at_mark = self._loaded_mark is not None
            self.is_stateful = is_at_mark or is_stateful(self._sampler) or is_stateful(iterator)
            self.is_replayed = not self.is_stateful
            if self.is_stateful:
                # Untouched: its state must not be one index ahead.
                self._iterator = iterator
                iterator = self._noting_start_and_end(iterator)
                # What is passed over to resume has been drawn too.
                passed = islice(iterator, max(0, self.done.stop - len(self.ahead)))
                self.ahead += map(lasting, passed)
            else:
                # Most draw with the first index.
                iterator = chain(list(islice(iterator, 1)), iterator)
            has_drawn = not torch.equal(before, generator.get_state())
            self._generator_before = before if has_drawn else None
        return replay(chain(self.ahead, iterator), self)

    def _noting_start_and_end(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for index in islice(iterator, 1):
            self._loaded_mark = None
            yield index
        yield from iterator
        self._has_ended = True

    def _at_mark(self, mark: _Mark, *, is_over: bool) -> Iterator[Any]:
        # A copy for each: the user's object may change its own.
        if mark.sampler is not None:
            self._sampler.load_state_dict(copy.deepcopy(mark.sampler))
        if not is_over and not mark.has_ended:
            if mark.iterator is None:
                return iter(self._sampler)
            with torch.random.fork_rng(devices=[]):  # It has drawn before it was saved.
                iterator: Any = iter(self._sampler)
            iterator.load_state_dict(copy.deepcopy(mark.iterator))
            return iter(iterator)
        # The sampler may be still at the end of its epoch, or have gone back to the beginning by
        # itself. Asked for an index, one at the end goes back too; the other must not have been.
        with torch.random.fork_rng(devices=[]):
            has_index = mark.sampler is not None and list(islice(self._sampler, 1))
        if has_index:
            self._sampler.load_state_dict(copy.deepcopy(mark.sampler))
        return iter(self._sampler) if is_over else iter(())

    def epoch_was_changed(self) -> bool:
        saved = self._saved
        return saved is not None and saved.epoch not in (None, _epoch_of(self._sampler))

    def _mark(self) -> _Mark | None:
        """Return where the sampler says it is, or None if it has no state."""
        if self._loaded_mark is not None:
            return self._loaded_mark
        holders = self._sampler, None if self._iterator is self._sampler else self._iterator
        if not any(map(is_stateful, holders)):
            return None
        states = (state_of(holder) if is_stateful(holder) else None for holder in holders)
        return _Mark(self._has_ended or self._is_after_end, *states)

    def state(self) -> SamplerState:
        if self._saved is not None:
            return self._saved
        generator = _generator_of(self._sampler)
        is_own = generator is not torch.default_generator
        # A sampler with a state and a generator of its own has that in its state.
        is_in_state = self.is_stateful and is_own
        return _ReplayedState(
            kind=self.kind,
            epoch=self._epoch if self._is_open else _epoch_of(self._sampler),
            generator=None if is_in_state else self._generator_before,
            mark=self._mark(),
            is_over=self._is_after_end,
            next_generator=generator.get_state() if is_own and not self._is_open else None,
        )


# -- what samplers of users have ------------------------------------------------------------------


def sampler_layers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it wraps, the innermost last.

    For all samplers of a loader, begin with its index sampler: the batch sampler, if it has one.
    """
    seen: list[Any] = []
    while sampler is not None and not any(sampler is layer for layer in seen):
        yield sampler
        seen.append(sampler)
        sampler = _wrapped_by(sampler)


def _wrapped_by(sampler: Any) -> Any:
    for name in ("sampler", "batch_sampler"):
        if (inner := getattr(sampler, name, None)) is not None:
            return inner
    # Under any other name only what certainly is a sampler.
    attributes = getattr(sampler, "__dict__", {}).values()
    return next((inner for inner in attributes if isinstance(inner, Sampler)), None)


def set_sampler_epoch(sampler: Any, epoch: int) -> None:
    """Call `set_epoch` of the outermost layer that has it."""
    if (layer := _layer_with_epochs(sampler)) is not None:
        layer.set_epoch(epoch)


def _epoch_of(sampler: Any) -> int | None:
    return getattr(_layer_with_epochs(sampler), "epoch", None)


def _layer_with_epochs(sampler: Any) -> Any:
    has_epochs = (x for x in sampler_layers(sampler) if callable(getattr(x, "set_epoch", None)))
    return next(has_epochs, None)


def rank_of(sampler: Any) -> int:
    """Return the rank whose indices a sampler draws: its own, or that of the process."""
    for layer in sampler_layers(sampler):
        for name in ("rank", "process_index"):  # Of torch's samplers, and of accelerate's.
            if isinstance(rank := getattr(layer, name, None), int):
                return rank
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _generator_of(sampler: Any) -> torch.Generator:
    for layer in sampler_layers(sampler):
        if isinstance(generator := getattr(layer, "generator", None), torch.Generator):
            return generator
    return torch.default_generator


@contextlib.contextmanager
def _generator_at(generator: torch.Generator, state: torch.Tensor | None) -> Iterator[None]:
    """Draw from a state. torch's default generator, which the loop uses too, is put back."""
    now = generator.get_state()
    is_elsewhere = state is not None and not torch.equal(now, state)
    if state is not None:
        generator.set_state(state)
    try:
        yield
    finally:
        if is_elsewhere and generator is torch.default_generator:
            generator.set_state(now)


def replay(indices: Iterator[Any], order: Order) -> Iterator[Any]:
    """Return all indices but those at the places that are done, after comparing their digest."""
    left: list[Any] = []
    found, place = 0, 0
    for start, stop in order.done:
        while place < stop:
            end = start if place < start else min(place + _CHUNK, stop)
            some = islice(indices, end - place)
            chunk = [index if type(index) is int else lasting(index) for index in some]
            if not chunk:
                break  # The last batch counts as full, so there may be fewer.
            found = digest_of(chunk, found)
            if place < start:
                left += chunk
            place = end
    if order.digest is not None and order.digest != found:
        raise RuntimeError(
            f"the {order.kind} does not draw the same indices as in the run that saved the state, "
            "so some samples would be repeated and others lost. It may draw from numpy or random, "
            "or its weights or the order of its data may have changed. Seed it in set_epoch(), or "
            "give it state_dict() and load_state_dict(), or use DistributedRandomSampler."
        )
    order.digest = found if order.is_replayed else None
    return chain(left, indices)
