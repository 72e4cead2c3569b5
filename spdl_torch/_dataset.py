"""Datasets, and the hooks that they have for each stage."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset, Subset, default_collate

from ._event_loops import EventLoop

SampleT_co = TypeVar("SampleT_co", covariant=True)
Hook = Callable[[Any], Any]


class StagedDataset(Dataset[SampleT_co], Generic[SampleT_co]):
    """A dataset whose work is split into I/O, CPU and memory.

    Override `load` (or `load_many`), and `preprocess` and `collate` if you need them. `DataLoader`
    runs each hook in the workers of its stage. torch's own `DataLoader` calls them one after the
    other. A class that overrides `__getitem__` or `__getitems__` is not split: that method makes
    its samples, with any number of workers.

    >>> class Lengths(StagedDataset):
    ...     def __len__(self): return 4
    ...     def load(self, index): return b"x" * index  # In num_io_workers threads.
    ...     def preprocess(self, raw): return len(raw)  # In num_cpu_workers threads.
    >>> [batch.tolist() for batch in DataLoader(Lengths(), batch_size=2, num_workers=2)]
    [[0, 1], [2, 3]]
    """

    __module__ = "spdl_torch"

    def load(self, index: Any) -> Any:
        """I/O: return the raw form of a sample, such as a file's bytes. May be `async def`.

        A plain function must not return an awaitable: only an `async def` runs in an event loop.
        """
        if self.load_many is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs a load(index) or a load_many(indices) method."
            )
        (raw,) = completed(self.load_many, [index])
        return raw

    load_many: Callable[[Any], Any] | None = None
    """I/O, instead of `load`: return the raw forms of a whole batch, in the order of the indices.

    Use it where one request for many samples is cheaper than many requests. May be `async def`.
    """

    def preprocess(self, raw: Any) -> Any:
        """CPU: return the sample for its raw form. The default returns the raw form."""
        return raw

    def collate(self, samples: list[Any]) -> Any:
        """Memory: return the batch of these samples. The default is torch's `default_collate`."""
        return default_collate(samples)

    def __getitem__(self, index: Any) -> SampleT_co:
        return self.preprocess(completed(self.load, index))  # type: ignore[no-any-return]

    @property
    def __getitems__(self) -> Callable[[Any], list[SampleT_co]] | None:
        # A property, because torch checks that the attribute exists *and* is true.
        # An overridden `__getitem__` makes the samples of batches too.
        is_overridden = type(self).__getitem__ is not StagedDataset.__getitem__
        return None if self.load_many is None or is_overridden else self._load_and_preprocess_many

    def _load_and_preprocess_many(self, indices: Any) -> list[SampleT_co]:
        assert self.load_many is not None
        return [self.preprocess(raw) for raw in completed(self.load_many, indices)]

    @staticmethod
    def from_functions(
        source: Sequence[Any],
        *,
        load: Hook | None = None,
        load_many: Hook | None = None,
        preprocess: Hook | None = None,
        collate: Hook | None = None,
    ) -> StagedDataset[Any]:
        """Return a dataset that is made of functions and a list.

        `load` is called with an element of `source`, `load_many` with a list of elements. Without
        either, the element itself is the raw form.

        >>> StagedDataset.from_functions(["a", "bc"], load=str.encode, preprocess=len)[1]
        2
        """
        hooks = {"preprocess": preprocess, "collate": collate}
        if load_many is not None:
            hooks["load_many"] = partial(_all_at, load_many, source)
        if load is not None:
            hooks["load"] = partial(_at, load, source)
        elif load_many is None:
            hooks["load"] = partial(getitem, source)
        loads = load is not None or load_many is not None
        return _FunctionDataset(source, hooks, paths=source if loads else None)


class _FunctionDataset(StagedDataset[Any]):
    def __init__(
        self, source: Sequence[Any], hooks: dict[str, Hook | None], paths: Sequence[Any] | None
    ) -> None:
        self._source = source
        self.paths = paths
        """What `load` is called with, for errors to name it; None if the elements are the data."""
        # Attributes, which take the place of the methods.
        vars(self).update((name, hook) for name, hook in hooks.items() if hook is not None)

    def __len__(self) -> int:
        return len(self._source)


def _at(load: Hook, source: Sequence[Any], index: Any) -> Any:
    return load(source[index])


def _all_at(load_many: Hook, source: Sequence[Any], indices: Any) -> Any:
    return load_many([source[index] for index in indices])


# -- from a dataset to its hooks -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hooks:
    """A dataset's functions for the load and preprocess stages; None if it has none for a stage."""

    load: Hook | None
    """Returns the raw form for an index."""
    preprocess: Hook | None
    """Returns the sample for its raw form or, without a load hook, for its index."""
    load_is_async: bool = False
    load_takes_batch: bool = False
    """The load hook takes the indices of a batch, and returns a raw form for each of them."""
    preprocess_takes_batch: bool = False


def hooks_of(dataset: Any, *, batched: bool) -> Hooks:
    """Return the hooks of a map-style dataset. One that is not split has a preprocess hook only.

    The dataset's class decides, not a method's name: an unrelated method may be called `load`.
    """
    if getattr(dataset, "thread_safe", None) is False:
        # Stages are threads too, so one at a time makes whole samples.
        return _fused_hooks(dataset, batched)
    if isinstance(dataset, StagedDataset):
        return _staged_hooks(dataset, batched)
    if type(dataset) is Subset:
        return _subset_hooks(dataset, batched)
    if is_image_folder(dataset):
        return Hooks(partial(_read_of_folder, dataset), partial(_decode_of_folder, dataset))
    return _fused_hooks(dataset, batched)


def collate_of(dataset: Any) -> Hook | None:
    """Return the dataset's own collate hook, or None."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if not isinstance(dataset, StagedDataset):
        return None
    return None if _is_default(dataset.collate, StagedDataset.collate) else dataset.collate


def _staged_hooks(dataset: StagedDataset[Any], batched: bool) -> Hooks:
    for name in ("preprocess", "collate"):
        if _is_async(getattr(dataset, name)):
            raise TypeError(
                f"{type(dataset).__name__}.{name} is `async def`, but only load and load_many may "
                "be: only I/O gains from asynchronous code. Make it a plain function."
            )
    if not _is_split(type(dataset)):
        return _fused_hooks(dataset, batched)
    is_identity = _is_default(dataset.preprocess, StagedDataset.preprocess)
    load: Any = dataset.load
    takes_batch = batched and dataset.load_many is not None
    if takes_batch:
        load = dataset.load_many
    elif _is_default(load, StagedDataset.load) and _is_async(dataset.load_many):
        load = partial(_load_one_of_many, dataset.load_many)
    return Hooks(load, None if is_identity else dataset.preprocess, _is_async(load), takes_batch)


def _is_split(cls: type[StagedDataset[Any]]) -> bool:
    """Return whether the class leaves it to its load and preprocess hooks to make the samples."""
    return all(
        getattr(cls, name) is getattr(StagedDataset, name)
        for name in ("__getitem__", "__getitems__")
    )


def _fused_hooks(dataset: Any, batched: bool) -> Hooks:
    if batched and getattr(dataset, "__getitems__", None):
        return Hooks(load=None, preprocess=dataset.__getitems__, preprocess_takes_batch=True)
    return Hooks(load=None, preprocess=_getitem_of(dataset))


def _is_default(method: Any, default: Any) -> bool:
    return getattr(method, "__func__", None) is default


def _subset_hooks(subset: Subset[Any], batched: bool) -> Hooks:
    inner = hooks_of(subset.dataset, batched=batched)
    if inner.load is not None:
        function = _all_at if inner.load_takes_batch else _at
        return replace(inner, load=partial(function, inner.load, subset.indices))
    if inner.preprocess_takes_batch:
        return replace(inner, preprocess=subset.__getitems__)
    return Hooks(None, _getitem_of(subset))


def is_image_folder(dataset: Any) -> bool:
    """Return whether this is a torchvision folder with an `ImageLoader`, neither overridden."""
    folder = sys.modules.get("torchvision.datasets.folder")
    image = sys.modules.get(f"{__package__}._image")
    if folder is None or image is None:  # Then no such object can exist.
        return False
    if getattr(
        type(dataset), "__getitem__", None
    ) is not folder.DatasetFolder.__getitem__ or getattr(dataset, "__getitems__", None):
        return False
    fuse = sys.modules.get(f"{__package__}._fuse")
    if fuse is not None and type(dataset.loader) is fuse.FusedLoader:
        return True
    return (
        isinstance(dataset.loader, image.ImageLoader)
        and type(dataset.loader).__call__ is image.ImageLoader.__call__
    )


def _read_of_folder(dataset: Any, index: Any) -> tuple[str, bytes, Any]:
    path, target = dataset.samples[index]
    return path, dataset.loader.read(path), target


def _decode_of_folder(dataset: Any, raw: tuple[str, bytes, Any]) -> tuple[Any, Any]:
    path, data, target = raw
    sample = dataset.loader.decode(data, path)
    if dataset.transform is not None:
        sample = dataset.transform(sample)
    if dataset.target_transform is not None:
        target = dataset.target_transform(target)
    return sample, target


def _getitem_of(dataset: Any) -> Hook:
    # Calling a bound method is faster than operator.getitem.
    return getattr(dataset, "__getitem__", None) or partial(getitem, dataset)


async def _load_one_of_many(load_many: Any, index: Any) -> Any:
    (raw,) = await load_many([index])
    return raw


def _is_async(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.args[0] if function.func in (_at, _all_at) else function.func
    call = getattr(function, "__call__", None)  # noqa: B004 (asks what kind it is, not whether it is there)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


# -- an async hook called from plain code, outside the pipeline ------------------------------------


class _RunnerOfThread(threading.local):
    """One event loop for each thread, so that what a dataset binds to its loop stays usable."""

    def __init__(self) -> None:
        self._runner = EventLoop(partial(asyncio.Runner, loop_factory=asyncio.new_event_loop))

    def run(self, result: Awaitable[Any]) -> Any:
        runner = self._runner.take()
        try:
            # In the context of this call, not of the first one: it is another sample's.
            return runner.run(_awaited(result), context=contextvars.copy_context())
        finally:
            self._runner.give_back(runner)


_runner_of_thread = _RunnerOfThread()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def completed(hook: Hook, value: Any) -> Any:
    """Call a hook and return its result; if it is `async def`, run it in an event loop first.

    An awaitable of any other function is refused, with and without workers. A loader must know
    before the first call that a load hook needs its event loop: without one, each worker thread
    would run the awaitable in a loop of its own, and a client session belongs to one loop.
    """
    result = hook(value)
    if not inspect.isawaitable(result):
        return result
    if not _is_async(hook):
        if inspect.iscoroutine(result):
            result.close()  # Without a warning that it was never awaited.
        raise TypeError(
            f"a dataset's load or load_many returned an awaitable ({type(result).__name__}), but "
            "it is not declared `async def`. Declare it so, and await the result in it: "
            "`async def load(...): return await ...`."
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _runner_of_thread.run(result)
    # The event loop of this thread is running this very call, as in a notebook.
    with ThreadPoolExecutor(max_workers=1) as helper:
        return helper.submit(_runner_of_thread.run, result).result()
