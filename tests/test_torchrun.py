"""A training under torchrun that is killed goes on from its checkpoint, on any number of ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from . import torchrun

EXAMPLE = Path(__file__).parent.parent / "examples" / "resume_training.py"
SIZE = 8001
"""Of the example's dataset: one more than two ranks can share evenly."""
STEPS_BETWEEN_CHECKPOINTS = 10
TIMEOUT_SECONDS = 90
"""For each wait: torch takes seconds to import in each process, and the cores may be busy."""

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(6 * TIMEOUT_SECONDS),  # The fixture's waits count for the first test.
]


class Run:
    """The example in processes of its own, and what it has left behind when they have ended."""

    def __init__(self, directory: Path, *, num_ranks: int, gated: bool, **options: Any) -> None:
        self.log, self.output = directory / "log", directory / "output.txt"
        self.log.mkdir(parents=True)
        options |= {"steps_between_checkpoints": STEPS_BETWEEN_CHECKPOINTS, "index_log": self.log}
        command = [*torchrun.command(num_ranks), str(EXAMPLE)]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        # In the place of rank 0's log there is a pipe that has room for one page. So rank 0, and
        # with it all who wait for it in backward(), can be but a few lines ahead of who reads it.
        fifo = self.log / "rank-0.jsonl" if gated else directory / "not used"
        os.mkfifo(fifo)
        self._gate = os.open(fifo, os.O_RDWR)  # To write too: or it would wait for a writer.
        fcntl.fcntl(self._gate, fcntl.F_SETPIPE_SZ, 4096)
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=torchrun.ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._exit = os.pidfd_open(self._process.pid)
        self.checkpoint_path = Path(options["checkpoint"])
        self.checkpoint: dict[str, Any] = {}
        """As it was at the end."""
        self.lines: list[dict[str, Any]] = []
        """What all ranks have logged."""
        self.left_behind: set[int] = set()
        """The processes that were there when the first had ended."""

    def let_go_on_until(self, step: int) -> None:
        while not self.lines or self.lines[-1]["step"] < step:
            text = b""
            while not text.endswith(b"\n"):
                readable, _, _ = select.select([self._gate, self._exit], [], [], TIMEOUT_SECONDS)
                if self._gate not in readable:
                    pytest.fail(f"step {step} was not reached:\n{self.output.read_text()}")
                text += os.read(self._gate, 1)  # No more than a line: the rest is the gate.
            self.lines.append(json.loads(text))

    def processes(self) -> dict[int, bytes]:
        """Return the environments of all processes of this run, by id."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # It has ended meanwhile, or is not ours to read.
                if os.fsencode(self.log) in (directory / "cmdline").read_bytes():
                    found[int(directory.name)] = (directory / "environ").read_bytes()
        return found

    def kill_rank(self, rank: int) -> None:
        variable = f"RANK={rank}".encode()
        # Its worker processes have its environment, and are younger.
        pid = min(pid for pid, env in self.processes().items() if variable in env.split(b"\0"))
        os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        # By id, because torchrun gives each worker a process group of its own; torchrun first, so
        # that it cannot see its workers end.
        ends = {}
        for pid in sorted(self.processes(), key=lambda pid: pid != self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                ends[pid] = os.pidfd_open(pid)
        for end in ends.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
        too_late = [pid for pid, end in ends.items() if not _is_readable(end)]
        for end in ends.values():
            os.close(end)
        assert too_late == []

    def wait(self, exit_code: int = 0) -> None:
        """Wait for its end: as it should be, or for another reason."""
        found = self._process.wait(TIMEOUT_SECONDS)
        self.left_behind = set(self.processes())
        output = self.output.read_text()
        assert found == exit_code or (exit_code == 0 and torchrun.has_ended_well(found, output)), (
            output
        )
        self.checkpoint = torch.load(self.checkpoint_path)
        for path in self.log.glob("*.jsonl"):
            if path.is_file():
                for line in path.read_text().splitlines(keepends=True):
                    if line.endswith("\n"):  # Who was killed may have left half a line.
                        self.lines.append(json.loads(line))

    def close(self) -> None:
        self.kill_all()
        self._process.wait(TIMEOUT_SECONDS)
        os.close(self._gate)
        os.close(self._exit)

    def indices(self, epoch: int) -> list[int]:
        """What its ranks have trained on in this epoch, as far as it is in the checkpoint."""
        return [
            index
            for line in self.lines
            if line["epoch"] == epoch and line["step"] <= self.checkpoint["step"]
            for index in line["indices"]
        ]


def _is_readable(file_descriptor: int) -> bool:
    return bool(select.select([file_descriptor], [], [], TIMEOUT_SECONDS)[0])


@dataclass
class Runs:
    """Each goes on where the one before it was killed; the last two, where `three` was."""

    two: Run
    three: Run
    two_again: Run
    alone: Run
    first_checkpoint: Path
    """Another name of the file that `two` has left behind."""

    def all(self) -> list[Run]:
        return [self.two, self.three, self.two_again, self.alone]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    # These are the runs of all tests, because it takes seconds to start each.
    root = tmp_path_factory.mktemp("torchrun")
    checkpoint = root / "checkpoint"
    with contextlib.ExitStack() as stack:

        def start(name: str, **arguments: Any) -> Run:
            run = Run(root / name, **({"checkpoint": checkpoint, "epochs": 2} | arguments))
            stack.callback(run.close)
            return run

        # The epoch has 40 steps of 200 samples, of which some 18 can be done.
        two = start("two", num_ranks=2, gated=True, batch_size=100)
        two.let_go_on_until(STEPS_BETWEEN_CHECKPOINTS + 1)
        two.kill_rank(1)
        two.wait(exit_code=1)
        first_checkpoint = root / "first"
        first_checkpoint.hardlink_to(checkpoint)

        # 6001 samples are left: 22 steps of 270, of which some 18 can be done, and a smaller one.
        three = start("three", num_ranks=3, gated=True, batch_size=90)
        three.let_go_on_until(2 * STEPS_BETWEEN_CHECKPOINTS + 1)
        three.kill_all()
        three.wait(exit_code=-signal.SIGKILL)
        for_alone = root / "for alone"
        for_alone.hardlink_to(checkpoint)

        # 3301 samples are left: 15 steps of 220, and one sample that one rank would have to itself.
        two_again = start("two again", num_ranks=2, gated=False, batch_size=110)
        alone = start(
            "alone", num_ranks=1, gated=False, batch_size=128, epochs=1, checkpoint=for_alone
        )
        two_again.wait()
        alone.wait()
        yield Runs(two, three, two_again, alone, first_checkpoint)


def test_killed_run_leaves_a_checkpoint(runs):
    """A killed run has its last checkpoint from the middle of an epoch."""
    for run, step in ((runs.two, 10), (runs.three, 20)):
        assert (run.checkpoint["epoch"], run.checkpoint["step"]) == (0, step)
        # Or nothing would have to be done again.
        assert max(line["step"] for line in run.lines) > step
        assert {line["epoch"] for line in run.lines} == {0}


def test_resume_with_two_three_two_ranks(runs):
    """Two ranks, then three, then two train on each sample once."""
    trained = Counter(runs.two.indices(0) + runs.three.indices(0) + runs.two_again.indices(0))
    assert set(trained.values()) == {1}
    # Of the odd number that is left for two ranks, one is dropped.
    assert len(trained) == SIZE - 1


def test_resume_with_two_three_one_ranks(runs):
    """Two ranks, then three, then one train on each sample once."""
    trained = Counter(runs.two.indices(0) + runs.three.indices(0) + runs.alone.indices(0))
    assert trained == Counter(range(SIZE))


def test_the_epoch_after_is_whole_again(runs):
    trained = Counter(runs.two_again.indices(1))
    assert set(trained.values()) == {1}
    assert len(trained) == SIZE - 1


def test_ranks_end_with_equal_parameters(runs):
    """All ranks end with the same parameters."""
    text = runs.two_again.output.read_text()
    checksums = dict(re.findall(r"rank (\d) ended with parameters of checksum (\w{8})", text))
    assert sorted(checksums) == ["0", "1"]
    assert len(set(checksums.values())) == 1


def test_model_and_optimizer_are_restored(runs):
    """The model and the optimizer resume from the checkpoint too."""
    first_loss = runs.two.lines[0]["loss"]
    for run in (runs.three, runs.two_again, runs.alone):
        first_line = min(run.lines, key=lambda line: line["step"])
        assert first_line["loss"] < first_loss / 2
        adam = run.checkpoint["optimizer"]["state"][0]
        assert adam["step"] == run.checkpoint["step"]


def test_checkpoint_is_replaced_atomically(runs):
    """A checkpoint is replaced by another file, not written over."""
    assert torch.load(runs.first_checkpoint)["step"] == runs.two.checkpoint["step"]


def test_own_thread_at_exit_is_detected():
    """A thread of ours that is left at exit is told from those of gloo."""
    program = (
        "import threading, time\n"
        "sleep = threading.Thread(target=time.sleep, args=[60], name='spdl_torch-x', daemon=True)\n"
        "sleep.start()\n"
        "print('terminate called without an active exception')\n"
    )
    ended = [
        subprocess.run(
            [*torchrun.command(1), "-c", program.replace("spdl_torch-x", name)],
            env=torchrun.ENVIRONMENT,
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_SECONDS,
        )
        for name in ("spdl_torch-x", "another")
    ]
    assert [torchrun.has_ended_well(1, each.stdout) for each in ended] == [False, True]


def test_no_process_is_left_behind(runs):
    assert [run.left_behind for run in runs.all()] == [set()] * 4
