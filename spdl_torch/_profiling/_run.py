"""How a profile is made: some batches with a timeline, then each stage by itself."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from .._dataloader import DataLoader
from .._dataset import Hooks, StagedDataset, finished, hooks_of
from .._pipeline import Lap
from .._randomness import generators_kept
from .._stats import LoaderStats
from ._profile import Headroom, Profile, Scaling, Span

__all__ = ["make_profile"]

_NUM_KEPT: Final = 8
"""Batches that the loop is timed with as if loading took no time."""
_ALONE_SECONDS: Final = 0.25
"""For how long a stage is measured with one number of workers,"""
_MIN_BATCHES: Final = 8
"""and at least for as many batches as it has workers, up to so many."""
_MAX_IO_WORKERS: Final = 64


def make_profile(
    loader: DataLoader[Any],
    num_batches: int,
    step: Callable[[Any], Any] | None,
    *,
    sweep: bool,
) -> Profile:
    with generators_kept(), _samplers_kept(loader), _twin(loader) as twin:
        laps: list[Lap] = []
        kept: list[Any] = []
        iterator = iter(twin)
        twin._measurement.record_with(laps.append)
        for batch in itertools.islice(iterator, num_batches):
            if step is not None:
                step(batch)
                if len(kept) < _NUM_KEPT:
                    kept.append(batch)
        stats = twin.stats()
        headroom = None
        if step is not None and kept:
            headroom = _headroom(step, kept, stats.loop.num_batches, stats.elapsed_seconds)
        return Profile(
            stats=stats,
            spans=tuple(_spans(laps)),
            scalings=tuple(_scalings(loader, stats)) if sweep else (),
            headroom=headroom,
        )


# -- the loader itself ----------------------------------------------------------------------------


def _twin(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader like it, which leaves it and its sampler where they are."""
    twin: DataLoader[Any] = object.__new__(type(loader))
    state = loader.__getstate__() | {"_next_progress": None}
    for name in ("sampler", "batch_sampler"):
        if state.get(name) is not None:
            state[name] = _copied_sampler(state[name])
    twin.__setstate__(state)
    return twin


def _copied_sampler(sampler: Any) -> Any:
    copied = copy.copy(sampler)
    if hasattr(copied, "sampler") and hasattr(copied, "__dict__"):
        with contextlib.suppress(AttributeError):
            copied.sampler = copy.copy(copied.sampler)
    return copied


@contextlib.contextmanager
def _samplers_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Put the generators that samplers draw from back afterwards."""
    holders = (
        loader,
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    )
    generators = [getattr(holder, "generator", None) for holder in holders]
    states = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _spans(laps: list[Lap]) -> Iterator[Span]:
    laps = sorted(laps.copy(), key=lambda lap: lap.started)
    began = laps[0].started if laps else 0.0
    for lap in laps:
        yield Span(
            stage=lap.stage,
            worker=lap.worker,
            started_seconds=lap.started - began,
            seconds=lap.ended - lap.started,
            batch=lap.batch,
            num_samples=lap.num_samples,
            index=lap.index,
        )


def _headroom(
    step: Callable[[Any], Any], batches: list[Any], num_batches: int, seconds: float
) -> Headroom:
    started = time.monotonic()
    num_steps = max(num_batches, len(batches))
    for batch in itertools.islice(itertools.cycle(batches), num_steps):
        step(batch)
    free_seconds = time.monotonic() - started
    return Headroom(
        batches_per_second=num_batches / seconds, free_batches_per_second=num_steps / free_seconds
    )


# -- each stage by itself -------------------------------------------------------------------------


class _Alone(torch.utils.data.Dataset[Any]):
    """A dataset whose samples are what one stage makes of what it is given, again and again."""

    def __init__(
        self, operation: Callable[[Any], Any], inputs: list[Any], num_each: int = 1
    ) -> None:
        self._operation = operation
        self._inputs = inputs
        self.num_each = num_each
        """How many of the user's samples one of these is."""

    @staticmethod
    def of_load(hooks: Hooks, batches: list[list[Any]]) -> _Alone | _AloneAsync:
        assert hooks.load is not None
        inputs = batches if hooks.load_takes_batch else list(itertools.chain(*batches))
        num_each = len(batches[0]) if hooks.load_takes_batch else 1
        return (_AloneAsync if hooks.load_is_async else _Alone)(hooks.load, inputs, num_each)

    def __getitem__(self, index: int) -> Any:
        self._operation(self._inputs[index % len(self._inputs)])
        return 0


class _AloneAsync(StagedDataset[Any]):
    """The same for an operation that is `async def`."""

    def __init__(
        self, operation: Callable[[Any], Any], inputs: list[Any], num_each: int = 1
    ) -> None:
        self._operation = operation
        self._inputs = inputs
        self.num_each = num_each

    async def load(self, index: int) -> Any:
        await self._operation(self._inputs[index % len(self._inputs)])
        return 0


def _scalings(loader: DataLoader[Any], stats: LoaderStats) -> Iterator[Scaling]:
    if isinstance(loader.dataset, IterableDataset):
        return  # Its workers have a share of the data each: it cannot be had by the piece.
    batches = _some_batches(loader)
    if not batches:
        return
    hooks = hooks_of(loader.dataset, batched=loader._auto_collation)
    cpu_widths = _powers_of_two(2 * stats.num_cores)
    io_widths = _powers_of_two(min(_MAX_IO_WORKERS, 2 * (loader.num_io_workers or 8)))
    inputs: list[Any] = batches[0]
    if hooks.load is not None:
        alone = _Alone.of_load(hooks, batches)
        yield from _scaling(loader, stats, "load", alone, io_widths)
        with contextlib.suppress(Exception):
            inputs = _loaded(hooks, batches[0])
    elif hooks.preprocess_takes_batch:
        inputs = [batches[0]]
    samples = inputs
    if hooks.preprocess is not None:
        num_each = len(batches[0]) if hooks.preprocess_takes_batch else 1
        alone = _Alone(hooks.preprocess, inputs, num_each)
        yield from _scaling(loader, stats, "preprocess", alone, cpu_widths)
        with contextlib.suppress(Exception):
            samples = [hooks.preprocess(value) for value in inputs]
            samples = samples[0] if hooks.preprocess_takes_batch else samples
    if loader._auto_collation and loader.collate_fn is not None:
        alone = _Alone(loader.collate_fn, [samples], len(batches[0]))
        yield from _scaling(loader, stats, "collate", alone, cpu_widths)


def _some_batches(loader: DataLoader[Any]) -> list[list[Any]]:
    """The indices of the first batches that the sampler draws."""
    if loader._auto_collation:
        drawn = itertools.islice(_copied_sampler(loader.batch_sampler), _NUM_KEPT)
        return [list(batch) for batch in drawn]
    return [[index] for index in itertools.islice(_copied_sampler(loader.sampler), _NUM_KEPT)]


def _loaded(hooks: Hooks, batch: list[Any]) -> list[Any]:
    assert hooks.load is not None
    if hooks.load_takes_batch:
        return list(finished(hooks.load(batch)))
    return [finished(hooks.load(index)) for index in batch]


def _scaling(
    loader: DataLoader[Any],
    stats: LoaderStats,
    stage: str,
    alone: _Alone | _AloneAsync,
    widths: list[int],
) -> Iterator[Scaling]:
    """One; or none, for a stage that does what it does in its place only."""
    measured = stats.stage(stage)
    is_cheap = measured is not None and measured.mean_seconds < 0.001
    with contextlib.suppress(Exception):
        throughputs = [
            (width, alone.num_each * _calls_per_second(alone, width, loader, is_cheap=is_cheap))
            for width in widths
        ]
        yield Scaling(stage, tuple(throughputs))


def _calls_per_second(
    dataset: _Alone | _AloneAsync, width: int, loader: DataLoader[Any], *, is_cheap: bool
) -> float:
    """How often the operation is done in a second, by so many workers."""
    with DataLoader(
        dataset,
        batch_size=8 if is_cheap else 1,
        sampler=SequentialSampler(range(1 << 40)),
        num_workers=width,
        num_io_workers=width,
        prefetch_factor=4,
        collate_fn=len,
        in_order=False,
        copy_dataset=loader.copy_dataset,
    ) as alone:
        iterator = iter(alone)
        next(iterator)  # The threads are there.
        started = now = time.monotonic()
        num_calls = num_batches = 0
        while now - started < _ALONE_SECONDS or num_batches < min(width, _MIN_BATCHES):
            num_calls += next(iterator)
            num_batches += 1
            now = time.monotonic()
        return num_calls / (now - started)


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]
