"""`install()`: puts our `DataLoader` in the place of torch's, for a whole program."""

import sys
from typing import Any

import torch.utils.data

from ._dataloader import DataLoader

_TORCHS: type[Any] = DataLoader.__mro__[1]  # Which ours inherits from.


def install() -> None:
    """Let everything that is imported from now on use this `DataLoader` as torch's.

    Call it first. If a module already holds torch's class or a subclass, a `RuntimeError` names it,
    and nothing changes: such a library would silently not recognise some of the loaders.

    >>> import spdl_torch, torch
    >>> spdl_torch.install()  # doctest: +SKIP
    >>> torch.utils.data.DataLoader  # doctest: +SKIP
    <class 'spdl_torch.DataLoader'>
    """
    if torch.utils.data.DataLoader is DataLoader:
        return
    # Not getattr for each name: a lazy module would import what it is asked for.
    modules = [getattr(module, "__dict__", {}).copy() for module in sys.modules.copy().values()]
    holds = (any(value is _TORCHS for value in module.values()) for module in modules)
    names = {str(m.get("__name__")) for m, does in zip(modules, holds, strict=True) if does}
    names |= {subclass.__module__ for subclass in _TORCHS.__subclasses__()}
    if late := sorted(n for n in names if n.split(".")[0] not in {"torch", "spdl_torch"}):
        raise RuntimeError(
            f"install() comes too late: torch's DataLoader is used by {', '.join(late)}. "
            "Call spdl_torch.install() before these are imported."
        )
    torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = DataLoader  # type: ignore[misc]


install.__module__ = "spdl_torch"
