"""What the commands are called, and the arguments they take."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .._version import __version__

__all__ = ["CommandError", "parsed"]

_NUM_CORES = len(os.sched_getaffinity(0))

_IMAGE_DEFAULTS = {"batch_size": 64, "workers": _NUM_CORES, "size": 224, "augment": False}
"""Of the options for a folder of images. Not argparse's, for it does not tell what was given."""


class CommandError(Exception):
    """What is said in one line instead of a traceback."""

    def __init__(self, message: str, *, exit_code: int = 2, prefix: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """2 if the command was used wrongly; 1 if it could not be done."""
        self.prefix = prefix
        """Who says so, if that is not the command."""


class _Parser(argparse.ArgumentParser):
    """argparse's, with errors of one line."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **arguments
        )

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}. See {self.prog} --help.", prefix=self.prog)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line; `given` has those for images that are in it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    everything = _parser()
    first = arguments[0] if arguments else ""
    # argparse would take what stands behind it for the command, or miss the command.
    if first.startswith("-") and first not in {"-h", "--help", "--version"}:
        everything.error(f"unknown option {first}; those of a command stand behind its name")
    options = everything.parse_args(arguments)
    values = vars(options)
    defaults = {name: value for name, value in _IMAGE_DEFAULTS.items() if name in values}
    options.given = [_option(name) for name in defaults if values[name] is not None]
    values.update({name: value for name, value in defaults.items() if values[name] is None})
    return options


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    everything = _Parser(
        prog="spdl-torch",
        description="See what spdl_torch does, on your images and on your machine.",
        epilog="example:\n  spdl-torch demo",
    )
    everything.add_argument("--version", action="version", version=f"spdl-torch {__version__}")
    commands = everything.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_demo, _add_bench, _add_profile, _add_check):
        command = add(commands)
        command.add_argument(
            "--json", action="store_true", help="print one JSON document and nothing else"
        )
    return everything


def _add_demo(commands: Any) -> argparse.ArgumentParser:
    demo: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train a small model on made-up photographs, with our loader and with torch's",
        description="Make a folder of images, and train a small model on it for two epochs: with "
        "our loader and with torch's, in turn. It takes less than a minute.",
        epilog="example:\n  spdl-torch demo",
    )
    # More would have next to nothing to do.
    _add_workers(demo, "threads of ours, processes of torch's", default=min(_NUM_CORES, 8))
    # For tests; the default is what the time limit allows.
    demo.add_argument("--images", type=_count, default=1000, help=argparse.SUPPRESS)
    return demo


def _add_bench(commands: Any) -> argparse.ArgumentParser:
    bench: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure our loader and torch's on your images",
        description="Load the images of a folder with torch and PIL, with torch and "
        "torchvision.io, and with spdl_torch, in interleaved rounds. DIR has one subfolder for "
        "each class, as ImageNet has, or the images themselves.",
        epilog="example:\n  spdl-torch bench photos/train --workers 8 --augment",
    )
    bench.add_argument("folder", metavar="DIR", type=Path, help="a folder of images")
    _add_image_options(bench, workers="threads of ours, processes of torch's")
    bench.add_argument(
        "--rounds", type=_count, default=3, metavar="N", help="of which the median counts [3]"
    )
    return bench


def _add_profile(commands: Any) -> argparse.ArgumentParser:
    profile: argparse.ArgumentParser = commands.add_parser(
        "profile",
        help="find out what your loader waits for",
        description="Profile the loading of a folder of images, or of the loader that a function "
        "of yours returns; the current directory is importable.",
        epilog="examples:\n"
        "  spdl-torch profile photos/train --html report.html\n"
        "  spdl-torch profile train:make_loader --batches 50 --trace trace.json",
    )
    profile.add_argument("target", metavar="DIR|module:factory", help="what to profile")
    profile.add_argument(
        "--batches", type=_count, default=50, metavar="N", help="how many to load [50]"
    )
    profile.add_argument("--html", type=Path, metavar="FILE", help="save a report, for a browser")
    profile.add_argument(
        "--trace", type=Path, metavar="FILE", help="save a timeline, for Perfetto (.json)"
    )
    images = profile.add_argument_group("for a folder of images")
    _add_image_options(images, workers="threads that load")
    return profile


def _add_check(commands: Any) -> argparse.ArgumentParser:
    check: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="find the images that cannot be decoded",
        description="Decode an image, or every image in a folder and its subfolders, and list "
        "those that are damaged. The exit code is 1 if there are any.",
        epilog="example:\n  spdl-torch check photos --workers 8 > damaged.txt",
    )
    check.add_argument(
        "path", metavar="DIR|FILE", type=Path, help="a folder of images, or one image"
    )
    _add_workers(check, "threads that decode", default=_NUM_CORES)
    return check


def _add_image_options(group: Any, workers: str) -> None:
    group.add_argument("--batch-size", type=_count, metavar="N", help="images in a batch [64]")
    _add_workers(group, workers, default=None)
    group.add_argument("--size", type=_count, metavar="N", help="pixels of each side [224]")
    group.add_argument(
        "--augment",
        action="store_true",
        default=None,
        help="random parts, mirrored at random; else the middle square",
    )


def _add_workers(group: Any, what: str, default: int | None) -> None:
    shown = _IMAGE_DEFAULTS["workers"] if default is None else default
    group.add_argument(
        "--workers",
        type=_count,
        default=default,
        metavar="N",
        help=f"{what} [{shown}, by the number of cores]",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)
