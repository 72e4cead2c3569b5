"""Samples that are made without the engine: one after the other, or in workers of an executor.

The calling thread (`num_workers=0`) and torch's worker processes use `SampleMaker`. A worker
process gets what it needs from torch, and an executor from a pickle, so the RNG keys of the samples
travel with what they are made from.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ._bad_samples import substitutes
from ._dataset import Hooks, completed, hooks_of
from ._engine import NUM_EARLIER, WorkerCursor, check_count
from ._random import Key, KeyCursor, sample_context
from ._resume import LOAD, PREPROCESS, MapProgress, SampleCount, key_for
from ._settings import LoaderSettings


class Draw(NamedTuple):
    """What the sampler drew for a batch."""

    drawn: Any
    """The object that the sampler returned, for hooks that take a whole batch."""
    indices: list[Any]
    before: list[Any]
    """Some indices that were drawn before, those of the latest batch first."""
    keys: list[Key] | None
    """The RNG keys: one for each slot, and behind them those of `WorkerCursor.COLLATE` and `WHOLE`,
    whose numbers are negative. None if the samples draw from torch's global RNG."""


def draws_of(settings: LoaderSettings, progress: MapProgress) -> Iterator[Draw]:
    """Return an iterator over the draws of an epoch, with RNG keys if there is a seed."""
    before: list[Any] = []
    for number, drawn in enumerate(progress):
        indices = list(drawn) if settings.batched else [drawn]
        keys = None
        if settings.is_seeded:
            slots = (*range(len(indices)), WorkerCursor.COLLATE, WorkerCursor.WHOLE)
            keys = [progress.sample_key(number, indices, slot) for slot in slots]
        yield Draw(indices if isinstance(drawn, Iterator) else drawn, indices, before, keys)
        before = [*indices, *before][:NUM_EARLIER]


class SampleMaker(Dataset[Any]):
    """Makes the batch of a `Draw` in one thread: does what the stages of the engine do, in order.

    In a worker process it takes the place of the dataset, and its item is the whole batch. It keeps
    no settings: it is pickled, and they need not be picklable.
    """

    def __init__(
        self, settings: LoaderSettings, dataset: Any, collate: Callable[[Any], Any]
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = settings.batched
        self._uses_batch_hooks = settings.uses_batch_hooks
        self._policy = settings.bad_sample_policy
        self._sample_cache = settings.sample_cache
        self._cursor = KeyCursor()
        self._stage = ""
        """The stage of the sample that is being made."""
        self.on_move: Callable[[int], object] | None = None
        """Called with the slot of each sample before it is made."""

    # Not made in the constructor: a `worker_init_fn` may change the dataset before the first batch,
    # and neither generators nor hooks need to be pickled.

    @cached_property
    def _hooks(self) -> Hooks:
        hooks = hooks_of(self.dataset, batched=self._uses_batch_hooks)
        cache = self._sample_cache
        return hooks if cache is None else cache.hooks(self.dataset, hooks)

    @cached_property
    def _mode(self) -> AbstractContextManager[Any]:
        return sample_context(self._cursor)

    def __getitem__(self, draw: Draw) -> Any:
        """Return the batch of a draw."""
        with nullcontext() if draw.keys is None else self._mode:
            samples = self._make_samples(draw)
            self._move_to(draw, WorkerCursor.COLLATE, PREPROCESS)
            return self._collate(samples if self._batched else samples[0])

    __getitems__ = __getitem__

    def _make_samples(self, draw: Draw) -> Any:
        hooks = self._hooks
        slots = range(len(draw.indices))
        if hooks.preprocess_takes_batch:
            assert hooks.preprocess is not None
            self._move_to(draw, WorkerCursor.WHOLE, PREPROCESS)
            return hooks.preprocess(draw.drawn)
        if hooks.load_takes_batch:
            self._move_to(draw, WorkerCursor.WHOLE, LOAD)
            raws = check_count(self._load(draw.drawn), len(slots))
            return [self._preprocess(draw, slot, raws[slot]) for slot in slots]
        if self._policy.replaces:
            return [self._make_or_replace(draw, slot) for slot in slots]
        return [self._make(draw, slot) for slot in slots]

    def _make(self, draw: Draw, slot: int) -> Any:
        raw = draw.indices[slot]
        if self._hooks.load is not None:
            self._stage = "load"
            self._move_to(draw, slot, LOAD)
            raw = self._load(raw)
        self._stage = "preprocess"
        return self._preprocess(draw, slot, raw)

    def _preprocess(self, draw: Draw, slot: int, raw: Any) -> Any:
        if self._hooks.preprocess is None:
            return raw
        self._move_to(draw, slot, PREPROCESS)
        return self._hooks.preprocess(raw)

    def _make_or_replace(self, draw: Draw, slot: int) -> Any:
        others: list[Any] | None = None
        while True:
            try:
                return self._make(draw, slot)
            except Exception as error:
                index = draw.indices[slot]
                failure = self._policy.record(index, self.dataset, self._stage, error)
                if failure is not None:
                    raise failure from error
                if others is None:
                    others = substitutes(draw.indices, slot, draw.before)
                    # The other slots are still filled from what the sampler drew.
                    keys = draw.keys and draw.keys.copy()
                    draw = draw._replace(indices=draw.indices.copy(), keys=keys)
                if not others:
                    raise
                draw.indices[slot] = others.pop(0)
                if draw.keys is not None:
                    draw.keys[slot] = key_for(draw.keys[slot], draw.indices[slot])

    @cached_property
    def _load(self) -> Callable[[Any], Any]:
        load = self._hooks.load
        assert load is not None
        return self._policy.retried(partial(completed, load))

    def _move_to(self, draw: Draw, slot: int, stage: int) -> None:
        if self.on_move is not None:
            self.on_move(slot)
        if draw.keys is not None:
            self._cursor.move((*draw.keys[slot], stage))


# -- iterable datasets ----------------------------------------------------------------------------


class CountCursor:
    """The cursor of a worker that reads an iterable dataset and counts its samples."""

    def __init__(self, samples: SampleCount, key_of_number: Callable[[int], Key]) -> None:
        self._samples = samples
        self._key_of_number = key_of_number

    @property
    def position(self) -> tuple[int, int]:
        return self._samples.epoch, self._samples.number

    def key(self) -> Key:
        return self._key_of_number(self._samples.number)


class SeededIterable(IterableDataset[Any]):
    """An iterable dataset of the user in a worker process, whose samples draw from keys.

    A key begins with the base seed and the epoch; `epoch` is the first one of the process.
    """

    def __init__(self, dataset: Any, base_seed: int, epoch: int) -> None:
        self.dataset = dataset
        self._base_seed = base_seed
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        key = self._base_seed, self._epoch, 0 if info is None else info.id
        self._epoch += 1  # Persistent workers iterate again.
        cursor = KeyCursor((*key, 0))
        mode = sample_context(cursor)
        with mode:
            iterator = iter(self.dataset)
        for number in count(1):
            cursor.move((*key, number))
            try:
                with mode:
                    sample = next(iterator)
            except StopIteration:
                return
            yield sample


def init_process(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Run first in a worker process: let `get_worker_info()` show the dataset of the user."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SampleMaker | SeededIterable):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # It is frozen.
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


# -- executors ------------------------------------------------------------------------------------


def call_with_key(hook: Callable[[Any], Any], keyed: tuple[Any, Key]) -> Any:
    """Call a hook in a worker of an executor, with a value and the RNG key of its sample."""
    value, key = keyed
    # One intra-op thread in a worker process, as in torch's. A process that was forked after torch
    # had used more would wait for threads that it has not.
    if torch.get_num_threads() > 1 and multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)
    with sample_context(KeyCursor(key)):
        return hook(value)
