"""Sums over the ranks of a step's group, of small tensors: every rank sends its own to every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.spatial.step import Step
from runtime.transport.small_allgather import Rows, Table, Tell

_HALVES = (torch.float16, torch.bfloat16)


def rows_of(step: Step) -> Tell:
    """How the ranks of ``step.group`` tell each other rows."""
    if "rows" not in step.memo:
        key = step.key(len(step.layer.inputs))
        step.memo["rows"] = Rows(step.wire.transport, step.group, step.wire.deadline_s, key)
    tell: Tell = step.memo["rows"]
    return tell


def rows_among(step: Step, positions: tuple[int, ...]) -> Tell:
    """How some ranks of the stage, by position, tell each other rows; this one among them."""
    if ("rows", positions) not in step.memo:
        ranks = tuple(step.wire.ranks[position] for position in positions)
        step.memo["rows", positions] = Rows(step.wire.transport, ranks, step.wire.deadline_s)
    tell: Tell = step.memo["rows", positions]
    return tell


def start_sum(step: Step, tensor: Tensor) -> Table:
    """Start to tell the ranks of ``step.group`` a tensor, whose sum is that of the table's rows."""
    return rows_of(step)([tensor.reshape(-1)], sum_dtype(tensor.dtype))


def summed(step: Step, term: Tensor) -> Tensor:
    """The sum over ``step.group`` of what each rank has, whole on each of them; differentiable.

    Backward adds up what flows back on the ranks, since each has the gradient of its own copy of the sum.
    """
    apply: Callable[[Tensor, Step], Tensor] = _Summed.apply
    return apply(term, step)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are not kept in half precision."""
    return torch.float32 if dtype in _HALVES else dtype


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, step: Step) -> Tensor:
        ctx.step = step
        return start_sum(step, term).wait().sum(0).view(term.shape).to(term.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        step: Step = ctx.step
        table = start_sum(step, gradient)
        if step.later is not None:
            step.later.run()
        return table.wait().sum(0).view(gradient.shape).to(gradient.dtype), None
