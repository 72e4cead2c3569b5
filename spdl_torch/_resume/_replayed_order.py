"""The order of a sampler that is somebody else's."""

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
from torch.utils.data import DistributedSampler, RandomSampler

from .._ranges import Ranges
from ._order import Foresight, Order, left_of
from ._saved import Saved, is_stateful, state_of

__all__ = ["ReplayedOrder"]


@dataclass
class _Mark:
    """Where a sampler with a state says it is."""

    place: int
    """How many indices were taken from it, those that were skipped included."""
    state: dict[str, Any]
    is_over: bool = False
    """The state is that of an epoch's end, and stands for the beginning of the one after it."""


class ReplayedOrder(Order):
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
        return left_of(self._counted(iterator), done)

    def _at_mark(self, mark: Saved, *, is_over: bool) -> Iterator[Any]:
        if "sampler" in mark:
            self._sampler.load_state_dict(mark.anything("sampler"))
        if not is_over and not mark.flag("has_ended"):
            if "iterator" not in mark:
                return iter(self._sampler)
            with torch.random.fork_rng(devices=[]):  # It has drawn before it was saved.
                iterator: Any = iter(self._sampler)
            iterator.load_state_dict(mark.anything("iterator"))
            return iter(iterator)
        # The sampler may be still at the end of its epoch, or have gone back to the beginning by
        # itself. Asked for an index, one at the end goes back too; the other must not have been.
        with torch.random.fork_rng(devices=[]):
            has_index = "sampler" in mark and list(islice(self._sampler, 1))
        if has_index:
            self._sampler.load_state_dict(mark.anything("sampler"))
        return iter(self._sampler) if is_over else iter(())

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for index in iterator:
            self._num_taken += 1
            yield index
        self._has_ended = True

    def epoch_was_changed(self) -> bool:
        if self._saved is None or "epoch" not in self._saved:
            return False
        return self._saved.integer("epoch") != _epoch_of(self._sampler)

    def fix(self, seed: int) -> None:
        is_torchs = _generator_of(self._sampler) is torch.default_generator
        if is_torchs and _may_draw(self._sampler):
            self._generator_before = torch.Generator().manual_seed(seed).get_state()

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

    def drop_marks_before(self, place: int) -> None:
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
        order = ReplayedOrder(self._sampler)
        if self._marks and is_stateful(self._sampler):
            order._marks.append(_Mark(0, self._marks[-1].state, is_over=True))
        return order

    def restored(self, saved: Saved, done: Ranges) -> tuple[Order, Ranges]:
        order = ReplayedOrder(self._sampler, saved)
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
