"""The tiers of the tests: what `pytest` runs, and what only `pytest -m exhaustive` runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes, as parameters for `pytest.mark.parametrize`.

    The default tier runs enough of them for every pair of values of two axes to meet at least
    once. The others are marked `exhaustive`.
    """
    met: set[tuple[int, int, int, int]] = set()
    cases = []
    for row in itertools.product(*(list(enumerate(axis)) for axis in axes)):
        places = [place for place, _ in row]
        pairs = {
            (first, places[first], second, places[second])
            for first, second in itertools.combinations(range(len(row)), 2)
        } or {(0, places[0], 0, places[0])}
        marks = [pytest.mark.exhaustive] if pairs <= met else []
        met |= pairs
        cases.append(pytest.param(*(value for _, value in row), marks=marks))
    return cases


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Return all values as parameters; the default tier runs the first of every so many."""
    return [
        pytest.param(value, marks=[pytest.mark.exhaustive] if place % every else [])
        for place, value in enumerate(values)
    ]


def sampled_product(*axes: Iterable[Any], every: int, step: int = 1) -> list[Any]:
    """Return combinations of the axes; the default tier runs the first of every so many.

    With a `step`, the exhaustive tier has one of so many. A step that divides the length of no axis
    meets every value.
    """
    return [
        pytest.param(*row, marks=[pytest.mark.exhaustive] if place % every else [])
        for place, row in enumerate(itertools.product(*axes))
        if place % every == 0 or place % step == 0
    ]
