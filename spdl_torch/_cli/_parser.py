"""The commands of the command line and their arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from .._machine import num_cores
from .._version import __version__


class CommandError(Exception):
    """An error that is printed as one line instead of a traceback."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """2 for wrong usage; 1 if the command could not do its work."""


class _Parser(argparse.ArgumentParser):
    """argparse's parser, with errors of one line."""

    def __init__(self, **arguments: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=form, allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}. See {self.prog} --help.")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line; `given` has the names of those that are on it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    first = arguments[0] if arguments else ""
    # argparse would take the value behind it for the command, or miss the command.
    if first.startswith("-") and first not in {"-h", "--help", "--version"}:
        parser.error(f"unknown option {first}; options of a command follow its name")
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return parser.parse_args(arguments, argparse.Namespace(given=given))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="spdl-torch",
        description="See what spdl_torch does, on your images and on your machine.",
        epilog="example:\n  spdl-torch demo",
    )
    parser.add_argument("--version", action="version", version=f"spdl-torch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="train a small model on generated images, with our loader and with torch's",
        description="Make a folder of images, and train a small model on it for two epochs: with "
        "our loader and with torch's, in turn. It takes less than a minute.",
        epilog="example:\n  spdl-torch demo",
    )
    # More workers would have next to nothing to do.
    _add_workers(demo, "our threads in a child process, torch's processes", min(num_cores(), 8))
    # For tests; the default is what the time limit allows.
    demo.add_argument("--images", type=_count, default=1000, help=argparse.SUPPRESS)

    bench = commands.add_parser(
        "bench",
        help="measure our loader and torch's on your images",
        description="Load the images of a folder with torch and PIL, with torch and "
        "torchvision.io, and with spdl_torch, in interleaved rounds. DIR has one subfolder for "
        "each class, as ImageNet has, or the images themselves.",
        epilog="examples:\n"
        "  spdl-torch bench photos/train --workers 8 --augment\n"
        "  spdl-torch bench photos/train --workers 8 --augment --recipe",
    )
    bench.add_argument("folder", metavar="DIR", type=Path, help="a folder of images")
    _add_image_options(bench, workers="our threads in a child process, torch's processes")
    words = "the transforms of a training script, to normalised floats, without and with fuse=True"
    bench.add_argument("--recipe", action="store_true", help=words)
    _add_number(bench, "--rounds", 3, "of which the median counts [3]")

    profile = commands.add_parser(
        "profile",
        help="find out what your loader waits for",
        description="Profile the loading of a folder of images, or of the loader that a function "
        "of yours returns; the current directory is importable.",
        epilog="examples:\n"
        "  spdl-torch profile photos/train --html report.html\n"
        "  spdl-torch profile train:make_loader --batches 50 --trace trace.json",
    )
    profile.add_argument("target", metavar="DIR|module:factory", help="what to profile")
    _add_number(profile, "--batches", 50, "how many to load [50]")
    add_file = partial(profile.add_argument, type=Path, metavar="FILE")
    add_file("--html", help="save a report, for a browser")
    add_file("--trace", help="save a timeline, for Perfetto (.json)")
    images = profile.add_argument_group("for a folder of images")
    _add_image_options(images, workers="threads that load")

    check = commands.add_parser(
        "check",
        help="find the images that cannot be decoded",
        description="Decode an image, or every image in a folder and its subfolders, and list "
        "those that are damaged. The exit code is 1 if there are any.",
        epilog="example:\n  spdl-torch check photos --workers 8 > damaged.txt",
    )
    words = "a folder of images, or one image"
    check.add_argument("path", metavar="DIR|FILE", type=Path, help=words)
    _add_workers(check, "threads that decode", num_cores())

    cache = commands.add_parser(
        "cache",
        usage="spdl-torch cache DIR [--verify | --clear [SPACE]] [--json]",
        help="list, verify or clear the directory of a cache",
        description="List the spaces of the directory of a Cache(directory=...): what made them, "
        "what they keep, how large they are and when they were last written to.",
        epilog="examples:\n"
        "  spdl-torch cache /scratch/cache\n"
        "  spdl-torch cache /scratch/cache --verify\n"
        "  spdl-torch cache /scratch/cache --clear d379a3ec",
    )
    cache.add_argument("directory", metavar="DIR", type=Path, help="the directory of a cache")
    task = cache.add_mutually_exclusive_group()
    words = "read all entries; the exit code is 1 if any is damaged"
    task.add_argument("--verify", action="store_true", help=words)
    words = "remove all spaces, or the one with this name or beginning of a name"
    task.add_argument("--clear", nargs="?", const="", metavar="SPACE", help=words)

    for command in commands.choices.values():
        words = "print one JSON document and nothing else"
        command.add_argument("--json", action="store_true", help=words)
    return parser


def _add_image_options(group: Any, workers: str) -> None:
    _add_number(group, "--batch-size", 64, "images in a batch [64]")
    _add_workers(group, workers, num_cores())
    _add_number(group, "--size", 224, "pixels of each side [224]")
    words = "random crops, flipped at random; default: the center crop"
    group.add_argument("--augment", action="store_true", help=words)


def _add_workers(group: Any, what: str, default: int) -> None:
    _add_number(group, "--workers", default, f"{what} [{default}, by the number of cores]")


def _add_number(group: Any, name: str, default: int, words: str) -> None:
    group.add_argument(name, type=_count, default=default, metavar="N", help=words)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)
