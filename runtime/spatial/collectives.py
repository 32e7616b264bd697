"""Sums over the ranks of a step's group, of small tensors: every rank sends its own to every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.spatial.layer_shard import LayerShard, worked_out_once
from runtime.transport.small_allgather import PendingRows, RowGather, Tell

_HALVES = (torch.float16, torch.bfloat16)


@worked_out_once
def rows_of(shard: LayerShard) -> Tell:
    """How the ranks of ``shard.group`` tell each other rows."""
    return RowGather(shard.peers.transport, shard.group, shard.key(len(shard.layer.inputs)))


def rows_among(shard: LayerShard, positions: tuple[int, ...]) -> Tell:
    """How some ranks of the stage, by position, tell each other rows; this one among them."""
    if ("rows", positions) not in shard.memo:
        ranks = tuple(shard.peers.ranks[position] for position in positions)
        shard.memo["rows", positions] = RowGather(shard.peers.transport, ranks)
    tell: Tell = shard.memo["rows", positions]
    return tell


def start_sum(shard: LayerShard, tensor: Tensor) -> PendingRows:
    """Start to tell the ranks of ``shard.group`` a tensor, whose sum is that of the table's rows."""
    return rows_of(shard)([tensor.reshape(-1)], sum_dtype(tensor.dtype))


def summed(shard: LayerShard, term: Tensor) -> Tensor:
    """The sum over ``shard.group`` of what each rank has, whole on each of them; differentiable.

    Backward adds up what flows back on the ranks, since each has the gradient of its own copy of the sum.
    """
    apply: Callable[[Tensor, LayerShard], Tensor] = _Summed.apply
    return apply(term, shard)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are not kept in half precision."""
    return torch.float32 if dtype in _HALVES else dtype


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, shard: LayerShard) -> Tensor:
        ctx.shard = shard
        return start_sum(shard, term).wait().sum(0).view(term.shape).to(term.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shard: LayerShard = ctx.shard
        table = start_sum(shard, gradient)
        if shard.later is not None:
            shard.later.run()
        return table.wait().sum(0).view(gradient.shape).to(gradient.dtype), None
