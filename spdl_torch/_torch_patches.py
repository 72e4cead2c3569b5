"""What this package changes in torch and torchvision. No other module does that.

Two groups of functions get other code: `torch.utils.data.get_worker_info()`, which answers for the
calling thread first, and the seeding functions such as `torch.manual_seed()`, which act on the RNG
of the sample that is being made in the calling thread. The classes of torchvision that draw from
Python's `random` draw from that RNG too. Where neither a worker thread of ours nor a sample is at
work, all of them do what they did before.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.worker import WorkerInfo


class _ThreadInfo(threading.local):
    info: WorkerInfo | None = None


_thread_info = _ThreadInfo()


def set_worker_info(info: WorkerInfo) -> None:
    """Let `torch.utils.data.get_worker_info()` return this in the calling thread."""
    _replace_code(get_worker_info, _worker_info_of_thread)
    _thread_info.info = info


def redirect_seeding(current_generator: Callable[[], torch.Generator | None]) -> None:
    """Let torch's seeding functions act on the generator of the current sample.

    Datasets seed torch to draw the same numbers twice, for an image and its mask. In a worker
    process that acts on the worker's own generator; in a thread it would act on that of the
    training loop. `current_generator` returns None if there is no sample.
    """
    for function, method in (
        (torch.random.manual_seed, lambda generator, seed: generator.manual_seed(int(seed))),
        (torch.random.seed, torch.Generator.seed),
        (torch.random.initial_seed, torch.Generator.initial_seed),
        (torch.random.get_rng_state, torch.Generator.get_state),
        (torch.random.set_rng_state, _set_state),
    ):
        _replace_code(function, partial(_seed_sample, current_generator, method))


_USERS_OF_RANDOM: Final = (
    "torchvision.transforms.transforms",
    "torchvision.transforms._transforms_video",
    "torchvision.datasets._stereo_matching",
)
"""The modules of torchvision that draw from Python's `random`."""


def redirect_random(current_generator: Callable[[], torch.Generator | None]) -> None:
    """Let what torchvision draws from Python's `random` follow the current sample.

    This changes the name `random` in the modules of torchvision that are imported, and not what
    other code finds in `random`. `current_generator` returns None if there is no sample.
    """
    for name in _USERS_OF_RANDOM:
        module: Any = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            module.random = _RandomOfSample(current_generator)


class _RandomOfSample:
    """The functions of `random`, which draw from the current sample if there is one."""

    def __init__(self, current_generator: Callable[[], torch.Generator | None]) -> None:
        self._current_generator = current_generator

    def __getattr__(self, name: str) -> Any:
        if (generator := self._current_generator()) is None:
            return getattr(random, name)
        # Seeded by torch's generator, so that `torch.manual_seed()` in a sample repeats this too.
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        return getattr(random.Random(seed.item()), name)


def _replace_code(function: Any, replacement: Callable[..., Any]) -> None:
    """Let a function of torch call `replacement(original, *args)`.

    The function's code is replaced, not the function: code that imported it by name has the same
    object. The new code runs in the module of the function and finds the replacement there.
    """
    name = f"_spdl_torch_{function.__name__}"
    if function.__code__.co_names == (name,):
        return
    # There is no lock, because a fork could copy it while it is held. If two threads come here at
    # once, the replacement that is stored first counts, and its original was copied before any
    # thread had replaced the code. The code, which is what the test above looks at, changes last.
    original = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    function.__globals__.setdefault(name, partial(replacement, original))
    parameters = ", ".join(inspect.signature(original).parameters)
    function.__code__ = eval(f"lambda {parameters}: {name}({parameters})").__code__


def _worker_info_of_thread(original: Callable[[], WorkerInfo | None]) -> WorkerInfo | None:
    info = _thread_info.info
    # torch's collate asks only in order to make the batch in shared memory, for another process to
    # read. In a thread that would be a needless copy and a file descriptor.
    if info is None or sys._getframe(2).f_code is torch_collate.collate_tensor_fn.__code__:
        return original()
    return info


def _seed_sample(
    current_generator: Callable[[], torch.Generator | None],
    method: Callable[..., Any],
    original: Callable[..., Any],
    *args: Any,
) -> Any:
    generator = current_generator()
    return original(*args) if generator is None else method(generator, *args)


def _set_state(generator: torch.Generator, new_state: torch.Tensor) -> None:
    generator.set_state(new_state)


# The child of a fork begins as a copy of the forking thread, but it is no worker thread.
os.register_at_fork(after_in_child=partial(setattr, _thread_info, "info", None))
