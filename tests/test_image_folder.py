"""torchvision's folder datasets with our image loader are split into stages by themselves."""

from __future__ import annotations

import threading
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset
from torchvision.datasets import DatasetFolder, ImageFolder, ImageNet
from torchvision.transforms import v2

from spdl_torch import DataLoader, ImageError, ImageLoader

from .test_parity import assert_same


@pytest.fixture
def root(tmp_path):
    """Ten pictures of two kinds, in ImageNet's layout."""
    random = np.random.default_rng(0)
    for number in range(10):
        folder = tmp_path / "train" / f"n0000000{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (40 + number, 60, 3), np.uint8)
        PIL.Image.fromarray(pixels).resize((120, 90)).save(folder / f"{number}.JPEG")
    classes = {"n00000000": ("tench",), "n00000001": ("goldfish",)}
    torch.save((classes, []), tmp_path / "meta.bin")
    return tmp_path


class Watched(ImageLoader):
    """Notes in which threads it reads and decodes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.threads = []

    def read(self, path):
        self._note("read")
        return super().read(path)

    def decode(self, data, path=None):
        self._note("decode")
        return super().decode(data, path)

    def _note(self, what):
        self.threads.append((what, threading.current_thread().name.rstrip("-0123456789")))


class WithTransform(Watched):
    """Does something else when called."""

    def __call__(self, path):
        return super().__call__(path).flip(-1)


class WithPath(ImageFolder):
    """What people write who need the path."""

    def __getitem__(self, index):
        return *super().__getitem__(index), self.samples[index][0]


STAGED = {("read", "spdl_torch-load"), ("decode", "spdl_torch-preprocess")}
FUSED = {("read", "spdl_torch-preprocess"), ("decode", "spdl_torch-preprocess")}


def folder(root, loader):
    return ImageFolder(root / "train", loader=loader)


def generic_folder(root, loader):
    return DatasetFolder(root / "train", loader, extensions=(".jpeg",))


def imagenet(root, loader):
    return ImageNet(root, loader=loader)


def subset_of_subset(root, loader):
    return Subset(Subset(folder(root, loader), [9, 8, 7, 6]), [3, 1])


@pytest.mark.parametrize("make", [folder, generic_folder, imagenet, subset_of_subset])
def test_folder_has_a_load_stage(root, make):
    """IO workers read the bytes of an image folder, and CPU workers decode them."""
    loader = Watched(32)
    list(DataLoader(make(root, loader), batch_size=4, num_workers=2))
    assert set(loader.threads) == STAGED


def test_own_getitem_stays_one_stage(root):
    """A folder that overrides __getitem__ stays one stage."""
    loader = Watched(32)
    batches = list(DataLoader(WithPath(root / "train", loader=loader), num_workers=2))
    assert set(loader.threads) == FUSED
    assert batches[3][2] == (str(root / "train" / "n00000000" / "6.JPEG"),)


class AllAtOnce(ImageFolder):
    """Makes the batch in one call, and says so in the targets."""

    def __getitems__(self, indices):
        return [(self[index][0], -1) for index in indices]


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(10))])
@pytest.mark.parametrize("arguments", [{}, {"seed": 1}])
def test_own_getitems_stays_one_stage(root, wrap, arguments):
    """A folder that has __getitems__ stays one stage, which calls it."""
    loader = Watched((32, 32))
    dataset = wrap(AllAtOnce(root / "train", loader=loader))
    expected = list(DataLoader(dataset, batch_size=4, **arguments))
    loader.threads.clear()
    batches = list(DataLoader(dataset, batch_size=4, num_workers=2, **arguments))
    assert set(loader.threads) == FUSED
    assert_same(batches, expected)
    assert batches[0][1].tolist() == [-1, -1, -1, -1]


def test_own_call_stays_one_stage(root):
    """A loader that overrides __call__ stays one stage."""
    loader = WithTransform((32, 32))
    dataset = folder(root, loader)
    batches = list(DataLoader(dataset, batch_size=5, num_workers=2))
    assert set(loader.threads) == FUSED
    assert_same(batches, list(TorchDataLoader(dataset, batch_size=5)))


@pytest.mark.parametrize("make", [folder, imagenet, subset_of_subset])
def test_batches_equal_those_of_torch(root, make):
    """A folder in two stages has the batches of torch's loader."""
    dataset = make(root, ImageLoader((32, 40)))
    ours = list(DataLoader(dataset, batch_size=4, num_workers=2))
    assert_same(ours, list(TorchDataLoader(dataset, batch_size=4)))


def test_transforms_are_applied(root):
    dataset = ImageFolder(
        root / "train",
        transform=v2.Compose([v2.CenterCrop(30), v2.ToDtype(torch.float32, scale=True)]),
        target_transform=str,
        loader=ImageLoader(32),
    )
    ours = list(DataLoader(dataset, batch_size=4, num_workers=2))
    assert ours[0][0].dtype == torch.float32
    assert ours[0][1] == ("0", "0", "0", "0")
    assert_same(ours, list(TorchDataLoader(dataset, batch_size=4)))


def test_dataset_copies_are_staged_too(root):
    """With copy_dataset=True a folder has two stages too."""
    dataset = folder(root, ImageLoader((32, 40)))
    ours = list(DataLoader(dataset, batch_size=4, num_workers=2, copy_dataset=True))
    assert_same(ours, list(TorchDataLoader(dataset, batch_size=4)))


def test_process_pool_decodes_read_bytes(root):
    """A process pool decodes what IO workers read."""
    dataset = folder(root, ImageLoader((32, 40)))
    with ProcessPoolExecutor(1) as pool:
        ours = list(DataLoader(dataset, batch_size=4, num_workers=1, preprocess_executor=pool))
    assert_same(ours, list(TorchDataLoader(dataset, batch_size=4)))


def test_damaged_file_raises_at_its_batch(root):
    """A damaged file is an error at its batch that names the file."""
    path = root / "train" / "n00000000" / "4.JPEG"
    path.write_bytes(path.read_bytes()[:1000])
    iterator = iter(DataLoader(folder(root, ImageLoader((32, 40))), num_workers=2))
    for _ in range(2):
        next(iterator)
    with pytest.raises(ImageError, match="truncated") as caught:
        next(iterator)
    assert str(path) in str(caught.value)
    assert "preprocess stage for sample index 2 (batch 2)" in caught.value.__notes__[0]
    assert len(list(iterator)) == 7
