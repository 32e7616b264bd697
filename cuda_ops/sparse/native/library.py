"""Calls into the compiled library: plain C functions of pointers and numbers.

The library knows nothing of torch but its loop over threads, a function of torch's stable C interface, which it is
handed when it is loaded; so its sources include no header of torch, and compile in a tenth of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Library"]


class Library:
    """The functions of the library at ``path``; calls release the interpreter's lock.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._functions: dict[str, Callable[..., int]] = {}
        self._loaded = ctypes.CDLL(str(path))
        self.call("use_threads", _parallel_for())

    def call(self, name: str, *arguments: Tensor | int) -> int:
        """What the function answers; of a tensor it gets the address of the first element.

        Raises:
            ValueError: a tensor that is not contiguous.
            MemoryError: not enough for what the function computes with.
        """
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._prototype(name, len(arguments))
        answer = function(*[each if isinstance(each, int) else _address(each) for each in arguments])
        if answer < 0:
            raise MemoryError(f"{name}: not enough memory for the sparse operators in C++")
        return answer

    def _prototype(self, name: str, count: int) -> Callable[..., int]:
        """Every parameter of every function is a pointer or an int64."""
        function = getattr(self._loaded, name)
        function.argtypes, function.restype = (ctypes.c_int64,) * count, ctypes.c_int64
        return function  # type: ignore[no-any-return]


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("tensors for the sparse operators in C++ are contiguous")
    return tensor.data_ptr()


def _parallel_for() -> int:
    """The address of torch's loop over threads, found among what torch's own module is linked with."""
    found = ctypes.CDLL(torch._C.__file__).torch_parallel_for
    return ctypes.cast(found, ctypes.c_void_p).value or 0
