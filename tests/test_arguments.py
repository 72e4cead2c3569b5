"""Bad arguments: torch's exception types, and what to do about it."""

from __future__ import annotations

import copy
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.utils.data

from spdl_torch import DataLoader, ReplaceBadSamples

from .datasets import Sharded, Squares, Staged


def torch_error(dataset, arguments):
    with pytest.raises((ValueError, TypeError)) as caught:
        torch.utils.data.DataLoader(dataset, **arguments)
    return caught.value


@pytest.mark.parametrize(
    ("dataset", "arguments", "advice"),
    [
        (Squares(), {"num_workers": -1}, "num_workers=0"),
        (Squares(), {"timeout": -1}, "Leave it at 0"),
        (Squares(), {"prefetch_factor": 2}, "num_workers > 0"),
        (Squares(), {"num_workers": 1, "prefetch_factor": -1}, "Leave it out"),
        (Squares(), {"persistent_workers": True}, "num_workers > 0"),
        (Squares(), {"sampler": [1], "shuffle": True}, "Leave out shuffle"),
        (Squares(), {"batch_sampler": [[1]], "batch_size": 2}, "Leave those out"),
        (Squares(), {"batch_sampler": [[1]], "drop_last": True}, "Leave those out"),
        (Squares(), {"batch_size": None, "drop_last": True}, "Leave out drop_last"),
        (Squares(), {"batch_size": 0}, "positive integer"),
        (Sharded(), {"shuffle": True}, "Shuffle in the dataset's __iter__"),
        (Sharded(), {"sampler": [1]}, "decides its order in __iter__"),
        (Sharded(), {"batch_sampler": [[1]]}, "Pass batch_size"),
        (Squares(), {"num_workers": 1, "multiprocessing_context": "no"}, "valid start method in"),
        (Squares(), {"multiprocessing_context": "fork"}, "num_workers > 0"),
        (Squares(), {"num_workers": 1, "multiprocessing_context": object()}, "valid context"),
        (Squares(), {"num_workers": "two"}, "num_workers=0"),
    ],
)
def test_torchs_exception_type_with_advice(dataset, arguments, advice):
    expected = torch_error(dataset, arguments)
    with pytest.raises(type(expected)) as caught:
        DataLoader(dataset, **arguments)
    assert type(caught.value) is type(expected)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "advice"),
    [
        ({"worker_method": "fiber"}, ValueError, '"thread" or "multiprocessing"'),
        ({"num_workers": 2.0}, TypeError, "must be an int"),
        ({"num_workers": 2, "prefetch_factor": 0}, ValueError, "at least 1, got 0. Leave it out"),
        ({"num_workers": 2, "buffer_size": 0}, ValueError, "at least 1, got 0. Leave it out"),
        ({"num_workers": 2, "num_io_workers": -1}, ValueError, "at least 1"),
        ({"num_workers": 2, "num_cpu_workers": 1.5}, TypeError, "must be an int"),
        ({"num_io_workers": 4}, ValueError, "Set num_workers to 1 or more"),
        ({"buffer_size": 4}, ValueError, "Set num_workers to 1 or more"),
        ({"copy_dataset": True}, ValueError, "Set num_workers to 1 or more"),
        (
            {"num_workers": 2, "worker_method": "multiprocessing", "copy_dataset": True},
            ValueError,
            "Leave out one of them",
        ),
        ({"num_workers": 2, "preprocess_executor": 4}, TypeError, "ProcessPoolExecutor(4)"),
    ],
)
def test_own_arguments_are_checked_at_once(arguments, error, advice):
    """A bad argument of ours is an error when the loader is made, with advice."""
    with pytest.raises(error) as caught:
        DataLoader(Squares(), **arguments)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_io_workers": 2},
        {"num_cpu_workers": 2},
        {"preprocess_executor": ThreadPoolExecutor(1)},
    ],
)
def test_iterable_dataset_refuses_stage_arguments(arguments):
    """Arguments of stages are refused for an iterable dataset."""
    with pytest.raises(ValueError, match="is for map-style datasets"):
        DataLoader(Sharded(), num_workers=2, **arguments)


def test_signature_begins_with_torchs():
    """Every argument of torch's has its place and default, and ours are keywords."""
    theirs = inspect.signature(torch.utils.data.DataLoader).parameters
    ours = inspect.signature(DataLoader).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default
        assert ours[name].kind == parameter.kind
    for name in list(ours)[len(theirs) :]:
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_arguments_are_kept_as_attributes():
    """Every argument is an attribute, so that a loader can be made again from them."""
    executor = ThreadPoolExecutor(1)
    arguments = {
        "batch_size": 3,
        "num_workers": 2,
        "collate_fn": list,
        "timeout": 7,
        "prefetch_factor": 3,
        "in_order": False,
        "worker_method": "thread",
        "num_io_workers": 5,
        "num_cpu_workers": 4,
        "buffer_size": 6,
        "preprocess_executor": executor,
        "copy_dataset": True,
        "seed": 3,
        "on_error": ReplaceBadSamples(max_count=2),
        "device": "cpu",
    }
    loader = DataLoader(Staged(), **arguments)
    assert {name: getattr(loader, name) for name in arguments} == arguments
    # What Lightning does: the same loader again, from its public attributes.
    names = set(inspect.signature(DataLoader).parameters) - {"batch_sampler"}
    kept = {name: value for name, value in vars(loader).items() if name in names}
    again = DataLoader(**kept)
    assert {name: getattr(again, name) for name in arguments} == arguments


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_fixed_attributes_cannot_be_set(name):
    """Attributes that torch does not let one set later cannot be set later."""
    with pytest.raises(ValueError, match="should not be set after DataLoader is initialized"):
        setattr(DataLoader(Squares()), name, None)


def test_the_class_can_be_subscripted():
    loader: DataLoader[int] = DataLoader[int](Squares())
    assert isinstance(loader, torch.utils.data.DataLoader)


def test_too_many_threads_warn():
    """A thousand worker threads warn, and 64 do not."""
    DataLoader(Squares(), num_workers=64)
    with pytest.warns(UserWarning, match="1000 worker threads.*excessive worker creation") as told:
        DataLoader(Squares(), num_workers=1000)
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_copied_loader_has_own_workers(clone):
    """A copied or pickled loader starts its own workers."""
    loader = DataLoader(Squares(6), batch_size=2, num_workers=2, persistent_workers=True)
    expected = [batch.tolist() for batch in loader]
    copied = clone(loader)
    assert [batch.tolist() for batch in copied] == expected
    copied.close()
    assert [batch.tolist() for batch in loader] == expected
    loader.close()


def test_an_iterator_cannot_be_pickled():
    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(DataLoader(Squares(), num_workers=2)))


def test_useless_io_workers_warn():
    """num_io_workers warns if the dataset has no load stage."""
    with pytest.warns(UserWarning, match="num_io_workers=16 changes nothing: Squares has no load"):
        DataLoader(Squares(), num_workers=2, num_io_workers=16)
    DataLoader(Staged(), num_workers=2, num_io_workers=16)
