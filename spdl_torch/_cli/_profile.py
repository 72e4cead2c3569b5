"""`spdl-torch profile`: find out what a loader waits for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import sys
import traceback
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from .. import DataLoader, ImageError, Profile
from .._engine import InAnotherProcess
from ._images import ImageJob
from ._parser import CommandError
from ._screen import Screen

_NOT_OF_THE_USER = {"spdl_torch", "torch", *sys.stdlib_module_names}
"""Packages whose frames are left out above the first frame of the user's code."""


def run(options: argparse.Namespace) -> int:
    """Profile a folder of images, or the loader that a function of the user returns."""
    screen = Screen(as_json=options.json)
    # Before the profile, which takes a while.
    _check_file("--html", options.html, ".html")
    _check_file("--trace", options.trace, ".json")
    if Path(options.target).is_dir():
        profile = _profile_of_folder(options)
    else:
        sys.path.insert(0, "")  # As with `python -m`, but not with installed commands.
        try:
            profile = _profile_of_factory(options)
        except CommandError:
            raise
        except Exception as error:
            _print_from_users_code(error)
            return 1
    screen.say(str(profile))
    saved = [str(path) for path in (options.html, options.trace) if path is not None]
    for path in saved:
        try:
            profile.save(path)
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}", exit_code=1) from None
        screen.say(f"saved {path}")
    screen.document(target=options.target, saved=saved, **profile.as_dict())
    return 0


def _check_file(option: str, path: Path | None, suffix: str) -> None:
    if path is not None and path.suffix != suffix:
        raise CommandError(f"{option} takes a file that ends in {suffix}, got {path.name}")
    if path is not None and not path.parent.is_dir():
        raise CommandError(f"{option}: there is no directory {path.parent}. Make it first.")


def _profile_of_folder(options: argparse.Namespace) -> Profile:
    job = ImageJob(Path(options.target), options.size, is_augmented=options.augment)
    with DataLoader(
        job.ours(), batch_size=options.batch_size, shuffle=True, num_workers=options.workers
    ) as loader:
        try:
            return loader.profile(num_batches=options.batches)
        except (ImageError, OSError) as error:
            hint = f"Find all of these: spdl-torch check {options.target}"
            raise CommandError(f"{error} {hint}", exit_code=1) from None


# -- the loader of the user ------------------------------------------------------------------------


def _profile_of_factory(options: argparse.Namespace) -> Profile:
    target = options.target
    of_folders = {"--batch-size", "--workers", "--size", "--augment"}
    if given := [option for option in options.given if option in of_folders]:
        raise CommandError(
            f"{', '.join(given)}: for a folder of images only. Pass these to the DataLoader in "
            f"{target}."
        )
    with _made(target, _imported(target)) as loader:
        profile = loader.profile(num_batches=options.batches)
    if profile.stats.loop.num_batches == 0:
        raise CommandError(
            f"the loader of {target} has no batches. Is its dataset empty, or smaller than "
            "a batch, with drop_last=True?"
        )
    return profile


def _imported(target: str) -> Any:
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py") and name:
        meant = ".".join(Path(module_name).with_suffix("").parts)
        raise CommandError(f"{target} names a file. Did you mean {meant}:{name}?")
    if not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise CommandError(
            f"{target} is neither a folder nor a function. Give a folder of images, or a function "
            "that returns a DataLoader, such as train:make_loader."
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise CommandError(f"cannot import {module_name}: {error}") from None
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise CommandError(f"{module_name} has no {name}. Name a function in it.") from None


def _made(target: str, factory: Any) -> DataLoader[Any]:
    if not callable(factory):
        kind = type(factory).__name__
        raise CommandError(
            f"{target} is of type {kind}. Name a function that returns a DataLoader."
        )
    with contextlib.suppress(ValueError):  # Not every function written in C has a signature.
        signature = inspect.signature(factory)
        try:
            signature.bind()
        except TypeError as error:
            raise CommandError(
                f"{target} is called without arguments: {error}. Name a function that needs none; "
                "it may call this one."
            ) from None
    loader = factory()
    if isinstance(loader, DataLoader):
        return loader
    if isinstance(loader, torch.utils.data.DataLoader):
        raise CommandError(
            f"{target} returns torch's DataLoader. Change its import to "
            "`from spdl_torch import DataLoader`; the arguments stay as they are."
        )
    raise CommandError(
        f"{target} returns an object of type {type(loader).__name__}. It must return spdl_torch's "
        "DataLoader."
    )


def _print_from_users_code(error: Exception) -> None:
    """Print an exception on stderr, without the frames above the user's first one."""
    if isinstance(error.__cause__, InAnotherProcess):  # It has the traceback as text.
        sys.stderr.write(str(error.__cause__).strip('\n"') + "\n")
        return
    where = error.__traceback__
    while where is not None:
        package = where.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _NOT_OF_THE_USER:
            break
        where = where.tb_next
    if where is None and not isinstance(error, SyntaxError):  # That one names its file itself.
        where = error.__traceback__  # No frame is in the user's code.
    traceback.print_exception(type(error), error, where, file=sys.stderr)
