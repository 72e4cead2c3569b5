"""What changes in `random` and `numpy.random` in a worker process of ours.

Their functions draw from the sample that is being made in the calling thread. Where no sample is
being made, they do what they did before. It is only done in a process in which nothing of the
user's training runs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
import numpy.random  # NumPy would import it in each child.

Replacements = list[tuple[Any, Any]]
"""Objects that modules have under some name, and what replaces them."""


def is_redirected() -> bool:
    """Return whether `redirect_random_and_numpy` has been called in this process, or its parent."""
    return type(_shared_random()) is not random.Random


def redirect_random_and_numpy(
    current_random: Callable[[], random.Random | None],
    current_numpy: Callable[[], np.random.RandomState | None],
) -> Replacements:
    """Let the generators behind both modules draw from the current sample, if there is one.

    Returns what is left to do for `replace_names`.
    """
    shared = _shared_random()
    bound = _methods_of(shared, random)
    # The object stays and its class changes: `from random import shuffle` is a method of the object
    # and calls further methods. Those that are written in C are found by `replace_names` only.
    shared.__class__ = _following(
        random.Random,
        current_random,
        gauss_next=_gauss_next(current_random),
        __reduce__=lambda self: (random.Random, (), self.getstate()),  # A copy is an ordinary one.
    )
    replacements = [(method, getattr(shared, name)) for name, method in bound.items()]

    legacy = np.random.mtrand._rand
    # Its class cannot change. With the same bit generator, the new object continues from where it
    # is, and from the normal number that it keeps.
    follower = _following(np.random.RandomState, current_numpy)(legacy._bit_generator)
    np.random.RandomState.set_state(follower, legacy.get_state(legacy=False))
    replacements += [(m, getattr(follower, n)) for n, m in _methods_of(legacy, np.random).items()]
    # `numpy.random.seed()` and scikit-learn's `check_random_state()` look it up.
    return [*replacements, (legacy, follower)]


Names = list[tuple[dict[str, Any], str]]
"""Namespaces of modules, and a name in each."""


def drawing_methods() -> list[Any]:
    """Return what `redirect_random_and_numpy` is going to replace."""
    legacy = np.random.mtrand._rand
    of_random = _methods_of(_shared_random(), random)
    return [*of_random.values(), *_methods_of(legacy, np.random).values(), legacy]


def find_names(originals: Iterable[Any]) -> Names:
    """Find objects in the modules of the user and in those that offer them.

    Code such as `from random import random` has the object itself. The modules that are installed
    are too many to look at: what they import in this way keeps drawing from the process.
    """
    ids = set(map(id, originals))
    namespaces = [_namespace_of(module) for module in _modules_of_user()]
    return [
        (namespace, name)
        for namespace in namespaces
        if not ids.isdisjoint(map(id, namespace.values()))
        for name, value in list(namespace.items())
        if id(value) in ids
    ]


def replace_names(names: Names, replacements: Replacements) -> None:
    """Replace the objects that modules have under these names."""
    replacement_of = {id(original): replacement for original, replacement in replacements}
    for namespace, name in names:
        value = namespace.get(name)
        namespace[name] = replacement_of.get(id(value), value)


def _modules_of_user() -> Iterator[ModuleType]:
    """Yield the modules that are not installed, and those that offer what draws."""
    offering = {"random", "numpy.random", "numpy.random.mtrand", "torch", "torch.nn.functional"}
    offering |= {"torch.nn.init", "torch.utils.data.dataset", "__main__", "__mp_main__"}
    is_installed: dict[str, bool] = {}
    for name in list(sys.modules):
        # Thousands of modules are installed: only their packages are looked at. A forked child
        # would copy the memory of each one that it looks at.
        package = name.partition(".")[0]
        if package not in is_installed:
            is_installed[package] = _is_installed(
                package, sys.modules.get(package, sys.modules.get(name))
            )
        if name in offering or not is_installed[package]:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType):
                yield module


def _is_installed(package: str, module: Any) -> bool:
    if package in sys.stdlib_module_names or not isinstance(module, ModuleType):
        return True
    namespace = _namespace_of(module)
    # A package without `__init__.py` has folders only. A module that is built in has neither.
    places = [namespace.get("__file__"), *namespace.get("__path__", ())]
    return not any(isinstance(place, str) and "-packages" not in place for place in places)


def _namespace_of(module: ModuleType) -> dict[str, Any]:
    namespace: dict[str, Any] = object.__getattribute__(module, "__dict__")  # Loads no lazy module.
    return namespace


def _shared_random() -> Any:
    return random._inst


def _methods_of(generator: Any, module: ModuleType) -> dict[str, Any]:
    """Return the functions of a module that are methods of its generator."""
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is generator
    }


def _following(base: type, current: Callable[[], Any], **further: Any) -> Any:
    """Return a class of generators whose methods act on the current one, if there is one."""

    def follow(name: str, method: Any) -> Any:
        @wraps(method)
        def follower(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (generator := current()) is None:
                return method(self, *args, **kwargs)
            return getattr(generator, name)(*args, **kwargs)

        return follower

    public = {name: getattr(base, name) for name in dir(base) if not name.startswith("_")}
    methods = {name: follow(name, value) for name, value in public.items() if callable(value)}
    return type(base.__name__, (base,), methods | further)


def _gauss_next(current: Callable[[], Any]) -> property:
    """Return the attribute in which `gauss()` keeps the second of the two numbers that it draws."""

    def kept(shared: Any) -> dict[str, Any]:
        kept_by: dict[str, Any] = vars(shared if (generator := current()) is None else generator)
        return kept_by

    return property(
        lambda shared: kept(shared)["gauss_next"],
        lambda shared, number: kept(shared).update(gauss_next=number),
    )
