"""Samples that cannot be made: replaced within a budget, or loaded again."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset
from torchvision.datasets import ImageFolder

from spdl_torch import (
    BadSample,
    DataLoader,
    DistributedRandomSampler,
    ImageLoader,
    ReplaceBadSamples,
    RetryLoad,
    StagedDataset,
    TooManyBadSamples,
)

from .datasets import PATIENCE_SECONDS, Sharded, Squares

SIZE = 40
BAD = frozenset({3, 4, 17, 39})
ANY = ReplaceBadSamples(max_fraction=None)
ALL_WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 3, 8])


class Damaged(Dataset):
    def __init__(self, size=SIZE, bad=BAD):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"{index} is damaged")
        return torch.tensor([index, torch.rand(())])


class DamagedAtOnce(Damaged):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class DamagedStaged(StagedDataset):
    """Some cannot be loaded, some cannot be preprocessed."""

    def __len__(self):
        return SIZE

    def load(self, index):
        if index in {3, 17}:
            raise OSError(5, "cannot be read", f"/data/{index}")
        return torch.tensor([index, torch.rand(())])

    def preprocess(self, raw):
        if int(raw[0]) in {4, 39}:
            raise ValueError(f"{int(raw[0])} is damaged")
        return torch.cat([raw, torch.rand(1)])


class DamagedAsync(DamagedStaged):
    async def load(self, index):
        return DamagedStaged.load(self, index)


class DamagedMany(DamagedStaged):
    def load_many(self, indices):
        return [self.load(index) for index in indices]


DATASETS = [Damaged(), DamagedAtOnce(), DamagedStaged(), DamagedAsync(), DamagedMany()]
all_datasets = pytest.mark.parametrize("dataset", DATASETS, ids=lambda d: type(d).__name__)


def batches_of(dataset, *, num_workers=2, on_error=ANY, batch_size=4, **arguments):
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        on_error=on_error,
        seed=1,
        **arguments,
    )
    return loader, [batch.tolist() for batch in loader]


@ALL_WORKERS
@all_datasets
def test_the_next_replaces_a_bad_sample(dataset, num_workers):
    """The next sample of the batch takes the place, or else the first ones of the batch."""
    loader, batches = batches_of(dataset, num_workers=num_workers)
    indices = [[int(sample[0]) for sample in batch] for batch in batches]
    expected = [list(range(n, n + 4)) for n in range(0, SIZE, 4)]
    expected[0] = [0, 1, 2, 0]  # 3: the next is the first of the batch, again.
    expected[1] = [5, 5, 6, 7]
    expected[4] = [16, 18, 18, 19]
    expected[9] = [36, 37, 38, 36]
    assert indices == expected
    assert {bad.index for bad in loader.bad_samples} == BAD


@all_datasets
def test_replacements_draw_the_same_everywhere(dataset):
    """What a replacement draws does not depend on the workers."""
    _, expected = batches_of(dataset, num_workers=0, shuffle=True)
    for num_workers in (1, 3, 8):
        assert batches_of(dataset, num_workers=num_workers, shuffle=True)[1] == expected


def test_executors_replace_bad_samples():
    """An executor makes the replacements of the calling thread."""
    with ProcessPoolExecutor(2) as pool:
        for dataset in (Damaged(), DamagedStaged()):
            _, expected = batches_of(dataset, num_workers=0)
            assert batches_of(dataset, preprocess_executor=pool)[1] == expected


class Unpicklable(Exception):  # noqa: N818
    """Can be pickled, but not read again: its class wants an argument more.

    Some packages teach pickle to do without the class; so there is an attribute like it, too.
    """

    def __init__(self, index, why):
        super().__init__(f"{index}: {why}")
        self.trap = Trap()


class Trap:
    def __reduce__(self):
        return int, ("no number",)


class DamagedText(Damaged):
    def __getitem__(self, index):
        if index in {3, 4}:
            json.loads("{")  # Its error forgets what was noted on it when it is pickled.
        if index in {17, 39}:
            raise Unpicklable(index, "damaged")
        return super().__getitem__(index)


def test_unpicklable_errors_are_replaced():
    """An executor replaces samples whose exception cannot be pickled."""
    with ProcessPoolExecutor(2) as pool:
        _, expected = batches_of(DamagedText(), num_workers=0)
        loader, batches = batches_of(DamagedText(), preprocess_executor=pool)
        assert batches == expected
        assert {bad.index for bad in loader.bad_samples} == BAD


def test_unpicklable_errors_keep_their_text():
    """Without a policy such an exception is raised as a RuntimeError with its text, and the
    pool goes on.
    """
    with (
        ProcessPoolExecutor(1) as pool,
        DataLoader(
            DamagedText(), sampler=[17, 3, 5], num_workers=1, preprocess_executor=pool
        ) as loader,
    ):
        iterator = iter(loader)
        with pytest.raises(RuntimeError, match=r"Unpicklable: 17: damaged") as caught:
            next(iterator)
        assert "in __getitem__" in str(caught.value.__cause__)
        with pytest.raises(json.JSONDecodeError) as caught:
            next(iterator)
        assert caught.value.doc == "{"
        assert int(next(iterator)[0, 0]) == 5  # The pool is whole.


@ALL_WORKERS
def test_bad_replacements_are_replaced(num_workers):
    """A bad replacement is replaced by the next one."""
    _, batches = batches_of(Damaged(8, {0, 1, 2}), num_workers=num_workers)
    assert [int(sample[0]) for sample in batches[0]] == [3, 3, 3, 3]


@ALL_WORKERS
def test_earlier_batches_replace_bad_batches(num_workers):
    """Where all samples of a batch are bad, samples drawn before take their place."""
    _, batches = batches_of(Damaged(8, {4, 5, 6, 7}), num_workers=num_workers)
    assert [int(sample[0]) for sample in batches[1]] == [0, 0, 0, 0]


@ALL_WORKERS
def test_earlier_samples_replace_unbatched_ones(num_workers):
    """With `batch_size=None` the sample before takes the place."""
    _, samples = batches_of(Damaged(5, {2}), num_workers=num_workers, batch_size=None)
    assert [int(sample[0]) for sample in samples] == [0, 1, 1, 3, 4]


@ALL_WORKERS
def test_without_replacement_the_error_is_raised(num_workers):
    """Where nothing can take the place, the sample's own exception is raised."""
    loader = DataLoader(Damaged(8, {0, 1, 2, 3}), 4, num_workers=num_workers, on_error=ANY)
    with pytest.raises(ValueError, match="is damaged"):
        next(iter(loader))


@ALL_WORKERS
@pytest.mark.parametrize(
    "policy",
    [
        ReplaceBadSamples(max_fraction=None, max_count=3),
        ReplaceBadSamples(max_fraction=3 / SIZE),
        ReplaceBadSamples(max_fraction=0.9, max_count=3),
    ],
)
def test_too_many_bad_samples_raise(policy, num_workers):
    """Above the limit an error lists the bad samples."""
    with (
        DataLoader(Damaged(), 4, num_workers=num_workers, on_error=policy) as loader,
        pytest.raises(TooManyBadSamples) as caught,
    ):
        list(loader)
    text = str(caught.value)
    assert "4 of the samples could not be made, and at most 3 may be bad" in text
    for index in BAD:
        assert f"sample {index} in the preprocess stage: ValueError: {index} is damaged" in text
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(("max_fraction", "is_allowed"), [(0.01, True), (0.0, False)])
def test_small_datasets_allow_one_bad_sample(max_fraction, is_allowed):
    """A `max_fraction` above 0 allows at least one bad sample."""
    policy = ReplaceBadSamples(max_fraction=max_fraction)
    with DataLoader(Damaged(20, [3]), 4, num_workers=2, on_error=policy) as loader:
        if is_allowed:
            assert len(list(loader)) == 5
        else:
            with pytest.raises(TooManyBadSamples):
                list(loader)


def test_the_error_lists_ten_samples():
    """The error lists at most ten bad samples."""
    policy = ReplaceBadSamples(max_fraction=None, max_count=12)
    dataset = Damaged(40, range(0, 40, 3))
    with (
        DataLoader(dataset, 4, num_workers=2, on_error=policy) as loader,
        pytest.raises(TooManyBadSamples) as caught,
    ):
        list(loader)
    assert str(caught.value).count("is damaged") == 10


@ALL_WORKERS
def test_each_bad_sample_is_recorded_once(num_workers, tmp_path):
    """A bad sample is once in `bad_samples` and once in the log, after two epochs."""
    log = tmp_path / "bad.jsonl"
    policy = ReplaceBadSamples(max_fraction=0.5, log=log)
    loader, _ = batches_of(DamagedStaged(), num_workers=num_workers, on_error=policy)
    list(loader)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == sorted(BAD)
    by_index = {bad.index: bad for bad in loader.bad_samples}
    assert by_index[3] == BadSample(
        3, "/data/3", "load", "OSError: [Errno 5] cannot be read: '/data/3'"
    )
    assert by_index[4] == BadSample(4, None, "preprocess", "ValueError: 4 is damaged")


def test_a_checkpoint_has_the_bad_samples(tmp_path):
    """After a resume, known bad samples neither count nor are logged again."""
    log = tmp_path / "bad.jsonl"
    policy = ReplaceBadSamples(max_fraction=None, max_count=4, log=log)
    loader, _ = batches_of(Damaged(), on_error=policy)
    state = json.loads(json.dumps(loader.state_dict()))
    again = DataLoader(Damaged(), batch_size=4, num_workers=2, on_error=policy, seed=1)
    again.load_state_dict(state)
    assert set(again.bad_samples) == set(loader.bad_samples)
    list(again)
    assert len(log.read_text().splitlines()) == 4


def test_damaged_bad_samples_are_refused():
    """`load_state_dict()` refuses bad samples that are not as saved."""
    loader, _ = batches_of(Damaged())
    for damaged in ([{"index": 3}], [7], 5):
        with pytest.raises(ValueError, match="bad samples of the state are damaged"):
            loader.load_state_dict(loader.state_dict() | {"bad_samples": damaged})


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_know_the_bad_samples(clone):
    """A copied or unpickled loader has the bad samples of the first."""
    loader, _ = batches_of(Damaged())
    assert clone(loader).bad_samples == loader.bad_samples
    assert len(list(clone(loader))) == 10


def test_paths_are_found_through_subsets(tmp_path):
    """The file of a bad sample is found through torch's `Subset`."""
    for index in range(6):
        (tmp_path / "class").mkdir(exist_ok=True)
        (tmp_path / "class" / f"{index}.jpg").write_bytes(b"no image")
    folder = ImageFolder(tmp_path, loader=ImageLoader())
    loader = DataLoader(Subset(folder, [2, 5]), on_error=ANY, num_workers=1)
    with pytest.raises(Exception, match=r"2\.jpg"):
        list(loader)
    assert str(tmp_path / "class" / "2.jpg") in {bad.path for bad in loader.bad_samples}


class Shards(Damaged):
    """Has a few files of many records."""

    def __init__(self):
        super().__init__()
        self.files = [f"shard-{number}.h5" for number in range(10)]


class FilePerSample(Damaged):
    def __init__(self):
        super().__init__()
        self.files = [f"{number}.npy" for number in range(SIZE)]


class Texts(Damaged):
    def __init__(self):
        super().__init__()
        self.samples = [(f"text {number}", 0) for number in range(SIZE)]


class Table:
    """Is indexed by the labels of its rows, as a column of a data frame."""

    def __len__(self):
        return SIZE

    def __getitem__(self, label):
        return f"label-{label}.npy"


class Tabular(Damaged):
    def __init__(self):
        super().__init__()
        self.paths = Table()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "path"),
    [(Shards(), None), (FilePerSample(), "3.npy"), (Texts(), None), (Tabular(), None)],
)
def test_only_own_file_is_named(dataset, path, num_workers, tmp_path):
    """A bad sample has a path if the dataset has one path for each sample, and no other file."""
    policy = ReplaceBadSamples(max_fraction=None, log=tmp_path / "bad.jsonl")
    loader, _ = batches_of(Subset(dataset, [7, 3]), num_workers=num_workers, on_error=policy)
    assert [bad.path for bad in loader.bad_samples] == [path]
    assert json.loads((tmp_path / "bad.jsonl").read_text())["path"] == path


def fail(_):
    raise ValueError("damaged")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("functions", "path"), [({"load": len}, "b.npy"), ({"load_many": list}, "b.npy"), ({}, None)]
)
def test_loaded_elements_are_named(functions, path, num_workers):
    """The path of a `from_functions` dataset is what its load is called with."""
    dataset = StagedDataset.from_functions(["a.npy", "b.npy"], preprocess=fail, **functions)
    loader = DataLoader(dataset, sampler=[1], num_workers=num_workers, on_error=ANY)
    with pytest.raises(ValueError, match="damaged"):
        list(loader)
    assert [bad.path for bad in loader.bad_samples] == [path]


def test_collate_errors_are_not_replaced():
    """An error of the collate function is raised, and no sample is recorded as bad."""

    def collate(samples):
        raise LookupError("cannot be collated")

    loader = DataLoader(Squares(), num_workers=2, on_error=ANY, collate_fn=collate)
    with pytest.raises(LookupError):
        next(iter(loader))
    assert loader.bad_samples == ()


def test_system_exit_is_not_replaced():
    """`SystemExit` in a sample is raised."""

    class Exiting(Squares):
        def __getitem__(self, index):
            raise SystemExit

    with pytest.raises(SystemExit):
        next(iter(DataLoader(Exiting(), num_workers=1, on_error=ANY)))


def test_all_ranks_have_full_batches(tmp_path):
    """Three ranks have as many full batches, and the same ones in a second run."""
    size, bad = 1000, frozenset(range(7, 1000, 100))
    runs = []
    for run in range(2):
        log = tmp_path / f"bad-{run}.jsonl"
        ranks = []
        for rank in range(3):
            sampler = DistributedRandomSampler(size, rank=rank, world_size=3, seed=5)
            loader = DataLoader(
                Damaged(size, bad),
                batch_size=10,
                sampler=sampler,
                num_workers=3,
                seed=5,
                on_error=ReplaceBadSamples(max_fraction=0.02, log=log),
            )
            batches = list(loader)
            assert len(batches) == len(loader)
            assert {len(batch) for batch in batches[:-1]} == {10}
            ranks.append([batch.tolist() for batch in batches])
        assert len({tuple(map(len, batches)) for batches in ranks}) == 1
        indices = [json.loads(line)["index"] for line in log.read_text().splitlines()]
        assert sorted(set(indices)) == sorted(bad)
        runs.append(ranks)
    assert runs[0] == runs[1]


@pytest.fixture(scope="module")
def damaged_folder(tmp_path_factory):
    """A folder of 300 JPEGs, one in a hundred of them cut off, and the paths of those."""
    root = tmp_path_factory.mktemp("images")
    damaged = []
    for index in range(300):
        path = root / f"class{index % 3}" / f"{index:03}.jpg"
        path.parent.mkdir(exist_ok=True)
        pixels = np.full((24, 32, 3), index % 256, dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        if index % 100 == 50:
            path.write_bytes(path.read_bytes()[:-40])
            damaged.append(str(path))
    return root, sorted(damaged)


def test_damaged_image_files_are_replaced(damaged_folder, tmp_path):
    """A folder with damaged JPEGs makes full batches on each rank, and the log has their paths."""
    root, damaged = damaged_folder
    runs = []
    for num_workers in (2, 5):
        log = tmp_path / f"{num_workers}.jsonl"
        batches = []
        for rank in range(3):
            dataset = ImageFolder(root, loader=ImageLoader(size=16, crop="random"))
            loader = DataLoader(
                dataset,
                batch_size=20,
                sampler=DistributedRandomSampler(dataset, rank=rank, world_size=3),
                num_workers=num_workers,
                seed=3,
                on_error=ReplaceBadSamples(max_fraction=0.01, log=log),
            )
            batches.append(list(loader))
            assert [len(images) for images, _ in batches[-1]] == [20] * len(loader)
        assert sorted(json.loads(line)["path"] for line in log.read_text().splitlines()) == damaged
        runs.append(batches)
    for (images, labels), (other_images, other_labels) in zip(
        *(itertools.chain.from_iterable(run) for run in runs), strict=True
    ):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


class SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError("has no words")


class Unspeakable(Damaged):
    indices = dict.items  # Attributes of these names may be anything.
    dataset = None

    def __getitem__(self, index):
        if index in self.bad:
            raise SpeechlessError
        return torch.tensor(index)


@ALL_WORKERS
def test_errors_without_text_are_recorded(num_workers):
    """An exception whose `str()` raises is recorded by its type."""
    loader = DataLoader(Unspeakable(8, {3}), 4, num_workers=num_workers, on_error=ANY)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 0], [4, 5, 6, 7]]
    assert loader.bad_samples == (BadSample(3, None, "preprocess", "SpeechlessError"),)


@ALL_WORKERS
def test_an_unwritable_log_is_an_error(num_workers, tmp_path):
    """A log file that cannot be written is an error."""
    policy = ReplaceBadSamples(max_fraction=0.5, log=tmp_path / "nowhere" / "bad.jsonl")
    with (
        DataLoader(Damaged(), 4, num_workers=num_workers, on_error=policy) as loader,
        pytest.raises(FileNotFoundError, match="nowhere"),
    ):
        list(loader)


def test_indices_are_recorded_as_plain_values():
    """Indices of any type are recorded as int or str, which JSON can hold."""

    class Named(Dataset):
        def __getitem__(self, index):
            raise ValueError("no")

    indices = [np.int64(3), "name", ("a", 1), np.array([1, 2])]
    loader = DataLoader(Named(), batch_sampler=[indices], num_workers=1, on_error=ANY)
    with pytest.raises(ValueError, match="no"):
        next(iter(loader))
    recorded = {bad.index for bad in loader.bad_samples}
    assert recorded == {3, "name", "('a', 1)", "array([1, 2])"}
    json.dumps([bad.index for bad in loader.bad_samples])


class Interrupting(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise SystemExit


def test_executors_do_not_replace_system_exit():
    """`SystemExit` in an executor's worker is raised."""
    with (
        ProcessPoolExecutor(1) as pool,
        DataLoader(Interrupting(), num_workers=1, on_error=ANY, preprocess_executor=pool) as loader,
        pytest.raises(SystemExit),
    ):
        next(iter(loader))


# -- loading again --------------------------------------------------------------------------------


class Flaky(StagedDataset):
    """Every sample can be loaded at the third attempt."""

    def __init__(self, error=None):
        self.error = error or ConnectionError("reset")
        self.num_attempts = {}

    def __len__(self):
        return 6

    def load(self, index):
        self.num_attempts[index] = self.num_attempts.get(index, 0) + 1
        if self.num_attempts[index] < 3:
            raise self.error
        return index


class FlakyAsync(Flaky):
    async def load(self, index):
        return Flaky.load(self, index)


@pytest.mark.parametrize("kind", [Flaky, FlakyAsync])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_failed_loads_are_retried(kind, num_workers):
    """A load that succeeds at the third attempt is no error."""
    loader = DataLoader(kind(), num_workers=num_workers, on_error=RetryLoad(3, backoff=0))
    assert [batch.item() for batch in loader] == list(range(6))
    assert loader.num_retries == 12


@pytest.mark.parametrize("kind", [Flaky, FlakyAsync])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_attempt_raises(kind, num_workers):
    """After the last attempt the exception is raised."""
    loader = DataLoader(kind(), num_workers=num_workers, on_error=RetryLoad(2, backoff=0))
    with pytest.raises(ConnectionError, match="reset"):
        next(iter(loader))


def test_other_exceptions_are_not_retried():
    """Exceptions that `RetryLoad` does not list are raised at once."""
    dataset = Flaky(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        next(iter(DataLoader(dataset, num_workers=1, on_error=RetryLoad(backoff=0))))
    assert set(dataset.num_attempts.values()) == {1}


def test_failed_retries_are_replaced():
    """`RetryLoad` comes first, then `ReplaceBadSamples`."""
    loader = DataLoader(
        DamagedStaged(), 4, num_workers=2, on_error=[RetryLoad(2, backoff=0), ANY], seed=1
    )
    assert len(list(loader)) == 10
    assert loader.num_retries == 2
    assert {bad.index for bad in loader.bad_samples} == BAD


class FlakyDrawing(Flaky):
    def load(self, index):
        drawn = torch.rand(())
        Flaky.load(self, index)
        return drawn


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_retry_draws_the_same(num_workers):
    """A further attempt draws what the first attempt drew."""
    loader = DataLoader(
        FlakyDrawing(), num_workers=num_workers, on_error=RetryLoad(3, backoff=0), seed=1
    )
    first = [batch.item() for batch in loader]
    assert loader.num_retries == 12
    again = DataLoader(FlakyDrawing(), on_error=RetryLoad(3, backoff=0), seed=1)
    again.dataset.num_attempts = dict.fromkeys(range(6), 2)
    assert [batch.item() for batch in again] == first


class CountingMany(StagedDataset):
    def __init__(self):
        self.calls = []

    def __len__(self):
        return 6

    def load_many(self, indices):
        self.calls.append(list(indices))
        return [torch.rand(()) for _ in indices]


def test_retries_keep_load_many():
    """With `RetryLoad` alone, `load_many` still gets whole batches."""
    drawn = []
    for num_workers in (0, 1):
        dataset = CountingMany()
        loader = DataLoader(
            dataset, 3, num_workers=num_workers, on_error=RetryLoad(backoff=0), seed=1
        )
        drawn.append([batch.tolist() for batch in loader])
        assert dataset.calls == [[0, 1, 2], [3, 4, 5]]
    assert drawn[0] == drawn[1]


class NeverLoaded(Flaky):
    def __init__(self):
        super().__init__()
        self.has_failed = threading.Event()

    def load(self, index):
        if index == 0:
            return 0
        self.has_failed.set()
        raise self.error


class NeverLoadedAsync(NeverLoaded):
    async def load(self, index):
        return NeverLoaded.load(self, index)


@pytest.mark.parametrize("kind", [NeverLoaded, NeverLoadedAsync])
def test_a_pause_ends_with_the_epoch(kind):
    """A worker that waits for its next attempt ends when the loop is left. (A thread that does
    not end is a warning, which fails the test.)
    """
    dataset = kind()
    loader = DataLoader(dataset, num_workers=2, on_error=RetryLoad(3, backoff=3600))
    for _ in loader:
        assert dataset.has_failed.wait(PATIENCE_SECONDS)
        break


def test_pauses_double_each_time():
    """Each pause is twice as long as the one before."""
    assert list(RetryLoad(4, backoff=0.5).pauses()) == [0.5, 1.0, 2.0]


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "arguments", "advice"),
    [
        (Damaged(), {"on_error": "ignore"}, "on_error must be"),
        (Damaged(), {"on_error": [ANY, ANY]}, "one of each"),
        (Sharded(), {"on_error": ANY}, "for map-style datasets"),
        (
            Damaged(),
            {"on_error": ANY, "worker_method": "multiprocessing", "num_workers": 2},
            "Leave out one of them",
        ),
        (Damaged(), {"on_error": RetryLoad()}, "Make it a StagedDataset"),
    ],
)
def test_impossible_policies_are_refused(dataset, arguments, advice):
    """`on_error` is checked when the loader is made."""
    with pytest.raises(ValueError, match=advice):
        DataLoader(dataset, **arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReplaceBadSamples(max_fraction=1.5),
        lambda: ReplaceBadSamples(max_count=-1),
        lambda: RetryLoad(0),
        lambda: RetryLoad(backoff=-1),
    ],
)
def test_policies_check_their_arguments(make):
    """Limits outside of their range are refused."""
    with pytest.raises(ValueError, match="must be"):
        make()
