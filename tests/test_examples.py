"""Every example runs, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

EXPECTED = {
    "accelerate_training.py": r"1600 samples, .*\ntrained on each sample of the second epoch",
    "find_the_bottleneck.py": r"io-bound: .* \(now 8\)\.\n.*\ntraining-bound: ",
    "hdf5_and_memmap.py": r"Mapped: sum 64509670(.|\n)*Hdf5: .* 64509670(.|\n)*Chunks: .* 64509670",
    "image_folder.py": r"\(8, 3, 224, 224\) torch.uint8 .*\n200 images",
    "lightning_training.py": (
        r"went on with 2750 samples, .*\ntrained on each sample of the first epoch once\n"
    ),
    "preprocess_on_a_cluster.py": r"killed a worker\n400 samples, each 1 time\n",
    "replace_torch_loader.py": r"epoch 2: (9\d\.\d|100\.0)% correct",
    "resume_training.py": r"epoch 2 ended after step 189, world size 1\nrank 0 .* [0-9a-f]{8}\n",
    "staged_dataset.py": r"16 batches, sum 8372224\n",
    "tar_shards.py": r"112 samples before, 188 after\n300 different ones of 300\n",
    "tokenise_text.py": r"threads: .* 1053786 tokens\n.*\n2 processes: .*, 1053786 tokens\n",
    "train_from_s3.py": r"spdl_torch: (9\d|100)% .* [1-9]\d* retries\n.*\ntorch: (9\d|100)% ",
    "train_imagenet.py": r"epoch 2: loss .*, (9\d|100)\.\d% correct, .*\n(.|\n)*-bound: ",
    "train_on_device.py": r"epoch 2: loss 0\.1\n",
    "transformers_trainer.py": r"to step 80\naccuracy (0\.9\d|1\.00)\n",
}

NEEDED = {
    "accelerate_training.py": "accelerate",
    "lightning_training.py": "lightning",
    "preprocess_on_a_cluster.py": "distributed",
    "train_from_s3.py": "obstore",
    "transformers_trainer.py": "transformers",
}
"""By examples that need more than we do."""


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path):
    if path.name in NEEDED:
        pytest.importorskip(NEEDED[path.name])
    program = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=100, check=False
    )
    assert (program.returncode, program.stderr) == (0, "")
    assert re.search(EXPECTED[path.name], program.stdout), program.stdout
