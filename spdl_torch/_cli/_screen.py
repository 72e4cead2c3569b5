"""Output: results to stdout, progress to a terminal if there is one, errors to stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .._text import finite


class Screen:
    """What the user of a command sees: words and tables, or one JSON document."""

    def __init__(self, *, as_json: bool) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Not every pipe is UTF-8. A question mark is better than no result.
            sys.stdout.reconfigure(errors="replace")
        self._is_json = as_json
        # With --json nothing is printed but the document, which contains all of it.
        self._words = Console(highlight=False, quiet=as_json)

    def say(self, text: str, style: str | None = None) -> None:
        """Print lines as they are: not wrapped, no markup."""
        self._words.print(text, style=style, markup=False, soft_wrap=True)

    def remark(self, text: str, style: str | None = None) -> None:
        """Print a line for the person at the terminal, which is not part of redirected output."""
        if sys.stdout.isatty():
            self.say(text, style)
        elif not self._is_json:
            print_on_stderr(text, style)

    def show(self, table: Table) -> None:
        self._words.print(table)

    def document(self, **content: Any) -> None:
        """Print the result as JSON, if that was asked for."""
        if self._is_json:
            text = json.dumps(finite(content), indent=2, default=str)
            Console(highlight=False).out(text, highlight=False)

    def step(self, text: str) -> None:
        """Tell a person at the terminal what is being measured now.

        A bar would be drawn by a thread, which disturbs a measurement and is forked with workers.
        """
        if self._words.is_terminal:
            self.say(text, style="dim")

    @contextmanager
    def bar(self, text: str, total: int | None = None) -> Iterator[Callable[..., None]]:
        """Show a progress bar until the block ends; call the function to advance it, by 1 or so."""
        # A bar on the console of the words moves down when words are printed.
        shares_console = not self._is_json and self._words.is_terminal
        console = self._words if shares_console else Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            yield partial(progress.advance, progress.add_task(text, total=total))


def table_of(first: str, *others: str) -> Table:
    """Return a table with a column of names, which may be wrapped, and columns of figures."""
    table = Table()
    table.add_column(first)
    for head in others:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 worker" and "2 workers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def print_on_stderr(text: str, style: str | None) -> None:
    """Print one line on stderr."""
    console = Console(stderr=True, highlight=False)
    console.print(printable(text), style=style, markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """Return text that is safe to print in one line, whatever characters it contains."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )
