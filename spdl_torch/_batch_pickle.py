"""Pickle a batch with the memory of its large arrays and tensors left out."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

_PLAIN_METHODS: Final = ("__reduce_ex__", "__setstate__", "__torch_dispatch__")
"""The methods of a class of tensors that show, if they are torch's, what its tensors consist of."""


def pickle_batch(
    batch: Any, *, min_large: int, empty: Callable[..., torch.Tensor] = torch.empty
) -> tuple[bytes, list[Bytes]]:
    """Return the pickle of a batch, and the memory that `pickle.loads` needs as `buffers`.

    Memory of less than `min_large` bytes is in the pickle. The other arrays of bytes view the
    batch; tensors with gaps between their elements are copied to memory from `empty` first.
    """
    large: list[Bytes] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        memory = np.asarray(buffer.raw())
        if memory.size >= min_large:
            large.append(memory)
        return memory.size < min_large

    file = io.BytesIO()
    _Pickler(file, keep_in_pickle, empty).dump(batch)
    return file.getvalue(), large


class _Pickler(ForkingPickler):
    """Pickles strided tensors as arrays of bytes, and all else as for torch's worker processes."""

    def __init__(
        self,
        file: io.BytesIO,
        keep_in_pickle: Callable[[pickle.PickleBuffer], bool],
        empty: Callable[..., torch.Tensor],
    ) -> None:
        super().__init__(file, 5, True, keep_in_pickle)
        self._empty = empty

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if obj.requires_grad and not obj.is_leaf:
            raise RuntimeError(
                f"The batch has a tensor of shape {tuple(obj.shape)} that was computed from "
                "tensors that require grad. Gradients do not pass from a worker process to the "
                "training loop. Call detach() on the tensor in the dataset or in collate_fn."
            )
        kind = type(obj)
        if not obj.is_cpu or obj.is_quantized or obj.is_mkldnn or not _is_plain(kind):
            return NotImplemented
        if obj.layout is not torch.strided or obj.is_nested:
            return _reduce_to_parts(obj) if kind is torch.Tensor else NotImplemented
        shape, stride = tuple(obj.shape), obj.stride()
        memory: torch.Tensor = obj
        if obj.is_conj() or obj.is_neg() or not (obj.is_contiguous() or _is_dense(shape, stride)):
            memory = self._empty(shape, dtype=obj.dtype)
            memory.copy_(obj.detach())
            stride = memory.stride()
        buffer = pickle.PickleBuffer(_memory_of(memory).data)
        arguments = (buffer, obj.dtype, shape, stride, kind, obj.requires_grad)
        state: Any = obj.__getstate__()
        if state is None:
            return tensor_of, arguments
        return tensor_of, arguments, state, None, None, _set_state


def _reduce_to_parts(tensor: torch.Tensor) -> Any:
    """Reduce a sparse or nested tensor to strided ones.

    By default torch would share each of them with `multiprocessing`, which fails if this process
    ends before the parent has unpickled the tensor.
    """
    function, arguments = tensor.__reduce_ex__(5)
    if tensor.is_nested:
        return function, arguments
    # torch's function adds each sparse tensor to a list that is only cleared by torch.load.
    return _sparse_of, arguments


def _sparse_of(layout: torch.layout, parts: Any) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values, shape, is_coalesced = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=is_coalesced, check_invariants=False
        )
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _is_plain(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class are memory and attributes."""
    base = torch.nn.Parameter if issubclass(kind, torch.nn.Parameter) else torch.Tensor
    return all(getattr(kind, name) == getattr(base, name) for name in _PLAIN_METHODS)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor is contiguous after a permutation of its dimensions."""
    size = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length != 1 and step != size:
            return False
        size *= length
    return True


def _memory_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a dense tensor as bytes."""
    # From the storage, for all dtypes and for subclasses that override what their views are.
    storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.itemsize
    memory: Bytes = storage.numpy()[start : start + tensor.nbytes]
    return memory


def tensor_of(
    memory: Bytes | bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...] = (),
    kind: type[torch.Tensor] = torch.Tensor,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Return a tensor over memory, with a storage of its own. It is no view of another tensor."""
    storage = torch.from_numpy(np.frombuffer(memory, np.uint8)).untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride)
    if kind is not torch.Tensor:
        tensor = tensor.as_subclass(kind)
    return tensor.requires_grad_() if requires_grad else tensor


def _set_state(tensor: torch.Tensor, state: Any) -> None:
    if isinstance(state, tuple):  # Of a class that has `__slots__`.
        state, slots = state
        for name, value in slots.items():
            setattr(tensor, name, value)
    tensor.__dict__.update(state or {})
