"""Operators of which nothing but samples is known to be apart: computed whole for the part's samples, then cut.

Ranks that share samples do the same work; each keeps its part, and hence its share of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from planner.ir.box import Box, whole
from planner.ir.graph import SAMPLE, TensorSpec
from runtime.spatial.empties import connected_to_all, empty_like_done
from runtime.spatial.step import Step, gathered, within


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The part of every output."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    result, outputs = connected_to_all(step, op(**found), found), step.layer.outputs
    if isinstance(result, Tensor):
        return within(result, made(outputs[0], step.done), step.done)
    boxes = [step.done, *(step.division.held(index)[step.position] for index in range(1, len(outputs)))]
    parts = zip(outputs, boxes, strict=True)
    return tuple(_cut(each, *next(parts)) if isinstance(each, Tensor) else each for each in result)


def made(spec: TensorSpec, done: Box) -> Box:
    """The samples of a part, whole along other dims."""
    return tuple(
        interval if dim == SAMPLE else total
        for dim, interval, total in zip(spec.dims, done, whole(spec.shape), strict=True)
    )


def _cut(x: Tensor, spec: TensorSpec, box: Box) -> Tensor:
    return within(x, made(spec, box), box)
