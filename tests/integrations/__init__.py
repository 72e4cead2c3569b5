"""Frameworks as they are, with our loader in them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 200
"""Of a program on two processes: torch and a framework take long to import, on busy cores."""


def run_on_two_processes(program: str, directory: Path) -> list[dict[str, Any]]:
    """What each process of a test file, started with torchrun, has written to `directory`.

    The processes write `rank-0.json` and `rank-1.json`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--local-addr=127.0.0.1", program, str(directory)]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),  # Where the tests are found.
        "PYTHONWARNINGS": "ignore",
    }
    output = directory / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        exit_code = process.wait(TIMEOUT_SECONDS)
    finally:
        _end(directory)
        process.wait()
    assert exit_code == 0, output.read_text()
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]


def _end(directory: Path) -> None:
    """End what was started for this directory and is still there."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended meanwhile, or is not ours to read.
            if os.fsencode(directory) in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def write_result(directory: Path, rank: int, result: dict[str, Any]) -> None:
    (directory / f"rank-{rank}.json").write_text(json.dumps(result))
