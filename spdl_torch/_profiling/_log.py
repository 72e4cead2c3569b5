"""A line in the log, now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .._stats import LoaderStats
from ._table import line

__all__ = ["StatsLog"]

_logger = logging.getLogger("spdl_torch")


class StatsLog:
    """Logs the statistics at a batch, if enough time has passed since it last did."""

    def __init__(self, interval_seconds: float, stats: Callable[[], LoaderStats]) -> None:
        self._interval_seconds = interval_seconds
        self._stats = stats
        self._logged_at = time.monotonic()

    def at_batch(self) -> None:
        now = time.monotonic()
        if now - self._logged_at >= self._interval_seconds:
            self._logged_at = now
            _logger.info("%s", line(self._stats()))
