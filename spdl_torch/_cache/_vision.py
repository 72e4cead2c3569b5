"""The parts of torchvision's datasets: files, and transforms before the first random one."""

from __future__ import annotations

import copy
import enum
import os
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Final

import torch
from torchvision import get_image_backend
from torchvision import transforms as v1
from torchvision.datasets.folder import default_loader, pil_loader
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

from .._dataset import Hooks, is_image_folder
from .._deferred import Tail
from .._fuse import FusedLoader, FusedTransform, flattened, is_exactly, names_used_by_reading
from .._image import ImageLoader
from ._parts import Parts

_DETERMINISTIC: Final = (
    *(v1.CenterCrop, v1.ConvertImageDtype, v1.Grayscale, v1.Normalize, v1.PILToTensor, v1.Pad),
    *(v1.Resize, v1.ToTensor),
    *(v2.CenterCrop, v2.ConvertImageDtype, v2.Grayscale, v2.Normalize, v2.PILToTensor, v2.Pad),
    *(v2.RGB, v2.Resize, v2.ToDtype, v2.ToImage, v2.ToPureTensor, v2.ToTensor),
)
"""Transforms that return the same for the same image. All others are done again in each epoch."""


def vision_parts_of(dataset: Any, hooks: Hooks, max_side: int | None) -> Parts | None:
    """Return the parts of a dataset if it is one of torchvision's whose code is known."""
    if is_image_folder(dataset):
        if type(dataset.loader) not in (ImageLoader, FusedLoader):
            return None  # It may decode in its own way.
        return _FolderParts(dataset, hooks, max_side)
    if "loader" not in names_used_by_reading(dataset):
        return None
    is_known = dataset.loader in (default_loader, pil_loader)
    has_transforms = type(dataset.transforms) in (StandardTransform, type(None))
    return _LoadedParts(dataset, hooks) if is_known and has_transforms else None


def _identity_of_file(path: Any) -> Any:
    try:
        status = os.stat(path)  # noqa: PTH116 (takes a third of the time)
    except OSError:
        return None  # To load it raises the error that it raises without a cache.
    # Another run may have another working directory.
    path = os.path.abspath(path)  # noqa: PTH100 (takes a third of the time)
    return "file", path, status.st_size, status.st_mtime_ns


class _FolderParts(Parts):
    """A folder of files that our `ImageLoader` decodes, or the loader that `fuse` puts there."""

    is_known = True

    def __init__(self, dataset: Any, hooks: Hooks, max_side: int | None) -> None:
        super().__init__(dataset, hooks)
        self._loader = dataset.loader
        self._max_side = max_side
        self._chain = _steps_of(dataset.transform)
        self._num_first = 0
        if not self._loader.is_random:
            self._num_first = _num_deterministic(self._chain)
        rest = self._chain[self._num_first :]
        is_random = self._loader.is_random
        self.value_level = "sample" if not is_random and _only_reads(rest) else "decoded"
        self.only_reads = is_random or _only_reads(rest)
        self.hands_out = not is_random and not rest
        self.raw_fingerprint = "the bytes of a file"
        self.value_fingerprint = self._fingerprint()

    def _fingerprint(self) -> str | None:
        loader = self._loader
        decoding = loader.decoding
        if loader.is_random:
            # What is random, and what follows, is done again.
            used = decoding._replace(interpolation="bilinear")
            # Large files are reduced for some sizes, so they are not kept for those.
            sizes = None if self._max_side else loader.resizing
            return _fingerprint("images", used, self._max_side, sizes)
        what = loader.head if isinstance(loader, FusedLoader) else vars(loader)
        transforms = [_plain(step) for step in self._chain[: self._num_first]]
        return _fingerprint("resized", what, decoding, transforms)

    def identity(self, index: Any) -> Any:
        return _identity_of_file(self._dataset.samples[index][0])

    def pack(self, raw: Any) -> Any:
        return raw[1]

    def unpack(self, index: Any, packed: Any) -> Any:
        path, target = self._dataset.samples[index]
        return path, packed, target

    def first(self, index: Any, raw: Any) -> Any:  # noqa: ARG002
        path, data, _ = raw
        if self._loader.is_random:
            return self._loader.decode_whole(data, path, max_side=self._max_side)
        value = self._loader.decode(data, path)
        if isinstance(self._loader, FusedLoader):
            return value if isinstance(value, torch.Tensor) else None
        for transform in self._chain[: self._num_first]:
            value = transform(value)
        return value

    def rest(self, index: Any, value: Any) -> Any:
        path, target = self._dataset.samples[index]
        if self._loader.is_random:
            value = self._loader.render(value, path)
        for transform in self._chain[self._num_first :]:
            value = transform(value)
        if self._dataset.target_transform is not None:
            target = self._dataset.target_transform(target)
        return value, target


class _Found(Exception):  # noqa: N818 (it ends `__getitem__` early)
    """What a dataset's code has come to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _LoadedParts(Parts):
    """A dataset of torchvision that opens files with its `loader`, which is the default one.

    Copies of it, with other loaders and transforms, tell the file of a sample, make its image up to
    the first random transform, and make a sample of such an image. So labels are never kept.
    """

    is_known = True

    def __init__(self, dataset: Any, hooks: Hooks) -> None:
        super().__init__(dataset, hooks)
        chain = _steps_of(dataset.transform)
        number = _num_deterministic(chain)
        rest = chain[number:]
        self.value_level = "sample" if _only_reads(rest) else "decoded"
        # PIL's images are new objects, and of what follows a tensor only the tail is known.
        self.only_reads = _only_reads(rest)
        self.hands_out = not rest
        self._image = threading.local()
        self._asked = _twin(dataset, None, loader=_tell)
        self._begun = _twin(dataset, _Chain((*chain[:number], _tell)))
        self._resumed = _twin(dataset, _Chain(rest), loader=self._kept_image)
        transforms = [_plain(step) for step in chain[:number]]
        how = get_image_backend(), version("pillow")
        self.value_fingerprint = _fingerprint("by PIL", how, transforms)

    def _kept_image(self, path: Any) -> Any:  # noqa: ARG002
        return self._image.value

    def identity(self, index: Any) -> Any:
        try:
            self._asked[index]
        except _Found as found:
            return _identity_of_file(found.value)
        return None

    def first(self, index: Any, raw: Any) -> Any:  # noqa: ARG002
        try:
            self._begun[index]
        except _Found as found:
            return found.value
        return None

    def rest(self, index: Any, value: Any) -> Any:
        self._image.value = value
        try:
            return self._resumed[index]
        finally:
            del self._image.value


def _tell(value: Any) -> Any:
    raise _Found(value)


def _twin(dataset: Any, transform: Any, **changed: Any) -> Any:
    """Return a copy of a dataset with another transform for its images."""
    twin = copy.copy(dataset)
    if dataset.transforms is not None:
        changed["transforms"] = StandardTransform(transform, dataset.transforms.target_transform)
    vars(twin).update(changed, transform=transform)
    return twin


class _Chain:
    """A part of a chain of transforms."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self._transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self._transforms:
            value = transform(value)
        return value


def _steps_of(transform: Any) -> tuple[Callable[[Any], Any], ...]:
    if not isinstance(transform, FusedTransform):
        return tuple(flattened(transform))
    if transform.head is not None:  # What the loader returns is for it alone.
        return (transform,)
    tail = () if transform.tail is None else (transform.tail.defer,)
    return (*transform.transforms, *tail)


def _num_deterministic(chain: Sequence[Any]) -> int:
    number = 0
    while number < len(chain) and (
        is_exactly(chain[number], *_DETERMINISTIC) and _plain(chain[number]) is not None
    ):
        number += 1
    return number


def _only_reads(rest: Sequence[Any]) -> bool:
    """Return whether what is left to do is nothing, or a tail that is done by collate."""
    if not rest:
        return True
    (step, *others) = rest
    if isinstance(step, FusedTransform):
        num_done = step.head.num_transforms if step.head else 0
        return step.tail is not None and len(step.transforms) == num_done
    return not others and isinstance(getattr(step, "__self__", None), Tail)


# -- fingerprints ---------------------------------------------------------------------------------


def _fingerprint(*parts: Any) -> str | None:
    """Return a text for some options and the versions of the libraries, or None."""
    plain = [_plain(part) for part in parts]
    if any(value is None and part is not None for value, part in zip(plain, parts, strict=True)):
        return None
    versions = [f"{name} {version(name)}" for name in ("av", "torch", "torchvision")]
    return repr([*plain, *versions])


def _plain(value: Any) -> Any:
    """Return plain types that determine a value, or None."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | enum.Enum):
        return "None" if value is None else str(value)
    if isinstance(value, list | tuple):
        return _all([_plain(item) for item in value])
    if isinstance(value, dict):
        return _all([_plain(item) for pair in value.items() for item in pair])
    if hasattr(value, "__dict__") and type(value).__module__.split(".")[0] in {
        "torchvision",
        __package__.split(".")[0],
    }:
        own = {
            name: item
            for name, item in vars(value).items()
            if not (isinstance(value, torch.nn.Module) and name in _OF_MODULES)
        }
        inside = _plain(own)
        return None if inside is None else [_name(type(value)), inside]
    return _name(value) if isinstance(value, type) else None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
"""The attributes of all modules, such as its hooks: `is_exactly` knows that there are none."""


def _all(values: list[Any]) -> list[Any] | None:
    return None if any(value is None for value in values) else values
