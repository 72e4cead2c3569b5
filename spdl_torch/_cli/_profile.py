"""`spdl-torch profile`: what a loader waits for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.utils.data

from .. import DataLoader, ImageError, Profile
from ._parser import CommandError
from ._screen import Screen
from ._traceback import print_from_users_code

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Profile a folder of images, or somebody's loader."""
    screen = Screen(as_json=options.json)
    _check_file("--html", options.html, ".html")
    _check_file("--trace", options.trace, ".json")
    if Path(options.target).is_dir():
        profile = _profile_of_folder(options)
    else:
        try:
            with _current_directory_is_importable():
                profile = _profile_of_factory(options)
        except CommandError:
            raise
        except Exception as error:
            print_from_users_code(error)
            return 1
    screen.say(str(profile))
    saved = [str(path) for path in (options.html, options.trace) if path is not None]
    for path in saved:
        _save(profile, path)
        screen.say(f"saved {path}")
    screen.document({"target": options.target, "saved": saved, **profile.as_dict()})
    return 0


def _check_file(option: str, path: Path | None, suffix: str) -> None:
    """At the door: nobody wants to profile first and hear of it then."""
    if path is None:
        return
    if path.suffix != suffix:
        raise CommandError(f"{option} takes a file that ends in {suffix}, got {path.name}")
    if not path.parent.is_dir():
        raise CommandError(f"{option}: there is no directory {path.parent}. Make it first.")


def _save(profile: Any, path: str) -> None:
    try:
        profile.save(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", exit_code=1) from None


# -- the profile ---------------------------------------------------------------------------------


def _profile_of_folder(options: argparse.Namespace) -> Profile:
    from ._job import ImageJob  # noqa: PLC0415 (torchvision, for those who have images)

    job = ImageJob(Path(options.target), options.size, is_augmented=options.augment)
    with DataLoader(
        job.ours(), batch_size=options.batch_size, shuffle=True, num_workers=options.workers
    ) as loader:
        try:
            return loader.profile(num_batches=options.batches)
        except (ImageError, OSError) as error:
            hint = f"Find all of these: spdl-torch check {options.target}"
            raise CommandError(f"{error} {hint}", exit_code=1) from None


def _profile_of_factory(options: argparse.Namespace) -> Profile:
    module_name, name = _split(options.target)
    if options.given:
        raise CommandError(
            f"{', '.join(options.given)}: for a folder of images only. Give your DataLoader these "
            f"in {options.target}."
        )
    with _made(options.target, _imported(module_name, name)) as loader:
        profile = loader.profile(num_batches=options.batches)
    if profile.stats.loop.num_batches == 0:
        raise CommandError(
            f"the loader of {options.target} has no batches. Is its dataset empty, or smaller than "
            "a batch, with drop_last=True?"
        )
    return profile


# -- somebody's loader -----------------------------------------------------------------------------


def _made(target: str, factory: Any) -> DataLoader[Any]:
    if not callable(factory):
        raise CommandError(
            f"{target} is of type {type(factory).__name__}. Name a function that returns a "
            "DataLoader."
        )
    _check_needs_nothing(target, factory)
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


def _check_needs_nothing(target: str, factory: Any) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # Not everything that is written in C has one.
        return
    try:
        signature.bind()
    except TypeError as error:
        raise CommandError(
            f"{target} is called without arguments: {error}. Name a function that needs none; it "
            "may call this one."
        ) from None


def _split(target: str) -> tuple[str, str]:
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py") and name:
        module = ".".join(Path(module_name).with_suffix("").parts)
        raise CommandError(f"{target} names a file. Did you mean {module}:{name}?")
    if not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise CommandError(
            f"{target} is neither a folder nor a function. Give a folder of images, or a function "
            "that returns a DataLoader, such as train:make_loader."
        )
    return module_name, name


def _imported(module_name: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise CommandError(f"cannot import {module_name}: {error}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{module_name} has no {name}. Name a function in it.")
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def _current_directory_is_importable() -> Iterator[None]:
    # As it is for `python -m`, but not for installed commands.
    directory = os.getcwd()  # noqa: PTH109 (a string is what sys.path has)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
