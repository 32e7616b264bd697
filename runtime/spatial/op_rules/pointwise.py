"""Elementwise operators: the same part of everything, constants included.

Some do not pass on gradients, to one of their inputs or to any; autograd's graph has them all (see ``empties``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from runtime.spatial.empties import connected_to_all, empty_like_done
from runtime.spatial.step import Step, along, broadcast_part, gathered

_CHANNEL = 1

_MODELLED = ("type_as", "expand_as")
"""Operators that read of an input what it is like, and nothing else."""


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The operator on the part's elements."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    if not step.memo.get("plain"):
        constants = [name for name, each in found.items() if isinstance(each, Tensor) and step.input_of(name) is None]
        step.memo["plain"] = not constants
        found |= {name: _part(step, found[name]) for name in constants}
    result = op(**found)
    if isinstance(result, Tensor) and result.requires_grad and not any(name in _name(step) for name in _MODELLED):
        return result
    return connected_to_all(step, result, found)


def _part(step: Step, constant: Tensor) -> Tensor:
    shape = step.layer.outputs[0].shape
    if "prelu" not in _name(step):
        return broadcast_part(constant, shape, step.done)
    return constant if constant.numel() == 1 else along(constant, 0, shape[_CHANNEL], step.done[_CHANNEL])


def _name(step: Step) -> str:
    return str(step.layer.attributes.get("op", ""))
