"""The command line: the last layer, and the only one that prints."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence

from ._parser import CommandError, parsed

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 (found or failed), 2 (usage) or 130 (Ctrl-C).

    Args:
        arguments: of the command line. Default: those of the process.

    """
    prefix = "spdl-torch"
    try:
        options = parsed(arguments)
        prefix = f"spdl-torch {options.command}"
        # Imported here: `--help` need not wait for the libraries of all commands.
        command = importlib.import_module(f"._{options.command}", __package__)
        with warnings.catch_warnings():
            exit_code: int = command.run(options)
            return exit_code
    except CommandError as error:
        message, exit_code = f"{prefix}: error: {error}", error.exit_code
    except KeyboardInterrupt:
        message, exit_code = f"{prefix}: interrupted", 130
    from ._screen import print_on_stderr  # noqa: PLC0415 (rich is not needed for --help)

    print_on_stderr(message, "red")
    return exit_code
