"""Small datasets that the tests share, where pickle can find them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from spdl_torch import StagedDataset

PATIENCE_SECONDS = 30
"""How long a forced order may take before the test fails instead of hanging."""


class Squares(Dataset):
    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index * index


class Pairs(Squares):
    """An image-like tensor and a label, as most training sets have them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), float(index)), index


class Named(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"name": f"sample {index}", "values": {"half": index / 2, "index": index}}


class InBulk(Squares):
    """Has `__getitems__`, and counts its calls."""

    def __init__(self, size: int = 20) -> None:
        super().__init__(size)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls.append(list(indices))
        return [index * index for index in indices]


class Sharded(IterableDataset):
    """Counts up; each worker takes its stride."""

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.size, step))

    def __len__(self) -> int:
        return self.size


class Uneven(IterableDataset):
    """Worker k yields sizes[k] samples, marked with its id."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self):
        info = get_worker_info()
        worker_id = 0 if info is None else info.id
        return iter([100 * worker_id + n for n in range(self.sizes[worker_id])])


class OwnIterator(IterableDataset):
    """Is its own iterator, so that two workers must not share it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.position >= self.size:
            raise StopIteration
        self.position += 1
        return self.position


class Staged(StagedDataset[int]):
    """Each stage leaves its mark."""

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def load(self, index: int) -> str:
        return str(index)

    def preprocess(self, raw: str) -> int:
        return int(raw) * 10

    def collate(self, samples: list[int]) -> tuple[str, list[int]]:
        return "collated", samples


class StagedAsync(Staged):
    async def load(self, index: int) -> str:
        return str(index)


class StagedMany(StagedDataset[int]):
    """The same with `load_many` alone."""

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def load_many(self, indices: list[int]) -> list[str]:
        return [str(index) for index in indices]

    __len__ = Staged.__len__
    preprocess = Staged.preprocess
    collate = Staged.collate


class StagedManyAsync(StagedMany):
    async def load_many(self, indices: list[int]) -> list[str]:
        return [str(index) for index in indices]


class Raising(Squares):
    """Raises for one index."""

    def __init__(self, size: int, bad_index: int, error: BaseException) -> None:
        super().__init__(size)
        self.bad_index = bad_index
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == self.bad_index:
            raise self.error
        return super().__getitem__(index)


class Gated(Squares):
    """One index waits until it is let go, and says when it is waiting."""

    def __init__(self, size: int, gated_index: int) -> None:
        super().__init__(size)
        self.gated_index = gated_index
        self.is_waiting = threading.Event()
        self.may_go = threading.Event()

    def __getitem__(self, index: int) -> int:
        if index == self.gated_index:
            self.is_waiting.set()
            assert self.may_go.wait(PATIENCE_SECONDS), "nobody opened the gate"
        return super().__getitem__(index)


class Indices(Squares):
    """Gives the index itself, and keeps a list of all that were read."""

    def __init__(self, size: int = 20) -> None:
        super().__init__(size)
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.reads.append(int(index))
        return int(index)


class Held(Indices):
    """Some indices wait until they are let go."""

    def __init__(self, size: int, held: Iterable[int]) -> None:
        super().__init__(size)
        self.held = frozenset(held)
        self.may_go = threading.Event()

    def __getitem__(self, index: int) -> int:
        if index in self.held:
            assert self.may_go.wait(PATIENCE_SECONDS), "nobody let it go"
        return super().__getitem__(index)


class Graded(Indices):
    """Its samples depend on a level, which the training loop raises and a state keeps."""

    def __init__(self, level: int = 0) -> None:
        super().__init__()
        self.level = level
        self.history = [level]

    def __getitem__(self, index: int) -> int:
        return 1000 * self.level + index

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self.history = state["level"], state["history"]


class Circle:
    """Keeps an iterator until garbage is collected."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.me = self
