"""Frameworks that are imported after install() make and recognise our loader."""

from __future__ import annotations

import pytest

from tests.conftest import assert_says_nothing


def test_accelerate_prepares_installed_loader():
    """accelerate prepares a loader of torch's name, and ours is inside."""
    pytest.importorskip("accelerate")
    assert_says_nothing(
        "import spdl_torch\n"
        "spdl_torch.install()\n"
        "import accelerate\n"
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(range(4), batch_size=2, num_workers=1)\n"
        "prepared = accelerate.Accelerator(cpu=True).prepare(loader)\n"
        "assert type(prepared).__module__ == 'accelerate.data_loader'\n"
        "assert type(prepared.base_dataloader) is spdl_torch.DataLoader\n"
        "assert [batch.tolist() for batch in prepared] == [[0, 1], [2, 3]]\n"
    )


@pytest.mark.parametrize("name", ["accelerate", "lightning", "timm.data", "webdataset"])
def test_install_names_early_frameworks(name):
    """install() after a framework is an error that names the modules of it."""
    pytest.importorskip(name)
    assert_says_nothing(
        "import warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"import spdl_torch, {name}\n"
        "try:\n"
        "    spdl_torch.install()\n"
        "except RuntimeError as error:\n"
        f"    assert ' {name}.' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )
