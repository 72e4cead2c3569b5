"""Batches arrive on a CUDA device with the right values, in any order, and the host never waits.

`torch.cuda._sleep` makes a stream late: a kernel that does nothing for so many cycles. It forces an
order on the device as an `Event` does among threads, so long as the host has queued the rest before
the kernel is over. So every loop runs once before it counts: what CUDA does for the first time,
such as loading a kernel or pinning memory, may wait for all that runs on the device.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from typing import NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data._utils.collate import default_collate_fn_map

from spdl_torch import DataLoader, transfer

from .datasets import Squares
from .test_parity import assert_same

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
with_and_without_workers = pytest.mark.parametrize("num_workers", [0, 2])

NUM_VALUES = 1 << 18
NUM_SAMPLES = 32
BATCH_SIZE = 2
NUM_SAMPLES_AHEAD = 4 * BATCH_SIZE
"""As much as a loop can have while the device is still at its first step; more is not copied."""
FIRST_NUMBERS = itertools.count(1, NUM_SAMPLES)

LONG_MS = 500
"""Longer than the host takes to queue what a test queues."""
SHORT_MS = 20
"""Longer than a copy takes."""
MIB = 1 << 20


class Filled(Squares):
    """Tensors with one number in every place."""

    def __init__(self, size=NUM_SAMPLES):
        super().__init__(size)
        self.first = 0

    def renumber(self):
        """Have numbers that no tensor has had, and give the sums of all batches of them.

        Otherwise what memory still holds of another epoch could pass for what was to be copied.
        """
        self.first = next(FIRST_NUMBERS)
        numbers = range(self.first, self.first + self.size)
        return [
            NUM_VALUES * sum(numbers[start : start + BATCH_SIZE])
            for start in range(0, self.size, BATCH_SIZE)
        ]

    def __getitem__(self, index):
        return {"values": torch.full((NUM_VALUES,), self.first + index, dtype=torch.int32)}


class Late(Filled):
    """The same, but each batch is copied so many cycles late."""

    def __init__(self, cycles_of_samples):
        super().__init__(len(cycles_of_samples))
        self.cycles_of_samples = cycles_of_samples

    def __getitem__(self, index):
        # Before the values: a batch is copied in the order it has.
        return {"delay": Delay(self.cycles_of_samples[index]), **super().__getitem__(index)}


class Delay:
    """Holds up the stream of the copies, when it is copied itself."""

    def __init__(self, cycles):
        self.cycles = cycles

    def to(self, device, non_blocking=False):
        torch.cuda._sleep(self.cycles)
        return self


class Marked(Filled):
    """The same, but each batch says when its copies are done."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "mark": Mark()}


class Mark:
    def to(self, device, non_blocking=False):
        self.copied = torch.cuda.Event()
        self.copied.record()
        return self


@pytest.fixture(autouse=True)
def _collated_by_the_first(monkeypatch):
    # In torch's map, so that the tensors beside them are collated by the loader, in its memory.
    for kind in (Delay, Mark):
        monkeypatch.setitem(default_collate_fn_map, kind, lambda samples, **_: samples[0])


@pytest.fixture(scope="module", autouse=True)
def _warmed_up():
    """Pinned memory for every batch of an epoch is in torch's cache, and the kernel is loaded."""
    num_bytes = BATCH_SIZE * NUM_VALUES * torch.int32.itemsize
    pinned = [
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_SAMPLES)
    ]
    pinned[0].view(torch.int32).to("cuda").sum().item()


@pytest.fixture(scope="module")
def cycles():
    """A function from milliseconds to cycles, for `torch.cuda._sleep`."""
    num_cycles = 10_000_000

    def sleep():
        torch.cuda._sleep(num_cycles)

    sleep()
    cycles_per_ms = num_cycles / statistics.median(elapsed_ms(sleep) for _ in range(5))
    return lambda milliseconds: int(milliseconds * cycles_per_ms)


def elapsed_ms(queue):
    """How long the current stream is at work, from when `queue` is called until all is done."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began.record()
    queue()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


def is_busy():
    """Whether the current stream has something left to do."""
    return not torch.cuda.current_stream().query()


def queued_sums(batches, late_cycles=0):
    """The sums of batches, by a loop that is late on the device and never waits on the host."""
    sums = []
    for batch in batches:
        torch.cuda._sleep(late_cycles)
        sums.append(batch["values"].sum())
        # At once, while the kernels that read it are still queued.
        del batch
    return sums


def assert_sums_are_right(loader, late_cycles=0):
    for _ in range(2):
        expected = loader.dataset.renumber()
        sums = queued_sums(loader, late_cycles)
        torch.cuda.synchronize()
        assert [batch_sum.item() for batch_sum in sums] == expected


# -- the values -----------------------------------------------------------------------------------


class Labelled(NamedTuple):
    label: int
    weights: list


class Nested(Squares):
    def __getitem__(self, index):
        image = torch.full((3, 4, 5), index, dtype=torch.uint8)
        return {"image": image, "name": str(index), "more": (Labelled(index, [index / 2, image]),)}


@with_and_without_workers
def test_structures_arrive_on_the_device(num_workers):
    """A batch of any structure has the right values on the device."""
    expected = list(DataLoader(Nested(), batch_size=4))
    loader = DataLoader(Nested(), batch_size=4, num_workers=num_workers, device="cuda")
    batches = list(loader)
    tensors = [leaf for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor)]
    assert {tensor.device for tensor in tensors} == {
        torch.device("cuda", torch.cuda.current_device())
    }
    assert_same(tree_map_only(torch.Tensor, torch.Tensor.cpu, batches), expected)


@with_and_without_workers
def test_late_loop_reads_its_own_memory(num_workers, cycles):
    """A later copy does not overwrite what a late kernel of the loop has yet to read."""
    loader = DataLoader(Filled(), BATCH_SIZE, num_workers=num_workers, device="cuda")
    assert_sums_are_right(loader, late_cycles=cycles(SHORT_MS))


@with_and_without_workers
def test_kernels_wait_for_a_late_copy(num_workers, cycles):
    """A kernel of the loop does not read a tensor before its copy is done."""
    dataset = Late([cycles(SHORT_MS)] * NUM_SAMPLES)
    loader = DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, device="cuda")
    assert_sums_are_right(loader)


@with_and_without_workers
def test_pinned_memory_waits_for_its_copy(num_workers, cycles):
    """Pinned memory is not collated into again before the copy out of it is done."""
    # All copies come after one delay, so that no buffer may be used twice before it is over.
    dataset = Late([cycles(LONG_MS), *[0] * (NUM_SAMPLES - 1)])
    loader = DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, device="cuda")
    assert_sums_are_right(loader)


@pytest.mark.children
@pytest.mark.parametrize("num_workers", [1, 2])
def test_segments_wait_for_their_copies(num_workers, cycles):
    """A child does not collate into a segment again before the copies out of it are done."""
    for late in (LONG_MS, SHORT_MS):
        dataset = Late([cycles(late), *[0] * (NUM_SAMPLES - 1)])
        loader = DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, device="cuda")
        assert_sums_are_right(loader)


class Seen:
    """Says where its tensor was when it was copied."""

    def __init__(self, samples):
        self.values = torch.stack([sample["values"] for sample in samples])

    def to(self, device, non_blocking=False):
        self.was_pinned = self.values.is_pinned()
        self.address = self.values.data_ptr()
        self.values = self.values.to(device, non_blocking=non_blocking)
        return self


@pytest.mark.children
def test_segments_are_pinned_memory():
    """A batch of a child process is pinned where it was collated: few addresses come again."""
    loader = DataLoader(Filled(128), BATCH_SIZE, num_workers=2, device="cuda", collate_fn=Seen)
    batches = list(loader)
    assert all(batch.was_pinned for batch in batches)
    assert len({batch.address for batch in batches}) < len(batches) // 2
    sums = [batch.values.sum().item() for batch in batches]
    assert sums == [NUM_VALUES * (2 * n + 1) for n in range(0, 128, BATCH_SIZE)]


@pytest.mark.children
def test_children_pin_without_device():
    """With pin_memory=True the batches of child processes are in memory of torch's allocator."""
    dataset = Filled()
    expected = dataset.renumber()
    loader = DataLoader(dataset, BATCH_SIZE, num_workers=2, pin_memory=True)
    sums = []
    for batch in loader:
        assert batch["values"].is_pinned()
        sums.append(batch["values"].to("cuda", non_blocking=True).sum())
        del batch
    assert [batch_sum.item() for batch_sum in sums] == expected


@with_and_without_workers
def test_late_loop_on_its_own_stream(num_workers, cycles):
    """A loop that computes on its own stream may be late."""
    loader = DataLoader(Filled(), BATCH_SIZE, num_workers=num_workers, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_sums_are_right(loader, late_cycles=cycles(SHORT_MS))


@with_and_without_workers
def test_own_stream_waits_for_late_copy(num_workers, cycles):
    """A loop that computes on its own stream waits for a late copy."""
    dataset = Late([cycles(SHORT_MS)] * NUM_SAMPLES)
    loader = DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_sums_are_right(loader)


# -- the host does not wait -----------------------------------------------------------------------


@with_and_without_workers
def test_copies_run_beside_kernels(num_workers, cycles):
    """Copies are done while a kernel of the loop still runs."""
    loader = DataLoader(
        Marked(NUM_SAMPLES_AHEAD), BATCH_SIZE, num_workers=num_workers, device="cuda"
    )

    def is_busy_after_copies():
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles(LONG_MS))
        for batch in loader:
            batch["mark"].copied.synchronize()
        return is_busy()

    is_busy_after_copies()
    assert is_busy_after_copies()


@with_and_without_workers
def test_host_does_not_wait_for_kernels(num_workers, cycles):
    """The loop queues its steps while the device is still at the first one."""
    loader = DataLoader(
        Filled(NUM_SAMPLES_AHEAD), BATCH_SIZE, num_workers=num_workers, device="cuda"
    )

    def is_busy_after_queueing():
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles(LONG_MS))
        queued_sums(loader)
        return is_busy()

    is_busy_after_queueing()
    assert is_busy_after_queueing()


@with_and_without_workers
def test_host_does_not_wait_for_copies(num_workers, cycles):
    """The loop queues its steps while a copy is still running."""
    dataset = Late([cycles(LONG_MS), *[0] * (NUM_SAMPLES_AHEAD - 1)])
    loader = DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, device="cuda")

    def is_busy_after_queueing():
        torch.cuda.synchronize()
        queued_sums(loader)
        return is_busy()

    is_busy_after_queueing()
    assert is_busy_after_queueing()


def test_copies_and_kernels_overlap(cycles):
    """An epoch takes less time than its copies and its kernels one after the other."""
    # Always the same tensor, which is pinned: loading takes no time, and copying does.
    values = torch.zeros(64 * MIB, dtype=torch.uint8).pin_memory()
    dataset = [values] * 8
    # Persistent: starting threads is no part of an epoch.
    loader = DataLoader(
        dataset, batch_size=None, num_workers=1, persistent_workers=True, device="cuda"
    )

    def copy():
        for _ in range(len(dataset)):
            values.to("cuda", non_blocking=True)

    copy()
    copies_ms = elapsed_ms(copy)
    # As long as a copy: then the two side by side take half as long as one after the other.
    num_cycles = cycles(copies_ms / len(dataset))

    def compute(batches):
        for _ in batches:
            torch.cuda._sleep(num_cycles)

    kernels_ms = elapsed_ms(lambda: compute(range(len(dataset))))
    compute(loader)
    assert elapsed_ms(lambda: compute(loader)) < 0.75 * (copies_ms + kernels_ms)


# -- two devices ----------------------------------------------------------------------------------


@needs_two_devices
@with_and_without_workers
def test_two_loops_on_two_devices(num_workers, cycles):
    """Two loaders side by side deliver to two devices."""
    dataset = Late([cycles(SHORT_MS)] * NUM_SAMPLES)
    expected = dataset.renumber()
    first, second = (
        DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, device=device)
        for device in ("cuda:0", "cuda:1")
    )
    with torch.cuda.device(0):
        sums = [
            (one["values"].sum(), other["values"].sum())
            for one, other in zip(first, second, strict=True)
        ]
        assert torch.cuda.current_device() == 0
    assert {(one.device.index, other.device.index) for one, other in sums} == {(0, 1)}
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert [one.item() for one, _ in sums] == expected
    assert [other.item() for _, other in sums] == expected


@needs_two_devices
@with_and_without_workers
def test_device_without_index_is_current(num_workers):
    """A device without an index is the current one where the loader is made."""
    with torch.cuda.device(1):
        loader = DataLoader(Filled(4), num_workers=num_workers, device="cuda")
    with torch.cuda.device(0):
        devices = [batch["values"].device for batch in loader]
        assert torch.cuda.current_device() == 0
    assert devices == [torch.device("cuda:1")] * 4


# -- errors ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_most_so_many_more_bytes(num_bytes):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, num_bytes_of_device = torch.cuda.mem_get_info()
    fraction = (torch.cuda.memory_reserved() + num_bytes) / num_bytes_of_device
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@with_and_without_workers
def test_out_of_memory_at_its_batch(num_workers):
    """When device memory runs out, torch's error is raised at its batch."""
    samples = [torch.ones(size, dtype=torch.uint8) for size in (MIB, 256 * MIB, MIB)]
    loader = DataLoader(samples, num_workers=num_workers, device="cuda")
    with at_most_so_many_more_bytes(64 * MIB):
        iterator = iter(loader)
        assert next(iterator).sum().item() == MIB
        with pytest.raises(torch.OutOfMemoryError):
            next(iterator)
        assert [batch.sum().item() for batch in iterator] == [MIB]
    assert [batch.sum().item() for batch in loader] == [MIB, 256 * MIB, MIB]


# -- one batch, without a loader ------------------------------------------------------------------


def test_transfer_runs_beside_queued_kernels(cycles):
    """transfer() copies a batch while kernels are still queued."""
    host = {"name": "first", "values": torch.arange(NUM_VALUES).pin_memory()}
    transfer(host, "cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles(LONG_MS))
    batch = transfer({**host, "mark": Mark()}, "cuda")
    batch["mark"].copied.synchronize()
    assert is_busy()
    assert batch["name"] == "first"
    assert batch["values"].is_cuda
    assert torch.equal(batch["values"].cpu(), host["values"])


def test_transfer_returns_batch_on_the_device():
    """transfer() returns a batch that is on the device already."""
    batch = [torch.ones(3, device="cuda"), 7]
    assert transfer(batch, "cuda") is batch
