"""Is my dataset thread-safe? The usual handles, shared by the worker threads and copied for them.

Where the order of two threads decides, it is forced: `InTurn` says when each sample is loaded, and
`within_sample_0` also opens files that stop between the seek and the read of sample 0.
"""

import contextlib
import io
import os
import sqlite3
import tarfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset

import spdl_torch

# Most of these datasets are shared wrongly, or right in ways that cannot be seen from outside.
pytestmark = pytest.mark.filterwarnings("ignore:.* threads share a dataset:UserWarning")

TIMEOUT_SECONDS = 30.0
"""For an event that comes at once, unless the test has failed."""

NUM_SAMPLES = 16
SAMPLE_SIZE = 512
"""In bytes: one block of a tar file, so that samples and headers take turns in it."""

Open = Callable[[Path], IO[bytes]]
Connect = Callable[[Path], sqlite3.Connection]
Turn = Callable[[int], AbstractContextManager[None]]
"""Goes around the loading of a sample. It is a function because a dataset's copies share those."""


# -- loading, here and there ----------------------------------------------------------------------


def load_in_threads(
    dataset: Dataset[Any],
    *,
    copy_dataset: bool = False,
    sampler: Sequence[int] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
) -> list[Any]:
    with spdl_torch.DataLoader(
        dataset,
        batch_size=2,
        sampler=sampler,
        num_workers=2,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        copy_dataset=copy_dataset,
    ) as loader:
        return list(loader)


def load_with_torch(
    dataset: Dataset[Any],
    *,
    sampler: Sequence[int] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> list[Any]:
    return list(
        torch.utils.data.DataLoader(
            dataset, batch_size=2, sampler=sampler, num_workers=0, collate_fn=collate_fn
        )
    )


def assert_same_tensors(batches: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(batches, expected, rtol=0, atol=0)


# -- forcing an order -----------------------------------------------------------------------------


class InTurn(Dataset[Any]):
    """The dataset as it is, each sample loaded in its turn."""

    def __init__(self, dataset: Any, turn: Turn) -> None:
        self._dataset = dataset
        self._turn = turn

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        with self._turn(index):
            return self._dataset[index]


def wait_for(event: threading.Event) -> None:
    assert event.wait(TIMEOUT_SECONDS), "the other thread did not come"


def together() -> Turn:
    """Samples 0 and 1 begin at the same time, in two threads."""
    both = threading.Barrier(2, timeout=TIMEOUT_SECONDS)

    @contextlib.contextmanager
    def turn(index: int) -> Iterator[None]:
        if index < 2:
            both.wait()
        yield

    return turn


def after_each_other() -> Turn:
    """Sample 1 is loaded after sample 0, by the other thread."""
    is_loaded = [threading.Event(), threading.Event()]

    @contextlib.contextmanager
    def turn(index: int) -> Iterator[None]:
        if index == 1:
            wait_for(is_loaded[0])
        try:
            yield
        finally:
            if index < 2:
                is_loaded[index].set()
                # Its thread must not be free before the other one has taken sample 1.
                wait_for(is_loaded[1])

    return turn


def within_sample_0(
    offset: int, handles: ExitStack, *, go_on: threading.Event | None = None
) -> tuple[Turn, Open]:
    """Sample 1 is loaded, by the other thread, between the seek to sample 0 and its read.

    `offset` is that of sample 0. Samples 0 and 1 must be the only ones. A lock that keeps sample 1
    from being loaded must set `go_on`.
    """
    has_sought = threading.Event()
    may_go_on = go_on or threading.Event()

    class PausingFile(io.FileIO):
        def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
            position = super().seek(position, whence)
            if position == offset:
                has_sought.set()
                wait_for(may_go_on)
            return position

    def open_pausing(path: Path) -> IO[bytes]:
        return handles.enter_context(PausingFile(path))

    @contextlib.contextmanager
    def turn(index: int) -> Iterator[None]:
        if index == 1:
            wait_for(has_sought)
        try:
            yield
        finally:
            if index == 1:
                may_go_on.set()

    return turn, open_pausing


@pytest.fixture
def handles() -> Iterator[ExitStack]:
    """Closes at the end of the test what the datasets and their copies have opened."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_file(handles: ExitStack) -> Open:
    def open_file(path: Path) -> IO[bytes]:
        return handles.enter_context(path.open("rb"))

    return open_file


# -- sqlite3: a connection belongs to the thread that opened it -----------------------------------


class Rows(Dataset[str]):
    """Opens its connection once, in the thread that makes the dataset."""

    def __init__(self, path: Path, connect: Connect) -> None:
        self._connection = connect(path)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> str:
        return text_of_row(self._connection, index)


class LazyRows(Dataset[str]):
    """Opens its connection when it is first used: what is right in worker processes."""

    def __init__(self, path: Path, connect: Connect) -> None:
        self._path = path
        self._connect = connect
        self._connection: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> str:
        if self._connection is None:
            self._connection = self._connect(self._path)
        return text_of_row(self._connection, index)


class ThreadLocalRows(Dataset[str]):
    """Opens a connection in each thread that uses it."""

    def __init__(self, path: Path, connect: Connect) -> None:
        self._path = path
        self._connect = connect
        self._of_thread = threading.local()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> str:
        if not hasattr(self._of_thread, "connection"):
            self._of_thread.connection = self._connect(self._path)
        return text_of_row(self._of_thread.connection, index)


def text_of_row(connection: sqlite3.Connection, index: int) -> str:
    (text,) = connection.execute("SELECT text FROM samples WHERE id = ?", (index,)).fetchone()
    return str(text)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "samples.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, text TEXT)")
        rows = [(index, f"text {index}") for index in range(NUM_SAMPLES)]
        connection.executemany("INSERT INTO samples VALUES (?, ?)", rows)
    return path


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens connections that are closed with their thread, the only one that may close them."""
    of_thread = threading.local()

    class EndOfThread:
        pass

    def connect(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path)
        end = EndOfThread()
        weakref.finalize(end, connection.close)
        of_thread.ends = [*getattr(of_thread, "ends", []), end]
        return connection

    yield connect
    # The main thread does not end.
    of_thread.__dict__.clear()


def test_early_connection_fails_in_worker(database: Path, connect: Connect) -> None:
    """A connection that is opened with the dataset fails in a worker, at its sample."""
    dataset = Rows(database, connect)

    with pytest.raises(
        sqlite3.ProgrammingError, match="can only be used in that same thread"
    ) as raised:
        load_in_threads(dataset, sampler=[5, 6])

    assert "sample index 5" in "".join(raised.value.__notes__)


def test_open_connection_cannot_be_copied(database: Path, connect: Connect) -> None:
    """A dataset with an open connection cannot be copied."""
    with (
        spdl_torch.DataLoader(Rows(database, connect), num_workers=2, copy_dataset=True) as loader,
        pytest.raises(
            TypeError,
            match=r"Rows cannot be copied .*'sqlite3\.Connection'.* Open .* when it is first used",
        ),
    ):
        iter(loader)


def test_thread_local_connection(database: Path, connect: Connect) -> None:
    """A connection for each thread returns the batches of torch."""
    expected = load_with_torch(ThreadLocalRows(database, connect))
    dataset = ThreadLocalRows(database, connect)

    assert load_in_threads(InTurn(dataset, after_each_other())) == expected


def test_copies_share_threading_local(database: Path, connect: Connect) -> None:
    """Copies share a threading.local, since each thread has its own values in it."""
    expected = load_with_torch(ThreadLocalRows(database, connect))
    dataset = ThreadLocalRows(database, connect)

    assert load_in_threads(dataset, copy_dataset=True) == expected


def test_lazy_shared_connection_fails(database: Path, connect: Connect) -> None:
    """A shared connection that is opened when first used fails in the second thread."""
    dataset = InTurn(LazyRows(database, connect), after_each_other())

    with pytest.raises(
        sqlite3.ProgrammingError, match="can only be used in that same thread"
    ) as raised:
        load_in_threads(dataset, sampler=[0, 1])

    assert "sample index 1" in "".join(raised.value.__notes__)


def test_lazy_connection_per_copy(database: Path, connect: Connect) -> None:
    """A connection that each copy opens when first used returns the batches of torch."""
    expected = load_with_torch(LazyRows(database, connect))
    dataset = InTurn(LazyRows(database, connect), after_each_other())

    assert load_in_threads(dataset, copy_dataset=True) == expected


# -- tarfile: all members are read through one position -------------------------------------------


class Members(Dataset[bytes]):
    """Opens its archive once, when it is made."""

    def __init__(self, path: Path, open_file: Open) -> None:
        self._archive = tarfile.TarFile(fileobj=open_file(path))
        # All headers are read now: what the threads share is nothing but reading members.
        self._names = self._archive.getnames()

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> bytes:
        return bytes_of_member(self._archive, self._names[index])


class LockedMembers(Members):
    """Lets one thread at a time read a member."""

    def __init__(self, path: Path, open_file: Open, lock: AbstractContextManager[Any]) -> None:
        super().__init__(path, open_file)
        self._lock = lock

    def __getitem__(self, index: int) -> bytes:
        with self._lock:
            return super().__getitem__(index)


class LazyMembers(Dataset[bytes]):
    """Opens its archive when it is first used."""

    def __init__(self, path: Path, open_file: Open) -> None:
        self._path = path
        self._open = open_file
        self._archive: tarfile.TarFile | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> bytes:
        if self._archive is None:
            self._archive = tarfile.TarFile(fileobj=self._open(self._path))
        return bytes_of_member(self._archive, name_of_member(index))


class ThreadLocalMembers(Dataset[bytes]):
    """Opens the archive in each thread that uses it."""

    def __init__(self, path: Path, open_file: Open) -> None:
        self._path = path
        self._open = open_file
        self._of_thread = threading.local()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> bytes:
        if not hasattr(self._of_thread, "archive"):
            self._of_thread.archive = tarfile.TarFile(fileobj=self._open(self._path))
        return bytes_of_member(self._of_thread.archive, name_of_member(index))


class AnnouncingLock:
    """A lock that says when a thread has found it taken."""

    def __init__(self, is_wanted: threading.Event) -> None:
        self._lock = threading.Lock()
        self._is_wanted = is_wanted

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._is_wanted.set()
            assert self._lock.acquire(timeout=TIMEOUT_SECONDS), "the other thread keeps the lock"

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


def bytes_of_member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    assert member is not None
    with member:
        return member.read()


def name_of_member(index: int) -> str:
    return f"{index:06}.bin"


def bytes_of_sample(index: int) -> bytes:
    return bytes([index]) * SAMPLE_SIZE


OFFSET_OF_MEMBER_0 = tarfile.BLOCKSIZE
"""Behind its header."""

HEADER_OF_MEMBER_2 = slice(4 * tarfile.BLOCKSIZE, 5 * tarfile.BLOCKSIZE)
"""Behind the headers and the bytes of members 0 and 1, a block each."""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "samples.tar"
    with tarfile.open(path, "w") as archive:
        for index in range(NUM_SAMPLES):
            member = tarfile.TarInfo(name_of_member(index))
            member.size = SAMPLE_SIZE
            archive.addfile(member, io.BytesIO(bytes_of_sample(index)))
    return path


def test_shared_archive_races(archive: Path, handles: ExitStack) -> None:
    """A shared archive returns the wrong bytes if another thread reads in between."""
    turn, open_pausing = within_sample_0(OFFSET_OF_MEMBER_0, handles)

    [batch] = load_in_threads(InTurn(Members(archive, open_pausing), turn), sampler=[0, 1])

    assert batch == [archive.read_bytes()[HEADER_OF_MEMBER_2], bytes_of_sample(1)]


def test_open_archive_cannot_be_copied(archive: Path, open_file: Open) -> None:
    """A dataset with an open archive cannot be copied."""
    dataset = Members(archive, open_file)

    with (
        spdl_torch.DataLoader(dataset, num_workers=2, copy_dataset=True) as loader,
        pytest.raises(TypeError, match=r"Members cannot be copied .*'(_io\.)?BufferedReader'"),
    ):
        iter(loader)


def test_shared_archive_with_lock(archive: Path, open_file: Open, handles: ExitStack) -> None:
    """A shared archive with a lock returns the batches of torch, without a race."""
    expected = load_with_torch(Members(archive, open_file), sampler=[0, 1])
    is_wanted = threading.Event()
    turn, open_pausing = within_sample_0(OFFSET_OF_MEMBER_0, handles, go_on=is_wanted)

    dataset = InTurn(LockedMembers(archive, open_pausing, AnnouncingLock(is_wanted)), turn)

    assert load_in_threads(dataset, sampler=[0, 1]) == expected


def test_thread_local_archive(archive: Path, open_file: Open, handles: ExitStack) -> None:
    """An archive for each thread returns the batches of torch, without a race."""
    expected = load_with_torch(ThreadLocalMembers(archive, open_file), sampler=[0, 1])
    turn, open_pausing = within_sample_0(OFFSET_OF_MEMBER_0, handles)

    dataset = InTurn(ThreadLocalMembers(archive, open_pausing), turn)

    assert load_in_threads(dataset, sampler=[0, 1]) == expected


def test_archive_per_copy(archive: Path, open_file: Open, handles: ExitStack) -> None:
    """An archive that each copy opens returns the batches of torch, without a race."""
    expected = load_with_torch(LazyMembers(archive, open_file), sampler=[0, 1])
    turn, open_pausing = within_sample_0(OFFSET_OF_MEMBER_0, handles)

    dataset = InTurn(LazyMembers(archive, open_pausing), turn)

    assert load_in_threads(dataset, copy_dataset=True, sampler=[0, 1]) == expected


# -- h5py: lets one thread at a time into the HDF5 library ----------------------------------------
# https://docs.h5py.org/en/stable/threads.html

OpenHdf5 = Callable[[Path], h5py.File]


class Arrays(Dataset[npt.NDArray[Any]]):
    """Opens its file when it is first used."""

    def __init__(self, path: Path, open_hdf5: OpenHdf5) -> None:
        self._path = path
        self._open = open_hdf5
        self._file: h5py.File | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        if self._file is None:
            self._file = self._open(self._path)
        sample: npt.NDArray[Any] = self._file["samples"][index]
        return sample


class ArraysWithoutTheirFile(Arrays):
    """Leaves its open file behind when it is copied."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}


@pytest.fixture
def hdf5_file(tmp_path: Path) -> Path:
    path = tmp_path / "samples.h5"
    samples = np.arange(NUM_SAMPLES * 8, dtype=np.int64).reshape(NUM_SAMPLES, 8)
    with h5py.File(path, "w") as file:
        file.create_dataset("samples", data=samples, chunks=(4, 8), compression="gzip")
    return path


@pytest.fixture
def open_hdf5(handles: ExitStack) -> OpenHdf5:
    def open_hdf5(path: Path) -> h5py.File:
        return handles.enter_context(h5py.File(path, "r"))

    return open_hdf5


def test_shared_hdf5_file(hdf5_file: Path, open_hdf5: OpenHdf5) -> None:
    """A shared HDF5 file returns the batches of torch."""
    expected = load_with_torch(Arrays(hdf5_file, open_hdf5))
    dataset = Arrays(hdf5_file, open_hdf5)
    assert dataset[0] is not None  # It is open from now on.

    assert_same_tensors(load_in_threads(InTurn(dataset, together())), expected)


def test_hdf5_file_opened_twice(hdf5_file: Path, open_hdf5: OpenHdf5) -> None:
    """An HDF5 file that two threads open at the same time returns the batches of torch."""
    expected = load_with_torch(Arrays(hdf5_file, open_hdf5))
    both = threading.Barrier(2, timeout=TIMEOUT_SECONDS)

    def open_together(path: Path) -> h5py.File:
        # Only a thread that has found no open file comes here.
        both.wait()
        return open_hdf5(path)

    assert_same_tensors(load_in_threads(Arrays(hdf5_file, open_together)), expected)


def test_hdf5_file_per_copy(hdf5_file: Path, open_hdf5: OpenHdf5) -> None:
    """An HDF5 file that each copy opens returns the batches of torch."""
    expected = load_with_torch(Arrays(hdf5_file, open_hdf5))

    dataset = InTurn(Arrays(hdf5_file, open_hdf5), after_each_other())

    assert_same_tensors(load_in_threads(dataset, copy_dataset=True), expected)


def test_open_hdf5_cannot_be_copied(hdf5_file: Path, open_hdf5: OpenHdf5) -> None:
    """A dataset that has opened its HDF5 file cannot be copied."""
    dataset = Arrays(hdf5_file, open_hdf5)
    assert dataset[0] is not None  # As one looks at a sample before training.

    with (
        spdl_torch.DataLoader(dataset, num_workers=2, copy_dataset=True) as loader,
        pytest.raises(
            TypeError,
            match=r"Arrays cannot be copied .*h5py objects cannot be pickled.* __getstate__",
        ),
    ):
        iter(loader)


def test_getstate_drops_hdf5_file(hdf5_file: Path, open_hdf5: OpenHdf5) -> None:
    """A dataset whose __getstate__ leaves out the open HDF5 file can be copied."""
    expected = load_with_torch(Arrays(hdf5_file, open_hdf5))
    dataset = ArraysWithoutTheirFile(hdf5_file, open_hdf5)
    assert dataset[0] is not None  # It is open from now on.

    batches = load_in_threads(InTurn(dataset, after_each_other()), copy_dataset=True)

    assert_same_tensors(batches, expected)


# -- numpy: a memory map has no position ----------------------------------------------------------


class Mapped(Dataset[npt.NDArray[Any]]):
    """Maps its file when it is made."""

    def __init__(self, path: Path) -> None:
        self.pixels = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        row: npt.NDArray[Any] = self.pixels[index]
        return row


class LazyMapped(Dataset[npt.NDArray[Any]]):
    """Maps its file when it is first used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pixels: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        if self._pixels is None:
            self._pixels = np.load(self._path, mmap_mode="r")
        row: npt.NDArray[Any] = self._pixels[index]
        return row


@pytest.fixture
def array_file(tmp_path: Path) -> Path:
    path = tmp_path / "samples.npy"
    np.save(path, np.arange(NUM_SAMPLES * 8, dtype=np.int64).reshape(NUM_SAMPLES, 8))
    return path


def test_shared_memory_map(array_file: Path) -> None:
    """A shared memory map returns the batches of torch."""
    expected = load_with_torch(Mapped(array_file), collate_fn=np.stack)

    batches = load_in_threads(InTurn(Mapped(array_file), together()), collate_fn=np.stack)

    np.testing.assert_array_equal(batches, expected)


def test_shared_map_returns_views(array_file: Path) -> None:
    """Samples of a shared memory map are views of the file."""
    dataset = Mapped(array_file)

    samples = [row for batch in load_in_threads(dataset, collate_fn=list) for row in batch]

    assert len(samples) == NUM_SAMPLES
    assert all(np.shares_memory(sample, dataset.pixels) for sample in samples)


def test_copied_memory_map(array_file: Path) -> None:
    """A copied memory map returns the batches of torch."""
    expected = load_with_torch(Mapped(array_file), collate_fn=np.stack)
    dataset = InTurn(Mapped(array_file), together())

    batches = load_in_threads(dataset, copy_dataset=True, collate_fn=np.stack)

    np.testing.assert_array_equal(batches, expected)


def test_copied_map_is_shared(array_file: Path) -> None:
    """The copies of a dataset have one memory map."""
    dataset = Mapped(array_file)

    batches = load_in_threads(dataset, copy_dataset=True, collate_fn=list)

    assert all(np.shares_memory(row, dataset.pixels) for batch in batches for row in batch)


def test_memory_map_per_copy(array_file: Path) -> None:
    """Samples of a memory map that each copy opens are views of the file."""
    dataset = InTurn(LazyMapped(array_file), together())

    batches = load_in_threads(dataset, copy_dataset=True, collate_fn=list)

    np.testing.assert_array_equal(batches, load_with_torch(Mapped(array_file), collate_fn=list))
    assert {Path(sample.filename) for batch in batches for sample in batch} == {array_file}


# -- a plain file: seek and read are two steps ----------------------------------------------------


class Records(Dataset[bytes]):
    """Opens its file when it is first used, and reads where it has sought."""

    def __init__(self, path: Path, open_file: Open) -> None:
        self._path = path
        self._open = open_file
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> bytes:
        if self._file is None:
            self._file = self._open(self._path)
        self._file.seek(index * SAMPLE_SIZE)
        return self._file.read(SAMPLE_SIZE)


class RecordsByPread(Dataset[bytes]):
    """Reads without a position."""

    def __init__(self, path: Path, open_file: Open) -> None:
        self.file = open_file(path)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> bytes:
        return os.pread(self.file.fileno(), SAMPLE_SIZE, index * SAMPLE_SIZE)


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    path = tmp_path / "samples.bin"
    path.write_bytes(b"".join(bytes_of_sample(index) for index in range(NUM_SAMPLES)))
    return path


def test_shared_file_races(record_file: Path, handles: ExitStack) -> None:
    """A shared file returns another sample if another thread reads in between."""
    turn, open_pausing = within_sample_0(0, handles)

    [batch] = load_in_threads(InTurn(Records(record_file, open_pausing), turn), sampler=[0, 1])

    assert batch == [bytes_of_sample(2), bytes_of_sample(1)]


def test_file_per_copy(record_file: Path, open_file: Open, handles: ExitStack) -> None:
    """A file that each copy opens returns the batches of torch, without a race."""
    expected = load_with_torch(Records(record_file, open_file), sampler=[0, 1])
    turn, open_pausing = within_sample_0(0, handles)

    dataset = InTurn(Records(record_file, open_pausing), turn)

    assert load_in_threads(dataset, copy_dataset=True, sampler=[0, 1]) == expected


def test_open_file_cannot_be_copied(record_file: Path, open_file: Open) -> None:
    """A dataset that has opened its file cannot be copied."""
    dataset = Records(record_file, open_file)
    assert dataset[0] == bytes_of_sample(0)  # As one looks at a sample before training.

    with (
        spdl_torch.DataLoader(dataset, num_workers=2, copy_dataset=True) as loader,
        pytest.raises(TypeError, match=r"Records cannot be copied .*'(_io\.)?BufferedReader'"),
    ):
        iter(loader)


@pytest.mark.skipif(not hasattr(os, "pread"), reason="os.pread is not on this platform")
def test_shared_file_with_pread(record_file: Path, open_file: Open) -> None:
    """A shared file that is read with pread returns the batches of torch."""
    expected = load_with_torch(Records(record_file, open_file))
    dataset = RecordsByPread(record_file, open_file)

    assert load_in_threads(InTurn(dataset, together())) == expected


@pytest.mark.skipif(not hasattr(os, "pread"), reason="os.pread is not on this platform")
def test_pread_keeps_the_position(record_file: Path, open_file: Open) -> None:
    """pread does not move the position that the threads share."""
    dataset = RecordsByPread(record_file, open_file)

    load_in_threads(InTurn(dataset, together()))

    assert os.lseek(dataset.file.fileno(), 0, os.SEEK_CUR) == 0
