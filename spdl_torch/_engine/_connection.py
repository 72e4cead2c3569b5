"""A connection between a parent and its child process: whole messages, with file descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

_MAX_BYTES: Final = 32_768
"""A longer message travels in anonymous memory, whose descriptor is sent instead."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * array("i").itemsize)
"""Room for the descriptors of a message."""

_SHORT: Final = b"s"
_LONG: Final = b"l"


class Closed(Exception):  # noqa: N818 (the end of a connection is not always an error)
    """The other side has ended, or has closed the connection."""


class Connection:
    """One end of a pair of sockets that keep the boundaries of messages.

    The parent's `post` never blocks, because a child may be stuck with the GIL held: what the
    socket does not take waits here until the receiving thread, which waits for room too, calls
    `flush`. The child's `send` blocks until the parent has read enough. Several threads may send at
    the same time.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._process_id = os.getpid()
        self._unsent: deque[bytes] = deque()
        self._lock = threading.Lock()

    @staticmethod
    def pair() -> tuple[Connection, socket.socket]:
        """Return the parent's connection, and the socket for that of the child."""
        parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Connection(parent), child

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message; wait until there is room for it. What cannot be pickled raises."""
        with _encoded(message, descriptors) as (data, sent):
            try:
                self._send(data, sent)
            except ConnectionError as error:
                raise Closed from error

    def post(self, message: Any) -> bool:
        """Send a message as soon as there is room for it; return whether that is now."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._unsent.append(data)
        self.flush()
        return not self._unsent

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what is left, as far as there is room. The end of the other side is no error."""
        with self._lock:
            try:
                while self._unsent and self._socket.fileno() >= 0:
                    with _in_memory(self._unsent[0], ()) as (data, sent):
                        self._send(data, sent, socket.MSG_DONTWAIT)
                    self._unsent.popleft()
            except BlockingIOError:
                pass
            except OSError as error:
                self._unsent.clear()
                if not isinstance(error, ConnectionError):  # Too many open files, for example.
                    raise

    def receive(self, *, wait: bool = True) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors. Without waiting, BlockingIOError if none."""
        options = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _MAX_BYTES + 1, _ANCILLARY_BYTES, options
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        descriptors = [file for *_, files in ancillary for file in array("i", files)]
        if flags & socket.MSG_CTRUNC:
            raise OSError(
                errno.EMFILE,
                "this process has too many open files to receive a batch from a worker process. "
                "Raise the limit (ulimit -n)",
            )
        if data[:1] == _LONG:
            with os.fdopen(descriptors.pop(0), "rb") as file:
                file.seek(0)  # The position is that of the sender.
                return pickle.load(file), descriptors
        return pickle.loads(memoryview(data)[1:]), descriptors

    # Not socket.send_fds and recv_fds, which do not pass their flags on.
    def _send(self, data: bytes, descriptors: Sequence[int], flags: int = 0) -> None:
        files = array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)] if files else []
        self._socket.sendmsg([data], ancillary, flags)

    def shut_down(self) -> None:
        """Let both sides see the end. A forked child must not end the connection of its parent."""
        if os.getpid() == self._process_id:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:  # Not while another thread sends.
            self._unsent.clear()
            self._socket.close()


def _encoded(message: Any, descriptors: Sequence[int]) -> Any:
    return _in_memory(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), descriptors)


@contextlib.contextmanager
def _in_memory(data: bytes, descriptors: Sequence[int]) -> Any:
    """Return what is sent for a message: the message itself or, if it is long, its descriptor."""
    if len(data) < _MAX_BYTES:
        yield _SHORT + data, descriptors
        return
    with os.fdopen(os.memfd_create("spdl_torch"), "w+b") as file:
        file.write(data)
        file.flush()
        yield _LONG, [file.fileno(), *descriptors]
