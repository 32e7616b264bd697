"""A linear map of parts: rows cut along any dims, filters (output features) cut, input features shared.

y-stationary (``ways`` 1): all input features are gathered, and each rank makes its own filters with its part of the
weight.  x-stationary (as many ways as parts) and between: see :mod:`runtime.spatial.contraction`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from runtime.spatial.contraction import contract
from runtime.spatial.op_rules import _default
from runtime.spatial.step import Step, gathered


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The features that this rank keeps."""
    if step.division.ways == 1:
        return _default.run(step, op, arguments)
    found = gathered(step, arguments)
    result = contract(step, found["input"], found["weight"], partial(_multiply, op))
    bias: Tensor | None = found["bias"]
    return result if bias is None else result + bias.to(result.dtype)  # which autocast may have lowered


def _multiply(op: Callable[..., Any], x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = op(input=x, weight=weight, bias=None)
    return result
