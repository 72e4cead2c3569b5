"""`spdl-torch cache`: lists, verifies and clears the directory of a cache."""

from __future__ import annotations

import json
import os
import re
import time

import pytest
import torch

from spdl_torch import Cache, DataLoader, StagedDataset
from spdl_torch._cli import main

NUM_SAMPLES = 40


class Photos(StagedDataset):
    """Samples of 1,600 bytes, made of raw forms of 1,000 bytes."""

    num_samples = NUM_SAMPLES

    def __len__(self):
        return self.num_samples

    def load(self, index):
        return bytes([index % 256]) * 1000

    def preprocess(self, raw):
        return torch.full((400,), raw[0], dtype=torch.int32)


class FewPhotos(Photos):
    num_samples = 10


class Noise(torch.utils.data.Dataset):
    """Samples that are different each time, without an RNG that is watched; but not the first."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return bytes(100) if index < 4 else os.urandom(100)


def fill(directory, dataset, **options):
    """Load all samples through a cache; return how many were not found in it."""
    cache = Cache("100MB", directory=directory, token="1", **options)
    with DataLoader(dataset, batch_size=8, collate_fn=list, cache=cache) as loader:
        batches = list(loader)
        assert sum(map(len, batches)) == len(dataset)
        return loader.stats().cache.num_misses


@pytest.fixture
def directory(tmp_path):
    """A cache with a space of 40 samples and one of 10 raw forms."""
    directory = tmp_path / "cache"
    fill(directory, Photos(), level="sample")
    fill(directory, FewPhotos(), level="raw")
    return directory


def run(*arguments):
    return main(["cache", *map(str, arguments)])


def document(capsys):
    """Return what was printed, which must be one JSON document and nothing else."""
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def folder_of(directory, level):
    [folder] = [
        path.parent
        for path in directory.glob("*/about.json")
        if json.loads(path.read_text())["level"] == level
    ]
    return folder


def overwrite(path, data, at):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


# -- list ------------------------------------------------------------------------------------------


def test_spaces_are_listed(directory, capsys):
    """Each space has a line with its contents, size and age, and one with what made it."""
    an_hour_ago = time.time() - 3 * 3600
    for path in folder_of(directory, "raw").iterdir():
        os.utime(path, (an_hour_ago, an_hour_ago))
    assert run(directory) == 0
    printed = capsys.readouterr()
    lines = dict(line.split(": ", 1) for line in printed.out.splitlines() if ": " in line)
    samples = lines[folder_of(directory, "sample").name]
    assert samples.startswith("samples of Photos, 40 entries, ")
    assert samples.endswith(("second ago", "seconds ago"))
    raw = lines[folder_of(directory, "raw").name]
    assert raw.startswith("raw forms of FewPhotos, 10 entries, 10.")
    assert raw.endswith(" kB, written 3 hours ago")
    made_by = r"    samples of tests.test_cli_cache.Photos \w+, length 40, token '1'\n"
    assert re.search(made_by, printed.out)
    assert printed.err.startswith("2 spaces, 50 entries, ")


def test_list_is_one_document(directory, capsys):
    """`--json` has the same figures, and the time of the last write."""
    assert run(directory, "--json") == 0
    report = document(capsys)
    spaces = {space["level"]: space for space in report["spaces"]}
    samples = spaces["sample"]
    assert samples["name"] == folder_of(directory, "sample").name
    assert (samples["dataset"], samples["num_samples"]) == ("Photos", NUM_SAMPLES)
    assert NUM_SAMPLES * 1600 < samples["num_bytes"] < NUM_SAMPLES * 2000
    assert (samples["num_damaged"], samples["is_used"], samples["problem"]) == (None, True, None)
    assert samples["written"] >= "2026"
    assert report["num_entries"] == 50
    assert report["num_bytes"] == sum(space["num_bytes"] for space in report["spaces"])


def test_empty_cache_is_listed(directory, capsys):
    """A cache without spaces is listed, and is no error."""
    assert run(directory, "--clear") == 0
    capsys.readouterr()
    assert run(directory, "--verify", "--json") == 0
    report = document(capsys)
    assert (report["spaces"], report["num_entries"], report["num_damaged"]) == ([], 0, 0)


@pytest.mark.parametrize("about", ["", "[]", '{"level": ["\\u001b"], "made_by": "\\u001b"}'])
def test_unknown_contents_are_listed(directory, about, capsys):
    """A space whose description is damaged is listed, without its control characters."""
    (folder_of(directory, "raw") / "about.json").write_text(about)
    assert run(directory) == 0
    printed = capsys.readouterr()
    assert ": entries of ?, 10 entries, " in printed.out
    assert "\x1b" not in printed.out
    assert printed.err.startswith("2 spaces, 50 entries, ")


def test_refused_space_is_marked(tmp_path, capsys):
    """Samples that are different each time are listed as not used, and are not damaged."""
    fill(tmp_path / "cache", Noise())
    assert run(tmp_path / "cache", "--verify") == 0
    printed = capsys.readouterr()
    assert "not used, because samples were different each time" in printed.out
    assert printed.err.endswith(" 0 damaged\n")


# -- verify ----------------------------------------------------------------------------------------


def test_good_cache_is_verified(directory, capsys):
    """A cache without damage has exit code 0."""
    assert run(directory, "--verify") == 0
    assert capsys.readouterr().err.endswith(" 0 damaged\n")


@pytest.mark.parametrize("file", ["data-00000", "table"])
def test_damaged_entry_is_found(directory, file, capsys):
    """A changed byte of an entry, or of where it is, is one damaged entry in its space."""
    path = folder_of(directory, "sample") / file
    at = 1000
    if file == "table":  # Behind the key of the first entry.
        slots = range(4096, path.stat().st_size, 40)
        at = 20 + next(slot for slot in slots if any(_read(path, slot, 40)))
    overwrite(path, bytes([_read(path, at, 1)[0] ^ 1]), at)
    assert run(directory, "--verify", "--json") == 1
    report = document(capsys)
    assert {s["level"]: s["num_damaged"] for s in report["spaces"]} == {"sample": 1, "raw": 0}
    assert report["num_damaged"] == 1
    assert run(directory, "--verify") == 1
    printed = capsys.readouterr()
    assert ", 1 damaged\n" in printed.out
    assert ", 1 damaged. The loader makes damaged entries again" in printed.err


def _read(path, at, size):
    with path.open("rb") as file:
        file.seek(at)
        return file.read(size)


def test_truncated_data_are_found(directory, capsys):
    """All entries behind the end of a truncated file are damaged."""
    path = folder_of(directory, "raw") / "data-00000"
    os.truncate(path, 0)
    assert run(directory, "--verify", "--json") == 1
    assert document(capsys)["num_damaged"] == 10


def test_damaged_table_is_found(directory, capsys):
    """A space whose table is damaged is listed with the reason, and fails `--verify`."""
    overwrite(folder_of(directory, "raw") / "table", b"nonsense", 0)
    assert run(directory) == 0
    assert "of FewPhotos, cannot be read: its table is damaged\n" in capsys.readouterr().out
    assert run(directory, "--verify") == 1
    assert "40 entries" in capsys.readouterr().err


def test_loader_replaces_damaged_entries(directory, capsys):
    """After an epoch that makes the damaged entries again, the cache is good."""
    os.truncate(folder_of(directory, "sample") / "data-00000", 20_000)
    assert run(directory, "--verify") == 1
    assert 0 < fill(directory, Photos(), level="sample") < NUM_SAMPLES
    capsys.readouterr()
    assert run(directory, "--verify") == 0


# -- clear -----------------------------------------------------------------------------------------


def test_clear_removes_all_spaces(directory, capsys):
    """`--clear` removes all spaces and what killed processes left, and the cache stays usable."""
    (directory / ".new-1-2-abc").mkdir()
    assert run(directory, "--clear") == 0
    assert capsys.readouterr().err.startswith("removed 2 spaces, 50 entries, ")
    assert {path.name for path in directory.iterdir()} == {"spdl_torch_cache.json", "usage"}
    assert fill(directory, Photos()) == NUM_SAMPLES
    assert fill(directory, Photos()) == 0


def test_clear_removes_one_space(directory, capsys):
    """`--clear NAME` removes the space whose name begins so, and no other."""
    folder = folder_of(directory, "raw")
    assert run(directory, "--clear", folder.name[:8], "--json") == 0
    assert document(capsys)["removed"] == [folder.name]
    assert not folder.exists()
    assert fill(directory, Photos(), level="sample") == 0


@pytest.mark.parametrize("refills", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_outlives_clear(tmp_path, num_workers, refills):
    """A loader whose cache is cleared, and filled by another, makes its samples, and keeps them."""
    directory = tmp_path / "cache"
    cache = Cache("100MB", directory=directory, token="1", level="sample")
    loader = DataLoader(Photos(), batch_size=8, num_workers=num_workers, cache=cache)
    expected = torch.cat(list(loader))
    assert run(directory, "--clear") == 0
    if refills:
        fill(directory, Photos(), level="sample")
    for num_misses in (0 if refills else NUM_SAMPLES, 0):
        assert torch.equal(torch.cat(list(loader)), expected)
        assert loader.stats().cache.num_misses == num_misses
    assert run(directory, "--verify") == 0


# -- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--verify"], ["--clear"]])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere: No such file or directory"),
        ("file", "file: Not a directory"),
        ("empty", "empty is no cache: it is empty"),
        ("photos", "photos is no cache: it has other files"),
    ],
)
def test_other_directories_are_refused(tmp_path, monkeypatch, name, message, options, capsys):
    """A directory that is no cache is an error of one line, and stays as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "about.json").write_text("{}")
    assert run(name, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"spdl-torch cache: error: {message}. Give the directory of")
    assert printed.err.count("\n") == 1
    assert (tmp_path / "photos" / "a" / "about.json").exists()


def test_unknown_space_is_refused(directory, capsys):
    """A name that no space has is an error that lists the names."""
    assert run(directory, "--clear", "xyz") == 2
    message = capsys.readouterr().err
    assert "no space in " in message
    for level in ("raw", "sample"):
        assert folder_of(directory, level).name in message


def test_verify_excludes_clear(directory, capsys):
    """`--verify` and `--clear` together are wrong usage."""
    assert run(directory, "--verify", "--clear") == 2
    assert "not allowed with" in capsys.readouterr().err
    assert folder_of(directory, "raw").exists()
