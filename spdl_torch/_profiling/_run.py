"""Making a profile: some batches with a timeline, then each stage by itself."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, Final, TypeAlias

import torch
from torch.utils.data import IterableDataset

from .._bad_samples import BadSamplePolicy, policies_of
from .._dataset import StagedDataset, completed, hooks_of
from .._dataset_copy import DatasetCopies
from .._engine import LoopStats, Span
from .._plan import plan_of
from .._random import preserve_global_rng
from .._settings import LoaderSettings
from .._stats import LoaderStats
from ._profile import Headroom, Profile, Scaling

Loader: TypeAlias = Any
"""A `DataLoader`. Its module imports this one, so it cannot be named here."""
Hook: TypeAlias = Callable[[Any], Any]

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
    with preserve_global_rng():
        spans: list[Span] = []
        kept: list[Any] = []
        first_step_seconds = 0.0
        with _twin(loader) as twin:
            iterator = iter(twin)
            twin._epochs.clock.record_spans(spans.append)
            for batch in itertools.islice(iterator, num_batches):
                if step is None:
                    continue
                started = time.monotonic()
                step(batch)
                if not kept:
                    first_step_seconds = time.monotonic() - started
                if len(kept) < _NUM_KEPT:
                    kept.append(batch)
            stats = twin.stats()
        # After the twin is closed: its workers would load ahead meanwhile.
        headroom = None if step is None else _headroom(stats.loop, first_step_seconds, step, kept)
        # torch's worker processes cannot be measured, and a loader without workers has none.
        has_threads = loader.num_workers > 0 and loader.worker_method == "thread"
        scalings = _scalings(_twin(loader), make_loader, stats) if sweep and has_threads else ()
        spans = sorted(spans.copy(), key=lambda span: span.started_seconds)
        timeline = [
            replace(span, started_seconds=span.started_seconds - spans[0].started_seconds)
            for span in spans
        ]
        return Profile(stats, tuple(timeline), tuple(scalings), headroom)


def _headroom(
    loop: LoopStats, first_step_seconds: float, step: Callable[[Any], Any], kept: list[Any]
) -> Headroom | None:
    """Return how fast the loop is and would be; None if there were too few batches to tell.

    The first batch and the first step are not counted: they contain work that is done once.
    """
    seconds = loop.waited_seconds - loop.first_wait_seconds + loop.step_seconds
    seconds -= first_step_seconds
    num_steps = loop.num_batches - 2  # The last step has not been counted yet.
    if num_steps < 1 or seconds <= 0:
        return None
    _synchronise()
    started = time.monotonic()
    num_free = 0
    for batch in itertools.islice(itertools.cycle(kept), num_steps):
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
    twin = copy.copy(loader)
    of_samples, of_loads = policies_of(loader.on_error)
    if of_samples is not None:
        of_samples = replace(of_samples, log=None)
    policies = [policy for policy in (of_samples, of_loads) if policy is not None]
    twin._bad_sample_policy = BadSamplePolicy(policies or "raise", loader.dataset)
    drawing = {name: getattr(loader, name) for name in ("generator", "sampler", "batch_sampler")}
    shared = (loader.dataset, getattr(loader.sampler, "data_source", None))
    try:
        if any(isinstance(sampler, Iterator) for sampler in drawing.values()):
            raise TypeError("it is an iterator")
        # In one call, because a sampler may share the generator of its loader.
        copies = copy.deepcopy(drawing, {id(value): value for value in shared})
    except Exception as error:
        raise TypeError(
            f"profile() needs a sampler that it can copy, because it draws from it: {error}. "
            "Profile a loader that is made for it, with a sampler of its own."
        ) from error
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
        # The dataset itself may store its position. Workers have copies anyway.
        copies["dataset"] = DatasetCopies(loader.dataset, or_shallow=True).make()
    vars(twin).update(copies)  # torch's loader does not allow these to be set.
    return twin


# -- each stage by itself -------------------------------------------------------------------------


def _scalings(
    loader: Loader, make_loader: Callable[..., Loader], stats: LoaderStats
) -> Iterator[Scaling]:
    """Measure each stage by itself with 1, 2, 4, … workers, if it can be run by itself."""
    if isinstance(loader.dataset, IterableDataset):
        return  # Each worker has a share of the data, of which no single sample can be asked.
    max_io_workers = min(_MAX_IO_WORKERS, 2 * (loader.num_io_workers or 8))
    num_processes = stats.num_processes
    for stage, function, inputs, num_each in _stages(loader, make_loader, num_processes):
        max_workers = max_io_workers if stage == "load" else 2 * stats.num_cores
        measured = stats.stage(stage)
        seconds = 1.0 if measured is None else measured.mean_seconds
        most = num_processes if stage == "load" else _max_processes(loader, stats)
        call = partial(
            _calls_per_second,
            loader,
            make_loader,
            function,
            inputs,
            batch_size=_calls_per_batch(seconds, num_processes),
            max_processes=most,
        )
        throughputs = []
        with contextlib.suppress(Exception):
            call(1)  # Fills caches.
            for width in (1 << exponent for exponent in range(max_workers.bit_length())):
                started = time.monotonic()
                throughputs.append((width, num_each * call(width)))
                if time.monotonic() - started > _MAX_WIDTH_SECONDS:
                    break
        if throughputs:
            yield Scaling(stage, tuple(throughputs))


def _max_processes(loader: Loader, stats: LoaderStats) -> int:
    """Return in how many processes the threads of many workers would live."""
    if stats.num_processes < loader.num_workers or loader.num_processes is not None:
        shares = stats.num_processes < loader.num_workers
        return stats.num_processes if shares else 2 * stats.num_cores
    # A child for each worker. If there is only one worker, see what becomes of two.
    two = replace(LoaderSettings.of(loader), num_workers=2)
    return 1 if plan_of(two).num_processes == 1 else 2 * stats.num_cores


def _calls_per_batch(seconds: float, num_processes: int) -> int:
    """Return how many calls to make for a batch, whose hand-over should take less time."""
    if seconds >= 0.001:
        return 1
    return 8 if num_processes == 0 else min(256, ceil(0.002 / max(seconds, 1e-5)))


def _stages(
    loader: Loader, make_loader: Callable[..., Loader], num_processes: int
) -> Iterator[tuple[str, Hook, list[Any], int]]:
    """Yield the name and the function of each stage, some inputs, and the samples of a call."""
    is_batched = loader.batch_sampler is not None
    sampler = loader.batch_sampler if is_batched else loader.sampler
    drawn = itertools.islice(sampler, _NUM_KEPT)
    batches: list[Any] = [list(each) if is_batched else [each] for each in drawn]
    if not batches:
        return
    batch_size = len(batches[0])
    hooks = hooks_of(loader.dataset, batched=is_batched)
    for stage, hook, takes_batch in (
        ("load", hooks.load, hooks.load_takes_batch),
        ("preprocess", hooks.preprocess, hooks.preprocess_takes_batch),
    ):
        if hook is not None:
            inputs = batches if takes_batch else list(itertools.chain(*batches))
            yield stage, hook, inputs, batch_size if takes_batch else 1
            first = batches[:1] if takes_batch else batches[0]
            try:
                if num_processes == 0:
                    results = _results(hook, first)
                else:
                    results = _results_of_child(loader, make_loader, hook, first)
                batches = results if takes_batch else [results]
            except Exception:  # The stage cannot be run by itself.
                if num_processes > 0:
                    return  # Or what it makes cannot be sent from one process to another.
    samples = batches[0]
    if is_batched and loader.collate_fn is not None and len(samples) > 0:
        if isinstance(samples, list):
            samples = list(itertools.islice(itertools.cycle(samples), batch_size))
        yield "collate", loader.collate_fn, [samples], batch_size


def _results(function: Hook, inputs: list[Any]) -> list[Any]:
    """Return the results for the first few inputs."""
    results = []
    started = time.monotonic()
    for value in inputs[:_NUM_TRIED]:
        results.append(completed(function, value))
        if time.monotonic() - started > _TRY_SECONDS:
            break
    return results


def _results_of_child(
    loader: Loader, make_loader: Callable[..., Loader], function: Hook, inputs: list[Any]
) -> list[Any]:
    """Return the same from a child process.

    The dataset is not called in this one: a file that it opens at its first sample would be shared
    by all children that are forked later.
    """
    results = []
    started = time.monotonic()
    with make_loader(
        StagedDataset.from_functions(inputs[:_NUM_TRIED], load=function),
        batch_size=None,
        num_workers=1,
        num_io_workers=1,
        num_processes=1,
        collate_fn=_unchanged,
        multiprocessing_context=loader.multiprocessing_context,
    ) as alone:
        for result in alone:
            results.append(result)
            if time.monotonic() - started > _TRY_SECONDS:
                break
    return results


def _unchanged(sample: Any) -> Any:
    return sample


def _calls_per_second(
    loader: Loader,
    make_loader: Callable[..., Loader],
    function: Hook,
    inputs: list[Any],
    width: int,
    *,
    batch_size: int,
    max_processes: int,
) -> float:
    """Call a function with the same few inputs again and again, in so many workers."""
    with make_loader(
        StagedDataset.from_functions(inputs, load=function),
        batch_size=batch_size,
        sampler=itertools.cycle(range(len(inputs))),
        num_workers=width,
        num_io_workers=width,
        num_processes=min(width, max_processes),
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=4,
        collate_fn=len,
        in_order=False,
        copy_dataset=loader.copy_dataset,
    ) as alone:
        alone._event_loop = loader._event_loop  # Clients may be bound to their loop.
        iterator = iter(alone)
        next(iterator)  # Now the threads are started.
        started = now = time.monotonic()
        num_calls = num_batches = 0
        while now - started < _ALONE_SECONDS or num_batches < min(width, _MIN_BATCHES):
            num_calls += next(iterator)
            num_batches += 1
            now = time.monotonic()
        return num_calls / (now - started)
