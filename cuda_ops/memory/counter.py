"""The counting allocator, compiled at first use and put in front of torch's own; and meters of any device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from cuda_ops.device.compiling import CannotCompileError, LibrarySources, compiled

__all__ = [
    "CpuMeter",
    "CudaMeter",
    "MemoryCounter",
    "MemoryMeter",
    "available",
    "charge_address",
    "counting",
    "install",
    "meter_of",
]

_NUMBERS = ("in_use", "peak", "allocations", "refusals", "refused")
_PREFIX = "halopipe_memory_"
_INSTALLED: list[int] = []


class MemoryCounter:
    """What this process's tensors take; threads share it, a forked child goes on from what its parent had."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._read = {name: getattr(loaded, _PREFIX + name) for name in _NUMBERS}
        for function in self._read.values():
            function.restype = ctypes.c_int64
            function.argtypes = ()
        self._reset_peak = getattr(loaded, _PREFIX + "reset_peak")
        self._limit = getattr(loaded, _PREFIX + "limit")
        self._reset_peak.restype = None
        self._reset_peak.argtypes = ()
        self._limit.restype = None
        self._limit.argtypes = (ctypes.c_int64,)

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
        """Beyond ``num_bytes`` in use, allocations raise ``torch.OutOfMemoryError`` (a RuntimeError); None: no limit.

        What is in use already stays, even where it is more.
        """
        self._limit(-1 if num_bytes is None else max(0, num_bytes))


def available() -> str:
    """Why the allocator cannot be had; nothing if it can.  Compiles it, if nobody has."""
    return _library()[1]


def install() -> MemoryCounter:
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
def counting(limit_bytes: int | None = None) -> Iterator[MemoryCounter]:
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


class MemoryMeter(Protocol):
    """Counts the bytes of this process's tensors on one device."""

    @property
    def current_bytes(self) -> int:
        """In use now."""

    def take_peak(self) -> int:
        """The most in use at once since this was last called."""

    def limit(self, num_bytes: int | None) -> None:
        """Beyond ``num_bytes`` allocations raise ``torch.OutOfMemoryError``; None: no limit."""


class CpuMeter:
    """Of the counting allocator."""

    def __init__(self, counter: MemoryCounter) -> None:
        self._counter = counter

    @property
    def current_bytes(self) -> int:
        """See :class:`MemoryMeter`."""
        return self._counter.current_bytes

    def take_peak(self) -> int:
        """See :class:`MemoryMeter`."""
        peak = self._counter.peak_bytes
        self._counter.reset_peak()
        return peak

    def limit(self, num_bytes: int | None) -> None:
        """See :class:`MemoryMeter`."""
        self._counter.limit(num_bytes)


class CudaMeter:
    """Of torch's caching allocator: what tensors take, not what it keeps for the next ones.

    The limit is on what the allocator takes from the device, in parts of the device's memory; torch rounds blocks up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def current_bytes(self) -> int:
        """See :class:`MemoryMeter`."""
        return int(torch.cuda.memory_allocated(self._device))

    def take_peak(self) -> int:
        """See :class:`MemoryMeter`."""
        peak = int(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def limit(self, num_bytes: int | None) -> None:
        """See :class:`MemoryMeter`."""
        whole = torch.cuda.get_device_properties(self._device).total_memory
        share = 1.0 if num_bytes is None else min(1.0, num_bytes / whole)
        torch.cuda.set_per_process_memory_fraction(share, self._device)


def meter_of(device: torch.device) -> MemoryMeter | None:
    """Counts what is allocated on ``device`` from now on; None where that cannot be had.

    On the CPU this installs the counting allocator for the rest of the process: call it before large tensors are made.
    """
    if device.type == "cuda":
        return CudaMeter(device)
    return CpuMeter(install()) if device.type == "cpu" and not available() else None


@functools.cache
def _library() -> tuple[Path | None, str]:
    """The compiled library, or why there is none."""
    try:
        return compiled(dict(os.environ), _sources()), ""
    except (CannotCompileError, OSError) as error:
        return None, str(error)


@functools.cache
def _installed(path: Path) -> MemoryCounter:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotCompileError(f"{path} cannot be loaded: {error}") from error
    getattr(loaded, _PREFIX + "install")()
    _INSTALLED[:] = [ctypes.cast(getattr(loaded, _PREFIX + "charge"), ctypes.c_void_p).value or 0]
    return MemoryCounter(loaded)


def _sources() -> LibrarySources:
    """Made against the headers of this torch's core library, and for it alone."""
    home = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    return LibrarySources(
        "memory",
        Path(__file__).parent / "source",
        flags=(f"-I{home / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        linked=(f"-L{home / 'lib'}", "-lc10"),
        depends_on=(torch.__version__,),
    )
