"""The random numbers of a sample: what it draws follows from its key, wherever it is made.

A key is a tuple of integers: the seed, the epoch, and which sample of the epoch it is. A thread, a
worker process, an executor and the calling thread all make generators from it in the same way. The
process-wide generators belong to the training loop and are left alone.

Code that draws from process-wide generators is led to those of the sample in one of two ways. In
the process of the training loop, `SampleRngMode` does it for torch, in one thread at a time. In a
worker process of ours, `redirect_draws` does it for torch, `random` and `numpy.random`, for good.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from operator import ne
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from ._child_random import (
    Names,
    drawing_methods,
    find_names,
    is_redirected,
    redirect_random_and_numpy,
    replace_names,
)
from ._permutation import key_of
from ._torch_patches import DROPOUT, redirect_random, redirect_seeding, redirect_torch

Key = tuple[int, ...]


class Cursor(Protocol):
    """Says at which sample a worker is."""

    @property
    def position(self) -> Any:
        """What tells one sample from the next; compared with `!=`.

        It is kept after the sample is done, so it must not refer to objects of the user.
        """

    def key(self) -> Key:
        """Return the numbers from which the RNG of the sample is seeded."""


class KeyCursor:
    """A cursor for code that knows the key of each sample it makes."""

    def __init__(self, key: Key = ()) -> None:
        self._key = key
        self.position = 0

    def move(self, key: Key) -> None:
        """Begin the next sample."""
        self._key = key
        self.position += 1

    def key(self) -> Key:
        return self._key


_OF_RANDOM: Final = 1
_OF_NUMPY: Final = 2
"""Set apart the seeds of the two modules from each other and from that of the sample."""


class SampleRng:
    """The generators of the sample at which a cursor is.

    They are seeded by the first draw of a sample, so that a sample that draws nothing costs
    nothing. Has the attributes of the `rng` in torch's `WorkerInfo`, and what `random` and
    `numpy.random` draw from in a worker process. Those are generators of their own: a sample that
    uses `random` and `sample_rng().random` draws the same from the latter in any process, and what
    it draws from one is independent of what it draws from the other.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.num_uses = 0
        """How often one of the generators was asked for."""
        self._seeded_at: Any = None
        self._seed = 0
        self._torch_is_seeded = False
        self._torch_generator: torch.Generator | None = None
        self._numpy_generator: np.random.Generator | None = None
        self._random_generator: random.Random | None = None
        self._module_random: random.Random | None = None
        self._module_random_is_seeded = False
        self._module_numpy: np.random.RandomState | None = None
        self._module_numpy_is_seeded = False

    @property
    def torch_generator(self) -> torch.Generator:
        self._begin_sample()
        if self._torch_generator is None:
            self._torch_generator = torch.Generator()
        if not self._torch_is_seeded:
            # The object is kept for the next sample: to make one takes longer than to seed it.
            self._torch_generator.manual_seed(self._seed)
            self._torch_is_seeded = True
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

    @property
    def module_random(self) -> random.Random:
        """What the functions of `random` draw from in a worker process."""
        self._begin_sample()
        if self._module_random is None:
            self._module_random = random.Random()
        if not self._module_random_is_seeded:
            self._module_random.seed(key_of(self._seed, _OF_RANDOM))
            self._module_random_is_seeded = True
        return self._module_random

    @property
    def module_numpy(self) -> np.random.RandomState:
        """What the functions of `numpy.random` draw from in a worker process."""
        self._begin_sample()
        if self._module_numpy is None:
            self._module_numpy = np.random.RandomState()
        if not self._module_numpy_is_seeded:
            self._module_numpy.seed(divmod(key_of(self._seed, _OF_NUMPY), 1 << 32))
            self._module_numpy_is_seeded = True
        return self._module_numpy

    @property
    def is_reseeded(self) -> bool:
        """Whether the sample's own code has seeded the torch generator."""
        return self.torch_generator.initial_seed() != self._seed

    def restart(self) -> None:
        """Draw the same numbers as from the beginning of the sample."""
        self._seeded_at = None

    def _begin_sample(self) -> None:
        self.num_uses += 1
        position = self._cursor.position
        if position != self._seeded_at:
            self._seeded_at = position
            self._seed = key_of(*self._cursor.key())
            self._torch_is_seeded = False
            self._module_random_is_seeded = self._module_numpy_is_seeded = False
            self._numpy_generator = self._random_generator = None


_current_rng: ContextVar[SampleRng | None] = ContextVar("spdl_torch_rng", default=None)
"""The RNG of the sample that is being made in this thread, or in this task of an event loop."""


class use_rng(contextlib.AbstractContextManager[None]):  # noqa: N801 (reads as a function)
    """Make an RNG the current one, or None; restore the one before afterwards."""

    def __init__(self, rng: SampleRng | None) -> None:
        self._rng = rng

    def __enter__(self) -> None:
        self._before = _current_rng.set(self._rng)

    def __exit__(self, *_: Any) -> None:
        # An unfinished task of an event loop may be collected, and so be left, in another context.
        with contextlib.suppress(ValueError):
            _current_rng.reset(self._before)


def restore_current_rng() -> use_rng:
    """Restore the current RNG afterwards, also after a KeyboardInterrupt at any place."""
    return use_rng(_current_rng.get())


def restart_sample() -> None:
    """Let the current sample draw the same numbers again, because it is tried again."""
    if (rng := _current_rng.get()) is not None:
        rng.restart()


class CurrentRng:
    """The `rng` of torch's `WorkerInfo`: the generators of the sample that is being made.

    A worker may make several samples at a time, or one inside another.
    """

    torch_generator = property(lambda _: _required_rng().torch_generator)
    numpy_generator = property(lambda _: _required_rng().numpy_generator)
    random_generator = property(lambda _: _required_rng().random_generator)


def _required_rng() -> SampleRng:
    if (rng := _current_rng.get()) is None:
        raise RuntimeError(
            "get_worker_info().rng is there only while a sample is being made. Draw in the hooks "
            "of the dataset, or from a torch.Generator() of your own."
        )
    return rng


class SampleGenerators(NamedTuple):
    """The generators of a sample for code that does not draw through torch."""

    numpy: np.random.Generator
    random: random.Random


def sample_rng() -> SampleGenerators:
    """Return the generators of the sample that is being made, for a dataset's code.

    What they draw depends on the sample, not on which worker makes it or when. They continue from
    call to call and are seeded again for the next sample. Where no sample is known, as in torch's
    own loader or with `num_workers=0` and no `seed`, each call returns new generators, seeded from
    torch's global RNG.

    >>> from spdl_torch import DataLoader, StagedDataset, sample_rng
    >>> load = lambda index: sample_rng().random.random()
    >>> dataset = StagedDataset.from_functions(range(3), load=load)
    >>> first, second = (list(DataLoader(dataset, seed=5, num_workers=n)) for n in (0, 2))
    >>> first == second
    True
    """
    if (rng := _current_rng.get()) is not None:
        return SampleGenerators(rng.numpy_generator, rng.random_generator)
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return SampleGenerators(np.random.default_rng(seed), random.Random(seed))


sample_rng.__module__ = "spdl_torch"


# -- code that draws through torch ----------------------------------------------------------------

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
        torch.rrelu,
        torch.rrelu_,
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
        # Those of `torch.distributions`, and so of mixup.
        torch._sample_dirichlet,
        torch._standard_gamma,
        # A mode sees these, and not what they call. Of the others in `init` it sees what they call.
        init.kaiming_uniform_,
        init.normal_,
        init.uniform_,
    }
)
"""The functions of torch that draw from the default generator if they are given no other.

A test compares them with the operators of torch that have a generator among their arguments.
"""


class SampleRngMode(TorchFunctionMode):
    """Let all code of the calling thread that draws through torch draw from the current RNG.

    Code that passes a generator uses that one, and a draw on another device uses that device's.
    Every call of torch inside the mode takes about a microsecond more; this is torch's price for
    any mode, so what is known to draw nothing is better left outside. The RNG of the sample at
    the cursor becomes the current one; without a cursor, that is left to `use_rng`.
    """

    def __init__(self, cursor: Cursor | None = None) -> None:
        super().__init__()
        redirect_seeding(_current_torch_generator, _torch_generator_to_ask)
        redirect_random(_current_torch_generator)
        self._rng = None if cursor is None else SampleRng(cursor)

    def __enter__(self) -> Self:
        # In this order, and the other way round below: if Ctrl-C comes in between, the mode that
        # is left on the stack finds no RNG and does nothing.
        super().__enter__()  # type: ignore[no-untyped-call]
        self._before = _current_rng.set(self._rng)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _current_rng.reset(self._before)
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rng = _current_rng.get() if func in _DRAWING else None
        if rng is not None and _draws_on_cpu(args, kwargs):
            return func(*args, **(kwargs or {}) | {"generator": rng.torch_generator})
        return func(*args, **kwargs) if kwargs else func(*args)


def _draws_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether a call of a drawing function would use the default generator of the CPU."""
    if kwargs:
        if kwargs.get("generator") is not None:
            return False
        if (device := kwargs.get("device")) is not None:
            return torch.device(device).type == "cpu"
        args = *args, *kwargs.values()
    device_type = None
    for arg in args:
        if isinstance(arg, torch.Tensor):
            device_type = device_type or arg.device.type
        elif isinstance(arg, torch.Generator):
            return False
    if device_type is None and torch._C._len_torch_function_stack():  # Or it is the CPU.
        device_type = torch.get_default_device().type
    return device_type in (None, "cpu")


def _current_torch_generator() -> torch.Generator | None:
    rng = _current_rng.get()
    return None if rng is None else rng.torch_generator


def _torch_generator_to_ask() -> torch.Generator | None:
    """Return the generator that `torch.initial_seed()` tells of, or None for the default one.

    In a worker process that is the one with the seed of the worker, as with torch's workers, until
    the sample's code has called `torch.manual_seed()`.
    """
    rng = _current_rng.get()
    if rng is None or (is_redirected() and not rng.is_reseeded):
        return None
    return rng.torch_generator


# -- code that draws in a worker process ----------------------------------------------------------


def find_drawing_names() -> Names:
    """Find where the user's modules have functions that draw.

    Call it before a process is forked: a forked process would copy all memory that it looks at.
    """
    return find_names([*_DRAWING, *DROPOUT, *drawing_methods()])


def redirect_draws(names: Names | None = None) -> None:
    """Let all code of this process that draws draw from the current RNG, if there is one.

    This replaces functions of torch, `random` and `numpy.random` for good. Call it when a worker
    process of ours begins, before it has further threads. Outside of a sample, they draw from the
    generators of the process as before. `names` is what `find_drawing_names` has returned.
    """
    if is_redirected():
        return
    if names is None:
        names = find_drawing_names()
    redirect_seeding(_current_torch_generator, _torch_generator_to_ask)
    replacements = redirect_torch(_DRAWING, _drawing_from_sample, _current_torch_generator)
    replacements += redirect_random_and_numpy(
        lambda: None if (rng := _current_rng.get()) is None else rng.module_random,
        lambda: None if (rng := _current_rng.get()) is None else rng.module_numpy,
    )
    replace_names(names, replacements)


def _drawing_from_sample(function: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        rng = _current_rng.get()
        if rng is not None and _draws_on_cpu(args, kwargs):
            kwargs["generator"] = rng.torch_generator
        return function(*args, **kwargs)

    return draw


def sample_context(cursor: Cursor | None = None) -> contextlib.AbstractContextManager[Any]:
    """Return what a worker is inside of while it makes samples; it may be entered again and again.

    The RNG of the sample at the cursor becomes the current one, and what draws through torch draws
    from it. Without a cursor, the current RNG is left to `use_rng`.
    """
    if not is_redirected():
        return SampleRngMode(cursor)
    redirect_random(_current_torch_generator)  # torchvision may have been imported meanwhile.
    return use_rng(None if cursor is None else SampleRng(cursor))


class DrawWatch:
    """Tells whether the calling thread has drawn random numbers since this was made.

    In a worker process that is all of torch, `random` and `numpy.random`. Elsewhere another thread
    may draw from the generators of the process too, which counts as well. Of the generators that
    the user's code has made itself, those are watched that are given.
    """

    def __init__(self, own: Sequence[Any] = ()) -> None:
        self._own = own
        self._rng = _current_rng.get()
        self._num_uses = 0 if self._rng is None else self._rng.num_uses
        self._states = self._of_process()

    def has_drawn(self) -> bool:
        if self._rng is not None and self._rng.num_uses != self._num_uses:
            return True
        return any(map(ne, self._states, self._of_process()))

    def _of_process(self) -> list[Any]:
        states: list[Any] = []
        if self._rng is None:
            states.append(torch.default_generator.get_state().numpy().tobytes())
        if not is_redirected() or self._rng is None:
            kind, keys, *rest = np.random.get_state()
            states += [random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)]
        return states + list(map(_state_of, self._own))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    state = generator.get_state()
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


# -- the process-wide generators ------------------------------------------------------------------


@contextlib.contextmanager
def preserve_global_rng() -> Iterator[None]:
    """Restore the process-wide generators afterwards.

    A `worker_init_fn` may seed or draw from `random`, `numpy.random` and `torch`, which belong to
    the training loop if the worker is a thread. The training loop waits meanwhile.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    # `torch.manual_seed` seeds the accelerator's generators too.
    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    device_states = module.get_rng_state_all() if module and module.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
        if device_states is not None:
            module.set_rng_state_all(device_states)
