"""Which datasets are known to be thread-safe."""

import ast
import functools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from spdl_torch import ImageLoader, StagedDataset
from spdl_torch._collate import default_collate as our_collate
from spdl_torch._thread_safe import why_not_thread_safe

from .datasets import InBulk, Sharded, Squares, Staged, StagedAsync, StagedMany


class Folder(datasets.ImageFolder):
    """A user's subclass that reads as torchvision does, without files."""

    def __init__(self, transform=None, loader=datasets.folder.default_loader, **attributes):
        datasets.VisionDataset.__init__(self, "nowhere", transform=transform)
        self.samples = [("a.jpg", 0)] * 1000
        self.loader = loader
        self.notes = Squares()  # Not used by reading.
        vars(self).update(attributes)


class MyTransform(torch.nn.Module):
    def forward(self, image):
        return image


class DeclaredTransform(MyTransform):
    thread_safe = True


class Declared(Squares):
    thread_safe = True


def my_function(value):
    return value


def declared_function(value):
    return value


declared_function.thread_safe = True


def why_not(dataset):
    return why_not_thread_safe(dataset, default_collate)


def why_not_transform(transform):
    return why_not(Folder(transform))


# -- datasets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        *([Squares()], (1, 2), {0: "a"}, range(3), torch.arange(3), np.arange(3)),
        *(TensorDataset(torch.arange(3)), Staged(), StagedAsync(), StagedMany(), Declared()),
        StagedDataset.from_functions([1, 2], load=str, preprocess=my_function),
        *(Subset([1, 2], [0]), ConcatDataset([Staged(), [1]]), StackDataset([1], [2])),
        *(StackDataset(a=Staged(3), b=range(3)), Subset(Subset(Declared(), range(2)), [1])),
        Folder(),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_known_datasets(dataset):
    """Datasets of plain data, of stages, of torch and of torchvision are known."""
    assert why_not(dataset) is None


def test_memory_map_is_known(tmp_path):
    """Reading a memory map moves no position."""
    assert why_not(np.memmap(tmp_path / "m", mode="w+", shape=(3,))) is None


def test_user_dataset_is_not_known():
    """A class that is not known is named."""
    assert why_not(Squares()) == "Squares is not known to be thread-safe"
    assert why_not(InBulk()) == "InBulk is not known to be thread-safe"
    assert why_not(Sharded()) == "Sharded is not known to be thread-safe"


def test_wrapped_dataset_is_named():
    """What is not known is named by where it is."""
    phrase = "is a Squares, which is not known to be thread-safe"
    assert why_not(Subset(Squares(), [0])) == f"dataset.dataset {phrase}"
    assert why_not(ConcatDataset([[1], Squares()])) == f"dataset.datasets[1] {phrase}"
    assert why_not(StackDataset(a=Squares())) == f"dataset.datasets['a'] {phrase}"


def test_indices_of_subset_count():
    """A Subset whose indices are an object of the user's is not known."""
    assert why_not(Subset([1], Squares())).startswith("dataset.indices is a Squares")


@pytest.mark.parametrize("base", [Subset, ConcatDataset, TensorDataset, list, dict, np.ndarray])
def test_subclasses_are_not_known(base):
    """A subclass may read its samples in another way."""
    made = type("Mine", (base,), {})
    arguments = {Subset: ([1], [0]), ConcatDataset: ([[1]],), TensorDataset: (torch.ones(1),)}
    dataset = made((1,)) if base is np.ndarray else made(*arguments.get(base, ()))
    assert why_not(dataset) == "Mine is not known to be thread-safe"


@pytest.mark.parametrize("name", ["__getitem__", "__getitems__"])
def test_overriding_staged_is_not_known(name):
    """A StagedDataset whose hooks do not make its samples has no contract."""
    cls = type("Mine", (Staged,), {name: lambda self, index: index})
    assert why_not(cls()) == f"Mine has its own {name}, which is not known to be thread-safe"


# -- declarations ---------------------------------------------------------------------------------


def test_instance_declares_itself():
    """The attribute may be of the instance, and decides before that of the class."""
    dataset = Squares()
    dataset.thread_safe = True
    assert why_not(dataset) is None
    dataset = Declared()
    dataset.thread_safe = False
    assert why_not(dataset) == "dataset declares that it is not thread_safe"


@pytest.mark.parametrize("dataset", [Staged(), Folder(), Subset([1], [0])])
def test_declared_false_always_counts(dataset):
    """Datasets that would be known can say that they are not."""
    dataset.thread_safe = False
    assert why_not(dataset) == "dataset declares that it is not thread_safe"


def test_declared_false_deep_inside():
    """A part that says that it is not thread-safe decides for a StagedDataset and a folder."""
    transform = v2.Resize(3)
    transform.thread_safe = False
    dataset = Staged()
    dataset.transforms = [transform]
    phrase = "declares that it is not thread_safe"
    assert why_not(dataset) == f"dataset.transforms[0] {phrase}"
    assert why_not(Subset(dataset, [0])) == f"dataset.dataset.transforms[0] {phrase}"
    assert why_not_transform(transform) == f"dataset.transform {phrase}"


def test_declared_parts_are_known():
    """Transforms, loaders and functions can declare themselves."""
    assert why_not_transform(v1.Compose([DeclaredTransform(), declared_function])) is None
    assert why_not(Folder(loader=declared_function)) is None
    assert why_not_thread_safe([1], declared_function) is None
    assert why_not_thread_safe([1], DeclaredTransform().forward) is None


def test_declaration_is_not_inherited():
    """A wrapper that hands on attributes does not hand on the declaration."""

    class Wrapper(Dataset):
        def __init__(self, dataset):
            self.wrapped = dataset

        def __getattr__(self, name):
            return getattr(self.wrapped, name)

    assert Wrapper(Declared()).thread_safe
    assert why_not(Wrapper(Declared())) == "Wrapper is not known to be thread-safe"


def test_properties_are_not_called():
    """A property is the user's code, so it declares nothing safe."""

    class Asked(Squares):
        @property
        def thread_safe(self):
            raise AssertionError

    assert why_not(Asked()) == "dataset declares that it is not thread_safe"


# -- collate --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collate_fn", [None, default_collate, default_convert, our_collate, Staged().collate]
)
def test_known_collate_functions(collate_fn):
    """torch's functions, ours, and the hook of a StagedDataset are known."""
    assert why_not_thread_safe([1], collate_fn) is None


def test_other_collate_functions():
    """Other functions, methods and objects are named."""
    phrase = "which is not known to be thread-safe"
    for collate_fn, name in (
        (my_function, "the function my_function"),
        (lambda samples: samples, "a lambda"),
        (MyTransform().forward, "the method MyTransform.forward"),
        (MyTransform(), "a MyTransform"),
        (Folder().find_classes, "the method DatasetFolder.find_classes"),
    ):
        assert why_not_thread_safe([1], collate_fn) == f"collate_fn is {name}, {phrase}"


def test_partials_are_taken_apart():
    """A partial is known if its function and its arguments are."""
    resize = functools.partial(v2.functional.resize, size=3)
    assert why_not_transform(resize) is None
    phrase = why_not_transform(functools.partial(resize, antialias=my_function))
    assert phrase.startswith("dataset.transform.keywords['antialias'] is the func")
    phrase = why_not_thread_safe([1], functools.partial(my_function))
    assert phrase.startswith("collate_fn.func is the function my_function")


# -- torchvision's transforms ---------------------------------------------------------------------

ARGUMENTS = {
    **dict.fromkeys(("CenterCrop", "FiveCrop", "RandomCrop", "Resize", "TenCrop"), (3,)),
    **dict.fromkeys(("GaussianBlur", "Pad", "RandomResizedCrop", "RandomRotation"), (3,)),
    **dict.fromkeys(("JPEG", "RandomPosterize", "RandomShortestSize"), (3,)),
    **dict.fromkeys(("RandomAdjustSharpness", "UniformTemporalSubsample"), (3,)),
    **dict.fromkeys(("Compose", "RandomApply", "RandomChoice", "RandomOrder"), ([v1.Resize(3)],)),
    "ConvertBoundingBoxFormat": ("XYXY",),
    "ConvertImageDtype": (torch.float32,),
    "LinearTransformation": (torch.eye(2), torch.zeros(2)),
    "Normalize": ([0.5], [0.5]),
    "RandomAffine": (10,),
    "RandomResize": (3, 4),
    "RandomSolarize": (0.5,),
    "ScaleJitter": ((3, 3),),
    "SetClampingMode": ("soft",),
    "ToDtype": ({tv_tensors.Image: torch.float32, "others": None},),
}
"""The arguments of transforms that need some."""


def transforms_of(module):
    return [
        cls
        for name, cls in vars(module).items()
        if isinstance(cls, type)
        and cls.__module__.startswith("torchvision.transforms.")
        and name not in {"Lambda", "InterpolationMode", "AutoAugmentPolicy"}
    ]


@pytest.mark.filterwarnings("ignore")  # Of deprecated transforms.
@pytest.mark.parametrize(
    "cls",
    [*transforms_of(v1), *transforms_of(v2)],
    ids=lambda cls: f"{cls.__module__.split('.')[2]}.{cls.__name__}",
)
def test_every_transform_is_known(cls):
    """All transforms of the installed torchvision are known, but Lambda."""
    assert why_not_transform(v1.Compose([cls(*ARGUMENTS.get(cls.__name__, ()))])) is None


def methods_that_assign_to_self(package):
    """Return the methods in the source of a package that assign to self, apart from __init__."""
    found = set()
    for path in Path(package.__file__).parent.rglob("*.py"):
        for cls in ast.walk(ast.parse(path.read_text())):
            for method in cls.body if isinstance(cls, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                    targets = [
                        ast.unparse(target)
                        for node in ast.walk(method)
                        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
                        for target in getattr(node, "targets", None) or [node.target]
                    ]
                    if any("self." in target for target in targets):
                        found.add(f"{cls.name}.{method.name}")
    return found


def test_transforms_keep_no_state():
    """No transform of the installed torchvision assigns to itself when it is called."""
    assert methods_that_assign_to_self(v1) == set()


def test_state_would_be_found(tmp_path):
    """The search for state sees attributes, items, tuples and sums."""
    source = "class A:\n" + "".join(
        f"    def f{number}(self, x):\n        {line}\n"
        for number, line in enumerate(
            ("self.x = x", "self.x[0] = x", "y, self.x = x", "self.x += x", "y = x")
        )
    )
    (tmp_path / "__init__.py").write_text(source)
    package = type("Package", (), {"__file__": str(tmp_path / "__init__.py")})
    assert methods_that_assign_to_self(package) == {"A.f0", "A.f1", "A.f2", "A.f3"}


@pytest.mark.parametrize("module", [v1, v2])
def test_function_in_lambda_counts(module):
    """A Lambda is as well known as its function."""
    phrase = "dataset.transform.transforms[1].lambd is a lambda, which is not known to be"
    transform = module.Compose([module.Resize(3), module.Lambda(lambda image: image)])
    assert why_not_transform(transform) == f"{phrase} thread-safe"
    assert why_not_transform(module.Lambda(v1.functional.hflip)) is None


@pytest.mark.parametrize("container", [v1.Compose, v1.RandomOrder, v2.RandomChoice, v2.RandomApply])
def test_unknown_transform_is_named(container):
    """What is not known is found in containers of transforms, and named by where it is."""
    phrase = why_not_transform(v1.Compose([v2.Identity(), container([MyTransform()])]))
    assert phrase == (
        "dataset.transform.transforms[1].transforms[0] is a MyTransform, which is not known to be "
        "thread-safe"
    )


def test_modules_of_transforms():
    """torch's Sequential and ModuleList are as well known as their modules."""
    assert why_not_transform(torch.nn.Sequential(v1.Resize(3), v1.CenterCrop(2))) is None
    assert why_not_transform(v1.RandomApply(torch.nn.ModuleList([v1.Resize(3)]))) is None
    phrase = why_not_transform(torch.nn.Sequential(v1.Resize(3), MyTransform()))
    assert phrase.startswith("dataset.transform._modules['1'] is a MyTransform")


def test_functions_held_by_transforms():
    """A function that a user gives to a transform is not known, nor is a hook."""
    phrase = why_not_transform(v2.SanitizeBoundingBoxes(labels_getter=my_function))
    assert "labels_getter is the function my_function" in phrase
    transform = v2.Resize(3)
    transform.register_forward_hook(lambda *_: None)
    assert "_forward_hooks[" in why_not_transform(transform)


def test_subclass_of_transform_is_not_known():
    """Only the exact classes of torchvision are known."""
    transform = type("Mine", (v2.Resize,), {})(3)
    assert why_not_transform(transform).startswith("dataset.transform is a Mine")


def test_presets_of_models_are_known():
    """The transforms that come with the weights of a model are known."""
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    assert why_not_transform(weights.transforms()) is None


def test_functions_of_libraries_are_known():
    """Functions of torchvision and constructors of plain data are known as transforms."""
    for function in (
        v1.functional.to_tensor,
        v2.functional.to_image,
        torch.tensor,
        int,
        np.asarray,
    ):
        assert why_not(Folder(target_transform=function)) is None
    assert why_not(Folder(target_transform=MyTransform)) is not None


def test_both_transforms_are_looked_at():
    """The target's transform counts, and so does a joint one where it is used."""
    phrase = why_not(Folder(target_transform=my_function))
    assert phrase.startswith("dataset.target_transform is the function my_function")
    dataset = made_dataset(datasets.VOCSegmentation, transform=MyTransform())
    assert why_not(dataset).startswith("dataset.transforms.transform is a MyTransform")


# -- torchvision's datasets -----------------------------------------------------------------------

NOT_KNOWN = {"FakeData", "HMDB51", "Kinetics", "LSUN", "LSUNClass", "PCAM", "UCF101"}


def made_dataset(cls, **transforms):
    """Return a dataset of torchvision without its files."""
    dataset = cls.__new__(cls)
    datasets.VisionDataset.__init__(dataset, "nowhere", **transforms)
    return dataset


@pytest.mark.parametrize("name", [*datasets.__all__, "LSUNClass"])
def test_every_dataset_is_decided(name):
    """All datasets of the installed torchvision are known, but those that are listed."""
    cls = getattr(datasets.lsun, name, None) or getattr(datasets, name)
    if not (isinstance(cls, type) and issubclass(cls, datasets.VisionDataset)):
        assert name in {"wrap_dataset_for_transforms_v2"}
        return
    phrase = why_not(made_dataset(cls))
    assert phrase == (f"{name} is not known to be thread-safe" if name in NOT_KNOWN else None)
    mine = why_not(made_dataset(type("Mine", (cls,), {})))
    assert mine == (phrase and phrase.replace(name, "Mine"))


def test_reading_keeps_no_state():
    """No known dataset of the installed torchvision assigns to itself when a sample is read."""
    when_made = {
        *("CIFAR10._load_meta", "STL10.__load_folds", "DistributedSampler.set_epoch"),
        *("INaturalist._init_2021", "INaturalist._init_pre2021"),
        *(f"Flickr8kParser.handle_{name}" for name in ("starttag", "endtag", "data")),
    }
    of_videos = {name for name in methods_that_assign_to_self(datasets) if "VideoClips" in name}
    assert methods_that_assign_to_self(datasets) - of_videos <= when_made


@pytest.mark.parametrize(
    "loader",
    [
        *(datasets.folder.default_loader, datasets.folder.pil_loader, ImageLoader(8)),
        *(torchvision.io.decode_image, torchvision.io.read_image),
    ],
)
def test_known_loaders(loader):
    """torchvision's functions and ours read image files in any thread."""
    assert why_not(Folder(loader=loader)) is None


def test_torchcodec_is_known_by_name():
    """Functions of torchcodec are known, whether or not it is imported here."""

    def decode_image(path):
        return path

    decode_image.__module__ = "torchcodec.decoders"
    assert why_not(Folder(loader=decode_image)) is None


def test_other_loaders_are_not_known():
    """A loader of the user's is named."""
    phrase = why_not(Folder(loader=my_function))
    assert phrase.startswith("dataset.loader is the function my_function, which is not known")
    loader = type("MyLoader", (ImageLoader,), {})(8)
    assert why_not(Folder(loader=loader)).startswith("dataset.loader is a MyLoader")
    loader = datasets.folder.accimage_loader
    assert why_not(Folder(loader=loader)).startswith("dataset.loader is the function accimage")


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (Folder, "__getitem__"),
        (Folder, "__getitems__"),
        (Folder, "__getattr__"),
        (Folder, "loader"),
        (datasets.CocoDetection, "_load_image"),
        (datasets.CocoDetection, "__getitem__"),
        (datasets.KittiFlow, "_read_flow"),
    ],
)
def test_overriding_reading_is_not_known(base, name):
    """A subclass that changes how samples are read is not known."""
    cls = type("Mine", (base,), {name: lambda self, *_: 0})
    dataset = cls() if issubclass(cls, Folder) else made_dataset(cls)
    assert why_not(dataset) in (
        f"Mine has its own {name}, which is not known to be thread-safe",
        "Mine is not known to be thread-safe",
    )


def test_property_of_subclass_counts():
    """A property in the place of an attribute runs the user's code for each sample."""
    cls = type("Mine", (Folder,), {"samples": property(lambda self: [], lambda self, value: None)})
    assert why_not(cls()) == "Mine has its own samples, which is not known to be thread-safe"


def test_harmless_subclass_is_known():
    """A subclass may find its files in its own way, and have methods of its own."""

    class Mine(Folder):
        transform = None

        def find_classes(self, directory):
            return [], {}

        def __len__(self):
            return 3

        def describe(self):
            return my_function(self)

    assert why_not(Mine()) is None


def test_object_in_place_of_list():
    """An object of the user's that reading a sample uses is not known."""
    phrase = why_not(Folder(samples=Squares()))
    assert phrase == "dataset.samples is a Squares, which is not known to be thread-safe"
    assert why_not(Folder(samples=[(Squares(), 0)])).startswith("dataset.samples[0][0] is a Squ")


def test_wrapped_for_v2_is_known():
    """torchvision's wrapper for transforms v2 is as well known as the dataset in it."""
    wrap = datasets.wrap_dataset_for_transforms_v2
    assert why_not(wrap(Folder(v2.Compose([v2.Resize(3)])))) is None
    assert why_not(wrap(Folder(MyTransform()))).startswith("dataset.transform is a MyTr")
    assert why_not(wrap(Folder(loader=my_function))).startswith("dataset._dataset.loader is the fu")


# -- robustness -----------------------------------------------------------------------------------


def test_circles_are_not_known():
    """A dataset that holds itself ends the search, and is not known."""
    transforms = v1.Compose([])
    transforms.transforms.append(transforms)
    assert why_not_transform(transforms) == "Folder is not known to be thread-safe"


def test_slots_are_no_obstacle():
    """An object without a __dict__ is named like any other."""

    class Slotted:
        __slots__ = ("file",)

    assert why_not_transform(Slotted()).startswith("dataset.transform is a Slotted")
    assert why_not(Slotted()) == "Slotted is not known to be thread-safe"
    assert why_not_transform(threading.Lock()).startswith("dataset.transform is a lock")
