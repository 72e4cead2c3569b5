"""How far an epoch has come, as it is saved in a checkpoint and resumed.

A `Progress` is what an iterator draws from, and what it tells which batches were delivered. That is
all a loader has to save: for a map-style dataset the order of the indices and which places of it
are done, for an iterable dataset a bookmark for each worker.
"""

from typing import TypeAlias

from ._iterable import IterableProgress, SampleCount
from ._map import LOAD, PREPROCESS, MapKeys, MapProgress, key_for
from ._orders import sampler_layers, set_sampler_epoch
from ._state import Bookmark, read

Progress: TypeAlias = MapProgress | IterableProgress

__all__ = [
    "LOAD",
    "PREPROCESS",
    "Bookmark",
    "IterableProgress",
    "MapKeys",
    "MapProgress",
    "Progress",
    "SampleCount",
    "key_for",
    "read",
    "sampler_layers",
    "set_sampler_epoch",
]
