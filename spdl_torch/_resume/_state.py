"""What a saved state consists of, and the check of a state that is loaded."""

from __future__ import annotations

import base64
import copy
import io
import pickle
import zlib
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Self, get_args, get_origin, get_type_hints

import torch

from .._ranges import Ranges

FORMAT: Final = 1
"""The format of a state. Raise it only if an older version would misread a newer state."""

_KINDS: Final = {"iterable": "an IterableDataset", "map": "a map-style dataset"}
_EXPECTED: Final[dict[type, str]] = {
    int: "an int",
    str: "a str",
    dict: "a dict",
    list: "a list",
    Ranges: "pairs of numbers",
    torch.Tensor: "the state of a generator, as state_dict() returns it",
}
_PLAIN: Final = {bool, dict, int, NoneType, str}


@dataclass
class State:
    """A part of a saved state. Its fields are the keys of the dict that the user saves.

    A field whose default is None is left out of the dict if it is None. All others must be there.
    What is annotated as Any is the state of a user's object.
    """

    types: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls.types = {key: kind for key, kind in get_type_hints(cls).items() if key != "types"}

    def as_dict(self) -> dict[str, Any]:
        """Return the state as a dict that shares nothing with the loader."""
        cls = type(self)
        return {
            name: copy.deepcopy(value) if cls.types[name] is Any else _encoded(value)
            for name, value in vars(self).items()
            if value is not None or getattr(cls, name, ...) is not None
        }

    @classmethod
    def from_dict(cls, values: Any, name: str = "state_dict") -> Self:
        """Return the state that a dict describes, or raise what is wrong with the dict.

        The dict is anything that a user may have loaded, and the state shares nothing with it.
        """
        if not isinstance(values, dict):
            raise TypeError(
                f"{name} must be a dict, as state_dict() returns it, got {values!r:.80}."
            )
        checked = {}
        for key, wanted in cls.types.items():
            if key in values:
                checked[key] = _decoded(values[key], wanted, f"{name}[{key!r}]")
            elif getattr(cls, key, ...) is not None:
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
    """The state of the loader's `generator=`, for the draws that are still to come."""


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
    digest: int | None = None
    """A digest of the indices up to the last delivered place, if the sampler has to draw them
    again."""
    rank: int | None = None
    """The rank that drew those indices: any rank may load the state, and draws others."""
    ahead: Any = None
    """What a sampler with a state had drawn from the offset on."""
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
    num_since: int | None = None
    """How many samples were read after the states were taken."""

    @property
    def must_be_read_again(self) -> bool:
        """Whether it takes reading the samples again to get there."""
        has_state = self.dataset is not None or self.iterator is not None
        return not (has_state or self.has_ended or self.is_over)


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


def read(state: Any, dataset: Any, *, is_iterable: bool) -> MapState | IterableState:
    """Return the state that a user loads for a dataset, checked."""
    cls = IterableState if is_iterable else MapState
    if isinstance(state, dict):
        if "spdl_torch" not in state:
            raise ValueError(
                "state_dict was not made by spdl_torch.DataLoader: it has no 'spdl_torch', "
                f"but {', '.join(repr(key) for key in list(state)[:5])}."
            )
        if state["spdl_torch"] != FORMAT:
            raise ValueError(
                f"state_dict has the format {state['spdl_torch']!r:.80}, but this version of "
                f"spdl_torch reads {FORMAT}. Load it with the version that saved it."
            )
        kind = state.get("dataset", cls.dataset)
        if kind != cls.dataset:
            raise ValueError(
                f"state_dict is that of {_KINDS.get(str(kind), kind)}, but this DataLoader has "
                f"{_KINDS[cls.dataset]}."
            )
        if not is_iterable and is_stateful(dataset) and "dataset_state" not in state:
            raise _missing("dataset_state")
    return cls.from_dict(state)


def _missing(key: str, name: str = "state_dict") -> ValueError:
    return ValueError(
        f"{name} has no {key!r}: it is incomplete, or was made by something else than this "
        "DataLoader's state_dict()."
    )


def _encoded(value: Any) -> Any:
    """Return a value of a field as plain types. A tensor is the state of a generator."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, State):
        return value.as_dict()
    if isinstance(value, Ranges):
        return value.as_lists()
    if isinstance(value, torch.Tensor):
        return base64.b64encode(zlib.compress(value.numpy().tobytes())).decode()
    return [_encoded(part) for part in value]


def _decoded(value: Any, wanted: Any, name: str) -> Any:
    """Return the value of a field from plain types, or raise that it is not what is wanted."""
    is_optional = isinstance(wanted, UnionType)
    if wanted is Any or (is_optional and value is None):
        return copy.deepcopy(value)
    if is_optional:
        wanted, _ = get_args(wanted)  # The other is None.
    kind = get_origin(wanted) or wanted
    if issubclass(kind, State):
        return kind.from_dict(value, name)
    try:
        if kind is Ranges:
            return Ranges((int(start), int(stop)) for start, stop in value)
        if kind is torch.Tensor:
            return _generator_state(value)
        is_right = kind is bool or isinstance(value, kind)
    except (TypeError, ValueError, RuntimeError, zlib.error):
        is_right = False
    if not is_right:
        raise ValueError(f"{name} must be {_EXPECTED[kind]}, got {value!r:.80}.")
    if kind is list:
        (each,) = get_args(wanted)
        return [_decoded(part, each, f"{name}[{place}]") for place, part in enumerate(value)]
    return bool(value) if kind is bool else value


def _generator_state(value: Any) -> torch.Tensor:
    data = bytearray(zlib.decompress(base64.b64decode(value)))
    state = torch.frombuffer(data, dtype=torch.uint8)
    torch.Generator().set_state(state)  # Raises if it is damaged.
    return state


def is_stateful(thing: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`, as torchdata expects."""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def state_of(thing: Any) -> Any:
    """Return a copy of the state of a user's object, which may change its own later."""
    return copy.deepcopy(Snapshot(thing))


class Snapshot:
    """The state of a user's object at one moment. Its deep copy is the state itself.

    It is kept as a pickle, which takes a tenth of the time of a deep copy: worker threads take a
    snapshot at every batch, and most of them are never saved.
    """

    def __init__(self, thing: Any) -> None:
        try:
            state = thing.state_dict()
        except StopIteration as error:
            # It would be taken for the end of the epoch.
            raise RuntimeError(f"{type(thing).__name__}.state_dict() raised {error!r}") from error
        file = io.BytesIO()
        try:
            _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(state)
        except Exception:  # It has parts that cannot be pickled, such as functions.
            self._copy: Any = copy.deepcopy(state)
            self._pickle: bytes | memoryview | None = None
        else:
            self._pickle = file.getbuffer()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._copy) if self._pickle is None else pickle.loads(self._pickle)

    def __getstate__(self) -> dict[str, Any]:
        # Of a child process, for its parent.
        return {"_copy": None, "_pickle": bytes(self._pickle)} if self._pickle else vars(self)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # As an array: torch would write a file for each tensor.
        if type(obj) is not torch.Tensor:
            return NotImplemented
        try:
            return torch.asarray, (obj.numpy(),)
        except (TypeError, RuntimeError):  # On a device, sparse, or of a type that numpy lacks.
            return NotImplemented
