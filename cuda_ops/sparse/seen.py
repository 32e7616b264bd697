"""Indices on accelerators that were looked at, so that an operator need not wait for the device to look again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cuda_ops._torch import storage_id, times_written

_MOST = 4096


class _Reference(Protocol):
    """Memory held weakly; torch's own class has no types."""

    def expired(self) -> bool:
        """Whether it is gone."""


_reference: Callable[[torch.UntypedStorage], _Reference] = StorageWeakRef


class Seen:
    """What was found right of tensors that nobody has written to since.

    A tensor is known by its memory, which is held weakly: an address that is used again is another one.  torch counts
    writes by its own operators; on the processor, where others write too (numpy, other processes), nothing is kept.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], _Reference] = {}

    def has(self, tensor: Tensor, what: Hashable) -> bool:
        """Whether ``what`` was noted of these very numbers."""
        if not _is_counted(tensor):
            return False
        found = self._known.get(_key(tensor, what))
        return found is not None and not found.expired()

    def note(self, tensor: Tensor, what: Hashable) -> None:
        """``what`` is right of the tensor as it is now."""
        if not _is_counted(tensor) or torch.compiler.is_compiling():
            return
        if len(self._known) >= _MOST:
            self._known = {key: each for key, each in self._known.items() if not each.expired()}
            if len(self._known) >= _MOST:
                self._known.clear()
        self._known[_key(tensor, what)] = _reference(tensor.untyped_storage())


def _is_counted(tensor: Tensor) -> bool:
    """Whether torch counts all that is written to it; in inference mode it counts nothing."""
    return tensor.device.type != "cpu" and not tensor.is_inference()


def _key(tensor: Tensor, what: Hashable) -> tuple[Hashable, ...]:
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return storage_id(tensor), times_written(tensor), *place, tensor.dtype, what
