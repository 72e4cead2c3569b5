"""`cache` with image folders: the same pixels, labels and errors, and nothing stale.

What a loader makes is compared with what the same loader makes without a cache.
"""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from spdl_torch import Cache, DataLoader, ImageError, ImageLoader, ReplaceBadSamples

from . import torchrun
from .images import by_pil, encoded, picture, save, tiered
from .simulated import TYPE, copies_last
from .test_cache import EXHAUSTIVE, FEW_PLACES, PLACES, hits_of
from .test_fuse import read_on_device, simulated
from .test_parity import assert_same
from .tiers import pairwise, sampled, sampled_product

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
LARGE = {"quality": 90, "subsampling": 2}


def with_exif(orientation):
    exif = b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\x01\3\0\1\0\0\0" + bytes([orientation]) + bytes(7)
    return save(picture(70, 90, seed=3), "JPEG", exif=exif)


def files_of_all_kinds():
    """Return files of several formats and layouts, of odd sizes; the last one is large."""
    return [
        by_pil("JPEG", subsampling=2, quality=90)(picture(81, 67, seed=1)),
        by_pil("JPEG", subsampling=0, quality=90)(picture(64, 97, seed=2)),
        with_exif(6),
        by_pil("JPEG", "L")(picture(75, 75)),
        encoded("jpeg cmyk", 66, 91),
        by_pil("PNG")(picture(73, 59)),
        encoded("png rgba", 60, 80),
        by_pil("JPEG", **LARGE)(picture(600, 803, seed=5, has_edges=False)),
    ]


def folder_of(root, files):
    """Write files whose names give their order, in two classes."""
    for number, data in enumerate(files):
        path = root / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("kinds"), files_of_all_kinds())


@pytest.fixture
def own_root(tmp_path):
    """A folder that a test may change."""
    files = [by_pil("BMP")(picture(40, 50, seed=seed)) for seed in range(6)]
    return folder_of(tmp_path / "photos", files)


def by_loader(*chain, **arguments):
    return lambda root: ImageFolder(
        root, v2.Compose(chain) if chain else None, loader=ImageLoader(**arguments)
    )


def by_chain(module, *chain, **arguments):
    return lambda root: ImageFolder(root, module.Compose(chain), **arguments)


V1_TRAIN = (v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor())
V2_TRAIN = (v2.RandomResizedCrop((40, 48)), v2.RandomHorizontalFlip(), v2.ToImage())
V1_VAL = (v1.Resize(56), v1.CenterCrop(48), v1.ToTensor(), v1.Normalize(MEAN, STD))
V2_VAL = (v2.Resize((60, 56)), v2.CenterCrop(48), v2.ToImage())
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)

LOADERS = {
    "random crop": by_loader(size=48, crop="random", horizontal_flip=0.5),
    "small random crop": by_loader(size=16, crop="random"),
    "random bicubic": by_loader(size=(40, 48), crop="random", interpolation="bicubic"),
    "random grey": by_loader(size=48, crop="random", mode="L"),
    "random upright": by_loader(size=48, crop="random", apply_exif_orientation=True),
    "random whole": by_loader(size=48, crop="random", reducing_gap=None),
    "flip": by_loader(size=(40, 48), horizontal_flip=0.5),
    "flip of a centre": by_loader(size=56, crop=48, horizontal_flip=0.5),
    "centre crop": by_loader(size=56, crop=48),
    "centre square": by_loader(size=48, crop="center"),
    "fixed size": by_loader(size=(40, 48)),
    "fixed grey": by_loader(size=(40, 48), mode="L"),
    "fixed upright": by_loader(size=(40, 48), apply_exif_orientation=True),
    "fixed bicubic": by_loader(size=(40, 48), interpolation="bicubic"),
    "fixed and chain": by_loader(v2.CenterCrop(36), TO_FLOAT, size=(40, 48)),
    "fixed and chain of v1": by_loader(v1.CenterCrop(36), size=(40, 48)),
    "fixed and random": by_loader(v2.RandomCrop(32), TO_FLOAT, size=(40, 48)),
    "random and chain": by_loader(v2.ColorJitter(0.4), TO_FLOAT, size=48, crop="random"),
}
CHAINS = {
    "v1 training": by_chain(v1, *V1_TRAIN, v1.Normalize(MEAN, STD)),
    "v1 colours": by_chain(v1, *V1_TRAIN[:2], v1.ColorJitter(0.4), v1.ToTensor()),
    "v1 erasing": by_chain(v1, *V1_TRAIN, v1.RandomErasing(1.0, inplace=True)),
    "v1 erasing at the end": by_chain(v1, *V1_VAL, v1.RandomErasing(1.0, inplace=True)),
    "v1 validation": by_chain(v1, *V1_VAL),
    "v1 random late": by_chain(v1, *V1_VAL[:1], v1.RandomCrop(48), v1.ToTensor()),
    "v2 training": by_chain(v2, *V2_TRAIN, TO_FLOAT, v2.Normalize(MEAN, STD)),
    "v2 validation": by_chain(v2, *V2_VAL, TO_FLOAT, v2.Normalize(MEAN, STD)),
    "v2 bytes": by_chain(v2, *V2_VAL),
    "v2 grey": by_chain(v2, v2.Grayscale(), *V2_VAL),
    "targets": by_chain(v1, *V1_VAL, target_transform=float),
    "bare loader": by_loader(*V2_TRAIN[:2], TO_FLOAT),
    "bare loader, validation": by_loader(*V2_VAL[:2], TO_FLOAT),
}
FEW_NAMES = ["random crop", "centre crop", "v1 training", "v1 validation"]
LEVELS = [None, "raw", "decoded", "sample"]


def loader_of(dataset, cache=None, **arguments):
    arguments = {"batch_size": 3, "shuffle": True, "seed": 5} | arguments
    return DataLoader(dataset, cache=cache, **arguments)


def read(dataset, cache=None, num_epochs=3, **arguments):
    with loader_of(dataset, cache, **arguments) as loader:
        return [list(loader) for _ in range(num_epochs)]


def is_possible(loader):
    """Return whether the dataset has the level, by what the error says if it has not."""
    try:
        return bool(loader.plan.cache)
    except ValueError as error:
        assert "Use level=" in str(error)  # noqa: PT017 (all else is checked by the caller)
        return False


def check(dataset, level, **arguments):
    """Check that three epochs have the same bits, and that the later ones are from the cache."""
    loader = loader_of(dataset, Cache("32MB", level=level), **arguments)
    if not is_possible(loader):
        assert level in {"raw", "sample"}
        return
    with loader:
        for expected in read(dataset, **arguments):
            assert_same(list(loader), expected)
    assert hits_of(loader) == (len(dataset), 0)


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "level", "name"), sampled_product(FEW_PLACES, LEVELS, LOADERS, every=13, step=7)
)
def test_image_loaders_have_same_bits(root, place, level, name):
    """Images of an `ImageLoader` are the same with a cache."""
    check(LOADERS[name](root), level, **PLACES[place])


@pytest.mark.parametrize(
    ("place", "fuse", "level", "name"),
    sampled_product(FEW_PLACES, [False, True, "exact"], LEVELS, CHAINS, every=23, step=7),
)
def test_chains_have_same_bits(root, place, fuse, level, name):
    """Images of torchvision's transforms are the same with a cache, fused or not."""
    check(CHAINS[name](root), level, fuse=fuse, **PLACES[place])


@pytest.mark.parametrize(
    ("name", "fuse", "place"),
    sampled_product(FEW_NAMES, [False, True], FEW_PLACES, every=7),
)
def test_subsets_have_same_bits(root, name, fuse, place):
    """Images of a `Subset` are the same with a cache."""
    dataset = (CHAINS | LOADERS)[name](root)
    check(Subset(dataset, [6, 2, 7, 1]), None, fuse=fuse, **PLACES[place])
    check(Subset(Subset(dataset, [6, 2, 7, 1]), [3, 0]), None, fuse=fuse, **PLACES[place])


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("place", sampled(FEW_PLACES, 3))
def test_concatenated_have_same_bits(root, fuse, place):
    """Images of a `ConcatDataset` are the same with a cache."""
    dataset = ConcatDataset([CHAINS["v1 training"](root), CHAINS["v1 validation"](root)])
    arguments = {"fuse": fuse, **PLACES[place]}
    assert_same(read(dataset, Cache("32MB"), **arguments), read(dataset, **arguments))


@pytest.mark.parametrize(
    ("name", "place"), sampled_product([*FEW_NAMES, "v2 training"], PLACES, every=8)
)
def test_images_come_one_by_one(root, name, place):
    """Without batches, images are the same with a cache."""
    check((CHAINS | LOADERS)[name](root), None, batch_size=None, **PLACES[place])


@pytest.mark.parametrize("name", sampled([*CHAINS, *LOADERS], 4))
def test_calling_thread_draws_same(root, name):
    """Without a seed and workers, images draw the same from torch's generator."""
    dataset, found = (CHAINS | LOADERS)[name](root), []
    for cache in (None, Cache("32MB")):
        torch.manual_seed(8)
        found.append(read(dataset, cache, 2, seed=None))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("format_name", tiered())
def test_formats_have_same_bits(tmp_path, format_name):
    """Images of each format are the same with a cache, with what their files have."""
    folder_of(tmp_path, [encoded(format_name, 75, 101)] * 2)
    arguments = {"size": 32, "crop": "random", "mode": "unchanged"}
    check(by_loader(**arguments)(tmp_path), "decoded")
    check(LOADERS["flip"](tmp_path), "decoded")
    check(CHAINS["v1 training"](tmp_path), "decoded", fuse=True)


def test_batches_may_be_changed(root):
    """A training step that changes batches and images in place changes no entry."""
    for name, arguments in [
        ("centre crop", {}),
        ("centre crop", {"batch_size": None}),
        ("v2 bytes", {"batch_size": None}),
        ("v1 validation", {"batch_size": 1}),
    ]:
        dataset = (CHAINS | LOADERS)[name](root)
        (expected,) = read(dataset, num_epochs=1, shuffle=False, **arguments)
        loader = loader_of(dataset, Cache("32MB"), shuffle=False, **arguments)
        for _ in range(3):
            for batch, plain in zip(loader, expected, strict=True):
                assert_same(batch, plain)
                batch[0].zero_()


def test_large_images_are_kept_raw(root):
    """Of an image that the decoder reduces, the bytes of the file are kept."""
    large = Subset(LOADERS["random crop"](root), [7])
    loader = loader_of(large, Cache("32MB", level="decoded"))
    for _ in range(2):
        list(loader)
    assert hits_of(loader) == (1, 0)
    assert loader.stats().cache.num_bytes < 600 * 803


# -- level, plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fuse", "level", "said"),
    [
        ("random crop", False, "decoded", "images before their first random transform"),
        ("centre crop", False, "sample", "samples"),
        ("v1 training", False, "decoded", "images before their first random transform"),
        ("v1 validation", False, "sample", "samples"),
        ("v1 validation", True, "sample", "samples"),
        ("v1 training", True, "decoded", "images before their first random transform"),
    ],
)
def test_plan_says_what_is_kept(root, name, fuse, level, said):
    """The plan and the statistics say which part of a sample is kept."""
    dataset = (CHAINS | LOADERS)[name](root)
    loader = loader_of(dataset, Cache("32MB", level="decoded"), fuse=fuse)
    list(loader)
    assert loader.plan.cache == f"Cache: {said}, up to 32.0 MB in memory."
    assert loader.stats().cache.level == level
    raw = loader_of(LOADERS["random crop"](root), Cache("32MB", level="raw"))
    assert raw.plan.cache == "Cache: what load returns, up to 32.0 MB in memory."


@pytest.mark.parametrize(
    ("name", "level", "message"),
    [
        ("random crop", "sample", 'random transforms. Use level="raw" or "decoded"'),
        ("v1 training", "sample", 'random transforms. Use level="decoded"'),
        ("v1 training", "raw", 'no load stage. Use level="decoded"'),
        ("v1 validation", "raw", 'no load stage. Use level="sample"'),
    ],
)
def test_level_must_exist(root, name, level, message):
    """A level that the dataset does not have is an error that names those that it has."""
    with pytest.raises(ValueError, match=r"is not possible for ImageFolder") as caught:
        list(loader_of((CHAINS | LOADERS)[name](root), Cache("32MB", level=level)))
    assert message in str(caught.value)


# -- never stale -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_directory", [False, True], ids=["memory", "directory"])
@pytest.mark.parametrize("fuse", [False, True])
def test_all_datasets_share_a_cache(root, tmp_path, in_directory, fuse):
    """Datasets with other transforms and options share a cache, and none gets another's images."""
    cache = Cache("64MB", directory=tmp_path / "cache" if in_directory else None)
    datasets = [make(root) for make in (LOADERS | CHAINS).values()]
    for dataset in datasets:
        expected = read(dataset, num_epochs=1, fuse=fuse)
        assert_same(read(dataset, cache, 1, fuse=fuse), expected)


def test_smaller_size_after_larger(root):
    """A smaller size, for which the decoder reduces large images, finds none of a larger one."""
    cache = Cache("64MB", level="decoded")
    for size in (500, 48, 16, 500):
        for dataset in (
            by_loader(size=size, crop="random")(root),
            by_loader(size=size, crop="center", horizontal_flip=0.5)(root),
        ):
            assert_same(read(dataset, cache, 1), read(dataset, num_epochs=1))
        chain = by_chain(v1, v1.RandomResizedCrop(size), v1.ToTensor())(root)
        assert_same(read(chain, cache, 1, fuse=True), read(chain, num_epochs=1, fuse=True))


def test_limit_of_pixels_is_kept(root):
    """An image with more than max_pixels is an error, also if it is in the cache."""
    cache = Cache("64MB", level="decoded")
    arguments = {"size": 500, "crop": "random"}
    list(loader_of(by_loader(**arguments, max_pixels=None)(root), cache))
    with pytest.raises(ImageError, match="max_pixels"):
        list(loader_of(by_loader(**arguments, max_pixels=300_000)(root), cache))


def rewrite(path, data, *, later_ns):
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later_ns))


@pytest.mark.parametrize(
    ("name", "level", "in_directory"), pairwise(FEW_NAMES, [None, "raw", "decoded"], [False, True])
)
def test_rewritten_file_is_read(own_root, tmp_path, name, level, in_directory):
    """A file that was rewritten is read again, if it has the same size too."""
    dataset = (CHAINS | LOADERS)[name](own_root)
    cache = Cache("32MB", directory=tmp_path / "cache" if in_directory else None, level=level)
    loader = loader_of(dataset, cache)
    if not is_possible(loader):
        assert level == "raw"
        return
    list(loader)
    path = own_root / "a" / "02.jpg"
    other = by_pil("BMP")(picture(40, 50, seed=77))
    assert len(other) == path.stat().st_size
    rewrite(path, other, later_ns=1)
    assert_same(list(loader), read(dataset, num_epochs=2)[1])
    assert hits_of(loader) == (5, 1)


@pytest.mark.parametrize(("name", "fuse"), sampled_product(FEW_NAMES, [False, True], every=3))
def test_second_run_reads_nothing(own_root, tmp_path, name, fuse):
    """A second run with the same directory neither reads nor decodes a file."""
    make, directory = (CHAINS | LOADERS)[name], tmp_path / "cache"
    arguments = {"fuse": fuse, **PLACES["children"]}
    expected = read(make(own_root), **arguments)
    assert_same(read(make(own_root), Cache("32MB", directory=directory), **arguments), expected)
    for path in own_root.glob("*/*.jpg"):  # Nothing that could be decoded.
        rewrite(path, bytes(path.stat().st_size), later_ns=0)
    assert_same(read(make(own_root), Cache("32MB", directory=directory), **arguments), expected)


@pytest.mark.parametrize("name", FEW_NAMES)
def test_labels_are_not_kept(own_root, tmp_path, name):
    """A class that is added shifts the labels, and the images stay in the cache."""
    make, directory = (CHAINS | LOADERS)[name], tmp_path / "cache"
    read(make(own_root), Cache("32MB", directory=directory), 1)
    (own_root / "A before all").mkdir()
    (own_root / "A before all" / "new.jpg").write_bytes(by_pil("PNG")(picture(50, 60, seed=9)))
    dataset = make(own_root)
    with loader_of(dataset, Cache("32MB", directory=directory)) as loader:
        assert_same(list(loader), read(dataset, num_epochs=1)[0])
        assert hits_of(loader) == (6, 1)
    dataset.target_transform = lambda label: label + 10
    with loader_of(dataset, Cache("32MB", directory=directory)) as loader:
        assert_same(list(loader), read(dataset, num_epochs=1)[0])
        assert hits_of(loader) == (7, 0)


@pytest.mark.parametrize("place", sampled(FEW_PLACES, 2))
def test_changed_transform_is_seen(own_root, place):
    """A transform that is assigned between epochs is used in the next one."""
    dataset = CHAINS["v1 validation"](own_root)
    with loader_of(dataset, Cache("32MB"), **PLACES[place]) as loader:
        list(loader)
        dataset.transform = v1.Compose([v1.Resize((20, 30)), v1.ToTensor()])
        dataset.transforms.transform = dataset.transform
        assert_same(list(loader), read(dataset, num_epochs=2)[1])
        dataset.transform.transforms[0].size = (10, 20)
        assert_same(list(loader), read(dataset, num_epochs=3)[2])


def shrink(info):
    """Let the workers use another transform than the training loop."""
    torch.utils.data.get_worker_info().dataset.transform = v1.Compose(
        [v1.Resize((20, 30)), v1.ToTensor()]
    )


@pytest.mark.parametrize("num_processes", [0, 1])
def test_worker_may_change_transform(own_root, num_processes):
    """A `worker_init_fn` that changes the transform leaves nothing of it in the cache."""
    cache = Cache("32MB")
    arguments = {"num_workers": 1, "num_processes": num_processes}
    changed, other = (CHAINS["v1 validation"](own_root) for _ in range(2))
    list(loader_of(changed, cache, worker_init_fn=shrink, **arguments))
    assert_same(read(other, cache, 1, **arguments), read(other, num_epochs=1))


def test_max_side_is_told_apart(own_root, tmp_path):
    """Images that were kept smaller are not used by a loader that wants all pixels."""
    dataset = LOADERS["random crop"](own_root)
    expected = read(dataset, num_epochs=2)
    for max_side in (20, None, 30, None):
        cache = Cache("32MB", directory=tmp_path / "cache", max_side=max_side, level="decoded")
        found = read(dataset, cache, 2)
        if max_side is None:
            assert_same(found, expected)
        else:
            images = torch.cat([images for images, _ in found[1]]).float()
            assert 0 < (images - torch.cat([i for i, _ in expected[1]]).float()).abs().mean() < 30


def test_max_side_keeps_less(root):
    """With max_side, large images are kept decoded, in less memory."""
    dataset = Subset(LOADERS["random crop"](root), [7])
    for max_side in (48, 96):
        loader = loader_of(dataset, Cache("32MB", level="decoded", max_side=max_side))
        list(loader)
        list(loader)
        assert hits_of(loader) == (1, 0)
        stored = max_side * (max_side * 803 // 600)
        assert 1.4 * stored < loader.stats().cache.num_bytes < 3.2 * stored


# -- bad files -------------------------------------------------------------------------------------


def reported(bad_samples):
    return sorted((bad.index, bad.path, bad.stage, bad.error) for bad in bad_samples)


@pytest.mark.parametrize(
    ("name", "fuse", "place"), sampled_product(FEW_NAMES, [False, True], FEW_PLACES, every=7)
)
def test_damaged_files_are_replaced(own_root, tmp_path, name, fuse, place):
    """Damaged files are replaced and reported as without a cache, by later runs too."""
    whole = by_pil("JPEG")(picture(64, 64))
    (own_root / "a" / "02.jpg").write_bytes(b"no image")
    (own_root / "b" / "05.jpg").write_bytes(whole[: len(whole) // 3])
    dataset = (CHAINS | LOADERS)[name](own_root)
    arguments = {"on_error": ReplaceBadSamples(0.5), "fuse": fuse, **PLACES[place]}
    expected = loader_of(dataset, **arguments)
    with expected:
        batches = [list(expected) for _ in range(2)]
    for _ in range(2):
        cache = Cache("32MB", directory=tmp_path / "cache", level="decoded")
        with loader_of(dataset, cache, **arguments) as loader:
            assert_same([list(loader) for _ in range(2)], batches)
        assert reported(loader.bad_samples) == reported(expected.bad_samples)
    with pytest.raises(Exception, match=r"02\.jpg|05\.jpg|truncated") as caught:
        list(loader_of(dataset, cache, fuse=fuse))
    with pytest.raises(type(caught.value)):
        list(loader_of(dataset, fuse=fuse))


def test_missing_file_raises_the_same(own_root):
    """A file that was removed raises what it raises without a cache."""
    for name in ("random crop", "v1 validation"):
        dataset = (CHAINS | LOADERS)[name](own_root)
        loader = loader_of(dataset, Cache("32MB"))
        list(loader)
        path = own_root / "a" / "02.jpg"
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(FileNotFoundError, match=r"02\.jpg"):
            list(loader)
        path.write_bytes(data)


# -- devices, ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v1 training", "v2 validation"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_device_are_same(root, monkeypatch, name, num_workers):
    """With a tail on the device, batches are the same with a cache."""
    expected = read(CHAINS[name](root), num_epochs=2, fuse=True)
    simulator = simulated(monkeypatch, copies_last)
    arguments = {"fuse": True, "device": TYPE, "num_workers": num_workers}
    with loader_of(CHAINS[name](root), Cache("32MB"), **arguments) as loader:
        for epoch in expected:
            for found, batch in zip(read_on_device(simulator, loader), epoch, strict=True):
                assert_same(list(found), list(batch))
        assert hits_of(loader) == (len(loader.dataset), 0)


PROGRAM = """
import os, sys, pathlib, json
import torch, torch.distributed as dist
from spdl_torch import Cache, DataLoader, DistributedRandomSampler, StagedDataset

class Photos(StagedDataset):
    def __init__(self, log): self.log = log
    def __len__(self): return 64
    def load(self, index): return bytes([index]) * 1000
    def preprocess(self, raw):
        with open(self.log, "a") as file: print(raw[0], file=file)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = pathlib.Path(sys.argv[1])
    dataset = Photos(folder / "log")
    cache = Cache("10MB", directory=folder / "cache", token="1", level="sample")
    sampler = DistributedRandomSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, cache=cache)
    report = []
    for epoch in range(3):
        seen = sorted(int(row[0]) for batch in loader for row in batch)
        stats = loader.stats().cache
        dist.barrier()
        report.append([seen, stats.num_hits, stats.num_misses, stats.num_bytes])
    (folder / f"rank-{dist.get_rank()}").write_text(json.dumps(report))
    dist.destroy_process_group()
"""


@EXHAUSTIVE
def test_ranks_share_a_directory(tmp_path):
    """Two ranks of torchrun share one copy on disk, and make each sample once in all."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [*torchrun.command(2), str(program), str(tmp_path)],
        env=torchrun.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert torchrun.has_ended_well(ended.returncode, ended.stderr), ended.stderr
    reports = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    for number, epochs in enumerate(zip(*reports, strict=True)):
        assert sorted(epochs[0][0] + epochs[1][0]) == list(range(64))
        for _, hits, misses, num_bytes in epochs:
            assert (hits, misses) == ((32, 0) if number else (0, 32))
            assert num_bytes <= 64 * 1300 or not number
    # Each worker makes some of its first samples twice, to see that they are the same.
    made = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert set(made) == set(range(64))
    assert len(made) <= 64 + 2 * 2 * 2 * 8
    assert len([*(tmp_path / "cache").glob("*/data-*")]) == 1


def test_full_cache_decodes_as_without(tmp_path, monkeypatch):
    """An image that has no room is decoded as without a cache: only as far as its crop needs."""
    (tmp_path / "photos").mkdir()
    for number in range(64):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(tmp_path / "photos" / f"{number:02}.jpg")
    dataset = ImageFolder(tmp_path, loader=ImageLoader(8, crop="random"))
    loader = DataLoader(dataset, batch_size=8, cache=Cache("130kB", level="decoded"))
    list(loader)
    whole = []
    decode_whole = ImageLoader.decode_whole
    monkeypatch.setattr(
        ImageLoader, "decode_whole", lambda *a, **k: whole.append(a) or decode_whole(*a, **k)
    )
    for _ in range(2):
        list(loader)
        stats = loader.stats().cache
        assert stats.num_hits >= 32
        assert stats.num_misses > 0
    assert len(whole) <= 2  # What was left of the room.
