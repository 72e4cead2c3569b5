"""What threads must not share, as it is found in datasets."""

import bz2
import functools
import gzip
import io
import logging
import sqlite3
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections import OrderedDict, deque, namedtuple

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset
from torchvision import transforms as v1

from spdl_torch import StagedDataset
from spdl_torch._unsafe_to_share import shared_threads_warning, unsafe_to_share

from .datasets import Squares, Staged


class Holder(Squares):
    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


class Slotted(Dataset):
    __slots__ = ("empty", "file")

    def __init__(self, file):
        self.file = file


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "samples"
    path.write_bytes(b"0123456789")
    with path.open("rb") as opened:
        yield opened


def class_of(name, module, *bases):
    """Return a stand-in for a class of a library that is not installed here."""
    return type(name, bases or (object,), {"__module__": module})


def places(dataset):
    return [phrase.split(" is ")[0].split(" declares ")[0] for phrase in unsafe_to_share(dataset)]


# -- files ----------------------------------------------------------------------------------------


def test_open_file_is_named(file):
    """An open file is found, with the attribute, its class and what to do."""
    assert unsafe_to_share(Holder(file=file)) == [
        "dataset.file is an open file (BufferedReader), and threads move each other's position; "
        "open it in each call or thread"
    ]


def test_every_kind_of_file(tmp_path, file):
    """Text, unbuffered, compressed, temporary and archived files have a position."""
    for write in (gzip.open, bz2.open):
        with write(tmp_path / write.__module__, "wb") as written:
            written.write(b"0")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("member", "0")
    with (
        open(file.name) as text,  # noqa: PTH123
        open(file.name, "rb", buffering=0) as raw,  # noqa: PTH123
        gzip.open(tmp_path / "gzip") as zipped,
        bz2.open(tmp_path / "bz2") as packed,
        tempfile.NamedTemporaryFile() as temporary,
        zipfile.ZipFile(tmp_path / "zip") as archive,
        archive.open("member") as member,
    ):
        for opened in (text, raw, zipped, packed, member, io.BytesIO(b"0"), io.StringIO("0")):
            (phrase,) = unsafe_to_share(Holder(file=opened))
            assert f"({type(opened).__name__})" in phrase
        assert places(Holder(file=temporary)) == ["dataset.file.file"]


def test_harmless_files(tmp_path, file):
    """Closed files, files that are written, standard streams and ZIP archives are left out."""
    closed = io.FileIO(file.name)
    closed.close()
    detached = io.BufferedReader(io.BytesIO())
    detached.detach()
    with (tmp_path / "log").open("w") as log, zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        dataset = Holder(
            a=closed,
            b=detached,
            c=log,
            d=archive,
            e=sys.stdin,
            f=sys.stdout,
            logger=logging.getLogger("test"),
            handler=logging.StreamHandler(),
            buffers=[io.BytesIO(b"0"), io.BytesIO(b"1")],  # One for each sample.
        )
        assert unsafe_to_share(dataset) == []


def test_file_of_each_thread(file):
    """A file that is kept for each thread is what the advice asks for."""
    local = threading.local()
    local.file = file
    assert unsafe_to_share(Holder(local=local)) == []


def test_archives_and_databases(tmp_path):
    """A TarFile, a sqlite3 connection and its cursor are found."""
    with tarfile.open(tmp_path / "tar", "w") as archive:
        assert "open archive (TarFile)" in unsafe_to_share(Holder(archive=archive))[0]
        assert len(unsafe_to_share(Holder(archive=archive))) == 1
    connection = sqlite3.connect(":memory:")
    dataset = Holder(connection=connection, cursor=connection.cursor())
    assert unsafe_to_share(dataset) == [
        "dataset.connection is a database connection (sqlite3); use one for each thread",
        "dataset.cursor is a database cursor (sqlite3), whose result one thread takes from "
        "another; use one for each thread",
    ]
    connection.close()


def test_hdf5_is_left_out(tmp_path):
    """HDF5 files have a lock of their own."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "h5", "w") as archive:
        assert unsafe_to_share(Holder(archive=archive)) == []


def test_arrays_are_left_out(tmp_path):
    """Arrays, memory maps and the archives of NumPy have no position."""
    np.savez(tmp_path / "npz", a=np.ones(3))
    with np.load(tmp_path / "npz.npz") as archive:
        mapped = np.memmap(tmp_path / "m", mode="w+", shape=(3,))
        assert unsafe_to_share(Holder(a=archive, b=mapped, c=torch.ones(1))) == []


def test_image_that_is_not_read(tmp_path):
    """A PIL image reads its file when it is first used, so that it is an open file until then."""
    PIL.Image.new("L", (3, 3)).save(tmp_path / "image.png")
    with PIL.Image.open(tmp_path / "image.png") as image:
        assert "dataset.image.fp" in places(Holder(image=image))
        image.load()
        assert places(Holder(image=image)) == []


# -- where it looks -------------------------------------------------------------------------------


def test_wrapped_datasets_are_searched(file):
    """Datasets in torch's wrappers, and in a user's, are searched."""
    inner = Holder(file=file)
    assert places(Subset(inner, [0])) == ["dataset.dataset.file"]
    assert places(ConcatDataset([Squares(), inner])) == ["dataset.datasets[1].file"]
    assert places(StackDataset(a=inner)) == ["dataset.datasets['a'].file"]
    assert places(Holder(dataset=inner)) == ["dataset.dataset.file"]
    assert places(Holder(source=inner)) == ["dataset.source.file"]


def test_containers_are_searched(file):
    """Lists, tuples, dicts and what inherits from them are searched."""
    pair = namedtuple("Pair", "first second")(1, file)
    assert places(Holder(files=[1, file])) == ["dataset.files[1]"]
    assert places(Holder(files=(file,))) == ["dataset.files[0]"]
    assert places(Holder(files=pair)) == ["dataset.files[1]"]
    assert places(Holder(files=deque([file]))) == ["dataset.files[0]"]
    assert places(Holder(files={"a": {1: file}})) == ["dataset.files['a'][1]"]
    assert places(Holder(files=OrderedDict(a=file))) == ["dataset.files['a']"]
    assert places(Holder(files={Squares(): file})) == ["dataset.files[...]"]
    assert places([file]) == ["dataset[0]"]


def test_functions_are_searched(file):
    """Variables of a closure, arguments of a partial and owners of methods are searched."""

    def read(offset):
        return file.seek(offset)

    assert places(Holder(read=read)) == ["the variable file of dataset.read"]
    assert places(Holder(read=functools.partial(id, file))) == ["dataset.read.args[0]"]
    assert places(Holder(read=functools.partial(id, a=file))) == ["dataset.read.keywords['a']"]
    assert places(Holder(read=functools.partial(read))) == [
        "the variable file of dataset.read.func"
    ]
    method = Holder(file=file).__getitem__
    assert places(Holder(read=method)) == ["dataset.read.__self__.file"]
    assert places(StagedDataset.from_functions([1], load=read)) == [
        "the variable file of dataset.load.args[0]"
    ]


def test_slots_are_searched(file):
    """Attributes in slots are found, and empty slots do no harm."""
    assert places(Slotted(file)) == ["dataset.file"]


def test_transforms_are_searched(file):
    """Containers of transforms and modules are searched."""
    lambda_ = v1.Lambda(lambda image: file)
    modules = torch.nn.Sequential(v1.Resize(3), v1.RandomApply([lambda_]))
    transform = v1.Compose([v1.Resize(3), modules])
    assert places(Staged()) == []
    (place,) = places(Holder(transform=transform))
    assert place == (
        "the variable file of dataset.transform.transforms[1]._modules['1'].transforms[0].lambd"
    )


def test_found_once(file):
    """What is held twice is found once, at the place that is nearest."""
    assert places(Holder(deep=[file], file=file)) == ["dataset.file"]


def test_circles_end():
    """A dataset that holds itself is searched once."""
    dataset = Holder()
    dataset.me = [dataset]
    assert unsafe_to_share(dataset) == []


def test_handles_opened_later(file):
    """What was not there before the first samples is found after them."""
    dataset = Holder(file=None)
    assert unsafe_to_share(dataset) == []
    dataset.file = file
    assert places(dataset) == ["dataset.file"]


def test_empty_cells_do_no_harm(file):
    """A variable of a closure that has no value yet is left out."""

    def read():
        return file, later

    assert places(Holder(read=read)) == ["the variable file of dataset.read"]
    later = None
    assert read() == (file, later)


# -- declarations ---------------------------------------------------------------------------------


def test_declared_safe_is_left_out(file):
    """What declares itself thread-safe is left out, with all that it holds."""
    inner = Holder(file=file, thread_safe=True)
    assert unsafe_to_share(inner) == []
    assert unsafe_to_share(Subset(inner, [0])) == []
    assert places(Holder(inner=inner, other=[Holder(file=file)])) == ["dataset.other[0].file"]


def test_declared_unsafe_is_found():
    """What declares that it is not thread-safe is found."""
    dataset = Holder(transform=Holder(thread_safe=False))
    phrase = "dataset.transform declares that it is not thread_safe"
    assert unsafe_to_share(dataset) == [phrase]


# -- libraries ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("monai.transforms.traits", "ThreadUnsafe", "MONAI's Mine, which keeps"),
        ("monai.transforms.transform", "Randomizable", "MONAI's Mine, which keeps"),
        ("audiomentations.core", "BaseWaveformTransform", "audiomentations' Mine"),
        ("kornia.augmentation.container.augment", "AugmentationSequential", "kornia's Mine"),
        ("transformers.tokenization_utils_fast", "PreTrainedTokenizerFast", "tokenizer (Mine)"),
        ("tokenizers", "Tokenizer", "a tokenizer, which keeps"),
        ("redis.client", "PubSub", "a redis connection (PubSub)"),
        ("psycopg", "Cursor", "a database cursor (psycopg)"),
        ("cv2", "VideoCapture", "an open video (Mine)"),
        ("torchcodec.decoders._video_decoder", "VideoDecoder", "an open video (Mine)"),
    ],
)
def test_classes_known_by_name(module, name, words):
    """Classes of libraries and what inherits from them are known, without importing them."""
    package = module.partition(".")[0]
    was_imported = package in sys.modules
    mine = class_of("Mine", "my_project", class_of(name, module))()
    (phrase,) = unsafe_to_share(Holder(transform=v1.Compose([mine])))
    assert phrase.startswith("dataset.transform.transforms[0] is ")
    assert words in phrase
    assert (package in sys.modules) == was_imported
    same_name = class_of(name, "my_project")()
    assert unsafe_to_share(Holder(transform=same_name)) == []


def test_compose_of_monai_is_searched():
    """MONAI's Compose inherits from its random transforms, but only holds them."""
    unsafe = class_of("ThreadUnsafe", "monai.transforms.traits")
    compose = class_of("Compose", "monai.transforms.compose", unsafe)()
    compose.transforms = [class_of("Flip", "monai.transforms.spatial")()]
    assert unsafe_to_share(Holder(transform=compose)) == []
    compose.transforms.append(class_of("RandFlip", "monai.transforms.spatial", unsafe)())
    assert places(Holder(transform=compose)) == ["dataset.transform.transforms[1]"]


def test_installed_libraries():
    """Where the libraries are installed, their own classes are found."""
    monai = pytest.importorskip("monai.transforms")
    found = places(Holder(transform=monai.Compose([monai.Flip(0), monai.RandFlip()])))
    assert found == ["dataset.transform.transforms[1]"]


def test_installed_audio_transforms():
    """Where audiomentations is installed, its transforms are found."""
    audio = pytest.importorskip("audiomentations")
    found = places(Holder(augment=audio.Compose([audio.PolarityInversion()])))
    assert found == ["dataset.augment.transforms[0]"]


def test_installed_lmdb(tmp_path):
    """Where lmdb is installed, a transaction is found and an environment is not."""
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path)) as environment, environment.begin() as transaction:
        dataset = Holder(environment=environment, transaction=transaction)
        assert places(dataset) == ["dataset.transaction"]


def test_installed_tokenizers():
    """Where tokenizers is installed, its Tokenizer is found."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    assert places(Holder(tokenizer=tokenizer)) == ["dataset.tokenizer"]


# -- cost and robustness --------------------------------------------------------------------------


def best_seconds(dataset):
    def seconds():
        start = time.perf_counter()
        unsafe_to_share(dataset)
        return time.perf_counter() - start

    return min(seconds() for _ in range(20))


def test_search_is_quick():
    """A million dicts, and a folder with many transforms, cost less than a millisecond."""
    names = ("ColorJitter", "ToTensor", "AutoAugment", "RandomHorizontalFlip", "RandomGrayscale")
    transform = v1.Compose([getattr(v1, name)() for name in names * 4])
    samples = [("a.jpg", 0)] * 1_000_000
    assert best_seconds(Holder(samples=samples, transform=transform)) < 1e-3
    rows = [{"path": str(index), "boxes": [[index]]} for index in range(1_000_000)]
    assert best_seconds(Holder(rows=rows)) < 1e-3


def test_search_is_bounded():
    """Objects without end are searched for some milliseconds, not for ever."""
    nodes = [Holder(a={}, b=[[1]]) for _ in range(1000)]
    for node in nodes:
        vars(node).update((f"other{index}", nodes[index]) for index in range(0, 1000, 20))
    assert best_seconds(nodes[0]) < 0.1


def test_nothing_of_the_user_is_called():
    """Properties, methods and descriptors of the user's are not called."""

    def fail(*_):
        raise AssertionError

    names = ("__getattr__", "__getattribute__", "__iter__", "__len__", "__eq__", "__bool__")
    asked = {"a": property(fail), "__class__": property(fail)}
    cls = type("Fails", (dict,), dict.fromkeys(names, fail) | asked)
    cls.thread_safe = property(fail)
    items = type("Items", (list,), dict.fromkeys(("__iter__", "__len__", "__bool__"), fail))
    fails = object.__new__(type("Plain", (), dict.fromkeys(names, fail) | asked))
    dataset = Holder(a=cls(), b=items([1]), c=fails)
    assert unsafe_to_share(dataset) == ["dataset.a declares that it is not thread_safe"]


def test_change_during_search(file):
    """A dataset that workers change while it is searched raises nothing."""
    is_done = threading.Event()
    dataset = Holder(cache={}, file=file)

    def change():
        while not is_done.is_set():
            for index in range(50):
                dataset.cache[index] = [Squares()]
                setattr(dataset, f"a{index}", index)
            dataset.cache.clear()
            for index in range(50):
                delattr(dataset, f"a{index}")

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert all(places(dataset) == ["dataset.file"] for _ in range(200))
    finally:
        is_done.set()
        thread.join()


# -- the warning ----------------------------------------------------------------------------------


def test_warning_says_what_to_do(file):
    """The warning says what was found, what goes wrong and what to do."""
    text = shared_threads_warning(unsafe_to_share(Holder(file=file)), 4)
    assert text.startswith("4 threads share a dataset that is not thread-safe:\n- dataset.file is")
    for words in ("without an error", "num_processes=num_workers", "copy_dataset=True"):
        assert words in text
    assert "thread_safe = True" in text


def test_warning_is_short():
    """A dataset with hundreds of findings has a warning of a few lines."""
    text = shared_threads_warning([f"dataset.file{index} is bad" for index in range(100)], 2)
    assert "dataset.file4 is bad\n- and 95 more\n" in text
    assert "file5" not in text
