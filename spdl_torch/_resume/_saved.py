"""Reading a saved state, which may be anything."""

from __future__ import annotations

import copy
from typing import Any

from .._ranges import Ranges

__all__ = ["Saved", "is_stateful", "state_of"]


class Saved:
    """A part of a saved state; asked for what is not there, it says so."""

    def __init__(self, values: Any, name: str) -> None:
        if not isinstance(values, dict):
            raise TypeError(f"{name} must be a dict, as state_dict() gives it, got {values!r:.80}.")
        self.values: dict[str, Any] = values
        self._name = name

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def part(self, key: str) -> Saved:
        return Saved(self._get(key), f"{self._name}[{key!r}]")

    def parts(self, key: str) -> list[Saved]:
        name = f"{self._name}[{key!r}]"
        return [Saved(each, f"{name}[{place}]") for place, each in enumerate(self._list(key))]

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self._error(key, "a str", value)
        return value

    def integer(self, key: str) -> int:
        value = self._get(key)
        if not isinstance(value, int):
            raise self._error(key, "an int", value)
        return int(value)

    def optional_integer(self, key: str) -> int | None:
        return None if self._get(key) is None else self.integer(key)

    def optional_text(self, key: str) -> str | None:
        return None if self._get(key) is None else self.text(key)

    def optional_part(self, key: str) -> Saved | None:
        return None if self._get(key) is None else self.part(key)

    def flag(self, key: str) -> bool:
        return bool(self._get(key))

    def ranges(self, key: str) -> Ranges:
        value = self._list(key)
        try:
            return Ranges((int(start), int(stop)) for start, stop in value)
        except (TypeError, ValueError):
            raise self._error(key, "pairs of numbers", value) from None

    def anything(self, key: str) -> Any:
        """A state of the user's, or None: a copy, because it is theirs to change."""
        return copy.deepcopy(self._get(key))

    def _list(self, key: str) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list | tuple):
            raise self._error(key, "a list", value)
        return list(value)

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ValueError(
                f"{self._name} has no {key!r}: it is incomplete, or was made by something else "
                "than this DataLoader's state_dict()."
            )
        return self.values[key]

    def _error(self, key: str, wanted: str, found: Any) -> ValueError:
        return ValueError(f"{self._name}[{key!r}] must be {wanted}, got {found!r:.80}.")


def is_stateful(thing: Any) -> bool:
    """It can be asked for its state and given it back, as torchdata has it."""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def state_of(thing: Any) -> Any:
    """A copy of its state, for it may go on changing the one it has given out."""
    try:
        return copy.deepcopy(thing.state_dict())
    except StopIteration as error:
        # It would be taken for the end of the epoch.
        raise RuntimeError(f"{type(thing).__name__}.state_dict() raised {error!r}") from error
