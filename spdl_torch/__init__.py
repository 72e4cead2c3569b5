"""A drop-in replacement for torch's DataLoader: a staged pipeline of threads in child processes."""

from typing import TYPE_CHECKING

from ._bad_samples import BadSample, ReplaceBadSamples, RetryLoad, TooManyBadSamples
from ._cache import Cache, CacheDirectoryError, CacheStats
from ._dataloader import DataLoader
from ._dataset import StagedDataset
from ._device import transfer
from ._engine import LoopStats, Span, StageStats
from ._install import install
from ._plan import Plan
from ._profiling import CachedLoader, Headroom, Profile, Scaling
from ._random import sample_rng
from ._sampler import DistributedDeterministicSampler, DistributedRandomSampler
from ._stats import LoaderStats
from ._verdict import Verdict
from ._version import __version__

if TYPE_CHECKING:
    from ._fuse import Fusion
    from ._image import ImageError, ImageLoader

__all__ = [
    "BadSample",
    "Cache",
    "CacheDirectoryError",
    "CacheStats",
    "CachedLoader",
    "DataLoader",
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "Fusion",
    "Headroom",
    "ImageError",
    "ImageLoader",
    "LoaderStats",
    "LoopStats",
    "Plan",
    "Profile",
    "ReplaceBadSamples",
    "RetryLoad",
    "Scaling",
    "Span",
    "StageStats",
    "StagedDataset",
    "TooManyBadSamples",
    "Verdict",
    "__version__",
    "install",
    "sample_rng",
    "transfer",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    # Only those who load images pay for the import of FFmpeg and torchvision.
    if name in {"ImageError", "ImageLoader"}:
        from ._image import ImageError, ImageLoader  # noqa: PLC0415

        globals().update(ImageError=ImageError, ImageLoader=ImageLoader)
    elif name == "Fusion":
        from ._fuse import Fusion  # noqa: PLC0415

        globals().update(Fusion=Fusion)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
