"""torch's seeding functions, inside a sample.

Datasets seed torch to draw the same numbers twice, for an image and its mask. In a worker process
that is the worker's own generator. Here it must be the sample's, from which the numbers are drawn;
torch's own would be that of the training loop.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from ._generators import current_generators

__all__ = ["let_torch_seed_samples"]


def let_torch_seed_samples() -> None:
    """Teach torch's seeding functions to look for a sample first.

    The functions' code is replaced, not the functions: everyone who imported one by name has the
    same object. Where no sample is being made, they do what they always did.
    """
    # Each runs in torch's module, where `_replace` leaves the name that it calls.
    _replace(
        torch.random.manual_seed,
        lambda seed: _spdl_torch_manual_seed(seed),  # type: ignore[name-defined]  # noqa: F821, PLW0108
    )
    _replace(
        torch.random.seed,
        lambda: _spdl_torch_seed(),  # type: ignore[name-defined]  # noqa: F821, PLW0108
    )
    _replace(
        torch.random.initial_seed,
        lambda: _spdl_torch_initial_seed(),  # type: ignore[name-defined]  # noqa: F821, PLW0108
    )
    _replace(
        torch.random.get_rng_state,
        lambda: _spdl_torch_get_rng_state(),  # type: ignore[name-defined]  # noqa: F821, PLW0108
    )
    _replace(
        torch.random.set_rng_state,
        lambda new_state: _spdl_torch_set_rng_state(new_state),  # type: ignore[name-defined]  # noqa: F821, PLW0108
    )


def _replace(function: Any, replacement: Any) -> None:
    if function.__code__ is replacement.__code__:
        return
    # No lock, which a fork might find held. Another thread may be at the same: the answer that is
    # left first counts, and its original was taken before anybody has replaced the code.
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    answer = functools.partial(_OF_GENERATOR[function.__name__], original)
    function.__globals__.setdefault(f"_spdl_torch_{function.__name__}", answer)
    function.__code__ = replacement.__code__


def _manual_seed(original: Callable[[Any], Any], seed: Any) -> torch.Generator:
    generators = current_generators.get()
    if generators is None:
        return original(seed)  # type: ignore[no-any-return]
    return generators.torch_generator.manual_seed(int(seed))


def _seed(original: Callable[[], int]) -> int:
    generators = current_generators.get()
    return original() if generators is None else generators.torch_generator.seed()


def _initial_seed(original: Callable[[], int]) -> int:
    generators = current_generators.get()
    return original() if generators is None else generators.torch_generator.initial_seed()


def _get_rng_state(original: Callable[[], torch.Tensor]) -> torch.Tensor:
    generators = current_generators.get()
    return original() if generators is None else generators.torch_generator.get_state()


def _set_rng_state(original: Callable[[Any], None], new_state: torch.Tensor) -> None:
    generators = current_generators.get()
    if generators is None:
        original(new_state)
    else:
        generators.torch_generator.set_state(new_state)


_OF_GENERATOR: dict[str, Callable[..., Any]] = {
    "manual_seed": _manual_seed,
    "seed": _seed,
    "initial_seed": _initial_seed,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
}
