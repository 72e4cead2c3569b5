"""Statistics as plain text: a table for a person, a line for a log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._stats import LoaderStats, StageStats
    from ._profile import Headroom, Profile, Scaling

__all__ = ["line", "stats_table", "table"]

_COLUMNS = 100

_HEADER = ["stage", "width", "unit", "per s", "busy", "cores", "starved", "blocked"]
_HEADER += ["mean", "p50", "p99"]

_BATCH_STAGES = ("collate", "transfer")
"""Those that work at whole batches."""


def stats_table(stats: LoaderStats) -> str:
    """What was measured, verdict first."""
    verdict = stats.verdict
    lines = [*_wrapped(verdict.sentence), *_wrapped(verdict.advice), ""]
    if stats.stages:
        lines += [*_aligned([_HEADER, *map(_stage_row, stats.stages)]), ""]
    return "\n".join([*lines, *_loop(stats)])


def table(profile: Profile) -> str:
    """The whole profile."""
    lines = [stats_table(profile.stats)]
    if profile.headroom:
        lines.append(_headroom(profile.headroom))
    if profile.scalings:
        lines += ["", "workers: samples/s of the stage by itself", *_scalings(profile.scalings)]
    return "\n".join(lines)


def line(stats: LoaderStats) -> str:
    """What matters while it runs, on one line."""
    busy = [_busy(stage) for stage in stats.stages]
    if busy:
        busy[0] += " busy"
    parts = [
        f"batch {stats.loop.num_batches}",
        f"{_number(_batches_per_second(stats))} batches/s",
        f"waited {_percent(stats.loop.waited_share)}",
        *busy,
        f"{stats.num_ready}/{stats.window} ready",
    ]
    return " · ".join(parts)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS)


def _busy(stage: StageStats) -> str:
    # Collate has no workers of its own, so that "of how many" would be those of another stage.
    has_width = stage.width is not None and stage.name != "collate"
    return f"{stage.name} {stage.num_busy:.1f}" + (f"/{stage.width}" if has_width else "")


def _stage_row(stage: StageStats) -> list[str]:
    times = (stage.mean_seconds, stage.p50_seconds, stage.p99_seconds)
    return [
        stage.name,
        "?" if stage.width is None else str(stage.width),
        "batch" if stage.name in _BATCH_STAGES else "sample",
        _number(stage.samples_per_second),
        f"{stage.num_busy:.1f}",
        f"{_ratio(stage.cpu_seconds, stage.elapsed_seconds):.1f}",
        _percent(_share(stage, stage.starved_seconds)),
        _percent(_share(stage, stage.blocked_seconds)),
        *(_duration(seconds) if stage.num_samples else "-" for seconds in times),
    ]


def _share(stage: StageStats, seconds: float) -> float:
    """Of the time of all workers."""
    if stage.width is None:
        known = stage.busy_seconds + stage.starved_seconds + stage.blocked_seconds
        return _ratio(seconds, known)
    return _ratio(seconds, stage.width * stage.elapsed_seconds)


def _loop(stats: LoaderStats) -> Iterator[str]:
    loop = stats.loop
    yield (
        f"loop: {loop.num_batches} batches, {_number(_batches_per_second(stats))} batches/s, "
        f"waited {_percent(loop.waited_share)}, "
        f"step {_duration(_ratio(loop.step_seconds, loop.num_batches))}"
    )
    yield (
        f"      first batch after {_duration(loop.first_wait_seconds)}, "
        f"woken in {_duration(loop.wake_seconds)}, {_size(stats.num_bytes)} of batches"
    )
    if stats.num_bad_samples or stats.num_retries:
        yield f"      {stats.num_bad_samples} bad samples replaced, {stats.num_retries} retries"


def _headroom(headroom: Headroom) -> str:
    now, free = headroom.batches_per_second, headroom.free_batches_per_second
    return (
        f"headroom: {_number(now)} batches/s would be {_number(free)} "
        f"({_ratio(free, now):.2f} times) if loading took no time"
    )


def _scalings(scalings: tuple[Scaling, ...]) -> Iterator[str]:
    name_width = max(len(scaling.stage) for scaling in scalings)
    for scaling in scalings:
        # No-break spaces, so that a line ends between two measurements.
        points = [f"{n}:\N{NO-BREAK SPACE}{_number(rate)}/s" for n, rate in scaling.throughputs]
        wrapped = textwrap.fill(
            "  ".join([*points, scaling.shape]),
            _COLUMNS,
            initial_indent=f"  {scaling.stage:{name_width}}  ",
            subsequent_indent=" " * (name_width + 4),
        )
        yield wrapped.replace("\N{NO-BREAK SPACE}", " ")


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        cells = [name.ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(figures, widths[1:], strict=True)]
        yield "  ".join(cells)


def _batches_per_second(stats: LoaderStats) -> float:
    return stats.loop.batches_per_second


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _number(value: float) -> str:
    """Three digits, or all that are before the point."""
    decimals = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _duration(seconds: float) -> str:
    if seconds >= 0.9995:
        return f"{_number(seconds)} s"
    if seconds >= 0.9995e-3:
        return f"{_number(1e3 * seconds)} ms"
    return f"{_number(1e6 * seconds)} µs"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{_number(num_bytes) if unit != 'bytes' else num_bytes} {unit}"
        num_bytes /= 1000
    return f"{_number(num_bytes)} TB"
