"""The structure of the package: who imports what, how large things are, what a batch costs."""

from __future__ import annotations

import ast
import collections
import sys
import threading
from pathlib import Path

import pytest
import torch

import spdl_torch
from spdl_torch import DataLoader

from .conftest import assert_says_nothing
from .datasets import Sharded, Squares

PACKAGE = Path(spdl_torch.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    """Return the dotted name of a module inside the package; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(name):
    """Return what a module imports, lazily or for types too: (ours, other top-level names)."""
    path, ours, others = MODULES[name], set(), set()
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            base = parts[: len(parts) - (node.level - 1)]
            target = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                below = f"{target}.{alias.name}" if target else alias.name
                ours.add(below if below in MODULES else target)
    return ours, others


def import_cycles():
    """Return the strongly connected components of the import graph with more than one module."""
    graph = {name: {other for other in imports(name)[0] if other != name} for name in MODULES}
    number, low, stack, cycles = {}, {}, [], []

    def visit(name):
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            component = []
            while not component or component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                cycles.append(sorted(component))

    for name in graph:
        if name not in number:
            visit(name)
    return cycles


def test_imports_have_no_cycle():
    """No modules import each other in a circle, lazy and type-only imports included."""
    assert import_cycles() == []


def test_cycles_would_be_found(monkeypatch):
    """The search for import cycles sees a lazy import that closes a circle."""
    monkeypatch.setitem(TREES, "_settings", ast.parse("def f():\n    from . import _dataloader"))
    assert any("_dataloader" in cycle for cycle in import_cycles())


def test_nothing_imports_the_loader():
    """Only the package itself, `install` and the integrations import `_dataloader`."""
    importers = {name for name in MODULES if "_dataloader" in imports(name)[0]}
    assert {name for name in importers if not name.startswith(("integrations", "_cli"))} == {
        "",
        "_install",
    }


def test_engine_imports_only_the_standard_library():
    """The engine imports the standard library and itself, and nothing from its parent."""
    for name in MODULES:
        if name.split(".")[0] == "_engine":
            ours, others = imports(name)
            assert all(other.split(".")[0] == "_engine" for other in ours), name
            assert others <= sys.stdlib_module_names, name


def test_engine_compares_no_stage_names():
    """The engine treats the names of stages as labels only."""
    stages = {"load", "preprocess", "collate", "transfer", "iterate"}
    for name, tree in TREES.items():
        if name.startswith("_engine"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Compare):
                    constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                    assert not stages & {c for c in constants if isinstance(c, str)}, name


MAY_USE_PRIVATE_NAMES_OF_TORCH = {
    "_sources._torch_workers",
    "_torch_patches",
    "_random",
    "_worker",
    "_collate",
    "_device",
}


def private_names_of_torch(tree):
    """Yield the private modules, names and attributes of torch that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            if names[0] in {"torch", "torchvision"}:
                yield from (n for n in names if n.startswith("_") and not n.startswith("__"))
        elif isinstance(node, ast.Attribute):
            chain = ast.unparse(node).split(".")
            if chain[0] in {"torch", "profiler"} and node.attr.startswith("_"):
                yield node.attr


def test_private_names_of_torch_are_rare():
    """Private names of torch stand in six modules, where a new version of torch may break them."""
    users = {name for name, tree in TREES.items() if set(private_names_of_torch(tree))}
    places = {
        name if name in MAY_USE_PRIVATE_NAMES_OF_TORCH else name.split(".")[0] for name in users
    }
    assert places <= MAY_USE_PRIVATE_NAMES_OF_TORCH


@pytest.mark.parametrize("package", ["_image", "_device"])
def test_operations_import_no_neighbour(package):
    """Images and devices know nothing of the rest of the package."""
    for name in MODULES:
        if name.split(".")[0] == package:
            assert all(other.split(".")[0] == package for other in imports(name)[0]), name


def test_av_has_one_importer():
    """Only one module knows FFmpeg."""
    assert {name for name in MODULES if "av" in imports(name)[1]} == {"_image._ffmpeg"}


def test_streams_have_one_module():
    """Only one module knows streams and events."""
    words = ("record_stream(", "wait_event(", ".Stream(")
    users = {n for n, path in MODULES.items() if any(w in path.read_text() for w in words)}
    assert users == {"_device._copies"}


# -- sizes ----------------------------------------------------------------------------------------


def test_package_is_small():
    """The package has at most 22,100 lines of Python and 1,000 of HTML, CSS and JavaScript."""
    assert sum(len(path.read_text().splitlines()) for path in FILES) <= 22100
    web = [path for end in ("html", "css", "js") for path in PACKAGE.rglob(f"*.{end}")]
    assert sum(len(path.read_text().splitlines()) for path in web) <= 1000


def test_classes_are_small():
    """No class has more than 300 lines or 16 methods."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {
                    n.name
                    for n in node.body
                    if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                assert node.end_lineno - node.lineno < 300, (name, node.name)
                assert len(methods) <= 16, (name, node.name, sorted(methods))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 60

    def __getitem__(self, index):
        return torch.tensor(index), index


def test_batch_meets_few_functions():
    """In steady state a batch passes through at most 40 functions of ours in at most 12 files.

    What is done only now and then, such as to read a clock, is not counted.
    """
    found: dict = collections.Counter()
    is_counting = False

    def trace(frame, event, _arg):
        code = frame.f_code
        if is_counting and event == "call" and code.co_filename.startswith(str(PACKAGE)):
            found[code.co_filename, code.co_qualname] += 1

    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        iterator = iter(DataLoader(Numbers(), batch_size=16, shuffle=True, num_workers=2))
        for _ in range(20):
            next(iterator)
        is_counting = True
        for _ in range(20):
            next(iterator)
        is_counting = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    found = {where: num_calls for where, num_calls in found.items() if num_calls >= 4}
    assert found
    assert len(found) <= 40, sorted(found)
    assert len({file for file, _ in found}) <= 12, sorted({file for file, _ in found})


# -- state that all threads share -----------------------------------------------------------------

SHARED_BY_ALL_THREADS = {
    ("_engine._batch", "_ids"): "`next` on a count is one atomic operation",
    ("_engine._executor_stage", "_hooks"): "each step is one atomic operation",
    ("_engine._threads", "_started"): "added to and read in one step each",
    ("_engine._threads", "_register_exit"): "done twice it does no harm",
    ("_deferred", "_column"): "the tensor for the same values is always the same, and only read",
    ("_image._geometry", "_log_ratio"): "the numbers for a ratio are always the same",
    ("_worker", "_calls_nothing"): "the answer for a code object is always the same",
    ("_device._copies", "_side_streams"): "of two that are made, both threads take the first",
}
"""The state of modules that changes, and why that is right with any number of threads."""

MUTABLE_CALLS = {
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


def is_mutable(value):
    literals = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    return isinstance(value, literals) or (
        isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    )


def names_that_change(tree):
    """Yield the mutable values of modules and classes, except for constants."""
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
    """Yield the names in capitals that are written to after all."""
    writing = {"add", "append", "clear", "extend", "pop", "popitem", "remove", "setdefault"}
    for node in ast.walk(tree):
        is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        is_call = isinstance(node, ast.Attribute) and node.attr in writing | {"update"}
        held = node.value if is_item or is_call else None
        if isinstance(held, ast.Name) and held.id.isupper():
            yield held.id


def test_shared_state_is_known():
    """Every value that all threads share and that changes is listed with the reason it is safe."""
    found = {
        (name, changing) for name, tree in TREES.items() for changing in names_that_change(tree)
    }
    assert found == set(SHARED_BY_ALL_THREADS)
    for name, tree in TREES.items():
        assert list(writes_to_constants(tree)) == [], name


# -- the public face ------------------------------------------------------------------------------


def test_public_names_are_sorted():
    """`__all__` is sorted, and every name in it exists."""
    assert sorted(spdl_torch.__all__) == spdl_torch.__all__
    for name in spdl_torch.__all__:
        assert getattr(spdl_torch, name) is not None


def test_import_is_light():
    """Importing starts no thread and imports neither av nor torchvision."""
    assert_says_nothing(
        "import sys, threading, spdl_torch\n"
        "assert threading.active_count() == 1\n"
        "others = {'accelerate', 'av', 'lightning', 'rich', 'timm', 'torchvision'}\n"
        "assert not (others | {'transformers'}) & set(sys.modules)\n"
    )


@pytest.mark.parametrize("dataset", [Squares(3), Sharded(3)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_profiler_finds_every_batch(dataset, num_workers):
    """torch's profiler sees an event for each batch, under the name that tools look for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(DataLoader(dataset, num_workers=num_workers))
    names = [event.name for event in profile.events()]
    marked = [name for name in names if name.startswith("enumerate(DataLoader)#")]
    assert len(marked) == 4  # Three batches and the end.
    assert all(name.endswith(".__next__") for name in marked)
