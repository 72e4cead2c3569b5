"""install(): our loader in the place of torch's, for a whole program."""

from __future__ import annotations

import pytest

from .conftest import assert_says_nothing


def test_installed_class_is_ours():
    """After install(), which may be called twice, torch's names lead to our class."""
    assert_says_nothing(
        "import pickle, spdl_torch, torch\n"
        "base = spdl_torch.DataLoader.__base__\n"
        "assert torch.utils.data.DataLoader is base\n"
        "del base\n"
        "spdl_torch.install()\n"
        "spdl_torch.install()\n"
        "from torch.utils.data import DataLoader\n"
        "from torch.utils.data.dataloader import DataLoader as Other\n"
        "assert DataLoader is Other is spdl_torch.DataLoader\n"
        "assert DataLoader.__base__.__module__ == 'torch.utils.data.dataloader'\n"
        "assert DataLoader[int].__origin__ is DataLoader\n"
        "assert pickle.loads(pickle.dumps(DataLoader)) is DataLoader\n"
        "loader = spdl_torch.DataLoader(range(4), batch_size=2, num_workers=2)\n"
        "assert isinstance(loader, torch.utils.data.DataLoader)\n"
        "copied = pickle.loads(pickle.dumps(loader))\n"
        "assert [batch.tolist() for batch in copied] == [[0, 1], [2, 3]]\n"
        "processes = DataLoader(range(4), num_workers=1, worker_method='multiprocessing')\n"
        "assert len(list(processes)) == 4\n"
    )


@pytest.mark.parametrize(
    ("early", "named"),
    [
        ("from torch.utils.data import DataLoader as Loader", "__main__"),
        ("class Own(torch.utils.data.DataLoader): __module__ = 'own.loaders'", "own.loaders"),
        ("import other; other.Loader = torch.utils.data.DataLoader", "other"),
    ],
)
def test_install_refuses_to_be_late(early, named):
    """If a module holds torch's class or a subclass, install() names it and changes nothing."""
    assert_says_nothing(
        "import sys, types, torch, spdl_torch\n"
        "sys.modules['other'] = types.ModuleType('other')\n"
        f"{early}\n"
        "try:\n"
        "    spdl_torch.install()\n"
        "except RuntimeError as error:\n"
        f"    assert 'is used by {named}. Call' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
        "assert torch.utils.data.DataLoader is not spdl_torch.DataLoader\n"
        "assert torch.utils.data.dataloader.DataLoader is not spdl_torch.DataLoader\n"
    )


def test_torchdata_iterates_by_itself():
    """After install(), torchdata's loader still has its own workers and its own state."""
    assert_says_nothing(
        "import copy, warnings\n"
        "warnings.filterwarnings('ignore', message=\".*'set_vital' is deprecated\")\n"
        "import spdl_torch\n"
        "spdl_torch.install()\n"
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "assert issubclass(StatefulDataLoader, spdl_torch.DataLoader)\n"
        "for num_workers in (0, 1):\n"
        "    loader = StatefulDataLoader(range(6), batch_size=2, num_workers=num_workers)\n"
        "    iterator = iter(loader)\n"
        "    assert type(iterator).__module__.startswith('torchdata.')\n"
        "    assert next(iterator).tolist() == [0, 1]\n"
        "    resumed = StatefulDataLoader(range(6), batch_size=2, num_workers=num_workers)\n"
        "    resumed.load_state_dict(loader.state_dict())\n"
        "    assert [batch.tolist() for batch in resumed] == [[2, 3], [4, 5]]\n"
        "    assert len(list(copy.copy(resumed))) == len(resumed) == 3\n"
    )


def test_torchdata_has_set_epoch():
    """After install(), a framework that finds set_epoch() of torchdata's loader can call it."""
    assert_says_nothing(
        "import warnings\n"
        "warnings.filterwarnings('ignore', message=\".*'set_vital' is deprecated\")\n"
        "import spdl_torch\n"
        "spdl_torch.install()\n"
        "from torch.utils.data import DistributedSampler\n"
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "sampler = DistributedSampler(range(6), num_replicas=1, rank=0)\n"
        "StatefulDataLoader(range(6), batch_size=2, sampler=sampler).set_epoch(5)\n"
        "assert sampler.epoch == 5\n"
    )
