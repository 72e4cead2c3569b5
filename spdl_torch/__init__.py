"""A drop-in replacement for torch's DataLoader: a staged pipeline of threads in one process."""

from typing import TYPE_CHECKING

from ._dataloader import DataLoader
from ._dataset import StagedDataset
from ._errors import BadSample, ReplaceBadSamples, RetryLoad, TooManyBadSamples
from ._randomness import sample_rng
from ._sampler import DistributedDeterministicSampler, DistributedRandomSampler
from ._transfer import transfer
from ._version import __version__

if TYPE_CHECKING:
    from ._image import ImageError, ImageLoader

__all__ = [
    "BadSample",
    "DataLoader",
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "ImageError",
    "ImageLoader",
    "ReplaceBadSamples",
    "RetryLoad",
    "StagedDataset",
    "TooManyBadSamples",
    "__version__",
    "sample_rng",
    "transfer",
]


def __getattr__(name: str) -> object:
    if name not in {"ImageError", "ImageLoader"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only those who load images pay for the import of FFmpeg and torchvision.
    from ._image import ImageError, ImageLoader  # noqa: PLC0415

    globals().update(ImageError=ImageError, ImageLoader=ImageLoader)
    return globals()[name]
