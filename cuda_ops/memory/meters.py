"""The memory of tensors by device: what is in use, and the most that was."""

from __future__ import annotations

from typing import Protocol

import torch

from cuda_ops.memory.counter import Counter, available, install

__all__ = ["CpuMeter", "CudaMeter", "MemoryMeter", "meter_of"]


class MemoryMeter(Protocol):
    """Counts the bytes of this process's tensors on one device."""

    @property
    def current_bytes(self) -> int:
        """In use now."""
        ...

    def take_peak(self) -> int:
        """The most in use at once since this was last called."""
        ...

    def limit(self, num_bytes: int | None) -> None:
        """Beyond so many bytes allocations raise ``torch.OutOfMemoryError``; None: no limit."""
        ...


class CpuMeter:
    """Of the counting allocator."""

    def __init__(self, counter: Counter) -> None:
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
