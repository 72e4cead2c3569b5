"""`spdl-torch profile`: what a loader waits for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.utils.data

from .. import DataLoader, ImageError
from ._parser import CommandError
from ._screen import Screen

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Profile a folder of images, or somebody's loader."""
    screen = Screen(as_json=options.json)
    _check_file("--html", options.html, ".html")
    _check_file("--trace", options.trace, ".json")
    with _current_directory_is_importable(), _loader(options) as loader:
        try:
            profile = loader.profile(num_batches=options.batches)
        except (ImageError, OSError) as error:
            if not Path(options.target).is_dir():
                raise  # It is of somebody's code, and so is the traceback.
            hint = f"Find all of these: spdl-torch check {options.target}"
            raise CommandError(f"{error} {hint}", exit_code=1) from None
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


# -- the loader ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _loader(options: argparse.Namespace) -> Iterator[DataLoader[Any]]:
    if Path(options.target).is_dir():
        loader = _loader_of_folder(options)
    else:
        loader = _loader_of_factory(options.target)
    with loader:
        yield loader


def _loader_of_folder(options: argparse.Namespace) -> DataLoader[Any]:
    from ._job import ImageJob  # noqa: PLC0415 (torchvision, for those who have images)

    job = ImageJob(Path(options.target), options.size, is_augmented=options.augment)
    return DataLoader(
        job.ours(), batch_size=options.batch_size, shuffle=True, num_workers=options.workers
    )


def _loader_of_factory(target: str) -> DataLoader[Any]:
    factory = _imported(target)
    if not callable(factory):
        raise CommandError(
            f"{target} is a {type(factory).__name__}. Name a function that returns a DataLoader."
        )
    loader = factory()
    if isinstance(loader, DataLoader):
        return loader
    if isinstance(loader, torch.utils.data.DataLoader):
        raise CommandError(
            f"{target} returns torch's DataLoader. Change its import to "
            "`from spdl_torch import DataLoader`; the arguments stay as they are."
        )
    raise CommandError(
        f"{target} returns a {type(loader).__name__}. It must return a spdl_torch.DataLoader."
    )


def _imported(target: str) -> Any:
    module_name, _, name = target.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise CommandError(
            f"{target} is neither a folder nor a function. Give a folder of images, or a function "
            "that returns a DataLoader, such as train:make_loader."
        )
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
