"""Every example runs, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

EXPECTED = {
    "find_the_bottleneck.py": r"io-bound: .* \(now 8\)\.\n.*\ntraining-bound: ",
    "image_folder.py": r"\(8, 3, 224, 224\) torch.uint8 .*\n200 images",
    "replace_torch_loader.py": r"epoch 2: (9\d\.\d|100\.0)% correct",
    "resume_training.py": r"epoch 2 ended after step 189, world size 1\nrank 0 .* [0-9a-f]{8}\n",
    "staged_dataset.py": r"16 batches, sum 8372224\n",
    "train_on_device.py": r"epoch 2: loss 0\.1\n",
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path):
    program = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=100, check=False
    )
    assert (program.returncode, program.stderr) == (0, "")
    assert re.search(EXPECTED[path.name], program.stdout), program.stdout
