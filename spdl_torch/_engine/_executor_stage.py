"""The stage that runs in the workers of any `concurrent.futures.Executor`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from ._batch import PendingBatch, note_origin, without_our_frame
from ._clock import FutureClock
from ._in_flight import InFlight
from ._remote_error import RemoteError
from ._stage import OnSampleError, Operation, Pace, Stage, WorkerCursor
from ._threads import WorkerGroup, new_thread

_MAX_HOOKS_KEPT: Final = 4
_hooks: dict[bytes, Operation] = {}
"""In an executor's worker: the hooks that it received, latest last. Each step on it is one atomic
operation, because the worker may be a thread among others."""

_SMALL_HOOK_BYTES: Final = 65536

_TASK_SECONDS: Final = 0.01
"""How long the samples of one task take together: a hand-over between processes costs some hundred
microseconds."""


class _Task(NamedTuple):
    batch: PendingBatch
    slots: Sequence[int]


class _Filled(NamedTuple):
    """What an executor's worker returns for some slots."""

    samples: Any
    seconds: float
    cpu_seconds: float


@dataclass
class _Failed:
    """What it returns if the hook raised, or could not be unpickled.

    It is returned and not raised, because an exception from another process is pickled, and many
    exceptions do not survive that: they lose their notes, or break the executor's pool.
    """

    offset: int | None
    """The place of the sample among those of the task; None if there is no hook."""
    error: Exception
    seconds: float
    cpu_seconds: float

    def __reduce__(self) -> tuple[Any, ...]:
        error = RemoteError(self.error)
        return _failed_remotely, (self.offset, error, self.seconds, self.cpu_seconds)


def _failed_remotely(
    offset: int | None, remote: RemoteError, seconds: float, cpu_seconds: float
) -> _Failed:
    error = remote.error
    assert isinstance(error, Exception)
    return _Failed(offset, error, seconds, cpu_seconds)


class _Futures(set[Future[Any]], WorkerGroup):
    """The tasks that an executor has. Its workers are not ours; only this is ours to end."""

    def __init__(self) -> None:
        super().__init__()
        self._process_id = os.getpid()
        self.threads = []

    def abandon(self) -> None:
        self.cancel_all(self.copy())  # In one step: other threads add and remove futures.

    def request_stop(self) -> None:
        self.abandon()

    def cancel_all(self, futures: set[Future[Any]]) -> None:
        """Cancel tasks that the executor has not begun.

        In a helper thread: `cancel` runs the executor's code, and that of a cluster waits for the
        thread of its client. A finaliser may run in that very thread, which would then wait for
        itself, or in the middle of a `submit`, with a lock held that `cancel` needs.
        """
        # A forked child has copies of its parent's futures; the tasks are its parent's.
        if futures and os.getpid() == self._process_id:
            thread = new_thread("helper", _cancel, futures)
            with contextlib.suppress(RuntimeError):  # No thread starts at the interpreter's exit.
                thread.start()
                self.threads = [*(t for t in self.threads if t.is_alive()), thread]


def _cancel(futures: set[Future[Any]]) -> None:
    for future in futures:
        with contextlib.suppress(Exception):  # Of an executor that has ended, say.
            future.cancel()


class ExecutorStage(Stage):
    """A stage that submits its samples to an executor.

    The hook, with the dataset it belongs to, may be large, and an executor does not let us send it
    to each of its workers once. So a task names its hook by the digest of its pickle. A worker that
    does not have it returns None, and the task is submitted again, now with the hook. A small hook
    is sent with every task.
    """

    def __init__(
        self,
        name: str,
        executor: Executor,
        hook: Operation,
        *,
        is_first: bool,
        takes_whole_batch: bool,
        collate_stage: Stage,
        label: Callable[[PendingBatch, int, Any], Any],
        on_sample_error: OnSampleError | None = None,
    ) -> None:
        self._name = name
        self._on_sample_error = on_sample_error
        self._label = label
        """Makes the hook's input of a sample, or of a whole batch, from the batch and slot."""
        self._executor = executor
        self._pickled_hook = pickle.dumps(hook, protocol=pickle.HIGHEST_PROTOCOL)
        self._digest = hashlib.sha256(self._pickled_hook).digest()
        self._is_first = is_first
        self._takes_whole_batch = takes_whole_batch
        self._collate_stage = collate_stage
        self._pace = Pace()
        self._futures = _Futures()
        self._submitted: dict[Future[Any], tuple[_Task, float]] = {}
        self.groups = [self._futures]
        self.clock = self._clock = FutureClock(name, getattr(executor, "_max_workers", None))

    # -- how work enters -----------------------------------------------------------------------

    def open(self, batch: PendingBatch) -> bool:
        if batch.indices:
            self.put(batch, range(len(batch.indices)))
        else:
            self._collate_stage.collate(batch)
        return True

    def in_flight(self) -> list[InFlight]:
        now = time.monotonic()
        return [
            InFlight(self._name, task.batch, slot, now - since, [])
            for task, since in list(self._submitted.values())
            for slot in ([None] if self._takes_whole_batch else task.slots)
        ]

    def put(self, batch: PendingBatch, slots: Sequence[int]) -> None:
        if batch.epoch.is_closed:
            return
        size = len(slots) if self._takes_whole_batch else self._pace.num_samples_in(_TASK_SECONDS)
        for first in range(0, len(slots), size):
            self._submit(_Task(batch, slots[first : first + size]))

    def _submit(self, task: _Task, *, with_hook: bool = False) -> None:
        batch, slots = task
        try:
            inputs = batch.indices if self._is_first else batch.slots
            if self._takes_whole_batch:
                inputs = self._label(batch, WorkerCursor.WHOLE, batch.drawn)
            else:
                inputs = [self._label(batch, slot, inputs[slot]) for slot in slots]
            hook: bytes | None = self._pickled_hook
            if not with_hook and len(self._pickled_hook) > _SMALL_HOOK_BYTES:
                hook = None
            future = self._executor.submit(
                _run_hook, self._digest, hook, inputs, self._takes_whole_batch
            )
        except Exception as error:  # A broken or closed executor refuses at once.
            self._fail(task, without_our_frame(error))
            return
        self._futures.add(future)
        self._submitted[future] = task, time.monotonic()
        self._clock.count_in_flight(len(slots))
        future.add_done_callback(partial(self._on_done, task))
        # Looked at after it was added; closing does it the other way round, so one sees the other.
        if batch.epoch.is_closed:
            self._futures.cancel_all({future})

    # -- what happens when the executor answers; runs in one of its threads ----------------------

    def _on_done(self, task: _Task, future: Future[Any]) -> None:
        self._futures.discard(future)
        self._submitted.pop(future, None)
        self._clock.count_in_flight(-len(task.slots))
        if not task.batch.epoch.is_closed:
            try:
                self._settle(task, future)
            except BaseException as error:
                # concurrent.futures would log this and go on; the consumer would wait for ever.
                task.batch.fail(task.slots[0], error)
                task.batch.finish()
                task.batch.epoch.wake_consumer()

    def _settle(self, task: _Task, future: Future[Any]) -> None:
        batch, slots = task
        error = CancelledError() if future.cancelled() else future.exception()
        if error is not None:
            self._fail(task, error)
            return
        filled: _Filled | _Failed | None = future.result()
        if isinstance(filled, _Failed):
            self._clock.add(0, filled.seconds, filled.cpu_seconds, batch.number)
            self._fail(task, filled.error, filled.offset, has_hook=filled.offset is not None)
            return
        if filled is None:
            self._submit(task, with_hook=True)
            return
        self._clock.add(len(slots), filled.seconds, filled.cpu_seconds, batch.number)
        if self._takes_whole_batch:
            batch.slots = filled.samples
        else:
            for slot, sample in zip(slots, filled.samples, strict=True):
                batch.slots[slot] = sample
            self._pace.observe(len(slots), filled.seconds)
        if batch.settle(len(slots)):
            self._collate_stage.collate(batch)

    def _fail(
        self,
        task: _Task,
        error: BaseException,
        offset: int | None = None,
        *,
        has_hook: bool = True,
    ) -> None:
        """Report a failed sample; without an offset, a failure of the executor itself."""
        batch, slots = task
        slot = None if self._takes_whole_batch else slots[offset or 0]
        if self._on_sample_error is not None and offset is not None and slot is not None:
            failure = self._on_sample_error(batch, slot, self._name, error)
            if failure is None:
                others = [other for other in slots if other != slot]
                if others:
                    self._submit(_Task(batch, others))
                return
            error = failure
        if offset is None:
            note_origin(error, self._name, batch, None)
            _add_hint(error, has_hook=has_hook)
        else:
            note_origin(error, self._name, batch, slot)
        batch.fail(slot or 0, error)
        if batch.settle(len(slots)):
            self._collate_stage.collate(batch)


def _add_hint(error: BaseException, *, has_hook: bool) -> None:
    """Add a note to an executor's exception about its usual cause."""
    if isinstance(error, BrokenProcessPool):
        note = (
            "spdl_torch: a worker of the executor has died. If it died at once, the script may "
            'lack `if __name__ == "__main__":`: a spawned process runs the script again, except '
            "for what stands behind that line."
        )
    elif isinstance(error, ImportError if has_hook else ImportError | AttributeError):
        note = (
            "spdl_torch: the executor's workers have to import the dataset's class. Put it into a "
            "module of its own, which they can find."
        )
    elif has_hook and isinstance(error, pickle.PicklingError | AttributeError | TypeError):
        # What the dataset raises comes back as a result, so this was raised on the way.
        note = (
            "spdl_torch: what goes to the executor's workers and the samples that they return are "
            "pickled, and one of them cannot be. Let load and preprocess return tensors, arrays, "
            "bytes, or objects whose class is at the top level of a module."
        )
    elif isinstance(error, CancelledError):
        note = "spdl_torch: the executor's task was cancelled, or the executor was shut down."
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
        try:
            hook = _hooks[digest] = pickle.loads(pickled_hook)
        except Exception as error:
            return _Failed(None, error, 0.0, 0.0)
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
