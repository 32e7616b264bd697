"""Normalisation over sites: of the whole batch, or of each sample."""

from __future__ import annotations

import torch
from torch import nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn import functional
from cuda_ops.sparse.nn.checks import require_channels
from cuda_ops.sparse.nn.tensor import SparseTensor


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation over all sites of all samples, with the parameters and buffers of torch's BatchNorm1d."""

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class.

        Raises:
            SparseInputError: another number of channels, or one site alone in training.
        """
        require_channels(input.feats, self.num_features, "BatchNorm")
        training = self.training or self.running_mean is None
        tracked = not self.training or self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return functional.batch_norm(
            input,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
            training,
            momentum,
            self.eps,
        )


class GroupNorm(nn.Module):
    """Normalisation of each sample's groups of channels over its sites.

    Args:
        num_groups: how many groups the channels fall into.
        num_channels: of the features; a multiple of ``num_groups``.
        eps: added to the variance.
        affine: scale and shift each channel.
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise SparseInputError(
                "channels in equal groups",
                where=type(self).__name__,
                found=f"{num_channels} channels in {num_groups} groups",
                expected="a multiple",
                remedy="choose a number of groups that divides the channels",
            )
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = nn.Parameter(torch.ones(num_channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_channels)) if affine else None

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        require_channels(input.feats, self.num_channels, type(self).__name__)
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Groups and channels."""
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"


class InstanceNorm(GroupNorm):
    """Normalisation of each sample's channels, one by one, over its sites; it keeps no running statistics.

    Args:
        num_features: channels.
        eps: added to the variance.
        affine: scale and shift each channel; off unless asked for, as in torch.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__(num_features, num_features, eps, affine)
