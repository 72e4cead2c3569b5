"""The default collate returns what torch's returns; pinning is as in torch."""

from __future__ import annotations

import enum
import re
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision.tv_tensors import Image

from spdl_torch import DataLoader

from .datasets import Squares
from .test_parity import assert_same


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2, 3],
        [2**62, -(2**63)],
        [True, False],
        [1, True],
        [1, 2.5],
        [Colour.RED, Colour.BLUE],
        [1.5, 2],
        [np.int32(1), np.int32(2)],
        [np.zeros(2), np.ones(2)],
        [torch.tensor(1), torch.tensor(2)],
        [torch.zeros(2), torch.ones(2, dtype=torch.float64)],
        [Image(torch.zeros(3, 2, 2)), Image(torch.ones(3, 2, 2))],
        [(torch.zeros(2), 3), (torch.ones(2), 4)],
        [{"a": [1, (2, "x")]}, {"a": [3, (4, "y")]}],
        ["a", b"b"],
    ],
    ids=str,
)
def test_batch_equals_torchs_default_collate(samples):
    """The default collate returns what torch's default_collate returns."""
    (ours,) = DataLoader(samples, batch_size=len(samples), num_workers=1)
    assert_same(ours, default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [2**70],
        [object()],
        [torch.zeros(2), torch.zeros(3)],
        [torch.eye(2).to_sparse()] * 2,
        [torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)] * 2,
        [torch.zeros(2), torch.eye(2).to_sparse()],
    ],
    ids=["large int", "object", "two sizes", "sparse", "nested", "dense and sparse"],
)
def test_torchs_collate_errors_are_kept(samples):
    """Samples that torch's default_collate refuses raise the same error."""
    with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
        default_collate(samples)
    with pytest.raises(type(theirs.value)) as ours:
        list(DataLoader(samples, batch_size=len(samples), num_workers=1))
    assert str(ours.value) == str(theirs.value)


def test_functions_in_torchs_map_are_used(monkeypatch):
    """A function that the user put into torch's default_collate_fn_map is called."""
    monkeypatch.setitem(default_collate_fn_map, int, lambda samples, **_: ("mine", samples))
    (batch,) = DataLoader(Squares(3), batch_size=3, num_workers=1)
    assert batch == ("mine", [0, 1, 4])


def test_gradients_are_kept_in_a_batch():
    """Tensors with a gradient are stacked with it, as torch does it."""
    samples = [torch.zeros(2), torch.ones(2, requires_grad=True)]
    (batch,) = DataLoader(samples, batch_size=2, num_workers=1)
    batch.sum().backward()
    assert samples[1].grad.tolist() == [1, 1]


# -- pinning --------------------------------------------------------------------------------------


class Pinnable:
    def __init__(self, samples):
        self.samples = samples
        self.pinned_in = None

    def pin_memory(self):
        if self.samples == [4]:
            raise LookupError("cannot be pinned")
        self.pinned_in = threading.current_thread().name
        return self


def test_pin_memory_without_accelerator_warns():
    """Without an accelerator, pin_memory=True warns and pins nothing."""
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    with pytest.warns(UserWarning, match="no accelerator is found"):
        batches = list(DataLoader(Squares(4), num_workers=2, pin_memory=True, collate_fn=Pinnable))
    assert [batch.pinned_in for batch in batches] == [None] * 4


@pytest.fixture
def device(monkeypatch):
    """An accelerator, as far as the loader can see; the fixture is the threads that chose it."""
    chosen = []

    def set_device_index(index):
        chosen.append((threading.current_thread().name, index))

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", set_device_index)
    return chosen


def test_workers_pin_for_the_loops_device(device):
    """Workers pin batches, with the loop's current device."""
    loader = DataLoader(Squares(2), num_workers=2, pin_memory=True, collate_fn=Pinnable)
    names = [batch.pinned_in for batch in loader]
    assert all(name.startswith("spdl_torch-preprocess") for name in names)
    assert sorted(device) == [("spdl_torch-preprocess-0", 3), ("spdl_torch-preprocess-1", 3)]


@pytest.mark.usefixtures("device")
def test_pinning_error_raises_at_its_batch():
    """An error in pin_memory() is raised at its batch."""
    loader = DataLoader(Squares(4), num_workers=2, pin_memory=True, collate_fn=Pinnable)
    iterator = iter(loader)
    assert [next(iterator).samples for _ in range(2)] == [[0], [1]]
    with pytest.raises(LookupError, match="cannot be pinned"):
        next(iterator)
    assert [batch.samples for batch in iterator] == [[9]]


@pytest.fixture
def pinned(monkeypatch, device):
    """Pinned memory, as far as the loader can see; the fixture is its addresses."""
    addresses = set()
    empty = torch.empty

    def empty_or_pinned(*args, pin_memory=False, **kwargs):
        tensor = empty(*args, **kwargs)
        if pin_memory:
            addresses.add(tensor.data_ptr())
        return tensor

    def pin_memory(tensor, *_):
        if tensor.data_ptr() in addresses:
            return tensor
        return tensor.clone()

    monkeypatch.setattr(torch, "empty", empty_or_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return addresses


def test_collate_writes_into_pinned_memory(pinned):
    """Samples are stacked in pinned memory, without a copy."""
    samples = [
        {"image": Image(torch.full((3, 4, 5), n, dtype=torch.uint8)), "boxes": (torch.ones(n, 4),)}
        for n in (2, 2)
    ]
    samples[1]["image"] += 1
    (batch,) = DataLoader(samples, batch_size=2, num_workers=1, pin_memory=True)
    assert_same(batch, default_collate(samples))
    assert type(batch["image"]) is torch.Tensor
    assert {batch["image"].data_ptr(), batch["boxes"][0].data_ptr()} <= pinned


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.ones(2, dtype=torch.float64)],
        [torch.zeros(2), torch.ones(2, requires_grad=True)],
    ],
    ids=["of two types", "with a gradient"],
)
@pytest.mark.usefixtures("pinned")
def test_other_tensors_are_stacked_by_torch(samples):
    """Tensors of two types, or with a gradient, are stacked as torch does it."""
    (batch,) = DataLoader(samples, batch_size=2, num_workers=1, pin_memory=True)
    expected = default_collate(samples)
    assert batch.dtype == expected.dtype
    assert batch.requires_grad == expected.requires_grad
    assert torch.equal(batch, expected)


@pytest.mark.parametrize(
    "samples",
    [[torch.zeros(2), torch.zeros(3)], [torch.eye(2).to_sparse()] * 2],
    ids=["of two sizes", "sparse"],
)
@pytest.mark.usefixtures("pinned")
def test_unstackable_tensors_raise_torchs_error(samples):
    """Tensors that torch cannot stack raise its error."""
    with pytest.raises(RuntimeError) as theirs:
        default_collate(samples)
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        next(iter(DataLoader(samples, batch_size=2, num_workers=1, pin_memory=True)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_tensors_are_in_pinned_memory(num_workers):
    loader = DataLoader(Squares(4), batch_size=2, num_workers=num_workers, pin_memory=True)
    assert all(batch.is_pinned() for batch in loader)
