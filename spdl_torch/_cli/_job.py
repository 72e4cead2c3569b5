"""A folder of images and what is made of them, the same by whichever loader."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader as load_by_pil
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from .. import ImageLoader, StagedDataset
from ._folder import existing_folder, images_beside_folders
from ._parser import CommandError

__all__ = ["ImageJob"]


class ImageJob:
    """Square images from a folder: random parts, mirrored at random, or the middle.

    Args:
        folder: with a subfolder for each class or, if there are images in it, those.
        size: pixels of each side.
        is_augmented: random parts, mirrored at random; else the middle square.

    """

    def __init__(self, folder: Path, size: int, *, is_augmented: bool) -> None:
        self.folder = existing_folder(folder)
        self.size = size
        self.is_augmented = is_augmented
        self._files = images_beside_folders(self.folder)
        self._allow_empty = False
        self.num_images = len(self._files) or self._count_of_classes()

    def _count_of_classes(self) -> int:
        nothing = CommandError(f"there are no images in {self.folder}")
        try:
            self._allow_empty = _has_empty_class(self.folder)
            num_images = len(ImageFolder(self.folder, allow_empty=self._allow_empty))
        except FileNotFoundError:  # There is no subfolder either.
            raise nothing from None
        if num_images == 0:
            raise nothing
        return num_images

    # -- datasets ----------------------------------------------------------------------------------

    def ours(self) -> Dataset[Any]:
        """As `code` has it."""
        loader = ImageLoader(**self._loader_arguments)
        if self._files:
            return StagedDataset.from_functions(
                self._files, load=loader.read, preprocess=loader.decode
            )
        return self._image_folder(loader)

    def by_pil(self) -> Dataset[Any]:
        """Torchvision's default."""
        return self._of_torchvision(load_by_pil, v2.Compose([*self._transforms, v2.PILToTensor()]))

    def by_torchvision_io(self) -> Dataset[Any]:
        """Torchvision's own decoder."""
        load = partial(decode_image, mode=ImageReadMode.RGB)
        return self._of_torchvision(load, v2.Compose(self._transforms))

    def _of_torchvision(self, load: Any, transform: Any) -> Dataset[Any]:
        if self._files:
            return _Files(self._files, load, transform)
        return self._image_folder(load, transform)

    def _image_folder(self, load: Any, transform: Any = None) -> Dataset[Any]:
        dataset: Dataset[Any] = ImageFolder(
            self.folder, loader=load, transform=transform, allow_empty=self._allow_empty
        )
        return dataset

    @property
    def _transforms(self) -> list[Any]:
        if self.is_augmented:
            return [v2.RandomResizedCrop(self.size), v2.RandomHorizontalFlip(0.5)]
        return [v2.Resize(self.size), v2.CenterCrop(self.size)]

    @property
    def _loader_arguments(self) -> dict[str, Any]:
        if self.is_augmented:
            return {"size": self.size, "crop": "random", "horizontal_flip": 0.5}
        return {"size": self.size, "crop": "center"}

    # -- code --------------------------------------------------------------------------------------

    def code(self, batch_size: int, num_workers: int) -> str:
        """What to write for our loader."""
        arguments = ", ".join(f"{name}={_quoted(v)}" for name, v in self._loader_arguments.items())
        lines = self._code_of_files(arguments) if self._files else self._code_of_classes(arguments)
        loader = f"dataset, batch_size={batch_size}, shuffle=True, num_workers={num_workers}"
        return "\n".join([*lines, f"loader = DataLoader({loader})"])

    def _code_of_classes(self, arguments: str) -> list[str]:
        empty = ", allow_empty=True" if self._allow_empty else ""
        return [
            "from spdl_torch import DataLoader, ImageLoader",
            "from torchvision.datasets import ImageFolder",
            "",
            f"images = ImageLoader({arguments})",
            f"dataset = ImageFolder({_quoted(self.folder)}, loader=images{empty})",
        ]

    def _code_of_files(self, arguments: str) -> list[str]:
        suffixes = ", ".join(sorted({_quoted(path.suffix) for path in self._files}))
        return [
            "from pathlib import Path",
            "",
            "from spdl_torch import DataLoader, ImageLoader, StagedDataset",
            "",
            f"images = ImageLoader({arguments})",
            f"folder, suffixes = Path({_quoted(self.folder)}), {{{suffixes}}}",
            "paths = sorted(path for path in folder.iterdir() if path.suffix in suffixes)",
            "dataset = StagedDataset.from_functions(paths, load=images.read, "
            "preprocess=images.decode)",
        ]


class _Files(Dataset[Any]):
    """Images without classes."""

    def __init__(self, paths: list[Path], load: Any, transform: Any) -> None:
        self._paths = paths
        self._load = load
        self._transform = transform

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._load(str(self._paths[index])))


def _has_empty_class(folder: str) -> bool:
    """Whether torchvision has to be told that a class may have no images."""
    dataset = ImageFolder(folder, allow_empty=True)
    return len(set(dataset.targets)) < len(dataset.classes)


def _quoted(value: Any) -> str:
    """In Python, with double quotes if that is as simple."""
    return f'"{value}"' if isinstance(value, str) and repr(value) == f"'{value}'" else repr(value)
