"""Folders of images: their files, and the same datasets of them for each loader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader as load_by_pil
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from .. import DataLoader, ImageLoader, StagedDataset
from ._parser import CommandError

_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Lower-case suffixes of the formats that `ImageLoader` decodes."""

_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""Of ImageNet's pixels, which training scripts normalise with."""


# -- files ----------------------------------------------------------------------------------------


class FoundFile(NamedTuple):
    """A path in a folder of images."""

    path: str
    problem: str | None = None
    """Why it cannot be read or decoded, if that is known."""


def images_at(path: Path) -> Iterator[FoundFile]:
    """Return the images in a folder and its subfolders; or a single file, whatever its name."""
    if path.is_dir():
        return _images_below(_checked_folder(path))
    try:
        path.stat()
    except OSError as error:
        raise CommandError(
            f"{path}: {error.strerror}. Give an image or a folder of images."
        ) from None
    return iter([_checked_file(str(path))])


def _images_below(folder: str) -> Iterator[FoundFile]:
    """Return the images in a folder and its subfolders, links included, one folder at a time."""
    errors: list[OSError] = []
    for parent, subfolders, names in os.walk(folder, onerror=errors.append, followlinks=True):
        here = Path(parent).resolve()
        # A link that leads back to a folder around it would never end.
        subfolders[:] = sorted(
            s for s in subfolders if not here.is_relative_to((here / s).resolve())
        )
        for name in names:
            if name.lower().endswith(_SUFFIXES):
                yield _checked_file(f"{parent}/{name}")
    for error in errors:
        yield FoundFile(error.filename, f"the folder cannot be read: {error.strerror}")


def _checked_file(path: str) -> FoundFile:
    # Opening a named pipe would wait for its other end. Opening a broken link is an error, which
    # is reported then. (pathlib's functions would raise without permission to look.)
    is_regular = os.path.isfile(path) or not os.path.exists(path)  # noqa: PTH110, PTH113
    return FoundFile(path, None if is_regular else "it is no regular file")


def _checked_folder(folder: Path) -> str:
    """Return the path of a folder that can be listed."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise CommandError(f"{folder}: {error.strerror}. Give a folder of images.") from None
    return str(folder)


# -- datasets -------------------------------------------------------------------------------------


class ImageJob:
    """Square images from a folder, with the same augmentation in each loader.

    Args:
        folder: with a subfolder for each class or, if there are images in it, those.
        size: pixels of each side.
        is_augmented: random crops, flipped at random; else the center crop.

    """

    def __init__(self, folder: Path, size: int, *, is_augmented: bool) -> None:
        self.folder = _checked_folder(folder)
        self.size = size
        self.is_augmented = is_augmented
        files = [path for path in Path(folder).iterdir() if path.is_file()]
        self._files = sorted(str(path) for path in files if path.name.lower().endswith(_SUFFIXES))
        self._allow_empty = False
        self.num_images = len(self._files) or self._count_of_classes()
        if self.num_images == 0:
            raise CommandError(f"there are no images in {self.folder}")

    def _count_of_classes(self) -> int:
        try:
            dataset = ImageFolder(self.folder, allow_empty=True)
        except FileNotFoundError:  # There is no subfolder either.
            return 0
        # torchvision has to be told that a class may have no images.
        self._allow_empty = len(set(dataset.targets)) < len(dataset.classes)
        return len(dataset)

    def ours(self) -> Dataset[Any]:
        """Return the dataset of `code`."""
        loader = ImageLoader(**self._loader_arguments)
        if self._files:
            return StagedDataset.from_functions(
                self._files, load=loader.read, preprocess=loader.decode
            )
        return self._image_folder(loader)

    def by_pil(self) -> Dataset[Any]:
        """Return a dataset that decodes with PIL, torchvision's default."""
        return self._of_torchvision(load_by_pil, v2.PILToTensor())

    def by_torchvision_io(self) -> Dataset[Any]:
        """Return a dataset that decodes with `torchvision.io`."""
        load = partial(decode_image, mode=ImageReadMode.RGB)
        return self._of_torchvision(load, *self._last_of_tensors())

    def _of_torchvision(self, load: Any, *last: Any) -> Dataset[Any]:
        geometry = [getattr(v2, name)(argument) for name, argument in self._geometry]
        transform = v2.Compose([*geometry, *last])
        if self._files:
            return StagedDataset.from_functions(self._files, load=load, preprocess=transform)
        return self._image_folder(load, transform)

    @property
    def _geometry(self) -> list[tuple[str, float]]:
        """The names of torchvision's transforms, which are those of v1 and v2, and arguments."""
        if self.is_augmented:
            return [("RandomResizedCrop", self.size), ("RandomHorizontalFlip", 0.5)]
        return [("Resize", self._resized_size), ("CenterCrop", self.size)]

    @property
    def _resized_size(self) -> int:
        return self.size

    def _last_of_tensors(self) -> list[Any]:
        """Return the transforms of tensors behind the geometry."""
        return []

    def _image_folder(self, load: Any, transform: Any = None) -> Dataset[Any]:
        dataset: Dataset[Any] = ImageFolder(
            self.folder, loader=load, transform=transform, allow_empty=self._allow_empty
        )
        return dataset

    @property
    def _loader_arguments(self) -> dict[str, Any]:
        if self.is_augmented:
            return {"size": self.size, "crop": "random", "horizontal_flip": 0.5}
        return {"size": self.size, "crop": "center"}

    def code(self, batch_size: int, num_workers: int) -> str:
        """Return Python code that makes our loader."""
        arguments = ", ".join(f"{name}={_quoted(v)}" for name, v in self._loader_arguments.items())
        folder = _quoted(self.folder)
        if self._files:
            suffixes = ", ".join(sorted({_quoted(Path(path).suffix) for path in self._files}))
            lines = [
                "from pathlib import Path",
                "",
                "from spdl_torch import DataLoader, ImageLoader, StagedDataset",
                "",
                f"images = ImageLoader({arguments})",
                f"folder, suffixes = Path({folder}), {{{suffixes}}}",
                "paths = sorted(path for path in folder.iterdir() if path.suffix in suffixes)",
                "dataset = StagedDataset.from_functions(paths, load=images.read, "
                "preprocess=images.decode)",
            ]
        else:
            lines = [
                "from spdl_torch import DataLoader, ImageLoader",
                "from torchvision.datasets import ImageFolder",
                "",
                f"images = ImageLoader({arguments})",
                f"dataset = ImageFolder({folder}, loader=images{self._empty_argument})",
            ]
        return "\n".join([*lines, _loader_line(batch_size, num_workers)])

    @property
    def _empty_argument(self) -> str:
        return ", allow_empty=True" if self._allow_empty else ""

    @staticmethod
    def levels(pixels: torch.Tensor) -> torch.Tensor:
        """Return the pixels of a dataset of this job as numbers from 0 to 255."""
        return pixels.double()


class RecipeJob(ImageJob):
    """The same with the transforms of a training script, to normalised floats.

    `by_pil` returns its dataset as it is, and `ours` the one that `fuse=True` makes of it.
    """

    def __init__(self, folder: Path, size: int, *, is_augmented: bool) -> None:
        super().__init__(folder, size, is_augmented=is_augmented)
        if self._files:
            raise CommandError(
                f"--recipe is for a dataset of torchvision, and {folder} has images beside its "
                "subfolders. Give a folder that has one subfolder for each class, and no images."
            )

    def by_pil(self) -> Dataset[Any]:
        geometry = [getattr(v1, name)(argument) for name, argument in self._geometry]
        last = [v1.ToTensor(), v1.Normalize(_MEAN, _STD)]
        return self._image_folder(load_by_pil, v1.Compose([*geometry, *last]))

    def ours(self) -> Dataset[Any]:
        [fusion] = DataLoader(self.by_pil(), fuse=True).plan.fusions
        fused: Dataset[Any] = fusion.fused_dataset()
        return fused

    @property
    def _resized_size(self) -> int:
        return self.size * 256 // 224  # As is usual.

    def _last_of_tensors(self) -> list[Any]:
        return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)]

    def code(self, batch_size: int, num_workers: int) -> str:
        geometry = ", ".join(f"{name}({argument})" for name, argument in self._geometry)
        names = sorted(["Compose", "Normalize", "ToTensor", *dict(self._geometry)])
        return "\n".join(
            [
                "from spdl_torch import DataLoader",
                "from torchvision.datasets import ImageFolder",
                f"from torchvision.transforms import {', '.join(names)}",
                "",
                f"normalize = Normalize({_MEAN}, {_STD})",
                f"chain = Compose([{geometry}, ToTensor(), normalize])",
                f"dataset = ImageFolder({_quoted(self.folder)}, chain{self._empty_argument})",
                _loader_line(batch_size, num_workers, ", fuse=True"),
            ]
        )

    @staticmethod
    def levels(pixels: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(values).view(3, 1, 1).double() for values in (_MEAN, _STD))
        return (pixels.double() * std + mean) * 255


def _loader_line(batch_size: int, num_workers: int, last: str = "") -> str:
    arguments = f"batch_size={batch_size}, shuffle=True, num_workers={num_workers}{last}"
    return f"loader = DataLoader(dataset, {arguments})"


def _quoted(value: Any) -> str:
    """Return a Python literal, with double quotes if that needs no escapes."""
    return f'"{value}"' if isinstance(value, str) and repr(value) == f"'{value}'" else repr(value)
