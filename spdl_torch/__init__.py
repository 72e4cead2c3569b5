"""A drop-in replacement for torch's DataLoader: a staged pipeline of threads in one process."""

from ._dataloader import DataLoader
from ._dataset import StagedDataset
from ._version import __version__

__all__ = ["DataLoader", "StagedDataset", "__version__"]
