"""The most memory that a step needs, counted from every allocation that torch makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind ``tensors``; memory that several of them share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def with_peak(run: Callable[[], T]) -> tuple[T, int]:
    """What ``run()`` returns, and by how many bytes it raised the memory in use at most.

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
