"""The stage that runs in somebody else's workers: any `concurrent.futures.Executor`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from ._in_flight import InFlight
from ._meter import FutureMeter, Meter
from ._record import PendingBatch
from ._stages import (
    CollateStage,
    GroupSize,
    OnSampleError,
    Operation,
    WorkerCursor,
    note_origin,
    without_our_frame,
)
from ._threads import new_thread

__all__ = ["ExecutorStage"]

_MAX_HOOKS_KEPT: Final = 4
_hooks: dict[bytes, Operation] = {}
"""In an executor's worker: the hooks it has been sent, latest last. It may be a thread among
others, so each step is one atomic operation."""


class _Task(NamedTuple):
    record: PendingBatch
    slots: Sequence[int]


class _Filled(NamedTuple):
    """What an executor's worker gives back for some slots."""

    samples: Any
    seconds: float
    cpu_seconds: float


@dataclass
class _Failed:
    """What it gives back if the hook raised.

    It is given back and not raised, because what a process raises must survive a pickle, and many
    an exception does not: it loses what was noted on it, or breaks the executor's pool.
    """

    offset: int
    """Of the sample, among those it was given."""
    error: Exception
    seconds: float
    cpu_seconds: float

    def __reduce__(self) -> tuple[Any, ...]:
        text = "".join(traceback.format_exception(self.error))
        try:
            pickled = pickle.dumps(self.error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(
                RuntimeError(f"{type(self.error).__name__}: {self.error} (it cannot be pickled)")
            )
        return _failed_remotely, (self.offset, pickled, text, self.seconds, self.cpu_seconds)


def _failed_remotely(
    offset: int, pickled_error: bytes, text: str, seconds: float, cpu_seconds: float
) -> _Failed:
    error = pickle.loads(pickled_error)
    # The frames stay behind; concurrent.futures gives their text in this way too.
    error.__cause__ = _InAnotherProcess(f'\n"""\n{text}"""')
    return _Failed(offset, error, seconds, cpu_seconds)


class _InAnotherProcess(Exception):  # noqa: N818 (never raised)
    """Where in another process's code an exception came from."""


class _Futures(set[Future[Any]]):
    """What an executor has been asked for. Its workers are not ours; only this is ours to end."""

    def __init__(self) -> None:
        super().__init__()
        self._process_id = os.getpid()
        self._apart: list[threading.Thread] = []

    @property
    def threads(self) -> list[threading.Thread]:
        return self._apart.copy()

    def start(self, seconds_apart: float) -> None:
        pass

    def wait_until_set_up(self) -> None:
        pass

    def abandon(self) -> None:
        self.take_back(self.copy())  # In one step: futures come and go in other threads.

    def close(self) -> None:
        self.abandon()

    def take_back(self, futures: set[Future[Any]]) -> None:
        """Take back what the executor has not begun.

        In a thread of its own: `cancel` runs the executor's code, and that of a cluster waits for
        the thread of its client. A finaliser may run in that very thread, which would wait for
        itself, or in the middle of a `submit`, with a lock that it waits for.
        """
        if futures and os.getpid() == self._process_id:
            # A forked child has copies of its parent's; the tasks are its parent's.
            with contextlib.suppress(RuntimeError):  # It is the exit, and the executor ends too.
                self.run_in_helper_thread(_cancel, futures)

    def run_in_helper_thread(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function that calls the executor, where nobody holds a lock of its.

        A RuntimeError if no thread can be started.
        """
        thread = new_thread("apart", function, *args)
        thread.start()
        self._apart.append(thread)
        for ended in self.threads:
            if not ended.is_alive():
                with contextlib.suppress(ValueError):  # Another thread was quicker.
                    self._apart.remove(ended)


def _cancel(futures: set[Future[Any]]) -> None:
    for future in futures:
        with contextlib.suppress(Exception):  # Of an executor that has ended, say.
            future.cancel()


class ExecutorStage:
    """A stage that hands its samples to an executor.

    The hook, with the dataset it belongs to, may be large: it must travel once to each of the
    executor's workers, and an executor does not let us speak to a particular one. So a task names
    its hook by the digest of its pickle. A worker that has not got it says so, and the task goes
    round once more, now carrying the hook; at most one such carrier is under way at any time.
    """

    downstream = None

    def __init__(
        self,
        name: str,
        executor: Executor,
        hook: Operation,
        *,
        is_first: bool,
        takes_whole_batch: bool,
        collate_stage: CollateStage,
        label: Callable[[PendingBatch, int, Any], Any],
        on_sample_error: OnSampleError | None = None,
    ) -> None:
        self._name = name
        self._on_sample_error = on_sample_error
        self._label = label
        """Makes the hook's input of a sample, or of a whole batch, by its record and slot."""
        self._executor = executor
        self._pickled_hook = pickle.dumps(hook, protocol=pickle.HIGHEST_PROTOCOL)
        self._digest = hashlib.sha256(self._pickled_hook).digest()
        self._is_first = is_first
        self._takes_whole_batch = takes_whole_batch
        self._collate_stage = collate_stage
        # A hand-over between processes costs some hundred microseconds.
        self._group_size = GroupSize(seconds=0.01)
        # Reentrant: garbage is collected anywhere, also in whoever holds this, and code that runs
        # then may bring a task to its end, which comes back here.
        self._lock = threading.RLock()
        self._held_back: deque[_Task] = deque()
        self._carrier_is_under_way = False
        self._hook_has_arrived = False
        self._futures = _Futures()
        self._submitted: dict[Future[Any], tuple[_Task, float]] = {}
        self.workers = [self._futures]
        self._meter = FutureMeter(name, getattr(executor, "_max_workers", None))
        self.meter: Meter = self._meter

    # -- how work enters -----------------------------------------------------------------------

    def open(self, records: list[PendingBatch]) -> int:
        for record in records:
            if record.indices:
                self.put(record, range(len(record.indices)))
            else:
                self._collate_stage.collate(record)
        return len(records)

    def num_samples_per_task(self) -> int:
        return 1

    def in_flight(self) -> list[InFlight]:
        now = time.monotonic()
        return [
            InFlight(self._name, task.record, slot, now - since, [])
            for task, since in list(self._submitted.values())
            for slot in ([None] if self._takes_whole_batch else task.slots)
        ]

    def put(self, record: PendingBatch, slots: Sequence[int]) -> None:
        if record.is_abandoned:
            return
        size = len(slots) if self._takes_whole_batch else self._group_size.num_samples()
        for first in range(0, len(slots), size):
            task = _Task(record, slots[first : first + size])
            carries_hook = False
            try:
                with self._lock:
                    if not self._hook_has_arrived and self._carrier_is_under_way:
                        self._held_back.append(task)
                        continue
                    carries_hook = not self._hook_has_arrived
                    self._carrier_is_under_way |= carries_hook
                self._submit(task, carries_hook)
            except BaseException:  # Ctrl-C in the middle: the carrier may not be under way.
                if carries_hook:
                    self._release_held_back()
                raise

    def _submit(self, task: _Task, carries_hook: bool) -> None:
        record, slots = task
        try:
            inputs = record.indices if self._is_first else record.slots
            if self._takes_whole_batch:
                inputs = self._label(record, WorkerCursor.WHOLE, record.drawn)
            else:
                inputs = [self._label(record, slot, inputs[slot]) for slot in slots]
            future = self._executor.submit(
                _run_hook,
                self._digest,
                self._pickled_hook if carries_hook else None,
                inputs,
                self._takes_whole_batch,
            )
        except BaseException as error:  # A broken or closed executor refuses at once.
            self._fail(task, without_our_frame(error))
            if carries_hook:
                self._release_held_back()
            return
        self._futures.add(future)
        self._submitted[future] = task, time.monotonic()
        self._meter.begin(len(slots))
        future.add_done_callback(partial(self._on_done, task, carries_hook))
        # Looked at after it was added; closing goes the other way round, so one sees the other.
        if record.is_abandoned:
            self._futures.take_back({future})

    # -- what happens when the executor answers; runs in one of its threads ----------------------

    def _on_done(self, task: _Task, carried_hook: bool, future: Future[Any]) -> None:
        self._futures.discard(future)
        self._submitted.pop(future, None)
        self._meter.end(len(task.slots))
        if not task.record.is_abandoned:
            try:
                self._settle(task, future)
            except BaseException as error:
                # concurrent.futures would log this and go on; the consumer would wait for ever.
                task.record.fail(task.slots[0], error)
                task.record.finish()
                task.record.signal.set()
        if carried_hook and (future.cancelled() or future.exception() is not None):
            # An executor that breaks or is shut down says so with a lock in its hands, which
            # `submit` waits for.
            try:
                self._futures.run_in_helper_thread(self._release_held_back)
            except RuntimeError as error:
                self._release_held_back(error)
        elif carried_hook:
            self._release_held_back()

    def _settle(self, task: _Task, future: Future[Any]) -> None:
        record, slots = task
        error = CancelledError() if future.cancelled() else future.exception()
        if error is not None:
            self._fail(task, error)
            return
        filled: _Filled | _Failed | None = future.result()
        if isinstance(filled, _Failed):
            self._meter.add(0, filled.seconds, filled.cpu_seconds, record.number)
            self._fail(task, filled.error, filled.offset)
            return
        if filled is None:
            with self._lock:
                if self._carrier_is_under_way:
                    self._held_back.append(task)
                    return
                self._carrier_is_under_way = True
            self._submit(task, carries_hook=True)
            return
        self._meter.add(len(slots), filled.seconds, filled.cpu_seconds, record.number)
        if self._takes_whole_batch:
            record.slots = filled.samples
        else:
            for slot, sample in zip(slots, filled.samples, strict=True):
                record.slots[slot] = sample
            self._group_size.observe(len(slots), filled.seconds)
        if record.settle(len(slots)):
            self._collate_stage.collate(record)

    def _fail(self, task: _Task, error: BaseException, offset: int | None = None) -> None:
        """Without an offset it is not a sample but the executor that has failed."""
        record, slots = task
        slot = None if self._takes_whole_batch else slots[offset or 0]
        if self._on_sample_error is not None and offset is not None and slot is not None:
            failure = self._on_sample_error(record, slot, self._name, error)
            if failure is None:
                others = [other for other in slots if other != slot]
                if others:
                    self._submit(_Task(record, others), carries_hook=False)
                return
            error = failure
        if offset is None:
            note_origin(error, self._name, record, None)
            _add_hint(error)
        else:
            note_origin(error, self._name, record, slot)
        record.fail(slot or 0, error)
        if record.settle(len(slots)):
            self._collate_stage.collate(record)

    def _release_held_back(self, error: BaseException | None = None) -> None:
        """Submit what has waited for the hook to arrive; or let it fail, if this is in the way."""
        with self._lock:
            self._carrier_is_under_way = False
            self._hook_has_arrived = True
            tasks = list(self._held_back)
            self._held_back.clear()
        for task in tasks:
            if task.record.is_abandoned:
                continue
            if error is None:
                self._submit(task, carries_hook=False)
            else:
                self._fail(task, error)


def _add_hint(error: BaseException) -> None:
    """Say in an executor's exception what it is mostly about."""
    if isinstance(error, BrokenProcessPool):
        note = (
            "spdl_torch: a worker of the executor has died. If it did so at once, it may have "
            'found no `if __name__ == "__main__":` in the script: a process that is spawned runs '
            "the script again, but for what stands behind that line."
        )
    elif isinstance(error, AttributeError | ImportError):
        note = (
            "spdl_torch: the executor's workers have to import the dataset's class. Put it into a "
            "module of its own, which they can find."
        )
    elif isinstance(error, CancelledError):
        note = "spdl_torch: somebody has cancelled the executor's task, or shut the executor down."
    else:
        return
    if note not in getattr(error, "__notes__", []):  # A pool has one exception for all its tasks.
        error.add_note(note)


def _run_hook(
    digest: bytes, pickled_hook: bytes | None, inputs: Any, takes_whole_batch: bool
) -> _Filled | _Failed | None:
    """Runs in the executor's worker. None: send me the hook."""
    hook = _hooks.get(digest)
    if hook is None:
        if pickled_hook is None:
            return None
        hook = _hooks[digest] = pickle.loads(pickled_hook)
        for oldest in list(_hooks)[:-_MAX_HOOKS_KEPT]:
            _hooks.pop(oldest, None)
    started = time.perf_counter(), time.thread_time()
    samples: Any = []
    try:
        if takes_whole_batch:
            samples = hook(inputs)
        else:
            for sample in inputs:
                samples.append(hook(sample))
    except Exception as error:
        return _Failed(len(samples), error, *_since(started))
    return _Filled(samples, *_since(started))


def _since(started: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - started[0], time.thread_time() - started[1]
