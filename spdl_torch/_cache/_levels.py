"""Which form of a dataset's samples is kept: the raw form, or what preprocessing begins with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._space import Space

RAW, VALUE, BAD = 1, 2, 3
"""Kinds of entries: the raw form, what the first part of preprocessing returned, and its error."""

_NUM_MEASURED: Final = 4
"""How many samples are measured before the level is chosen."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A sample of which both forms were made, to see which one is worth its memory."""

    raw_bytes: int
    value_bytes: int
    load_seconds: float
    make_seconds: float


class Levels:
    """The spaces of a dataset, for the workers of a process.

    With a space for raw forms and one for values, the first samples decide which one is used.
    """

    def __init__(
        self,
        raw: Space | None,
        value: Space | None,
        *,
        value_level: str | None,
        num_samples: int,
        max_bytes: int,
    ) -> None:
        self.raw = raw
        self.value = value
        self.num_samples = num_samples
        self._value_level = value_level
        self._max_bytes = max_bytes
        self._chosen: int | None = None if raw and value else VALUE if value else RAW
        self.begin()

    def begin(self) -> None:
        """Begin in a process, which may have this from its parent."""
        self._lock = threading.Lock()
        self._measured: list[Measured] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_lock": None}

    @property
    def level(self) -> str | None:
        """What is kept. None: it is not decided yet, or nothing can be."""
        if self.value is not None and not self.keeps_values:
            return None if self.raw is None else "raw"
        if self._chosen is None and self.value is not None:
            self._chosen = self.value.choice or None
        if self._chosen == VALUE:
            return self._value_level
        return None if self._chosen is None else "raw"

    @property
    def keeps_values(self) -> bool:
        return self.value is not None and not self.value.is_refused

    def measure(self, measured: Measured) -> None:
        """Choose the level by the time that it saves, when enough samples were measured."""
        assert self.raw is not None
        assert self.value is not None
        with self._lock:
            self._measured.append(measured)
            all_measured = self._measured
            if len(all_measured) < min(_NUM_MEASURED, max(1, self.num_samples // 8)):
                return
            room = self._max_bytes / max(1, self.num_samples)
            load_seconds = min(each.load_seconds for each in all_measured)
            make_seconds = min(each.make_seconds for each in all_measured)
            raw_share = _share([each.raw_bytes for each in all_measured], room)
            value_share = _share([each.value_bytes for each in all_measured], room)
            saves_more = (load_seconds + make_seconds) * value_share > load_seconds * raw_share
            self._choose(VALUE if saves_more else RAW)

    def _choose(self, kind: int) -> None:
        """Choose what is kept, unless another thread or process has."""
        assert self.value is not None
        if self._chosen is None:
            self._chosen = self.value.choose(kind)

    def refuse_values(self) -> None:
        """Keep no values any more, and forget all: they are different each time."""
        assert self.value is not None
        self.value.refuse()

    def prefer_raw(self) -> None:
        """Choose raw forms, if that is still to be decided: a value was drawn."""
        with self._lock:
            if self._chosen is None and self.raw is not None:
                self._choose(RAW)

    def choose_values(self) -> None:
        """Choose values, if that is still to be decided: the raw form cannot be kept."""
        with self._lock:
            self._choose(VALUE)

    @property
    def is_decided(self) -> bool:
        return self._chosen is not None


def _share(sizes: Sequence[int], room: float) -> float:
    """Return which share of the samples has room, if they are so large."""
    return min(1.0, room * len(sizes) / max(1, sum(sizes)))
