"""Samples to one batch: torch's default, made for a thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, collate_int_fn, default_collate_fn_map

__all__ = ["default_collate"]


def default_collate(samples: list[Any]) -> Any:
    """Make the batch that torch's `default_collate` makes, sooner where there is a quicker way."""
    # Looked up at each call: torch invites its users to put functions of their own into the map.
    fn_map = default_collate_fn_map
    if fn_map.get(int) is collate_int_fn:
        fn_map = {**fn_map, int: _collate_ints}
    return collate(samples, collate_fn_map=fn_map)


def _collate_ints(samples: list[Any], **_: Any) -> torch.Tensor:
    # Labels are in nearly every batch, and torch.tensor takes four times as long as this.
    if set(map(type, samples)) == {int}:
        array = np.array(samples)
        if array.dtype == np.int64:
            return torch.from_numpy(array)
    return torch.tensor(samples)
