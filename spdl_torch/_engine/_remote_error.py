"""An exception on its way to another process: its type, its notes, and its traceback as text."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import Any


class RemoteError:
    """Holds an exception, and is pickled whatever the exception does to a pickle.

    An exception that a process pool or a queue pickles by itself loses its traceback, and many
    cannot be unpickled.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        summary = type(self.error).__name__
        with contextlib.suppress(Exception):  # Of the user's `__str__`.
            summary = f"{summary}: {self.error}"
        pickled = None
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(self.error)
            if not isinstance(pickle.loads(pickled), type(self.error)):
                pickled = None
        notes = [note for note in getattr(self.error, "__notes__", ()) if isinstance(note, str)]
        text = "".join(traceback.format_exception(self.error))
        return _arrived, (pickled, summary, notes, text)


def _arrived(pickled: bytes | None, summary: str, notes: list[str], text: str) -> RemoteError:
    error: BaseException | None = None
    # What a child can unpickle, its parent may not: it may not have the module.
    with contextlib.suppress(Exception):
        error = None if pickled is None else pickle.loads(pickled)
    if error is None:
        error = RuntimeError(f"{summary} (it cannot be pickled)")
        for note in notes:
            error.add_note(note)
    # The frames stay behind; concurrent.futures shows their text in this way too.
    error.__cause__ = InAnotherProcess(f'\n"""\n{text}"""')
    return RemoteError(error)


class InAnotherProcess(Exception):  # noqa: N818 (never raised)
    """Where in another process's code an exception came from."""
