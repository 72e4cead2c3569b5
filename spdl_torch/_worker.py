"""What makes a thread a torch worker: info, seeds, dataset copy, modes, device, profiler marks."""

from __future__ import annotations

import contextlib
import dis
import inspect
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from types import CodeType, MethodType
from typing import Any, Final

import numpy as np
import torch
from torch.autograd import profiler
from torch.utils.data import IterDataPipe, TensorDataset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo, _generate_state
from torch.utils.data.dataloader import _sharding_worker_init_fn
from torch.utils.data.datapipes.datapipe import _DataPipeSerializationWrapper
from torch.utils.data.graph_settings import apply_random_seed

from ._collate import collate_in, default_collate
from ._dataset import Hooks, completed
from ._dataset_copy import DatasetCopies, of_copy
from ._device import Transfer
from ._engine import PendingBatch, WorkerCursor
from ._random import CurrentRng, Key, SampleRng, sample_context, use_rng
from ._resume import LOAD, PREPROCESS, IterableProgress, MapKeys, MapProgress, Progress, SampleCount
from ._samples import CountCursor
from ._settings import LoaderSettings
from ._torch_patches import set_worker_info

Hook = Callable[[Any], Any]

_datapipe_graphs = threading.RLock()
"""Held while torch walks a graph of datapipes, with hooks that it sets on their class: only one
thread may do that at a time. A fork waits for the end of it, or the child would keep the hooks."""
os.register_at_fork(
    before=_datapipe_graphs.acquire,
    after_in_parent=_datapipe_graphs.release,
    after_in_child=_datapipe_graphs.release,
)


def datapipe_graph_lock(settings: LoaderSettings) -> AbstractContextManager[Any]:
    """Return the lock to hold while torch walks the dataset, if it is a graph of datapipes."""
    return _datapipe_graphs if settings.is_datapipe else nullcontext()


class WorkerSetup:
    """All that a worker thread needs, and nothing that refers to the loader or its iterator.

    `dataset` is as torch has prepared it, `shard` the number of ranks and the number of this one,
    and `pin_device` the type of device that batches are pinned for, if they are. In a child process
    `seed_of_workers` is that of the parent's progress, and `wrap_collate` makes a function that
    collates into shared memory. A worker that `is_alone` in its process needs no copy of the
    dataset.
    """

    modes: ThreadModes
    """Those that workers work in. The source sets them when it starts the workers."""

    def __init__(
        self,
        settings: LoaderSettings,
        progress: Progress | None,
        transfer: Transfer | None,
        *,
        dataset: Any,
        shard: tuple[int, int],
        pin_device: str | None,
        seed_of_workers: int | None = None,
        is_alone: bool = False,
        wrap_collate: Callable[[Hook], Hook] | None = None,
    ) -> None:
        self.settings = settings
        self.dataset = dataset
        self.num_workers = settings.num_workers
        """The number of workers of all stages together."""
        self.progress = progress
        """That of the epoch that runs. The source sets it for each further epoch. None in a child
        process with a map-style dataset, where each batch has its keys."""
        self.transfer = transfer
        if seed_of_workers is None:
            assert progress is not None
            seed_of_workers = progress.seed_of_workers
        self._base_seed = seed_of_workers
        self._wrap_collate = wrap_collate
        self._shard = shard if settings.is_datapipe else None
        # An iterator's state is often in the dataset, and a datapipe's shard always is: those are
        # copied for each worker, as they are for worker processes.
        self._copies: DatasetCopies | None = None
        needs_copies = settings.is_iterable or settings.is_datapipe or settings.copy_dataset
        if needs_copies and not is_alone:
            # torch's wrapper of a datapipe pickles by itself, in a way that shares no objects.
            inner = dataset._datapipe if _is_wrapped(dataset) else dataset
            self._copies = DatasetCopies(inner, or_shallow=not settings.copy_dataset)
        self._pin_device = pin_device if transfer is None else None
        if self._pin_device is not None:
            self._device_index = torch.accelerator.current_device_index()
        self.collate_fn = settings.collate_fn
        if self.collate_fn is torch.utils.data.default_collate:
            self.collate_fn = default_collate

    def _enter(self, worker_id: int) -> Any:
        """Make the calling thread a worker, and return its dataset."""
        self.modes.adopt()
        with self.modes.inference() or nullcontext():
            if self._pin_device is not None:
                torch.accelerator.set_device_index(self._device_index)
            if self.transfer is not None:
                self.transfer.enter()
            dataset = self.dataset
            if self._copies is not None:
                inner = self._copies.make()
                dataset = type(dataset)(inner) if _is_wrapped(dataset) else inner
            set_worker_info(
                WorkerInfo(
                    id=worker_id,
                    num_workers=self.num_workers,
                    seed=self._base_seed + worker_id,
                    dataset=dataset,
                    rng=CurrentRng(),  # type: ignore[arg-type]
                    worker_method="thread",
                )
            )
            if self._shard is not None:
                with _datapipe_graphs:
                    _sharding_worker_init_fn(None, *self._shard, worker_id)
            if (worker_init_fn := self.settings.worker_init_fn) is not None:
                # As torch seeds its worker processes.
                random.seed(self._base_seed + worker_id)
                np.random.seed(_generate_state(self._base_seed, worker_id))
                torch.default_generator.manual_seed(self._base_seed + worker_id)
                of_copy(worker_init_fn, self.dataset, dataset)(worker_id)
            return dataset

    def _hooks_of(self, dataset: Any) -> Hooks:
        return self.settings.hooks_of(dataset)

    def _collate_of(self, dataset: Any) -> Hook:
        collate = of_copy(self.collate_fn, self.dataset, dataset)
        return collate_into(collate, self.transfer, self._pin_device)

    # -- the stages of map-style datasets ---------------------------------------------------------

    def load_worker(self, worker_id: int, cursor: WorkerCursor) -> tuple[Hook, None]:
        """Make the calling thread a worker of the load stage; return its load hook."""
        load = self._hooks_of(self._enter(worker_id)).load
        assert load is not None
        mode = None if _draws_nothing(load) else sample_context(_SlotCursor(self, cursor, LOAD))
        cursor.task_context = _Marked("load", self.modes.inference(), mode, cursor=cursor)

        def pause(seconds: float) -> bool:
            assert cursor.batch is not None
            return cursor.batch.epoch.pause(seconds)

        return self.settings.bad_sample_policy.retried(partial(completed, load), pause), None

    def async_load_worker(
        self, worker_id: int
    ) -> tuple[Hook, Callable[[PendingBatch, int], AbstractContextManager[Any]], _Marked]:
        """Make the calling thread the worker of an asynchronous load stage.

        Returns its load hook, the context of a task, and the context of the thread. The tasks take
        turns in one thread, so each has an RNG of its own.
        """
        load = self._hooks_of(self._enter(worker_id)).load
        assert load is not None
        retried = self.settings.bad_sample_policy.retried_async(load)
        thread_context = _Marked(None, self.modes.inference(), sample_context())
        return retried, partial(_task_context, self), thread_context

    def preprocess_worker(self, worker_id: int, cursor: WorkerCursor) -> tuple[Hook | None, Hook]:
        """Make the calling thread a worker of the last stage; return its hook and its collate."""
        dataset = self._enter(worker_id)
        preprocess, collate = self._hooks_of(dataset).preprocess, self._collate_of(dataset)
        if not self.settings.batched:
            collate = partial(_collate_one, collate)
        if self._wrap_collate is not None:
            collate = self._wrap_collate(collate)
        mode = None
        if not (_draws_nothing(preprocess) and _is_torchs(self.collate_fn)):
            mode = sample_context(_SlotCursor(self, cursor, PREPROCESS))
        cursor.task_context = _Marked("preprocess", self.modes.inference(), mode, cursor=cursor)
        return preprocess, collate

    def label(self, batch: PendingBatch, slot: int, value: Any) -> tuple[Any, Key]:
        """Return what an executor is given to preprocess a sample."""
        return value, self.key_at(batch, slot, PREPROCESS)

    def key_at(self, batch: PendingBatch, slot: int, stage: int) -> Key:
        """Return the RNG key of a slot in a stage."""
        if isinstance(batch.position, MapKeys):  # In a child process.
            return *batch.position.sample_key(batch.indices, slot), stage
        assert isinstance(self.progress, MapProgress)
        return *self.progress.sample_key(batch.number, batch.indices, slot), stage

    # -- the stage of iterable datasets, and transfers --------------------------------------------

    def iterable_worker(
        self, worker_id: int, cursor: WorkerCursor
    ) -> tuple[Callable[[], Callable[[PendingBatch], Any]], Hook]:
        """Make the calling thread read a dataset of its own.

        Returns a function that opens an epoch, and the collate function.
        """
        count = SampleCount()
        setup: Any = weakref.ref(self)  # The thread keeps what it is in.

        def key(number: int) -> Key:
            return setup().progress.sample_key(worker_id, number)  # type: ignore[no-any-return]

        dataset = self._enter(worker_id)
        mode = sample_context(CountCursor(count, key))
        cursor.task_context = _Marked("iterate", self.modes.inference(), mode, cursor=cursor)
        collate = self._collate_of(dataset)
        if self._wrap_collate is not None:
            collate = self._wrap_collate(collate)
        return partial(self._open_iterable, dataset, worker_id, count), collate

    def _open_iterable(
        self, dataset: Any, worker_id: int, count: SampleCount
    ) -> Callable[[PendingBatch], Any]:
        progress = self._iterable_progress
        if isinstance(dataset, IterDataPipe):
            shared_seed = progress.take_shared_seed(None)
            assert shared_seed is not None
            with _datapipe_graphs:
                dataset = apply_random_seed(dataset, torch.Generator().manual_seed(shared_seed))
        reader = progress.open(dataset, worker_id, count)

        def draw(batch: PendingBatch) -> Any:
            try:
                samples = reader.draw(batch.drawn)
            except Exception as error:
                # What is wrong with its state has been raised at every batch.
                with contextlib.suppress(Exception):
                    if isinstance(error, StopIteration):
                        progress.come_to_end(worker_id, reader.bookmark())
                    else:  # The next batch is what comes after the error.
                        batch.position = worker_id, reader.bookmark()
                raise
            batch.position = worker_id, reader.bookmark_after_step()
            return samples

        return draw

    def first_worker(self) -> int:
        """Return the worker that makes the next batch of an iterable dataset."""
        return self._iterable_progress.next_worker

    @property
    def _iterable_progress(self) -> IterableProgress:
        assert isinstance(self.progress, IterableProgress)
        return self.progress

    def transfer_worker(self) -> Callable[..., Any]:
        """Make the calling thread the one that copies batches; return what copies one.

        It copies to the device or, if the loader has none, to pinned memory.
        """
        self.modes.adopt()
        copy: Callable[..., Any]
        if self.transfer is not None:
            self.transfer.enter()
            copy = self.transfer.send
        else:
            torch.accelerator.set_device_index(self._device_index)
            copy = partial(pin_memory, device=self._pin_device)
        return _Marked("transfer", self.modes.inference())(copy)


def _collate_one(collate: Hook, samples: Any) -> Any:
    return collate(samples[0])


def become_worker_process(
    base_seed: int, worker_id: int, empty: Callable[..., torch.Tensor]
) -> None:
    """Seed the process as torch seeds its worker processes, and let batches be made in `empty`.

    So also where the user's code calls torch's `default_collate`.
    """
    random.seed(base_seed + worker_id)
    np.random.seed(_generate_state(base_seed, worker_id))
    torch.default_generator.manual_seed(base_seed + worker_id)
    collate_in(empty)


def _is_wrapped(dataset: Any) -> bool:
    return isinstance(dataset, _DataPipeSerializationWrapper)


def collate_into(collate: Hook, transfer: Transfer | None, pin_device: str | None) -> Hook:
    """Return a collate function whose batches are in the memory to transfer or pin them."""
    is_default = collate in (default_collate, torch.utils.data.default_collate)
    if transfer is not None:
        if is_default:
            return lambda samples: transfer.pin(lambda empty: default_collate(samples, empty=empty))
        return lambda samples: transfer.pin(lambda _: collate(samples))
    if pin_device is None:
        return collate
    if is_default:
        collate = partial(default_collate, empty=partial(torch.empty, pin_memory=True))
    return lambda samples: pin_memory(collate(samples), pin_device)


# -- what a worker has from the thread that starts it ---------------------------------------------

_num_intra_op_threads: ContextVar[int | None] = ContextVar("spdl_torch_threads", default=None)
"""In a worker, which has one intra-op thread: the number of the process."""


class ThreadModes:
    """What torch and NumPy keep for each thread, as the thread has it that starts the workers.

    A worker process has it from the process that it was forked from.
    """

    def __init__(self) -> None:
        self.num_intra_op_threads = _num_intra_op_threads.get() or torch.get_num_threads()
        self._enables_grad = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        accelerator = torch.accelerator.current_accelerator()
        self._autocast_dtypes = {
            device_type: torch.get_autocast_dtype(device_type)
            for device_type in {"cpu", "cuda" if accelerator is None else accelerator.type}
            if torch.is_autocast_enabled(device_type)
        }
        self._numpy_errors = np.geterr()

    def adopt(self) -> None:
        """Let the calling thread work in the same modes, but with one intra-op thread.

        With more, each worker's resize and stack would use the intra-op threads of all cores, and
        the workers would compete for them.
        """
        _num_intra_op_threads.set(self.num_intra_op_threads)
        torch.set_num_threads(1)
        torch.get_num_threads()
        torch.set_grad_enabled(self._enables_grad)
        for device_type, dtype in self._autocast_dtypes.items():
            torch.set_autocast_enabled(device_type, True)
            torch.set_autocast_dtype(device_type, dtype)
            # All threads have one cache, which is cleared when the training loop leaves autocast.
            torch.set_autocast_cache_enabled(False)
        np.seterr(**self._numpy_errors)

    def inference(self) -> AbstractContextManager[Any] | None:
        """Return inference mode, if it is one of them: a thread cannot be in it for good."""
        return torch.inference_mode() if self._is_inference else None


@contextlib.contextmanager
def inherit_modes() -> Iterator[ThreadModes]:
    """Return the modes of the calling thread, for workers that are started inside of this."""
    modes = ThreadModes()
    # A thread that needs its number of intra-op threads for the first time takes the number that
    # was last set anywhere. So this thread takes its own before the workers set theirs, and sets it
    # again afterwards, for the threads to come.
    own_number = torch.get_num_threads()
    # In a forked child the first call that sets it makes torch's thread pool again, and one that
    # comes meanwhile finds none and fails.
    torch.set_num_threads(own_number)
    try:
        yield modes
    finally:
        torch.set_num_threads(own_number)
        if own_number != modes.num_intra_op_threads:
            # This thread is a worker of another loader, and keeps its own number. For the threads
            # to come, another thread sets that of the process.
            setter = threading.Thread(
                target=torch.set_num_threads, args=[modes.num_intra_op_threads]
            )
            setter.start()
            setter.join()


# -- what a worker is inside of while it works ----------------------------------------------------


class _SlotCursor:
    """The cursor of a worker that fills the slots of batches.

    The worker's thread keeps it, so it must not keep objects of the user.
    """

    def __init__(self, setup: WorkerSetup, cursor: WorkerCursor, stage: int) -> None:
        self._setup = weakref.ref(setup)
        self._cursor = cursor
        self._stage = stage

    @property
    def position(self) -> tuple[Any, ...]:
        batch, slot = self._cursor.batch, self._cursor.slot
        assert batch is not None, "a worker draws between two batches"
        # The index too: another sample may have replaced one that failed.
        index = batch.indices[slot] if slot >= 0 else None
        return batch.epoch.id, batch.number, slot, index if type(index) is int else repr(index)

    def key(self) -> Key:
        setup, batch = self._setup(), self._cursor.batch
        assert setup is not None
        assert batch is not None
        return setup.key_at(batch, self._cursor.slot, self._stage)


def _task_context(
    setup: WorkerSetup, batch: PendingBatch, slot: int
) -> AbstractContextManager[Any]:
    """Return the context of a task that loads a sample in an event loop."""
    cursor = WorkerCursor()
    cursor.batch, cursor.slot = batch, slot
    rng = use_rng(SampleRng(_SlotCursor(setup, cursor, LOAD)))
    return _Marked("load", rng) if profiler_runs() else rng


_OPCODES_WITHOUT_CALLS: Final = {
    "BINARY_OP",
    "BINARY_SUBSCR",
    "BUILD_TUPLE",
    "LOAD_ATTR",
    "LOAD_CONST",
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
    "LOAD_FAST_LOAD_FAST",
    "RESUME",
    "RETURN_VALUE",
}


def _draws_nothing(hook: Hook | None) -> bool:
    """Return whether a hook is known to draw no random numbers.

    This is so for methods such as ``return self.images[index], self.labels[index]`` that call no
    function and use only tensors of their dataset. In `SampleRngMode` a row of a tensor would take
    more than twice as long.
    """
    dataset = getattr(hook, "__self__", None)
    if hook is None or type(dataset) is TensorDataset:
        return True
    lookup: Any = type(dataset).__getattribute__
    if type(hook) is not MethodType or lookup is not object.__getattribute__:
        return False
    code = hook.__code__
    return _calls_nothing(code) and all(
        type(inspect.getattr_static(dataset, name, None)) is torch.Tensor for name in code.co_names
    )


@lru_cache(maxsize=64)
def _calls_nothing(code: CodeType) -> bool:
    # Kept: to look at the opcodes takes as long as to start a thread.
    return {op.opname for op in dis.get_instructions(code)} <= _OPCODES_WITHOUT_CALLS


def _is_torchs(collate: Hook) -> bool:
    """Return whether a collate function runs code of torch alone, none of which draws."""
    return collate is default_collate and all(
        getattr(function, "__module__", None) == torch_collate.__name__
        for function in torch_collate.default_collate_fn_map.values()  # Users may add to it.
    )


def profiler_runs() -> bool:
    """Return whether torch's profiler runs in any thread."""
    return profiler._is_profiler_enabled


class _Marked(contextlib.ContextDecorator, AbstractContextManager[None]):
    """Contexts with a mark around them in the trace of torch's profiler, if that runs.

    A worker has one of these and enters it for each task, which is often many batches. With the
    cursor of the worker, the batches that it collates are marked too. It is not made with
    `contextlib.contextmanager`, which would change the user's exceptions.
    """

    def __init__(
        self,
        stage: str | None,  # None: without a mark.
        *contexts: AbstractContextManager[Any] | None,
        cursor: WorkerCursor | None = None,
    ) -> None:
        self._name = stage and f"spdl_torch.{stage}"
        self._contexts = [context for context in contexts if context is not None]
        self._cursor = None if cursor is None else weakref.ref(cursor)  # It refers to this.
        self._mark: profiler.record_function | None = None

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled and self._name is not None:
            self._mark = profiler.record_function(self._name)
            self._mark.__enter__()
            self._set_collate_context(_Marked("collate"))
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc_info)
        if self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(*exc_info)
            self._set_collate_context(None)

    def _set_collate_context(self, context: _Marked | None) -> None:
        if self._cursor is not None and (cursor := self._cursor()) is not None:
            cursor.collate_context = context
