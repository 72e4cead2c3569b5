"""Frameworks as they are, with our loader in them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import torchrun

PLACES = [(None, "spdl_torch-0"), (0, "spdl_torch-preprocess-1")]
"""`num_processes`, and the name of a worker that is then seen in this process: a child, a thread.
"""

TIMEOUT_SECONDS = 200
"""Of a program on two processes: torch and a framework take long to import, on busy cores."""


def quick(test: Callable[..., None]) -> Callable[..., None]:
    """Keep a test in the default tier: one or two for each framework."""
    test.is_quick = True  # type: ignore[attr-defined]
    return test


def run_on_two_processes(program: str, directory: Path) -> list[dict[str, Any]]:
    """Return what each process of a test file, started with torchrun, has written to `directory`.

    The processes write `rank-0.json` and `rank-1.json`.
    """
    command = [*torchrun.command(2), program, str(directory)]
    environment = torchrun.ENVIRONMENT | {"PYTHONWARNINGS": "ignore"}
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
    text = output.read_text()
    assert torchrun.has_ended_well(exit_code, text), text
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]


def _end(directory: Path) -> None:
    """End what was started for this directory and is still there."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended meanwhile, or is not ours to read.
            if os.fsencode(directory) in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def write_result(directory: Path, rank: int, result: dict[str, Any]) -> None:
    (directory / f"rank-{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()  # A process that fails at its end must not end the others.
