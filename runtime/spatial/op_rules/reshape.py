"""Views, permutations and expansion: the same elements, in the shape of the part.

    [2, 8, 4, 4] -> flatten(2) -> [2, 8, 16]        a rank with channels [0, 3) makes [2, 3, 16] of [2, 3, 4, 4]

What is read may be more than the part, along dims that do not stay apart; then the part is cut from what it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.ir.box import Box, whole
from planner.ir.graph import SAMPLE
from runtime.spatial.empties import connected_to_all, empty_like_done
from runtime.spatial.op_rules import opaque
from runtime.spatial.step import Step, gathered, shape_of, within

_PERMUTATIONS = frozenset({"movedim", "permute", "swapaxes", "swapdims", "t", "transpose"})
"""Operators that put dims in another order; they take no sizes."""


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The operator with the sizes of this rank's part."""
    if not step.layer.inputs or len(step.layer.outputs) > 1:
        return opaque.run(step, op, arguments)
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    name = str(step.layer.attributes.get("op", "")).split(".")[1]
    made = _made(step)
    if name in _PERMUTATIONS:
        return within(op(**found), made, step.done)
    x = next(value for argument, value in found.items() if step.input_of(argument) == 0)
    result = within((x.expand if name == "expand" else x.reshape)(shape_of(made)), made, step.done)
    return connected_to_all(step, result, found) if len(step.layer.inputs) > 1 else result  # view_as has a model


def _made(step: Step) -> Box:
    """What all that is read makes: the part along dims that stay apart, everything along others."""
    spec, kept = step.layer.outputs[0], step.layer.attributes.get("kept")
    if not isinstance(kept, tuple):
        return opaque.made(spec, step.done)
    return tuple(
        interval if dim >= 0 or name == SAMPLE else total
        for dim, name, interval, total in zip(kept, spec.dims, step.done, whole(spec.shape), strict=True)
    )
