"""The traceback of an exception from the user's code, which begins there."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["print_from_users_code"]

_OURS = Path(__file__).parents[1]
_TORCHS = Path(torch.__file__).parent
_PYTHONS = Path(sysconfig.get_path("stdlib"))


def print_from_users_code(error: Exception) -> None:
    """Print an exception on stderr, without the frames above the user's first one."""
    where = error.__traceback__
    while where is not None and not _is_users(where):
        where = where.tb_next
    if where is None and not isinstance(error, SyntaxError):  # That one names its file itself.
        where = error.__traceback__  # It has not been in the user's code at all.
    traceback.print_exception(type(error), error, where, file=sys.stderr)


def _is_users(where: TracebackType) -> bool:
    name = where.tb_frame.f_code.co_filename
    path = Path(name)
    if name.startswith("<frozen ") or path.is_relative_to(_OURS) or path.is_relative_to(_TORCHS):
        return False
    # Without a virtual environment, what is installed lies in there too.
    return not path.is_relative_to(_PYTHONS) or "site-packages" in path.parts
