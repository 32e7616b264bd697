"""Embedding: the columns of the table that this rank has, at the places of its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.spatial.empties import empty_like_done
from runtime.spatial.step import Step, along, broadcast_part, gathered


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The operator on the part's indices and columns."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    shape = step.layer.outputs[0].shape
    if step.input_of("indices") is None:
        found["indices"] = broadcast_part(found["indices"], shape[:-1], step.done[:-1])
    if step.input_of("weight") is None:
        found["weight"] = along(found["weight"], 1, shape[-1], step.done[-1])
    return op(**found)
