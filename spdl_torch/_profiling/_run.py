"""Making a profile: some batches with a timeline, then each stage by itself."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler

from .._bad_samples import BadSamplePolicy, policies_of
from .._dataset import Hooks, StagedDataset, finished, hooks_of
from .._dataset_copy import DatasetCopies
from .._engine import Span
from .._random import preserve_global_rng
from .._stats import LoaderStats
from ._profile import Headroom, Profile, Scaling

__all__ = ["make_profile"]

Loader: TypeAlias = Any
"""A `DataLoader`. Its module imports this one, so it cannot be named here."""

_NUM_KEPT: Final = 8  # Batches that the loop is timed with as if loading took no time.
_MAX_FREE_SECONDS: Final = 10.0  # The loop is timed with these batches for no longer than this.
_NUM_TRIED: Final = 8  # Samples that a stage is measured with.
_TRY_SECONDS: Final = 0.5  # Fewer samples are used if making them takes longer than this.
_ALONE_SECONDS: Final = 0.25  # How long a stage is measured with one number of workers.
_MIN_BATCHES: Final = 8  # A measurement has as many batches as workers, up to this number.
_MAX_WIDTH_SECONDS: Final = 2.0  # After a measurement that took longer, no more workers are tried.
_MAX_IO_WORKERS: Final = 64


def make_profile(
    loader: Loader,
    make_loader: Callable[..., Loader],
    num_batches: int,
    step: Callable[[Any], Any] | None,
    *,
    sweep: bool,
) -> Profile:
    """Profile a copy of the loader; `make_loader` is the class `DataLoader`."""
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, got {num_batches}.")
    with preserve_global_rng(), _generators_kept(loader):
        run = _Run()
        with _twin(loader) as twin:
            run.iterate(twin, num_batches, step)
        # After the twin is closed: its workers would load ahead meanwhile.
        headroom = None if step is None else run.headroom(step)
        # A dataset for worker processes, or for no workers, may not be thread-safe.
        has_threads = loader.num_workers > 0 and loader.worker_method == "thread"
        sweeps = _Sweep(loader, make_loader, run.stats).scalings() if sweep and has_threads else ()
        return Profile(run.stats, _timeline(run.spans), tuple(sweeps), headroom)


def _timeline(spans: list[Span]) -> tuple[Span, ...]:
    """Return the spans in order, with times since the first one."""
    spans = sorted(spans.copy(), key=lambda span: span.started_seconds)
    began = spans[0].started_seconds if spans else 0.0
    return tuple(
        dataclasses.replace(span, started_seconds=span.started_seconds - began) for span in spans
    )


class _Run:
    """Some batches, and what was measured while they were loaded."""

    stats: LoaderStats

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._kept: list[Any] = []
        self._first_step_seconds = 0.0

    def iterate(self, loader: Loader, num_batches: int, step: Callable[[Any], Any] | None) -> None:
        iterator = iter(loader)
        loader._epochs.clock.record_spans(self.spans.append)
        for batch in itertools.islice(iterator, num_batches):
            if step is None:
                continue
            started = time.monotonic()
            step(batch)
            if not self._kept:
                self._first_step_seconds = time.monotonic() - started
            if len(self._kept) < _NUM_KEPT:
                self._kept.append(batch)
        self.stats = loader.stats()

    def headroom(self, step: Callable[[Any], Any]) -> Headroom | None:
        """Return how fast the loop is and would be; None if there were too few batches to tell.

        The first batch and the first step are not counted: they contain work that is done once.
        """
        loop = self.stats.loop
        seconds = loop.waited_seconds - loop.first_wait_seconds + loop.step_seconds
        seconds -= self._first_step_seconds
        num_steps = loop.num_batches - 2  # The last step has not been counted yet.
        if num_steps < 1 or seconds <= 0:
            return None
        _synchronise()
        started = time.monotonic()
        num_free = 0
        for batch in itertools.islice(itertools.cycle(self._kept), num_steps):
            step(batch)
            num_free += 1
            if time.monotonic() - started > _MAX_FREE_SECONDS:
                break
        _synchronise()
        free = num_free / (time.monotonic() - started)
        return Headroom(num_steps / seconds, max(free, num_steps / seconds))


def _synchronise() -> None:
    """Wait until the device has done all work that was submitted to it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# -- a copy of the loader -------------------------------------------------------------------------


def _twin(loader: Loader) -> Loader:
    """Return a copy that leaves the loader, its sampler and its list of bad samples as they are."""
    twin = object.__new__(type(loader))
    state = loader.__getstate__()
    replace, retry = policies_of(loader.on_error)
    if replace is not None:
        replace = dataclasses.replace(replace, log=None)
    policies = [policy for policy in (replace, retry) if policy is not None]
    state["_bad_sample_policy"] = BadSamplePolicy(policies or "raise", loader.dataset)
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
        # The dataset itself may store its position. Workers have copies anyway.
        state["dataset"] = DatasetCopies(loader.dataset, or_shallow=True).make()
    for name in ("sampler", "batch_sampler"):
        if state.get(name) is not None:
            state[name] = _copied_sampler(state[name], loader.dataset)
    twin.__dict__.update(state)
    return twin


def _copied_sampler(sampler: Any, dataset: Any) -> Any:
    """Return a sampler that draws the same indices and leaves this one as it is."""
    source = getattr(sampler, "data_source", None)
    memo = {id(dataset): dataset, id(source): source}
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
def _generators_kept(loader: Loader) -> Iterator[None]:
    """Restore the generators that samplers draw from, afterwards."""
    batch_sampler = loader.batch_sampler
    holders = (loader, loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = [getattr(holder, "generator", None) for holder in holders]
    states = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# -- each stage by itself -------------------------------------------------------------------------


class _Alone(Dataset[Any]):
    """A dataset that applies one operation to the same few inputs again and again."""

    def __init__(
        self, operation: Callable[[Any], Any], inputs: list[Any], num_each: int = 1
    ) -> None:
        self._operation = operation
        self._inputs = inputs
        self.num_each = num_each
        """How many samples of the user one call processes."""

    def __getitem__(self, index: int) -> Any:
        self._operation(self._inputs[index % len(self._inputs)])
        return 0


class _AloneAsync(_Alone, StagedDataset[Any]):
    """The same for an operation that is `async def`."""

    async def load(self, index: int) -> Any:
        await self._operation(self._inputs[index % len(self._inputs)])
        return 0


class _Sweep:
    """Measures each stage by itself with 1, 2, 4, … workers."""

    def __init__(
        self, loader: Loader, make_loader: Callable[..., Loader], stats: LoaderStats
    ) -> None:
        self._loader = loader
        self._make_loader = make_loader
        self._stats = stats
        self._cpu_widths = _powers_of_two(2 * stats.num_cores)
        self._io_widths = _powers_of_two(min(_MAX_IO_WORKERS, 2 * (loader.num_io_workers or 8)))

    def scalings(self) -> Iterator[Scaling]:
        loader = self._loader
        if isinstance(loader.dataset, IterableDataset):
            return  # Each worker has a share of the data, of which no single sample can be asked.
        batches = self._first_batches()
        if not batches:
            return
        hooks = hooks_of(loader.dataset, batched=loader.batch_sampler is not None)
        inputs = batches[0]
        batch_size = len(inputs)
        if hooks.load is not None:
            indices = batches if hooks.load_takes_batch else list(itertools.chain(*batches))
            alone_class = _AloneAsync if hooks.load_is_async else _Alone
            alone = alone_class(hooks.load, indices, batch_size if hooks.load_takes_batch else 1)
            yield from self._scaling("load", alone, self._io_widths)
            with contextlib.suppress(Exception):
                inputs = _loaded(hooks, batches[0])
        elif hooks.preprocess_takes_batch:
            inputs = [inputs]
        samples = inputs
        if hooks.preprocess is not None:
            num_each = batch_size if hooks.preprocess_takes_batch else 1
            alone = _Alone(hooks.preprocess, inputs, num_each)
            yield from self._scaling("preprocess", alone, self._cpu_widths)
            with contextlib.suppress(Exception):
                samples = _results(hooks.preprocess, inputs)
                samples = samples[0] if hooks.preprocess_takes_batch else samples
        if loader.batch_sampler is not None and loader.collate_fn is not None and len(samples) > 0:
            if isinstance(samples, list):
                samples = list(itertools.islice(itertools.cycle(samples), batch_size))
            alone = _Alone(loader.collate_fn, [samples], batch_size)
            yield from self._scaling("collate", alone, self._cpu_widths)

    def _first_batches(self) -> list[list[Any]]:
        """Return the indices of the first batches that the sampler draws."""
        loader = self._loader
        is_batched = loader.batch_sampler is not None
        sampler = loader.batch_sampler if is_batched else loader.sampler
        drawn = itertools.islice(_copied_sampler(sampler, loader.dataset), _NUM_KEPT)
        return [list(each) if is_batched else [each] for each in drawn]

    def _scaling(self, stage: str, alone: _Alone, widths: list[int]) -> Iterator[Scaling]:
        """Yield one scaling, or none for a stage that cannot be run by itself."""
        measured = self._stats.stage(stage)
        batch_size = 8 if measured is not None and measured.mean_seconds < 0.001 else 1
        throughputs = []
        with contextlib.suppress(Exception):
            self._calls_per_second(alone, 1, batch_size)  # Fills caches.
            for width in widths:
                started = time.monotonic()
                num_calls = self._calls_per_second(alone, width, batch_size)
                throughputs.append((width, alone.num_each * num_calls))
                if time.monotonic() - started > _MAX_WIDTH_SECONDS:
                    break
        if throughputs:
            yield Scaling(stage, tuple(throughputs))

    def _calls_per_second(self, dataset: _Alone, width: int, batch_size: int) -> float:
        with self._make_loader(
            dataset,
            batch_size=batch_size,
            sampler=SequentialSampler(range(1 << 40)),
            num_workers=width,
            num_io_workers=width if isinstance(dataset, StagedDataset) else None,
            prefetch_factor=4,
            collate_fn=len,
            in_order=False,
            copy_dataset=self._loader.copy_dataset,
        ) as alone:
            alone._event_loop = self._loader._event_loop  # Clients may be bound to their loop.
            iterator = iter(alone)
            next(iterator)  # Now the threads are started.
            started = now = time.monotonic()
            num_calls = num_batches = 0
            while now - started < _ALONE_SECONDS or num_batches < min(width, _MIN_BATCHES):
                num_calls += next(iterator)
                num_batches += 1
                now = time.monotonic()
            return num_calls / (now - started)


def _loaded(hooks: Hooks, batch: list[Any]) -> list[Any]:
    load = hooks.load
    assert load is not None
    if hooks.load_takes_batch:
        return list(finished(load(batch)))
    return _results(lambda index: finished(load(index)), batch)


def _results(operation: Callable[[Any], Any], inputs: list[Any]) -> list[Any]:
    """Return the results of the first few inputs."""
    made = []
    started = time.monotonic()
    for value in inputs[:_NUM_TRIED]:
        made.append(operation(value))
        if time.monotonic() - started > _TRY_SECONDS:
            break
    return made


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]
