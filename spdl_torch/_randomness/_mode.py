"""Code that draws through torch, made to draw from the sample's generator."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token
from typing import Any, Final, Self

import torch
from torch.overrides import TorchFunctionMode

from ._generators import SampleGenerators, current_generators
from ._seeding import let_torch_seed_samples

__all__ = ["DrawsOfSamples", "RandomnessOfSamples"]

_DRAWING: Final = frozenset(
    {
        torch.bernoulli,
        torch.binomial,
        torch.multinomial,
        torch.normal,
        torch.poisson,
        torch.rand,
        torch.rand_like,
        torch.randint,
        torch.randint_like,
        torch.randn,
        torch.randn_like,
        torch.randperm,
        torch.Tensor.bernoulli,
        torch.Tensor.bernoulli_,
        torch.Tensor.cauchy_,
        torch.Tensor.exponential_,
        torch.Tensor.geometric_,
        torch.Tensor.log_normal_,
        torch.Tensor.multinomial,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
    }
)
"""The functions of torch that draw from the default generator unless they are given another."""


class DrawsOfSamples(TorchFunctionMode):
    """Lets all code in the calling thread that draws through torch draw from the current sample's.

    Such a mode belongs to the thread that enters it. Code that is given a generator uses that, and
    what is drawn on another device is drawn from that device's.
    """

    def __init__(self) -> None:
        super().__init__()
        let_torch_seed_samples()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _DRAWING and _draws_on_cpu(args, kwargs):
            generators = current_generators.get()
            if generators is not None:
                return func(*args, **(kwargs or {}) | {"generator": generators.torch_generator})
        return func(*args, **kwargs) if kwargs else func(*args)


class RandomnessOfSamples(DrawsOfSamples):
    """The same for a thread that makes one sample at a time, with the generators it has."""

    def __init__(self, generators: SampleGenerators) -> None:
        super().__init__()
        self._generators = generators
        self._before: Token[SampleGenerators | None] | None = None

    def __enter__(self) -> Self:
        # In this order, and the other way round below: interrupted in between, a mode is left that
        # finds no sample and does nothing.
        super().__enter__()  # type: ignore[no-untyped-call]
        self._before = current_generators.set(self._generators)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._before is not None:
            current_generators.reset(self._before)
            self._before = None
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]


def _draws_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether a call of a drawing function is one for the default generator of the CPU."""
    if kwargs:
        if kwargs.get("generator") is not None:
            return False
        if (device := kwargs.get("device")) is not None:
            return torch.device(device).type == "cpu"
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device.type == "cpu"
        if isinstance(arg, torch.Generator):
            return False
    return True
