"""`fuse`: torchvision's transforms, done while decoding and once per batch.

What `fuse=True` makes is compared with what the same loader makes without it, from the same random
numbers. Pixels may differ a little, as another library decodes and resizes. Boxes and flips may
not: they are compared on images whose pixels say where they are.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import warnings

import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest
import torch
import torchvision.datasets
import torchvision.transforms.functional as F  # noqa: N812 (torchvision's own name for it)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, default_collate
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import CIFAR10, DatasetFolder, Food101, ImageFolder, OxfordIIITPet
from torchvision.models import ResNet18_Weights
from torchvision.transforms import InterpolationMode, v2

from spdl_torch import DataLoader, ImageError, ImageLoader, ReplaceBadSamples, RetryLoad

from .images import encoded, picture, tiered
from .simulated import TYPE, Simulator, at_random, copies_first, copies_last, everything_last
from .test_parity import assert_same
from .tiers import pairwise, sampled

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZES = [(120, 160), (160, 120), (110, 150), (200, 100), (96, 96), (130, 171)]
FLOAT = torch.float32

JOINT = {
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}


def smooth(height, width, seed=0):
    return PIL.Image.fromarray(picture(height, width, seed=seed, has_edges=False))


def as_jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **{"quality": 95, "subsampling": 0, **options})
    return file.getvalue()


def folder_of(root, files):
    """An image folder of files whose names give their order, in two classes."""
    for number, data in enumerate(files):
        path = root / "ab"[number >= len(files) // 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Smooth pictures of several sizes."""
    files = [as_jpeg(smooth(*size, seed=seed)) for seed, size in enumerate(SIZES)]
    return folder_of(tmp_path_factory.mktemp("pictures"), files)


@pytest.fixture(scope="module")
def small_root(tmp_path_factory):
    """Three small pictures, quickly read."""
    files = [as_jpeg(smooth(*size, seed=seed)) for seed, size in enumerate([(48, 64), (60, 50)])]
    return folder_of(tmp_path_factory.mktemp("small"), files)


def folder(root, *chain, compose=v1.Compose, **arguments):
    return ImageFolder(root, compose(chain) if chain else None, **arguments)


def read(dataset, fuse, **arguments):
    arguments = {"batch_size": 3, "seed": 5} | arguments
    with DataLoader(dataset, fuse=fuse, **arguments) as loader:
        return list(loader)


def said(dataset, fuse=True, **arguments):
    """What the plan says about transforms."""
    loader = DataLoader(dataset, fuse=fuse, **{"batch_size": 2, **arguments})
    return str(loader.plan).partition("\n")[2]


def outcome(dataset, fuse, **arguments):
    """What a loader gives, or the type of its error."""
    try:
        return read(dataset, fuse, **arguments)
    except Exception as error:
        return type(error)


def assert_similar(fused, unfused, levels, mean=0.5, worst=3.0):
    """Compare batches; `levels` says how many levels of 255 one unit of their values has."""
    assert len(fused) == len(unfused)
    for one, other in zip(fused, unfused, strict=True):
        assert type(one) is type(other)
        assert_same(one[1:], other[1:])
        ours, theirs = one[0], other[0]
        assert type(ours) is type(theirs)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.stride() == theirs.stride()
        difference = (ours.double() - theirs.double()).abs() * torch.as_tensor(levels)
        assert difference.mean() <= mean
        assert difference.max() <= worst + 0.001  # Of floats.


def training(version, mode="bilinear"):
    crop = [
        version.RandomResizedCrop(48, interpolation=JOINT[mode]),
        version.RandomHorizontalFlip(),
    ]
    return [*crop, *(classic() if version is v1 else modern())]


def validation(version, mode="bilinear"):
    crop = [version.Resize(64, interpolation=JOINT[mode]), version.CenterCrop(48)]
    return [*crop, *(classic() if version is v1 else modern())]


def classic():
    return [v1.ToTensor(), v1.Normalize(MEAN, STD)]


def modern(dtype=FLOAT):
    return [v2.ToImage(), v2.ToDtype(dtype, scale=True), v2.Normalize(MEAN, STD)]


NORMALIZED = 255 * torch.tensor(STD, dtype=torch.float64).view(3, 1, 1)


# -- fused against unfused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "make", "mode", "num_workers"),
    pairwise([v1, v2], [training, validation], ["bilinear", "bicubic"], [0, 2]),
)
def test_pixels_differ_by_little(root, version, make, mode, num_workers):
    """The batches of a fused loader are those of an unfused one, but for half a level."""
    dataset = folder(root, *make(version, mode), compose=version.Compose)
    arguments = {"shuffle": True, "num_workers": num_workers}
    fused = read(dataset, True, **arguments)
    assert_similar(fused, read(dataset, False, **arguments), NORMALIZED)


@pytest.mark.parametrize("place", range(4))
def test_image_tensors_before_the_head(root, place):
    """What converts to a tensor may come first, between or last."""
    chain = [v2.RandomResizedCrop(40), v2.RandomHorizontalFlip(), v2.ToDtype(FLOAT, scale=True)]
    for convert in (v2.ToImage(), v2.PILToTensor(), v1.PILToTensor()):
        parts = [*chain[:place], convert, *chain[place:]]
        dataset = folder(root, *(parts if place < 3 else [*chain[:2], convert, v2.RGB(), chain[2]]))
        assert "while decoding" in said(dataset)
        assert_similar(read(dataset, True), read(dataset, False), 255)


def test_images_stay_images(root):
    """Without a conversion to float, batches of bytes are alike too."""
    dataset = folder(root, v2.Resize((40, 50)), v2.ToImage())
    assert_similar(read(dataset, True), read(dataset, False), 1)


def test_size_may_be_kept(root):
    """A head that only crops or flips gives the decoded pixels."""
    for chain in ([v1.RandomHorizontalFlip()], [v1.RandomCrop(90), v2.RandomHorizontalFlip()]):
        dataset = folder(root, *chain, v1.ToTensor())
        batches = [read(dataset, fuse, batch_size=1) for fuse in (True, False)]
        assert_similar(*batches, 255, mean=0.1, worst=3)


# -- boxes and flips ------------------------------------------------------------------------------


def gradients(height, width):
    """Red and blue say the row, green the column, two levels for each pixel."""
    rows, columns = 2 * np.mgrid[:height, :width].astype(np.uint8)
    return PIL.Image.fromarray(np.stack([rows, columns, rows], axis=2))


def corners(image):
    """The mean colours of the corners: where in the original they are, to half a pixel."""
    image = image.double()
    part = image.shape[-2] // 8, image.shape[-1] // 8
    rows = (slice(part[0]), slice(-part[0], None))
    columns = (slice(part[1]), slice(-part[1], None))
    return torch.stack(
        [image[..., row, column].mean((-2, -1)) for row in rows for column in columns]
    )


def are_at_one_place(one, other):
    return bool((corners(one) - corners(other)).abs().max() < 0.9)


@pytest.fixture(scope="module")
def gradient_root(tmp_path_factory):
    files = []
    for number in range(12):
        file = io.BytesIO()
        gradients(100 + 2 * number, 125 - 3 * number).save(file, "PNG")
        files.append(file.getvalue())
    return folder_of(tmp_path_factory.mktemp("gradients"), files)


@pytest.mark.parametrize("edge", range(4))
@pytest.mark.parametrize("by", [-1, 1])
def test_wrong_box_would_be_seen(edge, by):
    """A box that is wrong by a pixel, or a missing flip, is another place."""
    image = gradients(115, 105)
    box = [20, 15, 60, 55]
    wrong = list(box)
    wrong[edge] += by
    seen = [F.pil_to_tensor(F.resized_crop(image, *each, [28, 32])) for each in (box, wrong)]
    assert are_at_one_place(seen[0], seen[0])
    assert not are_at_one_place(*seen)
    assert not are_at_one_place(seen[0], seen[0].flip(-1))


HEADS = {
    "random part": [lambda v: v.RandomResizedCrop((28, 32)), lambda v: v.RandomHorizontalFlip()],
    "flip first": [lambda v: v.RandomHorizontalFlip(), lambda v: v.RandomResizedCrop(32)],
    "tall parts": [lambda v: v.RandomResizedCrop(32, ratio=(0.1, 0.2), scale=(0.5, 1))],
    "random crop": [lambda v: v.RandomCrop((60, 50)), lambda v: v.RandomHorizontalFlip()],
    "crop of resized": [
        lambda v: v.Resize(75),
        lambda v: v.RandomCrop((60, 75)),
        lambda v: v.RandomHorizontalFlip(),
    ],
    "flip before crop": [
        lambda v: v.Resize((70, 75)),
        lambda v: v.RandomHorizontalFlip(),
        lambda v: v.RandomCrop((60, 51)),
    ],
    "two flips and crops": [
        lambda v: v.RandomHorizontalFlip(0.7),
        lambda v: v.Resize((71, 76)),
        lambda v: v.RandomHorizontalFlip(),
        lambda v: v.RandomCrop((60, 67)),
        lambda v: v.RandomHorizontalFlip(),
        lambda v: v.CenterCrop((51, 52)),
    ],
    "crop before resize": [
        lambda v: v.CenterCrop((81, 75)),
        lambda v: v.RandomHorizontalFlip(),
        lambda v: v.Resize((45, 50)),
    ],
    "center of resized": [lambda v: v.Resize(51), lambda v: v.CenterCrop(44)],
    "longer side": [lambda v: v.Resize(51, max_size=55), lambda v: v.CenterCrop(40)],
}


@pytest.mark.parametrize("version", [v1, v2])
@pytest.mark.parametrize("name", HEADS)
def test_boxes_and_flips_are_the_same(gradient_root, name, version):
    """Crops are at the same place of the image, and flips are the same."""
    dataset = folder(gradient_root, *(make(version) for make in HEADS[name]), v1.ToTensor())
    arguments = {"batch_size": 1, "shuffle": True}
    pairs = zip(read(dataset, True, **arguments), read(dataset, False, **arguments), strict=True)
    for (ours, label), (theirs, expected_label) in pairs:
        assert torch.equal(label, expected_label)
        assert ours.shape == theirs.shape
        assert are_at_one_place(255 * ours, 255 * theirs)
    assert "For each sample" not in said(dataset)


def test_draws_are_those_of_torch(gradient_root):
    """Without a seed and workers, crops are those that torch's loader draws."""
    dataset = folder(gradient_root, *training(v1)[:3])
    torch.manual_seed(3)
    theirs = list(TorchDataLoader(dataset, batch_size=4, shuffle=True))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    ours = list(DataLoader(dataset, batch_size=4, shuffle=True, fuse=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert_similar(ours, theirs, 255, worst=10)
    for (one, _), (other, _) in zip(ours, theirs, strict=True):
        for pair in zip(255 * one, 255 * other, strict=True):
            assert are_at_one_place(*pair)


# -- the same bits ---------------------------------------------------------------------------------


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def tails():
    """Every kind of tail that is known."""
    yield [v1.ToTensor()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The transform `ToTensor")
        yield [v2.ToTensor()]
    for dtype, to_tensor, convert in itertools.product(
        DTYPES, [v1.PILToTensor, v2.PILToTensor], [v1.ConvertImageDtype, v2.ConvertImageDtype]
    ):
        yield [to_tensor(), convert(dtype)]
        yield [to_tensor(), convert(dtype), v1.Normalize(MEAN, STD)]
    for dtype, scale in itertools.product(DTYPES, [True, False]):
        yield [v2.ToImage(), v2.ToDtype(dtype, scale=scale)]
        yield [v2.ToImage(), v2.ToDtype(dtype, scale=scale), v2.Normalize(MEAN, STD)]
        yield [v2.ToImage(), v2.ToDtype(dtype, scale=scale), v2.ToPureTensor()]
    for dtype in DTYPES:
        yield [*classic(), v1.ConvertImageDtype(dtype)]
        yield [*modern(), v2.ToDtype(dtype, scale=True), v2.ToPureTensor()]
        yield [v2.ToImage(), v2.ToPureTensor(), v2.ToDtype(dtype), v1.Normalize([3], [0.7])]
    yield [v1.ToTensor(), v1.Normalize([0.5], [0.5])]
    yield [v1.ToTensor(), v1.Normalize((0, 1, 2), (1, 2, 0.3), inplace=True)]
    yield [v1.ToTensor(), v2.Normalize([0.5], STD), v1.Normalize(MEAN, [2])]
    yield [*modern(torch.float64), v2.ToDtype(torch.float16), v2.ConvertImageDtype(FLOAT)]
    yield [v1.ToTensor(), v1.ConvertImageDtype(torch.float64), v1.Normalize(MEAN, STD)]


def tail_name(tail):
    names = [type(part).__name__ + str(getattr(part, "dtype", ""))[5:] for part in tail]
    return "-".join(names)


@pytest.mark.parametrize("tail", list(tails()), ids=tail_name)
def test_exact_has_the_same_bits(small_root, tail):
    """With fuse="exact" every tail gives the same bits, from PIL images and from tensors."""
    dataset = folder(small_root, v1.Resize((20, 30)), *tail)
    assert f"{type(tail[-1]).__name__} once per batch" in said(dataset, "exact")
    assert_same(read(dataset, "exact"), read(dataset, False))
    dataset = folder(small_root, v2.Resize((20, 30)), *tail, loader=ImageLoader())
    assert_same(outcome(dataset, "exact"), outcome(dataset, False))


def test_default_dtype_is_respected(small_root):
    """ToTensor converts to torch's default dtype."""
    dataset = folder(small_root, v1.Resize((20, 30)), *classic())
    torch.set_default_dtype(torch.float64)
    try:
        batches = read(dataset, "exact"), read(dataset, False), read(dataset, True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(*batches[:2])
    assert batches[2][0][0].dtype == torch.float64


def cifar(root, *chain):
    """Ten pictures in CIFAR10's files."""
    random = np.random.default_rng(0)
    path = root / "cifar-10-batches-py"
    path.mkdir(exist_ok=True)
    for name, _ in CIFAR10.train_list:
        data = {"data": random.integers(0, 256, (2, 3072), np.uint8), "labels": [3, 5]}
        (path / name).write_bytes(pickle.dumps(data))
    (path / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return CIFAR10(root, transform=v1.Compose(chain))


@pytest.mark.parametrize("fuse", [True, "exact"])
@pytest.mark.parametrize("make", [classic, modern])
def test_arrays_have_the_same_bits(tmp_path, monkeypatch, make, fuse):
    """A dataset that holds arrays has its tail fused, and the same bits."""
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    head = [v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip()]
    dataset = cifar(tmp_path, *head, *make())
    assert "once per batch" in said(dataset, fuse)
    assert "while decoding" not in said(dataset, fuse)
    arguments = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    assert_same(read(dataset, fuse, **arguments), read(dataset, False, **arguments))


# -- any chain -------------------------------------------------------------------------------------


class Brighter:
    """A user's own transform, for whatever it gets."""

    def __call__(self, image):
        return F.adjust_brightness(image, 1.2)


class MyResize(v1.Resize):
    def forward(self, image):
        return super().forward(image.transpose(0) if isinstance(image, PIL.Image.Image) else image)


class Negative(torch.nn.Module):
    def forward(self, image):
        return F.invert(image)


VERSIONS = st.sampled_from([v1, v2])
NEAR = st.sampled_from([8, 17, 24, 33])
PAIRS = st.tuples(NEAR, NEAR)
LINEAR = st.sampled_from(list(JOINT.values()))

KNOWN = st.one_of(
    st.builds(lambda v, n, m: v.Resize(n, m), VERSIONS, st.one_of(NEAR, PAIRS), LINEAR),
    st.builds(lambda v, n: v.Resize([n], max_size=36), VERSIONS, NEAR),
    st.builds(lambda v, n, m: v.RandomResizedCrop(n, interpolation=m), VERSIONS, NEAR, LINEAR),
    st.builds(lambda v, n: v.RandomResizedCrop(n, scale=(0.5, 0.9), ratio=(1, 1)), VERSIONS, PAIRS),
    st.builds(lambda v, n: v.CenterCrop(n), VERSIONS, st.one_of(NEAR, PAIRS, st.just(70))),
    st.builds(lambda v, n: v.RandomCrop(n), VERSIONS, st.one_of(NEAR, PAIRS, st.just(50))),
    st.builds(lambda v, p: v.RandomHorizontalFlip(p), VERSIONS, st.sampled_from([0.5, 0, 1])),
)
CONVERSIONS = st.sampled_from(
    [v1.PILToTensor, v2.PILToTensor, v2.ToImage, v2.RGB, v2.Identity, v2.ToPureTensor]
).map(lambda cls: cls())
UNKNOWN = st.one_of(
    st.builds(lambda v: v.ColorJitter(0.2, 0.2), VERSIONS),
    st.builds(lambda v: v.Lambda(F.hflip), VERSIONS),
    st.builds(Brighter),
    st.builds(Negative),
    st.builds(MyResize, PAIRS),
    st.builds(lambda v: v.RandomVerticalFlip(), VERSIONS),
    st.builds(lambda v, n: v.Grayscale(n), VERSIONS, st.sampled_from([1, 3])),
    st.builds(lambda v: v.Pad(3), VERSIONS),
    st.builds(lambda v: v.RandomRotation(20), VERSIONS),
    st.builds(lambda v: v.RandomCrop(24, padding=4), VERSIONS),
    st.builds(lambda v: v.RandomCrop(64, pad_if_needed=True), VERSIONS),
    st.builds(lambda v: v.Resize(20, InterpolationMode.NEAREST), VERSIONS),
    st.builds(lambda v: v.Resize((20, 30), antialias=False), VERSIONS),
    st.builds(lambda v: v.RandomApply([v.RandomHorizontalFlip(), v.Pad(1)], 0.5), VERSIONS),
)
WILD = st.one_of(
    st.builds(lambda v: v.RandAugment(), VERSIONS),
    st.builds(lambda v: v.TrivialAugmentWide(), VERSIONS),
)
"""Some of their operations make large differences of small ones."""
ENDS = st.sampled_from(
    [
        (255, lambda: [v1.ToTensor()]),
        (255 / 4, lambda: [v1.ToTensor(), v1.Normalize([0.5], [0.25])]),
        (255 / 4, lambda: [v1.ToTensor(), v1.Normalize([0.5], [0.25]), v1.RandomErasing(1.0)]),
        (1, lambda: [v1.PILToTensor()]),
        (255, lambda: [v2.PILToTensor(), v2.ConvertImageDtype(torch.float64)]),
        (255, lambda: [v2.ToImage(), v2.ToDtype(torch.float64, scale=True)]),
        (1, lambda: [v2.ToImage(), v2.ToDtype(FLOAT), v2.ToPureTensor()]),
        (51, lambda: [v2.ToImage(), v2.ToDtype(FLOAT, scale=True), v2.Normalize([0], [0.2])]),
        (255, lambda: [v2.ToDtype(FLOAT, scale=True)]),
        (255, lambda: [v1.ConvertImageDtype(FLOAT)]),
        (1, list),
    ]
)


@st.composite
def chains(draw):
    """A chain, how many levels a unit is, and whether it keeps small differences small."""
    middle = draw(st.lists(st.one_of(KNOWN, KNOWN, KNOWN, CONVERSIONS, UNKNOWN), max_size=4))
    if draw(st.booleans()):  # So that samples can be collated.
        place = draw(st.integers(0, len(middle)))
        middle.insert(place, draw(st.sampled_from([v1, v2])).RandomResizedCrop(32))
    is_wild = draw(st.integers(0, 5)) == 0
    if is_wild:
        middle.append(draw(WILD))
    if middle and draw(st.booleans()):
        cut = draw(st.integers(0, len(middle) - 1))
        nested = draw(st.sampled_from([v1.Compose, v2.Compose]))
        middle = [*middle[:cut], nested(middle[cut:])]
    levels, end = draw(ENDS)
    return [*middle, *end()], levels, is_wild


def check_chain(root, case, num_workers):
    chain, levels, is_wild = case
    dataset = ImageFolder(root, v1.Compose(chain))
    arguments = {"batch_size": 1, "num_workers": num_workers, "shuffle": True}
    with warnings.catch_warnings():
        # PIL images are always resized antialiased, which is not said by a decoder.
        warnings.filterwarnings("ignore", message="Anti-alias option is always applied")
        unfused = outcome(dataset, False, **arguments)
        fused = outcome(dataset, True, **arguments)
        exact = outcome(dataset, "exact", **arguments)
    assert_same(exact, unfused)
    if isinstance(unfused, type):
        assert fused is unfused
        return
    limits = (1e9, 1e9) if is_wild else (2.5, 40)
    assert_similar(fused, unfused, levels, *limits)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chains())
def test_any_chain_is_equivalent(small_root, case):
    """Any chain of transforms gives the same errors, shapes and types, and similar pixels."""
    check_chain(small_root, case, 0)


@pytest.mark.exhaustive
@settings(
    max_examples=600,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chains(), st.sampled_from([0, 2]))
def test_many_chains_are_equivalent(small_root, case, num_workers):
    """The same for many chains, with and without workers."""
    check_chain(small_root, case, num_workers)


# -- what is left alone ----------------------------------------------------------------------------


class OwnDataset(ImageFolder):
    """Reads in its own way."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, -label


def opened_by_pil(path):
    return PIL.Image.open(path).convert("RGB")


class OtherLoader(ImageLoader):
    def __call__(self, path):
        return super().__call__(path).flip(-1)


def with_hook():
    flip = v2.RandomHorizontalFlip(1.0)
    flip.register_forward_hook(lambda module, inputs, result: F.invert(result))
    return flip


def with_pre_hook():
    normalize = v1.Normalize(MEAN, STD)
    normalize.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    return normalize


def with_own_forward():
    crop = v1.CenterCrop(30)
    crop.forward = lambda image: F.crop(image, 0, 0, 30, 30)
    return crop


def with_own_params():
    crop = v1.RandomResizedCrop(30)
    crop.get_params = lambda image, scale, ratio: (1, 2, 33, 44)
    return crop


class HalfNormalize(v1.Normalize):
    def forward(self, tensor):
        return super().forward(tensor) / 2


def stacked(samples):
    return default_collate(samples)


RESIZE = v1.Resize((30, 40))

NO_HEAD = {
    "subclass": [MyResize((30, 40))],
    "forward hook": [v1.Resize((30, 40)).train(), with_hook()],
    "own forward": [with_own_forward()],
    "own get_params": [with_own_params()],
    "nearest": [v1.Resize((30, 40), InterpolationMode.NEAREST)],
    "not antialiased": [v2.ToImage(), v2.Resize((30, 40), antialias=False), v2.ToPureTensor()],
    "padding": [v1.RandomCrop((40, 40), padding=4)],
    "reflected": [v2.RandomCrop((40, 40), pad_if_needed=True, padding_mode="reflect")],
    "user's": [Brighter(), RESIZE],
    "function": [F.hflip, RESIZE],
    "random apply": [v1.RandomApply([RESIZE], 1.0)],
    "vertical flip": [v2.RandomVerticalFlip(), RESIZE],
}


@pytest.mark.parametrize("name", NO_HEAD)
def test_unknown_head_is_left_alone(small_root, name):
    """What is not known exactly is called as it is, and the plan says so."""
    chain = NO_HEAD[name]
    convert = [v1.ToTensor()] if name != "not antialiased" else [v1.ConvertImageDtype(FLOAT)]
    dataset = folder(small_root, *chain, *convert)
    words = said(dataset)
    if name == "forward hook":  # The resize before it is fused.
        assert words.startswith("Fused: Resize while decoding; ToTensor once per batch.")
        assert "For each sample: RandomHorizontalFlip." in words
        assert_similar(read(dataset, True), read(dataset, False), 255)
    else:
        assert "while decoding" not in words
        assert "is not a known crop, resize or flip" in words
        assert_same(read(dataset, True, batch_size=1), read(dataset, False, batch_size=1))


NO_TAIL = {
    "subclass": [v1.ToTensor(), HalfNormalize(MEAN, STD)],
    "hook": [v1.ToTensor(), with_pre_hook()],
    "erasing": [v1.ToTensor(), v1.Normalize(MEAN, STD), v1.RandomErasing(1.0)],
    "tensor arguments": [v1.ToTensor(), v1.Normalize(torch.tensor(MEAN), torch.tensor(STD))],
    "lambda": [v1.ToTensor(), v1.Lambda(torch.neg)],
    "bytes": [v2.ToImage(), v2.ToDtype(torch.uint8)],
    "by kind": [v2.ToImage(), v2.ToDtype({tv_tensors.Image: FLOAT, "others": None}, scale=True)],
}


@pytest.mark.parametrize("name", NO_TAIL)
def test_unknown_tail_is_left_alone(small_root, name):
    """A chain with something unknown at its end is done for each sample."""
    dataset = folder(small_root, RESIZE, *NO_TAIL[name])
    last = "neg" if name == "lambda" else type(NO_TAIL[name][-1]).__name__
    assert f"a chain that ends with {last} is done for each sample" in said(dataset)
    assert "once per batch" not in said(dataset)
    assert_same(read(dataset, "exact"), read(dataset, False))
    levels = 1 if name == "bytes" else 255 / 6  # Or normalized.
    assert_similar(read(dataset, True), read(dataset, False), levels)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"collate_fn": stacked}, "collate_fn is not torch's default_collate"),
        ({"batch_size": None}, "without batches nothing is done once per batch"),
    ],
)
def test_tail_needs_default_collate(root, arguments, reason):
    """Without torch's collate the tail is done for each sample, and the head is fused."""
    dataset = folder(root, *validation(v1))
    words = said(dataset, **arguments)
    assert words.startswith("Fused: Resize, CenterCrop while decoding. For each sample: ToTensor")
    assert reason in words
    assert_similar(read(dataset, True, **arguments), read(dataset, False, **arguments), NORMALIZED)
    assert_same(read(dataset, "exact", **arguments), read(dataset, False, **arguments))


def test_unknown_datasets_are_left_alone(small_root):
    """A dataset that is not torchvision's gives the same bits, and the plan says why."""
    chain = RESIZE, v1.ToTensor()
    own = OwnDataset(small_root, v1.Compose(chain))
    assert said(
        own
    ) == "Fused: nothing. Not more, because OwnDataset is not a known dataset of " + (
        "torchvision."
    )
    joint = cityscape_like(small_root)
    assert "the transforms of ImageFolder change images and targets together" in said(joint)
    for dataset in (own, joint, [(torch.ones(2), 3)] * 4, {n: n for n in range(4)}, range(5), "ab"):
        assert_same(read(dataset, True), read(dataset, False))
        assert "Fused: nothing" in said(dataset)
    replaced = folder(small_root, *chain)
    replaced.__getitem__ = lambda index: 0  # Python does not call it: the class has one.
    assert_same(read(replaced, True), read(replaced, False))


def cityscape_like(root):
    """A dataset whose `transforms` take image and target."""
    dataset = folder(root, RESIZE, v1.ToTensor())
    dataset.transforms = lambda image, target: (image, -target)
    return dataset


@pytest.mark.parametrize(
    "loader",
    [opened_by_pil, OtherLoader(), ImageLoader(40), ImageLoader(mode="L"), ImageLoader((40, 40))],
    ids=["function", "subclass", "size", "grey", "sizes"],
)
def test_unknown_loader_keeps_the_head(small_root, loader):
    """How an unknown loader opens a file is left to it; the tail is fused."""
    tail = modern() if loader is opened_by_pil else [v2.ToDtype(FLOAT, scale=True)]
    dataset = folder(small_root, v2.Resize((30, 30)), *tail, loader=loader)
    words = said(dataset)
    assert "how ImageFolder opens a file is not known" in words
    assert "once per batch" in words
    assert_same(read(dataset, True), read(dataset, False))


def test_other_backend_keeps_the_head(small_root, monkeypatch):
    """With another image backend of torchvision, the default loader is not known."""
    monkeypatch.setattr(torchvision, "get_image_backend", lambda: "accimage")
    assert "how ImageFolder opens" in said(folder(small_root, RESIZE, v1.ToTensor()))


def test_nothing_to_fuse_says_so(small_root):
    """A dataset without transforms is left alone."""
    dataset = folder(small_root, loader=ImageLoader((30, 30)))
    assert said(dataset).startswith("Fused: nothing.")
    assert_same(read(dataset, True), read(dataset, False))
    assert said(folder(small_root)).startswith("Fused: nothing.")
    assert str(DataLoader(dataset, batch_size=2).plan).count("\n") == 0


@pytest.mark.parametrize("fuse", ["yes", 2, None, "Exact"])
def test_unknown_value_is_an_error(small_root, fuse):
    """An argument that is not known is an error that says which are."""
    with pytest.raises(ValueError, match='fuse must be True, False or "exact", got'):
        DataLoader(folder(small_root), fuse=fuse)


def test_zero_is_false(small_root):
    """fuse=0 fuses nothing, and 1 is True."""
    dataset = folder(small_root, RESIZE, v1.ToTensor())
    assert_same(read(dataset, 0), read(dataset, False))
    assert said(dataset, 0) == ""
    assert said(dataset, 1) == said(dataset, True)


def test_dataset_is_not_changed(small_root):
    """The user's dataset keeps its loader and its transform, and may get others."""
    chain = v1.Compose([RESIZE, v1.ToTensor()])
    dataset = ImageFolder(small_root, chain)
    with DataLoader(dataset, batch_size=2, fuse=True) as loader:
        shape = next(iter(loader))[0].shape
        assert (dataset.transform, dataset.loader) == (chain, folder(small_root).loader)
        dataset.transform = v1.Compose([v1.Resize((16, 16)), v1.ToTensor()])
        assert (shape[2:], next(iter(loader))[0].shape[2:]) == ((30, 40), (16, 16))


@pytest.mark.parametrize("std", [(1e-9, 0.5, 0.5), (0.0, 0.5, 0.5)], ids=["underflow", "zero"])
def test_division_by_zero_raises(small_root, std):
    """A standard deviation that is zero in half precision raises what torchvision raises."""
    if 0.0 in std:
        chain = [v1.PILToTensor(), v1.ConvertImageDtype(FLOAT), v1.Normalize(MEAN, std)]
    else:
        chain = [v1.ToTensor(), v1.ConvertImageDtype(torch.float16), v1.Normalize(MEAN, std)]
    dataset = folder(small_root, RESIZE, *chain)
    assert outcome(dataset, False) is ValueError
    assert outcome(dataset, True) is ValueError
    assert outcome(dataset, "exact") is ValueError


def test_own_tensor_collate_is_called(small_root, monkeypatch):
    """A function that the user has put into torch's map collates the tensors."""

    def negative(samples, *, collate_fn_map=None):
        return -collate_tensor_fn(samples, collate_fn_map=collate_fn_map)

    dataset = folder(small_root, RESIZE, v1.ToTensor())
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, negative)
    assert_same(read(dataset, "exact"), read(dataset, False))
    assert read(dataset, True)[0][0].max() <= 0


def test_unequal_shapes_raise_as_torch(root):
    """Images of several sizes are torch's error."""
    dataset = folder(root, v1.Resize(40), v1.ToTensor())
    for fuse in (False, True, "exact"):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            read(dataset, fuse)


# -- presets ---------------------------------------------------------------------------------------


class Preset:
    """As the presets of torchvision's reference scripts."""

    def __init__(self, *chain):
        self.transforms = v1.Compose(chain)

    def __call__(self, img):
        return self.transforms(img)


class DoesMore(Preset):
    def __call__(self, img):
        return -self.transforms(img)


class Slotted:
    __slots__ = ("chain",)

    def __init__(self, *chain):
        self.chain = v1.Compose(chain)

    def __call__(self, image):
        return self.chain(image)


def test_preset_of_weights_is_fused(root):
    """The transforms of a model's weights are fused, all of them."""
    preset = ResNet18_Weights.DEFAULT.transforms(crop_size=48, resize_size=64)
    dataset = ImageFolder(root, preset)
    words = "Fused: Resize, CenterCrop while decoding; PILToTensor, ConvertImageDtype, Normalize "
    assert said(dataset) == f"{words}once per batch."
    assert_similar(read(dataset, True), read(dataset, False), NORMALIZED)
    assert_same(read(dataset, "exact"), read(dataset, False))
    tensors = ImageFolder(root, preset, loader=ImageLoader())
    assert_similar(read(tensors, True), read(tensors, False), NORMALIZED)


def test_preset_of_scripts_is_fused(root):
    """A class that only calls its chain is looked into, also within others."""
    dataset = ImageFolder(root, v1.Compose([Preset(*training(v1)), v2.Identity()]))
    assert said(dataset).startswith("Fused: RandomResizedCrop, RandomHorizontalFlip while decoding")
    assert_similar(read(dataset, True), read(dataset, False), NORMALIZED)
    dataset = ImageFolder(root, torch.nn.Sequential(*training(v2)))
    assert "For each sample" not in said(dataset)
    assert_similar(read(dataset, True), read(dataset, False), NORMALIZED)


@pytest.mark.parametrize("cls", [DoesMore, Slotted])
def test_other_classes_are_called(root, cls):
    """A class that does more, or that cannot be looked into, is called as it is."""
    dataset = ImageFolder(root, cls(*validation(v1)))
    assert said(dataset).startswith("Fused: nothing.")
    assert_same(read(dataset, True), read(dataset, False))


# -- datasets --------------------------------------------------------------------------------------


def test_subsets_and_unions_are_fused(root):
    """What wraps datasets is as its parts, however deep."""
    one = folder(root, *training(v1))
    other = folder(root, *training(v2))
    union = ConcatDataset(
        [Subset(one, [5, 0, 3]), Subset(ConcatDataset([other, one]), range(2, 9))]
    )
    dataset = Subset(union, [9, 1, 4, 7, 2, 8, 3, 0])
    assert said(dataset).count("while decoding") == 2
    assert_similar(read(dataset, True), read(dataset, False), NORMALIZED)
    assert_same(read(dataset, "exact"), read(dataset, False))


def test_different_tails_meet_in_a_batch(root):
    """Images with different tails, and unfused ones, are collated as torch does."""
    scaled = folder(root, v1.Resize((40, 40)), v1.ToTensor())
    normalized = folder(root, v1.Resize((40, 40)), v1.ToTensor(), v1.Normalize([0.5], [1]))
    own = OwnDataset(root, v1.Compose([v1.Resize((40, 40)), v1.ToTensor()]))
    dataset = ConcatDataset([scaled, normalized, own])
    arguments = {"batch_size": 6, "shuffle": True}
    assert "once per batch" in said(ConcatDataset([scaled, normalized]))
    assert "the transforms of OwnDataset are done for each sample" in said(dataset)
    for parts in ([scaled, normalized], [scaled, own], [own, normalized, scaled]):
        union = ConcatDataset(parts)
        assert_same(read(union, "exact", **arguments), read(union, False, **arguments))
    assert_similar(read(dataset, True, **arguments), read(dataset, False, **arguments), 255)


@pytest.fixture
def food(tmp_path):
    """Food101's files."""
    for kind in ("pie", "soup"):
        (tmp_path / "food-101" / "images" / kind).mkdir(parents=True)
        for number in range(2):
            path = tmp_path / "food-101" / "images" / kind / f"{number}.jpg"
            path.write_bytes(as_jpeg(smooth(80, 100, seed=number)))
    meta = tmp_path / "food-101" / "meta"
    meta.mkdir()
    names = {kind: [f"{kind}/{number}" for number in range(2)] for kind in ("pie", "soup")}
    (meta / "train.json").write_text(json.dumps(names))
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_datasets_of_torchvision(food, num_workers):
    """Datasets of torchvision that open files with a loader are fused."""
    dataset = Food101(food, "train", transform=v1.Compose(training(v1)), target_transform=str)
    assert said(dataset).startswith("Fused: RandomResizedCrop, RandomHorizontalFlip while decoding")
    arguments = {"shuffle": True, "num_workers": num_workers, "batch_size": 2}
    fused = read(dataset, True, **arguments)
    assert_similar(fused, read(dataset, False, **arguments), NORMALIZED)
    assert set(itertools.chain(*(labels for _, labels in fused))) == {"0", "1"}


@pytest.fixture
def pets(tmp_path):
    """OxfordIIITPet's files."""
    base = tmp_path / "oxford-iiit-pet"
    for name in ("images", "annotations"):
        (base / name).mkdir(parents=True)
    for number in range(3):
        (base / "images" / f"Cat_{number}.jpg").write_bytes(as_jpeg(smooth(60, 80, seed=number)))
    lines = [f"Cat_{number} {number % 2 + 1} 1 1" for number in range(3)]
    (base / "annotations" / "trainval.txt").write_text("\n".join(lines))
    return tmp_path


def test_called_transform_is_fused(pets):
    """Of a dataset that calls its `transforms`, not its `transform`, those are fused."""
    dataset = OxfordIIITPet(pets, transform=v1.Compose([RESIZE, v1.ToTensor()]))
    assert said(dataset).startswith("Fused: ToTensor once per batch. For each sample: Resize.")
    assert_same(read(dataset, True), read(dataset, False))
    dataset.transform = v1.Compose([v1.Resize((9, 9)), v1.PILToTensor()])  # Not called.
    assert_same(read(dataset, True), read(dataset, False))


def test_two_stages_read_and_decode(root):
    """A generic folder is fused too, and its files are read in the load stage."""
    dataset = DatasetFolder(root, opened_by_pil, ("jpg",), v1.Compose(validation(v1)))
    assert "once per batch" in said(dataset)
    dataset.loader = folder(root).loader
    assert "while decoding" in said(dataset)
    with DataLoader(dataset, batch_size=3, num_workers=2, fuse=True) as loader:
        fused = list(loader)
        assert [stage.name for stage in loader.stats().stages][:2] == ["load", "preprocess"]
    assert_similar(fused, read(dataset, False), NORMALIZED)


# -- files -----------------------------------------------------------------------------------------


# Here the decoders interpolate colours in different ways, or convert inks. See test_image_pixels.
FAR = {"jpeg 4:1:1": 4, "jpeg 4:1:0": 6, "jpeg ycck": 4, "jpeg cmyk": 0.7, "tiff cmyk": 0.7}
FAR["jpeg progressive cmyk"] = 0.7
FAR["jpeg lossless"] = FAR["jpeg 4:4:0"] = 0.7


@pytest.mark.parametrize("name", tiered())
def test_formats_are_alike(tmp_path, name):
    """Every format gives an image of three channels that is like the unfused one."""
    folder_of(tmp_path, [encoded(name, 60, 80), encoded(name, 64, 70)])
    dataset = folder(tmp_path, v1.Resize((60, 70)), v1.ToTensor())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # PIL has one for some palettes.
        unfused = outcome(dataset, False)
        fused = outcome(dataset, True)
    assert not isinstance(unfused, type), "PIL reads all of them"
    assert_similar(fused, unfused, 255, mean=FAR.get(name, 1.0), worst=256)


def test_deep_grey_is_as_unfused(tmp_path):
    """Grey images of 16 bits, which PIL makes white, are just as white."""
    folder_of(tmp_path, [encoded(name) for name in ("png grey 16", "tiff grey 16 big-endian")])
    dataset = folder(tmp_path, *training(v1))
    assert_same(read(dataset, True), read(dataset, False))
    tensors = folder(tmp_path, *training(v2), loader=ImageLoader())
    assert_similar(read(tensors, True), read(tensors, False), NORMALIZED, mean=1, worst=40)


def only_pil_reads(name):
    """A file that FFmpeg does not decode here, and PIL does."""
    file = io.BytesIO()
    smooth(70, 90).save(file, name)
    return file.getvalue()


PIL_ONLY = ["PPM", "TGA", "PCX", "SGI", "ICO"]
ANY_HEAD = {
    "training": training(v1)[:2],
    "center": [v2.Resize(64), v2.CenterCrop(48)],
    "crop": [v2.ToImage(), v1.RandomCrop((32, 40)), v2.RandomHorizontalFlip()],
}


@pytest.mark.parametrize("name", PIL_ONLY)
def test_files_that_only_pil_reads(tmp_path, name):
    """A file that FFmpeg cannot decode has the unfused pixels, with the same random numbers."""
    folder_of(tmp_path, [only_pil_reads(name), as_jpeg(smooth(80, 60))])
    for make in (training, validation):
        dataset = folder(tmp_path, *make(v1))
        fused, unfused = (read(dataset, fuse, batch_size=1) for fuse in (True, False))
        assert_same(fused[0], unfused[0])
        assert_similar(fused, unfused, NORMALIZED)


@pytest.mark.parametrize("head", ANY_HEAD)
def test_truncated_files_that_pil_allows(tmp_path, monkeypatch, head):
    """If PIL is told to read damaged files, they have its pixels, with the same random numbers."""
    monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    whole = as_jpeg(smooth(80, 100))
    folder_of(tmp_path, [whole[: len(whole) * 2 // 3], whole[: len(whole) // 2]])
    end = [v1.ConvertImageDtype(FLOAT)] if head == "crop" else classic()
    dataset = folder(tmp_path, *ANY_HEAD[head], *end)
    assert "while decoding" in said(dataset)
    arguments = {"batch_size": 1, "shuffle": True}
    unfused = read(dataset, False, **arguments)
    assert_same(read(dataset, True, **arguments), unfused)
    assert_same(read(dataset, "exact", **arguments), unfused)


@pytest.mark.parametrize("head", ANY_HEAD)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_spoiled_files_that_pil_reads(tmp_path, head, num_workers):
    """A damaged JPEG that PIL reads has its pixels: what was drawn for it is done with them."""
    whole = [as_jpeg(smooth(80, 100, seed=seed)) for seed in range(6)]
    spoiled = [data[:700] + bytes(len(data) // 4) + data[len(data) // 2 :] for data in whole]
    folder_of(tmp_path, spoiled)
    end = [v1.ConvertImageDtype(FLOAT)] if head == "crop" else classic()
    dataset = folder(tmp_path, *ANY_HEAD[head], *end)
    arguments = {"shuffle": True, "num_workers": num_workers}
    unfused = read(dataset, False, **arguments)
    if head == "crop":  # Where no damaged row is needed, FFmpeg decodes the others.
        assert_similar(read(dataset, True, **arguments), unfused, 255, worst=20)
        return
    assert_same(read(dataset, True, **arguments), unfused)
    erased = folder(tmp_path, *ANY_HEAD[head], *end, v1.RandomErasing(1.0))
    assert_same(read(erased, True, **arguments), read(erased, False, **arguments))


@pytest.fixture
def damaged(tmp_path):
    """An image folder in which two files are damaged and one is empty."""
    files = [as_jpeg(smooth(70, 90, seed=seed)) for seed in range(8)]
    files[2] = files[2][:900]
    files[5] = b"this is no image"
    files[6] = b""
    return folder_of(tmp_path, files)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("number", [2, 5, 6])
def test_damaged_file_raises_the_same(damaged, number, num_workers):
    """A damaged file raises what it raises without fuse, and a missing one too."""
    dataset = folder(damaged, *training(v1))
    arguments = {"batch_size": 1, "num_workers": num_workers, "sampler": [0, number]}
    types_raised = set()
    for fuse in (False, True, "exact"):
        with DataLoader(dataset, fuse=fuse, **arguments) as loader:
            iterator = iter(loader)
            next(iterator)
            with pytest.raises(OSError, match="file") as caught:
                next(iterator)
            types_raised.add((type(caught.value), str(caught.value).partition("/")[0]))
    assert len(types_raised) == 1
    (damaged / "a" / "00.jpg").unlink()
    for fuse in (False, True):
        with (
            pytest.raises(FileNotFoundError),
            DataLoader(dataset, fuse=fuse, **arguments) as loader,
        ):
            next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_the_same(damaged, num_workers):
    """The same samples are replaced, for the same reasons."""
    dataset = folder(damaged, *training(v1))
    arguments = {"batch_size": 4, "shuffle": True, "num_workers": num_workers, "seed": 2}
    found = {}
    for fuse in (False, True, "exact"):
        policy = ReplaceBadSamples(max_count=3, max_fraction=None)
        with DataLoader(dataset, fuse=fuse, on_error=policy, **arguments) as loader:
            batches = list(loader)
            bad = {(sample.index, sample.error.partition("(")[0]) for sample in loader.bad_samples}
        found[fuse] = batches, bad
    assert {index for index, _ in found[False][1]} == {2, 5, 6}
    assert found[True][1] == found["exact"][1] == found[False][1]
    assert_same(found["exact"][0], found[False][0])
    assert_similar(found[True][0], found[False][0], NORMALIZED)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_are_read_again(damaged, num_workers):
    """RetryLoad reads a file again, and decodes it once."""
    dataset = folder(damaged, *training(v2), loader=ImageLoader())
    assert "while decoding" in said(dataset)
    (damaged / "a" / "00.jpg").unlink()
    policy = RetryLoad(attempts=3, backoff=0)
    arguments = {"num_workers": num_workers, "on_error": policy, "fuse": True}
    for index, error, num_retries in [
        (0, FileNotFoundError, 2),
        (5, ImageError, 0),
    ]:
        with DataLoader(dataset, sampler=[index], **arguments) as loader:
            with pytest.raises(error):
                next(iter(loader))
            assert loader.num_retries == num_retries


@pytest.mark.parametrize("flips_first", [False, True])
def test_small_images_are_padded(tmp_path, flips_first):
    """An image that is smaller than its crop is padded by torchvision, and flipped as unfused."""
    sizes = [(40, 90), (90, 40), (90, 90), (30, 30)] * 2
    folder_of(tmp_path, [as_jpeg(smooth(*size, seed=n)) for n, size in enumerate(sizes)])
    head = [v2.CenterCrop(50), v2.RandomHorizontalFlip()]
    head = head[::-1] if flips_first else head
    end = [v2.ToImage(), v2.ToDtype(FLOAT, scale=True)]
    for loader in (folder(tmp_path).loader, ImageLoader()):
        dataset = folder(tmp_path, *head, *end, loader=loader)
        assert f"Fused: {type(head[0]).__name__}" in said(dataset)
        assert_similar(read(dataset, True), read(dataset, False), 255)


# -- workers ---------------------------------------------------------------------------------------


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 1, "num_processes": 0},
    {"num_workers": 2, "num_processes": 0},
    {"num_workers": 2, "num_processes": 0, "copy_dataset": True},
    {"num_workers": 1, "num_processes": 1},
    {"num_workers": 2, "num_processes": 1},
    {"num_workers": 2, "num_processes": 2},
    {"num_workers": 2},
    {"num_workers": 2, "num_processes": 1, "persistent_workers": True},
    {"num_workers": 2, "worker_method": "multiprocessing"},
]
SPAWNED = [
    {"num_workers": 1, "multiprocessing_context": "spawn"},
    {"num_workers": 1, "worker_method": "multiprocessing", "multiprocessing_context": "spawn"},
]


def workers_name(arguments):
    return "-".join(f"{name}={value}" for name, value in arguments.items())


@pytest.mark.children
@pytest.mark.parametrize(
    "workers",
    [*WORKERS[1:], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SPAWNED)],
    ids=workers_name,
)
@pytest.mark.parametrize("fuse", sampled([True, "exact"], 2))
def test_any_workers_make_the_same_bits(root, workers, fuse):
    """With a seed the bits are the same wherever the workers are, in every epoch."""
    dataset = folder(root, *training(v1))
    arguments = {"batch_size": 4, "shuffle": True, "seed": 1, "fuse": fuse}
    with DataLoader(dataset, **arguments) as loader:
        expected = [list(loader), list(loader)]
    with DataLoader(dataset, **arguments, **workers) as loader:
        ours = [list(loader), list(loader)]
    assert_same(ours, expected)
    assert ours[0][0][0].stride() == expected[0][0][0].stride()


@pytest.mark.children
def test_plan_names_workers_and_fusion(root):
    """The plan says where the workers live, which fuse does not change, and what is fused."""
    dataset = folder(root, *training(v1))
    fused, unfused = (DataLoader(dataset, num_workers=2, fuse=fuse).plan for fuse in (True, False))
    assert (fused.num_workers, fused.num_processes) == (2, 1)
    assert str(fused).startswith(str(unfused))
    assert (len(fused.fusions), unfused.fusions) == (1, ())
    parts = fused.fusions[0]
    assert [len(part) for part in (parts.while_decoding, parts.per_sample, parts.per_batch)] == [
        *(2, 0, 2)
    ]


@pytest.mark.children
def test_plan_tells_fused_workers(root):
    """The plan says where the workers of the fused dataset live, which is what the loader uses."""
    dataset = ImageFolder(root, Preset(*training(v1)))  # Not known to be thread-safe unless fused.
    for fuse, num_processes in ((True, 1), (False, 2)):
        loader = DataLoader(dataset, batch_size=2, num_workers=2, fuse=fuse)
        assert loader.plan.num_processes == num_processes
        next(iter(loader))
        assert loader.stats().num_processes == num_processes


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fuse", [True, "exact"])
def test_epoch_is_resumed_in_its_middle(root, fuse, num_workers):
    """A saved state goes on with the same bits, also with other workers."""
    dataset = folder(root, *training(v1))
    arguments = {"batch_size": 1, "shuffle": True, "seed": 3, "fuse": fuse}
    with DataLoader(dataset, num_workers=num_workers, **arguments) as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        expected = list(iterator)
    with DataLoader(dataset, num_workers=2 - num_workers, **arguments) as loader:
        loader.load_state_dict(state)
        assert_same(list(loader), expected)
    with DataLoader(dataset, **(arguments | {"fuse": False})) as loader:
        loader.load_state_dict(state)
        assert_similar(expected, list(loader), NORMALIZED)


# -- devices ---------------------------------------------------------------------------------------


DEVICE_TAILS = {
    "classic": classic,
    "modern": modern,
    "half": lambda: [*classic(), v1.ConvertImageDtype(torch.float16)],
    "bytes": lambda: [v2.ToImage(), v2.ToDtype(torch.float16)],
}
SCHEDULES = [everything_last, copies_last, copies_first, at_random(0)]


def simulated(monkeypatch, schedule):
    simulator = Simulator(schedule)
    simulator.install(monkeypatch)
    return simulator


def read_on_device(simulator, loader):
    """What the kernels of a loop read that lets go of each batch at once."""
    readings = []
    for images, labels in loader:
        assert images.device.type == TYPE
        readings.append((simulator.read(images), simulator.read(labels)))
        del images, labels
    simulator.finish()
    return [(images.value, labels.value) for images, labels in readings]


def num_bytes_copied(simulator):
    """The sizes of the pinned blocks that were copied."""
    return [
        call.about.memory.size if hasattr(call.about, "memory") else None
        for call in simulator.calls
        if call.what == "copy" and call.about is not None
    ]


@pytest.mark.parametrize(
    ("schedule", "tail", "num_workers", "fuse"),
    pairwise(SCHEDULES, DEVICE_TAILS, [0, 2], [True, "exact"]),
)
def test_bytes_cross_to_the_device(root, monkeypatch, schedule, tail, num_workers, fuse):
    """A batch is copied as bytes, and arrives as the CPU would have made it."""
    dataset = Subset(folder(root, v1.Resize((32, 32)), *DEVICE_TAILS[tail]()), [0, 1, 2, 3] * 4)
    expected = [tuple(batch) for batch in read(dataset, fuse, batch_size=2)]
    simulator = simulated(monkeypatch, schedule)
    arguments = {"batch_size": 2, "num_workers": num_workers, "device": TYPE}
    with DataLoader(dataset, fuse=fuse, **arguments) as loader:
        arrived = read_on_device(simulator, loader)
    assert_same(arrived, expected)
    assert "once per batch, on the device" in said(dataset, fuse, **arguments)
    # Blocks are powers of two. As floats, the images would need a block of 32 KiB.
    assert set(num_bytes_copied(simulator)) == {512, 1 << 13}


@pytest.mark.children
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_cross_from_children(root, monkeypatch, schedule):
    """Batches of child processes cross as bytes too, from memory that is registered."""
    dataset = Subset(folder(root, v1.Resize((96, 96)), *classic()), [0, 1, 2, 3] * 4)
    expected = [tuple(batch) for batch in read(dataset, True, batch_size=2)]
    simulator = simulated(monkeypatch, schedule)
    with DataLoader(dataset, 2, fuse=True, num_workers=2, device=TYPE) as loader:
        arrived = read_on_device(simulator, loader)
    assert_same(arrived, expected)
    copies = [call.about for call in simulator.calls if call.what == "copy"]
    assert any(hasattr(about, "num_bytes") for about in copies), "nothing came from a segment"
    assert max(size or 0 for size in num_bytes_copied(simulator)) <= 1 << 16


def test_unlike_images_cross_finished(root, tmp_path, monkeypatch):
    """Images that cannot be finished on the device are finished before."""
    chain = [v1.Lambda(grey_if_wide), v2.ToImage(), v2.RGB(), v2.ToDtype(FLOAT, scale=True)]
    dataset = folder(root, v1.Resize((32, 32)), *chain)
    expected = [tuple(batch) for batch in read(dataset, False, batch_size=6)]
    simulator = simulated(monkeypatch, copies_last)
    with DataLoader(dataset, 6, fuse=True, device=TYPE) as loader:
        arrived = read_on_device(simulator, loader)
    assert_similar(arrived, expected, 255)


def grey_if_wide(image):
    return image.convert("L") if image.getpixel((0, 0))[0] > 128 else image


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_devices_get_the_result(root, device, num_workers):
    """On other devices a batch has its shape and type, and on the CPU its values."""
    dataset = folder(root, *training(v1), v1.ConvertImageDtype(torch.float16))
    arguments = {"batch_size": 4, "seed": 1}
    expected = read(dataset, True, **arguments)
    batches = read(dataset, True, device=device, num_workers=num_workers, **arguments)
    if device == "cpu":
        assert_same(batches, expected)
        return
    for (images, _), (others, _) in zip(batches, expected, strict=True):
        assert images.device.type == "meta"
        assert (images.shape, images.dtype) == (others.shape, others.dtype)
        assert images.stride() == others.stride()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_pinned(root, monkeypatch, num_workers):
    """With pin_memory=True the batch is made in pinned memory, and has its values."""
    dataset = folder(root, *training(v1))
    expected = read(dataset, True)
    simulator = simulated(monkeypatch, copies_first)
    batches = read(dataset, True, pin_memory=True, num_workers=num_workers)
    assert_same(batches, expected)
    assert all(simulator.is_of_allocator(tensor) for batch in batches for tensor in batch)


@pytest.mark.children
@pytest.mark.parametrize("workers", [WORKERS[5], WORKERS[9]], ids=workers_name)
def test_batches_of_children_are_pinned(root, monkeypatch, workers):
    """Batches of worker processes are pinned, or arrive on the device, too."""
    dataset = folder(root, *training(v1))
    expected = read(dataset, True)
    simulated(monkeypatch, copies_first)
    assert_same(read(dataset, True, pin_memory=True, **workers), expected)
    meta = read(dataset, True, device="meta", **workers)
    assert [batch[0].dtype for batch in meta] == [FLOAT] * len(expected)


# -- how large the difference is -------------------------------------------------------------------


def test_difference_is_measured(root, tmp_path):
    """The plan measures by how much pixels differ: not at all with "exact"."""
    for make in (training, validation):
        dataset = folder(root, *make(v1))
        assert 0 < DataLoader(dataset, fuse=True).plan.pixel_difference(6) < 0.5
        assert DataLoader(dataset, fuse="exact").plan.pixel_difference() == 0
        assert DataLoader(dataset).plan.pixel_difference() == 0
    whole = [v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(FLOAT, scale=True)]
    folder_of(tmp_path, [encoded("png rgb", 50, 60)])
    lossless = folder(tmp_path, *whole)
    assert "while decoding" in said(lossless)
    assert DataLoader(lossless, fuse=True).plan.pixel_difference(1) == 0
    state = torch.get_rng_state()
    DataLoader(folder(root, *training(v1)), fuse=True).plan.pixel_difference(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_difference_is_one_of_levels(root):
    """What follows the head has no effect on how the difference is measured."""
    last = torch.nn.Identity()  # So the tail is not known, and values are normalised.
    known, unknown = folder(root, *training(v1)), folder(root, *training(v1), last)
    differences = [DataLoader(d, fuse=True).plan.pixel_difference(4) for d in (known, unknown)]
    assert differences[0] == differences[1] > 0


def test_reason_names_unknown_transform(root):
    """The plan names the transform that keeps the tail from being fused."""
    chain = [v2.Resize(64), v2.PILToTensor(), v2.ToDtype(FLOAT, scale=True), v2.RandomErasing()]
    words = "a chain that ends with RandomErasing is done for each sample"
    assert words in said(folder(root, *chain, v2.ToPureTensor(), compose=v2.Compose))


def test_difference_of_several_parts(root):
    """The difference of several datasets is the mean of theirs, and that of none is 0."""
    fused, own = folder(root, *validation(v1)), OwnDataset(root)
    alone = DataLoader(fused, fuse=True).plan.pixel_difference()
    union = ConcatDataset([fused, own])
    assert DataLoader(union, fuse=True).plan.pixel_difference() == pytest.approx(alone / 2)
    assert DataLoader(Subset(own, [0]), fuse=True).plan.pixel_difference() == 0
    fused.samples = []
    assert DataLoader(fused, fuse=True).plan.pixel_difference() == 0


# -- bicubic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    pairwise(["png rgb", "jpeg 4:4:4", "jpeg 4:2:0", "png grey 8"], [(96, 128), (60, 200), 300]),
)
def test_bicubic_equals_pil(name, size):
    """ImageLoader(interpolation="bicubic") has the pixels that PIL resizes to."""
    data = as_jpeg(smooth(240, 320)) if name == "jpeg 4:4:4" else encoded(name)
    image = PIL.Image.open(io.BytesIO(data)).convert("RGB")
    cubic, linear = (
        ImageLoader(size, interpolation=name).decode(data).int() for name in ("bicubic", "bilinear")
    )
    expected = F.pil_to_tensor(v1.Resize(size, InterpolationMode.BICUBIC)(image)).int()
    difference = (cubic - expected).abs().double().mean()
    assert difference <= (1.2 if name == "jpeg 4:2:0" else 0.6)
    if name != "jpeg 4:2:0":  # There colours make most of the difference.
        assert difference < (linear - expected).abs().double().mean()


@pytest.mark.parametrize("value", ["nearest", InterpolationMode.BICUBIC, None, 3])
def test_unknown_interpolation_is_an_error(value):
    """An interpolation that is not known is an error that says which are."""
    with pytest.raises(ValueError, match='interpolation must be "bilinear" or "bicubic", got'):
        ImageLoader(32, interpolation=value)


def test_interpolation_is_shown():
    """The interpolation is an attribute, and part of the text of a loader."""
    loader = ImageLoader(32, interpolation="bicubic")
    assert loader.interpolation == "bicubic"
    assert "interpolation='bicubic'" in repr(loader)
    assert "interpolation='bilinear'" in repr(ImageLoader())
