"""Datasets and what they do in each stage."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset, Subset, default_collate

from ._event_loops import new_event_loop

__all__ = ["Hooks", "StagedDataset", "collate_of", "finished", "hooks_of"]

SampleT_co = TypeVar("SampleT_co", covariant=True)
Hook = Callable[[Any], Any]


class StagedDataset(Dataset[SampleT_co], Generic[SampleT_co]):
    """A dataset that says which part of its work is I/O, which is CPU and which is memory.

    Override `load` (or `load_many`) and what else you need. `DataLoader` gives each hook the
    workers that fit it; under torch's own `DataLoader` the same class works as one piece.
    """

    def load(self, index: Any) -> Any:
        """I/O: fetch the raw form of a sample, such as the bytes of a file. May be `async def`."""
        if self.load_many is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs a load(index) or a load_many(indices) method."
            )
        return _only(finished(self.load_many([index])))

    load_many: Callable[[Any], Any] | None = None
    """I/O, instead of `load`: the raw forms of all samples of a batch, in the order of the indices.

    For storage where one request for many is cheaper than many requests. May be `async def`.
    """

    def preprocess(self, raw: Any) -> Any:
        """CPU: make the sample from its raw form. The default takes it as it is."""
        return raw

    def collate(self, samples: list[Any]) -> Any:
        """Memory: make the batch from its samples. The default is torch's `default_collate`."""
        return default_collate(samples)

    def __getitem__(self, index: Any) -> SampleT_co:
        return self.preprocess(finished(self.load(index)))  # type: ignore[no-any-return]

    @property
    def __getitems__(self) -> Callable[[Any], list[SampleT_co]] | None:
        # Not a method: torch looks whether the attribute is there *and* true.
        return None if self.load_many is None else self._load_and_preprocess_many

    def _load_and_preprocess_many(self, indices: Any) -> list[SampleT_co]:
        assert self.load_many is not None
        return [self.preprocess(raw) for raw in finished(self.load_many(indices))]

    @staticmethod
    def from_functions(
        source: Sequence[Any],
        *,
        load: Hook | None = None,
        load_many: Hook | None = None,
        preprocess: Hook | None = None,
        collate: Hook | None = None,
    ) -> StagedDataset[Any]:
        """A dataset of functions and a list.

        `load` gets an element of `source`, `load_many` a list of them. Without either, the
        element itself is the raw form.
        """
        return _FunctionDataset(source, load, load_many, preprocess, collate)


class _FunctionDataset(StagedDataset[Any]):
    def __init__(
        self,
        source: Sequence[Any],
        load: Hook | None,
        load_many: Hook | None,
        preprocess: Hook | None,
        collate: Hook | None,
    ) -> None:
        self._source = source
        if load_many is not None:
            self.load_many = partial(
                _load_many_async if _is_async(load_many) else _load_many, source, load_many
            )
        if load is not None:
            function = _load_async if _is_async(load) else _load
            self.load = partial(function, source, load)  # type: ignore[method-assign]
        elif load_many is None:
            self.load = partial(getitem, source)  # type: ignore[method-assign]
        if preprocess is not None:
            self.preprocess = preprocess  # type: ignore[method-assign, assignment]
        if collate is not None:
            self.collate = collate  # type: ignore[method-assign, assignment]

    def __len__(self) -> int:
        return len(self._source)


def _load(source: Sequence[Any], load: Hook, index: Any) -> Any:
    return load(source[index])


async def _load_async(source: Sequence[Any], load: Hook, index: Any) -> Any:
    return await load(source[index])


def _load_many(source: Sequence[Any], load_many: Hook, indices: Any) -> Any:
    return load_many([source[index] for index in indices])


async def _load_many_async(source: Sequence[Any], load_many: Hook, indices: Any) -> Any:
    return await load_many([source[index] for index in indices])


# -- from a dataset to its hooks -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a dataset does in the load and preprocess stages; None where it does nothing there."""

    load: Hook | None
    """Gives the raw form for an index."""
    preprocess: Hook | None
    """Gives the sample for its raw form or, where there is no load, for its index."""
    load_is_async: bool = False
    load_takes_batch: bool = False
    """The load hook gets what the sampler drew for a batch, and gives a raw form for each index."""
    preprocess_takes_batch: bool = False


def hooks_of(dataset: Any, *, batched: bool) -> Hooks:
    """The hooks of any map-style dataset. One that cannot be split does all its work in preprocess.

    The dataset's class decides, not a method's name: an unrelated method may be called `load`.
    """
    if isinstance(dataset, StagedDataset):
        return _staged_hooks(dataset, batched)
    if type(dataset) is Subset:
        return _subset_hooks(dataset, batched)
    if _is_image_folder(dataset):
        return Hooks(partial(_read_of_folder, dataset), partial(_decode_of_folder, dataset))
    if batched and getattr(dataset, "__getitems__", None):
        return Hooks(load=None, preprocess=dataset.__getitems__, preprocess_takes_batch=True)
    return Hooks(load=None, preprocess=_getitem_of(dataset))


def collate_of(dataset: Any) -> Hook | None:
    """The dataset's own collate hook, if it has one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if not isinstance(dataset, StagedDataset):
        return None
    is_default = getattr(dataset.collate, "__func__", None) is StagedDataset.collate
    return None if is_default else dataset.collate


def _staged_hooks(dataset: StagedDataset[Any], batched: bool) -> Hooks:
    for name in ("preprocess", "collate"):
        if _is_async(getattr(dataset, name)):
            raise TypeError(
                f"{type(dataset).__name__}.{name} is `async def`, but only load and load_many may "
                "be: asynchronous code helps where one waits for I/O. Make it a plain function."
            )
    is_identity = getattr(dataset.preprocess, "__func__", None) is StagedDataset.preprocess
    preprocess = None if is_identity else dataset.preprocess
    load_many = dataset.load_many
    if load_many is not None and batched:
        return Hooks(
            load_many, preprocess, load_is_async=_is_async(load_many), load_takes_batch=True
        )
    if load_many is not None and getattr(dataset.load, "__func__", None) is StagedDataset.load:
        is_async = _is_async(load_many)
        one_of_many = _load_one_of_many_async if is_async else _load_one_of_many
        return Hooks(partial(one_of_many, load_many), preprocess, load_is_async=is_async)
    return Hooks(dataset.load, preprocess, load_is_async=_is_async(dataset.load))


def _subset_hooks(subset: Subset[Any], batched: bool) -> Hooks:
    inner = hooks_of(subset.dataset, batched=batched)
    if inner.load is not None:
        function = _of_subset_many if inner.load_takes_batch else _of_subset
        load = partial(function, inner.load, subset.indices)
        return Hooks(
            load,
            inner.preprocess,
            load_is_async=inner.load_is_async,
            load_takes_batch=inner.load_takes_batch,
        )
    if inner.preprocess_takes_batch:
        return Hooks(None, subset.__getitems__, preprocess_takes_batch=True)
    return Hooks(None, _getitem_of(subset))


def _is_image_folder(dataset: Any) -> bool:
    """Whether it is one of torchvision's folders with our loader, and neither is overridden."""
    folder = sys.modules.get("torchvision.datasets.folder")
    image = sys.modules.get(f"{__package__}._image")
    if folder is None or image is None:  # Then nobody can have made one.
        return False
    return (
        getattr(type(dataset), "__getitem__", None) is folder.DatasetFolder.__getitem__
        and isinstance(dataset.loader, image.ImageLoader)
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
    # The interpreter calls a bound method faster than it goes through operator.getitem.
    return getattr(dataset, "__getitem__", None) or partial(getitem, dataset)


def _of_subset(load: Hook, indices: Sequence[Any], index: Any) -> Any:
    return load(indices[index])


def _of_subset_many(load_many: Hook, indices: Sequence[Any], drawn: Any) -> Any:
    return load_many([indices[index] for index in drawn])


def _load_one_of_many(load_many: Hook, index: Any) -> Any:
    return _only(load_many([index]))


async def _load_one_of_many_async(load_many: Hook, index: Any) -> Any:
    return _only(await load_many([index]))


def _only(results: Any) -> Any:
    (result,) = results
    return result


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (asks what kind it is, not whether it is there)
    )


# -- an async hook called from plain code, outside the pipeline ------------------------------------


class _LoopOfThread(threading.local):
    """One event loop for each thread, so that what a dataset binds to its loop stays usable."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._process_id = os.getpid()
        self._runner = asyncio.Runner(loop_factory=new_event_loop)
        # Freed with the thread, or at the interpreter's exit.
        self._closes_with_thread = _Token()
        weakref.finalize(
            self._closes_with_thread, _close_in_process, self._runner, self._process_id
        )

    def run(self, result: Awaitable[Any]) -> Any:
        if self._process_id != os.getpid():  # The loop is the one of the forking process.
            self._open()
        # In the caller's context of now, not in that of the first call: the sample is another.
        return self._runner.run(_awaited(result), context=contextvars.copy_context())


class _Token:
    pass


def _close_in_process(runner: asyncio.Runner, process_id: int) -> None:
    if os.getpid() == process_id:
        # To end a loop's threads it starts one more, which cannot be done at the exit from Python
        # 3.12 on. They have ended by themselves then.
        with contextlib.suppress(RuntimeError):
            runner.close()


_loop_of_thread = _LoopOfThread()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def finished(result: Any) -> Any:
    """What a hook returned, waited for if it is asynchronous."""
    if not inspect.isawaitable(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop_of_thread.run(result)
    # This thread has a loop of its own that is busy calling us, as in a notebook.
    with ThreadPoolExecutor(max_workers=1) as helper:
        return helper.submit(finished, result).result()
