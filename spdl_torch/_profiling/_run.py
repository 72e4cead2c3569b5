"""How a profile is made: some batches with a timeline, then each stage by itself."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from .._bad_samples import BadSamplePolicy, policies_of
from .._dataloader import DataLoader
from .._dataset import Hooks, StagedDataset, finished, hooks_of
from .._dataset_copy import DatasetCopies
from .._engine import Lap
from .._random import preserve_global_rng
from .._stats import LoaderStats
from ._profile import Headroom, Profile, Scaling, Span

__all__ = ["make_profile"]

_NUM_KEPT: Final = 8
"""Batches that the loop is timed with as if loading took no time,"""
_MAX_FREE_SECONDS: Final = 10.0
"""for no longer than this."""
_NUM_TRIED: Final = 8
"""Samples that a stage is measured with,"""
_TRY_SECONDS: Final = 0.5
"""or as many as can be made in this time."""
_MAX_WIDTH_SECONDS: Final = 2.0
"""If it took longer for one number of workers, no greater one is tried."""
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
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, got {num_batches}.")
    with preserve_global_rng(), _samplers_kept(loader):
        run = _Run()
        with _twin(loader) as twin:
            run.iterate(twin, num_batches, step)
        # Now that its workers do not load ahead any more.
        headroom = None if step is None else run.headroom(step)
        # Who wants processes, or no workers, may have a dataset that is not for threads.
        has_threads = loader.num_workers > 0 and loader.worker_method == "thread"
        return Profile(
            stats=run.stats,
            spans=tuple(_spans(run.laps)),
            scalings=tuple(_scalings(loader, run.stats)) if sweep and has_threads else (),
            headroom=headroom,
        )


class _Run:
    """Some batches, and what was seen of them."""

    stats: LoaderStats

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self._kept: list[Any] = []
        self._first_step_seconds = 0.0

    def iterate(
        self, loader: DataLoader[Any], num_batches: int, step: Callable[[Any], Any] | None
    ) -> None:
        iterator = iter(loader)
        try:
            loader._epochs.measurement.record_with(self.laps.append)
            for batch in itertools.islice(iterator, num_batches):
                if step is not None:
                    self._step(step, batch)
            self.stats = loader.stats()
        finally:
            # Processes too, which an exception's frames would keep.
            shut_down = getattr(iterator, "_shutdown_workers", None)
            if shut_down is not None:
                shut_down()
            del iterator

    def _step(self, step: Callable[[Any], Any], batch: Any) -> None:
        started = time.monotonic()
        step(batch)
        if not self._kept:
            self._first_step_seconds = time.monotonic() - started
        if len(self._kept) < _NUM_KEPT:
            self._kept.append(batch)

    def headroom(self, step: Callable[[Any], Any]) -> Headroom | None:
        """How fast the loop is, and would be; None if there were too few batches to tell.

        The first batch and the first step are left out: what is done once is nobody's rate.
        """
        loop = self.stats.loop
        seconds = loop.waited_seconds - loop.first_wait_seconds + loop.step_seconds
        seconds -= self._first_step_seconds
        num_steps = loop.num_batches - 2  # The last one has not been counted yet.
        if num_steps < 1 or seconds <= 0:
            return None
        _synchronise()
        started = now = time.monotonic()
        num_free = 0
        for batch in itertools.islice(itertools.cycle(self._kept), num_steps):
            step(batch)
            num_free += 1
            now = time.monotonic()
            if now - started > _MAX_FREE_SECONDS:
                break
        _synchronise()
        free = num_free / (time.monotonic() - started)
        return Headroom(num_steps / seconds, max(free, num_steps / seconds))


def _synchronise() -> None:
    """Have the device done with what it was told to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# -- the loader itself ----------------------------------------------------------------------------


def _twin(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader like it, which leaves it, its sampler and its record of bad samples as they are."""
    twin: DataLoader[Any] = object.__new__(type(loader))
    state = loader.__getstate__()
    state["_bad_sample_policy"] = _remedies_without_log(loader)
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
        # Its place in the data may be in itself. Workers have copies anyway.
        state["dataset"] = DatasetCopies(loader.dataset, or_shallow=True).make()
    for name in ("sampler", "batch_sampler"):
        if state.get(name) is not None:
            state[name] = _copied_sampler(state[name], loader.dataset)
    twin.__setstate__(state)
    return twin


def _remedies_without_log(loader: DataLoader[Any]) -> BadSamplePolicy:
    replace, retry = policies_of(loader.on_error)
    if replace is not None:
        replace = dataclasses.replace(replace, log=None)
    policies = [policy for policy in (replace, retry) if policy is not None]
    return BadSamplePolicy(policies or "raise", loader.dataset)


def _copied_sampler(sampler: Any, dataset: Any) -> Any:
    """A sampler that draws what this one would, and leaves this one alone."""
    memo = {id(dataset): dataset}
    source = getattr(sampler, "data_source", None)
    memo[id(source)] = source
    try:
        if isinstance(sampler, Iterator):
            raise TypeError("it is an iterator")
        return copy.deepcopy(sampler, memo)
    except Exception as error:
        raise TypeError(
            f"profile() needs a sampler that it can copy, because it draws from it: {error}. "
            "Profile a loader that is made for it, with a sampler of its own."
        ) from error


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
    hooks = hooks_of(loader.dataset, batched=loader.batch_sampler is not None)
    cpu_widths = _powers_of_two(2 * stats.num_cores)
    io_widths = _powers_of_two(min(_MAX_IO_WORKERS, 2 * (loader.num_io_workers or 8)))
    batch_size = len(batches[0])
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
        num_each = batch_size if hooks.preprocess_takes_batch else 1
        alone = _Alone(hooks.preprocess, inputs, num_each)
        yield from _scaling(loader, stats, "preprocess", alone, cpu_widths)
        with contextlib.suppress(Exception):
            samples = _some_of(hooks.preprocess, inputs)
            samples = samples[0] if hooks.preprocess_takes_batch else samples
    if loader.batch_sampler is not None and loader.collate_fn is not None and len(samples) > 0:
        if isinstance(samples, list):
            samples = list(itertools.islice(itertools.cycle(samples), batch_size))
        alone = _Alone(loader.collate_fn, [samples], batch_size)
        yield from _scaling(loader, stats, "collate", alone, cpu_widths)


def _some_batches(loader: DataLoader[Any]) -> list[list[Any]]:
    """The indices of the first batches that the sampler draws."""
    if loader.batch_sampler is not None:
        drawn = itertools.islice(_copied_sampler(loader.batch_sampler, loader.dataset), _NUM_KEPT)
        return [list(batch) for batch in drawn]
    indices = itertools.islice(_copied_sampler(loader.sampler, loader.dataset), _NUM_KEPT)
    return [[index] for index in indices]


def _loaded(hooks: Hooks, batch: list[Any]) -> list[Any]:
    assert hooks.load is not None
    if hooks.load_takes_batch:
        return list(finished(hooks.load(batch)))
    load = hooks.load
    return _some_of(lambda index: finished(load(index)), batch)


def _some_of(operation: Callable[[Any], Any], inputs: list[Any]) -> list[Any]:
    """What it makes of the first inputs, within reason."""
    made = []
    started = time.monotonic()
    for value in inputs[:_NUM_TRIED]:
        made.append(operation(value))
        if time.monotonic() - started > _TRY_SECONDS:
            break
    return made


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
    throughputs = []
    with contextlib.suppress(Exception):
        _calls_per_second(alone, 1, loader, is_cheap=is_cheap)  # Caches are filled.
        for width in widths:
            started = time.monotonic()
            num_calls = _calls_per_second(alone, width, loader, is_cheap=is_cheap)
            throughputs.append((width, alone.num_each * num_calls))
            if time.monotonic() - started > _MAX_WIDTH_SECONDS:
                break
    if throughputs:
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
        num_io_workers=width if isinstance(dataset, StagedDataset) else None,
        prefetch_factor=4,
        collate_fn=len,
        in_order=False,
        copy_dataset=loader.copy_dataset,
    ) as alone:
        alone._event_loop = loader._event_loop  # What a client is bound to.
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
