"""Pinned buffers: whose they are, and when they are used again."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torchvision.tv_tensors import Image

from spdl_torch._device._pinned import Loan, PinnedRing

from .datasets import PATIENCE_SECONDS
from .simulated import Simulator, everything_last


@pytest.fixture
def ring(monkeypatch):
    Simulator(everything_last).install(monkeypatch)
    return PinnedRing()


class Copied:
    """The event behind a copy."""

    def __init__(self, done=False):
        self.done = done

    def query(self):
        return self.done


def test_a_buffer_is_used_again_when_it_has_been_copied(ring):
    buffer = ring.take(1000)
    copied = Copied()
    ring.give_back([buffer], copied)
    assert ring.take(1000) is not buffer
    copied.done = True
    assert ring.take(1000) is buffer
    assert (ring.num_fresh, ring.num_reused) == (2, 1)


def test_a_copy_that_is_not_done_holds_up_those_behind_it(ring):
    """They are on one stream, so it asks no further."""
    first, second = ring.take(8), ring.take(8)
    copied = Copied()
    ring.give_back([first], copied)
    ring.give_back([second], Copied(done=True))
    assert id(ring.take(8)) not in (id(first), id(second))
    copied.done = True
    assert {id(ring.take(8)), id(ring.take(8))} == {id(first), id(second)}


def test_buffers_of_one_size_serve_all_shapes_of_it(ring):
    for num_bytes in (1000, 1024, 513, 700):
        buffer = ring.take(num_bytes)
        assert buffer.numel() == 1024
        ring.give_back([buffer], Copied(done=True))
    assert (ring.num_fresh, ring.num_reused) == (1, 3)
    assert ring.take(512).numel() == 512


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.int64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0), (7, 1, 2)])
def test_a_tensor_in_a_buffer_is_like_any_other(ring, dtype, shape):
    loan = Loan(ring)
    tensor = loan.empty(shape, dtype=dtype)
    values = torch.ones(shape, dtype=dtype)
    assert torch.equal(tensor.copy_(values), values)
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    pinned = loan.pin(values)
    assert torch.equal(pinned, values)
    assert pinned.is_pinned() or pinned.numel() == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.ones(4, 6)[:, ::2],
        torch.ones(3, requires_grad=True),
        torch.ones(3).expand(4, 3),
    ],
    ids=["channels last", "with gaps", "with a gradient", "expanded"],
)
def test_a_tensor_that_is_more_than_its_values_is_pinned_as_torch_does_it(ring, tensor):
    loan = Loan(ring)
    pinned = loan.pin(tensor)
    assert torch.equal(pinned, tensor)
    assert pinned.requires_grad == tensor.requires_grad
    assert loan.buffers == {}


def test_a_tensor_of_another_class_keeps_it(ring):
    image = Image(torch.ones(3, 4, 4))
    pinned = Loan(ring).pin(image)
    assert type(pinned) is Image
    assert torch.equal(pinned, image)


def test_a_tensor_on_a_device_is_left_alone(ring):
    tensor = torch.ones(3, device="meta")
    assert Loan(ring).pin(tensor) is tensor


def test_buffers_are_found_whatever_device_is_the_default(ring):
    with torch.device("meta"):
        loan = Loan(ring)
        assert loan.empty((3,), dtype=torch.uint8).device.type == "cpu"
        assert loan.empty((0,), dtype=torch.uint8).device.type == "cpu"


def test_a_look_at_a_copy_that_is_not_done_leaves_it_first(ring):
    buffers = [ring.take(8) for _ in range(3)]
    events = [Copied() for _ in buffers]
    for buffer, copied in zip(buffers, events, strict=True):
        ring.give_back([buffer], copied)
    ring.take(8)
    events[0].done = True
    assert ring.take(8) is buffers[0]


def test_what_is_pinned_already_is_left_alone(ring):
    pinned = torch.ones(5).pin_memory()
    assert Loan(ring).pin(pinned) is pinned


def test_no_two_threads_ever_have_the_same_buffer(ring):
    """Copies are done at random, by whoever comes along."""
    in_use = {}
    lock = threading.Lock()
    errors = []
    started = threading.Barrier(4)

    def collate(seed):
        draw = random.Random(seed)
        started.wait(PATIENCE_SECONDS)
        pending = []
        for _ in range(2000):
            buffer = ring.take(draw.choice([100, 200, 400]))
            with lock:
                if id(buffer) in in_use:
                    errors.append(buffer)
                in_use[id(buffer)] = buffer
            pending.append((buffer, Copied()))
            if draw.random() < 0.7:
                buffer, copied = pending.pop(draw.randrange(len(pending)))
                ring.give_back([buffer], copied)
                with lock:
                    del in_use[id(buffer)]
                copied.done = True
            if len(pending) > 5:
                for buffer, copied in pending:
                    with lock:
                        del in_use[id(buffer)]
                    copied.done = True
                    ring.give_back([buffer], copied)
                pending = []

    threads = [threading.Thread(target=collate, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ring.num_fresh + ring.num_reused == 8000
    assert ring.num_reused > 4000
