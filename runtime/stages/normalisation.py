"""Batch normalisation whose statistics are those of all ranks' samples together.

Exactly batch normalisation over the union of the rows (Ioffe and Szegedy 2015, algorithm 1), for shares of any size,
also an empty one.  With n_r rows of mean m_r and squared deviations q_r on rank r (Chan, Golub and LeVeque 1979):

    n = sum n_r       mean = sum n_r m_r / n       variance = sum (q_r + n_r (m_r - mean)^2) / n

and backward, with x^ = (x - mean) / sigma, where the two sums run over the rows of all ranks:

    dx = w / sigma (dy - sum(dy) / n - x^ sum(dy x^) / n)

One reduction forward (3 numbers a channel and rank), one backward (2 numbers a channel).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.autograd.function import FunctionCtx, once_differentiable

from planner.ir.errors import StageFailedError
from runtime.stages.aliases import arguments_of
from runtime.stages.cut import Rule

_BATCH_NORM = torch.ops.aten.batch_norm.default


def synchronise(reduce: Callable[[torch.Tensor], None], group_size: int, index: int) -> Rule:
    """The rule that puts :func:`synchronised_batch_norm` in place of batch normalisation in training mode."""

    def batch_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        return synchronised_batch_norm(
            x, weight, bias, running_mean, running_var, momentum, eps, reduce, group_size, index
        )

    def rule(node: fx.Node) -> Callable[..., torch.Tensor] | None:
        return batch_norm if node.target is _BATCH_NORM and arguments_of(node)["training"] is True else None

    return rule


def synchronised_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    reduce: Callable[[torch.Tensor], None],
    group_size: int,
    index: int,
) -> torch.Tensor:
    """Batch normalisation in training mode over the rows of a group of ranks.

    Args:
        x: this rank's share, (rows, channels, ...); rows may be 0.
        weight: (channels,) or None for 1; its gradient is this rank's part of the sum, as for any other parameter.
        bias: (channels,) or None for 0; likewise.
        running_mean: (channels,), updated in place with the mean over the group; None to keep none.
        running_var: (channels,), updated in place with the unbiased variance over the group.
        momentum: share of the new statistics in the running ones.
        eps: added to the variance.
        reduce: sums a tensor over the group in place; called once here, and once in backward where ``x`` needs a
            gradient, which must be the case on all ranks of the group or on none.
        group_size: number of ranks in the group.
        index: of this rank in the group.

    Raises:
        StageFailedError: the group has fewer than two values a channel, hence no variance.
    """
    num_local = x.numel() // x.shape[1] if x.shape[1] else 0
    table = _gather(x, num_local, reduce, group_size, index)
    counts, means, squares = table.split((1, x.shape[1], x.shape[1]), dim=1)
    num_values = counts.sum()
    if num_local < 2 and num_values.item() < 2:  # no wait for the device in the ordinary case
        raise StageFailedError(f"batch norm of {int(num_values)} values a channel, expected at least 2")
    mean = (counts * means).sum(0) / num_values
    square = (squares + counts * (means - mean).square()).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((square / (num_values - 1)).to(running_var.dtype), momentum)
    dtype = _statistics_dtype(x, weight)
    mean, variance = mean.to(dtype), (square / num_values).to(dtype)
    return _Normalise.apply(x, weight, bias, mean, variance, num_values, eps, reduce)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        num_values: torch.Tensor,
        eps: float,
        reduce: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance, num_values)
        ctx.eps, ctx.reduce = eps, reduce
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance, num_values = ctx.saved_tensors
        dweight, dbias = _local_sums(dy, x, weight, mean, variance, ctx.eps)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack((dweight, dbias))
            ctx.reduce(sums)
            scale = (variance + ctx.eps).rsqrt()
            if weight is not None:
                scale = scale * weight
            slope, offset = (-scale * sums / num_values).to(mean.dtype)
            # The whole correction, slope x^ + offset, is itself one pass of batch normalisation.
            dx = torch.batch_norm(x, slope, offset, mean, variance, False, 0.0, ctx.eps, False)
            dx.addcmul_(dy, scale.to(dy.dtype).view(1, -1, *[1] * (x.dim() - 2)))
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return dx, dweight if needs_weight else None, dbias if needs_bias else None, *[None] * 5


@torch.no_grad()
def _gather(
    x: torch.Tensor, num_local: int, reduce: Callable[[torch.Tensor], None], group_size: int, index: int
) -> torch.Tensor:
    """(group_size, 1 + 2 channels): each rank's count, then its means, then its squared deviations.

    A sum of rows of which all but one are zero is exact: the result has the same bits on every rank.
    """
    table = torch.zeros(group_size, 1 + 2 * x.shape[1], dtype=torch.float64, device=x.device)
    if num_local:
        statistics = _statistics_dtype(x, None)
        mean, variance = torch.batch_norm_update_stats(x.to(statistics), None, None, 0.0)
        table[index, 0] = num_local
        table[index, 1:] = torch.cat((mean, variance * num_local))
    reduce(table)
    return table


def _local_sums(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum(dy x^) and sum(dy) over this rank's rows, (channels,) each."""
    if not x.numel():  # torch's CPU kernel divides by zero here
        return torch.zeros_like(mean), torch.zeros_like(mean)
    _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, mean, variance, None, None, False, eps, [False, True, True]
    )
    return dweight, dbias


def _statistics_dtype(x: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    """Statistics are kept in the parameters' dtype, and never in half precision without them."""
    if weight is not None:
        return weight.dtype
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
