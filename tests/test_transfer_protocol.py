"""The values that kernels of the training loop read on a device are those that were sent.

The device is simulated (`tests/simulated.py`), with schedules at the edges of what a device may do.
Each of these changes in `spdl_torch/_device`, and in the threads that call it, makes a test here
fail:

In `Transfer.receive`:
 1. no `wait_event`
 2. `wait_event` on the side stream instead of the loop's
 3. `wait_event` after the batch was returned (deferred to the next `receive`)
 4. no `record_stream`
 5. `record_stream` of the first tensor alone
 6. `record_stream` on the side stream instead of the loop's
 7. `record_stream` before `wait_event` (only the trace tells: no value depends on it)
 8. the stream that was current at the first `receive`, instead of the one that is now
 9. the host waits for the copies (`copied.synchronize()`)
10. no event after the loop's steps
11. the event after a step is recorded after `wait_event`

In `Transfer.send`:
12. the event is recorded before the copies are started
13. the event is recorded on the loop's stream instead of the side stream
14. the event is not recorded
15. copies on the loop's stream instead of the side stream
16. copies that are not `non_blocking`
17. no wait for the loop's queued steps
18. a stream for every loader instead of one for the device
19. objects with `to()` are moved without watching what they make

In `Transfer.pin`:
20. the default collate writes into memory that is not pinned
21. the tensors of a user's collate function are not pinned
22. objects that have `pin_memory()` are not pinned
23. pinned memory is kept for the next batch, without asking whether it has been copied
24. all pinned batches are kept, so that none of their memory is used again

In the threads:
25. the device is not chosen in the sending thread
26. the device is not chosen in the workers that pin
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

import spdl_torch
from spdl_torch import DataLoader

from .datasets import Sharded, Squares
from .simulated import (
    TYPE,
    Simulator,
    at_random,
    copies_first,
    copies_last,
    everything_last,
)

NUM_BATCHES = 24
SCHEDULES = [
    everything_last,
    copies_last,
    copies_first,
    at_random(0),
    *(pytest.param(at_random(seed), marks=pytest.mark.exhaustive) for seed in range(1, 6)),
]


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


class Pictures(Squares):
    """A sample is a tensor and a label, from both of which one can tell which it is."""

    def __init__(self, num_samples=2 * NUM_BATCHES, num_values=200):
        super().__init__(num_samples)
        self.num_values = num_values

    def __getitem__(self, index):
        return torch.full((self.num_values,), index, dtype=torch.int16), index


def read_all(simulator, batches):
    """What the kernels of a loop read that lets go of each batch at once."""
    readings = []
    for pictures, labels in batches:
        readings.append((simulator.read(pictures), simulator.read(labels)))
        del pictures, labels
    simulator.finish()
    return [
        (pictures.value[:, -1].tolist(), labels.value.tolist()) for pictures, labels in readings
    ]


def expected(first=0, num_batches=NUM_BATCHES):
    pairs = [[2 * n, 2 * n + 1] for n in range(first, num_batches)]
    return [(pair, pair) for pair in pairs]


# -- the values are right ------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_loop_reads_what_was_sent(simulator, num_workers):
    loader = DataLoader(Pictures(), batch_size=2, num_workers=num_workers, device=TYPE)
    assert read_all(simulator, loader) == expected()


def test_values_are_right_without_order(simulator):
    """With in_order=False the loop reads what was sent."""
    loader = DataLoader(Pictures(), batch_size=2, num_workers=3, device=TYPE, in_order=False)
    assert sorted(read_all(simulator, loader)) == expected()


@pytest.mark.parametrize("schedule", [everything_last, copies_last, copies_first])
def test_values_from_worker_processes(simulator_that, schedule):
    """The loop reads what worker processes made."""
    simulator = simulator_that(schedule)
    loader = DataLoader(
        Pictures(20), batch_size=2, num_workers=1, worker_method="multiprocessing", device=TYPE
    )
    assert read_all(simulator, loader) == expected(num_batches=10)


def test_values_with_persistent_workers(simulator):
    """Epochs that are left early and whole ones read what was sent."""
    loader = DataLoader(
        Pictures(), batch_size=2, num_workers=2, device=TYPE, persistent_workers=True
    )
    for num_taken in (1, 5, 3):
        iterator = iter(loader)
        batches = (next(iterator) for _ in range(num_taken))
        assert read_all(simulator, batches) == expected(num_batches=num_taken)
    assert read_all(simulator, loader) == expected()
    loader.close()


def test_values_on_another_stream(simulator):
    """The stream that is current at each next() waits for the copies."""
    loader = DataLoader(Pictures(), batch_size=2, num_workers=2, device=TYPE)
    iterator = iter(loader)
    batches = read_all(simulator, [next(iterator)])
    with simulator.stream(simulator.loop_stream()):
        batches += read_all(simulator, iterator)
    assert batches == expected()


def test_values_of_a_collate_function(simulator):
    """Batches of a user's collate function are pinned, and read as they were sent."""

    def collate(samples):
        pictures, labels = zip(*samples, strict=True)
        return torch.stack(pictures), torch.tensor(labels)

    loader = DataLoader(Pictures(), 2, num_workers=2, collate_fn=collate, device=TYPE)
    assert read_all(simulator, loader) == expected()
    assert all(call.about is not None for call in simulator.calls if call.what == "copy")


def test_values_without_batches(simulator):
    """Single samples are read as they were sent."""
    loader = DataLoader(Pictures(9), batch_size=None, num_workers=2, device=TYPE)
    readings = [simulator.read(picture) for picture, _ in loader]
    simulator.finish()
    assert [reading.value[0].item() for reading in readings] == list(range(9))


def test_values_of_an_iterable_dataset(simulator):
    """The batches of an iterable dataset are read as they were sent."""
    loader = DataLoader(Sharded(40), batch_size=2, num_workers=2, device=TYPE)
    readings = [simulator.read(batch) for batch in loader]
    simulator.finish()
    assert sorted(n for reading in readings for n in reading.value.tolist()) == list(range(40))


def test_values_of_transfer_function(simulator):
    """A loop that calls transfer() itself reads what was sent."""
    batches = (
        spdl_torch.transfer((picture.unsqueeze(0).pin_memory(), torch.tensor([label])), TYPE)
        for picture, label in map(Pictures().__getitem__, range(20))
    )
    assert read_all(simulator, batches) == [([n], [n]) for n in range(20)]


def test_two_loaders_share_one_stream(simulator):
    """Two loaders in turn are read as they were sent, and share the side stream."""
    loaders = [DataLoader(Pictures(), 2, num_workers=1, device=TYPE) for _ in range(2)]
    batches = (batch for pair in zip(*loaders, strict=True) for batch in pair)
    assert read_all(simulator, batches)[::2] == expected()
    assert len(simulator.streams) == 2  # The loop's, and one for all copies.


# -- the steps ------------------------------------------------------------------------------------


def test_order_of_calls_for_a_batch(simulator_that):
    """The device is called in the order: copy, record, wait, record_stream."""
    simulator = simulator_that(copies_first)
    iterator = iter(DataLoader(Pictures(2), batch_size=2, num_workers=1, device=TYPE))
    next(iterator)
    side, loop = simulator.streams[1], simulator.current_stream()
    steps = [(call.what, call.stream) for call in simulator.calls if call.stream is not None]
    assert steps == [
        ("copy", side),
        ("copy", side),
        ("record", side),
        ("wait", loop),
        ("record_stream", loop),
        ("record_stream", loop),
    ]
    events = [call.about for call in simulator.calls if call.what in ("record", "wait")]
    assert events[0] is events[1]
    assert "host waits" not in {call.what for call in simulator.calls}


def test_step_event_precedes_the_wait(simulator_that):
    """Or else the sending thread, which waits for the step, would wait for a copy too."""
    simulator = simulator_that(copies_first)
    iterator = iter(DataLoader(Pictures(4), batch_size=2, num_workers=1, device=TYPE))
    for _ in range(2):
        next(iterator)
    steps = [call.what for call in simulator.calls if call.stream is simulator.current_stream()]
    received = ["wait", "record_stream", "record_stream"]
    assert steps == [*received, "record", *received]


def test_transfer_thread_starts_the_copies(simulator_that):
    """The transfer thread starts copies, and the loop's thread waits for their event."""
    simulator = simulator_that(copies_first)
    read_all(simulator, DataLoader(Pictures(), batch_size=2, num_workers=2, device=TYPE))
    threads = {call.what: call.thread for call in simulator.calls}
    assert threads["copy"] == "spdl_torch-transfer-0"
    assert threads["wait"] == threads["record_stream"] == threading.current_thread().name


def test_loop_never_waits_for_device(simulator):
    """Only the transfer thread waits for the device."""
    read_all(simulator, DataLoader(Pictures(), batch_size=2, num_workers=2, device=TYPE))
    waiting = {call.thread for call in simulator.calls if call.what == "host waits"}
    assert waiting <= {"spdl_torch-transfer-0"}


def test_device_is_current_in_the_threads(simulator_that):
    """The device is current in each thread that pins or copies, and not in the loop's."""
    simulator = simulator_that(copies_first, num_devices=3)
    loader = DataLoader(Pictures(), batch_size=2, num_workers=2, device=f"{TYPE}:2")
    assert read_all(simulator, loader) == expected()
    used = {call.current_device for call in simulator.calls if call.what in ("pin", "copy")}
    assert used == {2}
    assert simulator.current_device() == 0


def test_device_without_index_is_current(
    simulator_that,
):
    """A device without an index is the current one of the thread that made the loader."""
    simulator = simulator_that(copies_first, num_devices=2)
    simulator.set_device(1)
    loader = DataLoader(Pictures(), batch_size=2, num_workers=1, device=TYPE)
    simulator.set_device(0)
    pictures, _ = next(iter(loader))
    assert pictures.device == torch.device(TYPE, 1)
    assert loader.device == TYPE


def test_two_loaders_for_two_devices(simulator_that):
    """Loaders for two devices are read as they were sent."""
    simulator = simulator_that(everything_last, num_devices=2)
    loaders = [DataLoader(Pictures(), 2, num_workers=1, device=f"{TYPE}:{i}") for i in (0, 1)]
    readings = []
    for batches in zip(*loaders, strict=True):
        for index, (pictures, labels) in enumerate(batches):
            assert pictures.device.index == labels.device.index == index
            readings.append((simulator.read(pictures), simulator.read(labels)))
        del batches, pictures, labels
    simulator.finish()
    read = [(a.value[:, -1].tolist(), b.value.tolist()) for a, b in readings]
    assert read[::2] == read[1::2] == expected()


# -- memory ---------------------------------------------------------------------------------------


def num_blocks(simulator):
    """How much memory of the device was ever needed at the same time, in batches."""
    return (2**40 - simulator.num_bytes_left) / (1024 + 512)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_is_bounded(simulator, num_workers):
    """Memory is bounded, however far the loop is ahead of the device."""
    dataset = Pictures(400)
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers, device=TYPE)
    assert len(read_all(simulator, loader)) == 200
    # Two ahead of the loop, the one it has and the one before, and three it has queued.
    assert num_blocks(simulator) <= 8
    # And as many batches as the window has. A batch has two pinned blocks.
    assert simulator.num_pinned <= 2 * (8 + 2 * num_workers)


def test_fast_device_needs_little_pinned_memory(simulator_that):
    """Pinned memory is reused as soon as it has been copied."""
    simulator = simulator_that(copies_first)
    loader = DataLoader(Pictures(400), batch_size=2, num_workers=1, device=TYPE)
    assert len(read_all(simulator, loader)) == 200
    assert simulator.num_pinned <= 2 * 6


def test_varying_shapes_share_pinned_memory(simulator_that):
    """Batches of different shapes use the same pinned blocks."""

    class Varying(Pictures):
        def __getitem__(self, index):
            return torch.full((120 + index % 8,), index, dtype=torch.int16), index

    simulator = simulator_that(copies_first)
    loader = DataLoader(Varying(400), batch_size=1, num_workers=1, device=TYPE)
    assert read_all(simulator, loader) == [([n], [n]) for n in range(400)]
    assert simulator.num_pinned <= 2 * 6


def test_collate_writes_into_pinned_memory(simulator_that, monkeypatch):
    """The default collate stacks samples in pinned memory, without a copy."""
    simulator = simulator_that(copies_first)
    stack, outs = torch.stack, []

    def stack_into(tensors, *args, out=None, **kwargs):
        outs.append(out)
        return stack(tensors, *args, out=out, **kwargs)

    monkeypatch.setattr(torch, "stack", stack_into)
    for num_workers in (0, 1):
        loader = DataLoader(Pictures(8), batch_size=2, num_workers=num_workers, device=TYPE)
        assert read_all(simulator, loader) == expected(num_batches=4)
    assert len(outs) == 8
    assert all(simulator.is_pinned(out) for out in outs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pin_memory_is_redundant_with_device(simulator_that, num_workers):
    """pin_memory=True changes nothing beside device=."""
    simulator = simulator_that(copies_first)
    loader = DataLoader(Pictures(400), 2, num_workers=num_workers, device=TYPE, pin_memory=True)
    assert read_all(simulator, loader) == expected(num_batches=200)
    assert simulator.num_pinned <= 2 * (8 + 2 * num_workers)


def test_loop_may_leave_inference_mode(simulator_that):
    """A loop may leave inference mode in the middle of an epoch."""
    simulator = simulator_that(copies_first)
    iterator = iter(DataLoader(Pictures(), batch_size=2, device=TYPE))
    with torch.inference_mode():
        first = [next(iterator) for _ in range(3)]
    assert read_all(simulator, [*first, *iterator]) == expected()


# -- objects that move themselves -----------------------------------------------------------------


class Hidden:
    """Hides its tensors."""

    def __init__(self, samples):
        pictures, labels = zip(*samples, strict=True)
        self._get = lambda: (torch.stack(pictures), torch.tensor(labels))

    def pin_memory(self):
        pictures, labels = self._get()
        pinned = pictures.pin_memory(), labels.pin_memory()
        self._get = lambda: pinned
        return self

    def to(self, device, non_blocking=False):
        moved = tuple(tensor.to(device, non_blocking=non_blocking) for tensor in self._get())
        self._get = lambda: moved
        return self

    def __iter__(self):
        return iter(self._get())


def test_objects_are_pinned_before_moving(simulator_that):
    """An object that has pin_memory() is pinned before its to() is called."""
    simulator = simulator_that(copies_first)
    read_all(simulator, DataLoader(Pictures(8), 2, num_workers=2, collate_fn=Hidden, device=TYPE))
    assert all(call.about is not None for call in simulator.calls if call.what == "copy")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_values_that_objects_move_themselves(simulator, num_workers):
    """Tensors that an object moves in its to() are read as they were sent."""
    loader = DataLoader(
        Pictures(), batch_size=2, num_workers=num_workers, collate_fn=Hidden, device=TYPE
    )
    assert read_all(simulator, loader) == expected()


class HalfMoved(dict):
    """Moves one of its tensors and leaves the other where it is."""

    def to(self, device, non_blocking=False):
        return HalfMoved(self, moved=self["moved"].to(device, non_blocking=non_blocking))


class HalfMovedSamples(Squares):
    def __getitem__(self, index):
        return HalfMoved(moved=torch.tensor(index), left=torch.tensor(index))


def test_pinned_tensor_of_object_is_kept(simulator):
    """A pinned tensor that an object does not move is not overwritten."""
    loader = DataLoader(HalfMovedSamples(40), batch_size=2, num_workers=2, device=TYPE)
    batches = list(loader)
    readings = [simulator.read(batch["moved"]) for batch in batches]
    simulator.finish()
    pairs = [[2 * n, 2 * n + 1] for n in range(20)]
    assert [reading.value.tolist() for reading in readings] == pairs
    assert [batch["left"].tolist() for batch in batches] == pairs


# -- errors ---------------------------------------------------------------------------------------


class Refusing(Hidden):
    """Cannot be moved if the batch begins with sample 4."""

    def __init__(self, samples):
        super().__init__(samples)
        self.is_bad = samples[0][1] == 4

    def to(self, device, non_blocking=False):
        super().to(device, non_blocking)
        if self.is_bad:
            raise LookupError("will not go there")
        return self


@pytest.mark.parametrize("num_workers", [0, 2])
def test_failing_object_raises_at_its_batch(simulator, num_workers):
    """An error in an object's to() is raised at its batch, and the others are right."""
    loader = DataLoader(
        Pictures(), batch_size=2, num_workers=num_workers, collate_fn=Refusing, device=TYPE
    )
    for _ in range(2):
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(2)]
        with pytest.raises(LookupError, match="will not go there"):
            next(iterator)
        assert read_all(simulator, [*batches, *iterator]) == expected(num_batches=2) + expected(3)


def test_error_names_the_transfer_stage(simulator_that):
    """An error in a transfer has a note with the stage and the samples."""
    simulator_that(copies_first)
    with pytest.raises(LookupError) as caught:
        list(DataLoader(Pictures(6), 2, num_workers=1, collate_fn=Refusing, device=TYPE))
    (note,) = caught.value.__notes__
    assert "transfer stage" in note
    assert "batch 2 (sample indices 4, 5)" in note


@pytest.mark.parametrize("num_workers", [0, 2])
def test_out_of_memory_leaks_nothing(simulator_that, num_workers):
    """When device memory runs out, each batch raises, and no memory is lost."""
    simulator = simulator_that(copies_first)
    simulator.num_bytes_left = 8 * (1024 + 512)
    loader = DataLoader(Pictures(400), batch_size=2, num_workers=num_workers, device=TYPE)
    iterator = iter(loader)
    hoarded, num_errors = [], 0
    for _ in range(200):
        try:
            hoarded.append(next(iterator))
        except torch.OutOfMemoryError:
            num_errors += 1
    assert next(iterator, None) is None
    assert num_errors == 192
    found = read_all(simulator, hoarded)
    assert len(found) == 8
    # Workers may be done with a batch before the one before it, and then it is sent first.
    assert found == [batch for batch in expected(num_batches=8 + num_workers) if batch in found]
    assert simulator.num_pinned <= 2 * (8 + 2 * num_workers)
    del hoarded
    simulator.num_bytes_left = 2**40
    assert read_all(simulator, loader) == expected(num_batches=200)


# -- pinned memory without a device ---------------------------------------------------------------


def test_pinned_batches_are_not_overwritten(simulator_that):
    """Without a device, a pinned batch that the loop keeps is not written to again."""
    simulator = simulator_that(copies_first)
    loader = DataLoader(Pictures(), batch_size=2, num_workers=2, pin_memory=True)
    batches = list(loader)
    assert all(simulator.is_pinned(pictures) for pictures, _ in batches)
    addresses = Counter(pictures.data_ptr() for pictures, _ in batches)
    assert max(addresses.values()) == 1
    assert [labels.tolist() for _, labels in batches] == [pair for pair, _ in expected()]
