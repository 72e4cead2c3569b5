"""Random numbers in workers that leave the training loop's generators alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data._utils.worker import _generate_state

from ._permutation import key_of

__all__ = ["RandomnessOfSamples", "SampleGenerators", "generators_kept", "seed_as_worker_process"]

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
        self._torch_generator = torch.Generator()
        self._numpy_generator: np.random.Generator | None = None
        self._random_generator: random.Random | None = None

    @property
    def torch_generator(self) -> torch.Generator:
        self._begin_sample()
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

    def _begin_sample(self) -> None:
        where = self._where()
        if where != self._seeded_at:
            self._seeded_at = where
            self._seed = key_of(*self._key())
            self._torch_generator.manual_seed(self._seed)
            self._numpy_generator = self._random_generator = None


class RandomnessOfSamples(TorchFunctionMode):
    """Lets all code in the calling thread that draws through torch draw from a sample's generator.

    Such a mode belongs to the thread that enters it. Code that is given a generator uses that, and
    what is drawn on another device is drawn from that device's.
    """

    def __init__(self, generators: SampleGenerators) -> None:
        super().__init__()
        self._generators = generators

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _DRAWING and _draws_on_cpu(args, kwargs):
            return func(*args, **(kwargs or {}) | {"generator": self._generators.torch_generator})
        return func(*args, **kwargs) if kwargs else func(*args)


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


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the process-wide generators back afterwards, whatever is done to them meanwhile.

    A `worker_init_fn` may seed or draw from `random`, `numpy.random` and `torch`, which belong to
    the training loop when the worker is a thread. The training loop waits meanwhile.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    device_state = _device_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if device_state is not None:
            module, states = device_state
            module.set_rng_state_all(states)


def seed_as_worker_process(base_seed: int, worker_id: int) -> None:
    """Seed the process-wide generators as torch does in its worker process."""
    random.seed(base_seed + worker_id)
    np.random.seed(_generate_state(base_seed, worker_id))
    torch.default_generator.manual_seed(base_seed + worker_id)


def _device_state() -> tuple[Any, Any] | None:
    """The generators of the accelerator, which `torch.manual_seed` seeds too."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    if not module.is_initialized():
        return None
    return module, module.get_rng_state_all()
