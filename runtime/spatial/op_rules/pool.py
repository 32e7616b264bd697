"""Max and average pooling: padding lies at the tensor's own edges only, and averages divide as one device does.

    kernel 3, stride 2, padding 1:      . 0 1 2 3 4 5 6 7 .
    output [0, 2) reads [-1, 4)         . 0 1 2 3               a row of padding on the left
    output [2, 4) reads  [3, 8)                 3 4 5 6 7       none: 3 is a row of the neighbour

What reaches outside is padding.  Where the operator can pad by itself, it does so on both sides, and results beyond the
part are cut off; else padding is put in front.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from planner.ir.box import Interval
from runtime.spatial.empties import empty_like_done
from runtime.spatial.step import Step, gathered, global_places


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The windows of this rank's part."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    way = step.memo.get("way")
    if way is None:
        way = step.memo["way"] = _Way.of(step, arguments)
    return way.averages(op, found) if "avg" in _name(step) else way.maxima(op, found)


@dataclass(frozen=True, slots=True)
class _Window:
    """A pooling window along one dim, and the part that is done of it.

    Attributes:
        outputs: of this rank.
        extent, available: rows of the tensor, and those of them that this rank has.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int
    outputs: Interval
    extent: int
    available: Interval

    @property
    def left(self) -> int:
        """Rows of padding that the first output reads."""
        return max(0, self.padding - self.outputs.start * self.stride)

    @property
    def right(self) -> int:
        """Rows of padding that the last output reads."""
        reach = (self.outputs.stop - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1
        return max(0, reach - self.extent)

    def has_own_padding(self, rounds_up: bool) -> bool:
        """Whether the operator's own padding makes at least these outputs, its windows beginning at the same rows."""
        if self.left not in (0, self.padding) or len(self.available) < self.kernel:
            return False  # nor does torch pad in three dims what is smaller than the window
        return self.outputs_made(self.left, rounds_up) >= len(self.outputs)

    def outputs_made(self, padding: int, rounds_up: bool) -> int:
        """Outputs that the operator makes of the rows available."""
        rows = len(self.available) + 2 * padding - self.dilation * (self.kernel - 1) - 1
        made = (-(-rows // self.stride) if rounds_up else rows // self.stride) + 1
        if rounds_up and (made - 1) * self.stride >= len(self.available) + padding:
            made -= 1  # a window must not begin in the padding behind the tensor
        return made

    def divisors(self, counts_padding: bool) -> list[int]:
        """Per output, how many rows one device counts (``at::native::avg_pool2d``)."""
        found = []
        for output in range(self.outputs.start, self.outputs.stop):
            start = output * self.stride - self.padding
            stop = min(start + self.kernel, self.extent + self.padding)
            found.append(stop - start if counts_padding else min(stop, self.extent) - max(start, 0))
        return found


@dataclass(frozen=True, slots=True)
class _Way:
    """How the operator is called.

    Attributes:
        settings: its arguments beside the tensor.
        front: rows to be put around the tensor beforehand, as ``functional.pad`` takes them; empty: it pads by itself.
        factor: by what averages over whole windows are multiplied; None: by 1.
    """

    windows: tuple[_Window, ...]
    settings: dict[str, Any]
    front: tuple[int, ...]
    factor: Tensor | None

    @classmethod
    def of(cls, step: Step, arguments: dict[str, Any]) -> _Way:
        windows, is_average = _windows(step), "avg" in _name(step)
        rounds_up = bool(arguments["ceil_mode"]) or any(window.right and not window.left for window in windows)
        rounds_up = rounds_up and not is_average
        settings: dict[str, Any] = {
            "kernel_size": [window.kernel for window in windows],
            "stride": [window.stride for window in windows],
            "ceil_mode": rounds_up,
        }
        front: tuple[int, ...] = ()
        if all(window.has_own_padding(rounds_up) for window in windows):
            settings["padding"] = [window.left for window in windows]
        else:
            front = tuple(rows for window in reversed(windows) for rows in (window.left, window.right))
            settings |= {"padding": [0] * len(windows), "ceil_mode": False}
        if not is_average:
            settings["dilation"] = [window.dilation for window in windows]
            return cls(windows, settings, front, None)
        settings["count_include_pad"] = True
        return cls(windows, settings, front, _factor(windows, arguments))

    def maxima(self, op: Callable[..., Any], found: dict[str, Any]) -> Any:
        x = found["self"]
        result = op(**{**found, **self.settings, "self": self._padded(x, _lowest(x))})
        if isinstance(result, Tensor):
            return self._cut(result)
        values, places = result
        starts = [window.available.start for window in self.windows]
        if self.front:
            starts = [start - window.left for start, window in zip(starts, self.windows, strict=True)]
        local = [len(w.available) + (w.left + w.right if self.front else 0) for w in self.windows]
        extents = [window.extent for window in self.windows]
        return self._cut(values), global_places(self._cut(places), local, starts, extents)

    def averages(self, op: Callable[..., Any], found: dict[str, Any]) -> Tensor:
        result = self._cut(op(**{**found, **self.settings, "self": self._padded(found["self"], 0)}))
        if self.factor is None:
            return result
        return result * self.factor.to(result)

    def _padded(self, x: Tensor, value: float) -> Tensor:
        return functional.pad(x, self.front, value=value) if any(self.front) else x

    def _cut(self, result: Tensor) -> Tensor:
        for dim, window in enumerate(self.windows, result.ndim - len(self.windows)):
            if result.shape[dim] != len(window.outputs):
                result = result.narrow(dim, 0, len(window.outputs))
        return result


def _name(step: Step) -> str:
    return str(step.layer.attributes.get("op", ""))


def _windows(step: Step) -> tuple[_Window, ...]:
    attributes: Any = step.layer.attributes
    numbers = [attributes[name] for name in ("kernel", "stride", "padding", "dilation")]
    count = len(numbers[0])
    shape, available = step.division.inputs[0].shape, step.exchange(0).wanted
    return tuple(
        _Window(kernel, stride, padding, dilation, outputs, extent, rows)
        for kernel, stride, padding, dilation, outputs, extent, rows in zip(
            *numbers,
            step.done[-count:],
            shape[-count:],
            available[-count:],
            strict=True,
        )
    )


def _factor(windows: tuple[_Window, ...], arguments: dict[str, Any]) -> Tensor | None:
    """What an average over whole windows, padding included, is short of."""
    if arguments.get("divisor_override"):
        return None
    full = prod(window.kernel for window in windows)
    divisors = [window.divisors(bool(arguments["count_include_pad"])) for window in windows]
    if all(count == window.kernel for window, counts in zip(windows, divisors, strict=True) for count in counts):
        return None
    vectors = [torch.tensor(counts, dtype=torch.float64) for counts in divisors]
    return full / reduce(lambda found, vector: found.unsqueeze(-1) * vector, vectors)


def _lowest(x: Tensor) -> float:
    """What loses against everything."""
    return float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
