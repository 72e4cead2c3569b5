"""What a saved state consists of, and the check of a state that is loaded."""

from __future__ import annotations

import base64
import copy
import zlib
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Final, Self, get_args, get_origin, get_type_hints

import torch

from .._ranges import Ranges

__all__ = [
    "Bookmark",
    "EpochState",
    "IterableState",
    "MapState",
    "State",
    "is_stateful",
    "read",
    "state_of",
]

FORMAT: Final = 1
"""The format of a state. Raise it only if an older version would misread a newer state."""

_KINDS: Final = {"iterable": "an IterableDataset", "map": "a map-style dataset"}
_EXPECTED: Final[dict[Any, str]] = {int: "an int", str: "a str", dict: "a dict", list: "a list"}


@dataclass
class State:
    """A part of a saved state. Its fields are the keys of the dict that the user saves.

    A field whose default is None is left out of the dict if it is None. All others must be there.
    A tensor is the state of a generator, and encoded in the dict.
    """

    def as_dict(self) -> dict[str, Any]:
        """Return the state as a dict that shares nothing with the loader."""
        return {
            field.name: copy.deepcopy(value) if field.type == "Any" else _plain(value)
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None or field.default is not None
        }

    @classmethod
    def from_dict(cls, values: Any, name: str = "state_dict") -> Self:
        """Return the state that a dict describes, or raise what is wrong with the dict.

        Args:
            values: anything that a user may have loaded. The state shares nothing with it.
            name: where it was found, for error messages.

        """
        if not isinstance(values, dict):
            raise TypeError(
                f"{name} must be a dict, as state_dict() returns it, got {values!r:.80}."
            )
        types = get_type_hints(cls)
        checked = {}
        for field in fields(cls):
            key = field.name
            if key in values:
                checked[key] = _checked(values[key], types[key], f"{name}[{key!r}]")
            elif field.default is not None:
                raise _missing(key, name)
        return cls(**checked)


@dataclass(kw_only=True)
class EpochState(State):
    """What the states of all epochs have in common."""

    spdl_torch: int = FORMAT
    dataset: str
    """The kind of the dataset."""
    has_begun: bool
    """The seeds of the epoch were drawn from torch's generator."""
    base_seed: int | None
    epoch: int
    generator: torch.Tensor | None = None
    """The state of the loader's `generator=`, if it has not drawn for the epoch yet."""


@dataclass(kw_only=True)
class MapState(EpochState):
    """How far an epoch of a map-style dataset has come."""

    dataset: str = "map"
    length: int | None
    unit: str
    offset: int
    """The number of indices of the epoch before those that the sampler state describes."""
    sampler: dict[str, Any]
    """A `SamplerState`: which one depends on the kind of the sampler."""
    done: Ranges
    """The delivered places, counted from the offset."""
    dataset_state: Any = None


@dataclass
class Bookmark(State):
    """Where one worker is in its copy of an iterable dataset."""

    worker: int
    num_samples: int = 0
    has_ended: bool = False
    """The worker has read its dataset to the end."""
    is_over: bool = False
    """The epoch has ended too: the next one begins from here."""
    dataset: Any = None
    iterator: Any = None

    @property
    def has_state(self) -> bool:
        return self.dataset is not None or self.iterator is not None


@dataclass(kw_only=True)
class IterableState(EpochState):
    """How far the workers have come in an epoch of an iterable dataset."""

    dataset: str = "iterable"
    worker_method: str
    num_workers: int
    batch_size: int | None
    shared_seed: int | None
    """The seed that torch shuffles datapipes with."""
    num_batches: int
    next_worker: int
    workers: list[Bookmark]


@dataclass
class _Head(State):
    spdl_torch: int
    dataset: str


def read(state: Any, dataset: Any, *, is_iterable: bool) -> MapState | IterableState:
    """Return the state that a user loads for a dataset, checked."""
    if isinstance(state, dict) and "spdl_torch" not in state:
        raise ValueError(
            "state_dict was not made by spdl_torch.DataLoader: it has no 'spdl_torch', "
            f"but {', '.join(repr(key) for key in list(state)[:5])}."
        )
    head = _Head.from_dict(state)
    if head.spdl_torch != FORMAT:
        raise ValueError(
            f"state_dict has the format {head.spdl_torch}, but this version of "
            f"spdl_torch reads {FORMAT}. Load it with the version that saved it."
        )
    kind = "iterable" if is_iterable else "map"
    if head.dataset != kind:
        raise ValueError(
            f"state_dict is that of {_KINDS.get(head.dataset, head.dataset)}, but this DataLoader "
            f"has {_KINDS[kind]}."
        )
    if is_iterable:
        return IterableState.from_dict(state)
    if is_stateful(dataset) and "dataset_state" not in state:
        raise _missing("dataset_state")
    return MapState.from_dict(state)


def _missing(key: str, name: str = "state_dict") -> ValueError:
    return ValueError(
        f"{name} has no {key!r}: it is incomplete, or was made by something else than this "
        "DataLoader's state_dict()."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, State):
        return value.as_dict()
    if isinstance(value, Ranges):
        return value.as_lists()
    if isinstance(value, torch.Tensor):
        return base64.b64encode(zlib.compress(value.numpy().tobytes())).decode()
    if isinstance(value, list):
        return [each.as_dict() for each in value]
    return value


def _checked(value: Any, wanted: Any, name: str) -> Any:
    if isinstance(wanted, UnionType) and value is not None:
        wanted, _ = get_args(wanted)  # The other is None.
    if wanted is Any or isinstance(wanted, UnionType):
        return copy.deepcopy(value)
    if wanted is bool:
        return bool(value)
    if wanted in _READERS:
        return _READERS[wanted](value, name)
    if isinstance(wanted, type) and issubclass(wanted, State):
        return wanted.from_dict(value, name)
    kind = get_origin(wanted) or wanted
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {_EXPECTED[kind]}, got {value!r:.80}.")
    if kind is list:
        (each,) = get_args(wanted)
        return [_checked(part, each, f"{name}[{place}]") for place, part in enumerate(value)]
    return value


def _checked_ranges(value: Any, name: str) -> Ranges:
    try:
        return Ranges((int(start), int(stop)) for start, stop in value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be pairs of numbers, got {value!r:.80}.") from None


def _checked_generator(value: Any, name: str) -> torch.Tensor:
    try:
        data = bytearray(zlib.decompress(base64.b64decode(value)))
        state = torch.frombuffer(data, dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (TypeError, ValueError, RuntimeError, zlib.error):
        raise ValueError(f"{name} must be the state of a generator, but is damaged.") from None
    return state


_READERS: Final = {Ranges: _checked_ranges, torch.Tensor: _checked_generator}


def is_stateful(thing: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`, as torchdata expects."""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def state_of(thing: Any) -> Any:
    """Return a copy of the state of a user's object, which may change its own later."""
    try:
        return copy.deepcopy(thing.state_dict())
    except StopIteration as error:
        # It would be taken for the end of the epoch.
        raise RuntimeError(f"{type(thing).__name__}.state_dict() raised {error!r}") from error
