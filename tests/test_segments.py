"""Batches in shared memory: they arrive unchanged, uncopied, and are never overwritten."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import pickle
import socket
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import tv_tensors

from spdl_torch._collate import default_collate
from spdl_torch._segments import Parcel, SegmentLimit, SegmentReader, SegmentWriter

from .conftest import HAS_GIL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="segments need memfd_create")

NO_LIMIT = (1 << 40, 1 << 20)
LARGE = 16 * 1024

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


class Tagged(torch.Tensor):
    """A subclass without functions of its own."""


class Segmentted(torch.Tensor):
    __slots__ = ("where",)


class Link:
    """A child and its parent in one process, with no connection in between."""

    def __init__(self, limit: SegmentLimit | None = None) -> None:
        self.writer = SegmentWriter()
        self.reader = SegmentReader(limit or SegmentLimit(*NO_LIMIT))

    def pack(self, make):
        """Return the parcel of `make(empty)`, with its segment mapped."""
        self.writer.begin()
        parcel, fd = self.writer.pack(make(self.writer.empty))
        parcel = pickle.loads(pickle.dumps(parcel))
        if fd is not None:
            self.reader.map(parcel.segment, parcel.capacity, os.dup(fd))
        return parcel

    def send(self, make):
        """Return the batch `make(empty)` as the parent gets it, once all is freed."""
        batch = self.reader.unpack(self.pack(make))
        self.settle()
        return batch

    def settle(self):
        self.writer.free(self.reader.take_freed())


def send(batch):
    """Return a batch after its way to the parent. It is small or has a segment made for it."""
    return Link().send(lambda _: batch)


def filled(value, *, num_bytes=LARGE * 4, **more):
    """Return a function that collates a batch whose image has one value."""

    def make(empty):
        image = empty((num_bytes // 4,), dtype=torch.float32)
        return {"image": image.fill_(value), "label": torch.tensor([value]), **more}

    return make


def memfds():
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            found += "memfd:spdl_torch" in str(file.readlink())
        except FileNotFoundError:  # The one that lists the directory.
            continue
    return found


def mappings():
    """Return the address ranges of the mapped segments."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "memfd:spdl_torch" in line]
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


def is_in_segment(leaf):
    address = leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.ctypes.data
    return any(start <= address < stop for start, stop in mappings())


def assert_same(one, other):
    """Compare the values, types, dtypes and strides of two leaves."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (
            *(other.dtype, other.shape, other.requires_grad),
        )
        one, other = (t.detach().as_subclass(torch.Tensor).contiguous() for t in (one, other))
        same = torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        assert same
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_same(mine, yours)
    else:
        assert one == other


@pytest.fixture(autouse=True)
def no_segment_left():
    """Fail any test after which a segment is still mapped or open."""
    yield
    if not HAS_GIL:
        gc.collect()
    assert (mappings(), memfds()) == ([], 0)


# -- what arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 40, 20, 16)], ids=str)
def test_dtypes_and_shapes_return(dtype, shape):
    """A tensor of any dtype and shape arrives as it was, in writable memory of its exact size."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    tensor = torch.randint(0, 2, (num_bytes,), dtype=torch.uint8).view(dtype).reshape(shape)
    received = send(tensor)
    assert_same(received, tensor)
    assert received.stride() == tensor.stride()
    assert received.untyped_storage().nbytes() == num_bytes
    assert is_in_segment(received) == (num_bytes >= LARGE)
    received.zero_()


@pytest.mark.parametrize(
    ("view", "stride"),
    [
        (lambda x: x.contiguous(memory_format=torch.channels_last), (48000, 1, 120, 3)),
        (lambda x: x.permute(3, 0, 2, 1), (1, 48000, 40, 16000)),
        (lambda x: x[1:], (48000, 16000, 40, 1)),
        (lambda x: x[:, :, ::2], (24000, 8000, 40, 1)),
        (lambda x: x[:1].expand(4, -1, -1, -1), (48000, 16000, 40, 1)),
        (lambda x: x.transpose(1, 2)[:, :200], (24000, 120, 40, 1)),
        (lambda x: torch.complex(x, x).conj(), (48000, 16000, 40, 1)),
        (lambda x: torch.complex(x, x).conj().imag, (48000, 16000, 40, 1)),
    ],
    ids=["channels_last", "permuted", "part", "steps", "expanded", "gaps", "conj", "negative"],
)
@pytest.mark.parametrize("has_segment", [False, True])
def test_dense_strides_are_kept(view, stride, has_segment):
    """Strides without gaps are kept, all else becomes contiguous, and no value changes."""
    tensor = view(torch.rand(4, 3, 400, 40))
    link = Link()
    if has_segment:
        link.send(lambda _: torch.rand(4, 3, 400, 200))
    received = link.send(lambda _: tensor)
    assert torch.equal(received, tensor)
    assert received.stride() == stride
    assert is_in_segment(received)


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize(
    "make",
    [
        lambda size: tv_tensors.Image(torch.rand(3, size)),
        lambda size: torch.nn.Parameter(torch.rand(size)),
        lambda size: torch.nn.Parameter(torch.rand(size), requires_grad=False),
        lambda size: torch.rand(size).as_subclass(Tagged),
        lambda size: torch.rand(size, requires_grad=True),
    ],
    ids=["Image", "Parameter", "frozen", "subclass", "requires_grad"],
)
def test_tensor_classes_are_kept(make, size):
    """A subclass arrives as the same class, and a leaf that requires grad still does."""
    tensor = make(size)
    received = send([tensor])[0]
    assert_same(received, tensor)
    assert received.is_leaf
    assert is_in_segment(received) == (size == LARGE)


@pytest.mark.parametrize("num_boxes", [2, LARGE])
def test_attributes_of_tensors_return(num_boxes):
    """Attributes of subclasses and of plain tensors arrive, those in `__slots__` too."""
    boxes = tv_tensors.BoundingBoxes(
        torch.rand(num_boxes, 4), format="CXCYWH", canvas_size=(num_boxes, 7)
    )
    received = send(boxes)
    assert_same(received, boxes)
    assert received.format is tv_tensors.BoundingBoxFormat.CXCYWH
    assert received.canvas_size == (num_boxes, 7)
    plain, segmentted = torch.rand(num_boxes), torch.rand(num_boxes).as_subclass(Segmentted)
    plain.source, plain.itself, segmentted.where, segmentted.when = "a", plain, 1, 2
    sent = plain
    plain, segmentted = send((plain, segmentted))
    del sent.itself
    assert plain.source == "a"
    assert plain.__dict__.pop("itself") is plain  # And no cycle stays behind.
    assert (segmentted.where, segmentted.when) == (1, 2)


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")],
    ids=["inference", "no_grad", "meta"],
)
def test_modes_change_nothing(mode):
    """Inference mode, gradient modes and a default device change nothing on either side."""
    tensor = torch.rand(LARGE, device="cpu")
    link = Link()
    with mode():
        link.send(lambda _: tensor)
        made = link.send(lambda empty: empty((LARGE,), dtype=torch.float32).copy_(tensor))
        made_small = link.send(lambda empty: empty((3,), dtype=torch.float32).copy_(tensor[:3]))
    assert_same(made, tensor)
    assert_same(made_small, tensor[:3])
    with mode():
        parcel = link.pack(lambda _: [tensor[::2], torch.nn.Parameter(tensor)])
    steps, parameter = link.reader.unpack(parcel)
    assert_same(steps, tensor[::2])
    assert parameter.requires_grad


def test_lazy_negation_is_resolved():
    """A tensor whose memory holds the opposite sign arrives with its own."""
    tensor = torch.tensor([1 + 2j]).conj().imag
    assert tensor.is_neg()
    assert_same(send(tensor), torch.tensor([-2.0]))


def test_computed_gradients_are_refused():
    """A tensor with a gradient history is an error that says what to do, and frees the segment."""
    link = Link()
    link.send(filled(0))
    link.settle()
    with pytest.raises(RuntimeError, match=r"shape \(2,\).*detach\(\)"):
        link.pack(lambda _: torch.ones(2, requires_grad=True) * 2)
    before = len(mappings())
    link.send(filled(1))
    assert len(mappings()) == before


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage):UserWarning")
@pytest.mark.parametrize("size", [4, 200])
def test_other_layouts_return(size):
    """Sparse and nested tensors arrive with their layout."""
    dense = torch.rand(size, size)
    coalesced = dense.to_sparse()
    for sparse in (coalesced, dense.to_sparse_csr(), dense.to_sparse_csc()):
        received = send(sparse)
        assert received.layout is sparse.layout
        assert torch.equal(received.to_dense(), dense)
    assert send(coalesced).is_coalesced()
    twice = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], check_invariants=True)
    assert not send(twice).is_coalesced()
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([dense, dense[1:]], layout=layout)
        received = send(nested)
        assert (type(received), received.layout) == (type(nested), layout)
        assert all(map(torch.equal, received.unbind(), nested.unbind()))


def test_same_leaf_stays_one():
    """A tensor or array that occurs twice in a batch is one object in the received batch."""
    tensor, array = torch.rand(LARGE), np.arange(LARGE)
    received = send({"a": tensor, "b": [tensor, array], "c": array})
    assert received["a"] is received["b"][0]
    assert received["c"] is received["b"][1]


def test_numpy_arrays_return():
    """Arrays arrive with dtype, order and writability; large ones are views of the segment."""
    arrays = {
        "c": np.random.default_rng(0).random((40, 100)),
        "fortran": np.asfortranarray(np.arange(9000.0).reshape(30, 300)),
        "steps": np.arange(90_000)[::2],
        "record": np.zeros(3000, [("x", "f8"), ("y", "i4")]),
        "objects": np.array([{"a": 1}, None, torch.ones(2)], object),
        "small": np.arange(3),
        "empty": np.zeros((0, 3)),
        "scalar": np.float32(3),
        "text": np.array(["a", "bcd"]),
    }
    received = send(arrays)
    for name in arrays.keys() - {"objects"}:
        assert_same(received[name], arrays[name])
    assert received["objects"][0] == {"a": 1}
    assert_same(received["objects"][2], torch.ones(2))
    assert received["fortran"].flags.f_contiguous
    for name in ("c", "fortran", "record"):
        assert is_in_segment(received[name]), name
    assert not is_in_segment(received["small"])
    received["c"][:] = received["small"][0] = 1
    fixed = np.arange(LARGE)
    fixed.setflags(write=False)
    assert not send(fixed).flags.writeable


def test_other_objects_return():
    """Strings, numbers and containers arrive with their types."""
    batch = {
        "pair": Pair("first", [1, 2.5, None]),
        "sample": Sample(torch.rand(LARGE), "a"),
        "ordered": collections.OrderedDict(b=(1,), a={2, 3}),
        "bytes": b"ab" * LARGE,
    }
    received = send(batch)
    assert_same(received["sample"].image, batch["sample"].image)
    assert received["sample"].name == "a"
    for name in ("pair", "ordered", "bytes"):
        assert type(received[name]) is type(batch[name])
        assert received[name] == batch[name]


leaves = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.builds(
        lambda dtype, shape, order, step, fill: (
            torch.full((*shape, 2 * step), fill)[..., ::step].permute(*order(shape)).to(dtype)
        ),
        st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64]),
        st.sampled_from([(), (0,), (2, 3), (40, 110), (7, 300, 4)]),
        st.sampled_from(
            [lambda shape: range(len(shape) + 1), lambda shape: range(len(shape), -1, -1)]
        ),
        st.integers(1, 2),
        st.integers(0, 5),
    ),
    st.builds(
        lambda shape, order, fill: np.full(shape, fill, order=order),
        st.sampled_from([(), (0,), (2, 3), (40, 110)]),
        st.sampled_from("CF"),
        st.integers(0, 5),
    ),
)
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(batches, min_size=2, max_size=4))
def test_any_batches_arrive_unchanged(some_batches):
    """Batches of any structure arrive unchanged one after the other, and stay so while kept."""
    link = Link()
    received = [link.send(lambda _, batch=batch: batch) for batch in some_batches]
    for mine, yours in zip(received, some_batches, strict=True):
        assert_same(mine, yours)


# -- no copy --------------------------------------------------------------------------------------


def test_batch_is_collated_in_place():
    """From the second batch on, collate writes to the memory that the parent's tensors view."""
    link = Link()
    samples = [{"image": torch.rand(3, 64, 64), "label": 3}] * 4
    link.send(lambda empty: default_collate(samples, empty=empty))
    made = []

    def collate(empty):
        batch = default_collate(samples, empty=empty)
        assert is_in_segment(batch["image"])
        made.append(weakref.ref(batch["image"]))
        batch["image"][0, 0, 0, 0] = 7
        return batch

    received = link.send(collate)
    assert made[0]() is None
    assert is_in_segment(received["image"])
    assert received["image"][0, 0, 0, 0] == 7
    assert not is_in_segment(received["label"])


def test_both_sides_share_memory():
    """What one side writes to a segment the other side sees: nothing was copied."""
    link = Link()
    link.send(filled(1))
    kept = []
    received = link.send(lambda empty: kept.append(filled(2)(empty)) or kept[0])
    received["image"][5] = 9
    assert kept[0]["image"][5] == 9


def test_leaves_have_own_storages():
    """Each leaf has an aligned storage of its own size, and is no view of another tensor."""
    received = send([torch.rand(LARGE + 1), torch.rand(2, LARGE)])
    sizes = [leaf.untyped_storage().nbytes() for leaf in received]
    assert sizes == [LARGE * 4 + 4, LARGE * 8]
    assert all(leaf.data_ptr() % 64 == 0 for leaf in received)
    received[0].detach_().resize_(3)


def test_large_pickle_is_in_segment():
    """A batch of many small objects leaves a small message."""
    link = Link()
    texts = [str(number) for number in range(20_000)]
    parcel = link.pack(lambda _: texts)
    assert len(pickle.dumps(parcel)) < 500
    assert link.reader.unpack(parcel) == texts
    assert link.reader.take_freed() == [parcel.segment]


# -- no overwriting -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch,
        lambda batch: batch["image"],
        lambda batch: batch["image"][3:5],
        lambda batch: batch["image"].numpy()[::7],
        lambda batch: batch["image"].untyped_storage(),
        lambda batch: batch["array"],
        lambda batch: batch["array"].reshape(2, -1).T[1:, :1],
        lambda batch: memoryview(batch["array"]),
    ],
    ids=["batch", "tensor", "view", "numpy", "storage", "array", "array_view", "memoryview"],
)
def test_kept_views_never_change(keep):
    """What is kept of a batch does not change while fifty more batches pass."""

    def make(value):
        return filled(value, array=np.full(LARGE, value))

    def bytes_of(kept):
        if isinstance(kept, dict):
            return [bytes_of(leaf) for leaf in kept.values()]
        if isinstance(kept, torch.Tensor):
            kept = kept.numpy()
        return bytes(kept) if isinstance(kept, torch.UntypedStorage) else kept.tobytes()

    link = Link()
    for first in (0, 1):  # A batch that was copied to its segment, and one collated there.
        kept = keep(link.send(make(first)))
        before = bytes_of(kept)
        for value in range(2, 52):
            batch = link.send(make(value))
            assert batch["image"][0] == value
        assert bytes_of(kept) == before
        del kept, batch
        link.settle()


def test_child_may_keep_batches():
    """A segment is not taken again while the child itself has a view of it."""
    link = Link()
    link.send(filled(0))
    kept = []
    link.send(lambda empty: kept.append(filled(1)(empty)) or kept[0])
    view = kept.pop()["image"][2:]
    for value in range(2, 52):
        link.send(filled(value))
    assert (view == 1).all()


def test_failed_collate_keeps_views():
    """A segment freed by `discard` is taken again only when the failed batch is gone."""
    link = Link()
    link.send(filled(0))
    link.writer.begin()
    failed = filled(1)(link.writer.empty)["image"]
    link.writer.discard()
    link.send(filled(2))
    assert (failed == 1).all()
    del failed
    before = len(mappings())
    for value in range(10):
        link.send(filled(value))
    assert len(mappings()) == before


def test_views_outlive_both_sides():
    """A kept tensor is good after reader, writer and the rest of the batch are gone."""
    link = Link()
    link.send(filled(0))
    view = link.send(filled(3))["image"][10:20]
    del link
    gc.collect()
    assert len(mappings()) == 1
    assert (view == 3).all()
    view.fill_(4)
    del view
    assert len(mappings()) == 0


def test_views_end_in_threads():
    """Segments are freed from whichever threads drop the last views, each one once."""
    link = Link()
    num_segments = 8
    batches = [link.send(filled(value)) for value in range(num_segments)]
    assert link.reader.take_freed() == []
    barrier = threading.Barrier(num_segments)

    def drop(batch):
        barrier.wait()
        batch.clear()

    threads = [threading.Thread(target=drop, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    freed = link.reader.take_freed()
    assert sorted(freed) == sorted(set(freed))
    assert len(freed) == num_segments


# -- how many segments there are ------------------------------------------------------------------


def test_segments_are_reused():
    """A loop that keeps nothing needs as many segments as are in use at once."""
    link = Link()
    batch = link.send(filled(0))
    for value in range(500):
        batch = link.send(filled(value))
        # The loop's batch, the next one, and one that the child does not know to be free yet.
        assert len(mappings()) <= 2 * 3
        assert memfds() <= 3 * 3
    assert batch["image"][0] == 499


def test_last_freed_is_first():
    """The segment that was freed last is taken first: its memory is still in the cache."""
    link = Link()
    batches = [link.send(filled(value)) for value in range(5)]
    for place in (1, 3, 0):
        batches[place].clear()
        link.settle()
    first, second = (link.pack(filled(value)).segment for value in range(2))
    assert (first, second) == (1, 4)


def test_unused_segments_are_dropped():
    """Segments that a loop needed for a while are given back some time after it let go of them."""
    link = Link()
    batches = [link.send(filled(value)) for value in range(20)]
    assert len(mappings()) == 40
    batches.clear()
    link.settle()
    for value in range(200):
        link.send(filled(value))
    assert len(mappings()) <= 4
    assert memfds() <= 4


def test_segments_grow_with_batches():
    """Larger batches get larger segments, and the smaller segments go when they are freed."""
    link = Link()
    kept = link.send(filled(1))
    for factor in (1, 2, 3, 5, 8):
        for value in range(5):
            batch = link.send(filled(value, num_bytes=LARGE * 4 * factor))
            assert (batch["image"] == value).all()
            assert is_in_segment(batch["image"])
    assert (kept["image"] == 1).all()
    del kept, batch
    for _ in range(2):  # Freed in the child, then told to the parent.
        link.settle()
        link.send(filled(2, num_bytes=LARGE * 4 * 8))
    sizes = {stop - start for start, stop in mappings()}
    assert len(sizes) == 1
    assert min(sizes) >= LARGE * 4 * 8


def test_growth_drops_free_segments():
    """When a larger segment is needed, the free segments are too small and are dropped."""
    link = Link()
    batches = [link.send(filled(value)) for value in range(4)]
    batches.clear()
    link.settle()
    link.send(filled(1, num_bytes=LARGE * 8))
    assert len(mappings()) == 2
    assert link.send(filled(2, num_bytes=LARGE * 8))["image"][0] == 2
    assert {stop - start >= LARGE * 8 for start, stop in mappings()} == {True}


def test_slightly_larger_batches_fit():
    """Batches whose sizes differ by a few percent need no new segment."""
    link = Link()
    segments = {
        link.pack(filled(1, num_bytes=num_bytes)).capacity
        for num_bytes in (1_000_000, 1_050_000, 1_100_000, 900_000)
    }
    assert len(segments) == 1
    assert max(segments) % 4096 == 0


def test_unused_memory_fits_later():
    """Segments grow until a batch is collated in place that needs other memory too."""
    link = Link()

    def make(empty):
        places = [empty((LARGE,), dtype=torch.float32) for _ in range(4)]
        made.append(is_in_segment(places[-1]))
        return places[-1]

    made = []
    for _ in range(8):
        link.send(make)
    assert made == sorted(made)
    assert made[4:] == [True] * 4


def test_small_batches_need_no_segment():
    """A batch without large memory travels in the message, also beside a current segment."""
    link = Link()
    assert link.pack(lambda _: torch.rand(9)).segment is None
    link.send(filled(1))
    link.settle()
    before = mappings()
    for _ in range(10):
        parcel = link.pack(lambda empty: empty((3,), dtype=torch.float64).fill_(2))
        assert parcel.segment is None
        assert_same(link.reader.unpack(parcel), torch.full((3,), 2.0, dtype=torch.float64))
    assert mappings() == before


def test_small_leaves_free_segments():
    """Kept labels do not keep the segment of their images."""
    link = Link()
    more = {"tokens": torch.arange(LARGE // 8 - 1), "array": np.zeros(LARGE - 8, np.uint8)}
    batches = [link.send(filled(value, **more)) for value in range(50)]
    for batch in batches:
        del batch["image"]
    assert not any(map(is_in_segment, batches[0].values()))
    assert len(link.reader.take_freed()) == 50
    assert torch.cat([batch["label"] for batch in batches]).tolist() == list(range(50))
    for leaf in batches[0].values():
        leaf[0] = 5


def test_discarded_parcels_free_segments():
    """A parcel that is not delivered frees its segment, and one that is not sent does too."""
    link = Link()
    for _ in range(20):
        link.reader.discard(link.pack(filled(1)))
        link.settle()
    assert len(mappings()) <= 4
    for _ in range(20):
        link.writer.begin()
        parcel, _ = link.writer.pack(filled(2, num_bytes=LARGE * 8)(link.writer.empty))
        link.writer.discard(parcel)  # The first one would tell the parent to forget segments.
    assert link.send(filled(3))["image"][0] == 3
    assert len(mappings()) == 2


def test_unsent_segments_are_sent_later():
    """A segment that the parent never got goes with the descriptor the next time."""
    link = Link()
    parcel, fd = link.writer.pack(filled(1)(torch.empty))
    assert fd is not None
    link.writer.discard(parcel)
    assert link.send(filled(2))["image"][0] == 2
    link.settle()
    assert link.pack(filled(3)).segment == parcel.segment


def registering(ranges):
    """Return a function that registers memory: its range is in the list until it is over."""

    def register(address, num_bytes):
        ranges.append((address, address + num_bytes))

        def unregister():
            assert ranges[0] in mappings()
            ranges.remove((address, address + num_bytes))

        return unregister

    return register


def test_segments_are_registered_once():
    """A segment is registered when it is first held, until it is unmapped."""
    link, ranges = Link(), []
    link.send(filled(0))
    for value in range(3):
        held = link.reader.hold(link.pack(filled(value)), registering(ranges))
        assert held.is_registered
        assert is_in_segment(held.unpack()["image"])
        assert len(ranges) == 1
        assert ranges[0] in mappings()
        del held
        link.settle()
    link.reader = SegmentReader(SegmentLimit(*NO_LIMIT))
    assert ranges == []


def test_views_keep_segments_registered():
    """A segment is registered as long as anything views it, and not even while it is mapped."""
    link, ranges = Link(), []
    image = link.reader.hold(link.pack(filled(3)), registering(ranges)).unpack()["image"]
    link.reader = None
    assert len(ranges) == 1
    assert image[0] == 3
    del image
    assert ranges == []


def test_segments_can_be_unregistered():
    """A segment that is held without a device is not registered any more."""
    link, ranges = Link(), []
    link.send(filled(0))
    link.reader.hold(link.pack(filled(1)), registering(ranges))
    link.settle()
    assert len(ranges) == 1
    held = link.reader.hold(link.pack(filled(2)))
    assert not held.is_registered
    assert ranges == []


def test_held_segments_are_not_freed():
    """A segment is not freed while it is held, whatever has become of the batch."""
    link = Link()
    held = link.reader.hold(link.pack(filled(1)))
    assert not held.is_viewed()
    batch = held.unpack()
    assert held.is_viewed()
    copy = held.copy()
    assert not is_in_segment(copy["image"])
    del batch
    assert not held.is_viewed()
    assert link.reader.take_freed() == []
    del held
    assert link.reader.take_freed() == [1]
    assert copy["image"][0] == 1


def test_arrays_count_as_views():
    """A NumPy array of a batch views its segment, and so do slices of it."""
    link = Link()
    held = link.reader.hold(link.pack(lambda _: np.ones(LARGE)))
    part = held.unpack()[3:]
    assert held.is_viewed()
    del part
    assert not held.is_viewed()


def test_nothing_in_dev_shm():
    """Segments have no name in /dev/shm."""
    before = set(Path("/dev/shm").iterdir())
    link = Link()
    kept = [link.send(filled(value)) for value in range(5)]
    assert set(Path("/dev/shm").iterdir()) <= before
    assert len(kept) == 5


# -- the limit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [(10**9, 3), (LARGE * 4 * 3 + LARGE * 3, 10**9)])
def test_kept_batches_are_copied(limit):
    """Beyond the limit batches are copied, with one warning, until segments come free again."""
    link = Link(SegmentLimit(*limit))
    kept = [link.send(filled(value)) for value in range(3)]
    with pytest.warns(UserWarning, match=r"keeps 3 batches.*clone\(\)") as warned:
        kept += [link.send(filled(value)) for value in range(3, 30)]
    assert len(warned) == 1
    assert [is_in_segment(batch["image"]) for batch in kept] == [True] * 3 + [False] * 27
    assert [batch["image"].mean() for batch in kept] == list(range(30))
    kept[3]["image"].fill_(1)
    assert len(mappings()) <= 2 * 4
    kept[1].clear()
    link.settle()
    assert is_in_segment(link.send(filled(1))["image"])


def test_limit_counts_all_children():
    """The readers of a loader share one limit and one warning."""
    limit = SegmentLimit(10**9, 2)
    one, other = Link(limit), Link(limit)
    kept = [link.send(filled(value)) for value, link in enumerate((one, other))]
    with pytest.warns(UserWarning, match="At most 2 batches") as warned:
        kept += [link.send(filled(2)) for link in (one, other)]
    assert len(warned) == 1
    assert [is_in_segment(batch["image"]) for batch in kept] == [True, True, False, False]


def test_warning_as_error_frees():
    """Where warnings are errors, the segment of the batch is freed all the same."""
    link = Link(SegmentLimit(10**9, 0))
    parcel = link.pack(filled(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="keeps 0 batches"):
            link.reader.unpack(parcel)
    assert link.reader.take_freed() == [parcel.segment]


# -- threads and processes ------------------------------------------------------------------------


def test_threads_share_no_segment():
    """Four threads that collate at once, all holding a segment at the same time, never mix."""
    link = Link()
    link.send(filled(0))
    num_threads, num_rounds = 4, 50
    filling = threading.Barrier(num_threads)
    lock = threading.Lock()  # The parent's end is used by one thread at a time.
    wrong = []

    def work(thread):
        for number in range(num_rounds):
            value = thread * 1000 + number
            link.writer.begin()
            image = link.writer.empty((LARGE,), dtype=torch.float32)
            image.fill_(value)
            filling.wait()  # Every thread has filled its segment before any looks.
            if not (image == value).all() or not is_in_segment(image):
                wrong.append(value)
            parcel, fd = link.writer.pack(image)
            del image
            with lock:
                if fd is not None:
                    link.reader.map(parcel.segment, parcel.capacity, os.dup(fd))
                received = link.reader.unpack(parcel)
            filling.wait()  # Every thread has received before any frees.
            if not (received == value).all():
                wrong.append(value)
            del received
            with lock:
                link.settle()

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(mappings()) <= 2 * 2 * num_threads


def child_of(parents_end):
    """Send 200 batches, a new one for each message of the parent."""
    writer = SegmentWriter()
    for number in range(200):
        freed, limit = pickle.loads(parents_end.recv(1 << 16))
        writer.free(freed)
        writer.begin()
        samples = [(torch.full((LARGE,), float(number)), number)] * (4 if number < limit else 6)
        parcel, fd = writer.pack(default_collate(samples, empty=writer.empty))
        fds = [fd] if fd is not None else []
        socket.send_fds(parents_end, [pickle.dumps(parcel)], fds)
    assert memfds() <= 12


def test_forked_child_sends_batches():
    """A child process sends 200 batches over a socket; kept ones do not change."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # OpenMP's threads are not in the forked child.
            child_of(theirs)
            os._exit(0)
        finally:
            os._exit(1)
    theirs.close()
    reader = SegmentReader(SegmentLimit(*NO_LIMIT))
    kept, num_fds = {}, 0
    with ours:
        for number in range(200):
            ours.send(pickle.dumps((reader.take_freed(), 100)))
            message, fds, _, _ = socket.recv_fds(ours, 1 << 16, 1)
            parcel = Parcel(*pickle.loads(message))
            num_fds += len(fds)
            for fd in fds:
                reader.map(parcel.segment, parcel.capacity, fd)
            image, label = reader.unpack(parcel)
            assert is_in_segment(image)
            assert image.shape[0] == (4 if number < 100 else 6)
            assert label.tolist() == [number] * image.shape[0]
            if number % 40 == 7:
                kept[number] = image[1:3]
            del image
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert num_fds <= 2 * (len(kept) + 3)
    del reader
    assert all((view == number).all() for number, view in kept.items())
    kept.clear()
    assert (len(mappings()), memfds()) == (0, 0)


def test_forked_readers_do_no_harm():
    """A forked process that drops an inherited reader and batch changes nothing here."""
    link = Link()
    link.send(filled(0))
    batch = link.send(filled(1))
    pid = os.fork()
    if pid == 0:
        try:
            batch.clear()
            del link, batch
            gc.collect()
            os._exit(len(mappings()))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert link.reader.take_freed() == []
    for value in range(2, 10):
        link.send(filled(value))
    assert (batch["image"] == 1).all()


def test_forked_process_may_keep_batches():
    """A batch stays as it is in a forked process, while the loop here goes on; memory does not."""
    link = Link()
    link.send(filled(0))
    batch = link.send(filled(1))
    receive, send_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(receive, 1)
            os._exit(0 if (batch["image"] == 1).all() else 1)
        finally:
            os._exit(99)
    del batch
    for value in range(2, 10):
        link.send(filled(value))
    os.write(send_end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(receive)
    os.close(send_end)
    assert len(mappings()) <= 4
