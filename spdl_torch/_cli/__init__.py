"""The command line: the last layer, and the only one that prints."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence

from ._parser import CommandError, parsed

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code: 0, 1 (found or failed), 2 (usage) or 130 (Ctrl-C).

    Args:
        arguments: of the command line. Default: those of the process.

    """
    prefix = "spdl-torch"
    try:
        options = parsed(arguments)
        prefix = f"spdl-torch {options.command}"
        with warnings.catch_warnings():
            return _run(options.command, options)
    except CommandError as error:
        return _fail(f"{error.prefix or prefix}: error: {error}", error.exit_code)
    except KeyboardInterrupt:
        return _fail(f"{prefix}: interrupted", 130)


def _run(command: str, options: object) -> int:
    # Each command brings its libraries along, so that `--help` need not wait for them.
    room = importlib.import_module(f"._{command}", __package__)
    exit_code: int = room.run(options)
    return exit_code


def _fail(message: str, exit_code: int) -> int:
    from ._screen import print_error  # noqa: PLC0415 (rich, for those who need it)

    print_error(message)
    return exit_code
