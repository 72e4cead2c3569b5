"""Samples that are no image files: HDF5, memory maps, tar shards, text."""

from __future__ import annotations

import importlib.util
import io
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from spdl_torch import DataLoader
from tests.integrations import quick
from tests.tiers import sampled

pytestmark = pytest.mark.children

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def example(name):
    """An example as a module, under its own name, so that processes can import it too."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# -- HDF5 and memory maps -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    pytest.importorskip("h5py")
    folder = tmp_path_factory.mktemp("arrays")
    example("hdf5_and_memmap").write(folder)
    return folder


@quick
@pytest.mark.parametrize(
    ("kind", "file"),
    [("Mapped", "samples.npy"), ("Hdf5", "samples.h5"), ("Hdf5Chunks", "samples.h5")],
)
@pytest.mark.parametrize(
    "arguments",
    sampled([{}, {"num_processes": 0}, {"worker_method": "multiprocessing"}], 3),
    ids=str,
)
def test_workers_read_a_file_of_arrays(arrays, kind, file, arguments):
    """Several workers read a file of arrays."""
    dataset = getattr(example("hdf5_and_memmap"), kind)(arrays / file)
    expected = example("hdf5_and_memmap").Mapped(arrays / "samples.npy")
    loader = DataLoader(dataset, batch_size=100, num_workers=2, **arguments)
    got = torch.cat(list(loader))
    assert torch.equal(got, torch.from_numpy(expected.array.copy()))


# -- tar shards -----------------------------------------------------------------------------------

NUM_SHARDS, NUM_SAMPLES_EACH = 5, 7


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return example("tar_shards").write_shards(folder, NUM_SHARDS, NUM_SAMPLES_EACH)


def keys_of(batches):
    return [key for _, _, keys in batches for key in keys]


def loader_of(paths, rank=0, num_ranks=1, num_workers=2):
    dataset = example("tar_shards").TarShards(paths, rank, num_ranks)
    return DataLoader(dataset, batch_size=3, num_workers=num_workers)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_ranks_and_workers_share_the_shards(shards, num_ranks, num_workers):
    loaders = [loader_of(shards, rank, num_ranks, num_workers) for rank in range(num_ranks)]
    for _ in range(2):  # Epochs.
        keys = [key for loader in loaders for key in keys_of(loader)]
        assert len(keys) == len(set(keys)) == NUM_SHARDS * NUM_SAMPLES_EACH


@quick
@pytest.mark.parametrize("num_workers", sampled([2, 0], 2))
def test_shards_go_on_after_any_batch(shards, num_workers):
    expected = keys_of(loader_of(shards, num_workers=num_workers))
    loader = loader_of(shards, num_workers=num_workers)
    before = []
    for batch in loader:
        before += keys_of([batch])
        restored = loader_of(shards, num_workers=num_workers)
        restored.load_state_dict(loader.state_dict())
        assert before + keys_of(restored) == expected
    assert before == expected


def test_delivered_samples_are_not_read_again(shards, tmp_path):
    """The delivered part of a shard is not read again after a resume."""
    path = tmp_path / "shard.tar"
    path.write_bytes(shards[0].read_bytes())
    loader = loader_of([path], num_workers=1)
    iterator = iter(loader)
    first = keys_of([next(iterator)])
    state = loader.state_dict()
    del iterator
    # Nothing but rubbish up to where the second batch begins.
    with tarfile.open(path) as shard:
        offset = shard.getmember(f"{int(first[-1]) + 1:07}.png").offset
    content = path.read_bytes()
    path.write_bytes(io.BytesIO(b"?" * offset + content[offset:]).getvalue())
    loader = loader_of([path], num_workers=1)
    loader.load_state_dict(state)
    assert len(keys_of(loader)) == NUM_SAMPLES_EACH - 3


# -- text -----------------------------------------------------------------------------------------


def test_tokeniser_loses_no_letter():
    """The tokeniser of the example loses no letter."""
    tokenise = example("tokenise_text").Tokeniser()
    pieces = {number: piece for piece, number in tokenise.ids.items()}
    text = example("tokenise_text").Texts(1).load(0)
    assert "".join(pieces[number] for number in tokenise(text)) == text.replace(" ", "")


def test_texts_are_padded_in_order():
    """Texts of different lengths are padded, in their order."""
    texts = example("tokenise_text").Texts(20)
    loader = DataLoader(texts, batch_size=8, num_workers=2)
    rows = [row[row > 0].tolist() for batch in loader for row in batch]
    assert rows == [texts[index] for index in range(20)]
