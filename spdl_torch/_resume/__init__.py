"""How far an epoch has come, as it is saved and restored.

A `Progress` is what an iterator draws from, and what it tells which batches it has delivered. It is
all that a loader has to save. For a map-style dataset it is an `Order` of indices and which places
of it are done; for an iterable dataset, a bookmark for each worker.
"""

from ._base import Progress
from ._iterable import IterableProgress
from ._map import LOAD, PREPROCESS, MapProgress, key_for
from ._of_loader import progress_of, restored_progress
from ._reader import SampleCount

__all__ = [
    "LOAD",
    "PREPROCESS",
    "IterableProgress",
    "MapProgress",
    "Progress",
    "SampleCount",
    "key_for",
    "progress_of",
    "restored_progress",
]
