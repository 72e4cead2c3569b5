"""Frameworks take seconds for most tests, so the default tier runs the `quick` ones alone."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # Before pytest deselects by marker.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and not getattr(item.function, "is_quick", False):
            item.add_marker(pytest.mark.exhaustive)
