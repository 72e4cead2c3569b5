"""What runs in a child process: the stages of the engine, on batches that the parent sends.

The main thread reads what the parent sends and opens the batches; it runs no code of the user. The
worker thread that finishes a batch sends it. The parent bounds how many batches are in flight.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from ._batch import Epoch, PendingBatch
from ._board import Board
from ._child_clock import Figures
from ._clock import Counter, Reading, Span
from ._connection import Closed, Connection
from ._remote_error import RemoteError
from ._stage import Stage
from ._threads import Lifetime

_FIRST_WAIT_SECONDS: Final = 0.002
"""How long few workers may work on cheap batches before the idle ones are woken too."""
_HEARTBEAT_SECONDS: Final = 0.5
"""How often the parent hears of the clocks while all batches take longer."""
_READ_SECONDS: Final = 0.05
"""How often the clocks are sent with a batch."""
_GRACE_SECONDS: Final = 3.0
"""How long a child that is to end waits for workers that are inside the user's code. It is shorter
than the parent waits for the child."""


# -- messages from the parent ---------------------------------------------------------------------

NO_EPOCH: Final = -1
"""The id of an epoch that never is: only what is released counts, and no batch is made."""


class Begin(NamedTuple):
    """Begin an epoch; that before it is abandoned."""

    epoch_id: int
    description: Any
    records_spans: bool


class Make(NamedTuple):
    """Make a batch."""

    epoch_id: int
    number: int
    description: Any
    freed: Any
    """What the parent has released since its last message."""
    is_careful: bool
    """A sample of it may have killed a child: make them one by one, and nothing else meanwhile."""
    sent_at: float
    """`time.monotonic()`, which is the same in all processes."""


class Report(NamedTuple):
    """Say what the workers are doing."""


# -- messages from the child ----------------------------------------------------------------------


class IsSetUp(NamedTuple):
    """The workers are ready, or their set-up failed."""

    error: RemoteError | None


class Done(NamedTuple):
    """A batch, or its error."""

    epoch_id: int
    number: int
    error: RemoteError | None
    is_exhausted: bool
    body: Any
    figures: Figures | None
    spans: list[Span]


class Busy(NamedTuple):
    """What one worker is doing: the fields of `InFlight`, with the number of the batch."""

    stage: str
    number: int
    slot: int | None
    seconds: float
    lines: list[str]


class Reported(NamedTuple):
    in_flight: list[Busy]


# -- the program ----------------------------------------------------------------------------------


class Program(Protocol):
    """What a child does with the user's code. It is pickled if children are not forked."""

    @property
    def num_workers(self) -> int:
        """How many rows the board of a child has."""

    def prepare_fork(self) -> None:
        """Prepare what children would do more expensively. Runs in the parent, before a fork."""

    def set_up(self, child: int, board: Board) -> Sequence[Stage]:
        """Return the stages of a child, first to last. Runs first in its main thread."""

    def start(self, lifetime: Lifetime) -> None:
        """Start the workers and wait for them."""

    def begin_epoch(self, description: Any) -> None: ...

    def open(self, batch: ChildBatch, description: Any, *, is_careful: bool) -> None:
        """Hand a batch to its stage."""

    def release(self, freed: Any) -> None: ...

    def answer(self, batch: ChildBatch, output: Any) -> tuple[Any, Sequence[int]]:
        """Return what is sent for a finished batch, and descriptors. Runs in a worker's thread."""

    def discard(self, output: Any) -> None:
        """Drop an output that could not be sent. Runs in a worker's thread."""


class ChildBatch(PendingBatch):
    """A batch in a child process: who finishes it sends it to the parent."""

    def __init__(
        self, epoch: Epoch, epoch_id: int, number: int, send: Callable[[ChildBatch, Any], None]
    ) -> None:
        super().__init__(epoch, number, None, [])
        self.epoch_id = epoch_id
        """The parent's id of its epoch, which may have been abandoned since."""
        self._send = send

    def draw(self, drawn: Any, indices: list[Any]) -> None:
        """Say what the batch is made of. The parent has drawn it."""
        super().__init__(self.epoch, self.number, drawn, indices)
        self.original_indices = indices[:]

    def finish(self, output: Any = None) -> None:
        if not self.is_finished:
            super().finish()
            self._send(self, output)


@dataclass
class _Server:
    connection: Connection
    program: Program
    stages: Sequence[Stage] = ()
    lifetime: Lifetime | None = None
    epoch: Epoch | None = None
    epoch_id: int = NO_EPOCH
    unfinished: dict[int, PendingBatch] = field(default_factory=dict)
    spans: deque[Span] = field(default_factory=deque)
    at_begin: tuple[int, dict[str, Counter]] = field(default_factory=lambda: (-1, {}))
    """The epoch, and the clocks of each stage when it began. In one object, because the workers
    read it while the main thread replaces it."""
    sent_figures_at: float = 0.0
    num_wakeups: int = 0
    wake_seconds: float = 0.0
    """How long the messages of this epoch took to be read, which needs the GIL."""

    def serve(self, parent: int) -> None:
        """Do what the parent says until it closes the connection or dies."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        poll.register(parent, select.POLLIN)
        timeout: float | None = None
        while True:
            ready = poll.poll(None if timeout is None else 1000 * timeout)
            if any(file == parent for file, _ in ready):
                os._exit(1)
            if ready:
                self._obey(self.connection.receive()[0])
                timeout = _FIRST_WAIT_SECONDS if self.unfinished else None
                continue
            # Work was not as cheap as it seemed, or samples wait for one another.
            is_heartbeat = timeout == _HEARTBEAT_SECONDS
            self.stages[0].wake_idle(only_if_starved=not is_heartbeat)
            if is_heartbeat:
                self.connection.send(self._figures())
            timeout = _HEARTBEAT_SECONDS if self.unfinished else None

    def _obey(self, message: Any) -> None:
        match message:
            case Make():
                self.num_wakeups += 1
                self.wake_seconds += max(0.0, time.monotonic() - message.sent_at)
                self.program.release(message.freed)
                if message.epoch_id == self.epoch_id:
                    self._make(message)
            case Begin():
                self.epoch_id = message.epoch_id
                self.epoch = Epoch()
                self.unfinished = {}
                assert self.lifetime is not None
                self.lifetime.begin(self.epoch)
                counters = {each.name: each.counter for each in self._read(time.monotonic())}
                self.at_begin, self.sent_figures_at = (message.epoch_id, counters), 0.0
                self.num_wakeups, self.wake_seconds = 0, 0.0
                if message.records_spans:
                    for stage in self.stages:
                        stage.clock.record_spans(self.spans.append)
                self.program.begin_epoch(message.description)
            case Report():
                items = [item for stage in self.stages for item in stage.in_flight()]
                self.connection.send(
                    Reported(
                        [
                            Busy(item.stage, item.batch.number, item.slot, item.seconds, item.lines)
                            for item in items
                            if item.batch.epoch is self.epoch
                        ]
                    )
                )

    def set_up(self, child: int, board: Board) -> None:
        self.stages = self.program.set_up(child, board)
        self.lifetime = Lifetime([group for stage in self.stages for group in stage.groups])
        self.program.start(self.lifetime)

    def _make(self, message: Make) -> None:
        assert self.epoch is not None
        batch = ChildBatch(self.epoch, message.epoch_id, message.number, self._send)
        self.unfinished[message.number] = batch
        try:
            self.program.open(batch, message.description, is_careful=message.is_careful)
            self.stages[0].wake(is_needed=True, is_quick=False)
        except Exception as error:
            batch.fail(0, error)
            batch.finish()

    def _send(self, batch: ChildBatch, output: Any) -> None:
        if batch.epoch is self.epoch:
            self.unfinished.pop(batch.number, None)
        now, figures = time.monotonic(), None
        if not self.unfinished or now - self.sent_figures_at > _READ_SECONDS:
            self.sent_figures_at = now
            figures = self._figures()
        spans: list[Span] = []
        with contextlib.suppress(IndexError):
            while True:
                spans.append(self.spans.popleft())
        error = None if batch.error is None else RemoteError(batch.error)
        done = Done(batch.epoch_id, batch.number, error, batch.is_exhausted, None, figures, spans)
        # The parent may have died, and then so does this process.
        with contextlib.suppress(Closed):
            try:
                body, descriptors = self.program.answer(batch, output)
                self.connection.send(done._replace(body=body), descriptors)
            except Closed:
                raise
            except Exception as failure:  # A bookmark, for example, cannot be pickled.
                self.program.discard(output)
                self.connection.send(done._replace(error=RemoteError(failure)))

    def _figures(self) -> Figures:
        """Return what the workers have done in this epoch."""
        epoch_id, at_begin = self.at_begin
        now = time.monotonic()
        readings = self._read(now)
        for reading in readings:
            reading.counter.combine(at_begin[reading.name], -1)
            reading.counter.num_wakeups = self.num_wakeups
            reading.counter.wake_seconds = self.wake_seconds
        return Figures(epoch_id, now, readings)

    def _read(self, now: float) -> list[Reading]:
        return [reading for stage in self.stages for reading in stage.clock.read(now)]


def run_child(end: socket.socket, child: int, program: Program, parent_id: int) -> None:
    """Run a child process until its parent closes the connection."""
    # Ctrl-C reaches all processes of a terminal. The parent decides what becomes of its children.
    # Not SIG_IGN, which programs that the dataset starts would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    # A handler that the training has set, to save a checkpoint, is not for its forked children.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A worker that is stuck in the user's code would abort the exit of the interpreter, if the
    # child was not forked. All that is to be done at the exit has been done by then.
    atexit.register(os._exit, 0)
    try:
        parent = os.pidfd_open(parent_id)
    except ProcessLookupError:
        return
    connection = Connection(end)
    server = _Server(connection, program)
    with contextlib.suppress(Closed):
        descriptor = connection.receive()[1][0]
        try:
            server.set_up(child, Board(program.num_workers, descriptor))
        except BaseException as error:
            connection.send(IsSetUp(RemoteError(error)))
            return
        connection.send(IsSetUp(None))
        server.serve(parent)
    if server.lifetime is not None:
        server.lifetime.request_stop()
        server.lifetime.join(_GRACE_SECONDS)
