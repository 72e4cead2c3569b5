"""The user's exception stays the user's exception, at the batch it belongs to."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import traceback
import weakref

import pytest
import torch
import torch.utils.data
from PIL import Image
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from spdl_torch import DataLoader, StagedDataset

from .datasets import PATIENCE_SECONDS, Gated, Raising, Sharded, Squares, Staged


def outcomes(iterator):
    """What each `next` gave, batch or exception, until the end."""
    found = []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)
        else:
            found.append(batch.tolist())


class CustomError(Exception):
    def __init__(self, needs, two_arguments):
        super().__init__(needs, two_arguments)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_at_its_batch(num_workers):
    """An error is raised at its batch, and the iterator continues with the next one."""
    error = CustomError("as it", "was raised")
    loader = DataLoader(Raising(8, 5, error), batch_size=2, num_workers=num_workers)
    found = outcomes(iter(loader))
    assert found == [[0, 1], [4, 9], error, [36, 49]]
    assert found[2] is error


def test_loader_is_usable_again():
    """A loader can begin another epoch after an error."""
    loader = DataLoader(Raising(4, 3, LookupError()), num_workers=2)
    for _ in range(2):
        with pytest.raises(LookupError):
            list(loader)


def test_note_names_stage_and_index():
    """A note on the exception names the stage, the index and the batch."""
    loader = DataLoader(Raising(8, 5, LookupError("no")), batch_size=2, num_workers=2)
    with pytest.raises(LookupError) as caught:
        list(loader)
    assert caught.value.__notes__ == [
        "spdl_torch: raised in the preprocess stage for sample index 5 (batch 2)"
    ]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_note_names_the_file(tmp_path, num_workers):
    """The note names the file of the sample if the dataset knows it."""
    folder = tmp_path / "cats"
    folder.mkdir()
    for name in "abc":
        Image.new("RGB", (64, 64)).save(folder / f"{name}.jpg")
    cut_off = folder / "b.jpg"
    cut_off.write_bytes(cut_off.read_bytes()[:-100])
    dataset = Subset(ImageFolder(tmp_path, transform=pil_to_tensor), [2, 1])
    with pytest.raises(OSError, match=r"(?i)truncated") as caught:
        list(DataLoader(dataset, batch_size=2, num_workers=num_workers))
    assert caught.value.__notes__ == [
        f"spdl_torch: raised in the preprocess stage for sample index 1 (batch 0), {cut_off}"
    ]


class Shards(Raising):
    """Has a few files of many records."""

    files = tuple(f"shard-{number}.h5" for number in range(10))


def test_note_names_no_shard():
    """The note names no file of a list that does not have one for each sample."""
    loader = DataLoader(Shards(1000, 7, LookupError("no")), batch_size=2, num_workers=2)
    with pytest.raises(LookupError) as caught:
        list(loader)
    assert caught.value.__notes__ == [
        "spdl_torch: raised in the preprocess stage for sample index 7 (batch 3)"
    ]


def test_traceback_reaches_the_dataset():
    """The traceback leads from the loop to the line of the dataset."""
    loader = DataLoader(Raising(8, 5, LookupError("no")), num_workers=2)
    with pytest.raises(LookupError) as caught:
        list(loader)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[0] == "test_traceback_reaches_the_dataset"
    assert names[-1] == "__getitem__"
    assert "_fill" not in names


def test_key_error_stays_readable():
    """The key of a KeyError stays readable."""
    loader = DataLoader({}, sampler=["cat.jpg"], num_workers=1)
    with pytest.raises(KeyError) as caught:
        list(loader)
    assert str(caught.value) == "'cat.jpg'"


def test_first_bad_sample_is_reported():
    """The first bad sample of a batch is reported, whichever worker is quicker."""

    class TwoBad(Gated):
        def __getitem__(self, index):
            if index == 3:
                self.may_go.set()
                raise LookupError("the later one, raised first")
            if index == 0:
                super().__getitem__(index)
                raise LookupError("sample 0")
            return index

    loader = DataLoader(TwoBad(4, gated_index=0), batch_size=4, num_workers=4)
    with pytest.raises(LookupError, match="sample 0"):
        next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_iteration_is_an_error(num_workers):
    """A StopIteration from a dataset does not end the loop."""
    loader = DataLoader(Raising(4, 2, StopIteration("oops")), num_workers=num_workers)
    with pytest.raises(RuntimeError, match="oops") as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_base_exception_reaches_the_loop(error):
    """An exception that is not an Exception reaches the loop too."""
    with pytest.raises(type(error)):
        list(DataLoader(Raising(4, 2, error), num_workers=2))


def test_sampler_error_keeps_earlier_batches():
    """An error of the sampler is raised after the batches that it drew before."""

    def indices():
        yield from range(5)
        raise LookupError("sampler")

    loader = DataLoader(Squares(9), sampler=Reiterable(indices), batch_size=2, num_workers=2)
    found = outcomes(iter(loader))
    assert found[:2] == [[0, 1], [4, 9]]
    assert isinstance(found[2], LookupError)
    assert len(found) == 3


class Reiterable:
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


def test_empty_batch_goes_to_collate():
    """A batch sampler may draw an empty batch, and the collate function decides."""
    loader = DataLoader(Squares(9), batch_sampler=[[0], [], [1]], collate_fn=len, num_workers=2)
    assert list(loader) == [1, 0, 1]
    assert list(DataLoader(Staged(), batch_sampler=[[], [1]], num_workers=2)) == [
        ("collated", []),
        ("collated", [10]),
    ]


def test_sampler_draws_no_batches():
    """A batch sampler whose draws are not batches raises as in torch."""
    for cls in (DataLoader, torch.utils.data.DataLoader):
        with pytest.raises(TypeError, match="not iterable"):
            list(cls(Squares(9), batch_sampler=[3, 4]))
    with pytest.raises(TypeError, match="not iterable"):
        list(DataLoader(Squares(9), batch_sampler=[3, 4], num_workers=2))


class NoneForSome(Squares):
    def __getitem__(self, index):
        return None if index == 3 else index


class Ragged(Squares):
    def __getitem__(self, index):
        return torch.zeros(index)


@pytest.mark.parametrize("dataset", [NoneForSome(6), Ragged(6)])
def test_collate_error_as_in_torch(dataset):
    """Samples that cannot be collated raise as in torch."""

    def error(cls, num_workers):
        with pytest.raises((TypeError, RuntimeError)) as caught:
            list(cls(dataset, batch_size=2, num_workers=num_workers))
        return caught.value

    ours, theirs = error(DataLoader, 2), error(torch.utils.data.DataLoader, 0)
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)
    assert "raised in the collate stage for batch" in ours.__notes__[0]


def test_none_is_a_sample():
    """None is a sample like any other."""
    loader = DataLoader(NoneForSome(6), batch_size=2, num_workers=2, collate_fn=list)
    assert list(loader) == [[0, 1], [2, None], [4, 5]]


class TooLong(Squares):
    """Says that it has more samples than it has."""

    def __getitem__(self, index):
        if index >= 5:
            raise IndexError(f"no sample {index}")
        return index


def test_wrong_length_raises():
    """A dataset that is shorter than its length raises at its batch."""
    found = outcomes(iter(DataLoader(TooLong(8), batch_size=2, num_workers=2)))
    assert found[:2] == [[0, 1], [2, 3]]
    assert [str(error) for error in found[2:]] == ["no sample 5", "no sample 6"]


class FailsToIterate(Sharded):
    def __iter__(self):
        raise LookupError("__iter__")


def test_iter_error_once_per_worker():
    """An error in __iter__ of an iterable dataset is raised once for each worker."""
    found = outcomes(iter(DataLoader(FailsToIterate(), num_workers=2)))
    assert [str(error) for error in found] == ["__iter__", "__iter__"]


def test_iterable_note_has_no_indices():
    """The note of an iterable dataset names no indices."""
    with pytest.raises(LookupError) as caught:
        list(DataLoader(FailsToIterate(4), batch_size=4, num_workers=1))
    assert caught.value.__notes__ == ["spdl_torch: raised in the iterate stage for batch 0"]


class FailsInTheMiddle(Sharded):
    def __iter__(self):
        yield 1
        raise LookupError("middle")


def test_iterable_error_at_its_batch():
    """An error in the middle of an iterable dataset is raised at its batch."""
    found = outcomes(iter(DataLoader(FailsInTheMiddle(), num_workers=1)))
    assert found[0] == [1]
    assert str(found[1]) == "middle"
    assert len(found) == 2


def test_stop_iteration_from_collate():
    """A StopIteration from collate does not end the epoch of an iterable dataset."""

    def collate(samples):
        raise StopIteration("collate")

    with pytest.raises(RuntimeError, match="collate"):
        list(DataLoader(Sharded(4), num_workers=1, collate_fn=collate))


def test_timeout_loses_nothing():
    """A timeout raises, and no batch is lost."""
    dataset = Gated(3, gated_index=0)
    iterator = iter(DataLoader(dataset, num_workers=2, timeout=0.05))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 seconds"):
        next(iterator)
    dataset.may_go.set()
    assert outcomes(iterator) == [[0], [1], [4]]


def test_own_timeout_error_passes():
    """A TimeoutError of the user's code is not taken for the loader's timeout."""
    loader = DataLoader(Raising(2, 0, TimeoutError("the server's")), num_workers=2, timeout=60)
    with pytest.raises(TimeoutError, match="the server's"):
        next(iter(loader))


def test_timeout_needs_workers():
    """A timeout without workers raises as in torch."""
    for cls in (DataLoader, torch.utils.data.DataLoader):
        with pytest.raises(AssertionError):
            iter(cls(Squares(), timeout=1))


def test_exception_keeps_no_batch():
    """An exception that is kept keeps no batch alive."""

    class Sample:
        pass

    class Samples(Squares):
        def __getitem__(self, index):
            if index == 3:
                raise LookupError
            sample = Sample()
            alive.add(sample)
            return sample

    alive = weakref.WeakSet()
    loader = DataLoader(Samples(4), batch_size=4, num_workers=2, collate_fn=list)
    with pytest.raises(LookupError) as caught:
        next(iter(loader))
    # The exception is still here, with its traceback; the samples of its batch are not.
    assert caught.value is not None
    assert len(alive) == 0


class FailsWith(StagedDataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 4

    async def load(self, index):
        if index == 1:
            raise self.error
        return index


class WrongCount(StagedDataset):
    def __init__(self, is_async):
        self.is_async = is_async
        if is_async:
            self.load_many = self._load_many_async

    def __len__(self):
        return 4

    def load_many(self, indices):
        return indices[:-1]

    async def _load_many_async(self, indices):
        return indices[:-1]

    def preprocess(self, raw):
        return raw


@pytest.mark.parametrize("is_async", [False, True])
def test_load_many_returns_all(is_async):
    """load_many must return one sample for each index."""
    loader = DataLoader(WrongCount(is_async), batch_size=2, num_workers=2)
    found = outcomes(iter(loader))
    assert len(found) == 2
    for error in found:
        assert isinstance(error, ValueError)
        assert "asked for 2 samples at once, got 1" in str(error)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses every change, a note too."""

    text: str = "frozen"


@pytest.mark.parametrize("dataset", [Raising(4, 1, FrozenError()), FailsWith(FrozenError())])
def test_exception_refuses_notes(dataset):
    """An exception that refuses notes is raised without one."""
    iterator = iter(DataLoader(dataset, num_workers=2))
    found = []
    for _ in range(4):
        try:
            found.append(next(iterator).item())
        except FrozenError as error:
            found.append(error.text)
    assert found[1] == "frozen"
    assert len(found) == 4
    list(iterator)


class StopsItsLoop(StagedDataset):
    def __len__(self):
        return 8

    async def load(self, index):
        asyncio.current_task().get_loop().stop()
        await asyncio.Event().wait()


def test_load_stops_the_loop():
    """A load that stops the event loop is an error and not a hang."""
    with pytest.raises(RuntimeError, match="event loop that runs the dataset's load has ended"):
        next(iter(DataLoader(StopsItsLoop(), num_workers=1, num_io_workers=1)))


class CancelsItself(StagedDataset):
    def __len__(self):
        return 3

    async def load(self, index):
        if index == 1:
            raise asyncio.CancelledError("by itself")
        return index


def test_load_cancels_itself():
    """A load that cancels itself is an error at its batch."""
    iterator = iter(DataLoader(CancelsItself(), num_workers=1))
    assert next(iterator).item() == 0
    with pytest.raises(asyncio.CancelledError):
        next(iterator)
    assert next(iterator).item() == 2


def test_loaders_in_several_threads():
    """Loaders that several threads iterate at the same time do not mix their batches."""

    def consume(name, size):
        results[name] = [batch.item() for batch in DataLoader(Squares(size), num_workers=2)]

    results = {}
    threads = [threading.Thread(target=consume, args=(n, 50 + n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert results == {n: [i * i for i in range(50 + n)] for n in range(4)}
