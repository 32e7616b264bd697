"""The counting allocator, compiled at first use and put in front of torch's own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from cuda_ops.device.compiling import CannotCompileError, Sources, compiled, require_torch

__all__ = ["Counter", "available", "charge_address", "counting", "install"]

_OLDEST_TORCH = (2, 3)
"""The first that the sources were written for."""
_NUMBERS = ("in_use", "peak", "allocations", "refusals", "refused")
_PREFIX = "halopipe_memory_"
_INSTALLED: list[int] = []


class Counter:
    """What this process's tensors take; threads share it, a forked child goes on from what its parent had."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._read = {name: getattr(loaded, _PREFIX + name) for name in _NUMBERS}
        for function in self._read.values():
            function.restype, function.argtypes = ctypes.c_int64, ()
        self._reset_peak, self._limit = getattr(loaded, _PREFIX + "reset_peak"), getattr(loaded, _PREFIX + "limit")
        self._reset_peak.restype, self._reset_peak.argtypes = None, ()
        self._limit.restype, self._limit.argtypes = None, (ctypes.c_int64,)

    @property
    def current_bytes(self) -> int:
        """In use now, of what was allocated since the allocator was installed."""
        return int(self._read["in_use"]())

    @property
    def peak_bytes(self) -> int:
        """The most in use at once since the last reset."""
        return int(self._read["peak"]())

    @property
    def num_allocations(self) -> int:
        """Since the allocator was installed."""
        return int(self._read["allocations"]())

    @property
    def num_refused(self) -> int:
        """Allocations that would have gone beyond a limit, or found no memory."""
        return int(self._read["refusals"]())

    @property
    def refused_bytes(self) -> int:
        """Of the last allocation refused."""
        return int(self._read["refused"]())

    def reset_peak(self) -> None:
        """The peak starts again at what is in use."""
        self._reset_peak()

    def limit(self, num_bytes: int | None) -> None:
        """Beyond so many bytes in use, allocations raise ``torch.OutOfMemoryError`` (a RuntimeError); None: no limit.

        What is in use already stays, even where it is more.
        """
        self._limit(-1 if num_bytes is None else max(0, num_bytes))


def available() -> str:
    """Why the allocator cannot be had; nothing if it can.  Compiles it, if nobody has."""
    return _library()[1]


def install() -> Counter:
    """Counts, for the rest of this process, the tensors made from now on; may be called again.

    Call it while no other thread allocates.

    Raises:
        CannotCompileError: `available` says why.
    """
    path, why_not = _library()
    if path is None:
        raise CannotCompileError(why_not)
    return _installed(path)


def charge_address() -> int | None:
    """Of a C function of a number of bytes that counts memory held for tensors elsewhere; None: nobody counts."""
    return _INSTALLED[0] if _INSTALLED else None


@contextlib.contextmanager
def counting(limit_bytes: int | None = None) -> Iterator[Counter]:
    """A counter whose peak starts at what is in use; at the end there is no limit.

    Raises:
        CannotCompileError: `available` says why.
    """
    counter = install()
    counter.reset_peak()
    counter.limit(limit_bytes)
    try:
        yield counter
    finally:
        counter.limit(None)


@functools.cache
def _library() -> tuple[Path | None, str]:
    """The compiled library, or why there is none."""
    try:
        require_torch(_OLDEST_TORCH)
        return compiled(dict(os.environ), _sources()), ""
    except (CannotCompileError, OSError) as error:
        return None, str(error)


@functools.cache
def _installed(path: Path) -> Counter:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotCompileError(f"{path} cannot be loaded: {error}") from error
    getattr(loaded, _PREFIX + "install")()
    _INSTALLED[:] = [ctypes.cast(getattr(loaded, _PREFIX + "charge"), ctypes.c_void_p).value or 0]
    return Counter(loaded)


def _sources() -> Sources:
    """Made against the headers of this torch's core library, and for it alone."""
    import torch

    home = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    return Sources(
        "memory",
        Path(__file__).parent / "source",
        flags=(f"-I{home / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        linked=(f"-L{home / 'lib'}", "-lc10"),
        beside=(torch.__version__,),
    )
