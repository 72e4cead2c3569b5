"""The stage whose workers are child processes: each makes whole batches with stages of its own.

What makes this right:

* The consumer's thread sends batches to the children and starts them, at first and after one has
  died: a fork in another thread could copy locks that the consumer holds. One thread receives what
  all children send, finishes the batches and wakes the consumer. Both change what is known of a
  child with `_lock` held, and no code of the user runs meanwhile, except to pickle a draw.
* A batch is *assigned* to one child from `open` until its answer is received. An answer to a batch
  that is not assigned (of an abandoned epoch) is thrown away. So a batch is finished once.
* A child that dies closes its connection, which ends the receiving thread's wait. It wakes the
  consumer, which starts another child and sends it what was assigned to the dead one. Answers that
  the dead child had sent were received before the end of its connection.
* What may have killed a child is made once more, one sample at a time and with nothing else in
  that child. So if the child dies again, the board has the one sample that killed it twice.
* The receiving thread waits for the connections and for `_wakeup`, which closing, a new child and
  a message that its connection had no room for write to. It refers to the stage weakly while it
  waits.
* Only `post` sends, and to a child that has died or is closed it sends nothing: what is assigned to
  a dead child is sent to the one that takes its place, and a closed stage has closed its epoch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

from ._batch import Epoch, PendingBatch, note_origin
from ._board import Board
from ._child import (
    NO_EPOCH,
    Begin,
    Done,
    IsSetUp,
    Make,
    Program,
    Report,
    Reported,
    run_child,
)
from ._child_clock import ChildClock, Figures, added_up
from ._clock import Reading, Recorder
from ._connection import Closed, Connection
from ._in_flight import InFlight
from ._stage import Stage, forward
from ._threads import WAIT_SECONDS, NotSetUp, WorkerGroup, forget_ended, new_thread

_logger = logging.getLogger("spdl_torch")

_GRACE_SECONDS: Final = 4.0
"""How long a child has to end before it is killed."""
_REPORT_SECONDS: Final = 1.0
"""How long children have to say what they are doing. One that holds the GIL cannot."""
_MAX_RESTARTS: Final = 5
"""How many children may die in an epoch without a sample that is to blame."""


class Host(Protocol):
    """What the parent does with the user's objects for its children."""

    def describe_epoch(self, *, is_restart: bool) -> Any:
        """Return what children need to know of the epoch that begins, or goes on in a new child."""

    def describe(self, batch: PendingBatch, worker: int | None) -> Any:
        """Return what a child needs to know of a batch."""

    def accept(
        self, child: int, batch: PendingBatch | None, body: Any, descriptors: list[int]
    ) -> Any:
        """Return the output of a batch that a child has answered; None: throw it away."""

    def take_freed(self, child: int) -> Any:
        """Return what the parent has released since the last call."""

    def forget(self, child: int) -> None:
        """A child has died, and another takes its place."""


OnDeath = Callable[[PendingBatch, int, Exception], BaseException | None]
"""Called with a batch and the slot of the sample that killed a child twice. Puts another index into
the slot, or returns the error that the batch ends in."""


class _Died(NamedTuple):
    """Stands behind the last message of a child that has died. The consumer replaces it."""


@dataclass(eq=False)
class _Child:
    """One child process, and the batches that are assigned to it."""

    number: int
    board: Board
    process: BaseProcess | None = None
    connection: Connection | None = None
    assigned: dict[int, tuple[PendingBatch, int | None]] = field(default_factory=dict)
    """By the number of the batch: it, and the worker of an iterable dataset that has to make it."""
    careful: deque[int] = field(default_factory=deque)
    """The numbers of the batches that may have killed it, the first of which it is making."""
    held: list[int] = field(default_factory=list)
    """Those that it gets after the careful ones."""
    clock: ChildClock = field(default_factory=ChildClock)
    sentinel: int = -1
    """A descriptor of the process, which is ready when that has ended. The end of the connection
    does not tell: another process may have been forked with a copy of the child's socket."""
    set_up: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue)
    reports: SimpleQueue[Reported | None] = field(default_factory=SimpleQueue)
    has_ended: bool = False
    """Whether the process had ended when its messages were last received."""
    is_dead: bool = False
    """Another child is to take its place."""
    first_at_death: int | None = None
    """The first batch that was assigned to it when it died."""

    def start(self, context: BaseContext, program: Program) -> None:
        """Start a process, in the place of one that has died if there was one."""
        self.close()
        self.is_dead = True  # So nothing waits for it yet.
        self.set_up = SimpleQueue()
        self.board.clear()
        # Before it starts, so that it can be ended if Ctrl-C comes while it does. Even if its
        # process id is lost then, it ends when its connection does.
        connection, end = Connection.pair()
        self.connection = connection
        self.process = process = context.Process(  # type: ignore[attr-defined]
            target=run_child,
            args=(end, self.number, program, os.getpid()),
            name=f"spdl_torch-{self.number}",
            daemon=True,
        )
        with end:
            connection.send(None, [self.board.descriptor])
            process.start()
        self.sentinel = os.pidfd_open(process.pid)
        self.is_dead = False

    def receive(self) -> Iterator[tuple[Any, list[int]]]:
        """Yield the next message, or all if the process has ended; raise Closed after the last."""
        assert self.connection is not None
        with contextlib.suppress(BlockingIOError):
            yield self.connection.receive(wait=False)
            while self.has_ended:
                yield self.connection.receive(wait=False)

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        sentinel, self.sentinel = self.sentinel, -1
        if sentinel >= 0:
            os.close(sentinel)

    def end_process(self, grace_seconds: float) -> None:
        """Wait for the process to end, and kill it if it does not."""
        if self.process is not None and self.process.pid is not None:
            self.process.join(grace_seconds)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()

    def exit_text(self) -> str:
        """Return how it ended, in torch's words."""
        assert self.process is not None
        self.end_process(_GRACE_SECONDS)
        code = self.process.exitcode
        name = f"DataLoader worker (pid {self.process.pid})"
        if code is None or code >= 0:
            return f"{name} exited unexpectedly with exit code {code}"
        return f"{name} is killed by signal: {signal.strsignal(-code)}"


class ChildStage(Stage):
    """A first stage whose workers are child processes.

    `by_turn` gives batch k to child k mod the number of children, as torch does; otherwise, and
    without `in_order`, the child with the fewest batches gets the next one, so that one with a slow
    batch does not get all that may be in flight. For an iterable dataset, `first_worker` returns
    the worker whose turn it is when an epoch begins; worker w lives in child w mod their number.
    """

    def __init__(
        self,
        num_children: int,
        context: BaseContext,
        program: Program,
        host: Host,
        *,
        num_workers: int,
        by_turn: bool,
        in_order: bool,
        first_worker: Callable[[], int] | None = None,
        transfer_stage: Stage | None = None,
        on_death: OnDeath | None = None,
    ) -> None:
        self.context = context
        self.program = program
        self._host = host
        self._num_workers = num_workers
        self._by_turn = by_turn and in_order
        self._in_order = in_order
        self._first_worker = first_worker
        self._transfer_stage = transfer_stage
        self._on_death = on_death
        self._children = [_Child(n, Board(program.num_workers)) for n in range(num_children)]
        self._lock = threading.RLock()
        self._epoch: Epoch | None = None
        self._rotation: deque[int] = deque()
        """The workers of an iterable dataset that have something left, in turn."""
        self._exhausted: set[int] = set()
        self._num_restarts = 0
        self.clock = self._clock = _ChildrenClock(self._children)
        self.group = _Group(self, self._children)
        self.groups = [self.group]

    # -- in the consumer's thread -----------------------------------------------------------------

    def open(self, batch: PendingBatch) -> bool:
        with self._lock:
            if batch.epoch is not self._epoch:
                self._begin(batch.epoch)
            worker = None
            if self._first_worker is not None:
                in_work = None if self._in_order else self._children
                worker = _next_worker(self._rotation, self._exhausted, in_work)
                if worker is None:
                    return False
                child = self._children[worker % len(self._children)]
            elif self._by_turn:
                child = self._children[batch.number % len(self._children)]
            else:
                child = _least_busy(self._children, batch.number)
            child.assigned[batch.number] = batch, worker
            if child.careful:
                child.held.append(batch.number)
            else:
                self._send(child, batch.number)
        return True

    def _begin(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._num_restarts = 0
        self._exhausted = set()
        if self._first_worker is not None:
            self._rotation = deque(range(self._num_workers))
            self._rotation.rotate(-self._first_worker())
        for child in self._children:
            child.assigned.clear()
            child.careful.clear()
            child.held.clear()
            child.first_at_death = None
            self._send_epoch(child, epoch, is_restart=False)

    def _send_epoch(self, child: _Child, epoch: Epoch, *, is_restart: bool) -> None:
        child.clock.begin(epoch.id)
        try:
            description = self._host.describe_epoch(is_restart=is_restart)
            self._post(child, Begin(epoch.id, description, self._clock.recorder is not None))
        except Exception as error:  # A loaded state cannot be pickled. The frames refer to us.
            epoch.close(error.with_traceback(None), f"a worker process cannot begin: {error}.")

    def _send(self, child: _Child, number: int) -> None:
        batch, worker = child.assigned[number]
        freed: Any = ()
        try:
            description = self._host.describe(batch, worker)
            freed = self._host.take_freed(child.number)
            is_careful = number in child.careful
            message = Make(batch.epoch.id, number, description, freed, is_careful, time.monotonic())
            self._post(child, message)
        except Exception as error:  # What the sampler drew cannot be pickled.
            del child.assigned[number]
            batch.fail(0, error)
            batch.finish()
            now = time.monotonic()
            self._post(child, Make(NO_EPOCH, number, None, freed, is_careful=False, sent_at=now))

    def _post(self, child: _Child, message: Any) -> None:
        connection = child.connection  # Closing, in another thread, may remove it.
        if connection is None or child.is_dead:
            return
        try:
            if not connection.post(message):
                self.group.wake()
        except OSError as error:
            self.fail(error)

    def wake(self, *, is_needed: bool, is_quick: bool) -> None:  # noqa: ARG002 (they are awake)
        """Start others in the place of children that have died."""
        if any(child.is_dead for child in self._children):
            for child in self._children:
                if child.is_dead and self._epoch is not None and not self._epoch.is_closed:
                    self._replace(child)

    def _replace(self, child: _Child) -> None:
        text = child.exit_text()
        with self._lock:
            self._blame(child, text)
            assert self._epoch is not None
            self._num_restarts += 1
            if self._num_restarts > _MAX_RESTARTS:
                words = f"{text}. It was the {self._num_restarts}th in this epoch."
                self._epoch.close(RuntimeError(text), words)
            if self._epoch.is_closed:
                return
            num_lost = len(child.assigned)
            _logger.warning("%s. Another one makes its %d batches again.", text, num_lost)
            self._host.forget(child.number)
            try:
                _prepare(self.context, self.program)
                child.start(self.context, self.program)
            except Exception as error:
                self._epoch.close(error, "a worker process could not be started again.")
                return
            if self.group.is_closed:  # By another thread, which may not know the new process.
                self.group.end_processes()
                return
            self.group.wake()
            self._send_epoch(child, self._epoch, is_restart=True)
            numbers = list(child.assigned)
            if child.careful:
                self._send(child, child.careful[0])
                child.held = [number for number in numbers if number not in child.careful]
            else:
                child.held = []
                for number in numbers:
                    self._send(child, number)

    def _blame(self, child: _Child, text: str) -> None:
        """Find what has killed a child; end the batch in an error if it was not the first time."""
        if not child.assigned:
            return
        first = next(iter(child.assigned))
        if self._first_worker is not None:
            if first == child.first_at_death:
                batch, worker = child.assigned[first]
                assert self._epoch is not None
                words = f"{text}, for the second time in batch {first} of worker {worker}."
                self._epoch.close(RuntimeError(text), words)
            child.first_at_death = first
            return
        rows = [(number, slot) for number, slot in child.board.read() if number in child.assigned]
        if not child.careful:
            suspects = {number for number, _ in rows}
            if not suspects and first == child.first_at_death:
                suspects = set(child.assigned)  # Calls in an event loop are not on the board.
            child.careful = deque(sorted(suspects))
            child.first_at_death = first
            return
        number = child.careful[0]
        batch, _ = child.assigned[number]
        slots = [slot for in_work, slot in rows if in_work == number]
        if not slots:
            return  # It died before it began with it.
        # The worker that makes it has a row of its own, which says only that it makes a batch.
        slot = max(slots)
        if not 0 <= slot < len(batch.indices):
            slot = -1  # All its samples at once, or collate.
        what = f"sample index {batch.indices[slot]!r}" if slot >= 0 else f"batch {number}"
        error = RuntimeError(f"{what} has ended a worker process twice: {text}.")
        self._num_restarts = 0
        final: BaseException = error
        if self._on_death is not None and slot >= 0:
            if (failure := self._on_death(batch, slot, error)) is None:
                return  # Another sample is in the slot, and is made carefully too.
            final = failure
        note_origin(final, "preprocess", batch, slot if slot >= 0 else None)
        batch.fail(max(slot, 0), final)
        del child.assigned[number]
        child.careful.popleft()
        forward(batch, None, self._transfer_stage)
        batch.epoch.wake_consumer()

    # -- in the receiving thread ------------------------------------------------------------------

    def receive(self, child: _Child, message: Any, descriptors: list[int]) -> None:
        match message:
            case Done():
                self._receive_batch(child, message, descriptors)
            case Figures():
                with self._lock:
                    child.clock.receive(message)
            case Reported():
                child.reports.put(message)
            case IsSetUp():
                error = None if message.error is None else message.error.error
                child.set_up.put(error)
                if error is not None and self._epoch is not None:
                    self._epoch.close(error, "a worker process could not be started again.")
            case _Died():
                child.is_dead = True
                child.reports.put(None)
                child.set_up.put(None)
                if self._epoch is not None:
                    self._epoch.wake_consumer()

    def _receive_batch(self, child: _Child, done: Done, descriptors: list[int]) -> None:
        with self._lock:
            batch, worker = None, None
            is_current = self._epoch is not None and done.epoch_id == self._epoch.id
            if is_current:
                batch, worker = child.assigned.pop(done.number, (None, None))
            if done.figures is not None:
                child.clock.receive(done.figures)
            if self._clock.recorder is not None:
                # Each may have an event loop called `load`.
                suffix = f" in child {child.number}" if len(self._children) > 1 else ""
                for span in done.spans:
                    self._clock.recorder(replace(span, worker=f"{span.worker}{suffix}"))
            if batch is not None and child.careful and child.careful[0] == done.number:
                child.careful.popleft()
                self._send_next(child)
            if batch is not None and done.is_exhausted:
                assert worker is not None
                self._exhausted.add(worker)
                batch.is_exhausted = True
        output = None
        try:
            output = self._host.accept(child.number, batch, done.body, descriptors)
        except Exception as error:
            if batch is not None:
                batch.fail(0, error)
        if batch is not None:
            if done.error is not None:
                batch.fail(0, done.error.error)
            forward(batch, output, self._transfer_stage)
            batch.epoch.wake_consumer()

    def _send_next(self, child: _Child) -> None:
        if child.careful:
            self._send(child, child.careful[0])
            return
        held, child.held = child.held, []
        for number in held:
            self._send(child, number)

    def fail(self, error: BaseException) -> None:
        """End the epoch: a message was lost."""
        if self._epoch is not None:
            self._epoch.close(error, f"a message of a worker process was lost: {error}.")

    # -- in any thread ----------------------------------------------------------------------------

    def in_flight(self) -> list[InFlight]:
        found: list[InFlight] = []
        deadline = time.monotonic() + _REPORT_SECONDS
        asked = [child for child in self._children if child.assigned]
        for child in asked:
            with contextlib.suppress(Empty):
                while True:
                    child.reports.get_nowait()
            self._post(child, Report())
        for child in asked:
            report = None
            with contextlib.suppress(Empty):
                report = child.reports.get(timeout=max(0.0, deadline - time.monotonic()))
            assigned = child.assigned.copy()
            if report is not None:
                found += [
                    InFlight(busy.stage, assigned[busy.number][0], *busy[2:])
                    for busy in report.in_flight
                    if busy.number in assigned
                ]
            else:
                found += [
                    InFlight(
                        "preprocess", assigned[number][0], slot if slot >= 0 else None, 0.0, []
                    )
                    for number, slot in child.board.read()
                    if number in assigned
                ]
        return found


def _prepare(context: BaseContext, program: Program) -> None:
    if context.get_start_method() == "fork":
        program.prepare_fork()


def _least_busy(children: list[_Child], number: int) -> _Child:
    """Return the child with the fewest batches; of several, the one whose turn it is."""
    turn = number % len(children)
    return min(children[turn:] + children[:turn], key=lambda child: len(child.assigned))


def _next_worker(
    rotation: deque[int], exhausted: set[int], children: list[_Child] | None
) -> int | None:
    """Return the worker of an iterable dataset that makes the next batch, if one has any left.

    It is the next in turn; with `children`, that of those with the fewest batches.
    """
    for worker in exhausted.intersection(rotation):
        rotation.remove(worker)
    if not rotation:
        return None
    if children is not None:
        busy = Counter(worker for child in children for _, worker in child.assigned.values())
        rotation.rotate(-min(range(len(rotation)), key=lambda place: busy[rotation[place]]))
    rotation.rotate(-1)
    return rotation[-1]


class _ChildrenClock:
    """The clocks of all children, as they were when each child last sent them."""

    def __init__(self, children: Sequence[_Child]) -> None:
        self._children = children
        self.recorder: Recorder | None = None

    def read(self, now: float) -> list[Reading]:
        return added_up(
            child.clock.read(now, has_work=bool(child.assigned)) for child in self._children
        )

    def record_spans(self, recorder: Recorder) -> None:
        self.recorder = recorder


class _Group(WorkerGroup):
    """The child processes and the thread that receives what they send."""

    def __init__(self, stage: ChildStage, children: Sequence[_Child]) -> None:
        self._children = children
        self.stage_ref = weakref.ref(stage)
        self._process_id = os.getpid()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wakeup).atexit = False
        self.is_closed = False
        self._must_register = True
        """What is waited for may have changed. The receiving thread alone uses this."""
        self.threads = []
        """The receiving thread, made when it starts: one that never starts keeps this alive."""

    def start(self, seconds_apart: float, deadline: float) -> None:  # noqa: ARG002 (in the child)
        stage = self.stage_ref()
        assert stage is not None
        try:
            _prepare(stage.context, stage.program)
            for child in self._children:
                if not self.is_closed:  # By another thread.
                    child.start(stage.context, stage.program)
        finally:
            # Also for children that were started before one could not be.
            self.threads.append(new_thread("receiver", _receive, self))
            self.threads[0].start()

    def wait_until_set_up(self, deadline: float) -> list[threading.Thread]:
        for child in self._children:
            has_died = False
            while not self.is_closed:
                # The child has the same deadline, and says where its workers are.
                left = max(0.0, deadline + _REPORT_SECONDS - time.monotonic())
                try:
                    error = child.set_up.get(timeout=min(left, WAIT_SECONDS))
                except Empty:
                    if left == 0:
                        raise NotSetUp({f"worker process {child.number}": []}) from None
                    continue
                if error is not None:
                    raise error
                if not child.is_dead:
                    break
                text, stage = child.exit_text(), self.stage_ref()
                if has_died or stage is None:
                    raise RuntimeError(
                        f"{text}, while it was set up. Look for what ends a process in "
                        "worker_init_fn or while the dataset is unpickled."
                    )
                # As in the middle of an epoch: the first time it may have come from outside.
                _logger.warning("%s, while it was set up. Another one takes its place.", text)
                has_died = True
                child.start(stage.context, stage.program)
                if self.is_closed:  # By another thread, which may not know the new process.
                    self.end_processes()
                self.wake()
        return []

    @property
    def processes(self) -> list[BaseProcess]:
        return [child.process for child in self._children if child.process is not None]

    def abandon(self) -> None:
        # The next epoch says so to the children.
        for child in self._children:
            child.clock.is_abandoned = True

    def request_stop(self) -> None:
        self.is_closed = True
        if os.getpid() == self._process_id:
            for child in self._children:
                if child.connection is not None:
                    child.connection.shut_down()
            self.wake()

    def wake(self) -> None:
        """Let the receiving thread look again at what it waits for."""
        os.eventfd_write(self._wakeup, 1)

    def wait(self) -> list[_Child]:
        """Wait until a child has sent something, or has ended; return those."""
        if self._must_register:
            self._register()
        ready = dict(self._poll.poll())
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        for child in self._waited_for:
            child.has_ended = child.sentinel in ready
        found = [
            child
            for child in self._waited_for
            if child.connection and (child.has_ended or child.connection.fileno() in ready)
        ]
        # Messages change nothing of what is waited for; all else may.
        self._must_register = len(found) < len(ready) or any(
            child.has_ended or ready[child.connection.fileno()] != select.POLLIN
            for child in found
            if child.connection
        )
        return found

    def _register(self) -> None:
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)
        self._waited_for = [
            child for child in self._children if child.connection and not child.is_dead
        ]
        for child in self._waited_for:
            assert child.connection is not None
            for_room = select.POLLOUT if child.connection.has_unsent else 0
            self._poll.register(child.connection, select.POLLIN | for_room)
            self._poll.register(child.sentinel, select.POLLIN)

    def end_processes(self) -> None:
        """Wait for the children to end, and kill those that do not."""
        self.request_stop()
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in self._children:
            child.end_process(max(0.0, deadline - time.monotonic()))
            child.close()


def _receive(group: _Group) -> None:
    """Receive what all children send. While this waits, it refers to the stage only weakly."""
    while not group.is_closed:
        ready = group.wait()
        stage = group.stage_ref()
        if stage is None:
            break
        for child in ready:
            try:
                assert child.connection is not None
                if child.connection.has_unsent:
                    child.connection.flush()
                for message, descriptors in child.receive():
                    stage.receive(child, message, descriptors)
                if child.has_ended:  # What it sent before has just been received.
                    stage.receive(child, _Died(), [])
            except Closed:
                stage.receive(child, _Died(), [])
            except BaseException as error:  # Of our own code: the consumer must not wait for ever.
                stage.fail(error)
        del stage, ready
    group.end_processes()
    forget_ended(threading.current_thread())
