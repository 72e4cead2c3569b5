"""Which datasets can be fused, and the copies of them that are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final

import torch
import torchvision
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets.folder import default_loader, pil_loader
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms.functional import pil_to_tensor

from .. import _collate
from .._deferred import Tail
from .._image import Decoding, ImageLoader
from .._settings import LoaderSettings
from ._chain import FusedTransform, Kind, Transform, flattened, head_of, is_of_tail, tail_of
from ._head import FusedLoader, Head

_DEFAULT_COLLATES: Final = (torch.utils.data.default_collate, _collate.default_collate)
_GEOMETRY: Final = ("size", "crop", "horizontal_flip")
"""The attributes of an `ImageLoader` that change the size of an image, or mirror it."""


@dataclass(frozen=True)
class Fusion:
    """What `fuse` does with the transforms of one dataset. `print()` says it in words.

    >>> from torchvision import transforms
    >>> chain = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    >>> dataset = torchvision.datasets.ImageFolder("photos", chain)
    >>> for fusion in DataLoader(dataset, batch_size=4, fuse=True).plan.fusions: print(fusion)
    Fused: Resize while decoding; ToTensor once per batch.
    """

    __module__ = "spdl_torch"

    dataset: Any = field(repr=False)
    chain: tuple[Transform, ...] = ()
    """The dataset's transforms, one after the other."""
    head: Head | None = field(default=None, repr=False)
    tail: Tail | None = field(default=None, repr=False)
    decoding: Decoding | None = field(default=None, repr=False)
    reasons: tuple[str, ...] = ()
    """Why not more is fused."""

    @property
    def while_decoding(self) -> tuple[Transform, ...]:
        """The transforms that the decoder does."""
        return self.chain[: self.head.num_transforms] if self.head else ()

    @property
    def per_sample(self) -> tuple[Transform, ...]:
        """Those that are called for each sample, as they are."""
        return self._before_tail[len(self.while_decoding) :]

    @property
    def per_batch(self) -> tuple[Transform, ...]:
        """Those that are done once for each batch."""
        return self.chain[len(self._before_tail) :]

    @property
    def _before_tail(self) -> tuple[Transform, ...]:
        return self.chain[: -len(self.tail.transforms)] if self.tail else self.chain

    def __str__(self) -> str:
        where = "once per batch"
        if self.tail is not None and self.tail.is_on_device:
            where += ", on the device"
        fused = [
            f"{_names(transforms)} {when}"
            for transforms, when in (
                (self.while_decoding, "while decoding"),
                (self.per_batch, where),
            )
            if transforms
        ]
        sentences = [f"Fused: {'; '.join(fused) or 'nothing'}."]
        if self.per_sample:
            sentences.append(f"For each sample: {_names(self.per_sample)}.")
        if self.reasons:
            sentences.append(f"Not more, because {', and '.join(self.reasons)}.")
        return " ".join(sentences)

    def fused_dataset(self) -> Any:
        """Return a copy of the dataset whose loader and transform are fused."""
        if self.head is None and self.tail is None:
            return self.dataset
        return self._twin(self.head, self.tail)

    def pixel_difference(self, num_samples: int) -> float:
        """Return by how much fused decoding changes some images: the mean, in levels of 255."""
        if self.head is None or len(self.dataset) == 0:
            return 0.0
        # As they are after the head: bytes.
        fusion = dataclasses.replace(self, chain=self.while_decoding, tail=None)
        twins = fusion._twin(None, None), fusion._twin(self.head, None)
        step = max(1, len(self.dataset) // num_samples)
        found = [_difference(*twins, n) for n in range(0, len(self.dataset), step)[:num_samples]]
        return sum(found) / len(found)

    def _twin(self, head: Head | None, tail: Tail | None) -> Any:
        twin = copy.copy(self.dataset)
        transform = FusedTransform(self._before_tail, head, tail)
        changed: dict[str, Any] = {"transform": transform}
        if (both := self.dataset.transforms) is not None:
            changed["transforms"] = StandardTransform(transform, both.target_transform)
        if head is not None:
            assert self.decoding is not None
            changed["loader"] = FusedLoader(head, self.dataset.loader, self.decoding)
        vars(twin).update(changed)
        return twin


def _names(transforms: tuple[Transform, ...]) -> str:
    return ", ".join(map(_name, transforms))


def _name(transform: Transform) -> str:
    return getattr(transform, "__name__", None) or type(transform).__name__


def _difference(one: Any, other: Any, index: int) -> float:
    images = []
    for dataset in (one, other):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            image = dataset[index][0]
        image = image if isinstance(image, torch.Tensor) else pil_to_tensor(image)
        images.append(image.double())
    return float((images[0] - images[1]).abs().mean())


def fused(settings: LoaderSettings) -> LoaderSettings:
    """Return the settings with a dataset that makes the same batches, but quicker."""
    if not settings.fuse or settings.is_iterable:
        return settings
    fusions = iter(fusions_of(settings))
    dataset = _replaced(settings.dataset, lambda _: next(fusions).fused_dataset())
    if dataset is settings.dataset:
        return settings
    is_default = settings.collate_fn in _DEFAULT_COLLATES
    collate_fn = _collate.default_collate if is_default else settings.collate_fn
    return dataclasses.replace(settings, dataset=dataset, collate_fn=collate_fn)


def fusions_of(settings: LoaderSettings) -> tuple[Fusion, ...]:
    """Return what is fused of each dataset that the dataset of these settings consists of."""
    found: list[Fusion] = []

    def look(leaf: Any) -> Any:
        found.append(_fusion_of(leaf, settings))
        return leaf

    _replaced(settings.dataset, look)
    unfinished = next((fusion for fusion in found if fusion.tail is None), None)
    if unfinished is None:
        return tuple(found)
    # A batch may have samples of several datasets. Then all are finished before, or none.
    reason = f"the transforms of {type(unfinished.dataset).__name__} are done for each sample"
    return tuple(
        fusion
        if fusion.tail is None
        else dataclasses.replace(fusion, tail=None, reasons=(*fusion.reasons, reason))
        for fusion in found
    )


def _replaced(dataset: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a dataset with others in the place of those that it wraps; itself if all are same."""
    if type(dataset) is Subset:
        wrapped: Any = dataset.dataset
        changed: dict[str, Any] = {"dataset": _replaced(wrapped, replace)}
        is_same = changed["dataset"] is wrapped
    elif type(dataset) is ConcatDataset:
        changed = {"datasets": [_replaced(part, replace) for part in dataset.datasets]}
        is_same = all(map(is_, changed["datasets"], dataset.datasets))
    else:
        return replace(dataset)
    if is_same:
        return dataset
    twin = copy.copy(dataset)
    vars(twin).update(changed)
    return twin


def _fusion_of(dataset: Any, settings: LoaderSettings) -> Fusion:
    """Return what can be fused of a dataset that wraps no other."""
    name = type(dataset).__name__
    used = names_used_by_reading(dataset)
    if not used & {"transform", "transforms"}:
        return Fusion(dataset, reasons=(f"{name} is not a known dataset of torchvision",))
    if type(dataset.transforms) not in (StandardTransform, type(None)):
        reason = f"the transforms of {name} change images and targets together"
        return Fusion(dataset, reasons=(reason,))
    # Users may have put another transform into the attribute that the dataset does not call.
    called = dataset if "transform" in used else dataset.transforms
    chain = tuple(flattened(getattr(called, "transform", None)))
    head, decoding, why_no_head = _head_of(dataset, chain, used, settings)
    tail, why_no_tail = _tail_of(chain[head.num_transforms if head else 0 :], settings)
    reasons = tuple(filter(None, (why_no_head, why_no_tail)))
    return Fusion(dataset, chain, head, tail, decoding, reasons)


def _head_of(
    dataset: Any, chain: tuple[Transform, ...], used: set[str], settings: LoaderSettings
) -> tuple[Head | None, Decoding | None, str]:
    """Return the head, how to decode, and why there is no head."""
    if settings.fuse == "exact":
        return None, None, 'fuse="exact" leaves decoding as it is'
    known = _known_loader(dataset.loader) if "loader" in used else None
    if known is None:
        return None, None, f"how {type(dataset).__name__} opens a file is not known"
    kind, decoding = known
    head = head_of(chain, kind)
    if head is None and chain:
        return None, None, f"{_name(chain[0])} is not a known crop, resize or flip"
    return head, decoding, "" if chain else "it has no transforms"


def _tail_of(chain: tuple[Transform, ...], settings: LoaderSettings) -> tuple[Tail | None, str]:
    """Return the tail, and why there is none."""
    if not settings.batched:
        return None, "without batches nothing is done once per batch"
    if settings.collate_fn not in _DEFAULT_COLLATES:
        return None, "collate_fn is not torch's default_collate"
    tail = tail_of(chain, is_on_device=settings.device is not None)
    if tail is None and chain:
        # What is behind it may be a known tail for another chain.
        last = next((step for step in reversed(chain) if not is_of_tail(step)), chain[-1])
        return None, f"a chain that ends with {_name(last)} is done for each sample"
    return tail, ""


def names_used_by_reading(dataset: Any) -> set[str]:
    """Return the names in the `__getitem__` of a dataset, if that is one of torchvision's."""
    method = getattr(type(dataset), "__getitem__", None)
    # A list has no attributes of its own, and its method is of no module.
    module = getattr(method, "__module__", None) or ""
    if not module.startswith("torchvision.datasets."):
        return set()
    if "__getitem__" in vars(dataset) or getattr(dataset, "__getitems__", None):
        return set()
    code = getattr(method, "__code__", None)
    return set() if code is None else set(code.co_names)


def _known_loader(loader: Any) -> tuple[Kind, Decoding] | None:
    """Return what a loader returns, and how it decodes, if both are known."""
    if loader in (default_loader, pil_loader) and torchvision.get_image_backend() == "PIL":
        # PIL's convert("RGB") cuts grey values of 16 bits off at 255, so nearly all become white.
        return "pil", Decoding(takes_deep_grey=False)
    has_geometry = type(loader) is ImageLoader and any(getattr(loader, name) for name in _GEOMETRY)
    if type(loader) is not ImageLoader or loader.mode != "RGB" or has_geometry:
        return None
    return "image", loader.decoding
