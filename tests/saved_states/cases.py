"""The loaders whose states are stored, how far each had come, and what loads the state."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data.datapipes.iter import IterableWrapper

from spdl_torch import DataLoader, DistributedRandomSampler, ReplaceBadSamples

from ..datasets import Graded, Held, Indices
from ..resuming import (
    ARGUMENTS,
    SIZE,
    SOME,
    Noisy,
    OfBoth,
    OfDataset,
    OfDatasetAtEnd,
    OfIterator,
    OwnIterator,
    Stateless,
    plain,
)

THREADS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
PROCESSES = {"num_workers": 2, "worker_method": "multiprocessing"}
NUM_BATCHES = {"before": None, "begun": 0, "middle": 2, "second epoch": 2, "last": -1, "ended": -1}
"""The moments of saving: how many batches were taken from an iterator, or -1 for all of them."""


@dataclass(frozen=True)
class Case:
    """A loader that is saved, when it is saved, and the loaders that go on from the state."""

    make: Callable[[], DataLoader[Any]]
    moment: str = "middle"
    others: tuple[Callable[[], DataLoader[Any]], ...] = ()
    """Loaders of another shape; without any, one of the same shape goes on."""

    def save(self) -> dict[str, Any]:
        torch.manual_seed(7)
        with self.make() as loader:
            try:
                _iterator = self._go(loader)
                state: dict[str, Any] = loader.state_dict()
                return state
            finally:
                if isinstance(loader.dataset, Held):
                    loader.dataset.may_go.set()

    def _go(self, loader: DataLoader[Any]) -> Any:
        num_batches = NUM_BATCHES[self.moment]
        if num_batches is None:
            return None
        if self.moment == "second epoch":
            list(loader)
        num_batches = len(list(self.make())) if num_batches < 0 else num_batches
        torch.manual_seed(8)
        iterator = iter(loader)
        for _ in range(num_batches):
            next(iterator)
        if self.moment == "ended":
            assert next(iterator, None) is None
        return iterator

    def load(self, state: dict[str, Any], seed: int) -> list[Any]:
        """Return what two epochs deliver that begin from the state, for each loader."""
        delivered = []
        for make in self.others or (self.make,):
            torch.manual_seed(seed)
            with make() as loader:
                if isinstance(loader.dataset, Held):
                    loader.dataset.may_go.set()
                loader.load_state_dict(state)
                bad = [bad.index for bad in loader.bad_samples]
                epochs = [[plain(batch) for batch in loader] for _ in range(2)]
                delivered.append({"bad_samples": bad, "first": epochs[0], "second": epochs[1]})
        return delivered


def as_it_is(samples: Any) -> Any:
    return samples


def map_loader(name: str, make_dataset: Callable[[], Dataset[Any]], **extra: Any) -> Any:
    arguments = ARGUMENTS[name](5) | {"collate_fn": as_it_is} | extra
    return DataLoader(make_dataset(), **arguments)


def of_rank(rank: int, world_size: int, **extra: Any) -> Any:
    sampler = DistributedRandomSampler(
        SIZE, rank=rank, world_size=world_size, num_draws=50, seed=5, tail="keep"
    )
    return DataLoader(Noisy(), 3, sampler=sampler, collate_fn=as_it_is, **THREADS, **extra)


def iterable_loader(make_dataset: Callable[[], Any], **extra: Any) -> Any:
    arguments = {"batch_size": 4, "collate_fn": as_it_is} | extra
    return DataLoader(make_dataset(), **arguments)


def datapipe() -> Any:
    return IterableWrapper(range(24)).shuffle().sharding_filter()


class SomeAreBad(Indices):
    def __getitem__(self, index: int) -> int:
        if index in (1, 5, 11):
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in ARGUMENTS:
        cases[f"{name} / threads"] = Case(partial(map_loader, name, Noisy, **THREADS))
    for name in SOME:
        for moment in NUM_BATCHES:
            cases[f"{name} / caller / {moment}"] = Case(partial(map_loader, name, Indices), moment)
            make = partial(map_loader, name, Noisy, **PERSISTENT)
            cases[f"{name} / persistent / {moment}"] = Case(make, moment)
        for moment in ("before", "second epoch"):
            make = partial(map_loader, name, Noisy, seed=11)
            cases[f"{name} / seed / {moment}"] = Case(make, moment)
    for name in ("in sequence", "shuffle", "stateful sampler"):
        make = partial(map_loader, name, Indices, **PROCESSES)
        cases[f"{name} / processes"] = Case(make)
        held = partial(map_loader, name, partial(Held, SIZE, [0, 13]), num_workers=4)
        cases[f"{name} / out of order"] = Case(partial(held, in_order=False), others=(held,))
        make = partial(map_loader, name, SomeAreBad, on_error=ReplaceBadSamples(max_fraction=None))
        cases[f"{name} / bad samples"] = Case(make)
        cases[f"{name} / stateful dataset"] = Case(partial(map_loader, name, partial(Graded, 2)))
    other_shape = partial(map_loader, "shuffle", Noisy, batch_size=4, num_workers=3)
    cases["another batch size"] = Case(
        partial(map_loader, "shuffle", Noisy, **THREADS), others=(other_shape,)
    )
    for moment in NUM_BATCHES:
        ranks = tuple(partial(of_rank, rank, 3) for rank in range(3))
        cases[f"from two ranks to three / {moment}"] = Case(partial(of_rank, 1, 2), moment, ranks)
        cases[f"the same two ranks / {moment}"] = Case(partial(of_rank, 1, 2), moment)
        for dataset in (Stateless, OfDataset, OfDatasetAtEnd, OfIterator, OfBoth, OwnIterator):
            for workers, extra in {
                "caller": {},
                "threads": THREADS,
                "persistent": PERSISTENT,
                "seed": THREADS | {"seed": 11},
            }.items():
                sized = partial(dataset, (10, 6))
                make = partial(iterable_loader, sized, **extra)
                cases[f"{dataset.__name__} / {workers} / {moment}"] = Case(make, moment)
        make = partial(iterable_loader, partial(Stateless, (10, 6)), **PROCESSES)
        cases[f"Stateless / processes / {moment}"] = Case(make, moment)
        for workers, extra in {"caller": {}, "threads": THREADS, "processes": PROCESSES}.items():
            cases[f"datapipe / {workers} / {moment}"] = Case(
                partial(iterable_loader, datapipe, **extra), moment
            )
    return cases


CASES = _cases()


def main() -> None:
    warnings.simplefilter("ignore")
    stored = {}
    for name, case in CASES.items():
        state = json.loads(json.dumps(case.save()))
        delivered = case.load(state, seed=999)
        # The second epoch may follow from torch's generator, which is not a part of the state.
        again = case.load(state, seed=1000)
        for one, other in zip(delivered, again, strict=True):
            if one["first"] != other["first"]:
                sys.exit(f"{name}: the epoch in progress is not restored")
            if one["second"] != other["second"]:
                del one["second"]
        stored[name] = {"state": state, "delivered": delivered}
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in stored.items()]
    sys.stdout.write("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
