"""Figures as text: numbers, units, aligned columns, JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def ratio(part: float, whole: float) -> float:
    """Return the share, or 0 where there is nothing to divide by."""
    return part / whole if whole > 0 else 0.0


def number(value: float) -> str:
    """Return three digits, or all digits before the decimal point."""
    decimals = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    if seconds >= 0.9995:
        return f"{number(seconds)} s"
    if seconds >= 0.9995e-3:
        return f"{number(1e3 * seconds)} ms"
    return f"{number(1e6 * seconds)} µs"


def size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{number(num_bytes) if unit != 'bytes' else num_bytes} {unit}"
        num_bytes /= 1000
    return f"{number(num_bytes)} TB"


def home_of_workers(num_processes: int) -> str:
    """Return where worker threads live."""
    if num_processes < 2:
        return f"worker threads in {'1 child' if num_processes else 'this'} process"
    return f"worker threads in {num_processes} child processes"


def aligned(rows: list[list[str]]) -> Iterator[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        cells = [name.ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(figures, widths[1:], strict=True)]
        yield "  ".join(cells)


def finite(value: Any) -> Any:
    """Replace infinity and NaN by None in a nested structure, because JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
