"""The engine: threads, slots and windows. It knows no tensors, only the standard library.

The consumer's thread draws the indices of a batch and opens a `PendingBatch` with a slot for each
sample. Stages fill the slots, in any order, and whoever settles the last one has the batch
made, which may go on through one more stage (`TransferStage`). At most `capacity` records are open
at a time (`Window`). All threads of a `Pipeline` belong to its `Lifetime`.

What makes this right, in one place:

* Nothing polls, but for the exit of the interpreter and, twice a second, for Ctrl-C. A worker waits
  in its queue's `get`, the consumer waits for its `Signal`, and whoever changes what they wait for
  wakes them: a task, a finished record, or `close`.
* No value of the user's has a meaning here: `None` is a sample like any other.
* A record is finished exactly once, because exactly one caller of
  `PendingBatch.settle` is the last.
* An exception belongs to its record. It never ends a worker, and the next record is not harmed.
* A record knows its epoch (through its signal). An abandoned epoch's leftovers are passed over, so
  nothing of it reaches the next.
* Every thread measures itself, in a meter that it alone writes and that refers to nothing of the
  user's.
* What threads share changes under a lock, or in one step that Python makes atomic with and without
  a GIL: an item of a list, a deque or a dict put in, taken out or replaced. No iterator is shared.
* Closing first tells all threads to end, which takes no lock of ours and waits for nobody. Then it
  joins them. So a finaliser may close from anywhere; where it might be what the threads wait for,
  as in the middle of a garbage collection, it waits for a moment only.
"""

from ._async_stage import AsyncStage
from ._executor_stage import ExecutorStage
from ._in_flight import InFlight
from ._iterable_stage import IterableStage
from ._measurement import Measurement
from ._meter import Lap, Reading, upper_seconds
from ._pipeline import Pipeline
from ._record import PendingBatch
from ._stages import OnSampleError, SampleStage, ThreadStage, WorkerCursor, check_count
from ._transfer_stage import TransferStage
from ._window import NUM_BEFORE, NotInTime

__all__ = [
    "NUM_BEFORE",
    "AsyncStage",
    "ExecutorStage",
    "InFlight",
    "IterableStage",
    "Lap",
    "Measurement",
    "NotInTime",
    "OnSampleError",
    "PendingBatch",
    "Pipeline",
    "Reading",
    "SampleStage",
    "ThreadStage",
    "TransferStage",
    "WorkerCursor",
    "check_count",
    "upper_seconds",
]
