"""Sums over the ranks of a step's group, of small tensors: every rank sends its own to every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.spatial.layer_shard import LayerShard
from runtime.transport.small_allgather import RowGather, RowTable, Tell

_HALVES = (torch.float16, torch.bfloat16)


def rows_of(step: LayerShard) -> Tell:
    """How the ranks of ``step.group`` tell each other rows."""
    if "rows" not in step.memo:
        key = step.key(len(step.layer.inputs))
        step.memo["rows"] = RowGather(step.wire.transport, step.group, step.wire.deadline_s, key)
    tell: Tell = step.memo["rows"]
    return tell


def rows_among(step: LayerShard, positions: tuple[int, ...]) -> Tell:
    """How some ranks of the stage, by position, tell each other rows; this one among them."""
    if ("rows", positions) not in step.memo:
        ranks = tuple(step.wire.ranks[position] for position in positions)
        step.memo["rows", positions] = RowGather(step.wire.transport, ranks, step.wire.deadline_s)
    tell: Tell = step.memo["rows", positions]
    return tell


def start_sum(step: LayerShard, tensor: Tensor) -> RowTable:
    """Start to tell the ranks of ``step.group`` a tensor, whose sum is that of the table's rows."""
    return rows_of(step)([tensor.reshape(-1)], sum_dtype(tensor.dtype))


def summed(step: LayerShard, term: Tensor) -> Tensor:
    """The sum over ``step.group`` of what each rank has, whole on each of them; differentiable.

    Backward adds up what flows back on the ranks, since each has the gradient of its own copy of the sum.
    """
    apply: Callable[[Tensor, LayerShard], Tensor] = _Summed.apply
    return apply(term, step)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are not kept in half precision."""
    return torch.float32 if dtype in _HALVES else dtype


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, step: LayerShard) -> Tensor:
        ctx.step = step
        return start_sum(step, term).wait().sum(0).view(term.shape).to(term.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        step: LayerShard = ctx.step
        table = start_sum(step, gradient)
        if step.later is not None:
            step.later.run()
        return table.wait().sum(0).view(gradient.shape).to(gradient.dtype), None
