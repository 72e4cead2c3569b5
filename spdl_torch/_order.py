"""The order of an epoch's indices, and how it is found again."""

from __future__ import annotations

import base64
import contextlib
import copy
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ._ranges import Ranges
from ._sampler import GlobalSampler
from ._saved import Saved, is_stateful, state_of

__all__ = ["Foresight", "Order", "order_of", "restored_order"]


class Foresight:
    """What torch's generators are going to give, without drawing it from them."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Generator] = {}

    def seed(self, generator: torch.Generator | None) -> int:
        return _drawn_seed(self._copy_of(generator))

    def state(self, generator: torch.Generator | None) -> torch.Tensor:
        return self._copy_of(generator).get_state()

    def _copy_of(self, generator: torch.Generator | None) -> torch.Generator:
        generator = generator or torch.default_generator
        if id(generator) not in self._copies:
            self._copies[id(generator)] = generator.clone_state()
        return self._copies[id(generator)]


def _drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed, as torch draws its own."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class Order:
    """The indices of one epoch, as one sampler gives them."""

    kind: str
    """The sampler's name in a state."""

    def open(self, done: Ranges) -> Iterator[Any]:
        """The indices of the epoch but for those at the places that are done."""
        raise NotImplementedError

    def was_overruled(self) -> bool:
        """Another epoch was chosen after this one had been restored."""
        return False

    def foresee(self, foresight: Foresight) -> None:
        """Decide what has not been decided yet, as it will be if nobody else draws meanwhile."""

    has_marks = False
    """The sampler has a state, which is kept for every draw that may have to be gone back to."""

    def make_mark(self) -> None:
        """Ask the sampler, if it has a state, where it is now."""

    def go_past(self, place: int) -> None:
        """Nobody will have to go back to a place before this one."""

    @property
    def first_place(self) -> int:
        """The place from which the order is described, and all others are counted."""
        return 0

    def global_place(self, place: int) -> int:
        """The place in the order of all ranks together."""
        return place

    @property
    def is_partial(self) -> bool:
        """Something of the epoch is left out of the order, because it was done before."""
        return False

    def describe(self) -> dict[str, Any]:
        """What it takes to find the order again, from its first place on."""
        raise NotImplementedError

    def following(self) -> Order:
        """The order of the epoch after this one, which has come to its end."""
        raise NotImplementedError

    def restored(self, saved: Saved, done: Ranges) -> tuple[Order, Ranges]:
        """The order that was described so, and what of it is done."""
        raise NotImplementedError


def order_of(sampler: Any) -> Order:
    """The order in which a sampler is going to give its indices."""
    # By exact type, or method: a subclass may do anything.
    if isinstance(sampler, GlobalSampler) and type(sampler).__iter__ is GlobalSampler.__iter__:
        return _GlobalOrder(sampler)
    if type(sampler) is SequentialSampler:
        return _Ascending(sampler)
    if type(sampler) is RandomSampler and sampler.generator is None:
        return _Seeded(sampler)
    return _Replayed(sampler)


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


def _left_of(indices: Iterator[Any], done: Ranges) -> Iterator[Any]:
    """All but those at the places that are done."""
    place = 0
    for start, stop in done:
        yield from islice(indices, start - place)
        for _ in islice(indices, stop - start):
            pass
        place = stop
    yield from indices


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

    def was_overruled(self) -> bool:
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
            start, done = _dealt_out_anew(start, done, world_size, sampler.num_draws), Ranges()
        sampler.set_epoch(epoch)
        sampler.seed = seed
        return _GlobalOrder(sampler, start, epoch), done


def _dealt_out_anew(start: Ranges, done: Ranges, world_size: int, num_draws: int) -> Ranges:
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
            drawn = _drawn_seed()
            self._seed = drawn if self._seed is None else self._seed
            self._is_drawn = True
        assert self._seed is not None
        seeded = copy.copy(self._sampler)
        seeded.generator = torch.Generator().manual_seed(self._seed)
        return _left_of(iter(seeded), done)

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


@dataclass
class _Mark:
    """Where a sampler with a state says it is."""

    place: int
    """How many indices were taken from it, those that were skipped included."""
    state: dict[str, Any]
    is_over: bool = False
    """The state is that of an epoch's end, and stands for the beginning of the one after it."""


class _Replayed(Order):
    """Any other sampler's order.

    If the sampler, or its iterator, has a state, that is saved with every batch. If not, the order
    is gone through again from its beginning, with its generator as it was then.
    """

    def __init__(self, sampler: Any, saved: Saved | None = None) -> None:
        self.kind = type(sampler).__name__
        if type(sampler) is RandomSampler:
            self.kind += " with a generator of its own"
        self._sampler = sampler
        self._saved = saved
        """What it was restored from, until it is opened."""
        self._epoch: int | None = None
        self._generator_before: torch.Tensor | None = None
        """The state of its generator before the first index, if it draws from it."""
        self._marks: deque[_Mark] = deque()
        """All that may have to be gone back to."""
        if saved is not None:
            if (text := saved.optional_text("generator")) is not None:
                self._generator_before = _decoded(text)
            is_over = saved.flag("is_over")
            if (mark := saved.optional_part("mark")) is not None:
                self._marks.append(_Mark(0, mark.values, is_over))
        self._is_open = False
        self._iterator: Any = None
        self._num_taken = 0
        self._has_ended = False

    def open(self, done: Ranges) -> Iterator[Any]:
        saved, self._saved, self._is_open = self._saved, None, True
        self._epoch = _epoch_of(self._sampler)
        generator, before = _generator_of(self._sampler), self._generator_before
        self._generator_before = None
        if is_stateful(self._sampler) and not self._marks:
            # Before it is asked for an iterator: some say after that still where they were.
            self._marks.append(_Mark(0, self._state()))
        with _generator_as_it_was(generator, before):
            before = generator.get_state()
            if saved is not None and "mark" in saved:
                iterator = self._at_mark(saved.part("mark"), is_over=saved.flag("is_over"))
            else:
                iterator = iter(self._sampler)
            self.has_marks = is_stateful(self._sampler) or is_stateful(iterator)
            if self.has_marks:
                # Untouched: its state must not be one index ahead.
                self._iterator = iterator
                if not self._marks:
                    self.make_mark()
            else:
                # Most draw with the first index.
                iterator = chain(list(islice(iterator, 1)), iterator)
            if not torch.equal(before, generator.get_state()):
                self._generator_before = before
        return _left_of(self._counted(iterator), done)

    def _at_mark(self, mark: Saved, *, is_over: bool) -> Iterator[Any]:
        if "sampler" in mark:
            self._sampler.load_state_dict(mark.anything("sampler"))
        if not is_over and not mark.flag("has_ended"):
            iterator: Any = iter(self._sampler)
            if "iterator" in mark:
                iterator.load_state_dict(mark.anything("iterator"))
            return iter(iterator)
        # The sampler may be still at the end of its epoch, or have gone back to the beginning by
        # itself. Asked for an index, one at the end goes back too; the other must not have been.
        if "sampler" in mark and list(islice(self._sampler, 1)):
            self._sampler.load_state_dict(mark.anything("sampler"))
        return iter(self._sampler) if is_over else iter(())

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for index in iterator:
            self._num_taken += 1
            yield index
        self._has_ended = True

    def was_overruled(self) -> bool:
        if self._saved is None or "epoch" not in self._saved:
            return False
        return self._saved.integer("epoch") != _epoch_of(self._sampler)

    def foresee(self, foresight: Foresight) -> None:
        is_undecided = not self._is_open and self._saved is None and self._generator_before is None
        if is_undecided and _may_draw(self._sampler):
            self._generator_before = foresight.state(_generator_of(self._sampler))

    def make_mark(self) -> None:
        if self.has_marks:
            self._marks.append(_Mark(self._num_taken, self._state()))

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"has_ended": self._has_ended, "sampler": None, "iterator": None}
        if is_stateful(self._sampler):
            state["sampler"] = state_of(self._sampler)
        if self._iterator is not self._sampler and is_stateful(self._iterator):
            state["iterator"] = state_of(self._iterator)
        return state

    def go_past(self, place: int) -> None:
        while len(self._marks) > 1 and self._marks[1].place <= place:
            self._marks.popleft()

    @property
    def first_place(self) -> int:
        return self._marks[0].place if self._marks else 0

    def describe(self) -> dict[str, Any]:
        if self._saved is not None:
            return copy.deepcopy(self._saved.values)
        mark = None
        if self._marks:
            mark = self._marks[0]
        elif is_stateful(self._sampler):
            mark = _Mark(0, self._state())
        # Once an index was taken, the state says all.
        before = self._generator_before if self.first_place == 0 else None
        return {
            "kind": self.kind,
            "epoch": self._epoch if self._is_open else _epoch_of(self._sampler),
            "generator": None if before is None else _encoded(before),
            "mark": None if mark is None else copy.deepcopy(mark.state),
            "is_over": mark is not None and mark.is_over,
        }

    def following(self) -> Order:
        order = _Replayed(self._sampler)
        if self._marks and is_stateful(self._sampler):
            order._marks.append(_Mark(0, self._marks[-1].state, is_over=True))
        return order

    def restored(self, saved: Saved, done: Ranges) -> tuple[Order, Ranges]:
        order = _Replayed(self._sampler, saved)
        if (mark := saved.optional_part("mark")) is not None:
            mark.flag("has_ended")
            mark.anything("iterator")
            if mark.anything("sampler") is not None and not is_stateful(self._sampler):
                raise ValueError(
                    "the state has a state of the sampler, but a "
                    f"{self.kind} has no load_state_dict."
                )
        if (epoch := saved.optional_integer("epoch")) is not None:
            _set_epoch(self._sampler, epoch)
        return order, done


# -- what samplers of others have -----------------------------------------------------------------


@contextlib.contextmanager
def _generator_as_it_was(generator: torch.Generator, before: torch.Tensor | None) -> Iterator[None]:
    """Draw what was drawn before; without an effect, if the generator is the training loop's."""
    now = generator.get_state()
    if before is None or torch.equal(now, before):
        yield
        return
    generator.set_state(before)
    try:
        yield
    finally:
        if generator is torch.default_generator:
            generator.set_state(now)


def _layers(sampler: Any) -> Iterator[Any]:
    """The sampler and those it wraps, as a batch sampler does."""
    for _ in range(4):
        yield sampler
        inner = getattr(sampler, "sampler", None)
        if inner is None:
            inner = getattr(sampler, "batch_sampler", None)
        if inner is None:
            return
        sampler = inner


def _generator_of(sampler: Any) -> torch.Generator:
    for layer in _layers(sampler):
        if isinstance(generator := getattr(layer, "generator", None), torch.Generator):
            return generator
    return torch.default_generator


def _may_draw(sampler: Any) -> bool:
    return not any(isinstance(layer, DistributedSampler | Sequence) for layer in _layers(sampler))


def _epoch_of(sampler: Any) -> int | None:
    for layer in _layers(sampler):
        if callable(getattr(layer, "set_epoch", None)):
            return getattr(layer, "epoch", None)
    return None


def _set_epoch(sampler: Any, epoch: int) -> None:
    for layer in _layers(sampler):
        if callable(getattr(layer, "set_epoch", None)):
            layer.set_epoch(epoch)
            return


def _encoded(generator_state: torch.Tensor) -> str:
    return base64.b64encode(zlib.compress(generator_state.numpy().tobytes())).decode()


def _decoded(text: str) -> torch.Tensor:
    try:
        state = torch.frombuffer(
            bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8
        )
        torch.Generator().set_state(state)
    except (ValueError, RuntimeError, zlib.error):
        raise ValueError("the state of the sampler's generator is damaged.") from None
    return state
