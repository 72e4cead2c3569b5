"""Find the device that an argument names."""

from __future__ import annotations

from typing import Any

import torch


def device_of(device: Any) -> torch.device:
    """Return the device that an argument names, with its index; raise if it does not exist.

    Without an index it is the current device of the calling thread.
    """
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ValueError(f"torch knows no device {device!r}. {_available()}") from None
    except TypeError:
        raise TypeError(
            f"device must be a torch.device or a string, got {device!r}. {_available()}"
        ) from None
    if named.type in ("cpu", "meta"):
        return torch.device(named.type)
    module = getattr(torch, named.type, None)
    if module is not None and module.is_available():
        index = named.index
        if index is None:
            index = module.current_device() if hasattr(module, "current_device") else 0
        if index < module.device_count():
            return torch.device(named.type, index)
    raise ValueError(f"there is no device {device!r}. {_available()}")


def _available() -> str:
    names = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        count = torch.accelerator.device_count()
        names += [f"{accelerator.type}:{index}" for index in range(count)]
    return f"Available: {', '.join(names)}. Leave out device to keep batches where they are made."
