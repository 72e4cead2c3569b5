"""What a child process of `_children` does: the stages of the engine, on the user's dataset."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .._bad_samples import BadSample, path_of
from .._dataset import hooks_of
from .._engine import Board, ChildBatch, Lifetime, WorkerCursor
from .._event_loops import EventLoop
from .._random import find_drawing_names, redirect_draws
from .._resume import Bookmark, IterableProgress, MapKeys, Progress
from .._samples import Draw, SampleMaker
from .._segments import Parcel, SegmentWriter
from .._settings import LoaderSettings
from .._unsafe_to_share import unsafe_to_share
from .._worker import WorkerSetup, become_worker_process
from ._engine_source import start_workers
from ._stages import worker_ids, worker_stages


class MapDescription(NamedTuple):
    """A batch of a map-style dataset, for a child to make."""

    drawn: Any
    indices: list[Any] | None
    """None: those that were drawn."""
    earlier_indices: list[Any]
    places: Sequence[int]
    """Where its samples are in the order of the epoch, for their random numbers."""


class Answer(NamedTuple):
    """A finished batch, and what else the parent has to know."""

    parcel: Parcel | None
    """None: it ended in an error, or there was nothing left for it."""
    bookmark: tuple[int, Bookmark] | None
    """The worker of an iterable dataset, and where it is."""
    ends: list[tuple[int, Any]]
    """Workers that have come to the end of their dataset."""
    bad_samples: list[BadSample]
    num_retries: int
    cache_counts: tuple[int, int]
    """Hits and misses of the cache since the last answer."""
    findings: list[str]
    """What is in the dataset after the first batch, and several threads must not share."""


@dataclasses.dataclass
class ChildProgram:
    """The part of a loader that runs in its children. It is pickled unless they are forked."""

    settings: LoaderSettings
    dataset: Any
    """As torch has prepared it."""
    shard: tuple[int, int]
    seed_of_workers: int
    num_children: int

    def __post_init__(self) -> None:
        settings = self.settings
        self._drawing_names: Any = None
        # Only what children need, because it may be pickled.
        self.settings = dataclasses.replace(
            settings,
            sampler=None,
            batch_sampler=() if settings.batched else None,
            generator=None,
            multiprocessing_context=None,
            event_loop=EventLoop(),
            device=None,
            pin_memory=False,
            cache=None,
            bad_sample_policy=settings.bad_sample_policy.for_child(),
        )

    @property
    def num_workers(self) -> int:
        # One more, for what is made carefully.
        return sum(map(len, self._worker_ids())) + 1

    def _worker_ids(self) -> tuple[range, range]:
        settings = self.settings
        if settings.is_iterable:
            return range(settings.num_workers), range(0)
        return worker_ids(settings, hooks_of(self.dataset, batched=settings.uses_batch_hooks))

    def prepare_fork(self) -> None:
        self._drawing_names = find_drawing_names()

    # -- in the child -----------------------------------------------------------------------------

    def set_up(self, child: int, board: Board) -> Sequence[Any]:
        # What the parent has made is not garbage of this process, and pages that a collection
        # does not touch are not copied.
        gc.freeze()
        redirect_draws(self._drawing_names)
        self._segments = SegmentWriter()
        if self.settings.sample_cache is not None:
            self.settings.sample_cache.in_child()
        cpu_workers, io_workers = self._worker_ids()
        first, *others = [*cpu_workers, *io_workers][child :: self.num_children]
        is_alone = not others
        self._shares_dataset = len(cpu_workers[child :: self.num_children]) > 1
        become_worker_process(self.seed_of_workers, first, self._segments.empty)
        self._ends: list[tuple[int, Any]] = []
        self._progress = None
        if self.settings.is_iterable:
            self._progress = IterableProgress.in_child(self.settings, self._ends)
        setup = WorkerSetup(
            self.settings,
            self._progress,
            None,
            dataset=self.dataset,
            shard=self.shard,
            pin_device=None,
            seed_of_workers=self.seed_of_workers,
            is_alone=is_alone,
            wrap_collate=self._into_segments,
        )
        self._worker_setup = setup
        rows = [*cpu_workers, *io_workers]
        self._careful_cursor = board.cursor(len(rows))
        self._stages = worker_stages(
            self.settings,
            setup,
            child=child,
            num_children=self.num_children,
            make_cursor=lambda worker_id: board.cursor(rows.index(worker_id)),
        )
        return self._stages

    def start(self, lifetime: Lifetime) -> None:
        start_workers(self._worker_setup, lifetime.start)

    def begin_epoch(self, description: Any) -> None:
        if self._progress is not None:
            self._progress.begin_in_child(description)
        else:
            self._keys_of_epoch = description

    def open(self, batch: ChildBatch, description: Any, *, is_careful: bool) -> None:
        if self.settings.is_iterable:
            worker, drawn = description
            batch.draw(drawn, list(drawn) if self.settings.batched else [drawn])
            self._stages[0].ask(worker, batch)
            return
        drawn, indices, earlier_indices, places = description
        original = list(drawn) if self.settings.batched else [drawn]
        batch.draw(drawn, original if indices is None else indices)
        batch.original_indices = original
        batch.earlier_indices = earlier_indices
        batch.locate = partial(path_of, self.dataset)
        base_seed, epoch, has_places = self._keys_of_epoch
        batch.position = MapKeys(base_seed, epoch, has_places, places)
        if is_careful:
            batch.slots = _Carefully(partial(self._make_carefully, batch))
            self._stages[-1].collate(batch)
        else:
            self._stages[0].open(batch)

    def release(self, freed: Any) -> None:
        self._segments.free(freed)

    def answer(self, batch: ChildBatch, output: Any) -> tuple[Answer, Sequence[int]]:
        is_at_bookmark = self.settings.is_iterable and isinstance(batch.position, tuple)
        bookmark = batch.position if is_at_bookmark else None
        parcel, descriptor = (None, None) if output is None else output
        ends, self._ends[:] = self._ends.copy(), []
        bad_samples, num_retries = self.settings.bad_sample_policy.take_new()
        findings: list[str] = []
        if self._shares_dataset:  # Handles are often opened by the first samples.
            self._shares_dataset = False
            findings = unsafe_to_share(self.dataset)
        cache = self.settings.sample_cache
        counts = (0, 0) if cache is None else cache.counter.take()
        answer = Answer(parcel, bookmark, ends, bad_samples, num_retries, counts, findings)
        return answer, [] if descriptor is None else [descriptor]

    def discard(self, output: tuple[Parcel, int | None] | None) -> None:
        if output is not None:
            self._segments.discard(output[0])

    # -- in a worker's thread ---------------------------------------------------------------------

    def _into_segments(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        segments = self._segments

        def collate_into_segments(samples: Any) -> tuple[Parcel, int | None]:
            segments.begin()
            try:
                is_careful = isinstance(samples, _Carefully)
                return segments.pack(samples.make() if is_careful else collate(samples))
            except BaseException:
                segments.discard()
                raise

        return collate_into_segments

    def _make_carefully(self, batch: ChildBatch) -> Any:
        """Make the samples of a batch one by one, and show on the board which one it is."""
        settings, cursor = self.settings, self._careful_cursor
        slots = (*range(len(batch.indices)), WorkerCursor.COLLATE, WorkerCursor.WHOLE)
        keys = [batch.position.sample_key(batch.indices, slot) for slot in slots]
        draw = Draw(batch.drawn, batch.indices, batch.earlier_indices, keys)
        cursor.batch = batch
        try:
            maker = SampleMaker(settings, self.dataset, self._worker_setup.collate_fn)
            maker.on_move = partial(setattr, cursor, "slot")
            return maker[draw]
        finally:
            cursor.batch = None


class _Carefully:
    """Stands for the samples of a batch that are still to be made, one by one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def progress_for_child(progress: Progress, received: dict[int, Any], *, is_restart: bool) -> Any:
    """Return what a child needs to know of an epoch, for its `begin_in_child`."""
    if isinstance(progress, IterableProgress):
        return progress.for_child(received, is_restart=is_restart)
    return progress.for_child()
