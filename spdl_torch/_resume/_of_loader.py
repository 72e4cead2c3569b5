"""From a loader, or a saved state, to the progress of its next epoch."""

from __future__ import annotations

import copy
from typing import Any, Final

from torch.utils.data.dataloader import _DatasetKind

from ._base import FORMAT, Progress
from ._iterable import IterableProgress
from ._map import MapProgress
from ._saved import Saved

__all__ = ["progress_of", "restored_progress"]

_NAMES: Final = {"iterable": "an IterableDataset", "map": "a map-style dataset"}


def progress_of(loader: Any) -> Progress:
    """The progress of an epoch that is to begin."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return IterableProgress.of(loader)
    return MapProgress.of(loader)


def restored_progress(loader: Any, state: Any) -> Progress:
    """The progress that a state tells of. Nothing has changed if the state does not fit."""
    saved = Saved(copy.deepcopy(state), "state_dict")
    if "spdl_torch" not in saved:
        raise ValueError(
            "state_dict was not made by spdl_torch.DataLoader: it has no 'spdl_torch', "
            f"but {', '.join(repr(key) for key in list(state)[:5])}."
        )
    if saved.integer("spdl_torch") != FORMAT:
        raise ValueError(
            f"state_dict has the format {saved.integer('spdl_torch')}, but this version of "
            f"spdl_torch reads {FORMAT}. Load it with the version that saved it."
        )
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    kind = saved.text("dataset")
    if kind != ("iterable" if is_iterable else "map"):
        raise ValueError(
            f"state_dict is that of {_NAMES.get(kind, kind)}, but this DataLoader has "
            f"{_NAMES['iterable' if is_iterable else 'map']}."
        )
    first_draw = saved.optional_integer("first_draw")
    restored = IterableProgress.restored if is_iterable else MapProgress.restored
    progress = restored(loader, saved)
    progress.first_draw = first_draw
    return progress
