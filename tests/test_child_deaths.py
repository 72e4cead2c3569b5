"""Child processes that die, and parents that die: nothing is lost, doubled or left behind."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from multiprocessing.connection import wait

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from spdl_torch import DataLoader, ReplaceBadSamples, StagedDataset

from .datasets import PATIENCE_SECONDS
from .tiers import sampled

pytestmark = pytest.mark.children

FORK = multiprocessing.get_context("fork")
SOAK = int(os.environ.get("SPDL_TORCH_SOAK", "0")) or 1


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def children():
    return [p for p in multiprocessing.active_children() if p.name.startswith("spdl_torch")]


def kill_children():
    """Kill all children, and wait until they have ended."""
    killed = children()
    for process in killed:
        process.kill()
    for process in killed:
        assert wait([process.sentinel], PATIENCE_SECONDS)
    return len(killed)


def once():
    """Return a function that returns True once, in whichever process."""
    left = FORK.Value("i", 1)

    def take():
        with left.get_lock():
            is_first, left.value = bool(left.value), 0
        return is_first

    return take


class Deadly(Dataset):
    """Its samples are indices; some do something first."""

    def __init__(self, size=24, acts=None):
        self.size = size
        self.acts = acts or {}

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.acts.get(index, int)()
        return index


def flat(batches):
    return [index for batch in batches for index in batch.tolist()]


class AsStaged(StagedDataset):
    def __init__(self, dataset, hook):
        self.dataset, self.hook = dataset, hook

    def __len__(self):
        return len(self.dataset)

    def load(self, index):
        return self.dataset[index] if self.hook == "load" else index

    def preprocess(self, raw):
        return self.dataset[raw] if self.hook == "preprocess" else raw


class InBulk(Deadly):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


KINDS = {
    "plain": lambda dataset: dataset,
    "load": lambda dataset: AsStaged(dataset, "load"),
    "preprocess": lambda dataset: AsStaged(dataset, "preprocess"),
    "bulk": lambda dataset: InBulk(dataset.size, dataset.acts),
}


# -- one death ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sampled(itertools.product([1, 2], ["load", *KINDS]), every=3))
def test_lost_batches_are_made_again(case):
    """If a child is killed in a sample, every sample is delivered once and in order."""
    num_processes, kind = case
    is_first = once()
    dataset = KINDS[kind](Deadly(acts={9: lambda: is_first() and die()}))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, num_processes=num_processes)
    assert flat(loader) == list(range(24))


def test_unordered_batches_survive_deaths():
    """With in_order=False too, every sample is delivered once."""
    is_first = once()
    dataset = Deadly(acts={9: lambda: is_first() and die()})
    loader = DataLoader(dataset, batch_size=4, num_workers=2, in_order=False)
    assert sorted(flat(loader)) == list(range(24))


def test_two_children_die_at_once():
    """Two children that die at the same moment are both replaced."""
    meet = FORK.Barrier(2)
    acts = {0: once(), 1: once()}

    def dies_first(index):
        if acts[index]():
            meet.wait(PATIENCE_SECONDS)
            die()

    dataset = Deadly(acts={0: lambda: dies_first(0), 1: lambda: dies_first(1)})
    assert flat(DataLoader(dataset, num_workers=2, num_processes=2)) == list(range(24))


def test_death_during_a_long_step():
    """A child that dies while the training loop computes is replaced when a batch is asked for."""
    loader = DataLoader(Deadly(), num_workers=2, num_processes=2)
    iterator = iter(loader)
    found = flat([next(iterator)])
    assert kill_children() == 2
    assert found + flat(iterator) == list(range(24))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_death_between_epochs(num_processes):
    """A persistent worker process that dies between two epochs is replaced in the next one."""
    loader = DataLoader(
        Deadly(), num_workers=2, num_processes=num_processes, persistent_workers=True
    )
    for _ in range(3):
        assert flat(loader) == list(range(24))
        assert kill_children() == num_processes
    loader.close()


def test_death_after_a_break():
    """A child that dies in an epoch that was broken off does not harm the next one."""
    held, may_go, is_first = FORK.Event(), FORK.Event(), once()

    def wait_and_die():
        if is_first():
            held.set()
            assert may_go.wait(PATIENCE_SECONDS)
            die()

    loader = DataLoader(
        Deadly(acts={1: wait_and_die}), num_workers=1, num_processes=1, persistent_workers=True
    )
    next(iter(loader))
    assert held.wait(PATIENCE_SECONDS)
    iterator = iter(loader)
    may_go.set()
    assert flat(iterator) == list(range(24))
    loader.close()


def test_kept_batches_outlive_their_child():
    """A batch stays as it is after the child that made it has died."""

    class Large(Deadly):
        def __getitem__(self, index):
            return torch.full((10_000,), float(super().__getitem__(index)))

    is_first = once()
    dataset = Large(acts={9: lambda: is_first() and die()})
    batches = list(DataLoader(dataset, num_workers=1))
    assert [batch.unique().tolist() for batch in batches] == [[float(n)] for n in range(24)]


# -- what kills again -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "words"),
    [(die, "is killed by signal: Killed"), (lambda: os._exit(3), "unexpectedly with exit code 3")],
)
@pytest.mark.parametrize("kind", sampled(["load", "plain"], every=2))
def test_deadly_sample_is_named(kind, end, words):
    """A sample that ends its process twice is an error that names it; the epoch goes on."""
    dataset = KINDS[kind](Deadly(acts={9: end}))
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=2, num_processes=1))
    assert flat([next(iterator), next(iterator)]) == list(range(8))
    with pytest.raises(RuntimeError, match="sample index 9 has ended a worker process twice") as e:
        next(iterator)
    assert words in str(e.value)
    assert flat(iterator) == list(range(12, 24))


def test_deadly_collate_is_named():
    """A batch whose collate function ends its process twice is an error that names the batch."""

    def collate(samples):
        if 9 in samples:
            die()
        return torch.tensor(samples)

    loader = DataLoader(Deadly(), batch_size=4, num_workers=2, num_processes=1, collate_fn=collate)
    iterator = iter(loader)
    assert flat([next(iterator), next(iterator)]) == list(range(8))
    with pytest.raises(RuntimeError, match="batch 2 has ended a worker process twice"):
        next(iterator)
    assert flat(iterator) == list(range(12, 24))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_deadly_samples_are_replaced(num_processes):
    """With ReplaceBadSamples, samples that kill their process are replaced and recorded."""
    dataset = Deadly(acts={9: die, 17: die})
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        num_processes=num_processes,
        on_error=ReplaceBadSamples(max_fraction=None),
    )
    expected = [10 if n == 9 else 18 if n == 17 else n for n in range(24)]
    assert flat(loader) == expected
    assert sorted(bad.index for bad in loader.bad_samples) == [9, 17]


def test_death_before_the_suspect_counts_not():
    """A suspect batch is not blamed for a child that died before it began with that batch."""
    num_starts, is_first = FORK.Value("i", 0), once()

    def second_start_dies(_):
        with num_starts.get_lock():
            num_starts.value += 1
        if num_starts.value == 2:
            die()

    loader = DataLoader(
        Deadly(acts={9: lambda: is_first() and die()}),
        num_workers=1,
        worker_init_fn=second_start_dies,
    )
    assert flat(loader) == list(range(24))
    assert num_starts.value == 3


def test_restarts_are_limited():
    """Children that die again and again without a sample to blame end the epoch in an error."""
    is_first_start, is_first = once(), once()
    loader = DataLoader(
        Deadly(acts={9: lambda: is_first() and die()}),
        num_workers=1,
        worker_init_fn=lambda _: None if is_first_start() else os._exit(4),
    )
    with pytest.raises(RuntimeError, match=r"exit code 4. It was the 6th"):
        list(loader)


def test_exit_in_a_sample_is_raised():
    """`sys.exit` in a sample is an exception of that sample, and its process lives on."""
    iterator = iter(DataLoader(Deadly(acts={1: lambda: sys.exit(5)}), num_workers=1))
    found = [next(iterator)]
    with pytest.raises(SystemExit):
        next(iterator)
    assert flat([*found, *iterator]) == [0, *range(2, 24)]


# -- deaths at the beginning and at the end -------------------------------------------------------


@pytest.mark.parametrize("num_processes", [1, 2])
def test_death_while_set_up(num_processes):
    """A child that dies in worker_init_fn is an error that says so."""
    loader = DataLoader(
        Deadly(),
        num_workers=2,
        num_processes=num_processes,
        worker_init_fn=lambda worker_id: os._exit(7) if worker_id == 0 else None,
    )
    with pytest.raises(RuntimeError, match="exit code 7, while it was set up"):
        next(iter(loader))
    assert children() == []


def test_error_in_a_restarted_child():
    """What worker_init_fn raises in a child that replaces another ends the epoch."""
    is_first_start = once()

    def fails_later(_):
        if not is_first_start():
            raise LookupError("no licence left")

    loader = DataLoader(Deadly(acts={9: die}), num_workers=1, worker_init_fn=fails_later)
    with pytest.raises(RuntimeError, match="could not be started again") as raised:
        list(loader)
    assert isinstance(raised.value.__cause__, LookupError)


def test_death_while_closing():
    """A child that is killed while its loader is being closed is no error."""
    held = FORK.Event()

    def hang():
        held.set()
        time.sleep(1000)

    loader = DataLoader(Deadly(acts={2: hang}), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    assert held.wait(PATIENCE_SECONDS)
    closing = threading.Thread(target=loader.close)
    closing.start()
    kill_children()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()
    assert children() == []


# -- iterable datasets ----------------------------------------------------------------------------


class Counting(IterableDataset):
    """Counts in strides, with a state or without, and dies once."""

    def __init__(self, size=24, die_at=None, state_bytes=None):
        self.size, self.die_at, self.state_bytes = size, die_at, state_bytes
        self.is_first = once()
        if state_bytes is not None:
            self.state_dict = self._state_dict
            self.load_state_dict = self._load_state_dict
        self.next = None

    def __iter__(self):
        info = get_worker_info()
        if self.next is None:
            self.next = info.id
        while self.next < self.size:
            value = self.next
            self.next += info.num_workers
            if value == self.die_at and self.is_first():
                die()
            yield value
        self.next = None

    def _state_dict(self):
        return {"next": self.next, "ballast": os.urandom(self.state_bytes)}

    def _load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.parametrize(
    "case",
    sampled(
        [
            (state_bytes, num_workers, num_processes)
            for num_workers, num_processes in [(1, 1), (2, 2), (3, 2), (3, 1)]
            for state_bytes in [None, 10, 300_000]
        ],
        every=4,
    ),
)
def test_iterable_resumes_after_death(case):
    """A new child resumes an iterable dataset behind the last batch that has arrived."""
    state_bytes, num_workers, num_processes = case

    def batches(die_at):
        dataset = Counting(die_at=die_at, state_bytes=state_bytes)
        loader = DataLoader(
            dataset, batch_size=2, num_workers=num_workers, num_processes=num_processes
        )
        return [batch.tolist() for batch in loader]

    assert batches(die_at=13) == batches(die_at=None)


def test_iterable_that_kills_again():
    """An iterable dataset that ends its process twice at the same place is an error."""

    class Deadly(IterableDataset):
        def __iter__(self):
            yield from range(3)
            die()

    with pytest.raises(RuntimeError, match="for the second time in batch 3 of worker 0"):
        list(DataLoader(Deadly(), num_workers=1))


def test_each_epoch_may_lose_a_child():
    """A death in the first batch of two epochs is not a death twice in the same batch."""

    class Endless(IterableDataset):
        def __init__(self):
            self.may_die = [once(), once()]
            self.num_epochs = FORK.Value("i", 0)

        def __iter__(self):
            if self.may_die[self.num_epochs.value]():
                die()
            yield from range(5)

    dataset = Endless()
    loader = DataLoader(dataset, num_workers=1, persistent_workers=True)
    assert flat(loader) == list(range(5))
    dataset.num_epochs.value = 1
    assert flat(loader) == list(range(5))
    loader.close()


def test_iterable_death_between_epochs():
    """A persistent child of an iterable dataset that dies while it is idle is replaced."""
    loader = DataLoader(Counting(), num_workers=2, num_processes=2, persistent_workers=True)
    for _ in range(2):
        assert flat(loader) == list(range(24))
        assert kill_children() == 2
    loader.close()


# -- parents --------------------------------------------------------------------------------------


def train(send):
    """Run a loader whose samples hang, and send the process ids of its children."""

    def hang():
        time.sleep(1000)

    iterator = iter(DataLoader(Deadly(acts={2: hang}), num_workers=2, num_processes=2))
    next(iterator)
    send.send([process.pid for process in children()])
    time.sleep(1000)


def train_in_child(send):
    process = FORK.Process(target=train, args=[send])
    process.start()
    send.send(process.pid)
    process.join()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("is_nested", [False, True])
def test_killed_parent_leaves_no_child(is_nested):
    """Children end within two seconds of their parent's death, also if samples hang."""
    receive, send = FORK.Pipe()
    program = FORK.Process(target=train_in_child if is_nested else train, args=[send])
    program.start()
    parent = receive.recv() if is_nested else program.pid
    pids = receive.recv()
    assert len(pids) == 2
    assert all(map(is_running, pids))
    os.kill(parent, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))
    program.join(PATIENCE_SECONDS)
    receive.close()
    send.close()


def test_training_signals_stay_in_training():
    """A SIGTERM handler of the training does not run in children, nor does Ctrl-C end them."""
    called = FORK.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: called.set())
    try:
        iterator = iter(DataLoader(Deadly(), num_workers=1))
        next(iterator)
        (child,) = children()
        os.kill(child.pid, signal.SIGINT)
        next(iterator)
        assert children() == [child]
        child.terminate()
        child.join(PATIENCE_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert child.exitcode == -signal.SIGTERM
    assert not called.is_set()
    assert len(list(iterator)) == 22


# -- soak -----------------------------------------------------------------------------------------


class Jittery(Deadly):
    def __getitem__(self, index):
        time.sleep(0.002 * random.random())
        return super().__getitem__(index)


@pytest.mark.soak
@pytest.mark.timeout(1000 * SOAK)
@pytest.mark.skipif("SPDL_TORCH_SOAK" not in os.environ, reason="SPDL_TORCH_SOAK is not set")
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_survive_random_deaths(persistent):
    """In many epochs with a child killed at a random moment, every sample comes once."""
    dice = random.Random(0)
    loader = DataLoader(
        Jittery(200),
        batch_size=4,
        num_workers=4,
        num_processes=2,
        persistent_workers=persistent,
        timeout=20,
    )
    for _ in range(30 * SOAK):
        began = time.monotonic()
        kill_after = dice.random() * 0.4

        def kill_one(seconds):
            time.sleep(seconds)
            if alive := children():
                dice.choice(alive).kill()

        killer = threading.Thread(target=kill_one, args=[kill_after])
        killer.start()
        try:
            found = flat(loader)
        except RuntimeError as error:  # A child that was killed before it was set up.
            assert "while it was set up" in str(error)  # noqa: PT017
        else:
            assert found == list(range(200))
        killer.join()
        assert time.monotonic() - began < 10
    loader.close()
    gc.collect()
    assert children() == []
