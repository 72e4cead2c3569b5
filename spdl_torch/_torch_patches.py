"""What this package changes in torch and torchvision. No other module does that.

Two groups of functions get other code: `torch.utils.data.get_worker_info()`, which answers for the
calling thread first, and the seeding functions such as `torch.manual_seed()`, which act on the RNG
of the sample that is being made in the calling thread. The classes of torchvision that draw from
Python's `random` draw from that RNG too. Where neither a worker thread of ours nor a sample is at
work, all of them do what they did before.

In a worker process of ours, the functions that draw are replaced as well. `random` and
`numpy.random` are in `_child_random`.
"""

from __future__ import annotations

import inspect
import math
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import FunctionType, MethodDescriptorType
from typing import Any, Final

import torch
from torch.jit import _builtins
from torch.utils import _device
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


CurrentGenerator = Callable[[], torch.Generator | None]
"""Returns the torch generator of the current sample, or None if there is no sample."""


def redirect_seeding(current: CurrentGenerator, current_to_ask: CurrentGenerator) -> None:
    """Let torch's seeding functions act on the generator of the current sample.

    Datasets seed torch to draw the same numbers twice, for an image and its mask. In a worker
    process that acts on the worker's own generator; in a thread it would act on that of the
    training loop. `torch.initial_seed()` tells of the generator that `current_to_ask` returns.
    """
    for function, generator, method in (
        (torch.random.manual_seed, current, lambda rng, seed: rng.manual_seed(int(seed))),
        (torch.random.seed, current, torch.Generator.seed),
        (torch.random.initial_seed, current_to_ask, torch.Generator.initial_seed),
        (torch.random.get_rng_state, current, torch.Generator.get_state),
        (torch.random.set_rng_state, current, _set_state),
    ):
        _replace_code(function, partial(_seed_sample, generator, method))


_USERS_OF_RANDOM: Final = (
    "torchvision.transforms.transforms",
    "torchvision.transforms._transforms_video",
    "torchvision.datasets._stereo_matching",
)
"""The modules of torchvision that draw from Python's `random`."""


def redirect_random(current_generator: CurrentGenerator) -> None:
    """Let what torchvision draws from Python's `random` follow the current sample.

    This changes the name `random` in the modules of torchvision that are imported, and not what
    other code finds in `random`.
    """
    for name in _USERS_OF_RANDOM:
        module: Any = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            module.random = _RandomOfSample(current_generator)


class _RandomOfSample:
    """The functions of `random`, which draw from the current sample if there is one."""

    def __init__(self, current_generator: CurrentGenerator) -> None:
        self._current_generator = current_generator

    def __getattr__(self, name: str) -> Any:
        if (generator := self._current_generator()) is None:
            return getattr(random, name)
        # Seeded by torch's generator, so that `torch.manual_seed()` in a sample repeats this too.
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        return getattr(random.Random(seed.item()), name)


# -- in worker processes of ours ------------------------------------------------------------------


def redirect_torch(
    drawing: Iterable[Any], wrap: Callable[[Any], Any], current_generator: CurrentGenerator
) -> list[tuple[Any, Any]]:
    """Wrap the functions of torch that draw, where other modules than torch's look them up.

    Returns what is left to do for `replace_names`. `drawing` has the functions that take a
    generator. Of those that take none, dropout draws from the current generator too.
    """
    # A default device is for the functions in this set. It is made when it is first asked for.
    _device._device_constructors()
    wrapped = [(function, wrap(function)) for function in drawing]
    wrapped += [(function, _dropout_like(function, current_generator)) for function in DROPOUT]
    for function, wrapper in wrapped:
        name, is_method = function.__name__, isinstance(function, MethodDescriptorType)
        wraps(function)(wrapper)
        if not inspect.isfunction(function):  # So that it can be pickled.
            wrapper.__module__, wrapper.__qualname__ = "torch", f"{'Tensor.' * is_method}{name}"
        if is_method:
            setattr(torch.Tensor, name, wrapper)
        elif getattr(torch._VF, name, None) is function:
            setattr(torch._VF, name, wrapper)
        # If the table is not there yet, it will be made from the wrappers.
        if (table := _builtins._builtin_table) is not None and id(function) in table:
            table[id(wrapper)] = table[id(function)]
    return wrapped


DROPOUT: Final[tuple[Any, ...]] = (
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)
"""The functions that torch makes of `bernoulli_`, in C++ and from the default generator."""


def _dropout_like(function: Any, current_generator: CurrentGenerator) -> Any:
    """Return a dropout function that draws the same from the current generator, if there is one."""
    name = function.__name__
    per_feature, is_alpha = name.startswith("feature"), "alpha" in name
    multiply = torch.Tensor.mul_ if name.endswith("_") else torch.mul

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
        draws = train and 0 < p < 1 and input.numel() and input.dim() >= 2 * per_feature
        generator = current_generator() if draws and input.device.type == "cpu" else None
        if generator is None:
            return function(input, p, train)  # type: ignore[no-any-return]
        if per_feature:
            noise = input.new_empty([*input.shape[:2], *[1] * (input.dim() - 2)])
        else:
            noise = torch.empty_like(input)
        noise.bernoulli_(1 - p, generator=generator)
        if not is_alpha:
            return multiply(input, noise.div_(1 - p))
        alpha = 1.7580993408473766
        scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
        shift = noise.add(-1).mul_(alpha * scale).add_(alpha * scale * p)
        return multiply(input, noise.mul_(scale)).add_(shift)

    return dropout


# -- how functions are replaced -------------------------------------------------------------------


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
    current_generator: CurrentGenerator,
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
