"""What the tests of saving and restoring share: samplers of all kinds, and how to save."""

from __future__ import annotations

import json
import queue
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from spdl_torch import (
    DataLoader,
    DistributedDeterministicSampler,
    DistributedRandomSampler,
)

from .datasets import Indices
from .tiers import pairwise

SIZE = 20


def saved(loader):
    """The state of a loader as it comes back from a file."""
    return json.loads(json.dumps(loader.state_dict()))


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def batches(loader):
    """All that a loader or an iterator has left."""
    return [plain(batch) for batch in loader]


def take(iterator, number):
    return [plain(next(iterator)) for _ in range(number)]


def flat(batches):
    return [index for batch in batches for index in batch]


def generator(seed):
    return torch.Generator().manual_seed(seed)


# -- map-style datasets ------------------------------------------------------------------------


class Noisy(Indices):
    """Random numbers that go with a sample, as a random transform has them."""

    def __getitem__(self, index):
        return super().__getitem__(index), torch.rand(()).item()


# -- samplers -------------------------------------------------------------------------------------


class DrawsOnce:
    """Draws all its indices from the global generator with the first one. No torch Sampler."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        yield from torch.randperm(self.size).tolist()


class DrawsOnceSampler(DrawsOnce, Sampler):
    """The same as a torch Sampler."""


class Descending(Sampler):
    """Without a state, and without random numbers."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))


class Remembers(Sampler):
    """Another order in every epoch. Where it is, the sampler itself knows."""

    def __init__(self, seed: int, size: int = SIZE) -> None:
        self.size = size
        self.seed = seed
        self.position = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        order = torch.randperm(self.size, generator=generator(self.seed)).tolist()
        while self.position < self.size:
            self.position += 1
            yield order[self.position - 1]
        self.seed += 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.position = state["seed"], state["position"]


class RemembersInItsIterator(Sampler):
    """Draws the seed of each epoch. Where it is, its iterator knows."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return _IteratorOfRemembers(int(torch.randint(1000, ())), self.size)


class _IteratorOfRemembers:
    def __init__(self, seed: int, size: int) -> None:
        self.seed = seed
        self.size = size
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.position == self.size:
            raise StopIteration
        self.position += 1
        order = torch.randperm(self.size, generator=generator(self.seed)).tolist()
        return order[self.position - 1]

    state_dict = Remembers.state_dict
    load_state_dict = Remembers.load_state_dict


class Torchdatas(DistributedSampler):
    """As torchdata's StatefulDistributedSampler: a loaded state is used by the next `iter()`."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(range(size), num_replicas=1, rank=0)
        self.yielded = 0
        self.next_yielded = None

    def __iter__(self):
        self.yielded = 0
        if self.next_yielded is not None:
            self.yielded = self.next_yielded
            self.next_yielded = None
        for index in islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_yielded = state["yielded"]


class UnevenBatches:
    """A batch sampler without a state: batches of one, two, three, … indices."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self):
        order = torch.randperm(self.size).tolist()
        length = 1
        while order:
            yield order[:length]
            order, length = order[length:], length + 1


class RemembersBatches(Remembers):
    """A batch sampler with a state."""

    def __iter__(self):
        order = torch.randperm(self.size, generator=generator(self.seed)).tolist()
        while self.position < self.size:
            self.position += 3
            yield order[self.position - 3 : self.position]
        self.seed += 1
        self.position = 0


ARGUMENTS = {
    "in sequence": lambda seed: {"batch_size": 3},
    "shuffle": lambda seed: {"batch_size": 3, "shuffle": True},
    "shuffle, own generator": lambda seed: {
        "batch_size": 3,
        "shuffle": True,
        "generator": generator(seed),
    },
    "with replacement": lambda seed: {
        "batch_size": 3,
        "sampler": RandomSampler(range(SIZE), replacement=True, num_samples=70),
    },
    "with replacement, own generator": lambda seed: {
        "batch_size": 3,
        "sampler": RandomSampler(range(SIZE), True, 70, generator=generator(seed)),
    },
    "more than all": lambda seed: {
        "batch_size": 3,
        "sampler": RandomSampler(range(SIZE), num_samples=50),
    },
    "weighted": lambda seed: {
        "batch_size": 3,
        "sampler": WeightedRandomSampler([1, 2, 3, 0] * (SIZE // 4), 17),
    },
    "weighted, own generator": lambda seed: {
        "batch_size": 3,
        "sampler": WeightedRandomSampler([1.0] * SIZE, 17, generator=generator(seed)),
    },
    "subset": lambda seed: {"batch_size": 3, "sampler": SubsetRandomSampler(range(0, SIZE, 2))},
    "SequentialSampler": lambda seed: {"batch_size": 3, "sampler": SequentialSampler(range(SIZE))},
    "torch's DistributedSampler": lambda seed: {
        "batch_size": 3,
        "sampler": DistributedSampler(range(SIZE), num_replicas=2, rank=1),
    },
    "DistributedRandomSampler": lambda seed: {
        "batch_size": 3,
        "sampler": DistributedRandomSampler(SIZE, rank=0, world_size=1, seed=seed),
    },
    "DistributedRandomSampler, weighted, on two ranks": lambda seed: {
        "batch_size": 3,
        "sampler": DistributedRandomSampler(
            SIZE,
            rank=1,
            world_size=2,
            num_draws=51,
            weights=[1, 2, 3, 0] * (SIZE // 4),
            seed=seed,
        ),
    },
    "DistributedDeterministicSampler": lambda seed: {
        "batch_size": 3,
        "sampler": DistributedDeterministicSampler(SIZE, rank=1, world_size=2),
    },
    "custom sampler": lambda seed: {"batch_size": 3, "sampler": Descending()},
    "custom sampler that draws": lambda seed: {"batch_size": 3, "sampler": DrawsOnceSampler()},
    "custom sampler that draws, no torch Sampler": lambda seed: {
        "batch_size": 3,
        "sampler": DrawsOnce(),
    },
    "a list": lambda seed: {"batch_size": 3, "sampler": [5, 4, 4, 0, 19, 1, 2, 3, 7, 8]},
    "stateful sampler": lambda seed: {"batch_size": 3, "sampler": Remembers(seed)},
    "stateful iterator": lambda seed: {"batch_size": 3, "sampler": RemembersInItsIterator()},
    "torchdata's sampler": lambda seed: {"batch_size": 3, "sampler": Torchdatas()},
    "custom batch sampler": lambda seed: {"batch_sampler": UnevenBatches()},
    "stateful batch sampler": lambda seed: {"batch_sampler": RemembersBatches(seed)},
    "a list of batches": lambda seed: {
        "batch_sampler": [[0, 1, 2], [3], [4, 5], list(range(6, 15)), [15]]
    },
    "torch's BatchSampler": lambda seed: {
        "batch_sampler": BatchSampler(
            RandomSampler(range(SIZE), generator=generator(seed)), 3, drop_last=False
        )
    },
    "no batching": lambda seed: {"batch_size": None, "shuffle": True},
    "no batching, stateful sampler": lambda seed: {
        "batch_size": None,
        "sampler": Remembers(seed),
    },
    "drop_last": lambda seed: {"batch_size": 3, "shuffle": True, "drop_last": True},
    "drop_last, stateful sampler": lambda seed: {
        "batch_size": 3,
        "sampler": Remembers(seed),
        "drop_last": True,
    },
}
"""All ways to choose an order. What a state restores may be given another seed in each run."""

SOME = (
    "in sequence",
    "shuffle",
    "weighted",
    "DistributedRandomSampler",
    "stateful sampler",
    "stateful iterator",
    "torchdata's sampler",
)
"""One of each kind that is restored in its own way."""

WORKERS = {
    "caller": {},
    "threads": {"num_workers": 2},
    "persistent threads": {"num_workers": 2, "persistent_workers": True},
}
PROCESSES = {"num_workers": 1, "worker_method": "multiprocessing"}

all_ways = pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, "caller") for name in ARGUMENTS),
        *pairwise(SOME, [workers for workers in WORKERS if workers != "caller"]),
    ],
)
"""All orders in the calling thread, and some of them with worker threads."""

all_orders = pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        *((name, 0) for name in ARGUMENTS),
        *(
            pytest.param(name, 2, marks=() if name in SOME else pytest.mark.exhaustive)
            for name in ARGUMENTS
        ),
    ],
)
"""All orders in the calling thread and with worker threads; the default tier has some of those."""

DRAW_FROM_THE_GLOBAL_GENERATOR = (
    "shuffle",
    "with replacement",
    "more than all",
    "weighted",
    "subset",
    "custom sampler that draws",
    "custom sampler that draws, no torch Sampler",
    "stateful iterator",
    "custom batch sampler",
    "no batching",
    "drop_last",
)


def loader_of(name, *, seed=3, dataset=None, **extra):
    """A loader of this kind, as one run of a program makes it."""
    return DataLoader(dataset or Indices(SIZE), **ARGUMENTS[name](seed), **extra)


def interrupted_run(name, num_batches, *, num_epochs=0, **extra):
    """A state after some whole epochs and some batches, and the batches that come after it."""
    torch.manual_seed(7)
    with loader_of(name, **extra) as loader:
        loader.set_epoch(3)
        for _ in range(num_epochs):
            batches(loader)
        iterator = iter(loader)
        take(iterator, num_batches)
        return saved(loader), batches(iterator)


def restored(name, state, *, rng_state=None, **extra):
    """A loader of another run, in which all seeds are others, with a state loaded.

    An epoch that has not begun to draw follows from torch's generator, which users save too.
    """
    torch.manual_seed(999)
    loader = loader_of(name, seed=4, **extra)
    loader.load_state_dict(state)
    if rng_state is not None:
        torch.set_rng_state(rng_state)
    return loader


def restored_batches(name, state, *, rng_state=None, **extra):
    with restored(name, state, rng_state=rng_state, **extra) as loader:
        return batches(loader)


# -- iterable datasets: worker k has sizes[k] samples, from 100 * k on, 1000 more in each epoch ----

SIZES = (10, 0, 4)
"""In batches of 4: a shard whose last batch is small, an empty one, and one that ends early and
with a full batch, so that its end is found out later."""


class Shards(IterableDataset):
    epoch = 0
    position = 0

    def __init__(self, sizes=SIZES, reads: queue.SimpleQueue | None = None):
        self.sizes = sizes
        self.reads = reads
        """What was read, by whichever worker: queues are shared by the workers' copies."""

    @property
    def worker_id(self):
        info = get_worker_info()
        return 0 if info is None else info.id

    @property
    def size(self):
        return self.sizes[self.worker_id]

    def read(self, position):
        sample = 1000 * self.epoch + 100 * self.worker_id + position
        if self.reads is not None:
            self.reads.put(sample)
        return sample


class OfDataset(Shards):
    """The state is the dataset's; at the end of an epoch it goes back to the beginning."""

    def __iter__(self):
        while self.position < self.size:
            self.position += 1
            yield self.read(self.position - 1)
        self.position = 0
        self.epoch += 1

    def state_dict(self):
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.position, self.epoch = state["position"], state["epoch"]


class OfDatasetAtEnd(OfDataset):
    """The state is the dataset's, and stays at the end until the next epoch begins."""

    epoch = -1
    is_restored = False

    def __iter__(self):
        if not self.is_restored:
            self.position = 0
            self.epoch += 1
        self.is_restored = False
        while self.position < self.size:
            self.position += 1
            yield self.read(self.position - 1)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.is_restored = self.epoch >= 0


class Cursor:
    def __init__(self, dataset):
        self.dataset = dataset
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.dataset.size:
            self.dataset.end()
            raise StopIteration
        self.position += 1
        return self.dataset.read(self.position - 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class OfIterator(Shards):
    """The state is that of the iterator."""

    def __iter__(self):
        return Cursor(self)

    def end(self):
        pass


class OfBoth(OfIterator):
    """The iterator knows the position and the dataset the epoch."""

    def end(self):
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class OwnIterator(OfDataset):
    epoch = -1

    def __iter__(self):
        self.position = 0
        self.epoch += 1
        return self

    def __next__(self):
        if self.position == self.size:
            raise StopIteration
        self.position += 1
        return self.read(self.position - 1)


class Nested(Shards):
    """Gives away the very state that it changes in place, and takes over the one it is given."""

    def __init__(self, sizes=SIZES):
        super().__init__(sizes)
        self.state = {"counts": {"position": torch.zeros(1, dtype=torch.int64)}, "seen": []}

    def __iter__(self):
        position = self.state["counts"]["position"]
        while int(position) < self.size:
            position += 1
            sample = self.read(int(position) - 1)
            # Every sample tells how many have come before it.
            self.state["seen"].append(sample)
            yield 1000 * len(self.state["seen"]) + sample
        position.zero_()

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Stateless(Shards):
    def __iter__(self):
        return (self.read(position) for position in range(self.size))
