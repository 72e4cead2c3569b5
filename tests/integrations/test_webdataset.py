"""WebDataset's tar shards, read by our workers."""

from __future__ import annotations

from itertools import chain

import pytest
import torch.utils.data

from spdl_torch import DataLoader
from tests.integrations import quick
from tests.tiers import sampled

wds = pytest.importorskip("webdataset")

NUM_SHARDS, SHARD_SIZE = 4, 25
SIZE = NUM_SHARDS * SHARD_SIZE

pytestmark = [
    pytest.mark.children,
    # WebDataset leaves it to the garbage collector to close files.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    for shard in range(NUM_SHARDS):
        with wds.TarWriter(str(root / f"{shard}.tar")) as writer:
            for number in range(shard * SHARD_SIZE, (shard + 1) * SHARD_SIZE):
                writer.write({"__key__": f"{number:04}", "cls": number})
    return str(root / f"{{0..{NUM_SHARDS - 1}}}.tar")


def numbers(shards, **arguments):
    return wds.WebDataset(shards, shardshuffle=False, **arguments).decode().to_tuple("cls")


def values(batches):
    return [batch[0].tolist() for batch in batches]


def all_of(batches):
    return sorted(chain.from_iterable(batches))


@quick
@pytest.mark.parametrize("num_workers", sampled([2, 1, 0], 3))
def test_batches_equal_those_of_torch(shards, num_workers):
    """The batches are those of torch's loader."""
    arguments = {"batch_size": 4, "num_workers": num_workers}
    theirs = torch.utils.data.DataLoader(numbers(shards), **arguments)
    got = values(DataLoader(numbers(shards), **arguments))
    assert got == values(theirs)
    assert all_of(got) == list(range(SIZE))


def test_the_workers_read_other_shards(shards):
    [first, second] = list(DataLoader(numbers(shards), batch_size=60, num_workers=2))
    assert {n // SHARD_SIZE % 2 for n in first[0].tolist()} == {0}
    assert {n // SHARD_SIZE % 2 for n in second[0].tolist()} == {1}


def test_batches_of_the_dataset_are_kept(shards):
    """Batches that the dataset makes are delivered as they are."""
    batched = numbers(shards).shuffle(50).batched(5)
    got = values(DataLoader(batched, batch_size=None, num_workers=2))
    assert {len(batch) for batch in got} == {5}
    assert all_of(got) == list(range(SIZE))


def test_their_handler_skips_bad_samples(shards):
    def check(sample):
        if sample[0] == 15:
            raise ValueError("bad")
        return sample

    dataset = numbers(shards).map(check, handler=wds.ignore_and_continue)
    got = values(DataLoader(dataset, batch_size=4, num_workers=2))
    assert all_of(got) == [n for n in range(SIZE) if n != 15]


@quick
def test_resume_a_webdataset(shards):
    """An epoch that was left early resumes from its state."""
    arguments = {"batch_size": 4, "num_workers": 2}
    expected = values(DataLoader(numbers(shards), **arguments))
    loader = DataLoader(numbers(shards), **arguments)
    before = [batch for _, batch in zip(range(7), loader, strict=False)]
    again = DataLoader(numbers(shards), **arguments)
    again.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="state_dict"):  # It reads again what was delivered.
        after = values(again)
    assert values(before) + after == expected
