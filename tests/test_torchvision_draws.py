"""What the transforms of torchvision draw, with `seed=`: the same bits with any workers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random

import pytest
import torch
import torchvision
from torch.utils.data import Dataset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from spdl_torch import DataLoader

GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.randint(30, 200, (3, 16, 16), dtype=torch.uint8, generator=GENERATOR)
CHOICES = [[v1.Pad(padding) for padding in range(20)], [v2.Pad(padding) for padding in range(20)]]

# The classes of both modules, each with arguments for which two samples hardly come out alike.
IN_BOTH = {
    "AugMix": {},
    "AutoAugment": {},
    "ColorJitter": {"brightness": 0.5, "contrast": 0.5},
    "ElasticTransform": {"sigma": 1.0},
    "GaussianBlur": {"kernel_size": 3},
    "RandAugment": {},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomAffine": {"degrees": 90},
    "RandomAutocontrast": {},
    "RandomCrop": {"size": 8},
    "RandomEqualize": {},
    "RandomErasing": {},
    "RandomGrayscale": {"p": 0.5},
    "RandomHorizontalFlip": {},
    "RandomInvert": {},
    "RandomPerspective": {},
    "RandomPosterize": {"bits": 2},
    "RandomResizedCrop": {"size": 8},
    "RandomRotation": {"degrees": 90},
    "RandomSolarize": {"threshold": 100},
    "RandomVerticalFlip": {},
    "TrivialAugmentWide": {},
}
V1 = IN_BOTH | {
    "RandomApply": {"transforms": [v1.Pad(1)]},
    "RandomChoice": {"transforms": CHOICES[0]},
    "RandomOrder": {"transforms": [v1.Pad(1), v1.CenterCrop(8), v1.Resize(12)]},
}
V2 = IN_BOTH | {
    "CutMix": {"num_classes": 4},
    "GaussianNoise": {},
    "JPEG": {"quality": (1, 100)},
    "MixUp": {"num_classes": 4},
    "RandomApply": {"transforms": [v2.Pad(1)]},
    "RandomChannelPermutation": {},
    "RandomChoice": {"transforms": CHOICES[1]},
    "RandomIoUCrop": {},
    "RandomOrder": {"transforms": [v2.Pad(1), v2.CenterCrop(8), v2.Resize(12)]},
    "RandomPhotometricDistort": {},
    "RandomResize": {"min_size": 8, "max_size": 24},
    "RandomShortestSize": {"min_size": list(range(8, 24))},
    "RandomZoomOut": {},
    "ScaleJitter": {"target_size": (16, 16)},
}
DRAWING = {v1: V1, v2: V2}

DRAWING_NOTHING = {
    "AutoAugmentPolicy",
    "CenterCrop",
    "ClampBoundingBoxes",
    "ClampKeyPoints",
    "Compose",
    "ConvertBoundingBoxFormat",
    "ConvertImageDtype",
    "FiveCrop",
    "Grayscale",
    "Identity",
    "InterpolationMode",
    "Lambda",
    "LinearTransformation",
    "Normalize",
    "PILToTensor",
    "Pad",
    "RGB",
    "Resize",
    "SanitizeBoundingBoxes",
    "SanitizeKeyPoints",
    "SetClampingMode",
    "TenCrop",
    "ToDtype",
    "ToImage",
    "ToPILImage",
    "ToPureTensor",
    "ToTensor",
    "Transform",
    "UniformTemporalSubsample",
}


@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
def test_every_transform_is_known(module):
    """Every class of torchvision's transforms is drawn with below, or draws nothing."""
    classes = {name for name, value in vars(module).items() if inspect.isclass(value)}
    assert classes - DRAWING_NOTHING == DRAWING[module].keys()


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if isinstance(self.transform, v2.MixUp | v2.CutMix):
            images, labels = torch.stack([IMAGE, 255 - IMAGE]).float(), torch.tensor([0, 1])
            return self.transform(images, labels)
        if isinstance(self.transform, v2.RandomIoUCrop):
            boxes = tv_tensors.BoundingBoxes([[0, 0, 5, 5]], format="XYXY", canvas_size=(16, 16))
            return self.transform(tv_tensors.Image(IMAGE), boxes)
        if isinstance(self.transform, v2.GaussianNoise):
            return self.transform(IMAGE / 255)
        return self.transform(IMAGE)


def bits(loader):
    """Return all samples of an epoch, after a check that the loop draws as without a loader."""
    iterator = iter(loader)  # Draws a seed for the workers, as torch does.
    torch.manual_seed(3)
    random.seed(3)
    epoch, drawn = [], []
    for sample in iterator:
        tensors = [sample] if isinstance(sample, torch.Tensor) else sample
        epoch.append([(tuple(tensor.shape), tensor.flatten().tolist()) for tensor in tensors])
        drawn.append((torch.rand(()).item(), random.random()))
    drawn.append((torch.rand(()).item(), random.random()))
    torch.manual_seed(3)
    random.seed(3)
    assert drawn == [(torch.rand(()).item(), random.random()) for _ in drawn]
    return epoch


def check_all_workers(dataset, **arguments):
    expected = bits(DataLoader(dataset, seed=7, **arguments))
    assert any(sample != expected[0] for sample in expected)
    for num_workers in (0, 1, 1, 4, 4):
        assert bits(DataLoader(dataset, seed=7, num_workers=num_workers, **arguments)) == expected


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, id=f"{label} {name}")
        for label, module in (("v1", v1), ("v2", v2))
        for name in DRAWING[module]
    ],
)
@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")  # Of v2.JPEG.
def test_every_transform_draws_identical_bits(module, name):
    """A transform draws the same with any workers, and nothing from the RNGs of the loop."""
    transform = getattr(module, name)(**DRAWING[module][name])
    check_all_workers(Transformed(transform), batch_size=None)


@pytest.mark.parametrize("transform", [v2.MixUp, v2.CutMix])
def test_mixing_collates_draw_identical_bits(transform):
    """A collate function that mixes images draws the same with any workers."""
    mix = transform(num_classes=12)

    def collate(samples):
        return mix(*torch.utils.data.default_collate(samples))

    dataset = [((IMAGE + index).float(), index) for index in range(12)]
    check_all_workers(dataset, batch_size=3, collate_fn=collate)


# -- Python's `random` ----------------------------------------------------------------------------


def test_choices_draw_globally_without_seed():
    """With `num_workers=0` and no seed, and in the loop, choices draw from Python's `random`."""
    transform = v1.RandomChoice(CHOICES[0])
    list(DataLoader(Transformed(transform), batch_size=None, num_workers=2))

    def shapes(samples):
        random.seed(5)
        return [tuple(sample.shape) for sample in samples]

    random.seed(5)
    expected = [tuple(random.choices(CHOICES[0])[0](IMAGE).shape) for _ in range(12)]
    assert shapes(DataLoader(Transformed(transform), batch_size=None)) == expected
    assert shapes(transform(IMAGE) for _ in range(12)) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_manual_seed_repeats_choices(num_workers):
    """`torch.manual_seed()` in a sample repeats choices and orders, for an image and its mask."""
    transform = v1.Compose([v1.RandomChoice(CHOICES[0]), v1.RandomCrop(16)])

    def image_and_mask(image):
        seed = torch.randint(1 << 30, ()).item()
        torch.manual_seed(seed)
        first = transform(image)
        torch.manual_seed(seed)
        return first, transform(image)

    loader = DataLoader(
        Transformed(image_and_mask), batch_size=None, seed=7, num_workers=num_workers
    )
    for first, second in loader:
        assert torch.equal(first, second)


def test_late_imports_follow_the_sample(monkeypatch):
    """torchvision may be imported between two epochs."""
    transform = v1.RandomChoice(CHOICES[0])
    expected = bits(DataLoader(Transformed(transform), batch_size=None, seed=7))
    monkeypatch.setattr(v1.transforms, "random", random)  # As if just imported.
    assert (
        bits(DataLoader(Transformed(transform), batch_size=None, seed=7, num_workers=2)) == expected
    )


@pytest.mark.filterwarnings("ignore:.*module is deprecated:UserWarning")
def test_no_module_keeps_another_rng():
    """No module of torchvision's transforms and datasets draws from the RNGs of the process."""
    modules = [
        importlib.import_module(info.name)
        for package in (torchvision.transforms, torchvision.datasets)
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    list(DataLoader(Transformed(v1.RandomCrop(8)), num_workers=1))
    assert [module for module in modules if vars(module).get("random") is random] == []
    sources = [inspect.getsource(module) for module in modules]
    others = ("from random import", "numpy.random", "np.random.")
    assert [source for source in sources if any(word in source for word in others)] == []
