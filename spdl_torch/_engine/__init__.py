"""The engine: threads, slots and windows. It knows no tensors, only the standard library.

The consumer's thread draws the indices of a batch and opens a `PendingBatch` with a slot for each
sample. Worker threads pull slots from the oldest batch, fill them in any order, and the worker that
settles the last slot makes the batch, which may pass one more stage (`TransferStage`). At most
`capacity` batches are in flight (`Window`). All threads of a `Pipeline` belong to its `Lifetime`.

What makes this right, in one place:

* Who waits, and what wakes it: a worker waits in `TaskQueue.get` and is woken by a task or by
  `close`; a worker that pauses before it loads again waits in `Epoch.pause`; the consumer waits for
  `Epoch.wakeup` and is woken by a finished batch or by `close`. So closing the queues and the epoch
  wakes everything. Starting and joining threads is waited for with a timeout.
* A slot is claimed once, because workers pop it from one list. A batch is finished once, because
  exactly one caller of `PendingBatch.settle` settles the last slot. Of several errors in a batch
  the one of the lowest slot wins. (A batch of which no slot is left to work on is finished by the
  one thread that has it: the consumer if the sampler failed, a worker of an iterable dataset.)
* No value of the user's has a meaning here: `None` is a sample like any other.
* An exception belongs to its batch. It never ends a worker, and the next batch is not harmed.
* A batch refers to its epoch. Leftovers of an abandoned epoch are skipped, so nothing of it reaches
  the next.
* What threads share changes under a lock, or in one step that Python makes atomic with and without
  a GIL: an attribute that is set, an item of a list, a deque or a dict that is put in, taken out or
  replaced. Estimates (`Pace`) may lose an update.
* Every thread is measured by one clock, which it alone writes.
* An idle thread refers to its stage weakly (`_threads._serve`, `_LoopThread`), so that an iterator
  that is dropped can be collected, and its finaliser ends the threads.
"""

from ._async_stage import AsyncStage
from ._batch import PendingBatch, check_count
from ._board import Board
from ._child import ChildBatch
from ._child_stage import ChildStage
from ._clock import EpochClock, LoopStats, Recorder, Span, StageStats
from ._executor_stage import ExecutorStage
from ._in_flight import InFlight
from ._iterable_stage import IterableStage
from ._pipeline import Pipeline
from ._remote_error import InAnotherProcess
from ._stage import OnSampleError, Stage, ThreadStage, WorkerCursor
from ._threads import Lifetime, NotSetUp, warn_caller
from ._transfer_stage import TransferStage
from ._window import NUM_EARLIER, NotInTime, Window

__all__ = [
    "NUM_EARLIER",
    "AsyncStage",
    "Board",
    "ChildBatch",
    "ChildStage",
    "EpochClock",
    "ExecutorStage",
    "InAnotherProcess",
    "InFlight",
    "IterableStage",
    "Lifetime",
    "LoopStats",
    "NotInTime",
    "NotSetUp",
    "OnSampleError",
    "PendingBatch",
    "Pipeline",
    "Recorder",
    "Span",
    "Stage",
    "StageStats",
    "ThreadStage",
    "TransferStage",
    "Window",
    "WorkerCursor",
    "check_count",
    "warn_caller",
]
