"""Folders of images: their files, and the same datasets of them for each loader."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader as load_by_pil
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from .. import ImageLoader, StagedDataset
from ._parser import CommandError

__all__ = ["ImageJob", "Unreadable", "images_at"]

_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Lower-case suffixes of the formats that `ImageLoader` decodes."""

_NOT_REGULAR = "it is no regular file"


# -- files ----------------------------------------------------------------------------------------


class Unreadable(NamedTuple):
    """A path in a folder of images that cannot be read."""

    path: str
    reason: str


def images_at(path: Path) -> Iterator[str | Unreadable]:
    """Return the images in a folder and its subfolders; or a single file, whatever its name."""
    if path.is_dir():
        return _images_below(_checked_folder(path))
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise CommandError(
            f"{path}: {error.strerror}. Give an image or a folder of images."
        ) from None
    return iter([str(path) if is_file else Unreadable(str(path), _NOT_REGULAR)])


def _checked_folder(folder: Path) -> str:
    """Return the path of a folder that can be listed."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise CommandError(f"{folder}: {error.strerror}. Give a folder of images.") from None
    return str(folder)


def _images_below(
    folder: str, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[str | Unreadable]:
    """Return the images in a folder and its subfolders, links included.

    Only the names of subfolders are collected, so there may be millions of files. `above` are the
    folders around this one, to recognise a link that leads back.
    """
    subfolders = []
    try:
        found = os.stat(folder)  # noqa: PTH116 (strings all the way)
        identity = found.st_dev, found.st_ino
        if identity in above:
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    subfolders.append(entry.path)
                elif _has_image_name(entry):
                    # Opening a named pipe would wait for its other end. Opening a broken link is
                    # an error, which is reported then.
                    is_regular = entry.is_file() or not os.path.exists(entry.path)  # noqa: PTH110
                    yield entry.path if is_regular else Unreadable(entry.path, _NOT_REGULAR)
    except OSError as error:
        yield Unreadable(folder, f"the folder cannot be read: {error.strerror}")
        return
    for subfolder in sorted(subfolders):
        yield from _images_below(subfolder, (*above, identity))


def _has_image_name(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(_SUFFIXES)


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
        with os.scandir(self.folder) as entries:
            found = [Path(e.path) for e in entries if _has_image_name(e) and e.is_file()]
        self._files = sorted(found)
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
        return self._of_torchvision(partial(decode_image, mode=ImageReadMode.RGB))

    def _of_torchvision(self, load: Any, *last: Any) -> Dataset[Any]:
        if self.is_augmented:
            first = [v2.RandomResizedCrop(self.size), v2.RandomHorizontalFlip(0.5)]
        else:
            first = [v2.Resize(self.size), v2.CenterCrop(self.size)]
        transform = v2.Compose([*first, *last])
        if self._files:
            return _Files(self._files, load, transform)
        return self._image_folder(load, transform)

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
            suffixes = ", ".join(sorted({_quoted(path.suffix) for path in self._files}))
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
            empty = ", allow_empty=True" if self._allow_empty else ""
            lines = [
                "from spdl_torch import DataLoader, ImageLoader",
                "from torchvision.datasets import ImageFolder",
                "",
                f"images = ImageLoader({arguments})",
                f"dataset = ImageFolder({folder}, loader=images{empty})",
            ]
        loader = f"dataset, batch_size={batch_size}, shuffle=True, num_workers={num_workers}"
        return "\n".join([*lines, f"loader = DataLoader({loader})"])


class _Files(Dataset[Any]):
    """Images without classes, decoded by torchvision."""

    def __init__(self, paths: list[Path], load: Any, transform: Any) -> None:
        self._paths = paths
        self._load = load
        self._transform = transform

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._load(str(self._paths[index])))


def _quoted(value: Any) -> str:
    """Return a Python literal, with double quotes if that needs no escapes."""
    return f'"{value}"' if isinstance(value, str) and repr(value) == f"'{value}'" else repr(value)
