"""Worker threads in child processes: their batches, errors, seeds and ends are those of torch."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from spdl_torch import DataLoader, StagedDataset

from .datasets import PATIENCE_SECONDS, Squares, Uneven
from .tiers import sampled

pytestmark = pytest.mark.children

FORK = multiprocessing.get_context("fork")
SOAK = int(os.environ.get("SPDL_TORCH_SOAK", "0")) or 1


def children():
    return [p for p in multiprocessing.active_children() if p.name.startswith("spdl_torch")]


def kill_and_close(iterator):
    """Close an iterator whose samples hang, without waiting for them."""
    for process in children():
        process.kill()
    iterator.close()
    assert children() == []


def flat(batches):
    return [value for batch in batches for value in batch.tolist()]


class Calls(Dataset):
    """Its samples are what functions return."""

    def __init__(self, *functions):
        self.functions = functions

    def __len__(self):
        return len(self.functions)

    def __getitem__(self, index):
        return self.functions[index]()


def as_they_are(samples):
    return samples


# -- random numbers -------------------------------------------------------------------------------


class Augmented(Dataset):
    """Small images through torchvision's transforms, and draws of `random` and NumPy."""

    def __init__(self, draws_from_modules):
        from torchvision.transforms import v2  # noqa: PLC0415

        self.draws_from_modules = draws_from_modules
        self.transform = v2.Compose(
            [v2.RandomResizedCrop(12, antialias=True), v2.ColorJitter(0.4, 0.4), v2.RandAugment()]
        )

    def __len__(self):
        return 18

    def __getitem__(self, index):
        image = torch.arange(3 * 16 * 16).reshape(3, 16, 16).add(index).to(torch.uint8)
        numbers = [random.random(), np.random.rand()] if self.draws_from_modules else []
        return self.transform(image), torch.tensor(numbers)


def augmented(*, draws_from_modules=False, **arguments):
    dataset = Augmented(draws_from_modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(DataLoader(dataset, batch_size=4, shuffle=True, seed=3, **arguments))
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


WIDTHS = [(1, 8), (0, 2), (1, 1), (2, 2), (2, 8), (0, 8), (4, 8), (1, 2), (0, 1)]
"""Numbers of processes and workers."""


@pytest.mark.parametrize("widths", sampled(WIDTHS, every=3))
def test_bits_depend_on_the_seed_alone(widths):
    """Augmented images are the same for any number of processes and workers."""
    num_processes, num_workers = widths
    found, _ = augmented(num_processes=num_processes, num_workers=num_workers)
    expected, _ = augmented(num_workers=0)
    assert torch.equal(found, expected)


def test_module_draws_depend_on_the_seed_alone():
    """In children, draws of `random` and `numpy.random` follow the seed too."""
    runs = [
        augmented(draws_from_modules=True, num_processes=num_processes, num_workers=num_workers)
        for num_processes, num_workers in [(None, 2), (None, 2), (1, 8)]
    ]
    for images, numbers in runs[1:]:
        assert torch.equal(images, runs[0][0])
        assert torch.equal(numbers, runs[0][1])
    assert len(runs[0][1].unique()) == 36


def about_worker():
    info = get_worker_info()
    return info.id, info.num_workers, info.seed, torch.initial_seed()


def test_workers_know_what_torchs_know():
    """Ids, seeds and what worker_init_fn draws are those of torch's worker processes."""
    drawn = {}

    def init(worker_id):
        drawn[worker_id] = random.random(), np.random.rand(), float(torch.rand(()))

    dataset = Calls(*[lambda: (*about_worker(), *drawn[get_worker_info().id])] * 4)

    def run(make):
        torch.manual_seed(7)
        loader = make(dataset, num_workers=2, worker_init_fn=init, collate_fn=as_they_are)
        return list(loader)

    assert run(DataLoader) == run(torch.utils.data.DataLoader)


def test_worker_init_fn_reaches_the_dataset():
    """What worker_init_fn changes in the dataset stays in its process."""
    dataset = Squares(6)

    def init(worker_id):
        get_worker_info().dataset.__class__ = Cubes

    assert flat(DataLoader(dataset, num_workers=2, worker_init_fn=init)) == [
        index**3 for index in range(6)
    ]
    assert type(dataset) is Squares


class Cubes(Squares):
    def __getitem__(self, index):
        return index**3


# -- errors ---------------------------------------------------------------------------------------


class Strange(Exception):  # noqa: N818
    """Cannot be unpickled."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class Speechless(Exception):  # noqa: N818
    """Can be neither pickled nor shown."""

    def __init__(self):
        super().__init__(threading.Lock())

    def __str__(self):
        raise ValueError("no text")


class AtHome(Exception):  # noqa: N818
    """Can be unpickled in a child only."""

    def __reduce__(self):
        return made_at_home, (os.getpid(),)


def made_at_home(process_id):
    if os.getpid() != process_id:
        raise ImportError("no such module here")
    return AtHome()


def raising(error):
    def function():
        raise error

    return function


def test_error_keeps_type_and_traceback():
    """An error in a child has its type, its arguments, a note, and the traceback as text."""
    loader = DataLoader(Calls(int, raising(KeyError("lost", 3))), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyError) as raised:
        next(iterator)
    assert raised.value.args == ("lost", 3)
    assert "preprocess stage for sample index 1 (batch 1)" in raised.value.__notes__[0]
    assert "in function" in str(raised.value.__cause__)
    assert "raise error" in str(raised.value.__cause__)
    assert next(iterator, None) is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Strange(4, "odd"), "Strange: 4: odd"),
        (Speechless(), "Speechless"),
        (AtHome("far"), "AtHome: far"),
        (ValueError("x" * 1_000_000), "xxx"),
    ],
    ids=["strange", "speechless", "at-home", "long"],
)
def test_difficult_errors_arrive(error, words):
    """An error that cannot be pickled or unpickled arrives as a RuntimeError with its words."""
    iterator = iter(DataLoader(Calls(raising(error), int), num_workers=1))
    with pytest.raises((RuntimeError, ValueError), match=words) as raised:
        next(iterator)
    assert "for sample index 0 (batch 0)" in raised.value.__notes__[0]
    assert flat(iterator) == [0]


def test_error_in_worker_init_fn():
    """What worker_init_fn raises in a child is raised, and no process is left."""
    loader = DataLoader(Squares(), num_workers=2, worker_init_fn=lambda _: raising(KeyError(1))())
    with pytest.raises(KeyError):
        next(iter(loader))
    loader.close()
    assert children() == []


class HasLambdaInState(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(3)

    def state_dict(self):
        return {"function": lambda: 0}

    def load_state_dict(self, state):
        pass


def test_state_that_cannot_be_pickled():
    """A state that cannot be sent to a child is an error, and not a wait without end."""
    before = DataLoader(HasLambdaInState())
    next(iter(before))
    loader = DataLoader(HasLambdaInState(), num_workers=1, timeout=PATIENCE_SECONDS)
    loader.load_state_dict(before.state_dict())
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot begin: .*pickle"):
            next(iterator)
    loader.close()


class Locked:
    """An index that cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()


def test_draw_that_cannot_be_pickled():
    """A draw that cannot be sent is an error of its batch; memory that was released stays so."""

    class Large(Squares):
        def __getitem__(self, index):
            return torch.zeros(30_000)

    draws = [[0], [1], [Locked()], [3], [4]] * 3
    iterator = iter(DataLoader(Large(), batch_sampler=draws, num_workers=1))
    num_errors = num_batches = 0
    while num_errors + num_batches < len(draws):
        try:
            next(iterator)
            num_batches += 1
        except TypeError:
            num_errors += 1
    assert (num_batches, num_errors) == (12, 3)
    assert next(iterator, None) is None


def hanging(held):
    def function():
        held.set()
        hang_here()

    return function


def hang_here():
    time.sleep(1000)


def test_timeout_names_the_sample():
    """A timeout names the stuck sample and shows its stack in the child."""
    dataset = Calls(int, hanging(FORK.Event()), int)
    iterator = iter(DataLoader(dataset, num_workers=1, timeout=1))
    next(iterator)
    with pytest.raises(RuntimeError, match=r"sample index 1 \(batch 1\)") as raised:
        next(iterator)
    assert "in hang_here" in str(raised.value)
    kill_and_close(iterator)


def test_timeout_names_the_sample_with_gil():
    """A sample that holds the GIL of its child is named too."""
    receive, send = os.pipe()

    def hold_gil():
        return ctypes.PyDLL(None).read(receive, ctypes.create_string_buffer(1), 1)

    loader = DataLoader(Calls(int, hold_gil, int), num_workers=1, timeout=0.5)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match=r"sample index 1 \(batch 1\)"):
        next(iterator)
    os.write(send, b"x")
    assert flat(iterator) == [1, 0]
    os.close(receive)
    os.close(send)


def test_timeout_in_worker_init_fn():
    """A worker_init_fn that does not end is a timeout that shows where it is."""
    loader = DataLoader(Squares(), num_workers=1, timeout=0.5, worker_init_fn=lambda _: hang_here())
    with pytest.raises(RuntimeError, match="set-up of 1 worker") as raised:
        next(iter(loader))
    assert "in hang_here" in str(raised.value)


# -- where workers live ---------------------------------------------------------------------------


class Safe(Squares):
    thread_safe = True


@pytest.mark.parametrize(
    ("dataset", "num_children"),
    [(TensorDataset(torch.arange(9)), 1), (Safe(9), 1), (Squares(9), 3)],
    ids=["tensors", "declared", "unknown"],
)
def test_workers_live_where_planned(dataset, num_children):
    """The loader has as many children as its plan says, and none in its own process."""
    loader = DataLoader(dataset, num_workers=3)
    iterator = iter(loader)
    next(iterator)
    assert len(children()) == num_children == loader.plan.num_processes
    assert not [t for t in threading.enumerate() if "preprocess" in t.name]
    loader.close()


def test_nested_loader_uses_threads():
    """A loader in a worker of another one has its workers in that process."""

    def inner():
        loader = DataLoader(Squares(5), num_workers=2)
        return loader.plan.num_processes, flat(loader)

    (found,) = DataLoader(Calls(inner), num_workers=1, collate_fn=as_they_are)
    assert found == [(0, [0, 1, 4, 9, 16])]


def refuse(process_id, flags=0):
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("pidfd_open", [None, refuse], ids=["built-without", "refused"])
def test_old_systems_have_no_children(pidfd_open, monkeypatch):
    """Where children cannot be watched, the worker threads live in this process."""
    if pidfd_open is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    loader = DataLoader(Squares(5), num_workers=1)
    assert loader.plan.num_processes == 0
    assert flat(loader) == [0, 1, 4, 9, 16]


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_start_methods_make_the_same(context, num_processes):
    """Children that are spawned make the same batches."""
    arguments = {"num_workers": 2, "num_processes": num_processes, "seed": 1}
    loader = DataLoader(Squares(9), multiprocessing_context=context, **arguments)
    assert flat(loader) == flat(DataLoader(Squares(9), **arguments))


def test_spawn_needs_a_pickle():
    """A dataset that cannot be pickled has its workers in this process if children are spawned."""
    loader = DataLoader(Calls(lambda: 1), num_workers=1, multiprocessing_context="spawn")
    assert loader.plan.num_processes == 0
    with pytest.warns(UserWarning, match="in this process, because the dataset cannot be pickled"):
        assert flat(loader) == [1]


class HasLocks(Squares):
    """Holds what is pickled only for a process that is being started."""

    def __init__(self) -> None:
        super().__init__(5)
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.queue = multiprocessing.get_context("spawn").Queue()


def test_spawn_takes_locks():
    """A dataset with locks and queues has its workers in children that are spawned."""
    loader = DataLoader(HasLocks(), num_workers=1, multiprocessing_context="spawn")
    assert loader.plan.num_processes == 1


# -- order, epochs and iterators ------------------------------------------------------------------


@pytest.mark.parametrize("num_processes", sampled([2, 1, 3], every=3))
def test_iterable_batches_come_in_torchs_order(num_processes):
    """Batches of iterable datasets come in torch's order, with workers that end early."""
    dataset = Uneven([7, 0, 4])
    arguments = {"batch_size": 2, "num_workers": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # More workers than cores.
        expected = [batch.tolist() for batch in torch.utils.data.DataLoader(dataset, **arguments)]
    loader = DataLoader(dataset, num_processes=num_processes, **arguments)
    assert [batch.tolist() for batch in loader] == expected
    unordered = DataLoader(dataset, num_processes=num_processes, in_order=False, **arguments)
    assert sorted(flat(unordered)) == sorted(itertools.chain(*expected))


class WaitsAtZero(Dataset):
    def __init__(self):
        self.may_end = multiprocessing.get_context("fork").Event()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 0:
            self.may_end.wait(PATIENCE_SECONDS)
        return index


class WaitingStream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.samples = WaitsAtZero()
        self.may_end = self.samples.may_end

    def __iter__(self):
        info = get_worker_info()
        yield from map(self.samples.__getitem__, range(info.id, 24, info.num_workers))


@pytest.mark.parametrize(("kind", "num_others"), [(WaitsAtZero, 22), (WaitingStream, 16)])
def test_slow_worker_stalls_no_other(kind, num_others):
    """With in_order=False, workers go on while another one takes long for a sample.

    What it has been given already, a batch of a map-style dataset, waits with it.
    """
    dataset = kind()
    with DataLoader(dataset, num_workers=3, in_order=False, timeout=10) as loader:
        iterator = iter(loader)
        found = [int(next(iterator)) for _ in range(num_others)]
        assert 0 not in found
        dataset.may_end.set()
        assert sorted([*found, *map(int, iterator)]) == list(range(24))


def test_persistent_workers_stay():
    """Persistent children live through 20 epochs, of which every other one is broken off."""
    loader = DataLoader(Squares(12), num_workers=2, num_processes=2, persistent_workers=True)
    pids = set()
    for epoch in range(20):
        iterator = iter(loader)
        if epoch % 2:
            next(iterator)
        else:
            assert flat(iterator) == [index**2 for index in range(12)]
        pids |= {process.pid for process in children()}
    assert len(pids) == 2
    loader.close()
    assert children() == []


def test_new_children_see_the_dataset_as_it_is():
    """Without persistent workers, each epoch sees what the training has changed."""
    dataset = Squares(3)
    loader = DataLoader(dataset, num_workers=1)
    assert flat(loader) == [0, 1, 4]
    dataset.__class__ = Cubes
    assert flat(loader) == [0, 1, 8]


def test_late_batches_harm_no_epoch():
    """A batch of a broken epoch that is finished in the next one is thrown away."""
    held, may_go, is_first = FORK.Event(), FORK.Event(), FORK.Value("i", 1)

    class Drawing(Squares):
        def __getitem__(self, index):
            return index + 0 * random.randint(0, 9)

    def collate(samples):
        if samples == [1] and is_first.value:
            is_first.value = 0
            held.set()
            assert may_go.wait(PATIENCE_SECONDS)
            return torch.tensor([-1])
        return torch.tensor(samples)

    arguments = {"prefetch_factor": 4, "persistent_workers": True, "collate_fn": collate}
    loader = DataLoader(Drawing(8), num_workers=1, **arguments)
    next(iter(loader))
    assert held.wait(PATIENCE_SECONDS)
    iterator = iter(loader)
    # The child knows of the second epoch when it says so in an answer: ask it in the background.
    opener = threading.Timer(0.2, may_go.set)
    opener.start()
    assert flat(iterator) == list(range(8))
    opener.join()
    loader.close()


def test_four_iterators_run_at_once():
    """Several live iterators of one loader do not disturb each other."""
    loader = DataLoader(Squares(6), num_workers=1)
    rows = list(zip(*[iter(loader) for _ in range(4)], strict=True))
    assert [[int(value) for value in row] for row in rows] == [[n * n] * 4 for n in range(6)]


def test_loaders_run_in_threads():
    """Loaders in several threads at the same time work."""
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(flat(DataLoader(Squares(6), num_workers=2))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert found == [[0, 1, 4, 9, 16, 25]] * 3


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_loader_with_children_is_copied(copied):
    """A copy of a loader with live children starts its own."""
    loader = DataLoader(Squares(3), num_workers=1, persistent_workers=True)
    next(iter(loader))
    twin = copied(loader)
    assert flat(twin) == [0, 1, 4]
    assert len(children()) == 2
    twin.close()
    loader.close()


# -- closing --------------------------------------------------------------------------------------


def test_close_wakes_the_waiting_loop():
    """close() in another thread ends the wait for a batch, with an error."""
    held = FORK.Event()
    loader = DataLoader(Calls(hanging(held)), num_workers=1)
    iterator = iter(loader)
    closing = threading.Thread(target=lambda: held.wait(PATIENCE_SECONDS) and loader.close())
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)
    kill_and_close(iterator)  # Its child would wait for the sample.
    closing.join()


def test_ctrl_c_ends_children(ctrl_c_interrupts_once):
    """Ctrl-C in the training loop ends the wait for a batch, and the children."""
    held = FORK.Event()
    iterator = iter(DataLoader(Calls(hanging(held)), num_workers=1))

    def press():
        assert held.wait(PATIENCE_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    pressing.join()
    kill_and_close(iterator)  # The child would wait for the sample.


def test_close_while_the_sampler_draws():
    """close() in another thread while the sampler draws is the error of a closed iterator."""
    draws, may_go = threading.Event(), threading.Event()

    class Slow:
        def __iter__(self):
            for number in range(10):
                if number == 5:
                    draws.set()
                    assert may_go.wait(PATIENCE_SECONDS)
                yield [number]

    loader = DataLoader(Squares(10), batch_sampler=Slow(), num_workers=1)

    def close():
        assert draws.wait(PATIENCE_SECONDS)
        loader.close()
        may_go.set()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        list(loader)
    closing.join()


def test_with_closes_children():
    """Leaving `with` ends the children."""
    with DataLoader(Squares(), num_workers=2) as loader:
        next(iter(loader))
        iterator = iter(loader)
        next(iterator)
        assert children()
    assert children() == []


class Ring(Squares):
    """Refers to the iterator that it is read by."""

    iterator = None


def test_dataset_may_refer_to_its_iterator():
    """An iterator in a reference cycle with its dataset ends its children when it is collected."""
    dataset = Ring(20)
    dataset.iterator = iter(DataLoader(dataset, num_workers=1))
    next(dataset.iterator)
    (child,) = children()
    del dataset
    deadline = time.monotonic() + PATIENCE_SECONDS
    while child.is_alive() and time.monotonic() < deadline:
        gc.collect()  # A batch that is being made refers to the dataset.
        time.sleep(0.05)
    assert not child.is_alive()


def resources():
    maps = Path("/proc/self/maps").read_text().count("memfd:spdl_torch")
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count(), children()  # noqa: PTH208


def drop_loaders(number):
    """Make loaders and drop them: not iterated, iterated a little, and to the end."""
    for turn in range(number):
        loader = DataLoader(Images(), batch_size=2, num_workers=2, num_processes=1 + turn % 2)
        iterator = iter(loader)
        for _ in range(turn % 5):
            next(iterator)
        if turn % 3 == 2:
            list(iterator)
        del iterator, loader


def assert_drops_all(number):
    drop_loaders(3)  # What torch and multiprocessing open for good.
    before = resources()
    gc.disable()
    try:
        drop_loaders(number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while resources() != before and time.monotonic() < deadline:
            time.sleep(0.05)  # Dropping waits for a moment only.
        assert resources() == before
    finally:
        gc.enable()


def test_dropped_loaders_leave_nothing():
    """Dropped loaders leave no process, thread, descriptor or mapping, without the collector."""
    assert_drops_all(6)


def test_dropped_while_a_sample_takes_long():
    """A loader that is dropped while a child is busy leaves nothing once the child is not."""
    drop_loaders(1)
    before = resources()
    held, may_go = FORK.Event(), FORK.Event()
    functions = [lambda: held.set() or int(may_go.wait(PATIENCE_SECONDS))]
    after_events = resources()
    iterator = iter(DataLoader(Calls(int, *functions), num_workers=1))
    next(iterator)
    assert held.wait(PATIENCE_SECONDS)
    del iterator
    assert children()
    may_go.set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while resources() != after_events and time.monotonic() < deadline:
        time.sleep(0.05)
    assert resources() == after_events == before


@pytest.mark.soak
@pytest.mark.skipif("SPDL_TORCH_SOAK" not in os.environ, reason="SPDL_TORCH_SOAK is not set")
@pytest.mark.timeout(300 * SOAK)
def test_many_dropped_loaders_leave_nothing():
    """The same with 200 loaders."""
    assert_drops_all(80 * SOAK)


# -- batches --------------------------------------------------------------------------------------


class Images(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((3, 80, 80), float(index)), f"image {index}"


class Named:
    """A leaf of a batch that is no tensor."""

    def __init__(self, text):
        self.text = text


def collate_by_torch(samples):
    images, texts = torch.utils.data.default_collate(samples)
    return {"images": images, "named": [Named(text) for text in texts], "long": "x" * 300_000}


def test_batches_of_all_kinds_arrive():
    """Tensors, other objects and long texts of a custom collate function arrive."""
    loader = DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=collate_by_torch)
    for number, batch in enumerate(loader):
        indices = range(4 * number, 4 * number + 4)
        assert [int(image.unique()) for image in batch["images"]] == list(indices)
        assert [named.text for named in batch["named"]] == [f"image {index}" for index in indices]
        assert len(batch["long"]) == 300_000


def test_long_draws_arrive():
    """Draws that are longer than a message of the connection arrive."""
    draws = [["y" * 400_000, str(number)] for number in range(20)]

    class Lengths(Squares):
        def __getitem__(self, index):
            return len(index) if len(index) > 5 else int(index)

    loader = DataLoader(Lengths(), batch_sampler=draws, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[400_000, number] for number in range(20)]


@pytest.mark.parametrize("collate", [None, collate_by_torch], ids=["default", "custom"])
def test_no_file_in_shared_memory(collate):
    """Batches take no place under /dev/shm, in whose way they might be."""
    loader = DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=collate)
    for _ in loader:
        pids = {str(process.pid) for process in children()} | {str(os.getpid())}
        files = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]  # noqa: PTH208
        assert not [name for name in files if name.split("_")[1] in pids]
        for pid in pids:
            with contextlib.suppress(OSError):
                assert "/dev/shm/torch_" not in Path(f"/proc/{pid}/maps").read_text()


def address_range(line):
    first, last = line.split()[0].split("-")
    return range(int(first, 16), int(last, 16))


def test_large_batch_is_not_copied():
    """A batch is where the child has made it, and costs the parent far less than a copy."""
    batch_bytes = 38_000_000

    class Large(Squares):
        def __getitem__(self, index):
            return torch.zeros(batch_bytes // 4 // 2)

    iterator = iter(DataLoader(Large(40), batch_size=2, num_workers=1))
    for _ in range(8):
        next(iterator)
    seconds = []
    for _ in range(10):
        time.sleep(0.05)  # A training step.
        began = time.thread_time()
        batch = next(iterator)
        seconds.append(time.thread_time() - began)
        lines = Path("/proc/self/maps").read_text().splitlines()
        ours = [address_range(line) for line in lines if "memfd:spdl_torch" in line]
        assert any(batch.data_ptr() in addresses for addresses in ours)
    # On an idle machine 0.3 ms. A copy takes ten times as long as this.
    assert sorted(seconds)[2] < 0.001


def test_kept_batches_are_copied_at_last():
    """A loop that keeps all batches gets each right, with one warning and few descriptors."""

    class Blocks(Squares):
        def __getitem__(self, index):
            return torch.full((5000,), float(index))

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    loader = DataLoader(Blocks(300), num_workers=1)
    with pytest.warns(UserWarning, match="keeps 256 batches") as caught:
        batches = list(loader)
    assert len(caught) == 1
    assert [int(batch.unique()) for batch in batches] == list(range(300))
    assert len(os.listdir("/proc/self/fd")) - before < 256 + 10  # noqa: PTH208


class QuickToLoad(StagedDataset):
    """Loading is ten times as quick as preprocessing; a sample says which thread has loaded it."""

    def __len__(self):
        return 64 * 12

    def load(self, index):
        threading.Event().wait(0.0001)
        return threading.get_ident()

    def preprocess(self, raw):
        threading.Event().wait(0.002)
        return raw


def test_busy_preprocessing_wakes_few_loaders():
    """Load workers stay asleep while the stage behind them has enough to do."""
    loader = DataLoader(QuickToLoad(), batch_size=64, num_workers=1, num_processes=1)
    num_threads = [len(set(batch.tolist())) for batch in loader]
    assert sorted(num_threads)[len(num_threads) // 2] <= 3, num_threads
