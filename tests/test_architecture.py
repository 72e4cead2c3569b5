"""What keeps the house in order."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

import spdl_torch
from spdl_torch import DataLoader

from .conftest import assert_says_nothing
from .datasets import Sharded, Squares

PACKAGE = Path(spdl_torch.__file__).parent

MAY_IMPORT = {
    "__main__": {"_cli"},
    "__init__": {
        "_dataloader",
        "_dataset",
        "_bad_samples",
        "_image",
        "_profiling",
        "_randomness",
        "_sampler",
        "_stats",
        "_device",
        "_verdict",
        "_version",
    },
    "_dataloader": {
        "_arguments",
        "_dataset",
        "_bad_samples",
        "_event_loops",
        "_iterators",
        "_engine",
        "_profiling",
        "_profiling._run",
        "_resume",
        "_stats",
        "_device",
    },
    "_iterators": {
        "_assembly",
        "_dataloader",  # for its type alone
        "_bad_samples",
        "_engine",
        "_profiling",
        "_resume",
        "_randomness",
        "_samples",
        "_stats",
        "_device",
    },
    "_assembly": {
        "_collate",
        "_dataloader",  # for its type alone
        "_dataset",
        "_dataset_copy",
        "_bad_samples",
        "_marks",
        "_engine",
        "_resume",
        "_randomness",
        "_device",
        "_worker_info",
    },
    "_arguments": {"_dataloader", "_dataset", "_bad_samples"},  # The first for its type alone.
    "_dataset": {"_event_loops"},
    "_marks": {"_engine"},
    "_samples": {"_dataset", "_bad_samples", "_engine", "_resume", "_randomness"},
    "_sampler": {"_permutation", "_ranges"},
    "_stats": {"_bad_samples", "_engine", "_profiling._table", "_verdict"},
    "_verdict": {"_stats"},  # for its type alone
}
"""Imports go down. An operation never imports its neighbour."""


def imports(path):
    """The modules a file imports: ours as (".", name), others as ("", top-level name)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield ".", node.module
        elif isinstance(node, ast.ImportFrom):
            yield "", node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield "", alias.name.split(".")[0]


def test_imports_go_down():
    for path in PACKAGE.glob("*.py"):
        ours = {name for kind, name in imports(path) if kind == "."}
        assert ours <= MAY_IMPORT.get(path.stem, set()), path.name


def test_the_engine_imports_the_standard_library_alone():
    for path in (PACKAGE / "_engine").glob("*.py"):
        for kind, name in imports(path):
            assert kind == "." or name in sys.stdlib_module_names, (path.name, name)


def test_ffmpeg_is_known_in_one_place():
    importers = {path.name for path in PACKAGE.rglob("*.py") if ("", "av") in set(imports(path))}
    assert importers == {"_ffmpeg.py"}


def test_streams_are_known_in_one_place():
    words = ("record_stream(", "wait_event(", ".Stream(")
    files = {p.name for p in PACKAGE.rglob("*.py") if any(word in p.read_text() for word in words)}
    assert files == {"_copies.py"}


SHARED_BY_ALL_THREADS = {
    ("_engine/_executor_stage.py", "_hooks"): "each step is one atomic operation",
    ("_engine/_exit.py", "_consumers"): "added to and read in one step each",
    ("_engine/_exit.py", "_live"): "added to and read in one step each",
    ("_engine/_exit.py", "_register"): "done twice it does no harm",
    ("_device/_copies.py", "_side_streams"): "of two that are made, the first is taken by both",
}
"""What modules have that changes, and why that is right with any number of threads."""


def is_mutable(value):
    if isinstance(value, ast.Dict | ast.List | ast.Set):
        return True
    return isinstance(value, ast.DictComp | ast.ListComp | ast.SetComp) or (
        isinstance(value, ast.Call)
        and ast.unparse(value.func).rpartition(".")[2]
        in {
            "Counter",
            "OrderedDict",
            "WeakKeyDictionary",
            "WeakSet",
            "WeakValueDictionary",
            "bytearray",
            "count",
            "cycle",
            "defaultdict",
            "deque",
            "dict",
            "iter",
            "list",
            "set",
        }
    )


def names_that_change(tree):
    """Mutable values that a module or a class has, but for constants, which nobody writes to."""
    bodies = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in map(ast.unparse, targets):
                is_constant = name == "__all__" or name.isupper()
                if is_mutable(node.value) and not is_constant:
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(d).partition("(")[0] for d in node.decorator_list}
            if decorators & {"cache", "functools.cache", "functools.lru_cache", "lru_cache"}:
                yield node.name


def writes_to_constants(tree):
    """Where a name in capitals is written to after all."""
    writing = {
        "add",
        "append",
        "clear",
        "extend",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "update",
    }
    for node in ast.walk(tree):
        is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        is_call = isinstance(node, ast.Attribute) and node.attr in writing
        held = node.value if is_item or is_call else None
        if isinstance(held, ast.Name) and held.id.isupper():
            yield held.id


def test_what_all_threads_share_and_what_changes_is_known():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        name = path.relative_to(PACKAGE).as_posix()
        found |= {(name, changing) for changing in names_that_change(tree)}
        assert list(writes_to_constants(tree)) == [], name
    assert found == set(SHARED_BY_ALL_THREADS)


@pytest.mark.parametrize("package", ["_image", "_device"])
def test_an_operation_with_rooms_imports_nothing_of_the_rest_of_the_house(package):
    for path in (PACKAGE / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.level < 2, path.name


def test_the_public_names_are_sorted_and_there():
    assert sorted(spdl_torch.__all__) == spdl_torch.__all__
    for name in spdl_torch.__all__:
        assert getattr(spdl_torch, name) is not None


def test_importing_starts_no_thread_and_brings_in_neither_av_nor_torchvision():
    assert_says_nothing(
        "import sys, threading, spdl_torch\n"
        "assert threading.active_count() == 1\n"
        "others = {'accelerate', 'av', 'lightning', 'rich', 'timm', 'torchvision'}\n"
        "assert not (others | {'transformers'}) & set(sys.modules)\n"
    )


@pytest.mark.parametrize("dataset", [Squares(3), Sharded(3)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_profiler_finds_the_event_of_every_batch(dataset, num_workers):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(DataLoader(dataset, num_workers=num_workers))
    names = [event.name for event in profile.events()]
    marked = [name for name in names if name.startswith("enumerate(DataLoader)#")]
    assert len(marked) == 4  # Three batches and the end.
    assert all(name.endswith(".__next__") for name in marked)
