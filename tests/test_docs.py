"""The code in the README, the docs and the docstrings runs, and every link has a target."""

from __future__ import annotations

import concurrent.futures
import doctest
import importlib.util
import inspect
import io
import multiprocessing
import re
import tarfile
import textwrap
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

import spdl_torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FRAMEWORKS = [
    "accelerate",
    "distributed",
    "lightning",
    "obstore",
    "timm",
    "transformers",
    "webdataset",
]
CLUSTER = 'Client("tcp://scheduler:8786")'
CLUSTER_HERE = 'Client(processes=False, n_workers=1, dashboard_address=":0")'
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page):
    return [textwrap.dedent(match[2]) for match in BLOCK.finditer(page.read_text())]


def needs_what_is_missing(block):
    imported = set(re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE))
    return any(importlib.util.find_spec(name) is None for name in imported & set(FRAMEWORKS))


# -- names that the examples use ------------------------------------------------------------------


class Client:
    async def get(self, url):
        return url


class Response:
    def __init__(self, content):
        self.content = content


class Texts(torch.utils.data.Dataset):
    """A dataset that can be pickled."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return index


def pool_of_threads(max_workers, mp_context=None):
    return concurrent.futures.ThreadPoolExecutor(max_workers)


def decode(raw):
    return torch.full((4,), float(len(raw)))


def read(path):
    return Path(path).read_bytes()


def train(batch=None):
    pass


def write_shard(path):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for number in range(8):
            header = tarfile.TarInfo(f"{number:04}.cls")
            header.size = 1
            shard.addfile(header, io.BytesIO(b"%d" % number))


def replace_the_store(monkeypatch, paths):
    """Use a store in memory instead of a remote one."""
    import obstore.store  # noqa: PLC0415 (need not be installed)

    store = obstore.store.MemoryStore()
    for path in paths:
        store.put(path.name, path.read_bytes())
    store.put("records.bin", bytes(10_000 * 512))
    monkeypatch.setattr(obstore.store, "S3Store", lambda *_, **__: store)


@pytest.fixture
def setting(tmp_path, monkeypatch):
    """Return the names that the examples use without defining them."""
    monkeypatch.chdir(tmp_path)
    # The real one needs its archives.
    monkeypatch.setattr(torchvision.datasets, "ImageNet", torchvision.datasets.ImageFolder)
    # Starting eight processes would take longer than all other examples.
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", pool_of_threads)
    rng = np.random.default_rng(0)
    (tmp_path / "photos").symlink_to("images")
    for number in range(4):
        folder = tmp_path / "images" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (60, 80, 3), np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{number}.jpg")
    paths = sorted((tmp_path / "images").rglob("*.jpg"))
    for number in range(4):
        write_shard(tmp_path / "shards" / f"{number}.tar")
    keys = [path.name for path in paths]
    if importlib.util.find_spec("obstore") is not None:
        replace_the_store(monkeypatch, paths)
    device = "cuda" if torch.cuda.is_available() else "meta"
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).to(device)
    photos = spdl_torch.StagedDataset.from_functions(paths, load=read, preprocess=decode)
    dataset = TensorDataset(torch.rand(128, 3, 2, 2), torch.zeros(128, dtype=torch.long))
    return {
        **{name: getattr(spdl_torch, name) for name in spdl_torch.__all__},
        "Image": PIL.Image,
        "ImageFolder": torchvision.datasets.ImageFolder,
        "ProcessPoolExecutor": concurrent.futures.ProcessPoolExecutor,
        "batch": torch.zeros(2),
        "client": Client(),
        "criterion": nn.CrossEntropyLoss(),
        "dataset": dataset,
        "decode": decode,
        "image": torch.zeros(3, 8, 8),
        "keys": keys,
        "loader": spdl_torch.DataLoader(dataset, batch_size=8, num_workers=2),
        "mask": torch.zeros(3, 8, 8),
        "model": model,
        "multiprocessing": multiprocessing,
        "path": tmp_path / "checkpoint.pt",
        "paths": paths,
        "photos": photos,
        "read": read,
        "response": Response(paths[0].read_bytes()),
        "root": tmp_path / "images",
        "seed": 1,
        "spdl_torch": spdl_torch,
        "texts": Texts(),
        "torch": torch,
        "train": train,
        "transform": v2.RandomHorizontalFlip(),
        "urls": ["a", "b", "c"] * 30,
        "v2": v2,
        "words": ["one", "two"],
    }


# WebDataset leaves closing files to the garbage collector.
@pytest.mark.children
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name
)
def test_code_of_a_page_runs(page, setting, capsys):
    """Every block of Python on a page runs, and a loader that it makes returns a batch."""
    if page.name == "remote.md":
        pytest.importorskip("obstore")  # Each of its blocks uses the first.
    if not torch.cuda.is_available():
        setting["batch"] = setting["batch"].to("meta")
    for block in blocks(page):
        if not torch.cuda.is_available():
            block = block.replace('"cuda"', '"meta"')  # noqa: PLW2901
        if needs_what_is_missing(block):
            continue
        before = setting["loader"]
        exec(compile(block.replace(CLUSTER, CLUSTER_HERE), page.name, "exec"), setting)
        loader = setting["loader"]
        if loader is not before and "Pool" not in block:
            assert next(iter(loader)) is not None
        if CLUSTER in block:
            setting["client"].close()


# -- docstrings ------------------------------------------------------------------------------------

PUBLIC = {name: getattr(spdl_torch, name) for name in spdl_torch.__all__ if name != "__version__"}
CLASSES = {name for name, value in PUBLIC.items() if inspect.isclass(value)}


@pytest.mark.children
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_docstring_examples_run(name, setting):
    """The examples of a public class or function print what they say."""
    names = setting | {"torchvision": torchvision, "__name__": "__main__"}
    tests = doctest.DocTestFinder().find(PUBLIC[name], name, module=False, globs=names)
    if not any(test.examples for test in tests):
        assert name not in CLASSES, "a public class needs an example"
        pytest.skip("has no example")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    output = []
    for test in tests:
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


def test_public_names_hide_private_modules():
    """A traceback or a repr shows a public name where users import it from."""
    private = {name for name, value in PUBLIC.items() if value.__module__ != "spdl_torch"}
    assert private == set()


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page):
    """A link to a file of the repository, or to a heading in it, finds it."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, target


def test_text_is_plain_english():
    """Words that make the text hard to search and to read stay out of docs and package."""
    unwanted = re.compile(r"\b(whoever|nobody|somebody|anew|in vain)\b", re.IGNORECASE)
    files = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "spdl_torch").rglob("*.py")]
    found = {file.relative_to(ROOT) for file in files if unwanted.search(file.read_text())}
    assert found == set()


def test_migration_guide_has_every_argument():
    """The table for users of torch's loader lists all arguments."""
    text = (ROOT / "docs" / "migrating.md").read_text()
    parameters = list(inspect.signature(spdl_torch.DataLoader).parameters)
    rows = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(explained) == sorted(parameters)


def test_readme_has_our_arguments():
    """The README lists the arguments that torch does not have."""
    text = (ROOT / "README.md").read_text()
    theirs = inspect.signature(torch.utils.data.DataLoader).parameters
    ours = set(inspect.signature(spdl_torch.DataLoader).parameters) - set(theirs)
    for name in ours:
        assert f"| `{name}` |" in text, name
