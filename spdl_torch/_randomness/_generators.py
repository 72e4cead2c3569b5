"""The generators of the sample that is being made."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import numpy as np
import torch

from .._permutation import key_of

__all__ = [
    "CurrentGenerators",
    "CurrentlyOf",
    "SampleGenerators",
    "SampleRng",
    "current_generators",
    "restart_sample",
    "restore_current_rng",
    "sample_rng",
]


class SampleGenerators:
    """The generators of one worker, which begin anew with every sample.

    They are seeded by the first draw of a sample, so that a sample that draws nothing costs
    nothing. It has the attributes of the `rng` in torch's `WorkerInfo`.

    Args:
        where: gives what tells one sample from the next; called with every draw.
        key: gives the numbers from which the sample's seed is made; called once for a sample.

    """

    def __init__(self, where: Callable[[], Any], key: Callable[[], tuple[int, ...]]) -> None:
        self._where = where
        self._key = key
        self._seeded_at: Any = None
        self._seed = 0
        self._torch_is_seeded = False
        self._torch_generator: torch.Generator | None = None
        self._numpy_generator: np.random.Generator | None = None
        self._random_generator: random.Random | None = None

    @property
    def torch_generator(self) -> torch.Generator:
        self._begin_sample()
        if not self._torch_is_seeded:
            self._torch_is_seeded = True
            # Used again from sample to sample: to make one takes longer than to seed it.
            self._torch_generator = self._torch_generator or torch.Generator()
            self._torch_generator.manual_seed(self._seed)
        assert self._torch_generator is not None
        return self._torch_generator

    @property
    def numpy_generator(self) -> np.random.Generator:
        self._begin_sample()
        if self._numpy_generator is None:
            self._numpy_generator = np.random.default_rng(self._seed)
        return self._numpy_generator

    @property
    def random_generator(self) -> random.Random:
        self._begin_sample()
        if self._random_generator is None:
            self._random_generator = random.Random(self._seed)
        return self._random_generator

    def begin_anew(self) -> None:
        """Draw the same as from the beginning of the sample."""
        self._seeded_at = None

    def _begin_sample(self) -> None:
        where = self._where()
        if where != self._seeded_at:
            self._seeded_at = where
            self._seed = key_of(*self._key())
            self._torch_is_seeded = False
            self._numpy_generator = self._random_generator = None


current_generators: ContextVar[SampleGenerators | None] = ContextVar(
    "spdl_torch_generators", default=None
)
"""Of the sample that is being made in this thread, or in this task of an event loop."""


class CurrentlyOf(contextlib.AbstractContextManager[None]):
    """Makes generators the current ones."""

    def __init__(self, generators: SampleGenerators) -> None:
        self._generators = generators
        self._before: Token[SampleGenerators | None] | None = None

    def __enter__(self) -> None:
        self._before = current_generators.set(self._generators)

    def __exit__(self, *_: Any) -> None:
        assert self._before is not None
        # A task that is thrown away unfinished is left wherever the garbage is collected.
        with contextlib.suppress(ValueError):
            current_generators.reset(self._before)


class restore_current_rng(contextlib.AbstractContextManager[None]):  # noqa: N801 (reads as a function)
    """Whatever Ctrl-C interrupts in here, no sample is the current one afterwards that was not."""

    def __enter__(self) -> None:
        self._before = current_generators.get()

    def __exit__(self, *_: Any) -> None:
        current_generators.set(self._before)


class CurrentGenerators:
    """For torch's `WorkerInfo`: a worker may make several samples at a time, or one inside another.

    Args:
        otherwise: the worker's own, for where no sample is being made.

    """

    def __init__(self, otherwise: SampleGenerators | None = None) -> None:
        self._otherwise = otherwise

    @property
    def torch_generator(self) -> torch.Generator:
        return self._current().torch_generator

    @property
    def numpy_generator(self) -> np.random.Generator:
        return self._current().numpy_generator

    @property
    def random_generator(self) -> random.Random:
        return self._current().random_generator

    def _current(self) -> SampleGenerators:
        generators = current_generators.get() or self._otherwise
        if generators is None:
            raise RuntimeError("there are generators only while a sample is being made.")
        return generators


def restart_sample() -> None:
    """Let the sample that is being made draw the same once more: it is tried again."""
    generators = current_generators.get()
    if generators is not None:
        generators.begin_anew()


class SampleRng(NamedTuple):
    """Generators for code that does not draw through torch."""

    numpy: np.random.Generator
    random: random.Random


def sample_rng() -> SampleRng:
    """Generators for the sample that is being made, in a dataset's code.

    What they give depends on the sample, not on who makes it or when. They go on from call to call
    and begin anew with the next sample. Where nothing is known of a sample, as in torch's own
    loader or with `num_workers=0` and no `seed`, they are new at each call, seeded by torch's
    generator.
    """
    generators = current_generators.get()
    if generators is not None:
        return SampleRng(generators.numpy_generator, generators.random_generator)
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return SampleRng(np.random.default_rng(seed), random.Random(seed))
