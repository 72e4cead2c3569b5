"""Programs on several processes, started with torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent

ENVIRONMENT = os.environ | {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    # For what they say at the exit, and where the tests are found.
    "PYTHONPATH": os.pathsep.join([str(TESTS / "at_exit"), str(TESTS.parent)]),
}


def command(num_processes: int) -> list[str]:
    """What to put before the name of the program."""
    if num_processes == 1:
        return [sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [sys.executable, *torchrun, f"--nproc-per-node={num_processes}"]


def has_ended_well(exit_code: int, output: str) -> bool:
    """Whether it has done all that it was to do.

    A thread of gloo's may let go of the last all-reduce when the interpreter is gone, and abort the
    process, whatever loader there was. A thread of ours could do the same, but is named then.
    """
    has_aborted = "terminate called without an active exception" in output
    is_gloos = has_aborted and "threads at the exit" not in output
    return exit_code == 0 or (exit_code == 1 and is_gloos)
