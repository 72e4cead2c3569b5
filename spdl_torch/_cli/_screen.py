"""Where words go: results to stdout, progress to a terminal if there is one, errors to stderr."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["Bar", "Screen", "counted", "print_error", "printable"]


class Screen:
    """What the user of a command sees: words and tables, or one JSON document."""

    def __init__(self, *, as_json: bool) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Not every pipe is UTF-8. A question mark is better than no result.
            sys.stdout.reconfigure(errors="replace")
        self._is_json = as_json
        # In JSON, what is said in words is not said; the document has it all.
        self._words = Console(highlight=False, quiet=as_json)
        self._document = Console(highlight=False)
        self._remarks = self._words
        if not sys.stdout.isatty():
            self._remarks = Console(stderr=True, highlight=False, quiet=as_json)

    def say(self, text: str, style: str | None = None) -> None:
        """One or more lines, as they are: not wrapped, no markup."""
        self._words.print(text, style=style, markup=False, soft_wrap=True)

    def remark(self, text: str, style: str | None = None) -> None:
        """A line that is for who looks on, and not for the file that the results go to."""
        self._remarks.print(text, style=style, markup=False, soft_wrap=True)

    def show(self, table: RenderableType) -> None:
        self._words.print(table)

    def document(self, content: dict[str, Any]) -> None:
        """The result as JSON, if that was asked for."""
        if self._is_json:
            self._document.out(json.dumps(_plain(content), indent=2), highlight=False)

    @contextmanager
    def bar(
        self,
        description: str,
        total: int | None = None,
        unit: str = "",
        *,
        interval_seconds: float = 0.1,
    ) -> Iterator[Bar]:
        """A progress bar that is gone when the block ends, drawn no more often than that."""
        # On the console of the words, if that is a terminal: then it gives way to them.
        console = Console(stderr=True)
        if not self._is_json and self._words.is_terminal:
            console = self._words
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit, markup=False),
            TimeRemainingColumn(),
        )
        # A thread that draws would take part in what is measured, and be forked with the workers.
        progress = Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        with progress:
            task = progress.add_task(description, total=total)
            yield Bar(progress, task, interval_seconds)


class Bar:
    """A progress bar, drawn no more often than can be seen."""

    def __init__(self, progress: Progress, task: TaskID, interval_seconds: float) -> None:
        self._progress = progress
        self._task = task
        self._interval_seconds = interval_seconds
        self._drawn_seconds = -math.inf

    def advance(self, amount: int = 1) -> None:
        self._progress.update(self._task, advance=amount)
        self._draw()

    def describe(self, description: str) -> None:
        self._progress.update(self._task, description=description)
        self._draw()

    def _draw(self) -> None:
        now_seconds = time.monotonic()
        if now_seconds - self._drawn_seconds > self._interval_seconds:
            self._drawn_seconds = now_seconds
            self._progress.refresh()


def counted(number: int, noun: str) -> str:
    """As in "1 worker" and "2 workers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def print_error(message: str) -> None:
    """One line on stderr."""
    Console(stderr=True, highlight=False).print(
        printable(message), style="red", markup=False, soft_wrap=True
    )


def printable(text: str) -> str:
    """A name or message that may contain anything, safe to print in one line."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def _plain(value: Any) -> Any:
    """What JSON can say: it has no infinity, and is not to be surprised by a path."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
