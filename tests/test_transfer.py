"""What becomes of a batch, whatever its structure; which device is meant.

The device is torch's "meta", which is everywhere: tensors arrive there without their values.
What streams and events do is in `test_transfer_protocol.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import threading
import types
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torchvision.tv_tensors import Image

import spdl_torch
from spdl_torch import DataLoader

from .datasets import Raising, Sharded, Squares, Staged, StagedAsync, Uneven
from .test_parity import assert_same


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Labelled:
    image: Any
    label: Any = 3
    derived: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        self.derived = "made once"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: Any
    name: str = "x"


class Named(dict):
    name = "kept"


class ReadOnly(Mapping):
    def __init__(self, items):
        self.items_given = dict(items)

    def __getitem__(self, key):
        return self.items_given[key]

    def __iter__(self):
        return iter(self.items_given)

    def __len__(self):
        return len(self.items_given)


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A mapping and a dataclass whose keys are its attributes, as transformers has them."""

    logits: Any = None

    def __post_init__(self):
        super().__setitem__("logits", self.logits)

    def __setattr__(self, name, value):
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_):
        raise TypeError("cannot be updated")


class Movable:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Movable(self.tensor.to(device))


class MovesItself(Movable):
    """Its to() returns nothing."""

    def to(self, device, **_):
        self.tensor = self.tensor.to(device)


def image():
    return torch.arange(6).reshape(2, 3)


def compressed():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return image().to_sparse_csr()


STRUCTURES = {
    "tensor": image,
    "tuple": lambda: (image(), 3, "x", None),
    "list": lambda: [image(), [image()], b"y"],
    "named tuple": lambda: Pair(image(), Pair("x", image())),
    "dict": lambda: {"a": image(), 7: {"b": [image()]}},
    "ordered dict": lambda: collections.OrderedDict(b=image(), a=1),
    "default dict": lambda: collections.defaultdict(list, a=image()),
    "user dict": lambda: collections.UserDict(a=image()),
    "dict with attributes": lambda: Named(a=image()),
    "read-only mapping": lambda: types.MappingProxyType({"a": image()}),
    "own mapping": lambda: ReadOnly({"a": image()}),
    "deque": lambda: collections.deque([image(), 1], maxlen=4),
    "user list": lambda: collections.UserList([image()]),
    "torch's result": lambda: torch.max(image(), dim=0),
    "dataclass": lambda: Labelled(image(), [image()]),
    "frozen dataclass": lambda: Frozen(image()),
    "dataclass and mapping": lambda: Output(image()),
    "tensor with a class": lambda: Image(image()),
    "packed sequence": lambda: pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]),
    "object": lambda: Movable(image()),
    "object that moves itself": lambda: MovesItself(image()),
    "sparse tensor": lambda: image().to_sparse(),
    "compressed tensor": compressed,
    "empty": lambda: [torch.empty(0, 3), (), {}],
    "nothing to move": lambda: ["x", 3, None, {"a": (2.5, True)}, range(4), torch.Size([2])],
}


def devices(batch):
    """The device types of the tensors in a batch, as many of them as there are."""
    if isinstance(batch, PackedSequence):
        return [batch.data.device.type]
    if isinstance(batch, torch.Tensor):
        return [batch.device.type]
    if isinstance(batch, Movable):
        return devices(batch.tensor)
    if dataclasses.is_dataclass(batch):
        values = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    elif isinstance(batch, Mapping):
        values = list(batch.values())
    elif isinstance(batch, str | bytes | range) or not hasattr(batch, "__iter__"):
        values = []
    else:
        values = list(batch)
    return [device for value in values for device in devices(value)]


def skeleton(batch):
    """A batch without its tensors."""
    if isinstance(batch, torch.Tensor | PackedSequence):
        return type(batch)
    if isinstance(batch, Movable):
        return type(batch), skeleton(batch.tensor)
    if dataclasses.is_dataclass(batch):
        fields = [field.name for field in dataclasses.fields(batch)]
        return type(batch), {name: skeleton(getattr(batch, name)) for name in fields}
    if isinstance(batch, Mapping):
        return type(batch), {key: skeleton(value) for key, value in batch.items()}
    if isinstance(batch, str | bytes | range) or not hasattr(batch, "__iter__"):
        return batch
    return type(batch), [skeleton(value) for value in batch]


def only_sample(samples):
    return samples[0]


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_structures_arrive_on_the_device(make):
    """A batch of any structure keeps its types, and its tensors are on the device."""
    batch = make()
    expected, num_tensors = skeleton(batch), len(devices(batch))
    (arrived,) = DataLoader([batch], num_workers=1, collate_fn=only_sample, device="meta")
    assert skeleton(arrived) == expected
    assert devices(arrived) == ["meta"] * num_tensors
    assert devices(spdl_torch.transfer(make(), "meta")) == ["meta"] * num_tensors


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES.keys())
@pytest.mark.parametrize("num_workers", [0, 1])
def test_cpu_batch_is_the_collated_object(make, num_workers):
    """With device="cpu" a batch is not copied."""
    batch = make()
    (arrived,) = DataLoader([batch], num_workers=num_workers, collate_fn=only_sample, device="cpu")
    assert arrived is batch


def test_containers_keep_their_attributes():
    """A moved container keeps what it has besides its items."""
    named = Named(a=image())
    named.name = "changed"
    assert spdl_torch.transfer(named, "meta").name == "changed"
    assert spdl_torch.transfer(collections.deque([image()], maxlen=4), "meta").maxlen == 4
    assert spdl_torch.transfer(collections.defaultdict(list, a=image()), "meta")["b"] == []
    output = spdl_torch.transfer(Output(image()), "meta")
    assert output["logits"] is output.logits


class Spread(tuple):
    def __new__(cls, *values):
        return super().__new__(cls, values)


class Extended(Pair):
    pass


class ItemsAreAttributes(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class WriteOnce(dict):
    def __setitem__(self, key, value):
        raise TypeError("cannot be changed")


@dataclasses.dataclass(slots=True)
class NeverSet:
    image: Any
    later: Any = dataclasses.field(init=False)


class KeywordsOnly(ReadOnly):
    def __init__(self, **items):
        super().__init__(items)


def test_unusual_containers_are_moved_too():
    """Containers with unusual constructors or without assignment are moved too."""
    spread = spdl_torch.transfer(Spread(image(), 3), "meta")
    assert type(spread) is Spread
    assert devices(spread[0]) == ["meta"]
    assert spread[1] == 3
    extended = Extended(image(), 3)
    extended.name = "kept"
    moved = spdl_torch.transfer(extended, "meta")
    assert (type(moved), moved.name, devices(moved)) == (Extended, "kept", ["meta"])
    moved = spdl_torch.transfer(ItemsAreAttributes(a=image()), "meta")
    assert moved.a is moved["a"]
    assert devices(moved) == ["meta"]
    assert devices(spdl_torch.transfer(WriteOnce(a=image()), "meta")) == ["meta"]
    assert devices(spdl_torch.transfer(KeywordsOnly(a=image()), "meta")) == ["meta"]
    assert devices(spdl_torch.transfer(NeverSet(image()), "meta").image) == ["meta"]
    text = collections.UserString("text")
    assert spdl_torch.transfer([text], "meta")[0] is text


def test_original_batch_is_unchanged():
    """A transfer returns a new batch and leaves the original on its device."""
    batch = {"a": [image()], "b": Labelled(image())}
    spdl_torch.transfer(batch, "meta")
    assert devices(batch) == ["cpu", "cpu"]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_batch_on_the_device_is_returned(device):
    """A batch that is on the device already is returned as it is."""
    batch = {"a": [image().to(device)], "b": Pair(3, image().to(device)), "c": "x"}
    assert spdl_torch.transfer(batch, device) is batch


def test_key_named_to_is_no_method():
    """A key, or a class, that has `to` is not moved by it."""

    class Attributes(dict):
        __getattr__ = dict.__getitem__

    batch = spdl_torch.transfer({"to": image(), "as": Attributes(to=image())}, "meta")
    assert devices(batch) == ["meta", "meta"]
    assert spdl_torch.transfer([torch.Tensor, Movable], "meta") == [torch.Tensor, Movable]


def test_lists_of_numbers_are_not_copied():
    """A list that holds only numbers is the same object after a transfer."""
    tokens = list(range(1000))
    assert spdl_torch.transfer({"tokens": tokens, "image": image()}, "meta")["tokens"] is tokens


# -- loaders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Squares(), Staged(), StagedAsync(), Sharded()])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_batch_of_every_dataset_arrives(dataset, in_order, num_workers):
    arguments = {"batch_size": 2, "num_workers": num_workers, "in_order": in_order}
    expected = list(DataLoader(dataset, **arguments))
    arrived = list(DataLoader(dataset, **arguments, device="meta"))
    assert devices(arrived) == ["meta"] * len(devices(expected))
    assert len(arrived) == len(expected)


@pytest.mark.parametrize("dataset", [Squares(9), Sharded(9)], ids=["map", "iterable"])
@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, {"num_workers": 2, "shuffle": True}])
def test_cpu_loader_equals_one_without_device(dataset, arguments):
    """device="cpu" changes neither the batches nor their order."""
    if isinstance(dataset, Sharded):
        arguments = {name: value for name, value in arguments.items() if name != "shuffle"}
    torch.manual_seed(1)
    expected = list(DataLoader(dataset, batch_size=2, **arguments))
    torch.manual_seed(1)
    assert_same(list(DataLoader(dataset, batch_size=2, **arguments, device="cpu")), expected)


def test_sample_error_passes_the_transfer():
    """An error in the dataset is raised at its batch, and the others arrive."""
    iterator = iter(DataLoader(Raising(8, 3, KeyError("bad")), num_workers=2, device="meta"))
    assert len([next(iterator) for _ in range(3)]) == 3
    with pytest.raises(KeyError, match="bad"):
        next(iterator)
    assert len(list(iterator)) == 4


def test_exhausted_workers_do_not_block_others():
    """A transfer continues when some workers of an iterable dataset have no samples."""
    for in_order in (True, False):
        loader = DataLoader(Uneven([0, 0, 0, 12]), num_workers=4, device="meta", in_order=in_order)
        assert len(list(loader)) == 12


def test_transfer_thread_is_no_worker():
    """The transfer thread has no worker info and computes in one thread."""
    seen = []

    class Watching(Movable):
        def to(self, device):
            info = torch.utils.data.get_worker_info()
            seen.append((threading.current_thread().name, info, torch.get_num_threads()))
            return super().to(device)

    list(
        DataLoader(Squares(2), num_workers=2, collate_fn=lambda _: Watching(image()), device="meta")
    )
    assert seen == [("spdl_torch-transfer-0", None, 1)] * 2


def iterators():
    return pytest.mark.parametrize(
        "workers",
        [
            {"num_workers": 0},
            {"num_workers": 2},
            {"num_workers": 1, "worker_method": "multiprocessing"},
        ],
        ids=["calling thread", "threads", "processes"],
    )


class Failing:
    """Raises when the batch of sample 2 is moved."""

    def __init__(self, samples):
        self.samples = samples

    def to(self, _device):
        if self.samples == [2]:
            raise StopIteration
        return self.samples


@iterators()
def test_stop_iteration_in_to_raises(workers):
    """StopIteration raised by an object's to() does not end the training loop."""
    iterator = iter(DataLoader(range(5), collate_fn=Failing, device="meta", **workers))
    assert [next(iterator) for _ in range(2)] == [[0], [1]]
    with pytest.raises(RuntimeError, match=r"raised StopIteration\(\)"):
        next(iterator)
    assert list(iterator) == [[3], [4]]


@iterators()
def test_failed_transfer_counts_as_delivered(workers):
    """A resumed loader continues after the batch that could not be moved."""
    loader = DataLoader(range(5), collate_fn=Failing, device="meta", **workers)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    with pytest.raises(RuntimeError):
        next(iterator)
    state = loader.state_dict()
    again = DataLoader(range(5), collate_fn=Failing, device="meta", **workers)
    again.load_state_dict(state)
    assert list(again) == [[3], [4]]


def test_error_keeps_its_place_without_order():
    """With in_order=False an error comes after the earlier batches of its worker."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return self

        def __init__(self):
            self.number = 0

        def __next__(self):
            self.number += 1
            if self.number == 4:
                raise ValueError("4")
            if self.number == 7:
                raise StopIteration
            return self.number

    class Slow(Movable):
        def to(self, _device):
            # Not before the worker is at its end.
            assert all_made.acquire(timeout=20)
            all_made.release()
            return self.tensor

    all_made = threading.Semaphore(0)

    def collate(samples):
        if samples == [6]:
            all_made.release()
        return Slow(samples)

    loader = DataLoader(
        Stream(),
        num_workers=1,
        prefetch_factor=6,
        in_order=False,
        collate_fn=collate,
        device="meta",
    )
    iterator = iter(loader)
    assert [next(iterator) for _ in range(3)] == [[1], [2], [3]]
    with pytest.raises(ValueError, match="4"):
        next(iterator)
    assert list(iterator) == [[5], [6]]


# -- which device ---------------------------------------------------------------------------------


@pytest.fixture
def two_devices(monkeypatch):
    """Two devices, as far as anyone can tell from outside."""
    module = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 1
    )
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("xpu")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("device", ["xpu:2", "mtia", "hpu", "gpu", torch.device("xpu", 7)])
def test_missing_device_error_lists_devices(device):
    """A device that does not exist is a ValueError that lists those that do."""
    with pytest.raises(ValueError, match="Available: cpu, xpu:0, xpu:1") as caught:
        DataLoader(Squares(), device=device)
    assert repr(device) in str(caught.value)
    with pytest.raises(ValueError, match="Available: cpu, xpu:0, xpu:1"):
        spdl_torch.transfer(image(), device)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("device", ["xpu", "xpu:0", torch.device("xpu:1"), "cpu", None])
def test_device_argument_is_kept_as_given(device):
    """The loader has its device as an attribute, to be made again from its attributes."""
    loader = DataLoader(Squares(), device=device)
    assert loader.device is device
    names = set(inspect.signature(DataLoader).parameters)
    assert "device" in names & set(vars(loader))  # For frameworks that make the loader again.


def test_other_type_of_device_is_refused():
    """A device argument of another type is a TypeError."""
    with pytest.raises(TypeError, match=r"must be a torch\.device or a string, got 2\.5"):
        DataLoader(Squares(), device=2.5)
