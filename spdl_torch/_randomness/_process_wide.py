"""The process-wide generators, which belong to the training loop."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

__all__ = ["preserve_global_rng", "seed_as_worker_process"]


@contextlib.contextmanager
def preserve_global_rng() -> Iterator[None]:
    """Put the process-wide generators back afterwards, whatever is done to them meanwhile.

    A `worker_init_fn` may seed or draw from `random`, `numpy.random` and `torch`, which belong to
    the training loop when the worker is a thread. The training loop waits meanwhile.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    device_state = _device_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
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
