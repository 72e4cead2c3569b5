"""Batches go to a device from the memory that they were collated in by child processes.

The device is simulated (`tests/simulated.py`). Each of these changes makes a test here fail:

In `Transfer`:
 1. `send` does not keep the segment until the copies have read it
 2. `send` keeps the CPU batch instead of the segment, and objects forget what they have moved
 3. the segment is kept only if nothing raises
 4. segments are released without asking whether they have been copied
 5. segments are never released
 6. what is kept ends with the loader, or a forked process looks at it
 7. what is not pinned is not pinned before it is sent
 8. a failed registration is tried again, with a warning for each batch
 9. a failed registration leaves the error to the next kernel
10. memory is unregistered on whichever device is current

In `SegmentReader` and `_children`:
11. segments are not registered
12. segments are registered for every batch
13. segments are not unregistered, or are in a forked process
14. parts of a batch that stay on the CPU are delivered in registered memory
15. segments stay registered after that
16. `pin_memory=True` pins nothing, or pins segments
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

from spdl_torch import DataLoader
from spdl_torch._device import Transfer

from .conftest import own_thread_names
from .simulated import TYPE, Registration, Simulator, copies_first, copies_last, everything_last
from .test_transfer_protocol import (
    NUM_BATCHES,
    SCHEDULES,
    Pictures,
    expected,
    read_all,
)

pytestmark = [
    pytest.mark.children,
    pytest.mark.skipif(sys.platform != "linux", reason="segments need memfd_create"),
]

NUM_VALUES = 1 << 14
"""So that a batch of pictures is in a segment, and its labels are not."""


@pytest.fixture(params=SCHEDULES, ids=lambda schedule: schedule.__name__)
def simulator(request, monkeypatch):
    simulator = Simulator(request.param)
    simulator.install(monkeypatch)
    return simulator


@pytest.fixture
def simulator_that(monkeypatch):
    """Return a function that installs a simulator with one schedule."""

    def simulated(schedule, num_devices=1):
        simulator = Simulator(schedule, num_devices)
        simulator.install(monkeypatch)
        return simulator

    return simulated


def pictures(num_batches=NUM_BATCHES):
    return Pictures(2 * num_batches, NUM_VALUES)


def loader_of(dataset, **settings):
    settings = {"batch_size": 2, "num_workers": 2, "device": TYPE} | settings
    return DataLoader(dataset, **settings)


def about_copies(simulator):
    return [call.about for call in simulator.calls if call.what == "copy"]


def calls(simulator, what):
    return [call for call in simulator.calls if call.what == what]


# -- the values are right -------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 3])
def test_segments_wait_for_copies(simulator, num_workers):
    """A child does not write to a segment before the copies have read it."""
    loader = loader_of(pictures(), num_workers=num_workers)
    assert loader.plan.num_processes == num_workers
    assert read_all(simulator, loader) == expected()


def test_segments_wait_in_one_child(simulator):
    """Also with threads that share a child process."""
    assert read_all(simulator, loader_of(pictures(), num_processes=1)) == expected()


def test_segments_wait_between_epochs(simulator):
    """Epochs that are left early do not disturb the next one of the same children."""
    loader = loader_of(pictures(), persistent_workers=True)
    for num_taken in (1, 5, 3):
        iterator = iter(loader)
        batches = (next(iterator) for _ in range(num_taken))
        assert read_all(simulator, batches) == expected(num_batches=num_taken)
    assert read_all(simulator, loader) == expected()
    loader.close()


class Moving:
    """Moves its tensors and forgets where they were."""

    def __init__(self, samples):
        images, labels = zip(*samples, strict=True)
        self.images, self.labels = torch.stack(images), torch.tensor(labels)

    def to(self, device, non_blocking=False):
        self.images = self.images.to(device, non_blocking=non_blocking)
        self.labels = self.labels.to(device, non_blocking=non_blocking)
        return self

    def __iter__(self):
        return iter((self.images, self.labels))


class MovingPinned(Moving):
    def pin_memory(self):
        self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()
        return self


def test_objects_that_move_themselves(simulator):
    """A segment is kept for the copies of an object that forgets the tensors that it has moved."""
    loader = loader_of(pictures(), collate_fn=Moving)
    assert read_all(simulator, loader) == expected()


def test_copies_outlive_their_loader(simulator_that):
    """A batch is right if the loader is gone before the device has copied it."""
    simulator = simulator_that(everything_last)
    readings = []
    for _ in range(2):
        iterator = iter(loader_of(pictures()))
        values, labels = next(iterator)
        iterator.close()
        del iterator
        readings.append((simulator.read(values), simulator.read(labels)))
    del values, labels
    simulator.finish()
    for values, labels in readings:
        assert values.value[:, -1].tolist() == labels.value.tolist() == [0, 1]


class Refusing(Moving):
    """Moves its tensors, and then raises if the batch begins with sample 4."""

    def to(self, device, non_blocking=False):
        is_bad = self.labels[0] == 4
        super().to(device, non_blocking)
        if is_bad:
            raise LookupError("will not go there")
        return self


def test_failing_objects_keep_their_segment(simulator):
    """An error is raised at its batch, and copies that were started read what they should."""
    iterator = iter(loader_of(pictures(), collate_fn=Refusing))
    batches = [next(iterator) for _ in range(2)]
    with pytest.raises(LookupError, match="will not go there"):
        next(iterator)
    assert read_all(simulator, [*batches, *iterator]) == expected(num_batches=2) + expected(3)


def test_started_copies_keep_segments(simulator_that):
    """A segment is kept for the copies that were started before an error."""
    simulator = simulator_that(everything_last)
    iterator = iter(loader_of(pictures(4), collate_fn=Refusing))
    batches = [next(iterator) for _ in range(2)]
    with pytest.raises(LookupError):
        next(iterator)
    iterator.close()
    del batches, iterator
    assert not calls(simulator, "unregister")
    simulator.finish()


def test_host_never_waits_for_segments(simulator):
    """Only the transfer thread waits for the device."""
    read_all(simulator, loader_of(pictures()))
    waiting = {call.thread for call in calls(simulator, "host waits")}
    assert waiting <= {"spdl_torch-transfer-0"}


def test_forks_leave_device_alone(simulator_that):
    """A forked process that closes a loader asks nothing of the device, not to unregister."""
    simulator = simulator_that(everything_last)
    iterator = iter(loader_of(pictures()))
    batch = next(iterator)
    pid = os.fork()
    if pid == 0:
        try:
            num_calls = len(simulator.calls)
            iterator.close()
            del iterator, batch
            gc.collect()
            os._exit(len(simulator.calls) != num_calls)
        finally:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    iterator.close()


# -- registered memory ----------------------------------------------------------------------------


def test_segments_are_registered_once(simulator_that):
    """Each segment is registered when its first batch is sent, and never again."""
    simulator = simulator_that(copies_first)
    assert len(read_all(simulator, loader_of(pictures(100)))) == 100
    assert 0 < simulator.num_registered <= 12
    assert len(calls(simulator, "register")) == simulator.num_registered
    assert {call.thread for call in calls(simulator, "register")} == {"spdl_torch-transfer-0"}


def test_segments_are_unregistered(simulator_that):
    """No memory is registered any more when the loader and its batches are gone."""
    simulator = simulator_that(copies_first)
    read_all(simulator, loader_of(pictures()))
    assert len(calls(simulator, "unregister")) == simulator.num_registered > 0
    assert simulator.registrations == []


def test_copies_read_the_segments(simulator_that):
    """Pictures are copied from the segment they were collated in, and labels from pinned memory."""
    simulator = simulator_that(copies_first)
    read_all(simulator, loader_of(pictures()))
    sources = about_copies(simulator)
    assert [type(source) for source in sources[::2]] == [Registration] * NUM_BATCHES
    assert all(source is not None for source in sources)
    assert max(block.memory.size for block in simulator._pinned_blocks.values()) < NUM_VALUES


def test_lagging_device_needs_few_segments(simulator):
    """The loop may be far ahead of the device: the number of segments is bounded."""
    assert len(read_all(simulator, loader_of(pictures(100)))) == 100
    # Those in the window, those sent, and those that the loop has queued.
    assert simulator.num_registered <= 24


def test_unregistering_uses_the_device(simulator_that):
    """A segment is unregistered on its device, whatever is current in the thread that drops it."""
    simulator = simulator_that(copies_first, num_devices=3)
    read_all(simulator, loader_of(pictures(4), device=f"{TYPE}:2"))
    for what in ("register", "unregister"):
        assert {call.current_device for call in calls(simulator, what)} == {2}
    assert simulator.current_device() == 0


def test_forks_unregister_nothing(simulator_that):
    """Memory is unregistered by the process that has registered it, and by no fork of that."""
    simulator = simulator_that(copies_first)
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    unregister = Transfer(torch.device(TYPE, 0)).register(memory.ctypes.data, memory.size)
    pid = os.fork()
    if pid == 0:
        try:
            unregister()
            os._exit(len(simulator.registrations) != 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    unregister()
    assert simulator.registrations == []


class Launching(MovingPinned):
    """Launches a kernel when it is moved."""

    def to(self, device, non_blocking=False):
        torch.ones(1, device=device)
        return super().to(device, non_blocking)


@pytest.mark.parametrize("schedule", [everything_last, copies_last, copies_first])
def test_refused_registration_warns_once(simulator_that, schedule):
    """Without registered memory there is one warning, and batches are pinned by a copy."""
    simulator = simulator_that(schedule)
    simulator.register_code = 801
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read_all(simulator, loader_of(pictures(), collate_fn=Launching)) == expected()
    assert ["returned 801" in str(warning.message) for warning in caught] == [True]
    assert all(source is not None for source in about_copies(simulator))
    assert len(calls(simulator, "register")) == 1


def test_devices_without_registration(simulator_that, monkeypatch):
    """A device whose module has no `cudart` gets batches from other pinned memory."""
    monkeypatch.delattr(Simulator, "cudart")
    simulator = simulator_that(everything_last)
    assert read_all(simulator, loader_of(pictures())) == expected()
    assert all(source is not None for source in about_copies(simulator))


# -- what stays on the CPU ------------------------------------------------------------------------


class WithArray(Pictures):
    def __getitem__(self, index):
        return np.full(NUM_VALUES, index, np.int16), *super().__getitem__(index)


def with_array(samples):
    arrays, images, labels = zip(*samples, strict=True)
    return np.stack(arrays), torch.stack(images), torch.tensor(labels)


def test_arrays_may_be_copied_later(simulator):
    """The loop may copy an array that the batch has left on the CPU, and drop it at once."""
    dataset = WithArray(2 * NUM_BATCHES, NUM_VALUES)
    readings, sent = [], []
    for array, images, labels in loader_of(dataset, collate_fn=with_array):
        copied = torch.from_numpy(array).to(TYPE, non_blocking=True)
        readings.append(simulator.read(copied))
        sent.append((images, labels))
        del array, copied
    assert read_all(simulator, sent) == expected()
    assert [reading.value[:, -1].tolist() for reading in readings] == [
        pair for pair, _ in expected()
    ]


def test_arrays_end_registration(simulator_that):
    """Segments are not registered for batches with parts that stay on the CPU."""
    simulator = simulator_that(copies_first)
    dataset = WithArray(40, NUM_VALUES)
    for array, *_ in loader_of(dataset, collate_fn=with_array):
        assert not simulator.is_pinned(torch.from_numpy(array))
        del array
    assert simulator.num_registered == 1


# -- pinned memory without a device ---------------------------------------------------------------


def test_pinned_batches_leave_their_segments(simulator):
    """With pin_memory=True the loop's own copies read memory of torch's allocator."""
    readings = []
    for images, labels in loader_of(pictures(), device=None, pin_memory=True):
        assert simulator.is_of_allocator(images)
        assert simulator.is_of_allocator(labels)
        moved = images.to(TYPE, non_blocking=True)
        readings.append((simulator.read(moved), labels.tolist()))
        del images, labels, moved
    simulator.finish()
    assert [(r.value[:, -1].tolist(), labels) for r, labels in readings] == expected()
    assert simulator.num_registered == 0


def test_pinning_has_its_thread(simulator_that):
    """Batches are pinned in the background, for the device that is current in the loop."""
    simulator = simulator_that(copies_first, num_devices=3)
    simulator.set_device(1)
    assert len(list(loader_of(pictures(4), device=None, pin_memory=True))) == 4
    pins = calls(simulator, "pin")
    assert {call.thread for call in pins} == {"spdl_torch-transfer-0"}
    assert {call.current_device for call in pins} == {1}


def test_kept_pinned_batches_stay(simulator_that):
    """A pinned batch that the loop keeps is not written to again."""
    simulator_that(copies_first)
    batches = list(loader_of(pictures(), device=None, pin_memory=True))
    assert [(images[:, -1].tolist(), labels.tolist()) for images, labels in batches] == expected()


class Pinnable:
    """Is pinned by its own method."""

    def __init__(self, samples):
        self.images = torch.stack([image for image, _ in samples])
        self.pinned_in = None

    def pin_memory(self):
        self.images = self.images.pin_memory()
        self.pinned_in = threading.current_thread().name
        return self


def test_custom_classes_pin_themselves(simulator_that):
    """The pin_memory() of a batch of the user's own class is called in this process."""
    simulator = simulator_that(copies_first)
    settings = {"device": None, "pin_memory": True, "collate_fn": Pinnable}
    batches = list(loader_of(pictures(4), **settings))
    assert [batch.images[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(simulator.is_of_allocator(batch.images) for batch in batches)
    assert {batch.pinned_in for batch in batches} == {"spdl_torch-transfer-0"}


class Unpinnable(Pinnable):
    def pin_memory(self):
        if self.images[0, 0] == 2:
            raise LookupError("cannot be pinned")
        return self


def test_failing_pin_raises_at_batch(simulator_that):
    """An error in pin_memory() is raised at its batch, and the others are right."""
    simulator_that(copies_first)
    settings = {"device": None, "pin_memory": True, "collate_fn": Unpinnable}
    iterator = iter(loader_of(pictures(4), **settings))
    assert next(iterator).images[:, 0].tolist() == [0, 1]
    with pytest.raises(LookupError, match="cannot be pinned"):
        next(iterator)
    assert [batch.images[0, 0].item() for batch in iterator] == [4, 6]


def test_pin_memory_device_warns(simulator_that):
    """torch's warning about pin_memory_device comes, and batches are pinned all the same."""
    simulator = simulator_that(copies_first)
    settings = {"device": None, "pin_memory": True, "pin_memory_device": TYPE}
    with pytest.warns(UserWarning, match="pin_memory_device is deprecated"):
        batches = list(loader_of(pictures(2), **settings))
    assert all(simulator.is_of_allocator(images) for images, _ in batches)


def test_pinning_needs_an_accelerator():
    """Without an accelerator torch warns, nothing is pinned, and there is no thread for it."""
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.warns(UserWarning, match="no accelerator is found"):
        iterator = iter(loader_of(pictures(4), device=None, pin_memory=True))
    images, _ = next(iterator)
    assert not images.is_pinned()
    assert not any("transfer" in name for name in own_thread_names())
    iterator.close()
