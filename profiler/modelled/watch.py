"""A clock that tells what kernels would take, and a meter of the memory that fake tensors would have.

Both see each operator as torch's dispatcher is asked for it, forward and backward alike.  They have the faces of those
that time and count real passes (:class:`profiler.measure.noise.LapClock`, :class:`cuda_ops.memory.MemoryMeter`), so
that layers are run, halved and watched by the same code.

What an operator allocates for itself and frees before it returns is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cuda_ops._torch import OpOverload, TorchDispatchMode, storage_id, tree_leaves
from planner.kernels import NOTHING, Estimate

Price = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any], Any], Estimate]
"""What an operator takes, given its arguments and its results."""

Times = tuple[Estimate, ...]
"""By kind of device."""


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Adds up time and memory of what runs within it.

    Args:
        prices: of each kind of device.
    """

    def __init__(self, prices: tuple[Price, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.meter = FakeMeter()
        self._prices = prices
        self._times: Times = (NOTHING,) * len(prices)
        self._priced: dict[Any, Times] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchDispatchMode`."""
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if func.namespace == "prim":
            return result
        operands = tree_leaves((args, dict(keywords)))
        self.meter.note(operands, result)
        key = (func, *(_sort(each) for each in operands))
        times = self._priced.get(key)
        if times is None:
            times = self._priced[key] = tuple(price(func, args, keywords, result) for price in self._prices)
        self._times = added(self._times, times)
        return result

    def take(self) -> Times:
        """What ran since this was last called."""
        times, self._times = self._times, (NOTHING,) * len(self._prices)
        return times


def added(one: Times, other: Times) -> Times:
    """By kind of device."""
    return tuple(a if b is NOTHING else b if a is NOTHING else a + b for a, b in zip(one, other, strict=True))


class WatchClock:
    """A clock whose laps are :data:`Times`."""

    def __init__(self, watch: OperatorWatch) -> None:
        self._watch = watch

    def start(self, of: object = None) -> None:
        """See :class:`profiler.measure.noise.LapClock`, also for the others."""
        self._watch.take()

    def stop(self, started: None) -> Times:
        return self._watch.take()

    def settle(self) -> None:
        """Nothing waits."""

    def seconds(self, lap: Times) -> float:
        return lap[0].seconds


class FakeMeter:
    """Counts storages while they live."""

    def __init__(self) -> None:
        self._alive: dict[int, int] = {}
        self._peak = 0
        self.current_bytes = 0

    def take_peak(self) -> int:
        """See :class:`cuda_ops.memory.MemoryMeter`."""
        peak, self._peak = max(self._peak, self.current_bytes), self.current_bytes
        return peak

    def limit(self, num_bytes: int | None) -> None:
        """There is none."""

    def note(self, operands: list[Any], made: Any) -> None:
        """Counts the storages of ``made`` that are none of those of ``operands``."""
        old = {storage_id(each) for each in operands if isinstance(each, Tensor)}
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor):
                continue
            storage, name = tensor.untyped_storage(), storage_id(tensor)
            if name in old or name in self._alive:
                continue
            self._alive[name] = storage.nbytes()
            self.current_bytes += storage.nbytes()
            self._peak = max(self._peak, self.current_bytes)
            weakref.finalize(storage, self._gone, name)

    def _gone(self, name: int) -> None:
        self.current_bytes -= self._alive.pop(name)


def _sort(value: Any) -> Any:
    """What an argument adds to the price."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.is_contiguous()
    return value if isinstance(value, (int, float, bool, str, type(None))) else repr(value)
