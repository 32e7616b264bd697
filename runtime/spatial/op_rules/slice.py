"""Slices and division into parts: what the part reads is what it makes, but for a stride and for dims that are dropped.

Of several outputs each takes its own part from what is read, which holds the parts of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from planner.ir.box import Box, Interval
from runtime.spatial.empties import connected, empty_like_done
from runtime.spatial.step import Step, gathered, shape_of, within


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The parts of all outputs."""
    found = gathered(step, arguments)
    covered = step.exchange(0).wanted
    if not all(len(interval) for interval in covered):
        nothing = empty_like_done(step, found)
        return [nothing] if isinstance(nothing, Tensor) and _gives_list(step) else nothing
    attributes: Any = step.layer.attributes
    x = next(value for name, value in found.items() if step.input_of(name) == 0)
    dim, drops = attributes["dim"], bool(attributes.get("drops"))
    rows = [_Rows(dim, start, attributes.get("step", 1), drops) for start in attributes["starts"]]
    boxes = [step.done, *(step.division.held(output)[step.position] for output in range(1, len(rows)))]
    parts = [each.of(x, covered, box) for each, box in zip(rows, boxes, strict=True)]
    return parts[0] if len(parts) == 1 and not _gives_list(step) else parts


@dataclass(frozen=True, slots=True)
class _Rows:
    """One output, which begins at ``start`` along ``dim``."""

    dim: int
    start: int
    stride: int
    drops: bool

    def of(self, x: Tensor, covered: Box, box: Box) -> Tensor:
        """The part ``box`` of the output, from ``x``, which covers ``covered``."""
        if not all(len(interval) for interval in box):
            return connected(x.new_empty(shape_of(box)), x)
        before, after = box[: self.dim], box[self.dim + (not self.drops) :]
        if self.drops:
            rows = Interval(self.start, self.start + 1)
        else:
            o = box[self.dim]
            rows = Interval(self.start + o.start * self.stride, self.start + (o.stop - 1) * self.stride + 1)
        x = within(x, covered, (*before, rows, *after))
        if self.drops:
            return x.squeeze(self.dim)
        return x if self.stride == 1 else x[(slice(None),) * self.dim + (slice(None, None, self.stride),)]


def _gives_list(step: Step) -> bool:
    """Whether the operator gives a list even of one part."""
    name = str(step.layer.attributes.get("op", ""))
    return any(word in name for word in ("split", "chunk", "unbind"))
