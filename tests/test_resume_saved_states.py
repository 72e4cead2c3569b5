"""States that the version before saved, loaded by this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .saved_states.cases import CASES
from .tiers import sampled

STORED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "saved_states" / "version-1.json").read_text()
)


def test_every_case_is_stored():
    """A case without a stored state would not be tested."""
    assert STORED.keys() == CASES.keys()


@pytest.mark.filterwarnings("ignore:.* read again")
@pytest.mark.parametrize("name", sampled(CASES, every=3))
def test_older_state_still_loads(name):
    """A state of an earlier version delivers what that version delivered after loading it."""
    stored = STORED[name]
    delivered = CASES[name].load(stored["state"], seed=999)
    for found, expected in zip(json.loads(json.dumps(delivered)), stored["delivered"], strict=True):
        assert {key: found[key] for key in expected} == expected
