"""Every example runs, and prints what is expected."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from . import torchrun
from .images import picture, save

EXAMPLES = Path(__file__).parent.parent / "examples"

EXPECTED = {
    "accelerate_training.py": r"1600 samples, .*\ntrained on each sample of the second epoch",
    "find_the_bottleneck.py": r"io-bound: .* \(now 8\)\.\n.*\ntraining-bound: ",
    "hdf5_and_memmap.py": r"Mapped: sum 64509670(.|\n)*Hdf5: .* 64509670(.|\n)*Chunks: .* 64509670",
    "image_folder.py": r"\(8, 3, 224, 224\) torch.uint8 .*\n200 images",
    "lightning_training.py": (
        r"resumed with 2750 samples, .*\ntrained on each sample of the first epoch once\n"
    ),
    "preprocess_on_a_cluster.py": r"killed a worker\n400 samples, each 1 time\n",
    "replace_torch_loader.py": r"epoch 2: (9\d\.\d|100\.0)% correct",
    "resume_training.py": r"epoch 2 ended after step 189, world size 1\nrank 0 .* [0-9a-f]{8}\n",
    # 100 ms for each of 512 objects, of which 8 are loaded at a time: that takes 6.4 seconds.
    "s3_with_local_cache.py": (
        r"first run, epoch 1: 512 images, ([6-9]|\d\d)\.\d\d s, 512 requests\n"
        r"first run, epoch 2: 512 images, 0\.[0-5]\d s, 0 requests\n.* 512 hits, 0 misses, .*\n"
        r"second run, epoch 1: 512 images, .*, 0 requests\n"
    ),
    "staged_dataset.py": r"16 batches, sum 8372224\n",
    "tar_shards.py": r"112 samples before, 188 after\n300 different ones of 300\n",
    "tokenise_text.py": r"1 process: .* 1053786 tokens\n.*\n.*2 processes: .* 1053786 tokens\n",
    "train_from_s3.py": r"spdl_torch: (9\d|100)% .* [1-9]\d* retries\n.*\ntorch: (9\d|100)% ",
    "train_imagenet.py": r"epoch 2: .*, 240 images, .*, (9\d|100)\.\d% correct\n(.|\n)*-bound: ",
    "train_on_device.py": r"epoch 2: loss 0\.1\n",
    "transformers_trainer.py": r"to step 80\naccuracy (0\.9\d|1\.00)\n",
}

NEEDED = {
    "accelerate_training.py": "accelerate",
    "lightning_training.py": "lightning",
    "preprocess_on_a_cluster.py": "distributed",
    "s3_with_local_cache.py": "obstore",
    "train_from_s3.py": "obstore",
    "transformers_trainer.py": "transformers",
}
"""Packages that examples need and spdl_torch does not."""

QUICK = {"replace_torch_loader.py", "staged_dataset.py"}
"""The examples of the default tier."""


def test_every_example_is_listed():
    """An example without an expected output would not be run."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == EXPECTED.keys()
    assert EXPECTED.keys() > QUICK


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.exhaustive])
        for name in sorted(EXPECTED)
    ],
)
def test_example_runs(name):
    """The program ends without an error and prints the expected output."""
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    program = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=240, check=False
    )
    assert (program.returncode, program.stderr) == (0, "")
    assert re.search(EXPECTED[name], program.stdout), program.stdout


IMAGES_OF_AN_EPOCH = 240
IMAGES_OF_A_STEP = 16
"""In each process."""
STEPS_BETWEEN_CHECKPOINTS = 3


def train_imagenet(num_processes, checkpoint):
    command = torchrun.command(num_processes)
    command += [str(EXAMPLES / "train_imagenet.py"), "--epochs=1", "--size=32"]
    command += [f"--checkpoint={checkpoint}"]
    command += [f"--steps-between-checkpoints={STEPS_BETWEEN_CHECKPOINTS}"]
    return subprocess.Popen(
        command,
        env=torchrun.ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def break_off_at_first_checkpoint(num_processes, checkpoint, before):
    with train_imagenet(num_processes, checkpoint) as program:
        while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before:
            assert program.poll() is None
            time.sleep(0.01)
        contents = checkpoint.read_bytes()
        program.terminate()
    checkpoint.write_bytes(contents)  # A later one may have been saved since.
    return checkpoint.stat().st_mtime_ns


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_training_resumes_with_other_ranks(tmp_path):
    """A training that is killed resumes with another number of processes, twice."""
    checkpoint = tmp_path / "last.pt"
    time_written = break_off_at_first_checkpoint(2, checkpoint, before=None)
    break_off_at_first_checkpoint(1, checkpoint, before=time_written)
    with train_imagenet(2, checkpoint) as program:
        output, _ = program.communicate()
    assert torchrun.has_ended_well(program.returncode, output), output
    rest = IMAGES_OF_AN_EPOCH - STEPS_BETWEEN_CHECKPOINTS * IMAGES_OF_A_STEP * (2 + 1)
    assert output.count("epoch") == 1
    assert f", {rest} images, " in output


def make_folder(root):
    for part, number in (("train", 48), ("val", 12)):
        for index in range(number):
            path = root / part / f"class {index % 3}" / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(save(picture(120, 160, seed=index), "JPEG"))


def report_of(root, *options):
    """Train two epochs; return what was printed, without the throughput."""
    command = [sys.executable, EXAMPLES / "train_imagenet.py", f"--data={root}", "--epochs=2"]
    command += ["--model=resnet18", "--size=32", "--batch-size=16", "--workers=2", *options]
    program = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (program.returncode, program.stderr) == (0, "")
    return [line.split(" images, ")[0] for line in program.stdout.splitlines() if "loss" in line]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_training_is_same_with_cache(tmp_path):
    """A cache changes no loss, in memory, in a directory, and in a second run with the latter."""
    make_folder(tmp_path / "images")
    expected = report_of(tmp_path / "images")
    assert len(expected) == 2
    directory = f"--cache-directory={tmp_path / 'cache'}"
    for options in (["--cache=1GB"], ["--cache=1GB", directory], [directory]):
        assert report_of(tmp_path / "images", *options) == expected
    command = [sys.executable, "-m", "spdl_torch", "cache", tmp_path / "cache", "--verify"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "48 entries" in listed.stdout
    assert listed.returncode == 0
