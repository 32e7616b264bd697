"""The memory of a rank's tensors: what is in use, and the most that was, action by action.

On the CPU torch's allocator does not count; the counting one (:mod:`cuda_ops.memory`) does, once it is installed, at
a fraction of a microsecond an allocation.  On a GPU torch's caching allocator counts by itself.  What libraries take
without asking torch is not in either: on a GPU the context and the libraries' own workspaces, on the CPU little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cuda_ops.memory import MemoryMeter, available, meter_of
from planner.ir.errors import OutOfMemoryError, UsageError

__all__ = ["MemoryMeter", "limit_memory", "meter_of", "out_of_memory", "storage_bytes", "with_peak"]

T = TypeVar("T")

_REFUSED = "DefaultCPUAllocator: can't allocate memory"


def limit_memory(meter: MemoryMeter | None, num_bytes: int) -> None:
    """From now on a rank may have ``num_bytes`` of tensors; 0: as many as there are.

    Raises:
        UsageError: nothing counts them.
    """
    if meter is not None:
        meter.limit(num_bytes or None)
    elif num_bytes:
        why = available() or "tensors are on a device that torch does not count"
        raise UsageError("memory cannot be limited", [why], ["leave out --memory-limit"])


def out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """The error as ours if memory ran out; torch's own allocator on the CPU has no kind of error for that."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and _REFUSED not in str(error):
        return None
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return OutOfMemoryError("out of memory", [text])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of ``tensors``; memory that several of them share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def with_peak(run: Callable[[], T]) -> tuple[T, int]:
    """What ``run()`` returns, and by how many bytes it raised the memory in use at most: where nothing else counts.

    Every allocation of torch's allocator is recorded, so ``run`` is slower than otherwise.  Not seen: what libraries
    allocate on their own, and the release of what was there before; so let go of that first.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        result = run()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    in_use = peak = 0
    for _, num_bytes in changes:
        in_use += num_bytes
        peak = max(peak, in_use)
    return result, peak
