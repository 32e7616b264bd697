"""A clock that tells what kernels would take, and a meter of the memory that fake tensors would have.

Both see each operator as torch's dispatcher is asked for it, forward and backward alike.  They have the faces of those
that time and count real passes (:class:`profiler.measure.noise.LapClock`, :class:`cuda_ops.memory.MemoryMeter`), so
that layers are run, halved and watched by the same code.

What an operator allocates for itself and frees before it returns is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cuda_ops._torch import OpOverload
from planner.extras.kernels.estimates import NOTHING, Estimate
from profiler.measure.memory import OperatorMemory

PriceCall = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any], Any], Estimate]
"""What an operator takes, given its arguments and its results."""

EstimatesByKind = tuple[Estimate, ...]
"""By kind of device."""


class OperatorWatch(OperatorMemory):  # type: ignore[no-untyped-call]  # torch does not type it
    """Adds up time and memory of what runs within it.

    Args:
        prices: of each kind of device.
    """

    def __init__(self, prices: tuple[PriceCall, ...]) -> None:
        super().__init__()
        self._prices = prices
        self._times: EstimatesByKind = (NOTHING,) * len(prices)
        self._priced: dict[Any, EstimatesByKind] = {}

    def ran(
        self, func: OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any], operands: list[Any], result: Any
    ) -> None:
        """Adds what it takes."""
        key = (func, *(_sort(each) for each in operands))
        times = self._priced.get(key)
        if times is None:
            times = self._priced[key] = tuple(price(func, args, keywords, result) for price in self._prices)
        self._times = added(self._times, times)

    def take(self) -> EstimatesByKind:
        """What ran since this was last called."""
        times = self._times
        self._times = (NOTHING,) * len(self._prices)
        return times


def added(one: EstimatesByKind, other: EstimatesByKind) -> EstimatesByKind:
    """By kind of device."""
    return tuple(a if b is NOTHING else b if a is NOTHING else a + b for a, b in zip(one, other, strict=True))


class WatchClock:
    """A clock whose laps are :data:`EstimatesByKind`."""

    def __init__(self, watch: OperatorWatch) -> None:
        self._watch = watch

    def start(self, of: object = None) -> None:
        """See :class:`profiler.measure.noise.LapClock`, also for the others."""
        self._watch.take()

    def stop(self, started: None) -> EstimatesByKind:
        return self._watch.take()

    def settle(self) -> None:
        """Nothing waits."""

    def seconds(self, lap: EstimatesByKind) -> float:
        return lap[0].seconds


def _sort(value: Any) -> Any:
    """What an argument adds to the price."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.is_contiguous()
    return value if isinstance(value, (int, float, bool, str, type(None))) else repr(value)
