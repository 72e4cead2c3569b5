"""The samples of a batch made one after the other: in the calling thread, or a worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ._bad_samples import BadSamplePolicy, substitutes
from ._dataset import Hooks, finished, hooks_of
from ._engine import NUM_EARLIER, WorkerCursor, check_count
from ._randomness import Keyed, KeyedCollate, KeyedDataset, randomness_of, restart_sample
from ._resume import LOAD, PREPROCESS, MapProgress, key_for

__all__ = ["keyed_collate", "keyed_dataset", "keyed_draws"]

Hook = Callable[[Any], Any]
Key = tuple[int, ...]


class DrawKeys(NamedTuple):
    """What is drawn for a batch follows from these, each with the number of a stage behind it."""

    slots: list[tuple[int, ...]]
    whole: tuple[int, ...]
    collate: tuple[int, ...]


class Draw(NamedTuple):
    """What the sampler drew for a batch."""

    drawn: Any
    indices: list[Any]
    before: list[Any]
    """What it drew before."""


def keyed_draws(progress: MapProgress, *, batched: bool, is_seeded: bool) -> Iterator[Keyed]:
    """What a progress draws, with the keys of it if there are any."""
    before: list[Any] = []
    for number, drawn in enumerate(progress):
        indices = list(drawn) if batched else [drawn]
        draw = Draw(indices if isinstance(drawn, Iterator) else drawn, indices, before)
        keys = None
        if is_seeded:
            key = partial(progress.sample_key, number, indices)
            slots = [key(slot) for slot in range(len(indices))]
            keys = DrawKeys(slots, key(WorkerCursor.WHOLE), key(WorkerCursor.COLLATE))
        yield Keyed(draw, keys)
        before = [*indices, *before][:NUM_EARLIER]


def keyed_dataset(
    dataset: Any, *, batched: bool, bad_sample_policy: BadSamplePolicy | None = None
) -> KeyedDataset:
    """A dataset for what `keyed_draws` gives."""
    if bad_sample_policy is not None and bad_sample_policy.replaces:
        return KeyedDataset(
            dataset, partial(_make_samples_or_others, dataset, batched, bad_sample_policy)
        )
    return KeyedDataset(dataset, partial(_make_samples, dataset, batched, bad_sample_policy))


def keyed_collate(collate: Callable[[Any], Any]) -> KeyedCollate:
    return KeyedCollate(collate, _key_of_collate)


def _key_of_collate(keys: DrawKeys | None) -> tuple[int, ...] | None:
    return None if keys is None else (*keys.collate, PREPROCESS)


def _make_samples(
    dataset: Any, batched: bool, bad_sample_policy: BadSamplePolicy | None, keyed: Keyed
) -> Any:
    """What the stages do, one after the other."""
    hooks = hooks_of(dataset, batched=batched)
    load = _load_of(hooks, bad_sample_policy)
    draw, keys = keyed
    samples = draw.indices
    if hooks.preprocess_takes_batch:
        assert hooks.preprocess is not None
        with _randomness(keys and keys.whole, PREPROCESS):
            return hooks.preprocess(draw.drawn)
    if hooks.load_takes_batch:
        assert load is not None
        with _randomness(keys and keys.whole, LOAD):
            samples = check_count(load(draw.drawn), len(samples))
        load = None
    made = [
        _made(sample, None if keys is None else keys.slots[slot], load, hooks.preprocess)
        for slot, sample in enumerate(samples)
    ]
    return made if batched else made[0]


def _made(sample: Any, key: Key | None, load: Hook | None, preprocess: Hook | None) -> Any:
    if load is not None:
        with _randomness(key, LOAD):
            sample = load(sample)
    if preprocess is not None:
        with _randomness(key, PREPROCESS):
            sample = preprocess(sample)
    return sample


def _make_samples_or_others(
    dataset: Any, batched: bool, bad_sample_policy: BadSamplePolicy, keyed: Keyed
) -> Any:
    """The same, with another sample in the place of one that cannot be made."""
    hooks = hooks_of(dataset, batched=False)
    load = _load_of(hooks, bad_sample_policy)
    draw, keys = keyed

    def make_or_replace(slot: int) -> Any:
        index = draw.indices[slot]
        others: list[Any] | None = None
        while True:
            key = None if keys is None else key_for(keys.slots[slot], index)
            stage = "preprocess" if load is None else "load"
            sample = index
            try:
                sample = _made(sample, key, load, None)
                stage = "preprocess"
                return _made(sample, key, None, hooks.preprocess)
            except Exception as error:
                failure = bad_sample_policy.record(index, dataset, stage, error)
                if failure is not None:
                    raise failure from error
                if others is None:
                    others = substitutes(draw.indices, slot, draw.before)
                if not others:
                    raise
                index = others.pop(0)

    samples = [make_or_replace(slot) for slot in range(len(draw.indices))]
    return samples if batched else samples[0]


def _load_of(hooks: Hooks, bad_sample_policy: BadSamplePolicy | None) -> Hook | None:
    if hooks.load is None:
        return None
    load = partial(_finished_load, hooks.load)
    return load if bad_sample_policy is None else bad_sample_policy.retried(load, restart_sample)


def _randomness(key: Key | None, stage: int) -> randomness_of:
    return randomness_of(None if key is None else (*key, stage))


def _finished_load(load: Callable[[Any], Any], drawn: Any) -> Any:
    return finished(load(drawn))
